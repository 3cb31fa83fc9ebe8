"""A run that loses processes: started again by torchrun, it goes on from its checkpoint and ends as if nothing was."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.launch import torchrun
from cria_tricks.launch.torchrun import Elastic
from cria_tricks.processes import numbers, world
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from tests import warm
from tests.parallel import steps
from tests.sweeps import sample

ENDPOINT = "localhost:29400"


def words(*settings: str, processes: int = 2, out: Path | None = None, resume: bool = False, **elastic) -> str:
    return torchrun.shown(
        torchrun.command("smoke", processes, settings, out, resume=resume, elastic=Elastic(**elastic))
    )


def test_restarts_always_come_with_resume_and_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert words(max_restarts=3) == (
        "torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m cria_tricks train smoke --set "
        "parallel.strategy=ddp --out runs/smoke --resume"
    )
    (tmp_path / "runs" / "smoke" / "adapter").mkdir(parents=True)
    assert "--out runs/smoke-2 --resume" in words(max_restarts=3)
    with pytest.raises(BadInput, match=r"--out runs/smoke: holds another run \(adapter\); name a new folder, or go on"):
        words(max_restarts=1, out=Path("runs/smoke"))
    assert "--out runs/smoke --resume" in words(max_restarts=1, out=Path("runs/smoke"), resume=True)


def test_machines_that_come_and_go_are_one_command_for_each():
    even = "tricks.gradient_accumulation=12"
    shown = words(even, processes=1, nodes="1:4", endpoint=ENDPOINT, max_restarts=3, out=Path("shared"))
    assert shown == (
        f"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 1:4 --rdzv-backend c10d --rdzv-endpoint {ENDPOINT} "
        "--rdzv-id smoke --nproc-per-node 1 --max-restarts 3 -m cria_tricks train smoke "
        "--set tricks.gradient_accumulation=12 --set "
        "parallel.strategy=ddp --out shared --resume"
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"nodes": "1:4", "endpoint": ENDPOINT, "out": Path("x")}, "3 processes cannot share the 4 micro-batches"),
        ({"nodes": "4:1", "endpoint": ENDPOINT, "out": Path("x")}, "--nodes 4:1: write how many machines at least"),
        ({"nodes": "some", "endpoint": ENDPOINT, "out": Path("x")}, "--nodes some: write how many machines"),
        ({"nodes": "1:2", "out": Path("x")}, "--nodes: needs --endpoint HOST:PORT"),
        ({"nodes": "1:2", "endpoint": ENDPOINT}, "--out, a folder they share"),
        ({"endpoint": ENDPOINT}, "--endpoint: is for --nodes MIN:MAX"),
    ],
)
def test_what_no_number_of_machines_could_do_is_refused(more, why):
    with pytest.raises(BadInput, match=why):
        words(processes=1, **more)


def test_the_last_machine_goes_on_alone(monkeypatch):
    recipe = with_settings(recipes.smoke(), ["parallel.strategy=ddp"])
    with pytest.raises(BadInput, match="needs two processes or more"):
        resolve(recipe)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "smoke")
    assert resolve(recipe).parallel["data"] == 1


def test_a_start_does_not_read_what_an_earlier_one_left(monkeypatch):
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = world._start()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert world._start() != first
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")  # each machine counts its own failures
    assert world._start() == first


def test_who_is_started_again_does_not_ask_for_it(monkeypatch):
    assert not numbers.starts_again()
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert numbers.starts_again()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert not numbers.starts_again()


@pytest.mark.parametrize("strategy", sample(["ddp", "pipeline"], 1))
def test_a_killed_worker_comes_back_and_the_run_is_the_uninterrupted_one(two, tmp_path, strategy):
    rows = tmp_path / "few.jsonl"
    few = ("what is it?", "a row", "and this?", "another one", "a third?", "yes, longer than the others", "so?", "end")
    with rows.open("w") as file:
        for asked, answered in zip(few[::2], few[1::2], strict=True):
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
            file.write(json.dumps({"messages": messages}) + "\n")
    settings = [
        "model=random:tiny", "data.max_length=64", f"data.train={rows}", f"data.eval={rows}", "train.max_steps=8",
        "tricks.gradient_accumulation=2", "tricks.peft=lora", "train.save_steps=2", f"parallel.strategy={strategy}",
    ]  # fmt: skip
    (tmp_path / "short.toml").write_text(with_settings(Recipe(name="short"), settings).to_toml())
    command = ["launch", "short.toml", "--on", "torchrun", "--nproc", "2"]
    [straight, _] = two.run(steps.train, settings, tmp_path / "straight")
    log = tmp_path / "log"
    with log.open("w") as file:
        started = warm.start(
            *command, "--max-restarts", "1", "--out", "run", cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    deadline = time.monotonic() + 600
    while "step    3/8" not in log.read_text():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.02)
    _, second = warm.workers(started)
    second.send_signal(signal.SIGKILL)
    assert started.wait(timeout=600) == 0, log.read_text()
    said = log.read_text()
    assert said.count("error: another process of this run died") == 1
    assert "all are started again and go on from there" in said
    assert "going on from run/checkpoints/checkpoint-" in said
    assert "Traceback" not in said
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    losses = [[(e["step"], e.get("loss"), e.get("eval_loss")) for e in r["history"]] for r in (report, straight)]
    assert losses[0] == losses[1]
    adapters = [tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("run", "straight")]
    assert adapters[0].read_bytes() == adapters[1].read_bytes()
