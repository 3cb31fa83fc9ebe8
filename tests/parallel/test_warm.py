"""A process that is forked for a test is like one that is started: words, folder, environment, pipes, its own end."""

import os
import signal
import subprocess

import pytest

from tests.warm import Child

WAITS = "import time; print('ready', flush=True); time.sleep(600)"


def test_it_has_its_own_words_folder_environment_and_exit_code(warm, tmp_path):
    code = "import os, sys; print(os.getcwd(), os.environ['OWN'], sys.argv); sys.exit(7)"
    child = Child(("code", code, "a", "b c"), stdout=subprocess.PIPE, env={"OWN": "x"}, cwd=tmp_path)
    assert child.communicate(60) == (f"{tmp_path} x ['-c', 'a', 'b c']\n", "")
    assert child.returncode == child.poll() == 7
    assert "OWN" not in os.environ


def test_its_error_is_told_as_pythons(warm):
    with Child(("code", "1 / 0"), stderr=subprocess.PIPE) as child:
        assert child.communicate(60)[1].endswith("ZeroDivisionError: division by zero\n")
    assert child.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_and_no_other(number, warm):
    children = [Child(("code", WAITS), stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    assert [child.stdout.readline() for child in children] == ["ready\n"] * 2
    children[0].send_signal(number)
    assert children[0].wait(60) == -number
    assert children[1].poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        children[1].wait(0.01)
    children[1].kill()
    assert children[1].wait(60) == -signal.SIGKILL
    for child in children:
        child.stdout.close()
        child.stderr.close()
