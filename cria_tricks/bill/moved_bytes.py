"""Count the memory traffic of a training step: the bytes that the GPU reads from its memory and writes to it.

Between two matrix products lie norms, rotary embeddings, activation functions, residual additions and casts. Each of
these operations reads whole tensors and writes whole tensors, so on a card with slow memory they take as long as the
products. This module counts them, and what products read of weights; ``step_time.py`` adds the activations that
products read and write.

The constants are bytes for one element. They are sums over all operations of transformers' Llama (5.23) under peft
(0.21), counted operation by operation; ``tests/hardware/test_cost.py`` counts them again.
"""

from collections.abc import Callable
from dataclasses import replace

from cria_tricks.bill.products import Blocks, passes_of_a_token
from cria_tricks.bill.work import Work
from cria_tricks.models.shape import Shape

# The keys of the tables below: bytes of one number in the hidden states, and in the compute dtype of products.
HALF = (2, 2)
"""Everything in 16 bits."""
MIXED = (4, 2)
"""Hidden states in fp32, products in 16 bits. Norms and embeddings are in fp32 if the loaded weights train, and after
peft's preparation of a quantised model. An fp32 tensor plus a 16-bit one gives fp32."""
FULL = (4, 4)
"""Everything in fp32."""

Count = Callable[[Work], tuple[int, int]]
"""A function that counts traffic for one position in one block [bytes]: forward and backward."""
Each = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Three pairs of (forward, backward) [bytes for one element]: for the hidden states (D wide), for the inner tensors of
the MLP (F wide), and for queries and keys together."""

# Traffic of all operations between the products of a block. For example (10, 18), the MLP in 16 bits. Forward: the
# activation reads 2 bytes and writes 2, the product with up reads 4 and writes 2. Backward: each of the product's two
# gradients reads 4 and writes 2, and so does that of the activation.
_BETWEEN: dict[tuple[int, int], Each] = {
    HALF: ((84, 206), (10, 18), (21, 34)),
    MIXED: ((106, 292), (10, 18), (38, 60)),
    FULL: (
        (80, 250),
        (20, 36),
        (42, 66),
    ),  # with trained norms; fp32 LoRA, whose norms are frozen, moves up to 6 % less
}
# The part of the first pairs that belongs to the inputs of products: their casts, and the sums of the gradients that
# several matrices give to a shared input.
_OF_INPUTS = {HALF: (0, 18), MIXED: (30, 66), FULL: (0, 36)}
# Traffic for one element of an adapter's input. peft casts the input to fp32, and autocast casts it back to 16 bits: 6
# bytes each. The first is not needed if the input is fp32 already, and neither is needed if products are fp32, too.
_ADAPTER_CAST = {HALF: 12, MIXED: 6, FULL: 0}
# Bytes that autograd saves without checkpointing, for one element of the three kinds of :data:`Each`. A tensor that two
# operations save counts twice, because activation offload would copy it twice.
_SAVED = {HALF: (26, 8, 6), MIXED: (30, 8, 7), FULL: (40, 16, 12)}

# What fused blocks (tricks/fused_blocks.py) move less than _BETWEEN says, which counts fp32 norms as trained ones. A
# negative number is more: the activation runs again in the backward pass, where fused LoRA does not do that already.
_FUSED_BLOCKS: dict[tuple[int, int], Each] = {
    HALF: ((48, 80), (0, -4), (10, 22)),
    MIXED: ((8, 102), (0, -4), (20, 44)),
    FULL: ((8, 102), (0, -8), (20, 44)),
}

SCORE = (32, 34)
"""Forward and backward [bytes for one attention score], where no fused kernel keeps the B H T^2 scores on the chip. The
same for 16 bits and fp32, within 10 %."""
LOGIT = 36
"""Forward and backward together [bytes for one logit]; a logit is fp32 from the loss on."""
LOGIT_SAVED = 8
"""What autograd saves for the full loss [bytes for one logit]: fp32 log-probabilities, which two operations save."""
ADAMW = 28
"""AdamW in one kernel [bytes for one trained weight]: it reads weight, gradient and two states (16), and writes weight
and states (12), all in fp32."""
CLIP = 12
"""Gradient clipping [bytes for one trained weight]: the norm reads the gradient; the scaling reads and writes it."""


def weights(work: Work, blocks: Blocks) -> tuple[int, int, int]:
    """Count what products read and write of the blocks' weights in one micro-batch, all in the compute dtype.

    Args:
        work: what the step has to do.
        blocks: how many blocks run each pass.

    Returns:
        Bytes of the forward pass, of the forward pass that checkpointing repeats, and of the backward pass.
    """
    wide = work.compute_itemsize
    in_a_block = _read_in_a_pass(work)
    again = blocks.passes["again"] * in_a_block + blocks.mlp_again * work.tiles * _mlp_weights(work)
    backward = wide + work.trains_blocks * wide  # the product writes the weight's gradient
    return (
        round(wide * (blocks.passes["forward"] * in_a_block)),
        round(wide * again),
        round(backward * (blocks.passes["backward"] * in_a_block)),
    )


def _mlp_weights(work: Work) -> int:
    """Count the weights of the MLP's matrices."""
    sizes = [d_in * d_out for d_in, d_out in (work.shape.linears[name] for name in work.mlp)]
    return sum(sizes)


def _read_in_a_pass(work: Work) -> int:
    """Count the weights that one pass of a block reads: its matrices, those of the MLP once for each tile."""
    return work.shape.block_linear_weights + (work.tiles - 1) * _mlp_weights(work)


def unpacking(work: Work, blocks: Blocks) -> tuple[int, int]:
    """Count the traffic of unpacking and of casting weights in one micro-batch.

    Weights in another format than products compute in are unpacked or cast to it first, by kernels of their own, which
    read and write them once. Autocast keeps its copy for the backward pass; 4-bit and int8 weights are unpacked again.
    The head's weights are cast once. Where blocks train, their gradients are cast to fp32.

    Returns:
        Bytes of unpacking 4-bit and int8 weights, and bytes of casts.
    """
    wide = work.compute_itemsize
    in_a_block = _read_in_a_pass(work)
    runs = blocks.passes
    passes = runs["forward"] + runs["again"] + work.backward_unpacks * runs["backward"]
    unpacked = passes * in_a_block + blocks.mlp_again * work.tiles * _mlp_weights(work)
    stored = _cast(work.stored_itemsize, wide) * unpacked
    casts = _cast(work.head_itemsize, wide) * work.shape.embedding_weights
    casts += work.trains_blocks * _cast(wide, 4) * runs["backward"] * in_a_block
    if work.stored_itemsize >= 2:
        return 0, round(casts + stored)
    return round(stored), round(casts)


def head_weights(work: Work) -> float:
    """Count what the head's products read of its weights in one micro-batch [bytes]."""
    return work.shape.embedding_weights * work.compute_itemsize * work.head_reads


def _cast(stored: float, wide: int) -> float:
    """Count the bytes to read a number of one item size and to write it in another; 0 if both are the same."""
    return (stored + wide) * (stored != wide)


def one_by_one(work: Work) -> tuple[int, int]:
    """Count the traffic between the products of a block, if each operation is a kernel of its own (no torch.compile).

    Returns:
        Bytes for one position in one block, forward and backward.
    """
    forward, backward = over_widths(work.shape, _BETWEEN[work.hidden_itemsize, work.compute_itemsize])
    lora_forward, lora_backward = _around_lora(work)
    return forward + lora_forward, backward + lora_backward


def over_widths(shape: Shape, each: Each) -> tuple[int, int]:
    """Turn bytes for one element into bytes for one position: multiply them by the three widths, and add up.

    Args:
        shape: gives the widths.
        each: bytes for one element.

    Returns:
        Bytes for one position in one block, forward and backward.
    """
    forward = backward = 0
    for width, (one_forward, one_backward) in zip(_widths(shape), each, strict=True):
        forward += width * one_forward
        backward += width * one_backward
    return forward, backward


def _widths(shape: Shape) -> tuple[int, int, int]:
    """Give the elements of one position, in the order of :data:`Each`; each expert of a token has inner tensors."""
    return shape.width, shape.inner * shape.experts_per_token, shape.query_width + shape.kv_width


def _around_lora(work: Work) -> tuple[int, int]:
    """Count the traffic of small operations around the adapters' products: casts, the scaling, and additions.

    Returns:
        Bytes for one position in one block, forward and backward.
    """
    wide = work.compute_itemsize
    cast = work.adapter_casts * _ADAPTER_CAST[work.hidden_itemsize, wide]
    forward = backward = 0
    for name in work.adapted:
        d_in, d_out = work.shape.linears[name]
        times = passes_of_a_token(work.shape, name)
        # Scaling B A x reads one tensor and writes one. Adding it to the base's result reads two and writes one.
        forward += times * (cast * d_in + 5 * wide * d_out)
        # Backward, base and adapter each give a gradient of the input, which are added: two are read, one is written.
        # The scaling's backward reads one tensor and writes one.
        backward += times * ((cast + 3 * wide) * d_in + 2 * wide * d_out)
    return forward, backward


def with_fused_adapters(work: Work) -> tuple[int, int]:
    """Count the traffic between the products of a block whose adapters are fused (``tricks/fused_lora.py``).

    Adapters add in place, inside their products, so nothing of :func:`_around_lora` is left. What is left are casts,
    where the hidden states are wider than what products multiply, and the sums into them.

    Returns:
        Bytes for one position in one block, forward and backward.
    """
    wide = work.compute_itemsize
    between = _BETWEEN[work.hidden_itemsize, wide]
    forward, backward = over_widths(work.shape, between)
    for group in work.shape.input_groups:
        adapted = [name for name in group if name in work.adapted]
        if not adapted:
            continue
        d_in, _ = work.shape.linears[group[0]]
        # The gradients of a shared input are no longer summed by operations of their own: two are read, one written.
        backward -= 3 * work.hidden_itemsize * d_in * (len(adapted) - 1)
        if work.hidden_itemsize != wide and group != ("o_proj",) and group != ("down_proj",):
            forward += (work.hidden_itemsize + wide) * d_in  # the input, cast once for all of them
            # Each matrix and each adapter gives a narrow part of the gradient, which is cast, or added to a wide sum.
            sums = 2 * len(adapted) - 1
            backward += (work.hidden_itemsize + wide + sums * (2 * work.hidden_itemsize + wide)) * d_in
    if fuses_mlp(work):
        # The activation and the product with up run again, but not where checkpointing would have repeated them.
        repeated = work.repeated_blocks / work.shape.layers
        backward += round(between[1][0] * work.shape.inner * (1 - repeated))
    return forward, backward


def fuses_mlp(work: Work) -> bool:
    """Tell whether the MLP of a block is one of those that fused adapters compute as a whole."""
    whole = all(name in work.adapted for name in ("gate_proj", "up_proj", "down_proj"))
    return whole and work.shape.experts == 1


def saved_one_by_one(work: Work) -> int:
    """Count the bytes that autograd saves in one block for one position, without checkpointing or torch.compile."""
    each = _SAVED[work.hidden_itemsize, work.compute_itemsize]
    return sum(width * one for width, one in zip(_widths(work.shape), each, strict=True))


def saved_with_fused_adapters(work: Work) -> int:
    """Count the same where adapters are fused: an input is saved once for all its matrices, and less of an MLP."""
    wide = work.compute_itemsize
    found = saved_one_by_one(work)
    for group in work.shape.input_groups:
        adapted = [name for name in group if name in work.adapted]
        found -= wide * work.shape.linears[group[0]][0] * max(0, len(adapted) - 1)
    if fuses_mlp(work):
        found -= 2 * wide * work.shape.inner  # the activated gate, and down's input
    return found


def with_fused_blocks(work: Work, before: Count) -> tuple[int, int]:
    """Count the traffic between the products of a block whose norms, rotary positions and activation are fused.

    Args:
        work: the step.
        before: counts it without that.

    Returns:
        Bytes for one position in one block, forward and backward.
    """
    of_hidden, of_inner, of_heads = _FUSED_BLOCKS[work.hidden_itemsize, work.compute_itemsize]
    if work.fused_adapters and fuses_mlp(work):
        of_inner = 0, 0
    forward, backward = before(work)
    less_forward, less_backward = over_widths(work.shape, (of_hidden, of_inner, of_heads))
    return forward - less_forward, backward - less_backward


def saved_with_fused_blocks(work: Work, before: Callable[[Work], float]) -> float:
    """Count the bytes that autograd saves in such a block; the arguments are those of :func:`with_fused_blocks`."""
    found = before(work)
    # Two operations of a norm save its input in fp32. A fused norm saves it once, as it is.
    found -= work.shape.norms * work.shape.width * (2 * 4 - work.hidden_itemsize)
    if not (work.fused_adapters and fuses_mlp(work)):
        found -= work.compute_itemsize * work.shape.inner * work.shape.experts_per_token
    return found


def with_tiles(work: Work, before: Count) -> tuple[int, int]:
    """Count the traffic between the products of a block whose MLP runs in tiles.

    Args:
        work: the step.
        before: counts it without that.

    Returns:
        Bytes for one position in one block, forward and backward.
    """
    wide = work.compute_itemsize
    forward, backward = before(work)
    # A tile's result is copied into the whole, and so is the gradient of its input: the counter takes the place of a
    # copy as read, too.
    forward += 3 * wide * work.shape.width
    backward += 3 * work.hidden_itemsize * work.shape.width
    # Each tile casts A and B anew, and casts and adds up their gradients in fp32.
    adapted = tuple(name for name in work.mlp if name in work.adapted)
    thin = work.rank * sum(sum(work.shape.linears[name]) for name in adapted) / work.mlp_tile
    casts = (4 + wide) * (wide < 4)
    forward += round(casts * thin)
    backward += round((2 * casts + 3 * 4) * thin)
    # Blocks that nothing else repeats run their MLP again in the backward pass.
    inner = _BETWEEN[work.hidden_itemsize, wide][1][0] * work.shape.inner
    if not work.fused_adapters:
        inner += _around_lora(replace(work, adapted=adapted))[0]
    repeated = work.repeated_blocks / work.shape.layers
    again = 1.0 if work.shape.ends_with_norm else 1 - repeated
    return forward, backward + round(again * inner)


def saved_with_tiles(work: Work, before: Callable[[Work], float]) -> float:
    """Count the bytes that autograd saves in such a block, whose MLP keeps its input only."""
    wide = work.compute_itemsize
    inner = _SAVED[work.hidden_itemsize, wide][1]
    if work.fused_adapters and fuses_mlp(work):
        inner -= 2 * wide
    elif work.written_in_place:
        inner -= wide
    return before(work) - inner * work.shape.inner


def fetched(work: Work) -> float:
    """Return the bytes of the weights of streamed blocks that come from the host."""
    of_block = work.stored_itemsize * sum(d_in * d_out for d_in, d_out in work.shape.packable.values())
    return work.fetched_blocks * of_block


def in_pieces(work: Work, before: Count, pieces: int) -> tuple[int, int]:
    """Count the traffic between the products of a block if N processes divide the tokens of its residual stream.

    Sequence parallelism (``parallel/sequence.py``) divides norms and residual sums. The inputs of products are
    gathered, so what is done to them is whole in each process.

    Args:
        work: the step of one of the processes.
        before: counts it without that.
        pieces: the number of processes, N.

    Returns:
        Bytes for one position of the whole rows in one block, forward and backward.
    """
    key = work.hidden_itemsize, work.compute_itemsize
    fused = _FUSED_BLOCKS[key][0] if work.written_in_place else (0, 0)
    divided = (each - less - whole for each, less, whole in zip(_BETWEEN[key][0], fused, _OF_INPUTS[key], strict=True))
    forward, backward = (
        total - round(work.shape.width * each * (1 - 1 / pieces))
        for total, each in zip(before(work), divided, strict=True)
    )
    return forward, backward
