"""Write folders and files atomically: after a crash or a power cut they are complete or not there at all.

A folder is filled under a temporary name, its files are hashed into a manifest, everything is synced to the disk, and
only then is the folder renamed. So a folder under its final name is always complete, whenever the process stopped.
Later the manifest tells whether the folder still holds what was written.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import FORESEEN, BadInput, Unwritten

MANIFEST = "manifest.json"
ASIDE = ".partial"
"""The suffix of a file's or folder's name while it is being written."""
OLD = ".old"
"""The suffix of an older folder's name while it is being replaced, between the two renames of :func:`new_folder`."""


@contextlib.contextmanager
def new_folder(folder: Path, *, manifest: bool = True) -> Iterator[Path]:
    """Let the ``with`` block fill a temporary folder, and rename it to ``folder`` if the block ends without an error.

    An older folder of this name is replaced. After an error it is still there, unchanged.

    Args:
        folder: the final name.
        manifest: whether to write a manifest; a copy brings its own.

    Yields:
        The empty folder to fill.

    Raises:
        Unwritten: if the disk is full, broken or protected.
    """
    aside = folder.with_name(folder.name + ASIDE)
    old = folder.with_name(folder.name + OLD)
    try:
        with unwritten_in_one_line(folder):
            _put_back(old, folder)
            for leftover in (aside, old):  # an earlier process may have been killed here
                shutil.rmtree(leftover, ignore_errors=True)
            aside.mkdir(parents=True)
            yield aside
            if manifest:
                write_manifest(aside)
            # Content first: a power cut after the rename must not leave the new name over files that are not written.
            for path in (*aside.rglob("*"), aside):
                _sync(path)
            # rename cannot replace a folder that holds files, so the old one is renamed first, and deleted at the end.
            if folder.exists():
                folder.rename(old)
            aside.rename(folder)
            _sync(folder.parent)  # a rename changes the parent folder, which must reach the disk, too
    except BaseException:
        _put_back(old, folder)
        shutil.rmtree(aside, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _put_back(old: Path, folder: Path) -> None:
    """Give the old folder its name back, if a process was stopped between the two renames of :func:`new_folder`."""
    if old.exists() and not folder.exists():
        old.rename(folder)


def copy_folder(folder: Path, to: Path) -> None:
    """Copy a folder with its manifest, as atomically as :func:`new_folder`.

    Raises:
        Unwritten: if the copy cannot be written, or differs from what the manifest lists.
    """
    with new_folder(to, manifest=False) as aside:
        shutil.copytree(folder, aside, dirs_exist_ok=True)
        wrong = damage(aside)
        if wrong:
            raise OSError(0, f"in the copy {wrong}")  # new_folder makes an Unwritten of it, with this sentence


def write_file(path: Path, content: str | bytes) -> None:
    """Write or replace a small file under a temporary name, and rename it.

    Raises:
        Unwritten: as :func:`new_folder`; an older file of this name is still there, unchanged.
    """
    aside = path.with_name(path.name + ASIDE)
    try:
        with unwritten_in_one_line(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(content.encode() if isinstance(content, str) else content)
            _sync(aside)
            aside.replace(path)
            _sync(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a folder, so that no second run writes into it at the same time.

    The lock is the operating system's, which releases it when the process ends, even if the process is killed.

    Raises:
        BadInput: if another process holds the lock.
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
    """Compare a folder with its manifest, and describe the first difference: ``"optimizer.pt is missing"``.

    Returns:
        An empty string if every file in the manifest is there with the same content.
    """
    name = MANIFEST
    try:
        for name, written in listed(folder).items():
            if entry(folder / name) != written:
                return f"{name} has other content than was written"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):  # other JSON, or none
        return f"{MANIFEST} is damaged"
    return ""


def listed(folder: Path) -> dict[str, Any]:
    """Read the manifest: ``bytes`` and ``sha256`` of every file, by the file's path in the folder.

    Raises:
        OSError: if there is no manifest, or it cannot be read.
        ValueError, KeyError, TypeError: if it is not as this module writes it.
    """
    files: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    return files


def unlisted(folder: Path) -> tuple[str, ...]:
    """List the files in a folder that its manifest does not name."""
    wanted = listed(folder)
    return tuple(name for name in _files(folder) if name not in wanted)


def write_manifest(folder: Path) -> None:
    """List all files of a folder in its manifest, with their sizes and hashes."""
    files = {name: entry(folder / name) for name in _files(folder)}
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")


def _files(folder: Path) -> list[str]:
    """Return the paths of all files in a folder but its manifest."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [name for name in names if name != MANIFEST]


def entry(path: Path) -> dict[str, Any]:
    """Make a file's entry in the manifest: its size [bytes] and sha256."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


@contextlib.contextmanager
def unwritten_in_one_line(path: Path) -> Iterator[None]:
    """Turn what libraries raise when a result cannot be written into one sentence, which names the result and why.

    Raises:
        Unwritten: if the disk is full, broken or protected. Each library raises another error for this.
    """
    try:
        yield
    except FORESEEN:  # one sentence already
        raise
    except OSError as error:
        raise Unwritten(path, error.strerror or str(error), error.errno) from None
    except Exception as error:
        # Libraries written in Rust, such as tokenizers, have the system's error number in their message.
        found = re.search(r"\(os error (\d+)\)", str(error))
        if found:
            raise Unwritten(path, os.strerror(int(found[1])), int(found[1])) from None
        # safetensors, and the C++ code behind torch.save, report a file that could not be written without a number.
        if re.search("SafetensorError|PytorchStreamWriter|inline_container", f"{type(error).__name__} {error}"):
            raise Unwritten(path, "the disk took only a part of it") from None
        raise


def _sync(path: Path) -> None:
    """Make the system write a file or folder from its cache to the disk.

    Some file systems, such as Google Drive's, cannot sync folders; that error is ignored.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():
            raise
    finally:
        os.close(descriptor)
