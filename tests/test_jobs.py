"""Jobs: priced, sent with the recipe, followed to their end, and their result fetched, of a stand-in."""

import email.message
import importlib.metadata
import os
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from cria_tricks.common import version
from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.hardware.cards import FLAVORS
from cria_tricks.launch.job import launch as launch_job
from tests.hub import TOKEN, Repo


def printed(capsys, recipe="kwanzaa", *settings, **more) -> str:
    launch_job(recipe, "me/mine", list(settings), only_print=True, **more)
    return capsys.readouterr().out


def test_what_it_costs_at_most_is_its_timeout_times_its_price(capsys):
    assert "t4-small: $0.40 an hour, at most $0.40 for 60 min" in printed(capsys)
    said = printed(capsys, flavor="a100-large", timeout="30m")
    assert "a100-large: $2.50 an hour, at most $1.25 for 30 min\ntraining: ends by itself after 15 min" in said
    assert "ends by itself after 5.0 min" in printed(capsys, "kwanzaa", "train.time_budget=5m")


def test_several_cards_are_processes_of_a_launcher(capsys):
    said = printed(capsys, "smoke", flavor="l4x4")
    assert "cria launch recipe.toml --on torchrun --nproc 4 --out run" in said
    with pytest.raises(BadInput, match="4 processes cannot share the 1 micro-batches"):
        printed(capsys, "smoke", "tricks.gradient_accumulation=1", flavor="l4x4")


def test_the_list_of_prices_is_that_of_the_page():
    text = (Path(__file__).parents[1] / "docs/guide/where_to_train.md").read_text()
    for flavor in FLAVORS.values():
        assert f"| `{flavor.name}` |" in text
        assert f"| ${flavor.price:.2f}" in text.split(f"| `{flavor.name}` |")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("settings", "more", "why"),
    [
        (["data.train=mine.jsonl"], {}, "data.train=mine.jsonl: a job cannot reach files of this machine; upload it"),
        (["data.eval=tests"], {}, "data.eval=tests: a job cannot reach"),
        (["data.train=cria_tricks/data"], {}, "data.train=cria_tricks/data: a job cannot reach"),
        ([], {"timeout": "1e999"}, "--timeout 1e999: must be"),
        ([], {"flavor": "t4"}, "unknown flavor t4: "),
        ([f"name={TOKEN}"], {}, "holds a token, and a job's recipe can be read by others"),
    ],
)
def test_what_would_end_the_job_is_not_sent(settings, more, why, monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[1])  # one of the names is a folder there
    with pytest.raises(BadInput, match=why) as caught:
        printed(capsys, "kwanzaa", *settings, **more)
    assert "\n" not in str(caught.value)


def test_what_does_not_fit_is_not_sent(capsys):
    with pytest.raises(OutOfMemory, match="--flavor t4-small: needs .* GiB of 14.7 GiB; see cria plan"):
        printed(capsys, "baseline", "model=llama-3.2-1b")


def ran(script: str, folder: Path, recipe: str, fails: str = "none") -> list[str]:
    """What a script calls, by programs that only write down how they were called."""
    folder.mkdir()
    for name in ("python", "cria"):
        program = folder / name
        lines = [
            "#!/bin/bash",
            f'printf "%q " {name} "$@" >> {folder}/called; echo >> {folder}/called',
            f'[ -f recipe.toml ] && cp recipe.toml {folder}/; [ "$1" != {fails} ]',
        ]
        program.write_text("\n".join(lines))
        program.chmod(0o755)
    given = {"PATH": f"{folder}:{os.environ['PATH']}", "TMPDIR": str(folder), "CRIA_RECIPE": recipe}
    command = ["bash", "-c", 'eval "$CRIA_SCRIPT"']
    done = subprocess.run(command, env=given | {"CRIA_SCRIPT": script}, capture_output=True, text=True)
    assert (done.returncode == 0) == (fails == "none"), done.stderr
    return [" ".join(shlex.split(line)) for line in (folder / "called").read_text().splitlines()]


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
    for word in ("t4-small: $0.40 an hour", "HF_TOKEN", "result: me/mine on the hub, private", "nothing was sent"):
        assert word in stdout


def test_the_job_is_sent_with_its_recipe_followed_and_its_result_fetched(hub, launch, published, trained, tmp_path):
    code, stdout, stderr = launch("--out", "mine", "--set", "train.epochs=1", "--timeout", "2h")
    assert (code, stderr) == (0, "")
    [sent] = hub.jobs
    package = f"cria_tricks[data] @ git+{version.repository()}"
    run_by = ["bash", "-c", 'eval "$CRIA_SCRIPT"']
    assert sent["command"] == ["uv", "run", "--with", package, *run_by]
    assert (sent["flavor"], sent["timeoutSeconds"], sent["secrets"]) == ("t4-small", 7200, {"HF_TOKEN": TOKEN})
    assert TOKEN not in str(sent["environment"])
    recipe = sent["environment"]["CRIA_RECIPE"]
    train = tomllib.loads(recipe)["train"]
    assert (train["epochs"], train["time_budget"]) == (1.0, 6300.0)
    script = sent["environment"]["CRIA_SCRIPT"]
    assert ran(script, tmp_path / "whole", recipe) == [
        "python -c import torch; torch.cuda.init()",
        "cria train recipe.toml --out run",
        "cria publish run/adapter me/mine --tag v0.1.0 --private --yes",
    ]
    assert (tmp_path / "whole" / "recipe.toml").read_text() == recipe
    assert len(ran(script, tmp_path / "failed", recipe, fails="train")) == 2, "nothing is published"
    assert "t4-small: $0.50 an hour, at most $1.00 for 2 h" in stdout, "the price is that of the day"
    assert script in stdout
    assert f"job 6a: {hub.url}/jobs/me/6a\nstep    1/42\npublished with [hidden]\n" in stdout
    assert stdout.endswith("adapter: mine/adapter (to check its files: cria verify mine/adapter)\n")
    name = "adapter_model.safetensors"
    assert (tmp_path / "mine/adapter" / name).read_bytes() == (trained / "adapter" / name).read_bytes()
    asked = len(hub.asked)
    code, _, stderr = launch("--out", "mine")
    assert (code, len(hub.asked)) == (2, asked)
    assert "--out mine: holds another run (adapter)" in stderr


def test_a_job_whose_log_ends_before_it_is_asked_for_until_it_has_ended(hub, launch, published, monkeypatch):
    hub.end = {"stage": "RUNNING"}
    monkeypatch.setattr("time.sleep", lambda seconds: setattr(hub, "end", {"stage": "COMPLETED"}))
    code, _, stderr = launch("--out", "mine")
    assert code == 0, stderr
    assert hub.asked.count(("GET", "/api/jobs/me/6a")) >= 2


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ({"stage": "ERROR", "message": "Job timeout"}, "job 6a ended with ERROR: Job timeout"),
        ({"stage": "CANCELED"}, "job 6a ended with CANCELED: its log says why"),
    ],
)
def test_a_job_that_does_not_end_well_ends_in_one_line(end, said, hub, launch):
    hub.end = end
    code, stdout, stderr = launch()
    assert (code, stderr) == (2, f"error: {said}: {hub.url}/jobs/me/6a\n")
    assert "adapter:" not in stdout
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("ending", "answer", "said"),
    [
        ("/jobs/me", (402, {"error": "balance is insufficient"}), "balance is insufficient; no credit is left: see"),
        ("/jobs/me", (403, {"error": f"the token {TOKEN} may not"}), "[hidden] may not; may this login do that?"),
        ("/repos/create", (403, {"error": "read only"}), "read only; may this login do that?"),
        ("/hardware", (503, {"error": "down"}), "the hub answers 503: down"),
    ],
)
def test_a_job_that_the_hub_does_not_take_ends_in_one_line(ending, answer, said, hub, launch):
    hub.instead[ending] = answer
    code, _, stderr = launch()
    assert (code, hub.jobs) == (2, [])
    assert stderr.startswith("error: --on hf-jobs: ")
    assert said in stderr
    assert stderr.count("\n") == 1


@pytest.mark.parametrize(
    "there", [Repo(private=True, files={"adapter_config.json": b"{}"}), Repo(private=False)], ids=["used", "public"]
)
def test_a_repository_that_is_in_use_is_found_before_anything_is_paid_for(there, hub, launch):
    hub.repos["me/mine"] = there
    code, _, stderr = launch()
    assert (code, hub.jobs) == (2, [])
    assert "--repo me/mine: is public, or holds files already; name a new one" in stderr


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("run_uv_job", "the job may have been sent; hf jobs ps lists"),
        (
            "fetch_job_logs",
            "the job goes on, and costs: follow it: hf jobs logs -f me/6a; end it: hf jobs cancel me/6a",
        ),
        ("snapshot_download", "the job has ended; fetch its result: hf download me/mine --revision v0.1.0"),
    ],
)
def test_a_signal_says_what_has_become_of_the_money(where, said, hub, launch, monkeypatch):
    def pressed(*arguments, **more):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"huggingface_hub.HfApi.{where}", pressed)
    code, _, stderr = launch()
    assert code == 130
    assert stderr.startswith(f"interrupted; {said}")
    assert not any("cancel" in path for path in hub.paths("POST"))


@pytest.mark.parametrize("installed", [False, True])
def test_a_package_that_names_no_repository_ends_in_one_line(monkeypatch, installed):
    def metadata(name):
        if not installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return email.message.Message()  # of a wheel whose pyproject.toml names no URL

    monkeypatch.setattr(importlib.metadata, "metadata", metadata)
    with pytest.raises(BadInput, match="no installed package names one here: pip install -e"):
        version.repository()
