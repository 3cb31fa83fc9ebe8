"""The disconnect drill: a run is killed or interrupted again and again, resumed each time, and ends bit-identical.

    python -m tests.drills.disconnect --kills 50 --out /tmp/drill

One run of the recipe goes through undisturbed. A second one is killed at random moments: in turn anywhere in loading
and what comes after it, after a step that it took, and in the middle of writing a checkpoint. In a fourth turn it gets
SIGINT, SIGTERM or SIGHUP while it trains, and must save and say so in one line. At the end the adapter
must have the same bytes and the curves the same numbers, and no kill may have cost more steps than lie between two
saves.
A run that ends before all the kills are spent is held against the first one, and another is begun.
"""

import argparse
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
KEYS = ("step", "loss", "eval_loss", "grad_norm", "learning_rate", "trained_tokens")


@dataclass
class Drill:
    """One rehearsal.

    Attributes:
        settings: arguments of ``cria train``, without ``--out`` and ``--resume``.
        folder: where the runs are written.
        cadence: optimizer steps between two saves, as the settings say.
        seed: of the moments.
        lost: for each kill the whole steps that were done again.
        in_saves: how many kills came while a checkpoint was being written.
    """

    settings: Sequence[str]
    folder: Path
    cadence: int
    seed: int = 0
    lost: list[int] = field(default_factory=list)
    in_saves: int = 0

    def run(self, kills: int) -> None:
        """Kill so many times, then check.

        Raises:
            AssertionError: if a resumed run differs, or more was lost than one cadence.
        """
        draw = random.Random(self.seed)
        whole = self.folder / "whole"
        self._finish(whole, resume=False)
        steps = [e["step_seconds"] for e in _history(whole) if "loss" in e]
        step_seconds = sum(steps) / len(steps)
        print(f"undisturbed: {len(steps)} steps, {step_seconds:.1f} s each", flush=True)
        rounds = 0
        while len(self.lost) < kills or rounds == 0:
            rounds += 1
            out = self.folder / f"killed-{rounds}"
            while len(self.lost) < kills:
                moment = ("anywhere", "step", "save", "interrupt")[len(self.lost) % 4]
                number = draw.choice(INTERRUPTS) if moment == "interrupt" else signal.SIGKILL
                if not self._live_and_die(out, moment, number, draw.random(), step_seconds):
                    break
            else:
                self._finish(out, resume=True)
            self._compare(whole, out)
            print(f"run {rounds} ended bit-identical after {len(self.lost)} kills", flush=True)

    def _live_and_die(self, out: Path, moment: str, number: signal.Signals, chance: float, step_seconds: float) -> bool:
        """One process and its end; False when it came to the end of the run first. A missed save does not count."""
        checkpoints = out / "checkpoints"
        left = _being_written(checkpoints)  # by an earlier kill
        log = out.with_suffix(f".{len(self.lost)}.log")
        with log.open("w") as stderr, self._start(out, stderr) as process:
            reached = {
                "anywhere": lambda: True,
                "step": lambda: re.search(r"step +\d+/", log.read_text()),
                "interrupt": lambda: re.search(r"step +\d+/", log.read_text()),
                "save": lambda: _being_written(checkpoints) - left,
            }[moment]
            while process.poll() is None and not reached():
                time.sleep(0.0005)
            longest = {
                "anywhere": 10 + 2 * step_seconds,
                "step": 1.5 * step_seconds,
                "save": 0.02,
                "interrupt": step_seconds,
            }
            deadline = time.perf_counter() + longest[moment] * chance
            while process.poll() is None and time.perf_counter() < deadline:
                time.sleep(0.0005)
            if process.poll() is None:
                process.send_signal(number)
        said = log.read_text()
        trained = re.search(r"step +(\d+)/\1\b", said)  # all steps: what then comes does not handle SIGTERM
        saves = moment == "interrupt" and not trained
        assert process.returncode in ((0, 130) if saves else (0, 130, -number)), said
        if process.returncode == 0:
            return False
        if process.returncode == 130:
            assert moment == "interrupt", said
            assert said.splitlines()[-1].startswith("interrupted"), said
            assert "Traceback" not in said, said
        in_save = bool(_being_written(checkpoints) - left)
        last = max((int(step) for step in re.findall(r"step +(\d+)/", said)), default=0)
        whole = [int(path.name.rpartition("-")[2]) for path in checkpoints.glob("checkpoint-*[0-9]")]
        lost = max(0, last - max(whole, default=0))
        assert lost <= self.cadence, f"{lost} steps lost, saved every {self.cadence}"
        if moment == "save" and not in_save:
            return True  # on a busy machine the kill may come after the save: once more
        self.in_saves += in_save
        self.lost.append(lost)
        return True

    def _start(self, out: Path, stderr: IO[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command(out, resume=True), stdout=subprocess.DEVNULL, stderr=stderr)

    def _finish(self, out: Path, resume: bool) -> None:
        subprocess.run(self._command(out, resume), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)

    def _compare(self, whole: Path, out: Path) -> None:
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            assert (out / "adapter" / name).read_bytes() == (whole / "adapter" / name).read_bytes(), name
        assert _curves(out) == _curves(whole), "the curves differ"

    def _command(self, out: Path, resume: bool) -> list[str]:
        command = [sys.executable, "-m", "cria_tricks", "train", *self.settings, "--out", str(out)]
        return [*command, "--resume"] if resume else command


def _being_written(checkpoints: Path) -> set[tuple[str, int]]:
    """Unfinished folders, each with when it changed: one of the same name may be begun again."""
    found = set()
    for path in checkpoints.glob("*.partial"):
        with contextlib.suppress(FileNotFoundError):  # finished meanwhile
            found.add((path.name, path.stat().st_mtime_ns))
    return found


def _history(folder: Path) -> list[dict[str, float]]:
    return json.loads((folder / "report.json").read_text())["history"]


def _curves(folder: Path) -> list[dict[str, float]]:
    return [{key: entry[key] for key in KEYS if key in entry} for entry in _history(folder)]


def main() -> None:
    """Run the drill on the smoke recipe, 30 steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--save-steps", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="settings")
    parser.add_argument("--out", type=Path, required=True, help="an empty folder")
    chosen = parser.parse_args()
    settings = ["smoke"]  # in fp32: the recipe's own precision differs between processors
    steps = (f"train.max_steps={chosen.steps}", f"train.save_steps={chosen.save_steps}")
    for setting in ("tricks.precision=fp32", *steps, *chosen.settings):
        settings += ["--set", setting]
    chosen.out.mkdir(parents=True, exist_ok=True)
    if any(chosen.out.iterdir()):
        parser.error(f"--out {chosen.out}: is not empty")
    drill = Drill(settings, chosen.out, chosen.save_steps, chosen.seed)
    drill.run(chosen.kills)
    print(
        f"{len(drill.lost)} kills and interrupts, {drill.in_saves} of them while a checkpoint was being written; "
        f"steps lost: {sum(drill.lost)}, at most {max(drill.lost)} at once"
    )


if __name__ == "__main__":
    main()
