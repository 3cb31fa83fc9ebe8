"""What each toggle does to a bill: alone, removed, one after the other; what to flip when it does not fit.

Nothing is run here: a bill takes a millisecond, so all toggle sets can be tried.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cria_tricks.bill.bill import Bill
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware.cards import CARDS, Card
from cria_tricks.hardware.device import Device
from cria_tricks.load.refusals import facts_of, refuse
from cria_tricks.models.shape import Shape
from cria_tricks.parallel.strategies import traffic
from cria_tricks.predict.links import LINKS, compute_seconds, step_seconds
from cria_tricks.predict.per_process import per_process
from cria_tricks.predict.toggle_values import all_sets, choices
from cria_tricks.recipe import Recipe, Tricks
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan
from cria_tricks.tricks import lora
from cria_tricks.tricks.folds import estimate, step

LADDER = (
    "precision",
    "gradient_accumulation",
    "gradient_checkpointing",
    "activation_offload",
    "peft",
    "quantization",
    "double_quantization",
    "optimizer",
    "paged_optimizer",
    "attention",
    "expand_kv",
    "packing",
    "chunked_loss",
    "lean_preparation",
    "compile",
)
"""The fields of ``recipe.tricks`` in the order of the lessons; a field stands after those that it needs."""

NEEDS = {
    "expand_kv": ("attention",),
    "quantization": ("peft",),
    "double_quantization": ("peft", "quantization"),
    "lean_preparation": ("peft", "precision", "quantization"),
    "chunked_loss": ("peft",),
}
"""The toggles that each of these needs: without them it has nothing to act on."""

LONGEST = 2**20
"""The longest row that :func:`longest` looks at [tokens]."""


@dataclass(frozen=True)
class Setting:
    """A recipe with some toggles changed, and what it would cost.

    Attributes:
        set: the changed toggles, as ``--set`` takes them.
        recipe: the whole recipe with these changes.
        memory: its memory bill.
        seconds: the time of one token [s], by the card's rates; ``None`` for a card whose rates are not known.
    """

    set: tuple[str, ...]
    recipe: Recipe
    memory: Bill
    seconds: float | None


@dataclass(frozen=True)
class Change:
    """One toggle flipped.

    Attributes:
        set: the flipped toggle.
        beside: the toggles that it was tried over, or that had to go with it.
        before: the setting without it.
        after: the setting with it.
    """

    set: str
    beside: tuple[str, ...]
    before: Setting
    after: Setting

    @property
    def saved_bytes(self) -> int:
        """How much the toggle lowers the peak [bytes]; negative when it raises it."""
        return self.before.memory.peak_bytes - self.after.memory.peak_bytes

    @property
    def slowdown(self) -> float | None:
        """The time of a token with the toggle over that without it [ratio]."""
        if self.before.seconds is None or self.after.seconds is None:
            return None
        return self.after.seconds / self.before.seconds


@dataclass(frozen=True)
class Target:
    """A model on a card: what stays the same while toggles are tried.

    Attributes:
        shape: the model's shape.
        device: the card of each process.
        processes: the number of processes that share the run, by ``recipe.parallel.strategy``.
    """

    shape: Shape
    device: Device
    processes: int = 1

    @property
    def card(self) -> Card | None:
        """The card with its rates, if these are known."""
        for card in CARDS.values():
            if card.device == self.device:
                return card
        return None

    def bill(self, recipe: Recipe, *changed: str) -> Setting:
        """Estimate the bytes and the seconds of a recipe; of several processes the one that needs most."""
        return Setting(changed, recipe, self.memory(recipe), self._seconds_per_token(recipe))

    def memory(self, recipe: Recipe, tokens: int | None = None) -> Bill:
        """Estimate the bytes alone, for rows of ``tokens`` or of ``data.max_length`` tokens."""
        if self.processes == 1:
            return estimate(recipe, self.shape, self.device, tokens)
        strategy = recipe.parallel.strategy
        return per_process(recipe, self.shape, self.device, strategy, self.processes, tokens=tokens)

    def _seconds_per_token(self, recipe: Recipe) -> float | None:
        if self.card is None:
            return None
        work = step(recipe, self.shape, self.card)
        if self.processes == 1:
            return work.seconds / work.tokens
        return self._shared_step_seconds(recipe, self.card) / work.tokens

    def _shared_step_seconds(self, recipe: Recipe, card: Card) -> float:
        """Estimate the time of a step of several cards in one machine, joined by PCIe [s]."""
        strategy = recipe.parallel.strategy
        # PCIe 3.0 x16 carries 15.75 GB/s one way, 4.0 twice as much.
        link = LINKS["pcie3"] if card.link_rate < 20e9 else LINKS["pcie4"]
        calls = traffic(recipe, self.shape, self.processes)
        compute = compute_seconds(recipe, self.shape, card, strategy, self.processes)
        return step_seconds(compute, calls, link).seconds

    def resolve(self, recipe: Recipe) -> Plan:
        """Fold a recipe over the tricks, and check the plan against the model.

        Raises:
            BadInput: for what cannot work on this card or with this model, or has no estimate.
        """
        plan = resolve(recipe, self.device, self.processes)
        refuse(plan, facts_of(self.shape), self.processes)
        lora.refuse_unestimated(recipe, self.shape)
        return plan

    def works(self, recipe: Recipe) -> bool:
        """Whether no toggle is refused."""
        try:
            self.resolve(recipe)
        except BadInput:
            return False
        return True


def switched_on(recipe: Recipe) -> list[str]:
    """Name the fields that differ from plain fp32 full fine-tuning, in the ladder's order."""
    plain = Tricks()
    return [field for field in LADDER if getattr(recipe.tricks, field) != getattr(plain, field)]


def with_only(recipe: Recipe, fields: Iterable[str]) -> Recipe:
    """Keep these toggles of a recipe as they are, and switch all others off."""
    kept = {field: getattr(recipe.tricks, field) for field in fields}
    return _with(recipe, {**Tricks().model_dump(), **kept})


def alone(target: Target, recipe: Recipe) -> list[Change]:
    """Try each toggle over nothing but the toggles that it needs."""
    on = switched_on(recipe)
    found = []
    for field in on:
        needed = [other for other in NEEDS.get(field, ()) if other in on]
        before = with_only(recipe, needed)
        after = with_only(recipe, [*needed, field])
        if target.works(after):
            beside = tuple(named(recipe, other) for other in needed)
            found.append(Change(named(recipe, field), beside, target.bill(before), target.bill(after)))
    return found


def removed(target: Target, recipe: Recipe) -> list[Change]:
    """Take each toggle away from the whole recipe, with those that cannot do without it."""
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


def without(recipe: Recipe, field: str) -> list[str]:
    """Name the fields that stay on when one is taken away: all but those that cannot do without it."""
    return [other for other in switched_on(recipe) if other != field and field not in NEEDS.get(other, ())]


def ladder(target: Target, recipe: Recipe) -> list[Setting]:
    """Add one toggle after the other, from plain fp32 full fine-tuning to the recipe."""
    rungs = [target.bill(with_only(recipe, []), "plain fp32, everything trained")]
    so_far: list[str] = []
    for field in switched_on(recipe):
        so_far.append(field)
        rungs.append(target.bill(with_only(recipe, so_far), named(recipe, field)))
    return rungs


def suggestions(target: Target, recipe: Recipe) -> list[Change]:
    """Find the single toggles that would save something here, the smallest slowdown first.

    Raises:
        BadInput: if the recipe itself is refused.
    """
    before = target.bill(recipe)
    warned = target.resolve(recipe).warnings
    helpful = []
    for field, changed in _single_changes(target, recipe):
        if len(target.resolve(changed).warnings) > len(warned):
            continue  # the new warning says that the toggle would have no effect
        after = target.bill(changed, f"tricks.{named(changed, field)}")
        change = Change(after.set[0], (), before, after)
        if change.saved_bytes > 0:
            helpful.append(change)
    return sorted(helpful, key=lambda change: (round(change.slowdown or 1, 2), -change.saved_bytes))


def _single_changes(target: Target, recipe: Recipe) -> Iterator[tuple[str, Recipe]]:
    """Flip one toggle at a time; give its field and the changed recipe, where that is not refused."""
    for field, values in choices(recipe, target.device).items():
        for value in values:
            changed = _with(recipe, {field: value})
            if value != getattr(recipe.tricks, field) and target.works(changed):
                yield field, changed


def in_words(target: Target, recipe: Recipe) -> str:
    """Say in one line which toggles would save more than a hundredth of the peak."""
    before = target.bill(recipe).memory.peak_bytes
    found = [change for change in suggestions(target, recipe) if change.saved_bytes > before / 100]
    if not found:
        return "no toggle that works here would save a hundredth of it: shorten data.max_length"
    said = (f"{change.set} saves {human(change.saved_bytes)}{_at_the_cost(change)}" for change in found)
    return f"of an estimated {human(before)}, " + ", ".join(said)


def _at_the_cost(change: Change) -> str:
    if change.slowdown is None or abs(change.slowdown - 1) < 0.005:
        return ""
    return f" (time x {change.slowdown:.2f})"


def front(target: Target, recipe: Recipe) -> list[Setting]:
    """Find the toggle sets that no other set beats in both bytes and time, the fastest first.

    ``peft``, ``packing`` and ``gradient_accumulation`` stay as they are, because they change what is learnt, or from
    how much.
    """
    # Many sets cost exactly the same. Of these the one with the fewest changes is the answer.
    shortest: dict[tuple[float, int], Setting] = {}
    for tricks in all_sets(recipe, target.device):
        changed = _with(recipe, tricks)
        if not target.works(changed):
            continue
        changes = [f"tricks.{named(changed, field)}" for field in _differing(recipe, changed)]
        setting = target.bill(changed, *changes)
        cost = (setting.seconds or 0.0, setting.memory.needed_bytes)
        if cost not in shortest or len(setting.set) < len(shortest[cost].set):
            shortest[cost] = setting
    # From the fastest to the slowest, a set is worth its time only if it needs less than every faster one.
    best: list[Setting] = []
    for cost in sorted(shortest):
        setting = shortest[cost]
        if not best or setting.memory.needed_bytes < best[-1].memory.needed_bytes:
            best.append(setting)
    return best


def longest(target: Target, recipe: Recipe) -> int:
    """Find the longest row that fits, by bisection [tokens]; 0 when not even one token does."""
    fits = 0
    most = LONGEST
    while fits < most:
        middle = (fits + most + 1) // 2  # rounded up, so that the interval always shrinks
        if target.memory(recipe, middle).fits:
            fits = middle
        else:
            most = middle - 1
    return fits


def _with(recipe: Recipe, tricks: dict[str, Any]) -> Recipe:
    return recipe.model_copy(update={"tricks": recipe.tricks.model_copy(update=tricks)})


def named(recipe: Recipe, field: str) -> str:
    """Write a toggle as ``--set`` takes it, but for its ``tricks.``: ``peft=lora``."""
    value = getattr(recipe.tricks, field)
    if isinstance(value, bool):
        value = str(value).lower()
    return f"{field}={value}"


def _differing(recipe: Recipe, changed: Recipe) -> list[str]:
    return [field for field in LADDER if getattr(recipe.tricks, field) != getattr(changed.tricks, field)]
