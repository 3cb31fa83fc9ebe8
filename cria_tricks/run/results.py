"""Write what a run leaves: the report, the adapter or the whole model, and those of its best evaluation."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter import model_card, provenance
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput
from cria_tricks.data.lengths import as_long_as
from cria_tricks.data.stream import Stream
from cria_tricks.measure import profiler
from cria_tricks.measure.utilisation import Utilisation, of_run
from cria_tricks.models import identity
from cria_tricks.models.configs import context_of
from cria_tricks.models.shape import Shape, find_shape
from cria_tricks.parallel import dtensor
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe
from cria_tricks.report import page
from cria_tricks.report import summary as report
from cria_tricks.run.job import Job
from cria_tricks.store.run_folder import BEST
from cria_tricks.switches import lora
from cria_tricks.trainer.fit import Run


def write(job: Job, run: Run) -> dict[str, Any]:
    """Write the report, and the adapter or the whole model.

    All processes must call this, because each may hold a part of the weights; rank 0 writes.

    Args:
        job: the job.
        run: what happened.

    Returns:
        The report, as in ``report.json``.
    """
    world = job.world
    folder = job.folders.folder / ("adapter" if job.plan.peft else "model")
    summary = _summary(job, run, folder)
    summary["monitor"] = world.gather(job.monitor.summary())
    if summary["estimate"] and world.size > 1:  # the peaks of the steps are the largest of all processes
        own_peak = job.meter.phases["train"]["allocated_bytes"]
        summary["estimate"]["measured_by_process"] = world.gather(own_peak)
    summary["profile"] = profiler.read(job.folders.folder / "profile") if job.recipe.train.profile else None
    summary["best"] = kept_before(job) or None if job.recipe.train.keep_best else None
    save = _saving(job, run, folder, summary)

    def on_rank_zero() -> None:
        save()
        page.write(job.folders.folder, summary)
        job.folders.mirror_results()

    world.on_rank_zero(on_rank_zero)
    return summary


def keep(job: Job, run: Run) -> None:
    """Write the weights of the evaluation that just was into the folder ``best``, whole, as the result will be.

    All processes must call this, as :func:`write`. Its card and its provenance tell of the run up to this step.

    Args:
        job: the job.
        run: the results so far.
    """
    if isinstance(job.rows["train"], Stream):
        job.rows["train"].add_up(job.world)
    folder = job.folders.folder / BEST
    last = run.evaluations[-1]
    summary = _summary(job, run, folder)
    summary["monitor"] = [None] * job.world.size  # the samples are for the report of the whole run
    kept = {"step": last["step"], "eval_loss": last["eval_loss"]}
    save = _saving(job, run, folder, summary, kept)

    def on_rank_zero() -> None:
        save()
        job.folders.mirror_best()
        job.console.print(f"  the lowest so far: kept in {folder}", markup=False, highlight=False)

    job.world.on_rank_zero(on_rank_zero)


def kept_before(job: Job) -> dict[str, Any]:
    """Read which evaluation the folder ``best`` is of: ``step`` and ``eval_loss``; empty if there is no whole one."""
    folder = job.folders.folder / BEST

    def look() -> dict[str, Any]:
        if not folder.exists():
            return {}
        damaged = atomic_files.damage(folder)
        if damaged:
            job.warn([f"{folder}: {damaged}; it is kept anew after the next evaluation"])
            return {}
        try:
            return dict(json.loads((folder / artifact.PROVENANCE).read_text(encoding="utf-8"))["kept"])
        except (OSError, ValueError, KeyError, TypeError):  # made by hand
            return {}

    return job.world.on_rank_zero(look)


def _summary(job: Job, run: Run, folder: Path) -> dict[str, Any]:
    """Return what the report and a model card have in common.

    Args:
        job: the job.
        run: what happened.
        folder: where the weights are written.
    """
    descriptions = {part: source.description for part, source in job.sources.items()}
    context = context_of(job.weights.path)
    summary = report.summarise(job.recipe, job.plan, run, job.meter, job.rows, descriptions, job.parameters, context)
    summary |= report.compare(job.estimated, run, job.meter)
    summary |= _speeds(job, run)
    summary |= {"adapter": str(folder), "model": job.weights.name, "model_note": job.weights.note}
    return summary | {"base": identity.of(job.weights)}


def _saving(
    job: Job,
    run: Run,
    folder: Path,
    summary: dict[str, Any],
    kept: Mapping[str, Any] | None = None,
) -> Callable[[], None]:
    """Gather the weights from all processes, and return the function by which rank 0 saves them with their card.

    Args:
        job: the job.
        run: what happened.
        folder: where they are written.
        summary: the report; that of a pipeline is added to it.
        kept: ``step`` and ``eval_loss`` of the evaluation, for the folder ``best``.
    """
    model = job.loaded.model
    weights = job.weights
    made = provenance.describe(summary, job.sources, job.began_over)
    if "continued_from" in job.folders.about:
        made |= {"continued_from": job.folders.about["continued_from"]}
    if job.plan.parallel["strategy"] == "pipeline":
        summary["pipeline"] = report.of_the_pipeline(job.plan, run, model)
        made |= {"pipeline": summary["pipeline"]}
    if kept:
        made |= {"kept": kept}
    text = model_card.model_card(made, weights.name, weights.note, job.recipe)
    in_one = dtensor.weights(model, job.world)
    return lambda: artifact.save(folder, model, job.tokenizer, weights.name, text, job.recipe, made, in_one)


def _speeds(job: Job, run: Run) -> dict[str, Any]:
    """Compare the predicted seconds of a step, for rows of the mean length, with the measured ones; and add MFU."""
    shape = shape_of(job.recipe, job.weights.path)
    target = Target(shape, job.plan.device, job.world.size) if shape else None
    if target is None:
        return report.compare_seconds(None, run) | report.utilisation(None, run)
    predicted = target.bill(as_long_as(mean_tokens(job, job.rows["train"]), job.recipe))
    counted = counted_work(job, job.rows["train"], target.shape)
    return report.compare_seconds(predicted, run) | report.utilisation(counted, run)


def counted_work(job: Job, train: Any, shape: Shape) -> Utilisation:
    """Count the operations of a token of this run, for rows of the mean length; the peak is that of its cards."""
    share = train.trained_tokens / max(1, train.tokens) or 1.0
    return of_run(job.plan, job.recipe, shape, job.world.size, mean_tokens(job, train), share)


def mean_tokens(job: Job, train: Any) -> int:
    """Return the mean length of the rows that are trained on [tokens]: the packed ones, if they are packed.

    The rows of a stream that was not read yet are taken as full.
    """
    if not train.count:
        return job.recipe.data.max_length
    return job.plan.collator.get("packed_length") or max(8, round(train.tokens / train.count))


def shape_of(recipe: Recipe, model: str) -> Shape | None:
    """Return the model's shape; ``None`` if this kind of model or of adapter cannot be estimated."""
    try:
        shape = find_shape(model)
        lora.refuse_unestimated(recipe, shape)
    except BadInput:
        return None
    return shape
