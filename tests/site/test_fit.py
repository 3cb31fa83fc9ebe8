"""The page "Will it fit?" in a real browser: Python answers there as it does here, and every failure says so."""

import json
import re
from urllib.parse import parse_qs, unquote, urlencode

import nbformat
import pytest

from cria_tricks.hardware.cards import CARDS
from cria_tricks.models.catalogue import CONFIGS
from tests.fit_choices import choices, pasted, reduced, same
from tests.site.test_browser import settles
from tests.sweeps import sample
from tools import browser_python
from tools.fit import bridge, fields

READY = 'Boolean(document.getElementById("fit").dataset.state)'
ASIDE = "document.getElementById('fit').dataset.beside === document.getElementById('fit').dataset.state"
VERDICT = "return document.querySelector('.fit .verdict').innerText"
DONE = "return document.querySelector('.fit .done').innerText"
STRANGE = "return document.querySelector('.fit .strange').innerText"
GO = """
const [hash, done] = arguments, root = document.getElementById("fit");
delete root.dataset.state;
history.replaceState(null, "", location.pathname + "#" + hash);
window.dispatchEvent(new PopStateEvent("popstate"));
(function look() {
  if (!root.dataset.state) return setTimeout(look, 1);
  done([JSON.parse(root.dataset.found), Number(root.dataset.ms)]);
})();
"""


def go(page, **choice):
    """Open a link's choice, and return the answer."""
    return page.execute_async_script(GO, urlencode(choice))[0]


@pytest.fixture
def page(host, browser):
    browser.set_window_size(1280, 900)
    browser.get("about:blank")
    browser.get(host + "fit.html")
    assert settles(browser, READY)
    return browser


def shown(page, selector):
    return page.execute_script("return document.querySelector(arguments[0]).innerText", selector)


def press(page, name):
    """Press a button; the theme's header may lie over it, so not by the mouse."""
    page.execute_script("document.querySelector(`[data-do=${arguments[0]}]`).click()", name)


def choose(page, name, value):
    """Choose a value in a list."""
    take = "const box = document.getElementById(`fit-${arguments[0]}`); box.value = arguments[1];"
    page.execute_script(take + "box.dispatchEvent(new Event('input', {bubbles: true}))", name, value)


def test_the_browser_answers_as_python_does_here(page, capsys):
    """All 520 under CRIA_ALL=1; that these are the answers of ``cria plan`` is tests/test_fit_answers.py's."""
    took = []
    every = [*sample(choices(), 30), *sample(pasted(), 5)]
    for choice in every:
        sent = reduced(choice)
        found, milliseconds = page.execute_async_script(GO, urlencode(sent))
        here = json.loads(bridge.call("answer", json.dumps({"choice": sent})))
        here = {"refused": here["refused"]} if "refused" in here else here["data"]
        assert same("", found, here), (choice, found, here)
        took.append(milliseconds)
    with capsys.disabled():
        print(f"\n{len(every)} of {len(every)} as Python here; {sorted(took)[len(took) // 2]} ms, at most {max(took)}")


def test_the_first_answer_is_there_without_a_script(host, browser):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get("about:blank")
        browser.get(host + "fit.html")
        body = browser.find_element("css selector", "#fit").text
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "It fits." in body
    assert "needs JavaScript" in body
    assert "Make it fit" not in body, "a form that does nothing"


def test_it_works_by_keyboard_and_back_undoes(page):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    before = go(page, model="llama-3.2-1b", card="t4")
    assert settles(page, ASIDE)
    box = page.find_element(By.ID, "fit-chunked_loss")
    page.execute_script("arguments[0].focus()", box)
    box.send_keys(Keys.SPACE)
    assert settles(page, "location.hash.includes('chunked_loss=false') && " + READY)
    tokens = page.find_element(By.ID, "fit-tokens")
    page.execute_script("arguments[0].focus(); arguments[0].select()", tokens)
    tokens.send_keys("4096")
    assert settles(page, "location.hash.includes('tokens=4096') && " + READY)
    found = json.loads(page.execute_script("return document.getElementById('fit').dataset.found"))
    assert found["peak_bytes"] > before["peak_bytes"]
    page.execute_script("document.activeElement.blur()")
    page.back()
    assert settles(page, "location.hash.includes('tokens=2048') && " + READY), "four keys are one step"
    assert "chunked_loss=false" in page.current_url
    page.back()
    assert settles(page, "!location.hash.includes('chunked_loss') && " + READY)
    assert page.execute_script("return document.getElementById('fit-chunked_loss').checked")
    found = json.loads(page.execute_script("return document.getElementById('fit').dataset.found"))
    assert found["peak_bytes"] == before["peak_bytes"]
    assert page.execute_script("return document.querySelector('.fit .verdict').getAttribute('aria-live')") == "polite"


def test_a_partial_link_takes_the_first_choice_for_the_rest(page):
    found = go(page, card="a100")
    assert found["capacity_bytes"] == CARDS["a100"].device.memory_bytes
    assert found["tokens"] == int(fields.default()["tokens"])
    assert found["model"] == fields.default()["model"]
    assert go(page, card="a100-40")["capacity_bytes"] == found["capacity_bytes"]
    assert go(page, card="8GiB:7.5")["capacity_bytes"] == 8 * 2**30
    assert page.execute_script("return document.getElementById('fit-capability').value") == "7.5"


def test_switches_say_what_they_save_and_what_is_not_possible(page):
    go(page, model="llama-3.2-1b", card="t4")
    assert settles(page, ASIDE)
    choice = {**fields.default(), "model": "llama-3.2-1b"}
    here = json.loads(bridge.call("beside", json.dumps({"choice": choice})))
    words = here["values"]["gradient_checkpointing"]["false"]["words"]
    assert f"If you choose off: {words}" in shown(page, "#fit-gradient_checkpointing-says")
    assert "Lean preparation would go off, too" in shown(page, "#fit-precision-says"), "it is counted, so it is named"
    link = "return document.querySelector('#fit-quantization-says a').getAttribute('href')"
    assert page.execute_script(link) == here["values"]["quantization"]["fp4"]["link"]
    assert here["values"]["chunked_loss"]["false"]["words"] in shown(page, "#fit-chunked_loss-says")
    assert page.execute_script("return document.querySelector('#fit-precision [value=bf16]').disabled")
    reason = "return document.getElementById('fit-precision-says').textContent"
    assert here["values"]["precision"]["bf16"]["why"] in page.execute_script(reason)
    assert f"{here['longest']:,} tokens" in shown(page, ".longest-says")
    page.execute_script("document.querySelector('.longest-says button').click()")
    assert settles(page, f"location.hash.includes('tokens={here['longest']}') && {READY}")
    assert page.execute_script(VERDICT).startswith("It fits.")


def test_a_switch_takes_those_with_it_that_need_it(page):
    go(page, model="llama-3.2-1b", card="t4")
    assert settles(page, ASIDE)
    choose(page, "peft", "none")
    assert settles(page, "location.hash.includes('peft=none') && " + READY)
    assert page.execute_script(DONE).startswith("Also switched off: ")
    assert "Quantization of frozen weights" in page.execute_script(DONE)
    assert not page.execute_script(VERDICT).startswith("Not possible")
    query = parse_qs(page.current_url.partition("#")[2])
    assert query["quantization"] == ["none"]


def test_models_and_cards_that_cannot_be_are_disabled_with_the_reason(page):
    go(page, card="l4", precision="bf16")
    assert settles(page, ASIDE)
    choice = {**fields.default(), "card": "l4", "precision": "bf16"}
    cards = json.loads(bridge.call("beside", json.dumps({"choice": choice})))["values"]["card"]
    here = cards["t4"]
    option = "document.querySelector('#fit-card [value=t4]')"
    assert page.execute_script(f"return [{option}.disabled, {option}.title]") == [True, here["refused"]]
    assert not page.execute_script("return document.querySelector('#fit-card [value=a100]').disabled")
    assert shown(page, "#fit-card-says") == f"Not possible here: {sum('refused' in one for one in cards.values())}"
    assert page.execute_script("return document.getElementById('fit-card').getAttribute('aria-describedby')") == (
        "fit-card-says"
    )
    page.execute_script("document.querySelector('#fit-card-says summary').click()")
    assert f"t4: {here['why']}. Choose it, with Mixed precision: fp16" in shown(page, "#fit-card-says")
    page.execute_script("document.querySelector('#fit-card-says button').click()")
    assert settles(page, "location.hash.includes('card=t4') && " + READY)
    assert page.execute_script(VERDICT).startswith("It fits.")
    assert page.execute_script(f"return [{option}.disabled, {option}.title]") == [False, ""]


def test_a_model_takes_the_switch_with_it_that_it_cannot_have(page):
    go(page, model="llama-3.2-1b", card="t4")
    assert settles(page, ASIDE)
    choose(page, "model", "granite-3.1-2b")
    assert settles(page, "location.hash.includes('granite') && " + READY)
    assert page.execute_script(DONE) == "Also switched off: Chunked cross-entropy loss."
    assert not page.execute_script(VERDICT).startswith("Not possible")


def test_a_search_can_be_stopped_and_stops_at_every_change(page):
    """The search would take minutes, so an answer that waited for it would not come here."""
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    long = {"model": "smollm2", "card": "a100", "batch": "12", "gradient_accumulation": "60"}
    label = "return document.querySelector('.fit [data-do=fastest]').innerText"
    go(page, **long)
    address = page.current_url
    body = page.find_element(By.TAG_NAME, "body")
    for stop in (lambda: press(page, "fastest"), lambda: body.send_keys(Keys.ESCAPE)):
        press(page, "fastest")
        assert page.execute_script(label) == "Stop"
        assert page.execute_script(DONE).startswith("Searching")
        stop()
        assert page.execute_script(DONE) == "Stopped: nothing was changed."
        assert page.execute_script(label) == "Make it fast"
        assert settles(page, ASIDE), "Python is still at the search"
    assert page.current_url == address
    press(page, "fastest")
    assert settles(page, "document.querySelector('.fit .done progress').value > 0"), "no progress"
    choose(page, "card", "l4")
    assert settles(page, "location.hash.includes('card=l4') && " + READY)
    assert page.execute_script(label) == "Make it fast"
    assert page.execute_script(DONE) == ""
    press(page, "fit")
    press(page, "reset")
    assert settles(page, "location.hash.includes('batch=1&') && " + READY)
    assert settles(page, ASIDE)
    assert page.execute_script(DONE) == "", "the search went on"


def test_a_refused_choice_names_the_field_and_offers_what_mends_it(page):
    found = go(page, card="t4", precision="bf16")
    assert page.execute_script(VERDICT).startswith("Not possible. “Mixed precision: bf16”")
    title = "return document.querySelector('.fit .verdict strong').title"
    assert page.execute_script(title) == found["refused"], "the package's words"
    assert not page.execute_script("return document.querySelector('.fit .answer').checkVisibility()")
    assert page.execute_script(
        "return document.querySelector('.wrong').contains(document.getElementById('fit-precision'))"
    )
    assert "Mixed precision: bf16" in shown(page, ".wrong .error")
    assert settles(page, "document.querySelector('.fit .done button')")
    assert shown(page, ".fit .done button") == "Set Mixed precision: fp16", "what the refusal says comes first"
    page.execute_script("document.querySelector('.fit .done button').click()")
    assert settles(page, READY)
    assert not page.execute_script(VERDICT).startswith("Not possible")


def test_make_it_fit_and_make_it_fast(page):
    go(page, model="llama-3.2-1b", card="t4", batch="4", gradient_checkpointing="false", chunked_loss="false")
    assert page.execute_script(VERDICT).startswith("It does not fit.")
    press(page, "fit")
    assert settles(page, "document.querySelector('.fit .verdict').innerText.startsWith('It fits')")
    assert page.execute_script(DONE).startswith("Set: ")
    assert "=" not in page.execute_script(DONE), "the words of the form"
    go(page, model="llama-3.1-70b", card="t4", gradient_accumulation="1")
    press(page, "fit")
    assert settles(page, "document.querySelector('.fit .done').innerText.includes('No set of switches fits')")
    page.execute_script("document.querySelector('.fit .done .md-button').click()")
    assert settles(page, "document.querySelector('.fit .verdict').innerText.startsWith('It fits')")
    go(page, model="smollm2", card="a100", gradient_accumulation="1")
    press(page, "fastest")
    assert settles(page, "document.querySelector('.fit .done').innerText.startsWith('Set: ')")


def test_where_the_switches_do_not_fit_a_set_is_searched_until_the_reader_chooses(page):
    go(page, model="llama-3.1-8b", card="t4", tokens="16384")
    assert page.execute_script(VERDICT).startswith("It fits.")
    assert page.execute_script(DONE).startswith("So that it fits: ")
    assert settles(page, ASIDE)
    assert go(page, model="llama-3.1-8b", card="t4", tokens="16384", set="own")["verdict"] != "fits"
    go(page, model="llama-3.2-1b", card="t4")
    assert settles(page, ASIDE)
    choose(page, "card", "l4")  # which has bf16, and a kernel for shared key heads
    assert settles(page, "location.hash.includes('card=l4') && " + READY)
    assert "precision=bf16" in page.current_url
    assert "expand_kv=false" in page.current_url
    choose(page, "card", "t4")
    assert settles(page, "location.hash.includes('card=t4') && " + READY)
    assert "precision" not in page.current_url
    choose(page, "attention", "eager")
    assert settles(page, "location.hash.includes('set=own') && " + READY)


def test_a_and_b_stand_beside_each_other_and_in_the_link(page, host):
    first = go(page, model="llama-3.2-1b", card="t4")
    press(page, "pin")
    assert settles(page, "document.querySelectorAll('.fit .stack').length === 2 && " + READY)
    choose(page, "card", "l4")
    assert settles(page, "location.hash.includes('card=l4') && " + READY)
    address = page.current_url
    page.get("about:blank")
    page.get(address)
    assert settles(page, READY)
    said = page.execute_script(VERDICT)
    assert said.startswith("A It fits.")
    assert "B It fits." in said
    assert f"{first['capacity_bytes'] / 2**30:.1f} GiB" in said.partition("B It")[0]
    heads = "return [...document.querySelector('.fit .bill').tHead.rows[0].cells].map(cell => cell.innerText)"
    assert page.execute_script(heads) == ["line", "A", "B", "B - A"]
    press(page, "pin")
    assert settles(page, "document.querySelectorAll('.fit .stack').length === 1 && " + READY)


def test_a_pasted_config_and_bare_numbers(page):
    go(page, model="config.json")
    assert "Paste the text of a config.json" in page.execute_script(VERDICT)
    config = json.dumps({**CONFIGS["qwen2.5-1.5b"], "torch_dtype": "bfloat16"}, indent=1)
    paste = "const box = document.getElementById('fit-config'); box.value = arguments[0];"
    page.execute_script(paste + "box.dispatchEvent(new Event('input', {bubbles: true}))", config)
    assert settles(page, "location.hash.includes('qwen2') && " + READY)
    assert "torch_dtype" not in page.current_url
    pasted_one = json.loads(page.execute_script("return document.getElementById('fit').dataset.found"))
    assert pasted_one["needed_bytes"] == go(page, model="qwen2.5-1.5b")["needed_bytes"]
    page.execute_script(paste + "box.dispatchEvent(new Event('input', {bubbles: true}))", '{"model_type": "llama"}')
    go(page, model="config.json", config='{"model_type": "llama"}')
    assert "has no hidden_size" in page.execute_script(VERDICT)
    assert go(page, model="numbers")["needed_bytes"] == go(page, model="llama-3.2-1b")["needed_bytes"]


def test_the_notebook_of_a_choice_says_the_command(page):
    go(page, model="llama-3.2-3b", lean_preparation="false", tokens="1024")
    link = page.execute_script("return document.querySelector('.fit a[download]').href")
    book = nbformat.reads(unquote(link.partition(",")[2]), as_version=4)
    nbformat.validate(book)
    assert book.cells[-1].source == (
        "!cria train qlora --set model=llama-3.2-3b --set data.max_length=1024 --set tricks.lean_preparation=false "
        "--resume"
    )
    assert book.cells[-2].source.startswith("!cria plan qlora --model llama-3.2-3b --gpu t4 ")


@pytest.mark.parametrize("file", ["fit-worker.js", "packages.zip", "pyodide.asm.wasm", "pyodide.mjs"])
def test_a_file_that_does_not_come_leaves_no_answer_and_can_be_asked_for_again(host, site, browser, file):
    """The file is renamed, because Chromium does not block what a worker asks for."""
    (path,) = (site / "assets").rglob(file)
    away = path.with_name(f"{file}.away")
    browser.get("about:blank")
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.clearBrowserCache", {})
    path.rename(away)
    try:
        browser.get(host + "fit.html#model=tinyllama-1.1b")
        assert settles(browser, "document.getElementById('fit').classList.contains('failed')")
        assert re.match(
            r"Python could not be loaded: .* So there is no answer\. Try again", browser.execute_script(VERDICT)
        )
        assert not browser.execute_script("return document.getElementById('fit').dataset.found")
        assert not browser.execute_script("return document.querySelector('.fit .answer').checkVisibility()")
        assert not browser.execute_script("return document.querySelector('.fit .stack').checkVisibility()")
    finally:
        away.rename(path)
    browser.execute_script("document.querySelector('.fit .verdict button').click()")
    assert settles(browser, READY), "the failure was kept"
    found = json.loads(browser.execute_script("return document.getElementById('fit').dataset.found"))
    assert found["model"] == "tinyllama-1.1b"
    assert browser.execute_script("return document.querySelector('.fit .answer').checkVisibility()")


def test_the_first_answer_stays_when_python_does_not_come(host, site, browser):
    path = site / "assets" / "fit-worker.js"
    away = path.with_suffix(".away")
    browser.get("about:blank")
    browser.execute_cdp_cmd("Network.enable", {})
    browser.execute_cdp_cmd("Network.clearBrowserCache", {})
    path.rename(away)
    try:
        browser.get(host + "fit.html")
        assert settles(browser, "document.querySelector('.fit .strange').innerText.includes('could not be loaded')")
        assert browser.execute_script(VERDICT).startswith("It fits."), "it is the answer for this choice"
    finally:
        away.rename(path)


def test_the_page_says_how_much_it_loads(site):
    folder = site / "assets" / "python"
    size = sum((folder / name).stat().st_size for name in (*browser_python.PYODIDE, *browser_python.MADE))
    text = " ".join((browser_python.ROOT / "docs" / "fit.md").read_text().split())
    assert f"about {round(size / 1e6)} MB, loaded once" in text


def test_what_a_link_says_and_the_page_does_not_know_is_named(page, host):
    for said, words in (
        ("card=h900", "The link says card=h900, which is not possible here, so this answers for card=t4."),
        ("model=llama-9&card=l4", "model=llama-9, which is not possible here, so this answers for model=llama-3.2-1b."),
        ("batch=99999", "batch=99999, which is not possible here, so this answers for batch=65536."),
        ("epochs=", "epochs=, which is not possible here, so this answers for epochs=3."),
        ("packing=yes", "packing=yes, which is not possible here, so this answers for packing=false."),
        ("rank=8", "The link says rank=8, which is not possible here."),
        ("constructor=1", "The link says constructor=1, which is not possible here."),
    ):
        page.get("about:blank")
        page.get(f"{host}fit.html#{said}")
        assert settles(page, READY)
        shown = page.execute_script(STRANGE)
        assert words in shown, said
        assert shown.count("The link says") == 1
    go(page, card="a100", model="smollm2")
    assert page.execute_script(STRANGE) == ""


def test_rows_beyond_the_context_and_a_million_tokens_are_said(page):
    go(page, model="tinyllama-1.1b", card="a100", tokens="4096")
    assert page.execute_script(VERDICT).endswith("Rows are longer than the model's context.")
    assert "longer than the model's context of 2048 " in shown(page, ".fit .notes")
    found = go(page, model="llama-3.2-1b", card="t4", tokens="999999")
    assert found["tokens"] == 999_999
    assert page.execute_script(VERDICT).startswith("It does not fit. ")
    go(page, model="tinyllama-1.1b", card="a100", tokens="4096", packing="true")
    assert "context" not in page.execute_script(VERDICT), "packed rows are many short ones"
    assert settles(page, ASIDE)
    longest = shown(page, ".longest-says").partition(": ")[2].partition(" ")[0]
    assert shown(page, ".longest-says button") == f"Set the length to {longest} (predicted)"
    go(page, model="tinyllama-1.1b", card="a100")
    assert settles(page, ASIDE)
    assert shown(page, ".longest-says button") == "Set the length to the model's context, 2,048"


def test_each_line_says_why(page):
    go(page, model="llama-3.2-1b", card="t4")
    page.execute_script("document.querySelector('.fit .bill details summary').click()")
    assert "502,103,488 bytes. Matrices of 16 blocks, as stored." in shown(page, ".fit .bill tbody tr")


def test_a_page_that_was_opened_as_a_file_says_how_to_serve_it(site, browser):
    browser.get((site / "fit.html").as_uri() + "#model=smollm2&card=l4")
    assert settles(browser, READY)
    said = browser.execute_script(STRANGE)
    assert "python -m http.server --directory build/site" in said
    assert "the answer for its first choice only" in said
    assert browser.execute_script(VERDICT).startswith("It fits.")
    assert browser.execute_script("return document.getElementById('fit-model').value") == fields.default()["model"]
    assert browser.execute_script("return document.getElementById('fit-model').matches(':disabled')")


def test_on_a_phone_no_control_is_hidden_by_the_box(page):
    page.set_window_size(390, 800)
    for choice in ({"card": "t4"}, {"card": "t4", "precision": "bf16"}, {"card": "l4", "a": "model=smollm2&card=t4"}):
        go(page, **choice)
        assert settles(page, ASIDE)
        hidden = page.execute_script("""
          return [...document.querySelectorAll(".fit form :is(input, select, textarea, button)")].filter((one) => {
            if (!one.checkVisibility()) return false;
            one.scrollIntoView({ block: "nearest" });
            one.focus({ preventScroll: false });
            const box = one.getBoundingClientRect();
            const there = document.elementFromPoint(box.left + Math.min(box.width / 2, 40), box.top + box.height / 2);
            return !there || !(one.contains(there) || there.contains(one) && there.tagName === "LABEL");
          }).map((one) => one.id || one.textContent);
        """)
        assert hidden == [], choice
        high = page.execute_script("return document.querySelector('.fit .head').getBoundingClientRect().height")
        assert high < 0.5 * 800


def test_a_list_that_sends_only_a_change_is_heard(page):
    go(page, card="t4")
    take = "const box = document.getElementById('fit-card'); box.value = 'l4';"
    page.execute_script(take + "box.dispatchEvent(new Event('change', {bubbles: true}))")
    assert settles(page, "location.hash.includes('card=l4') && " + READY)


def test_a_number_outside_its_limits_is_said_at_its_field(page):
    go(page, card="t4")
    page.execute_script("""
      const box = document.getElementById("fit-batch");
      box.value = "99999";
      for (const kind of ["input", "change"]) box.dispatchEvent(new Event(kind, {bubbles: true}));
    """)
    assert settles(page, "location.hash.includes('batch=65536') && " + READY)
    at = "return document.getElementById('fit-batch').closest('.field').querySelector('.error').innerText"
    assert page.execute_script(at) == "Batch size can be 1 to 65,536." == page.execute_script(DONE)
    go(page, card="t4")
    assert not page.execute_script("return document.querySelector('.fit .error')")


def test_the_form_is_folded_on_a_phone_and_what_one_opens_stays_open(page, host):
    opened = "return [...document.querySelectorAll('.fit .group')].map((group) => group.open)"
    assert page.execute_script(opened) == [True] * 4
    try:
        page.set_window_size(390, 800)
        page.get("about:blank")
        page.get(host + "fit.html")
        assert settles(page, READY)
        assert page.execute_script(opened) == [False] * 4
        controls = "return [...document.querySelectorAll('.fit form :is(input, select)')]"
        seen = page.execute_script(f"{controls}.filter((one) => one.checkVisibility()).map((one) => one.id)")
        first = ("model", "card", "set", "tokens", "tokens-slider", "peft", "quantization")
        assert seen == [f"fit-{name}" for name in first]
        go(page, card="t4", keep_attention="true", gradient_checkpointing="false")
        assert page.execute_script(opened) == [False, False, True, False], "where the refused field is"
        page.execute_script("document.querySelector('#fit-group-speed summary').click()")
        page.get("about:blank")
        page.get(host + "fit.html")
        assert settles(page, READY)
        assert page.execute_script(opened) == [False, False, False, True]
    finally:
        page.execute_script("localStorage.removeItem('fit-groups')")


def test_a_button_that_has_the_focus_can_be_read(page):
    """White on dark blue, and not dark blue on blue; the ratio is WCAG's."""
    for scheme in ("default", "slate"):
        ratio = page.execute_script(
            """
          document.body.setAttribute("data-md-color-scheme", arguments[0]);
          const button = document.querySelector(".fit [data-do=fit]");
          button.style.transition = "none";
          button.focus();
          const light = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
            .map((one) => (one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4))
            .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
          const style = getComputedStyle(button), both = [light(style.color), light(style.backgroundColor)];
          return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
        """,
            scheme,
        )
        assert ratio >= 4.5, (scheme, ratio)
