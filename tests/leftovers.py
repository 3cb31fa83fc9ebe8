"""Fails a test that leaves something behind: a file in the checkout, or one in the folder that it was started in."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MADE_ELSEWHERE = {
    ".git", ".venv", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".benchmarks", "__pycache__", "node_modules",
    "build",  # where executed lessons are kept
}  # fmt: skip
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
MOVES = {
    "os.mkdir": 1, "os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.symlink": 2, "os.link": 2, "sqlite3.connect": 1,
}  # fmt: skip
"""Python's own names for what changes a folder, and how many of its arguments are paths."""
State = tuple[int, int] | None


class Leftovers:
    """A plugin that starts tests in an empty folder, and looks after each of them at what it wrote there and elsewhere.

    A relative path leads away from the checkout then. Of the checkout a test answers for those files alone that its own
    process opened for writing or moved, as Python's audit events tell: so nobody fails because of an editor, a training
    or another test beside it. What no event tells of (a process that a test started, a library in C) is found at the
    end, when nobody knows which test it was: a line says so, and with ``CRIA_CHECKOUT=unchanged``, as CI sets it, the
    run fails.

    Args:
        checkout: the folder that nobody may change.
    """

    def __init__(self, checkout: Path):
        self.checkout, self.started_in = f"{checkout}{os.sep}", Path.cwd()
        self.empty = Path(tempfile.mkdtemp(prefix="cria-tests-"))
        self.at_first, self.touched = files(checkout), {}
        self.watching = True
        sys.addaudithook(self._hear)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        """Go to the empty folder, before any fixture does something."""
        os.chdir(self.empty)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """Look, after all fixtures have tidied up."""
        yield
        touched, self.touched = self.touched, {}
        changed = sorted(path for path, before in touched.items() if state(path) != before)
        written = sorted(path.name for path in self.empty.iterdir())
        if written:  # the next test is not to blame for it
            shutil.rmtree(self.empty)
            self.empty.mkdir()
        found = [f"in the checkout: {self._names(changed)}"] if changed else []
        found += [f"in the working folder: {', '.join(written)}"] if written else []
        if found:
            said = f"{item.nodeid} left files that are new, changed or gone {'; '.join(found)}. Write to tmp_path."
            pytest.fail(said, pytrace=False)

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Name what changed without an event."""
        if changed := self._changed():
            terminalreporter.write_line(f"changed in the checkout while the tests ran: {self._names(changed)}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Go back."""
        self.watching = False
        os.chdir(self.started_in)
        shutil.rmtree(self.empty)
        if os.environ.get("CRIA_CHECKOUT") == "unchanged" and self._changed() and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and arguments[2] & WRITES:
            self._touch(arguments[0])
        elif event in MOVES and self.watching:
            for path in arguments[: MOVES[event]]:
                self._touch(path)

    def _touch(self, path: Any) -> None:
        """Keep how a file of the checkout was before it is changed."""
        if self.watching and isinstance(path, str | os.PathLike):
            path = os.path.abspath(os.fsdecode(path))
            if path.startswith(self.checkout) and not MADE_ELSEWHERE & set(path.split(os.sep)):
                self.touched.setdefault(path, state(path))

    def _changed(self) -> list[str]:
        now = files(Path(self.checkout))
        return sorted({path for path, _ in now.items() ^ self.at_first.items()})

    def _names(self, paths: list[str]) -> str:
        return ", ".join(path.removeprefix(self.checkout) for path in paths)


def state(path: str) -> State:
    """Size and time of change of a file; of a folder only that it is there, and ``None`` of nothing."""
    try:
        about = os.lstat(path)
    except (OSError, ValueError):  # a name that no file can have
        return None
    return (0, 0) if os.path.isdir(path) else (about.st_size, about.st_mtime_ns)


def files(folder: Path) -> dict[str, State]:
    """The state of all files below a folder, but for what other tools make there."""
    found: dict[str, State] = {}
    for where, folders, names in os.walk(folder):
        folders[:] = set(folders) - MADE_ELSEWHERE
        found |= {path: state(path) for path in (os.path.join(where, name) for name in names)}
    return found
