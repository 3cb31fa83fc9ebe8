"""Compile: the plain numbers within rounding, fewer bytes kept and fewer kernels, and blocks that are compiled."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import metrics

from cria_tricks.common.errors import BadInput
from cria_tricks.data.batches import PadToLongest
from cria_tricks.hardware import T4, Device
from cria_tricks.measure.counting import SavedBytes, peak_bytes
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.techniques import compile
from cria_tricks.techniques.compile import fused
from cria_tricks.techniques.packing import PackedRows
from tests.helpers import difference, prepare, train, trained_weights
from tests.tolerances import COMPILED, COMPILED_MODEL

N = 40 * 120  # four whole tiles of 1,024, and a rest


def gate(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """What a Llama block does between its products."""
    return F.silu(a) * b


def chain(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A longer chain: operators, functions and methods."""
    return torch.exp(-a.sigmoid()) * b + 2 * a.tanh() / (1.5 + b**2)


FUNCTIONS = pytest.mark.parametrize(("function", "kept"), [(gate, 3), (chain, 6)], ids=["gate", "chain"])


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(40, 120, requires_grad=True) for _ in range(2)]


def compiled(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    torch._dynamo.reset()
    return torch.compile(function, dynamic=True)


def with_gradients(function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    given = inputs()
    y = function(*given)
    return [y.detach(), *torch.autograd.grad(y, given, torch.linspace(-1, 1, N).view(40, 120))]


@FUNCTIONS
def test_math(function, kept):
    """The reference has the plain bits in tiles of whole vectors; other tiles, and torch, are within rounding."""
    plain = with_gradients(function)
    for tile in (1024, N, 2 * N):
        assert all(map(torch.equal, plain, with_gradients(fused(function, tile))))
    for way in (fused(function, 7), compiled(function)):
        for found, expected in zip(with_gradients(way), plain, strict=True):
            print(f"largest difference {(found - expected).abs().max():.1e}")
            torch.testing.assert_close(found, expected, rtol=0, atol=COMPILED)


@FUNCTIONS
def test_mechanism(function, kept):
    """Plainly the backward pass keeps what every operation asks for; fused, both inputs, and nothing between."""
    for way, tensors in ((function, kept), (fused(function), 2), (compiled(function), 2)):
        given = inputs()
        with SavedBytes() as saved:
            y = way(*given)
        assert saved.now == tensors * 4 * N
        y.sum().backward()
        assert saved.now == 0


def test_mechanism_alive():
    """Without gradients: a chain's intermediate results need a tensor each, fused they need a tile each."""
    given = [x.detach() for x in inputs()]
    peaks = {way: peak_bytes(lambda way=way: way(*given), given) for way in (chain, fused(chain, 64))}
    plain, ours = peaks.values()
    assert plain == 4 * 4 * N
    assert 4 * N < ours <= 4 * N + 4 * 4 * 64


def test_mechanism_kernels():
    """One kernel forward and one backward, for the three and the ten operations alike; plainly a kernel each."""
    for function in (gate, chain):
        way = compiled(function)
        before = metrics.generated_kernel_count
        y = way(*inputs())
        assert metrics.generated_kernel_count - before == 2
        y.sum().backward()
        assert metrics.generated_kernel_count - before == 2, "made beforehand, from one graph of both"


def test_what_the_reference_cannot_fuse_it_refuses():
    with pytest.raises(ValueError, match="sum is not pointwise"):
        fused(lambda a: a.sum())
    with pytest.raises(ValueError, match="one shape"):
        fused(gate)(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="contiguous"):
        fused(gate)(torch.zeros(3, 4).t(), torch.zeros(4, 3))


def test_dropout_draws_other_numbers():
    """The card's Breaks line: from one seed, another mask of the same distribution."""
    x = torch.ones(10_000)
    way = compiled(lambda x: F.dropout(x, 0.25))
    masks = []
    for function in (lambda x: F.dropout(x, 0.25), way, way):
        torch.manual_seed(0)
        masks.append(function(x) != 0)
    assert not torch.equal(masks[0], masks[1])
    assert torch.equal(masks[1], masks[2]), "though from one seed always the same"
    assert abs(masks[1].float().mean() - 0.75) < 0.02


SETTINGS = ["tricks.peft=lora", "lora.r=4", "train.batch_size=2", "train.max_steps=4", "train.learning_rate=1e-3"]


def test_switch(tiny_model, rows, tmp_path):
    """Real kernels: each block is compiled, one graph of forward and backward serves both and rows of any length."""
    torch._dynamo.reset()
    counters.clear()
    kernels = metrics.generated_kernel_count
    found = {}
    for value in ("false", "true"):
        out = tmp_path / value
        run, loaded = train(tiny_model, rows[:4], out, *SETTINGS, f"tricks.compile={value}", "tricks.attention=sdpa")
        found[value] = ([entry["loss"] for entry in run.training], trained_weights(loaded), run)
        blocks = loaded.model.get_base_model().model.layers
        assert all((block._compiled_call_impl is not None) == (value == "true") for block in blocks)
        assert counters["stats"]["unique_graphs"] == (2 if value == "true" else 0)
    assert metrics.generated_kernel_count > kernels
    print(f"{metrics.generated_kernel_count - kernels} kernels")
    assert max(abs(a - b) for a, b in zip(found["true"][0], found["false"][0], strict=True)) < COMPILED_MODEL
    names = found["true"][1].keys()
    assert names == found["false"][1].keys(), "an adapter is saved under the same names"
    assert all(difference(found["true"][1][name], found["false"][1][name]) < 100 * COMPILED_MODEL for name in names)
    assert found["true"][2].attention_kernel == found["false"][2].attention_kernel == "flash"


def test_torch_does_not_give_up_compiling(tiny_model, monkeypatch):
    """One row and several, with a mask and without, trained and evaluated: each kind of call has its graph.

    The first block has one of its own when it trains, as its input needs no gradient. That makes twelve; torch by
    itself stops at eight, without a word, and runs the rest as it was.
    """
    monkeypatch.setattr(compile, "BACKEND", "eager")
    torch._dynamo.reset()
    counters.clear()
    model = prepare(tiny_model, "tricks.peft=lora", "lora.r=4", "tricks.attention=sdpa", "tricks.compile=true")[2].model
    for training in (True, False):
        model.train(training)
        for rows in (1, 2):
            for padding in (0, 3):
                mask = torch.ones(rows, 16, dtype=torch.long)
                mask[0, 16 - padding :] = 0
                with torch.set_grad_enabled(training):
                    model(input_ids=torch.arange(3, 3 + 16 * rows).view(rows, 16), attention_mask=mask)
    assert counters["stats"]["unique_graphs"] == 12


def test_packed_rows_of_any_documents_share_their_graphs(tiny_model, rows, monkeypatch):
    """The documents' lengths are numbers that change with every batch; they stay outside of what is compiled."""
    monkeypatch.setattr(compile, "BACKEND", "eager")
    torch._dynamo.reset()
    counters.clear()
    sets = ("tricks.attention=sdpa", "tricks.packing=true", "tricks.compile=true")
    model = prepare(tiny_model, *sets)[2].model
    graphs = []
    for some in (rows[:3], rows[2:5], rows[:4], rows[1:5]):
        batch = PadToLongest(2)(PackedRows(some, 48))
        assert len(batch["input_ids"]) > 1, "a batch of one row has graphs of its own"
        with torch.no_grad():
            model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [4] * 4, "a block is cut where it attends"


def test_its_bytes_are_the_processs_and_that_is_said(tiny_model, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(compile, "BACKEND", "eager")
    torch._dynamo.reset()
    run, _ = train(tiny_model, rows[:2], tmp_path, *SETTINGS[:3], "train.max_steps=2", "tricks.compile=true")
    assert all(entry["peak_bytes"] > 100e6 for entry in run.training)
    _, plan, _ = prepare(tiny_model, *SETTINGS, "tricks.compile=true")
    assert "every peak is the whole process's" in " ".join(plan.warnings)


def test_where_no_kernel_can_be_made_it_is_refused(monkeypatch):
    recipe = with_settings(Recipe(), ["tricks.compile=true"])
    assert resolve(recipe, T4).after_load == ("techniques.compile.compile_blocks",)
    assert not resolve(recipe, T4).warnings
    old = Device("cuda", "Tesla P100", (6, 0), real_bf16=False, memory_bytes=16 * 2**30)
    with pytest.raises(BadInput, match=r"capability 7\.0, and Tesla P100 has 6\.0; set tricks\.compile=false"):
        resolve(recipe, old)
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BadInput, match="no C\\+\\+ compiler no-such-compiler here; install it"):
        resolve(recipe)


def test_a_model_without_blocks_is_refused(tiny_model, monkeypatch):
    monkeypatch.setattr("cria_tricks.models.pretrained.GradientCheckpointingLayer", torch.nn.Conv3d)
    with pytest.raises(BadInput, match="not built of blocks"):
        prepare(tiny_model, "tricks.compile=true")
