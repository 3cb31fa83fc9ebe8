"""A prompt is written as the rows were that the adapter was trained on, or as it is when the user wants it so."""

import json
import shutil
from pathlib import Path

import pytest

from cria_tricks.adapter.chat import Format, prompt_format, try_format, write_prompt
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import CONTRACT
from cria_tricks.data.tokens import IGNORED, chunks, document, token_row
from cria_tricks.recipe import Recipe
from tests.helpers import prepare

USER = {"role": "user", "content": "Name a day."}
CHAT = Chat((USER, {"role": "assistant", "content": "Kwanzaa begins."}), "", "", "x:1")
COMPLETION = Chat((), "Name a day:", " Kwanzaa begins.", "x:1")
TEXT = Chat((), "", "", "x:1", "It was the best of times")


def test_a_prompt_is_what_training_put_before_the_answer(tokenizer):
    for chat, said in ((CHAT, [USER]), (COMPLETION, COMPLETION.prompt)):
        row, _ = token_row(chat, tokenizer, 64, "error")
        before = [token for token, label in zip(row["input_ids"], row["labels"], strict=True) if label == IGNORED]
        if chat is CHAT:  # a line break after the answer is no answer either
            before = before[: len(before) - 1]
        assert write_prompt(tokenizer, said)["input_ids"].tolist() == [before]
    [row] = chunks(document(TEXT, tokenizer), 64, 1)
    assert write_prompt(tokenizer, TEXT.text)["input_ids"].tolist() == [row["input_ids"][:-1]], "the end is to come"


def test_the_date_in_a_template_is_that_of_training(tokenizer):
    class Dated:
        def apply_chat_template(self, messages, **options):
            self.options = options
            return tokenizer.apply_chat_template(messages, **options)

    write_prompt(dated := Dated(), [USER])
    assert dated.options["date_string"] == "26 Jul 2024"


def test_an_empty_prompt_is_refused(tokenizer):
    with pytest.raises(BadInput, match="the prompt has no tokens"):
        write_prompt(tokenizer, "")


def folder_of(folder: Path, kinds: object) -> Path:
    (folder / "provenance.json").write_text(json.dumps({"data": {"train_kinds": kinds}}))
    return folder


@pytest.mark.parametrize(
    ("kinds", "template", "said"),
    [
        ({"chat": 3}, True, ""),
        ({"completion": 3}, False, "it was trained on prompt/completion rows, loss on the completion only: each"),
        ({"text": 3, "chat": 0}, False, "it was trained on plain text, loss on all tokens but the first of each"),
        (
            {"chat": 1, "text": 2},
            True,
            "(2; loss on all tokens but the first of each document): prompts are written as",
        ),
        ({"completion": 1, "text": 2}, False, "each prompt is given as it is"),
    ],
)
def test_the_format_is_the_one_that_was_trained(kinds, template, said, tokenizer, tmp_path):
    form = prompt_format(folder_of(tmp_path, kinds), tokenizer)
    assert form.template == template
    assert said in form.note
    assert bool(form.note) == bool(said)
    raw = prompt_format(tmp_path, tokenizer, raw=True)
    assert (raw.template, raw.note) == (False, "")


@pytest.mark.parametrize("content", [None, "{", "[]", '{"data": 3}', '{"data": {"train_kinds": {"chat": "x"}}}', "3"])
def test_without_a_word_on_it_the_tokenizer_decides(content, tokenizer, tmp_path):
    if content:
        (tmp_path / "provenance.json").write_text(content)
    form = prompt_format(tmp_path, tokenizer)
    assert form.template
    assert "the tokenizer has a chat template: prompts are written as chats; --raw" in form.note

    class Plain:
        chat_template = None

    form = prompt_format(tmp_path, Plain())
    assert not form.template
    assert "has no chat template: each prompt is given as it is" in form.note


@pytest.fixture
def adapter(trained, tmp_path):
    """A real adapter that says it was trained on rows of these kinds."""

    def made(**kinds: int) -> Path:
        folder = Path(shutil.copytree(trained / "adapter", tmp_path / "run" / "adapter"))
        about = json.loads((folder / "provenance.json").read_text())
        assert about["data"]["train_kinds"] == {"chat": 3}
        about["data"]["train_kinds"] = kinds
        (folder / "provenance.json").write_text(json.dumps(about))
        (folder / "manifest.json").unlink()
        atomic_files.write_manifest(folder)
        return folder

    return made


@pytest.fixture
def heard(monkeypatch):
    """What the model was given, instead of its answers."""
    said: list = []

    def answer(model, tokenizer, prompt, *more):
        said.append(prompt if isinstance(prompt, str) else [dict(message) for message in prompt])
        return "yes"

    monkeypatch.setattr("cria_tricks.adapter.chat.answer", answer)
    return said


def test_chat_gives_an_adapter_of_completions_each_prompt_alone_and_as_it_is(adapter, heard, run_cria, monkeypatch):
    lines = iter([" one  ", "two", "   "])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, _, stderr = run_cria("chat", adapter(completion=3))
    assert code == 0, stderr
    assert heard == [" one  ", "two"]
    assert [line for line in stderr.splitlines() if line.startswith("note: ")] == [
        "note: it was trained on prompt/completion rows, loss on the completion only: each prompt is given as it is"
    ]


def test_chat_gives_an_adapter_of_chats_the_turns_before_and_raw_gives_the_text(trained, heard, run_cria, monkeypatch):
    lines = iter(["Hi ", "And?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, _, stderr = run_cria("chat", trained / "adapter", "--system", "Be brief.")
    assert code == 0, stderr
    system = {"role": "system", "content": "Be brief."}
    first = [system, {"role": "user", "content": "Hi"}]
    second = [*first, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "And?"}]
    assert heard == [first, second]
    assert "note: " not in stderr
    assert run_cria("chat", trained / "adapter", "--raw", "--prompt", " go on")[0] == 0
    assert heard[2:] == [" go on"]


def test_chat_with_base_asks_both_and_each_sees_its_own_answers(trained, run_cria, monkeypatch):
    asked = []

    def answer(model, tokenizer, said, *more):
        name = "adapter" if hasattr(model, "get_base_model") else "base"
        asked.append((name, [turn["content"] for turn in said]))
        return f"of the {name}"

    monkeypatch.setattr("cria_tricks.adapter.chat.answer", answer)
    lines = iter(["One?", "Two?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    code, stdout, stderr = run_cria("chat", trained / "adapter", "--with-base")
    assert code == 0, stderr
    assert asked == [
        ("base", ["One?"]),
        ("adapter", ["One?"]),
        ("base", ["One?", "of the base", "Two?"]),
        ("adapter", ["One?", "of the adapter", "Two?"]),
    ]
    assert stdout.split() == ["base:", "adapter:", "base:", "adapter:"]


def test_chat_begins_with_the_contract_if_every_training_row_did(trained, heard, run_cria, tmp_path):
    folder = tmp_path / "adapter"
    with atomic_files.new_folder(folder) as made:  # it writes the manifest anew
        shutil.copytree(trained / "adapter", made, dirs_exist_ok=True)
        recipe = made / "recipe.toml"
        recipe.write_text(recipe.read_text().replace("contract = false", "contract = true"))
    assert run_cria("chat", folder, "--prompt", "Hi")[0] == 0
    assert [turn["content"] for turn in heard[0]] == [CONTRACT, "Hi"]
    assert run_cria("chat", folder, "--prompt", "Hi", "--system", "Be brief.")[0] == 0
    assert [turn["content"] for turn in heard[1]] == ["Be brief.", "Hi"]


@pytest.mark.parametrize(
    ("kinds", "options", "why"),
    [
        ({"chat": 1}, ["--raw"], "--raw gives the text as it is"),
        ({"text": 1}, [], "it was trained on plain text, loss on all tokens but the first of each document"),
    ],
)
def test_a_system_message_where_there_is_no_place_for_one_is_refused(kinds, options, why, adapter, run_cria):
    code, stdout, stderr = run_cria("chat", adapter(**kinds), "--system", "Be brief.", "--prompt", "Hi", *options)
    assert (code, stdout) == (2, "")
    assert stderr == f"error: --system: there is no place for a system message: {why}; put it into the prompt\n"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system') if messages[0]['role'] == 'system' }}{{ messages[-1]['content'] }}",
        "{% for m in messages if m['role'] != 'system' %}{{ m['content'] }}{% endfor %}",
    ],
    ids=["refuses", "drops"],
)
def test_a_template_without_a_system_message_is_not_given_one(template, tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer, "chat_template", template)
    try_format(tokenizer, Format(True, ""), None)
    with pytest.raises(BadInput, match="--system: this model's chat template has no system message"):
        try_format(tokenizer, Format(True, ""), "Be brief.")


def test_a_folder_of_plain_peft_is_asked_by_its_tokenizers_template(tiny_model, tokenizer, tmp_path, heard, run_cria):
    from cria_tricks.adapter import folder as artifact

    _, _, loaded = prepare(tiny_model, "tricks.peft=lora", "lora.r=2")
    artifact.save(tmp_path / "a", loaded.model, tokenizer, str(tiny_model), "", Recipe())
    for ours in ("manifest.json", "recipe.toml"):
        (tmp_path / "a" / ours).unlink()
    code, _, stderr = run_cria("chat", tmp_path / "a", "--prompt", "Hi")
    assert (code, heard) == (0, [[{"role": "user", "content": "Hi"}]])
    assert "note: it is not known what was trained, and the tokenizer has a chat template" in stderr
    (tmp_path / "a" / "chat_template.jinja").unlink()
    code, _, stderr = run_cria("chat", tmp_path / "a", "--prompt", "Hi")
    assert (code, heard[1:]) == (0, ["Hi"])
    assert "has no chat template: each prompt is given as it is" in stderr
    code, _, stderr = run_cria("chat", tmp_path / "a", "--prompt", "Hi", "--system", "Be brief.")
    assert code == 2
    assert "--system: there is no place for a system message: it is not known what was trained" in stderr
