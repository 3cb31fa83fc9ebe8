"""Fails a test that leaves something behind: a file in the checkout, or one in the folder that it was started in."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MADE_ELSEWHERE = {
    ".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".benchmarks", "__pycache__", "node_modules",
    "build",  # where executed lessons are kept
}  # fmt: skip


class Leftovers:
    """A plugin that starts tests in an empty folder, and looks through it and the checkout after each of them.

    A relative path leads away from the checkout then. What is written there names its test for certain, because each
    process of a run side by side has a folder of its own. The checkout is shared: when one test changes a file of it,
    the tests that run beside it fail too.

    Args:
        checkout: the folder that nobody may change.
    """

    def __init__(self, checkout: Path):
        self.checkout, self.started_in = checkout, Path.cwd()
        self.empty = Path(tempfile.mkdtemp(prefix="cria-tests-"))
        self.before = files(checkout)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Go there, before any fixture does something."""
        os.chdir(self.empty)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Look, after all fixtures have tidied up."""
        yield
        now = files(self.checkout)
        changed = sorted({os.path.relpath(path, self.checkout) for path, _ in now.items() ^ self.before.items()})
        written = sorted(path.name for path in self.empty.iterdir())
        self.before = now
        if written:  # the next test is not to blame for it
            shutil.rmtree(self.empty)
            self.empty.mkdir()
        found = [f"in the checkout: {', '.join(changed)}"] if changed else []
        found += [f"in the working folder: {', '.join(written)}"] if written else []
        if found:
            pytest.fail(
                f"{item.nodeid} left files that are new, changed or gone {'; '.join(found)}. Write to tmp_path. (In "
                "the checkout it may have been you, or a test that ran beside this one.)",
                pytrace=False,
            )

    def pytest_sessionfinish(self) -> None:
        """Go back."""
        os.chdir(self.started_in)
        shutil.rmtree(self.empty)


def files(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change of all files below a folder, but for what other tools make there."""
    found, todo = {}, [str(folder)]
    while todo:
        with os.scandir(todo.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    if entry.name not in MADE_ELSEWHERE:
                        todo.append(entry.path)
                else:
                    about = entry.stat(follow_symlinks=False)
                    found[entry.path] = (about.st_size, about.st_mtime_ns)
    return found
