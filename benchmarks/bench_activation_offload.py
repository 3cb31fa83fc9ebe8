"""Activations that wait in host memory: off and on, with blocks that keep all of theirs, and with checkpointed ones."""

import pytest

BASE = "peft=lora attention=best precision=best chunked_loss=true"
CASES = {
    "off": "",
    "on": "activation_offload=true",
}
CHECKPOINTED = {
    "checkpointed": "",
    "checkpointed_on": "activation_offload=true",
    "checkpointed_overlapped": "activation_offload=overlapped",
}


@pytest.mark.parametrize("name", CASES)
def test_activation_offload(step, name):
    step(name, f"{BASE} {CASES[name]}")


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_activation_offload_of_inputs(step, name):
    against = "off" if name == "checkpointed" else "checkpointed"
    step(name, f"{BASE} gradient_checkpointing=true {CHECKPOINTED[name]}", against)
