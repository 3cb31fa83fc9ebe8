"""One list of prices: the same job costs the same wherever it is asked, and another list changes every answer."""

import ast
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from cria_tricks import recipes
from cria_tricks.hardware.cards import CARDS, FLAVORS, PRICES_DATE, PRICES_SOURCE
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import plan_data
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import with_settings
from cria_tricks.run import machines
from tools.fit import answers, fields

ROOT = Path(__file__).parents[2]
LLAMA = find_shape("llama-3.2-1b")
ROWS = 107
SINGLE = [name for name, flavor in FLAVORS.items() if flavor.cards == 1]


SMALLEST = ["tricks.gradient_checkpointing=true", "tricks.chunked_loss=true"]


def by_plan(flavor):
    """``cria plan kwanzaa --gpu CARD --rows 107``, with the switches that save most."""
    card = CARDS[flavor.card]
    found = plan_data.prices(Target(LLAMA, card.device), recipes.capstone(card.device), ROWS)
    price = next(price for price in found if price.flavor == flavor.name)
    return price.minutes, price.cost


def by_machines(flavor):
    """``cria plan kwanzaa --gpu all --rows 107``."""
    found = machines.compare("kwanzaa", settings=SMALLEST, rows=ROWS, rows_full=True)
    offer = next(offer for offer in found if offer.machine == flavor.name)
    return math.prod(offer.minutes) ** 0.5, math.prod(offer.cost) ** 0.5


def by_page(flavor):
    """What the page "Will it fit?" shows."""
    choice = fields.default() | fields.of_recipe(recipes.capstone(CARDS[flavor.card].device)) | {"card": flavor.card}
    price = next(price for price in answers.answer(choice)["prices"] if price["flavor"] == flavor.name)
    return price["minutes"], price["cost"]


@pytest.mark.parametrize("name", SINGLE)
def test_the_same_job_costs_the_same_everywhere(name):
    found = [of(FLAVORS[name]) for of in (by_plan, by_machines, by_page)]
    assert found == [pytest.approx(found[0], rel=1e-9)] * 3
    assert found[0][1] == pytest.approx(found[0][0] / 60 * FLAVORS[name].price)


@pytest.mark.parametrize("name", sorted(set(FLAVORS) - set(SINGLE)))
def test_several_cards_cost_the_same_in_both_plans(name):
    found = [of(FLAVORS[name]) for of in (by_plan, by_machines)]
    assert found == [pytest.approx(found[0], rel=1e-9)] * 2


@pytest.mark.parametrize("of", [by_plan, by_machines, by_page])
def test_another_list_is_another_price_everywhere(of, monkeypatch):
    minutes, cost = of(FLAVORS["t4-small"])
    monkeypatch.setitem(FLAVORS, "t4-small", replace(FLAVORS["t4-small"], price=7.0))
    assert of(FLAVORS["t4-small"]) == pytest.approx((minutes, cost * 7 / 0.4), rel=1e-9)


def test_what_does_not_fit_has_no_price():
    t4 = CARDS["t4"].device
    large = with_settings(recipes.kwanzaa(t4), ["model=llama-3.1-70b"])
    assert plan_data.prices(Target(find_shape(large.model), t4), large, ROWS) == []


def test_the_prices_of_the_guide_are_in_its_lesson_only():
    lesson = ast.parse((ROOT / "lessons/choose_your_hardware.py").read_text(encoding="utf-8"))
    tables = [node.value for node in lesson.body if ast.unparse(node).startswith("GUIDE = ")]
    (guide,) = map(ast.literal_eval, tables)
    assert list(guide) == list(FLAVORS)
    ranges = [f"${low:g}-{high:g}" for low, high in guide.values()]
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if path.parent.name != "lessons":  # those are made of the lessons
            assert not [said for said in ranges if said in path.read_text(encoding="utf-8")], path


def test_the_list_is_dated_where_prices_are_shown():
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", PRICES_DATE)
    page = (ROOT / "docs/guide/where_to_train.md").read_text(encoding="utf-8")
    assert PRICES_DATE in page
    assert PRICES_SOURCE.rpartition("commit ")[2] in page
