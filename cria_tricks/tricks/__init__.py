"""The techniques, one per file, and the order in which they are switched on.

Each module opens with a card of eight lines, names its ``SWITCHES`` (the settings of ``recipe.tricks`` that it answers
to), states its ``CLAIM`` (how exact it is), and holds ``switch_on(plan, recipe) -> Plan``. Its
``bill(step, recipe) -> Step`` says what the trick does to the bytes and the time of a step (``folds.py`` calls it).
Techniques in :data:`INFERENCE` have no switch: their ``COMMAND`` always uses them.
"""

import re
from types import ModuleType

from cria_tricks.tricks import (
    activation_offload,
    adamw_8bit,
    chunked_loss,
    compile,
    expand_kv,
    flash_attention,
    flash_decoding,
    fused_blocks,
    fused_lora,
    gradient_accumulation,
    gradient_checkpointing,
    head_only,
    int8,
    keep_attention,
    kv_cache,
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

TRICKS: tuple[ModuleType, ...] = (
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
"""Every trick, in the order of switching on; the comments give the reasons for the order."""

INFERENCE: tuple[ModuleType, ...] = (flash_decoding, kv_cache)
"""Techniques for answering, not for training: no switch, because answers always use them (``COMMAND``)."""

CARD = ("Saves", "Costs", "Claim", "Needs", "Breaks", "Sources", "Ours", "Shapes")
"""The lines of a card, in their order."""


def card(trick: ModuleType) -> dict[str, str]:
    """Read the card at the top of a trick's module.

    Returns:
        ``title`` and the eight lines of :data:`CARD`, continuation lines joined.
    """
    text = trick.__doc__ or ""
    found = {"title": text.strip().splitlines()[0]}
    lines, _, shapes = text.partition("\nShapes: ")  # a paragraph of its own, the last
    pattern = rf"^({'|'.join(CARD)}) +(.*(?:\n[ ]{{4,}}\S.*)*)"
    for line in re.finditer(pattern, lines, flags=re.MULTILINE):
        found[line[1]] = " ".join(line[2].split())
    return found | {"Shapes": " ".join(shapes.split())}


def trick_name(trick: ModuleType) -> str:
    """Return the name of a trick's module, such as ``nf4`` for ``cria_tricks.tricks.nf4``."""
    return trick.__name__.rsplit(".", 1)[-1]
