"""The cases that ``cria bench`` and ``pytest --benchmark-only`` share, and the parts of a sitting that they are in.

They are the capstone's switches, and sets for errors of the predictions.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from cria_tricks import recipes
from cria_tricks.bench.case import Setup, full_lengths, prepared, recipe_of, settings_of
from cria_tricks.bench.measured_card import BenchSettings, PartName
from cria_tricks.common.errors import BadInput
from cria_tricks.data.lengths import row_lengths
from cria_tricks.hardware.device import Device
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.switches import folds


class ToMeasure(NamedTuple):
    """A case that is not measured yet.

    Attributes:
        name: of the setting.
        words: its switches, as :func:`cria_tricks.bench.case.settings_of` reads them.
        against: the name of its baseline; empty if it has none.
    """

    name: str
    words: str
    against: str = ""


def capstone(device: Device) -> Recipe:
    """Return the capstone for a device, one micro-batch a step.

    ``gradient_accumulation`` stays off, because with it a step would train other tokens. It has a bench of its own.
    """
    return with_settings(recipes.capstone(device), ["tricks.gradient_accumulation=1"])


def words(recipe: Recipe, fields: Iterable[str]) -> str:
    """Write switches as a recipe has them."""
    return " ".join(f"{field}={str(getattr(recipe.tricks, field)).lower()}" for field in fields)


def on(device: Device) -> list[str]:
    """List the capstone's switches on a device, in the order of the lessons."""
    return toggles.switched_on(capstone(device))


def kwanzaa(device: Device) -> ToMeasure:
    """Return the switches of the Kwanzaa run on a device, whose rows have the real lengths."""
    recipe = recipes.kwanzaa(device)
    plain = Recipe().tricks
    changed = [field for field in type(plain).model_fields if getattr(recipe.tricks, field) != getattr(plain, field)]
    return ToMeasure("kwanzaa", words(recipe, changed))


def ladder(device: Device) -> list[ToMeasure]:
    """List the capstone's switches one after the other, from everything off."""
    found = [ToMeasure("off", "")]
    fields = on(device)
    for number, field in enumerate(fields, 1):
        found.append(ToMeasure(f"ladder_{field}", words(capstone(device), fields[:number]), found[-1].name))
    return found


def alone(device: Device) -> list[ToMeasure]:
    """List each switch of the capstone over nothing but what it needs, and before them what they need."""
    found = {"off": ToMeasure("off", "")}
    for field in on(device):
        needed = toggles.needs(capstone(device), field)
        against = "off"
        if needed:
            against = f"needed_{'+'.join(needed)}"
            found.setdefault(against, ToMeasure(against, words(capstone(device), needed)))
        found[f"alone_{field}"] = ToMeasure(f"alone_{field}", words(capstone(device), [*needed, field]), against)
    return list(found.values())


def removed(device: Device) -> list[ToMeasure]:
    """List the capstone without each of its switches; what cannot do without it goes with it."""
    fields = on(device)
    whole = f"ladder_{fields[-1]}"
    return [
        ToMeasure(f"removed_{field}", words(capstone(device), toggles.without(capstone(device), field)), whole)
        for field in fields
    ]


def together(device: Device) -> dict[str, ToMeasure]:
    """Return all cases of ``bench_together.py`` by their names."""
    return {case.name: case for case in (*ladder(device), *alone(device), *removed(device))}


ERRORS = """
peft=lora
peft=lora gradient_checkpointing=true
peft=lora precision=half
peft=lora precision=half attention=sdpa
peft=lora precision=half attention=sdpa expand_kv=true
peft=lora precision=half attention=sdpa gradient_checkpointing=true
peft=lora precision=half attention=sdpa gradient_checkpointing=true activation_offload=true
peft=lora precision=half attention=sdpa gradient_checkpointing=true lora.dora=true
peft=lora precision=half attention=sdpa expand_kv=true chunked_loss=true
peft=lora precision=half attention=sdpa packing=true gradient_checkpointing=true chunked_loss=true
peft=lora precision=half attention=sdpa quantization=int8
peft=lora precision=half attention=sdpa quantization=int8 gradient_checkpointing=true chunked_loss=true
peft=lora precision=half attention=sdpa quantization=nf4
peft=lora precision=half attention=sdpa quantization=nf4 expand_kv=true optimizer=adamw_8bit paged_optimizer=true
peft=lora precision=half attention=sdpa quantization=nf4 double_quantization=true gradient_checkpointing=true
peft=lora precision=half attention=sdpa quantization=nf4 double_quantization=true gradient_checkpointing=true \
chunked_loss=true lean_preparation=true expand_kv=true
peft=lora precision=half attention=sdpa quantization=nf4 double_quantization=true gradient_checkpointing=true \
chunked_loss=true lean_preparation=true optimizer=adamw_8bit gradient_accumulation=2 train.batch_size=2
peft=head precision=half attention=sdpa
peft=prompt_tuning precision=half attention=sdpa quantization=nf4 gradient_checkpointing=true
peft=side_network precision=half attention=sdpa gradient_checkpointing=true
precision=half attention=sdpa gradient_checkpointing=true optimizer=adamw_8bit
precision=half attention=sdpa gradient_checkpointing=true optimizer=adamw_8bit paged_optimizer=true
""".strip().split("\n")
"""Sets whose bytes are compared with both counts, one a line; ``half`` is the 16-bit format of the device."""


def errors(device: Device) -> list[ToMeasure]:
    """List the sets of :data:`ERRORS` for a device; a CPU takes bf16, or fp32 where it would emulate that."""
    found = []
    for number, line in enumerate(ERRORS, 1):
        found.append(ToMeasure(f"set-{number}", line.replace("precision=half", f"precision={device.best_precision}")))
    return found


CALIBRATED = {True: 0.4, False: 1.5}
"""How long each piece of the calibration is repeated, in the short version and in the full one [s]."""


class Planned(NamedTuple):
    """A case that is planned for a part.

    Attributes:
        bench: the bench that it belongs to.
        case: its name and its switches.
        setup: the model, the length and the number of timed steps.
        dry: whether a dry run of it is made, too.
        rows: which lengths its rows have: the usual ones; ``full``, see :func:`cria_tricks.bench.case.full_lengths`; or
            ``real``, those of Kwanzaa rows.
    """

    bench: str
    case: ToMeasure
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
        found = [Planned("together", case, setup) for case in ladder(device)]
        # What does not fit must run out of memory, and takes a minute to do so.
        return [one for one in found if not settings.short or _fits(device, setup, one.case.words)]
    if part == "alone":
        setup = Setup(settings.alone_shape, settings.tokens, settings.rounds)
        bench = "together" if settings.alone_shape == settings.shape else "alone"
        return [Planned(bench, case, setup, dry=not settings.short) for case in alone(device)]
    if part == "capstone":
        real = Setup(settings.shape, 2048 if device.kind == "cuda" else settings.tokens, settings.rounds)
        return [Planned("capstone", kwanzaa(device), real, rows="real")]
    if part == "errors":
        bytes_only = Setup(settings.shape, min(512, settings.tokens), 0)
        return [Planned("errors", case, bytes_only, rows="full") for case in errors(device)]
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
    return with_settings(capstone(device), [f"model=random:{settings.shape}"])


def _fits(device: Device, setup: Setup, words: str) -> bool:
    """Say by the bill whether a case fits a card; a CPU has room for what is measured there."""
    if device.kind == "cpu":
        return True
    recipe = recipe_of(settings_of(words, device), setup)
    try:
        return folds.estimate(recipe, find_shape(recipe.model), device).fits
    except BadInput:
        return True  # a refusal is a result, too, and takes no time
