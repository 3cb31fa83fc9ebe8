"""What accepted cards give: the page, and the rates that plans count with for these cards and for no other."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cria_tricks.bench.accept import step_of
from cria_tricks.bill import step_time
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import reached
from cria_tricks.hardware.cards import as_measured
from cria_tricks.hardware.gpus import GPUS
from cria_tricks.hardware.reached import Reached
from tests.measured_cards import made_up, written
from tests.sweeps import sample
from tools import measured_cards

ROOT = Path(__file__).parents[1]


def test_the_page_and_the_shares_are_those_of_the_committed_files():
    cards = measured_cards.accepted()
    again = "run: python -m tools.measured_cards"
    assert measured_cards.PAGE.read_text(encoding="utf-8") == measured_cards.page(cards), again
    shares = measured_cards.written(measured_cards.efficiencies(cards))
    assert reached.MEASURED.read_text(encoding="utf-8") == shares, again


def test_a_card_that_is_not_measured_is_predicted_with_its_range():
    lines = {row[0]: row for row in measured_cards.rows([])}
    assert lines["`t4`"][2].startswith("predicted: ")
    assert " to " in lines["`t4`"][3]
    assert lines["`t4`"][4:] == ("not yet", "not yet")
    assert measured_cards.NONE in measured_cards.page([])


def test_the_page_is_built_from_accepted_files(tmp_path):
    card = made_up(times=1.2)
    results = tmp_path / "results"
    written(card, results / "tesla-t4")
    page = measured_cards.page(measured_cards.accepted(results))
    assert "## Tesla T4, 2026-11-20" in page
    assert "| Tesla T4 | 2026-11-20 | short, llama-3.2-1b | 11 |" in page
    assert "power cap |" in page, "what held it down"
    case = card.cases[-1]
    one = case.predicted[0]
    low, high, measured = (f"{1000 * seconds:.0f} ms" for seconds in (one.low, one.high, case.median_seconds))
    assert f"{low} to {high} (public runs) | {measured} |" in page
    summary = measured_cards.summary([card])
    assert "1.20 to 1.20, median 1.20" in summary
    assert "11 of 11" in summary, "1.2 times the middle is inside a range of 1.5"
    # In 16 bits the range ends at the root of 1.5; the five steps in fp32, which no public run backs, have a wider one.
    assert "5 of 11" in measured_cards.summary([made_up(times=1.3)])


def test_a_planted_file_that_cannot_be_true_stops_the_page(tmp_path):
    results = tmp_path / "results"
    written(made_up(times=0.001), results / "tesla-t4")
    with pytest.raises(BadInput, match=r"measured_card\.json: cases\.together\.\w+\.seconds: .* TFLOP/s is impossible"):
        measured_cards.accepted(results)


@pytest.mark.parametrize("times", [0.5, 1.0, 2.0])
def test_a_fitted_share_gives_the_measured_times_back(times):
    """A card whose steps all take so many times what is predicted reaches that much less of its peak."""
    card = made_up(times=times)
    found = Reached(**measured_cards.efficiencies([card])["Tesla T4"])
    before = GPUS["t4"].card.reached
    assert found.half == found.memory == pytest.approx(before.half / times, rel=1e-6)
    assert found.spread == measured_cards.NARROWEST
    assert found.measurements == 1
    assert found.launch == pytest.approx(card.calibration.launch)
    assert found.source == "1 measurement of this card (2026-11-20), 6 timed steps"


def test_the_range_holds_every_measured_step():
    cards = [made_up(times=0.8), made_up(times=1.3)]
    fields = measured_cards.efficiencies(cards)["Tesla T4"]
    assert fields["measurements"] == 2
    assert fields["spread"] == pytest.approx(1.3 / 0.8, abs=0.011), "the middle is their geometric mean"
    t4 = replace(GPUS["t4"].card, reached=Reached(**fields))
    assert (t4.basis("fp16"), t4.basis("fp32")) == ("measured cards", "no run")
    for measured in cards:
        for case in measured.cases:
            step = step_time.time_of(step_of(case, t4.device), t4)
            assert step.low <= case.median_seconds <= step.high


def test_few_steps_other_cards_and_processors_change_nothing():
    card = made_up()
    few = card.model_copy(update={"cases": card.cases[: measured_cards.LEAST_CASES - 1]})
    assert measured_cards.efficiencies([few]) == {}
    other = card.model_copy(update={"device": card.device.model_copy(update={"name": "NVIDIA X900"})})
    assert measured_cards.efficiencies([other]) == {}
    cpu = card.model_copy(update={"device": card.device.model_copy(update={"name": "Xeon", "kind": "cpu"})})
    assert measured_cards.efficiencies([cpu]) == {}


PLANS = """
import json, sys
from cria_tricks.run import api
found = {}
for name in sys.argv[1:]:
    for precision in ("best", "fp32"):
        settings = [] if precision == "best" else ["tricks.precision=fp32", "tricks.lean_preparation=false"]
        one = api.plan("kwanzaa", gpu=name, settings=settings).to_dict()
        found[f"{name} {precision}"] = one
print(json.dumps(found))
"""


def plans(package: Path) -> dict:
    environment = os.environ | {"PYTHONPATH": str(package)}
    others = sample([name for name in GPUS if name != "l4"], 3)
    command = [sys.executable, "-c", PLANS, "l4", *others]
    done = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def without_times(found):
    """A plan without all that is a time, or the ratio of two."""
    if isinstance(found, dict):
        return {key: without_times(value) for key, value in found.items() if "seconds" not in key and key != "slowdown"}
    return [without_times(value) for value in found] if isinstance(found, list) else found


def test_an_accepted_card_changes_its_own_range_and_nothing_else(tmp_path):
    """In a copy of the package, because the shares are read when it is imported."""
    shutil.copytree(ROOT / "cria_tricks", tmp_path / "cria_tricks")
    before = plans(tmp_path)
    shares = measured_cards.efficiencies([made_up("l4", times=1.5)])
    (tmp_path / "cria_tricks" / "hardware" / reached.MEASURED.name).write_text(measured_cards.written(shares))
    after = plans(tmp_path)
    assert {name for name in before if before[name] != after[name]} == {"l4 best", "l4 fp32"}
    assert after["l4 fp32"]["seconds_by"] == "no run", "only steps with 16-bit products were fitted"
    assert without_times(after["l4 best"]) == without_times(before["l4 best"])
    old, new = before["l4 best"], after["l4 best"]
    assert (old["seconds_by"], new["seconds_by"]) == ("no run", "measured cards")
    assert new["seconds_per_step"] == pytest.approx(1.5 * old["seconds_per_step"], rel=0.01)
    assert new["seconds_per_step_high"] / new["seconds_per_step_low"] == pytest.approx(measured_cards.NARROWEST)


def test_a_card_without_measurements_is_as_it_was():
    card = GPUS["a100"].card
    assert as_measured(card) == card
