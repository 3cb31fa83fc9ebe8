"""Cards and rented machines, as plain data: what a card can do at best, and what an hour with it costs.

Peak rates are the vendor's: dense (the larger figures of a datasheet are with half of the weights left out), with
sums in fp32, and one way over PCIe, which datasheets give both ways at once. No training step reaches them: how much
of them it gets is one number in ``bill/step_time.py``.
"""

from dataclasses import dataclass

from cria_tricks.common.errors import BadInput
from cria_tricks.common.names import hint, nearest
from cria_tricks.hardware.device import T4, Device


@dataclass(frozen=True)
class Card:
    """A GPU and its peak rates.

    Attributes:
        device: what toggles and estimates must know of it.
        half_flops: 16-bit products on tensor cores, floating-point operations a second.
        full_flops: fp32 products, the same.
        memory_rate: bytes a second between the card and its own memory.
        link_rate: bytes a second between the card and the host, one way.
        source: where the rates are from.
    """

    device: Device
    half_flops: float
    full_flops: float
    memory_rate: float
    link_rate: float
    source: str

    def flops(self, precision: str) -> float:
        """Products a second in ``fp32``, ``fp16`` or ``bf16``; bf16 that is emulated is computed in fp32."""
        if precision == "fp16" or (precision == "bf16" and self.device.real_bf16):
            return self.half_flops
        return self.full_flops


# Bytes as deviceQuery or torch prints them; a driver takes a little more or less, and error correction its sixteenth.
L4 = Device("cuda", "NVIDIA L4", (8, 9), real_bf16=True, memory_bytes=23_583_784_960)
"""21.96 GiB: deviceQuery in bottlerocket-kernel-kit pull request 139."""
A10G = Device("cuda", "NVIDIA A10G", (8, 6), real_bf16=True, memory_bytes=22_587 * 2**20)
"""22.06 GiB: ``get_device_properties`` in torchcodec's documentation, which prints whole MiB."""
A100_40GB = Device("cuda", "NVIDIA A100-SXM4-40GB", (8, 0), real_bf16=True, memory_bytes=42_298_834_944)
"""39.39 GiB: deviceQuery in bottlerocket pull request 3873."""

CARDS: dict[str, Card] = {
    "t4": Card(T4, 65e12, 8.1e12, 320e9, 16e9, "NVIDIA T4 datasheet; bandwidth: Turing architecture whitepaper"),
    "l4": Card(L4, 121e12, 30.3e12, 300e9, 32e9, "NVIDIA L4 datasheet"),
    "a10g": Card(A10G, 70e12, 35e12, 600e9, 32e9, "NVIDIA A10G datasheet for AWS, 17 February 2022"),
    "a100": Card(A100_40GB, 312e12, 19.5e12, 1555e9, 32e9, "NVIDIA A100 40GB datasheet"),
}
"""By short name, smallest memory first."""


@dataclass(frozen=True)
class Flavor:
    """A machine that is rented by the hour.

    Attributes:
        name: as Hugging Face Jobs calls it.
        card: a key of :data:`CARDS`.
        cards: how many it has. They are data parallel: each holds the whole model and takes its share of the rows.
        price: USD an hour, by Hugging Face's own list.
    """

    name: str
    card: str
    cards: int
    price: float


FLAVORS: dict[str, Flavor] = {
    flavor.name: flavor
    for flavor in (
        Flavor("t4-small", "t4", 1, 0.40),
        Flavor("t4-medium", "t4", 1, 0.60),
        Flavor("l4x1", "l4", 1, 0.80),
        Flavor("l4x4", "l4", 4, 3.80),
        Flavor("a10g-small", "a10g", 1, 1.00),
        Flavor("a10g-large", "a10g", 1, 1.50),
        Flavor("a10g-largex2", "a10g", 2, 3.00),
        Flavor("a10g-largex4", "a10g", 4, 5.00),
        Flavor("a100-large", "a100", 1, 2.50),
    )
}
"""The GPU machines of the Hardware Selection Guide (seed document 004), in its order, at today's prices.

This is the only list of prices: ``cria plan --rows``, ``cria hardware``, ``cria launch`` and the page "Will it fit?"
all bill by it. (The list gives an ``a100-large`` 80 GB; we reckon with the 40 GB of the guide.)
"""
PRICES_DATE = "2026-08-21"
"""The day of the list that the prices are from."""
PRICES_SOURCE = "github.com/huggingface/hub-docs, docs/hub/jobs-pricing.md, commit a9fef576"
"""Where that list is."""

TPUS: dict[str, str] = {
    "v5e-1x1": "TPU v5e, small workloads",
    "v5e-2x2": "4 TPU v5e, medium workloads",
    "v5e-2x4": "8 TPU v5e, large workloads",
}
"""The guide's TPU machines, for the record: they need code of their own, so nothing here is estimated for them."""


def find_card(name: str) -> Card:
    """Look a card up by its short name.

    Raises:
        BadInput: for an unknown one, with the nearest right one.
    """
    return CARDS[_known(name, CARDS, "card")]


def find_flavor(name: str) -> Flavor:
    """Look a rented machine up by its name.

    Raises:
        BadInput: for an unknown one, with the nearest right one.
    """
    return FLAVORS[_known(name, FLAVORS, "flavor")]


def _known(name: str, known: dict[str, Card] | dict[str, Flavor], what: str) -> str:
    wanted = name.strip().lower()
    if wanted in known:
        return wanted
    near = nearest(wanted, known, cutoff=0.5)
    there_are = f"there are {', '.join(known)}"
    raise BadInput(f"unknown {what} {name}: {hint(near, there_are)}")
