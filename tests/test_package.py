"""pyproject.toml says what the package needs: what is imported is declared, and what is declared is used."""

import ast
import importlib.metadata
import itertools
import re
import tomllib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
ALL = [*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())]
OURS = {"cria_tricks", "benchmarks", "tests", "tools"}
OPTIONAL = {
    "ipython": "imported inside a try, for a figure in a notebook, where it is there already",
    "triton": "imported by the file of Triton kernels alone, which nothing imports; CUDA builds of torch bring it",
}
"""What the package imports without a declaration, and why it may."""
BROUGHT = {"pillow": "matplotlib"}
"""What the package imports and a dependency of it requires itself."""

USED_BY = {
    "gguf": ("cria_tricks/models/__init__.py", "gguf_file="),  # transformers reads a GGUF file with it
    "pytest-xdist": ("Makefile", "--numprocesses"),
    "pytest-benchmark": ("pyproject.toml", "--benchmark-skip"),
    "ruff": ("Makefile", "bin/ruff"),
    "import-linter": ("Makefile", "bin/lint-imports"),
    "mypy": ("Makefile", "bin/mypy"),
    "ipykernel": ("tools/executed.py", "NotebookClient"),  # the kernel that it starts
    "py-spy": ("lessons/monitoring.py", 'which("py-spy"'),  # a program that it starts
    "mkdocs": ("Makefile", "-m mkdocs"),
    "mkdocs-material": ("mkdocs.yml", "name: material"),
    "mkdocs-redirects": ("mkdocs.yml", "- redirects:"),
    "mkdocstrings-python": ("mkdocs.yml", "mkdocstrings:"),
}
"""What is declared and imported nowhere, and the place that needs it: a file, and words in it."""


def named(requirements: Iterable[str]) -> dict[str, Requirement]:
    return {canonicalize_name(found.name): found for found in map(Requirement, requirements)}


@cache
def distributions() -> dict[str, set[str]]:
    """Module -> the distributions that it may come from."""
    found = importlib.metadata.packages_distributions()
    return {module: set(map(canonicalize_name, names)) for module, names in found.items()}


def imported(folder: str) -> dict[str, str]:
    """Every module that a folder's files import, in functions too -> where."""
    found = {}
    for path, node in nodes(folder):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        found |= {name.partition(".")[0]: f"{path.relative_to(ROOT)}:{node.lineno}" for name in names}
    return found


def looked_up(folder: str) -> set[str]:
    """Every module that is imported or looked for by its name in a text, because it may be missing."""
    calls = [node for _, node in nodes(folder) if isinstance(node, ast.Call) and node.args]
    functions = ("import_module", "find_spec", "importorskip")
    names = [node.args[0] for node in calls if ast.unparse(node.func).endswith(functions)]
    return {name.value.partition(".")[0] for name in names if isinstance(name, ast.Constant)}


@cache
def nodes(folder: str) -> list[tuple[Path, ast.AST]]:
    """Everything in a folder's files, and the file."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return [(path, node) for path in files for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))]


def undeclared(modules: dict[str, str], declared: set[str]) -> dict[str, str]:
    """The modules that come from none of the declared distributions, and where they are imported."""
    known = distributions()
    return {
        module: where
        for module, where in modules.items()
        if module in known and module not in OURS and not known[module] & declared
    }


def unused(declared: Iterable[str], modules: Iterable[str]) -> set[str]:
    """The declared distributions that no module is imported from and no place of :data:`USED_BY` needs."""
    known, used = distributions(), set()
    for module in modules:
        used |= known.get(module, set()) | {canonicalize_name(module)}
    needed = {name for name, (file, words) in USED_BY.items() if words in (ROOT / file).read_text(encoding="utf-8")}
    return set(declared) - used - needed


def test_all_that_the_package_imports_is_declared():
    declared = {*named([*PROJECT["dependencies"], *EXTRAS["data"]]), *BROUGHT}
    assert set(BROUGHT.values()) < declared
    assert undeclared(imported("cria_tricks"), declared | set(OPTIONAL)) == {}


def test_only_the_files_that_clean_texts_import_the_extra_for_data():
    at_the_top, anywhere = set(), set()
    for path in (ROOT / "cria_tricks").rglob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for nodes_, found in ((tree.body, at_the_top), (ast.walk(tree), anywhere)):
            for node in nodes_:
                if isinstance(node, ast.Import | ast.ImportFrom):
                    words = ast.unparse(node)
                    found |= {path.name for name in ("datasketch", "py3langid") if name in words}
    assert at_the_top == set(), "a run that does not need them would fail"
    assert anywhere == {"duplicates.py", "prepare.py"}


@pytest.mark.parametrize("folder", ["tests", "tools", "benchmarks"])
def test_all_that_the_rest_imports_is_declared(folder):
    declared = set(named(ALL))
    brought = {
        **BROUGHT,
        "packaging": "pytest",
        "ipython": "ipykernel",
        "griffelib": "mkdocstrings-python",
        "jsonschema": "nbformat",
    }
    for name, by in brought.items():
        assert by in declared, f"{by} brings {name}"
    assert undeclared(imported(folder), declared | set(brought)) == {}


def test_a_dependency_that_is_missing_is_found():
    """Without these three, which were imported and not declared."""
    missing = {"huggingface_hub", "numpy", "tokenizers"}
    declared = {*named([*PROJECT["dependencies"], *EXTRAS["data"]]), *BROUGHT}
    declared -= {canonicalize_name(name) for name in missing}
    assert set(undeclared(imported("cria_tricks"), declared | set(OPTIONAL))) == missing


def test_no_dependency_and_no_extra_is_idle():
    assert unused(named(PROJECT["dependencies"]), imported("cria_tricks")) == set()
    modules: set[str] = set()
    for folder in ("cria_tricks", "tests", "tools", "benchmarks"):
        modules |= imported(folder).keys() | looked_up(folder)
    for extra, lines in EXTRAS.items():
        assert unused(named(lines), modules) == set(), extra
    assert unused({"liger-kernel", "torch"}, modules) == {"liger-kernel"}


def test_the_tested_versions_are_in_the_declared_ranges():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    tested = {
        canonicalize_name(name): version
        for name, version in (line.split("==") for line in lines if line and not line.startswith("#"))
    }
    needs_a_card = {"flash-attn"}  # it is compiled for one
    for requirement in map(
        Requirement, [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    ):
        name = canonicalize_name(requirement.name)
        if name not in needs_a_card:
            assert tested[name] in requirement.specifier, requirement


def test_what_the_texts_tell_to_install_is_an_extra():
    told = set()
    for path in [
        ROOT / "README.md",
        ROOT / "Makefile",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "cria_tricks").rglob("*.py"),
    ]:
        for names in re.findall(r"(?:cria_tricks|\.)\[([a-z,]+)\]['\"]", path.read_text(encoding="utf-8")):
            told |= set(names.split(","))
    assert told <= set(EXTRAS)
    assert {"data", "monitor", "dev", "peers", "site"} <= told
