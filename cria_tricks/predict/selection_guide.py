"""Hold the Hardware Selection Guide (seed document 004) as data: its machines, and when it recommends which.

The words and numbers here are the guide's, not ours; ``machines.py`` compares them with our estimates.
"""

import math
from dataclasses import dataclass

from cria_tricks.common.errors import BadInput
from cria_tricks.common.names import hint, nearest


@dataclass(frozen=True)
class Machine:
    """A rented machine as the guide describes it.

    Attributes:
        low: the lowest price [USD/h].
        high: the highest price [USD/h].
        gb: the memory of all its cards together [GB].
        use: what the guide recommends it for.
    """

    low: float
    high: float
    gb: int
    use: str


MACHINES: dict[str, Machine] = {
    "t4-small": Machine(0.5, 1, 16, "<1B models, demos"),
    "t4-medium": Machine(1, 2, 16, "1-3B models, development"),
    "l4x1": Machine(2, 3, 24, "3-7B models, efficient training"),
    "l4x4": Machine(8, 12, 96, "Multi-GPU training"),
    "a10g-small": Machine(3, 4, 24, "3-7B models, production"),
    "a10g-large": Machine(4, 6, 24, "7-13B models"),
    "a10g-largex2": Machine(8, 12, 48, "Multi-GPU, large models"),
    "a10g-largex4": Machine(16, 24, 96, "Multi-GPU, very large models"),
    "a100-large": Machine(8, 12, 40, "13B+ models, fast training"),
}
"""The machines by name. No estimate uses these prices, because they are older and higher than ``Flavor.price``."""


@dataclass(frozen=True)
class Recommendation:
    """One entry of the guide.

    Attributes:
        case: the models or budgets that it is for.
        below: the entry is for amounts below this one [billions of parameters, or USD].
        flavors: the machines it names.
        says: the rest of the entry.
    """

    case: str
    below: float
    flavors: tuple[str, ...]
    says: str


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    Attributes:
        flavors: the machines the guide names.
        says: the guide's numbers.
        rows: the number of training rows that our estimate assumes.
        epochs: the number of epochs that our estimate assumes.
    """

    flavors: tuple[str, ...]
    says: str
    rows: int
    epochs: int


_LAST = float("inf")
"""The limit of the last entry, which has none."""

BY_SIZE = (
    Recommendation("under 1B parameters", 1, ("t4-small",), "batch 4-8, 1-2 hours for 1,000 examples"),
    Recommendation("1-3B parameters", 3, ("t4-medium", "a10g-small"), "batch 2-4, 2-4 hours for 10,000 examples"),
    Recommendation(
        "3-7B parameters", 7, ("a10g-small", "a10g-large"), "batch 1-2, or LoRA with 4-8, 4-8 hours for 10,000 examples"
    ),
    Recommendation(
        "7-13B parameters",
        13,
        ("a10g-large", "a100-large"),
        "always LoRA/PEFT; batch 1 for full fine-tuning, 2-4 for LoRA, 6-12 hours for 10,000 examples",
    ),
    Recommendation(
        "13B parameters and more",
        _LAST,
        ("a100-large",),
        "LoRA only, full fine-tuning is not feasible; batch 1-2, 8-24 hours for 10,000 examples",
    ),
)
BY_BUDGET = (
    Recommendation("under $5", 5, ("t4-small",), "100-500 examples, 1-2 epochs, a model under 1B"),
    Recommendation("$5-20", 20, ("t4-medium", "a10g-small"), "1,000-5,000 examples, 2-3 epochs, a model up to 3B"),
    Recommendation("$20-50", 50, ("a10g-small", "a10g-large"), "5,000-20,000 examples, 3-5 epochs, a model up to 7B"),
    Recommendation("$50-200", 200, ("a10g-large", "a100-large"), "all data, several epochs, up to 13B with LoRA"),
)
"""The guide's entries by budget; it has none for $200 and more."""

KINDS: dict[str, Kind] = {
    "quick": Kind(("t4-small",), "50-100 examples, 5-10 steps, 10-15 minutes", 100, 1),
    "development": Kind(("t4-medium", "a10g-small"), "1,000 examples, 1 epoch, 30-60 minutes", 1000, 1),
    "production": Kind(("a10g-large", "a100-large"), "all data, 3-5 epochs, 4-12 hours", 10_000, 3),
    "research": Kind(("a100-large",), "many runs, 20-50 hours in all", 10_000, 3),
}
"""The kinds of training. Where the guide gives no number of rows, we assume the 10,000 for which it gives its times by
model size. Research means many runs; we assume one."""

GB_PER_BILLION = {"full": 20, "lora": 4}
"""The guide's rules of thumb for memory [GB per billion parameters]. It has none for a base model in 4 bits."""


def recommendation_for(entries: tuple[Recommendation, ...], amount: float) -> Recommendation | None:
    """Find the entry for an amount; one that equals the limit of an entry belongs to the next entry.

    Args:
        entries: :data:`BY_SIZE` or :data:`BY_BUDGET`.
        amount: billions of parameters, or USD.

    Returns:
        The entry, or ``None`` if the amount is beyond the last one.
    """
    return next((entry for entry in entries if amount < entry.below), None)


def refuse_unknown(tokens: int | None, budget: float | None, kind: str) -> None:
    """Refuse an unknown kind of training, and a number of tokens or a budget that makes no sense.

    Args:
        tokens: the tokens of the whole run, if given.
        budget: the budget for the run [USD], if given.
        kind: a kind of training, one of :data:`KINDS`.

    Raises:
        BadInput: for an unknown kind, or tokens or a budget that is not above zero.
    """
    if kind not in KINDS:
        there_are = f"there are {', '.join(KINDS)}"
        raise BadInput(f"--kind {kind}: {hint(nearest(kind, KINDS), there_are)}")
    if tokens is not None and tokens < 1:
        raise BadInput(f"--tokens {tokens}: must be a whole number above 0")
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise BadInput(f"--budget {budget:g}: must be an amount of USD above 0")
