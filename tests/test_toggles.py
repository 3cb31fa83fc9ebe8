"""Every toggle alone, and every pair that may be combined, trains; the other pairs say why not.

A two-layer Llama, one fixed batch, dropout 0, four real optimizer steps on a CPU. Steps that the fp16 loss scaler
skips update nothing and are counted apart. The sets that train are a covering array: larger sets, of which at least one
has each pair. ``CRIA_ALL=1`` trains every pair by itself instead.
"""

import functools
import itertools
import math
import os

import pytest
import torch

from cria_tricks.common.errors import BadInput
from cria_tricks.load import overlapped_offload
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan
from cria_tricks.switches import TECHNIQUES, needed
from cria_tricks.techniques import compile
from tests.helpers import train
from tests.sweeps import toggle

SWITCHES = [switch.replace("=8", "=2") for trick in TECHNIQUES for switch in trick.TECHNIQUE.switches]
SWITCHES[SWITCHES.index("tiled_mlp=true")] = "tiled_mlp=8"  # tiles as long as the model is wide would never be full
SWITCHES.append("gradient_checkpointing=1")  # the first of two blocks
STEPS = 4
OVERLAPPED = "activation_offload=overlapped"

ALONE = [(switch,) for switch in SWITCHES]
PAIRS = [pair for pair in itertools.combinations(SWITCHES, 2) if pair[0].split("=")[0] != pair[1].split("=")[0]]


def sets(switches: tuple[str, ...]) -> list[str]:
    return [setting for switch in switches for setting in toggle(switch)]


@functools.cache
def planned(switches: tuple[str, ...]) -> Plan | str:
    """The plan of a set, or why it is refused."""
    try:
        return resolve(with_settings(Recipe(), sets(switches)))
    except BadInput as error:
        return str(error)


def refusal(switches: tuple[str, ...]) -> str:
    found = planned(switches)
    return found if isinstance(found, str) else ""


WORKING, REFUSED = [], []
for combination in ALONE + PAIRS:
    (REFUSED if refusal(combination) else WORKING).append(combination)


def field(switch: str) -> str:
    return switch.partition("=")[0]


def over_what_it_needs(switches: tuple[str, ...]) -> tuple[str, ...]:
    """A set with all that its switches act on, but for fields that it has already."""
    whole = switches
    for switch in switches:
        for name, value in needed(switch.replace("=8", "=true")):
            if name not in map(field, whole):
                whole = (*whole, f"{name}={value}")
    return whole


for combination in REFUSED:
    whole = over_what_it_needs(combination)
    WORKING += [larger for larger in (whole, (*whole, "peft=lora")) if not refusal(larger)][:1]


def warnings_of(switches: tuple[str, ...]) -> frozenset[str] | None:
    """What the plan of a set warns of; None if the set is refused."""
    found = planned(switches)
    return None if isinstance(found, str) else frozenset(found.warnings)


def covers(whole: tuple[str, ...], part: tuple[str, ...]) -> bool:
    """Whether a set has all of a smaller one, and no switch of that loses its effect beside the others."""
    about = {warning for warning in warnings_of(whole) if any(field(switch) in warning for switch in part)}
    return set(part) <= set(whole) and about <= warnings_of(part)


def covering_array() -> list[tuple[str, ...]]:
    """Sets that cover all that works, greedily: each takes every switch by which it covers more."""
    found, missing = [], list(WORKING)
    while missing:
        whole = missing[0]
        for switch in sorted(SWITCHES, key=lambda switch: -sum(switch in part for part in missing)):
            larger = (*whole, switch)
            if field(switch) in map(field, whole) or warnings_of(larger) is None:
                continue
            if sum(covers(larger, part) for part in missing) > sum(covers(whole, part) for part in missing):
                whole = larger
        found.append(whole)
        missing = [part for part in missing if not covers(whole, part)]
    return found


TRAINED = WORKING if os.environ.get("CRIA_ALL") else covering_array()


@pytest.mark.parametrize("switches", TRAINED, ids="+".join)
def test_trains_to_a_lower_loss(switches, tiny_model, rows, tmp_path, monkeypatch):
    monkeypatch.setattr(compile, "BACKEND", "eager")  # captured and run; kernels take longer, and test_compile has them
    monkeypatch.setattr(overlapped_offload, "SMALL", 0)  # so that the inputs of these blocks travel
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


def test_every_set_that_works_is_part_of_one_that_trains():
    assert [part for part in WORKING if not any(covers(whole, part) for whole in TRAINED)] == []
    assert not covers(("fused_lora=true", "peft=lora", "peft=head"), ("fused_lora=true", "peft=lora", "compile=true"))


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
            "gradient_accumulation=2" in switches and any(field(one) == "optimizer_in_backward" for one in switches),
            "keep_attention=true" in switches,  # its pairs lack checkpointing, sdpa or both
            {"compile=true", "tiled_mlp=8"} <= set(switches),
            {OVERLAPPED, "layer_by_layer=true"} <= set(switches),
            any(field(one) == "stream_layers" for one in switches),  # its pairs lack checkpointing, an adapter or both
            OVERLAPPED in switches,  # its pairs lack checkpointing, and compile goes with none
            {"attention=flash_attention_2", "fused_blocks=triton"} & set(switches),  # no CUDA card here
        )
        assert any(reasons), switches
    print(f"{len(WORKING)} combinations train, {len(REFUSED)} are refused")
