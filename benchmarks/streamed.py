"""The memory of a process that trains with blocks streamed from a file, against one that holds them all.

``python -m benchmarks.streamed`` trains ``big_14b_small`` twice, watches the resident memory of each process from its
start to its end, and compares losses and adapters bit for bit.

The C library keeps freed memory for later tensors, and rows of different lengths leave gaps in it that grow to hundreds
of MiB. So that this does not hide the weights, it is told to give back whatever was larger than 256 KiB.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import psutil

from cria_tricks.hardware import this_device

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "cpu" / "streamed.json"
EVERY = 0.02
"""Seconds between two looks at the process."""
GIVES_BACK = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
"""Settings of glibc: larger pieces of memory come from the system one by one, and go back when freed [bytes]."""
RUNS = {
    "resident": ("tricks.stream_layers=false", "tricks.layer_by_layer=false"),
    "streamed": (),
}


def train(folder: Path, sets: tuple[str, ...], steps: int) -> dict[str, Any]:
    """Run ``cria train`` in a process of its own, and return its peaks of resident memory and its history."""
    settings = [f"train.max_steps={steps}", "train.eval_steps=0", *sets]
    options = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "cria_tricks", "train", "big_14b_small", "--out", str(folder), *options]
    log = folder.with_suffix(".log")
    with log.open("w") as file:
        process = psutil.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=os.environ | GIVES_BACK)
        before = 0  # before the model is loaded
        peak = 0
        while process.poll() is None:
            try:
                resident = process.memory_info().rss
            except psutil.Error:
                break
            peak = max(peak, resident)
            if "loading" not in log.read_text():
                before = max(before, resident)
            time.sleep(EVERY)
    if process.wait():
        raise SystemExit(log.read_text())
    report = json.loads((folder / "report.json").read_text())
    losses = [entry["loss"] for entry in report["history"] if "loss" in entry]
    bill = {line["name"]: line["bytes"] for line in report["estimate"]["lines"]}
    found = {"before_bytes": before, "peak_bytes": peak, "billed_blocks_bytes": bill["weights: blocks"]}
    return {**found, "seconds": report["seconds"], "losses": losses}


def measure(steps: int) -> dict[str, Any]:
    """Measure both runs, and compare them."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {name: train(Path(folder, name), sets, steps) for name, sets in RUNS.items()}
        adapters = [Path(folder, name, "adapter", "adapter_model.safetensors").read_bytes() for name in RUNS]
    return {
        "processor": this_device().name,
        "date": date.today().isoformat(),
        "steps": steps,
        "same_losses": runs["resident"]["losses"] == runs["streamed"]["losses"],
        "same_adapters": adapters[0] == adapters[1],
        "runs": runs,
    }


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    found = measure(chosen.steps)
    chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    for name, run in found["runs"].items():
        peak, before, blocks = (run[part] / 2**20 for part in ("peak_bytes", "before_bytes", "billed_blocks_bytes"))
        print(
            f"{name}: peak {peak:,.0f} MiB, {before:,.0f} before loading; blocks {blocks:,.0f}; {run['seconds']:.0f} s"
        )
    print(f"losses equal: {found['same_losses']}, adapters equal: {found['same_adapters']}")


if __name__ == "__main__":
    main()
