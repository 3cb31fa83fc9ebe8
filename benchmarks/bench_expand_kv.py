"""Key and value heads repeated before attention: full rows without a mask, where a T4 would take the math kernel."""

import pytest

BASE = "peft=lora attention=sdpa precision=best chunked_loss=true gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "expand_kv=true",
}


@pytest.mark.parametrize("name", CASES)
def test_expand_kv(step, name):
    step(name, f"{BASE} {CASES[name]}")
