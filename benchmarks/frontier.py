"""Bytes against speed: switch sets of our trainer and flags of TRL's, on one job, paired.

    python -m benchmarks.frontier                                             # real rows: hours on two cores
    python -m benchmarks.frontier --pairs 1 --model random:tiny --tokens 256  # minutes: does it run?

The job: LoRA of SmolLM2 on the real rows, at most 2,048 tokens each, 8 of them an optimizer step. Every point trains
the same rows. A pair goes through all points once, forwards and backwards in turn, each on a freshly loaded model. The
first step warms up, on the ends of rows, and is not timed; ratios are of runs of one pair. Bytes are counted apart, for
all alike (``Job.weigh``). What is in the result file already is not run again.
"""

import argparse
import importlib.metadata
import json
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from benchmarks.common import path_of, write
from benchmarks.peers.job import Job, Rows
from cria_tricks import models
from cria_tricks.bench.case import settings_of, stamp
from cria_tricks.common.units import human
from cria_tricks.data import sources
from cria_tricks.data.tokens import tokenize
from cria_tricks.hardware import this_device
from cria_tricks.load.model import load_tokenizer
from cria_tricks.recipe import Recipe, with_settings
from tools import tables

LEAN = "gradient_checkpointing=true chunked_loss=true"
NF4 = "quantization=nf4 double_quantization=true"
DEFAULTS = {"gradient_checkpointing": True, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}


class Point(NamedTuple):
    """One way to do the job.

    Attributes:
        way: ``ours`` or ``trl``.
        words: switches over LoRA and sdpa.
        flags: of TRL's ``SFTConfig``, over ours.
    """

    way: str
    words: str
    flags: dict[str, Any] = {}  # noqa: RUF012 (never changed)


POINTS = {
    "fast": Point("ours", "chunked_loss=true fused_lora=true fused_blocks=true"),
    "compiled": Point("ours", "chunked_loss=true compile=true"),
    "chunked loss": Point("ours", "chunked_loss=true"),
    "LoRA": Point("ours", ""),
    "checkpointing": Point("ours", LEAN),
    "int8": Point("ours", f"{LEAN} quantization=int8"),
    "NF4": Point("ours", f"chunked_loss=true {NF4}"),
    "small": Point("ours", f"{LEAN} {NF4} optimizer=adamw_8bit"),
    "TRL, its defaults": Point("trl", "", DEFAULTS),
    "TRL, its fastest": Point("trl", "", {"torch_compile": True}),
    "TRL as chunked loss": Point("trl", "chunked_loss=true"),
    "TRL as small": Point("trl", f"{LEAN} {NF4} optimizer=adamw_8bit"),
}
"""TRL's defaults are what SFTConfig does when nothing is said, but for bf16, which this CPU has not: checkpointing, and
8 rows at a time. Its fastest keeps everything, takes one row at a time, as nothing is padded then, and compiles."""
UNCOMPILED = {"compiled": "chunked loss", "TRL, its fastest": "TRL as chunked loss"}
"""On a CPU nobody can count inside compiled kernels: the point whose bytes stand in for theirs."""


def recipe_of(point: Point, model: str, tokens: int, steps: int) -> Recipe:
    """The whole recipe of a point."""
    fixed = "peft=lora attention=sdpa gradient_accumulation=8"
    settings = [f"model={model}", f"data.max_length={tokens}", f"train.max_steps={steps}", "train.save_minutes=0"]
    return with_settings(Recipe(name="frontier"), [*settings, *settings_of(f"{fixed} {point.words}")])


def rows_of(model: str, data: Path | None, tokens: int) -> tuple[Rows, Any]:
    """The real rows, or the package's own, and the tokenizer."""
    tokenizer = load_tokenizer(models.find(model))
    source = sources.find(str(data) if data else "nguzo_saba", "train")
    return list(tokenize(source.rows, tokenizer, tokens).rows), tokenizer


def run(result: dict[str, Any], path: Path, chosen: argparse.Namespace, console: Console) -> None:
    """Add what is missing, point by point; each is on the disk as soon as it is there."""
    rows, tokenizer = rows_of(chosen.model, chosen.data, chosen.tokens)
    for pair in range(chosen.pairs):
        names = chosen.points if pair % 2 == 0 else chosen.points[::-1]
        for name in names:
            point, entry = POINTS[name], result["points"].setdefault(name, {"speeds": {}})
            job = Job(recipe_of(point, chosen.model, chosen.tokens, chosen.steps), rows, tokenizer, short_first=True)
            entry |= {"way": point.way, "words": point.words, "flags": point.flags}
            if name in UNCOMPILED:
                entry["bytes_of"] = UNCOMPILED[name]
            elif "peak_bytes" not in entry:
                entry["peak_bytes"] = job.weigh(point.way, point.flags)
                console.print(f"{name}: {human(entry['peak_bytes'])}", highlight=False)
            if str(pair) not in entry["speeds"]:
                timed = job.time(point.way, point.flags)
                entry["speeds"][str(pair)] = timed["trained_tokens_per_second"]
                entry.setdefault("losses", timed["losses"])
                console.print(f"pair {pair + 1}, {name}: {entry['speeds'][str(pair)]:.1f} trained tokens/s")
            result |= stamp() | {"trl": importlib.metadata.version("trl")}
            write(path.stem, result, chosen.results)


def main() -> None:
    """Measure, write the result file, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--data", type=Path, help="a file of rows; the package's own when left out")
    parser.add_argument("--tokens", type=int, default=2048, help="of the longest row")
    parser.add_argument("--pairs", type=int, default=3, help="how often each point is timed")
    parser.add_argument("--points", nargs="+", choices=POINTS, default=list(POINTS), help="all when left out")
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps; the first is not timed")
    parser.add_argument("--show", action="store_true", help="the table of what is there")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    if chosen.steps < 2 or chosen.pairs < 1:
        parser.error("at least 2 steps and 1 pair are needed")
    console, path = Console(), path_of("frontier", chosen.results)
    job = {"model": chosen.model, "tokens": chosen.tokens, "steps": chosen.steps}
    job["rows"] = chosen.data.name if chosen.data else "nguzo_saba"
    result = json.loads(path.read_text()) if path.exists() else {"job": job, "points": {}}
    if result["job"] != job:
        parser.error(f"{path} holds another job, {result['job']}; name another folder with --results")
    if not chosen.show:
        if (here := this_device().name) != (there := result.get("device", here)):
            parser.error(f"{path} was measured on {there}, this is {here}; name another folder with --results")
        run(result, path, chosen, console)
    console.print(tables.frontier(result), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
