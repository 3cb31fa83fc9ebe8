"""The reference pages are made of the commands and of the recipe's models, and each of their examples works."""

import contextlib
import importlib.metadata
import io
import re
import shlex
from pathlib import Path

import pytest
import typer

from cria_tricks.cli.main import app
from cria_tricks.common.fields import ALIASES
from cria_tricks.recipe import Recipe, field_names, with_settings
from tools import reference

ROOT = Path(__file__).parents[1]
COMMANDS = (reference.PAGES / "commands.md").read_text(encoding="utf-8")
SETTINGS = (reference.PAGES / "settings.md").read_text(encoding="utf-8")


def test_the_settings_are_those_of_the_models():
    assert reference.filled("settings.md", reference.settings()) == SETTINGS, "run make update"


def test_the_commands_are_those_of_the_command_line():
    pinned = re.search(r"^typer==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)[1]
    if importlib.metadata.version("typer") != pinned:
        pytest.skip(f"other versions than typer {pinned} describe a command in other words")
    assert reference.filled("commands.md", reference.commands()) == COMMANDS, "run make update"


def test_every_setting_is_there_with_words_and_an_example_that_works():
    pattern = r"^\| `([a-z_.]+)` \| (.+?)\. (\S.+?)\. Default: `(.+?)`\. Example: `(.+?)`\."
    rows = re.findall(pattern, SETTINGS, re.M)
    assert [name for name, *_ in rows] == field_names()
    for name, says, values, default, example in rows:
        assert len(says) > 5, f"{name}: no description"
        assert values
        assert with_settings(Recipe(), [example]) != Recipe(), f"{example} is the default"
        if default not in ('""', "none"):
            assert with_settings(Recipe(), [f"{name}={default}"]) == Recipe()


def test_every_other_name_is_told_beside_its_field():
    for alias, field in ALIASES.items():
        line = next(line for line in SETTINGS.splitlines() if line.startswith(f"| `{field}`"))
        assert f"`{alias}`" in line


@pytest.mark.parametrize("line", re.findall(r"^\$ (cria \w+ (?!\[).*)$", COMMANDS, re.M))
def test_an_example_of_a_command_is_understood(line):
    """Its options and arguments are there; nothing is run."""
    _, name, *words = shlex.split(line)
    command = typer.main.get_command(app).commands[name]
    with contextlib.redirect_stdout(io.StringIO()):
        context = command.make_context(name, words)
    assert context.params


def test_every_command_has_an_example():
    names = typer.main.get_command(app).commands
    assert sorted(re.findall(r"^## `cria (\w+)`$", COMMANDS, re.M)) == sorted(names)
    for name in names:
        assert f"\n$ cria {name}" in COMMANDS.partition(f"## `cria {name}`")[2].partition("**Usage**")[0]
