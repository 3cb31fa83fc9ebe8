"""Compute confidence intervals of means over few rows, by a seeded bootstrap."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DRAWS = 10_000
"""The number of bootstrap samples."""
SEED = 0


def resampled_means(columns: Sequence[Sequence[float]], draws: int = DRAWS, seed: int = SEED) -> "torch.Tensor":
    """Compute each column's mean over many bootstrap samples of the rows, drawn with replacement.

    All columns use the same samples. So two columns of the result can be subtracted for a paired comparison: the
    difference of each sample comes from the same rows.

    Args:
        columns: K lists of R numbers, one number for each row.
        draws: how many samples of R rows are drawn.
        seed: seeds the draws.

    Returns:
        The means, shape (draws, K), float64.
    """
    import torch  # here, because importing it takes seconds, and wrong rows should be refused before that

    values_RK = torch.tensor(columns, dtype=torch.float64).T
    rows = values_RK.shape[0]
    generator = torch.Generator().manual_seed(seed)
    means = []
    for _ in range(draws):
        sample = torch.randint(rows, (rows,), generator=generator)
        times_drawn = torch.bincount(sample, minlength=rows).double()
        means.append(times_drawn @ values_RK / rows)
    return torch.stack(means)


def interval(samples: "torch.Tensor") -> tuple[float, float]:
    """Return the percentile interval: the limits of the middle 95 % of the samples.

    With few rows this interval is somewhat too narrow.

    Args:
        samples: one number for each bootstrap sample, shape (draws,).
    """
    # Imported here, as above.
    import torch

    low, high = torch.quantile(samples, torch.tensor([0.025, 0.975], dtype=samples.dtype)).tolist()
    return low, high
