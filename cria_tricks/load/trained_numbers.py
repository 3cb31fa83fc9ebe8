"""Count the numbers that an adapter would train, from the shapes of a model's modules, without making the adapter.

A model without weights is not quantised. So an adapter on it would take another way through peft than the one that
will train, and could fail where that one works.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from peft.tuners.lora import LoraModel
from peft.utils.other import get_pattern_key
from transformers.pytorch_utils import Conv1D

from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.load.adapters import lora_config
from cria_tricks.step_plan import Plan
from cria_tricks.switches.lora import trained_weights


@dataclass(frozen=True)
class Target:
    """One matrix, or several in one tensor, that LoRA would adapt.

    Attributes:
        path: the module's path in the model.
        module: the module.
        parameter: the name of the tensor that holds several matrices, such as those of all experts; else empty.
        r: the rank.
    """

    path: str
    module: torch.nn.Module
    parameter: str
    r: int


def count(model: Any, plan: Plan) -> int:
    """Count the numbers that would train after ``add_adapter``.

    Args:
        model: the model, which may be without weights. LoRA's search freezes it.
        plan: what would run.

    Raises:
        BadInput: if the model has no place for what would train.
    """
    return COUNTS[plan.peft["kind"]](model, plan)


def targets(model: Any, plan: Plan) -> list[Target]:
    """Let peft look for what LoRA would adapt, and leave the modules as they are.

    Args:
        model: a transformers model; it is frozen here.
        plan: what would run, with LoRA.

    Raises:
        BadInput: if the model has no module with the name of a target.
    """
    arguments = dict(plan.peft)
    del arguments["kind"]
    found: list[Target] = []

    class Search(LoraModel):
        """peft's search for targets, without the layers that it would put there."""

        def _create_and_replace(
            self,
            lora_config: Any,
            adapter_name: str,
            target: torch.nn.Module,
            target_name: str,
            parent: torch.nn.Module,
            current_key: str,
            *,
            parameter_name: str | None = None,
        ) -> None:
            # peft gives matrices that transformers has joined into one a larger rank.
            pattern = get_pattern_key(lora_config.rank_pattern.keys(), current_key)
            r = lora_config.rank_pattern.get(pattern, lora_config.r)
            found.append(Target(current_key, target, parameter_name or "", r))

    try:
        with warnings.catch_warnings(action="ignore"):  # peft warns again when it adds the adapter
            Search(model, lora_config(**arguments), "default")
    except ValueError as error:
        raise BadInput(f"lora.target_modules: {first_line(error)}") from None
    return found


def _lora(model: Any, plan: Plan) -> int:
    return sum(_beside(target, plan) for target in targets(model, plan))


def _beside(target: Target, plan: Plan) -> int:
    """Count what LoRA trains beside a module: A, B and, for DoRA, the magnitudes."""
    module = target.module
    r = target.r
    dora = plan.peft["use_dora"]
    if target.parameter:
        if dora or plan.peft["lora_dropout"]:
            raise BadInput(
                f"lora.target_modules: peft adapts {target.path}.{target.parameter}, several matrices in one tensor, "
                "without DoRA and without dropout only; set lora.dora=false and lora.dropout=0"
            )
        *experts, d_out, d_in = getattr(module, target.parameter).shape
        return math.prod(experts) * trained_weights([(d_in, d_out)], r)
    # Conv1D is a linear layer, and an embedding one for one-hot vectors; both store their matrix as (D_in, D_out).
    if isinstance(module, Conv1D | torch.nn.Embedding):
        d_in, d_out = module.weight.shape
        return trained_weights([(d_in, d_out)], r, dora)
    if isinstance(module, torch.nn.Linear):
        return trained_weights([(module.in_features, module.out_features)], r, dora)
    if isinstance(module, torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d):
        A = r * module.in_channels * math.prod(module.kernel_size)
        B = module.out_channels * r // module.groups
        return A + B + module.out_channels * dora
    kind = type(module).__name__
    raise BadInput(f"lora.target_modules: {target.path} is a {kind}, which LoRA cannot adapt; name its linear layers")


def _head(model: Any, plan: Plan) -> int:
    return sum(weight.numel() for weight in model.get_output_embeddings().parameters())


def _prompt(model: Any, plan: Plan) -> int:
    return plan.peft["num_virtual_tokens"] * model.config.get_text_config().hidden_size


def _side_network(model: Any, plan: Plan) -> int:
    blocks = plan.peft["blocks"]
    copied = model.base_model.layers[-blocks:]
    in_copies = sum(weight.numel() for block in copied for weight in block.parameters())
    return in_copies + blocks * model.config.hidden_size**2


COUNTS: dict[str, Callable[[Any, Plan], int]] = {
    "lora": _lora,
    "head": _head,
    "prompt_tuning": _prompt,
    "side_network": _side_network,
}
"""The function that counts what each ``kind`` of ``Plan.peft`` trains."""
