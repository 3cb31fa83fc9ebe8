r"""List the operations of one transformer block for the memory bill [bytes].

For each operation the list says which tensors autograd keeps for the backward pass, and which temporary tensors are
alive while the operation runs. :class:`Operation` explains the columns: ``keeps``, ``forward``, ``backward`` and so on.

Short names here, in ``product_operations.py`` and in ``attention_operations.py``: n is the number of tokens of a
micro-batch. One element takes a bytes in the compute dtype (what products multiply), x bytes in an operation's input,
and o bytes in the result of a product.
"""

from dataclasses import replace

from cria_tricks.bill.attention_operations import attention
from cria_tricks.bill.constants import FP32
from cria_tricks.bill.operation import ATTENDED, GATED, INPUT, JOINED_DOCUMENTS, Operation
from cria_tricks.bill.product_operations import linear
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
