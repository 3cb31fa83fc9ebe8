"""Blocks that compute their activations again: kept and computed again."""

import pytest

BASE = "peft=lora attention=best precision=best chunked_loss=true"
CASES = {
    "off": "",
    "on": "gradient_checkpointing=true",
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_checkpointing(step, name):
    step(name, f"{BASE} {CASES[name]}")
