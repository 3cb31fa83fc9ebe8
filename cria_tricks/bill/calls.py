r"""Describe the collectives of a step for the estimate; ``measure/counting.py`` counts those of a real step.

The size of a collective is that of the whole tensor that it makes or consumes: the input of an all-reduce or a
reduce-scatter, the output of an all-gather, the tensor that is broadcast or sent. How many of these bytes each
process sends follows from the ring algorithm. N processes cut the tensor into N pieces. Each piece travels N - 1 hops
until it is summed over all processes, and N - 1 more until all have the sum (Patarasuk and Yuan 2009, "Bandwidth
optimal all-reduce algorithms", sec. 3).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "send")


@dataclass(frozen=True)
class Call:
    """A collective of a step, or several of the same kind and size.

    Attributes:
        kind: one of :data:`KINDS`.
        bytes: bytes of the whole tensor, for each time.
        times: how often it runs in one optimizer step.
        processes: how many processes take part.
        why: what the tensor holds, in words.
    """

    kind: str
    bytes: int
    times: int
    processes: int
    why: str

    @property
    def total(self) -> int:
        """Bytes of all times together, as ``CountCollectives`` counts them."""
        return self.bytes * self.times

    @property
    def sent(self) -> float:
        """Bytes that each process sends in one step with the ring algorithm; see :func:`ring_share`."""
        return self.total * ring_share(self.kind, self.processes)


def ring_share(kind: str, processes: int) -> float:
    """Return how much each process sends with the ring algorithm, as a multiple of the whole tensor.

    An all-reduce is a reduce-scatter and an all-gather, so it sends twice as much as either. For a broadcast it is the
    mean over all processes, and for a send what the sender sends.

    Examples:
        >>> ring_share("all_reduce", 2), ring_share("all_gather", 4)
        (1.0, 0.75)
    """
    # Each of the N pieces, 1 / N of the tensor, is sent N - 1 times: over all processes together N - 1 tensors, so each
    # process sends (N - 1) / N of one. In a broadcast all processes but the last pass on the tensor: N - 1, too.
    once = (processes - 1) / processes
    return {"all_reduce": 2 * once, "all_gather": once, "reduce_scatter": once, "broadcast": once, "send": 1.0}[kind]


def totals(calls: Iterable[Call]) -> dict[str, int]:
    """Return the bytes of a step for each kind of collective."""
    found: Counter[str] = Counter()
    for call in calls:
        found[call.kind] += call.total
    return {kind: found[kind] for kind in KINDS if found[kind]}
