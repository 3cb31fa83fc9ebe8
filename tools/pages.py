"""lessons/NN_name.py -> docs/lessons/NN_name.md, with what each cell prints and draws: ``python -m tools.pages``.

``executed.py`` executes the lessons; an error anywhere stops the build. The pages are plain Markdown with images beside
them, so that any site engine can take them; MkDocs, whose theme Material ends in 2027, calls this file as a hook.
"""

import hashlib
import html
import itertools
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import Preprocessor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # MkDocs loads this file by its path

from benchmarks.plot import with_blocks
from cria_tricks import recipes
from cria_tricks.bench import style
from cria_tricks.bill.bill import Bill
from cria_tricks.course import DARK, LIGHT
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.settings import Tricks
from tools import fit, heat, notebooks, techniques
from tools.executed import KEPT, LessonError, execute, key, plain

ROOT = notebooks.ROOT
PAGES = ROOT / "docs" / "lessons"
STAMP = "sources.txt"
"""The file of a built site that holds the hash of what it was made of."""
MADE_HERE = (PAGES, fit.HERE)


class ForTheSite(Preprocessor):
    """Outputs as Markdown: texts in fences, figures as files of their own, one for each mode of the page."""

    def __init__(self, stem: str):
        super().__init__()
        self.stem, self.figures = stem, 0

    def preprocess_cell(self, cell: Any, resources: Any, index: int) -> Any:
        """Turn one cell into what the page shows of it."""
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            cell.source = _markdown(cell.source)
        elif cell.cell_type == "code":
            parts = [part for output in cell.outputs if (part := self._output(output, resources))]
            code = _fence(cell.source.removeprefix(notebooks.FOLDED), "python")
            if "hide-input" in tags:
                code = f'<details class="code" markdown="1"><summary>Code</summary>\n\n{code}\n\n</details>'
            cell = nbformat.v4.new_markdown_cell("\n\n".join([code, *parts]))
        return cell, resources

    def _output(self, output: Any, resources: Any) -> str:
        if output.output_type == "stream":
            text = plain(output.text)
            return _fence(text, f"{{ .text .no-copy .output .{output.name} }}") if text.strip() else ""
        if output.output_type == "error":
            raise LessonError(f"lessons/{self.stem}.py: {output.ename}: {output.evalue}")
        if output.output_type == "execute_result":
            raise LessonError(f"lessons/{self.stem}.py: a cell's last line has a value nobody asked for: {output.data}")
        return self._figure(output.data, resources)

    def _figure(self, data: Any, resources: Any) -> str:
        self.figures += 1
        name = f"{self.stem}-{self.figures}"
        for mime, mode in ((LIGHT, "light"), (DARK, "dark")):
            resources.setdefault("outputs", {})[f"{name}-{mode}.svg"] = data[mime].encode()
        says = html.escape(data["text/plain"])
        return f"<figure>{style.picture(name, says)}<figcaption>{says}</figcaption></figure>"


def page(lesson: Path, book: nbformat.NotebookNode) -> tuple[str, dict[str, bytes]]:
    """A lesson's page, and the files beside it."""
    resources: dict[str, Any] = {}
    book.cells = [cell for cell in book.cells[1:] if cell.source != notebooks.INSTALL]  # nor the badge
    book, resources = ForTheSite(lesson.stem).preprocess(book, resources)
    text, resources = MarkdownExporter().from_notebook_node(book, resources)
    preset = techniques.preset(lesson.stem)
    bar = (
        f'<p class="bar"><a href="{notebooks.colab_address(lesson.stem)}">Open in Colab</a> '
        f'<a href="{notebooks.REPOSITORY}/blob/{notebooks.BRANCH}/lessons/{lesson.name}">Source</a> '
        f'<a href="../fit.html{preset and "#"}{preset}">Will it fit?</a> <a href="../glossary.html">Glossary</a></p>'
    )
    text = re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
    return re.sub(r"\A(# .*\n)", lambda title: f"{title[1]}\n{bar}\n\n", text, count=1), resources.get("outputs", {})


def build() -> None:
    """Execute what has changed, two at a time, and write all pages."""
    fill_map()
    tabulate()
    lessons = notebooks.lessons()
    with ThreadPoolExecutor(2) as pool:
        books = list(pool.map(execute, lessons))
    wanted: dict[str, bytes] = {}
    for lesson, book in zip(lessons, books, strict=True):
        text, files = page(lesson, book)
        wanted |= {f"{lesson.stem}.md": text.encode(), **files}
    for path in PAGES.glob("*"):
        if path.name not in wanted:
            path.unlink()
    for name, content in wanted.items():
        path = PAGES / name
        if not path.exists() or path.read_bytes() != content:  # else `make serve` would build for ever
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


GROUPS = {
    "weights": ("weights:",),
    "gradients": ("gradients", "embedding", "head"),
    "optimizer states": ("optimizer",),
    "saved activations, open block": ("saved", "open block"),
    "logits and loss": ("final norm", "16-bit", "hidden states", "logits", "capped"),
}
"""The lines of a bill that the map tells apart, by how their names begin."""


def the_map() -> str:
    """What each toggle of the capstone takes off each group of lines, and off the peak, in MiB, as an HTML table."""
    capstone = recipes.capstone(T4)
    rungs = toggles.ladder(toggles.Target(find_shape(capstone.model), T4), capstone)
    choice = {rung.set[0].partition("=")[0]: "" for rung in rungs[1:]}
    choice = {name: str(getattr(Tricks(), name)).lower() for name in choice}  # nothing is on
    changes = []
    for before, after in itertools.pairwise(rungs):
        name, _, choice[name] = after.set[0].partition("=")
        old, new = _largest(before.memory), _largest(after.memory)
        found = {name: (new[name] - old[name]) / 2**20 for name in old}
        changes.append(heat.Row(after.set[0], dict(choice), found))
    return heat.matrix((*GROUPS, "peak"), changes)


def _largest(memory: Bill) -> dict[str, int]:
    """Each group at the moment of the step when it is largest; and the peak."""
    starts = ("batch", *itertools.chain(*GROUPS.values()))
    assert all(line.name.startswith(starts) for moment in memory.moments for line in moment.lines)
    found = {
        group: max(sum(line.bytes for line in moment.lines if line.name.startswith(names)) for moment in memory.moments)
        for group, names in GROUPS.items()
    }
    return found | {"peak": memory.peak_bytes}


def fill_map() -> None:
    """Write the map's table into its page."""
    path = ROOT / "docs" / "map.md"
    text = with_blocks(path.read_text(encoding="utf-8"), {"map": the_map()})
    if text != path.read_text(encoding="utf-8"):
        path.write_text(text, encoding="utf-8")


def tabulate() -> None:
    """Write the tables of "Will it fit?", unless they are there and nothing has changed since."""
    kept = KEPT.parent / "fit" / key(Path(fit.__file__).read_text(encoding="utf-8") + str(fit.MODELS))
    if kept.exists() and (fit.HERE / "index.js").exists():
        return
    subprocess.run([sys.executable, "-m", "tools.fit"], cwd=ROOT, check=True)
    shutil.rmtree(kept.parent, ignore_errors=True)
    kept.parent.mkdir(parents=True)
    kept.touch()


def on_config(config: Any) -> Any:
    """MkDocs: the addresses, which stand in pyproject.toml alone."""
    urls = notebooks.PROJECT["urls"]
    config.site_url = urls["Documentation"]
    config.repo_url = urls["Repository"]
    config.extra["social"] = [{"icon": "fontawesome/brands/github", "link": urls["Repository"], "name": "Source"}]
    return config


def on_pre_build(config: Any) -> None:
    """MkDocs: the lessons' pages, before it looks for pages."""
    from mkdocs.exceptions import PluginError

    try:
        build()
    except LessonError as error:
        raise PluginError(str(error)) from None


def on_post_build(config: Any) -> None:
    """MkDocs: note what the site was made of, now that it is whole."""
    (Path(config.site_dir) / STAMP).write_text(sources(), encoding="utf-8")


def sources() -> str:
    """A hash that changes with whatever changes the site: text, lessons, package, results, tools and libraries."""
    found = hashlib.sha256(key("").encode())
    folders = (ROOT / name for name in ("docs", "lessons", "tools"))
    files = [path for folder in folders for path in folder.rglob("*") if not set(MADE_HERE) & set(path.parents)]
    for path in sorted([*files, ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]):
        if path.is_file() and "__pycache__" not in path.parts:
            found.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return found.hexdigest()


def _markdown(source: str) -> str:
    """Links as they are from a page of the site, and Markdown inside of what folds."""
    source = re.sub(
        re.escape(notebooks.colab_address("@")).replace("@", r"(\d\d_\w+)") + r"(#[\w-]+)?", r"\1.md\2", source
    )
    source = re.sub(re.escape(notebooks.SITE) + r"([\w/]+)\.html", r"../\1.md", source)
    return source.replace("<details>", '<details markdown="1">')


def _fence(text: str, kind: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{ticks} {kind}\n{text.rstrip()}\n{ticks}"


if __name__ == "__main__":
    build()
