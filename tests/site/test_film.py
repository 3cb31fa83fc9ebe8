"""Films in a real browser: drawn on both widths and in both schemes, moved by keyboard, exchanged by switches."""

import time

import pytest

from tests.site.conftest import AXE
from tests.site.test_browser import AT_ONCE, MODE, MODES, settles, violations
from tools import films, ladder

HOME = "index.html"
FIRST, SECOND, *_ = ladder.LADDER_STEPS
READY = 'Boolean(document.querySelector(".film.film-ready .film-largest li"))'
OF = "document.querySelector('.film')"
PEAK = f"Number({OF}.querySelector('svg').dataset.peak)"


def peak_of(name):
    return max(films.film_answer.stacked(films.read()["films"][name])[-1])


@pytest.fixture
def page(host, browser):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    browser.set_window_size(1400, 1000)
    browser.get(host + HOME)
    browser.execute_script(f"{OF}.scrollIntoView()")
    assert settles(browser, READY)
    yield browser
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def press(browser, key, times=1):
    from selenium.webdriver.common.by import By

    slider = browser.find_element(By.CSS_SELECTOR, ".film input[type=range]")
    for _ in range(times):
        slider.send_keys(key)


@pytest.mark.parametrize("width", [390, 1400])
def test_it_is_drawn_on_both_widths_in_both_schemes(width, page):
    page.execute_script(AXE.read_text())
    page.execute_script(AT_ONCE)
    page.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride", {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    )
    try:
        box = f"{OF}.querySelector('svg').getBoundingClientRect()"
        assert settles(page, f"{box}.width > 0.85 * Math.min({width} - 40, 800) && {box}.right <= {width}")
        assert settles(page, f"document.documentElement.scrollWidth <= {width}")
        colours = set()
        for scheme in MODES.values():
            page.execute_script(MODE, scheme)
            area = f"{OF}.querySelector('.film-area.film-line-0')"
            colours.add(page.execute_script(f"return getComputedStyle({area}).fill"))
            assert page.execute_script(f"return {area}.getBBox().height") > 20
            # The switches, the slider and the words, and nothing of the rest of the page.
            inside = page.execute_async_script(
                "const done = arguments[0]; axe.run('.film', {resultTypes: ['violations']})"
                ".then(found => done(found.violations.map(one => [one.id, one.nodes[0].html])))"
            )
            assert inside == []
        assert len(colours) == 2
    finally:
        page.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert violations(page, runOnly=["label", "aria-allowed-attr"]) == []


def test_arrow_keys_move_the_marker_and_the_names_change(page):
    from selenium.webdriver.common.keys import Keys

    def shown():
        return page.execute_script(
            f"return [Number({OF}.dataset.moment), {OF}.querySelector('.film-marker').getAttribute('x1'),"
            f"{OF}.querySelector('.film-now').textContent, {OF}.querySelector('.film-largest').textContent]"
        )

    first = shown()
    data = films.read()["films"][FIRST]
    assert first[0] == data["peak"]
    assert "This is the peak" in first[2]
    assert "saved activations" in first[3]
    press(page, Keys.ARROW_LEFT, 3)
    second = shown()
    assert second[0] == first[0] - 3
    assert second[1:3] != first[1:3]
    press(page, Keys.HOME)
    start = shown()
    assert start[0] == 0
    assert start[3] != first[3]
    assert "saved activations" not in start[3], "nothing is saved before the forward pass"
    press(page, Keys.END)
    assert shown()[2].startswith("Optimizer step: ")
    spoken = f"{OF}.querySelector('[aria-live]').textContent"
    assert settles(page, f"{spoken}.startsWith('Optimizer step')"), "said when the marker rests"


def test_pointing_names_the_moment_under_the_pointer(page):
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By

    chart = page.find_element(By.CSS_SELECTOR, ".film svg")
    ActionChains(page).move_to_element_with_offset(chart, -150, 0).perform()
    assert settles(page, f"{OF}.querySelector('.film-now').textContent.startsWith('Forward pass')")
    ActionChains(page).move_to_element_with_offset(chart, 100, 0).perform()
    assert settles(page, f"{OF}.querySelector('.film-now').textContent.startsWith('Backward pass')")


def test_it_plays_and_pauses(page):
    play = f"{OF}.querySelector('.film-play')"
    page.execute_script(f"{OF}.querySelector('input[type=range]').value = 0")
    page.execute_script(f"{OF}.querySelector('input[type=range]').dispatchEvent(new Event('input'))")
    page.execute_script(f"{play}.click()")
    assert page.execute_script(f"return {play}.textContent") == "Pause"
    assert settles(page, f"Number({OF}.dataset.moment) > 5")
    page.execute_script(f"{play}.click()")
    assert page.execute_script(f"return {play}.textContent") == "Play"
    stopped = page.execute_script(f"return {OF}.dataset.moment")
    time.sleep(0.4)
    assert page.execute_script(f"return {OF}.dataset.moment") == stopped


def flip(browser, number=1):
    browser.execute_script(f"{OF}.querySelectorAll('.film-switches input')[{number}].click()")


def test_a_switch_moves_the_peak_on_the_same_scale(page):
    before, after = peak_of(FIRST), peak_of(SECOND)
    assert page.execute_script(f"return {PEAK}") == before
    page.execute_script(
        f"window.seen = []; new MutationObserver(() => window.seen.push({PEAK}))"
        f".observe({OF}.querySelector('svg'), {{attributes: true}})"
    )
    line = f"{OF}.querySelector('.film-card').getAttribute('y1')"
    card = page.execute_script(f"return {line}")
    flip(page)
    assert settles(page, f"{PEAK} === {after}")
    assert page.execute_script(f"return {line}") == card
    seen = page.execute_script("return window.seen")
    assert [peak for peak in seen if after < peak < before], "it is seen on its way"
    said = page.execute_script(f"return {OF}.querySelector('.film-change').textContent")
    assert said == "The peak was 31.3 GiB and is 21.7 GiB: 9.6 GiB less."
    flip(page, 0)
    assert settles(page, f"{PEAK} === {before}")


def test_reduced_motion_is_honoured(page):
    reduced = [{"name": "prefers-reduced-motion", "value": "reduce"}]
    page.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": reduced})
    before, after = peak_of(FIRST), peak_of(SECOND)
    page.execute_script(
        f"window.seen = []; new MutationObserver(() => window.seen.push({PEAK}))"
        f".observe({OF}.querySelector('svg'), {{attributes: true}})"
    )
    flip(page)
    assert settles(page, f"{PEAK} === {after}")
    assert set(page.execute_script("return window.seen")) <= {before, after}


def test_without_javascript_there_is_a_picture(host, browser):
    from selenium.webdriver.common.by import By

    browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        browser.get(host + HOME)
        picture = browser.find_element(By.CSS_SELECTOR, ".film img")
        assert picture.get_attribute("alt").startswith("Memory during a training step of Llama-3.2-1B in plain fp32")
        assert picture.get_attribute("src").endswith("films/home-light.svg")
        assert not browser.find_elements(By.CSS_SELECTOR, ".film svg")
    finally:
        browser.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_each_film_can_be_shown(page):
    """The order of the lines, the sums and the peak of each film."""
    for number, name in enumerate(ladder.LADDER_STEPS):
        flip(page, number)
        assert settles(page, f"{PEAK} === {peak_of(name)}"), name
    assert [one for one in page.get_log("browser") if one["level"] == "SEVERE"] == []
