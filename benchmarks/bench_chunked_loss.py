"""Logits a chunk at a time, trained tokens only: the same loss, all logits at once and 256 tokens at a time."""

import pytest

BASE = "peft=lora attention=best precision=best gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "chunked_loss=true",
}


@pytest.mark.parametrize("name", CASES)
def test_chunked_loss(step, setup, name):
    step(name, f"{BASE} {CASES[name]}", tokens=setup.chunks)
