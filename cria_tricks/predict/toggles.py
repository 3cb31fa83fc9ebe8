"""Compare switches on paper: each alone, each removed, one after the other; and suggest some if a recipe does not fit.

Nothing is trained or loaded. One estimate takes a millisecond, so all sets of switches can be tried.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cria_tricks import recipes
from cria_tricks.bill.bill import Bill
from cria_tricks.bill.step import Step
from cria_tricks.bill.step_time import time_of
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human, speed
from cria_tricks.hardware.cards import Card, Host
from cria_tricks.hardware.device import T4, Device
from cria_tricks.hardware.gpus import rates_of
from cria_tricks.load.refusals import refuse
from cria_tricks.models.shape import Shape, facts_of, find_shape
from cria_tricks.parallel.strategies import traffic
from cria_tricks.predict.evaluation import AS_LONG_AS_ALLOWED, Evaluated, with_evaluation
from cria_tricks.predict.links import LINKS, compute_seconds, step_seconds
from cria_tricks.predict.per_process import per_process
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve
from cria_tricks.settings import Tricks
from cria_tricks.step_plan import Plan
from cria_tricks.switches import FIELDS, as_switch, lora, needed
from cria_tricks.switches.folds import estimate, for_shape


def choices(recipe: Recipe, device: Device, width: int) -> dict[str, tuple[Any, ...]]:
    """List the values to try for switches that change how a step is computed, by field.

    Args:
        recipe: what would be trained.
        device: the machine.
        width: D, the width of the model.
    """
    found = {}
    for name, field in FIELDS.items():
        if field.values:
            found[name] = field.values(recipe, device, width) if callable(field.values) else field.values
    return found


def all_sets(recipe: Recipe, device: Device, width: int) -> Iterator[dict[str, Any]]:
    """Yield all combinations of these values in which each switch has what it needs.

    Some of them have no effect on this device all the same, or are refused; the caller checks that.
    """
    fields = choices(recipe, device, width)
    half = device.half_precision
    for values in itertools.product(*fields.values()):
        tricks = dict(zip(fields, values, strict=True))
        # What is not among the fields, such as peft, stays as the recipe has it.
        has = {name: as_switch(name, value) for name, value in tricks.items()}
        needs = (need for switch in has.values() for need in needed(switch))
        if all(name not in has or has[name] == f"{name}={value.format(half=half)}" for name, value in needs):
            yield tricks


LONGEST = 2**20
"""The longest row that :func:`longest` tries [tokens]: four times the longest context in ``models/catalogue.py``."""


@dataclass(frozen=True)
class Setting:
    """A recipe with some switches changed, and what it would cost.

    Attributes:
        set: the changed switches, as ``--set`` takes them.
        recipe: the whole recipe with these changes.
        memory: its memory bill.
        seconds: the estimated time of one token, the middle of its range [s]; ``None`` for a card whose rates are not
            known.
        spread: the high end of this range divided by the low end [ratio].
        by: what backs this range, as :meth:`Card.basis` says; empty for a card whose rates are not known.
    """

    set: tuple[str, ...]
    recipe: Recipe
    memory: Bill
    seconds: float | None
    spread: float = 1.0
    by: str = ""


@dataclass(frozen=True)
class Change:
    """What one switch changes.

    Attributes:
        set: the switch.
        beside: in :func:`alone`, the other switches that were on, because this one needs them; in :func:`removed`, the
            switches that were removed together with this one, because they need it.
        before: the setting without the switch.
        after: the setting with the switch.
    """

    set: str
    beside: tuple[str, ...]
    before: Setting
    after: Setting

    @property
    def saved_bytes(self) -> int:
        """How much the switch lowers the peak [bytes]; negative when it raises it."""
        return self.before.memory.peak_bytes - self.after.memory.peak_bytes

    @property
    def slowdown(self) -> float | None:
        """The time of a token with the switch, divided by the time without it [ratio]; ``None`` if not known."""
        if self.before.seconds is None or self.after.seconds is None:
            return None
        return self.after.seconds / self.before.seconds


@dataclass(frozen=True)
class Target:
    """The model and the hardware, which stay the same while switches are tried.

    Attributes:
        shape: the model's shape.
        device: the card of each process.
        processes: the number of processes that share the run, by ``recipe.parallel.strategy``.
        host: the machine around the card; ``None`` if it is not known.
        evaluated: the evaluation rows; as long as ``data.max_length`` when left out.
    """

    shape: Shape
    device: Device
    processes: int = 1
    host: Host | None = None
    evaluated: Evaluated = AS_LONG_AS_ALLOWED

    @property
    def card(self) -> Card | None:
        """The card with its peak rates; ``None`` if these are not known."""
        return rates_of(self.device)

    def bill(self, recipe: Recipe, *changed: str) -> Setting:
        """Estimate the bytes and the seconds of a recipe; with several processes, the bytes of the one that needs most.

        Args:
            recipe: the recipe.
            changed: the switches that were changed in it, for ``Setting.set``.
        """
        card = self.card
        if card is None:
            return Setting(changed, recipe, self.memory(recipe), None)
        precision = recipe.tricks.precision
        memory = self.memory(recipe)
        seconds = self._seconds_per_token(recipe, memory.step, card)
        return Setting(changed, recipe, memory, seconds, card.spread(precision), card.basis(precision))

    def memory(self, recipe: Recipe, tokens: int | None = None, trained_tokens: int | None = None) -> Bill:
        """Estimate the bytes only: of a training step and of an evaluation.

        Args:
            recipe: the recipe.
            tokens: the length of all rows; when left out, ``data.max_length`` and what ``evaluated`` says.
            trained_tokens: the trained tokens of a micro-batch; when left out, all but the first token of each row.
        """
        if self.processes == 1:
            bill = estimate(recipe, self.shape, self.device, tokens, trained_tokens)
            return with_evaluation(bill, recipe, self.evaluated, tokens)
        return per_process(
            recipe,
            self.shape,
            self.device,
            recipe.parallel.strategy,
            self.processes,
            tokens=tokens,
            trained_tokens=trained_tokens,
            evaluated=self.evaluated,
        )

    def _seconds_per_token(self, recipe: Recipe, step: Step, card: Card) -> float:
        """Estimate the time of a step, divided by all its tokens [s]; ``step`` is the one of a single process."""
        if self.processes == 1:
            return time_of(step, card).seconds / step.step_tokens
        tokens = recipe.rows_per_step * recipe.data.max_length
        return self._shared_step_seconds(recipe, card) / tokens

    def _shared_step_seconds(self, recipe: Recipe, card: Card) -> float:
        """Estimate the time of a step of several cards in one machine, joined by PCIe [s]."""
        strategy = recipe.parallel.strategy
        # PCIe 3.0 x16 carries 15.75 GB/s in one direction, 4.0 twice as much; 20 GB/s lies between the two.
        link = LINKS["pcie3"] if card.link_rate < 20e9 else LINKS["pcie4"]
        calls = traffic(recipe, self.shape, self.processes)
        compute = compute_seconds(recipe, self.shape, card, strategy, self.processes)
        return step_seconds(compute, calls, link).seconds

    def resolve(self, recipe: Recipe) -> Plan:
        """Make the plan of a recipe, and check it against the model.

        Raises:
            BadInput: for a setting that cannot work on this card or with this model, or that has no estimate.
        """
        plan = resolve(recipe, self.device, self.processes)
        refuse(plan, facts_of(self.shape), self.processes)
        lora.refuse_unestimated(recipe, self.shape)
        return for_shape(plan, recipe, self.shape)

    def works(self, recipe: Recipe) -> bool:
        """Whether the recipe works here, that is, whether :meth:`resolve` refuses nothing."""
        try:
            self.resolve(recipe)
        except BadInput:
            return False
        return True


def switched_on(recipe: Recipe) -> list[str]:
    """List the fields that differ from plain fp32 full fine-tuning, in the order of the lessons."""
    plain = Tricks()
    return [field for field in FIELDS if getattr(recipe.tricks, field) != getattr(plain, field)]


def with_only(recipe: Recipe, fields: Iterable[str]) -> Recipe:
    """Return a recipe with these switches as they are, and all others off."""
    kept = {field: getattr(recipe.tricks, field) for field in fields}
    return with_toggles(recipe, {**Tricks().model_dump(), **kept})


def alone(target: Target, recipe: Recipe) -> list[Change]:
    """Compare each switch alone: with it and without it, where only the switches that it needs are on as well."""
    on = switched_on(recipe)
    found = []
    for field in on:
        over = [other for other in needs(recipe, field) if other in on]
        before = with_only(recipe, over)
        after = with_only(recipe, [*over, field])
        if target.works(after):
            beside = tuple(named(recipe, other) for other in over)
            found.append(Change(named(recipe, field), beside, target.bill(before), target.bill(after)))
    return found


def removed(target: Target, recipe: Recipe) -> list[Change]:
    """Compare the whole recipe with the recipe without each switch, and without the switches that need it."""
    on = switched_on(recipe)
    whole = target.bill(recipe)
    found = []
    for field in on:
        stays = without(recipe, field)
        less = with_only(recipe, stays)
        if target.works(less):
            beside = tuple(named(recipe, other) for other in on if other not in (*stays, field))
            found.append(Change(named(recipe, field), beside, target.bill(less), whole))
    return found


def off_the_capstone() -> dict[str, int]:
    """Return how much each switch of the capstone, the course's run on a T4, takes off its peak [bytes].

    Each is switched off alone, together with the switches that need it; a switch that adds bytes has a negative number.

    Returns:
        Setting, e.g. ``"quantization=nf4"``, -> bytes. Settings that the capstone does not use are left out.
    """
    capstone = recipes.capstone(T4)
    target = Target(find_shape(capstone.model), T4)
    return {change.set: change.saved_bytes for change in removed(target, capstone)}


def needs(recipe: Recipe, field: str) -> list[str]:
    """List the fields that a switch of the recipe needs."""
    return [other for other, _ in needed(named(recipe, field))]


def without(recipe: Recipe, field: str) -> list[str]:
    """List the fields that stay on when ``field`` is switched off: all but the switches that need it."""
    return [other for other in switched_on(recipe) if other != field and field not in needs(recipe, other)]


def ladder(target: Target, recipe: Recipe) -> list[Setting]:
    """Estimate a series of settings, from plain fp32 full fine-tuning to the recipe, each with one more switch on."""
    ladder_steps = [target.bill(with_only(recipe, []), "plain fp32, everything trained")]
    so_far: list[str] = []
    for field in switched_on(recipe):
        so_far.append(field)
        ladder_steps.append(target.bill(with_only(recipe, so_far), named(recipe, field)))
    return ladder_steps


def suggestions(target: Target, recipe: Recipe) -> list[Change]:
    """Find the single switches that would lower the peak here, the smallest slowdown first.

    Raises:
        BadInput: if the recipe itself is refused.
    """
    before = target.bill(recipe)
    fields = choices(recipe, target.device, target.shape.width)
    single = ({field: value} for field, values in fields.items() for value in values)
    helpful = []
    for changed, _ in with_effect(target, recipe, single):
        differing = _differing(recipe, changed)
        if not differing:
            continue
        (field,) = differing
        after = target.bill(changed, f"tricks.{named(changed, field)}")
        change = Change(after.set[0], (), before, after)
        if change.saved_bytes > 0:
            helpful.append(change)
    # Among equal slowdowns, to a hundredth, the one that saves most comes first.
    return sorted(helpful, key=lambda change: (round(change.slowdown or 1, 2), -change.saved_bytes))


def with_effect(target: Target, recipe: Recipe, sets: Iterable[dict[str, Any]]) -> Iterator[tuple[Recipe, Plan]]:
    """Yield each changed recipe, with its plan, that works here and has no more warnings than the recipe itself.

    A new warning says that a switch would have no effect, or less than it should.

    Args:
        target: the model and the hardware.
        recipe: the recipe.
        sets: for each set, the fields of ``tricks`` with their values.

    Raises:
        BadInput: if the recipe itself is refused.
    """
    warned = len(target.resolve(recipe).warnings)
    for tricks in sets:
        changed = with_toggles(recipe, tricks)
        try:
            plan = target.resolve(changed)
        except BadInput:
            continue
        if len(plan.warnings) <= warned:
            yield changed, plan


def in_words(target: Target, recipe: Recipe) -> str:
    """Say in one line which switches would lower the peak by more than a hundredth."""
    before = target.bill(recipe).memory.peak_bytes
    found = [change for change in suggestions(target, recipe) if change.saved_bytes > before / 100]
    if not found:
        return "no switch that works here would save a hundredth of it: shorten data.max_length"
    said = (f"{change.set} saves {human(change.saved_bytes)}{_at_the_cost(change)}" for change in found)
    return f"of an estimated {human(before)}, " + ", ".join(said)


def _at_the_cost(change: Change) -> str:
    """Write what a switch costs or saves in time; nothing if it is as fast, or if that is not known."""
    said = speed(change.slowdown)
    return f" ({said})" if said not in ("", "as fast") else ""


def front(target: Target, recipe: Recipe) -> list[Setting]:
    """Find the switch sets that no other set beats in both bytes and time, the fastest first.

    ``peft``, ``packing`` and ``gradient_accumulation`` stay as they are, because they change what is learnt, or from
    how much. ``compile`` stays as it is, too, because the estimate does not know what it saves.
    """
    # Many sets cost exactly the same. Of these, only the one with the fewest changes is kept.
    shortest: dict[tuple[float, int], Setting] = {}
    for tricks in all_sets(recipe, target.device, target.shape.width):
        changed = with_toggles(recipe, tricks)
        if not target.works(changed):
            continue
        changes = [f"tricks.{named(changed, field)}" for field in _differing(recipe, changed)]
        setting = target.bill(changed, *changes)
        # needed_bytes and not the peak, because what the allocator reserves beside tensors decides whether a set fits.
        cost = (setting.seconds or 0.0, setting.memory.needed_bytes)
        if cost not in shortest or len(setting.set) < len(shortest[cost].set):
            shortest[cost] = setting
    # From the fastest to the slowest, a set is worth its time only if it needs fewer bytes than every faster one.
    best: list[Setting] = []
    for cost in sorted(shortest):
        setting = shortest[cost]
        if not best or setting.memory.needed_bytes < best[-1].memory.needed_bytes:
            best.append(setting)
    return best


def longest(target: Target, recipe: Recipe) -> int:
    """Find the longest row that fits the card with a margin [tokens]; 0 if not even one token fits."""
    return most_tokens(lambda tokens: target.memory(recipe, tokens).verdict == "fits")


def most_tokens(fits: Callable[[int], bool], most: int = LONGEST) -> int:
    """Find the longest row that fits, by bisection [tokens].

    Args:
        fits: tells whether a row of so many tokens fits; if it does, all shorter ones do.
        most: the longest row that is tried [tokens].
    """
    least = 0
    while least < most:
        middle = (least + most + 1) // 2  # rounded up, so that the interval always shrinks
        if fits(middle):
            least = middle
        else:
            most = middle - 1
    return least


def with_toggles(recipe: Recipe, tricks: dict[str, Any]) -> Recipe:
    """Return the recipe with these fields of ``tricks`` changed."""
    return recipe.model_copy(update={"tricks": recipe.tricks.model_copy(update=tricks)})


def named(recipe: Recipe, field: str) -> str:
    """Write a switch as ``--set`` takes it, but without the leading ``tricks.``: ``peft=lora``."""
    return as_switch(field, getattr(recipe.tricks, field))


def _differing(recipe: Recipe, changed: Recipe) -> list[str]:
    # By name, because in Python True == 1: all blocks checkpointed, and one block.
    return [field for field in FIELDS if named(recipe, field) != named(changed, field)]
