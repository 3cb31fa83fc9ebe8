"""What each toggle does to a bill: alone, removed, one after the other; what to flip when it does not fit.

Nothing is run here: a bill takes a millisecond, so all toggle sets can be tried.
"""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.step_time import step
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware.cards import CARDS, Card
from cria_tricks.hardware.device import Device
from cria_tricks.load.refusals import facts_of, refuse
from cria_tricks.models.shape import Shape
from cria_tricks.parallel.strategies import traffic
from cria_tricks.predict.links import LINKS, compute_seconds, step_seconds
from cria_tricks.predict.per_process import per_process
from cria_tricks.recipe import Recipe, Tricks
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan
from cria_tricks.tricks import lora
from cria_tricks.tricks.folds import estimate

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
"""The fields of ``recipe.tricks`` in the order of the lessons, in which each also finds what it needs."""

NEEDS = {
    "expand_kv": ("attention",),
    "quantization": ("peft",),
    "double_quantization": ("peft", "quantization"),
    "lean_preparation": ("peft", "precision", "quantization"),
    "chunked_loss": ("peft",),
}
"""What a toggle has nothing to act on without."""

LONGEST = 2**20
"""Tokens of a row beyond which nothing is searched."""


@dataclass(frozen=True)
class Setting:
    """A recipe with some toggles changed, and what it would cost.

    Attributes:
        set: what was changed, as ``--set`` takes it.
        recipe: the whole.
        memory: its bill.
        seconds: of a step for each token, by the card's rates; none for a card whose rates are not known.
    """

    set: tuple[str, ...]
    recipe: Recipe
    memory: Bill
    seconds: float | None


@dataclass(frozen=True)
class Change:
    """One toggle flipped.

    Attributes:
        set: what is flipped.
        beside: what it was tried over, or what went with it.
        before: without it.
        after: with it.
    """

    set: str
    beside: tuple[str, ...]
    before: Setting
    after: Setting

    @property
    def saved_bytes(self) -> int:
        """Of the peak; less than nothing when it costs."""
        return self.before.memory.peak_bytes - self.after.memory.peak_bytes

    @property
    def slowdown(self) -> float | None:
        """Time of a token with it to that without."""
        if self.before.seconds is None or self.after.seconds is None:
            return None
        return self.after.seconds / self.before.seconds


@dataclass(frozen=True)
class Bench:
    """What stays the same while toggles are tried.

    Attributes:
        shape: of the model.
        device: that it would run on, in each process.
        processes: that share the run, by ``recipe.parallel.strategy``.
    """

    shape: Shape
    device: Device
    processes: int = 1

    @property
    def card(self) -> Card | None:
        """The device's rates, if they are known."""
        return next((card for card in CARDS.values() if card.device == self.device), None)

    def bill(self, recipe: Recipe, *changed: str) -> Setting:
        """What a recipe costs; in one of several processes the one that needs most."""
        seconds = None
        if self.card:
            work = step(recipe, self.shape, self.card)
            seconds = (work.seconds if self.processes == 1 else self._shared(recipe, self.card)) / work.tokens
        return Setting(changed, recipe, self.memory(recipe), seconds)

    def memory(self, recipe: Recipe, tokens: int | None = None) -> Bill:
        """The bytes alone, for rows of this length or of ``data.max_length``."""
        if self.processes == 1:
            return estimate(recipe, self.shape, self.device, tokens)
        strategy = recipe.parallel.strategy
        return per_process(recipe, self.shape, self.device, strategy, self.processes, tokens=tokens)

    def _shared(self, recipe: Recipe, card: Card) -> float:
        """Seconds of a step of several cards in one machine, joined by PCIe."""
        strategy, link = recipe.parallel.strategy, LINKS["pcie3" if card.link_rate < 20e9 else "pcie4"]
        calls = traffic(recipe, self.shape, self.processes)
        return step_seconds(compute_seconds(recipe, self.shape, card, strategy, self.processes), calls, link).seconds

    def resolve(self, recipe: Recipe) -> Plan:
        """Fold a recipe over the tricks, and hold what would run against the model.

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
    """The fields that differ from plain fp32 full fine-tuning, in the ladder's order."""
    plain = Tricks()
    return [field for field in LADDER if getattr(recipe.tricks, field) != getattr(plain, field)]


def with_only(recipe: Recipe, fields: Iterable[str]) -> Recipe:
    """A recipe with these toggles as they are and all others off."""
    return _with(recipe, {**Tricks().model_dump(), **{field: getattr(recipe.tricks, field) for field in fields}})


def alone(bench: Bench, recipe: Recipe) -> list[Change]:
    """Each toggle over nothing but what it needs."""
    on, found = switched_on(recipe), []
    for field in on:
        needed = [other for other in NEEDS.get(field, ()) if other in on]
        before, after = with_only(recipe, needed), with_only(recipe, [*needed, field])
        if bench.works(after):
            beside = tuple(named(recipe, other) for other in needed)
            found.append(Change(named(recipe, field), beside, bench.bill(before), bench.bill(after)))
    return found


def removed(bench: Bench, recipe: Recipe) -> list[Change]:
    """Each toggle taken away from the whole, with those that cannot do without it."""
    on, found, whole = switched_on(recipe), [], bench.bill(recipe)
    for field in on:
        stays = without(recipe, field)
        less = with_only(recipe, stays)
        if bench.works(less):
            beside = tuple(named(recipe, other) for other in on if other not in (*stays, field))
            found.append(Change(named(recipe, field), beside, bench.bill(less), whole))
    return found


def without(recipe: Recipe, field: str) -> list[str]:
    """The fields that stay on when one is taken away: all but those that cannot do without it."""
    return [other for other in switched_on(recipe) if other != field and field not in NEEDS.get(other, ())]


def ladder(bench: Bench, recipe: Recipe) -> list[Setting]:
    """One toggle after the other, from plain fp32 full fine-tuning to the recipe."""
    on = switched_on(recipe)
    rungs = [bench.bill(with_only(recipe, []), "plain fp32, everything trained")]
    return rungs + [bench.bill(with_only(recipe, on[: i + 1]), named(recipe, field)) for i, field in enumerate(on)]


def suggestions(bench: Bench, recipe: Recipe) -> list[Change]:
    """Single toggles that would save something here, the smallest slowdown first.

    Raises:
        BadInput: if the recipe itself is refused.
    """
    before, found = bench.bill(recipe), []
    warned = bench.resolve(recipe).warnings
    for field, values in _choices(recipe, bench.device).items():
        for value in values:
            changed = _with(recipe, {field: value})
            if value == getattr(recipe.tricks, field) or not bench.works(changed):
                continue
            if len(bench.resolve(changed).warnings) > len(warned):
                continue  # it would have no effect
            after = bench.bill(changed, f"tricks.{named(changed, field)}")
            found.append(Change(after.set[0], (), before, after))
    helpful = [change for change in found if change.saved_bytes > 0]
    return sorted(helpful, key=lambda change: (round(change.slowdown or 1, 2), -change.saved_bytes))


def in_words(bench: Bench, recipe: Recipe) -> str:
    """Those of the suggestions that matter, in one line."""
    before = bench.bill(recipe).memory.peak_bytes
    found = [change for change in suggestions(bench, recipe) if change.saved_bytes > before / 100]
    if not found:
        return "no toggle that works here would save a hundredth of it: shorten data.max_length"
    said = (f"{change.set} saves {human(change.saved_bytes)}{_at_the_cost(change)}" for change in found)
    return f"of an estimated {human(before)}, " + ", ".join(said)


def _at_the_cost(change: Change) -> str:
    if change.slowdown is None or abs(change.slowdown - 1) < 0.005:
        return ""
    return f" (time x {change.slowdown:.2f})"


def front(bench: Bench, recipe: Recipe) -> list[Setting]:
    """The toggle sets of which none is both smaller and faster, the fastest first.

    What trains, how rows are packed and how many make a step stay as they are: they change what is learnt, or from
    how much.
    """
    found: dict[tuple[int, float], Setting] = {}
    for tricks in _all_sets(recipe, bench.device):
        changed = _with(recipe, tricks)
        if not bench.works(changed):
            continue
        setting = bench.bill(changed, *(f"tricks.{named(changed, field)}" for field in _differing(recipe, changed)))
        cost = (setting.memory.needed_bytes, setting.seconds or 0.0)
        if cost not in found or len(setting.set) < len(found[cost].set):
            found[cost] = setting
    best: list[Setting] = []
    for (needed, _), setting in sorted(found.items(), key=lambda item: (item[0][1], item[0][0])):
        if not best or needed < best[-1].memory.needed_bytes:
            best.append(setting)
    return best


def longest(bench: Bench, recipe: Recipe) -> int:
    """The most tokens of a row that fit; 0 when not even the shortest does."""

    def fits(tokens: int) -> bool:
        return bench.memory(recipe, tokens).fits

    low, high = 0, LONGEST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _with(recipe: Recipe, tricks: dict[str, Any]) -> Recipe:
    return recipe.model_copy(update={"tricks": recipe.tricks.model_copy(update=tricks)})


def named(recipe: Recipe, field: str) -> str:
    """A toggle as ``--set`` takes it, but for its ``tricks.``: ``peft=lora``."""
    value = getattr(recipe.tricks, field)
    return f"{field}={str(value).lower() if isinstance(value, bool) else value}"


def _differing(recipe: Recipe, changed: Recipe) -> list[str]:
    return [field for field in LADDER if getattr(recipe.tricks, field) != getattr(changed.tricks, field)]


def _choices(recipe: Recipe, device: Device) -> dict[str, tuple[Any, ...]]:
    """Values to try for each field that changes no more than how a step is computed."""
    half = "bf16" if device.real_bf16 else "fp16"
    frozen = recipe.tricks.peft != "none"
    return {
        "precision": ("fp32", half),
        "attention": ("eager", "sdpa"),
        "expand_kv": (False, True),
        "quantization": ("none", "int8", "nf4") if frozen else ("none",),
        "double_quantization": (False, True),
        "lean_preparation": (False, True),
        "gradient_checkpointing": (False, True),
        "activation_offload": (False, True),
        "chunked_loss": (False, True),
        "optimizer": ("adamw", "adamw_8bit"),
        "paged_optimizer": (False, True),
    }


def _all_sets(recipe: Recipe, device: Device) -> Iterator[dict[str, Any]]:
    choices = _choices(recipe, device)
    for values in itertools.product(*choices.values()):
        tricks = dict(zip(choices, values, strict=True))
        idle = (
            (tricks["expand_kv"] and tricks["attention"] != "sdpa")
            or (tricks["double_quantization"] and tricks["quantization"] != "nf4")
            or (tricks["lean_preparation"] and tricks["precision"] == "fp32")
        )
        if not idle:
            yield tricks
