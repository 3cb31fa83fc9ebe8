"""Cut a loaded model into the stages of a pipeline: choose the blocks of each stage, and remove all other weights."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cria_tricks.common.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
"""Model types that a pipeline can cut: hidden states pass from block to block unchanged, and the head is one product.

Gemma is left out because it scales its embeddings, and some versions of transformers would do so again in every stage.
Gemma 2 also caps the logits that its head computes.
"""


def find_blocks(sizes: str, layers: int, stages: int, kind: str) -> list[range]:
    """Return the range of block numbers that each stage has.

    Args:
        sizes: the number of blocks of each stage, e.g. ``"18,12"``. If it is empty, each stage gets the same number;
            blocks that are left over go to the first stages, because the last stage also has the head.
        layers: the number of blocks of the model.
        stages: the number of stages.
        kind: the model's ``model_type``.

    Raises:
        BadInput: if the sizes do not fit the model, or a pipeline cannot cut this model type.

    Examples:
        >>> find_blocks("", 7, 3, "llama")
        [range(0, 3), range(3, 5), range(5, 7)]
    """
    if kind not in KINDS:
        raise BadInput(
            f"parallel.strategy=pipeline with a model of kind {kind}: a pipeline cuts {', '.join(KINDS)}; use "
            "parallel.strategy=fsdp"
        )
    each = block_counts(sizes, layers, stages)
    return [range(sum(each[:stage]), sum(each[: stage + 1])) for stage in range(stages)]


def block_counts(sizes: str, layers: int, stages: int) -> list[int]:
    """Return the number of blocks of each stage; the arguments are those of :func:`find_blocks`.

    Raises:
        BadInput: if the sizes do not fit the model.
    """
    if layers < stages:
        raise BadInput(
            f"parallel.strategy=pipeline: {stages} stages for {layers} blocks: each needs one; start at most {layers} "
            "stages"
        )
    even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    if not sizes:
        return even
    # An entry that is not a number becomes 0, which the next check refuses.
    asked = [int(size) if size.strip().isdecimal() else 0 for size in sizes.split(",")]
    if len(asked) != stages or sum(asked) != layers or 0 in asked:
        raise BadInput(
            f"parallel.stage_blocks={sizes}: name {stages} numbers that add up to {layers}, e.g. "
            f"{','.join(map(str, even))}"
        )
    return asked


def parts_of(parallel: Mapping[str, Any], model: Any) -> list[range]:
    """Return the range of block numbers that each stage of a loaded model has.

    Args:
        parallel: ``plan.parallel``, with the entries ``stage_blocks`` and ``stages``.
        model: a transformers model, or peft's wrapper of one.
    """
    config = model.config
    return find_blocks(parallel["stage_blocks"], config.num_hidden_layers, parallel["stages"], config.model_type)


def cut(model: Any, blocks: range) -> None:
    """Remove all weights from a model that one stage does not need, in place.

    The modules stay, because the model's own forward pass still runs: it makes the attention mask and the rotary
    angles. The blocks and the last norm of other stages return their input unchanged. So every parameter keeps its
    name, and the adapters of all stages can be joined by name. If the head is tied to the embedding, the first stage
    keeps the matrix as embedding and the last stage keeps it as head. Both are frozen, so they stay equal.

    Args:
        model: a whole ``PeftModel`` with LoRA, of one of :data:`KINDS`.
        blocks: the block numbers of this stage.
    """
    causal_lm = model.get_base_model()
    backbone = causal_lm.base_model
    own = list(backbone.layers[blocks.start : blocks.stop])
    if blocks.start == 0:
        own.append(causal_lm.get_input_embeddings())
    if blocks.stop == len(backbone.layers):
        own += [backbone.norm, causal_lm.get_output_embeddings()]
    for module in (*backbone.layers, backbone.norm):
        if module not in own:
            module.forward = _hand_on
            # transformers 5.16 checkpoints whatever a block's forward is, and would repeat the handing on.
            module.gradient_checkpointing = False
    kept = set[int]()
    for module in own:
        kept.update(map(id, module.parameters()))
    _empty(model, kept)


def _hand_on(hidden_BTD: Any, *_: Any, **__: Any) -> Any:
    """Return the hidden states unchanged: the forward pass of a block or norm that another stage computes."""
    return hidden_BTD


def _empty(model: "nn.Module", kept: set[int]) -> None:
    """Remove all parameters from a model except those whose ``id`` is in ``kept``."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) not in kept:
                # torch marks a missing bias in the same way. The scales of a packed weight are its attributes, so they
                # are freed with it.
                module._parameters[name] = None
