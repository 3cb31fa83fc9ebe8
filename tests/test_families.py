"""A tiny twin of each family, with random weights, trains on a CPU with every toggle that applies.

A twin has two blocks, and all that makes its family different: norms behind, joined matrices, windows, own factors.
``CRIA_ALL=1`` trains every toggle and every pair of each family; otherwise a seeded sample of them is trained.
"""

import collections
import itertools
import math
import os
import random

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cria_tricks.common.errors import BadInput
from cria_tricks.load.refusals import refuse
from cria_tricks.models.configs import KINDS
from cria_tricks.models.shape import facts_of, shape_of
from cria_tricks.predict.model_settings import needed
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.switches import TECHNIQUES, fused_blocks
from cria_tricks.techniques import compile
from tests.helpers import train
from tests.sweeps import toggle

SMALL = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 96, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
OF_THE_KIND = {
    "gemma3_text": {"sliding_window": 8},
    "mistral": {"sliding_window": 8},
    "granite": {"embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0},
    "olmo2": {"num_key_value_heads": 4},
    "qwen2": {"head_dim": None},
    "mixtral": {"num_local_experts": 2, "num_experts_per_tok": 1, "sliding_window": None},
}
SWITCHES = [switch.replace("=8", "=2") for trick in TECHNIQUES for switch in trick.TECHNIQUE.switches]
SWITCHES[SWITCHES.index("tiled_mlp=true")] = "tiled_mlp=8"  # its rows are short
PAIRS = [pair for pair in itertools.combinations(SWITCHES, 2) if pair[0].split("=")[0] != pair[1].split("=")[0]]


def config_of(kind: str) -> dict:
    fields = {"model_type": kind, **SMALL, **OF_THE_KIND.get(kind, {})}
    return {name: value for name, value in fields.items() if value is not None}


def settings_of(kind: str, switches: tuple[str, ...]) -> list[str]:
    """The settings of some switches, with what quantization and the family need; empty if they are refused."""
    shape = shape_of(config_of(kind), kind)
    sets = [setting for switch in switches for setting in toggle(switch)]
    if not any(switch.startswith("peft=") for switch in switches):
        sets.append("tricks.peft=lora")
    recipe = with_settings(Recipe(), sets)
    sets += needed(recipe, shape, [s for s in sets if s == "tricks.chunked_loss=true"])
    try:
        refuse(resolve(with_settings(Recipe(), sets)), facts_of(shape), 1)
    except BadInput:
        return []
    return sets


def all_that_work() -> list[tuple[str, tuple[str, ...]]]:
    every = [(kind, switches) for kind in KINDS for switches in [(), *((switch,) for switch in SWITCHES), *PAIRS]]
    return [one for one in every if settings_of(*one)]


def a_sample() -> list[tuple[str, tuple[str, ...]]]:
    """Of each family LoRA alone, some toggles and pairs; first those that the families before it have least often."""
    draw, found = random.Random(28), []
    for sets, many in (([()], 1), ([(switch,) for switch in SWITCHES], 3), (PAIRS, 2)):
        trained = collections.Counter()
        for kind in KINDS:
            shuffled = draw.sample(sets, len(sets))
            rarest = sorted(shuffled, key=lambda switches: sum(trained[switch] for switch in switches))
            working = (switches for switches in rarest if settings_of(kind, switches))
            for switches in itertools.islice(working, many):
                found.append((kind, switches))
                trained.update(switches)
    return found


CHOSEN = all_that_work() if os.environ.get("CRIA_ALL") else a_sample()


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A folder for each family."""
    folder = tmp_path_factory.mktemp("twins")
    for kind in KINDS:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config_of(kind)))
        model.save_pretrained(folder / kind)
    return folder


ROWS = [{"input_ids": [1, *range(5 + i, 23 + i), 2], "labels": [1, *range(5 + i, 23 + i), 2]} for i in range(2)]


@pytest.mark.parametrize(
    ("kind", "switches"), CHOSEN, ids=lambda value: value if isinstance(value, str) else "+".join(value) or "lora"
)
def test_a_tiny_twin_of_every_family_trains(kind, switches, twins, tmp_path, monkeypatch):
    monkeypatch.setattr(compile, "BACKEND", "eager")
    torch._dynamo.reset()
    sets = settings_of(kind, switches)
    rate = "1e-1" if "tricks.peft=prompt_tuning" in sets else "2e-2"
    batch = 1 if "tricks.gradient_accumulation=2" in sets else 2
    # A loss scaler halves its scale at each step that overflows, and OLMo 2's twin needs four of these.
    steps = 8 if "tricks.precision=fp16" in sets else 4
    more = [f"train.batch_size={batch}", f"train.learning_rate={rate}", "train.save_steps=1000"]
    more.append(f"train.max_steps={steps}")
    if "side.blocks" not in str(sets):
        more.append("side.blocks=1")
    run, _ = train(twins / kind, ROWS, tmp_path, *sets, *more, pad_id=0)
    losses = [entry["loss"] for entry in run.training]
    assert len(losses) == steps
    assert all(math.isfinite(loss) for loss in losses)
    if not run.skipped_steps:
        assert losses[-1] < losses[0]


def test_every_family_trains_with_most_toggles():
    """What a family refuses: its blocks fused where they compute something else, experts in tiles, the chunked loss
    where the head does more, torch's attention where scores are capped."""
    alone = {kind: {switch for switch in SWITCHES if settings_of(kind, (switch,))} for kind in KINDS}
    assert set().union(*alone.values()) == {switches[0] for _, switches in CHOSEN if len(switches) == 1}
    usual = alone["llama"]
    missing = {kind: usual - found for kind, found in alone.items()}
    not_fused = {kind for kind, refused in missing.items() if "fused_blocks=true" in refused}
    assert not_fused == set(KINDS) - set(fused_blocks.KINDS)
    others = {kind: refused - {"fused_blocks=true", "tiled_mlp=8"} for kind, refused in missing.items()}
    assert [kind for kind, refused in missing.items() if "tiled_mlp=8" in refused] == ["mixtral"]
    assert {kind for kind, refused in others.items() if refused} == {"gemma2", "granite"}
    assert others["granite"] == {"chunked_loss=true"}
