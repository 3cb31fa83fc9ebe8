"""The page "Hugging Face names": our settings can be set, and every field of a library that it names exists."""

import ast
import importlib
import re
from pathlib import Path

import pytest

from cria_tricks.recipe import Recipe, field_names, with_settings

PAGE = (Path(__file__).parents[1] / "docs" / "reference" / "huggingface_names.md").read_text(encoding="utf-8")
CLASSES = {
    "TrainingArguments": "transformers",
    "BitsAndBytesConfig": "transformers",
    "EarlyStoppingCallback": "transformers",
    "LoraConfig": "peft",
    "PromptTuningConfig": "peft",
    "SFTConfig": "trl",
}
TOGETHER = {"tricks.paged_optimizer": (), "tricks.double_quantization": ("tricks.quantization=nf4",)}


def calls() -> dict[str, list[ast.Call]]:
    """Every call of a library's class on the page, by class, also one inside another call."""
    found: dict[str, list[ast.Call]] = {name: [] for name in CLASSES}
    for code in re.findall(r"`([\w.]+\(.*?\))`", PAGE):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLASSES:
                found[node.func.id].append(node)
    return found


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_that_is_named_exists(name):
    module = pytest.importorskip(CLASSES[name], reason=f"{CLASSES[name]} is not installed")
    known = importlib.import_module("inspect").signature(getattr(module, name)).parameters
    named = [keyword.arg for call in calls()[name] for keyword in call.keywords]
    assert named
    assert [field for field in named if field not in known] == []


def test_every_optimizer_that_is_named_exists():
    names = importlib.import_module("transformers.training_args").OptimizerNames
    named = re.findall(r'optim="(\w+)"', PAGE)
    assert len(named) == 4
    for name in named:
        assert names(name)


def test_our_settings_exist_and_take_the_values():
    cells = [line.split("|")[1] for line in PAGE.splitlines() if line.startswith("| `")]
    ours = [
        found
        for cell in cells
        for found in re.findall(r"`((?:data|tricks|lora|prompt|train|parallel)\.\w+)(=[^`]+)?`", cell)
    ]
    assert len(ours) > 45
    for name, value in ours:
        assert name in field_names()
        if value:
            with_settings(Recipe(), [name + value])
