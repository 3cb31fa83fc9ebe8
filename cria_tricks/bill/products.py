"""The matrix products of a training step, counted: who is multiplied with what, forward, once more, and backward.

A product of N positions with a matrix (D_in, D_out) takes 2 N D_in D_out floating-point operations. On the way back it
takes as many again for the gradient of its input, if anything before it learns, and as many for the gradient of the
matrix, if that is trained. So a trained weight costs 6 operations a token, a frozen one 4, and 2 more are spent on it
when its block is checkpointed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe


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


def adapted(recipe: Recipe, shape: Shape) -> set[str]:
    """The matrices of a block that LoRA adapts."""
    if recipe.tricks.peft != "lora":
        return set()
    names = {target.rsplit(".", 1)[-1] for target in recipe.lora.target_modules}
    return set(shape.linears) if "all-linear" in names else names & set(shape.linears)


def checkpoints(recipe: Recipe) -> bool:
    """Whether blocks run twice: with a trained head alone there is nothing to come back to."""
    return recipe.tricks.gradient_checkpointing and recipe.tricks.peft != "head"


def blocks(recipe: Recipe, shape: Shape) -> Blocks:
    """Walk through the blocks, once forward, and see what each owes the way back."""
    peft, found = recipe.tricks.peft, Blocks()
    # transformers has the embedded tokens ask for a gradient as soon as blocks are checkpointed.
    found.learns = peft in ("none", "prompt_tuning") or checkpoints(recipe)
    beside_from = shape.layers - recipe.side.blocks if peft == "side_network" else shape.layers
    for number in range(shape.layers):
        before = found.learns
        found.learns = _block(found, recipe, shape, before, adapted(recipe, shape), trained=peft == "none")
        if number >= beside_from:  # its trained copy, and the matrix that joins the two
            _block(found, recipe, shape, before, (), trained=True)
            found.forward.add(shape.width, shape.width)
            found.backward.add(shape.width, shape.width, 2)
            found.learns = True
    return found


def _block(found: Blocks, recipe: Recipe, shape: Shape, learns: bool, adapts: Iterable[str], *, trained: bool) -> bool:
    """Add one block; returns whether what it hands on needs a gradient, given whether what it was handed does."""
    own, thin, r, norms = Products(), Products(), recipe.lora.r, 0
    for number, stage in enumerate(shape.stages):
        input_learns = learns or trained  # the norm in front trains too
        if number == 0:
            asked = [input_learns or name in adapts for name in stage]
            q, k, v = asked if len(asked) == 3 else asked * 3  # or one matrix gives all of them
            found.attention_grads += (q or k) + q + k + v  # of the weights, the queries, the keys and the values
            found.attended_back += q or k or v
        for name in stage:
            (d_in, d_out), times = shape.linears[name], 1 if shape.copies(name) == 1 else shape.experts_per_token
            own.add(d_in, d_out, times)
            found.backward.add(d_in, d_out, times * (input_learns + trained))
            learns |= trained
            if name in adapts:
                thin.add(d_in, r, times)
                thin.add(r, d_out, times)
                found.adapter.add(d_in, r, times * (input_learns + 1))
                found.adapter.add(r, d_out, times * 2)
                norms += 2 * r * d_in * (d_in + d_out) * times * recipe.lora.dora
                learns = True
    runs = ["forward"]
    if learns:
        runs += ["again", "backward"] if checkpoints(recipe) else ["backward"]
    for name in runs:
        found.passes[name] += 1
    _add(found.forward, own)
    _add(found.adapter, thin)
    found.norms += norms * (len(runs) - learns)
    if "again" in runs:
        _skip_last(own, thin, shape, recipe, "down_proj" in adapts)
        _add(found.again, own)
        _add(found.adapter, thin)
    return learns


def _skip_last(own: Products, thin: Products, shape: Shape, recipe: Recipe, down_adapted: bool) -> None:
    """torch's checkpoint stops as soon as it has again what was kept, so the last product is not repeated."""
    d_in, d_out = shape.linears["down_proj"]
    if not down_adapted:
        own.add(d_in, d_out, -shape.experts_per_token)
    elif not recipe.lora.dora:
        thin.add(recipe.lora.r, d_out, -shape.experts_per_token)


def _add(total: Products, more: Products) -> None:
    total.flops += more.flops
    total.elements += more.elements


def head(recipe: Recipe, shape: Shape, learns: bool) -> Products:
    """The head's products for a position whose logits are made.

    The chunked loss makes its gradient while the logits are there, so it repeats nothing.

    Args:
        recipe: decides what trains.
        shape: the model's.
        learns: whether anything below the head does.
    """
    found, d_in, d_out = Products(), shape.width, shape.vocabulary
    found.add(d_in, d_out, 1 + learns + (recipe.tricks.peft in ("none", "head")))
    if recipe.tricks.peft == "lora" and any(t.endswith("lm_head") for t in recipe.lora.target_modules):
        found.add(d_in, recipe.lora.r, 2 + learns)
        found.add(recipe.lora.r, d_out, 3)
    return found


def attention(blocks: Blocks, shape: Shape, rows: int, tokens: int, *, fused: bool) -> int:
    """Operations of all attention, when no token pair is left out.

    Forward two products: queries with keys, weights with values. Backward four; a fused kernel makes a fifth, the
    scores once more, which it has not kept, and always all of them.

    Args:
        blocks: how often attention runs.
        shape: the model's.
        rows: of a micro-batch.
        tokens: of a row.
        fused: whether a kernel does it all (flash, memory-efficient) or one operation after the other.
    """
    runs = blocks.passes["forward"] + blocks.passes["again"]
    back = 5 * blocks.attended_back if fused else blocks.attention_grads
    return (2 * runs + back) * 2 * rows * shape.query_width * tokens**2


def trained_weights(recipe: Recipe, shape: Shape) -> int:
    """Weights that have a gradient and optimizer states."""
    peft = recipe.tricks.peft
    if peft == "head":
        return shape.embedding_weights
    if peft == "prompt_tuning":
        return recipe.prompt.tokens * shape.width
    if peft == "side_network":
        return recipe.side.blocks * (shape.block_linear_weights + shape.block_other_weights + shape.width**2)
    if peft == "none":
        return shape.weights
    r, dora, total = recipe.lora.r, recipe.lora.dora, 0
    for name in adapted(recipe, shape):
        d_in, d_out = shape.linears[name]
        total += shape.layers * shape.copies(name) * (r * (d_in + d_out) + d_out * dora)
    if any(target.endswith("lm_head") for target in recipe.lora.target_modules):
        total += r * (shape.width + shape.vocabulary)
    return total
