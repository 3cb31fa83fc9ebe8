"""A loaded model cut into the stages of a pipeline: which blocks each stage has, and how the rest of it is emptied."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cria_tricks.common.errors import BadInput

if TYPE_CHECKING:
    from torch import nn

KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen3")
"""Models whose hidden states go from block to block as they are, and whose head is one product. (Gemma scales its
embeddings, which some versions of transformers would do again in every stage; Gemma 2 caps what its head gives.)"""


def find_blocks(sizes: str, layers: int, stages: int, kind: str) -> list[range]:
    """Say which blocks each stage has.

    Args:
        sizes: e.g. ``"18,12"``; equally many when empty, and one more in the first stages, as the last has the head.
        layers: blocks of the model.
        stages: how many there are.
        kind: the model's ``model_type``.

    Raises:
        BadInput: if they do not fit the model, or it is of a kind that cannot be cut.

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
    """Say how many blocks each stage has; the arguments are those of :func:`find_blocks`.

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
    asked = [int(size) if size.strip().isdecimal() else 0 for size in sizes.split(",")]
    if len(asked) != stages or sum(asked) != layers or 0 in asked:
        raise BadInput(
            f"parallel.stage_blocks={sizes}: name {stages} numbers that add up to {layers}, e.g. "
            f"{','.join(map(str, even))}"
        )
    return asked


def parts_of(parallel: Mapping[str, Any], model: Any) -> list[range]:
    """Say which blocks of a loaded model each stage has.

    Args:
        parallel: the plan's slot of this name.
        model: of transformers, or peft's wrapper of one.
    """
    config = model.config
    return find_blocks(parallel["stage_blocks"], config.num_hidden_layers, parallel["stages"], config.model_type)


def cut(model: Any, blocks: range) -> None:
    """Empty a model in place, but for one stage.

    The model's own forward pass still runs, with its mask and rotary angles: blocks of other stages hand on what they
    are given. So every parameter keeps its name, and the adapter is put together again by names. A head that is tied to
    the embedding is whole in the last stage, and the embedding in the first: both are frozen.

    Args:
        model: a ``PeftModel`` with LoRA, of one of :data:`KINDS`, whole.
        blocks: the stage's.
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
    kept = set[int]()
    for module in own:
        kept.update(map(id, module.parameters()))
    _empty(model, kept)


def _hand_on(hidden_BTD: Any, *_: Any, **__: Any) -> Any:
    return hidden_BTD


def _empty(model: "nn.Module", kept: set[int]) -> None:
    """Drop all parameters but these, known by their ``id``."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if id(parameter) not in kept:
                module._parameters[name] = None  # as a bias that is none; with packed weights go their scales
