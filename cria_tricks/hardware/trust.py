"""Say how far estimated times and "it fits" can be trusted, in the words that all commands and the website print.

We have not checked either on a GPU. Until that is done, these sentences are printed beside the numbers.
"""

TIME = (
    "estimated with one constant for all cards and right within a factor of two, so do not rank cards that are closer "
    "than that"
)
"""The sentence beside estimated minutes; the constant is ``EFFICIENCY`` in ``bill/step_time.py``."""

ROUGHLY = "right within a factor of two"
"""The same in short, where a time is one of several numbers on a line."""

FITS = (
    "this counts allocated bytes and CUDA's own; PyTorch reserved 3 to 17 % more than was allocated when we replayed "
    "its allocator, and public runs on a T4 of 14.74 GiB fit up to about 13.4 GiB by this count, but not from 13.75 on"
)
"""The sentence where something "fits". The replay: Llama-3.2-1B, four sets of toggles, on a CPU, 2026-11-22."""

HOST = "the host's memory is not checked: offloaded activations wait there in pinned memory"
"""The sentence where activations are offloaded."""

TIGHT = 0.9
"""The share of a GPU's memory above which a run that fits by our count may not fit in practice: 13.4 of 14.74 GiB."""


def may_not_fit(needed: int, capacity: int) -> str:
    """Return a warning that a run fits only narrowly; an empty string if it fits well, or does not fit.

    Args:
        needed: the memory that the run needs by our count [bytes].
        capacity: the memory of the GPU [bytes].
    """
    if TIGHT * capacity < needed <= capacity:
        return f"may not fit in practice: {FITS}"
    return ""
