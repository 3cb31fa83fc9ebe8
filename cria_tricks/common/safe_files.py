"""Check a folder before anything in it is read: it may hold plain files of its own, and nothing that runs.

JSON, TOML, text and safetensors hold data. A pickle is a program that runs when it is read, and so is a module of
Python that a config names for transformers to fetch. A link, or a file name in a config, may lead out of the folder.
Each function looks without reading any of that, and says in words what it found, or nothing.
"""

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open

PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"}
"""Endings under which torch, joblib and numpy read pickles."""
_ARCHIVES = (b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY")
"""How torch.save's zip files, empty ones too, and numpy's files begin."""
_CODE = {"auto_map", "custom_pipelines", "trust_remote_code", "megatron_config"}
"""Fields of transformers' and peft's configs that make a loader import what the folder names."""


def leaves(name: str) -> bool:
    """Tell whether a file name leads out of the folder in which it is looked up, on any system."""
    path = PurePosixPath(name)
    return not name or path.is_absolute() or ".." in path.parts or "\\" in name or bool(PureWindowsPath(name).drive)


def way_out(folder: Path) -> str:
    """Name a link that leaves the folder, or something that is no plain file; opening a pipe would wait for ever.

    The hub's cache is the exception: there a snapshot's files are links to ``blobs`` beside the snapshots.
    """
    inside = [folder.resolve()]
    if folder.absolute().parent.name == "snapshots":
        inside.append(folder.resolve().parent.parent / "blobs")
    for path in _everything(folder):
        name = path.relative_to(folder).as_posix()
        try:
            target = path.resolve(strict=True)
            kind = target.stat().st_mode
        except (OSError, RuntimeError):  # a link to nowhere, or to itself
            return f"{name} is a link that leads nowhere"
        if path.is_symlink() and not any(target.is_relative_to(home) for home in inside):
            return f"{name} is a link that leaves the folder"
        if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
            return f"{name} is no plain file"
    return ""


def program(folder: Path, but: Collection[str] = ()) -> str:
    """Name a file that would run when it is read: a pickle by name or by content, or a config that asks for code.

    Args:
        folder: whose files are looked at; the first bytes of each, and all of the configs.
        but: names of pickles that are expected, for a reader that takes nothing but tensors from them.
    """
    for path in _everything(folder):
        name = path.relative_to(folder).as_posix()
        if name in but or not path.is_file():
            continue
        if path.suffix.lower() in PICKLES:
            return f"{name} may be a pickle, a program that runs when it is read; no adapter needs it: take it away"
        try:
            why = _runs(path, name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if why:
            return why
    return ""


def _runs(path: Path, name: str) -> str:
    """Say why a file is a program by its content, or not what its name says; empty for a file that may be read."""
    with path.open("rb") as file:
        start = file.read(8)
    broken = ""
    if path.suffix.lower() == ".safetensors":
        broken = _no_safetensors(path)
        # The file begins with the length of its header, which may look like a pickle's first bytes.
        if not broken:
            return ""
    if _begins_like_a_program(start):
        return f"{name} is a pickle or an archive by its first bytes, whatever its name says"
    if broken:
        return f"{name} is no safetensors file: {broken}"
    if name.endswith(("config.json", "index.json")):
        asks = _asks_for(path)
        return f"{name}: {asks}" if asks else ""
    return ""


def _everything(folder: Path) -> Iterator[Path]:
    """Every file, folder and link below a folder, in one order everywhere; links are not followed."""
    for place, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(place) / name for name in sorted([*folders, *files]))


def _begins_like_a_program(start: bytes) -> bool:
    # A pickle of protocol 2 to 5 begins with the byte 0x80 and the number of the protocol.
    is_pickle = len(start) > 1 and start[:1] == b"\x80" and start[1:2] <= b"\x05"
    return start.startswith(_ARCHIVES) or is_pickle


def _no_safetensors(path: Path) -> str:
    try:
        with safe_open(path, framework="np"):  # reads the header, and holds it against the file's length
            return ""
    except (SafetensorError, ValueError) as error:
        return str(error).splitlines()[0]


def _asks_for(path: Path) -> str:
    """What a config asks for that is not given: code, or a file from elsewhere. A broken one is its reader's affair."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        for key, value in _fields(config):
            why = _refused(key, value)
            if why:
                return why
    except (ValueError, RecursionError):
        pass
    return ""


def _fields(node: Any) -> Iterator[tuple[str, Any]]:
    """Every key and value of a JSON document, however deep."""
    inside: Any = ()
    if isinstance(node, dict):
        yield from node.items()
        inside = node.values()
    elif isinstance(node, list):
        inside = node
    for inner in inside:
        yield from _fields(inner)


def _refused(key: str, value: Any) -> str:
    if key in _CODE and value:
        return f"asks for code of its own ({key}), which is never run here"
    if key.endswith("attn_implementation") and "/" in str(value):
        return f"asks for a kernel from the hub ({value}), which is code and never run here"
    # Written by old tokenizers and read by none: where their author's copy of that file was.
    if key == "special_tokens_map_file":
        return ""
    if key == "weight_map" or key == "transformers_weights" or key.endswith(("_file", "_files")):
        for name in _named_files(key, value):
            if isinstance(name, str) and name != "" and leaves(name):
                return f"{key} names {name}, which is not in the folder"
    return ""


def _named_files(key: str, value: Any) -> Iterable[Any]:
    """The files that a field of a config names: those of an index, a list of them, or a single one."""
    if key == "weight_map" and isinstance(value, dict):
        return value.values()
    if key != "weight_map" and isinstance(value, list):
        return value
    return [value]
