"""Write a report as ``report.json``, ``report.md`` and ``report.png``."""

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cria_tricks.common import atomic_files
from cria_tricks.common.markdown_table import literal, markdown_table
from cria_tricks.common.themes import THEMES
from cria_tricks.common.units import human
from cria_tricks.data.samples import answer_line, one_line
from cria_tricks.measure import monitor
from cria_tricks.recipe import Recipe
from cria_tricks.trainer import stops, what_ran

QUESTION = 200
"""How much of a question report.md shows [characters]."""
ANSWER = 500
"""How much of an answer report.md shows [characters]; report.json has all of it."""
_BLUE, _ORANGE, *_ = THEMES["light"].series
"""The colours of the figure. It has a white background of its own, so it is the same in both modes."""


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json, report.md and report.png into a run's folder.

    Args:
        folder: the run's folder.
        report: the summary, from :func:`cria_tricks.report.summary.summarise`, with what ``run/results.py`` adds.

    Raises:
        Unwritten: if one of the files cannot be written.
    """
    with atomic_files.unwritten_in_one_line(folder / "report.md"):
        atomic_files.write_file(folder / "report.png", draw(report))
        atomic_files.write_file(folder / "report.md", markdown(report))
        atomic_files.write_file(folder / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")


def markdown(report: Mapping[str, Any]) -> str:
    """Return the text of report.md."""
    recipe = report["recipe"]
    ran = what_ran.in_words(Recipe.model_validate(recipe), report["model"], report["data"]["train_kinds"])
    switched = [f"`{key} = {json.dumps(value)}`" for key, value in recipe["tricks"].items()]
    versions = [f"{name} {version}" for name, version in report["versions"].items()]
    lines = [f"# {recipe['name']}: {report['model']}", "", ran, ""]
    if report["model_note"]:
        lines += [report["model_note"], ""]
    lines += [
        *markdown_table(("what", "value"), _numbers(report)),
        *("", "![loss and memory by step](report.png)", ""),
        *_answers(report["history"]),
        *_memory(report),
        *_compared(report),
        *_sampled(report),
        *_profiled(report),
        *_data(report["data"]),
        *_section("Switches", ", ".join(switched)),
        *_section("Warnings", *[f"- {sentence}" for sentence in report["warnings"]] or ["none"]),
        *_section("Versions", ", ".join(versions)),
    ]
    return "\n".join(lines)


def _section(title: str, *lines: str) -> list[str]:
    return [f"## {title}", "", *lines, ""]


def _numbers(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines of the first table: a name and a value each."""
    parameters = report["parameters"]
    step = report["step_seconds"]
    best = []
    if report.get("best"):
        lowest, _ = stops.lowest(report["history"])
        best = [("lowest evaluation loss, kept in `best`", what_ran.best(report["best"], lowest))]
    return [
        ("evaluation loss before", _loss(report["eval_loss_before"])),
        ("evaluation loss after", _loss(report["eval_loss_after"])),
        *best,
        ("training loss, mean over steps", _loss(report["train_loss"])),
        ("optimizer steps", f"{report['steps']} of {report['planned_steps']}, {report['skipped_steps']} skipped"),
        ("tokens per second", f"{report['tokens_per_second']:,.0f}"),
        ("trained tokens per second", f"{report['trained_tokens_per_second']:,.0f}"),
        ("seconds of a step, measured", f"{step['measured']:.2f}"),
        ("seconds of a step, predicted", _predicted(step)),
        ("MFU, model FLOP utilisation", _utilisation(report["utilisation"])),
        ("peak memory", human(report["peak_bytes"])),
        ("trainable parameters", f"{parameters['trainable']:,} of {parameters['total']:,}"),
        ("seconds, with loading and with the time before a resume", f"{report['seconds']:,.0f}"),
        ("device", report["device"]),
        ("attention kernel", report["attention_kernel"]),
    ]


def _loss(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.4f}"


def _predicted(step: Mapping[str, Any]) -> str:
    """Return the range of the predicted seconds of a step, and what backs it."""
    if step["predicted"] is None:
        return "no rates of this device; cria doctor --calibrate measures them"
    backed = {
        "measured here": "as calibrated here",
        "measured cards": "by measured cards",
        "no run": "no public run backs it",
    }
    return f"{step['low']:.2f} to {step['high']:.2f}, {backed.get(step['by'], 'by public runs')}"


def _utilisation(found: Mapping[str, Any] | None) -> str:
    """Return MFU, and HFU beside it where something was computed again; or why neither is known."""
    if found is None:
        return "unknown: the operations of this kind of model are not counted"
    if found["mfu"] is None:
        return "unknown: no datasheet rate of this device"
    said = f"{found['mfu']:.1%} of {found['peak_flops'] / 1e12:,.1f} TFLOP/s"
    if found["hardware_flops_per_token"] > found["model_flops_per_token"]:
        said += f"; HFU, with what is computed again: {found['hfu']:.1%}"
    return said


def _answers(history: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the section with the answers of ``eval.samples``: for each row a table of steps; nothing without any."""
    tables: dict[str, list[tuple[str, str]]] = {}
    for entry in history:
        for found in entry.get("eval_answers", ()):
            asked = f"Row {found['row'] + 1} of the evaluation rows: {literal(one_line(found['question'], QUESTION))}"
            answer = literal(answer_line(found["answer"], ANSWER))
            tables.setdefault(asked, []).append((str(entry["step"]), answer))
    lines = []
    for asked, answers in tables.items():
        lines += [asked, "", *markdown_table(("step", "answer"), answers), ""]
    return ["## Answers during training", "", *lines] if lines else []


def _memory(report: Mapping[str, Any]) -> list[str]:
    """Return the section with the peaks by phase."""
    title = "Peak memory by phase"
    # ``monitor`` has one entry for each process, so its length is the world size. Rank 0 measured the peaks.
    if len(report["monitor"]) > 1:
        title += ", first process"
    # On a GPU we read the reserved bytes from the allocator. On a CPU we only know the memory of the whole process.
    beside = "process so far (RSS)"
    if report["plan"]["device"]["kind"] == "cuda":
        beside = "reserved by the allocator"
    rows = []
    for name, phase in report["memory"].items():
        around = phase.get("reserved_bytes", phase.get("process_bytes", 0))
        rows.append((name, human(phase["allocated_bytes"]), human(around)))
    return _section(title, *markdown_table(("phase", "live", beside), rows))


def _compared(report: Mapping[str, Any]) -> list[str]:
    """Return the section that compares the estimated peak of a training step with the measured one."""
    found = report["estimate"]
    if found is None:
        return []
    rows = [(line["name"], human(line["bytes"]), line["why"]) for line in found["lines"]]
    rows.append(("**estimated**", human(report["estimated_peak_bytes"]), "the sum"))
    if found["measured_bytes"] is not None:
        rows.append(("unexplained", human(found["unexplained_bytes"]), "what no line accounts for"))
        rows.append(("**measured**", human(found["measured_bytes"]), f"estimated is {found['ratio']:.3f} of it"))
    if "measured_by_process" in found:
        each = ", ".join(map(human, found["measured_by_process"]))
        rows.append(("measured, each process", each, "in the order of their ranks"))
    reserved = found["reserved"]
    if reserved:
        ways = "expandable segments" if reserved["expandable_segments"] else "no expandable segments"
        why = f"with what may stay unused; {ways}"
        rows.append(("reserved, estimated", human(reserved["estimated_bytes"]), why))
        rows.append(("reserved, measured", human(reserved["measured_bytes"]), "by torch's allocator"))
    return _section("Estimated and measured, largest training step", *markdown_table(("what", "bytes", "why"), rows))


def _sampled(report: Mapping[str, Any]) -> list[str]:
    """Return the section with what the monitor sampled; nothing if it was off."""
    sampled = [found for found in report.get("monitor") or [] if found]
    if not sampled:
        return []
    said = f"{sampled[0]['samples']} samples over {sampled[0]['seconds']:,.0f} seconds, in `monitor.jsonl`."
    table = markdown_table(("what", "mean", "peak"), monitor.table(sampled))
    return _section("The machine meanwhile", said, "", *table)


def _profiled(report: Mapping[str, Any]) -> list[str]:
    """Return the section with the operators of the profiled steps; nothing if no step was profiled."""
    traced = report.get("profile")
    if not traced:
        return []
    first, last = traced["steps"]
    files = ", ".join(f"`{name}`" for name in traced["files"])
    spent = f"{traced['seconds']:.3f} seconds on the {traced['device']} in all"
    said = f"Operators of steps {first} to {last}, {spent}; to look at: {files}."
    rows = [
        (f"`{row['name']}`", str(row["calls"]), f"{row['seconds']:.3f}", f"{row['share']:.1%}")
        for row in traced["operators"]
    ]
    return _section("Where the time goes", said, "", *markdown_table(("operator", "calls", "seconds", "share"), rows))


def _data(data: Mapping[str, Any]) -> list[str]:
    """Return the section about the rows, with a table of those that were read, left out, added, cut and kept."""
    kinds = what_ran.rows_in_words(data["eval_kinds"])
    lines = [
        f"- train: {data['train']}; {data['train_tokens']:,} tokens, {data['train_trained_tokens']:,} trained, "
        f"{data['train_rows_cut']} rows cut, {data['train_rows_dropped']} dropped",
        f"- eval: {data['eval']}; {data['eval_tokens']:,} tokens, {data['eval_trained_tokens']:,} with a loss, "
        f"{data['eval_rows_cut']} rows cut, {data['eval_rows_dropped']} dropped; {kinds}",
    ]
    rows = [(step, f"{entry['rows']:,}", f"{entry['words']:,}") for step, entry in data["train_steps"].items()]
    if rows:
        lines += ["", *markdown_table(("training rows", "rows", "words"), rows)]
    return _section("Data", *lines)


def draw(report: Mapping[str, Any]) -> bytes:
    """Draw the loss and the peak memory of each step, and return the picture as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here, because matplotlib starts slowly
    from matplotlib.figure import Figure

    training = [entry for entry in report["history"] if "loss" in entry]
    evaluations = [entry for entry in report["history"] if "eval_loss" in entry]
    measured = [entry for entry in training if "peak_bytes" in entry]  # on a CPU, the steps that could set a new peak
    figure = Figure(figsize=(9, 3.4), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # draws without a screen, and without pyplot's global state
    losses, memory = figure.subplots(1, 2)
    losses.plot(_column(training, "step"), _column(training, "loss"), color=_BLUE, marker=".", label="training step")
    if evaluations:
        losses.plot(
            _column(evaluations, "step"),
            _column(evaluations, "eval_loss"),
            color=_ORANGE,
            marker="o",
            linestyle="--",
            label="evaluation, all rows",
        )
    losses.set(xlabel="optimizer step", ylabel="loss per trained token, nats", title="Loss")
    losses.legend(frameon=False)
    mebibytes = [peak / 2**20 for peak in _column(measured, "peak_bytes")]
    memory.plot(_column(measured, "step"), mebibytes, color=_BLUE, marker=".")
    memory.set(xlabel="optimizer step", ylabel="peak in the step, MiB", title="Memory", ylim=(0, None))
    for axes in (losses, memory):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
        axes.xaxis.get_major_locator().set_params(integer=True)
    picture = io.BytesIO()
    figure.savefig(picture)
    return picture.getvalue()


def _column(entries: Sequence[Mapping[str, Any]], key: str) -> list[Any]:
    return [entry[key] for entry in entries]
