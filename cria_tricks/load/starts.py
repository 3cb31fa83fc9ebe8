"""Start a new LoRA adapter at a trained one, or at the rounding error of a quantised base (LoftQ).

The numbers of a trained adapter take the place of those with which a new one would begin.

For LoftQ the base's files are read again. peft has ``replace_lora_weights_loftq`` for this. In peft 0.21 that function
needs CUDA, knows only 4-bit weights, and ignores LoRA's scale: with alpha = 2 r the adapter would begin as twice the
error. Here, as there, the base stays as it was quantised. So what is saved is a plain adapter of peft, for the base
that everybody quantises in the same way.

PiSSA, which starts an adapter at the largest part of the weight itself, is no setting here, because peft's version
changes the base: ``pissa_init`` (peft 0.21, ``peft.tuners.lora.layer``) subtracts the start from the weights, in place.

- With the adapter switched off, the model is no longer its base, with which ``cria eval`` and ``cria chat`` compare it.
- The saved adapter does not fit the published base. peft can convert it while it saves, in
  ``_convert_state_dict_for_initial_model`` of ``peft.tuners.lora.model``: it loads the first A and B beside the trained
  ones, and writes an adapter of twice the rank. A checkpoint of twice the rank cannot be resumed. One that is not
  converted needs the same start subtracted from the base again, and the fast start is random (``svd_lowrank``).
- Over a quantised base ``pissa_init`` raises a ``TypeError``: it would have to quantise the difference again.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
from peft import set_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers.pytorch_utils import Conv1D

from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.load import adapters
from cria_tricks.load.adapters import lora_config
from cria_tricks.models import adapter_config, pretrained, weight_files
from cria_tricks.step_plan import Plan
from cria_tricks.techniques.lora import start_of


@torch.no_grad()
def start_at_rounding_error(model: Any, plan: Plan | None = None) -> Any:
    """Overwrite the two matrices of every adapter beside a quantised weight, in place, and return the model.

    The weights are read again from the base's files, one after the other, so that only one is in memory unquantised.
    (The 210 matrices of SmolLM2-135M at r = 16 take 5.5 seconds of one core of an AMD EPYC, 2026-11-26.)

    Args:
        model: a new ``PeftModel`` with LoRA, whose base was quantised while it was loaded from a folder.
        plan: what will run; it is not read.

    Raises:
        BadInput: if a weight is not in the files, or another one is, or it holds NaN or infinity.
    """
    base = model.get_base_model()
    layers = {path: layer for path, layer in base.named_modules() if isinstance(layer, LoraLayer)}
    adapted = {path: layer.get_base_layer() for path, layer in layers.items()}
    head = base.get_output_embeddings()
    head = getattr(head, "base_layer", head)  # if it is adapted itself
    for path, key, file in originals(adapted, head, Path(base.name_or_path)):
        layer = layers[path]
        weight = layer.get_base_layer().weight
        with safe_open(file, framework="pt") as opened:
            error = opened.get_tensor(key).to(weight.device).float()
        length = error.norm()
        if not length.isfinite():  # there would be no start, and so no evaluation that finds it
            raise BadInput(
                f"model {base.name_or_path}: {key} in {file.name} holds NaN or infinity; {weight_files.AGAIN}"
            )
        error -= unpacked(weight)
        if error.norm() > length:  # 0 is a level of every format, so no weight is rounded to a place beyond 0
            raise BadInput(f"lora.init=loftq: {key} in {file} is not the weight that was quantised; {WITHOUT}")
        for name in layer.active_adapters:
            A, B = start_of(error, layer.r[name], layer.scaling[name])
            # If r is above the matrix' shorter side, the other rows of A stay random, and their columns of B zero.
            layer.lora_A[name].weight[: len(A)] = A
            layer.lora_B[name].weight[:, : len(A)] = B
    return model


def refuse_unreadable(model: Any, plan: Plan, folder: Path) -> None:
    """Refuse a model whose files do not hold the matrices to start from, before its weights are loaded.

    Args:
        model: the model, built without weights; it is frozen here.
        plan: what would run.
        folder: the model's folder.

    Raises:
        BadInput: as :func:`originals` does.
    """
    adapted = {target.path: target.module for target in adapters.targets(model, plan)}
    for _ in originals(adapted, model.get_output_embeddings(), folder):
        pass


def originals(
    adapted: Mapping[str, torch.nn.Module], head: torch.nn.Module, folder: Path
) -> Iterator[tuple[str, str, Path]]:
    """Find the weight of every adapted linear layer except the head, which is not quantised, in a model's files.

    Args:
        adapted: the layers that LoRA adapts, without their adapters, by their paths in the model.
        head: the model's output head.
        folder: the model's folder.

    Yields:
        The layer's path, and its weight's name and file.

    Raises:
        BadInput: if the files do not hold exactly one such weight under the layer's name.
    """
    stored = weight_files.tensors(folder, str(folder))
    for path, linear in adapted.items():
        # The experts of a mixture, in one tensor, are not quantised either.
        if linear is head or not isinstance(linear, torch.nn.Linear):
            continue
        key = f"{path}.weight"
        # A file may hold the backbone alone, whose names are shorter, or a larger model, whose names are longer.
        found = [name for name in stored if f".{name}".endswith(f".{key}") or f".{key}".endswith(f".{name}")]
        if [stored[name].shape for name in found] != [(linear.out_features, linear.in_features)]:
            raise BadInput(f"lora.init=loftq: {folder} does not hold {key} as one matrix under this name; {WITHOUT}")
        yield path, found[0], stored[found[0]].file


def unpacked(weight: Any) -> torch.Tensor:
    """Return the numbers for which a quantised weight stands, in the dtype in which it was quantised; int8 in fp32."""
    if isinstance(weight, bnb.nn.Params4bit):
        return bnb.functional.dequantize_4bit(weight.data, weight.quant_state)
    return bnb.functional.int8_vectorwise_dequant(weight.data, weight.SCB)


WITHOUT = "set lora.init=default"
"""The way out of all errors of LoftQ's start."""


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
    for target in adapters.targets(model, plan):
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
