"""Techniques together: the capstone's switches, pairs of techniques, and how bytes and seconds grow with sizes."""

import pytest
import torch

from benchmarks.common import GROWTH, real_lengths
from cria_tricks.bench import cases
from cria_tricks.hardware import T4, this_device
from cria_tricks.techniques.packing import best_fit

LORA = "peft=lora attention=best precision=best"
PAIRS = {
    "checkpointing_chunked_loss": (LORA, "gradient_checkpointing=true", "chunked_loss=true"),
    "checkpointing_offload": (f"{LORA} chunked_loss=true", "gradient_checkpointing=true", "activation_offload=true"),
}
"""Two techniques that together are not what each is alone: their base, one, the other."""
DOCUMENTS = 16
SHAPES = ("tiny", "smollm2", "qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-1.5b")
LONGEST_ON_A_CPU = 4
"""Times the length of the session."""
fours = pytest.mark.parametrize("which", ["neither", "first", "second", "both"])


@pytest.mark.parametrize("name", cases.together(T4))  # a T4 has them all
def test_together(step, name):
    """The capstone's switches: one after the other, alone over what each needs, and each taken away from all."""
    found = cases.together(this_device())
    if name not in found:
        pytest.skip("the capstone does not set this switch on this device")
    step("together", name, found[name].words, against=found[name].against)


def interaction(step, pair, which, words, **changes):
    """Measure one of the four cases of a pair."""
    against = "" if which == "neither" else f"{pair}-neither"
    step("interactions", f"{pair}-{which}", words, against=against, **changes)


@fours
@pytest.mark.parametrize("pair", PAIRS)
def test_interactions(step, setup, pair, which):
    if "offload" in pair and not torch.cuda.is_available():
        pytest.skip("on a CPU activations are in host memory already")
    base, first, second = PAIRS[pair]
    words = {"neither": "", "first": first, "second": second, "both": f"{first} {second}"}[which]
    interaction(step, pair, which, f"{base} {words}", tokens=setup.chunks)


@fours
def test_interactions_of_quantization_and_batch(step, setup, which):
    """Four rows of half the length one after the other, or at once: then a matrix is unpacked once for all of them."""
    words = f"{LORA} chunked_loss=true gradient_checkpointing=true"
    words += " quantization=nf4" if which in ("first", "both") else ""
    words += " train.batch_size=4" if which in ("second", "both") else " gradient_accumulation=4"
    interaction(step, "nf4_batch", which, words, tokens=setup.tokens // 2)


@fours
def test_interactions_of_packing_and_kernel(step, setup, which):
    """Documents of the real lengths in batches of 4: padded or packed, eager or through torch's kernels."""
    packed, kernel = which in ("first", "both"), which in ("second", "both")
    lengths = real_lengths(DOCUMENTS, setup.tokens)
    rows = len(best_fit(lengths, setup.tokens)) if packed else DOCUMENTS
    words = f"peft=lora precision=best chunked_loss=true gradient_checkpointing=true packing={str(packed).lower()}"
    words += f" attention={'best' if kernel else 'eager'} train.batch_size=4 gradient_accumulation={-(-rows // 4)}"
    interaction(step, "packing_sdpa", which, words, lengths=lengths)


@pytest.mark.parametrize("times", [0.25, 0.5, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("recipe", GROWTH)
def test_growth_with_length(step, setup, recipe, times):
    if not torch.cuda.is_available() and times > LONGEST_ON_A_CPU:
        pytest.skip("on a CPU up to four times the length")
    tokens = max(8, int(setup.tokens * times))
    step("growth", f"{recipe}-tokens-{tokens}", GROWTH[recipe], against="", tokens=tokens, rounds=3)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("recipe", GROWTH)
def test_growth_with_batch(step, setup, recipe, rows):
    words = f"{GROWTH[recipe]} train.batch_size={rows}"
    step("growth", f"{recipe}-rows-{rows}", words, against="", tokens=setup.tokens // 2, rounds=3)


@pytest.mark.parametrize("shape", SHAPES)
def test_growth_with_model(step, setup, shape):
    if not torch.cuda.is_available() and SHAPES.index(shape) > 1:
        pytest.skip("on a CPU up to SmolLM2")
    name = f"lean-model-{shape.replace('.', '_')}"
    step("growth", name, GROWTH["lean"], against="", shape=shape, tokens=setup.tokens // 2, rounds=3)
