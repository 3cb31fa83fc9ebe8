"""A lesson's notebook as Colab has it, executed in a real kernel; once, for its page and for its test.

After the last cell the exercises are answered, where nobody sees it (``tools/exercises.py``). What came out is kept in
``build/lessons/`` until the lesson, what it used of this repository (``tools/made_of.py``) or a library changes.
"""

import functools
import hashlib
import os
import re
import subprocess
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError

from tools import made_of, notebooks

ROOT = notebooks.ROOT
KEPT = ROOT / "build" / "lessons"
WRONG = ROOT / "tests" / "wrong_answers"
SECONDS = 900
"""After which a cell is stopped: long enough that this stops a cell that hangs, and no slow cell on a busy machine."""
FOUND, JSON = "exercises", "application/json"
"""Where in a notebook's metadata is what ``exercises.answer`` found, beside the files left, and how it comes there."""
USED, LINES, STATE = "used", "lines", "state"
"""Where there is what the lesson was made of, whether it shows lines of ours by number, and the hash of all that."""


class LessonError(Exception):
    """A cell failed."""


def execute(lesson: Path) -> nbformat.NotebookNode:
    """A lesson's notebook with its outputs, from the last run if nothing has changed since.

    Raises:
        LessonError: naming the lesson, with the end of what the cell said.
    """
    before = "__import__('tools.made_of').made_of.watch()\n" + _call("begin()")
    text, after = notebooks.make(lesson), _call(f"answer(get_ipython(), {_asked(lesson)!r})")
    kept = KEPT / f"{lesson.stem}-{key(text + before + after)}.ipynb"
    if kept.exists():
        book = nbformat.read(kept, as_version=4)
        if made_of.digest(book.metadata[USED], book.metadata[LINES]) == book.metadata[STATE]:
            return book
    at_first = made_of.digest([made_of.EVERYTHING], lines=True)
    book = nbformat.reads(text, as_version=4)
    book.cells = [nbformat.v4.new_code_cell(before), *book.cells, nbformat.v4.new_code_cell(after)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"PYTHONWARNINGS": "ignore:IProgress not found"}  # tqdm's bars, without widgets
    environment |= {"HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(book, timeout=SECONDS, resources={"metadata": {"path": folder}}, coalesce_streams=True)
        try:
            client.execute(env=environment, stderr=subprocess.DEVNULL)
        except (CellExecutionError, CellTimeoutError) as error:
            raise LessonError(f"lessons/{lesson.name}: {plain(str(error))[-3000:]}") from None
        left = sorted(path.name for path in Path(folder).iterdir())
        where = [folder, sysconfig.get_path("purelib"), str(ROOT)]
    _, *book.cells, answered = book.cells
    (book.metadata[FOUND],) = (output.data[JSON] for output in answered.outputs if JSON in output.get("data", ()))
    book.metadata[FOUND]["left behind"] = left
    book.metadata[USED] = book.metadata[FOUND].pop(USED)
    book.metadata[LINES] = bool(re.search(r'\.py(:\d|", line \d)', str(book.cells)))
    book.metadata[STATE] = made_of.digest(book.metadata[USED], book.metadata[LINES])
    for cell in book.cells:
        cell.metadata.pop("execution", None)  # when it ran
        for output in cell.get("outputs", ()):
            if output.output_type == "stream":  # where it ran is nobody's business, and another place every time
                output.text = functools.reduce(lambda text, place: text.replace(f"{place}/", ""), where, output.text)
    KEPT.mkdir(parents=True, exist_ok=True)
    for old in KEPT.glob(f"{lesson.stem}-*.ipynb"):
        old.unlink()
    if made_of.digest([made_of.EVERYTHING], lines=True) == at_first:  # nobody has edited it meanwhile
        nbformat.write(book, kept)
    return book


def key(text: str) -> str:
    """Changes with a text, the tools that execute it, the libraries, and the processor that they are held to."""
    found = hashlib.sha256(text.encode())
    tools = ("executed", "exercises", "made_of", "processors")
    found.update(made_of.digest(f"tools/{name}.py" for name in tools).encode())
    for name in ("torch", "transformers", "peft", "bitsandbytes", "matplotlib"):
        found.update(f"{name} {version(name)}".encode())
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        found.update(os.environ.get(name, "").encode())
    return found.hexdigest()[:16]


def plain(text: str) -> str:
    """A text without colours."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)


def _call(code: str) -> str:
    """A cell that leaves no name in the lesson."""
    return f"__import__('tools.exercises').exercises.{code}"


def wrong_answers(lesson: Path) -> list[tuple[int, str, str]]:
    """Read the wrong answers that a lesson's checks must refuse: number of the exercise, words of its hint, code."""
    path = WRONG / lesson.name
    if not path.exists():  # a lesson without exercises
        return []
    cells = re.split(r"^# %% ", path.read_text(encoding="utf-8"), flags=re.M)[1:]
    heads = [cell.partition("\n") for cell in cells]
    return [(int(head.partition(":")[0]), head.partition(":")[2].strip(), code) for head, _, code in heads]


def exercises_of(lesson: Path) -> dict[str, Any]:
    """Read a lesson's checks, its own solutions, and wrong answers to its exercises."""
    cells = jupytext.read(lesson).cells
    solutions = [block for cell in cells if "<summary>Solution" in cell.source
                 for block in re.findall(r"```python\n(.*?)```", cell.source, re.S)]  # fmt: skip
    return {
        "checks": [cell.source for cell in cells if cell.cell_type == "code" and "course.check(" in cell.source],
        "solutions": "\n".join(solutions),
        "wrong": [[exercise, code] for exercise, _, code in wrong_answers(lesson)],
    }


def _asked(lesson: Path) -> dict[str, Any]:
    """Say what is tried after a lesson's last cell; nothing for the capstone, because its cells train."""
    return {"checks": []} if lesson.stem == "kwanzaa" else exercises_of(lesson)
