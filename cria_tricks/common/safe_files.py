"""Check a folder before anything in it is loaded: it may contain only plain files, and none that runs code.

The folders of adapters and checkpoints are checked in this way. JSON, TOML, text and safetensors files hold data. But a
pickle is a program, which runs when it is loaded. A config can name a Python module, which transformers fetches and
runs if its caller sets ``trust_remote_code``. And a symbolic link, or a file name in a config, can point to a file
outside the folder. The checks read bytes and JSON, and load none of these files. Each check returns a sentence on the
first problem that it finds, or an empty string.
"""

import json
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open

PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"}
"""Suffixes of files in which torch, joblib and numpy may read a pickle."""
_ARCHIVES = (b"PK\x03\x04", b"PK\x05\x06", b"\x93NUMPY")
"""The first bytes of the zip files that torch.save writes, of an empty zip file, and of numpy's files."""
_CODE = {"auto_map", "custom_pipelines", "trust_remote_code", "megatron_config"}
"""Fields of transformers' and peft's configs that make a loader import Python code which the folder names."""


def leaves(name: str) -> bool:
    """Return whether a file name is empty, or could lead out of its folder on Linux, macOS or Windows."""
    path = PurePosixPath(name)
    return not name or path.is_absolute() or ".." in path.parts or "\\" in name or bool(PureWindowsPath(name).drive)


def way_out(folder: Path) -> str:
    """Find a symbolic link that leaves the folder, or something that is neither a file nor a folder, such as a pipe.

    A pipe is refused because opening it would wait for ever. Links are allowed in the hub's cache, where the files of a
    snapshot are links into the folder ``blobs`` beside ``snapshots``.

    Returns:
        One sentence on what is wrong; empty if nothing is.
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
    """Find a file that is not safe to load.

    That is a pickle or an archive by its name or first bytes, a damaged safetensors file, a file that cannot be read,
    or a config that asks for code or for a file outside the folder.

    Args:
        folder: its files are checked by their first bytes, and the configs by their whole content.
        but: names of pickles that are expected. The caller must load only tensors from them.

    Returns:
        One sentence on what is wrong; empty if nothing is.
    """
    for path in _everything(folder):
        name = path.relative_to(folder).as_posix()
        if name in but or not path.is_file():
            continue
        if path.suffix.lower() in PICKLES:
            return (
                f"{name} may be a pickle, a program that runs when it is read; neither an adapter nor a checkpoint "
                "needs it: take it away"
            )
        try:
            why = _runs(path, name)
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
        if why:
            return why
    return ""


def _runs(path: Path, name: str) -> str:
    """Describe why a file's content could run code, or is not what its name says; empty for a file that is safe."""
    with path.open("rb") as file:
        start = file.read(8)
    broken = ""
    if path.suffix.lower() == ".safetensors":
        broken = _no_safetensors(path)
        # A valid one begins with the length of its header, which may look like a pickle's first bytes.
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
    """List every file, folder and link below a folder, in the same order on every machine; links are not followed."""
    for place, folders, files in os.walk(folder):
        folders.sort()
        yield from (Path(place) / name for name in sorted([*folders, *files]))


def _begins_like_a_program(start: bytes) -> bool:
    # A pickle of protocol 2 to 5 begins with the byte 0x80 and the number of the protocol. Protocols 0 and 1 have no
    # such mark, so their files are found only by their names.
    is_pickle = len(start) > 1 and start[:1] == b"\x80" and start[1:2] <= b"\x05"
    return start.startswith(_ARCHIVES) or is_pickle


def _no_safetensors(path: Path) -> str:
    try:
        with safe_open(path, framework="np"):  # this reads the header only, and compares it with the file's length
            return ""
    except (SafetensorError, ValueError) as error:
        return str(error).splitlines()[0]


def _asks_for(path: Path) -> str:
    """Describe why a config is refused: it asks for code, or for a file outside its folder. Empty if it is safe.

    A config that is not valid JSON is left to the library, which refuses it itself. A config that is nested too deeply
    for this function is refused here, because the library might still read it.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        for key, value in _fields(config):
            why = _refused(key, value)
            if why:
                return why
    except ValueError:
        return ""
    except RecursionError:
        return "is nested too deeply to be checked"
    return ""


def _fields(node: Any) -> Iterator[tuple[str, Any]]:
    """List every key and value of a JSON document, at any depth."""
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
    # Old tokenizers wrote this field: a path on their author's machine. No library reads it, so it does no harm.
    if key == "special_tokens_map_file":
        return ""
    # weight_map is the table of an index: tensor -> file. transformers_weights in a config names the weight file.
    # Fields such as vocab_file name files of the tokenizer.
    if key == "weight_map" or key == "transformers_weights" or key.endswith(("_file", "_files")):
        for name in _named_files(key, value):
            # An empty name asks for no file. leaves refuses it only because a manifest must not have one.
            if isinstance(name, str) and name != "" and leaves(name):
                return f"{key} names {name}, which is not in the folder"
    return ""


def _named_files(key: str, value: Any) -> Iterable[Any]:
    """Return the files that a field of a config names: the values of an index, a list, or a single name."""
    if key == "weight_map" and isinstance(value, dict):
        return value.values()
    if key != "weight_map" and isinstance(value, list):
        return value
    return [value]
