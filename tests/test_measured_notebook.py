"""The notebook "Measure your card": each cell in this process, two steps of the ladder (`make colab-measure`: all)."""

import jupytext
import pytest

from cria_tricks.bench import accept, measured_card
from cria_tricks.course import notebook
from tests.test_sitting import OF_TIME, quick  # noqa: F401 (a fixture)
from tools import notebooks

SCRIPT = notebooks.NOTEBOOKS / "measure_your_card.py"
FEW = ("calibrate", "ladder")


@pytest.fixture
def asked(monkeypatch, run_cria):
    """What the cells call: a command runs in this process, and only a few parts of a sitting."""
    found = []

    def cria(*arguments):
        words = [str(argument) for argument in arguments]
        found.append([word for word in words if not word.startswith("/")])
        if words[0] == "doctor":
            words.append("--help")  # is tested elsewhere; here, whether there is such an option
        elif not {"--part", "--check"} & set(words):
            words += [word for part in FEW for word in ("--part", part)]
        code, stdout, stderr = run_cria(*words)
        assert code == 0 or "--check" in words, stderr
        return stdout + stderr

    monkeypatch.setattr(notebook, "cria", cria)
    return found


def test_every_cell_runs_and_goes_on_in_one_folder(quick, asked, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    names = {}
    for cell in jupytext.read(SCRIPT, fmt="py:percent").cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
    bench = ["bench", "--out", "--short"]
    assert asked == [
        ["doctor"],
        ["doctor", "--calibrate"],
        bench,
        ["bench", "--check"],
    ]
    card = measured_card.read(names["FILE"])
    assert [case.name for case in card.cases] == ["off", "ladder_peft"]
    wrong = [where for where, _ in accept.problems(card, names["FILE"])]
    assert [where for where in wrong if not any(word in where for word in OF_TIME)] == []
    assert names["FILE"].is_relative_to(tmp_path / "cria-bench")
