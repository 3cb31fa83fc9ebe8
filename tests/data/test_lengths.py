"""How long a plan says that rows are: token by token what training makes of them, and never a guess."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest

import cria_tricks
from cria_tricks.common.errors import BadInput
from cria_tricks.data import lengths, sources
from cria_tricks.data.lengths import Lengths, _Tokenizer, padded_mean, read
from cria_tricks.data.prepare import eval_rows, train_rows
from cria_tricks.load.answering import prompt_ids
from cria_tricks.models import tokenizer_here
from cria_tricks.recipe import Recipe, with_settings

pytestmark = pytest.mark.usefixtures("tokenizer")  # a plan downloads and converts none

ROWS = (
    {"messages": [{"role": "system", "content": "Short."}, {"role": "user", "content": "Who?"},
                  {"role": "assistant", "content": "Nia, naïve {% x %} <|im_end|> \n\n 🌍"}]},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"},
                  {"role": "user", "content": "c " * 40}, {"role": "assistant", "content": "d"}]},
    {"prompt": "Umoja is ", "completion": "unity."},
    {"text": "Kujichagulia. " * 30},
)  # fmt: skip


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def recipe(train="nguzo_saba", *more: str) -> Recipe:
    sets = ["model=random:tiny", f"data.train={train}", "data.eval=nguzo_saba", "data.max_length=600", *more]
    return with_settings(Recipe(), sets)


@pytest.mark.parametrize("which", ["our own rows", "rows of every kind"])
def test_rows_are_tokenised_as_training_tokenises_them(which, file, tokenizer):
    one = recipe() if which == "our own rows" else recipe(file, f"data.eval={file}", "data.max_length=100")
    found, held_out = sources.find(one.data.train, "train"), sources.find(one.data.eval, "eval")
    light = _Tokenizer(tokenizer_here(one.model))
    theirs, ours = (train_rows(one, found, held_out, each, lambda said: None) for each in (tokenizer, light))
    assert ours.rows == theirs.rows
    assert len(ours.rows) > len(found.rows) or which == "our own rows", "the text is longer than a row"
    found = read(one)
    assert found.each == tuple(sorted(len(row["input_ids"]) for row in theirs.rows))
    prompts = prompt_ids(held_out.rows, tokenizer)
    assert found.prompts == tuple(filter(None, map(len, prompts)))
    assert found.evaluated == eval_rows(one, held_out, tokenizer).longest
    assert replace(found, each=(), prompts=(), evaluated=0) == Lengths(
        theirs.longest, theirs.tokens / theirs.count, theirs.count
    )


def test_prompts_of_every_kind_are_counted_as_they_will_be_asked(file, tokenizer):
    found = read(recipe("nguzo_saba", f"data.eval={file}"))
    asked = [len(ids) for ids in prompt_ids(sources.find(str(file), "eval").rows, tokenizer)]
    assert asked.pop() == 0, "a text asks nothing"
    assert found.prompts == tuple(asked)


def test_padding_is_that_of_every_micro_batch_that_may_come():
    rows = [3, 4, 4, 9, 20]
    for batch in (1, 2, 3, 5):
        every = [max(some) for some in itertools.combinations(rows, batch)]
        assert padded_mean(rows, batch) == pytest.approx(sum(every) / len(every))
    assert padded_mean(rows, 8) == 20, "more rows than there are"


def test_a_packed_row_is_full_and_is_packed_from_what_there_is():
    alone, packed = (read(recipe("nguzo_saba", "train.batch_size=4", f"tricks.packing={on}")) for on in (False, True))
    assert packed.longest == 600
    assert packed.mean < alone.mean < 600
    assert packed.rows == alone.rows


@pytest.mark.parametrize(
    ("sets", "why"),
    [
        (["data.train=kwanzaa"], "data.train=kwanzaa is not read from the network"),
        (["data.eval=owner/name"], "data.eval=owner/name is not read from the network"),
        (["data.stream=true", "train.max_steps=3"], "data.stream=true"),
        (["model=nobody/nothing"], "no tokenizer.json of nobody/nothing on this machine"),
    ],
)
def test_what_is_not_here_is_taken_as_full_and_the_reason_said(sets, why):
    found = read(recipe("nguzo_saba", *sets))
    assert found == Lengths(600, 600, why=why)
    assert found.in_words == f"rows taken as full: 600 tokens ({why})"


def test_large_files_are_not_read(monkeypatch):
    monkeypatch.setattr(lengths, "LARGEST", 10_000)
    assert read(recipe()).why == "its files hold more than 10 kB"


def test_a_tokenizer_that_cannot_be_read_is_left_to_training(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    assert read(recipe("nguzo_saba", f"model={tmp_path}")).why == (
        f"the tokenizer in {tmp_path} cannot be read without transformers"
    )


def test_a_row_that_training_refuses_is_refused_by_the_plan(tmp_path, run_cria):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": []}\n')
    sets = [word for one in ("model=random:tiny", f"data.train={bad}") for word in ("--set", one)]
    code, _, stderr = run_cria("plan", "smoke", *sets)
    assert (code, stderr) == (2, f"error: {bad}:1: messages must be a list with at least one message\n")
    with pytest.raises(BadInput, match="messages must be a list"):
        read(recipe(bad))


def test_a_plan_is_of_the_rows_that_are_there_unless_the_worst_case_is_asked_for(run_cria, file):
    sets = [
        word for one in ("model=random:tiny", f"data.train={file}", "data.eval=nguzo_saba") for word in ("--set", one)
    ]
    asked = ("plan", "smoke", "--gpu", "t4", "--rows", "1000", *sets)
    found, full = (json.loads(run_cria(*asked, *more, "--json")[1]) for more in ([], ["--rows-full"]))
    there = read(recipe(file, "data.max_length=1024"))
    assert (found["tokens"], found["mean_tokens"], found["data_rows"]) == (there.longest, there.mean, len(ROWS))
    assert (full["tokens"], full["mean_tokens"], full["data_rows"]) == (1024, 1024, 0)
    assert (
        found["lengths"]
        == there.in_words
        == (
            f"rows are at most {there.longest} tokens long, read from data.train (data.eval: {there.evaluated}); "
            "--rows-full for the worst case"
        )
    )
    assert found["peak_bytes"] < full["peak_bytes"]
    assert found["seconds_per_step"] < full["seconds_per_step"] / 4
    assert found["prices"][0]["cost"] < full["prices"][0]["cost"] / 4
    said = " ".join(run_cria(*asked)[1].split())
    assert found["lengths"] in said
    assert "rows taken as full: 1,024 tokens (--rows-full)" in " ".join(run_cria(*asked, "--rows-full")[1].split())
    counted = [json.loads(run_cria(*asked[:4], *rows, *sets, "--json")[1]) for rows in ([], ["--rows", str(len(ROWS))])]
    assert counted[0]["prices"] == counted[1]["prices"] != [], "their number is known, so nobody has to give it"
    worst = cria_tricks.plan("smoke", gpu="t4", settings=[*sets[1::2]], rows=1000, rows_full=True)
    assert worst.to_dict() == full


def test_reading_the_lengths_imports_nothing_heavy(file):
    code = (
        "import sys; from cria_tricks.data.lengths import read; from cria_tricks.recipe import *; "
        f"read(with_settings(Recipe(), ['model=random:tiny', 'data.train={file}', 'data.eval=nguzo_saba'])).longest; "
        "print([name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
