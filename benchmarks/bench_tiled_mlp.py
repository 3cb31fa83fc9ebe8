"""The MLP whole, and in tiles of tokens: with checkpointed blocks, where it is the open block, and without."""

import pytest

BASE = "peft=lora attention=best precision=best chunked_loss=true"
CASES = {
    "off": "",
    "on": "tiled_mlp={tile}",
    "checkpointed_off": "gradient_checkpointing=true",
    "checkpointed_on": "gradient_checkpointing=true tiled_mlp={tile}",
}


@pytest.mark.parametrize("name", CASES)
def test_tiled_mlp(step, setup, name):
    words = CASES[name].format(tile=setup.tokens // 8)  # 256 of 2,048 tokens on a card, and 16 of 128 on a CPU
    step(name, f"{BASE} {words}")
