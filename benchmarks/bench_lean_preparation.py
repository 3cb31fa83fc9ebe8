"""A quantised model prepared without fp32 copies: as peft prepares it, and lean."""

import pytest

BASE = "peft=lora attention=best precision=best gradient_checkpointing=true chunked_loss=true quantization=nf4"
CASES = {
    "off": "",
    "on": "lean_preparation=true",
}


@pytest.mark.parametrize("name", CASES)
def test_lean_preparation(step, name):
    step(name, f"{BASE} {CASES[name]}")
