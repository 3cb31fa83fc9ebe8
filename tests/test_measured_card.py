"""The file of a measured card: its schema, what is accepted, and that a spoilt one is refused in one line."""

import json

import pytest

from cria_tricks.bench import accept, measured_card
from cria_tricks.bench.results import COMMITTED
from cria_tricks.common.errors import BadInput
from tests.measured_cards import changed, made_up, written


@pytest.fixture(scope="module")
def card():
    return made_up()


def test_a_file_holds_what_was_written(card, tmp_path):
    file = written(card, tmp_path)
    assert measured_card.read(file) == card
    assert accept.accept(file) == card, "a power cap is no fault: a T4 is at its 70 W in each training step"
    assert all("power cap" in case.sensors.throttled for case in card.cases)
    assert not list(accept.problems(card, file))


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
    (f"{TOP}/seconds/0", "fast", "cases.10.seconds.0: Input should be a valid number"),
    # provenance
    ("provenance/changed", True, "provenance.changed: files of the package differed"),
    # the parts
    ("parts/ladder", ..., "parts.ladder: is missing"),
    ("parts/ladder/status", "open", "parts.ladder: is open"),
    # figures
    (f"{TOP}/peak_allocated_bytes", 2**30, "off its dry run of"),
    (f"{TOP}/peak_reserved_bytes", 2**40, "is more than the card has"),
    (f"{TOP}/seconds", [1e-3, 1e-3, 1e-3], "TFLOP/s is impossible"),
    (f"{TOP}/seconds", [0.5, 2.0, 2.0], "the median is 4.0 times the fastest: something else ran"),
    (f"{TOP}/seconds", [0.5], "seconds: has 1 steps; 3 are needed"),
    (f"{TOP}/seconds", [], "seconds: is empty"),
    (f"{TOP}/settings", ["tricks.magic=true"], "tricks.magic"),
    (f"{TOP}/sensors/throttled", ["thermal slowdown"], "held down while it ran: thermal slowdown"),
]


@pytest.mark.parametrize(("place", "value", "says"), SPOILT, ids=lambda value: str(value)[:40])
def test_a_spoilt_file_is_refused_in_one_line(card, tmp_path, run_cria, place, value, says):
    values = changed(card, place, value)
    file = tmp_path / measured_card.NAME
    file.write_text(json.dumps(values))
    with pytest.raises(BadInput) as refused:
        accept.accept(file)
    assert says in str(refused.value)
    code, stdout, stderr = run_cria("bench", "--check", str(file))
    assert (code, stdout) == (2, "")
    assert stderr == f"error: {refused.value}\n"
    assert str(file) in stderr


def test_a_file_names_a_commit_or_a_release(card, tmp_path):
    nameless = card.model_copy(update={"provenance": card.provenance.model_copy(update={"commit": ""})})
    assert accept.accept(written(nameless, tmp_path)), "versions.cria_tricks names a release"
    unknown = nameless.model_copy(update={"versions": card.versions | {"cria_tricks": "0+unknown"}})
    with pytest.raises(BadInput, match=r"provenance\.commit: must name the commit"):
        accept.accept(written(unknown, tmp_path))


def test_names_of_files_and_folders_are_checked(card, tmp_path):
    assert accept.accept(written(card, tmp_path / "results" / "tesla-t4", "measured_card-colab.json"))
    with pytest.raises(BadInput, match=r"its folder: must be tesla-t4"):
        accept.accept(written(card, tmp_path / "results" / "l4"))
    with pytest.raises(BadInput, match=r"its name: must be measured_card.json"):
        accept.accept(written(card, tmp_path, "mine.json"))


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


@pytest.mark.parametrize(
    ("text", "says"), [("{", "is not valid JSON"), ("[]", "format"), ('{"cria_tricks": []}', "format")]
)
def test_another_file_is_told(tmp_path, text, says):
    file = tmp_path / measured_card.NAME
    file.write_text(text)
    with pytest.raises(BadInput, match=says):
        accept.accept(file)
