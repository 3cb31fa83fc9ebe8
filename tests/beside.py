"""Stubs of other authors' packages, and commands that run beside them in processes of their own."""

import ast
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

from cria_tricks.common import packages

ROOT = Path(__file__).parents[1]
ROWS = ROOT / "cria_tricks" / "data" / "nguzo_saba_eval.jsonl"
TINY = ["--set", "model=random:tiny", "--set", "train.max_steps=1", "--set", "train.eval_steps=1"]
PLAIN = ["--set", "tricks.quantization=none", "--set", "tricks.double_quantization=false"]
COMMANDS = {
    "train": ["train", "smoke", *TINY, *PLAIN, "--out", "plain"],
    "train nf4": ["train", "smoke", *TINY, "--out", "nf4"],
    "chat": ["chat", "plain/adapter", "--prompt", "What is umoja?", "--max-new-tokens", "2"],
    "merge": ["merge", "plain/adapter"],
    "eval": ["eval", "plain/adapter", "--data", str(ROWS), "--limit", "1", "--max-new-tokens", "2"],
    "doctor": ["doctor"],
}
"""What must work, or end in one line, beside any package."""
KINDS = {
    "broken": ("99.0", "raise RuntimeError('operator {name}::nms does not exist')"),
    "old": ("0.0.1", "__version__ = '0.0.1'"),
}
"""Kinds of stubs: the version that it claims, and its code. One fails when it is imported, one is empty and too old."""


LOOK = (
    "transformers/utils/import_utils.py",
    "transformers/integrations/integration_utils.py",
    "transformers/integrations/deepspeed.py",
    "transformers/modeling_flash_attention_utils.py",
    "accelerate/utils/imports.py",
    "peft/import_utils.py",
    "datasets/config.py",
    "bitsandbytes/__init__.py",
)
"""The files in which the libraries ask whether other packages are there."""
ASKING = ("_is_package_available", "find_spec")
"""The functions by which they ask. The name of a package is their first argument."""
BY_IMPORT = ("opt_einsum", "triton")
"""Packages that torch looks for by importing them."""


def looked_for() -> list[str]:
    """List the packages that torch, transformers, accelerate, peft, datasets and bitsandbytes look for, by import."""
    found = set(BY_IMPORT)
    for place in LOOK:
        library, _, file = place.partition("/")
        spec = importlib.util.find_spec(library)
        if not spec or not spec.origin:
            continue
        for node in ast.walk(ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _function(node) in ASKING and node.args:
                name = getattr(node.args[0], "value", None)
                if isinstance(name, str) and name.split(".")[0].isidentifier():  # else a name that only pip knows
                    found.add(name.split(".")[0])
    return sorted(found)


def _function(call: ast.Call) -> str:
    """Return the last part of a called function's name."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")


def names() -> list[str]:
    """The packages that the libraries look for and that are not needed here, so that a stub may take their place."""
    return [name for name in looked_for() if not packages.is_installed(name) or not packages.is_needed(name)]


def write(folder: Path, kind: str, *stubs: str) -> Path:
    """Write stubs as pip would install them, into a folder for ``PYTHONPATH``."""
    version, code = KINDS[kind]
    folder.mkdir()
    for name in stubs:
        package = folder / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(code.format(name=name) + "\n")
        about = folder / f"{name}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (about / "top_level.txt").write_text(f"{name}\n")
        (about / "RECORD").write_text(f"{name}/__init__.py,,\n{about.name}/METADATA,,\n{about.name}/RECORD,,\n")
    return folder


RUN = """
import json, sys
from cria_tricks.cli.main import main
for words in json.loads(sys.argv[1]):
    sys.argv = ["cria", *words]
    try:
        main()
    except SystemExit as left:
        if left.code:
            raise
"""


def run(commands: list[list[str]], stubs: Path, folder: Path) -> subprocess.CompletedProcess:
    """Run commands in one process, in a folder, up to the first that fails."""
    return subprocess.run(
        [sys.executable, "-c", RUN, json.dumps(commands)],
        cwd=folder,
        env=environment(stubs),
        capture_output=True,
        text=True,
    )


def environment(stubs: Path) -> dict[str, str]:
    """The variables by which a process finds stubs before all other packages, and this copy of ours."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(stubs), str(ROOT)]), "COLUMNS": "300"}


def error_line(done: subprocess.CompletedProcess) -> str:
    """The one line by which a command ended; empty if it worked."""
    if not done.returncode:
        return ""
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert last.startswith("error: the package "), done.stderr
    return last
