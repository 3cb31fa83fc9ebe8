"""Layer by layer: the bits of micro-batches one by one, each streamed block fetched once a window and pass."""

import pytest
import torch
from torch import nn

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.cards import CARDS
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import folds
from cria_tricks.techniques.layer_by_layer import one_pass
from cria_tricks.techniques.stream_layers import CopiesOnCpu
from tests.helpers import train, trained_weights
from tests.sweeps import sample
from tests.techniques.test_stream_layers import BLOCKS, ON, SAME, SETS, STEPS, Block, blocks, deep, streamed  # noqa: F401

K = 3


class Model(nn.Module):
    """An embedding, blocks that also get the positions, and a head."""

    def __init__(self, made: list[nn.Module]):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Parameter(torch.randn(9, 16))
        self.blocks = nn.ModuleList(made)
        self.head = nn.Linear(16, 9)

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding[ids]
        for number, block in enumerate(self.blocks):
            x = block(x, positions=torch.arange(len(ids)), layer=number)
        return nn.functional.cross_entropy(self.head(x), ids.roll(1), reduction="sum")


class Moving(Block):
    """A block whose result depends on its further arguments."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor, layer: int) -> torch.Tensor:
        return super().forward(x + positions[:, None] / (layer + 1))


def model() -> Model:
    torch.manual_seed(0)
    return Model([Moving() for _ in range(BLOCKS)])


def windows() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(2)
    return [torch.randint(9, (length,), generator=draw) for length in (5, 7, 4)]


def test_math():
    """Losses and gradients of a window of ragged micro-batches equal those one by one, bit for bit."""
    alone, ours = model(), model()
    one_by_one = []
    for ids in windows():
        loss = alone.loss(ids)
        loss.backward()
        one_by_one.append(loss.detach())
    together = one_pass(list(ours.blocks), [lambda ids=ids: ours.loss(ids) for ids in windows()], torch.Tensor.backward)
    assert all(map(torch.equal, one_by_one, together))
    pairs = [(one.grad, other.grad) for one, other in zip(alone.parameters(), ours.parameters(), strict=True)]
    assert sum(one is not None for one, _ in pairs) == BLOCKS + 3
    assert all(torch.equal(one, other) for one, other in pairs if one is not None)
    assert not any("forward" in vars(block) for block in ours.blocks), "the blocks are as they were"


def test_the_blocks_are_as_they_were_after_an_error():
    ours = model()

    def fails() -> torch.Tensor:
        ours.loss(torch.arange(4))
        raise ValueError("after the blocks")

    with pytest.raises(ValueError, match="after the blocks"):
        one_pass(list(ours.blocks), [fails], torch.Tensor.backward)
    assert not any("forward" in vars(block) for block in ours.blocks)


def test_mechanism():
    """A window of 3 fetches L - 2 blocks a pass, as one micro-batch does; one by one it would fetch 3 times as many."""
    made, fetching = streamed(blocks(), CopiesOnCpu())
    through = Plain(made)
    x = [torch.ones(4, 16, requires_grad=True) for _ in range(K)]
    counts = []
    for _ in range(2):
        before = fetching.fetched
        one_pass(made, [lambda one=one: through.loss(one) for one in x], torch.Tensor.backward)
        counts.append(fetching.fetched - before)
    before = fetching.fetched
    for one in x:
        through.loss(one).backward()
    assert counts[1] == 2 * (BLOCKS - 2)
    assert fetching.fetched - before == K * 2 * (BLOCKS - 2)


class Plain:
    """Blocks that are checkpointed inside their own forward, as transformers does it."""

    def __init__(self, made: list[nn.Module]):
        self.blocks = made
        for block in made:
            block.__class__ = Checkpointed

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


class Checkpointed(Block):
    """A block that runs again in the backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("name", sample(["fp32", "bf16", "nf4", "fused"], 2))
def test_switch(deep, rows, tmp_path, name):  # noqa: F811
    """Losses, gradients' norms and weights of a run equal those of micro-batches one by one, bit for bit."""
    sets = [one for one in (*ON, *SETS[name]) if "accumulation" not in one]
    sets += ["tricks.gradient_accumulation=3", "train.save_steps=1000", "train.eval_steps=3"]
    sets.append(f"train.max_steps={STEPS}")
    runs = {}
    for order in ("false", "true"):
        more = ("tricks.stream_layers=true", f"tricks.layer_by_layer={order}")
        run, loaded = train(deep, rows, tmp_path / order, *sets, *more, eval_rows=rows[:3])
        said = [{key: value for key, value in one.items() if key in SAME} for one in run.history]
        runs[order] = said, trained_weights(loaded), run.attention_kernel
    assert runs["true"][0] == runs["false"][0]
    assert runs["true"][2] == runs["false"][2]
    for key, weight in runs["false"][1].items():
        assert torch.equal(runs["true"][1][key], weight), key


def test_where_it_has_no_effect_it_says_so():
    for sets in (["tricks.gradient_accumulation=8"], ["tricks.stream_layers=true"]):
        plan = resolve(with_settings(Recipe(), [*ON, *sets, "tricks.layer_by_layer=true"]), CARDS["t4"].device)
        assert "layer_by_layer has no effect" in " ".join(plan.warnings)
        assert "layer_by_layer" not in plan.streaming
    wrong = ["tricks.stream_layers=true", "tricks.activation_offload=overlapped", "tricks.layer_by_layer=true"]
    with pytest.raises(BadInput, match="follows one micro-batch"):
        resolve(with_settings(Recipe(), [*ON, *wrong, "tricks.gradient_accumulation=8"]), CARDS["t4"].device)


def test_mechanism_bill():
    """A window of 8: one eighth of the fetches a micro-batch, and 8 times the block inputs."""
    shape = find_shape("llama-3.1-8b")
    sets = [*ON, "tricks.quantization=nf4", "tricks.precision=fp16", "tricks.attention=sdpa", "tricks.expand_kv=true"]
    sets += ["tricks.stream_layers=true", "tricks.gradient_accumulation=8"]
    recipes = [with_settings(Recipe(), [*sets, f"tricks.layer_by_layer={value}"]) for value in ("false", "true")]
    t4 = CARDS["t4"].device
    fetched = []
    for recipe in recipes:
        parts = folds.time_of(recipe, shape, CARDS["t4"], 256).parts
        fetched.append(next(part.link_bytes for part in parts if part.name == "fetched blocks"))
    assert fetched[0] == 8 * fetched[1] > 0
    waits = []
    for recipe in recipes:
        at_the_loss = next(one for one in folds.estimate(recipe, shape, t4, 256).moments if one.name == "loss")
        waits.append(next(line.bytes for line in at_the_loss.lines if line.name == "saved activations"))
    an_input = 256 * 4096 * 4
    assert waits[0] == 32 * an_input
    assert waits[1] == 8 * 32 * an_input + 7 * 2 * an_input, "and 7 outputs with their gradients"
