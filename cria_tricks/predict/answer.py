"""What ``cria plan`` and ``cria_tricks.plan`` answer: the bill of a recipe on a card, as typed data and as text."""

import io
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from rich.console import Console


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BillRow(_Frozen):
    """One line of the bill [bytes], and why it is there."""

    name: str
    bytes: int
    why: str


class Suggestion(_Frozen):
    """A toggle that would lower the peak: what to set, the new peak [bytes], and the time against before [ratio]."""

    set: str
    peak_bytes: int
    saved_bytes: int
    slowdown: float | None
    fits: bool


class Comparison(_Frozen):
    """The peak [bytes] without and with one toggle, over the toggles ``beside`` it."""

    set: str
    beside: list[str]
    before_bytes: int
    after_bytes: int
    saved_bytes: int
    slowdown: float | None


class Rung(_Frozen):
    """A set of toggles: the bytes that it needs, and the time of a token [s] where the card's rates are known."""

    set: list[str]
    peak_bytes: int
    needed_bytes: int
    fits: bool
    seconds_per_token: float | None


class Price(_Frozen):
    """The time of training on a rented machine [minutes], and what it costs there [USD]."""

    flavor: str
    minutes: float
    cost: float


class PlanAnswer(_Frozen):
    """What a recipe needs on a card, and why.

    ``print(answer)`` shows what ``cria plan`` prints; in a notebook or a Python shell the answer shows its bill.

    Attributes:
        model: the model's name.
        gpu: the card's name.
        strategy: how several processes share the run.
        processes: how many there are.
        batch: rows of a micro-batch.
        tokens: tokens of the longest row.
        mean_tokens: tokens of a row with its padding, in the mean, which times and prices are of.
        data_rows: training rows that the lengths were read from; 0 for rows that are taken as full.
        lengths: where the lengths come from, in one sentence.
        capacity_bytes: what the card has.
        peak_bytes: the tensors of a step at its fullest moment; the sum of ``rows``.
        needed_bytes: ``peak_bytes`` and what the card holds besides; the sum of ``rows`` and ``around``.
        fits: whether ``needed_bytes`` are no more than ``capacity_bytes``.
        context: tokens of the longest row that the model was made for; 0 if it is not known.
        method: ``"closed_form"`` (by hand) or ``"dry_run"``.
        rows: the bill.
        around: what the card holds beside the tensors of a step.
        seconds_per_step: of an optimizer step [s]; ``None`` for a card whose rates are not known.
        warnings: settings that have no effect or may not do what was meant, each in one sentence.
        suggestions: single toggles that would lower the peak, the smallest slowdown first.
        alone: what each toggle saves without the others.
        removed: what would be lost by switching one off.
        ladder: the toggles added one after the other.
        front: the toggle sets that no other set beats in both bytes and time; ``None`` when not asked for.
        longest: the most tokens of a row that fit; ``None`` when not asked for.
        prices: time and price on the rented machines that have this card and room for the run; ``None`` when not asked
            for.
    """

    model: str
    gpu: str
    strategy: str
    processes: int
    batch: int
    tokens: int
    mean_tokens: float
    data_rows: int
    lengths: str
    capacity_bytes: int
    peak_bytes: int
    needed_bytes: int
    fits: bool
    context: int
    method: str
    rows: list[BillRow]
    around: list[BillRow]
    seconds_per_step: float | None
    warnings: list[str]
    suggestions: list[Suggestion]
    alone: list[Comparison]
    removed: list[Comparison]
    ladder: list[Rung]
    front: list[Rung] | None = None
    longest: int | None = None
    prices: list[Price] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The answer as plain data, as ``cria plan --json`` prints it; what was not asked for is left out."""
        return self.model_dump(exclude_unset=True)

    def show(self, screen: "Console") -> None:
        """Print the answer as ``cria plan`` does."""
        # rich takes a while to import, and an answer that is not shown does not need it.
        from cria_tricks.predict import plan_screen

        plan_screen.show(self.to_dict(), screen)

    def __str__(self) -> str:
        return _as_text(self.to_dict())

    def __repr__(self) -> str:
        tables = ("alone", "removed", "ladder", "front")
        return _as_text({name: value for name, value in self.to_dict().items() if name not in tables})


def _as_text(found: dict[str, Any]) -> str:
    # As in PlanAnswer.show.
    from rich.console import Console

    from cria_tricks.predict import plan_screen

    page = io.StringIO()
    # Without force_jupyter=False rich displays the text in a notebook and writes nothing to the page.
    plan_screen.show(found, Console(file=page, force_jupyter=False))
    return page.getvalue().rstrip()
