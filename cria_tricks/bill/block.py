r"""One block of a decoder on paper: what each operation keeps for the backward pass, and what is open around it.

The block is walked once, operation by operation, in bytes. What the operations up to one keep is there when that one
has run; and it is there again in its backward pass, because what later operations kept is gone by then. On top come
tensors that are open only around the operation. The largest of these sums is the block's deepest point.

Letters: n tokens of a micro-batch, D width, Q = H C of the queries, K of the keys and values each, F inside the MLP,
T tokens of a row.
"""

from dataclasses import dataclass, replace

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.operation import Operation


@dataclass(frozen=True)
class Point:
    """A point of a block. The one at which most is alive is its deepest.

    Attributes:
        operation: where it is, in words.
        kept: bytes that the operations up to there keep.
        opened: bytes open around it.
        learnt: bytes of gradients that this block's weights have by then.
        backward: whether it is in the backward pass.
    """

    operation: str
    kept: int
    opened: int
    learnt: int = 0
    backward: bool = False

    @property
    def bytes(self) -> int:
        """What lives because of this block."""
        return self.kept + self.opened + self.learnt


def kept(operations: list[Operation]) -> dict[str, int]:
    """What a block keeps from its forward pass to its backward pass, in bytes by tensor."""
    found: dict[str, int] = {}
    for operation in operations:
        found |= operation.pins
        found |= operation.keeps
    return found


def _pinned(operations: list[Operation]) -> dict[str, int]:
    """What of it checkpointing and offloading cannot take away, by tensor."""
    found: dict[str, int] = {}
    for operation in operations:
        found |= operation.pins
    return found


def pinned_bytes(operations: list[Operation]) -> int:
    """Bytes of what checkpointing and offloading cannot take away."""
    return sum(_pinned(operations).values())


def below_adapters(memory: StepFacts, operations: list[Operation]) -> int:
    """Bytes that a block would keep, if a gradient went below its first adapted matrix."""
    names = [operation.name for operation in operations]
    first = next(number for number, name in enumerate(names) if name in memory.adapted)
    alike = next(stage for stage in memory.shape.stages if names[first] in stage)  # their input has no gradient
    learning = [replace(one, pins={}) if one.name in alike else one for one in operations[first:]]
    if memory.offloaded:
        return pinned_bytes(operations) - pinned_bytes(learning)
    above = kept(learning)
    spared = sum(above.get(f"{name} whole", 0) + above.get(f"{name}'s dropout", 0) for name in alike)
    if memory.kernel in ("eager", "math"):
        spared += _factors_without_use(memory, above)
    return spared + sum(size for name, size in kept(operations).items() if name not in above)


def _factors_without_use(memory: StepFacts, above: dict[str, int]) -> int:
    """Bytes of what attention does not keep in the first block: without a kernel it keeps factor by factor.

    A product keeps a factor for the gradient of the other one, so those of matrices without an adapter need none.
    """
    scores = {"q_proj", "k_proj"}
    needed = {"queries": {"k_proj"}, "keys": {"q_proj"}, "values": scores, "probabilities": scores | {"v_proj"}}
    if "probabilities in 16 bits" in above:  # these are what the values are multiplied with
        needed |= {"probabilities": scores, "probabilities in 16 bits": {"v_proj"}}
    adapted = set(memory.adapted)
    if "qkv_proj" in adapted:
        adapted |= {"q_proj", "k_proj", "v_proj"}
    return sum(above.get(name, 0) for name, matrices in needed.items() if not matrices & adapted)


@dataclass(frozen=True)
class _Beside:
    """What lives beside every operation of an open block.

    Attributes:
        bytes: of all of it.
        skips_down: whether the block that is made again ends before its last product, down_proj.
    """

    bytes: int
    skips_down: bool


def _beside(memory: StepFacts, operations: list[Operation]) -> _Beside:
    n = memory.all_tokens
    width = memory.shape.width
    again = memory.checkpointed and not memory.keeps_nothing
    # The backward pass of a quantised matrix needs nothing that is made again. Where it is the last operation, the
    # block is made again, up to the one before, while the gradient of what that one gave waits.
    frozen_down = any(operation.name == "down_proj" and not operation.learns for operation in operations)
    late = memory.checkpointed and memory.quantised and frozen_down
    magnitudes = memory.checkpointed and memory.dora and "down_proj" in memory.adapted
    # Beside the forward pass of an operation live what the embedding gave, the block's input and the stream behind its
    # attention, unless norms keep them as they are; below adapters none keeps the first. Where a block is made again,
    # it is the last of these, the stream's gradient, and the same once more on its way through the last operation.
    if again:
        many = (memory.hidden_itemsize < FP32) + 2 - (late or magnitudes)
    elif memory.hidden_itemsize < FP32 or memory.keeps_nothing:
        many = 3
    else:
        many = int(bool(memory.adapted))
    found = many * n * width * memory.hidden_itemsize + n * memory.shape.inner * memory.product_itemsize * late
    if magnitudes:
        # The way back to a magnitude begins in fp32, before anything is made again: the gradient, and that of B A x;
        # and the base waits for the gradient as narrow as its product.
        narrow = memory.product_itemsize < FP32
        found += n * width * (FP32 + narrow * (FP32 + memory.product_itemsize))
    return _Beside(found, late)


def points(memory: StepFacts, operations: list[Operation], *, learns: bool = False) -> list[Point]:
    """Walk a block, and see what is alive around each operation, forward and backward.

    Args:
        memory: the setting.
        operations: of the block.
        learns: whether its weights' gradients are counted here.
    """
    around = _beside(memory, operations)
    beside = around.bytes
    hidden = memory.all_tokens * memory.shape.width * memory.hidden_itemsize
    pinned = _pinned(operations)
    learnt = learns * sum(operation.learns for operation in operations)
    found: list[Point] = []
    tensors: dict[str, int] = {}
    pins: dict[str, int] = {}
    normed = ""
    for operation in operations:
        if around.skips_down and operation.name == "down_proj":
            continue
        if memory.keeps_nothing:
            tensors = {}  # each operation's own are fetched when their turn comes
        tensors |= operation.keeps
        if memory.learning_blocks:
            pins |= operation.pins
        held = pins | tensors
        if memory.keeps_nothing:
            held = pins | dict(operation.reads) | tensors
        if operation.name in ("first norm", "second norm"):
            normed = f"{operation.name}'s output"  # is read until the next norm has run
        opened = operation.forward + beside
        if normed not in held:
            opened += hidden
        found.append(Point(f"forward pass of {operation.name}", sum(held.values()), opened))
        if operation.name == "weighted values" and memory.keeps_nothing:
            # The block is given the probabilities too, and drops them at its end.
            beside += memory.all_tokens * memory.tokens * memory.shape.heads * memory.widest_itemsize
        # What is pinned stays until the whole backward pass has run.
        alive = sum((pinned | tensors).values())
        if memory.checkpointed:
            alive = sum(tensors.values())
        if memory.keeps_nothing and operation.fetched is not None:
            alive = sum(pinned.values()) + operation.fetched
        made = operation.learns * memory.accumulates  # a new gradient, which is added to an earlier one
        found.append(Point(f"backward pass of {operation.name}", alive, operation.backward + made, learnt, True))
        if learns:
            learnt -= operation.learns  # those of the operations after it are there already
    return found
