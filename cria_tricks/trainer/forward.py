"""What the forward pass of a step runs in: the plan's contexts, autocast, and the loss that is summed over tokens.

The loop (``trainer/loop.py``) trains with these functions, and the dry run (``predict/dry_run.py``) counts bytes with
them.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from accelerate.utils.operations import convert_outputs_to_fp32

from cria_tricks.load import losses
from cria_tricks.step_plan import Plan, function_at

_HALF_PRECISION = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""The precisions with 16-bit autocast -> the dtype of that autocast."""


@contextlib.contextmanager
def contexts(model: Any, plan: Plan) -> Iterator[None]:
    """Enter the contexts of a plan around a forward pass."""
    with contextlib.ExitStack() as entered:
        for address in plan.step_context:
            entered.enter_context(function_at(address)(model, plan))
        yield


def autocast(plan: Plan, device: str) -> Any:
    """Make the autocast context of the plan's precision: products in 16 bits, softmax and loss in fp32.

    Args:
        plan: what will run.
        device: ``"cuda"`` or ``"cpu"``, where the tensors are; a dry run for a GPU has them on a CPU.
    """
    found = [torch.autocast(device, dtype) for name, dtype in _HALF_PRECISION.items() if plan.training.get(name)]
    return found[0] if found else contextlib.nullcontext()


def loss_sum(model: Any, plan: Plan, device: str) -> losses.Loss:
    """Put autocast around the model's forward pass, and return the loss function of the plan.

    Returns:
        A function from the model and a batch to the loss, summed over the batch's trained tokens, fp32.
    """
    if any(plan.training.get(name) for name in _HALF_PRECISION):
        model.forward = convert_outputs_to_fp32(autocast(plan, device)(model.forward))
    # The loss gets autocast, too, because the chunked loss calls modules below `model.forward`.
    return losses.find(plan, lambda: autocast(plan, device))
