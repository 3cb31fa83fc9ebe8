"""``make test`` and what it leaves are all tests, each once, and what ``tiers.toml`` names is there."""

import math
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiers import KEEP, LEFT, ROOT, Tiers, keeps, stays


@pytest.mark.parametrize("name", KEEP)
def test_what_is_named_is_there(name):
    path, _, function = name.partition("::")
    assert (ROOT / path).exists()
    function, _, case = function.partition("[")
    assert not function or re.search(rf"^def {function}\(", (ROOT / path).read_text(encoding="utf-8"), re.M)
    assert case == "" or case.endswith("]")


def test_every_theme_says_why():
    assert all(theme["theme"] and theme["why"] and theme["tests"] for theme in LEFT)


@pytest.mark.parametrize(("cases", "keep"), [(1, 0), (1, 1), (1, 6), (7, 0), (7, 1), (7, 3), (7, 7), (7, math.inf)])
def test_so_many_cases_stay(cases, keep):
    assert sum(stays(place, cases, keep) for place in range(cases)) == min(cases, keep)


def test_a_case_counts_before_its_function_its_file_and_its_folder():
    training, twenty = "tests/parallel/test_training.py", "test_twenty_steps_are_those_of_one_process"
    assert keeps(training, twenty, f"{twenty}[ddp-2]") == math.inf
    assert keeps(training, twenty, f"{twenty}[tensor-2]") == keeps(training) == 0
    assert keeps("tests/parallel/test_fsdp.py", "test_mechanism", "test_mechanism[lora]") == 2
    assert keeps("tests/parallel/test_golden.py") == keeps("tests/techniques/test_lora.py") == math.inf


def test_each_test_is_in_one_of_them():
    functions = {
        "tests/techniques/test_lora.py::test_math": 3, "tests/test_lessons.py::test_a_lesson": 5,
        "tests/parallel/test_fsdp.py::test_mechanism": 5, "tests/test_families.py::test_one": 4,
    }  # fmt: skip
    items = [
        SimpleNamespace(
            nodeid=f"{name}[{n}]", originalname=name.partition("::")[2], name=f"{name.partition('::')[2]}[{n}]"
        )
        for name, many in functions.items()
        for n in range(many)
    ]
    taken = {}
    for tier in ("core", "rest"):
        taken[tier], left = items[:], []
        hook = SimpleNamespace(pytest_deselected=lambda items, left=left: left.extend(items))
        Tiers(tier).pytest_collection_modifyitems(SimpleNamespace(hook=hook), taken[tier])
        assert len(left) + len(taken[tier]) == len(items)
    assert sorted(one.nodeid for tier in taken.values() for one in tier) == sorted(one.nodeid for one in items)
    assert [one.nodeid.rpartition("::")[2] for one in taken["core"]] == [
        "test_math[0]", "test_math[1]", "test_math[2]", "test_mechanism[0]", "test_mechanism[3]", "test_one[0]",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "core", "rest"),
    [
        ("tests/techniques/test_lora.py", True, False),
        ("tests/test_lessons.py", False, True),
        ("tests/parallel/test_training.py", True, True),
        ("tests/parallel/test_golden.py", True, False),
    ],
)
def test_a_file_is_imported_only_where_something_of_it_runs(path, core, rest):
    for tier, runs in (("core", core), ("rest", rest)):
        assert Tiers(tier).pytest_ignore_collect(ROOT / path) is (None if runs else True)


def test_the_tests_of_mutants_and_their_modules_are_there():
    concerns = tomllib.loads((ROOT / "tests/mutants.toml").read_text(encoding="utf-8"))["tests"]
    missing = [module for module in concerns if not list((ROOT / "cria_tricks").glob(module))]
    files = {
        test.partition("::")[0].format(name=Path(module).stem) for module, tests in concerns.items() for test in tests
    }
    missing += [file for file in files if not list(ROOT.glob(file))]
    assert missing == []
