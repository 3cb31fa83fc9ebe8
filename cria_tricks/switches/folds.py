"""Estimate the bytes and the seconds of a recipe: begin with plain fp32 full fine-tuning; each technique changes it.

These are the same techniques, in the same order, that switch a recipe on.
"""

import functools
from dataclasses import replace

from cria_tricks.bill import launches, moved_bytes, products, step_time
from cria_tricks.bill.bill import Bill
from cria_tricks.bill.block_operations import adapted, walk
from cria_tricks.bill.evaluation import without_gradients
from cria_tricks.bill.loss import full_loss
from cria_tricks.bill.moments import moments
from cria_tricks.bill.operation import FP32, everything, norm_in_fp32, stored_as_multiplied
from cria_tricks.bill.step import Step, fp32_states
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.device import Device
from cria_tricks.hardware.gpus import rates_of
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches import TECHNIQUES, int8
from cria_tricks.switches.activation_offload import OVERLAPPED

LONGEST = 2**20
"""The longest row for which copies are tried to hide [tokens]."""


def step_of(
    recipe: Recipe,
    shape: Shape,
    device: Device,
    tokens: int | None = None,
    trained_tokens: int | None = None,
    trained_share: float = 1.0,
) -> Step:
    """Describe a recipe's training step: plain fp32 full fine-tuning, changed by each technique of the recipe.

    Args:
        recipe: what is wanted.
        shape: of the model.
        device: the machine it is meant for.
        tokens: tokens of a row; ``data.max_length`` when left out.
        trained_tokens: the most trained tokens of a micro-batch, for the bytes; all but the first of each row when left
            out.
        trained_share: which share of the tokens is trained in the mean, from 0 to 1; for the seconds.

    Raises:
        BadInput: for an adapter that has no estimate.
    """
    tokens = tokens or recipe.data.max_length
    recipe = as_long_rows_run(recipe, shape, device, tokens)
    return _as_asked(recipe, shape, device, tokens, trained_tokens, trained_share)


def _as_asked(
    recipe: Recipe,
    shape: Shape,
    device: Device,
    tokens: int,
    trained_tokens: int | None = None,
    trained_share: float = 1.0,
) -> Step:
    """Describe the step as the recipe asks for it, also if its rows are too short to travel."""
    batch = recipe.train.batch_size
    if trained_tokens is None:
        trained_tokens = batch * (tokens - 1)  # a row's first token has no token before it that predicts it
    found = Step(
        shape=shape,
        device=device,
        batch=batch,
        tokens=tokens,
        trained_tokens=trained_tokens,
        trained_share=trained_share,
        block_weight_bytes=FP32 * shape.layers * sum(d_in * d_out for d_in, d_out in shape.packable.values()),
        learning_operations=walk,
        product_bytes=stored_as_multiplied,
        with_adapter=adapted,
        norm_bytes=norm_in_fp32,
        block_waits=everything,
        loss_moments=full_loss,
        state_bytes=fp32_states,
        embedding_state_bytes=fp32_states,
        logit_bytes=moved_bytes.LOGIT,
        logit_saved_bytes=moved_bytes.LOGIT_SAVED,
        optimizer_bytes=moved_bytes.ADAMW,
        gradient_bytes=moved_bytes.CLIP,
        learning_blocks=shape.layers,
        expandable_segments=recipe.train.expandable_segments,
    )
    for technique in TECHNIQUES:
        found = technique.bill(found, recipe)
    return found


def estimate(
    recipe: Recipe, shape: Shape, device: Device, tokens: int | None = None, trained_tokens: int | None = None
) -> Bill:
    """Estimate what a step needs in one process; the arguments are those of :func:`step_of`."""
    step = step_of(recipe, shape, device, tokens, trained_tokens)
    return Bill(step, tuple(moments(step)))


def in_eval_mode(step: Step) -> Step:
    """Return the step of a pass in eval mode, without gradients."""
    return int8.in_eval_mode(without_gradients(step))


def travels_from(recipe: Recipe, shape: Shape, device: Device) -> int:
    """Return the tokens of a micro-batch from which inputs of blocks travel beside the computing.

    It is 1 on a CPU, and on a card whose rates are not known.
    """
    card = rates_of(device)
    if device.kind != "cuda" or card is None:
        return 1
    return _travels_from(recipe, shape, card)


@functools.lru_cache(maxsize=256)  # a search for the longest row asks many times
def _travels_from(recipe: Recipe, shape: Shape, card: Card) -> int:
    return least_tokens(_as_asked(recipe, shape, card.device, recipe.data.max_length), card)


def least_tokens(step: Step, card: Card) -> int:
    """Return the tokens of the shortest micro-batch whose copies take no time, by bisection.

    Shorter ones wait for the host, which starts one kernel after the other: there each copy delays all kernels behind
    it. Much longer rows compute more for each token, in attention, but a token's input stays as large. So if copies are
    hidden at one length, they are at all greater ones.

    Args:
        step: a step with ``travelling_blocks``; the length of its rows does not matter.
        card: the card and its rates.

    Returns:
        Tokens of all rows of the micro-batch, learnt prompt vectors included; 1 if every length is enough, and those of
        rows of :data:`LONGEST` tokens if none is.
    """
    least, most = 1, LONGEST
    while least < most:
        middle = (least + most) // 2
        if hidden(replace(step, tokens=middle + step.prompt_tokens), card):
            most = middle
        else:
            least = middle + 1
    return 1 if most == 1 else replace(step, tokens=most + step.prompt_tokens).all_tokens


def hidden(step: Step, card: Card) -> bool:
    """Tell whether the blocks keep the card busy for longer than copies and launches take."""
    one = replace(step, micro_batches=1)
    parts = [step_time.timed(part, card, step.precision) for part in step_time.counts(one)]
    travel = next(part for part in parts if part.name == step_time.TRAVEL)
    busy = sum(part.seconds for part in parts if part.name in step_time.BLOCKS)
    started = launches.of_blocks(one, products.blocks(one)) + launches.TRAVEL * step.travelling_blocks
    return step_time.beside_the_blocks(travel, parts).seconds == 0 and busy >= started * card.reached.launch


def as_long_rows_run(recipe: Recipe, shape: Shape, device: Device, tokens: int) -> Recipe:
    """Return the recipe as it runs for rows of so many tokens: short ones are checkpointed and not offloaded."""
    if recipe.tricks.activation_offload != "overlapped":
        return recipe
    of_prompt = recipe.prompt.tokens * (recipe.tricks.peft == "prompt_tuning")
    if recipe.train.batch_size * (tokens + of_prompt) >= travels_from(recipe, shape, device):
        return recipe
    return recipe.model_copy(update={"tricks": recipe.tricks.model_copy(update={"activation_offload": False})})


def for_shape(plan: Plan, recipe: Recipe, shape: Shape) -> Plan:
    """Write into a plan what depends on the model's shape: which micro-batches are too short to travel."""
    if OVERLAPPED not in plan.step_context:
        return plan
    least = travels_from(recipe, shape, plan.device)
    plan = plan.refine("checkpointing", travels_from=least)
    if plan.device.kind == "cuda" and rates_of(plan.device) is None:
        return plan.warn(
            f"activation_offload=overlapped: the speed of {plan.device.name} is not known, so inputs of blocks travel "
            "also where the copies take longer than the computing"
        )
    if least == 1:
        return plan
    return plan.warn(
        f"activation_offload=overlapped: micro-batches of fewer than {least:,} tokens are checkpointed and not "
        f"offloaded, because on {plan.device.name} their copies would take time"
    )


def time_of(
    recipe: Recipe,
    shape: Shape,
    card: Card,
    tokens: int | None = None,
    trained_share: float = 1.0,
    cards: int = 1,
) -> step_time.StepTime:
    """Estimate the time of one optimizer step.

    Args:
        recipe: what is trained; ``train.batch_size`` rows a micro-batch, ``tricks.gradient_accumulation`` of them.
        shape: the model's.
        card: the GPU.
        tokens: tokens of a row; ``data.max_length`` when left out.
        trained_share: which share of the tokens is trained: the chunked loss makes logits for those only.
        cards: how many train data-parallel; they all-reduce their gradients over PCIe at the end of the step.
    """
    step = step_of(recipe, shape, card.device, tokens, trained_share=trained_share)
    return step_time.time_of(step, card, cards)
