"""Define the groups of a recipe's settings, as plain, frozen data: each field with its limits, its words, its examples.

``Tricks()`` with nothing set is plain fp32 full fine-tuning, the baseline of every comparison.
"""

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from cria_tricks.common.fields import AllOrNumber, AutoOrTokens, Duration, Trackers

BATCH = 8
"""The rows that ``cria eval`` answers together, when nothing else is asked for."""
NEW_TOKENS = 2048
"""The tokens of the longest answer that it allows then."""


class Frozen(BaseModel):
    """Data that never changes, refuses unknown fields, and has no infinite numbers."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


NAMED_SETS = ("nguzo_saba", "history_notes", "kwanzaa", "kwanzaa_curated")
"""The data sets that have a name, and evaluation rows of their own."""


class Data(Frozen):
    """Where the rows come from: a name, a file (JSON, CSV, TSV, Parquet, text), a folder of texts, or a hub data set.

    Names: ``nguzo_saba`` and ``history_notes`` are in the package, ``kwanzaa`` and ``kwanzaa_curated`` are downloaded.

    The other fields say how rows become tokens, and what happens to the training rows before that, in this order:
    filters, the check for rows that are in the evaluation set, deduplication, augmentation.
    """

    train: str = Field("nguzo_saba", min_length=1, description="the training rows", examples=["my.jsonl"])
    eval: str = Field(
        "",
        description="the evaluation rows; empty, as after data.train=FILE: a twentieth of the training rows",
        examples=["held_out.jsonl"],
    )
    contract: bool = Field(False, description="every system prompt becomes one that shows the answer contract")
    max_length: int = Field(2048, ge=8, le=10_000_000, description="most tokens of a row", examples=[1024])
    overflow: Literal["truncate", "drop", "error"] = Field("truncate", description="what happens to a longer row")
    eos: str = Field(
        "",
        max_length=100,
        description="token that ends an answer; empty: the template's, or the tokenizer's EOS",
        examples=["<|im_end|>"],
    )
    overlap: int = Field(1, ge=1, description="tokens of a text repeated in its next row, untrained", examples=[32])
    stream: bool = Field(False, description="read training rows as they are needed, never all of them")
    min_words: int = Field(0, ge=0, description="leave shorter rows out [words]", examples=[5])
    max_words: int = Field(0, ge=0, description="leave longer rows out [words]; 0: no limit", examples=[2000])
    language: str = Field("", pattern=r"^([a-z]{2,3})?$", description="leave others out; empty: any", examples=["en"])
    quality: Literal["any", "gopher"] = Field("any", description="gopher: leave repetitive rows out")
    duplicates: Literal["keep", "exact", "near"] = Field("keep", description="which repeated rows are left out")
    leakage: Literal["ignore", "warn", "drop", "error"] = Field(
        "warn", description="what happens to a training row that is an evaluation row, or nearly"
    )
    shuffle_documents: float = Field(
        0, ge=0, le=1, description="share of rows that get a copy with their documents in another order", examples=[0.5]
    )
    drop_uncited: float = Field(
        0, ge=0, le=1, description="share of rows that get a copy without the documents not cited", examples=[0.5]
    )
    drop_cited: float = Field(
        0, ge=0, le=1, description="share of rows that get a copy without cited documents: a refusal", examples=[0.2]
    )


class Tricks(Frozen):
    """The switches. A module in ``cria_tricks/techniques/`` implements each of them."""

    gradient_accumulation: int = Field(1, ge=1, le=1_000_000, description="micro-batches of a step", examples=[8])
    gradient_checkpointing: AllOrNumber = Field(
        False,
        description="recompute activations instead of saving them: in all blocks, or in the first k",
        examples=[8],
    )
    precision: Literal["fp32", "fp16", "bf16"] = Field(
        "fp32", description="compute dtype (autocast); trained weights stay in fp32"
    )
    quantization: Literal["none", "int8", "nf4", "fp4"] = Field("none", description="how frozen weights are stored")
    double_quantization: bool = Field(False, description="the scales of 4-bit weights are quantized, too")
    peft: Literal["none", "head", "lora", "prompt_tuning", "side_network"] = Field(
        "none", description="which weights train; none: all"
    )
    optimizer: Literal["adamw", "adamw_8bit"] = Field("adamw", description="32-bit or 8-bit optimizer states")
    paged_optimizer: bool = Field(False, description="optimizer states may move to host memory")
    optimizer_in_backward: bool | Literal["clip"] = Field(
        False, description="a weight steps when its gradient arrives; clip: with a limit of its own", examples=["clip"]
    )
    attention: Literal["eager", "sdpa", "flash_attention_2"] = Field("eager", description="which attention runs")
    expand_kv: bool = Field(False, description="repeat shared K/V heads, for a T4's memory-efficient kernel")
    keep_attention: bool = Field(False, description="checkpointed blocks keep attention's output, so it runs once")
    packing: bool = Field(False, description="several documents in one packed row, kept apart")
    chunked_loss: bool = Field(False, description="compute the logits of 256 trained tokens at a time")
    lean_preparation: bool = Field(False, description="leave out the fp32 copies that the usual preparation makes")
    fused_lora: bool = Field(False, description="a hand-written backward pass for adapters and the MLP around them")
    fused_blocks: bool | Literal["triton"] = Field(
        False,
        description="norms, gated activation and rotary positions that save the least; triton: each as one kernel",
        examples=["true"],
    )
    tiled_mlp: AutoOrTokens = Field(
        False, description="the MLP takes so many tokens at a time; true or auto: as many as D", examples=[4096]
    )
    stream_layers: bool | Literal["file"] = Field(
        False, description="frozen blocks wait on the host, in memory or in a file", examples=["file"]
    )
    layer_by_layer: bool = Field(False, description="a window's micro-batches go through each streamed block together")
    activation_offload: bool | Literal["overlapped"] = Field(False, description="saved activations wait in host memory")
    compile: bool = Field(False, description="fuse a block's small operations into a few kernels (torch.compile)")

    def __eq__(self, other: object) -> bool:
        """Compare all fields. In Python ``True == 1``, but all blocks checkpointed is not one block checkpointed."""
        both = ("gradient_checkpointing", "tiled_mlp")
        same_types = all(type(getattr(self, field)) is type(getattr(other, field, None)) for field in both)
        return same_types and super().__eq__(other)


class Lora(Frozen):
    """The size and kind of the adapter when ``tricks.peft = "lora"``."""

    r: int = Field(16, ge=1, le=65_536, description="rank: columns of A, rows of B", examples=[8])
    alpha: float = Field(32, gt=0, le=1_000_000, description="the update is scaled by alpha / r", examples=[16])
    dropout: float = Field(0.0, ge=0, lt=1, description="share of the adapter's inputs set to 0", examples=[0.05])
    rslora: bool = Field(False, description="scale by alpha / sqrt(r) and not alpha / r")
    dora: bool = Field(False, description="learn the length of each output feature apart from its direction")
    init: Literal["default", "loftq"] = Field(
        "default", description="where B A starts: at zero, or (loftq) at the largest part of the base's rounding error"
    )
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
        description="the linear layers that get an adapter",
        examples=["q_proj,v_proj"],
    )
    continue_from: str = Field(
        "",
        description="folder of an adapter whose numbers training begins with; model=FOLDER sets this, and its LoRA",
        examples=["runs/mine/adapter"],
    )


class Prompt(Frozen):
    """The size of the prompt when ``tricks.peft = "prompt_tuning"``."""

    tokens: int = Field(16, ge=1, le=4096, description="learnt vectors in front of every row", examples=[32])


class Side(Frozen):
    """The size of the side network when ``tricks.peft = "side_network"``."""

    blocks: int = Field(2, ge=1, le=1000, description="last blocks that get a trained copy", examples=[4])


class Train(Frozen):
    """The optimizer's settings, the run's length, and what happens during the run."""

    batch_size: int = Field(1, ge=1, le=65_536, description="rows per micro-batch", examples=[2])
    epochs: float = Field(1.0, gt=0, le=1_000_000, description="passes over the training rows", examples=[3])
    max_steps: int = Field(
        0, ge=0, le=1_000_000_000, description="optimizer steps; 0 means: epochs decide", examples=[20]
    )
    learning_rate: float = Field(
        2e-4, gt=0, le=1, description="the largest learning rate, after the warmup", examples=["1e-4"]
    )
    warmup_ratio: float = Field(
        0.03, ge=0, lt=1, description="share of the steps in which the learning rate rises", examples=[0.1]
    )
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="how the learning rate goes on after the warmup: down to 0 at the last step, or constant"
    )
    weight_decay: float = Field(0.0, ge=0, le=100, description="AdamW's weight decay", examples=[0.01])
    max_grad_norm: float = Field(1.0, ge=0, description="longest norm of the gradients; 0: no limit", examples=[0.3])
    eval_steps: int = Field(
        0, ge=0, le=1_000_000_000, description="optimizer steps between evaluations; 0: every epoch", examples=[10]
    )
    keep_best: bool = Field(False, description="also keep the weights of the evaluation with the lowest loss")
    patience: int = Field(
        0, ge=0, le=1_000_000, description="stop after so many evaluations without a lower loss; 0: never", examples=[3]
    )
    save_steps: int = Field(
        0, ge=0, le=1_000_000_000, description="optimizer steps between checkpoints; 0: every epoch", examples=[10]
    )
    save_minutes: float = Field(
        10, ge=0, le=1_000_000, description="minutes between checkpoints, beside save_steps; 0: none", examples=[5]
    )
    mirror: str = Field(
        "", description="a second folder for checkpoints and results", examples=["/content/drive/MyDrive/run"]
    )
    time_budget: Duration = Field(
        0.0, ge=0, description="stop cleanly within this time [s, or 90s, 20m, 1h30m]; 0: no limit", examples=["80m"]
    )
    seed: int = Field(42, ge=0, lt=2**32, description="seed of new weights, order of rows and dropout", examples=[7])
    monitor_seconds: float = Field(
        1.0, ge=0, le=86_400, description="seconds between two samples of card and process; 0: none", examples=[10]
    )
    expandable_segments: bool = Field(
        True, description="on CUDA, let PyTorch's allocator grow its segments, so that less memory is wasted"
    )
    profile: bool = Field(False, description="trace a few early steps, and on CUDA keep a snapshot of memory")
    report_to: Trackers = Field((), description="also write the history for these trackers", examples=["tensorboard"])

    def steps_per_epoch(self, accumulation: int, rows: int) -> int:
        """Return the optimizer steps of one epoch; the last step may have fewer micro-batches than the others.

        Args:
            accumulation: the micro-batches of a step, in all processes together.
            rows: the number of training rows.
        """
        return math.ceil(math.ceil(rows / self.batch_size) / accumulation)


class Eval(Frozen):
    """What an evaluation during training does besides measuring the loss."""

    samples: int = Field(
        0, ge=0, le=1000, description="first evaluation rows with a prompt that get an answer", examples=[3]
    )
    max_new_tokens: int = Field(256, ge=1, le=100_000, description="most tokens of such an answer", examples=[64])


class Parallel(Frozen):
    """How several processes share the run. Their number is not a field: it is set where they are started."""

    strategy: Literal["none", "ddp", "fsdp", "tensor", "ddp_tensor", "context", "model", "pipeline"] = Field(
        "none", description="how processes share the run; none: one process"
    )
    reduce: Literal["micro_batch", "step"] = Field(
        "micro_batch", description="when fsdp sums gradients; step sends less, micro_batch needs less memory"
    )
    tensor_size: int = Field(
        2, ge=2, le=1024, description="processes that share a block's matrices, for ddp_tensor", examples=[4]
    )
    sequence: bool = Field(
        False, description="tensor and ddp_tensor also divide the tokens of the residual stream and of the norms"
    )
    pipelines: int = Field(1, ge=1, le=1024, description="pipelines that share the rows, for pipeline", examples=[2])
    pipeline_schedule: Literal["1f1b", "gpipe"] = Field("1f1b", description="the order of a stage's passes")
    stage_blocks: str = Field(
        "", description="blocks of each stage of a pipeline; empty: equally many", examples=["18,12"]
    )
    timeout: Duration = Field(
        600.0, gt=0, description="how long a process waits for another [s, or 90s, 20m, 1h30m]", examples=["20m"]
    )
