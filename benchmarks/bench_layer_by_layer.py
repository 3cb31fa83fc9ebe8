"""Streamed blocks with accumulation: fetched for each micro-batch, and once for all of a window."""

import pytest

BASE = "peft=lora attention=sdpa expand_kv=true precision=best chunked_loss=true gradient_checkpointing=true"
CASES = {"off": "stream_layers=true gradient_accumulation=4", "on": "layer_by_layer=true"}


@pytest.mark.parametrize("name", CASES)
def test_layer_by_layer(step, name):
    more = "" if name == "off" else f"{CASES['off']} "
    step(name, f"{BASE} {more}{CASES[name]}")
