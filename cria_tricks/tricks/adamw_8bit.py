r"""8-bit AdamW: both moments in one byte each, block by block.

Saves    optimizer states: 8 -> 2 + 8 / 256 bytes a trained weight                   [bytes]
Costs    a little rounding in every step; both moments are unpacked and packed again
Claim    approximate: each moment moves to the nearest of 256 dynamic levels of its block
Needs    bitsandbytes; matrices of at least 4,096 elements (smaller ones stay in 32 bits)
Breaks   very small adapters: nothing is left to save. A block whose gradients differ by more than a few thousand: the
         small ones' second moments become zero, and their weights run away (on a CPU bitsandbytes is saved by chance:
         its table of 65,536 entries rounds them up)
Sources  Dettmers et al. 2021, arXiv:2110.02861, sec. 2 (block-wise quantisation) and app. F.1 (dynamic levels);
         Dettmers 2015, arXiv:1511.04561, sec. 2.3
Ours     levels, blocks and the step in plain torch, with the sign rule of bitsandbytes' CUDA kernel (keep_signs). The
         kernel does all of it in one pass. It decays weights after the step, not before; where a gradient is not finite
         it zeroes both moments and leaves the weight as it is. On a CPU bitsandbytes has none of these three rules

Shapes: a state of N numbers in ceil(N / 256) blocks, with one fp32 absmax each.
"""

import itertools
from collections.abc import Iterable
from dataclasses import replace

import torch

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts, fp32_states
from cria_tricks.bill.work import Work
from cria_tricks.models.shape import Shape
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan

SWITCHES = ("optimizer=adamw_8bit",)
CLAIM = "approximate"
LESSON = "07_adamw_8bit"
REFERENCE = ("quantize_blocks", "keep_signs", "AdamW8bit.step")
PLAIN = """
from transformers import TrainingArguments

arguments = TrainingArguments("plain", max_steps=1, optim="adamw_8bit")
"""
BLOCK = 256
"""Numbers that share one absmax."""
SMALLEST = 4096
"""Elements from which bitsandbytes keeps a state in 8 bits."""


def dynamic_levels(signed: bool) -> torch.Tensor:
    """Make the 256 levels between -1 (or 0) and 1 whose precision follows the number's size.

    A byte is a sign (for the first moment), some zeros, a one, and a fraction in the bits that are left. Each zero is a
    factor of ten: small numbers have a large exponent and few bits of fraction, large numbers the other way round.

    Args:
        signed: whether one bit is the sign; the second moment has none, and one bit of fraction more.

    Returns:
        Sorted levels, shape (256,), fp32; 0 and 1 are among them.
    """
    levels = [0.0, 1.0]
    for exponent in range(7):  # 10^-6 with no bits of fraction, or one, up to 10^0 with six or seven
        bounds = torch.linspace(0.1, 1, 2 ** (exponent + (not signed)) + 1)
        size = 10 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2
        levels += size.tolist()
        if signed:
            levels += (-size).tolist()
    return torch.tensor(sorted(levels))


def quantize_blocks(x: torch.Tensor, levels: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Move every number to the nearest level of its block.

    Args:
        x: any shape, N numbers; taken as one row, whose last block may be shorter.
        levels: sorted, shape (256,) or fewer, from -1 or 0 to 1.
        block: numbers that share a scale.

    Returns:
        Codes, uint8 of shape (N,), and the blocks' scales, fp32 of shape (ceil(N / block),).
    """
    pieces = x.float().flatten().split(block)
    absmax = torch.stack([piece.abs().max() for piece in pieces])
    scaled = torch.cat([piece / peak if peak else piece for piece, peak in zip(pieces, absmax, strict=True)])
    middles = (levels[:-1] + levels[1:]) / 2
    return torch.bucketize(scaled, middles).to(torch.uint8), absmax


def keep_signs(codes_N: torch.Tensor, x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Move the codes of negative numbers that became zero to the level below, as bitsandbytes' CUDA kernel does.

    Otherwise the step would forget in which direction such a weight was moving. A positive number that becomes zero
    stays there, because the kernel compares sign bits, and zero has the sign bit of a positive number.

    Args:
        codes_N: of the nearest levels, uint8 of shape (N,).
        x: the numbers before they were rounded, N of them.
        levels: sorted, of both signs.
    """
    lost = (x.flatten() < 0) & (levels[codes_N.long()] == 0)
    return codes_N - lost.to(torch.uint8)


def dequantize_blocks(
    codes_N: torch.Tensor, absmax: torch.Tensor, levels: torch.Tensor, block: int = BLOCK
) -> torch.Tensor:
    """Look the numbers up again, shape (N,), fp32."""
    return levels[codes_N.long()] * absmax.repeat_interleave(block)[: len(codes_N)]


class AdamW8bit:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, alg. 2) with both moments in bytes.

    Args:
        weights: what trains.
        lr: learning rate.
        betas: decay of the two moments.
        eps: added to the root of the second.
        weight_decay: decoupled.
    """

    def __init__(
        self,
        weights: Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ):
        self.weights = list(weights)
        self.steps = 0
        self.lr = lr
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        self.levels = (dynamic_levels(signed=True), dynamic_levels(signed=False))
        # For each weight both moments' codes and scales: all that stays between two steps.
        self.states = []
        for weight in self.weights:
            zeros = torch.zeros(weight.numel())
            self.states.append([quantize_blocks(zeros, levels) for levels in self.levels])

    @torch.no_grad()
    def step(self) -> None:
        """Unpack the moments of a weight, do AdamW's step in fp32, pack them again."""
        self.steps += 1
        beta1, beta2 = self.betas
        for weight, state in zip(self.weights, self.states, strict=True):
            assert weight.grad is not None, "a weight without a gradient"
            grad = weight.grad.float().flatten()
            first, second = (dequantize_blocks(*state[i], self.levels[i]) for i in (0, 1))
            first.mul_(beta1).add_(grad, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = (second.sqrt() / (1 - beta2**self.steps) ** 0.5).add_(self.eps)
            weight.mul_(1 - self.lr * self.weight_decay)
            weight.view(-1).addcdiv_(first, root, value=-self.lr / (1 - beta1**self.steps))
            state[:] = itertools.starmap(quantize_blocks, zip((first, second), self.levels, strict=True))
            codes, absmax = state[0]
            state[0] = keep_signs(codes, first, self.levels[0]), absmax


def switch_on(plan: Plan, recipe: Recipe) -> Plan:
    """Ask for 8-bit states."""
    if recipe.tricks.optimizer != "adamw_8bit":
        return plan
    return plan.with_("optimizer", bits=8)


def estimate(memory: StepFacts, shape: Shape, recipe: Recipe) -> StepFacts:
    """A byte for each number of a state; of an embedding transformers keeps the states in 32 bits."""
    if recipe.tricks.optimizer != "adamw_8bit":
        return memory
    return replace(memory, optimizer_state_bits=8, state_bytes=states_of_a_byte)


def states_of_a_byte(elements: int) -> int:
    """Bytes of the two states of a tensor: one for each number, and an fp32 scale for each block of them."""
    if elements < SMALLEST:
        return fp32_states(elements)
    scales = FP32 * -(-elements // BLOCK)
    return 2 * (elements + scales)


STEP_BYTES = 16
"""Moved for one trained weight by the optimizer's kernel: of a state one byte is read and one written."""


def seconds(work: Work, shape: Shape, recipe: Recipe) -> Work:
    """States of one byte are read and written faster."""
    if recipe.tricks.optimizer != "adamw_8bit":
        return work
    return replace(work, optimizer_bytes=STEP_BYTES)
