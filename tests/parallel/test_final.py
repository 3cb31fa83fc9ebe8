"""torchrun's agent restarts what was lost, and not what refused its input."""

import logging
import signal
import sys

import pytest

from cria_tricks.launch import torchrun

FAILS = """
import os, sys
with open(sys.argv[1], "a") as file:
    file.write("started ")
sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize(("code", "starts"), [(2, 1), (1, 3)])
def test_bad_input_is_final_and_another_failure_is_tried_again(code, starts, tmp_path, monkeypatch):
    (tmp_path / "fails.py").write_text(FAILS)
    monkeypatch.setattr(sys, "argv", sys.argv)
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    level = logging.getLogger("torch.distributed.elastic").level
    command = "torchrun --standalone --nproc-per-node 1 --max-restarts 2".split()
    found = torchrun.run([*command, str(tmp_path / "fails.py"), str(tmp_path / "log"), str(code)])
    for number, handler in before.items():
        signal.signal(number, handler)
    logging.getLogger("torch.distributed.elastic").setLevel(level)
    assert (found, (tmp_path / "log").read_text()) == (code, "started " * starts)
