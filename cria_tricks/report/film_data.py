"""Write a film as JSON data: a few hundred moments with exact bytes, and the largest tensors at each of them.

The picture, the page and the site draw this data.
"""

import itertools
import re
from collections import Counter, defaultdict
from typing import Any, NamedTuple

from cria_tricks.predict.film import LINES, Film

STRIPS = 120
"""The width of a film is cut into so many strips. The lowest and the highest moment of each are kept."""
LARGEST = 8
"""So many entries name the largest tensors of a moment."""
BLOCK = r"(?<=\.)\d+(?=\.|$)"
"""The number of a block in the name of a module."""
WIDE = 10_000
"""The largest place on the axis."""


class Family(NamedTuple):
    """What equal tensors of several blocks share; in ``module`` a star stands for the number of the block."""

    line: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    how: str


def as_data(film: Film, about: dict[str, Any]) -> dict[str, Any]:
    """Return the data of a film.

    Args:
        film: the film.
        about: what is filmed: ``title``, ``model``, ``card``, its ``capacity`` [bytes], ``rows`` and ``tokens``.

    Returns:
        JSON data with these fields besides ``about``'s:

        - ``peak``: the number of the kept moment with the most bytes.
        - ``parts``: name, the first kept moment and the last one, and the one of the part's peak.
        - ``x``: the place of each kept moment on the axis, from 0 to 10,000.
        - ``lines``: the bytes of each line of the bill at each kept moment.
        - ``reserved``: what the allocator has reserved at each of them; ``null`` on a CPU.
        - ``tensors``: families of equal tensors: line, bytes, shape, dtype, module, operation.
        - ``largest``: at each kept moment the largest families: number in ``tensors``, and how many tensors.
    """
    places = _kept(film)
    kept = list(places)
    lines = film.bytes()
    number = {moment: place for place, moment in enumerate(kept)}
    parts = []
    for (name, first, end), (peak, _) in zip(film.parts, film.peaks().values(), strict=True):
        parts.append([name, number[first - 1], number[end - 1], number[peak]])
    totals = film.totals()
    numbers: dict[Family, int] = {}  # in the order in which they come
    named = []
    for moment in kept:
        entries = [[numbers.setdefault(family, len(numbers)), count] for family, count in largest(film, moment)]
        named.append(entries)
    return {
        **about,
        "peak": number[max(kept, key=totals.__getitem__)],
        "parts": parts,
        "x": list(places.values()),
        "lines": {line: [lines[line][moment] for moment in kept] for line in LINES},
        "reserved": [film.reserved[moment] for moment in kept] if film.reserved else None,
        "tensors": [list(family) for family in numbers],
        "largest": named,
    }


def largest(film: Film, moment: int) -> list[tuple[Family, int]]:
    """Return the largest families of tensors at a moment, and how many tensors each has.

    A single tensor keeps the number of its block.
    """
    counts: Counter[Family] = Counter()
    modules: dict[Family, str] = {}
    for shot in film.alive(moment):
        module = re.sub(BLOCK, "*", shot.module, count=1)
        family = Family(shot.line, shot.bytes, shot.shape, shot.dtype, module, shot.how)
        counts[family] += 1
        modules[family] = shot.module
    most = sorted(counts.items(), key=lambda one: -one[0].bytes * one[1])[:LARGEST]
    return [(family._replace(module=modules[family]) if count == 1 else family, count) for family, count in most]


def _kept(film: Film) -> dict[int, int]:
    """Choose the moments to keep, and their places on the axis.

    Each allocation and each release takes some width, and more if it is large: half of the width is shared out equally,
    and half by bytes. Otherwise the logits, which are the peak of many steps, would be a line that nobody sees.
    """
    totals = film.totals()
    moved = [abs(after - before) for before, after in itertools.pairwise(totals)]
    widths = [WIDE * (0.5 / len(moved) + 0.5 * size / sum(moved)) for size in moved]
    places = [round(place) for place in itertools.accumulate(widths, initial=0.0)]
    strips: dict[int, list[int]] = defaultdict(list)
    for moment, place in enumerate(places):
        strips[place * STRIPS // WIDE].append(moment)
    kept = {0, *(part.end - 1 for part in film.parts), *(peak for peak, _ in film.peaks().values())}
    for moments in strips.values():
        kept |= {min(moments, key=totals.__getitem__), max(moments, key=totals.__getitem__)}
    return {moment: places[moment] for moment in sorted(kept)}
