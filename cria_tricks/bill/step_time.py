"""What a step takes, in seconds, and what a run costs: counted work against the peak rates of a card.

Each part of a step is either held up by its products or by the bytes it moves, so it takes the longer of the two
times; parts follow one another, so theirs are added. That sum is what the card would need at its datasheet's rates.
Nothing reaches those, so it is divided by one number, :data:`EFFICIENCY`.

Simplified on purpose: int8 products count as 16-bit ones, and quantising their inputs does not count; of DoRA the
products count, and not the bytes of its norms; a paged optimizer moves nothing while the card has room, and an estimate
of time is for what fits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cria_tricks.bill import moved_bytes, products
from cria_tricks.bill.work import Work
from cria_tricks.hardware.cards import Card, Flavor
from cria_tricks.recipe import Recipe

EFFICIENCY = 0.5
"""How much of a card's peak rates a step gets, on every card and in every part: half.

A round number, chosen between two public runs and fitted to neither: Llama-3.2-1B by QLoRA on a free T4 (1,060 tokens
a second, evaluations and checkpoints included) comes out 1.6 times as fast as it was, Llama-2-7B by LoRA on an A100
(2,954; LLaMA-Factory's wiki) 0.9 times. In other words, the T4 reached 0.31 of its peaks, the A100 0.55. One constant
cannot fit both runs. So times are right only within a factor of two, and they must not rank two cards that are closer
than that: with 0.31 and 0.55 the A100 would be cheaper for the Kwanzaa run, with 0.5 for both the T4 is cheaper.
``trust.py`` holds the sentence that says so wherever minutes are shown. What it does not know: the launch
of a kernel, so small models with short rows take longer than it says; and the power limit, 70 watts on a T4 and 72 on
an L4, which holds them under their peak in a long run. We have measured on neither.
"""


@dataclass(frozen=True)
class StepPart:
    """One part of an optimizer step.

    Attributes:
        name: what it does.
        flops: operations of its products.
        bytes: moved between the card and its memory.
        link_bytes: moved over the card's PCIe link.
        seconds: what it takes.
        why: how the counts come about.
    """

    name: str
    flops: int
    bytes: int
    link_bytes: int
    seconds: float
    why: str


@dataclass(frozen=True)
class Step:
    """One optimizer step on one card.

    Attributes:
        parts: in their order.
        tokens: of all its micro-batches.
    """

    parts: tuple[StepPart, ...]
    tokens: int

    @property
    def seconds(self) -> float:
        """All parts, one after the other."""
        return sum(part.seconds for part in self.parts)

    @property
    def flops(self) -> int:
        """All products."""
        return sum(part.flops for part in self.parts)

    @property
    def tokens_per_second(self) -> float:
        """On one card."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class RunPrice:
    """A whole run on a rented machine.

    Attributes:
        flavor: the machine.
        minutes: of training; loading, evaluations and checkpoints come on top.
    """

    flavor: Flavor
    minutes: float

    @property
    def cost(self) -> float:
        """USD for these minutes."""
        return self.minutes / 60 * self.flavor.price


class PartCounts(NamedTuple):
    """What one part of a step has to do: operations, and bytes over memory and link."""

    name: str
    flops: float
    bytes: float
    link: float
    why: str


def step(work: Work, card: Card, cards: int = 1) -> Step:
    """Estimate one optimizer step.

    Args:
        work: what the step has to do, as ``tricks/folds.py`` makes it from a recipe.
        card: the GPU.
        cards: how many work side by side and add up their gradients over PCIe at the end.
    """
    parts = tuple(_part(each, card, work.precision) for each in counts(work, cards) if any(each[1:4]))
    return Step(parts, work.micro_batches * work.batch * work.tokens)


def counts(work: Work, cards: int = 1) -> list[PartCounts]:
    """Count what the parts of one optimizer step have to do; arguments as for :func:`step`."""
    k = work.micro_batches
    found = [
        each._replace(flops=k * each.flops, bytes=k * each.bytes, link=k * each.link) for each in _micro_batch(work)
    ]
    return [*found, *_once_a_step(work, cards)]


def _part(counted: PartCounts, card: Card, precision: str) -> StepPart:
    of_products = counted.flops / card.flops(precision)
    of_memory = counted.bytes / card.memory_rate
    ideal = max(of_products, of_memory) + counted.link / card.link_rate
    flops, moved, link = (round(number) for number in counted[1:4])
    return StepPart(counted.name, flops, moved, link, ideal / EFFICIENCY, counted.why)


def _micro_batch(work: Work) -> Iterator[PartCounts]:
    n = work.positions
    wide = work.compute_itemsize
    blocks = products.blocks(work)
    read = moved_bytes.weights(work, blocks)
    for name, counted, weights, why in (
        ("blocks forward", blocks.forward, read[0], "2 operations a weight and position"),
        ("blocks again", blocks.again, read[1], "checkpointing repeats the forward pass"),
        ("blocks backward", blocks.backward, read[2], "2 for a frozen weight, 4 for a trained one"),
    ):
        yield PartCounts(name, n * counted.flops, n * counted.elements * wide + weights, 0, why)
    thin = blocks.adapter
    why = "thin products, which mostly wait for memory"
    yield PartCounts("adapter", n * thin.flops + blocks.norms, n * thin.elements * wide, 0, why)
    yield _attention(work, blocks)
    forward, backward = work.between(work)
    runs = blocks.passes
    moved = (runs["forward"] + runs["again"]) * forward + runs["backward"] * backward
    why = "norms, rotary, activation, residual sums, casts: all of it memory"
    yield PartCounts("between products", 0, n * moved, 0, why)
    yield _head(work, blocks)
    if work.link_trips:
        kept = runs["forward"] * work.saved(work) + work.logit_saved_bytes * work.shape.vocabulary
        why = "what the way back needs goes to the host and comes back"
        yield PartCounts("offload", 0, 0, work.link_trips * n * kept, why)


def _once_a_step(work: Work, cards: int) -> Iterator[PartCounts]:
    trained = work.trained_weights
    each = work.optimizer_bytes + work.gradient_bytes
    yield PartCounts("optimizer", 0, each * trained, 0, f"{each} bytes a trained weight")
    ring = 2 * (cards - 1) / cards * 4 * trained
    yield PartCounts("gradients of the other cards", 0, 0, ring, "fp32 gradients, twice around a ring over PCIe")


def _attention(work: Work, blocks: products.Blocks) -> PartCounts:
    fused = work.kernel in ("flash", "memory-efficient")
    flops = products.attention(work, blocks, fused=fused)
    forward = blocks.passes["forward"] + blocks.passes["again"]
    backward = blocks.attended_back
    if not fused:
        scores = work.batch * work.shape.heads * work.row_positions**2
        moved = scores * (forward * moved_bytes.SCORE[0] + backward * moved_bytes.SCORE[1])
        why = f"{work.kernel} attention holds all T x T scores, and passes over them"
        return PartCounts("attention", flops, moved, 0, why)
    wide = work.compute_itemsize * 2 * (work.shape.query_width + work.shape.kv_width)
    moved = work.positions * wide * (forward + 2 * backward)
    if work.masked:
        return PartCounts("attention", flops * 1, moved, 0, f"the {work.kernel} kernel, with a mask")
    why = f"the {work.kernel} kernel, which leaves out what a token may not see"
    return PartCounts("attention", flops * 0.5, moved, 0, why)


def _head(work: Work, blocks: products.Blocks) -> PartCounts:
    counted = products.head(work, blocks.learns)
    each = counted.elements * work.compute_itemsize + work.logit_bytes * work.shape.vocabulary
    n: float = work.positions
    why = "logits of every position"
    if work.logit_positions is not None:
        n = work.logit_positions
        why = "logits of trained tokens only"
    return PartCounts("head and loss", n * counted.flops, n * each + moved_bytes.head_weights(work), 0, why)


def run_tokens(recipe: Recipe, rows: int, tokens: float) -> float:
    """Tokens of a whole run.

    Args:
        recipe: ``train.max_steps`` full steps if it sets them, else ``train.epochs`` of the rows.
        rows: training rows.
        tokens: of a row, in the mean.
    """
    train = recipe.train
    steps_rows = train.max_steps * recipe.rows_per_step
    return (steps_rows or math.ceil(rows * train.epochs)) * tokens


def run_cost(step: Step, tokens: float, flavor: Flavor) -> RunPrice:
    """Minutes and price of a run.

    Args:
        step: an estimate for the flavor's card and its number of cards.
        tokens: of the whole run, every epoch counted.
        flavor: the machine. Its cards share the rows; that each needs the whole model does not change.
    """
    return RunPrice(flavor, tokens / (step.tokens_per_second * flavor.cards) / 60)
