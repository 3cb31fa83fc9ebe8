"""Build the model that ``load`` would load, quantised and with its adapter, from fake tensors, which hold no data.

The model is built and edited on the meta device, because modules can be moved and cast there. At the end fake tensors
take the place of its meta tensors, because the dry run counts the bytes of fake tensors, and takes meta tensors as 0.

Fake tensors pretend to be on a CPU, also under the kernels of a CUDA card. So a count of live bytes sees every tensor
that these kernels allocate, but not the workspace inside a kernel. Other functions answer what code asks about the
values of fake tensors, which have none.
"""

import contextlib
import copy
import functools
import unittest.mock
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from bitsandbytes.functional import QuantState
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import BitsAndBytesConfig, __version__, masking_utils
from transformers.integrations import moe
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from cria_tricks.bill.operation import BLOCK
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import Device
from cria_tricks.hardware.attention_kernels import kernel_for
from cria_tricks.load import overlapped_offload, streaming
from cria_tricks.load.model import built_empty, forbid_cpu_repacking
from cria_tricks.models.pretrained import blocks_of
from cria_tricks.step_plan import COMPILE, Plan, function_at
from cria_tricks.switches import adamw_8bit, fused_blocks, lora
from cria_tricks.techniques import fused_lora, packing
from cria_tricks.techniques.activation_offload import Offloaded


def fake_model(plan: Plan, config: Any, fake: FakeTensorMode) -> Any:
    """Build a model as ``load`` would, the adapter included, ready to train.

    Args:
        plan: the plan that would run.
        config: the model's config, from transformers; it is not changed.
        fake: the fake mode to which the model's tensors will belong.

    Raises:
        BadInput: if the model is no decoder, does not fit the plan, or cannot be counted with flash_attention_2.
    """
    # Torch's own flash kernel stands in for flash-attn: it saves the same tensors, and needs no extra package.
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
            forbid_cpu_repacking(model)
        for edit in plan.after_load:
            if edit == fused_blocks.BY_TRITON:  # kernels cannot run on tensors without data; these save the same
                edit = fused_blocks.FUSE
            # A dry run could not count the memory inside compiled blocks, and tensors without data hold no start.
            if edit not in (COMPILE, *lora.STARTS):
                model = function_at(edit)(model, plan)
    with fake:
        _hand_over(model)
        if plan.streaming:
            streaming.without_numbers(blocks_of(model))
    return model.train()


def _quantise(model: Any, plan: Plan) -> None:
    """Replace the linear layers of a meta model by bitsandbytes' quantised ones, as they are after loading."""
    dtype = getattr(torch, plan.model["dtype"])
    quantization = BitsAndBytesConfig(**plan.quantization)
    replace_with_bnb_linear(model, get_keys_to_not_convert(model), quantization)
    # from_pretrained would set both flags, which peft and transformers read.
    model.is_loaded_in_4bit = quantization.load_in_4bit
    model.is_loaded_in_8bit = quantization.load_in_8bit
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.weight = _four_bits(module, quantization, dtype)
        elif isinstance(module, bnb.nn.Linear8bitLt):
            module.weight = _eight_bits(module)
        else:
            continue
        if module.bias is not None:  # the new layer has it in fp32; from_pretrained would load it in the model's dtype
            module.bias.data = module.bias.data.to(dtype)


def _four_bits(module: Any, quantization: BitsAndBytesConfig, dtype: torch.dtype) -> bnb.nn.Params4bit:
    """Make an empty 4-bit weight, with two elements in each byte, and the quantization state that holds its scales."""
    kind = quantization.bnb_4bit_quant_type
    double = quantization.bnb_4bit_use_double_quant
    elements = module.weight.numel()
    blocks = -(-elements // BLOCK)  # rounded up
    scales: dict[str, Any] = {"absmax": torch.empty(blocks)}
    # Double quantization: the mean of the scales is subtracted, then each becomes one byte, and 256 of these bytes
    # share one fp32 scale.
    if double:
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
    # False: it needs no gradient.
    return bnb.nn.Params4bit(
        packed, False, state, quant_type=kind, compress_statistics=double, module=module, bnb_quantized=True
    )


def _scales_of(blocks: int) -> QuantState:
    """Make the state of quantised scales: one fp32 scale for every 256 of them, and a table of 256 levels.

    bitsandbytes quantises scales as it quantises the states of 8-bit AdamW, so the block size is the same.
    """
    absmax = torch.empty(-(-blocks // adamw_8bit.BLOCK))
    return QuantState(absmax, code=torch.empty(256), blocksize=adamw_8bit.BLOCK, dtype=torch.float32)


def _eight_bits(module: Any) -> bnb.nn.Int8Params:
    """Make an empty 8-bit weight: one byte for each element, and one fp32 scale for each output feature."""
    codes = torch.empty(module.weight.shape, dtype=torch.int8)
    # The two False: no gradient, and no fp16 weights. Then the codes once more (CB), and the scales (SCB).
    return bnb.nn.Int8Params(codes, False, False, codes, torch.empty(len(codes)))


class Params4bit(FakeTensor):
    """Stand in for bitsandbytes' class of the same name: a fake tensor that holds a 4-bit weight.

    bitsandbytes' own class cannot be made from a fake tensor. The name matters, because peft looks for 4-bit weights by
    the name of their class.
    """


class Int8Params(FakeTensor):
    """Stand in for bitsandbytes' class of the same name: a fake tensor that holds an 8-bit weight."""


def _hand_over(model: Any) -> None:
    """Replace the meta tensors of a model by fake ones; a tensor that two modules share (a tied head) stays shared."""
    made: dict[torch.Tensor, Any] = {}
    for tensors, name, meta in list(_tensors(model)):
        if meta not in made:
            made[meta] = _fake_like(meta)
        tensors[name] = made[meta]


def _tensors(model: Any) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """Yield every parameter and buffer of a model: the dictionary that holds it, its name there, the tensor."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield tensors, name, tensor


def _fake_like(meta: Any) -> Any:
    """Make a fake tensor with the shape and dtype of a meta tensor; a quantised weight keeps its quantization state."""
    made: Any = torch.empty(meta.shape, dtype=meta.dtype)  # fake, because this runs inside the fake mode
    if not isinstance(meta, torch.nn.Parameter):
        return made
    made = torch.nn.Parameter(made, requires_grad=meta.requires_grad)
    if isinstance(meta, bnb.nn.Params4bit):
        made.__class__ = Params4bit
        made.quant_state = meta.quant_state  # nobody uses the meta weight after this
        _replace_scales(made.quant_state)
        if made.quant_state.state2:  # double quantization: the scales have scales
            _replace_scales(made.quant_state.state2)
    elif isinstance(meta, bnb.nn.Int8Params):
        made.__class__ = Int8Params
        made.CB = made.data
        made.SCB = _fake_like(meta.SCB)
    return made


def _replace_scales(state: QuantState) -> None:
    """Replace the scales, the levels and the mean of a quantization state by fake tensors, in place."""
    for name in ("absmax", "code", "offset"):
        tensor = getattr(state, name)
        if isinstance(tensor, torch.Tensor):
            setattr(state, name, _fake_like(tensor))


@contextlib.contextmanager
def refuse_data_dependent_shapes(kind: str) -> Iterator[None]:
    """Turn the error of a shape that depends on tensor values into one line.

    In transformers 5.16, for example, the router of a mixture of experts decides how many tokens each expert gets.

    Args:
        kind: the model type, for the message.

    Raises:
        BadInput: if code inside the context asks a fake tensor for its values.
    """
    try:
        yield
    except DataDependentOutputException:
        raise BadInput(
            f"--dry-run: in transformers {__version__} shapes inside a {kind} model depend on numbers, and a dry run "
            "has none; leave --dry-run out, or take a newer transformers"
        ) from None


@contextlib.contextmanager
def known_values(plan: Plan) -> Iterator[None]:
    """Answer two questions about the values of tensors, because fake tensors have no values.

    - Does the batch need an attention mask? A single row has no padding, so it needs none. Several rows usually differ
      in length and have padding, so they need one, except with flash_attention_2, which takes no such mask.
    - How long are the documents of a packed row? One document is taken to fill the row. Several short ones would save
      as many bytes for the backward pass.
    """
    patch = unittest.mock.patch.object
    needs_no_mask = masking_utils._ignore_causal_mask_sdpa

    def without_values(padding_mask: torch.Tensor | None, *sizes: Any) -> bool:
        if flash_attention_2(plan):  # needs no mask for a sliding window either, so leave out its size, the last one
            return needs_no_mask(None, *sizes[:4])
        if padding_mask is None or len(padding_mask) == 1:
            return needs_no_mask(None, *sizes)  # None: there is no padding
        return needs_no_mask(padding_mask, *sizes)

    def one_document_a_row(begins_BT: torch.Tensor) -> "_Lengths":
        rows, tokens = begins_BT.shape
        return _Lengths([tokens] * rows)

    with (
        patch(packing, "document_lengths", one_document_a_row),
        patch(masking_utils, "_ignore_causal_mask_sdpa", without_values),
    ):
        yield


class _Lengths(list[int]):
    """A list of document lengths in place of a tensor: it has the three tensor methods that the callers use."""

    def cpu(self) -> "_Lengths":
        return self

    def dim(self) -> int:
        return 1

    def tolist(self) -> list[int]:
        return self


def flash_attention_2(plan: Plan) -> bool:
    """Whether attention is that of the package flash-attn."""
    return plan.model.get("attn_implementation") == "flash_attention_2"


@contextlib.contextmanager
def kernels_of(device: Device) -> Iterator[None]:
    """Patch the libraries so that fake tensors on "cpu" take the kernels that real tensors take on a CUDA card.

    Attention takes the kernel that the card would choose, and 8-bit products take bitsandbytes' kernels for CUDA. A
    tensor that offload or paging would put outside the card's memory becomes a meta tensor, which is not counted.

    Args:
        device: the card. For a CPU only two kernels are patched that ask for values: of experts, and of int8 codes.
    """
    patch = unittest.mock.patch.object
    # torch's grouped product, one call for all experts, works on fake tensors only in bf16. A T4 does not have it, and
    # takes transformers' fallback.
    at_once = patch(moe, "_can_use_grouped_mm", functools.partial(_experts_at_once, device))
    # A CPU multiplies int8 codes only in eval mode. bitsandbytes first looks for outliers, and fake tensors have none.
    quantises = patch(bnb.functional, "int8_vectorwise_quant", _int8_vectorwise_quant)
    multiplies = patch(torch.ops.bitsandbytes, "int8_mixed_scaled_mm", _int8_mixed_scaled_mm)
    if device.kind != "cuda":
        with at_once, quantises, multiplies:
            yield
        return
    with (
        at_once,
        quantises,
        multiplies,
        # Not a TorchFunctionMode: it is inactive in the backward pass, in which checkpointed blocks run once more.
        patch(F, "scaled_dot_product_attention", functools.partial(_attend, device)),
        # bitsandbytes would choose its kernels for CPUs, because that is where fake tensors say they are.
        patch(bnb.autograd._functions, "MatMul8bitFp", bnb.autograd._functions.MatMul8bitLt),
        patch(F, "dropout", _dropout),
        patch(bnb.optim.optimizer.Optimizer8bit, "get_state_buffer", _state_buffer),
        patch(bnb.optim.optimizer.Optimizer8bit, "prefetch_state", lambda optimizer, weight: None),
        patch(Offloaded, "HOST", "meta"),
        patch(overlapped_offload, "copy_stream", lambda kind: overlapped_offload.CopyStream(torch.cpu)),
        patch(fused_lora, "adds_up_in_fp32", lambda x: True),
    ):
        yield


def _state_buffer(optimizer: Any, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Make an optimizer state; a paged one is a meta tensor, because it does not take the card's memory."""
    paged = optimizer.is_paged and weight.numel() >= 1e5  # bitsandbytes does not page smaller states
    where = "meta" if paged else weight.device
    state: Any = torch.zeros_like(weight, dtype=dtype, device=where)
    state.is_paged = paged  # otherwise bitsandbytes refuses a state on another device than its weight
    return state


def _attend(
    device: Device,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Stand in for torch's ``scaled_dot_product_attention``: run the kernel that the card would choose."""
    if torch.is_autocast_enabled("cpu"):  # as autocast does: cast the inputs of attention, and nothing inside it
        dtype = torch.get_autocast_dtype("cpu")
        query = query.to(dtype)
        key = key.to(dtype)
        value = value.to(dtype)
    grouped = enable_gqa and query.shape[1] != key.shape[1]
    kernel = kernel_for(device, str(query.dtype).removeprefix("torch."), masked=attn_mask is not None, grouped=grouped)
    with torch.autocast("cpu", enabled=False):
        return _RUN[kernel](query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _flash(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    flash = torch.ops.aten._scaled_dot_product_flash_attention
    return flash(query, key, value, dropout_p, is_causal, scale=scale)[0]


def _efficient(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention
    # Only for a backward pass the kernel also returns the log-sum-exp of each line of scores.
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    bias = _added(attn_mask, query)
    if bias is not None:
        bias = bias.expand(-1, query.shape[1], -1, -1)
    return efficient(query, key, value, bias, learns, dropout_p, is_causal, scale=scale)[0]


def _math(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    # decompose: without gradients it would be one operation, whose scores nobody could count
    math = torch.ops.aten._scaled_dot_product_attention_math.default.decompose
    bias = _added(attn_mask, query)
    return math(query, key, value, bias, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)[0]


def _added(mask: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Turn a boolean mask into numbers that a kernel adds to the scores, 0 or -inf, in the dtype of the queries."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, float("-inf"))


_RUN = {"flash": _flash, "memory-efficient": _efficient, "math": _math}
"""Name of a kernel, as ``kernel_for`` returns it -> the function that runs it."""


def _experts_at_once(device: Device, x: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
    """Tell whether one grouped product computes all experts; transformers asks this for each of its products."""
    return weight.dtype == torch.bfloat16 and (device.kind == "cpu" or device.capability >= (8, 0))


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    """Drop elements as CUDA does, with a mask of one byte each; on a CPU the mask has the dtype of the input."""
    if not training or p == 0:
        return x
    return torch.ops.aten.native_dropout(x, p, True)[0]


def _int8_vectorwise_quant(x: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, ...]:
    """Quantise to one byte an element, with a scale for each vector.

    Fake tensors have no values, so no column is taken as one with outliers.
    """
    if threshold:  # the real kernel makes these tensors to find the outliers
        (x.abs() >= threshold).any()
    return torch.empty_like(x, dtype=torch.int8), x.new_empty(len(x), dtype=torch.float32), x.new_empty(0).long()


def _int8_mixed_scaled_mm(
    x: torch.Tensor,
    codes: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    weight_scales: torch.Tensor,
    outliers: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Multiply in 8 bits as on CUDA: sums in int32, dequantised to fp16, then cast; without outliers."""
    sums = torch.ops.bitsandbytes.int8_linear_matmul(codes, weight)  # int32
    out = torch.ops.bitsandbytes.int8_mm_dequant(sums, scales, weight_scales, dtype=torch.float16, bias=bias)
    return out.to(x.dtype), x.new_empty(0)
