"""The picture of README and home: the course's job with one technique more in each bar: ``python -m tools.ladder``.

The bars are the estimate of ``cria plan`` at the peak of a step. The order is our choice: in it every rung lowers the
peak. The lessons have another order, and ``docs/benchmarks.md`` shows it, counted by dry run.
"""

from pathlib import Path

from cria_tricks import recipes
from cria_tricks.bench import style
from cria_tricks.bench.stack import Rung, stack
from cria_tricks.bill.bill import Bill
from cria_tricks.common.themes import PARTS, THEMES
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from tools.pages import GROUPS

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "assets" / "ladder"
RUNGS: dict[str, tuple[str, ...]] = {
    "plain fp32 training": (),
    "gradient checkpointing": ("gradient_checkpointing",),
    "paged 8-bit AdamW": ("optimizer", "paged_optimizer"),
    "LoRA, gradient accumulation": ("peft", "gradient_accumulation"),
    "NF4 weights, double quantization": ("quantization", "double_quantization"),
    "chunked loss": ("chunked_loss",),
    "fp16, lean preparation": ("precision", "lean_preparation"),
    "SDPA with expanded K/V heads": ("attention", "expand_kv"),
}
"""What each bar adds: its label, and the fields of ``recipe.tricks`` that are switched on."""


def bills() -> dict[str, Bill]:
    """The bill of each rung on a T4: Llama-3.2-1B, one row of 2,048 tokens."""
    capstone = recipes.capstone(T4)
    target = toggles.Target(find_shape(capstone.model), T4)
    found = {}
    on: list[str] = []
    for label, fields in RUNGS.items():
        on += fields
        found[label] = target.memory(toggles.with_only(capstone, on))
    return found


def rungs() -> list[Rung]:
    """The bars."""
    found = []
    for label, bill in bills().items():
        parts = dict.fromkeys(PARTS, 0)
        for line in bill.lines:
            parts[group_of(line.name)] += line.bytes
        found.append(Rung(label, tuple(parts.values())))
    return found


def group_of(line: str) -> str:
    """The part of the memory that a line of the bill belongs to; the batch, half a MiB, counts as activations."""
    starts = dict(zip(PARTS, GROUPS.values(), strict=True))
    starts["activations"] += ("batch",)
    return next(part for part, names in starts.items() if line.startswith(names))


def pictures() -> dict[str, bytes]:
    """The files, by name."""
    drawing = stack(rungs())
    return {f"ladder-{theme}.svg": style.save(drawing, theme) for theme in THEMES}


def says() -> str:
    """What the picture shows, for readers who cannot see it."""
    first, *_, last = rungs()
    return (
        f"Memory of one training step of Llama-3.2-1B, from {first.peak / style.GIB:.1f} GiB in plain fp32 to "
        f"{last.peak / style.GIB:.1f} GiB with all techniques; a T4 has "
        f"{T4.memory_bytes / style.GIB:.1f} GiB"
    )


def write() -> None:
    """Write the pictures that have changed."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, content in pictures().items():
        path = FOLDER / name
        if not path.exists() or path.read_bytes() != content:  # else `make serve` would build for ever
            path.write_bytes(content)


if __name__ == "__main__":
    write()
