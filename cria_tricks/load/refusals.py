"""What a plan cannot do to a model: one list of refusals for ``cria train``, the dry run and ``cria plan``.

Training and the dry run read the facts off the modules (``load.built_empty``). ``cria plan`` reads them off the widths,
which takes a millisecond and no transformers. Both hand them in here, so the same is refused in the same words.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from cria_tricks.common.errors import BadInput
from cria_tricks.load.stages import find_blocks
from cria_tricks.models.shape import Shape, refuse_undivided
from cria_tricks.step_plan import Plan
from cria_tricks.tricks.lora import ALL_LINEAR


@dataclass(frozen=True)
class Facts:
    """What decides whether a plan can be carried out on a model.

    Attributes:
        name: what errors call the model.
        kind: ``model_type`` of its config.
        has: whether a module's path ends in this name, as peft looks for its targets.
        is_head: whether this name is that of the head.
        made_for_sdpa: whether torch's attention computes what the model's own does.
        beside_head: what the head does beside its one product, in a word; empty for nothing.
        norms_whole_queries: whether queries are normalised over all heads at once.
        blocks: how many there are; ``None`` where they cannot be told.
        heads: of the queries.
        kv_heads: of keys and values; divides the heads.
        inner: width inside the MLP.
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
    """Refuse what the model is not made for.

    Args:
        plan: what would run.
        facts: of the model.
        processes: of the run.

    Raises:
        BadInput: naming the setting, and what to set.
    """
    name = facts.name
    targets = plan.peft.get("target_modules", ())
    if facts.heads % facts.kv_heads:
        raise BadInput(
            f"model {name}: {facts.heads} heads cannot share {facts.kv_heads} key heads; correct num_attention_heads "
            "or num_key_value_heads in config.json"
        )
    if "sdpa" in plan.model.get("attn_implementation", "") and not facts.made_for_sdpa:
        raise BadInput(f"tricks.attention=sdpa: {name} is not made for it; set tricks.attention=eager")
    for target in targets:
        if target != ALL_LINEAR and not facts.has(target):
            way_out = f"set lora.target_modules={ALL_LINEAR} for every linear but the head"
            there = ",".join(each for each in targets if facts.has(each))
            if there:
                way_out += f", or {there}, which it has"
            raise BadInput(f"lora.target_modules: {name} has no module named {target}; {way_out}")
    blocks = plan.peft.get("blocks", 0)
    if blocks > (facts.blocks or 0):
        if facts.blocks is None:
            raise BadInput(f"tricks.peft=side_network: {name} has no list of blocks to copy; set tricks.peft=lora")
        raise BadInput(
            f"side.blocks={blocks}: {name} has {facts.blocks} blocks; set side.blocks={facts.blocks} or less"
        )
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


def _refuse_uncut(plan: Plan, facts: Facts, processes: int) -> None:
    """Tensor parallelism cuts matrices by their names, and heads apart from each other."""
    instead = "use parallel.strategy=ddp or fsdp"
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        if not facts.has(name):
            raise BadInput(f"tensor parallelism: {facts.name} has no module named {name} to cut; {instead}")
    if facts.norms_whole_queries:
        raise BadInput(f"tensor parallelism: {facts.name} normalises all heads' queries at once; {instead}")
    refuse_undivided(facts.name, facts.heads, facts.kv_heads, facts.inner, processes // plan.parallel["data"])


@functools.cache
def facts_of(shape: Shape) -> Facts:
    """Read the facts off a model's widths."""
    paths = tuple(f".{path}" for path in shape.modules)

    def has(name: str) -> bool:
        return any(path.endswith(f".{name}") for path in paths)

    return Facts(
        name=shape.name,
        kind=shape.kind,
        has=has,
        is_head=lambda name: ".lm_head".endswith(f".{name}"),
        made_for_sdpa=not shape.caps_scores,
        beside_head=shape.beside_head,
        norms_whole_queries=shape.norms_whole_queries,
        blocks=shape.layers,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        inner=shape.inner,
    )
