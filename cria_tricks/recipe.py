"""Define a recipe: all settings of one training run, as plain, frozen data that is read from TOML and written to it.

``Tricks()`` with nothing set is plain fp32 full fine-tuning, the baseline of every comparison.
"""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from cria_tricks.common.errors import BadInput
from cria_tricks.common.field_errors import in_one_line, line_of
from cria_tricks.common.fields import find_field, names_of, unknown_field
from cria_tricks.common.names import same
from cria_tricks.common.values import AllOrNumber, AutoOrTokens, Duration, Trackers, parts
from cria_tricks.models.catalogue import short_name


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Data(_Frozen):
    """Where the rows come from: a name, a .jsonl or .txt file, a folder of texts, or a hub data set.

    Names: ``nguzo_saba`` and ``history_notes`` are in the package, ``kwanzaa`` and ``kwanzaa_curated`` are downloaded.

    The other fields say how rows become tokens, and what happens to the training rows before that, in this order:
    filters, the check for rows that are in the evaluation set, deduplication, augmentation.
    """

    train: str = Field("nguzo_saba", min_length=1, description="the training rows", examples=["my.jsonl"])
    eval: str = Field("nguzo_saba", min_length=1, description="the evaluation rows", examples=["held_out.jsonl"])
    contract: bool = Field(False, description="every system prompt becomes one that shows the answer contract")
    max_length: int = Field(2048, ge=8, le=10_000_000, description="most tokens of a row", examples=[1024])
    overflow: Literal["truncate", "drop", "error"] = Field("truncate", description="what happens to a longer row")
    overlap: int = Field(1, ge=1, description="tokens of a text repeated in its next row, untrained", examples=[32])
    stream: bool = Field(False, description="read training rows as they are needed, never all of them")
    min_words: int = Field(0, ge=0, description="leave shorter rows out [words]", examples=[5])
    max_words: int = Field(0, ge=0, description="leave longer rows out [words]; 0: no limit", examples=[2000])
    language: str = Field("", pattern=r"^([a-z]{2,3})?$", description="leave others out; empty: any", examples=["en"])
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


class Tricks(_Frozen):
    """The toggles. A module in ``cria_tricks/tricks/`` implements each of them."""

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


class Lora(_Frozen):
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


class Prompt(_Frozen):
    """The size of the prompt when ``tricks.peft = "prompt_tuning"``."""

    tokens: int = Field(16, ge=1, le=4096, description="learnt vectors in front of every row", examples=[32])


class Side(_Frozen):
    """The size of the side network when ``tricks.peft = "side_network"``."""

    blocks: int = Field(2, ge=1, le=1000, description="last blocks that get a trained copy", examples=[4])


class Train(_Frozen):
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
    on_oom: Literal["adapt", "stop"] = Field(
        "stop", description="when memory runs out: stop, or go on with a smaller set of toggles and the same results"
    )
    profile: bool = Field(False, description="trace a few early steps, and on CUDA keep a snapshot of memory")
    report_to: Trackers = Field((), description="also write the history for these trackers", examples=["tensorboard"])


class Eval(_Frozen):
    """What an evaluation during training does besides measuring the loss."""

    samples: int = Field(
        0, ge=0, le=1000, description="first evaluation rows with a prompt that get an answer", examples=[3]
    )
    max_new_tokens: int = Field(256, ge=1, le=100_000, description="most tokens of such an answer", examples=[64])


class Parallel(_Frozen):
    """How several processes share the run. Their number is not a field: it is set where they are started."""

    strategy: Literal["none", "ddp", "fsdp", "tensor", "ddp_tensor", "model", "pipeline"] = Field(
        "none", description="how processes share the run; none: one process"
    )
    tensor_size: int = Field(
        2, ge=2, le=1024, description="processes that share a block's matrices, for ddp_tensor", examples=[4]
    )
    pipelines: int = Field(1, ge=1, le=1024, description="pipelines that share the rows, for pipeline", examples=[2])
    pipeline_schedule: Literal["1f1b", "gpipe"] = Field("1f1b", description="the order of a stage's passes")
    stage_blocks: str = Field(
        "", description="blocks of each stage of a pipeline; empty: equally many", examples=["18,12"]
    )
    timeout: Duration = Field(
        600.0, gt=0, description="how long a process waits for another [s, or 90s, 20m, 1h30m]", examples=["20m"]
    )


class Recipe(_Frozen):
    """All settings of one training run."""

    name: str = Field(
        "custom", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the run and its folder", examples=["mine"]
    )
    model: Annotated[str, AfterValidator(short_name)] = Field(
        "smollm2", min_length=1, description="a short name, a hub id, or a folder", examples=["qwen2.5-0.5b"]
    )
    data: Data = Data()
    tricks: Tricks = Tricks()
    lora: Lora = Lora()
    prompt: Prompt = Prompt()
    side: Side = Side()
    train: Train = Train()
    eval: Eval = Eval()
    parallel: Parallel = Parallel()

    @property
    def rows_per_step(self) -> int:
        """The rows of an optimizer step: those of all its micro-batches."""
        return self.train.batch_size * self.tricks.gradient_accumulation

    def to_toml(self) -> str:
        """Return the recipe as TOML text; :func:`from_toml` reads it back to an equal recipe."""
        return tomli_w.dumps(self.model_dump(mode="json"))


def build(values: dict[str, Any], where: str, *, strict: bool = False, text: str = "") -> Recipe:
    """Build a recipe from nested values, and validate it.

    Args:
        values: fields as in a TOML file, e.g. ``{"train": {"max_steps": 4}}``.
        where: where the values come from, for an error message, e.g. ``"recipe.toml"``.
        strict: refuse a text where a number is needed. TOML has types, so this is for files; ``--set`` has texts only.
        text: the text of the file, so that an error can name the line.

    Raises:
        BadInput: naming the first field that is wrong and what would be right.
    """
    try:
        if strict:  # as JSON, because in strict mode pydantic takes a JSON list for a tuple, but not a Python list
            return Recipe.model_validate_json(json.dumps(values, default=str), strict=True)
        return Recipe.model_validate(values)
    except ValidationError as error:
        line = line_of([str(part) for part in error.errors()[0]["loc"]], text)
        if line:
            where = f"{where}:{line}"
        raise BadInput(f"{where}: {in_one_line(error, field_names())}") from None


def from_toml(path: str | Path) -> Recipe:
    """Read a recipe file.

    Raises:
        BadInput: if the file cannot be read, is no TOML, or holds a wrong field.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        values = tomllib.loads(text)
    except OSError as error:
        raise BadInput(f"recipe {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise BadInput(f"recipe {path}: cannot be read: not UTF-8 text") from None
    except tomllib.TOMLDecodeError as error:
        raise BadInput(f"recipe {path}: not valid TOML: {error}") from None
    except RecursionError:
        raise BadInput(f"recipe {path}: not valid TOML: nested too deep") from None
    return build(values, f"recipe {path}", strict=True, text=text)


def with_settings(recipe: Recipe, settings: Iterable[str]) -> Recipe:
    """Apply ``KEY=VALUE`` settings, the command line's ``--set``.

    A key may also be one of :data:`cria_tricks.common.fields.ALIASES` (``lr``, ``rank``, ``seq``), or leave its group
    out (``max_steps``); letter case does not matter. The recipe and every error show the field's own name.

    Args:
        recipe: the recipe to start from; it is not changed.
        settings: e.g. ``["tricks.quantization=int8", "train.max_steps=20"]``; a list value is written as
            ``lora.target_modules=q_proj,v_proj``.

    Raises:
        BadInput: for a setting without ``=``, an unknown key, or a wrong value.

    Examples:
        >>> with_settings(Recipe(), ["lr=1e-3", "rank=8"]).lora.r
        8
    """
    values = recipe.model_dump(mode="json")
    known = field_names()
    for setting in settings:
        key, equals, text = setting.partition("=")
        key = key.strip()
        where = f"--set {setting}"
        if equals and not key:
            raise BadInput(f"{where}: the field before = is missing; write it as KEY=VALUE, e.g. train.max_steps=20")
        if not equals:
            raise BadInput(f"{where}: write it as KEY=VALUE, e.g. --set train.max_steps=20")
        field = find_field(key, known)
        if field is None:
            raise BadInput(f"{where}: {unknown_field(key, known)}")
        *groups, name = field.split(".")
        place = values
        for group in groups:
            place = place[group]
        if isinstance(place[name], list):
            place[name] = parts(text)
        else:
            place[name] = _choice(field, text.strip())
        values = build(values, where).model_dump(mode="json")
    return build(values, "recipe")


def _choice(field: str, text: str) -> str:
    """Correct letter case and hyphens of a value, for a field that takes one of a few words: ``"NF4"`` -> "nf4"."""
    group, _, name = field.rpartition(".")
    model = Recipe.model_fields[group].annotation if group else Recipe
    annotation = model.model_fields[name].annotation  # type: ignore[union-attr]
    if get_origin(annotation) is not Literal:
        return text
    return same(text, get_args(annotation)) or text


def field_names() -> list[str]:
    """List every field that ``--set`` takes, with its group: ``model``, ``data.train``, ..."""
    return names_of(Recipe)
