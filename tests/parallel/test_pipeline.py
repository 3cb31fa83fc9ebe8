"""Pipeline parallelism: one process's gradients, losses and adapter; kept micro-batches; bytes sent; the idle share."""

import contextlib
import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from transformers import TrainerCallback

from cria_tricks.bill.calls import totals
from cria_tricks.common.errors import BadInput, Diverged
from cria_tricks.data.batches import PadToLongest, real_tokens
from cria_tricks.data.tokens import IGNORED
from cria_tricks.load import overlapped_offload
from cria_tricks.load.adapters import add_lora
from cria_tricks.load.stages import KINDS, cut, find_blocks
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.measure.memory import every_tensor
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel.pipeline import NOT_LORA, bubble, gpipe, one_forward_one_backward, step, traffic
from cria_tricks.parallel.timetable import idle_share, timetable
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.trainer.fit import fit, training
from cria_tricks.trainer.pipeline_stage import Part
from tests.helpers import difference, prepare, train
from tests.parallel.pipelines import (
    GRADIENT,
    LORA,
    LOSS,
    WEIGHTS,
    T,
    alone,
    bytes_of_a_step,
    gradients_of,
    learning,
    make_four_blocks,
    piped,
    ragged,
    same_run,
    stage_of,
    tokens_of,
    trained,
    windows,
)

ORDERS = {"1f1b": one_forward_one_backward, "gpipe": gpipe}


@pytest.fixture(scope="module")
def four_blocks(tmp_path_factory) -> Path:
    return make_four_blocks(tmp_path_factory.mktemp("four-blocks"))


def by_torch(folder: Path, schedule: str, many: int) -> tuple[dict[str, torch.Tensor], list[tuple[str, int]]]:
    """The gradients of this stage, and the passes that it made in their order."""
    _, stage = stage_of(folder, schedule=schedule)
    [window] = windows(ragged(many), 1, 4)
    stage.step(window, tokens_of(ragged(many)))
    return gradients_of(stage.part.model), [(slot.what, slot.number) for slot in stage.stage.slots]


def by_the_reference(folder: Path, schedule: str, many: int) -> tuple[dict[str, torch.Tensor], int]:
    """The same over plain sends and receives, and the most micro-batches that were kept."""
    stage, stages = dist.get_rank(), dist.get_world_size()
    part = stage_of(folder)[1].part
    [window] = windows(ragged(many), 1, 4)
    ids, labels = window["input_ids"].split(1), window["labels"].split(1)

    def run(x_BTD: torch.Tensor | None, number: int) -> torch.Tensor:
        y = part(ids[number] if x_BTD is None else x_BTD)
        return part.loss_sum(y, labels[number]) / tokens_of(ragged(many)) if part.last else y

    most = step(run, ORDERS[schedule](stage, stages, 4), stage, stages, torch.empty(1, T, 64))
    return gradients_of(part.model), most


@pytest.mark.parametrize("many", [4, 3], ids=["whole window", "partial window"])
@pytest.mark.parametrize("schedule", ORDERS)
@pytest.mark.parametrize("stages", ["two", "four"])
def test_math(stages, schedule, many, four_blocks, request):
    """Gradients of the reference, of torch's schedule and of one process are the same, each in its stage only."""
    ranks, expected = request.getfixturevalue(stages), alone(four_blocks, many)
    found = ranks.run(by_torch, four_blocks, schedule, many)
    reference = ranks.run(by_the_reference, four_blocks, schedule, many)
    assert sorted(name for grads, _ in found for name in grads) == sorted(expected)
    for (grads, passes), (again, _), stage in zip(found, reference, range(ranks.size), strict=True):
        assert passes == ORDERS[schedule](stage, ranks.size, 4)
        for name, gradient in grads.items():
            assert difference(gradient, expected[name]) < GRADIENT
            assert torch.equal(again[name], gradient)


def peaks(folder: Path, schedule: str, *settings: str) -> int:
    """The most bytes that this stage keeps for its backward passes, weights and labels not counted."""
    _, stage = stage_of(folder, *settings, schedule=schedule)
    [window] = windows(ragged(4), 1, 4)
    stage.step(window, 1)  # before its first step torch runs a micro-batch, to see shapes
    with SavedBytes(besides=[*every_tensor(stage.part), window["labels"]]) as saved:
        stage.step(window, 1)
    assert not stage.stage.output_chunks, "torch would keep every micro-batch's logits to give them back"
    return saved.peak


@pytest.mark.parametrize("stages", ["two", "four"])
def test_mechanism(stages, four_blocks, request):
    """A stage keeps the activations of S - s micro-batches in 1F1B, and of all in GPipe."""
    ranks = request.getfixturevalue(stages)
    every, few = (ranks.run(peaks, four_blocks, schedule) for schedule in ("gpipe", "1f1b"))
    for stage in range(ranks.size):
        one_micro_batch, left = divmod(every[stage], 4)
        assert left == 0
        assert few[stage] == (ranks.size - stage) * one_micro_batch
    for stage, one_block in enumerate(ranks.run(peaks, four_blocks, "1f1b", "tricks.gradient_checkpointing=true")):
        assert one_block < few[stage] / 2
    kept = [most for _, most in ranks.run(by_the_reference, four_blocks, "1f1b", 4)]
    assert kept == [ranks.size - stage for stage in range(ranks.size)]


PRECISIONS = {
    "fp32": (),
    "bf16": ("tricks.precision=bf16",),
    "fp16, NF4": ("tricks.precision=fp16", "tricks.quantization=nf4"),
}


def sent(folder: Path, *settings: str) -> dict[str, int]:
    """What this stage's second step sends: before the first torch asks the stages for their shapes."""
    _, stage = stage_of(folder, *settings)
    return bytes_of_a_step(stage, list(windows(ragged(8), 2, 4)) * 2)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_mechanism_traffic(precision, four_blocks, two):
    """Each stage sends k times B T D numbers, on or back, and a few numbers for the norm."""
    settings = ("train.batch_size=2", *PRECISIONS[precision])
    recipe, shape = with_settings(Recipe(), [*LORA, *settings]), find_shape(str(four_blocks))
    for stage, counted in enumerate(two.run(sent, four_blocks, *settings)):
        assert counted == totals(traffic(recipe, shape, 2, stage, tokens=T))
        assert counted["send"] == 4 * 2 * T * 64 * (2 if precision == "bf16" else 4)


def buffers(folder: Path) -> int:
    """Bytes that torch's stage keeps to receive into, from its first step on."""
    _, stage = stage_of(folder)
    stage.step(next(windows(ragged(4), 1, 4)), 1)
    received = (stage.stage.args_recv_info, stage.stage.grad_recv_info)
    # In older versions what is given to the first stage, and not received, has no such attribute.
    of_all = [getattr(info, "buffer", None) for each in received for infos in each.values() for info in infos]
    return sum(buffer.nbytes for buffer in of_all if buffer is not None)


def test_mechanism_buffers(four_blocks, four):
    """What the card says of torch's stages: a buffer each way for all k micro-batches, not for those under way."""
    each_way = 4 * T * 64 * 4
    assert four.run(buffers, four_blocks) == [each_way, 2 * each_way, 2 * each_way, each_way]


def held(folder: Path) -> dict[str, int]:
    """Numbers of elements, by the names that parameters have in the whole model."""
    _, stage = stage_of(folder)
    return {name: p.numel() for name, p in stage.part.model.named_parameters(remove_duplicate=False)}


def test_mechanism_weights(four_blocks, four):
    """Every block is in one stage, the embedding in the first, norm and head in the last; nothing else is anywhere."""
    whole = {name: p.numel() for name, p in learning(four_blocks)[2].named_parameters(remove_duplicate=False)}
    found = four.run(held, four_blocks)
    for stage, names in enumerate(found):
        blocks = {name for name in whole if f".layers.{stage}." in name}
        ends = {"embed_tokens"} if stage == 0 else {"embed_tokens", "lm_head", ".model.norm"} if stage == 3 else set()
        others = {name for name in whole if any(end in name for end in ends)}
        # The head is tied: where one of the two names is held, so is the other, and it is one tensor.
        assert blocks <= set(names) <= blocks | others | {"base_model.model.lm_head.weight"}
        assert {name: whole[name] for name in names} == names
    assert set().union(*found) == set(whole)


SWITCHES = {
    "20 steps": ("train.max_steps=20",),
    "NF4, chunked loss, two rows": (
        "tricks.quantization=nf4", "tricks.double_quantization=true", "tricks.chunked_loss=true", "train.batch_size=2",
    ),
    "packed": ("tricks.packing=true", "tricks.attention=sdpa", "data.max_length=48"),
    "fp16, clipped, decayed": ("tricks.precision=fp16", "train.max_grad_norm=0.5", "train.weight_decay=0.1"),
    "checkpointed, DoRA, AdamW in 8 bits": (
        "tricks.gradient_checkpointing=true", "lora.dora=true", "lora.r=16", "tricks.optimizer=adamw_8bit",
    ),
    "fused": (
        "tricks.fused_lora=true", "tricks.fused_blocks=true", "tricks.gradient_checkpointing=2", "lora.dropout=0",
    ),
    "tiled": ("tricks.tiled_mlp=5", "tricks.gradient_checkpointing=2", "lora.dropout=0"),
    "three of four checkpointed": (
        "tricks.gradient_checkpointing=3", "tricks.attention=sdpa", "tricks.keep_attention=true", "lora.dropout=0",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SWITCHES)
def test_switch(name, four_blocks, two, tmp_path):
    """One process and two stages: the same history. Every third window is partial."""
    settings, precision = ("train.max_steps=6", "train.eval_steps=5", *SWITCHES[name]), name[:4].replace("20 s", "fp32")
    run, loaded = train(four_blocks, ragged(), tmp_path, *LORA, *settings, eval_rows=ragged(5))
    (first, blocks), (last, others) = two.run(trained, four_blocks, *settings)
    same_run(first, run.history, LOSS.get(precision, LOSS["fp32"]))
    assert [entry.get("loss") for entry in first] == [entry.get("loss") for entry in last]
    expected = {key: p for key, p in loaded.model.named_parameters() if p.requires_grad}
    assert not blocks.keys() & others.keys()
    assert (blocks | others).keys() == expected.keys()
    for key, weight in (blocks | others).items():
        assert difference(weight, expected[key]) < WEIGHTS.get(precision, WEIGHTS["fp32"])


def test_a_stage_without_an_embedding_steps_in_8_bits(two, tmp_path):
    """transformers registers every embedding with bitsandbytes, and the last stage has none to show."""
    untied = make_four_blocks(tmp_path / "untied", tied=False)
    settings = ("train.max_steps=2", "lora.r=16", "tricks.optimizer=adamw_8bit")
    run, _ = train(untied, ragged(), tmp_path / "run", *LORA, *settings, eval_rows=ragged(5))
    (first, _), (last, _) = two.run(trained, untied, *settings)
    same_run(first, run.history, LOSS["fp32"])
    assert [entry.get("loss") for entry in first] == [entry.get("loss") for entry in last]


class OverflowOnce(TrainerCallback):
    """In the first step a matrix of the last stage alone has an infinite gradient; it sees which steps move weights."""

    def __init__(self, model: Any, last: bool):
        self.own = [p for name, p in model.named_parameters() if p.requires_grad and (".layers.3." in name) == last]
        self.before = [p.detach().clone() for p in self.own]
        self.hook = self.own[0].register_hook(lambda gradient: gradient / (0 if last else 1))
        self.moved: list[bool] = []

    def on_step_end(self, args, state, control, **kwargs):
        self.hook.remove()
        self.moved.append(any(not torch.equal(p, b) for p, b in zip(self.own, self.before, strict=True)))


def overflowing(folder: Path, out: Path, *settings: str) -> Any:
    """Two steps: whether each moved weights, whether it was skipped, and its learning rate; or what was said."""
    chosen = (*LORA, *piped(), "train.max_steps=2", "train.schedule=linear", *settings)
    recipe, plan, loaded = prepare(folder, *chosen, processes=2)
    world = World.of(1, "cpu", "stage")
    watch = OverflowOnce(loaded.model, world.stage == 1)
    given = (loaded, plan, recipe.train, ragged(4), (), Checkpoints(out))
    try:
        run = fit(training(*given, pad_id=2, world=world, callbacks=[watch]))
    except Diverged as error:
        return str(error)
    steps = zip(watch.moved, run.training, strict=True)
    return [(moved, entry["skipped"], entry["learning_rate"]) for moved, entry in steps]


def test_an_overflow_in_one_stage_skips_the_step_in_all(four_blocks, two, tmp_path):
    settings = ("tricks.precision=fp16", "train.warmup_ratio=0")
    first, second = two.run(overflowing, four_blocks, tmp_path, *settings)
    assert first == second
    assert first == [(False, 1, 0.005), (True, 0, 0.005)], "the schedule waits, too"


def test_gradients_that_are_not_finite_stop_all_stages(four_blocks, two, tmp_path):
    said, again = two.run(overflowing, four_blocks, tmp_path)
    assert said == again
    assert "not finite at step 1; stopped before the optimizer touched any weight" in said


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_make_the_whole(kind, tied):
    """One after the other in one process they give the logits of the model that they were cut from, bit for bit."""
    from transformers import AutoConfig, AutoModelForCausalLM

    widths = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **widths, num_hidden_layers=3, vocab_size=128, tie_word_embeddings=tied)
    plan = resolve(with_settings(Recipe(), ["tricks.peft=lora", "lora.target_modules=q_proj,v_proj"]))
    model = add_lora(AutoModelForCausalLM.from_config(config, attn_implementation="eager"), plan).eval()
    ids = torch.randint(0, 128, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = x = model(input_ids=ids).logits
        x = ids
        for blocks in find_blocks("1,1,1", 3, 3, kind):
            cut(part := copy.deepcopy(model), blocks)
            x = Part(part, plan, contextlib.nullcontext, first=blocks.start == 0, last=blocks.stop == 3).eval()(x)
    assert torch.equal(x, expected)


def contexts_of_a_run(folder: Path) -> tuple[int, list[float]]:
    """How often this stage entered the plan's context in one step of four micro-batches, and the losses."""
    entered = []
    with pytest.MonkeyPatch.context() as patch:
        watch = lambda model, plan: contextlib.nullcontext(entered.append(model))  # noqa: E731
        patch.setattr(overlapped_offload, "offloaded", watch)
        history, _ = trained(folder, "tricks.activation_offload=true", "train.max_steps=1", "train.eval_steps=9")
    return len(entered), [entry["loss"] for entry in history if "loss" in entry]


def test_what_a_plan_lays_around_a_forward_pass_is_there(four_blocks, two):
    """Around each micro-batch of the step and of the two evaluations, and torch's look at shapes; around losses too."""
    (first, losses), (last, again) = two.run(contexts_of_a_run, four_blocks)
    assert losses == again
    assert first >= 3 * 4
    assert last >= 2 * first - 4


def test_windows_hold_every_row_once():
    """Two pipelines together have what one has; the last window is filled with rows in which nothing is trained."""
    rows = ragged(11)
    whole, even, odd = (list(windows(rows, 1, 4, share, of)) for share, of in ((0, 1), (0, 2), (1, 2)))
    for all_four, *halves in zip(whole, even, odd, strict=True):
        assert torch.equal(torch.stack([half["labels"] for half in halves], dim=1).flatten(0, 1), all_four["labels"])
        assert sum(real_tokens(half) for half in halves) == real_tokens(all_four)
    ids = [row for window in whole for row in window["input_ids"].tolist()]
    assert ids[:11] == [row["input_ids"] + [0] * (T - len(row["input_ids"])) for row in rows]
    assert len(ids) == 12
    assert (whole[-1]["labels"][3:] == IGNORED).all()
    assert sum(real_tokens(window) for window in whole) == sum(len(row["input_ids"]) for row in rows)


def test_packed_rows_that_are_padding_throughout_have_no_tokens():
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8], "position_ids": [0, 1, 0, 1]}]
    window = PadToLongest(0, count=3, length=6)(rows)
    assert window["input_ids"].shape == (3, 6)
    assert real_tokens(window) == 4


@pytest.mark.parametrize("micro_batches", [4, 5, 16])
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_formula_is_the_timetable(stages, order, micro_batches):
    """Of equally long stages S - 1 of k + S - 1 slots are idle, however long a pass takes, in both orders."""
    orders = [order(stage, stages, micro_batches) for stage in range(stages)]
    for backward in (1.0, 2.0, 3.0):
        slots = timetable(orders, forward=1.0, backward=backward)
        assert idle_share(slots) == pytest.approx(bubble(stages, micro_batches))
        ends = {(slot.what, slot.number, stage): slot.end for stage, mine in enumerate(slots) for slot in mine}
        assert len(ends) == 2 * stages * micro_batches
        for stage, mine in enumerate(slots):
            assert all(before.end <= after.begin for before, after in itertools.pairwise(mine))
            for slot in mine:
                source = stage - 1 if slot.what == "F" else stage + 1
                assert slot.begin >= ends.get((slot.what, slot.number, source), 0)
                assert slot.what == "F" or slot.begin >= ends["F", slot.number, stage]


def test_a_stage_that_takes_longer_makes_all_wait():
    slots = timetable([one_forward_one_backward(stage, 2, 8) for stage in range(2)])
    slots[1] = [slot._replace(begin=2 * slot.begin, end=2 * slot.end) for slot in slots[1]]
    assert idle_share(slots) > bubble(2, 8)


RECIPE = with_settings(Recipe(name="mine"), [*LORA, "parallel.strategy=pipeline"])


@pytest.mark.parametrize(
    ("settings", "size", "data", "said"),
    [
        ([], 1, 1, "strategy=pipeline: needs two processes or more, and this is one; start it with cria launch"),
        ([], 3, 2, "parallel.pipelines=2 with 3 processes: each pipeline takes as many, and two or more; start 4$"),
        ([], 2, 2, "parallel.pipelines=2 with 2 processes: .* start 4$"),
        (["tricks.gradient_accumulation=1"], 2, 1, "at least .* stages .2.*; set tricks.gradient_accumulation=2$"),
        (["tricks.gradient_accumulation=5"], 4, 2, "no more than another one; set tricks.gradient_accumulation=6$"),
        (["tricks.gradient_accumulation=2"], 4, 2, "set tricks.gradient_accumulation=4$"),
        (["data.stream=true", "train.max_steps=1"], 2, 1, "with data.stream=true: .*; set data.stream=false"),
        *(
            ([f"tricks.peft={kind}"], 2, 1, f"pipeline with tricks.peft={kind}: {why}; set tricks.peft=lora")
            for kind, why in NOT_LORA.items()
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(settings, size, data, said):
    with pytest.raises(BadInput, match=said) as error:
        resolve(with_settings(RECIPE, [*settings, f"parallel.pipelines={data}"]), processes=size)
    assert "\n" not in str(error.value)


def test_what_a_refusal_says_to_set_is_taken():
    for setting, size, data in (("tricks.gradient_accumulation=1", 6, 2), ("tricks.gradient_accumulation=7", 4, 2)):
        wanted = with_settings(RECIPE, [setting, f"parallel.pipelines={data}"])
        with pytest.raises(BadInput) as error:
            resolve(wanted, processes=size)
        plan = resolve(with_settings(wanted, [str(error.value).rpartition("set ")[2]]), processes=size)
        assert plan.parallel["data"] == data


@pytest.mark.parametrize(
    ("sizes", "layers", "stages", "kind", "said"),
    [
        ("", 2, 4, "llama", "4 stages for 2 blocks: each needs one; start at most 2 stages"),
        ("3", 4, 2, "llama", "parallel.stage_blocks=3: name 2 numbers that add up to 4, e.g. 2,2"),
        ("4,0", 4, 2, "llama", "parallel.stage_blocks=4,0"),
        ("-1,5", 4, 2, "llama", "parallel.stage_blocks=-1,5"),
        ("two,2", 4, 2, "llama", "parallel.stage_blocks=two,2"),
        ("", 4, 2, "gemma2", "a model of kind gemma2: a pipeline cuts llama"),
    ],
)
def test_blocks_that_do_not_fit_are_refused_in_one_line(sizes, layers, stages, kind, said):
    with pytest.raises(BadInput, match=said):
        find_blocks(sizes, layers, stages, kind)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "smoke", "--nproc", "2", "--set", "parallel.stage_blocks=3"], "parallel.stage_blocks=3: name 2"),
        (["plan", "smoke", "--nproc", "2", "--model", "gemma"], "a model of kind gemma: a pipeline cuts llama"),
        (["launch", "smoke", "--on", "torchrun", "--nproc", "31", "--print", "--set",
          "tricks.gradient_accumulation=31"], "31 stages for 30 blocks"),
        (["train", "smoke"], "needs two processes or more, and this is one"),
    ],
)  # fmt: skip
def test_every_command_refuses_before_it_loads_weights(words, said, run_cria, tmp_path, monkeypatch):
    widths = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 96}
    (tmp_path / "gemma").mkdir()
    config = json.dumps({"model_type": "gemma", "vocab_size": 128, "num_key_value_heads": 2, **widths})
    (tmp_path / "gemma" / "config.json").write_text(config)
    monkeypatch.chdir(tmp_path)
    code, stdout, stderr = run_cria(*words, "--set", "parallel.strategy=pipeline")
    assert (code, stdout, stderr.count("\n")) == (2, "", 1)
    assert said in stderr


def test_blocks_are_shared_evenly_or_as_asked():
    assert find_blocks("", 7, 3, "llama") == [range(3), range(3, 5), range(5, 7)]
    assert find_blocks("5, 2", 7, 2, "qwen2") == [range(5), range(5, 7)]
