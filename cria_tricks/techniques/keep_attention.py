r"""Kept attention: a checkpointed block also keeps what attention computed, so that attention's kernel runs once.

Saves    time: a checkpointed block recomputes everything but its attention, which takes 2 of the 4 products of T x T
         scores that its two forward passes take
Costs    activations: the kernel's output and one log-sum-exp a query, B T (H D a + 4 H) bytes a checkpointed block. For
         Llama-3.2-1B, T = 2048 and a = 2, that is 8.25 MiB a block. And the host's time: torch asks a Python function
         about each operation, 3 ms a block and step. So short rows lose: on a CPU a step of SmolLM2's blocks takes 12 %
         more at T = 128, 2 % more at 1,024, and 6 % less at 2,048 (one core of an AMD EPYC, fp32, LoRA, 2026-11-23)
Claim    exact: the backward pass reads the same bits that a second run of the kernel would give
Needs    gradient_checkpointing; attention=sdpa with a fused kernel, so on a T4 also expand_kv for grouped heads
Breaks   eager attention and the math kernel, which are many operations; flash_attention_2; compile; a tensor-parallel
         run: all are refused. The kept output stays on the card, also with activation_offload
Sources  Korthikanti et al. 2022, arXiv:2205.05198, sec. 5 (which operations are worth recomputing); Dao 2023,
         arXiv:2307.08691, alg. 2 (what the backward pass needs); torch.utils.checkpoint, "selective checkpointing"
Ours     25 lines over the reference of gradient_checkpointing. The switch hands torch's
         create_selective_checkpoint_contexts the names of its fused kernels

Shapes: B batch, H query heads, T tokens, D width of a head; a bytes of one number in the compute dtype.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from cria_tricks.common.errors import BadInput
from cria_tricks.hardware.attention_kernels import KERNELS
from cria_tricks.techniques.gradient_checkpointing import checkpointed

REFERENCE = ("_Attend", "keeping_attention")
PLAIN = """
import functools
import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM

kernels = [
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
]  # a card has others
keep = functools.partial(create_selective_checkpoint_contexts, kernels)
model = AutoModelForCausalLM.from_pretrained(base, attn_implementation="sdpa")
# since transformers 5.23 also model.activation_checkpointing_enable
model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": keep})
"""
Kept = list[tuple[torch.Tensor, torch.Tensor]]
"""The output of attention and its log-sum-exp, from the first pass until the second one takes them: 1 pair or none."""


def _scores(q_BHTD: torch.Tensor, k_BHTD: torch.Tensor) -> torch.Tensor:
    """Compute causal attention's scaled scores, (B, H, T, T)."""
    tokens, width = q_BHTD.shape[-2:]
    ahead = torch.ones(tokens, tokens, dtype=torch.bool, device=q_BHTD.device).triu(1)
    return (q_BHTD @ k_BHTD.mT / width**0.5).masked_fill(ahead, float("-inf"))


class _Attend(torch.autograd.Function):
    # Alg. 2 of FlashAttention-2 without its tiles. The backward pass needs q, k and v, which a recomputed block has
    # again, and from the forward pass only the output and the log-sum-exp. So these two are worth keeping.
    @staticmethod
    def forward(ctx, q_BHTD, k_BHTD, v_BHTD, kept):
        if kept:  # the second pass: it computes no scores, and from now on autograd keeps these two
            out_BHTD, lse_BHT = kept.pop()
        else:
            scores = _scores(q_BHTD, k_BHTD)
            lse_BHT = scores.logsumexp(-1)
            out_BHTD = (scores - lse_BHT[..., None]).exp() @ v_BHTD
            kept.append((out_BHTD, lse_BHT))
        ctx.save_for_backward(q_BHTD, k_BHTD, v_BHTD, out_BHTD, lse_BHT)
        return out_BHTD.view_as(q_BHTD)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_BHTD):
        q_BHTD, k_BHTD, v_BHTD, out_BHTD, lse_BHT = ctx.saved_tensors
        weights = (_scores(q_BHTD, k_BHTD) - lse_BHT[..., None]).exp()  # the softmax, from its log-sum-exp
        inner = (grad_BHTD * out_BHTD).sum(-1, keepdim=True)
        dscores = weights * (grad_BHTD @ v_BHTD.mT - inner) / q_BHTD.shape[-1] ** 0.5
        return dscores @ k_BHTD, dscores.mT @ q_BHTD, weights.mT @ grad_BHTD, None


class KeepingAttention(torch.nn.Module):
    """A block that runs attention once, although it runs twice itself.

    Args:
        block: a module; it maps (x, attend) to its output, and calls ``attend(q, k, v)`` once.
    """

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.block = block
        self.kept: Kept = []

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """Run the block on x; the second call takes the first one's attention."""
        return self.block(x_BTD, lambda *q_k_v: _Attend.apply(*q_k_v, self.kept))


def keeping_attention(block: torch.nn.Module, x_BTD: torch.Tensor) -> torch.Tensor:
    """Run ``block(x, attend)``; for the backward pass keep ``x``, attention's output and its log-sum-exp.

    Args:
        block: a module without side effects. It maps x of shape (B, T, D) and a function to (B, T, D), and calls that
            function once, as ``attend(q, k, v)`` with tensors of shape (B, H, T, D).
        x_BTD: its input, shape (B, T, D), any float dtype.

    Returns:
        The block's result; it and its gradients equal those of a block whose attention runs twice, bit for bit.
    """
    return checkpointed(KeepingAttention(block), x_BTD)


def contexts() -> tuple[contextlib.AbstractContextManager[Any], contextlib.AbstractContextManager[Any]]:
    """Make the contexts around the two forward passes of one block, for ``context_fn`` of torch's checkpoint.

    In the first, torch keeps what a fused attention kernel returns: the output, the log-sum-exp, and on a card the two
    numbers of its random state. In the second, torch gives them back in place of running the kernel.

    Raises:
        BadInput: at the end of the first pass, if no fused attention kernel ran in it.
    """
    seen: list[str] = []

    def policy(_: Any, operation: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
        name = getattr(operation, "overloadpacket", operation).__name__
        if KERNELS.get(name, "math") == "math":  # another operation, or one of the many of the math kernel
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen.append(name)
        return CheckpointPolicy.MUST_SAVE

    first, second = create_selective_checkpoint_contexts(policy)
    return _one_kernel_at_least(first, seen), second


@contextlib.contextmanager
def _one_kernel_at_least(context: contextlib.AbstractContextManager[Any], seen: list[str]) -> Iterator[None]:
    """Enter a context, and refuse a block in which no kernel was kept: silently, nothing would have been gained."""
    with context:
        yield
    if not seen:
        raise BadInput(
            "tricks.keep_attention=true: no fused attention kernel ran here, so there is nothing to keep; set "
            "tricks.keep_attention=false"
        )
