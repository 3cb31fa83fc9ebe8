"""Describe a training step before its bytes and its seconds are counted: sizes, dtypes, what trains, what moves."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from cria_tricks.bill.operation import (
    FP32,
    TOKENS_PER_CHUNK,
    BlockTensors,
    Line,
    NormBytes,
    Operation,
    Product,
    ProductBytes,
    WaitingBytes,
)
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Shape


@dataclass(frozen=True)
class Step:
    """A training step, as far as its bytes and its seconds depend on it.

    It begins as plain fp32 full fine-tuning, and each technique that is on returns a changed copy
    (``switches/folds.py``). A technique that changes only bytes of its own sets a number or a rule, which is a
    function. A flag is used where a technique changes many lines: the order of events in a block (``bill/block.py``),
    or its memory traffic (``bill/moved_bytes.py``). Two steps are compared without their rules, because two equal
    functions made at different times are not equal; what the rules return is compared in the bills' moments.

    An item size is in bytes for one element. "Bytes moved" are read from the device's memory and written to it.

    Attributes:
        shape: widths of the model.
        device: the device that the step is meant for.
        batch: rows of a micro-batch.
        tokens: tokens of a row, the vectors of a learnt prompt included.
        trained_tokens: trained tokens of a micro-batch, at most; the bytes are those of this case.
        block_weight_bytes: bytes of the matrices of all blocks as they are stored, without those of experts.
        blocks_on_device: how many blocks have their matrices on the device at a time; ``None`` if all have.
        learning_operations: rule: step -> operations of a block that learns, or of the trained copy beside a block.
        product_bytes: rule: one product with a block's matrix -> bytes that it needs.
        with_adapter: rule: step, the operation of a frozen product, the name of its input, bytes of an element of it
            -> the operation with its adapter.
        casts_adapters: whether autocast makes 16-bit copies of the adapters, which live until the forward pass ends.
        norm_bytes: rule: elements of the input of an RMS norm, bytes of one of them -> bytes that the norm needs.
        block_waits: rule: saved tensors of a block -> bytes that wait on the device for its backward pass.
        loss_moments: rule: step -> lines of the bill at the moments around the loss, by the names of these moments.
        state_bytes: rule: elements of a tensor -> bytes of its two optimizer states.
        embedding_state_bytes: the same rule for the embedding.
        paged_from: elements from which a tensor's states are paged, where the allocator does not see them; 0: none.
        other_weight_itemsize: item size of the other loaded weights: embedding, head, norms, biases, experts.
        compute_itemsize: item size of the compute dtype, in which products multiply.
        bf16: whether a compute dtype of 2 bytes is bf16; else it is fp16.
        hidden_itemsize: item size of the hidden states between the blocks.
        product_itemsize: item size of a product's result.
        quantised: whether the blocks' matrices are stored in 8 or 4 bits.
        elements_per_byte: elements of a matrix in one byte, where several share one.
        trains_all: whether the loaded weights train.
        added: trained tensors besides the loaded weights, as pairs (number of tensors, elements of each).
        adapted: names of the matrices that have an adapter.
        rank: rank of the adapters.
        dora: whether the adapters learn magnitudes, too.
        dropout: whether the adapters' inputs go through dropout.
        adapter_input_itemsize: item size to which adapters cast narrower inputs first.
        learning_blocks: number of blocks through which the gradient flows, counted from the last one.
        learns_beside: whether each of these is a frozen block with a trained copy beside it (side network).
        trains_head: whether the head trains.
        mlp_tile: tokens of a tile, if the MLP takes fewer tokens at a time than a micro-batch has; else 0.
        kernel: the attention's kernel: ``eager``, ``math``, ``memory-efficient`` or ``flash``.
        repeats_keys: whether keys and values are repeated for every query head before the kernel gets them.
        maskless: whether attention runs without a mask.
        joins_documents: whether each document of a packed row is attended alone, and the results are joined.
        own_positions: whether the documents of each row begin at other places, so that rows share no positions.
        checkpointed: whether blocks save only their input, and run forward again in the backward pass.
        kept_blocks: how many of the last blocks save everything although the first ones are checkpointed.
        keeps_attention: whether checkpointed blocks also keep what attention's kernel returned.
        offloaded: whether the saved activations of the blocks wait in the host's memory.
        overlapped: whether they go there beside the computing. Then those of the last block stay, and so does all that
            the loss saves; one block's input comes back ahead of its use; and blocks that are not checkpointed keep
            theirs.
        waiting_gradient_bytes: bytes of the gradients of earlier micro-batches, which are alive in the whole step.
        window: how many micro-batches go through the blocks together.
        steps_in_backward: whether each weight takes its step when its gradient arrives, so that no gradient waits.
        optimizer_state_bits: bits of one number of the optimizer's two states.
        expandable_segments: whether torch's allocator may grow its segments.
        stream_pieces: how many processes divide the tokens of the residual stream and of the norms among them.
        micro_batches: how many make an optimizer step.
        prompt_tokens: how many of a row's tokens are vectors of a learnt prompt.
        trained_share: which share of the other tokens is trained in the mean, from 0 to 1; for the seconds.
        stored_itemsize: item size of a block's weights as they are stored, with their share of quantisation scales.
        reaches_embedding: whether the embedding's output needs a gradient.
        fused_adapters: whether adapters add in place, with a backward pass of their own (fused LoRA).
        fused_blocks: whether norms, rotary positions and activations make few tensors on the way.
        compiled: whether ``torch.compile`` fuses the small operations of a block into a few kernels.
        logit_positions: positions of a micro-batch for which logits are computed; ``None`` for all.
        logit_bytes: bytes moved for one logit, forward and backward together.
        logit_saved_bytes: bytes that autograd saves for one logit.
        optimizer_bytes: bytes that the optimizer's kernel moves for one trained weight.
        gradient_bytes: bytes moved for one trained weight by everything done to its gradient before that, such as
            accumulation, unscaling and clipping.
        link_trips: how often all that is saved crosses the link between device and host.
        travelling_blocks: how many blocks' inputs travel beside the computing, to the host and back.
    """

    shape: Shape
    device: Device
    batch: int
    tokens: int
    trained_tokens: int
    block_weight_bytes: int
    learning_operations: Callable[["Step"], list[Operation]] = field(compare=False)
    product_bytes: Callable[[Product], ProductBytes] = field(compare=False)
    with_adapter: Callable[["Step", Operation, str, int], Operation] = field(compare=False)
    norm_bytes: Callable[[int, int], NormBytes] = field(compare=False)
    block_waits: Callable[[BlockTensors], WaitingBytes] = field(compare=False)
    loss_moments: Callable[["Step"], dict[str, tuple[Line, ...]]] = field(compare=False)
    state_bytes: Callable[[int], int] = field(compare=False)
    embedding_state_bytes: Callable[[int], int] = field(compare=False)
    logit_bytes: int
    logit_saved_bytes: int
    optimizer_bytes: int
    gradient_bytes: int
    blocks_on_device: int | None = None
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
    casts_adapters: bool = True
    learning_blocks: int = 0
    learns_beside: bool = False
    trains_head: bool = True
    mlp_tile: int = 0
    kernel: str = "eager"
    repeats_keys: bool = True
    maskless: bool = False
    joins_documents: bool = False
    own_positions: bool = False
    checkpointed: bool = False
    kept_blocks: int = 0
    keeps_attention: bool = False
    offloaded: bool = False
    overlapped: bool = False
    waiting_gradient_bytes: int = 0
    window: int = 1
    steps_in_backward: bool = False
    optimizer_state_bits: int = 32
    paged_from: int = 0
    expandable_segments: bool = False
    stream_pieces: int = 1
    micro_batches: int = 1
    # These, and the four numbers above without a default value, are for the seconds alone.
    prompt_tokens: int = 0
    trained_share: float = 1.0
    stored_itemsize: float = FP32
    reaches_embedding: bool = True
    fused_adapters: bool = False
    fused_blocks: bool = False
    compiled: bool = False
    logit_positions: float | None = None
    link_trips: int = 0
    travelling_blocks: int = 0

    @cached_property  # several moments ask, and a search makes hundreds of bills
    def operations(self) -> tuple[Operation, ...]:
        """The operations of a block that learns, or of the trained copy beside a block."""
        return tuple(self.learning_operations(self))

    @property
    def accumulates(self) -> bool:
        """Whether a new gradient is added to one of an earlier micro-batch."""
        return self.waiting_gradient_bytes > 0

    @property
    def gradients_wait(self) -> bool:
        """Whether the gradients of this micro-batch stay until its backward pass ends, with none from before."""
        return not self.accumulates and not self.steps_in_backward

    @property
    def offloads_the_end(self) -> bool:
        """Whether the saved activations of the last block and of the loss wait in the host's memory, too."""
        return self.offloaded and not self.overlapped

    @property
    def staying_blocks(self) -> int:
        """How many of the last blocks save otherwise than the others: those behind the checkpointed or offloaded."""
        return self.kept_blocks or int(self.overlapped)

    @property
    def keeps_nothing(self) -> bool:
        """Whether blocks save no activations on the device: no block learns, or all are offloaded."""
        return not self.learning_blocks or (self.offloaded and not self.checkpointed)

    @property
    def norms_copy(self) -> bool:
        """Whether a norm saves a copy of a hidden state, and not the hidden state itself."""
        return self.norm_bytes(1, self.hidden_itemsize).copies

    @property
    def widest_itemsize(self) -> int:
        """Item size of the result when a hidden state and a product's result are combined: the wider one."""
        return max(self.hidden_itemsize, self.product_itemsize)

    @property
    def all_tokens(self) -> int:
        """n, the number of tokens of a micro-batch."""
        return self.batch * self.tokens

    @property
    def stream_tokens(self) -> int:
        """The tokens of a micro-batch that are in this process's residual stream; n, if it is not divided."""
        return -(-self.all_tokens // self.stream_pieces) if self.in_pieces else self.all_tokens

    @property
    def in_pieces(self) -> bool:
        """Whether the residual stream is divided among processes, so that attention's input is gathered."""
        return self.stream_pieces > 1

    @property
    def step_tokens(self) -> int:
        """The tokens of all micro-batches of an optimizer step, without vectors of a learnt prompt."""
        return self.micro_batches * self.batch * (self.tokens - self.prompt_tokens)

    @property
    def tiles(self) -> int:
        """How many tiles the MLP takes a micro-batch in; 1 if it takes it whole."""
        return -(-self.all_tokens // self.mlp_tile) if self.mlp_tile else 1

    @property
    def precision(self) -> str:
        """Which of a device's peak rates the products use: ``fp32``, ``fp16`` or ``bf16``."""
        if self.compute_itemsize == FP32:
            return "fp32"
        return "bf16" if self.bf16 else "fp16"

    @property
    def head_itemsize(self) -> int:
        """Item size of the head's weights as they are stored; a head that trains is in fp32."""
        return FP32 if self.trains_head else self.other_weight_itemsize

    @property
    def repeated_blocks(self) -> int:
        """How many of the first blocks checkpointing runs forward a second time."""
        return (self.shape.layers - self.kept_blocks) * self.checkpointed

    @property
    def casts_adapter_inputs(self) -> bool:
        """Whether adapters cast their inputs to fp32 and back."""
        return self.adapter_input_itemsize == FP32

    @property
    def head_reads(self) -> int:
        """How often a micro-batch reads the head's weights; each chunk of a chunked loss reads them twice."""
        if self.logit_positions is None:
            return 2
        chunks = math.ceil(int(self.logit_positions) / TOKENS_PER_CHUNK)  # it is a share of the tokens, so a float
        return 2 * max(chunks, 1)

    @property
    def fetches_once(self) -> bool:
        """Whether streamed blocks are fetched once for all micro-batches of a step."""
        return self.window > 1

    @property
    def fetched_blocks(self) -> int:
        """How many blocks' weights a micro-batch fetches from the host, or all micro-batches together."""
        if self.blocks_on_device is None:
            return 0
        elsewhere = self.shape.layers - self.blocks_on_device
        if self.learning_blocks:
            return 2 * elsewhere
        return self.shape.layers * (elsewhere > 0)  # no backward pass goes through the blocks

    @property
    def copied_blocks(self) -> int:
        """How many of the last blocks run beside a trained copy (side network)."""
        return self.learning_blocks * self.learns_beside

    @property
    def mlp(self) -> tuple[str, ...]:
        """The names of the matrices of the MLP, in their order."""
        _, _, into, out_of = self.shape.input_groups
        return (*into, *out_of)

    @property
    def trained(self) -> tuple[tuple[int, int], ...]:
        """All trained tensors, as pairs (number of tensors, elements of each)."""
        return (self.shape.tensors if self.trains_all else ()) + self.added

    @property
    def trained_weights(self) -> int:
        """The number of trained weights."""
        return sum(many * elements for many, elements in self.trained)


def fp32_states(elements: int) -> int:
    """Return the bytes of a tensor's two optimizer states in fp32."""
    return 2 * FP32 * elements
