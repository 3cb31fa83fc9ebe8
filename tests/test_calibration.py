"""The measurement of this machine: its pieces, its file, and what makes it stale."""

import json
from dataclasses import replace

import pytest

from cria_tricks.doctor import calibrate
from cria_tricks.hardware import calibration, this_device
from cria_tricks.hardware.calibration import Calibration
from cria_tricks.hardware.gpus import rates_of
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import folds

TINY = find_shape("tiny")
SHORT = calibrate.Rows(16, 16, 2, 16, 16, 16, 16, 1)


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "folder" / "calibration.json"
    monkeypatch.setenv("CRIA_CALIBRATION", str(path))
    return path


def made(**changed) -> Calibration:
    device = this_device()
    rates = {
        "flops products fp32": 2e9,
        "flops products bf16": 8e9,
        "bytes between products fp32": 1e9,
        "bytes unpacking bf16": 5e8,
    }
    found = Calibration(
        device=device.name,
        kind=device.kind,
        threads=calibration.threads(),
        versions=dict(calibration.versions()),
        date="2026-11-23",
        model="tiny",
        launch=1e-5,
        link_rate=1e15,
        rates=rates,
    )
    return replace(found, **changed)


def test_every_piece_is_measured_on_this_machine(monkeypatch):
    monkeypatch.setitem(calibrate.ROWS, "cpu", SHORT)
    monkeypatch.setattr(calibrate, "SECONDS", 0.0)
    said = []
    found = calibrate.measure(said.append, "tiny", seconds=0.0)
    assert said == [*found.rates, "launches"]
    assert found.device == this_device().name
    assert min(found.launch, found.link_rate, *found.rates.values()) > 0
    parts = {part.name for part in folds.time_of(Recipe(), TINY, rates_of_t4()).parts}
    half = {name.rpartition(" ")[2] for name in found.rates}
    assert {"fp32", "bf16"} <= half
    for part in parts & {"between products", "loss", "attention", "optimizer"}:
        assert f"bytes {part} fp32" in found.rates


def rates_of_t4():
    from cria_tricks.hardware.cards import CARDS

    return CARDS["t4"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_measured_piece_counts_the_work_that_the_estimate_counts(precision, monkeypatch):
    """The rates divide the estimate's counts, so a block's forward and backward products must be those of the piece."""
    monkeypatch.setitem(calibrate.ROWS, "cpu", SHORT)
    monkeypatch.setattr(calibrate, "FEW", {})
    device = replace(this_device(), kind="cpu")
    pieces = {name: work for name, work, _ in calibrate._pieces(TINY, device)}
    # Forward and the gradient of the input, of as many blocks as take turns.
    assert pieces[f"flops products {precision}"] == 2 * 2 * 16 * TINY.block_linear_weights * SHORT.blocks
    blocks = TINY.block_linear_weights * min(calibrate.COPIES, TINY.layers)
    assert pieces["bytes casts of weights bf16"] == 6 * (blocks + TINY.vocabulary * TINY.width)


def test_a_plan_for_this_machine_uses_what_was_measured_here(file):
    device = this_device()
    recipe = with_settings(Recipe(), ["tricks.peft=lora", "tricks.attention=sdpa", "data.max_length=64"])
    target = Target(TINY, device)
    assert target.bill(recipe).seconds is None, "a CPU has no datasheet"
    calibration.store(made())
    card = rates_of(device)
    assert card is not None
    assert card.basis("fp32") == "measured here"
    assert card.product_rate("products", "fp32") == 2e9
    assert card.product_rate("products", "bf16") == 8e9
    assert card.traffic_rate("unpacking", "bf16") == 5e8
    assert card.traffic_rate("between products", "fp32") == 1e9
    step = folds.time_of(recipe, TINY, card)
    seconds = {part.name: part.seconds for part in step.parts}
    flops = {part.name: part.flops for part in step.parts}
    assert seconds["blocks forward"] == pytest.approx(flops["blocks forward"] / 2e9)
    assert target.bill(recipe).seconds == pytest.approx(step.seconds / step.tokens)
    calibration.store(made(rates={**made().rates, "flops products fp32": 1e9}))
    again = {part.name: part.seconds for part in folds.time_of(recipe, TINY, rates_of(device)).parts}
    assert again["blocks forward"] == pytest.approx(2 * seconds["blocks forward"]), "a new file is read anew"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"device": "another CPU"}, "another CPU, now"),
        ({"threads": 99}, "99 threads, now"),
        ({"versions": {"torch": "0.1"}}, "torch 0.1, now"),
    ],
)
def test_another_device_or_version_makes_it_stale_which_is_said_and_ignored(file, changed, said):
    calibration.store(made(**changed))
    device = this_device()
    assert said in calibration.stale(device)
    assert calibration.stale(device).endswith(calibration.AGAIN)
    assert rates_of(device) is None


def test_a_stale_calibration_is_a_warning_of_plans_for_this_machine_alone(file):
    from cria_tricks.run import api

    calibration.store(made(versions={}))
    here = api.plan("smoke", gpu=this_device())
    assert any(calibration.AGAIN in warning for warning in here.warnings)
    assert not any(calibration.AGAIN in warning for warning in api.plan("smoke", gpu="l4").warnings)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"device": 1}', "null"])
def test_a_damaged_file_counts_as_none(file, text):
    file.parent.mkdir()
    file.write_text(text)
    assert calibration.read() is None
    assert calibration.card_of(this_device()) is None
    assert calibration.stale(this_device()) == ""


def test_rates_that_cannot_be_are_not_used(file):
    calibration.store(made(launch=0.0))
    assert calibration.read() is None


def test_ctrl_c_leaves_the_older_measurement(file, monkeypatch, run_cria):
    calibration.store(made())
    before = file.read_text()

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "measure", interrupted)
    code, _, stderr = run_cria("doctor", "--calibrate")
    assert code == 130
    assert "nothing was written" in stderr
    assert file.read_text() == before


def test_the_command_shows_stores_and_says_where(file, monkeypatch, run_cria):
    monkeypatch.setattr(calibrate, "measure", lambda say: say("products") or made())
    code, stdout, stderr = run_cria("doctor", "--calibrate")
    assert code == 0, stderr
    assert "products" in stderr, "its progress"
    assert str(file) in stdout.replace("\n", "")
    assert "8.0 GFLOP/s" in stdout
    assert json.loads(run_cria("doctor", "--calibrate", "--json")[1])["rates"]["bytes unpacking bf16"] == 5e8
    plan = json.loads(run_cria("plan", "smoke", "--gpu", "here", "--json")[1])
    assert plan["gpu"] == this_device().name
    assert plan["seconds_by"] == "measured here"
    assert "as measured here" in " ".join(run_cria("plan", "smoke", "--gpu", "here")[1].split())
    assert json.loads(run_cria("plan", "smoke", "--gpu", "t4", "--json")[1])["seconds_by"] != "measured here"
