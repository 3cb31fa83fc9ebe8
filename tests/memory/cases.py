"""Recipes by short names of their toggles, and both counts of one."""

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (it registers the operation asked for below)

from cria_tricks.bill.bill import Bill
from cria_tricks.hardware import Device
from cria_tricks.hardware.cards import CARDS
from cria_tricks.models.configs import find_config
from cria_tricks.models.shape import shape_of
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches.folds import estimate, for_shape

GIB = 2**30
CPU = Device("cpu", "a processor", (0, 0), real_bf16=False, memory_bytes=16 * GIB)
T4, A100 = CARDS["t4"].device, CARDS["a100"].device

SHORT = {
    "lora": "peft=lora",
    "head": "peft=head",
    "prompt": "peft=prompt_tuning",
    "side": "peft=side_network",
    "fp16": "precision=fp16",
    "bf16": "precision=bf16",
    "int8": "quantization=int8",
    "nf4": "quantization=nf4",
    "double": "double_quantization=true",
    "lean": "lean_preparation=true",
    "sdpa": "attention=sdpa",
    "flash": "attention=flash_attention_2",
    "expand": "expand_kv=true",
    "checkpoint": "gradient_checkpointing=true",
    "keep": "keep_attention=true",
    "offload": "activation_offload=true",
    "overlap": "activation_offload=overlapped",
    "chunked": "chunked_loss=true",
    "packing": "packing=true",
    "accumulate": "gradient_accumulation=8",
    "8bit": "optimizer=adamw_8bit",
    "paged": "paged_optimizer=true",
    "backward": "optimizer_in_backward=clip",
    "fused": "fused_lora=true",
    "blocks": "fused_blocks=true",
    "tile": "tiled_mlp=true",
    "layers": "layer_by_layer=true",
    "stream": "stream_layers=true",
    "compile": "compile=true",
}
EVERYTHING = "lora fp16 nf4 double lean sdpa expand checkpoint chunked 8bit paged"
"""The capstone: QLoRA of Llama-3.2-1B on a free T4, all that saves memory switched on."""


def recipe(toggles: str = "", batch: int = 1, tokens: int = 2048) -> Recipe:
    """A recipe by short names of toggles, or their own; a word with a dot is a whole setting."""
    words = (word if "." in word else f"tricks.{SHORT.get(word, f'{word}=true')}" for word in toggles.split())
    return with_settings(Recipe(), [f"train.batch_size={batch}", f"data.max_length={tokens}", *words])


def bill(
    toggles: str = "",
    batch: int = 1,
    tokens: int = 2048,
    *,
    model: str = "llama-3.2-1b",
    device: Device = T4,
    **fields: int,
) -> Bill:
    """By hand; ``fields`` of the model's config are changed."""
    return estimate(recipe(toggles, batch, tokens), shape_of({**find_config(model), **fields}, model), device)


def counted(toggles: str, batch: int, tokens: int, *, model: str, device: Device, **fields: int) -> int:
    """The same by dry run: peak bytes."""
    from transformers import AutoConfig

    from cria_tricks.predict.dry_run import dry_run

    wanted = recipe(toggles, batch, tokens)
    config = {**find_config(model), **fields}
    plan = for_shape(resolve(wanted, device), wanted, shape_of(config, model))
    return dry_run(plan, AutoConfig.for_model(**config), batch, tokens).peak_bytes


def skip_experts_shaped_by_numbers(model: str) -> None:
    """Skip a mixture of experts where transformers, 5.16 for one, gives a dry run nothing to shape them by."""
    if model == "mixtral-8x7b" and not hasattr(torch.ops.transformers, "grouped_mm_fallback_backward"):
        pytest.skip("this transformers shapes the gradients of experts by numbers")
