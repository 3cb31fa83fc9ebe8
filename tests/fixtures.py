"""Fixtures that the tests on a card share with all others: a two-layer Llama, fixed rows, no network."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks the network
# What was measured on this machine must not change what a test says. A file cannot be below a file, so there is none.
os.environ["CRIA_CALIBRATION"] = str(Path(__file__) / "none.json")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A folder with a two-layer Llama: wide enough that bitsandbytes quantises its optimizer states."""
    from tests.helpers import tiny_llama

    return tiny_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture(scope="session")
def rows() -> list[dict[str, list[int]]]:
    """Five rows of ragged lengths with masked prompts; five does not divide by two, three or four."""
    import torch

    draw = torch.Generator().manual_seed(1)
    made = []
    for length, prompt in ((24, 6), (17, 3), (9, 2), (30, 20), (13, 1)):
        ids = torch.randint(3, 512, (length,), generator=draw).tolist()
        made.append({"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]})
    return made
