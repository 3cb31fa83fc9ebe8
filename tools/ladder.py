"""The techniques of the course's job, in the order of the lessons, some of them in one step: for films and home."""

from cria_tricks import recipes
from cria_tricks.bill.bill import Bill
from cria_tricks.common.themes import PARTS
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe
from tools.pages import GROUPS

LADDER_STEPS: dict[str, tuple[str, ...]] = {
    "plain fp32 training": (),
    "LoRA": ("peft",),
    "SDPA with expanded K/V heads": ("attention", "expand_kv"),
    "gradient checkpointing": ("gradient_checkpointing",),
    "chunked loss": ("chunked_loss",),
    "fp16, lean preparation": ("precision", "lean_preparation"),
    "NF4, paged 8-bit AdamW, accumulation": (
        "quantization",
        "double_quantization",
        "optimizer",
        "paged_optimizer",
        "gradient_accumulation",
    ),
}
"""What each step adds: its label, and the fields of ``recipe.tricks`` that are switched on."""


def recipes_of_steps() -> dict[str, Recipe]:
    """The course's job after each step: Llama-3.2-1B, one row of 2,048 tokens, on a T4."""
    capstone = recipes.capstone(T4)
    found = {}
    on: list[str] = []
    for label, fields in LADDER_STEPS.items():
        on += fields
        found[label] = toggles.with_only(capstone, on)
    return found


def bills() -> dict[str, Bill]:
    """The bill after each step."""
    steps = recipes_of_steps()
    shape = find_shape(recipes.capstone(T4).model)
    return {label: toggles.Target(shape, T4).memory(recipe) for label, recipe in steps.items()}


def group_of(line: str) -> str:
    """The part of the memory that a line of the bill belongs to; the batch, half a MiB, counts as activations."""
    starts = dict(zip(PARTS, GROUPS.values(), strict=True))
    starts["activations"] += ("batch",)
    return next(part for part, names in starts.items() if line.startswith(names))
