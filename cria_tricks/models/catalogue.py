"""List the models that have a short name: their hub ids, and their shapes as in their ``config.json``."""

import copy
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.common.fields import same

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
EPS_6 = ("qwen2", "qwen3", "gemma3_text", "smollm3", "olmo2")
"""The model types whose published models add 1e-6 to the variance in their norms; the others add 1e-5."""

# Where the shapes were read. The hub cannot be reached where they were checked; these can be opened without it.
LITGPT = "github.com/Lightning-AI/litgpt, litgpt/config.py, commit 26857050"
FMS = "github.com/foundation-model-stack/foundation-model-stack, fms/models/granite.py, commit 062adf6e"
OLMO_CORE = "ai2-olmo-core 3.0.0 (PyPI), olmo_core/nn/transformer/config.py"
TRANSFORMERS = "transformers 5.23.0, default of SmolLM3Config"


@dataclass(frozen=True)
class Entry:
    """A published model.

    Attributes:
        hub: the hub id of its instruction-tuned version; for some models that of a mirror, which does not ask to accept
            a licence first. Empty for the text part of a model that takes more than text: it has a bill, as
            ``random:NAME``, and cannot be trained.
        config: the fields of its ``config.json`` that decide shapes and bytes.
        source: where these fields were read, if not in the ``config.json`` of ``hub`` itself.
    """

    hub: str
    config: dict[str, Any]
    source: str = ""


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
        "rms_norm_eps": 1e-6 if kind in EPS_6 else 1e-5,
        "tie_word_embeddings": False,
        **more,
    }


def _gemma3(config: dict[str, Any], window: int) -> dict[str, Any]:
    """Complete the config of a Gemma 3: some blocks attend to a window of tokens, and rotate positions by another base.

    Args:
        config: from :func:`_shape`.
        window: the tokens that such a block attends to.
    """
    thetas = {"full_attention": 1e6, "sliding_attention": 1e4}
    rope = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    more = {"head_dim": 256, "sliding_window": window, "tie_word_embeddings": True, "rope_parameters": rope}
    return config | more


def _scales(logits: float, attention: float) -> dict[str, float]:
    """Return the factors by which Granite scales its hidden states; they change no byte."""
    return {
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": logits,
        "attention_multiplier": attention,
    }


CATALOGUE: dict[str, Entry] = {
    "smollm2": Entry(SMOLLM2, _shape("llama", 576, 30, 9, 3, 1536, 49152, 8192, 1e5, tie_word_embeddings=True)),
    "tinyllama-1.1b": Entry(
        "TinyLlama/TinyLlama-1.1B-Chat-v1.0", _shape("llama", 2048, 22, 32, 4, 5632, 32000, 2048, 1e4)
    ),
    "llama-3.2-1b": Entry(
        "unsloth/Llama-3.2-1B-Instruct",
        _shape("llama", 2048, 16, 32, 8, 8192, 128256, 131072, 5e5, head_dim=64, tie_word_embeddings=True),
    ),
    "llama-3.2-3b": Entry(
        "unsloth/Llama-3.2-3B-Instruct",
        _shape("llama", 3072, 28, 24, 8, 8192, 128256, 131072, 5e5, head_dim=128, tie_word_embeddings=True),
    ),
    "llama-2-7b": Entry("meta-llama/Llama-2-7b-chat-hf", _shape("llama", 4096, 32, 32, 32, 11008, 32000, 4096, 1e4)),
    "llama-2-13b": Entry("meta-llama/Llama-2-13b-chat-hf", _shape("llama", 5120, 40, 40, 40, 13824, 32000, 4096, 1e4)),
    "llama-3.1-8b": Entry(
        "meta-llama/Llama-3.1-8B-Instruct", _shape("llama", 4096, 32, 32, 8, 14336, 128256, 131072, 5e5)
    ),
    "llama-3.1-70b": Entry(
        "meta-llama/Llama-3.1-70B-Instruct", _shape("llama", 8192, 80, 64, 8, 28672, 128256, 131072, 5e5)
    ),
    "mistral-7b": Entry(
        "mistralai/Mistral-7B-Instruct-v0.3",
        _shape("mistral", 4096, 32, 32, 8, 14336, 32768, 32768, 1e6, sliding_window=None),
    ),
    "mixtral-8x7b": Entry(
        "mistralai/Mixtral-8x7B-Instruct-v0.1",
        _shape("mixtral", 4096, 32, 32, 8, 14336, 32000, 32768, 1e6, num_local_experts=8, num_experts_per_tok=2),
    ),
    "qwen2.5-0.5b": Entry(
        "Qwen/Qwen2.5-0.5B-Instruct",
        _shape("qwen2", 896, 24, 14, 2, 4864, 151936, 32768, 1e6, tie_word_embeddings=True),
    ),
    "qwen2.5-1.5b": Entry(
        "Qwen/Qwen2.5-1.5B-Instruct",
        _shape("qwen2", 1536, 28, 12, 2, 8960, 151936, 32768, 1e6, tie_word_embeddings=True),
    ),
    "qwen2.5-7b": Entry("Qwen/Qwen2.5-7B-Instruct", _shape("qwen2", 3584, 28, 28, 4, 18944, 152064, 32768, 1e6)),
    "qwen3-0.6b": Entry(
        "Qwen/Qwen3-0.6B",
        _shape("qwen3", 1024, 28, 16, 8, 3072, 151936, 40960, 1e6, head_dim=128, tie_word_embeddings=True),
        f"{LITGPT}; tied: config.json in TensorStack/TextEncoder, Qwen-3-06B",
    ),
    "qwen3-1.7b": Entry(
        "Qwen/Qwen3-1.7B",
        _shape("qwen3", 2048, 28, 16, 8, 6144, 151936, 40960, 1e6, head_dim=128, tie_word_embeddings=True),
        f"{LITGPT}; tied: config.json of zeroentropy/zerank-1-small",
    ),
    "qwen3-4b": Entry(
        "Qwen/Qwen3-4B",
        _shape("qwen3", 2560, 36, 32, 8, 9728, 151936, 40960, 1e6, head_dim=128, tie_word_embeddings=True),
        f"{LITGPT}; tied: config.json of MultiRL/qwen3_4b_instruct_sft",
    ),
    "qwen3-8b": Entry(
        "Qwen/Qwen3-8B",
        _shape("qwen3", 4096, 36, 32, 8, 12288, 151936, 40960, 1e6, head_dim=128),
        f"{LITGPT}; not tied: config.json copied from it by thejaminator/qwen-hook-layer-9",
    ),
    "qwen3-14b": Entry(
        "Qwen/Qwen3-14B",
        _shape("qwen3", 5120, 40, 40, 8, 17408, 151936, 40960, 1e6, head_dim=128),
        f"{LITGPT}; not tied: the table of qwenlm.github.io/blog/qwen3, as public copies quote it",
    ),
    "gemma-3-1b": Entry(
        "google/gemma-3-1b-it",
        _gemma3(_shape("gemma3_text", 1152, 26, 4, 1, 6912, 262144, 32768, 1e6), 512),
        f"{LITGPT}; context: config.json of mlx-community/gemma-3-1b-pt-6bit",
    ),
    "gemma-3-4b": Entry(
        "",
        _gemma3(_shape("gemma3_text", 2560, 34, 8, 4, 10240, 262208, 131072, 1e6), 1024),
        f"{LITGPT}; vocabulary: config.json of Creekside/gemma-3, the text part alone",
    ),
    "smollm3-3b": Entry(
        "HuggingFaceTB/SmolLM3-3B",
        _shape("smollm3", 2048, 36, 16, 4, 11008, 128256, 65536, 5e6, tie_word_embeddings=True),
        f"{TRANSFORMERS}; context: config.json of patrickfleith/smollm3-sft",
    ),
    "phi-4-mini": Entry(
        "microsoft/Phi-4-mini-instruct",
        _shape(
            "phi3",
            3072,
            32,
            24,
            8,
            8192,
            200064,
            131072,
            1e4,
            # Its sliding window is longer than its context, so it has no effect.
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
            pad_token_id=0,
            tie_word_embeddings=True,
        ),
        f"{LITGPT}; config.json of onnx-community/Phi-4-mini-instruct-ONNX-MHA",
    ),
    "granite-3.1-2b": Entry(
        "ibm-granite/granite-3.1-2b-instruct",
        _shape("granite", 2048, 40, 32, 8, 8192, 49155, 131072, 5e6, tie_word_embeddings=True, **_scales(8.0, 2**-6)),
        f"{FMS} (3_1_2b)",
    ),
    "granite-3.1-8b": Entry(
        "ibm-granite/granite-3.1-8b-instruct",
        _shape("granite", 4096, 40, 32, 8, 12800, 49155, 131072, 1e7, tie_word_embeddings=True, **_scales(16.0, 2**-7)),
        f"{FMS} (8b); context: config.json of nm-testing/granite-3.1-8b-instruct2of4-W8A8-FP8-Dynamic-Per-Token",
    ),
    "olmo-2-1b": Entry(
        "allenai/OLMo-2-0425-1B-Instruct",
        _shape("olmo2", 2048, 16, 16, 16, 8192, 100352, 4096, 5e5),
        f"{OLMO_CORE} (olmo2_1B_v2)",
    ),
    "olmo-2-7b": Entry(
        "allenai/OLMo-2-1124-7B-Instruct",
        _shape("olmo2", 4096, 32, 32, 32, 11008, 100352, 4096, 5e5),
        f"{LITGPT}; {OLMO_CORE} (olmo2_7B)",
    ),
    "olmo-2-13b": Entry(
        "allenai/OLMo-2-1124-13B-Instruct",
        _shape("olmo2", 5120, 40, 40, 40, 13824, 100352, 4096, 5e5),
        f"{LITGPT}; config.json of allenai/OLMo-2-1124-13B",
    ),
    "mistral-small-24b": Entry(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        _shape("mistral", 5120, 40, 32, 8, 32768, 131072, 32768, 1e8, head_dim=128, sliding_window=None),
        "config.json of unsloth/Mistral-Small-24B-Instruct-2501-GGUF",
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

ALIASES: dict[str, str] = {name: entry.hub for name, entry in CATALOGUE.items() if entry.hub}
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
