"""What the tests of attention share: plain attention, random heads, a look at what is saved and what is called."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cria_tricks.hardware.attention_kernels import KERNELS


def heads(b, h, k, t, s, d, dtype=torch.float32):
    """Queries (b, h, t, d), keys and values (b, k, s, d), and a gradient for the output."""
    draw = torch.Generator().manual_seed(0)
    shapes = ((b, h, t, d), (b, k, s, d), (b, k, s, d), (b, h, t, d))
    q, k, v, grad = (torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes)
    return *(x.requires_grad_(True) for x in (q, k, v)), grad


def naive_attention(q, k, v, causal):
    """Attention as the formula has it, with the whole T x S matrix."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    return scores.softmax(-1) @ v


def with_gradients(call, grad, *inputs):
    """The call's output, and its gradients at the inputs."""
    out = call(*inputs)
    return out.detach(), *torch.autograd.grad(out, inputs, grad)


def saved_bytes(call):
    """Bytes of all storages that the call keeps for its backward pass, each counted once."""
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = call()
    total = sum(storage.nbytes() for storage in storages.values())
    del out
    return total


class Attended(TorchDispatchMode):
    """Notes what reaches torch's attention kernels: heads and tokens of the queries, heads of the keys, a mask."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_scaled_dot_product" in str(func) and "backward" not in str(func):
            query, key = args[0].shape, args[1].shape
            masked = (kwargs or {}).get("attn_mask") is not None
            self.calls.append({"heads": query[1], "tokens": query[2], "kv_heads": key[1], "masked": masked})
        return func(*args, **(kwargs or {}))


class Kernels(TorchDispatchMode):
    """How often each fused attention kernel runs, and the bytes that its last run returned."""

    def __init__(self):
        super().__init__()
        self.runs: Counter[str] = Counter()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if KERNELS.get(name, "math") != "math":
            self.runs[name] += 1
            self.bytes = sum(x.nbytes for x in found if torch.is_tensor(x))
        return found
