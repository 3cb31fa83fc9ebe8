"""How a run sets up the allocators of GPU and host memory, and what it leaves as the user has set it."""

import os
import platform
import subprocess
import sys

import pytest

from cria_tricks.hardware import T4, Device
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run import allocator

CPU = Device("cpu", "a CPU", (0, 0), False, 1)
PROBE = """
import os, resource, torch
from cria_tricks.hardware import Device
from cria_tricks.run.allocator import keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1])

def rounds(*mebibytes):
    faults = []
    for _ in range(6):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        sum(float(torch.zeros(n * 2**18).sum()) for n in mebibytes)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    return min(faults[1:])

with keep_freed_memory(Device("cpu", "a CPU", (0, 0), False, 1)) as done:
    inside, kept = rounds(64, 96), resident()
print(done, inside, kept - resident(), rounds(256))
"""
"""Tensors of 64 and 96 MiB, made and freed some times: the fewest pages that the system had to fill in a round, and the
pages that went back to it at the end. Then one of 256 MiB, because it fits no gap that is left in the heap."""
PAGES = 2**20 // os.sysconf("SC_PAGE_SIZE")
"""Pages of a MiB."""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left as they are")


def probe(**environment: str) -> tuple[str, int, int, int]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(allocator.OF_GLIBC)}
    done = subprocess.run([sys.executable, "-c", PROBE], env=others | environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    said, *pages = done.stdout.split()
    return said, *map(int, pages)


@glibc
def test_freed_memory_is_kept_so_the_next_step_finds_its_pages_and_goes_back_at_the_end():
    said, inside, given_back, afterwards = probe()
    assert said == "True"
    assert inside < 0.05 * 160 * PAGES
    assert given_back > 0.5 * 64 * PAGES
    assert afterwards > 0.3 * 256 * PAGES
    said, inside, *_ = probe(MALLOC_ARENA_MAX="4")  # the user's own settings stay
    assert said == "False"
    assert inside > 0.3 * 160 * PAGES


def test_nothing_is_changed_on_a_gpu_or_with_another_c_library(monkeypatch):
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: pytest.fail("the C library was asked"))
    with allocator.keep_freed_memory(T4) as done:
        assert not done
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    with allocator.keep_freed_memory(CPU) as done:
        assert not done


@pytest.mark.parametrize(
    ("environment", "settings", "system", "found"),
    [
        ({}, [], "linux", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
        ({}, ["train.expandable_segments=false"], "linux", {}),
        ({}, [], "darwin", {}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"},
            [],
            "linux",
            {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64,expandable_segments:True"},
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
            [],
            "linux",
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False"},
        ),
    ],
    ids=["asked", "off", "not on Linux", "beside others", "the user's own"],
)
def test_expandable_segments_are_asked_for_and_the_users_own_choice_stays(
    environment, settings, system, found, monkeypatch
):
    monkeypatch.setattr(os, "environ", dict(environment))
    monkeypatch.setattr(allocator.sys, "platform", system)
    allocator.ask_for_expandable_segments(with_settings(Recipe(), settings))
    assert os.environ == found
    assert allocator.expandable_segments(T4) is (system == "linux" and str(found).count("True") == 1)
