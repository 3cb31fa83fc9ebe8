"""The house holds together: one name in every place, cards, import direction, size."""

import ast
import inspect
import io
import os
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path
from types import ModuleType
from typing import get_args

import pytest

import cria_tricks
from cria_tricks.common.lessons import LESSONS
from cria_tricks.parallel import BESIDE, STRATEGIES
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.settings import Parallel, Tricks
from cria_tricks.switches import TECHNIQUES, technique_name
from cria_tricks.techniques import CARD, INFERENCE, card, code_of
from tools import tree
from tools.fit.fields import GROUPS

PACKAGE = Path(cria_tricks.__file__).parent
SPREAD = (*STRATEGIES.values(), *BESIDE.values())
by_name = pytest.mark.parametrize("trick", TECHNIQUES + INFERENCE, ids=technique_name)
all_by_name = pytest.mark.parametrize("trick", [*TECHNIQUES, *INFERENCE, *SPREAD], ids=technique_name)


def test_every_technique_is_listed_once():
    switches = [technique_name(trick) for trick in TECHNIQUES]
    every = [*switches, *map(technique_name, INFERENCE)]
    assert len(every) == len(set(every))
    for folder, names, beside in (("switches", switches, {"folds"}), ("techniques", every, {"triton_blocks"})):
        files = {path.stem for path in (PACKAGE / folder).glob("*.py")}
        assert files == {"__init__", *beside, *names}


@all_by_name
def test_the_card_has_its_eight_lines_in_order(trick: ModuleType):
    fields = card(trick)
    assert tuple(fields) == ("title", *CARD)
    assert all(fields.values())
    assert fields["Claim"].startswith(trick.TECHNIQUE.claim)


@all_by_name
def test_a_module_is_read_in_five_minutes(trick: ModuleType):
    assert len(Path(code_of(trick).__file__).read_text().splitlines()) <= 250


@all_by_name
def test_tricks_import_torch_and_nothing_heavier(trick: ModuleType):
    allowed = {"torch", "cria_tricks", *sys.stdlib_module_names}
    assert {name.partition(".")[0] for name in _imports(Path(code_of(trick).__file__))} <= allowed
    if trick in TECHNIQUES:
        assert {name.partition(".")[0] for name in _imports(Path(trick.__file__))} <= allowed - {"torch"}


@all_by_name
def test_a_trick_has_a_proof_a_lesson_and_plain_code_under_its_own_name(trick: ModuleType):
    folder = code_of(trick).__name__.split(".")[-2]
    assert (Path(__file__).parent / folder / f"test_{technique_name(trick)}.py").is_file()
    assert trick.TECHNIQUE.lesson in LESSONS
    assert code_of(trick).REFERENCE
    assert code_of(trick).PLAIN.strip()


def test_a_trick_has_toggles_and_a_technique_for_answering_has_none():
    for trick in TECHNIQUES:
        assert trick.TECHNIQUE.switches
        assert callable(trick.switch_on)
    for technique in INFERENCE:
        assert not technique.TECHNIQUE.switches
        assert not hasattr(technique, "switch_on")
        assert technique.TECHNIQUE.command in ("cria chat", "cria eval")


@pytest.mark.parametrize(
    "proof",
    [
        *sorted((Path(__file__).parent / "techniques").glob("test_*.py")),
        *(Path(__file__).parent / "parallel" / f"test_{technique_name(strategy)}.py" for strategy in SPREAD),
    ],
    ids=lambda path: path.stem,
)
def test_a_proof_has_the_same_three_names_everywhere(proof: Path):
    defined = {node.name for node in ast.parse(proof.read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {"test_math", "test_mechanism", "test_switch"} <= defined


HOOKS = {("plan", "recipe"): "switch_on", ("plan", "facts"): "refuse_model", ("step", "recipe"): "bill"}
"""The parameters of each function that is called on all techniques by its name."""


@pytest.mark.parametrize("trick", TECHNIQUES, ids=technique_name)
def test_a_switch_has_the_hooks_and_none_by_another_name(trick: ModuleType):
    own = [each for each in vars(trick).values() if inspect.isfunction(each) and each.__module__ == trick.__name__]
    found = [(tuple(inspect.signature(each).parameters), each.__name__) for each in own if each.__name__[0] != "_"]
    hooks = {name for parameters, name in found if parameters in HOOKS}
    assert {"switch_on", "bill"} <= hooks <= set(HOOKS.values()), "a hook has a name of its own"
    assert set(trick.TECHNIQUE.fields) <= set(Tricks.model_fields)
    assert {field.group for field in trick.TECHNIQUE.fields.values()} <= {*GROUPS, ""}
    for switch, needs in trick.TECHNIQUE.needs.items():
        assert switch in trick.TECHNIQUE.switches
        with_settings(Recipe(), [one if "." in one else f"tricks.{one.format(half='fp16')}" for one in needs.split()])


def test_a_strategy_is_one_setting_or_one_command():
    assert {f"strategy={name}" for name in get_args(Parallel.model_fields["strategy"].annotation)} == {
        "strategy=none",
        *(switch for strategy in STRATEGIES.values() for switch in strategy.TECHNIQUE.switches),
    }
    for name, strategy in STRATEGIES.items():
        assert technique_name(strategy) == name
        assert all(callable(getattr(strategy, part)) for part in ("switch_on", "spread", "window", "traffic"))
    for strategy in BESIDE.values():
        assert bool(strategy.TECHNIQUE.switches) != bool(strategy.TECHNIQUE.command)
        assert callable(strategy.traffic)


@pytest.mark.parametrize("strategy", SPREAD, ids=technique_name)
def test_a_reference_of_a_strategy_is_short(strategy: ModuleType):
    lines = sum(len(inspect.getsource(getattr(strategy, name)).splitlines()) for name in strategy.REFERENCE)
    assert lines <= 80


def test_every_value_of_every_toggle_is_some_tricks_business():
    offered = set()
    for field, info in Tricks.model_fields.items():
        on_off = info.annotation is bool or bool in get_args(info.annotation)
        values = (False, True) if on_off else get_args(info.annotation) or (info.default, 8)
        values += tuple(word for part in get_args(info.annotation) for word in get_args(part))  # bool | Literal[word]
        offered |= {f"{field}={str(value).lower()}" for value in values if value != info.default}
    assert offered == {switch for trick in TECHNIQUES for switch in trick.TECHNIQUE.switches}


@pytest.mark.parametrize("name", ["contract", "prompt", "statements", "scores", "augment"])
def test_scorers_read_text_and_import_nothing_heavy(name: str):
    allowed = {"pydantic", "cria_tricks", *sys.stdlib_module_names}
    names = _imports(PACKAGE / "kwanzaa" / f"{name}.py")
    assert {imported.partition(".")[0] for imported in names} <= allowed
    own = {imported for imported in names if imported.startswith("cria_tricks.")}
    assert own <= {"cria_tricks.data.rows", "cria_tricks.common.errors", "cria_tricks.recipe"} | {
        f"cria_tricks.kwanzaa{end}" for end in ("", ".contract", ".prompt", ".scores")
    }


SAYS = "it says in words what a recipe asked for"
TOGGLES_ARE_READ = {
    "predict/model_settings.py": (3, "what a recipe needs for another model is said before a plan is made"),
    "adapter/opening.py": (2, "it rounds a base as it was rounded when the adapter learnt"),
    "adapter/model_card.py": (1, SAYS),
    "data/lengths.py": (2, "packed rows are full; data/ lies below the plan's tricks and is read without a plan"),
    "data/rules.py": (1, "it refuses a recipe"),
    "launch/job.py": (1, "it names the folder of a run on another machine, for which there is no plan"),
    "predict/links.py": (1, "a pipeline works on one micro-batch of a step after the other"),
    "predict/per_process.py": (7, "it shares a window of micro-batches out among the processes of a strategy"),
    "predict/plan_data.py": (4, "its times are of rows in the mean, not of the longest one; it prints the strategy"),
    "predict/host.py": (1, "whether a strategy cuts the model is a fact of the strategy"),
    "load/answering_memory.py": (3, "an opened model has the adapter of its training, and perhaps its packed base"),
    "predict/evaluation.py": (2, "evaluation rows are never packed, and their attention takes them as expand_kv does"),
    "predict/toggles.py": (4, "it tries toggles"),
    "recipe.py": (1, "rows of a step are a fact of the recipe"),
    "trainer/what_ran.py": (7, SAYS),
    # The strategy is chosen where processes start.
    "launch/torchrun.py": (3, "it starts as many processes as the strategy needs"),
    "run/search.py": (10, "it tries toggles, and says which would help"),
    "run/api.py": (1, "several processes without a strategy are ddp"),
    "run/ready.py": (1, "it estimates one of several processes"),
}
"""How many lines of a file outside switches/ and parallel/ may read a toggle, and why."""


def test_toggles_are_read_by_the_tricks_and_hardly_anywhere_else():
    found = dict[str, int]()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        if lines := _lines_that_read_a_toggle(path):
            found[name] = len(lines)
    outside = {name: lines for name, lines in found.items() if not name.startswith(("switches/", "parallel/"))}
    print(f"{sum(outside.values())} lines outside read a toggle, {sum(found.values())} in all")
    more = {name: lines for name, lines in outside.items() if lines > TOGGLES_ARE_READ.get(name, (0, ""))[0]}
    assert not more, "let the trick do it, or read the plan"
    assert len(found) > len(outside), "the tricks read theirs"


def _lines_that_read_a_toggle(path: Path) -> set[int]:
    """Lines with ``tricks.FIELD``, of whatever is called tricks, or with a recipe's strategy or its tensor size."""
    fields = {"tricks": set(Tricks.model_fields), "parallel": {"strategy", "tensor_size"}}
    lines = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Attribute):
            continue
        of = node.value
        owner = ""
        if isinstance(of, ast.Attribute):
            owner = of.attr
        elif isinstance(of, ast.Name) and of.id == "tricks":
            owner = of.id
        if node.attr in fields.get(owner, ()):
            lines.add(node.lineno)
    return lines


def test_contributing_has_the_tree_of_today():
    page = tree.PAGE.read_text(encoding="utf-8")
    assert page == tree.written(page), "run make update"


def test_each_folder_of_the_package_says_what_it_is():
    folders = [path.parent for path in PACKAGE.glob("*/__init__.py")]
    for folder in folders:
        assert tree.first_line(folder.name).endswith("."), folder


UPWARD = "recipe -> resolve -> plan -> load -> trainer -> run -> report, one way BROKEN"
CIRCLE = "no circle of files anywhere BROKEN"
LAZY = "\n\ndef planted():\n    from {} import {}\n"
FOR_TYPES = "\n\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {} import {}\n"


@pytest.mark.parametrize(
    ("file", "line", "said"),
    [
        ("common/units.py", "", ["Contracts: 2 kept, 0 broken."]),
        ("bill/block.py", LAZY.format("cria_tricks.run", "api"), [UPWARD, "bill.block -> cria_tricks.run.api"]),
        ("data/rows.py", FOR_TYPES.format("cria_tricks.run", "api"), [UPWARD, "data.rows -> cria_tricks.run.api"]),
        ("bill/operation.py", LAZY.format("cria_tricks.bill", "block"), [CIRCLE, ".operation"]),
    ],
    ids=["as it is", "upward in a function", "upward for types", "a circle in one folder"],
)  # fmt: skip
def test_one_planted_import_breaks_the_contracts(file: str, line: str, said: list[str], tmp_path: Path):
    copy = Path(shutil.copytree(PACKAGE, tmp_path / "cria_tricks"))
    shutil.copy(PACKAGE.parent / "pyproject.toml", tmp_path)
    with (copy / file).open("a", encoding="utf-8") as planted:
        planted.write(line)
    lint = [Path(sys.executable).with_name("lint-imports"), "--no-cache", "--no-logo"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"}
    done = subprocess.run(lint, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == (1 if line else 0), done.stdout
    assert all(words in done.stdout for words in said), done.stdout


def test_functions_of_autograd_are_static_and_their_gradients_have_no_gradient():
    """A second derivative would go through a backward pass that was written for the first, and be wrong in silence."""
    wanted = {"forward": {"staticmethod"}, "backward": {"staticmethod", "once_differentiable"}}
    found = {
        f"{path.stem}.{kind.name}.{method.name}": {ast.unparse(decorator) for decorator in method.decorator_list}
        for path in sorted(PACKAGE.rglob("*.py"))
        for kind in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(kind, ast.ClassDef) and "autograd.Function" in " ".join(map(ast.unparse, kind.bases))
        for method in kind.body
        if isinstance(method, ast.FunctionDef) and method.name in wanted
    }
    assert len(found) > 40
    assert {name: has for name, has in found.items() if not wanted[name.rsplit(".")[-1]] <= has} == {}


def test_no_file_is_too_long_to_read():
    """A file is one topic, as long as its topic."""
    lines = {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: number for name, number in lines.items() if number > 800} == {}


def test_a_plan_is_made_without_the_heavy_libraries():
    code = (
        "import sys, cria_tricks; from cria_tricks.resolve import resolve; resolve(cria_tricks.recipes.smoke());"
        "print([m for m in ('transformers', 'peft', 'bitsandbytes', 'datasets', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_import_inside_a_function_has_a_reason():
    """A comment on its line, on the line above, or above its block of imports; or a sentence of the module's docstring.

    Without one a reader cannot tell an import that spares seconds from one that hides a circle.
    """
    assert [place for path in sorted(PACKAGE.rglob("*.py")) for place in _unexplained(path)] == []


def test_an_unexplained_import_is_found(tmp_path: Path):
    file = tmp_path / "module.py"
    lines = [
        "def first():",
        "    import json",
        "    # a reason",
        "    import os",
        "",
        "    import re",
        "    print('# no comment')",
        "    import sys",
        "    import time  # a reason",
    ]
    file.write_text("\n".join(lines))
    assert _unexplained(file) == ["module.py:2: import json", "module.py:8: import sys"]
    file.write_text('"""Each function imports what it needs."""\n' + "\n".join(lines))
    assert _unexplained(file) == []


def _unexplained(path: Path) -> list[str]:
    """Every import in a function of a file that nothing explains, as FILE:LINE: TEXT."""
    source = path.read_text(encoding="utf-8")
    module = ast.parse(source)
    if re.search(r"\bimport", ast.get_docstring(module) or ""):
        return []
    lines = source.splitlines()
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    explained = {token.start[0] for token in tokens if token.type == tokenize.COMMENT}
    lazy = {
        node.lineno: node.end_lineno or node.lineno
        for function in ast.walk(module)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    found = []
    for line, end in sorted(lazy.items()):
        above = line - 1
        while not lines[above - 1].strip():
            above -= 1
        if line in explained or above in explained:
            explained.add(end)  # the imports below belong to the same block
        else:
            found.append(f"{path.name}:{line}: {lines[line - 1].strip()}")
    return found


def _imports(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return names
