"""What a trainer that can be resumed says and restores, on stand-ins for the trainer, so that nothing is trained."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from cria_tricks.common.errors import BadInput, OutOfMemory, Unwritten
from cria_tricks.store.checkpoints import Checkpoint
from cria_tricks.trainer import random_state
from cria_tricks.trainer.resumable import KeepRandomState, ResumableTrainer, loading, position
from cria_tricks.trainer.shared import SharedTrainer


@pytest.fixture(autouse=True)
def own_random_numbers():
    with torch.random.fork_rng(devices=[]):
        yield


def trainer(step: int = 3, moment: str = "forward pass", size: int = 1, rank: int = 0, newest=None, save=None):
    """As much of a trainer as its last words need; ``saved`` is what it did."""
    saved = []
    return SimpleNamespace(
        state=SimpleNamespace(global_step=step),
        moment=moment,
        random_state={"cpu": torch.get_rng_state()},
        world=SimpleNamespace(size=size, rank=rank, draw=rank // 2, tensor=2),
        args=SimpleNamespace(seed=100),
        model=SimpleNamespace(zero_grad=lambda: saved.append("no gradients")),
        checkpoints=SimpleNamespace(folder="FOLDER", newest=lambda: newest),
        _save_checkpoint=save or (lambda model, trial: saved.append(torch.rand(1).item())),
        _saved_after_all=lambda: "LAST WORDS",
        in_backward=None,
        saved=saved,
    )


@pytest.mark.parametrize(
    ("moment", "said"),
    [
        ("forward pass", "out of memory in the forward pass of step 4; LAST WORDS"),
        ("backward pass", "out of memory in the backward pass of step 4; LAST WORDS"),
        ("optimizer step", "out of memory in the optimizer step of step 4; LAST WORDS"),
        ("evaluation", "out of memory in the evaluation after step 3; LAST WORDS"),
    ],
)
@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory."), MemoryError()])
def test_where_memory_ran_out(moment, said, error):
    full = trainer(moment=moment)
    with pytest.raises(OutOfMemory) as caught, ResumableTrainer.rescue(full):
        raise error
    assert str(caught.value) == said
    assert full.saved == ["no gradients"]


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("x")])
def test_another_error_is_left_as_it_is(error):
    with pytest.raises(type(error)) as caught, ResumableTrainer.rescue(trainer()):
        raise error
    assert caught.value is error


def test_after_a_whole_step_its_state_is_saved_with_its_random_numbers():
    full = trainer()
    expected = torch.rand(1).item()
    torch.rand(5)
    assert ResumableTrainer._saved_after_all(full) == "the state after step 3 is in FOLDER"
    assert full.saved == [expected]


@pytest.mark.parametrize(
    "changed",
    [{"moment": "optimizer step"}, {"size": 2}, {"save": Unwritten("x", "full")}, {"save": RuntimeError()},
     {"save": MemoryError()}],
)  # fmt: skip
def test_what_is_not_whole_is_not_saved(changed):
    def save(model, trial):
        raise changed["save"]

    options = {**changed, "save": save} if "save" in changed else changed
    newest = Checkpoint("PLACE", 2, {}, {})
    for there, said in ((newest, "the newest checkpoint is PLACE"), (None, "there was nothing to save yet")):
        full = trainer(newest=there, **options)
        assert ResumableTrainer._saved_after_all(full) == said
        assert full.saved == []
    early = trainer(**({} if "save" in options else options))
    early.random_state = {}
    assert ResumableTrainer._saved_after_all(early) == "there was nothing to save yet"


def test_each_process_takes_its_own_random_numbers_and_a_new_one_gets_some(tmp_path):
    torch.manual_seed(5)
    states = {f"{rank}.cpu": torch.get_rng_state() if rank == 2 else torch.zeros(1) for rank in (1, 2)}
    expected = torch.rand(1)
    save_file(states, tmp_path / "random.safetensors")
    ResumableTrainer._load_own_random_state(trainer(rank=2), tmp_path / "random.safetensors")
    assert torch.rand(1) == expected
    for rank, file, seed in ((4, "random.safetensors", 100 + 2 + 3), (2, "none", 100 + 1 + 3)):
        ResumableTrainer._load_own_random_state(trainer(rank=rank), tmp_path / file)
        assert torch.initial_seed() == seed


def test_a_step_keeps_the_random_numbers_and_the_place_in_the_stream():
    for stream, place in ((SimpleNamespace(state=lambda: {"0": 1}), {"0": 1}), (None, {})):
        kept = SimpleNamespace(stream=stream)
        KeepRandomState(kept).on_step_end(None, None, None)
        assert kept.position == place
        assert torch.equal(kept.random_state["cpu"], torch.get_rng_state())


def test_a_position_is_read_or_refused_in_one_line(tmp_path):
    (tmp_path / "stream.json").write_text(json.dumps({"0": {"epoch": 1}}))
    assert position(Checkpoint(tmp_path, 1, {}, {})) == {"0": {"epoch": 1}}
    (tmp_path / "stream.json").write_text("{")
    with pytest.raises(BadInput) as caught:
        position(Checkpoint(tmp_path, 1, {}, {}))
    assert str(caught.value).startswith(f"--resume: {tmp_path} cannot be loaded: Expecting property name")
    assert str(caught.value).endswith("; start again in a new folder")


def test_too_little_memory_to_load_is_not_called_a_damaged_checkpoint():
    with pytest.raises(torch.OutOfMemoryError), loading("x"):
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("paged", [False, None])
def test_states_that_are_not_paged_stay_where_they_are(paged):
    state = {"state1": object()}
    inner = SimpleNamespace(is_paged=paged, state={object(): state})
    for optimizer in (inner, SimpleNamespace(optimizer=inner), SimpleNamespace(state=inner.state)):
        ResumableTrainer._page_again(SimpleNamespace(optimizer=optimizer))
    assert list(state) == ["state1"]


def test_nobody_counts_the_trainers_flops():
    assert SharedTrainer.floating_point_ops(None, {}) == 0


@pytest.mark.parametrize(("rank", "draw", "tensor", "of"), [(2, 1, 2, 2), (3, 1, 2, 2), (3, 3, 1, 3)])
def test_processes_that_share_a_matrix_go_on_with_the_same_draws(rank, draw, tensor, of, tmp_path):
    """Whatever strategy wrote the states: ranks 2 and 3 of two times two both take those of rank 2."""
    states = [{"cpu": torch.Generator().manual_seed(number).get_state()} for number in range(4)]
    save_file(random_state.by_rank(states), tmp_path / "states")
    stand_in = SimpleNamespace(world=SimpleNamespace(rank=rank, draw=draw, tensor=tensor))
    ResumableTrainer._load_own_random_state(stand_in, tmp_path / "states")
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(of)))
