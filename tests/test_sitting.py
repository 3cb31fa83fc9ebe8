"""``cria bench``: parts, what is kept when it stops, and what the sensors say."""

import json
import signal
import subprocess
import time
from pathlib import Path

import pytest

from cria_tricks.bench import accept, cases, measured_card, sitting
from cria_tricks.bench.case import Setup, bytes_by_dry_run, measure, prepared
from cria_tricks.bench.cases import ToMeasure
from cria_tricks.common.errors import BadInput
from cria_tricks.doctor import calibrate
from cria_tricks.hardware import T4, calibration, this_device
from cria_tricks.hardware.device import pretend
from cria_tricks.hardware.gpus import GPUS
from tests.test_results import case as a_case
from tests.warm import Child

LADDER = [ToMeasure("off", ""), ToMeasure("ladder_peft", "peft=lora", "off")]
OF_TIME = ("seconds", "provenance.changed")
"""What a busy machine, or a checkout in which somebody works, may be refused for."""


@pytest.fixture
def quick(monkeypatch):
    """A calibration made up, two steps of the ladder, and no minutes of waiting."""
    rates = {"flops products fp32": 1e15, "bytes between products fp32": 1e9, "flops products bf16": 1e15}

    def made_up(say, seconds):
        device = this_device()
        say("products")
        return calibration.Calibration(
            device.name, device.kind, 1, dict(calibration.versions()), "2026-11-26", "tiny", 1e-5, 1e15, rates
        )

    monkeypatch.setattr(calibrate, "measure", made_up)
    monkeypatch.setattr(cases, "ladder", lambda device: LADDER)


def begun(out: Path, **changed) -> sitting.Sitting:
    """A sitting on this CPU, which says nothing."""
    settings = cases.settings_for(this_device(), short=True).model_copy(update=changed)
    return sitting.Sitting(out, settings, "cria bench", lambda line: None)


def test_the_command_measures_and_says_where(quick, tmp_path, run_cria):
    out = tmp_path / "mine"
    wanted = ("calibrate", "ladder", "capstone", "longest")
    words = [word for part in wanted for word in ("--part", part)]
    code, stdout, stderr = run_cria("bench", "--short", *words, "--out", out)
    assert code == 0, stderr
    assert f"{out}/measured_card.json" in stdout.replace("\n", "")
    assert "longest: skipped, because on a CPU" in stderr
    card = measured_card.read(out / measured_card.NAME)
    assert list(card.parts) == list(wanted)
    assert {card.parts[part].status for part in wanted} == {"done", "skipped"}
    assert {case.name for case in card.cases} == {"off", "ladder_peft", "kwanzaa"}
    for case in card.cases:
        assert (case.status, case.device) == ("ok", this_device().name)
        assert case.predicted[-1].by == "measured here"
    wrong = [where for where, _ in accept.problems(card, out / measured_card.NAME)]
    assert [where for where in wrong if not any(word in where for word in OF_TIME)] == []
    assert "| + `peft` | tiny | 128 |" in (out / sitting.REPORT).read_text()
    # Everything is there, so nothing is measured again.
    code, stdout, stderr = run_cria("bench", "--short", *words, "--out", out, "--json")
    assert code == 0
    assert "ladder: is in" in stderr
    again = measured_card.MeasuredCard.model_validate(json.loads(stdout))
    assert again.cases == card.cases


LADDER_STEPS = 4
"""How many steps the ladder of these two processes has."""
SHORT = f"""
from cria_tricks.bench import cases

whole = cases.ladder
cases.ladder = lambda device: whole(device)[:{LADDER_STEPS}]
from cria_tricks.cli.main import main

main()
"""


def test_a_killed_process_loses_one_case_at_most(tmp_path, run_cria, monkeypatch, warm):
    """Killed as soon as a second case is in the file, and run again, here, where the libraries are imported."""
    out = tmp_path / "mine"
    file = out / measured_card.NAME
    words = ["bench", "--short", "--part", "ladder", "--out", str(out)]
    seen = []
    with Child(("code", SHORT, *words), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT) as running:
        while len(seen) < 2:
            assert running.poll() is None
            time.sleep(0.05)
            if file.is_file():
                seen = measured_card.read(file).cases
        running.send_signal(signal.SIGKILL)
    kept = measured_card.read(file).cases
    assert 2 <= len(kept) < LADDER_STEPS
    ladder_steps = cases.ladder(this_device())[:LADDER_STEPS]
    monkeypatch.setattr(cases, "ladder", lambda device: ladder_steps)
    code, _, stderr = run_cria(*words)
    assert code == 0, stderr
    card = measured_card.read(file)
    assert card.cases[: len(kept)] == kept, "none of them was measured again"
    names = [case.name for case in card.cases]
    assert names == [one.name for one in ladder_steps]
    assert all(f"together.{case.name}:" not in stderr for case in kept)
    assert f"together.{names[-1]}:" in stderr


def test_ctrl_c_says_what_is_kept(quick, tmp_path, run_cria, monkeypatch):
    def interrupted(bench, name, *arguments):
        if name == "ladder_peft":
            raise KeyboardInterrupt
        return measure(bench, name, *arguments)

    monkeypatch.setattr(sitting, "measure", interrupted)
    code, _, stderr = run_cria("bench", "--short", "--part", "ladder", "--out", tmp_path)
    assert code == 130
    last = stderr.strip().splitlines()[-1]
    assert last.startswith(f"interrupted; 1 cases are in {tmp_path}/measured_card.json; the same command goes on")
    card = measured_card.read(tmp_path / measured_card.NAME)
    assert card.parts["ladder"].status == "open"
    assert card.parts["ladder"].seconds > 0


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"settings": {"tokens": 64}}, "another settings"),
        ({"versions": {"torch": "1.0"}}, "another versions"),
        ({"commit": "f" * 40}, "another commit of cria_tricks"),
    ],
)
def test_another_measurement_is_not_gone_on_with(tmp_path, monkeypatch, changed, says):
    begun(tmp_path)._keep()
    if "commit" in changed:
        monkeypatch.setattr(sitting, "commit", lambda: {"commit": changed["commit"], "changed": False})
    if "versions" in changed:
        monkeypatch.setattr(sitting, "versions", lambda: changed["versions"])
    with pytest.raises(BadInput, match=f"--out {tmp_path}: holds a measurement with {says}; name a new folder"):
        begun(tmp_path, **changed.get("settings", {}))


def test_unsteady_times_are_measured_once_more_and_the_steadier_kept(tmp_path, monkeypatch):
    times = iter([(1.0, 9.0, 9.0), (1.0, 2.0, 2.0), (1.0, 1.1, 1.1)])
    calls = []

    def fake(bench, name, words, setup, against, lengths):
        calls.append(name)
        return a_case(bench=bench, name=name, seconds=next(times), kind="cpu", settings=[], model="random:tiny")

    monkeypatch.setattr(sitting, "measure", fake)
    measuring = begun(tmp_path)
    one = cases.Planned("together", LADDER[0], Setup("tiny", 64, 3), dry=False)
    assert measuring._measured("ladder", one).seconds == (1.0, 2.0, 2.0)
    steady = measuring._measured("ladder", one)
    assert (steady.seconds, calls) == ((1.0, 1.1, 1.1), ["off"] * 3)


def test_an_unknown_part_is_told(tmp_path, run_cria):
    code, _, stderr = run_cria("bench", "--part", "ladders", "--out", tmp_path / "new")
    assert code == 2
    assert "--part ladders: did you mean ladder?" in stderr
    assert not (tmp_path / "new").exists()


def test_each_switch_alone_is_measured_on_a_model_that_fits_without_any():
    for short in (True, False):
        assert cases.settings_for(T4, short=short).alone_shape == "smollm2", "fp32 of Llama-3.2-1B does not fit"
    large = cases.settings_for(GPUS["a100-80"].device, short=True)
    assert large.alone_shape == large.shape == "llama-3.2-1b"


@pytest.mark.parametrize("short", [True, False])
def test_every_planned_case_has_its_baseline_and_can_be_made_on_a_t4(short):
    settings = cases.settings_for(T4, short=short)
    with pretend(T4):
        for part in ("ladder", "alone", "errors"):
            planned = cases.planned(part, settings, T4)
            names = {one.case.name for one in planned}
            assert len(names) == len(planned) > 8
            for one in planned:
                prepared(one.case.words, one.setup, cases.lengths_of(one, T4))
                assert short or not one.case.against or one.case.against in names


def test_the_short_ladder_leaves_out_what_a_t4_cannot_hold():
    whole = [one.case.name for one in cases.planned("ladder", cases.settings_for(T4, short=False), T4)]
    short = [one.case.name for one in cases.planned("ladder", cases.settings_for(T4, short=True), T4)]
    assert short == whole[whole.index("ladder_peft") :]
    assert whole[0] == "off"


@pytest.mark.parametrize("number", [10, 17], ids=["packed", "two rows, two micro-batches"])
def test_the_rows_of_an_error_set_take_what_both_counts_say(number):
    settings = cases.settings_for(this_device(), short=True)
    one = cases.planned("errors", settings, this_device())[number - 1]
    lengths = cases.lengths_of(one, this_device())
    case = measure(one.bench, one.case.name, one.case.words, one.setup, "", lengths)
    assert case.seconds == (), "only bytes"
    counted = bytes_by_dry_run(*prepared(one.case.words, one.setup, lengths))
    assert case.peak_allocated_bytes == pytest.approx(counted, rel=accept.BYTES["cpu"])
    assert case.estimated_bytes == pytest.approx(counted, rel=accept.BYTES["cpu"])


@pytest.mark.parametrize("room", [700, 1000, 1040, 1500])
def test_the_longest_row_is_found_from_either_side(room):
    tried = []

    def runs(tokens):
        tried.append(tokens)
        return tokens <= room

    low, high = sitting.search_longest(1000, runs)
    assert low <= room < high <= low * sitting.CLOSE + 1
    assert len(set(tried)) == len(tried) <= 12


class FakeNVML:
    """Stands in for pynvml: a card that gets hot, and is held down once."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_TEMPERATURE_GPU = NVML_CLOCK_SM = 0
    nvmlClocksThrottleReasonSwPowerCap = 4
    nvmlClocksThrottleReasonHwSlowdown = 8
    nvmlClocksThrottleReasonSwThermalSlowdown = 32
    nvmlClocksThrottleReasonHwThermalSlowdown = 64
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 128
    nvmlClocksThrottleReasonApplicationsClocksSetting = 2

    def __init__(self):
        self.bits = iter([1, 4, 4 + 32])

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card):
        return next(self.bits, 1)


def test_the_sensors_are_read_while_a_case_runs(monkeypatch):
    monkeypatch.setattr(sitting, "pynvml", FakeNVML())
    values = iter([{"celsius": 40.0, "clock_mhz": 300.0}, {"celsius": 70.0, "clock_mhz": 900.0, "utilisation": 1.0}])
    monkeypatch.setattr(sitting, "ask", lambda card: next(values, {"celsius": 71.0, "clock_mhz": 910.0}))
    monkeypatch.setattr(sitting, "SECONDS", 0.02)
    with sitting.Watch("a card") as watch:
        while len(watch._readings) < 3:
            time.sleep(0.01)
    found = watch.found()
    assert found.throttled == ("power cap", "thermal slowdown"), "an idle card's reason is none"
    assert 900 <= found.median_clock_mhz <= 910
    assert found.highest_celsius == 71
    with sitting.Watch(None) as nothing:
        pass
    assert nothing.found() is None
