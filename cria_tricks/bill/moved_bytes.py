"""Count the memory traffic of a training step: the bytes that the GPU reads from its memory and writes to it.

Between two matrix products lie norms, rotary embeddings, activation functions, residual additions and casts. Each of
these operations reads whole tensors and writes whole tensors, so on a card with slow memory they take as long as the
products. This module counts them, and what products read of weights; ``step_time.py`` adds the activations that
products read and write.

The constants are bytes for one element. They are sums over all operations of transformers' Llama (5.23) under peft
(0.21), counted operation by operation; ``tests/hardware/test_cost.py`` counts them again.
"""

from dataclasses import replace

from cria_tricks.bill.products import Blocks, passes_of_a_token
from cria_tricks.bill.step import Step
from cria_tricks.models.shape import Shape

# The keys of the tables below: bytes of one number in the hidden states, and in the compute dtype of products.
HALF = (2, 2)
"""Everything in 16 bits."""
MIXED = (4, 2)
"""Hidden states in fp32, products in 16 bits. Norms and embeddings are in fp32 if the loaded weights train, and after
peft's preparation of a quantised model. An fp32 tensor plus a 16-bit one gives fp32."""
FULL = (4, 4)
"""Everything in fp32."""

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

# What fused blocks (techniques/fused_blocks.py) move less than _BETWEEN says, which counts fp32 norms as trained ones.
# A negative number is more: the activation runs again in the backward pass, where fused LoRA does not do that already.
_FUSED_BLOCKS: dict[tuple[int, int], Each] = {
    HALF: ((48, 80), (0, -4), (10, 22)),
    MIXED: ((8, 102), (0, -4), (20, 44)),
    FULL: ((8, 102), (0, -8), (20, 44)),
}

_COMPILED: Each = ((16, 32), (6, 10), (4, 4))
"""What a compiled block moves between its products [bytes for one element, forward and backward]. It is reasoned, not
counted: a fused chain of operations reads its inputs once and writes its result once."""

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


def weights(step: Step, blocks: Blocks) -> tuple[int, int, int]:
    """Count what products read and write of the blocks' weights in one micro-batch, all in the compute dtype.

    Args:
        step: the step.
        blocks: how many blocks run each pass.

    Returns:
        Bytes of the forward pass, of the forward pass that checkpointing repeats, and of the backward pass.
    """
    wide = step.compute_itemsize
    in_a_block = _read_in_a_pass(step)
    again = blocks.passes["again"] * in_a_block + blocks.mlp_again * step.tiles * _mlp_weights(step)
    backward = wide + step.trains_all * wide  # the product writes the weight's gradient
    return (
        round(wide * (blocks.passes["forward"] * in_a_block)),
        round(wide * again),
        round(backward * (blocks.passes["backward"] * in_a_block)),
    )


def _mlp_weights(step: Step) -> int:
    """Count the weights of the MLP's matrices."""
    sizes = [d_in * d_out for d_in, d_out in (step.shape.linears[name] for name in step.mlp)]
    return sum(sizes)


def _read_in_a_pass(step: Step) -> int:
    """Count the weights that one pass of a block reads: its matrices, those of the MLP once for each tile."""
    return step.shape.block_linear_weights + (step.tiles - 1) * _mlp_weights(step)


def unpacking(step: Step, blocks: Blocks) -> tuple[int, int]:
    """Count the traffic of unpacking and of casting weights in one micro-batch.

    Weights in another format than products compute in are unpacked or cast to it first, by kernels of their own, which
    read and write them once. Autocast keeps its copy for the backward pass; 4-bit and int8 weights are unpacked again.
    The head's weights are cast once. Where blocks train, their gradients are cast to fp32.

    Returns:
        Bytes of unpacking 4-bit and int8 weights, and bytes of casts.
    """
    wide = step.compute_itemsize
    in_a_block = _read_in_a_pass(step)
    runs = blocks.passes
    passes = runs["forward"] + runs["again"] + step.quantised * runs["backward"]
    unpacked = passes * in_a_block + blocks.mlp_again * step.tiles * _mlp_weights(step)
    stored = _cast(step.stored_itemsize, wide) * unpacked
    casts = _cast(step.head_itemsize, wide) * step.shape.embedding_weights
    casts += step.trains_all * _cast(wide, 4) * runs["backward"] * in_a_block
    if step.quantised:
        return round(stored), round(casts)
    return 0, round(casts + stored)


def head_weights(step: Step) -> float:
    """Count what the head's products read of its weights in one micro-batch [bytes]."""
    return step.shape.embedding_weights * step.compute_itemsize * step.head_reads


def _cast(stored: float, wide: int) -> float:
    """Count the bytes to read a number of one item size and to write it in another; 0 if both are the same."""
    return (stored + wide) * (stored != wide)


def between(step: Step) -> tuple[int, int]:
    """Count the traffic between the products of a block.

    Returns:
        Bytes for one position in one block, forward and backward.
    """
    if step.compiled:  # an adapter's casts are fused, too
        parts = [_over_widths(step.shape, _COMPILED)]
    else:
        parts = [_with_fused_adapters(step) if step.fused_adapters else one_by_one(step)]
        if step.fused_blocks:
            parts.append(_of_fused_blocks(step))
        if step.mlp_tile:
            parts.append(_of_tiles(step))
    if step.in_pieces:
        parts.append(_of_pieces(step))
    return sum(forward for forward, _ in parts), sum(backward for _, backward in parts)


def saved(step: Step) -> float:
    """Count the bytes that autograd saves in a block for one position, without ``torch.compile``; a mean of blocks."""
    each = _SAVED[step.hidden_itemsize, step.compute_itemsize]
    found: float = sum(width * one for width, one in zip(_widths(step.shape), each, strict=True))
    if step.fused_adapters:
        found -= _not_saved_with_fused_adapters(step)
    if step.fused_blocks:
        found -= _not_saved_with_fused_blocks(step)
    if step.mlp_tile:
        found -= _not_saved_with_tiles(step)
    if step.checkpointed:  # those that are repeated save their input only
        layers = step.shape.layers
        repeated = step.repeated_blocks
        inputs = repeated * step.shape.width * step.hidden_itemsize
        found = (inputs + (layers - repeated) * found) / layers
    return found


def one_by_one(step: Step) -> tuple[int, int]:
    """Count the traffic between products if each operation is a kernel of its own; units as in :func:`between`."""
    forward, backward = _over_widths(step.shape, _BETWEEN[step.hidden_itemsize, step.compute_itemsize])
    lora_forward, lora_backward = _around_lora(step)
    return forward + lora_forward, backward + lora_backward


def _over_widths(shape: Shape, each: Each) -> tuple[int, int]:
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


def _around_lora(step: Step) -> tuple[int, int]:
    """Count the traffic of small operations around the adapters' products: casts, the scaling, and additions.

    Returns:
        Bytes for one position in one block, forward and backward.
    """
    wide = step.compute_itemsize
    cast = step.casts_adapter_inputs * _ADAPTER_CAST[step.hidden_itemsize, wide]
    forward = backward = 0
    for name in step.adapted:
        d_in, d_out = step.shape.linears[name]
        times = passes_of_a_token(step.shape, name)
        # Scaling B A x reads one tensor and writes one. Adding it to the base's result reads two and writes one.
        forward += times * (cast * d_in + 5 * wide * d_out)
        # Backward, base and adapter each give a gradient of the input, which are added: two are read, one is written.
        # The scaling's backward reads one tensor and writes one.
        backward += times * ((cast + 3 * wide) * d_in + 2 * wide * d_out)
    return forward, backward


def _with_fused_adapters(step: Step) -> tuple[int, int]:
    """Count the traffic between the products of a block whose adapters are fused (``techniques/fused_lora.py``).

    Adapters add in place, inside their products, so nothing of :func:`_around_lora` is left. What is left are casts,
    where the hidden states are wider than what products multiply, and the sums into them. Units as in :func:`between`.
    """
    wide = step.compute_itemsize
    each = _BETWEEN[step.hidden_itemsize, wide]
    forward, backward = _over_widths(step.shape, each)
    for group in step.shape.input_groups:
        adapted = [name for name in group if name in step.adapted]
        if not adapted:
            continue
        d_in, _ = step.shape.linears[group[0]]
        # The gradients of a shared input are no longer summed by operations of their own: two are read, one written.
        backward -= 3 * step.hidden_itemsize * d_in * (len(adapted) - 1)
        if step.hidden_itemsize != wide and group != ("o_proj",) and group != ("down_proj",):
            forward += (step.hidden_itemsize + wide) * d_in  # the input, cast once for all of them
            # Each matrix and each adapter gives a narrow part of the gradient, which is cast, or added to a wide sum.
            sums = 2 * len(adapted) - 1
            backward += (step.hidden_itemsize + wide + sums * (2 * step.hidden_itemsize + wide)) * d_in
    if _fuses_mlp(step):
        # The activation and the product with up run again, but not where checkpointing would have repeated them.
        repeated = step.repeated_blocks / step.shape.layers
        backward += round(each[1][0] * step.shape.inner * (1 - repeated))
    return forward, backward


def _fuses_mlp(step: Step) -> bool:
    """Tell whether the MLP of a block is one of those that fused adapters compute as a whole."""
    whole = all(name in step.adapted for name in ("gate_proj", "up_proj", "down_proj"))
    return whole and step.shape.experts == 1 and step.fused_adapters


def _not_saved_with_fused_adapters(step: Step) -> int:
    """Count what fused adapters do not save: an input is saved once for all its matrices, and less of an MLP."""
    wide = step.compute_itemsize
    found = 0
    for group in step.shape.input_groups:
        adapted = [name for name in group if name in step.adapted]
        found += wide * step.shape.linears[group[0]][0] * max(0, len(adapted) - 1)
    if _fuses_mlp(step):
        found += 2 * wide * step.shape.inner  # the activated gate, and down's input
    return found


def _of_fused_blocks(step: Step) -> tuple[int, int]:
    """Count what is moved less, as negative numbers, if norms, rotary positions and activation are fused."""
    of_hidden, of_inner, of_heads = _FUSED_BLOCKS[step.hidden_itemsize, step.compute_itemsize]
    if _fuses_mlp(step):
        of_inner = 0, 0
    forward, backward = _over_widths(step.shape, (of_hidden, of_inner, of_heads))
    return -forward, -backward


def _not_saved_with_fused_blocks(step: Step) -> int:
    """Count what fused blocks do not save: a second copy of a norm's input, and the activated gate."""
    # Two operations of a norm save its input in fp32. A fused norm saves it once, as it is.
    found = step.shape.norms * step.shape.width * (2 * 4 - step.hidden_itemsize)
    if not _fuses_mlp(step):
        found += step.compute_itemsize * step.shape.inner * step.shape.experts_per_token
    return found


def _of_tiles(step: Step) -> tuple[int, int]:
    """Count what is moved more if the MLP runs in tiles."""
    wide = step.compute_itemsize
    # A tile's result is copied into the whole, and so is the gradient of its input: the counter takes the place of a
    # copy as read, too.
    forward = 3 * wide * step.shape.width
    backward = 3 * step.hidden_itemsize * step.shape.width
    # Each tile casts A and B anew, and casts and adds up their gradients in fp32.
    adapted = tuple(name for name in step.mlp if name in step.adapted)
    thin = step.rank * sum(sum(step.shape.linears[name]) for name in adapted) / step.mlp_tile
    casts = (4 + wide) * (wide < 4)
    forward += round(casts * thin)
    backward += round((2 * casts + 3 * 4) * thin)
    # Blocks that nothing else repeats run their MLP again in the backward pass.
    inner = _BETWEEN[step.hidden_itemsize, wide][1][0] * step.shape.inner
    if not step.fused_adapters:
        inner += _around_lora(replace(step, adapted=adapted))[0]
    again = 1.0 if step.shape.ends_with_norm else 1 - step.repeated_blocks / step.shape.layers
    return forward, backward + round(again * inner)


def _not_saved_with_tiles(step: Step) -> int:
    """Count what an MLP in tiles does not save: all but its input."""
    wide = step.compute_itemsize
    inner = _SAVED[step.hidden_itemsize, wide][1]
    if _fuses_mlp(step):
        inner -= 2 * wide
    elif step.fused_blocks:
        inner -= wide
    return inner * step.shape.inner


def fetched(step: Step) -> float:
    """Return the bytes of the weights of streamed blocks that come from the host."""
    of_block = step.stored_itemsize * sum(d_in * d_out for d_in, d_out in step.shape.packable.values())
    return step.fetched_blocks * of_block


def _of_pieces(step: Step) -> tuple[int, int]:
    """Count what is moved less, as negative numbers, if N processes divide the tokens of the residual stream.

    Sequence parallelism (``parallel/sequence.py``) divides norms and residual sums. The inputs of products are
    gathered, so what is done to them is whole in each process. The bytes are for one position of the whole rows.
    """
    key = step.hidden_itemsize, step.compute_itemsize
    fused = _FUSED_BLOCKS[key][0] if step.fused_blocks else (0, 0)
    divided = (each - less - whole for each, less, whole in zip(_BETWEEN[key][0], fused, _OF_INPUTS[key], strict=True))
    forward, backward = (-round(step.shape.width * each * (1 - 1 / step.stream_pieces)) for each in divided)
    return forward, backward
