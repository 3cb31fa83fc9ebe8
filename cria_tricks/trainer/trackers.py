"""Write the history of a run for TensorBoard and Trackio, into files in the run's folder; nothing is sent.

transformers has callbacks of its own for both. We do not use them, because they leave Trackio's settings at their
defaults. With these, Trackio (0.43) asks the Hugging Face hub for the user's name whenever there is a token, sends
everything to the Space or the server that an environment variable names, and opens a dashboard inside a notebook. Here
it only writes files. To look at a run:

    tensorboard --logdir runs/smoke/tensorboard
    TRACKIO_DIR=runs/smoke/trackio trackio show
"""

import contextlib
import importlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from cria_tricks.recipe import Recipe


@dataclass(frozen=True)
class Writer:
    """How one library takes what a run has to tell.

    Attributes:
        numbers: writes numbers, by their names, for the optimizer step that they belong to.
        text: writes a text under a name, for such a step.
    """

    numbers: Callable[[Mapping[str, float], int], None]
    text: Callable[[str, str, int], None]


class Tracker(TrainerCallback):
    """Write the numbers of every step and every evaluation, with the monitor's newest sample, and the answers.

    Args:
        writer: writes them for TensorBoard or Trackio.
        sample: returns the newest sample.
    """

    def __init__(self, writer: Writer, sample: Callable[[], Mapping[str, Any]]):
        self.writer = writer
        self.sample = sample

    def on_log(self, args, state, control, logs, **kwargs):
        part = "train" if "loss" in logs else "eval"
        step = state.global_step
        numbers = {f"{part}/{key.removeprefix('eval_')}": value for key, value in logs.items() if key != "eval_answers"}
        self.writer.numbers(numbers | flat(self.sample()), step)
        for found in logs.get("eval_answers", ()):
            # Four spaces before each line, because TensorBoard reads Markdown: so the text stands as it is.
            text = "".join(f"    {line}\n" for line in (found["question"], "", *found["answer"].splitlines()))
            self.writer.text(f"answers/row {found['row'] + 1}", text, step)


@contextlib.contextmanager
def trackers(
    recipe: Recipe, folder: Path, step: int, sample: Callable[[], Mapping[str, Any]]
) -> Iterator[list[Tracker]]:
    """Open a tracker for each name in ``train.report_to``. Only the main process calls this.

    Args:
        recipe: of the run; it is written beside the curves.
        folder: of the run.
        step: the step that the run resumes from; 0 for a new run.
        sample: returns the monitor's newest sample.

    Yields:
        The callbacks, for the trainer.
    """
    opened = {"tensorboard": _tensorboard, "trackio": _trackio}
    with contextlib.ExitStack() as stack:
        yield [
            Tracker(stack.enter_context(opened[name](folder / name, recipe, step)), sample)
            for name in recipe.train.report_to
        ]


def flat(sample: Mapping[str, Any]) -> dict[str, float]:
    """Flatten a sample to numbers by name; from the second card on a name ends in the card's number, 1 or more.

    Examples:
        >>> flat({"time": 0.0, "step": 1, "seconds": 1.0, "rss_bytes": 5, "cards": [{"watts": 70.0}]})
        {'monitor/rss_bytes': 5, 'monitor/watts': 70.0}
    """
    row = {key: sample[key] for key in ("rss_bytes", "cpu_cores") if key in sample}
    for number, card in enumerate(sample.get("cards", ())):
        row |= {f"{key}_{number}" if number else key: value for key, value in card.items()}
    return {f"monitor/{key}": value for key, value in row.items()}


@contextlib.contextmanager
def _tensorboard(folder: Path, recipe: Recipe, step: int) -> Iterator[Writer]:
    """Open TensorBoard's event files; after a resume, earlier entries of steps that are done again are hidden."""
    # Imported here, because tensorboard is an optional package.
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(log_dir=str(folder), purge_step=step + 1 if step else None) as writer:
        writer.add_text("recipe", "".join(f"    {line}\n" for line in recipe.to_toml().splitlines()))

        def write(numbers: Mapping[str, float], step: int) -> None:
            for name, value in numbers.items():
                writer.add_scalar(name, value, step)
            writer.flush()

        yield Writer(write, writer.add_text)


@contextlib.contextmanager
def _trackio(folder: Path, recipe: Recipe, step: int) -> Iterator[Writer]:
    """Open Trackio's database; after a resume, a step that is done again is in it twice."""
    with _kept_here(folder), contextlib.redirect_stdout(io.StringIO()):
        trackio: Any = importlib.import_module("trackio")
        run = trackio.init(
            project=recipe.name, name=folder.parent.name, config=recipe.model_dump(mode="json"), resume="allow",
            embed=False, auto_log_gpu=False, auto_log_cpu=False,
        )  # fmt: skip
    try:
        # Trackio draws curves of numbers, so the answers are not written here.
        yield Writer(lambda numbers, step: run.log(dict(numbers), step=step), lambda name, text, step: None)
    finally:
        with contextlib.redirect_stdout(io.StringIO()):  # its message speaks of an upload, but means its own file
            trackio.finish()


@contextlib.contextmanager
def _kept_here(folder: Path) -> Iterator[None]:
    """Let Trackio see only this folder, and no server and no hub.

    Trackio reads the name of its folder only once, when it is imported. So its modules are dropped here, and a second
    run in the same process imports it again.
    """
    # Imported here, because only Trackio's uploads read the flag that is changed below.
    import huggingface_hub.constants as hub

    outside = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("TRACKIO_")}
    os.environ["TRACKIO_DIR"] = str(folder.absolute())
    was_offline = hub.HF_HUB_OFFLINE
    hub.HF_HUB_OFFLINE = True
    for module in [module for module in sys.modules if module.partition(".")[0] == "trackio"]:
        del sys.modules[module]
    try:
        yield
    finally:
        hub.HF_HUB_OFFLINE = was_offline
        del os.environ["TRACKIO_DIR"]
        os.environ |= outside
