"""Quality beside memory: the same short run with one thing changed, three seeds each, held-out loss and peak bytes.

    python -m benchmarks.quality --data ../shared/data/kwanzaa          # the real rows: hours on two cores
    python -m benchmarks.quality --only nf4 --only fp32 --seeds 1       # some of it, on our own rows
    python -m benchmarks.quality --show                                 # the table of what is there

SmolLM2-135M, LoRA r = 16 on all linears, 20 steps of one row, cut at 896 tokens (the longest prompt has 803), held out
every third of the evaluation rows. A case that is in the result file already is not run again, so the run may be
stopped and begun again. On a CPU products and attention of fp16 numbers are computed in fp32 and
rounded. Writes ``benchmarks/results/DEVICE/quality.json``.
"""

import argparse
import contextlib
import gc
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from benchmarks.common import path_of, write
from cria_tricks.bench import tables
from cria_tricks.bench.case import stamp
from cria_tricks.hardware import this_device
from cria_tricks.load import starts
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run.train import train
from cria_tricks.techniques.lora import start_of

BASE = (
    "name=quality",
    "model=smollm2",
    "data.max_length=896",
    "tricks.attention=sdpa",
    "train.max_steps=20",
    "train.learning_rate=5e-4",
    "train.eval_steps=1000",
    "train.save_steps=1000",
    "train.save_minutes=0",
)
LORA = ("tricks.peft=lora",)
NUMBERS = {
    "fp32": LORA,
    "bf16": (*LORA, "tricks.precision=bf16"),
    "int8": (*LORA, "tricks.quantization=int8"),
    "fp4": (*LORA, "tricks.quantization=fp4"),
    "nf4": (*LORA, "tricks.quantization=nf4"),
    "nf4 + double": (*LORA, "tricks.quantization=nf4", "tricks.double_quantization=true"),
    "nf4 + loftq": (*LORA, "tricks.quantization=nf4", "lora.init=loftq"),
    "adamw_8bit": (*LORA, "tricks.optimizer=adamw_8bit"),
    "bf16 + nf4": (*LORA, "tricks.precision=bf16", "tricks.quantization=nf4"),
    "bf16 + nf4 + lean": (*LORA, "tricks.precision=bf16", "tricks.quantization=nf4", "tricks.lean_preparation=true"),
    "fp16": (*LORA, "tricks.precision=fp16"),
    "fp16 + nf4": (*LORA, "tricks.precision=fp16", "tricks.quantization=nf4"),
    "fp16 + nf4 + lean": (*LORA, "tricks.precision=fp16", "tricks.quantization=nf4", "tricks.lean_preparation=true"),
}
"""What changes the numbers; each against fp32, lean and LoftQ's start against the same without."""
WHAT_TRAINS = {
    "dora": (*LORA, "lora.dora=true"),
    "rslora": (*LORA, "lora.rslora=true"),
    "prompt_tuning": ("tricks.peft=prompt_tuning", "train.learning_rate=3e-2"),
    "head": ("tricks.peft=head",),
    "side_network": ("tricks.peft=side_network",),
}
"""What trains; LoRA is the case fp32. A prompt has its own learning rate, as its 9,216 numbers need one."""
CONTROL = "nf4 + loftq, shuffled"
"""LoftQ's start, made of rounding errors whose rows were shuffled: as long, but no repair. What it gains over NF4 comes
from starting away from zero."""
CASES = NUMBERS | WHAT_TRAINS | {CONTROL: NUMBERS["nf4 + loftq"]}


class RoundedProducts(TorchDispatchMode):
    """Compute products and attention of fp16 numbers in fp32 and round the results, as a tensor core does.

    A CPU without fp16 units takes 20 times as long for nearly the same numbers.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def is_half(leaf: Any) -> bool:
            return isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float16

        given = (args, kwargs or {})
        if func not in PRODUCTS or not any(map(is_half, tree_leaves(given))):
            return func(*given[0], **given[1])
        args, kwargs = tree_map(lambda leaf: leaf.float() if is_half(leaf) else leaf, given)
        found = func(*args, **kwargs)
        if func is ATTENTION:  # its second result, the logarithm of each row's sum, is fp32 in any case
            return found[0].half(), *found[1:]
        return tree_map(torch.Tensor.half, found)


ATTENTION = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
ATTENTION_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.bmm.default,
    torch.ops.aten.addmm.default,
    ATTENTION,
    ATTENTION_BACKWARD,
}


@contextlib.contextmanager
def shuffled_errors() -> Iterator[None]:
    """Give LoftQ every rounding error with its rows in another order."""
    draw = torch.Generator().manual_seed(0)

    def start(error: torch.Tensor, r: int, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return start_of(error[torch.randperm(len(error), generator=draw)], r, scale)

    with mock.patch.object(starts, "start_of", start):
        yield


def run(case: str, seed: int, data: Path | None) -> dict[str, Any]:
    """Train one case with one seed; what it reached and what it took."""
    with tempfile.TemporaryDirectory() as folder:
        rows = []
        if data:
            held_out = Path(folder) / "eval.jsonl"
            held_out.write_text("\n".join((data / "kwanzaa_eval.jsonl").read_text().splitlines()[::3]))
            rows = [f"data.train={data / 'kwanzaa_train.jsonl'}", f"data.eval={held_out}"]
        recipe = with_settings(Recipe(), [*BASE, *rows, *CASES[case], f"train.seed={seed}"])
        imitated = this_device().kind == "cpu" and recipe.tricks.precision == "fp16"
        with contextlib.ExitStack() as stack:
            if imitated:
                stack.enter_context(RoundedProducts())
            if case == CONTROL:
                stack.enter_context(shuffled_errors())
            report = train(recipe, Path(folder) / "run")
    gc.collect()
    keys = ["eval_loss_before", "eval_loss_after", "train_loss"]
    if not imitated:  # fp32 copies of fp16 numbers are not what such a step takes
        keys.append("peak_bytes")
    return {key: report[key] for key in keys} | {
        "case": case,
        "seed": seed,
        "trainable": report["parameters"]["trainable"],
        "data": Path(report["data"]["train"]).name,
        "device": report["device"],
        "skipped_steps": report["skipped_steps"],
    }


def main() -> None:
    """Run what is missing, and show all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, help="folder with kwanzaa_train.jsonl and kwanzaa_eval.jsonl")
    parser.add_argument("--only", action="append", choices=CASES, help="cases; all when left out")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--show", action="store_true", help="run nothing")
    parser.add_argument("--results", type=Path, help="a folder other than benchmarks/results")
    chosen = parser.parse_args()
    path, console = path_of("quality", chosen.results), Console()
    runs = json.loads(path.read_text())["runs"] if path.is_file() else []
    rows = "kwanzaa_train.jsonl" if chosen.data else Recipe().data.train
    if not chosen.show and (others := {r["data"] for r in runs if rows not in r["data"]}):
        parser.error(f"{path} holds runs on {', '.join(others)}, not on {rows}; name another folder with --results")
    done = {(r["case"], r["seed"]) for r in runs}
    for seed in range(0 if chosen.show else chosen.seeds):
        for case in chosen.only or CASES:
            if (case, seed) not in done:
                found = run(case, seed, chosen.data)
                runs.append(found)
                runs.sort(key=lambda made: (made["seed"], [*CASES].index(made["case"])))
                write("quality", stamp(with_settings(Recipe(), BASE)) | {"runs": runs}, chosen.results)
                console.print(f"{case}, seed {seed}: {found['eval_loss_after']:.4f}", highlight=False)
    console.print(tables.quality(runs), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
