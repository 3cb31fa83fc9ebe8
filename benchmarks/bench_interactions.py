"""Two tricks at a time, where together they are not what each is alone: neither, one, the other, both."""

import pytest
import torch

from benchmarks.common import real_lengths
from cria_tricks.tricks.packing import best_fit

LORA = "peft=lora attention=best precision=best"
PAIRS = {
    "checkpointing_chunked_loss": (LORA, "gradient_checkpointing=true", "chunked_loss=true"),
    "checkpointing_offload": (f"{LORA} chunked_loss=true", "gradient_checkpointing=true", "activation_offload=true"),
}
DOCUMENTS = 16
fours = pytest.mark.parametrize("which", ["neither", "first", "second", "both"])


@fours
@pytest.mark.parametrize("pair", PAIRS)
def test_interactions(step, setup, pair, which):
    if "offload" in pair and not torch.cuda.is_available():
        pytest.skip("on a CPU activations are in host memory already")
    base, first, second = PAIRS[pair]
    words = {"neither": "", "first": first, "second": second, "both": f"{first} {second}"}[which]
    step(
        f"{pair}-{which}",
        f"{base} {words}",
        against="" if which == "neither" else f"{pair}-neither",
        tokens=setup.chunks,
    )


@fours
def test_quantization_and_batch(step, setup, which):
    """Four rows of half the length one after the other, or at once: then a matrix is unpacked once for all of them."""
    words = f"{LORA} chunked_loss=true gradient_checkpointing=true"
    words += " quantization=nf4" if which in ("first", "both") else ""
    words += " train.batch_size=4" if which in ("second", "both") else " gradient_accumulation=4"
    against = "" if which == "neither" else "nf4_batch-neither"
    step(f"nf4_batch-{which}", words, against=against, tokens=setup.tokens // 2)


@fours
def test_packing_and_kernel(step, setup, which):
    """Documents of the real lengths in batches of 4: padded or packed, eager or through torch's kernels."""
    packed, kernel = which in ("first", "both"), which in ("second", "both")
    lengths = real_lengths(DOCUMENTS, setup.tokens)
    rows = len(best_fit(lengths, setup.tokens)) if packed else DOCUMENTS
    words = f"peft=lora precision=best chunked_loss=true gradient_checkpointing=true packing={str(packed).lower()}"
    words += f" attention={'best' if kernel else 'eager'} train.batch_size=4 gradient_accumulation={-(-rows // 4)}"
    step(f"packing_sdpa-{which}", words, against="" if which == "neither" else "packing_sdpa-neither", lengths=lengths)
