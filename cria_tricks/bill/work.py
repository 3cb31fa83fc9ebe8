"""Describe the work of a training step before its operations and memory traffic are counted.

The description begins as plain fp32 full fine-tuning. Then each trick in turn changes the fields that it acts on
(``tricks/folds.py``).
"""

from collections.abc import Callable
from dataclasses import dataclass

from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import Shape


@dataclass(frozen=True)
class Work:
    """What an optimizer step computes and moves. The default values are those of plain fp32 full fine-tuning.

    "Item size" means bytes of one number, "bytes moved" means read from the GPU's memory and written to it.

    Attributes:
        shape: the model's shape.
        device: the GPU; it decides which kernel attention gets.
        batch: rows of a micro-batch.
        tokens: tokens of a row.
        trained_tokens: trained tokens (those with a label) of a micro-batch.
        trained_weights: how many weights have a gradient and optimizer states.
        between: function of this object: bytes moved between the matrix products of one block, for one position, as
            (forward, backward).
        saved: function of this object: bytes that autograd saves in one block, for one position; the mean over all
            blocks.
        micro_batches: how many make an optimizer step.
        prompt_tokens: learned vectors in front of each row (prompt tuning).
        precision: which of a GPU's peak rates the products use: ``fp32``, ``fp16`` or ``bf16``.
        compute_itemsize: item size of the numbers that products multiply.
        hidden_itemsize: item size of the residual stream.
        stored_itemsize: item size of a block's weights as they are stored, with their share of quantization scales.
        head_itemsize: item size of the head's weights as they are stored.
        backward_unpacks: how often the backward pass unpacks a block's weights (0 or 1).
        trains_blocks: whether the blocks' own weights are trained.
        trains_head: whether the head's weights are trained.
        gradient_reaches_embedding: whether the embedding's output needs a gradient.
        adapted: names of a block's matrices that have a LoRA adapter.
        rank: the rank of these adapters.
        dora: whether the adapters learn magnitudes (DoRA), which need the norms of W + B A.
        head_rank: rank of the head's adapter; 0 for none.
        fused_adapters: whether adapters add in place, with a backward pass of their own (fused LoRA).
        written_in_place: whether norms, rotary positions and activations make few tensors on the way (fused blocks).
        adapter_casts: whether adapters cast their inputs to fp32 and back.
        copied_blocks: how many of the last blocks run beside a trained copy (side network).
        mlp_tile: tokens of a tile, if the MLP takes fewer tokens at a time than a micro-batch has; else 0.
        repeated_blocks: how many of the first blocks checkpointing runs forward a second time.
        keeps_attention: whether their attention runs once all the same.
        kernel: attention's kernel: ``eager``, ``math``, ``memory-efficient`` or ``flash``.
        masked: whether attention gets a mask.
        logit_positions: positions of a micro-batch for which logits are computed; ``None`` for all.
        logit_bytes: bytes moved for one logit, forward and backward together.
        logit_saved_bytes: bytes that autograd saves for one logit.
        head_reads: how often a micro-batch reads the head's weights.
        optimizer_bytes: bytes that the optimizer's kernel moves for one trained weight.
        gradient_bytes: bytes moved for one trained weight by everything done to its gradient before that, such as
            accumulation, unscaling and clipping.
        autocast: whether autocast makes the casts of 16-bit products; a model that answers is in one dtype.
        compiled: whether ``torch.compile`` fuses the small operations of a block into a few kernels.
        fetched_blocks: how many blocks' weights a micro-batch fetches from the host.
        fetches_once: whether all micro-batches of a step share these.
        link_trips: how often saved activations cross PCIe: 2 with activation offload, to the host and back, else 0.
        travelling_blocks: how many blocks have an input that does so beside the computing.
    """

    shape: Shape
    device: Device
    batch: int
    tokens: int
    trained_tokens: float
    trained_weights: int
    between: Callable[["Work"], tuple[int, int]]
    saved: Callable[["Work"], float]
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
    fused_adapters: bool = False
    written_in_place: bool = False
    mlp_tile: int = 0
    copied_blocks: int = 0
    repeated_blocks: int = 0
    keeps_attention: bool = False
    kernel: str = "eager"
    masked: bool = False
    logit_positions: float | None = None
    head_reads: int = 2
    autocast: bool = True
    compiled: bool = False
    link_trips: int = 0
    fetched_blocks: int = 0
    fetches_once: bool = False
    travelling_blocks: int = 0

    @property
    def row_positions(self) -> int:
        """Positions of a row: its tokens, and the learned vectors in front of them."""
        return self.tokens + self.prompt_tokens

    @property
    def positions(self) -> int:
        """All positions of a micro-batch, n in formulas."""
        return self.batch * self.row_positions

    @property
    def tiles(self) -> int:
        """How many tiles the MLP takes a micro-batch in; 1 if it takes it whole."""
        return -(-self.positions // self.mlp_tile) if self.mlp_tile else 1

    @property
    def mlp(self) -> tuple[str, ...]:
        """The names of the matrices of the MLP."""
        _, _, into, out_of = self.shape.input_groups
        return (*into, *out_of)
