"""Sweeps: tests of one thing over many cases. CI takes a seeded sample of the cases, ``CRIA_ALL=1`` takes all."""

import os
import random
from collections.abc import Iterable
from typing import TypeVar

from cria_tricks.switches import NEEDS

Case = TypeVar("Case")
ALL = bool(os.environ.get("CRIA_ALL"))


def toggle(switch: str) -> list[str]:
    """Return the settings of a trick's switch, with what it needs of other groups than the switches."""
    return [f"tricks.{switch}", *(need for need in NEEDS.get(switch, "").split() if "." in need)]


def sample(cases: Iterable[Case], many: int, seed: int = 30) -> list[Case]:
    """Return so many of the cases in their own order, or all of them.

    Args:
        cases: all cases of a sweep.
        many: how many of them CI takes.
        seed: of the draw.
    """
    known = list(cases)
    if ALL or many >= len(known):
        return known
    return [known[place] for place in sorted(random.Random(seed).sample(range(len(known)), many))]
