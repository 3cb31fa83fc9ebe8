"""Define the fields of the page "Will it fit?": their names in a link, their settings, their words and their limits.

A choice of the page is a dictionary from these names to texts. A link holds the same texts behind its ``#``.
"""

import typing
from collections.abc import Iterator
from dataclasses import dataclass

from cria_tricks import recipes
from cria_tricks.data.lengths import row_lengths
from cria_tricks.hardware import T4
from cria_tricks.models.catalogue import CATALOGUE
from cria_tricks.recipe import Recipe
from cria_tricks.settings import Tricks
from cria_tricks.switches import FIELDS as DECLARED
from cria_tricks.switches import TECHNIQUES

BEST, OWN = "best", "own"
"""The two values of ``set``: search switches that fit where those of the form do not; or answer for the form's own."""
CONFIG, NUMBERS = "config.json", "numbers"
"""The two values of ``model`` that are no name of the catalogue: a pasted config, and numbers that the reader types."""


@dataclass(frozen=True)
class Field:
    """A field of the form.

    Attributes:
        name: its name in a choice and in a link.
        group: the heading above it.
        label: what the reader sees.
        setting: the recipe's setting; empty for what is no setting of a recipe.
        values: what it can be; empty for a number or a text.
        low: the smallest number.
        high: the largest number.
        whole: whether only whole numbers are taken.
        beside: the field and the values of it with which this one matters; it is hidden with others.
        lesson: the lesson that explains it.
        number: whether a whole number may stand in place of one of the values, and what it counts.
    """

    name: str
    group: str
    label: str
    setting: str = ""
    values: tuple[str, ...] = ()
    low: float = 0
    high: float = 0
    whole: bool = True
    beside: tuple[str, ...] = ()
    lesson: str = ""
    number: str = ""


MODELS = tuple(name for name, entry in CATALOGUE.items() if entry.hub)
"""The models of the form: those that the commands beside an answer can plan and train by this name."""
TARGETS = {
    "all": "all matrices of a block",
    "attention": "attention (q, k, v, o)",
    "qv": "q_proj and v_proj",
    "mlp": "MLP (gate, up, down)",
}
"""Choices of LoRA's target modules."""

FIRST = "Your run"
"""The group that is always open."""
ROWS = "Rows and steps"
GROUPS = (FIRST, ROWS, "LoRA", "Memory", "Speed")
"""The headings of the form; all but the first can be folded."""


def lessons() -> dict[str, str]:
    """Return the lesson of each switch, by the name of its field."""
    found: dict[str, str] = {}
    for trick in TECHNIQUES:
        for switch in trick.TECHNIQUE.switches:
            found.setdefault(switch.partition("=")[0], trick.TECHNIQUE.lesson)
    return found


def _values(name: str) -> tuple[str, ...]:
    """List what a switch can be, as ``--set`` takes it."""
    annotation = Tricks.model_fields[name].annotation
    words: tuple[str, ...] = ()
    for part in (annotation, *typing.get_args(annotation)):
        if typing.get_origin(part) is typing.Literal:
            words += tuple(str(value) for value in typing.get_args(part))
    default = Tricks.model_fields[name].default
    return words if isinstance(default, str) else ("false", "true", *words)


_LESSON = lessons()


def _switches(*groups: str) -> Iterator[Field]:
    """Make the fields of the switches in these groups."""
    for name, one in DECLARED.items():
        if one.group in groups:
            values, lesson = _values(name), _LESSON[name]
            yield Field(name, one.group, one.label, f"tricks.{name}", values, lesson=lesson, number=one.number)


FIELDS: tuple[Field, ...] = (
    Field("model", FIRST, "Model"),
    Field("config", FIRST, "config.json, pasted", beside=("model", CONFIG)),
    Field("layers", FIRST, "Layers (num_hidden_layers)", low=1, high=1000, beside=("model", NUMBERS)),
    Field("width", FIRST, "Width (hidden_size)", low=1, high=200_000, beside=("model", NUMBERS)),
    Field("heads", FIRST, "Attention heads", low=1, high=2000, beside=("model", NUMBERS)),
    Field("kv_heads", FIRST, "Key/value heads", low=1, high=2000, beside=("model", NUMBERS)),
    Field("inner", FIRST, "MLP width (intermediate_size)", low=1, high=1_000_000, beside=("model", NUMBERS)),
    Field("vocabulary", FIRST, "Vocabulary size", low=1, high=5_000_000, beside=("model", NUMBERS)),
    Field("tied", FIRST, "Embedding and head share weights (tied)", values=("false", "true"),
          beside=("model", NUMBERS)),
    Field("card", FIRST, "Card (GPU)", lesson="choose_your_hardware"),
    Field("set", FIRST, "Where the switches do not fit", values=(BEST, OWN)),
    Field("batch", ROWS, "Batch size (rows of a micro-batch)", "train.batch_size", low=1, high=65_536,
          lesson="the_bill"),
    Field("tokens", FIRST, "Sequence length (tokens)", "data.max_length", low=8, high=2**20,
          lesson="long_rows"),
    Field("mean", ROWS, "Mean length (tokens; empty: all rows are full)", low=1, high=2**20,
          lesson="packing"),
    Field("gradient_accumulation", ROWS, "Gradient accumulation steps", "tricks.gradient_accumulation", low=1,
          high=1_000_000, lesson=_LESSON["gradient_accumulation"]),
    Field("rows", ROWS, "Training rows", low=1, high=10**9),
    Field("epochs", ROWS, "Epochs", "train.epochs", low=0.001, high=1_000_000, whole=False),
    Field("max_grad_norm", ROWS, "Gradient clipping (max_grad_norm; 0: none)", "train.max_grad_norm", low=0,
          high=1e9, whole=False),
    *_switches(FIRST, "LoRA"),
    Field("r", "LoRA", "Rank (r)", "lora.r", low=1, high=65_536, beside=("peft", "lora"), lesson="lora"),
    Field("targets", "LoRA", "Target modules", "lora.target_modules", tuple(TARGETS), beside=("peft", "lora"),
          lesson="lora"),
    Field("prompt_tokens", "LoRA", "Learnt vectors", "prompt.tokens", low=1, high=4096,
          beside=("peft", "prompt_tuning"), lesson="lora"),
    Field("side_blocks", "LoRA", "Blocks of the side network", "side.blocks", low=1, high=1000,
          beside=("peft", "side_network"), lesson="lora"),
    *_switches("Memory", "Speed"),
)  # fmt: skip
"""All fields, in the order of the form."""

BY_NAME = {field.name: field for field in FIELDS}
SWITCHES = tuple(name for name, one in DECLARED.items() if one.label)
"""The fields that are switches of ``recipe.tricks``, but for the accumulation, which is a number."""
OF_SETTING = {field.setting: field.name for field in FIELDS if field.setting}


def as_text(value: object) -> str:
    """Write a value as ``--set`` takes it."""
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def of_recipe(recipe: Recipe) -> dict[str, str]:
    """Return the part of a choice that a recipe's settings say."""
    values = recipe.model_dump()
    found = {}
    for field in FIELDS:
        group, _, name = field.setting.partition(".")
        if field.setting and field.name != "targets":
            found[field.name] = as_text(values[group][name])
    return found


def default() -> dict[str, str]:
    """Return the choice with which the page begins: the capstone on a T4, on the rows of the Kwanzaa run."""
    run = recipes.capstone(T4)
    llama_1b = {"layers": "16", "width": "2048", "heads": "32", "kv_heads": "8", "inner": "8192",
                "vocabulary": "128256", "tied": "true"}  # fmt: skip
    others = {"model": run.model, "config": "", "card": "t4", "set": BEST, "mean": "",
              "rows": str(len(row_lengths("train"))), "targets": "all", **llama_1b}  # fmt: skip
    found = {**others, **of_recipe(run)}
    return {field.name: found[field.name] for field in FIELDS}
