"""A run of several processes is the run of one: losses, schedule, history, checkpoints, report."""

import json
import shutil
from pathlib import Path

import pytest

from cria_tricks import models
from cria_tricks.course.processes import Ranks
from tests.parallel import steps

TIMES = {"step_seconds", "peak_bytes", "eval_seconds", "idle_share"}
ROWS = 11
"""Neither two nor four divides them, nor the window of four micro-batches."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> list[str]:
    """A tiny Llama on eleven ragged rows: three steps an epoch, the last with three micro-batches."""
    few = tmp_path_factory.mktemp("rows") / "few.jsonl"
    fewer = few.with_name("fewer.jsonl")
    for file, many in ((few, ROWS), (fewer, 3)):  # texts, as a chat's template has thirty tokens of its own
        counts = ((n, " ".join(map(str, range(1, n + 2)))) for n in range(many))
        file.write_text("".join(f'{{"prompt": "Count to {n}:", "completion": " {all_}"}}\n' for n, all_ in counts))
    return [
        "model=random:tiny", "data.max_length=64", "train.learning_rate=0.003", "tricks.peft=lora", "lora.r=4",
        "tricks.gradient_accumulation=4", "tricks.attention=sdpa", f"data.train={few}", f"data.eval={fewer}",
    ]  # fmt: skip


DIVIDED = "tensor parallel.sequence=true"
TWENTY = ("train.max_steps=20", "train.eval_steps=10", "train.save_steps=20")


@pytest.fixture(scope="module")
def alone(base, tmp_path_factory) -> dict:
    """Twenty steps in one process."""
    return steps.train([*base, *TWENTY], tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.parametrize(
    ("strategy", "size"),
    [("ddp", 2), ("fsdp", 2), ("tensor", 2), (DIVIDED, 2), ("ddp_tensor", 4), ("context", 2), ("pipeline", 2)],
)
def test_twenty_steps_are_those_of_one_process(strategy: str, size: int, base, alone, request, tmp_path):
    ranks: Ranks = request.getfixturevalue({2: "two", 4: "four"}[size])
    settings = [*base, *TWENTY, *f"parallel.strategy={strategy}".split()]
    report, *others = ranks.run(steps.train, settings, tmp_path / "run")
    assert all(other == report for other in others)
    assert len(report["history"]) == len(alone["history"])
    for mine, its in zip(report["history"], alone["history"], strict=True):
        assert mine.keys() - TIMES == its.keys() - TIMES
        for key in mine.keys() - TIMES:
            # Sums in another order: 1e-7 a step, which Adam's first steps, of the gradient's sign, make larger.
            assert mine[key] == pytest.approx(its[key], rel=2e-4 if key == "grad_norm" else 2e-5), (mine["step"], key)
    assert report.keys() - {"pipeline"} == alone.keys()
    for key in ("steps", "planned_steps", "data", "parameters", "attention_kernel", "warnings"):
        assert report[key] == alone[key], key
    assert report["eval_loss_after"] == pytest.approx(alone["eval_loss_after"], rel=2e-5)


def test_fp16_in_pieces_is_scaled_as_in_one_process(two, base, tmp_path):
    """The loss scaler multiplies gradients by up to 65,536: whoever clips without dividing clips to almost nothing."""
    settings = [*base, "tricks.precision=fp16", "train.max_steps=2", "train.eval_steps=2", "train.save_steps=2"]
    its = steps.train(settings, tmp_path / "alone")
    mine, _ = two.run(steps.train, [*settings, "parallel.strategy=fsdp"], tmp_path / "run")
    norms = [[step["grad_norm"] for step in report["history"] if "grad_norm" in step] for report in (mine, its)]
    assert len(norms[0]) == 2
    assert norms[0] == pytest.approx(norms[1], rel=0.02)  # fp16 has 11 bits, and sums in two orders
    assert losses_of(mine) == pytest.approx(losses_of(its), rel=2e-3)


def test_the_adapter_is_one_that_plain_peft_loads(two, base, tmp_path, run_cria):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    [report, _] = two.run(steps.train, [*base, "train.max_steps=1", "parallel.strategy=fsdp"], tmp_path / "run")
    code, _, _ = run_cria("verify", report["adapter"])
    assert code == 0
    plain = AutoModelForCausalLM.from_pretrained(models.find("random:tiny").path)
    adapted = PeftModel.from_pretrained(plain, report["adapter"])
    trained = {name: p for name, p in adapted.named_parameters() if "lora_B" in name}
    assert len(trained) == 14
    assert all(p.abs().max() > 0 for p in trained.values())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline"])
def test_a_resumed_run_is_the_uninterrupted_one(two, strategy: str, base, tmp_path):
    """With dropout: each process goes on with its own draws."""
    settings = [*base, "train.max_steps=4", "train.save_steps=2", "lora.dropout=0.1", f"parallel.strategy={strategy}"]
    two.run(steps.train, settings, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    back_to(tmp_path / "stopped", 2)
    two.run(steps.train, settings, tmp_path / "stopped", True)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole")


FOUR = ("train.max_steps=4", "train.save_steps=2")


@pytest.fixture(scope="module")
def losses(base, tmp_path_factory) -> list[float]:
    """Of four steps in one process."""
    return losses_of(steps.train([*base, *FOUR], tmp_path_factory.mktemp("four") / "run"))


@pytest.mark.parametrize(
    ("first", "then"),
    [("fsdp", "none"), ("none", "fsdp"), ("tensor", "ddp"), ("pipeline", "none"), ("ddp", "pipeline")],
)
def test_another_number_of_processes_goes_on_from_a_checkpoint(two, first: str, then: str, base, losses, tmp_path):
    """Whatever was in pieces is whole in a checkpoint: the optimizer's states too, or the losses would part."""

    def train(strategy: str, *resume: bool) -> dict:
        settings = [*base, *FOUR, f"parallel.strategy={strategy}"]
        if strategy == "none":
            return steps.train(settings, tmp_path / "run", *resume)
        return two.run(steps.train, settings, tmp_path / "run", *resume)[0]

    train(first)
    back_to(tmp_path / "run", 2)
    assert losses_of(train(then, True)) == pytest.approx(losses, rel=2e-5)


PIPED = ("parallel.strategy=pipeline", "train.monitor_seconds=0")


def test_a_pipelines_report_lays_the_estimate_beside_the_measurement(two, base, tmp_path, run_cria):
    """Its adapter is whole, and idle time stands beside the formula's."""
    settings = [*base, *PIPED, "train.max_steps=2"]
    [report, _] = two.run(steps.train, settings, tmp_path / "run")
    assert run_cria("verify", report["adapter"])[0] == 0
    assert report["estimate"]["measured_bytes"] == max(
        entry["peak_bytes"] for entry in report["history"] if "peak_bytes" in entry
    )
    assert report["estimate"]["ratio"] == pytest.approx(1, abs=0.05)
    peaks = report["estimate"]["measured_by_process"]
    assert max(peaks) == report["estimate"]["measured_bytes"]
    assert peaks[0] != peaks[1], "the last stage has the head"
    assert "pipeline: receive buffers" in {row["name"] for row in report["estimate"]["lines"]}
    said = report["pipeline"]
    assert (said["data"], said["blocks"], said["schedule"]) == (1, [[0, 0], [1, 1]], "1f1b")
    assert said["idle_share_of_equal_stages"] == 1 / 5
    assert 0 < said["idle_share"] < 1
    assert "pipeline" in json.loads((tmp_path / "run" / "adapter" / "provenance.json").read_text())


def test_a_pipeline_whose_time_is_up_goes_on_where_it_was(two, base, tmp_path):
    """A checkpoint and a result after the first step; then the run that had all the time, to the bit."""
    settings = [*base, *PIPED, "train.max_steps=3", "lora.dropout=0.1"]
    two.run(steps.train, settings, tmp_path / "whole")
    [cut, other] = two.run(steps.train, [*settings, "train.time_budget=0.01"], tmp_path / "cut")
    assert cut == other
    assert (cut["steps"], cut["planned_steps"]) == (1, 3)
    assert "train.time_budget ended the run after step 1 of 3" in " ".join(cut["warnings"])
    two.run(steps.train, settings, tmp_path / "cut", True)
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


def test_a_pipelines_history_is_traced_and_given_to_trackers(two, base, tmp_path):
    settings = [*base, *PIPED, "train.max_steps=4", "train.profile=true", "train.report_to=tensorboard"]
    [report, _] = two.run(steps.train, settings, tmp_path / "run")
    assert report["profile"]
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_full_fine_tuning_in_pieces_is_saved_whole(two, base, tmp_path):
    from safetensors.torch import load_file

    settings = [*base, "tricks.peft=none", "train.learning_rate=1e-4", "train.max_steps=2"]
    steps.train(settings, tmp_path / "alone")
    two.run(steps.train, [*settings, "parallel.strategy=fsdp"], tmp_path / "run")
    mine, its = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "alone"))
    assert its.keys() <= mine.keys()  # the tied head is the embedding once more
    assert all((mine[name] - its[name]).abs().max() < 2e-4 for name in its)  # two steps of 1e-4 each
    start = load_file(Path(models.find("random:tiny").path) / "model.safetensors")
    moved = sum((its[name] - start[name].float()).abs().sum() for name in its)
    apart = sum((mine[name] - its[name]).abs().sum() for name in its)
    assert apart < 1e-5 * moved  # 3e-7 here, of what training did, where an untrained model would be apart by all of it


def back_to(folder: Path, step: int) -> None:
    """As if the run had been killed after this step's checkpoint."""
    for path in folder.iterdir():
        if path.name in ("adapter", "model"):
            shutil.rmtree(path)
        elif path.name.startswith("report"):
            path.unlink()
    for path in (folder / "checkpoints").iterdir():
        if path.name != f"checkpoint-{step}":
            shutil.rmtree(path)
    assert json.loads((folder / "checkpoints" / f"checkpoint-{step}" / "trainer_state.json").read_text())


def losses_of(report: dict) -> list[float]:
    return [entry["loss"] for entry in report["history"] if "loss" in entry]


def weights(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()
