"""Low-rank adapters: and two of their family, beside full fine-tuning."""

import pytest

BASE = "attention=best precision=best gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "peft=lora",
    "rslora": "peft=lora lora.rslora=true",
    "dora": "peft=lora lora.dora=true",
}


@pytest.mark.parametrize("name", CASES)
def test_lora(step, name):
    step(name, f"{BASE} {CASES[name]}", against="off" if name == "on" else "on")
