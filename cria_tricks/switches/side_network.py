"""Switch the side network on, and bill it; ``techniques/side_network.py`` has the card and the code."""

from dataclasses import replace

from cria_tricks.bill.fused_operations import tiled
from cria_tricks.bill.operation import FP32, JOINED, Operation, stored_as_multiplied
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Facts
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Side
from cria_tricks.step_plan import Plan
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="reparametrised", lesson="lora", switches=("peft=side_network",))


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Have the last blocks copied; ``load/adapters.py`` knows where a model keeps them."""
    if recipe.tricks.peft != "side_network":
        if recipe.side != Side():
            plan = plan.warn(f"the side.* settings have no effect: tricks.peft is {recipe.tricks.peft}")
        return plan
    return plan.with_("peft", kind="side_network", blocks=recipe.side.blocks).then("load.adapters.add_side_network")


def refuse_model(plan: Plan, facts: Facts) -> None:
    """Refuse a model with fewer blocks than get a copy."""
    blocks = plan.peft.get("blocks", 0)  # other methods have no such entry
    if blocks <= (facts.blocks or 0):
        return
    if facts.blocks is None:
        raise BadInput(f"tricks.peft=side_network: {facts.name} has no list of blocks to copy; set tricks.peft=lora")
    raise BadInput(
        f"side.blocks={blocks}: {facts.name} has {facts.blocks} blocks; set side.blocks={facts.blocks} or less"
    )


def bill(step: Step, recipe: Recipe) -> Step:
    """Bill an fp32 copy and a joining matrix for each of the last blocks.

    Without gradient checkpointing the gradient stops at the first copy.
    """
    if recipe.tricks.peft != "side_network":
        return step
    shape = step.shape
    blocks = recipe.side.blocks
    if blocks > shape.layers:
        raise BadInput(
            f"side.blocks={blocks}: {shape.name} has {shape.layers} blocks; set side.blocks={shape.layers} or less"
        )
    a_block = [(blocks * shape.copies(name), d_in * d_out) for name, (d_in, d_out) in shape.linears.items()]
    added = (*a_block, (blocks, shape.block_other_weights), (blocks, shape.width**2))
    # bill/moments.py needs ``learns_beside``: it adds points of the step at which a frozen block runs backward beside
    # its copy, and it knows that the gradient stops at the first copy.
    return replace(
        step,
        trains_all=False,
        trains_head=False,
        reaches_embedding=False,
        added=added,
        learning_blocks=blocks,
        learns_beside=True,
        learning_operations=copy_and_join,
    )


def copy_and_join(step: Step) -> list[Operation]:
    """List the operations of the trained copy beside a frozen block, and of the matrix that joins the two."""
    width = step.shape.width
    a = step.compute_itemsize
    # The copy's weights are fp32. So the results of its norms are fp32, too, because a norm multiplies by its weight.
    beside = replace(
        step,
        trains_all=True,
        other_weight_itemsize=FP32,
        hidden_itemsize=FP32,
        product_itemsize=a,
        quantised=False,
        product_bytes=stored_as_multiplied,
    )
    # The backward pass of the copy runs before that of the frozen block, so the gradient of their sum waits meanwhile.
    waits = step.all_tokens * width * step.hidden_itemsize
    copied = []
    for operation in tiled(beside):
        keeps = dict(operation.keeps)
        for name in keeps:
            if name.endswith("normalised"):  # a norm normalises in the dtype of its input
                keeps[name] = keeps[name] * step.hidden_itemsize // FP32
        copied.append(replace(operation, keeps=keeps, backward=operation.backward + waits))
    joined = step.all_tokens * width * a
    # Autocast's copy of the joining matrix, if products compute in 16 bits.
    in_16_bits = width * width * a * (a < FP32)
    join = dict(zip(JOINED, (joined, in_16_bits), strict=True))
    # Backward, at most three tensors of this size: the sum's gradient, its cast to the compute dtype, and the gradient
    # of the join's input.
    return [*copied, Operation("join", join, forward=joined, backward=3 * joined, learns=width * width * FP32)]
