"""A step that allocates nothing: the real modules, the real loss and the real optimizer on fake tensors.

A fake tensor has a shape and a dtype and no data, so a model of any size is built and trained for one step in seconds,
while every storage that would live is counted. What the target card would run other than this machine is chosen as
there: attention kernels by its capability, the optimizer's many tensors in one call as on CUDA.
"""

import contextlib
import unittest.mock
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from bitsandbytes.functional import QuantState
from torch._subclasses import FakeTensorMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from cria_tricks import losses
from cria_tricks.hardware.kernels import kernels_of
from cria_tricks.load import EDITS
from cria_tricks.measure import LiveBytes, every_tensor
from cria_tricks.plan import Plan
from cria_tricks.trainer import CONTEXTS
from cria_tricks.tricks import nf4

SCALES = 256
"""Scales of 4-bit blocks that share a scale of their own, after double quantization."""


@dataclass(frozen=True)
class DryRun:
    """What a step would hold.

    Attributes:
        moments: peak bytes in each part of a step, in its order.
        weights_bytes: what the loaded model takes, adapter included.
    """

    moments: dict[str, int]
    weights_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The most that lives at once."""
        return max(self.moments.values())


def dry_run(plan: Plan, config: Any, rows: int, tokens: int, trained: int | None = None) -> DryRun:
    """Train one optimizer step on nothing.

    Args:
        plan: what would run, for the device that is in it.
        config: the model's, of transformers.
        rows: of a micro-batch.
        tokens: of each row.
        trained: trained tokens of a micro-batch; all that can be when left out.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    live = LiveBytes()
    model = fake_model(plan, config, fake)
    live.track_all(every_tensor(model))
    weights = live.live
    moments: dict[str, int] = {}

    @contextlib.contextmanager
    def moment(name: str) -> Iterator[None]:
        live.peak = live.live
        yield
        moments[name] = max(live.peak, moments.get(name, 0))

    trained_weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = _optimizer(plan, trained_weights)
    # The one number that AdamW looks at is how many steps it has taken.
    with fake, live, kernels_of(plan.device), unittest.mock.patch("torch.optim.adam._get_value", return_value=1.0):
        accelerator = _accelerator(plan)
        wrapped = accelerator.prepare_model(model, device_placement=False)
        loss_of = losses.find(plan, accelerator.unwrap_model, accelerator.autocast)
        for _ in range(2):  # in the second step the optimizer's states live from the beginning
            for _ in range(min(2, plan.training["gradient_accumulation_steps"])):  # in the second the gradients do
                with contextlib.ExitStack() as contexts:
                    for name in plan.step_context:
                        contexts.enter_context(CONTEXTS[name](model))
                    batch = fake_batch(plan, rows, tokens, trained)
                    with moment("forward pass"):
                        loss = loss_of(wrapped, batch)
                with moment("backward pass"):
                    loss.backward()
                del batch, loss
            with moment("optimizer step"):
                torch.nn.utils.clip_grad_norm_(trained_weights, 1.0, foreach=plan.device.kind == "cuda")
                optimizer.step()
                optimizer.zero_grad()
    return DryRun(moments, weights)


def fake_model(plan: Plan, config: Any, fake: FakeTensorMode) -> Any:
    """Build what ``load`` would load, without a byte of it."""
    with torch.device("meta"):
        dtype = getattr(torch, plan.model["dtype"])
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=_attention(plan))
        model.tie_weights()
        if plan.quantization:
            quantization = BitsAndBytesConfig(**plan.quantization)
            replace_with_bnb_linear(model, ["lm_head"], quantization)
            model.is_loaded_in_4bit, model.is_loaded_in_8bit = quantization.load_in_4bit, quantization.load_in_8bit
        model.config.use_cache = False
        for edit in plan.after_load:
            if edit != "compile_blocks":
                model = EDITS[edit](model, plan)
    made: dict[int, torch.Tensor] = {}  # shared weights stay shared
    for module in model.modules():
        if type(module) in _QUANTISED:
            module._parameters["weight"] = _QUANTISED[type(module)](module, plan, fake)
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.is_meta:
                    tensors[name] = made.setdefault(id(tensor), _fake_like(tensor, fake))
    if plan.training.get("gradient_checkpointing"):
        model.gradient_checkpointing_enable(plan.training["gradient_checkpointing_kwargs"])
    return model.train()


def fake_batch(plan: Plan, rows: int, tokens: int, trained: int | None = None) -> dict[str, Any]:
    """Make a micro-batch: one row without a mask, several with one, as rows of several lengths have; packed rows none.

    Must be called among fake tensors.
    """
    places = rows * (tokens - 1) if trained is None else trained
    batch: dict[str, Any] = {"input_ids": torch.zeros(rows, tokens, dtype=torch.long)}
    batch["position_ids" if plan.collator else "attention_mask"] = torch.zeros(rows, tokens, dtype=torch.long)
    batch["labels"] = torch.zeros(rows, tokens, dtype=torch.long)
    if plan.loss["kind"] == "chunked":
        batch["trained"] = tuple(torch.zeros(places, dtype=torch.long) for _ in range(3))
    return batch


def _attention(plan: Plan) -> str:
    """Register the plan's attention once more, beside a mask that is decided without looking at numbers."""
    asked = plan.model.get("attn_implementation", "sdpa")
    if asked == "eager":
        return "eager"

    def mask(*, batch_size: int, q_length: int, device: Any, **named: Any) -> torch.Tensor | _Lengths | None:
        if plan.collator:  # as many documents as rows, the dearest case: nothing of a row is left out
            return _Lengths([q_length] * batch_size)
        if batch_size == 1:
            return None
        return torch.ones(batch_size, 1, q_length, q_length, dtype=torch.bool, device=device)

    name = f"dry_{asked}"
    AttentionInterface.register(name, ALL_ATTENTION_FUNCTIONS[asked])
    AttentionMaskInterface.register(name, mask)
    return name


class _Lengths(list[int]):
    """The documents' lengths where they are known: a fake tensor could not tell them."""

    def dim(self) -> int:
        return 1

    def tolist(self) -> list[int]:
        return self


def _accelerator(plan: Plan) -> Accelerator:
    """Autocast as the trainer's does, also where accelerate would not: fp16 on a CPU."""
    AcceleratorState._reset_state(True)
    precision = next((name for name in ("fp16", "bf16") if plan.training.get(name)), "no")
    accelerator = Accelerator(cpu=True, mixed_precision=precision)
    accelerator.native_amp = precision != "no"
    return accelerator


def _optimizer(plan: Plan, weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    if plan.optimizer["bits"] == 8:
        return bnb.optim.AdamW8bit(weights)
    return torch.optim.AdamW(weights, foreach=plan.device.kind == "cuda")


def _fake_like(tensor: torch.Tensor, fake: FakeTensorMode) -> torch.Tensor:
    with fake:
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _four_bits(module: Any, plan: Plan, fake: FakeTensorMode) -> Any:
    """Two weights a byte, with their scales: bitsandbytes' own class takes no fake tensors."""
    elements = module.weight.numel()
    blocks = -(-elements // nf4.BLOCK)
    double = plan.quantization["bnb_4bit_use_double_quant"]
    with fake:
        state = QuantState(
            absmax=torch.empty(blocks, dtype=torch.uint8 if double else torch.float32),
            shape=module.weight.shape,
            code=torch.empty(16),
            blocksize=nf4.BLOCK,
            quant_type=plan.quantization["bnb_4bit_quant_type"],
            dtype=getattr(torch, plan.model["dtype"]),
            offset=torch.empty(()) if double else None,
            state2=QuantState(
                absmax=torch.empty(-(-blocks // SCALES)), code=torch.empty(256), blocksize=SCALES, dtype=torch.float32
            )
            if double
            else None,
        )
        weight: Any = torch.nn.Parameter(torch.empty((elements + 1) // 2, 1, dtype=torch.uint8), requires_grad=False)
    weight.quant_state, weight.bnb_quantized = state, True
    module.quant_state = state
    return weight


def _eight_bits(module: Any, plan: Plan, fake: FakeTensorMode) -> Any:
    """One byte a weight, and one scale a row."""
    with fake:
        weight: Any = torch.nn.Parameter(torch.empty(module.weight.shape, dtype=torch.int8), requires_grad=False)
        weight.CB, weight.SCB = weight.data, torch.empty(module.weight.shape[0])
    module.state.CB, module.state.SCB = weight.CB, weight.SCB
    return weight


_QUANTISED = {bnb.nn.Linear4bit: _four_bits, bnb.nn.Linear8bitLt: _eight_bits}
