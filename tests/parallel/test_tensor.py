"""Tensor parallelism: a part of each block's matrices in each process."""

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.measure.counting import CountCollectives
from cria_tricks.models import shape
from cria_tricks.parallel import dtensor, tensor
from cria_tricks.resolve import resolve
from tests.parallel import steps
from tests.parallel.strategies import alone, formula, spread, worst
from tests.sweeps import sample

CHECKPOINTED = "tricks.gradient_checkpointing=true"
ONLY_Q_AND_V = "lora.target_modules=q_proj,v_proj"
SETTINGS = [
    (),
    ("tricks.peft=none", CHECKPOINTED),
    (CHECKPOINTED, "tricks.fused_blocks=true", "tricks.fused_lora=true"),
    (ONLY_Q_AND_V, "tricks.gradient_checkpointing=1"),
    *sample(
        [
            ("tricks.chunked_loss=true", CHECKPOINTED),
            ("tricks.peft=none",),
            (ONLY_Q_AND_V,),
            (ONLY_Q_AND_V, CHECKPOINTED),
            ("lora.target_modules=gate_proj,down_proj",),
            ("tricks.fused_lora=true",),
        ],
        3,
    ),
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


def with_norms_and_biases() -> dict:
    """Loss and gradients of a model with norms of queries and keys, and with biases: whole, and cut."""
    from torch.distributed.device_mesh import init_device_mesh
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "attention_bias": True}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).double()  # some gradients are smaller than fp32's rounding
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    ids = torch.arange(20).view(2, 10)
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    for which in ("wanted", "found"):
        if which == "found":
            tensor.split(model, mesh)
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        if which == "found":
            tensor.add_up_partial(model.parameters(), mesh.get_group())
        gradients = dtensor.whole({name: p.grad.clone() for name, p in model.named_parameters()})
        found[which] = {"loss": loss.detach().numpy(), **{name: g.numpy() for name, g in gradients.items()}}
    return found


def test_norms_of_queries_and_keys_and_biases_get_their_whole_gradient(two):
    """A process has some heads, so a part of the norms' gradients; the bias of o is added once, to the sum."""
    for process in two.run(with_norms_and_biases):
        assert "model.layers.0.self_attn.o_proj.bias" in process["wanted"]
        assert worst(process["found"], process["wanted"]) < 1e-9


def sums_of_torchs_plan() -> tuple[int, int]:
    """All-reduces forward and backward, for a Llama of two blocks that the card's example cuts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    exec(tensor.PLAIN.replace('"cuda"', '"cpu"'), {"model": model})
    ids = torch.arange(20).view(2, 10)
    with CountCollectives() as forward:
        loss = model(input_ids=ids, labels=ids).loss
    with CountCollectives() as backward:
        loss.backward()
    return forward.calls["all_reduce"], backward.calls["all_reduce"]


def test_the_example_with_torch_alone_makes_two_sums_a_block_too(two):
    assert two.run(sums_of_torchs_plan) == [(4, 4)] * 2


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
        ("tricks.quantization=nf4", "packed bytes cannot be cut; use parallel.strategy=ddp"),
        ("tricks.quantization=int8", "weights are packed while the model loads"),
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
    with pytest.raises(
        BadInput, match="has 9 heads and 3 heads of keys and values, which 2 does not divide; use 3 processes"
    ):
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
