"""The losses of 20 optimizer steps with each exact toggle, beside those of the same steps without it.

    python -m tests.trajectories    (measure, and write the table of docs/benchmarks.md; two minutes on two cores)

A two-layer Llama with LoRA on a CPU, dropout 0. Every step sees all eight documents, however they are cut into
micro-batches or packed into rows, so the trajectories can be compared step by step.
"""

import tempfile
from pathlib import Path
from typing import Any

import torch

from cria_tricks.bench.case import stamp
from cria_tricks.common.errors import BadInput
from cria_tricks.load import overlapped_offload
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import TECHNIQUES, needed
from tests.helpers import tiny_llama, train
from tests.sweeps import toggle

STEPS = 20
LORA = ["tricks.peft=lora", "lora.r=8", "train.learning_rate=1e-2", "train.save_steps=1000", "data.max_length=64"]
LORA += [f"train.max_steps={STEPS}", "train.max_grad_norm=1000"]
ALL_AT_ONCE, IN_WINDOWS, ONE_BY_ONE = "train.batch_size=8", "train.batch_size=3", "train.batch_size=1"


def exact_toggles() -> dict[str, list[str]]:
    """Every switch of a trick that claims to be exact, but for those that this machine refuses."""
    found = {}
    for trick in TECHNIQUES:
        for switch in trick.TECHNIQUE.switches if trick.TECHNIQUE.claim.startswith("exact") else ():
            settings = toggle(switch) + [f"tricks.{name}={value}" for name, value in needed(switch)]
            if switch == "tiled_mlp=true":
                settings = ["tricks.tiled_mlp=16"]  # shorter than most documents
            # Windows of 3, 3 and 2 documents.
            windows = "tricks.gradient_accumulation=3"
            settings = [windows if one.startswith("tricks.gradient_accumulation=") else one for one in settings]
            try:
                resolve(with_settings(Recipe(), [*LORA, *settings]))
            except BadInput:
                continue
            found[switch] = settings
    return found


def documents() -> list[dict[str, list[int]]]:
    """Eight documents of 6 to 40 random tokens, each with a prompt that is not trained."""
    draw = torch.Generator().manual_seed(5)
    made = []
    for length, prompt in ((24, 6), (17, 3), (9, 2), (30, 20), (13, 1), (28, 9), (40, 11), (6, 2)):
        ids = torch.randint(3, 512, (length,), generator=draw).tolist()
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made


def losses(settings: list[str], model: Path, folder: Path) -> torch.Tensor:
    """Train, and return the loss of each step."""
    torch._dynamo.reset()
    run, _ = train(model, documents(), folder, *LORA, *settings)
    assert len({entry["trained_tokens"] for entry in run.training}) == 1, "every step sees every document"
    return torch.tensor([entry["loss"] for entry in run.training], dtype=torch.float64)


def every_run() -> dict[str, list[str]]:
    """The settings of each run: every exact toggle alone, and as many together as can be."""
    alone = exact_toggles()
    # Accumulation is another window, steps in the backward pass know no window, the copies of an offload either overlap
    # or do not, and streamed blocks are not compiled.
    apart = ("gradient_accumulation", "optimizer_in_backward", "activation_offload=overlapped", "stream", "layer_by")
    together = [setting for switch, settings in alone.items() if not switch.startswith(apart) for setting in settings]
    runs = {switch: [ALL_AT_ONCE, *settings] for switch, settings in alone.items()}
    for in_windows in ("gradient_accumulation=8", "layer_by_layer=true"):
        runs[in_windows][0] = IN_WINDOWS
    for left_out in (("fused", "tiled", "keep"), ("compile",)):  # torch.compile changes blocks itself and refuses ours
        others = [setting for setting in together if not any(word in setting for word in left_out)]
        runs[f"all but {' and '.join(left_out)}"] = [ONE_BY_ONE, "tricks.gradient_accumulation=8", *others]
    return runs


def measure(model: Path, folder: Path, runs: dict[str, list[str]]) -> dict[str, Any]:
    """Train once without a toggle, and once for each of these runs.

    Returns:
        ``plain``, the losses without a toggle; ``cases``, by name: the largest and the mean difference of a step's loss
        from that, and what the technique claims.
    """
    overlapped_offload.SMALL = 0  # so that inputs as small as these travel
    plain = losses([ALL_AT_ONCE], model, folder / "plain")
    claims = {switch: trick.TECHNIQUE.claim for trick in TECHNIQUES for switch in trick.TECHNIQUE.switches}
    cases = {}
    for name, settings in runs.items():
        difference = (losses(settings, model, folder / name) - plain).abs()
        largest, mean = difference.max().item(), difference.mean().item()
        cases[name] = {"largest": largest, "mean": mean, "claim": claims.get(name, "")}
        print(f"{name:<32} largest {largest:.1e}, mean {mean:.1e}   {claims.get(name, '')}", flush=True)
    return {"plain": plain.tolist(), "cases": cases}


if __name__ == "__main__":
    from benchmarks import common
    from tools import figures

    with tempfile.TemporaryDirectory() as name:
        found = measure(tiny_llama(Path(name) / "model"), Path(name), every_run())
    print(f"-> {common.write('trajectories', stamp() | found)}")
    figures.main()
