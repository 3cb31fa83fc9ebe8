"""The T4's rules on another card, as far as a machine without one can see: every switch is set, and set back."""

from types import SimpleNamespace

import pytest
import torch

from cria_tricks import hardware, recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4, device, this_device
from cria_tricks.hardware.device import pretend, this_cpu
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve

MEASURED = device._fp16_is_slow.__wrapped__
"""What is measured, and not kept."""
H200 = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=150_000_000_000)


@pytest.fixture
def card(monkeypatch):
    """Stand-ins for torch's switches, which remember what they were set to."""
    state = {"flash": True, "cudnn": True, "fraction": 0.9}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: state.get("card", H200))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda index: state["fraction"])
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda fraction, index: state.update(fraction=fraction)
    )
    for name in ("flash", "cudnn"):
        monkeypatch.setattr(torch.backends.cuda, f"{name}_sdp_enabled", lambda name=name: state[name])
        monkeypatch.setattr(
            torch.backends.cuda, f"enable_{name}_sdp", lambda enabled, name=name: state.update({name: enabled})
        )
    return state


def test_inside_every_switch_is_a_t4s_and_outside_it_is_as_it_was(card):
    card["cudnn"] = False  # somebody had it off already
    before = dict(card)
    with hardware.profile("T4") as device:
        assert (card["flash"], card["cudnn"]) == (False, False)
        assert card["fraction"] * H200.total_memory == pytest.approx(T4.memory_bytes, abs=1)
        assert this_device() is device
        assert (device.capability, device.real_bf16, device.memory_bytes) == ((7, 5), False, T4.memory_bytes)
        assert device.name == "NVIDIA H200 as T4", "a report shows which card it really was"
    assert card == before
    assert this_device().name == "NVIDIA H200"


def test_it_is_undone_when_the_run_raises(card):
    before = dict(card)
    with pytest.raises(RuntimeError, match="out of memory"), hardware.profile("t4"):
        raise RuntimeError("out of memory")
    assert card == before
    assert this_device().capability == (9, 0)


def test_it_is_undone_when_a_switch_raises(card, monkeypatch):
    before = dict(card)

    def refuse(fraction, index):
        if fraction != before["fraction"]:
            raise ValueError("no")

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", refuse)
    with pytest.raises(ValueError, match="no"), hardware.profile("t4"):
        raise AssertionError("not reached")
    assert card == before
    assert this_device().name == "NVIDIA H200"


def test_beside_a_card_the_cpu_can_be_asked_for(card):
    """As the lesson on resuming does, which compares bits: nothing is hidden, so the card is there again afterwards."""
    with pretend(this_cpu()):
        assert this_device().kind == "cpu"
        assert resolve(recipes.smoke()).device == this_cpu()
    assert this_device().name == "NVIDIA H200"


def test_recipes_choose_fp16_and_toggles_refuse_what_a_t4_has_not(card):
    assert recipes.kwanzaa().tricks.precision == "bf16"
    with hardware.profile("t4"):
        recipe = recipes.kwanzaa()
        assert recipe.tricks.precision == "fp16"
        assert resolve(recipe).device.memory_bytes == T4.memory_bytes
        with pytest.raises(BadInput, match=r"NVIDIA H200 as T4 \(compute capability 7.5\) has no bf16 units"):
            resolve(with_settings(recipe, ["tricks.precision=bf16"]))
        with pytest.raises(BadInput, match=r"needs compute capability 8.0, and NVIDIA H200 as T4 has 7.5"):
            resolve(with_settings(recipe, ["tricks.attention=flash_attention_2"]))
    assert recipes.kwanzaa().tricks.precision == "bf16"


def test_a_smaller_or_older_card_does_not_grow(card):
    card["card"] = SimpleNamespace(name="Quadro P2000", major=6, minor=1, total_memory=5 * 2**30)
    with hardware.profile("t4") as device:
        assert card["fraction"] == 1.0
        assert (device.capability, device.memory_bytes) == ((6, 1), 5 * 2**30)


def test_profiles_may_nest(card):
    with hardware.profile("t4") as outer:
        with hardware.profile("t4") as inner:
            assert inner == outer
        assert this_device() == outer
        assert card["flash"] is False
    assert card["flash"] is True


def test_without_a_card_and_for_another_profile_it_is_one_line():
    with pytest.raises(BadInput, match="hardware profile p100: there is t4, and no other"), hardware.profile("p100"):
        pass
    if torch.cuda.is_available():
        pytest.skip("a card is here")
    with pytest.raises(BadInput, match="there is no CUDA card here") as caught, hardware.profile("t4"):
        pass
    assert "\n" not in str(caught.value)
    assert this_device().kind == "cpu"


@pytest.mark.parametrize(
    ("fp16", "fp32", "slow"), [(7e-4, 6e-5, True), (1.3e-4, 6e-5, True), (9e-5, 6e-5, False), (4e-5, 6e-5, False)]
)
def test_a_processor_that_computes_in_fp16_is_not_said_to_emulate_it(fp16, fp32, slow, monkeypatch):
    """The seconds of a product are handed in: avx512_fp16 takes fewer than fp32, emulation about ten times as many."""
    monkeypatch.setattr(device, "_product_seconds", {"float16": fp16, "float32": fp32}.get)
    monkeypatch.setattr(device, "_fp16_is_slow", MEASURED)
    here = this_cpu()
    assert here.slow_fp16 is slow
    warnings = resolve(with_settings(Recipe(), ["tricks.precision=fp16"]), here).warnings
    assert [warning for warning in warnings if "emulates fp16" in warning] == list(warnings)
    assert len(warnings) == slow


def test_the_time_of_a_product_is_that_of_its_fastest_run(monkeypatch):
    clock = iter([0, 9, *(moment for _ in range(7) for moment in (10, 12))])
    monkeypatch.setattr(device.time, "perf_counter", lambda: next(clock))
    assert device._product_seconds("float16") == 2


@pytest.mark.parametrize(
    ("held_to", "real"), [(None, True), ("AVX2", False), ("AVX512_CORE", False), ("AVX512_CORE_BF16", True)]
)
def test_a_processor_that_is_held_to_an_older_one_has_no_more_than_that(held_to, real, monkeypatch):
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"avx512_bf16": True, "amx_bf16": True}, raising=False)
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if held_to:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", held_to)
    assert this_cpu().real_bf16 is real
