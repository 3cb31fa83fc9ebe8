"""Data parallelism: every process the whole model, and its share of the rows."""

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.parallel import ddp
from cria_tricks.resolve import resolve
from tests.parallel import steps
from tests.parallel.strategies import alone, formula, spread, worst

SETTINGS = [
    (),
    ("tricks.chunked_loss=true", "tricks.gradient_checkpointing=true"),
    ("tricks.gradient_checkpointing=1", "tricks.attention=sdpa", "tricks.keep_attention=true"),
    ("tricks.gradient_checkpointing=1", "tricks.fused_lora=true", "tricks.fused_blocks=true"),
    ("tricks.peft=none",),
    ("tricks.quantization=nf4", "tricks.double_quantization=true"),
    ("tricks.quantization=nf4", "lora.init=loftq"),
    ("tricks.gradient_checkpointing=1", "tricks.tiled_mlp=5"),
]


def replicated(bucket_bytes: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients by the reference, of this process's half of the rows, and those of all rows at once."""
    import torch.distributed as dist

    torch.manual_seed(dist.get_rank())  # the copies begin differently, and the first one's numbers are taken
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 3))
    replicas = ddp.Replicated(model.parameters(), bucket_bytes)
    rows = torch.randn(4, 5, 6, generator=torch.Generator().manual_seed(1))
    mine = rows[dist.get_rank() :: 2]
    for number, micro_batch in enumerate(mine):
        replicas.last = number == len(mine) - 1
        model(micro_batch).square().sum().backward()
    replicas.wait()
    found = [p.grad.clone() for p in model.parameters()]
    alone = torch.autograd.grad(model(rows).square().sum(), list(model.parameters()))
    return found, list(alone)


@pytest.mark.parametrize("bucket_bytes", [1, 200, 10**6])
def test_math(two, bucket_bytes: int):
    for found, wanted in two.run(replicated, bucket_bytes):
        for mine, all_rows in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, all_rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings[-1] if settings else "lora")
def test_mechanism(two, settings: tuple[str, ...]):
    found = spread(two, "ddp", *settings)
    assert [process["bytes"] for process in found] == [formula("ddp", 2, *settings)] * 2
    assert found[0]["weights"] == alone(*settings)["weights"]  # nothing is saved
    assert worst(found[0]["gradients"], alone(*settings)["gradients"]) < 1e-6
    assert found[0]["norm"] == pytest.approx(alone(*settings)["norm"], rel=1e-6)


def test_switch():
    plan = resolve(steps.recipe_of("parallel.strategy=ddp"), processes=2)
    assert plan.parallel == {"strategy": "ddp", "data": 2}
    assert plan.training["gradient_accumulation_steps"] == 2  # of the window's four
    with pytest.raises(BadInput, match=r"3 processes cannot share the 4 micro-batches of a step evenly; set"):
        resolve(steps.recipe_of("parallel.strategy=ddp"), processes=3)
    recipe = steps.recipe_of("parallel.strategy=ddp", "tricks.gradient_accumulation=2", "train.batch_size=4")
    with pytest.raises(BadInput, match=r"multiple of 4: 4 with train.batch_size=2 keeps the 8 rows of a step"):
        resolve(recipe, processes=4)
    with pytest.raises(BadInput, match=r"needs two processes or more, and this is one; start it with cria launch"):
        resolve(steps.recipe_of("parallel.strategy=ddp"))
    with pytest.raises(BadInput, match=r"2 processes: each would train the whole recipe; set parallel.strategy=ddp"):
        resolve(steps.recipe_of(), processes=2)
