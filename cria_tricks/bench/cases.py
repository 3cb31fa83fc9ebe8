"""The cases that ``cria bench`` and ``pytest --benchmark-only`` share: the capstone's switches, and sets for errors."""

from collections.abc import Iterable
from typing import NamedTuple

from cria_tricks import recipes
from cria_tricks.hardware.device import Device
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe, with_settings


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
