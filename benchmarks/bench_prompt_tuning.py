"""Only vectors before the prompt train: beside full fine-tuning."""

import pytest

BASE = "attention=best precision=best gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "peft=prompt_tuning",
}


@pytest.mark.parametrize("name", CASES)
def test_prompt_tuning(step, name):
    step(name, f"{BASE} {CASES[name]}")
