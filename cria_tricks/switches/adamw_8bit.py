"""Switch 8-bit AdamW on, and bill it; ``techniques/adamw_8bit.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.operation import FP32
from cria_tricks.bill.step import Step, fp32_states
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="approximate",
    lesson="optimizers",
    switches=("optimizer=adamw_8bit",),
    fields={
        "optimizer": Field("Memory", "Optimizer (8-bit AdamW)", values=("adamw", "adamw_8bit"), search="may change")
    },
)
BLOCK = 256
"""How many numbers share one scale, the absmax (largest absolute value) of their block."""
SMALLEST = 4096
"""bitsandbytes keeps the states of a tensor in 8 bits if it has this many elements or more."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask for 8-bit optimizer states."""
    if recipe.tricks.optimizer != "adamw_8bit":
        return plan
    return plan.with_("optimizer", bits=8)


def bill(step: Step, recipe: Recipe) -> Step:
    """Count a byte for each number of a state, which is read and written faster, too.

    transformers keeps the states of an embedding in 32 bits.
    """
    if recipe.tricks.optimizer != "adamw_8bit":
        return step
    return replace(step, optimizer_state_bits=8, state_bytes=states_of_a_byte, optimizer_bytes=STEP_BYTES)


def states_of_a_byte(elements: int) -> int:
    """Count the bytes of a tensor's two states: one for each number, and an fp32 scale for each block of them."""
    if elements < SMALLEST:
        return fp32_states(elements)
    scales = FP32 * -(-elements // BLOCK)  # the number of blocks is rounded up
    return 2 * (elements + scales)


STEP_BYTES = 16
"""Memory traffic of the optimizer's kernel [bytes for one trained weight]: it reads the gradient (4), reads and writes
the weight (8), and reads and writes one byte for each of the two states (4)."""
