"""What a measured case's optimizer step has to do, and how long it should take, from the case's own settings."""

from cria_tricks.bench.measured_card import MeasuredDevice, Predicted
from cria_tricks.bench.results import Case
from cria_tricks.bill import step_time
from cria_tricks.bill.work import Work
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import folds


def device_of(measured: MeasuredDevice) -> Device:
    """Return the facts about a measured device that estimates need."""
    return Device(measured.kind, measured.name, measured.capability, measured.real_bf16, measured.memory_bytes)


def recipe_of(case: Case) -> Recipe:
    """Return the recipe that a case trained.

    Raises:
        BadInput: if its settings are none of ours.
    """
    return with_settings(Recipe(), [f"model={case.model}", f"data.max_length={case.tokens_per_row}", *case.settings])


def mean_tokens(case: Case) -> int:
    """Return the mean length of the rows, or of the packed sequences, of a measured step [tokens]."""
    assert case.tokens
    return round(case.tokens / recipe_of(case).rows_per_step)


def trained_share(case: Case) -> float:
    """Return the share of a measured step's tokens that were trained."""
    assert case.tokens
    return (case.trained_tokens or 0) / case.tokens


def work_of(case: Case, device: Device) -> Work:
    """Return what a case's step has to do."""
    return folds.work(recipe_of(case), find_shape(case.model), device, mean_tokens(case), trained_share(case))


def step_flops(work: Work) -> float:
    """Count the floating-point operations of the products in a step."""
    return sum(part.flops for part in step_time.counts(work))


def predicted(case: Case, card: Card) -> Predicted:
    """Predict the time of a case's step by the rates of a card."""
    work = work_of(case, card.device)
    step = step_time.step(work, card)
    return Predicted(by=card.basis(work.precision), seconds=step.seconds, low=step.low, high=step.high)
