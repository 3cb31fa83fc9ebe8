"""Search for the toggles with which a recipe runs fastest, smallest, or with the longest rows, and still fits.

The recipe says what is learnt: the model, what trains, the formats, the rows of an optimizer step. All of that stays.
The search changes only toggles whose results are the same, exactly or within rounding: which blocks are recomputed,
where activations and optimizer states wait, how attention and the loss are computed, and how the rows of a step are
divided into micro-batches. ``may_change`` allows it more.

Nothing is trained: each of the thousand sets that are compared is an estimate of a millisecond or two. All of them are
for the same card, so they share the error of its rates: which of two sets is faster is known better than their times.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.step_time import ends
from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.common.names import hint, nearest
from cria_tricks.common.units import between, human
from cria_tricks.data.lengths import Lengths, as_long_as, full
from cria_tricks.hardware.trust import MARGIN
from cria_tricks.predict.toggle_values import choices
from cria_tricks.predict.toggles import LONGEST, Target, longest
from cria_tricks.recipe import Recipe

AIMS = ("fastest", "smallest", "longest")
"""What can be wanted: the least time, the fewest bytes, or the longest rows."""

EXACT = (
    "expand_kv", "chunked_loss", "activation_offload", "keep_attention", "paged_optimizer", "optimizer_in_backward",
)  # fmt: skip
"""Toggles that are on or off and change no result beyond rounding. Checkpointing and micro-batches are tried, too."""

LONG = (*EXACT, "tiled_mlp")
"""The same for rows longer than a tile. No GPU has run it, so a run that goes on with less memory does not try it."""

FREE = ("fused_lora", "fused_blocks")
"""Toggles of the same kind that cost nothing by the estimate, so they are switched on wherever they have an effect. A
run that goes on with less memory does not switch them on by itself, because no GPU has run them yet."""

ALLOWED = ("precision", "quantization", "double_quantization", "lean_preparation", "optimizer", "packing", "compile")
"""Toggles that ``may_change`` may name: they change numbers, or, like packing, how many documents a step sees."""
NEAREST = "nearest"
"""The aim of :func:`smaller` where no speed is known: the fewest changes, then the fewest recomputed blocks."""
SAFER = 0.85
"""The share of the card's memory that the safer alternative needs at most."""
MOST_SPLITS = 64
"""The largest micro-batch that is tried [rows]."""


@dataclass(frozen=True)
class Choice:
    """A recipe that fits, and what it costs.

    Attributes:
        set: what differs from the wanted recipe, as ``--set`` takes it.
        recipe: the whole recipe.
        memory: its memory bill.
        seconds: the estimated time of an optimizer step, the middle of its range [s]; 0 if the speed is not known.
        spread: the high end of this range divided by the low end [ratio].
        tokens: the longest row that fits [tokens]; only if that was the aim.
    """

    set: tuple[str, ...]
    recipe: Recipe
    memory: Bill
    seconds: float
    spread: float = 1.0
    tokens: int = 0

    @property
    def range(self) -> tuple[float, float]:
        """The low and the high end of the time of a step [s]."""
        return ends(self.seconds, self.spread)


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        aim: one of :data:`AIMS`.
        chosen: the best set that fits.
        runner_up: the next best with another time or another size; ``None`` if there is none.
        safer: the best set that needs at most :data:`SAFER` of the card; ``None`` if the chosen one does.
        tried: how many sets were compared.
    """

    aim: str
    chosen: Choice
    runner_up: Choice | None
    safer: Choice | None
    tried: int


def search(target: Target, recipe: Recipe, aim: str, lengths: Lengths, may_change: Iterable[str] = ()) -> Found:
    """Find the best set of toggles for a recipe that fits with a margin.

    Args:
        target: the model and the card.
        recipe: what is wanted.
        aim: one of :data:`AIMS`.
        lengths: the lengths of the rows.
        may_change: names of :data:`ALLOWED` that may change, too.

    Raises:
        BadInput: for an unknown aim or name, or for ``fastest`` if the card's speed is not known.
        OutOfMemory: if no set fits.
    """
    may_change = tuple(may_change)
    _refuse_unknown(target, aim, may_change)
    exact = LONG if aim == "longest" or recipe.data.max_length > target.shape.width else EXACT
    candidates = [_with_free(target, one) for one in _candidates(target, recipe, exact, may_change)]
    wanted = Wanted(target, recipe, aim, lengths, (1 - MARGIN) * target.device.memory_bytes)
    found = wanted.choices(candidates)
    if not found:
        raise OutOfMemory(_nothing_fits(target, recipe, candidates))
    chosen = found[0]
    runner_up = next((one for one in found if wanted.order(one)[0] != wanted.order(chosen)[0]), None)
    safer = None
    if aim == "fastest" and chosen.memory.needed_bytes > (limit := SAFER * target.device.memory_bytes):
        safer = next(iter(replace(wanted, limit=limit).choices(candidates)), None)
    return Found(aim, chosen, runner_up, safer, len(candidates))


def smaller(
    target: Target, recipe: Recipe, lengths: Lengths, limit: float, allowed: Callable[[Recipe], bool], aim: str = ""
) -> Choice | None:
    """Find the set with which a run goes on with less memory: the fastest, or the nearest where no speed is known.

    Args:
        target: the model and the machine.
        recipe: the set that ran out of memory.
        lengths: the lengths of the rows.
        limit: what the set may need at most [bytes].
        allowed: whether the run can go on with a set.
        aim: one of :data:`AIMS`, or :data:`NEAREST`; when left out, as above.

    Returns:
        The choice; ``None`` if no set needs so little.
    """
    limit = min(limit, (1 - MARGIN) * target.device.memory_bytes)
    wanted = Wanted(target, recipe, aim or ("fastest" if target.card else NEAREST), lengths, limit)
    return next(iter(wanted.choices(filter(allowed, _candidates(target, recipe, EXACT, ())))), None)


def _refuse_unknown(target: Target, aim: str, may_change: tuple[str, ...]) -> None:
    for option, name, known in (("--fit", aim, AIMS), *(("--may-change", one, ALLOWED) for one in may_change)):
        if name not in known:
            there_are = f"there are {', '.join(known)}"
            raise BadInput(f"{option} {name}: {hint(nearest(name, known), there_are)}")
    if target.card is None and aim == "fastest":
        raise BadInput(
            f"--fit {aim}: the speed of {target.device.name} is not known, so it cannot be said which set is faster; "
            "--fit smallest and --fit longest compare bytes alone"
        )


def _candidates(target: Target, recipe: Recipe, exact: Iterable[str], may_change: Iterable[str]) -> Iterator[Recipe]:
    """Yield the recipe with each set of toggles (its own values, too) and each micro-batch, all blocks recomputed."""
    fields: dict[str, tuple[Any, ...]] = {n: tuple({False: 0, True: 0, getattr(recipe.tricks, n): 0}) for n in exact}
    attention = recipe.tricks.attention
    fields["attention"] = (attention, "sdpa") if attention == "eager" else (attention,)
    values = choices(recipe, target.device, target.shape.width) | {"packing": (False, True), "compile": (False, True)}
    fields |= {name: values[name] for name in may_change}
    batches = [rows for rows in _divisors(recipe.rows_per_step) if rows <= MOST_SPLITS]
    warned = len(target.resolve(recipe).warnings)
    for combination in itertools.product(*fields.values()):
        tricks = dict(zip(fields, combination, strict=True)) | {"gradient_checkpointing": True}
        one = _changed(recipe, tricks, recipe.train.batch_size)
        try:
            plan = target.resolve(one)
        except BadInput:
            continue
        if len(plan.warnings) > warned:
            continue  # one of the toggles would have no effect
        whole = [recipe.train.batch_size]  # with steps in the backward pass a step is one micro-batch
        for rows in whole if plan.optimizer.get("in_backward") else batches:
            yield _changed(one, {"gradient_accumulation": recipe.rows_per_step // rows}, rows)


def _with_free(target: Target, recipe: Recipe) -> Recipe:
    """Switch on the toggles of :data:`FREE` that work here and have an effect."""
    for name in FREE:
        more = _changed(recipe, {name: True}, recipe.train.batch_size)
        if target.works(more) and len(target.resolve(more).warnings) == len(target.resolve(recipe).warnings):
            recipe = more
    return recipe


@dataclass(frozen=True)
class Wanted:
    """What a search compares.

    Attributes:
        target: the model and the card.
        recipe: the recipe that is wanted.
        aim: one of :data:`AIMS`, or :data:`NEAREST`.
        lengths: the lengths of the rows.
        limit: what a choice may need at most [bytes].
    """

    target: Target
    recipe: Recipe
    aim: str
    lengths: Lengths
    limit: float

    def choices(self, candidates: Iterable[Recipe]) -> list[Choice]:
        """Return the best choice of each candidate that fits, the best of all first."""
        found = [choice for one in candidates if (choice := self._best_of(one))]
        return sorted(found, key=self.order)

    def order(self, choice: Choice) -> tuple[float, ...]:
        """Return a key: smaller is better; of equally good ones, what needs less, then what changes less."""
        needed = choice.memory.needed_bytes
        seconds = float(f"{choice.seconds:.3g}")  # less than a thousandth of the time is no reason to take more memory
        changes = len(choice.set)
        first = {
            "fastest": (seconds, needed),
            "smallest": (needed, seconds),
            "longest": (-choice.tokens, seconds),
            NEAREST: (changes, self._recomputed(choice.recipe), needed),
        }
        return (*first[self.aim], changes)

    def _recomputed(self, recipe: Recipe) -> int:
        """Return the number of blocks that are recomputed."""
        value = recipe.tricks.gradient_checkpointing
        return self.target.shape.layers if value is True else int(value)

    def _best_of(self, candidate: Recipe) -> Choice | None:
        """Return the best choice with these toggles, over all numbers of recomputed blocks; ``None`` if none fits."""
        blocks = self.target.shape.layers
        if not self._fits(candidate):
            return None
        if self.aim not in ("fastest", NEAREST):
            return self._choice(candidate)
        # The more blocks are recomputed, the fewer bytes and the more seconds: the smallest number that fits is best.
        # But what is nearest recomputes no fewer blocks than before, because that would be one more change.
        least, most = 0, blocks
        if self.aim == NEAREST:
            least = self._recomputed(self.recipe)
        while least < most:
            middle = (least + most) // 2
            if self._fits(_checkpointed(candidate, middle, blocks)):
                most = middle
            else:
                least = middle + 1
        best = _checkpointed(candidate, most, blocks)
        if not most and best.tricks.keep_attention:
            return None  # nothing is recomputed, so there is nothing to keep
        return self._choice(best) if self.target.works(best) else None

    def _fits(self, recipe: Recipe) -> bool:
        return self.target.memory(recipe).needed_bytes <= self.limit

    def _choice(self, best: Recipe) -> Choice:
        """Estimate a choice as a whole."""
        tokens = 0
        if self.aim == "longest":
            tokens = min(longest(self.target, best), self.target.shape.context or LONGEST)
            best = as_long_as(tokens, best)
        setting = self.target.bill(best)
        assert setting.seconds is not None or self.aim != "fastest"  # _refuse_unknown has seen to it
        mean = tokens or self.lengths.mean_of(best.train.batch_size)
        seconds = (setting.seconds or 0.0) * best.rows_per_step * mean
        return Choice(differences(self.recipe, best), best, setting.memory, seconds, setting.spread, tokens)


def as_data(found: Found) -> dict[str, Any]:
    """Return a result as the fields of :class:`cria_tricks.predict.answer.Fit`."""

    def choice(one: Choice | None) -> dict[str, Any] | None:
        if one is None:
            return None
        low, high = one.range
        known = {"seconds_per_step": one.seconds, "seconds_per_step_low": low, "seconds_per_step_high": high}
        times = known if one.seconds else dict.fromkeys(known)
        return {"set": list(one.set), "needed_bytes": one.memory.needed_bytes, **times}

    alternatives = {"runner_up": choice(found.runner_up), "safer": choice(found.safer)}
    return {"aim": found.aim, "tried": found.tried, "chosen": choice(found.chosen), **alternatives}


def in_words(found: Found) -> str:
    """Say in one line what was chosen, what it needs, and how long a step takes."""
    chosen = found.chosen
    changes = " ".join(chosen.set) or "the recipe as it is"
    needs = [f"needs {human(chosen.memory.needed_bytes)}"]
    if chosen.seconds:
        needs.append(f"{between(*chosen.range)} a step by estimate")
    return f"--fit {found.aim}: {changes} ({', '.join(needs)})"


def lengths_of(found: Found, lengths: Lengths) -> Lengths:
    """Return the lengths of rows in the micro-batches that were chosen."""
    if found.chosen.tokens:
        return full(found.chosen.recipe, "the longest that fit")
    mean = lengths.mean_of(found.chosen.recipe.train.batch_size)
    return replace(lengths, mean=mean)


def _nothing_fits(target: Target, recipe: Recipe, candidates: list[Recipe]) -> str:
    """Say by how much even the smallest set is too large."""
    smallest = min((target.memory(one).needed_bytes for one in candidates), default=0)
    has = human(target.device.memory_bytes)
    return (
        f"--fit: no set of toggles fits {target.device.name} with a margin: the smallest needs {human(smallest)} of "
        f"{has}; shorten data.max_length ({recipe.data.max_length}), or store the weights in fewer bits with "
        "--may-change quantization"
    )


def _checkpointed(recipe: Recipe, number: int, blocks: int) -> Recipe:
    """Return the recipe with so many of its blocks recomputed."""
    value = {0: False, blocks: True}.get(number, number)
    return _changed(recipe, {"gradient_checkpointing": value}, recipe.train.batch_size)


def _changed(recipe: Recipe, tricks: dict[str, Any], rows: int) -> Recipe:
    return recipe.model_copy(
        update={
            "tricks": recipe.tricks.model_copy(update=tricks),
            "train": recipe.train.model_copy(update={"batch_size": rows}),
        }
    )


def differences(recipe: Recipe, changed: Recipe) -> tuple[str, ...]:
    """Write what differs between two recipes in toggles and micro-batches, as ``--set`` takes it."""
    found = []
    if changed.data.max_length != recipe.data.max_length:
        found.append(f"data.max_length={changed.data.max_length}")
    if changed.train.batch_size != recipe.train.batch_size:
        found.append(f"train.batch_size={changed.train.batch_size}")
    for name in type(recipe.tricks).model_fields:
        value, before = getattr(changed.tricks, name), getattr(recipe.tricks, name)
        if (type(value), value) != (type(before), before):
            found.append(f"tricks.{name}={str(value).lower() if isinstance(value, bool) else value}")
    return tuple(found)


def _divisors(number: int) -> list[int]:
    """List the numbers that divide another."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})
