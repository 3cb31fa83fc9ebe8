"""The GPUs that ``--gpu`` knows by name, each with the sources of its numbers, and free amounts of GPU memory.

The memory is what the driver reports to programs, in bytes. It is less than the GPU is sold with, and it differs by
some MiB between drivers; the smallest number that we found with a recent driver stands here. ``deviceQuery`` is a
sample program of CUDA that prints it.

The rates are those of the datasheet, and no training step reaches them: ``reached.py`` says how far the times may be
off. Of a free amount of memory nothing says how fast it is, so its bytes are planned, and its seconds are not.
"""

import re
from dataclasses import replace

import psutil

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware import calibration
from cria_tricks.hardware.cards import RENTED, Card, Gpu, Host, gpu
from cria_tricks.hardware.datasheets import BY_RULE, DATASHEETS, FROM_LOG, TECHPOWERUP, least_memory
from cria_tricks.hardware.device import Device

COLAB = Host("Colab's free machine", 12_700_000_000)
KAGGLE = Host("Kaggle's machine", 29_000_000_000)
"""Notebooks that are free; both print these amounts of memory in GB."""
HOSTS = {"colab": COLAB, "kaggle": KAGGLE}
"""What may follow a GPU's name behind an @; also an amount of memory may, such as ``32GB``."""
SOURCES_READ = "2026-11-23"
"""The date on which the sources below were read; those of the GPUs that can be rented are older."""

_T4 = RENTED["t4"]

# The numbers of rates are half_flops, full_flops, memory_rate and link_rate, as in cards.py.
GPUS: dict[str, Gpu] = {
    "t4": replace(_T4, host=COLAB),
    "t4x2": replace(_T4, memory_source=f"two GPUs; each: {_T4.memory_source}", count=2, host=KAGGLE),
    "p100": gpu(
        "Tesla P100-PCIE-16GB",
        (6, 0),
        17_071_734_784,
        "deviceQuery (CUDA 11.4): 16281 MBytes",
        # It has no tensor cores. Its doubled rate for 16-bit products sums in 16 bits, and training sums in fp32.
        (9.526e12, 9.526e12, 732.2e9, 16e9),
        f"{TECHPOWERUP}, Tesla P100 PCIe 16 GB",
    ),
    "l4": RENTED["l4"],
    "a10g": RENTED["a10g"],
    "l40s": gpu(
        "NVIDIA L40S",
        (8, 9),
        47_576_711_168,
        "README of the Rust crate cuda-device-query (CUDA 12.4): 45373 MBytes",
        (362e12, 91.6e12, 864e9, 32e9),
        f"NVIDIA L40S datasheet, by github.com/winston-zhang-orz/gpu-specs, specs.md; bandwidth: {TECHPOWERUP}, L40S",
    ),
    "rtx3060": gpu(
        "NVIDIA GeForce RTX 3060",
        (8, 6),
        12_587_106_304,
        "deviceQuery (CUDA 12.4) in bittenbypython.com, GPU benchmarking with Llama.cpp, 2024-12-16: 12004 MBytes",
        (25.48e12, 12.74e12, 360e9, 32e9),
        f"{TECHPOWERUP}, RTX 3060 12 GB; 16-bit products: twice the fp32 rate, as the GA102 whitepaper has it",
    ),
    "rtx3090": gpu(
        "NVIDIA GeForce RTX 3090",
        (8, 6),
        25_414_860_800,
        "deviceQuery (CUDA 12.2): 24238 MBytes",
        (71e12, 35.6e12, 936e9, 32e9),
        "NVIDIA Ampere GA102 whitepaper, as public code quotes it: dense 16-bit products with fp32 accumulate",
    ),
    "rtx4060ti": gpu(
        "NVIDIA GeForce RTX 4060 Ti",
        (8, 9),
        16_722_821_120,
        "deviceQuery (CUDA 13.1), the 16 GB version: 15948 MBytes",
        (44.12e12, 22.06e12, 288e9, 16e9),
        f"{TECHPOWERUP}, RTX 4060 Ti 16 GB; 16-bit products: twice the fp32 rate, as the Ada whitepaper has it",
    ),
    "rtx4090": gpu(
        "NVIDIA GeForce RTX 4090",
        (8, 9),
        25_250_627_584,
        "deviceQuery (CUDA 13.0): 24081 MBytes",
        (165.2e12, 82.6e12, 1008e9, 32e9),
        "NVIDIA Ada whitepaper, as public code quotes it, appendix A: dense 16-bit products with fp32 accumulate",
    ),
    "a100": RENTED["a100"],
    "a100-80": RENTED["a100-80"],
    "h100": gpu(
        "NVIDIA H100 80GB HBM3",
        (9, 0),
        85_017_755_648,
        "deviceQuery (CUDA 13.0): 81079 MBytes",
        (989.5e12, 67e12, 3350e9, 64e9),
        "NVIDIA H100 datasheet (SXM), by Lightning's throughput.py; bandwidth: github.com/astroC86/gpu-datasheet",
    ),
    "h100-pcie": gpu(
        "NVIDIA H100 PCIe",
        (9, 0),
        least_memory(80, corrects=False),
        BY_RULE.format(gb=80),
        (756e12, 51.2e12, 2040e9, 64e9),
        f"NVIDIA H100 datasheet (PCIe), dense products; fp32 and bandwidth: {TECHPOWERUP}, H100 PCIe 80 GB",
    ),
    "h200": gpu(
        "NVIDIA H200",
        (9, 0),
        143_156 * 2**20,
        FROM_LOG,
        (989.5e12, 67e12, 4800e9, 64e9),
        "NVIDIA H200 datasheet (SXM): the products of an H100, 4.8 TB/s",
    ),
    **DATASHEETS,
}
"""The GPUs by short name. A number behind a dash is the size of the memory of another version of the same product."""

ALIASES = {"a100-40": "a100", "rtx4060ti-16": "rtx4060ti", "t4-2": "t4x2"}
"""Other short names, which links to the page "Will it fit?" may have."""

ASSUMED_CAPABILITY = (8, 6)
"""What a free amount of memory gets if no capability is given: that of GeForce RTX 30, which newer ones surpass."""

FREE = re.compile(r"(\d+(?:\.\d+)?)\s*(gib|gb|mib)(?::(\d+)\.(\d+))?")
"""A free amount of memory, such as ``8GiB`` or ``8GiB:7.5``."""
_UNITS = {"gib": 2**30, "gb": 10**9, "mib": 2**20}
_SPELLED = {"gib": "GiB", "gb": "GB", "mib": "MiB"}
_SEVERAL = re.compile(r"(.+)x(\d)")
_OWN = "give its memory, such as 12GiB, or with its compute capability 12GiB:8.6"
_PREFIXES = ("", "rtx", "gtx")
"""What people leave out in front of a name."""
_MAKERS = {"nvidia", "geforce", "tesla", "quadro", "gpu", "graphics", "card"}
"""Words that say nothing about which GPU it is."""
_EDITIONS = {"generation", "blackwell", "workstation", "server", "edition"}
"""Words of long product names that no two GPUs of the list differ in."""
_BOARD = re.compile(r"(sxm\d?|pcie|hbm\d\w?)")
"""How the GPU is mounted; left out if the name is not known with it."""
_SIZE = re.compile(r"(\d+)(?:gb|gib|g)")
_DIGITS = re.compile(r"\d+")


def _versions() -> dict[str, list[str]]:
    """Group the short names by product: the squeezed name of each, and its versions, the one that is meant first."""
    found: dict[str, list[str]] = {}
    for name in GPUS:
        base = name.rpartition("-")[0]
        product = base if base in GPUS and name.removeprefix(f"{base}-").isdigit() else name
        found.setdefault(product.replace("-", ""), []).append(name)
    return found


_VERSIONS = _versions()


def find_gpu(text: str) -> Gpu:
    """Find what ``--gpu`` names: a GPU, several of one kind (``t4x2``), or a free amount of memory (``8GiB:8.6``).

    Args:
        text: a name in any spelling, with or without the maker, ``rtx`` or the GB of memory; or an amount of memory in
            GiB, GB (10^9 bytes) or MiB, with the compute capability behind a colon. Behind an @ may follow the machine
            around it: ``colab``, ``kaggle`` or its memory (``t4@kaggle``, ``rtx4090@64GB``).

    Raises:
        BadInput: for an unknown name; the message shows the names like it, each with its memory.

    Examples:
        >>> find_gpu("RTX 3060").device.name
        'NVIDIA GeForce RTX 3060'
        >>> find_gpu("8GiB:7.5").device.real_bf16
        False
    """
    card, at, host = text.strip().lower().partition("@")
    if at:
        return replace(find_gpu(card), host=_host(host.strip()))
    free = FREE.fullmatch(card)
    if free:
        return _free(*free.groups())
    found = _known(card)
    if found:
        return GPUS[found]
    several = _SEVERAL.fullmatch("".join(card.split()))
    one = _known(several[1]) if several and int(several[2]) > 0 else None
    if several and one:
        return replace(GPUS[one], count=int(several[2]), host=None)
    raise BadInput(f"unknown card {text}: {_instead(card)}")


def _known(card: str) -> str | None:
    """Find the short name of a GPU that was named in any spelling; ``None`` if the list has none.

    Raises:
        BadInput: if the list has the GPU, but not with the memory that was named.
    """
    if card in GPUS or card in ALIASES:
        return ALIASES.get(card, card)
    as_printed = next((name for name, gpu in GPUS.items() if gpu.device.name.lower() == card), None)
    if as_printed:
        return as_printed
    for squeezed, gb in readings(card):
        versions = next((found for prefix in _PREFIXES if (found := _VERSIONS.get(prefix + squeezed))), None)
        if not versions:
            continue
        fitting = [name for name in versions if gb is None or _sold_with(GPUS[name], gb)]
        if not fitting:
            there_are = " or ".join(f"{name} ({memory_in_words(GPUS[name])})" for name in versions)
            raise BadInput(f"unknown card {card}: with {gb} GB there is none on the list; name {there_are}, or {_OWN}")
        return fitting[0]
    return None


def readings(text: str) -> list[tuple[str, int | None]]:
    """Return what a name may mean, the most literal reading first: a squeezed name, and the GB of memory, if given.

    Examples:
        >>> readings("NVIDIA A100-SXM4-80GB")
        [('a100sxm4', 80), ('a100', 80)]
        >>> readings("RTX 3060 8")
        [('rtx30608', None), ('rtx3060', 8)]
    """
    words = re.findall(r"[a-z0-9.]+", re.sub(r"(\d)\s+(gb|gib)\b", r"\1\2", text.lower()))
    words = ["laptop" if word == "mobile" else word for word in words if word not in _MAKERS | _EDITIONS]
    sizes = [int(found[1]) for word in words if (found := _SIZE.fullmatch(word))]
    words = [word for word in words if not _SIZE.fullmatch(word)]
    if len(sizes) > 1:  # such as a share of an A100 (MIG), which names both
        return []
    size = sizes[0] if sizes else None
    meanings: list[tuple[str, int | None]] = [("".join(words), size)]
    if size is None and len(words) > 1 and words[-1].isdigit():
        meanings.append(("".join(words[:-1]), int(words[-1])))
    without = [word for word in words if not _BOARD.fullmatch(word)]
    if without != words:
        meanings.append(("".join(without), size))
    return [(_without_maker(name), gb) for name, gb in meanings]


def _without_maker(squeezed: str) -> str:
    """Remove the maker from a name that was written without spaces."""
    return re.sub(r"^(nvidia)?(tesla|geforce|quadro)?|gpu$", "", squeezed).replace("mobile", "laptop")


def _alike(text: str) -> list[str]:
    """Return the short names with the same number in them, such as all with 4060: the same product or a close one."""
    numbers = _DIGITS.findall(text)
    longest = max(numbers, key=len, default="")
    if len(longest) < 2:
        return []
    return [name for name in GPUS if longest in _DIGITS.findall(name)]


def _instead(card: str) -> str:
    """Say what can be named instead of an unknown GPU. Names like it are shown with their memory, which may differ."""
    alike = [f"{name} ({memory_in_words(GPUS[name])})" for name in _alike(card)]
    if not alike:
        return f"name it as its maker does, such as rtx3060 or a100-80, or {_OWN}"
    return f"names like it are {', '.join(alike)}; else {_OWN}"


def memory_in_words(gpu: Gpu) -> str:
    """Write the memory of one GPU as programs get it."""
    return human(gpu.device.memory_bytes)


def _sold_with(gpu: Gpu, gb: int) -> bool:
    """Tell whether a GPU is sold with so much memory: driver and error correction take up to 14 % of it."""
    return 0.86 < gpu.device.memory_bytes / (gb * 2**30) <= 1


def other_versions(device: Device) -> str:
    """Say in a sentence which size of memory was taken, if the GPU's name alone leaves that open; else nothing.

    Args:
        device: as :func:`find_gpu` found it; one of a version that has to be asked for gets no sentence.
    """
    for names in _VERSIONS.values():
        first, *others = names
        if others and GPUS[first].device == device:
            there_are = " and ".join(f"{name} ({memory_in_words(GPUS[name])})" for name in others)
            return f"{first} is taken as the version with {memory_in_words(GPUS[first])}; there is also {there_are}"
    return ""


def _host(text: str) -> Host:
    """Find the machine that is named behind an @."""
    free = FREE.fullmatch(text)
    if free and not free[3]:
        return Host(f"a machine of {free[1]} {_SPELLED[free[2]]}", round(float(free[1]) * _UNITS[free[2]]))
    if text not in HOSTS:
        raise BadInput(f"unknown machine @{text}: there are {', '.join(HOSTS)}, and any amount of memory, such as 32GB")
    return HOSTS[text]


def this_host() -> Host:
    """Return the machine that runs this program."""
    return Host("this machine", psutil.virtual_memory().total)


def rates_of(device: Device) -> Card | None:
    """Return the rates of a device; ``None`` if they are not known.

    A device that was calibrated on this machine has its measured rates. Any other GPU has the peak rates of its
    datasheet, and is found by its product name. The memory need not be the same, because drivers report it differently.
    """
    return calibration.card_of(device) or by_datasheet(device)


def by_datasheet(device: Device) -> Card | None:
    """Return the rates of a GPU by its datasheet, whether or not it was calibrated here; ``None`` for others."""
    if device.kind != "cuda":
        return None
    versions = [gpu for gpu in GPUS.values() if gpu.card and gpu.device.name == device.name]
    if not versions:
        return None
    # A product with several sizes of memory has one name, and other rates with each.
    return min(versions, key=lambda gpu: abs(gpu.device.memory_bytes - device.memory_bytes)).card


def _free(amount: str, unit: str, major: str | None, minor: str | None) -> Gpu:
    """Describe a GPU of which only the memory is known, and perhaps the compute capability."""
    assumed = "" if major else ", assumed"
    capability = (int(major), int(minor or 0)) if major else ASSUMED_CAPABILITY
    memory = round(float(amount) * _UNITS[unit])
    if memory < 2**20:
        raise BadInput(f"--gpu {amount}{unit}: must be at least 1 MiB")
    name = f"a card of {amount} {_SPELLED[unit]} (compute capability {capability[0]}.{capability[1]}{assumed})"
    device = Device("cuda", name, capability, real_bf16=capability >= (8, 0), memory_bytes=memory)
    return Gpu(device, "given")
