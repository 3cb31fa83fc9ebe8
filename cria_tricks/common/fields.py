"""Find the field of a recipe that a user means, convert what was typed for it, and say in one line what is wrong.

The field ``train.learning_rate`` belongs to the group ``train``. A user may also type ``learning_rate`` or ``lr``. In
all names letter case, spaces, ``-`` and ``_`` do not matter, and a wrong one gets a hint.
"""

import difflib
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ValidationError, ValidationInfo

ALIASES: dict[str, str] = {
    "lr": "train.learning_rate",
    "batch": "train.batch_size",
    "bs": "train.batch_size",
    "micro_batch_size": "train.batch_size",
    "per_device_train_batch_size": "train.batch_size",
    "epoch": "train.epochs",
    "num_epochs": "train.epochs",
    "num_train_epochs": "train.epochs",
    "steps": "train.max_steps",
    "num_steps": "train.max_steps",
    "lr_scheduler_type": "train.schedule",
    "lr_schedule": "train.schedule",
    "scheduler": "train.schedule",
    "grad_clip": "train.max_grad_norm",
    "grad_accum": "tricks.gradient_accumulation",
    "gradient_accumulation_steps": "tricks.gradient_accumulation",
    "grad_checkpointing": "tricks.gradient_checkpointing",
    "quant": "tricks.quantization",
    "optim": "tricks.optimizer",
    "attn": "tricks.attention",
    "attn_implementation": "tricks.attention",
    "rank": "lora.r",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "seq": "data.max_length",
    "seq_len": "data.max_length",
    "seq_length": "data.max_length",
    "max_seq_len": "data.max_length",
    "max_seq_length": "data.max_length",
}
"""Other names of fields, as TRL, peft and transformers call them or as people shorten them.

``--set`` takes them, alone or after the field's own group (``lr`` and ``train.lr``). A recipe file takes only the
field's own name, so that all files use the same names.
"""

GONE: dict[str, str] = {
    "train.on_oom": "a run that is out of memory stops and says which switches save how many bytes; --fit finds a set",
}
"""Fields that a recipe had before, and what to use instead."""


def flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten one level of nested groups: each field gets a dotted name.

    Examples:
        >>> flat({"name": "smoke", "train": {"epochs": 3}})
        {'name': 'smoke', 'train.epochs': 3}
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= {f"{name}.{field}": inner for field, inner in value.items()}
        else:
            found[name] = value
    return found


def names_of(model: type[BaseModel]) -> list[str]:
    """List all fields of a recipe's class, those of a group behind the group's name: ``model``, ``data.train``, ..."""
    names: list[str] = []
    for name, field in model.model_fields.items():
        group = field.annotation
        if isinstance(group, type) and issubclass(group, BaseModel):
            names += [f"{name}.{key}" for key in group.model_fields]
        else:
            names.append(name)
    return names


def find_field(key: str, known: Sequence[str]) -> str | None:
    """Find the field that a key means.

    Args:
        key: as it was typed, e.g. ``"LR"``, ``"max_steps"`` or ``"train.max_steps"``.
        known: all fields, dotted.

    Returns:
        The field's full name, or ``None`` if no field has this name.

    Examples:
        >>> find_field("LR", ["train.learning_rate"])
        'train.learning_rate'
    """
    return _typed(known).get(plain(key))


def unknown_field(key: str, known: Sequence[str]) -> str:
    """Write the error message for an unknown field, in one line, with the field or the group that may be meant.

    Args:
        key: as it was typed.
        known: all fields, dotted.
    """
    name = plain(key)
    groups = _groups(known)
    if key in groups:
        return a_group(key, known)
    gone = _typed(list(GONE)).get(name)
    if gone:
        return f"{gone} is gone: {GONE[gone]}"
    typed = _typed(known)
    near = typed.get(name) or typed.get(_last(name))  # its group is missing or wrong
    if not near:
        # A high cutoff, because all fields of a group begin alike: train.colour is no misspelt train.mirror. For the
        # same reason a short name behind its group, train.lr, is left out.
        names = [other for other in typed if "." not in other or other in known]
        found = nearest(name.rstrip("."), [*names, *groups], cutoff=0.75)
        if found in groups:
            return f"unknown field {key}; did you mean a field of {found}? There are {_fields_of(found, known)}"
        near = typed[found] if found else None
    alone = ", ".join(field for field in known if "." not in field)
    there_are = _fields_of(name.partition(".")[0], known)
    if not there_are:
        there_are = f"{alone}, and fields of {', '.join(groups)}, e.g. train.max_steps"
    return f"unknown field {key}; {hint(near, f'there are {there_are}')}"


def a_group(group: str, known: Sequence[str]) -> str:
    """Write the error message for a group where a field is expected, in one line, with the group's fields."""
    return f"{group} is a group of fields; there are {_fields_of(group, known)}"


def _typed(known: Sequence[str]) -> dict[str, str]:
    """Return all that may be typed, and the field that it means: full names, names without their group, other names."""
    lasts = [_last(name) for name in known]
    found = {last: name for last, name in zip(lasts, known, strict=True) if lasts.count(last) == 1}
    for group in _groups(known):
        found.pop(group, None)  # train is the group, and not data.train
    for alias, name in ALIASES.items():
        if name in known:
            found[alias] = name
            found[f"{_group(name)}.{alias}"] = name
    return found | {name: name for name in known}


def _fields_of(group: str, known: Sequence[str]) -> str:
    return ", ".join(name for name in known if _group(name) == group)


def _groups(known: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_group(name) for name in known if "." in name))


def _group(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def line_of(place: list[str], text: str) -> int:
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


def in_one_line(error: ValidationError, known: Sequence[str]) -> str:
    """Say in one line, in our words instead of pydantic's, which field is wrong first, and what would be right.

    Args:
        error: what pydantic found.
        known: every field of a recipe, dotted.
    """
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        return unknown_field(key, known)
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
        return f"{key} = {reprlib.repr(first['input'])}: {a_group(key, known)}"
    return f"{key} = {reprlib.repr(first['input'])}: {message[0].lower()}{message[1:]}{near}"


def plain(name: str) -> str:
    """Reduce a name to the form in which names are compared.

    Examples:
        >>> plain("Flash-Attention")
        'flash_attention'
    """
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def same(name: str, known: Iterable[str]) -> str | None:
    """Find the known name that was meant.

    Args:
        name: as it was typed.
        known: the right names.

    Returns:
        The known name, or ``None`` if none fits or several do.

    Examples:
        >>> same("SmolLM2", ["smollm2", "llama-3.2-1b"])
        'smollm2'
    """
    found = [other for other in known if plain(other) == plain(name)]
    return found[0] if len(found) == 1 else None  # a choice among several would be a guess


def repeated(names: Sequence[str]) -> str | None:
    """Find the first name that occurs more than once; ``None`` if there is none."""
    return next((name for name in names if names.count(name) > 1), None)


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Find the known name that looks most like a wrong one.

    Args:
        name: as it was typed.
        known: the right names.
        cutoff: the least similarity by ``difflib``, from 0 (any two names) to 1 (equal names).

    Returns:
        The known name, or ``None`` if none is similar enough.
    """
    by_plain = {plain(other): other for other in known}
    found = difflib.get_close_matches(plain(name), by_plain, n=1, cutoff=cutoff)
    if not found:
        return None
    return by_plain[found[0]]


def hint(near: str | None, otherwise: str) -> str:
    """Return the end of an error message: the question whether the nearest name was meant, or another hint.

    Args:
        near: the known name that looks most like the wrong one, if there is one.
        otherwise: the hint if no known name is similar.

    Examples:
        >>> hint("smoke", "there are smoke, kwanzaa")
        'did you mean smoke?'
        >>> hint(None, "there are smoke, kwanzaa")
        'there are smoke, kwanzaa'
    """
    return f"did you mean {near}?" if near else otherwise


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


def parts(text: str) -> list[str]:
    """Split a list as it is typed: ``"[q_proj, v_proj]"`` -> ["q_proj", "v_proj"]."""
    found = [part.strip(" \"'") for part in text.strip("[] ").split(",")]
    return [part for part in found if part]


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


def _switch_or_number(value: Any, info: ValidationInfo, number_of: str) -> Any:
    """Convert ``"true"``, ``"false"`` or ``"8"``, as ``--set`` gives them, and 0 to False; take no other value."""
    found = value
    if isinstance(value, str) and info.mode == "python":  # in a file, which has types, a text is wrong
        text = value.strip().lower()
        found = {"true": True, "false": False}.get(text, text)
        if text.isdecimal() and len(text) <= 9:
            found = int(text)
    # type() and not isinstance(), because True is an int, too.
    if type(found) is int and 0 <= found < 10**9:
        return found or False
    if type(found) is bool:
        return found
    raise ValueError(f"must be true, false, or the number of {number_of}, 0 or more")


def _all_or_number(value: Any, info: ValidationInfo) -> Any:
    return _switch_or_number(value, info, "blocks")


def _auto_or_tokens(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str) and value.strip().lower() == "auto":
        return True
    return _switch_or_number(value, info, "tokens of a tile")


AllOrNumber = Annotated[bool | int, BeforeValidator(_all_or_number)]
"""true for all, false for none, or a number of blocks. 1 is one block and not true; 0 is read as false."""

AutoOrTokens = Annotated[bool | int, BeforeValidator(_auto_or_tokens)]
"""true (or auto) for tiles as long as the model is wide, false for none, or a number of tokens; 0 is read as false."""
