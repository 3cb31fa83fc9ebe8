"""Say what would fit where no set of switches does: LoRA, 4-bit weights, weights on the host, or shorter rows."""

from collections.abc import Iterable, Iterator
from typing import Any

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import trust
from cria_tricks.predict import toggles
from cria_tricks.predict.host import host_bill
from cria_tricks.run.candidates import NothingFits, differences
from tools.fit.answers import Asked, Choice, asked
from tools.fit.fields import OF_SETTING, SWITCHES, of_recipe
from tools.fit.show import amount

SHORTEST = 64
"""Shorter rows than this are not offered [tokens]."""

Changes = dict[str, str]


def nothing_fits(choice: Choice, of: Asked, error: NothingFits) -> dict[str, Any]:
    """Answer a search that found nothing.

    Returns:
        ``refused``: the reason; ``ways``: what would fit, each with ``says``, the ``button`` that takes it, and
        ``changes``, the fields that it changes.
    """
    small = changes_of(differences(of.recipe, error.smallest))
    found = [*_weights(choice, of, small), *_rows(choice, of, error, small)]
    kind = " that trains all weights" if choice["peft"] == "none" else ""
    says = (
        f"No set of switches{kind} fits {of.target.device.name}: the smallest needs {amount(error.needed)} of "
        f"{amount(of.target.device.memory_bytes)}, and {100 * trust.MARGIN:.0f} % should stay free."
    )
    if not found:
        says += " A smaller model or a larger card would help."
    return {"refused": says, "says": says, "at": [], "ways": found}


def changes_of(settings: Iterable[str]) -> Changes:
    """Translate settings, as ``--set`` takes them, to fields."""
    pairs = dict(setting.split("=", 1) for setting in settings)
    return {OF_SETTING[name]: value for name, value in pairs.items()}


def _weights(choice: Choice, of: Asked, small: Changes) -> Iterator[dict[str, Any]]:
    """Yield the first way to store the weights in less memory with which the choice fits."""
    base: Changes = {}
    if choice["peft"] == "none":
        capstone = of_recipe(recipes.capstone(of.target.device))
        base = {name: capstone[name] for name in SWITCHES}
        # Some models' heads do more than a product, so they cannot have a chunked loss.
        ways = [base, {**base, "chunked_loss": "false"}]
        says, button = "LoRA adapters on frozen 4-bit weights would fit", "Train LoRA adapters"
    else:
        ways = [{"quantization": "nf4", "double_quantization": "true"}]
        ways.append(small | ways[0])
        says, button = "With the weights in 4 bits (NF4) it would fit", "Store the weights in 4 bits"
    for changes in ways:
        if changes.get("quantization") == choice["quantization"]:
            continue
        if found := _tried(choice, changes):
            yield {"says": f"{says}: {amount(found[0])}.", "button": button, "changes": changes}
            return
    yield from _streamed(choice, base, small)


def _streamed(choice: Choice, base: Changes, small: Changes) -> Iterator[dict[str, Any]]:
    """Yield the way to leave the weights on the host, or in a file where the host is too small for them."""
    places = {"true": ("on the host", "Keep the weights on the host"), "file": ("in a file", "Read them from a file")}
    for value, (place, button) in places.items():
        for changes in (base, {**small, **base}):
            changes = {**changes, "stream_layers": value}
            found = _tried(choice, changes)
            if not found:
                continue
            needed, ram = found
            says = f"With the weights {place}, streamed, it would fit: {amount(needed)}, and the computer needs "
            yield {"says": f"{says}{amount(ram)} of RAM.", "button": button, "changes": changes}
            return


def _rows(choice: Choice, of: Asked, error: NothingFits, small: Changes) -> Iterator[dict[str, Any]]:
    """Yield the longest rows that fit with the smallest set; without offloading where the host has no room for it."""
    on_card = toggles.with_toggles(error.smallest, {"activation_offload": False})
    for recipe, more in ((error.smallest, {}), (on_card, {"activation_offload": "false"})):
        longest = toggles.longest(of.target, recipe)
        changes = {**small, **more, "tokens": str(longest), "mean": ""}
        if longest >= SHORTEST and _tried(choice, changes):
            says = f"Rows of at most {longest:,} tokens would fit."
            yield {"says": says, "button": f"Set the length to {longest:,}", "changes": changes}
            return


def _tried(choice: Choice, changes: Changes) -> tuple[int, int] | None:
    """Return what a changed choice needs on the card and on the host [bytes]; ``None`` if one of them is too small."""
    try:
        of = asked({**choice, **changes})
        of.target.resolve(of.recipe)
    except BadInput:
        return None
    memory = of.target.memory(of.recipe)
    host = host_bill(of.target, of.recipe, of.gpu.host, of.rows)
    if memory.verdict != "fits" or (host and host.verdict == "does not fit"):
        return None
    return memory.needed_bytes, host.peak.bytes if host else 0
