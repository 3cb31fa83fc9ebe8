"""Our rows about Black history: written out from their notes, in the contract, each statement in the note it cites."""

import re

import pytest

from cria_tricks.data import sources
from cria_tricks.data.sources import CONTRACT
from cria_tricks.data.tokens import tokenize
from cria_tricks.kwanzaa.prompt import read_rows
from cria_tricks.kwanzaa.scores import SCORERS, kind
from tools import history_notes

PARTS = history_notes.PARTS
STATEMENT = re.compile(r"(?<=\])[.;,]?\s+")
LINKING = set(
    "the and was were is are for with that this from into over after before when where which what who whom whose how "
    "why did does has have had been its their his her they them also both each than then there these those not but "
    "because about first documents given say here name later earlier came only asks means says".split()
)
"""Words that any statement may use. The others must be in the cited note, or in the question."""


def words(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d_]+|\d+", text.lower()))


def strange(statement: str, known: set[str]) -> list[str]:
    """The words of a statement that are neither known nor another form of a known word."""
    asked = words(history_notes.LABEL.sub("", statement)) - LINKING - known
    asked = {word for word in asked if len(word) > 3 or word.isdigit()}
    return sorted(word for word in asked if word.isdigit() or not _other_form(word, known))


def _other_form(word: str, known: set[str]) -> bool:
    beginning = word[: max(4, len(word) - 3)]
    return any(other.startswith(beginning) for other in known)


@pytest.mark.parametrize("part", PARTS)
def test_the_package_has_what_the_notes_say(part):
    assert history_notes.path(part).read_text(encoding="utf-8") == history_notes.lines(part), (
        "run python -m tools.history_notes"
    )


@pytest.mark.parametrize(("part", "least", "refusals"), [("train", 200, 50), ("eval", 60, 20)])
def test_there_are_enough_of_each_kind(part, least, refusals):
    _, rows = history_notes.read(part)
    assert len(rows) >= least
    assert sum("missing" in row for row in rows) >= refusals
    assert sum(not row["notes"] for row in rows) >= 4, "questions without a document"
    several = [row for row in rows if len(row["notes"]) > 1 and "missing" not in row]
    cited = [int(history_notes.LABEL.findall(row["answer"])[0]) for row in several]
    assert {cited.count(number) > 2 for number in (1, 2, 3)} == {True}, "the right note stands at every place"


@pytest.mark.parametrize("part", PARTS)
def test_every_statement_stands_in_the_note_that_it_cites(part):
    notes, rows = history_notes.read(part)
    for row in rows:
        if "missing" in row:
            assert not history_notes.LABEL.search(row["answer"]), row
            continue
        for statement in STATEMENT.split(row["answer"]):
            cited = [row["notes"][int(label) - 1] for label in history_notes.LABEL.findall(statement)]
            assert cited, f"without a label: {statement}"
            known = words(row["ask"]).union(*(words(notes[key]["text"]) for key in cited))
            assert not strange(statement, known), f"{row['ask']}: not in the note: {strange(statement, known)}"


@pytest.mark.parametrize("part", PARTS)
def test_every_answer_gets_the_full_score(part):
    rows = read_rows(sources.find("history_notes", part).rows)
    for row in rows:
        assert row.messages[0]["content"] == CONTRACT
        assert kind(row) in ("answer", "refusal")
        for name, scorer in SCORERS.items():
            score = scorer(row, row.reference)
            assert score.value == 1, f"{row.where}: {name}: {score.why}"


def test_a_fact_that_no_note_has_is_found():
    notes, rows = history_notes.read("eval")
    row = next(row for row in rows if len(row["notes"]) == 1 and "missing" not in row)
    known = words(row["ask"]) | words(notes[row["notes"][0]]["text"])
    assert strange(row["answer"].replace(" [1]", " in Antarctica in 1789 [1]"), known) == ["1789", "antarctica"]


def test_the_parts_share_no_note_and_no_question():
    (notes, rows), (other_notes, other_rows) = map(history_notes.read, PARTS)
    assert not {note["text"] for note in notes.values()} & {note["text"] for note in other_notes.values()}
    assert not {frozenset(words(row["ask"])) for row in rows} & {frozenset(words(row["ask"])) for row in other_rows}


def test_most_rows_are_short(tokenizer):
    lengths = sorted(
        len(row["input_ids"]) for row in tokenize(sources.find("history_notes", "train").rows, tokenizer, 1024).rows
    )
    contract = len(tokenizer(CONTRACT)["input_ids"])
    assert lengths[len(lengths) // 2] - contract < 400, "but for the contract, which stands in every row"
    assert lengths[-1] < 800
