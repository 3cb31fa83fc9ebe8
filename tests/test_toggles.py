"""Every toggle alone, and every pair that may be combined, trains; the other pairs say why not.

A two-layer Llama, one fixed batch, dropout 0, four real optimizer steps on a CPU. Steps that the fp16 loss scaler
skips update nothing and are counted apart.
"""

import itertools
import math

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.tricks import TRICKS, compile
from tests.helpers import train

SWITCHES = [switch.replace("=8", "=2") for trick in TRICKS for switch in trick.SWITCHES]
SWITCHES.append("gradient_checkpointing=1")  # the first of two blocks
STEPS = 4

ALONE = [(switch,) for switch in SWITCHES]
PAIRS = [pair for pair in itertools.combinations(SWITCHES, 2) if pair[0].split("=")[0] != pair[1].split("=")[0]]


def sets(switches: tuple[str, ...]) -> list[str]:
    return [f"tricks.{switch}" for switch in switches]


def refusal(switches: tuple[str, ...]) -> str:
    try:
        resolve(with_settings(Recipe(), sets(switches)))
    except BadInput as error:
        return str(error)
    return ""


WORKING, REFUSED = [], []
for combination in ALONE + PAIRS:
    (REFUSED if refusal(combination) else WORKING).append(combination)
# A pair that is refused for want of something to train is tried again over LoRA.
over_lora = [(*pair, "peft=lora") for pair in REFUSED if not any(switch.startswith("peft=") for switch in pair)]
WORKING += [combination for combination in over_lora if not refusal(combination)]


def over_what_attention_needs(switches: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Kept attention needs checkpointed blocks and a kernel, and the other toggle of a pair may need LoRA."""
    found = []
    for blocks in ("gradient_checkpointing=1", "gradient_checkpointing=true"):
        whole = switches
        for need in (blocks, "attention=sdpa"):
            if not any(switch.split("=")[0] == need.split("=")[0] for switch in whole):
                whole = (*whole, need)
        found += [whole, (*whole, "peft=lora")]
    return found


for combination in REFUSED:
    if "keep_attention=true" in combination:
        WORKING += [whole for whole in over_what_attention_needs(combination) if not refusal(whole)][:1]


@pytest.mark.parametrize("switches", WORKING, ids="+".join)
def test_trains_to_a_lower_loss(switches, tiny_model, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(compile, "BACKEND", "eager")  # captured and run; kernels take longer, and test_compile has them
    torch._dynamo.reset()
    batch = rows[:2]  # the same two rows are the whole set, so every step sees them
    accumulated = "gradient_accumulation=2" in switches
    # Two rows at once, or one by one in a window of two: equal tokens per optimizer step.
    rate = "1e-1" if "peft=prompt_tuning" in switches else "5e-3"  # 16 vectors alone have to move it
    shape = [f"train.batch_size={1 if accumulated else 2}", f"train.learning_rate={rate}", "train.save_steps=1000"]
    steps = STEPS + 2 if "precision=fp16" in switches else STEPS  # two that the scaler may skip
    run, _ = train(tiny_model, batch, tmp_path, *sets(switches), *shape, f"train.max_steps={steps}")
    losses = [entry["loss"] for entry in run.training]
    assert run.steps - run.skipped_steps >= STEPS
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0] - 0.05
    assert all(entry["trained_tokens"] == 18 + 14 for entry in run.training)


@pytest.mark.parametrize("switches", REFUSED, ids="+".join)
def test_says_why_not(switches):
    why = refusal(switches)
    assert any(switch.split("=")[0] in why for switch in switches), "it names the toggle"
    assert "; " in why, "and what to do instead"
    assert "\n" not in why


def test_only_what_cannot_work_is_refused():
    """The list of refusals, whole: a new one needs a reason here."""
    for switches in REFUSED:
        quantised = any(switch.startswith("quantization=") for switch in switches)
        adapter = any(switch.startswith("peft=") for switch in switches)
        frozen_head = any(switch in ("peft=lora", "peft=side_network") for switch in switches)
        reasons = (
            quantised and not adapter,
            "chunked_loss=true" in switches and not frozen_head,
            {"packing=true", "peft=prompt_tuning"} <= set(switches),
            {"gradient_checkpointing=1", "peft=side_network"} <= set(switches),
            "keep_attention=true" in switches,  # its pairs lack checkpointing, sdpa or both; see above
            "attention=flash_attention_2" in switches,  # no CUDA card here
        )
        assert any(reasons), switches
    print(f"{len(WORKING)} combinations train, {len(REFUSED)} are refused")
