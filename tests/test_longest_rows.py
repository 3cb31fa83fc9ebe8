"""The table of the longest rows: its cells are those of today, and each is the longest that fits."""

import re

import pytest

from cria_tricks.hardware.gpus import find_gpu
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import with_settings
from cria_tricks.switches import folds
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


def test_what_a_token_adds_is_the_difference_of_two_bills():
    """In KiB: the block inputs that are on the card, and what is in the open block."""
    page = longest.PAGE.read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| (\d+) \|$", page, re.M)
    assert [way for way, _, _ in rows] == list(longest.WAYS)[:5]
    device, shape = find_gpu("t4").device, find_shape("llama-3.1-8b")
    for way, inputs, opened in rows:
        recipe = with_settings(longest.qlora("llama-3.1-8b", device), longest.WAYS[way])
        few, many = (folds.estimate(recipe, shape, device, tokens).peak for tokens in (32_768, 65_536))
        grown = {line.name: line.bytes for line in many.lines}
        for line in few.lines:
            grown[line.name] -= line.bytes
        waiting = grown["saved activations"] * (not recipe.tricks.activation_offload)
        activations = sum(size for name, size in grown.items() if name.startswith(("saved", "open")))
        assert [waiting // 2**25, (activations - waiting) // 2**25] == [int(inputs), int(opened)]


@pytest.mark.parametrize("gpu", longest.GPUS)
def test_llama_3_2_1b_trains_on_its_whole_context(gpu):
    """131,072 tokens, on each of these cards, if everything is on."""
    assert on_the_page()["llama-3.2-1b", gpu, "both, fused"].startswith("131,072+")
