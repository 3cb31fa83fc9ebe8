"""Estimate the bytes and the seconds of a recipe: begin with plain fp32 full fine-tuning, and let each trick change it.

These are the same tricks, in the same order, that switch a recipe on.
"""

from cria_tricks.bill import moved_bytes, step_time
from cria_tricks.bill.bill import Bill
from cria_tricks.bill.block_operations import walk
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts, fp32_states
from cria_tricks.bill.loss import full_loss
from cria_tricks.bill.moments import moments
from cria_tricks.bill.operation import everything, norm_in_fp32, stored_as_multiplied
from cria_tricks.bill.product_operations import adapted
from cria_tricks.bill.work import Work
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.tricks import TRICKS


def facts(
    recipe: Recipe, shape: Shape, device: Device, tokens: int | None = None, trained_tokens: int | None = None
) -> StepFacts:
    """Collect what the memory bill must know: plain fp32 full fine-tuning, changed by each trick of the recipe.

    Args:
        recipe: what is wanted.
        shape: of the model.
        device: the machine it is meant for.
        tokens: tokens of a row; ``data.max_length`` when left out.
        trained_tokens: trained tokens of a micro-batch; all but the first of each row when left out.
    """
    batch = recipe.train.batch_size
    tokens = tokens or recipe.data.max_length
    if trained_tokens is None:
        trained_tokens = batch * (tokens - 1)  # a row's first token has no token before it that predicts it
    found = StepFacts(
        shape=shape,
        device=device,
        batch=batch,
        tokens=tokens,
        trained_tokens=trained_tokens,
        block_weight_bytes=FP32 * shape.layers * sum(d_in * d_out for d_in, d_out in shape.packable.values()),
        learning_operations=walk,
        product_bytes=stored_as_multiplied,
        with_adapter=adapted,
        norm_bytes=norm_in_fp32,
        block_waits=everything,
        loss_moments=full_loss,
        state_bytes=fp32_states,
        embedding_state_bytes=fp32_states,
        learning_blocks=shape.layers,
        expandable_segments=recipe.train.expandable_segments,
    )
    for trick in TRICKS:
        found = trick.estimate(found, shape, recipe)
    return found


def estimate(
    recipe: Recipe, shape: Shape, device: Device, tokens: int | None = None, trained_tokens: int | None = None
) -> Bill:
    """Estimate what a step needs in one process; the arguments are those of :func:`facts`."""
    found = facts(recipe, shape, device, tokens, trained_tokens)
    return Bill(found, tuple(moments(found)))


def work(recipe: Recipe, shape: Shape, device: Device, tokens: int | None = None, trained_share: float = 1.0) -> Work:
    """Collect what the estimate of time must know: plain fp32 full fine-tuning, changed by each trick of the recipe.

    Args:
        recipe: what is wanted.
        shape: of the model.
        device: the card that it is meant for.
        tokens: tokens of a row; ``data.max_length`` when left out.
        trained_share: which share of the tokens is trained, from 0 to 1.
    """
    batch = recipe.train.batch_size
    tokens = tokens or recipe.data.max_length
    found = Work(
        shape=shape,
        device=device,
        batch=batch,
        tokens=tokens,
        trained_tokens=batch * tokens * trained_share,
        trained_weights=shape.weights,
        between=moved_bytes.one_by_one,
        saved=moved_bytes.saved_one_by_one,
        optimizer_bytes=moved_bytes.ADAMW,
        gradient_bytes=moved_bytes.CLIP,
        logit_bytes=moved_bytes.LOGIT,
        logit_saved_bytes=moved_bytes.LOGIT_SAVED,
    )
    for trick in TRICKS:
        found = trick.seconds(found, shape, recipe)
    return found


def step(
    recipe: Recipe,
    shape: Shape,
    card: Card,
    tokens: int | None = None,
    trained_share: float = 1.0,
    cards: int = 1,
) -> step_time.Step:
    """Estimate the time of one optimizer step.

    Args:
        recipe: what is trained; ``train.batch_size`` rows a micro-batch, ``tricks.gradient_accumulation`` of them.
        shape: the model's.
        card: the GPU.
        tokens: tokens of a row; ``data.max_length`` when left out.
        trained_share: which share of the tokens is trained: the chunked loss makes logits for those only.
        cards: how many train data-parallel; they all-reduce their gradients over PCIe at the end of the step.
    """
    return step_time.step(work(recipe, shape, card.device, tokens, trained_share), card, cards)
