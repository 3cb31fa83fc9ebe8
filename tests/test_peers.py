"""Our trainer and the others do the same job, and are weighed alike."""

import json

import pytest

from benchmarks import frontier
from benchmarks.bench_peers import padder
from benchmarks.peers import trl_sft
from benchmarks.peers.job import Job
from cria_tricks.bench.case import Setup
from cria_tricks.recipe import Recipe, with_settings
from tools import tables

TOGGLES = ["peft=lora", "attention=sdpa", "chunked_loss=true", "gradient_checkpointing=true"]
ROWS = Setup("tiny", 48, 1).documents([48, 40, 31, 24])
peers = pytest.mark.parametrize("way", ["bare", pytest.param("trl", marks=pytest.mark.skipif(
    not trl_sft.installed(), reason="TRL is not installed"))])  # fmt: skip


@pytest.fixture(scope="module")
def job() -> Job:
    settings = [*(f"tricks.{toggle}" for toggle in TOGGLES), "tricks.gradient_accumulation=2", "train.max_steps=3"]
    recipe = with_settings(Recipe(model="random:tiny"), [*settings, "train.save_minutes=0", "lora.dropout=0"])
    return Job(recipe, ROWS, padder())


@pytest.fixture(scope="module")
def ours(job) -> dict:
    return job.time("ours")


@peers
def test_a_peer_gets_the_same_losses(job, ours, way):
    theirs = job.time(way)
    assert theirs["losses"] == pytest.approx(ours["losses"], abs=2e-4)
    assert len(theirs["step_seconds"]) == len(ours["step_seconds"]) == 2


def test_a_peer_is_weighed_as_we_are(job):
    assert job.weigh("bare") == pytest.approx(job.weigh("ours"), rel=0.02)


def test_a_short_warm_up_is_the_first_step_of_all(job):
    rows = Setup("tiny", 160, 1).documents([160, 150, 155, 145])
    short = Job(job.recipe, rows, padder(), short_first=True)
    assert short.tokens[0] < short.tokens[1] / 2
    assert short.time("bare")["losses"] == pytest.approx(short.time("ours")["losses"], abs=2e-4)


def test_bytes_saved_are_seen(job):
    kept = Job(with_settings(job.recipe, ["tricks.gradient_checkpointing=false"]), ROWS, padder())
    assert kept.weigh("ours") > job.weigh("ours")


def test_another_job_is_refused(job, monkeypatch):
    monkeypatch.setattr(job, "tokens", [1, 1, 1])
    with pytest.raises(RuntimeError, match="tokens in 3 steps, not"):
        job.time("bare")


def test_ratios_are_of_runs_of_one_pair():
    ours = {"speeds": {"0": 10.0, "1": 30.0, "2": 90.0}, "peak_bytes": 50}
    theirs = {"way": "trl", "speeds": {"0": 10.0, "1": 10.0}, "peak_bytes": 100}
    assert tables.over(ours, theirs) == {"speed": 2.0, "slowest": 1.0, "fastest": 3.0, "bytes": 0.5}


def test_every_point_of_the_frontier_can_run_here():
    for name, point in frontier.POINTS.items():
        recipe = frontier.recipe_of(point, "random:tiny", 64, 2)
        assert recipe.tricks.gradient_accumulation * recipe.train.batch_size == 8, name
        assert not point.flags or point.way == "trl"


def test_a_frontier_is_not_mixed_of_two_machines(tmp_path, capsys, monkeypatch):
    job = {"model": "random:tiny", "tokens": 64, "steps": 2, "rows": "nguzo_saba"}
    path = frontier.path_of("frontier", tmp_path)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"job": job, "points": {}, "device": "another"}))
    arguments = ["--model", "random:tiny", "--tokens", "64", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["frontier", *arguments])
    with pytest.raises(SystemExit) as stopped:
        frontier.main()
    assert stopped.value.code == 2
    assert "measured on another" in capsys.readouterr().err
