"""The list of public runs: every one that can be a recipe is one, and is planned; every other says why not."""

import pytest

from benchmarks.published_runs import published_runs
from cria_tricks.predict import plan_data
from cria_tricks.predict.toggles import Target

EXPRESSIBLE = [run for run in published_runs() if run.set]


def test_each_run_has_a_name_a_source_and_a_number_or_says_why_it_has_none():
    ids = [run.id for run in published_runs()]
    assert len(set(ids)) == len(ids) >= 40
    for run in published_runs():
        assert all((run.date, run.what, run.source)), run.id
        assert bool(run.set) != bool(run.why_not), run.id
        assert run.why_not or run.reserved or run.tokens_per_second, run.id
        assert run.bytes_are or not run.reserved, run.id


def test_only_runs_with_known_tokens_are_fitted():
    fitted = [run for run in published_runs() if run.fit]
    assert len(fitted) >= 12
    for run in fitted:
        assert all((run.set, run.tokens_per_second, run.gpu.card)), run.id


def test_derived_rates_are_the_quotients_that_they_are_said_to_be():
    runs = {run.id: run for run in published_runs()}
    epoch = 3000 * 4096
    for name in ("tinyllama-unsloth-no-checkpointing", "tinyllama-unsloth", "tinyllama-trl-sdpa", "llama-2-7b-hf"):
        run = runs[name]
        assert run.tokens_per_second == pytest.approx(epoch / run.seconds, abs=1), name
    assert runs["llama-2-7b-unsloth"].tokens_per_second == pytest.approx(epoch / (13 * 3600 + 7 * 60), abs=1)


@pytest.mark.parametrize("run", EXPRESSIBLE, ids=lambda run: run.id)
def test_each_expressible_run_is_planned(run):
    found = plan_data.bill(Target(run.shape, run.gpu.device), run.recipe)
    assert found.seconds_per_step > 0
    assert found.peak_bytes > 0
