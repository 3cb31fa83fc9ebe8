"""Say which tokens of a row a process has in context parallelism, and how many."""


def zigzag(rank: int, size: int) -> tuple[int, int]:
    """Return the two of 2 N chunks that a process has.

    A causal query sees the keys before it, so later chunks are more work. An early and a late chunk together are as
    much work in every process.

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
