"""A product of a block on paper, and its adapter: what it keeps for the backward pass, and what is open around it.

Letters as in ``block_operations.py``: n tokens of a micro-batch; bytes of an element: a of what products multiply, x of
an input, o of a product's result.
"""

from dataclasses import dataclass, replace

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.formula import largest
from cria_tricks.bill.operation import GATED, Operation
from cria_tricks.bill.product_bytes import Product


def _product(memory: StepFacts, name: str, x: int) -> Product:
    """Return the product with a matrix, for an input of x bytes an element."""
    d_in, d_out = memory.shape.linears[name]
    n = memory.all_tokens
    return Product(
        given=n * d_in,
        made=n * d_out,
        weight=d_in * d_out,
        input_itemsize=x,
        compute_itemsize=memory.compute_itemsize,
        made_itemsize=memory.product_itemsize,
        bf16=memory.bf16,
    )


def linear(memory: StepFacts, name: str, source: str, x: int, residual: int) -> Operation:
    """A product and its adapter.

    Args:
        memory: the setting.
        name: of the matrix.
        source: what its input is called; several products may share one.
        x: bytes of an element of the input.
        residual: bytes of gradient that wait beside it.
    """
    a = memory.compute_itemsize
    size = _product(memory, name, x)
    needs = memory.product_bytes(size)
    keeps: dict[str, int] = {}
    learns = 0
    if memory.trains_all:  # the input for the weight's gradient, and the weight as it was multiplied
        learns = size.weight * FP32
        keeps[source if x == a else f"{name}'s input"] = size.given * a
        if a < FP32:
            keeps[f"{name} in 16 bits"] = size.weight * a
    pins: dict[str, int] = {}
    if needs.pinned:
        pins[source] = needs.pinned
    backward = _backward(memory, name, size, needs.unpacked)
    found = Operation(name, keeps, pins, needs.forward, backward, learns)
    if name in memory.adapted:
        found = _adapted(memory, found, source, x)
    if source == GATED and source not in found.keeps and source not in pins:
        # The gated product is kept by nobody where nothing needs it, but it is read.
        found = replace(found, forward=found.forward + size.given * x)
    return replace(found, backward=residual + found.backward)


def _backward(memory: StepFacts, name: str, size: Product, unpacked: int) -> int:
    """Bytes open in the backward pass: the result's gradient, the unpacked weight, the input's gradient."""
    a = memory.compute_itemsize
    x = size.input_itemsize
    of_result = size.made * memory.product_itemsize
    found = of_result + unpacked + size.given * max(a, x)
    if memory.trains_all and memory.accumulates and a < FP32:
        # A new gradient comes in 16 bits, and is cast when the result's is gone, and an input that nothing else reads.
        own = size.given * a * (x != a or name in ("o_proj", "down_proj"))
        found = largest(found - size.weight * (FP32 - a), found - of_result - own)
    return found


def _adapted(memory: StepFacts, base: Operation, source: str, x: int) -> Operation:
    """A product with its adapter, LoRA's or DoRA's.

    Args:
        memory: the setting.
        base: the product alone.
        source: what its input is called.
        x: bytes of an element of the input.
    """
    name = base.name
    n = memory.all_tokens
    a = memory.compute_itemsize
    o = memory.product_itemsize
    size = _product(memory, name, x)
    thin = memory.rank * sum(memory.shape.linears[name])
    keeps = dict(base.keeps)
    raised = 0
    if x < memory.adapter_input_itemsize:
        raised = size.given * memory.adapter_input_itemsize
    shared = x == a and not raised and not memory.dropout
    keeps[source if shared else f"{name}'s input"] = size.given * a
    masked = 0
    if memory.dropout:
        masked = size.given * _mask_itemsize(memory, x, raised=bool(raised))
        keeps[f"{name}'s dropout"] = masked
        # Before and after; what is multiplied is counted.
        raised = 2 * raised or size.given * x * (x != a)
    keeps[f"{name}'s A x"] = n * memory.rank * a
    if a < FP32:
        keeps[f"{name}'s A and B in 16 bits"] = thin * a
    # The base's product, before the adapter's input is there; then its result beside the raised input, B A x in the
    # result's dtype, and the sum. A block that is made again ends where nothing more is kept: before B A x.
    ends = name == "down_proj" and memory.checkpointed and memory.shape.norms == 2
    beside = 2 * size.made * max(a, o) * (not ends)
    copied = size.given * a * (x != a or bool(raised))
    # Where blocks keep nothing on the device, what nobody but autograd holds is gone at once.
    masked_away = masked * memory.keeps_nothing
    sent = copied * memory.keeps_nothing + masked_away
    product = base.forward - masked - size.given * a * (not shared)
    forward = largest(product, size.made * o + raised - masked_away, size.made * o + raised + beside - sent)
    # Back through the adapter first; then through the base, when what the adapter kept is gone; then the sum.
    gone = size.given * a * (not shared or source == GATED)
    of_input = size.given * x
    backward = largest(size.made * o + of_input + raised, base.backward + of_input - gone, 3 * of_input - gone)
    found = replace(base, keeps=keeps, forward=forward, backward=backward, learns=thin * FP32)
    if not memory.dora:
        return found
    inside = _Inside(x, raised, shared, ends, copied, sent, masked_away)
    return _with_magnitudes(memory, found, inside)


def _mask_itemsize(memory: StepFacts, x: int, *, raised: bool) -> int:
    """Bytes of an element of dropout's mask: CUDA's says in a byte what stays, a CPU's is multiplied by."""
    if memory.device.kind == "cuda":
        return 1
    return FP32 if raised else x


@dataclass(frozen=True)
class _Inside:
    """What is known inside an adapter [bytes].

    Attributes:
        x: of an element of the input.
        raised: open for the input in fp32, and for it before dropout.
        shared: whether the adapter multiplies the input that the base keeps.
        ends: whether the block that is made again ends before B A x.
        copied: of the input in the dtype it is multiplied in, if that is a copy.
        sent: gone to the host, or dropped, as soon as the next operation runs.
        masked_away: of these, dropout's mask.
    """

    x: int
    raised: int
    shared: bool
    ends: bool
    copied: int
    sent: int
    masked_away: int


def _with_magnitudes(memory: StepFacts, lora: Operation, inside: _Inside) -> Operation:
    """A DoRA product: LoRA's, and the norms of W + B A, whose magnitudes learn."""
    name = lora.name
    x = inside.x
    a = memory.compute_itemsize
    o = memory.product_itemsize
    size = _product(memory, name, x)
    # Both results, for the magnitudes' gradient; of the dropped input a product of its own.
    own = size.made * (a if memory.dropout else o)
    wide = FP32 if inside.raised else x
    whole = size.weight * a * (memory.dropout and (memory.quantised or wide != a))
    keeps = {**lora.keeps, f"{name}'s W x": own, f"{name}'s B A x": size.made * a, f"{name} whole": whole}
    first, then = _norms(memory, name, wide)
    beside = inside.raised + size.made * o * memory.dropout
    # Of what is kept, some comes later, or is on the host.
    first += beside - own * memory.dropout - size.made * a - whole - inside.masked_away
    if not inside.shared and not (memory.dropout and wide == a):
        first -= size.given * a
    scaled = size.made * FP32 * (3 - 2 * inside.ends)
    then += beside - inside.sent - whole * (wide == a)  # which is W
    scaled -= whole * (wide != a) * memory.keeps_nothing
    forward = largest(lora.forward, first, then + inside.copied * memory.dropout, then + scaled)
    # The result's gradient, in fp32, and those of both parts and of the magnitudes; one as narrow as the result
    # waits for the base. Both results are gone when the way back goes on, and the second's gradient is there.
    # Besides, the gradient waits that up_proj, or k_proj and v_proj, gave for the input they share.
    shares = size.given * x * (name in ("q_proj", "k_proj", "gate_proj"))
    backward = largest(lora.backward - own, size.made * FP32 * 4 + size.made * o * (o < FP32) + shares)
    return replace(lora, keeps=keeps, forward=forward, backward=backward)


def _norms(memory: StepFacts, name: str, x: int) -> tuple[int, int]:
    """What peft's DoRA holds to take the norms of W + B A, and what of it stays while it uses them.

    B A is made by multiplying an identity, D_in x D_in, which autograd keeps as long as the product, in 16 bits where
    products have these, and A beside it. Then come W and B A in the input's dtype, B A scaled, and the sum.
    """
    a = memory.compute_itemsize
    d_in, d_out = memory.shape.linears[name]
    identity = d_in * d_in
    thin = d_in * memory.rank
    weight = d_in * d_out
    on_device = not memory.offloaded or memory.checkpointed
    cast = identity * a * (a < FP32)
    made = largest(cast + thin * a, cast * on_device + (thin + weight) * a)
    stays = (identity + thin) * a * on_device + weight * x
    if memory.quantised or x != a:  # W is another than the stored one
        stays += weight * x
    return largest(identity * FP32 + made, stays + 2 * weight * x), stays
