"""Nothing that is loaded runs: no code of a model's, no pickle; and no recipe can switch that on."""

import ast
import builtins
import json
import shutil
from pathlib import Path

import pytest

import cria_tricks
from cria_tricks import models
from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter.opening import open_folder
from cria_tricks.common.errors import BadInput

PACKAGE = Path(cria_tricks.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
RUNS_WHAT_IT_READS = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "yaml"}


def remote_code(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines where trust_remote_code is given another value than False, or a loader is called without it."""
    found = []
    for node in ast.walk(tree):
        pairs: list[tuple[str, ast.expr]] = []
        if isinstance(node, ast.Call):
            pairs = [(keyword.arg or "", keyword.value) for keyword in node.keywords]
            called = ast.unparse(node.func)
            if called == "from_pretrained" or (called.startswith("Auto") and called.endswith(".from_pretrained")):
                found += [] if any(name == "trust_remote_code" for name, _ in pairs) else [(node.lineno, "left out")]
        elif isinstance(node, ast.Dict):
            pairs = [(k.value, v) for k, v in zip(node.keys, node.values, strict=True) if isinstance(k, ast.Constant)]
        elif isinstance(node, ast.Assign):
            pairs = [
                (ast.unparse(t).strip("]'").rpartition("'")[2].rpartition(".")[2], node.value) for t in node.targets
            ]
        elif isinstance(node, ast.AnnAssign) and node.value:
            pairs = [(ast.unparse(node.target).rpartition(".")[2], node.value)]
        elif isinstance(node, ast.arg):
            found += [(node.lineno, "an argument")] if node.arg == "trust_remote_code" else []
        found += [
            (value.lineno, ast.unparse(value))
            for name, value in pairs
            if name == "trust_remote_code" and not (isinstance(value, ast.Constant) and value.value is False)
        ]
    return found


def readers(tree: ast.AST) -> list[tuple[int, str]]:
    """Lines that import or call what runs a file while it reads it."""
    found = []
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [(node.lineno, name) for name in names if name.partition(".")[0] in RUNS_WHAT_IT_READS]
        if isinstance(node, ast.Call):
            called, keywords = ast.unparse(node.func), {k.arg: k.value for k in node.keywords}
            only = keywords.get("weights_only")
            safe = isinstance(only, ast.Constant) and only.value is True
            if (called == "torch.load" and not safe) or (
                called in ("np.load", "numpy.load") and "allow_pickle" in keywords
            ):
                found.append((node.lineno, called))
    return found


@pytest.mark.parametrize("check", [remote_code, readers])
def test_no_module_of_the_package_runs_what_it_loads(check):
    found = {str(path.relative_to(PACKAGE)): check(ast.parse(path.read_text())) for path in SOURCES}
    if check is readers:  # what our own processes have sent through a pipe, and no file
        assert [name for _, name in found.pop("course/processes.py")] == ["pickle", "cloudpickle"]
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert len(SOURCES) > 60


@pytest.mark.parametrize(
    ("check", "code"),
    [
        (remote_code, "AutoModel.from_pretrained(x, trust_remote_code=True)"),
        (remote_code, "AutoModel.from_pretrained(x, trust_remote_code=wanted)"),
        (remote_code, "AutoModel.from_pretrained(x)"),
        (remote_code, "from_pretrained(x, **options)"),
        (remote_code, "options = {'trust_remote_code': True}"),
        (remote_code, "options['trust_remote_code'] = True"),
        (remote_code, "self.trust_remote_code = 1"),
        (remote_code, "class Recipe:\n    trust_remote_code: bool = True"),
        (remote_code, "def load(trust_remote_code): pass"),
        (readers, "import pickle"),
        (readers, "from joblib import load"),
        (readers, "import yaml"),
        (readers, "torch.load(path)"),
        (readers, "torch.load(path, weights_only=False)"),
        (readers, "np.load(path, allow_pickle=True)"),
    ],
)
def test_the_checks_find_what_they_look_for(check, code):
    assert check(ast.parse(code))


@pytest.fixture
def asks_for_code(tiny_model, tokenizer, tmp_path, monkeypatch) -> Path:
    """A model folder of an unknown kind that brings its own code, which leaves a trace when it runs."""
    import transformers.dynamic_module_utils as dynamic

    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil"}}
    (folder / "config.json").write_text(json.dumps(config))
    trace = tmp_path / "trace"
    (folder / "evil.py").write_text(
        f"import os\nfrom transformers import LlamaConfig\nos.makedirs({str(trace)!r}, exist_ok=True)\n"
        "class Evil(LlamaConfig):\n    model_type = 'evil'\n"
    )
    monkeypatch.setattr(dynamic, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(builtins, "input", lambda *question: "y")  # whoever is asked whether to run it says yes
    return folder


def test_the_code_of_a_model_folder_is_never_run(asks_for_code, run_cria, tmp_path):
    train = ["train", "baseline", "--set", f"model={asks_for_code}", "--out", tmp_path / "run"]
    code, stdout, stderr = run_cria(*train)
    assert (code, stdout) == (2, "")
    assert "cannot be loaded" in stderr.splitlines()[-1]
    assert not (tmp_path / "trace").exists()
    with pytest.raises(BadInput, match="cannot be loaded"):
        open_folder(asks_for_code)
    assert not (tmp_path / "trace").exists()

    from transformers import AutoConfig

    AutoConfig.from_pretrained(asks_for_code, trust_remote_code=True)
    assert (tmp_path / "trace").exists(), "it is code that would run"


def test_a_peft_folder_with_only_a_pickle_is_refused(trained, tmp_path):
    import torch
    from safetensors.torch import load_file

    folder = Path(shutil.copytree(trained / "adapter", tmp_path / "adapter"))
    torch.save(load_file(folder / "adapter_model.safetensors"), folder / "adapter_model.bin")
    for name in ("manifest.json", artifact.PROVENANCE, artifact.RECIPE, "adapter_model.safetensors"):
        (folder / name).unlink()
    with pytest.raises(BadInput, match="holds no safetensors file"):
        open_folder(folder)


def test_the_base_that_an_adapter_names_is_loaded_without_code_too(trained, asks_for_code, tmp_path):
    folder = Path(shutil.copytree(trained / "adapter", tmp_path / "adapter"))
    for name in ("manifest.json", artifact.PROVENANCE, artifact.RECIPE):
        (folder / name).unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(asks_for_code)}))
    with pytest.raises(BadInput, match="cannot be loaded"):
        open_folder(folder)
    assert not (tmp_path / "trace").exists()
    assert models.find(str(asks_for_code)).path == str(asks_for_code)
