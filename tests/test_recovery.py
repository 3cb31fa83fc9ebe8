"""Out of memory is not the end: the run goes on with a smaller set, and is the run that had it from the start."""

import json
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import TrainerCallback

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput, Interrupted, OutOfMemory
from cria_tricks.common.units import human
from cria_tricks.data.lengths import full
from cria_tricks.hardware import T4, Device
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run import recovery, steps
from cria_tricks.run.candidates import EXACT
from cria_tricks.run.run import train
from cria_tricks.run.search import smaller
from cria_tricks.store import adaptations
from cria_tricks.store.adaptations import Adaptation
from cria_tricks.trainer.callbacks import StepMeter
from cria_tricks.trainer.shared import SharedTrainer
from tests.helpers import Killed
from tests.test_checkpoints import some_of
from tests.tolerances import ADAPTED_RUN

CPU = Device("cpu", "a CPU", (0, 0), real_bf16=False, memory_bytes=24 * 10**9)
EXACT_SETS = ("tricks.attention=sdpa", "tricks.chunked_loss=true", "lora.dropout=0.1")
"""With these, what is left to change are recomputed blocks, which are equal bit for bit."""


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> tuple[str, ...]:
    """Five short rows, two in a step, one of them shorter; it saves every second step and evaluates every third."""
    few = tmp_path_factory.mktemp("rows") / "few.jsonl"
    ranges = [range(0, 4), range(1, 14), range(2, 15), range(3, 16), range(4, 17)]
    rows = [{"prompt": "Count.", "completion": " ".join(map(str, numbers))} for numbers in ranges]
    few.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (
        "model=random:tiny", "tricks.peft=lora", "lora.r=2", "data.max_length=40", "train.learning_rate=0.001",
        "data.leakage=ignore", f"data.train={few}", f"data.eval={few}", "train.max_steps=6", "train.save_steps=2",
        "train.eval_steps=3", "train.batch_size=2", "train.on_oom=adapt", "train.monitor_seconds=0",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def a_small_step_is_enough(monkeypatch):
    """Most of this model is its vocabulary, so that a set saves little of the whole."""
    monkeypatch.setattr(recovery, "SMALLER", (0.99, 0.999))


def started(settings, out, *more, **options):
    return train(with_settings(Recipe(name="short"), [*settings, *more]), out, **options)


def losses(report, after: int = 0):
    """All that is learnt: losses, gradient norms, rates and tokens of each step, and the evaluations."""
    keys = ("step", "loss", "eval_loss", "grad_norm", "learning_rate", "tokens", "trained_tokens")
    return [{key: one[key] for key in keys if key in one} for one in report["history"] if one["step"] > after]


def small(trainer) -> bool:
    """Whether a trainer has a smaller set than the one that was asked for."""
    return bool(trainer.plan.checkpointing)


def full_at(monkeypatch, where, step=3, fits=small, error=MemoryError):
    """Let memory run out after so many steps, until the set fits."""

    class Full(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise error

    honest = SharedTrainer.loss_sum

    def loss_sum(self, model, batch):
        if self.state.global_step != step or fits(self):
            return honest(self, model, batch)
        if self.moment == where:
            torch.rand(7)  # the step had drawn some numbers
            raise error
        loss = honest(self, model, batch)
        return Full.apply(loss) if where == "backward pass" else loss

    def on_optimizer_step(self, args, state, control, **kwargs):
        if where == "optimizer step" and state.global_step == step and not fits(self.trainer):
            raise error  # the weights have changed already

    monkeypatch.setattr(SharedTrainer, "loss_sum", loss_sum)
    monkeypatch.setattr(StepMeter, "on_optimizer_step", on_optimizer_step, raising=False)


@pytest.fixture(scope="module")
def small_from_the_start(settings, tmp_path_factory):
    """The run that had the smaller set from the start."""
    return started(settings, tmp_path_factory.mktemp("small") / "run", *EXACT_SETS, "tricks.gradient_checkpointing=1")


@pytest.mark.parametrize(
    ("where", "error", "kept"),
    [
        ("forward pass", torch.OutOfMemoryError("CUDA out of memory."), 3),
        ("backward pass", MemoryError(), 3),
        ("optimizer step", RuntimeError("[enforce fail at alloc_cpu.cpp] . can't allocate memory"), 2),
    ],
)
def test_the_run_is_the_one_that_had_the_smaller_set_from_the_start(
    where, error, kept, settings, small_from_the_start, tmp_path, monkeypatch, capsys
):
    load = steps.load
    saved = []

    def watched(*arguments, **options):
        saved.append(sorted(path.name for path in (tmp_path / "run").glob("checkpoints/*")))
        return load(*arguments, **options)

    monkeypatch.setattr(steps, "load", watched)
    full_at(monkeypatch, where, error=error)
    report = started(settings, tmp_path / "run", *EXACT_SETS, console=Console(stderr=True, width=300))
    assert saved == [[], ["checkpoint-2", "checkpoint-3"][: kept - 1]], "nothing saved is lost"
    [adapted] = report["adapted"]
    assert (adapted["step"], adapted["during"]) == (kept, f"the {where} of step 4")
    assert (adapted["was"], adapted["set"]) == (
        {"tricks.gradient_checkpointing": False},
        {"tricks.gradient_checkpointing": 1},
    )
    assert adapted["chosen_bytes"] < adapted["needed_bytes"]
    assert losses(report) == losses(small_from_the_start), "bit for bit"
    assert [one["step"] for one in report["history"] if "loss" in one] == [1, 2, 3, 4, 5, 6]
    assert report["recipe"] == {**small_from_the_start["recipe"]}
    assert report["plan"]["checkpointing"]["blocks"] == 1
    said = f"out of memory in the {where} of step 4: going on from step {kept} with tricks.gradient_checkpointing=1,"
    assert said in capsys.readouterr().err
    text = (tmp_path / "run" / "report.md").read_text()
    assert f"## Out of memory\n\n- {said}" in text
    peaks = [one["peak_bytes"] for one in report["history"] if one["step"] > kept and "peak_bytes" in one]
    assert report["estimate"]["measured_bytes"] == max(peaks) < report["peak_bytes"], "those of the set that is billed"


@pytest.mark.parametrize(
    ("changed", "more"),
    [
        ({"tricks.chunked_loss": True}, ("tricks.attention=sdpa", "lora.dropout=0.1")),
        (
            {"train.batch_size": 1, "tricks.gradient_accumulation": 2},
            ("tricks.attention=sdpa", "tricks.chunked_loss=true"),
        ),
    ],
    ids=["logits", "micro-batch"],
)
def test_after_an_evaluation_that_ran_out_the_set_lowers_an_evaluation(changed, more, settings, tmp_path, monkeypatch):
    """Sums are taken in another order, so that losses are equal within rounding."""
    chosen = adaptations.in_words(changed).split()
    whole = started(settings, tmp_path / "whole", *more, *chosen)

    def fits(trainer):
        return trainer.plan.loss["kind"] == "chunked" and (len(changed) == 1 or trainer.args.train_batch_size == 1)

    full_at(monkeypatch, "evaluation", fits=fits)
    report = started(settings, tmp_path / "run", *more)
    [adapted] = report["adapted"]
    assert (adapted["step"], adapted["during"], adapted["set"]) == (3, "the evaluation after step 3", changed)
    for found, expected in zip(losses(report, after=2), losses(whole, after=2), strict=True):
        assert found.keys() == expected.keys()
        assert found == pytest.approx(expected, rel=ADAPTED_RUN)
        assert found.get("trained_tokens") == expected.get("trained_tokens"), "the same rows in each step"


def test_before_anything_is_saved_it_begins_again(settings, small_from_the_start, tmp_path, monkeypatch):
    full_at(monkeypatch, "optimizer step", step=1)
    report = started(settings, tmp_path / "run", *EXACT_SETS)
    assert [one["step"] for one in report["adapted"]] == [0]
    assert losses(report) == losses(small_from_the_start)


def test_a_stream_goes_on_with_its_next_rows(settings, tmp_path, monkeypatch):
    stream = (*EXACT_SETS, "data.stream=true", "train.eval_steps=6")
    whole = started(settings, tmp_path / "whole", *stream, "tricks.gradient_checkpointing=1")
    for step, kept in some_of(((1, 0), (3, 3)), "stream"):
        with monkeypatch.context() as patch:
            full_at(patch, "backward pass" if kept else "optimizer step", step=step)
            report = started(settings, tmp_path / f"run-{step}", *stream)
        assert [one["step"] for one in report["adapted"]] == [kept]
        assert losses(report) == losses(whole)
        assert report["data"]["train_rows"] == whole["data"]["train_rows"]


def test_memory_that_really_has_a_limit(settings, small_from_the_start, tmp_path, monkeypatch):
    """All storages of a step are counted, and the first that goes over the limit raises, wherever it is."""
    before = started(settings, tmp_path / "whole", *EXACT_SETS, "train.on_oom=stop")
    peaks = [one["estimate"]["measured_bytes"] for one in (small_from_the_start, before)]
    honest = LiveBytes.__torch_dispatch__
    limit = sum(peaks) / 2
    assert peaks[0] < limit < peaks[1]

    def count(self, *arguments):
        result = honest(self, *arguments)
        if self.peak > limit:
            raise MemoryError
        return result

    monkeypatch.setattr(LiveBytes, "__torch_dispatch__", count)
    report = started(settings, tmp_path / "run", *EXACT_SETS)
    assert [one["set"] for one in report["adapted"]] == [{"tricks.gradient_checkpointing": 1}]
    assert losses(report) == losses(small_from_the_start)
    assert report["peak_bytes"] <= limit


def test_nothing_of_the_failed_try_is_alive_when_the_next_one_loads(settings, tmp_path, monkeypatch):
    full_at(monkeypatch, "backward pass", step=0)
    alive = []
    modules = []
    load = steps.load

    def watched(*arguments, **options):
        alive.append([module() is not None for module in modules])
        loaded = load(*arguments, **options)
        # bitsandbytes has a list of its own, of embeddings.
        modules.extend(weakref.ref(module) for module in (loaded.model, loaded.model.get_input_embeddings()))
        return loaded

    monkeypatch.setattr(steps, "load", watched)
    started(settings, tmp_path / "run", *EXACT_SETS, "tricks.optimizer=adamw_8bit", "train.max_steps=1")
    assert alive == [[], [False, False]]


def test_after_three_smaller_sets_it_stops_with_the_table(settings, tmp_path, monkeypatch, run_cria):
    full_at(monkeypatch, "forward pass", fits=lambda trainer: False)
    sets = [word for setting in (*settings, "lora.dropout=0.1") for word in ("--set", setting)]
    code, _, stderr = run_cria("train", "baseline", *sets, "--out", tmp_path / "run")
    assert code == 3
    lines = stderr.splitlines()
    assert lines[-1].startswith("error: out of memory in the forward pass of step 4; the newest checkpoint is ")
    assert "checkpoint-3; of an estimated " in lines[-1], "what is saved, and what would help"
    assert lines[-1].endswith("; train.on_oom=adapt: 3 smaller sets ran out, too")
    recorded = json.loads((tmp_path / "run" / "run.json").read_text())["adapted"]
    needed = [one["needed_bytes"] for one in recorded] + [recorded[-1]["chosen_bytes"]]
    assert len(recorded) == 3
    assert sorted(needed, reverse=True) == needed
    rows = lines[-5:-1]
    assert ["forward pass of step 4" in row for row in rows] == [True] * 4
    assert rows[0].endswith("  at first")
    for row, one in zip(rows[1:], recorded, strict=True):
        assert row.endswith(f"  then {adaptations.in_words(one['set'])}")
        assert row.strip().startswith(human(one["chosen_bytes"]))


def test_a_smaller_set_that_cannot_be_loaded_ends_the_run_with_the_table(settings, tmp_path, monkeypatch, capsys):
    full_at(monkeypatch, "backward pass", step=0)
    load = steps.load
    loaded = []

    def once(*arguments, **options):
        loaded.append(arguments)
        if len(loaded) == 2:
            raise MemoryError
        return load(*arguments, **options)

    monkeypatch.setattr(steps, "load", once)
    with pytest.raises(OutOfMemory, match="out of memory while the model was loaded"):
        started(settings, tmp_path / "run", *EXACT_SETS, console=Console(stderr=True, width=300))
    assert capsys.readouterr().err.splitlines()[-1].endswith("  the backward pass of step 1  at first")


def test_without_a_smaller_set_it_stops_and_says_so(settings, tmp_path, monkeypatch):
    monkeypatch.setattr(recovery, "SMALLER", (0.005, 0.01))
    full_at(monkeypatch, "forward pass")
    with pytest.raises(OutOfMemory, match="adapt: no set with the same results needs less than 1% of"):
        started(settings, tmp_path / "run", *EXACT_SETS)
    assert "adapted" not in json.loads((tmp_path / "run" / "run.json").read_text())


@pytest.mark.parametrize("own", [(), ("tricks.gradient_checkpointing=1",)])
def test_stopped_and_resumed_with_adapt_it_keeps_its_set(
    own, settings, small_from_the_start, tmp_path, monkeypatch, capsys
):
    """Stopped as today, resumed with ``adapt``, killed, and resumed again: with what was asked for, or with its set."""
    full_at(monkeypatch, "forward pass")
    with pytest.raises(OutOfMemory, match="with train.on_oom=adapt, --resume goes on with a smaller set"):
        started(settings, tmp_path / "run", *EXACT_SETS, "train.on_oom=stop")
    died = TrainerCallback()

    def on_step_end(args, state, control, **kwargs):
        if state.global_step == 5:
            raise Killed

    died.on_step_end = on_step_end
    onlookers = steps._onlookers

    class Dying:
        def __init__(self, *arguments):
            self.inner = onlookers(*arguments)

        def __enter__(self):
            return [died, *self.inner.__enter__()]

        def __exit__(self, *error):
            return self.inner.__exit__(*error)

    with monkeypatch.context() as patch:
        patch.setattr(steps, "_onlookers", Dying)
        with pytest.raises(Killed):
            started(settings, tmp_path / "run", *EXACT_SETS, resume=True)
    with pytest.raises(BadInput, match=r"tricks.gradient_checkpointing \(False, now True\)"):
        started(settings, tmp_path / "run", *EXACT_SETS, "tricks.gradient_checkpointing=true", resume=True)
    report = started(
        settings, tmp_path / "run", *EXACT_SETS, *own, resume=True, console=Console(stderr=True, width=300)
    )
    said = "going on with the smaller set of switches that the run has chosen: "
    assert said + ("it is the one asked for" if own else "tricks.gradient_checkpointing=1") in capsys.readouterr().err
    assert len(report["adapted"]) == 1
    assert losses(report) == losses(small_from_the_start)


def test_a_set_is_kept_though_no_checkpoint_is_as_new(settings, small_from_the_start, tmp_path, monkeypatch):
    load = steps.load
    loaded = []

    def once(*arguments, **options):
        loaded.append(arguments)
        if len(loaded) == 2:
            raise Killed
        return load(*arguments, **options)

    with monkeypatch.context() as patch:
        full_at(patch, "optimizer step", step=1)
        patch.setattr(steps, "load", once)
        with pytest.raises(Killed):
            started(settings, tmp_path / "run", *EXACT_SETS)
    assert not list((tmp_path / "run").glob("checkpoints/*"))
    report = started(settings, tmp_path / "run", *EXACT_SETS, resume=True)  # where memory would be enough
    assert [one["step"] for one in report["adapted"]] == [0]
    assert report["plan"]["checkpointing"]["blocks"] == 1
    assert losses(report) == losses(small_from_the_start)


def test_who_asked_for_the_end_gets_it(settings, tmp_path, monkeypatch):
    full_at(monkeypatch, "backward pass")
    honest = SharedTrainer.training_step

    def training_step(self, *arguments, **options):
        self.stop.requested = self.state.global_step == 3
        return honest(self, *arguments, **options)

    monkeypatch.setattr(SharedTrainer, "training_step", training_step)
    with pytest.raises(Interrupted, match="interrupted: out of memory in the backward pass of step 4; the state after"):
        started(settings, tmp_path / "run", *EXACT_SETS)


def failing(*settings, strategy="none", during="the forward pass of step 4"):
    """A job whose only try fails."""
    recipe = with_settings(Recipe(), settings)
    plan = SimpleNamespace(parallel={"strategy": strategy}, steps_by_torch=True, compiled=False, device=CPU)
    job = SimpleNamespace(recipe=recipe, plan=plan)

    def attempt(job):
        raise OutOfMemory("out", during)

    return job, attempt


@pytest.mark.parametrize(
    ("settings", "options", "said"),
    [
        ((), {}, "out"),
        (("train.on_oom=adapt",), {"during": ""}, "out"),
        (("train.on_oom=adapt",), {}, "out; train.on_oom=adapt: this kind of model cannot be estimated, so no smaller"),
        (
            ("train.on_oom=adapt",),
            {"strategy": "ddp"},
            "out; train.on_oom=adapt: a run with parallel.strategy=ddp cannot",
        ),
    ],
    ids=["stop is the default", "while loading", "no estimate", "several processes"],
)
def test_where_it_cannot_go_on_it_stops(settings, options, said):
    job, attempt = failing(*settings, **options)
    with pytest.raises(OutOfMemory) as caught:
        recovery.until_it_fits(job, recovery.Known(None, "", {"train": None}, 8), attempt)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("settings", "change", "may"),
    [
        ((), ["train.batch_size=1"], True),
        (("lora.dropout=0.1",), ["train.batch_size=1"], False),
        (("data.stream=true",), ["train.batch_size=1"], False),
        ((), ["tricks.paged_optimizer=true"], False),
        (("tricks.optimizer=adamw_8bit",), ["tricks.paged_optimizer=true"], True),
        (("lora.dropout=0.1",), ["tricks.attention=sdpa"], True),
    ],
)
def test_what_may_change_in_the_middle_of_a_run(settings, change, may):
    recipe = with_settings(Recipe(), ["train.batch_size=2", *settings])
    known = recovery.Known(None, "random:tiny", {}, 8)
    allowed = recovery._allowed(recipe, known, in_evaluation=False)
    assert allowed(recipe)
    assert allowed(with_settings(recipe, change)) == may


@pytest.mark.parametrize(
    ("before", "change", "may"),
    [
        ([], "tricks.gradient_checkpointing=true", False),
        ([], "tricks.attention=sdpa", True),
        ([], "train.batch_size=1", True),
        (["tricks.chunked_loss=true"], "tricks.attention=sdpa tricks.chunked_loss=false", False),
        ([], "train.batch_size=4 tricks.chunked_loss=true", False),
    ],
)
def test_what_makes_an_evaluation_smaller(before, change, may):
    recipe = with_settings(Recipe(), ["train.batch_size=2", *before])
    allowed = recovery._allowed(recipe, recovery.Known(None, "random:tiny", {}, 8), in_evaluation=True)
    assert allowed(with_settings(recipe, change.split())) == may


def test_a_model_that_drops_something_keeps_its_attention_and_its_micro_batch(tmp_path):
    (tmp_path / "config.json").write_text('{"attention_dropout": 0.1}')
    recipe = with_settings(Recipe(), ["train.batch_size=2"])
    allowed = recovery._allowed(recipe, recovery.Known(None, str(tmp_path), {}, 8), in_evaluation=False)
    changes = {"tricks.attention=sdpa": False, "train.batch_size=1": False, "tricks.chunked_loss=true": True}
    for change, may in changes.items():
        assert allowed(with_settings(recipe, [change])) == may


@pytest.mark.parametrize("share", [0.9, 0.7, 0.5])
def test_on_a_card_the_next_set_is_the_fastest_on_another_machine_the_nearest(share):
    recipe = with_settings(recipes.capstone(T4), ["data.max_length=1024", "tricks.gradient_checkpointing=false"])
    lengths = full(recipe, "")
    for device in (T4, CPU):
        target = Target(find_shape("llama-3.2-1b"), device)
        wanted = with_settings(recipe, ["tricks.precision=fp32"]) if device is CPU else recipe
        needed = target.memory(wanted).needed_bytes
        found = smaller(target, wanted, lengths, share * needed, lambda one: one.train.batch_size == 1)
        assert target.memory(found.recipe).needed_bytes == found.memory.needed_bytes <= share * needed
        assert found.recipe.rows_per_step == wanted.rows_per_step
        assert found.recipe.train.batch_size == 1
        if device is CPU:
            assert found.seconds == 0
            [one] = found.set
            blocks = found.recipe.tricks.gradient_checkpointing
            assert one == f"tricks.gradient_checkpointing={blocks}"
            fewer = with_settings(wanted, [f"tricks.gradient_checkpointing={blocks - 1}"])
            assert target.memory(fewer).needed_bytes > share * needed, "no block more than needed"
        else:
            assert found.seconds > 0
    assert smaller(target, recipe, lengths, 1, lambda one: True) is None


def test_the_fields_that_may_change_are_those_of_the_search():
    searched = {"gradient_accumulation", "gradient_checkpointing", "attention", *EXACT}
    assert {"train.batch_size", *(f"tricks.{name}" for name in searched)} == adaptations.FIELDS


ENTRY = Adaptation(
    step=3, during="x", was={"tricks.gradient_checkpointing": False}, set={"tricks.gradient_checkpointing": 1},
    needed_bytes=2, chosen_bytes=1,
)  # fmt: skip


def test_a_record_is_read_applied_and_accepted_exactly():
    about = json.loads(json.dumps({"adapted": adaptations.written([ENTRY])}))
    [found] = adaptations.read(about, Path("here"))
    assert found == ENTRY
    changed = adaptations.applied(Recipe(), [found])
    assert changed.tricks == Recipe().tricks.model_copy(update={"gradient_checkpointing": 1})
    assert adaptations.differing(Recipe(), changed) == (found.was, found.set)
    values = (False, 0, 1, True, 2)
    accepted = [adaptations.accepts([found], "tricks.gradient_checkpointing", value) for value in values]
    assert accepted == [True, False, True, False, False]
    assert not adaptations.accepts([found], "lora.r", 1)
    assert adaptations.in_words({"tricks.attention": "sdpa", "a.b": True}) == "tricks.attention=sdpa a.b=true"


@pytest.mark.parametrize(
    "record",
    [[{}], ["x"], 3, [{**ENTRY.model_dump(), "set": {"lora.r": 4}}], [{**ENTRY.model_dump(), "more": 1}]],
    ids=repr,
)
def test_a_record_of_another_kind_is_refused(record):
    with pytest.raises(BadInput, match="--resume: here: its record of smaller sets cannot be read; start again"):
        adaptations.read({"adapted": record}, Path("here"))


@pytest.mark.parametrize("name", ["smoke", "kwanzaa", "kwanzaa_small"])
def test_named_recipes_go_on_but_not_on_a_card_where_nobody_has_shown_it_yet(name):
    assert recipes.get(name, CPU).train.on_oom == "adapt"
    assert recipes.get(name, T4).train.on_oom == "stop"
    assert with_settings(recipes.get(name, T4), ["on_oom=adapt"]).train.on_oom == "adapt"
    assert Recipe().train.on_oom == recipes.baseline(CPU).train.on_oom == "stop"


def test_the_mirror_cannot_end_a_run_that_goes_on(tmp_path, monkeypatch):
    from cria_tricks.common.errors import Unwritten
    from cria_tricks.store import run_folder

    said = []
    recipe = with_settings(Recipe(), [f"train.mirror={tmp_path / 'mirror'}"])
    folders = run_folder.Folders(recipe, tmp_path / "run", False, {}, said.append)
    written = []

    def write_file(path, text):
        if path.parent == folders.mirror:
            raise Unwritten(path, "no space")
        written.append(json.loads(text))

    monkeypatch.setattr(run_folder.atomic_files, "write_file", write_file)
    folders.adapt(ENTRY)
    folders.adapt(replace_step(ENTRY, 5))
    assert [len(about["adapted"]) for about in written] == [1, 2]
    assert [sentence.startswith("warning: train.mirror: ") for sentence in said] == [True, True]


def replace_step(entry: Adaptation, step: int) -> Adaptation:
    return entry.model_copy(update={"step": step})
