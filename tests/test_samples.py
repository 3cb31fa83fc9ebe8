"""Answers during training (``eval.samples``): they are those of the model at that step, and no bit of the run moves."""

import io
import json
import os
import signal

import pytest
import torch
from rich.console import Console

from cria_tricks import models
from cria_tricks.common.errors import BadInput, Interrupted
from cria_tricks.data.rows import Chat, read_file
from cria_tricks.data.samples import answer_line, check, one_line, question
from cria_tricks.hardware import T4
from cria_tricks.load import answering
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report import page
from cria_tricks.resolve import resolve
from cria_tricks.run.train import train as whole_run
from cria_tricks.trainer import samples
from cria_tricks.trainer.progress import ShowProgress
from cria_tricks.trainer.samples import Samples
from tests.helpers import train, trained_weights
from tests.kwanzaa.test_generate import CHATS, Letters

TOKENS = 6
SETS = ("train.max_steps=4", "train.eval_steps=2", "train.learning_rate=0.01", "train.batch_size=2")
KINDS = {
    "dropout": ("tricks.peft=lora", "lora.dropout=0.2"),
    "checkpointing": ("tricks.peft=lora", "lora.dropout=0.2", "tricks.gradient_checkpointing=true"),
    "some blocks checkpointed": (
        "tricks.peft=lora",
        "tricks.gradient_checkpointing=1",
        "tricks.keep_attention=true",
        "tricks.attention=sdpa",
    ),
    "4 bits": ("tricks.peft=lora", "lora.dropout=0.2", "tricks.quantization=nf4", "tricks.precision=bf16"),
    "fused": ("tricks.peft=lora", "tricks.fused_lora=true", "tricks.fused_blocks=true", "tricks.attention=sdpa"),
    "expanded": ("tricks.peft=lora", "tricks.attention=sdpa", "tricks.expand_kv=true", "tricks.chunked_loss=true"),
    "packed": ("tricks.peft=lora", "tricks.packing=true", "data.max_length=64", "tricks.attention=sdpa"),
    "offloaded": ("tricks.peft=lora", "tricks.activation_offload=true"),
    "prompt": ("tricks.peft=prompt_tuning", "prompt.tokens=3"),
    "side": ("tricks.peft=side_network", "side.blocks=1"),
    "whole": ("tricks.peft=none", "train.learning_rate=1e-3"),
}


def asked(limit: int = TOKENS) -> Samples:
    prompts = answering.prompt_ids(CHATS, Letters())
    return Samples(Letters(), [0, 1, 2], ["first", "second", "third"], prompts, limit)


def curves(run):
    keys = ("step", "loss", "eval_loss", "grad_norm", "learning_rate")
    return [{key: entry[key] for key in keys if key in entry} for entry in run.history]


@pytest.mark.parametrize("kind", KINDS)
def test_the_run_is_the_same_bit_for_bit_and_the_answers_are_those_of_its_model(kind, tiny_model, rows, tmp_path):
    sets = (*SETS, *KINDS[kind])
    plain, plainly = train(tiny_model, rows, tmp_path / "off", *sets, eval_rows=rows[:2])
    run, loaded = train(tiny_model, rows, tmp_path / "on", *sets, eval_rows=rows[:2], samples=asked())
    assert curves(run) == curves(plain)
    ours, theirs = trained_weights(loaded), trained_weights(plainly)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert loaded.model.config.use_cache is False, "as training wants it"

    found = [entry["eval_answers"] for entry in run.evaluations]
    assert len(found) == 3
    assert [row["question"] for row in found[0]] == ["first", "second", "third"]
    assert found[0] != found[-1], "training changes the answers, or the test would compare nothing"
    loaded.model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=kind == "4 bits"):
        texts = [text for text, *_ in answering.answer_batch(loaded.model, Letters(), asked().prompts, TOKENS)]
    assert [row["answer"] for row in found[-1]] == texts


def test_answers_come_by_the_training_batch_and_leave_the_random_state(tiny_model, rows, tmp_path, monkeypatch):
    sizes = []
    honest = samples.answer_batch

    def drawing(model, tokenizer, prompts, *rest):
        sizes.append(len(prompts))
        torch.rand(5)  # no answer is drawn today; if one ever is, the run must not notice
        return honest(model, tokenizer, prompts, *rest)

    sets = (*SETS, *KINDS["dropout"])
    plain, _ = train(tiny_model, rows, tmp_path / "off", *sets, eval_rows=rows[:2])
    monkeypatch.setattr(samples, "answer_batch", drawing)
    run, _ = train(tiny_model, rows, tmp_path / "on", *sets, eval_rows=rows[:2], samples=asked())
    assert sizes == [2, 1] * 3
    assert curves(run) == curves(plain)


def test_ctrl_c_ends_an_answer_and_the_resumed_run_answers_there_again(tiny_model, rows, tmp_path, monkeypatch):
    sets = (*SETS, *KINDS["dropout"])
    options = {"eval_rows": rows[:2], "samples": asked(40)}
    whole, loaded = train(tiny_model, rows, tmp_path / "whole", *sets, **options)
    honest = samples.answer_batch
    lengths = []

    def interrupted(model, tokenizer, prompts, limit, stop):
        if len(lengths) == 2:  # two batches at each evaluation
            os.kill(os.getpid(), signal.SIGINT)
        found = honest(model, tokenizer, prompts, limit, stop)
        lengths.append(max(tokens for _, tokens, _ in found))
        return found

    monkeypatch.setattr(samples, "answer_batch", interrupted)
    with pytest.raises(Interrupted, match="interrupted after step 2"):
        train(tiny_model, rows, tmp_path / "run", *sets, **options)
    assert lengths[2:] == [1, 1], "not the 40 tokens that were allowed"
    monkeypatch.setattr(samples, "answer_batch", honest)
    resumed, again = train(tiny_model, rows, tmp_path / "run", *sets, resume=True, **options)
    assert curves(resumed) == curves(whole)
    assert [entry["eval_answers"] for entry in resumed.evaluations] == [
        entry["eval_answers"] for entry in whole.evaluations
    ]
    ours, theirs = trained_weights(again), trained_weights(loaded)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_several_processes_are_refused_before_anything_is_read(run_cria, monkeypatch):
    recipe = with_settings(Recipe(), ["eval.samples=2", "parallel.strategy=ddp"])
    with pytest.raises(BadInput, match=r"eval.samples=2 with parallel.strategy=ddp: answers during training need"):
        resolve(recipe, T4, processes=2)
    monkeypatch.setattr(models, "fetch", lambda *args: pytest.fail("weights were looked for"))
    code, _, stderr = run_cria("plan", "smoke", "--gpu", "t4", "--nproc", 2, "--set", "eval.samples=2")
    assert (code, "eval.samples=2 with parallel.strategy=ddp" in stderr) == (2, True)


def test_rows_without_a_prompt_are_refused_before_any_weight_is_loaded(run_cria, monkeypatch, tmp_path):
    monkeypatch.setattr(models, "fetch", lambda *args: pytest.fail("weights were looked for"))
    (tmp_path / "texts.jsonl").write_text('{"text": "Nothing is asked here."}\n')
    sets = ["--set", "model=random:tiny", "--set", f"data.eval={tmp_path / 'texts.jsonl'}", "--set", "eval.samples=1"]
    code, _, stderr = run_cria("train", "smoke", *sets, "--out", tmp_path / "run")
    assert code == 2
    assert "error: eval.samples=1: no row of data.eval has a prompt that could be answered; set" in stderr


def test_too_few_rows_are_said():
    text = Chat((), "", "", "x:1", "a text")
    greeting = Chat(({"role": "assistant", "content": "Hello"},), "", "", "x:2")
    asking = Chat((), "What is Nia?", "Purpose", "x:3")
    assert check(2, [text, greeting, asking]) == ["eval.samples=2: only 1 rows of data.eval have a prompt"]
    assert check(1, [text, asking]) == check(0, [text]) == []
    recipe = with_settings(Recipe(), ["eval.samples=2"])
    chosen = samples.of(recipe, [text, greeting, asking], lambda prompt: {"input_ids": [5, 6]}, pytest.fail)
    assert (chosen.rows, chosen.questions, chosen.prompts) == ([2], ["What is Nia?"], [[5, 6]])
    assert chosen.max_new_tokens == 256


def test_prompts_beyond_max_length_are_passed_over_and_said():
    chats = [Chat((), "x" * length, "answer", f"x:{length}") for length in (9, 3, 30, 4, 5)]
    recipe = with_settings(Recipe(), ["eval.samples=2", "data.max_length=8"])
    said = []
    chosen = samples.of(recipe, chats, lambda prompt: {"input_ids": [1] * len(prompt)}, said.extend)
    assert chosen.rows == [1, 3]
    assert said == ["eval.samples: 2 prompts longer than data.max_length=8 are not answered"]
    assert samples.of(Recipe(), chats, None, pytest.fail) is None, "off: no prompt is even tokenised"


def test_the_question_is_the_marked_one_or_the_last_line():
    def turn(text):
        return Chat(({"role": "user", "content": text}, {"role": "assistant", "content": "Yes"}), "", "", "x:1")

    assert question(turn("Documents: ...\nQuery: Who was\nElla Baker?\n\nAnswer in JSON.")) == "Who was Ella Baker?"
    assert question(turn("Read this.\n\nWho was she?\n")) == "Who was she?"
    assert one_line("a \x1b[31m b\n c") == "a \N{REPLACEMENT CHARACTER}[31m b c", "no escape reaches the terminal"
    assert one_line("twelve letters", 8) == "twelve…"
    assert answer_line("\n\n", 9) == "(nothing but white space)"


def test_the_terminal_shows_them_as_they_are():
    page = io.StringIO()
    progress = ShowProgress(Console(file=page, width=200), 1)
    found = {"row": 0, "question": "Who?", "answer": "[red]nobody[/]\nat all", "tokens": 3, "ended": True}

    class State:
        global_step = 7

    progress.on_evaluate(None, State, None, {"eval_loss": 2.0, "eval_answers": [found]})
    assert page.getvalue() == "step    7  evaluation loss 2.0000\n  Who?\n    [red]nobody[/] at all\n"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """The folder of a whole run with two answers at each of its evaluations."""
    pytest.importorskip("tensorboard")
    folder = tmp_path_factory.mktemp("answered")
    held_out = folder / "held_out.jsonl"
    texts = ("Who | *she*?", "Why?", "When?")
    held_out.write_text("".join(json.dumps({"prompt": text, "completion": "So."}) + "\n" for text in texts))
    settings = [
        "model=random:tiny", f"data.eval={held_out}", "tricks.peft=lora", "train.max_steps=2", "train.eval_steps=1",
        "train.report_to=tensorboard", "eval.samples=2", "eval.max_new_tokens=5", "train.learning_rate=0.01",
    ]  # fmt: skip
    whole_run(with_settings(Recipe(), settings), folder / "run", console=Console(file=io.StringIO()))
    return folder / "run"


def test_the_report_has_a_table_for_each_row(run_folder):
    report = json.loads((run_folder / "report.json").read_text())
    answers = [entry["eval_answers"] for entry in report["history"] if "eval_loss" in entry]
    assert [[row["row"] for row in found] for found in answers] == [[0, 1]] * 3
    assert all(0 < row["tokens"] <= 5 for found in answers for row in found)
    text = (run_folder / "report.md").read_text()
    section = text.partition("## Answers during training\n")[2].partition("\n## ")[0]
    assert r"Row 1 of the evaluation rows: Who \| \*she\*?" in section
    tables = section.split("| step | answer |")[1:]
    assert [[line.split(" | ")[0] for line in table.splitlines() if line.startswith("| ")] for table in tables] == [
        ["| 0", "| 1", "| 2"],
        ["| 0", "| 1", "| 2"],
    ]
    assert page.markdown(report) == text, "it is made of report.json alone"
    assert "| answers |" in text, "their peak memory"
    report["history"] = [entry for entry in report["history"] if "eval_loss" not in entry]
    assert "## Answers" not in page.markdown(report)


def test_tensorboard_has_the_texts(run_folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report = json.loads((run_folder / "report.json").read_text())
    found = EventAccumulator(str(run_folder / "tensorboard")).Reload()
    events = found.Tensors("answers/row 2/text_summary")
    assert [event.step for event in events] == [0, 1, 2]
    last = events[-1].tensor_proto.string_val[0].decode()
    assert last.startswith("    Why?\n")
    words = report["history"][-1]["eval_answers"][1]["answer"].split()
    assert all(word in last for word in words)
    assert "eval/answers_seconds" in found.Tags()["scalars"]


def test_the_evaluation_rows_are_those_of_the_file(run_folder):
    chats = read_file(run_folder.parent / "held_out.jsonl")
    assert [question(chat) for chat in chats] == ["Who | *she*?", "Why?", "When?"]
