"""torch.compile, block by block: the same blocks, as they are and as one graph.

On a CPU nobody can watch compiled kernels, so their bytes are not counted there.
"""

import pytest

BASE = "peft=lora attention=best precision=best chunked_loss=true"
CASES = {
    "off": "",
    "on": "compile=true",
}


@pytest.mark.parametrize("name", CASES)
def test_compile(step, name):
    step(name, f"{BASE} {CASES[name]}")
