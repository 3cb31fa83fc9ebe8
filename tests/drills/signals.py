"""The signal drill: SIGINT, SIGTERM or SIGHUP at random moments, one to three times, and the run ends bit-identical.

    python -m tests.drills.signals --moments 60

A tiny run goes through undisturbed. A second one gets signals at random moments between the first line of our entry
and the end of the process, and is resumed each time. Each time the exit code and the words are checked. At the end the
weights must have the sha256 of the undisturbed run. A run that ends before all moments are spent is compared, and
another one is begun.

The moments begin when the process handles SIGTERM. Before that Python itself starts, and none of our code runs. Nine
tenths of a tiny run are imports, so every second moment comes after them.
"""

import argparse
import collections
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def hear() -> None:
    """What is started in the background, or under nohup, ignores some of them, and so would what it starts."""
    for number in NUMBERS:
        signal.signal(number, signal.SIG_DFL)


TINY = (
    "model=random:tiny",
    "tricks.precision=fp32",
    "data.max_length=64",
    "lora.r=4",
    "train.max_steps=4",
    "train.save_steps=1",
)
"""fp32, because the recipe's own precision differs between processors."""
LOADING = "loading "


@dataclass
class Signals:
    """One rehearsal.

    Attributes:
        folder: where the runs are written.
        settings: of the smoke recipe.
        seconds: how long the undisturbed run takes, from the first line of our entry.
        training: how long it takes when the libraries are imported.
        ends: how the interrupted processes ended, and how often.
    """

    folder: Path
    settings: Sequence[str] = TINY
    seconds: float = 0.0
    training: float = 0.0
    ends: collections.Counter[str] = field(default_factory=collections.Counter)

    def __post_init__(self) -> None:
        """Write rows that take no time."""
        rows = self.folder / "rows.jsonl"
        rows.write_text("".join(f'{{"prompt": "{n} and one is", "completion": " {n + 1}"}}\n' for n in range(8)))
        self.settings = (*self.settings, f"data.train={rows}", f"data.eval={rows}")

    def whole(self) -> None:
        """Let a run go through."""
        with self._started("whole") as process:
            self._until(process, lambda: _handles(process.pid, signal.SIGTERM))
            began = time.perf_counter()
            self._until(process, self.said_by("whole", LOADING))
            trained = time.perf_counter()
            assert process.wait() == 0, self._said("whole")
        self.seconds, self.training = time.perf_counter() - began, time.perf_counter() - trained

    def run(self, moments: int, seed: int) -> None:
        """Interrupt at random moments, resume, compare.

        Raises:
            AssertionError: naming the exit code, the words, or the run that differs.
        """
        draw = random.Random(seed)
        self.whole()
        print(f"undisturbed: {self.seconds:.1f} s", flush=True)
        name, runs = "run-1", 1
        for number in range(moments):
            presses = [draw.choice((0.0, 0.001, 0.02, 0.3)) for _ in range(draw.randint(0, 2))]
            trains = number % 2 == 1
            reached = self.said_by(name, LOADING) if trains else lambda: True
            delay = draw.random() * (self.training if trains else self.seconds)
            if self.press(name, draw.choice(NUMBERS), reached, [delay, *presses]) == 0:
                self.compare(name)
                print(f"{sum(self.ends.values())} of {moments} moments, {runs} runs", flush=True)
                runs += 1
                name = f"run-{runs}"
        self.finish(name)
        print(f"{runs} runs ended bit-identical", flush=True)

    def press(self, name: str, number: signal.Signals, reached: Callable[[], object], delays: Sequence[float]) -> int:
        """Start or resume a run, and send it signals.

        Args:
            name: of the run's folder.
            number: the signal.
            reached: whether the run has come far enough.
            delays: seconds before each signal.

        Returns:
            The exit code: 130, or 0 if the run was over before.
        """
        with self._started(name) as process:
            self._until(process, lambda: _handles(process.pid, signal.SIGTERM))
            began = time.perf_counter()
            self._until(process, reached)
            for delay in delays:
                deadline = time.perf_counter() + delay
                self._until(process, lambda until=deadline: time.perf_counter() >= until)
                if process.poll() is None:
                    process.send_signal(number)
            code = process.wait()
        if code == 0:  # the machine has become faster; later moments shall still lie within a run
            self.seconds = min(self.seconds, time.perf_counter() - began)
        self.check(code, self._said(name), f"{number.name} x {len(delays)} after {delays} s")
        return code

    def check(self, code: int, said: str, what: str) -> None:
        """Hold the words of a process against its exit code."""
        assert "Traceback" not in said, f"{what}: {said}"
        assert "Exception" not in said, f"{what}: {said}"
        last = [line for line in said.splitlines() if line.startswith("interrupted")]
        assert (code, len(last)) in {(130, 1), (0, 0)}, f"{what}: exit code {code}: {said}"
        if code:
            assert said.endswith(f"{last[0]}\n"), f"{what}: {said}"
            words = last[0].partition("; ")[2]
            end = next(end for end in ENDS if end in words)
            self.ends[end] += 1
        else:
            self.ends["over before"] += 1

    def finish(self, name: str) -> None:
        """Resume a run, let it go through, and compare it."""
        with self._started(name) as process:
            assert process.wait() == 0, self._said(name)
        self.compare(name)

    def compare(self, name: str) -> None:
        """The weights' sha256, as the manifests of both runs have it."""
        assert self._sha256(name) == self._sha256("whole"), f"{name} is another run"

    def words(self, name: str) -> list[str]:
        """The command's, for a run."""
        settings = [part for setting in self.settings for part in ("--set", setting)]
        return ["train", "smoke", *settings, "--out", str(self.folder / name), "--resume"]

    def said_by(self, name: str, words: str) -> Callable[[], bool]:
        """Whether a run has said something."""
        return lambda: words in self._said(name)

    def _sha256(self, name: str) -> str:
        manifest = json.loads((self.folder / name / "adapter" / "manifest.json").read_text())
        return manifest["files"]["adapter_model.safetensors"]["sha256"]

    def _started(self, name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("w") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "cria_tricks", *self.words(name)],
                stdout=subprocess.DEVNULL,
                stderr=log,
                preexec_fn=hear,
            )

    def _said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def _until(self, process: subprocess.Popen[bytes], reached: Callable[[], object]) -> None:
        while process.poll() is None and not reached():
            time.sleep(0.0005)


ENDS = ("nothing was written", "no step is saved", "go on with", "the run is finished")
"""What the last line may say, the rarest words first: those of two kinds end alike."""


def _handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal, as Linux tells it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has ended
        return True
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:")).split()[1]
    return bool(int(caught, 16) >> (number - 1) & 1)


def main() -> None:
    """Run the drill and say how the processes ended."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--moments", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--out", type=Path, help="an empty folder; one that is removed when left out")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        drill = Signals(folder, (*TINY, *chosen.settings))
        drill.run(chosen.moments, chosen.seed)
    for end, number in drill.ends.most_common():
        print(f"{number:>4}  {end}")


if __name__ == "__main__":
    main()
