"""What is known about a step of training before its bytes are added up: the tricks change it one after the other."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.operation import Operation
from cria_tricks.bill.product_bytes import Product, ProductBytes
from cria_tricks.bill.rows import Row
from cria_tricks.bill.waiting import BlockTensors, WaitingBytes
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Shape


@dataclass(frozen=True)
class StepFacts:
    """What is known about a step, in bytes an element; the tricks change it one after the other.

    What a trick does to lines of its own is a number or a rule that it sets here. A flag is left where a trick changes
    the course of a step, so that many lines of a block change. Two bills are compared without their rules, because two
    equal functions made at different times are not equal; what the rules give stands in the bill's moments.

    Attributes:
        shape: of the model.
        device: that it is meant for.
        batch: rows of a micro-batch.
        tokens: of a row.
        trained_tokens: of a micro-batch.
        block_weight_bytes: bytes of the blocks' matrices as they are stored, experts' apart.
        learning_operations: rule for the operations of what learns: of a block, or of a trained copy beside it.
        product_bytes: rule for the bytes around one product with a block's matrix.
        block_waits: rule for what of a block waits until its backward pass.
        loss_moments: rule for the rows at the moments around the loss, by the names of these moments.
        state_bytes: rule for the bytes of the optimizer's two states of a tensor of so many elements.
        embedding_state_bytes: the same for the embedding.
        other_weight_itemsize: bytes of an element of the other weights: embedding, head, norms, biases, experts.
        compute_itemsize: bytes of an element of what products multiply.
        bf16: whether these two bytes are bf16.
        hidden_itemsize: of the hidden states between the blocks.
        product_itemsize: of what a product gives.
        quantised: whether the blocks' matrices are stored in 8 bits or 4.
        elements_per_byte: how many of a matrix's elements share a byte, where they do.
        trains_all: whether the loaded weights train.
        added: trained tensors beside the loaded weights: how many, elements of each.
        adapted: the matrices that have an adapter.
        rank: of the adapters.
        dora: whether they learn magnitudes too.
        dropout: whether some of their inputs are dropped.
        adapter_input_itemsize: bytes of an element to which adapters raise narrower inputs first.
        learning_blocks: blocks through which the gradient flows, from the last one on.
        learns_beside: whether each of these has a trained copy of itself beside it.
        trains_head: whether the head trains.
        kernel: the attention's: ``eager``, ``math``, ``memory-efficient`` or ``flash``.
        repeats_keys: whether keys and values are repeated for every query head.
        maskless: whether attention runs without a mask.
        joins_documents: whether attention's results are joined from those of each document.
        checkpointed: whether blocks keep their input only.
        offloaded: whether the saved activations of the blocks wait in the host's memory.
        waiting_gradient_bytes: bytes of the gradients of earlier micro-batches, which wait through the step.
        optimizer_state_bits: bits of an element of the optimizer's two states.
    """

    shape: Shape
    device: Device
    batch: int
    tokens: int
    trained_tokens: int
    block_weight_bytes: int
    learning_operations: Callable[["StepFacts"], list[Operation]] = field(compare=False)
    product_bytes: Callable[[Product], ProductBytes] = field(compare=False)
    block_waits: Callable[[BlockTensors], WaitingBytes] = field(compare=False)
    loss_moments: Callable[["StepFacts"], dict[str, tuple[Row, ...]]] = field(compare=False)
    state_bytes: Callable[[int], int] = field(compare=False)
    embedding_state_bytes: Callable[[int], int] = field(compare=False)
    other_weight_itemsize: int = FP32
    compute_itemsize: int = FP32
    bf16: bool = False
    hidden_itemsize: int = FP32
    product_itemsize: int = FP32
    quantised: bool = False
    elements_per_byte: int = 1
    trains_all: bool = True
    added: tuple[tuple[int, int], ...] = ()
    adapted: tuple[str, ...] = ()
    rank: int = 0
    dora: bool = False
    dropout: bool = False
    adapter_input_itemsize: int = FP32
    learning_blocks: int = 0
    learns_beside: bool = False
    trains_head: bool = True
    kernel: str = "eager"
    repeats_keys: bool = True
    maskless: bool = False
    joins_documents: bool = False
    checkpointed: bool = False
    offloaded: bool = False
    waiting_gradient_bytes: int = 0
    optimizer_state_bits: int = 32

    @property
    def accumulates(self) -> bool:
        """Whether a new gradient is added to one of an earlier micro-batch."""
        return self.waiting_gradient_bytes > 0

    @property
    def keeps_nothing(self) -> bool:
        """Whether blocks keep nothing on the device from their forward pass: none learns, or all is sent away."""
        return not self.learning_blocks or (self.offloaded and not self.checkpointed)

    @property
    def widest_itemsize(self) -> int:
        """Bytes of an element of what comes of a hidden state and a product's result together."""
        return max(self.hidden_itemsize, self.product_itemsize)

    @property
    def all_tokens(self) -> int:
        """n, of a micro-batch."""
        return self.batch * self.tokens

    @property
    def trained(self) -> tuple[tuple[int, int], ...]:
        """Trained tensors: how many, elements of each."""
        return (self.shape.tensors if self.trains_all else ()) + self.added

    @property
    def trained_weights(self) -> int:
        """Elements that train."""
        return sum(many * elements for many, elements in self.trained)


def fp32_states(elements: int) -> int:
    """Bytes of the two states of a tensor, in fp32."""
    return 2 * FP32 * elements
