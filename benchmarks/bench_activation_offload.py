"""Activations that wait in host memory: off and on, with blocks that keep all of theirs."""

import pytest

BASE = "peft=lora attention=best precision=best chunked_loss=true"
CASES = {
    "off": "",
    "on": "activation_offload=true",
}


@pytest.mark.parametrize("name", CASES)
def test_activation_offload(step, name):
    step(name, f"{BASE} {CASES[name]}")
