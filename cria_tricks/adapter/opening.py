"""Open the folder of a trained adapter: load it over its base, rounded as it was in training; or load a whole model."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import BitsAndBytesConfig

from cria_tricks import models
from cria_tricks.adapter.folder import (
    RECIPE,
    adapter,
    base_of_training,
    is_whole,
    refuse_damaged,
    trained_over,
)
from cria_tricks.common import packages
from cria_tricks.common.errors import BadInput, first_line, usable_path
from cria_tricks.common.units import DTYPE
from cria_tricks.hardware import Device, this_device
from cria_tricks.load import host_memory
from cria_tricks.load.adapter_files import SIDE_NETWORK, load_side_network
from cria_tricks.load.adapters import with_copies
from cria_tricks.load.model import forbid_cpu_repacking, quiet_libraries
from cria_tricks.models import identity, pretrained
from cria_tricks.recipe import Recipe, from_toml
from cria_tricks.resolve import resolve
from cria_tricks.settings import Tricks
from cria_tricks.techniques import flash_decoding


def open_folder(
    folder: str | Path,
    device: Device | None = None,
    dtype: torch.dtype | None = None,
    *,
    base: str | Path | None = None,
    other_base: bool = False,
    packed: bool = False,
    say: Callable[[str], None] = lambda sentence: None,
) -> tuple[Any, Any]:
    """Load an adapter together with its base model, or load a fully fine-tuned model.

    An adapter that was trained over a quantised base has also learnt to correct the rounding of the base's weights. So
    the base is quantised here as in training, and then unpacked: the adapter gets the same rounded weights. Over the
    base as it was published the loss is higher (``kwanzaa_small`` on the 27 real rows: 0.618 instead of 0.489). In
    training, int8 also rounds the activations in every product. Here it does not, because the weights are unpacked.

    With ``packed`` they are not unpacked, so bitsandbytes multiplies by the stored codes, as in training. An NF4 base
    then takes about a quarter of the memory, an int8 base half. It is slower where a product must unpack its weight.

    Args:
        folder: ``.../adapter`` or ``.../model`` as ``cria train`` wrote it, or any peft adapter folder.
        device: the device to put the model on. When left out: this machine's GPU, or its CPU if it has no GPU.
        dtype: dtype of base and adapter. When left out: the precision that suits the device best.
        base: folder or name of the base model, if it is no longer where the adapter's config says.
        other_base: whether to allow a base other than the one that the adapter was trained over.
        packed: whether a base that was quantised in training stays packed.
        say: called with each warning.

    Returns:
        The model in eval mode, and the tokenizer.

    Raises:
        BadInput: if the folder holds no adapter and no model, or is damaged; if the base cannot be
            found, is not the one that the adapter was trained over, or lacks weights that its config describes; if
            ``packed`` is asked for and the base was not quantised.
    """
    quiet_libraries()
    folder = usable_path("adapter", folder)
    device = device or this_device()
    dtype = dtype or getattr(torch, DTYPE[device.best_precision])
    below, others = base_of(folder, base, other_base)
    if packed and quantization_of(folder).quantization == "none":
        raise BadInput(
            f"--packed: {folder} was not trained over an NF4, FP4 or int8 base, so nothing in it is packed; leave "
            "--packed out"
        )
    for other in others:
        say(f"warning: {other}")
    try:
        model = _loaded(folder, below, device, dtype, packed)
        tokenizer = pretrained.tokenizer(folder, str(folder))
    except BadInput:
        raise
    except Exception as error:  # a damaged file raises whatever its reader raises: tokenizers a bare Exception
        packages.pass_on(error)
        raise BadInput(
            f"{folder}: cannot be loaded: {first_line(error)}; is it whole? cria verify {folder} tells"
        ) from None
    if below and not (folder / SIDE_NETWORK).is_file() and pretrained.changes_nothing(folder):
        say(f"warning: {folder}: every B of the adapter is zero, as before training, so it changes nothing")
    return model.eval(), tokenizer


def _loaded(folder: Path, below: models.Weights | None, device: Device, dtype: torch.dtype, packed: bool) -> Any:
    """Load the base with the weights that the adapter saw in training, and add the adapter; or load a whole model."""
    weights = below or models.Weights(name=str(folder), path=str(folder), tokenizer=None)
    if device.kind == "cpu" and not packed:
        host_memory.refuse_too_large(Path(weights.path), dtype.itemsize, f"{folder}")
    rounding = _rounding(folder, device, dtype)
    options = {**flash_decoding.for_chat(device), **rounding}
    model = pretrained.causal_lm(weights.path, weights.name, dtype=dtype, **options)
    if packed:
        forbid_cpu_repacking(model)
    elif rounding:
        model = model.dequantize()
        # transformers keeps how a folder of packed weights was read, and could not undo that to save unpacked ones.
        model._weight_conversions = None
    if below and (folder / SIDE_NETWORK).is_file():
        with_copies(model, json.loads((folder / SIDE_NETWORK).read_text())["blocks"])
        load_side_network(model, folder)
    elif below:
        model = pretrained.adapter(model, folder)
    # model.to(dtype) would also round the rotary frequencies, a buffer; that shifts the positions of distant tokens.
    for weight in model.parameters():
        if weight.is_floating_point():  # and not the codes of a packed weight
            weight.data = weight.data.to(device.kind, dtype)
    # transformers refuses to move a packed model; device_map has put it where it belongs.
    return model if packed else model.to(device.kind)


def quantization_of(folder: Path) -> Tricks:
    """Read from an adapter's recipe how its base was quantised in training; all other switches stay off.

    Raises:
        BadInput: if the folder's recipe cannot be read.
    """
    # The folder of a merged model also holds its adapter's recipe. But its weights are rounded already, and quantising
    # them again would change them. A folder that plain peft wrote has no recipe, so nothing is known.
    if is_whole(folder) or not (folder / RECIPE).is_file():
        return Tricks()
    tricks = from_toml(folder / RECIPE).tricks
    return Tricks(quantization=tricks.quantization, double_quantization=tricks.double_quantization)


def _rounding(folder: Path, device: Device, dtype: torch.dtype) -> dict[str, Any]:
    """Return the keywords that make ``from_pretrained`` quantise the base as training did; empty if it did not.

    ``dtype`` is that in which 4-bit layers multiply as long as they stay packed.
    """
    tricks = quantization_of(folder)
    if tricks.quantization == "none":
        return {}
    # A recipe that quantises must have an adapter, or it is refused. Which kind makes no difference to the keywords.
    plan = resolve(Recipe(tricks=tricks.model_copy(update={"peft": "lora"})), device)
    how = dict(plan.quantization)
    if "bnb_4bit_compute_dtype" in how:
        how["bnb_4bit_compute_dtype"] = dtype
    keywords: dict[str, Any] = {"quantization_config": BitsAndBytesConfig(**how)}
    if device.kind == "cuda":
        keywords["device_map"] = {"": 0}  # bitsandbytes packs weights when they arrive on the GPU
    return keywords


def base_of(
    folder: Path, base: str | Path | None = None, other_base: bool = False
) -> tuple[models.Weights | None, list[str]]:
    """Check a folder, fetch the base model that it names, and compare it with the one of the training.

    Args:
        folder: folder of an adapter, or of a whole model.
        base: folder or name of the base model, if it is no longer where the adapter's config says.
        other_base: whether a base with other weights or another config is allowed.

    Returns:
        The base, and a sentence for each difference between it and the one that the adapter was trained over; ``None``
        and no sentence for a whole model, which has no base.

    Raises:
        BadInput: if the folder holds no adapter and no model, or is damaged; if its base cannot be found or downloaded,
            or is another one that is not allowed.
    """
    adapter(folder, base, other_base)
    if is_whole(folder):
        refuse_damaged(folder)
        return None, []
    before = trained_over(folder)
    if base:
        below = models.fetch(models.find(str(base)))
    else:
        below = models.fetch(models.find(base_of_training(folder)), before.get("revision") or "")
    others = identity.compare(before, identity.of(below), str(folder), allowed=other_base, weights=below)
    return below, others
