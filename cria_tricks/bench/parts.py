"""The parts of a sitting: which cases each has on a device, and how long it should take."""

from collections.abc import Iterable
from typing import NamedTuple

from cria_tricks.bench import capstone, cases
from cria_tricks.bench.case import HALVINGS, WARM_UP, Setup, full_lengths, prepared, recipe_of, settings_of
from cria_tricks.bench.measured_card import BenchSettings, PartName
from cria_tricks.common.errors import BadInput
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.hardware.cards import Card
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import folds

LOADING = {"cpu": 1.0, "cuda": 10.0}
"""Time that a case takes beside its steps and its dry run, to load the model above all [s].

A case of ``random:tiny`` took about one on two EPYC cores. The figure for a GPU is a guess.
"""
DRY_BLOCK = 1.0
"""Time of a dry run for each block of the model [s]: 0.9 to 2.7 on two busy EPYC cores, for Llama-3.2-1B."""
FIXED: dict[PartName, tuple[float, float]] = {"machine": (5, 5), "calibrate": (30, 75)}
"""Time of the parts without cases [s], of the short and of the full version: on two EPYC cores."""
CALIBRATED = {True: 0.4, False: 1.5}
"""How long each piece of the calibration is repeated, in the short version and in the full one [s]."""
CAPSTONE_STEPS = {True: 4, False: 0}
"""Optimizer steps of the capstone's shape in the short version, and in the full one: 0 for its three epochs."""
LONGEST_TRIES = 5
"""Lengths that a search of the longest row tries, about."""


class Planned(NamedTuple):
    """A case that is planned for a part.

    Attributes:
        bench: the bench that it belongs to.
        case: its name and its toggles.
        setup: the model, the length and the number of timed steps.
        dry: whether a dry run of it is made, too.
        full: whether its rows are :func:`cria_tricks.bench.case.full_lengths`.
    """

    bench: str
    case: cases.ToMeasure
    setup: Setup
    dry: bool = True
    full: bool = False


def settings_for(device: Device, *, short: bool, profile: str = "") -> BenchSettings:
    """Choose the model and the lengths for a device.

    A CPU takes a small model and short rows, so that a sitting takes minutes. On a card each switch is measured alone
    on Llama-3.2-1B only where plain fp32 full fine-tuning of it fits; else on SmolLM2's shape, where it does.
    """
    if device.kind == "cpu":
        shape = alone = "smollm2"
        tokens = 256
        if short:
            shape = alone = "tiny"
            tokens = 128
    else:
        shape = alone = "llama-3.2-1b"
        tokens = 512 if short else 2048
        if not _fits(device, shape, tokens, ""):
            alone = "smollm2"
    return BenchSettings(
        short=short, shape=shape, alone_shape=alone, tokens=tokens, rounds=3 if short else 5, profile=profile
    )


def skipped(part: PartName, settings: BenchSettings, device: Device) -> str:
    """Say why a part is left out; empty if it is not."""
    if device.kind == "cpu" and part == "longest":
        return "on a CPU the memory is the machine's, which is not filled on purpose"
    if settings.short and part in ("longest", "errors") and device.kind == "cuda":
        return "the short version leaves it out"
    return ""


def planned(part: PartName, settings: BenchSettings, device: Device) -> list[Planned]:
    """List the cases of a part; those of ``capstone`` and ``longest`` are not known by switches, so they have none."""
    setup = Setup(settings.shape, settings.tokens, settings.rounds)
    if part == "ladder":
        found = [Planned("together", case, setup) for case in cases.ladder(device)]
        # What does not fit must run out of memory, and takes a minute to do so.
        return [one for one in found if not settings.short or _fits(device, *_size(setup), one.case.words)]
    if part == "alone":
        setup = Setup(settings.alone_shape, settings.tokens, settings.rounds)
        bench = "together" if settings.alone_shape == settings.shape else "alone"
        return [Planned(bench, case, setup, dry=not settings.short) for case in cases.alone(device)]
    if part == "errors":
        bytes_only = Setup(settings.shape, min(512, settings.tokens), 0)
        return [Planned("errors", case, bytes_only, full=True) for case in cases.errors(device)]
    return []


def lengths_of(one: Planned) -> list[int]:
    """Return the lengths of a planned case's rows; empty for the usual ones.

    Raises:
        BadInput: if a switch cannot work here.
    """
    if not one.full:
        return []
    recipe, plan, _ = prepared(one.case.words, one.setup)
    return full_lengths(recipe, plan)


def seconds_of(part: PartName, settings: BenchSettings, device: Device, card: Card | None) -> float | None:
    """Predict how long a part takes [s]; ``None`` if that is not known.

    Args:
        part: the part.
        settings: of the sitting.
        device: the device.
        card: its rates; ``None`` if they are not known.
    """
    if part in FIXED:
        return FIXED[part][0 if settings.short else 1]
    if card is None:
        return None
    if part == "capstone":
        return _capstone_seconds(settings, device, card)
    if part == "longest":
        return _longest_seconds(settings, device, card)
    return sum(_case_seconds(one, device, card) for one in planned(part, settings, device))


def minutes(parts: Iterable[PartName], settings: BenchSettings, device: Device, card: Card | None) -> float:
    """Sum up the predicted time of parts, those that are not known left out [min]."""
    wanted = [part for part in parts if not skipped(part, settings, device)]
    return sum(seconds_of(part, settings, device, card) or 0.0 for part in wanted) / 60


def _case_seconds(one: Planned, device: Device, card: Card) -> float:
    """Predict how long a case takes: to load the model, the dry run and the steps [s]."""
    recipe = recipe_of(settings_of(one.case.words, device), one.setup)
    found = LOADING[device.kind]
    if one.dry:
        found += DRY_BLOCK * find_shape(recipe.model).layers
    if not _fits(device, *_size(one.setup), one.case.words):
        return found  # it runs out of memory in its first step
    work = folds.work(recipe, find_shape(recipe.model), device)
    steps = WARM_UP + one.setup.rounds
    if one.setup.rounds and work.precision == "fp16":
        steps += HALVINGS
    return found + steps * folds.step(recipe, find_shape(recipe.model), card).seconds


def capstone_tokens(settings: BenchSettings, device: Device) -> int:
    """Return the length of the capstone's longest row: the real one on a card."""
    return 2048 if device.kind == "cuda" else settings.tokens


def _capstone_seconds(settings: BenchSettings, device: Device, card: Card) -> float:
    longest = capstone_tokens(settings, device)
    recipe = capstone.recipe_for(device, settings.shape, longest, CAPSTONE_STEPS[settings.short])
    lengths = [tokens for tokens, _ in row_lengths("train")]
    mean = round(sum(lengths) / len(lengths) * longest / 2048)
    steps = CAPSTONE_STEPS[settings.short] or recipe.train.epochs * len(lengths) / recipe.rows_per_step
    step = folds.step(recipe, find_shape(recipe.model), card, mean)
    return LOADING[device.kind] + DRY_BLOCK * find_shape(recipe.model).layers + steps * step.seconds


def longest_recipe(settings: BenchSettings, device: Device) -> Recipe:
    """Return the recipe whose longest row is searched."""
    return with_settings(cases.capstone(device), [f"model=random:{settings.shape}"])


def _longest_seconds(settings: BenchSettings, device: Device, card: Card) -> float:
    recipe = longest_recipe(settings, device)
    shape = find_shape(recipe.model)
    tokens = toggles.longest(toggles.Target(shape, device), recipe)
    step = folds.step(recipe, shape, card, tokens)
    return LONGEST_TRIES * (LOADING[device.kind] + WARM_UP * step.seconds)


def _size(setup: Setup) -> tuple[str, int]:
    return setup.shape, setup.tokens


def _fits(device: Device, shape: str, tokens: int, words: str) -> bool:
    """Say by the bill whether a case fits a card; a CPU has room for what is measured there."""
    if device.kind == "cpu":
        return True
    recipe = recipe_of(settings_of(words, device), Setup(shape, tokens, 0))
    try:
        return folds.estimate(recipe, find_shape(recipe.model), device).fits
    except BadInput:
        return True  # a refusal is a result, too, and takes no time
