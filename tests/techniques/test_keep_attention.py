"""Kept attention: the same bits, B T (H D a + 4 H) bytes more a block, and one run of the kernel in place of two."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cria_tricks.bill.block import kept, points
from cria_tricks.bill.operation import ATTENDED, LOG_SUM_EXP
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load.refusals import refuse
from cria_tricks.measure.counting import SavedBytes, flops, peak_bytes
from cria_tricks.models.shape import facts_of, find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import folds
from cria_tricks.techniques import gradient_checkpointing, keep_attention
from cria_tricks.techniques.keep_attention import _Attend, keeping_attention
from tests.helpers import prepare, train
from tests.techniques.attention import Kernels
from tests.techniques.test_gradient_checkpointing import BLOCKS, four_blocks, learnt  # noqa: F401 (a fixture)

B, H, T, D, L = 2, 2, 16, 8, 3  # batch, heads, tokens, width of a head, blocks
N = B * T
OUT, LSE = 4 * N * H * D, 4 * N * H
"""What attention leaves for its backward pass besides queries, keys and values [bytes]."""
ON = ("tricks.gradient_checkpointing=true", "tricks.attention=sdpa")
KEEP = "tricks.keep_attention=true"


class Block(nn.Module):
    """Queries, keys and values, attention, and a product with dropout before it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(H * D, 3 * H * D) * 0.2)
        self.out = nn.Parameter(torch.randn(H * D, H * D) * 0.2)

    def forward(self, x_BTD, attend):
        heads = ((x_BTD @ part).unflatten(-1, (H, D)).transpose(1, 2) for part in self.qkv.chunk(3, dim=1))
        attended = attend(*heads).transpose(1, 2).flatten(2)
        return x_BTD + nn.functional.dropout(attended, 0.1) @ self.out


class Twice(nn.Module):
    """A block whose attention runs as often as the block does."""

    def __init__(self, block: Block):
        super().__init__()
        self.block = block

    def forward(self, x_BTD):
        return self.block(x_BTD, lambda *q_k_v: _Attend.apply(*q_k_v, []))


WAYS = {
    "plain": lambda block, x: Twice(block)(x),
    "checkpointed": lambda block, x: gradient_checkpointing.checkpointed(Twice(block), x),
    "kept": keeping_attention,
}


def stack(blocks: int = L) -> tuple[nn.ModuleList, torch.Tensor]:
    torch.manual_seed(0)
    return nn.ModuleList(Block() for _ in range(blocks)), torch.randn(B, T, H * D, requires_grad=True)


def forward(way: str, blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for block in blocks:
        x = WAYS[way](block, x)
    return x


def step(way: str, blocks: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    y = forward(way, blocks, x)
    loss = y.sum()
    loss.backward()
    return loss


@pytest.mark.parametrize("way", ["checkpointed", "kept"])
def test_math(way):
    """Dropout is on; loss, gradients and the random state afterwards are equal bit for bit."""
    found = {}
    for name in ("plain", way):
        blocks, x = stack()
        loss = step(name, blocks, x)
        found[name] = [loss.detach(), x.grad, *(p.grad for p in blocks.parameters()), torch.get_rng_state()]
    assert len(found[way]) == 3 + 2 * L
    assert all(map(torch.equal, found["plain"], found[way]))


def test_math_of_the_backward_pass():
    """From the output and the log-sum-exp alone it is that of torch's own attention, in double precision."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(B, H, T, D, dtype=torch.float64, requires_grad=True) for _ in range(3))
    ours = _Attend.apply(q, k, v, [])
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ours, torchs)
    weight = torch.randn_like(ours)
    for found, expected in zip(
        *(torch.autograd.grad((y * weight).sum(), (q, k, v)) for y in (ours, torchs)), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_mechanism():
    """After the forward pass a block keeps its input, attention's output and the log-sum-exp, and nothing else."""
    s = 4 * N * H * D
    alive = {}
    for way, more in (("checkpointed", 0), ("kept", OUT + LSE)):
        for count in (L - 1, L):
            blocks, x = stack(count)
            alive[way, count] = peak_bytes(partial(forward, way, blocks, x), (x, *blocks.parameters()))
        assert alive[way, L] - alive[way, L - 1] == s + more
    # Nothing of it is left when the backward pass is over, and the peak there is that of one open block.
    blocks, x = stack()
    with SavedBytes(besides=blocks.parameters()) as saved:
        step("kept", blocks, x)
    assert saved.now == 0


def test_mechanism_flops():
    """Two of attention's products fewer in each block: the scores, and their product with the values."""
    two = 2 * 2 * B * H * T * T * D
    found = {way: flops(partial(step, way, *stack())) for way in WAYS}
    once = L * (2 * N * H * D * 4 * H * D + two)
    assert found["checkpointed"] - found["plain"] == once
    assert found["checkpointed"] - found["kept"] == L * two


def test_mechanism_is_what_the_kernel_returns(four_blocks, rows):  # noqa: F811
    """The kernel runs once a block and step; without the toggle twice. What is kept is billed to the byte."""
    runs = {}
    for extra in ((), (KEEP,)):
        with Kernels() as seen:
            learnt(four_blocks, rows, *ON, *extra)
        runs[extra] = seen.runs.total()
    assert runs == {(): 2 * BLOCKS, (KEEP,): BLOCKS}
    tokens = len(rows[0]["input_ids"])
    shape = find_shape(str(four_blocks))
    recipe = with_settings(Recipe(), [*ON, KEEP])
    memory = folds.estimate(recipe, shape, resolve(recipe).device, tokens).step
    saved = kept(memory.learning_operations(memory))
    assert saved[ATTENDED] + saved[LOG_SUM_EXP] == seen.bytes == tokens * (64 * 4 + 4 * 4)


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-2-7b"])
@pytest.mark.parametrize("k", [1, 8, 16, True])
def test_mechanism_of_the_bill(k, model):
    """The card's figure: 8.25 MiB a checkpointed block for Llama-3.2-1B; the work of two products less for each."""
    shape, settings = find_shape(model), [*ON, f"tricks.gradient_checkpointing={k}".lower(), "tricks.expand_kv=true"]
    settings += ["tricks.precision=fp16", "tricks.peft=lora"]
    off, on = (with_settings(Recipe(), [*settings, *extra]) for extra in ([], [KEEP]))
    blocks = shape.layers if k is True else k
    saved = []
    for recipe in (off, on):
        memory = folds.estimate(recipe, shape, T4)
        loss = next(moment for moment in memory.moments if moment.name == "loss")
        saved.append(sum(line.bytes for line in loss.lines if line.name == "saved activations"))
    a_block = 2048 * (shape.query_width * 2 + 4 * shape.heads)
    assert saved[1] - saved[0] == blocks * a_block
    if model == "llama-3.2-1b":
        assert a_block == 8.25 * 2**20
    parts = [{part.name: part for part in folds.time_of(recipe, shape, CARDS["t4"]).parts} for recipe in (off, on)]
    less = parts[0]["attention"].flops - parts[1]["attention"].flops
    assert less == blocks * 2 * 2 * shape.query_width * 2048**2 // 2, "half of the pairs are hidden"
    for name in parts[0].keys() - {"attention"}:
        assert parts[0][name] == parts[1][name]


def test_mechanism_of_the_open_block():
    """While a block is recomputed up to its attention, what attention has left is alive beside it."""
    shape = find_shape("llama-3.2-1b")
    settings = [*ON, "tricks.expand_kv=true", "tricks.precision=fp16", "tricks.peft=lora"]
    walks = []
    for extra in ([], [KEEP]):
        memory = folds.step_of(with_settings(Recipe(), [*settings, *extra]), shape, T4)
        walks.append(points(memory, memory.learning_operations(memory)))
    more = {new.operation: new.bytes - old.bytes for old, new in zip(*walks, strict=True)}
    left = int(8.25 * 2**20)
    assert more.pop("forward pass of first norm") == left
    for name in ("q_proj", "k_proj", "v_proj", "rotary positions"):
        assert more.pop(f"forward pass of {name}") == left
    assert set(more.values()) == {0}


MODELS = {
    "all weights": (),
    "lora": ("tricks.peft=lora", "lora.dropout=0.1"),
    "lora, bf16": ("tricks.peft=lora", "lora.dropout=0.1", "tricks.precision=bf16"),
    "lora, NF4": ("tricks.peft=lora", "lora.dropout=0.1", "tricks.quantization=nf4", "tricks.chunked_loss=true"),
    "repeated keys": ("tricks.expand_kv=true",),
}


@pytest.mark.parametrize("settings", MODELS.values(), ids=MODELS.keys())
def test_switch(settings, four_blocks, rows):  # noqa: F811
    """A real model has the bits of no checkpointing, for every k, while its blocks run twice and the kernel once."""
    _, plain = learnt(four_blocks, rows, "tricks.attention=sdpa", *settings)
    for k in range(1, BLOCKS + 1):
        with Kernels() as seen:
            sets = (*ON, f"tricks.gradient_checkpointing={k}", KEEP, *settings)
            runs, found = learnt(four_blocks, rows, *sets)
        assert runs == [2] * k + [1] * (BLOCKS - k)
        assert seen.runs.total() == BLOCKS
        assert len(found) == len(plain)
        assert all(map(torch.equal, found, plain))


def test_switch_trains_as_without(tiny_model, rows, tmp_path):
    """Two rows with a mask, in a run: the same losses."""
    sets = ("tricks.peft=lora", "lora.dropout=0.1", "train.batch_size=2", "train.max_steps=3", *ON)
    losses = []
    for number, extra in enumerate(((), (KEEP,))):
        run, _ = train(tiny_model, rows, tmp_path / str(number), *sets, *extra)
        losses.append([entry["loss"] for entry in run.training])
    assert losses[0] == losses[1]


def test_the_contexts_keep_nothing_without_a_kernel():
    """What torch computes in many operations is refused when it runs, whatever was planned."""
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(BadInput, match="^tricks.keep_attention=true: no fused attention kernel ran here, so "):
        checkpoint(torch.tanh, x, use_reentrant=False, context_fn=keep_attention.contexts)


@pytest.mark.parametrize(
    ("card", "settings", "said"),
    [
        ("t4", ["tricks.precision=fp16"], "tricks.expand_kv=true, or"),
        ("t4", [], "tricks.expand_kv=true, or"),
        ("t4", ["tricks.precision=fp16", "tricks.expand_kv=true"], ""),
        ("t4", ["tricks.precision=fp16", "train.batch_size=2"], ""),
        ("a100", ["tricks.precision=bf16"], ""),
        ("a100", [], "tricks.expand_kv=true, or"),
    ],
)
def test_a_card_without_a_fused_kernel_for_the_model_is_refused(card, settings, said):
    """Rows without a mask and shared key heads, which torch's memory-efficient kernel does not take."""
    recipe = with_settings(Recipe(), [*ON, KEEP, *settings])
    plan = resolve(recipe, CARDS[card].device)
    shape = find_shape("llama-3.2-1b")
    if not said:
        refuse(plan, facts_of(shape), 1)
        assert folds.estimate(recipe, shape, CARDS[card].device).step.kernel in ("flash", "memory-efficient")
        return
    with pytest.raises(BadInput, match=f"^tricks.keep_attention=true: .* has no fused attention kernel .*{said}"):
        refuse(plan, facts_of(shape), 1)
    assert folds.estimate(recipe, shape, CARDS[card].device).step.kernel == "math"


@pytest.mark.parametrize("strategy", ["tensor", "ddp_tensor"])
def test_heads_that_processes_share_are_refused(strategy):
    recipe = with_settings(Recipe(), [*ON, KEEP, f"parallel.strategy={strategy}", "tricks.peft=lora"])
    with pytest.raises(BadInput, match="^tricks.keep_attention=true: the heads of a block are shared .*; use parallel"):
        resolve(recipe, processes=4)


def test_prepared_blocks_have_the_contexts(four_blocks):  # noqa: F811
    _, plan, loaded = prepare(four_blocks, *ON, KEEP)
    assert plan.checkpointing == {
        "blocks": "all",
        "keep_attention": "techniques.keep_attention.contexts",
        "masked": False,
    }
    for layer in loaded.model.model.layers:
        assert layer._gradient_checkpointing_func.keywords["context_fn"] is keep_attention.contexts
