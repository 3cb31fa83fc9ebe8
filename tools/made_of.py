"""What a lesson's pages are made of: the modules of ours that its kernel imported, and the files of ours that it read.

A lesson that starts Python processes counts as made of everything, because nobody looks into those.
"""

import ast
import functools
import hashlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EVERYTHING = "everything"
PACKAGE, RESULTS = ROOT / "cria_tricks", ROOT / "benchmarks" / "results"
STARTS = {"subprocess.Popen": 1, "os.posix_spawn": 1, "os.exec": 1, "os.system": 0, "os.fork": None, "os.forkpty": None}
"""Python's audit events of a new process, and which of their arguments are its words."""
SPAWNS = "multiprocessing.popen_spawn_posix"
"""The module by which Python starts processes without such an event."""
OURS = ("python", "cria", "torchrun")
"""Programs that run our package."""
_read: set[str] = set()


def watch() -> None:
    """Note from here on what this process reads and starts."""
    sys.addaudithook(_hear)


def used() -> list[str]:
    """List what this process has used: files and folders of the repository, or all of it."""
    if EVERYTHING in _read or SPAWNS in sys.modules:
        return [EVERYTHING]
    files = (getattr(module, "__file__", None) or "" for module in list(sys.modules.values()))
    modules = {os.path.relpath(file, ROOT) for file in files if file.startswith(f"{ROOT}{os.sep}")}
    return sorted(_read | {module for module in modules if not module.startswith((".venv", "build"))})


def digest(names: Iterable[str], lines: bool = False) -> str:
    """Hash files and folders of the repository.

    Args:
        names: relative to its root, or ``EVERYTHING``.
        lines: whether comments in Python files count, which move the lines behind them.
    """
    found = hashlib.sha256()
    for name in names:
        of_name = digest(_all_of_it(), lines) if name == EVERYTHING else _one(ROOT / name, lines)
        found.update(f"{name} {of_name}\n".encode())
    return found.hexdigest()[:16]


def _all_of_it() -> list[str]:
    package = (path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".jsonl", ".json"))
    return [str(path.relative_to(ROOT)) for path in sorted([*package, *RESULTS.rglob("*.json")])]


def _one(path: Path, lines: bool) -> str:
    if path.is_dir():  # Python tells of the top folder alone where a pattern is looked for in those below
        return " ".join(sorted(str(inside.relative_to(path)) for inside in path.rglob("*")))
    return _read_once(path, path.stat().st_mtime_ns, lines) if path.exists() else "gone"


@functools.lru_cache(maxsize=4096)
def _read_once(path: Path, written: int, lines: bool) -> str:
    """Hash a file, once until it is written again [ns]: thirty lessons ask for the same ones."""
    said = path.read_bytes()
    only_code = path.suffix == ".py" and not lines
    return hashlib.sha256(ast.dump(ast.parse(said)).encode() if only_code else said).hexdigest()


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if event in STARTS:
        place = STARTS[event]
        words = [] if place is None else arguments[place]
        words = [words] if isinstance(words, str | bytes) else words
        each = [word for part in words for word in os.fsdecode(part).split()]  # a shell gets all of them as one
        if place is None or any(os.path.basename(word).startswith(OURS) for word in each):
            _read.add(EVERYTHING)
    elif event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | os.PathLike):
        path = os.path.abspath(arguments[0])
        folder = event != "open"
        of_ours = path.startswith((str(RESULTS),) if folder else (str(RESULTS), str(PACKAGE)))
        if of_ours and not path.endswith((".py", ".pyc")):
            _read.add(os.path.relpath(path, ROOT))
