"""Every page in a real browser: no error, no request to another host, no sideways scroll, nothing axe calls serious."""

import json
import time

import pytest

from tests.site.conftest import AXE, pages

WIDTHS = {"phone": 390, "tablet": 820, "screen": 1280}
MODES = {"light": "default", "dark": "slate"}
MODE = 'document.body.setAttribute("data-md-color-scheme", arguments[0])'
AT_ONCE = """
document.head.insertAdjacentHTML("beforeend", "<style>*, ::before, ::after { transition: none !important }</style>")
"""
"""Colours would move slowly into the other mode, and be read on their way."""


@pytest.mark.parametrize("page", pages() or ["index.html"])
def test_a_page(page, host, browser):
    browser.set_window_size(WIDTHS["screen"], 900)
    browser.get_log("browser"), browser.get_log("performance")
    browser.get(host + page)
    said = [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
    assert said == []
    asked = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    addresses = [event["params"]["request"]["url"] for event in asked if event["method"] == "Network.requestWillBeSent"]
    assert addresses
    assert [address for address in addresses if not address.startswith((host, "data:", "blob:"))] == []
    assert not browser.execute_script('return document.querySelectorAll(".katex-error").length')
    assert settles(browser, '(fit => !fit || Boolean(fit.dataset.state))(document.getElementById("fit"))')
    browser.execute_script(AXE.read_text())
    browser.execute_script(AT_ONCE)
    for mode, scheme in MODES.items():
        browser.execute_script(MODE, scheme)
        colours_only = {"runOnly": ["color-contrast"]} if mode == "dark" else {}
        assert serious(browser, **colours_only) == [], mode
    for name, width in WIDTHS.items():
        browser.set_window_size(width, 900)
        fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        assert settles(browser, fits), f"{name}: scrolls sideways"


def settles(browser, condition):
    """Whether something becomes true while the page is laid out anew."""
    deadline = time.monotonic() + 60
    while not (holds := browser.execute_script(f"return {condition}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds


def serious(browser, **options):
    """What axe-core finds, and would not let pass."""
    found = browser.execute_async_script(
        "const [options, done] = arguments; axe.run(document, options).then(found => done(found.violations))",
        {"resultTypes": ["violations"], **options},
    )
    return [
        (one["id"], one["help"], [node["html"][:200] for node in one["nodes"]][:5])
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def test_figures_follow_the_page_and_not_the_system(host, browser):
    browser.get(host + "lessons/03_gradient_checkpointing.html")
    for mode, scheme in MODES.items():
        browser.execute_script(MODE, scheme)
        shown = 'return [...document.querySelectorAll("picture img")].map(image => image.currentSrc)'
        browser.execute_script('document.querySelectorAll("picture img").forEach(image => image.loading = "eager")')
        assert browser.execute_script(shown)
        deadline = time.monotonic() + 60
        while not all(source.endswith(f"-{mode}.svg") for source in browser.execute_script(shown)):
            assert time.monotonic() < deadline, browser.execute_script(shown)
            time.sleep(0.1)


def test_search_finds_checkpointing(host, browser):
    from selenium.webdriver.common.by import By

    browser.set_window_size(WIDTHS["screen"], 900)
    browser.get(host + "index.html")
    box = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    browser.execute_script("arguments[0].focus()", box)
    box.send_keys("checkpointing")
    deadline = time.monotonic() + 60
    while not (links := browser.find_elements(By.CSS_SELECTOR, "a.md-search-result__link")):
        assert time.monotonic() < deadline, "nothing found"
        time.sleep(0.1)
    assert any("03_gradient_checkpointing" in link.get_attribute("href") for link in links)
