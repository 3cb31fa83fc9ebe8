"""The shards drill: gigabytes of made texts become token shards within 1 GiB; killed twice, and resumed.

    python -m tests.drills.shards --megabytes 2000 --out build/shards

The texts are JSON lines of about 3 kB, the same on every machine. Of a hundred, 3 repeat an earlier text word for word,
and 10 repeat one with 0.5 to 5 % of its words changed, so that J is about 0.6 to 0.95. ``cria prepare`` is killed with
SIGKILL while it signs and while it tokenises. Then the verdicts on the first texts are compared with an exact search,
the same command goes on, and a reader takes random rows of the shards. The result is printed, and written to
``result.json``.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SENTENCES = (
    "In the year {n} {a} walked with {b} from the harbour to the old hall.",
    "Nobody in {c} knew why {a} had kept the {n} letters of {b}.",
    "{a} said that the harvest of {n} was the best that {c} had ever seen.",
    "When the candles were lit, {b} told {a} about the road to {c}.",
    "They counted {n} boats on the river before {a} came home to {c}.",
    "{b} and {c} had not spoken since the winter of {n}, and {a} knew it.",
)
SHARES = (0.005, 0.01, 0.02, 0.03, 0.05)
"""Which share of the words of a near copy is changed."""
RECENT = 500
"""A copy is of one of so many texts before it."""
LIMIT = 2**30
"""The resident memory that the preparation may have [bytes]."""
SETTINGS = (
    "model=random:tiny", "data.duplicates=near", "data.leakage=ignore", "data.max_length=512", "data.min_words=5",
)  # fmt: skip


def make(file: Path, megabytes: float, seed: int = 0) -> dict[str, int]:
    """Write texts until they have so many megabytes, and count the copies among them."""
    draw = random.Random(seed)
    names = ["".join(draw.choice("bdfgklmnrstvz") + draw.choice("aeiou") for _ in range(3)).title()
             for _ in range(3000)]  # fmt: skip
    recent: list[str] = []
    made = {"texts": 0, "exact copies": 0, "near copies": 0}
    size = 0
    with file.open("w") as out:
        while size < megabytes * 10**6:
            kind = draw.random() if recent else 1.0
            if kind < 0.03:
                text = draw.choice(recent)
                made["exact copies"] += 1
            elif kind < 0.13:
                text = changed(draw, draw.choice(recent), names)
                made["near copies"] += 1
            else:
                text = original(draw, names)
            size += out.write(json.dumps({"text": text}) + "\n")
            made["texts"] += 1
            if len(recent) < RECENT:
                recent.append(text)
            else:
                recent[draw.randrange(RECENT)] = text
    return made


def original(draw: random.Random, names: list[str]) -> str:
    sentences = []
    for _ in range(draw.randrange(20, 70)):
        a, b, c = draw.choices(names, k=3)
        sentences.append(draw.choice(SENTENCES).format(a=a, b=b, c=c, n=draw.randrange(1000, 2000)))
    return " ".join(sentences)


def changed(draw: random.Random, text: str, names: list[str]) -> str:
    words = text.split()
    for place in draw.sample(range(len(words)), max(1, round(len(words) * draw.choice(SHARES)))):
        words[place] = draw.choice(names)
    return " ".join(words)


def exact_search(file: Path, number: int) -> np.ndarray:
    """Tell for each of the first texts whether it has J of at least 0.8 with an earlier text that is kept."""
    from cria_tricks.data.duplicates import NEAR, ROW, Table, digest, shingles, words

    with file.open() as lines:
        found = [words(json.loads(next(lines))["text"]) for _ in range(number)]
    sets = [shingles(text, ROW) for text in found]
    table = Table(sets)
    kept: list[int] = []
    seen: set[int] = set()
    repeats = np.zeros(number, bool)
    for row in range(number):
        same = digest(found[row])
        near = kept and table.jaccard(sets[row])[kept].max() >= NEAR
        repeats[row] = same in seen or bool(near)
        if not repeats[row]:
            kept.append(row)
            seen.add(same)
    return repeats


class Start:
    """One start of ``cria prepare``, with what it took."""

    def __init__(self, folder: Path, out: str, processes: int):
        words = ["prepare", "baseline", "--out", str(folder / out), "--processes", str(processes)]
        for setting in (f"data.train={folder / 'texts.jsonl'}", *SETTINGS):
            words += ["--set", setting]
        self.began = time.perf_counter()
        self.process = subprocess.Popen([sys.executable, "-m", "cria_tricks", *words], stdout=subprocess.DEVNULL)

    def kill_after(self, file: Path) -> None:
        """Kill it once a file is there."""
        while not file.exists():
            assert self.process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        time.sleep(0.5)  # in the middle of the next part
        self.process.send_signal(signal.SIGKILL)

    def took(self) -> dict[str, float]:
        """Wait for its end; seconds on the clock and of the processor, and the most resident memory [bytes]."""
        _, status, used = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return {
            "seconds": time.perf_counter() - self.began,
            "cpu_seconds": used.ru_utime + used.ru_stime,
            "peak_bytes": used.ru_maxrss * 1024,
            "exit": self.process.returncode,
        }


def read(folder: str, rows: str) -> None:
    """Read rows of the shards in random order, and print how much resident memory that added [bytes]."""
    import psutil

    from cria_tricks.data.prepared.read import Rows, TokenShards

    found = Rows(TokenShards(Path(folder)), 512, 1)
    order = random.Random(0).choices(range(len(found)), k=int(rows))
    for row in order[:100]:
        found[row]
    before = psutil.Process().memory_info().rss
    began = time.perf_counter()
    tokens = sum(len(found[row]["input_ids"]) for row in order)
    seconds = time.perf_counter() - began
    grown = psutil.Process().memory_info().rss - before
    print(json.dumps({"rows": len(order), "tokens": tokens, "seconds": seconds, "grown_bytes": grown}))


def drill(folder: Path, megabytes: float, sample: int, processes: int) -> dict[str, Any]:
    """The whole drill.

    Raises:
        AssertionError: if memory went beyond the limit, or the repeats differ from an exact search by more than chance.
    """
    folder.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    texts = folder / "texts.jsonl"
    made = make(texts, megabytes)
    print(f"{made} in {time.perf_counter() - began:.0f} s", flush=True)
    stages = folder / "shards.preparing" / "stages"
    starts = []
    for kill_after in ("00000.part.keys.npy", "00000.done", ""):
        start = Start(folder, "shards", processes)
        if kill_after:
            start.kill_after(stages / kill_after)
        starts.append(start.took())
        print(json.dumps(starts[-1]), flush=True)
        if kill_after == "00000.done":
            verdicts = np.load(stages / "00000.judged.npy")[:sample]
    assert starts[-1]["exit"] == 0
    exact = exact_search(texts, len(verdicts))
    left_out = verdicts > 0
    both = int((exact & left_out).sum())
    found = json.loads((folder / "shards" / "prepared.json").read_text())
    rows = str(min(20_000, found["tokens"] // 512))
    reader = subprocess.run([sys.executable, "-m", "tests.drills.shards", "--read", str(folder / "shards"), rows],
                            capture_output=True, text=True, check=True)  # fmt: skip
    cpu = sum(start["cpu_seconds"] for start in starts)
    result = {
        "megabytes": megabytes,
        "made": made,
        "processes": processes,
        "starts": starts,
        "peak_bytes": max(start["peak_bytes"] for start in starts),
        "tokens": found["tokens"],
        "tokens_per_cpu_second": found["tokens"] / cpu,
        "megabytes_per_cpu_second": megabytes / cpu,
        "repeats": {name: about["rows"] for name, about in found["steps"].items()},
        "sample": {
            "texts": len(exact), "exact": int(exact.sum()), "found": int(left_out.sum()), "both": both,
            "precision": both / int(left_out.sum()), "recall": both / int(exact.sum()),
        },
        "reader": json.loads(reader.stdout),
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    assert result["peak_bytes"] < LIMIT
    assert result["reader"]["grown_bytes"] < 2**23
    assert min(result["sample"]["precision"], result["sample"]["recall"]) > 0.8
    return result


if __name__ == "__main__":
    if sys.argv[1:2] == ["--read"]:
        read(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
        parser.add_argument("--megabytes", type=float, default=2000)
        parser.add_argument("--sample", type=int, default=3000, help="texts for the exact search")
        parser.add_argument("--processes", type=int, default=1)
        parser.add_argument("--out", type=Path, required=True)
        chosen = parser.parse_args()
        drill(chosen.out, chosen.megabytes, chosen.sample, chosen.processes)
