"""List the models that have a short name: their hub ids, and their shapes as in their ``config.json``."""

import copy
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.common.names import same

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Entry:
    """A published model.

    Attributes:
        hub: the hub id of its instruction-tuned version; for some models that of a mirror, which does not ask to accept
            a licence first.
        config: the fields of its ``config.json`` that decide shapes and bytes.
    """

    hub: str
    config: dict[str, Any]


def _shape(
    kind: str,
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    inner: int,
    vocabulary: int,
    tokens: int,
    theta: float,
    **more: Any,
) -> dict[str, Any]:
    """Make a config from the numbers of a model, which :data:`CATALOGUE` gives in the order of the parameters.

    Args:
        kind: the model type.
        width: of the hidden states.
        layers: the number of blocks.
        heads: the number of query heads.
        kv_heads: the number of key and value heads.
        inner: the width of the hidden layer inside the MLP.
        vocabulary: the vocabulary size.
        tokens: the context length.
        theta: the base of the rotary position embedding.
        **more: further fields of the config; they replace the defaults below.
    """
    return {
        "model_type": kind,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "vocab_size": vocabulary,
        "max_position_embeddings": tokens,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rms_norm_eps": 1e-6 if kind == "qwen2" else 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


CATALOGUE: dict[str, Entry] = {
    "smollm2": Entry(
        SMOLLM2,
        _shape("llama", 576, 30, 9, 3, 1536, 49152, 8192, 1e5, tie_word_embeddings=True),
    ),
    "tinyllama-1.1b": Entry(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        _shape("llama", 2048, 22, 32, 4, 5632, 32000, 2048, 1e4),
    ),
    "llama-3.2-1b": Entry(
        "unsloth/Llama-3.2-1B-Instruct",
        _shape("llama", 2048, 16, 32, 8, 8192, 128256, 131072, 5e5, head_dim=64, tie_word_embeddings=True),
    ),
    "llama-3.2-3b": Entry(
        "unsloth/Llama-3.2-3B-Instruct",
        _shape("llama", 3072, 28, 24, 8, 8192, 128256, 131072, 5e5, head_dim=128, tie_word_embeddings=True),
    ),
    "llama-2-7b": Entry(
        "meta-llama/Llama-2-7b-chat-hf",
        _shape("llama", 4096, 32, 32, 32, 11008, 32000, 4096, 1e4),
    ),
    "llama-2-13b": Entry(
        "meta-llama/Llama-2-13b-chat-hf",
        _shape("llama", 5120, 40, 40, 40, 13824, 32000, 4096, 1e4),
    ),
    "llama-3.1-8b": Entry(
        "meta-llama/Llama-3.1-8B-Instruct",
        _shape("llama", 4096, 32, 32, 8, 14336, 128256, 131072, 5e5),
    ),
    "llama-3.1-70b": Entry(
        "meta-llama/Llama-3.1-70B-Instruct",
        _shape("llama", 8192, 80, 64, 8, 28672, 128256, 131072, 5e5),
    ),
    "mistral-7b": Entry(
        "mistralai/Mistral-7B-Instruct-v0.3",
        _shape("mistral", 4096, 32, 32, 8, 14336, 32768, 32768, 1e6, sliding_window=None),
    ),
    "mixtral-8x7b": Entry(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _shape(
            "mixtral",
            4096,
            32,
            32,
            8,
            14336,
            32000,
            32768,
            1e6,
            num_local_experts=8,
            num_experts_per_tok=2,
        ),
    ),
    "qwen2.5-0.5b": Entry(
        "Qwen/Qwen2.5-0.5B-Instruct",
        _shape("qwen2", 896, 24, 14, 2, 4864, 151936, 32768, 1e6, tie_word_embeddings=True),
    ),
    "qwen2.5-1.5b": Entry(
        "Qwen/Qwen2.5-1.5B-Instruct",
        _shape("qwen2", 1536, 28, 12, 2, 8960, 151936, 32768, 1e6, tie_word_embeddings=True),
    ),
    "qwen2.5-7b": Entry(
        "Qwen/Qwen2.5-7B-Instruct",
        _shape("qwen2", 3584, 28, 28, 4, 18944, 152064, 32768, 1e6),
    ),
}
"""Short name -> model, grouped by family."""

TINY = _shape("llama", 256, 2, 4, 2, 512, 49152, 2048, 1e4, rms_norm_eps=1e-6, tie_word_embeddings=True)
"""A shape for tests that no published model has: two blocks, and SmolLM2's vocabulary.

``random:tiny`` is a model of this shape with random weights.
"""


class Configs(UserDict[str, dict[str, Any]]):
    """Configs by name; each reader gets a copy, because transformers writes into the dictionaries that it is given."""

    def __getitem__(self, name: str) -> dict[str, Any]:
        return copy.deepcopy(self.data[name])


CONFIGS = Configs({"tiny": TINY, **{name: entry.config for name, entry in CATALOGUE.items()}})
"""Name -> config, for every NAME in ``random:NAME``."""

ALIASES: dict[str, str] = {name: entry.hub for name, entry in CATALOGUE.items()}
"""Short name -> hub id."""


def short_name(model: str) -> str:
    """Spell a short name as the catalogue does.

    Args:
        model: a short name in any letter case, also after ``random:``, or any other name of a model.

    Returns:
        The catalogue's spelling. The name is returned unchanged if the catalogue does not have it, or if a local file
        or folder has exactly this name.

    Examples:
        >>> short_name("SmolLM2")
        'smollm2'
        >>> short_name("owner/name")
        'owner/name'
    """
    prefix = "random:" if model.startswith("random:") else ""
    known = same(model.removeprefix(prefix), CONFIGS)
    if not known or (not prefix and Path(model).exists()):
        return model
    return prefix + known
