"""Run -> report.json, report.md and a figure: what was asked, what ran, what it cost."""

import importlib.metadata
import io
import json
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cria_tricks.bill.bill import Bill
from cria_tricks.common import atomic_files
from cria_tricks.common.units import human
from cria_tricks.common.version import __version__
from cria_tricks.data import counts as tally
from cria_tricks.data.stream import Stream
from cria_tricks.data.tokens import TokenRows
from cria_tricks.measure import monitor
from cria_tricks.measure.memory import Meter
from cria_tricks.models.shape import beyond_context
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.trainer import what_ran
from cria_tricks.trainer.shared import Run

PACKAGES = ("torch", "transformers", "peft", "bitsandbytes", "accelerate")


def versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide the numbers."""
    return {
        "python": platform.python_version(),
        "cria_tricks": __version__,
        **{name: importlib.metadata.version(name) for name in PACKAGES},
    }


def summarise(
    recipe: Recipe,
    plan: Plan,
    run: Run,
    meter: Meter,
    rows: Mapping[str, TokenRows | Stream],
    descriptions: Mapping[str, str],
    parameters: Mapping[str, int],
    context: int = 0,
) -> dict[str, Any]:
    """Put a run's numbers together.

    Args:
        recipe: what was asked.
        plan: what it was resolved to.
        run: what happened.
        meter: seconds, and peak bytes by phase.
        rows: the ``train`` and ``eval`` token rows; of a stream those count that were given.
        descriptions: where the two came from.
        parameters: ``trainable`` and ``total``.
        context: of the model, in tokens; 0 where it is not known.

    Returns:
        Plain JSON data; its keys are the command line's contract.
    """
    steps, evaluations = run.training, run.evaluations
    in_steps = sum(entry["step_seconds"] for entry in steps)
    tokens, trained = (sum(entry[key] for entry in steps) for key in ("tokens", "trained_tokens"))
    return {
        "eval_loss_before": evaluations[0]["eval_loss"] if evaluations else None,
        "eval_loss_after": evaluations[-1]["eval_loss"] if evaluations else None,
        "train_loss": sum(entry["loss"] for entry in steps) / len(steps),
        "tokens_per_second": tokens / in_steps,
        "trained_tokens_per_second": trained / in_steps,
        # The steps' own peaks are in the history, which a resumed run has from its first step on.
        "peak_bytes": max(
            *(phase["allocated_bytes"] for phase in meter.phases.values()),
            *(entry["peak_bytes"] for entry in steps if "peak_bytes" in entry),
        ),
        "seconds": meter.spent()["seconds"],
        "device": plan.device.name,
        "attention_kernel": run.attention_kernel,
        "warnings": [
            *plan.warnings,
            *data_warnings(rows, recipe, context),
            *run.warnings,
            *map(what_ran.lengthened, run.lengthened),
            *step_warnings(run),
        ],
        "steps": run.steps,
        "planned_steps": run.planned_steps,
        "skipped_steps": run.skipped_steps,
        "lengthened": list(run.lengthened),
        "memory": meter.phases,
        "parameters": dict(parameters),
        "data": {
            **descriptions,
            "train_rows": rows["train"].count,
            "train_rows_packed_into": run.train_rows if plan.collator else None,
            "train_tokens": rows["train"].tokens,
            "train_trained_tokens": rows["train"].trained_tokens,
            "train_rows_cut": rows["train"].cut,
            "train_rows_dropped": rows["train"].dropped,
            "train_steps": rows["train"].tally.to_dict(),
            "train_kinds": dict(rows["train"].tally.kinds),
            "eval_rows": rows["eval"].count,
            "eval_tokens": rows["eval"].tokens,
            "eval_trained_tokens": rows["eval"].trained_tokens,
            "eval_rows_cut": rows["eval"].cut,
            "eval_rows_dropped": rows["eval"].dropped,
            "eval_kinds": dict(rows["eval"].tally.kinds),
            "tokens_seen": tokens,
            "trained_tokens_seen": trained,
        },
        "versions": versions(),
        "recipe": recipe.model_dump(mode="json"),
        "plan": plan.to_dict(),
        "history": [{key: _finite(value) for key, value in entry.items()} for entry in run.history],
    }


def compare(memory: Bill | None, run: Run) -> dict[str, Any]:
    """Lay the estimate beside what the training steps were measured to take.

    Args:
        memory: the bill of the largest micro-batch; none for a model of a kind that cannot be estimated.
        run: what happened.

    Returns:
        ``estimated_peak_bytes``, of all that CUDA's allocator sees (cuBLAS' workspaces are among it, the context is
        not), and ``estimate``: its ``rows``, which sum to it, the steps' ``measured_bytes``, what no row explains
        (``unexplained_bytes``, below zero where less came than was estimated) and ``ratio``, estimated to measured.
        Both are ``None`` without an estimate; what is measured is, where nobody could watch.
    """
    if memory is None:
        return {"estimated_peak_bytes": None, "estimate": None}
    measured = max((entry["peak_bytes"] for entry in run.training if "peak_bytes" in entry), default=None)
    rows = (*memory.rows, memory.workspaces) if memory.workspaces.bytes else memory.rows
    return {
        "estimated_peak_bytes": memory.allocated_bytes,
        "estimate": {
            "rows": [asdict(row) for row in rows],
            "measured_bytes": measured,
            "unexplained_bytes": None if measured is None else measured - memory.allocated_bytes,
            "ratio": None if measured is None else memory.allocated_bytes / measured,
        },
    }


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json, report.md and report.png into a folder."""
    with atomic_files.unwritten_in_one_line(folder / "report.md"):
        atomic_files.write_file(folder / "report.png", _draw(report))
        atomic_files.write_file(folder / "report.md", _markdown(report))
        atomic_files.write_file(folder / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")


def data_warnings(rows: Mapping[str, TokenRows | Stream], recipe: Recipe, context: int = 0) -> list[str]:
    """Say how many rows were cut, dropped or beyond the model's context, and what the filters found."""
    longer = f"rows were longer than data.max_length={recipe.data.max_length} tokens and"
    said = tally.warnings(rows["train"].tally, recipe.data)
    return (
        said
        + [
            f"{number} of {part.count + part.dropped} {name} {longer} {fate}"
            for name, part in rows.items()
            for number, fate in ((part.cut, "lost their end"), (part.dropped, "were dropped"))
            if number
        ]
        + [sentence for name, part in rows.items() for sentence in _beyond_context(name, part, recipe, context)]
    )


def _beyond_context(name: str, part: TokenRows | Stream, recipe: Recipe, context: int) -> list[str]:
    """Warn about rows that are longer than the model's context; how long a stream's rows are is not known yet."""
    if isinstance(part, Stream):
        return beyond_context(context, recipe.data.max_length)
    longer = sum(len(row["input_ids"]) > context for row in part.rows)
    if not context or not longer:
        return []
    return [
        f"{longer} of {part.count} {name} rows are longer than the model's context of {context} tokens "
        f"(max_position_embeddings in its config), the longest has {part.longest}, and a model does badly on positions "
        f"that it was not trained for; set data.max_length={context}, or take a model with a longer context"
    ]


def step_warnings(run: Run) -> list[str]:
    """Say how many steps updated nothing, and how many are still to do."""
    said = []
    if run.skipped_steps:
        said.append(
            f"the loss scaler skipped {run.skipped_steps} of {run.steps} steps, whose fp16 gradients overflowed"
        )
    if run.steps < run.planned_steps:
        said.append(f"train.time_budget ended the run after step {run.steps} of {run.planned_steps}; --resume goes on")
    return said


def _finite(value: Any) -> Any:
    """JSON has no infinity; the gradient norm of a step that the loss scaler skipped is one."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _markdown(report: Mapping[str, Any]) -> str:
    data, recipe, parameters = report["data"], report["recipe"], report["parameters"]

    def loss(key: str) -> str:
        return "not measured" if report[key] is None else f"{report[key]:.4f}"

    rows = [
        ("evaluation loss before", loss("eval_loss_before")),
        ("evaluation loss after", loss("eval_loss_after")),
        ("training loss, mean over steps", loss("train_loss")),
        ("optimizer steps", f"{report['steps']} of {report['planned_steps']}, {report['skipped_steps']} skipped"),
        ("tokens per second", f"{report['tokens_per_second']:,.0f}"),
        ("trained tokens per second", f"{report['trained_tokens_per_second']:,.0f}"),
        ("peak memory", human(report["peak_bytes"])),
        ("trainable parameters", f"{parameters['trainable']:,} of {parameters['total']:,}"),
        ("seconds, loading and earlier parts included", f"{report['seconds']:,.0f}"),
        ("device", report["device"]),
        ("attention kernel", report["attention_kernel"]),
    ]
    switched = [f"`{key} = {json.dumps(value)}`" for key, value in recipe["tricks"].items()]
    memory = [
        f"| {name} | {human(phase['allocated_bytes'])} | "
        f"{human(phase.get('reserved_bytes', phase.get('process_bytes', 0)))} |"
        for name, phase in report["memory"].items()
    ]
    beside = "reserved by the allocator" if report["plan"]["device"]["kind"] == "cuda" else "process so far (RSS)"
    return "\n".join(
        [
            f"# {recipe['name']}: {report['model']}",
            "",
            what_ran.in_words(Recipe.model_validate(recipe), report["model"], data["train_kinds"]),
            *(["", report["model_note"]] if report["model_note"] else []),
            "",
            "| what | value |",
            "|---|---|",
            *(f"| {name} | {value} |" for name, value in rows),
            "",
            "![loss and memory by step](report.png)",
            "",
            "## Peak memory by phase" + ", first process" * (len(report["monitor"]) > 1),
            "",
            f"| phase | live | {beside} |",
            "|---|---|---|",
            *memory,
            "",
            *_compared(report),
            *_watched(report),
            "## Data",
            "",
            f"- train: {data['train']}; {data['train_tokens']:,} tokens, {data['train_trained_tokens']:,} trained, "
            f"{data['train_rows_cut']} rows cut, {data['train_rows_dropped']} dropped",
            f"- eval: {data['eval']}; {data['eval_tokens']:,} tokens, the loss is of {data['eval_trained_tokens']:,}, "
            f"{data['eval_rows_cut']} rows cut, {data['eval_rows_dropped']} dropped; "
            f"{what_ran.rows_in_words(data['eval_kinds'])}",
            "",
            *_steps(data["train_steps"]),
            "## Toggles",
            "",
            ", ".join(switched),
            "",
            "## Warnings",
            "",
            *([f"- {sentence}" for sentence in report["warnings"]] or ["none"]),
            "",
            "## Versions",
            "",
            ", ".join(f"{name} {version}" for name, version in report["versions"].items()),
            "",
        ]
    )


def _steps(counts: Mapping[str, Mapping[str, int]]) -> list[str]:
    """What each step of the data read, took away and added."""
    rows = [f"| {step} | {entry['rows']:,} | {entry['words']:,} |" for step, entry in counts.items()]
    return ["| training rows | rows | words |", "|---|---|---|", *rows, ""] if rows else []


def _compared(report: Mapping[str, Any]) -> list[str]:
    """The section that holds the estimate against the measured peak of a training step."""
    found = report["estimate"]
    if found is None:
        return []
    rows = [(row["name"], row["bytes"], row["why"]) for row in found["rows"]]
    rows.append(("**estimated**", report["estimated_peak_bytes"], "the sum"))
    if found["measured_bytes"] is not None:
        rows.append(("unexplained", found["unexplained_bytes"], "what no row accounts for"))
        rows.append(("**measured**", found["measured_bytes"], f"estimated is {found['ratio']:.3f} of it"))
    return [
        "## Estimated and measured, largest training step",
        "",
        "| what | bytes | why |",
        "|---|---|---|",
        *(f"| {name} | {human(size)} | {why} |" for name, size, why in rows),
        "",
    ]


def _watched(report: Mapping[str, Any]) -> list[str]:
    """The sections of what was sampled, and of what a trace says; none where nobody looked."""
    lines: list[str] = []
    sampled = [found for found in report.get("monitor") or [] if found]
    if sampled:
        lines += [
            "## The machine meanwhile",
            "",
            f"{sampled[0]['samples']} samples over {sampled[0]['seconds']:,.0f} seconds, in `monitor.jsonl`.",
            "",
            "| what | mean | peak |",
            "|---|---|---|",
            *(f"| {' | '.join(row)} |" for row in monitor.table(sampled)),
            "",
        ]
    if traced := report.get("profile"):
        first, last = traced["steps"]
        lines += [
            "## Where the time goes",
            "",
            f"Operators of steps {first} to {last}, {traced['seconds']:.3f} seconds on the {traced['device']} in all; "
            f"to look at: {', '.join(f'`{name}`' for name in traced['files'])}.",
            "",
            "| operator | calls | seconds | share |",
            "|---|---|---|---|",
            *(
                f"| `{row['name']}` | {row['calls']} | {row['seconds']:.3f} | {row['share']:.1%} |"
                for row in traced["operators"]
            ),
            "",
        ]
    return lines


def _draw(report: Mapping[str, Any]) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    training = [entry for entry in report["history"] if "loss" in entry]
    evaluations = [entry for entry in report["history"] if "eval_loss" in entry]
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no screen, and no global state, needed
    losses, memory = figure.subplots(1, 2)
    steps = [entry["step"] for entry in training]
    losses.plot(steps, [entry["loss"] for entry in training], color="#2a6f97", marker=".", label="training step")
    if evaluations:
        losses.plot(
            [entry["step"] for entry in evaluations],
            [entry["eval_loss"] for entry in evaluations],
            color="#c1440e",
            marker="o",
            linestyle="--",
            label="evaluation, all rows",
        )
    losses.set(xlabel="optimizer step", ylabel="loss per trained token, nats", title="Loss")
    losses.legend(frameon=False)
    measured = [entry for entry in training if "peak_bytes" in entry]  # on a CPU where a peak could come
    memory.plot(
        [entry["step"] for entry in measured],
        [entry["peak_bytes"] / 2**20 for entry in measured],
        color="#2a6f97",
        marker=".",
    )
    memory.set(xlabel="optimizer step", ylabel="peak in the step, MiB", title="Memory", ylim=(0, None))
    for axes in (losses, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()
