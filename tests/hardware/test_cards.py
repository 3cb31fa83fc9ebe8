"""Cards and machines: the seed's table, found by name, refused in one line."""

from dataclasses import replace

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware import T4, Device
from cria_tricks.hardware.cards import CARDS, FLAVORS, TPUS, find_card, find_flavor
from cria_tricks.hardware.gpus import COLAB, GPUS, KAGGLE, Host, find_gpu, rates_of
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
        "a100-large": ("a100-80", 1, 8, 12, 40),
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
            "a100-80": (312e12, 19.5e12, 2039e9, 32e9),
        }.items()
    )


def test_a_card_has_less_than_its_name_says():
    assert CARDS["t4"].device is T4
    assert [human(card.device.memory_bytes) for card in CARDS.values()] == [
        "14.7 GiB",
        "22.0 GiB",
        "22.1 GiB",
        "39.4 GiB",
        "79.2 GiB",
    ]
    for name, flavor in FLAVORS.items():
        if name == "a100-large":  # the guide's 40 GB are not what the price list rents
            assert 40 * 2**30 < CARDS[flavor.card].device.memory_bytes < 80 * 2**30
            continue
        assert flavor.cards * CARDS[flavor.card].device.memory_bytes < MACHINES[flavor.name].gb * 2**30


@pytest.mark.parametrize(
    ("name", "said"), [("t5", "did you mean t4?"), ("a10x", "did you mean a10g?"), ("x", "there are t4, l4")]
)
def test_an_unknown_card_is_one_line(name, said):
    with pytest.raises(BadInput, match=f"unknown card {name}: .*") as caught:
        find_card(name)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_gpu_has_its_memory_and_its_rates_from_a_named_source():
    for name, gpu in GPUS.items():
        assert gpu.memory_source, name
        sold = {"a100": 40, "a100-80": 80, "h100": 80, "l40s": 48, "p100": 16, "rtx3060": 12, "rtx4060ti": 16}
        assert (
            0.88 < gpu.device.memory_bytes / (sold.get(name, 24 if name[:2] in ("rt", "l4", "a1") else 16) * 2**30) < 1
        )
        assert gpu.device.real_bf16 is (gpu.device.capability >= (8, 0))
        if gpu.card:
            card = gpu.card
            assert card.source
            assert rates_of(replace(card.device, memory_bytes=1)) is card, "drivers report the memory differently"
            assert card.half_flops >= card.full_flops > card.memory_rate > card.link_rate
    without = {name for name, gpu in GPUS.items() if not gpu.card}
    assert without == {"rtx3060", "rtx4060ti"}
    assert set(CARDS) < set(GPUS)
    assert rates_of(Device("cpu", "Tesla T4", (0, 0), False, 1)) is None


@pytest.mark.parametrize(
    ("text", "name", "count"),
    [
        ("T4", "Tesla T4", 1),
        ("t4x2", "Tesla T4", 2),
        ("rtx3090x4", "NVIDIA GeForce RTX 3090", 4),
        ("RTX 3060", "NVIDIA GeForce RTX 3060", 1),
        ("NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 4090", 1),
        ("4060 Ti", "NVIDIA GeForce RTX 4060 Ti", 1),
        ("a100-40", "NVIDIA A100-SXM4-40GB", 1),
        ("A100 80", "NVIDIA A100-SXM4-80GB", 1),
        ("Tesla P100", "Tesla P100-PCIE-16GB", 1),
    ],
)
def test_a_gpu_is_found_by_any_spelling_of_its_name(text, name, count):
    found = find_gpu(text)
    assert (found.device.name, found.count) == (name, count)


@pytest.mark.parametrize(
    ("text", "memory", "capability", "says"),
    [
        ("8GiB", 8 * 2**30, (8, 6), "assumed"),
        ("8gib:8.6", 8 * 2**30, (8, 6), "8.6)"),
        ("6.5 GiB:7.5", 6.5 * 2**30, (7, 5), "7.5)"),
        ("8GB:12.0", 8 * 10**9, (12, 0), "12.0)"),
        ("8192MiB", 8 * 2**30, (8, 6), "assumed"),
    ],
)
def test_a_free_amount_of_memory_is_a_card_whose_rates_are_not_known(text, memory, capability, says):
    found = find_gpu(text)
    assert (found.device.memory_bytes, found.device.capability) == (memory, capability)
    assert found.device.real_bf16 is (capability >= (8, 0))
    assert says in found.device.name
    assert ("assumed" in found.device.name) is (says == "assumed")
    assert found.card is None
    assert rates_of(found.device) is None


@pytest.mark.parametrize("text", ["t5", "x", "8", "8TiB", "GiB", "8GiB:", "8GiB:8", "-1GiB", "t4x0", "0GiB", ""])
def test_what_names_no_gpu_is_refused_in_one_line_that_lists_what_there_is(text):
    with pytest.raises(BadInput) as caught:
        find_gpu(text)
    said = str(caught.value)
    assert "\n" not in said
    assert text == "0GiB" or all(name in said for name in (*GPUS, "8GiB:7.5")), said


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("t4", COLAB),
        ("T4@kaggle", KAGGLE),
        ("p100 @ Kaggle", KAGGLE),
        ("8GiB:7.5@32GB", Host("a machine of 32 GB", 32 * 10**9)),
        ("rtx4090", None),
    ],
)
def test_the_machine_around_a_card_may_be_named(text, host):
    assert find_gpu(text).host == host
    assert find_gpu(text).device == find_gpu(text.partition("@")[0]).device


@pytest.mark.parametrize("text", ["t4@", "t4@cloud", "t4@32GB:7.5"])
def test_an_unknown_machine_is_refused_in_one_line(text):
    with pytest.raises(BadInput, match=r"unknown machine @.*: there are colab, kaggle, and any amount of memory"):
        find_gpu(text)


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
