"""Read from the config of an adapter what a run needs that goes on from it: the base, and the settings of its LoRA."""

import json
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput, usable_path

CONFIG = "adapter_config.json"
SETTINGS = {
    "r": "r",
    "lora_alpha": "alpha",
    "use_rslora": "rslora",
    "use_dora": "dora",
    "target_modules": "target_modules",
}
"""peft's name of each field that decides what an adapter computes -> ours, in the group ``lora``."""


def folder_of(model: str) -> Path | None:
    """Return the folder of an adapter that was named as a model; ``None`` for every other name."""
    if model.startswith("random:"):
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
        base, kind = found["base_model_name_or_path"], found["peft_type"]
        if not (base and isinstance(base, str)):
            raise ValueError("it names no base")
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise BadInput(
            f"adapter {folder}: its {CONFIG} cannot be read or names no base, so no run can go on from it; write "
            "base_model_name_or_path into it"
        ) from None
    if kind != "LORA":
        raise BadInput(
            f"adapter {folder}: is of kind {kind}, and a run goes on from LoRA only; to train a new one, set "
            f"model={base}"
        )
    return found


def lora_settings(config: dict[str, Any]) -> dict[str, Any]:
    """Return an adapter's settings by our names, as far as a recipe can express them."""
    found = {ours: config[theirs] for theirs, ours in SETTINGS.items() if theirs in config}
    targets = found.pop("target_modules", None)
    if isinstance(targets, list) and targets:
        found["target_modules"] = sorted(targets)
    return found
