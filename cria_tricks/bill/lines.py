"""Define a line of the memory bill, and a moment of the training step: the lines of all that is in memory then."""

from dataclasses import dataclass, replace

STATE = ("weights: blocks", "weights: all others", "weights: adapter", "gradients", "optimizer states")
"""Names of the lines for weights, gradients and optimizer states, whose bytes do not depend on the batch."""

EVALUATION = "evaluation"
ANSWERS = "answers of eval.samples"
"""Names of the two moments of an evaluation during training: the loss of its rows, and the answers."""


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


def smaller(moment: Moment, bytes: dict[str, int]) -> Moment:
    """Return a copy of a moment, in which some lines are limited to a number of bytes.

    Args:
        moment: the moment; it is not changed.
        bytes: the limits by the names of the lines [bytes]. All other lines stay as they are. A shard is never larger
            than its tensor. So a line with bytes gets exactly its limit, and a line of 0 bytes stays 0.
    """
    lines = (replace(line, bytes=min(line.bytes, bytes.get(line.name, line.bytes))) for line in moment.lines)
    return Moment(moment.name, tuple(lines))
