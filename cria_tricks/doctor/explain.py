"""Collect what the modules of the techniques say, for ``cria explain``, ``cria tricks`` and the page of techniques."""

import functools
import inspect
import re
import textwrap
from dataclasses import dataclass
from types import ModuleType

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.common.names import hint, nearest, plain
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import BESIDE, STRATEGIES
from cria_tricks.predict import toggles
from cria_tricks.tricks import CARD, INFERENCE, TRICKS, card, trick_name

COLUMNS = ("set", "saves", "costs", "claim", "bound", "lesson")
"""The columns of both tables, in order."""


@dataclass(frozen=True)
class Explained:
    """The description of one technique.

    Attributes:
        name: the name of its module.
        title: the first line of its module's docstring.
        card: the eight lines of the table in that docstring: ``Saves``, ``Costs``, ``Claim`` and so on.
        group: the folder of its module, which is also the part of a recipe that switches it on.
        settings: those that switch it on, e.g. ``("quantization=nf4", ...)``.
        command: the command that uses a technique without settings.
        reference: the source code of the from-scratch reference, as far as it matters.
        plain: the plain Hugging Face code that the setting stands for.
        lesson: the lesson that teaches it.
    """

    name: str
    title: str
    card: dict[str, str]
    group: str
    settings: tuple[str, ...]
    command: str
    reference: str
    plain: str
    lesson: str

    @property
    def bound(self) -> str:
        """How exact the technique is: its claim after the colon, or a default where the claim has no colon."""
        claim = self.card["Claim"].partition(":")[2].strip()
        return claim or "sums in another order round otherwise"


def explain(name: str) -> Explained:
    """Look up a technique by the name of its module or of one of its settings, in any letter case.

    Raises:
        BadInput: for an unknown name; the message suggests the nearest known one.
    """
    known: dict[str, ModuleType] = {trick_name(trick): trick for trick in _all()}
    # "peft=lora" finds lora. "quantization" alone finds nothing, because it could mean int8 or nf4.
    for trick in TRICKS:
        known |= {switch.removesuffix("=true"): trick for switch in trick.SWITCHES if switch not in known}
    wanted = plain(name).removeprefix("tricks.").removeprefix("parallel.strategy=").removesuffix("=true")
    wanted = re.sub(r"=\d+$", "", wanted)  # a number of blocks or of micro-batches
    if wanted not in known:
        there_are = f"there are {', '.join(map(trick_name, _all()))}"
        raise BadInput(f"unknown trick {name}: {hint(nearest(wanted, known), there_are)}")
    return _explained(known[wanted])


def _all() -> tuple[ModuleType, ...]:
    return (*TRICKS, *INFERENCE, *STRATEGIES.values(), *BESIDE)


def _explained(trick: ModuleType) -> Explained:
    fields = card(trick)
    # REFERENCE holds names inside the module, such as "pack" or "Quantized.forward".
    parts = [functools.reduce(getattr, place.split("."), trick) for place in trick.REFERENCE]
    return Explained(
        name=trick_name(trick),
        title=fields["title"],
        card={line: fields[line] for line in CARD},
        group=trick.__name__.split(".")[-2],
        settings=getattr(trick, "SWITCHES", ()),
        command=getattr(trick, "COMMAND", ""),
        reference="\n\n\n".join(textwrap.dedent(inspect.getsource(part)).rstrip() for part in parts),
        plain=trick.PLAIN.strip(),
        lesson=trick.LESSON,
    )


def table(group: str = "tricks") -> list[dict[str, str]]:
    """Return one line of the table for each technique: a dictionary with :data:`COLUMNS` and its ``name``.

    Args:
        group: ``tricks``, or ``parallel`` for the strategies of several processes.
    """
    techniques: tuple[ModuleType, ...] = (*TRICKS, *INFERENCE)
    if group == "parallel":
        techniques = (*STRATEGIES.values(), *BESIDE)
    return [_row(trick) for trick in techniques]


def _row(trick: ModuleType) -> dict[str, str]:
    about = _explained(trick)
    return {
        "name": about.name,
        "set": ", ".join(about.settings) or about.command,
        "saves": re.sub(r"\s*\[[a-zA-Z, ]+\]$", "", about.card["Saves"]),  # without the unit at its end
        "costs": about.card["Costs"],
        "claim": trick.CLAIM,
        "bound": about.bound,
        "lesson": about.lesson,
    }


def off_the_capstone() -> dict[str, int]:
    """Return how much each switch of the capstone, the course's run on a T4, takes off its peak [bytes].

    Each is switched off alone, together with the switches that need it; a switch that adds bytes has a negative number.

    Returns:
        Setting, e.g. ``"quantization=nf4"``, -> bytes. Settings that the capstone does not use are left out.
    """
    capstone = recipes.capstone(T4)
    target = toggles.Target(find_shape(capstone.model), T4)
    return {change.set: change.saved_bytes for change in toggles.removed(target, capstone)}
