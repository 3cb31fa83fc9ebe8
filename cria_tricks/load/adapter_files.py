"""Write the trained weights of a model, and read those of a side network, which peft does not know."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput

SIDE_NETWORK = "side_network.json"
"""The file that describes a side network: how many blocks it has, and the name of the base."""


def save_weights(model: Any, folder: Path, weights: Mapping[str, Any] | None = None) -> None:
    """Write the trained weights into a folder: peft's adapter, a side network, or the whole model.

    Args:
        model: a ``PeftModel``, a model with a side network, or a whole one.
        folder: an existing folder. Its caller renames it when it is whole, so files are written straight into it.
        weights: the whole state dict, if the model holds only a shard of it; the model's own when left out.
    """
    from safetensors.torch import save_file  # here, as it imports torch: a damaged folder is refused without it

    from cria_tricks.techniques.side_network import SideBlock

    given = {}
    if weights is not None:
        given["state_dict"] = weights
    if hasattr(model, "peft_config"):
        # By default peft may ask the hub, and save embeddings that nobody trained.
        model.save_pretrained(folder, save_embedding_layers=False, **given)
    elif blocks := sum(isinstance(module, SideBlock) for module in model.modules()):
        own = model.state_dict() if weights is None else weights
        learns = [name for name, p in model.named_parameters() if p.requires_grad]
        trained = {name: own[name].detach().cpu().contiguous() for name in learns}
        save_file(trained, folder / "side_network.safetensors")
        # adapter/folder.py fills in the base, because only there it is known by which name others can load it.
        (folder / SIDE_NETWORK).write_text(json.dumps({"base_model_name_or_path": "", "blocks": blocks}) + "\n")
    else:
        model.save_pretrained(folder, **given)


def load_side_network(model: Any, folder: Path) -> None:
    """Copy the saved weights of a side network into a model that has one of the same size.

    Raises:
        BadInput: if the names or shapes of the weights differ.
    """
    # Imported here, as above.
    from safetensors.torch import load_file

    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    saved = load_file(folder / "side_network.safetensors")
    if {name: p.shape for name, p in trained.items()} != {name: tensor.shape for name, tensor in saved.items()}:
        raise BadInput(f"{folder}: its side network does not fit this model")
    for name, parameter in trained.items():
        parameter.data.copy_(saved[name])
