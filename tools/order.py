"""Which order of the lessons makes every one of them visible: ``python -m tools.order`` writes the tables of order.md.

Every set of the path's techniques is estimated once, and from these bills all orders are added up.
"""

import itertools
from pathlib import Path

from cria_tricks import recipes
from cria_tricks.common.markdown_table import table
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from tools import notebooks
from tools.figures import with_blocks

PAGE = Path(__file__).resolve().parents[1] / "docs" / "order.md"
MIB = 2**20
TAUGHT = {
    "lora": ("peft",),
    "flash_attention": ("attention", "expand_kv"),
    "gradient_checkpointing": ("gradient_checkpointing",),
    "chunked_loss": ("chunked_loss",),
    "mixed_precision": ("precision", "lean_preparation"),
    "nf4": ("quantization", "double_quantization"),
    "optimizers": ("optimizer", "paged_optimizer"),
    "gradient_accumulation": ("gradient_accumulation",),
}
"""The lessons of the path that change the bill, in our order, and the switches that each teaches."""
ORDERED = tuple(name for name in TAUGHT if name != "gradient_accumulation")
"""The lessons whose order is free. Accumulation raises the peak wherever it stands, so it comes after them."""

Bills = dict[frozenset[str], toggles.Setting]


def bills() -> Bills:
    """Estimate the course's job on a T4 with every set of lessons switched on."""
    capstone = recipes.capstone(T4)
    target = toggles.Target(find_shape(capstone.model), T4)
    found = {}
    for many in range(len(TAUGHT) + 1):
        for names in itertools.combinations(TAUGHT, many):
            fields = [field for name in names for field in TAUGHT[name]]
            found[frozenset(names)] = target.bill(toggles.with_only(capstone, fields))
    return found


def peaks(found: Bills, order: tuple[str, ...]) -> list[int]:
    """Return the peak before the first lesson of an order and after each of its lessons [bytes]."""
    return [found[frozenset(order[:count])].memory.peak_bytes for count in range(len(order) + 1)]


def ours(found: Bills) -> str:
    """The table of our order: what each lesson leaves, and what its place does to what it is worth."""
    saved: dict[str, list[int]] = {name: [] for name in ORDERED}
    for order in itertools.permutations(ORDERED):
        for name, (before, after) in zip(order, itertools.pairwise(peaks(found, order)), strict=True):
            saved[name].append(before - after)
    rows = [("plain fp32", *_bill(found[frozenset()]), "", "", "")]
    whole = found[frozenset(TAUGHT)].memory.peak_bytes
    for count, name in enumerate(TAUGHT, 1):
        first, second = (found[frozenset([*TAUGHT][:place])] for place in (count - 1, count))
        step = second.memory.peak_bytes - first.memory.peak_bytes
        removed = found[frozenset(TAUGHT) - {name}].memory.peak_bytes - whole
        span = f"{min(saved[name]) / MIB:,.0f} to {max(saved[name]) / MIB:,.0f}" if name in saved else ""
        title = f"[{_title(name)}](lessons/{name}.md)"
        rows.append((title, *_bill(second), f"{step / MIB:+,.0f}", f"{removed / MIB:+,.0f}", span))
    names = (
        "after the lesson",
        "peak, MiB",
        "seconds",
        "this step",
        "taken away from the whole",
        "saves in other orders",
    )
    return table(names, rows)


def counts(found: Bills) -> str:
    """How many orders there are, and in how many of them every lesson lowers the peak."""
    steps = {
        order: [1 - after / before for before, after in itertools.pairwise(peaks(found, order))]
        for order in itertools.permutations(ORDERED)
    }
    lower = sum(min(shares) > 0 for shares in steps.values())
    visible = sum(min(shares) >= 0.05 for shares in steps.values())
    least, smallest = min(zip(steps[ORDERED], map(_title, ORDERED), strict=True))
    first = max(steps, key=lambda order: min(steps[order]))
    best = min(steps[first])
    return (
        f"Of {len(steps):,} orders of these seven lessons, {lower:,} lower the peak in every step, and {visible:,} "
        f"lower it by at least 5 % in every step. In our order the smallest step, {smallest}, lowers it by {least:.1%}."
        f" The order with the largest smallest step ({best:.1%}) is: {', '.join(_title(name) for name in first)}."
    )


def _title(name: str) -> str:
    return notebooks.title(notebooks.LESSONS / f"{name}.py").partition(":")[0]


def _bill(setting: toggles.Setting) -> tuple[str, str]:
    seconds = (setting.seconds or 0) * recipes.capstone(T4).data.max_length
    return f"{setting.memory.peak_bytes / MIB:,.0f}", f"{seconds:.1f}"


def filled() -> str:
    """The page with its tables as they should be."""
    found = bills()
    return with_blocks(PAGE.read_text(encoding="utf-8"), {"order": ours(found), "orders": counts(found)})


if __name__ == "__main__":
    PAGE.write_text(filled(), encoding="utf-8")
