"""Switch prompt tuning on, and bill it; ``techniques/prompt_tuning.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Prompt
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="reparametrised", lesson="lora", switches=("peft=prompt_tuning",))


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask peft for a learnt prompt."""
    tricks = recipe.tricks
    if tricks.peft != "prompt_tuning":
        if recipe.prompt != Prompt():
            plan = plan.warn(f"the prompt.* settings have no effect: tricks.peft is {tricks.peft}")
        return plan
    if tricks.packing:
        raise BadInput(
            "tricks.packing=true with tricks.peft=prompt_tuning: peft drops the position ids, so the documents of a "
            "row would see each other; set tricks.packing=false"
        )
    return plan.with_("peft", kind="prompt_tuning", num_virtual_tokens=recipe.prompt.tokens).then(
        "load.adapters.add_prompt"
    )


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill P vectors, and rows of P more positions.

    ``learning_blocks`` stays at all blocks, because the gradient flows through all of them down to the prompt.
    """
    if recipe.tricks.peft != "prompt_tuning":
        return step
    vectors = recipe.prompt.tokens
    return replace(
        step,
        trains_all=False,
        trains_head=False,
        added=((1, vectors * step.shape.width),),
        tokens=step.tokens + vectors,
        prompt_tokens=vectors,
    )
