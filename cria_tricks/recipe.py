"""Define a recipe: all settings of one training run, as plain, frozen data that is read from TOML and written to it.

``Tricks()`` with nothing set is plain fp32 full fine-tuning, the baseline of every comparison.
"""

import json
import re
import reprlib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import a_group, find_field, unknown_field
from cria_tricks.common.names import nearest, same
from cria_tricks.models.catalogue import short_name


def seconds(value: Any) -> Any:
    """Convert ``"1h30m"``, ``"20m"``, ``"90s"`` or ``"90"`` to seconds; leave a value that is no text to pydantic."""
    if not isinstance(value, str):
        return value
    # Every part may be missing, but not all of them: (?=.) asks for one character at least.
    parts = re.fullmatch(r"(?=.)(?:(\d{1,6})h)?(?:(\d{1,6})m)?(?:(\d{1,6})s)?", value.replace(" ", ""))
    if parts:
        return float(sum(int(number or 0) * unit for number, unit in zip(parts.groups(), (3600, 60, 1), strict=True)))
    try:
        return float(value)
    except ValueError:
        raise ValueError("must be a time such as 90s, 20m or 1h30m") from None


Duration = Annotated[float, BeforeValidator(seconds)]
"""Seconds; written as ``"90s"``, ``"20m"`` or ``"1h30m"``, or as a number."""


def _words(value: Any) -> Any:
    """Convert ``"none"`` to (), ``"tensorboard"`` to ("tensorboard",), and a list to a tuple."""
    words = value
    if isinstance(words, str):
        words = (words,)
    if isinstance(words, list):
        words = tuple(words)
    if words == ("none",):
        return ()
    return words


Trackers = Annotated[tuple[Literal["tensorboard", "trackio"], ...], BeforeValidator(_words)]
"""The trackers that get the history during the run: ``"none"``, one name, or a list of names."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class Data(_Frozen):
    """Where the rows come from: ``nguzo_saba``, ``kwanzaa``, a .jsonl or .txt file, a folder of texts, a hub data set.

    The other fields say how rows become tokens, and what happens to the training rows before that, in this order:
    filters, the check for rows that are in the evaluation set, deduplication, augmentation.
    """

    train: str = Field("nguzo_saba", min_length=1)
    eval: str = Field("nguzo_saba", min_length=1)
    max_length: int = Field(2048, ge=8, le=10_000_000, description="tokens per row")
    overflow: Literal["truncate", "drop", "error"] = Field("truncate", description="what happens to a longer row")
    overlap: int = Field(1, ge=1, description="tokens that a row of a text repeats from the one before, untrained")
    stream: bool = Field(False, description="read training rows as they are needed, never all of them")
    min_words: int = Field(0, ge=0, description="leave shorter rows out")
    max_words: int = Field(0, ge=0, description="leave longer rows out; 0: no limit")
    language: str = Field("", pattern=r"^([a-z]{2,3})?$", description="leave others out, e.g. en; empty: any")
    duplicates: Literal["keep", "exact", "near"] = Field("keep", description="which repeated rows are left out")
    leakage: Literal["ignore", "warn", "drop", "error"] = Field(
        "warn", description="what happens to a training row that is an evaluation row, or nearly"
    )
    shuffle_documents: float = Field(0, ge=0, le=1, description="share of rows that get a copy in another order")
    drop_uncited: float = Field(0, ge=0, le=1, description="share that get a copy without the documents not cited")
    drop_cited: float = Field(0, ge=0, le=1, description="share that get a copy without those cited, which refuses")


class Tricks(_Frozen):
    """The toggles. A module in ``cria_tricks/tricks/`` implements each of them."""

    gradient_accumulation: int = Field(1, ge=1, le=1_000_000, description="micro-batches per optimizer step")
    gradient_checkpointing: bool = False
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    quantization: Literal["none", "int8", "nf4", "fp4"] = "none"
    double_quantization: bool = False
    peft: Literal["none", "head", "lora", "prompt_tuning", "side_network"] = "none"
    optimizer: Literal["adamw", "adamw_8bit"] = "adamw"
    paged_optimizer: bool = False
    attention: Literal["eager", "sdpa", "flash_attention_2"] = "eager"
    expand_kv: bool = False
    packing: bool = False
    chunked_loss: bool = False
    lean_preparation: bool = False
    activation_offload: bool = False
    compile: bool = False


class Lora(_Frozen):
    """The size and kind of the adapter when ``tricks.peft = "lora"``."""

    r: int = Field(16, ge=1, le=65_536)
    alpha: float = Field(32, gt=0, le=1_000_000)
    dropout: float = Field(0.0, ge=0, lt=1)
    rslora: bool = Field(False, description="scale by alpha / sqrt(r) and not alpha / r")
    dora: bool = Field(False, description="learn the length of each output feature apart from its direction")
    target_modules: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        min_length=1,
    )


class Prompt(_Frozen):
    """The size of the prompt when ``tricks.peft = "prompt_tuning"``."""

    tokens: int = Field(16, ge=1, le=4096, description="learnt vectors in front of every row")


class Side(_Frozen):
    """The size of the side network when ``tricks.peft = "side_network"``."""

    blocks: int = Field(2, ge=1, le=1000, description="how many blocks, from the last one on, get a trained copy")


class Train(_Frozen):
    """The optimizer's settings, the run's length, and what happens during the run."""

    batch_size: int = Field(1, ge=1, le=65_536, description="rows per micro-batch")
    epochs: float = Field(1.0, gt=0, le=1_000_000)
    max_steps: int = Field(0, ge=0, le=1_000_000_000, description="optimizer steps; 0 means: epochs decide")
    learning_rate: float = Field(2e-4, gt=0, le=1)
    warmup_ratio: float = Field(0.03, ge=0, lt=1)
    schedule: Literal["cosine", "linear", "constant"] = Field(
        "cosine", description="how the learning rate goes on after the warmup: down to 0 at the last step, or constant"
    )
    weight_decay: float = Field(0.0, ge=0, le=100)
    max_grad_norm: float = Field(1.0, gt=0)
    eval_steps: int = Field(
        0, ge=0, le=1_000_000_000, description="optimizer steps between evaluations; 0: every epoch"
    )
    save_steps: int = Field(
        0, ge=0, le=1_000_000_000, description="optimizer steps between checkpoints; 0: every epoch"
    )
    save_minutes: float = Field(
        10, ge=0, le=1_000_000, description="minutes between checkpoints, beside save_steps; 0: none"
    )
    mirror: str = Field("", description="a second folder for checkpoints and results, on Drive for instance")
    time_budget: Duration = Field(0.0, ge=0, description="stop cleanly within this time; 0: no limit")
    seed: int = Field(42, ge=0, lt=2**32)
    monitor_seconds: float = Field(
        1.0, ge=0, le=86_400, description="seconds between two samples of the card and of this process; 0: none"
    )
    profile: bool = Field(False, description="trace a few early steps, and on CUDA keep a snapshot of memory")
    report_to: Trackers = Field((), description="also write the history for tensorboard or trackio")


class Parallel(_Frozen):
    """How several processes share the run. Their number is not a field: it is set where they are started."""

    strategy: Literal["none", "ddp", "fsdp", "tensor", "ddp_tensor", "model", "pipeline"] = "none"
    tensor_size: int = Field(2, ge=2, le=1024, description="processes that share a block's matrices, for ddp_tensor")
    pipelines: int = Field(1, ge=1, le=1024, description="pipelines that share the rows, for pipeline")
    pipeline_schedule: Literal["1f1b", "gpipe"] = Field("1f1b", description="the order of a stage's passes")
    stage_blocks: str = Field("", description="blocks of each stage of a pipeline, e.g. 18,12; empty: equally many")
    timeout: Duration = Field(600.0, gt=0, description="how long a process waits for another before it gives up")


class Recipe(_Frozen):
    """All settings of one training run."""

    name: str = Field("custom", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    model: Annotated[str, AfterValidator(short_name)] = Field("smollm2", min_length=1)
    data: Data = Data()
    tricks: Tricks = Tricks()
    lora: Lora = Lora()
    prompt: Prompt = Prompt()
    side: Side = Side()
    train: Train = Train()
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
        line = _line_of([str(part) for part in error.errors()[0]["loc"]], text)
        if line:
            where = f"{where}:{line}"
        raise BadInput(f"{where}: {_in_one_line(error)}") from None


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
            place[name] = _parts(text)
        else:
            place[name] = _choice(field, text.strip())
        values = build(values, where).model_dump(mode="json")
    return build(values, "recipe")


def _parts(text: str) -> list[str]:
    """Split a list as it is typed: ``"[q_proj, v_proj]"`` -> ["q_proj", "v_proj"]."""
    parts = [part.strip(" \"'") for part in text.strip("[] ").split(",")]
    return [part for part in parts if part]


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
    names: list[str] = []
    for name, field in Recipe.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            names += [f"{name}.{key}" for key in group.model_fields]
        else:
            names.append(name)
    return names


def _line_of(place: list[str], text: str) -> int:
    """Find the line of a TOML file that sets a field, or opens its table; 0 if there is none."""
    table: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        found = re.match(r"\s*(\[?)\s*([\w.\"'-]+)", line)
        if not found:
            continue
        names = [name.strip("\"'") for name in found[2].split(".")]
        if found[1]:  # the line opens a table: [train]
            table = names
            full = table
        else:
            full = [*table, *names]
        # One of the two names begins with the other. But a line that opens the table around a field does not set it.
        if full[: len(place)] == place[: len(full)] and (len(full) >= len(place) or not found[1]):
            return number
    return 0


def _in_one_line(error: ValidationError) -> str:
    """Say in one line, in our words instead of pydantic's, which field is wrong first, and what would be right."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown_field(key, field_names(), is_table=isinstance(first["input"], dict))
    message = first["msg"].replace("Input should be", "must be").replace("Value error, ", "").replace("'", "")
    near = ""
    if first["type"] == "literal_error" and isinstance(first["input"], str):
        allowed = first["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        close = nearest(first["input"], allowed)
        if close:
            near = f"; did you mean {close}?"
    if first["type"] in ("too_short", "string_too_short"):
        message = "must not be empty"
    if first["type"] == "model_type":
        return f"{key} = {reprlib.repr(first['input'])}: {a_group(key, field_names())}"
    return f"{key} = {reprlib.repr(first['input'])}: {message[0].lower()}{message[1:]}{near}"
