"""``cria report FILE...``: files of three kinds, one or several, beside the committed ones."""

import json
import shutil

import pytest

from cria_tricks.bench import own_results, results, style
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import this_device
from tests.measured_cards import made_up, written
from tests.test_results import OFF, case


@pytest.fixture(scope="module")
def cards(tmp_path_factory):
    """The files of one card under two settings."""
    folder = tmp_path_factory.mktemp("cards")
    slower = made_up(times=1.1)
    slower = slower.model_copy(update={"settings": slower.settings.model_copy(update={"rounds": 5})})
    return written(made_up(), folder, "measured_card.json"), written(slower, folder, "measured_card-5.json")


def test_a_runs_report_is_a_case(trained):
    own = own_results.read(trained / "report.json")
    report = json.loads((trained / "report.json").read_text())
    (one,) = own.cases
    assert (one.bench, one.name, one.status) == ("run", "short", "ok")
    assert one.device == this_device().name
    steps = [entry for entry in report["history"] if "step_seconds" in entry]
    assert list(one.seconds) == [entry["step_seconds"] for entry in steps]
    assert one.peak_allocated_bytes == max(entry["peak_bytes"] for entry in steps)
    assert one.estimated_bytes == report["estimated_peak_bytes"]
    assert one.settings == ("tricks.peft=lora",)


def test_three_files_are_drawn_beside_the_committed_ones(cards, trained, tmp_path, run_cria):
    out = tmp_path / "out"
    code, stdout, stderr = run_cria("report", *cards, trained / "report.json", "--out", out)
    assert code == 0, stderr
    cases = 2 * len(made_up().cases) + 1
    assert stdout.replace("\n", "").startswith(f"{cases} cases of Tesla T4, {this_device().name}: {out}")
    text = (out / "report.md").read_text()
    for label in ("(yours, measured_card)", "(yours, measured_card-5)", "(yours, report)"):
        assert label in text, label
    for device in results.by_device(results.read(results.COMMITTED)):
        assert device in text
    assert text.count("## Tesla T4: predicted and measured") == 2
    assert "| `run` short |" in text
    for name in ("errors", "tricks", "together"):
        for theme in style.THEMES:
            assert (out / f"{name}-{theme}.svg").read_text().startswith("<?xml")


def test_files_of_one_name_go_by_their_folders(trained, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    shutil.copy(trained / "report.json", other)
    files = [trained / "report.json", other / "report.json"]
    assert own_results.labels(files) == [f"yours, {trained.name}/report", "yours, other/report"]
    assert own_results.labels(files[:1]) == ["yours"]


def test_a_benchmark_file_is_still_one(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({"cria_tricks": [one.model_dump(mode="json") for one in (OFF, case())]}))
    assert own_results.read(file).cases == [OFF, case()]
    assert own_results.read(file).card is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"history": []}, "is no whole report of cria train"),
        ({"recipe": {"model": 3}}, "model: Input should be a valid string"),
        ({"versions": None}, "versions: Input should be a valid dictionary"),
        ({"memory": {}}, "is no whole report of cria train: 'train'"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_spoilt_report_is_told_in_one_line(trained, tmp_path, run_cria, change, says):
    file = tmp_path / "report.json"
    file.write_text(json.dumps(json.loads((trained / "report.json").read_text()) | change))
    with pytest.raises(BadInput, match=f"report {file}: {says}"):
        own_results.read(file)
    code, stdout, stderr = run_cria("report", file, "--out", tmp_path / "out")
    assert (code, stdout, len(stderr.strip().splitlines())) == (2, "", 1)


def test_a_spoilt_card_is_told_by_its_field(tmp_path):
    values = made_up().model_dump(mode="json")
    values["device"]["threads"] = 0
    file = tmp_path / "measured_card.json"
    file.write_text(json.dumps(values))
    with pytest.raises(BadInput, match=r"device\.threads: Input should be greater than or equal to 1"):
        own_results.read(file)
