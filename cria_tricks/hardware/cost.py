"""What a step takes, in seconds, and what a run costs: counted work against the peak rates of a card.

Each part of a step is either held up by its products or by the bytes it moves, so it takes the longer of the two
times; parts follow one another, so theirs are added. That sum is what the card would need at its datasheet's rates.
Nothing reaches those, so it is divided by one number, :data:`EFFICIENCY`.
"""

import math
from dataclasses import dataclass

import torch

from cria_tricks.hardware import products, traffic
from cria_tricks.hardware.cards import Card, Flavor
from cria_tricks.hardware.kernels import kernel_for
from cria_tricks.memory.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.tricks.chunked_loss import TOKENS_PER_CHUNK
from cria_tricks.units import DTYPE

EFFICIENCY = 0.5
"""How much of a card's peak rates a step gets, on every card and in every part: half.

A round number that is fitted to nothing. With it two public runs, which its tests repeat, come out at 1.6 times their
speed (Llama-3.2-1B by QLoRA on a free T4, 1,060 tokens a second with its evaluations and checkpoints) and at 0.9 of it
(Llama-2-7B by LoRA on an A100, 2,954; LLaMA-Factory's wiki). So take it for right within a factor of two. What it does
not know: the launch of a kernel, so small models with short rows take longer than it says; and the power limit, 70
watts on a T4 and 72 on an L4, which holds them under their peak in a long run. We have measured on neither.
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
class Run:
    """A whole run on a rented machine.

    Attributes:
        flavor: the machine.
        minutes: of training; loading, evaluations and checkpoints come on top.
        low: cost in USD at the guide's lowest price.
        high: at its highest.
    """

    flavor: Flavor
    minutes: float
    low: float
    high: float


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
    tricks, rows = recipe.tricks, recipe.train.batch_size
    tokens = tokens or recipe.data.max_length
    length = tokens + (recipe.prompt.tokens if tricks.peft == "prompt_tuning" else 0)
    n, k = rows * length, tricks.gradient_accumulation
    blocks, wide = products.blocks(recipe, shape), traffic.element_bytes(recipe)
    runs = blocks.passes
    read = traffic.weights(recipe, shape, blocks)
    rate, parts = card.flops(tricks.precision), list[Part]()

    def add(name: str, flops: float, moved: float, why: str, link: float = 0) -> None:
        ideal = max(flops / rate, moved / card.memory_rate) + link / card.link_rate
        if flops or moved or link:
            parts.append(Part(name, round(flops), round(moved), round(link), ideal / EFFICIENCY, why))

    for name, counted, weights, why in (
        ("blocks forward", blocks.forward, read[0], "2 operations a weight and position"),
        ("blocks again", blocks.again, read[1], "checkpointing repeats the forward pass"),
        ("blocks backward", blocks.backward, read[2], "2 for a frozen weight, 4 for a trained one"),
    ):
        add(name, k * n * counted.flops, k * (n * counted.elements * wide + weights), why)
    add(
        "adapter",
        k * (n * blocks.adapter.flops + blocks.norms),
        k * n * blocks.adapter.elements * wide,
        "thin products, which mostly wait for memory",
    )
    add(*_attention(recipe, shape, card, blocks, rows, length, k))
    forward, backward = traffic.between(recipe, shape)
    moved = (runs["forward"] + runs["again"]) * forward + runs["backward"] * backward
    add("between products", 0, k * n * moved, "norms, rotary, activation, residual sums, casts: all of it memory")
    add(*_head(recipe, shape, blocks, n, rows * tokens * trained_share, k))
    trained = products.trained_weights(recipe, shape)
    add("optimizer", 0, trained * traffic.optimizer(recipe), f"{traffic.optimizer(recipe)} bytes a trained weight")
    if tricks.activation_offload:
        kept = runs["forward"] * traffic.saved(recipe, shape, checkpointed=products.checkpoints(recipe))
        kept += 0 if tricks.chunked_loss else traffic.LOGIT_SAVED * shape.vocabulary
        add("offload", 0, 0, "what the way back needs goes to the host and comes back", link=2 * k * n * kept)
    if cards > 1:
        ring = 2 * (cards - 1) / cards * 4 * trained
        add("gradients of the other cards", 0, 0, "fp32 gradients, twice around a ring over PCIe", link=ring)
    return Step(tuple(parts), k * rows * tokens)


def run_tokens(recipe: Recipe, rows: int, tokens: int) -> int:
    """Tokens of a whole run.

    Args:
        recipe: ``train.max_steps`` full steps if it sets them, else ``train.epochs`` of the rows.
        rows: training rows.
        tokens: of a row, in the mean.
    """
    train = recipe.train
    steps_rows = train.max_steps * train.batch_size * recipe.tricks.gradient_accumulation
    return (steps_rows or math.ceil(rows * train.epochs)) * tokens


def run_cost(step: Step, tokens: int, flavor: Flavor) -> Run:
    """Minutes and price of a run.

    Args:
        step: an estimate for the flavor's card and its number of cards.
        tokens: of the whole run, every epoch counted.
        flavor: the machine. Its cards share the rows; that each needs the whole model does not change.
    """
    hours = tokens / (step.tokens_per_second * flavor.cards) / 3600
    return Run(flavor, hours * 60, hours * flavor.low, hours * flavor.high)


def _attention(
    recipe: Recipe, shape: Shape, card: Card, blocks: products.Blocks, rows: int, tokens: int, k: int
) -> tuple[str, float, float, str]:
    kernel, masked = attention_kernel(recipe, shape, card, rows, tokens)
    fused = kernel in ("flash", "memory-efficient")
    flops = products.attention(blocks, shape, rows, tokens, fused=fused)
    forward, backward = blocks.passes["forward"] + blocks.passes["again"], blocks.attended_back
    if fused:
        wide = traffic.element_bytes(recipe) * 2 * (shape.query_width + shape.kv_width)
        moved = rows * tokens * wide * (forward + 2 * backward)
        why = f"the {kernel} kernel" + (", with a mask" if masked else ", which leaves out what a token may not see")
        return "attention", k * flops * (1 if masked else 0.5), k * moved, why
    moved = rows * shape.heads * tokens**2 * (forward * traffic.SCORE[0] + backward * traffic.SCORE[1])
    return "attention", k * flops, k * moved, f"{kernel} attention holds all T x T scores, and passes over them"


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


def _head(
    recipe: Recipe, shape: Shape, blocks: products.Blocks, positions: int, trained: float, k: int
) -> tuple[str, float, float, str]:
    counted, wide = products.head(recipe, shape, blocks.learns), traffic.element_bytes(recipe)
    chunked = recipe.tricks.chunked_loss
    n = trained if chunked else positions
    chunks = -(-int(trained) // TOKENS_PER_CHUNK) if chunked else 0
    each = counted.elements * wide + traffic.LOGIT["chunked" if chunked else "full"] * shape.vocabulary
    moved = n * each + traffic.head_weights(recipe, shape, chunks)
    why = "logits of trained tokens only" if chunked else "logits of every position"
    return "head and loss", k * n * counted.flops, k * moved, why
