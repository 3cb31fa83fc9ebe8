"""The benchmarks of the bill hold together, and the table that is committed is this code's."""

import json

import pytest

from benchmarks import dry_run_error, estimate_error, estimate_random, gpu_error
from benchmarks.common import HERE
from cria_tricks.cases import settings_of
from cria_tricks.hardware import T4
from cria_tricks.models import Weights
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import resolve


def test_the_cases_are_many_and_all_different():
    """At least 200, models x batch 1-4 x 256-8192 tokens x toggle sets."""
    cases = list(estimate_error.cases())
    assert len(cases) == len({str(case) for case in cases}) >= 200
    for model, many in estimate_error.MODELS.items():
        mine = [case for case in cases if case.model == model]
        assert len(mine) == many
        assert {case.batch for case in mine} == {1, 2, 3, 4}
        assert {case.tokens for case in mine} >= {256, 8192}
    assert {case.tricks for case in cases if case.card == "t4"} == set(estimate_error.SETS)


def test_the_committed_table_is_what_the_estimate_says_now_and_within_its_bounds():
    """Those of ``benchmarks/estimate_random.py``; ``make bench-estimate`` writes the table anew."""
    found = json.loads((HERE / "results" / "cpu" / "estimate_error.json").read_text())
    by_name = {run["case"]: run for run in found["runs"]}
    now = [estimate_error.compare(case, _counted(by_name[str(case)])) for case in estimate_error.cases()]
    assert now == [by_name[run["case"]] for run in now]
    summary = estimate_error.summary(now)
    assert summary == {key: found[key] for key in summary}
    assert not estimate_random.outside(one["error"] for one in now)
    assert summary["median_size"] <= 0.001


def _counted(run):
    return {key: run[key] for key in ("dry_run_bytes", "dry_run_seconds")}


@pytest.mark.parametrize("words", ["peft=lora", "peft=lora gradient_checkpointing=true chunked_loss=true"])
def test_the_dry_run_is_within_one_per_cent_of_real_steps_made_now(words, tiny_model, monkeypatch):
    """By the benchmark's own comparison, on a small model; tests/memory/test_dry_run.py has more sets, to 128 bytes."""
    monkeypatch.setattr(dry_run_error.models, "find", lambda name: Weights(name, str(tiny_model), None))
    case = dry_run_error.compare(words, 64)
    assert case["error"] == case["dry_run"] / case["real"] - 1
    assert case["real"] > 4 * 512 * 256, "the embedding alone takes more"
    assert abs(case["error"]) <= 0.01


def test_the_committed_comparison_of_the_dry_run_is_of_the_sets_as_they_are():
    found = json.loads((HERE / "results" / "cpu" / "dry_run_error.json").read_text())
    assert [case["settings"] for case in found["cases"]] == [settings_of(words) for words in dry_run_error.SETS]


@pytest.mark.parametrize("words", gpu_error.SETS)
def test_every_set_of_the_comparison_on_a_card_can_run_on_a_t4(words):
    assert resolve(with_settings(Recipe(), settings_of(words)), T4).device is T4


def test_the_comparison_on_a_card_has_enough_sets():
    assert len(set(gpu_error.SETS)) == len(gpu_error.SETS) >= 16
    assert len(gpu_error.TOKENS) >= 2
    assert len(set(dry_run_error.SETS)) >= 20
