"""Guesses on a lesson's page: kept, compared, scored and reset in this browser; nothing is hidden without scripts."""

import json

import pytest
from selenium.webdriver.common.keys import Keys

from tests.test_predictions import SAID

NUMBER, CHOICE = "lessons/the_bill.html", "lessons/long_rows.html"
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
def shown(browser):
    """Says for each block of an answer whether it is visible."""
    return lambda of="guess-1": [
        one.is_displayed() for one in browser.find_elements("css selector", f'.answer[data-of="{of}"]')
    ]


def test_a_guess_is_kept_revealed_scored_and_reset_and_nothing_is_sent(lesson, browser, find, shown):
    lesson()
    assert shown() == [False]
    find(FIELD).send_keys("900 kib")
    lesson()
    assert find(FIELD).get_property("value") == "900 kib", "a reload loses the guess"
    assert shown() == [False]
    browser.get_log("performance")
    find(FIELD).send_keys(Keys.ENTER)
    assert shown() == [True]
    assert shown("guess-2") == [False]
    assert find(SAYS).text == "You said 900 KiB, it is 768 KiB: 17% too high."
    assert find(SAYS).get_attribute("role") == "status"
    assert browser.switch_to.active_element == find(SAYS)
    assert find(SCORE).text.endswith("1 taken, 0 within 10%, 1 within a factor of 2.")
    assert not find(FIELD).is_enabled(), "the first guess counts"
    events = [json.loads(entry["message"])["message"]["method"] for entry in browser.get_log("performance")]
    assert not [event for event in events if event == "Network.requestWillBeSent"]
    lesson()
    assert shown() == [True]
    assert find(SAYS).text.startswith("You said 900 KiB")
    lesson(CHOICE)
    assert ": 1 taken" in find(SCORE).text, "the score is not the course's"
    find(".predict-score button").click()
    assert ": 0 taken" in find(SCORE).text
    lesson()
    assert shown() == [False]
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
    assert shown() == [False]
    assert ": 0 taken" in find(SCORE).text


def test_a_choice_and_an_answer_without_a_guess(lesson, browser, find, shown):
    lesson(CHOICE)
    find("#guess-1 [type=submit]").click()
    assert find(SAYS).text.startswith("Choose first")
    find(FIELD + "[value='open block']").click()
    find("#guess-1 [type=submit]").click()
    assert find(SAYS).text == "You said open block, which is right."
    assert find(SCORE).text.endswith("1 taken, 1 within 10%, 1 within a factor of 2.")
    lesson()
    find(".answer-hidden:has([href='#guess-2']) button").click()
    assert shown("guess-2") == [True]
    assert find("#guess-2 .predict-says").text.startswith("It is 2,747 KiB.")
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
