"""Read from a model's ``config.json`` that its weights are stored in few bits already, and refuse what we cannot use.

Such folders hold packed numbers and their scales. Each method needs kernels of its own, so only bitsandbytes', which
``tricks.quantization`` makes itself, can be planned. The others are refused before anything is downloaded.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput

FIELDS = ("quantization_config", "compression_config", "quantization")
"""Where a config says so: transformers' name, an older one of compressed-tensors, and MLX's."""
OURS = "bitsandbytes"
_INSTEAD = "take the model that it was made from, and set tricks.quantization=nf4"


def settings_of(config: Mapping[str, Any], name: str) -> tuple[str, ...]:
    """Return the settings under which a model's stored weights are what they say; none for an unquantised model.

    Args:
        config: the content of ``config.json``.
        name: the model's name.

    Raises:
        BadInput: if the weights are quantised in a way that ``tricks.quantization`` does not make.
    """
    found = _described(config)
    if not found:
        return ()
    refuse(config, name)
    kept = set(found.get("llm_int8_skip_modules") or ()) - {"lm_head", "model.embed_tokens"}
    if kept:
        raise BadInput(
            f"model {name}: its weights are quantised already, but not all ({min(kept)} is not), so they have no bill; "
            f"{_INSTEAD}"
        )
    if found.get("load_in_8bit"):
        return ("tricks.quantization=int8",)
    kind = found.get("bnb_4bit_quant_type", "fp4")  # the default of transformers
    double = str(bool(found.get("bnb_4bit_use_double_quant"))).lower()
    return (f"tricks.quantization={kind}", f"tricks.double_quantization={double}")


def refuse(config: Mapping[str, Any], name: str) -> None:
    """Refuse a model whose weights are quantised already, unless bitsandbytes has done it.

    Args:
        config: the content of ``config.json``.
        name: the model's name.

    Raises:
        BadInput: names the method, and what to take instead.
    """
    found = _described(config)
    if not found or found.get("quant_method") == OURS or found.get("load_in_4bit") or found.get("load_in_8bit"):
        return
    method = str(found.get("quant_method") or found.get("quant_algo") or "an unnamed method")
    bits = f", {found['bits']} bits" if isinstance(found.get("bits"), int) else ""
    raise BadInput(
        f"model {name}: its weights are quantised already ({method}{bits}), and cria can neither plan nor train over "
        f"such weights; {_INSTEAD}"
    )


def refuse_file(path: Path, name: str) -> None:
    """Refuse as :func:`refuse` does, by the file of a config. What cannot be read is reported where it is loaded."""
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError):
        return
    if isinstance(config, dict):
        refuse(config, name)


def _described(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a config says about quantised weights; empty if it says nothing."""
    return next((config[field] for field in FIELDS if config.get(field) and isinstance(config[field], Mapping)), {})
