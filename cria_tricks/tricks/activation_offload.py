r"""Activation offload: what the backward pass will need waits in host memory.

Saves    activations on the card: with gradient checkpointing L x s -> 0, what remains is the one open block   [bytes]
Costs    both ways over PCIe, s bytes a block each, on the stream that computes; as many pinned bytes on the host
Claim    exact: the same bits come back
Needs    CUDA, and best gradient checkpointing: without it every operation's inputs travel, a tensor that three products
         read three times
Breaks   a Colab machine has less host memory (12.7 GiB) than its card; pinned blocks are rounded up to powers of two.
         The int8 products of bitsandbytes keep their inputs out of autograd's sight: without checkpointing they stay
Sources  Rhu et al. 2016, arXiv:1602.08124 (vDNN), sec. 3; torch.autograd.graph.save_on_cpu
Ours     25 lines of hooks, in production too: torch's save_on_cpu copies the frozen weights along that a product
         keeps, 16-bit ones all, and they are on the card anyway. TRL overlaps the copies with a stream of their own

Shapes: s = B T D elements (a block's input), of L blocks.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch

from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.waiting import BlockTensors, WaitingBytes
from cria_tricks.bill.work import Work
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

SWITCHES = ("activation_offload=true",)
CLAIM = "exact"
LESSON = "03_gradient_checkpointing"
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
    """Inside this context what autograd saves goes to the host; the backward pass fetches each tensor when it needs it.

    Nothing waits for the copies: they are in the order of the computing stream, so the memory of a tensor is only
    reused after it was read, and a fetched one is only read after it has arrived.

    Args:
        weights: tensors that live on the device anyway. They, and views of them, are not copied.

    Attributes:
        bytes_to_host: traffic out, so far.
        bytes_to_device: traffic in.
    """

    HOST = "cpu"

    def __init__(self, weights: Iterable[torch.Tensor] = ()):
        super().__init__(self._pack, self._unpack)
        # The storages themselves: bitsandbytes casts a bias in the forward pass, and an address that were free again
        # would be given to an activation, which then stayed as well.
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
    """Copy with the strides of the original: another layout could mean another kernel, and another rounding."""
    kind: dict[str, Any] = {"dtype": tensor.dtype, "device": device, "pin_memory": pin_memory}
    if 0 not in tensor.stride():
        return torch.empty_like(tensor, **kind).copy_(tensor, non_blocking=True)
    # Expanded, as attention's mask is for all heads: its numbers are in memory once, and travel once.
    once = tuple(slice(None if stride else 1) for stride in tensor.stride())
    copied = torch.empty_strided(tensor.shape, tensor.stride(), **kind)
    copied[once].copy_(tensor[once], non_blocking=True)
    return copied


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Lay the context around every forward pass; ``trainer/shared.py`` hands it the model's weights."""
    if not recipe.tricks.activation_offload:
        return plan
    plan = plan.around("activation_offload")
    if plan.device.kind != "cuda":
        return plan.warn(
            "activation_offload gains nothing without CUDA, and costs a copy: activations are in host memory already"
        )
    return plan


def estimate(memory: StepFacts, shape: Shape, recipe: Recipe) -> StepFacts:
    """What blocks keep waits on the host; the one that is open has it back. On a CPU its copies are not billed."""
    if not recipe.tricks.activation_offload or memory.device.kind != "cuda":
        return memory
    # The flag is for the walk through the open block (bill/block.py), which fetches its tensors one by one.
    rule = functools.partial(on_the_host, memory.block_waits)
    return replace(memory, offloaded=True, block_waits=rule)


def on_the_host(waits: Callable[[BlockTensors], WaitingBytes], block: BlockTensors) -> WaitingBytes:
    """Of each block nothing waits on the card but what int8 products pin there; the open one is as without."""
    return WaitingBytes(block.pinned, waits(block).open_too, "what int8 keeps; the rest is on the host")


def seconds(work: Work, shape: Shape, recipe: Recipe) -> Work:
    """All that autograd saves goes over the link, to the host and back."""
    return replace(work, link_trips=2 * recipe.tricks.activation_offload)
