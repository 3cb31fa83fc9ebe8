"""Bill the product with one matrix of a block, and its adapter: saved and temporary tensors [bytes].

Short names as in ``block_operations.py``: n is the number of tokens of a micro-batch. One element takes a bytes in the
compute dtype, x bytes in the product's input, and o bytes in its result. W is the matrix, and A and B are the thin
matrices of LoRA, which adds B A x to W x.
"""

from dataclasses import dataclass, replace

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.operation import GATED, Operation, Product
from cria_tricks.bill.step import Step


def product_of(step: Step, name: str, x: int) -> Product:
    """Return the sizes of the product with a matrix, for an input of x bytes an element."""
    d_in, d_out = step.shape.linears[name]
    n = step.all_tokens
    return Product(
        given=n * d_in,
        made=n * d_out,
        weight=d_in * d_out,
        input_itemsize=x,
        compute_itemsize=step.compute_itemsize,
        made_itemsize=step.product_itemsize,
        bf16=step.bf16,
    )


def linear(step: Step, name: str, source: str, x: int, residual: int) -> Operation:
    """Return the operation of a product with one matrix, its adapter included.

    Args:
        step: the step.
        name: the name of the matrix.
        source: the name of its input. Products that share an input save it once.
        x: bytes of one element of the input.
        residual: the gradient of the residual stream, which waits in the backward pass [bytes].
    """
    a = step.compute_itemsize
    size = product_of(step, name, x)
    needs = step.product_bytes(size)
    keeps: dict[str, int] = {}
    learns = 0
    if step.trains_all:  # it saves its input, and the weight if that was cast
        learns = size.weight * FP32
        keeps[source if x == a else f"{name}'s input"] = size.given * a
        if a < FP32:
            keeps[f"{name} in 16 bits"] = size.weight * a
    pins: dict[str, int] = {}
    if needs.pinned:
        pins[source] = needs.pinned
    backward = _backward(step, name, size, needs.unpacked)
    found = Operation(name, keeps, pins, needs.forward, backward, learns)
    if name in step.adapted:
        found = step.with_adapter(step, found, source, x)
    if source == GATED and source not in found.keeps and source not in pins:
        # No operation saves the gated product if no gradient needs it. It is still alive here, because it is read.
        found = replace(found, forward=found.forward + size.given * x)
    return replace(found, backward=residual + found.backward)


def _backward(step: Step, name: str, size: Product, unpacked: int) -> int:
    """Return the temporary bytes of the backward pass: both gradients, of result and input, and the unpacked weight."""
    a = step.compute_itemsize
    x = size.input_itemsize
    of_result = size.made * step.product_itemsize
    found = of_result + unpacked + size.given * max(a, x)
    if step.trains_all and step.accumulates and a < FP32:
        # ``block.points`` adds 4 bytes a weight for the new gradient. While the product runs, that gradient has only a
        # bytes. While it is cast to fp32, both exist, and the saved 16-bit weight, freed by then, stands for the 16-bit
        # one. By then the result's gradient has been freed, and so has an input that no other product reads.
        own = size.given * a * (x != a or name in ("o_proj", "down_proj"))
        found = max(found - size.weight * (FP32 - a), found - of_result - own)
    return found


def adapted(step: Step, base: Operation, source: str, x: int) -> Operation:
    """Add peft's adapter, LoRA's or DoRA's, to the operation of a product.

    Args:
        step: the step.
        base: the operation of the product alone.
        source: the name of its input.
        x: bytes of one element of the input.
    """
    name = base.name
    n = step.all_tokens
    a = step.compute_itemsize
    o = step.product_itemsize
    size = product_of(step, name, x)
    thin = step.rank * sum(step.shape.linears[name])
    keeps = dict(base.keeps)
    # Adapters cast narrower inputs first, usually to fp32. Then they have an input of their own.
    raised = size.given * step.adapter_input_itemsize * (x < step.adapter_input_itemsize)
    shared = x == a and not raised and not step.dropout
    keeps[source if shared else f"{name}'s input"] = size.given * a
    masked = 0
    if step.dropout:
        masked = size.given * _mask_itemsize(step, x, raised=bool(raised))
        keeps[f"{name}'s dropout"] = masked
        # With dropout the input exists twice. If it was cast up, both are in fp32 and temporary. If not, only the one
        # after dropout is new, and temporary only if it is cast to the compute dtype; else it is the saved input.
        raised = 2 * raised or size.given * x * (x != a)
    keeps[f"{name}'s A x"] = n * step.rank * a
    if a < FP32:
        keeps[f"{name}'s A and B in 16 bits"] = thin * a
    # Forward, the largest of three moments counts: the base's product, before the adapter's input exists; its result
    # beside the adapter's input in fp32; and both of these, B A x in the result's dtype, and the sum. When
    # checkpointing repeats a block, it stops where nothing more is saved. In down_proj that is before B A x.
    # ``block.py`` adds the saved tensors at every moment, so those that do not exist yet are subtracted here.
    ends = name == "down_proj" and step.checkpointed and not step.shape.ends_with_norm
    beside = 2 * size.made * max(a, o) * (not ends)
    copied = size.given * a * (x != a or bool(raised))
    # If blocks keep nothing on the device, tensors that only autograd holds leave it at once.
    masked_away = masked * step.keeps_nothing
    sent = copied * step.keeps_nothing + masked_away
    product = base.forward - masked - size.given * a * (not shared)
    dropped = 0
    if step.dropout:  # after A x the input after dropout is gone, in the dtype that the adapter takes
        dropped = raised // 2 if x < step.adapter_input_itemsize else raised
    forward = max(product, size.made * o + raised - masked_away, size.made * o + raised - dropped + beside - sent)
    # The backward pass has three, too: through the adapter; through the base, when what the adapter saved is freed; and
    # the sum of their two gradients for the input.
    # The saved input of A, if nothing else holds it, and dropout's mask.
    gone = size.given * a * (not shared or source == GATED) + masked
    of_input = size.given * x
    through_adapter = size.made * o + of_input + raised + _gathered(step, name, size)
    backward = max(through_adapter, base.backward + of_input - gone, 3 * of_input - gone)
    found = replace(base, keeps=keeps, forward=forward, backward=backward, learns=thin * FP32)
    if not step.dora:
        return found
    inside = _Inside(x, raised, shared, ends, copied, sent, masked_away)
    return _with_magnitudes(step, found, inside)


def _gathered(step: Step, name: str, size: Product) -> int:
    """Return the bytes of the gathered gradient of o_proj's or down_proj's result; 0 if no gradient is gathered.

    It is alive beside the one that is scaled for the adapter. If processes do not divide the residual stream, it is the
    gradient of that, which is counted already.
    """
    return size.made * step.product_itemsize * (step.in_pieces and name in ("o_proj", "down_proj"))


def _mask_itemsize(step: Step, x: int, *, raised: bool) -> int:
    """Return the item size of dropout's mask: a boolean on CUDA; on a CPU a factor in the input's dtype."""
    if step.device.kind == "cuda":
        return 1
    return FP32 if raised else x


@dataclass(frozen=True)
class _Inside:
    """What :func:`adapted` has found out about LoRA, and DoRA needs, too [bytes].

    Attributes:
        x: one element of the input.
        raised: the input in fp32 (with dropout before and after it), while it is temporary.
        shared: whether base and adapter multiply the same saved input.
        ends: whether checkpointing's repetition of the block stops before B A x.
        copied: the input in the compute dtype, if that is a copy.
        sent: tensors that leave the device as soon as the next operation runs.
        masked_away: the part of ``sent`` that is dropout's mask.
    """

    x: int
    raised: int
    shared: bool
    ends: bool
    copied: int
    sent: int
    masked_away: int


def _with_magnitudes(step: Step, lora: Operation, inside: _Inside) -> Operation:
    """Turn LoRA's operation into DoRA's, which also takes the norms of W + B A and trains magnitudes."""
    name = lora.name
    x = inside.x
    a = step.compute_itemsize
    o = step.product_itemsize
    size = product_of(step, name, x)
    # DoRA saves W x and B A x for the gradient of the magnitudes. With dropout it computes W x anew, from the input
    # after dropout, and saves the whole W if that had to be unpacked or cast.
    own = size.made * (a if step.dropout else o)
    wide = FP32 if inside.raised else x
    whole = size.weight * a * (step.dropout and (step.quantised or wide != a))
    keeps = {**lora.keeps, f"{name}'s W x": own, f"{name}'s B A x": size.made * a, f"{name} whole": whole}
    first, then = _norms(step, name, wide)
    beside = inside.raised + size.made * o * step.dropout
    # Subtract the saved tensors that do not exist yet while the norms are taken, or are on the host.
    first += beside - own * step.dropout - size.made * a - whole - inside.masked_away
    if not inside.shared and not (step.dropout and wide == a):
        first -= size.given * a
    # peft adds (m - 1) W x and m B A x s, in fp32: at most three tensors at once. A repetition stops when B A x is
    # saved for m B A x, so it has made only the first.
    scaled = size.made * FP32 * (3 - 2 * inside.ends)
    then += beside - inside.sent - whole * (wide == a)  # which is the W of the norms
    scaled -= whole * (wide != a) * step.keeps_nothing
    forward = max(lora.forward, first, then + inside.copied * step.dropout, then + scaled)
    # Backward, the larger of two moments. First four fp32 tensors: the gradients of the result, of its two parts, and
    # of the magnitudes; a gradient in the result's dtype waits for the base, and so does the one that up_proj (or
    # k_proj and v_proj) gave for the shared input. Then LoRA's own backward pass: W x has been freed, and the gradient
    # of B A x has taken the place of B A x.
    shares = size.given * x * (name in ("q_proj", "k_proj", "gate_proj"))
    backward = max(lora.backward - own, size.made * FP32 * 4 + size.made * o * (o < FP32) + shares)
    return replace(lora, keeps=keeps, forward=forward, backward=backward)


def _norms(step: Step, name: str, x: int) -> tuple[int, int]:
    """Bill the norms of W + B A in peft's DoRA.

    peft makes B A by sending an identity matrix, D_in x D_in, through A and B. Autograd holds the identity in the
    compute dtype as long as the result lives, and A's result beside it. Then come W and B A in the input's dtype, B A
    scaled, and the sum.

    Returns:
        Bytes at most while the norms are taken, and bytes that stay while they are used.
    """
    a = step.compute_itemsize
    d_in, d_out = step.shape.linears[name]
    identity = d_in * d_in
    thin = d_in * step.rank
    weight = d_in * d_out
    # Offload sends to the host what autograd holds. But what a repeated block saves stays on the device. Without a
    # gradient autograd holds nothing.
    on_device = bool(step.learning_blocks) and (not step.offloaded or step.checkpointed)
    cast = identity * a * (a < FP32)
    made = max(cast + thin * a, cast * on_device + (thin + weight) * a)
    stays = (identity + thin) * a * on_device + weight * x
    if step.quantised or x != a:  # W is a copy
        stays += weight * x
    return max(identity * FP32 + made, stays + 2 * weight * x), stays
