"""The page "Will it fit?" in a real browser: it says what ``cria plan`` says, and works by keyboard."""

import json
import random
import shlex
import statistics
from urllib.parse import parse_qs, urlencode

import pytest

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import between, money_between
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import CARDS, FLAVORS, PRICES_DATE
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import plan_data
from cria_tricks.predict.model_settings import lora_targets
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import with_settings
from cria_tricks.settings import Tricks
from tests.site.test_browser import settles
from tools import fit

GO = """
const [hash, done] = arguments, root = document.getElementById("fit"), wanted = [...new URLSearchParams(hash)];
location.hash = hash;
(function look() {
  const there = new URLSearchParams(root.dataset.state);
  if (!wanted.every(([name, value]) => there.get(name) === value)) return setTimeout(look, 1);
  const command = root.querySelector("pre code").textContent;
  const facts = root.querySelector(".facts").textContent;
  done([JSON.parse(root.dataset.found), Number(root.dataset.ms), command, facts]);
})();
"""
READY = 'Boolean(document.getElementById("fit").dataset.state)'
NUMBERS = {"batch": "train.batch_size", "tokens": "data.max_length", "epochs": "train.epochs"}


def a_choice(draw: random.Random) -> dict[str, object]:
    """Any model, card and numbers, and switches at random."""
    tricks = {name: draw.choice(values) for name, values in fit.VALUES.items()}
    numbers = {
        "batch": draw.choice((1, 1, 2, 3, 8, 17)),
        "tokens": draw.choice((8, 77, 512, 2048, draw.randrange(8, 40_000))),
        "gradient_accumulation": draw.choice((1, 1, 2, 8)),
        "rows": draw.randrange(1, 5000),
        "epochs": draw.choice((1, 3, 0.5)),
    }
    return {"model": draw.choice(fit.MODELS), "card": draw.choice(list(fit.ONE_CARD)), **numbers, **tricks}


def planned(choice):
    """What ``cria plan`` says of it."""
    device = fit.ONE_CARD[choice["card"]].device
    settings = [f"model={choice['model']}", *(f"{field}={choice[name]}" for name, field in NUMBERS.items())]
    settings += [f"tricks.{name}={str(choice[name]).lower()}" for name in Tricks.model_fields if name in choice]
    if choice["peft"] == "lora":
        settings += lora_targets(find_shape(choice["model"]))
    recipe = with_settings(recipes.kwanzaa(device), settings)
    target = Target(find_shape(recipe.model), device)
    try:
        found = plan_data.bill(target, recipe)
        found["doubts"] = plan_data.doubts(target, recipe, found["verdict"])
        return recipe, found, plan_data.prices(target, recipe, choice["rows"]), ""
    except BadInput as error:
        return recipe, {}, [], str(error)


def as_text(choice):
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in choice.items()}


@pytest.fixture
def page(host, browser):
    browser.set_window_size(1280, 900)
    browser.get(host + "fit.html")
    assert settles(browser, READY)
    return browser


def test_it_says_what_cria_plan_says(page, capsys):
    draw, same, refused, took, verdicts = random.Random(0), 0, 0, [], set()
    while same < 200:
        choice = a_choice(draw)
        found, milliseconds, command, facts = page.execute_async_script(GO, urlencode(as_text(choice)))
        recipe, plan, prices, refusal = planned(choice)
        if refusal:
            assert refusal in found["refused"], choice
            refused += 1
            continue
        assert not found["refused"], (choice, found)
        names = ("peak", "least", "needed", "capacity")
        assert [found[name] for name in names] == [plan[f"{name}_bytes"] for name in names], choice
        verdict = "tight" if found["tight"] else "fits" if found["fits"] else "does not fit"
        assert verdict == plan["verdict"], choice
        verdicts.add(verdict)
        rows, theirs = ({row["name"]: row["bytes"] for row in rows} for rows in (found["rows"], plan["lines"]))
        assert rows == theirs, choice
        timed = fit.ONE_CARD[choice["card"]].card is not None
        assert (plan["seconds_per_step"] is not None) is timed
        assert found["seconds"] == (pytest.approx(plan["seconds_per_step"], rel=1e-9) if timed else None), choice
        on_one = [price for price in prices if FLAVORS[price["flavor"]].cards == 1]
        assert [price["name"] for price in found["prices"]] == [price["flavor"] for price in on_one], choice
        rented = any(flavor.card == choice["card"] for flavor in FLAVORS.values())
        assert bool(found["prices"]) is (plan["fits"] and rented), "what does not fit has no price"
        for price, there in zip(found["prices"], on_one, strict=True):
            assert [found["minutes"], price["cost"]] == pytest.approx([there["minutes"], there["cost"]], rel=1e-9)
            assert f"{money_between(there['cost_low'], there['cost_high'])} on {there['flavor']}" in facts
            assert f"the run {between(60 * there['minutes_low'], 60 * there['minutes_high'])}: " in facts
        step = between(plan["seconds_per_step_low"], plan["seconds_per_step_high"]) if timed else ""
        assert (f"An optimizer step takes {step}" if timed else "is not predicted: we know no rates") in facts
        said = [*found["doubts"], *([trust.TIGHT] if found["tight"] else [])]
        assert sorted(set(said) - {fit.PACKING, trust.HOST}) == sorted(plan["doubts"]), choice
        assert (trust.HOST in said) is recipe.tricks.activation_offload
        assert (fit.PACKING in said) is recipe.tricks.packing
        said = shlex.split(command.replace("\\\n", " "))
        assert said[:3] == ["cria", "train", "kwanzaa"]
        settings = [setting for setting in said[4::2] if not setting.startswith("train.learning_rate")]
        assert with_settings(recipes.kwanzaa(fit.ONE_CARD[choice["card"]].device), settings) == recipe
        same, took = same + 1, [*took, milliseconds]
    assert refused
    assert verdicts == {"fits", "tight", "does not fit"}
    with capsys.disabled():
        print(
            f"\n200 of 200 as cria plan, {refused} refused as there; redrawn in {statistics.median(took)} ms, "
            f"at most {max(took)}"
        )


def test_it_works_by_keyboard_and_the_address_brings_it_back(page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page.execute_async_script(GO, "model=llama-3.2-1b&card=t4")
    before = json.loads(page.execute_script("return document.getElementById('fit').dataset.found"))
    box = page.find_element(By.ID, "fit-chunked_loss")
    page.execute_script("arguments[0].focus()", box)
    box.send_keys(Keys.SPACE)
    for _ in range(40):
        if page.switch_to.active_element.get_attribute("id") == "fit-card":
            break
        page.switch_to.active_element.send_keys(Keys.SHIFT + Keys.TAB)
    page.switch_to.active_element.send_keys("NVIDIA A100")
    after = page.execute_async_script(GO, "card=a100&chunked_loss=false")[0]
    assert after["peak"] > before["peak"]
    assert after["capacity"] == CARDS["a100"].device.memory_bytes
    assert page.execute_script("return document.querySelector('.fit .verdict').getAttribute('aria-live')") == "polite"
    address = page.current_url
    assert parse_qs(address.partition("#")[2])["card"] == ["a100"]
    page.get("about:blank")
    page.get(address)
    assert settles(page, READY)
    assert json.loads(page.execute_script("return document.getElementById('fit').dataset.found")) == after


def test_the_notebook_of_a_choice_says_the_command(page):
    page.execute_async_script(GO, "model=llama-3.2-3b&lean_preparation=false&tokens=1024")
    link = page.execute_script("return document.querySelector('.fit a[download]').href")
    from urllib.parse import unquote

    import nbformat

    book = nbformat.reads(unquote(link.partition(",")[2]), as_version=4)
    nbformat.validate(book)
    command = book.cells[-1].source
    assert command == (
        "!cria train kwanzaa --set model=llama-3.2-3b --set data.max_length=1024 "
        "--set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true --set tricks.lean_preparation=false "
        "--resume"
    )


def test_times_and_money_are_said_in_the_words_of_the_commands(page):
    """Runs of a second and runs of years: the words are made once in Python and once in the page."""
    draw, units = random.Random(1), set()
    for number in range(80):
        choice = {
            "model": draw.choice(("smollm2", "llama-3.1-70b")),
            "tokens": draw.choice((8, 64, 512)),
            "rows": round(10 ** (number % 8 + draw.uniform(-0.3, 0))) or 1,
            "epochs": draw.choice((0.1, 3, 1000)),
            "gradient_accumulation": draw.choice((1, 8, 1024)),
            "card": draw.choice(("t4", "a100")),
        }
        if number == 0:
            choice |= {"model": "smollm2", "tokens": 512, "rows": 10**7, "epochs": 1000}  # the longest that fits
        _, _, _, facts = page.execute_async_script(GO, urlencode(choice))
        choice = json.loads(page.execute_script("return JSON.stringify(Object.fromEntries(new URLSearchParams("
                                                "document.getElementById('fit').dataset.state)))"))  # fmt: skip
        numbers = {name: float(choice[name]) if name == "epochs" else int(choice[name]) for name in
                   ("batch", "tokens", "gradient_accumulation", "rows", "epochs")}  # fmt: skip
        _, plan, prices, refusal = planned({**choice, **numbers})
        assert not refusal
        times = [between(plan["seconds_per_step_low"], plan["seconds_per_step_high"])]
        times += [between(60 * price["minutes_low"], 60 * price["minutes_high"]) for price in prices]
        costs = [f"{money_between(price['cost_low'], price['cost_high'])} on {price['flavor']}" for price in prices]
        assert all(words in facts for words in times + costs), (times, costs, facts)
        units |= {words.split()[-1] for words in times}
    assert units >= {"s", "min", "days", "years"}, "or nothing was compared"
    assert PRICES_DATE in facts
    assert trust.TIME in facts


@pytest.fixture
def block(browser):
    """Let files not come, or all of them again."""

    def these(*urls):
        browser.execute_cdp_cmd("Network.enable", {})
        browser.execute_cdp_cmd("Network.setBlockedURLs", {"urls": urls})

    yield these
    these()


def test_a_table_that_does_not_come_leaves_no_answer_and_can_be_asked_for_again(page, block):
    page.execute_async_script(GO, "model=llama-3.2-1b&card=t4")
    block("*/tinyllama-1.1b.js")
    page.execute_script("location.hash = 'model=tinyllama-1.1b'")
    assert settles(page, "document.getElementById('fit').classList.contains('failed')")
    verdict = "return document.querySelector('.fit .verdict').innerText"
    assert page.execute_script(verdict) == (
        'The table "tinyllama-1.1b" could not be loaded, so there is no answer. Try again'
    )
    assert not page.execute_script("return document.getElementById('fit').dataset.found")
    assert not page.execute_script("return document.querySelector('.fit .answer').checkVisibility()")
    assert not page.execute_script("return document.querySelector('.fit .stack').checkVisibility()")
    again = "const button = document.querySelector('.fit .verdict button'); button.click(); return button.textContent"
    assert page.execute_script(again) == "Try again"
    assert settles(page, "document.getElementById('fit').classList.contains('failed')"), "it is still not there"
    block()
    page.execute_script(again)
    assert settles(page, READY), "the failure was kept"
    assert json.loads(page.execute_script("return document.getElementById('fit').dataset.found"))["peak"] > 0
    assert page.execute_script("return document.querySelector('.fit .answer').checkVisibility()")


def test_without_its_index_the_page_says_so_and_can_try_again(host, browser, block):
    block("*/fit/index.js")
    browser.get("about:blank")
    browser.get(host + "fit.html")
    failed = "document.getElementById('fit').classList.contains('failed')"
    assert settles(browser, failed)
    said = browser.execute_script("return document.getElementById('fit').innerText")
    assert said == 'The table "index" could not be loaded, so there is no answer. Try again'
    block()
    browser.execute_script("document.querySelector('.fit button').click()")
    assert settles(browser, READY)
    assert not browser.execute_script(f"return {failed}")


def test_what_a_link_says_and_the_page_does_not_know_is_named(page, host):
    for said, words in (
        ("card=h900", "The link says card=h900, which is not possible here, so this answers for card=t4."),
        ("model=llama-9&card=l4", "model=llama-9, which is not possible here, so this answers for model=llama-3.2-1b."),
        ("batch=9999", "batch=9999, which is not possible here, so this answers for batch=256."),
        ("epochs=", "epochs=, which is not possible here, so this answers for epochs=3."),
        ("packing=yes", "packing=yes, which is not possible here, so this answers for packing=false."),
        ("rank=8", "The link says rank=8, which is not possible here."),
        ("constructor=1", "The link says constructor=1, which is not possible here."),
    ):
        page.get("about:blank")
        page.get(f"{host}fit.html#{said}")
        assert settles(page, READY)
        shown = page.execute_script("return document.querySelector('.fit .strange').innerText")
        assert words in shown, said
        assert shown.count("The link says") == 1
    page.execute_async_script(GO, "card=a100&model=smollm2")
    assert page.execute_script("return document.querySelector('.fit .strange').innerText") == ""


def test_notes_stand_beside_the_answer(page):
    narrow = "model=llama-3.2-1b&card=t4&tokens=8192&batch=7"
    found, _, _, _ = page.execute_async_script(GO, narrow)
    notes = "return document.querySelector('.fit .notes').innerText"
    verdict = "return document.querySelector('.fit .verdict').innerText"
    assert found["tight"], f"{found['needed'] / found['capacity']:.2f} of the card"
    assert page.execute_script(verdict).startswith("It is tight. At least ")
    assert trust.TIGHT[1:] in page.execute_script(notes)
    legend = page.execute_script("return document.querySelector('.fit .legend').innerText")
    unused = (found["needed"] - found["least"]) / 2**30
    assert f"reserved, not used {unused:.2f} GiB" in legend
    assert "logits" not in legend, "at the last block there are none"
    page.execute_async_script(GO, "model=tinyllama-1.1b&card=a100&tokens=4096&batch=1")
    assert "ows of up to 4096 tokens are longer than the model's context of 2048 " in page.execute_script(notes)
    assert page.execute_script(verdict).endswith("Rows are longer than the model's context.")
    page.execute_async_script(GO, "model=tinyllama-1.1b&card=a100&tokens=4096&batch=1&packing=true")
    shown = page.execute_script(notes)
    assert fit.PACKING[1:] in shown
    assert "context" not in shown, "packed rows are many short ones"


def test_a_mixtures_experts_have_a_row_of_their_own(page):
    found, _, _, _ = page.execute_async_script(GO, "model=mixtral-8x7b&card=a100")
    rows = dict(page.execute_script(
        "return [...document.querySelectorAll('.fit .bill tbody tr')].map(row => "
        "[row.children[0].innerText, Number(row.children[1].innerText.replaceAll(',', ''))])"
    ))  # fmt: skip
    shape = find_shape("mixtral-8x7b")
    experts = shape.layers * shape.experts * 3 * shape.width * shape.inner
    assert rows["weights: experts"] == 2 * experts, "16 bits each: quantization leaves them alone"
    together = next(row["bytes"] for row in found["rows"] if row["name"] == "weights: all others")
    assert rows["weights: experts"] + rows["weights: all others"] == together
    page.execute_async_script(GO, "model=llama-3.2-1b&card=a100")
    assert "experts" not in page.execute_script("return document.querySelector('.fit .bill').innerText")


def test_the_page_works_when_it_is_opened_as_a_file(site, browser):
    browser.get((site / "fit.html").as_uri() + "#model=smollm2&card=l4")
    assert settles(browser, READY)
    found, *_ = browser.execute_async_script(GO, "model=llama-3.2-3b&card=t4")
    assert found["needed"] > found["peak"] > 0
    browser.execute_script("document.getElementById('fit-chunked_loss').click()")
    assert settles(browser, "location.hash.includes('chunked_loss=false')")
