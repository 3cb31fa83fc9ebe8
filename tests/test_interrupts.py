"""Ctrl-C, SIGTERM and SIGHUP at any moment of a command: one line, exit code 130, never a traceback."""

import fcntl
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from cria_tricks.common.console import Aside
from tests.drills.signals import hear

ROOT = Path(__file__).parents[1]
NOTHING = "interrupted; nothing was written\n"
PRESS = """
import atexit, os, signal, sys
def press(times, number=signal.SIGINT, kill=os.kill, process=os.getpid()):
    for _ in range(times):
        kill(process, number)
"""
DURING_IMPORT = """
import builtins
honest = builtins.__import__
def load(name, *arguments, **options):
    if name == {name!r} and name not in sys.modules:
        builtins.__import__ = honest
        try:
            press({times}, {number})
        except BaseException as error:
            if name == "signal": raise
            raise ImportError("the library's own words")
    return honest(name, *arguments, **options)
builtins.__import__ = load
"""
COMMAND = """
from cria_tricks.cli import entry, main as cli
def command(arguments, prog_name, standalone_mode):
{body}
cli.app = command
entry.main()
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PRESS + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, preexec_fn=hear)
    done.stderr = re.sub("^still .*\n", "", done.stderr, flags=re.MULTILINE)  # on a machine so busy that it waits
    return done


def run_command(*lines: str) -> tuple[int, str]:
    done = run(COMMAND.format(body="\n".join(f"    {line}" for line in lines)))
    return done.returncode, done.stderr


def test_importing_the_package_installs_no_handler():
    code = (
        "numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)\n"
        "def state(): return [*map(signal.getsignal, numbers), sys.excepthook, sys.unraisablehook, sys.stderr.write]\n"
        "before = state()\n"
        "import cria_tricks.cli.entry, cria_tricks.cli.main, cria_tricks.run.api, cria_tricks.common.waiting\n"
        "print(state() == before)\n"
    )
    assert run(code).stdout == "True\n"


def test_nothing_that_takes_time_is_imported_before_the_handlers():
    code = "import sys; sys.path.insert(0, '.'); import cria_tricks.cli.entry; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stdout.split())
    assert "cria_tricks.common.interrupts" in loaded
    assert not loaded & {"signal", "enum", "typing", "re", "logging", "contextlib", "typer", "rich", "pydantic"}


@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("signal", "SIGINT"),  # until our handlers are installed, the two others end any process
        *((name, number) for name in ("typer", "pydantic") for number in ("SIGINT", "SIGTERM", "SIGHUP")),
    ],
)
def test_a_signal_while_libraries_are_imported_is_one_line(name, number, times):
    first = "from cria_tricks.cli.entry import main\n" + "sys.modules.pop('signal')\n" * (name == "signal")
    during = DURING_IMPORT.format(name=name, times=times, number=f"signal.{number}")
    done = run(first + during + "main()", "train", "smoke", "--set", "train.epochs=x")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", NOTHING)


def test_a_signal_while_a_command_imports_ends_it_at_once(tmp_path):
    """Where a library's C++ code imports, Python's exception would go through it and abort the process."""
    (tmp_path / "heavy.py").write_text("import builtins\nbuiltins.press(1)\n")
    lines = (
        "import builtins",
        "builtins.press = press",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "try: import heavy",
        "finally: print('not reached', file=sys.stderr)",
    )
    assert run_command(*lines) == (130, NOTHING)


def test_a_signal_before_a_model_is_made_leaves_nothing_in_the_cache(tmp_path, monkeypatch):
    (tmp_path / "transformers.py").write_text("import builtins\nbuiltins.press(1)\n")
    monkeypatch.setenv("CRIA_CACHE", str(tmp_path / "cache"))
    lines = (
        "import builtins",
        "builtins.press = press",
        f"sys.path.insert(0, {str(tmp_path)!r})",
        "from cria_tricks import models",
        "models._cached('model', lambda into: __import__('transformers'))",
    )
    assert run_command(*lines) == (130, NOTHING)
    assert not list(tmp_path.glob("cache/*"))


def test_a_signal_in_a_command_unwinds_it():
    """A half-written folder is removed before the line is written."""
    lines = ("try: press(1)", "finally: print('removed', file=sys.stderr)")
    assert run_command(*lines) == (130, "removed\n" + NOTHING)


def test_a_signal_in_a_function_of_the_import_system_that_loads_nothing_unwinds_the_command():
    """rich imports a loaded module whenever it prints, and Python asks for the parent of its package then."""
    lines = (
        "import rich",
        "def watch(frame, event, argument):",
        "    if frame.f_code.co_name == 'parent':",
        "        sys.setprofile(None)",
        "        press(1)",
        "sys.setprofile(watch)",
        "try: rich.__spec__.parent",
        "finally: print('removed', file=sys.stderr)",
    )
    assert run_command(*lines) == (130, "removed\n" + NOTHING)


def test_an_empty_rank_is_that_of_a_process_alone(monkeypatch):
    monkeypatch.setenv("RANK", "")
    assert run_command("try: press(1)", "finally: press(1)") == (130, NOTHING)


@pytest.mark.parametrize("more", [1, 2])
def test_a_second_signal_ends_it_at_once(more):
    lines = (
        "try: press(1)",
        "finally:",
        f"    try: press({more})",
        "    except KeyboardInterrupt: print('not reached', file=sys.stderr)",
    )
    assert run_command(*lines) == (130, NOTHING)


@pytest.mark.parametrize(
    "lines",
    [
        ("try: press(1)", "except BaseException: raise ImportError('is numpy installed?')"),
        ("try: press(1)", "except BaseException: return 130"),
        ("class Dies:", "    def __del__(self): press(1)", "Dies()", "return 0"),
        ("from cria_tricks.processes import exit as last_words", "last_words.leave(interrupted(), 130)"),
    ],
    ids=["another exception", "typer's exit code", "in a destructor", "while the line is written"],
)
def test_what_libraries_make_of_the_exception_does_not_matter(lines):
    wrapped = ("from cria_tricks.common import interrupts; from cria_tricks.processes import exit as last_words",)
    wrapped += (
        "def interrupted():",
        "    honest = last_words.numbers.is_elected_to_speak",
        "    last_words.numbers.is_elected_to_speak = lambda: press(2) or honest()",
        "    return interrupts.words()",
    )
    assert run_command(*wrapped, *lines) == (130, NOTHING)


def test_the_line_says_what_was_saved_last():
    lines = ("from cria_tricks.common import interrupts", "interrupts.now_saved('step 4 is saved')", "press(1)")
    assert run_command(*lines) == (130, "interrupted; step 4 is saved\n")


@pytest.mark.parametrize("code", [0, 3])
def test_a_signal_after_the_end_changes_nothing(code):
    """While Python takes its objects away; of the libraries' exit functions some wait for threads."""
    assert run_command("atexit.register(press, 2)", f"return {code}") == (code, "")
    late = "class Late:\n    def __del__(self, press=press): press(2)\nsys.late = Late()\n"
    done = run(late + COMMAND.format(body=f"    return {code}"))
    assert (done.returncode, done.stderr) == (code, "")


def test_an_ignored_hangup_stays_ignored():
    """As under nohup."""
    code = "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + COMMAND.format(
        body="    press(2, signal.SIGHUP)\n    print('goes on')"
    )
    done = run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "goes on\n", "")


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


def test_a_terminal_that_goes_away_does_not_stop_the_save(tmp_path):
    """Each word to it is an error from then on (EIO)."""
    before = signal.getsignal(signal.SIGHUP)
    body = (
        "from cria_tricks.common.console import Aside",
        "aside = Aside()",
        "try:",
        "    while True: aside.print('a step')",
        "except KeyboardInterrupt:",
        "    aside.print('saving')",
        "    print('saving', file=sys.stderr, flush=True)",
        f"    open({str(tmp_path / 'saved')!r}, 'w').close()",
        "    raise",
    )
    code = PRESS + COMMAND.format(body="\n".join(f"    {line}" for line in body))

    def own_the_terminal():
        """So that it hears when the terminal goes."""
        hear()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    ours, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
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
    assert process.wait(timeout=600) == 130
    assert (tmp_path / "saved").exists()
    assert signal.getsignal(signal.SIGHUP) == before
