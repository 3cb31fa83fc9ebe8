"""A page of the reference for each technique, and the index of them, made from the modules' cards."""

import re
from types import ModuleType

from cria_tricks.bench import tables
from cria_tricks.tricks import INFERENCE, TRICKS, card, trick_name

INDEX = "reference/techniques.md"
BLOCK = "<!-- techniques -->"
"""Where the index page has its table."""


def pages() -> dict[str, str]:
    """Each page's path and its text, which mkdocstrings fills."""
    return {_path(trick): _page(trick) for trick in _sorted()}


def nav() -> list[dict[str, str]]:
    """The entries of the navigation, by title."""
    return [{_title(trick): _path(trick)} for trick in _sorted()]


def with_index(markdown: str) -> str:
    """The index page with its table.

    Raises:
        ValueError: the page has no place for it.
    """
    if BLOCK not in markdown:
        raise ValueError(f"docs/{INDEX} has no {BLOCK}")
    rows = [
        (
            f"[{_title(trick)}](techniques/{trick_name(trick)}.md)",
            card(trick)["title"].partition(": ")[2],
            _claim(trick),
        )
        for trick in _sorted()
    ]
    return markdown.replace(BLOCK, tables.table(("technique", "what it does", "claim"), rows))


def preset(lesson: str) -> str:
    """The switch of the first technique that a lesson teaches, such as ``chunked_loss=true``; empty without one."""
    found = [trick.SWITCHES[0] for trick in TRICKS if lesson == trick.LESSON]
    return found[0] if found else ""


def of_switch(switch: str) -> str:
    """The name of the technique that answers to a switch."""
    field = switch.partition("=")[0]
    same = [trick for trick in TRICKS if switch in trick.SWITCHES]
    alike = [trick for trick in TRICKS if any(one.startswith(f"{field}=") for one in trick.SWITCHES)]
    return trick_name((same or alike)[0])


def _sorted() -> list[ModuleType]:
    return sorted((*TRICKS, *INFERENCE), key=lambda trick: _title(trick).lower())


def _path(trick: ModuleType) -> str:
    return f"reference/techniques/{trick_name(trick)}.md"


def _title(trick: ModuleType) -> str:
    return card(trick)["title"].partition(": ")[0]


def _what(trick: ModuleType) -> str:
    return card(trick)["title"].partition(": ")[2]


def _claim(trick: ModuleType) -> str:
    """The claim without its conditions."""
    return re.split("[:;,]", card(trick)["Claim"])[0]


def _page(trick: ModuleType) -> str:
    return (
        f"---\ndescription: >-\n  {card(trick)['title']}\n---\n\n# {_title(trick)}\n\n"
        f'<p class="bar"><a href="../techniques.html">All techniques</a> '
        f'<a href="../../lessons/{trick.LESSON}.html">Lesson</a>{_fit(trick)}</p>\n\n::: {trick.__name__}\n'
    )


def _fit(trick: ModuleType) -> str:
    if trick in INFERENCE:
        return ""
    return f' <a href="../../fit.html#{trick.SWITCHES[0]}">Will it fit with it?</a>'
