"""The predicted time of answers, by hand, and as counts of real passes of ``generate`` give it."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from cria_tricks.bill import launches, products
from cria_tricks.bill.step_time import ends
from cria_tricks.hardware import T4, Device
from cria_tricks.hardware.cards import CARDS, Card
from cria_tricks.hardware.reached import Reached
from cria_tricks.load import cache
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import answer_time
from cria_tricks.predict.answer_time import Asked, batch, evaluations, of_eval, of_samples, opened, seconds
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.recipes import smoke
from cria_tricks.run.api import plan
from cria_tricks.tricks import folds
from tests.hardware import models
from tests.hardware.test_launches import Operations
from tests.helpers import train

CPU = Device("cpu", "a processor", (0, 0), real_bf16=False, memory_bytes=2**34)
LORA = with_settings(Recipe(), ["tricks.peft=lora"])
# One operation or byte a second, and half a second to start a kernel: a time is a count.
COUNTING = Card(CPU, 1.0, 1.0, 1.0, 1.0, "made up", Reached(1, 1, 1, 0.5, 1.5, "made up", link=1))
ONE_MATRIX = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96
"""The weights of a block of ``models.WIDTHS``: 4 heads of 16, 2 of them with keys and values."""


def test_a_batch_counted_by_hand():
    """Two rows, prompts of 5 tokens, 3 new ones, in fp32: one pass for the prompts, and two for one token."""
    work = replace(opened(Recipe(), models.shape(), CPU), batch=2, tokens=5)
    assert work.compute_itemsize == 4
    found = batch(work, COUNTING, 3)
    prompts, answers = ({part.name: part for part in parts} for parts in (found.parts[:8], found.parts[8:]))
    weights = 3 * ONE_MATRIX
    for parts, passes, positions in ((prompts, 1, 2 * 5), (answers, 2, 2 * 2)):
        assert parts["blocks"].flops == 2 * positions * weights
        widths = 2 * (64 + 64) + 2 * (64 + 32) + 2 * (64 + 96) + (96 + 64)  # read and written by the seven products
        assert parts["blocks"].bytes == 4 * (3 * positions * widths + passes * weights)
        assert parts["head"].flops == 2 * 64 * 160 * 2 * passes
        assert parts["head"].bytes == passes * (4 * 160 * 64 + 2 * 160 * (4 + 4 + 4))
        assert parts["unpacking"].bytes == parts["casts of weights"].bytes == parts["adapter"].bytes == 0
        started = passes * (3 * (34 + 2 + 3) + 72)
        assert parts["launches"].seconds == 0.5 * started, "a CPU spends this time beside the rest"
    # Tokens that attend to 1, 2, ..., 5 in the prompt, then to 6 and to 7.
    assert prompts["attention"].flops == 4 * 3 * 64 * 2 * (1 + 2 + 3 + 4 + 5)
    assert answers["attention"].flops == 4 * 3 * 64 * 2 * (6 + 7)
    a_token = 2 * 3 * 32 * 4
    written = 3 * 2 * (64 + 32) * 4  # queries, output, keys and values of a position
    assert answer_time.cache_bytes(models.shape(), 4) == a_token
    assert prompts["attention"].bytes == 2 * 5 * a_token + 2 * 5 * written
    assert answers["attention"].bytes == 2 * (6 + 7) * a_token + 2 * 2 * written
    by_hand = sum(max(part.flops, part.bytes) for part in found.parts) + 0.5 * (3 * 39 + 72) * 3
    assert found.seconds == by_hand
    assert found.tokens == 2 * 3


def test_four_bit_weights_are_unpacked_for_each_token_and_an_adapter_is_read():
    nf4 = with_settings(LORA, ["tricks.quantization=nf4", "tricks.precision=fp16"])
    work = replace(folds.work(nf4, models.shape(), T4), batch=1, tokens=5)
    parts = {part.name: part for part in batch(work, COUNTING, 3).parts[8:]}
    weights, adapter = 3 * ONE_MATRIX, work.trained_weights
    assert parts["unpacking"].bytes == 2 * (0.5 + 4 / 64 + 2) * weights, "read packed and written, in both passes"
    thin = 3 * sum(d_in + 2 * 16 + d_out for d_in, d_out in models.shape().linears.values())
    assert parts["adapter"].bytes == 2 * (thin * 2 + adapter * (4 + 2 + 2))
    assert parts["adapter"].flops == 2 * 2 * adapter


class Moved(TorchDispatchMode):
    """Bytes that operations read and write; views move none (lessons/flash_decoding.py)."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func.overloadpacket.__name__.startswith(("_unsafe_view", "empty", "new_empty")):
            tensors = (x for x in tree_iter((args, kwargs, out)) if isinstance(x, torch.Tensor))
            self.count += sum(min(x.untyped_storage().nbytes(), x.numel() * x.itemsize) for x in tensors)
        return out


def of_last_token(mode, attention: str, layers: int, rows: int, prompt: int, adapter: bool = False, dtype="fp32"):
    """What the last of several passes of ``generate`` counts."""
    recipe = with_settings(LORA if adapter else Recipe(), [f"tricks.attention={attention}"])
    made, _ = models.model(recipe, attention, num_hidden_layers=layers)
    made = made.to(torch.bfloat16 if dtype == "bf16" else torch.float32).eval()
    made.config.use_cache = True
    ids = torch.randint(3, 90, (rows, prompt), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1:, :2] = 0
    counts = []
    for new in (3, 4):
        options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        with torch.no_grad(), mode() as seen:
            made.generate(
                input_ids=ids,
                attention_mask=mask,
                eos_token_id=[1],
                **cache.for_answers(made, prompt + new),
                **options,
            )
        counts.append(seen.count)
    return counts[1] - counts[0]


@pytest.mark.parametrize(("adapter", "dtype"), [(False, "fp32"), (True, "fp32"), (True, "bf16")])
def test_a_new_token_starts_so_many_kernels(adapter, dtype):
    work = opened(LORA, models.shape(), CPU, with_adapter=adapter)
    work = replace(work, compute_itemsize=2 if dtype == "bf16" else 4)
    blocks = products.blocks(work)
    forward = replace(blocks, passes={**blocks.passes, "backward": 0})
    for rows in (1, 3):
        two, three = (of_last_token(Operations, "sdpa", layers, rows, 9, adapter, dtype) for layers in (2, 3))
        in_blocks = launches.of_answer_pass(replace(work, batch=rows), forward) - launches.TOKEN
        assert in_blocks == 3 * (three - two)
        assert launches.TOKEN - 25 < three - in_blocks <= launches.TOKEN


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_what_a_longer_past_adds_to_a_token(attention):
    short, long = (of_last_token(Moved, attention, 3, 1, prompt) for prompt in (64, 320))
    work = replace(opened(Recipe(), models.shape(), CPU), batch=1, kernel="flash" if attention == "sdpa" else "eager")

    def attended(prompt: int) -> int:
        parts = [batch(replace(work, tokens=prompt), COUNTING, new).parts[8:] for new in (3, 4)]
        before, after = (next(part.bytes for part in each if part.name == "attention") for each in parts)
        return after - before

    # Token ids and the mask grow, too, by some bytes a token; scores are known within 10 %.
    assert attended(320) - attended(64) == pytest.approx(long - short, rel=0.1)


def test_more_of_anything_takes_longer():
    shape, card = find_shape("llama-3.2-1b"), CARDS["t4"]
    usual = Asked(rows=9, prompt=600, new=200, together=4)

    def time(shape=shape, **other):
        return seconds(opened(LORA, shape, T4), card, replace(usual, **other))

    assert time() < time(new=201) < time(new=400)
    assert time() < time(prompt=601) < time(prompt=1200)
    assert time() < time(rows=10) < time(rows=40)
    assert time() < time(together=2) < time(together=1), "weights are read once for all rows of a batch"
    assert time() < time(shape=replace(shape, layers=shape.layers + 1))
    assert seconds(opened(LORA, shape, T4, with_adapter=False), card, usual) < time()
    assert time(rows=8) + time(rows=1) == pytest.approx(time(rows=9)), "the last batch has one row"


def test_a_token_takes_at_least_the_time_of_its_bytes():
    """No answer is predicted faster than the flash-decoding lesson's bound: weights and cache, over bandwidth."""
    shape, card = find_shape("llama-3.2-1b"), CARDS["t4"]
    work = replace(opened(Recipe(), shape, card.device), batch=1, tokens=1000)
    a_token = (batch(work, card, 1001).seconds - batch(work, card, 1).seconds) / 1000
    read = 2 * shape.active_weights + answer_time.cache_bytes(shape, 2) * 1500
    bound = read / (card.memory_rate * card.reached.memory)
    assert bound < a_token < 1.1 * bound


def test_what_does_not_fit_has_no_time():
    whole = plan("kwanzaa", gpu="t4", rows_full=True, model="llama-3.1-70b")
    assert whole.answers.eval_seconds is None
    assert "cria eval --with-base" not in str(whole)


def test_a_learnt_prompt_is_answered_row_by_row_and_a_side_network_is_not_predicted():
    shape, card = models.shape(), CARDS["t4"]
    learnt = with_settings(Recipe(), ["tricks.peft=prompt_tuning", "prompt.tokens=7"])
    work = opened(learnt, shape, T4)
    asked = Asked(rows=3, prompt=20, new=5, together=3)
    assert seconds(work, card, asked) == 3 * batch(replace(work, batch=1, tokens=20), card, 5).seconds
    side = with_settings(Recipe(), ["tricks.peft=side_network", "side.blocks=1", "eval.samples=2"])
    assert of_samples(side, shape, card, 20) is None
    assert of_eval(side, shape, card, asked, with_adapter=True) is None
    assert of_eval(side, shape, card, asked, with_adapter=False) is not None, "its base has a cache"


@pytest.mark.parametrize(
    "settings",
    [
        ("train.max_steps=4", "train.eval_steps=2"),
        ("train.max_steps=3", "train.eval_steps=2"),
        ("train.epochs=2", "train.batch_size=2"),
        ("train.epochs=1.5", "tricks.gradient_accumulation=2"),
        ("train.epochs=2", "train.eval_steps=3", "tricks.gradient_accumulation=3"),
        ("train.max_steps=5", "tricks.gradient_accumulation=2"),
    ],
)
def test_evaluations_are_those_of_a_real_run(settings, tiny_model, rows, tmp_path):
    recipe = with_settings(Recipe(), settings)
    run, _ = train(tiny_model, rows, tmp_path / "run", "tricks.peft=lora", *settings, eval_rows=rows[:1])
    assert evaluations(recipe, len(rows)) == len(run.evaluations)
    known = evaluations(recipe, None)
    assert known in (None, len(run.evaluations))
    rows_decide = bool(recipe.train.eval_steps) != bool(recipe.train.max_steps)
    assert (known is None) == rows_decide


SMOKE = {"gpu": "t4", "rows_full": True}


def test_a_plan_says_what_the_answers_of_a_run_take_at_most():
    samples = ["eval.samples=3", "eval.max_new_tokens=100"]
    off, on = (plan("smoke", rows=32, settings=settings, **SMOKE) for settings in ([], samples))
    card = CARDS["t4"]
    recipe = with_settings(smoke(T4), samples)
    middle = seconds(folds.work(recipe, find_shape("smollm2"), T4), card, Asked(3, 1024, 100, recipe.train.batch_size))
    assert on.answers.evaluation_seconds == pytest.approx(ends(middle, card.spread("fp16"))[1])
    assert (off.answers.evaluation_seconds, on.answers.evaluations) == (0, 3)
    longer = on.prices[0].minutes_high - off.prices[0].minutes_high
    assert 60 * longer == pytest.approx(3 * on.answers.evaluation_seconds)
    assert "eval.samples: at most " in str(on)
    assert "at 3 evaluations, in the minutes to train" in " ".join(str(on).split())
    assert "eval.samples" not in str(off)
    unknown = plan("smoke", settings=samples, **SMOKE)
    assert unknown.answers.evaluations is None
    assert "eval.samples: at each evaluation at most " in str(unknown)
    assert plan("smoke", gpu="12GiB", rows_full=True, settings=samples).answers is None, "its rates are not known"


def test_a_plan_says_what_cria_eval_takes_at_most():
    full = plan("smoke", **SMOKE)
    asked = Asked(rows=8, prompt=1024, new=2048, together=8)
    both = (of_eval(smoke(T4), find_shape("smollm2"), CARDS["t4"], asked, with_adapter=on) for on in (True, False))
    assert full.answers.eval_seconds == pytest.approx(sum(both))
    assert "for each 8 evaluation rows, up to 2,048 tokens each" in " ".join(str(full).split())
