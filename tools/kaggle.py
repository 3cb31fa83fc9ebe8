"""Run the notebook measure_your_card on Kaggle's free T4s, with the package of this commit: ``make kaggle``.

Kaggle's own command line does the talking: push, status, output. It reads KAGGLE_USERNAME and KAGGLE_KEY. What comes
back lies in ``build/kaggle/result``, and is accepted as ``cria bench --check`` accepts a file. This was never run on
Kaggle: the tests answer as version 2.2.5 of its command line does.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from cria_tricks.bench.accept import accept
from cria_tricks.bench.measured_card import NAME, MeasuredCard
from cria_tricks.common.errors import BadInput
from tools.notebooks import NOTEBOOKS, REPOSITORY, ROOT, TAG

NOTEBOOK = NOTEBOOKS / "measure_your_card.ipynb"
FOLDER = ROOT / "build" / "kaggle"
COMMAND = ROOT / "build" / "kaggle-cli" / "bin" / "kaggle"
"""Kaggle's command line. It has an environment of its own, because it needs newer libraries than constraints.txt."""
TITLE = "Measure your card with cria tricks"
SLUG = TITLE.lower().replace(" ", "-")
"""The notebook's name in its address, which Kaggle makes from the title."""
MACHINE, CARD = "NvidiaTeslaT4", "Tesla T4"
"""Kaggle's name for a machine with two T4s, and what CUDA calls one."""
SESSION = 60 * 60
"""How long the notebook may run on Kaggle [s]."""
LIMIT = 75 * 60
"""How long we wait for it, with its time in the queue [s]."""
PAUSE = 60
"""Between two questions [s]."""
FAILURES = 5
"""Give up after so many answers in a row without a known status, for example because the network is down."""
WAITING = ("QUEUED", "RUNNING", "NEW_SCRIPT")
ENDED = ("COMPLETE", "ERROR", "CANCEL_REQUESTED", "CANCEL_ACKNOWLEDGED")


def metadata(user: str, code_file: str) -> dict[str, Any]:
    """Describe the notebook to Kaggle: kernel-metadata.json."""
    return {
        "id": f"{user}/{SLUG}",
        "title": TITLE,
        "code_file": code_file,
        "language": "python",
        "kernel_type": "notebook",
        "is_private": True,
        "enable_gpu": True,
        "enable_internet": True,  # pip installs the package
        "machine_shape": MACHINE,
    }


def write_folder(folder: Path, notebook: Path, user: str, commit: str) -> None:
    """Write what is pushed: the notebook, which installs this commit instead of the release, and its metadata.

    Raises:
        SystemExit: the notebook does not install the release, so there is nothing to replace.
    """
    text = notebook.read_text(encoding="utf-8")
    release = f"git+{REPOSITORY}@{TAG}"
    if release not in text:
        sys.exit(f"{notebook}: does not install {release}, so it cannot be made to install commit {commit}")
    folder.mkdir(parents=True)
    ours = text.replace(release, f"git+{REPOSITORY}@{commit}")
    (folder / notebook.name).write_text(ours, encoding="utf-8")
    described = json.dumps(metadata(user, notebook.name), indent=1)
    (folder / "kernel-metadata.json").write_text(described, encoding="utf-8")


def ask(*words: str) -> subprocess.CompletedProcess[str]:
    """Call Kaggle's command line."""
    return subprocess.run([COMMAND, "kernels", *words], capture_output=True, text=True)


def push(folder: Path) -> str:
    """Push a folder, which also starts the notebook; return the number of its version.

    Raises:
        SystemExit: Kaggle refused it. Its command line ends with exit code 0 then, so only its words tell.
    """
    done = ask("push", "--path", str(folder), "--timeout", str(SESSION))
    found = re.search(r"Kernel version (\d+) successfully pushed", done.stdout)
    if not found:
        sys.exit(f"the notebook was not pushed: {_last_line(done)}")
    print(done.stdout.strip(), flush=True)
    return found[1]


def status(answer: str) -> str:
    """Read the status from an answer of ``kaggle kernels status``; empty if there is none."""
    found = re.search(r'has status "KernelWorkerStatus\.(\w+)"', answer)
    return found[1] if found else ""


def wait(kernel: str) -> str:
    """Wait until a version of the notebook has ended; return its last status.

    Raises:
        SystemExit: it did not end in time, or its status stays unknown.
    """
    end = time.monotonic() + LIMIT
    failures = 0
    while True:
        done = ask("status", kernel)
        now = status(done.stdout)
        if now in ENDED:
            print(done.stdout.strip(), flush=True)
            return now
        failures += 1
        if now in WAITING:
            failures = 0
        if failures == FAILURES:
            sys.exit(f"{kernel}: no known status in {FAILURES} answers; the last one: {_last_line(done)}")
        if time.monotonic() > end:
            sys.exit(f"{kernel}: has not ended after {LIMIT // 60} minutes; the last answer: {_last_line(done)}")
        time.sleep(PAUSE)


def measured(folder: Path, commit: str) -> MeasuredCard:
    """Accept the file that came back.

    Raises:
        SystemExit: there is none, or it is not accepted, or another card or other code was measured.
    """
    files = sorted(folder.rglob(NAME))
    if len(files) != 1:
        sys.exit(f"{folder}: has {len(files)} files {NAME} and must have one; the log beside them says what happened")
    try:
        card = accept(files[0])
    except BadInput as error:
        sys.exit(str(error))
    if card.device.name != CARD:
        sys.exit(f"{files[0]}: device.name: is {card.device.name}, because Kaggle gave another machine than {MACHINE}")
    if card.provenance.commit != commit:
        sys.exit(f"{files[0]}: provenance.commit: is {card.provenance.commit}, and {commit} was pushed")
    return card


def run(user: str, commit: str) -> None:
    """Push, wait, collect, and accept; what was collected is kept also if something went wrong.

    Raises:
        SystemExit: something went wrong: one line says what.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    write_folder(FOLDER / "push", NOTEBOOK, user, commit)
    kernel = f"{user}/{SLUG}/{push(FOLDER / 'push')}"
    ended = wait(kernel)
    result = FOLDER / "result"
    # Kaggle's command line always adds the log.
    done = ask("output", kernel, "--path", str(result), "--file-pattern", r"measured_card\.(json|zip)$")
    if ended != "COMPLETE":
        sys.exit(f"{kernel}: ended with status {ended}; {result} has the log")
    if done.returncode:
        sys.exit(f"{kernel}: its files could not be downloaded: {_last_line(done)}")
    card = measured(result, commit)
    print(f"accepted: {card.device.name}, {len(card.cases)} cases, in {result}")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = f"{done.stdout}\n{done.stderr}".split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no answer")


def main() -> None:
    """Run it for the commit of this checkout, or say why not."""
    missing = [name for name in ("KAGGLE_USERNAME", "KAGGLE_KEY") if not os.environ.get(name)]
    if missing:
        print(f"::notice::skipped, because {' and '.join(missing)} is not set; CONTRIBUTING.md says how to set it")
        return
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    run(os.environ["KAGGLE_USERNAME"], commit.strip())


if __name__ == "__main__":
    main()
