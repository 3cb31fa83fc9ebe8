"""What MkDocs does besides ``tools/pages.py``: technique pages, search, descriptions, pictures, images without jumps.

Every function that MkDocs calls has the name of its event (``on_...``). What needs more than a few lines has a file of
its own: ``techniques.py``, ``describe.py`` and ``social.py``.
"""

import functools
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # MkDocs loads this file by its path

from cria_tricks.common.lessons import LESSONS, PARTS
from tools import describe, social, techniques

BOOSTS = {
    "symptoms.md": 4.0,
    "glossary.md": 2.0,
    "guide/": 2.0,
    "map.md": 2.0,
    "lessons/": 1.5,
    "reference/": 0.5,
    "decisions/": 0.5,
}
"""How much more a page counts in the search, by the start of its path. Without this, pages of code come first, because
their many headings contain every word."""
WORDS = {
    "symptoms.html#torchoutofmemoryerror-cuda-out-of-memory-tried-to-allocate": "OOM out of memory",
    "symptoms.html#loss-is-nan-or-0-beside-a-gradient-norm-of-nan": "NaN",
    "symptoms.html#bf16-is-supported-on-a-t4-and-slow": "T4 bf16 bfloat16",
    "guide/plan.html#what-fits-means": "tight fits refused verdict margin",
    "glossary.html#rank": "rank",
}
"""Words that readers type for a section whose own heading does not have them. They count as its title does."""


def on_config(config: Any) -> Any:
    """Put the lessons' and the techniques' pages into the navigation."""
    first, *others = ({part: [f"lessons/{name}.md" for name in names]} for part, names in PARTS.items())
    _section(config.nav, f"lessons/{LESSONS[0]}.md")[:] = [*itertools.chain(*first.values()), *others]
    _section(config.nav, techniques.INDEX).extend(techniques.nav())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add a page for each technique."""
    from mkdocs.structure.files import File

    for path, text in techniques.pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Fill the index of techniques; give the page its description and its weight in the search."""
    path = page.file.src_uri
    if path == techniques.INDEX:
        markdown = techniques.with_index(markdown)
    if "description" not in page.meta:
        page.meta["description"] = config.site_description if path == "index.md" else describe.describe(markdown)
    boost = next((boost for start, boost in BOOSTS.items() if path.startswith(start)), None)
    if boost is not None:
        page.meta.setdefault("search", {}).setdefault("boost", boost)
    return markdown


def on_page_content(content: str, page: Any, config: Any, files: Any) -> str:
    """Say how large each picture is, note whether the page has mathematics, and name its picture for links."""
    folder = Path(config.docs_dir) / Path(page.file.src_uri).parent
    page.meta["math"] = 'class="arithmatex"' in content
    page.meta["picture"] = social.place(page.file.src_uri)
    content = content.replace("<th></th>", "<td></td>")  # the empty corner of a table is no heading
    numbers = itertools.count()
    return re.sub(r"<img [^>]*?>", lambda found: _sized(found[0], folder, first=next(numbers) == 0), content)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Draw the picture that a link to the page shows."""
    ancestors = [section.title for section in reversed(page.ancestors)]
    social.draw(Path(config.site_dir) / page.meta["picture"], str(page.title), " / ".join(ancestors[:2]))
    return output


def on_post_build(config: Any) -> None:
    """Add the readers' words to the search index, and leave code out of the reference's part: every page loads it.

    Raises:
        PluginError: a place of :data:`WORDS` is not on the site.
    """
    from mkdocs.exceptions import PluginError

    path = Path(config.site_dir) / "search" / "search_index.json"
    index = json.loads(path.read_text(encoding="utf-8"))
    entries = {entry["location"]: entry for entry in index["docs"]}
    for place, words in WORDS.items():
        if place not in entries:
            raise PluginError(f"tools/site_hooks.py: {place} is no place to find")
        entries[place]["words"] = words
    for entry in index["docs"]:
        if entry["location"].startswith("reference/"):
            entry["text"] = _words_only(entry["text"])
    index["config"]["fields"]["words"] = {"boost": 1000.0}
    path.write_text(json.dumps(index, separators=(",", ":"), ensure_ascii=False), encoding="utf-8")


def _section(entries: list[Any], path: str) -> list[Any]:
    """Find the list of the navigation that has a page."""
    found = _sections(entries, path)
    if not found:
        raise ValueError(f"mkdocs.yml: {path} is not in nav")
    return found[0]


def _sections(entries: list[Any], path: str) -> list[list[Any]]:
    values = [value for entry in entries for value in (entry.values() if isinstance(entry, dict) else [entry])]
    if path in values:
        return [entries]
    return [found for value in values if isinstance(value, list) for found in _sections(value, path)]


def _sized(image: str, folder: Path, first: bool) -> str:
    """An image's tag with its width and height, so that the text below does not jump when it arrives.

    The first image of a page is loaded at once, because it may be in sight; the others when a reader comes near.
    """
    source = re.search(r'src="([^":]+\.svg)"', image)
    if not source or not (folder / source[1]).is_file():
        return image
    width, height = _size(folder / source[1])
    if given := re.search(r' width="(\d+)"', image):
        width, height = int(given[1]), round(int(given[1]) * height / width)
        image = image.replace(given[0], "")
    when = 'fetchpriority="high"' if first else 'loading="lazy"'
    return image.replace("<img ", f'<img width="{width}" height="{height}" {when} decoding="async" ', 1)


@functools.cache
def _size(path: Path) -> tuple[int, int]:
    """The width and height that an SVG file states."""
    found = re.search(r'viewBox="\S+ \S+ (\S+) (\S+)"', path.read_text(encoding="utf-8")[:3000])
    if not found:
        raise ValueError(f"{path} has no viewBox")
    return round(float(found[1])), round(float(found[2]))


def _words_only(text: str) -> str:
    """The text of a place without code and tags."""
    text = re.sub(r"<pre>.*?</pre>", "", text, flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())
