"""Collect results in which one size grows, and compute how fast bytes and seconds grow with it."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from cria_tricks.bench.results import Case
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import find_shape

AXES = {"tokens": "tokens of a row", "rows": "rows of a micro-batch", "model": "weights of the model"}
"""Each size that can grow -> its label in words."""


class Curve(NamedTuple):
    """One line of a figure.

    Attributes:
        label: recipe and place, e.g. ``"smoke, on a T4"``.
        xs: the values of the size that grows.
        ys: bytes or seconds at these values.
    """

    label: str
    xs: Sequence[float]
    ys: Sequence[float]

    @property
    def exponent(self) -> float:
        """The p for which y grows like x to the power p: the slope of the least-squares line through the logarithms."""
        log_xs = [math.log(x) for x in self.xs]
        log_ys = [math.log(y) for y in self.ys]
        return statistics.linear_regression(log_xs, log_ys).slope


def counted(cases: Mapping[str, Mapping[str, int]], what: str) -> list[Curve]:
    """Collect the peaks of the dry runs in which one size grows (bytes).

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
        if what != "model":  # these dry runs are all of one model
            recipe += ", llama-3.2-1b"
        lines.setdefault(f"{recipe}, on a T4", {})[_size(value)] = case["peak_bytes"]
    return _curves(lines)


def measured(cases: Iterable[Case], what: str, measure: Callable[[Case], float | None]) -> list[Curve]:
    """Collect bytes or seconds of the cases in which one size grows, for every device.

    Args:
        cases: cases of any bench; those of ``growth`` are called ``RECIPE-WHAT-VALUE``.
        what: one of :data:`AXES`.
        measure: reads bytes or seconds of a case.
    """
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
            size = shape  # the case's name has no dots, so it may not hold the whole name
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
    """Turn a value into a number; a model's name becomes its number of weights."""
    if value in CONFIGS:
        return float(find_shape(f"random:{value}").weights)
    return float(value)
