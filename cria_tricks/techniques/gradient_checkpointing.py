r"""Gradient checkpointing: keep only each block's input, and recompute its insides in the backward pass.

Saves    activations: L blocks x (s + a)  ->  L x s + 1 x a. With a number k only the first k blocks are checkpointed:
         L x s + (L - k) x a, and 1 x a at least                                     [bytes]
Costs    one more forward pass through every checkpointed block. In FLOPs of a step, for blocks of two equal products,
         all of them checkpointed: +33 % if all weights train, +50 % on a frozen base; with early stop, which skips the
         last product, +17 and +25 %. With LoRA on down_proj early stop can skip only one thin product: for
         Llama-3.2-1B's blocks, r = 16, T = 2048, it is +47 % with and without. With k, k / L of these
Claim    exact: same loss, same gradients, bit for bit, if the random state is replayed
Needs    nothing; composes with every other technique, but a number k not with side_network
Breaks   blocks with side effects; dropout, unless the random states of the CPU and of the card are restored
Sources  Chen et al. 2016, arXiv:1604.06174, sec. 4
Ours     30 lines, one block at a time. The switch takes torch's non-reentrant checkpoint, which adds early stop,
         autocast and further arguments. Both also keep the CPU's random state, 5,056 bytes a block, and the card's.
         transformers can checkpoint every n-th block. We take the first k: the last blocks free what they kept before
         the first block is recomputed, so nothing more is alive in that moment

Shapes: s = B T D elements, a block's input; a = all that the block saves inside for its backward pass; L blocks.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from cria_tricks.step_plan import Plan, function_at

REFERENCE = ("_Recompute",)
PLAIN = """
from transformers import TrainingArguments

# Since transformers 5.23 the names are activation_checkpointing and
# activation_checkpointing_kwargs. Colab's is older, and these work in all of 5.
arguments = TrainingArguments(
    "plain",
    max_steps=1,
    gradient_checkpointing=True,
    gradient_checkpointing_kwargs={"use_reentrant": False},
)
"""


def generators_of(x: torch.Tensor) -> list[torch.Generator]:
    """List the random number generators that a block may draw from: the CPU's, and that of the card where ``x`` is."""
    return [torch.default_generator, *([torch.cuda.default_generators[x.get_device()]] if x.is_cuda else [])]


def states_of(generators: list[torch.Generator]) -> list[torch.Tensor]:
    """Return the state of each generator."""
    return [generator.get_state() for generator in generators]


def restore(generators: list[torch.Generator], states: list[torch.Tensor]) -> None:
    """Set each generator to its state, so that it draws the same numbers again."""
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
        ctx.random_states = states_of(ctx.generators)  # before the block draws its dropout mask
        ctx.save_for_backward(x_BTD)  # the only activation that is kept
        return block(x_BTD)  # inside a Function nothing is recorded, so the block keeps nothing

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BTD):
        (x_BTD,) = ctx.saved_tensors
        x_BTD = x_BTD.detach().requires_grad_(ctx.needs_input_grad[1])  # the same bytes, cut off from what made them
        now = states_of(ctx.generators)
        restore(ctx.generators, ctx.random_states)  # the same mask again
        with torch.enable_grad():
            y_BTD = ctx.block(x_BTD.view_as(x_BTD))  # a view, because FlopCounterMode cannot watch a leaf here
        restore(ctx.generators, now)  # so that later draws are the same as without checkpointing
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


def checkpoint_blocks(model: Any, plan: Plan) -> Any:
    """Checkpoint the blocks of a transformers model as a plan says, by transformers' own method, and return the model.

    That method takes the arguments of torch's checkpoint. It knows no first k blocks.
    """
    from cria_tricks.models.pretrained import blocks_of  # here, because only the switch needs transformers

    wanted = plan.checkpointing["blocks"]
    arguments: dict[str, Any] = {"use_reentrant": False}
    if "keep_attention" in plan.checkpointing:
        arguments["context_fn"] = function_at(plan.checkpointing["keep_attention"])
    # The method has its new name since transformers 5.2x; transformers 6 has no other.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(arguments)
    if wanted != "all":
        for block in blocks_of(model)[wanted:]:
            block.gradient_checkpointing = False  # type: ignore[assignment]
    return model
