"""Refuse plans that cannot run on their model: one list of rules for ``cria train``, the dry run and ``cria plan``.

Training and the dry run take the facts about a model from its modules (``load.model.built_empty``). ``cria plan`` takes
them from its shape (:func:`facts_of`), which needs a millisecond and no transformers. Both pass the facts to
:func:`refuse`, so they refuse the same plans with the same messages.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import DTYPE
from cria_tricks.hardware.attention_kernels import kernel_for
from cria_tricks.load.stages import find_blocks
from cria_tricks.models.shape import Shape, refuse_undivided
from cria_tricks.step_plan import Plan
from cria_tricks.switches import fused_blocks, gradient_checkpointing, tiled_mlp
from cria_tricks.switches.lora import ALL_LINEAR


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
        kv_heads: the number of key and value heads; :func:`refuse` checks that it divides ``heads``.
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


def refuse(plan: Plan, facts: Facts, processes: int) -> None:
    """Refuse a plan that cannot run on the model.

    Args:
        plan: what would run.
        facts: the facts about the model.
        processes: the world size of the run.

    Raises:
        BadInput: names the setting that does not fit, and what to set instead.
    """
    name = facts.name
    targets = plan.peft.get("target_modules", ())
    if facts.heads % facts.kv_heads:
        raise BadInput(
            f"model {name}: {facts.heads} heads cannot share {facts.kv_heads} key heads; correct num_attention_heads "
            "or num_key_value_heads in config.json"
        )
    # Not ==: our own attention functions, "sdpa_expanded" and "sdpa_by_document", call torch's sdpa, too.
    if "sdpa" in plan.model.get("attn_implementation", "") and not facts.made_for_sdpa:
        raise BadInput(f"tricks.attention=sdpa: {name} is not made for it; set tricks.attention=eager")
    for target in targets:
        if target != ALL_LINEAR and not facts.has(target):
            way_out = f"set lora.target_modules={ALL_LINEAR} for every linear but the head"
            there = ",".join(each for each in targets if facts.has(each))
            if there:
                way_out += f", or {there}, which it has"
            raise BadInput(f"lora.target_modules: {name} has no module named {target}; {way_out}")
    blocks = plan.peft.get("blocks", 0)  # blocks that the side network copies; other methods have no such entry
    if blocks > (facts.blocks or 0):
        if facts.blocks is None:
            raise BadInput(f"tricks.peft=side_network: {name} has no list of blocks to copy; set tricks.peft=lora")
        raise BadInput(
            f"side.blocks={blocks}: {name} has {facts.blocks} blocks; set side.blocks={facts.blocks} or less"
        )
    wanted = plan.checkpointing.get("blocks", 0)  # "all" or a number
    if isinstance(wanted, int) and wanted > (facts.blocks or 0):
        raise gradient_checkpointing.too_many(wanted, name, facts.blocks or 0)
    _refuse_kind(plan, facts)
    if plan.checkpointing.get("keep_attention"):
        _refuse_without_kernel(plan, facts)
    if plan.parallel["strategy"] in ("tensor", "ddp_tensor"):
        _refuse_uncut(plan, facts, processes)
    if plan.parallel["strategy"] == "pipeline":
        find_blocks(plan.parallel["stage_blocks"], facts.blocks or 0, plan.parallel["stages"], facts.kind)
    if plan.loss["kind"] == "chunked":
        adapted = [target for target in targets if facts.is_head(target)]
        if adapted:
            raise BadInput(
                f"tricks.chunked_loss=true with {adapted[0]} in lora.target_modules: it is the head of {name}, which "
                "must stay frozen; leave one out"
            )
        if facts.beside_head:
            raise BadInput(
                f"tricks.chunked_loss=true: the head of {name} does more than one product ({facts.beside_head}), "
                "which the chunked loss does not; set tricks.chunked_loss=false"
            )


def _refuse_kind(plan: Plan, facts: Facts) -> None:
    """Refuse a kind of model whose blocks are built otherwise than a switch expects."""
    if {"fuse_blocks", "fuse_blocks_by_triton"} & set(plan.after_load):
        fused_blocks.refuse_kind(facts.kind, facts.name)
    if "tile_mlps" in plan.after_load:
        tiled_mlp.refuse_kind(facts.kind, facts.name)
    if plan.streaming and facts.kind not in tiled_mlp.KINDS:
        raise BadInput(
            f"tricks.stream_layers: {facts.name}, a model of kind {facts.kind}, is not one whose blocks can be loaded "
            f"one by one: it is for {', '.join(tiled_mlp.KINDS)}; set tricks.stream_layers=false"
        )


def _refuse_without_kernel(plan: Plan, facts: Facts) -> None:
    """Refuse to keep attention's output on a card whose attention is no single kernel for this model."""
    if plan.device.kind != "cuda":
        return  # a CPU's flash kernel takes everything
    dtype = next((DTYPE[name] for name in ("fp16", "bf16") if plan.training.get(name)), "float32")
    masked = plan.checkpointing["masked"]
    # Our own attention functions repeat shared key heads, and transformers does so for rows with a mask.
    grouped = plan.model["attn_implementation"] == "sdpa" and facts.heads != facts.kv_heads and not masked
    if kernel_for(plan.device, dtype, masked=masked, grouped=grouped) != "math":
        return
    instead = "set tricks.expand_kv=true" if grouped and dtype != "bfloat16" else "set tricks.precision=fp16"
    raise BadInput(
        f"tricks.keep_attention=true: {plan.device.name} has no fused attention kernel for {facts.name} with these "
        f"settings; {instead}, or tricks.keep_attention=false"
    )


def _refuse_uncut(plan: Plan, facts: Facts, processes: int) -> None:
    """Refuse a model that tensor parallelism cannot cut: it finds matrices by name, and divides the heads among ranks.

    A norm over the queries of all heads is refused because no rank has all heads.
    """
    instead = "use parallel.strategy=ddp or fsdp"
    # Only attention needs these names, because its heads are divided. Matrices of an MLP with other names, such as
    # those of a mixture's experts, are not cut: every process keeps them whole.
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        if not facts.has(name):
            raise BadInput(f"tensor parallelism: {facts.name} has no module named {name} to cut; {instead}")
    if facts.norms_whole_queries:
        raise BadInput(f"tensor parallelism: {facts.name} normalises all heads' queries at once; {instead}")
    refuse_undivided(facts.name, facts.heads, facts.kv_heads, facts.inner, processes // plan.parallel["data"])


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
