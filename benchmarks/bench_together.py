"""The capstone's switches on this device: each alone, each taken away from all, and one after the other.

Alone is over nothing but what a switch needs, and what cannot do without a switch goes with it. The cases are those of
``cria bench`` (``cria_tricks/bench/cases.py``).
"""

import pytest

from cria_tricks.bench import cases
from cria_tricks.hardware import T4, this_device


@pytest.mark.parametrize("name", cases.together(T4))  # a T4 has them all
def test_together(step, name):
    found = cases.together(this_device())
    if name not in found:
        pytest.skip("the capstone does not set this switch on this device")
    step(name, found[name].words, against=found[name].against)
