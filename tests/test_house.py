"""The house holds together: one name in every place, cards, import direction, size."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

import cria_tricks.tricks as tricks_package
from cria_tricks.hardware import T4
from cria_tricks.parallel import BESIDE, STRATEGIES
from cria_tricks.recipe import Parallel, Tricks
from cria_tricks.tricks import CARD, INFERENCE, TRICKS, card, trick_name
from tools import tree

PACKAGE = Path(tricks_package.__file__).parents[1]
SPREAD = (*STRATEGIES.values(), *BESIDE)
by_name = pytest.mark.parametrize("trick", TRICKS + INFERENCE, ids=trick_name)
all_by_name = pytest.mark.parametrize("trick", [*TRICKS, *INFERENCE, *SPREAD], ids=trick_name)


def test_every_module_in_tricks_is_listed_once():
    files = {path.stem for path in (PACKAGE / "tricks").glob("*.py")} - {"__init__", "folds"}
    names = [trick_name(trick) for trick in TRICKS + INFERENCE]
    assert files == set(names)
    assert len(names) == len(set(names))


@all_by_name
def test_the_card_has_its_eight_lines_in_order(trick: ModuleType):
    fields = card(trick)
    assert tuple(fields) == ("title", *CARD)
    assert all(fields.values())
    assert fields["Claim"].startswith(trick.CLAIM)


@all_by_name
def test_a_module_is_read_in_five_minutes(trick: ModuleType):
    assert len(Path(trick.__file__).read_text().splitlines()) <= 250


@all_by_name
def test_tricks_import_torch_and_nothing_heavier(trick: ModuleType):
    allowed = {"torch", "cria_tricks", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in _imports(Path(trick.__file__))} <= allowed


@all_by_name
def test_a_trick_has_a_proof_a_lesson_and_plain_code_under_its_own_name(trick: ModuleType):
    folder = trick.__name__.split(".")[-2]
    assert (Path(__file__).parent / folder / f"test_{trick_name(trick)}.py").is_file()
    assert trick.LESSON[:2].isdigit()
    assert trick.REFERENCE
    assert trick.PLAIN.strip()


def test_a_trick_has_toggles_and_a_technique_for_answering_has_none():
    for trick in TRICKS:
        assert trick.SWITCHES
        assert callable(trick.switch_on)
    for technique in INFERENCE:
        assert not hasattr(technique, "SWITCHES")
        assert not hasattr(technique, "switch_on")
        assert technique.for_chat(T4)


@pytest.mark.parametrize(
    "proof",
    [
        *sorted((Path(__file__).parent / "tricks").glob("test_*.py")),
        *(Path(__file__).parent / "parallel" / f"test_{trick_name(strategy)}.py" for strategy in SPREAD),
    ],
    ids=lambda path: path.stem,
)
def test_a_proof_has_the_same_three_names_everywhere(proof: Path):
    defined = {node.name for node in ast.parse(proof.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {"test_math", "test_mechanism", "test_switch"} <= defined


def test_a_strategy_is_one_setting_or_one_command():
    assert {f"strategy={name}" for name in get_args(Parallel.model_fields["strategy"].annotation)} == {
        "strategy=none",
        *(switch for strategy in STRATEGIES.values() for switch in strategy.SWITCHES),
    }
    for name, strategy in STRATEGIES.items():
        assert trick_name(strategy) == name
        assert all(callable(getattr(strategy, part)) for part in ("switch_on", "spread", "window", "traffic"))
    for strategy in BESIDE:
        assert bool(getattr(strategy, "SWITCHES", ())) != bool(getattr(strategy, "COMMAND", ""))
        assert callable(strategy.traffic)


@pytest.mark.parametrize("strategy", SPREAD, ids=trick_name)
def test_a_reference_of_a_strategy_is_short(strategy: ModuleType):
    lines = sum(len(inspect.getsource(getattr(strategy, name)).splitlines()) for name in strategy.REFERENCE)
    assert lines <= 80


def test_every_value_of_every_toggle_is_some_tricks_business():
    offered = set()
    for field, info in Tricks.model_fields.items():
        values = (False, True) if info.annotation is bool else get_args(info.annotation) or (info.default, 8)
        offered |= {f"{field}={str(value).lower()}" for value in values if value != info.default}
    assert offered == {switch for trick in TRICKS for switch in trick.SWITCHES}


@pytest.mark.parametrize("name", ["contract", "reply", "prompt", "statements", "scores", "augment"])
def test_scorers_read_text_and_import_nothing_heavy(name: str):
    allowed = {"pydantic", "cria_tricks", *sys.stdlib_module_names}
    names = _imports(PACKAGE / "kwanzaa" / f"{name}.py")
    assert {imported.partition(".")[0] for imported in names} <= allowed
    own = {imported for imported in names if imported.startswith("cria_tricks.")}
    assert own <= {"cria_tricks.data.rows", "cria_tricks.common.errors", "cria_tricks.recipe"} | {
        f"cria_tricks.kwanzaa{end}" for end in ("", ".contract", ".reply", ".prompt", ".scores")
    }


def test_contributing_has_the_tree_of_today():
    page = tree.PAGE.read_text(encoding="utf-8")
    assert page == tree.written(page), "run python -m tools.tree"


def test_the_package_is_a_few_folders_that_say_what_they_are():
    loose = [path.stem for path in PACKAGE.glob("*.py") if not path.stem.startswith("__")]
    folders = [path.parent for path in PACKAGE.glob("*/__init__.py")]
    assert len(loose) <= 4
    assert len(folders) <= 22
    for folder in folders:
        files = list(folder.glob("*.py"))
        assert len(files) <= (30 if folder.name == "tricks" else 22), folder  # with its __init__
        assert tree.first_line(folder.name).endswith("."), folder


def test_a_plan_is_made_without_the_heavy_libraries():
    code = (
        "import sys, cria_tricks; from cria_tricks.resolve import resolve; resolve(cria_tricks.recipes.smoke());"
        "print([m for m in ('transformers', 'peft', 'bitsandbytes', 'datasets', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def _imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names
