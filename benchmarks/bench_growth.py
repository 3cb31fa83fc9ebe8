"""How bytes and seconds grow with the length of a row, the rows of a micro-batch and the size of the model."""

import pytest
import torch

from benchmarks.common import GROWTH

SHAPES = ("tiny", "smollm2", "qwen2.5-0.5b", "llama-3.2-1b", "qwen2.5-1.5b")
LONGEST_ON_A_CPU = 4
"""Times the length of the session."""


@pytest.mark.parametrize("times", [0.25, 0.5, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("recipe", GROWTH)
def test_length(step, setup, recipe, times):
    if not torch.cuda.is_available() and times > LONGEST_ON_A_CPU:
        pytest.skip("on a CPU up to four times the length")
    tokens = max(8, int(setup.tokens * times))
    step(f"{recipe}-tokens-{tokens}", GROWTH[recipe], against="", tokens=tokens, rounds=3)


@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("recipe", GROWTH)
def test_batch(step, setup, recipe, rows):
    words = f"{GROWTH[recipe]} train.batch_size={rows}"
    step(f"{recipe}-rows-{rows}", words, against="", tokens=setup.tokens // 2, rounds=3)


@pytest.mark.parametrize("shape", SHAPES)
def test_model(step, setup, shape):
    if not torch.cuda.is_available() and SHAPES.index(shape) > 1:
        pytest.skip("on a CPU up to SmolLM2")
    name = f"lean-model-{shape.replace('.', '_')}"
    step(name, GROWTH["lean"], against="", shape=shape, tokens=setup.tokens // 2, rounds=3)
