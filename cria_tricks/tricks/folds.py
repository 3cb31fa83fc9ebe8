"""The bill of a recipe: plain fp32 full fine-tuning, folded over the same tricks that switch a recipe on."""

from cria_tricks.hardware.device import Device
from cria_tricks.memory.block import FP32
from cria_tricks.memory.estimate import MemoryEstimate
from cria_tricks.memory.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.tricks import TRICKS


def estimate(
    recipe: Recipe, shape: Shape, device: Device, tokens: int | None = None, trained_tokens: int | None = None
) -> MemoryEstimate:
    """Fold a recipe over the tricks.

    Args:
        recipe: what is wanted.
        shape: of the model.
        device: the machine it is meant for.
        tokens: of a row; ``data.max_length`` when left out.
        trained_tokens: of a micro-batch; all that can be when left out.
    """
    batch, tokens = recipe.train.batch_size, tokens or recipe.data.max_length
    memory = MemoryEstimate(
        shape=shape,
        device=device,
        batch=batch,
        tokens=tokens,
        trained_tokens=batch * (tokens - 1) if trained_tokens is None else trained_tokens,
        matrices=FP32 * shape.layers * sum(d_in * d_out for d_in, d_out in shape.packable.values()),
        learning_blocks=shape.layers,
    )
    for trick in TRICKS:
        memory = trick.estimate(memory, shape, recipe)
    return memory
