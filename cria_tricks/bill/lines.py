"""Define a line of the memory bill, and a moment of the training step: the lines of all that is in memory then."""

from dataclasses import dataclass

STATE = ("weights: blocks", "weights: all others", "weights: adapter", "gradients", "optimizer states")
"""Names of the lines for weights, gradients and optimizer states, whose bytes do not depend on the batch."""


@dataclass(frozen=True)
class Line:
    """A line of the memory bill.

    Attributes:
        name: what takes the memory, e.g. ``"gradients"``.
        bytes: how much it takes at the moment that the line belongs to.
        why: how this number comes about: its formula in words.
    """

    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Moment:
    """A point of the training step, and everything that is in memory at that point.

    Attributes:
        name: which point, e.g. ``"optimizer step"``.
        lines: the lines of the memory bill at this point.
    """

    name: str
    lines: tuple[Line, ...]

    @property
    def bytes(self) -> int:
        """The memory in use at this point: the sum of all lines."""
        return sum(line.bytes for line in self.lines)
