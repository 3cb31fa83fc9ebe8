"""A report of made-up numbers, held against what it must say: every line of the page, every point of the figure."""

import math
from types import SimpleNamespace
from typing import Any

import pytest

from cria_tricks.data.counts import Tally
from cria_tricks.data.stream import Stream
from cria_tricks.data.tokens import TokenRows
from cria_tricks.hardware.cards import CARDS
from cria_tricks.measure.utilisation import Utilisation
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report import page
from cria_tricks.report import summary as report
from cria_tricks.report.page import draw  # the real one, before a fixture replaces it
from cria_tricks.resolve import resolve
from cria_tricks.trainer.fit import Run

MIB = 2**20
IGNORED = -100


def rows(*lengths: int, cut: int = 0, dropped: int = 0) -> TokenRows:
    """Rows of so many tokens, of which the first is not trained."""
    made = [{"input_ids": [7] * n, "labels": [IGNORED] + [7] * (n - 1)} for n in lengths]
    return TokenRows(made, cut, dropped, Tally({"read": {"rows": 1200, "words": 34_567}}, {"chat": len(lengths)}))


def run(*, peaks: bool = True, evaluated: bool = True) -> Run:
    """Three steps, the second skipped with a gradient that is not finite, and evaluations before and after."""
    peak = [{"peak_bytes": n * MIB} for n in (30, 50, 40)] if peaks else [{}] * 3
    steps: list[dict[str, Any]] = [
        {"step": 1, "loss": 3.0, "tokens": 100, "trained_tokens": 60, "step_seconds": 1.5, "grad_norm": 1.0} | peak[0],
        {"step": 2, "loss": 2.5, "tokens": 300, "trained_tokens": 80, "step_seconds": 0.5, "grad_norm": math.inf}
        | peak[1],
        {"step": 3, "loss": 2.0, "tokens": 200, "trained_tokens": 70, "step_seconds": 2.0, "grad_norm": 1.0} | peak[2],
    ]
    before, after = {"step": 0, "eval_loss": 3.5}, {"step": 3, "eval_loss": 2.25}
    return Run([before, *steps, after] if evaluated else steps, 3, 1, 4, 2, "math", ("said by the run",))


def summary(found: Run, *, device: str = "t4", largest: int = 45 * MIB, settings: tuple[str, ...] = (), **given) -> Any:
    recipe = with_settings(Recipe(name="made-up"), ["data.max_length=16", *settings])
    phases = {
        "load": {"allocated_bytes": 10 * MIB, "reserved_bytes": 12 * MIB},
        "train": {"allocated_bytes": largest, "process_bytes": 99 * MIB},
    }
    meter: Any = SimpleNamespace(phases=phases, spent=lambda: {"seconds": 1234.5})
    parts = {"train": rows(5, 9, 3, cut=2, dropped=1), "eval": rows(6, cut=1, dropped=3)}
    said = {"train": "rows of a file", "eval": "rows held out"}
    counts = {"trainable": 1234, "total": 56_789}
    return report.summarise(recipe, resolve(recipe, CARDS[device].device), found, meter, parts, said, counts, **given)


def test_a_summary_says_what_was_and_divides_by_the_right_seconds():
    found = summary(run())
    assert (found["eval_loss_before"], found["eval_loss_after"]) == (3.5, 2.25)
    assert found["train_loss"] == (3.0 + 2.5 + 2.0) / 3
    assert found["tokens_per_second"] == (100 + 300 + 200) / (1.5 + 0.5 + 2.0)
    assert found["trained_tokens_per_second"] == (60 + 80 + 70) / (1.5 + 0.5 + 2.0)
    assert found["peak_bytes"] == 50 * MIB, "a step's, which is above both phases'"
    assert summary(run(), largest=51 * MIB)["peak_bytes"] == 51 * MIB, "a phase's"
    assert summary(run(peaks=False))["peak_bytes"] == 45 * MIB, "of phases alone"
    assert (found["seconds"], found["steps"], found["planned_steps"], found["skipped_steps"]) == (1234.5, 3, 4, 1)
    assert (found["device"], found["attention_kernel"]) == ("Tesla T4", "math")
    assert found["parameters"] == {"trainable": 1234, "total": 56_789}
    assert found["data"] == {
        "train": "rows of a file",
        "eval": "rows held out",
        "train_rows": 3,
        "train_rows_packed_into": None,
        "train_tokens": 5 + 9 + 3,
        "train_trained_tokens": 4 + 8 + 2,
        "train_rows_cut": 2,
        "train_rows_dropped": 1,
        "train_steps": {"read": {"rows": 1200, "words": 34_567}},
        "train_kinds": {"chat": 3},
        "eval_rows": 1,
        "eval_tokens": 6,
        "eval_trained_tokens": 5,
        "eval_rows_cut": 1,
        "eval_rows_dropped": 3,
        "eval_kinds": {"chat": 1},
        "tokens_seen": 600,
        "trained_tokens_seen": 210,
    }
    assert [entry.get("grad_norm") for entry in found["history"]] == [None, 1.0, None, 1.0, None]
    assert [entry["step"] for entry in found["history"]] == [0, 1, 2, 3, 3]


def test_a_summary_without_evaluations_has_no_evaluation_loss():
    found = summary(run(evaluated=False))
    assert (found["eval_loss_before"], found["eval_loss_after"]) == (None, None)


def test_packed_rows_are_counted_as_what_was_trained_on():
    found = summary(run(), settings=("tricks.packing=true", "tricks.attention=sdpa"))
    assert found["data"]["train_rows_packed_into"] == 2


LONGER = "rows were longer than data.max_length=16 tokens and"
OF_STEPS = [
    "said by the run",
    "the loss scaler skipped 1 of 3 steps, whose fp16 gradients overflowed",
    "train.time_budget ended the run after step 3 of 4; --resume goes on",
]
OF_ROWS = [
    f"2 of 4 train {LONGER} lost their end",
    f"1 of 4 train {LONGER} were dropped",
    f"1 of 4 eval {LONGER} lost their end",
    f"3 of 4 eval {LONGER} were dropped",
]


def test_every_warning_of_a_run_is_said_once_with_its_numbers():
    assert summary(run())["warnings"] == OF_ROWS + OF_STEPS
    beyond = (
        "{} of {} {} rows are longer than the model's context of 5 tokens (max_position_embeddings in its config), the "
        "longest has {}, and a model does badly on positions that it was not trained for; set data.max_length=5, or "
        "take a model with a longer context"
    )
    beyond_5 = [beyond.format(1, 3, "train", 9), beyond.format(1, 1, "eval", 6)]
    assert summary(run(), context=5)["warnings"] == OF_ROWS + beyond_5 + OF_STEPS
    assert summary(run(), context=9)["warnings"] == OF_ROWS + OF_STEPS, "no row is longer than nine"
    quiet = Run([], 4, 0, 4, 2, "math")
    assert report.step_warnings(quiet) == []


def test_of_a_stream_it_is_known_how_long_rows_may_be():
    class Unread(Stream):
        def __init__(self) -> None:
            """Nothing is read."""
            self.count = self.cut = self.dropped = 0
            self.tally = Tally()

    parts = {"train": Unread(), "eval": rows(6)}
    recipe = with_settings(Recipe(), ["data.max_length=16"])
    assert report.data_warnings(parts, recipe, 16) == []
    assert len(report.data_warnings(parts, recipe, 15)) == 1


def made(**changed: Any) -> dict[str, Any]:
    """A whole report."""
    compared = {
        "estimated_peak_bytes": 60 * MIB,
        "estimate": {
            "lines": [{"name": "weights", "bytes": 60 * MIB, "why": "as they are stored"}],
            "measured_bytes": 50 * MIB,
            "unexplained_bytes": -10 * MIB,
            "ratio": 1.2,
            "reserved": None,
        },
    }
    seconds = {"measured": 2.0, "predicted": 1.5, "low": 1.2, "high": 1.9, "ratio": 0.75, "by": "no run"}
    compared["step_seconds"] = seconds
    compared |= report.utilisation(Utilisation(1e9, 1.5e9, 65e12), run())
    whole = summary(run()) | compared | {"model": "tiny", "model_note": "", "monitor": [None]}
    whole |= {"warnings": ["one", "two"], "versions": {"torch": "1.2.3"}}
    whole["recipe"]["tricks"] = {"peft": "lora", "packing": False}
    return whole | changed


PAGE = """# made-up: tiny

A LoRA adapter for `tiny`, trained with cria_tricks on chat rows, loss on the assistant's tokens only.

| what | value |
|---|---|
| evaluation loss before | 3.5000 |
| evaluation loss after | 2.2500 |
| training loss, mean over steps | 2.5000 |
| optimizer steps | 3 of 4, 1 skipped |
| tokens per second | 150 |
| trained tokens per second | 52 |
| seconds of a step, measured | 2.00 |
| seconds of a step, predicted | 1.20 to 1.90, no public run backs it |
| MFU, model FLOP utilisation | 0.2% of 65.0 TFLOP/s; HFU, with what is computed again: 0.3% |
| peak memory | 50.0 MiB |
| trainable parameters | 1,234 of 56,789 |
| seconds, with loading and with the time before a resume | 1,234 |
| device | Tesla T4 |
| attention kernel | math |

![loss and memory by step](report.png)

## Peak memory by phase

| phase | live | reserved by the allocator |
|---|---|---|
| load | 10.0 MiB | 12.0 MiB |
| train | 45.0 MiB | 99.0 MiB |

## Estimated and measured, largest training step

| what | bytes | why |
|---|---|---|
| weights | 60.0 MiB | as they are stored |
| **estimated** | 60.0 MiB | the sum |
| unexplained | -10.0 MiB | what no line accounts for |
| **measured** | 50.0 MiB | estimated is 1.200 of it |

## Data

- train: rows of a file; 17 tokens, 14 trained, 2 rows cut, 1 dropped
- eval: rows held out; 6 tokens, 5 with a loss, 1 rows cut, 3 dropped; chat rows, loss on the assistant's tokens only

| training rows | rows | words |
|---|---|---|
| read | 1,200 | 34,567 |

## Switches

`peft = "lora"`, `packing = false`

## Warnings

- one
- two

## Versions

torch 1.2.3
"""


def test_the_page_is_this_page():
    assert page.markdown(made()) == PAGE


def without(page: str, start: str, end: str) -> str:
    """The page without what lies between the two."""
    return page[: page.index(start)] + page[page.index(end) :]


def test_the_page_leaves_out_what_is_not_there():
    nothing = made(eval_loss_before=None, eval_loss_after=None, estimate=None, warnings=[])
    nothing["data"]["train_steps"] = {}
    nothing["plan"]["device"]["kind"] = "cpu"
    nothing["memory"] = {"load": {"allocated_bytes": 10 * MIB}}
    expected = without(without(PAGE, "## Estimated", "## Data"), "| training rows", "## Switches")
    expected = expected.replace("3.5000", "not measured").replace("2.2500", "not measured")
    expected = expected.replace("- one\n- two\n", "none\n").replace("reserved by the allocator", "process so far (RSS)")
    expected = expected.replace(
        "| load | 10.0 MiB | 12.0 MiB |\n| train | 45.0 MiB | 99.0 MiB |", "| load | 10.0 MiB | 0 B |"
    )
    assert page.markdown(nothing) == expected
    unmeasured = made()
    unmeasured["estimate"] |= {"measured_bytes": None, "unexplained_bytes": None, "ratio": None}
    assert page.markdown(unmeasured) == without(PAGE, "| unexplained", "\n## Data")


def test_on_a_card_reserved_bytes_stand_below_the_measured_ones():
    report = made()
    report["estimate"]["reserved"] = {
        "estimated_bytes": 70 * MIB, "measured_bytes": 65 * MIB, "expandable_segments": True
    }  # fmt: skip
    rows = (
        "| reserved, estimated | 70.0 MiB | with what may stay unused; expandable segments |\n"
        "| reserved, measured | 65.0 MiB | by torch's allocator |\n"
    )
    assert rows in page.markdown(report)
    assert page.markdown(report).replace(rows, "") == PAGE


def test_of_several_processes_each_peak_is_there():
    report = made()
    report["estimate"]["measured_by_process"] = [50 * MIB, 49 * MIB]
    line = "| measured, each process | 50.0 MiB, 49.0 MiB | in the order of their ranks |\n"
    assert line in page.markdown(report)
    assert page.markdown(report).replace(line, "") == PAGE


SEEN = """## The machine meanwhile

4 samples over 1,234 seconds, in `monitor.jsonl`.

| what | mean | peak |
|---|---|---|
| process, resident memory | 1.0 MiB | 2.0 MiB |

## Where the time goes

Operators of steps 2 to 4, 0.125 seconds on the cuda in all; to look at: `a.json`, `b.json`.

| operator | calls | seconds | share |
|---|---|---|---|
| `aten::mm` | 12 | 0.062 | 49.6% |

"""


def test_the_page_has_what_was_sampled_and_traced():
    reading = {"samples": 4, "seconds": 1234.4, "rss_bytes": {"mean": MIB, "peak": 2 * MIB}, "cards": []}
    traced = {
        "steps": (2, 4), "seconds": 0.125, "device": "cuda", "files": ["a.json", "b.json"],
        "operators": [{"name": "aten::mm", "calls": 12, "seconds": 0.062, "share": 0.496}],
    }  # fmt: skip
    text = page.markdown(made(monitor=[None, reading], profile=traced))
    expected = PAGE.replace("memory by phase", "memory by phase, first process")
    assert text == expected.replace("## Data", SEEN + "## Data")
    assert page.markdown(made(monitor=[None], profile=None)) == PAGE


def figure_of(whole: dict[str, Any], monkeypatch) -> Any:
    from matplotlib.figure import Figure

    kept, honest = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (kept.append(self), honest(self, *a, **k)))
    assert draw(whole).startswith(b"\x89PNG")
    return kept[0]


def test_the_figure_has_every_point_where_it_belongs(monkeypatch):
    figure = figure_of(made(), monkeypatch)
    assert (tuple(figure.get_size_inches()), figure.dpi) == ((9, 3.4), 150)
    losses, memory = figure.axes
    assert losses.get_subplotspec().get_geometry()[:2] == (1, 2)
    drawn = {line.get_label(): [list(line.get_xdata()), list(line.get_ydata())] for line in losses.lines}
    assert drawn == {
        "training step": [[1, 2, 3], [3.0, 2.5, 2.0]],
        "evaluation, all rows": [[0, 3], [3.5, 2.25]],
    }
    [peaks] = memory.lines
    assert [list(peaks.get_xdata()), list(peaks.get_ydata())] == [[1, 2, 3], [30, 50, 40]], "MiB"
    assert memory.get_ylim()[0] == 0
    assert not losses.get_legend().get_frame_on()
    for axes in (losses, memory):
        assert not axes.spines["top"].get_visible()
        assert not axes.spines["right"].get_visible()
        assert axes.spines["left"].get_visible()
        assert {line.get_alpha() for line in axes.get_xgridlines()} == {0.25}
        assert all(tick == int(tick) for tick in axes.get_xticks()), "there is no half of a step"


def test_the_figure_of_a_run_without_evaluations_and_peaks(monkeypatch):
    whole = made(history=[entry for entry in summary(run(peaks=False))["history"] if "loss" in entry])
    losses, memory = figure_of(whole, monkeypatch).axes
    assert [line.get_label() for line in losses.lines] == ["training step"]
    assert [len(line.get_xdata()) for line in memory.lines] == [0]


def test_all_three_files_are_written(tmp_path):
    page.write(tmp_path, made())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.json", "report.md", "report.png"]
    assert (tmp_path / "report.md").read_text() == PAGE
    text = (tmp_path / "report.json").read_text()
    assert text.endswith("\n}\n")
    assert text.splitlines()[1].startswith('  "eval_loss_before": 3.5')
    with pytest.raises(ValueError, match="not JSON compliant"):
        page.write(tmp_path, made(seconds=math.inf))
