"""Only the head trains: beside full fine-tuning."""

import pytest

BASE = "attention=best precision=best gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "peft=head",
}


@pytest.mark.parametrize("name", CASES)
def test_head_only(step, name):
    step(name, f"{BASE} {CASES[name]}")
