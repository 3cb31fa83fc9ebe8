"""Adapters as plain peft writes them open, answer and merge as in peft: new words, saved modules, adapted ends."""

import json

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cria_tricks import models
from cria_tricks.adapter.chat import answer
from cria_tricks.adapter.merge import merge
from cria_tricks.adapter.opening import open_folder
from cria_tricks.common.errors import BadInput
from cria_tricks.load.model import load_tokenizer
from cria_tricks.models import pretrained

TINY = "random:tiny"
NEW = 40  # more than the rows that the base's embedding has left over
KINDS = {
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "head": {"target_modules": ["q_proj", "lm_head"]},
    "both ends": {"target_modules": ["q_proj", "embed_tokens", "lm_head"]},
    "saved head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "saved ends": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "some words": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 6]}},
    "new words": {"target_modules": ["q_proj"]},
    "new words, saved": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "new words, trained": {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, -1]}},
}


@pytest.fixture
def written(tmp_path, request):
    """An adapter that peft has written, and the logits and the model that it had."""
    config = json.loads(json.dumps(KINDS[request.param]))
    base = AutoModelForCausalLM.from_pretrained(models.find(TINY).path, dtype=torch.float32)
    tokenizer = load_tokenizer(models.find(TINY))
    torch.manual_seed(0)
    if "new" in request.param:
        tokenizer.add_tokens([f"<new{number}>" for number in range(NEW)])
        base.resize_token_embeddings(base.get_input_embeddings().num_embeddings + NEW)
        if "trainable_token_indices" in config:
            config["trainable_token_indices"]["embed_tokens"][1] = len(tokenizer) - 1
    made = peft.get_peft_model(base, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **config))
    for weight in made.parameters():
        if weight.requires_grad:
            weight.data += 0.05 * torch.randn_like(weight)
    made.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    about = tmp_path / "adapter" / "adapter_config.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"base_model_name_or_path": TINY}))
    return tmp_path / "adapter", made.eval()


@pytest.mark.parametrize("written", KINDS, indirect=True)
def test_it_answers_and_is_merged_as_in_peft(written):
    folder, theirs = written
    ids = torch.tensor([[5, 6, 7, 8, theirs.get_input_embeddings().weight.shape[0] - 1]])
    with torch.no_grad():
        expected = theirs(ids).logits
    model, tokenizer = open_folder(folder, dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, expected, atol=1e-5)
    assert isinstance(answer(model, tokenizer, [{"role": "user", "content": "?"}], 2), str)
    found = merge(folder)
    assert found["largest_difference"] <= found["bound"]
    whole = AutoModelForCausalLM.from_pretrained(found["merged"], dtype=torch.float32)
    with torch.no_grad():
        assert (whole(ids).logits - expected).abs().max() <= 2 * found["bound"]
    assert len(AutoTokenizer.from_pretrained(found["merged"])) == len(tokenizer)


def test_words_that_were_not_saved_with_the_adapter_are_one_line(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(models.find(TINY).path)
    base.resize_token_embeddings(base.get_input_embeddings().num_embeddings + NEW)
    made = peft.get_peft_model(base, peft.LoraConfig(target_modules=["embed_tokens"], task_type="CAUSAL_LM"))
    made.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    load_tokenizer(models.find(TINY)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        BadInput, match=r"embed_tokens.* has the shape .* lacks added tokens that were not saved"
    ) as caught:
        open_folder(tmp_path / "adapter", base=TINY)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [{"use_dora": True}, {"target_modules": ["embed_tokens"]}])
def test_a_zero_b_is_noticed_in_other_kinds_of_lora(config, tmp_path):
    base = AutoModelForCausalLM.from_pretrained(models.find(TINY).path)
    made = peft.get_peft_model(base, peft.LoraConfig(**{"target_modules": ["q_proj"]} | config, task_type="CAUSAL_LM"))
    for name, weight in made.named_parameters():  # an embedding's A is zero before training, and its B is drawn
        if "lora_B" in name or "lora_embedding_B" in name:
            weight.data.zero_()
    made.save_pretrained(tmp_path / "adapter")
    assert pretrained.changes_nothing(tmp_path / "adapter")
    for name, weight in made.named_parameters():
        if "lora_B" in name or "lora_embedding_B" in name:
            weight.data[0] = 1
    made.save_pretrained(tmp_path / "trained")
    assert not pretrained.changes_nothing(tmp_path / "trained")


def test_another_kind_of_adapter_on_the_head_is_no_vocabulary(tmp_path):
    base = AutoModelForCausalLM.from_pretrained(models.find(TINY).path)
    made = peft.get_peft_model(base, peft.OFTConfig(target_modules=["lm_head"], task_type="CAUSAL_LM"))
    made.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    load_tokenizer(models.find(TINY)).save_pretrained(tmp_path / "adapter")
    model, _ = open_folder(tmp_path / "adapter", base=TINY)
    assert model.get_input_embeddings().weight.shape[0] == 49_152
