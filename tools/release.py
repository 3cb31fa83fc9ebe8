"""Is this checkout the release that a tag names? ``make release-check TAG=v0.4.0``, before anything is published."""

import sys

from tools import address, notebooks


def wrong_with(tag: str) -> list[str]:
    """List what does not say that this is the release of that tag."""
    version = address.project()["version"]
    log = (address.ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    found = []
    if tag != f"v{version}":
        found.append(f"pyproject.toml: the version is {version}, and the tag is {tag}")
    if f"\n## [{tag[1:]}] - " not in log:
        found.append(f"CHANGELOG.md: has no section [{tag[1:]}]")
    if files := address.stale() + notebooks.stale():
        found.append(f"out of date, run make address: {', '.join(files)}")
    if places := address.elsewhere():
        found.append(f"addresses that nobody keeps up to date: {', '.join(places)}")
    return found


if __name__ == "__main__":
    if wrong := wrong_with(sys.argv[1]):
        sys.exit("\n".join(wrong))
