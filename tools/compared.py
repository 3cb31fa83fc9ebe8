"""What the figures and the tables of results share: pairs of cases, and curves along which one size grows."""

import math
import operator
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cria_tricks.bench.results import Case, by_device
from cria_tricks.bench.tables import Measure, against
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import find_shape

STEP: Measure = operator.attrgetter("median_seconds")
"""Read a case's median time for a step (seconds)."""
APART = ("together", "growth", "interactions", "peers")
"""Benchmarks that have their own figures or tables."""
AXES = {"tokens": "tokens of a row", "rows": "rows of a micro-batch", "model": "weights of the model"}
"""Each size that can grow -> its label in words."""


class Pair(NamedTuple):
    """The same optimizer step without a switch and with it.

    Attributes:
        label: the switch.
        series: the group of points that share a colour: the device, or the way of comparing.
        off: the step without the switch.
        on: the step with the switch.
    """

    label: str
    series: str
    off: Case
    on: Case


def pairs(cases: Iterable[Case]) -> list[Pair]:
    """Pair every trick's cases with their baselines on the same device."""
    found = []
    for case, other in against(case for case in cases if case.bench not in APART):
        label = case.bench
        if case.name != "on":  # "on" would add nothing to the name of the bench
            label += f": {case.name}"
        found.append(Pair(label, case.device, other, case))
    return found


def capstone_pairs(cases: Iterable[Case]) -> list[Pair]:
    """Pair each switch of the capstone twice: with only the switches that it needs, and with all the others."""
    found = [case for case in cases if case.bench == "together"]
    several = len(by_device(found)) > 1
    made = []
    for case, other in against(found):
        kind, _, field = case.name.partition("_")
        where = f", {case.device}" if several else ""
        if kind == "alone":
            made.append(Pair(field, f"alone{where}", other, case))
        elif kind == "removed":  # here the case is the step without the switch
            made.append(Pair(field, f"beside all others{where}", case, other))
    return made


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


def measured(cases: Iterable[Case], what: str, measure: Measure) -> list[Curve]:
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
