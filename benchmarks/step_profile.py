"""Where the time of a micro-batch goes: the shares of products, attention, unpacking, copies and the rest.

    python -m benchmarks.step_profile                          # SmolLM2's shape: some minutes on two cores
    python -m benchmarks.step_profile --model random:tiny      # does it run?

One row of the real lengths goes forward and backward under PyTorch's profiler, after another one that warms up. Each
operation's own time, without the operations that it calls, belongs to one group. On a card the time is the card's.
Writes ``benchmarks/results/DEVICE/step_profile.json``.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from benchmarks.common import real_rows, write
from benchmarks.fused import BASE, VOCABULARY, Side
from cria_tricks.bench.case import free_memory, stamp
from cria_tricks.hardware import Device, this_device
from cria_tricks.load.model import quiet_libraries
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.recipes import best_precision
from cria_tricks.run.allocator import keep_freed_memory
from tools import tables

FUSED = ("tricks.fused_lora=true", "tricks.fused_blocks=true")
WAYS = {
    "peft": (),
    "fused": FUSED,
    "fused, NF4": (*FUSED, "tricks.quantization=nf4", "tricks.lean_preparation=true"),
    "fused, checkpointing": (*FUSED, "tricks.gradient_checkpointing=true"),
}
GROUPS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm"),
    "attention": ("scaled_dot_product", "efficient_attention", "flash_attention"),
    "unpacking 4-bit weights": ("dequantize", "gemm_4bit"),
    "copies and casts": ("aten::copy_", "aten::_to_copy", "aten::clone"),
}
"""Group -> names of its operations: whole names of PyTorch's own, or a part of the name."""
REST = "all other operations"


def group_of(operation: str) -> str:
    """Return the group of an operation."""
    for group, names in GROUPS.items():
        for name in names:
            whole = name.startswith("aten::")
            if operation == name or (not whole and name in operation):
                return group
    return REST


def measure(recipe: Recipe, rows: list[dict[str, list[int]]], device: Device) -> dict[str, Any]:
    """Profile the second of two micro-batches; return the seconds and calls of each group."""
    side = Side(recipe)
    side.seconds(rows[0])
    activities = [ProfilerActivity.CPU]
    if device.kind == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiled:
        began = time.perf_counter()
        side.seconds(rows[1])
        seconds = time.perf_counter() - began
    own = dict.fromkeys([*GROUPS, REST], 0.0)
    calls = dict.fromkeys(own, 0)
    for event in profiled.key_averages():
        if event.device_type != torch.autograd.DeviceType.CPU:  # a kernel, whose time its operation has already
            continue
        spent = event.self_cpu_time_total
        if device.kind == "cuda":
            spent = event.self_device_time_total
        own[group_of(event.key)] += spent / 1e6
        calls[group_of(event.key)] += event.count
    return {"tokens": len(rows[1]["input_ids"]), "wall_seconds": seconds, "seconds": own, "calls": calls}


def main() -> None:
    """Profile each way, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="random:smollm2")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    console, device = Console(), this_device()
    quiet_libraries()
    settings = [f"model={chosen.model}", *BASE, f"tricks.precision={best_precision(device)}"]
    rows = real_rows(VOCABULARY)
    result: dict[str, Any] = {**stamp(), "settings": settings, "ways": {}}
    with keep_freed_memory(device):
        for way, more in WAYS.items():
            result["ways"][way] = measure(with_settings(Recipe(), [*settings, *more]), rows, device)
            free_memory()
    console.print(tables.step_profile(result), markup=False, highlight=False, soft_wrap=True)
    console.print(f"-> {write('step_profile', result, chosen.results)}", highlight=False)


if __name__ == "__main__":
    main()
