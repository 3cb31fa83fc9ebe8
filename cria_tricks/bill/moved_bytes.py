"""The bytes that a training step moves between a card and its memory, besides the numbers that products read and write.

Between two products lie norms, rotary embeddings, activations, residual sums and casts. Each reads whole tensors and
writes them back, one small operation after the other, so on a card with slow memory they take as long as the products.
The constants here are sums over the operations of transformers' Llama (5.23) under peft (0.21), in bytes for one
element, as an operation-by-operation count gives them; ``tests/hardware/test_cost.py`` counts again.
"""

from cria_tricks.bill.constants import BLOCK
from cria_tricks.bill.products import Blocks, adapted
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe

# Forward and backward, for one element of: the hidden states D wide, the MLP's inside F wide, queries and keys.
_BETWEEN = {
    "half": ((84, 206), (10, 18), (21, 34)),
    "mixed": ((106, 292), (10, 18), (38, 60)),
    "full": ((80, 250), (20, 36), (42, 66)),
}
# Compiled, a chain of operations reads its inputs once and writes its result once. Reasoned, not counted.
_COMPILED = ((16, 32), (6, 10), (4, 4))

# What autograd keeps, the same three, when nothing is checkpointed; each save is one, also of the same tensor.
_SAVED = {"half": (26, 8, 6), "mixed": (30, 8, 7), "full": (40, 16, 12)}

SCORE = (32, 34)
"""Forward and backward, for one of the B H T^2 scores, where no fused kernel keeps them on the chip."""
LOGIT = {"full": 36, "chunked": 52}
"""Forward and backward together, for one logit, fp32 from the loss on."""
LOGIT_SAVED = 8
"""For one logit of the full loss: the log-probabilities, which two operations save."""
STATES = {"adamw": 28, "adamw_8bit": 16}
"""For one trained weight, all in one kernel: read weight, gradient and two states, write all but the gradient."""
CLIP, UNSCALE, ACCUMULATE = 12, 8, 12
"""For one trained weight: the norm and the clipping, fp16's unscaling, one more micro-batch's gradient."""


def element_bytes(recipe: Recipe) -> int:
    """Bytes of a number in a product."""
    return 4 if recipe.tricks.precision == "fp32" else 2


def stream(recipe: Recipe) -> str:
    """In which precision hidden states go from block to block: ``half``, ``full``, or ``mixed``.

    Mixed is fp32 with 16-bit products: trained weights and the usual 4-bit preparation keep norms and embeddings in
    fp32, and everything that is added to them becomes fp32.
    """
    tricks = recipe.tricks
    if tricks.precision == "fp32":
        return "full"
    prepared = tricks.quantization != "none" and not (tricks.lean_preparation and tricks.peft == "lora")
    return "mixed" if prepared or tricks.peft == "none" else "half"


def stored_bytes(recipe: Recipe) -> float:
    """Bytes of a block's weight as it is stored."""
    tricks = recipe.tricks
    if tricks.quantization == "int8":
        return 1
    if tricks.quantization != "none":
        scale = 1 + 4 / 256 if tricks.double_quantization else 4
        return 0.5 + scale / BLOCK
    return 4 if tricks.peft == "none" else element_bytes(recipe)


def weights(recipe: Recipe, shape: Shape, blocks: Blocks) -> tuple[int, int, int]:
    """Bytes of the blocks' weights in one micro-batch: forward, once more, backward.

    A product reads them in the precision it computes in. What is stored otherwise is unpacked, or cast, to that first:
    read, and written. Autocast keeps its copy for the way back; 4-bit and int8 weights are unpacked a second time.
    """
    tricks, wide, stored = recipe.tricks, element_bytes(recipe), stored_bytes(recipe)
    unpack = stored + wide if stored != wide else 0
    back = float(wide)
    if tricks.quantization != "none":
        back += unpack
    if tricks.peft == "none":  # the gradient, and its cast to fp32
        back += wide + (wide + 4 if wide != 4 else 0)
    each = shape.block_linear_weights
    forward, again, backward = (blocks.passes[name] * each for name in ("forward", "again", "backward"))
    return round((unpack + wide) * forward), round((unpack + wide) * again), round(back * backward)


def head_weights(recipe: Recipe, shape: Shape, chunks: int) -> int:
    """Bytes of the head's weights in one micro-batch.

    Args:
        recipe: decides how they are stored.
        shape: the model's.
        chunks: of the chunked loss, which reads the whole head twice for each; 0 for the full loss.
    """
    wide, fp32 = element_bytes(recipe), stream(recipe) != "half" or recipe.tricks.peft == "head"
    cast = 4 + wide if fp32 and wide != 4 else 0
    return shape.embedding_weights * (cast + wide * (2 * chunks or 2))


def between(recipe: Recipe, shape: Shape) -> tuple[int, int]:
    """Bytes of what lies between a block's products, for one position: forward, backward."""
    widths = shape.width, shape.inner * shape.experts_per_token, shape.query_width + shape.kv_width
    each = _COMPILED if recipe.tricks.compile else _BETWEEN[stream(recipe)]
    forward, backward = (sum(w * e[way] for w, e in zip(widths, each, strict=True)) for way in (0, 1))
    thin = (0, 0) if recipe.tricks.compile else _around_lora(recipe, shape)
    return forward + thin[0], backward + thin[1]


def _around_lora(recipe: Recipe, shape: Shape) -> tuple[int, int]:
    """Casts of an adapter's input, its scaling and its sum, for one position."""
    wide = element_bytes(recipe)
    # peft casts the input to fp32 and autocast casts it back; where it is fp32 already only the second is left.
    cast = 0 if recipe.tricks.lean_preparation else {"half": 12, "mixed": 6, "full": 0}[stream(recipe)]
    forward = backward = 0
    for name in adapted(recipe, shape):
        (d_in, d_out), times = shape.linears[name], 1 if shape.copies(name) == 1 else shape.experts_per_token
        forward += times * (cast * d_in + 5 * wide * d_out)
        backward += times * ((cast + 3 * wide) * d_in + 2 * wide * d_out)
    return forward, backward


def saved(recipe: Recipe, shape: Shape, *, checkpointed: bool) -> int:
    """Bytes that a block keeps for the way back, for one position: what activation offload carries."""
    if checkpointed:
        return shape.width * (2 if stream(recipe) == "half" else 4)
    widths = shape.width, shape.inner * shape.experts_per_token, shape.query_width + shape.kv_width
    return sum(w * s for w, s in zip(widths, _SAVED[stream(recipe)], strict=True))


def optimizer(recipe: Recipe) -> int:
    """Bytes for one trained weight and optimizer step."""
    tricks = recipe.tricks
    unscale = UNSCALE if tricks.precision == "fp16" else 0
    return STATES[tricks.optimizer] + CLIP + unscale + ACCUMULATE * (tricks.gradient_accumulation - 1)
