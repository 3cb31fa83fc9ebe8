r"""The bill by hand for one of N processes: what each strategy divides, and what it holds whole.

The estimate of one process (``bill/moments.py``) is taken for what a process computes, and its moments are changed:

- **ddp**: the whole model, and gradients that lie in the buckets they travel in through the whole step;
- **zero1**, **zero2**, on paper: of that, 1 / N of the optimizer states, then of the gradients too (Rajbhandari et al.
  2020, arXiv:1910.02054, sec. 5.1 and 5.2);
- **fsdp** (ZeRO-3, sec. 5.3): 1 / N of every tensor, and some of them whole for a while: ``fsdp_bytes.py``;
- **tensor**, **ddp_tensor**: the blocks of a model with 1 / N of the heads and of the MLP's width. So matrices, LoRA's
  thin ones and what is kept inside a block follow from the same formulas; all that is D wide stays whole;
- **pipeline**, **model**: a stage's blocks; of a pipeline's stage s of S also what S - s micro-batches keep.

Not in it: what NCCL allocates for itself, and the sums of tensor parallelism while they are under way.
"""

from dataclasses import replace

from cria_tricks.bill.bill import STATE, Bill
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.fsdp_bytes import divided_up, sharded_moments, smaller
from cria_tricks.bill.moments import moments
from cria_tricks.bill.rows import Moment, Row
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.device import Device
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
        recipe: what is wanted, whatever the number of processes; ``parallel.tensor_size`` counts for ``ddp_tensor``.
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
        if not 2 <= processes <= shape.layers:
            raise BadInput(f"{strategy} of {processes} stages: {shape.name} has {shape.layers} blocks; use 2 or more, "
                           "and no more than these")  # fmt: skip
        stages = range(processes) if stage is None else (stage,)
        found = (_stage(recipe, shape, device, strategy, processes, number, tokens) for number in stages)
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


def _stage(
    recipe: Recipe, shape: Shape, device: Device, strategy: str, stages: int, number: int, tokens: int | None
) -> Bill:
    """One stage's blocks; the embedding is in the first, last norm and head in the last."""
    first, last, piped = number == 0, number == stages - 1, strategy == "pipeline"
    blocks = [layer * stages // shape.layers for layer in range(shape.layers)].count(number)
    if piped:  # equally many, and one more in the first ones
        blocks = shape.layers // stages + (number < shape.layers % stages)
    # transformers leaves a tied head where the embedding is; a pipeline's last stage has its own copy.
    head = first if shape.tied and not piped else last
    # A vocabulary of no words is no embedding, no head and no logits; and nobody has both, but for a tied one.
    part = replace(shape, layers=blocks, vocabulary=shape.vocabulary * (first or head), tied=True)
    memory = facts(recipe, part, device, tokens)
    steps = moments(memory)
    at_the_end = {"loss", "log-softmax", "head", "last norm"} if not head else set()
    waiting = next(row.bytes for row in steps[0].rows if row.name == "blocks: waiting")
    k, hidden = recipe.tricks.gradient_accumulation, memory.all_tokens * part.width * memory.hidden_itemsize
    under_way = min(stages - number, k) if piped else 1
    more = (
        Row("blocks: other micro-batches", (under_way - 1) * waiting, f"{under_way - 1} more are under way"),
        Row("pipeline: buffers", piped * k * hidden * (2 - first - last), f"what comes in, for all {k} micro-batches"),
    )
    no_norm = {} if last else {"weights: all others": -part.width * memory.other_weight_itemsize}
    found = [
        Moment(moment.name, tuple(replace(row, bytes=row.bytes + no_norm.get(row.name, 0)) for row in moment.rows)
               + (more if moment.name != "optimizer step" else more[1:]))
        for moment in steps if moment.name not in at_the_end
    ]  # fmt: skip
    return Bill(memory, tuple(found), strategy, stages)
