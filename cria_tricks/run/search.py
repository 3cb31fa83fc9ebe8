"""Search for the switches with which a recipe runs fastest, smallest, or with the longest rows, and still fits.

The recipe says what is learnt: the model, what trains, the formats, the rows of an optimizer step. All of that stays.
The search changes only switches whose results are the same, exactly or within rounding: which blocks are recomputed,
where activations and optimizer states wait, how attention and the loss are computed, and how the rows of a step are
divided into micro-batches. ``may_change`` allows it more.

Nothing is trained: each of the thousand sets that are compared is an estimate of a millisecond or two. All of them are
for the same card, so they share the error of its rates: which of two sets is faster is known better than their times.

Where no set of switches fits, it says what would: LoRA, 4-bit weights, weights on the host, or shorter rows.
"""

import itertools
import math
from collections.abc import Collection, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cria_tricks import recipes
from cria_tricks.bill.bill import Bill
from cria_tricks.bill.step_time import ends
from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.common.fields import hint, nearest
from cria_tricks.common.units import between, human
from cria_tricks.data.lengths import Lengths, as_long_as, full
from cria_tricks.hardware.trust import MARGIN, verdict
from cria_tricks.predict import model_settings, toggles
from cria_tricks.predict.answer import Fit, FitChoice
from cria_tricks.predict.host import host_bill, longest_on_host
from cria_tricks.predict.toggles import LONGEST, Setting, Target, choices, longest, with_effect, with_toggles
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import searched
from cria_tricks.technique import ON_OFF

SHORTEST = 64
"""Shorter rows than this are not offered [tokens]."""

FOUR_BITS = {"quantization": "nf4", "double_quantization": True}


@dataclass(frozen=True)
class Way:
    """What would fit, although it changes results, or what the host must hold.

    Attributes:
        kind: ``adapter``, ``weights``, ``host``, ``file`` or ``rows``: what changes.
        setting: the changed recipe with its bill; its ``set`` is all that changes, as ``--set`` takes it.
        host_bytes: what the host needs; 0 if it is not known.
    """

    kind: str
    setting: Setting
    host_bytes: int


class NothingFits(OutOfMemory):
    """No set of switches fits; the message says what else would.

    Args:
        target: the model and the hardware.
        recipe: what is wanted.
        smallest: the same with the set that needs least.
        tried: the number of sets.
    """

    def __init__(self, target: Target, recipe: Recipe, smallest: Recipe, tried: int):
        self.smallest = smallest
        self.needed = target.memory(smallest).needed_bytes
        self.tried = tried
        self.ways = tuple(ways(target, recipe, smallest))
        sets = [" ".join(f"--set {setting}" for setting in way.setting.set) for way in self.ways]
        others = f"this fits: {', or '.join(sets)}" if sets else "take a smaller model or a larger card"
        super().__init__(
            f"--fit: no set of switches fits {target.device.name} with a margin: the smallest needs "
            f"{human(self.needed)} of {human(target.device.memory_bytes)}; {others}"
        )


def ways(target: Target, recipe: Recipe, smallest: Recipe) -> Iterator[Way]:
    """Yield what would fit, the least change first: one way for the weights, one to stream them, and the longest rows.

    Args:
        target: the model and the hardware.
        recipe: what is wanted.
        smallest: the same with the set of switches that needs least.
    """
    tries: list[tuple[str, Recipe]] = []
    base = smallest
    if recipe.tricks.peft == "none":
        base = _with_adapter(target, recipe)
        tries = [("adapter", base)]
    elif recipe.tricks.quantization not in ("nf4", "fp4"):
        tries = [("weights", with_toggles(one, FOUR_BITS)) for one in (recipe, smallest)]
    yield from _first(target, recipe, tries)
    streamed = with_toggles(base, {"gradient_checkpointing": True})  # without which no block can be streamed
    places = {"host": True, "file": "file"}
    tries = [(place, with_toggles(streamed, {"stream_layers": value})) for place, value in places.items()]
    yield from _first(target, recipe, tries)
    rows = [_longest(target, with_toggles(smallest, {"activation_offload": on})) for on in (True, False)]
    rows.sort(key=lambda one: -one.data.max_length)
    yield from _first(target, recipe, [("rows", one) for one in rows if one.data.max_length >= SHORTEST])


def _longest(target: Target, recipe: Recipe) -> Recipe:
    """Return the recipe with the longest rows for which card and host have room."""
    tokens = toggles.longest(target, recipe) if target.works(recipe) else 0
    if target.host:
        tokens = longest_on_host(target, recipe, tokens)
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_length": tokens})})


def _with_adapter(target: Target, recipe: Recipe) -> Recipe:
    """Return the recipe with the switches of ``qlora``, and its learning rate, in place of training all weights."""
    usual = recipes.qlora(target.device)
    batch = {"gradient_accumulation": recipe.tricks.gradient_accumulation}
    train = recipe.train.model_copy(update={"learning_rate": usual.train.learning_rate})
    with_lora = recipe.model_copy(update={"tricks": usual.tricks.model_copy(update=batch), "train": train})
    needed = model_settings.needed(with_lora, target.shape)
    # Rows may be shorter than a recipe may ask for, so it is not built anew without need.
    return with_settings(with_lora, needed) if needed else with_lora


def _first(target: Target, recipe: Recipe, tries: Iterable[tuple[str, Recipe]]) -> Iterator[Way]:
    """Yield the first of several recipes that fits the card and the host."""
    for kind, changed in tries:
        if not target.works(changed):
            continue
        setting = target.bill(changed, *differences(recipe, changed))
        host = host_bill(target, changed)
        if setting.memory.verdict == "fits" and not (host and host.verdict == "does not fit"):
            yield Way(kind, setting, host.peak.bytes if host else 0)
            return


EXACT = searched("exact")
"""Switches that change no result beyond rounding. Checkpointing and micro-batches are tried, too."""

LONG = searched("exact", "long")
"""The same for rows longer than a tile."""

FREE = searched("free")
"""Switches of the same kind that cost nothing by the estimate, so they are switched on wherever they have an effect."""

ALLOWED = searched("may change")
"""Switches that ``may_change`` may name: they change numbers, or, like packing, how many documents a step sees."""

MOST_SPLITS = 64
"""The largest micro-batch that is tried [rows]."""


def candidates(
    target: Target, recipe: Recipe, exact: Iterable[str], may_change: Iterable[str], keep: Collection[str] = ()
) -> Iterator[Recipe]:
    """Yield the recipe with each set of switches (its own values, too) and each micro-batch, all blocks recomputed.

    Args:
        target: the model and the card.
        recipe: what is wanted.
        exact: the switches that are on or off.
        may_change: names of :data:`ALLOWED`.
        keep: fields of the recipe that stay as they are, such as ``tricks.attention``.
    """
    fields: dict[str, tuple[Any, ...]] = {n: tuple({False: 0, True: 0, getattr(recipe.tricks, n): 0}) for n in exact}
    attention = recipe.tricks.attention
    fields["attention"] = (attention, "sdpa") if attention == "eager" else (attention,)
    values = choices(recipe, target.device, target.shape.width)
    fields |= {name: values.get(name, ON_OFF) for name in may_change}
    fields = {name: values for name, values in fields.items() if f"tricks.{name}" not in keep}
    checkpointing: dict[str, Any] = {"gradient_checkpointing": True}
    if "tricks.gradient_checkpointing" in keep:
        checkpointing = {}
    batches = [rows for rows in _divisors(recipe.rows_per_step) if rows <= MOST_SPLITS]
    if {"train.batch_size", "tricks.gradient_accumulation"} & set(keep):
        batches = [recipe.train.batch_size]
    combinations = itertools.product(*fields.values())
    sets = (dict(zip(fields, one, strict=True)) | checkpointing for one in combinations)
    for one, plan in with_effect(target, recipe, sets):
        batch_sizes = batches
        if plan.optimizer.get("in_backward"):  # then a step is one micro-batch
            batch_sizes = [recipe.train.batch_size]
        for rows in batch_sizes:
            split = changed(one, {"gradient_accumulation": recipe.rows_per_step // rows}, rows)
            yield split
            # Offloaded activations of long rows need less of the card than the recomputation of a block, but more of
            # the host. So this is tried only where it is known what the host has.
            if target.host and checkpointing and one.tricks.activation_offload:
                kept = changed(split, {"gradient_checkpointing": False}, rows)
                if target.works(kept):
                    yield kept


def with_free(target: Target, recipe: Recipe, keep: Collection[str] = ()) -> Recipe:
    """Set the switches of :data:`FREE` that work here and have an effect, but for those in ``keep``."""
    if not target.works(recipe):  # such as a micro-batch that several processes cannot share
        return recipe
    for name in FREE:
        if f"tricks.{name}" in keep:
            continue
        for more, _ in with_effect(target, recipe, [{name: True}]):
            recipe = more
    return recipe


def checkpointed(recipe: Recipe, number: int, blocks: int) -> Recipe:
    """Return the recipe with so many of its blocks recomputed."""
    value = {0: False, blocks: True}.get(number, number)
    return changed(recipe, {"gradient_checkpointing": value}, recipe.train.batch_size)


def changed(recipe: Recipe, tricks: dict[str, Any], rows: int) -> Recipe:
    """Return the recipe with other switches, and ``rows`` rows in a micro-batch."""
    return recipe.model_copy(
        update={
            "tricks": recipe.tricks.model_copy(update=tricks),
            "train": recipe.train.model_copy(update={"batch_size": rows}),
        }
    )


def differences(recipe: Recipe, other: Recipe) -> tuple[str, ...]:
    """Write what differs between two recipes, as ``--set`` takes it."""
    before, after = recipe.model_dump(mode="json"), other.model_dump(mode="json")
    found = []
    for group in ("data", "train", "tricks", "lora"):
        for name, value in after[group].items():
            # By type, too, because in Python True == 1: all blocks checkpointed is not one block.
            if (type(value), value) != (type(before[group][name]), before[group][name]):
                found.append(f"{group}.{name}={_as_set(value)}")
    return tuple(found)


def _as_set(value: Any) -> str:
    """Write a value as ``--set`` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)


def _divisors(number: int) -> list[int]:
    """List the numbers that divide another."""
    small = [one for one in range(1, math.isqrt(number) + 1) if number % one == 0]
    return sorted({*small, *(number // one for one in small)})


NEAREST = "nearest"
"""An aim that needs no speeds: the fewest changes of the recipe, then the fewest recomputed blocks."""
AIMS = ("fastest", "smallest", "longest", NEAREST)
"""What can be wanted: the least time, the fewest bytes, the longest rows, or the fewest changes."""
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

    @property
    def for_plan(self) -> FitChoice:
        """This choice, as the answer of a plan shows it."""
        times = (self.seconds, *self.range) if self.seconds else (None, None, None)
        return FitChoice(list(self.set), self.memory.needed_bytes, *times)


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        aim: one of :data:`AIMS`.
        chosen: the best set that fits; of :func:`best_in_steps` the one that needs least, if none fits.
        runner_up: the next best with another time or another size; ``None`` if there is none.
        safer: the best set that needs at most :data:`SAFER` of the card; ``None`` if the chosen one does.
        tried: how many sets were compared.
        ways: what would fit otherwise, if ``chosen`` does not fit with a margin.
    """

    aim: str
    chosen: Choice
    runner_up: Choice | None
    safer: Choice | None
    tried: int
    ways: tuple[Way, ...] = ()

    @property
    def for_plan(self) -> Fit:
        """This result, as the answer of a plan shows it."""
        runner_up, safer = (one.for_plan if one else None for one in (self.runner_up, self.safer))
        return Fit(self.aim, self.tried, self.chosen.for_plan, runner_up, safer)


def search(
    target: Target,
    recipe: Recipe,
    aim: str,
    lengths: Lengths,
    may_change: Iterable[str] = (),
    keep: Collection[str] = (),
) -> Found:
    """Find the best set of switches for a recipe that fits with a margin.

    Args:
        target: the model and the hardware.
        recipe: what is wanted.
        aim: one of :data:`AIMS`.
        lengths: the lengths of the rows.
        may_change: names of :data:`ALLOWED` that may change, too.
        keep: fields of the recipe that stay as they are, because the user has set them.

    Raises:
        BadInput: for an unknown aim or name, or for ``fastest`` if the card's speed is not known.
        NothingFits: if no set fits.
    """
    found, sets = whole(in_steps(target, recipe, aim, lengths, may_change, keep))
    wanted = Wanted(target, recipe, aim, lengths, (1 - MARGIN) * target.device.memory_bytes, keep)
    chosen = found[0]
    runner_up = next((one for one in found if wanted.order(one)[0] != wanted.order(chosen)[0]), None)
    safer = None
    if aim == "fastest" and chosen.memory.needed_bytes > (limit := SAFER * target.device.memory_bytes):
        safer = next(iter(replace(wanted, limit=limit).choices(sets)), None)
    return Found(aim, chosen, runner_up, safer, len(sets))


def best_in_steps(target: Target, recipe: Recipe, lengths: Lengths, keep: Collection[str] = ()) -> Steps[Found]:
    """Find the set that ``cria plan`` answers for, if nobody asked for another: the fastest that fits.

    On a card whose speed is not known it is the set with the fewest changes. If no set fits with a margin, it is the
    one that needs least. More memory never makes this answer worse, because a set that fits a smaller card fits a
    larger one as well.

    Args:
        target: the model and the hardware.
        recipe: what is wanted.
        lengths: the lengths of the rows.
        keep: fields of the recipe that stay as they are, because the user has set them.
    """
    aim = "fastest" if target.card else NEAREST
    # Whether an unknown host has room for offloaded activations cannot be said, so they come second there.
    tries = [keep] if target.host else [{*keep, "tricks.activation_offload"}, keep]
    for stays in tries:
        try:
            found, sets = yield from in_steps(target, recipe, aim, lengths, (), stays)
            return Found(aim, found[0], None, None, len(sets))
        except NothingFits as error:
            nothing = error
    smallest = Wanted(target, recipe, "smallest", lengths, math.inf, keep).choice(nothing.smallest)
    return Found("smallest", smallest, None, None, nothing.tried, nothing.ways)


def in_steps(
    target: Target,
    recipe: Recipe,
    aim: str,
    lengths: Lengths,
    may_change: Iterable[str] = (),
    keep: Collection[str] = (),
) -> Steps[tuple[list[Choice], list[Recipe]]]:
    """Search as :func:`search` does, in steps, so that a caller can show how far it is, or stop.

    Returns:
        What fits, the best first; and all sets that were compared.
    """
    may_change = tuple(may_change)
    _refuse_unknown(target, aim, may_change)
    exact = LONG if aim == "longest" or recipe.data.max_length > target.shape.width else EXACT
    sets = []
    for one in candidates(target, recipe, exact, may_change, keep):
        yield 0, 0
        sets.append(one)
    wanted = Wanted(target, recipe, aim, lengths, (1 - MARGIN) * target.device.memory_bytes, keep)
    found: list[Choice] = []
    for free in (False, True) if aim == NEAREST else (True,):  # what is nearest switches nothing on without need
        for place, one in enumerate(sets):
            yield place + 1, len(sets)
            if free:
                sets[place] = with_free(target, one, keep)
            found += wanted.choices([sets[place]])
        if found:
            return sorted(found, key=wanted.order), sets
    smallest, least = recipe, (True, math.inf, math.inf)
    for one in sets:
        yield len(sets), len(sets)
        memory = target.memory(one)
        size = (not wanted.fits_host(one), memory.least_bytes, memory.needed_bytes)
        if size < least:
            smallest, least = one, size
    raise NothingFits(target, recipe, smallest, len(sets))


def whole(steps: Generator[Any, None, Result]) -> Result:
    """Do a search to its end."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result


def _refuse_unknown(target: Target, aim: str, may_change: tuple[str, ...]) -> None:
    for option, name, known in (("--fit", aim, AIMS), *(("--may-change", one, ALLOWED) for one in may_change)):
        if name not in known:
            there_are = f"there are {', '.join(known)}"
            raise BadInput(f"{option} {name}: {hint(nearest(name, known), there_are)}")
    if target.card is None and aim == "fastest":
        raise BadInput(
            f"--fit {aim}: the speed of {target.device.name} is not known, so it cannot be said which set is faster; "
            f"--fit {NEAREST} changes as little as possible, and --fit smallest and --fit longest compare bytes alone"
        )


@dataclass(frozen=True)
class Wanted:
    """What a search compares.

    Attributes:
        target: the model and the card.
        recipe: the recipe that is wanted.
        aim: one of :data:`AIMS`.
        lengths: the lengths of the rows.
        limit: what a choice may need at most [bytes].
        keep: fields of the recipe that stay as they are.
    """

    target: Target
    recipe: Recipe
    aim: str
    lengths: Lengths
    limit: float
    keep: Collection[str] = ()

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
        if not self._fits(candidate):
            return None
        searched = self.aim in ("fastest", NEAREST) and "tricks.gradient_checkpointing" not in self.keep
        searched = searched and candidate.tricks.gradient_checkpointing is True
        best = self._least_recomputed(candidate) if searched else candidate
        if not self.fits_host(best):
            best = candidate
        if not self.fits_host(best) or not self.target.works(best):
            return None
        if best.tricks.keep_attention and not self._recomputed(best):
            return None  # nothing is recomputed, so there is nothing to keep
        return self.choice(best)

    def _least_recomputed(self, candidate: Recipe) -> Recipe:
        """Return the candidate with the smallest number of recomputed blocks that fits.

        The more blocks are recomputed, the fewer bytes and the more seconds. But what is nearest recomputes no fewer
        blocks than before, because that would be one more change.
        """
        blocks = self.target.shape.layers
        least, most = 0, blocks
        if self.aim == NEAREST:
            least = self._recomputed(self.recipe)
        while least < most:
            middle = (least + most) // 2
            if self._fits(checkpointed(candidate, middle, blocks)):
                most = middle
            else:
                least = middle + 1
        return checkpointed(candidate, most, blocks)

    def fits_host(self, recipe: Recipe) -> bool:
        """Whether the host has room for what waits there in training; yes, if it is not known."""
        memory = host_bill(self.target, recipe) if self.target.host else None
        if memory is None or memory.host is None:
            return True
        return verdict(memory.moments[-1].bytes, memory.host.memory_bytes) != "does not fit"

    def _fits(self, recipe: Recipe) -> bool:
        return self.target.memory(recipe).needed_bytes <= self.limit

    def choice(self, best: Recipe) -> Choice:
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


def more_suggestions(target: Target, recipe: Recipe, lengths: Lengths, found: Found | None) -> list[Setting]:
    """Find what would fit where no single switch helps: several switches together, or else a change of results.

    Args:
        target: the model and the hardware.
        recipe: what does not fit.
        lengths: the lengths of the rows.
        found: the search that ended with this recipe, if there was one.
    """
    if found is not None:
        return [way.setting for way in found.ways]
    try:
        chosen = search(target, recipe, NEAREST, lengths).chosen
    except NothingFits as error:
        return [way.setting for way in error.ways]
    return [target.bill(chosen.recipe, *chosen.set)]


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
