"""Our own small set keeps the Kwanzaa answer contract."""

import json
import re

import pytest

from cria_tricks.data import sources
from cria_tricks.data.tokens import tokenize

CONTRACT = {"version", "persona", "answer", "sources", "retrieval_summary", "unknowns"}
SOURCE = set("citation_label canonical_url source_org year content_type license namespace doc_id chunk_id".split())


def answers(part):
    for row in sources.find("nguzo_saba", part).rows:
        system, user, assistant = (m["content"] for m in row.messages)
        yield row.where, system, user, json.loads(assistant)


@pytest.mark.parametrize(("part", "count", "refusals"), [("train", 32, 8), ("eval", 8, 2)])
def test_counts_and_refusals(part, count, refusals):
    found = list(answers(part))
    assert len(found) == count
    assert sum(answer["answer"]["completeness"] == "insufficient_data" for *_, answer in found) == refusals
    assert {answer["persona"] for *_, answer in found} == {"educator", "researcher", "creator", "builder"}


@pytest.mark.parametrize("part", ["train", "eval"])
def test_every_answer_keeps_the_contract(part):
    for where, _, user, answer in answers(part):
        documents = dict(re.findall(r"^\[(\d)\] (.*)$", user, flags=re.MULTILINE))
        cited = sorted(set(re.findall(r"\[(\d)\]", answer["answer"]["text"])))
        assert set(answer) == CONTRACT, where
        assert all(set(source) >= SOURCE for source in answer["sources"]), where
        refused = answer["answer"]["completeness"] == "insufficient_data"
        assert refused == (not cited) == (not answer["sources"]), where
        assert len(answer["sources"]) == len(cited), where
        for label, source in zip(cited, answer["sources"], strict=True):
            assert documents[label].startswith(source["citation_label"]), where
        results = answer["retrieval_summary"]["results"]
        assert [r["rank"] for r in results] == list(range(1, len(documents) + 1)), where
        assert user.endswith(f"Question: {answer['retrieval_summary']['query']}"), where
        numbers = re.findall(r"\d+", re.sub(r"\[\d\]", "", answer["answer"]["text"]))
        assert all(number in user for number in numbers), f"{where}: a number that no document holds"


def test_train_and_eval_share_no_question_and_no_document():
    train, held_out = ([user for _, _, user, _ in answers(part)] for part in ("train", "eval"))

    def documents(users):
        return {line for user in users for line in user.splitlines() if line.startswith("[")}

    assert not {user.splitlines()[-1] for user in train} & {user.splitlines()[-1] for user in held_out}
    assert not documents(train) & documents(held_out)


def test_rows_are_short_enough_for_two_cpu_cores(tokenizer):
    for part in ("train", "eval"):
        found = tokenize(sources.find("nguzo_saba", part).rows, tokenizer, 1024)
        assert found.cut == 0
        assert max(len(row["input_ids"]) for row in found.rows) <= 520
