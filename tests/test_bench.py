"""`pytest --benchmark-only` as a reader runs it, on few tokens: what it writes, and what stands in it."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from bitsandbytes.optim import GlobalOptimManager

from benchmarks import bench_techniques
from benchmarks.common import real_lengths
from cria_tricks.bench import results
from cria_tricks.bench.case import Setup, free_memory, measure
from cria_tricks.hardware import T4
from cria_tricks.hardware.device import pretend
from cria_tricks.techniques.packing import best_fit

ROOT = Path(__file__).parents[1]
TINY = Setup("tiny", 32, 2)


def pytest_run(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pytest", "--benchmark-only", "-p", "no:cacheprovider", *arguments]
    alone = {name: value for name, value in os.environ.items() if name != "PYTEST_XDIST_WORKER"}
    return subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> tuple[subprocess.CompletedProcess, Path]:
    """From the root, without a path."""
    folder = tmp_path_factory.mktemp("bench")
    size = ("--tokens", "32", "--rounds", "2", f"--results={folder}", f"--benchmark-json={folder}/mine.json")
    return pytest_run("-k", "test_technique and (flash_attention or paged_optimizer) or flash_decoding", *size), folder


def test_it_collects_the_benchmarks_and_no_test(ran):
    done, _ = ran
    assert done.returncode == 0, done.stdout + done.stderr
    assert "7 passed, 1 skipped" in done.stdout
    assert "paged_optimizer.on" in done.stdout


def test_every_case_is_in_a_file_of_its_own_and_all_are_in_the_json(ran):
    _, folder = ran
    cases = results.read(folder)
    assert {(case.bench, case.name) for case in cases} == {
        ("flash_attention", "off"), ("flash_attention", "on"), ("flash_attention", "flash_attention_2"),
        ("paged_optimizer", "off"), ("paged_optimizer", "on"),
        ("flash_decoding", "eager"), ("flash_decoding", "off"), ("flash_decoding", "on"),
    }  # fmt: skip
    by_name = sorted(cases, key=lambda case: (case.bench, case.name))
    assert sorted(results.read_cases(folder / "mine.json"), key=lambda c: (c.bench, c.name)) == by_name


def test_pytest_benchmark_has_the_trainers_own_seconds(ran):
    _, folder = ran
    timed = {b["fullname"]: b for b in json.loads((folder / "mine.json").read_text())["benchmarks"]}
    case = next(case for case in results.read(folder) if (case.bench, case.name) == ("flash_attention", "on"))
    stats = timed["benchmarks/bench_techniques.py::test_technique[flash_attention-on]"]
    assert stats["stats"]["data"] == pytest.approx(case.seconds, abs=1e-9)
    assert len(case.seconds) == 2
    assert stats["group"] == "flash_attention"
    assert stats["extra_info"]["peak_allocated_bytes"] == case.peak_allocated_bytes
    assert stats["extra_info"]["attention_kernel"] == "flash"


def test_benchmarks_are_not_run_side_by_side():
    done = pytest_run("benchmarks/bench_techniques.py", "-n", "2")
    assert done.returncode == 4
    assert "benchmarks run one after the other: leave out -n" in done.stdout + done.stderr


def test_packed_rows_are_really_fewer():
    for tokens in (256, 2048):
        lengths = real_lengths(bench_techniques.DOCUMENTS, tokens)
        assert len(best_fit(lengths, tokens)) < len(lengths)


def test_rows_of_a_batch_are_ragged_so_that_the_bill_may_count_on_a_mask():
    assert len(set(TINY.ragged(8))) == 8
    assert max(TINY.ragged(8)) == TINY.tokens


def test_a_refused_case_says_why():
    with pretend(T4):
        case = measure("mixed_precision", "bf16", "precision=bf16", TINY, against="off")
    assert case.status == "refused"
    assert "tricks.precision" in case.why or "bf16" in case.why
    assert case.seconds == ()


def test_a_case_that_runs_out_of_memory_is_a_result(monkeypatch):
    def full(*arguments, **keywords):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("cria_tricks.bench.case.load", full)
    case = measure("lora", "on", "peft=lora", TINY)
    assert case.status == "oom"
    assert "allocate memory" in case.why
    assert case.estimated_bytes > 0


def test_memory_and_speed_are_of_one_run_and_the_bill_is_of_the_same_rows():
    case = measure("chunked_loss", "on", "peft=lora attention=sdpa chunked_loss=true", TINY, against="off")
    assert case.tokens == 32
    assert case.trained_tokens == 24
    assert case.estimated_bytes == pytest.approx(case.peak_allocated_bytes, rel=0.02)


def test_nothing_holds_the_embedding_of_the_case_before():
    """As the Trainer registers it for an 8-bit optimizer. On an H200 it took 501 MiB from the next case."""
    embedding = torch.nn.Embedding(4, 2)
    GlobalOptimManager.get_instance().register_module_override(embedding, "weight", {"optim_bits": 32})
    held = weakref.ref(embedding)
    del embedding
    free_memory()
    assert held() is None
