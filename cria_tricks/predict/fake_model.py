"""A model that holds no bytes: what ``load`` would load, quantised and adapted by the same code, of fake tensors.

It is built and edited on the meta device, where modules can be moved and cast, and handed over to a fake mode at last.
"""

import copy
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import bitsandbytes as bnb
import torch
from bitsandbytes.functional import QuantState
from torch._subclasses import FakeTensor, FakeTensorMode
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from cria_tricks.bill.constants import BLOCK
from cria_tricks.common.errors import BadInput
from cria_tricks.load.model import EDITS, built_empty
from cria_tricks.step_plan import Plan
from cria_tricks.tricks import adamw_8bit


def fake_model(plan: Plan, config: Any, fake: FakeTensorMode) -> Any:
    """Build a model as ``load`` would, the adapter included, ready to train.

    Args:
        plan: the plan that would run.
        config: the model's config, of transformers; it is not changed.
        fake: the mode that its tensors will belong to.

    Raises:
        BadInput: if it is no decoder, or does not fit the plan.
    """
    # What flash-attn keeps is what torch's flash kernel keeps, and that one needs no package.
    attention = plan.model["attn_implementation"].replace("flash_attention_2", "sdpa")
    name = config.name_or_path or config.model_type
    model = built_empty(plan, copy.deepcopy(config), name)
    if attention != plan.model["attn_implementation"] and not model._supports_sdpa:
        raise BadInput(f"--dry-run: counts flash_attention_2 by torch's attention, for which {name} is not made; leave "
                       "--dry-run out")  # fmt: skip
    plan = replace(plan, model={**plan.model, "attn_implementation": attention})
    model.set_attn_implementation(attention)
    model.config.use_cache = False
    with torch.device("meta"):
        if plan.quantization:
            _quantise(model, plan)
        for edit in plan.after_load:
            if edit != "compile_blocks":  # nobody could count inside of them
                model = EDITS[edit](model, plan)
    with fake:
        _hand_over(model)
    if plan.training.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable(plan.training["gradient_checkpointing_kwargs"])
    return model.train()


def _quantise(model: Any, plan: Plan) -> None:
    """Put empty layers of bitsandbytes into a meta model, as they are after they were loaded."""
    dtype = getattr(torch, plan.model["dtype"])
    quantization = BitsAndBytesConfig(**plan.quantization)
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), quantization)
    # from_pretrained would set both; peft and transformers look at them.
    model.is_loaded_in_4bit = quantization.load_in_4bit
    model.is_loaded_in_8bit = quantization.load_in_8bit
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.weight = _four_bits(module, quantization, dtype)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            module.weight = _eight_bits(module)
        else:
            continue
        if module.bias is not None:  # born in fp32
            module.bias.data = module.bias.data.to(dtype)


def _four_bits(module: Any, quantization: BitsAndBytesConfig, dtype: torch.dtype) -> bnb.nn.Params4bit:
    """Make a packed weight, two elements a byte, with its scales."""
    kind = quantization.bnb_4bit_quant_type
    double = quantization.bnb_4bit_use_double_quant
    elements = module.weight.numel()
    blocks = -(-elements // BLOCK)  # rounded up
    scales: dict[str, Any] = {"absmax": torch.empty(blocks)}
    if double:  # the scales are bytes, around a mean, and have scales of their own
        scales = {
            "absmax": torch.empty(blocks, dtype=torch.uint8),
            "offset": torch.empty(()),
            "state2": _scales_of(blocks),
        }
    state = QuantState(
        **scales,
        shape=module.weight.shape,
        code=torch.empty(16),
        blocksize=BLOCK,
        quant_type=kind,
        dtype=dtype,
    )
    packed = torch.empty((elements + 1) // 2, 1, dtype=torch.uint8)
    return bnb.nn.Params4bit(
        packed, False, state, quant_type=kind, compress_statistics=double, module=module, bnb_quantized=True
    )


def _scales_of(blocks: int) -> QuantState:
    """Make the scales of the scales, after double quantization."""
    absmax = torch.empty(-(-blocks // adamw_8bit.BLOCK))
    return QuantState(absmax, code=torch.empty(256), blocksize=adamw_8bit.BLOCK, dtype=torch.float32)


def _eight_bits(module: Any) -> bnb.nn.Int8Params:
    """Make an 8-bit weight: one byte an element, and one scale a row."""
    codes = torch.empty(module.weight.shape, dtype=torch.int8)
    return bnb.nn.Int8Params(codes, False, False, codes, torch.empty(len(codes)))


class Params4bit(FakeTensor):
    """A packed weight; bitsandbytes' own class takes no fake tensor, and peft knows it by its name."""


class Int8Params(FakeTensor):
    """The same in 8 bits."""


def _hand_over(model: Any) -> None:
    """Put fake tensors in the place of meta tensors; what was shared stays shared."""
    made: dict[torch.Tensor, Any] = {}
    for tensors, name, meta in list(_tensors(model)):
        if meta not in made:
            made[meta] = _fake_like(meta)
        tensors[name] = made[meta]


def _tensors(model: Any) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Give every tensor of a model with its name and the dictionary that holds it."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield tensors, name, tensor


def _fake_like(meta: Any) -> Any:
    made: Any = torch.empty(meta.shape, dtype=meta.dtype)
    if not isinstance(meta, torch.nn.Parameter):
        return made
    made = torch.nn.Parameter(made, requires_grad=meta.requires_grad)
    if isinstance(meta, bnb.nn.Params4bit):
        made.__class__ = Params4bit
        made.quant_state = copy.copy(meta.quant_state)
        _replace_scales(made.quant_state)
        if made.quant_state.state2:  # double quantization: the scales have scales
            _replace_scales(made.quant_state.state2)
    elif isinstance(meta, bnb.nn.Int8Params):
        made.__class__ = Int8Params
        made.CB = made.data
        made.SCB = _fake_like(meta.SCB)
    return made


def _replace_scales(state: QuantState) -> None:
    for name in ("absmax", "code", "offset"):
        tensor = getattr(state, name)
        if isinstance(tensor, torch.Tensor):
            setattr(state, name, _fake_like(tensor))
