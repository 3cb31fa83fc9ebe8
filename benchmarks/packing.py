"""Packing against padding: the same documents of the real lengths in both, so equal trained tokens in a step.

    python -m benchmarks.packing                                # a slice of SmolLM2, 3 pairs of all 107: 17 minutes
    python -m benchmarks.packing --model smollm2 --documents 12 --pairs 1                 # all of it, on two cores

One pair takes the next documents of the shuffled set through one optimizer step: once as padded batches of 4 rows,
once packed into rows of ``data.max_length`` tokens, in batches of 4 as well. Timed are the forward and backward
passes and the optimizer. Who goes first changes from pair to pair. Fewer documents pack less well.
The slice has SmolLM2's width, 2 of its 30 blocks and a twelfth of its vocabulary, so that about the same share of the
products is the head's. Writes ``benchmarks/results/DEVICE/packing.json``.
"""

import argparse
import gc
import json
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.common import real_rows, write
from cria_tricks import models
from cria_tricks.bench.case import stamp
from cria_tricks.load.model import load, quiet_libraries
from cria_tricks.measure.memory import Meter
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.store.checkpoints import Checkpoints
from cria_tricks.techniques.packing import best_fit
from cria_tricks.trainer.fit import fit, training

BATCH = 4
VOCABULARY = 4_096
"""Of the random token ids, and of the slice."""
BASE = ("tricks.peft=lora", "tricks.attention=sdpa", "tricks.gradient_checkpointing=true", "tricks.chunked_loss=true")


def slice_of_smollm2(folder: Path) -> Path:
    """Save 2 blocks of SmolLM2's shape, with random weights, over a vocabulary of their own size."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    LlamaForCausalLM(
        LlamaConfig(
            **shape,
            num_hidden_layers=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=8192,
            rope_theta=100_000.0,
            tie_word_embeddings=True,
            eos_token_id=0,
            pad_token_id=0,
        )
    ).save_pretrained(folder)
    return folder


def padded_tokens(lengths: list[int]) -> int:
    """Tokens that a model computes for these rows in batches of 4, each padded to its longest."""
    batches = (lengths[i : i + BATCH] for i in range(0, len(lengths), BATCH))
    return sum(max(batch) * len(batch) for batch in batches)


def step(recipe: Recipe, documents: list[dict[str, list[int]]], packing: bool) -> dict[str, Any]:
    """Train one optimizer step on all the documents, on a freshly loaded model."""
    lengths = [len(row["input_ids"]) for row in documents]
    rows = len(best_fit(lengths, recipe.data.max_length)) if packing else len(documents)
    settings = [f"tricks.packing={str(packing).lower()}", f"tricks.gradient_accumulation={-(-rows // BATCH)}"]
    recipe = with_settings(recipe, [*settings, f"train.batch_size={BATCH}", "train.max_steps=1"])
    plan = resolve(recipe)
    loaded = load(plan, models.find(recipe.model))
    meter = Meter(plan.device.kind, compiled=True)  # uncounted: watching every operation would be timed as well
    with tempfile.TemporaryDirectory() as folder:
        run = fit(training(loaded, plan, recipe.train, documents, [], Checkpoints(Path(folder)), pad_id=0, meter=meter))
    (entry,) = run.training
    del loaded
    gc.collect()
    return {key: entry[key] for key in ("step_seconds", "tokens", "trained_tokens", "loss")} | {"rows": run.train_rows}


def compare(recipe: Recipe, pairs: int, documents: int, console: Console) -> dict[str, Any]:
    """Time pairs, each on documents of its own."""
    rows = real_rows(VOCABULARY)
    random.Random(recipe.train.seed).shuffle(rows)
    timed: list[dict[str, Any]] = []
    ratios: list[float] = []
    for number in range(pairs):
        some = [rows[i % len(rows)] for i in range(number * documents, (number + 1) * documents)]
        order = (False, True) if number % 2 == 0 else (True, False)
        pair = {"packed" if packing else "padded": step(recipe, some, packing) for packing in order}
        if pair["packed"]["trained_tokens"] != pair["padded"]["trained_tokens"]:
            raise RuntimeError(f"the two did not train the same tokens: {pair}")
        timed.append(pair)
        ratios.append(pair["padded"]["step_seconds"] / pair["packed"]["step_seconds"])
        console.print(
            f"pair {number + 1} of {pairs}: padded {pair['padded']['step_seconds']:.1f} s, packed "
            f"{pair['packed']['step_seconds']:.1f} s for {pair['padded']['trained_tokens']:,} trained tokens: "
            f"{ratios[-1]:.3f} times the trained tokens per second",
            highlight=False,
        )
    lengths = [len(row["input_ids"]) for row in rows]
    computed = padded_tokens(lengths)
    return {
        "documents_per_step": documents,
        "padding_share_of_batches_of_4": 1 - sum(lengths) / computed,
        "rows": len(rows),
        "packed_rows": len(best_fit(lengths, recipe.data.max_length)),
        "packed_over_padded": {
            "median": statistics.median(ratios),
            "range": [min(ratios), max(ratios)],
            "pairs": ratios,
        },
        "pairs": timed,
    }


def main() -> None:
    """Measure, write the result file, print the line that matters."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a slice of SmolLM2 when left out")
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--documents", type=int, default=107, help="of one optimizer step")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    console = Console()
    quiet_libraries()
    with tempfile.TemporaryDirectory() as folder:
        model = chosen.model or slice_of_smollm2(Path(folder))
        recipe = with_settings(Recipe(), [f"model={model}", *BASE, "train.save_minutes=0", *chosen.settings])
        result = compare(recipe, chosen.pairs, chosen.documents, console)
    named = chosen.model or "2 of SmolLM2's 30 blocks, a twelfth of its vocabulary, random weights"
    path = write("packing", stamp(recipe.model_copy(update={"model": named})) | result, chosen.results)
    console.print(json.dumps(result["packed_over_padded"]), f"wrote {path}", sep="\n", highlight=False)


if __name__ == "__main__":
    main()
