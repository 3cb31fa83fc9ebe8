"""What stands on standard error: sentences that never stop a run, and on a terminal what takes its time."""

import io
import sys

import pytest
from rich.console import Console

from cria_tricks.common.console import Aside, doing


def test_words_that_cannot_be_written_stop_nothing(monkeypatch):
    """The terminal may be gone before the signal comes that tells."""

    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    aside = Aside()
    aside.print("a step")
    aside.print("another")
    assert aside.quiet


@pytest.mark.parametrize("terminal", [True, False])
def test_only_a_terminal_shows_what_takes_its_time(terminal):
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=terminal, width=80)
    with doing(console, "loading runs/[a]"):
        console.print("a note")
    assert "a note\n" in shown.getvalue()
    assert ("loading runs/[a]" in shown.getvalue()) == terminal
    assert terminal or shown.getvalue() == "a note\n"
