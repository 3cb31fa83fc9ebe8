"""Find the field of a recipe that a user means, by its own name, by another library's name, or without its group.

The field ``train.learning_rate`` belongs to the group ``train``. A user may also type ``learning_rate`` or ``lr``.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from cria_tricks.common.names import hint, nearest, plain, same, the_only

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
        The field's full name, or ``None`` if no field fits or several do.

    Examples:
        >>> find_field("LR", ["train.learning_rate"])
        'train.learning_rate'
    """
    found = same(key, known)
    if found:
        return found
    group, dot, last = plain(key).rpartition(".")
    field = ALIASES.get(last)
    if field and (not dot or group == _group(field)):
        return field
    if dot or last in _groups(known):
        return None
    return _only(last, known)


def unknown_field(key: str, known: Sequence[str], *, is_table: bool = False) -> str:
    """Write the error message for an unknown field, in one line, with the field that may be meant.

    Args:
        key: as it was typed.
        known: all fields, dotted.
        is_table: whether the key is the heading of a TOML table, as in ``[train]``: then a group is meant, not a field.
    """
    gone = same(key, GONE) or _only(key, list(GONE))
    if gone:
        return f"{gone} is gone: {GONE[gone]}"
    groups = _groups(known)
    if is_table:
        near = nearest(key, groups)
    else:
        group = same(key.rstrip("."), groups)
        if group:
            return _a_group_or_field(group, known)
        group = _nearer_group(key, known)
        if group:
            return f"unknown field {key}; did you mean a field of {group}? There are {_fields_of(group, known)}"
        near = _nearest_field(key, known)
    alone = ", ".join(name for name in known if "." not in name)
    there_are = _fields_of(plain(key).partition(".")[0], known)
    if not there_are:
        there_are = f"{alone}, and fields of {', '.join(groups)}, e.g. train.max_steps"
    return f"unknown field {key}; {hint(near, f'there are {there_are}')}"


def a_group(group: str, known: Sequence[str]) -> str:
    """Write the error message for a group where a field is expected, in one line, with the group's fields."""
    return f"{group} is a group of fields; there are {_fields_of(group, known)}"


def _a_group_or_field(group: str, known: Sequence[str]) -> str:
    """Write the message of :func:`a_group`, and ask whether a field of the same name in another group was meant."""
    field = _only(group, known)
    or_field = f"; or did you mean {field}?" if field else ""
    return a_group(group, known) + or_field


def _fields_of(group: str, known: Sequence[str]) -> str:
    return ", ".join(name for name in known if _group(name) == group)


def _nearer_group(key: str, known: Sequence[str]) -> str | None:
    """Find the group that a misspelt key without a dot means; ``None`` if it looks more like a field."""
    if "." in key:
        return None
    groups = _groups(known)
    fields = {*ALIASES, *map(_last, known)} - set(groups)
    near = nearest(key, [*fields, *groups], cutoff=0.75)
    return near if near in groups else None


def _nearest_field(key: str, known: Sequence[str]) -> str | None:
    group, _, last = plain(key).rpartition(".")
    found = find_field(key, known) or ALIASES.get(last) or _only(last, known)
    if found:
        return found  # the field exists, but the key had no group or a wrong one
    if group and group not in _groups(known):
        return nearest(key, known)
    # Compare only the parts behind the dot. All names of a group begin alike, so train.lr would look like train.mirror.
    within = {_last(name): name for name in known if group in ("", _group(name))}
    near = nearest(last, within)
    if near is None:
        return None
    return within[near]


def _only(last: str, known: Sequence[str]) -> str | None:
    """Find the only field whose last part is this name; ``None`` if several fields have it, or none."""
    return the_only(name for name in known if _last(name) == plain(last))


def _groups(known: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_group(name) for name in known if "." in name))


def _group(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
