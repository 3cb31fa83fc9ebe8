"""Write and verify the adapter folder: files that plain peft loads, a model card, the provenance, and a manifest."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cria_tricks import models
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput, first_line, usable_path
from cria_tricks.load.adapter_files import SIDE_NETWORK, save_weights
from cria_tricks.models import ends
from cria_tricks.recipe import Recipe

CONFIGS = ("adapter_config.json", SIDE_NETWORK)
"""Files that name an adapter's base model: peft's, and ours for a side network."""
MODEL_FILES = (*CONFIGS, "config.json")
"""A folder that holds one of these files holds an adapter or a whole model."""
RESULTS = ("adapter", "model", "merged")
"""Folders of a run that hold a model: the run writes one of the first two, ``cria merge`` the third."""
RECIPE = "recipe.toml"
PROVENANCE = "provenance.json"
_UNREAD = re.compile(r"\..*|.*\.(md|png|jpe?g|gif|svg|pdf)|licen[cs]e.*|notice.*|desktop\.ini", re.IGNORECASE)
"""Names of files that no loader opens: hidden files, Markdown, pictures, PDFs, licences, notices, desktop.ini."""


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
    """Save what was trained. The folder gets its name only when it is complete.

    Args:
        folder: ``.../adapter`` for an adapter, ``.../model`` for a fully fine-tuned model.
        model: a ``PeftModel``, a model with a side network, or a whole model.
        tokenizer: saved beside the model.
        base: the name by which others can load the base model, so never a folder of our cache.
        card: the text of the model card, README.md.
        recipe: saved as recipe.toml, so that the run can be repeated.
        provenance: from :func:`cria_tricks.adapter.provenance.describe`.
        weights: the full state dict; needed if the model's own parameters are only shards.
    """
    with atomic_files.new_folder(folder) as aside:
        save_weights(model, aside, weights)
        tokenizer.save_pretrained(aside)
        ends.write(aside, tokenizer, model.generation_config.eos_token_id)
        config = adapter_config(aside)
        if config:
            content = json.loads(config.read_text())
            content["base_model_name_or_path"] = base
            if isinstance(content.get("target_modules"), list):
                content["target_modules"].sort()  # peft keeps a set, whose order differs from process to process
            config.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
        (aside / "README.md").write_text(card, encoding="utf-8")
        (aside / RECIPE).write_text(recipe.to_toml(), encoding="utf-8")
        if provenance:
            write_provenance(aside, provenance)


def write_provenance(folder: Path, provenance: Mapping[str, Any]) -> None:
    """Write provenance.json; raise ``ValueError`` for NaN and infinity, because JSON has no such numbers."""
    text = json.dumps(provenance, indent=2, allow_nan=False)
    (folder / PROVENANCE).write_text(text + "\n", encoding="utf-8")


def trained_over(folder: Path) -> dict[str, Any]:
    """Read from provenance.json which base an adapter was trained over.

    Returns:
        The base's identity, from :func:`cria_tricks.models.identity.of`; empty if there is no provenance.json.

    Raises:
        BadInput: if provenance.json cannot be read or names no base.
    """
    try:
        return dict(json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["base"])
    except FileNotFoundError:  # an adapter that plain peft wrote
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{folder / PROVENANCE}: does not say what it was trained over: {first_line(error)}") from None


def refuse_another(folder: Path, *more: str) -> None:
    """Refuse a folder that holds neither an adapter nor a model, nor one of the files ``more``.

    Raises:
        BadInput: naming adapter/, model/ or merged/ in it, if that holds one.
    """
    if not folder.exists():
        raise BadInput(f"{folder}: there is no such folder; name the folder of an adapter, such as runs/smoke/adapter")
    if not folder.is_dir():
        raise BadInput(f"{folder}: is a file; name the folder that it is in")
    if any((folder / name).is_file() for name in (*MODEL_FILES, *more)):
        return
    for name in RESULTS:
        if any((folder / name / file).is_file() for file in MODEL_FILES):
            raise BadInput(f"{folder}: is the folder of a run; what it has trained is in {folder / name}: name that")
    if (folder / "checkpoints").is_dir():
        raise BadInput(
            f"{folder}: is the folder of a run that has not ended, so there is no adapter yet; go on with it: "
            f"cria train {folder / RECIPE} --out {folder} --resume"
        )
    raise BadInput(f"{folder}: holds neither adapter_config.json nor config.json; name the folder of an adapter")


def adapter_config(folder: Path) -> Path | None:
    """Find the file that names an adapter's base; ``None`` for a whole model, which has no such file."""
    for name in CONFIGS:
        if (folder / name).is_file():
            return folder / name
    return None


def is_whole(folder: Path) -> bool:
    """Tell whether a folder has no adapter's config; if :func:`refuse_another` accepts it, it is a whole model then."""
    return adapter_config(folder) is None


def named_base(folder: Path) -> str:
    """Read the base model's name from an adapter's config; empty for a whole model or a config that names none."""
    config = adapter_config(folder)
    if config is None:
        return ""
    try:
        return str(json.loads(config.read_text(encoding="utf-8")).get("base_model_name_or_path") or "").strip()
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def base_of_training(folder: Path) -> str:
    """Return the name of the base that an adapter was trained over.

    The name of a folder that is gone is never looked up on the hub, where it may belong to a different model.

    Raises:
        BadInput: if the config names no base, or one that is neither here nor a name on the hub.
    """
    base = named_base(folder)
    if not base:
        raise BadInput(f"{adapter_config(folder)}: names no base model; name it with --base")
    if trained_over(folder).get("kind") == "folder" and not Path(base).is_dir():
        raise BadInput(f"{folder}: was trained over the folder {base}, which is not there; name it with --base")
    try:
        models.refuse_unknown(base)
    except BadInput as error:
        if Path(base).is_dir():  # the error says what the folder lacks
            raise BadInput(f"{folder}: its base cannot be used: {error}; name the base with --base") from None
        raise BadInput(
            f"{folder}: its base is {base}, which is no folder of a model here and no name on the hub; name the "
            "base with --base"
        ) from None
    return base


def verify(folder: str | Path) -> dict[str, Any]:
    """Compare every file of a folder with its manifest.

    Returns:
        The number of ``files`` in the manifest, the sum of their ``bytes``, and the files that are ``unlisted`` there.

    Raises:
        BadInput: naming the first file that is missing or changed.
    """
    folder = usable_path("adapter", folder)
    # A manifest alone is enough here: if the config is lost, the comparison with the manifest names it as missing.
    refuse_another(folder, atomic_files.MANIFEST)
    if not (folder / atomic_files.MANIFEST).is_file():
        raise BadInput(
            f"{folder}: has no {atomic_files.MANIFEST}: either it was lost, or neither cria train nor cria merge wrote "
            "this folder"
        )
    refuse_damaged(folder)
    files = atomic_files.listed(folder)
    size = sum(about["bytes"] for about in files.values())
    return {"files": len(files), "bytes": size, "unlisted": list(atomic_files.unlisted(folder))}


def refuse_damaged(folder: Path) -> None:
    """Refuse a folder that is not as it was written, and one whose weights are in a pickle.

    A folder that we wrote is compared with its manifest. That finds damage by a disk, a transfer or a careless edit. It
    is no defence against a person who can write the folder, because that person can write the manifest, too. Against
    that person it helps that nothing is loaded in a way that runs code: weights are read from safetensors files only,
    and configs without remote code.

    Raises:
        BadInput: naming what is wrong.
    """
    # One of the three shows that we wrote the folder, because the others may be lost. Plain peft writes none of them.
    if any((folder / name).exists() for name in (atomic_files.MANIFEST, PROVENANCE, RECIPE)):
        why = atomic_files.damage(folder)
        if why:
            raise BadInput(f"{folder}: {why}; take the folder from its source again")
        for name in filter(may_be_read, atomic_files.unlisted(folder)):
            raise BadInput(f"{folder}: {name} is not in {atomic_files.MANIFEST} and may be read: take it away")
    if adapter_config(folder) and not any(folder.glob("*.safetensors")):
        raise BadInput(f"{folder}: holds no safetensors file; weights in a pickle, which may run code, are never read")


def may_be_read(name: str) -> bool:
    """Tell whether a loader might open a file of this name; model cards, licences and hidden files are not opened."""
    return not (name.startswith(".") or _UNREAD.fullmatch(Path(name).name))


def adapter(folder: str | Path, base: str | Path | None = None, other_base: bool = False) -> Path:
    """Check the folder of an adapter or of a whole model, before torch and other slow libraries are imported.

    Args:
        folder: the folder as the user named it.
        base: folder or name of the base model, if it is no longer where the adapter's config says.
        other_base: whether the user allows a base other than the one of training; an error for a whole model.

    Returns:
        The folder's path.

    Raises:
        BadInput: if it is no such folder, or an adapter that is damaged, or without its base.
    """
    path = usable_path("adapter", folder)
    refuse_another(path)
    if not is_whole(path):
        refuse_damaged(path)
        models.refuse_out_of_reach(str(base or base_of_training(path)))
    elif base:  # the files of a whole model are compared when it is opened: that may take long
        raise no_base_below(path, "--base", f" {base}")
    elif other_base:
        raise no_base_below(path, "--other-base")
    return path


def whole_model(folder: str | Path) -> Path:
    """Check that a folder holds a whole model. Its files are compared later, because that takes long.

    Returns:
        The folder's path.

    Raises:
        BadInput: if it holds none, or an adapter.
    """
    path = usable_path("model", folder)
    refuse_another(path)
    if not is_whole(path):
        refuse_damaged(path)
        raise BadInput(
            f"{path}: is an adapter; cria merge writes a whole model of a LoRA adapter, so export that (a learnt "
            "prompt and a side network cannot be merged: use cria chat)"
        )
    return path


def no_base_below(folder: Path, option: str, value: str = "") -> BadInput:
    """Return the error for an option that needs a base below the adapter, where the folder holds a whole model."""
    return BadInput(f"{option}{value}: {folder} is a whole model and has no base below it; leave {option} out")
