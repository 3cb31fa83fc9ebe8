"""Format bytes, times and money as text, and translate precision names to torch dtypes.

Every other module formats them with these functions, so that all outputs look the same.
"""

import math

DTYPE = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
"""The names of torch's dtypes (``torch.float32``), by the values of ``tricks.precision``."""


def human(count: int | float) -> str:
    """Return a byte count as text, in binary units (1 KiB = 1024 B) and with one decimal from 1 KiB on.

    Args:
        count: the number of bytes. It may be negative, for a difference.

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


def off_by(found: float, true: float, digits: int = 2) -> str:
    """Return how far a number is from the true one, in per cent with its sign; what rounds to zero has none.

    Examples:
        >>> off_by(96, 100), off_by(99.999, 100), off_by(100.56, 100, digits=1)
        ('-4.00 %', '0.00 %', '+0.6 %')
    """
    percent = round(100 * (found / true - 1), digits)
    sign = "+" if percent else ""
    return f"{percent or 0.0:{sign}.{digits}f} %"


def duration(seconds: float) -> str:
    """Return a time as text, in the unit that suits it: s, min, h and min, days, or years.

    Args:
        seconds: the time [s], 0 or more.

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
    if minutes < 120:  # below two hours
        return _short(seconds / 60, "min")
    if minutes < 48 * 60:  # below two days
        return f"{minutes // 60} h {minutes % 60} min".removesuffix(" 0 min")
    days = seconds / 86_400
    if days < 730:  # below two years
        return f"{_rounded(days)} days"
    return f"{_rounded(days / 365):,} years"


def between(low: float, high: float) -> str:
    """Return a range of times as text; the unit stands once where both ends share it.

    Args:
        low: the low end [s].
        high: the high end [s].

    Examples:
        >>> [between(329, 494), between(40, 61), between(8.01, 8.02)]
        ['5.5 to 8.2 min', '40 s to 1.0 min', '8.0 s']
    """
    first = duration(low)
    last = duration(high)
    if first == last:
        return first
    number, _, unit = first.partition(" ")
    if "h" not in unit and unit == last.partition(" ")[2]:
        first = number
    return f"{first} to {last}"


def money_between(low: float, high: float) -> str:
    """Return a range of amounts as text.

    Examples:
        >>> money_between(0.004, 0.05)
        'less than a cent to $0.05'
    """
    first = money(low)
    last = money(high)
    return first if first == last else f"{first} to {last}"


def money(usd: float) -> str:
    """Return an amount of US dollars as text: rounded to cents below $100, and to whole dollars from there on.

    Args:
        usd: the amount [USD], 0 or more.

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


def speed(ratio: float | None) -> str:
    """Return in words how much slower or faster something became; an empty text if that is not known.

    Args:
        ratio: the time now, divided by the time before.

    Examples:
        >>> [speed(ratio) for ratio in (1.336, 0.5, 1.004, None)]
        ['1.34 times slower', '2.00 times faster', 'as fast', '']
    """
    if ratio is None:
        return ""
    if abs(ratio - 1) < 0.005:
        return "as fast"
    if ratio > 1:
        return f"{ratio:.2f} times slower"
    return f"{1 / ratio:.2f} times faster"


def _short(number: float, unit: str) -> str:
    """Return a number and its unit, with one decimal if the number rounds to less than ten, else with none."""
    tenths = _rounded(10 * number)
    if tenths < 100:
        return f"{tenths // 10}.{tenths % 10} {unit}"
    return f"{_rounded(number)} {unit}"


def _rounded(number: float) -> int:
    """Round half up; Python's round would turn 0.5 into 0, the even neighbour."""
    return math.floor(number + 0.5)
