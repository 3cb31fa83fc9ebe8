"""Optimizer in the backward pass: the plain step's bits, no gradient that waits, and what it cannot do, said."""

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

from cria_tricks.bill import moved_bytes
from cria_tricks.common.errors import BadInput, Diverged, Interrupted, OutOfMemory
from cria_tricks.hardware.cards import CARDS
from cria_tricks.measure.counting import peak_bytes
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import folds
from cria_tricks.techniques.optimizer_in_backward import Scaler, StepInBackward
from tests.helpers import train, trained_weights
from tests.test_trainer import InterruptAt

ON = "tricks.optimizer_in_backward=true"
EACH = "tricks.optimizer_in_backward=clip"
STEPS = 20
SETS = ("train.max_grad_norm=0", "train.learning_rate=2e-3", "train.weight_decay=0.1", "train.save_steps=1000")
LONG = (*SETS, f"train.max_steps={STEPS}")
SAME = ("loss", "grad_norm", "learning_rate", "skipped", "trained_tokens")


class Tied(nn.Module):
    """A model whose embedding is also its head, with a matrix, a bias and a norm between the two."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.embedding = nn.Parameter(torch.randn(50, 16, generator=draw) / 4)
        self.matrix = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        with torch.no_grad():
            self.matrix.weight.copy_(torch.randn(16, 16, generator=draw) / 4)
            self.matrix.bias.zero_()

    def loss(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.matrix(self.embedding[ids]))
        return nn.functional.cross_entropy(hidden @ self.embedding.T, ids.roll(1))


def batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(50, (12,), generator=draw) for _ in range(STEPS)]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1, fused=True)


@pytest.mark.parametrize("limit", [math.inf, 0.05])
def test_math(limit):
    """Every weight after each of 20 steps, both moments and the whole norm, bit for bit; with a limit for each weight,
    too."""
    plain, stepping = Tied(), Tied()
    optimizer, ours = adamw(plain), adamw(stepping)
    in_backward = StepInBackward(stepping, ours, limit)
    shortened = 0
    for ids in batches():
        plain.loss(ids).backward()
        whole = torch.nn.utils.get_total_norm([weight.grad for weight in plain.parameters()])
        for weight in plain.parameters():
            shortened += torch.nn.utils.clip_grad_norm_([weight], limit).item() > limit
        optimizer.step()
        optimizer.zero_grad()
        stepping.loss(ids).backward()
        assert in_backward.steps == 5, "a tied weight takes one step, after both of its gradients"
        assert torch.equal(in_backward.norm(), whole)
        for one, other in zip(plain.parameters(), stepping.parameters(), strict=True):
            assert torch.equal(one, other)
            assert other.grad is None
            for name, value in optimizer.state[one].items():
                assert torch.equal(ours.state[other][name], value), name
    assert not torch.equal(plain.embedding, Tied().embedding)
    assert bool(shortened) == (limit < 1), "the limit was reached"


def test_mechanism():
    """Live bytes: of 8 equal matrices a plain backward pass ends with 8 gradients, and this one never has two."""

    def peak(in_backward: bool) -> int:
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
        optimizer = adamw(model)
        for weight in model.parameters():  # an earlier step, after which the states are there
            weight.grad = torch.zeros_like(weight)
        optimizer.step()
        optimizer.zero_grad()
        kept = StepInBackward(model, optimizer) if in_backward else None
        x = torch.ones(1, 256)
        alive = (*model.parameters(), x, *(one for state in optimizer.state.values() for one in state.values()))
        found = peak_bytes(lambda: model(x).sum().backward(), alive)
        assert bool(kept) == in_backward == all(weight.grad is None for weight in model.parameters())
        return found

    a_gradient = 4 * 256 * 256
    a_few_vectors = 40 * 256 * 4
    assert 8 * a_gradient <= peak(in_backward=False) <= 8 * a_gradient + a_few_vectors
    assert a_gradient <= peak(in_backward=True) <= a_gradient + a_few_vectors


def test_mechanism_bill():
    """Llama-3.2-1B in fp32: beside its embedding's gradient no other is alive, and 8 bytes a weight less are moved."""
    shape = find_shape("llama-3.2-1b")
    settings = ["tricks.attention=sdpa", "tricks.gradient_checkpointing=true", SETS[0]]
    plain, stepping = (with_settings(Recipe(), [*settings, *more]) for more in ([], [ON]))
    bills = [folds.estimate(recipe, shape, CARDS["t4"].device, 1024) for recipe in (plain, stepping)]
    embedding = 128_256 * 2048
    at_the_end = [next(one.bytes for one in bill.state if one.name == "gradients") for bill in bills]
    assert at_the_end == [4 * shape.weights, 4 * embedding]
    assert bills[1].peak.name == "embedding"
    assert bills[0].peak_bytes - bills[1].peak_bytes == 4 * (shape.weights - embedding)
    moved = [folds.step_of(recipe, shape, CARDS["t4"].device).gradient_bytes for recipe in (plain, stepping)]
    assert moved[0] - moved[1] == 8
    assert moved_bytes.CLIP == 12, "of which the norm takes 4"


def same(one, other) -> None:
    """Two runs have the same history and the same weights, bit for bit."""
    (run, loaded), (other_run, other_loaded) = one, other
    for name in SAME:
        assert [entry[name] for entry in run.training] == [entry[name] for entry in other_run.training], name
    weights = trained_weights(other_loaded)
    for name, weight in trained_weights(loaded).items():
        assert torch.equal(weight, weights[name]), name


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="adamw"),
        pytest.param(("tricks.optimizer=adamw_8bit", "tricks.gradient_checkpointing=true"), id="adamw_8bit"),
        pytest.param(("tricks.precision=fp16", "train.warmup_ratio=0.2"), id="fp16"),
    ],
)
def test_switch(more, tiny_model, rows, tmp_path):
    """20 steps of all weights: the plain run, and the run with steps in the backward pass."""
    off = train(tiny_model, rows, tmp_path / "off", *LONG, *more)
    on = train(tiny_model, rows, tmp_path / "on", *LONG, *more, ON)
    assert len(off[0].training) == STEPS
    assert off[0].training[-1]["loss"] < off[0].training[0]["loss"] - 1
    same(off, on)
    peaks = [max(entry.get("peak_bytes", 0) for entry in run.training) for run, _ in (off, on)]
    assert peaks[1] < peaks[0]


@pytest.mark.parametrize(
    "more",
    [
        ("tricks.gradient_checkpointing=1", "train.batch_size=2", "tricks.paged_optimizer=true"),
        ("tricks.gradient_checkpointing=true", "tricks.attention=sdpa", "tricks.keep_attention=true",
         "tricks.activation_offload=true", "tricks.precision=bf16"),
        ("tricks.peft=lora", "tricks.packing=true", "data.max_length=64", "tricks.chunked_loss=true",
         "tricks.fused_lora=true", "lora.dropout=0.1"),
        ("tricks.peft=side_network", "side.blocks=1", "tricks.gradient_checkpointing=true"),
        ("tricks.compile=true",),
    ],
    ids=lambda settings: settings[0].partition(".")[2],
)  # fmt: skip
def test_it_is_the_plain_run_beside_other_toggles(more, tiny_model, rows, tmp_path, monkeypatch):
    monkeypatch.setattr("cria_tricks.techniques.compile.BACKEND", "aot_eager")  # captured forward and backward
    sets = (*SETS, *more, "train.max_steps=4")
    runs = []
    for toggle in ((), (ON,)):
        torch._dynamo.reset()
        runs.append(train(tiny_model, rows, tmp_path / str(len(toggle)), *sets, *toggle))
    same(*runs)


def test_nothing_keeps_the_model_when_the_run_is_over():
    """A GPU's memory must be free for the next run in the same process."""
    model = Tied()
    optimizer = adamw(model)
    in_backward = StepInBackward(model, optimizer)
    model.loss(batches()[0]).backward()
    found = weakref.ref(model.embedding)
    del model, optimizer, in_backward
    gc.collect()
    assert found() is None


def test_each_weights_limit_is_another_limit(tiny_model, rows, tmp_path):
    sets = (*SETS[1:], "train.max_steps=4", "train.max_grad_norm=0.05")
    whole, _ = train(tiny_model, rows, tmp_path / "whole", *sets)
    run, _ = train(tiny_model, rows, tmp_path / "each", *sets, EACH)
    first, other = whole.training[0], run.training[0]
    assert first["grad_norm"] == other["grad_norm"] > 0.05, "the whole norm before any limit, all the same"
    assert whole.training[-1]["loss"] != run.training[-1]["loss"]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw_8bit"])
@pytest.mark.parametrize("before", [(), (ON,)], ids=["after plain steps", "after steps in backward"])
def test_stopped_and_resumed_is_the_whole_run(before, optimizer, tiny_model, rows, tmp_path):
    """A checkpoint holds the same as a plain run's, so either kind of run goes on from it."""
    sets = (*LONG, f"tricks.optimizer={optimizer}")
    whole = train(tiny_model, rows, tmp_path / "whole", *sets)
    with pytest.raises(Interrupted, match="after step 9"):
        train(tiny_model, rows, tmp_path / "cut", *sets, *before, callbacks=[InterruptAt(9)])
    same(whole, train(tiny_model, rows, tmp_path / "cut", *sets, ON, resume=True))


# What breaks.


class Spoiled:
    """Make the gradient of one weight infinite when it is summed up, in the steps that are listed."""

    def __init__(self, model: nn.Module, name: str, steps: tuple[int, ...]):
        self.step = 0
        self.steps = steps
        dict(model.named_parameters())[name].register_hook(self._spoil)

    def _spoil(self, gradient: torch.Tensor) -> torch.Tensor | None:
        self.step += 1
        return gradient * math.inf if self.step in self.steps else None


WEIGHTS = 2 * 9 + 2  # of the tiny model: two blocks, the embedding, which is the head, and the last norm
LOW, HIGH = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"


class AfterTheFirstStep(TrainerCallback):
    """Keep the entry of the first step, and the weights by then; spoil a gradient of that step."""

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.before = {name: p.detach().clone() for name, p in model.named_parameters()}
        Spoiled(model, LOW, (1,))

    def on_log(self, args, state, control, logs, model=None, **kwargs):
        if state.global_step == 1:
            self.entry = logs
            self.after = {name: p.detach().clone() for name, p in model.named_parameters()}


def test_an_overflow_in_fp16_ends_the_steps_of_its_backward_pass(tiny_model, rows, tmp_path):
    """What is above the overflow has taken its step, the weight and what is below it have not; the scale is halved."""
    watch = AfterTheFirstStep()
    train(tiny_model, rows, tmp_path, *SETS, "train.max_steps=2", "tricks.precision=fp16", ON, callbacks=[watch])
    assert watch.entry["skipped"] == 1
    assert not math.isfinite(watch.entry["grad_norm"])
    before, after = watch.before, watch.after
    assert all(torch.isfinite(weight).all() for weight in after.values())
    assert not torch.equal(before[HIGH], after[HIGH])
    for name in (LOW, "model.layers.0.self_attn.q_proj.weight", "model.embed_tokens.weight"):
        assert torch.equal(before[name], after[name]), name


def test_the_scaler_halves_its_scale_once_for_a_step():
    scaler = Scaler("cpu")
    model = Tied()
    optimizer = adamw(model)
    in_backward = StepInBackward(model, optimizer, scaler=scaler)
    Spoiled(model, "matrix.weight", (2,))
    scales = []
    for ids in batches()[:3]:
        scaler.scale(model.loss(ids)).backward()
        in_backward.norm()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [65536, 32768, 32768]


def test_a_run_with_an_overflow_resumes_though_some_weights_have_no_states_yet(tiny_model, rows, tmp_path, monkeypatch):
    """After a first step that overflowed in the lower block only the weights above it have states."""
    sets = (*SETS, "train.max_steps=4", "tricks.precision=fp16", ON)
    first: tuple[int, ...] = (1,)

    def spoiled(*arguments, **named):
        Spoiled(arguments[0], LOW, first)
        return StepInBackward(*arguments, **named)

    monkeypatch.setattr("cria_tricks.trainer.optimizer.StepInBackward", spoiled)
    whole = train(tiny_model, rows, tmp_path / "whole", *sets)
    with pytest.raises(Interrupted, match="after step 1"):
        train(tiny_model, rows, tmp_path / "cut", *sets, callbacks=[InterruptAt(1)])
    assert whole[0].skipped_steps == 1
    first = ()  # of the steps that are left none overflows
    run, loaded = train(tiny_model, rows, tmp_path / "cut", *sets, resume=True)
    assert str([entry["grad_norm"] for entry in run.training]) == str([e["grad_norm"] for e in whole[0].training])
    weights = trained_weights(whole[1])
    for name, weight in trained_weights(loaded).items():
        assert torch.equal(weight, weights[name]), name


def test_without_a_scaler_a_gradient_that_is_not_finite_ends_the_run(tiny_model, rows, tmp_path, monkeypatch):
    def spoiled(*arguments, **named):
        Spoiled(arguments[0], LOW, (3,))
        return StepInBackward(*arguments, **named)

    monkeypatch.setattr("cria_tricks.trainer.optimizer.StepInBackward", spoiled)
    # The last norm, nine weights of the block above, and down_proj.
    said = r"^the gradients are not finite at step 3; stopped when 11 weights had taken their step, so resume from a "
    with pytest.raises(Diverged, match=said):
        train(tiny_model, rows, tmp_path, *SETS, "train.max_steps=4", ON)


def test_a_loss_that_is_not_finite_reaches_no_weight(tiny_model, rows, tmp_path, monkeypatch):
    """Its gradients may be finite, so the loss itself is looked at before the backward pass."""
    touched = []
    monkeypatch.setattr(StepInBackward, "_step", lambda self, weight: touched.append(weight))
    monkeypatch.setattr("cria_tricks.trainer.training.Training.loss_sum", lambda self, batch: (
        sum(weight.sum() for weight in self.model.parameters()) + math.inf))  # fmt: skip
    with pytest.raises(Diverged, match="the loss is inf at step 1; stopped before the optimizer touched any weight"):
        train(tiny_model, rows, tmp_path, *SETS, "train.max_steps=1", ON)
    assert touched == []


@pytest.mark.parametrize(
    ("taken", "said"), [(2, "there was nothing to save yet"), (0, "the state after step 1 is in ")]
)
def test_out_of_memory_between_two_weights_saves_nothing(taken, said, tiny_model, rows, tmp_path, monkeypatch):
    """Then some weights are those of the next step. Before the first of them the last whole step is saved."""
    calls = []
    step = StepInBackward._step

    def fails(self, weight):
        calls.append(weight)
        if len(calls) == WEIGHTS + taken + 1:
            raise MemoryError
        step(self, weight)

    monkeypatch.setattr(StepInBackward, "_step", fails)
    with pytest.raises(OutOfMemory, match=rf"^out of memory in the backward pass of step 2; {said}"):
        train(tiny_model, rows, tmp_path, *SETS, "train.max_steps=3", ON)


def test_several_processes_are_refused():
    sets = [ON, SETS[0], "parallel.strategy=ddp", "tricks.gradient_accumulation=1"]
    with pytest.raises(BadInput, match=r"^tricks\.optimizer_in_backward=true with parallel\.strategy=ddp: .*; set "):
        resolve(with_settings(Recipe(), sets), processes=2)
