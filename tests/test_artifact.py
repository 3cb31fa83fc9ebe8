"""The adapter folder says itself whether it is whole."""

import json

import pytest

from cria_tricks.artifact import save, verify
from cria_tricks.durable import MANIFEST
from cria_tricks.errors import BadInput
from cria_tricks.recipe import Recipe
from tests.helpers import prepare


@pytest.fixture
def folder(tiny_model, tokenizer, tmp_path):
    _, _, loaded = prepare(tiny_model, "tricks.peft=lora", "lora.r=2")
    save(tmp_path / "adapter", loaded.model, tokenizer, "owner/base", "# card\n", Recipe())
    return tmp_path / "adapter"


def test_what_is_in_it(folder):
    found = verify(folder)
    listed = json.loads((folder / MANIFEST).read_text())["files"]
    assert set(listed) == {path.name for path in folder.iterdir()} - {MANIFEST}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "README.md", "recipe.toml"} <= set(
        listed
    )
    assert found.files == len(listed)
    assert found.bytes == sum((folder / name).stat().st_size for name in listed)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "owner/base"
    assert not folder.with_name("adapter.partial").exists()


def test_an_added_file_is_only_noted(folder):
    (folder / ".gitattributes").write_text("x")
    assert verify(folder).unlisted == (".gitattributes",)


def flip_one_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (lambda f: (f / "README.md").write_text(""), "README.md has 0 bytes, not the 7"),
        (lambda f: flip_one_bit(f / "adapter_model.safetensors"), "adapter_model.safetensors has other content"),
        (lambda f: (f / MANIFEST).unlink(), "has no manifest.json"),
        (lambda f: (f / MANIFEST).write_text("{"), "manifest.json is damaged"),
        (lambda f: (f / MANIFEST).write_text('{"files": [1]}'), "manifest.json is damaged"),
    ],
)
def test_damage_is_named(folder, damage, said):
    damage(folder)
    with pytest.raises(BadInput, match=said):
        verify(folder)


def test_a_folder_that_is_none(tmp_path):
    with pytest.raises(BadInput, match="has no manifest.json"):
        verify(tmp_path / "none")
