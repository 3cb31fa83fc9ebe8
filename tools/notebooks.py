"""lessons/name.py -> notebooks/name.ipynb for Colab, one way: ``make update``.

A notebook is its lesson with a badge on top, its number in front of its title and, before the first code, a cell that
installs what is missing. It has no outputs, and nothing in it depends on when or where it was made, so the same lesson
gives the same bytes. It is never edited: what is changed there is lost. A lesson says in its header what it needs:
``accelerator: GPU``, and ``extra: data`` for the libraries of an extra. A notebook that is no lesson is made in the
same way, of the script beside it: ``notebooks/NAME.py``. One with ``kaggle: true`` gets a second badge, which opens it
in Kaggle.
"""

import argparse
import itertools
import re
import sys
import tomllib
from pathlib import Path

import jupytext
import nbformat

from cria_tricks.common import lessons as course

ROOT = Path(__file__).resolve().parents[1]
LESSONS, NOTEBOOKS = ROOT / "lessons", ROOT / "notebooks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
REPOSITORY, SITE = PROJECT["urls"]["Repository"], PROJECT["urls"]["Documentation"]
TAG = f"v{PROJECT['version']}"
"""The release that a notebook belongs to: links open this version of it, and its first cell installs this version."""
BRANCH = "main"
BEFORE_INSTALL = "before-install"
"""The tag of cells that need nothing installed, such as a look for the GPU."""

FOLDED = "hide-input"
"""The tag of cells whose code is folded; such a cell has a title, which says what is inside: ``# %% Draw figure 2``."""
DEEP = "deep"
"""The tag of cells that a first reading leaves out. They stand together behind a heading of their own (###), which has
the tag, too: a page folds them under it, and a notebook collapses it. The next cell begins with a heading."""
PREDICT = "predict"
"""The tag of a form cell that takes the reader's guess; ``course.reveal`` further down says how far off it was."""

BADGE = "https://colab.research.google.com/assets/colab-badge.svg"
KAGGLE_BADGE = "https://kaggle.com/static/images/open-in-kaggle.svg"


def _names(requirements: list[str]) -> list[str]:
    return sorted({re.split(r"[<>=~! ]", requirement)[0] for requirement in requirements})


KEPT = _names(PROJECT["dependencies"])
_INSTALL = r"""
# @title Install cria_tricks
# This cell installs cria_tricks if it is missing, and those of its libraries that are missing. Libraries that are here
# already keep their version, above all torch and transformers. If that is impossible, pip stops and says why.
# The repository is not public yet. Until it is, build the wheel in your copy of it (make dist), then upload the file
# with the folder symbol at the left, or put it on your Drive and mount the Drive. In Kaggle, upload it as a data set.
# The cell finds it in all three places; if it lies elsewhere, write its path into WHEEL.
WHEEL = ""  # @param {type:"string"}

import contextlib
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

KEPT = "NAMES"
if importlib.util.find_spec("cria_tricks") is None:
    source = "git+REPOSITORY@TAG"
    folders = (Path.cwd(), Path("/content/drive/MyDrive"))
    name = "cria_tricks-*any.whl"
    found = [path for folder in folders for path in folder.glob(name)] + [*Path("/kaggle/input").rglob(name)]
    wheels = [Path(WHEEL)] if WHEEL else found
    if wheels:
        source = max(wheels, key=os.path.getmtime).resolve().as_uri()  # the newest
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as held:
        for name in KEPT.split():
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                held.write(f"{name}=={importlib.metadata.version(name)}\n")
        held.flush()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", held.name]
        no_questions = os.environ | {"GIT_TERMINAL_PROMPT": "0"}  # git would wait for a password that nobody can type
        done = subprocess.run([*pip, f"cria_tricks @ {source}"], env=no_questions)
    if done.returncode:
        # ResolutionImpossible: this image has an older library than we need. Take the newest image: in Colab by
        # Runtime -> Disconnect and delete runtime, in Kaggle by Settings -> Environment.
        raise RuntimeError(f"cria_tricks could not be installed from {source}; pip says why, above this line")
    importlib.invalidate_caches()
"""
INSTALL = _INSTALL.strip().replace("NAMES", " ".join(KEPT)).replace("REPOSITORY", REPOSITORY).replace("TAG", TAG)


def install_cell(extra: str = "") -> str:
    """The code of the cell that installs what is missing, with an extra's libraries where a lesson needs them."""
    if not extra:
        return INSTALL
    libraries = _names(PROJECT["optional-dependencies"][extra])
    looked_for = ", ".join(f'"{name}"' for name in ["cria_tricks", *libraries])
    with_libraries = INSTALL.replace(
        'if importlib.util.find_spec("cria_tricks") is None:',
        f"if any(importlib.util.find_spec(name) is None for name in ({looked_for})):",
    )
    return with_libraries.replace('f"cria_tricks @ ', f'f"cria_tricks[{extra}] @ ')


def lessons() -> list[Path]:
    """The lessons, in their order."""
    return [LESSONS / f"{name}.py" for name in course.LESSONS]


def title(lesson: Path) -> str:
    """A lesson's title: its first heading."""
    found = re.search("^# # (.+)$", lesson.read_text(encoding="utf-8"), re.M)
    if found is None:
        raise ValueError(f"{lesson} has no title (# # ...)")
    return found[1]


def titled(lesson: Path) -> str:
    """A lesson's title behind its number."""
    return f"{course.number_of(lesson.stem)}. {title(lesson)}"


def scripts() -> list[Path]:
    """What notebooks are made of: the lessons, and the scripts that are no lesson."""
    return [*lessons(), *sorted(NOTEBOOKS.glob("*.py"))]


def colab_address(name: str) -> str:
    """Where Colab opens a notebook of the last release."""
    owner_and_name = REPOSITORY.partition("github.com/")[2]
    return f"https://colab.research.google.com/github/{owner_and_name}/blob/{TAG}/notebooks/{name}.ipynb"


def kaggle_address(name: str) -> str:
    """Where Kaggle opens a notebook of the last release."""
    return f"https://kaggle.com/kernels/welcome?src={REPOSITORY}/blob/{TAG}/notebooks/{name}.ipynb"


def make(script: Path) -> str:
    """The text of a script's notebook."""
    book = jupytext.read(script, fmt="py:percent")
    cells = book.cells
    if script.parent == LESSONS:
        cells[0].source = f"# {titled(script)}" + cells[0].source.removeprefix("# ").removeprefix(title(script))
    badges = f"[![Open in Colab]({BADGE})]({colab_address(script.stem)})"
    if book.metadata.get("kaggle"):
        badges = f"[![Open in Kaggle]({KAGGLE_BADGE})]({kaggle_address(script.stem)}) {badges}"
    badge = nbformat.v4.new_markdown_cell(badges)
    install = nbformat.v4.new_code_cell(install_cell(book.metadata.get("extra", "")))
    place = next(i for i, cell in enumerate(cells) if cell.cell_type == "code" and not _early(cell))
    book.cells = [badge, *cells[:place], install, *cells[place:], *_next(script)]
    for cell in book.cells:
        if cell.cell_type == "markdown":
            cell.source = _absolute(cell.source)
        elif FOLDED in cell.metadata.get("tags", []):  # figures and checks, which hold answers
            cell.source = title_line(cell) + cell.source
            cell.metadata |= {"cellView": "form", "jupyter": {"source_hidden": True}}
        elif PREDICT in cell.metadata.get("tags", []):  # its form must be seen, in Jupyter as code
            cell.source = title_line(cell) + cell.source
            cell.metadata |= {"cellView": "form"}
    for number, cell in enumerate(book.cells):  # jupytext's and nbformat's own are random
        cell["id"] = f"{script.stem.replace('_', '-')[:50]}-{number:03d}"
    collapsed = []
    for heading, *_ in deep(book.cells):
        heading.metadata["jp-MarkdownHeadingCollapsed"] = True
        collapsed.append(heading["id"])
    needs = {key: book.metadata[key] for key in ("accelerator",) if key in book.metadata}
    colab = {"collapsed_sections": collapsed} if collapsed else {}
    book.metadata = nbformat.from_dict(
        {
            **needs,
            "colab": {"provenance": [], "toc_visible": True, **({"gpuType": "T4"} if needs else {}), **colab},
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    book.nbformat, book.nbformat_minor = 4, 5
    nbformat.validate(book)
    return nbformat.writes(book, version=nbformat.NO_CONVERT) + "\n"


def deep(cells: list[nbformat.NotebookNode]) -> list[list[nbformat.NotebookNode]]:
    """Find the parts of a lesson that are folded because a first reading leaves them out.

    Raises:
        ValueError: a part has no heading of its own, or the cell behind it has none, so that it would be folded, too.
    """
    marked = [(DEEP in cell.metadata.get("tags", []), cell) for cell in cells]
    runs = [(is_deep, [cell for _, cell in run]) for is_deep, run in itertools.groupby(marked, lambda pair: pair[0])]
    for (is_deep, run), (_, after) in zip(runs, [*runs[1:], (False, [])], strict=True):
        if is_deep and not run[0].source.startswith("### "):
            raise ValueError(f"a deep part begins with a heading of its own (### ...): {run[0].source[:60]!r}")
        if is_deep and after and not after[0].source.startswith("##"):
            raise ValueError(f"the cell behind a deep part begins with a heading: {after[0].source[:60]!r}")
        for cell in run if is_deep else []:
            if cell.cell_type == "markdown" and "\n### " in cell.source:
                raise ValueError(f"a heading inside a deep part begins a cell: {cell.source[:60]!r}")
    # Two parts that follow each other are two: each heading begins one.
    parts: list[list[nbformat.NotebookNode]] = []
    for is_deep, run in runs:
        for cell in run if is_deep else []:
            if cell.cell_type == "markdown" and cell.source.startswith("### "):
                parts.append([])
            parts[-1].append(cell)
    return parts


def _next(script: Path) -> list[nbformat.NotebookNode]:
    """The last cell of a lesson: the next lesson's title, and the question with which that one begins."""
    if script.parent != LESSONS or script.stem == course.LESSONS[-1]:
        return []
    after = LESSONS / f"{course.LESSONS[course.number_of(script.stem) + 1]}.py"
    asks = jupytext.read(after, fmt="py:percent").metadata.get("question", "")
    return [nbformat.v4.new_markdown_cell(f"**Next: [{titled(after)}]({after.name}).** {asks}".rstrip())]


def title_line(cell: nbformat.NotebookNode) -> str:
    """The line with which Colab folds a cell's code and shows its title instead."""
    if not (title := cell.metadata.get("title")):
        raise ValueError(f'a folded cell has no title (# %% Draw figure 2 tags=["hide-input"]): {cell.source[:60]!r}')
    return f"# @title {title}\n"


def stale() -> list[str]:
    """Notebooks that are missing, differ from their script, or have none."""
    wanted = {f"{script.stem}.ipynb": make(script) for script in scripts()}
    there = {path.name: path.read_text(encoding="utf-8") for path in NOTEBOOKS.glob("*.ipynb")}
    return sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))


def write() -> None:
    """Write every notebook, and remove those without a script."""
    NOTEBOOKS.mkdir(exist_ok=True)
    wanted = {f"{script.stem}.ipynb": make(script) for script in scripts()}
    for name, text in wanted.items():
        (NOTEBOOKS / name).write_text(text, encoding="utf-8")
    for path in NOTEBOOKS.glob("*.ipynb"):
        if path.name not in wanted:
            path.unlink()


def _absolute(text: str) -> str:
    """Links to other lessons and to pages, as they are from Colab."""
    text = re.sub(r"\]\((\w+)\.py(#[\w-]+)?\)", lambda m: f"]({colab_address(m[1])}{m[2] or ''})", text)
    return re.sub(r"\]\(\.\./docs/([\w/]+)\.md(#[\w-]+)?\)", rf"]({SITE}\1.html\2)", text)


def _early(cell: nbformat.NotebookNode) -> bool:
    return BEFORE_INSTALL in cell.metadata.get("tags", [])


def main() -> None:
    """Write the notebooks, or with ``--check`` say which are out of date."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if one is out of date")
    if not parser.parse_args().check:
        write()
    elif out_of_date := stale():
        sys.exit(f"out of date: {', '.join(out_of_date)}; run make update")


if __name__ == "__main__":
    main()
