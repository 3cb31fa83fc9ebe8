"""``cria_tricks`` from Python: what the command line answers, typed, from any form of a recipe."""

import doctest
import importlib
import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest

import cria_tricks
from cria_tricks.common import version
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4, Device
from cria_tricks.hardware.cards import RENTED
from cria_tricks.recipe import with_settings
from cria_tricks.run import api

PACKAGE = Path(cria_tricks.__file__).parent
EXAMPLES = ("run.api", "models.catalogue", "common.errors", "common.fields", "common.fields", "recipe", "recipes")


def forms(tmp_path: Path) -> list:
    """The recipe for a T4 in each form that is taken."""
    recipe = cria_tricks.recipes.kwanzaa(T4)
    path = tmp_path / "mine.toml"
    path.write_text(recipe.to_toml())
    return [recipe, "kwanzaa", "Kwanzaa", path, str(path)]


def test_a_plan_is_what_the_command_prints(run_cria):
    options = ("--rows", "107", "--longest", "--nproc", "2", "--set", "lr=1e-3", "--model", "smollm2")
    code, stdout, stderr = run_cria("plan", "kwanzaa", "--gpu", "t4", *options, "--json")
    assert (code, stderr) == (0, "")
    more = {"rows": 107, "longest": True, "nproc": 2, "settings": ["lr=1e-3"], "model": "smollm2"}
    assert json.loads(stdout) == cria_tricks.plan("kwanzaa", gpu="t4", **more).to_dict()
    answer = cria_tricks.plan("kwanzaa", gpu="t4")
    *shown, empty, more = (line.rstrip() for line in run_cria("plan", "kwanzaa", "--gpu", "t4")[1].splitlines())
    assert "\n".join(shown) == str(answer)
    assert (empty, more.partition(":")[0]) == ("", "more")
    assert (answer.front, answer.longest, answer.prices) == (None, None, None)
    assert cria_tricks.plan("kwanzaa", gpu="t4", model="llama-3.1-70b").fits is False


def test_a_plan_reads_like_data_and_like_text(capsys):
    answer = cria_tricks.plan("kwanzaa", gpu="t4", rows=107)
    assert sum(line.bytes for line in answer.lines) == answer.peak_bytes
    assert sum(line.bytes for line in answer.lines + answer.around) == answer.needed_bytes <= answer.capacity_bytes
    assert answer.fits
    assert answer.ladder[-1].peak_bytes == answer.peak_bytes
    assert {price.flavor for price in answer.prices} == {"t4-small", "t4-medium"}
    said = str(answer)
    assert repr(answer) == said
    assert "fits: needs" in said
    assert all(f"{line.name} " in said and line.why in said for line in answer.lines)
    assert "The ladder" not in said
    assert "\x1b" not in said, "no colours, so that it can be written into a file"
    answer.show(toggles=True, ladder=True)
    whole = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    assert said.splitlines()[:25] == whole.splitlines()[:25]
    assert all(title in whole for title in ("The ladder", "Each switch alone", "What you would lose"))


def test_every_form_of_a_recipe_gives_the_same(tmp_path):
    first, *others = [cria_tricks.plan(form, gpu="t4") for form in forms(tmp_path)]
    assert all(other == first for other in others)
    first, *others = [cria_tricks.estimate(form, gpu="t4") for form in forms(tmp_path)]
    assert all(other == first for other in others)


@pytest.mark.parametrize("gpu", ["t4", "T4", T4])
def test_a_card_is_a_name_in_any_case_or_a_device(gpu):
    assert cria_tricks.plan("smoke", gpu=gpu).gpu == T4.name


def test_without_a_card_the_machines_own_is_taken_or_a_t4(monkeypatch):
    assert cria_tricks.plan("smoke").gpu == T4.name
    monkeypatch.setattr(api, "this_device", lambda: RENTED["l4"].device)
    assert cria_tricks.plan("smoke").gpu == RENTED["l4"].device.name
    assert cria_tricks.estimate("smoke").step.device == RENTED["l4"].device


def test_a_card_that_is_on_no_list_has_a_bill_and_no_time():
    card = Device("cuda", "RTX 3060", (8, 6), real_bf16=True, memory_bytes=12 * 2**30)
    answer = cria_tricks.plan("kwanzaa", gpu=card)
    assert (answer.gpu, answer.capacity_bytes, answer.seconds_per_step) == ("RTX 3060", 12 * 2**30, None)
    assert answer.fits
    assert "RTX 3060" in str(answer)


@pytest.mark.parametrize("settings", ["seq=512", ["seq=512"], ("data.max_length=512",)])
def test_settings_are_those_of_the_command_line(settings):
    answer = cria_tricks.plan("kwanzaa", gpu="t4", settings=settings)
    assert answer.tokens == 512
    memory = cria_tricks.estimate("kwanzaa", gpu="t4", settings=settings)
    assert (memory.step.tokens, memory.needed_bytes) == (512, answer.needed_bytes)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: cria_tricks.plan("kwanza", gpu="t4"), "did you mean kwanzaa?"),
        (lambda: cria_tricks.plan("kwanzaa", gpu="t4", rows=0), "must be a whole number above 0"),
        (lambda: cria_tricks.plan("kwanzaa", gpu="t4", nproc=0), "nproc=0: must be a whole number above 0"),
        (lambda: cria_tricks.estimate("kwanzaa", gpu="t4", settings=["lr=fast"]), "train.learning_rate = 'fast'"),
        (lambda: cria_tricks.train("smok"), "did you mean smoke?"),
    ],
)
def test_what_is_wrong_is_one_line(call, said):
    with pytest.raises(BadInput) as caught:
        call()
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_train_takes_every_form_of_a_recipe(tmp_path, monkeypatch):
    """With which recipe a job is opened; the run itself is tested from an installed wheel."""
    opened = []

    def refuse(*words):
        opened.append(words)
        raise BadInput("seen")

    monkeypatch.setattr("cria_tricks.run.job.opened", refuse)
    for module in ("recipes", "run.on_this_machine"):
        monkeypatch.setattr(f"cria_tricks.{module}.this_device", lambda: T4)
    monkeypatch.setattr("cria_tricks.run.given.training", lambda *words: None)  # the rows and the model are not here
    for form in forms(tmp_path):
        with pytest.raises(BadInput, match="seen"):
            cria_tricks.train(form, "out", settings=["steps=3"], resume=True)
    wanted = with_settings(cria_tricks.recipes.kwanzaa(T4), ["train.max_steps=3"])
    assert opened == [(wanted, "out", True, False, None)] * len(forms(tmp_path))


def test_the_package_is_light_until_it_is_asked():
    code = (
        "import sys, cria_tricks; cria_tricks.train, cria_tricks.plan, cria_tricks.estimate;"
        "print({'torch', 'transformers', 'peft', 'numpy', 'rich', 'datasets'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_no_module_takes_the_place_of_a_function():
    """Importing a module ``cria_tricks.plan`` would set the name ``plan`` of the package to it."""
    for name in cria_tricks.__all__:
        if name != "recipes":
            assert not (PACKAGE / f"{name}.py").exists()
            assert not (PACKAGE / name).exists()
    importlib.import_module("cria_tricks.step_plan")
    assert all(callable(function) for function in (cria_tricks.plan, cria_tricks.train, cria_tricks.estimate))


def test_the_version_is_the_installed_one_or_says_that_it_is_not_known(monkeypatch, run_cria):
    assert cria_tricks.__version__ == importlib.metadata.version("cria_tricks")
    assert run_cria("--version") == (0, f"cria_tricks {cria_tricks.__version__}\n", "")

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    assert importlib.reload(version).__version__ == "0+unknown"
    monkeypatch.undo()
    assert importlib.reload(version).__version__ == cria_tricks.__version__


@pytest.mark.parametrize("name", ["", *EXAMPLES])
def test_the_examples_in_docstrings_are_so(name):
    module = importlib.import_module(f"cria_tricks.{name}".rstrip("."))
    failed, tried = doctest.testmod(module)
    assert tried > 0
    assert failed == 0
