"""A file of rows that is larger than anybody wants in memory: how soon the first batch comes, and what it takes.

    python -m benchmarks.streaming --gigabytes 1

The file is made in a temporary folder. A fresh process loads libraries and tokenizer and stands idle; then it opens the
stream, takes batches from all lanes, and its largest resident set is held against the idle one.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

LANES, BATCH, BATCHES = 8, 2, 500
BOUNDS = {"first_batch_seconds": 5.0, "over_idle_megabytes": 300.0}


def make(path: Path, gigabytes: float) -> int:
    """Write question-and-answer rows of 300 to 3,000 characters until there are so many bytes; how many it took."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghilmnoprstuvw", k=draw.randrange(2, 10))) for _ in range(20_000)]
    number = size = 0
    with path.open("w", encoding="utf-8") as file:
        while size < gigabytes * 10**9:
            answer = " ".join(draw.choices(words, k=draw.randrange(40, 400)))
            question = " ".join(draw.choices(words, k=10))
            row = {"messages": [{"role": "user", "content": f"{number}: {question}?"},
                                {"role": "assistant", "content": answer}]}  # fmt: skip
            size += file.write(json.dumps(row) + "\n")
            number += 1
    return number


def measure(path: str) -> dict[str, float]:
    """In a fresh process: seconds to the first batch, and megabytes over those of the idle process."""
    import psutil
    from rich.console import Console

    import cria_tricks.trainer.shared  # noqa: F401
    from cria_tricks import models
    from cria_tricks.data import sources
    from cria_tricks.data.batches import PadToLongest
    from cria_tricks.data.shards import open_stream
    from cria_tricks.data.stream import Stream
    from cria_tricks.load.model import load_tokenizer
    from cria_tricks.processes.world import World
    from cria_tricks.recipe import Recipe, with_settings

    settings = [
        f"data.train={path}", "data.stream=true", "train.max_steps=1", f"train.batch_size={BATCH}",
        f"tricks.gradient_accumulation={LANES}", "data.max_length=512",
    ]  # fmt: skip
    recipe, tokenizer = with_settings(Recipe(), settings), load_tokenizer(models.find("smollm2"))
    held_out, process = sources.find("nguzo_saba", "eval"), psutil.Process()
    tokenizer("ready")
    idle, peak, done = process.memory_info().rss, [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    stream = Stream(recipe, open_stream(path, LANES), held_out, tokenizer, World(), Console(quiet=True).print)
    rows, collate = iter(stream), PadToLongest(tokenizer.pad_token_id)
    collate([next(rows) for _ in range(BATCH)])
    first = time.perf_counter() - began
    tokens = sum(collate([next(rows) for _ in range(BATCH)])["input_ids"].numel() for _ in range(BATCHES))
    seconds = time.perf_counter() - began - first
    done.set()
    watcher.join()
    return {
        "idle_megabytes": idle / 1e6,
        "over_idle_megabytes": (peak[0] - idle) / 1e6,
        "first_batch_seconds": first,
        "tokens_per_second": tokens / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure:
        print(json.dumps(measure(chosen.measure)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        print(f"{make(path, chosen.gigabytes):,} rows, {path.stat().st_size:,} bytes", flush=True)
        command = [sys.executable, "-m", "benchmarks.streaming", "--measure", str(path)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
    for name, value in found.items():
        bound = f", at most {BOUNDS[name]:g} wanted" if name in BOUNDS else ""
        print(f"{name}: {value:,.1f}{bound}")
    if any(found[name] > bound for name, bound in BOUNDS.items()):
        sys.exit(1)


if __name__ == "__main__":
    main()
