"""The switches of the techniques, in the order in which they are switched on.

Each module is about the technique of the same name in ``techniques/``, and imports no torch. Its ``TECHNIQUE`` declares
the technique. ``switch_on(plan, recipe) -> Plan`` switches it on, ``refuse_model(plan, facts)`` refuses a model that it
does not fit, if there are any, and ``bill(step, recipe) -> Step`` says what it does to the bytes and the time of a step
(``folds.py`` calls it).
"""

from collections.abc import Iterator, Mapping
from types import ModuleType
from typing import Any

from cria_tricks.common.lessons import number_of
from cria_tricks.settings import Tricks
from cria_tricks.switches import (
    activation_offload,
    adamw_8bit,
    chunked_loss,
    compile,
    expand_kv,
    flash_attention,
    fused_blocks,
    fused_lora,
    gradient_accumulation,
    gradient_checkpointing,
    head_only,
    int8,
    keep_attention,
    layer_by_layer,
    lean_preparation,
    lora,
    mixed_precision,
    nf4,
    optimizer_in_backward,
    packing,
    paged_optimizer,
    prompt_tuning,
    side_network,
    stream_layers,
    tiled_mlp,
)
from cria_tricks.technique import Field

TECHNIQUES: tuple[ModuleType, ...] = (
    # How the frozen weights are stored comes first, because everything below acts on the loaded model.
    mixed_precision,
    int8,
    nf4,
    # What trains: adapters are laid over the stored weights ...
    lora,
    head_only,
    prompt_tuning,
    side_network,
    # ... and only then can the preparation of both be made leaner.
    lean_preparation,
    # Where the blocks' weights wait, quantised or not, and with the adapters beside them.
    stream_layers,
    # How a block's products and the operations between them run. This decides what the block saves.
    fused_lora,
    fused_blocks,
    # How many tokens the MLP takes at a time, whichever way it runs.
    tiled_mlp,
    # What a block saves for the backward pass: the attention first, then a variant of it. After that, which blocks
    # save it, and where.
    flash_attention,
    expand_kv,
    gradient_checkpointing,
    activation_offload,
    # What a checkpointed block keeps all the same, also where its input is offloaded.
    keep_attention,
    # Compiling comes after all that changes a block, adapters included.
    compile,
    # Which tokens are in a row.
    packing,
    # The end of the step: the loss, the window of micro-batches, the optimizer.
    chunked_loss,
    gradient_accumulation,
    # How its micro-batches go through streamed blocks.
    layer_by_layer,
    adamw_8bit,
    paged_optimizer,
    # When the optimizer takes its steps, whichever it is.
    optimizer_in_backward,
)
"""The module of every technique with a switch, in the order of switching on; the comments give the reasons for it."""

for _module in TECHNIQUES:  # a wrong name is told here, before anything looks for it
    for _hook in ("switch_on", "bill"):
        assert hasattr(_module, _hook), f"{_module.__name__} has no function {_hook}"
    for _name in _module.TECHNIQUE.fields:
        assert _name in Tricks.model_fields, f"{_module.__name__}: Tricks in settings.py has no field {_name}"

FIELDS: Mapping[str, Field] = {
    name: field
    for module in sorted(TECHNIQUES, key=lambda module: number_of(module.TECHNIQUE.lesson))
    for name, field in module.TECHNIQUE.fields.items()
}
"""Every field of ``recipe.tricks``, in the order of the lessons; each comes after those that it needs."""

NEEDS: Mapping[str, str] = {switch: needs for module in TECHNIQUES for switch, needs in module.TECHNIQUE.needs.items()}
"""Switch -> settings over which it acts, as :class:`Technique` says."""


def as_switch(field: str, value: Any) -> str:
    """Write a field and its value as ``--set`` takes them, but without the leading ``tricks.``: ``peft=lora``."""
    return f"{field}={str(value).lower() if isinstance(value, bool) else value}"


def needed(switch: str) -> Iterator[tuple[str, str]]:
    """Yield the fields of ``recipe.tricks`` that a switch needs, each with its value; settings of other groups not."""
    for setting in NEEDS.get(switch, "").split():
        field, _, value = setting.partition("=")
        if field in FIELDS:
            yield field, value


def searched(*kinds: str) -> tuple[str, ...]:
    """List the fields that a search may use in one of these ways; see :class:`Field`."""
    return tuple(name for name, field in FIELDS.items() if field.search in kinds)


def technique_name(technique: ModuleType) -> str:
    """Return the name of a technique by a module of it, such as ``nf4`` for ``cria_tricks.switches.nf4``."""
    return technique.__name__.rsplit(".", 1)[-1]
