"""List the operations of one transformer block for the memory bill [bytes].

For each operation the list says which tensors autograd keeps for the backward pass, and which temporary tensors are
alive while the operation runs. :class:`Operation` explains the columns: ``keeps``, ``forward``, ``backward`` and so on.

Short names: n is the number of tokens of a micro-batch, T of a row, H the number of query heads. One element takes a
bytes in the compute dtype (what products multiply), x bytes in an operation's input, and o bytes in the result of a
product. W is a matrix, and A and B are the thin matrices of LoRA, which adds B A x to W x.
"""

from dataclasses import dataclass, replace

from cria_tricks.bill.operation import (
    ATTENDED,
    ATTENTION,
    FP32,
    GATED,
    INPUT,
    JOINED_DOCUMENTS,
    LOG_SUM_EXP,
    Operation,
    Product,
)
from cria_tricks.bill.step import Step


def walk(step: Step) -> list[Operation]:
    """List the operations of a block, in the order of the forward pass."""
    shape = step.shape
    # While the backward pass goes through attention or the MLP, the gradient of the residual stream beside it waits.
    residual = step.stream_tokens * shape.width * step.hidden_itemsize
    # Most models have a norm before attention and one before the MLP. OLMo 2 has them behind instead, and models with
    # four norms have them on both sides.
    in_front = not shape.norms_behind
    behind = shape.ends_with_norm
    attention_input = INPUT
    mlp_input = "attention's sum"
    found = []
    if in_front:
        attention_input = "first norm's output"
        mlp_input = "second norm's output"
        found.append(_norm(step, "first norm"))
    found += _queries_keys_values(step, attention_input, residual)
    found += _query_and_key_norms(step)
    found += _attend(step, residual)
    if behind:
        found.append(_norm_behind(step, "norm of what was attended"))
    if in_front:
        found.append(_norm(step, "second norm"))
    if shape.experts > 1:
        return found + _experts(step, residual)
    if shape.joined:
        found += _gate_and_up_joined(step, mlp_input, residual)
    else:
        found += _gate_and_up(step, mlp_input, residual)
    found.append(linear(step, "down_proj", GATED, step.product_itemsize, residual))
    if behind:
        found.append(_norm_behind(step, "norm of the MLP's output"))
    return found


def _queries_keys_values(step: Step, source: str, residual: int) -> list[Operation]:
    """Project the input to queries, keys and values: three products, or one that is sliced (Phi-3)."""
    shape = step.shape
    x = step.hidden_itemsize
    if not shape.joined:
        return [linear(step, name, source, x, residual) for name in ("q_proj", "k_proj", "v_proj")]
    whole = step.all_tokens * (shape.query_width + 2 * shape.kv_width) * step.product_itemsize
    # The three parts are slices of the whole. The backward pass of a slice writes its gradient into zeros of the size
    # of the whole, so three tensors of that size are open.
    return [
        linear(step, "qkv_proj", source, x, residual),
        Operation("queries, keys and values apart", backward=residual + 3 * whole),
    ]


def _attend(step: Step, residual: int) -> list[Operation]:
    """List rotary embeddings, the attention itself, and the output projection."""
    shape = step.shape
    n = step.all_tokens
    a = step.compute_itemsize
    # The cosines have the dtype of the hidden states. The rotated queries and keys get the wider of that dtype and the
    # dtype of the products.
    rotated = n * (shape.query_width + shape.kv_width) * step.widest_itemsize
    # During the output projection queries, keys and values are still alive in the dtype that they had before they were
    # cast for the kernel.
    uncast = rotated * (step.widest_itemsize != a)
    uncast += n * shape.kv_width * step.product_itemsize * (step.product_itemsize != a)
    attended = JOINED_DOCUMENTS if step.joins_documents else ATTENDED
    # Its input is in the compute dtype, and so is its result, also where a quantised product's has its input's dtype.
    o_proj = linear(replace(step, product_itemsize=a), "o_proj", attended, a, residual)
    return [
        Operation("rotary positions", forward=2 * rotated, backward=residual + 3 * rotated),
        *attention(step, residual),
        replace(o_proj, forward=o_proj.forward + uncast),
    ]


def _gate_and_up(step: Step, source: str, residual: int) -> list[Operation]:
    """List the first half of a gated MLP, activation(gate(x)) * up(x), with two matrices."""
    inner = step.all_tokens * step.shape.inner * step.product_itemsize
    gate, up = (linear(step, name, source, step.hidden_itemsize, residual) for name in ("gate_proj", "up_proj"))
    activated_gate = {"activated gate": inner}
    fetched = sum(up.keeps.values())
    # The gradient of the activated gate waits during up_proj's backward pass. Tensors that stay on the device include
    # the activated gate itself, freed by then and just as large, which stands for that gradient. Tensors from the host
    # do not, so it is added here. With DoRA it is not: up.keeps counts all tensors that DoRA saved, but they come back
    # one by one, and those that are not back yet are larger than this gradient.
    if not step.dora:
        fetched += inner
    activation = Operation(
        "gate's activation",
        # The product saves the activated gate, but it is listed here because it is alive from here on.
        keeps={"gate": inner, **activated_gate},
        forward=inner,
        backward=residual + 3 * inner,
        fetched=inner,
    )
    gated = Operation(
        GATED,
        keeps={"up": inner},
        forward=inner,
        backward=residual + 3 * inner,
        reads=activated_gate,
        fetched=2 * inner,
    )
    return [gate, activation, replace(up, reads=activated_gate, fetched=fetched), gated]


def _gate_and_up_joined(step: Step, source: str, residual: int) -> list[Operation]:
    """List the first half of a gated MLP in which one matrix gives gate and up together (Phi-3)."""
    inner = step.all_tokens * step.shape.inner * step.product_itemsize
    gate_and_up = {"gate and up": 2 * inner}
    activated_gate = {"activated gate": inner}
    return [
        linear(step, "gate_up_proj", source, step.hidden_itemsize, residual),
        # The gradients of gate and of up, and the tensor into which the backward pass joins the two.
        Operation("gate and up apart", backward=residual + 4 * inner),
        Operation(
            "gate's activation",
            keeps={**gate_and_up, **activated_gate},
            forward=inner,
            backward=residual + 3 * inner,
            reads=gate_and_up,
        ),
        Operation(
            GATED,
            forward=inner,
            backward=residual + 3 * inner,
            reads={**activated_gate, **gate_and_up},
        ),
    ]


def _norm(step: Step, name: str) -> Operation:
    """Bill an RMS norm of hidden states. It saves its input and the reciprocal root of each row's mean square."""
    elements = step.stream_tokens * step.shape.width
    x = step.hidden_itemsize
    needs = step.norm_bytes(elements, x)
    keeps = {f"{name}'s input": needs.saved, f"{name}'s root": step.stream_tokens * FP32}
    if step.trains_all:  # for the gradient of its weight
        keeps[f"{name}'s normalised"] = elements * x
    # A gradient of an input that was cast is added to that of the residual stream only when it is whole.
    apart = needs.apart * needs.copies
    return Operation(name, keeps=keeps, forward=needs.forward, backward=needs.backward + apart)


def _norm_behind(step: Step, name: str) -> Operation:
    """Bill a norm at the end of attention or of the MLP, whose input is not the residual stream."""
    needs = step.norm_bytes(step.stream_tokens * step.shape.width, step.hidden_itemsize)
    return replace(_norm(step, name), backward=needs.backward + needs.apart)


def _query_and_key_norms(step: Step) -> list[Operation]:
    """Bill the RMS norms of queries and keys; no operation for a model without them."""
    shape = step.shape
    n = step.all_tokens
    if not shape.qk_norm:
        return []
    elements = n * (shape.query_width + shape.kv_width)
    needs = step.norm_bytes(elements, step.product_itemsize)
    keeps = {"queries and keys before their norms": needs.saved, "roots": n * (shape.heads + shape.kv_heads) * FP32}
    if step.trains_all:
        keeps["queries and keys normalised"] = elements * step.hidden_itemsize
    return [
        Operation(
            "query and key norms",
            keeps=keeps,
            forward=needs.saved,
            backward=needs.backward - elements * step.product_itemsize,
        )
    ]


def _experts(step: Step, residual: int) -> list[Operation]:
    """List the MLP of a mixture of experts. Each token goes through a few experts; an expert multiplies all its tokens.

    Experts compute in the dtype of their weights, even under autocast to another one.
    """
    shape = step.shape
    itemsize = step.other_weight_itemsize
    pairs = step.all_tokens * shape.experts_per_token  # of a token and one of its experts
    outer = pairs * shape.width * itemsize  # an expert's input, and its output
    inner = pairs * shape.inner * itemsize  # gate, up, and their product
    matrix = shape.experts * shape.width * shape.inner
    # From compute capability 8.0 on, and on a CPU, torch multiplies all experts at once (grouped_mm). On older cards
    # transformers loops over the experts, which also makes the gradients of frozen experts' weights. In fp16 and fp32
    # we bill that loop everywhere, because the dry run's fake tensors can take grouped_mm in bf16 only.
    card = step.device
    at_once = step.bf16 and itemsize < FP32 and (card.kind == "cpu" or card.capability >= (8, 0))
    unused_gradient = matrix * itemsize * (not step.trains_all and not at_once)
    gradient = matrix * FP32 * step.trains_all
    inputs = {"experts' inputs": outer}
    kept_inputs = dict[str, int]()
    kept_product = dict[str, int]()
    product_not_kept = inner
    if step.trains_all or not at_once:  # a gradient of the weights needs the inputs of both products
        kept_inputs = inputs
        kept_product = {GATED: inner}
        product_not_kept = 0
    router_input = dict[str, int]()
    if step.trains_all:
        router_input = {"router's input": step.all_tokens * shape.width * step.compute_itemsize}
    gate_and_up = Operation(
        "experts' gate and up",
        keeps=kept_inputs,
        forward=2 * inner,
        backward=residual + 2 * inner + outer + 2 * unused_gradient,
        learns=2 * gradient,
    )
    activation = Operation(
        "experts' activation",
        keeps={"gate and up": 2 * inner, "activated gate": inner},
        forward=inner,
        backward=residual + 3 * inner,
        reads=inputs,
        fetched=2 * inner,
    )
    down = Operation(
        "experts' down",
        keeps=kept_product,
        forward=outer + product_not_kept,
        backward=residual + outer + inner + unused_gradient,
        learns=gradient,
    )
    total = Operation(
        "experts' sum", keeps={"experts' outputs": outer}, forward=2 * outer, backward=residual + 3 * outer
    )
    return [Operation("router", keeps=router_input), gate_and_up, activation, down, total]


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


@dataclass(frozen=True)
class _Operands:
    """The inputs of attention in the compute dtype [bytes], and the number of its scores, n T H."""

    queries: int
    keys: int
    values: int
    scores: int

    @property
    def by_name(self) -> dict[str, int]:
        """The bytes of the inputs, by their names in the bill."""
        return {"queries": self.queries, "keys": self.keys, "values": self.values}


def attention(step: Step, residual: int) -> list[Operation]:
    """List the operations of the kernel that runs. All kernels save their inputs, and some each head's T x T matrix.

    Args:
        step: the step.
        residual: the gradient of the residual stream, which waits in the backward pass [bytes].
    """
    operands = _operands(step)
    if step.kernel == "math":
        return [_math(step, operands, residual)]
    if step.kernel == "eager":
        return _eager(step, operands, residual)
    return [_fused(step, operands, residual)]


def _operands(step: Step) -> _Operands:
    shape = step.shape
    n = step.all_tokens
    a = step.compute_itemsize
    queries = n * shape.query_width * a
    keys = n * shape.kv_width * a
    if step.repeats_keys or step.kernel == "math":  # the math kernel repeats them itself
        keys = queries
    values = keys
    # Phi-3's values are a slice of one product, which gives queries and keys, too. If the slice is saved as it is (not
    # cast, not repeated), it keeps the whole product alive.
    if shape.joined and a == step.product_itemsize and (shape.heads == shape.kv_heads or not step.repeats_keys):
        values = n * (shape.query_width + 2 * shape.kv_width) * a
    return _Operands(queries, keys, values, n * step.tokens * shape.heads)


def _math(step: Step, operands: _Operands, residual: int) -> Operation:
    """Bill the math kernel, which computes in fp32 even if its inputs are in 16 bits.

    In the forward pass its inputs are alive in each dtype that they have had: as they were computed, in the compute
    dtype, and in fp32. So is the causal mask, as fp32 numbers and as the booleans that these were made from. The
    softmax has its input beside its result, and one byte for each score, which marks those that are -inf. In the
    backward pass it has the gradients of both.
    """
    a = step.compute_itemsize
    shape = step.shape
    scores = operands.scores
    kept = {name: size // a * FP32 for name, size in operands.by_name.items()}
    kept["probabilities"] = scores * FP32
    ways = a  # bytes of one element of the inputs, summed over all dtypes in which it is alive
    if a < FP32:
        ways += FP32
    if step.widest_itemsize != a:
        ways += step.widest_itemsize
    given = step.all_tokens * (shape.query_width + 2 * shape.kv_width) * ways
    forward = scores * (FP32 + 1) + given + step.tokens**2 * (FP32 + 1)
    # While the softmax runs backward, the gradient of attention's result (as wide as the queries) and that of the
    # values wait.
    back = residual + operands.queries + operands.keys
    return Operation("scores and softmax", kept, {}, forward, back + 2 * scores * FP32)


def _eager(step: Step, operands: _Operands, residual: int) -> list[Operation]:
    """Bill attention without a fused kernel: scores, scaled and masked, then the softmax in fp32, then the values.

    The backward pass of the softmax has the gradients of its input and its result, beside the gradient of the values.
    """
    a = step.compute_itemsize
    queries = operands.queries
    keys = operands.keys
    scores = operands.scores
    kept = {"queries": queries, "keys": keys, "probabilities": scores * FP32}
    multiplied = {"values": operands.values}
    if a < FP32:
        multiplied["probabilities in 16 bits"] = scores * a
    if step.shape.caps_scores:
        kept["capped scores"] = scores * a
    # The softmax needs fp32 scores. If the mask is fp32, adding it gives these; else the softmax makes an fp32 copy.
    forward = scores * FP32
    if max(a, step.hidden_itemsize) < FP32:
        forward += scores * a
    # The gradient of the values waits in the dtype in which v_proj gave the values.
    of_values = keys // a * step.product_itemsize
    # If nothing is kept on the device, queries and keys are not alive in the compute dtype, but as they were before the
    # cast, and so are the values.
    if step.keeps_nothing:
        forward += (queries + keys) // a * step.widest_itemsize + of_values - queries - keys
    backward = residual + of_values + 2 * scores * FP32
    reads = {"probabilities": scores * FP32}
    # ``fetched`` is what comes back from the host for one product: for the values these and the probabilities in their
    # dtype, then for the softmax its result. Queries and keys come back after that.
    return [
        Operation("scores and softmax", kept, {}, forward, backward, fetched=scores * FP32),
        Operation("weighted values", multiplied, {}, queries, backward=residual + queries + keys + scores * a,
                  reads=reads, fetched=scores * a + keys),
    ]  # fmt: skip


def _fused(step: Step, operands: _Operands, residual: int) -> Operation:
    """Bill a fused kernel, flash or memory-efficient: it saves no scores, only a log-sum-exp for each query."""
    n = step.all_tokens
    queries = operands.queries
    kept = operands.by_name
    if step.shape.kv_heads == 1:  # to repeat a single head takes no memory: all query heads look at the same numbers
        kept |= dict.fromkeys(("keys", "values"), n * step.shape.kv_width * step.compute_itemsize)
    if not step.maskless:
        kept["mask"] = n * step.tokens * step.compute_itemsize  # T x T for each row, for all heads
    kept |= {ATTENDED: queries, LOG_SUM_EXP: n * step.shape.heads * FP32}
    # The flash kernel lays its result out in memory like the queries. In Phi-3 these lie head by head, so o_proj needs
    # a copy, and both are saved.
    if step.shape.joined and step.kernel == "flash":
        kept["attention's output, by heads"] = queries
    # The result counts in the forward pass and among what is kept: at most so much. The backward pass has the gradients
    # of the result, the queries, the keys and the values.
    return Operation(ATTENTION, kept, {}, queries, residual + 2 * queries + 2 * operands.keys)
