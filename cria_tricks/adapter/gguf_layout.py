"""Write a model's weights and shapes as llama.cpp wants them in a GGUF file.

llama.cpp rotates neighbouring numbers of a head (0 with 1, 2 with 3), transformers rotates number i with number
i + d/2 of a head of width d. So for the architecture ``llama`` the rows of W_q and W_k change their order, and the
products q k stay the same. Qwen2 is rotated as in transformers, so its rows stay.

Llama 3 also divides its low rotary frequencies by a factor. A GGUF file stores these factors as the tensor
``rope_freqs.weight``, one for each frequency.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors import safe_open
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cria_tricks.common.errors import BadInput
from cria_tricks.models import weight_files

KINDS = {"f16": Kind.F16, "q8_0": Kind.Q8_0, "q4_0": Kind.Q4_0}
"""The types of file that can be written; those that the package gguf can quantise and llama.cpp calls common."""
FILE_TYPES = {
    "f16": gguf.LlamaFileType.MOSTLY_F16,
    "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
ARCHITECTURES = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}
"""transformers' model type -> llama.cpp's architecture."""
ROPES = {"llama": ("default", "llama3"), "qwen2": ("default",)}
"""The kinds of rotary embedding that can be written, by model type."""
BLOCK = 32
"""How many numbers of a row share one scale in Q8_0 and Q4_0."""
ROPE_FREQS = "rope_freqs.weight"
WITH_TRANSFORMERS = "use the folder with transformers or vLLM, or convert it with llama.cpp's convert_hf_to_gguf.py"


def refuse(config: Any, name: str) -> None:
    """Refuse a model that this module cannot write.

    Args:
        config: transformers' config.
        name: what the error calls the model.

    Raises:
        BadInput: with the reason, and what to do instead.
    """
    why = _unsupported(config)
    if why:
        raise BadInput(f"{name}: {why}; {WITH_TRANSFORMERS}")


def _unsupported(config: Any) -> str:
    kind = config.model_type
    if kind not in ARCHITECTURES:
        return f"is of the kind {kind}, and only {' and '.join(ARCHITECTURES)} are written as GGUF here"
    if getattr(config, "quantization_config", None):
        return "its weights are quantised already, and a GGUF file is written from 16 or 32 bits"
    rope = config.rope_parameters["rope_type"]
    if rope not in ROPES[kind]:
        return f"its positions are scaled by {rope}, and only {' and '.join(ROPES[kind])} are written here"
    if config.hidden_act != "silu":
        return f"its activation is {config.hidden_act}, and llama.cpp computes silu for this kind"
    if kind == "llama" and (config.attention_bias or config.mlp_bias):
        return "its layers have biases, which are not written here for llama"
    if kind == "qwen2" and config.use_sliding_window:
        return "its attention has a sliding window, which llama.cpp ignores for this kind"
    return ""


def head_width(config: Any) -> int:
    """Return the width of a head; older configs do not have it as a field."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def describe(writer: gguf.GGUFWriter, config: Any, kind: str, title: str) -> None:
    """Write a model's shapes, positions and norms into the file's metadata.

    Args:
        writer: of the file.
        config: transformers' config.
        kind: the type of the file, a key of :data:`KINDS`.
        title: the model's name in the file.
    """
    width = head_width(config)
    writer.add_type("model")
    writer.add_name(title)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(FILE_TYPES[kind])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)


def stored(folder: Path, config: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Read a model's weights from its safetensors files, one at a time.

    Args:
        folder: of the model.
        config: transformers' config.

    Yields:
        The name in transformers, and the tensor in fp32.
    """
    for file in weight_files.find(folder, str(folder)):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (the file is not a dictionary)
                tied = name == "lm_head.weight" and config.tie_word_embeddings
                if tied or name.endswith("rotary_emb.inv_freq"):
                    continue  # llama.cpp takes the embedding as the head, and computes the frequencies
                yield name, opened.get_tensor(name).float()


def gguf_name(name: str, config: Any) -> str:
    """Return llama.cpp's name of a tensor, by transformers' name."""
    names = gguf.get_tensor_name_map(ARCHITECTURES[config.model_type], config.num_hidden_layers)
    found = names.get_name(name, try_suffixes=(".weight", ".bias"))
    if found is None:
        raise BadInput(f"{name}: llama.cpp knows no such tensor in a model of the kind {config.model_type}")
    return found


def write_tensors(writer: gguf.GGUFWriter, folder: Path, config: Any, kind: str) -> None:
    """Add all tensors of a model to the file, in llama.cpp's order of rows, rounded to the file's type.

    Args:
        writer: of the file; it keeps the tensors in memory until the file is written.
        folder: of the model.
        config: transformers' config.
        kind: the type of the file, a key of :data:`KINDS`.
    """
    factors = rope_factors(config)
    if factors is not None:
        writer.add_tensor(ROPE_FREQS, factors.numpy())
    for name, weight in stored(folder, config):
        target = gguf_name(name, config)
        rows = weight
        if config.model_type == "llama" and "q_proj" in name:
            rows = permute(weight, config.num_attention_heads)
        if config.model_type == "llama" and "k_proj" in name:
            rows = permute(weight, config.num_key_value_heads)
        wanted = kind_of(target, tuple(rows.shape), kind)
        packed = gguf.quants.quantize(np.ascontiguousarray(rows.numpy()), wanted)
        writer.add_tensor(target, packed, raw_dtype=wanted)


def kind_of(name: str, shape: tuple[int, ...], kind: str) -> Kind:
    """Choose the type of one tensor.

    Norms and biases stay in fp32, as llama.cpp wants them. In a Q4_0 file the embedding and the head get 8 bits: an
    error there reaches every token, and llama.cpp's own files also give them more than 4. A matrix whose rows cannot
    be cut into blocks of 32 stays in 16 bits.

    Args:
        name: llama.cpp's name.
        shape: of the tensor.
        kind: the type of the file, a key of :data:`KINDS`.
    """
    if len(shape) == 1:
        return Kind.F32
    if shape[-1] % BLOCK:
        return Kind.F16
    if kind == "q4_0" and name in ("token_embd.weight", "output.weight"):
        return Kind.Q8_0
    return KINDS[kind]


def permute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Reorder the rows of W_q or W_k, so that llama.cpp rotates the pairs that transformers rotates.

    Args:
        weight: shape (heads * d, C).
        heads: how many heads the rows belong to.

    Returns:
        The same rows: in each head 0, d/2, 1, d/2 + 1, and so on.
    """
    halves = weight.reshape(heads, 2, -1, weight.shape[-1])
    return halves.transpose(1, 2).reshape(weight.shape)


def rope_factors(config: Any) -> torch.Tensor | None:
    """Compute by what Llama 3 divides each rotary frequency, shape (d/2,); ``None`` if it divides none."""
    rope = config.rope_parameters
    if rope["rope_type"] == "default":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    width = head_width(config)
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
    return plain / scaled
