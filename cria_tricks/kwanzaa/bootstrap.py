"""Compute confidence intervals of figures over few rows, by scipy's bias-corrected and accelerated (BCa) bootstrap."""

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Statistic = Callable[..., "np.ndarray"]
"""Takes columns, arrays whose last axis is the rows, and returns a figure of each along that axis."""

DRAWS = 10_000
"""The number of bootstrap samples."""
SEED = 0


def mean(values: "np.ndarray", axis: int = -1) -> "np.ndarray":
    """Compute the mean of a column."""
    return values.mean(axis)


def ratio(over: "np.ndarray", under: "np.ndarray", axis: int = -1) -> "np.ndarray":
    """Compute the sum of one column over the sum of another, such as a loss per token over all rows."""
    return over.sum(axis) / under.sum(axis)


def with_interval(statistic: Statistic, columns: Sequence[Sequence[float]]) -> dict[str, float]:
    """Compute a figure and its interval of 95 %.

    The rows are drawn with replacement, again and again. A draw takes the same rows of all columns, so the interval of
    a difference of two systems is that of a paired comparison. With one row, or if no draw changes the figure, the
    interval is the figure itself.

    Args:
        statistic: the figure, such as :func:`mean`.
        columns: its arguments, a number for each row.

    Returns:
        ``value``, ``low`` and ``high``.
    """
    # Imported here: scipy takes a second, and wrong rows should be refused before that.
    import numpy as np
    from scipy import stats

    arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    value = float(statistic(*arrays))
    if len(arrays[0]) < 2:
        return {"value": value, "low": value, "high": value}
    with warnings.catch_warnings(action="ignore"):  # it warns of what is looked at below
        drawn = stats.bootstrap(arrays, statistic, paired=True, vectorized=True, n_resamples=DRAWS, rng=SEED)  # BCa
    low, high = drawn.confidence_interval
    if not np.isfinite([low, high]).all():  # no draw changes the figure, or the rows are too few for the correction
        low, high = np.percentile(drawn.bootstrap_distribution, [2.5, 97.5])
    return {"value": value, "low": float(low), "high": float(high)}
