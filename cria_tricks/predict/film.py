"""Record one optimizer step as a film: every tensor with its birth, its death, and the module that made it.

The step is that of :func:`cria_tricks.predict.dry_run.dry_run`, so the peak of each part is the same to the byte. The
real modules run on tensors without data, which takes seconds.
"""

import bisect
import contextlib
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from cria_tricks.bill.bill import WORKSPACES
from cria_tricks.measure.memory import quantization_tensors
from cria_tricks.predict.allocator import CachingAllocator, Settings
from cria_tricks.predict.dry_run import BACKWARD, MOMENTS, OPTIMIZER, FakeTraining, fake_training, later_step
from cria_tricks.predict.memory_trace import Event, Recorder, steps
from cria_tricks.step_plan import Plan

SAVED, TEMPORARY = "saved activations", "temporary activations"
LINES = ("weights", "optimizer states", "batch", "gradients", SAVED, TEMPORARY, "logits", "workspace")
"""The lines of the bill in a film, in the order in which they are stacked: those that change least are below. Saved
activations are those that the forward pass has made and that are still there when it ends; all others are temporary.
What the optimizer step needs for a moment is its workspace."""


class Shot(NamedTuple):
    """A tensor in a film.

    Attributes:
        bytes: of its storage.
        shape: its shape when it was made.
        dtype: e.g. ``"float16"``.
        module: the module that made it, or the weight that it belongs to, e.g. ``"layers.3.mlp.down_proj"``.
        how: the operation, ``"weight"``, ``"gradient"`` or the name of an optimizer state.
        line: which of :data:`LINES` it belongs to.
        birth: the moment when it is made; 0 if it is there when the film begins.
        death: the moment from which on it is gone; the number of moments if it stays.
    """

    bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    how: str
    line: str
    birth: int
    death: int


class Part(NamedTuple):
    """A part of the step: its name, its first moment, and the first moment after it."""

    name: str
    first: int
    end: int


@dataclass(frozen=True)
class Film:
    """A step, moment by moment. A moment is the state after an allocation or a release; moment 0 is before the first.

    Attributes:
        shots: the tensors.
        moments: how many there are.
        parts: the parts of the step.
        reserved: at each moment, what PyTorch's allocator would reserve on a card without a limit, by the model of its
            rules and with cuBLAS' workspaces [bytes]; empty on a CPU.
    """

    shots: Sequence[Shot]
    moments: int
    parts: Sequence[Part]
    reserved: Sequence[int]

    def bytes(self) -> dict[str, list[int]]:
        """The bytes of each line at each moment."""
        changes = {line: [0] * (self.moments + 1) for line in LINES}
        for shot in self.shots:
            changes[shot.line][shot.birth] += shot.bytes
            changes[shot.line][shot.death] -= shot.bytes
        return {line: list(itertools.accumulate(change[:-1])) for line, change in changes.items()}

    def totals(self) -> list[int]:
        """The bytes of all tensors at each moment."""
        return [sum(lines) for lines in zip(*self.bytes().values(), strict=True)]

    def peaks(self) -> dict[str, tuple[int, int]]:
        """For each part the moment of its peak, and the peak [bytes]. A part begins with what the one before left."""
        totals = self.totals()
        found = {}
        for name, first, end in self.parts:
            peak = max(range(max(first - 1, 0), end), key=totals.__getitem__)
            found[name] = (peak, totals[peak])
        return found

    def alive(self, moment: int) -> list[Shot]:
        """The tensors of a moment, the largest first."""
        found = [shot for shot in self.shots if shot.birth <= moment < shot.death]
        return sorted(found, key=lambda shot: -shot.bytes)


def film(
    plan: Plan,
    config: Any,
    rows: int,
    tokens: int,
    *,
    expandable: bool = True,
    say: Callable[[str], None] = lambda part: None,
) -> Film:
    """Film a later step of a plan; the arguments without a line here are those of ``dry_run``.

    Args:
        plan: what would run, on its own device.
        config: the model's config.
        rows: the rows of a micro-batch.
        tokens: the tokens of each row.
        expandable: whether the allocator has expandable segments.
        say: is told the name of each part when it begins.

    Raises:
        BadInput: as ``dry_run``.
    """
    camera = Camera(config.vocab_size)
    say("model")
    with fake_training(plan, config, camera) as training, camera.watching(training.model):
        loaded = len(camera.events)
        for part in later_step(training, rows, tokens):
            say(part)
            camera.begin(part, training)
        camera.begin("", training)
    reserved: list[int] = []
    if plan.device.kind == "cuda":
        # cuBLAS takes one workspace for the forward pass, and one for the thread of the backward pass.
        workspaces = [Event(-number, WORKSPACES // 2, "first products", "workspace") for number in (1, 2)]
        events = [*camera.events[:loaded], *workspaces, *camera.events[loaded:]]
        allocator = CachingAllocator(Settings(expandable))
        reserved = [allocator.reserved for _ in steps(events, allocator)]
    return camera.developed(reserved)


class _About(NamedTuple):
    shape: tuple[int, ...]
    dtype: str
    module: str
    how: str


class Camera(Recorder):
    """A recorder that also writes down the shape, the dtype and the maker of each tensor.

    In the forward pass the maker is the module that runs. In the backward pass autograd runs nodes, not modules. Each
    node has a number from a counter, which only grows. So the camera writes the counter down whenever a module begins
    or ends, and later looks up which module ran when a node was made. It keeps no reference to any tensor or node,
    because that would change the bytes.
    """

    def __init__(self, vocabulary: int):
        super().__init__(vocabulary)
        self._about: dict[int, _About] = {}
        self._parts: list[tuple[str, int]] = []
        self._names: dict[int, str] = {}  # id of a module, or of a weight -> its name
        self._running: list[str] = []
        self._counts: list[int] = [0]
        self._modules: list[str] = [""]  # which module runs from the count of the same place on
        self._maker = ("", "")

    @contextlib.contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """Follow which module of the model runs."""
        for name, module in model.named_modules():
            self._names[id(module)] = _short(name)
        for name, weight in model.named_parameters(remove_duplicate=False):
            if id(weight) not in self._names:  # the second name of a tied weight
                self._names[id(weight)] = _short(name)
                self._label([weight], _short(name), "weight")
                self._label(quantization_tensors(weight), _short(name), "quantization state")
        for name, buffer in model.named_buffers():
            self._label([buffer], _short(name), "buffer")
        before = register_module_forward_pre_hook(self._enter)
        after = register_module_forward_hook(self._leave, always_call=True)  # a recomputation may end by an exception
        try:
            yield
        finally:
            before.remove()
            after.remove()

    def _enter(self, module: torch.nn.Module, inputs: Any) -> None:
        self._running.append(self._names.get(id(module)) or "model")
        self._note()

    def _leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        self._running.pop()
        self._note()

    def _note(self) -> None:
        self._counts.append(torch.autograd._get_sequence_nr())
        self._modules.append(self._running[-1] if self._running else "")

    def begin(self, part: str, training: FakeTraining) -> None:
        """Note that a part of ``later_step`` begins, and what the part before has left."""
        for weight in training.trainable:
            name = self._names[id(weight)]
            if weight.grad is not None:
                self.relabel([weight.grad], "gradients")
                self._label([weight.grad], name, "gradient")
            for state, value in training.optimizer.state.get(weight, {}).items():
                if isinstance(value, torch.Tensor):
                    self._label([value], name, state)
        if part in MOMENTS or not part:  # what comes before them is not filmed
            self._parts.append((part, len(self.events)))
        self.moment = part
        self.line = part
        if part in MOMENTS:
            self.line = "workspace" if part == OPTIMIZER else "activations"

    def _label(self, tensors: Any, module: str, how: str) -> None:
        for tensor in tensors:
            number = self._numbers.get(tensor.untyped_storage()._cdata)
            if number is not None:
                self._about[number] = _About(tuple(tensor.shape), _dtype(tensor), module, how)

    def track(self, tensor: torch.Tensor) -> None:
        """Count and record a tensor, if its storage is new."""
        number = len(self._allocations)
        super().track(tensor)
        if len(self._allocations) > number:
            self._about[number] = _About(tuple(tensor.shape), _dtype(tensor), *self._maker)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node: Any = torch._C._current_autograd_node()
        self._maker = self._made_by(func.__name__.partition(".")[0].strip("_"), node)
        if type(node).__name__ == "AccumulateGrad" and node.variable.grad is not None:
            # A step in the backward pass: the gradient is gone before this part of the step ends.
            weight = node.variable
            self.relabel([weight.grad], "gradients")
            self._label([weight.grad], self._names.get(id(weight), ""), "gradient")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _made_by(self, operation: str, node: Any) -> tuple[str, str]:
        """Return the module that runs now, or whose node runs, and the operation in words."""
        if self._running:
            return self._running[-1], operation if node is None else f"{operation}, once more"
        if node is None:
            return "", operation
        if type(node).__name__ == "AccumulateGrad":
            return self._names.get(id(node.variable), ""), f"{operation}, backward"
        place = bisect.bisect_right(self._counts, node._sequence_nr()) - 1
        return self._modules[place], f"{operation}, backward"

    def developed(self, reserved: Sequence[int]) -> Film:
        """Make the film of what was recorded; ``reserved`` is of all events."""
        begin, end = self._parts[0][1], self._parts[-1][1]
        parts = [
            Part(name, start - begin + 1, after - begin + 1)
            for (name, start), (_, after) in itertools.pairwise(self._parts)
        ]
        births: dict[int, int] = {}
        deaths: dict[int, int] = {}
        for place, event in enumerate(self.events[:end]):
            moment = max(place - begin + 1, 0)
            if event.tensor in births:
                deaths[event.tensor] = moment
            else:
                births[event.tensor] = moment
        moments = end - begin + 1
        backward = next((part.first for part in parts if part.name == BACKWARD), 0)
        shots = []
        for number, birth in births.items():
            death = deaths.get(number, moments)
            if death == 0 or birth == death:
                continue
            event = self.events[self._allocations[number]]
            about = self._about.get(number) or _About((event.size,), "uint8", "", "inside an operation")
            line = event.line
            if line == "activations":
                line = SAVED if 0 < birth < backward < death else TEMPORARY
            shots.append(Shot(event.size, *about[:2], _maker(about, line), about.how, line, birth, death))
        # With the two workspaces, a moment is two events later.
        seen = list(reserved[begin + 1 : end + 2]) if reserved else []
        return Film(shots, moments, parts, seen)


def _maker(about: _About, line: str) -> str:
    """Name who made it; what no module below the whole model has made belongs to the loss, or to the step."""
    if about.module and about.module != "model":
        return about.module
    if line in ("logits", SAVED, TEMPORARY):
        return "loss"
    return about.module or line


def _short(name: str) -> str:
    """Leave out the parts of a name that are the same for all, or that peft adds."""
    name = re.sub(r"^(base_model\.|model\.|_orig_mod\.)+", "", name)
    return re.sub(r"\.(base_layer|default)\b", "", name)


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
