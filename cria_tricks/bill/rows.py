"""Lines of a bill, and the moments of a step that they are of."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A line of the bill.

    Attributes:
        name: what it is.
        bytes: what it takes at the peak.
        why: its formula, in words.
    """

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Moment:
    """A point of the step, and all that is alive there."""

    name: str
    rows: tuple[Row, ...]

    @property
    def bytes(self) -> int:
        """What is alive."""
        return sum(row.bytes for row in self.rows)
