r"""The operations of one block on paper: what each keeps for the backward pass, and what is open around it, in bytes.

Letters: n tokens of a micro-batch, D width, Q = H C of the queries, K of the keys and values each, F inside the MLP,
T tokens of a row; a bytes of an operand, x of an input, o of a product's result.
"""

from dataclasses import replace

from cria_tricks.bill.attention_operations import attention
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.operation import ATTENDED, GATED, INPUT, JOINED_DOCUMENTS, Operation
from cria_tricks.bill.product_operations import linear


def walk(memory: StepFacts) -> list[Operation]:
    """The operations of a block, in the order of the forward pass."""
    shape = memory.shape
    # The residual stream's gradient waits while that of the branch beside it is computed.
    residual = memory.all_tokens * shape.width * memory.hidden_itemsize
    # Norms stand in front of attention and MLP, or behind both, or there are four, on both sides.
    in_front = not shape.norms_behind
    behind = shape.norms_behind or shape.norms == 4
    given = INPUT
    then = "attention's sum"
    found = []
    if in_front:
        given = "first norm's output"
        then = "second norm's output"
        found.append(_norm(memory, "first norm"))
    found += _queries_keys_values(memory, given, residual)
    found += _query_and_key_norms(memory)
    found += _attend(memory, residual)
    if behind:
        found.append(_norm(memory, "norm of what was attended"))
    if in_front:
        found.append(_norm(memory, "second norm"))
    if shape.experts > 1:
        return found + _experts(memory, residual)
    if shape.joined:
        found += _gate_and_up_joined(memory, then, residual)
    else:
        found += _gate_and_up(memory, then, residual)
    found.append(linear(memory, "down_proj", GATED, memory.product_itemsize, residual))
    if behind:
        found.append(_norm(memory, "norm of the MLP's output"))
    return found


def _queries_keys_values(memory: StepFacts, source: str, residual: int) -> list[Operation]:
    shape = memory.shape
    x = memory.hidden_itemsize
    if not shape.joined:
        return [linear(memory, name, source, x, residual) for name in ("q_proj", "k_proj", "v_proj")]
    whole = memory.all_tokens * (shape.query_width + 2 * shape.kv_width) * memory.product_itemsize
    # Each part's gradient is put into one of the whole's size.
    return [
        linear(memory, "qkv_proj", source, x, residual),
        Operation("queries, keys and values apart", backward=residual + 3 * whole),
    ]


def _attend(memory: StepFacts, residual: int) -> list[Operation]:
    """Rotary positions, the attention itself, and the product with its result."""
    shape = memory.shape
    n = memory.all_tokens
    a = memory.compute_itemsize
    # Cosines have the dtype of the hidden states, so what is turned by them is as wide as the wider of both.
    turned = n * (shape.query_width + shape.kv_width) * memory.widest_itemsize
    # While the attention's output is multiplied, queries, keys and values are still there as they were before they were
    # cast for the kernel.
    uncast = turned * (memory.widest_itemsize != a)
    uncast += n * shape.kv_width * memory.product_itemsize * (memory.product_itemsize != a)
    attended = JOINED_DOCUMENTS if memory.joins_documents else ATTENDED
    o_proj = linear(memory, "o_proj", attended, a, residual)
    return [
        Operation("rotary positions", forward=2 * turned, backward=residual + 3 * turned),
        *attention(memory, residual),
        replace(o_proj, forward=o_proj.forward + uncast),
    ]


def _gate_and_up(memory: StepFacts, source: str, residual: int) -> list[Operation]:
    inner = memory.all_tokens * memory.shape.inner * memory.product_itemsize
    gate, up = (linear(memory, name, source, memory.hidden_itemsize, residual) for name in ("gate_proj", "up_proj"))
    activated = {"gate": inner, "activated gate": inner}
    read = {"activated gate": inner}
    fetched = sum(up.keeps.values())
    if not memory.dora:  # of what DoRA keeps not all is back at once, which is more than the activated gate's gradient
        fetched += inner
    return [
        gate,
        Operation("gate's activation", activated, {}, inner, residual + 3 * inner, fetched=inner),
        replace(up, reads=read, fetched=fetched),
        Operation(GATED, {"up": inner}, {}, inner, residual + 3 * inner, reads=read, fetched=2 * inner),
    ]


def _gate_and_up_joined(memory: StepFacts, source: str, residual: int) -> list[Operation]:
    inner = memory.all_tokens * memory.shape.inner * memory.product_itemsize
    both = {"gate and up": 2 * inner}
    return [
        linear(memory, "gate_up_proj", source, memory.hidden_itemsize, residual),
        Operation("gate and up apart", backward=residual + 4 * inner),
        Operation("gate's activation", {**both, "activated gate": inner}, {}, inner, residual + 3 * inner, 0, both),
        Operation(GATED, {}, {}, inner, residual + 3 * inner, reads={"activated gate": inner, **both}),
    ]


def _norm(memory: StepFacts, name: str) -> Operation:
    """RMS norms compute in fp32: of a 16-bit input they keep a copy, an fp32 one as it is."""
    elements = memory.all_tokens * memory.shape.width
    x = memory.hidden_itemsize
    keeps = {f"{name}'s input": elements * FP32, f"{name}'s root": memory.all_tokens * FP32}
    if memory.trains_all:  # for the gradient of its weight
        keeps[f"{name}'s normalised"] = elements * x
    return Operation(name, keeps, {}, elements * (FP32 + x), elements * (4 * FP32 + x))


def _query_and_key_norms(memory: StepFacts) -> list[Operation]:
    """RMS norms of each head's queries and keys, where a model has them."""
    shape = memory.shape
    n = memory.all_tokens
    if not shape.qk_norm:
        return []
    elements = n * (shape.query_width + shape.kv_width)
    keeps = {"queries and keys before their norms": elements * FP32, "roots": n * (shape.heads + shape.kv_heads) * FP32}
    if memory.trains_all:
        keeps["queries and keys normalised"] = elements * memory.hidden_itemsize
    return [Operation("query and key norms", keeps, {}, elements * FP32, elements * 4 * FP32)]


def _experts(memory: StepFacts, residual: int) -> list[Operation]:
    """All experts of a block: each token goes through a few of them, in products of all that go through one.

    They compute in the dtype of their weights, whatever autocast says.
    """
    shape = memory.shape
    size = memory.other_weight_itemsize
    pairs = memory.all_tokens * shape.experts_per_token
    given = pairs * shape.width * size
    inner = pairs * shape.inner * size
    matrix = shape.experts * shape.width * shape.inner
    # Without torch's kernel for many products at once, which is for bf16 weights only, transformers makes the gradient
    # of all experts' weights, frozen or not.
    card = memory.device
    at_once = memory.bf16 and size < FP32 and (card.kind == "cpu" or card.capability >= (8, 0))
    opened = matrix * size * (not memory.trains_all and not at_once)
    learns = matrix * FP32 * memory.trains_all
    inputs_read = {"experts' inputs": given}
    inputs = dict[str, int]()
    product = dict[str, int]()
    unkept = inner
    if memory.trains_all or not at_once:  # it keeps also what frozen weights are multiplied with
        inputs = {"experts' inputs": given}
        product = {GATED: inner}
        unkept = 0
    gates = {"gate and up": 2 * inner, "activated gate": inner}
    routed = dict[str, int]()
    if memory.trains_all:
        routed = {"router's input": memory.all_tokens * shape.width * memory.compute_itemsize}
    return [
        Operation("router", routed),
        Operation("experts' gate and up", inputs, {}, 2 * inner, residual + 2 * inner + given + 2 * opened, 2 * learns),
        Operation("experts' activation", gates, {}, inner, residual + 3 * inner, 0, inputs_read, 2 * inner),
        Operation("experts' down", product, {}, given + unkept, residual + given + inner + opened, learns),
        Operation("experts' sum", {"experts' outputs": given}, {}, 2 * given, residual + 3 * given),
    ]
