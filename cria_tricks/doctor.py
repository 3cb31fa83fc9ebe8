"""What this machine is, and which toggles work on it: each is resolved for real and says so itself."""

import importlib.metadata
import platform
from typing import Any

import torch

from cria_tricks.errors import BadInput
from cria_tricks.hardware import Device, this_device
from cria_tricks.hardware.kernels import attention_kernel
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import TRICKS, resolve, trick_name
from cria_tricks.tricks.expand_kv import expand_kv
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
_OVER = {
    "double_quantization": "quantization=nf4",
    "lean_preparation": "{half}",
    "attention": "{half}",
    "expand_kv": "{half} attention=sdpa",
}


def examine(device: Device | None = None) -> dict[str, Any]:
    """Look at the machine.

    Args:
        device: another machine than this one, e.g. ``hardware.T4``.

    Returns:
        ``device``, ``python``, ``versions`` (``None`` for a package that is missing) and ``toggles``, each with
        ``trick``, ``set``, ``status`` (``works``, ``warning`` or ``refused``) and ``why``; and ``attention``, the
        kernel that ran for each kind of row, empty for another machine, on which nothing can be run.
    """
    attention = {} if device else _attention(this_device())
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
        "attention": attention,
    }


def _try(trick: str, switch: str, device: Device) -> dict[str, str]:
    field = switch.partition("=")[0]
    over = _OVER.get(field, "").format(half="precision=bf16" if device.real_bf16 else "precision=fp16")
    settings = [f"tricks.{setting}" for setting in ("peft=lora", *over.split(), switch)]
    entry = {"trick": trick, "set": settings[-1]}
    try:
        plan = resolve(with_settings(Recipe(), settings), device)
    except BadInput as error:
        return {**entry, "status": "refused", "why": str(error).partition(": ")[2]}
    own = " ".join(sentence for sentence in plan.warnings if sentence.startswith(field))
    return {**entry, "status": "warning" if own else "works", "why": own}


def _attention(device: Device) -> dict[str, str]:
    """Run attention with Llama-3.2-1B's heads, 32 of 64 elements over 8 of keys and values, and name the kernels.

    The calls are those of transformers 5: with a mask it repeats keys and values; without one it leaves the
    grouping to torch (``enable_gqa``), and not every kernel takes that.
    """
    half = torch.bfloat16 if device.real_bf16 else torch.float16 if device.kind == "cuda" else torch.float32
    tokens, attend = 64, torch.nn.functional.scaled_dot_product_attention
    q, kv = (torch.zeros(1, n, tokens, 64, dtype=half, device=device.kind, requires_grad=True) for n in (32, 8))
    wide, mask = expand_kv(kv, 4), torch.ones(1, 1, tokens, tokens, dtype=torch.bool, device=device.kind).tril()
    return {
        "masked": attention_kernel(lambda: attend(q, wide, wide, attn_mask=mask)),
        "maskless": attention_kernel(lambda: attend(q, kv, kv, is_causal=True, enable_gqa=True)),
        "maskless, expand_kv": attention_kernel(lambda: attend(q, wide, wide, is_causal=True)),
    }


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
