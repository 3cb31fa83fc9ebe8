r"""Activation offload: saved activations wait in host memory until the backward pass needs them.

Saves    activations on the card: with gradient checkpointing L x s -> 0; only those of the block that is being
         recomputed remain                                                                              [bytes]
Costs    PCIe traffic: s of each block goes to the host and comes back. The copies run on the stream that computes, so
         the computation waits for them. As many bytes of pinned memory on the host
Claim    exact: the same bits come back
Needs    CUDA; best with gradient checkpointing, because without it every operation's saved inputs travel: a tensor that
         three products read travels three times
Breaks   jobs with more activations than host memory: a Colab machine shows 12.7 GB, less than its card, and pinned
         blocks are rounded up to powers of two. The int8 products of bitsandbytes hide their inputs from autograd, so
         these stay on the card
Sources  Rhu et al. 2016, arXiv:1602.08124 (vDNN), sec. 3; torch.autograd.graph.save_on_cpu
Ours     25 lines of hooks, in production too, because torch's save_on_cpu also copies the frozen weights that products
         save (all 16-bit ones), although they are on the card anyway. TRL overlaps the copies on a stream of their own

Shapes: s = B T D elements, the input of one of L blocks.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.operation import BlockTensors, WaitingBytes
from cria_tricks.bill.work import Work
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

SWITCHES = ("activation_offload=true",)
CLAIM = "exact"
LESSON = "30_long_rows"
REFERENCE = ("Offloaded._pack", "Offloaded._unpack", "_copy")
PLAIN = """
import functools
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
plain = model.forward


@functools.wraps(plain)
def forward(*arguments, **named):
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):  # it takes weights along
        return plain(*arguments, **named)


model.forward = forward
"""


class Offloaded(torch.autograd.graph.saved_tensors_hooks):
    """Move what autograd saves to the host, inside ``with``; the backward pass fetches each tensor when it needs it.

    No copy needs an explicit wait, because the CUDA stream that computes runs the copies too, in order. So the memory
    of a tensor is reused only after the copy has read it, and a fetched tensor is read only after it has arrived.

    Args:
        weights: tensors that live on the device anyway. They, and views of them, are not copied.

    Attributes:
        bytes_to_host: how much has been copied to the host so far [bytes].
        bytes_to_device: how much has been copied back so far [bytes].
    """

    HOST = "cpu"

    def __init__(self, weights: Iterable[torch.Tensor] = ()):
        super().__init__(self._pack, self._unpack)
        # The storages themselves are kept alive, and not only their addresses. bitsandbytes replaces a bias by a cast
        # copy in the forward pass. Without this, an activation could get the freed address, and would not be offloaded.
        self._stay = {}
        for weight in weights:
            storage = weight.untyped_storage()
            self._stay[storage._cdata] = storage
        self.bytes_to_host = self.bytes_to_device = 0

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.untyped_storage()._cdata in self._stay:
            return tensor, tensor.device
        host = _copy(tensor, self.HOST, pin_memory=tensor.is_cuda)
        self.bytes_to_host += host.untyped_storage().nbytes()
        return host, tensor.device

    def _unpack(self, packed: tuple[torch.Tensor, torch.device]) -> torch.Tensor:
        tensor, device = packed
        if tensor.untyped_storage()._cdata in self._stay:
            return tensor
        self.bytes_to_device += tensor.untyped_storage().nbytes()
        return _copy(tensor, device)


def _copy(tensor: torch.Tensor, device: torch.device | str, *, pin_memory: bool = False) -> torch.Tensor:
    """Copy a tensor with its strides: another layout could mean another kernel, and another rounding."""
    kind: dict[str, Any] = {"dtype": tensor.dtype, "device": device, "pin_memory": pin_memory}
    if 0 not in tensor.stride():
        return torch.empty_like(tensor, **kind).copy_(tensor, non_blocking=True)
    # A stride of 0: the tensor is expanded, as attention's mask is for all heads. Its numbers are in memory only once,
    # so copy them only once.
    once = tuple(slice(None if stride else 1) for stride in tensor.stride())
    copied = torch.empty_strided(tensor.shape, tensor.stride(), **kind)
    copied[once].copy_(tensor[once], non_blocking=True)
    return copied


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Put the context around every forward pass; ``trainer/shared.py`` gives it the model's weights."""
    if not recipe.tricks.activation_offload:
        return plan
    plan = plan.around("activation_offload")
    if plan.device.kind != "cuda":
        return plan.warn(
            "activation_offload gains nothing without CUDA, and costs a copy: activations are in host memory already"
        )
    return plan


def estimate(memory: StepFacts, shape: Shape, recipe: Recipe) -> StepFacts:
    """Bill no saved tensors but those of the open block, which come back; on a CPU leave the bill as it is."""
    if not recipe.tricks.activation_offload or memory.device.kind != "cuda":
        return memory
    # bill/block.py needs the flag, because the tensors of the open block come back one by one.
    rule = functools.partial(on_the_host, memory.block_waits)
    return replace(memory, offloaded=True, block_waits=rule)


def on_the_host(waits: Callable[[BlockTensors], WaitingBytes], block: BlockTensors) -> WaitingBytes:
    """Count what waits on the card: of each block only what int8 products pin there.

    Args:
        waits: the rule without offload; it still holds for the additional bytes of the open block.
        block: what one block leaves for its backward pass.
    """
    return WaitingBytes(block.pinned, waits(block).open_too, "what int8 saves; the rest is on the host")


def seconds(work: Work, shape: Shape, recipe: Recipe) -> Work:
    """Send all that autograd saves over the PCIe link twice: to the host, and back."""
    return replace(work, link_trips=2 * recipe.tricks.activation_offload)
