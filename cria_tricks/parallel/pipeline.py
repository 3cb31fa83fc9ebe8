r"""Pipeline parallelism, 1F1B: each process has some of the blocks, and micro-batches follow one another through them.

Saves    weights, gradients and optimizer states: L blocks -> L / S a process, besides the embedding on the first and
         the head on the last                                                                        [bytes]
Costs    idle time: (S - 1) / (k + S - 1) of every stage's step, if all stages take equally long; if not, all wait for
         the slowest. Each stage sends B T D numbers per micro-batch to the next, and gets as many gradients back;
         padding to one length
Claim    exact within rounding: losses, gradients and the adapter are those of one process
Needs    at least S micro-batches a step (k >= S); rows of one length, so all are padded to the longest; LoRA; room for
         the whole model in every process while it loads
Breaks   trained embeddings that are tied to the head, because first and last stage would have to add up their
         gradients: full fine-tuning is refused. Without scale_grads=False torch takes a mean of micro-batch means
Sources  Narayanan et al. 2021, arXiv:2104.04473, sec. 2.2 (1F1B with a flush, and its bubble); Huang et al. 2018,
         arXiv:1811.06965, sec. 2.2 (GPipe: all forward, then all backward)
Ours     the order of a stage's passes, and a step over plain sends and receives. The switch runs torch's Schedule1F1B
         in the loop; from its first step on it holds receive buffers for all k micro-batches, both ways

Shapes: S stages, k micro-batches of (B, T), hidden states (B, T, D), L blocks.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from cria_tricks.bill.calls import Call
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.load.stages import cut, parts_of
from cria_tricks.models.shape import Shape
from cria_tricks.parallel.rules import refuse, several
from cria_tricks.parallel.timetable import Pass
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches import folds
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="exact within rounding", lesson="pipeline_parallel", switches=("strategy=pipeline",))
IN_PIECES = True
REFERENCE = ("one_forward_one_backward", "step")
PLAIN = """
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

stage = PipelineStage(my_blocks, stage_index=rank, num_stages=stages, device=device)
schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=summed_loss, scale_grads=False)
if rank == 0:
    schedule.step(input_ids)
elif rank == stages - 1:
    schedule.step(target=labels)
else:
    schedule.step()
"""

NOT_LORA = {
    "none": "an embedding that is tied to the head would train in two stages",
    "head": "only the last stage would train",
    "prompt_tuning": "only the first stage would train, and rows would grow in all",
    "side_network": "only the last stages would train",
}
"""Value of ``tricks.peft`` -> why a pipeline refuses it; only ``lora`` works."""


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Return the order of a stage's passes in 1F1B (Narayanan et al., sec. 2.2, fig. 4, top).

    First come as many forward passes as there are later stages (the warm-up), then one forward and one backward pass in
    turn, and at last the remaining backward passes. So at most ``stages - stage`` micro-batches are under way at once.

    Examples:
        >>> "".join(what for what, _ in one_forward_one_backward(0, 3, 5))
        'FFFBFBFBBB'
    """
    forward, backward = ([(what, number) for number in range(micro_batches)] for what in "FB")
    ahead = min(stages - 1 - stage, micro_batches)
    in_turn = chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *in_turn, *backward[micro_batches - ahead :]]


def gpipe(stage: int, stages: int, micro_batches: int) -> list[Pass]:
    """Return a stage's passes in GPipe (Huang et al., sec. 2.2): all forward passes, then all backward passes.

    So all micro-batches are under way at once.
    """
    return [(what, number) for what in "FB" for number in range(micro_batches)]


def step(
    run: Callable[[torch.Tensor | None, int], torch.Tensor],
    passes: Sequence[Pass],
    stage: int,
    stages: int,
    hidden: torch.Tensor,
) -> int:
    """Run all passes of one stage in a step, over plain sends and receives. The process of rank ``stage`` calls this.

    Args:
        run: the forward pass of the stage: maps its input (B, T, D) and the number of the micro-batch to its output.
            The first stage gets ``None`` and takes its rows itself. The last one returns the micro-batch's share of
            the loss.
        passes: from :func:`one_forward_one_backward` or :func:`gpipe`.
        stage: the number of this stage.
        stages: the number of stages.
        hidden: a tensor with the shape, dtype and device of the hidden states between two stages.

    Returns:
        The most micro-batches that were under way at once. The summed gradients are in ``.grad``.
    """
    first = stage == 0
    last = stage == stages - 1
    # micro-batch -> its input and output, from its forward to its backward pass
    kept: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
    sent: list[tuple[Any, torch.Tensor]] = []
    most = 0

    def receive(source: int) -> torch.Tensor:
        found = torch.empty_like(hidden)
        dist.recv(found, source)
        return found

    def send(tensor: torch.Tensor, to: int) -> None:
        # Not dist.send: it waits until the other side receives, and the other side may wait in a send to this process.
        sent.append((dist.isend(tensor, to), tensor))

    for what, number in passes:
        if what == "F":
            x_BTD = None if first else receive(stage - 1).requires_grad_()
            y_BTD = run(x_BTD, number)
            kept[number] = x_BTD, y_BTD
            most = max(most, len(kept))
            if not last:
                send(y_BTD.detach(), stage + 1)
        else:
            x_BTD, y_BTD = kept.pop(number)
            y_BTD.backward(None if last else receive(stage + 1))
            if x_BTD is not None and x_BTD.grad is not None:
                send(x_BTD.grad, stage - 1)
    for work, _ in sent:
        work.wait()
    return most


def bubble(stages: int, micro_batches: int) -> float:
    """Return the share of a step in which a stage is idle: S - 1 of k + S - 1 slots, in 1F1B and in GPipe alike.

    A slot is the time of one micro-batch in one stage, forward and backward. Narayanan et al. divide the same idle time
    by the working time instead, so their bubble is (S - 1) / k.

    Examples:
        >>> bubble(4, 12)
        0.2
    """
    return (stages - 1) / (micro_batches + stages - 1)


def switch_on(plan: Plan, recipe: Recipe, processes: int) -> Plan:
    """Divide the micro-batches of each window among the pipelines; a pipeline gets its share of a step at once."""
    several("pipeline", processes)
    pipelines = recipe.parallel.pipelines
    stages = processes // pipelines
    if processes % pipelines or stages < 2:
        raise BadInput(
            f"parallel.pipelines={pipelines} with {processes} processes: each pipeline takes as many, and two or more; "
            f"start {2 * pipelines}"
        )
    for peft, why in NOT_LORA.items():
        refuse(recipe, "peft", (peft,), f"{why}; set tricks.peft=lora")
    if recipe.data.stream:
        raise BadInput(
            "parallel.strategy=pipeline with data.stream=true: all rows get the length of the longest, which a stream "
            "does not know; set data.stream=false"
        )
    k = recipe.tricks.gradient_accumulation
    mine = k // pipelines
    if k % pipelines or mine < stages:
        enough = math.ceil(max(k, processes) / pipelines) * pipelines
        raise BadInput(
            f"parallel.strategy=pipeline: tricks.gradient_accumulation={k} with {processes} processes: a pipeline "
            f"takes at least as many of a step's micro-batches as it has stages ({stages}), and no more than another "
            f"one; set tricks.gradient_accumulation={enough}"
        )
    plan = plan.with_(
        "parallel",
        strategy="pipeline",
        data=pipelines,
        stages=stages,
        micro_batches=mine,
        schedule=recipe.parallel.pipeline_schedule,
        stage_blocks=recipe.parallel.stage_blocks,
    )
    return plan.refine("training", gradient_accumulation_steps=1)  # the schedule accumulates, not the trainer


def spread(total: torch.nn.Module, plan: Plan, world: World) -> torch.nn.Module:
    """Remove from a model, in place, all weights that this process's stage does not need.

    Args:
        total: holds the model, and maps a micro-batch to the sum of its losses.
        plan: the plan, which says how many blocks each stage has.
        world: the processes.
    """
    model: Any = total.model
    cut(model, parts_of(plan.parallel, model)[world.stage])
    return total


def window(total: torch.nn.Module, world: World, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Return an empty context: the schedule runs a whole window, and the gradients are summed after it."""
    return contextlib.nullcontext()


def traffic(
    recipe: Recipe, shape: Shape, processes: int, stage: int = 0, tokens: int | None = None, shares: int = 1
) -> list[Call]:
    """Return what one stage sends in an optimizer step. The first step sends more: torch exchanges shapes before it.

    Args:
        recipe: ``train.batch_size`` rows a micro-batch, ``tricks.gradient_accumulation`` micro-batches a step.
        shape: the model's shape.
        processes: the number of stages, one process each.
        stage: the number of this stage.
        tokens: the tokens of a row; all are padded to the longest. ``data.max_length`` if left out.
        shares: the number of pipelines that share the micro-batches.
    """
    hidden = hidden_bytes(recipe, shape, tokens or recipe.data.max_length)
    k = recipe.tricks.gradient_accumulation // shares
    calls = [
        Call("all_reduce", 2 * 8, 1, processes, "the loss, and the seconds worked"),
        Call("all_reduce", 8, 1, processes, "the square of the gradient's norm"),
    ]
    if recipe.tricks.precision == "fp16":
        calls.append(Call("all_reduce", 4, 1, processes, "whether gradients overflowed"))
    if stage > 0:
        calls.append(Call("send", hidden, k, 2, f"the hidden states' gradients, back to stage {stage - 1}"))
    if stage < processes - 1:
        calls.append(Call("send", hidden, k, 2, f"hidden states, on to stage {stage + 1}"))
    return calls


def hidden_bytes(recipe: Recipe, shape: Shape, tokens: int) -> int:
    """Return the size of a micro-batch's hidden states between two blocks, B T D numbers [bytes]."""
    return recipe.train.batch_size * tokens * shape.width * folds.step_of(recipe, shape, T4).hidden_itemsize
