r"""Model parallelism (a device map): the blocks lie on several cards, and one process runs them one after the other.

Saves    weights and what blocks keep: each card holds its own blocks only           [bytes]
Costs    (N - 1) / N of the cards' time: while a card computes, all others wait
Claim    exact: the same operations in the same order
Needs    two cards in one process
Breaks   hope for speed: two cards take as long as one, and a little longer for what travels between them. Kaggle's two
         T4s are faster with a process each (ddp) as soon as one card holds the run
Sources  Huang et al. 2018, arXiv:1811.06965, sec. 2 (why partitioned layers alone leave cards idle)
Ours     25 lines: two processes hold half of the layers each and send activations there and gradients back. The switch
         gives from_pretrained a device map

Shapes: activations (B, T, D) cross each of N - 1 borders, and their gradients come back.
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cria_tricks.bill.calls import Call
from cria_tricks.common.errors import BadInput
from cria_tricks.models.shape import Shape
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

SWITCHES = ("strategy=model",)
CLAIM = "exact"
LESSON = "23_pipeline_parallel"
REFERENCE = ("one_after_the_other",)
PLAIN = """
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(base, device_map="balanced")
"""


def one_after_the_other(
    layers: torch.nn.Module, x: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run a model whose first layers are in process 0, the next in process 1, and so on; then its backward pass.

    At any moment one process computes and the others wait: for their input first, for their gradient later.

    Args:
        layers: of this process.
        x: the model's input in the first process; in the others an empty tensor of their input's shape.
        loss: from the last layers' result, called by the last process.

    Returns:
        The loss in the last process, a zero in the others.
    """
    rank = dist.get_rank()
    last = dist.get_world_size() - 1
    if rank > 0:
        dist.recv(x, src=rank - 1)
        x.requires_grad_()
    y = layers(x)
    if rank < last:
        dist.send(y.detach(), dst=rank + 1)
        gradient = torch.empty_like(y)
        dist.recv(gradient, src=rank + 1)
        y.backward(gradient)
        result = y.new_zeros(())
    else:
        result = loss(y)
        result.backward()
    if rank > 0:
        assert x.grad is not None
        dist.send(x.grad, dst=rank - 1)
    return result.detach()


def switch_on(plan: Plan, recipe: Recipe, processes: int) -> Plan:
    """Spread the blocks over the cards of this machine."""
    if processes > 1:
        raise BadInput(
            f"parallel.strategy=model with {processes} processes: it is one process with several cards; start one, or "
            "set parallel.strategy=ddp"
        )
    cards = torch.cuda.device_count()
    if plan.device.kind != "cuda" or cards < 2:
        raise BadInput(
            f"parallel.strategy=model: needs two cards in one machine, and here {'is 1' if cards else 'are none'}; "
            "leave it at none"
        )
    warned = plan.warn("parallel.strategy=model: the cards take turns, so that it is no faster than one; ddp is")
    return warned.with_("parallel", strategy="model", data=1, cards=cards)


def spread(total: torch.nn.Module, plan: Plan, world: World) -> torch.nn.Module:
    """Nothing: the model was loaded where it belongs."""
    return total


def window(total: torch.nn.Module, world: World, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Nothing: one process sees all rows."""
    return contextlib.nullcontext()


def traffic(recipe: Recipe, shape: Shape, processes: int) -> list[Call]:
    """Nothing between processes, as there is one. Between its cards (B, T, D) crosses each border, there and back."""
    return []
