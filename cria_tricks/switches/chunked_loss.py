"""Switch the chunked loss on, and bill it; ``techniques/chunked_loss.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill import loss
from cria_tricks.bill.operation import FP32, TOKENS_PER_CHUNK, Line
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Facts
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.technique import ON_OFF, Field, Technique

TECHNIQUE = Technique(
    claim="exact within rounding",
    lesson="chunked_loss",
    switches=("chunked_loss=true",),
    fields={"chunked_loss": Field("Memory", "Chunked cross-entropy loss (logits)", values=ON_OFF, search="exact")},
    needs={"chunked_loss=true": "peft=lora"},
)


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Replace the loss by the chunked one; ``load/losses.py`` calls it after the last block."""
    if not recipe.tricks.chunked_loss:
        return plan
    if recipe.tricks.peft == "prompt_tuning":
        raise BadInput(
            "tricks.chunked_loss=true with tricks.peft=prompt_tuning: it calls the model below the learnt prompt; set "
            "tricks.chunked_loss=false"
        )
    trained = {"none": "trains the head with everything else", "head": "trains the head"}
    if recipe.tricks.peft in trained:
        raise BadInput(
            f"tricks.chunked_loss=true with tricks.peft={recipe.tricks.peft}: it keeps no logits to learn a head "
            f"from, and peft={recipe.tricks.peft} {trained[recipe.tricks.peft]}; set tricks.peft=lora, or "
            "tricks.chunked_loss=false"
        )
    if "lm_head" in recipe.lora.target_modules:
        raise BadInput(
            "tricks.chunked_loss=true with lm_head in lora.target_modules: it needs a frozen head; leave one out"
        )
    return plan.with_("loss", kind="chunked", tokens_per_chunk=TOKENS_PER_CHUNK)


def refuse_model(plan: Plan, facts: Facts) -> None:
    """Refuse a model whose head has an adapter, or does more than one product."""
    if plan.loss["kind"] != "chunked":
        return
    adapted = [target for target in plan.peft.get("target_modules", ()) if facts.is_head(target)]
    if adapted:
        raise BadInput(
            f"tricks.chunked_loss=true with {adapted[0]} in lora.target_modules: it is the head of {facts.name}, which "
            "must stay frozen; leave one out"
        )
    if facts.beside_head:
        raise BadInput(
            f"tricks.chunked_loss=true: the head of {facts.name} does more than one product ({facts.beside_head}), "
            "which the chunked loss does not; set tricks.chunked_loss=false"
        )


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill the logits of one chunk at a time, of trained tokens only; autograd saves none of them."""
    if not recipe.tricks.chunked_loss:
        return step
    trained = step.batch * (step.tokens - step.prompt_tokens) * step.trained_share
    return replace(
        step,
        loss_moments=chunk_by_chunk,
        logit_positions=trained,
        logit_bytes=LOGIT_BYTES,
        logit_saved_bytes=0,
    )


def chunk_by_chunk(step: Step) -> dict[str, tuple[Line, ...]]:
    """List the lines of the bill around the loss: logits of one chunk, whatever the number of tokens."""
    shape = step.shape
    n = step.all_tokens
    a = step.compute_itemsize  # bytes of an element in products
    logits = min(TOKENS_PER_CHUNK, step.trained_tokens) * shape.vocabulary
    normed = n * shape.width * step.hidden_itemsize
    norm = normed
    if not step.offloads_the_end:
        norm += loss.normalised(step)
    hidden = 2 * a  # bytes for an element of a trained token's hidden state, and for its gradient
    if step.hidden_itemsize != a:
        hidden += step.hidden_itemsize  # the picked hidden states, before they are cast
    picked = step.trained_tokens * shape.width * hidden
    at_the_loss = (
        Line("final norm", norm, "its input and output"),
        Line("16-bit copy of the head", loss.head_copy(step), "by autocast, once for all chunks"),
        loss.cast_copies(step),
        Line("hidden states for the loss", picked, "of trained tokens, with gradients"),
        Line("logits", 2 * logits * FP32, f"of {TOKENS_PER_CHUNK} tokens in fp32, and their exp"),
    )
    # In the backward pass of the last norm no logits are left, and no residual stream is beside it.
    of_stream = step.stream_tokens * shape.width
    needs = step.norm_bytes(of_stream, step.hidden_itemsize)
    alone = needs.saved + needs.backward + needs.apart - of_stream * step.hidden_itemsize
    if step.in_pieces:  # or the gradient of all hidden states, beside the piece that is cut from it
        alone = max(alone, needs.saved + normed + of_stream * step.hidden_itemsize)
    around_norm = Line("final norm", alone, "its input, its results and gradients")
    return {"loss": at_the_loss, "last norm": (around_norm,)}


LOGIT_BYTES = 52
"""Memory traffic [bytes for one logit], forward and backward together; a logit is fp32 after the product."""
