"""Write the sets of versions that CI tests beside constraints.txt: ``make pins``.

``.ci/floor.txt`` has the lowest version of every library that pyproject.toml allows, so a lower bound that is wrong
fails a test. ``.ci/colab.txt`` has the libraries of ``pyproject.toml`` as Colab brings them (``.ci/colab.in``), and the
newest of all else. uv finds both; the tools that only test and lint keep the versions of constraints.txt.
"""

import re
import subprocess
import tempfile
from datetime import date
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.address import ROOT, project

COLAB = ROOT / ".ci" / "colab.in"
FLOOR_PYTHON, COLAB_PYTHON = "3.11", "3.13"
RAISED_BY_TOOLS = {"rich": "import-linter", "huggingface-hub": "trackio"}
"""What a set may have above the lowest version, or Colab's, and the tool for tests that needs it."""


def read(path: Path) -> dict[str, str]:
    """Read a file of versions, NAME==VERSION in each line."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(encoding="utf-8"), re.M))


def compile_(out: str, held: dict[str, str], head: str, *options: str) -> None:
    """Let uv find versions for everything that a test run needs, with some of them given."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("".join(f"{name}=={version}\n" for name, version in held.items()))
        constraints.flush()
        command = ["uv", "pip", "compile", "pyproject.toml", "--extra=dev", "--extra=data", "--no-header", "--quiet"]
        command += ["--no-annotate", f"--constraint={constraints.name}", *options]
        found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (ROOT / ".ci" / out).write_text(f"# {head} Made by `make pins`.\n{found}", encoding="utf-8")


def main() -> None:
    """Write both files."""
    tools = {Requirement(line).name for line in project()["optional-dependencies"]["dev"]}
    tools -= {"triton"}  # each torch names its own
    locked = {name: version for name, version in read(ROOT / "constraints.txt").items() if name in tools}
    lowest = ("--resolution=lowest-direct", f"--python-version={FLOOR_PYTHON}")
    compile_("floor.txt", locked, f"The lowest versions that pyproject.toml allows (Python {FLOOR_PYTHON}).", *lowest)
    newest = f"--python-version={COLAB_PYTHON}"
    head = f"What Colab brings (Python {COLAB_PYTHON}; since when, says colab.in), the rest newest on {date.today()}."
    compile_("colab.txt", locked | brought(), head, newest)


def brought() -> dict[str, str]:
    """Read the versions of our own libraries that Colab brings, but for those that a tool needs newer."""
    ours = {canonicalize_name(Requirement(line).name) for line in project()["dependencies"]} - RAISED_BY_TOOLS.keys()
    return {name: version for name, version in read(COLAB).items() if canonicalize_name(name) in ours}


if __name__ == "__main__":
    main()
