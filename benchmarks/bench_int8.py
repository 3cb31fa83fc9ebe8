"""The frozen matrices in 8 bits: beside 16 or 32 as they were loaded."""

import pytest

BASE = "peft=lora attention=best precision=best gradient_checkpointing=true chunked_loss=true"
CASES = {
    "off": "",
    "on": "quantization=int8",
}


@pytest.mark.parametrize("name", CASES)
def test_int8(step, name):
    step(name, f"{BASE} {CASES[name]}")
