"""A Llama of any widths under a recipe, on real numbers, and its shape."""

import contextlib
import warnings

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cria_tricks.load import losses
from cria_tricks.models.shape import Shape, shape_of
from cria_tricks.recipe import Recipe
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import Plan, function_at

WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "tie_word_embeddings": True,
}


def shape(**widths) -> Shape:
    return shape_of({"model_type": "llama", **WIDTHS, **widths}, "tiny")


def model(recipe: Recipe, attention: str = "eager", **widths) -> tuple[LlamaForCausalLM, Plan]:
    """Build what ``load`` would, but for the quantisation."""
    plan = resolve(recipe)
    warnings.filterwarnings("ignore", message=".*tie_word_embeddings")
    made = LlamaForCausalLM(LlamaConfig(**{**WIDTHS, **widths}, attn_implementation=attention))
    made = made.to(getattr(torch, plan.model["dtype"]))
    made.config.use_cache = False
    for edit in plan.after_load:
        made = function_at(edit)(made, plan)
    return made.train(), plan


def batch(rows: int, tokens: int, masked: int = 0) -> dict[str, torch.Tensor]:
    """Random rows; the first tokens of each, and always the very first, are not trained."""
    ids = torch.randint(3, 90, (rows, tokens), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[:, :masked] = -100
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def loss(made, plan: Plan, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = next((half[name] for name in half if plan.training.get(name)), None)

    def autocast():
        return torch.autocast("cpu", dtype) if dtype else contextlib.nullcontext()

    with autocast():
        return losses.find(plan, autocast)(made, inputs)
