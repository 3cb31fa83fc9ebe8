"""The run around a pipeline's loop, with a loop that computes nothing: what is read, kept and said, and when."""

from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.trainer import pipeline_fit

IGNORED = -100


def row(number: int, length: int) -> dict[str, list[int]]:
    return {"input_ids": [number] * length, "labels": [IGNORED] + [number] * (length - 1)}


ROWS = {"train": [row(n, 4 + n % 3) for n in range(10, 15)], "eval": [row(9, 8), row(8, 3)]}


class Loop:
    """Its losses are counted up, and the second step is skipped."""

    def __init__(self, model, plan, arguments, mesh, k, parts, schedule):
        self.given, self.windows, self.evaluated = (model, mesh, k, parts, schedule), [], []
        self.eval_steps = arguments.eval_steps

    def evaluate(self, windows) -> float:
        self.evaluated.append(windows)
        return 9.0 - len(self.evaluated)

    def step(self, window) -> dict[str, Any]:
        self.windows.append(window)
        number = len(self.windows)
        about = {"loss": 0.5 * number, "grad_norm": 0.125, "learning_rate": 0.002, "idle_share": 0.25}
        return about | ({"skipped": 1} if number == 2 else {})


class Meter:
    """Each step takes a byte more than the one before; it counts which phases there were, and what was watched."""

    def __init__(self, counts: bool):
        self.counts, self.phases, self.watched, self.laps = counts, Counter(), 0, 0

    def track(self, tensors) -> None:
        assert len(list(tensors)) == 2

    @contextmanager
    def phase(self, name):
        self.phases[name] += 1
        yield

    @contextmanager
    def watch(self):
        self.watched += 1
        yield

    def lap(self) -> int:
        self.laps += 1
        return self.laps


def fitted(*settings: str, counts: bool = True, share: int = 0, data: int = 1, **options):
    recipe = with_settings(Recipe(), ["tricks.gradient_accumulation=2", "train.epochs=2", *settings])
    said: list[str] = []
    world: Any = SimpleNamespace(data=data, highest=lambda peak: [peak + 100])
    mesh: Any = SimpleNamespace(get_local_rank={"data": share}.__getitem__)
    meter = Meter(counts)
    loop, run = pipeline_fit.fit(
        torch.nn.Linear(2, 2), resolve(recipe), recipe, ROWS, [range(1), range(1, 2)], world,
        pad_id=0, meter=meter, say=said.append, mesh=mesh, kind=Loop, **options,
    )  # fmt: skip
    return loop, run, said, meter


def test_a_run_keeps_and_says_what_was():
    loop, run, said, meter = fitted("train.eval_steps=4")
    assert loop.given[1:] == (loop.given[1], 2, [range(1), range(1, 2)], "1f1b")
    assert (run.steps, run.planned_steps, run.skipped_steps, run.train_rows) == (6, 6, 1, 5)
    assert [(entry["step"], entry["eval_loss"]) for entry in run.evaluations] == [(0, 8.0), (4, 7.0), (6, 6.0)]
    assert [entry["step"] for entry in run.history] == [0, 1, 2, 3, 4, 4, 5, 6, 6]
    assert [(entry["step"], entry["loss"]) for entry in run.training] == [(n, n / 2) for n in range(1, 7)]
    assert [entry.get("peak_bytes") for entry in run.training] == [101, 102, None, None, None, None]
    assert all(entry["step_seconds"] > 0 for entry in run.training)
    assert (meter.watched, meter.phases) == (2, {"train": 6, "evaluate": 3})
    about = "gradient norm 0.125, learning rate 2.00e-03, idle 25%"
    assert said == [
        "step 0: evaluation loss 8.0000",
        *(f"step {n} of 6: loss {n / 2:.4f}, {about}" for n in range(1, 5)),
        "step 4: evaluation loss 7.0000",
        *(f"step {n} of 6: loss {n / 2:.4f}, {about}" for n in range(5, 7)),
        "step 6: evaluation loss 6.0000",
    ]


@pytest.mark.parametrize(("settings", "steps"), [((), [1]), (("tricks.compile=true",), [])])
def test_the_kernel_is_watched_in_the_first_step_if_anybody_can(settings, steps, monkeypatch):
    watched = []

    class Watch:
        kernel = "seen"

        def __enter__(self):
            watched.append(len(loops[-1].windows) + 1)

        def __exit__(self, *error):
            """Nothing to do."""

    loops = []
    honest = Loop.__init__
    monkeypatch.setattr(Loop, "__init__", lambda self, *given: (loops.append(self), honest(self, *given))[1])
    monkeypatch.setattr(pipeline_fit, "WatchAttention", Watch)
    assert fitted(*settings)[1].attention_kernel == "seen"
    assert watched == steps


def test_where_nobody_counts_every_step_has_a_peak():
    _, run, _, _ = fitted(counts=False)
    assert [entry["peak_bytes"] for entry in run.training] == [101, 102, 103, 104, 105, 106]


def test_the_steps_are_two_epochs_in_the_order_of_the_shared_trainer():
    loop, run, _, _ = fitted()
    read = []
    for epoch in range(2):
        order = torch.randperm(5, generator=torch.Generator().manual_seed(42 + epoch)).tolist()
        read += [[ROWS["train"][index] for index in order[start : start + 2]] for start in (0, 2, 4)]
    tokens = [sum(len(one["input_ids"]) for one in window) for window in read]
    assert [entry["tokens"] for entry in run.training] == tokens
    assert [entry["trained_tokens"] for entry in run.training] == [
        total - len(window) for total, window in zip(tokens, read, strict=True)
    ]
    assert [window.tokens for window in loop.windows] == tokens
    assert len(fitted("train.max_steps=4")[1].training) == 4, "in the midst of an epoch"


def test_each_of_two_pipelines_has_its_share():
    loop, _, _, _ = fitted(data=2, share=1, schedule="gpipe")
    assert (loop.given[2], loop.given[4]) == (1, "gpipe")
    whole, _, _, _ = fitted()
    assert len(loop.evaluated[0]) == len(whole.evaluated[0]) == 1
    assert len(loop.windows) == len(whole.windows) == 6


def test_packed_rows_are_what_is_trained_on():
    _, run, _, _ = fitted("tricks.packing=true", "tricks.attention=sdpa", "data.max_length=16")
    assert run.train_rows == 2, "5 + 6 + 4 tokens in one row of 16, and 5 + 6 in another"


@pytest.mark.parametrize("seed", [3, 4])
def test_each_epoch_has_its_own_seed(seed):
    first = pipeline_fit.epochs(list(range(50)), seed)
    for epoch in range(3):
        order = torch.randperm(50, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        assert next(first) == order
