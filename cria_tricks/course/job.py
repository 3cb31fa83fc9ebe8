"""Make the recipe that the course has reached after a lesson, and its memory bill.

The course has one job, the Kwanzaa run on a T4, and switches on its techniques lesson by lesson.
"""

from cria_tricks import recipes
from cria_tricks.bill.bill import Bill
from cria_tricks.common.lessons import number_of
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe
from cria_tricks.switches import TECHNIQUES
from cria_tricks.switches.folds import estimate

MIB = 2**20
CAPSTONE = recipes.capstone(T4)
LESSON_OF: dict[str, str] = {}
"""The file name of the lesson that explains a switch, by the switch's setting (``peft=lora``)."""
for _trick in TECHNIQUES:
    LESSON_OF |= dict.fromkeys(_trick.TECHNIQUE.switches, _trick.TECHNIQUE.lesson)
PEAK = "peak of a step"
NEEDED = "least, with CUDA's own"


def so_far(lesson: str) -> Recipe:
    """Return the recipe of the Kwanzaa run with the switches of all lessons up to this one.

    Args:
        lesson: the name of the lesson's file, e.g. ``gradient_checkpointing``. ``the_bill`` has no switches on: it
            is plain fp32 full fine-tuning of Llama-3.2-1B, one row of 2,048 tokens.
    """
    reached = []
    for field in toggles.switched_on(CAPSTONE):
        taught = LESSON_OF[toggles.named(CAPSTONE, field)]
        if number_of(taught) <= number_of(lesson):
            reached.append(field)
    return toggles.with_only(CAPSTONE, reached)


def bill(recipe: Recipe) -> Bill:
    """Estimate the memory of one training step on a T4, by formulas; nothing is run."""
    return estimate(recipe, find_shape(recipe.model), T4)


def show_bill(before: Recipe, after: Recipe) -> None:
    """Print the memory bills of two recipes side by side, line by line, in MiB."""
    first = _lines(bill(before))
    second = _lines(bill(after))
    print(f"{'MiB':34}{'before':>10}{'after':>10}{'change':>11}")
    rows = [name for name in [*first, *second] if name not in (PEAK, NEEDED)]
    for name in dict.fromkeys([*rows, PEAK, NEEDED]):  # a set that keeps this order, so each name comes once
        old = first.get(name, 0)
        new = second.get(name, 0)
        change = ""
        if new != old:
            change = f"{(new - old) / MIB:+,.1f}"
        print(f"{name:34}{old / MIB:10,.1f}{new / MIB:10,.1f}{change:>11}")
    print(f"{'a T4 has':34}{T4.memory_bytes / MIB:20,.1f}")


def show_worth(*fields: str) -> None:
    """Print what switches of the job are worth: added where the course adds them, and taken away from the whole job.

    Savings do not add up, so the two differ. Bytes and seconds are estimates for a T4; seconds are those of one row of
    2,048 tokens, the middle of their range.

    Args:
        fields: names of switches in ``recipe.tricks`` that belong to one lesson, such as ``quantization``.
    """
    on = toggles.switched_on(CAPSTONE)
    if unknown := [field for field in fields if field not in on]:
        raise ValueError(f"the job has no {', '.join(unknown)}; it has {', '.join(on)}")
    earlier = on[: min(on.index(field) for field in fields)]
    # What needs a switch cannot stay without it: weights in four bits, for example, cannot train.
    rest = [other for other in on if all(other in toggles.without(CAPSTONE, field) for field in fields)]
    target = toggles.Target(find_shape(CAPSTONE.model), T4)
    print(f"{', '.join(fields):33}{'without':>9}{'with':>9}{'change':>9}")
    for name, without, having in (
        ("added to earlier lessons", earlier, [*earlier, *fields]),
        ("in the whole job", rest, on),
    ):
        before, after = (target.bill(toggles.with_only(CAPSTONE, some)) for some in (without, having))
        old, new = (round(setting.memory.peak_bytes / MIB) for setting in (before, after))
        slow, fast = ((setting.seconds or 0) * CAPSTONE.data.max_length for setting in (before, after))
        print(f"{name + ', MiB':33}{old:9,}{new:9,}{new - old:+9,}")
        change = round(fast - slow, 2)
        print(f"{'    seconds a row':33}{slow:9.2f}{fast:9.2f}{f'{change:+.2f}' if change else '0.00':>9}")
    if gone := [other for other in on if other not in (*rest, *fields)]:
        print("(taken away together with what needs it:")
        print(f" {', '.join(gone)})")


def _lines(found: Bill) -> dict[str, int]:
    """Return the bytes of each line of a bill by its name, and of the totals."""
    lines = {line.name: line.bytes for line in found.lines}
    return lines | {PEAK: found.peak_bytes, NEEDED: found.least_bytes}
