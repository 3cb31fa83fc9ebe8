"""Load a model block by block, so that its weights are never all in memory at once.

transformers loads whole models. So each block is loaded as a model of its own: one block between a tiny embedding and a
tiny head, with the block's weights under the names of the first. Its weights are read, cast and quantised as in a whole
model, and the block is then put into a model that was loaded without blocks.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from cria_tricks.models import pretrained, weight_files

TINY = 8
"""Tokens in the vocabulary of a model of one block. Its embedding and head are thrown away."""


def without_blocks(folder: Path, name: str, **options: Any) -> Any:
    """Load all of a causal language model but its blocks.

    Args:
        folder: the model's folder.
        name: what errors call the model.
        **options: for ``from_pretrained``, as for :func:`cria_tricks.models.pretrained.causal_lm`.

    Returns:
        transformers' model with its whole config, and no blocks.

    Raises:
        BadInput: as :func:`cria_tricks.models.pretrained.causal_lm`.
    """
    pretrained.refuse_misfit(folder, name)  # because the loads below report no tensor that is missing
    whole = pretrained.config(folder, name)
    options = {"config": _of_blocks(whole, []), "use_safetensors": True, **options}
    model = pretrained.loaded(AutoModelForCausalLM.from_pretrained, folder, name, **options)
    _know_all_blocks(model, whole)
    return model


def blocks(model: Any, folder: Path, name: str, **options: Any) -> Iterator[torch.nn.Module]:
    """Load the blocks of a model one after the other, and put each into it.

    Args:
        model: from :func:`without_blocks`.
        folder: the model's folder.
        name: what errors call the model.
        **options: the same as there.

    Yields:
        Each block, when it is loaded and part of the model.
    """
    files = {key: tensor.file for key, tensor in weight_files.tensors(folder, name).items()}
    path = f"{model.base_model_prefix}.layers."
    whole = pretrained.config(folder, name)  # not the model's, which transformers changes when it quantises
    for number in range(whole.num_hidden_layers):
        config = _of_blocks(whole, [number])
        config.vocab_size = TINY
        config.pad_token_id = None  # it may lie outside of the tiny vocabulary
        with torch.device("meta"):
            around = type(model)(config).state_dict()
        state = {key: torch.zeros(meta.shape) for key, meta in around.items() if not key.startswith(f"{path}0.")}
        of_block = [key for key in files if key.startswith(f"{path}{number}.")]
        state |= {f"{path}0.{key.removeprefix(f'{path}{number}.')}": _read(files[key], key) for key in of_block}
        alone = pretrained.loaded(type(model).from_pretrained, None, name, config=config, state_dict=state, **options)
        block = alone.base_model.layers[0]
        for module in block.modules():
            if getattr(module, "layer_idx", None) == 0:
                module.layer_idx = number
            if hasattr(module, "config"):
                module.config = model.config
        model.base_model.layers.append(block)
        yield block


def _of_blocks(whole: Any, numbers: list[int]) -> Any:
    """Return the config of a model that has some of the blocks only."""
    config = copy.deepcopy(whole)
    for field, values in _for_each_block(whole).items():
        setattr(config, field, [values[number] for number in numbers])
    config.num_hidden_layers = len(numbers)
    return config


def _for_each_block(config: Any) -> dict[str, list[Any]]:
    """Return the fields of a config that have a value for each block, such as ``layer_types``."""
    blocks = config.num_hidden_layers
    return {name: value for name, value in vars(config).items() if isinstance(value, list) and len(value) == blocks}


def _know_all_blocks(model: Any, whole: Any) -> None:
    """Give a model without blocks the config of all, and what its modules have taken from there when they were made."""
    with torch.device("meta"):
        complete = type(model)(whole)
    for module, other in ((model, complete), (model.base_model, complete.base_model)):
        for field, value in vars(other).items():
            if isinstance(value, bool | int | float | str) and field != "training":
                setattr(module, field, value)
    for field, value in {**_for_each_block(whole), "num_hidden_layers": whole.num_hidden_layers}.items():
        setattr(model.config, field, value)


def _read(file: Path, key: str) -> torch.Tensor:
    with safe_open(file, framework="pt") as opened:
        return opened.get_tensor(key)
