"""What one product with a matrix needs around it. A quantization that multiplies in another way sets its own rule."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Product:
    """One product ``x W``.

    Attributes:
        given: elements of its input.
        made: elements of its result.
        weight: elements of the matrix.
        input_itemsize: bytes of an element of the input.
        compute_itemsize: bytes of an element of what is multiplied.
        made_itemsize: bytes of an element of the result.
        bf16: whether products are computed in bf16.
    """

    given: int
    made: int
    weight: int
    input_itemsize: int
    compute_itemsize: int
    made_itemsize: int
    bf16: bool = False


@dataclass(frozen=True)
class ProductBytes:
    """What a product needs [bytes].

    Attributes:
        forward: open while it runs: the input in the dtype it is multiplied in, the unpacked weight, the result.
        unpacked: of the weight that its backward pass unpacks again.
        pinned: kept for the backward pass out of autograd's sight, where checkpointing cannot drop it.
    """

    forward: int
    unpacked: int = 0
    pinned: int = 0


def stored_as_multiplied(product: Product) -> ProductBytes:
    """The weight is read as it is stored, or autocast's copy of it, which has a line of its own."""
    forward = product.made * product.made_itemsize
    if product.input_itemsize != product.compute_itemsize:
        forward += product.given * product.compute_itemsize
    return ProductBytes(forward)
