"""Cards and machines: the seed's table, found by name, refused in one line."""

import re
from dataclasses import replace

import pytest

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware import T4, Device
from cria_tricks.hardware.cards import CARDS, FLAVORS, Host, find_flavor
from cria_tricks.hardware.gpus import COLAB, DATASHEETS, GPUS, KAGGLE, find_gpu, other_versions, rates_of
from cria_tricks.hardware.reached import LAPTOP, WIDE


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


SOLD = {
    "t4": 16, "t4x2": 16, "p100": 16, "l4": 24, "a10g": 24, "l40s": 48, "rtx3060": 12, "rtx3090": 24, "rtx4060ti": 16,
    "rtx4090": 24, "a100": 40, "a100-80": 80, "h100": 80, "h100-pcie": 80, "h200": 141,
}  # fmt: skip
"""The memory that a GPU is sold with [GiB]; one that is known by its datasheet has the next of the sizes that exist."""
for _name, _gpu in DATASHEETS.items():
    SOLD[_name] = min(
        gb for gb in (4, 6, 8, 10, 11, 12, 16, 20, 24, 32, 48, 96) if gb * 2**30 > _gpu.device.memory_bytes
    )


def test_every_gpu_has_its_memory_and_its_rates_from_a_named_source():
    assert set(CARDS) | set(DATASHEETS) < set(GPUS) == set(SOLD)
    for name, gpu in GPUS.items():
        assert gpu.memory_source, name
        assert 0.86 < gpu.device.memory_bytes / (SOLD[name] * 2**30) < 1, name
        assert gpu.device.real_bf16 is (gpu.device.capability >= (8, 0))
        card = gpu.card
        assert card.source
        assert card.half_flops >= card.full_flops > card.memory_rate > card.link_rate, name
        near = replace(card.device, memory_bytes=card.device.memory_bytes + 50 * 2**20)
        assert rates_of(near) is card, "drivers report the memory differently, and versions of a card have one name"
    assert rates_of(Device("cpu", "Tesla T4", (0, 0), False, 1)) is None


def test_rates_of_a_datasheet_are_those_of_nvidias_tables():
    """16-bit products with sums in fp32, as the whitepapers and datasheets print them [10^12/s]."""
    printed = {
        "rtx2080ti": 53.8, "titanrtx": 130.5, "rtx3070": 40.6, "rtx3080": 59.5, "rtx4070ti": 80.2, "rtx4080": 97.5,
        "rtx4090": 165.2, "rtx5080": 112.6, "rtx5090": 209.5, "rtxa6000": 154.8, "a40": 149.7, "a10": 125, "a30": 165,
        "rtx6000ada": 364.2, "l40": 181.05, "rtxpro6000": 503.8, "v100": 125, "gtx1080ti": 11.3,
    }  # fmt: skip
    for name, tflops in printed.items():
        assert GPUS[name].card.half_flops == pytest.approx(tflops * 1e12, rel=0.01), name


def test_times_by_a_datasheet_have_the_wide_range_and_a_laptops_a_wider_one():
    for name in ("rtx3060", "rtx4060ti", "rtx4060", "rtx5090", "v100", "l4"):
        card = GPUS[name].card
        assert [(card.basis(each), card.spread(each)) for each in ("fp16", "fp32")] == [("no run", WIDE)] * 2, name
    laptop = GPUS["rtx4060-laptop"].card
    assert (laptop.basis("bf16"), laptop.spread("bf16")) == ("no run", LAPTOP)
    assert LAPTOP > 1.7 * WIDE


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
        ("rtx4060", "NVIDIA GeForce RTX 4060", 1),
        ("RTX-4090", "NVIDIA GeForce RTX 4090", 1),
        ("nvidia geforce rtx 3060 laptop gpu", "NVIDIA GeForce RTX 3060 Laptop GPU", 1),
        ("RTX 4070 mobile", "NVIDIA GeForce RTX 4070 Laptop GPU", 1),
        ("3060", "NVIDIA GeForce RTX 3060", 1),
        ("1080 Ti", "NVIDIA GeForce GTX 1080 Ti", 1),
        ("2080 super x2", "NVIDIA GeForce RTX 2080 SUPER", 2),
        ("a4000", "NVIDIA RTX A4000", 1),
        ("h100 80gb", "NVIDIA H100 80GB HBM3", 1),
        ("NVIDIA H100 PCIe", "NVIDIA H100 PCIe", 1),
        ("NVIDIA A100-PCIE-40GB", "NVIDIA A100-SXM4-40GB", 1),
        ("NVIDIA A100 80GB PCIe", "NVIDIA A100-SXM4-80GB", 1),
        ("L40S 48GB", "NVIDIA L40S", 1),
        ("NVIDIA RTX 6000 Ada Generation", "NVIDIA RTX 6000 Ada Generation", 1),
        ("6000 ada", "NVIDIA RTX 6000 Ada Generation", 1),
        ("Quadro RTX 8000", "Quadro RTX 8000", 1),
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


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_is_found_by_its_short_name_and_by_the_name_that_torch_prints(name):
    gpu = GPUS[name]
    gb = SOLD[name]
    for text in (name, name.upper(), name.replace("-", " "), re.sub(r"-\d+$", "", name) + f" {gb}GB"):
        assert find_gpu(text) is gpu or gpu.count > 1, text
    of_product = [each.device for each in GPUS.values() if each.device.name == gpu.device.name]
    assert find_gpu(gpu.device.name).device is of_product[0]


def test_a_product_with_several_sizes_of_memory_says_which_was_taken():
    for text, taken, other in (
        ("rtx 3060", "11.7 GiB", "rtx3060-8 (7.5 GiB)"),
        ("RTX 4060 Ti", "15.6 GiB", "rtx4060ti-8 (7.5 GiB)"),
        ("a100", "39.4 GiB", "a100-80 (79.2 GiB)"),
        ("Tesla V100", "15.8 GiB", "v100-32 (31.7 GiB)"),
        ("3080 laptop", "7.5 GiB", "rtx3080-laptop-16 (15.5 GiB)"),
    ):
        said = other_versions(find_gpu(text).device)
        assert f"with {taken}; there is also {other}" in said
    for text in ("rtx3060 8GB", "rtx4060ti-8", "t4", "rtx4060", "8GiB"):
        assert other_versions(find_gpu(text).device) == ""
    # They differ in more than their memory.
    assert find_gpu("rtx3060-8").card.memory_rate == 240e9 < find_gpu("rtx3060").card.memory_rate == 360e9


@pytest.mark.parametrize("text", ["t5", "x", "8", "8TiB", "GiB", "8GiB:", "8GiB:8", "-1GiB", "t4x0", "rtx4065", ""])
def test_what_names_no_gpu_is_refused_in_one_line_that_says_what_can_be_named(text):
    with pytest.raises(BadInput) as caught:
        find_gpu(text)
    assert str(caught.value) == (
        f"unknown card {text}: name it as its maker does, such as rtx3060 or a100-80, or give its memory, "
        "such as 12GiB, or with its compute capability 12GiB:8.6"
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rtx 4090 d", "names like it are rtx4090 (23.5 GiB), rtx4090-laptop (15.5 GiB); else give its memory"),
        ("rtx 6000", "rtx6000ada (44.3 GiB), rtxpro6000 (89.3 GiB); else give its memory"),
        ("rtx 4060 ti 12gb", "with 12 GB there is none on the list; name rtx4060ti (15.6 GiB) or rtx4060ti-8"),
        ("rtx4060 16GB", "with 16 GB there is none on the list; name rtx4060 (7.6 GiB), or give its memory"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.5gb", "a100 (39.4 GiB), a100-80 (79.2 GiB)"),
        ("0GiB", "must be at least 1 MiB"),
    ],
)
def test_another_card_is_never_suggested_without_its_memory(text, said):
    with pytest.raises(BadInput) as caught:
        find_gpu(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


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


def test_a_machine_is_found_however_its_name_is_written_and_an_unknown_one_is_refused():
    assert find_flavor(" L4x1 ") is FLAVORS["l4x1"]
    for name, said in (("a10-large", "did you mean a10g-large"), ("x", "there are t4-small, t4-medium")):
        with pytest.raises(BadInput, match=f"unknown flavor {name}: {said}"):
            find_flavor(name)


def test_a_device_knows_its_16_bits_and_whether_grouped_heads_must_be_repeated():
    def facts(device: Device) -> tuple[str, str, bool]:
        return device.half_precision, device.best_precision, device.needs_expand_kv

    assert facts(T4) == ("fp16", "fp16", True)
    assert facts(CARDS["a100"].device) == ("bf16", "bf16", False)
    plain_cpu = Device("cpu", "old", (0, 0), real_bf16=False, memory_bytes=1)
    assert facts(plain_cpu) == ("fp16", "fp32", False)
    assert facts(replace(plain_cpu, real_bf16=True)) == ("bf16", "bf16", False)
