"""Predict the time of answers that are generated greedily, one token after the other.

A batch of answers takes one pass for its prompts, which gives the first new token, and one pass for each further token.
A pass for one token reads all weights and the whole KV cache, so it waits for memory (lessons/flash_decoding.py). Each
part of a pass takes the longer of its operations / rate and its bytes / bandwidth, with the rates that the estimate of
a training step takes, too (``bill/step_time.py``); nothing is fitted to measured answers.

The result is an upper bound in tokens: every answer is taken as long as it may be, and every prompt as long as the
longest one. The rates themselves have the range of the card, of which "at most" means the high end.

Left out are: loading the model; the loss of the data's own answers, which ``cria eval`` measures, too; compiling again
for other lengths (``tricks.compile``); and kernels that multiply by 4-bit weights without unpacking them, which save
time. The launches of a batch are compared with the card's work of all its tokens together, not token by token.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from cria_tricks.bill import launches, moved_bytes, products
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.step_time import PartCounts, Step, StepPart, ends, launch_time, timed
from cria_tricks.bill.work import Work
from cria_tricks.common.units import duration
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe

GREEDY = FP32 + FP32
"""The traffic of choosing a token [bytes for one logit]: logits are written in fp32, and the largest is looked for."""


@dataclass(frozen=True)
class Asked:
    """Prompts that are answered.

    Attributes:
        rows: how many.
        prompt: tokens of the longest prompt.
        new: tokens of the longest answer.
        together: rows that are answered together.
    """

    rows: int
    prompt: int
    new: int
    together: int


def cache_bytes(shape: Shape, itemsize: int) -> int:
    """Count the KV cache of one token of one row in all blocks [bytes]: its keys and its values."""
    return 2 * shape.layers * shape.kv_width * itemsize


def batch(work: Work, card: Card, new: int) -> Step:
    """Estimate one batch of answers.

    Args:
        work: the model; ``work.batch`` rows of ``work.tokens`` prompt tokens are answered together.
        card: the GPU or CPU.
        new: tokens of each answer, at least 1.

    Returns:
        The parts of the pass for the prompts and of all passes for one token, as of a training step.
    """
    work = replace(work, repeated_blocks=0)  # without gradients, checkpointing has nothing to repeat
    blocks = products.blocks(work)
    blocks = replace(blocks, passes={**blocks.passes, "backward": 0})
    length = work.row_positions
    further = new - 1
    # Each token attends to itself and to all before it; the pairs are those of one row.
    in_prompt = length * (length + 1) // 2
    in_answer = further * length + further * (further + 1) // 2
    # In the pass for the prompts a kernel reads keys and values once; for one token that is the whole past.
    parts = _parts(work, blocks, card, 1, length, in_prompt, length)
    if further:
        parts += _parts(work, blocks, card, further, further, in_answer, in_answer)
    return Step(tuple(parts), work.batch * new, card.spread(work.precision))


def _parts(
    work: Work, blocks: products.Blocks, card: Card, passes: int, length: int, pairs: int, read: int
) -> list[StepPart]:
    """Time some passes; see :func:`_counts` for the arguments."""
    counted = list(_counts(work, blocks, passes, length, pairs, read))
    parts = [timed(one, card, work.precision) for one in counted]
    started = passes * launches.of_answer_pass(work, blocks)
    return [*parts, launch_time(started, card, sum(part.seconds for part in parts))]


def _counts(
    work: Work, blocks: products.Blocks, passes: int, length: int, pairs: int, read: int
) -> Iterator[PartCounts]:
    """Count what some passes have to do, all of them together.

    Args:
        work: the model.
        blocks: its products, forward only.
        passes: how often the weights are read.
        length: positions of one row in all these passes.
        pairs: pairs of tokens that attend, in one row.
        read: how many tokens' keys and values are read, in one row.
    """
    shape = work.shape
    wide = work.compute_itemsize
    rows = work.batch
    n = rows * length
    unpacked, cast = moved_bytes.unpacking(work, blocks)
    yield PartCounts("unpacking", 0, passes * unpacked, 0, "4-bit and int8 weights, before each pass")
    yield PartCounts("casts of weights", 0, passes * cast, 0, "weights in another dtype than products compute in")
    weights = moved_bytes.weights(work, blocks)[0]
    moved = n * blocks.forward.elements * wide + passes * weights
    yield PartCounts("blocks", n * blocks.forward.flops, moved, 0, "each pass reads all weights", rate="products")
    yield _adapter(work, blocks, passes, n)
    yield _attention(work, rows * pairs, rows * read, n)
    between = blocks.passes["forward"] * work.between(work)[0]
    yield PartCounts("between products", 0, n * between, 0, "norms, rotary, activation, residual sums, casts")
    logits = passes * rows * shape.vocabulary  # of the last position of each row
    moved = passes * shape.embedding_weights * wide + logits * (wide + GREEDY)
    yield PartCounts("head", 2 * shape.width * logits, moved, 0, "logits of one position a row")


def _adapter(work: Work, blocks: products.Blocks, passes: int, n: int) -> PartCounts:
    """Count the adapter's thin products, forward; ``n`` positions in so many passes."""
    thin = products.Products()
    for name in work.adapted:
        d_in, d_out = work.shape.linears[name]
        times = work.shape.layers * products.passes_of_a_token(work.shape, name)
        thin.add(d_in, work.rank, times)
        thin.add(work.rank, d_out, times)
    weights = work.trained_weights if work.adapted else 0
    each = work.compute_itemsize
    if work.autocast and each < FP32:
        each += FP32 + each  # fp32 weights are cast in each pass
    moved = n * thin.elements * work.compute_itemsize + passes * weights * each
    return PartCounts("adapter", n * thin.flops + passes * blocks.norms, moved, 0, "thin products, beside the base's")


def _attention(work: Work, pairs: int, read: int, n: int) -> PartCounts:
    """Count attention: two products for each pair of tokens; keys and values are read, queries read, outputs written.

    Eager attention repeats shared heads first: it reads the cache, writes a copy for each query head, and reads that.
    """
    shape = work.shape
    times = 1
    moved = 0
    if work.kernel == "eager":
        times += 2 * (shape.heads // shape.kv_heads)
        moved = moved_bytes.SCORE[0] * shape.layers * shape.heads * pairs
    moved += times * read * cache_bytes(shape, work.compute_itemsize)
    # Of each new position: its queries, its output, and its keys and values, which are written into the cache.
    moved += n * shape.layers * 2 * (shape.query_width + shape.kv_width) * work.compute_itemsize
    flops = 4 * shape.layers * shape.query_width * pairs
    return PartCounts("attention", flops, moved, 0, "each new token reads the whole cache")


def seconds(work: Work, card: Card, asked: Asked) -> float | None:
    """Predict the time of all answers, if each is as long as it may be: the middle of the range [s].

    Args:
        work: the model; its batch and its tokens are replaced by those that are asked for.
        card: the GPU or CPU.
        asked: the rows.

    Returns:
        The time; ``None`` for a side network, which answers without a KV cache.
    """
    if work.copied_blocks:
        return None
    together = asked.together
    if work.prompt_tokens:  # a learnt prompt does not go with padding, so its rows are answered one by one
        together = 1
    work = replace(work, tokens=max(asked.prompt, 1))
    full, rest = divmod(asked.rows, together)
    found = full * batch(replace(work, batch=together), card, asked.new).seconds
    if rest:
        found += batch(replace(work, batch=rest), card, asked.new).seconds
    return found


def opened(recipe: Recipe, shape: Shape, device: Device, *, with_adapter: bool = True, packed: bool = False) -> Work:
    """Describe the work of a model that is opened to answer (``cria eval``, ``cria chat``), all of it in one dtype.

    Args:
        recipe: with which the adapter was trained.
        shape: of the base.
        device: the machine that answers.
        with_adapter: whether the adapter lies over it.
        packed: whether a quantised base stays packed.
    """
    from cria_tricks.load.answering_memory import as_opened  # it imports torch, which takes seconds

    work = _folded(as_opened(recipe, device, with_adapter=with_adapter, packed=packed), shape, device)
    wide = work.compute_itemsize
    return replace(
        work,
        hidden_itemsize=wide,
        stored_itemsize=work.stored_itemsize if packed else wide,
        head_itemsize=wide,
        adapter_casts=False,
        autocast=False,
    )


def of_eval(
    recipe: Recipe, shape: Shape, card: Card, asked: Asked, *, with_adapter: bool, packed: bool = False
) -> float | None:
    """Predict what the answers of ``cria eval`` take at most, if the card has room for them [s].

    Args:
        recipe: with which the adapter was trained.
        shape: of the base.
        card: the machine that answers.
        asked: the rows.
        with_adapter: whether the adapter answers, or the base without it.
        packed: whether a quantised base stays packed.

    Returns:
        The time; ``None`` if it is not known.
    """
    work = opened(recipe, shape, card.device, with_adapter=with_adapter, packed=packed)
    found = seconds(work, card, asked)
    if found is None:
        return None
    return ends(found, card.spread(work.precision))[1]


def of_samples(recipe: Recipe, shape: Shape, card: Card, prompt: int) -> float | None:
    """Predict what the answers of one evaluation during training (``eval.samples``) take at most [s].

    Args:
        recipe: that trains.
        shape: of the base.
        card: the machine that trains.
        prompt: tokens of the longest prompt.

    Returns:
        The time; ``None`` if it is not known.
    """
    work, asked = _samples(recipe, shape, card, prompt)
    found = seconds(work, card, asked)
    if found is None:
        return None
    return ends(found, card.spread(work.precision))[1]


def _samples(recipe: Recipe, shape: Shape, card: Card, prompt: int) -> tuple[Work, Asked]:
    """Describe the model that trains, and what it is asked at an evaluation."""
    asked = Asked(recipe.eval.samples, prompt, recipe.eval.max_new_tokens, recipe.train.batch_size)
    return _folded(recipe, shape, card.device), asked


def _folded(recipe: Recipe, shape: Shape, device: Device) -> Work:
    # The tricks import torch, which takes seconds, and cria eval refuses wrong arguments before that.
    from cria_tricks.tricks import folds

    return folds.work(recipe, shape, device)


def of_run(recipe: Recipe, shape: Shape, card: Card, prompt: int, rows: int) -> float:
    """Predict the answers of all evaluations of a run: the middle of the range [s]; 0 if that is not known.

    The arguments are those of :func:`of_samples` and :func:`evaluations`.
    """
    work, asked = _samples(recipe, shape, card, prompt)
    found = seconds(work, card, asked)
    return (found or 0.0) * (evaluations(recipe, rows) or 0)


def evaluations(recipe: Recipe, rows: int | None) -> int | None:
    """Count the evaluations of a run: at its start, every ``train.eval_steps`` steps, and at its end.

    Packing makes fewer rows of them, so there the count is an upper bound.

    Args:
        recipe: gives the length of the run.
        rows: the number of training rows; ``None`` if it is not known.

    Returns:
        The number; ``None`` if it depends on the rows, and they are not known.
    """
    train = recipe.train
    if not train.eval_steps and not train.max_steps:
        return 1 + math.ceil(train.epochs)
    if recipe.data.stream:
        epoch = train.max_steps
    elif rows is not None:
        epoch = train.steps_per_epoch(recipe.rows_per_step // train.batch_size, rows)
    elif train.eval_steps and train.max_steps:
        epoch = 0  # neither number depends on it
    else:
        return None
    total = train.max_steps or math.ceil(epoch * train.epochs)
    return 1 + math.ceil(total / (train.eval_steps or epoch))


def at_most(most: float) -> str:
    """Write a time that answers take at most."""
    return f"at most {duration(most)} of answers (predicted)"
