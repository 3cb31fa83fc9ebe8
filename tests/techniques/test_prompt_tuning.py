"""Prompt tuning: vectors in front of the tokens, as peft puts them; P x D numbers train, and nothing else moves."""

import pytest
import torch
from safetensors.torch import load_file

from cria_tricks.adapter import folder
from cria_tricks.common.errors import BadInput
from cria_tricks.measure.counting import flops
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques.prompt_tuning import with_prompt
from tests.helpers import prepare, train, trained_weights

PROMPT = ["tricks.peft=prompt_tuning", "prompt.tokens=5"]


def test_math(tiny_model):
    """peft's logits are those of the plain model after our prompt, mask and all; so is its loss, which skips it."""
    _, _, loaded = prepare(tiny_model, *PROMPT)
    plain = prepare(tiny_model)[2].model.eval()
    ids = torch.arange(3, 31).view(2, 14)
    mask, labels = torch.ones(2, 14, dtype=torch.long), ids.clone()
    mask[1, 9:], labels[:, :4] = 0, -100
    found = loaded.model.eval()(input_ids=ids, attention_mask=mask, labels=labels)
    (prompt,) = trained_weights(loaded).values()
    embedded = with_prompt(prompt, plain.get_input_embeddings()(ids))
    assert embedded.shape == (2, 5 + 14, 256)
    whole_mask = torch.cat([torch.ones(2, 5, dtype=torch.long), mask], dim=1)
    whole_labels = torch.cat([torch.full((2, 5), -100), labels], dim=1)
    expected = plain(inputs_embeds=embedded, attention_mask=whole_mask, labels=whole_labels)
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-6)
    torch.testing.assert_close(found.loss, expected.loss, rtol=0, atol=1e-6)


def test_mechanism(tiny_model):
    """P x D trained numbers; the products of P tokens more in every row."""
    _, _, loaded = prepare(tiny_model, *PROMPT)
    plain = prepare(tiny_model)[2].model
    assert sum(p.numel() for p in loaded.model.parameters() if p.requires_grad) == 5 * 256
    ids = torch.arange(3, 31).view(2, 14)
    with torch.no_grad():
        longer = flops(lambda: plain(input_ids=torch.arange(3, 41).view(2, 19)))
        assert flops(lambda: loaded.model(input_ids=ids)) == longer
        assert flops(lambda: plain(input_ids=ids)) < longer


def test_switch(tiny_model, tokenizer, rows, tmp_path):
    """It learns, the base stays, and the folder holds the prompt alone, which plain peft loads."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    run, loaded = train(tiny_model, rows, tmp_path / "run", *PROMPT, "train.epochs=4", "train.learning_rate=0.1")
    assert run.training[-1]["loss"] < run.training[0]["loss"]
    folder.save(tmp_path / "adapter", loaded.model, tokenizer, str(tiny_model), "", Recipe())
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert [tuple(tensor.shape) for tensor in saved.values()] == [(5, 256)]
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    ids = torch.arange(3, 31).view(2, 14)
    torch.testing.assert_close(model.eval()(input_ids=ids).logits, loaded.model.eval()(input_ids=ids).logits)


@pytest.mark.parametrize(("other", "why"), [("packing", "see each other"), ("chunked_loss", "below the learnt prompt")])
def test_what_would_pass_the_prompt_by_is_refused(other, why):
    recipe = with_settings(Recipe(), ["tricks.peft=prompt_tuning", f"tricks.{other}=true"])
    with pytest.raises(BadInput, match=f"{why}.*; set tricks.{other}=false"):
        resolve(recipe)
