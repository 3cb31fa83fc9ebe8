r"""Model parallelism (a device map): the blocks lie on several cards, and one process runs them one after the other.

Saves    weights and saved activations: each card holds only those of its own blocks           [bytes]
Costs    (N - 1) / N of the cards' time: while a card computes, all others wait
Claim    exact: the same operations in the same order
Needs    two cards in one process
Breaks   the hope for speed: two cards take as long as one, and a little longer to send activations to each other.
         Kaggle's two T4s are faster with one process each (ddp), if one card can hold the run
Sources  Huang et al. 2018, arXiv:1811.06965, sec. 2 (why partitioned layers alone leave cards idle)
Ours     25 lines: two processes hold half of the layers each, and send activations forward and gradients back. The
         switch gives from_pretrained a device map

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
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="exact", lesson="pipeline_parallel", switches=("strategy=model",))
REFERENCE = ("one_after_the_other",)
PLAIN = """
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(base, device_map="balanced")
"""


def one_after_the_other(
    layers: torch.nn.Module, x: torch.Tensor, loss: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Run forward and backward through a model whose first layers are in process 0, the next ones in 1, and so on.

    At any moment one process computes and the others wait: first for their input, later for their gradient.

    Args:
        layers: the layers of this process.
        x: the model's input in the first process; in the others an empty tensor with the shape of their input.
        loss: maps the output of the last layers to the loss; only the last process calls it.

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
    """Divide the blocks among the cards of this machine."""
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
    """Return the model as it is: each block was loaded onto its card."""
    return total


def window(total: torch.nn.Module, world: World, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Return an empty context: a single process has all rows, so no gradients are exchanged."""
    return contextlib.nullcontext()


def traffic(recipe: Recipe, shape: Shape, processes: int) -> list[Call]:
    """Return no calls, because there is one process; between its cards, (B, T, D) is copied forward and back."""
    return []
