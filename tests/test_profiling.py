"""The trace: of the steps that were meant, with our names, in Chrome's format; and it changes nothing."""

import gzip
import json
import pickle

import pytest
import torch
from transformers import TrainerCallback

from cria_tricks.measure import profiler
from cria_tricks.measure.profiler import Profile, read, windows
from cria_tricks.trainer.step_meter import StepMeter
from tests import helpers

SETTINGS = ("tricks.peft=lora", "lora.dropout=0.1", "tricks.gradient_accumulation=2", "train.max_steps=8")


@pytest.fixture(scope="module")
def profiled(tiny_model, rows, tmp_path_factory):
    """A profiled run: its folder, what came of it, and its trained weights."""
    folder = tmp_path_factory.mktemp("profiled")
    with Profile(folder / "profile") as profile:
        run, loaded = helpers.train(tiny_model, rows, folder / "checkpoints", *SETTINGS, callbacks=[profile])
        assert not torch.autograd._profiler_enabled(), "off after its steps, not only at the end"
    return folder / "profile", run, helpers.trained_weights(loaded)


@pytest.fixture(scope="module")
def events(profiled):
    folder, *_ = profiled
    with gzip.open(folder / profiler.TRACE, "rt") as file:
        return json.load(file)["traceEvents"]


def test_it_changes_no_bit_of_a_run(profiled, tiny_model, rows, tmp_path):
    _, run, weights = profiled
    plain, loaded = helpers.train(tiny_model, rows, tmp_path, *SETTINGS)
    assert [entry["loss"] for entry in run.training] == [entry["loss"] for entry in plain.training]
    assert all(torch.equal(weights[name], value) for name, value in helpers.trained_weights(loaded).items())


def test_the_trace_is_what_a_viewer_opens(events):
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys()
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["ts"] > 0
    assert {"X", "M"} <= {event["ph"] for event in events}, "spans, and what threads are called"
    assert any(event["name"].startswith("aten::") and event.get("cat") == "cpu_op" for event in events)


def test_spans_have_our_names_and_lie_in_each_other(events):
    spans = [event for event in events if event.get("cat") == "user_annotation"]

    def named(name):
        return [(span["ts"], span["ts"] + span["dur"]) for span in spans if span["name"] == name]

    assert [name for name in (f"step {n}" for n in range(1, 9)) if named(name)] == ["step 4", "step 5", "step 6"]
    assert len(named("optimizer step")) == len(named("micro-batch 1")) == 3
    assert len(named("between steps")) == 3
    for step in ("step 4", "step 5", "step 6"):
        [(begin, end)] = named(step)
        for part in ("micro-batch 1", "optimizer step"):
            assert any(begin <= first and last <= end for first, last in named(part))
        assert not any(begin < first < end for first, _ in named("between steps"))
    products = [event for event in events if event["name"] == "aten::mm"]
    assert products
    inside = [span for number in (1, 2) for span in named(f"micro-batch {number}")]
    assert all(any(begin <= event["ts"] <= end for begin, end in inside) for event in products)


def test_the_report_has_the_ten_most_costly_operators(profiled):
    folder, *_ = profiled
    found = read(folder)
    assert found["steps"] == [4, 6]
    assert found["files"] == ["profile/trace.json.gz"]
    assert len(found["operators"]) == 10
    seconds = [row["seconds"] for row in found["operators"]]
    assert seconds == sorted(seconds, reverse=True)
    assert not any(row["name"].startswith(("step", "micro-batch", "ProfilerStep")) for row in found["operators"])
    everything = json.loads((folder / profiler.OPERATORS).read_text())["operators"]
    assert sum(row["seconds"] for row in everything) == pytest.approx(found["seconds"])
    assert sum(row["share"] for row in everything) == pytest.approx(1)


def test_writing_is_no_part_of_a_step(tiny_model, rows, tmp_path, monkeypatch):
    """It takes seconds, and they would be in the report's tokens a second."""
    order: list[str] = []
    for kind, name, word in ((StepMeter, "measured", "timed"), (Profile, "_write", "written")):
        real = getattr(kind, name)
        monkeypatch.setattr(kind, name, lambda *a, real=real, word=word, **k: order.append(word) or real(*a, **k))
    with Profile(tmp_path / "profile") as profile:
        helpers.train(tiny_model, rows, tmp_path / "c", *SETTINGS[:2], "train.max_steps=2", callbacks=[profile])
    assert order == ["timed", "timed", "written"]


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_short_run_is_traced_too(steps):
    found = windows(steps)
    assert found["active"] >= 1
    assert sum(found.values()) <= steps
    assert sum(found.values()) == min(steps, 6)


class Breaks(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 4:
            raise RuntimeError("in the middle of a traced step")


def test_a_run_that_ends_early_leaves_it_off(tiny_model, rows, tmp_path):
    with pytest.raises(RuntimeError, match="in the middle"), Profile(tmp_path / "profile") as profile:
        helpers.train(tiny_model, rows, tmp_path / "checkpoints", *SETTINGS, callbacks=[profile, Breaks()])
    assert not torch.autograd._profiler_enabled()
    assert read(tmp_path / "profile") is None


@pytest.mark.parametrize("more", [(), ("train.max_steps=1",)], ids=["long", "one step"])
def test_on_cuda_the_allocator_is_recorded_for_the_traced_steps_alone(more, tiny_model, rows, tmp_path, monkeypatch):
    calls = []
    memory = torch.cuda.memory

    def dump(path):
        calls.append("dumped")
        with open(path, "wb") as file:
            pickle.dump({"segments": []}, file)

    monkeypatch.setattr(memory, "_record_memory_history", lambda **options: calls.append(options))
    monkeypatch.setattr(memory, "_dump_snapshot", dump)
    with Profile(tmp_path / "profile", cuda=True) as profile:
        helpers.train(tiny_model, rows, tmp_path / "checkpoints", *SETTINGS, *more, callbacks=[profile])
    assert calls == [{"max_entries": profiler.MOST_EVENTS}, "dumped", {"enabled": None}]
    assert (tmp_path / "profile" / profiler.SNAPSHOT).exists()
