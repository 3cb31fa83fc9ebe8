"""Estimate the memory of ``cria eval`` and ``cria chat`` on a card, and say with which options they fit it.

Both open a trained adapter over its base, without anything that training needs. An NF4 or int8 base is unpacked to 16
bits, unless ``--packed`` leaves it as it is. So a model that fits a card in training may not fit it when it answers.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.evaluation import fullest_answer, loss_pass
from cria_tricks.bill.moments import weight_lines
from cria_tricks.bill.operation import Moment
from cria_tricks.bill.step import Step
from cria_tricks.common.units import human
from cria_tricks.data.lengths import Lengths
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.settings import BATCH, NEW_TOKENS, Tricks
from cria_tricks.switches.folds import in_eval_mode, step_of

EVAL, CHAT = "cria eval", "cria chat"
CHAT_TOKENS = 512
"""The tokens of the longest answer that ``cria chat`` allows, when nothing else is asked for."""
WAYS = {EVAL: ((BATCH, NEW_TOKENS), (1, NEW_TOKENS), (1, CHAT_TOKENS)), CHAT: ((1, CHAT_TOKENS), (1, CHAT_TOKENS // 4))}
"""For each command the rows that it answers together and the tokens of an answer: as it is, and with smaller ones."""


class Way(NamedTuple):
    """The options of a command that opens a model to answer, and what it needs with them."""

    options: tuple[str, ...]
    memory: Bill


@dataclass(frozen=True)
class Answering:
    """What a command needs on a card as it is, and how it would fit.

    Attributes:
        command: ``cria eval`` or ``cria chat``.
        plain: without options.
        fitting: with the fewest options with which it fits; ``None`` if it fits with none of them.
    """

    command: str
    plain: Way
    fitting: Way | None

    @property
    def in_words(self) -> list[str]:
        """Say that the command does not fit, and what would help; empty if it fits as it is."""
        memory = self.plain.memory
        if self.fitting == self.plain:
            return []
        device = memory.step.device
        needs = f"needs {human(memory.least_bytes)} of {human(device.memory_bytes)}"
        said = f"{self.command} of the result {needs} on {device.name}, so it does not fit"
        if self.fitting is None:
            return [f"{said}, and none of its options would help; answer on a larger card, or on a CPU"]
        options = " ".join(self.fitting.options)
        return [f"{said}; with {options} it needs {human(self.fitting.memory.least_bytes)} (predicted)"]


def of_result(recipe: Recipe, shape: Shape, device: Device, lengths: Lengths) -> list[Answering]:
    """Estimate what ``cria eval`` and ``cria chat`` of a recipe's result need on one card.

    Args:
        recipe: with which the adapter is trained.
        shape: of the base.
        device: the card.
        lengths: the lengths of the rows. Both commands are taken to get the longest prompt.
    """
    found = []
    for command in WAYS:
        ways = _ways(command, recipe, shape, device, lengths)
        plain = next(ways)
        fitting = plain if plain.memory.fits else next((way for way in ways if way.memory.fits), None)
        found.append(Answering(command, plain, fitting))
    return found


def _ways(command: str, recipe: Recipe, shape: Shape, device: Device, lengths: Lengths) -> Iterator[Way]:
    """Yield the ways to answer, as the command is first, then with more and more options."""
    row = lengths.evaluated or recipe.data.max_length
    prompt = max(lengths.prompts, default=row)
    usual_rows, usual_new = WAYS[command][0]
    quantised = step_of(recipe, shape, device).quantised
    for rows, new in WAYS[command]:
        options: tuple[str, ...] = ()
        if rows < usual_rows:
            options += (f"--batch-size {rows}",)
        if new < usual_new:
            options += (f"--max-new-tokens {new}",)
        for packed in (False, True) if quantised else (False,):
            memory = needed(recipe, shape, device, rows, prompt, new, packed=packed, row=row * (command == EVAL))
            yield Way(("--packed", *options) if packed else options, memory)


def needed(
    recipe: Recipe, shape: Shape, device: Device, rows: int, prompt: int, new: int, *, packed: bool, row: int = 0
) -> Bill:
    """Estimate the memory of an opened model that answers.

    Args:
        recipe: with which the adapter was trained.
        shape: of the base.
        device: the card.
        rows: the prompts that are answered together.
        prompt: tokens of the longest prompt.
        new: tokens of the longest answer.
        packed: whether a quantised base stays packed.
        row: tokens of the longest row whose loss is measured, too, one at a time; 0 if none is.
    """
    tricks = Tricks(
        precision=device.best_precision,
        attention="sdpa",
        expand_kv=device.needs_expand_kv,
        peft=recipe.tricks.peft,
        quantization=recipe.tricks.quantization if packed else "none",
        double_quantization=recipe.tricks.double_quantization and packed,
    )
    recipe = recipe.model_copy(update={"tricks": tricks})

    def of(rows: int, tokens: int) -> Step:
        batch = recipe.train.model_copy(update={"batch_size": rows})
        step = step_of(recipe.model_copy(update={"train": batch}), shape, device, tokens)
        return in_eval_mode(_in_one_dtype(step, packed=packed))

    first = of(rows, prompt)
    moments = [fullest_answer(first, of(rows, 1), prompt + new, caches=not first.learns_beside)]
    if row:
        moments += loss_pass(of(1, row))
    weights = weight_lines(first, first.compute_itemsize)
    return Bill(first, tuple(Moment("answering", (*weights, *one.lines)) for one in moments))


def _in_one_dtype(step: Step, *, packed: bool) -> Step:
    """Return the step of a model that computes in one dtype, without autocast; packed matrices are the exception."""
    wide = step.compute_itemsize
    shape = step.shape
    blocks = step.block_weight_bytes
    if not packed:
        blocks = wide * shape.layers * sum(d_in * d_out for d_in, d_out in shape.packable.values())
    return replace(
        step,
        block_weight_bytes=blocks,
        other_weight_itemsize=wide,
        hidden_itemsize=wide,
        product_itemsize=wide,
        adapter_input_itemsize=wide,
        casts_adapters=False,
        trains_all=False,
        trains_head=False,
    )
