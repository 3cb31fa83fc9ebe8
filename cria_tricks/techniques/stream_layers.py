r"""Streamed layers: the frozen weights of the blocks wait on the host, and each block is fetched just before it runs.

Saves    weights: the frozen matrices of L blocks -> those of 2                                         [bytes]
Costs    PCIe traffic: a micro-batch fetches L - 2 blocks forward and L - 2 backward, because two are there already. The
         copies run beside the computation, so they cost time only where they take longer. true holds all blocks in
         pinned host memory, which the system cannot page out; file keeps them in a memory-mapped file, for a host with
         less memory than the model
Claim    exact: the same bytes arrive, and the same kernels multiply by them
Needs    weights that do not train, and gradient_checkpointing=true (but not with peft=head): a block's weights are gone
         after its forward pass, so its backward pass must begin by running it again. true gains nothing without CUDA
Breaks   gradient_checkpointing for only some blocks, side_network, compile, several processes and mixtures of experts:
         all are refused. With 16-bit weights and short rows the card waits for its link, by estimate
Sources  Pudipeddi et al. 2020, arXiv:2002.05645 (L2L), sec. 3; Rajbhandari et al. 2021, arXiv:2104.07857
         (ZeRO-Infinity), sec. 5.1; accelerate's ``cpu_offload`` does it without looking ahead
Ours     two slots on the card, each with room for a block. Block i always comes into slot i mod 2, so its weights are
         always views of this slot, and streaming only changes the bytes in it. The switch loads block by block, so
         neither the card nor (with file) the host ever holds the whole model

Shapes: the bytes of a block are those of its matrices and their scales.
"""

import concurrent.futures
from collections.abc import Callable, Sequence
from typing import Any

import torch

from cria_tricks.switches.stream_layers import SLOTS

REFERENCE = ("Streamed.enter", "Streamed._send", "Copies")
PLAIN = """
from transformers import AutoModelForCausalLM, TrainingArguments
from cria_tricks.load.streaming import (
    stream,
)  # accelerate's cpu_offload fetches a module when it runs, not ahead

model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
model.model.layers.requires_grad_(False)
stream(model.model.layers)
# since transformers 5.23 also activation_checkpointing, with the same values
arguments = TrainingArguments(
    "plain",
    max_steps=1,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
)
"""


class Copies:
    """Make copies on a CUDA stream of their own. Events say when a slot is free, and when a block has arrived."""

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device)

    def now(self) -> Any:
        """Return an event that happens when all work queued so far is done."""
        return torch.cuda.current_stream().record_event()

    def copy(self, slot: torch.Tensor, buffer: torch.Tensor, free: Any) -> Any:
        """Copy a buffer into a slot once it is free, and return the event of its arrival."""
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(free)
            slot.copy_(buffer, non_blocking=True)
            return self.stream.record_event()

    def wait(self, arrived: Any) -> None:
        """Have all work queued from now on wait for an arrival."""
        torch.cuda.current_stream().wait_event(arrived)


class CopiesOnCpu(Copies):
    """The same without streams: on a CPU an operation is done when its call returns."""

    def __init__(self) -> None:
        pass

    def now(self) -> Any:
        """Return nothing, because nothing is queued."""

    def copy(self, slot: torch.Tensor, buffer: torch.Tensor, free: Any) -> Any:
        """Copy a buffer into a slot."""
        slot.copy_(buffer)

    def wait(self, arrived: Any) -> None:
        """Do nothing: the worker's result has been waited for."""


class Streamed:
    """Fetch the weights of each block from the host before it runs, into one of two slots on the device.

    While a block runs, the next one is fetched into the other slot. The weights of block i are views of slot i mod 2
    all the time, also while another block's bytes are there; nothing but the block itself may read them.

    Args:
        blocks: they run in this order, and in the backward pass again, in the opposite order.
        buffers: the weights of each block on the host, as bytes.
        slots: two buffers on the device, each with room for every block.
        copies: how a buffer is copied into a slot.
        done_with: is called with each buffer that has been copied.

    Attributes:
        fetched: how many blocks have been fetched so far.
        bytes_to_device: how many bytes that were.
    """

    def __init__(
        self,
        blocks: Sequence[torch.nn.Module],
        buffers: Sequence[torch.Tensor],
        slots: Sequence[torch.Tensor],
        copies: Copies,
        done_with: Callable[[torch.Tensor], None] = lambda buffer: None,
    ):
        self.buffers = buffers
        self.slots = slots
        self.copies = copies
        self.done_with = done_with
        self.fetched = self.bytes_to_device = 0
        self.last = len(blocks) - 1
        self.at = -1  # the block that runs
        self.here = [-1] * SLOTS  # the block in each slot, or on its way there
        self.arrivals: list[Any] = [None] * SLOTS
        # In a thread of its own, because a copy from a file returns only when it is done.
        self.worker = concurrent.futures.ThreadPoolExecutor(1, "stream_layers")
        for number, block in enumerate(blocks):
            # On the parts of a block, because checkpointing repeats them, and not the call of the block itself.
            for part in block.children():
                part.register_forward_pre_hook(lambda *_, number=number: self.enter(number))
            block.register_forward_hook(lambda *call, number=number: self._before_backward(number, call[-1]))

    def _before_backward(self, number: int, output: torch.Tensor) -> None:
        """Have a block's weights there before its backward pass begins, and not only when checkpointing repeats it.

        Autograd keeps bitsandbytes' codes as they lie in the slot, and not as a saved tensor. If the block's last
        product has no adapter, its backward pass reads them before anything asks checkpointing for a saved tensor.
        """
        if self.at == number and output.requires_grad:  # at: layer_by_layer also calls blocks without their parts
            output.register_hook(lambda _: self.enter(number))

    def enter(self, number: int) -> None:
        """Before a part of a block runs, forward or again, wait for the block's weights, and send for the next ones."""
        if number == self.at:  # another part of it, or the block where the backward pass or the next pass begins
            return
        backward = number < self.at
        self.at = number
        self._send(number)  # it is here or on its way, except at the beginning of a pass
        self.copies.wait(self.arrivals[number % SLOTS].result())
        self._send(number - 1 if backward else number + 1)

    def _send(self, number: int) -> None:
        """Fetch a block into its slot, if there is such a block and it is not there."""
        slot = number % SLOTS
        if not 0 <= number <= self.last or self.here[slot] == number:
            return
        self.here[slot] = number
        self.fetched += 1
        self.bytes_to_device += self.buffers[number].nbytes
        # The slot is free when all that is queued now is done: its block has run forward, or again and backward.
        self.arrivals[slot] = self.worker.submit(self._copy, number, self.copies.now())

    def _copy(self, number: int, free: Any) -> Any:
        buffer = self.buffers[number]
        arrived = self.copies.copy(self.slots[number % SLOTS][: buffer.nbytes], buffer, free)
        self.done_with(buffer)
        return arrived
