"""What is made of the scores: means, intervals, paired differences, counts, and the report to read."""

import json
from dataclasses import replace

import pytest
import torch

from cria_tricks.kwanzaa.answers import Written
from cria_tricks.kwanzaa.bootstrap import interval, resampled_means
from cria_tricks.kwanzaa.page import markdown, scores_table
from cria_tricks.kwanzaa.reply import read_reply
from cria_tricks.kwanzaa.summary import Scored, summarise
from tests.helpers import is_frozen
from tests.kwanzaa.made import GOOD, REFUSAL, reply, row

ABOUT = {"data": "made", "rows": 4, "rows_in_data": 4}


def written(loss: float, trained: int) -> Written:
    return Written("", 10, True, loss, trained)


@pytest.fixture
def systems() -> dict[str, list[Scored]]:
    """Four rows, of which the first two want a refusal; the base is worse, and always by the same loss a token."""
    rows = [row(refuses=number < 2) for number in range(4)]
    adapter = [reply(REFUSAL, 0), reply(GOOD), reply(GOOD), reply("In 1950, in Nairobi [3].")]
    base = [read_reply("I cannot say."), read_reply("Wood."), reply(REFUSAL), read_reply("")]
    sizes = (10, 20, 30, 400)
    return {
        "adapter": [Scored(r, a, written(1.0 * n, n)) for r, a, n in zip(rows, adapter, sizes, strict=True)],
        "base": [
            Scored(r, b, replace(written(1.5 * n, n), ended=False)) for r, b, n in zip(rows, base, sizes, strict=True)
        ],
        "reference": [Scored(r, r.reference, None) for r in rows],
    }


def test_resampled_means_have_the_mean_and_the_spread_of_a_mean():
    values = [0.0] * 30 + [1.0] * 10
    means = resampled_means([values])[:, 0]
    assert means.mean().item() == pytest.approx(0.25, abs=0.005)
    assert means.std().item() == pytest.approx((0.25 * 0.75 / 40) ** 0.5, rel=0.05)
    low, high = interval(means)
    assert 0.10 <= low <= 0.15
    assert 0.375 <= high <= 0.40


def test_an_interval_is_the_middle_95_percent():
    assert interval(torch.linspace(0, 1, 1001, dtype=torch.float64)) == pytest.approx((0.025, 0.975), abs=1e-12)


def test_draws_are_seeded_and_the_same_for_all_columns():
    one, other = [1.0, 5.0, 2.0, 8.0], [0.0, 4.0, 1.0, 7.0]
    means = resampled_means([one, other], draws=200)
    assert torch.equal(means, resampled_means([one, other], draws=200))
    torch.testing.assert_close(means[:, 0] - means[:, 1], torch.ones(200, dtype=torch.float64))
    assert means[:, 0].std() > 0.5
    assert not torch.equal(means, resampled_means([one, other], draws=200, seed=1))


def test_scores_counts_and_cases(systems):
    found = summarise(systems, ABOUT)
    adapter, base, reference = (found["systems"][name] for name in ("adapter", "base", "reference"))
    assert [adapter[name]["value"] for name in ("format", "citations", "grounding", "refusal")] == [1, 0.75, 0.75, 0.75]
    assert adapter["confusion"] == {
        "refused_rightly": 1, "answered_wrongly": 1, "refused_wrongly": 0, "answered_rightly": 2, "no_text": 0,
    }  # fmt: skip
    assert base["confusion"] == {
        "refused_rightly": 1, "answered_wrongly": 1, "refused_wrongly": 1, "answered_rightly": 0, "no_text": 1,
    }  # fmt: skip
    assert base["violations"] == {"empty answer": 0.25, "no JSON object": 0.5}
    assert (base["json"], base["cut_off"], adapter["cut_off"], reference["tokens"]) == (0.25, 4, 0, None)
    assert (adapter["items"], adapter["unsupported"]) == (10, 2)
    assert adapter["citation_precision"] == 4 / 5
    json.dumps(found, allow_nan=False)


def test_the_loss_is_per_token_and_differences_are_paired(systems):
    found = summarise(systems, ABOUT)
    assert found["systems"]["adapter"]["loss"] == {"value": 1, "low": 1, "high": 1}
    loss = found["differences"]["loss"]
    assert [loss[name] for name in ("value", "low", "high")] == pytest.approx([-0.5] * 3), "in every draw the same"
    assert found["differences"]["format"]["value"] == 0.75
    assert found["differences"]["format"]["low"] < 0.75 < found["differences"]["format"]["high"] <= 1
    del systems["base"]
    assert summarise(systems, ABOUT)["differences"] == {}


def test_the_report_shows_every_system_and_ten_examples(systems):
    many = {name: scored * 6 for name, scored in systems.items()}
    found = summarise(many, {**ABOUT, "rows": 24})
    chosen = [0, 3, 5, 8, 10, 13, 15, 18, 20, 23]  # 23 / 9 apart, rounded
    for example, number in zip(found["examples"], chosen, strict=True):
        assert list(example["systems"]) == ["adapter", "base", "reference"]
        for name, shown in example["systems"].items():
            each = many[name][number]
            assert shown == {
                "text": each.reply.text, "read": each.reply.fields is not None,
                "scores": {scorer: score.value for scorer, score in each.scores.items()},
            }  # fmt: skip
        assert (example["row"], example["query"]) == ("made:1", many["base"][number].row.prompt.query)
        assert example["documents"] == [document.title for document in many["base"][number].row.prompt.documents]
        assert example["reference"] == many["reference"][number].reply.text
    text = markdown(found)
    assert text.count("\n### ") == 10
    assert text.count("**base** (format 0.00") >= 5
    assert "> In 1950, in Nairobi [3]." in text
    assert "> (no text)" in text
    assert "| should answer, refuses | 0 | 6 | 0 |" in text
    head, *rows = scores_table(found)
    assert head == ["score", "adapter", "base", "reference", "adapter minus base"]
    assert [row[0] for row in rows[-2:]] == [
        "loss per token of the reference, nats",
        "perplexity of the reference, exp(loss)",
    ]
    assert rows[-2][1:] == ["1.000 [1.000, 1.000]", "1.500 [1.500, 1.500]", "", "-0.500 [-0.500, -0.500]"]
    e, more = "2.718 [2.718, 2.718]", "4.482 [4.482, 4.482]"  # exp(1) and exp(1.5)
    assert rows[-1][1:] == [e, more, "", "-1.763 [-1.763, -1.763]"]


def test_one_row_is_enough(systems):
    found = summarise({name: scored[:1] for name, scored in systems.items()}, {**ABOUT, "rows": 1})
    assert len(found["examples"]) == 1
    assert markdown(found).count("\n### ") == 1


def test_ten_thousand_draws_from_the_same_seed():
    means = resampled_means([[0.0, 1.0], [1.0, 3.0]])
    assert means.shape == (10_000, 2)
    assert torch.equal(means, resampled_means([[0.0, 1.0], [1.0, 3.0]], draws=10_000, seed=0))
    assert set(means[:, 0].tolist()) == {0.0, 0.5, 1.0}


def test_what_is_counted_of_every_system(systems):
    found = summarise(systems, ABOUT)
    adapter, base, reference = (found["systems"][name] for name in ("adapter", "base", "reference"))
    assert [adapter["tokens"], base["tokens"], reference["cut_off"], reference["json"]] == [10, 10, None, 1.0]
    assert "loss" not in reference
    assert (base["citation_precision"], base["citation_recall"]) == (None, 0)
    assert (adapter["violations"], adapter["json"], adapter["cut_off"]) == ({}, 1.0, 0)
    assert found["systems"]["base"]["loss"]["value"] == 1.5
    assert [entry["refusal"] for entry in found["answers"]["adapter"]] == [
        {"value": float(should == did), "should": should, "did": did}
        for should, did in ((True, True), (True, False), (False, False), (False, False))
    ]
    assert list(found)[:3] == list(ABOUT)


def test_what_was_made_cannot_be_changed():
    assert is_frozen(Scored)
