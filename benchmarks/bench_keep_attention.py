"""Attention's output kept in checkpointed blocks: attention run twice, and once."""

import pytest

BASE = "peft=lora attention=sdpa expand_kv=true precision=best chunked_loss=true gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "keep_attention=true",
}


@pytest.mark.parametrize("name", CASES)
def test_keep_attention(step, name):
    step(name, f"{BASE} {CASES[name]}")
