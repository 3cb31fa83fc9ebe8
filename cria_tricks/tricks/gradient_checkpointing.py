r"""Gradient checkpointing: keep only each block's input, and recompute its insides in the backward pass.

Saves    activations: L blocks x (s + a)  ->  L x s + 1 x a                          [bytes]
Costs    one more forward pass through every block. In FLOPs of a step, for blocks of two equal products: +33 % if all
         weights train, +50 % on a frozen base; with early stop, which skips the last product, +17 and +25 %. With LoRA
         on down_proj early stop can skip only one thin product: for Llama-3.2-1B's blocks, r = 16, T = 2048, it is
         +47 % with and without
Claim    exact: same loss, same gradients, bit for bit, if the random state is replayed
Needs    nothing; composes with every other trick
Breaks   blocks with side effects; dropout, unless the random states of the CPU and of the card are restored
Sources  Chen et al. 2016, arXiv:1604.06174, sec. 4
Ours     30 lines, one block at a time. The switch takes torch's non-reentrant checkpoint, which adds early stop,
         autocast and further arguments. Both also keep the CPU's random state, 5,056 bytes a block, and the card's

Shapes: s = B T D elements, a block's input; a = all that the block saves inside for its backward pass.
"""

from dataclasses import replace

import torch

from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.saved_activations import BlockTensors, WaitingBytes
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
    # Sec. 4, with one block as a segment: only what crosses a segment's border is kept. Its inside is dropped, and
    # computed again when the backward pass comes to it. The weights are arguments, because autograd gives gradients
    # only to a Function's arguments.
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
        _restore(ctx.generators, now)  # so that later draws are the same as without checkpointing
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
    """Ask transformers' Trainer for it; ``trainer/arguments.py`` knows the argument's name in each version."""
    if not recipe.tricks.gradient_checkpointing:
        return plan
    if recipe.tricks.peft == "head":
        return plan.warn(
            "gradient_checkpointing has no effect: with peft=head no block below the head keeps activations"
        )
    return plan.with_("training", gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False})


def estimate(memory: StepFacts, shape: Shape, recipe: Recipe) -> StepFacts:
    """Bill L s + a: the inputs s of all L blocks, and the insides a of the one that is being recomputed."""
    if not recipe.tricks.gradient_checkpointing or recipe.tricks.peft == "head":  # no gradient goes below the head
        return memory
    # bill/block.py needs the flag: the forward pass of the open block runs a second time, so other tensors are alive
    # around its operations.
    return replace(memory, checkpointed=True, block_waits=inputs_wait)


def inputs_wait(block: BlockTensors) -> WaitingBytes:
    """Count what waits in each block: its input, s bytes.

    The insides of the open block, a bytes, are counted in ``bill/block.py``. Two more things wait in each block: what
    int8 products pin, which no hook can take away, and what the matrix that joins a trained copy saves
    (``side_network.py``), because it is not recomputed. The open block has its pinned tensors a second time, and its
    input beside them if none of its operations keeps it.
    """
    again = block.pinned
    if not block.keeps_input:
        again += block.input
    why = "its input"
    if block.joined:
        why += " and its join"
    return WaitingBytes(block.input + block.pinned + block.joined, again, why)


def seconds(work: Work, shape: Shape, recipe: Recipe) -> Work:
    """Run each block forward once more. transformers makes embeddings require a gradient, so all blocks get one."""
    if not recipe.tricks.gradient_checkpointing or recipe.tricks.peft == "head":
        return work
    return replace(work, forward_repeats=1, gradient_reaches_embedding=True, saved=block_input)


def block_input(work: Work) -> int:
    """What a block saves for one position [bytes]: s, its input."""
    return work.shape.width * work.hidden_itemsize
