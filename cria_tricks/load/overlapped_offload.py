"""Overlapped activation offload: saved tensors go to the host and come back while the card computes on.

``techniques/activation_offload.py`` copies on the stream that computes, so the computation waits for each copy. Here
copies have a stream of their own, :class:`CopyStream`, and two streams know nothing of each other. Three waits keep the
numbers right:

- A copy begins when the computing stream has done all that it was given before. By then the tensor that goes to the
  host has its numbers, and nobody uses the memory any more into which another one comes back.
- The computing stream waits for a copy before the tensor that went is freed.
- It waits for a copy before it reads the tensor that came.

A tensor comes back after it has gone, because copies run one after the other.

While a block computes, the input of one block is on its way: forward to the host, backward the next block's from there.
So the card holds two inputs, and not one for each block.
"""

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from cria_tricks.measure.memory import every_tensor
from cria_tricks.models.pretrained import blocks_of
from cria_tricks.step_plan import Plan
from cria_tricks.switches.activation_offload import SMALL
from cria_tricks.techniques.activation_offload import Offloaded, fill, room_for


class CopyStream:
    """A stream for copies, and the tensors that its copies need.

    The tensors are held here until the computing stream has waited for their copy. Otherwise the allocator would give
    their memory to that stream while the copy still reads or writes it. ``Tensor.record_stream`` prevents this, too,
    but then memory is reused when a copy happens to be done, so nobody could say how much a step needs.

    Args:
        streams: where streams come from: ``torch.cuda``, or ``torch.cpu``, whose streams have the same methods and do
            nothing.

    Attributes:
        begun: how many copies have been started.
        awaited: how many of them, from the first, the computing stream has waited for.
    """

    def __init__(self, streams: Any):
        self._streams = streams
        self._side = streams.Stream()
        self._under_way: deque[tuple[Any, torch.Tensor, torch.Tensor]] = deque()
        self.begun = self.awaited = 0

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> int:
        """Start a copy, and return its number."""
        self._side.wait_event(self._streams.current_stream().record_event())
        with self._streams.stream(self._side):
            fill(target, source)
            done = self._side.record_event()
        self._under_way.append((done, target, source))
        self.begun += 1
        return self.begun

    def wait_for(self, number: int) -> None:
        """Have the computing stream wait for the copy of this number and for all before it; let go of their tensors."""
        while self.awaited < number:
            self._streams.current_stream().wait_event(self._under_way[0][0])
            self._under_way.popleft()
            self.awaited += 1


@functools.cache
def copy_stream(kind: str) -> CopyStream:
    """Return the one stream for copies of this process, on ``"cuda"`` or ``"cpu"``."""
    return CopyStream(torch.get_device_module(kind))


class _Saved:
    """A tensor that autograd has saved.

    Attributes:
        place: its number in the order of saving.
        device: where autograd wants it.
        source: refers weakly to the storage that was saved, so that no other one is taken for it at the same address.
        host: the copy on the host; ``None`` for a tensor that stays.
        tensor: the tensor on the device; ``None`` while only the host has it.
        arrives: the number of the copy that brings it.
        uses: how many operations have saved it.
        left: how many of these are still to ask for it.
        given: whether all of them have, so that it is no longer fetched ahead. In a second backward pass it comes when
            it is asked for.
    """

    def __init__(self, tensor: torch.Tensor, place: int):
        self.place = place
        self.device = tensor.device
        self.source = weakref.ref(tensor.untyped_storage())
        self.host: torch.Tensor | None = None
        self.tensor: torch.Tensor | None = None
        self.arrives = 0
        self.uses = self.left = 0
        self.given = False


class Overlapped(Offloaded):
    """Move what autograd saves to the host, inside ``with``, and compute meanwhile. Use it for one forward pass.

    What the last block saves is needed at once, so it stays on the device, and so does all that is saved behind it.

    Args:
        weights: tensors that live on the device anyway. They, and views of them, are not copied.
        blocks: the blocks whose tensors travel, in their order, and the one whose tensors stay. If there are none, all
            that is saved travels.
        least: a tensor of fewer elements stays.
        copies: the stream for copies; on a CPU it does nothing.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor] = (),
        blocks: Sequence[torch.nn.Module] = (),
        least: int = 0,
        copies: CopyStream | None = None,
    ):
        super().__init__(weights)
        self._blocks = blocks
        self._least = least
        self._copies = copies or copy_stream("cpu")
        self._known: dict[Any, _Saved] = {}
        # Autograd owns what it has saved. When it lets go, so does the host.
        self._order: list[weakref.ref[_Saved]] = []
        self._ahead: weakref.ref[_Saved] | None = None
        self._ended = len(blocks) == 1
        self._kept_one = False

    def __enter__(self) -> None:
        self._copies.wait_for(self._copies.begun)  # an earlier pass may have ended with an error
        if len(self._blocks) > 1:
            self._hook = self._blocks[-2].register_forward_hook(self._end)
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if len(self._blocks) > 1:
            self._hook.remove()
        self._end()

    def _end(self, *_: Any) -> None:
        """Let no further tensor travel, because the last block begins."""
        self._ended = True
        self._known.clear()
        self._copies.wait_for(self._copies.begun)

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        # An empty tensor stays, too: torch's checkpoint saves one (in 2.11).
        if storage._cdata in self._stay or tensor.nbytes < max(SMALL, 1) or tensor.numel() < self._least:
            return tensor
        if self._ended:
            return self._keep(tensor)
        # The version counts changes in place. Queries, keys and values share an input, which travels once.
        place = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride())
        key = (*place, tensor.dtype, tensor._version)
        saved = self._known.get(key)
        if saved is None or saved.source() is not storage:
            saved = self._known[key] = self._send(tensor)
        saved.uses += 1
        saved.left += 1
        return saved

    def _keep(self, tensor: torch.Tensor) -> Any:
        """Leave a tensor on the device; when autograd asks for the first of these, the first copy back begins."""
        if self._kept_one:
            return tensor
        self._kept_one = True
        saved = self._noted(tensor)
        saved.tensor = tensor
        return saved

    def _send(self, tensor: torch.Tensor) -> _Saved:
        saved = self._noted(tensor)
        saved.host = room_for(tensor, self.HOST, pin_memory=tensor.is_cuda)
        number = self._copies.copy(saved.host, tensor)
        self._copies.wait_for(number - 1)  # so no more than one tensor is held for its copy
        self.bytes_to_host += saved.host.untyped_storage().nbytes()
        return saved

    def _noted(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor, len(self._order))
        self._order.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        tensor = self._fetched(saved)
        self._copies.wait_for(saved.arrives)
        if saved.host is not None:
            saved.left -= 1
            if not saved.left:  # it is autograd's now; for another backward pass it is fetched again
                saved.tensor = None
                saved.left = saved.uses
                saved.given = True
        self._fetch_ahead(saved)
        return tensor

    def _fetched(self, saved: _Saved) -> torch.Tensor:
        """Return a saved tensor on the device; if only the host has it, its copy begins."""
        if saved.tensor is None:
            assert saved.host is not None
            saved.tensor = room_for(saved.host, saved.device)
            saved.arrives = self._copies.copy(saved.tensor, saved.host)
            self.bytes_to_device += saved.host.untyped_storage().nbytes()
        return saved.tensor

    def _fetch_ahead(self, saved: _Saved) -> None:
        """Begin to copy the tensor that was saved before this one and is still to come, if no other waits already."""
        waits = self._ahead and self._ahead()
        if waits is not None and waits is not saved:
            return
        self._ahead = None
        for reference in reversed(self._order[: saved.place]):
            below = reference()
            if below is not None and not below.given:
                self._fetched(below)
                self._ahead = reference
                return


def offloaded(model: Any, plan: Plan) -> Offloaded:
    """Make the context of ``techniques/activation_offload.py``, whose copies do not overlap, around a forward pass."""
    return Offloaded(every_tensor(model))


def overlapped(model: Any, plan: Plan) -> Overlapped:
    """Make the context around a forward pass in which the inputs of checkpointed blocks travel, but for the last one's.

    Args:
        model: the loaded model.
        plan: says how many blocks are checkpointed, and which micro-batches are too short.
    """
    blocks = _in_order(model)
    wanted = plan.checkpointing["blocks"]
    if wanted != "all":
        blocks = blocks[: wanted + 1]  # the last of these is not checkpointed, so nothing of it travels
    least = plan.checkpointing.get("travels_from", 0) * model.config.get_text_config().hidden_size
    return Overlapped(every_tensor(model), blocks, least, copy_stream(plan.device.kind))


def _in_order(model: torch.nn.Module) -> list[torch.nn.Module]:
    """List the modules that run one after the other; one of a side network holds a block and its copy."""
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and len(module) and all(blocks_of(one) for one in module):
            return list(module)
    return []
