"""How far the estimate by hand is off on settings that nobody chose: drawn by a seed, each against its dry run.

    python -m benchmarks.estimate_random --settings 3000 --seed 7     # half an hour on one core
    python -m benchmarks.estimate_random --seed 7 --one 1234          # one of them again, moment by moment

A setting is a model of the catalogue, a card or a processor, one to four rows of 8 to 8,192 tokens, and every toggle
with a value of its own, as far as they go together. Blocks are alike, in the formula as in the model, so a model is
cut down to two to four of them, and every fiftieth setting has all. Setting number i of a seed is always the same, so
the run may be stopped and begun again: what was counted is in ``build/``. Summary, worst settings and counts go to
``benchmarks/results/dry-run/estimate_random.json``; the suite holds the estimate of today against these counts.
"""

import argparse
import contextlib
import gc
import hashlib
import json
import random
import statistics
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import HERE
from cria_tricks.cases import stamp
from cria_tricks.catalogue import CATALOGUE, CONFIGS
from cria_tricks.errors import BadInput
from cria_tricks.hardware.cards import CARDS
from cria_tricks.hardware.device import Device
from cria_tricks.memory.estimate import MemoryEstimate, estimate, moments
from cria_tricks.memory.shape import shape_of
from cria_tricks.recipe import Recipe, Tricks, with_settings
from cria_tricks.tricks import resolve

KEPT = HERE.parent / "build" / "estimate_random"
BOUNDS = -0.005, 0.02
"""What is promised of the error: at most half a per cent too small, at most two per cent too large."""
CPU = Device("cpu", "a processor", (0, 0), real_bf16=False, memory_bytes=16 * 2**30)
DEVICES = {"cpu": CPU, **{name: card.device for name, card in CARDS.items()}}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")
PEFT = ("none", "none", "none", "lora", "lora", "lora", "lora", "head", "prompt_tuning", "side_network")
TOGGLES: dict[str, tuple[Any, ...]] = {
    "precision": ("fp32", "fp16", "bf16"),
    "quantization": ("none", "int8", "nf4", "fp4"),
    "attention": ("eager", "sdpa", "sdpa", "flash_attention_2"),
    "optimizer": ("adamw", "adamw_8bit"),
    "gradient_accumulation": (1, 1, 2, 8),
    **dict.fromkeys(
        ("gradient_checkpointing", "double_quantization", "paged_optimizer", "expand_kv", "packing", "chunked_loss",
         "lean_preparation", "activation_offload"),
        (False, True),
    ),
}  # fmt: skip
"""Values of each toggle; one that is there twice is drawn twice as often. Compiling changes no byte that is counted."""


@dataclass(frozen=True)
class Setting:
    """One recipe for a model of so many blocks on one device."""

    model: str
    blocks: int
    device: str
    trained: int | None
    sets: tuple[str, ...]

    def __str__(self) -> str:
        trained = "" if self.trained is None else f" trained={self.trained}"
        return f"{self.model} blocks={self.blocks} {self.device}{trained} {' '.join(self.sets)}"

    @property
    def config(self) -> dict[str, Any]:
        """The model's, cut down."""
        return {**CONFIGS[self.model], "num_hidden_layers": self.blocks}

    @property
    def recipe(self) -> Recipe:
        """What would be trained."""
        return with_settings(Recipe(), self.sets)


def setting(seed: int | str, number: int) -> Setting:
    """Draw setting number ``number`` of a seed: of the toggles the first draw in which they go together."""
    draw = random.Random(f"{seed} {number}")
    model, device, peft = draw.choice(tuple(CATALOGUE)), draw.choice(tuple(DEVICES)), draw.choice(PEFT)
    blocks = CONFIGS[model]["num_hidden_layers"] if number % 50 == 49 else draw.randint(2, 4)
    batch, tokens = draw.randint(1, 4), round(2 ** draw.uniform(3, 13))
    trained = draw.randint(1, batch * (tokens - 1)) if draw.random() < 0.25 else None
    while True:
        toggles = {"peft": peft, **{name: draw.choice(values) for name, values in TOGGLES.items()}}
        toggles["activation_offload"] &= device != "cpu"  # whose copies are not billed: it warns that they gain nothing
        sets = [f"train.batch_size={batch}", f"data.max_length={tokens}", *_sizes(draw, peft, model, blocks)]
        sets += [f"tricks.{name}={value}" for name, value in toggles.items() if value != getattr(Tricks(), name)]
        found = Setting(model, blocks, device, trained, tuple(sets))
        with contextlib.suppress(BadInput):
            resolve(found.recipe, DEVICES[device])
            return found


def _sizes(draw: random.Random, peft: str, model: str, blocks: int) -> list[str]:
    """Sizes of what trains, in settings."""
    if peft == "prompt_tuning":
        return [f"prompt.tokens={draw.choice((1, 16, 100))}"]
    if peft == "side_network":
        return [f"side.blocks={draw.randint(1, blocks)}"]
    if peft != "lora":
        return []
    targets = list(ATTENTION if "num_local_experts" in CONFIGS[model] else ALL)  # an expert is no linear
    if draw.random() < 0.3:
        targets = sorted(draw.sample(targets, draw.randint(1, len(targets))), key=ALL.index)
    rank, dropout, dora = draw.choice((1, 4, 8, 16, 16, 16, 64, 256)), draw.choice((0, 0, 0.1)), draw.random() < 0.3
    return [
        f"lora.r={rank}",
        f"lora.target_modules={','.join(targets)}",
        f"lora.dropout={dropout}",
        f"lora.dora={dora}",
    ]


def count(one: Setting) -> dict[str, int]:
    """Its dry run: peak bytes in each part of a step."""
    from transformers import AutoConfig

    from cria_tricks.memory.dry_run import dry_run

    recipe, config = one.recipe, AutoConfig.for_model(**one.config)
    plan = resolve(recipe, DEVICES[one.device])
    counted = dry_run(plan, config, recipe.train.batch_size, recipe.data.max_length, one.trained)
    gc.collect()
    return counted.moments


def by_hand(one: Setting) -> MemoryEstimate:
    """Its estimate."""
    return estimate(one.recipe, shape_of(one.config, one.model), DEVICES[one.device], trained_tokens=one.trained)


def error(one: Setting, counted: dict[str, int]) -> float:
    """How much larger the estimate is than the dry run, as a share."""
    return by_hand(one).peak_bytes / max(counted.values()) - 1


def outside(errors: Iterable[float]) -> int:
    """Count the errors that are not within what is promised."""
    return sum(not BOUNDS[0] <= one <= BOUNDS[1] for one in errors)


def summary(errors: dict[Setting, float]) -> dict[str, Any]:
    """Say how far off it is: the largest errors, the median of their sizes, and the ten worst settings."""
    worst = sorted(errors, key=lambda one: -abs(errors[one]))[:10]
    return {
        "settings": len(errors),
        "outside": outside(errors.values()),
        "worst_under": min(errors.values()),
        "worst_over": max(errors.values()),
        "median_size": statistics.median(map(abs, errors.values())),
        "worst": {str(one): errors[one] for one in worst},
    }


def counts(seed: int, settings: int, kept: Path) -> Iterator[tuple[int, Setting, dict[str, int]]]:
    """Go through the settings of a seed; a setting that was counted before is read and not counted again."""
    lines = [json.loads(line) for line in kept.read_text().splitlines()] if kept.is_file() else []
    known = {line["setting"]: line["moments"] for line in lines}
    kept.parent.mkdir(parents=True, exist_ok=True)
    with kept.open("a") as file:
        for number in range(settings):
            one = setting(seed, number)
            if str(one) not in known:
                known[str(one)] = count(one)
                file.write(json.dumps({"setting": str(one), "moments": known[str(one)]}) + "\n")
                file.flush()
            yield number, one, known[str(one)]


def digest(settings: Iterable[Setting]) -> str:
    """Tell whether settings are drawn as they were when something was counted."""
    return hashlib.sha256("\n".join(map(str, settings)).encode()).hexdigest()


def explain(one: Setting, console: Console) -> None:
    """Print both counts of one setting, moment by moment and row by row."""
    counted = count(one)
    console.print(f"{one}: {error(one, counted):+.2%}")
    for part, size in counted.items():
        console.print(f"dry run, {part}: {size:,}")
    for moment in moments(by_hand(one)):
        rows = ", ".join(f"{row.name} {row.bytes:,}" for row in moment.rows if row.bytes)
        console.print(f"{moment.name}: {moment.bytes:,} = {rows}")


def main() -> None:
    """Count what is missing, and write how far the estimate is off."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--one", type=int, help="the number of a setting: explain it, and write nothing")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "dry-run" / "estimate_random.json")
    chosen, console = parser.parse_args(), Console(highlight=False, soft_wrap=True)
    if chosen.one is not None:
        explain(setting(chosen.seed, chosen.one), console)
        return
    errors: dict[Setting, float] = {}
    peaks: list[int] = []
    for number, one, counted in counts(chosen.seed, chosen.settings, KEPT / f"seed-{chosen.seed}.jsonl"):
        errors[one] = error(one, counted)
        peaks.append(max(counted.values()))
        if outside([errors[one]]):
            console.print(f"{number} {errors[one]:+.2%} {one}")
        if number % 100 == 99:
            console.print(f"{number + 1} of {chosen.settings}, {outside(errors.values())} outside")
    found = stamp() | {"seed": chosen.seed, "bounds": BOUNDS} | summary(errors)
    found |= {"digest": digest(errors), "peaks": " ".join(map(str, peaks))}
    chosen.out.write_text(json.dumps(found, indent=2) + "\n")
    many = f"{found['settings']} settings of seed {chosen.seed}: {found['outside']} outside"
    console.print(f"{many}, {found['worst_under']:+.2%} to {found['worst_over']:+.2%}")


if __name__ == "__main__":
    main()
