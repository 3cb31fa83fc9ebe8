"""What this machine is, and which toggles work on it: each is resolved for real and says so itself."""

import importlib.metadata
import platform
from typing import Any

from cria_tricks.errors import BadInput
from cria_tricks.hardware import Device, this_device
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import TRICKS, resolve, trick_name
from cria_tricks.units import human

PACKAGES = (
    "cria_tricks",
    "torch",
    "transformers",
    "peft",
    "bitsandbytes",
    "accelerate",
    "datasets",
    "flash-attn",
)

# A toggle is tried over LoRA, without which several have nothing to act on; these need one more.
_OVER = {"double_quantization": "quantization=nf4", "lean_preparation": "{half}", "attention": "{half}"}


def examine(device: Device | None = None) -> dict[str, Any]:
    """Look at the machine.

    Args:
        device: another machine than this one, e.g. ``hardware.T4``.

    Returns:
        ``device``, ``python``, ``versions`` (``None`` for a package that is missing) and ``toggles``, each with
        ``trick``, ``set``, ``status`` (``works``, ``warning`` or ``refused``) and ``why``.
    """
    device = device or this_device()
    return {
        "device": {
            "kind": device.kind,
            "name": device.name,
            "capability": device.capability,
            "real_bf16": device.real_bf16,
            "memory_bytes": device.memory_bytes,
            "memory": human(device.memory_bytes),
        },
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in PACKAGES},
        "toggles": [_try(trick_name(trick), switch, device) for trick in TRICKS for switch in trick.SWITCHES],
    }


def _try(trick: str, switch: str, device: Device) -> dict[str, str]:
    field = switch.partition("=")[0]
    over = _OVER.get(field, "").format(half="precision=bf16" if device.real_bf16 else "precision=fp16")
    settings = [f"tricks.{setting}" for setting in ("peft=lora", over, switch) if setting]
    entry = {"trick": trick, "set": settings[-1]}
    try:
        plan = resolve(with_settings(Recipe(), settings), device)
    except BadInput as error:
        return {**entry, "status": "refused", "why": str(error).partition(": ")[2]}
    own = " ".join(sentence for sentence in plan.warnings if sentence.startswith(field))
    return {**entry, "status": "warning" if own else "works", "why": own}


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
