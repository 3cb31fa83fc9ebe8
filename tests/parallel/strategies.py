"""What the proofs of the strategies share."""

import functools

import numpy as np

from cria_tricks.bill.calls import totals
from cria_tricks.course.processes import Ranks
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import STRATEGIES
from tests.parallel import steps

SHAPE = find_shape("random:tiny")


@functools.cache
def alone(*settings: str) -> dict:
    """The same step in one process."""
    return steps.step(steps.recipe_of(*settings))


def spread(ranks: Ranks, strategy: str, *settings: str) -> list[dict]:
    """A step in several; what each process reports."""
    return ranks.run(steps.step, steps.recipe_of(*settings, f"parallel.strategy={strategy}"))


def worst(found: dict, wanted: dict) -> float:
    """The largest error of a gradient, in parts of the largest element of its tensor."""
    assert found.keys() == wanted.keys()
    return max(float(np.abs(found[name] - g).max() / np.abs(g).max()) for name, g in wanted.items())


def formula(strategy: str, processes: int, *settings: str) -> dict[str, int]:
    """Bytes of a step, by kind of collective."""
    return totals(STRATEGIES[strategy].traffic(steps.recipe_of(*settings), SHAPE, processes))
