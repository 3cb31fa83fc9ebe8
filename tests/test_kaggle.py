"""The notebook on Kaggle's T4s: what is pushed, and what follows from each answer of Kaggle's command line.

Nothing here was answered by Kaggle. The lines are those that kaggle 2.2.5 prints, for each status that its library has;
``KERNEL_METADATA`` is what its ``kaggle kernels init`` writes.
"""

import json
import re
import subprocess
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.measured_cards import made_up, written
from tools import kaggle
from tools.notebooks import NOTEBOOKS, REPOSITORY, TAG

KERNEL_METADATA = {
    "id": "someone/INSERT_KERNEL_SLUG_HERE",
    "title": "INSERT_TITLE_HERE",
    "code_file": "INSERT_CODE_FILE_PATH_HERE",
    "language": "Pick one of: {python,r,rmarkdown}",
    "kernel_type": "Pick one of: {script,notebook}",
    "is_private": "true",
    "enable_gpu": "false",
    "enable_tpu": "false",
    "enable_internet": "true",
    "machine_shape": "",
    "dataset_sources": [],
    "competition_sources": [],
    "kernel_sources": [],
    "model_sources": [],
}
RETIRED = ("nvidiateslap100", "tpuv38", "tpu1vmv38", "tpuv232", "tpuv2256")
"""Machines that Kaggle replaces by others, as its command line lists them."""
COMMIT = "0123456789" * 4
HEAD = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
KERNEL = f"someone/{kaggle.SLUG}/3"
PUSHED = "Kernel version 3 successfully pushed.  Please check progress at https://www.kaggle.com/code/someone/measure\n"
NO_QUOTA = "Kernel push error: Maximum weekly GPU quota of 30.00 hours reached.\n"
NO_NETWORK = "ConnectionError: Max retries exceeded\n"


def says(word: str) -> str:
    """What the command line says of a status."""
    return f'{KERNEL} has status "KernelWorkerStatus.{word}"\n'


def card(name: str = "t4", **changed: str | bool):
    """A measured card that this checkout's package could have measured, as Kaggle has it."""
    found = made_up(name)
    about = {"commit": HEAD} | changed
    return found.model_copy(update={"provenance": found.provenance.model_copy(update=about)})


class Kaggle:
    """Answers in the place of the command line; the clock moves only while somebody waits."""

    def __init__(self, statuses: list[str], result=None, push: str = PUSHED, output: str = "Kernel log downloaded\n"):
        self.answers = {"push": iter([push]), "status": iter(statuses), "output": iter([output])}
        self.result = result
        self.asked: list[tuple[str, ...]] = []
        self.seconds = 0.0

    def ask(self, *words: str) -> CompletedProcess[str]:
        self.asked.append(words)
        answer = next(self.answers[words[0]])
        if words[0] == "output":
            folder = Path(words[words.index("--path") + 1])
            folder.mkdir(parents=True)
            (folder / f"{kaggle.SLUG}.log").write_text("[]")
            if self.result:
                written(self.result, folder / "cria-bench")
        failed = answer == NO_NETWORK
        return CompletedProcess(words, int(failed), stdout="" if failed else answer, stderr=answer if failed else "")

    def monotonic(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def on_kaggle(monkeypatch, tmp_path):
    """Run the tool's main against answers that a test gives."""
    monkeypatch.setenv("KAGGLE_USERNAME", "someone")
    monkeypatch.setenv("KAGGLE_KEY", "a key")
    monkeypatch.setattr(kaggle, "FOLDER", tmp_path / "kaggle")
    monkeypatch.setattr(kaggle, "NOTEBOOK", NOTEBOOKS / "the_bill.ipynb")  # each notebook installs the package

    def run(answers: Kaggle) -> Kaggle:
        monkeypatch.setattr(kaggle, "ask", answers.ask)
        monkeypatch.setattr(kaggle, "time", answers)
        kaggle.main()
        return answers

    return run


def refusal(on_kaggle, answers: Kaggle) -> str:
    """Why the tool ended: one line, and the exit code 1."""
    with pytest.raises(SystemExit) as ended:
        on_kaggle(answers)
    assert isinstance(ended.value.code, str), "sys.exit(text) is exit code 1"
    assert "\n" not in ended.value.code
    return ended.value.code


def test_what_is_pushed_is_what_kaggles_command_line_accepts(tmp_path):
    kaggle.write_folder(tmp_path / "push", NOTEBOOKS / "the_bill.ipynb", "someone", COMMIT)
    about = json.loads((tmp_path / "push/kernel-metadata.json").read_text())
    assert about.keys() <= KERNEL_METADATA.keys()
    for key in ("language", "kernel_type"):
        assert about[key] in re.search(r"\{(.+)\}", KERNEL_METADATA[key])[1].split(",")
    assert 5 <= len(about["title"]) <= 50
    assert about["id"] == "someone/" + re.sub(r"[^a-z0-9]+", "-", about["title"].lower()), "or Kaggle takes another id"
    assert (about["is_private"], about["enable_gpu"], about["enable_internet"]) == (True, True, True)
    assert about["machine_shape"].lower() not in ("", *RETIRED)
    assert (tmp_path / "push" / about["code_file"]).is_file()


def test_the_pushed_notebook_installs_the_commit_and_changes_nothing_else(tmp_path):
    for notebook in NOTEBOOKS.glob("*.ipynb"):
        folder = tmp_path / notebook.stem
        kaggle.write_folder(folder, notebook, "someone", COMMIT)
        pushed = (folder / notebook.name).read_text(encoding="utf-8")
        assert f"git+{REPOSITORY}@{COMMIT}" in pushed
        assert pushed.replace(f"@{COMMIT}", f"@{TAG}") == notebook.read_text(encoding="utf-8")


def test_a_notebook_that_installs_something_else_is_refused(tmp_path):
    (tmp_path / "other.ipynb").write_text("{}")
    with pytest.raises(SystemExit, match=f"does not install git.+@{TAG}"):
        kaggle.write_folder(tmp_path / "push", tmp_path / "other.ipynb", "someone", COMMIT)
    assert not (tmp_path / "push").exists()


def test_a_result_of_a_t4_is_accepted(on_kaggle, tmp_path, capsys):
    waits = [says("QUEUED"), says("NEW_SCRIPT"), says("RUNNING"), NO_NETWORK, says("RUNNING"), says("COMPLETE")]
    done = on_kaggle(Kaggle(waits, card()))
    assert f"accepted: Tesla T4, 11 cases, in {tmp_path / 'kaggle' / 'result'}\n" in capsys.readouterr().out
    assert done.seconds == 5 * kaggle.PAUSE
    assert {words[1] for words in done.asked if words[0] != "push"} == {KERNEL}, "the version that was pushed, no other"
    pushed = next(words for words in done.asked if words[0] == "push")
    assert pushed == ("push", "--path", str(tmp_path / "kaggle" / "push"), "--timeout", str(kaggle.SESSION))


@pytest.mark.parametrize(
    ("last", "read"),
    [
        (says("ERROR") + 'Failure message: "Your notebook tried to allocate more memory."\n', "ERROR"),
        (says("CANCEL_REQUESTED"), "CANCEL_REQUESTED"),
        (says("CANCEL_ACKNOWLEDGED"), "CANCEL_ACKNOWLEDGED"),
    ],
)
def test_a_notebook_that_failed_is_no_result_but_its_files_are_kept(on_kaggle, tmp_path, last, read):
    said = refusal(on_kaggle, Kaggle([says("RUNNING"), last], card()))
    assert said.startswith(f"{KERNEL}: ended with status {read}; ")
    assert sorted(path.name for path in (tmp_path / "kaggle/result").rglob("*.*")) == [
        "measure-your-card-with-cria-tricks.log",
        "measured_card.json",
    ]


def test_waiting_ends(on_kaggle):
    answers = Kaggle([says("QUEUED")] * 1000)
    assert "has not ended after 75 minutes; the last answer: someone/" in refusal(on_kaggle, answers)
    assert kaggle.LIMIT <= answers.seconds <= kaggle.LIMIT + 2 * kaggle.PAUSE
    assert kaggle.SESSION < kaggle.LIMIT
    assert [words[0] for words in answers.asked].count("output") == 0


@pytest.mark.parametrize(
    ("answer", "last"), [(NO_NETWORK, NO_NETWORK.strip()), (says("PAUSED"), says("PAUSED").strip())]
)
def test_five_answers_without_a_known_status_are_too_many(on_kaggle, answer, last):
    fails = kaggle.FAILURES
    answers = Kaggle([*[answer] * (fails - 1), says("RUNNING"), *[answer] * fails])
    assert refusal(on_kaggle, answers) == f"{KERNEL}: no known status in 5 answers; the last one: {last}"


def test_a_refused_push_is_found_though_the_command_line_ends_well(on_kaggle):
    answers = Kaggle([], push=NO_QUOTA)
    assert refusal(on_kaggle, answers) == f"the notebook was not pushed: {NO_QUOTA.strip()}"
    assert [words[0] for words in answers.asked] == ["push"]


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (lambda: None, "has 0 files measured_card.json and must have one"),
        (lambda: card(changed=True), "provenance.changed: files of the package differed from the commit"),
        (lambda: card("a100"), "device.name: is NVIDIA A100-SXM4-40GB, because Kaggle gave another machine"),
        (lambda: card(commit="9" * 40), f"provenance.commit: is {'9' * 40}, and {HEAD} was pushed"),
    ],
    ids=["no file", "a spoilt file", "another card", "another commit"],
)
def test_a_result_that_is_not_a_good_one_is_refused(on_kaggle, result, why):
    assert why in refusal(on_kaggle, Kaggle([says("COMPLETE")], result()))


def test_a_download_that_broke_off_is_no_result(on_kaggle):
    answers = Kaggle([says("COMPLETE")], card(), output=NO_NETWORK)
    assert refusal(on_kaggle, answers) == f"{KERNEL}: its files could not be downloaded: {NO_NETWORK.strip()}"


@pytest.mark.parametrize("name", ["KAGGLE_USERNAME", "KAGGLE_KEY"])
def test_without_a_secret_nothing_is_pushed_and_one_line_says_why(on_kaggle, monkeypatch, capsys, name):
    monkeypatch.setenv(name, "")  # so GitHub hands on a secret that is not set
    assert on_kaggle(Kaggle([])).asked == []
    said = capsys.readouterr().out
    assert said.startswith(f"::notice::skipped, because {name} is not set; ")
    assert said.count("\n") == 1
