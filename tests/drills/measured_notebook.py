"""The notebook "Measure your card" in a real kernel that is killed in the middle, then once more, then as a script.

It runs in an environment of its own, which has Colab's versions and gets our package by the notebook's own install
cell: ``.ci/colab WHEEL --measure``. So this file imports nothing of ours and none of our tools.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import DeadKernelError

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
NAME = "measure_your_card"
MEASURES = "_ = cria(*BENCH)"
"""The cell that measures all parts."""
KEPT = 3
"""Cases after which the kernel is killed."""


def cases(folder: Path) -> list[dict]:
    """Read the cases that are in the result so far."""
    files = list(folder.glob("cria-bench/*/measured_card.json"))
    return json.loads(files[0].read_text(encoding="utf-8"))["cases"] if files else []


def shortened(text: str, parts: list[str]) -> str:
    """Let the cell that measures all parts measure these only; without any, leave it as it is."""
    assert text.count(MEASURES) == 1
    return text.replace(MEASURES, "".join([MEASURES[:-1], *(f', "--part", "{part}"' for part in parts), ")"]))


def notebook(folder: Path, parts: list[str]) -> NotebookClient:
    """Open the notebook as Colab would, in a folder that holds the wheel."""
    book = nbformat.read(NOTEBOOKS / f"{NAME}.ipynb", as_version=4)
    (cell,) = [cell for cell in book.cells if MEASURES in cell.source]
    cell.source = shortened(cell.source, parts)
    return NotebookClient(book, timeout=None, resources={"metadata": {"path": str(folder)}})


def killed(folder: Path, parts: list[str]) -> list[dict]:
    """Run the notebook, kill its kernel after some cases, and return the cases that are kept.

    The command that measures dies with the kernel, because a restart in Jupyter kills all processes of its group.
    """
    client = notebook(folder, parts)

    def kill() -> None:
        while len(cases(folder)) < KEPT:
            time.sleep(0.1)
        os.killpg(os.getpgid(client.km.provisioner.pid), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()
    try:
        client.execute()
    except DeadKernelError:
        return cases(folder)
    raise AssertionError("the kernel was not killed: everything was measured before")


def outputs(client: NotebookClient) -> list[nbformat.NotebookNode]:
    """Everything that the cells of a notebook printed and drew."""
    return [output for cell in client.nb.cells for output in cell.get("outputs", [])]


def main() -> None:
    """Kill it, run it again, run it as a script; what is measured once must stay as it is."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="a folder with the wheel; the result is written there")
    parser.add_argument("--part", action="append", default=[], help="measure this part only; may be repeated")
    asked = parser.parse_args()
    folder = asked.folder.resolve()
    kept = killed(folder, asked.part)
    print(f"kernel killed: {len(kept)} cases are kept", flush=True)

    client, began = notebook(folder, asked.part), time.monotonic()
    client.execute()
    whole = cases(folder)
    text = "".join(output.text for output in outputs(client) if output.output_type == "stream")
    assert whole[: len(kept)] == kept, "a finished case was measured again"
    repeated = [case["name"] for case in kept if f"  {case['bench']}.{case['name']}: " in text]
    assert not repeated, f"measured again: {repeated}"
    assert text.count("accepted: ") == 1
    assert any("text/markdown" in output.get("data", {}) for output in outputs(client)), "no table is shown"
    minutes = (time.monotonic() - began) / 60
    print(f"run again: {len(whole)} cases after {minutes:.1f} minutes, accepted", flush=True)

    script = folder / f"{NAME}.py"
    script.write_text(shortened((NOTEBOOKS / script.name).read_text(encoding="utf-8"), asked.part), encoding="utf-8")
    done = subprocess.run([sys.executable, script], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert cases(folder) == whole, "a finished case was measured again"
    assert "accepted: " in done.stdout
    print("as a script: nothing measured again, accepted")


if __name__ == "__main__":
    main()
