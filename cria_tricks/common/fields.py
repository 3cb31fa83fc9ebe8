"""Find the field of a recipe that a user means: by its own name, by a name of other libraries, or without its group."""

from collections.abc import Sequence

from cria_tricks.common.names import nearest, plain, same

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


def find_field(key: str, known: Sequence[str]) -> str | None:
    """Find the field that a key names.

    Args:
        key: as it was typed, e.g. ``"LR"``, ``"max_steps"`` or ``"train.max_steps"``.
        known: all fields, dotted.

    Returns:
        The field's full name, or ``None`` when no field is meant or more than one could be.

    Examples:
        >>> find_field("LR", ["train.learning_rate"])
        'train.learning_rate'
    """
    if found := same(key, known):
        return found
    group, dot, last = plain(key).rpartition(".")
    field = ALIASES.get(last)
    if field and group == (_group(field) if dot else ""):
        return field
    return None if dot or last in _groups(known) else _only(last, known)


def unknown_field(key: str, known: Sequence[str], *, is_table: bool = False) -> str:
    """Say in one line that there is no such field, and which one may be meant.

    Args:
        key: as it was typed.
        known: all fields, dotted.
        is_table: whether the key opens a table of a recipe file, so that a group is looked for, and not a field.
    """
    groups = _groups(known)
    if not is_table and (group := same(key.rstrip("."), groups)):
        other = _only(group, known)
        return a_group(group, known) + (f"; or did you mean {other}?" if other else "")
    if not is_table and "." not in key and (group := _nearer_group(key, known)):
        return f"unknown field {key}; did you mean a field of {group}? There are {_fields_of(group, known)}"
    near = nearest(key, groups) if is_table else _nearest_field(key, known)
    if near:
        return f"unknown field {key}; did you mean {near}?"
    if fields := _fields_of(plain(key).partition(".")[0], known):
        return f"unknown field {key}; there are {fields}"
    alone = ", ".join(name for name in known if "." not in name)
    return f"unknown field {key}; there are {alone}, and fields of {', '.join(groups)}, e.g. train.max_steps"


def a_group(group: str, known: Sequence[str]) -> str:
    """Say in one line that a name stands for several fields, and which."""
    return f"{group} is a group of fields; there are {_fields_of(group, known)}"


def _fields_of(group: str, known: Sequence[str]) -> str:
    return ", ".join(name for name in known if _group(name) == group)


def _nearer_group(key: str, known: Sequence[str]) -> str | None:
    """The group that a misspelt key without a dot stands for, unless it is more like a field."""
    groups, fields = _groups(known), {*ALIASES, *map(_last, known)} - {*_groups(known)}
    near = nearest(key, [*fields, *groups], cutoff=0.75)
    return near if near in groups else None


def _nearest_field(key: str, known: Sequence[str]) -> str | None:
    group, _, last = plain(key).rpartition(".")
    if found := find_field(key, known) or ALIASES.get(last) or _only(last, known):
        return found  # the group was left out, or is the wrong one
    if group and group not in _groups(known):
        return nearest(key, known)
    # Only the last parts are compared: all names of a group begin alike, so train.lr would be like train.mirror.
    within = {_last(name): name for name in known if group in ("", _group(name))}
    near = nearest(last, within)
    return within[near] if near else None


def _only(last: str, known: Sequence[str]) -> str | None:
    """Find the only field whose last part is this name; ``None`` if several fields have it, or none."""
    found = [name for name in known if _last(name) == plain(last)]
    return found[0] if len(found) == 1 else None


def _groups(known: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_group(name) for name in known if "." in name))


def _group(name: str) -> str:
    return name.rpartition(".")[0]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
