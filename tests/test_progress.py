"""The panel in a terminal, and the plain lines elsewhere."""

import contextlib
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from cria_tricks.progress import ShowProgress, curve

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
    assert curve([]) == ""
