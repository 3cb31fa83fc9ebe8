"""Launches as an operation-by-operation count of real modules gives them: all that write a tensor, views left out."""

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from cria_tricks.bill import launches, products
from cria_tricks.hardware import T4
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import folds
from cria_tricks.techniques import fused_lora
from tests.hardware import models

LORA = "tricks.peft=lora"
HALF = "tricks.precision=bf16"
LEAN = "tricks.lean_preparation=true"
BLOCKS = "tricks.fused_blocks=true"
FUSED = "tricks.fused_lora=true"
TILED = "tricks.tiled_mlp=5"
SETS = {
    "full": ([], "sdpa"),
    "full, 16-bit products": ([HALF], "sdpa"),
    "full, eager": ([], "eager"),
    "lora": ([LORA], "sdpa"),
    "lora, 16-bit products": ([LORA, HALF], "sdpa"),
    "lora, lean": ([LORA, HALF, LEAN], "sdpa"),
    "lora on two": ([LORA, HALF, "lora.target_modules=q_proj,v_proj"], "sdpa"),
    "lora, fused": ([LORA, FUSED], "sdpa"),
    "lora, lean and fused": ([LORA, HALF, LEAN, FUSED], "sdpa"),
    "lora, fused, checkpointed": ([LORA, HALF, FUSED, "tricks.gradient_checkpointing=true"], "sdpa"),
    "lora, blocks": ([LORA, BLOCKS], "sdpa"),
    "lora, lean, all fused": ([LORA, HALF, LEAN, FUSED, BLOCKS], "sdpa"),
    "lora on two, fused": ([LORA, HALF, LEAN, FUSED, "lora.target_modules=q_proj,v_proj"], "sdpa"),
    "lora, eager": ([LORA, HALF], "eager"),
    "lora, checkpointed": ([LORA, HALF, "tricks.gradient_checkpointing=true"], "sdpa"),
    "lora, tiled": ([LORA, TILED], "sdpa"),
    "lora, lean, tiled, checkpointed": ([LORA, HALF, LEAN, TILED, "tricks.gradient_checkpointing=true"], "sdpa"),
    "lora, fused, tiled": ([LORA, FUSED, TILED], "sdpa"),
    "head": (["tricks.peft=head"], "sdpa"),
}


class Operations(TorchDispatchMode):
    """Counts the operations that write a tensor."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.count += not func.is_view and not name.startswith(("empty", "detach", "_unsafe_view"))
        return func(*args, **(kwargs or {}))


def counted(recipe: Recipe, attention: str) -> tuple[int, int]:
    """Operations of one block, and those around three blocks."""
    found = []
    for layers in (2, 3):
        model, plan = models.model(recipe, attention, num_hidden_layers=layers)
        with Operations() as seen:
            models.loss(model, plan, models.batch(1, 16)).backward()
        found.append(seen.count)
    block = found[1] - found[0]
    return block, found[1] - 3 * block


@pytest.mark.parametrize(("settings", "attention"), SETS.values(), ids=SETS.keys())
def test_a_block_starts_so_many_kernels(settings, attention, monkeypatch):
    monkeypatch.setattr(fused_lora, "_of_adapter", lambda left, right, dtype: left.mT @ right)  # one kernel on a GPU
    recipe = with_settings(Recipe(), [*settings, f"tricks.attention={attention}"])
    step = folds.step_of(recipe, models.shape(), T4, 16)
    block, _ = counted(recipe, attention)
    # A model of it: the backward passes of casts and sums are not counted one by one.
    assert launches.of_blocks(step, products.blocks(step)) / 3 == pytest.approx(block, rel=0.06)


def test_the_rest_of_a_micro_batch_starts_some_fifty():
    for settings in ([], [LORA], [LORA, "tricks.chunked_loss=true"]):
        recipe = with_settings(Recipe(), [*settings, "tricks.attention=sdpa"])
        _, around = counted(recipe, "sdpa")
        assert launches.of_loss(folds.step_of(recipe, models.shape(), T4, 16)) == pytest.approx(around, abs=40)


def test_each_chunk_of_the_loss_and_each_unpacked_matrix_adds_its_own():
    def started(*settings: str, tokens: int = 2048) -> float:
        recipe = with_settings(Recipe(), [LORA, "tricks.attention=sdpa", *settings])
        step = folds.step_of(recipe, models.shape(), T4, tokens)
        return launches.of_blocks(step, products.blocks(step)) + launches.of_loss(step)

    assert started("tricks.chunked_loss=true") - started() == 8 * launches.CHUNK
    assert started("tricks.quantization=nf4") - started() == 3 * 2 * 7 * launches.UNPACK, "forward, and backward again"
    assert started("tricks.compile=true") < 0.6 * started()
