r"""The bill by hand for one of N processes: what each strategy divides, and what it holds whole.

The estimate of one process (``bill/moments.py``) is taken for what a process computes, and its moments are changed:

- **ddp**: the whole model, and gradients that lie in the buckets they travel in through the whole step;
- **zero1**, **zero2**, on paper: of that, 1 / N of the optimizer states, then of the gradients too (Rajbhandari et al.
  2020, arXiv:1910.02054, sec. 5.1 and 5.2);
- **fsdp** (ZeRO-3, sec. 5.3): 1 / N of every tensor, and some of them whole for a while: ``fsdp_bytes.py``;
- **tensor**, **ddp_tensor**: the blocks of a model with 1 / N of the heads and of the MLP's width. So matrices, LoRA's
  thin ones and what is kept inside a block follow from the same formulas; all that is D wide stays whole;
- **pipeline**, **model**: a stage's blocks, with the embedding on the first and the head on the last. Of a pipeline's
  stage s of S also what the S - s micro-batches keep that are under way in 1F1B (all k in GPipe); what torch
  receives into: k hidden states from the stage before, and k gradients from the stage behind; and with the full loss
  the logits that the last stage puts out, which torch keeps for the backward pass.

Not in it: what NCCL allocates for itself, and the sums of tensor parallelism while they are under way.
"""

from dataclasses import dataclass, replace

from cria_tricks.bill.bill import STATE, Bill
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.fsdp_bytes import divided_up, sharded_moments, smaller
from cria_tricks.bill.moments import moments
from cria_tricks.bill.rows import Moment, Row
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import Device
from cria_tricks.load.stages import block_counts
from cria_tricks.models.shape import Shape, refuse_undivided
from cria_tricks.recipe import Recipe
from cria_tricks.tricks.folds import facts

STRATEGIES = ("none", "ddp", "zero1", "zero2", "fsdp", "tensor", "ddp_tensor", "pipeline", "model")


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
) -> Bill:
    """Estimate what the process needs that needs most.

    Args:
        recipe: what is wanted, whatever the number of processes. ``parallel.tensor_size`` counts for ``ddp_tensor``;
            ``parallel.pipelines``, ``pipeline_schedule`` and ``stage_blocks`` for ``pipeline``.
        shape: of the model.
        device: that each process has for itself.
        strategy: of :data:`STRATEGIES`.
        processes: how many; for ``model``, cards.
        stage: of ``pipeline`` or ``model``; the one with the largest peak when left out.
        tokens: of a row; ``data.max_length`` when left out.
        trained_tokens: of a micro-batch; all that can be when left out.

    Raises:
        BadInput: for a strategy that is none, or what it cannot divide.
    """
    if strategy in ("pipeline", "model"):
        parts = stages_of(recipe, shape, strategy, processes)
        wanted = parts if stage is None else parts[stage : stage + 1]
        found = (_stage(part, device, strategy, processes, tokens, trained_tokens) for part in wanted)
        return max(found, key=lambda one: one.peak_bytes)
    own, part = local(recipe, shape, strategy, processes)
    memory = facts(own, part, device, tokens, trained_tokens)
    if strategy in ("ddp", "zero1", "zero2"):
        # The buckets are there from the beginning, and are added to.
        memory = replace(memory, waiting_gradient_bytes=FP32 * memory.trained_weights)
    steps = moments(memory)
    if strategy == "fsdp":
        steps = sharded_moments(memory, processes)
    elif strategy == "ddp_tensor":
        steps.insert(-1, _averaging(memory, steps[-1]))
    divided = {"zero1": STATE[4:], "zero2": STATE[3:]}.get(strategy, ())
    steps = [smaller(moment, {row.name: divided_up(row.bytes, processes) for row in moment.rows if row.name in divided})
             for moment in steps]  # fmt: skip
    return Bill(memory, tuple(steps), strategy, processes)


def local(recipe: Recipe, shape: Shape, strategy: str, processes: int) -> tuple[Recipe, Shape]:
    """The recipe and the model of what one process computes: its part of the micro-batches, and of each block.

    Raises:
        BadInput: for a strategy that is none, or what it cannot divide.
    """
    if strategy not in STRATEGIES:
        raise BadInput(f"strategy {strategy}: there are {', '.join(STRATEGIES)}")
    tensor = {"tensor": processes, "ddp_tensor": recipe.parallel.tensor_size}.get(strategy, 1)
    if processes % tensor:
        raise BadInput(f"{strategy}: {processes} processes make no groups of {tensor}")
    shares = processes // tensor if strategy in ("ddp", "zero1", "zero2", "fsdp", "ddp_tensor") else 1
    window = {"gradient_accumulation": divided_up(recipe.tricks.gradient_accumulation, shares)}
    own = recipe.model_copy(update={"tricks": recipe.tricks.model_copy(update=window)})
    if tensor == 1:
        return own, shape
    refuse_undivided(shape.name, shape.heads, shape.kv_heads, shape.inner, tensor)
    heads, kv_heads, inner = (width // tensor for width in (shape.heads, shape.kv_heads, shape.inner))
    return own, replace(shape, heads=heads, kv_heads=kv_heads, inner=inner)


def _averaging(memory: StepFacts, optimizer_step: Moment) -> Moment:
    """Before the optimizer steps, data x tensor puts all gradients into one tensor to be averaged."""
    flat = Row("gradients: averaged", memory.trained_weights * FP32, "in one tensor, which travels")
    return Moment("averaging", (*optimizer_step.rows, flat))


@dataclass(frozen=True)
class StagePart:
    """What one stage has of a model.

    Attributes:
        recipe: with the micro-batches of its pipeline.
        shape: its blocks; a vocabulary only where the embedding or the head is.
        number: of the stage, from 0.
        stages: how many there are.
        has_head: whether the head is here.
    """

    recipe: Recipe
    shape: Shape
    number: int
    stages: int
    has_head: bool

    @property
    def is_last(self) -> bool:
        """Whether the last norm is here."""
        return self.number == self.stages - 1


def stages_of(recipe: Recipe, shape: Shape, strategy: str, processes: int) -> list[StagePart]:
    """Divide a model among the stages of a pipeline, or among the cards of a device map.

    Args:
        recipe: what is wanted.
        shape: of the model.
        strategy: ``pipeline`` or ``model``.
        processes: of all pipelines; for ``model``, cards.

    Raises:
        BadInput: if the model has too few blocks, or the processes make no pipelines.
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
    # transformers leaves a tied head where the embedding is; a pipeline's last stage has its own copy.
    head = 0 if shape.tied and not piped else stages - 1
    found = []
    for number, layers in enumerate(blocks):
        # A vocabulary of no words is no embedding, no head and no logits; and nobody has both, but for a tied one.
        words = shape.vocabulary if number in (0, head) else 0
        part = replace(shape, layers=layers, vocabulary=words, tied=True)
        found.append(StagePart(own, part, number, stages, number == head))
    return found


def _stage(
    part: StagePart, device: Device, strategy: str, processes: int, tokens: int | None, trained_tokens: int | None
) -> Bill:
    """Bill one stage: the moments of a model with its blocks, and what waits beside them."""
    memory = facts(part.recipe, part.shape, device, tokens, trained_tokens)
    steps = moments(memory)
    at_the_end = () if part.has_head else ("loss", "log-softmax", "head", "last norm")
    beside = _other_micro_batches(part, memory, steps) if strategy == "pipeline" else ()
    no_norm = 0 if part.is_last else part.shape.width * memory.other_weight_itemsize
    found = []
    for moment in steps:
        if moment.name in at_the_end:
            continue
        rows = (_less(row, "weights: all others", no_norm) for row in moment.rows)
        waiting = beside[-1:] if moment.name == "optimizer step" else beside
        found.append(Moment(moment.name, (*rows, *waiting)))
    if strategy == "pipeline" and part.recipe.parallel.pipelines > 1:
        found.insert(-1, _averaging(memory, found[-1]))
    return Bill(memory, tuple(found), strategy, processes)


def _other_micro_batches(part: StagePart, memory: StepFacts, steps: list[Moment]) -> tuple[Row, ...]:
    """What waits in a stage of a pipeline while it works on one micro-batch."""
    k = part.recipe.tricks.gradient_accumulation
    under_way = k if part.recipe.parallel.pipeline_schedule == "gpipe" else min(part.stages - part.number, k)
    kept = next(row.bytes for row in steps[0].rows if row.name == "blocks: waiting")
    logits = 0
    if part.has_head and "log-softmax" in memory.loss_moments(memory):  # of all tokens at once, not chunk by chunk
        logits = memory.all_tokens * part.shape.vocabulary
    kept += logits * FP32  # the loss keeps their logarithms
    hidden = memory.all_tokens * part.shape.width * memory.hidden_itemsize
    put_out = logits * memory.product_itemsize
    neighbours = 2 - (part.number == 0) - part.is_last
    return (
        Row("blocks: other micro-batches", (under_way - 1) * kept, f"{under_way - 1} more are under way"),
        Row("pipeline: logits", under_way * put_out, "put out, and kept until the backward pass"),
        Row("pipeline: buffers", k * hidden * neighbours, f"what comes in, for all {k} micro-batches"),
    )


def _less(row: Row, name: str, size: int) -> Row:
    return replace(row, bytes=row.bytes - size) if row.name == name else row
