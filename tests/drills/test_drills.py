"""A few rounds of each drill; the scripts beside this file run many."""

import os
import random
import subprocess
from pathlib import Path
from typing import IO

import pytest

from tests.drills import faults
from tests.drills.disconnect import Drill
from tests.drills.fuzz import Fuzz, check
from tests.parallel.steps import write_rows
from tests.warm import start

# fp32, because the recipe's own precision differs between processors.
TINY = (
    "model=random:tiny",
    "tricks.precision=fp32",
    "data.max_length=160",
    "lora.r=4",
    "train.max_steps=5",
    "train.save_steps=2",
)


@pytest.fixture
def finish_here(monkeypatch, run_cria):
    """Let the runs that nothing disturbs go through in this process, which has imported the libraries."""

    def finish(self: Drill, out: Path, resume: bool) -> None:
        code, _, stderr = run_cria(*self._command(out, resume)[3:])
        assert code == 0, stderr

    monkeypatch.setattr(Drill, "_finish", finish)


@pytest.fixture
def start_warm(monkeypatch, warm):
    """Fork the runs that are killed from a process that has imported the libraries; the drills start them anew."""

    def started(self: Drill, out: Path, stderr: IO[str]):
        return start(*self._command(out, resume=True)[3:], stdout=subprocess.DEVNULL, stderr=stderr)

    monkeypatch.setattr(Drill, "_start", started)


def test_three_kills_and_an_interrupt_end_bit_identical(tmp_path, finish_here, start_warm):
    rows = write_rows(tmp_path / "rows.jsonl", 8)
    given = (*TINY, f"data.train={rows}", f"data.eval={rows}")
    settings = ["smoke", *(part for setting in given for part in ("--set", setting))]
    drill = Drill(settings, tmp_path, cadence=2, seed=1)
    drill.run(kills=4)  # one anywhere, one after a step, one in a save, then one interrupt
    assert drill.in_saves >= 1
    assert len(drill.lost) == 4
    assert max(drill.lost) <= 2


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory):
    return Fuzz(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.parametrize("tens", range(8))
def test_spoilt_input_ends_in_one_line_and_changes_nothing(tens, fuzz):
    for seed in range(10 * tens, 10 * tens + 10):
        check(fuzz.case(seed))


@pytest.mark.parametrize("seed", [1000, 1001])
def test_so_it_does_through_the_real_command(seed, fuzz):
    check(fuzz.case(seed), real=True)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    before = os.environ.get("HF_HUB_OFFLINE")
    os.environ["HF_HUB_OFFLINE"] = "1"
    yield faults.Place(tmp_path_factory.mktemp("faults"))
    os.environ.pop("HF_HUB_OFFLINE")
    if before is not None:
        os.environ["HF_HUB_OFFLINE"] = before


CATALOGUE = faults.catalogue()
SAMPLE = CATALOGUE if os.environ.get("CRIA_ALL") else random.Random(0).sample(CATALOGUE, 40)


@pytest.mark.parametrize("fault", SAMPLE, ids=lambda fault: fault.name)
def test_a_fault_ends_in_one_line_and_loses_nothing(fault, place):
    place.check(fault)


def test_the_catalogue_is_long_and_every_fault_has_a_name_of_its_own():
    assert len({fault.name for fault in CATALOGUE}) == len(CATALOGUE) >= 120


def test_a_fault_is_noticed_when_its_guard_is_out(place):
    fault = next(one for one in CATALOGUE if one.name == "row: an empty text")
    with faults.without_guards(place, fault) as number, pytest.raises(AssertionError):
        place.check(fault)
    assert number == 1
    place.check(fault)
