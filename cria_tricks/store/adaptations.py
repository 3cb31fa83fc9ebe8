"""Record with which smaller sets of switches a run went on after it had run out of memory (``train.on_oom``).

The record is part of what describes a run (``run.json``). The recipe there stays the one that was asked for, so a
resumed run is started with the same recipe as before, and takes the changes from the record.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from cria_tricks.common.errors import BadInput
from cria_tricks.common.fields import flat
from cria_tricks.recipe import Recipe, build

FIELDS = frozenset(
    {
        "train.batch_size",
        *(
            f"tricks.{name}"
            for name in (
                "gradient_accumulation",
                "gradient_checkpointing",
                "attention",
                "expand_kv",
                "chunked_loss",
                "activation_offload",
                "keep_attention",
                "paged_optimizer",
                "optimizer_in_backward",
            )
        ),
    }
)
"""The fields that a run may change by itself. They change no result beyond rounding."""
RECORD = "adapted"
"""The key of the record in what describes a run."""


class Adaptation(BaseModel):
    """One change to a smaller set.

    Attributes:
        step: the optimizer steps that were kept.
        during: what the run was doing when memory ran out, e.g. ``the forward pass of step 4``.
        was: the changed fields with their values before.
        set: the same fields with the values with which the run went on.
        needed_bytes: the estimated memory of the set that ran out [bytes].
        chosen_bytes: the estimated memory of the new set [bytes].
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    during: str
    was: dict[str, Any]
    set: dict[str, Any]
    needed_bytes: int
    chosen_bytes: int


def differing(recipe: Recipe, changed: Recipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return those of :data:`FIELDS` that differ between two recipes: their values before, and after."""
    before = flat(recipe.model_dump(mode="json"))
    after = flat(changed.model_dump(mode="json"))
    names = [name for name in before if name in FIELDS and not _equal(before[name], after[name])]
    return {name: before[name] for name in names}, {name: after[name] for name in names}


def applied(recipe: Recipe, adaptations: Iterable[Adaptation]) -> Recipe:
    """Return the recipe with all changes, the last one last."""
    values = recipe.model_dump(mode="json")
    for adaptation in adaptations:
        for field, value in adaptation.set.items():
            group, _, name = field.partition(".")
            values[group][name] = value
    return build(values, "the set with which the run goes on")


def in_words(changes: Mapping[str, Any]) -> str:
    """Write changed fields as ``--set`` takes them: ``tricks.gradient_checkpointing=true``."""
    return " ".join(
        f"{field}={value if isinstance(value, str) else json.dumps(value)}" for field, value in changes.items()
    )


def read(about: Mapping[str, Any], where: Path) -> tuple[Adaptation, ...]:
    """Read the record of a run.

    Args:
        about: what describes the run.
        where: the run's folder or its checkpoint, for the error message.

    Raises:
        BadInput: if it is not as we write it.
    """
    said = f"--resume: {where}: its record of smaller sets cannot be read; start again in a new folder"
    try:
        found = tuple(Adaptation.model_validate(entry) for entry in about.get(RECORD, ()))
    except (ValidationError, TypeError):
        raise BadInput(said) from None
    if not all(FIELDS.issuperset((*one.was, *one.set)) for one in found):
        raise BadInput(said)
    return found


def accepts(adaptations: Sequence[Adaptation], field: str, value: Any) -> bool:
    """Whether a resumed run may be given this value: one that the run had before or after one of its changes."""
    values = [side[field] for one in adaptations for side in (one.was, one.set) if field in side]
    return any(_equal(value, other) for other in values)


def written(adaptations: Iterable[Adaptation]) -> list[dict[str, Any]]:
    """Return the record as JSON data."""
    return [one.model_dump(mode="json") for one in adaptations]


def _equal(one: Any, other: Any) -> bool:
    # In Python True == 1, but all blocks checkpointed is not one block checkpointed.
    return json.dumps(one) == json.dumps(other)
