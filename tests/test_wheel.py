"""What a user gets with pip: an environment that holds the wheel and the libraries, and no checkout."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import cria_tricks

ROWS = Path(cria_tricks.__file__).parent / "data" / "nguzo_saba_eval.jsonl"

USE = """
import json, sys
import cria_tricks as c

answer = c.plan("kwanzaa", gpu="t4", rows=107)
rows = [f"data.train={sys.argv[1]}", f"data.eval={sys.argv[1]}"]
settings = [*rows, "model=random:tiny", "steps=1", "seq=320", "rank=2"]
report = c.train("smoke", "run", settings=settings)
made = json.load(open("run/adapter/provenance.json"))
print(json.dumps({
    "file": c.__file__, "version": c.__version__, "plan": answer.to_dict(), "shown": repr(answer),
    "needed": c.estimate("kwanzaa", gpu="t4").needed_bytes, "report": report, "package": made["package"],
}))
"""

TYPED = """
import cria_tricks

answer = cria_tricks.plan("kwanzaa", gpu="t4", rows=107)
reveal_type(answer.needed_bytes)
reveal_type(answer.lines[0].why)
reveal_type(cria_tricks.train("smoke", resume=True))
reveal_type(cria_tricks.estimate("kwanzaa").fits)
reveal_type(cria_tricks.__version__)
reveal_type(cria_tricks.recipes.smoke().train.learning_rate)
cria_tricks.plan("kwanzaa", gpu=4)
cria_tricks.train("smoke", resumes=True)
answer.needed_bytes = 3
answer.no_such_field
"""
TOLD = ["int", "str", "dict[str, Any]", "bool", "str", "float", "arg-type", "call-arg", "misc", "attr-defined"]
"""Of each line of it that follows the plan: its type, or what is wrong with it."""

SKIP = """
[mypy]
plugins = pydantic.mypy
[mypy-torch.*,transformers.*,numpy.*,rich.*,matplotlib.*]
follow_imports = skip
"""
"""mypy would read torch for a minute; what it says of our types is the same."""


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory) -> Path:
    """The interpreter of a new environment with the wheel in it, which finds the libraries of this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    interpreter = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", interpreter, "install", "--quiet", "--no-deps", wheel]
    subprocess.run(pip, check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    libraries = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib")])
    (packages / "libraries.pth").write_text("\n".join(libraries) + "\n")  # of a .pth there, none is followed
    return interpreter


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_plan_train_and_version_from_python(python, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(ROWS.read_text().splitlines(keepends=True)[:2]))
    done = run(python, "-c", USE, few, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert Path(found["file"]).is_relative_to(python.parents[1])
    here = cria_tricks.plan("kwanzaa", gpu="t4", rows=107)
    assert found["plan"] == here.to_dict()
    assert found["shown"].splitlines()[0] == repr(here).splitlines()[0]
    assert found["needed"] == here.needed_bytes
    assert found["report"]["steps"] == 1
    assert found["report"]["recipe"]["lora"]["r"] == 2
    assert found["package"] == {"commit": None, "changed": None}


def test_the_command_says_its_version(python, tmp_path):
    done = run(python.parent / "cria", "--version", folder=tmp_path)
    version = run(python, "-c", "import cria_tricks; print(cria_tricks.__version__)", folder=tmp_path).stdout
    assert (done.returncode, done.stdout, done.stderr) == (0, f"cria_tricks {version}", "")
    assert version.strip()[0].isdigit()


def test_mypy_reads_our_types(python, tmp_path):
    """PEP 561: without py.typed every name of the package would be Any."""
    (tmp_path / "use.py").write_text(TYPED)
    (tmp_path / "mypy.ini").write_text(SKIP)
    options = ["--python-executable", python, "--config-file", "mypy.ini", "--no-color-output", "--hide-error-context"]
    done = run(sys.executable, "-m", "mypy", *options, "use.py", folder=tmp_path)
    said = re.findall(r'^use\.py:\d+: (?:note: Revealed type is "(.+)"|error: .+\[(.+)\])$', done.stdout, re.M)
    assert [kind or error for kind, error in said] == TOLD, done.stdout + done.stderr
