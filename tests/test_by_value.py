"""A function of a notebook runs in another process, with all that it uses."""

import contextlib
import functools
import math
import subprocess
import sys

import pytest

from cria_tricks.course import by_value

NOTEBOOK = """
import contextlib, functools, math, sys
from cria_tricks.course import by_value

SCALE = 3
seen = []

def factorial(n):
    return 1 if n == 0 else n * factorial(n - 1)

def even(n):
    return n == 0 or odd(n - 1)

def odd(n):
    return n != 0 and even(n - 1)

@contextlib.contextmanager
def noted():
    seen.append(SCALE)
    yield len(seen)

def counter():
    count = 0
    def down(n):
        nonlocal count
        count += 1
        return count if n == 0 else down(n - 1)
    return lambda: (down(3), count)

def everything(k, *, more=1):
    with noted() as n:
        return [factorial(k) * more, even(k), n, seen, [math.floor(x * SCALE) for x in (0.5, 1.5)]]
"""
READER = """
import sys
from cria_tricks.course import by_value
print([function() for function in by_value.loads(sys.stdin.buffer.read())])
"""


def in_another_process(lines: str) -> subprocess.CompletedProcess:
    """What a process that knows nothing of the notebook makes of functions that one has written."""
    write = NOTEBOOK + f"sys.stdout.buffer.write(by_value.dumps({lines}))"
    sent = subprocess.run([sys.executable, "-c", write], capture_output=True)
    if sent.returncode:
        return sent
    return subprocess.run([sys.executable, "-c", READER], input=sent.stdout, capture_output=True)


def test_functions_travel_with_what_they_use():
    done = in_another_process("[functools.partial(everything, 4, more=2), counter(), lambda: SCALE]")
    assert done.stdout.decode() == "[[48, True, 1, [3], [1, 4]], (4, 4), 3]\n", done.stderr.decode()


def test_a_class_of_the_notebook_is_refused_with_the_way_out():
    done = in_another_process("[type('Net', (), {'__module__': '__main__'})]")
    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last == "TypeError: the class Net cannot be sent to another process; define it in the function"


def test_what_can_be_imported_travels_by_its_name():
    assert by_value.loads(by_value.dumps(math.floor)) is math.floor
    assert by_value.loads(by_value.dumps(functools.wraps)) is functools.wraps
    assert b"nullcontext" in by_value.dumps(contextlib.nullcontext)


@pytest.mark.parametrize("value", [3, "words", [1, {"a": (None, 2.5)}], b"bytes", {1, 2}])
def test_values_travel_as_in_every_pickle(value):
    assert by_value.loads(by_value.dumps(value)) == value
