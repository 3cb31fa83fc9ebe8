"""The course's one job, the Kwanzaa run on a T4: its recipe so far, and its bill."""

from cria_tricks import recipes, tricks
from cria_tricks.bill.bill import Bill
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe
from cria_tricks.tricks.folds import estimate

MIB = 2**20
CAPSTONE = recipes.kwanzaa(T4)
LESSON_OF: dict[str, str] = {}
"""The lesson that explains a switch."""
for _trick in tricks.TRICKS:
    LESSON_OF |= dict.fromkeys(_trick.SWITCHES, _trick.LESSON)
PEAK = "peak of a step"
NEEDED = "needed, with CUDA's own"


def so_far(lesson: str) -> Recipe:
    """The Kwanzaa run with the toggles that the course has reached.

    Args:
        lesson: its file's name, ``03_gradient_checkpointing``; its own toggles are on. ``00_the_bill`` has none: plain
            fp32 full fine-tuning of Llama-3.2-1B, one row of 2,048 tokens.
    """
    reached = []
    for field in toggles.switched_on(CAPSTONE):
        taught = LESSON_OF[toggles.named(CAPSTONE, field)]
        if taught[:2] <= lesson[:2]:  # the numbers that the files' names begin with
            reached.append(field)
    return toggles.with_only(CAPSTONE, reached)


def bill(recipe: Recipe) -> Bill:
    """What one training step takes on a T4, by hand."""
    return estimate(recipe, find_shape(recipe.model), T4)


def show_bill(before: Recipe, after: Recipe) -> None:
    """Print two bills side by side, row by row, in MiB."""
    first = _lines(bill(before))
    second = _lines(bill(after))
    print(f"{'MiB':34}{'before':>10}{'after':>10}{'change':>11}")
    rows = [name for name in [*first, *second] if name not in (PEAK, NEEDED)]
    for name in dict.fromkeys([*rows, PEAK, NEEDED]):  # each once, in this order
        old = first.get(name, 0)
        new = second.get(name, 0)
        change = ""
        if new != old:
            change = f"{(new - old) / MIB:+,.1f}"
        print(f"{name:34}{old / MIB:10,.1f}{new / MIB:10,.1f}{change:>11}")
    print(f"{'a T4 has':34}{T4.memory_bytes / MIB:20,.1f}")


def _lines(found: Bill) -> dict[str, int]:
    """Name -> bytes of everything that is printed of a bill."""
    lines = {row.name: row.bytes for row in found.rows}
    return lines | {PEAK: found.peak_bytes, NEEDED: found.needed_bytes}
