"""Print the answer of ``cria plan``: the memory bill, and a table for everything else that was asked for."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.table import Table

from cria_tricks.common.units import duration, human, money
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import PRICES_DATE


def show(found: dict[str, Any], screen: Console) -> None:
    """Print an answer: the bill with its verdict and warnings, then whatever else the answer has.

    Args:
        found: the answer as plain data, from :meth:`cria_tricks.predict.answer.PlanAnswer.to_dict`.
        screen: where to print.
    """
    _show_bill(found, screen)
    if found["seconds_per_step"]:
        screen.print(
            f"an optimizer step takes {duration(found['seconds_per_step'])}, {trust.TIME}",
            highlight=False,
        )
    for warning in found["warnings"]:
        screen.print(f"warning: {warning}", markup=False, highlight=False)
    if found["suggestions"] and not found["fits"]:
        _show_suggestions(found, screen)
    if "alone" in found:
        _show_comparisons(found, screen)
        _show_ladder(found["ladder"], screen)
    if "front" in found:
        _show_front(found["front"], screen)
    if "longest" in found:
        beyond = ""
        if found["longest"] > found["context"] > 0:
            beyond = f"; the model's context is {found['context']:,}"
        screen.print(f"\nlongest row that fits: {found['longest']:,} tokens{beyond}", highlight=False)
    if "prices" in found:
        _show_prices(found["prices"], screen)


def _show_bill(found: dict[str, Any], screen: Console) -> None:
    shared = ""
    if found["processes"] > 1:
        shared = f", the fullest of {found['processes']} ({found['strategy']})"
    method = "by dry run" if found["method"] == "dry_run" else "by hand"
    screen.print(
        f"[bold]{found['model']}[/] on {found['gpu']}{shared}, "
        f"{found['batch']} x {found['tokens']:,} tokens a micro-batch, {method}",
        highlight=False,
    )
    screen.print(f"{found['lengths']}\n", highlight=False, markup=False)
    table = Table(show_footer=True)
    table.add_column("what", "peak", no_wrap=True)
    table.add_column("bytes", human(found["peak_bytes"]), justify="right", no_wrap=True)
    table.add_column("why")
    for row in found["rows"]:
        table.add_row(row["name"], human(row["bytes"]), row["why"])
    screen.print(table)
    needs = human(found["needed_bytes"])
    besides = " + ".join(f"{row['name']} {human(row['bytes'])}" for row in found["around"])
    if besides:
        needs += f" (the peak + {besides})"
    screen.print(f"{_verdict(found)}: needs {needs} of {human(found['capacity_bytes'])}", highlight=False)


def _verdict(found: dict[str, Any]) -> str:
    return "[green]fits[/]" if found["fits"] else "[red]does not fit[/]"


def _yes_or_no(found: dict[str, Any]) -> str:
    return "[green]yes[/]" if found["fits"] else "[red]no[/]"


def _table(title: str, columns: Iterable[str], texts: Iterable[str]) -> Table:
    """Make a table in which the columns named in ``texts`` are left-aligned, and all others (numbers) right-aligned."""
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in texts else "right", no_wrap=True)
    return table


def _show_prices(entries: Iterable[dict[str, Any]], screen: Console) -> None:
    said = [f"{price['flavor']}: {duration(60 * price['minutes'])}, {money(price['cost'])}" for price in entries]
    if said:
        said[0] = f"training alone, at the prices of Hugging Face Jobs' list of {PRICES_DATE}:\n{said[0]}"
    screen.print("\n".join(said) or "no price: no machine on the list has this card and room for this run",
                 highlight=False)  # fmt: skip


def _show_suggestions(found: dict[str, Any], screen: Console) -> None:
    columns = ("--set", "saves", "time", "peak", "")
    table = _table("what to flip, the smallest slowdown first", columns, texts=("--set", ""))
    for entry in found["suggestions"]:
        table.add_row(
            entry["set"],
            human(entry["saved_bytes"]),
            _times(entry["slowdown"]),
            human(entry["peak_bytes"]),
            _verdict(entry),
        )
    screen.print()
    screen.print(table)


def _show_comparisons(found: dict[str, Any], screen: Console) -> None:
    for key, title, beside, before, after in (
        ("alone", "each toggle alone, over what it needs", "beside", "without", "with it"),
        ("removed", "each toggle taken away from the whole, with what cannot stay", "and", "without", "with all"),
    ):
        table = _table(title, ("toggle", before, after, "saves", "time"), texts=("toggle",))
        for entry in found[key]:
            others = [f"[dim]  {beside} {other}[/]" for other in entry["beside"]]
            table.add_row(
                "\n".join([entry["set"], *others]),
                human(entry["before_bytes"]),
                human(entry["after_bytes"]),
                human(entry["saved_bytes"]),
                _times(entry["slowdown"]),
            )
        screen.print()
        screen.print(table)


def _show_ladder(rungs: list[dict[str, Any]], screen: Console) -> None:
    columns = ("toggle", "peak", "fits", "time of a token")
    table = _table("the ladder: one after the other", columns, texts=("toggle", "fits"))
    first = rungs[0]["seconds_per_token"]  # plain fp32 full fine-tuning, with which the other times are compared
    for entry in rungs:
        times = None if first is None else entry["seconds_per_token"] / first
        table.add_row(", ".join(entry["set"]), human(entry["peak_bytes"]), _yes_or_no(entry), _times(times))
    screen.print()
    screen.print(table)


def _show_front(entries: Iterable[dict[str, Any]], screen: Console) -> None:
    table = Table(title="toggle sets of which none is both smaller and faster", title_justify="left")
    for column in ("needs", "fits", "ms a token", "--set"):
        table.add_column(column, justify="left" if column in ("fits", "--set") else "right", no_wrap=column != "--set")
    for entry in entries:
        milliseconds = ""
        if entry["seconds_per_token"] is not None:
            milliseconds = f"{1000 * entry['seconds_per_token']:.3f}"
        named = " ".join(entry["set"]) or "as it is"
        table.add_row(human(entry["needed_bytes"]), _yes_or_no(entry), milliseconds, named)
    screen.print()
    screen.print(table)


def _times(ratio: float | None) -> str:
    """Write a ratio of two times, or nothing if it is not known."""
    return "" if ratio is None else f"x {ratio:.2f}"
