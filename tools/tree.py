"""The tree of the package for CONTRIBUTING.md: a line for each folder, from its ``__init__``, layer by layer.

python -m tools.tree          # write it
"""

import ast
import tomllib
from pathlib import Path

from cria_tricks.common.markdown_table import table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- the tree: python -m tools.tree -->", "<!-- end of the tree -->"


def layers() -> list[list[str]]:
    """The names of each layer, from the highest down, as the import contract has them."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    return [line.split(" | ") for line in contracts[0]["layers"]]


def first_line(name: str) -> str:
    """What a folder or a module of the package says of itself."""
    place = ROOT / "cria_tricks" / name
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    said = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(said.split("\n\n")[0].split())


def tree() -> str:
    """The table: a layer in each row, which may import only from the rows below."""
    rows = []
    for layer in layers():
        for name in layer:
            shown = f"{name}/" if (ROOT / "cria_tricks" / name).is_dir() else f"{name}.py"
            rows.append((f"`{shown}`", first_line(name)))
    return table(("layer", "what lives there"), rows)


def written(page: str) -> str:
    """A page with the tree of today between the two comments."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tree()}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
