"""Load a model whose blocks wait on the host, and come to the device one by one (``techniques/stream_layers.py``)."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from cria_tricks.load.host_memory import MappedFile, Pinned
from cria_tricks.models import Weights, blockwise
from cria_tricks.step_plan import Plan
from cria_tricks.switches.stream_layers import SLOTS
from cria_tricks.techniques.stream_layers import Copies, CopiesOnCpu, Streamed

ALIGNED = 256
"""Each tensor in a buffer begins at a multiple of so many bytes, as torch's own do: some kernels ask for it."""


class Place(NamedTuple):
    """Where a tensor is kept: an attribute of an object, and bytes of a buffer from ``begin`` on."""

    holder: Any
    name: str
    begin: int


class OnHost:
    """A model whose blocks' frozen weights are on the host.

    Attributes:
        model: transformers' model; the weights of its blocks are views of the buffers.
        blocks: its blocks.
        buffers: the frozen weights of each block, as bytes.
    """

    def __init__(self, plan: Plan, weights: Weights, options: dict[str, Any]):
        self.device = torch.device(plan.device.kind)
        on_card = plan.device.kind == "cuda"
        self.memory = MappedFile() if plan.streaming["source"] == "file" else Pinned(for_a_card=on_card)
        self.blocks: list[torch.nn.Module] = []
        self.buffers: list[torch.Tensor] = []
        folder = Path(weights.path)
        self.model = blockwise.without_blocks(folder, weights.name, **options)
        for block in blockwise.blocks(self.model, folder, weights.name, **options):
            self.buffers.append(_taken(block.requires_grad_(False), self.memory))
            self.blocks.append(block)

    def start(self) -> Streamed:
        """Put all else of the blocks, such as adapters, on the device, and fetch each block's weights when it runs."""
        return _fetch(self.blocks, self.buffers, self.memory, self.device)


def stream(blocks: Sequence[torch.nn.Module], device: str = "cpu") -> Streamed:
    """Take the frozen weights of blocks that are loaded already to the host, and fetch each block when it runs."""
    memory = Pinned(for_a_card=device == "cuda")
    buffers = [_taken(block, memory) for block in blocks]
    return _fetch(blocks, buffers, memory, torch.device(device))


def _taken(block: torch.nn.Module, memory: Pinned | MappedFile) -> torch.Tensor:
    """Move a block's frozen weights to the host, and return their buffer."""
    places = places_of(block)
    buffer = memory.buffer(size_of(places))
    move_into(buffer, places, filled=False)
    memory.done_with(buffer)
    return buffer


def _fetch(
    blocks: Sequence[torch.nn.Module],
    buffers: Sequence[torch.Tensor],
    memory: Pinned | MappedFile,
    device: torch.device,
) -> Streamed:
    """Make the slots, move all else of the blocks to the device, and begin to fetch."""
    size = max(buffer.nbytes for buffer in buffers)
    slots = [torch.empty(size, dtype=torch.uint8, device=device) for _ in blocks[:SLOTS]]
    into_slots(blocks, slots)
    for block in blocks:
        block.to(device)
    copies = Copies(device) if device.type == "cuda" else CopiesOnCpu()
    return Streamed(blocks, buffers, slots, copies, memory.done_with)


def into_slots(blocks: Sequence[torch.nn.Module], slots: Sequence[torch.Tensor]) -> None:
    """Make the frozen weights of each block views of its slot, whatever bytes are there."""
    for number, block in enumerate(blocks):
        move_into(slots[number % SLOTS], places_of(block), filled=True)


def without_numbers(blocks: Sequence[torch.nn.Module]) -> None:
    """Do so with two new slots, and fetch nothing, for a dry run."""
    size = max(size_of(places_of(block)) for block in blocks)
    into_slots(blocks, [torch.empty(size, dtype=torch.uint8) for _ in blocks[:SLOTS]])


def places_of(block: torch.nn.Module) -> list[Place]:
    """List the frozen matrices of a block, with their scales, and lay them one after the other in a buffer."""
    found = []
    end = 0
    for holder, name in _frozen(block):
        found.append(Place(holder, name, end))
        end += -(-getattr(holder, name).nbytes // ALIGNED) * ALIGNED
    return found


def _frozen(block: torch.nn.Module) -> Iterator[tuple[Any, str]]:
    for weight in block.parameters():
        if weight.requires_grad or weight.dim() < 2:
            continue  # norms and biases stay on the device, because they are small
        yield weight, "data"
        state = getattr(weight, "quant_state", None)  # of bitsandbytes' 4-bit weights
        while state is not None:
            yield from ((state, name) for name in ("absmax", "code", "offset") if torch.is_tensor(getattr(state, name)))
            state = state.state2
        if torch.is_tensor(getattr(weight, "SCB", None)):  # of its 8-bit weights
            yield weight, "SCB"


def size_of(places: Sequence[Place]) -> int:
    """Return the bytes of a block's buffer."""
    last = places[-1]
    return last.begin + int(getattr(last.holder, last.name).nbytes)


def move_into(buffer: torch.Tensor, places: Sequence[Place], *, filled: bool) -> None:
    """Make tensors views of a buffer.

    Args:
        buffer: bytes, on any device.
        places: the tensors, and where they lie in the buffer.
        filled: whether the buffer has its bytes already, or will get them; else the tensors are copied there.
    """
    for holder, name, begin in places:
        tensor = getattr(holder, name)
        view = buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        if not filled:
            view.copy_(tensor)
        setattr(holder, name, view)
        if name == "data" and torch.is_tensor(getattr(holder, "CB", None)):
            holder.CB = holder.data  # bitsandbytes' second name for an 8-bit weight
