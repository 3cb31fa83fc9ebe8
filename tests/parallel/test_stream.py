"""Runs on a stream: stopped and gone on with, bit for bit, and two processes take the steps of one."""

import json
import shutil

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.store.checkpoints import Checkpoint
from cria_tricks.trainer.checkpoint import position
from tests.parallel import steps
from tests.parallel.test_training import back_to, weights


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> list[str]:
    """Twenty ragged rows, four in a step; six steps are a little more than one pass."""
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"prompt": f"Count to {n}:", "completion": "one two three four"[: n % 5 * 5]} for n in range(1, 26)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows if row["completion"]))
    (folder / "eval.jsonl").write_text(json.dumps({"prompt": "Say:", "completion": "a"}) + "\n")
    return [
        "model=random:tiny", "data.max_length=32", "train.learning_rate=0.003", "tricks.peft=lora", "lora.r=4",
        "tricks.gradient_accumulation=4", "tricks.attention=sdpa", f"data.train={folder / 'train.jsonl'}",
        f"data.eval={folder / 'eval.jsonl'}", "data.stream=true", "train.max_steps=6",
        "train.save_steps=3",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("alone") / "run"
    return steps.train(base, folder) | {"folder": folder}


def losses(report: dict) -> list[float]:
    return [entry["loss"] for entry in report["history"] if "loss" in entry]


def test_the_report_says_what_was_read(alone):
    data = alone["data"]
    assert data["train_rows"] == 6 * 4
    assert (data["train_tokens"], data["train_trained_tokens"]) == (data["tokens_seen"], data["trained_tokens_seen"])
    counts = data["train_steps"]
    assert counts["read"]["rows"] == counts["kept"]["rows"] == 24
    assert alone["history"][-1]["epoch"] == 1
    made = json.loads((alone["folder"] / "adapter" / "provenance.json").read_text())
    assert made["data"]["train"].endswith(", streamed")


def test_a_stopped_run_goes_on_bit_for_bit_and_row_for_row(base, alone, tmp_path):
    """With dropout: no random number is drawn twice either."""
    settings = [*base, "lora.dropout=0.1"]
    whole = steps.train(settings, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    back_to(tmp_path / "stopped", 3)
    report = steps.train(settings, tmp_path / "stopped", True)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")
    assert report["data"] == whole["data"]
    assert losses(report) != losses(alone)


def test_two_processes_take_the_steps_of_one_and_one_cannot_go_on_from_them(two, base, alone, tmp_path):
    report, other = two.run(steps.train, [*base, "parallel.strategy=ddp"], tmp_path / "run")
    assert other == report
    assert losses(report) == pytest.approx(losses(alone), rel=2e-5)
    assert report["data"] == alone["data"]
    back_to(tmp_path / "run", 3)
    with pytest.raises(BadInput, match="the stream was read by 2 processes, and now there are 1"):
        steps.train(base, tmp_path / "run", True)


def test_a_checkpoint_without_a_position_is_refused(alone, tmp_path):
    path = alone["folder"] / "checkpoints" / "checkpoint-6"
    assert set(position(Checkpoint(path, 6, {}, {}))) == {"0"}
    with pytest.raises(BadInput, match="cannot be loaded"):
        position(Checkpoint(tmp_path, 6, {}, {}))
