r"""Estimate the memory of one of N processes: what each strategy divides, and what every process holds whole.

We estimate what one process computes with the formulas for a single process (``bill/moments.py``), and then change the
moments of its step:

- **ddp**: the whole model. The gradients live in DDP's all-reduce buckets, through the whole step.
- **fsdp** (ZeRO-3, Rajbhandari et al. 2020, arXiv:1910.02054, sec. 5.3): 1 / N of every tensor, and some tensors
  unsharded for a while; see ``bill/fsdp.py``.
- **tensor**, **ddp_tensor**: blocks with 1 / M of the heads and of the MLP's width, for groups of M processes (with
  tensor, M = N). So the same formulas give the sizes of the matrices, of LoRA's A and B, and of the activations that a
  block saves. Every tensor of the model's width D stays whole; with ``parallel.sequence=true`` norms, block inputs and
  residual stream have 1 / M of the tokens.
- **context**: the whole model, for 1 / N of each row's tokens; see ``parallel/ring_bytes.py``.
- **pipeline**, **model**: the blocks of one stage, with the embedding in the first stage. The head is in the last
  stage of a pipeline, and on the first card of **model**. A pipeline's stage s of S (counted from 0) also holds
  tensors of its other micro-batches. There are k of these; in 1F1B at most S - s are under way at once, in GPipe all
  k. Those under way have saved activations, and what the stage has put out, which torch keeps for the backward pass:
  hidden states, or with the full loss the last stage's logits. For all k there are torch's receive buffers: hidden
  states from the stage before, gradients from the one behind.

Not counted: what NCCL allocates for itself, and the tensors that tensor parallelism is all-reducing, or filling up with
zeros.
"""

from dataclasses import dataclass, replace

from cria_tricks.bill.bill import Bill
from cria_tricks.bill.fsdp import divided_up, sharded_moments
from cria_tricks.bill.moments import moments
from cria_tricks.bill.operation import FP32, Line, Moment
from cria_tricks.bill.step import Step
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import Device
from cria_tricks.load.stages import block_counts
from cria_tricks.models.shape import Shape, refuse_undivided
from cria_tricks.parallel.ring_bytes import through_the_ring, whole_rows
from cria_tricks.parallel.tensor_calls import partial_weights
from cria_tricks.parallel.zigzag import own_tokens
from cria_tricks.predict.evaluation import Evaluated, with_evaluation
from cria_tricks.recipe import Recipe
from cria_tricks.switches.folds import step_of
from cria_tricks.switches.gradient_checkpointing import in_stage

STRATEGIES = ("none", "ddp", "fsdp", "tensor", "ddp_tensor", "context", "pipeline", "model")
"""The strategies that can be estimated."""


def per_process(
    recipe: Recipe,
    shape: Shape,
    device: Device,
    strategy: str,
    processes: int,
    *,
    stage: int | None = None,
    tokens: int | None = None,
    trained_tokens: int | None = None,
    evaluated: Evaluated | None = None,
) -> Bill:
    """Estimate the memory of the process that needs most.

    Args:
        recipe: the recipe of the whole run. ``parallel.tensor_size`` matters for ``ddp_tensor`` only,
            ``parallel.reduce`` for ``fsdp`` only; ``parallel.pipelines``, ``pipeline_schedule`` and ``stage_blocks``
            for ``pipeline`` only.
        shape: the model's shape.
        device: the card of each process.
        strategy: one of :data:`STRATEGIES`; it may differ from the recipe's.
        processes: the number of processes; for ``model``, which has one process, the number of cards.
        stage: the stage to estimate, from 0, for ``pipeline`` or ``model``; when left out, the one with the largest
            peak.
        tokens: the tokens of a row; ``data.max_length`` when left out.
        trained_tokens: the trained tokens of a micro-batch; when left out, all but the first token of each row.
        evaluated: the rows of the run's evaluations; only the training step is estimated when left out.

    Raises:
        BadInput: for an unknown strategy, or if it cannot divide the model or the processes.
    """
    if strategy in ("pipeline", "model"):
        stages = stages_of(recipe, shape, strategy, processes)
        wanted = stages if stage is None else stages[stage : stage + 1]
        bills = [_stage(one, device, strategy, processes, tokens, trained_tokens) for one in wanted]
    elif strategy == "context":
        bills = [_of_own_tokens(recipe, shape, device, processes, tokens, trained_tokens)]
    else:
        bills = [_alike(recipe, shape, device, strategy, processes, tokens, trained_tokens)]
    if evaluated is not None:
        bills = [with_evaluation(one, recipe, evaluated, tokens) for one in bills]
    return max(bills, key=lambda one: one.peak_bytes)


def _alike(
    recipe: Recipe,
    shape: Shape,
    device: Device,
    strategy: str,
    processes: int,
    tokens: int | None,
    trained_tokens: int | None,
) -> Bill:
    """Estimate a training step in one of several processes that all need the same."""
    own, part = local(recipe, shape, strategy, processes)
    step = step_of(own, part, device, tokens, trained_tokens)
    step = replace(step, stream_pieces=stream_pieces(recipe, strategy, processes))
    if strategy == "ddp":
        # DDP's buckets exist from the beginning of the step, and new gradients are added to them. So they count as
        # gradients of earlier micro-batches.
        step = replace(step, waiting_gradient_bytes=FP32 * step.trained_weights)
    found = moments(step)
    if strategy == "fsdp":
        found = sharded_moments(step, processes, recipe.parallel.reduce)
    elif strategy in ("tensor", "ddp_tensor"):
        # Groups put all gradients into one tensor; before that, a group's processes those of whole weights among parts.
        summed = step.trained_weights if strategy == "ddp_tensor" else partial_weights(recipe, shape)
        if summed:
            found.insert(-1, _averaging(summed, found[-1]))
    return Bill(step, tuple(found), strategy, processes)


def local(recipe: Recipe, shape: Shape, strategy: str, processes: int) -> tuple[Recipe, Shape]:
    """Return the recipe and the shape of what one process computes: its micro-batches, and its part of each block.

    Raises:
        BadInput: for an unknown strategy, or if it cannot divide the processes or the model's widths.
    """
    if strategy not in STRATEGIES:
        raise BadInput(f"strategy {strategy}: there are {', '.join(STRATEGIES)}")
    tensor = _tensor_size(recipe, strategy, processes)
    if processes % tensor:
        raise BadInput(f"{strategy}: {processes} processes make no groups of {tensor}")
    # The data-parallel shares into which the micro-batches of a step are divided.
    shares = processes // tensor if strategy in ("ddp", "fsdp", "ddp_tensor") else 1
    window = {"gradient_accumulation": divided_up(recipe.tricks.gradient_accumulation, shares)}
    own = recipe.model_copy(update={"tricks": recipe.tricks.model_copy(update=window)})
    if strategy == "context":
        length = {"max_length": own_tokens(recipe.data.max_length, processes)}
        own = own.model_copy(update={"data": recipe.data.model_copy(update=length)})
    if tensor == 1:
        return own, shape
    refuse_undivided(shape.name, shape.heads, shape.kv_heads, shape.inner, tensor)
    heads, kv_heads, inner = (width // tensor for width in (shape.heads, shape.kv_heads, shape.inner))
    return own, replace(shape, heads=heads, kv_heads=kv_heads, inner=inner)


def stream_pieces(recipe: Recipe, strategy: str, processes: int) -> int:
    """Return how many processes divide the tokens of the residual stream and of the norms among them."""
    return _tensor_size(recipe, strategy, processes) if recipe.parallel.sequence else 1


def _tensor_size(recipe: Recipe, strategy: str, processes: int) -> int:
    return {"tensor": processes, "ddp_tensor": recipe.parallel.tensor_size}.get(strategy, 1)


def _of_own_tokens(
    recipe: Recipe, shape: Shape, device: Device, processes: int, tokens: int | None, trained_tokens: int | None
) -> Bill:
    """Estimate a process under context parallelism, which computes the same part of each row's tokens as all others."""
    own, part = local(recipe, shape, "context", processes)
    whole = tokens or recipe.data.max_length
    rows = own.train.batch_size
    mine = own_tokens(whole, processes)
    trained = rows * (whole - 1) if trained_tokens is None else trained_tokens
    step = through_the_ring(step_of(own, part, device, mine, min(trained, rows * mine)))
    found = moments(step)
    found.insert(-1, _averaging(step.trained_weights, found[-1]))
    beside = whole_rows(step, whole)
    return Bill(step, tuple(replace(one, lines=(*one.lines, beside)) for one in found), "context", processes)


def _averaging(weights: int, optimizer_step: Moment) -> Moment:
    """Return the moment at which processes put the gradients of some weights into one tensor to all-reduce it.

    It comes just before the optimizer step, so everything of that moment is alive, too.
    """
    flat = Line("gradients: all-reduce copy", weights * FP32, "gradients in one flat tensor")
    return Moment("averaging", (*optimizer_step.lines, flat))


@dataclass(frozen=True)
class StagePart:
    """The part of a model that one stage has.

    Attributes:
        recipe: the recipe, with the micro-batches of this stage's pipeline, and its number of checkpointed blocks.
        shape: the shape of a model with the blocks of this stage; its vocabulary is 0 in a stage that has neither the
            embedding nor the head.
        number: the number of the stage, from 0.
        stages: the number of stages.
        has_head: whether this stage has the head.
    """

    recipe: Recipe
    shape: Shape
    number: int
    stages: int
    has_head: bool

    @property
    def is_last(self) -> bool:
        """Whether this is the last stage, which has the last norm."""
        return self.number == self.stages - 1


def stages_of(recipe: Recipe, shape: Shape, strategy: str, processes: int) -> list[StagePart]:
    """Divide a model among the stages of a pipeline, or among the cards of a device map.

    Args:
        recipe: the recipe of the whole run.
        shape: the model's shape.
        strategy: ``pipeline`` or ``model``.
        processes: the processes of all pipelines together; for ``model``, the number of cards.

    Raises:
        BadInput: if the model has too few blocks, or the processes cannot be divided among the pipelines.
    """
    piped = strategy == "pipeline"
    pipelines = recipe.parallel.pipelines if piped else 1
    stages = processes // pipelines
    if processes % pipelines or not 2 <= stages <= shape.layers:
        raise BadInput(
            f"{strategy} of {stages} stages: {shape.name} has {shape.layers} blocks; use 2 or more, and no more than "
            "these"
        )
    window = {"gradient_accumulation": divided_up(recipe.tricks.gradient_accumulation, pipelines)}
    own = recipe.model_copy(update={"tricks": recipe.tricks.model_copy(update=window)})
    if piped:
        blocks = block_counts(recipe.parallel.stage_blocks, shape.layers, stages)
    else:
        cards = [layer * stages // shape.layers for layer in range(shape.layers)]
        blocks = [cards.count(number) for number in range(stages)]
    # The device map puts the head where the embedding and the labels are. A pipeline's last stage has its own.
    head = stages - 1 if piped else 0
    found = []
    for number, layers in enumerate(blocks):
        # With a vocabulary of 0 the formulas count no embedding, no head and no logits. With tied=True they count one
        # matrix of this size, and only a stage that has both embedding and head can have two.
        words = shape.vocabulary if number in (0, head) else 0
        part = replace(shape, layers=layers, vocabulary=words, tied=shape.tied or number != 0 or head != 0)
        here = in_stage(own, sum(blocks[:number]), layers)
        found.append(StagePart(here, part, number, stages, number == head))
    return found


def _stage(
    part: StagePart, device: Device, strategy: str, processes: int, tokens: int | None, trained_tokens: int | None
) -> Bill:
    """Estimate one stage: the moments of a model with its blocks only, plus a pipeline's other micro-batches."""
    step = step_of(part.recipe, part.shape, device, tokens, trained_tokens)
    if strategy != "pipeline":
        return Bill(step, _moments_of(part, step, 0), strategy, processes)
    k = part.recipe.tricks.gradient_accumulation
    under_way = k if part.recipe.parallel.pipeline_schedule == "gpipe" else min(part.stages - part.number, k)
    found = [Bill(step, _moments_of(part, step, under_way), strategy, processes)]
    if under_way == k:
        # All of the step are under way only until the first backward pass ends. Until then there are no gradients.
        first = replace(step, waiting_gradient_bytes=0)
        found[0] = Bill(first, _moments_of(part, first, k), strategy, processes)
        if k > 1:
            found.append(Bill(step, _moments_of(part, step, k - 1), strategy, processes))
    return max(found, key=lambda one: one.peak_bytes)


def _moments_of(part: StagePart, step: Step, under_way: int) -> tuple[Moment, ...]:
    """Return the moments of a stage while so many micro-batches are under way; 0 without a pipeline."""
    alone = moments(step)
    at_the_end = () if part.has_head else ("loss", "log-softmax", "head", "last norm")
    beside = _other_micro_batches(part, step, alone, under_way) if under_way else ()
    # The formulas give every model a last norm, of D weights; only the last stage has it.
    no_norm = 0 if part.is_last else part.shape.width * step.other_weight_itemsize
    found = []
    for moment in alone:
        if moment.name in at_the_end:
            continue
        lines = (_less(line, "weights: all others", no_norm) for line in moment.lines)
        waiting = beside[-1:] if moment.name == "optimizer step" else beside  # by then only the buffers are left
        found.append(Moment(moment.name, (*lines, *waiting)))
    if under_way and part.recipe.parallel.pipelines > 1:
        found.insert(-1, _averaging(step.trained_weights, found[-1]))
    return tuple(found)


def _other_micro_batches(part: StagePart, step: Step, alone: list[Moment], under_way: int) -> tuple[Line, ...]:
    """Return the lines of what a pipeline's stage holds, besides the micro-batch on which it works.

    Args:
        part: the stage.
        step: its step.
        alone: the moments of its step, for one micro-batch.
        under_way: how many micro-batches are under way, with that one.

    Returns:
        The saved activations of other micro-batches, what was put out and is kept, and the receive buffers.
    """
    k = part.recipe.tricks.gradient_accumulation
    kept = next(line.bytes for line in alone[0].lines if line.name == "saved activations")
    logits = 0
    if part.has_head and "log-softmax" in step.loss_moments(step):  # the full loss, of all tokens at once
        logits = step.all_tokens * part.shape.vocabulary
    kept += logits * FP32  # the loss saves the result of log-softmax
    hidden = step.all_tokens * part.shape.width * step.hidden_itemsize
    put_out = logits * step.product_itemsize or hidden
    neighbours = 2 - (part.number == 0) - part.is_last  # a stage at either end has one neighbour only
    return (
        Line("saved: other micro-batches", (under_way - 1) * kept, f"activations and logits of {under_way - 1} more"),
        Line("pipeline: outputs", under_way * put_out, "logits or hidden states, kept until the backward pass"),
        Line("pipeline: receive buffers", k * hidden * neighbours, f"for all {k} micro-batches"),
    )


def _less(line: Line, name: str, size: int) -> Line:
    """Return a line of the bill, reduced by a number of bytes if it has this name."""
    return replace(line, bytes=line.bytes - size) if line.name == name else line
