"""Choices of the page "Will it fit?" at random, and what ``cria plan --json`` says of them."""

import json
import os
import random
from pathlib import Path

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.gpus import GPUS
from cria_tricks.models.catalogue import CATALOGUE, CONFIGS
from cria_tricks.run import api
from tools.fit.answers import READ
from tools.fit.fields import BY_NAME, CONFIG, MODELS, OF_SETTING, OWN, SWITCHES, default

SEED, MANY, PASTED = 35, 500, 20
CARDS = (*GPUS, "8GiB:8.6", "11GB", "24000MiB:7.5", "a100-40")
NUMBERS = {
    "batch": (1, 1, 2, 3, 8, 17),
    "tokens": (8, 77, 512, 2048, 8192, 999_999),
    "gradient_accumulation": (1, 2, 8),
    "rows": (1, 107, 4321),
    "epochs": (0.5, 1, 3),
    "r": (4, 16, 64),
    "max_grad_norm": (0, 1),
}


def choices(number: int = MANY, seed: int = SEED) -> list[dict[str, str]]:
    """Draw models, cards, numbers and switches; six of seven switches are those of the first choice."""
    draw = random.Random(seed)
    return [_choice(draw, draw.choice(MODELS)) for _ in range(number)]


def _choice(draw: random.Random, model: str) -> dict[str, str]:
    found = default() | {"model": model, "card": draw.choice(CARDS), "set": OWN}
    found |= {name: str(draw.choice(values)) for name, values in NUMBERS.items()}
    found["targets"] = draw.choice(("all", "all", "attention", "mlp", "qv"))
    for name in SWITCHES:
        if draw.random() < 1 / 7:
            found[name] = draw.choice(BY_NAME[name].values)
    if draw.random() < 0.2:
        found["gradient_checkpointing"] = str(draw.randrange(1, 12))
    return found


def pasted(number: int = PASTED, seed: int = SEED) -> list[dict[str, str]]:
    """Draw configs: a published one with other widths, as it would be pasted, with fields that nobody reads."""
    draw, found = random.Random(seed), []
    for name in draw.choices(list(CATALOGUE), k=number):
        config = dict(CONFIGS[name])
        config["num_hidden_layers"] = draw.randrange(2, 40)
        config["intermediate_size"] = 256 * draw.randrange(4, 60)
        config["torch_dtype"] = "bfloat16"
        choice = _choice(draw, CONFIG)
        found.append(choice | {"config": json.dumps(config, indent=2)})
    return found


def reduced(choice: dict[str, str]) -> dict[str, str]:
    """The choice as a link has it, with a config of the fields that are read."""
    if choice["model"] != CONFIG:
        return choice
    config = {name: value for name, value in json.loads(choice["config"]).items() if name in READ}
    return choice | {"config": json.dumps(config, separators=(",", ":"))}


def planned(choice: dict[str, str], folder: Path) -> dict[str, object]:
    """What ``cria plan --json`` says; ``refused`` is the line that it ends with."""
    settings = [f"{setting}={choice[name]}" for setting, name in OF_SETTING.items() if name != "targets"]
    modules = {"attention": "q_proj,k_proj,v_proj,o_proj", "mlp": "gate_proj,up_proj,down_proj", "qv": "q_proj,v_proj"}
    if "phi" in choice["model"] + choice["config"]:  # which joins some of them
        modules |= {"attention": "qkv_proj,o_proj", "mlp": "gate_up_proj,down_proj"}
    if choice["targets"] in modules:
        settings.append(f"lora.target_modules={modules[choice['targets']]}")
    before = Path.cwd()
    os.chdir(folder)  # a pasted config is called config.json, and so is this one
    (folder / CONFIG).write_text(choice["config"])
    try:
        found = api.plan(
            "qlora",
            gpu=choice["card"],
            model=choice["model"],
            settings=settings,
            rows=int(choice["rows"]),
            rows_full=True,
            as_is=choice["set"] == OWN,
        ).to_dict()
    except BadInput as error:
        return {"refused": str(error)}
    finally:
        os.chdir(before)
    return dict(json.loads(json.dumps(found)))


def differences(found: dict[str, object], plan: dict[str, object]) -> list[str]:
    """Name the fields of an answer that are not those of ``cria plan``: all of them must be there, seconds to 1e-9."""
    left_out = {"alone", "removed", "ladder", "front", "longest", "fit"}
    names = set(plan) - left_out if "refused" not in plan else {"refused"}
    return sorted(name for name in names if not same(name, found.get(name), plan[name]))


def same(name: str, one: object, other: object) -> bool:
    """Whether two values are the same; floats, which are seconds and prices, to 1e-9."""
    if isinstance(one, float) and isinstance(other, float | int):
        return abs(one - other) <= 1e-9 * abs(other)
    if isinstance(one, int) and isinstance(other, int) and abs(other) > 2**53:
        return float(one) == float(other)  # petabytes, where JavaScript has no whole numbers any more
    if isinstance(one, dict) and isinstance(other, dict):
        return set(one) == set(other) and all(same(key, one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list):
        if name == "suggestions":  # the page offers several switches together behind a button
            other = other[: len(one)]
        # cria plan adds LoRA's targets for a model by itself, and says so; on the page they are a field.
        other = [each for each in other if not (name == "warnings" and "needs other settings than this" in str(each))]
        return len(one) == len(other) and all(same(name, *both) for both in zip(one, other, strict=True))
    return one == other
