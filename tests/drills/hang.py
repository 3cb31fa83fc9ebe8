"""The hang drill: one rank of two waits forever. py-spy and the flight recorder name it, and the timeout ends the run.

    python -m tests.drills.hang [--seconds 15]

It prints what each tool says, and how long after the hang each process ends.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

from cria_tricks.common.errors import BadInput
from cria_tricks.course.hang_demo import counts, hanging, recorded
from cria_tricks.doctor import hang

SAID = "error: another process of this run died or stopped answering; what was saved is whole: go on with --resume"


def drill(folder: Path, seconds: float, *, both: bool) -> list[str]:
    """Let two processes hang, hold what is found to what is known, and return it as lines.

    Args:
        folder: an empty one.
        seconds: how long a process waits in a collective.
        both: whether to wait until the watchdog has ended rank 1, too, 20 s after rank 0.

    Raises:
        BadInput: if there is no py-spy, or if this machine lets no process read another.
    """
    with hanging(folder, seconds) as processes:
        found_by_recorder = list(map(counts, recorded(folder, processes)))
        began = time.monotonic()
        assert found_by_recorder == [(5, 4), (4, 4)], "rank 1 is one collective behind"
        found = hang.look(os.getpid())
        assert hang.look(processes[1].pid) == found, "one of the processes leads to all"
        assert [one.in_collective for one in found] == [True, False]
        assert found[0].frames[0].startswith("all_reduce (distributed_c10d.py:")
        assert found[1].frames[0].startswith("next_rows (hang_demo.py:"), "the process that the other waits for"
        lines = [
            f"rank {rank}: {begun} collectives begun, {ended} ended"
            for rank, (begun, ended) in enumerate(found_by_recorder)
        ]
        lines += [hang.verdict(found), *(f"rank {one.rank}: {' < '.join(one.frames)}" for one in found)]
        for rank, process in enumerate(processes[: 1 + both]):
            assert process.wait(timeout=240) == 1
            ended = time.monotonic() - began
            assert process.stderr
            said = [line for line in process.stderr.read().splitlines() if line.startswith("error: ")]
            assert said == [SAID] * (rank == 0), "one of the two speaks"
            lines.append(f"rank {rank} ended {ended:.1f} s after it was looked at{''.join(f': {one}' for one in said)}")
    return lines


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--seconds", type=float, default=15.0)
    seconds = options.parse_args().seconds
    with tempfile.TemporaryDirectory() as folder:
        try:
            print(*drill(Path(folder), seconds, both=True), sep="\n")
        except BadInput as error:
            print(f"skipped: {error}")


if __name__ == "__main__":
    main()
