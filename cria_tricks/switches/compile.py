"""Switch ``torch.compile`` on, and bill it; ``techniques/compile.py`` has the card and the code."""

import os
import shutil
import sys
from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import COMPILE, Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="exact within rounding",
    lesson="a_full_card",
    switches=("compile=true",),
    # It is no value to try: the estimate knows its faster steps, but not the time to compile and what blocks save then.
    fields={"compile": Field("Speed", "torch.compile", search="may change")},
)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Compile the blocks, adapters included, after all other edits of the model."""
    if not recipe.tricks.compile:
        return plan
    device = plan.device
    if device.kind == "cuda" and device.capability < (7, 0):
        major, minor = device.capability
        raise BadInput(
            f"tricks.compile=true: Triton needs compute capability 7.0, and {device.name} has {major}.{minor}; set "
            "tricks.compile=false"
        )
    compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
    if device.kind == "cpu" and not shutil.which(compiler):
        raise BadInput(f"tricks.compile=true: no C++ compiler {compiler} here; install it, or set tricks.compile=false")
    plan = plan.then(COMPILE)
    if device.kind == "cpu":
        return plan.warn(
            "compile: on a CPU the bytes of compiled kernels cannot be counted, so every peak is the whole process's"
        )
    return plan


def bill(step: Step, recipe: Recipe) -> Step:
    """Reduce the memory traffic and the kernels between products; the products stay as they are.

    The compiler chooses which results are not written, so the bytes that are alive stay, as an upper bound.
    """
    return replace(step, compiled=recipe.tricks.compile)
