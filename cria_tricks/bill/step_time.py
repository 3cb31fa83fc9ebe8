"""Estimate the time of a training step, from counted operations and bytes and the rates that cards reach.

This is a roofline model. A step is a sequence of parts. Compute and memory traffic of a part overlap, so the part
takes the longer of the two times: operations / rate, or bytes / memory bandwidth. Traffic over PCIe is taken not to
overlap with either, so its time is added. Only copies with a stream of their own run beside the blocks, and take no
more than the time by which they outlast them. The rates are those of the datasheet, times the share that public runs
reached on this card (``hardware/reached.py``); after ``cria doctor --calibrate`` they are this machine's own.

The host starts the kernels one after the other. A card that is faster than that waits for the host; a CPU does both
itself, so the time of the starts is added. ``launches.py`` counts them.

No point is promised, because the runs that the shares come from differ. An estimate is a range: ``low`` to ``high``,
with ``seconds`` as its geometric middle. All estimates on one card are wrong in the same direction where its shares
are, so a ratio of two of them is better known than either; across cards it is not.

Three things are simplified on purpose. int8 products count as 16-bit ones, and the quantisation of their inputs does
not count. DoRA's products count, but not the memory traffic of its norms. A paged optimizer moves no pages, because it
moves none while the card has room, and the estimate is for a step that fits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from cria_tricks.bill import launches, moved_bytes, products
from cria_tricks.bill.operation import FP32
from cria_tricks.bill.step import Step
from cria_tricks.hardware.cards import Card
from cria_tricks.recipe import Recipe

HEAD = ("head", "loss")
"""The parts that only a process with the head has, in a pipeline the last stage."""
PRODUCTS = ("blocks forward", "blocks again", "blocks backward")
"""The products of the blocks, pass by pass."""
BLOCKS = ("unpacking", "casts of weights", *PRODUCTS, "adapter", "attention", "between products")
"""The parts that the blocks compute."""
TRAVEL = "inputs that travel"
FETCHED = "fetched blocks"
"""The parts of the copies that run beside them: of saved activations, and of weights."""


@dataclass(frozen=True)
class StepPart:
    """One part of an optimizer step, with its estimated time.

    Attributes:
        name: what it does.
        flops: floating-point operations of its matrix products.
        bytes: memory traffic: what the GPU reads from its memory and writes to it.
        link_bytes: traffic over the card's PCIe link.
        seconds: estimated time.
        why: how the counts come about.
    """

    name: str
    flops: int
    bytes: int
    link_bytes: int
    seconds: float
    why: str


@dataclass(frozen=True)
class StepTime:
    """The time of one optimizer step on one card, estimated.

    Attributes:
        parts: the parts, in the order in which they are listed to the user.
        tokens: tokens of all micro-batches of the step.
        spread: high over low of the range [ratio].
    """

    parts: tuple[StepPart, ...]
    tokens: int
    spread: float

    @property
    def seconds(self) -> float:
        """Time of the step, the middle of its range [s]: the parts run one after the other."""
        return sum(part.seconds for part in self.parts)

    @property
    def low(self) -> float:
        """The low end of the range of the step's time [s]."""
        return ends(self.seconds, self.spread)[0]

    @property
    def high(self) -> float:
        """The high end of the range of the step's time [s]."""
        return ends(self.seconds, self.spread)[1]

    @property
    def flops(self) -> int:
        """Floating-point operations of the products in all parts."""
        return sum(part.flops for part in self.parts)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one card trains on in a second."""
        return self.tokens / self.seconds


def ends(middle: float, spread: float) -> tuple[float, float]:
    """Return the low and the high end of a range around its geometric middle, for a given high over low [ratio]."""
    half = math.sqrt(spread)
    return middle / half, middle * half


class PartCounts(NamedTuple):
    """What one part of a step has to do, before it is turned into time.

    Attributes:
        name: what the part does.
        flops: floating-point operations of its products.
        bytes: memory traffic.
        link: traffic over PCIe [bytes].
        why: how the counts come about.
        launches: kernels that the host starts.
        rate: the name of its measured rate on a calibrated machine; empty for the part's own name.
    """

    name: str
    flops: float
    bytes: float
    link: float
    why: str
    launches: float = 0
    rate: str = ""


def time_of(step: Step, card: Card, cards: int = 1) -> StepTime:
    """Estimate one optimizer step.

    Args:
        step: the step, as ``switches/folds.py`` makes it from a recipe.
        card: the GPU.
        cards: how many cards train data-parallel; at the end of a step they all-reduce their gradients over PCIe.

    Returns:
        The time on one card, without the parts that have nothing to do.
    """
    counted = counts(step, cards)
    parts = [timed(one, card, step.precision) for one in counted if one.flops or one.bytes or one.link]
    parts = [beside_the_blocks(one, parts) if one.name in (TRAVEL, FETCHED) else one for one in parts]
    started = sum(one.launches for one in counted)
    parts.append(launch_time(started, card, sum(part.seconds for part in parts)))
    return StepTime(tuple(parts), step.step_tokens, card.spread(step.precision))


def counts(step: Step, cards: int = 1) -> list[PartCounts]:
    """Count what the parts of one optimizer step have to do; arguments as for :func:`time_of`."""
    k = step.micro_batches  # of one optimizer step
    found = []
    for counted in _micro_batch(step):
        flops, moved, link = k * counted.flops, k * counted.bytes, k * counted.link
        found.append(counted._replace(flops=flops, bytes=moved, link=link, launches=k * counted.launches))
    return [*found, *_once_a_step(step, cards)]


def timed(counted: PartCounts, card: Card, precision: str) -> StepPart:
    """Turn the counts of a part into its time, by the roofline model of this module's docstring."""
    rate_of = counted.rate or counted.name
    compute_seconds = counted.flops / card.product_rate(rate_of, precision)
    memory_seconds = counted.bytes / card.traffic_rate(rate_of, precision)
    link_seconds = counted.link / (card.link_rate * card.reached.link)
    return StepPart(
        name=counted.name,
        flops=round(counted.flops),
        bytes=round(counted.bytes),
        link_bytes=round(counted.link),
        seconds=max(compute_seconds, memory_seconds) + link_seconds,
        why=counted.why,
    )


def beside_the_blocks(travel: StepPart, parts: list[StepPart]) -> StepPart:
    """Let copies take only the time by which they outlast the blocks, beside which they run.

    Half of the copies runs beside the forward pass, and half beside the backward pass, which also repeats the forward
    pass if blocks are checkpointed. We assume that the time of the blocks is divided between the two passes as the time
    of their products is.
    """
    seconds = {one.name: one.seconds for one in parts}
    busy = sum(seconds.get(name, 0.0) for name in BLOCKS)
    share = seconds["blocks forward"] / sum(seconds.get(name, 0.0) for name in PRODUCTS)
    shares = [share, 1 - share] if share < 1 else [share]  # a frozen model below a trained head has no backward pass
    each = travel.seconds / len(shares)
    return replace(travel, seconds=sum(max(0.0, each - part * busy) for part in shares))


def launch_time(started: float, card: Card, busy: float) -> StepPart:
    """Make the part that launches add: a card waits for those that outlast its work, a CPU spends the time itself.

    Args:
        started: the number of launches in a step.
        card: the card.
        busy: the time of all other parts [s].
    """
    seconds = started * card.reached.launch
    why = f"{started:,.0f} kernels of {1e6 * card.reached.launch:.0f} us each, started one after the other"
    if card.device.kind == "cuda":
        seconds = max(0.0, seconds - busy)
    return StepPart("launches", 0, 0, 0, seconds, why)


def _micro_batch(step: Step) -> Iterator[PartCounts]:
    """Count the parts of one micro-batch."""
    n = step.all_tokens  # the tokens of a micro-batch, learned prompt vectors included
    wide = step.compute_itemsize  # bytes of a number that products read or write
    blocks = products.blocks(step)
    weights_forward, weights_again, weights_backward = moved_bytes.weights(step, blocks)
    unpacked, cast = moved_bytes.unpacking(step, blocks)
    yield PartCounts("unpacking", 0, unpacked, 0, "4-bit and int8 weights, before each pass")
    yield PartCounts("casts of weights", 0, cast, 0, "weights in another dtype than products compute in")
    for name, counted, weight_bytes, why in (
        ("blocks forward", blocks.forward, weights_forward, "2 operations a weight and position"),
        ("blocks again", blocks.again, weights_again, "checkpointing repeats the forward pass"),
        ("blocks backward", blocks.backward, weights_backward, "2 for a frozen weight, 4 for a trained one"),
    ):
        moved = n * counted.elements * wide + weight_bytes
        yield PartCounts(name, n * counted.flops, moved, 0, why, rate="products")
    thin = blocks.adapter
    why = "thin products, which mostly wait for memory"
    yield PartCounts("adapter", n * thin.flops + blocks.norms, n * thin.elements * wide, 0, why)
    yield _attention(step, blocks)
    yield PartCounts("launches", 0, 0, 0, "the kernels of the blocks", launches.of_blocks(step, blocks))
    forward, backward = moved_bytes.between(step)
    runs = blocks.passes
    moved = (runs["forward"] + runs["again"]) * forward + runs["backward"] * backward
    why = "norms, rotary, activation, residual sums, casts: all of it memory"
    yield PartCounts("between products", 0, n * moved, 0, why)
    yield from _head(step, blocks)
    if step.link_trips:  # activation offload; the logits are saved outside the blocks
        # Saved bytes of one position: in all blocks, and in the loss.
        kept = runs["forward"] * moved_bytes.saved(step) + step.logit_saved_bytes * step.shape.vocabulary
        why = "what the way back needs goes to the host and comes back"
        yield PartCounts("offload", 0, 0, step.link_trips * n * kept, why)
    travelling = step.travelling_blocks
    each = n * step.shape.width * step.hidden_itemsize
    why = "inputs of blocks go to the host and come back, beside the computing"
    yield PartCounts(TRAVEL, 0, 0, 2 * each * travelling, why, launches.TRAVEL * travelling)
    fetched = moved_bytes.fetched(step) * (not step.fetches_once)
    yield PartCounts(FETCHED, 0, 0, fetched, "blocks come from the host, beside the computing")


def _once_a_step(step: Step, cards: int) -> Iterator[PartCounts]:
    """Count the parts that run once for all micro-batches of a step."""
    fetched = moved_bytes.fetched(step) * step.fetches_once
    yield PartCounts(FETCHED, 0, 0, fetched, "blocks come from the host once, beside the computing")
    trained = step.trained_weights
    each = step.optimizer_bytes + step.gradient_bytes
    update = launches.of_update(step)
    rate = "optimizer" if step.optimizer_bytes == moved_bytes.ADAMW else "8-bit optimizer"
    yield PartCounts("optimizer", 0, each * trained, 0, f"{each} bytes a trained weight", update, rate)
    # A ring all-reduce sends 2 (N - 1) / N times the fp32 gradients from each of N cards; 0 for one card.
    ring = 2 * (cards - 1) / cards * FP32 * trained
    yield PartCounts("gradients of the other cards", 0, 0, ring, "fp32 gradients, twice around a ring over PCIe")


def _attention(step: Step, blocks: products.Blocks) -> PartCounts:
    """Count the attention of all blocks, with a fused kernel or with all scores in memory."""
    fused = step.kernel in ("flash", "memory-efficient")
    flops = products.attention(step, blocks, fused=fused)
    forward = blocks.attended
    backward = blocks.attended_back
    if not fused:
        scores = step.batch * step.shape.heads * step.tokens**2
        moved = scores * (forward * moved_bytes.SCORE[0] + backward * moved_bytes.SCORE[1])
        why = f"{step.kernel} attention holds all T x T scores, and passes over them"
        return PartCounts("attention", flops, moved, 0, why)
    # A fused kernel reads queries, keys and values and writes an output as wide as the queries. Backward we count each
    # of the four twice: once for itself, once for its gradient.
    position_bytes = step.compute_itemsize * 2 * (step.shape.query_width + step.shape.kv_width)
    moved = step.all_tokens * position_bytes * (forward + 2 * backward)
    if not step.maskless:
        return PartCounts("attention", flops, moved, 0, f"the {step.kernel} kernel, with a mask")
    # Without a mask the kernel knows that attention is causal, and skips about half of the token pairs.
    why = f"the {step.kernel} kernel, which leaves out what a token may not see"
    return PartCounts("attention", flops * 0.5, moved, 0, why)


def _head(step: Step, blocks: products.Blocks) -> Iterator[PartCounts]:
    """Count the head's products, and the loss, which passes over the logits."""
    counted = products.head(step, blocks.learns)
    n: float = step.all_tokens
    why = "logits of every position"
    if step.logit_positions is not None:
        n = step.logit_positions
        why = "logits of trained tokens only"
    moved = n * counted.elements * step.compute_itemsize + moved_bytes.head_weights(step)
    yield PartCounts("head", n * counted.flops, moved, 0, why)
    passes = n * step.logit_bytes * step.shape.vocabulary
    yield PartCounts("loss", 0, passes, 0, "passes over the logits", launches.of_loss(step))


def run_tokens(recipe: Recipe, rows: int, tokens: float) -> float:
    """Count the tokens of a whole run.

    Args:
        recipe: gives the length of the run: ``train.max_steps`` full steps if that is set, else ``train.epochs``.
        rows: number of training rows.
        tokens: mean number of tokens in a row.
    """
    train = recipe.train
    rows_of_run = train.max_steps * recipe.rows_per_step
    if not rows_of_run:  # max_steps is not set
        rows_of_run = math.ceil(rows * train.epochs)
    return rows_of_run * tokens
