"""Compute when each stage of a pipeline runs each pass, if sending takes no time, and the share of time it is idle.

``lessons/pipeline_parallel.py`` and the tests compare this share with the formula (``bubble`` in
``parallel/pipeline.py``). The trainer records the passes that it has measured as :class:`Slot`, too
(``trainer/pipeline_stage.py``).
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

Pass = tuple[str, int]
"""``("F", 3)`` is the forward pass of micro-batch 3, ``("B", 3)`` its backward pass."""


class Slot(NamedTuple):
    """One pass of a stage: forward (``"F"``) or backward (``"B"``), of which micro-batch, from when to when."""

    what: str
    number: int
    begin: float
    end: float


def timetable(orders: Sequence[Sequence[Pass]], forward: float = 1.0, backward: float = 2.0) -> list[list[Slot]]:
    """Return the slots of each stage, if every pass begins as soon as it can and sending takes no time.

    Args:
        orders: each stage's passes, e.g. ``[one_forward_one_backward(s, 4, 8) for s in range(4)]``.
        forward: the duration of a forward pass, in any unit of time.
        backward: the duration of a backward pass. In full fine-tuning it takes about twice as long, because it computes
            two gradients, one for the input and one for the weights. With LoRA it takes less, because frozen matrices
            need only the input's gradient.
    """
    done: dict[tuple[str, int, int], float] = {}  # (pass, micro-batch, stage) -> its end
    slots: list[list[Slot]] = [[] for _ in orders]
    while any(len(mine) < len(order) for mine, order in zip(slots, orders, strict=True)):
        before = len(done)
        for stage, order in enumerate(orders):
            for what, number in order[len(slots[stage]) :]:
                # The stage whose result this pass needs. It is out of range in two cases: a forward pass of the first
                # stage needs nothing, and a backward pass of the last stage needs only the forward pass of the same
                # micro-batch, which is earlier in that stage's order.
                source = stage - 1 if what == "F" else stage + 1
                if 0 <= source < len(orders) and (what, number, source) not in done:
                    break
                free = slots[stage][-1].end if slots[stage] else 0.0
                begin = max(free, done.get((what, number, source), 0.0))
                slots[stage].append(Slot(what, number, begin, begin + (forward if what == "F" else backward)))
                done[what, number, stage] = slots[stage][-1].end
        assert len(done) > before, "the orders wait for each other"
    return slots


def idle_share(slots: Sequence[Sequence[Slot]]) -> float:
    """Return the stages' mean share of idle time, from the beginning of the first pass to the end of the last."""
    every = list(chain.from_iterable(slots))
    span = max(slot.end for slot in every) - min(slot.begin for slot in every)
    return 1 - sum(slot.end - slot.begin for slot in every) / (span * len(slots))
