"""A report as ``report.json``, ``report.md`` and ``report.png``."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cria_tricks.common import atomic_files
from cria_tricks.common.markdown_table import markdown_table
from cria_tricks.common.units import human
from cria_tricks.measure import monitor
from cria_tricks.recipe import Recipe
from cria_tricks.report.figure import draw
from cria_tricks.trainer import what_ran


def write(folder: Path, report: Mapping[str, Any]) -> None:
    """Write report.json, report.md and report.png into a folder."""
    with atomic_files.unwritten_in_one_line(folder / "report.md"):
        atomic_files.write_file(folder / "report.png", draw(report))
        atomic_files.write_file(folder / "report.md", markdown(report))
        atomic_files.write_file(folder / "report.json", json.dumps(report, indent=2, allow_nan=False) + "\n")


def markdown(report: Mapping[str, Any]) -> str:
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
        (
            name,
            human(phase["allocated_bytes"]),
            human(phase.get("reserved_bytes", phase.get("process_bytes", 0))),
        )
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
            *markdown_table(("what", "value"), rows),
            "",
            "![loss and memory by step](report.png)",
            "",
            "## Peak memory by phase" + ", first process" * (len(report["monitor"]) > 1),
            "",
            *markdown_table(("phase", "live", beside), memory),
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
    if not counts:
        return []
    rows = [(step, f"{entry['rows']:,}", f"{entry['words']:,}") for step, entry in counts.items()]
    return [*markdown_table(("training rows", "rows", "words"), rows), ""]


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
        *markdown_table(("what", "bytes", "why"), [(name, human(size), why) for name, size, why in rows]),
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
            *markdown_table(("what", "mean", "peak"), monitor.table(sampled)),
            "",
        ]
    if traced := report.get("profile"):
        first, last = traced["steps"]
        operators = [
            (f"`{row['name']}`", str(row["calls"]), f"{row['seconds']:.3f}", f"{row['share']:.1%}")
            for row in traced["operators"]
        ]
        lines += [
            "## Where the time goes",
            "",
            f"Operators of steps {first} to {last}, {traced['seconds']:.3f} seconds on the {traced['device']} in all; "
            f"to look at: {', '.join(f'`{name}`' for name in traced['files'])}.",
            "",
            *markdown_table(("operator", "calls", "seconds", "share"), operators),
            "",
        ]
    return lines
