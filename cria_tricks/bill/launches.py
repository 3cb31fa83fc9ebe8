"""Count the kernels of a training step, because the host needs time to start each of them.

A small model with short rows has little work in each kernel. Then the host, which starts one kernel after the other,
is slower than the card. On a CPU each operation costs such a fixed time, too: Python, torch's dispatcher and autograd.

The constants are counts of operations of transformers' Llama (5.23) under peft (0.21) that write a tensor; views start
no kernel. ``tests/hardware/test_launches.py`` counts them again. Where several operations may be one kernel or one may
be several (unpacking, the optimizer), a round number stands for them.
"""

from cria_tricks.bill.products import Blocks
from cria_tricks.bill.step import Step

BLOCK = 34
"""Operations of the forward pass of a block in fp32: seven products, two norms, rotary embedding, attention, MLP."""
UNFUSED = 8
"""More of them with eager attention. torch's own kernels are one operation, also the one that computes all scores."""
ADAPTER = 4
"""For each adapted matrix: two products, the scaling, the addition."""
FUSED_ADAPTER = 2
"""The same for an adapter of fused LoRA: the first product, and the second, which adds into the result in place."""
AGAIN = 1
"""For each of these in the backward pass: the first product once more."""
BACKWARD = 22
"""How many more the backward pass has than the forward pass, beside two for each matrix whose gradients it computes."""
IN_PLACE = (4, 17)
"""How many fewer there are forward (in 16 bits; none in fp32) and backward with fused blocks."""
UNPACK = 2
"""For each matrix that is stored in 4 or 8 bits."""
COMPILED = 8
"""What a compiled block needs beside its products, in each pass."""
AROUND = 50
"""Embedding, last norm, head and loss of a micro-batch, forward and backward."""
CHUNK = 20
"""Each chunk of the chunked loss."""
NORM_CASTS = 4
"""A block's two norms, each computed in fp32: cast there and back."""
TILE = 6, 8
"""Of an MLP's tile, forward and backward, beside what its adapters and unpacking take: three products, the activation,
the product with up, and the copy of the result or of the gradient into its place."""
TRAVEL = 16
"""For each block whose input travels beside the computing: two copies, with the events and waits around them. A round
number."""
UPDATE = 4
"""For each trained matrix, once a step: clipping, the update, and setting its gradient to zero."""


def of_blocks(step: Step, blocks: Blocks) -> int:
    """Count the launches of all blocks in one micro-batch, forward, again and backward."""
    matrices = len(step.shape.linears)
    adapted = len(step.adapted)
    learning = matrices if step.trains_all else adapted
    unpack = UNPACK * matrices * step.quantised
    of_adapter = FUSED_ADAPTER if step.fused_adapters else ADAPTER
    forward = BLOCK + of_adapter * adapted + UNFUSED * (step.kernel == "eager") + _casts(step, matrices, adapted)
    backward = forward + BACKWARD + 2 * learning
    if step.fused_adapters:
        backward += adapted * (AGAIN + 2 * (step.compute_itemsize < 4))  # A and B are cast again, too
    if step.fused_blocks:
        forward -= IN_PLACE[0] * (step.compute_itemsize < 4)
        backward -= IN_PLACE[1]
    if step.compiled:
        forward = matrices + 2 * adapted + COMPILED
        backward = matrices + 4 * learning + COMPILED
    runs = blocks.passes
    whole = (runs["forward"] + runs["again"]) * (forward + unpack) + runs["backward"] * (backward + unpack)
    return whole + _of_tiles(step, blocks, of_adapter)


def _of_tiles(step: Step, blocks: Blocks, of_adapter: int) -> int:
    """Count what MLPs in tiles launch more than whole ones: the same operations once for each tile, some of them again.

    Args:
        step: the step.
        blocks: how many blocks run each pass.
        of_adapter: the launches of an adapter in the forward pass.
    """
    if not step.mlp_tile:
        return 0
    adapted = len(set(step.adapted) & set(step.mlp))
    casts = 2 * adapted * (step.compute_itemsize < 4)  # of A and B
    around = of_adapter * adapted + casts + UNPACK * len(step.mlp) * step.quantised
    forward, backward = (each + around for each in TILE)
    backward += 4 * adapted  # the gradients of A and B, and their sums over the tiles
    if step.fused_adapters:
        backward += AGAIN * adapted + casts
    runs = blocks.passes
    more = step.tiles - 1
    again = (runs["again"] * more + blocks.mlp_again * step.tiles) * forward
    return runs["forward"] * more * forward + again + runs["backward"] * more * backward


def _casts(step: Step, matrices: int, adapted: int) -> int:
    """Count the casts of autocast in the forward pass of a block."""
    if step.compute_itemsize == 4:
        return 0
    if step.trains_all:  # each weight, and each product's input
        return 2 * matrices
    if step.fused_adapters:
        return NORM_CASTS + 2 * adapted
    # A and B are fp32. peft casts their inputs to fp32, and autocast casts them back.
    return NORM_CASTS + 2 * adapted * (1 + step.casts_adapter_inputs)


def of_loss(step: Step) -> float:
    """Count the launches around the blocks in one micro-batch."""
    if step.logit_positions is None:
        return AROUND
    return AROUND + CHUNK / 2 * step.head_reads  # each chunk reads the head's weights twice


def of_update(step: Step) -> int:
    """Count the launches once a step: those of the optimizer."""
    tensors = len(step.shape.linears) + 2 if step.trains_all else 2 * len(step.adapted)
    return UPDATE * step.shape.layers * tensors
