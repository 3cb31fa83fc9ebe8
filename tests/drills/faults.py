"""The catalogue of faults: what can be wrong with what a command is given, and how the command must end.

    python -m tests.drills.faults                 # every fault
    python -m tests.drills.faults --unguarded     # each once more with its guard taken out: then it must fail
    python -m tests.drills.faults --only base     # those whose name begins so

A fault is data: its name, what is done to a small working place, the command, the exit code, the words of the last
line, and what may be new afterwards. All else must be as it was, byte for byte. Commands run in this process, through
the same entry.
"""

import argparse
import ast
import contextlib
import difflib
import gc
import hashlib
import io
import json
import os
import re
import shutil
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.cli import main as cli
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput

Damage = Callable[[Path], Any]
ROWS = "".join(
    json.dumps({"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]}) + "\n"
    for n in range(4)
)
JOB = """name = "job"
model = "base"
[data]
train = "rows.jsonl"
eval = "rows.jsonl"
max_length = 96
[tricks]
peft = "lora"
precision = "fp32"
quantization = "none"
[lora]
r = 2
[train]
max_steps = 2
save_steps = 1
save_minutes = 0.0
"""
TRAIN = "train job.toml --out out"
RESUME = "train job.toml --resume --out stopped"
CHAT = "chat run/adapter --prompt a --max-new-tokens 1"
MERGE = "merge run/adapter --out merged"
EVAL = "eval run/adapter --data nguzo_saba --out eval"
VERIFY = "verify run/adapter"
PUBLISH = "publish run/adapter owner/name"
EXPORT = "export run/adapter"


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong.

    Attributes:
        name: what, with its kind before a colon.
        command: as it is typed in the place.
        says: a pattern that the last line of stderr matches.
        damage: what is done to the place first.
        code: the exit code.
        new: patterns of paths that may be there afterwards and were not before.
    """

    name: str
    command: str
    says: str
    damage: Damage = lambda place: None
    code: int = 2
    new: tuple[str, ...] = ()


# What is done to the place.


def text(path: str, content: str) -> Damage:
    """Write a file."""

    def damage(place: Path) -> None:
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(content)

    return damage


def gone(path: str) -> Damage:
    """Take a file or a folder away."""

    def damage(place: Path) -> None:
        shutil.rmtree(place / path) if (place / path).is_dir() else (place / path).unlink()

    return damage


def moved(path: str, to: str) -> Damage:
    return lambda place: (place / path).rename(place / to)


def fields(path: str, **changes: Any) -> Damage:
    """Change fields of a JSON file."""

    def damage(place: Path) -> None:
        found = json.loads((place / path).read_text())
        (place / path).write_text(json.dumps(found | changes))

    return damage


def tensors(change: Callable[[dict[str, Any]], Any], path: str = "base/model.safetensors") -> Damage:
    """Change the tensors of a file."""

    def damage(place: Path) -> None:
        from safetensors.torch import load_file, save_file

        found = load_file(place / path)
        changed = change(found)
        save_file(found if changed is None else changed, place / path, {"format": "pt"})

    return damage


def without(name: str, path: str = "base/model.safetensors") -> Damage:
    return tensors(lambda found: {other: tensor for other, tensor in found.items() if other != name}, path)


def filled(name: str, value: float, path: str = "base/model.safetensors") -> Damage:
    def change(found: dict[str, Any]) -> None:
        found[name].view(-1)[3] = value

    return tensors(change, path)


def renamed(old: str, new: str) -> Damage:
    return tensors(lambda found: {re.sub(old, new, name): tensor for name, tensor in found.items()})


def shortened(path: str, by: int = 100) -> Damage:
    return lambda place: (place / path).write_bytes((place / path).read_bytes()[:-by])


def appended(path: str, what: bytes = b"\n") -> Damage:
    return lambda place: (place / path).write_bytes((place / path).read_bytes() + what)


def all_of(*damages: Damage) -> Damage:
    def damage(place: Path) -> None:
        for each in damages:
            each(place)

    return damage


def sealed(path: str) -> Damage:
    """Write a manifest that fits what lies there, as somebody would who can change the files."""

    def damage(place: Path) -> None:
        atomic_files.write_manifest(place / path)

    return damage


def in_shards(change: Callable[[Path, dict[str, str]], Any]) -> Damage:
    """Cut the base in two files, and spoil one of them or their index."""

    def damage(place: Path) -> None:
        from safetensors.torch import load_file, save_file

        base = place / "base"
        found = load_file(base / "model.safetensors")
        names, places = sorted(found), {}
        for number, some in enumerate((names[:9], names[9:])):
            save_file({name: found[name] for name in some}, base / f"part-{number}.safetensors", {"format": "pt"})
            places |= dict.fromkeys(some, f"part-{number}.safetensors")
        (base / "model.safetensors").unlink()
        change(base, places)
        (base / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))

    return damage


def as_pickle(place: Path) -> None:
    import torch
    from safetensors.torch import load_file

    torch.save(load_file(place / "base" / "model.safetensors"), place / "base" / "pytorch_model.bin")
    (place / "base" / "model.safetensors").unlink()


def of_kind(kind: str, **sizes: Any) -> Damage:
    """Replace the base by a tiny model of another kind, with the tokenizer that is there."""

    def damage(place: Path) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.for_model(kind, vocab_size=512, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes)
        AutoModelForCausalLM.from_config(config).save_pretrained(place / "base")

    return damage


def in_nf4(place: Path) -> None:
    """Store the base in NF4."""
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    packed = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    AutoModelForCausalLM.from_pretrained(place / "base", quantization_config=packed).save_pretrained(place / "base")


def padded(place: Path) -> None:
    """Give the tokenizer a padding token for which the base has no embedding."""
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(place / "base")
    found.add_tokens([f"<{number}>" for number in range(300)])
    found.add_special_tokens({"pad_token": "<pad>"})
    found.save_pretrained(place / "base")


def scaled(by: float) -> Damage:
    """Multiply every matrix of the base."""
    return tensors(lambda found: {name: one * by if one.dim() > 1 else one for name, one in found.items()})


def untrained(found: dict[str, Any]) -> None:
    for name, one in found.items():
        if ".lora_B." in name:
            one.zero_()


def noise(found: dict[str, Any]) -> dict[str, Any]:
    import torch

    draw = torch.Generator().manual_seed(9)
    return {name: torch.randn(one.shape, generator=draw).to(one.dtype) for name, one in found.items()}


def swapped(found: dict[str, Any]) -> None:
    one, other = (f"model.layers.{number}.self_attn.q_proj.weight" for number in (0, 1))
    found[one], found[other] = found[other], found[one]


UP = "model.layers.1.mlp.up_proj.weight"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
BASE: dict[str, tuple[Damage, str]] = {
    "compiled": (renamed("^", "_orig_mod."), r"are missing .*tensors \(_orig_mod\..*are in its files"),
    "in parallel": (renamed("^", "module."), r"are missing .*tensors \(module\..*are in its files"),
    "compiled blocks": (renamed(r"layers\.1\.", "layers.1._orig_mod."), "are missing .*1._orig_mod.*are in its files"),
    "of a merged peft model": (renamed("^", "base_model.model."), "are missing .*base_model.model.*are in its files"),
    "a tensor missing": (without(UP), rf"1 tensor \({UP}\) is missing .*random"),
    "a block missing": (renamed(r"layers\.1\.", "layers.7."), "9 tensors .* are missing"),
    "a tensor more": (tensors(lambda found: found.update(odd=found["model.norm.weight"].clone())), "odd.* is in its"),
    "a block more in config": (fields("base/config.json", num_hidden_layers=3), "are missing .*num_hidden_layers"),
    "a block less in config": (fields("base/config.json", num_hidden_layers=1), "are in its files, .*num_hidden_lay"),
    "wider in config": (fields("base/config.json", intermediate_size=1024), r"has the shape \[\d+, \d+\] in its file"),
    "another vocabulary": (fields("base/config.json", vocab_size=600), r"has the shape .* describes \[600, 256\]"),
    "a tensor of another shape": (
        tensors(lambda found: found.update({UP: found[UP].T.contiguous()})),
        f"{UP} has the shape",
    ),
    "whole numbers": (tensors(lambda found: found.update({UP: found[UP].char()})), f"stores {UP} as I8"),
    "NaN": (filled(UP, float("nan")), f"{UP} in model.safetensors holds NaN or infinity"),
    "infinity": (filled("model.norm.weight", float("inf")), "model.norm.weight in .* holds NaN or infinity"),
    "minus infinity": (filled(UP, -float("inf")), "holds NaN or infinity"),
    "cut off": (shortened("base/model.safetensors"), "model.safetensors is cut off"),
    "empty": (text("base/model.safetensors", ""), "model.safetensors is cut off"),
    "a page of the hub": (text("base/model.safetensors", "<html>404</html>"), "model.safetensors is cut off"),
    "a pointer of git lfs": (
        text("base/model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
        "model.safetensors is cut off or no safetensors file",
    ),
    "no weights": (gone("base/model.safetensors"), "holds no model.safetensors"),
    "only a pickle": (as_pickle, "as a pickle .pytorch_model.bin."),
    "an adapter's folder": (
        all_of(gone("base/model.safetensors"), text("base/adapter_config.json", "{}")),
        "is the folder of an adapter",
    ),
    "a shard missing": (
        in_shards(lambda base, places: (base / "part-1.safetensors").unlink()),
        "part-1.safetensors is",
    ),
    "a shard cut off": (
        in_shards(lambda base, places: shortened("part-1.safetensors")(base)),
        "part-1.safetensors is cut off",
    ),
    "the index wrong": (
        in_shards(lambda base, places: places.update({UP: "part-0.safetensors"})),
        "looks for .* in part-0",
    ),
    "the index leads out": (
        in_shards(lambda base, places: places.update({UP: "/etc/passwd"})),
        "does not name a file of this folder",
    ),
    "the index too long": (
        in_shards(lambda base, places: places.update(odd="part-1.safetensors")),
        "is in none of the",
    ),
    "the index no JSON": (
        all_of(moved("base/model.safetensors", "base/a.safetensors"), text("base/model.safetensors.index.json", "{")),
        "model.safetensors.index.json cannot be used",
    ),
    "a head that should be tied": (
        all_of(
            fields("base/config.json", tie_word_embeddings=True),
            tensors(lambda found: found.update({"lm_head.weight": found["model.embed_tokens.weight"] + 1})),
        ),
        "output head is the embedding",
    ),
    "a head that should not be tied": (
        fields("base/config.json", tie_word_embeddings=False),
        "lm_head.weight.* is missi",
    ),
    "code of its own": (
        fields("base/config.json", model_type="odd", auto_map={"AutoConfig": "odd.Config"}),
        "asks for code of its own",
    ),
    "an unknown kind": (fields("base/config.json", model_type="odd"), "does not know its kind"),
    "an encoder": (fields("base/config.json", architectures=["BertForMaskedLM"]), "is no causal language model"),
    "no config": (gone("base/config.json"), "has no config.json"),
    "a broken config": (text("base/config.json", '{"model_type": '), "cannot be loaded"),
    "no tokenizer": (
        all_of(gone("base/tokenizer.json"), gone("base/tokenizer_config.json"), gone("base/chat_template.jinja")),
        "has no tokenizer; copy the tokenizer's files",
    ),
}
OTHER: dict[str, tuple[Damage, str]] = {
    "a weight changed": (filled("model.norm.weight", 2.0), "model.safetensors was sha256"),
    "tensors swapped": (tensors(swapped), "model.safetensors was sha256"),
    "another model of the shape": (tensors(noise), "model.safetensors was sha256"),
    "another rope": (
        fields("base/config.json", rope_parameters={"rope_theta": 5e5, "rope_type": "default"}),
        "config.json was",
    ),
    "another epsilon": (fields("base/config.json", rms_norm_eps=0.1), "config.json was sha256"),
}
ADAPTER: dict[str, tuple[Damage, str]] = {
    "weights changed": (filled(Q, 9.0,
                               "run/adapter/adapter_model.safetensors"), "other content than was written"),
    "weights cut off": (shortened("run/adapter/adapter_model.safetensors"), "has other content"),
    "weights gone": (gone("run/adapter/adapter_model.safetensors"), "adapter_model.safetensors is missing"),
    "config changed": (fields("run/adapter/adapter_config.json", r=3), "adapter_config.json has"),
    "recipe changed": (appended("run/adapter/recipe.toml"), "recipe.toml has"),
    "manifest broken": (text("run/adapter/manifest.json", "{"), "manifest.json is damaged"),
    "a pickle beside": (text("run/adapter/adapter_model.bin", "x"), "adapter_model.bin is not in manifest.json"),
    "a stranger": (text("run/adapter/merges.txt", "x"), "merges.txt is not in manifest.json"),
}  # fmt: skip
SEALED: dict[str, tuple[Damage, str]] = {
    "a tensor missing": (
        without(Q, "run/adapter/adapter_model.safetensors"),
        "1 tensor .* is missing",
    ),
    "a tensor more": (
        tensors(lambda found: found.update(odd=found[min(found)].clone()), "run/adapter/adapter_model.safetensors"),
        r"1 tensor \(odd\) is in adapter_model.safetensors, but adapter_config",
    ),
    "NaN": (
        filled(Q, float("nan"), "run/adapter/adapter_model.safetensors"),
        "holds NaN or infinity",
    ),
    "no base named": (fields("run/adapter/adapter_config.json", base_model_name_or_path=None), "names no base model"),
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2}
FAMILY: dict[str, tuple[Damage, tuple[str, ...], str]] = {
    "no linear layer to fuse": (
        of_kind("gpt2", **GPT2),
        ("tricks.fused_lora=true",),
        "fused adapters .*gpt2: .*no matrix but the head is a linear layer; set tricks.fused_lora=false",
    ),
    "rows beyond its positions": (
        of_kind("gpt2", **GPT2, n_positions=24),
        (),
        "has 24 positions for rows, .* set data.max_length=24",
    ),
    "more than its text part": (
        text("base/config.json", '{"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}'),
        (),
        "gemma3 takes more than text, such as images",
    ),
    "stored in few bits already": (in_nf4, (), "stored in nf4 already, and in no other way; set tricks.quant"),
    "padding beyond its vocabulary": (padded, (), "pads with token 558, and its vocabulary has 512"),
}
"""What may be wrong with a family of models, or a base that others have made: its damage, settings, and words."""
CONTINUE = f"{TRAIN} --set model=run/adapter"
CONTINUED: dict[str, tuple[Damage, str, str]] = {
    "another scale": (
        lambda place: None,
        "--set lora.alpha=9",
        "has alpha=32.*, and the recipe 9.*; set lora.alpha=32",
    ),
    "another base": (OTHER["tensors swapped"][0], "", "is not the one that it was trained over"),
    "damaged": (ADAPTER["weights changed"][0], "", "other content than was written"),
    "its base moved": (moved("base", "b"), "", "was trained over the folder .*base, which is not there"),
}
"""What may be wrong with an adapter from which a run continues: its damage, settings, and words."""
ROW: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "rows.jsonl:1: not valid JSON"),
    "an empty text": ('{"text": " "}', "text is empty"),
}
"""Two of the rows that ``tests/data/test_rows.py`` refuses: no command loses anything by such a row."""
SETTING: dict[str, tuple[str, str]] = {
    "no such field": ("lora.rang=3", "unknown field lora.rang; did you mean lora.r?"),
    "a shape, misspelt": ("model=random:tinny", "did you mean random:tiny"),
    "a folder, misspelt": ("model=./bsae", "did you mean .*base"),
    "quantised and all trained": (
        "tricks.peft=none --set tricks.quantization=nf4",
        "quantization=nf4 with tricks.peft=none",
    ),
    "a module that is not there": ("lora.target_modules=c_attn", "has no module named c_attn"),
    "a model that is not there": ("model=lama-3.2-1b", "did you mean llama-3.2-1b"),
    "a mirror that is the folder": ("train.mirror=out", "is the run's own folder"),
    "a tracker that is not installed": ("train.report_to=wandbx", "report_to"),
    "a path that is none": ("data.train=a\0b", "data.train"),
}


def catalogue() -> list[Fault]:
    """Put all faults together."""
    # Which head a model has is known when it is loaded, and NaN when it is evaluated. Then the folder is begun.
    begun = dict.fromkeys(("a head that should be tied", "NaN", "infinity", "minus infinity"), (r"out/.*",))
    found = [
        Fault(f"base: {name}: train", TRAIN, says, damage, new=begun.get(name, ()))
        for name, (damage, says) in BASE.items()
    ]
    uses = {"chat": CHAT, "merge": MERGE, "eval": EVAL, "resume": RESUME}
    allowed = [("no tokenizer", use) for use in ("chat", "merge", "eval")]  # an adapter has a tokenizer of its own
    found += [
        Fault(
            f"other base: {name}: {use}",
            command,
            f"is not the one that it was trained over: .*{says}.*--other-base",
            damage,
        )
        for name, (damage, says) in OTHER.items()
        for use, command in uses.items()
    ]
    found += [
        Fault(f"base: {name}: {use}", command, f"is not the one that it was trained over|{says}", damage)
        for name, (damage, says) in BASE.items()
        for use, command in uses.items()
        if (name, use) not in allowed
    ]
    found += [Fault(f"base: {name}: {use}", uses[use], "", BASE[name][0], code=0) for name, use in allowed]
    by_command = {"verify": VERIFY, "chat": CHAT, "publish": PUBLISH, "merge": MERGE, "eval": EVAL, "export": EXPORT}
    found += [
        Fault(f"adapter: {name}: {use}", command, says, damage)
        for name, (damage, says) in ADAPTER.items()
        for use, command in by_command.items()
    ]
    found += [
        Fault(f"sealed adapter: {name}: chat", CHAT, says, all_of(damage, sealed("run/adapter")))
        for name, (damage, says) in SEALED.items()
    ]
    found += [Fault(f"row: {name}", TRAIN, says, text("rows.jsonl", row + "\n")) for name, (row, says) in ROW.items()]
    found += [Fault(f"setting: {name}", f"{TRAIN} --set {word}", says) for name, (word, says) in SETTING.items()]
    found += [
        Fault(
            f"family: {name}: train", " --set ".join([TRAIN, "lora.target_modules=all-linear", *settings]), says, damage
        )
        for name, (damage, settings, says) in FAMILY.items()
    ]
    found += [
        Fault(f"continued: {name}: train", f"{CONTINUE} {settings}".strip(), says, damage)
        for name, (damage, settings, says) in CONTINUED.items()
    ]
    return [*found, *SINGLE]


SINGLE = [
    Fault("base: moved: chat", CHAT, "was trained over the folder .*base, which is not there", moved("base", "b")),
    Fault("base: moved, found: chat", f"{CHAT} --base b", "", moved("base", "b"), 0),
    Fault(
        "base: another that is wanted: chat", f"{CHAT} --other-base", "used because of --other-base",
        OTHER["a weight changed"][0], 0,
    ),
    Fault(
        "base: a name of the hub since: chat", CHAT, "was trained over the folder models/base",
        all_of(
            fields("run/adapter/adapter_config.json", base_model_name_or_path="models/base"), sealed("run/adapter")
        ),
    ),
    Fault("base: named for a whole model: chat", "chat base --prompt a --base base", "has no base below it"),
    Fault(
        "base: another tokenizer: resume", RESUME, "tokenizer is another", appended("base/tokenizer.json"),
    ),
    Fault(
        "base: another chat template: resume", f"{RESUME} --other-base", "chat_template.jinja was sha256",
        appended("base/chat_template.jinja"),
    ),
    Fault(
        "base: another tokenizer: chat", CHAT, "base's tokenizer has changed since", appended("base/tokenizer.json"), 0,
    ),
    Fault(
        "family: answers that do not end: train", TRAIN, "no end token, and generation stops at .*data.eos=",
        text("base/chat_template.jinja", "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"), 0,
    ),
    Fault(
        "family: numbers beyond fp16: train", f"{TRAIN} --set tricks.precision=fp16",
        "No weight has moved yet. fp16 ends at 65,504: try tricks.precision=", scaled(1e5), 1, (r"out/.*",),
    ),
    Fault(
        "family: a head that is trained and fused: train",
        f"{TRAIN} --set tricks.peft=head --set tricks.fused_lora=true",
        "fused_lora has no effect: it acts on LoRA's adapters", code=0,
    ),
    Fault(
        "family: a trained head and a chunked loss: train",
        f"{TRAIN} --set tricks.peft=head --set tricks.chunked_loss=true",
        "tricks.chunked_loss=true.*peft=head trains the head; set .*tricks.chunked_loss=false",
    ),
    Fault(
        "adapter: never trained: chat", CHAT, "every B of the adapter is zero, as before training",
        all_of(tensors(untrained, "run/adapter/adapter_model.safetensors"), sealed("run/adapter")), 0,
    ),
    Fault(
        "adapter: words that were not saved: chat", CHAT, "trains token 600, and the base has 512",
        all_of(
            fields("run/adapter/adapter_config.json", trainable_token_indices={"embed_tokens": [600]}),
            sealed("run/adapter"),
        ),
    ),
    Fault("folder: of another run", "train job.toml --out run", "holds another run .*--resume"),
    Fault("folder: nothing to resume", "train job.toml --resume --out run --set lora.r=3", "another recipe: lora.r"),
    Fault("folder: other rows", RESUME, r"data.train \(other rows\)",
          appended("rows.jsonl", ROWS.splitlines(True)[0].encode())),
    Fault("checkpoint: cut off", RESUME, "none of the checkpoints",
          shortened("stopped/checkpoints/checkpoint-1/optimizer.pt")),
    Fault("checkpoint: a file gone", RESUME, "none of the checkpoints .*optimizer.pt is missing",
          gone("stopped/checkpoints/checkpoint-1/optimizer.pt")),
    Fault("checkpoint: no account of the run", RESUME, "no run.json", gone("stopped/run.json")),
    Fault("command: no such technique", "explain nf5", "nf4"),
    Fault("command: no folder of ours", "verify base", "has no manifest.json"),
    Fault("command: merged into a folder that is there", "merge run/adapter --out run", "is there already"),
    Fault("command: no version", f"{PUBLISH} --tag 1.0", "is no version"),
    Fault("command: published without a network", f"{PUBLISH} --yes", "the network is switched off"),
    Fault("command: an option that went", "doctor --hang 7", "py-spy dump --pid PID"),
    Fault("command: the folder of a run: chat", "chat run --prompt a", "is the folder of a run; .*run/adapter: name"),
    Fault("command: the folder of a run: train", f"{TRAIN} --set model=run", "is the folder of a run; .*adapter: name"),
    Fault("command: a run that has not ended", "chat stopped --prompt a", "has not ended, .*--resume"),
    Fault("command: a system message without a place", f"{CHAT} --raw --system be", "no place for a system message"),
    Fault("plan: a module that is not there", "plan job.toml --gpu t4 --set lora.target_modules=c_attn", "all-linear"),
    Fault("plan: too many blocks beside", "plan job.toml --gpu t4 --set tricks.peft=side_network --set side.blocks=9",
          "side.blocks=9: .* has 2"),
    Fault("network: forbidden: train", f"{TRAIN} --offline --set model=a/b", "the network is switched off"),
    Fault("network: forbidden: plan", "plan job.toml --gpu t4 --offline --model owner/name", "is switched off"),
    Fault("network: forbidden: rows", f"{TRAIN} --offline --set data.train=owner/name:train", "is switched off"),
    Fault("command: an unknown option", "train --fast", "--fast"),
]  # fmt: skip


def _named(place: "Place", command: str, found: re.Match[str]) -> str:
    """The command with the name that the error proposes, in the place of the one that is most like it."""
    alike = difflib.get_close_matches(found[1].rpartition("/")[2], re.split("[ =]", command), n=1, cutoff=0.5)
    before, _, after = command.rpartition(alike[0])
    return before + found[1] + after


SET = r"[a-z]+\.[a-z_]+=[\w.-]+"
WAYS_OUT: dict[str, Callable[["Place", str, re.Match[str]], str]] = {
    rf"(?<!-)(?:set|try) ({SET}(?: and {SET})*)": lambda place, command, found: (
        f"{command} --set {found[1].replace(' and ', ' --set ')}"
    ),
    r"with (--other-base)$": lambda place, command, found: f"{command} {found[1]}",
    r"(?<!its own base )with (--base)\b": lambda place, command, found: f"{command} {found[1]} {place.kept / 'base'}",
    r"with (--set) model=DIR": lambda place, command, found: f"{command} {found[1]} model={place.kept / 'base'}",
    r"did you mean (?!a field)'?([\w./:-]+?)'?\?": _named,
    r"has trained is in (\S+): name that": lambda place, command, found: re.sub(r"\brun\b", found[1], command, count=1),
    r"go on with it: cria (.+)": lambda place, command, found: found[1],
    r"see cria (--help)": lambda place, command, found: found[1],
    r"start again in a new folder": lambda place, command, found: f"{TRAIN}-new",
    r"write it as (v\S+)": lambda place, command, found: re.sub(r"--tag \S+", f"--tag {found[1]}", command),
}
"""What an error proposes, by its pattern, and the command that does it. Each must then work."""
NEXT = (
    "16 bits would swallow it|output head is the embedding|network is switched off|data.train=5: no such file"
    "|its added tokens were not saved|holds NaN or infinity|logits are NaN|cannot be merged: NaNs|16 bits explain"
    "|answer is nan per token"
)
"""Reasons that may stand in the way next: an adapter merged over a strange base, what only loading or computing shows,
the drill, and added tokens, which this base does not have either."""


CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of the base."""


def write_base(folder: Path) -> None:
    """Write a Llama of two blocks with random weights, and a tokenizer with a token for each byte."""
    import torch
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    from cria_tricks.models.catalogue import CONFIGS

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIGS["tiny"] | {"vocab_size": 512}))
    model.to(torch.bfloat16).save_pretrained(folder)
    ids = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    text = Tokenizer(BPE(ids, []))
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=text, bos_token="<|im_start|>", eos_token="<|im_end|>", chat_template=CHATML
    )
    tokenizer.save_pretrained(folder)


class Place:
    """A working place with a base, rows, a finished run and a stopped one; made anew for every fault.

    Args:
        folder: where; it is made.
    """

    def __init__(self, folder: Path):
        self.folder, self.kept = folder / "place", folder / "kept"
        self.proposals = Counter[str]()
        base = self.folder / "base"
        base.mkdir(parents=True)
        write_base(base)
        (self.folder / "rows.jsonl").write_text(ROWS)
        (self.folder / "job.toml").write_text(JOB)
        code, said = self.run("train job.toml --out run")
        assert code == 0, said
        shutil.copytree(self.folder / "run", self.folder / "stopped")
        for name in ("adapter", "report.json", "report.md", "report.png", "checkpoints/checkpoint-2"):
            gone(f"stopped/{name}")(self.folder)
        shutil.copytree(self.folder, self.kept)

    def run(self, command: str) -> tuple[int, str]:
        """Run a command in the place; its exit code and what it said."""
        said, before, arguments, code = io.StringIO(), Path.cwd(), sys.argv, 0
        sys.argv = ["cria", *command.split(" ")]
        os.chdir(self.folder)
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
                cli.main()
        except SystemExit as left:
            code = int(left.code or 0)
        finally:
            os.chdir(before)
            sys.argv = arguments
        return code, said.getvalue()

    def check(self, fault: Fault) -> None:
        """Make a fault, hold the command against what it must do, and follow what its error proposes.

        Raises:
            AssertionError: naming the promise that was broken.
        """
        self.restore()
        fault.damage(self.folder)
        before = hashes(self.folder)
        code, said = self.run(fault.command)
        assert code == fault.code, f"exit code {code}, not {fault.code}: {said[-500:]}"
        assert "Traceback" not in said, said
        last = said.splitlines()[-1] if said else ""
        if fault.code:
            assert last.startswith("error: "), said
            assert said.count("error: ") == 1, said
        assert re.search(fault.says, last if fault.code else said), said
        after = hashes(self.folder)
        assert {name: after.get(name) for name in before} == before, "a file was changed or is gone"
        new = [name for name in set(after) - set(before) if not any(re.fullmatch(one, name) for one in fault.new)]
        assert not fault.code or not [name for name in new if Path(name).name != ".lock"], new
        if fault.code:
            self.take_ways_out(fault, last)

    def take_ways_out(self, fault: Fault, line: str) -> None:
        """Do each thing that the error of a fault proposes.

        Raises:
            AssertionError: if one does not work.
        """
        for pattern, way in WAYS_OUT.items():
            for found in re.finditer(pattern, line):
                self.restore()
                fault.damage(self.folder)
                command = way(self, fault.command, found)
                code, said = self.run(command)
                assert not code or re.search(NEXT, said), f"cria {command}: {said[-500:]}"
                self.proposals[pattern] += 1

    def restore(self) -> None:
        """Put everything back."""
        shutil.rmtree(self.folder)
        shutil.copytree(self.kept, self.folder)


def hashes(folder: Path) -> dict[str, str]:
    """Every file, by its path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


# Guards taken out.


@contextlib.contextmanager
def without_guards(place: Place, fault: Fault, most: int = 6) -> Iterator[int]:
    """Take out the statement that refused a fault, and the next one that then does, until the fault is not refused.

    Yields:
        How many were taken out.
    """
    changed: list[tuple[types.FunctionType, types.CodeType]] = []
    try:
        for number in range(most):
            guard = _guard(place, fault)
            if guard is None:
                yield number
                return
            changed += _take_out(*guard)
        yield most
    finally:
        for function, code in reversed(changed):
            function.__code__ = code


def _guard(place: Place, fault: Fault) -> tuple[types.CodeType, int] | None:
    """The function and line that raised what ended the command; nothing if the promises are broken already."""
    raised: list[BaseException] = []
    plain = BadInput.__init__

    def noted(self: BadInput, line: str) -> None:
        plain(self, line)
        raised.append(self)

    BadInput.__init__ = noted  # type: ignore[method-assign]
    try:
        place.check(fault)
    except AssertionError:
        return None
    finally:
        BadInput.__init__ = plain  # type: ignore[method-assign]
    where = raised[-1].__traceback__ if raised else None
    found = None
    while where:
        if "cria_tricks" in where.tb_frame.f_code.co_filename:
            found = where.tb_frame.f_code, where.tb_lineno
        where = where.tb_next
    return found


def _take_out(code: types.CodeType, line: int) -> list[tuple[types.FunctionType, types.CodeType]]:
    """Replace the ``raise`` at a line by ``pass``, in the function that runs."""
    tree = ast.parse(Path(code.co_filename).read_text(encoding="utf-8"))

    class Pass(ast.NodeTransformer):
        def visit_Raise(self, node: ast.Raise) -> ast.AST:
            hit = node.lineno <= line <= (node.end_lineno or node.lineno)
            return ast.copy_location(ast.Pass(), node) if hit else node

    compiled = compile(ast.fix_missing_locations(Pass().visit(tree)), code.co_filename, "exec")
    mutated = next(
        one
        for one in _codes(compiled)
        if (one.co_qualname, one.co_firstlineno) == (code.co_qualname, code.co_firstlineno)
    )
    functions = _functions(code)
    for function in functions:
        function.__code__ = mutated
    return [(function, code) for function in functions]


def _functions(code: types.CodeType) -> list[types.FunctionType]:
    """Find what runs a code: by its name in its module, or, for one inside another, among all objects."""
    found: Any = next(one for one in list(sys.modules.values()) if getattr(one, "__file__", "") == code.co_filename)
    if "<locals>" in code.co_qualname:
        return [one for one in gc.get_objects() if isinstance(one, types.FunctionType) and one.__code__ is code]
    for name in code.co_qualname.split("."):
        found = vars(found)[name]
    while not isinstance(found, types.FunctionType) or found.__code__ is not code:
        found = found.fget if isinstance(found, property) else found.__wrapped__
    return [found]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _codes(constant)


def main() -> None:
    """Run the catalogue."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="those whose name begins so")
    parser.add_argument("--unguarded", action="store_true", help="each with its guards taken out, too")
    parser.add_argument("--out", type=Path, default=Path("build/faults"), help="a folder for the place; replaced")
    chosen = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    shutil.rmtree(chosen.out, ignore_errors=True)
    chosen.out.mkdir(parents=True)
    place, began, broken, blunt, tried = Place(chosen.out.resolve()), time.perf_counter(), 0, 0, 0
    faults = [fault for fault in catalogue() if fault.name.startswith(chosen.only)]
    for fault in faults:
        try:
            place.check(fault)
        except AssertionError as error:
            broken += 1
            print(f"{fault.name}:\n  {str(error)[:600]}", flush=True)
            continue
        if chosen.unguarded and fault.code:  # the others are allowed, so nothing guards them
            tried += 1
            with without_guards(place, fault) as number:
                if _guard(place, fault) is not None:
                    blunt += 1
                    print(f"{fault.name}: still refused without {number} guards", flush=True)
    print(f"{place.proposals.total()} things that their errors propose were done, and worked")
    print(f"{len(faults) - broken} of {len(faults)} faults end as they must, {time.perf_counter() - began:.0f} s")
    if chosen.unguarded:
        print(f"{tried - blunt} of the {tried} that are refused are not, once their guards are out")
    silent = [] if chosen.only else sorted(WAYS_OUT.keys() - place.proposals)
    for pattern in silent:
        print(f"no error proposes this any more: {pattern}")
    sys.exit(bool(broken or blunt or silent))


if __name__ == "__main__":
    main()
