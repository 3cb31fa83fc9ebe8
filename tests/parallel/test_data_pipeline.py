"""Data x pipeline: two pipelines of two stages give one process's gradients and losses, for one sum a step."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from cria_tricks.bill.calls import totals
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel.data_pipeline import bubble, partners, place, traffic
from cria_tricks.parallel.pipeline import one_forward_one_backward
from cria_tricks.parallel.timetable import idle_share, timetable
from cria_tricks.recipe import Recipe, with_settings
from tests.helpers import difference, train
from tests.parallel.pipelines import (
    GRADIENT,
    LORA,
    LOSS,
    WEIGHTS,
    T,
    alone,
    bytes_of_a_step,
    gradients_of,
    make_four_blocks,
    ragged,
    same_run,
    stage_of,
    tokens_of,
    trained,
    windows,
)


@pytest.fixture(scope="module")
def four_blocks(tmp_path_factory) -> Path:
    return make_four_blocks(tmp_path_factory.mktemp("four-blocks"))


def gradients(folder: Path, many: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """This pipeline's own, and their sum over the grid."""
    _, stage = stage_of(folder, data=2)
    [window] = windows(ragged(many), 1, 4, stage.world.data_rank, 2)
    own: dict[str, torch.Tensor] = {}
    add_up_pipelines = stage._add_up_pipelines
    stage._add_up_pipelines = lambda loss: own.update(gradients_of(stage.part.model)) or add_up_pipelines(loss)
    stage.step(window, tokens_of(ragged(many)))
    return own, gradients_of(stage.part.model)


@pytest.mark.parametrize("many", [4, 3], ids=["whole window", "partial window"])
def test_math(many, four_blocks, four):
    """The sum is one process's gradient, the same bits in both pipelines; neither pipeline's own is."""
    found, expected = four.run(gradients, four_blocks, many), alone(four_blocks, many)
    assert found[0][1].keys() | found[1][1].keys() == expected.keys()
    for stage in (0, 1):
        (own, summed), (other, again) = found[stage], found[stage + 2]
        for name, gradient in summed.items():
            assert torch.equal(gradient, again[name])
            assert torch.equal(gradient, own[name] + other[name])
            assert difference(gradient, expected[name]) < GRADIENT
            assert difference(own[name], expected[name]) > 0.1


def grid() -> tuple[tuple[int, int], list[int], tuple[int, ...], list[int]]:
    """Where a process stands and with whom, by the reference and by torch."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
    coordinate, group = mesh.get_coordinate(), mesh["data"].get_group()
    return (
        place(dist.get_rank(), 2),
        partners(dist.get_rank(), 2, 4),
        tuple(coordinate),
        dist.get_process_group_ranks(group),
    )


def test_math_grid(four):
    for stands, equals, coordinate, group in four.run(grid):
        assert (stands, equals) == (coordinate, group)


def sent(folder: Path, *settings: str) -> dict[str, int]:
    _, stage = stage_of(folder, *settings, data=2)
    return bytes_of_a_step(stage, list(windows(ragged(8), 2, 4, stage.world.data_rank, 2)) * 2)


def test_mechanism(four_blocks, four):
    """Each pipeline sends half of a step's hidden states; its gradients go around once."""
    settings = ("train.batch_size=2",)
    recipe, shape = with_settings(Recipe(), [*LORA, *settings]), find_shape(str(four_blocks))
    for rank, counted in enumerate(four.run(sent, four_blocks, *settings)):
        assert counted == totals(traffic(recipe, shape, 4, 2, stage=place(rank, 2)[1], tokens=T))
        assert counted["send"] == 2 * 2 * T * 64 * 4


def test_mechanism_bubble():
    """Of four processes two pipelines of two stages idle less than one of four: n - N slots, not n - 1."""
    for data in (1, 2):
        stages, k = 4 // data, 8 // data
        slots = timetable([one_forward_one_backward(stage, stages, k) for stage in range(stages)])
        assert bubble(4, data, 8) == pytest.approx(idle_share(slots))
        assert bubble(4, data, 8) / (1 - bubble(4, data, 8)) == pytest.approx((4 - data) / 8)


def test_switch(four_blocks, four, tmp_path):
    """One process and two pipelines of two stages: the same 20 steps."""
    settings = ("train.max_steps=20", "train.eval_steps=5")
    run, loaded = train(four_blocks, ragged(), tmp_path, *LORA, *settings, eval_rows=ragged(5))
    found: list[Any] = four.run(_trained, four_blocks, *settings)
    same_run(found[0][0], run.history, LOSS["fp32"])
    expected = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
    for first, second in ((0, 2), (1, 3)):
        for name, weight in found[first][1].items():
            assert torch.equal(weight, found[second][1][name]), "equal stages have learnt the same"
            assert difference(weight, expected.pop(name)) < WEIGHTS["fp32"]
    assert not expected


def _trained(folder: Path, *settings: str) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    return trained(folder, *settings, data=2)
