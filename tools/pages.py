"""lessons/name.py -> docs/lessons/name.md, with what each cell prints and draws: ``python -m tools.pages``.

``executed.py`` executes the lessons; an error anywhere stops the build. The pages are plain Markdown with images beside
them, so that any site engine can take them; MkDocs, whose theme Material ends in 2027, calls this file as a hook.
"""

import base64
import hashlib
import html
import itertools
import json
import re
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import MarkdownExporter
from nbconvert.preprocessors import Preprocessor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # MkDocs loads this file by its path

from cria_tricks import recipes
from cria_tricks.bill.bill import Bill
from cria_tricks.course.drawing import DARK, LIGHT
from cria_tricks.course.notebook import NO_GUESS, PREDICTION
from cria_tricks.hardware import T4
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.settings import Tricks
from tools import browser_python, heat, made_of, notebooks, techniques
from tools.executed import LessonError, execute, key, plain
from tools.figures import picture, with_blocks
from tools.fit import page as fit_page

ROOT = notebooks.ROOT
PAGES = ROOT / "docs" / "lessons"
COLUMNS = 88
"""The width of code and of what it prints; a page shows so many columns without scrolling."""
STAMP = "sources.txt"
"""The file of a built site that holds the hash of what it was made of."""
MADE_HERE = (PAGES, browser_python.HERE)

FIGURES = {LIGHT: "light", DARK: "dark"}
"""The ends of a figure's files, by the MIME types under which a cell shows it."""
HEADING = re.compile("^## ", re.M)
NUMBER = re.compile(r"<td>(?=[-+−]?[\d.,]+(?: to [\d.,]+)?(?: (?:[KMG]i?B|%|s|min))?</td>)")
"""The start of a cell that holds a number, with its unit or as a range, which a phone would break in two."""
KEPT = re.compile(
    r"\s*(\||\$|cria |torchrun |hf |uv |pip |python )|\s*(#|import |from |\w+ = )|.*  # |\s*\S.*? {2,}\S.*? {2,}\S"
)
"""Printed lines that are not broken: tables and commands, code, and columns."""
FOLDS, ENDS = "folds", "ends"
"""In the metadata of the first and of the last cell of a part that is folded."""
ANSWERS, ASKS = "answers", "asks"
"""Where in a cell's metadata is which guess it answers, and what a form asks: its answer, which comes later."""
NO_PROSE = re.compile(r"(<(pre|code|script|style|svg|textarea)\b.*?</\2>|\\\(.*?\\\)|\\\[.*?\\\]|<[^>]*>)", re.DOTALL)
"""What is not prose on a page: code, pictures, formulas, and the tags themselves."""
UNIT = re.compile(r"(?<=\d)\s(?=(?:%|[KMGT]i?B|B|ms|s)(?!\w)|[x×·]\s\d)|(?<=\d\s[x×·])\s(?=\d)")
"""The space between a number and its unit, or around the sign between two numbers."""


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
        elif _asks(cell):
            cell = nbformat.v4.new_markdown_cell(_field(cell, self.stem))
        elif cell.cell_type == "code":
            parts = [part for output in cell.outputs if (part := self._output(output, resources))]
            if notebooks.FOLDED in tags:
                code = _fence(cell.source.removeprefix(notebooks.title_line(cell)), "python")
                title = html.escape(cell.metadata["title"])
                code = f'<details class="code" markdown="1"><summary>{title}</summary>\n\n{code}\n\n</details>'
            else:
                code = _fence(cell.source, "python")
            cell = nbformat.v4.new_markdown_cell("\n\n".join([code, *parts]), metadata=cell.metadata)
        if place := cell.metadata.get(ANSWERS):
            cell.source = f'<div class="answer" data-of="{place}" markdown="1">\n\n{cell.source}\n\n</div>'
        if cell.metadata.get(FOLDS):
            heading, _, rest = cell.source.partition("\n")
            title = heading.removeprefix("### ")
            cell.source = (
                f'<details class="deep" markdown="1"><summary markdown="span">{title}</summary>\n\n{rest.strip()}'
            )
        if cell.metadata.get(ENDS):
            cell.source += "\n\n</details>"
        return cell, resources

    def _output(self, output: Any, resources: Any) -> str:
        if output.output_type == "stream":
            text = _narrow(plain(output.text))
            return _fence(text, f"{{ .text .no-copy .output .{output.name} }}") if text.strip() else ""
        if output.output_type == "error":
            raise LessonError(f"lessons/{self.stem}.py: {output.ename}: {output.evalue}")
        if output.output_type == "execute_result":
            raise LessonError(f"lessons/{self.stem}.py: a cell's last line has a value nobody asked for: {output.data}")
        if PREDICTION in output.data:
            return _fence(output.data["text/plain"], "{ .text .no-copy .output .stdout }")
        if "text/markdown" in output.data:
            return str(output.data["text/markdown"])
        return self._figure(output.data, resources)

    def _figure(self, data: Any, resources: Any) -> str:
        self.figures += 1
        name = f"{self.stem}-{self.figures}"
        for mime, mode in FIGURES.items():
            if mime in data:
                resources.setdefault("outputs", {})[f"{name}-{mode}.svg"] = data[mime].encode()
        says = html.escape(data["text/plain"])
        return f"<figure>{picture(name, says)}<figcaption>{says}</figcaption></figure>"


def page(lesson: Path, book: nbformat.NotebookNode) -> tuple[str, dict[str, bytes]]:
    """A lesson's page, and the files beside it."""
    resources: dict[str, Any] = {}
    installing = {notebooks.install_cell(extra) for extra in ("", *notebooks.PROJECT["optional-dependencies"])}
    book.cells = [cell for cell in book.cells[1:] if cell.source not in installing]  # nor the badge
    join_predictions(book.cells, lesson.stem)
    mark_deep(book.cells)
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


def mark_deep(cells: list[Any]) -> None:
    """Note at both ends of each part that a first reading leaves out that it is folded there."""
    for part in notebooks.deep(cells):
        part[0].metadata[FOLDS], part[-1].metadata[ENDS] = True, True


def join_predictions(cells: list[Any], stem: str) -> None:
    """Give each form that takes a guess its answer, and note which cells the page hides until the reader has guessed.

    The cell that answers is hidden, and with it what is said of the answer: a text between the form and this cell, and
    the text behind it, up to a heading.
    """
    asked = [number for number, cell in enumerate(cells) if _asks(cell)]
    answers = [(number, data) for number, cell in enumerate(cells) for data in _answers(cell)]
    if len(asked) != len(answers) or any(form > answer for form, (answer, _) in zip(asked, answers, strict=True)):
        raise LessonError(f"lessons/{stem}.py: {len(asked)} guesses and {len(answers)} answers, or not in this order")
    # From the last to the first, because a text that is cut in two moves the cells behind it.
    for count, (form, (answer, data)) in reversed([*enumerate(zip(asked, answers, strict=True), 1)]):
        cells[form].metadata[ASKS] = {"number": count, **data}
        between = cells[form + 1 : answer]
        near = all(cell.cell_type == "markdown" and not HEADING.search(cell.source) for cell in between)
        for cell in [*(between if near else []), cells[answer], *_said_of(cells, answer)]:
            cell.metadata[ANSWERS] = f"guess-{count}"


def _said_of(cells: list[Any], answer: int) -> list[Any]:
    """The text behind an answer, cut off before its first heading; none where this text asks for the next guess.

    A part that is folded says something of its own.
    """
    after = cells[answer + 1 : answer + 3]
    if not after or after[0].cell_type != "markdown" or any(map(_asks, after)):
        return []
    if notebooks.DEEP in after[0].metadata.get("tags", []):
        return []
    if heading := HEADING.search(after[0].source):
        says, rest = after[0].source[: heading.start()].strip(), after[0].source[heading.start() :]
        both = [nbformat.v4.new_markdown_cell(text) for text in (says, rest)] if says else after[:1]
        cells[answer + 1 : answer + 2] = both
        return both[:1] if says else []
    return after[:1]


def _asks(cell: Any) -> bool:
    """Whether a cell is a form that takes a guess."""
    return notebooks.PREDICT in cell.metadata.get("tags", [])


def _answers(cell: Any) -> list[dict[str, Any]]:
    """What the calls of ``course.reveal`` in a cell hand over."""
    return [output.data[PREDICTION] for output in cell.get("outputs", ()) if PREDICTION in output.get("data", {})]


def _field(cell: Any, stem: str) -> str:
    """The place of a field for a guess; docs/assets/predictions.js fills it, and without it there is nothing to see."""
    asks = dict(cell.metadata[ASKS])
    number = asks.pop("number")
    if choices := re.search(r"# @param (\[.*\])", cell.source):
        asks["choices"] = [choice for choice in json.loads(choices[1]) if choice != NO_GUESS]
    packed = base64.b64encode(json.dumps(asks).encode()).decode()  # so that nobody reads the answer by accident
    label = html.escape(cell.metadata["title"])
    key = f'id="guess-{number}" data-key="{stem}-{number}"'
    return f'<div class="predict" {key} data-label="{label}" data-of="{packed}" hidden></div>'


def build() -> None:
    """Execute what has changed, two at a time, and write all pages."""
    fill_map()
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
    """What each switch of the capstone takes off each group of lines, and off the peak, in MiB, as an HTML table."""
    capstone = recipes.capstone(T4)
    ladder_steps = toggles.ladder(toggles.Target(find_shape(capstone.model), T4), capstone)
    choice = {step.set[0].partition("=")[0]: "" for step in ladder_steps[1:]}
    choice = {name: str(getattr(Tricks(), name)).lower() for name in choice}  # nothing is on
    changes = []
    for before, after in itertools.pairwise(ladder_steps):
        name, _, choice[name] = after.set[0].partition("=")
        old, new = _largest(before.memory), _largest(after.memory)
        found = {name: (new[name] - old[name]) / 2**20 for name in old}
        changes.append(heat.Row(after.set[0], dict(choice), found))
    return heat.matrix({name: size / 2**20 for name, size in _largest(ladder_steps[0].memory).items()}, changes)


def _largest(memory: Bill) -> dict[str, int]:
    """Each group at the moment of the training step when it is largest; and the peak."""
    memory = memory.training
    starts = ("batch", *itertools.chain(*GROUPS.values()))
    assert all(line.name.startswith(starts) for moment in memory.moments for line in moment.lines)
    found = {
        group: max(sum(line.bytes for line in moment.lines if line.name.startswith(names)) for moment in memory.moments)
        for group, names in GROUPS.items()
    }
    return {"peak": memory.peak_bytes} | found


def fill_map() -> None:
    """Write the map's table into its page."""
    path = ROOT / "docs" / "map.md"
    text = with_blocks(path.read_text(encoding="utf-8"), {"map": the_map()})
    if text != path.read_text(encoding="utf-8"):
        path.write_text(text, encoding="utf-8")


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

    missing = browser_python.put()
    if missing:
        print(f"site: {missing}", file=sys.stderr)
    config.extra["no_python"] = missing
    try:
        build()
    except LessonError as error:
        raise PluginError(str(error)) from None


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """MkDocs: the form of "Will it fit?", with its first answer; and a number stays on one line with its unit."""
    if page.file.src_uri == "fit.md":
        return fit_page.put_in(html, config.extra["no_python"])
    parts = NO_PROSE.split(NUMBER.sub('<td class="unit">', html))  # prose, what is none, its tag, prose, ...
    parts[::3] = [UNIT.sub("\N{NO-BREAK SPACE}", words) for words in parts[::3]]
    del parts[2::3]
    return "".join(parts)


def on_post_build(config: Any) -> None:
    """MkDocs: note what the site was made of, now that it is whole."""
    (Path(config.site_dir) / STAMP).write_text(sources(), encoding="utf-8")


def sources() -> str:
    """A hash that changes with whatever changes the site: text, lessons, package, results, tools and libraries."""
    found = hashlib.sha256(f"{key('')} {made_of.digest([made_of.EVERYTHING], lines=True)}".encode())
    folders = (ROOT / name for name in ("docs", "lessons", "tools"))
    files = [path for folder in folders for path in folder.rglob("*") if not set(MADE_HERE) & set(path.parents)]
    for path in sorted([*files, ROOT / "mkdocs.yml", ROOT / "pyproject.toml"]):
        name = path.relative_to(ROOT)
        # Python and ruff keep caches beside what they read.
        if path.is_file() and not any(part == "__pycache__" or part.startswith(".") for part in name.parts):
            found.update(f"{name}\n".encode() + path.read_bytes())
    return found.hexdigest()


def _markdown(source: str) -> str:
    """Links as they are from a page of the site, and Markdown inside of what folds."""
    source = re.sub(re.escape(notebooks.colab_address("@")).replace("@", r"(\w+)") + r"(#[\w-]+)?", r"\1.md\2", source)
    source = re.sub(re.escape(notebooks.SITE) + r"([\w/]+)\.html", r"../\1.md", source)
    return source.replace("<details>", '<details markdown="1">')


def _narrow(text: str) -> str:
    """Break what a cell printed where a line is wider than the page; tables, commands and code stay as they are."""
    lines = []
    for line in text.splitlines():
        indent = re.match(" *", line)[0] + "    "  # type: ignore[index]
        keep = len(line) <= COLUMNS or KEPT.match(line)
        lines += [line] if keep else textwrap.wrap(
            line, COLUMNS, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )  # fmt: skip
    return "\n".join(lines)


def _fence(text: str, kind: str) -> str:
    ticks = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{ticks} {kind}\n{text.rstrip()}\n{ticks}"


if __name__ == "__main__":
    build()
