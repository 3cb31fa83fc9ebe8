"""Public training runs beside our predictions: bytes, and the seconds of a step with the run left out of the fit.

    python -m benchmarks.published_runs        # a few seconds; writes results/published_runs.json

The runs are in ``published_runs.toml``, with their sources. The share of a card's peak rates that a run reached is the
time of its step at these rates, divided by the time that it took. The share of a card is the geometric mean of those of
its runs with ``fit = true``. For the prediction of such a run the mean is taken without it. The time between two
launches is left as it is, because one run alone binds it. The others are predicted by the package's own shares.

What this does not establish: most of these runs are by libraries other than ours, a few settings are guessed where the
``note`` says so, and the runs of one card come from two or three authors. Which runs are fitted was decided with their
shares in sight: those that a recipe cannot say well (torchtune's own modules, Qwen's fused kernels, an eager run whose
length is assumed) are not.
"""

import json
import statistics
import tomllib
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from rich.console import Console

from benchmarks.common import HERE
from cria_tricks.bill.step_time import ends
from cria_tricks.common import atomic_files
from cria_tricks.hardware.cards import Gpu
from cria_tricks.hardware.gpus import find_gpu
from cria_tricks.hardware.reached import Reached
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.models.shape import Shape, shape_of
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import folds
from tools import tables

FILE = HERE / "published_runs.toml"
RESULTS = HERE / "results" / "published_runs.json"
AT_PEAK = Reached(1, 1, 1, 0, 1, "the datasheet", link=1)


@dataclass(frozen=True)
class PublishedRun:
    """A run as its authors published it; the fields are those of ``published_runs.toml``.

    Attributes:
        id: its name in our tables.
        date: when it was run or published.
        what: model, method and libraries, in words.
        card: the GPU, as ``cria plan --gpu`` names it where our list has it.
        source: where it is published.
        tokens_per_second: as printed or ``derived``; ``None`` if neither is possible.
        derived: how the tokens per second follow from what was printed.
        seconds: the training time that was printed [s].
        steps: the number of optimizer steps in these seconds.
        before: the memory reserved before training [GiB as printed].
        reserved: the largest memory that was printed [GiB as printed].
        bytes_are: what counts these bytes.
        model: a name of the catalogue.
        config: the fields of the model's config that differ from the catalogue's.
        set: the settings of the recipe; empty if the run cannot be written as one.
        fit: whether the efficiencies of its card are fitted on its tokens per second.
        note: what the recipe cannot repeat.
        why_not: why it cannot be written as a recipe.
    """

    id: str
    date: str
    what: str
    card: str
    source: str
    tokens_per_second: float | None = None
    derived: str = ""
    seconds: float | None = None
    steps: int | None = None
    before: float | None = None
    reserved: float | None = None
    bytes_are: str = ""
    model: str = ""
    config: dict[str, Any] | None = None
    set: tuple[str, ...] = ()
    fit: bool = False
    note: str = ""
    why_not: str = ""

    @property
    def recipe(self) -> Recipe:
        """What was trained, as far as a recipe can say it."""
        return with_settings(Recipe(), [f"model=random:{self.model}", *self.set])

    @property
    def shape(self) -> Shape:
        """The shape of its model."""
        return shape_of({**CONFIGS[self.model], **(self.config or {})}, self.model)

    @property
    def gpu(self) -> Gpu:
        """Its card, with the peak rates."""
        return find_gpu(self.card)


@cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Read the list."""
    runs = tomllib.loads(FILE.read_text(encoding="utf-8"))["run"]
    return tuple(PublishedRun(**{**run, "set": tuple(run.get("set", ()))}) for run in runs)


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a step of a published run, and what it took.

    Attributes:
        id: the run.
        card: its card.
        measured: the time of a step, from the tokens per second that were published [s].
        low: the low end of the predicted range [s].
        high: the high end of the predicted range [s].
        share: the share of its card's peak rates that the run reached [ratio].
        left_out: whether the run was left out of a fit for this prediction; if not, it never was in one.
        inside: whether the range holds what was measured.
        waits: whether the prediction says that the card waits for launches.
    """

    id: str
    card: str
    measured: float
    low: float
    high: float
    share: float
    left_out: bool
    inside: bool
    waits: bool


def measured(run: PublishedRun) -> float:
    """Return the time of an optimizer step of a run [s]."""
    assert run.tokens_per_second
    return run.recipe.rows_per_step * run.recipe.data.max_length / run.tokens_per_second


def share(run: PublishedRun) -> float:
    """Return the share of its card's peak rates that a run reached [ratio]."""
    assert run.gpu.card
    card = replace(run.gpu.card, reached=AT_PEAK)
    return folds.time_of(run.recipe, run.shape, card).seconds / measured(run)


def family(run: PublishedRun) -> str:
    """Name the chip of a run's card: the A100s with 40 and 80 GB share one."""
    return run.card.partition("-")[0]


def fitted_share(card: str, without: str = "") -> float:
    """Return the geometric mean of the shares of a card's fitted runs, without those that waited for launches [ratio].

    Args:
        card: the chip, as :func:`family` names it.
        without: the id of a run that is left out.
    """
    runs = [run for run in published_runs() if run.fit and family(run) == card and run.id != without]
    return statistics.geometric_mean([share(run) for run in runs if not _waits(run)])


def _waits(run: PublishedRun) -> bool:
    assert run.gpu.card
    parts = folds.time_of(run.recipe, run.shape, run.gpu.card).parts
    return parts[-1].name == "launches" and parts[-1].seconds > 0


def predict(run: PublishedRun) -> Prediction:
    """Predict the time of a step of a run, with itself left out of the fit."""
    card = run.gpu.card
    assert card
    waits = _waits(run)
    left_out = run.fit and not waits
    if left_out:
        one = fitted_share(family(run), run.id)
        card = replace(card, reached=replace(card.reached, half=one, memory=one))
    step = folds.time_of(run.recipe, run.shape, card)
    took = measured(run)
    low, high = ends(step.seconds, step.spread)
    return Prediction(run.id, run.card, took, low, high, share(run), left_out, low <= took <= high, waits)


@dataclass(frozen=True)
class PredictedBytes:
    """The published memory of a run beside the bill [GiB].

    Attributes:
        id: the run.
        bytes_are: what counts the published bytes, as far as its authors say.
        published: as printed. Where "GB" is printed, it may mean 10^9 bytes, and CUDA's context may be in it.
        allocated: what the bill allocates.
        reserved: what the bill reserves, at most, with expandable segments.
        ratio: reserved divided by published.
    """

    id: str
    bytes_are: str
    published: float
    allocated: float
    reserved: float
    ratio: float


def predict_bytes(run: PublishedRun) -> PredictedBytes:
    """Bill a published run; no constant is fitted on these bytes."""
    assert run.reserved
    memory = folds.estimate(run.recipe, run.shape, run.gpu.device)
    gib = 2**30
    allocated, reserved = memory.allocated_bytes / gib, memory.reserved_bytes / gib
    return PredictedBytes(run.id, run.bytes_are, run.reserved, allocated, reserved, reserved / run.reserved)


def main() -> None:
    """Predict all runs, write the result file, and show the times; the bytes are in the file."""
    found = [predict(run) for run in published_runs() if run.set and run.tokens_per_second]
    console = Console()
    weighed = [predict_bytes(run) for run in published_runs() if run.set and run.reserved]
    left_out = [one for one in found if one.left_out]
    shares = {card: fitted_share(card) for card in ("t4", "a100")}
    summary = {
        "shares": {card: round(one, 4) for card, one in shares.items()},
        "runs": len(found),
        "inside": sum(one.inside for one in found),
        "left_out": len(left_out),
        "left_out_inside": sum(one.inside for one in left_out),
        "bytes": len(weighed),
        "bytes_within_15_percent": sum(abs(one.ratio - 1) <= 0.15 for one in weighed),
        "bytes_more_than_5_percent_under": sum(one.ratio < 0.95 for one in weighed),
    }
    rows = {"predictions": [asdict(one) for one in found], "predicted_bytes": [asdict(one) for one in weighed]}
    console.print(tables.public_runs(rows), markup=False, highlight=False, soft_wrap=True)
    for name, value in summary.items():
        console.print(f"{name.replace('_', ' ')}: {value}", highlight=False)
    text = json.dumps(summary | rows, indent=2)
    atomic_files.write_file(RESULTS, text + "\n")


if __name__ == "__main__":
    main()
