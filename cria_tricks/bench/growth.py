"""Lay lines through results in which one thing grows, and find how bytes and seconds grow with it."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from cria_tricks.bench.results import Case
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import find_shape

AXES = {"tokens": "tokens of a row", "rows": "rows of a micro-batch", "model": "weights of the model"}
"""What grows, and its label in words."""


class Curve(NamedTuple):
    """One line of a figure.

    Attributes:
        label: recipe and place, e.g. ``"smoke, on a T4"``.
        xs: sizes of what grows.
        ys: bytes or seconds at these sizes.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]

    @property
    def exponent(self) -> float:
        """The slope in logarithms, by least squares: y grows like x to this power."""
        log_xs = [math.log(x) for x in self.xs]
        log_ys = [math.log(y) for y in self.ys]
        return statistics.linear_regression(log_xs, log_ys).slope


def counted(cases: Mapping[str, Mapping[str, int]], what: str) -> list[Curve]:
    """Collect the peak bytes of the dry runs in which one thing grows.

    Args:
        cases: ``"RECIPE WHAT=VALUE"`` -> what ``benchmarks/by_dry_run.py`` counted.
        what: one of :data:`AXES`.
    """
    lines: dict[str, dict[float, float]] = {}
    for label, case in cases.items():
        recipe, _, change = label.partition(" ")
        kind, _, value = change.partition("=")
        if kind != what:
            continue
        if what != "model":
            recipe += ", llama-3.2-1b"
        lines.setdefault(f"{recipe}, on a T4", {})[_size(value)] = case["peak_bytes"]
    return _curves(lines)


def measured(cases: Iterable[Case], what: str, measure: Callable[[Case], float | None]) -> list[Curve]:
    """Collect bytes or seconds of the steps in which one thing grows, of every device."""
    lines: dict[str, dict[float, float]] = {}
    for case in cases:
        found = measure(case)
        if case.bench != "growth" or case.status != "ok" or found is None:
            continue
        recipe, kind, size = case.name.split("-", 2)
        if kind != what:
            continue
        shape = case.model.removeprefix("random:")
        if what == "model":
            size = shape  # a case's name may shorten it
        else:
            recipe += f", {shape}"
        lines.setdefault(f"{recipe}, {case.device}", {})[_size(size)] = float(found)
    return _curves(lines)


def _curves(lines: Mapping[str, Mapping[float, float]]) -> list[Curve]:
    curves = []
    for label, line in lines.items():
        xs = sorted(line)
        curves.append(Curve(label, xs, [line[x] for x in xs]))
    return curves


def _size(value: str) -> float:
    """Read a number; of a model's name take the number of its weights."""
    if value in CONFIGS:
        return float(find_shape(f"random:{value}").weights)
    return float(value)
