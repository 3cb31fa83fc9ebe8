"""The dump drill: a folder of made texts is cleaned, streamed and trained on; the run is killed and goes on.

    python -m tests.drills.dump --megabytes 200 --out build/dump

One run goes through undisturbed; a second one is killed with SIGKILL between two checkpoints and resumed. Each process
writes down every row that it takes and how much memory it has. What the filters leave out must be what was planted, no
row may come twice or be skipped, and memory must not grow with the rows read.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEAD = "Title: {}\n\n*** START OF THE PROJECT GUTENBERG EBOOK {} ***\n\n"
FOOT = "\n\n*** END OF THE PROJECT GUTENBERG EBOOK {} ***\n\nThis ebook is for the use of anyone anywhere.\n"
ENGLISH = (
    "In the year {n} {a} walked with {b} from the harbour to the old hall.",
    "Nobody in {c} knew why {a} had kept the {n} letters of {b}.",
    "{a} said that the harvest of {n} was the best that {c} had ever seen.",
    "When the candles were lit, {b} told {a} about the road to {c}.",
    "They counted {n} boats on the river before {a} came home to {c}.",
)
FRENCH = (
    "En l'an {n}, {a} marchait avec {b} du port jusqu'à la vieille salle.",
    "Personne à {c} ne savait pourquoi {a} avait gardé les {n} lettres de {b}.",
    "{a} disait que la récolte de {n} était la meilleure que {c} eût jamais vue.",
)
SETTINGS = (
    "model=random:tiny", "tricks.peft=lora", "lora.r=2", "tricks.attention=sdpa", "train.max_steps=20",
    "train.save_steps=5", "train.eval_steps=1000", "data.stream=true", "data.overlap=8", "data.min_words=200",
    "data.language=en", "data.duplicates=near", "data.leakage=drop",
)  # fmt: skip
STEPS, SAVED = 20, 5
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
"""Lets glibc give freed memory back at once. Else it keeps up to four micro-batches' logits, 25 MB each, and when it
lets go of one depends on what lies behind it: the same run then differs by 100 MB from step to step."""


def make(folder: Path, megabytes: float, seed: int = 0) -> Counter[str]:
    """Write books until they have so many megabytes.

    Returns:
        How many were planted, by what they should be counted as: 1 in 25 each copied, copied with other words here and
        there, in French, and of a few words; and one is the evaluation's.
    """
    draw, planted = random.Random(seed), Counter[str]()
    names = ["".join(draw.choices("bdfgklmnrstvz", k=1)[0] + draw.choice("aeiou") for _ in range(3)).title()
             for _ in range(3000)]  # fmt: skip
    folder.mkdir(parents=True)
    size, number, last = 0, 0, ""
    while size < megabytes * 10**6:
        kind = number % 25
        if kind == 5:
            name, text = "duplicate", last
        elif kind == 10:
            name, text = "near duplicate", last.replace("walked", "wandered", 3)
        elif kind == 15:
            name, text = "in another language", book(draw, names, FRENCH, 60_000)
        elif kind == 20:
            name, text = "shorter than data.min_words", "A few words."
        elif number == 1:
            name, text = "in the evaluation set", book(draw, names, ENGLISH, 2_000)
            (folder.parent / "eval.txt").write_text(text)
        else:
            name, text = "kept", book(draw, names, ENGLISH, draw.choice((30_000, 120_000, 400_000)))
            last = text
        title = f"BOOK {number}"
        path = folder / f"{number % 10}" / f"{number:06}.txt"
        path.parent.mkdir(exist_ok=True)
        size += path.write_bytes((HEAD.format(title, title) + text + FOOT.format(title)).encode())
        planted[name] += 1
        number += 1
    return planted


def book(draw: random.Random, names: list[str], sentences: tuple[str, ...], length: int) -> str:
    """A text of about so many characters, in paragraphs."""
    found, size = [], 0
    while size < length:
        a, b, c = draw.choices(names, k=3)
        sentence = draw.choice(sentences).format(a=a, b=b, c=c, n=draw.randrange(1000, 2000))
        found.append(sentence + ("\n\n" if draw.random() < 0.2 else " "))
        size += len(sentence)
    return "".join(found)


def record(log: Path) -> None:
    """Let every row that this process's streams give be written down, with the process's memory."""
    import zlib

    import psutil

    from cria_tricks.data.stream import Stream

    original, memory = Stream.__iter__, psutil.Process().memory_info

    def each(self: Stream) -> Any:
        with log.open("a") as file:
            for row in original(self):
                print(zlib.crc32(json.dumps(row).encode()), memory().rss, file=file, flush=True)
                yield row

    Stream.__iter__ = each  # type: ignore[method-assign]


@dataclass
class Dump:
    """One rehearsal.

    Attributes:
        folder: where everything is written.
        megabytes: of text.
        lanes: micro-batches of a step.
        tokens: of a row.
    """

    folder: Path
    megabytes: float
    lanes: int = 4
    tokens: int = 128

    def settings(self) -> list[str]:
        return [
            *SETTINGS, f"data.train={self.folder / 'texts'}", f"data.eval={self.folder / 'eval.txt'}",
            f"data.max_length={self.tokens}", f"tricks.gradient_accumulation={self.lanes}",
        ]  # fmt: skip

    def run(self) -> dict[str, Any]:
        """The whole rehearsal.

        Raises:
            AssertionError: if a row was repeated or skipped, something else was left out than was planted, or memory
                grew.
        """
        began = time.perf_counter()
        planted = make(self.folder / "texts", self.megabytes)
        print(
            f"{self.megabytes:g} MB in {sum(planted.values())} books: {time.perf_counter() - began:.0f} s", flush=True
        )
        self.process("whole").wait()
        report = json.loads((self.folder / "whole" / "report.json").read_text())
        process, at = self.process("killed"), 3 * SAVED * self.lanes - self.lanes // 2
        while process.poll() is None and len(self.rows("killed")) < at:
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        done = max(int(path.name.split("-")[1]) for path in (self.folder / "killed" / "checkpoints").glob("*-[0-9]*"))
        before = self.rows("killed")
        (self.folder / "killed.log").unlink()
        self.process("killed", resume=True).wait()
        self.hold(self.rows("whole"), before, self.rows("killed"), done)
        memory = [rss for _, rss in self.rows("whole")]
        settled = max(memory[: 5 * self.lanes])
        grown = max(memory) - settled
        print(f"killed after {len(before)} rows, resumed after step {done}; no row came twice, none was skipped")
        print(f"memory after 5 steps {settled / 1e6:.0f} MB, at most {grown / 1e6:+.0f} MB from there on")
        print(f"read {report['data']['train_steps']}, whole run {report['seconds']:.0f} s")
        assert grown < 10e6
        return report

    def hold(self, whole: list, before: list, after: list, done: int) -> None:
        """Hold the rows of a run in two parts against those of the undisturbed one."""
        whole, before, after = ([row for row, _ in rows] for rows in (whole, before, after))
        assert len(whole) == STEPS * self.lanes
        assert 0 < done < STEPS
        assert before == whole[: len(before)]
        assert after == whole[done * self.lanes :]

    def rows(self, name: str) -> list[tuple[int, int]]:
        """What a run wrote down: a number of each row's content, and the memory then."""
        log = self.folder / f"{name}.log"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        return [(int(row), int(rss)) for row, rss in map(str.split, lines)]

    def process(self, name: str, resume: bool = False) -> subprocess.Popen:
        words = [str(self.folder / f"{name}.log"), str(self.folder / name), str(int(resume)), *self.settings()]
        command = [sys.executable, "-m", "tests.drills.dump", "--worker", *words]
        return subprocess.Popen(command, env=os.environ | AT_ONCE)


def work(log: str, out: str, resume: str, *settings: str) -> None:
    """Train, and write down what is read."""
    from cria_tricks.recipe import Recipe, with_settings
    from cria_tricks.run.run import train

    record(Path(log))
    train(with_settings(Recipe(name="dump"), settings), out, resume=bool(int(resume)))


if __name__ == "__main__":
    if sys.argv[1] == "--worker":
        work(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
        parser.add_argument("--megabytes", type=float, default=200)
        parser.add_argument("--out", type=Path, required=True)
        chosen = parser.parse_args()
        Dump(chosen.out, chosen.megabytes).run()
