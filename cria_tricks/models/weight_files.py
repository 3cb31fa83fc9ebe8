"""Read the headers of a model's weight files, refuse files that do not fit together, and identify the model by hashes.

Nothing here loads a model or imports torch, so a folder that contradicts itself is refused quickly. A large file is
hashed only once: its sha256 is stored with its path, size and time of change.
"""

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open

from cria_tricks.common import atomic_files
from cria_tricks.common.cache import cache_folder
from cria_tricks.common.errors import BadInput, first_line

WHOLE = "model.safetensors"
"""The weight file of a model that has only one; transformers looks for it first."""
INDEX = "model.safetensors.index.json"
"""The index of a model that has several weight files: it says which file holds which tensor."""
TOKENIZER = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)
"""The files that decide how a text becomes tokens."""
LARGE = 16 * 2**20
"""The size from which the hash of a file is stored [bytes]; smaller files are hashed each time, which is fast."""
AGAIN = "fetch or save the folder again"


class Tensor(NamedTuple):
    """What the header of a weight file says about a tensor: the file that holds it, its dtype and shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def find(folder: Path, name: str) -> list[Path]:
    """List the weight files of a model that transformers would read.

    Args:
        folder: the model's folder.
        name: what errors call the model.

    Raises:
        BadInput: if there are no safetensors files with the expected names, or the index names a missing file.
    """
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    if (folder / INDEX).is_file():
        files = [folder / file for file in dict.fromkeys(index(folder, name).values())]
        for file in files:
            if not file.is_file():
                raise BadInput(f"model {name}: {file.name} is missing, which {INDEX} names; {AGAIN}")
        return files
    if (folder / "adapter_config.json").is_file():
        raise BadInput(f"model {name}: is the folder of an adapter; name the base that it was trained over")
    pickles = [*sorted(folder.glob("*.bin")), *sorted(folder.glob("*.pt")), *sorted(folder.glob("*.pth"))]
    if pickles:
        raise BadInput(
            f"model {name}: has its weights as a pickle ({pickles[0].name}), a program that runs when it is read; give "
            "a folder with safetensors, which save_pretrained of transformers 5 writes"
        )
    others = sorted(folder.glob("*.safetensors"))
    if others:
        raise BadInput(f"model {name}: has neither {WHOLE} nor {INDEX}, only {others[0].name}; {AGAIN}")
    raise BadInput(f"model {name}: the folder holds no {WHOLE}, so no weights; {AGAIN}")


def index(folder: Path, name: str) -> dict[str, str]:
    """Read the index: tensor name -> name of the file that holds it."""
    try:
        places = json.loads((folder / INDEX).read_text(encoding="utf-8")).get("weight_map")
        if places and all(isinstance(file, str) and Path(file).name == file for file in places.values()):
            return places
        raise ValueError("its weight_map does not name a file of this folder for each tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"model {name}: {INDEX} cannot be used: {first_line(error)}; {AGAIN}") from None


def tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Read the headers of all weight files of a model.

    Args:
        folder: the model's folder.
        name: what errors call the model.

    Returns:
        Tensor name -> what its header says.

    Raises:
        BadInput: if a file is truncated or not in the safetensors format, or the index contradicts the files.
    """
    found: dict[str, Tensor] = {}
    files = find(folder, name)
    for file in files:
        try:
            with safe_open(file, framework="np") as opened:  # raises if the file is not as long as its header says
                for key in opened.keys():  # noqa: SIM118 (the file is not a dictionary)
                    part = opened.get_slice(key)
                    found[key] = Tensor(file, part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise BadInput(
                f"model {name}: {file.name} is cut off or no safetensors file ({first_line(error)}); {AGAIN}"
            ) from None
    if files == [folder / WHOLE]:
        return found
    for key, place in index(folder, name).items():
        there = "none of the files"
        if key in found:
            there = found[key].file.name
        if there != place:
            raise BadInput(f"model {name}: {INDEX} looks for {key} in {place}, and it is in {there}; {AGAIN}")
    return found


def identity(folder: Path) -> dict[str, dict[str, str]]:
    """Identify the model in a folder by the sha256 of every file that decides what it computes.

    Returns:
        ``weights``, ``config`` and ``tokenizer``: for each a dictionary, file name -> sha256.
    """
    return {
        "weights": _hashes(find(folder, str(folder))),
        "config": _hashes([folder / "config.json"]),
        "tokenizer": _hashes(folder / name for name in TOKENIZER),
    }


def _hashes(files: Iterable[Path]) -> dict[str, str]:
    """Hash the files that exist: file name -> sha256."""
    return {file.name: sha256(file) for file in files if file.is_file()}


def sha256(file: Path) -> str:
    """Return the sha256 of a file; a large file is hashed again only if its path, size or time of change is new.

    The hub's cache stores a large file under its sha256 as the name, so such a file is not read at all.
    """
    blob = file.resolve()
    if blob.parent.name == "blobs" and len(blob.name) == 64:
        return blob.name
    status = blob.stat()
    if status.st_size < LARGE:
        return atomic_files.entry(blob)["sha256"]
    stamp = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]
    known = remembered(str(blob))
    if known and known[:3] == stamp:
        return known[3]
    found = atomic_files.entry(blob)["sha256"]
    remember({str(blob): [*stamp, found]})
    return found


def remembered(key: str) -> Any:
    """Return what :func:`remember` stored under a key, or ``None``."""
    return _remembered().get(key)


def remember(found: Mapping[str, Any]) -> None:
    """Store findings about files in the cache folder for later commands; if it cannot be written, do nothing."""
    with contextlib.suppress(BadInput):
        atomic_files.write_file(_memory(), json.dumps(_remembered() | dict(found)) + "\n")


def _remembered() -> dict[str, Any]:
    try:
        return dict(json.loads(_memory().read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def _memory() -> Path:
    return cache_folder() / "weight_files.json"
