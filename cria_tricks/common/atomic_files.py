"""Folders and files that are there whole or not at all, also after a power cut.

A folder is written aside, hashed into a manifest, synced to the disk and only then renamed. So whatever stops a
process, at whatever moment: what has its name is whole, and the manifest says later whether it still is.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from cria_tricks.common.errors import (
    AGAIN,
    FORESEEN,
    WHOLE,
    BadInput,
    OutOfMemory,
    Unfinished,
    Unwritten,
    is_out_of_memory,
)
from cria_tricks.common.names import repeated
from cria_tricks.common.safe_files import leaves
from cria_tricks.common.units import human

MANIFEST = "manifest.json"
ASIDE = ".partial"
"""What a folder's name ends with while it is being written."""
OLD = ".old"
"""What the name of a folder that is being replaced ends with, for the moment between two renames."""


@contextlib.contextmanager
def new_folder(folder: Path, *, manifest: bool = True) -> Iterator[Path]:
    """Fill a folder aside; it takes its name, and the place of an older one, when the block ends well.

    Args:
        folder: the name it gets.
        manifest: whether to write one; a copy brings its own.

    Yields:
        The empty folder to fill.

    Raises:
        Unwritten: if the disk is full or cannot be written; what was there before still is.
        OutOfMemory, Unfinished: if something else went wrong in the block; the same holds.
    """
    aside = folder.with_name(folder.name + ASIDE)
    old = folder.with_name(folder.name + OLD)
    try:
        with unwritten_in_one_line(folder):
            _put_back(old, folder)
            for leftover in (aside, old):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
            _as_the_umask_says(aside)
            if manifest:
                _write_manifest(aside)
            # Content first: a power cut after the rename must not leave the new name over files that are not written.
            for path in aside.rglob("*"):
                _sync(path)
            _sync(aside)
            # A folder cannot replace another that holds files, so the old one steps aside for a moment.
            if folder.exists():
                folder.rename(old)
            aside.rename(folder)
            _sync(folder.parent)  # the names themselves are in there
    except BaseException:
        _put_back(old, folder)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _as_the_umask_says(folder: Path) -> None:
    """Give all files the mode that a plainly opened one gets; safetensors makes files that only their owner can read.

    The folder was made by mkdir, so its own mode shows the umask.
    """
    mode = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file() and path.stat().st_mode & 0o777 != mode:
            with contextlib.suppress(OSError):  # a file system without modes, such as Drive's
                path.chmod(mode)


def _put_back(old: Path, folder: Path) -> None:
    """After a stop between the two renames there is only the old one, under its passing name."""
    if old.exists() and not folder.exists():
        old.rename(folder)


def copy_folder(folder: Path, to: Path) -> None:
    """Copy a whole folder with its manifest, under the same promise.

    Raises:
        Unwritten: if it cannot be written there, or the copy is not what the manifest says.
    """
    with new_folder(to, manifest=False) as aside:
        shutil.copytree(folder, aside, dirs_exist_ok=True)
        wrong = damage(aside)
        if wrong:
            raise OSError(0, f"in the copy {wrong}")


def write_file(path: Path, content: str | bytes) -> None:
    """Write a small file, or replace it, in one stroke.

    Raises:
        Unwritten: if it cannot be written; an older one is still there.
    """
    aside = path.with_name(path.name + ASIDE)
    try:
        with unwritten_in_one_line(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, str):
                content = content.encode()
            aside.write_bytes(content)
            _sync(aside)
            aside.replace(path)
            _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Be the only process that writes into a folder; the system ends that with the process, however it ends.

    Raises:
        BadInput: if another process is at it.
    """
    with unwritten_in_one_line(folder):
        lock = (folder / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BadInput(f"--out {folder}: another run is writing there; wait for it, or name a new folder") from None
        except OSError:
            pass  # a file system without locks
        yield


def damage(folder: Path) -> str:
    """What is wrong with a folder, held against its manifest: ``"optimizer.pt is missing"``; empty when whole."""
    try:
        wanted = listed(folder)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except _Odd as error:
        return f"{MANIFEST} is damaged: {error}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is damaged"
    for name, written in wanted.items():
        try:
            found = entry(folder / name)
        except FileNotFoundError:
            return f"{name} is missing"
        except (OSError, ValueError) as error:
            return f"{name} cannot be read: {getattr(error, 'strerror', None) or error}"
        if found["bytes"] != written["bytes"]:
            return f"{name} has {found['bytes']} bytes, not the {written['bytes']} that were written"
        if found["sha256"] != written["sha256"]:
            return f"{name} has other content than was written"
    return ""


class _Odd(ValueError):
    """The manifest is JSON, but not as we write it."""


def listed(folder: Path) -> dict[str, Any]:
    """The manifest: ``bytes`` and ``sha256`` of every file, by its path in the folder.

    Raises:
        ValueError: if it lists a file twice or outside of the folder, none at all, or says something else of it.
    """
    text = (folder / MANIFEST).read_text(encoding="utf-8")
    files = json.loads(text, object_pairs_hook=_each_once)["files"]
    if files == {}:
        raise _Odd("it lists no file")
    for name, about in files.items():
        if leaves(name):
            raise _Odd(f"it lists {name!r}, which is outside the folder")
        if name == MANIFEST or PurePosixPath(name).as_posix() != name:
            raise _Odd(f"it lists {name!r}, which is the name of no file that it could know")
        if not _is_entry(about):
            raise _Odd(f"what it says of {name} is no size and sha256")
    if text != _as_text(files):
        raise _Odd("it is not as it was written")
    return files


def _is_entry(about: dict[str, Any]) -> bool:
    """Whether this is what :func:`entry` makes: a size and a sha256, and nothing else."""
    size = about["bytes"]
    sha256 = about["sha256"]
    is_size = type(size) is int and size >= 0
    return is_size and re.fullmatch("[0-9a-f]{64}", sha256) is not None and len(about) == 2


def _as_text(files: dict[str, Any]) -> str:
    return json.dumps({"files": files}, indent=2) + "\n"


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that comes twice, json takes the last; another reader may take the first."""
    twice = repeated([name for name, _ in pairs])
    if twice is not None:
        raise _Odd(f"it names {twice!r} twice")
    return dict(pairs)


def unlisted(folder: Path) -> tuple[str, ...]:
    """List the files that the manifest does not name."""
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    return tuple(sorted(present - set(listed(folder)) - {MANIFEST}))


@contextlib.contextmanager
def unwritten_in_one_line(path: Path) -> Iterator[None]:
    """Turn whatever goes wrong while a result is written into one sentence that names the result and the reason.

    Raises:
        Unwritten: if the disk is full, broken or protected. Libraries have many names for that.
        OutOfMemory: if there was no memory to write it.
        Unfinished: for everything else.
    """
    try:
        yield
    except FORESEEN:
        raise
    except OSError as error:
        raise Unwritten(path, error.strerror or str(error), error.errno) from None
    except Exception as error:
        if is_out_of_memory(error):
            raise OutOfMemory(f"{path}: cannot be written: out of memory; {WHOLE}: {AGAIN}") from None
        number = _system_error(error)
        if number:
            raise Unwritten(path, os.strerror(number), number) from None
        if _is_about_writing(error):
            existing = next(folder for folder in path.parents if folder.exists())
            free = shutil.disk_usage(existing).free
            raise Unwritten(path, f"the disk took only a part of it, {human(free)} are free") from None
        raise Unfinished(path, error) from error


def _system_error(error: Exception) -> int:
    """The system's number in an error of a library written in Rust; tokenizers raises a bare Exception with it."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else 0


def _is_about_writing(error: Exception) -> bool:
    """Whether torch or safetensors says, in its own way, that the disk did not take a file."""
    if type(error).__name__ == "SafetensorError":
        return True
    words = ("PytorchStreamWriter", "inline_container")  # of the C++ code behind torch.save
    return type(error) is RuntimeError and any(word in str(error) for word in words)


def _write_manifest(folder: Path) -> None:
    files = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST:
            files[name] = entry(path)
    (folder / MANIFEST).write_text(_as_text(files))


def entry(path: Path) -> dict[str, Any]:
    """Make a file's entry in the manifest: its size [bytes] and sha256."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    """Ask the system to really write it; a file system that cannot sync a folder (Drive) is not asked twice."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
