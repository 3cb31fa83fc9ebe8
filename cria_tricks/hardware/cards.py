"""GPUs and rented machines as plain data: the peak rates of each GPU, and the price of each machine per hour.

The peak rates are the vendor's. They are for dense matrices (the larger figures of a datasheet are for sparse ones, of
which half of the weights are left out), with sums in fp32. Those of PCIe are for one direction, while datasheets add
both. No training step reaches the peak rates: ``reached.py`` holds the shares that it gets.
"""

from dataclasses import dataclass, replace

from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import hint, nearest
from cria_tricks.hardware.device import T4, Device
from cria_tricks.hardware.reached import DEFAULT, ON_A_T4, ON_AN_A100, WIDE, Reached, measured


@dataclass(frozen=True)
class Card:
    """A GPU and its peak rates.

    Attributes:
        device: the facts about it that switches and estimates need.
        half_flops: peak rate of 16-bit products on tensor cores [floating-point operations/s].
        full_flops: peak rate of fp32 products [floating-point operations/s].
        memory_rate: bandwidth between the GPU and its own memory [bytes/s].
        link_rate: bandwidth between the GPU and the host, in one direction [bytes/s].
        source: where the rates are from.
        reached: the shares of these rates that training reaches.
        measured: the rates of single parts of a step, where this machine was calibrated: ``flops PART PRECISION`` or
            ``bytes PART PRECISION``, and the rate [floating-point operations/s, or bytes/s]. They stand in place of the
            peak rate and its share.
    """

    device: Device
    half_flops: float
    full_flops: float
    memory_rate: float
    link_rate: float
    source: str
    reached: Reached = DEFAULT
    measured: tuple[tuple[str, float], ...] = ()

    def flops(self, precision: str) -> float:
        """Return the peak rate of products in ``fp32``, ``fp16`` or ``bf16`` [floating-point operations/s].

        Emulated bf16 is computed in fp32, so it gets the rate of fp32.
        """
        if precision == "fp16" or (precision == "bf16" and self.device.real_bf16):
            return self.half_flops
        return self.full_flops

    def product_rate(self, part: str, precision: str) -> float:
        """Return the rate that the products of a part of a step reach [floating-point operations/s]."""
        rate = dict(self.measured).get(f"flops {part} {precision}")
        if rate is not None:
            return rate
        share = self.reached.half if self.flops(precision) == self.half_flops else self.reached.full
        return self.flops(precision) * share

    def traffic_rate(self, part: str, precision: str) -> float:
        """Return the rate that the memory traffic of a part of a step reaches [bytes/s]."""
        rate = dict(self.measured).get(f"bytes {part} {precision}")
        return self.memory_rate * self.reached.memory if rate is None else rate

    def basis(self, precision: str) -> str:
        """Say what backs the times of steps in a precision.

        Returns:
            ``measured here``, by ``cria doctor --calibrate``; ``measured cards``, by files of ``cria bench`` that were
            accepted; ``public runs``; or ``no run``, by the datasheet alone. No public run on a GPU has fp32 products,
            and of a measured card only the steps with 16-bit products count.
        """
        if self.measured:
            return "measured here"
        if self.flops(precision) != self.half_flops:
            return "no run"
        if self.reached.measurements:
            return "measured cards"
        return "public runs" if self.reached.spread < WIDE else "no run"

    def spread(self, precision: str) -> float:
        """Return the high end of the range around an estimate divided by its low end [ratio]."""
        return max(WIDE, self.reached.spread) if self.basis(precision) == "no run" else self.reached.spread


def as_measured(card: Card) -> Card:
    """Return a card with the shares of accepted measurements, if there are any of it."""
    return replace(card, reached=measured().get(card.device.name, card.reached))


@dataclass(frozen=True)
class Host:
    """A machine around a GPU.

    Attributes:
        name: whose machine it is.
        memory_bytes: its memory.
    """

    name: str
    memory_bytes: int


@dataclass(frozen=True)
class Gpu:
    """One GPU or several equal ones, as ``--gpu`` names them.

    Attributes:
        device: the facts about one of them.
        memory_source: where its memory is from.
        card: its peak rates; ``None`` if they are not known.
        count: how many there are.
        host: the machine that most readers have around it; ``None`` if there is no such machine.
    """

    device: Device
    memory_source: str
    card: Card | None = None
    count: int = 1
    host: Host | None = None


def gpu(
    name: str,
    capability: tuple[int, int],
    memory: int,
    memory_source: str,
    rates: tuple[float, float, float, float],
    source: str,
    reached: Reached = DEFAULT,
) -> Gpu:
    """Describe a GPU; ``rates`` are the four of :class:`Card`, and ``source`` and ``reached`` are those of a card."""
    device = Device("cuda", name, capability, real_bf16=capability >= (8, 0), memory_bytes=memory)
    return Gpu(device, memory_source, as_measured(Card(device, *rates, source, reached)))


_T4 = Card(T4, 65e12, 8.1e12, 320e9, 16e9, "NVIDIA T4 datasheet; bandwidth: Turing architecture whitepaper", ON_A_T4)

# The four rates are half_flops, full_flops, memory_rate and link_rate. The memory is in bytes, as deviceQuery or torch
# prints it. It is less than the GPU is sold with: the driver takes a little, not always the same, and error correction
# (ECC) takes a sixteenth.
RENTED: dict[str, Gpu] = {
    "t4": Gpu(T4, "torch.cuda.get_device_properties", as_measured(_T4)),
    "l4": gpu(
        "NVIDIA L4",
        (8, 9),
        23_583_784_960,
        "deviceQuery in bottlerocket-kernel-kit pull request 139",
        (121e12, 30.3e12, 300e9, 32e9),
        "NVIDIA L4 datasheet",
    ),
    "a10g": gpu(
        "NVIDIA A10G",
        (8, 6),
        22_587 * 2**20,
        "get_device_properties in torchcodec's documentation",
        (70e12, 35e12, 600e9, 32e9),
        "NVIDIA A10G datasheet for AWS, 17 February 2022",
    ),
    "a100": gpu(
        "NVIDIA A100-SXM4-40GB",
        (8, 0),
        42_298_834_944,
        "deviceQuery in bottlerocket pull request 3873",
        (312e12, 19.5e12, 1555e9, 32e9),
        "NVIDIA A100 40GB datasheet",
        ON_AN_A100,
    ),
    "a100-80": gpu(
        "NVIDIA A100-SXM4-80GB",
        (8, 0),
        84_987_740_160,
        "deviceQuery (CUDA 12.2): 81051 MBytes",
        (312e12, 19.5e12, 2039e9, 32e9),
        "NVIDIA A100 datasheet, by Lightning's throughput.py; bandwidth: 2 x 1593 MHz x 5120 bits, as deviceQuery says",
        ON_AN_A100,
    ),
}
CARDS: dict[str, Card] = {name: each.card for name, each in RENTED.items() if each.card}
"""The GPUs that can be rented, by short name, the one with the smallest memory first."""
A100_40GB = CARDS["a100"].device


@dataclass(frozen=True)
class Flavor:
    """A machine that is rented by the hour.

    Attributes:
        name: its name at Hugging Face Jobs.
        card: its kind of GPU, a key of :data:`CARDS`.
        cards: how many GPUs it has. They are data parallel: each holds the whole model and takes its share of the rows.
        price: its price in Hugging Face's own list [USD/h].
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
        Flavor("a100-large", "a100-80", 1, 2.50),
    )
}
"""The GPU machines of the Hardware Selection Guide (seed document 004), in its order, at the prices of PRICES_DATE.

The package has no other list of prices: ``cria plan --rows``, ``cria launch`` and the page "Will it fit?" all use this
one. An ``a100-large`` has the 80 GB of the price list; the guide says 40.
"""
PRICES_DATE = "2026-08-21"
"""The date of the price list."""
PRICES_SOURCE = "github.com/huggingface/hub-docs, docs/hub/jobs-pricing.md, commit a9fef576"
"""Where the price list is."""


def find_flavor(name: str) -> Flavor:
    """Look up a rented machine by its name.

    Raises:
        BadInput: for an unknown name; the message suggests the nearest known one.
    """
    wanted = name.strip().lower()
    if wanted not in FLAVORS:
        near = nearest(wanted, FLAVORS, cutoff=0.5)
        there_are = f"there are {', '.join(FLAVORS)}"
        raise BadInput(f"unknown flavor {name}: {hint(near, there_are)}")
    return FLAVORS[wanted]
