"""Guesses on a lesson's page: kept, compared, scored and reset in this browser; nothing is hidden without scripts."""

import base64
import json

import pytest
from selenium.webdriver.common.keys import Keys

from cria_tricks.course.notebook import verdict
from tests.test_predictions import SAID

NUMBER, CHOICE = "lessons/the_bill.html", "lessons/when_libraries_lie.html"
"""Pages whose first guess is a number, and one of several choices."""
FIELD, SAYS, SCORE = "#guess-1 input", "#guess-1 .predict-says", ".predict-score p"


@pytest.fixture
def lesson(host, browser):
    """Opens a lesson in a browser that knows no guess."""
    browser.set_window_size(1280, 900)
    browser.get(host + NUMBER)
    browser.execute_script("localStorage.clear()")
    yield lambda page=NUMBER: browser.get(host + page)
    browser.execute_script("localStorage.clear()")


@pytest.fixture
def find(browser):
    """Finds one element."""
    return lambda selector: browser.find_element("css selector", selector)


@pytest.fixture
def asked(find):
    """Returns what the page's script knows of the first guess: its answer, the unit, and the choices if it has any."""
    return lambda: json.loads(base64.b64decode(find("#guess-1").get_attribute("data-of")))


@pytest.fixture
def shown(browser):
    """Says whether the blocks of an answer are visible; it fails where only some of them are."""

    def visible(of="guess-1"):
        blocks = browser.find_elements("css selector", f'.answer[data-of="{of}"]')
        (alike,) = {block.is_displayed() for block in blocks}
        return alike

    return visible


def test_a_guess_is_kept_revealed_scored_and_reset_and_nothing_is_sent(lesson, browser, find, asked, shown):
    lesson()
    assert not shown()
    answer, unit = asked()["answer"], asked()["unit"]
    guess = round(1.2 * answer)
    find(FIELD).send_keys(f"{guess} {unit.lower()}")
    lesson()
    assert find(FIELD).get_property("value") == f"{guess} {unit.lower()}", "a reload loses the guess"
    assert not shown()
    browser.get_log("performance")
    find(FIELD).send_keys(Keys.ENTER)
    assert shown()
    assert not shown("guess-2")
    assert find(SAYS).text == verdict(guess, answer, unit)
    assert find(SAYS).get_attribute("role") == "status"
    assert browser.switch_to.active_element == find(SAYS)
    assert find(SCORE).text.endswith("1 taken, 0 within 10%, 1 within a factor of 2.")
    assert not find(FIELD).is_enabled(), "the first guess counts"
    events = [json.loads(entry["message"])["message"]["method"] for entry in browser.get_log("performance")]
    assert not [event for event in events if event == "Network.requestWillBeSent"]
    lesson()
    assert shown()
    assert find(SAYS).text.startswith(f"You said {guess} {unit}")
    lesson(CHOICE)
    assert ": 1 taken" in find(SCORE).text, "the score is not the course's"
    find(".predict-score button").click()
    assert ": 0 taken" in find(SCORE).text
    lesson()
    assert not shown()
    assert (find(FIELD).get_property("value"), find(SAYS).text) == ("", "")
    assert find(FIELD).is_enabled()


@pytest.mark.parametrize(
    ("written", "says"), [("abc", '"abc" is no number'), ("", "Write a number first"), ("1.2.3", "no number")]
)
def test_what_is_no_number_gets_a_message(lesson, find, shown, written, says):
    lesson()
    find(FIELD).send_keys(written + Keys.ENTER)
    assert says in find(SAYS).text
    assert find(FIELD).get_attribute("aria-invalid") == "true"
    assert not shown()
    assert ": 0 taken" in find(SCORE).text


def test_a_choice_and_an_answer_without_a_guess(lesson, browser, find, asked, shown):
    lesson(CHOICE)
    right = asked()["answer"]
    assert right in asked()["choices"]
    find("#guess-1 [type=submit]").click()
    assert find(SAYS).text.startswith("Choose first")
    find(f"{FIELD}[value='{right}']").click()
    find("#guess-1 [type=submit]").click()
    assert find(SAYS).text == verdict(right, right)
    assert find(SCORE).text.endswith("1 taken, 1 within 10%, 1 within a factor of 2.")
    lesson()
    hidden = find(".answer-hidden")
    guess = hidden.find_element("css selector", "a").get_attribute("href").rpartition("#")[2]
    assert not shown(guess)
    hidden.find_element("css selector", "button").click()
    assert shown(guess)
    assert find(f"#{guess} .predict-says").text.startswith("It is ")
    assert ": 1 taken" in find(SCORE).text, "an answer without a guess is no prediction"


def test_the_script_says_what_the_notebook_says(lesson, browser):
    for guess, answer, unit, said in SAID:
        assert browser.execute_script("return criaPredictions.verdict(...arguments)", guess, answer, unit) == said
    for text, number in {
        "1,155": 1155,
        "12,5": 12.5,
        " 1 155 MiB": 1155,
        "1e3": 1000,
        "-2": -2,
        "MiB": None,
        "0x10": None,
    }.items():
        assert browser.execute_script("return criaPredictions.parse(arguments[0], 'MiB')", text) == number, text


def test_storage_that_holds_something_else_stops_nothing(lesson, browser, find):
    browser.execute_script("localStorage.setItem('cria-predictions', '{broken')")
    lesson()
    assert ": 0 taken" in find(SCORE).text


def test_without_scripts_nothing_is_hidden(lesson, host, browser):
    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(host + NUMBER)
        root = browser.execute_cdp_cmd("DOM.getDocument", {})["root"]["nodeId"]

        def height(selector):
            found = browser.execute_cdp_cmd("DOM.querySelector", {"nodeId": root, "selector": selector})
            return browser.execute_cdp_cmd("DOM.getBoxModel", found)["model"]["height"]

        assert height('.answer[data-of="guess-1"] .output') > 20
        with pytest.raises(Exception, match="box model"):
            height("#guess-1")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
        browser.get(host + NUMBER)
