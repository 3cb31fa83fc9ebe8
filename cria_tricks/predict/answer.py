"""Define the answer of ``cria plan`` and ``cria_tricks.plan``: the bill of a recipe on a card, as data and as text.

As text it begins with four lines: verdict, peak, time and price. Then come the bill, and what was asked for.
"""

import io
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from cria_tricks.bill.operation import Line
from cria_tricks.common.console import Screen, table
from cria_tricks.common.units import between, human, money_between, speed
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import PRICES_DATE

COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}
"""The verdicts, each with the colour in which it is printed."""

NO_RUN = "no run"
"""What backs a range that no run on this card does."""
BACKED = {
    "measured here": "as measured here",
    "measured cards": "by measured cards",
    "public runs": "by public runs",
    NO_RUN: "by its datasheet, no run backs it",
}
"""What is printed behind a range of times, by what backs it."""


@dataclass(frozen=True)
class Suggestion:
    """What would lower the peak: what to set, the new peak [bytes], and whether the run would fit then.

    ``slowdown`` is the time of a token with the switch, divided by the time without it [ratio]; ``None`` if the card's
    rates are not known.
    """

    set: list[str]
    peak_bytes: int
    saved_bytes: int
    slowdown: float | None
    fits: bool


@dataclass(frozen=True)
class Comparison:
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


@dataclass(frozen=True)
class LadderStep:
    """A setting, the bytes that it needs, and the time of a token [s]; ``None`` if the rates are not known.

    In ``PlanAnswer.ladder``, ``set`` names only the switch that this step adds to those before it; the first step is
    plain fp32 full fine-tuning. In ``PlanAnswer.front`` it lists the changes from the recipe.
    """

    set: list[str]
    peak_bytes: int
    needed_bytes: int
    fits: bool
    seconds_per_token: float | None


@dataclass(frozen=True)
class Price:
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


@dataclass(frozen=True)
class RunTime:
    """The time of the whole run on the card that was asked for: the middle of its range, and its ends [minutes]."""

    minutes: float
    minutes_low: float
    minutes_high: float


@dataclass(frozen=True)
class ResultMemory:
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


@dataclass(frozen=True)
class HostMemory:
    """What the machine around the card needs [bytes], when it needs most; its name is empty if it is not known."""

    name: str
    capacity_bytes: int
    needed_bytes: int
    needed_at: str
    verdict: str
    lines: list[Line]
    merge_bytes: int


class _Timed:
    """The range of a step's time, which an answer and its choices have."""

    seconds_per_step_low: float | None
    seconds_per_step_high: float | None

    @property
    def step_range(self) -> tuple[float, float] | None:
        """The low and the high end of the time of a step [s]; ``None`` if the card's speed is not known."""
        if self.seconds_per_step_low is None or self.seconds_per_step_high is None:
            return None
        return self.seconds_per_step_low, self.seconds_per_step_high


@dataclass(frozen=True)
class FitChoice(_Timed):
    """A set of switches that fits: its changes of the recipe, the bytes that it needs, and the time of a step [s].

    The time is a range, with its middle; ``None`` if the card's speed is not known.
    """

    set: list[str]
    needed_bytes: int
    seconds_per_step: float | None
    seconds_per_step_low: float | None
    seconds_per_step_high: float | None


@dataclass(frozen=True)
class Fit:
    """What a search has found: the best of so many sets, the next best, and one that leaves more of the card free.

    The last two are ``None`` if no aim was asked for.
    """

    aim: str
    tried: int
    chosen: FitChoice
    runner_up: FitChoice | None
    safer: FitChoice | None


@dataclass(frozen=True)
class PlanAnswer(_Timed):
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
    lines: list[Line]
    around: list[Line]
    seconds_per_step: float | None
    seconds_per_step_low: float | None
    seconds_per_step_high: float | None
    seconds_by: str | None
    warnings: list[str]
    suggestions: list[Suggestion] = field(default_factory=list)
    alone: list[Comparison] = field(default_factory=list)
    removed: list[Comparison] = field(default_factory=list)
    ladder: list[LadderStep] = field(default_factory=list)
    answering: list[ResultMemory] = field(default_factory=list)
    front: list[LadderStep] | None = None
    longest: int | None = None
    longest_on_host: int | None = None
    run: RunTime | None = None
    prices: list[Price] | None = None
    host: HostMemory | None = None
    fit: Fit | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the answer as plain data, as ``cria plan --json`` prints it."""
        return asdict(self)

    def show(self, screen: Screen | None = None, *, toggles: bool = False, ladder: bool = False) -> None:
        """Print the answer as ``cria plan`` does.

        Args:
            screen: where to print; standard output when left out.
            toggles: print ``alone`` and ``removed``, too.
            ladder: print ``ladder``, too.
        """
        _show(self, screen or Screen(force_jupyter=False), toggles=toggles, ladder=ladder)

    def __str__(self) -> str:
        page = io.StringIO()
        # Without force_jupyter=False rich displays the text in a notebook and writes nothing to the page.
        self.show(Screen(file=page, force_jupyter=False))
        return "\n".join(line.rstrip() for line in page.getvalue().rstrip().splitlines())

    def __repr__(self) -> str:
        return str(self)


def _show(found: PlanAnswer, screen: Screen, *, toggles: bool, ladder: bool) -> None:
    """Print an answer: its four lines and its bill, what helps if it does not fit, then whatever was asked for."""
    _show_lead(found, screen)
    if found.fit and (found.fit.runner_up or found.fit.safer):
        _show_fit(found.fit, screen)
    _show_bill(found, screen)
    if found.warnings:
        screen.wrapped("", *(Text(f"warning: {warning}") for warning in found.warnings))
    if found.suggestions and found.verdict != "fits":
        _show_suggestions(found.suggestions, screen)
    if toggles:
        _show_toggles(found, screen)
    if ladder:
        _show_ladder(found.ladder, screen)
    if found.front is not None:
        _show_front(found.front, screen)
    if found.longest is not None:
        beyond = ""
        if found.longest > found.context > 0:
            beyond = f"; the model's context is {found.context:,}"
        on_host = found.longest if found.longest_on_host is None else found.longest_on_host
        if on_host < found.longest:
            beyond += f"; the host has room for {on_host:,}" if on_host else "; the host has room for no row"
        screen.wrapped("", f"longest row that fits: {found.longest:,} tokens{beyond}")
    if found.prices:
        _show_prices(found.prices, screen)


def _show_lead(found: PlanAnswer, screen: Screen) -> None:
    """Print the lines that a reader looks for first."""
    lead = Table.grid(padding=(0, 2))
    lead.add_column(no_wrap=True, style="bold")
    lead.add_column(overflow="fold")
    lead.add_row("verdict", _verdict(found))
    if found.fit:
        lead.add_row("switches", _chosen(found.fit))
    moment = {"forward": "forward pass"}.get(found.peak_at, found.peak_at)
    lead.add_row("peak", f"{human(found.peak_bytes)} at the {moment}; {_largest(found)}")
    lead.add_row("time", _time(found))
    lead.add_row("price", _price(found))
    screen.wrapped(lead)


def _chosen(fit: Fit) -> str:
    """Name the set of switches of this answer, and how to ask for another."""
    changes = " ".join(fit.chosen.set)
    best = {
        "nearest": "the fewest changes of {} sets",
        "smallest": "needs least of {} sets",
    }.get(fit.aim, f"the {fit.aim} of {{}} sets that fit")
    said = f"{changes} ({best.format(fit.tried)})" if changes else "the recipe's own"
    return f"{said}; --as-is: the recipe's own" if changes else said


def _show_fit(fit: Fit, screen: Screen) -> None:
    """Print what a search has chosen, the next best, and what more safety would cost."""
    shown = table(f"the {fit.aim} of {fit.tried}", "--set", "needs", "a step", numbers=["needs"])
    named = {"chosen": fit.chosen, "next best": fit.runner_up, "safer": fit.safer}
    for what, choice in named.items():
        if choice:
            changes = "\n".join(choice.set) or "as it is"
            time = between(*choice.step_range) if choice.step_range else "not known"
            shown.add_row(what, changes, human(choice.needed_bytes), time)
    screen.wrapped("", shown)


def _verdict(found: PlanAnswer) -> str:
    """Say whether the run fits, and by how much."""
    verdict = found.verdict
    host = found.host
    if verdict != "does not fit" and host and host.verdict == "does not fit":
        return (
            f"[red]does not fit[/] {host.name}: needs {human(host.needed_bytes)} of "
            f"{human(host.capacity_bytes)} on the host; the card would be enough"
        )
    if verdict == "tight":
        return (
            f"[yellow]tight[/]: at least {human(found.least_bytes)} of {human(found.capacity_bytes)} on "
            f"{found.gpu}, up to {human(found.needed_bytes)} with what PyTorch keeps"
        )
    left = found.capacity_bytes - found.needed_bytes
    much = "to spare" if left >= 0 else "too much"
    return (
        f"[{COLOURS[verdict]}]{verdict}[/]: needs {human(found.needed_bytes)} of {human(found.capacity_bytes)} "
        f"on {found.gpu}, {human(abs(left))} {much}"
    )


def _largest(found: PlanAnswer) -> str:
    """Name what takes most of the peak; lines with the same word before a colon count together."""
    sizes: dict[str, int] = {}
    for line in found.lines:
        kind = line.name.partition(":")[0]
        sizes[kind] = sizes.get(kind, 0) + line.bytes
    name = max(sizes, key=lambda kind: sizes[kind])
    return f"the largest part: {name}, {human(sizes[name])}"


def _time(found: PlanAnswer) -> str:
    if found.step_range is None:
        return "not known: how fast this card is; name it, or measure this machine with cria doctor --calibrate"
    a_step = f"{between(*found.step_range)} an optimizer step"
    # A machine on the list may have several of these cards, and then it is faster than the one that was asked for.
    run = _cheapest(found.prices) if found.prices else found.run
    if run:
        a_step = f"{_minutes(run)} to train, {a_step}"
    return f"{a_step}, {BACKED[found.seconds_by or NO_RUN]}"


def _minutes(price: Price | RunTime) -> str:
    return between(60 * price.minutes_low, 60 * price.minutes_high)


def _cost(price: Price) -> str:
    return money_between(price.cost_low, price.cost_high)


def _price(found: PlanAnswer) -> str:
    prices = found.prices
    if prices is None:
        return "give --rows N, the number of training rows, for minutes and price"
    if not prices:
        return "no price: no machine on the list has this card and room for this run"
    cheapest = _cheapest(prices)
    among = f", the cheapest of {len(prices)}" if len(prices) > 1 else ""
    return f"{_cost(cheapest)} on {cheapest.flavor}{among} (HF Jobs, {PRICES_DATE})"


def _cheapest(prices: list[Price]) -> Price:
    return min(prices, key=lambda price: price.cost)


def _show_bill(found: PlanAnswer, screen: Screen) -> None:
    """Print the lines of the bill, their sum, and what the card holds besides."""
    method = "counted by a dry run" if found.method == "dry_run" else "computed by formulas"
    shared = ""
    if found.processes > 1:
        shared = f", the fullest of {found.processes} processes ({found.strategy})"
    title = f"[bold]{found.model}[/]{shared}, {found.batch} x {found.tokens:,} tokens a micro-batch, {method}"
    screen.wrapped("", title, Text(found.lengths, style="dim"), "")
    bill = table("what", "bytes", "why", numbers=["bytes"])
    for line in found.lines:
        bill.add_row(line.name, human(line.bytes), line.why)
    bill.add_row("peak", human(found.peak_bytes), "the sum so far", style="bold")
    for line in found.around:
        bill.add_row(line.name, human(line.bytes), line.why)
    if found.around:
        bill.add_row("needed", human(found.needed_bytes), f"of {human(found.capacity_bytes)}", style="bold")
    host = found.host
    if host:
        of = f"of {human(host.capacity_bytes)} ({host.name}), " if host.name else ""
        bill.add_row("on the host", human(host.needed_bytes), f"{of}while {host.needed_at}")
    screen.wrapped(bill)


def _show_table(title: str, shown: Table, screen: Screen) -> None:
    screen.wrapped("", f"[bold]{title}[/]", "", shown)


def _yes_or_no(found: Suggestion | LadderStep) -> str:
    return "[green]yes[/]" if found.fits else "[red]no[/]"


def _show_prices(entries: list[Price], screen: Screen) -> None:
    title = f"Training alone, at the prices of Hugging Face Jobs' list of {PRICES_DATE}"
    prices = [f"{price.flavor}: {_minutes(price)}, {_cost(price)}" for price in entries]
    screen.wrapped("", f"[bold]{title}[/]", "", *prices, Text(f"times are {trust.TIME}", style="dim"))


def _show_suggestions(entries: list[Suggestion], screen: Screen) -> None:
    shown = table("--set", "saves", "time", "fits", numbers=["saves"])
    for entry in entries:
        saved = human(entry.saved_bytes)
        shown.add_row("\n".join(entry.set), saved, speed(entry.slowdown), _yes_or_no(entry))
    _show_table("What would lower the peak, the smallest slowdown first", shown, screen)


def _show_toggles(found: PlanAnswer, screen: Screen) -> None:
    """Print two tables: each switch alone, and each taken away. Both say what changes, from before to after."""
    alone = table("switched on", "peak", "memory", "time", numbers=["peak", "memory"])
    for entry in found.alone:
        named = _with_others(entry, "over")
        changed = _more_or_less(-entry.saved_bytes)
        alone.add_row(named, human(entry.after_bytes), changed, speed(entry.slowdown))
    _show_table("Each switch alone, over those that it needs", alone, screen)
    removed = table("switched off", "peak", "memory", "time", numbers=["peak", "memory"])
    for entry in found.removed:
        named = _with_others(entry, "and")
        changed = _more_or_less(entry.saved_bytes)
        without = None if entry.slowdown is None else 1 / entry.slowdown
        removed.add_row(named, human(entry.before_bytes), changed, speed(without))
    _show_table("What you would lose by switching one off", removed, screen)


def _with_others(entry: Comparison, word: str) -> str:
    return "\n".join([entry.set, *(f"[dim]  {word} {other}[/]" for other in entry.beside)])


def _more_or_less(change: int) -> str:
    if not change:
        return "the same"
    return f"{human(abs(change))} {'more' if change > 0 else 'less'}"


def _show_ladder(ladder_steps: list[LadderStep], screen: Screen) -> None:
    shown = table("switched on", "peak", "fits", "time of a token", numbers=["peak"])
    first = ladder_steps[0].seconds_per_token  # plain fp32 full fine-tuning, with which the other times are compared
    for number, entry in enumerate(ladder_steps):
        compared = speed(entry.seconds_per_token / first) if number and first and entry.seconds_per_token else ""
        shown.add_row(", ".join(entry.set), human(entry.peak_bytes), _yes_or_no(entry), compared)
    _show_table("The ladder: switches added one after the other, times compared with the first", shown, screen)


def _show_front(entries: list[LadderStep], screen: Screen) -> None:
    shown = table("needs", "fits", "ms a token", "--set", numbers=["needs", "ms a token"])
    for entry in entries:
        milliseconds = ""
        if entry.seconds_per_token is not None:
            milliseconds = f"{1000 * entry.seconds_per_token:.3f}"
        named = " ".join(entry.set) or "as it is"
        shown.add_row(human(entry.needed_bytes), _yes_or_no(entry), milliseconds, named)
    _show_table("The front: sets of switches that no other set beats in both memory and time", shown, screen)
