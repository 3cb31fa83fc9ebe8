"""The notebook "Two cards": in a kernel on two gloo processes (``make two-cards`` shows it), and what cards change."""

import os
import tempfile
from pathlib import Path

import jupytext
import nbformat
import pytest
import torch

import cria_tricks
from cria_tricks.course.processes import Ranks
from cria_tricks.recipe import Recipe, with_settings
from tests.drills import two_cards as drill
from tests.sweeps import ALL
from tools import notebooks

SCRIPT = notebooks.NOTEBOOKS / "two_cards.py"


FORKED = "from tests.warm import ranks; from cria_tricks.course.processes import Ranks; Ranks._begin = ranks"
"""Its processes need not import the libraries again; ``make two-cards`` starts them anew."""


def test_on_two_gloo_processes_it_prints_what_must_hold(warm, tmp_path):
    """Three trainings of an adapter and three of all weights, evaluated on one row, in processes that start once."""
    if ALL:
        drill.check(drill.executed())
        return
    rows = Path(cria_tricks.__file__).with_name("data") / "nguzo_saba_eval.jsonl"
    (tmp_path / "one.jsonl").write_text(rows.read_text().splitlines(keepends=True)[0])
    drill.check(drill.executed(FORKED, f"data.eval={tmp_path / 'one.jsonl'}"))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "This session has no card.\nIn Kaggle: Settings -> Accelerator -> GPU T4 x2."),
        (["Tesla P100-PCIE-16GB"], "This session has one card, Tesla P100-PCIE-16GB.\nIn Kaggle: Settings"),
        (["Tesla T4"] * 2, "Two cards: Tesla T4 and Tesla T4. Each gets a process"),
    ],
)
def test_the_first_cell_says_in_plain_words_what_cards_there_are(monkeypatch, capsys, names, said):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda number: names[number])
    cell = next(cell for cell in jupytext.read(SCRIPT, fmt="py:percent").cells if cell.cell_type == "code")
    found = {}
    exec(cell.source, found)
    assert found["TWO"] == (len(names) == 2)
    assert capsys.readouterr().out.startswith(said)


def test_it_opens_in_kaggle_and_no_other_notebook_does():
    for script in notebooks.scripts():
        badge = nbformat.reads(notebooks.make(script), as_version=4).cells[0].source
        address = f"(https://kaggle.com/kernels/welcome?src={notebooks.REPOSITORY}/blob/{notebooks.TAG}/notebooks/"
        assert (f"{address}{script.stem}.ipynb)" in badge) == (script == SCRIPT)


@pytest.mark.parametrize(("visible", "cards"), [(None, ["0", "1"]), ("2,5", ["2", "5"])])
def test_with_cards_each_process_is_started_by_itself_and_sees_one(monkeypatch, visible, cards):
    """A process that has looked for a GPU cannot be forked."""
    started = []

    class Started:
        def __init__(self, words, env, **more):
            started.append((words[-2:], env))

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr("cria_tricks.course.processes.subprocess.Popen", Started)
    Ranks(2, cards=True)
    assert [words[0] for words, _ in started] == ["--alone", "--alone"]
    assert [env["CUDA_VISIBLE_DEVICES"] for _, env in started] == cards
    assert [(env["RANK"], env["LOCAL_RANK"], env["WORLD_SIZE"]) for _, env in started] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert started[0][1]["MASTER_PORT"] == started[1][1]["MASTER_PORT"]
    assert os.environ.get("RANK") is None


@pytest.fixture
def cell() -> dict:
    """The functions by which the notebook trains and prints."""
    found = {"tempfile": tempfile, "Path": Path, "with_settings": with_settings}
    source = next(
        cell.source for cell in jupytext.read(SCRIPT, fmt="py:percent").cells if "def train_here" in cell.source
    )
    exec(source, found)
    return found


def test_a_failure_in_a_process_is_one_line_in_the_notebook(cell):
    class Failing:
        def run(self, *arguments):
            trace = "Traceback (most recent call last):\n  File ...\n"
            raise RuntimeError(f"process 0: {trace}cria_tricks.common.errors.OutOfMemory: out of memory\n")

    with pytest.raises(RuntimeError, match=r"^OutOfMemory: out of memory$"):
        cell["train"](Failing(), Recipe())


def test_losses_are_compared_step_by_step_and_a_missing_prediction_is_a_dash(cell, capsys):
    assert cell["apart"]({"losses": [4.0, 2.0]}, {"losses": [4.0, 2.5]}) == pytest.approx(0.2)
    cell["print_line"]("MB", None, None, 1234.5)
    said = capsys.readouterr().out.split()
    assert said == ["MB", "your", "guess", "-", "predicted", "-", "measured", "1,234.50"]
