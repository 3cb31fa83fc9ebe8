# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # NF4: four bits a weight
# > **Promise.** The frozen matrices of Llama-3.2-1B go from 1,856 MiB to 479, packed by hand, with the codes that
# > bitsandbytes makes; and you find out why the peak falls by 239 MiB and not by 1,377.
#
# > **Card.** saves three quarters of the frozen matrices / costs unpacking before every product, and some quality /
# > approximate: each weight moves to the nearest of 16 levels / 35 minutes / after [int8](int8.py)
#
# The job is still QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB. It does not use
# [the lesson on int8](int8.py)'s int8, so its bill stands where [the lesson on LoRA](lora.py) left it: 5,688 MiB, of
# which 1,856 are matrices that are only read.

# %% Imports and settings tags=["hide-input"]
import torch
import torch.nn.functional as F
from torch import nn

from cria_tricks import course
from cria_tricks.bench import results, tables
from cria_tricks.bench.style import Theme
from cria_tricks.hardware import T4
from cria_tricks.measure.counting import SavedBytes
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks.adamw_8bit import dynamic_levels
from cria_tricks.tricks.gradient_checkpointing import checkpointed
from cria_tricks.tricks.lora import start_of
from cria_tricks.tricks.nf4 import normal_levels, quantize, stored_bytes

torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## 1. The bill
# Four bits can name 16 things. So each weight becomes the number of one of 16 fixed *levels*, its *code*, and every 64
# weights share a *scale* that multiplies the level. An fp32 scale adds $32 / 64$ bits to each weight. With *double
# quantization* the scales go into 8 bits, in blocks of 256 with a scale of their own: $8 / 64 + 32 / (64 \cdot 256)$.
# How many MiB is that for our $N$ weights? Guess, then run.

# %% Your guess: MiB with double quantization tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
before, after = course.so_far("int8"), course.so_far("nf4")
shape = find_shape(before.model)
matrices = [d_in * d_out for d_in, d_out in shape.packable.values()] * shape.layers
N = sum(matrices)
print(f"{N:,} weights in {len(matrices)} matrices")
double = 8 / 64 + 32 / (64 * 256)
for what, bits in {
    "in 16 bits": 16,
    "codes": 4,
    "fp32 scales": 32 / 64,
    "or scales in 8 bits": double,
}.items():
    print(f"{what:20}{bits:7.3f} bits a weight{N * bits / 8 / MIB:10,.1f} MiB")
course.reveal(guess, N * (4 + double) / 8 / MIB, "MiB")

# %% [markdown]
# Together 4.5 bits a weight, or 4.127. The embedding is not packed, nor is the head, which here is the same table: 501
# MiB in 16 bits.
#
# ## 2. From scratch, in five steps
# **Put the levels where the weights are.** Weights of trained models are nearly normal: many small, few large. Even
# levels spend as many on the empty tails as on the crowded middle. So cut the bell curve into slices of equal area, and
# put the levels at the cuts, the *quantiles*. Two wishes on top: an exact zero, and ends at -1 and 1. That makes seven
# negative levels, zero, and eight positive.


# %%
def quantile_levels_4():
    # Half a slice stays beyond the last level; upwards the whole curve has 16 slices,
    # down 15. Take the mean.
    outermost = 1 - (1 / 32 + 1 / 30) / 2
    up = torch.linspace(0.5, outermost, 9, dtype=torch.float64)[1:]
    down = 1 - torch.linspace(outermost, 0.5, 8, dtype=torch.float64)
    # from an area to the place that has it on its left
    levels = torch.special.ndtri(torch.cat([down, up]))
    return (levels / levels.max()).float()


nf4 = quantile_levels_4()
even = torch.linspace(-1, 1, 16)
# bitsandbytes' 4-bit float
half_of_fp4 = torch.tensor([1 / 192, 1 / 6, 1 / 4, 1 / 3, 1 / 2, 2 / 3, 1])
# 0 and -0 are one level: 15
fp4 = torch.cat([-half_of_fp4.flip(0), torch.zeros(1), half_of_fp4])
print(" ".join(f"{level:.3f}" for level in nf4))
assert torch.equal(nf4, normal_levels())

# %% [markdown]
# **Give each block of 64 weights its scale**, the largest absolute value in it. Divided by that, every weight lies
# between -1 and 1, and takes the nearest level. We practise on normal numbers in the shape of Llama's `k_proj`.
#
# For even levels the error can be predicted: a number lies anywhere between two neighbours $2/15$ apart, so in the root
# of the mean square it is off by $\frac{2/15}{\sqrt{12}}$ of its scale. For the others, measure.


# %%
def to_codes(x, levels, block=64):
    """The number of the nearest level for each element, and each block's scale."""
    blocks = x.float().reshape(-1, block)
    scales = blocks.abs().amax(dim=1)
    middles = (levels[:-1] + levels[1:]) / 2
    return torch.bucketize(blocks / scales[:, None], middles).flatten(), scales


def from_codes(codes, scales, levels, block=64):
    return (levels[codes].view(-1, block) * scales[:, None]).flatten()


def error(x, levels, block=64):
    """Length of what rounding changed, over length of the weights."""
    back = from_codes(*to_codes(x, levels, block), levels, block).view_as(x)
    return ((back - x).norm() / x.norm()).item()


W = (torch.randn(512, 2048) * 0.02).bfloat16()
w = W.float()
codes, scales = to_codes(w, nf4)
predicted = (
    2 / 15 / 12**0.5 * (scales.square().mean() / w.square().mean()).sqrt().item()
)
errors = {
    name: error(w, levels)
    for name, levels in (("nf4", nf4), ("even", even), ("fp4", fp4))
}
print(
    f"predicted for even {predicted:.4f}; counted",
    {name: round(e, 4) for name, e in errors.items()},
)
assert abs(errors["even"] / predicted - 1) < 0.02
assert errors["nf4"] < errors["even"] < errors["fp4"]

# %% Draw figure 1 tags=["hide-input"]
shares = (w.view(-1, 64) / scales[:, None]).flatten()
used = codes.bincount(minlength=16) / len(codes)


def where_levels_lie(theme: Theme):
    """The weights of all blocks, over their block's largest, and the three sets of
    levels beneath."""
    drawn, axes = course.figure(height=3.2)
    axes.hist(shares.numpy(), bins=81, range=(-1, 1), density=True, color=theme.grid)
    rows = (("nf4", nf4), ("even", even), ("fp4", fp4))
    for row, (_, levels) in enumerate(rows):
        axes.scatter(
            levels,
            [-0.2 - 0.25 * row] * len(levels),
            marker="|",
            s=150,
            color=theme.series[row],
            linewidth=2,
        )
    axes.set(
        xlabel="weight, over the largest of its block",
        ylabel="share of weights (density)",
        xlim=(-1.05, 1.05),
    )
    axes.set_yticks(
        [-0.2, -0.45, -0.7, 0, 0.5, 1], [*(name for name, _ in rows), "0", "0.5", "1"]
    )
    axes.set_ylim(-0.85, None)
    return drawn


course.show(
    where_levels_lie,
    "Figure 1. The weights of blocks of 64, and where three sets of levels lie; "
    "nf4 is closest where the weights are. "
    "The walls at both ends are the blocks' largest, "
    "which lie at -1 or 1 by definition.",
)
print("codes are used", " ".join(f"{share:.1%}" for share in used))

# %% [markdown]
# Equal slices, yet codes are used between 2 % and 9 % of the time. The levels were cut to end at 1.85 standard
# deviations, but of 64 numbers the largest lies near 2.6. So NF4 is good (8 % less error than even levels, a quarter
# less than FP4), but not the best there is: exercise 3 beats it.
#
# Why blocks? Put an outlier of 50 standard deviations into the matrix.

# %%
spoilt = w.clone()
spoilt[0, 0] = 50 * 0.02
apart, shared = error(spoilt, nf4), error(spoilt, nf4, block=w.numel())
print(
    f"with an outlier: {apart:.4f} in blocks of 64, {shared:.4f} with one scale for all"
)
assert apart < 1.01 * errors["nf4"] < shared / 10

# %% [markdown]
# With one scale for all, everything below two standard deviations becomes zero: the matrix is gone. In a block the
# outlier flattens 63 neighbours. Smaller blocks round less, and pay more for scales:

# %%
for block in (32, 64, 128, 256):
    print(
        f"blocks of {block:3}: {4 + 32 / block:.3f} bits a weight, "
        f"error {error(w, nf4, block):.4f}"
    )
assert error(w, nf4, 32) < errors["nf4"] < error(w, nf4, 256)

# %% [markdown]
# **Put two codes into a byte**, the first in the upper half.

# %%
packed = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)
assert torch.equal(torch.stack([packed >> 4, packed & 15], dim=1).flatten(), codes)
assert packed.nbytes + scales.nbytes == 4.5 * w.numel() / 8

# %% [markdown]
# **Quantise the scales, too**: blocks of 64 at the price of 256. All are positive, so subtract their mean. Then the
# same two functions do it, with 256 levels (finer near zero) in blocks of 256.

# %%
mean = scales.mean()
scale_codes, scales_of_scales = to_codes(
    scales - mean, dynamic_levels(signed=True), block=256
)
again = (
    from_codes(scale_codes, scales_of_scales, dynamic_levels(signed=True), block=256)
    + mean
)
doubled = ((from_codes(codes, again, nf4).view_as(w) - w).norm() / w.norm()).item()
print(
    f"a scale moves by {((again - scales) / scales).abs().max():.1%} at most; "
    f"error {doubled:.5f}"
)
assert errors["nf4"] < doubled < 1.01 * errors["nf4"]


# %% Draw figure 2 tags=["hide-input"]
def packing(theme: Theme):
    """A block of 64 weights in three ways; a box is as wide as its bytes."""
    sketch = course.Sketch(theme, 41, 11.2)
    sketch.text(0, 1.8, "16 bits", align="left")
    sketch.tensor(6, 0.6, 25.6, 2.4, "64 weights, 128 bytes")
    ways = (
        ("nf4", 4, "and an fp32 scale: 4.5 bits each"),
        ("double", 1, "and a scale in 8 bits: 4.127 bits each"),
    )
    for row, (name, scale, says) in enumerate(ways, 1):
        top = 0.6 + 3.8 * row
        sketch.text(0, top + 1.2, name, align="left")
        sketch.tensor(6, top, 6.4, 2.4, "64 codes", color=1)
        sketch.tensor(12.8, top, 0.2 * scale, 2.4, "", color=2)
        sketch.text(14.4, top + 1.2, says, align="left", quiet=True)
        sketch.arrow((9.2, top - 1.3), (9.2, top - 0.1))
    return sketch.figure


course.show(
    packing, "Figure 2. One block of 64 weights; the boxes are as wide as their bytes."
)

# %% [markdown]
# **Unpack, multiply, forget.** A product needs numbers, so unpack just before it. But autograd would keep the unpacked
# copy: the input's gradient is the result's gradient times the same weight. So write both passes by hand, keep the
# codes only, and unpack once more on the way back.


# %%
class Multiply(torch.autograd.Function):
    unpacked = 0  # how many times

    @staticmethod
    def weight(codes, scales):
        Multiply.unpacked += 1
        return from_codes(
            torch.stack([codes >> 4, codes & 15], dim=1).flatten().int(), scales, nf4
        )

    @staticmethod
    def forward(ctx, x, codes, scales):
        ctx.codes, ctx.scales = codes, scales  # they live anyway
        return x @ Multiply.weight(codes, scales).view(-1, x.shape[-1]).T

    @staticmethod
    def backward(ctx, grad):
        return (
            grad @ Multiply.weight(ctx.codes, ctx.scales).view(grad.shape[-1], -1),
            None,
            None,
        )


x = torch.randn(8, 2048, requires_grad=True)
with SavedBytes(besides=[x]) as plain:
    y = x @ Multiply.weight(packed, scales).view(512, 2048).T
with SavedBytes(besides=[x]) as ours:
    z = Multiply.apply(x, packed, scales)
(right,), (found,) = torch.autograd.grad(y.sum(), x), torch.autograd.grad(z.sum(), x)
print(
    f"kept for the backward pass: {plain.peak / MIB:.0f} MiB by autograd, "
    f"{ours.peak} bytes by ours"
)
assert (plain.peak, ours.peak) == (4 * w.numel(), 0)
assert torch.equal(y, z)
assert torch.equal(right, found)

# %% [markdown]
# ## 3. Prove it
# The claim is *approximate*: the right bytes, no error beyond a bound with a reason, and a count that is right to the
# byte. First against bitsandbytes.

# %%
import bitsandbytes.functional as bnb

theirs, state = bnb.quantize_4bit(W, quant_type="nf4", blocksize=64)
_, state2 = bnb.quantize_4bit(
    W, quant_type="nf4", blocksize=64, compress_statistics=True
)
reference = quantize(W, normal_levels(), double_quantization=True)
assert torch.equal(packed, theirs.flatten())
assert torch.equal(packed, reference.packed)
assert torch.equal(scales, state.absmax)
assert torch.equal(scales_of_scales, state2.state2.absmax)
assert torch.allclose(fp4, bnb.get_4bit_type("fp4", device="cpu").unique())
other = (scale_codes != state2.absmax).float().mean()
print(
    f"all {len(packed):,} bytes are bitsandbytes'; "
    f"of the scales' {len(scale_codes):,} bytes {other:.1%} are not"
)
assert other < 0.01

# %% [markdown]
# On a CPU bitsandbytes finds a scale's byte through a table, and sometimes gets the neighbour. Its 16 levels are
# printed constants, up to $1.8 \cdot 10^{-7}$ from ours, so a weight exactly between two may fall to either side.
#
# Now the bound. The widest gap, from -1 to -0.696, is 0.304, so a weight moves by at most half of it, 0.152, of its
# block's scale. (Double quantization adds the 0.8 % that the scale moved.) A product adds errors up: it is off by
# at most $0.152 \sum_b s_b \lVert x_b \rVert_1$, over a row's blocks $b$ with scales $s_b$ and pieces $x_b$ of the
# input, if all errors conspire. If they know nothing of $x$, it is off by the same share as the weights.

# %%
half = nf4.diff().max() / 2
rounded = Multiply.weight(packed, scales).view_as(w)
moved = (rounded - w).abs().view(-1, 64) / scales[:, None]
print(f"largest move {moved.max():.4f} of a scale, bound {half:.4f}")
assert moved.max() < half + 1e-6

true = x.detach() @ w.T
off = (z.detach() - true).abs()
bound = half * x.detach().abs().view(8, 32, 64).sum(dim=2) @ scales.view(512, 32).T
share = (off.norm() / true.norm()).item()
print(
    f"products: {(off / bound).max():.1%} of the worst case; "
    f"off by {share:.4f}, predicted {errors['nf4']:.4f}"
)
assert (off < bound).all()
assert abs(share / errors["nf4"] - 1) < 0.05

# %% [markdown]
# And the bytes: codes, scales in 8 bits, their scales, one mean. For Llama add what bitsandbytes lays beside each
# matrix, a table of 16 levels and one of 256 in fp32.

# %%
n = w.numel()
assert reference.bytes == n // 2 + n // 64 + 4 * n // (64 * 256) + 4
in_llama = sum(
    n // 2 + n // 64 + 4 * n // (64 * 256) + 4 + 4 * 16 + 4 * 256 for n in matrices
)
line = course.bill(after).lines[0]
print(f"{line.name}: predicted {in_llama:,} bytes, on the bill {line.bytes:,}")
assert line.bytes == in_llama == sum(stored_bytes(n, True) for n in matrices)


# %% [markdown]
# ## 4. What it costs
# **Time.** NF4 avoids no product, and every pass unpacks: forward, backward, and with [the lesson on
# checkpointing](gradient_checkpointing.py)'s checkpointing forward once more. Predicted: 3 times.


# %%
class Frozen(nn.Module):
    def forward(self, x):
        return Multiply.apply(x, packed, scales)


Multiply.unpacked = 0
checkpointed(Frozen(), x).sum().backward()
print(f"unpacked {Multiply.unpacked} times in a step")
assert Multiply.unpacked == 3

# %% [markdown]
# For Llama: read 0.5 GB and write 1.9, three times, takes 23 ms at the 320 GB/s of a T4's data sheet, and the products
# of 2,048 tokens 184 ms at its 65 TFLOPS. Unpacking costs the same for any row: it adds an eighth here, and doubles
# the time of 256 tokens.

# %%
step_of = (
    "peft=lora attention=best precision=best gradient_checkpointing=true "
    "chunked_loss=true"
)
course.on_a_gpu("nf4", off=step_of, on=f"{step_of} quantization=nf4")

# %% [markdown]
# **Quality.** SmolLM2-135M (from 4-bit files), 20 steps of one row, loss on 9 held-out rows:

# %%
kinds = ("fp32", "nf4", "nf4 + double", "nf4 + loftq", "fp4")
runs = [
    run
    for run in (results.study("quality") or {}).get("runs", ())
    if run["case"] in kinds
]
print(tables.quality(runs) if runs else "no committed results beside this package")

# %% [markdown]
# NF4 costs 0.105 to 0.110, double quantization 0.002 to 0.003 more, FP4 0.171 to 0.178. Before the first step NF4 stood
# 0.184 above fp32, so 20 steps repaired part of it: the adapter trains *over the rounded base*, and its gradients
# correct the rounding, too. (After fine-tuning, the paper's models of 7 to 65 billion match 16 bits on MMLU.)
#
# **Start as the repair.** LoRA begins at zero. *LoftQ* begins at the best approximation of rank $r$ of the rounding
# error $E = W - W_q$. The norm of the rest comes from the other singular values: $\sqrt{\sigma_{r+1}^2 + \dots}$.


# %%
def loftq(error, r, s):
    """A and B with s B A as near to the error as a product of rank r can be."""
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
A, B = loftq(E, 16, s=1)  # forgets that LoRA multiplies by 2
overshot = ((E - 2 * B @ A).norm() / E.norm()).item()
print(f"rank 16 without dividing by s: {overshot:.1%} remains")
assert abs(overshot - 1) < 1e-4
As, Bs = start_of(E, 16, scale=2)  # the package's: the same product
assert torch.allclose(Bs @ As, B @ A / 2, atol=1e-6)

# %% [markdown]
# Rank 16 repairs little, because rounding resembles noise: no few directions dominate. Without dividing by LoRA's
# scale the repair is doubled and gains nothing; peft's `replace_lora_weights_loftq` does not divide.
#
# `--set lora.init=loftq` switches it on. Its loss minus NF4's:

# %%
measured = {
    (run["case"], run["seed"]): run
    for run in (results.study("quality") or {}).get("runs", ())
}
for case in ("nf4 + loftq", "nf4 + loftq, shuffled"):
    pairs = [
        (run, measured["nf4", seed])
        for (name, seed), run in measured.items()
        if name == case
    ]
    for when in ("before", "after") if pairs else ():
        gains = [
            ours[f"eval_loss_{when}"] - plain[f"eval_loss_{when}"]
            for ours, plain in pairs
        ]
        print(
            f"{case}, {when} training: {min(gains):+.3f} to {max(gains):+.3f} in "
            f"{len(gains)} seeds"
        )

# %% [markdown]
# LoftQ repairs 0.007, yet ends below fp32. The control, one seed, starts as far from zero but repairs nothing: the
# rows of $E$ are shuffled. It gains 0.121, so mostly the start away from zero helps. 20 steps are no verdict.
#
# ## 5. The production switch

# %%
print("--set tricks.quantization=nf4 --set tricks.double_quantization=true")
print(diff(resolve(before, T4), resolve(after, T4)))

# %% [markdown]
# The last line is the *compute dtype*: what a matrix is unpacked to and multiplied in. Left out, transformers takes
# fp32: twice the bytes, and no warning.

# %%
course.show_bill(before, after)

# %% [markdown]
# Here is the surprise: 1,377 MiB saved, and the peak falls by 239.
#
# - *Weights: blocks*: -1,377, as we proved.
# - *Weights: all others*, +501: `prepare_model_for_kbit_training`, peft's usual preparation, raises all that is not
#   packed to fp32. The embedding doubles.
# - *Saved activations*, +128: an fp32 embedding gives fp32 hidden states, and a 4-bit product answers in the dtype of
#   its input. So the residual stream doubles. *Batch*, +8.5: mask, cosines and sines double, too.
# - *16-bit copy of the head*, +501: the head is the embedding, now fp32, so autocast makes a 16-bit copy to multiply
#   with.
# - *Logits*: 3,006, untouched, and more than half of what is left.
#
# Without that preparation the whole saving should arrive. Predict, then switch it off:

# %%
first, second = course.bill(before), course.bill(after)
old, new = ({line.name: line.bytes for line in bill.lines} for bill in (first, second))
changed = {
    name: new[name] - old.get(name, 0) for name in new if new[name] != old.get(name, 0)
}
saved = -changed[line.name]
given_back = sum(changed.values()) + saved
print(
    f"saved {saved / MIB:,.0f} MiB, given back {given_back / MIB:,.0f}, "
    f"left {(saved - given_back) / MIB:,.0f}"
)
assert first.peak_bytes - second.peak_bytes == saved - given_back
lean = course.bill(with_settings(after, ["tricks.lean_preparation=true"]))
print(
    f"lean: predicted {(first.peak_bytes - saved) / MIB:,.1f} MiB, "
    f"on the bill {lean.peak_bytes / MIB:,.1f}"
)
assert lean.peak_bytes == first.peak_bytes - saved


# %% Draw figure 3 tags=["hide-input"]
def waterfall(theme: Theme):
    """From the peak before to the peak after, row by row."""
    drawn, axes = course.figure(height=3.0)
    names, now = ["peak before", *changed, "peak after"], 0
    for place, name in enumerate(names):
        step = changed.get(name, first.peak_bytes if place == 0 else 0)
        left, width = (min(now, now + step), abs(step)) if step else (0, now)
        now += step
        colour = theme.series[0 if name not in changed else 2 if step < 0 else 1]
        axes.barh(place, width / MIB, left=left / MIB, color=colour, height=0.62)
        says = f"{step / MIB:+,.1f}" if name in changed else f"{now / MIB:,.1f}"
        axes.text((left + width) / MIB, place, f" {says}", va="center", color=theme.ink)
    axes.axvline(
        new["logits"] / MIB, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3))
    )
    axes.text(
        new["logits"] / MIB,
        3,
        "logits alone ",
        ha="right",
        va="center",
        color=theme.quiet,
    )
    axes.set_yticks(range(len(names)), names)
    axes.set(
        xlabel="MiB at the peak",
        xlim=(0, 1.15 * first.peak_bytes / MIB),
        ylim=(len(names) - 0.4, -0.6),
    )
    return drawn


course.show(
    waterfall, "Figure 3. What NF4 saves, and what the usual preparation gives back."
)

# %% [markdown]
# `chunked_loss` shrinks the logits, `lean_preparation` avoids the rest. The larger the model, the more NF4 pays: the
# matrices of an 8B Llama take 13 GiB in 16 bits and 3.4 packed.

# %%
course.show(
    course.staircase("nf4"), "Figure 4. The bill so far: two short steps, for now."
)

# %% [markdown]
# ## 6. Where it breaks
# **`Only Tensors of floating point and complex dtype can require gradients`.** Somebody tried to train the quantised
# weights. Cause: codes are integers. Cure: freeze them, and train an adapter beside.

# %%
try:
    nn.Parameter(packed)
except RuntimeError as caught:
    print(caught)
    assert (
        "Only Tensors of floating point and complex dtype can require gradients"
        in str(caught)
    )
frozen_codes = nn.Parameter(packed, requires_grad=False)  # the cure

# %% [markdown]
# **`Merge lora module to 4-bit linear may get different generations due to rounding errors.`** peft's warning when an
# adapter is added to packed weights: the sum is rounded again. Nothing warns of its twin: the adapter over
# the *published* base, which has no rounding to repair.
# Cause of both: the adapter belongs to the rounded base. Cure: unpack that base, add the adapter, store the sum in 16
# bits, as `cria merge` does.
#
# A toy of width $D = 64$, an adapter of rank $r = 8$, inputs that lie near eight directions:

# %%
torch.manual_seed(1)
D, r = 64, 8
published = torch.randn(D, D) / 8
codes_of_it, scales_of_it = to_codes(published, nf4)
frozen = (codes_of_it[::2] << 4 | codes_of_it[1::2]).to(torch.uint8), scales_of_it
inputs = torch.randn(512, 8) @ torch.randn(8, D) / 8**0.5 + 0.1 * torch.randn(512, D)
# the base, and something new
wanted = inputs @ (published + 0.01 * torch.randn(D, 2) @ torch.randn(2, D)).T
A, B = (torch.randn(r, D) / 8).requires_grad_(), torch.zeros(D, r, requires_grad=True)
optimizer = torch.optim.Adam([A, B], lr=1e-2)
for _ in range(300):
    optimizer.zero_grad()
    F.mse_loss(Multiply.apply(inputs, *frozen) + inputs @ A.T @ B.T, wanted).backward()
    optimizer.step()

base, learnt = Multiply.weight(*frozen).view(D, D), (B @ A).detach()
losses = {}
for way, weight in {
    "rounded base alone": base,
    "rounded base + adapter, as trained": base + learnt,
    "published base + adapter": published + learnt,
    "merged and rounded again": from_codes(*to_codes(base + learnt, nf4), nf4).view(
        D, D
    ),
    "cure: merged, in bf16": (base + learnt).bfloat16().float(),
}.items():
    losses[way] = F.mse_loss(inputs @ weight.T, wanted).item()
    print(f"{way:38}{losses[way]:.5f}")
alone, trained, on_published, rounded_again, cured = losses.values()
assert cured < 2 * trained < min(alone, on_published, rounded_again) / 10

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Take blocks of 32 weights, and double quantization in blocks of 256 scales as before. How many bits
#    does a weight take, without mean and tables? The answer is a number of bits.
# 2. **Build.** Fill in `quantile_levels(bits)`: a tensor of $2^{bits}$ rising levels from -1 to 1, zero among them, one
#    level more above zero than below. For 4 bits it gives `nf4`.
# 3. **Reach.** Find 16 levels, a tensor, whose `error` on normal weights is 3 % below NF4's. (`shares` are the weights
#    over their block's scale.)

# %% tags=["exercise"]
bits_in_blocks_of_32 = None


def quantile_levels(bits):
    """FILL ME IN."""


better_levels = None


# %% Check the exercises tags=["hide-input"]
def of_levels(answer):
    three = torch.tensor([-1, -0.5350, -0.2469, 0, 0.1833, 0.3820, 0.6230, 1])
    for bits, right in ((4, nf4), (3, three), (5, None)):
        if (found := answer(bits)) is None:
            raise NotImplementedError
        assert tuple(found.shape) == (2**bits,), (
            f"{bits} bits make {2**bits} levels, not {tuple(found.shape)}"
        )
        above, below, zeros = (
            (found > 0).sum().item(),
            (found < 0).sum().item(),
            (found == 0).sum().item(),
        )
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
    ratio = error(fresh, answer.float()) / error(fresh, nf4)
    hint = (
        "which place is best for a level, given the weights that fell to it? The ends "
        "need not be at -1 and 1"
    )
    assert ratio < 0.97, f"{ratio:.3f} times NF4's error; {hint}"


wrong_bits = "the codes stay; which two parts are shared by fewer weights now?"
course.check(
    1,
    bits_in_blocks_of_32,
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
# bits_in_blocks_of_32 = 4 + 8 / 32 + 32 / (32 * 256)
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
# better_levels = nf4
# # Lloyd's algorithm: the mean of what fell to a level is the best place for it
# for _ in range(20):
#     nearest, _ = to_codes(w, better_levels)
#     better_levels = torch.zeros(16).index_add(0, nearest, shares) / nearest.bincount(
#         minlength=16
#     )
# ```
#
# </details>
#
# ## In one breath
# - **Saves** three quarters of the frozen matrices: 16 bits a weight $\to$ 4.5, or 4.127 with double quantization.
# - **Costs** unpacking before every product, three times a step; on a small model 0.11 of loss after 20 steps. In fp16
#   only 80 % of 7B runs finished without error, in 2023 (qlora's README).
# - **Approximate**: a weight moves by at most 0.152 of its block's scale; products of normal numbers are off by 9 %.
# - **When**: the frozen matrices are what does not fit, so the larger the model, the more.
# - **When not**: the peak is elsewhere; look at the bill first. Or you only generate: GPTQ, which rounds with the help
#   of sample inputs, was up to twice as fast there, slower to train, and as good (Llama-2-7B, mean of four tests: 53.2,
#   bitsandbytes 53.4, unrounded 54.3).
#
# ## Sources
# - Dettmers et al. 2023, *QLoRA*, arXiv 2305.14314, section 3, appendices E and F.
# - Yoshida 2023, *NF4 Isn't Information Theoretically Optimal (and that's Good)*, arXiv 2306.06965 (better levels).
# - Dettmers and Zettlemoyer 2022, arXiv 2212.09720 (small blocks). Li et al. 2023, *LoftQ*, arXiv 2310.08659 (adapters
#   that start as the repair). Hugging Face's blog 2023, *Overview of natively supported quantization schemes* (GPTQ).
# - bitsandbytes 0.50: `functional.py` (`quantize_4bit`), `autograd/_functions.py` (`MatMul4Bit`). peft 0.21:
#   `utils/other.py` (`prepare_model_for_kbit_training`), `tuners/lora/bnb.py` (the warning).
# - Ours: `cria_tricks/tricks/nf4.py`, `tests/tricks/test_nf4.py`; the merge: `cria_tricks/adapter/merge.py`.
