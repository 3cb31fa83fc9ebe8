"""Optimizer states in 8 bits: a trained copy of two blocks, its states in 32 bits and in 8."""

import pytest

BASE = "peft=side_network attention=best precision=best gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "optimizer=adamw_8bit",
}


@pytest.mark.parametrize("name", CASES)
def test_adamw_8bit(step, name):
    step(name, f"{BASE} {CASES[name]}")
