"""Add to a loaded model the part that will train: LoRA, a learnt prompt, a copy of the head or a side network.

No other module calls peft to add a new one. ``models/pretrained.py`` loads saved ones. What would train is counted from
the shapes of a model's modules, without making it: a model without weights is not quantised, so peft would take another
way than the one that will train, and could fail where that works.
"""

import contextlib
import copy
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import bitsandbytes as bnb
import torch
from peft import LoraConfig, PeftConfig, PromptTuningConfig, get_peft_model, prepare_model_for_kbit_training
from peft.tuners.lora import LoraModel
from peft.utils.constants import DUMMY_TARGET_MODULES
from peft.utils.integrations import dequantize_module_weight
from peft.utils.other import get_pattern_key
from transformers.pytorch_utils import Conv1D

from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.models import peft_probes
from cria_tricks.step_plan import Plan
from cria_tricks.switches.lora import ALL_LINEAR, trained_weights
from cria_tricks.techniques import side_network


def prepare_for_kbit_training(model: Any, plan: Plan) -> Any:
    """Make peft's usual preparation, which casts the weights that are not quantised to fp32."""
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # that is an edit of its own


def add_lora(model: Any, plan: Plan) -> Any:
    """Freeze a model, and add the LoRA of a plan to it; raises what :func:`with_lora` does."""
    return with_lora(model, **_arguments(plan))


def with_lora(model: Any, **arguments: Any) -> Any:
    """Freeze a model, and add LoRA to it.

    Args:
        model: a transformers model, quantised or not.
        **arguments: arguments of ``LoraConfig``.

    Raises:
        BadInput: if the model has no module with the name of a target, or none that LoRA can adapt.
    """
    try:
        adapted = _adapted(model, lora_config(**arguments))
    except ValueError as error:
        raise BadInput(f"lora.target_modules: {first_line(error)}") from None
    return _trained_in_fp32(adapted)


def _arguments(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in plan.peft.items() if name != "kind"}


def _adapted(model: Any, config: PeftConfig) -> Any:
    peft_probes.ignore_unusable()
    return get_peft_model(model, config)


def lora_config(**arguments: Any) -> LoraConfig:
    """Make peft's config of LoRA from the arguments of ``LoraConfig``."""
    arguments.pop("continue_from", None)  # for load/starts.py, and not for peft
    if arguments["target_modules"] == [ALL_LINEAR]:
        arguments["target_modules"] = ALL_LINEAR  # peft takes this word only as a string, not in a list
    return LoraConfig(task_type="CAUSAL_LM", **arguments)


def add_trained_head(model: Any, plan: Plan) -> Any:
    """Freeze a model, and train a copy of its output head."""
    # With dummy targets no linear layer gets LoRA. peft only copies the head, trains the copy, and saves it like an
    # adapter. It warns if the head is tied to the embedding; we separate the two on purpose.
    warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")
    head = _name_of(model, model.get_output_embeddings())
    return with_lora(model, target_modules=DUMMY_TARGET_MODULES, modules_to_save=[head])


def add_prompt(model: Any, plan: Plan) -> Any:
    """Freeze a model, and put learnt vectors before each row."""
    return _trained_in_fp32(_adapted(model, PromptTuningConfig(task_type="CAUSAL_LM", **_arguments(plan))))


def add_side_network(model: Any, plan: Plan) -> Any:
    """Freeze a model, and put the copies of a plan beside its last blocks; raises what :func:`with_copies` does."""
    return with_copies(model, **_arguments(plan))


def with_copies(model: Any, blocks: int) -> Any:
    """Freeze a model, and put a trained copy beside each of its last blocks, in place.

    Args:
        model: a transformers model, quantised or not.
        blocks: the number of blocks that get a copy.

    Raises:
        BadInput: if the model has fewer blocks, or no list of blocks.
    """
    model.requires_grad_(False)
    # No KV cache, because a copy would write its keys and values into the cache of the block beside it.
    model.config.use_cache = model.generation_config.use_cache = False
    layers = getattr(model.base_model, "layers", None)
    if layers is None or len(layers) < blocks:
        found = "no list of them"
        if layers is not None:
            found = str(len(layers))
        raise BadInput(f"side.blocks={blocks}: {type(model).__name__} has {found}")
    for number in range(len(layers) - blocks, len(layers)):
        beside = _unquantised_copy(layers[number]).float()
        layers[number] = side_network.SideBlock(layers[number], model.config.hidden_size, beside)
        # The join is made on the CPU, and the copy may be on a GPU.
        layers[number].join.to(next(beside.parameters()).device)
    return model


@contextlib.contextmanager
def without_adapter(model: Any) -> Iterator[Any]:
    """Switch off an adapter or a side network inside the context, so that the base need not be loaded a second time.

    Args:
        model: a ``PeftModel``, or a model with a side network.

    Yields:
        The base model, as it was before it was adapted.
    """
    if hasattr(model, "disable_adapter"):
        with model.disable_adapter():
            # The model inside peft's wrapper. LoRA in it is switched off here; a learnt prompt is only in the wrapper.
            yield model.get_base_model()
        return
    layers = model.base_model.layers
    sides = {number: layer for number, layer in enumerate(layers) if isinstance(layer, side_network.SideBlock)}
    assert sides, "a model without an adapter or a side network has nothing to switch off"
    try:
        for number, side in sides.items():
            layers[number] = side.block
        yield model
    finally:
        for number, side in sides.items():
            layers[number] = side


def _unquantised_copy(block: torch.nn.Module) -> torch.nn.Module:
    """Copy a block with its matrices in plain floats, because quantised matrices cannot be trained."""
    made = copy.deepcopy(block)
    for name, module in block.named_modules():
        if isinstance(module, bnb.nn.Linear4bit | bnb.nn.Linear8bitLt):
            plain = torch.nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            plain.weight.data = dequantize_module_weight(module).float()
            if module.bias is not None:
                plain.bias.data = module.bias.data.float()
            made.set_submodule(name, plain)
    return made


def _trained_in_fp32(model: Any) -> Any:
    """Convert the trained weights to fp32 (master weights).

    Small updates would be lost in 16-bit weights, and torch's loss scaler refuses fp16 gradients. peft itself converts
    only LoRA's matrices, not the copy of a trained head.
    """
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model


def modules_named(model: torch.nn.Module, name: str) -> list[torch.nn.Module]:
    """List all modules whose path ends in this name; peft finds its target modules in the same way."""
    return [module for path, module in model.named_modules() if path == name or path.endswith(f".{name}")]


def _name_of(model: torch.nn.Module, wanted: torch.nn.Module) -> str:
    """Return the last part of a module's path, such as ``lm_head``."""
    return next(path for path, module in model.named_modules() if module is wanted).rsplit(".", 1)[-1]


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
    """Count the numbers that would train once the part that the plan asks for is added.

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
