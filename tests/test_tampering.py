"""A folder that was altered is refused by every command with one line."""

import shutil
from pathlib import Path

import pytest

from cria_tricks.adapter.folder import verify
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
    "cut short": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "removed": lambda path: path.unlink(),
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


@every_command
def test_the_folder_as_it_was_written_is_taken(command, adapter, run_cria):
    code, stdout, stderr = run_cria(*(str(adapter) if word == "ADAPTER" else word for word in COMMANDS[command]))
    assert code == 0, stderr
    assert stdout.strip()
    assert {path.name for path in adapter.iterdir()} == set(FILES)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", sorted(set(FILES) - {"manifest.json"}))
def test_each_file_altered_in_turn(name, damage, adapter):
    DAMAGES[damage](adapter / name)
    with pytest.raises(BadInput, match=rf"{name} (is missing|has )"):
        verify(adapter)


@every_command
def test_an_altered_file_is_refused_by(command, adapter, run_cria):
    flip(adapter / "adapter_model.safetensors")
    assert "adapter_model.safetensors has other content than was written" in refused(command, adapter, run_cria)


def test_so_does_evaluation_and_it_writes_nothing(adapter, run_cria, tmp_path):
    flip(adapter / "adapter_model.safetensors")
    code, stdout, stderr = run_cria("eval", adapter, "--out", tmp_path / "eval", "--with-base")
    assert (code, stdout) == (2, "")
    assert stderr.splitlines()[-1].startswith("error: ")
    assert not list((tmp_path / "eval").rglob("*.json*"))


def test_a_manifest_that_is_none(adapter):
    (adapter / "manifest.json").write_text("{")
    with pytest.raises(BadInput, match="manifest.json is damaged"):
        verify(adapter)


@pytest.mark.parametrize("name", ["merges.txt", "model.safetensors"])
@every_command
def test_an_added_file_that_may_be_read_is_refused(name, command, adapter, run_cria):
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


def test_a_plain_peft_folder_is_still_loaded(foreign, run_cria):
    code, _, stderr = run_cria("chat", foreign, "--prompt", "Hi", "--max-new-tokens", "1")
    assert code == 0, stderr
    assert run_cria("merge", foreign)[0] == 0
