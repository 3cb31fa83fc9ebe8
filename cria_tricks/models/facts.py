"""Collect the facts about a model that decide whether a plan can run on it.

Training and the dry run take them from its modules (``load.model.built_empty``). ``cria plan`` takes them from its
shape (:func:`facts_of`), which needs a millisecond and no transformers.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from cria_tricks.models.shape import Shape

PLAIN_BLOCKS = ("gemma", "gemma2", "gemma3_text", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3",
                "smollm3")  # fmt: skip
"""Kinds of model whose blocks can be loaded one by one, and have a module ``mlp`` that maps each token by itself; a
test reads their code."""


@dataclass(frozen=True)
class Facts:
    """The facts about a model that decide whether a plan can run on it.

    Attributes:
        name: the model's name in error messages.
        kind: ``model_type`` of its config.
        has: tells whether some module's path ends in a given name; peft finds its target modules in the same way.
        is_head: tells whether a given name is the name of the output head.
        made_for_sdpa: whether torch's ``scaled_dot_product_attention`` computes the same as the model's own attention.
        beside_head: what the head computes besides its matrix product, in a word; empty if nothing.
        norms_whole_queries: whether one norm covers the queries of all heads at once, instead of each head's alone.
        blocks: the number of blocks; ``None`` if the model has no list of blocks.
        heads: the number of query heads.
        kv_heads: the number of key and value heads; ``load/refusals.py`` checks that it divides ``heads``.
        inner: the width of the hidden layer inside the MLP.
    """

    name: str
    kind: str
    has: Callable[[str], bool]
    is_head: Callable[[str], bool]
    made_for_sdpa: bool
    beside_head: str
    norms_whole_queries: bool
    blocks: int | None
    heads: int
    kv_heads: int
    inner: int


@functools.cache
def facts_of(shape: Shape) -> Facts:
    """Take the facts from a model's shape, without its modules."""
    # The dot lets a name match a whole path, too. Only whole components match: "proj" must not match "q_proj".
    paths = tuple(f".{path}" for path in shape.modules)

    def has(name: str) -> bool:
        return any(path.endswith(f".{name}") for path in paths)

    return Facts(
        name=shape.name,
        kind=shape.kind,
        has=has,
        # In transformers the head is called lm_head in every model type that cria plan can estimate.
        is_head=lambda name: ".lm_head".endswith(f".{name}"),
        made_for_sdpa=not shape.caps_scores,
        beside_head=shape.beside_head,
        norms_whole_queries=shape.norms_whole_queries,
        blocks=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        inner=shape.inner,
    )
