"""Jobs: chosen by the estimate, sent exactly as shown, followed to their end, their adapter verified; a stand-in."""

import email.message
import importlib.metadata
import inspect
import os
import shlex
import subprocess
from pathlib import Path

import pytest
from huggingface_hub import HfApi, JobInfo

from cria_tricks.adapter.folder import verify
from cria_tricks.common import version
from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.common.units import money
from cria_tricks.data import sources
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import FLAVORS, find_card
from cria_tricks.launch import hub as jobs_hub
from cria_tricks.launch import job as jobs
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import plan_data
from cria_tricks.predict.toggles import Target
from cria_tricks.recipes import kwanzaa
from tests.hub import TOKEN, Repo

# Only a job's durations tell that it ran out of its time if the hub sends no message.
DURATIONS = pytest.mark.skipif(
    "durations" not in JobInfo.__dataclass_fields__, reason="this huggingface_hub passes on no durations of a job"
)
ATTEMPTS = "attempts" in inspect.signature(HfApi.run_job).parameters
REQUESTS = [
    ("GET", "/api/jobs/hardware"),
    ("GET", "/api/whoami-v2"),
    ("POST", "/api/repos/create"),
    ("GET", "/api/models/me/mine"),
    ("POST", "/api/jobs/me"),
    ("GET", "/api/jobs/me/6a/logs"),
]


def prepare(recipe="kwanzaa", *settings, **more) -> jobs.HubJob:
    return jobs.prepare(recipe, "me/mine", settings, **more)


def test_the_cheapest_machine_that_it_fits_on_is_taken_for_twice_its_estimated_time():
    job, t4 = prepare(), find_card("t4").device
    recipe = kwanzaa(t4)
    target = Target(find_shape(recipe.model), t4)
    [small, _] = plan_data.prices(target, recipe, 107)
    assert (job.flavor.name, job.price) == ("t4-small", 0.4)
    assert job.needed_bytes == plan_data.bill(target, recipe)["needed_bytes"]
    assert job.training_seconds == pytest.approx(60 * small["minutes"])
    assert job.timeout == 60 * -(-(2 * job.training_seconds + 1800) // 60)
    assert job.time_budget == job.timeout - 900
    assert prepare("baseline", "model=llama-3.2-1b").flavor.name == "a100-large"
    assert prepare(prices={"a10g-small": 0.1, "t4-small": 0.4}).flavor.name == "a10g-small"


def test_a_machine_that_does_not_finish_in_time_is_passed_over():
    slow = ["train.epochs=60"]  # 110 minutes on a T4
    assert prepare("kwanzaa", *slow).flavor.name == "t4-small"
    fast = prepare("kwanzaa", *slow, "train.time_budget=40m")
    assert (fast.flavor.name, fast.finishes, fast.time_budget, fast.timeout) == ("a100-large", True, 2400, 3300)
    cut = prepare("kwanzaa", *slow, "train.time_budget=10m")
    assert not cut.finishes
    assert "before it is through" in "\n".join(jobs_hub.shown(cut))
    cheap = prepare("kwanzaa", *slow, timeout="1h", budget=0.5)
    assert (cheap.flavor.name, cheap.timeout, cheap.time_budget, cheap.most) == ("t4-small", 3600, 2700, 0.4)


def test_a_machine_on_which_it_fits_narrowly_comes_last():
    smallest = ["tricks.gradient_checkpointing=true", "tricks.chunked_loss=true"]
    narrow = [*smallest, "data.max_length=8192", "train.batch_size=7"]  # 13.9 of a T4's 14.7 GiB
    on_a_t4 = prepare("kwanzaa", *narrow, flavor="t4-small")
    assert on_a_t4.tight
    assert trust.TIGHT in "\n".join(jobs_hub.shown(on_a_t4))
    job = prepare("kwanzaa", *narrow)
    assert (job.flavor.name, job.tight) == ("l4x1", False)
    assert job.most > on_a_t4.most, "though it costs more"
    assert trust.TIGHT not in "\n".join(jobs_hub.shown(job))


def test_several_cards_are_processes_of_a_launcher():
    job = prepare("smoke", flavor="l4x4")
    assert "cria launch smoke --on torchrun --nproc 4 --set" in job.script
    with pytest.raises(BadInput, match="4 processes cannot share the 1 micro-batches"):
        prepare("smoke", "tricks.gradient_accumulation=1", flavor="l4x4")


def test_known_numbers_of_rows_are_right():
    ours = {name: len(sources.find(name, "train").rows) for name in sources.OURS}
    real = {"kwanzaa": len(row_lengths("train")), "kwanzaa_curated": 38 + ours["history_notes"]}
    assert ours | real == jobs.ROWS  # tests/data/test_sources.py counts the 38 on the real rows


def test_the_list_of_prices_is_that_of_the_page():
    text = (Path(__file__).parents[1] / "docs/guide/where_to_train.md").read_text()
    for flavor in FLAVORS.values():
        assert f"| `{flavor.name}` |" in text
        assert f"| ${flavor.price:.2f}" in text.split(f"| `{flavor.name}` |")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("settings", "more", "why"),
    [
        (
            ["data.train=mine.jsonl"],
            {},
            r"data.train=mine.jsonl: a job cannot reach files of this machine; upload it .*hf upload",
        ),
        (["data.eval=tests"], {}, "data.eval=tests: a job cannot reach"),
        (["data.train=cria_tricks/data"], {}, "data.train=cria_tricks/data: a job cannot reach"),
        (["data.train=me/rows"], {}, "how many rows it has is not known here; give --timeout"),
        (["model=random:tiny"], {}, "model=random:tiny: a job takes its model from the hub"),
        (["lora.continue_from=runs/mine/adapter"], {}, "a job cannot reach an adapter of this machine; merge it"),
        (["train.mirror=/mnt/drive"], {}, "a job's disk goes with it"),
        ([], {"timeout": "soon"}, "--timeout soon: must be a time of a minute or more"),
        ([], {"timeout": "1e999"}, "--timeout 1e999: must be"),
        ([], {"budget": 0.1}, r"--budget 0.1: t4-small for up to 45 min may cost \$0.30; give more"),
        ([], {"budget": float("nan")}, "--budget nan: must be an amount"),
        ([], {"flavor": "t4"}, "unknown flavor t4: "),
        ([], {"flavor": "l4x1", "prices": {"t4-small": 1}}, "--flavor l4x1: the hub does not offer it now"),
        ([f"name={TOKEN}"], {}, "holds a token, and a job's command can be read by others"),
    ],
)
def test_what_would_end_the_job_is_not_sent(settings, more, why, monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[1])  # one of the names is a folder there
    with pytest.raises(BadInput, match=why) as caught:
        prepare("kwanzaa", *settings, **more)
    assert "\n" not in str(caught.value)


def test_what_fits_nowhere_is_not_sent():
    with pytest.raises(OutOfMemory, match="--flavor t4-small: needs .* GiB of 14.7 GiB; see cria plan"):
        prepare("baseline", "model=llama-3.2-1b", flavor="t4-small")
    with pytest.raises(OutOfMemory, match="it fits on no machine: --flavor a100-large: needs"):
        prepare("baseline", "model=qwen2.5-7b")


def test_a_data_set_of_the_hub_needs_a_time():
    job = prepare("kwanzaa", "data.train=me/rows:train", timeout="2h")
    assert (job.training_seconds, job.timeout, job.time_budget) == (None, 7200, 6300)
    assert "training  not known here" in "\n".join(jobs_hub.shown(job))
    assert prepare("kwanzaa", "data.train=me/rows", "train.max_steps=42").training_seconds > 300


def ran(script: str, folder: Path, environment: dict[str, str], fails: str = "none") -> list[str]:
    """What a script calls, by programs that only write down how they were called."""
    folder.mkdir()
    for name in ("uv", "cria"):
        program = folder / name
        lines = [
            "#!/bin/bash",
            f'printf "%q " {name} "$@" >> {folder}/called; echo >> {folder}/called',
            '[ "$1" = venv ] && mkdir -p .venv/bin && touch .venv/bin/activate',
            f'[ -f recipe.toml ] && cp recipe.toml {folder}/; [ "$1" != {fails} ]',
        ]
        program.write_text("\n".join(lines))
        program.chmod(0o755)
    path = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder)}
    done = subprocess.run(["bash", "-c", script], env=path | environment, capture_output=True, text=True)
    assert (done.returncode == 0) == (fails == "none"), done.stderr
    return [" ".join(shlex.split(line)) for line in (folder / "called").read_text().splitlines()]


def test_the_command_installs_trains_and_publishes_and_ends_where_something_fails(tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('name = "it\'s"\nmodel = "smollm2"\n[tricks]\npeft = "lora"\n'.replace("it's", "its"))
    job = jobs.prepare(str(recipe), "me/mine", ["lora.target_modules=q_proj, v_proj"], flavor="t4-small")
    calls = ran(job.script, tmp_path / "whole", dict(job.environment))
    assert calls == [
        "uv venv --quiet",
        f"uv pip install --quiet --torch-backend=auto cria_tricks @ git+{version.repository()}",
        f"cria train recipe.toml --set lora.target_modules=q_proj, v_proj --set train.time_budget={job.time_budget} "
        "--out run",
        "cria publish run/adapter me/mine --tag v0.1.0 --private --yes",
    ]
    assert (tmp_path / "whole" / "recipe.toml").read_text() == job.environment["CRIA_RECIPE"]
    assert len(ran(job.script, tmp_path / "failed", dict(job.environment), fails="train")) == 3
    assert "cria publish run/model me/mine" in prepare("baseline").script
    assert "'cria_tricks[data] @ git+" in prepare("baseline", "data.duplicates=near").script


@pytest.fixture
def launch(hub, run_cria, monkeypatch, tmp_path):
    """Run the command with only the stand-in to ask; its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def run(*options, token: str | None = TOKEN, repo: str = "me/mine") -> tuple[int, str, str]:
        hub.alone(monkeypatch, tmp_path, token)
        done = run_cria("launch", "kwanzaa", "--on", "hf-jobs", "--repo", repo, *options)
        assert TOKEN not in done[1] + done[2]
        return done

    return run


@pytest.fixture
def published(hub, trained):
    """The job of the stand-in writes some log and publishes an adapter."""

    def done() -> None:
        files = {path.name: path.read_bytes() for path in (trained / "adapter").iterdir()}
        hub.repos["me/mine"] = Repo(private=True, files=hub.repos["me/mine"].files | files, commits=["a" * 40])

    hub.log, hub.done = ["===== Job started at 2026-11-22 =====", "step    1/42", f"published with {TOKEN}"], done


def test_what_is_printed_asks_nobody(hub, launch):
    code, stdout, stderr = launch("--print", "--set", "train.epochs=1", token=None)
    assert (code, hub.asked) == (0, []), stderr
    job = prepare("kwanzaa", "train.epochs=1")
    shown = ("t4-small", "$0.40 an hour", f"timeout   {job.timeout} s", jobs.IMAGE, "HF_TOKEN", "me/mine")
    for word in (*shown, *job.script.splitlines()):
        assert word in stdout
    assert "nothing was sent" in stdout


def test_the_job_is_sent_as_documented_followed_and_its_adapter_verified(hub, launch, published, trained, tmp_path):
    code, stdout, stderr = launch("--out", "mine", "--set", "train.epochs=1")
    assert code == 0, stderr
    job = prepare("kwanzaa", "train.epochs=1", prices={"t4-small": 0.5})
    assert hub.jobs == [
        {
            "command": ["bash", "-c", job.script],
            "arguments": [],
            "environment": {"PYTHONUNBUFFERED": "1"},
            "flavor": "t4-small",
            "secrets": {"HF_TOKEN": TOKEN},
            "timeoutSeconds": job.timeout,
            "labels": {"name": "cria-kwanzaa"},
            "dockerImage": "ghcr.io/astral-sh/uv:python3.12-bookworm",
        }
    ]
    asked = [request for request in hub.asked if "agent-harnesses" not in request[1]]  # the library's own business
    assert asked[: len(REQUESTS)] == REQUESTS
    assert f"$0.50 an hour, at most ${0.5 * job.timeout / 3600:.2f}" in stdout, "the price is that of the day"
    assert f"job 6a: {hub.url}/jobs/me/6a" in stdout
    assert "step    1/42\npublished with [hidden]\n" in stdout
    assert stdout.endswith("every sha256 as written\nadapter: mine/adapter\n")
    there = tmp_path / "mine" / "adapter"
    assert (there / "adapter_model.safetensors").read_bytes() == (
        trained / "adapter" / "adapter_model.safetensors"
    ).read_bytes()
    verify(there)
    sent = len(hub.asked)
    code, _, stderr = launch("--out", "mine")
    assert (code, len(hub.asked)) == (2, sent)
    assert "--out mine: holds adapter already; name a new folder" in stderr


def test_a_job_whose_log_ends_before_it_is_asked_for_until_it_has_ended(hub, launch, published, monkeypatch):
    hub.end = {"stage": "RUNNING"}
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(hub, "end", {"stage": "COMPLETED"}))
    code, _, stderr = launch("--out", "mine")
    assert code == 0, stderr
    assert hub.asked.count(("GET", "/api/jobs/me/6a")) >= 2


def test_a_result_that_was_damaged_on_the_way_is_said(hub, launch, published):
    honest = hub.done

    def damaged() -> None:
        honest()
        hub.repos["me/mine"].files["adapter_config.json"] += b" "

    hub.done = damaged
    code, stdout, stderr = launch()
    assert code == 2
    assert "adapter_config.json" in stderr.splitlines()[-1]
    assert "every sha256" not in stdout


@pytest.mark.parametrize(
    ("end", "log", "said"),
    [
        ({"stage": "ERROR", "message": "exit code 2"}, ["error: no row"], "job 6a failed: exit code 2; no row"),
        ({"stage": "ERROR"}, [], "job 6a failed: its log says why"),
        ({"stage": "ERROR", "message": "Job timeout"}, [], "job 6a ran out of its 2700 s and was ended; give a longer"),
        pytest.param(
            {"stage": "ERROR", "ran": 2700}, [], "job 6a ran out of its 2700 s and was ended; give a longer --timeout",
            marks=DURATIONS,
        ),
        ({"stage": "ERROR", "message": "Runtime error"}, ["error: no row"], "job 6a failed: Runtime error; no row"),
        ({"stage": "CANCELED"}, [], "job 6a was canceled"),
    ],
)  # fmt: skip
def test_a_job_that_does_not_end_well_ends_in_one_line(end, log, said, hub, launch):
    hub.end, hub.log = end, log
    code, stdout, stderr = launch()
    assert code == 1
    assert stderr == f"error: {said}" + stderr[len(f"error: {said}") :]
    assert stderr.endswith(f": {hub.url}/jobs/me/6a\n")
    assert stderr.count("\n") == 1
    assert "adapter:" not in stdout
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("ending", "answer", "said"),
    [
        ("/jobs/me", (402, {"error": "Pre-paid credit balance is insufficient"}), "no credit is left: see"),
        ("/jobs/me", (403, {"error": f"the token {TOKEN} may not"}), "[hidden] may not"),
        ("/jobs/me", (429, {"error": "quota"}), "too many requests or jobs at once"),
        ("/repos/create", (403, {"error": "read only"}), "may this login start jobs and write there"),
        ("/hardware", (503, {"error": "down"}), "503"),
    ],
)
def test_a_job_that_the_hub_does_not_take_ends_in_one_line(ending, answer, said, hub, launch):
    hub.instead[ending] = answer
    code, _, stderr = launch()
    assert code == 1
    assert stderr.startswith("error: --on hf-jobs: ")
    assert said in stderr
    assert stderr.count("\n") == 1
    assert hub.jobs == []


def test_nobody_logged_in_a_wrong_token_and_nobody_there(hub, launch):
    code, _, stderr = launch(token=None)
    assert (code, hub.asked) == (2, [])
    assert "nobody is logged in to the hub; run hf auth login" in stderr
    code, _, stderr = launch(token="hf_" + "wrong" * 7)
    assert (code, hub.jobs) == (1, [])
    assert "is the token right?" in stderr
    hub.url = "http://127.0.0.1:9"
    code, _, stderr = launch()
    assert code == 1
    assert stderr.startswith("error: --on hf-jobs: ")
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("there", "said"),
    [
        (Repo(private=True, files={"adapter_config.json": b"{}"}), "holds adapter_config.json already; name a new one"),
        (Repo(private=False), "is there already and public"),
    ],
)
def test_a_repository_that_is_in_use_is_found_before_anything_is_paid_for(there, said, hub, launch):
    hub.repos["me/mine"] = there
    code, _, stderr = launch()
    assert (code, hub.jobs) == (2, [])
    assert said in stderr


def test_ctrl_c_leaves_the_job_alone_and_says_how_to_go_on(hub, launch, monkeypatch):
    def logs(*arguments, **more):
        yield "step    1/42"
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.HfApi.fetch_job_logs", logs)
    code, stdout, stderr = launch()
    assert code == 130
    assert "step    1/42" in stdout
    assert "the job goes on" in stderr
    for line in ("hf jobs logs -f me/6a", "hf jobs cancel me/6a", "hf download me/mine --revision v0.1.0"):
        assert line in stderr
    assert not any("cancel" in path for path in hub.paths("POST"))
    assert f"{hub.url}/jobs/me/6a" in stdout


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("run_job", "the job may have been sent; hf jobs ps lists"),
        ("inspect_job", "the job goes on, and costs: follow it: hf jobs logs -f me/6a"),
        ("snapshot_download", "the job has ended; fetch its result: hf download me/mine"),
    ],
)
def test_a_signal_says_what_has_become_of_the_money(where, said, hub, launch, monkeypatch):
    def pressed(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"huggingface_hub.HfApi.{where}", pressed)
    code, _, stderr = launch()
    assert code == 130
    assert stderr.startswith(f"interrupted; {said}")


def test_options_of_one_launcher_are_refused_by_the_others(run_cria):
    code, _, stderr = run_cria("launch", "smoke", "--on", "torchrun", "--flavor", "t4-small", "--print")
    assert (code, "are for --on hf-jobs" in stderr) == (2, True)
    code, _, stderr = run_cria("launch", "smoke", "--on", "hf-jobs", "--nproc", "2", "--print")
    assert (
        code,
        "--nproc, --resume, --max-restarts, --nodes, --endpoint and --other-base are for the other" in stderr,
    ) == (2, True)
    code, _, stderr = run_cria("launch", "smoke", "--on", "hf-jobs", "--print")
    assert (code, "--repo '': name a repository of the hub, OWNER/NAME" in stderr) == (2, True)


@pytest.mark.skipif(not ATTEMPTS, reason="this huggingface_hub cannot ask for attempts")
def test_a_job_that_fails_starts_again_and_goes_on_from_the_checkpoints_in_a_bucket(hub, launch, published):
    code, stdout, stderr = launch("--out", "mine", "--attempts", "3", "--bucket", "me/runs")
    assert code == 0, stderr
    [sent] = hub.jobs
    assert sent["attempts"] == 3
    assert sent["volumes"] == [{"type": "bucket", "source": "me/runs", "mountPath": "/bucket"}]
    script = sent["command"][2]
    assert "cria train kwanzaa --resume --set train.mirror=/bucket/me-mine --set train.time_budget=" in script
    assert f"at most {money(3 * 0.5 * sent['timeoutSeconds'] / 3600)}" in stdout
    assert "attempts  3; checkpoints go to the bucket me/runs, and the next attempt goes on from there" in stdout


def test_an_older_library_of_the_hub_refuses_attempts_before_anything_is_sent(hub, launch, monkeypatch):
    def of_before(self, *, image, command, env, secrets, flavor, timeout, labels, namespace):
        """huggingface_hub 1.9 had neither attempts nor volumes."""

    monkeypatch.setattr("huggingface_hub.HfApi.run_job", of_before)
    for option, value in (("--attempts", "2"), ("--bucket", "me/runs")):
        code, _, stderr = launch(option, value)
        assert (code, hub.jobs, hub.paths("POST")) == (2, [], [])
        assert stderr.startswith(f"error: {option}: huggingface_hub ")
    code, _, stderr = launch("--bucket", "runs")
    assert (code, "--bucket 'runs': name a bucket of the hub, OWNER/NAME" in stderr) == (2, True)


@pytest.mark.parametrize("installed", [False, True])
def test_a_package_that_names_no_repository_ends_in_one_line(monkeypatch, installed):
    def metadata(name):
        if not installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return email.message.Message()  # of a wheel whose pyproject.toml names no URL

    monkeypatch.setattr(importlib.metadata, "metadata", metadata)
    with pytest.raises(BadInput, match="no installed package names one here: pip install -e"):
        version.repository()
