"""How far a mean over few rows could have come out otherwise: the bootstrap, seeded."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DRAWS = 10_000
SEED = 0


def resampled_means(columns: Sequence[Sequence[float]], draws: int = DRAWS, seed: int = SEED) -> "torch.Tensor":
    """Draw as many rows as there are, with replacement, again and again, and take each column's mean every time.

    All columns meet the same draws. So the difference of two columns of the result is that of a paired comparison.

    Args:
        columns: K lists of R numbers, one for each row.
        draws: how often.
        seed: of the draws.

    Returns:
        Shape (draws, K), float64.
    """
    # It takes seconds to import, and what is wrong with the rows is told before.
    import torch

    values_RK = torch.tensor(columns, dtype=torch.float64).T
    rows = values_RK.shape[0]
    generator = torch.Generator().manual_seed(seed)
    picks = (torch.randint(rows, (rows,), generator=generator) for _ in range(draws))
    return torch.stack([torch.bincount(pick, minlength=rows).double() @ values_RK / rows for pick in picks])


def interval(samples: "torch.Tensor") -> tuple[float, float]:
    """The middle 95 % of what was drawn: the percentile interval. With few rows it is somewhat too narrow.

    Args:
        samples: one number a draw, shape (draws,).
    """
    # As above: torch takes seconds to import.
    import torch

    low, high = torch.quantile(samples, torch.tensor([0.025, 0.975], dtype=samples.dtype)).tolist()
    return low, high
