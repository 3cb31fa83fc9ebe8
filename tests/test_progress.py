"""The panel in a terminal, and the plain lines elsewhere."""

import contextlib
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from cria_tricks.common.progress_bars import new_bar
from cria_tricks.trainer.progress import ShowProgress, curve

SAMPLE = {
    "rss_bytes": 2 * 2**30,
    "cpu_cores": 1.25,
    "cards": [{"memory_bytes": 3 * 2**30, "utilisation": 0.97, "celsius": 71, "watts": 69.5}],
}


def console(**options) -> Console:
    return Console(file=io.StringIO(), width=100, **options)


def train(progress: ShowProgress, losses) -> None:
    """The events of a run."""
    state = SimpleNamespace(max_steps=len(losses), global_step=0)
    progress.on_train_begin(None, state, None)
    progress.on_prediction_step(None, state, None)
    progress.on_evaluate(None, state, None, {"eval_loss": 2.5})
    for state.global_step, loss in enumerate(losses, 1):
        logs = {"loss": loss, "tokens": 200, "step_seconds": 2.0, "skipped": 0, "peak_bytes": 2**20 * state.global_step}
        progress.on_log(None, state, None, logs)


@pytest.mark.parametrize("kind", [{}, {"force_jupyter": True}])
def test_plain_lines_where_there_is_no_terminal(kind):
    progress = ShowProgress(console(**kind), 1)
    with progress.panel:
        train(progress, [3.0, 2.0])
    text = progress.console.file.getvalue() if not kind else None
    assert isinstance(progress.panel, contextlib.nullcontext)
    if text is not None:
        assert text.splitlines() == [
            "step    0  evaluation loss 2.5000",
            "step    1/2  loss 3.000  100 tokens/s",
            "step    2/2  loss 2.000  100 tokens/s",
        ]


def test_the_panel_has_the_numbers_that_are_there():
    progress = ShowProgress(console(force_terminal=True), 1, predicted=4 * 2**20, sample=lambda: SAMPLE)
    train(progress, [3.0, 2.0, 1.0])
    assert progress.numbers() == {
        "loss": "1.000  █▅▁",
        "speed": "100 tokens/s",
        "peak": "3.0 MiB of 4.0 MiB predicted",
        "process": "2.0 GiB  1.2 cores",
        "card 0": "3.0 GiB  97% busy  71 °C  70 W",
    }
    page = console()
    page.print(progress.draw())
    drawn = page.file.getvalue()
    assert "training" in drawn
    assert "3/3" in drawn
    assert all(value in drawn for value in progress.numbers().values())
    assert "step    3/3" not in progress.console.file.getvalue(), "lines are for where nothing is drawn"


def test_a_bar_is_drawn_on_a_terminal_only():
    assert (new_bar(console()).disable, new_bar(console(force_terminal=True)).disable) == (True, False)


def test_the_bars_know_where_a_resumed_run_stands_and_when_an_evaluation_is_over():
    progress = ShowProgress(console(force_terminal=True), 3)
    state = SimpleNamespace(max_steps=10, global_step=4)
    progress.on_train_begin(None, state, None)
    [training] = progress.bar.tasks
    assert (training.total, training.completed, training.fields["note"]) == (10, 4, "")
    for _ in range(2):
        for done in (1, 2):
            progress.on_prediction_step(None, state, None)
            _, evaluating = progress.bar.tasks
            assert (evaluating.total, evaluating.completed) == (3, done)
        progress.on_evaluate(None, state, None, {"eval_loss": 2.5})
        assert progress.bar.tasks == [training]
    progress.on_log(None, state, None, {"eval_loss": 2.5})
    assert progress.numbers() == {}, "nothing of a step"
    logs = {"loss": 1.0, "tokens": 300, "step_seconds": 0.1, "skipped": 1}
    progress.on_log(None, SimpleNamespace(max_steps=10, global_step=5), None, logs)
    assert (training.completed, training.fields["note"]) == (5, "skipped")
    assert progress.peak == 0, "where none was measured"
    assert progress.numbers() == {"loss": "1.000  ▁", "speed": "3,000 tokens/s"}
    progress.on_log(None, SimpleNamespace(max_steps=10, global_step=6), None, logs | {"skipped": 0, "peak_bytes": 1})
    assert (training.fields["note"], progress.numbers()["peak"]) == ("", "1 B")
    progress.on_log(None, SimpleNamespace(max_steps=10, global_step=7), None, logs)
    assert progress.numbers()["peak"] == "1 B", "the largest so far"


def test_a_skipped_step_says_so_in_its_line():
    progress = ShowProgress(console(), 1)
    state = SimpleNamespace(max_steps=1200, global_step=1000)
    progress.on_train_begin(None, state, None)
    logs = {"loss": 1.23456, "tokens": 5000, "step_seconds": 0.5, "skipped": 1}
    progress.on_log(None, state, None, logs)
    assert progress.console.file.getvalue() == "step 1000/1200  loss 1.235  10,000 tokens/s  skipped\n"


def test_the_numbers_of_several_cards_and_of_cards_that_do_not_tell():
    cards = [{"memory_bytes": 2**30, "celsius": None}, {"watts": 0, "utilisation": 0.005}]
    progress = ShowProgress(console(force_terminal=True), 1, sample=lambda: {"cards": cards})
    assert progress.numbers() == {"card 0": "1.0 GiB", "card 1": "0% busy  0 W"}
    page = console()
    page.print(progress.draw())
    assert page.file.getvalue().rstrip("\n").splitlines()[-2:] == [
        "card 0      1.0 GiB     ",
        "card 1      0% busy  0 W",
    ], "names ten letters wide, and two columns of space"


def test_the_curve_shows_the_last_24_losses():
    progress = ShowProgress(console(force_terminal=True), 1)
    train(progress, [100.0, *range(24)])
    assert progress.numbers()["loss"] == "23.000  " + curve([float(n) for n in range(24)])


def test_before_the_first_step_nothing_is_made_up():
    progress = ShowProgress(console(force_terminal=True), 1)
    assert progress.numbers() == {}
    console().print(progress.draw())


def test_ctrl_c_leaves_the_terminal_whole():
    progress = ShowProgress(console(force_terminal=True), 1, sample=lambda: SAMPLE)
    with contextlib.suppress(KeyboardInterrupt), progress.panel:
        train(progress, [3.0])
        raise KeyboardInterrupt
    written = progress.console.file.getvalue()
    assert written.count("\x1b[?25l") == written.count("\x1b[?25h") == 1, "the cursor is back"
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")


def test_a_curve_of_equal_losses_is_flat():
    assert curve([2.0, 2.0]) == "▁▁"
    assert curve([-5.0, -4.0, 2.0, 1.0, 0.0, -1.0, -2.0, -3.0]) == "▁▂█▇▆▅▄▃", "one step a height"
    assert curve([]) == ""
