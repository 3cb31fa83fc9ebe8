"""The file of a measured card: its schema, what is accepted, and that a spoilt one is refused in one line."""

import json
from pathlib import Path

import jsonschema
import pytest

from cria_tricks.bench import accept, measured_card
from cria_tricks.bench.results import COMMITTED
from cria_tricks.common.errors import BadInput
from tests.measured_cards import changed, made_up, written

ROOT = Path(__file__).parents[1]
SCHEMA = ROOT / "docs" / "assets" / "measured_card.schema.json"
LATER = "2999-01-01T00:00:00+00:00"


@pytest.fixture(scope="module")
def card():
    return made_up()


def test_a_file_holds_what_was_written(card, tmp_path):
    file = written(card, tmp_path)
    assert measured_card.read(file) == card
    assert accept.accept(file) == card
    assert not list(accept.problems(card, file))


def test_the_published_schema_is_that_of_the_code(card):
    assert SCHEMA.read_text(encoding="utf-8") == measured_card.schema(), "run: python -m tools.measured_cards"
    found = json.loads(SCHEMA.read_text(encoding="utf-8"))
    jsonschema.validate(card.model_dump(mode="json"), found)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(changed(card, "device/memory_bytes", "much"), found)


@pytest.mark.parametrize("file", sorted(COMMITTED.glob("*/measured_card*")), ids=lambda path: path.parent.name)
def test_every_committed_file_is_accepted(file):
    accept.accept(file)


TOP = "cases/-1"
SPOILT = [
    # the schema
    ("format", "cria_tricks measured card 2", "format: is not"),
    ("device/memory_bytes", -5, "device.memory_bytes: Input should be greater than 0"),
    ("device/colour", "green", "device.colour: Extra inputs are not permitted"),
    ("settings/rounds", ..., "settings.rounds: Field required"),
    (f"{TOP}/seconds/0", "fast", "cases.together.ladder_paged_optimizer.seconds.0: Input should be a valid number"),
    (f"{TOP}/median_seconds", 0.001, "median_seconds = 0.001 does not follow from seconds and tokens"),
    # provenance
    ("provenance/commit", "main", "provenance.commit: String should match pattern"),
    ("provenance/changed", True, "provenance.changed: files of the package differed"),
    ("provenance/ended", LATER, f"provenance.ended: {LATER} has not come yet"),
    ("provenance/began", "yesterday", "provenance.began: must be a date"),
    ("provenance/began", "2026-11-21T00:00:00+00:00", "provenance.ended: is before provenance.began"),
    (f"{TOP}/date", "2026-10-01T00:00:00+00:00", "date: must be between provenance.began"),
    ("versions/bitsandbytes", ..., "versions.bitsandbytes: is missing"),
    # the device
    ("device/memory_bytes", 24 * 2**30, "device.memory_bytes: Tesla T4 has 14.7 GiB"),
    ("device/driver", "", "device.driver: is missing"),
    (f"{TOP}/device", "NVIDIA H200", "device: is NVIDIA H200, and the file is of Tesla T4"),
    (f"{TOP}/versions/torch", "1.0", "versions: differ from those of the file"),
    # the parts
    ("parts/ladder", ..., "parts.ladder: is missing"),
    ("parts/ladder/status", "open", "parts.ladder: is open"),
    ("parts/alone", {"status": "done"}, "parts.alone: is done, and has no case"),
    ("calibration", None, "calibration: is missing"),
    # figures
    ("calibration/rates/flops products fp16", 9e14, "900 TFLOP/s is impossible: the card's datasheet says 65"),
    ("calibration/link_rate", 9e11, "calibration.link_rate: 9e+11 bytes/s"),
    (f"{TOP}/peak_allocated_bytes", 2**30, "off its dry run of"),
    (f"{TOP}/dry_run_bytes", None, "dry_run_bytes: is missing"),
    (f"{TOP}/peak_reserved_bytes", 1000, "1000 B is less than the"),
    (f"{TOP}/peak_reserved_bytes", 2**40, "is more than the card has"),
    (f"{TOP}/seconds", [1e-3, 1e-3, 1e-3], "TFLOP/s is impossible"),
    (f"{TOP}/seconds", [0.5, 2.0, 2.0], "the median is 4.0 times the fastest: something else ran"),
    (f"{TOP}/seconds", [0.5], "seconds: has 1 steps; 3 are needed"),
    (f"{TOP}/seconds", [], "seconds: is empty"),
    (f"{TOP}/settings", ["tricks.magic=true"], "tricks.magic"),
    (f"{TOP}/sensors", None, "sensors: is missing"),
    (f"{TOP}/sensors/throttled", ["thermal slowdown"], "held down while it ran: thermal slowdown"),
    (f"{TOP}/sensors/median_clock_mhz", 300, "300 MHz of 1590"),
    (f"{TOP}/sensors/median_clock_mhz", 2000, "2000 MHz is above the card's highest"),
]


@pytest.mark.parametrize(("place", "value", "says"), SPOILT, ids=lambda value: str(value)[:40])
def test_a_spoilt_file_is_refused_in_one_line(card, tmp_path, run_cria, place, value, says):
    values = changed(card, place, value)
    if place.startswith(TOP) and "median" not in place:  # what follows from a changed value would be refused first
        for field in measured_card.CardCase.model_computed_fields:
            del values["cases"][-1][field]
    file = tmp_path / measured_card.NAME
    file.write_text(json.dumps(values))
    with pytest.raises(BadInput) as refused:
        accept.accept(file)
    assert says in str(refused.value)
    code, stdout, stderr = run_cria("bench", "--check", str(file))
    assert (code, stdout) == (2, "")
    assert stderr == f"error: {refused.value}\n"
    assert str(file) in stderr


def test_a_case_that_is_there_twice_is_refused(card, tmp_path):
    twice = card.model_copy(update={"cases": (*card.cases, card.cases[0])})
    with pytest.raises(BadInput, match=r"cases\.together\.\w+: is there twice"):
        accept.accept(written(twice, tmp_path))


def test_names_of_files_and_folders_are_checked(card, tmp_path):
    assert accept.accept(written(card, tmp_path / "results" / "tesla-t4", "measured_card-colab.json"))
    with pytest.raises(BadInput, match=r"its folder: must be tesla-t4"):
        accept.accept(written(card, tmp_path / "results" / "l4"))
    with pytest.raises(BadInput, match=r"its name: must be measured_card.json"):
        accept.accept(written(card, tmp_path, "mine.json"))


def test_a_power_cap_is_no_fault(card):
    """A T4 is at its 70 W in each training step."""
    assert all("power cap" in case.sensors.throttled for case in card.cases)


def test_the_command_says_what_it_accepted(card, tmp_path, run_cria):
    file = written(card, tmp_path)
    code, stdout, _ = run_cria("bench", "--check", str(file))
    assert code == 0
    assert stdout == f"accepted: {file}: Tesla T4, {len(card.cases)} cases\n"


def test_what_a_case_did_not_reach_is_a_result(card, tmp_path):
    """A case that ran out of memory, or was refused, has no times."""
    fields = {"status": "oom", "why": "out of memory in step 1", "seconds": (), "peak_allocated_bytes": None}
    none = card.cases[0].model_copy(update=fields)
    assert accept.accept(written(card.model_copy(update={"cases": (none, *card.cases[1:])}), tmp_path))
    unsaid = none.model_copy(update={"why": ""})
    with pytest.raises(BadInput, match="why: must say why it was oom"):
        accept.accept(written(card.model_copy(update={"cases": (unsaid, *card.cases[1:])}), tmp_path))


@pytest.mark.parametrize(
    ("text", "says"), [("{", "is not valid JSON"), ("[]", "format"), ('{"cria_tricks": []}', "format")]
)
def test_another_file_is_told(tmp_path, text, says):
    file = tmp_path / measured_card.NAME
    file.write_text(text)
    with pytest.raises(BadInput, match=says):
        accept.accept(file)
