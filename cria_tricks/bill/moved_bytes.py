"""The bytes that a training step moves between a card and its memory, besides the numbers that products read and write.

Between two products lie norms, rotary embeddings, activations, residual sums and casts. Each reads whole tensors and
writes them back, one small operation after the other, so on a card with slow memory they take as long as the products.
The constants here are sums over the operations of transformers' Llama (5.23) under peft (0.21), in bytes for one
element, as an operation-by-operation count gives them; ``tests/hardware/test_cost.py`` counts again.
"""

from cria_tricks.bill.products import Blocks, passes_of_a_token
from cria_tricks.bill.work import Work
from cria_tricks.models.shape import Shape

# Bytes of a hidden state and of what products multiply.
HALF = (2, 2)
MIXED = (4, 2)
"""Mixed is fp32 with 16-bit products: trained weights and the usual 4-bit preparation keep norms and embeddings in
fp32, and everything that is added to them becomes fp32."""
FULL = (4, 4)

Each = tuple[tuple[int, int], tuple[int, int], tuple[int, int]]
"""Forward and backward, for one element of: the hidden states D wide, the MLP's inside F wide, queries and keys."""

_BETWEEN: dict[tuple[int, int], Each] = {
    HALF: ((84, 206), (10, 18), (21, 34)),
    MIXED: ((106, 292), (10, 18), (38, 60)),
    FULL: ((80, 250), (20, 36), (42, 66)),
}
# peft casts an adapter's input to fp32 and autocast casts it back; where it is fp32 already only the second is left.
_ADAPTER_CAST = {HALF: 12, MIXED: 6, FULL: 0}
# What autograd keeps, the same three, when nothing is checkpointed; each save is one, also of the same tensor.
_SAVED = {HALF: (26, 8, 6), MIXED: (30, 8, 7), FULL: (40, 16, 12)}

SCORE = (32, 34)
"""Forward and backward, for one of the B H T^2 scores, where no fused kernel keeps them on the chip."""
LOGIT = 36
"""Forward and backward together, for one logit, fp32 from the loss on."""
LOGIT_SAVED = 8
"""For one logit of the full loss: the log-probabilities, which two operations save."""
ADAMW = 28
"""For one trained weight, all in one kernel: read weight, gradient and two states, write all but the gradient."""
CLIP = 12
"""For one trained weight: the norm of all gradients and the clipping."""


def weights(work: Work, blocks: Blocks) -> tuple[int, int, int]:
    """Bytes of the blocks' weights in one micro-batch: forward, once more, backward.

    A product reads them in the precision it computes in. What is stored otherwise is unpacked, or cast, to that first:
    read, and written. Autocast keeps its copy for the way back; 4-bit and int8 weights are unpacked a second time.
    """
    wide = work.compute_itemsize
    unpack = _cast(work.stored_itemsize, wide)
    back = wide + work.backward_unpacks * unpack
    if work.trains_blocks:  # the gradient, and its cast to fp32
        back += wide + _cast(wide, 4)
    each = work.shape.block_linear_weights
    forward, again, backward = (blocks.passes[name] * each for name in ("forward", "again", "backward"))
    return round((unpack + wide) * forward), round((unpack + wide) * again), round(back * backward)


def head_weights(work: Work) -> float:
    """Bytes of the head's weights in one micro-batch: cast once if need be, and read by each product."""
    wide = work.compute_itemsize
    return work.shape.embedding_weights * (_cast(work.head_itemsize, wide) + wide * work.head_reads)


def _cast(stored: float, wide: int) -> float:
    """Bytes to read a number as it is stored and to write it as it is computed with."""
    return (stored + wide) * (stored != wide)


def one_by_one(work: Work) -> tuple[int, int]:
    """Bytes of what lies between a block's products, for one position: forward, backward; each operation by itself."""
    forward, backward = over_widths(work.shape, _BETWEEN[work.hidden_itemsize, work.compute_itemsize])
    more_forward, more_backward = _around_lora(work)
    return forward + more_forward, backward + more_backward


def over_widths(shape: Shape, each: Each) -> tuple[int, int]:
    """Sum bytes for one element over the elements of one position: forward, backward."""
    forward = backward = 0
    for width, (one_forward, one_backward) in zip(_widths(shape), each, strict=True):
        forward += width * one_forward
        backward += width * one_backward
    return forward, backward


def _widths(shape: Shape) -> tuple[int, int, int]:
    return shape.width, shape.inner * shape.experts_per_token, shape.query_width + shape.kv_width


def _around_lora(work: Work) -> tuple[int, int]:
    """Casts of an adapter's input, its scaling and its sum, for one position."""
    wide = work.compute_itemsize
    cast = work.adapter_casts * _ADAPTER_CAST[work.hidden_itemsize, wide]
    forward = backward = 0
    for name in work.adapted:
        d_in, d_out = work.shape.linears[name]
        times = passes_of_a_token(work.shape, name)
        forward += times * (cast * d_in + 5 * wide * d_out)
        backward += times * ((cast + 3 * wide) * d_in + 2 * wide * d_out)
    return forward, backward


def saved_one_by_one(work: Work) -> int:
    """Bytes that a block keeps for the way back, for one position; each operation saves what it needs."""
    each = _SAVED[work.hidden_itemsize, work.compute_itemsize]
    return sum(width * one for width, one in zip(_widths(work.shape), each, strict=True))
