"""Find the packages that the libraries look for, and that are installed but cannot be used."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from cria_tricks.common import packages
from cria_tricks.models import peft_probes

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
SECONDS = 300
"""How long all of them may take to be imported."""


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


def unusable() -> list[dict[str, Any]]:
    """Import each installed package that the libraries look for, in another process.

    Returns:
        For each one that cannot be used its ``name``; ``why``, what it or peft said; ``means``, what that means here,
        and ``do``, what to do about it.
    """
    # What is imported here already can be imported.
    installed = [name for name in looked_for() if packages.is_installed(name) and name not in sys.modules]
    refused = {}
    for probe, name in peft_probes.PROBES.items():
        if name in installed:
            refused[name] = peft_probes.why_refused(probe)
    found = []
    for name, why in _imported(installed).items():
        if why:
            means = "a command that needs it ends with an error"
            if not packages.is_needed(name):
                means = "a library that finds it may import it and fail"
            found.append({"name": name, "why": why, "means": means, "do": packages.cure(name)})
        elif refused.get(name):
            means = "cria_tricks goes around it; peft alone fails at a layer that is not quantised"
            found.append({"name": name, "why": refused[name], "means": means, "do": packages.cure(name)})
    return found


def _imported(names: list[str]) -> dict[str, str]:
    """Import packages one after the other, each that fails once more by itself, and return what each said."""
    said = _in_another_process(names)
    for name, why in said.items():
        if why:  # perhaps only because of another one that was imported before
            said[name] = _in_another_process([name])[name]
    return said


def _in_another_process(names: list[str]) -> dict[str, str]:
    """Import packages in a new process, and go on in another one after a package whose import ends the process."""
    said: dict[str, str] = {}
    while len(said) < len(names):
        rest = names[len(said) :]
        try:
            done = subprocess.run(
                [sys.executable, "-c", IMPORTING, *rest], capture_output=True, text=True, timeout=SECONDS
            )
            output = done.stdout
            ended = f"its import ends Python with exit code {done.returncode}"
        except subprocess.TimeoutExpired as late:
            output = (late.stdout or b"").decode()
            ended = f"its import takes more than {SECONDS} s"
        said |= dict(json.loads(line) for line in output.splitlines())
        if len(said) < len(names):
            said[names[len(said)]] = ended
    return said


IMPORTING = """
import importlib, json, os, sys, warnings
warnings.simplefilter("ignore")
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # packages may print
for name in sys.argv[1:]:
    why = ""
    try:
        importlib.import_module(name)
    except Exception as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0]
    print(json.dumps([name, why]), file=answers, flush=True)
"""
"""The code that imports each package, and writes its name and what it said."""


def _function(call: ast.Call) -> str:
    """Return the last part of a called function's name."""
    return getattr(call.func, "attr", "") or getattr(call.func, "id", "")
