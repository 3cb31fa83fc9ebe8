"""Ctrl-C in a command is one line and exit code 130, and a terminal that goes away does not stop the save."""

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from cria_tricks.common import interrupts
from cria_tricks.run import train

ROOT = Path(__file__).parents[1]
TRAINING = """
import sys
from cria_tricks.common.console import Aside
from cria_tricks.processes.world import World
from cria_tricks.trainer.stops import StopOnSignal

stop, aside = StopOnSignal(World()), Aside()
with stop:
    while not stop.requested:
        aside.print("a step")
    aside.print("saving")
    print("saving", file=sys.stderr, flush=True)
    open(sys.argv[1], "w").close()
"""


@pytest.mark.parametrize("saved", [interrupts.NOTHING, "step 4 is saved"])
def test_ctrl_c_in_a_command_unwinds_it_and_says_what_was_saved_last(saved, run_cria, monkeypatch):
    unwound = []

    def run(*arguments, **options):
        try:
            if saved != interrupts.NOTHING:
                interrupts.now_saved(saved)
            raise KeyboardInterrupt
        finally:
            unwound.append("the half-written folder is removed")

    monkeypatch.setattr(train, "train", run)
    assert run_cria("train") == (130, "", f"interrupted; {saved}\n")
    assert unwound


def test_a_terminal_that_goes_away_does_not_stop_the_save(tmp_path):
    """Each word to it is an error from then on (EIO)."""

    def own_the_terminal():
        """So that it hears when the terminal goes."""
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, str(tmp_path / "saved")],
        stdin=its,
        stdout=its,
        stderr=its,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=own_the_terminal,
    )
    os.close(its)
    assert b"a step" in os.read(ours, 100)
    os.close(ours)
    assert process.wait(timeout=600) == 0
    assert (tmp_path / "saved").exists()
