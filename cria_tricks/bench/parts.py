"""The parts of a sitting: which cases each has on a device."""

from typing import Literal, NamedTuple

from cria_tricks.bench import cases
from cria_tricks.bench.case import Setup, full_lengths, prepared, recipe_of, settings_of
from cria_tricks.bench.measured_card import BenchSettings, PartName
from cria_tricks.common.errors import BadInput
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import folds

CALIBRATED = {True: 0.4, False: 1.5}
"""How long each piece of the calibration is repeated, in the short version and in the full one [s]."""


class Planned(NamedTuple):
    """A case that is planned for a part.

    Attributes:
        bench: the bench that it belongs to.
        case: its name and its toggles.
        setup: the model, the length and the number of timed steps.
        dry: whether a dry run of it is made, too.
        rows: which lengths its rows have: the usual ones; ``full``, see :func:`cria_tricks.bench.case.full_lengths`; or
            ``real``, those of Kwanzaa rows.
    """

    bench: str
    case: cases.ToMeasure
    setup: Setup
    dry: bool = True
    rows: Literal["usual", "full", "real"] = "usual"


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
        if not _fits(device, Setup(shape, tokens, 0), ""):
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
    """List the cases of a part; those of ``longest`` are found by a search, so it has none here."""
    setup = Setup(settings.shape, settings.tokens, settings.rounds)
    if part == "ladder":
        found = [Planned("together", case, setup) for case in cases.ladder(device)]
        # What does not fit must run out of memory, and takes a minute to do so.
        return [one for one in found if not settings.short or _fits(device, setup, one.case.words)]
    if part == "alone":
        setup = Setup(settings.alone_shape, settings.tokens, settings.rounds)
        bench = "together" if settings.alone_shape == settings.shape else "alone"
        return [Planned(bench, case, setup, dry=not settings.short) for case in cases.alone(device)]
    if part == "capstone":
        real = Setup(settings.shape, 2048 if device.kind == "cuda" else settings.tokens, settings.rounds)
        return [Planned("capstone", cases.kwanzaa(device), real, rows="real")]
    if part == "errors":
        bytes_only = Setup(settings.shape, min(512, settings.tokens), 0)
        return [Planned("errors", case, bytes_only, rows="full") for case in cases.errors(device)]
    return []


def lengths_of(one: Planned, device: Device) -> list[int]:
    """Return the lengths of a planned case's rows; empty for the usual ones, and if the case will be refused."""
    if one.rows == "real":
        return real_lengths(recipe_of(settings_of(one.case.words, device), one.setup).rows_per_step, one.setup.tokens)
    if one.rows == "full":
        try:
            recipe, plan, _ = prepared(one.case.words, one.setup)
        except BadInput:
            return []
        return full_lengths(recipe, plan)
    return []


def real_lengths(rows: int, longest: int) -> list[int]:
    """Choose lengths of Kwanzaa's rows that stand for all of them: evenly spread from the shortest to the longest.

    Args:
        rows: how many.
        longest: the length to which the longest row is brought; the real one has 2,048 tokens.
    """
    lengths = sorted(tokens for tokens, _ in row_lengths("train"))
    places = [round(row * (len(lengths) - 1) / (rows - 1)) for row in range(rows)]
    return [max(2, lengths[place] * longest // lengths[-1]) for place in places]


def longest_recipe(settings: BenchSettings, device: Device) -> Recipe:
    """Return the recipe whose longest row is searched."""
    return with_settings(cases.capstone(device), [f"model=random:{settings.shape}"])


def _fits(device: Device, setup: Setup, words: str) -> bool:
    """Say by the bill whether a case fits a card; a CPU has room for what is measured there."""
    if device.kind == "cpu":
        return True
    recipe = recipe_of(settings_of(words, device), setup)
    try:
        return folds.estimate(recipe, find_shape(recipe.model), device).fits
    except BadInput:
        return True  # a refusal is a result, too, and takes no time
