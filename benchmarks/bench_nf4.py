"""The frozen matrices in 4 bits: NF4, its scales quantised again, and FP4."""

import pytest

BASE = "peft=lora attention=best precision=best gradient_checkpointing=true chunked_loss=true"
CASES = {
    "off": "",
    "on": "quantization=nf4",
    "double": "quantization=nf4 double_quantization=true",
    "fp4": "quantization=fp4",
}


@pytest.mark.parametrize("name", CASES)
def test_nf4(step, name):
    step(name, f"{BASE} {CASES[name]}", against="on" if name == "double" else "off")
