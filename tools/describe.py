"""A description for each page: what search engines and previews of links show below its title."""

import re

SHORTEST, LONGEST = 50, 200
"""Characters. Search engines cut a longer one, and a shorter one says little."""


def describe(markdown: str) -> str:
    """Describe a page by its promise (a lesson), or by the first sentences of its first paragraph."""
    promise = re.search(r"^> \*\*Promise\.\*\*(.+(?:\n> .+)*)", markdown, re.M)
    text = promise[1].replace("\n>", " ") if promise else _first_paragraph(markdown)
    return fitting(plain(text))


def plain(text: str) -> str:
    """A text without the signs of Markdown."""
    text = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\*\*In short\.\*\*|<[^>]+>|\{[^}]*\}", "", text)
    return " ".join(re.sub(r"[*`]", "", text).replace('"', "'").split())  # an attribute in double quotes holds it


def fitting(text: str) -> str:
    """As many whole sentences as fit; a first sentence that is too long ends at a word."""
    found = ""
    for sentence in re.split(r"(?<=[.!?:])\s+(?=[A-Z0-9`])", text):
        if len(f"{found} {sentence}") > LONGEST:
            break
        found = f"{found} {sentence}".strip()
    if len(found) >= SHORTEST:
        return re.sub(r":$", ".", found)
    return text[: LONGEST - 1].rpartition(" ")[0].rstrip(" ,;:") + "…" if len(text) > LONGEST else text


def _first_paragraph(markdown: str) -> str:
    """The first block of prose below the title; a short one takes the next with it."""
    body = re.sub(r"\A.*?^# .*?\n", "", markdown, count=1, flags=re.M | re.S)
    body = re.sub(r"^```.*?^```\s*$", "", body, flags=re.M | re.S)
    blocks = [block for block in re.split(r"\n\s*\n", body) if re.match(r"[A-Za-z\"*`\[]", block.lstrip())]
    return " ".join(blocks[:2])
