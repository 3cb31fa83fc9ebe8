"""Each exact toggle alone, and all of them together, keep the loss trajectory of 20 steps; ``-s`` prints the table.

A two-layer Llama with LoRA on a CPU, dropout 0. Every step sees all eight documents, however they are cut into
micro-batches or packed into rows, so the trajectories can be compared step by step.
"""

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.tricks import TRICKS
from tests.helpers import train
from tests.tolerances import TRAJECTORY

STEPS = 20
LORA = ["tricks.peft=lora", "lora.r=8", "train.learning_rate=1e-2", "train.save_steps=1000", "data.max_length=64"]
LORA += [f"train.max_steps={STEPS}", "train.max_grad_norm=1000"]
ALL_AT_ONCE, IN_WINDOWS, ONE_BY_ONE = "train.batch_size=8", "train.batch_size=3", "train.batch_size=1"


def exact_toggles() -> dict[str, list[str]]:
    """Every switch of a trick that claims to be exact, but for those that this machine refuses."""
    found = {}
    for trick in TRICKS:
        for switch in trick.SWITCHES if trick.CLAIM.startswith("exact") else ():
            settings = [f"tricks.{switch}"]
            if switch == "expand_kv=true":
                settings.append("tricks.attention=sdpa")  # what it acts on
            if switch == "gradient_accumulation=8":
                settings = ["tricks.gradient_accumulation=3"]  # windows of 3, 3 and 2 documents
            try:
                resolve(with_settings(Recipe(), [*LORA, *settings]))
            except BadInput:
                continue
            found[switch] = settings
    return found


ALONE = exact_toggles()


@pytest.fixture(scope="module")
def documents() -> list[dict[str, list[int]]]:
    draw = torch.Generator().manual_seed(5)
    made = []
    for length, prompt in ((24, 6), (17, 3), (9, 2), (30, 20), (13, 1), (28, 9), (40, 11), (6, 2)):
        ids = torch.randint(3, 512, (length,), generator=draw).tolist()
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made


def losses(settings: list[str], tiny_model, documents, folder) -> torch.Tensor:
    torch._dynamo.reset()
    run, _ = train(tiny_model, documents, folder, *LORA, *settings)
    assert len({entry["trained_tokens"] for entry in run.training}) == 1, "every step sees every document"
    return torch.tensor([entry["loss"] for entry in run.training], dtype=torch.float64)


def test_exact_toggles_keep_the_trajectory(tiny_model, documents, tmp_path):
    plain = losses([ALL_AT_ONCE], tiny_model, documents, tmp_path / "plain")
    assert plain[-1] < plain[0] - 1, "it learns"
    together = [setting for settings in ALONE.values() for setting in settings if "accumulation" not in setting]
    cases = {switch: [ALL_AT_ONCE, *settings] for switch, settings in ALONE.items()}
    cases["gradient_accumulation=8"][0] = IN_WINDOWS
    for left_out in ("fused", "compile"):  # torch.compile fuses blocks itself and refuses ours
        others = [setting for setting in together if left_out not in setting]
        cases[f"all but {left_out}"] = [ONE_BY_ONE, "tricks.gradient_accumulation=8", *others]
    claims = {switch: trick.CLAIM for trick in TRICKS for switch in trick.SWITCHES}
    print(f"\n{len(cases)} trajectories of {STEPS} steps, loss {plain[0]:.4f} -> {plain[-1]:.4f}")
    apart = {}
    for name, settings in cases.items():
        difference = (losses(settings, tiny_model, documents, tmp_path / name) - plain).abs()
        apart[name] = difference.max().item()
        claim = claims.get(name, "")
        print(f"{name:<32} largest {difference.max():.1e}, mean {difference.mean():.1e}   {claim}", flush=True)
    for name, most in apart.items():
        assert most <= TRAJECTORY, name
    for name in ("gradient_checkpointing=true", "activation_offload=true", "paged_optimizer=true"):
        assert apart[name] == 0, f"{name} claims every bit"
    assert {"gradient_accumulation=8", "packing=true", "chunked_loss=true", "compile=true"} <= apart.keys()
