"""Load a trained adapter over its base, and generate answers with it."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from cria_tricks import models
from cria_tricks.adapter import prompts
from cria_tricks.adapter.folder import (
    RECIPE,
    adapter_config,
    is_whole,
    refuse_another,
    refuse_base_of_whole,
    refuse_moved_base,
    refuse_unsafe,
    trained_over,
)
from cria_tricks.adapter.prompts import Format
from cria_tricks.common.atomic_files import MANIFEST
from cria_tricks.common.errors import BadInput, first_line, is_out_of_memory, usable_path
from cria_tricks.common.units import DTYPE
from cria_tricks.hardware import Device, this_device
from cria_tricks.load.adapter_files import SIDE_NETWORK, load_side_network
from cria_tricks.load.adapters import add_side_network
from cria_tricks.load.model import quiet_libraries
from cria_tricks.models import identity, pretrained
from cria_tricks.recipe import Recipe, Tricks, from_toml
from cria_tricks.resolve import resolve
from cria_tricks.tricks import flash_decoding


def open_folder(
    folder: str | Path,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    *,
    base: str | Path | None = None,
    other_base: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> tuple[Any, Any]:
    """Load an adapter over its base as it was trained, or a fully fine-tuned model.

    An adapter that was trained over quantised matrices has learnt to make up for their rounding, too. So it gets the
    same rounded numbers, unpacked: over the base as it was published the loss is higher (``kwanzaa_small`` on the 27
    real rows: 0.618 instead of 0.489). The activations, which int8 rounds in every product, are not rounded here.

    Args:
        folder: ``.../adapter`` or ``.../model`` as ``cria train`` wrote it, or any peft adapter folder.
        device: where the model goes; this machine's GPU, or its CPU, when left out.
        dtype: dtype of base and adapter; what the device computes fast when left out.
        base: where the base lies now, if it is not where the adapter says.
        other_base: whether the base may be another one than the adapter was trained over.
        say: takes a warning.

    Returns:
        Model in eval mode, and tokenizer.

    Raises:
        BadInput: if the folder holds neither, or is damaged or not safe to read; if the base cannot be found, is not
            the one that the adapter was trained over, or lacks weights that its config describes.
    """
    quiet_libraries()
    folder = usable_path("adapter", folder)
    device = device or this_device()
    dtype = dtype or _dtype(device)
    config, below = base_of(folder, base)
    if below:
        for warning in other_than_trained_over(folder, below, other_base):
            say(f"warning: {warning}")
    try:
        model = _loaded(folder, config, below, device, dtype)
        tokenizer = pretrained.tokenizer(folder, str(folder))
    except BadInput:
        raise
    except Exception as error:  # a damaged file raises whatever its reader raises: tokenizers a bare Exception
        if is_out_of_memory(error):
            raise
        raise BadInput(
            f"{folder}: cannot be loaded: {first_line(error)}; is it whole? cria verify {folder} tells"
        ) from None
    return model.to(device.kind).eval(), tokenizer


def _loaded(folder: Path, config: Path | None, below: models.Weights | None, device: Device, dtype: torch.dtype) -> Any:
    """Load the base as the adapter met it in training, and lay the adapter over it; or load a whole model."""
    weights = below or models.Weights(name=str(folder), path=str(folder), tokenizer=None)
    rounding = _rounding(folder, device)
    options = {**flash_decoding.for_chat(device), **rounding}
    model = pretrained.causal_lm(weights.path, weights.name, dtype=dtype, **options)
    if rounding:
        model = model.dequantize()
    if config and config.name == SIDE_NETWORK:
        add_side_network(model, json.loads(config.read_text())["blocks"])
        load_side_network(model, folder)
    elif below:
        model = pretrained.adapter(model, folder)
    # Not model.to(dtype): it rounds the rotary frequencies too, which shifts the positions of distant tokens.
    for weight in model.parameters():
        weight.data = weight.data.to(dtype)
    return model


def quantization_of(folder: Path) -> Tricks:
    """Find the toggles that quantised the base while an adapter was trained; all other toggles stay off.

    Raises:
        BadInput: if the folder's recipe cannot be read.
    """
    # A merged model keeps its adapter's recipe. Its weights are rounded already, and doing it again moves them.
    if is_whole(folder) or not (folder / RECIPE).is_file():  # an adapter of plain peft says nothing about it
        return Tricks()
    tricks = from_toml(folder / RECIPE).tricks
    return Tricks(quantization=tricks.quantization, double_quantization=tricks.double_quantization)


def _rounding(folder: Path, device: Device) -> dict[str, Any]:
    """Make the keywords with which ``from_pretrained`` quantises the base as training did."""
    tricks = quantization_of(folder)
    if tricks.quantization == "none":
        return {}
    plan = resolve(Recipe(tricks=tricks.model_copy(update={"peft": "lora"})), device)
    keywords: dict[str, Any] = {"quantization_config": BitsAndBytesConfig(**plan.quantization)}
    if device.kind == "cuda":
        keywords["device_map"] = {"": 0}  # bitsandbytes packs weights when they arrive on their device
    return keywords


def base_of(folder: Path, base: str | Path | None = None) -> tuple[Path | None, models.Weights | None]:
    """Check a folder, and fetch the base model that it names.

    Args:
        folder: folder of an adapter, or of a whole model.
        base: where the base lies now, if it is not where the adapter says.

    Returns:
        An adapter's config file and its base; ``None`` and ``None`` for a whole model.

    Raises:
        BadInput: if the folder holds neither, is damaged or not safe to read, or its base cannot be had.
    """
    refuse_another(folder, MANIFEST)
    config = adapter_config(folder)
    whole = (folder / "config.json").is_file()
    if config or whole or (folder / MANIFEST).is_file():
        refuse_unsafe(folder)
    if not config and not whole:
        raise BadInput(f"{folder}: holds neither adapter_config.json nor config.json; name the folder of an adapter")
    if config is None:
        refuse_base_of_whole(folder, base)
        return None, None
    if base:
        return config, models.fetch(models.find(str(base)))
    try:
        name = json.loads(config.read_text(encoding="utf-8"))["base_model_name_or_path"]
        refuse_moved_base(folder, name)
        return config, models.fetch(models.find(name), trained_over(folder).get("revision") or "")
    except BadInput:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadInput(f"{config}: names no base model that can be found: {error}") from None


def other_than_trained_over(folder: Path, base: models.Weights, allowed: bool) -> list[str]:
    """Compare a base with the one that an adapter was trained over.

    Returns:
        A sentence for each difference.

    Raises:
        BadInput: if they differ, and that is not allowed.
    """
    return identity.compare(trained_over(folder), identity.of(base), str(folder), allowed=allowed)


def open_base(weights: models.Weights) -> Any:
    """Load a base model as :func:`open_folder` loads one.

    Raises:
        BadInput: if it cannot be had.
    """
    quiet_libraries()
    device = this_device()
    weights = models.fetch(weights)
    options = {"dtype": _dtype(device), **flash_decoding.for_chat(device)}
    return pretrained.causal_lm(weights.path, weights.name, **options).to(device.kind).eval()


def _dtype(device: Device) -> torch.dtype:
    return getattr(torch, DTYPE[device.best_precision])


def open_for_chat(
    folder: str | Path, raw: bool = False, system: str | None = None, **loading: Any
) -> tuple[Any, Any, Format]:
    """Load an adapter, and find the format in which it was trained.

    Args:
        folder: as for :func:`open_folder`.
        raw: whether every prompt is given as it is, whatever was trained.
        system: a system message that is to begin the conversation.
        **loading: further arguments of :func:`open_folder`.

    Returns:
        Model, tokenizer and format.

    Raises:
        BadInput: as :func:`open_folder`; and for a system message in a format that has none, before anything is loaded
            where the folder says what was trained.
    """
    form = prompts.of_folder(usable_path("adapter", folder), raw)
    if form:
        prompts.refuse_system(form, system)
    model, tokenizer = open_folder(folder, **loading)
    form = form or prompts.of_tokenizer(tokenizer)
    prompts.refuse_system(form, system)
    if form.template:
        prompts.try_template(tokenizer, system)
    return model, tokenizer, form


def answer(
    model: Any,
    tokenizer: Any,
    said: str | Sequence[Mapping[str, str]],
    max_new_tokens: int,
    streamer: Any = None,
) -> str:
    """Generate an answer greedily.

    Args:
        model: a causal language model in eval mode.
        tokenizer: the model's tokenizer.
        said: the conversation so far, ending with the user's turn, for the chat template; or a text, as it is.
        max_new_tokens: longest answer (tokens).
        streamer: is handed the text as it grows, e.g. ``transformers.TextStreamer``.

    Returns:
        The assistant's turn, or the text's continuation.

    Raises:
        BadInput: if the prompt cannot be written.
    """
    prompt = prompts.write(tokenizer, said).to(model.device)
    pretrained.refuse_unknown_tokens(model, int(prompt["input_ids"].max()), "this model")
    with torch.no_grad():
        out = model.generate(
            **prompt,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=model.config.use_cache,
            pad_token_id=tokenizer.pad_token_id or tokenizer.eos_token_id,
            streamer=streamer,
        )
    return tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
