r"""8-bit AdamW: both moments in one byte each, block by block.

Saves    optimizer states: 8 -> 2 + 8 / 256 bytes a trained weight: a byte for each of two moments, and for each of
         them a 4-byte scale for 256 weights                                         [bytes]
Costs    a little rounding in every step; both moments are unpacked and packed again
Claim    approximate: each moment moves to the nearest of 256 dynamic levels of its block
Needs    bitsandbytes; matrices of at least 4,096 elements (smaller ones stay in 32 bits)
Breaks   very small adapters: nothing is left to save. A block in which some gradients are thousands of times larger
         than others: the second moments of the small ones become zero, so the updates of their weights become huge
         (on a CPU bitsandbytes avoids this by chance: its lookup table of 65,536 entries rounds them up)
Sources  Dettmers et al. 2021, arXiv:2110.02861, sec. 2 (block-wise quantisation) and app. F.1 (dynamic levels);
         Dettmers 2015, arXiv:1511.04561, sec. 2.3
Ours     levels, blocks and the step in plain torch, with the sign rule of bitsandbytes' CUDA kernel (keep_signs). The
         kernel does all of it in one pass. It decays weights after the step, not before; where a gradient is not finite
         it zeroes both moments and leaves the weight as it is. On a CPU bitsandbytes has none of these three rules

Shapes: a state of N numbers in ceil(N / 256) blocks, with one fp32 absmax each.
"""

from collections.abc import Iterable

import torch

from cria_tricks.switches.adamw_8bit import BLOCK

REFERENCE = ("quantize_blocks", "keep_signs", "AdamW8bit.step")
PLAIN = """
from transformers import TrainingArguments

arguments = TrainingArguments("plain", max_steps=1, optim="adamw_8bit")
"""


def dynamic_levels(signed: bool) -> torch.Tensor:
    """Compute the 256 dynamic levels, from -0.993 (or 0) to 1: large numbers get more precise levels than small ones.

    The levels come from a way to read a byte: a sign bit (first moment only), some zeros, a one, and a fraction in the
    bits that are left. Each zero divides the number by ten. So a small number has many zeros and few bits of fraction,
    and a large number has few zeros and many bits of fraction.

    Args:
        signed: whether one bit is the sign. The second moment is never negative, so it has one more bit of fraction.

    Returns:
        Sorted levels, shape (256,), fp32; 0 and 1 are among them.
    """
    # 1 is a level, so that the largest number of a block comes back exactly. With 0 and 2 x 127 others there is no code
    # left for -1, so a negative one comes back as -0.993 of its size.
    levels = [0.0, 1.0]
    # From six zeros (a factor of 10^-6, with 0 bits of fraction, or 1 if unsigned) to no zero (10^0, with 6 or 7 bits).
    # b bits of fraction divide the range from 0.1 to 1 into 2^b equal intervals; a level is the middle of one of them.
    for exponent in range(7):
        fraction_bits = exponent + (not signed)
        bounds = torch.linspace(0.1, 1, 2**fraction_bits + 1)
        size = 10 ** (exponent - 6) * (bounds[:-1] + bounds[1:]) / 2
        levels += size.tolist()
        if signed:
            levels += (-size).tolist()
    return torch.tensor(sorted(levels))


def quantize_blocks(x: torch.Tensor, levels: torch.Tensor, block: int = BLOCK) -> tuple[torch.Tensor, torch.Tensor]:
    """Divide each block by its absmax, and replace each number by the code of the nearest level.

    Args:
        x: any shape, N numbers; it is flattened, and the last block may be shorter.
        levels: sorted, at most 256, between -1 and 1.
        block: how many numbers share a scale.

    Returns:
        The codes (indices of levels), uint8 of shape (N,), and the scales (absmax of each block), fp32 of shape
        (ceil(N / block),).
    """
    pieces = x.float().flatten().split(block)
    absmax = torch.stack([piece.abs().max() for piece in pieces])
    # A block of zeros only has the absmax 0, by which nothing can be divided.
    scaled = torch.cat([piece / peak if peak else piece for piece, peak in zip(pieces, absmax, strict=True)])
    # The nearest level is found by comparing with the middles between neighbouring levels.
    middles = (levels[:-1] + levels[1:]) / 2
    return torch.bucketize(scaled, middles).to(torch.uint8), absmax


def keep_signs(codes_N: torch.Tensor, x: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """Move the codes of negative numbers that became zero to the level below, as bitsandbytes' CUDA kernel does.

    Otherwise the step would forget in which direction such a weight was moving. A positive number that becomes zero
    stays there, because the kernel compares sign bits, and zero has the sign bit of a positive number.

    Args:
        codes_N: codes of the nearest levels, uint8 of shape (N,).
        x: the N numbers before rounding.
        levels: sorted levels of both signs.

    Returns:
        The corrected codes, uint8 of shape (N,).
    """
    lost = (x.flatten() < 0) & (levels[codes_N.long()] == 0)
    return codes_N - lost.to(torch.uint8)


def dequantize_blocks(
    codes_N: torch.Tensor, absmax: torch.Tensor, levels: torch.Tensor, block: int = BLOCK
) -> torch.Tensor:
    """Restore the approximate numbers: the level of each code times the scale of its block; shape (N,), fp32."""
    return levels[codes_N.long()] * absmax.repeat_interleave(block)[: len(codes_N)]


class AdamW8bit:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, alg. 2) with both moments in bytes.

    Args:
        weights: the trained tensors.
        lr: learning rate.
        betas: decay rates of the first and the second moment.
        eps: added to the square root of the second moment.
        weight_decay: decoupled weight decay; multiplied by the learning rate.
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
        # For each weight the codes and scales of both moments. Nothing else is kept between two steps.
        self.states = []
        for weight in self.weights:
            zeros = torch.zeros(weight.numel())
            self.states.append([quantize_blocks(zeros, levels) for levels in self.levels])

    @torch.no_grad()
    def step(self) -> None:
        """For each weight dequantise both moments, do AdamW's step in fp32, and quantise the moments again."""
        self.steps += 1
        beta1, beta2 = self.betas
        signed, unsigned = self.levels  # of the first moment, of the second
        for weight, state in zip(self.weights, self.states, strict=True):
            assert weight.grad is not None, "a weight without a gradient"
            grad = weight.grad.float().flatten()
            first = dequantize_blocks(*state[0], signed)
            second = dequantize_blocks(*state[1], unsigned)
            first.mul_(beta1).add_(grad, alpha=1 - beta1)
            second.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            # The moments began at zero and are too small by 1 - beta^steps: the two divisions by this correct it.
            root = (second.sqrt() / (1 - beta2**self.steps) ** 0.5).add_(self.eps)
            weight.mul_(1 - self.lr * self.weight_decay)
            weight.view(-1).addcdiv_(first, root, value=-self.lr / (1 - beta1**self.steps))
            codes, absmax = quantize_blocks(first, signed)
            state[0] = keep_signs(codes, first, signed), absmax
            state[1] = quantize_blocks(second, unsigned)
