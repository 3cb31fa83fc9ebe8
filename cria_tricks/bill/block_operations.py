r"""The operations of one block on paper: what each keeps for the backward pass, and what is open around it, in bytes.

Letters: n tokens of a micro-batch, D width, Q = H C of the queries, K of the keys and values each, F inside the MLP,
T tokens of a row; a bytes of an operand, x of an input, o of a product's result.
"""

from dataclasses import replace

from cria_tricks.bill.constants import BLOCK, FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.formula import largest
from cria_tricks.bill.operation import ATTENDED, GATED, INPUT, JOINED, JOINED_DOCUMENTS, Operation


def keeps_nothing(memory: StepFacts) -> bool:
    """Whether blocks keep nothing on the device from their forward pass: none learns, or all is sent away."""
    return not memory.learning_blocks or (memory.offloaded and not memory.checkpointed)


def walk(memory: StepFacts) -> list[Operation]:
    """The operations of a block, in the order of the forward pass."""
    shape, n = memory.shape, memory.all_tokens
    stream, product = memory.stream, memory.product
    inner = n * shape.inner * product
    residual = n * shape.width * stream  # its gradient waits while that of the branch beside it is computed
    turned = n * (shape.query_width + shape.kv_width) * max(stream, product)  # cosines have the stream's dtype
    # While the attention's output is multiplied, queries, keys and values are still there as they were before they were
    # cast for the kernel.
    uncast = turned * (max(stream, product) != memory.operand)
    uncast += n * shape.kv_width * product * (product != memory.operand)
    attended = JOINED_DOCUMENTS if memory.joins_documents else ATTENDED
    o_proj = _linear(memory, "o_proj", attended, memory.operand, residual)
    behind = shape.norms_behind
    given, then = (INPUT, "attention's sum") if behind else ("first norm's output", "second norm's output")
    attention = [
        *([] if behind else [_norm(memory, "first norm")]),
        *_queries_keys_values(memory, given, residual),
        *_query_and_key_norms(memory),
        Operation("rotary positions", forward=2 * turned, backward=residual + 3 * turned),
        *_attention(memory, residual),
        replace(o_proj, forward=o_proj.forward + uncast),
        *([_norm(memory, "norm of what was attended")] if shape.norms == 4 or behind else []),
        *([] if behind else [_norm(memory, "second norm")]),
    ]
    if shape.experts > 1:
        return [*attention, *_experts(memory, residual)]
    return [
        *attention,
        *(_gate_and_up_joined if shape.joined else _gate_and_up)(memory, then, inner, residual),
        _linear(memory, "down_proj", GATED, product, residual),
        *([_norm(memory, "norm of the MLP's output")] if shape.norms == 4 or behind else []),
    ]


def _queries_keys_values(memory: StepFacts, source: str, residual: int) -> list[Operation]:
    shape = memory.shape
    if not shape.joined:
        return [_linear(memory, name, source, memory.stream, residual) for name in ("q_proj", "k_proj", "v_proj")]
    whole = memory.all_tokens * (shape.query_width + 2 * shape.kv_width) * memory.product
    # Each part's gradient is put into one of the whole's size.
    return [
        _linear(memory, "qkv_proj", source, memory.stream, residual),
        Operation("queries, keys and values apart", backward=residual + 3 * whole),
    ]


def _gate_and_up(memory: StepFacts, source: str, inner: int, residual: int) -> list[Operation]:
    gate, up = (_linear(memory, name, source, memory.stream, residual) for name in ("gate_proj", "up_proj"))
    activated = {"gate": inner, "activated gate": inner}
    read = {"activated gate": inner}
    # The activated gate's gradient waits; of what DoRA keeps not all is back at once, which is more.
    fetched = sum(up.keeps.values()) + (0 if memory.dora else inner)
    return [
        gate,
        Operation("gate's activation", activated, {}, inner, residual + 3 * inner, fetched=inner),
        replace(up, reads=read, fetched=fetched),
        Operation(GATED, {"up": inner}, {}, inner, residual + 3 * inner, reads=read, fetched=2 * inner),
    ]


def _gate_and_up_joined(memory: StepFacts, source: str, inner: int, residual: int) -> list[Operation]:
    both = {"gate and up": 2 * inner}
    return [
        _linear(memory, "gate_up_proj", source, memory.stream, residual),
        Operation("gate and up apart", backward=residual + 4 * inner),
        Operation("gate's activation", {**both, "activated gate": inner}, {}, inner, residual + 3 * inner, 0, both),
        Operation(GATED, {}, {}, inner, residual + 3 * inner, reads={"activated gate": inner, **both}),
    ]


def learning(memory: StepFacts) -> list[Operation]:
    """The operations of what learns: of a block, or of the trained copy beside it and what joins the two."""
    if not memory.learns_beside:
        return walk(memory)
    # The copy's weights are fp32, and so is what its norms give.
    beside = replace(memory, trains_all=True, others=FP32, stream=FP32, product=memory.operand)
    beside = replace(beside, unpacks=False, pins_inputs=False)
    width, a = memory.shape.width, memory.operand
    joined = memory.all_tokens * width * a
    join = dict(zip(JOINED, (joined, width * width * a if a < FP32 else 0), strict=True))
    # The gradient of the sum of both waits for the frozen block, whose turn comes after the copy's.
    waits = memory.all_tokens * width * memory.stream
    copied = []
    for operation in walk(beside):
        # A norm normalises in the dtype of its input.
        keeps = {name: size * memory.stream // FP32 if name.endswith("normalised") else size
                 for name, size in operation.keeps.items()}  # fmt: skip
        copied.append(replace(operation, keeps=keeps, backward=operation.backward + waits))
    return [*copied, Operation("join", join, {}, joined, 3 * joined, learns=width * width * FP32)]


def _norm(memory: StepFacts, name: str) -> Operation:
    """RMS norms compute in fp32: of a 16-bit input they keep a copy, an fp32 one as it is."""
    elements = memory.all_tokens * memory.shape.width
    keeps = {f"{name}'s input": elements * FP32, f"{name}'s root": memory.all_tokens * FP32}
    if memory.trains_all:  # for the gradient of its weight
        keeps[f"{name}'s normalised"] = elements * memory.stream
    return Operation(name, keeps, {}, elements * (FP32 + memory.stream), elements * (4 * FP32 + memory.stream))


def _query_and_key_norms(memory: StepFacts) -> list[Operation]:
    """RMS norms of each head's queries and keys, where a model has them."""
    shape, n = memory.shape, memory.all_tokens
    if not shape.qk_norm:
        return []
    elements = n * (shape.query_width + shape.kv_width)
    keeps = {"queries and keys before their norms": elements * FP32, "roots": n * (shape.heads + shape.kv_heads) * FP32}
    if memory.trains_all:
        keeps["queries and keys normalised"] = elements * memory.stream
    return [Operation("query and key norms", keeps, {}, elements * FP32, elements * 4 * FP32)]


def _linear(memory: StepFacts, name: str, source: str, x: int, residual: int) -> Operation:
    """A product and its adapter.

    Args:
        memory: the setting.
        name: of the matrix.
        source: what its input is called; several products may share one.
        x: bytes of an element of the input.
        residual: bytes of gradient that wait beside it.
    """
    n, a, o = memory.all_tokens, memory.operand, memory.product
    d_in, d_out = memory.shape.linears[name]
    given, made, weight = n * d_in, n * d_out, d_in * d_out
    unpacked = weight * a + weight // BLOCK * FP32 if memory.unpacks else 0  # and its scales
    keeps: dict[str, int] = {}
    learns = weight * FP32 if memory.trains_all else 0
    if memory.trains_all:  # the input for the weight's gradient, and the weight as it was multiplied
        keeps |= {source: given * a} if x == a else {f"{name}'s input": given * a}
        if a < FP32:
            keeps[f"{name} in 16 bits"] = weight * a
    pins = {source: given * x} if memory.pins_inputs else {}
    # The input in the operand's dtype, the unpacked weight, the result.
    forward = (given * a if x != a else 0) + unpacked + made * o
    if memory.pins_inputs and memory.device.kind == "cuda":
        # The input in fp16, its sizes, which of them are large; then its codes, sums in int32, these in fp16, and these
        # as the result.
        cast = x != 2 or memory.bf16
        forward = largest(given * (2 * cast + 2 + 1), given + made * (4 + 2 + o * cast))
    elif memory.pins_inputs:  # a CPU unpacks, in the input's dtype, and autocast makes a copy
        forward += weight * (x + a * (a != x))
    # The result's gradient, the unpacked weight (int8 unpacks here only, in its input's dtype), the input's gradient.
    backward = made * o + weight * (x if memory.pins_inputs else a * memory.unpacks) + given * max(a, x)
    if learns and memory.accumulates and a < FP32:
        # A new gradient comes in 16 bits, and is cast when the result's is gone, and an input that nothing else reads.
        own = given * (a if x != a or name in ("o_proj", "down_proj") else 0)
        backward = largest(backward - weight * (FP32 - a), backward - made * o - own)
    found = Operation(name, keeps, pins, forward, backward, learns)
    if name in memory.adapted:
        found = _adapted(memory, found, source, x)
    # The gated product is kept by nobody where nothing needs it, but it is read.
    waits = given * x if source == GATED and source not in {**found.keeps, **pins} else 0
    return replace(found, forward=found.forward + waits, backward=residual + found.backward)


def _adapted(memory: StepFacts, base: Operation, source: str, x: int) -> Operation:
    """A product with its adapter, LoRA's or DoRA's.

    Args:
        memory: the setting.
        base: the product alone.
        source: what its input is called.
        x: bytes of an element of the input.
    """
    name, n, a, o = base.name, memory.all_tokens, memory.operand, memory.product
    d_in, d_out = memory.shape.linears[name]
    given, made, weight = n * d_in, n * d_out, d_in * d_out
    keeps, forward, backward = dict(base.keeps), base.forward, base.backward
    learns = memory.rank * (d_in + d_out) * FP32
    raised = given * memory.adapter_input_itemsize if x < memory.adapter_input_itemsize else 0
    shared = x == a and not raised and not memory.dropout
    keeps |= {source: given * a} if shared else {f"{name}'s input": given * a}
    if memory.dropout:
        # CUDA's says in a byte what stays, a CPU's is multiplied by.
        keeps[f"{name}'s dropout"] = given * (1 if memory.device.kind == "cuda" else FP32 if raised else x)
        raised = 2 * raised if raised else given * x * (x != a)  # before and after; what is multiplied is counted
    keeps[f"{name}'s A x"] = n * memory.rank * a
    if a < FP32:
        keeps[f"{name}'s A and B in 16 bits"] = memory.rank * (d_in + d_out) * a
    # The base's product, before the adapter's input is there; then its result beside the raised input, B A x in the
    # result's dtype, and the sum. A block that is made again ends where nothing more is kept: before B A x.
    ends = name == "down_proj" and memory.checkpointed and memory.shape.norms == 2
    beside = 0 if ends else 2 * made * max(a, o)
    masked = keeps.get(f"{name}'s dropout", 0)
    copied = given * a if x != a or raised else 0
    host = keeps_nothing(memory)  # what nobody but autograd holds is there at once
    sent = (copied + masked) * host
    product = forward - masked - (0 if shared else given * a)
    forward = largest(product, made * o + raised - masked * host, made * o + raised + beside - sent)
    # Back through the adapter first; then through the base, when what the adapter kept is gone; then the sum.
    gone = 0 if shared and source != GATED else given * a
    backward = largest(made * o + given * x + raised, backward + given * x - gone, 3 * given * x - gone)
    if memory.dora:  # both results, for the magnitudes' gradient
        own = made * a if memory.dropout else made * o  # of the dropped input a product of its own
        keeps |= {f"{name}'s W x": own, f"{name}'s B A x": made * a}
        wide = FP32 if raised else x
        whole = weight * a * (memory.dropout and (memory.quantised or wide != a))
        keeps[f"{name} whole"] = whole
        first, then = _dora_weight(memory, d_in, d_out, wide)
        beside = raised + made * o * memory.dropout
        # Of what is kept, some comes later, or is on the host.
        first += beside - own * memory.dropout - made * a - whole - masked * host
        if not shared and not (memory.dropout and wide == a):
            first -= given * a
        scaled = made * FP32 * (1 if ends else 3)
        then += beside - sent - whole * (wide == a)  # which is W
        scaled -= whole * (wide != a) * host
        forward = largest(forward, first, then + copied * memory.dropout, then + scaled)
        # The result's gradient, in fp32, and those of both parts and of the magnitudes; one as narrow as the result
        # waits for the base. Both results are gone when the way back goes on, and the second's gradient is there.
        # Besides, the gradient waits that up_proj, or k_proj and v_proj, gave for the input they share.
        shares = given * x * (name in ("q_proj", "k_proj", "gate_proj"))
        backward = largest(backward - own, made * FP32 * 4 + made * o * (o < FP32) + shares)
    return replace(base, keeps=keeps, forward=forward, backward=backward, learns=learns)


def _experts(memory: StepFacts, residual: int) -> list[Operation]:
    """All experts of a block: each token goes through a few of them, in products of all that go through one.

    They compute in the dtype of their weights, whatever autocast says.
    """
    shape, size = memory.shape, memory.others
    pairs = memory.all_tokens * shape.experts_per_token
    given, inner = pairs * shape.width * size, pairs * shape.inner * size
    matrix = shape.experts * shape.width * shape.inner
    # Without torch's kernel for many products at once, which is for bf16 weights only, transformers makes the gradient
    # of all experts' weights, frozen or not.
    card = memory.device
    at_once = memory.bf16 and size < FP32 and (card.kind == "cpu" or card.capability >= (8, 0))
    opened = 0 if memory.trains_all or at_once else matrix * size
    learns = matrix * FP32 * memory.trains_all
    kept = memory.trains_all or not at_once  # what is multiplied by frozen weights
    inputs, product = ({"experts' inputs": given}, {GATED: inner}) if kept else ({}, {})
    inputs_read = {"experts' inputs": given}
    gates = {"gate and up": 2 * inner, "activated gate": inner}
    routed = {"router's input": memory.all_tokens * shape.width * memory.operand} if memory.trains_all else {}
    return [
        Operation("router", routed),
        Operation("experts' gate and up", inputs, {}, 2 * inner, residual + 2 * inner + given + 2 * opened, 2 * learns),
        Operation("experts' activation", gates, {}, inner, residual + 3 * inner, 0, inputs_read, 2 * inner),
        Operation("experts' down", product, {}, given + inner * (not kept), residual + given + inner + opened, learns),
        Operation("experts' sum", {"experts' outputs": given}, {}, 2 * given, residual + 3 * given),
    ]


def _dora_weight(memory: StepFacts, d_in: int, d_out: int, x: int) -> tuple[int, int]:
    """What peft's DoRA holds to take the norms of W + B A, and what of it stays while it uses them.

    B A is made by multiplying an identity, D_in x D_in, which autograd keeps as long as the product, in 16 bits where
    products have these, and A beside it. Then come W and B A in the input's dtype, B A scaled, and the sum.
    """
    a, identity, thin, weight = memory.operand, d_in * d_in, d_in * memory.rank, d_in * d_out
    on_device, half = not memory.offloaded or memory.checkpointed, a < FP32
    kept = (identity + thin) * a * on_device
    made = largest(identity * a * half + thin * a, identity * a * half * on_device + (thin + weight) * a)
    stays = kept + weight * x * (2 if memory.quantised or x != a else 1)
    return largest(identity * FP32 + made, stays + 2 * weight * x), stays


def _attention(memory: StepFacts, residual: int) -> list[Operation]:
    """What the kernel keeps: what it multiplies, and, of those that hold it, the T x T matrix."""
    shape, n, a = memory.shape, memory.all_tokens, memory.operand
    queries, keys = n * shape.query_width * a, n * shape.kv_width * a
    if memory.repeats_keys or memory.kernel == "math":  # which repeats them itself
        keys = queries
    values = keys
    if shape.joined and a == memory.product and (shape.heads == shape.kv_heads or not memory.repeats_keys):
        values = n * (shape.query_width + 2 * shape.kv_width) * a  # as a part of what one matrix gave, they keep it all
    operands = {"queries": queries, "keys": keys, "values": values}
    scores = n * memory.tokens * shape.heads
    back = residual + queries + keys
    if memory.kernel == "math":
        # In fp32 whatever it is given, which waits, as do its casts to 16 bits and to fp32; the causal mask, as numbers
        # and as what they were made from. The softmax holds its input beside its result, and a byte for each number
        # that says where a row is -inf; back: the gradients of both.
        operands = {name: size // a * FP32 for name, size in operands.items()}
        kept = operands | {"probabilities": scores * FP32}
        wide = max(memory.stream, memory.product)
        ways = a + (FP32 if a < FP32 else 0) + (wide if wide != a else 0)
        given = n * (shape.query_width + 2 * shape.kv_width) * ways
        forward = scores * (FP32 + 1) + given + memory.tokens**2 * (FP32 + 1)
        return [Operation("scores and softmax", kept, {}, forward, back + 2 * scores * FP32)]
    if memory.kernel == "eager":
        # Scores, scaled and masked, then the softmax in fp32; back: the gradients of both, beside that of the values.
        kept = {"queries": queries, "keys": keys, "probabilities": scores * FP32}
        multiplied = {"values": values} | ({"probabilities in 16 bits": scores * a} if a < FP32 else {})
        if shape.caps_scores:
            kept["capped scores"] = scores * a
        # A mask in fp32 makes the scores so, and else the softmax does.
        forward = scores * (FP32 if max(a, memory.stream) == FP32 else a + FP32)
        if keeps_nothing(memory):  # not the 16 bits that are multiplied are alive then, but what they were made from
            wide = max(memory.stream, memory.product)
            forward += (queries + keys) // a * wide + keys // a * memory.product - queries - keys
        # The values' gradient waits, as wide as their product gave them.
        backward = residual + keys // a * memory.product + 2 * scores * FP32
        reads = {"probabilities": scores * FP32}
        return [
            Operation("scores and softmax", kept, {}, forward, backward, fetched=scores * FP32),
            Operation("weighted values", multiplied, {}, queries, back + scores * a, 0, reads, scores * a + keys),
        ]
    if not memory.maskless:
        operands["mask"] = n * memory.tokens * a  # for each row, and all heads
    result = {ATTENDED: queries, "log-sum-exp": n * shape.heads * FP32}
    if shape.joined and memory.kernel == "flash":  # its result lies as the queries do, here head by head
        result["attention's output, by heads"] = queries
    return [Operation("attention", operands | result, {}, queries, residual + 2 * queries + 2 * keys)]
