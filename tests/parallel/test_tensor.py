"""Tensor parallelism: a part of each block's matrices in each process."""

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.models import shape
from cria_tricks.parallel import tensor
from cria_tricks.resolve import resolve
from tests.parallel import steps
from tests.parallel.strategies import alone, formula, spread, worst

CHECKPOINTED = "tricks.gradient_checkpointing=true"
SETTINGS = [
    (),
    ("tricks.chunked_loss=true", CHECKPOINTED),
    ("tricks.peft=none",),
    ("tricks.peft=none", CHECKPOINTED),
    ("lora.target_modules=q_proj,v_proj",),
    ("lora.target_modules=q_proj,v_proj", CHECKPOINTED),
    ("lora.target_modules=q_proj,v_proj", "tricks.gradient_checkpointing=1"),
]


def by_reference() -> dict:
    """The reference's MLP, and the same in one process: results, and gradients of input and matrices."""
    draw = torch.Generator().manual_seed(0)
    x, up, down = (torch.randn(*shape, generator=draw) for shape in ((2, 3, 8), (12, 8), (8, 12)))
    results = []
    for compute in (tensor.mlp, lambda x, up, down: torch.nn.functional.gelu(x @ up.T) @ down.T):
        given = [t.clone().requires_grad_() for t in (x, up, down)]
        y = compute(*given)
        y.square().sum().backward()
        results.append([y.detach(), *(t.grad for t in given)])
    return {"found": results[0], "wanted": results[1]}


def test_math(two):
    found = two.run(by_reference)
    for process in found:
        for mine, whole in zip(process["found"][:2], process["wanted"][:2], strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-5, atol=1e-4)
    for matrix in (2, 3):  # a process has gradients for its part, and zeros for the other's
        together = sum(process["found"][matrix] for process in found)
        torch.testing.assert_close(together, found[0]["wanted"][matrix], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings[-1] if settings else "lora")
def test_mechanism(two, settings: tuple[str, ...]):
    found = spread(two, "tensor", *settings)
    assert [process["bytes"] for process in found] == [formula("tensor", 2, *settings)] * 2
    assert found[0]["learning"] < alone(*settings)["learning"]
    assert found[0]["weights"] < alone(*settings)["weights"]
    assert worst(found[0]["gradients"], alone(*settings)["gradients"]) < 3e-6
    assert found[0]["norm"] == pytest.approx(alone(*settings)["norm"], rel=1e-6)


def test_in_bf16_the_parts_are_rounded_before_they_are_summed(two):
    bf16 = "tricks.precision=bf16"
    found = spread(two, "tensor", bf16)
    assert found[0]["bytes"] == formula("tensor", 2, bf16)
    assert worst(found[0]["gradients"], alone(bf16)["gradients"]) < 0.05  # bf16 has 8 bits


def test_switch():
    plan = resolve(steps.recipe_of("parallel.strategy=tensor"), processes=2)
    assert plan.parallel == {"strategy": "tensor", "data": 1}
    assert plan.training["gradient_accumulation_steps"] == 4  # every process reads all rows
    for setting, why in (
        ("tricks.quantization=nf4", "packed weights have no rows and columns to share; use parallel.strategy=ddp"),
        ("tricks.quantization=int8", "packed weights have no rows and columns"),
        ("tricks.peft=prompt_tuning", "only LoRA's matrices, or all, are cut"),
        ("tricks.optimizer=adamw_8bit", "kernels take no sharded tensor"),
        ("tricks.precision=fp16", "no mixture of whole and cut gradients; use bf16 or fp32"),
        ("tricks.compile=true", "use parallel.strategy=ddp"),
    ):
        with pytest.raises(BadInput, match=rf"parallel.strategy=tensor with {setting}: .*{why}"):
            resolve(steps.recipe_of("parallel.strategy=tensor", setting), processes=2)
    with pytest.raises(BadInput, match="lora.dora=true: DoRA's norms need whole columns"):
        resolve(steps.recipe_of("parallel.strategy=tensor", "lora.dora=true"), processes=2)


def test_heads_that_do_not_divide_are_refused_with_a_number_that_does():
    with pytest.raises(BadInput, match="9 heads, 3 of keys and values.* which 2 does not divide; use 3 processes"):
        shape.refuse_undivided("smollm2", 9, 3, 1536, 2)
    with pytest.raises(BadInput, match="use parallel.strategy=ddp or fsdp"):
        shape.refuse_undivided("odd", 7, 1, 100, 2)
    shape.refuse_undivided("smollm2", 9, 3, 1536, 3)


def test_an_mlp_that_does_not_divide_is_refused_too():
    with pytest.raises(BadInput, match="101 columns in its MLP, which 2 does not divide; use parallel"):
        shape.refuse_undivided("odd", 8, 4, 101, 2)
    with pytest.raises(BadInput, match="66 columns in its MLP, which 4 does not divide; use 2 processes"):
        shape.refuse_undivided("odd", 8, 4, 66, 4)
    shape.refuse_undivided("even", 8, 4, 64, 4)
