"""What an exercise takes for right, and what it refuses."""

import numpy
import pytest
import torch

from cria_tricks.course.notebook import equal


@pytest.mark.parametrize("answer", [True, numpy.bool_(True), torch.tensor(True)], ids=["Python", "numpy", "torch"])
def test_a_yes_may_come_from_any_library(answer):
    equal(True)(answer)
    with pytest.raises(AssertionError, match="not True; look again"):
        equal(False, "look again")(answer)


@pytest.mark.parametrize("answer", [1, "yes", torch.tensor(1), None])
def test_a_number_or_a_word_is_no_yes(answer):
    with pytest.raises(TypeError, match="this is a"):
        equal(True)(answer)
