"""Each violation of the answer contract by a hand-made answer; and, where it is at hand, the published schema."""

import json
import random
from functools import reduce

import pytest

from cria_tricks.kwanzaa.contract import UNREADABLE, VIOLATIONS, read_reply
from tests.kwanzaa.made import SOURCES, answer

LEFT_OUT = "left out"
RESULTS = answer()["retrieval_summary"]["results"][:1]
BROKEN = {
    "missing field": [
        ("version", LEFT_OUT), ("answer", LEFT_OUT), ("sources", LEFT_OUT), ("retrieval_summary", LEFT_OUT),
        ("unknowns", LEFT_OUT), ("answer.text", LEFT_OUT), ("sources.0.license", LEFT_OUT),
        ("retrieval_summary.results.1.rank", LEFT_OUT), ("unknowns.missing_context", LEFT_OUT),
        ("provenance.generated_at", LEFT_OUT), ("toggles.creative_mode", LEFT_OUT),
    ],
    "unknown field": [("comment", "x")],
    "wrong type": [
        ("answer", "text alone"), ("answer.text", 3), ("answer.confidence", "high"), ("answer.confidence", True),
        ("sources", {}), ("sources.0", "a label"), ("sources.0.year", "1971"), ("sources.0.year", 1971.5),
        ("sources.0.tags", "hall"), ("sources.0.tags.0", 1), ("toggles.creative_mode", 0), ("toggles", None),
        ("integrity", None), ("retrieval_summary.top_k", True), ("unknowns.unsupported_claims", "none"),
    ],
    "out of range": [
        ("answer.confidence", 1.01), ("answer.confidence", -0.1), ("sources.0.year", 1599), ("sources.0.year", 2101),
        ("sources.0.relevance_score", 2), ("retrieval_summary.top_k", 0), ("retrieval_summary.top_k", 101),
        ("retrieval_summary.results.0.rank", 0), ("retrieval_summary.results.0.score", 1.5),
        ("retrieval_summary.filters.year_gte", 0), ("retrieval_summary.execution_time_ms", -1),
    ],
    "wrong length": [
        ("answer.text", ""), ("answer.text", "x" * 10_001), ("sources.0.citation_label", ""),
        ("sources.0.doc_id", "x" * 201), ("sources.0.tags", ["x"] * 51), ("retrieval_summary.namespaces", []),
        ("retrieval_summary.query", "x" * 1001), ("retrieval_summary.results.0.snippet", "x" * 2001),
        ("unknowns.clarifying_questions", ["x" * 501]), ("unknowns.missing_context", ["x" * 1001]),
        ("retrieval_summary.namespaces", ["x"] * 21), ("integrity.safety_flags", ["x" * 201]),
        ("sources.0.citation_label", "x" * 501), ("sources.0.license", ""), ("sources.0.content_type", ""),
        ("sources.0.content_type", "x" * 101), ("sources.0.namespace", ""), ("sources.0.namespace", "x" * 101),
        ("retrieval_summary.results.0.namespace", ""), ("retrieval_summary.results.0.namespace", "x" * 101),
        ("retrieval_summary.query", ""), ("sources.0.tags", ["x" * 101]), ("retrieval_summary.results", RESULTS * 101),
        ("sources", SOURCES[:1] * 101),
    ],
    "unknown value": [
        ("persona", "teacher"), ("persona", None), ("model_mode", "rag"), ("answer.tone", "angry"),
        ("answer.completeness", "nearly"),
        ("integrity.retrieval_confidence", "very"), ("integrity.fallback_behavior", "silence"),
    ],
    "bad format": [
        ("version", "kwanzaa.answer.v"), ("version", "v1"), ("sources.0.canonical_url", "the archive"),
        ("provenance.generated_at", "yesterday"), ("provenance.session_id", "1"),
    ],
}  # fmt: skip
AT_THE_EDGE = [
    ("answer.confidence", 0), ("answer.confidence", 1), ("sources.0.year", 1600), ("sources.0.year", 2100),
    ("sources.0.relevance_score", 1), ("retrieval_summary.top_k", 1), ("retrieval_summary.top_k", 100),
    ("retrieval_summary.results.0.rank", 1), ("retrieval_summary.execution_time_ms", 0), ("answer.text", "x" * 10_000),
    ("sources.0.doc_id", "x" * 200), ("sources.0.tags", ["x"] * 50), ("retrieval_summary.namespaces", ["x"] * 20),
    ("retrieval_summary.query", "x" * 1000), ("retrieval_summary.results.0.snippet", "x" * 2000),
    ("unknowns.clarifying_questions", ["x" * 500]), ("unknowns.missing_context", ["x" * 1000]),
    ("integrity.safety_flags", ["x" * 200]),
    ("sources.0.citation_label", "x" * 500), ("sources.0.citation_label", "x"), ("sources.0.license", "x"),
    ("sources.0.content_type", "x"), ("sources.0.content_type", "x" * 100), ("sources.0.namespace", "x"),
    ("sources.0.namespace", "x" * 100), ("retrieval_summary.results.0.namespace", "x"),
    ("retrieval_summary.results.0.namespace", "x" * 100), ("retrieval_summary.query", "x"), ("answer.text", "x"),
    ("sources.0.tags", ["x" * 100]), ("retrieval_summary.results", RESULTS * 100), ("sources", SOURCES[:1] * 100),
    ("retrieval_summary.namespaces", ["x"]), ("retrieval_summary.results.0.score", 0),
]  # fmt: skip
"""The largest and smallest that are allowed; the neighbours beyond are among those above."""
UNREAD = {
    "empty answer": ["", "  \n"],
    "no JSON object": ["Ruth Adeyemi carved it.", "[1, 2]", "null"],
    "invalid JSON": [
        "{'version': 1}", '{"answer": {"text": "x",}}', '{"a": NaN}', '{"a": ' + "9" * 5000 + "}",
        '{"a": {"b": 1,}}', '{"a": "\\"}",}', "} {,}",
    ],
    "truncated JSON": [
        json.dumps(answer())[:-1], json.dumps(answer())[:200], '{"answer": {"text": "a } and', "{",
        '{"a": {"b": 1,}', '{"a": "}",', '{"a": "it breaks off }'
    ],
}  # fmt: skip
AROUND = ["Here you are:\n{}", "```json\n{}\n```", "{}\nI hope this helps.", "{} {{}}"]


def changed(path: str, value: object) -> dict:
    """A good answer with one field changed, or left out."""
    found = answer()
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
    parent = reduce(lambda at, key: at[key], parents, found)
    if value is LEFT_OUT:
        del parent[last]
    else:
        parent[last] = value
    return found


def where(path: str) -> str:
    return "".join(f"[{key}]" if key.isdigit() else f".{key}" for key in path.split("."))[1:]


def test_a_good_answer_breaks_nothing_with_and_without_what_may_be_left_out():
    assert read_reply(json.dumps(answer())).violations == ()
    least = answer()
    for name in ("persona", "model_mode", "toggles", "integrity", "provenance"):
        del least[name]
    for name in ("confidence", "tone", "completeness"):
        del least["answer"][name]
    least["sources"] = least["retrieval_summary"]["results"] = []
    assert read_reply(json.dumps(least)).violations == ()


def test_objects_inside_may_have_more_fields_as_in_the_published_schema():
    assert read_reply(json.dumps(changed("sources.0.shelf", "B"))).violations == ()
    assert read_reply(json.dumps(changed("answer.confidence", 1))).violations == (), "a whole number is a number"


@pytest.mark.parametrize(
    ("kind", "path", "value"), [(kind, *case) for kind, cases in BROKEN.items() for case in cases], ids=str
)
def test_one_broken_field_is_one_violation_with_its_name_and_place(kind, path, value):
    (violation,) = read_reply(json.dumps(changed(path, value))).violations
    assert violation.kind == kind
    assert violation.where.startswith(where(path)), "of a list too long, the list; of its text too long, the text"


@pytest.mark.parametrize(("path", "value"), AT_THE_EDGE, ids=str)
def test_what_is_just_allowed_breaks_nothing(path, value):
    assert read_reply(json.dumps(changed(path, value))).violations == ()


@pytest.mark.parametrize(("kind", "raw"), [(kind, raw) for kind, raws in UNREAD.items() for raw in raws])
def test_what_is_no_json_object(kind, raw):
    found = read_reply(raw)
    assert [v.kind for v in found.violations] == [kind]
    assert found.fields is None


@pytest.mark.parametrize("frame", AROUND)
def test_an_object_with_text_around_it_is_read_and_counted(frame):
    found = read_reply(frame.format(json.dumps(answer())))
    assert [v.kind for v in found.violations] == ["text around the JSON"]
    assert found.fields == answer()


def test_brackets_thousands_deep_are_no_crash():
    assert read_reply('{"a": ' + "[" * 100_000).fields is None


def test_every_kind_has_a_case_here():
    assert {*BROKEN, *UNREAD, "text around the JSON"} == set(VIOLATIONS)
    assert set(UNREAD) == set(UNREADABLE)


def test_several_violations_are_all_counted():
    broken = changed("persona", "teacher")
    broken["sources"][0]["year"] = broken["sources"][1]["year"] = 3000
    found = read_reply("Well: " + json.dumps(broken))
    assert found.counts() == {"text around the JSON": 1, "unknown value": 1, "out of range": 2}


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        ('{"answer": {"text": "a \\"b\\" [1]\\nc"}}', 'a "b" [1]\nc'),
        ('{"version": "x", "answer": {"text": "a \\"b\\" [1]\\nc and', 'a "b" [1]\nc and'),
        ('{"answer": {"text": "cut in an escape \\', "cut in an escape"),
        ('{"answer": "plain"}', "plain"),
        ('{"answer": {"text": 5}}', ""),
        ('{"sources": []}', ""),
        ("no JSON at all", "no JSON at all"),
    ],
)
def test_the_text_that_a_reader_would_read(raw, text):
    assert read_reply(raw).text == text


def test_sources_are_found_in_an_answer_that_is_not_whole():
    assert read_reply('{"sources": [{"citation_label": "A"}, 3]}').sources == [{"citation_label": "A"}]
    assert read_reply('{"sources": "A"}').sources == []
    assert read_reply("x").sources == []


def test_our_models_judge_as_the_published_schema_does(real_data):
    """All real answers and 2,000 damaged ones. Of what the schema leaves unchecked, formats, none is damaged."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = jsonschema.Draft7Validator(json.loads((real_data / "answer_json.schema.json").read_text()))
    lines = [line for part in ("train", "eval") for line in (real_data / f"kwanzaa_{part}.jsonl").open()]
    real = [json.loads(json.loads(line)["messages"][-1]["content"]) for line in lines]
    draw = random.Random(0)
    damaged = [_damaged(draw.choice([answer(), *real]), draw) for _ in range(2000)]
    verdicts = [(schema.is_valid(one), not read_reply(json.dumps(one)).violations) for one in [*real, *damaged]]
    assert [one for one, (theirs, ours) in zip([*real, *damaged], verdicts, strict=True) if theirs != ours] == []
    assert 300 < sum(theirs for theirs, _ in verdicts) < len(verdicts) - 300, "both verdicts are met often"


def _damaged(whole, draw):
    """One place somewhere in an answer, left out or replaced."""
    one = json.loads(json.dumps(whole))
    places = [(one, key) for key in one]
    for parent, key in places:
        child = parent[key]
        if isinstance(child, dict | list):
            places += [(child, inner) for inner in (child if isinstance(child, dict) else range(len(child)))]
    formats = ("canonical_url", "generated_at", "session_id")
    parent, key = draw.choice([place for place in places if place[1] not in formats])
    if draw.random() < 0.3:
        del parent[key]
    else:
        parent[key] = draw.choice([None, True, 0, 1, 101, 0.5, 1.5, -1, "", "x", "x" * 600, [], {}, ["x"] * 60])
    return one


def test_what_a_broken_answer_says_of_its_parts():
    found = read_reply('{"answer": {"text": "x", "tone": "y"}, "sources": 3, "integrity": []}')
    assert [found.said("answer", "tone"), found.said("answer", "z"), found.said("integrity", "z")] == ["y", None, None]
    assert read_reply("x").said("answer", "tone") is None
