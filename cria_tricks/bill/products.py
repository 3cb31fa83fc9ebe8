"""The matrix products of a training step, counted: who is multiplied with what, forward, once more, and backward.

A product of N positions with a matrix (D_in, D_out) takes 2 N D_in D_out floating-point operations. On the way back it
takes as many again for the gradient of its input, if anything before it learns, and as many for the gradient of the
matrix, if that is trained. So a trained weight costs 6 operations a token, a frozen one 4, and 2 more are spent on it
when its block is checkpointed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cria_tricks.bill.work import Work
from cria_tricks.models.shape import Shape


@dataclass
class Products:
    """A sum of products, for one position.

    Attributes:
        flops: floating-point operations; a multiplication and an addition are two.
        elements: numbers that are read and written, those of the matrices not counted.
    """

    flops: int = 0
    elements: int = 0

    def add(self, d_in: int, d_out: int, times: int = 1) -> None:
        """Add a product with a (d_in, d_out) matrix."""
        self.flops += 2 * times * d_in * d_out
        self.elements += times * (d_in + d_out)


@dataclass
class Blocks:
    """What the blocks of a model do in a step.

    Attributes:
        forward: products with the blocks' own matrices.
        again: those that checkpointing repeats.
        backward: those of the gradients.
        adapter: products with LoRA's thin matrices, all passes.
        norms: operations of DoRA's W + B A, all passes; they do not depend on how many positions there are.
        passes: how many blocks run ``forward``, ``again`` and ``backward``.
        attention_grads: products for attention's gradients when the T x T matrix is there: four a block, fewer in a
            first block that does not adapt all of q, k and v.
        attended_back: blocks whose attention has a gradient at all.
        learns: whether a gradient comes back to the last block's output.
    """

    forward: Products = field(default_factory=Products)
    again: Products = field(default_factory=Products)
    backward: Products = field(default_factory=Products)
    adapter: Products = field(default_factory=Products)
    norms: int = 0
    passes: dict[str, int] = field(default_factory=lambda: {"forward": 0, "again": 0, "backward": 0})
    attention_grads: int = 0
    attended_back: int = 0
    learns: bool = False


def blocks(work: Work) -> Blocks:
    """Walk through the blocks, once forward, and see what each owes the way back."""
    shape = work.shape
    found = Blocks()
    found.learns = work.gradient_reaches_embedding
    for number in range(shape.layers):
        before = found.learns
        found.learns = _block(found, work, before, work.adapted, trained=work.trains_blocks)
        if number >= shape.layers - work.copied_blocks:  # its trained copy, and the matrix that joins the two
            _block(found, work, before, (), trained=True)
            found.forward.add(shape.width, shape.width)
            found.backward.add(shape.width, shape.width, 2)
            found.learns = True
    return found


def passes_of_a_token(shape: Shape, name: str) -> int:
    """How many matrices of this name one token goes through: one, or one for each of its experts."""
    if shape.copies(name) == 1:
        return 1
    return shape.experts_per_token


def _block(found: Blocks, work: Work, learns: bool, adapts: Iterable[str], *, trained: bool) -> bool:
    """Add one block; returns whether what it hands on needs a gradient, given whether what it was handed does."""
    own = Products()
    thin = Products()
    r = work.rank
    norms = 0
    for number, stage in enumerate(work.shape.stages):
        input_learns = learns or trained  # the norm in front trains too
        if number == 0:
            _attention_grads(found, [input_learns or name in adapts for name in stage])
        for name in stage:
            d_in, d_out = work.shape.linears[name]
            times = passes_of_a_token(work.shape, name)
            own.add(d_in, d_out, times)
            found.backward.add(d_in, d_out, times * (input_learns + trained))
            learns |= trained
            if name in adapts:
                thin.add(d_in, r, times)
                thin.add(r, d_out, times)
                found.adapter.add(d_in, r, times * (input_learns + 1))
                found.adapter.add(r, d_out, times * 2)
                norms += 2 * r * d_in * (d_in + d_out) * times * work.dora
                learns = True
    forward_passes = 1 + learns * work.forward_repeats
    found.passes["forward"] += 1
    found.passes["again"] += forward_passes - 1
    found.passes["backward"] += learns
    _add(found.forward, own)
    _add(found.adapter, thin)
    found.norms += norms * forward_passes
    if forward_passes > 1:
        _skip_last(own, thin, work, "down_proj" in adapts)
        _add(found.again, own)
        _add(found.adapter, thin)
    return learns


def _attention_grads(found: Blocks, asked: list[bool]) -> None:
    """Attention's gradients in one block, given which of q, k and v learn or have an input that does."""
    q, k, v = asked if len(asked) == 3 else asked * 3  # or one matrix gives all of them
    found.attention_grads += (q or k) + q + k + v  # of the weights, the queries, the keys and the values
    found.attended_back += q or k or v


def _skip_last(own: Products, thin: Products, work: Work, down_adapted: bool) -> None:
    """torch's checkpoint stops as soon as it has again what was kept, so the last product is not repeated."""
    d_in, d_out = work.shape.linears["down_proj"]
    if not down_adapted:
        own.add(d_in, d_out, -work.shape.experts_per_token)
    elif not work.dora:
        thin.add(work.rank, d_out, -work.shape.experts_per_token)


def _add(total: Products, more: Products) -> None:
    total.flops += more.flops
    total.elements += more.elements


def head(work: Work, learns: bool) -> Products:
    """The head's products for a position whose logits are made.

    The chunked loss makes its gradient while the logits are there, so it repeats nothing.

    Args:
        work: decides what trains.
        learns: whether anything below the head does.
    """
    found = Products()
    d_in = work.shape.width
    d_out = work.shape.vocabulary
    found.add(d_in, d_out, 1 + learns + work.trains_head)
    if work.head_rank:
        found.add(d_in, work.head_rank, 2 + learns)
        found.add(work.head_rank, d_out, 3)
    return found


def attention(work: Work, blocks: Blocks, *, fused: bool) -> int:
    """Operations of all attention, when no token pair is left out.

    Forward two products: queries with keys, weights with values. Backward four; a fused kernel makes a fifth, the
    scores once more, which it has not kept, and always all of them.

    Args:
        work: rows and their length.
        blocks: how often attention runs.
        fused: whether a kernel does it all (flash, memory-efficient) or one operation after the other.
    """
    runs = blocks.passes["forward"] + blocks.passes["again"]
    back = 5 * blocks.attended_back if fused else blocks.attention_grads
    return (2 * runs + back) * 2 * work.batch * work.shape.query_width * work.row_positions**2
