"""Sharded data parallelism: a piece of everything in each process."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.per_process import Live
from cria_tricks import models
from cria_tricks.bill.calls import totals
from cria_tricks.common.errors import BadInput
from cria_tricks.load import losses
from cria_tricks.load.model import load
from cria_tricks.models.pretrained import blocks_of
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import dtensor, fsdp
from cria_tricks.processes.world import World
from cria_tricks.resolve import resolve
from tests.helpers import prepare
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


@pytest.fixture(scope="session")
def untied(tmp_path_factory) -> Path:
    """Two blocks, between an embedding and a head that are two matrices, each far larger than a block."""
    from transformers import LlamaConfig, LlamaForCausalLM

    where = tmp_path_factory.mktemp("untied")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=8192, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(where)
    return where


UNTIED = [
    (),
    ("tricks.chunked_loss=true", "tricks.gradient_checkpointing=true"),
    ("tricks.peft=none",),
    ("tricks.peft=head",),
    ("tricks.peft=prompt_tuning", "prompt.tokens=4"),
]


@pytest.mark.parametrize("settings", UNTIED, ids=lambda settings: settings[0] if settings else "lora")
def test_an_untied_model_has_groups_of_its_own_at_both_ends(two, untied, settings: tuple[str, ...]):
    settings = (f"model={untied}", *settings)
    found = spread(two, "fsdp", *settings)
    sent = totals(fsdp.traffic(steps.recipe_of(*settings), find_shape(str(untied)), 2))
    assert [process["bytes"] for process in found] == [sent] * 2
    assert worst(found[0]["gradients"], alone(*settings)["gradients"]) < 1e-6


@pytest.mark.parametrize("peft", ["lora", "none"])
def test_both_reductions_give_the_same_gradients_for_other_bytes(two, peft):
    """Of two micro-batches in each process, one or both reduce gradients; weights are gathered as often."""
    settings = (f"tricks.peft={peft}",)
    found = {}
    for reduce in ("micro_batch", "step"):
        found[reduce] = spread(two, "fsdp", *settings, f"parallel.reduce={reduce}")[0]
        assert found[reduce]["bytes"] == formula(
            "fsdp", 2, *settings, "parallel.strategy=fsdp", f"parallel.reduce={reduce}"
        )
        assert worst(found[reduce]["gradients"], alone(*settings)["gradients"]) < 1e-6
    each, once = found["micro_batch"]["bytes"], found["step"]["bytes"]
    assert each["reduce_scatter"] == 2 * once["reduce_scatter"] > 0
    assert each["all_gather"] == once["all_gather"]


def one_step(folder: Path, ends_in_root: bool, data: int) -> tuple[float, int, list[torch.Tensor]]:
    """The loss of a step, its peak in a process, and its gradients; the ends are left in the root, or as we wrap."""
    from torch.distributed.fsdp import fully_shard

    _, plan, loaded = prepare(folder, "tricks.peft=lora", "lora.r=4")
    for name, parameter in loaded.model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    total = losses.LossSum(loaded.model, losses.full_loss_sum)
    world = World.of(data, "cpu")
    if ends_in_root:
        for module in (*blocks_of(total), total):
            fully_shard(module, mesh=world.mesh["data"])
    else:
        fsdp.spread(total, plan, world)
    live = Live()
    live.track_all(dtensor.own(parameter) for parameter in total.parameters())
    with live:
        ids = torch.arange(16)[None] + world.rank
        loss = total({"input_ids": ids, "labels": ids})
        loss.backward()
    return loss.item(), live.peak, [p.grad.full_tensor() for p in total.parameters() if p.requires_grad]


@pytest.mark.parametrize(("pool", "processes"), [("two", 2), ("four", 4)])
def test_groups_of_their_own_lower_the_peak_and_change_no_number(request, untied, pool, processes):
    """In the root both matrices are whole beside their pieces; apart, one of them is, with its buffer."""
    ranks = request.getfixturevalue(pool)
    before, after = (ranks.run(one_step, untied, in_root, processes) for in_root in (True, False))
    matrix = 4 * 8192 * 64
    print([f"{one[1] / 2**20:.1f} -> {two[1] / 2**20:.1f} MiB" for one, two in zip(before, after, strict=True)])
    for one, other in zip(before, after, strict=True):
        assert one[0] == other[0]
        assert all(map(torch.equal, one[2], other[2]))
        assert one[1] - other[1] > 0.9 * matrix


def dtypes(settings: tuple[str, ...], folder: Path) -> dict[str, Any]:
    """What FSDP will gather, reduce and cast, group by group; and the dtypes of trained weights and gradients."""
    recipe = steps.recipe_of(f"model={folder}", *settings, "parallel.strategy=fsdp")
    plan = resolve(recipe, processes=2)
    summed = losses.LossSum(load(plan, models.find(str(folder))).model, losses.full_loss_sum)
    total = fsdp.spread(summed, plan, World.of(2, "cpu"))
    ids = torch.arange(8)[None]
    with torch.autocast("cpu", torch.bfloat16):
        total({"input_ids": ids, "labels": ids}).backward()
    policies = {module._get_fsdp_state()._mp_policy for module in total.modules() if hasattr(module, "unshard")}
    trained = [parameter for parameter in total.parameters() if parameter.requires_grad]
    return {
        "policies": {(policy.param_dtype, policy.reduce_dtype) for policy in policies},
        "trained": {parameter.dtype for parameter in trained},
        "gradients": {parameter.grad.dtype for parameter in trained},
    }


@pytest.mark.parametrize("settings", [("tricks.precision=bf16",), ("tricks.precision=bf16", "tricks.peft=none")])
def test_weights_travel_as_stored_and_gradients_are_summed_in_fp32(two, untied, settings):
    fp32 = {torch.float32}
    assert two.run(dtypes, settings, untied)[0] == {
        "policies": {(None, torch.float32)}, "trained": fp32, "gradients": fp32,
    }  # fmt: skip


def test_a_choice_of_the_reduction_needs_fsdp():
    for strategy in ("none", "ddp", "tensor"):
        with pytest.raises(BadInput, match=rf"parallel.reduce=step with parallel.strategy={strategy}: only fsdp"):
            resolve(steps.recipe_of(f"parallel.strategy={strategy}", "parallel.reduce=step"), processes=2)


def test_switch():
    plan = resolve(steps.recipe_of("parallel.strategy=fsdp"), processes=2)
    assert plan.parallel == {"strategy": "fsdp", "data": 2, "reduce": "micro_batch"}
    once = resolve(steps.recipe_of("parallel.strategy=fsdp", "parallel.reduce=step"), processes=2)
    assert once.parallel["reduce"] == "step"
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
