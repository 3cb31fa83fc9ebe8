"""Write bytes, times and money as text, here and nowhere else; and name dtypes."""

import math

DTYPE = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""Our precision names (the keys) as torch spells the dtypes."""


def human(count: int | float) -> str:
    """Write a byte count in binary units.

    Examples:
        >>> human(980 * 2**20)
        '980.0 MiB'
    """
    if abs(count) < 1024:
        return f"{count:.0f} B"
    size = count / 1024
    for unit in ("KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def duration(seconds: float) -> str:
    """Write a time with the unit that suits it, from a tenth of a second to years.

    ``docs/assets/fit.js`` writes the same words: a test holds the two together.

    Examples:
        >>> [duration(seconds) for seconds in (0.01, 8.24, 41, 329, 2210)]
        ['less than 0.1 s', '8.2 s', '41 s', '5.5 min', '37 min']
        >>> [duration(seconds) for seconds in (7800, 7200, 300_000, 10_246_612_140)]
        ['2 h 10 min', '2 h', '3 days', '325 years']
    """
    minutes = _rounded(seconds / 60)
    if _rounded(seconds * 10) == 0:
        return "less than 0.1 s"
    if _rounded(seconds) < 60:
        return _short(seconds, "s")
    if minutes < 120:
        return _short(seconds / 60, "min")
    if minutes < 48 * 60:
        return f"{minutes // 60} h {minutes % 60} min".removesuffix(" 0 min")
    days = seconds / 86_400
    if days < 730:
        return f"{_rounded(days)} days"
    return f"{_rounded(days / 365):,} years"


def money(usd: float) -> str:
    """Write an amount of USD: in cents up to 100 dollars, in whole dollars above.

    ``docs/assets/fit.js`` writes the same words.

    Examples:
        >>> [money(usd) for usd in (0.004, 0.0365, 2.5, 1_423_140.58)]
        ['less than a cent', '$0.04', '$2.50', '$1,423,141']
    """
    if usd < 0.01:
        return "less than a cent"
    cents = _rounded(100 * usd)
    if cents < 10_000:
        return f"${cents // 100}.{cents % 100:02}"
    return f"${_rounded(usd):,}"


def _short(number: float, unit: str) -> str:
    """Write a number with one decimal if it is below ten, and with none above."""
    tenths = _rounded(10 * number)
    if tenths < 100:
        return f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{_rounded(number)} {unit}"


def _rounded(number: float) -> int:
    """Round half up, as JavaScript's Math.round does: Python's own round takes the even neighbour."""
    return math.floor(number + 0.5)
