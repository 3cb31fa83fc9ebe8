"""Define the answer of ``cria plan`` and ``cria_tricks.plan``: the bill of a recipe on a card, as data and as text."""

import io
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from cria_tricks.common.console import Screen


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BillLine(_Frozen):
    """One line of the bill: its name, its bytes, and why it is there."""

    name: str
    bytes: int
    why: str


class Suggestion(_Frozen):
    """What would lower the peak: what to set, the new peak [bytes], and whether the run would fit then.

    ``slowdown`` is the time of a token with the switch, divided by the time without it [ratio]; ``None`` if the card's
    rates are not known.
    """

    set: list[str]
    peak_bytes: int
    saved_bytes: int
    slowdown: float | None
    fits: bool


class Comparison(_Frozen):
    """The peak [bytes] without (``before_bytes``) and with (``after_bytes``) one switch.

    ``beside`` lists, in ``PlanAnswer.alone``, the other switches that were on because this one needs them; in
    ``PlanAnswer.removed``, the switches that were switched off together with this one, because they need it.
    ``slowdown`` is as in :class:`Suggestion`.
    """

    set: str
    beside: list[str]
    before_bytes: int
    after_bytes: int
    saved_bytes: int
    slowdown: float | None


class LadderStep(_Frozen):
    """A setting, the bytes that it needs, and the time of a token [s]; ``None`` if the rates are not known.

    In ``PlanAnswer.ladder``, ``set`` names only the switch that this step adds to those before it; the first step is
    plain fp32 full fine-tuning. In ``PlanAnswer.front`` it lists the changes from the recipe.
    """

    set: list[str]
    peak_bytes: int
    needed_bytes: int
    fits: bool
    seconds_per_token: float | None


class Price(_Frozen):
    """The time of training on a rented machine [minutes], and what it costs there [USD].

    ``minutes`` and ``cost`` are the middles of their ranges; the ends have names of their own.
    """

    flavor: str
    minutes: float
    cost: float
    minutes_low: float
    minutes_high: float
    cost_low: float
    cost_high: float


class RunTime(_Frozen):
    """The time of the whole run on the card that was asked for: the middle of its range, and its ends [minutes]."""

    minutes: float
    minutes_low: float
    minutes_high: float


class ResultMemory(_Frozen):
    """What a command that opens the trained result, to answer, needs on the card [bytes].

    ``needed_bytes``, ``least_bytes`` and ``verdict`` are as in :class:`PlanAnswer`, for the command without options.
    ``options`` are the fewest with which it fits, and ``options_bytes`` what it needs with them at least; both are
    ``None`` if it fits with none.
    """

    command: str
    needed_bytes: int
    least_bytes: int
    verdict: str
    options: list[str] | None
    options_bytes: int | None


class HostMemory(_Frozen):
    """What the machine around the card needs [bytes], when it needs most; its name is empty if it is not known."""

    name: str
    capacity_bytes: int
    needed_bytes: int
    needed_at: str
    verdict: str
    lines: list[BillLine]
    merge_bytes: int


class FitChoice(_Frozen):
    """A set of switches that fits: its changes of the recipe, the bytes that it needs, and the time of a step [s].

    The time is a range, with its middle; ``None`` if the card's speed is not known.
    """

    set: list[str]
    needed_bytes: int
    seconds_per_step: float | None
    seconds_per_step_low: float | None
    seconds_per_step_high: float | None


class Fit(_Frozen):
    """What a search has found: the best of so many sets, the next best, and one that leaves more of the card free.

    The last two are ``None`` if no aim was asked for.
    """

    aim: str
    tried: int
    chosen: FitChoice
    runner_up: FitChoice | None
    safer: FitChoice | None


class PlanAnswer(_Frozen):
    """What a recipe needs on a card, and why.

    ``print(answer)`` shows what ``cria plan`` prints, and so does the answer itself in a notebook or a Python shell;
    ``answer.show(toggles=True, ladder=True)`` shows the comparisons, too.

    Attributes:
        model: the model's name.
        gpu: the card's name.
        strategy: how several processes share the run.
        processes: how many there are.
        batch: rows of a micro-batch.
        tokens: tokens of the longest row.
        mean_tokens: mean number of tokens of a row, padding included; times and prices are estimated from it.
        data_rows: the number of training rows whose lengths were read; 0 if all rows were assumed to be full.
        lengths: where the lengths come from, in one sentence.
        capacity_bytes: the memory of the card.
        peak_bytes: the tensors at the fullest moment of a step or an evaluation; the sum of ``lines``.
        peak_at: the moment at which that is, e.g. ``loss`` or ``evaluation``.
        needed_bytes: ``peak_bytes`` and what the card holds besides; the sum of ``lines`` and ``around``.
        least_bytes: the part of it without which the run cannot work: all but what the allocator reserves and no tensor
            uses.
        fits: whether ``least_bytes`` is at most ``capacity_bytes``, and the host's memory is enough.
        verdict: ``fits``, ``tight`` (with ``needed_bytes``, less than 5 % of the card stays free) or ``does not fit``.
        context: the context length of the model, the longest row that it was made for [tokens]; 0 if it is not known.
        method: how ``lines`` were computed: ``"closed_form"`` (formulas) or ``"dry_run"``.
        lines: the lines of the bill.
        around: what the card holds besides the tensors of a step, in lines like those of the bill.
        seconds_per_step: the time of an optimizer step, the middle of its range [s]; ``None`` if the card's rates are
            not known.
        seconds_per_step_low: the low end of this range [s].
        seconds_per_step_high: the high end of this range [s]. The range is about the card: two settings on one card
            compare better than it says.
        seconds_by: what backs this range: what was ``"measured here"`` by ``cria doctor --calibrate``, ``"measured
            cards"`` of this kind, ``"public runs"`` on this card, or ``"no run"``.
        warnings: settings that have no effect or may not do what was meant, each in one sentence.
        suggestions: single switches that would lower the peak, the smallest slowdown first; where none of them is
            enough, several together that are.
        alone: what each switch saves without the others.
        removed: what would be lost by switching off each switch.
        ladder: the switches added one after the other.
        answering: the memory of ``cria eval`` and of ``cria chat`` with the result.
        front: the switch sets that no other set beats in both bytes and time; ``None`` if not asked for.
        longest: the length of the longest row that fits [tokens]; ``None`` if not asked for.
        longest_on_host: the same, if the host must have room for it, too; ``None`` if the host is not known.
        host: the memory on the host; ``None`` on a CPU.
        fit: which set of switches a search has found; ``None`` if the recipe's own was asked for. All the rest is about
            the chosen set.
        run: the time of the whole run on this card; ``None`` if the number of rows or the card's rates are not known,
            or the run does not fit.
        prices: time and price on the rented machines that have this card and room for the run; ``None`` if
            the number of rows is not known.
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
    peak_at: str
    needed_bytes: int
    least_bytes: int
    fits: bool
    verdict: str
    context: int
    method: str
    lines: list[BillLine]
    around: list[BillLine]
    seconds_per_step: float | None
    seconds_per_step_low: float | None
    seconds_per_step_high: float | None
    seconds_by: str | None
    warnings: list[str]
    suggestions: list[Suggestion]
    alone: list[Comparison]
    removed: list[Comparison]
    ladder: list[LadderStep]
    answering: list[ResultMemory] = []
    front: list[LadderStep] | None = None
    longest: int | None = None
    longest_on_host: int | None = None
    run: RunTime | None = None
    prices: list[Price] | None = None
    host: HostMemory | None = None
    fit: Fit | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data, as ``cria plan --json`` prints it, without what was not asked for."""
        return self.model_dump(exclude_unset=True)

    def show(self, screen: "Screen | None" = None, *, toggles: bool = False, ladder: bool = False) -> None:
        """Print the answer as ``cria plan`` does.

        Args:
            screen: where to print; standard output when left out.
            toggles: print ``alone`` and ``removed``, too.
            ladder: print ``ladder``, too.
        """
        # rich takes a while to import, and an answer that is not shown does not need it.
        from cria_tricks.common.console import Screen
        from cria_tricks.predict import plan_screen

        plan_screen.show(self.to_dict(), screen or Screen(force_jupyter=False), toggles=toggles, ladder=ladder)

    def __str__(self) -> str:
        # Imported late for the same reason as in show().
        from cria_tricks.common.console import Screen

        page = io.StringIO()
        # Without force_jupyter=False rich displays the text in a notebook and writes nothing to the page.
        self.show(Screen(file=page, force_jupyter=False))
        return "\n".join(line.rstrip() for line in page.getvalue().rstrip().splitlines())

    def __repr__(self) -> str:
        return str(self)
