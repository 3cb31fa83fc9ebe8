"""A step that allocates nothing: the real modules, the real loss and the real optimizer on fake tensors.

A fake tensor has a shape and a dtype and no data, so a model of any size is built and trained for a step in seconds,
while every storage that would live is counted. Fake tensors pretend to be on a CPU, as torch without CUDA can pretend
nothing else. Where a card would run another kernel than this machine, the card's is chosen: ``cuda_on_cpu.py``.
"""

import contextlib
import functools
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils.operations import convert_outputs_to_fp32
from bitsandbytes.optim import AdamW, GlobalOptimManager
from torch._subclasses import FakeTensorMode
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import Trainer, __version__, masking_utils

from cria_tricks.common.errors import BadInput
from cria_tricks.load import losses
from cria_tricks.load.model import quiet_libraries
from cria_tricks.measure.memory import LiveBytes, every_tensor
from cria_tricks.predict.cuda_on_cpu import kernels_of
from cria_tricks.predict.fake_model import fake_model
from cria_tricks.step_plan import Plan
from cria_tricks.trainer.shared import CONTEXTS
from cria_tricks.tricks import packing


@dataclass(frozen=True)
class DryRun:
    """The memory that a step would hold.

    Attributes:
        moments: the peak in each part of a step, in its order [bytes].
        weights_bytes: the loaded model, its adapter included.
    """

    moments: dict[str, int]
    weights_bytes: int

    @property
    def peak_bytes(self) -> int:
        """The peak of the whole step."""
        return max(self.moments.values())


def dry_run(plan: Plan, config: Any, rows: int, tokens: int, trained: int | None = None) -> DryRun:
    """Train one optimizer step on nothing, and not the first: the optimizer's states live from the beginning.

    Args:
        plan: the plan that would run, for the device that is in it.
        config: the model's config, of transformers.
        rows: the rows of a micro-batch.
        tokens: the tokens of each row.
        trained: the trained tokens of a micro-batch; all that can be when left out.

    Raises:
        BadInput: if the model is no decoder, does not fit the plan, or shapes itself by numbers.
    """
    quiet_libraries()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    live = LiveBytes()
    model = fake_model(plan, config, fake)
    live.track_all(every_tensor(model))
    weights = live.live
    learns = [p for p in model.parameters() if p.requires_grad]
    with (
        _shapes_known(config.model_type),
        _optimizer(plan, model) as optimizer,
        fake,
        live,
        kernels_of(plan.device),
        _numbers_known(plan, rows, tokens),
    ):
        for weight in learns:
            weight.grad = torch.empty_like(weight)
        optimizer.step()  # its states come to life
        live.track_all(_tensors_of(optimizer))
        if plan.training["gradient_accumulation_steps"] == 1:  # else it is a later micro-batch, when gradients live too
            optimizer.zero_grad()
        loss_of = _loss(plan, model)
        moments: dict[str, int] = {}

        def lap(moment: str) -> None:
            moments[moment] = live.peak
            live.peak = live.live  # the next moment begins with what lives now

        window = fake_window(plan, rows, tokens, trained)
        live.peak = live.live
        with contextlib.ExitStack() as contexts:
            for name in plan.step_context:
                contexts.enter_context(CONTEXTS[name](model))
            loss = loss_of(window[-1])
        lap("forward pass")
        loss.backward()
        del window, loss
        lap("backward pass")
        torch.nn.utils.clip_grad_norm_(learns, 1.0, foreach=plan.device.kind == "cuda")
        optimizer.step()
        lap("optimizer step")
    return DryRun(moments, weights)


def fake_window(plan: Plan, rows: int, tokens: int, trained: int | None = None) -> list[dict[str, Any]]:
    """Make a window's micro-batches as ``data/batches.py`` does; the trainer has all of them before the first runs.

    Must be called among fake tensors. The places of trained tokens are found for the running one only, the last.
    """
    second = "attention_mask"
    if plan.collator and not _flash_attention_2(plan):  # packed rows; flash_attention_2 needs no mask for them either
        second = "position_ids"
    names = ("input_ids", second, "labels")
    window: list[dict[str, Any]] = []
    for _ in range(plan.training["gradient_accumulation_steps"]):
        window.append({name: torch.zeros(rows, tokens, dtype=torch.long) for name in names})
    running = window[-1]
    if plan.loss["kind"] == "chunked":
        places = rows * (tokens - 1) if trained is None else trained
        running["trained"] = tuple(torch.zeros(places, dtype=torch.long) for _ in range(3))
    return window


def _tensors_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))


@contextlib.contextmanager
def _shapes_known(kind: str) -> Iterator[None]:
    """Say in one line that a shape depends on numbers: those of a mixture's experts do, in transformers 5.16."""
    try:
        yield
    except DataDependentOutputException:
        raise BadInput(
            f"--dry-run: in transformers {__version__} shapes inside a {kind} model depend on numbers, and a dry run "
            "has none; leave --dry-run out, or take a newer transformers"
        ) from None


@contextlib.contextmanager
def _numbers_known(plan: Plan, rows: int, tokens: int) -> Iterator[None]:
    """Answer the questions about numbers that fake tensors, which hold none, cannot answer.

    A single row has no padding, and so no mask; several have, as rows of several lengths have. A packed document fills
    its row: many small ones keep as much.
    """
    patch = unittest.mock.patch.object
    needs_no_mask = masking_utils._ignore_causal_mask_sdpa

    def nothing_padded(padding: torch.Tensor, *sizes: Any) -> bool:
        if rows == 1 or _flash_attention_2(plan):
            return needs_no_mask(None, *sizes)
        return needs_no_mask(padding, *sizes)

    with (
        patch(packing, "document_lengths", return_value=_Lengths([tokens] * rows)),
        patch(masking_utils, "_ignore_causal_mask_sdpa", nothing_padded),
    ):
        yield


class _Lengths(list[int]):
    """A list of lengths that stands for a tensor: it has the three methods that packing calls."""

    def cpu(self) -> "_Lengths":
        return self

    def dim(self) -> int:
        return 1

    def tolist(self) -> list[int]:
        return self


def _flash_attention_2(plan: Plan) -> bool:
    return plan.model.get("attn_implementation") == "flash_attention_2"


def _loss(plan: Plan, model: Any) -> Callable[[dict[str, Any]], torch.Tensor]:
    """Find the trainer's loss, in the autocast of accelerate, whose own Accelerator would change the whole process."""
    autocast: Any = contextlib.nullcontext
    for name, dtype in _HALVES.items():
        if plan.training.get(name):
            autocast = functools.partial(torch.autocast, "cpu", dtype)
            model.forward = convert_outputs_to_fp32(autocast()(model.forward))
    return functools.partial(losses.find(plan, autocast), model)


_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The 16-bit dtypes by their switches in transformers' training arguments."""


@contextlib.contextmanager
def _optimizer(plan: Plan, model: Any) -> Iterator[torch.optim.Optimizer]:
    """Make the optimizer that transformers makes by its name in ``trainer/arguments.py``, with the same two groups."""
    decayed = Trainer.get_decay_parameter_names(None, model)
    groups: list[dict[str, Any]] = [{"params": []}, {"params": []}]
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            groups[name not in decayed]["params"].append(
                weight
            )  # norms and biases, without weight decay, in the second
    if plan.optimizer == {"bits": 32, "paged": False}:
        yield torch.optim.AdamW(groups, fused=True)
        return
    kept = GlobalOptimManager._instance  # of the whole process; a dry run must leave no override in it
    GlobalOptimManager._instance = None
    try:
        optimizer = AdamW(groups, optim_bits=plan.optimizer["bits"], is_paged=plan.optimizer["paged"])
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding) and plan.optimizer["bits"] == 8:
                optimizer.mng.register_module_override(module, "weight", {"optim_bits": 32})
        yield optimizer
    finally:
        GlobalOptimManager._instance = kept
