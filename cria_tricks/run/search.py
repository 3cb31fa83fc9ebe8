"""Search for the switches with which a recipe runs fastest, smallest, or with the longest rows, and still fits.

The recipe says what is learnt: the model, what trains, the formats, the rows of an optimizer step. All of that stays.
The search changes only switches whose results are the same, exactly or within rounding: which blocks are recomputed,
where activations and optimizer states wait, how attention and the loss are computed, and how the rows of a step are
divided into micro-batches. ``may_change`` allows it more.

Nothing is trained: each of the thousand sets that are compared is an estimate of a millisecond or two. All of them are
for the same card, so they share the error of its rates: which of two sets is faster is known better than their times.
"""

import math
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.step_time import ends
from cria_tricks.common.errors import BadInput
from cria_tricks.common.names import hint, nearest
from cria_tricks.common.units import between, human
from cria_tricks.data.lengths import Lengths, as_long_as, full
from cria_tricks.hardware.trust import MARGIN
from cria_tricks.predict.toggles import LONGEST, Target, longest
from cria_tricks.recipe import Recipe
from cria_tricks.run.candidates import (
    ALLOWED,
    EXACT,
    LONG,
    NothingFits,
    candidates,
    checkpointed,
    differences,
    with_free,
)

AIMS = ("fastest", "smallest", "longest")
"""What can be wanted: the least time, the fewest bytes, or the longest rows."""

NEAREST = "nearest"
"""The aim of :func:`smaller` where no speed is known: the fewest changes, then the fewest recomputed blocks."""
SAFER = 0.85
"""The share of the card's memory that the safer alternative needs at most."""

Result = TypeVar("Result")
Steps = Generator[tuple[int, int], None, Result]
"""A search in steps. Each says how many sets were compared, and of how many; 0 and 0 while they are listed."""


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
    """Find the best set of switches for a recipe that fits with a margin.

    Args:
        target: the model and the card.
        recipe: what is wanted.
        aim: one of :data:`AIMS`.
        lengths: the lengths of the rows.
        may_change: names of :data:`ALLOWED` that may change, too.

    Raises:
        BadInput: for an unknown aim or name, or for ``fastest`` if the card's speed is not known.
        NothingFits: if no set fits.
    """
    found, sets = whole(in_steps(target, recipe, aim, lengths, may_change))
    wanted = Wanted(target, recipe, aim, lengths, (1 - MARGIN) * target.device.memory_bytes)
    chosen = found[0]
    runner_up = next((one for one in found if wanted.order(one)[0] != wanted.order(chosen)[0]), None)
    safer = None
    if aim == "fastest" and chosen.memory.needed_bytes > (limit := SAFER * target.device.memory_bytes):
        safer = next(iter(replace(wanted, limit=limit).choices(sets)), None)
    return Found(aim, chosen, runner_up, safer, len(sets))


def in_steps(
    target: Target, recipe: Recipe, aim: str, lengths: Lengths, may_change: Iterable[str] = ()
) -> Steps[tuple[list[Choice], list[Recipe]]]:
    """Search as :func:`search` does, in steps, so that a caller can show how far it is, or stop.

    Returns:
        What fits, the best first; and all sets that were compared.
    """
    may_change = tuple(may_change)
    _refuse_unknown(target, aim, may_change)
    exact = LONG if aim == "longest" or recipe.data.max_length > target.shape.width else EXACT
    sets = []
    for one in candidates(target, recipe, exact, may_change):
        yield 0, 0
        sets.append(one)
    wanted = Wanted(target, recipe, aim, lengths, (1 - MARGIN) * target.device.memory_bytes)
    found: list[Choice] = []
    for place, one in enumerate(sets):
        yield place + 1, len(sets)
        sets[place] = with_free(target, one)
        found += wanted.choices([sets[place]])
    if found:
        return sorted(found, key=wanted.order), sets
    smallest, needed = recipe, math.inf
    for one in sets:
        yield len(sets), len(sets)
        size = target.memory(one).needed_bytes
        if size < needed:
            smallest, needed = one, size
    raise NothingFits(target, smallest, int(needed))


def whole(steps: Generator[Any, None, Result]) -> Result:
    """Do a search to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def smaller(
    target: Target, recipe: Recipe, lengths: Lengths, limit: float, allowed: Callable[[Recipe], bool]
) -> Choice | None:
    """Find the set with which a run goes on with less memory: the fastest, or the nearest where no speed is known.

    Args:
        target: the model and the machine.
        recipe: the set that ran out of memory.
        lengths: the lengths of the rows.
        limit: what the set may need at most [bytes].
        allowed: whether the run can go on with a set.

    Returns:
        The choice; ``None`` if no set needs so little.
    """
    limit = min(limit, (1 - MARGIN) * target.device.memory_bytes)
    if target.card is None:
        return whole(nearest_in_steps(target, recipe, lengths, limit, allowed))
    wanted = Wanted(target, recipe, "fastest", lengths, limit)
    return next(iter(wanted.choices(filter(allowed, candidates(target, recipe, EXACT, ())))), None)


def nearest_in_steps(
    target: Target, recipe: Recipe, lengths: Lengths, limit: float, allowed: Callable[[Recipe], bool]
) -> Steps[Choice | None]:
    """Find the set with the fewest changes, then the fewest recomputed blocks, in steps.

    The arguments and what is returned are those of :func:`smaller`. Sets with few changes are tried first, and those
    with more are left out.
    """
    wanted = Wanted(target, recipe, NEAREST, lengths, limit)
    by_changes: dict[int, list[Recipe]] = {}
    for one in candidates(target, recipe, EXACT, ()):
        yield 0, 0
        changes = [change for change in differences(recipe, one) if "gradient_checkpointing" not in change]
        by_changes.setdefault(len(changes), []).append(one)
    every, tried = sum(map(len, by_changes.values())), 0
    found: list[Choice] = []
    for least in sorted(by_changes):
        if found and len(found[0].set) < least:
            break
        for one in by_changes[least]:
            tried += 1
            yield tried, every
            if allowed(one):
                found += wanted.choices([one])
        found.sort(key=wanted.order)
    return found[0] if found else None


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

    def choices(self, sets: Iterable[Recipe]) -> list[Choice]:
        """Return the best choice of each candidate that fits, the best of all first."""
        found = [choice for one in sets if (choice := self._best_of(one))]
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
        """Return the best choice with these switches, over all numbers of recomputed blocks; ``None`` if none fits."""
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
            if self._fits(checkpointed(candidate, middle, blocks)):
                most = middle
            else:
                least = middle + 1
        best = checkpointed(candidate, most, blocks)
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
