"""``cria plan``, as a user and as a script meets it: one document, exit code 0 or 3, one line for an error."""

import json
import subprocess
import sys

import pytest

from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import PRICES_DATE
from cria_tricks.predict import answer
from cria_tricks.switches import FIELDS

HOST = ("plan", "kwanzaa", "--gpu", "t4", "--set", "data.max_length=16384", "--set", "tricks.activation_offload=true")
HOST += ("--set", "tricks.chunked_loss=true")
"""Without checkpointing, more activations are offloaded than Colab's machine has memory."""
SMALLEST = ("--set", "tricks.gradient_checkpointing=true", "--set", "tricks.chunked_loss=true")
TIGHT = (*SMALLEST, "--set", "data.max_length=8192", "--set", "train.batch_size=7")
"""The Kwanzaa recipe then takes 13.9 of a T4's 14.7 GiB, without what the allocator keeps."""

CONTRACT = {"model", "gpu", "capacity_bytes", "peak_bytes", "fits", "method", "lines", "suggestions"}
LINE = {"name", "bytes", "why"}


def test_the_document_holds_what_scripts_read(run_cria):
    code, stdout, stderr = run_cria("plan", "kwanzaa", "--gpu", "t4", "--json")
    assert (code, stderr) == (0, "")
    found = json.loads(stdout)
    assert set(found) >= CONTRACT
    assert (found["model"], found["gpu"], found["method"]) == ("llama-3.2-1b", "Tesla T4", "closed_form")
    assert found["capacity_bytes"] == 15_828_320_256
    assert found["fits"] is True
    assert all(set(row) == LINE and row["why"] for row in found["lines"] + found["around"])
    assert sum(row["bytes"] for row in found["lines"]) == found["peak_bytes"]
    assert sum(row["bytes"] for row in found["lines"] + found["around"]) == found["needed_bytes"]
    assert {"set", "peak_bytes", "fits"} <= set(found["suggestions"][0])
    slowdowns = [round(entry["slowdown"], 2) for entry in found["suggestions"]]
    assert slowdowns == sorted(slowdowns)
    assert found["front"] is None, "only when it is asked for"


def test_what_does_not_fit_says_what_to_flip_and_leaves_with_3(run_cria):
    code, stdout, stderr = run_cria("plan", "kwanzaa", "--model", "llama-3.1-70b", "--gpu", "t4", "--json")
    assert (code, stderr) == (3, "")
    found = json.loads(stdout)
    assert found["fits"] is False
    assert found["needed_bytes"] > found["capacity_bytes"]
    sets = ["--set", "tricks.chunked_loss=false", "--set", "tricks.gradient_checkpointing=false"]
    code, stdout, _ = run_cria("plan", "kwanzaa", "--gpu", "t4", *sets, "--set", "train.batch_size=4")
    assert code == 3
    assert "verdict  does not fit: needs " in stdout
    assert "GiB too much" in stdout
    assert "What would lower the peak, the smallest slowdown first" in stdout
    assert "tricks.chunked_loss=true" in stdout


def test_each_toggle_alone_each_removed_and_the_ladder(run_cria):
    code, stdout, _ = run_cria("plan", "kwanzaa", "--gpu", "t4", "--json")
    found = json.loads(stdout)
    on = [field for field in FIELDS if field in {entry["set"].partition("=")[0] for entry in found["removed"]}]
    assert "quantization" in on
    assert [entry["set"].partition("=")[0] for entry in found["alone"]] == on
    assert [entry["set"][0].partition("=")[0] for entry in found["ladder"][1:]] == on
    assert found["ladder"][0]["set"] == ["plain fp32, everything trained"]
    assert found["ladder"][-1]["peak_bytes"] == found["peak_bytes"]
    assert all(entry["after_bytes"] == found["peak_bytes"] for entry in found["removed"])
    for entry in found["alone"] + found["removed"]:
        assert entry["saved_bytes"] == entry["before_bytes"] - entry["after_bytes"]
    tables = {
        "--switches": ("Each switch alone", "What you would lose by switching one off"),
        "--ladder": ("The ladder: switches added one after the other",),
    }
    short = run_cria("plan", "kwanzaa", "--gpu", "t4")[1]
    for option, titles in tables.items():
        code, stdout, _ = run_cria("plan", "kwanzaa", "--gpu", "t4", option)
        assert code == 0
        assert all(title in stdout and title not in short for title in titles)
    stdout = run_cria("plan", "kwanzaa", "--gpu", "t4", "--switches", *SMALLEST)[1]
    assert [line.split() for line in stdout.splitlines() if line.startswith("gradient_checkpointing=true")] == [
        ["gradient_checkpointing=true", "20.4", "GiB", "10.9", "GiB", "less", "1.23", "times", "slower"],
        ["gradient_checkpointing=true", "4.6", "GiB", "3.1", "GiB", "more", "1.34", "times", "faster"],
    ]
    assert "-" not in "".join(line for line in stdout.splitlines() if " more" in line or " less" in line)


def test_the_answer_leads_with_verdict_peak_time_and_price(run_cria):
    """Four lines, before anything else, and each fits a terminal of 80 columns."""
    _, stdout, _ = run_cria("plan", "kwanzaa", "--gpu", "t4", "--rows", "107")
    lines = [line.rstrip() for line in stdout.splitlines()[:5]]
    assert lines == [
        "verdict  fits: needs 9.5 GiB of 14.7 GiB on Tesla T4, 5.2 GiB to spare",
        "peak     7.3 GiB at the loss; the largest part: saved activations, 3.3 GiB",
        "time     6.0 to 9.0 min to train, 8.9 to 13 s an optimizer step, by public runs",
        f"price    $0.04 to $0.06 on t4-small, the cheapest of 2 (HF Jobs, {PRICES_DATE})",
        "",
    ]
    assert max(map(len, lines)) <= 80
    lead = run_cria("plan", "kwanzaa", "--gpu", "t4")[1].splitlines()[:4]
    assert [line.split()[0] for line in lead] == ["verdict", "peak", "time", "price"]
    assert "give --rows N" in lead[3]
    narrow = run_cria("plan", "kwanzaa", "--gpu", "t4", *TIGHT)
    assert narrow[1].startswith("verdict  tight: at least 13.9 GiB of 14.7 GiB on Tesla T4, up to 17.6 GiB with ")
    assert "What would lower the peak" in narrow[1]


def test_advice_longest_and_prices_are_there_when_asked_for(run_cria):
    asked = ("plan", "kwanzaa", "--gpu", "t4", "--front", "--longest", "--rows", "107")
    code, stdout, _ = run_cria(*asked, "--json")
    assert code == 0
    found = json.loads(stdout)
    assert found["front"][0]["seconds_per_token"] <= found["front"][-1]["seconds_per_token"]
    assert found["front"][0]["needed_bytes"] >= found["front"][-1]["needed_bytes"]
    assert {entry["flavor"] for entry in found["prices"]} == {"t4-small", "t4-medium"}
    assert all(entry["minutes"] > 0 and entry["cost"] > 0 for entry in found["prices"])
    as_they_are = ("--set", "tricks.gradient_checkpointing=false", "--set", "tricks.chunked_loss=false")
    for more, verdict in ((0, "fits"), (1, "tight")):
        length = f"data.max_length={found['longest'] + more}"
        _, stdout, _ = run_cria("plan", "kwanzaa", "--gpu", "t4", "--set", length, *as_they_are, "--json")
        assert json.loads(stdout)["verdict"] == verdict
    code, stdout, _ = run_cria(*asked)
    assert code == 0
    for words in (
        "sets of switches that no other set beats in both memory and time",
        "longest row that fits: ",
        "t4-small: ",
    ):
        assert words in stdout


def test_the_longest_row_is_asked_of_the_host_too(run_cria):
    switches = ("gradient_checkpointing", "chunked_loss", "tiled_mlp", "activation_offload")
    asked = ["plan", "kwanzaa", "--gpu", "t4", "--model", "llama-3.1-8b", "--as-is"]
    asked += [word for switch in switches for word in ("--set", f"tricks.{switch}=true")]
    found = json.loads(run_cria(*asked, "--longest", "--json")[1])
    assert 0 < found["longest_on_host"] < found["longest"]
    said = f"longest row that fits: {found['longest']:,} tokens; the host has room for {found['longest_on_host']:,}"
    assert said in " ".join(run_cria(*asked, "--longest")[1].split())
    verdicts = []
    for tokens in (found["longest_on_host"], found["longest_on_host"] + 1):
        stdout = run_cria(*asked, "--set", f"data.max_length={tokens}", "--json")[1]
        verdicts.append(json.loads(stdout)["host"]["verdict"])
    assert verdicts == ["fits", "does not fit"], "pinned memory is rounded up to a power of two"


def test_a_host_without_room_for_any_row_is_said(run_cria):
    asked = ["plan", "kwanzaa", "--gpu", "t4", "--model", "llama-3.1-8b", "--longest"]
    off = ("quantization=none", "double_quantization=false")
    for setting in ("stream_layers=true", "gradient_checkpointing=true", "chunked_loss=true", *off):
        asked += ["--set", f"tricks.{setting}"]
    found = json.loads(run_cria(*asked, "--json")[1])
    assert (found["longest_on_host"], found["longest"] > 0) == (0, True), "15 GiB of blocks wait on a host with 11.8"
    assert "tokens; the host has room for no row" in " ".join(run_cria(*asked)[1].split())


def test_groups_of_cut_matrices_are_planned_with_every_set_of_toggles(run_cria):
    """What accumulation is worth is priced without it, so a step has fewer micro-batches than there are groups."""
    code, stdout, stderr = run_cria(
        "plan", "kwanzaa", "--gpu", "a100", "--nproc", "4", "--set", "parallel.strategy=ddp_tensor",
        "--set", "parallel.tensor_size=2", "--set", "tricks.quantization=none",
        "--set", "tricks.double_quantization=false", "--set", "tricks.optimizer=adamw",
        "--set", "tricks.paged_optimizer=false",
    )  # fmt: skip
    assert code == 0, stderr
    assert "of 39.4 GiB" in stdout


@pytest.mark.parametrize("gpu", ["rtx3060", "4070 laptop", "v100", "l4"])
def test_the_minutes_of_a_run_are_there_whether_or_not_the_card_can_be_rented(run_cria, gpu):
    asked = ("plan", "smoke", "--gpu", gpu, "--rows-full")
    found = json.loads(run_cria(*asked, "--rows", "2000", "--json")[1])
    run = found["run"]
    spread = found["seconds_per_step_high"] / found["seconds_per_step_low"]
    assert run["minutes_high"] / run["minutes_low"] == pytest.approx(spread)
    assert run["minutes_low"] < run["minutes"] < run["minutes_high"]
    twice = json.loads(run_cria(*asked, "--rows", "2000", "--set", "steps=2", "--json")[1])["run"]
    assert twice["minutes"] < run["minutes"]
    if gpu == "l4":  # the cheapest machine on the list has one of them
        assert found["prices"][0]["minutes"] == pytest.approx(run["minutes"])
    else:
        assert found["prices"] == []
    assert " to train, " in run_cria(*asked, "--rows", "2000")[1]


def test_minutes_are_left_out_where_they_are_not_known(run_cria):
    asked = ("plan", "smoke", "--rows-full", "--json")
    assert json.loads(run_cria(*asked, "--gpu", "rtx3060")[1])["run"] is None
    assert json.loads(run_cria(*asked, "--gpu", "12GiB", "--rows", "20")[1])["run"] is None
    large = json.loads(run_cria(*asked, "--gpu", "rtx3060", "--rows", "20", "--model", "llama-3.1-70b")[1])
    assert (large["fits"], large["run"]) == (False, None)
    assert run_cria(*asked, "--gpu", "12GiB", "--rows", "0")[0] == 2


def test_a_plan_has_no_price_for_what_does_not_fit(run_cria):
    asked = ("plan", "kwanzaa", "--gpu", "t4", "--rows", "107", "--model", "llama-3.1-70b")
    assert json.loads(run_cria(*asked, "--json")[1])["prices"] == []
    code, stdout, _ = run_cria(*asked)
    assert code == 3
    assert "no price: no machine on the list has this card and room for this run" in stdout
    assert "$" not in stdout


def test_a_plan_says_how_far_its_numbers_can_be_trusted(run_cria):
    _, stdout, _ = run_cria("plan", "kwanzaa", "--gpu", "t4", "--rows", "107")
    assert trust.TIME in " ".join(stdout.split())
    assert "t4-small: 6.0 to 9.0 min, $0.04 to $0.06" in stdout
    assert f"list of {PRICES_DATE}" in stdout


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.5, "fits"), (0.95, "fits"), (0.951, "tight"), (1.0, "tight"), (1.001, "does not fit"), (3.0, "does not fit")],
)
def test_there_are_three_verdicts(share, said):
    assert trust.verdict(round(share * 10**10), 10**10) == said
    assert trust.verdict(10**11, 10**10, least=10**10) == "tight"
    assert trust.verdict(10**11, 10**10, least=10**10 + 1) == "does not fit"


def test_a_narrow_fit_and_the_hosts_memory_are_among_the_warnings(run_cria):
    asked = ("plan", "kwanzaa", "--gpu", "t4", "--json")
    narrow = json.loads(run_cria(*asked, *TIGHT)[1])
    assert narrow["least_bytes"] < narrow["capacity_bytes"] < narrow["needed_bytes"]
    assert (narrow["verdict"], narrow["fits"], narrow["warnings"]) == ("tight", True, [trust.TIGHT])
    assert json.loads(run_cria(*asked)[1])["warnings"] == []
    code, stdout, _ = run_cria(*HOST, "--json")
    host = json.loads(stdout)["host"]
    assert (code, host["verdict"], host["needed_at"]) == (3, "does not fit", "training")
    assert host["needed_bytes"] == sum(line["bytes"] for line in host["lines"]) > host["capacity_bytes"]
    code, stdout, _ = run_cria(*HOST)
    assert code == 3
    assert stdout.startswith("verdict  does not fit Colab's free machine: needs ")
    assert "warning: does not fit Colab's free machine: the run needs" in " ".join(stdout.split())


def test_only_a_known_machine_has_a_verdict_on_its_memory(run_cria):
    found = json.loads(run_cria("plan", "kwanzaa", "--gpu", "l4", "--json")[1])
    assert (found["host"]["name"], found["host"]["verdict"], found["fits"]) == ("", "", True)
    kaggle = json.loads(run_cria("plan", "kwanzaa", "--gpu", "t4x2", "--json")[1])["host"]
    assert (kaggle["name"], kaggle["capacity_bytes"], kaggle["verdict"]) == ("Kaggle's machine", 29 * 10**9, "fits")


def test_a_config_file_and_its_folder_are_models(run_cria, tiny_model):
    peaks = []
    for model in (tiny_model, tiny_model / "config.json"):
        code, stdout, stderr = run_cria("plan", "smoke", "--gpu", "t4", "--model", model, "--json")
        assert code == 0, stderr
        peaks.append(json.loads(stdout)["peak_bytes"])
    assert peaks[0] == peaks[1] > 0


def test_a_dry_run_counts_the_same_within_what_is_promised(run_cria):
    asked = ("plan", "smoke", "--model", "random:tiny", "--gpu", "t4", "--json")
    code, stdout, stderr = run_cria(*asked, "--dry-run")
    assert code == 0, stderr
    counted, by_hand = json.loads(stdout), json.loads(run_cria(*asked)[1])
    assert (counted["method"], by_hand["method"]) == ("dry_run", "closed_form")
    assert sum(row["bytes"] for row in counted["lines"]) == counted["peak_bytes"]
    assert set(counted) == set(by_hand)
    assert -0.01 <= by_hand["peak_bytes"] / counted["peak_bytes"] - 1 <= 0.05


CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "vocab_size": 160,
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu", "abacus"], "unknown card abacus: name it as its maker does, such as rtx3060 or a100-80, or give"),
        (["--set", "tricks.attention=flash_attention_2"], "flash_attention_2"),
        (["--rows", "-1"], "--rows -1: must be a whole number above 0"),
        (["--rows", "many"], "--rows"),
        (["--model", "{bert}"], "we cannot estimate model_type 'bert'"),
        (["--model", "{less}"], "its config.json has no vocab_size"),
        (["--set", "tricks.peft=side_network", "--set", "side.blocks=99"], "side.blocks=99: smollm2 has 30"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.parametrize("more", [[], ["--json"]], ids=["", "json"])
def test_what_is_wrong_is_one_line_and_exit_code_2(run_cria, tmp_path, arguments, said, more):
    files = {
        "bert": json.dumps(CONFIG | {"model_type": "bert"}),
        "less": json.dumps({field: value for field, value in CONFIG.items() if field != "vocab_size"}),
    }
    for name, text in files.items():
        (tmp_path / f"{name}.json").write_text(text)
    paths = {name: tmp_path / f"{name}.json" for name in files}
    gpu = [] if "--gpu" in arguments else ["--gpu", "t4"]
    code, stdout, stderr = run_cria("plan", "smoke", *gpu, *(word.format(**paths) for word in arguments), *more)
    assert (code, stdout) == (2, "")
    assert stderr.startswith("error: ")
    assert stderr.count("\n") == 1
    assert said in stderr


PLAN = """
import sys
sys.argv = ["cria", "plan", "kwanzaa", "--gpu", "t4", "--json"]
from cria_tricks.cli import main as cli
cli.main()
heavy = ("transformers", "peft", "bitsandbytes", "datasets", "accelerate")
print([name for name in heavy if name in sys.modules], file=sys.stderr)
"""


def test_by_hand_nothing_heavy_is_imported():
    """The answer is to come within three seconds from cold, and torch takes most of them."""
    done = subprocess.run([sys.executable, "-c", PLAN], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert json.loads(done.stdout)["fits"]


def test_a_range_says_what_backs_it(run_cria):
    """On an L4 no run was published; on a T4 none in fp32."""
    for gpu, setting, backed, spread in (
        ("t4", "tricks.precision=fp16", "public runs", 1.5),
        ("t4", "tricks.precision=fp32", "no run", 2.8),
        ("l4", "tricks.precision=bf16", "no run", 2.8),
    ):
        arguments = ("plan", "kwanzaa", "--gpu", gpu, "--set", setting, "--set", "tricks.lean_preparation=false")
        found = json.loads(run_cria(*arguments, "--json")[1])
        assert found["seconds_by"] == backed
        assert found["seconds_per_step_high"] / found["seconds_per_step_low"] == pytest.approx(spread)
        assert found["seconds_per_step_low"] < found["seconds_per_step"] < found["seconds_per_step_high"]
        assert answer.BACKED[backed] in run_cria(*arguments)[1]


@pytest.mark.parametrize(("strategy", "model", "warned"), [
    ("pipeline", "llama-3.1-70b", True), ("fsdp", "llama-3.1-70b", True), ("pipeline", "llama-3.2-1b", False),
    ("ddp", "llama-3.2-1b", False),
])  # fmt: skip
def test_a_model_that_fits_the_cards_only_after_it_was_cut_is_doubted(run_cria, strategy, model, warned):
    chosen = ("--set", f"parallel.strategy={strategy}", "--set", "tricks.optimizer=adamw", "--nproc", "8")
    chosen += ("--set", "tricks.paged_optimizer=false", "--gpu", "t4", "--model", model)
    _, stdout, _ = run_cria("plan", "kwanzaa", *chosen, "--json")
    said = json.loads(stdout)["warnings"]
    assert any("loads the whole model onto its card" in one and "cannot start" in one for one in said) is warned


def test_a_plan_for_a_named_card_imports_no_torch(monkeypatch, tmp_path):
    """Importing torch takes longer than the whole answer."""
    monkeypatch.setenv("CRIA_CALIBRATION", str(tmp_path / "none.json"))  # else this machine is asked for
    without = "import sys; sys.modules['torch'] = None; from cria_tricks.cli.main import main; main()"
    words = [sys.executable, "-c", without, "plan", "kwanzaa", "--gpu", "t4"]
    assert "needs 9.5 GiB" in subprocess.run(words, check=True, capture_output=True, text=True).stdout
