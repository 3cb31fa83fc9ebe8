"""Commands beside packages that libraries look for, and that are broken or too old: they work, or one line says which.

CI puts all stubs that nothing minds into one environment, and takes one of the others, whose six commands are six
processes. ``CRIA_ALL=1`` looks again which ones are minded, with each command, and tries each of those alone.
"""

import ast
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cria_tricks.common import packages
from cria_tricks.common.errors import BadInput
from cria_tricks.models import peft_probes
from tests import beside
from tests.beside import LOOK, looked_for
from tests.sweeps import ALL, sample

MINDED = json.loads((Path(__file__).parent / "data" / "minded_packages.json").read_text(encoding="utf-8"))
"""By the kind of stub, the packages that some command minds, as the sweep found."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A folder with a trained adapter, made beside no stubs."""
    folder = tmp_path_factory.mktemp("trained")
    done = beside.run([beside.COMMANDS["train"]], folder, folder)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("kind", beside.KINDS)
def test_every_command_works_beside_all_packages_that_none_minds(kind, tmp_path):
    """All stubs at once, all commands in one process."""
    stubs = [name for name in beside.names() if name not in MINDED[kind]]
    assert len(stubs) > 80
    done = beside.run(list(beside.COMMANDS.values()), beside.write(tmp_path / "stubs", kind, *stubs), tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]


CASES = [(kind, name) for kind in beside.KINDS for name in MINDED[kind]]


@pytest.mark.parametrize(("kind", "name"), sample(CASES, 1), ids=str)
def test_a_package_that_is_minded_is_named_in_one_line(kind, name, trained, tmp_path):
    """Under ``CRIA_ALL=1 pytest -n0 -s`` it prints the table of all packages and commands."""
    stubs = beside.write(tmp_path / "stubs", kind, name)
    for command, words in beside.COMMANDS.items():
        work = shutil.copytree(trained, tmp_path / command)
        if command == "train":
            shutil.rmtree(work / "plain")
        said = beside.error_line(beside.run([words], stubs, work))
        print(f"| {kind} | {name} | {command} | {said or 'works'} |", flush=True)
        assert not said or f" {name} " in said, command
    # What the line says to do: the package goes.
    assert f"pip uninstall -y {name}" in said or not said


@pytest.mark.skipif(not ALL, reason="an hour")
@pytest.mark.parametrize("kind", beside.KINDS)
def test_the_list_of_minded_packages_is_the_one_that_the_commands_give(kind, trained, tmp_path):
    rest = beside.names()
    for number, (command, words) in enumerate(beside.COMMANDS.items()):
        while True:
            work = shutil.copytree(trained, tmp_path / f"{number}-{len(rest)}")
            if command == "train":
                shutil.rmtree(work / "plain")
            stubs = beside.write(tmp_path / f"stubs-{number}-{len(rest)}", kind, *rest)
            said = beside.error_line(beside.run([words], stubs, work))
            if not said:
                break
            rest.remove(said.removeprefix("error: the package ").split()[0])
    assert sorted(set(beside.names()) - set(rest)) == MINDED[kind], command


def test_the_files_that_ask_are_all_that_there_are():
    """Every ``is_..._available`` function and ``..._AVAILABLE`` constant of the libraries is in a file that is read."""
    pattern = re.compile(r"_is_package_available\(\s*[\"']|find_spec\(\s*[\"']\w")
    asking = set()
    for library in {place.partition("/")[0] for place in LOOK}:
        root = Path(importlib.util.find_spec(library).origin).parent
        for file in root.rglob("*.py"):
            text = file.read_text(encoding="utf-8")
            if pattern.search(text) and re.search(r"def is_\w+_available|^\w+_AVAILABLE\b", text, re.M):
                asking.add(f"{library}/{file.relative_to(root).as_posix()}")
    assert asking <= set(LOOK)
    assert {"torchao", "torchvision", "tensorflow", "jax", "wandb", "sentencepiece", "timm"} <= set(looked_for())


def test_the_probes_of_peft_that_may_raise_are_all_known():
    text = Path(importlib.util.find_spec("peft").origin).with_name("import_utils.py").read_text(encoding="utf-8")
    raising = {
        function.name
        for function in ast.walk(ast.parse(text))
        if isinstance(function, ast.FunctionDef) and any(isinstance(node, ast.Raise) for node in ast.walk(function))
    }
    assert raising == peft_probes.PROBES.keys()


SAME = """
import sys, torch
from peft.tuners.lora import torchao
from transformers import LlamaConfig, LlamaForCausalLM
from cria_tricks.load.adapters import with_lora
from cria_tricks.models import peft_probes
asks = torchao.is_torchao_available
config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
torch.manual_seed(0)
adapted = with_lora(LlamaForCausalLM(config), r=2, target_modules=["embed_tokens", "v_proj"])
print(torchao.is_torchao_available is asks)
print(adapted)
adapted.save_pretrained(sys.argv[1])
print(open(sys.argv[1] + "/adapter_config.json").read())
print({name: weight.tolist() for name, weight in adapted.named_parameters() if weight.requires_grad})
"""


def test_beside_an_old_torchao_the_adapter_and_its_config_are_those_beside_none(tmp_path):
    """And peft is changed beside the old one only."""
    said = []
    for number, names in enumerate((["torchao", "gptqmodel"], [])):
        stubs = beside.write(tmp_path / str(number), "old", *names)
        done = subprocess.run(
            [sys.executable, "-c", SAME, tmp_path / "saved"],
            env=beside.environment(stubs) | {"PYTHONHASHSEED": "0"},  # peft's config holds a set
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout)
    beside_old, beside_none = said
    assert beside_none.startswith("True\n")
    assert beside_old == beside_none.replace("True", "False", 1)


def test_a_mistake_of_our_own_stays_a_traceback():
    for code in ("import cria_tricks.nowhere", "from cria_tricks.common.errors import nothing"):
        with pytest.raises(ImportError) as caught:
            exec(code, {"__name__": "cria_tricks.made_up"})
        assert packages.fault(caught.value) is None
    assert packages.fault(ValueError("wrong")) is None
    assert packages.fault(BadInput("wrong")) is None


def test_a_needed_package_that_is_missing_is_named_with_the_version_that_is_allowed():
    import importlib.metadata

    for error in (
        importlib.metadata.PackageNotFoundError("gguf"),
        ModuleNotFoundError("No module named 'gguf'", name="gguf"),
        ImportError("Loading needs it. Please install it with `pip install -U gguf`"),
    ):
        found = packages.fault(error)
        assert found.name == "gguf"
        assert "pip install 'gguf>=0.17'" in str(found)
