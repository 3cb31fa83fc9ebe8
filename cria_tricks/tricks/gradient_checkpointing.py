r"""Gradient checkpointing: keep each block's input, recompute its insides on the way back.

Saves    activations: L blocks x (s + a)  ->  L x s + 1 x a                          [bytes]
Costs    one more forward through every block. Of its FLOPs, counted on blocks of two equal products: +33 % when all
         weights train, +50 % on a frozen base; with early stop, which skips the last product, +17 and +25 %. LoRA on
         down_proj leaves early stop one thin product to skip: Llama-3.2-1B's blocks, r = 16, T = 2048, +47 % both ways
Claim    exact: same loss, same gradients, bit for bit, if the random state is replayed
Needs    nothing; composes with every other trick
Breaks   blocks with side effects; dropout without the saved random states of the CPU and of the card
Sources  Chen et al. 2016, arXiv:1604.06174, sec. 4
Ours     30 lines, one block at a time. torch's non-reentrant checkpoint, the switch, adds early stop, autocast and
         further arguments; both keep 5,056 bytes of random state a block besides, and those of the card's generator

Shapes: s = B T D elements (a block's input), a = all that the block keeps inside.
"""

from dataclasses import replace

import torch

from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.waiting import BlockTensors, WaitingBytes
from cria_tricks.bill.work import Work
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

SWITCHES = ("gradient_checkpointing=true",)
CLAIM = "exact"
LESSON = "03_gradient_checkpointing"
REFERENCE = ("_Recompute",)
PLAIN = """
from transformers import TrainingArguments

arguments = TrainingArguments(
    "plain", max_steps=1, gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
)
"""


def generators_of(x: torch.Tensor) -> list[torch.Generator]:
    """List the random number generators that a block may draw from: the CPU's, and that of the card where ``x`` is."""
    return [torch.default_generator, *([torch.cuda.default_generators[x.get_device()]] if x.is_cuda else [])]


def _states(generators: list[torch.Generator]) -> list[torch.Tensor]:
    return [generator.get_state() for generator in generators]


def _restore(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


class _Recompute(torch.autograd.Function):
    # Sec. 4: of each segment, here one block, only what crosses its border is remembered; its inside is dropped, and
    # computed again when the backward pass comes to it. The weights are arguments so that they get their gradients.
    @staticmethod
    def forward(ctx, block, x_BTD, *weights):
        ctx.block = block
        ctx.weights = weights
        ctx.generators = generators_of(x_BTD)
        ctx.random_states = _states(ctx.generators)  # before the block draws its dropout mask
        ctx.save_for_backward(x_BTD)  # the only activation that is kept
        return block(x_BTD)  # inside a Function nothing is recorded, so the block keeps nothing

    @staticmethod
    def backward(ctx, grad_BTD):
        (x_BTD,) = ctx.saved_tensors
        x_BTD = x_BTD.detach().requires_grad_(ctx.needs_input_grad[1])  # the same bytes, cut off from what made them
        now = _states(ctx.generators)
        _restore(ctx.generators, ctx.random_states)  # the same mask again
        with torch.enable_grad():
            y_BTD = ctx.block(x_BTD.view_as(x_BTD))  # a view, because FlopCounterMode cannot watch a leaf here
        _restore(ctx.generators, now)  # what is drawn later does not change
        wanted = [tensor for tensor in (x_BTD, *ctx.weights) if tensor.requires_grad]
        found = iter(torch.autograd.grad(y_BTD, wanted, grad_BTD, allow_unused=True))
        return None, *(next(found) if tensor.requires_grad else None for tensor in (x_BTD, *ctx.weights))


def checkpointed(block: torch.nn.Module, x_BTD: torch.Tensor) -> torch.Tensor:
    """Run ``block(x)`` and keep nothing but ``x`` for the backward pass.

    Args:
        block: a module from (B, T, D) to (B, T, D) without side effects.
        x_BTD: its input, shape (B, T, D), any float dtype.

    Returns:
        ``block(x)``, shape (B, T, D); it and its gradients equal the plain ones bit for bit.
    """
    return _Recompute.apply(block, x_BTD, *(p for p in block.parameters() if p.requires_grad))


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask the trainer for it; ``trainer/shared.py`` knows this version's name of the argument."""
    if not recipe.tricks.gradient_checkpointing:
        return plan
    if recipe.tricks.peft == "head":
        return plan.warn(
            "gradient_checkpointing has no effect: with peft=head no block below the head keeps activations"
        )
    return plan.with_("training", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


def estimate(memory: StepFacts, shape: Shape, recipe: Recipe) -> StepFacts:
    """L s + a: each of L blocks leaves its input, s; the insides of one at a time, a, are made again."""
    if not recipe.tricks.gradient_checkpointing or recipe.tricks.peft == "head":  # below a head there is no way back
        return memory
    # The flag is for the walk through the open block (bill/block.py): its forward pass runs a second time, so other
    # tensors are open around its operations. That is the course of a step, and no line of this trick.
    return replace(memory, checkpointed=True, block_waits=inputs_wait)


def inputs_wait(block: BlockTensors) -> WaitingBytes:
    """The input of each block waits, s bytes; the insides of one, a, are counted where the open block is walked.

    What no hook can take away waits as well: what int8 pins, and the join of a trained copy, which is not made again.
    The open block has its pinned tensors a second time, and its input beside them if none of its operations keeps it.
    """
    again = block.pinned
    if not block.keeps_input:
        again += block.input
    why = "their inputs"
    if block.joined:
        why += " and their joins'"
    return WaitingBytes(block.input + block.pinned + block.joined, again, why)


def seconds(work: Work, shape: Shape, recipe: Recipe) -> Work:
    """Each block runs forward once more; transformers has the embedded tokens ask for a gradient, so all blocks do."""
    if not recipe.tricks.gradient_checkpointing or recipe.tricks.peft == "head":
        return work
    return replace(work, forward_repeats=1, gradient_reaches_embedding=True, saved=block_input)


def block_input(work: Work) -> int:
    """What a block saves for one position [bytes]: s, its input."""
    return work.shape.width * work.hidden_itemsize
