"""The answers of the page "Will it fit?": those of ``cria plan --json``, in the words of the commands."""

import json
import re
import shlex
import subprocess

import pytest

from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.data.lengths import Lengths
from cria_tricks.hardware import T4
from cria_tricks.hardware.gpus import GPUS
from cria_tricks.models.catalogue import CATALOGUE, CONFIGS
from cria_tricks.models.shape import find_shape, shape_of
from cria_tricks.predict import plan_data, toggles
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe
from cria_tricks.run import api
from cria_tricks.settings import Tricks
from tests.fit_choices import MANY, PASTED, choices, differences, pasted, planned, reduced
from tests.sweeps import ALL, sample
from tools import browser_python
from tools.fit import answers, bridge, fields, others, page, show
from tools.fit.words import plain

OWN = fields.default() | {"set": fields.OWN}
"""The first choice, answered as it is."""


def asked(job, **given):
    """What the page gets."""
    return json.loads(bridge.call(job, json.dumps(given)))


def test_random_choices_and_pasted_configs_get_the_answer_of_cria_plan(tmp_path):
    """500 choices and 20 configs under CRIA_ALL=1; here some of them."""
    verdicts, refused, every = set(), 0, [*sample(choices(), 24), *sample(pasted(), 4)]
    for choice in every:
        found = asked("answer", choice=reduced(choice))
        plan = planned(choice, tmp_path)
        found = found if "refused" in found else found["data"]
        assert differences(found, plan) == [], (choice, found, plan)
        verdicts.add(plan.get("verdict"))
        refused += "refused" in plan
    assert verdicts == {"fits", "tight", "does not fit", None} or not ALL
    assert refused < len(every) / 2, "most choices were refused, so little was compared"


def test_the_command_says_the_same_as_the_page(tmp_path):
    for choice in sample(choices(), 8, seed=1):
        found = asked("answer", choice=choice)
        if "refused" in found:
            continue
        words = shlex.split(found["commands"]["plan"])
        assert words[:5] == ["cria", "plan", "qlora", "--model", choice["model"]]
        assert "--as-is" in words
        settings = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
        plan = api.plan("qlora", model=choice["model"], gpu=choice["card"], settings=settings,
                        rows=int(choice["rows"]), rows_full=True, as_is=True)  # fmt: skip
        assert (plan.needed_bytes, plan.seconds_per_step) == (
            found["data"]["needed_bytes"],
            pytest.approx(found["data"]["seconds_per_step"]) if plan.seconds_per_step else None,
        )


def test_a_mean_length_changes_time_and_not_memory():
    full = asked("answer", choice=OWN)["data"]
    half = asked("answer", choice=OWN | {"mean": "1024"})["data"]
    assert half["needed_bytes"] == full["needed_bytes"]
    recipe = recipes.capstone(T4)
    by_hand = plan_data.bill(Target(find_shape(recipe.model), T4), recipe, lengths=Lengths(2048, 1024))
    assert half["seconds_per_step"] == pytest.approx(by_hand.seconds_per_step)
    assert half["seconds_per_step"] == pytest.approx(full["seconds_per_step"] / 2)
    assert "is more than the sequence length" in asked("answer", choice=OWN | {"mean": "2049"})["refused"]


def test_what_a_switch_would_change_is_what_the_commands_say():
    choice = OWN
    found = asked("beside", choice=choice)
    target = Target(find_shape(choice["model"]), T4)
    recipe = recipes.capstone(T4)
    assert found["longest"] == toggles.longest(target, recipe)
    for change in toggles.suggestions(target, recipe):
        name, _, value = change.set.removeprefix("tricks.").partition("=")
        there = found["values"][name][value]
        assert (there["saved_bytes"], there["slowdown"]) == (change.saved_bytes, pytest.approx(change.slowdown))
    for change in toggles.removed(target, recipe):
        name = change.set.partition("=")[0]
        if name in fields.SWITCHES:
            off = fields.as_text(getattr(Tricks(), name))
            assert found["values"][name][off]["saved_bytes"] == -change.saved_bytes
    bf16 = found["values"]["precision"]["bf16"]["refused"]
    assert "bf16" in bf16
    assert asked("answer", choice=choice | {"precision": "bf16"})["refused"] == bf16


PASCAL = {name for name, gpu in GPUS.items() if gpu.device.capability < (7, 0)}
TURING = {name for name, gpu in GPUS.items() if gpu.device.capability < (8, 0)}


@pytest.mark.parametrize(
    ("change", "field", "some"),
    [
        ({"card": "l4", "precision": "bf16"}, "card", TURING),
        ({"compile": "true"}, "card", PASCAL),
        ({"tiled_mlp": "true"}, "model", {"mixtral-8x7b"}),
        ({"model": "phi-4-mini"}, "targets", {"qv"}),
    ],
)
def test_models_cards_and_targets_that_would_be_refused_are_named_with_the_reason(change, field, some):
    choice = OWN | change
    beside = asked("beside", choice=choice)["values"][field]
    assert {value for value, one in beside.items() if "refused" in one} == some
    for value in {*some, *list(others.LISTS[field])[:4]}:
        found = asked("answer", choice=choice | {field: value})
        if "also" in beside.get(value, {}):
            continue
        assert beside.get(value, {}).get("refused") == found.get("refused"), value
        for name, other in beside.get(value, {}).get("instead", {}).items():
            assert "refused" not in asked("answer", choice=choice | {field: value, name: other})
    if field == "card":
        assert any("instead" in beside[value] for value in some)


def test_a_model_that_needs_a_switch_off_is_possible_and_takes_it_along():
    choice = OWN
    beside = asked("beside", choice=choice)["values"]["model"]
    assert beside == {name: {"also": ["chunked_loss"]} for name in ("granite-3.1-2b", "granite-3.1-8b")}
    model = {"model": "granite-3.1-2b"}
    assert "refused" in asked("answer", choice=choice | model)
    found = asked("answer", choice=choice | model | {"chunked_loss": "false"})["data"]
    plan = api.plan("qlora", gpu="t4", rows_full=True, as_is=True, **model)
    assert plan.needed_bytes == found["needed_bytes"]


def test_a_refused_choice_says_at_which_field_and_what_would_mend_it():
    choice = OWN | {"peft": "none"}
    found = asked("answer", choice=choice)
    assert {"peft"} <= set(found["at"]) <= set(fields.BY_NAME)
    mended = asked("beside", choice=choice)["values"]
    ways = [(name, value) for name, values in mended.items() for value, one in values.items() if one.get("mends")]
    assert ("peft", "lora") in ways
    for name, value in ways:
        assert "refused" not in asked("answer", choice=choice | {name: value})


def test_make_it_fit_changes_little_and_make_it_fast_searches():
    choice = OWN | {"gradient_checkpointing": "false", "chunked_loss": "false", "batch": "4"}
    before = asked("answer", choice=choice)["data"]
    assert before["verdict"] == "does not fit"
    found = asked("search", choice=choice, aim="fit")
    after = asked("answer", choice=choice | found["changes"])["data"]
    assert after["verdict"] == "fits"
    assert 1 <= len(found["changes"]) <= 2
    fast = asked("search", choice=fields.default(), aim="fastest")
    plan = api.plan(recipes.capstone(T4), gpu="t4", rows_full=True, fit="fastest")
    assert fast["set"] == list(plan.fit.chosen.set)


OFF = {**fields.of_recipe(Recipe()), "batch": "1", "tokens": "8192", "attention": "sdpa", "expand_kv": "true"}
UNQUANTIZED = {"model": "llama-3.1-8b", "quantization": "none", "double_quantization": "false"}


@pytest.mark.parametrize(
    ("change", "needs", "changes"),
    [
        (OFF, "that trains all weights fits Tesla T4", {"peft": "lora", "quantization": "nf4"}),
        (UNQUANTIZED, "fits Tesla T4", {"quantization": "nf4"}),
        (
            {"model": "llama-3.1-70b"},
            "fits Tesla T4",
            {"stream_layers": "file"},
        ),  # Colab's RAM is small
        ({"model": "llama-3.1-8b", "tokens": "90000"}, "fits Tesla T4", {"tiled_mlp": "true"}),
    ],
    ids=["all weights", "16 bits", "70B", "long rows"],
)
def test_where_no_set_fits_the_page_offers_what_would(change, needs, changes):
    choice = OWN | {"gradient_accumulation": "1"} | change  # fewer sets to try
    found = asked("search", choice=choice, aim="fit")
    assert found["says"].startswith(f"No set of switches {needs}: the smallest needs ")
    assert "--" not in found["says"]
    for way in found["ways"]:
        after = asked("answer", choice=choice | way["changes"])["data"]
        assert after["verdict"] == "fits", way
        assert after.get("host", {}).get("verdict") != "does not fit", way
        if "tokens" not in way["changes"]:
            assert show.amount(after["needed_bytes"]) in way["says"]
    assert any(changes.items() <= way["changes"].items() for way in found["ways"]), found
    assert not any("nf4" == choice["quantization"] == way["changes"].get("quantization") for way in found["ways"])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("tricks.keep_attention=true: blocks keep everything; set tricks.gradient_checkpointing=true",
         "“Selective checkpointing: on”: blocks keep everything; set “Gradient checkpointing: every block”"),
        ("layer_by_layer has no effect: without stream_layers",
         "“All micro-batches through each streamed layer” has no effect: without “Weights on the host, streamed layer "
         "by layer”"),
        ("--set train.batch_size=0: train.batch_size = '0': too small", "“Batch size” = '0': too small"),
        ("model config.json: we cannot estimate model_type 't5'", "We cannot estimate model_type 't5'"),
        ("the attention and the optimizer are words", "The attention and the optimizer are words"),
    ],
)  # fmt: skip
def test_messages_name_settings_as_the_form_does(message, words):
    assert plain(message) == words


def test_no_refusal_or_warning_names_a_switch_by_its_code_name():
    for choice in sample(choices(), 24, seed=2):
        found = asked("answer", choice=choice)
        said = [found["says"]] if "refused" in found else map(plain, found["data"]["warnings"])
        for words in said:
            assert not re.search(r"(tricks|train|data|lora)\.\w|\w+_\w+=", words), words


def test_a_hint_says_what_counts_and_nothing_else():
    values = asked("beside", choice=OWN)["values"]
    none, fp4, int8 = (values["quantization"][value] for value in ("none", "fp4", "int8"))
    assert none["words"].startswith("+1.3 GiB")
    assert {"double_quantization"} <= set(none["also"]), "what else goes off is named, because it is counted"
    assert fp4["link"] == show.QUALITY
    assert "times" not in int8["words"], "a factor below 5 % is not told"
    assert values["tiled_mlp"]["true"]["words"] == "", "it changes nothing here"


def test_the_search_in_steps_says_how_far_it_is():
    choice = OWN | {"tokens": "20000", "batch": "2", "gradient_accumulation": "1"}
    steps = [json.loads(step) for step in bridge.steps("search", json.dumps({"choice": choice, "aim": "fastest"}))]
    tried, every = steps[-1]
    assert tried == every == sum(of > 0 for _, of in steps)
    assert steps[0] == [0, 0], "the sets are listed in steps, too"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "config.json", "config": "{"}, "config.json cannot be read as JSON"),
        ({"model": "config.json", "config": "[]"}, "is no JSON object"),
        ({"model": "config.json", "config": ""}, "paste the text of a config.json"),
        ({"model": "config.json", "config": '{"model_type": "llama", "hidden_size": 64}'}, "has no num_hidden_layers"),
        ({"model": "config.json", "config": '{"model_type": "bert"}'}, "we cannot estimate model_type 'bert'"),
        ({"model": "numbers", "kv_heads": "5"}, "32 heads cannot share 5 key heads"),
        ({"model": "numbers", "layers": "0"}, "Layers (num_hidden_layers): 0 is no whole number from 1 to 1,000"),
        ({"card": "h900"}, "unknown card h900"),
        ({"epochs": "0"}, "train.epochs"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(change, words):
    assert words in asked("answer", choice=OWN | change)["refused"]


def test_bare_numbers_are_a_llama():
    found = asked("answer", choice=OWN | {"model": "numbers"})["data"]
    assert found["needed_bytes"] == asked("answer", choice=OWN)["data"]["needed_bytes"]


def test_a_link_keeps_all_of_a_config_that_is_read():
    for name in CATALOGUE:
        config = {field: value for field, value in CONFIGS[name].items() if field in answers.READ}
        assert shape_of(config, name) == find_shape(name)


def test_every_switch_of_the_package_is_on_the_page():
    assert set(fields.SWITCHES) | {"gradient_accumulation"} == set(Tricks.model_fields)
    for name in fields.SWITCHES:
        for value in fields.BY_NAME[name].values:
            assert fields.as_text(getattr(Tricks(), name)) in fields.BY_NAME[name].values
            assert answers.asked(OWN | {name: value})


def test_a_tight_run_and_long_rows_are_said():
    tight = asked("answer", choice=OWN | {"tokens": "8192", "batch": "7"})
    assert tight["data"]["verdict"] == "tight"
    least, needed = (tight["data"][f"{name}_bytes"] for name in ("least", "needed"))
    said = tight["html"]["verdict"].partition("It is tight.</strong> ")[2]
    assert said.startswith(f"{show.amount(least)} for tensors and CUDA of 14.7 GiB. ")
    assert f"about {show.amount(needed - least)} besides" in said
    far = asked("answer", choice=OWN | {"tokens": "999999"})
    assert far["html"]["verdict"].endswith("Rows are longer than the model&#x27;s context.")
    assert "longer than the model&#x27;s context of 131072" in far["html"]["rest"]
    assert "An optimizer step takes" not in far["html"]["rest"], "a run that does not fit has no time"
    assert "An optimizer step takes" in tight["html"]["rest"]


def test_two_choices_stand_beside_each_other():
    other = OWN | {"model": "llama-3.2-3b"}
    found = asked("answer", choice=other, pinned=fields.default())
    one, two = (asked("answer", choice=choice)["data"]["needed_bytes"] for choice in (fields.default(), other))
    assert found["html"]["bar"].count('class="stack"') == 2
    assert f"<td>{show.change(two - one)}</td>" in found["html"]["rest"]
    assert show.change(one - two).startswith("−")


def test_experts_have_a_line_of_their_own():
    found = asked("answer", choice=OWN | {"model": "mixtral-8x7b", "card": "a100", "targets": "all"})
    lines = {line["name"]: line["bytes"] for line in show.lines(found["data"])}
    shape = find_shape("mixtral-8x7b")
    assert lines["weights: experts"] == 2 * shape.layers * shape.experts * 3 * shape.width * shape.inner
    assert sum(lines.values()) == found["data"]["needed_bytes"]


def test_a_name_cannot_become_markup():
    found = asked("answer", choice=OWN | {"model": "config.json", "config": "<img src=x>"})
    assert "<img" not in json.dumps(found.get("html", {}))
    html = page.whole()
    data = re.search(r'<script type="application/json" id="fit-data">(.*?)</script>', html, re.S)[1]
    assert json.loads(data)["default"] == fields.default()
    assert "<" not in data


def test_the_page_shows_its_first_answer_without_a_script():
    html = page.whole()
    found = asked("answer", choice=OWN)
    assert found["html"]["verdict"] in html
    assert found["html"]["bar"] in html
    for name in fields.BY_NAME:
        assert f'id="fit-{name}"' in html


def test_without_npm_the_site_has_one_answer_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(browser_python, "HERE", tmp_path / "python")
    (tmp_path / "python").mkdir()
    with monkeypatch.context() as without:
        without.setattr(browser_python.shutil, "which", lambda name: None)
        missing = browser_python.put()
    assert "install npm" in missing
    assert not (tmp_path / "python").exists(), "files of another package would answer"
    html = page.put_in(page.PLACE, missing)
    assert json.dumps(missing) in html
    assert asked("answer", choice=OWN)["html"]["verdict"] in html


def test_a_download_that_fails_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(browser_python, "HERE", tmp_path / "python")
    monkeypatch.setattr(browser_python, "KEPT", tmp_path / "kept")
    monkeypatch.setattr(browser_python.shutil, "which", lambda name: name)

    def fails(command, **options):
        raise subprocess.CalledProcessError(1, command)

    monkeypatch.setattr(browser_python.subprocess, "run", fails)
    said = browser_python.put()
    assert said.startswith(browser_python.FAILED)
    assert "npm ci" in said
    assert "\n" not in said
    assert not (tmp_path / "python").exists()


def test_python_for_browsers_is_made_again_when_the_package_changes(monkeypatch, tmp_path):
    files = browser_python.package_files()
    names = {str(path.relative_to(browser_python.ROOT)) for path in files}
    assert {"cria_tricks/bill/bill.py", "cria_tricks/hardware/measured_cards.json", "tools/fit/answers.py"} <= names
    before = browser_python.key()
    monkeypatch.setattr(browser_python, "package_files", lambda: files[1:])
    assert browser_python.key() != before


def test_every_file_from_npm_and_pypi_has_a_hash():
    lock = json.loads((browser_python.PINS / "package-lock.json").read_text())["packages"]
    assert all("integrity" in package for name, package in lock.items() if name)
    pins = (browser_python.PINS / "requirements.txt").read_text().splitlines()
    lines = [line for line in pins if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w-]+==[\d.]+ --hash=sha256:[0-9a-f]{64}", line) for line in lines)
    notice = (browser_python.PINS / "NOTICE.txt").read_text()
    assert all(line.partition("==")[0] in notice for line in lines), "and its license is told"
    assert f"Pyodide {lock['node_modules/pyodide']['version']}," in notice


def test_the_page_says_how_many_choices_are_compared():
    text = " ".join((browser_python.ROOT / "docs" / "fit.md").read_text().split())
    assert f"{MANY} random choices and {PASTED} pasted configs" in text


def test_an_unknown_value_raises_and_no_other_error_does():
    with pytest.raises(BadInput):
        answers.answer(OWN | {"model": "llama-9"})
