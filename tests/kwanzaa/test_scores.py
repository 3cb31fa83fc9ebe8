"""Each scorer against hand-made answers, good and bad: what it sees, and the blind spots that it admits."""

import pytest

from cria_tricks.kwanzaa.contract import read_reply
from cria_tricks.kwanzaa.prompt import read_prompt
from cria_tricks.kwanzaa.scores import (
    citation_accuracy,
    format_compliance,
    grounding,
    refusal,
    refuses,
    should_refuse,
)
from tests.kwanzaa.made import GOOD, NOTHING_FOUND, REFUSAL, reply, row


def test_a_good_answer_is_good_in_all_four():
    for scorer in (format_compliance, citation_accuracy, grounding, refusal):
        assert scorer(row(), reply(GOOD)).value == 1, scorer.__name__
        assert scorer(row(refuses=True), reply(REFUSAL, sources=0)).value == 1, scorer.__name__


def test_an_empty_answer_is_bad_in_all_four():
    for raw in ("", '{"answer": {"text": ""}}'):
        for scorer in (format_compliance, citation_accuracy, grounding, refusal):
            assert scorer(row(), read_reply(raw)).value == 0, scorer.__name__


def test_the_prompt_is_read():
    found = row()
    assert [(d.number, d.title, d.url) for d in found.documents] == [
        (1, "Baraza Press (1971) — The Mat and the Candles", "https://example.org/kinara"),
        (2, "Harbor Letters (1980) — What Ujima Asks", "https://example.org/ujima"),
    ]
    assert found.query == "Who carved the kinara of Amani Hall?"
    assert "1,200 people" in found.evidence
    assert "valid JSON" not in found.evidence


def test_the_prompt_of_our_own_small_set_and_one_without_any_form_are_read():
    turn = "Documents:\n[1] notes: Nia: purpose.\n[2] notes: Imani: faith.\n\nQuestion: What is Nia?"
    documents, query = read_prompt(turn)
    assert [d.number for d in documents] == [1, 2]
    assert query == "What is Nia?"
    for turn in ("What is Nia?", f"Query: What is Nia?\n\n{NOTHING_FOUND}"):
        assert read_prompt(turn) == ((), "What is Nia?")


def test_format_names_what_is_wrong():
    score = format_compliance(row(), read_reply('Sure: {"answer": {"text": "x"}}'))
    assert score.value == 0
    assert score.why["json"]
    assert score.why["violations"] == {"text around the JSON": 1, "missing field": 4}
    assert "missing field: sources" in score.why["where"]
    assert format_compliance(row(), read_reply("no")).why == {
        "json": False, "violations": {"no JSON object": 1}, "where": ["no JSON object"],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "right", "labels", "covered", "needed"),
    [
        pytest.param(GOOD, 2, 2, 2, 2, id="each sentence has its own"),
        pytest.param("Ruth Adeyemi carved it in 1969.", 0, 0, 0, 1, id="none"),
        pytest.param("It is of 1969 [1]. It holds 7 candles.", 1, 1, 1, 2, id="the second has none"),
        pytest.param("It is of 1969. It holds 7 candles [1].", 1, 1, 2, 2, id="one at the end covers the paragraph"),
        pytest.param("It is of 1969.\n\nIt holds 7 candles [1].", 1, 1, 1, 2, id="but not the paragraph before"),
        pytest.param("It is of 1969 [3].", 0, 1, 0, 1, id="no such document"),
        pytest.param("It is of 1969 [3][1].", 1, 2, 1, 1, id="one of two is right"),
        pytest.param("It is of 1969 [1, 2].", 2, 2, 1, 1, id="two in one bracket"),
        pytest.param('The keeper wrote "we mend the roof together." [2]', 1, 1, 1, 1, id="behind the full stop"),
        pytest.param("Facts [1]:\n- of 1969\n- with 7 candles", 1, 1, 2, 2, id="above the list"),
        pytest.param("Facts [1]:\n\n1. **Year**\n   - of 1969\n\nOf 1970.", 1, 1, 1, 2, id="the list ends"),
        pytest.param("Facts:\n- of 1969 [1]\n- with 7 candles", 1, 1, 1, 2, id="an item does not cover the next"),
        pytest.param("**Ruth Adeyemi (1969)**\n- carved it [1]", 1, 1, 1, 1, id="a heading needs none"),
        pytest.param("It is of 1969 [1]. Was it in 1970?", 1, 1, 1, 1, id="a question needs none"),
        pytest.param("It is of 1969 [1].\n\nI can tell you of Amani Hall.", 1, 1, 1, 1, id="an offer needs none"),
        pytest.param("It is of 1969 [1].\n\nYou may ask:\n- Amani Hall\n- 1970", 1, 1, 1, 1, id="nor a list of it"),
        pytest.param("It is of 1969 [1].\n\n```\nyear = 1970\n```", 1, 1, 1, 1, id="code needs none"),
        pytest.param("It is old and beautiful.", 0, 0, 0, 1, id="an answer without facts needs one as a whole"),
        pytest.param("It is old and beautiful [2].", 1, 1, 1, 1, id="and may have it"),
        pytest.param("It is old [1].\n\nIt is of 1969.", 1, 1, 1, 2, id="what has one counts without a fact, too"),
        pytest.param("Dr. Adeyemi carved it with Mr. M. L. Oduya [1].", 1, 1, 1, 1, id="abbreviations end nothing"),
    ],
)  # fmt: skip
def test_citations(text, right, labels, covered, needed):
    score = citation_accuracy(row(), reply(text))
    assert [score.why[name] for name in ("right", "labels", "covered", "needed")] == [right, labels, covered, needed]
    precision, recall = right / labels if labels else 1, covered / needed
    assert score.value == pytest.approx(2 * precision * recall / (precision + recall) if precision + recall else 0)
    assert len(score.why["uncited"]) == needed - covered


def test_a_label_must_be_among_the_sources_where_there_is_json_to_say_so():
    assert citation_accuracy(row(), reply("Ujima is the third [2].", sources=1)).why["wrong"] == [2]
    assert citation_accuracy(row(), reply("It is of 1969 [1].", sources=1)).value == 1
    assert citation_accuracy(row(), read_reply("It is of 1969 [1].")).value == 1, "prose has no sources; format says so"
    assert citation_accuracy(row(), read_reply("It is of 1969 [7].")).why["wrong"] == [7]


def test_a_source_counts_by_its_title_or_by_its_address():
    for field, value in (("citation_label", "?"), ("canonical_url", "https://example.org/else")):
        made = reply("It is of 1969 [1].")
        made.fields["sources"][0][field] = value
        assert citation_accuracy(row(), made).value == 1
    made.fields["sources"][0]["citation_label"] = "Baraza"
    assert citation_accuracy(row(), made).value == 0, "neither"


def test_a_refusal_owes_no_citation_only_where_refusing_is_right():
    said = reply(REFUSAL + "\n\nThe Hall was built in 1950.", sources=0)
    assert citation_accuracy(row(refuses=True), said).value == 1
    assert citation_accuracy(row(), said).value == 0, "or who always refused would cite without a fault"
    made_up = reply("The Hall was built in 1950 by Amani Oduya.", sources=0)
    assert citation_accuracy(row(NOTHING_FOUND, refuses=True), made_up).value == 0


@pytest.mark.parametrize(
    ("text", "unsupported"),
    [
        ("It was carved in 1969 [1].", []),
        ("It was carved in 1968 [1].", ["year: 1968"]),
        ("It holds 7 candles, not 8.", ["number: 8"]),
        ("And 1200 or 1,200 people came.", []),
        ("And 1,300 people came.", ["number: 1300"]),
        ("It is by Ruth Adeyemi's own hand.", []),
        ("It is by Ruth Oduya of Nairobi.", ["name: Ruth Oduya", "name: Nairobi"]),
        ("Nairobi is far.", []),
        ("Place: Nairobi. Keeper - Oduya.", []),
        ('The keeper wrote: "we mend the roof\ntogether" [2].', []),
        ('The keeper wrote: "we mend the roof together" [2].', []),
        ("The keeper wrote: 'We mend the roof, together' [2].", []),
        ('The keeper wrote: "we mend the wall together" [2].', ["quote: we mend the wall together"]),
        ('It is "of old" wood.', []),
        ("It isn't old, and the keeper's roof isn't new.", []),
        ("You could ask in Nairobi in 1968.", ["year: 1968"]),
        ("1. first\n2. second\n3. third [12]", []),
        ("In the 1960s and the 60s.", ["year: 1960"]),
        ("On the 3rd day.", []),
    ],
)  # fmt: skip
def test_grounding(text, unsupported):
    score = grounding(row(), reply(text))
    assert score.why["unsupported"] == unsupported
    items = score.why["items"]
    assert score.value == (1 - len(unsupported) / items if items else 1)


def test_grounding_may_rest_on_the_question_but_not_on_the_instructions():
    asked = row(NOTHING_FOUND, "What did Oduya do in 1950?")
    assert grounding(asked, reply("In 1950 it was Oduya.")).value == 1
    assert grounding(asked, reply("It is in valid JSON.")).why["unsupported"] == ["name: JSON"]


@pytest.mark.parametrize(
    ("text", "does"),
    [
        (REFUSAL, True),
        ("I can't tell you that.", True),
        ("I’m not able to say.", True),
        ("I don't have figures for the hall.", True),
        ("The documents given do not say who paid.", True),
        ("My corpus lacks any figures.", True),
        ("No documents were found.", True),
        ("I focus on the hall's history, not on its prices.", True),
        ("Thank you for asking about the hall. I cannot say who paid.", True),
        (GOOD, False),
        ("It is of 1969 [1]. The documents do not say who paid.", False),
        ("It is of 1969. It is old. I cannot say who paid.", False),
        ("The keepers cannot leave the hall.", False),
        ("I carved it.", False),
    ],
)  # fmt: skip
def test_what_a_refusal_sounds_like(text, does):
    assert refuses(reply(text)) is does
    assert refuses(read_reply(text)) is does


@pytest.mark.parametrize(
    ("should", "text", "value"), [(True, REFUSAL, 1), (True, GOOD, 0), (False, REFUSAL, 0), (False, GOOD, 1)]
)
def test_the_four_cases_of_a_refusal(should, text, value):
    score = refusal(row(refuses=should), reply(text))
    assert (score.value, score.why) == (value, {"should": should, "did": text == REFUSAL})


def test_the_reference_says_by_its_own_fields_whether_to_refuse():
    for behaviour, completeness, expected in (
        ("refusal", "complete", True),
        ("clarification_requested", "complete", True),
        ("not_needed", "insufficient_data", False),
        ("creative_generation", "insufficient_data", False),
        (None, "insufficient_data", True),
        (None, "partial", False),
    ):
        made = row()
        made.reference.fields["integrity"] = {"fallback_behavior": behaviour} if behaviour else {}
        made.reference.fields["answer"]["completeness"] = completeness
        assert should_refuse(made) is expected
