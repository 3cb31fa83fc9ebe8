"""The built site is whole: every link and every file that a page loads is there, and on this host."""

import re
from html.parser import HTMLParser
from urllib.parse import unquote, urljoin, urlsplit

LOADS = {"img": "src", "script": "src", "iframe": "src", "source": "srcset", "video": "src"}
KINDS = {"stylesheet", "icon", "preload", "preconnect", "modulepreload", "dns-prefetch"}


class Page(HTMLParser):
    """What a page links to, what it loads, and which places it has."""

    def __init__(self, text: str):
        super().__init__()
        self.places, self.links, self.loads = set(), [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        """Note one element."""
        found = dict(attributes)
        self.places |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if source := found.get(LOADS.get(tag, "")):
            self.loads.append(source)
        if tag == "link" and KINDS & set(found.get("rel", "").split()):
            self.loads.append(found["href"])


def test_every_link_and_every_file(site):
    pages = {path: Page(path.read_text("utf-8")) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 10
    wrong = []
    for path, page in pages.items():
        here = "/" + path.relative_to(site).as_posix()
        wrong += [(here, "loads from another host", address) for address in page.loads if urlsplit(address).netloc]
        for address in page.links + page.loads:
            if urlsplit(address).scheme or urlsplit(address).netloc:
                continue
            target = urlsplit(urljoin(here, address))
            file = site / unquote(target.path).lstrip("/")
            file = file / "index.html" if file.is_dir() else file
            if not file.exists():
                wrong.append((here, "leads nowhere", address))
            elif file.name == "fit.html" and "=" in target.fragment:
                continue  # a choice, which the page reads
            elif target.fragment and file in pages and unquote(target.fragment) not in pages[file].places:
                wrong.append((here, "no such place", address))
    assert wrong == []


MERGED = {
    "adamw_8bit.html": "optimizers.html",
    "paged_optimizer.html": "optimizers.html",
    "together.html": "a_full_card.html",
    "allocated_is_not_reserved.html": "a_full_card.html",
    "lean_preparation.html": "mixed_precision.html",
}
"""Lessons that became part of another one."""


def test_the_old_address_of_a_lesson_leads_to_the_lesson(site):
    moved = {path.name: path.read_text("utf-8") for path in (site / "lessons").glob("[0-9]*.html")}
    assert len(moved) == 34
    for name, text in moved.items():
        (new,) = set(re.findall(r"url=([^\"]+)\"", text))
        assert new == MERGED.get(name.partition("_")[2], name.partition("_")[2])
        assert (site / "lessons" / new).is_file()
