"""What is made of the scores: means, intervals, paired differences, counts, and the report to read."""

import json
from dataclasses import asdict, replace

import numpy
import pytest

from cria_tricks.kwanzaa.contract import read_reply
from cria_tricks.kwanzaa.evaluate import trivial_reply
from cria_tricks.kwanzaa.summary import Scored, Written, markdown, mean, ratio, summarise, table, with_interval
from tests.kwanzaa.made import GOOD, NOTHING_FOUND, REFUSAL, reply, row

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


def test_the_interval_of_a_mean_is_that_of_the_textbook():
    found = with_interval(mean, [[0.0] * 30 + [1.0] * 10])
    assert found["value"] == 0.25
    spread = (0.25 * 0.75 / 40) ** 0.5
    assert found["low"] == pytest.approx(0.25 - 1.96 * spread, abs=0.03)
    assert found["high"] == pytest.approx(0.25 + 1.96 * spread, abs=0.03)
    assert found["high"] - 0.25 > 0.25 - found["low"], "the correction knows that a share of a quarter is skewed"
    assert with_interval(mean, [[0.0] * 30 + [1.0] * 10]) == found, "draws are seeded"


def test_an_interval_of_95_percent_holds_the_truth_that_often():
    draw = numpy.random.default_rng(3)
    inside = 0
    for _ in range(200):
        found = with_interval(mean, [draw.exponential(size=30)])
        inside += found["low"] <= 1 <= found["high"]
    assert 175 <= inside <= 199  # at 0.95, 190 with a standard deviation of 3; with 30 skewed rows somewhat fewer


@pytest.mark.parametrize("columns", [[[1.0] * 8], [[0.5]]])
def test_rows_that_agree_have_no_spread(columns):
    value = columns[0][0]
    assert with_interval(mean, columns) == {"value": value, "low": value, "high": value}


def test_a_loss_per_token_counts_long_rows_more():
    assert with_interval(ratio, [[10.0, 800.0], [10, 400]])["value"] == 810 / 410


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
    assert (base["cut_off"], adapter["cut_off"], reference["cut_off"]) == (4, 0, None)
    assert (adapter["violations"], "loss" in reference) == ({}, False)
    assert base["loss"]["value"] == 1.5
    json.dumps(found, allow_nan=False)


def test_the_cited_documents_are_held_against_those_of_the_data(systems):
    cites_two = reply("Ruth Adeyemi carved it [1]. Ujima is work [2].")
    for answer, share in ((reply(GOOD), 1), (cites_two, 0), (reply("Ujima is work [2]."), 0), (reply("It is."), 0)):
        found = summarise({"adapter": [Scored(row(), answer, None)]}, ABOUT)
        assert found["systems"]["adapter"]["same_documents"] == share


def test_trivial_answers_keep_the_contract_cite_everything_and_refuse_only_without_documents():
    asked = [row(), row(refuses=True), row(documents=NOTHING_FOUND, refuses=True)]
    found = summarise({"trivial": [Scored(each, trivial_reply(each), None) for each in asked]}, ABOUT)["systems"]
    trivial = found["trivial"]
    assert [trivial[name]["value"] for name in ("format", "citations", "grounding")] == [1, 1, 1]
    assert trivial["confusion"]["refused_rightly"] == 1
    assert trivial["confusion"]["answered_wrongly"] == 1
    assert trivial["confusion"]["answered_rightly"] == 1
    assert trivial["same_documents"] == 1 / 3


def test_the_loss_is_per_token_and_differences_are_paired(systems):
    found = summarise(systems, ABOUT)
    assert found["systems"]["adapter"]["loss"] == {"value": 1, "low": 1, "high": 1}
    loss = found["differences"]["loss"]
    assert [loss[name] for name in ("value", "low", "high")] == pytest.approx([-0.5] * 3), "in every draw the same"
    assert found["differences"]["format"]["value"] == 0.75
    assert found["differences"]["format"]["low"] < 0.75 < found["differences"]["format"]["high"] <= 1
    del systems["base"]
    assert summarise(systems, ABOUT)["differences"] == {}


def test_every_row_is_there_with_all_answers_and_the_reasons_of_their_scores(systems):
    found = summarise(systems, ABOUT)
    assert list(found)[:3] == list(ABOUT)
    for number, shown in enumerate(found["answers"]):
        asked = systems["base"][number].row
        assert (shown["row"], shown["query"]) == ("made:1", asked.query)
        assert shown["documents"] == [document.title for document in asked.documents]
        assert shown["reference"] == asked.reference.text
        for name, answer in shown["systems"].items():
            each = systems[name][number]
            scores = {scorer: {"value": score.value, **score.why} for scorer, score in each.scores.items()}
            model = {"written": asdict(each.written)} if each.written else {}
            assert answer == {"text": each.reply.text, **scores, **model}
    assert [shown["systems"]["adapter"]["refusal"] for shown in found["answers"]] == [
        {"value": float(should == did), "should": should, "did": did}
        for should, did in ((True, True), (True, False), (False, False), (False, False))
    ]


def test_the_table_has_a_column_for_every_system(systems):
    found = summarise(systems, ABOUT)
    head, *rows = table(found)
    assert head == ["rows", "score", "adapter", "base", "reference", "adapter minus base"]
    assert {len(row) for row in rows} == {len(head)}
    of = {name: rest for every, name, *rest in rows if every == "all, 4"}
    assert of["loss per token of the reference, nats"] == [
        "1.000 [1.000, 1.000]", "1.500 [1.500, 1.500]", "", "-0.500 [-0.500, -0.500]",
    ]  # fmt: skip
    e, more = "2.718 [2.718, 2.718]", "4.482 [4.482, 4.482]"  # exp(1) and exp(1.5)
    assert of["perplexity of the reference, exp(loss)"] == [e, more, "", "-1.763 [-1.763, -1.763]"]
    assert of["should answer, refuses"] == ["0", "1", "0", ""]
    assert of["answers cut off at the longest allowed"] == ["0", "4", "", ""]
    assert of["share that breaks the contract: empty answer"] == ["0.00", "0.25", "0.00", ""]
    assert "| all, 4 | should answer, refuses | 0 | 1 | 0 |  |" in markdown(found)


def test_one_row_is_enough(systems):
    found = summarise({name: scored[:1] for name, scored in systems.items()}, {**ABOUT, "rows": 1})
    assert len(found["answers"]) == 1
    assert "| all, 1 | format compliance | 1.000 [1.000, 1.000] |" in markdown(found)


def test_scores_by_kind_of_row(systems):
    systems["base"][1] = replace(systems["base"][1], reply=reply("[This answer would name the wood.]"))
    found = summarise(systems, ABOUT)
    assert {kind: entry["rows"] for kind, entry in found["kinds"].items()} == {"refusal": 2, "answer": 2}
    for kind, places in {"refusal": (0, 1), "answer": (2, 3)}.items():
        for system, scored in systems.items():
            for scorer, entry in found["kinds"][kind]["systems"][system].items():
                values = [scored[place].scores[scorer].value for place in places]
                assert entry["value"] == sum(values) / 2
                assert entry["low"] <= entry["value"] <= entry["high"]
    assert [found["systems"][name]["placeholders"] for name in systems] == [0, 1, 0]
    text = markdown(found)
    assert "| refusal, 2 | refusal accuracy | 0.500" in text
    assert "| answer, 2 | citation accuracy (F1) |" in text
    one_kind = {name: scored[:2] for name, scored in systems.items()}
    assert "| refusal, 2 |" not in markdown(summarise(one_kind, ABOUT))
