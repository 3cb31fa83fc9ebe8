"""Switch packing on, and bill it; ``techniques/packing.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches.flash_attention import with_kernel
from cria_tricks.technique import Field, Technique

TECHNIQUE = Technique(
    claim="exact per document",
    lesson="packing",
    switches=("packing=true",),
    # It is no value to try, because it changes how many tokens a step learns from.
    fields={"packing": Field("Speed", "Packing of short rows", search="may change")},
)
IMPLEMENTATION = "sdpa_by_document"
"""Under this name transformers finds the attention function (``load/attention.py``)."""


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Set the length of a packed row, and with sdpa the attention function that attends document by document.

    ``trainer/fit.py`` packs the training rows, and not those of the evaluation.

    Raises:
        BadInput: for ``flash_attention_2`` with several rows in a batch.
    """
    if not recipe.tricks.packing:
        return plan
    attention = recipe.tricks.attention
    batch = recipe.train.batch_size
    if attention == "flash_attention_2" and batch > 1:
        raise BadInput(
            f"tricks.packing=true with tricks.attention=flash_attention_2 and train.batch_size={batch}: transformers "
            "keeps documents apart in a single row only; set train.batch_size=1, or use tricks.attention=sdpa"
        )
    if attention == "sdpa":
        plan = plan.refine("model", attn_implementation=IMPLEMENTATION)
    return plan.with_("collator", packed_length=recipe.data.max_length)


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill attention without a mask, document by document (for sdpa), and positions for each row.

    If the model has a sliding window, its mask remains.

    The time is that of a row with one document, the most expensive case.
    """
    if not recipe.tricks.packing:
        return step
    step = replace(step, own_positions=True)
    # repeats=True, because sdpa_by_document (load/attention.py) always repeats the key and value heads.
    if recipe.tricks.attention == "sdpa" and step.shape.window:
        # A block with a sliding window always gets a mask, even if the window is longer than the row.
        step = with_kernel(step, masked=True, repeats=True)
    elif recipe.tricks.attention == "sdpa":
        # by_document copies the results into one tensor, which the output projection saves.
        step = replace(with_kernel(step, masked=False, repeats=True), joins_documents=True)
    return step
