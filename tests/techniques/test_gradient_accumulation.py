"""Gradient accumulation: the big batch's gradient from small ones, and what a mean of means gives instead."""

import math
import random
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import TrainerCallback

import cria_tricks.trainer.fit
from cria_tricks.data import sources
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.tokens import IGNORED, tokenize
from cria_tricks.measure.counting import SavedBytes, flops, peak_bytes
from cria_tricks.techniques.gradient_accumulation import accumulated, trained_tokens
from tests.helpers import difference, train
from tests.tolerances import ACCUMULATED_GRADIENT

V, D = 64, 16  # vocabulary, width
ROWS, A_STEP = 107, 8  # the real set: 13 whole windows and one of three rows
pad = PadToLongest(0)


def ragged(longest: int = 60, words: int = V) -> list[dict[str, list[int]]]:
    """Rows of 4 to ``longest`` tokens, most with a masked prompt."""
    draw = random.Random(0)
    made = []
    for _ in range(ROWS):
        ids = [draw.randrange(3, words) for _ in range(draw.randint(4, longest))]
        prompt = draw.randrange(len(ids))  # none in some: the first label is none either way
        made.append({"input_ids": ids, "labels": [IGNORED] * prompt + ids[prompt:]})
    return made


def windows(rows: list) -> list[list]:
    return [rows[start : start + A_STEP] for start in range(0, len(rows), A_STEP)]


def count(row: dict[str, list[int]]) -> int:
    return sum(label != IGNORED for label in row["labels"][1:])


class Model(nn.Module):
    """Each token sees the mean of those before it; two products."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner, self.head = nn.Embedding(V, D), nn.Linear(D, D), nn.Linear(D, V)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids).cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(torch.tanh(self.inner(x)))


def loss(model: Model, batch: dict[str, torch.Tensor], reduction: str = "sum") -> torch.Tensor:
    logits = model(batch["input_ids"])[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"][:, 1:].flatten(), reduction=reduction)


def gradient(model: nn.Module) -> torch.Tensor:
    """All of it in one vector; afterwards it is gone from the model."""
    found = torch.cat([p.grad.flatten() for p in model.parameters()])
    model.zero_grad()
    return found


@pytest.mark.parametrize("rows_at_once", [1, 2, 4])
def test_math(rows_at_once):
    """The reference equals one big batch in every window, the partial one of three rows included."""
    rows, model = ragged(), Model()
    small = [pad(rows[i : i + rows_at_once]) for i in range(0, ROWS, rows_at_once)]
    steps = accumulated(partial(loss, model), small, A_STEP // rows_at_once)
    for window, mean in zip(windows(rows), steps, strict=True):
        found = gradient(model)
        plain = loss(model, pad(window), "mean")
        plain.backward()
        assert difference(found, gradient(model)) < ACCUMULATED_GRADIENT
        assert mean == pytest.approx(plain.item(), rel=ACCUMULATED_GRADIENT)
    assert len(window) == 3


class AgainstTheBigBatch(TrainerCallback):
    """Holds the Trainer's gradient against that of one big batch, then drops it, so that no weight ever moves."""

    def __init__(self):
        self.taken, self.sizes, self.differences = [], [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        found = gradient(model)
        window, self.taken = self.taken[:A_STEP], self.taken[A_STEP:]  # the loader is one row ahead
        batch = pad(window)
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten()).backward()
        self.differences.append(difference(found, gradient(model)))
        self.sizes.append(len(window))


def test_math_in_production(tiny_model, tmp_path, monkeypatch):
    """transformers' Trainer with our loss, on 107 rows in the order in which it takes them."""
    watch = AgainstTheBigBatch()

    class Watched(PadToLongest):
        def __call__(self, rows):
            watch.taken.extend(rows)
            return super().__call__(rows)

    monkeypatch.setattr(cria_tricks.trainer.fit, "PadToLongest", Watched)
    sets = (f"tricks.gradient_accumulation={A_STEP}", "train.max_grad_norm=1e9")  # clipping would scale it first
    train(tiny_model, ragged(12, 512), tmp_path, *sets, callbacks=[watch])
    assert watch.sizes == [A_STEP] * 13 + [3]
    assert max(watch.differences) < ACCUMULATED_GRADIENT


def mean_of_means(loss_mean, window: list) -> None:
    """What a loop does that divides each micro-batch's mean by k."""
    for batch in window:
        (loss_mean(batch) / len(window)).backward()


def misplaced(counts: list[int]) -> float:
    """Predict how much of a window's gradient a mean of means gives to the wrong rows.

    A row of n of the window's N trained tokens has a say of n / N, and gets 1 / k.
    """
    return sum(abs(1 / len(counts) - n / sum(counts)) for n in counts) / 2


def test_a_mean_of_means_gives_30_percent_to_the_wrong_rows():
    """Each row has one weight, whose gradient is that row's say in the step: 48 % wrong in the worst window."""
    rows, off = ragged(), []
    says = torch.zeros(ROWS, requires_grad=True)
    small = [pad([row]) | {"row": torch.tensor(i)} for i, row in enumerate(rows)]

    def summed(batch):
        return says[batch["row"]] * trained_tokens(batch)

    for window, _ in zip(windows(list(enumerate(rows))), accumulated(summed, small, A_STEP), strict=True):
        where, counts = [i for i, _ in window], [count(row) for _, row in window]
        right, says.grad = says.grad[where], None
        assert right.tolist() == pytest.approx([n / sum(counts) for n in counts])
        mean_of_means(lambda batch: summed(batch) / trained_tokens(batch), [small[i] for i in where])
        wrong, says.grad = says.grad[where], None
        assert wrong.tolist() == pytest.approx([1 / len(where)] * len(where))
        off.append((wrong - right).abs().sum().item() / 2)
        assert off[-1] == pytest.approx(misplaced(counts))
    assert (sum(off) / len(off), max(off)) == pytest.approx((0.2974, 0.4782), abs=1e-4)


def test_a_mean_of_means_is_another_gradient():
    """The toy model's first step: off by 1.22 times the true gradient's length, from 30 % in the wrong places.

    Rows of random words have little in common, so their gradients mostly cancel, and their differences do not.
    """
    rows, model, off = ragged(), Model(), []
    small = [pad([row]) for row in rows]
    for window, _ in zip(windows(small), accumulated(partial(loss, model), small, A_STEP), strict=True):
        right = gradient(model)
        mean_of_means(partial(loss, model, reduction="mean"), window)
        off.append(difference(gradient(model), right))
    assert sum(off) / len(off) == pytest.approx(1.222, abs=0.01)


def test_a_mean_of_means_on_the_real_rows(tokenizer, real_data):
    """107 rows in their order, 8 a step: 14 % of the gradient on the wrong rows, 21 % in the worst window."""
    source = sources.find(str(real_data / "kwanzaa_train.jsonl"), "train")
    rows = tokenize(source.rows, tokenizer, 2048).rows
    off = [misplaced([count(row) for row in window]) for window in windows(rows)]
    assert (sum(off) / len(off), max(off)) == pytest.approx((0.1401, 0.2107), abs=1e-4)


T = 32


def whole(rows: int) -> dict[str, torch.Tensor]:
    """A batch of equally long rows."""
    ids = torch.randint(3, V, (rows, T), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone()}


def window_of(batch: dict[str, torch.Tensor], model: Model) -> None:
    """One step over the batch's rows, one at a time."""
    k = len(batch["labels"])
    list(accumulated(partial(loss, model), [{key: t[i : i + 1] for key, t in batch.items()} for i in range(k)], k))


def test_mechanism():
    """Kept for the backward pass: one row's bytes, whatever k is. Products: as many as the big batch has."""
    a_row = 4 * T * 2 * D + 4 * (T - 1) * V  # what the two products and the loss take
    once = 8 * T + 4  # the divisors, how many labels count
    for k in (2, 4, 8):
        model, batch = Model(), whole(k)
        alive = [*model.parameters(), *batch.values()]
        with SavedBytes(besides=alive) as saved:
            loss(model, batch).backward()
        assert saved.peak == k * (a_row + 8 * (T - 1)) + once  # labels of several rows are copied into one
        with SavedBytes(besides=alive) as saved:
            window_of(batch, model)
        assert saved.peak == a_row + once + 8  # and the window's tokens
        products = 3 * 2 * k * T * (D * D + D * V)  # forward, gradient of the input, gradient of the weight
        assert flops(partial(window_of, batch, model)) == products
        assert flops(lambda m=model, b=batch: loss(m, b).backward()) == products


def test_mechanism_alive():
    """The same in storages: the window's peak does not grow with k, the big batch's grows by a row each time."""
    window, big = {}, {}
    for k in (2, 4, 6, 8):
        for peaks, step in ((window, window_of), (big, lambda b, m: loss(m, b).backward())):
            model, batch = Model(), whole(k)
            peaks[k] = peak_bytes(partial(step, batch, model), (*model.parameters(), *batch.values()))
    assert len(set(window.values())) == 1
    # At its peak, in log-softmax's backward, that takes two more of the logits' size.
    assert {big[k + 2] - big[k] for k in (2, 4, 6)} == {2 * (4 * T * 2 * D + 3 * 4 * (T - 1) * V)}


def test_mechanism_padding():
    """Rows of their own length, which micro-batches of one row have, need fewer products than one padded batch."""
    rows, model = ragged()[:A_STEP], Model()
    lengths = [len(row["input_ids"]) for row in rows]
    small = [pad([row]) for row in rows]
    a_token = 3 * 2 * (D * D + D * V)
    assert flops(lambda: list(accumulated(partial(loss, model), small, A_STEP))) == a_token * sum(lengths)
    assert flops(lambda: loss(model, pad(rows)).backward()) == a_token * A_STEP * max(lengths)


class Window(TrainerCallback):
    """Counts the forward passes of each optimizer step, and the rows in them."""

    def __init__(self):
        self.passes, self.steps = [], []

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        model.get_input_embeddings().register_forward_pre_hook(lambda _, ids: self.passes.append(len(ids[0])))

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.steps.append(self.passes[:])
        self.passes.clear()


@pytest.mark.parametrize(("k", "steps"), [(1, [[1]] * 5), (2, [[1, 1], [1, 1], [1]]), (8, [[1] * 5])])
def test_switch(k, steps, tiny_model, rows, tmp_path):
    """Five rows, one at a time: the window is k of them, the last one partial."""
    watch = Window()
    run, _ = train(tiny_model, rows, tmp_path, f"tricks.gradient_accumulation={k}", callbacks=[watch])
    assert watch.steps == steps
    assert run.steps == len(steps) == math.ceil(5 / k)
