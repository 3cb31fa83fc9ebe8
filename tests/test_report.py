"""The estimate beside the measurement: it sums, and on a card it counts what the card's allocator counts."""

import json
from typing import Any

import pytest

from cria_tricks import models
from cria_tricks.bill.bill import WORKSPACES
from cria_tricks.data.rows import read_file
from cria_tricks.data.tokens import tokenize
from cria_tricks.load.model import load_tokenizer
from cria_tricks.measure.memory import Meter
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report.summary import compare, compare_seconds
from cria_tricks.run.train import train
from cria_tricks.trainer.fit import Run
from tests.memory.cases import CPU, EVERYTHING, T4, bill

METER = Meter("cpu")
"""It has measured nothing."""


def run(*peaks: int | None) -> Run:
    """Of one step a peak; none where nobody watched."""
    history = [{"step": 1, "loss": 1.0} | ({} if peak is None else {"peak_bytes": peak}) for peak in peaks]
    return Run(history, len(peaks), 0, len(peaks), 1, "math")


@pytest.mark.parametrize("device", [T4, CPU])
def test_rows_sum_to_the_estimate_and_the_rest_is_unexplained(device):
    memory = bill("lora sdpa", 1, 512, device=device)
    report = compare(memory, run(2_000_000_000, 3_000_000_000, 1_000_000_000), METER)
    found = report["estimate"]
    assert sum(row["bytes"] for row in found["lines"]) == report["estimated_peak_bytes"]
    assert found["measured_bytes"] == 3_000_000_000, "the largest step's"
    assert report["estimated_peak_bytes"] + found["unexplained_bytes"] == found["measured_bytes"]
    assert found["ratio"] == report["estimated_peak_bytes"] / 3_000_000_000


def test_on_a_card_the_workspaces_are_billed_and_the_context_is_not():
    memory = bill(EVERYTHING)
    assert compare(memory, run(1), METER)["estimated_peak_bytes"] == memory.peak_bytes + WORKSPACES
    on_cpu = bill("lora", device=CPU)
    assert compare(on_cpu, run(1), METER)["estimated_peak_bytes"] == on_cpu.peak_bytes


def test_nothing_is_compared_with_nothing():
    assert compare(None, run(1), METER) == {"estimated_peak_bytes": None, "estimate": None}
    found = compare(bill("lora", device=CPU), run(None), METER)["estimate"]
    assert (found["measured_bytes"], found["unexplained_bytes"], found["ratio"]) == (None, None, None)
    assert found["reserved"] is None, "a CPU has no such allocator"


def test_on_a_card_the_reserved_bytes_stand_beside_their_estimate():
    memory, meter = bill(EVERYTHING), Meter("cpu")
    meter.phases = {"load": {"allocated_bytes": 1, "reserved_bytes": 5}, "train": {"reserved_bytes": 7}}
    found = compare(memory, run(1), meter)["estimate"]["reserved"]
    assert found == {"estimated_bytes": memory.reserved_bytes, "measured_bytes": 7, "expandable_segments": True}
    assert memory.reserved_bytes > memory.allocated_bytes


def timed(*steps: tuple[float, int]) -> Run:
    """Of one step for each pair of seconds and tokens."""
    history = [{"step": 1, "loss": 1.0, "step_seconds": seconds, "tokens": tokens} for seconds, tokens in steps]
    return Run(history, len(steps), 0, len(steps), 1, "math")


def test_predicted_seconds_stand_beside_the_measured_ones():
    recipe = with_settings(Recipe(), ["tricks.peft=lora", "data.max_length=64"])
    predicted = Target(find_shape("smollm2"), T4).bill(recipe)
    found = compare_seconds(predicted, timed((3.0, 100), (5.0, 300)))["step_seconds"]
    assert (found["measured"], found["by"]) == (4.0, "no run")
    assert found["predicted"] == pytest.approx(200 * predicted.seconds)
    assert found["high"] / found["low"] == pytest.approx(predicted.spread)
    assert found["ratio"] == pytest.approx(found["predicted"] / 4.0)


def test_the_first_steps_whose_bytes_are_counted_are_left_out_where_others_follow():
    slow = timed((9.0, 100), (9.0, 100), (1.0, 100), (2.0, 100), (3.0, 100))
    found = compare_seconds(None, slow)["step_seconds"]
    assert (found["measured"], found["predicted"], found["ratio"]) == (2.0, None, None)


@pytest.fixture(scope="module")
def reported(tmp_path_factory) -> dict[str, Any]:
    """A run whose training and evaluation rows differ in everything that a report counts."""
    folder = tmp_path_factory.mktemp("reported")
    sizes = {"train": (5, 60, 7, 70, 80), "eval": (6, 65, 3)}
    for name, words in sizes.items():
        lines = [{"prompt": "Count:", "completion": " " + " ".join(map(str, range(many)))} for many in words]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = [
        "model=random:tiny", "tricks.peft=lora", "lora.r=2", "data.max_length=48", "tricks.gradient_accumulation=2",
        "train.epochs=2", f"data.train={folder / 'train.jsonl'}", f"data.eval={folder / 'eval.jsonl'}",
    ]  # fmt: skip
    return train(with_settings(Recipe(name="reported"), settings), folder / "run")


def test_every_rate_and_loss_of_a_report_is_that_of_its_history(reported):
    steps = [entry for entry in reported["history"] if "loss" in entry]
    evaluations = [entry["eval_loss"] for entry in reported["history"] if "eval_loss" in entry]
    seconds = sum(step["step_seconds"] for step in steps)
    tokens, trained = (sum(step[key] for step in steps) for key in ("tokens", "trained_tokens"))
    assert trained < tokens
    assert reported["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert reported["trained_tokens_per_second"] == pytest.approx(trained / seconds)
    assert reported["train_loss"] == pytest.approx(sum(step["loss"] for step in steps) / len(steps))
    assert (reported["eval_loss_before"], reported["eval_loss_after"]) == (evaluations[0], evaluations[-1])
    assert reported["steps"] == reported["planned_steps"] == len(steps) == 6
    assert reported["skipped_steps"] == sum(step.get("skipped", 0) for step in steps) == 0
    assert reported["data"]["tokens_seen"] == tokens
    assert reported["data"]["trained_tokens_seen"] == trained
    peaks = [step["peak_bytes"] for step in steps if "peak_bytes" in step]
    phases = [phase["allocated_bytes"] for phase in reported["memory"].values()]
    assert reported["peak_bytes"] == max(peaks + phases)


def test_the_rows_of_a_report_are_those_of_its_own_file(reported):
    tokenizer = load_tokenizer(models.find("random:tiny"))
    data = reported["data"]
    for part, cut in (("train", 3), ("eval", 1)):
        rows = tokenize(read_file(reported["recipe"]["data"][part]), tokenizer, 48)
        assert rows.cut == cut
        found = (data[f"{part}_rows"], data[f"{part}_tokens"], data[f"{part}_trained_tokens"], data[f"{part}_rows_cut"])
        assert found == (len(rows.rows), rows.tokens, rows.trained_tokens, cut)
        assert data[f"{part}_rows_dropped"] == 0
