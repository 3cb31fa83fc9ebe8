"""16-bit products: under autocast, beside fp32.

A CPU without 16-bit units computes them a hundred times slower, so there the rows are short.
"""

import pytest
import torch

BASE = "peft=lora attention=best gradient_checkpointing=true chunked_loss=true"
CASES = {
    "off": "",
    "fp16": "precision=fp16",
    "bf16": "precision=bf16",
}


@pytest.mark.parametrize("name", CASES)
def test_mixed_precision(step, setup, name):
    step(
        name, f"{BASE} {CASES[name]}", tokens=setup.tokens if torch.cuda.is_available() else max(8, setup.tokens // 16)
    )
