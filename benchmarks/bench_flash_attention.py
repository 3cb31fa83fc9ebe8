"""Attention without the score matrix: eager, torch's kernels, and the package flash-attn where it runs."""

import pytest

BASE = "peft=lora precision=best chunked_loss=true gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "attention=sdpa",
    "flash_attention_2": "attention=flash_attention_2",
}


@pytest.mark.parametrize("name", CASES)
def test_flash_attention(step, name):
    step(name, f"{BASE} {CASES[name]}")
