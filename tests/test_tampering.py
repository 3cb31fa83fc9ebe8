"""A folder that was altered, or that holds what runs or leads out of it, is refused by every command with one line."""

import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path

import pytest
import torch

from cria_tricks.adapter.folder import refuse_unsafe, verify
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput

FILES = (
    "README.md", "adapter_config.json", "adapter_model.safetensors", "chat_template.jinja", "manifest.json",
    "provenance.json", "recipe.toml", "tokenizer.json", "tokenizer_config.json",
)  # fmt: skip
COMMANDS = {
    "verify": ["verify", "ADAPTER"],
    "chat": ["chat", "ADAPTER", "--prompt", "Hi", "--max-new-tokens", "1"],
    "merge": ["merge", "ADAPTER"],
    "export": ["export", "ADAPTER"],
    "publish": ["publish", "ADAPTER", "owner/name"],
}
every_command = pytest.mark.parametrize("command", COMMANDS)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "a bit flipped": flip,
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "halved": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path: path.write_bytes(b""),
    "removed": lambda path: path.unlink(),
    "grown": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
}


@pytest.fixture
def adapter(trained, tmp_path) -> Path:
    return Path(shutil.copytree(trained / "adapter", tmp_path / "run" / "adapter"))


@pytest.fixture
def foreign(adapter) -> Path:
    """The same as plain peft would have written it: nothing says what the files should be."""
    for name in ("manifest.json", "provenance.json", "recipe.toml"):
        (adapter / name).unlink()
    return adapter


def refused(command: str, adapter: Path, run_cria) -> str:
    """Run a command on a folder that it must not take; what it said."""
    before = sorted(adapter.parent.rglob("*"))
    code, stdout, stderr = run_cria(*(str(adapter) if word == "ADAPTER" else word for word in COMMANDS[command]))
    assert (code, stdout) == (2, ""), stdout + stderr
    assert stderr.startswith(f"error: {adapter}: ")
    assert stderr.count("\n") == 1
    assert sorted(adapter.parent.rglob("*")) == before
    return stderr


def sealed(adapter: Path) -> Path:
    """A manifest that fits whatever lies there: who can change the files can do that too."""
    (adapter / "manifest.json").unlink(missing_ok=True)
    atomic_files._write_manifest(adapter)
    return adapter


@every_command
def test_the_folder_as_it_was_written_is_taken(command, adapter, run_cria):
    code, stdout, stderr = run_cria(*(str(adapter) if word == "ADAPTER" else word for word in COMMANDS[command]))
    assert code == 0, stderr
    assert stdout.strip()
    assert {path.name for path in adapter.iterdir()} == set(FILES)


@every_command
@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_each_file_altered_in_turn(name, damage, command, adapter, run_cria):
    DAMAGES[damage](adapter / name)
    said = refused(command, adapter, run_cria)
    assert name in said or name == "manifest.json"  # of a changed hash or size it blames the file


@pytest.mark.parametrize("name", FILES)
def test_so_does_evaluation_and_it_writes_nothing(name, adapter, run_cria, tmp_path):
    flip(adapter / name)
    code, stdout, stderr = run_cria("eval", adapter, "--out", tmp_path / "eval", "--with-base")
    assert (code, stdout) == (2, "")
    assert stderr.splitlines()[-1].startswith("error: ")
    assert not list((tmp_path / "eval").rglob("*.json*"))


class Evil:
    """A pickle that makes a folder when it is read."""

    def __init__(self, trace: Path):
        self.trace = trace

    def __reduce__(self):
        return os.mkdir, (str(self.trace),)


def zipped(evil: Evil, path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(evil))


SLIPPED = {
    **{
        f"evil{ending}": lambda evil, path: path.write_bytes(pickle.dumps(evil))
        for ending in (".bin", ".pt", ".pth", ".pkl", ".PKL", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
    },
    "adapter_model.bin": torch.save,
    "checkpoint-1/optimizer.pt": torch.save,
    "adapter_model.safetensors": lambda evil, path: path.write_bytes(pickle.dumps(evil)),
    "tokenizer.json": zipped,
    "README.md": torch.save,
    ".hidden": lambda evil, path: path.write_bytes(pickle.dumps(evil, protocol=2)),
    "deep/er/notes.txt": lambda evil, path: torch.save(evil, path, _use_new_zipfile_serialization=False),
}


@every_command
@pytest.mark.parametrize("vouched", ["with a manifest that lists it", "without a manifest"])
@pytest.mark.parametrize("name", SLIPPED)
def test_a_pickle_slipped_in_is_refused_and_never_run(name, vouched, command, foreign, run_cria, tmp_path):
    (foreign / name).parent.mkdir(parents=True, exist_ok=True)
    SLIPPED[name](Evil(tmp_path / "trace"), foreign / name)
    if vouched == "with a manifest that lists it":
        sealed(foreign)
        assert atomic_files.damage(foreign) == "", "the hashes would let it through"
    said = refused(command, foreign, run_cria)
    if vouched.startswith("with a") or command in ("chat", "merge", "export"):
        assert name in said
        assert "pickle" in said or "no safetensors file" in said
    assert not (tmp_path / "trace").exists()


def test_a_pickle_of_the_oldest_kind_is_no_safetensors_file(foreign, tmp_path):
    """Protocol 0 is text: nothing in its first bytes gives it away."""
    (foreign / "adapter_model.safetensors").write_bytes(pickle.dumps(Evil(tmp_path / "trace"), protocol=0))
    with pytest.raises(BadInput, match="adapter_model.safetensors is no safetensors file"):
        refuse_unsafe(foreign)


def test_a_header_whose_length_looks_like_a_pickle_is_a_header(foreign):
    """0x0480 bytes: the file begins as pickles of protocol 4 do."""
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode().ljust(0x0480)
    content = len(header).to_bytes(8, "little") + header + b"\0\0\0\0"
    assert content.startswith(b"\x80\x04")
    (foreign / "adapter_model.safetensors").write_bytes(content)
    refuse_unsafe(foreign)


def test_a_safetensors_file_with_something_behind_its_end_is_none(foreign):
    with (foreign / "adapter_model.safetensors").open("ab") as file:
        file.write(b"PK\x03\x04")
    with pytest.raises(BadInput, match="adapter_model.safetensors is no safetensors file"):
        refuse_unsafe(foreign)


def out_of_it(adapter: Path, name: str) -> Path:
    """Move a file out of the folder."""
    return Path(shutil.move(adapter / name, adapter.parent / "elsewhere"))


def link_out(adapter: Path) -> None:
    (adapter / "tokenizer.json").symlink_to(out_of_it(adapter, "tokenizer.json"))


def link_up(adapter: Path) -> None:
    out_of_it(adapter, "tokenizer.json")
    (adapter / "tokenizer.json").symlink_to("../elsewhere")


def link_folder(adapter: Path) -> None:
    (adapter / "more").symlink_to("/")


def link_nowhere(adapter: Path) -> None:
    (adapter / "more").symlink_to("none")


def link_itself(adapter: Path) -> None:
    (adapter / "more").symlink_to("more")


def pipe(adapter: Path) -> None:
    os.mkfifo(adapter / "more")  # whoever opens it waits for ever


def listed(name: str):
    def change(adapter: Path) -> None:
        manifest = json.loads((adapter / "manifest.json").read_text())
        manifest["files"][name] = manifest["files"]["README.md"]
        (adapter / "manifest.json").write_text(json.dumps(manifest))

    return change


def config(file: str, **fields):
    def change(adapter: Path) -> None:
        content = json.loads((adapter / file).read_text()) if (adapter / file).exists() else {}
        (adapter / file).write_text(json.dumps(content | fields))
        sealed(adapter)

    return change


def nested(adapter):
    """Hide a field that asks for code behind lists that Python's own reader may still read, and a recursion may not."""
    deep = "[" * 1500 + "]" * 1500
    hidden = '{"auto_map": {"AutoConfig": "evil.Config"}}'
    (adapter / "config.json").write_text(f'{{"a": {deep}, "text_config": {hidden}}}')
    sealed(adapter)


@every_command
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (nested, "config.json: "),  # nested too deeply, or, if a library has raised the limit, that it asks for code
        (link_out, "tokenizer.json is a link that leaves the folder"),
        (link_up, "tokenizer.json is a link that leaves the folder"),
        (link_folder, "more is a link that leaves the folder"),
        (link_nowhere, "more is a link that leads nowhere"),
        (link_itself, "more is a link that leads nowhere"),
        (pipe, "more is no plain file"),
        (listed("../README.md"), "'../README.md', which is outside the folder"),
        (listed("a/../../README.md"), "which is outside the folder"),
        (listed("/etc/hostname"), "'/etc/hostname', which is outside the folder"),
        (listed("..\\README.md"), "which is outside the folder"),
        (listed("C:README.md"), "which is outside the folder"),
        (listed(""), "which is outside the folder"),
        (listed("./README.md"), "'./README.md', which is the name of no file"),
        (listed("manifest.json"), "'manifest.json', which is the name of no file"),
        (config("tokenizer_config.json", vocab_file="../vocab.json"), "vocab_file names ../vocab.json, which is not"),
        (config("tokenizer_config.json", tokenizer_file="/tmp/tokenizer.json"), "names /tmp/tokenizer.json"),
        (config("model.safetensors.index.json", weight_map={"w": "../../w.safetensors"}), "../../w.safetensors"),
        (config("config.json", transformers_weights="../w.safetensors"), "names ../w.safetensors"),
        (config("config.json", auto_map={"AutoConfig": "evil.Config"}), "asks for code of its own (auto_map)"),
        (config("tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", None]}), "code of its own (auto_map)"),
        (config("adapter_config.json", tokenizer_kwargs={"trust_remote_code": True}), "own (trust_remote_code)"),
        (config("adapter_config.json", megatron_config={"a": 1}, megatron_core="evil"), "own (megatron_config)"),
        (config("config.json", attn_implementation="evil/kernel"), "asks for a kernel from the hub (evil/kernel)"),
    ],
)
def test_what_leads_out_or_asks_for_code(change, said, command, adapter, run_cria):
    change(adapter)
    assert said in refused(command, adapter, run_cria)


@pytest.mark.parametrize(
    "text",
    [
        '{"files": {}}',
        '{"files": {"README.md": {"bytes": "1", "sha256": "%s"}}}' % ("0" * 64),
        '{"files": {"README.md": {"bytes": true, "sha256": "%s"}}}' % ("0" * 64),
        '{"files": {"README.md": {"bytes": -1, "sha256": "%s"}}}' % ("0" * 64),
        '{"files": {"README.md": {"bytes": 1, "sha256": "0"}}}',
        '{"files": {"README.md": {"bytes": 1, "sha256": 7}}}',
        '{"files": {"README.md": {"bytes": 1, "sha256": "%s", "more": 1}}}' % ("0" * 64),
        '{"files": [["README.md", 1]]}',
        '{"files": {"README.md": null}}',
        '{"files": {}, "files": {"README.md": 1}}',
        '{"manifest": {}}',
        "null",
    ],
)
def test_a_manifest_that_lists_odd_things(text, adapter):
    (adapter / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match="manifest.json is damaged"):
        verify(adapter)


def test_a_manifest_that_lists_a_file_twice(adapter):
    """json would take the last of the two; so the first may say anything."""
    text = (adapter / "manifest.json").read_text()
    entry = json.dumps(json.loads(text)["files"]["README.md"])
    (adapter / "manifest.json").write_text(text.replace('"files": {', f'"files": {{"README.md": {entry},', 1))
    with pytest.raises(BadInput, match="it names 'README.md' twice"):
        verify(adapter)


@pytest.mark.parametrize(
    "name", ["special_tokens_map.json", "config.json", "model.safetensors", "additional_chat_templates/x.jinja",
             "merges.txt", "tokenizer.model", "evil.py", "adapter_model.safetensors.index.json"],
)  # fmt: skip
@every_command
def test_an_added_file_that_may_be_read_is_refused(name, command, adapter, run_cria):
    (adapter / name).parent.mkdir(exist_ok=True)
    if name == "model.safetensors":
        shutil.copy(adapter / "adapter_model.safetensors", adapter / name)
    else:
        (adapter / name).write_text("{}")
    assert f"{name} is not in manifest.json and may be read" in refused(command, adapter, run_cria)


@pytest.mark.parametrize("name", [".gitattributes", ".cache/huggingface/x.lock", "NOTES.md", "LICENSE", "figure.png"])
def test_an_added_file_that_only_people_read_is_noted(name, adapter, run_cria):
    (adapter / name).parent.mkdir(parents=True, exist_ok=True)
    (adapter / name).write_text("x")
    assert verify(adapter).unlisted == (name,)
    assert f"note: {name} is not in the manifest" in run_cria("verify", adapter)[1]


def test_a_link_inside_the_folder_is_taken_and_so_is_the_hubs_cache(adapter, tmp_path):
    (adapter / "LICENSE").symlink_to("README.md")
    verify(adapter)
    (adapter / "LICENSE").unlink()
    cache = tmp_path / "models--owner--name"
    (cache / "blobs").mkdir(parents=True)
    (cache / "snapshots").mkdir()
    snapshot = Path(shutil.move(adapter, cache / "snapshots" / "0123"))
    for path in list(snapshot.iterdir()):
        blob = cache / "blobs" / f"blob-of-{path.name}"
        path.rename(blob)
        path.symlink_to(Path("../../blobs") / blob.name)
    verify(snapshot)
    (cache / "other").write_text("x")
    (snapshot / "NOTES.md").symlink_to("../../other")
    with pytest.raises(BadInput, match="NOTES.md is a link that leaves the folder"):
        verify(snapshot)


def test_a_plain_peft_folder_is_still_loaded(foreign, run_cria):
    code, _, stderr = run_cria("chat", foreign, "--prompt", "Hi", "--max-new-tokens", "1")
    assert code == 0, stderr
    assert run_cria("merge", foreign)[0] == 0
