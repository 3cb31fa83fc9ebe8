"""Each toggle alone, removed and in the ladder; what to flip; the front against brute force; the longest row."""

import itertools

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import Device
from cria_tricks.hardware.cards import CARDS
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import STRATEGIES
from cria_tricks.predict import toggles
from cria_tricks.predict.links import LINKS, compute_seconds, step_seconds
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.settings import Tricks
from cria_tricks.switches import FIELDS, NEEDS, needed
from cria_tricks.switches.folds import estimate
from tests.memory.cases import A100, CPU, EVERYTHING, T4, recipe

TARGET = Target(find_shape("llama-3.2-1b"), T4)
WHOLE = recipe(EVERYTHING)
ON = (
    "peft", "attention", "expand_kv", "gradient_checkpointing", "chunked_loss", "precision", "lean_preparation",
    "quantization", "double_quantization", "optimizer", "paged_optimizer",
)  # fmt: skip


def test_every_toggle_is_a_rung_and_what_one_needs_comes_before_it():
    assert set(FIELDS) == set(Tricks.model_fields)
    order = list(FIELDS)
    for switch in NEEDS:
        field = switch.partition("=")[0]
        assert all(order.index(other) < order.index(field) for other, _ in needed(switch))


def test_switched_on_are_those_that_differ_from_plain_training():
    assert toggles.switched_on(WHOLE) == list(ON)
    assert toggles.switched_on(recipe()) == []
    assert toggles.with_only(WHOLE, ON) == WHOLE
    assert toggles.with_only(WHOLE, ()) == recipe()


def test_a_toggle_alone_is_over_nothing_but_what_it_needs():
    found = {change.set.partition("=")[0]: change for change in toggles.alone(TARGET, WHOLE)}
    assert list(found) == list(ON)
    assert found["expand_kv"].beside == ("attention=sdpa",)
    assert found["lean_preparation"].beside == ("peft=lora", "precision=fp16")
    for field, change in found.items():
        assert change.before.recipe.tricks == with_settings(recipe(), beside(change)).tricks
        assert toggles.switched_on(change.after.recipe) == [f for f in ON if f in (*toggles.needs(WHOLE, field), field)]
        before, after = (setting.memory.peak_bytes for setting in (change.before, change.after))
        assert change.saved_bytes == before - after
        assert change.before.memory.training == estimate(change.before.recipe, TARGET.shape, T4)
    assert found["gradient_checkpointing"].saved_bytes > 0
    assert found["gradient_checkpointing"].slowdown > 1
    assert found["chunked_loss"].saved_bytes > 0


def beside(change) -> list[str]:
    return [f"tricks.{setting}" for setting in change.beside]


def test_a_toggle_removed_takes_those_with_it_that_cannot_do_without():
    found = {change.set.partition("=")[0]: change for change in toggles.removed(TARGET, WHOLE)}
    assert list(found) == list(ON)
    assert found["gradient_checkpointing"].beside == ()
    assert found["attention"].beside == ("expand_kv=true",)
    assert found["quantization"].beside == ("double_quantization=true",)
    assert set(found["peft"].beside) == {
        "quantization=nf4", "double_quantization=true", "lean_preparation=true", "chunked_loss=true",
    }  # fmt: skip
    for field, change in found.items():
        gone = {field, *(setting.partition("=")[0] for setting in change.beside)}
        assert toggles.switched_on(change.before.recipe) == [f for f in ON if f not in gone]
        assert change.after.recipe == WHOLE
    assert found["quantization"].saved_bytes > 900 * 2**20, "two bytes a weight of the matrices less a half"


def test_the_ladder_leads_from_nothing_to_the_whole_one_toggle_at_a_time():
    ladder_steps = toggles.ladder(TARGET, WHOLE)
    assert ladder_steps[0].recipe == recipe()
    assert ladder_steps[-1].recipe == WHOLE
    assert ladder_steps[-1].memory.peak_bytes == estimate(WHOLE, TARGET.shape, T4).peak_bytes
    assert [step.set[0].partition("=")[0] for step in ladder_steps[1:]] == list(ON)
    for below, above in itertools.pairwise(ladder_steps):
        assert len(toggles.switched_on(above.recipe)) == len(toggles.switched_on(below.recipe)) + 1
        assert TARGET.works(above.recipe)


def test_nothing_switched_on_has_a_ladder_of_one_rung():
    assert toggles.alone(TARGET, recipe()) == toggles.removed(TARGET, recipe()) == []
    assert len(toggles.ladder(TARGET, recipe())) == 1


@pytest.mark.parametrize("device", [T4, A100, CPU], ids=lambda device: device.name)
@pytest.mark.parametrize("words", ["lora fp16", "", "lora int8 fp16 sdpa", "head nf4 sdpa"])
def test_suggestions_save_something_work_and_come_with_the_smallest_slowdown_first(words, device):
    target, before = Target(TARGET.shape, device), recipe(words)
    found = toggles.suggestions(target, before)
    assert found
    slowdowns = [round(change.slowdown or 1, 2) for change in found]
    assert slowdowns == sorted(slowdowns)
    for first, second in itertools.pairwise(found):
        if round(first.slowdown or 1, 2) == round(second.slowdown or 1, 2):
            assert first.saved_bytes >= second.saved_bytes
    for change in found:
        assert change.saved_bytes > 0
        assert change.set.startswith("tricks.")
        flipped = with_settings(before, [change.set])
        assert flipped == change.after.recipe, "as --set takes it"
        resolve(flipped, device)
        assert change.saved_bytes == (
            estimate(before, target.shape, device).peak_bytes - estimate(flipped, target.shape, device).peak_bytes
        )


def test_what_would_have_no_effect_is_not_suggested():
    said = [change.set for change in toggles.suggestions(Target(TARGET.shape, CPU), recipe("lora sdpa"))]
    assert "tricks.activation_offload=true" not in said, "there is no other memory to offload to"
    said = [change.set for change in toggles.suggestions(TARGET, recipe("head"))]
    assert "tricks.gradient_checkpointing=true" not in said
    assert "tricks.attention=flash_attention_2" not in said


def test_a_recipe_that_is_refused_has_no_advice():
    with pytest.raises(BadInput, match="bf16|flash"):
        toggles.suggestions(TARGET, recipe("flash bf16"))


def test_a_card_whose_rates_are_not_known_has_bytes_and_no_time():
    target = Target(TARGET.shape, Device("cuda", "another card", (9, 0), real_bf16=True, memory_bytes=10**11))
    assert target.card is None
    assert target.bill(WHOLE).seconds is None
    assert all(change.slowdown is None for change in toggles.suggestions(target, recipe("lora")))
    assert len(toggles.front(target, recipe("lora"))) == 1, "the smallest; nothing else is compared"


SMALL = {
    "precision": ("fp32", "fp16"),
    "attention": ("eager", "sdpa"),
    "expand_kv": (False, True),
    "gradient_checkpointing": (False, True),
    "activation_offload": (False, True),
    "chunked_loss": (False, True),
}


def costs(target: Target, start) -> set[tuple[int, float]]:
    """Of every set of :data:`SMALL`, without a look at how the front is found."""
    found = set()
    for values in itertools.product(*SMALL.values()):
        wanted = dict(zip(SMALL, values, strict=True))
        settings = [f"tricks.{field}={str(value).lower()}" for field, value in wanted.items()]
        tried = with_settings(start, settings)
        if target.works(tried):
            setting = target.bill(tried)
            found.add((setting.memory.needed_bytes, setting.seconds))
    return found


def test_the_front_is_what_brute_force_leaves(monkeypatch):
    """64 sets: those of which no other is as small and as fast, and better in one of the two."""
    monkeypatch.setattr(toggles, "choices", lambda recipe, device, width: dict(SMALL))
    monkeypatch.setattr(
        toggles,
        "all_sets",
        lambda recipe, device, width: (dict(zip(SMALL, v, strict=True)) for v in itertools.product(*SMALL.values())),
    )
    every = costs(TARGET, recipe("lora"))
    best = {
        (size, time)
        for size, time in every
        if not any(s <= size and t <= time and (s, t) != (size, time) for s, t in every)
    }
    found = [(s.memory.needed_bytes, s.seconds) for s in toggles.front(TARGET, recipe("lora"))]
    assert len(found) == len(set(found)) == len(best)
    assert set(found) == best
    assert len(found) > 2


def test_the_whole_front_has_nothing_dominated_and_every_entry_can_be_set():
    start = recipe("lora fp16 sdpa")
    found = toggles.front(TARGET, start)
    costs = [(entry.seconds, entry.memory.needed_bytes) for entry in found]
    assert costs == sorted(costs), "the fastest first"
    assert [needed for _, needed in costs] == sorted((needed for _, needed in costs), reverse=True)
    assert len(set(costs)) == len(costs)
    for entry in found:
        assert with_settings(start, entry.set) == entry.recipe
        assert TARGET.works(entry.recipe)
        assert entry.recipe.tricks.peft == "lora", "what trains stays as it is"
    mine = TARGET.bill(start)
    assert found[0].seconds <= mine.seconds
    assert found[-1].memory.needed_bytes < mine.memory.needed_bytes


def test_the_front_leaves_idle_toggles_out():
    """Each of them would be the same cost under a longer name."""
    for entry in toggles.front(TARGET, recipe("lora fp16 sdpa")):
        tricks = entry.recipe.tricks
        assert tricks.attention == "sdpa" or not tricks.expand_kv
        assert tricks.quantization == "nf4" or not tricks.double_quantization


@pytest.mark.parametrize("words", [EVERYTHING, "lora fp16 sdpa", "lora"])
@pytest.mark.parametrize("device", [T4, A100], ids=lambda device: device.name)
def test_the_longest_row_fits_and_one_token_more_does_not(words, device):
    target, wanted = Target(TARGET.shape, device), recipe(words)
    found = toggles.longest(target, wanted)
    assert found > 0
    assert estimate(wanted, target.shape, device, found).verdict == "fits"
    assert estimate(wanted, target.shape, device, found + 1).verdict == "tight"


def test_the_longest_row_of_what_never_fits_is_none_and_there_is_an_end():
    assert toggles.longest(Target(find_shape("llama-3.1-70b"), T4), recipe("lora fp16 sdpa")) == 0
    endless = Device("cuda", "endless", (8, 0), real_bf16=True, memory_bytes=10**18)
    assert toggles.longest(Target(TARGET.shape, endless), recipe(EVERYTHING)) == toggles.LONGEST


@pytest.mark.parametrize(("card", "link"), [("t4", "pcie3"), ("l4", "pcie4"), ("a100", "pcie4")])
def test_several_cards_meet_over_the_bus_that_they_have(card, link):
    job = with_settings(WHOLE, ["parallel.strategy=ddp"])
    shape = TARGET.shape
    work = compute_seconds(job, shape, CARDS[card], "ddp", 2)
    expected = step_seconds(work, STRATEGIES["ddp"].traffic(job, shape, 2), LINKS[link]).seconds
    found = Target(shape, CARDS[card].device, 2).bill(job)
    tokens = job.train.batch_size * job.tricks.gradient_accumulation * job.data.max_length
    assert found.seconds == pytest.approx(expected / tokens)
