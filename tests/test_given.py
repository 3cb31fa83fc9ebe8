"""Whatever can be refused without torch is refused without it: every command, in one process that looks after each."""

import json
import os
import subprocess
import sys

import pytest

ASK_EACH = """
import json, sys
from cria_tricks.cli.main import BadInput, UsageError, app
for words in json.load(sys.stdin):
    try:
        app(words, standalone_mode=False)
        said = "nothing"
    except (BadInput, UsageError) as error:
        said = error.format_message() if isinstance(error, UsageError) else str(error)
    heavy = [name for name in ("torch", "transformers", "peft", "datasets") if name in sys.modules]
    print(json.dumps([said, heavy]), flush=True)
"""
"""What each command line is refused with, and which heavy libraries are imported by then."""

GROUP = "train is a group of fields; there are train.batch_size, "
NO_MODEL = "model smolm2: no such folder, and no hub id (owner/name); did you mean smollm2?"
NOT_HERE = "model nobody/nothing: its config.json cannot be had from the hub: it is not in the cache of this machine"
RUN = "{folder}/run: is the folder of a run; what it has trained is in {folder}/run/adapter: name that"
UNFINISHED = (
    "{folder}/unfinished: is the folder of a run that has not ended, so there is no adapter yet; go on with it: "
    "cria train {folder}/unfinished/recipe.toml --out {folder}/unfinished --resume"
)
NEITHER = "{folder}/empty: holds neither adapter_config.json nor config.json; name the folder of an adapter"
NO_FOLDER = "{folder}/none: there is no such folder; name the folder of an adapter"
DAMAGED = "{folder}/damaged: adapter_config.json has other content than was written; take the folder from its source"

CASES = {
    # names of commands and options
    "trian": "No such command 'trian'",
    "train --rsume": "No such option",
    "train smoke --other-base": "--other-base: is for a resumed run, and for one that continues from an adapter",
    "train smoke --set": "Option '--set' requires an argument",
    # recipes, fields and values
    **{
        f"{command} {words}": said
        for command in ("train", "plan", "launch --on torchrun", "launch --on hf-jobs --repo a/b")
        for words, said in {
            "smok": "unknown recipe smok: did you mean smoke?",
            "{folder}/none.toml": "recipe {folder}/none.toml: cannot be read: No such file or directory",
            "{folder}/wrong.toml": "recipe {folder}/wrong.toml:1: train = 5: " + GROUP,
            "smoke --set train=5": "--set train=5: " + GROUP,
            "smoke --set =5": "--set =5: the field before = is missing; write it as KEY=VALUE, e.g. train.max_steps=20",
            "smoke --set 5": "--set 5: write it as KEY=VALUE",
            "smoke --set trian.max_steps=5": "unknown field trian.max_steps; did you mean train.max_steps?",
            "smoke --set train.max_steps=-1": "must be greater than or equal to 0",
            "smoke --set tricks.quantization=nf5": "did you mean nf4?",
            "smoke --set data.min_words=9 --set data.max_words=3": "no row can have at least 9 and",
            "smoke --set model=smolm2": NO_MODEL,
            "smoke --set model=random:tinny": "unknown shape tinny; did you mean random:tiny?",
            "smoke --set model={folder}/modle": "did you mean {folder}/model?",
            "smoke --set model={folder}/empty": "model {folder}/empty: the folder has no config.json",
        }.items()
    },
    # what is to be read and written
    "train smoke --set model=nobody/nothing": NOT_HERE,
    "train smoke --set data.train=none.jsonl": "data.train=none.jsonl: no such file; give a .jsonl, .json",
    "train smoke --set data.eval=none.jsonl": "data.eval=none.jsonl: no such file; give a .jsonl, .json",
    "train smoke --set data.train={folder}/empty": "data {folder}/empty: the folder holds no .txt file",
    "train smoke --set data.train={folder}/wrong.jsonl": "{folder}/wrong.jsonl:2: the key 'text' is there twice",
    "train smoke --set data.train={folder}/latin.jsonl": "latin.jsonl:1: not UTF-8 text (byte 13 of the line)",
    "train smoke --set data.train=kwanzaa": "data.train=kwanzaa: is not downloaded yet",
    "train smoke --out {folder}/wrong.toml": "--out {folder}/wrong.toml: is a file; name a folder",
    "train smoke --out {folder}/run": "--out {folder}/run: holds another run (adapter); name a new folder, or go on",
    # cards, machines and numbers
    "plan --gpu t5": "unknown card t5: name it as its maker does, such as rtx3060",
    "plan --model smolm2": NO_MODEL,
    "plan --model nobody/nothing": NOT_HERE,
    "plan --model {folder}/wrong.toml": "model {folder}/wrong.toml: cannot be read as JSON",
    "plan --nproc 0": "Invalid value for '--nproc'",
    "plan --gpu all --model smolm2": NO_MODEL,
    "plan --gpu all --dry-run": "--dry-run with --gpu all: it is about one machine; name it, such as --gpu t4",
    "plan --gpu all --nproc 2": "--nproc with --gpu all: it is about one machine",
    "launch smoke --on slurm": "--on slurm: there are torchrun, hf-jobs",
    "launch smoke --on torchrun --nodes 4:1": "--nodes 4:1: write how many machines at least and at most",
    "launch smoke --on torchrun --repo a/b": "--repo, --flavor and --timeout are for --on hf-jobs",
    "launch smoke --on hf-jobs": "--repo '': name a repository of the hub, OWNER/NAME",
    "launch smoke --on hf-jobs --repo a/b --nproc 2": "are for --on torchrun; leave them out",
    "launch smoke --on hf-jobs --repo a/b --flavor t4-smal": "unknown flavor t4-smal: did you mean t4-small?",
    "launch smoke --on hf-jobs --repo a/b --timeout soon": "--timeout soon: must be a time of a minute or more",
    # folders of adapters
    **{
        f"{command} {{folder}}/{folder}{rest}": said
        for command, rest in (
            ("chat", ""), ("eval", ""), ("merge", ""), ("export", ""), ("verify", ""), ("publish", " a/b")
        )
        for folder, said in {
            "run": RUN,
            "unfinished": UNFINISHED,
            "empty": NEITHER,
            "none": NO_FOLDER,
            "wrong.toml": "{folder}/wrong.toml: is a file; name the folder that it is in",
            "damaged": DAMAGED,
        }.items()
    },
    **{
        f"{command} {{folder}}/plain": NOT_HERE
        for command in ("chat", "eval", "merge")
    },
    "export {folder}/plain": "{folder}/plain: is an adapter; cria merge writes a whole model of a LoRA adapter",
    "export": "Missing argument",
    "eval": "name the folder of an adapter, or give --reference to score the data's own answers",
    "eval --with-base": "--with-base: there is no adapter to compare with its base; name the adapter's folder",
    "eval --reference --data none.jsonl": "--data none.jsonl: no such file",
    "eval --reference --limit 0": "Invalid value for '--limit'",
    "chat": "Missing argument",
    "publish {folder}/run name": "'name': is no name of a repository on the hub: it needs the name of its owner",
    "publish {folder}/run a/b --tag 1": "--tag 1: is no version; write it as v0.1.0",
}  # fmt: skip


@pytest.fixture(scope="module")
def answers(tmp_path_factory) -> dict[str, tuple[str, list[str], float]]:
    """What each command line of CASES was refused with."""
    folder = tmp_path_factory.mktemp("given")
    for name in ("run/adapter", "unfinished/checkpoints", "empty", "model", "plain", "damaged"):
        (folder / name).mkdir(parents=True)
    config = '{"base_model_name_or_path": "nobody/nothing"}'
    for name in ("run/adapter", "plain", "damaged"):
        (folder / name / "adapter_config.json").write_text(config)
        (folder / name / "adapter_model.safetensors").touch()
    (folder / "damaged" / "manifest.json").write_text(
        json.dumps({"files": {"adapter_config.json": {"bytes": len(config), "sha256": "0" * 64}}})
    )
    (folder / "wrong.toml").write_text("train = 5\n")
    (folder / "wrong.jsonl").write_text('{"text": "a"}\n{"text": "a", "text": "b"}\n')
    (folder / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
    lines = [command.format(folder=folder).split() for command in CASES]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder), "CRIA_CACHE": str(folder / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", ASK_EACH], input=json.dumps(lines), env=environment, cwd=folder, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(CASES), done.stderr[-3000:]
    return {
        command: (said.replace(str(folder), "{folder}"), heavy)
        for command, (said, heavy) in zip(CASES, found, strict=True)
    }


@pytest.mark.parametrize("command", CASES)
def test_it_is_refused_in_one_line_before_torch(command, answers):
    said, heavy = answers[command]
    assert CASES[command] in said
    assert "\n" not in said.strip()
    assert heavy == []
