"""Write a film as compact data: a few hundred moments with exact bytes, and the tensors that are large at any of them.

The picture, the animation and the site draw this data.
"""

import bisect
import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from cria_tricks.predict.film import LINES, Film, Shot

WIDTHS = {
    "forward pass": 0.38,
    "backward pass": 0.52,
    "forward and backward pass": 0.9,
    "optimizer step": 0.1,
}
"""The share of the width that a part takes. It is fixed, so that the parts of two films lie above each other. Within a
part each allocation and each release takes some room, and more if it is large: half of the width is shared out equally,
and half by bytes. Else the logits, which are the peak of many steps, would be a line that nobody sees."""
STRIPS = 250
"""A film is cut into so many strips. The lowest and the highest moment of each are kept."""
LARGEST = 8
"""So many tensors can be named at every kept moment."""
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
        about: what is filmed: ``model``, ``card``, ``rows``, ``tokens`` and so on; it becomes part of the data.

    Returns:
        JSON data with these fields besides ``about``'s:

        - ``capacity`` [bytes], ``fits``, and ``peak``, the number of the kept moment with the most bytes.
        - ``parts``: name, the first kept moment and the last one, and the one of the part's peak.
        - ``x``: the place of each kept moment on the axis, from 0 to 10,000, packed as :func:`packed` says.
        - ``lines``: the bytes of each line of the bill at each kept moment, packed. A line without any is ``0``.
        - ``reserved``: what the allocator has reserved at each of them, packed; ``null`` on a CPU.
        - ``tensors``: families of equal tensors: line (its number), bytes, shape, dtype, module, operation, then runs.

        A run is of blocks that follow each other and live equally long: the first block, the last one (-1: none), and
        birth and death as numbers of kept moments.
    """
    kept, x = _kept(film)
    lines = film.bytes()
    totals = [sum(lines[line][moment] for line in LINES) for moment in kept]
    place = {moment: number for number, moment in enumerate(kept)}
    parts = []
    for (name, first, end), (peak, _) in zip(film.parts, film.peaks().values(), strict=True):
        parts.append([name, place[max(first - 1, 0)], place[end - 1], place[peak]])
    reserved = packed([film.reserved[moment] for moment in kept]) if film.reserved else None
    return {
        **about,
        "capacity": film.capacity,
        "fits": film.fits,
        "peak": max(range(len(kept)), key=totals.__getitem__),
        "parts": parts,
        "x": packed(x),
        "lines": {line: packed([lines[line][moment] for moment in kept]) for line in LINES},
        "reserved": reserved,
        "tensors": _tensors(film.shots, kept),
    }


def packed(values: Sequence[int]) -> Any:
    """Write whole numbers shortly: a unit, and the changes in this unit, where ``[n]`` stands for n times no change.

    The first change is from 0. All zeros are ``0``.
    """
    changes = [after - before for before, after in itertools.pairwise([0, *values])]
    unit = math.gcd(*changes)
    if not unit:
        return 0
    found: list[Any] = [unit]
    for same, group in itertools.groupby(changes, key=lambda change: change == 0):
        run = list(group)
        if same and len(run) > 1:
            found.append([len(run)])
        else:
            found.extend(change // unit for change in run)
    return found


def unpacked(data: Any, count: int) -> list[int]:
    """Read what :func:`packed` has written, ``count`` numbers."""
    if data == 0:
        return [0] * count
    unit, *changes = data
    found: list[int] = []
    now = 0
    for change in changes:
        if isinstance(change, list):
            found.extend([now] * change[0])
        else:
            now += unit * change
            found.append(now)
    return found


def as_text(data: dict[str, Any]) -> str:
    """Write the data as JSON without spaces."""
    return json.dumps(data, separators=(",", ":"))


def _kept(film: Film) -> tuple[list[int], list[int]]:
    """Choose the moments to keep, and their places on the axis."""
    totals = film.totals()
    peaks = film.peaks()
    places: dict[int, int] = {0: 0}
    left = 0.0
    for name, first, end in film.parts:
        width = WIDTHS[name]
        strips: dict[int, list[int]] = defaultdict(list)
        at: dict[int, float] = {first - 1: left}
        for moment, share in zip(range(first, end), _shares(totals[first - 1 : end]), strict=True):
            at[moment] = left + width * share
            strips[int(STRIPS * at[moment])].append(moment)
        wanted = {first, end - 1, peaks[name][0]}
        for moments in strips.values():
            wanted |= {min(moments, key=totals.__getitem__), max(moments, key=totals.__getitem__)}
        for moment in wanted:
            places.setdefault(moment, round(WIDE * at[moment]))
        left += width
    kept = sorted(places)
    return kept, [places[moment] for moment in kept]


def _shares(totals: Sequence[int]) -> list[float]:
    """Return where each moment of a part lies, from 0 to 1; ``totals`` begins with the moment before the part."""
    moved = [abs(after - before) for before, after in itertools.pairwise(totals)]
    all_moved = sum(moved) or 1
    return list(itertools.accumulate(0.5 / len(moved) + 0.5 * size / all_moved for size in moved))


def _tensors(shots: Iterable[Shot], kept: Sequence[int]) -> list[list[Any]]:
    """Return the families that are among the largest at any kept moment, the largest tensors first."""

    def number(moment: int) -> int:  # of the first kept moment that is not before it
        return bisect.bisect_left(kept, moment)

    families: dict[Family, list[tuple[int, int, int]]] = defaultdict(list)
    for shot in shots:
        birth, death = number(shot.birth), number(shot.death)
        if birth < death:
            block = re.search(BLOCK, shot.module)
            module = re.sub(BLOCK, "*", shot.module, count=1)
            family = Family(shot.line, shot.bytes, shot.shape, shot.dtype, module, shot.how)
            families[family].append((int(block[0]) if block else -1, birth, death))
    ordered = sorted(families, key=lambda family: (-family.bytes, LINES.index(family.line), family))
    chosen = _large(ordered, families, len(kept))
    found = []
    for family in ordered:
        if family in chosen:
            found.append([LINES.index(family.line), *family[1:], *_runs(families[family])])
    return found


def _large(ordered: Sequence[Family], families: dict[Family, list[tuple[int, int, int]]], count: int) -> set[Family]:
    """Choose the families of the largest tensors, and those that are largest together, at each kept moment."""
    alive: list[list[tuple[int, Family]]] = [[] for _ in range(count)]  # of each moment, the largest tensors first
    for family in ordered:
        changes = [0] * (count + 1)
        for _, birth, death in families[family]:
            changes[birth] += 1
            changes[death] -= 1
        for moment, number in enumerate(itertools.accumulate(changes[:-1])):
            if number:
                alive[moment].append((number, family))
    chosen: set[Family] = set()
    for there in alive:
        named = 0
        for number, family in there:
            if named < LARGEST:
                chosen.add(family)
            named += number
        together = sorted(there, key=lambda one: -one[0] * one[1].bytes)
        chosen |= {family for _, family in together[:LARGEST]}
    return chosen


def _runs(members: Iterable[tuple[int, int, int]]) -> list[list[int]]:
    """Join blocks that follow each other and live at the same time: first block, last block, birth, death."""
    found: list[list[int]] = []
    for block, birth, death in sorted(members, key=lambda member: (member[1], member[2], member[0])):
        last = found[-1] if found else []
        if block >= 0 and last and last[1:] == [block - 1, birth, death]:
            last[1] = block
        else:
            found.append([block, block, birth, death])
    return found


def alive(data: dict[str, Any], moment: int) -> list[tuple[list[Any], int]]:
    """Return the families of tensors at a kept moment, and how many of each; those that take most together first."""
    found = []
    for family in data["tensors"]:
        runs = [run for run in family[6:] if run[2] <= moment < run[3]]
        if runs:
            found.append((family, sum(last - first + 1 for first, last, _, _ in runs)))
    return sorted(found, key=lambda one: -one[0][1] * one[1])
