"""Read the name of a GPU as people and programs write it: ``RTX 3060``, ``rtx-3060 8GB``, ``NVIDIA A100-SXM4-80GB``.

The name and the size of the memory are taken apart, because one product may be sold with several sizes. Another product
is never taken for the one that was named: its memory may be twice as large.
"""

import re
from collections.abc import Iterable

_MAKERS = {"nvidia", "geforce", "tesla", "quadro", "gpu", "graphics", "card"}
"""Words that say nothing about which GPU it is."""
_EDITIONS = {"generation", "blackwell", "workstation", "server", "edition"}
"""Words of long product names that no two GPUs of the list differ in."""
_BOARD = re.compile(r"(sxm\d?|pcie|hbm\d\w?)")
"""How the GPU is mounted; left out if the name is not known with it."""
_SIZE = re.compile(r"(\d+)(?:gb|gib|g)")
_DIGITS = re.compile(r"\d+")


def read(text: str) -> list[tuple[str, int | None]]:
    """Return what a name may mean, the most literal reading first: a squeezed name, and the GB of memory, if given.

    Examples:
        >>> read("NVIDIA A100-SXM4-80GB")
        [('a100sxm4', 80), ('a100', 80)]
        >>> read("RTX 3060 8")
        [('rtx30608', None), ('rtx3060', 8)]
    """
    words = re.findall(r"[a-z0-9.]+", re.sub(r"(\d)\s+(gb|gib)\b", r"\1\2", text.lower()))
    words = ["laptop" if word == "mobile" else word for word in words if word not in _MAKERS | _EDITIONS]
    sizes = [int(found[1]) for word in words if (found := _SIZE.fullmatch(word))]
    words = [word for word in words if not _SIZE.fullmatch(word)]
    if len(sizes) > 1:  # such as a share of an A100 (MIG), which names both
        return []
    size = sizes[0] if sizes else None
    readings: list[tuple[str, int | None]] = [("".join(words), size)]
    if size is None and len(words) > 1 and words[-1].isdigit():
        readings.append(("".join(words[:-1]), int(words[-1])))
    without = [word for word in words if not _BOARD.fullmatch(word)]
    if without != words:
        readings.append(("".join(without), size))
    return [(_without_maker(name), gb) for name, gb in readings]


def _without_maker(squeezed: str) -> str:
    """Remove the maker from a name that was written without spaces."""
    return re.sub(r"^(nvidia)?(tesla|geforce|quadro)?|gpu$", "", squeezed).replace("mobile", "laptop")


def alike(text: str, known: Iterable[str]) -> list[str]:
    """Return the known names with the same number in them, such as all with 4060: the same product or a close one."""
    numbers = _DIGITS.findall(text)
    longest = max(numbers, key=len, default="")
    if len(longest) < 2:
        return []
    return [name for name in known if longest in _DIGITS.findall(name)]
