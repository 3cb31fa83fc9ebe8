"""The bill of a number of checkpointed blocks, and of kept attention, beside the dry run, on settings nobody chose.

A sample runs each time; ``CRIA_ALL=1`` draws fifty times as many, in about 12 minutes on one core.
"""

import contextlib
import itertools
import os
import random

import pytest

from benchmarks.estimate_error import DEVICES, Setting, outside, setting
from cria_tricks.bill.step_time import StepPart
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load.refusals import refuse
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import facts_of, shape_of
from cria_tricks.predict.dry_run import dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches.folds import estimate, time_of
from tests.memory.cases import T4, bill, recipe, skip_experts_shaped_by_numbers

CASES = 500 if os.environ.get("CRIA_ALL") else 10
L = 4
MOMENTS = {"loss", "log-softmax", "forward", "last block", "first kept block", "last checkpointed block", "first block"}


def drawn(number: int) -> tuple[Setting, Recipe] | None:
    """A setting of the benchmark's, with 0, 1, 2, L/2, L - 1, L or all blocks checkpointed; ``None`` if refused."""
    found = setting("k", number)
    draw = random.Random(f"k {number}")
    k = draw.choice(sorted({0, 1, min(2, found.blocks), found.blocks // 2, found.blocks - 1, found.blocks}))
    sets = [one for one in found.sets if "gradient_checkpointing" not in one]
    if "tricks.peft=side_network" in sets:
        k = True  # it takes no number
    sets.append(f"tricks.gradient_checkpointing={k}".lower())
    if k and draw.random() < 0.5:
        sets.append("tricks.keep_attention=true")
    wanted = with_settings(Recipe(), sets)
    with contextlib.suppress(BadInput):
        refuse(resolve(wanted, DEVICES[found.device]), facts_of(shape_of(found.config, found.model)), 1)
        return found, wanted
    return None


SETTINGS = [case for case in map(drawn, range(2 * CASES)) if case][:CASES]


@pytest.mark.parametrize(("one", "wanted"), SETTINGS, ids=lambda value: str(getattr(value, "model", "")))
def test_it_is_what_the_dry_run_counts(one, wanted):
    from transformers import AutoConfig

    skip_experts_shaped_by_numbers(one.model)
    device = DEVICES[one.device]
    by_hand = estimate(wanted, shape_of(one.config, one.model), device, trained_tokens=one.trained)
    config = AutoConfig.for_model(**one.config)
    counted = dry_run(
        resolve(wanted, device), config, wanted.train.batch_size, wanted.data.max_length, one.trained
    ).peak_bytes
    error = by_hand.peak_bytes / counted - 1
    print(f"{error:+.3%} at {by_hand.peak.name}: {one} {wanted.tricks}")
    assert not outside([error])


SETS = ("sdpa", "lora fp16 sdpa", "lora nf4 fp16 sdpa expand chunked", "lora int8 fp16 sdpa", "sdpa accumulate fp16")


@pytest.mark.parametrize("toggles", SETS)
def test_all_and_none_are_the_first_and_the_last_number(toggles):
    """0 is false and L is true, in every moment; in between each block more keeps less, in bytes and exactly alike."""
    bills = [bill(f"{toggles} tricks.gradient_checkpointing={k}", num_hidden_layers=L) for k in range(L + 1)]
    for found, expected in ((bills[0], bill(toggles, num_hidden_layers=L)),
                            (bills[L], bill(f"{toggles} checkpoint", num_hidden_layers=L))):  # fmt: skip
        assert [(moment.name, moment.lines) for moment in found.moments] == [
            (moment.name, moment.lines) for moment in expected.moments
        ]
    waiting = []
    for k in range(1, L):
        assert {moment.name for moment in bills[k].moments} >= MOMENTS - {"log-softmax"}
        lines = {moment.name: moment.lines for moment in bills[k].moments}
        waiting.append(sum(line.bytes for line in lines["loss"] if line.name == "saved activations"))
    assert waiting[0] - waiting[1] == waiting[1] - waiting[2] > 0


def test_what_waits_at_the_border():
    """B 1, T 2048, D 2048. The open block has its input among its own tensors, if a norm keeps it in fp32."""
    for toggles, itemsize, own in (("lora sdpa", 4, 0), ("lora fp16 sdpa", 2, 1)):
        for k in (1, 5, 15):
            lines = {
                moment.name: sum(line.bytes for line in moment.lines if line.name == "saved activations")
                for moment in bill(f"{toggles} tricks.gradient_checkpointing={k}").moments
            }
            an_input = 2048 * 2048 * itemsize
            assert lines["first kept block"] == k * an_input
            assert lines["last checkpointed block"] == (k - 1 + own) * an_input
            assert lines["first block"] == own * an_input
            a_kept_block = lines["loss"] - lines["last block"]
            assert lines["last block"] - lines["first kept block"] == (15 - k) * a_kept_block


def test_the_peak_may_stand_at_each_of_these_moments():
    """At the loss, in a kept block, or where the last checkpointed block is recomputed: which one depends on k."""
    long = {
        toggles: {bill(f"{toggles} tricks.gradient_checkpointing={k}", tokens=4096).peak.name for k in range(1, 16)}
        for toggles in ("lora fp16 chunked", "fp16 sdpa")
    }
    assert long == {
        "lora fp16 chunked": {"last block", "last checkpointed block"},
        "fp16 sdpa": {"loss", "first block"},
    }


@pytest.mark.parametrize("toggles", ["lora fp16 sdpa expand", "fp16", "lora offload bf16"])
def test_seconds_lie_on_a_line_from_none_to_all(toggles):
    """Each further block is recomputed at the same cost; with offload, its insides no longer travel."""
    shape, card = shape_of(CONFIGS["llama-3.2-1b"], "llama-3.2-1b"), CARDS["a100"]

    def parts(k: int | str) -> dict[str, StepPart]:
        wanted = recipe(f"{toggles} tricks.gradient_checkpointing={k}")
        return {part.name: part for part in time_of(wanted, shape, card).parts}

    found = [parts(k) for k in range(1, 17)]
    assert found[15] == parts("true")
    assert "blocks again" not in parts(0)
    for name in ("blocks again", "between products", "attention", "offload"):
        for column in ("flops", "bytes", "link_bytes"):
            numbers = [getattr(each[name], column) for each in found if name in each]
            steps = {after - before for before, after in itertools.pairwise(numbers)}
            assert not steps or max(steps) - min(steps) <= 2, "rounded numbers"
    assert ("offload" in found[0]) == ("offload" in toggles)
    if "offload" in toggles:
        none, one, all_blocks = (each["offload"].link_bytes for each in (parts(0), found[0], found[15]))
        assert none - one == pytest.approx((none - all_blocks) / 16, rel=1e-6)
        assert none > all_blocks


def test_more_blocks_than_the_model_has_are_refused_in_one_line():
    wanted = recipe("tricks.gradient_checkpointing=17")
    shape = bill("").step.shape
    said = "tricks.gradient_checkpointing=17: llama-3.2-1b has 16 blocks; set true for all, or 16 or less"
    for way in (
        lambda: estimate(wanted, shape, T4),
        lambda: refuse(resolve(wanted, T4), facts_of(shape), 1),
    ):
        with pytest.raises(BadInput) as caught:
            way()
        assert str(caught.value) == said
