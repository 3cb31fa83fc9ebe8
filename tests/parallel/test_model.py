"""Model parallelism: blocks on several cards, one after the other."""

import copy

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.load.model import device_map
from cria_tricks.parallel import model
from cria_tricks.resolve import resolve
from tests.parallel import steps


def halves() -> dict:
    """Two layers in two processes, and both in one."""
    import torch.distributed as dist

    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)]
    whole = copy.deepcopy(layers)
    x, rank = torch.randn(6, 4), dist.get_rank()
    given = x if rank == 0 else torch.empty(6, 5)
    loss = model.one_after_the_other(layers[rank], given, lambda y: y.square().sum())
    wanted = whole[1](whole[0](x)).square().sum()
    wanted.backward()
    return {
        "loss": loss.item(),
        "wanted": wanted.item(),
        "gradient": layers[rank].weight.grad,
        "of_one": whole[rank].weight.grad,
    }


def test_math(two):
    first, last = two.run(halves)
    assert last["loss"] == last["wanted"]
    for process in (first, last):
        torch.testing.assert_close(process["gradient"], process["of_one"], rtol=0, atol=0)


@pytest.mark.parametrize(("layers", "cards"), [(16, 2), (30, 4), (5, 2)])
def test_mechanism(layers: int, cards: int):
    places = device_map(layers, cards)
    blocks = [places[f"model.layers.{number}"] for number in range(layers)]
    assert blocks == sorted(blocks)
    assert set(blocks) == set(range(cards))
    assert max(map(blocks.count, blocks)) - min(map(blocks.count, blocks)) <= 1
    # What the loss reads beside the last states, head and labels, is where the ids are.
    assert (places["model.embed_tokens"], places["model.norm"], places["lm_head"]) == (0, cards - 1, 0)


def test_switch(monkeypatch):
    recipe = steps.recipe_of("parallel.strategy=model")
    with pytest.raises(BadInput, match=r"needs two cards in one machine, and here are none; leave it at none"):
        resolve(recipe)
    with pytest.raises(
        BadInput, match=r"with 2 processes: it is one process with several cards; start one, or set .*ddp"
    ):
        resolve(recipe, processes=2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = resolve(recipe, T4)
    assert plan.parallel == {"strategy": "model", "data": 1, "cards": 2}
    assert any("no faster than one; ddp is" in sentence for sentence in plan.warnings)
