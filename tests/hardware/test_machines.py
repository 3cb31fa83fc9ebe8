"""``cria plan RECIPE --gpu all``: each row is what a plan of that machine says, and one line refuses what cannot be."""

import json
import math

import pytest

import cria_tricks
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import FLAVORS, PRICES_DATE
from cria_tricks.run.machines import compare

FREE = ["Colab, free", "Kaggle, free"]
OFFLOADED = ("tricks.activation_offload=true", "tricks.chunked_loss=true", "data.max_length=16384")
"""Without checkpointing, more activations are offloaded than Colab's machine has memory."""


@pytest.mark.parametrize("asked", [{}, {"model": "smollm2", "rows_full": True}])
def test_each_machine_gets_the_answer_of_its_plan(asked):
    found = compare("kwanzaa", rows=107, **asked)
    assert [offer.machine for offer in found] == [*FREE, *FLAVORS]
    assert [offer.gpu for offer in found[:3]] == ["t4@colab", "t4x2@kaggle", "t4x1"]
    for offer in found:
        if offer.machine not in (*FREE, "t4-small", "l4x4", "a100-large"):  # a search takes a second
            continue
        plan = cria_tricks.plan("kwanzaa", gpu=offer.gpu, rows=107, **asked)
        assert (offer.verdict, offer.needed_bytes) == (plan.verdict, plan.needed_bytes)
        assert offer.capacity_bytes == plan.capacity_bytes
        assert list(offer.set) == (plan.fit.chosen.set if plan.fit else [])
        assert offer.minutes == (plan.run.minutes_low, plan.run.minutes_high)
        assert offer.cost == tuple(minutes / 60 * offer.price for minutes in offer.minutes)


def test_four_cards_hold_no_larger_model_than_one_and_take_a_quarter_of_the_time():
    found = {offer.machine: offer for offer in compare("kwanzaa", rows=107)}
    one, four = found["l4x1"], found["l4x4"]
    assert (one.needed_bytes, one.capacity_bytes) == (four.needed_bytes, four.capacity_bytes)
    assert one.minutes[0] / 4 < four.minutes[0] < one.minutes[0] / 4 * 1.02


def test_a_host_that_is_too_small_is_said_and_an_unknown_one_is_not_checked():
    found = {offer.machine: offer for offer in compare("kwanzaa", rows=107, settings=[*OFFLOADED])}
    colab, rented = found["Colab, free"], found["t4-small"]
    assert (colab.verdict, colab.minutes) == ("does not fit", None)
    assert colab.why.startswith("the host needs ")
    assert rented.fits
    assert (colab.needed_bytes, rented.why) == (rented.needed_bytes, "")


def test_a_search_that_finds_no_set_says_what_the_smallest_needs():
    small, *_, large = compare("kwanzaa", model="llama-3.1-70b", fit="smallest", rows=107)
    assert large.fits
    assert (small.verdict, small.fits, small.minutes) == ("does not fit", False, None)
    assert small.needed_bytes > small.capacity_bytes


def test_what_some_machines_refuse_is_told_once_and_what_all_refuse_is_an_error(run_cria):
    code, stdout, _ = run_cria("plan", "kwanzaa", "--gpu", "all", "--set", "attn=flash_attention_2")
    assert code == 0
    said = " ".join(stdout.split())
    assert "fits 7 of 11 machines" in said
    refused = "Colab, free, Kaggle, free, t4-small, t4-medium: tricks.attention=flash_attention_2: it needs compute "
    assert said.count(refused) == said.count("it needs compute") == 1
    for wrong in ({"rows": 0}, {"settings": ["tricks.chunked_loss=true", "tricks.peft=none", "train.max_steps=-1"]}):
        with pytest.raises(BadInput) as caught:
            compare("kwanzaa", **wrong)
        assert "\n" not in str(caught.value)


def test_the_command_names_the_cheapest_and_the_fastest_and_those_that_may_be_as_good(run_cria, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # so that a list of machines stands on one line
    asked = ("plan", "kwanzaa", "--gpu", "all", "--rows", "107")
    found = json.loads(run_cria(*asked, "--json")[1])["machines"]
    rented = [offer for offer in found if offer["price"]]
    code, stdout, stderr = run_cria(*asked)
    assert (code, stderr) == (0, "")
    lines = stdout.splitlines()
    assert lines[0].split() == "verdict fits 11 of 11 machines".split()
    for line, name, key in ((lines[1], "cheapest", "cost"), (lines[2], "fastest", "minutes")):
        best = min(rented, key=lambda offer: math.prod(offer[key]))
        assert line.startswith(name)
        assert f" {best['machine']}: " in line
        named = line.partition("not told apart from ")[2].strip().split(", ")
        assert named == [one["machine"] for one in rented if one != best and one[key][0] <= best[key][1]]
    assert all(offer["machine"] in stdout and offer["gpu"] in stdout for offer in found)
    assert trust.TIME in " ".join(stdout.split())
    assert f"list of {PRICES_DATE}" in " ".join(stdout.split())


def test_without_rows_there_are_bytes_and_what_is_missing(run_cria):
    code, stdout, _ = run_cria("plan", "smoke", "--gpu", "ALL", "--set", "data.train=kwanzaa")
    assert code == 0
    assert "--rows N, the number of training rows" in stdout
    assert "cheapest" not in stdout


def test_it_leaves_with_3_if_no_machine_has_room(run_cria):
    large = ("--set", "train.batch_size=64", "--set", "tricks.gradient_checkpointing=false")
    code, stdout, _ = run_cria("plan", "kwanzaa", "--gpu", "all", *large, "--json")
    assert code == 3
    assert {offer["verdict"] for offer in json.loads(stdout)["machines"]} == {"does not fit"}


@pytest.mark.parametrize("option", ["--dry-run", "--switches", "--ladder", "--front", "--longest"])
def test_what_is_about_one_machine_is_refused(option, run_cria):
    code, stdout, stderr = run_cria("plan", "kwanzaa", "--gpu", "all", option)
    assert (code, stdout) == (2, "")
    assert stderr == f"error: {option} with --gpu all: it is about one machine; name it, such as --gpu t4\n"


def test_from_python_a_plan_of_all_machines_is_another_function():
    with pytest.raises(BadInput, match="^gpu=all: this is about one machine; .* cria plan RECIPE --gpu all"):
        cria_tricks.plan("kwanzaa", gpu="all")
