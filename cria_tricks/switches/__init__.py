"""The switches of the techniques, in the order in which they are switched on.

Each module is about the technique of the same name in ``techniques/``, and imports no torch. It names its ``SWITCHES``
(the settings of ``recipe.tricks`` that it answers to), states its ``CLAIM`` (how exact it is) and its ``LESSON``, and
holds ``switch_on(plan, recipe) -> Plan``. Its ``bill(step, recipe) -> Step`` says what the technique does to the bytes
and the time of a step (``folds.py`` calls it).
"""

from types import ModuleType

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


def technique_name(technique: ModuleType) -> str:
    """Return the name of a technique by a module of it, such as ``nf4`` for ``cria_tricks.switches.nf4``."""
    return technique.__name__.rsplit(".", 1)[-1]
