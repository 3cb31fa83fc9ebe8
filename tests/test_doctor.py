"""What the doctor finds: on this machine, on one that it only knows by its facts, and where a library is missing."""

import json
import os
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from cria_tricks.doctor import machine
from cria_tricks.hardware import T4, this_device
from cria_tricks.hardware.device import pretend

KEYS = {"device", "bf16", "python", "cuda", "versions", "colab", "bitsandbytes", "paging", "attention", "toggles"}


@pytest.fixture(scope="module")
def here():
    return machine.examine()


def test_it_is_plain_json_with_the_documented_keys(here):
    assert set(json.loads(json.dumps(here, allow_nan=False))) == KEYS
    assert all(f"``{key}``" in machine.examine.__doc__ for key in KEYS)


def test_what_it_says_about_this_machine_is_so(here):
    device = this_device()
    assert (here["device"]["name"], here["device"]["real_bf16"]) == (device.name, device.real_bf16)
    assert here["bf16"]["runs"] == ("real" if device.real_bf16 else "emulated")
    assert 0 < here["device"]["free_bytes"] < here["device"]["memory_bytes"]
    assert set(here["attention"]) == {"masked", "maskless", "maskless, expand_kv"}


def test_free_memory_is_what_the_system_says_can_be_had(monkeypatch):
    """Of a system that is played: how much is free here changes from one moment to the next."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=10, available=7, free=3))
    assert machine._free_bytes(this_device()) == 7


def test_without_cuda_bitsandbytes_is_the_cpus_and_nothing_pages(here):
    if torch.cuda.is_available():
        pytest.skip("a card is here")
    import bitsandbytes.cextension

    assert here["bitsandbytes"]["backend"] == "cpu"
    assert here["bitsandbytes"]["library"] == os.path.basename(bitsandbytes.cextension.lib._lib._name)
    assert here["paging"]["works"] is False
    assert "without CUDA" in here["paging"]["why"]
    assert here["bf16"]["torch_says"] is None


def test_a_t4_refuses_what_it_has_no_units_for():
    refused = {entry["set"] for entry in machine.toggles(T4) if entry["status"] == "refused"}
    assert refused == {"tricks.precision=bf16", "tricks.attention=flash_attention_2"}
    assert {entry["status"] for entry in machine.toggles(T4)} == {"works", "refused"}


@pytest.fixture
def t4(monkeypatch):
    """A T4 as torch shows it, two GiB of it taken; nothing is run on it."""
    monkeypatch.setattr(machine, "_attention", lambda device: {"maskless": "math"})
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (12 * 2**30, 15 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 2**30)
    with pretend(T4):
        yield


def native(name: str, cuda: bool) -> SimpleNamespace:
    lib = type("Lib", (), {"compiled_with_cuda": cuda})()
    lib._lib = SimpleNamespace(_name=f"/somewhere/{name}")
    return SimpleNamespace(lib=lib)


def test_a_t4_says_yes_to_bf16_and_emulates_it(t4, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", native("libbitsandbytes_cuda128.so", True))
    found = machine.examine()
    assert found["bf16"] == {"runs": "emulated", "torch_says": True}
    assert found["device"]["free_bytes"] == 12 * 2**30
    assert found["bitsandbytes"] == {"backend": "cuda", "library": "libbitsandbytes_cuda128.so"}
    assert found["paging"]["works"] is True


def test_a_cap_on_memory_counts(t4, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (130 * 2**30, 140 * 2**30))  # a large card as a T4
    assert machine.examine()["device"]["free_bytes"] == T4.memory_bytes - 2**30


def test_a_card_whose_bitsandbytes_found_no_library_does_not_page(t4, monkeypatch):
    class Missing:
        def __getattr__(self, name):
            return lambda *arguments: pytest.fail("nothing may be called")

    for stand_in, backend in ((SimpleNamespace(lib=Missing()), None), (native("libbitsandbytes_cpu.so", False), "cpu")):
        monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", stand_in)
        found = machine.examine()
        assert found["bitsandbytes"]["backend"] == backend
        assert found["paging"] == {"works": False, "why": "bitsandbytes has loaded no CUDA library"}


def test_the_screen_says_it_too(t4, monkeypatch, capfd):
    from cria_tricks.cli import main

    monkeypatch.setitem(sys.modules, "bitsandbytes.cextension", native("libbitsandbytes_cuda128.so", True))
    monkeypatch.setattr(sys, "argv", ["cria", "doctor"])
    main.main()
    said = " ".join(capfd.readouterr().out.split())
    for words in (
        "Tesla T4 (cuda, compute capability 7.5)",
        "14.7 GiB, of which 12.0 GiB are free",
        "is emulated, slowly (torch.cuda.is_bf16_supported() says True)",
        "maskless: math",
        "libbitsandbytes_cuda128.so (cuda)",
        "works: states of 100,000 elements",
    ):
        assert words in said
