"""Find the ``config.json`` of a model without reading its weights, and the defaults of each model type.

Some configs say that the weights are stored in few bits already: packed numbers and their scales. Each method needs
kernels of its own, so only bitsandbytes', which ``tricks.quantization`` makes itself, can be planned. The others are
refused before anything is downloaded.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cria_tricks import models
from cria_tricks.common.errors import BadInput, first_line, usable_path
from cria_tricks.models import network
from cria_tricks.models.catalogue import ALIASES, CONFIGS

MORE_THAN_TEXT = (
    "model {model}: {kind} takes more than text, such as images, and cria plans and trains models of text alone: name "
    "one, such as gemma-3-1b"
)
SCALINGS = ("linear", "dynamic", "yarn", "longrope", "llama3")
"""The kinds of RoPE scaling in transformers that lengthen the context by a factor."""
SCALED_ALREADY = ("gemma3_text",)
"""Model types whose factor is in ``max_position_embeddings`` already, and whose original length is not written."""
_QWEN = {
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "max_position_embeddings": 32_768,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 131_072},
    "mixtral": {
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 131_072,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128},
    "gemma": {
        "num_key_value_heads": 16,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "max_position_embeddings": 8192,
    },
    "gemma2": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "max_position_embeddings": 8192,
    },
    "gemma3_text": {
        "num_attention_heads": 8,  # the config of Gemma-3-4B has neither this field nor vocab_size
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "tie_word_embeddings": True,
        "sliding_window": 4096,
        "max_position_embeddings": 131_072,
    },
    # Some blocks of SmolLM3 do not rotate positions, and Granite scales its hidden states and logits. Neither changes
    # the bytes.
    "smollm3": {
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "max_position_embeddings": 32_768,
    },
    "granite": {"max_position_embeddings": 2048},
    "phi3": {"max_position_embeddings": 4096},
    "olmo2": {"max_position_embeddings": 2048},
}
"""Model types that can be estimated -> the values that transformers gives to fields missing in their config."""


def find_config(model: str) -> dict[str, Any]:
    """Return a model's ``config.json`` as a dictionary.

    Args:
        model: a short name of the catalogue, a hub id, ``random:NAME``, a folder, or the path of the file itself.

    Raises:
        BadInput: if there is no such file, or it cannot be downloaded or read.
    """
    by_hub_id = {hub: name for name, hub in ALIASES.items()}
    name = by_hub_id.get(model, model.removeprefix("random:"))
    if name in CONFIGS:
        return CONFIGS[name]
    path = usable_path("model", model)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        models.refuse_unknown(model)
        path = network.config_of(model)
    config = _read(path)
    if isinstance(config.get("text_config"), dict):
        raise BadInput(MORE_THAN_TEXT.format(model=model, kind=config.get("model_type")))
    return config


def beyond_context(context: int, tokens: int) -> list[str]:
    """Return a warning if rows of ``tokens`` tokens exceed the model's context, else an empty list.

    Args:
        context: the context length of the model [tokens]; 0 if it is unknown.
        tokens: the length of the longest row [tokens].
    """
    if 0 < context < tokens:
        return [
            f"rows of up to {tokens} tokens are longer than the model's context of {context} (max_position_embeddings "
            "and rope scaling in its config), and a model does badly on positions that it was not trained for: set "
            f"data.max_length={context}, or take a model with a longer context"
        ]
    return []


def context_of(model: str) -> int:
    """Return the context length of a model of any type [tokens]; 0 if it cannot be found."""
    try:
        config = find_config(model)
    except BadInput:
        return 0
    found = config.get("max_position_embeddings")
    if found is None:
        found = KINDS.get(str(config.get("model_type")), {}).get("max_position_embeddings")
    return scaled_context(config, found) if type(found) is int and found > 0 else 0


def scaled_context(config: Mapping[str, Any], context: int) -> int:
    """Return the context length with the scaling of the rotary positions (RoPE) that a config asks for [tokens].

    Families write it in two ways. Llama 3.1, Phi-3 and Gemma 3 have the scaled length in ``max_position_embeddings``.
    Qwen's has the length before scaling there, and so has any config to which ``rope_scaling`` was added by hand: the
    factor then counts from ``original_max_position_embeddings``, or from this length. The longer one is meant.

    Args:
        config: the content of ``config.json``.
        context: its ``max_position_embeddings``, or the default of its type.
    """
    # transformers 5 writes rope_parameters, for each kind of attention where these differ; before, it was rope_scaling,
    # which still wins where a config has both.
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    if isinstance(rope, Mapping) and isinstance(rope.get("full_attention"), Mapping):
        rope = rope["full_attention"]
    if not isinstance(rope, Mapping) or config.get("model_type") in SCALED_ALREADY:
        return context
    factor = rope.get("factor")
    kind = rope.get("rope_type", rope.get("type"))
    if kind not in SCALINGS or not isinstance(factor, int | float) or not 1 < factor < math.inf:
        return context
    original = config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings")
    return max(context, int(factor * (original if type(original) is int and original > 0 else context)))


def _read(path: Path) -> dict[str, Any]:
    """Read a config from a JSON file; raise :class:`BadInput` if it is none."""
    try:
        config = json.loads(path.read_text(encoding="utf-8-sig"))  # -sig: some editors begin a file with a mark
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise BadInput(f"model {path}: cannot be read as JSON: {first_line(error)}") from None
    if not isinstance(config, dict):
        raise BadInput(f"model {path}: is no JSON object, so no config")
    return config


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
