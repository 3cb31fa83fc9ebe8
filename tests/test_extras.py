"""Without the libraries of the extra ``data`` a run works, and what needs them names the extra in one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HIDDEN = """
import sys

class Without:
    "A finder that does not find the extra's libraries, as if they were not installed."

    def __init__(self, finder):
        self.finder = finder

    def __getattr__(self, name):
        return getattr(self.finder, name)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("datasketch", "py3langid"):
            return None
        return self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
COMMAND = """
import atexit
from cria_tricks.cli.main import main

atexit.register(lambda: print("torch" in sys.modules))
sys.argv = ["cria", *sys.argv[1:]]
main()
"""


def without_the_extra(code: str, *arguments: str | Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", HIDDEN + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("setting", "library"), [("data.duplicates=near", "datasketch"), ("data.language=en", "py3langid")]
)
def test_a_setting_that_needs_the_extra_is_refused_before_torch_is_imported(setting, library, tmp_path):
    done = without_the_extra(COMMAND, "train", "smoke", "--set", setting, "--out", tmp_path / "run")
    assert done.stderr == f"error: {setting} needs {library}: pip install 'cria_tricks[data]', or leave it out\n"
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert not (tmp_path / "run").exists()


STRAIGHT = """
from cria_tricks.common.errors import BadInput
from cria_tricks.data import prepare, sources
from cria_tricks.recipe import Recipe, with_settings

recipe = with_settings(Recipe(), sys.argv[1:])
rows = sources.find("nguzo_saba", "eval")
try:
    prepare.train_rows(recipe, rows, rows, None, print)
except BadInput as error:
    print(error)
"""


@pytest.mark.parametrize("setting", ["data.duplicates=near", "data.language=en"])
def test_the_function_that_uses_it_refuses_it_too(setting):
    done = without_the_extra(STRAIGHT, setting)
    assert done.stdout.endswith(": pip install 'cria_tricks[data]', or leave it out\n"), done.stderr


def test_the_guard_of_that_test_sees_torch():
    done = without_the_extra("import torch\n" + COMMAND, "--version")
    assert done.stdout.endswith("True\n")


def test_a_training_run_needs_nothing_of_the_extra(tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "Count:", "completion": " 1 2 3"}\n{"prompt": "Again:", "completion": " 3 2 1"}\n')
    settings = ["model=random:tiny", "train.max_steps=2", "data.duplicates=exact", f"data.train={few}"]
    words = [word for setting in [*settings, f"data.eval={few}"] for word in ("--set", setting)]
    done = without_the_extra(COMMAND, "train", "smoke", *words, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "adapter" / "adapter_model.safetensors").exists()
    assert (tmp_path / "run" / "report.md").exists()
