"""A notebook's functions and classes run in the processes of ``Ranks``, which cannot import the notebook."""

import subprocess
import sys

NOTEBOOK = """
import contextlib, functools, math
import torch
from cria_tricks.course.processes import Ranks

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
    return down

def everything(k, *, more=1):
    with noted() as n:
        return [factorial(k) * more, even(k), n, seen, [math.floor(x * SCALE) for x in (0.5, 1.5)]]

class Net(torch.nn.Linear):
    pass

@torch.no_grad()
def untracked():
    return Net(2, 2)(torch.ones(2)).requires_grad

with Ranks(1) as ranks:
    print(ranks.run(functools.partial(everything, 4, more=2)))
    print(ranks.run(counter(), 3))
    print(ranks.run(lambda: SCALE))
    print(ranks.run(untracked))
    print([type(net) is Net for net in ranks.run(lambda: Net(2, 2))])
"""


def test_functions_and_classes_travel_with_what_they_use():
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True)
    expected = ["[[48, True, 1, [3], [1, 4]]]", "[4]", "[3]", "[False]", "[True]"]
    assert done.stdout.splitlines() == expected, done.stderr
