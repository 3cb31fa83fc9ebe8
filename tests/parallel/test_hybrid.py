"""Data x tensor x pipeline: a smaller cube of four processes than the eight of the lesson."""

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from cria_tricks.bill.calls import totals
from cria_tricks.common.errors import BadInput
from cria_tricks.course.hybrid_demo import TINY, alone, over_the_cube, planned, random_rows
from cria_tricks.measure.counting import CountCollectives
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel.hybrid import AXES, lines, traffic
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.trainer import loop
from cria_tricks.trainer.pipeline_stage import Stage
from tests.parallel.pipelines import make_four_blocks

SIZES = {"data": 1, "stage": 2, "tensor": 2}
T = 24
# A cube of 1 x 2 x 2 against one process, torch 2.13 on one thread of an AMD EPYC (2026-11-22), in fp32.
LOSS = 5e-6  # of 20 steps, losses near 6: noise 9.5e-7
NORM = 1e-5  # relative: noise 1.1e-6


@pytest.fixture(scope="module")
def four_blocks(tmp_path_factory) -> Path:
    return make_four_blocks(tmp_path_factory.mktemp("four-blocks"))


def recipe_of(*settings: str) -> Recipe:
    return with_settings(Recipe(), [*TINY, f"data.max_length={T}", *settings])


def found(*settings: str) -> list[dict[str, Any]]:
    return over_the_cube(recipe_of(*settings), random_rows(longest=T), SIZES).training


def test_math(four_blocks, four):
    """Losses and norms of 20 steps, every third of which has a partial window, are those of one process."""
    settings = (f"model={four_blocks}", "train.max_steps=20")
    expected = alone(recipe_of(*settings), random_rows(longest=T)).training
    for ours in four.run(found, *settings):
        assert [entry["loss"] for entry in ours] == pytest.approx([entry["loss"] for entry in expected], abs=LOSS)
        assert [entry["grad_norm"] for entry in ours] == pytest.approx(
            [entry["grad_norm"] for entry in expected], rel=NORM
        )
        assert [entry["trained_tokens"] for entry in ours] == [entry["trained_tokens"] for entry in expected]


def standing(sizes: dict[str, int]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    mesh = dist.device_mesh.init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return lines(dist.get_rank(), sizes), {axis: dist.get_process_group_ranks(mesh[axis].get_group()) for axis in sizes}


@pytest.mark.parametrize("cube", [(1, 2, 2), (2, 1, 2), (2, 2, 1), (1, 4, 1)], ids=str)
def test_math_lines(cube, four):
    """With whom a process shares what, by hand and by torch."""
    for by_hand, by_torch in four.run(standing, dict(zip(AXES, cube, strict=True))):
        assert by_hand == by_torch


def sent(*settings: str) -> dict[str, int]:
    """The last step of two: passes and clipping."""
    counts: list[CountCollectives] = []
    passes, clip = Stage.step, loop.clip

    def counted(function):
        def call(*arguments):
            with counts[-1]:
                return function(*arguments)

        return call

    def first(*arguments):
        counts.append(CountCollectives())
        return counted(passes)(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "step", first)
        patch.setattr(loop, "clip", counted(clip))
        over_the_cube(recipe_of(*settings), random_rows(longest=T), SIZES)
    return dict(counts[-1].bytes)


def longest(rows: list[dict[str, list[int]]]) -> int:
    return max(len(row["input_ids"]) for row in rows)


@pytest.mark.parametrize(
    "settings",
    [(), ("tricks.gradient_checkpointing=true",), ("tricks.gradient_checkpointing=1",)],
    ids=["plain", "checkpointed", "the first block"],
)
def test_mechanism(settings, four_blocks, four):
    """Along each axis a process sends what that axis' formula says."""
    recipe, shape = recipe_of(*settings), find_shape(str(four_blocks))
    for rank, counted in enumerate(four.run(sent, f"model={four_blocks}", "train.max_steps=2", *settings)):
        stage = rank // SIZES["tensor"]
        assert counted == totals(traffic(recipe, shape, SIZES, stage, tokens=longest(random_rows(longest=T))))


@pytest.mark.parametrize(
    ("sizes", "settings", "size", "said"),
    [
        ((2, 2, 2), (), 4, "4 processes for a cube of 2 .data. x 2 .stage. x 2 .tensor.: start 8"),
        ((2, 1, 1), (), 2, "two or more"),
        ((2, 4, 1), (), 8, "set tricks.gradient_accumulation=8"),
        ((1, 2, 2), ("tricks.quantization=nf4",), 4, "packed bytes cannot be cut"),
        ((1, 2, 2), ("tricks.peft=none",), 4, "pipeline with tricks.peft=none"),
    ],
)
def test_switch(sizes, settings, size, said):
    """What an axis cannot do, the cube cannot."""
    with pytest.raises(BadInput, match=said) as error:
        planned(recipe_of(*settings), size, dict(zip(AXES, sizes, strict=True)))
    assert "\n" not in str(error.value)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(BadInput, match="over 4 processes: random:tiny has 2 heads of keys and values, which 4"):
        planned(recipe_of(), 8, {"data": 1, "stage": 2, "tensor": 4})
