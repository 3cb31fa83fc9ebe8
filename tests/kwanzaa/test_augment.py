"""A copy keeps what its row kept: contract, citations, grounding; and no copy is an evaluation row."""

import json
import random
from collections import Counter
from dataclasses import replace

import pytest

from cria_tricks.data import sources
from cria_tricks.data.counts import ADDED, Tally
from cria_tricks.data.prepare import Prepare
from cria_tricks.data.rows import read_file
from cria_tricks.kwanzaa.augment import KINDS, Augment, of, shuffle_documents
from cria_tricks.kwanzaa.contract import VIOLATIONS
from cria_tricks.kwanzaa.prompt import read_rows
from cria_tricks.kwanzaa.scores import SCORERS, refuses, should_refuse
from cria_tricks.kwanzaa.statements import labels
from cria_tricks.recipe import Recipe, with_settings
from tests.kwanzaa import made

ALL = dict.fromkeys(KINDS, 1.0)


def copies(chats) -> dict[str, list]:
    """Every copy that can be made, by kind, each with the row it is of."""
    found = {kind: [] for kind in KINDS}
    for chat in chats:
        for kind, copy in Augment(ALL, seed=1).copies(chat):
            found[kind].append((read_rows([chat])[0], read_rows([copy])[0]))
    return found


@pytest.fixture(scope="module")
def ours():
    return copies(sources.find("nguzo_saba", "train").rows)


@pytest.fixture(scope="module")
def real(real_data):
    return copies(read_file(real_data / "kwanzaa_train.jsonl"))


def cited(row) -> list[str]:
    """The titles that the answer's labels lead to, in its order."""
    titles = {document.number: document.title for document in row.documents}
    return [titles[label] for label in labels(row.reference.text)]


def places(entries, row) -> list[int]:
    """Which document, by its place in the prompt, each source or search result is about."""
    about = [(entry.get("metadata") or {}) | entry for entry in entries]
    return [
        next(
            place
            for place, document in enumerate(row.documents)
            if document.url == entry["canonical_url"] or document.title.startswith(entry["citation_label"] + ":")
        )
        for entry in about
    ]


def hold(found: dict[str, list]) -> None:
    for kind, pairs in found.items():
        for row, copy in pairs:
            for name, scorer in SCORERS.items():
                assert scorer(copy, copy.reference).value >= scorer(row, row.reference).value, (kind, copy.where, name)
            assert set(copy.reference.counts()) <= set(row.reference.counts()) <= set(VIOLATIONS)
            assert copy.query == row.query
            assert [d.number for d in copy.documents] == list(range(1, len(copy.documents) + 1))
            results = copy.reference.fields["retrieval_summary"]["results"]
            assert len(results) == len(copy.documents)
            assert [result["rank"] for result in results] == list(range(1, len(results) + 1))
            assert places(results, copy) == list(range(len(results)))
            assert places(copy.reference.sources, copy) == sorted(places(copy.reference.sources, copy))
    for row, copy in found["shuffle_documents"]:
        assert cited(copy) == cited(row)
        assert [d.title for d in copy.documents] != [d.title for d in row.documents]
        assert sorted(d.title for d in copy.documents) == sorted(d.title for d in row.documents)
    for row, copy in found["drop_uncited"]:
        assert cited(copy) == cited(row)
        assert {d.title for d in copy.documents} == set(cited(row))
    for row, copy in found["drop_cited"]:
        assert not should_refuse(row)
        assert should_refuse(copy)
        assert refuses(copy.reference)
        assert not copy.reference.sources
        assert not {d.title for d in copy.documents} & set(cited(row))


def test_copies_of_our_rows_hold(ours):
    hold(ours)
    assert {kind: len(pairs) for kind, pairs in ours.items()} == {
        "shuffle_documents": 11,
        "drop_uncited": 4,
        "drop_cited": 24,
    }


def test_copies_of_the_real_rows_hold(real):
    """In none of them is a document that is not cited while another one is."""
    hold(real)
    assert {kind: len(pairs) for kind, pairs in real.items()} == {
        "shuffle_documents": 60,
        "drop_uncited": 0,
        "drop_cited": 70,
    }


def made_chat(text: str = made.GOOD, documents: str = made.DOCUMENTS, refuses: bool = False):
    row = made.row(documents)
    answer = {"role": "assistant", "content": json.dumps(made.answer(text, refuses=refuses), indent=2)}
    return type(sources.find("nguzo_saba", "eval").rows[0])((*row.messages, answer), "", "", "made:1")


def test_equal_documents_have_no_other_order():
    row = read_rows([made_chat("Ujima is collective work [1].")])[0]
    twice = replace(row, documents=row.documents[:1] * 2)
    assert shuffle_documents(twice, random.Random(1)) is None


def test_labels_go_with_their_documents():
    found = copies([made_chat("Ruth Adeyemi carved it in 1969 [1]. Ujima is collective work [2]. Both say so [1, 2].")])
    [(_, copy)] = found["shuffle_documents"]
    assert labels(copy.reference.text) == [2, 1, 2, 1]
    assert [d.url for d in copy.documents] == ["https://example.org/ujima", "https://example.org/kinara"]
    assert [source["doc_id"] for source in copy.reference.sources] == ["ujima", "kinara"]
    assert not found["drop_uncited"], "all are cited"
    assert "\n" in copy.reference.raw, "it is written as the row's own was"


def test_what_is_not_cited_is_gone_everywhere():
    [(_, copy)] = copies([made_chat("Ujima is collective work [2].")])["drop_uncited"]
    assert copy.reference.text == "Ujima is collective work [1]."
    assert "kinara" not in copy.messages[-1]["content"].split("Query:")[0]
    assert [source["doc_id"] for source in copy.reference.sources] == ["ujima"]


def test_a_refusal_keeps_what_is_not_cited():
    [(_, copy)] = copies([made_chat("Ruth Adeyemi carved the kinara of Amani Hall in 1969 [1].")])["drop_cited"]
    assert [d.url for d in copy.documents] == ["https://example.org/ujima"]
    assert copy.reference.said("integrity", "retrieval_confidence") == "low"


def test_a_refusal_is_not_refused_again_and_other_rows_have_no_copies():
    refusal = made_chat(made.REFUSAL + " The hall is named [1].", refuses=True)
    assert not copies([refusal])["drop_cited"]
    plain = type(refusal)(({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}), "", "", "x")
    assert not any(copies([plain, type(refusal)((), "p", "c", "x")]).values())


def test_a_copy_with_a_wrong_label_is_not_made(monkeypatch):
    """The check that every copy passes sees what a kind does wrong."""
    from cria_tricks.kwanzaa import augment

    monkeypatch.setattr(augment, "_renumbered", lambda match, numbers: "[9]")
    found = copies(sources.find("nguzo_saba", "train").rows)
    assert not any(cited(row) for row, _ in found["shuffle_documents"] + found["drop_uncited"])


def test_shares_choose_rows_by_their_words_and_not_by_their_order():
    rows = sources.find("nguzo_saba", "train").rows
    half = Augment({"drop_cited": 0.5}, seed=3)
    one_way = {copy.where for row in rows for _, copy in half.copies(row)}
    other_way = {copy.where for row in reversed(rows) for _, copy in half.copies(row)}
    assert one_way == other_way
    assert 4 < len(one_way) < 20
    assert one_way != {copy.where for row in rows for _, copy in Augment({"drop_cited": 0.5}, seed=4).copies(row)}


def test_no_copy_is_an_evaluation_row():
    """The guard looks at copies too: the evaluation holds what one row would become."""
    [(_, copy)] = copies([made_chat("Ujima is collective work [2].")])["drop_uncited"]
    held_out = type(made_chat())((*copy.messages, {"role": "assistant", "content": "x"}), "", "", "eval:1")
    recipe = with_settings(Recipe(), ["data.drop_uncited=1", "data.leakage=drop"])
    tally = Tally()
    # The row itself asks the same, so it is let through here by hand, to see that its copy is not.
    prepare = Prepare(recipe, [held_out], augment=of(recipe))
    prepare.row_filter.keeps = lambda row, tally: True
    kept = list(prepare([made_chat("Ujima is collective work [2].")], tally))
    assert len(kept) == 1
    assert tally.rows["in the evaluation set"] == 1
    assert not tally.rows[ADDED["drop_uncited"]]


def test_copies_are_counted_by_kind(real_data):
    recipe = with_settings(Recipe(), ["data.shuffle_documents=1", "data.drop_cited=1", "data.leakage=drop"])
    tally = Tally()
    train, held_out = (read_file(real_data / f"kwanzaa_{part}.jsonl") for part in ("train", "eval"))
    kept = list(Prepare(recipe, held_out, augment=of(recipe))(train, tally))
    counts = Counter({step: entry["rows"] for step, entry in tally.to_dict().items()})
    assert counts["read"] == 107
    assert counts["kept"] == 107 - counts["in the evaluation set"] == 92
    assert len(kept) == counts["kept"] + counts[ADDED["shuffle_documents"]] + counts[ADDED["drop_cited"]]
