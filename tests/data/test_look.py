"""A look at a data set counts what stands in made-up rows, names what is worth acting on, and changes nothing."""

import fnmatch
import importlib.util
import json

import pytest

from cria_tricks import models
from cria_tricks.common.errors import BadInput
from cria_tricks.data import lengths, sources
from cria_tricks.data.look import EMPTY, PLACEHOLDER, PLAIN, Look, RowLook, leaks, look, problems
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import DataSource
from cria_tricks.data.tokens import tokenize
from cria_tricks.kwanzaa.scores import kind_and_answer

QUESTIONS = "bread river seven stone paper light crown house music water".split()


def chat(user: str, answer: str, system: str = "", where: str = "rows.jsonl:1") -> Chat:
    turns = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}]
    if system:
        turns.insert(0, {"role": "system", "content": system})
    return Chat(tuple(turns), "", "", where)


def contract(text: str, completeness: str = "complete") -> str:
    return json.dumps({"version": "kwanzaa.answer.v1", "answer": {"text": text, "completeness": completeness}})


def looked(*rows: Chat, tokenizer=None, max_length: int = 2048):
    return look(DataSource(list(rows), "made up"), kind_and_answer, tokenizer, max_length)


def whats(*rows: Chat, **options) -> list[str]:
    return [problem.what for problem in problems({"train": looked(*rows, **options)}, None)]


@pytest.fixture(scope="module")
def smollm2():
    return lengths.open_tokenizer("smollm2")


def test_rows_get_the_kind_of_their_answer():
    found = [
        kind_and_answer(row)
        for row in (
            chat("a", contract("It is so.")),
            chat("a", contract("The documents do not say.", "insufficient_data")),
            chat("a", contract("[This answer would explain it.]")),
            chat("a", contract("")),
            chat("a", "Plain."),
            chat("a", '{"city": "Paris"}'),
            Chat((), "a", "b", "here"),
            Chat((), "", "", "here", "A text."),
        )
    ]
    assert [kind for kind, _ in found] == [
        "answer", "refusal", PLACEHOLDER, EMPTY, "chat", "chat", *PLAIN[1:],
    ]  # fmt: skip
    assert [answer for _, answer in found[:4]] == [
        "It is so.", "The documents do not say.", "[This answer would explain it.]", "",
    ]  # fmt: skip


def test_the_kinds_of_our_own_sets_are_those_that_an_evaluation_counts():
    found = look(sources.find("history_notes", "train"), kind_and_answer, None, 2048)
    assert found.kinds == {"answer": 272, "refusal": 85}


def test_the_real_rows_are_sixty_five_placeholders_twenty_six_refusals_sixteen_answers(real_data):
    train = sources.find(str(real_data / "kwanzaa_train.jsonl"), "train")
    held_out = sources.find(str(real_data / "kwanzaa_eval.jsonl"), "eval")
    found = look(train, kind_and_answer, None, 2048)
    assert found.kinds == {"placeholder": 65, "refusal": 26, "answer": 16}
    met = leaks(train.rows, held_out.rows)
    assert (met.rows, met.same, met.held_out) == (15, 2, 8), "docs/reference/data.md says so"


def test_lengths_are_those_of_training(smollm2):
    source = sources.find("nguzo_saba", "train")
    tokens = look(source, kind_and_answer, smollm2, 2048).counts()
    trained = tokenize(source.rows, smollm2, 2048)
    each = sorted(len(row["input_ids"]) for row in trained.rows)
    assert (tokens["tokens"], tokens["trained tokens"]) == (trained.tokens, trained.trained_tokens)
    assert (tokens["shortest row"], tokens["longest row"]) == (each[0], each[-1])
    assert each[15] == tokens["median row"], "the lower one of the two in the middle of 32"
    assert each[30] == tokens["95 % of rows at most"], "31 of 32 rows are 97 %, 30 are 94 %"
    shorter = look(source, kind_and_answer, smollm2, 420).counts()
    assert shorter["rows too long"] == tokenize(source.rows, smollm2, 420).cut > 0
    assert shorter["longest row"] == tokens["longest row"], "of whole rows, before any cut"


def test_of_an_even_number_of_rows_the_median_is_the_lower_one_in_the_middle():
    rows = tuple(RowLook("here", "chat", "a", "b", tokens=tokens) for tokens in (40, 10, 20, 30))
    found = Look("made up", rows, 2048, (), ()).counts()
    assert list(found.values())[3:7] == [10, 20, 40, 40], "shortest, median, 95 %, longest"


def test_the_first_token_of_the_answer_must_be_within_the_length(smollm2):
    row = Chat((), "word " * 30, "yes", "here")
    prompt = len(smollm2(row.prompt)["input_ids"])
    assert looked(row, tokenizer=smollm2, max_length=prompt).rows[0].cut_to_nothing
    assert not looked(row, tokenizer=smollm2, max_length=prompt + 1).rows[0].cut_to_nothing


def test_a_text_is_never_too_long_because_it_becomes_several_rows(smollm2):
    text = Chat((), "", "", "here", " ".join(QUESTIONS * 20))
    found = looked(text, tokenizer=smollm2, max_length=64)
    tokens = found.counts()
    assert tokens["rows too long"] == 0
    assert tokens["trained tokens"] == tokens["tokens"] - 1 > 64
    assert whats(text, tokenizer=smollm2, max_length=64) == []


def test_too_long_rows_are_those_that_training_cuts_or_refuses(smollm2):
    cut = chat("Why?", "word " * 80)
    refused = chat("word " * 80, "No.", where="rows.jsonl:2")
    found = problems({"train": looked(cut, refused, tokenizer=smollm2, max_length=64)}, None)
    assert [problem.what for problem in found] == [
        "training rows without an answer in the first data.max_length=64 tokens",
        "training rows longer than data.max_length=64 tokens",
    ]
    assert found[0].first == "rows.jsonl:2"
    with pytest.raises(BadInput, match=r"rows.jsonl:2: the prompt alone"):
        tokenize([cut, refused], smollm2, 64)
    longest = max(row.tokens for row in looked(cut, refused, tokenizer=smollm2).rows)
    assert f"data.max_length={longest}" in found[0].do + found[1].do
    assert whats(cut, refused, tokenizer=smollm2, max_length=longest) == []
    assert whats(cut, tokenizer=smollm2, max_length=longest - 1) != []


def test_rows_that_do_not_fit_the_model_are_a_problem_and_not_an_end():
    class NoTemplate:
        chat_template = None

    found = problems({"train": looked(chat("a", "b"), tokenizer=NoTemplate())}, None)
    assert [problem.what for problem in found] == ["training rows that do not fit this model"]
    assert "has no chat template" in found[0].first


def test_repeats_are_counted_by_the_rules_of_data_duplicates():
    long = " ".join(f"{word} {number}" for number, word in enumerate(QUESTIONS * 12))
    rows = [chat("Tell it.", long), chat("Tell it.", long, where="rows.jsonl:2"), chat("Tell it.", f"{long} End.")]
    found = looked(*rows)
    assert found.exact == ("rows.jsonl:2",)
    if importlib.util.find_spec("datasketch"):
        assert len(found.near) == 1
        assert len(whats(*rows)) == 2


def test_without_the_library_near_duplicates_are_left_out(monkeypatch, run_cria):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "datasketch" else find(name))
    assert looked(chat("a", "b")).near is None
    code, stdout, _ = run_cria("data", "nguzo_saba")
    assert code == 0
    assert "near duplicates were not looked for: pip install 'cria_tricks[data]'" in stdout


def test_an_answer_is_worth_a_line_from_five_percent_and_three_rows_on():
    several = [chat(f"{word}?", f"About {word}.") for word in QUESTIONS * 5]
    same = [chat(f"{number}?", "I do not know.") for number in range(3)]
    assert whats(*several[:10], *same[:2]) == [], "two rows are few"
    (problem,) = problems({"train": looked(*several[:10], *same)}, None)
    assert (problem.what, problem.rows) == ('training rows with the same answer, "I do not know."', 3)
    unlike = [chat(f"{number}?", f"It is {number}.") for number in range(58)]
    assert whats(*unlike, *same) == [], "3 of 61 are less than 5 %"


def test_empty_answers_and_rows_without_the_contract_are_named():
    rows = [chat("a", contract("")), chat("b", "Plain."), chat("c", contract("[This answer would be long.]"))]
    assert whats(*rows) == [
        "placeholders, which announce an answer and give none",
        "answers without text",
        "training rows that do not keep the answer contract, as others do",
    ]
    assert whats(chat("b", "Plain.")) == [], "none has to"


def test_leaks_are_counted_from_both_sides():
    held_out = [chat(f"What does the {word} of the old town mean to you?", "x") for word in QUESTIONS[:2]]
    train = [
        chat("What does the bread of the old town mean to you?", "y", where="rows.jsonl:7"),
        chat("What does the BREAD of the old town mean to you?!", "z"),
        chat("Who was there?", "w"),
    ]
    found = leaks(train, held_out)
    assert (found.rows, found.same) == (2, 2)
    assert found.first == ("rows.jsonl:7", held_out[0].where)
    assert found.held_out == 2, "the other evaluation row is nearly the same question"
    (problem,) = problems({"train": looked(*train), "eval": looked(*held_out)}, found)
    assert problem.what == "training rows that ask what an evaluation row asks, or nearly (2 word for word)"
    assert problem.rows == 2
    assert problem.do.startswith("data.leakage=drop")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": f"{word}?", "completion": f"About [{word}]."} for word in QUESTIONS]
    path.write_text("".join(json.dumps(row) + "\n" for row in [*rows, rows[0]]))
    return path


def test_the_command_says_the_verdict_first_and_ends_well(run_cria, file, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    code, stdout, stderr = run_cria("data", file, "--show", "1")
    assert (code, stderr) == (0, "")
    first, *rest = [line.rstrip() for line in stdout.splitlines()]
    assert first == "11 training rows: 1 thing to act on"
    assert "- training rows that repeat an earlier row word for word: 1 (first:" in rest
    assert "  answer: About [bread]." in rest, "brackets are no markup"
    assert max(map(len, rest)) <= 80
    assert run_cria("data", file, "--strict")[0] == 1
    assert run_cria("data", "nguzo_saba", "--strict")[0] == 0


def test_the_command_gives_one_document(run_cria, file):
    code, stdout, _ = run_cria("data", file, "--eval", file, "--json")
    assert code == 0
    found = json.loads(stdout)
    assert (found["train"]["rows of kind completion"], found["eval"]["exact duplicates"]) == (11, 1)
    assert found["leaks"]["rows"] == found["leaks"]["held_out"] == 11
    assert {problem["rows"] for problem in found["problems"]} == {11, 1}
    assert found["notes"] == []


def test_a_long_example_is_cut_to_the_width(run_cria, tmp_path, monkeypatch):
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "a " * 200, "completion": "b " * 200}))
    monkeypatch.setenv("COLUMNS", "60")
    shown = run_cria("data", path, "--show", "3")[1].partition("1 of 1 rows of kind completion\n")[2]
    assert [len(line) for line in shown.splitlines()[1:]] == [60, 60]
    assert shown.count("…\n") == 2


def test_a_tokenizer_that_cannot_be_had_leaves_out_the_lengths_alone(run_cria, file):
    code, stdout, _ = run_cria("data", file, "--model", "meta-llama/Llama-3.2-1B", "--offline", "--json")
    found = json.loads(stdout)
    assert (code, "tokens" in found["train"], found["train"]["rows"]) == (0, False, 11)
    assert found["notes"][0].startswith("no lengths: model meta-llama/Llama-3.2-1B: cannot be loaded")
    assert "note: no lengths" in run_cria("data", file, "--model", "meta-llama/Llama-3.2-1B", "--offline")[1]


def test_of_a_hub_model_only_the_small_files_are_downloaded(monkeypatch, online):
    import huggingface_hub

    asked = []

    def download(name, allow_patterns, revision):
        asked.append((name, allow_patterns))
        return str(models.tokenizer_here("smollm2"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    tokenizer = lengths.open_tokenizer("owner/never-seen")
    assert len(tokenizer("Umoja means unity.")["input_ids"]) > 3
    ((name, patterns),) = asked
    assert name == "owner/never-seen"
    assert not any(fnmatch.fnmatch("model.safetensors", pattern) for pattern in patterns)
    assert any(fnmatch.fnmatch("tokenizer.json", pattern) for pattern in patterns)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nguzo_saba", "--eval", "none.jsonl"], "--eval none.jsonl: no such file"),
        ([""], "the data set: is empty"),
    ],
)
def test_bad_input_is_one_line(arguments, said, run_cria, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, stdout, stderr = run_cria("data", *arguments)
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert stderr.startswith("error: ")
    assert said in stderr
