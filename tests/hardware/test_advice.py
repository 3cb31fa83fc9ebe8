"""The guide's answer and ours, with an estimator whose numbers are easy to follow."""

import json
from dataclasses import asdict, fields
from typing import NamedTuple

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import between, money_between
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS, FLAVORS, L4, PRICES_DATE
from cria_tricks.models.shape import Shape, find_shape
from cria_tricks.predict.machines import METHODS, advise, recipe_for
from cria_tricks.predict.selection_guide import BY_BUDGET, BY_SIZE, recommendation_for
from cria_tricks.predict.words import in_figures, in_words, verdict
from cria_tricks.resolve import resolve

GIB = 2**30


class Memory(NamedTuple):
    """What a run needs, and the least that it can work with."""

    needed_bytes: int
    least_bytes: int


def estimate(recipe, shape, device) -> Memory:
    """So many bytes a parameter, and a MiB a token; nothing is reserved besides."""
    each = {"full": 16, "lora": 2, "qlora": 0.5}[recipe.name]
    needed = int(each * shape.weights) + recipe.data.max_length * 2**20
    return Memory(needed, needed)


def ask(model="llama-3.2-1b", **options):
    return advise(find_shape(model), estimate, **options)


def option(found, method, flavor):
    return next(o for o in found.options if (o.method, o.flavor) == (method, flavor))


def test_machines_whose_ranges_overlap_are_not_told_apart():
    found = ask()
    for what, best, close in (("cost", found.cheapest, found.as_cheap), ("minutes", found.fastest, found.as_fast)):
        for method in METHODS:
            first = option(found, method, best[method])
            high = getattr(first, f"{what}_high")
            for one in found.options:
                if one.method != method or not one.fits or FLAVORS[one.flavor].card == FLAVORS[first.flavor].card:
                    assert one.method != method or one.flavor not in close[method]
                else:
                    assert (one.flavor in close[method]) is (getattr(one, f"{what}_low") <= high)
    assert set(found.as_fast["qlora"]) == {"l4x4", "a10g-largex4"}, "four newer cards may be as fast as an A100"


def test_every_method_on_every_machine_fits_or_says_what_it_needs():
    found = ask("llama-3.1-8b")
    assert len(found.options) == len(METHODS) * len(FLAVORS)
    lora = option(found, "lora", "t4-small")
    assert (lora.fits, lora.minutes, lora.cost, lora.within_budget) == (False, None, None, None)
    assert lora.needed_bytes == 2 * found.parameters + 2 * GIB > lora.capacity_bytes == T4.memory_bytes
    there = option(found, "lora", "l4x1")
    assert there.fits
    assert there.cost == pytest.approx(there.minutes / 60 * FLAVORS["l4x1"].price)


def test_four_cards_hold_no_larger_model_than_one_and_take_a_quarter_of_the_time():
    """4 x 24 GB are 96 GB in the guide; data parallel they are 24, four times."""
    found = ask("llama-2-13b")
    one, four = option(found, "lora", "l4x1"), option(found, "lora", "l4x4")
    assert one.needed_bytes == four.needed_bytes
    assert one.capacity_bytes == four.capacity_bytes == L4.memory_bytes
    assert (one.fits, four.fits) == (False, False)
    assert any("the cards share the rows, not the model" in note for note in found.notes)
    found = ask()
    one, four = option(found, "lora", "l4x1"), option(found, "lora", "l4x4")
    assert one.minutes / 4 < four.minutes < one.minutes / 4 * 1.01, "and the gradients' way to the others"


def test_cheapest_and_fastest_are_among_those_that_fit_and_can_be_paid():
    found = ask("llama-3.1-8b", tokens=10_000_000)
    assert (found.cheapest["full"], found.cheapest["lora"]) == (None, "a100-large")
    assert {"l4x1", "a100-large"} <= {found.cheapest["qlora"], *found.as_cheap["qlora"]}, "their ranges overlap"
    assert CARDS[FLAVORS[found.fastest["lora"]].card].device.memory_bytes > T4.memory_bytes
    price = option(found, "lora", "a100-large").cost
    assert price == min(o.cost for o in found.options if o.method == "lora" and o.fits)
    high = option(found, "lora", "a100-large").cost_high
    assert ask("llama-3.1-8b", tokens=10_000_000, budget=high).cheapest["lora"] == "a100-large"
    less = ask("llama-3.1-8b", tokens=10_000_000, budget=0.99 * high)
    assert (less.cheapest["lora"], less.fastest["lora"]) == (None, None)
    assert option(less, "lora", "a100-large").within_budget is False
    assert option(less, "full", "a100-large").within_budget is None


@pytest.mark.parametrize(
    ("least", "needed", "says"),
    [
        (T4.memory_bytes, T4.memory_bytes, "tight"),
        (T4.memory_bytes + 1, T4.memory_bytes + 1, "does not fit"),
        (GIB, T4.memory_bytes + GIB, "tight"),
        (GIB, 95 * T4.memory_bytes // 100, "fits"),
        (GIB, 95 * T4.memory_bytes // 100 + 1, "tight"),
    ],
)
def test_it_fits_to_the_last_byte_and_not_a_byte_beyond(least, needed, says):
    found = advise(find_shape("smollm2"), lambda *what: Memory(needed, least), tokens=1)
    assert found.tokens == 1, "the fewest"
    small = option(found, "lora", "t4-small")
    assert (small.verdict, small.fits, small.minutes is None) == (says, says != "does not fit", not small.fits)
    assert in_figures(small).endswith(", tight") is (says == "tight")


@pytest.mark.parametrize(("weights", "fits"), [(800_000_000, True), (800_000_001, False)])
def test_a_rule_of_thumb_counts_to_the_last_byte_too(weights, fits):
    """20 GB a billion are 16 GB for 0.8 of them: all that a T4 has by the guide, and by the estimate nothing fits."""

    class Exact(Shape):
        weights = 0

    known = {field.name: getattr(find_shape("smollm2"), field.name) for field in fields(Shape)}
    monster = Exact(**known)
    Exact.weights = weights
    full, _ = advise(monster, lambda *what: Memory(10**18, 10**18)).rules
    assert ("t4-small" in full.only_by_the_rule) is fits
    assert full.only_by_ours == ()


@pytest.mark.parametrize(
    ("billions", "flavors"),
    [
        (0.5, ("t4-small",)),
        (1.24, ("t4-medium", "a10g-small")),
        (3, ("a10g-small", "a10g-large")),
        (8, ("a10g-large", "a100-large")),
        (70, ("a100-large",)),
    ],
)
def test_the_guide_by_size(billions, flavors):
    assert recommendation_for(BY_SIZE, billions).flavors == flavors


def test_the_guide_by_budget_and_kind():
    assert [recommendation_for(BY_BUDGET, usd).flavors[0] for usd in (4.99, 5, 20, 50)] == [
        "t4-small",
        "t4-medium",
        "a10g-small",
        "a10g-large",
    ]
    found = ask("smollm2", budget=500, kind="quick")
    assert [(by.by, by.flavors) for by in found.guide] == [
        ("model size", ("t4-small",)),
        ("budget", ()),
        ("kind of training", ("t4-small",)),
    ]
    assert found.tokens == 100 * 2048
    assert "the guide ends at $200" in found.guide[1].says


def test_where_the_rules_of_thumb_and_the_estimate_disagree():
    full, lora = ask("llama-3.1-8b").rules
    assert (full.guide_bytes, lora.guide_bytes) == (20 * 8_030_261_248, 4 * 8_030_261_248)
    assert lora.our_bytes == 2 * 8_030_261_248 + 2 * GIB == lora.by_tokens[2048]
    assert lora.by_tokens[8192] - lora.by_tokens[512] == 7680 * 2**20, "the rule knows no tokens"
    assert lora.only_by_ours == ("l4x1", "a10g-small", "a10g-large")
    assert lora.only_by_the_rule == ()
    assert not full.only_by_ours + full.only_by_the_rule
    small = ask().rules[0]
    assert small.only_by_ours == ("l4x1", "a10g-small", "a10g-large")
    assert ask("llama-2-13b").rules[1].only_by_the_rule == ("l4x4", "a10g-largex4"), "52 GB are under 96"


def test_in_words():
    said = "\n".join(in_words(ask("llama-3.1-8b", budget=30)))
    for words in (
        "by model size (7-13B parameters; always LoRA/PEFT",
        "a10g-large (LoRA, QLoRA) or a100-large (LoRA, QLoRA)",
        "Machines whose ranges overlap cannot be told apart by these estimates.",
        f"Hugging Face Jobs' list of {PRICES_DATE}",
        "4 GB per billion parameters, gives 29.9 GiB. We estimate 15.5 GiB with rows of 512, 17.0 GiB with",
        "By our estimate it fits l4x1, a10g-small, a10g-large, by the rule it does not.",
        "Not estimated: v5e-1x1, v5e-2x2, v5e-2x4.",
    ):
        assert words in said


def test_the_verdict_names_machines_with_minutes_and_price():
    found = ask("llama-3.1-8b", budget=30)
    (cheapest, ways), (fastest, _) = verdict(found)
    assert (cheapest, fastest) == ("cheapest within $30.00", "fastest within $30.00")
    full, lora, _ = ways.splitlines()
    assert full == "full fine-tuning: none of these"
    option = next(one for one in found.options if (one.flavor, one.method) == (found.cheapest["lora"], "lora"))
    minutes = between(60 * option.minutes_low, 60 * option.minutes_high)
    assert lora.startswith(f"LoRA: a100-large, {minutes}, {money_between(option.cost_low, option.cost_high)}")
    assert found.as_cheap["lora"]
    assert lora.endswith(f"; not told apart from {', '.join(found.as_cheap['lora'])}, whose range overlaps")


def test_it_is_plain_json():
    found = json.loads(json.dumps(asdict(ask(budget=5.0)), allow_nan=False))
    assert list(found) == [
        "model", "parameters", "tokens", "tokens_per_row", "kind", "budget", "guide", "options", "cheapest", "fastest",
        "as_cheap", "as_fast", "rules", "notes",
    ]  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS.keys())
def test_its_recipes_run_on_the_card_and_every_toggle_of_theirs_does_something(card, method):
    assert resolve(recipe_for(method, card.device), card.device).warnings == ()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tokens": 0}, "--tokens 0: must be a whole number above 0"),
        ({"tokens": -5}, "--tokens -5: must be a whole number above 0"),
        ({"budget": 0.0}, "--budget 0: must be an amount of USD above 0"),
        ({"budget": float("nan")}, "--budget nan: must be an amount of USD above 0"),
        ({"budget": float("inf")}, "--budget inf: must be an amount of USD above 0"),
        ({"kind": "produktion"}, "--kind produktion: did you mean production?"),
        ({"kind": "x"}, "--kind x: there are quick, development, production, research"),
    ],
)
def test_wrong_questions_are_one_line(options, said):
    with pytest.raises(BadInput) as caught:
        ask(**options)
    assert str(caught.value) == said
