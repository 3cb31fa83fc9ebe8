"""The closed form of a step's products is the number that torch's counter counts in a real one: no tolerance."""

from dataclasses import replace

import pytest

from cria_tricks.bill import products
from cria_tricks.hardware import T4
from cria_tricks.measure.counting import flops
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches.folds import step_of
from tests.hardware import models

ROWS, TOKENS, MASKED = 2, 24, 6
ALWAYS = ["lora.r=4", "prompt.tokens=5", "side.blocks=2"]
BACK = "tricks.gradient_checkpointing=true"
TILED = "tricks.tiled_mlp=10"

RECIPES = {
    "full": [],
    "full, checkpointed": [BACK],
    "lora": ["tricks.peft=lora"],
    "lora, checkpointed": ["tricks.peft=lora", BACK],
    "lora, chunked": ["tricks.peft=lora", "tricks.chunked_loss=true"],
    "lora, chunked, checkpointed": ["tricks.peft=lora", "tricks.chunked_loss=true", BACK],
    "q and v": ["tricks.peft=lora", "lora.target_modules=q_proj,v_proj"],
    "q and v, checkpointed": ["tricks.peft=lora", "lora.target_modules=q_proj,v_proj", BACK],
    "o": ["tricks.peft=lora", "lora.target_modules=o_proj"],
    "down": ["tricks.peft=lora", "lora.target_modules=down_proj"],
    "all linears": ["tricks.peft=lora", "lora.target_modules=all-linear"],
    "dora": ["tricks.peft=lora", "lora.dora=true"],
    "dora, checkpointed": ["tricks.peft=lora", "lora.dora=true", BACK],
    "head": ["tricks.peft=head"],
    "head, checkpointed": ["tricks.peft=head", BACK],
    "prompt": ["tricks.peft=prompt_tuning"],
    "prompt, checkpointed": ["tricks.peft=prompt_tuning", BACK],
    "side": ["tricks.peft=side_network"],
    "side, checkpointed": ["tricks.peft=side_network", BACK],
    "full, one of three": ["tricks.gradient_checkpointing=1"],
    "lora, one of three": ["tricks.peft=lora", "tricks.gradient_checkpointing=1"],
    "lora, two of three": ["tricks.peft=lora", "tricks.gradient_checkpointing=2"],
    "lora, three of three": ["tricks.peft=lora", "tricks.gradient_checkpointing=3"],
    "q and v, two of three": [
        "tricks.peft=lora",
        "lora.target_modules=q_proj,v_proj",
        "tricks.gradient_checkpointing=2",
    ],
    "dora, one of three": ["tricks.peft=lora", "lora.dora=true", "tricks.gradient_checkpointing=1"],
    "prompt, two of three": ["tricks.peft=prompt_tuning", "tricks.gradient_checkpointing=2"],
    "full, tiled": [TILED],
    "lora, tiled": ["tricks.peft=lora", TILED],
    "lora, tiled, checkpointed": ["tricks.peft=lora", TILED, BACK],
    "q and v, tiled, one of three": [
        "tricks.peft=lora",
        "lora.target_modules=q_proj,v_proj",
        TILED,
        "tricks.gradient_checkpointing=1",
    ],
    "dora, tiled, checkpointed": ["tricks.peft=lora", "lora.dora=true", TILED, BACK],
    "dora, tiled": ["tricks.peft=lora", "lora.dora=true", TILED],
    "down, tiled": ["tricks.peft=lora", "lora.target_modules=down_proj", TILED],
    "prompt, tiled": ["tricks.peft=prompt_tuning", TILED],
    "side, tiled, checkpointed": ["tricks.peft=side_network", TILED, BACK],
    "side, tiled": ["tricks.peft=side_network", TILED],
    "lora, bf16": ["tricks.peft=lora", "tricks.precision=bf16", BACK],
}


def counted_by_hand(recipe: Recipe) -> int:
    folded = replace(step_of(recipe, models.shape(), T4, TOKENS), batch=ROWS)
    found = products.blocks(folded)
    length = TOKENS + (recipe.prompt.tokens if recipe.tricks.peft == "prompt_tuning" else 0)
    logits = TOKENS - MASKED if recipe.tricks.chunked_loss else length
    in_blocks = sum(part.flops for part in (found.forward, found.again, found.backward, found.adapter))
    attention = products.attention(folded, found, fused=False)
    return ROWS * (length * in_blocks + logits * products.head(folded, found.learns).flops) + found.norms + attention


@pytest.mark.parametrize("settings", RECIPES.values(), ids=RECIPES.keys())
def test_a_real_step_does_exactly_these_products(settings):
    recipe = with_settings(Recipe(), [*settings, *ALWAYS])
    model, plan = models.model(recipe)
    assert flops(lambda: models.loss(model, plan, models.batch(ROWS, TOKENS, MASKED)).backward()) == counted_by_hand(
        recipe
    )


@pytest.mark.parametrize("settings", RECIPES.values(), ids=RECIPES.keys())
def test_a_real_model_trains_exactly_these_weights(settings):
    recipe = with_settings(Recipe(), [*settings, *ALWAYS])
    model, _ = models.model(recipe)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trained == step_of(recipe, models.shape(), T4).trained_weights


def test_a_fused_kernel_makes_the_scores_once_more():
    """torch's own formulas for the flash kernel: two products forward, five backward."""
    import torch
    from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

    shape, q = models.shape(), torch.Size([ROWS, 4, TOKENS, 16])
    folded = replace(step_of(Recipe(), shape, T4, TOKENS), batch=ROWS)
    found = products.blocks(folded)
    of_torch = shape.layers * (sdpa_flop_count(q, q, q) + sdpa_backward_flop_count(q, q, q, q))
    assert products.attention(folded, found, fused=True) == of_torch


def test_a_mixture_sends_a_token_through_two_of_its_eight_experts():
    mixtral, dense = find_shape("mixtral-8x7b"), find_shape("mistral-7b")
    assert CONFIGS["mixtral-8x7b"]["num_experts_per_tok"] == 2
    of = {shape.name: products.blocks(step_of(Recipe(), shape, T4)).forward.flops for shape in (mixtral, dense)}
    mlp = 2 * dense.layers * 3 * dense.width * dense.inner
    assert of["mixtral-8x7b"] == of["mistral-7b"] + mlp


def test_the_rule_of_six_operations_a_weight_and_token():
    """Kaplan et al. 2020, arXiv:2001.08361, sec. 2.1, for full training without attention."""
    shape = find_shape("llama-3.2-1b")
    folded = step_of(Recipe(), shape, T4)
    found = products.blocks(folded)
    in_all = found.forward.flops + found.backward.flops + products.head(folded, found.learns).flops
    assert in_all == 6 * shape.active_weights
