"""Say how far estimated times and "it fits" can be trusted, in the words that all commands and the website print.

One card of ours, an H200, has checked both: docs/benchmarks.md says how far they were off. No T4 has, so these
sentences are printed beside the numbers.
"""

from cria_tricks.hardware.reached import measured


def _measured() -> str:
    """Say which cards have a range of their own; nothing as long as none was measured."""
    ranges = [f"{one.spread:.1f} times on {name}" for name, one in measured().items()]
    return f", and {', '.join(ranges)}, as measured" if ranges else ""


TIME = (
    "ranges: the high end is 1.5 times the low end where public runs on the card back it (T4 and A100, with 16-bit "
    f"products), and 2.8 times where none does{_measured()}; two machines whose ranges overlap cannot be ranked"
)
"""The sentence beside estimated minutes; ``reached.py`` has the runs, and the two ratios."""

MARGIN = 0.05
"""The share of a GPU's memory that should stay free: other programs, the driver and the desktop take some."""

TIGHT = (
    f"the tensors fit, but with what PyTorch's allocator may keep besides less than {MARGIN:.0%} of the memory would "
    "stay free, so the run may be slow or run out of memory"
)
"""The sentence where a run is tight. A full allocator first gives unused segments back, which takes time."""


def verdict(needed: int, capacity: int, least: int | None = None) -> str:
    """Say whether a run fits.

    Args:
        needed: the memory that the run should have [bytes].
        capacity: the memory that there is [bytes].
        least: the memory without which it cannot work [bytes]; ``needed`` when left out.

    Returns:
        ``does not fit``, if there is less than the least; ``tight``, if :data:`MARGIN` of the memory would not stay
        free beside what is needed; else ``fits``.
    """
    if (needed if least is None else least) > capacity:
        return "does not fit"
    if needed > (1 - MARGIN) * capacity:
        return "tight"
    return "fits"
