"""Token shards hold the rows of the texts, whatever killed their preparation; repeats on files are those in memory."""

import dataclasses
import json
import multiprocessing
import random
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.data import rules, sources
from cria_tricks.data.duplicates import Repeats
from cria_tricks.data.filters import repetitive
from cria_tricks.data.prepare import train_rows
from cria_tricks.data.prepared import layout, repeats, write
from cria_tricks.data.prepared.read import TokenShards
from cria_tricks.data.rows import Chat
from cria_tricks.data.shards import open_files
from cria_tricks.recipe import Recipe, with_settings

NAMES = [a + b + c for a in "bdgklmnr" for b in "aeiou" for c in "bdgklmnr"]


class Words:
    """A tokenizer of one token a word, the same in every process. It can be pickled, and counts what it is asked."""

    eos_token_id = 0
    asked = 0

    def __init__(self, vocabulary: int = 2**16):
        self.vocabulary = vocabulary

    def __len__(self) -> int:
        return self.vocabulary

    def get_vocab(self) -> dict[str, int]:
        return {"<end>": 0}

    def __call__(self, text: str, **options) -> dict[str, list[int]]:
        Words.asked += 1
        return {"input_ids": [1 + int.from_bytes(word.encode()[:6], "big") % (len(self) - 1) for word in text.split()]}


def text(draw: random.Random, length: int) -> str:
    return " ".join(draw.choices(NAMES, k=length))


def changed(draw: random.Random, original: str, share: float) -> str:
    return " ".join(draw.choice(NAMES) if draw.random() < share else word for word in original.split())


def dump(draw: random.Random, number: int) -> list[str]:
    """Texts, a third of which repeat an earlier one: exactly, or with so many words changed that J is 0.5 to 0.97."""
    found = [text(draw, 60)]
    while len(found) < number:
        kind = draw.random()
        if kind < 0.1:
            found.append(draw.choice(found).upper())
        elif kind < 0.35:
            found.append(changed(draw, draw.choice(found), draw.choice((0.005, 0.02, 0.03, 0.05))))
        else:
            found.append(text(draw, draw.choice((1, 3, 40, 200))))
    return found


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """JSON lines of texts in four parts, and evaluation rows of which one is in them."""
    monkeypatch.setattr("cria_tricks.data.shards.SHARD", 4000)
    texts = dump(random.Random(3), 150)
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in texts))
    (tmp_path / "eval.txt").write_text(max(texts, key=len))
    return tmp_path


def recipe(folder: Path, *settings: str) -> Recipe:
    always = ("data.leakage=drop", "data.max_length=16", "data.overlap=3", f"data.eval={folder / 'eval.txt'}")
    return with_settings(Recipe(), [f"data.train={folder / 'texts.jsonl'}", *always, *settings])


def prepared(wanted: Recipe, out: Path, tokenizer: Words, processes: int = 1) -> dict:
    source = open_files(Path(wanted.data.train))
    held_out = sources.find(wanted.data.eval, "eval")
    work = out.with_name(out.name + write.WORK)
    part_bytes = source.size // 4 + 1
    job = write.Preparation(wanted.data, source, source.shards(), held_out, lambda: tokenizer, work, part_bytes)
    if processes > 1:  # a function without a name cannot be pickled
        job = dataclasses.replace(job, open_tokenizer=type(tokenizer))
    about = layout.made_of(wanted.data, source, held_out, tokenizer, "words")
    return write.write(job, out, about, processes, lambda stage, done, parts: None)


@pytest.mark.parametrize("near", [True, False])
@pytest.mark.parametrize("at_once", [2**22, 50])
def test_repeats_on_files_are_those_in_memory(near, at_once, tmp_path, monkeypatch):
    monkeypatch.setattr(repeats, "AT_ONCE", at_once)
    rows = [Chat((), "", "", str(n), one) for n, one in enumerate(dump(random.Random(1), 400))]
    in_memory = Repeats(near)
    wanted = [in_memory.reason(row) for row in rows]
    parts = []
    for begin, end in ((0, 1), (1, 1), (1, 250), (250, 400)):  # one of them is empty
        signatures = repeats.Signatures(near)
        for row in rows[begin:end]:
            signatures.add(row)
        parts.append(tmp_path / f"{len(parts)}")
        signatures.write(parts[-1])
    assert [repeats.REASONS[verdict] for verdict in repeats.find(parts)] == wanted
    assert wanted.count("duplicate") > 10
    assert (wanted.count("near duplicate") > 10) == near


@pytest.mark.parametrize("vocabulary", [2**16, 2**16 + 1])
@pytest.mark.parametrize("duplicates", ["keep", "near"])
def test_shards_give_the_rows_of_the_texts(vocabulary, duplicates, folder):
    wanted = recipe(folder, f"data.duplicates={duplicates}", "data.min_words=3")
    tokenizer = Words(vocabulary)
    held_out = sources.find(wanted.data.eval, "eval")
    listed = train_rows(wanted, sources.find(wanted.data.train, "train"), held_out, tokenizer, print)
    prepared(wanted, folder / "out", tokenizer)
    mapped = TokenShards(folder / "out").rows(wanted.data, held_out, tokenizer)
    assert list(mapped.rows) == mapped.rows[:] == listed.rows
    assert mapped.rows[-1] == listed.rows[-1]
    for name in ("count", "tokens", "trained_tokens", "highest_id", "longest"):
        assert getattr(mapped, name) == getattr(listed, name), name
    for batch in (1, 7, 10**6):
        assert mapped.most_trained(batch) == listed.most_trained(batch)
    assert mapped.tally.to_dict() == listed.tally.to_dict()
    assert mapped.tally.kinds == listed.tally.kinds
    assert mapped.tally.rows["in the evaluation set"] > 0
    sizes = [shard.stat().st_size for shard in (folder / "out").glob("*.ds")]
    assert len(sizes) == 4
    assert min(sizes) > 0
    ends = [np.fromfile(file, "<u8")[-1] for file in (folder / "out").glob("*.index")]
    assert sum(sizes) == sum(ends) * (2 if vocabulary == 2**16 else 4)


def test_bands_have_the_same_key_only_where_all_their_numbers_are_equal():
    signatures = np.random.default_rng(0).integers(0, 2**32, (200, repeats.BANDS * repeats.IN_BAND), np.uint32)
    signatures[1::2] = signatures[::2]
    for band in range(1, repeats.BANDS):  # one number of each band but the first differs, in its lowest bit
        signatures[1::2, band * repeats.IN_BAND + band % repeats.IN_BAND] ^= np.uint32(1)
    keys = repeats._band_keys(signatures)
    assert [len(set(band.tolist())) for band in keys] == [100] + [200] * (repeats.BANDS - 1)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("duplicates", ["keep", "near"])
def test_a_killed_preparation_goes_on_to_the_same_bytes(duplicates, folder, monkeypatch):
    wanted = recipe(folder, f"data.duplicates={duplicates}")
    prepared(wanted, folder / "whole", Words())
    original = write.atomic_files.new_file
    written = []

    def killed_at_the_seventh(path):
        if len(written) == 6:
            raise KeyboardInterrupt
        written.append(path.name)
        return original(path)

    starts = 0
    while not (folder / "out").exists():
        written.clear()
        with monkeypatch.context() as patch:
            patch.setattr(write.atomic_files, "new_file", killed_at_the_seventh)
            try:
                prepared(wanted, folder / "out", Words())
            except KeyboardInterrupt:  # what a real kill leaves besides: a file under its temporary name
                (folder / "out.preparing" / "00003.ds.partial").write_bytes(b"half")
        starts += 1
        assert starts < 20
    assert starts > 2
    assert content(folder / "out") == content(folder / "whole")


def test_what_is_done_is_not_done_again(folder, monkeypatch):
    wanted = recipe(folder)
    monkeypatch.setattr(Words, "asked", 0)
    prepared(wanted, folder / "whole", Words())
    once = Words.asked

    def interrupted(row, tokenizer):
        if Words.asked > once // 2:
            raise KeyboardInterrupt
        return original(row, tokenizer)

    original = write.document
    monkeypatch.setattr(Words, "asked", 0)
    with monkeypatch.context() as patch:
        patch.setattr(write, "document", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepared(wanted, folder / "out", Words())
    there = sorted(path.name for path in (folder / "out.preparing").glob("*.ds"))
    assert there in (["00000.ds"], ["00000.ds", "00001.ds"])
    before = Words.asked
    prepared(wanted, folder / "out", Words())
    assert Words.asked - before < once
    assert content(folder / "out") == content(folder / "whole")


def test_several_processes_write_the_same_bytes(folder):
    wanted = recipe(folder, "data.duplicates=near")
    prepared(wanted, folder / "one", Words())
    prepared(wanted, folder / "two", Words(), processes=2)
    assert content(folder / "one") == content(folder / "two")


def test_one_part_is_left_when_several_processes_go_on(folder, monkeypatch):
    """The first process carries it out, and what it has opened for that is not sent to the others."""
    wanted = recipe(folder, "data.duplicates=near")
    prepared(wanted, folder / "whole", Words())
    original = write.Preparation.sign

    def killed_at_the_last(job, part):
        if part == 3:
            raise KeyboardInterrupt
        original(job, part)

    with monkeypatch.context() as patch:
        patch.setattr(write.Preparation, "sign", killed_at_the_last)
        with pytest.raises(KeyboardInterrupt):
            prepared(wanted, folder / "out", Words())
    prepared(wanted, folder / "out", Words(), processes=2)
    assert content(folder / "out") == content(folder / "whole")


class Unreadable(Words):
    """It tokenises one line, for its identity, and no text."""

    def __call__(self, text: str, **options) -> dict[str, list[int]]:
        if text != layout.PROBE:
            raise ValueError("this tokenizer cannot read it")
        return super().__call__(text)


def test_an_error_in_another_process_is_told_and_ends_only_our_processes(folder):
    """It was told as a process that was killed, because the error could not be made again from its pickle."""
    bystander = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(600,))
    bystander.start()
    try:
        with pytest.raises(ValueError, match="this tokenizer cannot read it"):
            prepared(recipe(folder), folder / "out", Unreadable(), processes=2)
        bystander.join(1)
        assert bystander.is_alive()
    finally:
        bystander.kill()
        bystander.join()


def test_other_shards_are_refused(folder):
    wanted = recipe(folder)
    out = folder / "out"
    prepared(wanted, out, Words())
    held_out = sources.find(wanted.data.eval, "eval")
    shards = TokenShards(out)
    with pytest.raises(BadInput, match="its tokens are of the tokenizer of words, and this model's is another"):
        shards.rows(wanted.data, held_out, Words(70_000))
    with pytest.raises(BadInput, match="was prepared with data.min_words=0, and this run has 5; set data.min_words=0"):
        shards.rows(recipe(folder, "data.min_words=5").data, held_out, Words())
    with pytest.raises(BadInput, match="was compared with other evaluation rows"):
        shards.rows(wanted.data, sources.find("nguzo_saba", "eval"), Words())
    for settings, said in (
        (["data.stream=true", "train.max_steps=1"], "set data.stream=false"),
        (["tricks.packing=true"], "set tricks.packing=false"),
        (["data.drop_cited=0.5"], "set data.drop_cited=0.0"),
    ):
        with pytest.raises(BadInput, match=said):
            rules.refuse(recipe(folder, f"data.train={out}", *settings))
    with pytest.raises(BadInput, match="holds token shards and no texts"):
        sources.find(str(out), "train")
    shutil.copytree(folder / "out", folder / "cut")
    (folder / "cut" / "00001.ds").write_bytes(b"")
    with pytest.raises(BadInput, match="00001.ds has another size than was written; prepare it again"):
        TokenShards(folder / "cut")
    (folder / "cut" / "00001.ds").unlink()
    with pytest.raises(BadInput, match="No such file .*00001.ds.*; prepare it again"):
        TokenShards(folder / "cut")
    for name, damaged, said in (
        ("prepared.json", "{}", "prepared.json has another size than was written"),
        ("prepared.json", "[]", "prepared.json has another size than was written"),
        ("manifest.json", '{"files": [1]}', "prepared.json or manifest.json is damaged"),
    ):
        shutil.copytree(folder / "out", folder / "cut", dirs_exist_ok=True)
        (folder / "cut" / name).write_text(damaged)
        with pytest.raises(BadInput, match=f"{said}; prepare it again"):
            TokenShards(folder / "cut")


def test_other_work_is_not_gone_on_with(folder, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(write, "document", lambda row, tokenizer: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            prepared(recipe(folder), folder / "out", Words())
    with pytest.raises(BadInput, match="holds the beginning of other shards"):
        prepared(recipe(folder, "data.min_words=2"), folder / "out", Words())
    rows = folder / "texts.jsonl"
    rows.write_text("\n" * 9)
    with pytest.raises(BadInput, match=r"data.train=.*texts.jsonl: there is no text in it"):
        prepared(recipe(folder), folder / "blank", Words())
    rows.write_text(json.dumps({"prompt": "Who?", "completion": "Nobody."}))
    with pytest.raises(BadInput, match="this row is a completion, and token shards are made of texts"):
        prepared(recipe(folder), folder / "other", Words())


def test_a_run_on_shards_is_the_run_on_the_texts(folder, run_cria):
    """The same weights and the same losses, to the bit; and the command's three answers."""
    settings = (
        "model=random:tiny", "data.leakage=drop", "data.duplicates=near", f"data.eval={folder / 'eval.txt'}",
        f"data.train={folder / 'texts.jsonl'}", "data.max_length=16", "train.max_steps=3", "tricks.peft=lora",
    )  # fmt: skip
    words = [word for setting in settings for word in ("--set", setting)]
    out = folder / "shards"
    for _ in range(2):  # the second time the sums of what is there are checked
        code, said, _ = run_cria("prepare", "baseline", *words, "--out", out)
        assert code == 0
        assert "near duplicate" in said
    losses = []
    for name, train in (("texts", folder / "texts.jsonl"), ("shards", out)):
        code, said, _ = run_cria(
            "train", "baseline", *words, "--set", f"data.train={train}", "--out", folder / f"run-{name}"
        )
        assert code == 0
        report = json.loads((folder / f"run-{name}" / "report.json").read_text())
        counts = {**report["data"], "train": "the file, or the folder of its shards"}
        losses.append([report["eval_loss_after"], *(entry.get("loss") for entry in report["history"]), counts])
    assert losses[0] == losses[1]
    weights = [folder / f"run-{name}" / "adapter" / "adapter_model.safetensors" for name in ("texts", "shards")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    shard = out / "00000.ds"
    shard.write_bytes(shard.read_bytes()[:-2] + b"12")
    code, _, said = run_cria("prepare", "baseline", *words, "--out", out)
    assert code == 2
    assert said.endswith("00000.ds has other content than was written; remove the folder and prepare it again\n")


SENTENCES = [text(random.Random(n), 12) for n in range(40)]


@pytest.mark.parametrize(
    ("of", "rule"),
    [
        ("\n".join(SENTENCES), ""),
        ("\n".join([*SENTENCES[:7], *["x"] * 4]), ""),
        ("\n".join([*SENTENCES[:7], *["x"] * 5]), "0.33 of its lines"),
        ("\n".join([*SENTENCES[:7], SENTENCES[0], SENTENCES[1]]), "repeated lines are 0.22 of it"),
        ("\n\n".join(["\n".join(SENTENCES[:30]), SENTENCES[31], SENTENCES[31]]), "0.33 of its paragraphs"),
        (" ".join(f"{one} ever so" for one in text(random.Random(0), 40).split()), "the commonest 2 words"),
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
