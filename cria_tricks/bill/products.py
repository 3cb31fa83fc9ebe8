"""Count the matrix products of a training step: in the forward pass, in recomputation, and in the backward pass.

Multiplying N positions (tokens, padding included) by a matrix of shape (D_in, D_out) takes 2 N D_in D_out
floating-point operations. The backward pass takes as many again for the gradient of the input, if anything below the
matrix is trained, and as many for the gradient of the matrix, if the matrix itself is trained. So for each token a
trained weight costs 6 operations and a frozen weight 4. Gradient checkpointing adds 2, because it repeats the forward
pass of the block.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cria_tricks.bill.step import Step
from cria_tricks.models.shape import Shape


@dataclass
class Products:
    """A running sum over matrix products, for one position.

    Attributes:
        flops: floating-point operations; a multiplication and an addition count as two.
        elements: how many numbers of activations the products read and write; the matrices' own are not counted.
    """

    flops: int = 0
    elements: int = 0

    def add(self, d_in: int, d_out: int, times: int = 1) -> None:
        """Add ``times`` products with a matrix of shape (d_in, d_out); a negative ``times`` takes them away again."""
        self.flops += 2 * times * d_in * d_out
        self.elements += times * (d_in + d_out)


@dataclass
class Blocks:
    """The matrix products of all blocks, counted for one position.

    Attributes:
        forward: products with the blocks' own matrices in the forward pass.
        again: products that gradient checkpointing repeats.
        backward: products that compute gradients of the blocks' own matrices and of their inputs.
        adapter: products with LoRA's thin matrices A and B, in all passes.
        norms: operations of B A in DoRA's weight norm, in all passes. They are a total, not a count for one position,
            because they do not depend on the number of positions.
        passes: how many blocks run ``forward``, ``again`` (recomputation) and ``backward``.
        mlp_again: how many MLPs run forward once more than that: those in tiles, in the backward pass.
        attended: how many times a block runs the forward pass of its attention.
        attention_grads: how many products compute gradients in attention, if it keeps the T x T matrix of attention
            weights: four in each block, fewer in a first block that does not adapt all of q, k and v.
        attended_back: how many blocks run the backward pass of their attention.
        learns: whether the backward pass needs the gradient of the last block's output.
    """

    forward: Products = field(default_factory=Products)
    again: Products = field(default_factory=Products)
    backward: Products = field(default_factory=Products)
    adapter: Products = field(default_factory=Products)
    norms: int = 0
    passes: dict[str, int] = field(default_factory=lambda: {"forward": 0, "again": 0, "backward": 0})
    mlp_again: int = 0
    attended: int = 0
    attention_grads: int = 0
    attended_back: int = 0
    learns: bool = False


def blocks(step: Step) -> Blocks:
    """Count the products of all blocks, from the first to the last.

    A block needs the gradient of its input only if something below it is trained; ``found.learns`` carries this along.
    """
    shape = step.shape
    found = Blocks()
    found.learns = step.reaches_embedding
    for number in range(shape.layers):
        before = found.learns
        again = number < step.repeated_blocks
        found.learns = _block(found, step, before, step.adapted, trained=step.trains_all, again=again)
        if number >= shape.layers - step.copied_blocks:  # side network: a trained copy, and the matrix that joins it
            _block(found, step, before, (), trained=True, again=again)
            found.forward.add(shape.width, shape.width)
            found.backward.add(shape.width, shape.width, 2)
            found.learns = True
    return found


def passes_of_a_token(shape: Shape, name: str) -> int:
    """Return how many matrices of this name multiply one token: one, or one for each expert that the token uses."""
    if shape.copies(name) == 1:
        return 1
    return shape.experts_per_token


def _block(found: Blocks, step: Step, learns: bool, adapts: Iterable[str], *, trained: bool, again: bool) -> bool:
    """Add the products of one block to ``found``, and return whether the block's output needs a gradient.

    Args:
        found: the sums so far.
        step: the step.
        learns: whether the block's input needs a gradient.
        adapts: names of the block's matrices that have a LoRA adapter.
        trained: whether the block's own weights are trained.
        again: whether the block is checkpointed.
    """
    own = Products()
    thin = Products()
    r = step.rank
    norms = 0
    for number, group in enumerate(step.shape.input_groups):
        input_learns = learns or trained  # a trained block trains its norms, too, so it needs this gradient
        if number == 0:
            _attention_grads(found, [input_learns or name in adapts for name in group])
        for place, name in enumerate(group):
            d_in, d_out = step.shape.linears[name]
            times = passes_of_a_token(step.shape, name)
            own.add(d_in, d_out, times)
            found.backward.add(d_in, d_out, times * (input_learns + trained))
            learns |= trained
            if name in adapts:
                thin.add(d_in, r, times)
                thin.add(r, d_out, times)
                # Gradients: of A, and of its input if that needs one. Of B, and always of its input, which A computes.
                found.adapter.add(d_in, r, times * (input_learns + 1))
                found.adapter.add(r, d_out, times * 2)
                if step.fused_adapters:
                    found.adapter.add(d_in, r, times)  # A x is computed again, for the gradient of B
                    # What is added in place is also read: y once, and the gradient of x for W and for A.
                    own.elements += d_out * times
                    found.adapter.elements += (2 if place else 1) * d_in * times * input_learns
                norms += _norm(step, name) * times
                learns = True
    forward_passes = 1 + (learns and again)
    found.passes["forward"] += 1
    found.attended += 1 if step.keeps_attention else forward_passes
    found.passes["again"] += forward_passes - 1
    found.passes["backward"] += learns
    _add(found.forward, own)
    _add(found.adapter, thin)
    found.norms += norms * forward_passes
    if forward_passes > 1:
        if not step.mlp_tile:  # tiles repeat the whole MLP
            _skip_last(own, thin, step, "down_proj" in adapts)
        _add(found.again, own)
        _add(found.adapter, thin)
    # The norm behind an MLP needs its result, so a checkpointed block with one repeats the MLP for it, and the tiles
    # repeat it once more.
    if step.mlp_tile and learns and (step.shape.ends_with_norm or forward_passes == 1):
        _mlp_again(found, step, adapts)
    return learns


def _norm(step: Step, name: str) -> int:
    """Count the operations of B A in DoRA's weight norm of one matrix, in one pass; 0 without DoRA.

    peft computes B A by sending an identity matrix of D_in rows through A and B, in an MLP once for each tile.
    """
    d_in, d_out = step.shape.linears[name]
    tiles = step.tiles if name in step.mlp else 1
    return 2 * step.rank * d_in * (d_in + d_out) * tiles * step.dora


def _mlp_again(found: Blocks, step: Step, adapts: Iterable[str]) -> None:
    """Add the products of one MLP that runs forward once more in its backward pass, in tiles."""
    found.mlp_again += 1
    for name in step.mlp:
        d_in, d_out = step.shape.linears[name]
        found.again.add(d_in, d_out)
        if name in adapts:
            found.adapter.add(d_in, step.rank)
            found.adapter.add(step.rank, d_out)
            found.again.elements += d_out * step.fused_adapters  # y, to which the adapter is added in place
            found.norms += _norm(step, name)


def _attention_grads(found: Blocks, asked: list[bool]) -> None:
    """Count attention's products for gradients in one block.

    Args:
        found: the sums so far.
        asked: for q, k and v (or for the one matrix that computes all three): whether its output needs a gradient,
            because the matrix is trained or adapted, or because its input needs one.
    """
    q, k, v = asked if len(asked) == 3 else asked * 3  # one value, if one matrix computes all three
    # One product each for the gradients of the attention weights, the queries, the keys and the values.
    found.attention_grads += (q or k) + q + k + v
    found.attended_back += q or k or v


def _skip_last(own: Products, thin: Products, step: Step, down_adapted: bool) -> None:
    """Take the block's last product out of what is recomputed.

    torch's checkpoint stops as soon as it has recomputed the last saved tensor, and the backward pass needs no output
    of the last product. DoRA is the exception: it saves that output, to compute the gradient of its magnitudes.
    """
    d_in, d_out = step.shape.linears["down_proj"]
    if not down_adapted:
        own.add(d_in, d_out, -step.shape.experts_per_token)
    elif not step.dora:
        thin.add(step.rank, d_out, -step.shape.experts_per_token)


def _add(total: Products, more: Products) -> None:
    total.flops += more.flops
    total.elements += more.elements


def head(step: Step, learns: bool) -> Products:
    """Count the head's products, forward and backward, for one position whose logits are computed.

    The chunked loss repeats no product, because it computes the gradients while the logits of a chunk still exist.

    Args:
        step: the step, which says what is trained.
        learns: whether the head's input needs a gradient.
    """
    found = Products()
    d_in = step.shape.width
    d_out = step.shape.vocabulary
    found.add(d_in, d_out, 1 + learns + step.trains_head)  # forward, gradient of the input, gradient of the weights
    return found


def attention(step: Step, blocks: Blocks, *, fused: bool) -> int:
    """Count the floating-point operations of attention in all blocks, as if every token attended to every other.

    The forward pass takes two products: queries with keys, and attention weights with values. The backward pass takes
    four at most. A fused kernel always takes all four, and a fifth for the scores, which it did not save.

    Args:
        step: the step, which gives the rows of a micro-batch and their length.
        blocks: how many blocks run attention, forward and backward.
        fused: whether one kernel computes all of attention (flash, memory-efficient), or each operation has its own.
    """
    back = 5 * blocks.attended_back if fused else blocks.attention_grads
    return (2 * blocks.attended + back) * 2 * step.batch * step.shape.query_width * step.tokens**2
