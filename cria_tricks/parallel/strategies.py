"""List the strategies by which several processes share a run, and two more that combine several strategies.

The module of a strategy begins with a card of eight lines, declares itself as a ``TECHNIQUE``, and holds a from-scratch
reference over plain collectives. Its functions are ``switch_on(plan, recipe, processes) -> Plan``, which changes the
plan; ``spread(total, plan, world) -> module``, which wraps or cuts the model; ``window(total, world, last)``, the
context of one micro-batch; and ``traffic(recipe, shape, processes) -> list[Call]``, what an optimizer step sends.
"""

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import ModuleType

from cria_tricks.bill.calls import Call
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Shape
from cria_tricks.processes import numbers
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan


class Modules(Mapping[str, ModuleType]):
    """Modules of this folder by their names, each imported when it is first taken, because they import torch."""

    def __init__(self, *names: str) -> None:
        self.names = names

    def __getitem__(self, name: str) -> ModuleType:
        if name not in self.names:
            raise KeyError(name)
        return importlib.import_module(f"cria_tricks.parallel.{name}")

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


STRATEGIES = Modules(
    # Each process has the whole model, and its own share of the rows.
    "ddp",
    # Each process stores a shard of the model and gathers one block at a time; it has its own share of the rows.
    "fsdp",
    # The processes divide the matrices of each block, and all of them have the same rows.
    "tensor",
    # The processes of a group divide the matrices, and each group has its own share of the rows.
    "ddp_tensor",
    # The processes divide the tokens of each row, and all of them have the same rows.
    "context",
    # A single process divides the blocks among several cards.
    "model",
    # Each process has some of the blocks, and every micro-batch passes through all processes.
    "pipeline",
)
"""The values of ``parallel.strategy`` except ``none``, and their modules."""

ELASTIC = ("ddp", "fsdp")
"""Strategies that run with every number of processes that divides the micro-batches of a step, also with one."""

BESIDE = Modules("data_pipeline", "hybrid")
"""Strategies that are not values of ``parallel.strategy``: the first one is ``pipeline`` with the setting
``parallel.pipelines``, and the second runs only in a lesson."""


def switch_on(plan: Plan, recipe: Recipe, processes: int) -> Plan:
    """Apply the strategy of a recipe to its plan.

    Args:
        plan: the plan, to which all techniques have been applied.
        recipe: the recipe.
        processes: the world size of the run.

    Raises:
        BadInput: if the strategy does not fit the processes, the techniques or ``eval.samples``; it gives the reason
            and what to use.
    """
    strategy = recipe.parallel.strategy
    if recipe.parallel.reduce != "micro_batch" and strategy != "fsdp":
        raise BadInput(
            f"parallel.reduce={recipe.parallel.reduce} with parallel.strategy={strategy}: only fsdp can reduce "
            "gradients at two times; leave it out"
        )
    if recipe.parallel.sequence and strategy not in ("tensor", "ddp_tensor"):
        raise BadInput(
            f"parallel.sequence=true with parallel.strategy={strategy}: it divides what tensor and ddp_tensor leave "
            "whole; leave it out"
        )
    if strategy == "none":
        if processes > 1:
            raise BadInput(
                f"parallel.strategy=none with {processes} processes: each would train the whole recipe; set "
                "parallel.strategy=ddp"
            )
        return plan
    samples = recipe.eval.samples
    if samples:
        raise BadInput(
            f"eval.samples={samples} with parallel.strategy={strategy}: answers during training need the whole model "
            "in one process; set eval.samples=0, and let cria eval answer after the training"
        )
    if processes == 1 and strategy in ELASTIC and numbers.launched():
        return plan  # an elastic run with one process left is a run without a strategy
    return STRATEGIES[strategy].switch_on(replace(plan, _technique=f"parallel.strategy={strategy}"), recipe, processes)


def traffic(recipe: Recipe, shape: Shape, processes: int) -> list[Call]:
    """Return the collectives of one process in an optimizer step; in a pipeline, of a stage that sends most.

    Args:
        recipe: the recipe; it names the strategy.
        shape: the model's shape.
        processes: the world size of the run.
    """
    strategy = recipe.parallel.strategy
    pipelines = recipe.parallel.pipelines
    if strategy != "pipeline":
        return STRATEGIES[strategy].traffic(recipe, shape, processes)
    # Stage 0 if there are two stages. If there are more, stage 1, which sends in both directions.
    inner = min(1, processes // pipelines - 2)
    if pipelines > 1:
        return BESIDE["data_pipeline"].traffic(recipe, shape, processes, pipelines, inner)
    return STRATEGIES[strategy].traffic(recipe, shape, processes, inner)
