"""Say which tokens of a row a process has in context parallelism, and how many.

Each row is cut into 2 N chunks of equal length for N processes, numbered from its beginning.
"""


def zigzag(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of the two chunks that a process has, of 2 N.

    A causal query sees itself and what comes before it, so a later chunk is more work. An early and a late chunk
    together are the same work in every process.

    Examples:
        >>> [zigzag(rank, 4) for rank in range(4)]
        [(0, 7), (1, 6), (2, 5), (3, 4)]
    """
    return rank, 2 * size - 1 - rank


def own_tokens(tokens: int, processes: int) -> int:
    """Return how many tokens of a row a process has, after the row is filled up to a multiple of 2 N.

    Examples:
        >>> own_tokens(23, 4)
        6
    """
    return 2 * -(-tokens // (2 * processes))
