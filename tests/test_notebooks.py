"""Notebooks are made of lessons, one way, and none is out of date."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools import notebooks

LESSON = """\
# ---
# jupyter:
#   accelerator: GPU
# ---

# %% [markdown]
# # A lesson

# %% tags=["before-install"]
print("a look at the machine")

# %%
print("the rest")
"""


@pytest.fixture
def course(tmp_path, monkeypatch):
    """A course of one lesson, its notebook made."""
    monkeypatch.setattr(notebooks, "LESSONS", tmp_path / "lessons")
    monkeypatch.setattr(notebooks, "NOTEBOOKS", tmp_path / "notebooks")
    monkeypatch.setattr(notebooks.course, "LESSONS", ("one",))
    (tmp_path / "lessons").mkdir()
    (tmp_path / "lessons" / "one.py").write_text(LESSON)
    notebooks.write()
    return tmp_path


def test_no_notebook_of_ours_is_out_of_date():
    assert notebooks.lessons()
    assert notebooks.stale() == [], "run make update"


def test_a_notebook_is_out_of_date_when_its_lesson_changed_and_when_it_was_edited(course):
    lesson, book = course / "lessons" / "one.py", course / "notebooks" / "one.ipynb"
    assert notebooks.stale() == []
    lesson.write_text(LESSON.replace("the rest", "the rests"))
    assert notebooks.stale() == ["one.ipynb"]
    notebooks.write()
    assert notebooks.stale() == []
    book.write_text(book.read_text().replace("the rests", "all of it"))
    assert notebooks.stale() == ["one.ipynb"]


def test_a_missing_notebook_and_one_without_a_lesson_are_out_of_date(course):
    (course / "notebooks" / "one.ipynb").rename(course / "notebooks" / "two.ipynb")
    assert notebooks.stale() == ["one.ipynb", "two.ipynb"]
    notebooks.write()
    assert [path.name for path in (course / "notebooks").iterdir()] == ["one.ipynb"]


def test_a_script_beside_the_notebooks_is_made_into_one_too(course):
    script = course / "notebooks" / "a_tool.py"
    script.write_text(LESSON)
    assert notebooks.stale() == ["a_tool.ipynb"]
    notebooks.write()
    assert notebooks.stale() == []
    script.unlink()
    assert notebooks.stale() == ["a_tool.ipynb"]


def test_check_changes_nothing_and_ends_with_one(course, monkeypatch):
    (course / "lessons" / "one.py").write_text(LESSON + "\nprint('more')\n")
    before = (course / "notebooks" / "one.ipynb").read_bytes()
    monkeypatch.setattr(sys, "argv", ["notebooks", "--check"])
    with pytest.raises(SystemExit, match=r"out of date: one.ipynb; run make update"):
        notebooks.main()
    assert (course / "notebooks" / "one.ipynb").read_bytes() == before


def test_the_install_cell_comes_after_what_needs_no_install(course):
    book = nbformat.reads((course / "notebooks" / "one.ipynb").read_text(), as_version=4)
    badge, title, look, install, rest = [cell.source for cell in book.cells]
    assert "colab-badge.svg" in badge
    assert (title, look, rest) == ("# 0. A lesson", 'print("a look at the machine")', 'print("the rest")')
    assert install == notebooks.INSTALL


@pytest.mark.parametrize("script", notebooks.scripts(), ids=lambda path: path.stem)
def test_a_notebook_is_clean_and_opens_in_colab(script):
    book = nbformat.reads(notebooks.make(script), as_version=4)
    nbformat.validate(book)
    path = f"/blob/v{notebooks.PROJECT['version']}/notebooks/{script.stem}.ipynb"
    repository = notebooks.REPOSITORY.removeprefix("https://github.com/")
    assert f"(https://colab.research.google.com/github/{repository}{path})" in book.cells[0].source
    assert len({cell.id for cell in book.cells}) == len(book.cells)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert code
    assert not any(cell.outputs or cell.execution_count for cell in code)


@pytest.mark.parametrize("name", ["kwanzaa", "measure_your_card"])
def test_a_notebook_for_a_card_asks_colab_for_a_t4(name):
    book = nbformat.reads((notebooks.NOTEBOOKS / f"{name}.ipynb").read_text(), as_version=4)
    assert book.metadata.accelerator == "GPU"
    assert book.metadata.colab.gpuType == "T4"


def test_a_lesson_that_needs_an_extra_installs_it():
    book = nbformat.reads((notebooks.NOTEBOOKS / "data_at_scale.ipynb").read_text(), as_version=4)
    (install,) = [cell.source for cell in book.cells if "# @title Install cria_tricks" in cell.source]
    assert 'f"cria_tricks[data] @ {source}"' in install
    assert 'is None for name in ("cria_tricks", "datasketch", "py3langid")' in install
    compile(install, "install cell", "exec")
    others = [path for path in notebooks.NOTEBOOKS.glob("*.ipynb") if path.stem != "data_at_scale"]
    assert not any("cria_tricks[data]" in path.read_text() for path in others)


def test_what_is_there_with_its_extra_is_not_installed_again(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: pytest.fail("pip was called"))
    exec(notebooks.install_cell("data"), {})


def test_a_fold_without_a_title_says_what_to_write(course):
    lesson = course / "lessons" / "one.py"
    lesson.write_text(LESSON + '\n# %% tags=["hide-input"]\nhelper = 1\n')
    with pytest.raises(ValueError, match=r"no title .*Draw figure 2.*helper = 1"):
        notebooks.make(lesson)
    lesson.write_text(LESSON + '\n# %% A helper tags=["hide-input"]\nhelper = 1\n')
    assert nbformat.reads(notebooks.make(lesson), as_version=4).cells[-1].source == "# @title A helper\nhelper = 1"


def test_the_same_lesson_gives_the_same_bytes(course):
    lesson = course / "lessons" / "one.py"
    assert notebooks.make(lesson) == notebooks.make(lesson)


def test_what_is_there_is_not_installed_again(monkeypatch):
    monkeypatch.setattr(subprocess, "run", lambda *command, **options: pytest.fail("pip was called"))
    exec(notebooks.INSTALL, {})


@pytest.fixture
def pip(monkeypatch, tmp_path):
    """Runs an install cell in an empty folder where cria_tricks is missing; answers with what pip was asked for."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    def run(cell, code=0):
        asked = {}

        def installed(command, env):
            asked["words"] = command
            asked["held"] = Path(command[command.index("--constraint") + 1]).read_text().splitlines()
            assert env["GIT_TERMINAL_PROMPT"] == "0"
            return subprocess.CompletedProcess(command, code)

        monkeypatch.setattr(subprocess, "run", installed)
        exec(cell, {})
        return asked

    return run


def test_installing_holds_what_is_there_and_leaves_out_what_is_not(pip):
    asked = pip(notebooks.INSTALL.replace("bitsandbytes", "no-such-package"))
    there = [name for name in notebooks.KEPT if name != "bitsandbytes"]
    assert {"torch", "transformers", "peft", "numpy"} <= set(there)
    assert asked["held"] == [f"{name}=={importlib.metadata.version(name)}" for name in there]
    assert asked["words"][:4] == [sys.executable, "-m", "pip", "install"]
    assert "--upgrade" not in asked["words"]


def test_without_a_wheel_the_release_of_this_notebook_is_installed(pip):
    version = notebooks.PROJECT["version"]
    assert pip(notebooks.INSTALL)["words"][-1] == f"cria_tricks @ git+{notebooks.REPOSITORY}@v{version}"


def test_an_uploaded_wheel_is_installed_instead(pip, tmp_path):
    old, new = (tmp_path / f"cria_tricks-{version}-py3-none-any.whl" for version in ("0.3.0", "0.4.0"))
    for when, path in ((2, new), (1, old)):
        path.touch()
        os.utime(path, (when, when))
    assert pip(notebooks.INSTALL)["words"][-1] == f"cria_tricks @ {new.as_uri()}", "the newest of several"
    assert pip(notebooks.install_cell("data"))["words"][-1] == f"cria_tricks[data] @ {new.as_uri()}"


def test_a_wheel_in_a_data_set_of_kaggle_is_installed(pip, tmp_path):
    wheel = tmp_path / "input" / "datasets" / "mine" / "cria_tricks-0.4.0-py3-none-any.whl"
    wheel.parent.mkdir(parents=True)
    wheel.touch()
    cell = notebooks.INSTALL.replace("/kaggle/input", str(tmp_path / "input"))
    assert cell != notebooks.INSTALL
    assert pip(cell)["words"][-1] == f"cria_tricks @ {wheel.as_uri()}"


def test_a_wheel_elsewhere_is_named(pip, tmp_path):
    wheel = tmp_path / "drive" / "cria_tricks-0.4.0-py3-none-any.whl"
    wheel.parent.mkdir()
    wheel.touch()
    named = notebooks.INSTALL.replace('WHEEL = ""', f'WHEEL = "{wheel}"')
    assert pip(named)["words"][-1] == f"cria_tricks @ {wheel.as_uri()}"
    with pytest.raises(FileNotFoundError, match=r"no-such\.whl"):
        pip(notebooks.INSTALL.replace('WHEEL = ""', 'WHEEL = "no-such.whl"'))


def test_what_pip_cannot_install_stops_the_notebook(pip):
    with pytest.raises(RuntimeError, match=r"could not be installed from git\+https.*; pip says why"):
        pip(notebooks.INSTALL, code=1)


def test_every_notebook_says_that_the_repository_is_not_public_yet():
    for script in notebooks.scripts():
        assert notebooks.make(script).count("The repository is not public yet.") == 1, script


def test_every_lesson_is_in_the_list_and_every_name_of_the_list_is_a_lesson():
    files = [path.stem for path in notebooks.LESSONS.glob("*.py")]
    assert sorted(files) == sorted(notebooks.course.LESSONS)
    assert len(set(notebooks.course.LESSONS)) == len(files)


def test_no_lesson_or_notebook_hides_a_module():
    """Python looks for modules in the script's folder first, so lessons/typing.py would break every import."""
    taken = sys.stdlib_module_names | set(importlib.metadata.packages_distributions())
    names = {path.stem for folder in (notebooks.LESSONS, notebooks.NOTEBOOKS) for path in folder.glob("*.py")}
    assert not names & taken


def test_a_notebook_has_its_number_from_the_list(monkeypatch):
    lesson = notebooks.LESSONS / "nf4.py"
    for order in (("the_bill", "nf4"), ("nf4", "the_bill")):
        monkeypatch.setattr(notebooks.course, "LESSONS", order)
        title = nbformat.reads(notebooks.make(lesson), as_version=4).cells[1].source.partition("\n")[0]
        assert title == f"# {order.index('nf4')}. {notebooks.title(lesson)}"
    monkeypatch.setattr(notebooks.course, "LESSONS", ("the_bill",))
    with pytest.raises(ValueError, match=r"'nf4' is no lesson; the lessons are the_bill"):
        notebooks.make(lesson)


DEEPLY = """\
# ---
# jupyter:
#   question: Why two?
# ---

# %% [markdown]
# # A lesson

# %%
print(1)

# %% [markdown] tags=["deep"]
# ### How far it is off
# By much.

# %% tags=["deep"]
print(2)

# %% [markdown]
# ## 4. The next section
"""


def test_what_a_first_reading_leaves_out_is_collapsed(course):
    lesson = course / "lessons" / "one.py"
    lesson.write_text(DEEPLY)
    book = nbformat.reads(notebooks.make(lesson), as_version=4)
    (heading,) = [cell for cell in book.cells if cell.metadata.get("jp-MarkdownHeadingCollapsed")]
    assert heading.source == "### How far it is off\nBy much."
    assert book.metadata.colab.collapsed_sections == [heading.id]
    lesson.write_text(DEEPLY.replace("### How", "How"))
    with pytest.raises(ValueError, match=r"begins with a heading of its own .*How far it is off"):
        notebooks.make(lesson)
    lesson.write_text(DEEPLY.replace("## 4. The next section", "And so on."))
    with pytest.raises(ValueError, match=r"behind a deep part begins with a heading: 'And so on"):
        notebooks.make(lesson)
    lesson.write_text(DEEPLY.replace("# By much.", "# By much.\n#\n# ### Why"))
    with pytest.raises(ValueError, match=r"a heading inside a deep part begins a cell: '### How far"):
        notebooks.make(lesson)


def test_a_lesson_ends_with_the_next_ones_question(course, monkeypatch):
    monkeypatch.setattr(notebooks.course, "LESSONS", ("two", "one"))
    (course / "lessons" / "one.py").write_text(DEEPLY)
    (course / "lessons" / "two.py").write_text(LESSON)
    last = [nbformat.reads(notebooks.make(lesson), as_version=4).cells[-1].source for lesson in notebooks.lessons()]
    assert last == [f"**Next: [1. A lesson]({notebooks.colab_address('one')}).** Why two?", "## 4. The next section"]
