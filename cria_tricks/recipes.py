"""The named recipes, as functions: ``cria train smoke`` calls ``smoke()``."""

from collections.abc import Callable
from pathlib import Path

from cria_tricks.common.errors import BadInput
from cria_tricks.common.names import hint, nearest, same
from cria_tricks.hardware import Device, this_device
from cria_tricks.recipe import Data, Recipe, Train, Tricks, from_toml, with_settings


def smoke(device: Device | None = None) -> Recipe:
    """QLoRA of SmolLM2-135M on our own 32 small rows: minutes on two CPU cores."""
    return Recipe(
        name="smoke",
        model="smollm2",
        data=Data(train="nguzo_saba", eval="nguzo_saba", max_length=1024),
        tricks=Tricks(
            gradient_accumulation=4,
            precision=best_precision(device),
            quantization="nf4",
            double_quantization=True,
            peft="lora",
            attention="sdpa",
            chunked_loss=True,
        ),
        train=Train(learning_rate=1e-3, eval_steps=4),
    )


def kwanzaa(device: Device | None = None) -> Recipe:
    """The full Kwanzaa adapter: QLoRA of Llama-3.2-1B-Instruct on 107 chat rows, for a free T4.

    Rank, alpha, the seven target modules, batch, accumulation, epochs and learning rate are the original
    run's. The mirror ``unsloth/Llama-3.2-1B-Instruct`` asks for no licence click;
    ``--set model=meta-llama/Llama-3.2-1B-Instruct`` takes the gated original.
    """
    device = device or this_device()
    card = device.kind == "cuda"
    return Recipe(
        name="kwanzaa",
        model="llama-3.2-1b",
        data=Data(train="kwanzaa", eval="kwanzaa"),
        tricks=Tricks(
            gradient_accumulation=8,
            gradient_checkpointing=True,
            precision=best_precision(device),
            quantization="nf4",
            double_quantization=True,
            peft="lora",
            optimizer="adamw_8bit",
            paged_optimizer=True,
            attention="sdpa",
            expand_kv=device.needs_expand_kv,
            chunked_loss=True,
            lean_preparation=card,
        ),
        train=Train(epochs=3, save_steps=7),
    )


def kwanzaa_small(device: Device | None = None) -> Recipe:
    """The Kwanzaa recipe on SmolLM2-135M, for a machine without a GPU.

    A model a tenth of the size takes a larger learning rate: at the original 2e-4 it learns too slowly.
    """
    return with_settings(
        kwanzaa(device), ["name=kwanzaa_small", "model=smollm2", "train.learning_rate=5e-4", "train.save_steps=5"]
    )


def baseline(device: Device | None = None) -> Recipe:
    """Every toggle off: plain fp32 full fine-tuning of SmolLM2-135M on our own rows."""
    return Recipe(name="baseline", model="smollm2", data=Data(max_length=1024), train=Train(learning_rate=2e-5))


NAMED: dict[str, Callable[..., Recipe]] = {f.__name__: f for f in (smoke, kwanzaa, kwanzaa_small, baseline)}


def get(recipe: Recipe | str | Path, device: Device | None = None) -> Recipe:
    """Find a recipe by name, or read it from a TOML file.

    Args:
        recipe: a name (letter case does not matter), a path of a ``.toml`` file, or a recipe, which is given back.
        device: a named recipe chooses its precision for it; for this machine when left out.

    Raises:
        BadInput: for an unknown name (with the nearest right one) or a wrong file.

    Examples:
        >>> get("Kwanzaa_Small").model
        'smollm2'
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str | Path):
        raise BadInput(f"recipe {recipe!r}: must be a Recipe, the name of one, or the path of a .toml file")
    if isinstance(recipe, Path) or recipe.endswith(".toml"):
        return from_toml(recipe)
    name = same(recipe, NAMED)
    if name:
        return NAMED[name](device)
    there_are = f"there are {', '.join(NAMED)}, or name a .toml file"
    raise BadInput(f"unknown recipe {recipe}: {hint(nearest(recipe, NAMED), there_are)}")


def best_precision(device: Device | None) -> str:
    """bf16 where the hardware really has it, fp16 on other GPUs, fp32 on other CPUs."""
    return (device or this_device()).best_precision
