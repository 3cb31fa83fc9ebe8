"""The benchmarks of the dry run hold together."""

import json

import pytest

from benchmarks import dry_run_error, gpu_error
from benchmarks.common import HERE
from cria_tricks.cases import settings_of
from cria_tricks.hardware import T4
from cria_tricks.models import Weights
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import resolve


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
