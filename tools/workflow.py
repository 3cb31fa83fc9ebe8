"""Run a job of a workflow here, in a fresh clone: python -m tools.workflow tests versions python=3.13

Actions (``uses:``) are left out: the clone stands for actions/checkout, and ``--python`` for actions/setup-python.
Values like ``python=3.12`` choose the entry of the job's matrix. ``--set TORCH_INDEX=``
takes back a variable that the workflow sets. The newest commit is cloned, so commit first.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tools.address import ROOT


def entries(job: dict[str, Any]) -> list[dict[str, Any]]:
    """List the entries of a job's matrix; one without values for a job that has no matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    if "include" in matrix:
        return matrix["include"]
    if not matrix:
        return [{}]
    ((name, values),) = matrix.items()  # none of ours has two lists
    return [{name: value} for value in values]


def filled(text: Any, entry: dict[str, Any]) -> str:
    """Put a matrix entry's values into a text of a workflow."""
    return re.sub(r"\$\{\{ matrix\.(\w+) \}\}", lambda found: str(entry[found[1]]), str(text))


def steps(workflow: dict[str, Any], job: str, entry: dict[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """List the commands of a job, each with the variables that the workflow sets for it."""
    about = workflow["jobs"][job]
    found = []
    for step in about["steps"]:
        if "run" in step:
            variables = workflow.get("env", {}) | about.get("env", {}) | step.get("env", {})
            set_ = {name: filled(value, entry) for name, value in variables.items()}
            found.append((filled(step["run"], entry), set_))
    return found


def main() -> None:
    """Clone, run every step, and stop at the first that fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("workflow", help="a file of .github/workflows, without .yml")
    parser.add_argument("job")
    parser.add_argument("matrix", nargs="*", help="NAME=VALUE, until one entry of the matrix is left")
    parser.add_argument("--python", type=Path, help="the folder of the interpreter that setup-python would bring")
    parser.add_argument("--set", action="append", default=[], help="NAME=VALUE, a variable that differs here")
    asked = parser.parse_args()
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / f"{asked.workflow}.yml").read_text(encoding="utf-8"))
    wanted = dict(word.split("=", 1) for word in asked.matrix)
    fitting = [entry for entry in entries(workflow["jobs"][asked.job]) if wanted.items() <= entry.items()]
    if len(fitting) != 1:
        sys.exit(f"{len(fitting)} entries of the matrix have {wanted}; name one")
    given = dict(word.split("=", 1) for word in asked.set)
    here = dict(os.environ)
    here.pop("PYTHONPATH", None)
    if asked.python:
        here["PATH"] = f"{asked.python}:{here['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
        for command, variables in steps(workflow, asked.job, fitting[0]):
            print(f"$ {command}", flush=True)
            began = time.monotonic()
            environment = here | variables | given
            code = subprocess.run(["bash", "-eo", "pipefail", "-c", command], cwd=folder, env=environment).returncode
            print(f"# exit code {code} after {time.monotonic() - began:.0f} s", flush=True)
            if code:
                sys.exit(code)


if __name__ == "__main__":
    main()
