"""How far the estimate by hand is off on settings that nobody chose: drawn by a seed, each against its dry run.

    python -m benchmarks.estimate_error --settings 3000 --seed 7     # an hour on one core
    python -m benchmarks.estimate_error --seed 7 --one 1234          # one of them again, moment by moment
    python -m benchmarks.estimate_error --settings 400 --seed 7 --family later      # of the models that came later
    python -m benchmarks.estimate_error --settings 400 --seed 7 --family toggles    # with switches that came later

A setting is a model of the catalogue, a card or a processor, one to four rows of 8 to 8,192 tokens, and every switch
with a value of its own, as far as they go together. Blocks are alike, in the formula as in the model, so a model is
cut down to two to four of them, and every fiftieth setting has all. Setting number i of a seed is always the same, so
the run may be stopped and begun again: what is in the result file is not counted again, and the estimates are made anew
every time. After a change that moves the dry run's bytes delete the file. Writes
``benchmarks/results/dry-run/estimate_error.json`` and its neighbours, against which the suite holds the estimate.
"""

import argparse
import contextlib
import gc
import json
import random
import statistics
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import HERE
from cria_tricks.bench.case import stamp
from cria_tricks.bill.bill import Bill
from cria_tricks.bill.moments import moments
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.cards import CARDS
from cria_tricks.hardware.device import Device
from cria_tricks.load.refusals import refuse
from cria_tricks.models.catalogue import CATALOGUE, CONFIGS
from cria_tricks.models.shape import facts_of, shape_of
from cria_tricks.predict.dry_run import DryRun, dry_run
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.settings import Tricks
from cria_tricks.switches.folds import estimate

RESULTS = HERE / "results" / "dry-run"
BOUNDS = -0.005, 0.02
"""What is promised of the error: at most half a per cent too small, at most two per cent too large."""
CPU = Device("cpu", "a processor", (0, 0), real_bf16=False, memory_bytes=16 * 2**30)
DEVICES = {"cpu": CPU, **{name: CARDS[name].device for name in ("t4", "l4", "a10g", "a100")}}
"""Cards that have come since compute as one of these does."""
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
"""Values of each switch; one that is there twice is drawn twice as often. Compiling changes no byte that is counted."""
TOGGLES_LATER: dict[str, tuple[Any, ...]] = {
    "gradient_checkpointing": (False, True, True, 2),
    "activation_offload": (False, False, True, "overlapped"),
    "tiled_mlp": (False, False, 64, 300, 1024),
    "stream_layers": (False, True, "file"),
    "optimizer_in_backward": (False, "clip"),
    **dict.fromkeys(("layer_by_layer", "fused_lora", "fused_blocks", "keep_attention"), (False, True)),
}
"""Switches, and values of switches, that have come since."""


@dataclass(frozen=True)
class Family:
    """What settings are drawn from, and the file of their results.

    A family is never changed: with one model or switch more, the same seed would draw other settings.

    Attributes:
        models: names of the catalogue.
        toggles: values of each switch.
        results: the file.
        new: switches of which each setting has one with a value that the first family never draws.
    """

    models: tuple[str, ...]
    toggles: dict[str, tuple[Any, ...]]
    results: Path
    new: tuple[str, ...] = ()


_MODELS = (
    *("smollm2", "tinyllama-1.1b", "llama-3.2-1b", "llama-3.2-3b", "llama-2-7b", "llama-2-13b", "llama-3.1-8b"),
    *("llama-3.1-70b", "mistral-7b", "mixtral-8x7b", "qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-7b"),
)
FIRST = Family(_MODELS, TOGGLES, RESULTS / "estimate_error.json")
LATER = Family(
    tuple(name for name in CATALOGUE if name not in _MODELS), TOGGLES, RESULTS / "estimate_error_later.json"
)  # fmt: skip
"""The models that have come since."""
NEWER = Family(
    tuple(CATALOGUE), {**TOGGLES, **TOGGLES_LATER}, RESULTS / "estimate_error_toggles.json", tuple(TOGGLES_LATER)
)  # fmt: skip
"""The switches that have come since."""
FAMILIES = {"first": FIRST, "later": LATER, "toggles": NEWER}


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


def setting(seed: int | str, number: int, family: Family = FIRST) -> Setting:
    """Draw setting number ``number`` of a seed: of the switches the first draw in which they go together."""
    draw = random.Random(f"{seed} {number}")
    model, device, peft = draw.choice(family.models), draw.choice(tuple(DEVICES)), draw.choice(PEFT)
    blocks = CONFIGS[model]["num_hidden_layers"] if number % 50 == 49 else draw.randint(2, 4)
    batch, tokens = draw.randint(1, 4), round(2 ** draw.uniform(3, 13))
    trained = draw.randint(1, batch * (tokens - 1)) if draw.random() < 0.25 else None
    while True:
        toggles = {"peft": peft, **{name: draw.choice(values) for name, values in family.toggles.items()}}
        if device == "cpu":  # its copies are not billed: it warns that they gain nothing
            toggles["activation_offload"] = False
        sets = [f"train.batch_size={batch}", f"data.max_length={tokens}", *_sizes(draw, peft, model, blocks)]
        sets += [f"tricks.{name}={value}" for name, value in toggles.items() if value != getattr(Tricks(), name)]
        if family.new and all(toggles[name] in TOGGLES.get(name, (False,)) for name in family.new):
            continue
        found = Setting(model, blocks, device, trained, tuple(sets))
        with contextlib.suppress(BadInput):
            refuse(resolve(found.recipe, DEVICES[device]), facts_of(shape_of(found.config, model)), 1)
            return found


def _sizes(draw: random.Random, peft: str, model: str, blocks: int) -> list[str]:
    """Sizes of what trains, in settings."""
    if peft == "prompt_tuning":
        return [f"prompt.tokens={draw.choice((1, 16, 100))}"]
    if peft == "side_network":
        return [f"side.blocks={draw.randint(1, blocks)}"]
    if peft != "lora":
        return []
    all_targets = list(shape_of(CONFIGS[model], model).packable)  # an expert is no linear
    targets = all_targets
    if draw.random() < 0.3:
        targets = sorted(draw.sample(targets, draw.randint(1, len(targets))), key=all_targets.index)
    rank, dropout, dora = draw.choice((1, 4, 8, 16, 16, 16, 64, 256)), draw.choice((0, 0, 0.1)), draw.random() < 0.3
    return [
        f"lora.r={rank}",
        f"lora.target_modules={','.join(targets)}",
        f"lora.dropout={dropout}",
        f"lora.dora={dora}",
    ]


def count(one: Setting) -> DryRun:
    """Its dry run."""
    from transformers import AutoConfig

    recipe, config = one.recipe, AutoConfig.for_model(**one.config)
    plan = resolve(recipe, DEVICES[one.device])
    counted = dry_run(plan, config, recipe.train.batch_size, recipe.data.max_length, one.trained)
    gc.collect()
    return counted


def by_hand(one: Setting) -> Bill:
    """Its estimate."""
    return estimate(one.recipe, shape_of(one.config, one.model), DEVICES[one.device], trained_tokens=one.trained)


def error(one: Setting, peak_bytes: int) -> float:
    """How much larger the estimate is than what was counted, as a share."""
    return by_hand(one).peak_bytes / peak_bytes - 1


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


def mark(text: str) -> str:
    """A short name of a text, which is another when the text is."""
    return f"{zlib.crc32(text.encode()):08x}"


def bill(one: Setting) -> str:
    """Every number of its estimate: all rows of all moments, with all points of a block, and what a card needs."""
    memory = by_hand(one)
    found = moments(memory.step, every_point=True)
    rows = [f"{moment.name}, {line.name}: {line.bytes}" for moment in found for line in moment.lines]
    # In KiB, because what may be reserved is a sum of floats, which Python 3.12 rounds otherwise than 3.11.
    return "\n".join([*rows, f"needed: {memory.needed_bytes >> 10} KiB, fits: {memory.fits}"])


def cases(seed: int, settings: int, known: dict[str, int], family: Family) -> Iterator[tuple[Setting, int]]:
    """Go through the settings of a seed, each with its counted bytes; what is known is not counted again."""
    for number in range(settings):
        one = setting(seed, number, family)
        peak = known.get(mark(str(one))) or count(one).peak_bytes
        yield one, peak


def read(path: Path, seed: int) -> dict[str, int]:
    """What was counted before of this seed: bytes by the mark of a setting."""
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"seed": seed, "cases": []}
    if found["seed"] != seed:
        raise BadInput(f"{path} holds seed {found['seed']}, not {seed}: name another file with --out")
    lines = [line.split() for line in found["cases"]]
    return {setting: int(peak) for setting, peak, *_ in lines}


def write(path: Path, seed: int, counted: dict[Setting, int]) -> dict[str, Any]:
    """Write what is counted so far: a summary, and for each setting its mark, both counts and its bill's mark."""
    errors = {one: error(one, peak) for one, peak in counted.items()}
    lines = [f"{mark(str(one))} {peak} {by_hand(one).peak_bytes} {mark(bill(one))}" for one, peak in counted.items()]
    found = stamp() | {"seed": seed, "bounds": BOUNDS} | summary(errors)
    atomic_files.write_file(path, json.dumps(found | {"cases": lines}, indent=2) + "\n")
    return found


def explain(one: Setting, console: Console) -> None:
    """Print both counts of one setting, moment by moment and row by row."""
    counted = count(one)
    console.print(f"{one}: {error(one, counted.peak_bytes):+.2%}")
    for part, size in counted.moments.items():
        console.print(f"dry run, {part}: {size:,}")
    for moment in by_hand(one).moments:
        rows = ", ".join(f"{line.name} {line.bytes:,}" for line in moment.lines if line.bytes)
        console.print(f"{moment.name}: {moment.bytes:,} = {rows}")


def sweep(seed: int, settings: int, out: Path, family: Family = FIRST) -> None:
    """Count what is missing, print what is outside, and write all."""
    counted: dict[Setting, int] = {}
    console, known = Console(highlight=False, soft_wrap=True), read(out, seed)
    for one, peak in cases(seed, max(settings, len(known)), known, family):
        counted[one] = peak
        if outside([error(one, peak)]):
            console.print(f"{len(counted) - 1} {error(one, peak):+.2%} {one}")
        if len(counted) % 50 == 0 and len(counted) > len(known):
            write(out, seed, counted)
            console.print(f"{len(counted)} of {settings}")
    found = write(out, seed, counted)
    many = f"{found['settings']} settings of seed {seed}: {found['outside']} outside"
    console.print(f"{many}, {found['worst_under']:+.2%} to {found['worst_over']:+.2%}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Sweep, or explain one setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--settings", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--one", type=int, help="the number of a setting: explain it, and write nothing")
    parser.add_argument("--family", choices=FAMILIES, default="first", help="models or switches that came later")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    family = FAMILIES[chosen.family]
    if chosen.one is not None:
        explain(setting(chosen.seed, chosen.one, family), Console(highlight=False, soft_wrap=True))
        return
    try:
        sweep(chosen.seed, chosen.settings, chosen.out or family.results, family)
    except BadInput as problem:
        parser.error(str(problem))


if __name__ == "__main__":
    main()
