"""Every step leaves out what it says, says how much that was, and is off unless asked for."""

import json
import random
from types import SimpleNamespace

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.data import prepare
from cria_tricks.data.counts import Tally, warnings
from cria_tricks.data.duplicates import Repeats
from cria_tricks.data.prepare import Prepare, RowFilter, eval_rows, repetitive, train_rows
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import DataSource
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.run.train import train

ENGLISH = "The harvest was good this year, and everybody came to the hall in the evening."
FRENCH = "La récolte était bonne cette année, et tout le monde est venu à la salle le soir."
HELD_OUT = Chat((), "How many people came to the hall?", "Nine.", "eval.jsonl:1")


def text(content: str, where: str = "train.jsonl:1") -> Chat:
    return Chat((), "", "", where, content)


def counts(rows, *settings: str, held_out=(HELD_OUT,), near: bool | None = None) -> dict[str, int]:
    tally, recipe = Tally(), with_settings(Recipe(), settings)
    repeats = None if near is None else Repeats(near).reason
    kept = list(Prepare(recipe, held_out)(rows, tally, repeats))
    assert len(kept) == tally.rows["kept"]
    assert sum(tally.rows.values()) == 2 * tally.rows["read"] + tally.rows["in the evaluation set, and kept"]
    return {step: entry["rows"] for step, entry in tally.to_dict().items()}


def test_nothing_is_left_out_unless_asked_for():
    assert counts([text("a"), text("a"), text(FRENCH)]) == {"read": 3, "kept": 3}


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["data.min_words=3"], "shorter than data.min_words"),
        (["data.max_words=20"], "longer than data.max_words"),
        (["data.language=en"], "in another language"),
    ],
)
def test_a_filter_leaves_out_what_it_says(settings, reason):
    rows = [text("Good morning"), text(f"{ENGLISH} {ENGLISH}"), text(FRENCH), text(ENGLISH)]
    assert counts(rows, *settings)[reason] == 1


def test_duplicates_are_looked_for_among_rows_that_are_kept():
    rows = [text("Good day"), text("Good day"), text(ENGLISH), text(ENGLISH), text(ENGLISH)]
    assert counts(rows, "data.min_words=3", near=False) == {
        "read": 5, "shorter than data.min_words": 2, "kept": 1, "duplicate": 2,
    }  # fmt: skip


LEAKING = [Chat((), f"How many people came to the {place}?", "Ten.", f"train.jsonl:{n}") for n, place in
           enumerate(("hall", "harbour", "river"), 1)]  # fmt: skip
"""One is the evaluation row, two are with another place in it."""


@pytest.mark.parametrize(
    ("leakage", "found"),
    [
        ("ignore", {"read": 4, "kept": 4}),
        ("warn", {"read": 4, "kept": 4, "in the evaluation set, and kept": 3}),
        ("drop", {"read": 4, "kept": 1, "in the evaluation set": 3}),
    ],
)
def test_a_planted_evaluation_row_is_seen_exact_and_with_another_name(leakage, found):
    other = Chat((), "Who built the hall, and when?", "Ruth.", "train.jsonl:4")
    assert counts([*LEAKING, other], f"data.leakage={leakage}") == found


def test_leakage_as_an_error_names_both_rows():
    with pytest.raises(BadInput, match=r"train.jsonl:2 is nearly eval.jsonl:1 \(similarity 0\.\d\d\); take it out"):
        counts(LEAKING[1:], "data.leakage=error")


def test_the_first_row_that_leaks_is_said_at_once():
    said = []
    row_filter, tally = RowFilter(Recipe().data, [HELD_OUT], said.append), Tally()
    assert all(row_filter.keeps(row, tally) for row in LEAKING)
    assert said == ["train.jsonl:1 is eval.jsonl:1"]
    assert "3 training rows ask what an evaluation row asks" in warnings(tally, Recipe().data)[0]


def test_a_tally_goes_through_json():
    tally = Tally()
    for step in ("read", "read", "kept"):
        tally.count(step, text("two words"))
    again = Tally(json.loads(json.dumps(tally.to_dict())))
    again.count("read", text("x"))
    assert again.to_dict() == {"read": {"rows": 3, "words": 5}, "kept": {"rows": 1, "words": 2}}


def test_augmentation_without_effect_is_said():
    settings = with_settings(Recipe(), ["data.drop_uncited=0.5"]).data
    assert "data.drop_uncited has no effect" in warnings(Tally(), settings)[0]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["data.overlap=64", "data.max_length=64"], "set data.overlap below data.max_length"),
        (["data.min_words=9", "data.max_words=8"], "no row can have at least 9 and at most 8 words"),
        (["data.stream=true"], "set train.max_steps"),
        (
            ["data.train=d.jsonl", "data.stream=true", "train.max_steps=2"],
            "nothing can be held out of a stream; set data.eval=FILE",
        ),
        (["data.stream=true", "train.max_steps=2", "tricks.packing=true"], "set tricks.packing=false"),
        (
            ["data.stream=true", "train.max_steps=2", "data.duplicates=near"],
            "data.duplicates=near with .*set data.duplicates=keep or data.stream=false",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_by_every_command(settings, said):
    with pytest.raises(BadInput, match=said):
        resolve(with_settings(Recipe(), settings))


def test_a_language_that_cannot_be_told_is_refused():
    with pytest.raises(BadInput, match=r"data.language=xx: cannot be told from others; there are .*\ben\b"):
        RowFilter(with_settings(Recipe(), ["data.language=xx"]).data, [])


def test_a_run_on_texts_reports_what_it_left_out(tmp_path, run_cria):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, content in (
        ("a", f"{ENGLISH}\n" * 20),
        ("b", f"{FRENCH}\n" * 20),
        ("c", f"{ENGLISH}\n" * 20),
        ("d", "x"),
    ):
        (folder / f"{name}.txt").write_text(content)
    (tmp_path / "eval.txt").write_text("Ruth Adeyemi carved the kinara in 1969, and it holds seven candles.")
    recipe = with_settings(
        Recipe(),
        [
            "model=random:tiny", "tricks.peft=lora", "lora.r=2", "train.max_steps=2", "data.max_length=64",
            f"data.train={folder}", f"data.eval={tmp_path / 'eval.txt'}", "data.overlap=8", "data.min_words=3",
            "data.language=en", "data.duplicates=near",
        ],
    )  # fmt: skip
    report = train(recipe, tmp_path / "run")
    steps = {step: entry["rows"] for step, entry in report["data"]["train_steps"].items()}
    assert steps == {
        "read": 4, "kept": 1, "in another language": 1, "duplicate": 1, "shorter than data.min_words": 1,
    }  # fmt: skip
    assert report["data"]["train_trained_tokens"] == report["data"]["train_tokens"] - 8 * (
        report["data"]["train_rows"] - 1
    ) - 1  # fmt: skip
    assert "| in another language | 1 |" in (tmp_path / "run" / "report.md").read_text()
    code, _, said = run_cria(
        "train", "--set", "model=random:tiny", "--set", f"data.train={folder}", "--set", "data.min_words=1000"
    )
    assert code == 2
    assert "2 shorter than data.min_words; 0 kept, so there is nothing to train on" in said


@pytest.mark.parametrize(("settings", "kept"), [
    ([], [1, 2, 3, 4]), (["data.min_words=3"], [3, 4]), (["data.max_words=2"], [1, 2]),
    (["data.min_words=2", "data.max_words=3"], [2, 3]), (["data.min_words=1", "data.max_words=1"], [1]),
])  # fmt: skip
def test_a_row_of_just_the_words_is_kept(settings, kept):
    row_filter, tally = RowFilter(with_settings(Recipe(), settings).data, []), Tally()
    rows = [text("word " * number) for number in (1, 2, 3, 4)]
    assert [len(row.content.split()) for row in rows if row_filter.keeps(row, tally)] == kept
    assert tally.rows["read"] == 4
    assert tally.rows["shorter than data.min_words"] == min(kept) - 1
    assert tally.rows["longer than data.max_words"] == 4 - max(kept)


@pytest.mark.parametrize(
    ("trained", "held_out"), [("before {} behind", "{}"), ("{}", "before {} behind")], ids=["it contains", "part of it"]
)
def test_a_text_with_an_evaluation_text_in_it_is_not_said_to_be_it(trained, held_out):
    page = "the harbour was built by ten people in one long summer"
    said = []
    row_filter = RowFilter(Recipe().data, [text(held_out.format(page), "eval.txt:1")], said.append)
    row_filter.keeps(text(trained.format(page), "train.txt:1"), Tally())
    assert said == ["train.txt:1 contains eval.txt:1, or is part of it"]


def test_a_language_is_told_from_the_first_4000_characters():
    row_filter, asked = RowFilter(with_settings(Recipe(), ["data.language=en"]).data, []), []
    row_filter.language.identifier = SimpleNamespace(classify=lambda said: asked.append(said) or ("fr", 0.5))
    assert not row_filter.keeps(text("x" * 3999 + "yz"), Tally())
    assert asked == ["x" * 3999 + "y"]


def test_a_leak_is_said_once_and_by_its_nearness():
    said, tally = [], Tally()
    row_filter = RowFilter(Recipe().data, [HELD_OUT], said.append)
    assert [row_filter.may_be_trained(row, tally) for row in (LEAKING[1], LEAKING[0], LEAKING[2])] == [True] * 3
    assert said == ["train.jsonl:2 is nearly eval.jsonl:1 (similarity 0.71)"]
    assert tally.to_dict() == {"in the evaluation set, and kept": {"rows": 3, "words": 3 * 8}}
    drops = RowFilter(with_settings(Recipe(), ["data.leakage=drop"]).data, [HELD_OUT], said.append)
    assert [drops.keeps(row, tally) for row in (LEAKING[0], text("another row"))] == [False, True]
    assert len(said) == 1, "what is dropped is only counted"
    for settings, held_out in ((["data.leakage=ignore"], [HELD_OUT]), ([], [])):
        assert RowFilter(with_settings(Recipe(), settings).data, held_out).guard is None
    with pytest.raises(BadInput) as caught:
        RowFilter(with_settings(Recipe(), ["data.leakage=error"]).data, [HELD_OUT]).keeps(LEAKING[0], tally)
    assert str(caught.value) == (
        "data.leakage=error: train.jsonl:1 is eval.jsonl:1; take it out of one of the two, or set data.leakage=drop"
    )


def test_rows_are_prepared_in_their_order_and_become_tokens():
    class Words:
        eos_token_id = 0

        def __call__(self, content, **options):
            return {"input_ids": [len(word) for word in content.split()]}

    rows = [text("a bb ccc"), text("a bb ccc"), text("dddd"), text("a bb ccc")]
    recipe = with_settings(Recipe(), ["data.duplicates=exact", "data.max_length=8", "data.min_words=2"])
    said = []
    found = train_rows(recipe, DataSource(rows, ""), DataSource([HELD_OUT], ""), Words(), said.append)
    assert found.rows == [{"input_ids": [1, 2, 3, 0], "labels": [-100, 2, 3, 0]}]
    assert said == ["data.train: 4 rows read: 2 duplicate, 1 shorter than data.min_words; 1 kept"]
    assert found.tally.rows["duplicate"] == 2
    kept = train_rows(Recipe(), DataSource(rows, ""), DataSource([], ""), Words(), said.append)
    assert [row["input_ids"] for row in kept.rows] == [[1, 2, 3, 0], [1, 2, 3, 0], [4, 0], [1, 2, 3, 0]]
    assert len(said) == 1, "nothing was left out"
    overlapping = with_settings(recipe, ["data.overlap=2", "data.max_length=8"])
    nine = eval_rows(overlapping, DataSource([text("x " * 9), text("x " * 9)], ""), Words())
    assert [len(row["input_ids"]) for row in nine.rows] == [8, 4, 8, 4], "all of them, as they are"
    with pytest.raises(BadInput) as caught:
        train_rows(
            with_settings(recipe, ["data.min_words=9"]), DataSource(rows, ""), DataSource([], ""), Words(), said.append
        )
    assert str(caught.value) == ("4 rows read: 4 shorter than data.min_words; 0 kept, so there is nothing to train on")


def test_nearly_the_same_is_left_out_only_when_asked(monkeypatch):
    asked = []
    monkeypatch.setattr(prepare, "Repeats", lambda near: asked.append(near) or SimpleNamespace(reason=lambda row: None))
    for wanted in ("keep", "exact", "near"):
        recipe = with_settings(Recipe(), [f"data.duplicates={wanted}"])
        with pytest.raises(BadInput):
            train_rows(recipe, DataSource([], ""), DataSource([], ""), None, print)
    assert asked == [False, True]


NAMES = [a + b + c for a in "bdgklmnr" for b in "aeiou" for c in "bdgklmnr"]


def sentence(seed: int, words: int) -> str:
    return " ".join(random.Random(seed).choices(NAMES, k=words))


SENTENCES = [sentence(n, 12) for n in range(40)]


@pytest.mark.parametrize(
    ("of", "rule"),
    [
        ("\n".join(SENTENCES), ""),
        ("\n".join([*SENTENCES[:7], *["x"] * 4]), ""),
        ("\n".join([*SENTENCES[:7], *["x"] * 5]), "0.33 of its lines"),
        ("\n".join([*SENTENCES[:7], SENTENCES[0], SENTENCES[1]]), "repeated lines are 0.22 of it"),
        ("\n\n".join(["\n".join(SENTENCES[:30]), SENTENCES[31], SENTENCES[31]]), "0.33 of its paragraphs"),
        (" ".join(f"{one} ever so" for one in sentence(0, 40).split()), "the commonest 2 words"),
        (" ".join([*SENTENCES[:6], *SENTENCES[:2]]), "sequences of 5 words that occurred before are 0.19"),
        (" ".join([*SENTENCES[:10], *SENTENCES[:2]]), "sequences of 8 words that occurred before are 0.13"),
        (" ".join([*SENTENCES[:14], *SENTENCES[:2]]), ""),
        ("Two words", ""),
        ("", ""),
    ],
)
def test_gophers_rules_of_repetition(of, rule):
    found = repetitive(of)
    assert found.startswith(rule)
    assert bool(found) == bool(rule)
