"""How bytes and seconds grow with one thing at a time: lines through results, and their exponents."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from cria_tricks.bench.results import Case
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import find_shape

AXES = {"tokens": "tokens of a row", "rows": "rows of a micro-batch", "model": "weights of the model"}
"""What grows, and in which unit."""


class Curve(NamedTuple):
    """One line."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]

    @property
    def exponent(self) -> float:
        """The slope in logarithms, by least squares: y grows like x to this power."""
        return statistics.linear_regression([math.log(x) for x in self.xs], [math.log(y) for y in self.ys]).slope


def counted(cases: Mapping[str, Mapping[str, int]], what: str) -> list[Curve]:
    """Peak bytes of the dry runs in which one thing grows.

    Args:
        cases: ``"RECIPE WHAT=VALUE"`` -> what ``benchmarks/by_dry_run.py`` counted.
        what: of :data:`AXES`.
    """
    lines: dict[str, dict[float, float]] = {}
    for label, case in cases.items():
        recipe, _, change = label.partition(" ")
        kind, _, value = change.partition("=")
        if kind == what:
            model = "" if what == "model" else ", llama-3.2-1b"
            lines.setdefault(f"{recipe}{model}, on a T4", {})[_size(value)] = case["peak_bytes"]
    return _curves(lines)


def measured(cases: Iterable[Case], what: str, measure: Callable[[Case], float | None]) -> list[Curve]:
    """Bytes or seconds of the steps in which one thing grows, of every device."""
    lines: dict[str, dict[float, float]] = {}
    for case in cases:
        if case.bench != "growth" or case.status != "ok" or measure(case) is None:
            continue
        recipe, kind, value = case.name.split("-", 2)
        shape = case.model.removeprefix("random:")
        if kind == what:
            model = "" if what == "model" else f", {shape}"
            size = _size(shape if what == "model" else value)
            lines.setdefault(f"{recipe}{model}, {case.device}", {})[size] = float(measure(case) or 0)
    return _curves(lines)


def _curves(lines: Mapping[str, Mapping[float, float]]) -> list[Curve]:
    return [Curve(label, sorted(line), [line[x] for x in sorted(line)]) for label, line in lines.items()]


def _size(value: str) -> float:
    """A number, or the weights of a model."""
    return float(find_shape(f"random:{value}").weights) if value in CONFIGS else float(value)
