"""Find the longest row that trains on a card: begin with what the bill by hand says, then search around it."""

from collections.abc import Callable

STRIDE = 1.1
"""How far apart the first lengths are that are tried [ratio]."""
CLOSE = 1.03
"""How close the longest row that ran and the shortest that did not must be for the search to end [ratio]."""


def search(said: int, runs: Callable[[int], bool]) -> tuple[int, int]:
    """Search the longest row.

    The bill takes 400 MB for the CUDA context, which a hardware profile's limit of the allocator does not, so there a
    little more may run than it says.

    Args:
        said: the length to begin with [tokens].
        runs: trains rows of a length, and returns whether that worked.

    Returns:
        The longest length that ran, and the shortest that did not [tokens].
    """
    low = high = said
    if runs(said):
        while runs(high := int(high * STRIDE)):
            low = high
    else:
        while not runs(low := int(low / STRIDE)):
            high = low
    while high > low * CLOSE:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return low, high
