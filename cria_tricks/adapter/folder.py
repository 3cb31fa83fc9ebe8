"""The adapter folder: what plain peft loads, a card, its provenance, and a manifest that says if it is whole."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks import models
from cria_tricks.common import atomic_files, safe_files
from cria_tricks.common.errors import BadInput, first_line, usable_path
from cria_tricks.load.adapter_files import SIDE_NETWORK, save_weights
from cria_tricks.recipe import Recipe

CONFIGS = ("adapter_config.json", SIDE_NETWORK)
"""Files that name an adapter's base model: peft's, and ours for a side network."""
RESULTS = ("adapter", "model", "merged")
"""Folders in a run's, in which there may be one."""
RECIPE, PROVENANCE = "recipe.toml", "provenance.json"
_UNREAD = re.compile(r"\..*|.*\.(md|png|jpe?g|gif|svg|pdf)|licen[cs]e.*|notice.*|desktop\.ini", re.IGNORECASE)
"""Names that no loader opens: hidden ones (the hub adds .gitattributes, downloads .cache/), texts and pictures."""


def save(
    folder: Path,
    model: Any,
    tokenizer: Any,
    base: str,
    card: str,
    recipe: Recipe,
    provenance: Mapping[str, Any] | None = None,
    weights: Mapping[str, Any] | None = None,
) -> None:
    """Write the folder aside and rename it, so that it is there whole or not at all.

    Args:
        folder: ``.../adapter`` for an adapter, ``.../model`` for a fully fine-tuned model.
        model: a ``PeftModel``, a model with a side network, or a whole one.
        tokenizer: saved beside it.
        base: the name of the base model that others can load; a cache folder of ours is none.
        card: the text of README.md.
        recipe: saved as recipe.toml, so that the run can be repeated.
        provenance: saved as provenance.json, from :func:`cria_tricks.adapter.provenance.describe`.
        weights: the model's state dict, where its own is in pieces.
    """
    with atomic_files.new_folder(folder) as aside:
        save_weights(model, aside, weights)
        tokenizer.save_pretrained(aside)
        for config in (aside / name for name in CONFIGS if (aside / name).exists()):
            content = json.loads(config.read_text())
            content["base_model_name_or_path"] = base
            if isinstance(content.get("target_modules"), list):
                content["target_modules"].sort()  # peft keeps a set, in another order in every process
            config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        (aside / "README.md").write_text(card, encoding="utf-8")
        (aside / RECIPE).write_text(recipe.to_toml(), encoding="utf-8")
        if provenance:
            write_provenance(aside, provenance)


def write_provenance(folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write provenance.json; without infinities, which JSON does not have."""
    text = json.dumps(provenance, indent=2, allow_nan=False)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def trained_over(folder: Path) -> dict[str, Any]:
    """The identity of the base that an adapter was trained over, as far as its folder tells."""
    try:
        return dict(json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["base"])
    except FileNotFoundError:  # of plain peft
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / PROVENANCE}: does not say what it was trained over: {first_line(error)}") from None


def refuse_moved_base(folder: Path, base: str) -> None:
    """Refuse an adapter whose base was a folder that is not there, before a model of its name is asked of the hub.

    Args:
        folder: of the adapter.
        base: the name in its config.

    Raises:
        BadInput: if the folder is not there.
    """
    if trained_over(folder).get("kind") == "folder" and not Path(base).is_dir():
        raise BadInput(f"{folder}: was trained over the folder {base}, which is not there; name it with --base")


def refuse_another(folder: Path, *more: str) -> None:
    """Refuse a folder that holds neither an adapter nor a model, and name the one inside that does.

    Args:
        folder: as it was given.
        *more: names of files that make it one, too.

    Raises:
        BadInput: if it holds none.
    """
    if not folder.exists():
        raise BadInput(f"{folder}: there is no such folder; name the folder of an adapter, such as runs/smoke/adapter")
    if not folder.is_dir():
        raise BadInput(f"{folder}: is a file; name the folder that it is in")
    if any((folder / name).is_file() for name in (*CONFIGS, "config.json", *more)):
        return
    inside = [name for name in RESULTS if any((folder / name / file).is_file() for file in (*CONFIGS, "config.json"))]
    if inside:
        raise BadInput(f"{folder}: is the folder of a run; what it has trained is in {folder / inside[0]}: name that")
    if (folder / "checkpoints").is_dir():
        raise BadInput(
            f"{folder}: is the folder of a run that has not ended, so there is no adapter yet; go on with it: "
            f"cria train {folder / RECIPE} --out {folder} --resume"
        )
    raise BadInput(f"{folder}: holds neither adapter_config.json nor config.json; name the folder of an adapter")


def is_whole(folder: Path) -> bool:
    """Whether a folder holds a whole model, and no adapter that names its base."""
    return not any((folder / name).is_file() for name in CONFIGS)


def named_base(folder: Path) -> str:
    """The base model that an adapter's config names; nothing where it cannot be read, or for a whole model."""
    config = next((folder / name for name in CONFIGS if (folder / name).is_file()), None)
    try:
        found = json.loads(config.read_text(encoding="utf-8")) if config else {}
        return str(found.get("base_model_name_or_path") or "")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


@dataclass(frozen=True)
class Verified:
    """What ``verify`` found in a whole folder."""

    files: int
    bytes: int
    unlisted: tuple[str, ...]


def verify(folder: str | Path) -> Verified:
    """Compare every file with the manifest.

    Raises:
        BadInput: naming the first file that is missing, changed, or has no place in an adapter's folder.
    """
    folder = usable_path("adapter", folder)
    refuse_another(folder, atomic_files.MANIFEST)
    if not (folder / atomic_files.MANIFEST).is_file():
        raise BadInput(f"{folder}: has no {atomic_files.MANIFEST}, so it is no folder that cria train wrote")
    refuse_unsafe(folder)
    files = atomic_files.listed(folder)
    return Verified(len(files), sum(about["bytes"] for about in files.values()), atomic_files.unlisted(folder))


def refuse_unsafe(folder: Path) -> None:
    """What every load does before it reads: chat, merge, publish and evaluation.

    A folder of ours is held against its manifest. That finds what a disk, a transfer or a careless hand did; it is no
    signature, and who can write the folder can write the manifest too. So whatever it says, nothing in the folder may
    run when it is read, or lead out of it. These rules hold for a folder of plain peft too, which has no manifest.
    The base model that an adapter names is another folder by nature and may be anywhere: it is loaded without code and
    without pickles wherever it is.

    Raises:
        BadInput: naming the file, and what is wrong with it.
    """
    ours = any((folder / name).exists() for name in (atomic_files.MANIFEST, PROVENANCE, RECIPE))
    again = "take the folder from its source again"
    if why := safe_files.way_out(folder):
        raise BadInput(f"{folder}: {why}; {again}")
    if ours and (why := atomic_files.damage(folder)):
        raise BadInput(f"{folder}: {why}; {again}")
    if why := safe_files.program(folder):
        raise BadInput(f"{folder}: {why}")
    if ours and (strangers := [name for name in atomic_files.unlisted(folder) if may_be_read(name)]):
        raise BadInput(f"{folder}: {strangers[0]} is not in {atomic_files.MANIFEST} and may be read: take it away")


def may_be_read(name: str) -> bool:
    """Whether some loader might open a file of this name; a card, a licence or a hidden file only people read."""
    return not (name.startswith(".") or _UNREAD.fullmatch(Path(name).name))


def adapter(
    folder: str | Path, base: str | Path | None = None, look_at_base: bool = True, other_base: bool = False
) -> Path:
    """Look at the folder of an adapter or of a whole model.

    Args:
        folder: as it was given.
        base: where its base lies now, if not where it says.
        look_at_base: whether the base that an adapter names must be there, or to be had.
        other_base: whether another base than it was trained over may be used.

    Raises:
        BadInput: if it is none, is damaged or not safe to read, or its base cannot be had.
    """
    path = usable_path("adapter", folder)
    refuse_another(path)
    if named := named_base(path):
        refuse_unsafe(path)
        if look_at_base and not base:
            refuse_moved_base(path, named)
        if look_at_base:
            models.refuse_out_of_reach(str(base or named))
    elif is_whole(path):
        refuse_base_of_whole(path, base, other_base)
    return path


def refuse_base_of_whole(folder: Path, base: str | Path | None, other_base: bool = False) -> None:
    """Refuse ``--base`` and ``--other-base`` for a whole model, which has no base below it."""
    if base:
        raise BadInput(f"--base {base}: {folder} is a whole model and has no base below it; leave --base out")
    if other_base:
        raise BadInput(f"--other-base: {folder} is a whole model and has no base below it; leave --other-base out")
