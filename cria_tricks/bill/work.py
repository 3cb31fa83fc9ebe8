"""What is known about the work of a step before it is counted: the tricks change it one after the other."""

from collections.abc import Callable
from dataclasses import dataclass

from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Shape


@dataclass(frozen=True)
class Work:
    """What an optimizer step computes and moves. With nothing changed it is plain fp32 full fine-tuning.

    An item size is in bytes for one number.

    Attributes:
        shape: of the model.
        device: the card; it decides which kernel attention gets.
        batch: rows of a micro-batch.
        tokens: tokens of a row.
        trained_tokens: trained tokens of a micro-batch.
        trained_weights: how many weights have a gradient and optimizer states.
        between: rule for the bytes moved between a block's products, for one position: forward, backward.
        saved: rule for the bytes that autograd saves in one block, for one position.
        micro_batches: how many make an optimizer step.
        prompt_tokens: learnt vectors in front of each row.
        precision: which of a card's rates the products reach: ``fp32``, ``fp16`` or ``bf16``.
        compute_itemsize: of what products multiply.
        hidden_itemsize: of the residual stream.
        stored_itemsize: of a block's weights in memory, with their scales.
        head_itemsize: of the head's weights in memory.
        backward_unpacks: how often the backward pass unpacks a block's weights again.
        trains_blocks: whether the blocks' own weights have a gradient.
        trains_head: whether the head's have.
        gradient_reaches_embedding: whether the embedded tokens have a gradient.
        adapted: the matrices of a block that have an adapter.
        rank: of these adapters.
        dora: whether the adapters learn magnitudes, which need the norms of W + B A.
        head_rank: rank of the head's adapter; 0 for none.
        adapter_casts: whether adapters cast their inputs to fp32 and back.
        copied_blocks: blocks that run beside a trained copy, from the last one on.
        forward_repeats: how often a block runs forward again for its backward pass.
        kernel: of attention: ``eager``, ``math``, ``memory-efficient`` or ``flash``.
        masked: whether a mask comes with attention's inputs.
        logit_positions: positions of a micro-batch whose logits are made; ``None`` for all.
        logit_bytes: moved for one logit.
        logit_saved_bytes: saved by autograd for one logit.
        head_reads: how often a micro-batch reads the head's weights.
        optimizer_bytes: moved for a trained weight by the optimizer's kernel.
        gradient_bytes: moved for a trained weight by all that is done to its gradient before.
        link_trips: how often what autograd saves crosses the link between card and host.
    """

    shape: Shape
    device: Device
    batch: int
    tokens: int
    trained_tokens: float
    trained_weights: int
    between: Callable[["Work"], tuple[int, int]]
    saved: Callable[["Work"], int]
    optimizer_bytes: int
    gradient_bytes: int
    logit_bytes: int
    logit_saved_bytes: int
    micro_batches: int = 1
    prompt_tokens: int = 0
    precision: str = "fp32"
    compute_itemsize: int = 4
    hidden_itemsize: int = 4
    stored_itemsize: float = 4
    head_itemsize: int = 4
    backward_unpacks: int = 0
    trains_blocks: bool = True
    trains_head: bool = True
    gradient_reaches_embedding: bool = True
    adapted: tuple[str, ...] = ()
    rank: int = 0
    dora: bool = False
    head_rank: int = 0
    adapter_casts: bool = True
    copied_blocks: int = 0
    forward_repeats: int = 0
    kernel: str = "eager"
    masked: bool = False
    logit_positions: float | None = None
    head_reads: int = 2
    link_trips: int = 0

    @property
    def row_positions(self) -> int:
        """Positions of a row: its tokens, and the learnt vectors in front of them."""
        return self.tokens + self.prompt_tokens

    @property
    def positions(self) -> int:
        """n, all positions of a micro-batch."""
        return self.batch * self.row_positions
