"""One list of prices: the same job costs the same wherever it is asked, and another list changes every answer."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from cria_tricks import recipes
from cria_tricks.hardware.cards import CARDS, FLAVORS, PRICES_DATE, PRICES_SOURCE
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import plan_data
from cria_tricks.predict.machines import advise
from cria_tricks.predict.selection_guide import MACHINES
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import with_settings
from cria_tricks.tricks.folds import estimate
from tools.fit import answers, fields

ROOT = Path(__file__).parents[2]
LLAMA = find_shape("llama-3.2-1b")
ROWS = 107
SINGLE = [name for name, flavor in FLAVORS.items() if flavor.cards == 1]


def by_plan(flavor):
    """``cria plan kwanzaa --gpu CARD --rows 107``, with all toggles as the QLoRA of ``cria hardware`` has them."""
    card = CARDS[flavor.card]
    found = plan_data.prices(Target(LLAMA, card.device), recipes.capstone(card.device), ROWS)
    price = next(price for price in found if price["flavor"] == flavor.name)
    return price["minutes"], price["cost"]


def by_hardware(flavor):
    """``cria hardware`` for as many tokens: its QLoRA is the capstone's."""
    found = advise(LLAMA, estimate, ROWS * 3 * 2048)
    option = next(o for o in found.options if (o.flavor, o.method) == (flavor.name, "qlora"))
    return option.minutes, option.cost


def by_page(flavor):
    """What the page "Will it fit?" shows."""
    choice = fields.default() | fields.of_recipe(recipes.capstone(CARDS[flavor.card].device)) | {"card": flavor.card}
    price = next(price for price in answers.answer(choice)["prices"] if price["flavor"] == flavor.name)
    return price["minutes"], price["cost"]


@pytest.mark.parametrize("name", SINGLE)
def test_the_same_job_costs_the_same_everywhere(name):
    found = [of(FLAVORS[name]) for of in (by_plan, by_hardware, by_page)]
    assert found == [pytest.approx(found[0], rel=1e-9)] * 3
    assert found[0][1] == pytest.approx(found[0][0] / 60 * FLAVORS[name].price)


@pytest.mark.parametrize("name", sorted(set(FLAVORS) - set(SINGLE)))
def test_several_cards_cost_nearly_the_same_by_plan_and_by_hardware(name):
    """``cria hardware`` gives each card eight rows a step, so that there are fewer sums over all of them."""
    flavor = FLAVORS[name]
    assert 0.99 < by_hardware(flavor)[0] / by_plan(flavor)[0] <= 1


@pytest.mark.parametrize("of", [by_plan, by_hardware, by_page])
def test_another_list_is_another_price_everywhere(of, monkeypatch):
    minutes, cost = of(FLAVORS["t4-small"])
    monkeypatch.setitem(FLAVORS, "t4-small", replace(FLAVORS["t4-small"], price=7.0))
    assert of(FLAVORS["t4-small"]) == pytest.approx((minutes, cost * 7 / 0.4), rel=1e-9)


def test_what_does_not_fit_has_no_price():
    t4 = CARDS["t4"].device
    large = with_settings(recipes.kwanzaa(t4), ["model=llama-3.1-70b"])
    assert plan_data.prices(Target(find_shape(large.model), t4), large, ROWS) == []
    found = advise(find_shape("llama-3.1-70b"), estimate, 10**6)
    too_small = [option for option in found.options if not option.fits]
    assert [(one.minutes, one.cost) for one in too_small] == [(None, None)] * len(too_small)
    assert [f"{one.method} on {one.flavor}" for one in found.options if one.fits] == ["qlora on a100-large"]


def test_only_the_lesson_about_the_guide_knows_its_prices():
    pages = [path for folder in ("cria_tricks", "lessons", "tools") for path in (ROOT / folder).rglob("*.py")]
    imports = re.compile(r"guide import (\([^)]*|.*)\bMACHINES\b")  # in parentheses, or on one line
    users = {path.name for path in pages if imports.search(path.read_text(encoding="utf-8"))}
    assert users == {"machines.py", "choose_your_hardware.py"}
    advice = (ROOT / "cria_tricks/predict/machines.py").read_text(encoding="utf-8")
    assert re.findall(r"MACHINES\[name\]\.(\w+)", advice) == ["gb"], "its memory, for its own rules of thumb"
    ranges = [f"${m.low:g}-{m.high:g}" for m in MACHINES.values()]
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        if path.parent.name != "lessons":  # those are made of the lessons
            assert not [said for said in ranges if said in path.read_text(encoding="utf-8")], path


def test_the_list_is_dated_where_prices_are_shown():
    assert re.fullmatch(r"20\d\d-\d\d-\d\d", PRICES_DATE)
    page = (ROOT / "docs/guide/where_to_train.md").read_text(encoding="utf-8")
    assert PRICES_DATE in page
    assert PRICES_SOURCE.rpartition("commit ")[2] in page
