"""The adapter folder says itself whether it is whole."""

import contextlib
import json
import re
from types import SimpleNamespace
from typing import ClassVar

import pytest
from safetensors.torch import load_file

from cria_tricks.adapter.folder import (
    adapter,
    base_of_training,
    may_be_read,
    refuse_damaged,
    save,
    trained_over,
    verify,
    write_provenance,
)
from cria_tricks.common.atomic_files import MANIFEST
from cria_tricks.common.errors import BadInput
from cria_tricks.load.adapter_files import load_side_network, save_weights
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
    assert found["files"] == len(listed)
    assert found["bytes"] == sum((folder / name).stat().st_size for name in listed)
    assert json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"] == "owner/base"
    assert not folder.with_name("adapter.partial").exists()


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"base": 1}', "\xff"])
def test_a_provenance_that_names_no_base_is_refused(folder, content):
    assert trained_over(folder) == {}, "there is none"
    (folder / "provenance.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(BadInput, match=r"provenance.json: does not say what it was trained over: "):
        trained_over(folder)


NAMES_NONE = "adapter_config.json: names no base model; name it with --base"
NOT_HERE = "its base is {}, which is no folder of a model here and no name on the hub; name the base with --base"


@pytest.mark.parametrize("base", [None, "", "  ", "/gone/base", "gone", "C:\\Users\\me\\base", "D:/base"])
def test_a_base_that_cannot_be_found_is_to_be_named_with_base(base, tmp_path):
    """As plain peft writes the folder, perhaps on another machine."""
    (tmp_path / "adapter_model.safetensors").write_text("{}")
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": base}))
    said = NOT_HERE.format(base) if (base or "").strip() else NAMES_NONE
    for look in (adapter, base_of_training):
        with pytest.raises(BadInput, match=re.escape(said)):
            look(tmp_path)


def test_an_added_file_is_only_noted(folder):
    (folder / ".gitattributes").write_text("x")
    assert verify(folder)["unlisted"] == [".gitattributes"]


def test_a_folder_that_is_none(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(BadInput, match="has no manifest.json"):
        verify(tmp_path)
    with pytest.raises(BadInput, match="there is no such folder; name the folder of an adapter, such as"):
        verify(tmp_path / "none")


class Peft:
    """As peft's models: it has a config of what it adapts, and writes it in the order of a set."""

    peft_config: ClassVar = {}
    generation_config = SimpleNamespace(eos_token_id=None)

    def save_pretrained(self, folder, **options):
        self.given = options
        (folder / "adapter_config.json").write_text(json.dumps({"target_modules": ["v", "k", "q"], "a": 1}))


class Tokenizer:
    eos_token_id = chat_template = None

    def save_pretrained(self, folder):
        (folder / "tokenizer.json").write_text("{}")


@pytest.mark.parametrize("weights", [None, {"w": 1}, {}])
def test_every_file_is_written_as_it_was_given(weights, tmp_path):
    model = Peft()
    recipe = Recipe(name="mine")
    save(tmp_path / "a", model, Tokenizer(), "owner/base", "# ü\n", recipe, {"b": 1, "a": [2]}, weights)
    own = {} if weights is None else {"state_dict": weights}
    assert model.given == {"save_embedding_layers": False, **own}
    written = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "a").iterdir()}
    assert written.pop(MANIFEST)
    assert written == {
        "adapter_config.json": (
            '{\n  "a": 1,\n  "base_model_name_or_path": "owner/base",\n  "target_modules": [\n    "k",\n    "q",\n'
            '    "v"\n  ]\n}\n'
        ),
        "README.md": "# ü\n",
        "recipe.toml": recipe.to_toml(),
        "tokenizer.json": "{}",
        "provenance.json": '{\n  "b": 1,\n  "a": [\n    2\n  ]\n}\n',
    }
    save(tmp_path / "b", model, Tokenizer(), "owner/base", "# card\n", recipe)
    assert not (tmp_path / "b" / "provenance.json").exists()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_provenance(tmp_path / "a", {"loss": float("inf")})


def side(tiny_model, blocks: int):
    return prepare(tiny_model, "tricks.peft=side_network", f"side.blocks={blocks}")[2].model


def test_a_side_network_comes_back_as_it_was_saved(tiny_model, tmp_path):
    model = side(tiny_model, 2)
    learns = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for number, parameter in enumerate(learns.values()):
        parameter.data.fill_(number)
    save_weights(model, tmp_path)
    assert (tmp_path / "side_network.json").read_text() == '{"base_model_name_or_path": "", "blocks": 2}\n'
    assert set(load_file(tmp_path / "side_network.safetensors")) == set(learns)
    other = side(tiny_model, 2)
    load_side_network(other, tmp_path)
    found = {name: p for name, p in other.named_parameters() if p.requires_grad}
    assert all((found[name] == number).all() for number, name in enumerate(learns))
    save_weights(model, tmp_path, {name: p + 1 for name, p in learns.items()})
    given = load_file(tmp_path / "side_network.safetensors")
    assert all((given[name] == number + 1).all() for number, name in enumerate(learns))
    with pytest.raises(BadInput, match="its side network does not fit this model"):
        load_side_network(side(tiny_model, 1), tmp_path)


def test_a_whole_model_is_saved_with_the_weights_that_are_given(tmp_path):
    given = []
    model = SimpleNamespace(modules=list, save_pretrained=lambda folder, **options: given.append((folder, options)))
    save_weights(model, tmp_path)
    save_weights(model, tmp_path, {"w": 1})
    assert given == [(tmp_path, {}), (tmp_path, {"state_dict": {"w": 1}})]


@pytest.mark.parametrize(
    ("name", "read"),
    [
        (".gitattributes", False),
        (".cache/model.bin", False),
        ("deep/.hidden", False),
        ("README.md", False),
        ("deep/PICTURE.JPeG", False),
        ("LICENSE.txt", False),
        ("desktop.ini", False),
        ("config.json", True),
        ("model.bin", True),
        ("readme.md.py", True),
        ("deep/chat_template.jinja", True),
    ],
)
def test_who_reads_a_file_is_known_by_its_name(name, read):
    assert may_be_read(name) is read


@pytest.mark.parametrize("mark", [MANIFEST, "provenance.json", "recipe.toml", None])
def test_a_folder_with_any_mark_of_ours_must_be_whole(mark, tmp_path):
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / name).write_text("{}")
    if mark:
        (tmp_path / mark).write_text("")
    with pytest.raises(BadInput, match=r"manifest.json is .*; take the folder") if mark else contextlib.nullcontext():
        refuse_damaged(tmp_path)


def test_a_file_that_may_be_read_and_is_not_listed_is_refused(folder):
    (folder / "NOTES.md").write_text("x")
    refuse_damaged(folder)
    (folder / "more.json").write_text("{}")
    with pytest.raises(BadInput, match="more.json is not in manifest.json and may be read: take it away"):
        refuse_damaged(folder)
