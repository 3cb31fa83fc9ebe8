"""Go on from a trained LoRA adapter: its numbers take the place of those with which a new one would begin."""

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
    "inference_mode",
    "init_lora_weights",
    "lora_dropout",
    "peft_version",
    "revision",
    "target_modules",
    "task_type",
}
"""Fields of an adapter's config that do not change what its numbers mean. Its targets are compared by their effect."""


def refuse_other(model: Any, plan: Plan) -> None:
    """Refuse an adapter that is another one than the plan trains, before any weight is loaded.

    Args:
        model: the base, built without weights; it is frozen here.
        plan: what would run.

    Raises:
        BadInput: if the adapter's config or tensors are not those of the planned LoRA, or are no finite numbers.
    """
    folder = Path(plan.peft["continue_from"])
    where = f"lora.continue_from={folder}"
    merge = f"merge it (cria merge {folder}), and train a new adapter over what that writes"
    before = adapter_config.read(folder)
    planned = {name: value for name, value in plan.peft.items() if name != "kind"}
    now = json.loads(json.dumps(lora_config(**planned).to_dict(), default=list))
    for name in sorted({*before} - FREE):
        was, wanted = before[name], now.get(name)
        if was == wanted or not (was or wanted):  # peft has several words for nothing
            continue
        ours = adapter_config.SETTINGS.get(name)
        if ours is None:
            raise BadInput(f"{where}: has {name}={was}, which no run here trains; {merge}")
        raise BadInput(f"{where}: has {ours}={was}, and this run {wanted}; set lora.{ours}={str(was).lower()}")
    stored, wanted = _shapes(folder), _planned_shapes(model, plan)
    for name in sorted({*stored, *wanted}):
        if stored.get(name) != wanted.get(name):
            raise BadInput(
                f"{where}: {name} has the shape {stored.get(name, 'none')}, and in this run {wanted.get(name, 'none')};"
                f" set model and lora.target_modules as they were, or {merge}"
            )
    pretrained.refuse_nonfinite_adapter(folder)


def _shapes(folder: Path) -> dict[str, list[int]]:
    """Read the shapes of an adapter's tensors, by their names."""
    try:
        with safe_open(folder / pretrained.ADAPTER, framework="np") as opened:
            return {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise BadInput(
            f"adapter {folder}: {pretrained.ADAPTER} cannot be read: {first_line(error)}; {pretrained.ADAPTER_AGAIN}"
        ) from None


def _planned_shapes(model: Any, plan: Plan) -> dict[str, list[int]]:
    """Return the shapes that the tensors of the planned LoRA have, by the names under which peft saves them.

    Experts that share a tensor and embeddings are left out, because no recipe of this package can name them well.
    """
    found: dict[str, list[int]] = {}
    for target in trained_numbers.targets(model, plan):
        if target.parameter or isinstance(target.module, torch.nn.Embedding):
            continue
        module: Any = target.module
        # Conv1D is a linear layer that stores its matrix as (D_in, D_out).
        d_in, d_out = module.weight.shape if isinstance(module, Conv1D) else module.weight.T.shape
        path = f"base_model.model.{target.path}"
        found |= {f"{path}.lora_A.weight": [target.r, d_in], f"{path}.lora_B.weight": [d_out, target.r]}
        if plan.peft["use_dora"]:
            found[f"{path}.lora_magnitude_vector"] = [d_out]
    return found


def start_at_adapter(model: Any, folder: Path) -> None:
    """Overwrite the numbers of a new adapter with those of a trained one, in place.

    Args:
        model: a new ``PeftModel`` with LoRA.
        folder: the folder of the trained adapter, which :func:`refuse_other` has compared.
    """
    set_peft_model_state_dict(model, load_file(folder / pretrained.ADAPTER))
