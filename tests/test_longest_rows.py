"""The table of the longest rows: its cells are those of today, and each is the longest that fits."""

import pytest

from cria_tricks.hardware.gpus import find_gpu
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import with_settings
from tests.sweeps import sample
from tools import longest

CELLS = [(model, gpu, way) for model in longest.MODELS for gpu in longest.GPUS for way in longest.WAYS]


def on_the_page() -> dict[tuple[str, str, str], str]:
    """Each cell of the page's table."""
    lines = longest.PAGE.read_text(encoding="utf-8").split(longest.BEGIN)[1].split(longest.END)[0].split("\n")
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines if line)
    assert head == ["model", "card", *longest.WAYS]
    return {(row[0], row[1], way): cell for row in rows for way, cell in zip(longest.WAYS, row[2:], strict=True)}


def test_the_page_has_a_cell_for_each_model_card_and_way():
    assert list(on_the_page()) == CELLS


@pytest.mark.parametrize(("model", "gpu", "way"), sample(CELLS, 6))
def test_a_cell_is_that_of_today_and_one_token_more_does_not_fit(model, gpu, way):
    found = longest.cell(model, gpu, longest.WAYS[way])
    assert on_the_page()[model, gpu, way] == found, "run: python -m tools.longest"
    tokens, _, host = found.partition(", host ")
    device = find_gpu(gpu).device
    target = Target(find_shape(model), device)
    recipe = with_settings(longest.qlora(model, device), longest.WAYS[way])
    assert bool(host) == bool(recipe.tricks.activation_offload or recipe.tricks.stream_layers)
    target.resolve(recipe)  # raises if it cannot work there
    most = int(tokens.rstrip("+").replace(",", ""))
    assert target.memory(recipe, most).verdict == "fits"
    longer = "fits" if tokens.endswith("+") else "tight"
    assert target.memory(recipe, most + 1).verdict == longer


@pytest.mark.parametrize("gpu", longest.GPUS)
def test_llama_3_2_1b_trains_on_its_whole_context(gpu):
    """131,072 tokens, on each of these cards, if everything is on."""
    assert on_the_page()["llama-3.2-1b", gpu, "both, fused"].startswith("131,072+")
