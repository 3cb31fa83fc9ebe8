# ---
# jupyter:
#   question: How can frozen weights be stored in four bits each, and what does the model lose by it?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # NF4: frozen weights in four bits
# > **Promise.** In 16 bits, Llama-3.1-8B does not fit a T4, and no smaller batch can help, because its frozen weights
# > alone are too large. In NF4 it needs half of the card. You will pack a matrix by hand into exactly the codes of
# > bitsandbytes, and you will know what the rounding costs in quality and the unpacking in time.
# >
# > **Card.** saves almost three quarters of the frozen matrices: 16 bits a weight become 4.1 / costs about 4 % of a
# > T4's step (predicted, 2,048 tokens), and some quality / claim: approximate, each weight moves to the nearest of 16
# > levels / about 25 minutes / after [mixed precision](mixed_precision.py)

# %% Imports and settings tags=["hide-input"]
import torch
import torch.nn.functional as F
from torch import nn

from cria_tricks import course
from cria_tricks.course import (
    CARDS,
    T4,
    Theme,
    diff,
    find_shape,
    resolve,
    results,
    tables,
    with_settings,
)
from cria_tricks.course import time_bill as step
from cria_tricks.switches.nf4 import stored_bytes
from cria_tricks.techniques import nf4
from cria_tricks.techniques.gradient_checkpointing import checkpointed
from cria_tricks.techniques.lora import start_of

torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## 1. The bill
# Our job is LoRA fine-tuning of Llama-3.2-1B on a T4, with one row of 2,048 tokens at a time. After [mixed
# precision](mixed_precision.py) its peak is 2,927 MiB. Of these, 1,856 MiB are the matrices of the model's blocks.
# [LoRA](lora.py) froze them, so we may store them in a format in which nothing could be trained.
#
# Four bits can name $2^4 = 16$ values. So NF4 (4-bit NormalFloat) fixes 16 *levels* between -1 and 1, and it replaces
# each weight by the index of the nearest level, its *code*. Every group of 64 neighbouring weights shares one fp32
# *scale* that multiplies the level, which adds $32 / 64$ bits to each weight. With [double
# quantization](../docs/glossary.md#double-quantization) the scales are stored in 8 bits, and 256 of them share an fp32
# scale of their own: $8 / 64 + 32 / (64 \cdot 256)$ bits a weight.
#
# How many MiB do the 1,856 MiB of matrices take in NF4 with double quantization?

# %% Your guess: MiB of the matrices, with double quantization tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
before, after = course.so_far("mixed_precision"), course.so_far("nf4")
shape = find_shape(before.model)
matrices = [d_in * d_out for d_in, d_out in shape.packable.values()] * shape.layers
N = sum(matrices)
print(f"{N:,} weights in {len(matrices)} matrices")
bits_of = {
    "in 16 bits": 16,
    "codes alone": 4,
    "codes and fp32 scales": 4 + 32 / 64,
    "double quantization": 4 + 8 / 64 + 32 / (64 * 256),
}
for what, bits in bits_of.items():
    print(f"{what:22}{bits:7.3f} bits a weight{N * bits / 8 / MIB:10,.1f} MiB")
course.reveal(guess, N * bits_of["double quantization"] / 8 / MIB, "MiB")

# %% [markdown]
# So the matrices shrink from 1,856 MiB to 522, or 479 with double quantization. The embedding, which is also the head,
# keeps its 16 bits, 501 MiB.
#
# ## 2. From scratch, in four steps
# ### Step 1: put the levels where the weights are
# The weights of a trained matrix are nearly normally distributed (the QLoRA paper tested it): many are small, and few
# are large. Evenly spaced levels would be wasted on the empty tails. NF4 therefore cuts the bell curve into
# slices of equal area and puts its levels at the cuts, which are called *quantiles*. Zero must be a level, so that a
# weight of zero stays exactly zero, and the outermost levels must be -1 and 1. This leaves 7 negative levels, zero, and
# 8 positive levels.
#
# The whole area has its quantile at infinity, so half a slice stays beyond the outermost level: 1/32 with 16 slices
# (one for each level), or 1/30 with 15. bitsandbytes takes the mean of both for either side, and cuts from there to the
# middle (0.5) into equal slices.

# %%
import torch


def quantile_levels_4():
    # half a slice beyond the outermost level: the mean of 16 and of 15 slices
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    up = torch.linspace(0.5, outermost, 9, dtype=torch.float64)[1:]
    down = 1 - torch.linspace(outermost, 0.5, 8, dtype=torch.float64)
    # ndtri: from an area to the place that has this area on its left
    levels = torch.special.ndtri(torch.cat([down, up]))
    return (levels / levels.max()).float()


nf4_levels = quantile_levels_4()
even_levels = torch.linspace(-1, 1, 16)
for half in nf4_levels.split(8):
    print(" ".join(f"{level:6.3f}" for level in half))

# %% [markdown]
# ### Step 2: give every 64 weights a scale
# The scale of a group is its largest absolute value. Divided by it, every weight lies between -1 and 1. Then
# `torch.bucketize` compares it with the middles between neighbouring levels to find the nearest. We practise on normal
# numbers. One outlier of 50 standard deviations shows why a scale should belong to few weights.


# %%
def to_codes(x, levels, block=64):
    """Return the index of the nearest level for each element, and all scales."""
    groups = x.float().reshape(-1, block)
    scales = groups.abs().amax(dim=1)
    middles = (levels[:-1] + levels[1:]) / 2
    return torch.bucketize(groups / scales[:, None], middles).flatten(), scales


def from_codes(codes, scales, levels, block=64):
    return (levels[codes].view(-1, block) * scales[:, None]).flatten()


def error(x, levels, block=64):
    """Return the length of the rounding error over the length of the weights."""
    back = from_codes(*to_codes(x, levels, block), levels, block).view_as(x)
    return ((back - x).norm() / x.norm()).item()


torch.manual_seed(0)
W = (torch.randn(512, 2048) * 0.02).bfloat16()
w = W.float()
codes, scales = to_codes(w, nf4_levels)
shares = (w.view(-1, 64) / scales[:, None]).flatten()  # weights over their scale
nf4_error, even_error = error(w, nf4_levels), error(w, even_levels)
print(f"rounding error: {nf4_error:.4f} with NF4, {even_error:.4f} with even levels")

spoilt = w.clone()
spoilt[0, 0] = 50 * 0.02
small_groups = error(spoilt, nf4_levels)
one_group = error(spoilt, nf4_levels, block=w.numel())
print(f"with an outlier: {small_groups:.4f}, or {one_group:.4f} with one scale for all")
assert nf4_error < even_error < one_group / 8
assert small_groups < 1.01 * nf4_error


# %% Draw figure 1 tags=["hide-input"]
def where_levels_lie(theme: Theme):
    """Weights over the largest of their group, and the levels of two sets."""
    drawn, axes = course.figure(height=3.0)
    axes.hist(
        shares.numpy(),
        bins=81,
        range=(-1, 1),
        density=True,
        color=theme.quiet,
        alpha=0.6,
    )
    for place, levels in enumerate((nf4_levels, even_levels)):
        heights = [-0.2 - 0.25 * place] * len(levels)
        color = theme.series[place]
        axes.scatter(levels, heights, marker="|", s=150, color=color, linewidth=2)
    axes.set(
        xlabel="weight / largest weight of its group",
        ylabel="share of weights (density)",
        xlim=(-1.05, 1.05),
    )
    axes.set_yticks([-0.2, -0.45, 0, 0.5, 1], ["NF4", "even", "0", "0.5", "1"])
    axes.set_ylim(-0.6, None)
    return drawn


course.show(
    where_levels_lie,
    "Figure 1. A histogram of weights divided by the largest of their group, above the "
    "places of NF4's levels and of even levels; NF4's are closest where the weights "
    "are. The bars at both ends are the largest weights of the groups.",
)

# %% [markdown]
# NF4 rounds with 8 % less error than even levels. With one scale for all, the outlier would turn all weights below two
# standard deviations into zeros. In groups of 64 it harms 63 neighbours.
#
# ### Step 3: two codes in a byte, and scales in 8 bits
# Two codes of four bits fill a byte; the first takes the upper half. Double quantization rounds the scales with the
# same two functions, in groups of 256. Their mean is subtracted first, because all are positive and the 256 levels have
# both signs. We import these levels; you will build them in [the lesson on optimizers](optimizers.py).

# %%
from cria_tricks.techniques.adamw_8bit import dynamic_levels

packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)
both_halves = torch.stack([packed >> 4, packed & 15], dim=1)
assert torch.equal(both_halves.flatten(), codes)
assert packed.nbytes + scales.nbytes == w.numel() * 4.5 / 8

levels_8bit = dynamic_levels(signed=True)
mean = scales.mean()
scale_codes, scales_of_scales = to_codes(scales - mean, levels_8bit, block=256)
scales_again = from_codes(scale_codes, scales_of_scales, levels_8bit, block=256) + mean
rounded_twice = from_codes(codes, scales_again, nf4_levels).view_as(w)
double_error = ((rounded_twice - w).norm() / w.norm()).item()
most = ((scales_again - scales) / scales).abs().max()
print(
    f"a scale moves by {most:.1%} at most; error {nf4_error:.5f} -> {double_error:.5f}"
)
assert nf4_error < double_error < 1.01 * nf4_error


# %% Draw figure 2 tags=["hide-input"]
def packing(theme: Theme):
    """A group of 64 weights in three formats; a box is as wide as its bytes."""
    sketch = course.Sketch(theme, 41, 11.2)
    sketch.text(0, 1.8, "16 bits", align="left")
    sketch.tensor(6, 0.6, 25.6, 2.4, "64 weights, 128 bytes")
    formats = (("NF4", 4, "fp32 scale: 4.5 bits"), ("double", 1, "8 bits: 4.127 bits"))
    for place, (name, scale_bytes, says) in enumerate(formats, 1):
        top = 0.6 + 3.8 * place
        sketch.text(0, top + 1.2, name, align="left")
        sketch.tensor(6, top, 6.4, 2.4, "64 codes", color=1)
        sketch.tensor(12.8, top, 0.2 * scale_bytes, 2.4, "", color=2)
        sketch.text(14.4, top + 1.2, says, align="left", quiet=True)
        sketch.arrow((9.2, top - 1.3), (9.2, top - 0.1))
    return sketch.figure


course.show(
    packing,
    "Figure 2. 64 weights take 128 bytes in 16 bits, 36 bytes in NF4 and 33 with "
    "double quantization; the boxes are as wide as their bytes.",
)

# %% [markdown]
# ### Step 4: unpack, multiply, forget
# For many tokens bitsandbytes unpacks each matrix just before it is used (for few, one kernel does both). Autograd
# would save this copy, because the backward pass multiplies by the same matrix, and nothing would be gained. So we
# write both passes by hand: we keep only codes and scales, and we unpack once more in the backward pass.


# %%
from cria_tricks.course import SavedBytes


def unpacked(packed, scales, width):
    both_halves = torch.stack([packed >> 4, packed & 15], dim=1)
    return from_codes(both_halves.flatten().int(), scales, nf4_levels).view(-1, width)


class Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, packed, scales):
        # frozen weights, in memory anyway: save_for_backward is not needed
        ctx.packed, ctx.scales, ctx.width = packed, scales, x.shape[-1]
        return x @ unpacked(packed, scales, ctx.width).T

    @staticmethod
    def backward(ctx, grad):
        return grad @ unpacked(ctx.packed, ctx.scales, ctx.width), None, None


x = torch.randn(8, 2048, requires_grad=True)
with SavedBytes(besides=[x]) as by_autograd:
    y = x @ unpacked(packed, scales, 2048).T
with SavedBytes(besides=[x]) as by_hand:
    z = Multiply.apply(x, packed, scales)
(grad_y,) = torch.autograd.grad(y.sum(), x)
(grad_z,) = torch.autograd.grad(z.sum(), x)
print(f"saved for backward: {by_autograd.peak:,} bytes, by hand {by_hand.peak}")
assert (by_autograd.peak, by_hand.peak) == (4 * w.numel(), 0)
assert torch.equal(y, z)
assert torch.equal(grad_y, grad_z)

# %% [markdown] tags=["deep"]
# ### Deeper: even levels predicted, FP4, and other group sizes
# For even levels the error can be predicted. A number lies anywhere between two neighbours that are $2/15$ apart, so
# its error (the RMS, over many numbers) is $\frac{2/15}{\sqrt{12}}$ of its scale. For the other sets we measure it.
# *FP4* is bitsandbytes' other format, a float of four bits. It has only 15 levels, because 0 and -0 are the same.

# %% tags=["deep"]
half_of_fp4 = torch.tensor([1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1])
fp4_levels = torch.cat([-half_of_fp4.flip(0), torch.zeros(1), half_of_fp4])
fp4_error = error(w, fp4_levels)
scale_over_weight = (scales.square().mean() / w.square().mean()).sqrt().item()
predicted = 2 / 15 / 12**0.5 * scale_over_weight
print(f"even levels: predicted {predicted:.4f}, counted {even_error:.4f}")
print(f"FP4 {fp4_error:.4f}, NF4 {nf4_error:.4f}")
for block in (32, 64, 128, 256):
    bits, its_error = 4 + 32 / block, error(w, nf4_levels, block)
    print(f"groups of {block:3}: {bits:.3f} bits a weight, error {its_error:.4f}")
used = codes.bincount(minlength=16) / len(codes)
for half in used.split(8):
    print("codes are used", " ".join(f"{share:.1%}" for share in half))
assert abs(even_error / predicted - 1) < 0.02
assert even_error < fp4_error
assert abs(nf4_error / fp4_error - 0.75) < 0.02
assert error(w, nf4_levels, 32) < nf4_error < error(w, nf4_levels, 256)

# %% [markdown] tags=["deep"]
# NF4's error is a quarter less than FP4's. Smaller groups round less, but they need more bits for scales.
#
# The slices of step 1 are equally large, and yet codes are used between 2 % and 9 % of the time. The reason is the
# scale: the levels were cut to end at 1.85 standard deviations, but of 64 normal numbers the largest lies near 2.6. So
# NF4 is good, but it is not the best set of levels that exists, and exercise 3 beats it.

# %% [markdown]
# ## 3. Prove it
# The claim is *approximate*, so we show three things: our codes and fp32 scales are those of bitsandbytes (of the 8-bit
# scales 0.2 % differ, see the deeper part), no weight moves further than a bound, and the bill counts every byte. The
# widest gap between two levels, from -1 to -0.696, is 0.304. Therefore a weight moves by at most half of it, 0.152,
# times its scale.

# %%
import bitsandbytes.functional as bnb

theirs, their_state = bnb.quantize_4bit(W, quant_type="nf4", blocksize=64)
packages = nf4.quantize(W, nf4.normal_levels(), double_quantization=True)
assert torch.equal(nf4_levels, nf4.normal_levels())
assert torch.equal(packed, theirs.flatten())
assert torch.equal(packed, packages.packed)
assert torch.equal(scales, their_state.absmax)
print(f"all {len(packed):,} bytes of codes are those of bitsandbytes")

half_a_gap = nf4_levels.diff().max() / 2
rounded = unpacked(packed, scales, 2048)
moved = (rounded - w).abs().view(-1, 64) / scales[:, None]
print(f"largest move {moved.max():.4f} of a scale, bound {half_a_gap:.4f}")
assert moved.max() < half_a_gap + 1e-6

# codes, 8-bit scales, their fp32 scales, the mean, and two tables of levels
counted = sum(
    n // 2 + n // 64 + 4 * n // (64 * 256) + 4 + 4 * 16 + 4 * 256 for n in matrices
)
line = course.bill(after).lines[0]
print(f"{line.name}: counted {counted:,} bytes, on the bill {line.bytes:,}")
assert line.bytes == counted

# %% [markdown] tags=["deep"]
# ### Deeper: the few bytes that differ, and the error of a multiplication
# On a CPU bitsandbytes finds the byte of a scale through a table, and sometimes it gets the neighbouring byte. Its 16
# levels are printed constants, up to $1.8 \cdot 10^{-7}$ from ours, so a weight exactly between two levels may fall to
# either side.
#
# A matrix multiplication adds these errors up, so an output is off by at most $0.152 \sum_b s_b \lVert x_b \rVert_1$,
# summed over the groups $b$ of its line of the matrix, with scales $s_b$ and pieces $x_b$ of the input. That is the
# worst case, in which all errors point in the same direction. If the errors are independent of $x$, the output is off
# by the same share as the weights. (Double quantization adds the 0.8 % by which a scale moves.)

# %% tags=["deep"]
_, their_double = bnb.quantize_4bit(
    W, quant_type="nf4", blocksize=64, compress_statistics=True
)
assert torch.equal(scales_of_scales, their_double.state2.absmax)
assert torch.allclose(fp4_levels, bnb.get_4bit_type("fp4", device="cpu").unique())
differ = (scale_codes != their_double.absmax).float().mean()
print(f"of the scales' {len(scale_codes):,} bytes {differ:.1%} differ")
assert differ < 0.01

n = w.numel()
assert packages.bytes == n // 2 + n // 64 + 4 * n // (64 * 256) + 4
assert counted == sum(stored_bytes(n, True) for n in matrices)

exact_output = x.detach() @ w.T
off = (z.detach() - exact_output).abs()
lengths = x.detach().abs().view(8, 32, 64).sum(dim=2)
bound = half_a_gap * lengths @ scales.view(512, 32).T
share = (off.norm() / exact_output.norm()).item()
print(f"outputs: {(off / bound).max():.1%} of the worst case")
print(f"off by {share:.4f}, predicted {nf4_error:.4f}")
assert (off < bound).all()
assert abs(share / nf4_error - 1) < 0.05

# %% [markdown]
# ## 4. What it costs
# **Time.** NF4 leaves out no matrix multiplication, and every pass must unpack first, three times in a step: forward,
# forward again because of [checkpointing](gradient_checkpointing.py), and backward. Our estimate takes 0.28 of a T4's
# rates by its data sheet, the share that six public runs reached. In the table, `double` is compared with `on`, and the
# others with `off`.

# %%
for tokens in (2048, 1024, 256):
    seconds = []
    for recipe in (before, after):
        chosen = with_settings(recipe, [f"data.max_length={tokens}"])
        estimate = step(chosen, shape, CARDS["t4"])
        seconds.append(estimate.seconds)
    parts = {part.name: part.seconds for part in estimate.parts}
    blocks = sum(parts[name] for name in parts if name.startswith("blocks"))
    print(
        f"{tokens:5,} tokens: {1000 * parts['unpacking']:.0f} ms of unpacking, "
        f"{1000 * blocks:.0f} ms of the blocks' matrix multiplications;\n"
        f"    a step: {seconds[0]:.2f} -> {seconds[1]:.2f} s, "
        f"{seconds[1] / seconds[0] - 1:.1%} more"
    )
course.on_a_gpu(
    "nf4",
    off="peft=lora attention=best precision=best gradient_checkpointing=true "
    "chunked_loss=true",
    on="peft=lora attention=best precision=best gradient_checkpointing=true "
    "chunked_loss=true quantization=nf4",
)

# %% [markdown]
# These seconds are predicted: for the 1.91 s our range is 1.56 to 2.34 s. Unpacking takes an eighth of the time of the
# blocks' matrix multiplications, but adds only 4 % to a step, because two thirds are other work. It costs the same for
# any row, so it adds more than a third to a row of 256 tokens. On [an
# H200](../docs/benchmarks.md#a-first-sitting-on-an-h200) NF4 added 20 to 44 %, probably in the host.
#
# Without a GPU here, the table is from a CPU and a tiny model with few matrices, so its peak falls by only 4 %. Double
# quantization cost 18 % there; for a T4 we predict no extra time.
#
# **Quality.** We fine-tuned SmolLM2-135M for 20 steps of one row, with three seeds. *Loss* is that of 9 held-out rows,
# *spread* the highest minus the lowest seed, and *fp4* bitsandbytes' other format, a 4-bit float.

# %% Print the measured losses tags=["hide-input"]
kinds = ("fp32", "nf4", "nf4 + double", "nf4 + loftq", "fp4")
study = results.study("quality") or {}
runs = [run for run in study.get("runs", ()) if run["case"] in kinds]
course.show_table(
    tables.quality(runs) if runs else "no committed results next to this package"
)
at_first = {run["case"]: run["eval_loss_before"] for run in runs}
if at_first:
    gap = at_first["nf4"] - at_first["fp32"]
    print(f"before the first step NF4 is {gap:.3f} above fp32")

# %% [markdown]
# NF4 costs 0.105 to 0.110 of loss, double quantization 0.002 to 0.003 more, and FP4 0.171 to 0.178. Before the first
# step NF4 was 0.184 above fp32, so training repaired a part of the damage, because the adapter trains *on top of the
# rounded base*. (`nf4 + loftq`: see the deeper part.) In the paper, models of 7 to 65 billion weights match 16 bits on
# the MMLU test after fine-tuning. We have not measured our 1B model.

# %% [markdown] tags=["deep"]
# ### Deeper: the three unpackings, counted
# Checkpointing runs the layer forward twice, and then backward:


# %% tags=["deep"]
class Frozen(nn.Module):
    def forward(self, x):
        return Multiply.apply(x, packed, scales)


calls = []


def counted_unpacked(*arguments):
    calls.append(arguments)
    return not_counted(*arguments)


not_counted, unpacked = unpacked, counted_unpacked
checkpointed(Frozen(), x).sum().backward()
unpacked = not_counted
print(f"unpacked {len(calls)} times in a step")
assert len(calls) == 3

# %% [markdown] tags=["deep"]
# ### Deeper: LoftQ starts the adapter as the repair
# LoRA's adapter begins at zero, but with [LoftQ](../docs/glossary.md#loftq) it begins at the best approximation of rank
# $r$ of the rounding error $E = W - W_q$. The singular value decomposition gives it. The norm of what remains comes
# from the other singular values: $\sqrt{\sigma_{r+1}^2 + \sigma_{r+2}^2 + \dots}$.


# %% tags=["deep"]
def loftq(error, r, s):
    """Return A and B with s B A as near to the error as a matrix of rank r can be."""
    U, values, V = torch.linalg.svd(error, full_matrices=False)
    roots = (values[:r] / s).sqrt()  # each factor gets the same share
    return roots[:, None] * V[:r], U[:, :r] * roots


E = w - rounded
values = torch.linalg.svdvals(E)
for r in (8, 16, 64, 256, 512):
    A, B = loftq(E, r, s=2)
    left = ((E - 2 * B @ A).norm() / E.norm()).item()
    predicted = (values[r:].square().sum().sqrt() / E.norm()).item()
    print(f"rank {r:3}: {left:.1%} of the error remains, predicted {predicted:.1%}")
    assert abs(left - predicted) < 1e-4
A, B = loftq(E, 16, s=1)  # forgets that LoRA multiplies by alpha / r = 2
overshot = ((E - 2 * B @ A).norm() / E.norm()).item()
print(f"rank 16 without dividing by s: {overshot:.1%} remains")
assert abs(overshot - 1) < 1e-4
As, Bs = start_of(E, 16, scale=2)  # the package's: the same matrix
assert torch.allclose(Bs @ As, B @ A / 2, atol=1e-6)

# %% [markdown] tags=["deep"]
# Rank 16 repairs little, because rounding resembles noise and no few directions dominate it. LoRA multiplies its
# adapter by a scale $s$, so the start must be divided by it. Otherwise the repair is doubled and gains nothing. peft's
# `replace_lora_weights_loftq` does not divide.
#
# `--set lora.init=loftq` switches it on. These are its losses minus those of plain NF4:

# %% tags=["deep"]
measured = {(run["case"], run["seed"]): run for run in study.get("runs", ())}
for case in ("nf4 + loftq", "nf4 + loftq, shuffled"):
    pairs = [
        (run, measured["nf4", seed])
        for (name, seed), run in measured.items()
        if name == case
    ]
    for when in ("before", "after") if pairs else ():
        key = f"eval_loss_{when}"
        gains = [ours[key] - plain[key] for ours, plain in pairs]
        print(
            f"{case}, {when} training: {min(gains):+.3f} to {max(gains):+.3f} "
            f"in {len(gains)} seeds"
        )

# %% [markdown] tags=["deep"]
# Before training, LoftQ repairs only 0.007 of loss, and yet after training it ends even below fp32. The control (one
# seed) shows why. It starts as far from zero, but the rows of its $E$ are shuffled, so that it repairs nothing, and it
# still gains 0.121. So most of the gain comes from starting away from zero, and 20 steps are too few for a verdict. All
# these runs have one learning rate (0.0005), and a change of the step size alone can move the loss by more than NF4
# costs ([LoRA](lora.py)).

# %% [markdown] tags=["deep"]
# ### Deeper: GPTQ
# *GPTQ* rounds with the help of sample inputs. In Hugging Face's comparison of 2023 it generated text up to twice as
# fast, was slower to train, and was as good: Llama-2-7B scored 53.2 in the mean of four tests, with bitsandbytes 53.4,
# unrounded 54.3. [What we left out](../docs/left_out.md#other-ways-to-store-weights) has AWQ, HQQ and FP8.

# %% [markdown]
# ## 5. The production switch
# In plain Hugging Face code the whole trick is a configuration. The code below sets `bnb_4bit_compute_dtype`, because
# otherwise transformers takes fp32 without a warning: matrices are unpacked to twice the bytes, and outside of autocast
# multiplied in fp32. **On a T4, also pass** `dtype=torch.float16` to `from_pretrained`, or the embedding keeps the
# dtype of its file, bf16. Our switch sets both.

# %%
print(nf4.PLAIN)
course.show_worth("quantization", "double_quantization")
course.show_worth("double_quantization")
for name, recipe in (("16 bits", before), ("NF4", after)):
    large = course.bill(with_settings(recipe, ["model=llama-3.1-8b"]))
    verdict = "fits" if large.fits else "does not fit"
    print(
        f"Llama-3.1-8B in {name} needs {large.least_bytes / 2**30:.1f} GiB: {verdict}"
    )

# %% Check the numbers in the text tags=["hide-input"]
peaks = [course.bill(recipe).peak_bytes / MIB for recipe in (before, after)]
assert [round(peak) for peak in peaks] == [2927, 1550]  # 1,549.5
single = course.bill(with_settings(after, ["tricks.double_quantization=false"]))
assert round(single.peak_bytes / MIB) == 1593
assert round(seconds[1] / seconds[0], 2) == 1.36  # rows of 256 tokens
now, then = (step(recipe, shape, CARDS["t4"]) for recipe in (after, before))
assert round(now.seconds / then.seconds, 3) == 1.044
assert (round(now.low, 2), round(now.high, 2)) == (1.56, 2.34)
more, double = [], []  # on an H200, in three sittings
for sitting in ("h200-as-t4/first", "h200-as-t4/second", "h200/second"):
    measured = results.read_json(results.COMMITTED / f"{sitting}_sitting.json")
    took = {case["name"]: case["median_seconds"] for case in measured["cases"]}
    without = took["ladder_lean_preparation"]
    more.append(round(100 * (took["ladder_quantization"] / without - 1)))
    double.append(round(100 * (took["ladder_double_quantization"] / without - 1)))
assert (min(more), max(more), min(double), max(double)) == (20, 44, 15, 77)

# %% [markdown]
# The peak falls from 2,927 to 1,593 MiB, and to 1,550 with double quantization. The whole 1,377 MiB reach the peak,
# because frozen weights are in memory at every moment of a step.
#
# The complete command, and one for the bill without the two switches:
#
# ```bash
# cria train kwanzaa --set tricks.quantization=nf4 --set tricks.double_quantization=true
# cria plan kwanzaa --gpu t4 --set tricks.quantization=none \
#     --set tricks.double_quantization=false
# ```

# %% Draw figure 3 tags=["hide-input"]
course.show(
    course.ladder("nf4"),
    "Figure 3. The peak after each switch so far; the two switches of this lesson are "
    "coloured and nearly halve it.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: what peft's usual preparation gives back
# Many tutorials call peft's `prepare_model_for_kbit_training` after loading a quantized model. Our job leaves it out:
# that is the [lean preparation](mixed_precision.py). With the usual one, NF4 would save far less. See what the plan
# changes, and the bill:

# %% tags=["deep"]
usual = with_settings(after, ["tricks.lean_preparation=false"])
print(diff(resolve(before, T4), resolve(usual, T4)))
course.show_bill(before, usual)

# %% [markdown] tags=["deep"]
# 1,377 MiB are saved, and the peak falls by 223:
#
# - *Weights: blocks*: -1,377, as we proved.
# - *Weights: all others*, +501: the preparation casts everything that is not packed to fp32. The embedding doubles.
# - *Saved activations*, +128: an fp32 embedding gives fp32 hidden states, and a 4-bit layer answers in the dtype of its
#   input. So the hidden states between the blocks double. *Hidden states for the loss* (+16) and *batch* (mask, cosines
#   and sines, +0.5) double, too. *Final norm* gains only 8, for its output, because it saved its input in fp32 before,
#   too.
# - *16-bit copy of the head*, +501: the head is the embedding, which is fp32 now. So autocast makes a 16-bit copy of it
#   to multiply with.

# %% Draw figure 4 tags=["deep"]
old, new = (
    {line.name: line.bytes for line in course.bill(recipe).lines}
    for recipe in (before, usual)
)
changed = {
    name: new[name] - old.get(name, 0) for name in new if new[name] != old.get(name, 0)
}
first, last = (course.bill(recipe).peak_bytes for recipe in (before, usual))
assert first - last == -sum(changed.values())
assert round((first - last) / MIB) == 223


def waterfall(theme: Theme):
    """From the peak before to the peak after, line by line."""
    drawn, axes = course.figure(height=3.2)
    names, now = ["peak before", *changed, "peak after"], 0
    for place, name in enumerate(names):
        change = changed.get(name, first if place == 0 else 0)
        left, width = 0, now
        if change:
            left, width = min(now, now + change), abs(change)
        now += change
        colour = theme.series[0]
        says = f"{now / MIB:,.1f}"
        if name in changed:
            colour = theme.series[2 if change < 0 else 1]
            says = f"{change / MIB:+,.1f}"
        axes.barh(place, width / MIB, left=left / MIB, color=colour, height=0.62)
        axes.text((left + width) / MIB, place, f" {says}", va="center", color=theme.ink)
    axes.set_yticks(range(len(names)), names)
    axes.set(
        xlabel="MiB at the peak",
        xlim=(0, 1.18 * first / MIB),
        ylim=(len(names) - 0.4, -0.6),
    )
    return drawn


course.show(
    waterfall,
    "Figure 4. NF4 saves 1,377 MiB of weights, and the usual preparation gives 1,155 "
    "of them back, most of it to the embedding and a copy of the head.",
)

# %% [markdown]
# ## 6. Where it breaks
# **`Merge lora module to 4-bit linear may get different generations due to rounding errors.`** peft warns so when an
# adapter is added to packed weights: the sum is rounded to 16 levels again, which can erase what was learned. Adding
# the adapter to the *published* base in 16 bits is a mistake, too, because the adapter has learned to repair a rounding
# that is not there. Cure for both: unpack the rounded base, add the adapter, and store the sum in 16 bits, as `cria
# merge` does.
#
# **`nan` in fp16, with a larger model.** QLoRA's README of 2023 calls fp16 unstable: only 80 % of its 7B runs finished
# without an error. On a T4 watch `grad_norm`; [mixed precision](mixed_precision.py) has the causes and cures.
#
# **`Only Tensors of floating point and complex dtype can require gradients`.** Codes are integers, and an integer has
# no gradient. Cure: freeze them, and train an adapter on top.

# %%
try:
    nn.Parameter(packed)
except RuntimeError as caught:
    print(caught)
    assert "floating point and complex dtype can require gradients" in str(caught)
frozen_codes = nn.Parameter(packed, requires_grad=False)  # the cure

# %% [markdown] tags=["deep"]
# ### Deeper: both merging mistakes on a toy
# One matrix of width $D = 64$ with an adapter of rank $r = 8$, and inputs that lie near eight directions:

# %% tags=["deep"]
torch.manual_seed(1)
D, r = 64, 8
published = torch.randn(D, D) / 8
its_codes, its_scales = to_codes(published, nf4_levels)
frozen = (its_codes[::2] << 4 | its_codes[1::2]).to(torch.uint8), its_scales
inputs = torch.randn(512, 8) @ torch.randn(8, D) / 8**0.5 + 0.1 * torch.randn(512, D)
# what the published base says, and something new
wanted = inputs @ (published + 0.01 * torch.randn(D, 2) @ torch.randn(2, D)).T
A = (torch.randn(r, D) / 8).requires_grad_()
B = torch.zeros(D, r, requires_grad=True)
optimizer = torch.optim.Adam([A, B], lr=1e-2)
for _ in range(300):
    optimizer.zero_grad()
    F.mse_loss(Multiply.apply(inputs, *frozen) + inputs @ A.T @ B.T, wanted).backward()
    optimizer.step()

base, learnt = unpacked(*frozen, D), (B @ A).detach()
packed_again = from_codes(*to_codes(base + learnt, nf4_levels), nf4_levels).view(D, D)
ways = {
    "rounded base alone": base,
    "rounded base + adapter, as trained": base + learnt,
    "published base + adapter": published + learnt,
    "merged and rounded again": packed_again,
    "cure: merged, in bf16": (base + learnt).bfloat16().float(),
}
losses = {way: F.mse_loss(inputs @ ways[way].T, wanted).item() for way in ways}
for way, loss in losses.items():
    print(f"{way:38}{loss:.5f}")
alone, trained, on_published, rounded_again, cured = losses.values()
assert cured < 2 * trained < min(alone, on_published, rounded_again) / 10

# %% [markdown] tags=["deep"]
# Added to the published base, or rounded again, the adapter is at least ten times worse than what was trained. The cure
# costs nothing but 16 bits a weight.

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Take groups of 32 weights, and double quantization with one fp32 scale for 256 scales as before. How
#    many bits does a weight take, without the mean and the tables?
# 2. **Build.** Fill in `quantile_levels(bits)`. It returns a tensor of $2^{bits}$ rising levels from -1 to 1. Zero is
#    one of them, and above zero is one level more than below. Choose `outermost` by the rule of step 1: the mean for
#    $2^{bits}$ slices and for one fewer. For 4 bits you get `nf4_levels`.
# 3. **Reach.** Find 16 levels, a tensor, whose `error` on new normal weights is at least 3 % below NF4's. (`shares` are
#    the weights divided by their scales. Which place is best for a level, given the weights that fall to it? The ends
#    need not be -1 and 1.)

# %% tags=["exercise"]
bits_in_groups_of_32 = None


def quantile_levels(bits):
    """FILL ME IN: return 2**bits levels."""


better_levels = None


# %% Check the exercises tags=["hide-input"]
def of_levels(answer):
    three = torch.tensor([-1, -0.5350, -0.2469, 0, 0.1833, 0.3820, 0.6230, 1])
    for bits, right in ((4, nf4_levels), (3, three), (5, None)):
        if (found := answer(bits)) is None:
            raise NotImplementedError
        assert tuple(found.shape) == (2**bits,), (
            f"{bits} bits make {2**bits} levels, not {tuple(found.shape)}"
        )
        above = (found > 0).sum().item()
        below = (found < 0).sum().item()
        zeros = (found == 0).sum().item()
        assert zeros == 1, f"{bits} bits: zero is among the levels {zeros} times"
        assert above == below + 1, (
            f"{bits} bits: {above} levels above zero and {below} below"
        )
        assert (found.diff() > 0).all(), f"{bits} bits: the levels must rise"
        assert (found[0], found[-1]) == (-1, 1), (
            f"{bits} bits: the ends are {found[0]:.3f} and {found[-1]:.3f}"
        )
        if right is not None:
            apart = (found - right).abs().max().item()
            slices = (
                "how many slices has the whole curve for the levels above zero, "
                "and for those below?"
            )
            assert apart < (1e-6 if bits == 4 else 1e-3), (
                f"{bits} bits: {apart:.3f} away; {slices}"
            )


def of_better(answer):
    assert tuple(answer.shape) == (16,), f"16 levels, not {tuple(answer.shape)}"
    assert (answer.diff() > 0).all(), "sort them"
    fresh = torch.randn(256, 2048, generator=torch.Generator().manual_seed(7))
    ratio = error(fresh, answer.float()) / error(fresh, nf4_levels)
    hint = (
        "which place is best for a level, given the weights that fell to it? The ends "
        "need not be at -1 and 1"
    )
    assert ratio < 0.97, f"{ratio:.3f} times NF4's error; {hint}"


wrong_bits = "the codes stay; which two parts are shared by fewer weights now?"
course.check(
    1,
    bits_in_groups_of_32,
    course.about(4.25390625, wrong_bits, within=1e-4),
    "a number of bits",
)
course.check(
    2, quantile_levels, of_levels, "a function (bits) -> a tensor of 2**bits levels"
)
course.check(3, better_levels, of_better, "a tensor of 16 levels that rise")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# bits_in_groups_of_32 = 4 + 8 / 32 + 32 / (32 * 256)
#
#
# def quantile_levels(bits):
#     many = 2 ** (bits - 1)  # so many above zero
#     outermost = 1 - (1 / (4 * many) + 1 / (4 * many - 2)) / 2
#     up = torch.linspace(0.5, outermost, many + 1, dtype=torch.float64)[1:]
#     down = 1 - torch.linspace(outermost, 0.5, many, dtype=torch.float64)
#     levels = torch.special.ndtri(torch.cat([down, up]))
#     return (levels / levels.max()).float()
#
#
# better_levels = nf4_levels
# # Lloyd's algorithm: the mean of what fell to a level is the best place for it
# for _ in range(20):
#     nearest, _ = to_codes(w, better_levels)
#     sums = torch.zeros(16).index_add(0, nearest, shares)
#     better_levels = sums / nearest.bincount(minlength=16)
# ```
#
# </details>
#
# ## In one breath
# - **Saves** almost three quarters of the frozen matrices: 16 bits a weight become 4.5, or 4.127 with double
#   quantization. In our job the peak falls from 2,927 to 1,550 MiB.
# - **Costs** unpacking before every matrix multiplication: 4 % of a step on a T4 (predicted), more for short rows; on
#   an H200 20 to 44 %, and 15 to 77 % with double quantization (noisy). A model of 135M weights lost 0.11 after 20
#   steps at one rate; in the paper, large models lose nothing on MMLU.
# - **Approximate**: a weight moves by at most 0.152 of its scale; outputs for random inputs are off by 9 %.
# - **When**: frozen matrices are a large part of the peak. The larger the model, the more it saves.
# - **When not**: the peak is made of something else, so look at the bill first. Or you only generate text,
#   where GPTQ was up to twice as fast (in 2023).
#
# ## Sources
# - Dettmers et al. 2023, *QLoRA*, arXiv 2305.14314, section 3, appendices E and F; its README (fp16).
# - Yoshida 2023, *NF4 Isn't Information Theoretically Optimal (and that's Good)*, arXiv 2306.06965 (better levels).
# - Dettmers and Zettlemoyer 2022, arXiv 2212.09720 (small blocks). Li et al. 2023, *LoftQ*, arXiv 2310.08659 (adapters
#   that start as the repair). Hugging Face's blog 2023, *Overview of natively supported quantization schemes* (GPTQ).
# - bitsandbytes 0.50: `functional.py` (`quantize_4bit`), `autograd/_functions.py` (`MatMul4Bit`). peft 0.21:
#   `utils/other.py` (`prepare_model_for_kbit_training`), `tuners/lora/bnb.py` (the warning).
# - Ours: `cria_tricks/techniques/nf4.py`, `tests/techniques/test_nf4.py`; the merge: `cria_tricks/adapter/merge.py`;
#   the rates that cards reach: `cria_tricks/hardware/reached.py`.
