"""Estimate the time of a training step and the price of a run, from counted work and a card's peak rates.

This is a roofline model. A step is a sequence of parts. Compute and memory traffic of a part overlap, so the part
takes the longer of the two times: operations / peak rate, or bytes / memory bandwidth. Traffic over PCIe is taken not
to overlap with either, so its time is added. The sum over all parts is the time at the peak rates of the datasheet. No
step reaches these, so the time of each part is divided by :data:`EFFICIENCY`.

Three things are simplified on purpose. int8 products count as 16-bit ones, and the quantisation of their inputs does
not count. DoRA's products count, but not the memory traffic of its norms. A paged optimizer moves no pages, because it
moves none while the card has room, and the estimate is for a step that fits.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cria_tricks.bill import moved_bytes, products
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.work import Work
from cria_tricks.hardware.cards import Card, Flavor
from cria_tricks.recipe import Recipe

EFFICIENCY = 0.5
"""The share of a card's peak rates that a step reaches: one half, on every card and in every part.

It is a round number. We compared it with two public runs, and it fits neither exactly:

- Llama-3.2-1B by QLoRA on a free T4 ran at 1,060 tokens a second, evaluations and checkpoints included. The estimate is
  1.6 times as fast, so this run reached 0.31 of the peak rates.
- Llama-2-7B by LoRA on an A100 ran at 2,954 tokens a second (LLaMA-Factory's wiki). The estimate is 0.9 times as fast,
  so this run reached 0.55.

One constant cannot fit both. So times are right only within a factor of two, and they must not rank two cards whose
estimates are closer than that. For example, 0.5 for both cards makes the T4 cheaper for the Kwanzaa run, while 0.31 and
0.55 make the A100 cheaper. ``hardware/trust.py`` holds the warning that commands print beside minutes.

Two effects are missing. Launching a kernel takes time, so small models with short rows are slower than estimated. And a
power limit, 70 watts on a T4 and 72 on an L4, keeps these cards below their peak rates in a long run. We have measured
on neither card.
"""


@dataclass(frozen=True)
class StepPart:
    """One part of an optimizer step, with its estimated time.

    Attributes:
        name: what it does.
        flops: floating-point operations of its matrix products.
        bytes: memory traffic: what the GPU reads from its memory and writes to it.
        link_bytes: traffic over the card's PCIe link.
        seconds: estimated time, :data:`EFFICIENCY` included.
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
    """The estimate of one optimizer step on one card.

    Attributes:
        parts: the parts, in the order in which they are listed to the user.
        tokens: tokens of all micro-batches of the step.
    """

    parts: tuple[StepPart, ...]
    tokens: int

    @property
    def seconds(self) -> float:
        """Time of the step [s]: the parts run one after the other."""
        return sum(part.seconds for part in self.parts)

    @property
    def flops(self) -> int:
        """Floating-point operations of the products in all parts."""
        return sum(part.flops for part in self.parts)

    @property
    def tokens_per_second(self) -> float:
        """Tokens that one card trains on in a second."""
        return self.tokens / self.seconds


@dataclass(frozen=True)
class RunPrice:
    """Time and price of a whole run on a rented machine.

    Attributes:
        flavor: the machine.
        minutes: training time; loading, evaluations and checkpoints come on top.
    """

    flavor: Flavor
    minutes: float

    @property
    def cost(self) -> float:
        """Price of these minutes [USD]."""
        return self.minutes / 60 * self.flavor.price


class PartCounts(NamedTuple):
    """What one part of a step has to do, before it is turned into time.

    Attributes:
        name: what the part does.
        flops: floating-point operations of its products.
        bytes: memory traffic.
        link: traffic over PCIe [bytes].
        why: how the counts come about.
    """

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
        cards: how many cards train data-parallel; at the end of a step they all-reduce their gradients over PCIe.

    Returns:
        The step of one card, without the parts that have nothing to do.
    """
    parts = []
    for counted in counts(work, cards):
        if counted.flops or counted.bytes or counted.link:
            parts.append(_part(counted, card, work.precision))
    return Step(tuple(parts), work.micro_batches * work.batch * work.tokens)


def counts(work: Work, cards: int = 1) -> list[PartCounts]:
    """Count what the parts of one optimizer step have to do; arguments as for :func:`step`."""
    k = work.micro_batches  # of one optimizer step
    found = []
    for counted in _micro_batch(work):
        found.append(counted._replace(flops=k * counted.flops, bytes=k * counted.bytes, link=k * counted.link))
    return [*found, *_once_a_step(work, cards)]


def _part(counted: PartCounts, card: Card, precision: str) -> StepPart:
    """Turn the counts of a part into its time, by the roofline model of this module's docstring."""
    compute_seconds = counted.flops / card.flops(precision)
    memory_seconds = counted.bytes / card.memory_rate
    link_seconds = counted.link / card.link_rate
    seconds_at_peak = max(compute_seconds, memory_seconds) + link_seconds
    return StepPart(
        name=counted.name,
        flops=round(counted.flops),
        bytes=round(counted.bytes),
        link_bytes=round(counted.link),
        seconds=seconds_at_peak / EFFICIENCY,
        why=counted.why,
    )


def _micro_batch(work: Work) -> Iterator[PartCounts]:
    """Count the parts of one micro-batch."""
    n = work.positions  # the tokens of a micro-batch, learned prompt vectors included
    wide = work.compute_itemsize  # bytes of a number that products read or write
    blocks = products.blocks(work)
    weights_forward, weights_again, weights_backward = moved_bytes.weights(work, blocks)
    for name, counted, weight_bytes, why in (
        ("blocks forward", blocks.forward, weights_forward, "2 operations a weight and position"),
        ("blocks again", blocks.again, weights_again, "checkpointing repeats the forward pass"),
        ("blocks backward", blocks.backward, weights_backward, "2 for a frozen weight, 4 for a trained one"),
    ):
        yield PartCounts(name, n * counted.flops, n * counted.elements * wide + weight_bytes, 0, why)
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
    if work.link_trips:  # activation offload; the logits are saved outside the blocks
        # Saved bytes of one position: in all blocks, and in the loss.
        kept = runs["forward"] * work.saved(work) + work.logit_saved_bytes * work.shape.vocabulary
        why = "what the way back needs goes to the host and comes back"
        yield PartCounts("offload", 0, 0, work.link_trips * n * kept, why)


def _once_a_step(work: Work, cards: int) -> Iterator[PartCounts]:
    """Count the parts that run once for all micro-batches of a step."""
    trained = work.trained_weights
    each = work.optimizer_bytes + work.gradient_bytes
    yield PartCounts("optimizer", 0, each * trained, 0, f"{each} bytes a trained weight")
    # A ring all-reduce sends 2 (N - 1) / N times the fp32 gradients from each of N cards; 0 for one card.
    ring = 2 * (cards - 1) / cards * FP32 * trained
    yield PartCounts("gradients of the other cards", 0, 0, ring, "fp32 gradients, twice around a ring over PCIe")


def _attention(work: Work, blocks: products.Blocks) -> PartCounts:
    """Count the attention of all blocks, with a fused kernel or with all scores in memory."""
    fused = work.kernel in ("flash", "memory-efficient")
    flops = products.attention(work, blocks, fused=fused)
    forward = blocks.passes["forward"] + blocks.passes["again"]
    backward = blocks.attended_back
    if not fused:
        scores = work.batch * work.shape.heads * work.row_positions**2
        moved = scores * (forward * moved_bytes.SCORE[0] + backward * moved_bytes.SCORE[1])
        why = f"{work.kernel} attention holds all T x T scores, and passes over them"
        return PartCounts("attention", flops, moved, 0, why)
    # A fused kernel reads queries, keys and values and writes an output as wide as the queries. Backward we count each
    # of the four twice: once for itself, once for its gradient.
    position_bytes = work.compute_itemsize * 2 * (work.shape.query_width + work.shape.kv_width)
    moved = work.positions * position_bytes * (forward + 2 * backward)
    if work.masked:
        return PartCounts("attention", flops, moved, 0, f"the {work.kernel} kernel, with a mask")
    # Without a mask the kernel knows that attention is causal, and skips about half of the token pairs.
    why = f"the {work.kernel} kernel, which leaves out what a token may not see"
    return PartCounts("attention", flops * 0.5, moved, 0, why)


def _head(work: Work, blocks: products.Blocks) -> PartCounts:
    """Count the head's products and the loss."""
    counted = products.head(work, blocks.learns)
    position_bytes = counted.elements * work.compute_itemsize + work.logit_bytes * work.shape.vocabulary
    n: float = work.positions
    why = "logits of every position"
    if work.logit_positions is not None:
        n = work.logit_positions
        why = "logits of trained tokens only"
    moved = n * position_bytes + moved_bytes.head_weights(work)
    return PartCounts("head and loss", n * counted.flops, moved, 0, why)


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


def run_cost(step: Step, tokens: float, flavor: Flavor) -> RunPrice:
    """Estimate minutes and price of a run.

    Args:
        step: an estimate for the flavor's card and its number of cards.
        tokens: tokens of the whole run, all epochs together.
        flavor: the machine. Its cards are data-parallel: they share the rows, and each holds the whole model.
    """
    return RunPrice(flavor, tokens / (step.tokens_per_second * flavor.cards) / 60)
