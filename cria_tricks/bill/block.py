r"""Add up what one block of a decoder has alive at each of its operations [bytes].

The block is walked once, operation by operation. When an operation has run, the saved tensors of all operations up to
it are alive. The same tensors are alive in its backward pass, because those that later operations saved have been freed
by then. On top come temporary tensors, which are alive only around this operation. The largest of these sums is the
block's deepest point, which ``bill/moments.py`` picks.

In the code n is the number of tokens of a micro-batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cria_tricks.bill.operation import ATTENDED, FP32, LOG_SUM_EXP, TILED, Operation
from cria_tricks.bill.step import Step


@dataclass(frozen=True)
class Point:
    """The forward or the backward pass of one operation, and what is alive there because of its block [bytes].

    Attributes:
        operation: which pass of which operation, in words.
        kept: the saved tensors of the operations up to this one.
        opened: temporary tensors around this operation.
        learnt: the gradients that the block's weights have by then.
        backward: whether it is in the backward pass.
    """

    operation: str
    kept: int
    opened: int
    learnt: int = 0
    backward: bool = False

    @property
    def bytes(self) -> int:
        """The sum of all three."""
        return self.kept + self.opened + self.learnt


def kept(operations: Sequence[Operation]) -> dict[str, int]:
    """Return the tensors that a block saves for its backward pass, by name [bytes]."""
    found: dict[str, int] = {}
    for operation in operations:
        found |= operation.pins
        found |= operation.keeps
    return found


def _pinned(operations: Sequence[Operation]) -> dict[str, int]:
    """Return the saved tensors that checkpointing and offloading cannot remove, by name [bytes]."""
    found: dict[str, int] = {}
    for operation in operations:
        found |= operation.pins
    return found


def pinned_bytes(operations: Sequence[Operation]) -> int:
    """Return the bytes of the saved tensors that checkpointing and offloading cannot remove."""
    return sum(_pinned(operations).values())


def attended_bytes(operations: Sequence[Operation]) -> int:
    """Return the bytes of what a fused attention kernel has returned; 0 for another kernel.

    If an int8 product pins attention's output, checkpointing could not drop that anyway, so it is not counted here.
    """
    tensors = kept(operations)
    if LOG_SUM_EXP not in tensors:
        return 0
    return tensors[ATTENDED] + tensors[LOG_SUM_EXP] - _pinned(operations).get(ATTENDED, 0)


def below_adapters(step: Step, operations: Sequence[Operation]) -> int:
    """Return how much less the first block saves, because no gradient is needed below its first adapter [bytes].

    In every other block the gradient flows on to the block below. Nothing below the first block learns, so in it
    autograd does not save what only the gradients below the first adapted matrix would need.
    """
    names = [operation.name for operation in operations]
    adapted = set(step.adapted)
    if adapted & set(step.mlp):
        adapted.add(TILED)
    first = next(number for number, name in enumerate(names) if name in adapted)
    # An int8 product pins its input only if the input needs a gradient.
    alike: tuple[str, ...] = ()
    if names[first] != TILED:
        alike = next(group for group in step.shape.input_groups if names[first] in group)  # they share an input
    learning = [replace(one, pins={}) if one.name in alike else one for one in operations[first:]]
    if step.offloaded:
        return pinned_bytes(operations) - pinned_bytes(learning)
    # For the first adapted matrices DoRA's whole weight and the dropout mask are not saved either, because only the
    # gradient of their input would need them.
    above = kept(learning)
    spared = sum(above.get(f"{name} whole", 0) + above.get(f"{name}'s dropout", 0) for name in alike)
    if step.kernel in ("eager", "math"):
        spared += _factors_without_use(step, above)
    return spared + sum(size for name, size in kept(operations).items() if name not in above)


def _factors_without_use(step: Step, above: dict[str, int]) -> int:
    """Return the bytes of factors that attention does not save in the first block, if it runs product by product.

    A product saves each factor for the gradient of the other one. In the first block queries, keys and values have a
    gradient only if their matrix has an adapter. So a factor is not saved if none of the matrices listed here with it
    has one.
    """
    # Queries are saved for the gradient of the keys, and keys for that of the queries. Values are saved for the
    # gradient of the probabilities, which leads to the scores and so to queries and keys. Probabilities are saved for
    # two: by softmax for the gradient of the scores, and by the product for that of the values.
    scores = {"q_proj", "k_proj"}
    needed = {"queries": {"k_proj"}, "keys": {"q_proj"}, "values": scores, "probabilities": scores | {"v_proj"}}
    if "probabilities in 16 bits" in above:  # the values are multiplied by this copy
        needed |= {"probabilities": scores, "probabilities in 16 bits": {"v_proj"}}
    adapted = set(step.adapted)
    if "qkv_proj" in adapted:
        adapted |= {"q_proj", "k_proj", "v_proj"}
    return sum(above.get(name, 0) for name, matrices in needed.items() if not matrices & adapted)


@dataclass(frozen=True)
class _Beside:
    """What is alive beside every operation while the block runs forward, for the first time or in a repetition.

    Attributes:
        bytes: all of it [bytes].
        skips_down: whether checkpointing's repetition of the block ends before its last product, down_proj.
        unmade: down_proj's result, if the repetition ends before that is made, and the estimate is to know it [bytes].
    """

    bytes: int
    skips_down: bool
    unmade: int


def _beside(step: Step, operations: Sequence[Operation]) -> _Beside:
    n = step.all_tokens
    mine = step.stream_tokens
    width = step.shape.width
    # If no block learns, no backward pass reaches one, so none is repeated.
    again = step.checkpointed and not step.keeps_nothing
    # Checkpointing repeats a block as soon as the backward pass asks autograd for a saved tensor. A frozen matrix needs
    # no activation, but autograd saves its weight. bitsandbytes keeps a quantised weight out of autograd's sight. So if
    # down_proj, the last product, is quantised and has no adapter, its backward pass runs before the repetition. Then
    # the block is repeated up to the operation before it, while the gradient of down_proj's input waits.
    # But if a norm follows down_proj, the norm's backward pass comes first and needs the whole block repeated. That is
    # also why DoRA's down_proj, below, counts only without such a norm.
    last = not step.shape.ends_with_norm
    frozen_down = any(operation.name == "down_proj" and not operation.learns for operation in operations)
    late = step.checkpointed and step.quantised and frozen_down and last
    magnitudes = step.checkpointed and step.dora and "down_proj" in step.adapted and last and not step.mlp_tile
    # The tiles of an MLP begin their backward pass with the gradient of the block's result itself.
    tiles = bool(step.mlp_tile) and last and step.product_itemsize == step.hidden_itemsize
    # How many tensors as large as the hidden states are alive beside an operation.
    if again:
        # The residual stream after attention (if norms save it as it is, and no copy, it is counted already), the
        # gradient of the block's result, and the same gradient once more on its way through the last operation. If
        # down_proj's backward pass runs before the repetition, what is added to `found` below stands for the last one.
        # Granite multiplies what a block adds, so there the gradient on its way is another tensor in any case.
        many = step.norms_copy + 2 - ((late or magnitudes or tiles) and not step.shape.scales_hidden)
    elif step.norms_copy or step.keeps_nothing:
        many = 3  # the embedding's result, the block's input, and the residual stream after attention
    else:
        # The same three, which norms save as they are, so they are counted already. Only below the first adapter no
        # norm saves the embedding's result.
        many = int(bool(step.adapted))
    # If processes divide the residual stream, three of these are whole all the same: the embedding's result; the
    # gathered gradient of the last product; and the same scaled, for its adapter.
    whole = 0
    if step.in_pieces:
        whole = 1 + (again and "down_proj" in step.adapted)
        many -= int(many > 0)
    # The norm at the end raises the gradient on its way to fp32 before it asks for the block again.
    raises = again and not last and step.product_itemsize < FP32
    a_hidden_state = many * step.hidden_itemsize + raises * (FP32 - step.product_itemsize)
    found = mine * width * a_hidden_state + n * width * whole * step.hidden_itemsize
    found += n * step.shape.inner * step.product_itemsize * late
    if magnitudes:
        # The backward pass of DoRA's down_proj begins before the block is repeated. The gradient of its result is fp32.
        # If products give 16 bits, an fp32 gradient of B A x is alive, too, and the base's gradient in 16 bits.
        narrow = step.product_itemsize < FP32
        found += n * width * (FP32 + narrow * (FP32 + step.product_itemsize))
    # Without an adapter down_proj saves its weight last, and the repetition ends there. Its result is counted all the
    # same. This matters only if processes divide the residual stream: else the backward pass has as much alive.
    ends = step.in_pieces and again and last and "down_proj" not in step.adapted
    return _Beside(found, late, n * width * step.product_itemsize * ends)


def points(step: Step, operations: Sequence[Operation], *, learns: bool = False) -> list[Point]:
    """Walk through a block, and return what is alive at each operation, in the forward and in the backward pass.

    Args:
        step: the step.
        operations: the operations of the block.
        learns: whether to count the gradients of the block's weights here.
    """
    around = _beside(step, operations)
    beside = around.bytes
    hidden = step.all_tokens * step.shape.width * step.hidden_itemsize
    pinned = _pinned(operations)
    attended = attended_bytes(operations) * (step.checkpointed and step.keeps_attention)
    learnt = learns * sum(operation.learns for operation in operations)
    found: list[Point] = []
    tensors: dict[str, int] = {}
    pins: dict[str, int] = {}
    normed = ""
    for operation in operations:
        if around.skips_down and operation.name == "down_proj":
            continue
        if step.keeps_nothing:
            tensors = {}  # those of earlier operations are not on the device
        tensors |= operation.keeps
        if step.learning_blocks:  # without a gradient int8 pins nothing
            pins |= operation.pins
        held = pins | tensors
        if step.keeps_nothing:
            held = pins | dict(operation.reads) | tensors
        if operation.name in ("first norm", "second norm"):
            # The block's code has it in a variable until the next norm has run, even if no operation saves it.
            normed = f"{operation.name}'s output"
        opened = operation.forward + beside - around.unmade * (operation.name == "down_proj")
        if normed and step.in_pieces:
            opened += step.stream_tokens * step.shape.width * step.hidden_itemsize
        if normed and normed not in held and not (step.in_pieces and operation.name.endswith("norm")):
            opened += hidden  # with a divided residual stream this is what was gathered from it
        if ATTENDED not in held:
            opened += attended  # kept since the block's first forward pass
        found.append(Point(f"forward pass of {operation.name}", sum(held.values()), opened))
        if operation.name == "weighted values" and step.keeps_nothing:
            # Eager attention also returns the probabilities, and the block drops them only at its end.
            beside += step.all_tokens * step.tokens * step.shape.heads * step.widest_itemsize
        # Pinned tensors are freed only when the whole backward pass has run.
        alive = sum((pinned | tensors).values())
        if step.checkpointed:
            # What the repetition pinned is freed at its end. What the first forward pass pinned is in another line of
            # the bill, that of waiting tensors.
            alive = sum(tensors.values())
        if step.keeps_nothing and operation.fetched is not None:
            # Beside the pinned tensors only those are on the device that come back from the host for this operation.
            alive = sum(pinned.values()) + operation.fetched
        # `beside` is not added: the variables of the forward pass are gone, and `backward` has the waiting gradients.
        opened = _opened_backward(step, operation)
        found.append(Point(f"backward pass of {operation.name}", alive, opened, learnt, True))
        if learns:
            learnt -= operation.learns  # at the next operation this gradient does not exist yet
    return found


def _opened_backward(step: Step, operation: Operation) -> int:
    """Count the bytes that are alive only while an operation runs backward."""
    opened = operation.backward
    if step.mlp_tile and step.checkpointed and step.offloaded and step.norms_copy:
        # The block's input, which another line of the bill counts, came from the host for the repetition only.
        opened -= step.all_tokens * step.shape.width * step.hidden_itemsize
    if not step.gradients_wait:
        # A new gradient, before it is added to an earlier one, or before it is used and freed.
        opened += operation.learns
    return opened
