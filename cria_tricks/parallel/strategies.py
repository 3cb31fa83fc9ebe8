"""The strategies by which several processes share a run, and two that put several of them together.

Each module opens with a card of eight lines, states its ``CLAIM``, and holds a from-scratch reference over plain
collectives, ``switch_on(plan, recipe, processes) -> Plan``, ``spread(total, plan, world) -> module`` and
``traffic(recipe, shape, processes) -> list[Call]``.
"""

from dataclasses import replace
from types import ModuleType

from cria_tricks.bill.calls import Call
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Shape
from cria_tricks.parallel import data_pipeline, ddp, ddp_tensor, fsdp, hybrid, model, pipeline, tensor
from cria_tricks.processes import numbers
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

STRATEGIES: dict[str, ModuleType] = {
    # The rows are shared, the model is whole in each process ...
    "ddp": ddp,
    # ... or in pieces of which none computes with another's rows ...
    "fsdp": fsdp,
    # ... or its matrices are shared, and the rows are the same.
    "tensor": tensor,
    "ddp_tensor": ddp_tensor,
    # One process, several cards.
    "model": model,
    # Each process has some of the blocks, and rows follow one another through all.
    "pipeline": pipeline,
}
"""What ``parallel.strategy`` can be."""

ELASTIC = ("ddp", "fsdp")
"""Strategies for any number of processes that divides a step's micro-batches, one included."""

BESIDE: tuple[ModuleType, ...] = (data_pipeline, hybrid)
"""Strategies that are no value of ``parallel.strategy``: one is a setting of another, one runs in a lesson only."""


def switch_on(plan: Plan, recipe: Recipe, processes: int) -> Plan:
    """Write a recipe's strategy into its plan.

    Args:
        plan: with all tricks in it.
        recipe: what is wanted.
        processes: of the run.

    Raises:
        BadInput: for a strategy that does not fit the processes or the tricks, with the reason and what to use.
    """
    strategy = recipe.parallel.strategy
    if strategy == "none":
        if processes > 1:
            raise BadInput(
                f"parallel.strategy=none with {processes} processes: each would train the whole recipe; set "
                "parallel.strategy=ddp"
            )
        return plan
    if processes == 1 and strategy in ELASTIC and numbers.launched():
        return plan  # of machines that come and go one is left: the run of one process
    return STRATEGIES[strategy].switch_on(replace(plan, _trick=f"parallel.strategy={strategy}"), recipe, processes)


def traffic(recipe: Recipe, shape: Shape, processes: int) -> list[Call]:
    """Say what one process sends in an optimizer step; in a pipeline, one of the stages that send most.

    Args:
        recipe: what is wanted; its strategy decides.
        shape: of the model.
        processes: of the run.
    """
    strategy = recipe.parallel.strategy
    pipelines = recipe.parallel.pipelines
    if strategy != "pipeline":
        return STRATEGIES[strategy].traffic(recipe, shape, processes)
    inner = min(1, processes // pipelines - 2)  # of three stages and more, those between the ends send both ways
    if pipelines > 1:
        return data_pipeline.traffic(recipe, shape, processes, pipelines, inner)
    return pipeline.traffic(recipe, shape, processes, inner)
