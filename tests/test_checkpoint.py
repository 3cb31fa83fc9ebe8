"""What a checkpoint restores, and what is said when memory runs out; on stand-ins, so nothing is trained."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from cria_tricks.common.errors import BadInput, OutOfMemory, Unwritten
from cria_tricks.store.checkpoints import Checkpoint
from cria_tricks.trainer import checkpoint, random_state
from cria_tricks.trainer.checkpoint import loading, position
from tests.helpers import prepare, trained_weights


@pytest.fixture(autouse=True)
def own_random_numbers():
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture
def last_words(monkeypatch):
    """Put words in the place of what is saved."""
    monkeypatch.setattr(checkpoint, "_saved_after_all", lambda loop: "LAST WORDS")


def saves(monkeypatch, save=None):
    """Let a checkpoint be noted, or not be written; returns the notes."""
    notes = []
    monkeypatch.setattr(checkpoint, "save", save or (lambda loop: notes.append(torch.rand(1).item())))
    return notes


def running(step: int = 3, moment: str = "forward pass", size: int = 1, rank: int = 0, newest=None):
    """As much of a loop as its last words need; ``said`` is what it did."""
    said = []
    return SimpleNamespace(
        state=SimpleNamespace(global_step=step),
        moment=moment,
        random_state={"cpu": torch.get_rng_state()},
        world=SimpleNamespace(size=size, rank=rank, draw=rank // 2, tensor=2),
        settings=SimpleNamespace(seed=100),
        model=SimpleNamespace(zero_grad=lambda: said.append("no gradients")),
        checkpoints=SimpleNamespace(folder="FOLDER", newest=lambda: newest),
        in_backward=None,
        said=said,
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
def test_where_memory_ran_out(moment, said, error, last_words):
    full = running(moment=moment)
    with pytest.raises(OutOfMemory) as caught, checkpoint.rescue(full):
        raise error
    assert str(caught.value) == said
    assert full.said == ["no gradients"]


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), KeyError("x")])
def test_another_error_is_left_as_it_is(error):
    with pytest.raises(type(error)) as caught, checkpoint.rescue(running()):
        raise error
    assert caught.value is error


def test_after_a_whole_step_its_state_is_saved_with_its_random_numbers(monkeypatch):
    full, saved = running(), saves(monkeypatch)
    expected = torch.rand(1).item()
    torch.rand(5)
    assert checkpoint._saved_after_all(full) == "the state after step 3 is in FOLDER"
    assert saved == [expected]


@pytest.mark.parametrize(
    "changed",
    [{"moment": "optimizer step"}, {"size": 2}, {"save": Unwritten("x", "full")}, {"save": RuntimeError()},
     {"save": MemoryError()}],
)  # fmt: skip
def test_what_is_not_whole_is_not_saved(changed, monkeypatch):
    def fails(loop):
        raise changed["save"]

    saved = saves(monkeypatch, fails if "save" in changed else None)
    options = {name: value for name, value in changed.items() if name != "save"}
    newest = Checkpoint("PLACE", 2, {}, {})
    for there, said in ((newest, "the newest checkpoint is PLACE"), (None, "there was nothing to save yet")):
        assert checkpoint._saved_after_all(running(newest=there, **options)) == said
    early = running(**options)
    early.random_state = {}
    assert checkpoint._saved_after_all(early) == "there was nothing to save yet"
    assert saved == []


def restored(rank: int, draw: int, tensor: int, folder) -> None:
    place = SimpleNamespace(rank=rank, draw=draw, tensor=tensor)
    stand_in = SimpleNamespace(world=place, settings=SimpleNamespace(seed=100), state=SimpleNamespace(global_step=3))
    checkpoint.load_random_state(stand_in, Checkpoint(folder, 3, {}, {}))


def test_each_process_takes_its_own_random_numbers_and_a_new_one_gets_some(tmp_path):
    torch.manual_seed(5)
    save_file({f"{rank}.cpu": torch.get_rng_state() if rank == 2 else torch.zeros(1) for rank in range(3)},
              tmp_path / checkpoint.RANDOM)  # fmt: skip
    expected = torch.rand(1)
    restored(2, 1, 2, tmp_path)
    assert torch.rand(1) == expected
    restored(4, 2, 2, tmp_path)
    assert torch.initial_seed() == 100 + 2 + 3
    save_file({"1.cpu": torch.zeros(1)}, tmp_path / checkpoint.RANDOM)
    with pytest.raises(BadInput, match="cannot be loaded: it holds no random state of the first process; start again"):
        restored(1, 1, 1, tmp_path)


def test_a_position_is_read_or_refused_in_one_line(tmp_path):
    (tmp_path / "stream.json").write_text(json.dumps({"0": {"epoch": 1}}))
    assert position(Checkpoint(tmp_path, 1, {}, {})) == {"0": {"epoch": 1}}
    (tmp_path / "stream.json").write_text("{")
    with pytest.raises(BadInput) as caught:
        position(Checkpoint(tmp_path, 1, {}, {}))
    assert str(caught.value).startswith(f"--resume: {tmp_path} cannot be loaded: Expecting property name")
    assert str(caught.value).endswith("; start again in a new folder")


def test_too_little_memory_to_load_is_not_called_a_damaged_checkpoint():
    with pytest.raises(torch.OutOfMemoryError), loading(Checkpoint("x", 1, {}, {})):
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("paged", [False, None])
def test_states_that_are_not_paged_stay_where_they_are(paged):
    state = {"state1": object()}
    for optimizer in (SimpleNamespace(is_paged=paged, state={1: state}), SimpleNamespace(state={1: state})):
        checkpoint.page_again(optimizer)
    assert list(state) == ["state1"]


@pytest.mark.parametrize(("rank", "draw", "tensor", "of"), [(0, 0, 1, 0), (2, 1, 2, 2), (3, 1, 2, 2), (3, 3, 1, 3)])
def test_processes_that_share_a_matrix_go_on_with_the_same_draws(rank, draw, tensor, of, tmp_path):
    """Whatever strategy wrote the states: ranks 2 and 3 of two times two both take those of rank 2."""
    states = [{"cpu": torch.Generator().manual_seed(number).get_state()} for number in range(4)]
    save_file(random_state.by_rank(states), tmp_path / checkpoint.RANDOM)
    restored(rank, draw, tensor, tmp_path)
    assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(of)))


@pytest.mark.parametrize("missing", ["", "model.embed_tokens.weight"])
def test_whole_weights_are_loaded_or_refused_by_name(missing, tiny_model, tmp_path):
    _, _, loaded = prepare(tiny_model)
    loaded.model.save_pretrained(tmp_path)
    expected = trained_weights(loaded)
    for weight in loaded.model.parameters():
        weight.data.zero_()
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop(missing, None)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if missing:
        with pytest.raises(
            BadInput, match=f"^--resume: {tmp_path} cannot be loaded: it does not hold {missing}; start"
        ):
            checkpoint.load_weights(loaded.model, Checkpoint(tmp_path, 1, {}, {}))
        return
    checkpoint.load_weights(loaded.model, Checkpoint(tmp_path, 1, {}, {}))
    assert all(torch.equal(weight, expected[name]) for name, weight in trained_weights(loaded).items())


def test_a_state_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / checkpoint.STATE).write_text("{")
    with pytest.raises(BadInput, match=f"^--resume: {tmp_path} cannot be loaded: .*; start again in a new folder$"):
        checkpoint.load_state(Checkpoint(tmp_path, 1, {}, {}), 5)
