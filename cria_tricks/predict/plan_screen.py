"""Print the answer of ``cria plan``: verdict, peak, time and price, then the memory bill, then what was asked for."""

from typing import Any

from rich.table import Table
from rich.text import Text

from cria_tricks.common.console import Screen, table
from cria_tricks.common.units import between, human, money_between, speed
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import PRICES_DATE

COLOURS = {"fits": "green", "tight": "yellow", "does not fit": "red"}
"""The verdicts, each with the colour in which it is printed."""

BACKED = {
    "measured here": "as measured here",
    "measured cards": "by measured cards",
    "public runs": "by public runs",
    "no run": "by its datasheet, no run backs it",
}
"""What is printed behind a range of times, by what backs it."""


def show(found: dict[str, Any], screen: Screen, *, toggles: bool = False, ladder: bool = False) -> None:
    """Print an answer: its four lines and its bill, what helps if it does not fit, then whatever was asked for.

    Args:
        found: the answer as plain data, from :meth:`cria_tricks.predict.answer.PlanAnswer.to_dict`.
        screen: where to print.
        toggles: print what each switch does alone, and what you would lose by switching it off.
        ladder: print the switches added one after the other.
    """
    _show_lead(found, screen)
    if found.get("fit") and (found["fit"]["runner_up"] or found["fit"]["safer"]):
        _show_fit(found["fit"], screen)
    _show_bill(found, screen)
    if found["warnings"]:
        screen.wrapped("", *(Text(f"warning: {warning}") for warning in found["warnings"]))
    if found["suggestions"] and found["verdict"] != "fits":
        _show_suggestions(found["suggestions"], screen)
    if toggles:
        _show_toggles(found, screen)
    if ladder:
        _show_ladder(found["ladder"], screen)
    if "front" in found:
        _show_front(found["front"], screen)
    if "longest" in found:
        beyond = ""
        if found["longest"] > found["context"] > 0:
            beyond = f"; the model's context is {found['context']:,}"
        on_host = found.get("longest_on_host", found["longest"])
        if on_host < found["longest"]:
            beyond += f"; the host has room for {on_host:,}" if on_host else "; the host has room for no row"
        screen.wrapped("", f"longest row that fits: {found['longest']:,} tokens{beyond}")
    if found.get("prices"):
        _show_prices(found["prices"], screen)


def _show_lead(found: dict[str, Any], screen: Screen) -> None:
    """Print the lines that a reader looks for first."""
    lead = Table.grid(padding=(0, 2))
    lead.add_column(no_wrap=True, style="bold")
    lead.add_column(overflow="fold")
    lead.add_row("verdict", _verdict(found))
    if found.get("fit"):
        lead.add_row("switches", _chosen(found["fit"]))
    moment = {"forward": "forward pass"}.get(found["peak_at"], found["peak_at"])
    lead.add_row("peak", f"{human(found['peak_bytes'])} at the {moment}; {_largest(found)}")
    lead.add_row("time", _time(found))
    lead.add_row("price", _price(found))
    screen.wrapped(lead)


def _chosen(fit: dict[str, Any]) -> str:
    """Name the set of switches of this answer, and how to ask for another."""
    changes = " ".join(fit["chosen"]["set"])
    best = {
        "nearest": "the fewest changes of {} sets",
        "smallest": "needs least of {} sets",
    }.get(fit["aim"], f"the {fit['aim']} of {{}} sets that fit")
    said = f"{changes} ({best.format(fit['tried'])})" if changes else "the recipe's own"
    return f"{said}; --as-is: the recipe's own" if changes else said


def _show_fit(fit: dict[str, Any], screen: Screen) -> None:
    """Print what a search has chosen, the next best, and what more safety would cost."""
    shown = table(f"the {fit['aim']} of {fit['tried']}", "--set", "needs", "a step", numbers=["needs"])
    for name, what in (("chosen", "chosen"), ("runner_up", "next best"), ("safer", "safer")):
        choice = fit[name]
        if choice:
            changes = "\n".join(choice["set"]) or "as it is"
            ends = choice["seconds_per_step_low"], choice["seconds_per_step_high"]
            time = "not known" if choice["seconds_per_step"] is None else between(*ends)
            shown.add_row(what, changes, human(choice["needed_bytes"]), time)
    screen.wrapped("", shown)


def _verdict(found: dict[str, Any]) -> str:
    """Say whether the run fits, and by how much."""
    verdict = found["verdict"]
    host = found.get("host")
    if verdict != "does not fit" and host and host["verdict"] == "does not fit":
        return (
            f"[red]does not fit[/] {host['name']}: needs {human(host['needed_bytes'])} of "
            f"{human(host['capacity_bytes'])} on the host; the card would be enough"
        )
    if verdict == "tight":
        return (
            f"[yellow]tight[/]: at least {human(found['least_bytes'])} of {human(found['capacity_bytes'])} on "
            f"{found['gpu']}, up to {human(found['needed_bytes'])} with what PyTorch keeps"
        )
    left = found["capacity_bytes"] - found["needed_bytes"]
    much = "to spare" if left >= 0 else "too much"
    return (
        f"[{COLOURS[verdict]}]{verdict}[/]: needs {human(found['needed_bytes'])} of {human(found['capacity_bytes'])} "
        f"on {found['gpu']}, {human(abs(left))} {much}"
    )


def _largest(found: dict[str, Any]) -> str:
    """Name what takes most of the peak; lines with the same word before a colon count together."""
    sizes: dict[str, int] = {}
    for line in found["lines"]:
        kind = line["name"].partition(":")[0]
        sizes[kind] = sizes.get(kind, 0) + line["bytes"]
    name = max(sizes, key=lambda kind: sizes[kind])
    return f"the largest part: {name}, {human(sizes[name])}"


def _time(found: dict[str, Any]) -> str:
    if found["seconds_per_step"] is None:
        return "not known: how fast this card is; name it, or measure this machine with cria doctor --calibrate"
    a_step = f"{between(found['seconds_per_step_low'], found['seconds_per_step_high'])} an optimizer step"
    # A machine on the list may have several of these cards, and then it is faster than the one that was asked for.
    run = _cheapest(found["prices"]) if found.get("prices") else found.get("run")
    if run:
        a_step = f"{_minutes(run)} to train, {a_step}"
    return f"{a_step}, {BACKED[found['seconds_by']]}"


def _minutes(price: dict[str, Any]) -> str:
    return between(60 * price["minutes_low"], 60 * price["minutes_high"])


def _cost(price: dict[str, Any]) -> str:
    return money_between(price["cost_low"], price["cost_high"])


def _price(found: dict[str, Any]) -> str:
    prices = found.get("prices")
    if prices is None:
        return "give --rows N, the number of training rows, for minutes and price"
    if not prices:
        return "no price: no machine on the list has this card and room for this run"
    cheapest = _cheapest(prices)
    among = f", the cheapest of {len(prices)}" if len(prices) > 1 else ""
    return f"{_cost(cheapest)} on {cheapest['flavor']}{among} (HF Jobs, {PRICES_DATE})"


def _cheapest(prices: list[dict[str, Any]]) -> dict[str, Any]:
    return min(prices, key=lambda price: price["cost"])


def _show_bill(found: dict[str, Any], screen: Screen) -> None:
    """Print the lines of the bill, their sum, and what the card holds besides."""
    method = "counted by a dry run" if found["method"] == "dry_run" else "computed by formulas"
    shared = ""
    if found["processes"] > 1:
        shared = f", the fullest of {found['processes']} processes ({found['strategy']})"
    title = f"[bold]{found['model']}[/]{shared}, {found['batch']} x {found['tokens']:,} tokens a micro-batch, {method}"
    screen.wrapped("", title, Text(found["lengths"], style="dim"), "")
    bill = table("what", "bytes", "why", numbers=["bytes"])
    for line in found["lines"]:
        bill.add_row(line["name"], human(line["bytes"]), line["why"])
    bill.add_row("peak", human(found["peak_bytes"]), "the sum so far", style="bold")
    for line in found["around"]:
        bill.add_row(line["name"], human(line["bytes"]), line["why"])
    if found["around"]:
        bill.add_row("needed", human(found["needed_bytes"]), f"of {human(found['capacity_bytes'])}", style="bold")
    host = found.get("host")
    if host:
        of = f"of {human(host['capacity_bytes'])} ({host['name']}), " if host["name"] else ""
        bill.add_row("on the host", human(host["needed_bytes"]), f"{of}while {host['needed_at']}")
    screen.wrapped(bill)


def _show(title: str, shown: Table, screen: Screen) -> None:
    screen.wrapped("", f"[bold]{title}[/]", "", shown)


def _yes_or_no(found: dict[str, Any]) -> str:
    return "[green]yes[/]" if found["fits"] else "[red]no[/]"


def _show_prices(entries: list[dict[str, Any]], screen: Screen) -> None:
    title = f"Training alone, at the prices of Hugging Face Jobs' list of {PRICES_DATE}"
    prices = [f"{price['flavor']}: {_minutes(price)}, {_cost(price)}" for price in entries]
    screen.wrapped("", f"[bold]{title}[/]", "", *prices, Text(f"times are {trust.TIME}", style="dim"))


def _show_suggestions(entries: list[dict[str, Any]], screen: Screen) -> None:
    shown = table("--set", "saves", "time", "fits", numbers=["saves"])
    for entry in entries:
        saved = human(entry["saved_bytes"])
        shown.add_row("\n".join(entry["set"]), saved, speed(entry["slowdown"]), _yes_or_no(entry))
    _show("What would lower the peak, the smallest slowdown first", shown, screen)


def _show_toggles(found: dict[str, Any], screen: Screen) -> None:
    """Print two tables: each switch alone, and each taken away. Both say what changes, from before to after."""
    alone = table("switched on", "peak", "memory", "time", numbers=["peak", "memory"])
    for entry in found["alone"]:
        named = _with_others(entry, "over")
        changed = _more_or_less(-entry["saved_bytes"])
        alone.add_row(named, human(entry["after_bytes"]), changed, speed(entry["slowdown"]))
    _show("Each switch alone, over those that it needs", alone, screen)
    removed = table("switched off", "peak", "memory", "time", numbers=["peak", "memory"])
    for entry in found["removed"]:
        named = _with_others(entry, "and")
        changed = _more_or_less(entry["saved_bytes"])
        without = None if entry["slowdown"] is None else 1 / entry["slowdown"]
        removed.add_row(named, human(entry["before_bytes"]), changed, speed(without))
    _show("What you would lose by switching one off", removed, screen)


def _with_others(entry: dict[str, Any], word: str) -> str:
    return "\n".join([entry["set"], *(f"[dim]  {word} {other}[/]" for other in entry["beside"])])


def _more_or_less(change: int) -> str:
    if not change:
        return "the same"
    return f"{human(abs(change))} {'more' if change > 0 else 'less'}"


def _show_ladder(ladder_steps: list[dict[str, Any]], screen: Screen) -> None:
    shown = table("switched on", "peak", "fits", "time of a token", numbers=["peak"])
    first = ladder_steps[0]["seconds_per_token"]  # plain fp32 full fine-tuning, with which the other times are compared
    for number, entry in enumerate(ladder_steps):
        compared = speed(entry["seconds_per_token"] / first) if number and first is not None else ""
        shown.add_row(", ".join(entry["set"]), human(entry["peak_bytes"]), _yes_or_no(entry), compared)
    _show("The ladder: switches added one after the other, times compared with the first", shown, screen)


def _show_front(entries: list[dict[str, Any]], screen: Screen) -> None:
    shown = table("needs", "fits", "ms a token", "--set", numbers=["needs", "ms a token"])
    for entry in entries:
        milliseconds = ""
        if entry["seconds_per_token"] is not None:
            milliseconds = f"{1000 * entry['seconds_per_token']:.3f}"
        named = " ".join(entry["set"]) or "as it is"
        shown.add_row(human(entry["needed_bytes"]), _yes_or_no(entry), milliseconds, named)
    _show("The front: sets of switches that no other set beats in both memory and time", shown, screen)
