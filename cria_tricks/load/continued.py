"""Continue from a trained LoRA adapter: its numbers take the place of those with which a new one would begin."""

import json
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.load import trained_numbers
from cria_tricks.load.adapters import lora_config
from cria_tricks.models import adapter_config, pretrained
from cria_tricks.step_plan import Plan

FREE = {
    "auto_mapping",
    "base_model_name_or_path",
    "fan_in_fan_out",
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
    "peft_version",
    "revision",
    "target_modules",
    "task_type",
}
"""Fields of an adapter's config that need not be equal: targets and layouts are compared by the tensors' shapes."""
CHANGE_THE_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""How peft's ``init_lora_weights`` begins where it subtracts the adapter's start from the weights of the base."""


def refuse_other(model: Any, plan: Plan) -> None:
    """Refuse an adapter that does not fit the LoRA that a plan trains, before any weight is loaded.

    Args:
        model: the base, built without weights; it is frozen here.
        plan: what would run.

    Raises:
        BadInput: if its config or tensors are not those of the planned LoRA, or a number is NaN or infinite.
    """
    folder = Path(plan.peft["continue_from"])
    where = f"lora.continue_from={folder}"
    merge = f"merge it (cria merge {folder}), and train a new adapter over what that writes"
    before = adapter_config.read(folder)
    init = str(before.get("init_lora_weights")).lower()
    if init.startswith(CHANGE_THE_BASE):
        raise BadInput(f"{where}: began as {init}, which changes the base, so no run can continue from it; {merge}")
    planned = {name: value for name, value in plan.peft.items() if name != "kind"}
    now = json.loads(json.dumps(lora_config(**planned).to_dict(), default=list))
    for name in sorted({*before} - FREE):
        was, wanted = before[name], now.get(name)
        if was == wanted or not (was or wanted):  # for "nothing" peft writes null, false, or an empty list
            continue
        ours = adapter_config.SETTINGS.get(name)
        if ours is None:
            raise BadInput(f"{where}: the adapter has {name}={was}, and no run continues from such a one; {merge}")
        raise BadInput(
            f"{where}: the adapter has {ours}={was}, and the recipe {wanted}; set lora.{ours}={str(was).lower()}"
        )
    stored, planned_shapes = _shapes(folder), _planned_shapes(model, plan)
    for name in sorted({*stored, *planned_shapes}):
        if stored.get(name) != planned_shapes.get(name):
            raise BadInput(
                f"{where}: {name} has the shape {stored.get(name, 'none')} in the adapter, and "
                f"{planned_shapes.get(name, 'none')} in this run; set lora.target_modules as it was, or {merge}"
            )
    pretrained.refuse_nonfinite_adapter(folder)


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Read the shapes of an adapter's tensors, by their names."""
    try:
        with safe_open(folder / pretrained.ADAPTER, framework="np") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadInput(
            f"adapter {folder}: {pretrained.ADAPTER} cannot be read: {first_line(error)}; copy the folder again"
        ) from None


def _planned_shapes(model: Any, plan: Plan) -> dict[str, list[int]]:
    """Return the shapes that the tensors of the planned LoRA have, by the names under which peft saves them.

    Only linear layers are listed. Of experts in one tensor, and of embeddings, a run cannot continue yet.
    """
    found: dict[str, list[int]] = {}
    for target in trained_numbers.targets(model, plan):
        module: Any = target.module
        if target.parameter or not isinstance(module, torch.nn.Linear | Conv1D):
            continue
        # Conv1D is a linear layer that stores its matrix as (D_in, D_out).
        d_in, d_out = module.weight.shape if isinstance(module, Conv1D) else module.weight.T.shape
        path = f"base_model.model.{target.path}"
        found |= {f"{path}.lora_A.weight": [target.r, d_in], f"{path}.lora_B.weight": [d_out, target.r]}
        if plan.peft["use_dora"]:
            found[f"{path}.lora_magnitude_vector"] = [d_out]
    return found


def start_at_adapter(model: Any, plan: Plan) -> Any:
    """Overwrite the numbers of a new adapter with those of a trained one, in place, and return the model.

    Args:
        model: a new ``PeftModel`` with LoRA.
        plan: what will run; :func:`refuse_other` has compared its adapter.
    """
    found = set_peft_model_state_dict(model, load_file(Path(plan.peft["continue_from"]) / pretrained.ADAPTER))
    missing = [name for name in found.missing_keys if "lora_" in name]
    assert not [*missing, *found.unexpected_keys], f"peft does not know its own names: {missing}"
    return model
