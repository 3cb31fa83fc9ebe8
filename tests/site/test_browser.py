"""Every page in a real browser: no error, no request to another host, nothing too wide, nothing that axe finds."""

import json
import time

import pytest

from tests.site.conftest import AXE, pages

WIDTHS = {"phone": 390, "tablet": 820, "screen": 1400}
COLUMNS = 88
"""A line of code in lessons and guides has at most so many characters, and a screen shows them all. What a program
printed there may be longer. On all other pages a screen shows all code."""
MODES = {"light": "default", "dark": "slate"}
MODE = 'document.body.setAttribute("data-md-color-scheme", arguments[0])'
AT_ONCE = """
document.head.insertAdjacentHTML("beforeend", `<style>
  *, ::before, ::after { transition: none !important }
  .highlight { content-visibility: visible !important }
</style>`)
"""
"""Colours would move slowly into the other mode, and be read on their way; and code out of sight is not laid out."""
TOO_WIDE = """
const columns = (code) => Math.max(...code.textContent.split("\\n").map((line) => line.length));
document.querySelectorAll("details").forEach((part) => (part.open = true));
return [...document.querySelectorAll("pre > code")]
  .filter((code) => code.scrollWidth > code.clientWidth + 1 && columns(code) <= arguments[0])
  .map((code) => code.textContent.slice(0, 80));
"""
"""The code of at most so many columns that scrolls."""
FOUND = {
    "out of memory": "symptoms.html#torchoutofmemoryerror-cuda-out-of-memory-tried-to-allocate",
    "OOM": "symptoms.html#torchoutofmemoryerror-cuda-out-of-memory-tried-to-allocate",
    "nan": "symptoms.html#loss-is-nan-or-0-beside-a-gradient-norm-of-nan",
    "tight": "guide/plan.html#what-fits-means",
    "T4 bf16": "symptoms.html#bf16-is-supported-on-a-t4-and-slow",
    "gradient checkpointing": "lessons/gradient_checkpointing.html",
    "rank": "glossary.html#rank",
}
"""What a reader types into the search box, and where the first answer must lead: an error to its cure, a word of a plan
to the page that explains plans, a technique to its lesson, a word to its definition."""


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
    browser.execute_script(AT_ONCE)
    browser.execute_script('window.dispatchEvent(new Event("beforeprint"))')  # formulas out of sight wait
    assert not browser.execute_script('return document.querySelectorAll(".katex-error").length')
    assert not browser.execute_script('return document.querySelectorAll(".arithmatex:not(:has(.katex))").length')
    assert settles(browser, '(fit => !fit || Boolean(fit.dataset.state))(document.getElementById("fit"))')
    browser.execute_script(AXE.read_text())
    for mode, scheme in MODES.items():
        browser.execute_script(MODE, scheme)
        colours_only = {"runOnly": ["color-contrast"]} if mode == "dark" else {}
        assert violations(browser, **colours_only) == [], mode
    columns = COLUMNS if page.startswith(("lessons/", "guide/")) else 10_000
    assert browser.execute_script(TOO_WIDE, columns) == [], f"code of at most {columns} columns scrolls on a screen"
    for name, width in WIDTHS.items():
        browser.set_window_size(width, 900)
        for mode, scheme in MODES.items():
            browser.execute_script(MODE, scheme)
            fits = "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
            assert settles(browser, fits), f"{name}, {mode}: scrolls sideways"


def settles(browser, condition):
    """Whether something becomes true while the page is laid out anew."""
    deadline = time.monotonic() + 60
    while not (holds := browser.execute_script(f"return {condition}")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return holds


def violations(browser, **options):
    """What axe-core finds."""
    found = browser.execute_async_script(
        "const [options, done] = arguments; axe.run(document, options).then(found => done(found.violations))",
        {"resultTypes": ["violations"], **options},
    )
    return [(one["id"], one["help"], [node["html"][:200] for node in one["nodes"]][:5]) for one in found]


def test_figures_follow_the_page_and_not_the_system(host, browser):
    browser.get(host + "lessons/gradient_checkpointing.html")
    for mode, scheme in MODES.items():
        browser.execute_script(MODE, scheme)
        shown = 'return [...document.querySelectorAll("picture img")].map(image => image.currentSrc)'
        browser.execute_script('document.querySelectorAll("picture img").forEach(image => image.loading = "eager")')
        assert browser.execute_script(shown)
        deadline = time.monotonic() + 60
        while not all(source.endswith(f"-{mode}.svg") for source in browser.execute_script(shown)):
            assert time.monotonic() < deadline, browser.execute_script(shown)
            time.sleep(0.1)


def test_the_search_box_leads_to_the_right_place_first(host, browser):
    from selenium.webdriver.common.by import By

    browser.set_window_size(WIDTHS["screen"], 900)
    browser.get(host + "index.html")
    box = browser.find_element(By.CSS_SELECTOR, "input.md-search__input")
    browser.execute_script("arguments[0].focus()", box)
    for query, wanted in FOUND.items():
        browser.execute_script("arguments[0].value = ''", box)
        box.send_keys(query)
        found = first = None
        deadline = time.monotonic() + 60
        while found != wanted:
            assert time.monotonic() < deadline, f"{query}: {found} in place of {wanted}"
            time.sleep(0.1)
            first = browser.execute_script(FIRST)
            found = next((one for one in first if ("#" in one) == ("#" in wanted)), None) if first else None


FIRST = """
const links = document.querySelectorAll("li.md-search-result__item:first-of-type a.md-search-result__link");
return [...links].map(function (link) {
  const address = new URL(link.href);
  return address.pathname.slice(1) + address.hash;
});
"""
"""The first page that the search box shows, and the places on it, best first."""


def test_a_box_that_scrolls_says_so_until_its_end(host, browser):
    browser.set_window_size(WIDTHS["phone"], 900)
    browser.get(host + "map.html")
    more = 'document.querySelector(".scrolls").dataset.more'
    assert settles(browser, f"{more} === 'true'")
    browser.execute_script('document.querySelector(".scrolls").scrollLeft = 9999')
    assert settles(browser, f"{more} === 'false'")
    browser.set_window_size(WIDTHS["screen"], 900)
    assert settles(browser, f"{more} === undefined"), "a box with room for all still says that it scrolls"


def test_prose_is_75_characters_wide(host, browser):
    browser.set_window_size(WIDTHS["screen"], 900)
    browser.get(host + "lessons/gradient_checkpointing.html")
    lines = browser.execute_script("""
      const words = document.createRange();
      return [...document.querySelectorAll("article > p")].filter((p) => p.textContent.length > 250).map(function (p) {
        words.selectNodeContents(p);
        const tops = new Set([...words.getClientRects()].map((box) => Math.round(box.bottom / 12)));
        return p.textContent.length / tops.size;
      });
    """)
    assert len(lines) > 5
    assert 60 < sum(lines) / len(lines) < 85, lines
