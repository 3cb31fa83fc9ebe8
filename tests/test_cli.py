"""The command line, as a user meets it: exit codes, one document on stdout, one line for an error."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer

import cria_tricks
from cria_tricks import models
from cria_tricks.adapter import folder as artifact
from cria_tricks.cli import app, main
from cria_tricks.cli.main import GONE, INSTEAD
from cria_tricks.common.errors import BadInput, Diverged, Interrupted, Lost, OutOfMemory
from cria_tricks.load import adapter_files
from cria_tricks.recipe import Recipe
from tests.parallel import steps
from tests.warm import start

ROWS = Path(cria_tricks.__file__).parent / "data" / "nguzo_saba_eval.jsonl"
KEYS = {
    "eval_loss_before", "eval_loss_after", "train_loss", "tokens_per_second", "trained_tokens_per_second",
    "peak_bytes", "seconds", "adapter", "device", "warnings",
}  # fmt: skip
QUICK = [
    "--set", "model=random:tiny", "--set", "train.max_steps=2", "--set", "data.max_length=320",
    "--set", "tricks.peft=lora", "--set", "lora.r=2",
]  # fmt: skip


@pytest.fixture(scope="module")
def few_rows(tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "few.jsonl"
    path.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:3]))
    return ["--set", f"data.train={path}", "--set", f"data.eval={path}"]


@pytest.fixture(scope="module")
def finished(few_rows, tmp_path_factory) -> Path:
    """The folder of a quick run that is over; copy it before you change it."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    cria_tricks.train("baseline", settings=[*QUICK, *few_rows][1::2], out=folder)
    return folder


def test_train_writes_a_report_and_an_adapter_that_plain_peft_loads(run_cria, few_rows, tmp_path):
    out = tmp_path / "run"
    code, stdout, stderr = run_cria("train", "baseline", *QUICK, *few_rows, "--out", out, "--json")
    assert code == 0, stderr
    report = json.loads(stdout)
    assert set(report) >= KEYS
    assert report == json.loads((out / "report.json").read_text())
    assert "step    2/2" in stderr, "progress, on stderr"
    assert report["eval_loss_after"] < report["eval_loss_before"]
    assert [phase in report["memory"] for phase in ("load", "evaluate", "train")] == [True] * 3
    assert report["peak_bytes"] == max(phase["allocated_bytes"] for phase in report["memory"].values())
    assert 0.99 <= report["estimate"]["ratio"] <= 1.05
    text = (out / "report.md").read_text()
    assert f"{report['eval_loss_after']:.4f}" in text
    assert f"estimated is {report['estimate']['ratio']:.3f} of it" in text
    assert (out / "report.png").read_bytes().startswith(b"\x89PNG")
    card = (out / "adapter" / "README.md").read_text()
    assert "`random:tiny`" in card
    assert f"{report['eval_loss_after']:.4f}" in card

    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from cria_tricks.adapter.opening import open_folder

    ours, _ = open_folder(report["adapter"], dtype=torch.float32)  # a CPU with real bf16 would take that
    base = AutoModelForCausalLM.from_pretrained(models.find("random:tiny").path, dtype=ours.dtype).to(ours.device)
    ids = torch.arange(3, 40, device=ours.device)[None]
    with torch.no_grad():
        before = base(ids).logits.clone()
        plain = PeftModel.from_pretrained(base, report["adapter"]).to(ours.dtype)(ids).logits
        assert (plain - before).abs().max() > 1e-3, "it was trained"
        assert (plain - ours(ids).logits).abs().max() < 1e-5

    code, stdout, _ = run_cria("verify", out / "adapter", "--json")
    assert (code, json.loads(stdout)["ok"]) == (0, True)
    (out / "adapter" / "README.md").write_text("x")
    code, stdout, stderr = run_cria("verify", out / "adapter")
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1

    code, _, stderr = run_cria("train", "baseline", *QUICK, *few_rows, "--out", out)
    assert code == 2
    assert "holds another run" in stderr
    code, stdout, _ = run_cria("train", "baseline", *QUICK, *few_rows, "--out", out, "--resume", "--json")
    assert code == 0
    again = json.loads(stdout)
    assert again["eval_loss_after"] == report["eval_loss_after"], "a finished run resumed is the same run"
    assert run_cria("verify", out / "adapter")[0] == 0


def test_the_saved_adapter_gives_the_trained_models_logits(few_rows, tmp_path, monkeypatch):
    """NF4 base: the model as it was trained, and plain peft over the same quantised base."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    from cria_tricks.adapter import folder as artifact
    from cria_tricks.load.model import forbid_cpu_repacking
    from cria_tricks.recipe import with_settings
    from cria_tricks.run.train import train

    kept = {}
    save = artifact.save
    monkeypatch.setattr(
        artifact, "save", lambda folder, model, *rest: (kept.update(model=model), save(folder, model, *rest))
    )
    settings = [s for s in (*QUICK, *few_rows, "tricks.quantization=nf4", "tricks.chunked_loss=true") if s != "--set"]
    report = train(with_settings(Recipe(), settings), tmp_path / "run")
    ids = torch.arange(3, 40)[None]
    path = models.find("random:tiny").path
    quantised = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, quantization_config=quantised)
    forbid_cpu_repacking(base)
    with torch.no_grad():
        ours = kept["model"].eval()(ids).logits
        plain = PeftModel.from_pretrained(base, report["adapter"]).eval()(ids).logits
    assert (ours - plain).abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["head", "none"])
def test_a_head_and_a_whole_model_are_saved_and_load_plainly(kind, run_cria, few_rows, tmp_path):
    sets = ["--set", "model=random:tiny", "--set", "train.max_steps=1", "--set", f"tricks.peft={kind}"]
    code, stdout, stderr = run_cria("train", "baseline", *sets, *few_rows, "--out", tmp_path / "run", "--json")
    assert code == 0, stderr
    folder = json.loads(stdout)["adapter"]
    assert Path(folder).name == ("model" if kind == "none" else "adapter")
    assert run_cria("verify", folder)[0] == 0
    code, stdout, stderr = run_cria("chat", folder, "--prompt", "Hello", "--max-new-tokens", "2")
    assert code == 0, stderr
    assert stdout.strip()


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("adapter_model.safetensors", "x", "cannot be loaded"),
        ("tokenizer.json", "x", "cannot be loaded"),
        ("chat_template.jinja", "{{ nothing()", "chat template fails"),
        ("chat_template.jinja", "", "chat template writes nothing"),
    ],
)
def test_chat_with_a_damaged_adapter_is_one_line(file, content, said, run_cria, tiny_model, tokenizer, tmp_path):
    """A folder of plain peft, which has no manifest that would tell first."""
    from cria_tricks.adapter import folder as artifact
    from tests.helpers import prepare

    _, _, loaded = prepare(tiny_model, "tricks.peft=lora", "lora.r=2")
    artifact.save(tmp_path / "a", loaded.model, tokenizer, str(tiny_model), "", Recipe())
    for ours in ("manifest.json", "recipe.toml"):
        (tmp_path / "a" / ours).unlink()
    (tmp_path / "a" / file).write_text(content)
    code, stdout, stderr = run_cria("chat", tmp_path / "a", "--prompt", "Hi")
    assert (code, stdout) == (2, "")
    assert [line[:7] for line in stderr.splitlines() if "every B of the adapter is zero" not in line] == ["error: "]
    assert said in stderr


def test_chat_reads_questions_until_an_empty_line(run_cria, finished, monkeypatch):
    questions = iter(["Hi", "And now?", ""])
    monkeypatch.setattr("builtins.input", lambda prompt: next(questions))
    code, stdout, stderr = run_cria("chat", finished / "adapter", "--max-new-tokens", "2")
    assert code == 0, stderr
    assert len(stdout.strip().splitlines()) >= 1
    assert next(questions, "all asked") == "all asked"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["train", "--out", "x" * 300], "is no path that can be used: File name too long"),
        (["train", "--out", "caf\udcff"], "is no path that can be used: 'utf-8' codec can't encode"),
        (["train", "--set", f"data.train={'x' * 300}"], "File name too long"),
        (["train", "--set", "data.train=~nobody-of-this-name/x.jsonl"], "is no path that can be used"),
        (["train", "--set", f"model={'x' * 300}"], "File name too long"),
        (["verify", "x" * 300], "File name too long"),
        (["chat", "x" * 300], "File name too long"),
        (["export", "x" * 300], "File name too long"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, said, run_cria, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, stdout, stderr = run_cria(*arguments)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert said in stderr
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_a_signal_saves_and_resume_goes_on(run_cria, tmp_path, warm):
    """The real command, interrupted by Ctrl-C, resumed, and told to go by the system; its end needs no new process."""
    rows = steps.write_rows(tmp_path / "rows.jsonl", 3)  # short ones; a step still takes longer than a signal
    settings = ["--set", f"data.train={rows}", "--set", f"data.eval={rows}", "--set", "train.max_steps=20"]
    words = ["train", "baseline", *QUICK, *settings, "--out", tmp_path / "run", "--json", "--resume"]
    step = 0
    for number in (signal.SIGINT, signal.SIGTERM):
        with start(*words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            began = ""
            for line in process.stderr:
                began += line
                if f"step {step + 2:>4}/" in line:
                    process.send_signal(number)
                    break
            stdout, stderr = process.communicate(timeout=600)
        assert process.returncode == 130
        assert stdout == ""
        assert ("no checkpoint" if not step else f"going on from {tmp_path / 'run' / 'checkpoints'}") in began
        again = shlex.split(stderr.splitlines()[-1].partition("; go on with cria ")[2])
        assert [*again[: len(words)], again[-1]] == [*map(str, words), "--resume"]
        step = int(stderr.splitlines()[-1].partition("after step ")[2].partition(";")[0])
    code, stdout, stderr = run_cria(*words)
    assert code == 0, stderr
    report = json.loads(stdout)
    assert [entry["step"] for entry in report["history"] if "loss" in entry] == list(range(1, 21))


def test_without_out_every_run_gets_its_own_folder(run_cria, few_rows, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert run_cria("train", "baseline", *QUICK, *few_rows)[0] == 0
    assert sorted(path.name for path in Path("runs").iterdir()) == ["baseline", "baseline-2"]


def test_doctor_and_tricks(run_cria):
    code, stdout, _ = run_cria("doctor", "--json")
    assert code == 0
    found = json.loads(stdout)
    status = {entry["set"]: entry["status"] for entry in found["toggles"]}
    assert status["tricks.quantization=nf4"] == status["tricks.double_quantization=true"] == "works"
    if found["device"]["kind"] == "cpu":
        assert status["tricks.attention=flash_attention_2"] == "refused"
        assert status["tricks.paged_optimizer=true"] == "warning"
        assert found["attention"] == dict.fromkeys(("masked", "maskless", "maskless, expand_kv"), "flash")
    assert all(entry["why"] for entry in found["toggles"] if entry["status"] != "works")
    code, stdout, _ = run_cria("doctor")
    assert code == 0
    assert all(f"{row}: {kernel}" in stdout for row, kernel in found["attention"].items())
    code, stdout, _ = run_cria("tricks")
    assert code == 0
    lines = [line.split() for line in stdout.splitlines()]
    works = sum(entry["status"] == "works" for entry in found["toggles"])
    assert sum("works" in line[1:3] for line in lines) == works, "one number in both commands and in the table"
    assert sum("always" in line[1:3] for line in lines) == 2, "flash_decoding and kv_cache have no switch"
    assert stdout.startswith(f"{works} of {len(found['toggles'])} switches work on ")
    code, stdout, _ = run_cria("tricks", "--json")
    assert code == 0
    listed = json.loads(stdout)
    assert [row["name"] for row in listed][:3] == ["mixed_precision", "int8", "nf4"]
    here = {f"tricks.{one}": is_ for row in listed for one, is_ in row["here"].items() if "=" in one}
    assert here == status
    off = {one: saved for row in listed for one, saved in row["off_the_capstone_bytes"].items()}
    smallest = ("--set", "tricks.gradient_checkpointing=true", "--set", "tricks.chunked_loss=true")
    plan = json.loads(run_cria("plan", "kwanzaa", "--gpu", "t4", "--json", *smallest)[1])
    assert off == {entry["set"]: entry["saved_bytes"] for entry in plan["removed"]}


def test_explain(run_cria):
    code, stdout, _ = run_cria("explain", "nf4")
    assert code == 0
    assert "from scratch" in stdout.lower()
    assert "def normal_levels" in stdout
    assert "bnb_4bit_quant_type" in stdout
    code, stdout, _ = run_cria("explain", "quantization=int8", "--json")
    assert code == 0
    assert json.loads(stdout)["name"] == "int8"


GROUPS = {
    "Before you train": ("plan", "film", "data"),
    "Train": ("train", "launch"),
    "After training": ("chat", "eval", "card", "verify", "merge", "export", "publish", "compare"),
    "Learn the techniques": ("tricks", "explain"),
    "Check this machine": ("doctor", "bench"),
}


def test_help_lists_the_commands_in_groups():
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "cria_tricks", "--help"], capture_output=True, text=True, check=True, env=environment
    )
    *_, boxes = done.stdout.partition("╭─ Options")
    said = [[line.strip("│╭╰─╮╯ ") for line in box.splitlines()] for box in boxes.split("╭─")[1:]]
    found = {lines[0]: [line.split()[0] for line in lines[1:] if line] for lines in said}
    for (title, commands), (group, words) in zip(found.items(), GROUPS.items(), strict=True):
        assert title.startswith(group)
        assert [word for word in commands if word in words] == list(words)
    assert "--install-completion" in done.stdout
    assert "Usage: cria [OPTIONS]" in done.stdout


@pytest.mark.parametrize("command", [command for commands in GROUPS.values() for command in commands])
def test_each_command_has_an_example_that_its_options_know(command, run_cria, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, stdout, _ = run_cria(command, "--help")
    assert code == 0
    example = re.search(r"Example: cria (.*)", stdout)
    assert example
    name, *words = shlex.split(example[1])
    assert name == command
    wanted = typer.main.get_command(main.app).commands[command]
    with wanted.make_context(command, words) as context:  # it parses them, and runs nothing
        assert not context.args


def test_completion_knows_the_commands():
    environment = {**os.environ, "_CRIA_COMPLETE": "complete_bash", "COMP_WORDS": "cria pl", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "cria_tricks"], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.split() == ["plan"]


def test_a_pipe_is_as_wide_as_it_needs_unless_columns_says_otherwise(run_cria, monkeypatch):
    asked = ("explain", "nf4")
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = run_cria(*asked)[1]
    card = whole.partition("\nFrom scratch")[0].splitlines()
    assert max(len(line.rstrip()) for line in card) > 200
    assert "[bytes]" in whole, "a unit in brackets is no colour"
    monkeypatch.setenv("COLUMNS", "60")
    card = run_cria(*asked)[1].partition("\nFrom scratch")[0].splitlines()
    assert max(map(len, card)) <= 60


def test_a_mirror_of_another_run_is_refused_on_resume_too(run_cria, few_rows, tmp_path):
    mirror = ["--set", f"train.mirror={tmp_path / 'drive'}"]
    assert run_cria("train", "baseline", *QUICK, *few_rows, *mirror, "--out", tmp_path / "a")[0] == 0
    other = [*QUICK, *few_rows, "--set", "train.seed=1", "--out", tmp_path / "b"]
    assert run_cria("train", "baseline", *other)[0] == 0
    for out in ("b", "empty"):
        command = ["train", "baseline", *other[:-1], tmp_path / out, *mirror, "--resume"]
        code, _, stderr = run_cria(*command)
        assert (code, stderr.count("\n")) == (2, 1)
        assert f"{tmp_path / 'drive'} is of another recipe: train.seed (42, now 1)" in stderr
    assert run_cria("verify", tmp_path / "drive" / "adapter")[0] == 0


def test_a_path_with_brackets_is_no_markup(run_cria, few_rows, tmp_path):
    out = tmp_path / "a [b] [" / "red]"
    code, stdout, stderr = run_cria("train", "baseline", *QUICK, *few_rows, "--out", out)
    assert code == 0, stderr
    assert f"writing to {out}" in stderr
    assert f"adapter: {out / 'adapter'}" in stdout


def test_ctrl_c_saves_even_when_the_reader_of_its_words_has_left(few_rows, tmp_path, warm):
    """``cria train ... 2>&1 | tee log``: the same Ctrl-C ends tee."""
    words = ["train", "baseline", *QUICK, *few_rows, "--out", tmp_path / "run", "--set", "train.max_steps=400"]
    with start(*words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        for line in process.stderr:
            if "step    2/" in line:
                process.stderr.close()
                process.send_signal(signal.SIGINT)
                break
        assert process.wait(timeout=600) == 130
    (checkpoint,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert checkpoint.name.startswith("checkpoint-")


def test_a_time_budget_stops_cleanly_and_resume_reports_the_whole_run(run_cria, few_rows, tmp_path):
    out, mirror = tmp_path / "run", tmp_path / "drive"
    command = ["train", "baseline", *QUICK, *few_rows, "--json", "--set", f"train.mirror={mirror}"]
    code, stdout, stderr = run_cria(*command, "--out", out, "--set", "train.time_budget=0.01")
    assert code == 0, stderr
    first = json.loads(stdout)
    assert (first["steps"], first["planned_steps"]) == (1, 2)
    assert "train.time_budget ended the run after step 1 of 2; --resume goes on" in first["warnings"]
    assert [entry["step"] for entry in first["history"] if "eval_loss" in entry] == [0, 1]
    assert run_cria("verify", mirror / "adapter")[0] == 0
    assert json.loads((mirror / "report.json").read_text()) == first

    code, stdout, stderr = run_cria(*command, "--out", tmp_path / "new-machine", "--resume")
    assert code == 0, stderr
    assert f"going on from {mirror}" in stderr
    whole = json.loads(stdout)
    assert [entry["step"] for entry in whole["history"] if "loss" in entry] == [1, 2]
    assert whole["history"][1]["step_seconds"] == first["history"][1]["step_seconds"]
    assert whole["train_loss"] == pytest.approx(sum(e["loss"] for e in whole["history"] if "loss" in e) / 2)
    assert whole["seconds"] > first["history"][1]["step_seconds"] + whole["history"][-2]["step_seconds"]
    assert whole["memory"]["load"]["allocated_bytes"] >= first["memory"]["load"]["allocated_bytes"]
    assert whole["eval_loss_before"] == first["eval_loss_before"]
    assert json.loads((mirror / "report.json").read_text()) == whole


@pytest.mark.parametrize("known", [True, False])
def test_out_of_memory_is_one_line_that_says_what_would_help(known, run_cria, few_rows, tmp_path, monkeypatch):
    from cria_tricks.run import results
    from cria_tricks.trainer.training import Training

    def loss_sum(self, batch):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Training, "loss_sum", loss_sum)
    if not known:  # a model of a kind that cannot be estimated
        monkeypatch.setattr(results, "shape_of", lambda *what: None)
    code, stdout, stderr = run_cria("train", "baseline", *QUICK, *few_rows, "--out", tmp_path / "run", "--json")
    assert (code, stdout) == (3, "")
    last = stderr.splitlines()[-1]
    assert last.startswith("error: out of memory in the evaluation after step 0; there was nothing to save yet")
    assert "Traceback" not in stderr
    assert last.endswith("--fit smallest finds the set that needs least)") == known, "it searches by the estimate"
    if known:
        said = re.search(r"of an estimated [0-9.]+ MiB, (.*) \(a changed recipe", last)[1].split(", ")
        saves = dict(entry.split(" saves ") for entry in said)
        assert {"tricks.quantization=nf4", "tricks.chunked_loss=true"} <= set(saves)
        assert not [name for name in saves if name.startswith(("tricks.peft", "tricks.activation_offload"))]
        return
    off = last.partition("still off: ")[2].partition(" (")[0].split(", ")
    assert {"tricks.gradient_checkpointing=true", "tricks.quantization=int8 or nf4 or fp4"} <= set(off)
    assert not [name for name in off if name.startswith(("tricks.peft", "tricks.gradient_accumulation"))]


def test_out_of_memory_while_the_model_is_loaded_is_one_line_too(run_cria, few_rows, tmp_path, monkeypatch):
    from cria_tricks.run import ready as of_a_run

    def load(*arguments):
        raise MemoryError

    monkeypatch.setattr(of_a_run, "load", load)
    code, _, stderr = run_cria("train", "baseline", *QUICK, *few_rows, "--out", tmp_path / "run")
    assert code == 3
    assert stderr.splitlines()[-1].startswith("error: out of memory while the model was loaded; of an estimated ")
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (BadInput("lora.r = 0: must be at least 1"), 2, "error: lora.r = 0: must be at least 1\n"),
        (app.UsageError("No such option: --x."), 2, "error: No such option: --x; see cria --help\n"),
        (Diverged("the loss is nan"), 1, "error: the loss is nan\n"),
        (
            Lost("another process died"),
            1,
            "error: another process died; what was saved is whole: go on with cria train --resume\n",
        ),
        (OutOfMemory("out of memory in the forward pass"), 3, "error: out of memory in the forward pass\n"),
        (MemoryError(), 3, "error: out of memory\n"),
        (RuntimeError("CUDA error: out of memory"), 3, "error: out of memory\n"),
        (Interrupted("interrupted after step 6"), 130, "interrupted after step 6; go on with cria train --resume\n"),
        (KeyboardInterrupt(), 130, "interrupted; nothing was written\n"),
        (typer.Abort(), 130, "interrupted; nothing was written\n"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_every_foreseen_error_has_its_exit_code_and_one_line(error, code, said, run_cria, monkeypatch):
    def fails(*arguments, **options):
        raise error

    monkeypatch.setattr(main, "app", fails)
    assert run_cria("train") == (code, "", said)


def test_an_unforeseen_error_keeps_its_traceback_and_is_a_failure(run_cria, monkeypatch):
    monkeypatch.setattr(main, "app", lambda *arguments, **options: {}["nothing"])
    code, _, stderr = run_cria("train")
    assert code == 1
    assert "KeyError: 'nothing'" in stderr


def test_a_disk_that_fills_up_under_the_adapter_is_one_line_and_the_state_is_kept(
    run_cria, few_rows, tmp_path, monkeypatch
):
    """Of tokenizers comes a bare Exception; the limit on a file's size makes it as a full disk does."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    honest = adapter_files.save_weights

    def save_weights(model, folder, weights=None):
        honest(model, folder, weights)
        if folder.name.startswith("adapter"):
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))

    monkeypatch.setattr(artifact, "save_weights", save_weights)
    out = tmp_path / "run"
    try:
        code, _, stderr = run_cria("train", "baseline", *QUICK, *few_rows, "--out", out)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert code == 2
    assert "Traceback" not in stderr
    assert stderr.splitlines()[-1] == (
        f"error: {out / 'adapter'}: cannot be written: File too large; what was saved before is whole: make room, then "
        "run the command again (a training run: with --resume)"
    )
    assert not list(out.glob("adapter*"))
    monkeypatch.undo()
    code, _, stderr = run_cria("train", "baseline", *QUICK, *few_rows, "--out", out, "--resume")
    assert code == 0, stderr
    assert "going on from" in stderr
    assert artifact.verify(out / "adapter")["files"]


@pytest.mark.parametrize("command", GONE)
def test_a_command_that_is_gone_says_what_to_use(command, run_cria):
    assert run_cria(command, "--any") == (2, "", f"error: cria {command} is gone; use {GONE[command]}\n")


@pytest.mark.parametrize("gone", INSTEAD)
def test_an_option_that_is_gone_says_what_to_use(gone, run_cria):
    command, option = gone.split()
    code, stdout, stderr = run_cria(command, option)
    assert (code, stdout) == (2, "")
    assert stderr.startswith(f"error: No such option: {option}")
    assert stderr.endswith(f"; {INSTEAD[gone]}\n")


def test_an_option_that_another_command_had_is_just_unknown(run_cria):
    assert run_cria("verify", "--toggles") == (2, "", "error: No such option: --toggles; see cria --help\n")
