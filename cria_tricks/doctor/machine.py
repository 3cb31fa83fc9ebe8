"""Describe this machine, and find out which switches work on it by resolving a recipe with each of them."""

import functools
import importlib.metadata
import os
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import DTYPE
from cria_tricks.hardware import Device, this_device
from cria_tricks.measure.counting import attention_kernel
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import NEEDS, TECHNIQUES, technique_name
from cria_tricks.techniques.expand_kv import expand_kv

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


def examine() -> dict[str, Any]:
    """Describe this machine.

    Returns:
        - ``device``: the fields of :class:`Device`, and ``free_bytes``;
        - ``bf16``: ``runs``, which is ``real`` or ``emulated``, and ``torch_says``, the answer of
          ``torch.cuda.is_bf16_supported()``, which is true for emulation too (``None`` without CUDA);
        - ``python`` and ``cuda``: their versions (``cuda`` is ``None`` in a CPU build of torch); ``versions``: that of
          each of :data:`PACKAGES`, ``None`` for a missing one;
        - ``colab``: the release of Google Colab, or ``None`` elsewhere;
        - ``bitsandbytes``: ``backend``, ``cpu`` or ``cuda``, and ``library``, the name of the file that it loaded; both
          are ``None`` if it loaded none;
        - ``paging``: ``works``, whether paged optimizer states really move to the host, and ``why``;
        - ``attention``: the kernel that really ran, by the call;
        - ``toggles``: see :func:`toggles`.
    """
    device = this_device()
    library = _bitsandbytes()
    return {
        "device": {**asdict(device), "free_bytes": _free_bytes(device)},
        "bf16": {
            "runs": "real" if device.real_bf16 else "emulated",
            "torch_says": torch.cuda.is_bf16_supported() if device.kind == "cuda" else None,
        },
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: _version(name) for name in PACKAGES},
        "colab": os.environ.get("COLAB_RELEASE_TAG"),
        "bitsandbytes": library,
        "paging": _paging(device, library["backend"]),
        "attention": _attention(device),
        "toggles": toggles(device),
    }


def toggles(device: Device) -> list[dict[str, str]]:
    """Try every switch on a device, each by resolving a recipe; nothing is trained.

    Returns:
        For each switch ``trick``, the name of its module; ``set``, the setting that switches it on; ``status``, which
        is ``works``, ``warning`` or ``refused``; and ``why``, the warning or the error, empty if it works.
    """
    return [
        _try(technique_name(technique), switch, device)
        for technique in TECHNIQUES
        for switch in technique.TECHNIQUE.switches
    ]


def _try(technique: str, switch: str, device: Device) -> dict[str, str]:
    """Try one switch, and return its entry for :func:`toggles`."""
    field = switch.partition("=")[0]
    # A switch is tried together with LoRA in 16 bits, as most runs are: several switches do nothing without them.
    half = f"precision={device.half_precision}"
    words = ("peft=lora", half, *NEEDS.get(switch, "").format(half=device.half_precision).split(), switch)
    settings = [word if "." in word.partition("=")[0] else f"tricks.{word}" for word in words]
    entry = {"trick": technique, "set": settings[-1]}
    try:
        plan = resolve(with_settings(Recipe(), settings), device)
    except BadInput as error:
        # An error begins with the setting, which stands in "set" already, so only the part after the colon is kept.
        return {**entry, "status": "refused", "why": str(error).partition(": ")[2]}
    # Other switches of the recipe may warn, too. A warning begins with the name of its field.
    own = " ".join(sentence for sentence in plan.warnings if sentence.startswith(field))
    return {**entry, "status": "warning" if own else "works", "why": own}


def _attention(device: Device) -> dict[str, str]:
    """Run attention with Llama-3.2-1B's heads (32 query heads, 8 key and value heads, width 64), and name the kernels.

    The calls are those of transformers 5. With a mask it repeats keys and values for all query heads. Without a mask it
    passes the 8 heads to torch (``enable_gqa``), and not every kernel supports that.
    """
    make = functools.partial(
        torch.zeros, dtype=getattr(torch, DTYPE[device.best_precision]), device=device.kind, requires_grad=True
    )
    attend = torch.nn.functional.scaled_dot_product_attention
    q = make(1, 32, 64, 64)
    kv = make(1, 8, 64, 64)
    wide = expand_kv(kv, 4)  # 32 / 8: four query heads share one key head
    mask = torch.ones(1, 1, 64, 64, dtype=torch.bool, device=device.kind).tril()
    return {
        "masked": attention_kernel(lambda: attend(q, wide, wide, attn_mask=mask)),
        "maskless": attention_kernel(lambda: attend(q, kv, kv, is_causal=True, enable_gqa=True)),
        "maskless, expand_kv": attention_kernel(lambda: attend(q, wide, wide, is_causal=True)),
    }


def _free_bytes(device: Device) -> int:
    """Read how much memory is still free [bytes]; on a GPU, at most what the limit of a hardware profile leaves."""
    if device.kind == "cpu":
        return psutil.virtual_memory().available
    free, _ = torch.cuda.mem_get_info()
    return min(free, device.memory_bytes - torch.cuda.memory_reserved())


def _bitsandbytes() -> dict[str, str | None]:
    """Look up which native library bitsandbytes has really loaded.

    If bitsandbytes finds no library for this CUDA version, it reports that only when the library is called.
    """
    missing: dict[str, str | None] = {"backend": None, "library": None}
    try:
        # Imported here, because the import fails if the library, or one that it needs, is broken.
        from bitsandbytes.cextension import lib
    except (ImportError, RuntimeError):
        return missing
    native = vars(lib).get("_lib")  # not lib._lib: a stand-in for a missing library has every attribute
    if not native:
        return missing
    backend = "cuda" if getattr(type(lib), "compiled_with_cuda", False) else "cpu"
    return {"backend": backend, "library": Path(native._name).name}


def _paging(device: Device, backend: str | None) -> dict[str, Any]:
    """Tell whether paged optimizer states can move to the host with this backend of bitsandbytes, and why."""
    if device.kind != "cuda":
        return {"works": False, "why": "without CUDA the optimizer's states are in host memory already"}
    if backend != "cuda":
        return {"works": False, "why": "bitsandbytes has loaded no CUDA library"}
    return {"works": True, "why": "states of 100,000 elements and more move to the host when the card is full"}


def _version(name: str) -> str | None:
    """Read the version of a package; ``None`` if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
