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

import torch

from cria_tricks.bill import moved_bytes, products
from cria_tricks.bill.constants import TOKENS_PER_CHUNK
from cria_tricks.bill.formula import chunks
from cria_tricks.common.units import DTYPE
from cria_tricks.hardware.attention_kernels import kernel_for
from cria_tricks.hardware.cards import Card, Flavor
from cria_tricks.models.shape import Shape
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
class Part:
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

    parts: tuple[Part, ...]
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


def step(
    recipe: Recipe,
    shape: Shape,
    card: Card,
    tokens: int | None = None,
    trained_share: float = 1.0,
    cards: int = 1,
) -> Step:
    """Estimate one optimizer step.

    Args:
        recipe: what is trained; ``train.batch_size`` rows a micro-batch, ``tricks.gradient_accumulation`` of them.
        shape: the model's.
        card: the GPU.
        tokens: of a row; ``data.max_length`` when left out.
        trained_share: of the tokens, how many are trained: the chunked loss makes logits for those only.
        cards: how many work side by side and add up their gradients over PCIe at the end.
    """
    rows, k = recipe.train.batch_size, recipe.tricks.gradient_accumulation
    tokens = tokens or recipe.data.max_length
    counted = work(recipe, shape, card, tokens, trained_share, cards)
    precision = recipe.tricks.precision
    return Step(tuple(_part(each, card, precision) for each in counted if any(each[1:4])), k * rows * tokens)


class Work(NamedTuple):
    """What one part of a step has to do: operations, and bytes over memory and link."""

    name: str
    flops: float
    bytes: float
    link: float
    why: str


def work(
    recipe: Recipe, shape: Shape, card: Card, tokens: int, trained_share: float = 1.0, cards: int = 1
) -> list[Work]:
    """Count what the parts of one optimizer step have to do; arguments as for :func:`step`."""
    k = recipe.tricks.gradient_accumulation
    found = [
        each._replace(flops=k * each.flops, bytes=k * each.bytes, link=k * each.link)
        for each in _micro_batch(recipe, shape, card, recipe.train.batch_size, tokens, trained_share)
    ]
    return [*found, *_once_a_step(recipe, shape, cards)]


def _part(work: Work, card: Card, precision: str) -> Part:
    ideal = max(work.flops / card.flops(precision), work.bytes / card.memory_rate) + work.link / card.link_rate
    return Part(work.name, round(work.flops), round(work.bytes), round(work.link), ideal / EFFICIENCY, work.why)


def _micro_batch(
    recipe: Recipe, shape: Shape, card: Card, rows: int, tokens: int, trained_share: float
) -> Iterator[Work]:
    length = tokens + (recipe.prompt.tokens if recipe.tricks.peft == "prompt_tuning" else 0)
    n, blocks, wide = rows * length, products.blocks(recipe, shape), moved_bytes.element_bytes(recipe)
    read = moved_bytes.weights(recipe, shape, blocks)
    for name, counted, weights, why in (
        ("blocks forward", blocks.forward, read[0], "2 operations a weight and position"),
        ("blocks again", blocks.again, read[1], "checkpointing repeats the forward pass"),
        ("blocks backward", blocks.backward, read[2], "2 for a frozen weight, 4 for a trained one"),
    ):
        yield Work(name, n * counted.flops, n * counted.elements * wide + weights, 0, why)
    thin = blocks.adapter
    why = "thin products, which mostly wait for memory"
    yield Work("adapter", n * thin.flops + blocks.norms, n * thin.elements * wide, 0, why)
    yield _attention(recipe, shape, card, blocks, rows, length)
    forward, backward = moved_bytes.between(recipe, shape)
    runs = blocks.passes
    moved = (runs["forward"] + runs["again"]) * forward + runs["backward"] * backward
    yield Work("between products", 0, n * moved, 0, "norms, rotary, activation, residual sums, casts: all of it memory")
    yield _head(recipe, shape, blocks, n, rows * tokens * trained_share)
    if recipe.tricks.activation_offload:
        kept = runs["forward"] * moved_bytes.saved(recipe, shape, checkpointed=products.checkpoints(recipe))
        kept += 0 if recipe.tricks.chunked_loss else moved_bytes.LOGIT_SAVED * shape.vocabulary
        yield Work("offload", 0, 0, 2 * n * kept, "what the way back needs goes to the host and comes back")


def _once_a_step(recipe: Recipe, shape: Shape, cards: int) -> Iterator[Work]:
    trained, each = products.trained_weights(recipe, shape), moved_bytes.optimizer(recipe)
    yield Work("optimizer", 0, each * trained, 0, f"{each} bytes a trained weight")
    ring = 2 * (cards - 1) / cards * 4 * trained
    yield Work("gradients of the other cards", 0, 0, ring, "fp32 gradients, twice around a ring over PCIe")


def run_tokens(recipe: Recipe, rows: int, tokens: float) -> float:
    """Tokens of a whole run.

    Args:
        recipe: ``train.max_steps`` full steps if it sets them, else ``train.epochs`` of the rows.
        rows: training rows.
        tokens: of a row, in the mean.
    """
    train = recipe.train
    steps_rows = train.max_steps * train.batch_size * recipe.tricks.gradient_accumulation
    return (steps_rows or math.ceil(rows * train.epochs)) * tokens


def run_cost(step: Step, tokens: float, flavor: Flavor) -> RunPrice:
    """Minutes and price of a run.

    Args:
        step: an estimate for the flavor's card and its number of cards.
        tokens: of the whole run, every epoch counted.
        flavor: the machine. Its cards share the rows; that each needs the whole model does not change.
    """
    return RunPrice(flavor, tokens / (step.tokens_per_second * flavor.cards) / 60)


def _attention(recipe: Recipe, shape: Shape, card: Card, blocks: products.Blocks, rows: int, tokens: int) -> Work:
    kernel, masked = attention_kernel(recipe, shape, card, rows, tokens)
    fused = kernel in ("flash", "memory-efficient")
    flops = products.attention(blocks, shape, rows, tokens, fused=fused)
    forward, backward = blocks.passes["forward"] + blocks.passes["again"], blocks.attended_back
    if fused:
        wide = moved_bytes.element_bytes(recipe) * 2 * (shape.query_width + shape.kv_width)
        moved = rows * tokens * wide * (forward + 2 * backward)
        why = f"the {kernel} kernel" + (", with a mask" if masked else ", which leaves out what a token may not see")
        return Work("attention", flops * (1 if masked else 0.5), moved, 0, why)
    moved = rows * shape.heads * tokens**2 * (forward * moved_bytes.SCORE[0] + backward * moved_bytes.SCORE[1])
    return Work("attention", flops, moved, 0, f"{kernel} attention holds all T x T scores, and passes over them")


def attention_kernel(recipe: Recipe, shape: Shape, card: Card, rows: int, tokens: int) -> tuple[str, bool]:
    """The kernel that attention gets on a card, and whether a mask comes with it.

    Rows of several lengths have a mask, and so has a window; a single row and packed ones have none. Packed rows are
    taken as one document each, the dearest case.
    """
    tricks = recipe.tricks
    masked = (rows > 1 and not tricks.packing) or 0 < shape.window < tokens
    if tricks.attention == "eager":
        return "eager", masked
    if tricks.attention == "flash_attention_2":
        return "flash", False
    repeated = masked or tricks.expand_kv or tricks.packing
    grouped = shape.heads != shape.kv_heads and not repeated
    dtype = getattr(torch, DTYPE[tricks.precision])
    return kernel_for(card.device, dtype, masked=masked, grouped=grouped), masked


def _head(recipe: Recipe, shape: Shape, blocks: products.Blocks, positions: int, trained: float) -> Work:
    counted, wide = products.head(recipe, shape, blocks.learns), moved_bytes.element_bytes(recipe)
    chunked = recipe.tricks.chunked_loss
    n = trained if chunked else positions
    many = chunks(trained, TOKENS_PER_CHUNK) if chunked else 0
    each = counted.elements * wide + moved_bytes.LOGIT["chunked" if chunked else "full"] * shape.vocabulary
    moved = n * each + moved_bytes.head_weights(recipe, shape, many)
    why = "logits of trained tokens only" if chunked else "logits of every position"
    return Work("head and loss", n * counted.flops, moved, 0, why)
