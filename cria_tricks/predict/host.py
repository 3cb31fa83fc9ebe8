"""Estimate the memory that a run on a GPU needs on its host: the machine around the card.

A notebook's machine may have less memory than its card, and Linux kills a process that asks for too much without a
word. So the host has a bill and a verdict of its own. It is an upper estimate, and none of it was tried with a GPU.
"""

from dataclasses import dataclass

from cria_tricks.bill.moments import block_input
from cria_tricks.bill.operation import Line, Moment
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware.cards import Host
from cria_tricks.hardware.trust import verdict
from cria_tricks.predict.answer import HostMemory
from cria_tricks.predict.toggles import Target, most_tokens, with_toggles
from cria_tricks.recipe import Recipe, with_settings

LIBRARIES = 2_056_600 * 1024 + 312 * 2**20
"""Resident bytes of Python, torch and CUDA once a tensor is on a card (pytorch issue 113326: an RTX 3090), and of the
libraries that a run imports besides (534 MiB, of which torch alone is 222: on a CPU, torch 2.13, 2026-11-23)."""

LARGEST_FILE = 5 * 10**9
"""The hub's files of weights are rarely larger: save_pretrained cut models at 5 GB for years [bytes]."""

OFFLOADED = "offloaded activations"
STREAMED = "streamed blocks"
"""The names of their lines in the bill."""

SHORTEST = 8
"""The shortest rows that a recipe may ask for [tokens]."""
CUT_AFTER_LOADING = ("fsdp", "tensor", "ddp_tensor", "pipeline")
"""Strategies in which each process loads the whole model onto its card, and then keeps its part."""


@dataclass(frozen=True)
class HostBill:
    """The memory that a run needs on the host.

    Attributes:
        moments: while the weights are loaded, and while the model trains.
        host: the machine; ``None`` if it is not known.
        merge_bytes: what ``cria merge`` needs afterwards; it is not part of the verdict, because it can run elsewhere.
    """

    moments: tuple[Moment, ...]
    host: Host | None
    merge_bytes: int

    @property
    def peak(self) -> Moment:
        """The moment that needs most."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def verdict(self) -> str:
        """``fits``, ``tight`` or ``does not fit``; empty if the machine is not known."""
        return verdict(self.peak.bytes, self.host.memory_bytes) if self.host else ""

    @property
    def for_plan(self) -> HostMemory:
        """This bill, as the answer of a plan shows it."""
        return HostMemory(
            name=self.host.name if self.host else "",
            capacity_bytes=self.host.memory_bytes if self.host else 0,
            needed_bytes=self.peak.bytes,
            needed_at=self.peak.name,
            verdict=self.verdict,
            lines=[line for line in self.peak.lines if line.bytes],
            merge_bytes=self.merge_bytes,
        )


def host_bill(target: Target, recipe: Recipe) -> HostBill | None:
    """Estimate what a run needs on the host; ``None`` on a CPU, where the host is the device.

    The training rows are in a mapped file (``data/table.py``), whose pages the system drops when memory runs short.

    Args:
        target: the model, the card and the host.
        recipe: what would run.
    """
    if target.device.kind != "cuda":
        return None
    libraries = Line("Python, libraries and CUDA", LIBRARIES, "resident once a tensor is on the card")
    half = 2 * target.shape.weights
    file = Line("a file of weights", min(half, LARGEST_FILE), "while it is loaded, at most")
    waiting = _taken_off(target, recipe, "activation_offload", "saved activations")
    pinned = Line(OFFLOADED, 2 * waiting, "pinned blocks are rounded up to powers of two, at most")
    # With all blocks checkpointed, each block's input is one tensor. Only switches/ reads a switch, so this asks if
    # setting it would change the recipe. It would for a number of blocks, also for 1: then the bound above stays.
    if recipe == with_toggles(recipe, {"gradient_checkpointing": True}):
        known = target.memory(recipe).step
        inputs = known.window * (target.shape.layers - known.overlapped)  # if copies overlap, the last block's stays
        each = block_input(known)
        if known.keeps_attention:  # then a block keeps more, in tensors of their own
            each = max(waiting // inputs, each)
        pinned = Line(OFFLOADED, inputs * _power_of_two(each) * (waiting > 0), "pinned")
    states = _taken_off(target, recipe, "paged_optimizer", "optimizer states")
    paged = Line("paged optimizer states", states, "if the card has no room for them")
    streamed = _streamed(target, recipe)
    loading = Moment("loading", (libraries, file, streamed))
    moments = (loading, Moment("training", (libraries, pinned, paged, streamed)))
    # cria merge computes in fp32 on the host, and writes the model in 16 bits beside it.
    return HostBill(moments, target.host, 3 * half)


def longest_on_host(target: Target, recipe: Recipe, most: int) -> int:
    """Find the longest row, of at most ``most`` tokens, for which the host has room [tokens]; 0 if there is none.

    Args:
        target: the model, the card and the host.
        recipe: what would run.
        most: the longest row that fits the card [tokens].
    """

    def fits(tokens: int) -> bool:
        if tokens < SHORTEST:
            return False
        memory = host_bill(target, with_settings(recipe, [f"data.max_length={tokens}"]))
        return memory is None or memory.verdict != "does not fit"

    return most_tokens(fits, most)


def _streamed(target: Target, recipe: Recipe) -> Line:
    """Return the line of the blocks that wait in pinned memory, or pass through it from a file."""
    known = target.memory(recipe).step
    size = known.block_weight_bytes * (known.blocks_on_device is not None)
    if recipe == with_toggles(recipe, {"stream_layers": "file"}):
        return Line("a streamed block", size // target.shape.layers, "all of them are in a file")
    return Line(STREAMED, size, "pinned, all of them")


def refuse_beyond_host(memory: HostBill | None) -> None:
    """Refuse a run whose offloaded activations or streamed blocks the host has no room for, before anything is loaded.

    Raises:
        BadInput: says how much they need, and how much the host has.
    """
    if memory is None or memory.host is None or memory.verdict != "does not fit":
        return
    training = memory.moments[-1]
    needs = f"would wait on the host, which needs {human(memory.peak.bytes)} with them and has"
    needs += f" {human(memory.host.memory_bytes)}"
    offloaded = _bytes_of(training, OFFLOADED)
    streamed = _bytes_of(training, STREAMED)
    if offloaded > streamed:
        raise BadInput(
            f"tricks.activation_offload: {human(offloaded)} of activations {needs}; shorten data.max_length, or set "
            "tricks.activation_offload=false"
        )
    if streamed:
        raise BadInput(
            f"tricks.stream_layers=true: {human(streamed)} of frozen blocks {needs}; set tricks.stream_layers=file"
        )


def _taken_off(target: Target, recipe: Recipe, toggle: str, line: str) -> int:
    """Return the bytes that a switch takes off the card: the largest difference of a line over the step's moments."""
    without = with_toggles(recipe, {toggle: False})
    if without == recipe:
        return 0
    before = {moment.name: _bytes_of(moment, line) for moment in target.memory(without).moments}
    after = {moment.name: _bytes_of(moment, line) for moment in target.memory(recipe).moments}
    return max(before[name] - after.get(name, 0) for name in before)


def _bytes_of(moment: Moment, name: str) -> int:
    return sum(line.bytes for line in moment.lines if line.name == name)


def _power_of_two(size: int) -> int:
    """Round up to a power of two."""
    return 1 << (size - 1).bit_length()


def loading_doubts(target: Target, recipe: Recipe) -> list[str]:
    """Warn if the whole model does not fit a card, because each process loads it there before it keeps its part."""
    strategy = recipe.parallel.strategy
    if target.device.kind != "cuda" or strategy not in CUT_AFTER_LOADING:
        return []
    try:
        alone = Target(target.shape, target.device).memory(with_settings(recipe, ["parallel.strategy=none"]))
    except BadInput:  # some recipes need their strategy
        return []
    whole = sum(line.bytes for line in alone.lines if line.name in ("weights: blocks", "weights: all others"))
    capacity = target.device.memory_bytes
    if whole <= capacity:
        return []
    return [
        f"parallel.strategy={strategy}: each process loads the whole model onto its card before it keeps its part, and "
        f"{human(whole)} do not fit the {human(capacity)} of {target.device.name}: this run cannot start"
    ]
