"""The launcher's command, and what becomes of a run when one of its processes does."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.hardware.device import pretend
from cria_tricks.launch import torchrun as launch
from cria_tricks.measure import monitor
from tests import warm
from tests.parallel import steps

# fp32, because the recipe's own precision differs between processors.
TINY = ["model=random:tiny", "tricks.precision=fp32", "data.max_length=64", "train.save_steps=2"]


def words(*arguments, **more) -> str:
    return launch.shown(launch.command(*arguments, **more))


def test_the_command_is_one_that_a_person_could_have_typed():
    assert words("smoke", 2, ["train.max_steps=3"], out=Path("a b"), resume=True) == (
        "torchrun --standalone --nproc-per-node 2 -m cria_tricks train smoke --set train.max_steps=3 "
        "--set parallel.strategy=ddp --out 'a b' --resume"
    )


@pytest.mark.parametrize(
    ("line", "processes"),
    [
        ("torchrun --standalone --nproc-per-node 4 -m cria_tricks", 4),
        ("torchrun --nodes 2 --nproc-per-node 8 -m cria_tricks", 8),
    ],
)
def test_the_threads_of_a_process_are_its_share_of_the_cores(monkeypatch, line, processes):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 96)
    monkeypatch.setattr("torch.distributed.run.main", lambda: None)
    monkeypatch.setattr(sys, "argv", [])
    assert launch.run(line.split()) == 0
    assert os.environ["OMP_NUM_THREADS"] == str(96 // processes)


def test_what_a_run_may_do_is_handed_on(run_cria):
    options = ("--resume", "--other-base", "--offline")
    code, stdout, _ = run_cria("launch", "smoke", "--on", "torchrun", "--nproc", "2", "--print", *options)
    assert code == 0
    assert stdout.endswith("--resume --other-base --offline\n")


def test_two_cards_get_a_process_each_and_no_device_map(monkeypatch):
    """Kaggle's two T4s."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pretend(T4):
        found = words("kwanzaa")
        assert "--nproc-per-node 2 " in found
        assert "parallel.strategy=ddp" in found
        with pytest.raises(BadInput, match="--nproc 4: this machine has 2 cards, and a process has one for itself"):
            words("kwanzaa", 4)


@pytest.mark.parametrize(
    ("processes", "settings", "why"),
    [
        (3, [], "3 processes cannot share the 4 micro-batches of a step evenly; set tricks.gradient_accumulation"),
        (2, ["parallel.strategy=tensor"], "packed bytes cannot be cut"),
        (2, ["parallel.strategy=tensor", "tricks.quantization=none"], "9 heads and 3 heads of .* use 3 processes"),
        (2, ["parallel.strategy=ddp_tensor", "tricks.quantization=none"], "they make no grid"),
        (2, ["parallel.strategy=fsdp", "tricks.optimizer=adamw_8bit"], "take no sharded tensor; use optimizer=adamw"),
        (2, ["parallel.strategy=pp"], "must be none, ddp, fsdp, tensor, ddp_tensor, context, model or pipeline"),
    ],
)
def test_what_would_end_all_processes_starts_none(processes, settings, why):
    with pytest.raises(BadInput, match=why):
        words("smoke", processes, settings)


def start(tmp_path: Path, *more: str) -> tuple[warm.Child | subprocess.Popen[str], Path, list[str]]:
    """Start a run of two processes, in the folder ``run``; its output and its settings."""
    log = tmp_path / "log"
    rows = steps.write_rows(tmp_path / "rows.jsonl", 8)
    settings = [*TINY, f"data.train={rows}", f"data.eval={rows}", *more]
    words = ["launch", "smoke", "--on", "torchrun", "--nproc", "2", "--out", "run"]
    words += [part for one in settings for part in ("--set", one)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        started = warm.start(*words, cwd=tmp_path, stdout=file, stderr=subprocess.STDOUT, env=environment)
    return started, log, settings


def until(log: Path, text: str) -> None:
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        if text in log.read_text():
            return
        time.sleep(0.02)
    raise AssertionError(f"{text} never came:\n{log.read_text()}")


def test_a_killed_worker_ends_all_in_one_line_and_the_run_goes_on(two, tmp_path, run_cria):
    """It goes on in processes that are there already; ``test_elastic.py`` starts new ones by the command."""
    started, log, settings = start(tmp_path, "parallel.strategy=fsdp", "train.max_steps=6")
    until(log, "step    3/")
    workers = warm.workers(started)
    assert len(workers) == 2
    workers[1].send_signal(signal.SIGKILL)
    assert started.wait(timeout=600) == 1
    said = [line for line in log.read_text().splitlines() if "error" in line.lower() or "Traceback" in line]
    assert len(said) == 1
    assert said[0].startswith("error: another process of this run died or stopped answering")
    assert not any(worker.is_running() for worker in workers)
    sampled = monitor.read(tmp_path / "run" / "monitor.jsonl")
    [said, _] = two.run(steps.go_on, "smoke", settings, tmp_path / "run")
    assert re.search(r"going on from \S+/run/checkpoints/checkpoint-[24]", said)
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert report["steps"] == report["planned_steps"]
    for name, found in zip(("monitor.jsonl", "monitor-1.jsonl"), report["monitor"], strict=True):
        assert found == monitor.summarise(monitor.read(tmp_path / "run" / name)), "each process samples for itself"
    assert report["monitor"][0]["samples"] > len(sampled) > 0, "and its file goes on"
    code, out, _ = run_cria("verify", report["adapter"])
    assert (code, "every sha256 as written" in out) == (0, True)


def test_ctrl_c_saves_and_ends_all(tmp_path):
    started, log, _ = start(tmp_path, "train.epochs=100")
    until(log, "step    2/")
    started.send_signal(signal.SIGINT)
    assert started.wait(timeout=600) == 130
    assert log.read_text().count("interrupted after step") == 1
    assert "Traceback" not in log.read_text()
    assert len(list((tmp_path / "run" / "checkpoints").glob("checkpoint-*"))) >= 1


BAD = """
import sys
from cria_tricks.trainer.training import Training

honest = Training.loss_sum


def loss_sum(self, batch):
    bad = self.world.rank == 1 and self.state.global_step == 1 and self.model.training
    return honest(self, batch) * (float("nan") if bad else 1)


Training.loss_sum = loss_sum
from cria_tricks.cli.main import main
main()
"""


def test_what_goes_wrong_in_one_process_is_said_by_that_one(tmp_path):
    rows = steps.write_rows(tmp_path / "rows.jsonl", 8)
    (tmp_path / "bad.py").write_text(BAD)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "bad.py"]
    given = [*TINY, f"data.train={rows}", f"data.eval={rows}", "parallel.strategy=ddp"]
    settings = [part for setting in given for part in ("--set", setting)]
    done = subprocess.run(
        [*torchrun, "train", "smoke", *settings], cwd=tmp_path, capture_output=True, text=True, timeout=600,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert said[0].startswith("error: the loss is nan at step 2; stopped before the optimizer touched any weight")
    assert done.returncode == 1
