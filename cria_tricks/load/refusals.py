"""Refuse plans that cannot run on their model: one list of rules for ``cria train``, the dry run and ``cria plan``.

All three pass the facts about the model (``models/shape.py``) to :func:`refuse`, so they refuse the same plans with the
same messages. What a technique asks of a model is in its switch's module.
"""

from cria_tricks.common.errors import BadInput
from cria_tricks.load.stages import find_blocks
from cria_tricks.models.shape import Facts, refuse_undivided
from cria_tricks.step_plan import Plan
from cria_tricks.switches import TECHNIQUES


def refuse(plan: Plan, facts: Facts, processes: int) -> None:
    """Refuse a plan that cannot run on the model.

    Args:
        plan: what would run.
        facts: the facts about the model.
        processes: the world size of the run.

    Raises:
        BadInput: names the setting that does not fit, and what to set instead.
    """
    if facts.heads % facts.kv_heads:
        raise BadInput(
            f"model {facts.name}: {facts.heads} heads cannot share {facts.kv_heads} key heads; correct "
            "num_attention_heads or num_key_value_heads in config.json"
        )
    for technique in TECHNIQUES:
        if hasattr(technique, "refuse_model"):
            technique.refuse_model(plan, facts)
    if plan.parallel["strategy"] in ("tensor", "ddp_tensor"):
        _refuse_uncut(plan, facts, processes)
    if plan.parallel["strategy"] == "pipeline":
        find_blocks(plan.parallel["stage_blocks"], facts.blocks or 0, plan.parallel["stages"], facts.kind)


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
