"""Say in the words of the page what would fit where no set of switches does."""

from collections.abc import Iterable
from typing import Any

from cria_tricks.hardware import trust
from cria_tricks.run.search import NothingFits, Way
from tools.fit.answers import Asked, Choice
from tools.fit.fields import OF_SETTING
from tools.fit.show import amount

SAYS = {
    "adapter": ("LoRA adapters on frozen 4-bit weights would fit: {needed}.", "Train LoRA adapters"),
    "weights": ("With the weights in 4 bits (NF4) it would fit: {needed}.", "Store the weights in 4 bits"),
    "host": (
        "With the weights on the host, streamed, it would fit: {needed}, and the computer needs {ram} of RAM.",
        "Keep the weights on the host",
    ),
    "file": (
        "With the weights in a file, streamed, it would fit: {needed}, and the computer needs {ram} of RAM.",
        "Read them from a file",
    ),
    "rows": ("Rows of at most {tokens:,} tokens would fit.", "Set the length to {tokens:,}"),
}
"""What is said of each kind of way, and the button that takes it."""


def nothing_fits(choice: Choice, of: Asked, error: NothingFits) -> dict[str, Any]:
    """Answer a search that found nothing.

    Returns:
        ``refused``: the reason; ``ways``: what would fit, each with ``says``, the ``button`` that takes it, and
        ``changes``, the fields that it changes.
    """
    found = [_in_words(way) for way in error.ways]
    kind = " that trains all weights" if choice["peft"] == "none" else ""
    says = (
        f"No set of switches{kind} fits {of.target.device.name}: the smallest needs {amount(error.needed)} of "
        f"{amount(of.target.device.memory_bytes)}, and {100 * trust.MARGIN:.0f} % should stay free."
    )
    if not found:
        says += " A smaller model or a larger card would help."
    return {"refused": says, "says": says, "at": [], "ways": found}


def changes_of(settings: Iterable[str]) -> dict[str, str]:
    """Translate settings, as ``--set`` takes them, to fields; the page has no field for the learning rate."""
    pairs = dict(setting.split("=", 1) for setting in settings)
    return {OF_SETTING[name]: value for name, value in pairs.items() if name in OF_SETTING}


def _in_words(way: Way) -> dict[str, Any]:
    recipe = way.setting.recipe
    about = {"needed": amount(way.setting.memory.needed_bytes), "ram": amount(way.host_bytes)}
    says, button = (text.format(**about, tokens=recipe.data.max_length) for text in SAYS[way.kind])
    changes = changes_of(way.setting.set)
    if way.kind == "rows":
        changes["mean"] = ""
    return {"says": says, "button": button, "changes": changes}
