"""Each page can be sent to somebody: a title, a description and a picture of its own; and a lost reader is helped."""

import re
from collections import Counter
from html.parser import HTMLParser
from urllib.parse import urlsplit

import pytest
from PIL import Image

from tests.site.conftest import pages
from tests.site.test_links import Page
from tools import describe, notebooks, social, techniques

ADDRESS = notebooks.PROJECT["urls"]["Documentation"]


class Head(HTMLParser):
    """The title and the named values of a page's head."""

    def __init__(self, text: str):
        super().__init__()
        self.found: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        """Note one value."""
        values = dict(attributes)
        if tag == "meta" and "content" in values:
            self.found[values.get("property") or values.get("name")] = values["content"]


def test_each_page_has_a_title_a_description_and_a_picture_of_its_own(site):
    heads, titles = {}, {}
    for page in pages():
        text = (site / page).read_text(encoding="utf-8")
        heads[page], titles[page] = Head(text).found, re.search(r"<title>(.+?)</title>", text)[1]
    assert len(heads) > 70
    for page, head in heads.items():
        assert describe.SHORTEST <= len(head["description"]) <= describe.LONGEST, (page, head["description"])
        assert head["og:description"] == head["description"]
        assert head["og:title"]
        assert head["og:url"] == ADDRESS + page
        assert head["twitter:card"] == "summary_large_image"
        assert head["og:image"].startswith(ADDRESS)
        assert (site / head["og:image"].removeprefix(ADDRESS)).is_file(), page
    for values in ([head["description"] for head in heads.values()], titles.values(),
                   [head["og:image"] for head in heads.values()]):  # fmt: skip
        assert [value for value, count in Counter(values).items() if count > 1] == []


def test_a_picture_has_the_size_that_previews_want(tmp_path):
    social.draw(tmp_path / "one.png", "A long title that needs more than one line, as most of them do", "Learn")
    assert Image.open(tmp_path / "one.png").size == (1200, 630)
    assert (tmp_path / "one.png").stat().st_size < 40_000


def test_the_sitemap_has_every_page(site):
    listed = set(re.findall(r"<loc>(.+?)</loc>", (site / "sitemap.xml").read_text(encoding="utf-8")))
    assert {ADDRESS + page for page in pages()} <= listed


def test_the_page_for_a_wrong_address_leads_on_from_anywhere(site):
    text = (site / "404.html").read_text(encoding="utf-8")
    page, base = Page(text), urlsplit(ADDRESS).path
    addresses = [one for one in page.links + page.loads if not urlsplit(one).scheme and not one.startswith("#")]
    assert [one for one in addresses if not one.startswith(base)] == [], "relative: wrong in a folder that is not there"
    files = {urlsplit(one).path.removeprefix(base) for one in addresses}
    assert [file for file in files if not (site / (file or "index.html")).exists()] == []
    article = text[text.index("<article") : text.index("</article>")]
    assert f'action="{base}index.html"' in article
    assert 'name="q"' in article
    for name in ("index.html", "fit.html", "symptoms.html", "lessons/the_bill.html"):
        assert f'href="{base}{name}"' in article


@pytest.mark.parametrize(
    ("markdown", "description"),
    [
        (
            "# 1. A\n> **Promise.** You keep *one* byte where [plain](x.md) training\n> keeps two, `here`.\n>\n> No.",
            "You keep one byte where plain training keeps two, here.",
        ),
        ("# A\n\n```\ncode\n```\n\nShort one.\n\nThis is the second paragraph, and it has enough words.\n\nThird.",
         "Short one. This is the second paragraph, and it has enough words."),
        ("# A\n\n" + "word " * 60 + ".", "word " * 38 + "word…"),
    ],
    ids=["promise", "paragraphs", "long"],
)  # fmt: skip
def test_a_description_is_made_of_whole_sentences(markdown, description):
    assert describe.describe(markdown) == description


def test_every_technique_has_a_page_and_its_lesson_leads_to_its_switch():
    assert len(techniques.pages()) == len(techniques.nav()) > 25
    assert "::: cria_tricks.techniques.nf4" in techniques.pages()["reference/techniques/nf4.md"]
    assert "[NF4](techniques/nf4.md)" in techniques.with_index(techniques.BLOCK)
    assert techniques.preset("chunked_loss") == "chunked_loss=true"
    assert techniques.preset("the_bill") == ""
    assert techniques.of_switch("quantization=nf4") == "nf4"
    assert techniques.of_switch("gradient_accumulation=4") == "gradient_accumulation"
