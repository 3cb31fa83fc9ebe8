"""Define a recipe: all settings of one training run, as plain, frozen data that is read from TOML and written to it."""

import json
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import tomli_w
from pydantic import AfterValidator, Field, ValidationError

from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import find_field, in_one_line, line_of, names_of, parts, same, unknown_field
from cria_tricks.models import adapter_config
from cria_tricks.models.catalogue import short_name
from cria_tricks.settings import NAMED_SETS, Data, Eval, Frozen, Lora, Parallel, Prompt, Side, Train, Tricks


class Recipe(Frozen):
    """All settings of one training run."""

    name: str = Field(
        "custom", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="names the run and its folder", examples=["mine"]
    )
    model: Annotated[str, AfterValidator(short_name)] = Field(
        "smollm2",
        min_length=1,
        description="a short name, a hub id, or a folder, also of an adapter",
        examples=["qwen2.5-0.5b"],
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
            return _over_the_base(Recipe.model_validate_json(json.dumps(values, default=str), strict=True))
        return _over_the_base(Recipe.model_validate(values))
    except ValidationError as error:
        line = line_of([str(part) for part in error.errors()[0]["loc"]], text)
        if line:
            where = f"{where}:{line}"
        raise BadInput(f"{where}: {in_one_line(error, field_names())}") from None


def _over_the_base(recipe: Recipe) -> Recipe:
    """Put the base of an adapter in the place of its folder, if that was given as the model, and continue from it.

    The adapter's settings are taken over where the recipe says nothing. One that it contradicts is refused later.
    """
    folder = adapter_config.folder_of(recipe.model)
    if folder is None:
        return recipe
    values = recipe.model_dump(mode="json", exclude_unset=True)
    values["model"] = adapter_config.read(folder)["base_model_name_or_path"]
    for group, found in adapter_config.settings(folder).items():
        values[group] = found | values.get(group, {})
    values["lora"]["continue_from"] = str(folder)
    return Recipe.model_validate(values)


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


def several(settings: Iterable[str]) -> list[str]:
    """Return the settings as a list; a single text is one setting, not a list of letters."""
    if isinstance(settings, str):
        return [settings]
    return list(settings)


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
    defaults = Recipe().model_dump(mode="json")
    values = recipe.model_dump(mode="json", exclude_unset=True)
    known = field_names()
    set_fields = set()
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
        set_fields.add(field)
        *groups, name = field.split(".")
        place, default = values, defaults
        for group in groups:
            place, default = place.setdefault(group, {}), default[group]
        if isinstance(default[name], list):
            place[name] = parts(text)
        else:
            place[name] = _choice(field, text.strip())
        values = build(values, where).model_dump(mode="json", exclude_unset=True)
    if "data.train" in set_fields and "data.eval" not in set_fields and recipe.data.eval in NAMED_SETS:
        values["data"]["eval"] = ""  # a set that a recipe names belongs to the rows that it names
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
