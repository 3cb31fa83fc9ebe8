"""Answer for a choice of the page "Will it fit?", with the functions of ``cria plan`` and nothing else.

The page runs this file in the browser, and a test runs it here and compares it with ``cria plan --json``.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.data.lengths import Lengths, full
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import Gpu
from cria_tricks.hardware.gpus import find_gpu
from cria_tricks.models import configs
from cria_tricks.models.shape import BESIDE_HEAD, Shape, find_shape, shape_of
from cria_tricks.predict import plan_data
from cria_tricks.predict.model_settings import lora_targets, needed
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, with_settings
from tools.fit.fields import BY_NAME, CONFIG, FIELDS, NUMBERS, OF_SETTING, SWITCHES, as_text

Choice = Mapping[str, str]

CONFIG_FIELDS = {"layers": "num_hidden_layers", "width": "hidden_size", "heads": "num_attention_heads",
                 "kv_heads": "num_key_value_heads", "inner": "intermediate_size",
                 "vocabulary": "vocab_size"}  # fmt: skip
"""The numbers of a model, and their names in ``config.json``."""


READ = (
    "model_type", "architectures", "text_config", *CONFIG_FIELDS.values(), "head_dim", "tie_word_embeddings",
    "attention_bias", "mlp_bias", "num_local_experts", "num_experts_per_tok", "sliding_window", "use_sliding_window",
    "max_window_layers", "max_position_embeddings", "original_max_position_embeddings", "rope_parameters",
    "rope_scaling", "attn_logit_softcapping", *configs.FIELDS, *BESIDE_HEAD,
)  # fmt: skip
"""The fields of a config that ``models/shape.py`` reads; a link holds no others."""


@dataclass(frozen=True)
class Asked:
    """What a choice asks for, in the words of the package.

    Attributes:
        target: the model and the card.
        recipe: what would run.
        lengths: the lengths of the rows.
        gpu: the card as it was named.
        rows: the number of training rows.
        settings: how the recipe differs from ``qlora`` on this card, as ``--set`` takes it.
    """

    target: Target
    recipe: Recipe
    lengths: Lengths
    gpu: Gpu
    rows: int
    settings: tuple[str, ...]


def config_of(choice: Choice) -> dict[str, Any]:
    """Return the ``config.json`` of a choice that has one, or that says the numbers of a Llama.

    Raises:
        BadInput: if the pasted text is no JSON object.
    """
    if choice["model"] == NUMBERS:
        numbers = {name: _whole(choice, field) for field, name in CONFIG_FIELDS.items()}
        tied = choice["tied"] == "true"
        return {"model_type": "llama", **numbers, "tie_word_embeddings": tied, "max_position_embeddings": 131_072}
    if not choice["config"].strip():
        raise BadInput("paste the text of a config.json, or choose its file")
    try:
        found = json.loads(choice["config"])
    except (ValueError, RecursionError) as error:
        raise BadInput(f"config.json cannot be read as JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput("config.json is no JSON object, so no config")
    return found


def shape(choice: Choice) -> Shape:
    """Find the shape of a choice's model."""
    if choice["model"] in (CONFIG, NUMBERS):
        return shape_of(config_of(choice), CONFIG)
    return find_shape(choice["model"])


def asked(choice: Choice) -> Asked:
    """Translate a choice.

    Raises:
        BadInput: for a value that cannot be.
    """
    gpu = find_gpu(choice["card"])
    model = shape(choice)
    rows = _whole(choice, "rows")
    base = recipes.qlora(gpu.device)
    settings = tuple(_settings(choice, base, model))
    recipe = with_settings(base, [f"model={model.name}", *settings])
    if gpu.count > 1:  # as cria plan shares them
        recipe = with_settings(recipe, ["parallel.strategy=ddp"])
    target = Target(model, gpu.device, gpu.count, gpu.host)
    return Asked(target, recipe, _lengths(choice, recipe), gpu, rows, settings)


def _settings(choice: Choice, base: Recipe, model: Shape) -> Iterator[str]:
    """Write what differs from the recipe ``qlora``."""
    values = base.model_dump()
    for field in FIELDS:
        group, _, name = field.setting.partition(".")
        if field.name == "targets":
            yield from _targets(choice["targets"], model)
        elif field.setting and not _same(choice[field.name], as_text(values[group][name])):
            yield f"{field.setting}={choice[field.name]}"
    # cria plan changes some switches by itself for some models, unless they were asked for.
    for setting in needed(base, model):
        name = OF_SETTING.get(setting.partition("=")[0], "")
        if name in SWITCHES and choice[name] == as_text(getattr(base.tricks, name)):
            yield f"tricks.{name}={choice[name]}"


def _same(one: str, other: str) -> bool:
    """Whether two texts are the same setting: 3 and 3.0 are."""
    try:
        return float(one) == float(other)
    except ValueError:
        return one == other


def _targets(name: str, model: Shape) -> list[str]:
    """Return the setting of LoRA's target modules; none for all seven matrices of a Llama."""
    if name == "all":
        return lora_targets(model)
    groups = [list(group) for group in model.input_groups]
    modules = {"attention": groups[0] + groups[1], "mlp": groups[2] + groups[3], "qv": ["q_proj", "v_proj"]}[name]
    return [f"lora.target_modules={','.join(modules)}"]


def _lengths(choice: Choice, recipe: Recipe) -> Lengths:
    """Return the lengths of the rows: all full, or with the mean that the reader gave."""
    if not choice["mean"]:
        return full(recipe, "--rows-full")
    mean = _whole(choice, "mean")
    if mean > recipe.data.max_length:
        raise BadInput(f"a mean length of {mean} tokens is more than the sequence length, {recipe.data.max_length}")
    return Lengths(recipe.data.max_length, mean, why=f"a mean of {mean:,} tokens was given")


def _whole(choice: Choice, name: str) -> int:
    """Read a whole number of a choice."""
    field, text = BY_NAME[name], choice[name]
    if not re.fullmatch(r"\d+", text) or not field.low <= int(text) <= field.high:
        between = f"from {field.low:,.0f} to {field.high:,.0f}"
        raise BadInput(f"{field.label}: {text[:40] or 'nothing'} is no whole number {between}")
    return int(text)


def answer(choice: Choice) -> dict[str, Any]:
    """Return the fields of ``cria plan --json``, of which the comparisons and searches are empty.

    Raises:
        BadInput: for a choice that the package refuses.
    """
    of = asked(choice)
    found = plan_data.run_bill(of.target, of.recipe, of.lengths, rows=of.rows).to_dict()
    found["prices"] = [asdict(one) for one in plan_data.prices(of.target, of.recipe, of.rows, of.lengths)]
    return found | {"about": about(of)}


def about(of: Asked) -> dict[str, Any]:
    """Return what the page says besides, and ``cria plan --json`` does not."""
    model = of.target.shape
    dense = sum(d_in * d_out for d_in, d_out in model.packable.values())
    others = model.weights - model.layers * dense
    return {
        "weights": model.weights,
        "margin": trust.MARGIN,
        "unused_bytes": of.target.bill(of.recipe).memory.unused.bytes,
        # The share of the experts in "weights: all others"; quantization leaves them alone.
        "experts": model.layers * (model.block_linear_weights - dense) / others,
        "rented": of.target.card is not None,
    }


def command(choice: Choice, verb: str = "plan") -> str:
    """Write the command that says the same on the command line, or that trains."""
    of = asked(choice)
    model = "config.json" if choice["model"] in (CONFIG, NUMBERS) else choice["model"]
    words = ["cria", "plan", "qlora", "--model", model, "--gpu", choice["card"]]
    words += ["--rows", choice["rows"], "--rows-full", "--as-is"]
    if verb == "train":
        words = ["cria", "train", "qlora", "--set", f"model={model}"]
        if of.recipe.tricks.peft == "none":
            words += ["--set", "train.learning_rate=2e-5"]  # the recipe's is made for an adapter
    for setting in of.settings:
        words += ["--set", setting]
    return shlex.join(words)


def fields_in(message: str, choice: Choice) -> list[str]:
    """Return the fields that a refusal speaks of, so that it can stand beside them."""
    words = set(re.findall(r"[a-z_0-9.]+", message))
    found = [
        field.name
        for field in FIELDS
        if {field.name, field.setting} & words - {"model", "config", ""} or message.startswith(field.label)
    ]
    return found or (["config"] if choice["model"] == CONFIG else [])


REFUSALS = (BadInput, OutOfMemory)
