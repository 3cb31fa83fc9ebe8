"""Train one recipe in one process and in two, and note what each process held and sent.

``notebooks/two_cards.py`` calls it, on two GPUs or on a CPU. The training is that of ``cria train``; this module only
looks at it, in the processes of ``course/processes.py``.
"""

import gc
import hashlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks import recipes
from cria_tricks.course.processes import Ranks
from cria_tricks.recipe import Recipe, with_settings


@dataclass(frozen=True)
class Trained:
    """What a training was in one process.

    Attributes:
        losses: the training loss of each step, over the rows of all processes.
        rows_per_second: the rows of all processes together; without the first two steps where there are more than four.
        predicted_rows_per_second: the estimate; ``None`` for a device whose rates are not known.
        peak: the most bytes of tensors that this process held in a step.
        predicted_peak: the estimate for the process that needs most [bytes].
        gradients: for each step a digest of the gradients that the optimizer of this process saw.
        all_reduced: for each step the bytes that this process put into all-reduces; empty if they were not counted.
    """

    losses: list[float]
    rows_per_second: float
    predicted_rows_per_second: float | None
    peak: int
    predicted_peak: int
    gradients: list[str]
    all_reduced: list[int]


def train(ranks: Ranks, recipe: Recipe | str, settings: Sequence[str], *, count: bool = False) -> list[Trained]:
    """Train a recipe in all processes of ``ranks`` together.

    Args:
        ranks: the processes.
        recipe: the recipe, or its name.
        settings: changes of the recipe, as for ``cria train --set``.
        count: whether to count the bytes of all-reduces, and to take digests of the gradients. It makes a step slower.

    Returns:
        What it was in each process, by rank.

    Raises:
        RuntimeError: in one line, if a process failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            return ranks.run(_train, recipe, list(settings), Path(folder) / "run", count)
        except RuntimeError as error:  # its last line says what is wrong; the lines before are a traceback
            last = str(error).rstrip().splitlines()[-1]
            raise RuntimeError(re.sub(r"^[\w.]+\.(?=\w+: )", "", last)) from None


def apart(one: Trained, other: Trained) -> float:
    """Return the largest relative difference between the losses of two trainings."""
    return max(abs(p / q - 1) for p, q in zip(one.losses, other.losses, strict=True))


def line(what: str, guess: float | None, predicted: float | None, measured: float) -> str:
    """Return a line with the reader's guess, the prediction and the measured value side by side."""
    shown = ["-" if value is None else f"{value:,.2f}" for value in (guess, predicted, measured)]
    return f"{what:44} your guess {shown[0]:>9}   predicted {shown[1]:>9}   measured {shown[2]:>9}"


def _train(recipe: Recipe | str, settings: list[str], out: Path, count: bool) -> Trained:
    """Train in this process, as one of those that have joined."""
    # Imported here, because these libraries take seconds and only the processes need them.
    import torch

    from cria_tricks.common.console import Aside
    from cria_tricks.processes import numbers
    from cria_tricks.run.run import train

    gc.collect()  # the model of an earlier training refers to itself, and would count as memory of this one
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    console = Aside()
    console.quiet = True
    wanted = with_settings(recipes.get(recipe), settings)
    gradients: list[str] = []
    all_reduced: list[int] = []
    if count:
        with _watched(gradients, all_reduced):
            report = train(wanted, out, console=console)
    else:
        report = train(wanted, out, console=console)
    seconds = report["step_seconds"]
    peaks = report["estimate"].get("measured_by_process") or [report["estimate"]["measured_bytes"]]
    return Trained(
        losses=[entry["loss"] for entry in report["history"] if "loss" in entry],
        rows_per_second=wanted.rows_per_step / seconds["measured"],
        predicted_rows_per_second=wanted.rows_per_step / seconds["predicted"] if seconds["predicted"] else None,
        peak=peaks[numbers.rank()],
        predicted_peak=report["estimated_peak_bytes"],
        gradients=gradients,
        all_reduced=all_reduced,
    )


@contextmanager
def _watched(gradients: list[str], all_reduced: list[int]) -> Iterator[None]:
    """Before each step of an optimizer, note the gradients and the bytes that were all-reduced since the last step."""
    # Imported here, as above.
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from cria_tricks.bill.calls import CountCollectives

    before = 0

    def note(optimizer: Any, *more: Any) -> None:
        nonlocal before
        found = hashlib.sha256()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    found.update(parameter.grad.float().cpu().numpy().tobytes())
        gradients.append(found.hexdigest()[:12])
        all_reduced.append(counted.bytes["all_reduce"] - before)
        before = counted.bytes["all_reduce"]

    hook = register_optimizer_step_pre_hook(note)
    try:
        with CountCollectives() as counted:
            yield
    finally:
        hook.remove()
