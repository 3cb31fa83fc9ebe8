"""How processes join, agree and end together."""

import os
import re
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest

from cria_tricks.cli import main
from cria_tricks.common.errors import BadInput, Lost
from cria_tricks.course.processes import Ranks
from cria_tricks.processes import numbers, world
from cria_tricks.processes.world import World
from cria_tricks.trainer.stops import StopOnSignal


def test_alone_nothing_is_exchanged():
    import torch

    alone = World()
    assert (alone.is_main, alone.tensor, alone.data_rank) == (True, 1, 0)
    assert alone.sum(torch.ones(2)).tolist() == [1, 1]
    assert alone.max_over_ranks(1, 2.5) == [1, 2.5]
    assert alone.on_rank_zero(lambda: 3) == 3
    assert alone.gather("a") == ["a"]
    with world.joined(timeout=1):
        assert numbers.processes() == 1


def agreed() -> dict:
    """What a process of a grid of 2 x 2 sees."""
    import torch

    here = World.of(2, "cpu")
    return {
        "place": (here.rank, here.data_rank, here.tensor),
        "sum": here.sum(torch.tensor([here.rank])).item(),
        "highest": here.max_over_ranks(here.rank, -here.rank),
        "first": here.on_rank_zero(lambda: f"from {here.rank}"),
        "gathered": here.gather(here.rank * 10),
        "hidden": [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ],
    }


def test_a_grid_of_four(four):
    found = four.run(agreed)
    assert [process["place"] for process in found] == [(0, 0, 2), (1, 0, 2), (2, 1, 2), (3, 1, 2)]
    assert [process["sum"] for process in found] == [2, 4, 2, 4]  # over 0 and 2, and over 1 and 3
    assert all(process["highest"] == [3, 0] for process in found)
    assert all(process["first"] == "from 0" for process in found)
    assert [process["gathered"] for process in found] == [[0, 10, 20, 30], [], [], []]
    assert not any(process["hidden"] for process in found)  # every library takes its process for one alone


def refused() -> str:
    here = World.of(2, "cpu")

    def refuse() -> None:
        raise BadInput(f"said by {here.rank}")

    try:
        here.on_rank_zero(refuse)
    except BadInput as error:
        return str(error)
    return "nothing was raised"


def test_what_the_first_process_refuses_all_refuse(two):
    assert two.run(refused) == ["said by 0"] * 2


def left_alone(file: Path) -> None:
    import torch
    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(1)
    try:
        with world.in_one_line():
            dist.all_reduce(torch.ones(1))
    except Lost as error:
        file.write_text(str(error))


def test_a_process_whose_neighbour_dies_says_so_in_one_line(tmp_path):
    with Ranks(2) as pool, pytest.raises(RuntimeError, match="process 1: it has ended"):
        pool.run(left_alone, tmp_path / "said")
    assert (tmp_path / "said").read_text() == "another process of this run died or stopped answering"


@pytest.fixture
def handlers():
    """Whatever a test does to them."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_launchers_signal_does_not_cut_off_the_last_words(handlers, monkeypatch, capsys):
    """It ends the others as soon as one has died: in the middle of what they have to say."""

    def asked() -> bool:
        signal.raise_signal(signal.SIGTERM)
        return True

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    monkeypatch.setattr(numbers, "processes", lambda: 2)
    monkeypatch.setattr(numbers, "is_elected_to_speak", asked)
    monkeypatch.setattr(os, "_exit", sys.exit)
    with pytest.raises(SystemExit, match="1"):
        main.leave("error: another died", 1)
    assert capsys.readouterr().err == "error: another died\n"


def test_a_hangup_asks_for_the_save_and_an_ignored_one_stays_ignored(handlers):
    stop = StopOnSignal(World())
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with stop:
        signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_DFL, "a second one ends the run at once"
    assert stop.requested
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = StopOnSignal(World())
    with stop:
        signal.raise_signal(signal.SIGHUP)
    assert not stop.requested


@pytest.mark.parametrize(("size", "said"), [(1, "Ctrl-C again stops at once"), (2, "Ctrl-C after 10 s stops at once")])
def test_a_first_signal_says_what_a_second_one_does(handlers, capfd, size, said):
    stop = StopOnSignal(World(size=size))
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with stop:
        signal.raise_signal(signal.SIGTERM)
        at_once = signal.getsignal(signal.SIGTERM) == signal.SIG_IGN  # the handler from before is back
    assert at_once == (size == 1)
    assert capfd.readouterr().err == f"\nstopping after this step, to save it; {said}\n"


@pytest.mark.parametrize("size", [1, 2])
def test_nor_does_it_on_the_way_there(handlers, size):
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with pytest.raises(Lost), StopOnSignal(World(size=size)):
        raise Lost("another died")
    assert signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if size == 2 else signal.default_int_handler)


def test_a_run_with_checkpoints_says_how_it_goes_on(monkeypatch):
    assert numbers.go_on() == "what was saved is whole: go on with --resume"
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    assert numbers.go_on() == "what was saved is whole: all are started again and go on from there"


def heard() -> str:
    import torch
    import torch.distributed as dist

    group = dist.new_group([0, 1])
    if dist.get_rank() == 0:
        try:
            with world.in_one_line():
                dist.monitored_barrier(group, timeout=timedelta(seconds=0.5))
        except Lost as error:
            return str(error)
    torch.zeros(1)
    return "it went on"


def test_one_that_does_not_answer_is_not_waited_for_for_ever(two):
    assert two.run(heard)[0] == "another process of this run died or stopped answering"


@pytest.mark.parametrize(
    ("visible", "number", "seen"),
    [(None, "1", "1"), ("4,5", "1", "5"), ("0", "0", "0"), ("", "1", ""), ("7", "1", "7")],
)
def test_a_process_sees_the_card_that_is_its_own(monkeypatch, visible, number, seen):
    monkeypatch.setenv("LOCAL_RANK", number)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    numbers.see_one_card()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen


@pytest.mark.parametrize("said", ["", "abc", "-1"])
def test_a_number_that_is_none_is_one_line(said):
    command = [sys.executable, "-m", "cria_tricks", *(["train", "smok"] if said else ["--version"])]
    environment = os.environ | {"RANK": said, "WORLD_SIZE": said}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if said:
        assert done.returncode == 2
        assert re.fullmatch(rf"error: \w+={said}: must be a whole number.*; unset it\n", done.stderr)
    else:
        assert (done.returncode, done.stderr) == (0, "")


def test_without_a_launcher_nothing_is_changed(monkeypatch):
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    numbers.see_one_card()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
