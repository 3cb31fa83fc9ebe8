"""Sequence parallelism beside tensor parallelism: the residual stream in pieces of tokens."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cria_tricks import recipes
from cria_tricks.bill import moved_bytes
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.measure.counting import Traffic
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import dtensor, sequence, tensor
from cria_tricks.predict.links import compute_seconds
from cria_tricks.predict.per_process import per_process
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import folds
from tests.hardware import models
from tests.hardware.test_cost import MODES, WIDE
from tests.parallel import steps
from tests.parallel.strategies import SHAPE, alone, formula, spread, worst
from tests.sweeps import sample

ON = "parallel.sequence=true"
ODD = "data.max_length=23"
CHECKPOINTED = "tricks.gradient_checkpointing=true"
ONLY_Q_AND_V = "lora.target_modules=q_proj,v_proj"
FUSED = ("tricks.fused_blocks=true", "tricks.fused_lora=true")
SETTINGS = [
    (ODD,),
    (ODD, "tricks.peft=none", CHECKPOINTED),
    (ODD, *FUSED, CHECKPOINTED),
    ("train.batch_size=3", "data.max_length=9", "tricks.peft=none"),
    *sample(
        [
            ("tricks.peft=none",),
            (ODD, "tricks.chunked_loss=true", CHECKPOINTED),
            (ODD, ONLY_Q_AND_V, CHECKPOINTED),
            (ONLY_Q_AND_V, "tricks.gradient_checkpointing=1"),
            (ODD, "lora.target_modules=gate_proj,down_proj"),
            (ODD, *FUSED),
        ],
        3,
    ),
]


def operators(n: int) -> dict[str, tuple[list[float], list[float]]]:
    """Each operator's result and gradient, for n tokens that are the numbers 0, 1, ..."""
    rank = torch.distributed.get_rank()
    size = torch.distributed.get_world_size()
    m = -(-n // size)
    token = torch.arange(float(size * m))[:, None]
    mine = token[rank * m : (rank + 1) * m]
    found = {}
    for name, given, run in (
        ("Gathered", mine, lambda x: sequence.Gathered.apply(x, n)),
        ("Joined", mine, lambda x: sequence.Joined.apply(x, n)),
        ("Scattered", token[:n] * (rank + 1), sequence.Scattered.apply),
        ("Cut", token[:n], sequence.Cut.apply),
    ):
        x = given.clone().requires_grad_()
        y = run(x)
        whole = len(y) == n
        weight = token[:n] if whole else mine
        (y * weight).sum().backward()
        found[name] = (y.detach().flatten().tolist(), x.grad.flatten().tolist())
    return found


@pytest.mark.parametrize("n", [4, 3])
def test_math(two, n):
    """Three tokens fill three of four places in two processes; zeros are in the last one."""
    first, second = two.run(operators, n)
    whole = list(map(float, range(n)))
    pieces = [0.0, 1.0], [2.0, 3.0] if n == 4 else [2.0, 0.0]
    for found, piece in zip((first, second), pieces, strict=True):
        gathered, summed = found["Gathered"]
        assert gathered == whole
        assert summed == [2 * one for one in piece]  # both processes gave the same gradient
        assert found["Joined"] == (whole, piece)
        scattered, spread_out = found["Scattered"]
        assert scattered == [3 * one for one in piece]  # once and twice the tokens
        assert spread_out == whole
        cut, back = found["Cut"]
        assert cut == piece
        assert back == whole


@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: ",".join(settings[-2:]))
def test_mechanism(two, settings: tuple[str, ...]):
    found = spread(two, "tensor", ON, *settings)
    assert [process["bytes"] for process in found] == [formula("tensor", 2, ON, *settings)] * 2
    assert worst(found[0]["gradients"], alone(*settings)["gradients"]) < 3e-6
    assert found[0]["norm"] == pytest.approx(alone(*settings)["norm"], rel=1e-6)


@pytest.mark.parametrize("settings", [(ODD, "tricks.peft=none"), (ODD, CHECKPOINTED)], ids=["all weights", "lora"])
def test_a_grid_of_processes(four, settings: tuple[str, ...]):
    found = spread(four, "ddp_tensor", ON, *settings)
    assert [process["bytes"] for process in found] == [formula("ddp_tensor", 4, ON, *settings)] * 4
    assert worst(found[0]["gradients"], alone(*settings)["gradients"]) < 3e-6


def model_of(kind: str):
    """A model of two blocks in float64, because some gradients are smaller than fp32's rounding."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 50, "head_dim": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "attention_bias": True}
    config = AutoConfig.for_model(kind, **sizes, **heads, pad_token_id=0)
    kernel = "eager" if kind == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=kernel).double()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return model


def batch_of(rows: str) -> dict[str, torch.Tensor]:
    """Two rows of 11 tokens: the second filled up to that on the right, or two documents of 4 and 7 tokens in each."""
    ids = torch.arange(1, 23).view(2, 11)
    labels = ids.clone()
    if rows == "packed":
        return {"input_ids": ids, "labels": labels, "position_ids": torch.tensor([[*range(4), *range(7)]] * 2)}
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    labels[1, 6:] = -100
    return {"input_ids": ids * mask, "labels": labels, "attention_mask": mask}


def whole_and_in_pieces(kind: str, rows: str) -> dict:
    """Loss and gradients of a model, in one process and in all, and what the norms saved."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model = model_of(kind)
    seen: list[int] = []
    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_hook(lambda _, given, made: seen.append(made.shape[:-1].numel()))
    found = {}
    for which in ("wanted", "found"):
        if which == "found":
            tensor.split(model, mesh, sequence=True)
        model.zero_grad()
        seen.clear()
        loss = model(**batch_of(rows)).loss
        loss.backward()
        if which == "found":
            tensor.add_up_partial(model.parameters(), mesh.get_group())
        gradients = dtensor.whole({name: p.grad.clone() for name, p in model.named_parameters()})
        found[which] = {"loss": loss.detach().numpy(), **{name: g.numpy() for name, g in gradients.items()}}
        found[f"tokens {which}"] = set(seen)
    return found


@pytest.mark.parametrize("rows", ["padded", "packed"])
@pytest.mark.parametrize(("pool", "kind"), [("two", "qwen3"), ("four", "llama"), ("four", "gemma2")])
def test_losses_and_gradients_of_padded_and_packed_rows_of_odd_lengths(request, pool, kind, rows):
    """22 tokens: 11 in each of two processes, and 6 in each of four, of which the last has 4."""
    ranks = request.getfixturevalue(pool)
    for process in ranks.run(whole_and_in_pieces, kind, rows):
        assert process["tokens wanted"] == {22}
        assert process["tokens found"] == {-(-22 // ranks.size)}
        # Gemma's norms give fp32, whatever they are given.
        assert worst(process["found"], process["wanted"]) < (1e-6 if kind == "gemma2" else 1e-9)


class Between(Traffic):
    """The traffic between products, without collectives and the copies that they need."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        copies = ("clone", "copy_", "new_empty", "select_backward")
        if func.name().startswith("c10d") or func.overloadpacket.__name__ in copies:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def moved(recipe: Recipe, in_pieces: bool, layers: int) -> list[int]:
    """Bytes that a process moves in the forward pass and in the backward pass of a row of 64 tokens."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    model, plan = models.model(recipe, "sdpa", **WIDE, num_hidden_layers=layers)
    tensor.split(model, mesh, sequence=in_pieces)
    with Between() as forward:
        loss = models.loss(model, plan, models.batch(1, 64))
    with Between() as backward:
        loss.backward()
    return [forward.others, backward.others]


@pytest.mark.parametrize("mode", ["16 bits, lean", "16 bits, lean, blocks", "full, 16-bit products", "full"])
def test_a_block_moves_so_many_bytes_less(two, mode):
    recipe = with_settings(Recipe(), MODES[mode])
    step = folds.step_of(recipe, models.shape(**WIDE), T4)
    whole, divided = moved_bytes.between(step), moved_bytes.between(replace(step, stream_pieces=2))
    for way, name in enumerate(("forward", "backward")):
        counted = []
        for in_pieces in (False, True):
            fewer, more = (two.run(moved, recipe, in_pieces, layers)[0][way] for layers in (2, 3))
            counted.append((more - fewer) / 64)
        assert whole[way] - divided[way] == pytest.approx(counted[0] - counted[1], rel=0.02), name


def test_bytes_on_the_wire_stay_those_of_the_sums():
    """A gather and a reduce-scatter send as much as an all-reduce; two gathers at the ends of the stack come on top."""
    recipe = steps.recipe_of("tricks.peft=none")
    plain = tensor.traffic(recipe, SHAPE, 4)
    found = tensor.traffic(with_settings(recipe, [ON]), SHAPE, 4)
    ends = [call for call in found if call.why.startswith("the last hidden states")]
    assert [call.times for call in ends] == [2 * recipe.tricks.gradient_accumulation]
    norms = [call for call in found if call.kind == "all_reduce"]
    assert [call.bytes for call in norms] == [4 * SHAPE.width * (2 * SHAPE.layers + 1)]
    beside = sum(call.sent for call in (*ends, *norms))
    assert sum(call.sent for call in found) - beside == sum(call.sent for call in plain)


@pytest.mark.parametrize(("tokens", "processes"), [(2048, 8), (8192, 2), (8192, 8), (32768, 2), (32768, 8)])
def test_the_page_has_the_estimates(tokens, processes):
    card = CARDS["a100"].device
    plain = ["tricks.quantization=none", "tricks.double_quantization=false", "tricks.optimizer=adamw"]
    shape = find_shape("llama-3.2-1b")
    peaks, sent, computed = [], [], []
    for more in ([], [ON]):
        settings = [*plain, "tricks.paged_optimizer=false", f"data.max_length={tokens}", *more]
        recipe = with_settings(recipes.capstone(card), settings)
        peaks.append(f"{per_process(recipe, shape, card, 'tensor', processes).peak_bytes / 2**20:,.0f} MiB")
        sent.append(f"{sum(call.sent for call in tensor.traffic(recipe, shape, processes)) / 1e9:.0f} GB")
        computed.append(f"{compute_seconds(recipe, shape, CARDS['a100'], 'tensor', processes):.1f} s")
    row = " | ".join([f"{tokens:,}", str(processes), *peaks, *sent])
    page = Path(__file__).parents[2].joinpath("docs/reference/parallel.md").read_text()
    assert f"| {row} |" in page
    if (tokens, processes) == (8192, 8):
        assert f"compute {computed[1]} of a\nstep instead of {computed[0]}" in page


def test_switch():
    for strategy, processes in (("tensor", 2), ("ddp_tensor", 4)):
        plan = resolve(steps.recipe_of(f"parallel.strategy={strategy}", ON), processes=processes)
        assert plan.parallel == {"strategy": strategy, "data": processes // 2, "sequence": True}
    for strategy in ("none", "ddp", "fsdp", "context", "pipeline"):
        with pytest.raises(BadInput, match=rf"parallel.sequence=true with parallel.strategy={strategy}: it divides"):
            resolve(steps.recipe_of(f"parallel.strategy={strategy}", ON), processes=1)
