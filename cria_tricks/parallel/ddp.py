r"""Data parallelism (DDP): every process holds the whole model and takes its share of the rows.

Saves    time: N processes run the forward and backward passes of a step side by side      [seconds]
Costs    one all-reduce of the gradients a step, 4 bytes a trained weight: each process sends 2 (N - 1) / N of them.
         No memory is saved: every process holds all weights, gradients and optimizer states
Claim    exact within rounding: the gradients are added up in another order
Needs    as many micro-batches a step as processes, or a multiple; dropout 0 for the same losses as one process
Breaks   an epoch that the processes cannot share evenly, if it is filled up with its first rows again (accelerate's
         even_batches); a mean of the processes' means, if their numbers of trained tokens differ
Sources  Li et al. 2020, arXiv:2006.15704, sec. 3.2 (buckets, overlap); Patarasuk and Yuan 2009 (the ring)
Ours     30 lines: gradients are summed in buckets as soon as the backward pass has made them. The switch wraps the
         model and its loss in torch's DistributedDataParallel

Shapes: a window of k micro-batches of (B, T); each of N processes takes k / N of them.
"""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cria_tricks.bill.calls import Call
from cria_tricks.hardware import T4
from cria_tricks.models.shape import Shape
from cria_tricks.parallel.rules import several, share_window
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches import folds
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="exact within rounding", lesson="data_parallel", switches=("strategy=ddp",))
REFERENCE = ("Replicated",)
PLAIN = """
# torchrun --nproc-per-node 2 train.py
import os
import torch
from torch.nn.parallel import DistributedDataParallel

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # this process's GPU
torch.distributed.init_process_group()
replica = DistributedDataParallel(model.cuda())
"""
BUCKET_BYTES = 25 * 2**20
"""The size of a bucket, the gradients that one all-reduce sums [bytes]; torch calls it ``bucket_cap_mb``.

Every call has a latency, so a few large calls are faster than many small ones.
"""


class Replicated:
    """Sum the gradients of N copies of a model, so that each copy gets the gradients of the rows of all of them.

    Li et al., sec. 3.2.1 to 3.2.3: gradients are put into buckets in the order in which the backward pass makes them,
    from the last layer to the first. A full bucket is all-reduced while the backward pass continues::

        replicas = Replicated(model.parameters())
        for micro_batch in mine:
            replicas.last = micro_batch is mine[-1]
            loss(micro_batch).backward()
        replicas.wait()

    Args:
        parameters: of the copy in this process; all copies get the values of process 0.
        bucket_bytes: the least size of a bucket, except the last one.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter], bucket_bytes: int = BUCKET_BYTES):
        self.last = True  # whether the coming backward pass is the step's last
        self.bucket_bytes = bucket_bytes
        self.bucket: list[torch.Tensor] = []
        self.on_their_way: list[tuple[dist.Work, torch.Tensor, list[torch.Tensor]]] = []
        for parameter in parameters:
            dist.broadcast(parameter.data, src=0)
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._ready)

    def _ready(self, parameter: torch.nn.Parameter) -> None:
        if not self.last:  # the gradients of earlier micro-batches are only accumulated, in this process
            return
        assert parameter.grad is not None
        self.bucket.append(parameter.grad)
        if sum(gradient.nbytes for gradient in self.bucket) >= self.bucket_bytes:
            self._send()

    def _send(self) -> None:
        flat = torch.cat([gradient.flatten() for gradient in self.bucket])
        work = dist.all_reduce(flat, async_op=True)
        self.on_their_way.append((work, flat, self.bucket))
        self.bucket = []

    def wait(self) -> None:
        """Send the last bucket, and wait until all gradients are summed; call it after the last backward pass."""
        if self.bucket:
            self._send()
        for work, flat, gradients in self.on_their_way:
            work.wait()
            for gradient, summed in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
                gradient.copy_(summed.view_as(gradient))
        self.on_their_way = []


def switch_on(plan: Plan, recipe: Recipe, processes: int) -> Plan:
    """Divide the micro-batches of each accumulation window among the processes."""
    several("ddp", processes)
    plan = plan.with_("parallel", strategy="ddp", data=processes)
    return share_window(plan, recipe, processes)


def spread(total: torch.nn.Module, plan: Plan, world: World) -> torch.nn.Module:
    """Wrap a model and its loss in torch's DistributedDataParallel.

    Args:
        total: the model and its loss in one module, which maps a micro-batch to the sum of its losses. The wrapper
            must see this call, because it prepares its buckets then.
        plan: not used here.
        world: the processes.
    """
    # The trainer forgets the gradients after each step. Here it sets them to zero, so that they stay views of the
    # buckets: DDP would fill new tensors beside them in all micro-batches but the last.
    model: Any = total.model
    model.zero_grad = functools.partial(model.zero_grad, set_to_none=False)
    # DDP averages the gradients over the processes. The trainer multiplies its loss by their number, so the average is
    # the sum. Buffers need no broadcast, because training changes none of them. Gradients that are views of DDP's
    # all-reduce buckets need no memory of their own.
    return DistributedDataParallel(
        total, bucket_cap_mb=BUCKET_BYTES / 2**20, broadcast_buffers=False, gradient_as_bucket_view=True
    )


def window(total: torch.nn.Module, world: World, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Return the context of a micro-batch: only in the last one of the window the gradients are all-reduced."""
    assert isinstance(total, DistributedDataParallel)
    return contextlib.nullcontext() if last else total.no_sync()


def traffic(recipe: Recipe, shape: Shape, processes: int) -> list[Call]:
    """Return what an optimizer step sends: the gradients, once for any number of micro-batches."""
    trained = folds.step_of(recipe, shape, T4).trained_weights  # the same on any card
    return [Call("all_reduce", 4 * trained, 1, processes, "fp32 gradients of what trains")]
