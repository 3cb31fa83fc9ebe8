"""A trained copy beside the last blocks: beside full fine-tuning."""

import pytest

BASE = "attention=best precision=best gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "peft=side_network",
}


@pytest.mark.parametrize("name", CASES)
def test_side_network(step, name):
    step(name, f"{BASE} {CASES[name]}")
