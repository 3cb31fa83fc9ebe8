"""Bill a block with hand-written backward passes (fused_lora, fused_blocks and tiled_mlp in ``techniques/``) [bytes].

Short names as in ``block_operations.py``: n tokens, and one element takes a bytes in the compute dtype, x bytes in a
product's input, and o bytes in its result.
"""

from collections.abc import Callable
from dataclasses import replace

from cria_tricks.bill.block_operations import product_of, walk
from cria_tricks.bill.operation import FP32, GATED, TILED, NormBytes, Operation
from cria_tricks.bill.step import Step

TOGETHER = ("q_proj", "k_proj", "v_proj")
"""Matrices of attention that multiply the same input: one function computes all three."""
MLP = ("gate_proj", "up_proj", "down_proj")
GATE_AND_UP = "gate", "up"
"""What the MLP's functions save beside their input, by the names that the operations have for it."""

NORM_AT_ONCE = 2**24
"""Numbers of its input for which a fused norm runs backward at one time, if it has more: 64 MiB in fp32."""

Rule = Callable[[Step], list[Operation]]


def with_adapter(step: Step, base: Operation, source: str, x: int) -> Operation:
    """Add an adapter to the operation of a product; it saves the input in the compute dtype, and nothing else.

    Args:
        step: the step.
        base: the operation of the frozen product alone.
        source: the name of its input.
        x: bytes of one element of the input.
    """
    a = step.compute_itemsize
    o = step.product_itemsize
    size = product_of(step, base.name, x)
    thin = step.all_tokens * step.rank * a  # A x, or the gradient of it
    weights = step.rank * sum(step.shape.linears[base.name])  # of A and B
    casts = weights * a * (a < FP32)
    input_name = source if x == a else f"{source} in 16 bits"
    # The adapter is added in place, by a product of its own where the result is wider.
    added = size.made * (o + a * (o != a))
    forward = max(base.forward, added + thin + casts)
    # The gradient of the result is cast to what products multiply, and that of the input to what the input was.
    narrow = size.made * a * (o != a)
    backward = base.backward + narrow + thin + casts + size.given * min(a, x) * (x != a)
    # A packed weight is unpacked in the compute dtype, not in that of the input as in bitsandbytes' int8.
    backward += size.weight * a * step.quantised - step.product_bytes(size).unpacked
    if step.device.kind == "cpu" and a < FP32:
        # A CPU has no product of 16-bit numbers that gives fp32, so one of its factors is cast. The gradient of the
        # input is there already if this is not the first matrix that multiplies it.
        sums = size.given * x * (base.name in ("k_proj", "v_proj", "up_proj"))
        backward = max(backward, size.made * o + narrow + thin + sums + FP32 * max(size.given, size.made))
    kept = {**base.keeps, input_name: size.given * a}
    return replace(base, keeps=kept, pins={}, forward=forward, backward=backward, learns=weights * FP32)


def operations(step: Step, rule: Rule) -> list[Operation]:
    """List the operations of a block with fused adapters.

    Args:
        step: the step.
        rule: the operations of the block without fusing what lies around the products.
    """
    found = _products_together(step, rule(step))
    if not step.shape.joined and step.shape.experts == 1 and all(name in step.adapted for name in MLP):
        return _mlp_together(step, found)
    return found


def _products_together(step: Step, found: list[Operation]) -> list[Operation]:
    """Count the results of queries, keys and values beside each other, and so their gradients."""
    made = {name: product_of(step, name, 0).made * step.product_itemsize for name in step.shape.linears}
    together = [one for one in found if one.name in TOGETHER and one.name in step.adapted]
    earlier = learnt = 0
    changed = {}
    for one in together:
        # The function returns all gradients at once, so those of the earlier matrices' adapters wait in it.
        others = sum(made[other.name] for other in together) - made[one.name] + learnt
        changed[one.name] = replace(one, forward=one.forward + earlier, backward=one.backward + others)
        earlier += made[one.name]
        learnt += one.learns
    return [changed.get(one.name, one) for one in found]


def _mlp_together(step: Step, found: list[Operation]) -> list[Operation]:
    """Replace the operations of the MLP by those of its two functions: one for gate and up, one for the rest."""
    shape = step.shape
    by_name = {one.name: one for one in found}
    gate, up, down = (by_name[name] for name in MLP)
    first = found.index(gate)
    last = found.index(down)
    inner = step.all_tokens * shape.inner * step.product_itemsize
    hidden = step.all_tokens * shape.width
    residual = step.stream_tokens * shape.width * step.hidden_itemsize
    saved = dict.fromkeys(GATE_AND_UP, inner)
    # What is repeated ends where gate and up are saved again.
    runs = not step.checkpointed
    input_bytes = sum(gate.keeps.values())
    # down's input is not saved, but computed again, with the activated gate beside it.
    narrow = step.all_tokens * shape.inner * step.compute_itemsize
    alive = inner
    if step.product_itemsize != step.compute_itemsize:
        alive = narrow  # the input itself is in down.forward, because it is not saved under this name
    # The gradient of down's result is that of the block's result, unless an operation or a cast lies between them.
    result = hidden * step.product_itemsize
    apart = shape.ends_with_norm or shape.scales_hidden or step.in_pieces
    if step.product_itemsize == step.hidden_itemsize and not apart:
        result = 0
    through_down = down.backward - hidden * step.product_itemsize + result + inner + narrow
    # Behind it the activated gate is there beside three gradients.
    through_activation = residual + result + 4 * inner
    return [
        *found[:first],
        gate,
        replace(
            up,
            keeps={**up.keeps, **saved},
            forward=up.forward - inner,  # its result is counted as saved
            # The gradient of gate's result waits, and so do those of its adapter, as the function returns all at once.
            backward=up.backward + inner + gate.learns,
            fetched=input_bytes,
        ),
        Operation("gate's activation", forward=2 * inner * runs, reads=saved, fetched=0),
        replace(
            down,
            keeps={},
            forward=(down.forward + alive) * runs,
            backward=max(through_down, through_activation),
            reads=saved,
            fetched=input_bytes + 2 * inner,
        ),
        *found[last + 1 :],
    ]  # fmt: skip


def norm_bytes(elements: int, x: int) -> NormBytes:
    """Bill a fused norm with inputs of x bytes an element: it saves the input itself; casts come on the way back."""
    # The gradients of the result and of the residual stream, and two fp32 tensors: the former times the weight, and
    # that times the input.
    backward = elements * (2 * x + 2 * FP32)
    if elements > NORM_AT_ONCE:  # beside these gradients that of the input, of which a part is computed in fp32
        backward = elements * 3 * x + NORM_AT_ONCE * 2 * FP32
    return NormBytes(elements * x, elements * x, backward, copies=False, apart=0)


def without_activated_gate(step: Step, rule: Rule) -> list[Operation]:
    """List the operations of a block whose gated activation saves gate and up only.

    Args:
        step: the step.
        rule: the operations of the block without that.
    """
    found = rule(step)
    names = [one.name for one in found]
    # In these models, and with fused_lora, the activation is no operation of its own.
    if step.shape.joined or step.shape.experts > 1 or GATED not in names:
        return found
    inner = step.all_tokens * step.shape.inner * step.product_itemsize
    gate = {"gate": inner}
    up = found[names.index("up_proj")]
    gated = found[names.index(GATED)]
    # The activation runs behind up_proj here, and all its tensors are saved there, also where only up has an adapter.
    # Backward, the gradient of its result and three more tensors are alive.
    changed = {
        "gate's activation": Operation("gate's activation", forward=inner),
        "up_proj": replace(up, forward=up.forward + inner, reads={}),
        GATED: replace(
            gated, keeps={**gated.keeps, **gate}, forward=2 * inner, backward=gated.backward + inner, reads={}
        ),
    }
    return [changed.get(one.name, one) for one in found]


def tiled(step: Step, rule: Rule = walk) -> list[Operation]:
    """List the operations of a block whose MLP takes a tile of tokens at a time, as one operation.

    Args:
        step: the step; its ``mlp_tile`` may be 0, and then nothing changes.
        rule: the operations of the block without tiles.
    """
    found = rule(step)
    if not step.mlp_tile:
        return found
    names = [one.name for one in found]
    first = names.index(step.mlp[0])
    last = names.index(step.mlp[-1])
    # The same MLP for the tokens of one tile: recorded by autograd, as its backward pass has it, and not recorded.
    inside = replace(step, batch=1, tokens=step.mlp_tile, checkpointed=False, offloaded=False, waiting_gradient_bytes=0)
    recorded = rule(inside)[first : last + 1]
    passing = rule(replace(inside, learning_blocks=0))[first : last + 1]
    n = step.all_tokens
    width = step.shape.width
    x = step.hidden_itemsize
    o = step.product_itemsize
    residual = n * width * x
    # The gradient of the result is that of the block's result, unless an operation or a cast lies between the two.
    own_gradient = n * width * o * (o != x or step.shape.ends_with_norm or step.shape.scales_hidden)
    norm = "attention's sum" if step.shape.norms_behind else "second norm's output"
    whole = Operation(
        TILED,
        keeps={norm: residual},
        forward=n * width * o + max(sum({**one.reads, **one.keeps}.values()) + one.forward for one in passing),
        # The gradients of the residual stream and of the MLP's input, beside what is alive in a tile.
        backward=2 * residual + own_gradient + _through_a_tile(inside, recorded),
        learns=sum(one.learns for one in recorded),
    )
    return [*found[:first], whole, *found[last + 1 :]]


def _through_a_tile(inside: Step, operations: list[Operation]) -> int:
    """Return the most bytes that are alive while one tile runs forward again and backward.

    Args:
        inside: the step of a tile.
        operations: of the MLP, for the tokens of a tile.
    """
    result = inside.all_tokens * inside.shape.width * inside.product_itemsize
    # The rules count a gradient of the residual stream for the tokens of a tile; there is none of that size.
    residual = inside.all_tokens * inside.shape.width * inside.hidden_itemsize
    learnt = sum(one.learns for one in operations)
    pinned: dict[str, int] = {}
    for one in operations:
        pinned |= one.pins
    tensors: dict[str, int] = {}
    most = 0
    for one in operations:
        tensors |= one.keeps
        forward = sum((pinned | tensors).values()) + one.forward
        backward = sum((pinned | tensors).values()) + one.backward - residual + result + learnt
        most = max(most, forward, backward)
        learnt -= one.learns
    return most
