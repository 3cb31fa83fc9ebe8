"""Every model on every card is planned without an error, and what a model needs for that is said."""

from dataclasses import replace

import pytest

import cria_tricks
from cria_tricks import recipes
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.gpus import GPUS, find_gpu
from cria_tricks.models.catalogue import CATALOGUE
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import plan_data
from cria_tricks.predict.model_settings import needed, warning
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import with_settings
from tests.sweeps import sample

CARDS = (*GPUS, "8GiB", "8GiB:7.5", "24GiB:12.0")


@pytest.mark.parametrize("recipe", ["kwanzaa", "baseline"])
@pytest.mark.parametrize("model", sample(CATALOGUE, 8))
def test_every_model_is_planned_on_every_card(model, recipe):
    shape = find_shape(model)
    for name in sample(CARDS, 20):
        gpu = find_gpu(name)
        wanted = with_settings(recipes.get(recipe, gpu.device), [f"model={model}"])
        wanted = with_settings(wanted, needed(wanted, shape))
        if gpu.count > 1:  # each process needs a micro-batch of its own
            wanted = with_settings(wanted, ["parallel.strategy=ddp", "tricks.gradient_accumulation=8"])
        found = plan_data.bill(Target(shape, gpu.device, gpu.count), wanted)
        assert found.peak_bytes == sum(line.bytes for line in found.lines) > shape.weights // 4, name
        assert (found.seconds_per_step is None) is (gpu.card is None), name


@pytest.mark.parametrize("name", [*CARDS, "10.5GiB:7.5", "10.5GiB:8.0", "6GiB:7.5"])
def test_the_kwanzaa_recipe_fits_every_card_with_a_margin(name):
    """With room for it a card saves no memory, and with less it does: 10.5 GiB is the border."""
    gpu = find_gpu(name)
    recipe = recipes.kwanzaa(gpu.device)
    found = plan_data.bill(Target(find_shape(recipe.model), gpu.device), recipe)
    assert found.verdict == "fits"
    assert (
        recipe.tricks.gradient_checkpointing is recipe.tricks.chunked_loss is (gpu.device.memory_bytes < recipes.ROOM)
    )


@pytest.mark.parametrize(
    ("model", "gpu", "added"),
    [
        ("phi-4-mini", "8GiB", "--set lora.target_modules=qkv_proj,o_proj,gate_up_proj,down_proj"),
        ("granite-3.1-2b", "8GiB", "--set tricks.chunked_loss=false"),
        ("mixtral-8x7b", "h100", "--set lora.target_modules=q_proj,k_proj,v_proj,o_proj"),
        ("qwen3-4b", "rtx3060", ""),
    ],
)
def test_the_whole_answer_says_which_settings_a_model_needs(model, gpu, added):
    found = cria_tricks.plan("kwanzaa", model=model, gpu=gpu, rows_full=True)
    [said] = [one for one in found.warnings if "needs other settings" in one] or [""]
    assert added in said
    assert bool(said) is bool(added)
    assert str(found)
    assert (found.seconds_per_step is None) is (gpu == "8GiB")


def test_settings_of_the_user_are_not_changed():
    recipe = recipes.capstone(GPUS["t4"].device)
    granite = find_shape("granite-3.1-2b")
    assert needed(recipe, granite) == ["tricks.chunked_loss=false"]
    assert needed(recipe, granite, ["chunked_loss=true"]) == needed(recipe, granite, ["tricks.chunked_loss=true"]) == []
    own = with_settings(recipe, ["lora.target_modules=o_proj"])
    assert needed(own, find_shape("phi-4-mini")) == []
    assert warning("any", []) == []
    with pytest.raises(BadInput, match="set tricks.chunked_loss=false"):
        cria_tricks.plan("kwanzaa", model="granite-3.1-2b", settings=["tricks.chunked_loss=true"])


def test_several_cards_are_as_many_processes():
    two = cria_tricks.plan("kwanzaa", gpu="t4x2", rows_full=True)
    assert (two.processes, two.strategy, two.gpu) == (2, "ddp", "Tesla T4")
    alike = cria_tricks.plan("kwanzaa", gpu="t4", nproc=2, rows_full=True)
    assert replace(two, host=None) == replace(alike, host=None)
    assert (two.host.name, alike.host.name) == ("Kaggle's machine", "Colab's free machine")
    with pytest.raises(BadInput, match="--gpu t4x2 with --nproc 4: it has 2 cards; leave --nproc out"):
        cria_tricks.plan("kwanzaa", gpu="t4x2", nproc=4)


def test_a_card_of_eight_gib_fits_what_has_eight_gib():
    answer = cria_tricks.plan("kwanzaa", model="llama-3.2-3b", gpu="8GiB:8.6", rows_full=True)
    assert (answer.capacity_bytes, answer.fits) == (8 * 2**30, True)
    assert cria_tricks.estimate("kwanzaa", gpu="8GiB:8.6").fits


def test_a_card_too_old_for_8_bit_products_is_refused():
    with pytest.raises(BadInput, match=r"needs compute capability 7.5 for it, and Tesla P100-PCIE-16GB has 6.0"):
        cria_tricks.plan("kwanzaa", gpu="p100", settings=["tricks.quantization=int8"])
    assert cria_tricks.plan("kwanzaa", gpu="t4", settings=["tricks.quantization=int8"], rows_full=True).fits
