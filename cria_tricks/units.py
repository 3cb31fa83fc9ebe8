"""Names of dtypes, and bytes and times in words: the only place where a byte count becomes text."""

import math

DTYPE = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Our precision names (the keys) as torch spells the dtypes."""


def human(count: int | float) -> str:
    """Write a byte count in binary units.

    Examples:
        >>> human(980 * 2**20)
        '980.0 MiB'
    """
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"


def minutes(seconds: float) -> str:
    """Write a time in whole minutes, rounded up.

    Examples:
        >>> minutes(2460)
        '41 min'
        >>> minutes(7260)
        '2 h 1 min'
    """
    count = math.ceil(seconds / 60)
    return f"{count} min" if count < 120 else f"{count // 60} h {count % 60} min"
