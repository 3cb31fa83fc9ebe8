"""Find how near a model's activations come to the largest number of fp16.

A model that was trained in bf16 may have activations that fp16 cannot hold: bf16 reaches 3e38, fp16 ends at 65,504.
With the usual preparation the residual stream is in fp32. With lean preparation it is in fp16, so it must be checked.
"""

import contextlib
import math
from types import TracebackType
from typing import Any

import torch

from cria_tricks.common.errors import BadInput

LARGEST = torch.finfo(torch.float16).max
"""65,504: the next number up is infinite."""
ENOUGH = 4.0
"""A batch's largest activation must have room to grow this many times, because other rows and training change it."""


class LargestActivation:
    """Find the largest absolute number among all modules' results, inside ``with``.

    Attributes:
        value: the number; infinite where a result was not finite, 0 before any module ran.
        name: the module whose result it was, such as ``model.layers.12``.
        by_module: the largest number of each module.
    """

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self.value = 0.0
        self.name = ""
        self.by_module: dict[str, float] = {}
        self._hooks = contextlib.ExitStack()
        self._found: list[tuple[str, torch.Tensor]] = []

    def __enter__(self) -> "LargestActivation":
        for name, module in self.model.named_modules():
            hook = module.register_forward_hook(lambda _, __, result, name=name: self._look(name, result))
            self._hooks.callback(hook.remove)
        return self

    def __exit__(self, *raised: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._hooks.close()
        for name, largest in self._found:  # not in the hook, because item() would wait for the GPU at every module
            value = largest.item()
            value = value if math.isfinite(value) else math.inf
            self.by_module[name] = max(value, self.by_module.get(name, 0.0))
            if value > self.value:
                self.value = value
                self.name = name
        self._found.clear()

    def _look(self, name: str, result: Any) -> None:
        # A module may return a tuple. Its first element is the activation, such as the hidden states.
        tensor = result[0] if isinstance(result, tuple) and result else result
        if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and tensor.numel():
            # A norm makes no copy of the tensor, as abs() would.
            self._found.append((name, torch.linalg.vector_norm(tensor.detach(), math.inf)))


def too_little_room(found: LargestActivation) -> str:
    """Return a warning if the largest activation of a batch, times :data:`ENOUGH`, would overflow fp16.

    Args:
        found: the largest activation of a batch that ran with its residual stream in fp16.

    Returns:
        A warning in one or two sentences; an empty text if there is enough room.

    Raises:
        BadInput: if an activation was too large for fp16 already.
    """
    name = found.name.removeprefix("base_model.model.").removesuffix(".base_layer") or "the model"
    setting = f"tricks.lean_preparation=true in fp16, whose largest number is {LARGEST:,.0f}"
    cure = "set tricks.lean_preparation=false, which keeps the residual stream in fp32, or tricks.precision=bf16"
    if math.isinf(found.value):
        raise BadInput(
            f"{setting}: the activations of the first batch are larger ({name}); {cure} where the card has it"
        )
    if found.value <= LARGEST / ENOUGH:
        return ""
    room = f"the largest activation of the first batch is {found.value:,.0f} ({name})"
    return (
        f"{setting}: {room}, and {LARGEST / found.value:.1f} times that would overflow. If the loss becomes nan, {cure}"
    )
