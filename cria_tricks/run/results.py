"""Write what a run leaves: the report, and the adapter or the whole model."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter import model_card, provenance
from cria_tricks.bill.bill import Bill
from cria_tricks.common.errors import BadInput
from cria_tricks.data.lengths import as_long_as
from cria_tricks.load.model import Loaded
from cria_tricks.measure import profiler
from cria_tricks.measure.memory import Meter
from cria_tricks.measure.monitor import Monitor
from cria_tricks.models import Weights, identity
from cria_tricks.models.configs import context_of
from cria_tricks.models.shape import Shape, find_shape
from cria_tricks.parallel import dtensor
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe
from cria_tricks.report import page
from cria_tricks.report import summary as report
from cria_tricks.run.job import Job
from cria_tricks.store import adaptations
from cria_tricks.trainer.fit import Run
from cria_tricks.tricks import lora


@dataclass(frozen=True)
class Trained:
    """What is in memory after training.

    Attributes:
        loaded: the trained model; with some strategies, only this process's part of it.
        parameters: the numbers of ``trainable`` and ``total`` parameters of the whole model.
        run: what happened.
        meter: the seconds, and the peak bytes by phase.
        monitor: the samples of the machine.
        estimated: the estimated memory bill; ``None`` for a kind of model that cannot be estimated.
    """

    loaded: Loaded
    parameters: dict[str, int]
    run: Run
    meter: Meter
    monitor: Monitor
    estimated: Bill | None


def write(
    job: Job,
    weights: Weights,
    tokenizer: PreTrainedTokenizerBase,
    rows: dict[str, Any],
    trained: Trained,
    began_over: Mapping[str, Any],
) -> dict[str, Any]:
    """Write the report, and the adapter or the whole model.

    All processes must call this, because each may hold a part of the weights; rank 0 writes.

    Args:
        job: the job.
        weights: where the base model is.
        tokenizer: its tokenizer, which is saved with the adapter.
        rows: the ``train`` and ``eval`` token rows.
        trained: the result of training.
        began_over: the identity of the base that a resumed run began with, if it is another one; else empty.

    Returns:
        The report, as in ``report.json``.
    """
    recipe = job.recipe
    world = job.world
    model = trained.loaded.model
    folder = job.folders.folder / ("adapter" if job.plan.peft else "model")
    descriptions = {part: source.description for part, source in job.sources.items()}
    context = context_of(weights.path)
    summary = report.summarise(
        recipe, job.plan, trained.run, trained.meter, rows, descriptions, trained.parameters, context
    )
    adapted = job.folders.adapted
    summary |= report.compare(trained.estimated, trained.run, trained.meter, adapted[-1].step if adapted else 0)
    summary["adapted"] = adaptations.written(adapted)
    summary |= _step_seconds(job, weights, rows, trained)
    about = {"adapter": str(folder), "model": weights.name, "model_note": weights.note}
    summary |= about | {"base": identity.of(weights)}
    summary["monitor"] = world.gather(trained.monitor.summary())
    summary["profile"] = profiler.read(job.folders.folder / "profile") if recipe.train.profile else None
    made = provenance.describe(summary, weights, job.sources, began_over)
    if job.plan.parallel["strategy"] == "pipeline":
        summary["pipeline"] = report.of_the_pipeline(job.plan, trained.run, model)
        made |= {"pipeline": summary["pipeline"]}
    text = model_card.model_card(summary, made, weights.name, weights.note, recipe)
    in_one = dtensor.weights(model, world)

    def on_rank_zero() -> None:
        artifact.save(folder, model, tokenizer, weights.name, text, recipe, made, in_one)
        page.write(job.folders.folder, summary)
        job.folders.mirror_results()

    world.on_rank_zero(on_rank_zero)
    return summary


def _step_seconds(job: Job, weights: Weights, rows: dict[str, Any], trained: Trained) -> dict[str, Any]:
    """Compare the predicted seconds of a step, for rows of the mean length, with the measured ones."""
    shape = shape_of(job.recipe, weights.path)
    target = Target(shape, job.plan.device, job.world.size) if shape else None
    if target is None:
        return report.compare_seconds(None, trained.run)
    train = rows["train"]
    mean = job.plan.collator.get("packed_length") or max(8, round(train.tokens / max(1, train.count)))
    predicted = target.bill(as_long_as(mean, job.recipe))
    return report.compare_seconds(predicted, trained.run)


def shape_of(recipe: Recipe, model: str) -> Shape | None:
    """Return the model's shape; ``None`` if this kind of model or of adapter cannot be estimated."""
    try:
        shape = find_shape(model)
        lora.refuse_unestimated(recipe, shape)
    except BadInput:
        return None
    return shape
