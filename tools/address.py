"""Write the repository's address into every file that shows it: ``make address``, or ``make address URL=...``.

``Repository`` in pyproject.toml is the only address that is written by hand. This tool makes the site's address, the
links of the pages, CITATION.cff, the issue forms and the notebooks from it. It also writes the release's tag into links
to notebooks, so run it whenever the version changes. Code and workflows hold no address: they read pyproject.toml, or
ask the installed package or GitHub.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT, CITATION = "pyproject.toml", "CITATION.cff"


class Address(NamedTuple):
    """The parts of a repository's address, and the tag of the newest release."""

    owner: str
    name: str
    tag: str

    @property
    def repository(self) -> str:
        return f"https://github.com/{self.owner}/{self.name}"

    @property
    def site(self) -> str:
        return f"https://{self.owner}.github.io/{self.name}/"


def project(root: Path = ROOT) -> dict[str, Any]:
    """Read what pyproject.toml says of the package."""
    return tomllib.loads((root / PROJECT).read_text(encoding="utf-8"))["project"]


def parsed(url: str, version: str) -> Address:
    """Split a repository's address into its parts.

    Raises:
        SystemExit: it is not the address of a repository on GitHub.
    """
    found = re.fullmatch(r"https://github\.com/([\w-]+)/([\w.-]+?)(?:\.git)?/?", url)
    if not found:
        sys.exit(f"URL={url}: is not the address of a repository; write it as https://github.com/OWNER/NAME")
    return Address(found[1], found[2], f"v{version}")


def shows_it(path: Path) -> bool:
    """Whether this tool writes the address in a file: pages, notebooks, the citation, and GitHub's own files."""
    return path.suffix in (".md", ".ipynb", ".cff") or ".github" in path.parts or path.name == PROJECT


def tracked(root: Path) -> list[Path]:
    """List the files of the repository: those that git tracks, and new ones that it does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout.decode()
    return [path for name in listed.split("\0") if name and (path := root / name).is_file()]


def pattern(owner: str, name: str) -> re.Pattern[str]:
    """Match every spelling of an address: on GitHub, in Colab, in a badge, and that of the site."""
    hosted = rf"(?P<host>github(?:\.com[/:]|/(?:[\w-]+/)*?))(?P<owner>{owner})/{name}"
    site = rf"(?P<of_site>{owner})\.github\.io/{name}"
    return re.compile(rf"(?:{hosted}|{site})(?![\w-])")


def rewritten(text: str, old: Address, new: Address) -> str:
    """Put the new address into a text, and the newest release into its links to notebooks."""

    def replace(found: re.Match[str]) -> str:
        return f"{found['host']}{new.owner}/{new.name}" if found["host"] else f"{new.owner}.github.io/{new.name}"

    text = pattern(re.escape(old.owner), re.escape(old.name)).sub(replace, text)
    return re.sub(rf"(?<=github/{new.owner}/{new.name}/blob/)[\w.-]+(?=/notebooks/)", new.tag, text)


def citation(about: dict[str, Any], new: Address) -> str:
    """Make the text of CITATION.cff from what pyproject.toml says of the package."""
    fields = {
        "cff-version": "1.2.0",
        "message": "If you use this software or its course, please cite it as below.",
        "type": "software",
        "title": about["name"],
        "abstract": about["description"],
        "authors": [{"name": f"The {about['name']} contributors"}],
        "version": about["version"],
        "license": about["license"],
        "repository-code": new.repository,
        "url": new.site,
        "keywords": about["keywords"],
    }
    made = "# Made from pyproject.toml by `make address`. Edit that file instead.\n"
    return made + yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=120)


def wanted(root: Path = ROOT, url: str = "") -> dict[Path, str]:
    """Make the text of every file that shows the address; notebooks are made of their lessons instead."""
    about = project(root)
    old = parsed(about["urls"]["Repository"], about["version"])
    new = parsed(url or about["urls"]["Repository"], about["version"])
    texts = {}
    for path in tracked(root):
        if shows_it(path) and path.suffix != ".ipynb" and path.name != CITATION:
            texts[path] = rewritten(path.read_text(encoding="utf-8"), old, new)
    # The site's address follows from the repository's, whatever stood there.
    texts[root / PROJECT] = re.sub(r'(?m)^(Documentation = )".*"$', rf'\1"{new.site}"', texts[root / PROJECT])
    return texts | {root / CITATION: citation(about, new)}


def stale(root: Path = ROOT) -> list[str]:
    """List the files that do not say what pyproject.toml says."""
    return sorted(
        path.relative_to(root).as_posix()
        for path, text in wanted(root).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    )


def elsewhere(root: Path = ROOT) -> list[str]:
    """List the places with an address that nobody keeps up to date: in code, or of another owner."""
    about = project(root)
    ours = parsed(about["urls"]["Repository"], about["version"])
    anybody = pattern(r"[\w-]+", re.escape(ours.name))
    found = []
    for path in tracked(root):
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a font, a picture
            continue
        for match in anybody.finditer(text):
            owner = match["owner"] or match["of_site"]
            if owner != ours.owner or not shows_it(path):
                line = text.count("\n", 0, match.start()) + 1
                found.append(f"{path.relative_to(root).as_posix()}:{line}: {match[0]}")
    return found


def main() -> None:
    """Write all files, under a new address if one is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("url", nargs="?", default="", help="the new address, https://github.com/OWNER/NAME")
    for path, text in wanted(ROOT, parser.parse_args().url).items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))
    subprocess.run([sys.executable, "-m", "tools.notebooks"], cwd=ROOT, check=True)  # reads the new pyproject.toml


if __name__ == "__main__":
    main()
