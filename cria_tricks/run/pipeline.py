"""Recipe -> Report + adapter, over a pipeline; ``cria_tricks.cli.pipeline_command`` is its command.

The way of ``run/run.py`` with another loop in the middle: rows, their order, loading, report and adapter are the same.
It has no checkpoints, and so nothing that rests on them: ``--resume`` and ``train.time_budget``.

The functions import the heavy libraries once the recipe, the data and the folder have been checked.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.models.configs import context_of
from cria_tricks.parallel.pipeline import bubble
from cria_tricks.processes import numbers
from cria_tricks.processes import world as processes
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan

if TYPE_CHECKING:
    from cria_tricks.data.sources import Source
    from cria_tricks.models import Weights
    from cria_tricks.store.run_folder import Folders
    from cria_tricks.trainer.pipeline_loop import Loop

COMMAND = "torchrun --nproc-per-node {} -m cria_tricks.cli.pipeline_command"
NOT_LORA = {
    "none": "an embedding that is tied to the head would train in two stages",
    "head": "only the last stage would train",
    "prompt_tuning": "only the first stage would train, and rows would grow in all",
    "side_network": "only the last stages would train",
}
"""Why ``tricks.peft`` must be ``lora``."""


def refuse(recipe: Recipe, size: int, data: int) -> None:
    """Hold a recipe against the loop and the number of processes.

    Args:
        recipe: what is to be trained.
        size: processes.
        data: pipelines.

    Raises:
        BadInput: for what does not work in a pipeline, with the reason and what to use.
    """
    stages, k = size // data, recipe.tricks.gradient_accumulation
    if recipe.parallel.strategy != "none":
        raise BadInput(
            f"parallel.strategy={recipe.parallel.strategy} in a pipeline: it is for cria train; leave it out"
        )
    if size % data or stages < 2:
        raise BadInput(
            f"{size} process{'es' * (size > 1)} for {data} pipeline{'s' * (data > 1)}: each takes as many, and two or "
            f"more; start {2 * data}: {COMMAND.format(2 * data)} {recipe.name}{f' --data {data}' * (data > 1)}"
        )
    if why := NOT_LORA.get(recipe.tricks.peft):
        raise BadInput(f"tricks.peft={recipe.tricks.peft} in a pipeline: {why}; set tricks.peft=lora")
    if k % data or k // data < stages:
        raise BadInput(
            f"tricks.gradient_accumulation={k} with {size} processes: a pipeline takes at least as many of a step's "
            f"micro-batches as it has stages ({stages}), and no more than another one; set "
            f"tricks.gradient_accumulation={-(-max(k, size) // data) * data}"
        )
    for name in ("profile", "report_to"):
        if getattr(recipe.train, name):
            raise BadInput(f"train.{name} in a pipeline: it is for cria train; leave it out")
    if recipe.data.stream:
        raise BadInput("data.stream=true in a pipeline: its rows are dealt out beforehand; set data.stream=false")
    if recipe.train.time_budget:
        raise BadInput("train.time_budget in a pipeline: there are no checkpoints to stop at; leave it out")


def find_blocks(sizes: str, layers: int, stages: int, kind: str) -> list[range]:
    """Which blocks each stage has.

    Args:
        sizes: e.g. ``"18,12"``; equally many when empty, and one more in the first stages, as the last has the head.
        layers: of the model.
        stages: how many there are.
        kind: the model's ``model_type``.

    Raises:
        BadInput: if they do not fit the model, or it is of a kind that cannot be cut.
    """
    from cria_tricks.trainer.pipeline_part import KINDS

    if kind not in KINDS:
        raise BadInput(f"a model of kind {kind}: a pipeline cuts {', '.join(KINDS)}; use parallel.strategy=fsdp")
    if layers < stages:
        raise BadInput(f"{stages} stages for {layers} blocks: each needs one; start at most {layers} stages")
    even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    each = [int(size) if size.strip().isdecimal() else 0 for size in sizes.split(",")] if sizes else even
    if len(each) != stages or sum(each) != layers or 0 in each:
        raise BadInput(
            f"--blocks {sizes}: name {stages} numbers that add up to {layers}, e.g. {','.join(map(str, even))}"
        )
    return [range(sum(each[:stage]), sum(each[: stage + 1])) for stage in range(stages)]


def train(
    recipe: Recipe, out: str | Path | None = None, *, data: int = 1, schedule: str = "1f1b", blocks: str = ""
) -> dict[str, Any]:
    """Train one recipe over the processes that a launcher has started, and write its adapter and report.

    Args:
        recipe: what to train.
        out: folder to write; ``runs/NAME`` (or the next free one) when left out.
        data: pipelines that share the rows; each has as many stages as there are processes for it.
        schedule: ``1f1b`` or ``gpipe``.
        blocks: how many blocks each stage has, e.g. ``"18,12"``; equally many when left out.

    Returns:
        The report, in every process.

    Raises:
        BadInput: naming what is wrong and what would be right.
        Diverged: if the gradients are not finite.
        Lost: if another process died.
    """
    began = time.perf_counter()
    numbers.see_one_card()
    size = numbers.processes()
    refuse(recipe, size, data)
    plan = resolve(recipe)
    with processes.joined(recipe.parallel.timeout):
        return _train(recipe, plan, World(numbers.rank(), size, data), out, schedule, blocks, began)


def _train(
    recipe: Recipe, plan: Plan, world: World, out: str | Path | None, schedule: str, blocks: str, began: float
) -> dict[str, Any]:
    from cria_tricks.common.console import Aside, Voice
    from cria_tricks.data import sources
    from cria_tricks.store.checkpoints import describe
    from cria_tricks.store.run_folder import Folders

    aside, stages = Aside(), world.size // world.data
    aside.quiet = not world.is_first
    found = {"train": sources.find(recipe.data.train, "train"), "eval": sources.find(recipe.data.eval, "eval")}
    about = describe(recipe, found, plan.device.name, world.size)
    folders = world.first(lambda: Folders(recipe, out, None, about, Voice(aside)))

    # Only now the heavy libraries: what was wrong so far took a second to say.
    import torch
    from transformers import set_seed

    from cria_tricks import models
    from cria_tricks.data.prepare import eval_rows, train_rows
    from cria_tricks.kwanzaa import augment
    from cria_tricks.load.model import count_trainable, load, load_tokenizer, quiet_libraries, refuse_unfit
    from cria_tricks.measure.memory import Meter, every_tensor
    from cria_tricks.measure.monitor import Monitor
    from cria_tricks.models import identity, pretrained
    from cria_tricks.report import summary as report
    from cria_tricks.run.steps import count_parameters
    from cria_tricks.trainer.pipeline_fit import fit

    quiet_libraries()
    weights = models.fetch(models.find(recipe.model))
    refuse_unfit(plan, weights)
    folders.over(identity.of(weights))
    tokenizer = load_tokenizer(weights)
    rows = {
        "train": train_rows(recipe, found["train"], found["eval"], tokenizer, aside.print, augment.of(recipe)),
        "eval": eval_rows(recipe, found["eval"], tokenizer),
    }
    trainable = count_trainable(plan, weights, max(part.highest_id for part in rows.values()))
    config = pretrained.config(weights.path, weights.name)
    parts = find_blocks(blocks, config.num_hidden_layers, stages, config.model_type)
    context = context_of(weights.path)
    if recipe.train.save_steps:
        plan = plan.warn("train.save_steps has no effect: a pipeline writes no checkpoints")
    for sentence in (*plan.warnings, *report.data_warnings(rows, recipe, context)):
        aside.print(f"warning: {sentence}")
    with world.within(folders.claimed(trainable, plan.optimizer["bits"])):
        cut = " | ".join(f"{part.start}-{part.stop - 1}" for part in parts)
        aside.print(f"loading {weights.name} on {plan.device.name}, blocks {cut}, writing to {folders.folder}")
        set_seed(recipe.train.seed)
        meter = Meter(plan.device.kind, began, compiled=plan.compiled)
        with meter.phase("load"):
            model = load(plan, weights).model
            meter.track(every_tensor(model))
        parameters = count_parameters(model)
        torch.manual_seed(recipe.train.seed + world.rank)  # the adapter began the same everywhere, dropout need not
        monitor = Monitor(
            folders.monitor(world.rank), recipe.train.monitor_seconds, cuda=plan.device.kind == "cuda", say=Voice(aside)
        )
        with monitor:
            loop, run = fit(
                model, plan, recipe, {part: tokens.rows for part, tokens in rows.items()}, parts, world,
                pad_id=tokenizer.pad_token_id, meter=meter, schedule=schedule, folder=folders.checkpoints.folder,
                say=print if world.is_first else lambda line: None,
            )  # fmt: skip
        descriptions = {part: source.description for part, source in found.items()}
        summary = report.summarise(recipe, plan, run, meter, rows, descriptions, parameters, context)
        summary |= report.compare(None, run) | {
            "model": weights.name,
            "adapter": str(folders.folder / "adapter"),
            "base": identity.of(weights),
            "model_note": weights.note,
        }
        summary["monitor"] = world.gather(monitor.summary())
        summary["pipeline"] = of_the_pipeline(run.training, parts, world.data, schedule, recipe)
        _write(summary, folders, loop, world, tokenizer, weights, found, recipe)
    return summary


def of_the_pipeline(
    steps: Sequence[Mapping[str, Any]], parts: Sequence[range], data: int, schedule: str, recipe: Recipe
) -> dict[str, Any]:
    """What the report says beyond a run of one process: the cut, and the idle time beside the formula's."""
    idle = [entry["idle_share"] for entry in steps]
    return {
        "data": data,
        "blocks": [[part.start, part.stop - 1] for part in parts],
        "schedule": schedule,
        "idle_share": statistics.median(idle[2:] or idle),  # the first two are watched, which takes its time
        "idle_share_of_equal_stages": bubble(len(parts), recipe.tricks.gradient_accumulation // data),
    }


def _write(
    summary: dict[str, Any],
    folders: "Folders",
    loop: "Loop",
    world: World,
    tokenizer: Any,
    weights: "Weights",
    found: Mapping[str, "Source"],
    recipe: Recipe,
) -> None:
    from cria_tricks.adapter import folder, model_card, provenance
    from cria_tricks.report import page

    made = provenance.describe(summary, weights, found) | {"pipeline": summary["pipeline"]}
    text = model_card.model_card(summary, made, weights.name, weights.note, recipe)
    one_of_each = world.rank < len(summary["pipeline"]["blocks"])  # equal stages of all pipelines have learnt the same
    mine = {name: p.detach().cpu() for name, p in loop.trained.items()} if one_of_each else {}
    learnt = {name: weight for stage in world.gather(mine) for name, weight in stage.items()}

    def write() -> None:
        folder.save(Path(summary["adapter"]), loop.part.model, tokenizer, weights.name, text, recipe, made, learnt)
        page.write(folders.folder, summary)
        folders.mirror_results()

    world.first(write)


def command(
    recipe: Annotated[str, typer.Argument(help="A named recipe, or a TOML file.")] = "smoke",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a field; may be repeated.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder to write; runs/NAME when left out.")] = None,
    data: Annotated[int, typer.Option(min=1, help="Pipelines that share the rows.")] = 1,
    schedule: Annotated[Literal["1f1b", "gpipe"], typer.Option(help="The order of a stage's passes.")] = "1f1b",
    blocks: Annotated[str, typer.Option(help="Blocks of each stage, e.g. 18,12; equally many when left out.")] = "",
) -> None:
    """Train a recipe's LoRA adapter over a pipeline of the processes that torchrun has started."""
    found = train(with_settings(recipes.get(recipe), settings or []), out, data=data, schedule=schedule, blocks=blocks)
    if numbers.rank() == 0:
        idle = found["pipeline"]
        print(f"idle {idle['idle_share']:.0%}, of equally long stages {idle['idle_share_of_equal_stages']:.0%}")
        print(f"adapter: {found['adapter']}")
