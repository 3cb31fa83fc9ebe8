"""Say settings in the words of the form, where the package says them in the words of ``--set``."""

import re

from tools.fit.fields import BEST, FIELDS, OF_SETTING, OWN, SWITCHES, TARGETS, Field

_VALUES = {"false": "off", "true": "on"}
_TRAINS = {"none": "all weights (full fine-tuning)", "lora": "LoRA adapters", "head": "the head only",
           "prompt_tuning": "prompt tuning", "side_network": "a side network"}  # fmt: skip
_BY_NAME = {field.name: field for field in FIELDS}
_TAILS = {setting.partition(".")[2]: name for setting, name in OF_SETTING.items()}
_NAMED = re.compile(
    rf"(?<![\w.])((?:{'|'.join(sorted({setting.partition('.')[0] for setting in OF_SETTING}))})\.)?"
    rf"({'|'.join(sorted(_TAILS, key=len, reverse=True))})(?:=(\w+(?:\.\d+)?))?(?!\w)"
)
"""A setting in a message: ``tricks.peft=lora``, ``data.max_length`` or ``layer_by_layer``."""


def value(field: Field, text: str) -> str:
    """Say a value of a field as its list does."""
    words = {**_VALUES, **TARGETS}
    if field.name == "peft":
        words |= _TRAINS
    if field.name == "set":
        words = {BEST: "search a set that fits", OWN: "keep mine"}
    if field.name == "gradient_checkpointing":
        words["true"] = "every block"
    return words.get(text, text)


def label(field: Field) -> str:
    """Say a field's name without what its label explains."""
    return re.split(r" \(|:", field.label)[0]


def plain(message: str) -> str:
    """Put the labels of the form in place of the settings that a message of the package names."""
    about_itself = re.sub(r"^(model config\.json|--set \S+): ", "", message)
    text = re.sub(_NAMED, _said, about_itself)
    return text[:1].upper() + text[1:]


def _said(found: re.Match[str]) -> str:
    group, name, text = found.groups()
    field = _BY_NAME[_TAILS[name]]
    is_setting = group or "_" in name or (text and field.name in SWITCHES)
    if not is_setting:  # a word of the language, such as "attention"
        return found[0]
    return f"“{label(field)}: {value(field, text)}”" if text else f"“{label(field)}”"
