"""Add the evaluations of a run to its memory bill: the loss of its evaluation rows, and the answers to some of them.

A run evaluates before its first step, in between and at its end. At the later ones the optimizer states exist, and the
gradients are freed. Evaluation rows are never packed, and they may be longer than the training rows. So an evaluation
can need more memory than a training step.
"""

import functools
from dataclasses import dataclass, replace

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.evaluation import fullest_answer, loss_pass
from cria_tricks.bill.fsdp import sizes
from cria_tricks.bill.operation import ANSWERS, EVALUATION, STATE, Line, Moment
from cria_tricks.bill.step import Step
from cria_tricks.common.units import human
from cria_tricks.data.lengths import Lengths
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Shape
from cria_tricks.parallel.ring_bytes import through_the_ring, whole_rows
from cria_tricks.parallel.zigzag import own_tokens
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Data, Train
from cria_tricks.switches.folds import in_eval_mode, step_of

ONLY_TRAINING = {
    "gradient_checkpointing": False,
    "keep_attention": False,
    "activation_offload": False,
    "optimizer_in_backward": False,
    "gradient_accumulation": 1,
    "layer_by_layer": False,
    "packing": False,
    "optimizer": "adamw",
    "paged_optimizer": False,
    "compile": False,
}
"""The switches that do not act in a pass without gradients, and their values when they are off."""


@dataclass(frozen=True)
class Evaluated:
    """The rows of an evaluation.

    Attributes:
        tokens: tokens of the longest row; 0 if it is not known, which is taken as ``data.max_length``.
        prompt: tokens of the longest prompt that ``eval.samples`` answers; 0 as above.
    """

    tokens: int = 0
    prompt: int = 0


AS_LONG_AS_ALLOWED = Evaluated()
_TRAIN, _DATA = Train(), Data()


def rows_of(lengths: Lengths, recipe: Recipe) -> Evaluated:
    """Return the rows of an evaluation from the lengths that were read."""
    prompt = max(lengths.prompts[: recipe.eval.samples], default=0)
    # A prompt longer than data.max_length is not answered, and no row is longer than that.
    return Evaluated(lengths.evaluated, min(prompt, lengths.evaluated))


def with_evaluation(found: Bill, recipe: Recipe, rows: Evaluated, tokens: int | None = None) -> Bill:
    """Return a bill with the moments of an evaluation, before the optimizer step, which stays the last one.

    Args:
        found: the bill of a training step in one process.
        recipe: of the run; ``train.batch_size`` rows are evaluated together.
        rows: the evaluation rows.
        tokens: take evaluation rows as long as this instead.
    """
    device = found.step.device
    shape = found.step.shape  # of the part of the model that this process has
    longest = tokens or rows.tokens or recipe.data.max_length
    reduced = _without_training(recipe)
    pieces = found.step.stream_pieces
    has_head = shape.vocabulary > 0
    passes = [_loss(reduced, shape, device, longest, found.strategy, found.processes, pieces, has_head)]
    if recipe.eval.samples:
        passes.append(_samples(reduced, shape, device, rows.prompt or longest))
    standing = _standing(found)
    moments = (Moment(one.name, (*standing, *one.lines)) for one in passes)
    return replace(found, moments=(*found.moments[:-1], *moments, found.moments[-1]))


def doubts(found: Bill, recipe: Recipe, rows: Evaluated) -> list[str]:
    """Say what would help if an evaluation, and not a training step, needs too much memory."""
    if found.verdict == "fits" or found.peak.name not in (EVALUATION, ANSWERS):
        return []
    batch = recipe.train.batch_size
    change = ["shorter evaluation rows"]
    if batch > 1:
        change.append("a smaller train.batch_size")
    if found.peak.name == ANSWERS:
        change.append("a smaller eval.max_new_tokens")
    needs = f"{human(found.peak_bytes)}, and a training step {human(found.training.peak_bytes)}"
    longest = rows.tokens or recipe.data.max_length
    return [
        f"the {found.peak.name} needs {needs}: {batch} rows at a time, of up to {longest:,} tokens; what would help: "
        + " or ".join(change)
    ]


def _standing(found: Bill) -> tuple[Line, ...]:
    """Return what is alive during an evaluation anyway: weights, optimizer states, and what the strategy keeps.

    DDP's gradients stay in memory between two steps, because they are views of its buckets.
    """
    stays = [name for name in STATE if name != "gradients" or found.strategy == "ddp"]
    lines = [line for line in found.moments[-1].lines if line.name in stays or line.name.startswith("pipeline")]
    if found.strategy == "fsdp":
        lines.append(_gathered(found.step, found.processes))
    return tuple(lines)


def _gathered(step: Step, processes: int) -> Line:
    """Return the line of what FSDP2 has whole: the open group as weights and buffer, and the root. An upper bound."""
    of = sizes(step, processes)
    outside = sum(group.weights for group in of.outside.values())
    whole = 2 * of.block.weights + outside * (1 if step.shape.tied else 2)
    return Line("weights: unsharded", whole, "at most: the open group, its buffer, what stays whole")


def _without_training(recipe: Recipe) -> Recipe:
    """Return the recipe without the switches that change only a training step, so that alike recipes are equal."""
    tricks = recipe.tricks
    if tricks.packing and tricks.attention == "sdpa":  # the attention of packed rows treats others as expand_kv does
        tricks = tricks.model_copy(update={"expand_kv": True})
    tricks = tricks.model_copy(update=ONLY_TRAINING)
    train = _TRAIN.model_copy(update={"batch_size": recipe.train.batch_size})
    return recipe.model_copy(update={"tricks": tricks, "train": train, "data": _DATA})


@functools.lru_cache(maxsize=512)  # most sets that a search compares differ only in what a training step saves
def _loss(
    recipe: Recipe,
    shape: Shape,
    device: Device,
    tokens: int,
    strategy: str,
    processes: int,
    pieces: int,
    has_head: bool,
) -> Moment:
    """Return the fullest moment of a micro-batch's loss, without what is alive anyway."""
    beside: tuple[Line, ...] = ()
    if strategy == "context":
        mine = own_tokens(tokens, processes)
        step = through_the_ring(step_of(recipe, shape, device, mine, recipe.train.batch_size * mine))
        beside = (whole_rows(step, tokens),)
    else:
        step = replace(step_of(recipe, shape, device, tokens), stream_pieces=pieces)
    found = loss_pass(in_eval_mode(step))
    if not has_head:  # a stage in the middle of a pipeline
        found = found[:1]
    fullest = max(found, key=lambda moment: moment.bytes)
    return replace(fullest, lines=(*beside, *fullest.lines))


@functools.lru_cache(maxsize=512)
def _samples(recipe: Recipe, shape: Shape, device: Device, prompt: int) -> Moment:
    """Return the fullest moment of the answers of ``eval.samples``, without what is alive anyway."""
    rows = min(recipe.eval.samples, recipe.train.batch_size)
    return answers(recipe, shape, device, rows, prompt, recipe.eval.max_new_tokens)


def answers(recipe: Recipe, shape: Shape, device: Device, rows: int, prompt: int, new: int) -> Moment:
    """Return the fullest moment of answering prompts, without what is alive anyway.

    Args:
        recipe: describes the model that answers, as it trains.
        shape: of the model.
        device: on which it answers.
        rows: the prompts that are answered together.
        prompt: tokens of the longest prompt.
        new: tokens of the longest answer.
    """
    room = prompt + new

    def of(rows: int, tokens: int) -> Step:
        batch = recipe.train.model_copy(update={"batch_size": rows})
        return in_eval_mode(step_of(recipe.model_copy(update={"train": batch}), shape, device, tokens))

    first = of(rows, prompt)
    if first.learns_beside:  # a side network has no KV cache, so each pass has all tokens so far
        return fullest_answer(of(rows, room), of(rows, 1), room, caches=False)
    if first.tokens > prompt:  # peft drops the positions behind a learnt prompt, so prompts are answered one by one
        return fullest_answer(of(1, prompt), of(1, 1), room + first.tokens - prompt)
    return fullest_answer(first, of(rows, 1), room)
