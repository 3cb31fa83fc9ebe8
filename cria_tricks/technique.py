"""Define what a technique declares of itself: what it is switched on by, what it needs, and how a search may use it.

Each module of ``switches/`` holds one :class:`Technique`, and so does each strategy, and what always runs in answers.
What the rest of the package knows of a technique follows from it: the order and the values that ``cria plan`` tries,
what ``cria doctor`` tries it over, the advice after an out-of-memory error, the fields of the page "Will it fit?".
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cria_tricks.hardware.device import Device
from cria_tricks.recipe import Recipe

ON_OFF = (False, True)
Values = Callable[[Recipe, Device, int], tuple[Any, ...]]
"""A function from a recipe, a device and the model's width to the values of a field that ``cria plan`` tries."""


@dataclass(frozen=True)
class Field:
    """A field of ``recipe.tricks``, for searches and for the page "Will it fit?".

    Attributes:
        group: the heading above it in the page; empty if the page has a field of its own for it.
        label: its label there, in the words that people search for.
        number: what a number in place of true stands for, in words; empty if none may stand there.
        values: the values that ``cria plan`` tries, or a function that returns them; empty if it tries none.
        search: how ``--fit`` may use it. ``exact`` fields change no result beyond rounding, ``long`` ones neither, but
            are tried for long rows only, and ``free`` ones cost nothing, so they are on wherever they have an effect.
            A field that ``may change`` numbers, or how many documents a step sees, is tried only when asked for. Empty:
            never. All are tried on and off, but those that ``may change`` and have ``values``.
        helps: whether it could help a recipe that ran out of memory; it is advised then.
    """

    group: Literal["Your run", "LoRA", "Memory", "Speed", ""] = ""
    label: str = ""
    number: str = ""
    values: tuple[Any, ...] | Values = ()
    search: Literal["exact", "long", "free", "may change", ""] = ""
    helps: Callable[[Recipe], bool] = lambda recipe: True


@dataclass(frozen=True)
class Technique:
    """What a technique declares.

    Attributes:
        claim: how exact it is, as the card says it first.
        lesson: the file name of its lesson.
        switches: the settings that it answers to, such as ``quantization=nf4``, without the group of the recipe.
        command: for a technique without a switch, the command that always uses it.
        fields: the fields that it declares; one that several techniques share is declared by the first in the lessons.
        needs: switch -> settings over which it acts: those that have to be on with it, at the values with which it is
            tried first. Where one of these fields is off, it is refused or has nothing to act on. ``{half}`` stands for
            the 16-bit format of the device.
    """

    claim: str
    lesson: str
    switches: tuple[str, ...] = ()
    command: str = ""
    fields: Mapping[str, Field] = field(default_factory=dict)
    needs: Mapping[str, str] = field(default_factory=dict)
