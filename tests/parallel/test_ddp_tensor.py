"""Data x tensor: a grid of processes."""

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import shape_of
from cria_tricks.parallel import ddp_tensor
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve
from tests.parallel import steps
from tests.parallel.strategies import alone, formula, spread, worst

SETTINGS = [(), ("tricks.peft=none",), ("tricks.gradient_checkpointing=true", "lora.target_modules=q_proj,v_proj")]


def averaged() -> list[float]:
    """Gradients of a whole matrix and of one in pieces, averaged over the groups of a grid of 2 x 2."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor

    from cria_tricks.processes.world import World

    world = World.of(2, "cpu")
    whole = torch.nn.Parameter(torch.zeros(2))
    pieces = torch.nn.Parameter(distribute_tensor(torch.zeros(4), world.mesh["tensor"], [Shard(0)]))
    (whole.sum() * world.data_rank).backward()
    pieces.grad = DTensor.from_local(torch.full((2,), float(dist.get_rank())), world.mesh["tensor"], [Shard(0)])
    ddp_tensor.average_gradients([whole, pieces], world.mesh["data"].get_group())
    return [*whole.grad.tolist(), *pieces.grad.to_local().tolist()]


def test_math(four):
    first, second = [0.5, 0.5, 1.0, 1.0], [0.5, 0.5, 2.0, 2.0]  # the means of groups 0 and 1, of ranks 0, 2 and 1, 3
    assert four.run(averaged) == [first, second, first, second]


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings[-1] if settings else "lora")
def test_mechanism(four, settings: tuple[str, ...]):
    found = spread(four, "ddp_tensor", *settings)
    assert [process["bytes"] for process in found] == [formula("ddp_tensor", 4, *settings)] * 4
    assert found[0]["weights"] < alone(*settings)["weights"]
    assert worst(found[0]["gradients"], alone(*settings)["gradients"]) < 3e-6


def test_switch():
    plan = resolve(steps.recipe_of("parallel.strategy=ddp_tensor"), processes=4)
    assert plan.parallel == {"strategy": "ddp_tensor", "data": 2}
    assert plan.training["gradient_accumulation_steps"] == 2
    for processes in (2, 3, 5):
        with pytest.raises(BadInput, match=r"they make no grid .*tensor_size=2; start 4, or a larger multiple"):
            resolve(steps.recipe_of("parallel.strategy=ddp_tensor"), processes=processes)
    with pytest.raises(BadInput, match="quantization=nf4"):
        resolve(steps.recipe_of("parallel.strategy=ddp_tensor", "tricks.quantization=nf4"), processes=4)


@pytest.mark.parametrize(
    ("config", "cut_biases"),
    [
        ({"model_type": "qwen2", "attention_bias": None}, 64 + 2 * 32),
        ({"model_type": "llama", "attention_bias": True, "mlp_bias": True}, 64 + 2 * 32 + 2 * 96),
        ({"model_type": "llama"}, 0),
    ],
)
def test_biases_are_cut_with_the_results_that_they_are_added_to(config, cut_biases):
    """o_proj's and down_proj's stay whole: they are added after the sum over the processes."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96}
    shape = shape_of({**sizes, "num_hidden_layers": 3, "vocab_size": 160, **config}, "made-up")
    matrices = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    whole = ddp_tensor.own_weights(Recipe(), shape, 1)
    assert whole == shape.weights
    assert ddp_tensor.own_weights(Recipe(), shape, 2) == whole - 3 * (matrices + cut_biases) // 2
