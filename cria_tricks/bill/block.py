r"""One block of a decoder on paper: what each operation keeps for the backward pass, and what is open around it.

The block is walked once, operation by operation, in bytes. What the operations up to one keep is there when that one
has run; and it is there again in its backward pass, because what later operations kept is gone by then. On top come
tensors that are open only around the operation. The largest of these sums is the block's deepest point.

Letters: n tokens of a micro-batch, D width, Q = H C of the queries, K of the keys and values each, F inside the MLP,
T tokens of a row.
"""

from dataclasses import dataclass, replace

from cria_tricks.bill.block_operations import keeps_nothing
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
    return {
        name: size for operation in operations for name, size in (*operation.pins.items(), *operation.keeps.items())
    }


def pinned_bytes(operations: list[Operation]) -> int:
    """What of it checkpointing and offloading cannot take away."""
    return sum({name: size for operation in operations for name, size in operation.pins.items()}.values())


def below_adapters(memory: StepFacts, operations: list[Operation]) -> int:
    """Bytes that a block would keep, if a gradient went below its first adapted matrix."""
    first = next(i for i, operation in enumerate(operations) if operation.name in memory.adapted)
    alike = next(
        names for names in memory.shape.stages if operations[first].name in names
    )  # their input has no gradient
    learning = [replace(one, pins={}) if one.name in alike else one for one in operations[first:]]
    if memory.offloaded:
        return pinned_bytes(operations) - pinned_bytes(learning)
    above = kept(learning)
    spared = sum(above.get(f"{name} whole", 0) + above.get(f"{name}'s dropout", 0) for name in alike)
    if memory.kernel in ("eager", "math"):  # they keep what a gradient needs, factor by factor
        scores, halves = {"q_proj", "k_proj"}, "probabilities in 16 bits"
        needed = {"queries": {"k_proj"}, "keys": {"q_proj"}, "values": scores, halves: {"v_proj"}}
        needed["probabilities"] = scores if halves in above else scores | {"v_proj"}
        adapted = set(memory.adapted) | ({"q_proj", "k_proj", "v_proj"} if "qkv_proj" in memory.adapted else set())
        spared += sum(above.get(name, 0) for name, matrices in needed.items() if not matrices & adapted)
    return spared + sum(size for name, size in kept(operations).items() if name not in above)


def points(memory: StepFacts, operations: list[Operation], *, learns: bool = False) -> list[Point]:
    """Walk a block, and see what is alive around each operation, forward and backward.

    Args:
        memory: the setting.
        operations: of the block.
        learns: whether its weights' gradients are counted here.
    """
    # The backward pass of a quantised matrix needs nothing that is made again. Where it is the last operation, the
    # block is made again, up to the one before, while the gradient of what that one gave waits.
    late = (
        memory.checkpointed
        and memory.quantised
        and any(operation.name == "down_proj" and not operation.learns for operation in operations)
    )
    magnitudes = memory.checkpointed and memory.dora and "down_proj" in memory.adapted
    # Beside the forward pass of an operation live what the embedding gave, the block's input and the stream behind its
    # attention, unless norms keep them as they are; below adapters none keeps the first. Where a block is made again,
    # it is the last of these, the stream's gradient, and the same once more on its way through the last operation.
    many = 3 if memory.stream < FP32 or keeps_nothing(memory) else bool(memory.adapted)
    if memory.checkpointed and not keeps_nothing(memory):
        many = (memory.stream < FP32) + (1 if late or magnitudes else 2)
    hidden = memory.all_tokens * memory.shape.width * memory.stream
    beside = many * hidden + memory.all_tokens * memory.shape.inner * memory.product * late
    if magnitudes:
        # The way back to a magnitude begins in fp32, before anything is made again: the gradient, and that of B A x;
        # and the base waits for the gradient as narrow as its product.
        narrow = memory.product < FP32
        beside += memory.all_tokens * memory.shape.width * (FP32 + narrow * (FP32 + memory.product))
    found, tensors, pins, normed = [], dict[str, int](), dict[str, int](), ""
    learnt = sum(operation.learns for operation in operations) if learns else 0
    pinned = {name: size for operation in operations for name, size in operation.pins.items()}
    for operation in operations:
        if late and operation.name == "down_proj":
            continue
        if keeps_nothing(memory):
            tensors = {}  # each operation's own are fetched when their turn comes
        tensors |= operation.keeps
        pins |= operation.pins if memory.learning_blocks else {}
        read = dict(operation.reads) if keeps_nothing(memory) else {}
        held = pins | read | tensors
        if operation.name in ("first norm", "second norm"):
            normed = f"{operation.name}'s output"  # is read until the next norm has run
        opened = operation.forward + beside + (0 if normed in held else hidden)
        found.append(Point(f"forward pass of {operation.name}", sum(held.values()), opened))
        if operation.name == "weighted values" and keeps_nothing(memory):
            # The block is given the probabilities too, and drops them at its end.
            beside += memory.all_tokens * memory.tokens * memory.shape.heads * max(memory.stream, memory.product)
        # What is pinned stays until the whole backward pass has run.
        alive = sum(tensors.values()) if memory.checkpointed else sum((pinned | tensors).values())
        if keeps_nothing(memory) and operation.fetched is not None:
            alive = sum(pinned.values()) + operation.fetched
        made = operation.learns * memory.accumulates  # a new gradient, which is added to an earlier one
        found.append(Point(f"backward pass of {operation.name}", alive, operation.backward + made, learnt, True))
        learnt -= operation.learns if learns else 0  # those of the operations after it are there already
    return found
