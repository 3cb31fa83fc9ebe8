"""Norms, gated activation and rotary positions: transformers' modules, and functions that save the least."""

import pytest

BASE = "peft=lora attention=sdpa expand_kv=true precision=best chunked_loss=true"
CASES = {
    "off": "",
    "on": "fused_blocks=true",
    "with_fused_lora": "fused_blocks=true fused_lora=true",
}


@pytest.mark.parametrize("name", CASES)
def test_fused_blocks(step, name):
    step(name, f"{BASE} {CASES[name]}")
