"""The MLP whole, and in tiles of tokens: with checkpointed blocks, where it is the open block, and without."""

import pytest

BASE = "peft=lora attention=sdpa expand_kv=true precision=best chunked_loss=true"
CASES = {
    "off": "",
    "on": "tiled_mlp=256",
    "checkpointed_off": "gradient_checkpointing=true",
    "checkpointed_on": "gradient_checkpointing=true tiled_mlp=256",
}


@pytest.mark.parametrize("name", CASES)
def test_tiled_mlp(step, name):
    step(name, f"{BASE} {CASES[name]}")
