"""Blocks resident, and streamed from the host: in 16 bits, where the link may be the wall, and in NF4."""

import pytest

BASE = "peft=lora attention=sdpa expand_kv=true precision=best chunked_loss=true gradient_checkpointing=true"
CASES = {
    "off": "",
    "on": "stream_layers=true",
    "file": "stream_layers=file",
    "nf4_off": "quantization=nf4",
    "nf4_on": "quantization=nf4 stream_layers=true",
}


@pytest.mark.parametrize("name", CASES)
def test_stream_layers(step, name):
    step(name, f"{BASE} {CASES[name]}")
