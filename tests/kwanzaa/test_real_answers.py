"""The data's own answers, all 134 where they are at hand, and our 40: near the ceiling, and each exception explained.

79 of the 134 are placeholders of the program that made them: they announce an answer and give none. They have the
form and mostly the labels, so they pass: no scorer looks whether an answer answers.
"""

from collections import Counter

import pytest

from cria_tricks.data import sources
from cria_tricks.data.duplicates import Guard
from cria_tricks.data.rows import read_file
from cria_tricks.kwanzaa.prompt import QARow, read_rows
from cria_tricks.kwanzaa.scores import SCORERS, kind
from tools import notebooks

# Part and line -> why this answer is below 1. "data": the answer does what the scorer says. "scorer": it does not.
RESULTS = "data: an entry of retrieval_summary.results holds metadata in place of citation_label and canonical_url"
PLACEHOLDER = "data: a placeholder that lists sources and cites none"
OWN_WORDS = "data: opening or closing remarks of its own, with names and without a label"
FULL_NAME = "data: gives the full name of an author whom the documents name by an initial"
ELSEWHERE = "data: dates or names from elsewhere, which no document holds"
EXCEPTIONS = {
    "format": {
        "train 93": "data: top_k is 0 in the answer to a greeting, and the contract wants 1 or more",
        **{f"train {n}": RESULTS for n in (20, 22, 23, 27, 28, 40, 44, 48, 59, 63, 74, 106)},
        **{f"eval {n}": RESULTS for n in (5, 8, 14, 15, 24, 25)},
    },
    "citations": {
        **{f"train {n}": PLACEHOLDER for n in (4, 31, 36, 64, 97, 102, 103, 107)},
        "eval 11": PLACEHOLDER,
        "train 12": "data: nothing was retrieved, and it states a fact with a year all the same",
        "train 14": "data: a date, a city and a length of time that the one document lacks, without a label",
        "train 17": "data: the last sentence's dates have no label and are in no document",
        "train 30": "data: five more inventors from elsewhere, without labels; its unknowns admit it",
        **{f"train {n}": OWN_WORDS for n in (43, 65, 77, 104)},
        "eval 26": OWN_WORDS,
        "train 35": "scorer: a speech that was asked for; its solemn sentences count as statements",
        "train 45": "scorer: advice on a design that was asked for counts as statements",
        **{f"train {n}": "scorer: a summary of what is cited above it counts once more" for n in (78, 83)},
        "train 101": "data: praises the law at the end, without a label",
        "eval 7": "data: explains a word, with its language, and ends with a cheer; neither has a label",
    },
    "grounding": {
        "train 1": "scorer: another word for the people whom the document calls by an older one",
        "train 12": ELSEWHERE,
        **{f"train {n}": ELSEWHERE for n in (14, 17, 30, 43, 104)},
        "eval 7": ELSEWHERE,
        "eval 26": ELSEWHERE,
        "train 35": FULL_NAME,
        "train 65": FULL_NAME,
        "eval 12": FULL_NAME,
        "train 45": "scorer: a month's name cut short, and an acronym of technology",
        "train 77": "scorer: an adjective for the country, and television cut short",
        "train 83": "scorer: the full name of an organisation whose acronym the document has",
        "train 87": "data: a refusal that names the months in which to look for news",
        "train 90": "scorer: search terms that it recommends stand in quotation marks",
        "train 101": "scorer: an adjective for the country",
        "train 105": "data: a refusal that names magazines and networks to look in",
        "eval 6": "scorer: the title that it makes up for a lesson stands in quotation marks",
    },
    "refusal": {
        "train 12": "data: marked as a refusal, and it corrects the question's premise",
    },
}


@pytest.fixture(scope="module")
def rows(real_data) -> dict[str, QARow]:
    """Every real row, by part and line."""
    rows = {
        f"{part} {number}": row
        for part in ("train", "eval")
        for number, row in enumerate(read_rows(read_file(real_data / f"kwanzaa_{part}.jsonl")), 1)
    }
    assert len(rows) == 134
    return rows


@pytest.fixture(scope="module")
def real(rows) -> dict[str, dict[str, float]]:
    """Every scorer's value for every real answer."""
    return {name: {where: s(row, row.reference).value for where, row in rows.items()} for name, s in SCORERS.items()}


@pytest.mark.parametrize("scorer", SCORERS)
def test_every_real_answer_below_one_is_explained_and_every_explanation_needed(scorer, real):
    below = {where for where, value in real[scorer].items() if value < 1}
    assert below == set(EXCEPTIONS[scorer])
    assert all(why.startswith(("data: ", "scorer: ")) for why in EXCEPTIONS[scorer].values())


@pytest.mark.parametrize(
    ("scorer", "floor"), [("format", 0.85), ("citations", 0.9), ("grounding", 0.95), ("refusal", 0.99)]
)
def test_real_answers_are_near_the_ceiling_and_at_it_but_for_the_datas_faults(scorer, floor, real):
    values = real[scorer]
    assert sum(values.values()) / len(values) >= floor
    own = [value for where, value in values.items() if not EXCEPTIONS[scorer].get(where, "").startswith("data")]
    assert sum(own) / len(own) >= 0.98


def test_what_the_lesson_and_the_readme_say_of_the_rows_is_so(rows, real_data, monkeypatch):
    """The texts have the numbers that are counted here."""
    monkeypatch.setattr(sources, "_download_kwanzaa", lambda part: real_data / f"kwanzaa_{part}.jsonl")
    kinds = {
        part: Counter(kind(row) for where, row in rows.items() if where.startswith(part)) for part in ("train", "eval")
    }
    guard = Guard(sources.find("kwanzaa", "eval").rows)
    near = [row for row in sources.find("kwanzaa", "train").rows if guard.find(row)]
    train, held_out = kinds["train"], kinds["eval"]
    of_training = f"{train['answer']} answers, {train['refusal']} refusals and {train['placeholder']} placeholders"
    of_evaluation = (
        f"{held_out['answer']} answers, {held_out['refusal']} refusals and {held_out['placeholder']} placeholders"
    )
    lesson = (notebooks.LESSONS / "kwanzaa.py").read_text(encoding="utf-8").replace("\n# ", " ")
    pages = {name: " ".join((notebooks.ROOT / name).read_text(encoding="utf-8").split())
             for name in ("docs/guide/evaluate.md", "docs/guide/colab.md", "docs/glossary.md")}  # fmt: skip
    assert all(of_training in text for text in (lesson, *pages.values()))
    assert of_evaluation in pages["docs/guide/evaluate.md"]
    assert of_evaluation in pages["docs/guide/colab.md"]
    assert f"{len(near)} of them ask nearly the same as an evaluation row" in lesson
    of_near = f"{len(near)} training rows ask nearly the same as"
    assert all(of_near in pages[page] for page in ("docs/guide/evaluate.md", "docs/guide/colab.md"))
    assert not any("never trained on" in text for text in (lesson, *pages.values()))


def test_no_prompt_shows_the_contracts_fields(rows):
    """So a base scores 0 for format by construction, as lesson and guides say."""
    asked = ["\n".join(message["content"] for message in row.messages) for row in rows.values()]
    assert all("answer_json contract" in text for text in asked)
    assert not any(name in text for text in asked for name in ("retrieval_summary", "unknowns", "kwanzaa.answer"))


@pytest.mark.parametrize("part", ["train", "eval"])
def test_our_own_answers_are_at_the_ceiling(part):
    rows = read_rows(sources.find("nguzo_saba", part).rows)
    for row in rows:
        assert {name: scorer(row, row.reference).value for name, scorer in SCORERS.items()} == dict.fromkeys(SCORERS, 1)
