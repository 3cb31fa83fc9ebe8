"""--fit: the search for the fastest, the smallest and the longest set of toggles that fits."""

import functools
import json

import pytest

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.common.units import human
from cria_tricks.data.lengths import Lengths, full
from cria_tricks.hardware import T4, Device
from cria_tricks.hardware.trust import MARGIN
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run import search
from cria_tricks.run.search import NothingFits
from cria_tricks.switches import TECHNIQUES


def kwanzaa(*settings: str) -> Recipe:
    """The smallest set, so that there is something to find."""
    return with_settings(recipes.capstone(T4), settings)


@functools.cache  # several tests look at one search
def found(recipe: Recipe, aim: str = "fastest", **more) -> search.Found:
    target = Target(find_shape(recipe.model), T4)
    return search.search(target, recipe, aim, full(recipe, "a test"), **more)


def seconds(recipe: Recipe) -> float:
    setting = Target(find_shape(recipe.model), T4).bill(recipe)
    return setting.seconds * recipe.rows_per_step * recipe.data.max_length


UNKNOWN = Device("cuda", "a card of 8 GiB", (8, 6), real_bf16=True, memory_bytes=8 * 2**30)
SMALL = ("data.max_length=512",)
BIG = ("model=llama-3.1-8b",)


@pytest.mark.parametrize("settings", [SMALL, BIG, ("data.max_length=8192",)], ids=["small", "8B", "long"])
def test_the_fastest_set_fits_with_a_margin_and_no_neighbour_that_fits_is_faster(settings):
    recipe = kwanzaa(*settings)
    target = Target(find_shape(recipe.model), T4)
    chosen = found(recipe).chosen
    limit = (1 - MARGIN) * T4.memory_bytes
    assert chosen.memory.needed_bytes <= limit
    assert chosen.seconds < seconds(recipe)
    assert chosen.seconds == pytest.approx(seconds(chosen.recipe), rel=1e-9)
    blocks = target.shape.layers
    for value in (False, *range(1, blocks), True):  # all numbers of checkpointed blocks, beside the chosen toggles
        other = search.changed(chosen.recipe, {"gradient_checkpointing": value}, chosen.recipe.train.batch_size)
        if target.works(other) and target.memory(other).needed_bytes <= limit:
            assert seconds(other) >= chosen.seconds * 0.999


def test_the_kwanzaa_recipe_on_a_t4_is_what_is_found():
    """But for the two fused toggles, which no T4 has run yet."""
    fused = with_settings(recipes.kwanzaa(T4), ["tricks.fused_lora=true", "tricks.fused_blocks=true"])
    assert found(kwanzaa()).chosen.recipe == fused
    assert found(recipes.kwanzaa(T4)).chosen.recipe == fused


def test_what_is_learnt_stays_and_so_do_the_rows_of_a_step():
    for settings in (SMALL, BIG):
        recipe = kwanzaa(*settings)
        for aim in search.AIMS:
            chosen = found(recipe, aim).chosen.recipe
            assert chosen.rows_per_step == recipe.rows_per_step
            kept = {
                "precision",
                "quantization",
                "double_quantization",
                "peft",
                "optimizer",
                "lean_preparation",
                "packing",
            }
            assert all(getattr(chosen.tricks, name) == getattr(recipe.tricks, name) for name in kept)
            assert (chosen.lora, chosen.model) == (recipe.lora, recipe.model)


def test_only_toggles_that_claim_to_be_exact_are_free():
    claims = {}
    for trick in TECHNIQUES:
        claims |= {switch.partition("=")[0]: trick.TECHNIQUE.claim for switch in trick.TECHNIQUE.switches}
    for name in (*search.LONG, *search.FREE, "gradient_checkpointing", "gradient_accumulation", "attention"):
        assert claims[name] in ("exact", "exact within rounding", "exact without clipping"), name
    assert all(claims[name] not in ("exact",) for name in search.ALLOWED)


def test_steps_in_the_backward_pass_are_tried_where_no_norm_is_limited():
    """With them a step is one micro-batch, so the rows of a step are not divided."""
    all_weights = ["model=llama-3.2-1b", "tricks.precision=fp16", "tricks.optimizer=adamw_8bit", "train.batch_size=2"]
    limited = with_settings(Recipe(), [*all_weights, "data.max_length=256"])
    free = with_settings(limited, ["train.max_grad_norm=0"])
    target = Target(find_shape(free.model), T4)
    for recipe, rows in ((limited, {False: {1, 2}}), (free, {False: {1, 2}, True: {2}})):
        tried: dict[bool, set[int]] = {}
        for one in search.candidates(target, recipe, search.LONG, ()):
            tried.setdefault(one.tricks.optimizer_in_backward, set()).add(one.train.batch_size)
            assert target.works(one) or not one.tricks.optimizer_in_backward
        assert tried == rows
        assert found(recipe, "smallest").chosen.recipe.tricks.optimizer_in_backward is (True in rows)


def test_the_smallest_needs_least_and_the_longest_has_the_longest_rows_that_fit():
    recipe = kwanzaa(*SMALL)
    by_aim = {aim: found(recipe, aim).chosen for aim in search.AIMS}
    needed = {aim: choice.memory.needed_bytes for aim, choice in by_aim.items() if aim != "longest"}
    assert needed["smallest"] == min(needed.values())
    longest = by_aim["longest"]
    assert longest.recipe.data.max_length == longest.tokens > 512
    target = Target(find_shape(recipe.model), T4)
    assert target.memory(longest.recipe).verdict == "fits"
    longer = with_settings(longest.recipe, [f"data.max_length={longest.tokens + 1}"])
    assert target.memory(longer).verdict != "fits" or longest.tokens == target.shape.context
    assert f"data.max_length={longest.tokens}" in longest.set


def test_a_choice_that_leaves_little_has_a_safer_one_beside_it():
    result = found(kwanzaa(*BIG))
    assert result.chosen.memory.needed_bytes > search.SAFER * T4.memory_bytes
    assert result.safer is not None
    assert result.safer.memory.needed_bytes <= search.SAFER * T4.memory_bytes
    assert result.safer.seconds > result.chosen.seconds
    assert found(kwanzaa("data.max_length=256")).safer is None
    assert result.runner_up is not None
    assert result.runner_up.seconds > result.chosen.seconds


def test_its_changes_are_settings_that_make_the_chosen_recipe():
    for settings in (SMALL, BIG):
        recipe = kwanzaa(*settings)
        chosen = found(recipe).chosen
        assert with_settings(recipe, chosen.set) == chosen.recipe


def test_shorter_rows_in_a_micro_batch_of_unequal_ones_are_padding():
    """Rows of 10 and 2,000 tokens: two in a micro-batch cost more than one after the other."""
    recipe = kwanzaa("data.max_length=2000")
    target = Target(find_shape(recipe.model), T4)
    lengths = Lengths(2000, 1005, 20, each=(10,) * 10 + (2000,) * 10)
    unequal = search.search(target, recipe, "fastest", lengths).chosen
    assert unequal.recipe.train.batch_size == 1
    assert lengths.mean_of(2) > 1.4 * lengths.mean_of(1)


def test_what_may_change_changes_only_when_it_is_allowed():
    """What the refusals name is asked again in tests/test_best_set.py."""
    recipe = kwanzaa("model=llama-3.1-8b", "tricks.quantization=none", "tricks.double_quantization=false")
    with pytest.raises(OutOfMemory, match=r"no set of switches fits Tesla T4 .* needs .* this fits: --set "):
        found(recipe)
    for settings, kind in ((["tricks.quantization=nf4", "model=llama-3.1-70b"], "host"),
                           (["tricks.peft=none", "tricks.chunked_loss=false"], "adapter")):  # fmt: skip
        with pytest.raises(NothingFits) as caught:
            found(with_settings(recipe, [*settings, "tricks.gradient_accumulation=1"]), "smallest")
        assert caught.value.ways[0].kind == kind
    chosen = found(recipe, may_change=("quantization",)).chosen
    assert chosen.recipe.tricks.quantization in ("int8", "nf4")


@pytest.mark.parametrize(
    ("aim", "may_change", "says"),
    [("fastst", (), "--fit fastst: did you mean fastest"), ("fastest", ("peft",), "--may-change peft: ")],
)
def test_unknown_words_are_refused_in_one_line(aim, may_change, says):
    with pytest.raises(BadInput, match=says):
        found(kwanzaa(), aim, may_change=may_change)


def test_a_card_whose_speed_is_not_known_is_searched_by_bytes_alone():
    recipe = with_settings(recipes.kwanzaa(UNKNOWN), ["model=llama-3.2-3b"])
    target = Target(find_shape(recipe.model), UNKNOWN)
    with pytest.raises(BadInput, match="speed of a card of 8 GiB is not known.*; --fit nearest .* --fit smallest"):
        search.search(target, recipe, "fastest", full(recipe, ""))
    smallest, longest = (search.search(target, recipe, aim, full(recipe, "")) for aim in ("smallest", "longest"))
    needed = smallest.chosen.memory.needed_bytes
    assert needed < min(target.memory(recipe).needed_bytes, longest.chosen.memory.needed_bytes)
    assert longest.chosen.tokens > recipe.data.max_length
    assert smallest.for_plan.chosen.seconds_per_step is None
    assert search.in_words(smallest).endswith(f"(needs {human(needed)})")


@pytest.mark.parametrize("model", ["llama-3.2-1b", "llama-3.1-70b"])
def test_a_search_compares_few_enough_sets_for_five_seconds(model, monkeypatch):
    """Counted and not timed: a bill takes about 1.5 ms, so 3,000 of them are 4.5 s."""
    bills = []
    memory = Target.memory
    found.cache_clear()
    monkeypatch.setattr(Target, "memory", lambda self, *given: bills.append(1) or memory(self, *given))
    try:
        found(kwanzaa(f"model={model}"))
    except OutOfMemory:
        assert model == "llama-3.1-70b"
    assert 0 < len(bills) < 3000


def test_plan_says_what_it_chose_the_next_best_and_the_safer(run_cria):
    asked = ("plan", "kwanzaa", "--gpu", "t4", "--model", "llama-3.1-8b", "--fit", "fastest")
    code, stdout, stderr = run_cria(*asked, "--json")
    assert (code, stderr) == (0, "")
    answer = json.loads(stdout)
    fit = answer["fit"]
    assert (fit["aim"], fit["chosen"]["needed_bytes"]) == ("fastest", answer["needed_bytes"])
    assert fit["chosen"]["seconds_per_step_low"] < fit["chosen"]["seconds_per_step"]
    assert fit["safer"]["needed_bytes"] < fit["chosen"]["needed_bytes"]
    shown = run_cria(*asked)[1]
    for word in (f"the fastest of {fit['tried']}", "chosen", "next best", "safer", *fit["chosen"]["set"]):
        assert word in shown
    again = ("plan", "kwanzaa", "--gpu", "t4", "--model", "llama-3.1-8b", "--json")
    sets = [word for one in fit["chosen"]["set"] for word in ("--set", one)]
    assert json.loads(run_cria(*again, *sets)[1])["needed_bytes"] == answer["needed_bytes"]


def test_launch_hands_the_search_on(run_cria):
    _, stdout, _ = run_cria("launch", "kwanzaa", "--on", "torchrun", "--nproc", "2", "--fit", "smallest",
                            "--may-change", "packing", "--print")  # fmt: skip
    assert "--fit smallest --may-change packing" in stdout


def test_micro_batches_that_several_processes_cannot_share_are_left_out():
    recipe = with_settings(recipes.qlora(T4), ["model=smollm2", "parallel.strategy=ddp", "tricks.expand_kv=false"])
    target = Target(find_shape("smollm2"), T4, 2)
    chosen = search.search(target, recipe, "fastest", full(recipe, "a test")).chosen
    assert target.works(chosen.recipe)
    assert chosen.recipe.tricks.gradient_accumulation % 2 == 0
