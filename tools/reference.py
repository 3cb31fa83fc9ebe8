"""The reference of all commands and of all settings, made of the code: ``python -m tools.reference``.

What stands between the marks of ``docs/reference/commands.md`` is typer's own description of the command line; what
stands in ``docs/reference/settings.md`` is made of the models in ``cria_tricks/settings.py``.
"""

import re
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from cria_tricks.common.fields import ALIASES
from cria_tricks.common.markdown_table import cell, table
from cria_tricks.recipe import Recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "reference"


def commands() -> str:
    """Every command: what it does, an example, its arguments and options, with types and defaults."""
    words = [sys.executable, "-m", "typer", "cria_tricks.cli.main", "utils", "docs", "--name", "cria"]
    made = subprocess.run(words, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    _, *parts = re.split(r"^## `cria (\w+)`\n", made, flags=re.M)
    found = dict(zip(parts[::2], parts[1::2], strict=True))
    rows, sections = [], []
    for name, text in found.items():
        says, usage, rest = text.strip().partition("**Usage**:")
        first = says.strip().split("\n\n")[0]
        rows.append((f"[`cria {name}`](#cria-{name})", cell(" ".join(first.split()))))
        rest, _, line = rest.partition("\nExample: ")  # the last line of a command's help
        example = f"**Example**:\n\n```console\n$ {line.strip()}\n```"
        sections.append(f"## `cria {name}`\n\n{says.strip()}\n\n{example}\n\n{usage}{rest.rstrip()}")
    return "\n\n".join([table(("command", "what it does"), rows), *sections])


def settings() -> str:
    """Every field of a recipe, group by group, with its type, default, range, other names and an example."""
    alone = {name: field for name, field in Recipe.model_fields.items() if group_of(field) is None}
    sections = [f"## The recipe\n\n{_fields('', alone)}"]
    for name, field in Recipe.model_fields.items():
        if group := group_of(field):
            says = " ".join((group.__doc__ or "").split())
            sections.append(f"## {name}\n\n{says}\n\n{_fields(f'{name}.', group.model_fields)}")
    return "\n\n".join(sections)


def group_of(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a group of fields; ``None`` for a field of its own."""
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _fields(group: str, fields: dict[str, FieldInfo]) -> str:
    rows = []
    for name, field in fields.items():
        full = group + name
        others = ", ".join(f"`{alias}`" for alias, of in ALIASES.items() if of == full)
        parts = [
            _sentence(field.description or ""),
            f"{_sentence(_values(field))} Default: `{_written(field.default)}`.",
            f"Example: `{full}={example(field)}`.",
        ]
        if others:
            parts.append(f"Also called {others}.")
        says = cell(" ".join(parts))
        rows.append((f"`{full}`", says))
    return table(("setting", "what it is"), rows)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _values(field: FieldInfo) -> str:
    """The type of a field with its range, or its choices."""
    annotation: Any = field.annotation
    if annotation is bool:
        return "`true` or `false`"
    if annotation == (bool | int):
        return "`true`, `false` or whole number from 0"
    match typing.get_args(annotation):
        case (kind, words) if kind is bool:  # bool | Literal["triton"]
            return f"`true`, `false` or `{typing.get_args(words)[0]}`"
    if typing.get_origin(annotation) is typing.Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in typing.get_args(annotation))
    if typing.get_origin(annotation) is tuple:
        inside, _ = typing.get_args(annotation)
        choices = ", ".join(f"`{choice}`" for choice in typing.get_args(inside))
        return f"list of {choices}" if choices else "list of texts"
    names = {int: "whole number", float: "number", str: "text"}
    return names[annotation] + _range(field)


def _range(field: FieldInfo) -> str:
    """The range of a number, in words."""
    names = {"ge": "from", "gt": "above", "le": "to", "lt": "below"}  # as pydantic keeps them
    found = [(names[name], getattr(limit, name)) for limit in field.metadata for name in names if hasattr(limit, name)]
    return "".join(f" {word} {number:,}" for word, number in found)


def _written(value: Any) -> str:
    """A value as ``--set`` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value) or "none"
    return str(value) if value != "" else '""'


def example(field: FieldInfo) -> str:
    """A value that is not the default: the field's own example, or the next choice."""
    if field.examples:
        return str(field.examples[0])
    if bool in (field.annotation, *typing.get_args(field.annotation)):
        return _written(not field.default)
    choices = typing.get_args(field.annotation)
    assert choices, f"a field without choices needs an example: {field}"
    return str(next(choice for choice in choices if choice != field.default))


def filled(page: str, made: str) -> str:
    """The text of a page with what is made between its marks."""
    path = PAGES / page
    begin, end = "<!-- made by python -m tools.reference -->", "<!-- end of what is made -->"
    before, opened, rest = path.read_text(encoding="utf-8").partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise SystemExit(f"{path}: has no place between {begin} and {end}")
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def pages() -> dict[str, str]:
    """Both pages as they should be."""
    return {"commands.md": filled("commands.md", commands()), "settings.md": filled("settings.md", settings())}


def write() -> None:
    """Write both pages."""
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write()
