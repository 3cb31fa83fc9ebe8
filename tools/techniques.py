"""A page of the reference for each technique, and the index of them, made from the modules' cards."""

import functools
import re
from types import ModuleType

from cria_tricks.common.markdown_table import table
from cria_tricks.predict.toggles import off_the_capstone
from cria_tricks.switches import TECHNIQUES, technique_name
from cria_tricks.techniques import INFERENCE, card, code_of

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
            f"[{_title(trick)}](techniques/{technique_name(trick)}.md)",
            card(trick)["title"].partition(": ")[2],
            _claim(trick),
        )
        for trick in _sorted()
    ]
    return markdown.replace(BLOCK, table(("technique", "what it does", "changes results?"), rows))


def preset(lesson: str) -> str:
    """The switch of the first technique that a lesson teaches, such as ``chunked_loss=true``; empty without one."""
    found = [trick.TECHNIQUE.switches[0] for trick in TECHNIQUES if lesson == trick.TECHNIQUE.lesson]
    return found[0] if found else ""


def of_switch(switch: str) -> str:
    """The name of the technique that answers to a switch."""
    field = switch.partition("=")[0]
    same = [trick for trick in TECHNIQUES if switch in trick.TECHNIQUE.switches]
    alike = [trick for trick in TECHNIQUES if any(one.startswith(f"{field}=") for one in trick.TECHNIQUE.switches)]
    return technique_name((same or alike)[0])


def _sorted() -> list[ModuleType]:
    return sorted((*TECHNIQUES, *INFERENCE), key=lambda trick: _title(trick).lower())


def _path(trick: ModuleType) -> str:
    return f"reference/techniques/{technique_name(trick)}.md"


def _title(trick: ModuleType) -> str:
    return card(trick)["title"].partition(": ")[0]


def _claim(trick: ModuleType) -> str:
    """The claim without its conditions."""
    return re.split("[:;,]", card(trick)["Claim"])[0]


def _page(trick: ModuleType) -> str:
    return (
        f"---\ndescription: >-\n  {card(trick)['title']}\n---\n\n# {_title(trick)}\n\n"
        f'<p class="bar"><a href="../techniques.html">All techniques</a> '
        f'<a href="../../lessons/{trick.TECHNIQUE.lesson}.html">Lesson</a>{_fit(trick)}</p>\n\n{_use(trick)}\n\n'
        f"::: {code_of(trick).__name__}\n{_switch(trick)}"
    )


def _switch(trick: ModuleType) -> str:
    return "" if trick in INFERENCE else f"\n::: {trick.__name__}\n"


def _use(trick: ModuleType) -> str:
    """How to switch a technique on, and what it takes off the course's job."""
    if trick in INFERENCE:
        return f"`{trick.TECHNIQUE.command}` always uses it."
    ways = ", ".join(f"`--set tricks.{switch}`" for switch in trick.TECHNIQUE.switches)
    says = [f"**Switch it on**: {ways}, for example in `cria train` and `cria plan`."]
    found = []
    for switch in trick.TECHNIQUE.switches:
        if saved := round(_saved().get(switch, 0) / 2**20):
            verb = "saves" if saved > 0 else "adds"
            found.append(f"`{switch}` {verb} {abs(saved):,} MiB")
    if found:
        says.append(
            f"**In the course's job** {' and '.join(found)}. This is computed for QLoRA of Llama-3.2-1B on a T4 with "
            "all that saves memory: the peak without the switch, and without what needs it, less the peak with all."
        )
    else:
        says.append("The course's job does not use it. `cria plan RECIPE --gpu t4` computes what it saves in yours.")
    return "\n\n".join(says)


@functools.cache
def _saved() -> dict[str, int]:
    return off_the_capstone()


def _fit(trick: ModuleType) -> str:
    if trick in INFERENCE:
        return ""
    return f' <a href="../../fit.html#{trick.TECHNIQUE.switches[0]}">Will it fit with it?</a>'
