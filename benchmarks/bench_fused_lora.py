"""Adapters and the MLP around them: peft's modules, and one hand-written backward pass."""

import pytest

BASE = "peft=lora attention=sdpa expand_kv=true precision=best chunked_loss=true"
CASES = {
    "off": "",
    "on": "fused_lora=true",
    "checkpointed": "gradient_checkpointing=true",
    "checkpointed_on": "gradient_checkpointing=true fused_lora=true",
    "nf4": "quantization=nf4 lean_preparation=true",
    "nf4_on": "quantization=nf4 lean_preparation=true fused_lora=true",
}


AGAINST = {"checkpointed_on": "checkpointed", "nf4_on": "nf4"}


@pytest.mark.parametrize("name", CASES)
def test_fused_lora(step, name):
    step(name, f"{BASE} {CASES[name]}", AGAINST.get(name, "off"))
