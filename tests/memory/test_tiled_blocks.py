"""The bill of MLPs in tiles beside the dry run, on settings nobody chose.

A sample runs each time; ``CRIA_ALL=1`` draws forty times as many.
"""

import contextlib
import os
import random

import pytest

from benchmarks.estimate_error import DEVICES, Setting, outside, setting
from cria_tricks.bill.moments import moments
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load.refusals import refuse
from cria_tricks.models.shape import facts_of, find_shape, shape_of
from cria_tricks.predict.dry_run import dry_run
from cria_tricks.predict.toggles import Target, longest
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches.folds import estimate, time_of
from tests.memory.cases import T4, bill, recipe

CASES = 320 if os.environ.get("CRIA_ALL") else 8


def drawn(number: int) -> tuple[Setting, Recipe] | None:
    """A setting of the benchmark's, in two to twenty tiles, half of them over fused functions; None if refused."""
    found = setting("tiles", number)
    draw = random.Random(f"tiles {number}")
    before = with_settings(Recipe(), found.sets)
    tokens = before.train.batch_size * before.data.max_length
    sets = [*found.sets, f"tricks.tiled_mlp={max(1, int(tokens / draw.uniform(2, 20)))}"]
    sets += [f"tricks.{name}=true" for name in ("fused_lora", "fused_blocks") if draw.random() < 0.5]
    wanted = with_settings(Recipe(), sets)
    with contextlib.suppress(BadInput):
        refuse(resolve(wanted, DEVICES[found.device]), facts_of(shape_of(found.config, found.model)), 1)
        return found, wanted
    return None


SETTINGS = [case for case in map(drawn, range(3 * CASES)) if case][:CASES]


@pytest.mark.parametrize(("one", "wanted"), SETTINGS, ids=lambda value: str(getattr(value, "model", "")))
def test_it_is_what_the_dry_run_counts(one, wanted):
    from transformers import AutoConfig

    device = DEVICES[one.device]
    by_hand = estimate(wanted, shape_of(one.config, one.model), device, trained_tokens=one.trained)
    config = AutoConfig.for_model(**one.config)
    counted = dry_run(
        resolve(wanted, device), config, wanted.train.batch_size, wanted.data.max_length, one.trained
    ).peak_bytes
    error = by_hand.peak_bytes / counted - 1
    print(f"{error:+.3%} at {by_hand.peak.name}: {one} {wanted.tricks}")
    assert not outside([error])


SETS = ("lora fp16 sdpa chunked checkpoint", "lora nf4 fp16 lean sdpa expand chunked offload", "sdpa", "side fp16 sdpa")


@pytest.mark.parametrize("toggles", SETS)
def test_a_tile_of_all_tokens_changes_nothing(toggles):
    """Neither a byte of any moment nor a second."""
    plain, whole = (bill(f"{toggles} tricks.tiled_mlp={tile}") for tile in ("false", "2048"))
    assert moments(plain.step, every_point=True) == moments(whole.step, every_point=True)
    shape, card = find_shape("llama-3.2-1b"), CARDS["t4"]
    both = [time_of(recipe(f"{toggles} tricks.tiled_mlp={tile}"), shape, card) for tile in ("false", "2048", "1024")]
    assert both[0] == both[1]
    assert both[2].flops > both[1].flops


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-8b"])
def test_the_longest_row_is_longer(model):
    """NF4 with checkpointing, the chunked loss and offload on a T4: at least a quarter more tokens."""
    toggles = "lora nf4 double fp16 lean sdpa expand chunked checkpoint offload 8bit"
    target = Target(find_shape(model), T4)
    plain, tiled = (longest(target, recipe(words)) for words in (toggles, f"{toggles} tile"))
    print(f"{model}: {plain:,} tokens, in tiles {tiled:,}")
    assert tiled > 1.25 * plain
