"""Sharded data parallelism: a piece of everything in each process."""

import copy

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.parallel import fsdp
from cria_tricks.resolve import resolve
from tests.parallel import steps
from tests.parallel.strategies import alone, formula, spread, worst

SETTINGS = [
    (),
    ("tricks.chunked_loss=true", "tricks.gradient_checkpointing=true"),
    ("tricks.gradient_checkpointing=1", "tricks.attention=sdpa", "tricks.keep_attention=true"),
    ("tricks.gradient_checkpointing=1", "tricks.fused_lora=true", "tricks.fused_blocks=true"),
    ("tricks.peft=none",),
    ("tricks.peft=head",),
    ("tricks.quantization=nf4", "tricks.double_quantization=true"),
    ("tricks.quantization=nf4", "lora.init=loftq"),
    ("tricks.quantization=nf4", "tricks.fused_lora=true"),
    ("tricks.gradient_checkpointing=1", "tricks.tiled_mlp=5"),
    ("tricks.peft=none", "tricks.tiled_mlp=5"),
]


def sharded() -> dict:
    """A stack of the reference's blocks, beside the same one whole: gradients, and what autograd keeps."""
    import torch.distributed as dist

    torch.manual_seed(0)
    blocks = [torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.GELU(), torch.nn.Linear(9, 7)) for _ in range(3)]
    whole = torch.nn.Sequential(*copy.deepcopy(blocks))
    cut = torch.nn.Sequential(*map(fsdp.Sharded, blocks))
    rows = torch.randn(4, 7)
    kept: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        loss = cut(rows[dist.get_rank() :: 2]).square().sum()
    loss.backward()
    whole(rows).square().sum().backward()
    flat = [torch.cat([p.grad.flatten() for p in block.parameters()]) for block in whole]
    padded = [torch.nn.functional.pad(g, (0, -g.numel() % 2)).chunk(2)[dist.get_rank()] for g in flat]
    weights = sum(p.nbytes for p in whole[0].parameters())
    return {
        "found": [block.piece.grad for block in cut],
        "wanted": padded,
        "own": sum(p.nbytes for p in cut.parameters()),
        "kept": max(kept),
        "block": weights,
        "all": 3 * weights,
    }


def test_math(two):
    for process in two.run(sharded):
        for found, wanted in zip(process["found"], process["wanted"], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
        assert process["own"] == process["all"] / 2
        assert process["kept"] < process["block"]  # no gathered weight waits for the backward pass


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings[-1] if settings else "lora")
def test_mechanism(two, settings: tuple[str, ...]):
    found = spread(two, "fsdp", *settings)
    assert [process["bytes"] for process in found] == [formula("fsdp", 2, *settings)] * 2
    assert found[0]["weights"] == pytest.approx(alone(*settings)["weights"] / 2, rel=1e-3)
    assert found[0]["learning"] == alone(*settings)["learning"] / 2
    assert worst(found[0]["gradients"], alone(*settings)["gradients"]) < 1e-6
    assert found[0]["norm"] == pytest.approx(alone(*settings)["norm"], rel=1e-6)


def test_switch():
    plan = resolve(steps.recipe_of("parallel.strategy=fsdp"), processes=2)
    assert plan.parallel == {"strategy": "fsdp", "data": 2}
    assert plan.training["gradient_accumulation_steps"] == 2
    for setting, why in (
        ("tricks.optimizer=adamw_8bit", "kernels take no sharded tensor; use optimizer=adamw"),
        ("tricks.paged_optimizer=true", "kernels take no sharded tensor; leave it off"),
        ("tricks.quantization=int8", "its scales would stay behind; use quantization=nf4"),
        ("tricks.activation_offload=true", "cannot tell gathered weights from activations"),
        ("tricks.compile=true", "use parallel.strategy=ddp"),
    ):
        with pytest.raises(BadInput, match=rf"parallel.strategy=fsdp with {setting}: .*{why}"):
            resolve(steps.recipe_of("parallel.strategy=fsdp", setting), processes=2)


def eight_bit_step() -> str:
    """What bitsandbytes says to a sharded matrix."""
    import bitsandbytes as bnb
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(torch.nn.Linear(128, 128))
    optimizer = bnb.optim.AdamW8bit(model.parameters())
    model(torch.randn(2, 128)).sum().backward()
    try:
        optimizer.step()
    except Exception as error:
        return str(error)
    return ""


def test_the_refused_optimizer_really_fails(two):
    assert all("DTensor" in said for said in two.run(eight_bit_step))
