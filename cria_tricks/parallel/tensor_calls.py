"""Say which matrices tensor parallelism cuts, what its processes send in a step, and which gradients they sum."""

from cria_tricks.bill.calls import Call
from cria_tricks.hardware import T4
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.switches.folds import step_of
from cria_tricks.switches.gradient_checkpointing import kept_blocks

COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
"""Column-parallel matrices: their outputs are divided, so a process has some heads and a part of the MLP's inside."""
ROWS = ("o_proj", "down_proj")
"""Row-parallel matrices: their inputs are divided, so the outputs of all processes are summed."""
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
"""The matrices of attention."""


def traffic(recipe: Recipe, shape: Shape, processes: int, *, first: bool = True) -> list[Call]:
    """Return the collectives of an optimizer step, for rows of full length.

    They are all-reduces, whose sizes are the same for every N. With ``parallel.sequence=true`` each of them becomes an
    all-gather and a reduce-scatter, but not that of the gradients, and the last hidden states are gathered.

    Args:
        recipe: what is trained.
        shape: the shape of the model, or of a stage of it.
        processes: N, the number of processes.
        first: whether the first block of the shape is the model's first, which comes right after the embedding.
    """
    tricks = recipe.tricks
    # n: tokens of a micro-batch.
    n = recipe.train.batch_size * recipe.data.max_length
    step = step_of(recipe, shape, T4)  # any card would do: what is read here is the same on all
    adapted = step.adapted
    regions = 1 + (shape.experts == 1)  # attention, and the MLP unless it is a mixture of experts, which is not cut
    repeated = shape.layers - kept_blocks(recipe, shape) if tricks.gradient_checkpointing else 0
    # Recomputing a block stops at its last saved tensor. The sum behind the MLP comes later, unless a norm follows.
    forward = regions * (shape.layers + repeated) - repeated * (regions == 2 and not shape.ends_with_norm)
    backward = regions * shape.layers
    if first and adapted and not tricks.gradient_checkpointing:
        # The frozen embedding needs no gradient, so the first block's attention sums none, nor does its MLP if no
        # adapter comes before it.
        backward -= 1 + (regions == 2 and not set(ATTENTION) & set(adapted))
    of_partial = 4 * partial_weights(recipe, shape)
    sums = Call("all_reduce", of_partial, 1, processes, "fp32 gradients of whole weights between cut ones")
    passes: list[tuple[str, int, int, str]]
    if recipe.parallel.sequence:
        # Where attention's output in the first block has no gradient, none is gathered for it.
        outputs = regions * shape.layers - (backward < regions * shape.layers and not set(ATTENTION) & set(adapted))
        ends = 1 + (step.trains_all or bool(tricks.gradient_checkpointing and shape.scales_hidden))
        n += -n % processes  # zeros fill it up
        of_stream = n * shape.width * step.hidden_itemsize
        of_products = n * shape.width * step.product_itemsize
        passes = [
            ("all_gather", of_stream, regions * (shape.layers + repeated), "the inputs of attention and MLP"),
            ("all_gather", of_products, outputs, "the gradients of what o and down make"),
            ("all_gather", of_stream, ends, "the last hidden states, and the gradient of a trained embedding's result"),
            ("reduce_scatter", of_products, forward, "what o and down make"),
            ("reduce_scatter", of_stream, backward, "the gradients of the inputs of attention and MLP"),
        ]
    else:
        passes = [
            ("all_reduce", n * shape.width * step.product_itemsize, forward, "what o and down make"),
            ("all_reduce", n * shape.width * step.hidden_itemsize, backward,
             "the gradients of the inputs of attention and MLP"),
        ]  # fmt: skip
    calls = [
        Call(kind, size, times * tricks.gradient_accumulation, processes, why) for kind, size, times, why in passes
    ]
    return [call for call in (*calls, sums) if call.total]


def partial_weights(recipe: Recipe, shape: Shape) -> int:
    """Count the trained weights whose gradients ``tensor.add_up_partial`` sums."""
    whole = step_of(recipe, shape, T4)  # the same on any card
    if whole.trains_all:
        return shape.layers * 2 * shape.head_width * shape.qk_norm + recipe.parallel.sequence * _of_the_stream(shape)
    # Beside a row-parallel matrix it is B, of shape (D_out, r), and else A, of shape (r, D_in).
    cut = [name for name in whole.adapted if name in ATTENTION or shape.experts == 1]
    sides = [shape.linears[name][name in ROWS] for name in cut]
    return shape.layers * recipe.lora.r * sum(sides)


def _of_the_stream(shape: Shape) -> int:
    """Count the weights that see only the tokens of their process: norms, biases behind g, and a mixture of experts."""
    biases = sum(shape.linears[name][1] for name in ROWS if name in shape.biased)
    experts = 0
    if shape.experts > 1:
        experts = shape.experts * (3 * shape.width * shape.inner + shape.width)
    return shape.layers * (shape.norms * shape.width + biases + experts) + shape.width
