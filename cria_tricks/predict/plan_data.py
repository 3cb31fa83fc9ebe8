"""What ``cria plan`` answers: the bill of a recipe on a card as plain data, and on the screen."""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from cria_tricks.bill.rows import Row
from cria_tricks.bill.step_time import Run, run_tokens
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import duration, human, money
from cria_tricks.data.lengths import Lengths, full
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import CARDS, FLAVORS, PRICES_DATE, Flavor
from cria_tricks.models.configs import beyond_context, find_config
from cria_tricks.models.shape import Shape
from cria_tricks.predict import toggles
from cria_tricks.predict.toggles import Bench, Change, Setting
from cria_tricks.recipe import Recipe, with_settings


def bill(bench: Bench, recipe: Recipe, *, dry: bool = False, lengths: Lengths | None = None) -> dict[str, Any]:
    """Estimate a recipe.

    Args:
        bench: the model and the card.
        recipe: what would run.
        dry: by dry run of the real modules, which takes seconds; by hand otherwise.
        lengths: of the rows, the longest of which has ``data.max_length`` tokens; all are full when left out.

    Returns:
        ``model``, ``gpu``, ``strategy``, ``processes``, ``batch``, ``tokens`` (of the longest row), ``mean_tokens``,
        ``data_rows`` and ``lengths`` (what the rows are taken for), ``capacity_bytes``, ``peak_bytes`` (of the step's
        tensors, in the process that needs most), ``needed_bytes`` (with all that the card holds besides),
        ``fits``, ``context`` (of the model), ``method``, ``rows`` and ``around`` (``name``, ``bytes``, ``why``; the
        rows sum to the peak, with ``around`` to what is needed), ``seconds_per_step`` (none where the card's rates are
        not known), ``warnings`` and ``suggestions`` (``set``, ``peak_bytes``, ``saved_bytes``, ``slowdown``, ``fits``).

    Raises:
        BadInput: for a toggle that cannot work there.
    """
    plan = bench.resolve(recipe)
    if dry and bench.processes > 1:
        raise BadInput(f"--dry-run with --nproc {bench.processes}: it runs one process; leave one of them out")
    setting = bench.bill(recipe)
    memory, around = setting.memory, setting.memory.around
    rows = _dry_rows(bench, recipe, plan) if dry else memory.rows
    peak = sum(row.bytes for row in rows)
    needed = peak + sum(row.bytes for row in around)
    capacity = bench.device.memory_bytes
    lengths = lengths or full(recipe, "all that data.max_length allows")
    mean = plan.collator.get("packed_length", lengths.mean)  # packed rows are full
    tokens = recipe.train.batch_size * mean * recipe.tricks.gradient_accumulation
    return {
        "model": bench.shape.name,
        "gpu": bench.device.name,
        "strategy": recipe.parallel.strategy,
        "processes": bench.processes,
        "batch": recipe.train.batch_size,
        "tokens": recipe.data.max_length,
        "mean_tokens": lengths.mean,
        "data_rows": lengths.rows,
        "lengths": lengths.in_words,
        "capacity_bytes": capacity,
        "peak_bytes": peak,
        "needed_bytes": needed,
        "fits": needed <= capacity,
        "context": bench.shape.context,
        "method": "dry_run" if dry else "closed_form",
        "rows": [asdict(row) for row in rows],
        "around": [asdict(row) for row in around],
        "seconds_per_step": None if setting.seconds is None else setting.seconds * tokens,
        "warnings": [*plan.warnings, *doubts(bench, recipe, needed)],
        "suggestions": [
            {
                "set": change.set,
                "peak_bytes": change.after.memory.peak_bytes,
                "saved_bytes": change.saved_bytes,
                "slowdown": change.slowdown,
                "fits": change.after.memory.fits,
            }
            for change in toggles.suggestions(bench, recipe)
        ],
    }


def comparisons(bench: Bench, recipe: Recipe) -> dict[str, list[dict[str, Any]]]:
    """What each toggle of a recipe does: ``alone``, ``removed`` from the whole, and the ``ladder``."""
    return {
        "alone": [_change(change) for change in toggles.alone(bench, recipe)],
        "removed": [_change(change) for change in toggles.removed(bench, recipe)],
        "ladder": [_setting(setting) for setting in toggles.ladder(bench, recipe)],
    }


def front(bench: Bench, recipe: Recipe) -> list[dict[str, Any]]:
    """All toggle sets of which none is both smaller and faster, the fastest first."""
    return [_setting(setting) for setting in toggles.front(bench, recipe)]


def doubts(bench: Bench, recipe: Recipe, needed: int) -> list[str]:
    """Warn of what may go wrong although no toggle is refused: the context, the margin, the host's memory."""
    # A packed row holds several documents, and positions start again in each; only the data show how long they are.
    plan = bench.resolve(recipe)
    packed = "packed_length" in plan.collator
    found = [] if packed else beyond_context(bench.shape.context, recipe.data.max_length)
    if narrow := trust.may_not_fit(needed, bench.device.memory_bytes):
        found.append(narrow)
    if "activation_offload" in plan.step_context:
        found.append(trust.HOST)
    return found


def prices(bench: Bench, recipe: Recipe, rows: int, lengths: Lengths | None = None) -> list[dict[str, Any]]:
    """Compute minutes and price of the run on the rented machines that have this card, and on which it fits.

    Args:
        bench: the model and the card.
        recipe: what would run.
        rows: training rows.
        lengths: of these; each is as long as a row can be when left out.
    """
    if rows < 1:
        raise BadInput(f"--rows {rows}: must be a whole number above 0")
    packed_steps = recipe.tricks.packing and recipe.train.max_steps  # whose rows are full
    mean = lengths.mean if lengths and not packed_steps else recipe.data.max_length
    found, tokens = [], run_tokens(recipe, rows, mean)
    for flavor in FLAVORS.values():
        if CARDS[flavor.card] is not bench.card:
            continue
        try:
            setting = on_machine(recipe, bench.shape, flavor)
        except BadInput:  # its cards cannot share this run out among them
            continue
        if setting.memory.fits and setting.seconds is not None:
            run = Run(flavor, setting.seconds * tokens / 60)
            found.append({"flavor": flavor.name, "minutes": run.minutes, "cost": run.cost})
    return found


def on_machine(recipe: Recipe, shape: Shape, flavor: Flavor) -> Setting:
    """Compute what a recipe takes on a rented machine: bytes on each of its cards, seconds of a token on all of them.

    Raises:
        BadInput: for a toggle that cannot work there, or a run that its cards cannot share.
    """
    if flavor.cards > 1 and recipe.parallel.strategy == "none":
        recipe = with_settings(recipe, ["parallel.strategy=ddp"])
    device = CARDS[flavor.card].device
    bench = Bench(shape, device, flavor.cards)
    bench.resolve(recipe)
    return bench.bill(recipe)


def show(found: dict[str, Any], screen: Console) -> None:
    """Print a bill and what was asked for beside it."""
    screen.print(
        f"[bold]{found['model']}[/] on {found['gpu']}{_shared(found)}, "
        f"{found['batch']} x {found['tokens']:,} tokens a micro-batch, "
        f"{'by dry run' if found['method'] == 'dry_run' else 'by hand'}",
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
    besides = " + ".join(f"{row['name']} {human(row['bytes'])}" for row in found["around"])
    verdict = "[green]fits[/]" if found["fits"] else "[red]does not fit[/]"
    screen.print(
        f"{verdict}: needs {human(found['needed_bytes'])}"
        + (f" (the peak + {besides})" if besides else "")
        + f" of {human(found['capacity_bytes'])}",
        highlight=False,
    )
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
    if "front" in found:
        _show_front(found["front"], screen)
    if "longest" in found:
        beyond = f"; the model's context is {found['context']:,}" if found["longest"] > found["context"] > 0 else ""
        screen.print(f"\nlongest row that fits: {found['longest']:,} tokens{beyond}", highlight=False)
    if "prices" in found:
        _show_prices(found["prices"], screen)


def _show_prices(entries: Iterable[dict[str, Any]], screen: Console) -> None:
    said = [f"{price['flavor']}: {duration(60 * price['minutes'])}, {money(price['cost'])}" for price in entries]
    if said:
        said[0] = f"training alone, at the prices of Hugging Face Jobs' list of {PRICES_DATE}:\n{said[0]}"
    screen.print("\n".join(said) or "no price: no machine on the list has this card and room for this run",
                 highlight=False)  # fmt: skip


def _shared(found: dict[str, Any]) -> str:
    return f", the fullest of {found['processes']} ({found['strategy']})" if found["processes"] > 1 else ""


def _show_suggestions(found: dict[str, Any], screen: Console) -> None:
    table = Table(title="what to flip, the smallest slowdown first", title_justify="left")
    for column in ("--set", "saves", "time", "peak", ""):
        table.add_column(column, justify="left" if column in ("--set", "") else "right", no_wrap=True)
    for entry in found["suggestions"]:
        fits = "[green]fits[/]" if entry["fits"] else "[red]does not fit[/]"
        table.add_row(
            entry["set"], human(entry["saved_bytes"]), _times(entry["slowdown"]), human(entry["peak_bytes"]), fits
        )
    screen.print()
    screen.print(table)


def _show_comparisons(found: dict[str, Any], screen: Console) -> None:
    for key, title, beside, before, after in (
        ("alone", "each toggle alone, over what it needs", "beside", "without", "with it"),
        ("removed", "each toggle taken away from the whole, with what cannot stay", "and", "without", "with all"),
    ):
        table = Table(title=title, title_justify="left")
        for column in ("toggle", before, after, "saves", "time"):
            table.add_column(column, justify="left" if column == "toggle" else "right", no_wrap=True)
        for entry in found[key]:
            table.add_row(
                "\n".join([entry["set"], *(f"[dim]  {beside} {other}[/]" for other in entry["beside"])]),
                human(entry["before_bytes"]),
                human(entry["after_bytes"]),
                human(entry["saved_bytes"]),
                _times(entry["slowdown"]),
            )
        screen.print()
        screen.print(table)
    table = Table(title="the ladder: one after the other", title_justify="left")
    for column in ("toggle", "peak", "fits", "time of a token"):
        table.add_column(column, justify="left" if column in ("toggle", "fits") else "right", no_wrap=True)
    first = found["ladder"][0]["seconds_per_token"]
    for entry in found["ladder"]:
        fits = "[green]yes[/]" if entry["fits"] else "[red]no[/]"
        times = None if first is None else entry["seconds_per_token"] / first
        table.add_row(", ".join(entry["set"]), human(entry["peak_bytes"]), fits, _times(times))
    screen.print()
    screen.print(table)


def _show_front(entries: Iterable[dict[str, Any]], screen: Console) -> None:
    table = Table(title="toggle sets of which none is both smaller and faster", title_justify="left")
    for column in ("needs", "fits", "ms a token", "--set"):
        table.add_column(column, justify="left" if column in ("fits", "--set") else "right", no_wrap=column != "--set")
    for entry in entries:
        fits = "[green]yes[/]" if entry["fits"] else "[red]no[/]"
        seconds = entry["seconds_per_token"]
        named = " ".join(entry["set"]) or "as it is"
        table.add_row(human(entry["needed_bytes"]), fits, "" if seconds is None else f"{1000 * seconds:.3f}", named)
    screen.print()
    screen.print(table)


def _times(ratio: float | None) -> str:
    return "" if ratio is None else f"x {ratio:.2f}"


def _change(change: Change) -> dict[str, Any]:
    return {
        "set": change.set,
        "beside": list(change.beside),
        "before_bytes": change.before.memory.peak_bytes,
        "after_bytes": change.after.memory.peak_bytes,
        "saved_bytes": change.saved_bytes,
        "slowdown": change.slowdown,
    }


def _setting(setting: Setting) -> dict[str, Any]:
    return {
        "set": list(setting.set),
        "peak_bytes": setting.memory.peak_bytes,
        "needed_bytes": setting.memory.needed_bytes,
        "fits": setting.memory.fits,
        "seconds_per_token": setting.seconds,
    }


def _dry_rows(bench: Bench, recipe: Recipe, plan: Any) -> tuple[Row, ...]:
    from transformers import AutoConfig

    from cria_tricks.predict.dry_run import dry_run

    config = find_config(recipe.model)
    config = config.get("text_config") or config
    run = dry_run(plan, AutoConfig.for_model(**config), recipe.train.batch_size, recipe.data.max_length)
    moment = max(run.moments, key=lambda name: run.moments[name])
    return (
        Row("weights", run.weights_bytes, "the loaded model, what is added to it included"),
        Row("everything else", run.peak_bytes - run.weights_bytes, f"counted in the {moment}"),
    )
