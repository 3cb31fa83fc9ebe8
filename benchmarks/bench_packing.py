"""Packed rows: documents of the real lengths, in padded batches of four and packed into full rows of four."""

import pytest

from benchmarks.common import real_lengths
from cria_tricks.tricks.packing import best_fit

BASE = "peft=lora attention=best precision=best chunked_loss=true gradient_checkpointing=true train.batch_size=4"
DOCUMENTS = 16
"""Of an optimizer step; fewer of the real lengths would not fill rows together."""


@pytest.mark.parametrize("name", ["off", "on"])
def test_packing(step, setup, name):
    lengths = real_lengths(DOCUMENTS, setup.tokens)
    rows = len(best_fit(lengths, setup.tokens)) if name == "on" else DOCUMENTS
    packing = "packing=true" if name == "on" else ""
    step(name, f"{BASE} {packing} gradient_accumulation={-(-rows // 4)}", lengths=lengths)
