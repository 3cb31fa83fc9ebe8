"""The strategies by which several processes share a run, and those that have a loop of their own.

Each module opens with a card of eight lines, states its ``CLAIM``, and holds a from-scratch reference over plain
collectives, ``switch_on(plan, recipe, processes) -> Plan``, ``spread(total, plan, world) -> module`` and
``traffic(recipe, shape, processes) -> list[Call]``.
"""

from dataclasses import replace
from types import ModuleType

from cria_tricks.common.errors import BadInput
from cria_tricks.parallel import data_pipeline, ddp, ddp_tensor, fsdp, model, pipeline, tensor
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
}
"""What ``parallel.strategy`` can be."""

ELASTIC = ("ddp", "fsdp")
"""Strategies for any number of processes that divides a step's micro-batches, one included."""

BESIDE: tuple[ModuleType, ...] = (pipeline, data_pipeline)
"""Strategies that transformers' Trainer cannot carry out: loops of their own, with commands of their own."""


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
