"""Four rows of an optimizer step, of half the length: at once, in two micro-batches, in four."""

import pytest

BASE = "peft=lora attention=best precision=best chunked_loss=true"
CASES = {
    "off": "train.batch_size=4",
    "half": "train.batch_size=2 gradient_accumulation=2",
    "on": "train.batch_size=1 gradient_accumulation=4",
}


@pytest.mark.parametrize("name", CASES)
def test_gradient_accumulation(step, setup, name):
    step(name, f"{BASE} {CASES[name]}", tokens=setup.tokens // 2)
