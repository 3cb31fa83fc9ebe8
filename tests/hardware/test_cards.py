"""Cards and machines: the seed's table, found by name, refused in one line."""

from dataclasses import replace

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware import T4, Device
from cria_tricks.hardware.cards import CARDS, FLAVORS, TPUS, find_card, find_flavor
from cria_tricks.predict.selection_guide import MACHINES


def test_the_machines_are_those_of_the_guide():
    assert list(MACHINES) == list(FLAVORS)
    both = zip(FLAVORS.values(), MACHINES.values(), strict=True)
    assert {here.name: (here.card, here.cards, there.low, there.high, there.gb) for here, there in both} == {
        "t4-small": ("t4", 1, 0.5, 1, 16),
        "t4-medium": ("t4", 1, 1, 2, 16),
        "l4x1": ("l4", 1, 2, 3, 24),
        "l4x4": ("l4", 4, 8, 12, 96),
        "a10g-small": ("a10g", 1, 3, 4, 24),
        "a10g-large": ("a10g", 1, 4, 6, 24),
        "a10g-largex2": ("a10g", 2, 8, 12, 48),
        "a10g-largex4": ("a10g", 4, 16, 24, 96),
        "a100-large": ("a100", 1, 8, 12, 40),
    }
    assert set(TPUS) == {"v5e-1x1", "v5e-2x2", "v5e-2x4"}


def test_rates_are_those_of_the_datasheets():
    """Dense 16-bit and fp32 operations, bytes of memory, bytes of PCIe one way, a second; sources in cards.py."""
    found = {name: (c.half_flops, c.full_flops, c.memory_rate, c.link_rate) for name, c in CARDS.items()}
    assert (
        found.items()
        >= {
            "t4": (65e12, 8.1e12, 320e9, 16e9),
            "l4": (121e12, 30.3e12, 300e9, 32e9),
            "a10g": (70e12, 35e12, 600e9, 32e9),
            "a100": (312e12, 19.5e12, 1555e9, 32e9),
        }.items()
    )


def test_a_card_has_less_than_its_name_says():
    assert CARDS["t4"].device is T4
    assert [human(card.device.memory_bytes) for card in CARDS.values()] == [
        "14.7 GiB",
        "22.0 GiB",
        "22.1 GiB",
        "39.4 GiB",
    ]
    for flavor in FLAVORS.values():
        assert flavor.cards * CARDS[flavor.card].device.memory_bytes < MACHINES[flavor.name].gb * 2**30


@pytest.mark.parametrize(
    ("name", "said"), [("t5", "did you mean t4?"), ("a100-80", "did you mean a100?"), ("x", "there are t4, l4")]
)
def test_an_unknown_card_is_one_line(name, said):
    with pytest.raises(BadInput, match=f"unknown card {name}: .*") as caught:
        find_card(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_are_found_however_they_are_written():
    assert find_card(" T4 ") is CARDS["t4"]
    assert find_flavor("L4x1") is FLAVORS["l4x1"]
    with pytest.raises(BadInput, match="did you mean a10g-large"):
        find_flavor("a10-large")


def test_a_device_knows_its_16_bits_and_whether_grouped_heads_must_be_repeated():
    def facts(device: Device) -> tuple[str, str, bool]:
        return device.half_precision, device.best_precision, device.needs_expand_kv

    assert facts(T4) == ("fp16", "fp16", True)
    assert facts(CARDS["a100"].device) == ("bf16", "bf16", False)
    plain_cpu = Device("cpu", "old", (0, 0), real_bf16=False, memory_bytes=1)
    assert facts(plain_cpu) == ("fp16", "fp32", False)
    assert facts(replace(plain_cpu, real_bf16=True)) == ("bf16", "bf16", False)
