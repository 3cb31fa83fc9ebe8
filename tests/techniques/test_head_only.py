"""Head only: logits and gradient of peft's copy, blocks that keep nothing, a matrix untied from the embedding."""

import pytest
import torch

from cria_tricks.measure.counting import SavedBytes
from cria_tricks.techniques.head_only import HeadOnly
from tests.helpers import prepare, train, trained_weights

IDS = torch.arange(3, 31).view(2, 14)


class Features(torch.nn.Module):
    """A model without its head."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(ids).last_hidden_state


def both(tiny_model) -> tuple[HeadOnly, torch.nn.Module]:
    plain = prepare(tiny_model)[2].model
    ours = HeadOnly(Features(plain.model), plain.lm_head.weight)
    return ours, prepare(tiny_model, "tricks.peft=head")[2].model


def test_math(tiny_model):
    """At step 0 the base's logits bit for bit; the gradient is that of peft's copy."""
    ours, pefts = both(tiny_model)
    logits = ours(IDS)
    assert torch.equal(logits, prepare(tiny_model)[2].model(input_ids=IDS).logits)
    assert torch.equal(logits, pefts(input_ids=IDS).logits)
    pefts(input_ids=IDS, labels=IDS).loss.backward()
    torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten()).backward()
    (gradient,) = (p.grad for p in pefts.parameters() if p.requires_grad)
    torch.testing.assert_close(ours.head_VD.grad, gradient, rtol=1e-5, atol=1e-8)
    assert all(p.grad is None for p in ours.features.parameters())
    with torch.no_grad():
        ours.head_VD.zero_()
    assert ours.features.model.embed_tokens.weight.any(), "untied"


@pytest.mark.parametrize("layers", [1, 2])
def test_mechanism(layers, tiny_model):
    """The head keeps its input, B T D numbers, and the loss its logits; the blocks keep nothing, however many."""
    ours, pefts = both(tiny_model)
    causal_lm = pefts.get_base_model()
    for blocks in (causal_lm.model.layers, ours.features.model.layers):
        del blocks[layers:]
    with SavedBytes(besides=[*ours.parameters(), *ours.buffers()]) as saved:
        ours(IDS)
        assert saved.peak == 4 * 2 * 14 * 256
    with SavedBytes(besides=[*pefts.parameters(), *pefts.buffers()]) as saved:
        hidden = causal_lm.model(IDS).last_hidden_state
        assert saved.now == 0
        causal_lm.lm_head(hidden).sum()
        assert saved.peak == hidden.nbytes == 4 * 2 * 14 * 256


def test_switch(tiny_model, rows, tmp_path):
    """One matrix trains, V x D; the embedding, which was the same one, stays."""
    before = prepare(tiny_model)[2].model.get_input_embeddings().weight.clone()
    run, loaded = train(tiny_model, rows, tmp_path, "tricks.peft=head", "train.epochs=3", "train.learning_rate=1e-3")
    (head,) = trained_weights(loaded).values()
    assert head.shape == before.shape == (512, 256)
    assert not torch.equal(head, before)
    assert torch.equal(loaded.model.get_input_embeddings().weight, before)
    assert run.training[-1]["loss"] < run.training[0]["loss"]
