"""How near SmolLM2's activations come to the end of fp16: the largest absolute number of each module, in fp32.

    python -m benchmarks.activations --data ../shared/data/kwanzaa     # 20 minutes on one core
    python -m benchmarks.activations                                  # on our own rows

Rows are cut at 2,048 tokens. Writes ``benchmarks/results/DEVICE/activations.json``.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import write
from cria_tricks import models
from cria_tricks.bench.case import stamp
from cria_tricks.data import sources
from cria_tricks.data.tokens import tokenize
from cria_tricks.load.model import load, load_tokenizer
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.trainer.headroom import LARGEST, LargestActivation


def main() -> None:
    """Look at every row, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with kwanzaa_train.jsonl and kwanzaa_eval.jsonl")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    files = [chosen.data / f"kwanzaa_{part}.jsonl" for part in ("train", "eval")] if chosen.data else ["nguzo_saba"] * 2
    recipe = with_settings(Recipe(), ["model=smollm2", "tricks.attention=sdpa"])
    weights = models.find(recipe.model)
    tokenizer, model = load_tokenizer(weights), load(resolve(recipe), weights).model.eval()
    rows: list[dict[str, Any]] = []
    by_module: dict[str, float] = {}
    found_rows = {"train": sources.find(str(files[0]), "train"), "eval": sources.find(str(files[1]), "eval")}
    for part, source in found_rows.items():
        for row in tokenize(source.rows, tokenizer, recipe.data.max_length).rows:
            with torch.no_grad(), LargestActivation(model) as found:
                model(input_ids=torch.tensor([row["input_ids"]]), use_cache=False)
            by_module = {name: max(value, by_module.get(name, 0.0)) for name, value in found.by_module.items()}
            rows.append({"part": part, "tokens": len(row["input_ids"]), "largest": found.value, "module": found.name})
    blocks = [by_module[f"model.layers.{n}"] for n in range(model.config.num_hidden_layers)]
    top = max(rows, key=lambda row: row["largest"])
    write("activations", stamp(recipe) | {"data": Path(files[0]).name, "rows": rows, "blocks": blocks}, chosen.results)
    said = f"largest of {len(rows)} rows: {top['largest']:,.0f} ({top['module']}), fp16 ends at {LARGEST:,.0f}"
    Console().print(f"{said}: {LARGEST / top['largest']:.2f} times as much", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
