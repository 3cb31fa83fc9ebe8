"""The longest row that trains in a T4's memory: what the bill by hand says, held against real steps on a card.

    python -m benchmarks.longest                       # a CUDA card held to a T4's rules: Llama-3.2-1B and 3.1-8B
    python -m benchmarks.longest --shape llama-3.2-1b

For each shape the capstone's toggles over one row, with random weights: rows around what ``cria plan --longest`` names
are trained for some steps, until one is found that runs and one at most a hundredth longer that does not. The bill
takes 400 MB for the CUDA context, which the profile's cap on the allocator does not, so a little more may run.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import write
from cria_tricks import hardware, recipes
from cria_tricks.bench.case import Setup, measure, stamp
from cria_tricks.bill.bill import WORKSPACE_CONFIG
from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.hardware import Device
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe, with_settings

SHAPES = ("llama-3.2-1b", "llama-3.1-8b")
STRIDE = 1.1
CLOSE = 1.01


def capstone(shape: str, device: Device) -> Recipe:
    """One row a step, so that gradients are not there twice."""
    return with_settings(recipes.capstone(device), [f"model=random:{shape}", "tricks.gradient_accumulation=1"])


def search(shape: str, device: Device, console: Console) -> dict[str, Any]:
    """Try lengths around what the bill says, until one fits and the next does not."""
    recipe = capstone(shape, device)
    words = " ".join(f"{field}={str(getattr(recipe.tricks, field)).lower()}" for field in toggles.switched_on(recipe))
    said = toggles.longest(toggles.Target(find_shape(recipe.model), device), recipe)
    tried: dict[int, dict[str, Any]] = {}

    def runs(tokens: int) -> bool:
        case = measure("longest", "try", words, Setup(shape, tokens, 1))
        if case.status == "refused":
            raise BadInput(case.why)
        tried[tokens] = case.model_dump(include={"status", "why", "peak_allocated_bytes", "estimated_bytes"})
        console.print(f"{shape}, {tokens:,} tokens: {case.status}, {human(case.peak_allocated_bytes or 0)}")
        return case.status == "ok"

    low = high = said
    if runs(said):
        while runs(high := int(high * STRIDE)):
            low = high
    else:
        while not runs(low := int(low / STRIDE)):
            high = low
    while high > low * CLOSE:
        middle = (low + high) // 2
        low, high = (middle, high) if runs(middle) else (low, middle)
    return {"by_hand": said, "longest_that_ran": low, "shortest_that_did_not": high, "tried": tried}


def main() -> None:
    """Search, write the result file, print the answers."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed; cria plan kwanzaa --gpu t4 --longest says what the bill by hand does")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = WORKSPACE_CONFIG  # read once, at the process's first product
    with hardware.profile("t4") as device:
        result = stamp() | {"shapes": {}}
        for shape in chosen.shape or SHAPES:
            result["shapes"][shape] = search(shape, device, Console())
            write("longest", result, chosen.results)


if __name__ == "__main__":
    main()
