"""Optimizer states in pages that may leave the card: kept on the card and paged.

What is paged is in managed memory, which CUDA's allocator does not see, and so no figure of it here.
"""

import pytest

BASE = "peft=side_network attention=best precision=best gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "paged_optimizer=true",
}


@pytest.mark.parametrize("name", CASES)
def test_paged_optimizer(step, name):
    step(name, f"{BASE} {CASES[name]}")
