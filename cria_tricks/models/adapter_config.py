"""Read from a trained adapter what a run needs that continues from it: the base, and the settings of its LoRA."""

import contextlib
import json
import tomllib
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.models.catalogue import ALIASES, short_name

CONFIG = "adapter_config.json"
DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False, "use_dora": False}
"""What peft takes for a field that a config, such as an old one, does not have."""
SETTINGS = {"r": "r", "lora_alpha": "alpha", "use_rslora": "rslora", "use_dora": "dora"}
"""peft's name of each field that decides what an adapter computes -> ours, in the group ``lora``."""


def folder_of(model: str) -> Path | None:
    """Return the folder of an adapter that was named as a model; ``None`` for every other name."""
    if short_name(model) in ALIASES or model.startswith("random:"):
        return None
    folder = usable_path("model", model)
    if not (folder / CONFIG).is_file() or (folder / "config.json").is_file():
        return None
    return folder.absolute()


def read(folder: Path) -> dict[str, Any]:
    """Read the config of a LoRA adapter.

    Raises:
        BadInput: if it cannot be read, names no base, or is of another kind of adapter.
    """
    try:
        found = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        base, kind = found.get("base_model_name_or_path"), found.get("peft_type")
    except (OSError, ValueError, AttributeError, RecursionError):
        raise BadInput(f"adapter {folder}: {CONFIG} cannot be read; copy the adapter's folder again") from None
    if not (base and isinstance(base, str)):
        raise BadInput(f"adapter {folder}: names no base; write its name into {CONFIG} (base_model_name_or_path)")
    if kind != "LORA":
        raise BadInput(
            f"adapter {folder}: is of kind {kind}, and a run continues from LoRA only; to train a new one, set "
            f"model={base}"
        )
    return DEFAULTS | found


def settings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what a recipe takes from an adapter, by group and name: its LoRA, and the end token of its answers.

    Raises:
        BadInput: as :func:`read`.
    """
    config = read(folder)
    lora = {ours: config[theirs] for theirs, ours in SETTINGS.items()}
    targets = config.get("target_modules")
    if isinstance(targets, list) and targets:  # a pattern cannot be said in a recipe
        lora["target_modules"] = sorted(targets)
    data = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # plain peft writes no recipe
        data["eos"] = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))["data"]["eos"]
    return {"lora": lora, "data": data}
