"""Names of dtypes, and bytes in words: the only place where a byte count becomes text."""

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
