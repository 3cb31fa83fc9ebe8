"""A few rounds of each drill; the scripts beside this file run many."""

import pytest

from tests.drills.disconnect import Drill
from tests.drills.fuzz import Fuzz, check

TINY = ("model=random:tiny", "data.max_length=160", "lora.r=4", "train.max_steps=5", "train.save_steps=2")


def test_three_kills_end_bit_identical(tmp_path):
    settings = ["smoke", *(part for setting in TINY for part in ("--set", setting))]
    drill = Drill(settings, tmp_path, cadence=2, seed=1)
    drill.run(kills=3)  # one anywhere, one after a step, one in a save
    assert drill.in_saves
    assert len(drill.lost) == 3
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
