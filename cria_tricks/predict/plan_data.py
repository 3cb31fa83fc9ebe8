"""Make the answer of ``cria plan``: the memory bill of a recipe on a card, and what goes with it."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from cria_tricks.bill.step_time import ends, run_tokens
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.data.lengths import Lengths, full
from cria_tricks.hardware import calibration, this_device, trust
from cria_tricks.hardware.cards import CARDS, FLAVORS, Flavor
from cria_tricks.hardware.gpus import other_versions
from cria_tricks.load import answering_memory
from cria_tricks.load.answering_memory import Answering
from cria_tricks.models.configs import beyond_context
from cria_tricks.models.shape import Shape
from cria_tricks.predict import evaluation, model_settings, toggles
from cria_tricks.predict.answer import Comparison, LadderStep, PlanAnswer, Price, ResultMemory, RunTime, Suggestion
from cria_tricks.predict.host import HostBill, host_bill, loading_doubts, longest_on_host
from cria_tricks.predict.toggles import Change, Setting, Target
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.step_plan import Plan


def answer(
    target: Target,
    recipe: Recipe,
    lengths: Lengths,
    *,
    dry: bool,
    advise: bool,
    longest: bool,
    rows: int | None,
) -> PlanAnswer:
    """Put the bill, the comparisons and whatever else was asked for into one answer.

    Args:
        target: the model and the card.
        recipe: the recipe that would run.
        lengths: the lengths of its rows.
        dry: count the bytes by a dry run, as in :func:`bill`.
        advise: add ``front``, the best switch sets.
        longest: add ``longest``, the length of the longest row that fits [tokens], and ``longest_on_host``.
        rows: the number of training rows, for ``prices``; ``None`` for no prices.

    Raises:
        BadInput: for what :func:`bill` refuses, and a number of rows below 1.
    """
    found = run_bill(target, recipe, lengths, dry=dry, rows=rows)
    found = replace(
        found,
        alone=[_comparison(change) for change in toggles.alone(target, recipe)],
        removed=[_comparison(change) for change in toggles.removed(target, recipe)],
        ladder=[_step(target, setting) for setting in toggles.ladder(target, recipe)],
    )
    if advise:
        found = replace(found, front=[_step(target, setting) for setting in toggles.front(target, recipe)])
    if longest:
        most = toggles.longest(target, recipe)
        found = replace(found, longest=most)
        if target.host:
            found = replace(found, longest_on_host=longest_on_host(target, recipe, most))
    if rows is not None:
        found = replace(found, prices=prices(target, recipe, rows, lengths))
    return found


def run_bill(
    target: Target,
    recipe: Recipe,
    lengths: Lengths,
    *,
    dry: bool = False,
    rows: int | None = None,
) -> PlanAnswer:
    """Estimate the memory on the card and on the host, and the time of a step.

    The arguments are those of :func:`answer`, whose comparisons and prices are left out here.
    """
    found = bill(target, recipe, dry=dry, lengths=lengths)
    of_result = answering_memory.of_result(recipe, target.shape, target.device, lengths)
    found = replace(found, answering=[_result_memory(one) for one in of_result])
    warnings = list(found.warnings)
    if found.verdict != "does not fit":  # else there will be no result
        warnings += [sentence for one in of_result for sentence in one.in_words]
    if rows is not None:
        found = replace(found, run=run_time(target, recipe, rows, lengths))
    on_host = host_bill(target, recipe)
    if on_host:
        warnings += _host_doubts(on_host)
        fits = found.fits and on_host.verdict != "does not fit"
        found = replace(found, fits=fits, host=on_host.for_plan)
    return replace(found, warnings=warnings)


def bill(target: Target, recipe: Recipe, *, dry: bool = False, lengths: Lengths | None = None) -> PlanAnswer:
    """Estimate the memory and the time of a recipe on a card.

    Args:
        target: the model and the card.
        recipe: the recipe that would run.
        dry: count the bytes by a dry run of the real modules, which takes seconds; otherwise by closed formulas.
        lengths: the lengths of the rows, the longest of which has ``data.max_length`` tokens; when left out, all rows
            are taken as that long.

    Returns:
        The answer up to ``suggestions``. Its bytes are those of the process that needs most.

    Raises:
        BadInput: for a switch that cannot work on the card or with the model, or a dry run of several processes.
    """
    plan = target.resolve(recipe)
    model_settings.refuse_other_storage(target.shape, recipe)
    if dry and target.processes > 1:
        raise BadInput(f"--dry-run with --nproc {target.processes}: it runs one process; leave one of them out")
    setting = target.bill(recipe)
    lines, moment = setting.memory.lines, setting.memory.peak.name
    if dry:
        from cria_tricks.predict.dry_run import lines_of_peak  # it imports transformers, which takes seconds

        lines, moment = lines_of_peak(recipe, plan, setting.memory, target.evaluated.tokens)
    peak = sum(line.bytes for line in lines)
    needed = peak + sum(line.bytes for line in setting.memory.around)
    capacity = target.device.memory_bytes
    verdict = trust.verdict(needed, capacity, needed - setting.memory.unused.bytes)
    lengths = lengths or full(recipe, "all that data.max_length allows")
    return PlanAnswer(
        model=target.shape.name,
        gpu=target.device.name,
        strategy=recipe.parallel.strategy,
        processes=target.processes,
        batch=recipe.train.batch_size,
        tokens=recipe.data.max_length,
        mean_tokens=lengths.mean,
        data_rows=lengths.rows,
        lengths=lengths.in_words,
        capacity_bytes=capacity,
        peak_bytes=peak,
        peak_at=moment,
        needed_bytes=needed,
        least_bytes=needed - setting.memory.unused.bytes,
        fits=verdict != "does not fit",
        verdict=verdict,
        context=target.shape.context,
        method="dry_run" if dry else "closed_form",
        lines=list(lines),
        around=list(setting.memory.around),
        **_times(setting, plan, lengths),
        warnings=[*plan.warnings, *doubts(target, recipe, verdict)],
        suggestions=[_suggestion(target, change) for change in toggles.suggestions(target, recipe)],
    )


def _times(setting: Setting, plan: Plan, lengths: Lengths) -> dict[str, Any]:
    """Return the time of an optimizer step, both ends of its range, and what backs the range."""
    if setting.seconds is None:
        return dict.fromkeys(("seconds_per_step", "seconds_per_step_low", "seconds_per_step_high", "seconds_by"))
    recipe = setting.recipe
    mean = plan.collator.get("packed_length", lengths.mean)  # a packed row is filled up to its whole length
    seconds = setting.seconds * (recipe.train.batch_size * mean * recipe.tricks.gradient_accumulation)
    low, high = ends(seconds, setting.spread)
    return {
        "seconds_per_step": seconds,
        "seconds_per_step_low": low,
        "seconds_per_step_high": high,
        "seconds_by": setting.by,
    }


def suggestions(target: Target, recipe: Recipe, settings: Iterable[Setting]) -> list[Suggestion]:
    """Compare whole settings with a recipe."""
    before = target.bill(recipe)
    return [_suggestion(target, Change("", (), before, after)) for after in settings]


def _suggestion(target: Target, change: Change) -> Suggestion:
    peak = change.after.memory.peak_bytes
    return Suggestion(list(change.after.set), peak, change.saved_bytes, change.slowdown, _fits(target, change.after))


def _fits(target: Target, setting: Setting) -> bool:
    """Whether the card and the host have room for a setting."""
    on_host = host_bill(target, setting.recipe) if target.host else None
    return setting.memory.fits and not (on_host and on_host.verdict == "does not fit")


def doubts(target: Target, recipe: Recipe, verdict: str) -> list[str]:
    """Warn of what may go wrong although no switch is refused.

    There are four such risks: rows longer than the model's context, a narrow fit, a model that fits the cards only
    after it was cut, and an evaluation that needs more than a training step. A calibration of this machine that is
    stale is said, too, and which version of a card was taken if there are several.
    """
    found: list[str] = []
    # A packed row holds several documents, and positions start at 0 in each. Only the data show how long they are.
    plan = target.resolve(recipe)
    if "packed_length" not in plan.collator:
        found += beyond_context(target.shape.context, recipe.data.max_length)
    if verdict == "tight":
        found.append(trust.TIGHT)
    found += loading_doubts(target, recipe)
    found += evaluation.doubts(target.memory(recipe), recipe, target.evaluated)
    versions = other_versions(target.device)
    if versions or calibration.read():  # which machine this is matters only then, and torch is imported to know it
        here = target.device == this_device()
        found += filter(None, [calibration.stale(target.device) if here else versions])
    return found


def _host_doubts(memory: HostBill) -> list[str]:
    """Warn if the host's memory may not be enough."""
    if memory.host is None or memory.verdict == "fits":
        return []
    needs = f"{human(memory.peak.bytes)} on the host while {memory.peak.name}"
    return [f"{memory.verdict} {memory.host.name}: the run needs {needs}, of {human(memory.host.memory_bytes)}"]


def run_time(target: Target, recipe: Recipe, rows: int, lengths: Lengths | None = None) -> RunTime | None:
    """Estimate the minutes of the whole run on the card that was asked for, whether or not it can be rented.

    The arguments are those of :func:`prices`. It is ``None`` if the card's rates are not known, or if the run does not
    fit.

    Raises:
        BadInput: if the number of rows is below 1.
    """
    if rows < 1:
        raise BadInput(f"--rows {rows}: must be a whole number above 0")
    setting = target.bill(recipe)
    if setting.seconds is None or not setting.memory.fits:
        return None
    minutes = _run_seconds(recipe, setting.seconds, rows, lengths) / 60
    return RunTime(minutes, *ends(minutes, setting.spread))


def _run_seconds(recipe: Recipe, of_token: float, rows: int, lengths: Lengths | None) -> float:
    """Estimate the time of training on so many rows; of one token it is given."""
    # If the run's length is given in steps, packed rows count, which are full; if in epochs, the rows of the data.
    packed_steps = recipe.tricks.packing and recipe.train.max_steps
    mean: float = recipe.data.max_length
    if lengths and not packed_steps:
        mean = lengths.mean
    return of_token * run_tokens(recipe, rows, mean)


def prices(target: Target, recipe: Recipe, rows: int, lengths: Lengths | None = None) -> list[Price]:
    """Estimate the minutes and the price of the run, on each rented machine that has this card and room for it.

    Evaluations and the answers of ``eval.samples`` are not in the minutes.

    Args:
        target: the model and the card.
        recipe: the recipe that would run.
        rows: the number of training rows.
        lengths: the lengths of the rows; when left out, each has ``data.max_length`` tokens.
    """
    found = []
    for flavor in FLAVORS.values():
        if target.card is None or CARDS[flavor.card].device.name != target.card.device.name:
            continue
        try:
            setting = on_machine(recipe, target.shape, flavor)
        except BadInput:  # the cards of this machine cannot share this run
            continue
        if setting.memory.fits and setting.seconds is not None:
            seconds = _run_seconds(recipe, setting.seconds, rows, lengths)
            minutes = seconds / 60
            cost = minutes / 60 * flavor.price
            spread = (*ends(minutes, setting.spread), *ends(cost, setting.spread))
            found.append(Price(flavor.name, minutes, cost, *spread))
    return found


def on_machine(recipe: Recipe, shape: Shape, flavor: Flavor) -> Setting:
    """Estimate a recipe on a rented machine: the bytes on each of its cards, and the time of a token on all together.

    With several cards and no strategy in the recipe, they share the run by ``ddp``.

    Raises:
        BadInput: for a switch that cannot work there, or a run that the machine's cards cannot share.
    """
    if flavor.cards > 1 and recipe.parallel.strategy == "none":
        recipe = with_settings(recipe, ["parallel.strategy=ddp"])
    device = CARDS[flavor.card].device
    target = Target(shape, device, flavor.cards)
    target.resolve(recipe)
    return target.bill(recipe)


def _result_memory(one: Answering) -> ResultMemory:
    plain = one.plain.memory
    way = one.fitting
    found = ResultMemory(one.command, plain.needed_bytes, plain.least_bytes, plain.verdict, None, None)
    if way:
        found = replace(found, options=list(way.options), options_bytes=way.memory.least_bytes)
    return found


def _comparison(change: Change) -> Comparison:
    before = change.before.memory.peak_bytes
    after = change.after.memory.peak_bytes
    return Comparison(change.set, list(change.beside), before, after, change.saved_bytes, change.slowdown)


def _step(target: Target, setting: Setting) -> LadderStep:
    memory = setting.memory
    fits = _fits(target, setting)
    return LadderStep(list(setting.set), memory.peak_bytes, memory.needed_bytes, fits, setting.seconds)
