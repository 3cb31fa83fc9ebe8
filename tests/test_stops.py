"""The token that rows train last is one at which everything stops: chat, eval, Modelfile, GGUF, plain generation."""

import json
import re
from types import SimpleNamespace

import gguf
import pytest
from transformers import AutoTokenizer, GenerationConfig

from cria_tricks.adapter import chat
from cria_tricks.adapter.export import export
from cria_tricks.adapter.merge import merge
from cria_tricks.adapter.opening import open_folder
from cria_tricks.common.errors import BadInput
from cria_tricks.data.rows import check_rows
from cria_tricks.data.tokens import IGNORED, tokenize
from cria_tricks.load import answering
from cria_tricks.models import ends
from tests.test_export import CHATML, make

WITHOUT_END = CHATML.replace("<|im_end|>", "")
TWO = CHATML.replace(
    "{% endfor %}", "{% if loop.last and m['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
)
END, TEXT_END = 2, 0  # <|im_end|> and <|endoftext|>
BASES = {  # template, the tokenizer's EOS, what the base's generation config names
    "one": (CHATML, "<|im_end|>", END),
    "another": (CHATML, "<|endoftext|>", TEXT_END),
    "none": (WITHOUT_END, "<|endoftext|>", TEXT_END),
    "two": (CHATML, "<|endoftext|>", [TEXT_END, END]),
    "both": (TWO, "<|endoftext|>", TEXT_END),
}
SAID = {
    "one": None,
    "another": "ends an answer with <|im_end|>, and the base's generation stops at <|endoftext|>: cria stops at both",
    "none": r"writes '\n' behind an answer and no end token, and generation stops at <|endoftext|>, so .* data.eos=",
    "two": None,
    "both": "ends an answer with <|im_end|>, and the base's generation stops at <|endoftext|>: cria stops at both",
}
ROWS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}) + "\n"
    for n in range(4)
)


@pytest.fixture(scope="module")
def bases(tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    for name, (template, eos, named) in BASES.items():
        base = make(folder / name, tokenizer, template=template)
        found = AutoTokenizer.from_pretrained(base)
        found.eos_token = found.pad_token = eos
        found.save_pretrained(base)
        GenerationConfig(eos_token_id=named).save_pretrained(base)
    (folder / "rows.jsonl").write_text(ROWS)
    return folder


def trained(bases, name, run_cria, out, *settings):
    """Train an adapter in two steps; return its folder, and what was said."""
    sets = ("tricks.peft=lora", "lora.r=2", "train.max_steps=1", f"data.train={bases / 'rows.jsonl'}", "eval.samples=0")
    asked = [part for one in (*sets, f"data.eval={bases / 'rows.jsonl'}", *settings) for part in ("--set", one)]
    code, *written = run_cria("train", "smoke", "--set", f"model={bases / name}", "--out", out, *asked)
    assert code == 0, " ".join(written)[-1500:]
    return out / "adapter", re.sub(r"\s+", " ", " ".join(written))


def stopped_at(monkeypatch, model, tokenizer):
    """The tokens at which ``cria chat`` and ``cria eval`` let a model stop."""
    asked = []
    honest = model.generate
    monkeypatch.setattr(model, "generate", lambda **given: asked.append(given["eos_token_id"]) or honest(**given))
    chat.answer(model, tokenizer, [{"role": "user", "content": "?"}], 1)
    answering.answer_batch(model, tokenizer, [[5, 6]], 1)
    return asked


@pytest.mark.parametrize("name", BASES)
def test_what_is_trained_last_is_where_everything_stops(name, bases, run_cria, tmp_path, monkeypatch):
    adapter, said = trained(bases, name, run_cria, tmp_path / "run")
    if SAID[name]:
        assert re.search(SAID[name], said), said
    else:
        assert "an answer" not in said
    model, tokenizer = open_folder(adapter)
    (row,) = tokenize(list(check_rows([(json.loads(ROWS.splitlines()[0]), "row")])), tokenizer, 99).rows
    last = [label for label in row["labels"] if label != IGNORED][-1]
    stops = {END, TEXT_END} if name != "one" else {END}
    if name == "none":
        stops = {TEXT_END}
    for asked in stopped_at(monkeypatch, model, tokenizer):
        assert set(asked) == stops
    assert (last in stops) == (name != "none")
    merged = merge(adapter)["merged"]
    for folder in (adapter, merged):
        names_more = folder == merged or SAID[name] not in (None, SAID["none"])
        assert (adapter.parent / folder / "generation_config.json").is_file() == names_more
        if names_more:
            assert set(ends.listed(GenerationConfig.from_pretrained(folder).eos_token_id)) == stops
    written = export(merged, kinds=["f16"], out=tmp_path / "gguf")
    modelfile = (tmp_path / "gguf" / "Modelfile").read_text()
    assert {f'PARAMETER stop "{token}"' for token in tokenizer.convert_ids_to_tokens(sorted(stops))} == {
        line for line in modelfile.splitlines() if "stop" in line
    }
    fields = gguf.GGUFReader(tmp_path / "gguf" / written["files"][0]["file"]).fields
    ended = {
        fields[f"tokenizer.ggml.{kind}_token_id"].contents()
        for kind in ("eos", "eot")
        if f"tokenizer.ggml.{kind}_token_id" in fields
    }
    assert ended == stops


def test_with_data_eos_a_template_without_an_end_is_cured(bases, run_cria, tmp_path, monkeypatch):
    adapter, said = trained(bases, "none", run_cria, tmp_path / "run", "data.eos=<|endoftext|>")
    assert "end token" not in said
    _, tokenizer = open_folder(adapter)
    rows = [json.loads(line) for line in ROWS.splitlines()[:1]]
    rows.append({"messages": rows[0]["messages"] * 2})
    found = tokenize(list(check_rows([(row, "row") for row in rows])), tokenizer, 99, add_eos=True).rows
    for row in found:  # behind the last answer, and nowhere else
        assert row["input_ids"].count(TEXT_END) == 1
        assert row["labels"][-1] == row["input_ids"][-1] == TEXT_END


def test_another_eos_can_be_chosen(bases, run_cria, tmp_path):
    adapter, _ = trained(bases, "none", run_cria, tmp_path / "run", "data.eos=<file_sep>")
    tokenizer = AutoTokenizer.from_pretrained(adapter)
    assert tokenizer.eos_token == "<file_sep>"
    assert tokenizer.eos_token_id in ends.listed(ends.named_in(adapter))


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("none", "<nothing>", "data.eos=<nothing>: is no token of this tokenizer, whose EOS is <|endoftext|>"),
        ("one", "<|endoftext|>", "data.eos=<|endoftext|>: the chat template ends an answer with <|im_end|>; leave"),
    ],
)
def test_an_eos_that_cannot_be_is_refused(name, token, said, bases):
    with pytest.raises(BadInput, match=re.escape(said)):
        ends.choose(AutoTokenizer.from_pretrained(bases / name), token)


def test_a_template_that_fails_or_is_missing_names_no_end():
    broken = SimpleNamespace(chat_template="x", apply_chat_template=lambda *given, **more: 1 / 0)
    assert ends.behind_answer(broken) is ends.behind_answer(SimpleNamespace(chat_template=None)) is None


def test_an_adapter_of_prompts_and_completions_gets_them_as_they_are(bases, run_cria, tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1 = ", "completion": f"{n + 1}"}) + "\n" for n in range(4)))
    adapter, said = trained(bases, "none", run_cria, tmp_path / "run", f"data.train={rows}", f"data.eval={rows}")
    assert "an answer" not in said, "a completion ends with the EOS token"
    merge(adapter)
    export(adapter.parent / "merged", kinds=["f16"])
    modelfile = (adapter.parent / "gguf" / "Modelfile").read_text()
    assert 'TEMPLATE """{{ .Prompt }}"""' in modelfile
    assert "SYSTEM" not in modelfile


def test_where_the_end_cannot_be_told_nothing_is_said(bases):
    found = AutoTokenizer.from_pretrained(bases / "none")
    found.chat_template = WITHOUT_END.replace("m['content']", "m['content'] | lower")
    assert ends.warnings(found, TEXT_END) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [null]}'])
def test_a_damaged_generation_config_is_one_line(text, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(BadInput, match="generation_config.json: its eos_token_id cannot be read"):
        ends.named_in(tmp_path)


def test_without_a_generation_config_the_config_names_the_end(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
    assert ends.named_in(tmp_path) == [7]
