"""Figures that must stay as they are, to the last digit: what a step costs, and what each of several processes holds.

Hand-derived values and counts of real steps say elsewhere that the formulas are right. These say that nobody has
changed one without noticing, over more settings than can be derived by hand. A case is written as its own name, so the
files under ``tests/golden`` can be read alone. Seconds are rounded to ten digits, because Python 3.12 adds floats
otherwise than 3.11.

A change in ``tests/golden`` must be meant: say in the commit why the figures are others now.

Use:
    python -m tests.figures    (write all of them anew)
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cria_tricks.bill.fsdp import sizes
from cria_tricks.hardware.cards import CARDS, FLAVORS
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import STRATEGIES
from cria_tricks.predict.links import LINKS, compute_seconds, step_seconds
from cria_tricks.predict.per_process import per_process
from cria_tricks.recipe import Recipe
from cria_tricks.switches import folds
from tests.memory import cases

FOLDER = Path(__file__).parent / "golden"

# Model, card, rows x tokens: toggles as tests/memory/cases.py writes them, settings, and options of cost.step.
STEPS = (
    "smollm2 t4 1x512: ",
    "smollm2 t4 3x300: packing sdpa accumulate",
    "smollm2 l4 2x64: bf16 compile train.max_steps=3",
    "smollm2 a100 4x1024: bf16 flash accumulate offload",
    "smollm2 t4 1x512: head fp16 chunked share=0.25",
    "smollm2 t4 1x512: head",
    "smollm2 a10g 2x256: prompt prompt.tokens=7 sdpa",
    "smollm2 a10g 2x256: prompt prompt.tokens=7 sdpa checkpoint offload chunked share=0.5",
    "smollm2 l4 2x256: side side.blocks=3 sdpa bf16",
    "smollm2 l4 2x256: side side.blocks=3 sdpa bf16 checkpoint",
    "smollm2 t4 1x9: lora lora.r=3 offload",
    "tinyllama-1.1b l4 2x700: lora bf16 sdpa offload",
    "tinyllama-1.1b l4 2x700: lora bf16 sdpa offload checkpoint cards=3",
    "tinyllama-1.1b l4 1x700: lora fp16 int8 sdpa lora.target_modules=q_proj,up_proj",
    "tinyllama-1.1b t4 1x700: lora fp16 nf4 sdpa lora.target_modules=o_proj,down_proj checkpoint",
    "llama-3.2-1b t4 1x2048: lora fp16 nf4 double lean sdpa expand checkpoint chunked 8bit paged accumulate share=0.4",
    "llama-3.2-1b t4 1x2048: lora fp16 nf4 double sdpa checkpoint chunked 8bit accumulate cards=4",
    "llama-3.2-1b t4 1x2048: lora fp16 nf4 lean sdpa expand chunked tricks.gradient_checkpointing=5",
    "llama-3.2-1b t4 1x2048: lora fp16 nf4 lean sdpa expand chunked checkpoint keep",
    "llama-3.2-1b a100 2x1000: lora bf16 sdpa offload tricks.gradient_checkpointing=3 keep",
    "llama-3.2-1b t4 2x100: lora lora.dora=true lora.r=4 sdpa",
    "llama-3.2-1b t4 2x100: lora lora.dora=true lora.r=4 sdpa checkpoint lora.target_modules=all-linear",
    "llama-3.2-1b a100 8x128: lora bf16 flash compile lora.target_modules=k_proj",
    "qwen2.5-0.5b l4 4x333: lora bf16 lean nf4 sdpa lora.target_modules=gate_proj,v_proj",
    "qwen2.5-0.5b a10g 4x333: lora fp16 sdpa packing accumulate chunked share=0.01",
    "mistral-7b a100 1x4097: lora bf16 lean nf4 double sdpa checkpoint chunked",
    "mistral-7b a100 1x4096: lora bf16 int8 sdpa checkpoint 8bit",
    "mixtral-8x7b a100 1x1024: lora bf16 sdpa lora.target_modules=all-linear",
    "mixtral-8x7b a100 2x1024: lora bf16 nf4 double lean sdpa checkpoint lora.target_modules=up_proj,down_proj",
    "mixtral-8x7b a100 1x128: sdpa bf16 8bit",
)

# Model, strategy, processes, rows x tokens: toggles, settings, and options of per_process.
SHARED = (
    "smollm2 none 1 1x512: lora",
    "smollm2 ddp 2 2x256: accumulate sdpa",
    "smollm2 fsdp 2 1x256: ",
    "smollm2 fsdp 2 1x256: accumulate",
    "smollm2 fsdp 2 1x256: accumulate parallel.reduce=step",
    "tinyllama-1.1b fsdp 2 1x256: lora bf16 nf4 lean sdpa checkpoint chunked",
    "tinyllama-1.1b fsdp 4 1x256: bf16 sdpa accumulate",
    "smollm2 fsdp 7 1x256: lora lora.r=3 lora.dora=true accumulate sdpa",
    "smollm2 fsdp 7 2x2048: lora lora.r=3 accumulate sdpa",
    "smollm2 fsdp 2 1x64: head bf16 sdpa",
    "smollm2 fsdp 4 1x64: prompt prompt.tokens=5 sdpa",
    "smollm2 fsdp 4 1x64: side side.blocks=2 sdpa accumulate",
    "smollm2 fsdp 4 1x64: side side.blocks=2 sdpa checkpoint",
    "smollm2 fsdp 2 1x64: lora bf16 nf4 double sdpa checkpoint",
    "smollm2 fsdp 2 1x512: lora bf16 sdpa offload",
    "smollm2 fsdp 2 1x512: bf16 sdpa checkpoint offload accumulate",
    "qwen2.5-0.5b fsdp 8 1x256: lora bf16 sdpa chunked lora.target_modules=q_proj,up_proj",
    "qwen2.5-0.5b fsdp 3 4x256: bf16 sdpa checkpoint",
    "mixtral-8x7b fsdp 8 1x256: lora bf16 sdpa lora.target_modules=all-linear",
    "mixtral-8x7b fsdp 8 1x256: bf16 nf4 lora lean sdpa",
    "llama-3.2-1b tensor 4 1x256: lora bf16 sdpa accumulate",
    "llama-3.2-1b tensor 8 1x256: sdpa",
    "llama-3.2-1b ddp_tensor 4 1x256: lora fp16 accumulate",
    "llama-3.2-1b ddp_tensor 8 1x256: bf16 parallel.tensor_size=4",
    "llama-3.2-1b context 4 1x250: lora bf16 sdpa accumulate",
    "llama-3.2-1b context 8 2x4096: lora bf16 sdpa checkpoint chunked",
    "smollm2 pipeline 4 1x256: lora accumulate",
    "smollm2 pipeline 4 1x256: lora accumulate stage=0",
    "smollm2 pipeline 4 1x256: lora accumulate stage=3",
    "smollm2 pipeline 7 2x256: tricks.gradient_accumulation=2 stage=1",
    "smollm2 pipeline 7 2x256: tricks.gradient_accumulation=2 stage=2",
    "tinyllama-1.1b pipeline 3 1x256: lora bf16 accumulate stage=2",
    "tinyllama-1.1b model 4 1x256: lora fp16 stage=0",
    "tinyllama-1.1b model 4 1x256: lora fp16 stage=1",
    "tinyllama-1.1b model 4 1x256: lora fp16 stage=3",
    "smollm2 model 4 1x256: lora fp16 stage=3",
    "smollm2 ddp 2 1x512: lora chunked tokens=128 trained_tokens=40",
    "smollm2 model 2 1x512: lora tokens=128",
)

# Model, card, link, strategy: toggles and settings, and the overlap.
DOUBLINGS = (
    "llama-3.2-1b a100 nvlink_a100 ddp: lora bf16 sdpa accumulate",
    "llama-3.2-1b a100 nvlink_h100 fsdp: bf16 sdpa accumulate",
    "llama-3.2-1b a100 hdr ddp: bf16 sdpa accumulate overlap=0.5",
    "llama-3.2-1b l4 pcie4 tensor: lora bf16 sdpa",
    "llama-3.2-1b l4 pcie3 ddp: lora bf16 sdpa accumulate",
    "llama-3.2-1b a100 nvlink_a100 context: lora bf16 sdpa",
    "llama-3.2-1b a100 hdr pipeline: lora bf16 sdpa accumulate",
    "smollm2 t4 10gbe ddp: accumulate",
)


def read(case: str) -> tuple[Recipe, dict[str, Any]]:
    """A recipe of ``ROWSxTOKENS: toggles``, and the options among these, which have an = and no dot before it."""
    size, _, toggles = case.partition(":")
    rows, tokens = map(int, size.split()[-1].split("x"))
    words = toggles.split()
    given = [word for word in words if "=" in word and "." not in word.partition("=")[0]]
    options = {name: json.loads(value) for name, _, value in (word.partition("=") for word in given)}
    return cases.recipe(" ".join(word for word in words if word not in given), rows, tokens), options


def rounded(number: float) -> float:
    """To ten digits."""
    return float(f"{number:.10g}")


def of_step(case: str) -> dict[str, Any]:
    """Operations, bytes, bytes over the link, seconds and the reason of each part of a step."""
    model, card, *_ = case.split()
    recipe, options = read(case)
    if "share" in options:
        options["trained_share"] = options.pop("share")
    found = folds.time_of(recipe, find_shape(model), CARDS[card], **options)
    parts = {p.name: [p.flops, p.bytes, p.link_bytes, rounded(p.seconds), p.why] for p in found.parts}
    return {"tokens": found.tokens, "flops": found.flops, "seconds": rounded(found.seconds), **parts}


def of_process(case: str) -> dict[str, Any]:
    """Bytes at every moment, and the rows of the largest and of the last one."""
    model, strategy, processes, *_ = case.split()
    recipe, options = read(case)
    shape = find_shape(model)
    found = per_process(recipe, shape, cases.T4, strategy, int(processes), **options)
    figures = {f"moment: {moment.name}": moment.bytes for moment in found.moments}
    figures |= {f"peak: {line.name}": [line.bytes, line.why] for line in found.lines}
    figures |= {f"state: {line.name}": line.bytes for line in found.state}
    if strategy == "fsdp":
        of_collectives = sizes(found.step, int(processes))
        figures["gathered"] = {"blocks": of_collectives.blocks, **of_collectives.outside}
    return figures | {"state": found.state_bytes, "allocated": found.allocated_bytes, "needed": found.needed_bytes}


def of_doublings(case: str) -> dict[str, Any]:
    """Seconds of computing, of all calls, hidden ones, and of the step; then of each kind of call, by processes."""
    model, card, link, strategy, *_ = case.replace(":", " ").split()
    recipe, options = read("1x2048:" + case.partition(":")[2])
    shape = find_shape(model)
    found = {}
    for processes in (2, 4, 8):
        calls = STRATEGIES[strategy].traffic(recipe, shape, processes)
        compute = compute_seconds(recipe, shape, CARDS[card], strategy, processes)
        step = step_seconds(compute, calls, LINKS[link], **options)
        whole = map(rounded, (step.compute, step.communication, step.hidden, step.seconds))
        found[str(processes)] = [*whole, [[name, rounded(seconds)] for name, seconds in step.calls]]
    return found


TABLES = {"cards": CARDS, "flavors": FLAVORS, "links": LINKS}


def of_table(name: str) -> dict[str, Any]:
    """What machines, cards and links are: facts, and none of them may change by itself."""
    return {key: asdict(entry) for key, entry in TABLES[name].items()}


FILES: dict[str, tuple[Callable[[str], Any], Sequence[str]]] = {
    "steps": (of_step, STEPS),
    "processes": (of_process, SHARED),
    "doublings": (of_doublings, DOUBLINGS),
    "tables": (of_table, tuple(TABLES)),
}
"""How each file's figures are computed, and for which cases."""


def kept(name: str) -> dict[str, Any]:
    """What a file says."""
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def computed(name: str, case: str) -> dict[str, Any]:
    """What it should say of a case, as JSON gives it back."""
    return json.loads(json.dumps(FILES[name][0](case)))


def main() -> None:
    """Write the files anew, a figure or a row of them on a line."""
    FOLDER.mkdir(exist_ok=True)
    for name, (_, known) in FILES.items():
        parts = []
        for case in known:
            lines = (f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in computed(name, case).items())
            parts.append(f"{json.dumps(case)}: {{\n" + ",\n".join(lines) + "\n}")
        (FOLDER / f"{name}.json").write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
