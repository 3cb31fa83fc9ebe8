"""The notebook "Two cards" in a real kernel, on two gloo processes: what it prints, against what must hold.

    python -m tests.drills.two_cards

It hides GPUs. On two of them run the notebook itself, because nothing here was ever measured there.
"""

import os
import re
import subprocess
import tempfile
import time

import nbformat
from nbclient import NotebookClient

from tools import notebooks

BOOK = notebooks.NOTEBOOKS / "two_cards.ipynb"
NUMBER = r"([\d,.]+)"


def executed(first: str = "") -> str:
    """Run the notebook, and return everything that it printed.

    Args:
        first: code that its kernel runs before.
    """
    book = nbformat.read(BOOK, as_version=4)
    book.cells.insert(0, nbformat.v4.new_code_cell(first))
    quiet = {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(notebooks.ROOT),
    }
    with tempfile.TemporaryDirectory() as folder:
        client = NotebookClient(book, timeout=None, resources={"metadata": {"path": folder}})
        client.execute(env=os.environ | quiet, stderr=subprocess.DEVNULL)
    outputs = [output for cell in book.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


def check(said: str) -> None:
    """Hold what the notebook printed to what must be so."""
    assert "This session has no card." in said
    # Part 1: the same losses, the same gradients in both processes, and the bytes of the formula.
    losses = [line.split()[2:] for line in said.splitlines() if line.startswith(("one process  ", "two processes"))]
    alone, shared, single = ([float(loss) for loss in found] for found in losses)
    assert (len(alone), len(shared), len(single)) == (5, 5, 2)
    assert max(abs(p - q) for p, q in zip(alone, shared, strict=True)) < 1e-3
    assert float(found_by(r"largest relative difference (\S+)", said)) < 1e-4
    digests = re.findall(r"^process \d: gradients (.+)$", said, re.M)
    assert digests[0] == digests[1]
    assert len(digests[0].split()) == 2
    assert "equal to the last bit: True" in said
    numbers = whole(found_by(rf"LoRA trains {NUMBER} numbers", said))
    formula, counted, more = map(
        whole, re.findall(rf"by the formula {NUMBER} bytes, counted {NUMBER}: {NUMBER} more", said)[0]
    )
    assert formula == 4 * numbers
    assert 0 < more == counted - formula < 100
    # Part 2: the same losses, and the peak of each process within 2 % of the estimate.
    apart = re.findall(r"^(micro_batch|step) .*  apart (\S+)$", said, re.M)
    assert [reduce for reduce, _ in apart] == ["micro_batch", "step"]
    assert all(float(difference) < 1e-4 for _, difference in apart)
    peaks = {
        what: (real(predicted), real(measured))
        for what, predicted, measured in re.findall(
            rf"^peak MiB, (.+?) +your.*predicted +{NUMBER} +measured +{NUMBER}", said, re.M
        )
    }
    assert list(peaks) == [
        "one process",
        *(f"reduce={reduce}, process {rank}" for reduce in ("micro_batch", "step") for rank in (0, 1)),
    ]
    for what, (predicted, measured) in peaks.items():
        assert abs(predicted / measured - 1) < 0.02, what
    measured = [measured for _, measured in peaks.values()]
    assert measured[1] < measured[3] < measured[0], "pieces of gradients, whole gradients, everything whole"
    # Part 3 is arithmetic.
    verdicts = re.findall(r"predicted: at least .*: (.+)$", said, re.M)
    assert verdicts == ["does not fit", "tight", "does not fit"]


def found_by(pattern: str, said: str) -> str:
    """Return what the first group of a pattern matches."""
    found = re.search(pattern, said)
    assert found, pattern
    return found[1]


def whole(text: str) -> int:
    return int(text.replace(",", ""))


def real(text: str) -> float:
    return float(text.replace(",", ""))


def main() -> None:
    began = time.monotonic()
    said = executed()
    print(said)
    check(said)
    print(f"all of it holds; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
