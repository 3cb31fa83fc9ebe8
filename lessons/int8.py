# ---
# jupyter:
#   question: Eight bits round far less than four, so why does our job store its frozen weights in NF4 and not in int8?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # int8: frozen weights in eight bits, outliers apart
# > **Promise.** `load_in_8bit=True` looks like the careful choice: it halves the frozen matrices, and in our small test
# > the loss rose a tenth as much as with NF4. You will write its arithmetic yourself, compute the bill of a training
# > step with it, and find memory that bitsandbytes keeps and nobody needs. Then you can tell when its memory and its
# > rounding are right for you.
# >
# > **Card.** saves half of the frozen matrices: 16 bits a weight become 8 / costs inputs that bitsandbytes keeps, and
# > time / claim: approximate, each number moves by at most half a step of its scale / about 25 minutes / after
# > [NF4](nf4.py)
#
# ## 1. The bill
# Our job is LoRA fine-tuning of Llama-3.2-1B on a T4, with one row of 2,048 tokens at a time. Before [NF4](nf4.py),
# with checkpointing and the chunked loss, its peak was 2,927 MiB, and 1,856 MiB of these were the frozen matrices in 16
# bits. In eight bits a weight takes one byte, and each output feature of a matrix has one fp32 *scale*. What would the
# peak be with int8 (section 5)?

# %% Your guess: MiB of the peak with int8 tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import logging

import bitsandbytes as bnb
import torch.nn.functional as F
from bitsandbytes.autograd._functions import MatMul8bitLt
from torch import nn
from torch.utils.checkpoint import checkpoint

from cria_tricks import BadInput, course
from cria_tricks.course import (
    CARDS,
    T4,
    LiveBytes,
    Theme,
    find_shape,
    resolve,
    results,
    tables,
    with_settings,
)
from cria_tricks.course import time_bill as step
from cria_tricks.techniques import int8
from cria_tricks.techniques.gradient_checkpointing import checkpointed

KIB, MIB = 2**10, 2**20

# %%
L, WIDTH, KEYS, INNER = 16, 2048, 512, 8192
# q and o; k and v; gate, up and down
weights = L * (2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * INNER)
scales = L * (2 * WIDTH + 2 * KEYS + 2 * INNER + WIDTH)  # q, o; k, v; gate, up; down
in_8_bits = weights + 4 * scales
print(f"{weights:,} weights, {2 * weights / MIB:,.1f} MiB in 16 bits")
print(f"{in_8_bits / MIB:,.1f} MiB in 8 bits, scales included")

# %% [markdown]
# ## 2. From scratch, in four steps
# ### Step 1: round a vector to 255 integers
# Take a vector of numbers, and call its largest absolute value $m$ (*absmax*). Divide the range from $-m$ to $m$ into
# 254 equal steps of $m/127$, and store the integer of the nearest mark, $\text{code}=\text{round}(127\,w/m)$. (torch
# rounds a half to the even integer.) So no number moves by more than half a step, $m/254$. The weights of one output
# feature share one $m$. We practise on random numbers in the shape of Llama's `k_proj`.

# %%
import torch

torch.manual_seed(0)
T, D, N = 32, 2048, 512  # tokens, features in, features out
x = torch.randn(T, D)
w = (torch.randn(N, D) / D**0.5).half()


def to_codes(vectors):
    """Return integers from -127 to 127, and the absmax of each vector."""
    absmax = vectors.abs().amax(dim=1).float()
    codes = torch.round(vectors * (127 / absmax)[:, None])
    return codes.to(torch.int8), absmax


def from_codes(codes, absmax):
    return codes * (absmax / 127)[:, None]


def error(found, exact):
    """Return the length of the error over the length of the exact numbers."""
    return ((found - exact).norm() / exact.norm()).item()


codes, absmax = to_codes(w)
stored = from_codes(codes, absmax)
moved = (stored - w.float()).abs()
print(f"rounding error of the weights: {error(stored, w.float()):.2%}")
assert (moved <= absmax[:, None] / 254 * 1.001).all()

# %% [markdown]
# [NF4](nf4.py)'s rounding error on such numbers is 9.2 %, eleven times as large.
#
# ### Step 2: multiply integers
# NF4 unpacks a matrix and then multiplies in 16 bits. With int8 we can multiply the integers themselves, if the input
# is rounded, too. Each token $t$ of the input gets a scale $a_t$, and each output feature $n$ has its scale $b_n$. Both
# stay the same while we sum over the features $d$, so they can leave the sum:
#
# $$\sum_d x_{td}\, w_{nd} \approx \frac{a_t\, b_n}{127^2} \sum_d \text{code}_{td}\,\text{code}_{nd}$$
#
# This is *vector-wise* quantization. The sums need 32 bits, because in 8 bits they overflow, and torch reports no
# error.


# %%
def multiply(x_codes, x_absmax):
    sums = x_codes.int() @ codes.int().T  # exact: at most 127 * 127 * D
    return sums * (x_absmax[:, None] * absmax / 127**2)


exact = x @ w.float().T
found = multiply(*to_codes(x))
print(f"the output is off by {error(found, exact):.2%}")
# the same as unpacking both factors first
unpacked_first = from_codes(*to_codes(x)) @ stored.T
torch.testing.assert_close(found, unpacked_first, rtol=0, atol=1e-5)

ones = torch.full((4, 4), 127, dtype=torch.int8)
wrapped = (ones @ ones)[0, 0].item()
print(f"4 * 127 * 127 = {4 * 127 * 127:,}, but torch in int8 returns {wrapped}")
assert wrapped == 4 * 127 * 127 % 256

# %% [markdown]
# ### Step 3: see what an outlier does
# Large transformers have a few features whose values are up to 20 times as large as the others, for most tokens and in
# the same columns of the input. Such an *outlier* sets the scale of its token, so all its other features share the few
# integers near zero. We set one feature to a large value, and divide the error of the output by the part of it that the
# other 2,047 features make: 100 % means that this part is lost. We compare with the *stored* weights, so from here on
# only the error of the rounded *input* counts: 0.83 % without an outlier, not the 1.18 % of step 2.


# %%
def with_outlier(size):
    given = x.clone()
    given[:, 7] = size
    return given


def vector_wise(x):
    return multiply(*to_codes(x))


def damage(way, size):
    """Return the error over what all features but the outlier add to the output."""
    given = with_outlier(size)
    others = with_outlier(0) @ stored.T
    return ((way(given) - given @ stored.T).norm() / others.norm()).item()


for size in (0, 6, 20, 60):
    print(f"outlier of {size:2}: {damage(vector_wise, size):5.2%} off")
assert damage(vector_wise, 60) > 9 * damage(vector_wise, 6)

# %% [markdown]
# ### Step 4: multiply outlier columns apart
# The method LLM.int8() looks for columns of the input in which any token has an absolute value of 6 or more. It
# multiplies these few columns in floating point, and all others as integers.


# %%
def decompose(x, threshold=6.0):
    """Return codes and scales without outliers, and which columns have outliers."""
    large = x.abs() >= threshold
    columns = large.any(dim=0)
    # as in bitsandbytes, the small values of these columns still count for absmax
    x_codes, x_absmax = to_codes(x.masked_fill(large, 0))
    x_codes[:, columns] = 0  # multiplied apart, also where they are small
    return x_codes, x_absmax, columns


def mixed(x):
    x_codes, x_absmax, columns = decompose(x)
    in_floats = x[:, columns].float() @ stored[:, columns].T
    return multiply(x_codes, x_absmax) + in_floats


for size in (6, 20, 60):
    print(f"outlier of {size:2}: {damage(mixed, size):5.2%} off")
    assert damage(mixed, size) < 0.01


# %% Draw figure 1 tags=["hide-input"]
def the_ways(theme: Theme):
    """The two ways of a multiplication."""
    sketch = course.Sketch(theme, 41.5, 12)
    sketch.text(5, 1.9, "input, T × D")
    sketch.tensor(1, 3, 8, 5, "", color=0)
    sketch.text(3.9, 5.5, "codes")
    sketch.tensor(6.9, 3, 0.7, 5, "", color=3)
    sketch.text(7.2, 8.9, "6 or more", quiet=True)
    sketch.tensor(9.6, 3, 0.8, 5, "", color=1)
    sketch.text(10, 1.9, "a")
    sketch.text(12, 5.5, "×")
    sketch.text(17, 0.5, "weight, D × N")
    sketch.tensor(13.5, 1.5, 7, 8, "codes", color=0)
    sketch.tensor(13.5, 7.2, 7, 0.7, "", color=3)
    sketch.tensor(13.5, 10.2, 7, 0.8, "", color=1)
    sketch.text(21.4, 10.6, "b")
    sketch.text(22.2, 5.5, "=")
    sketch.tensor(23.9, 3, 7, 5, "sums, int32", color=0)
    sketch.text(27.4, 8.9, "· a b / 127²")
    sketch.text(32.5, 5.5, "+")
    sketch.tensor(34, 3, 7, 5, "floating point", color=3)
    sketch.text(37.5, 9.3, "outlier\ncolumns", quiet=True)
    return sketch.figure


course.show(
    the_ways,
    "Figure 1. Integers of the input and the weight are multiplied, and the sums are "
    "scaled by a for each token and b for each output; outlier columns are multiplied "
    "apart in floating point and added.",
)


# %% Draw figure 2 tags=["hide-input"]
def of_outliers(theme: Theme):
    """Error against the outlier's size."""
    drawn, axes = course.figure(height=2.9)
    sizes = [6, 10, 20, 40, 60, 100, 250, 600, 1500]
    axes.plot(
        sizes[:7],
        [100 * size / 440 for size in sizes[:7]],
        color=theme.quiet,
        label="predicted: s / 440",
    )
    for label, way, color, marker in (
        ("all as integers", vector_wise, 1, "o"),
        ("outlier apart", mixed, 0, "s"),
    ):
        axes.plot(
            sizes,
            [100 * damage(way, size) for size in sizes],
            color=theme.series[color],
            marker=marker,
            linestyle="",
            label=label,
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="size s of the outlier; the others have size 1",
        ylabel="error, %",
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.grid()
    axes.legend(loc="center right")
    return drawn


course.show(
    of_outliers,
    "Figure 2. If all features are rounded together, the error grows with the outlier "
    "until the other features are lost; with the outlier apart it stays below 1 %. The "
    "deeper part below derives the line.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: predict these errors
# A number that falls anywhere between two marks with equal probability moves by $m/(127\sqrt{12})$ (the RMS, over many
# numbers). That gives the error of the weights, 0.83 %. The errors of input and weight are independent, so their
# squares add up in the output. And with an outlier of size $s$ the step is $s/127$, so features of size 1 move by
# $s/(127\sqrt{12})=s/440$.
#
# For the outlier columns the paper takes the original 16-bit weights. bitsandbytes has only the 8-bit weights that it
# stored.


# %% tags=["deep"]
def expected(vectors):
    """Return the expected error, from the absmax of each vector."""
    steps = vectors.abs().amax(dim=1).float() / 127
    return (steps.square().mean() / 12 / vectors.float().square().mean()).sqrt().item()


of_weights, of_input = expected(w), expected(x)
of_output = (of_input**2 + of_weights**2) ** 0.5
print(f"weights: {of_weights:.2%}, counted {error(stored, w.float()):.2%}")
print(f"output: {of_output:.2%}, counted {error(found, exact):.2%}")
assert abs(error(stored, w.float()) / of_weights - 1) < 0.02
assert abs(error(found, exact) / of_output - 1) < 0.05
for size in (6, 20, 60):
    assert abs(damage(vector_wise, size) / (size / 440) - 1) < 0.1
assert all(damage(mixed, size) < 1.1 * of_input for size in (6, 20, 60, 600))
assert round(100 * error(stored, w.float()), 2) == 0.83

# %% [markdown]
# ## 3. Prove it
# The claim is *approximate*, with the bound of step 1: half a step of the scale. Our integers are those of bitsandbytes
# on a CPU, bit for bit, for the weights and for an input with an outlier. Outputs agree, too.

# %%
given, quantize = with_outlier(60).half(), bnb.functional.int8_vectorwise_quant
their_codes, their_absmax, _ = quantize(w)
their_x_codes, their_x_absmax, their_columns = quantize(given.clone(), threshold=6.0)
x_codes, x_absmax, columns = decompose(given)
assert torch.equal(codes, their_codes)
assert torch.equal(absmax, their_absmax)
assert torch.equal(x_codes, their_x_codes)
assert torch.equal(x_absmax, their_x_absmax)
assert torch.equal(columns.nonzero().flatten(), their_columns)
assert codes.nbytes + absmax.nbytes == N * (D + 4)
their_output, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
    given, x_codes, codes, x_absmax, absmax, their_columns, None
)
# outputs near 8: the two add up in another order, and fp16 has steps of 2**-7 there
torch.testing.assert_close(mixed(given).half(), their_output, rtol=0, atol=2**-7)
print("integers, scales and outlier columns: equal bit for bit")

# %% [markdown] tags=["deep"]
# ### Deeper: a bound for an output
# Each factor moves by at most half a step. So with $\hat x$ for the rounded input, an output moves by at most
# $\frac{a_t}{254}\sum_d|w_{nd}| + \frac{b_n}{254}\sum_d|\hat x_{td}|$. This is the worst case, in which all errors have
# the same sign. In our example, the worst of 16,384 outputs uses 5 % of it, because most errors cancel. The package's
# own reference gives the same integers, too.

# %% tags=["deep"]
plain_codes, plain_absmax = to_codes(x)
rounded_x = from_codes(plain_codes, plain_absmax)
of_x = plain_absmax[:, None] / 254 * w.float().abs().sum(dim=1)
of_w = absmax / 254 * rounded_x.abs().sum(dim=1, keepdim=True)
used = ((found - exact).abs() / (of_x + of_w)).max().item()
print(f"the worst output uses {used:.0%} of its bound")
assert used < 1
assert all(map(torch.equal, (codes, absmax), int8.quantize_rows(w)))
torch.testing.assert_close(
    mixed(given), int8.linear_8bit(given.float(), codes, absmax), rtol=0, atol=1e-5
)

# %% [markdown]
# ## 4. What it costs
# **Memory that bitsandbytes keeps.** Here are eight small blocks, ${y = x + W\,\text{norm}(x)}$, with a frozen $W$. The
# output of each block takes $s=16$ KiB, and it is the next block's input. With
# [checkpointing](gradient_checkpointing.py), only these eight inputs should be in memory after the forward pass:
# $8s=128$ KiB. We compare 16 bits with `MatMul8bitLt`, which bitsandbytes uses on a GPU.

# %%
small_codes, small_absmax = to_codes(torch.randn(64, 64).half() / 8)
s = 2 * 128 * 64  # 128 tokens, 64 wide, 16 bits


class Block(nn.Module):
    def __init__(self, int8_matmul):
        super().__init__()
        self.int8_matmul = int8_matmul  # None for 16 bits

    def forward(self, x):
        normed = F.layer_norm(x, (64,))
        if self.int8_matmul is None:
            W = from_codes(small_codes, small_absmax).to(x.dtype)
            return x + F.linear(normed, W)
        state = bnb.MatmulLtState(CB=small_codes, SCB=small_absmax)  # codes, scales
        state.threshold, state.has_fp16_weights = 6.0, False  # only codes are stored
        return x + self.int8_matmul.apply(normed, small_codes, None, None, state)


def torchs_checkpoint(block, x):
    return checkpoint(block, x, use_reentrant=False)


def measure(int8_matmul, way=torchs_checkpoint, dtype=torch.float16):
    """Return the bytes in memory after the forward pass, and the input's gradient."""
    torch.manual_seed(1)
    start = y = torch.randn(128, 64).to(dtype).requires_grad_()
    with LiveBytes() as memory:
        for _ in range(8):
            y = way(Block(int8_matmul), y)
    in_memory = memory.live
    y.float().square().sum().backward()
    return in_memory, start.grad


in_16_bits, _ = measure(None)
in_int8, gradient = measure(MatMul8bitLt)
print(f"16 bits: {in_16_bits / KIB:.0f} KiB, int8: {in_int8 / KIB:.0f} KiB")
assert (in_16_bits, in_int8) == (8 * s, 2 * 8 * s)

# %% [markdown]
# With int8 it is twice as much. Why? torch's checkpointing drops the tensors that an operation gives to autograd with
# `save_for_backward`. But bitsandbytes stores the input `A` as an attribute, `ctx.tensors = (CAt, subA, A)`. Autograd
# does not know of it, so checkpointing cannot drop it.
#
# Only the gradient of the *weight* needs this input. But our weight is frozen, and the gradient of the input needs only
# the codes. So we release it, and no bit of the gradient changes.


# %%
class Released(MatMul8bitLt):
    @staticmethod
    def forward(ctx, *args):
        y = MatMul8bitLt.forward(ctx, *args)
        ctx.tensors = (None, None, None)
        return y


in_memory, same_gradient = measure(Released)
print(f"int8, input released: {in_memory / KIB:.0f} KiB")
assert in_memory == 8 * s
assert torch.equal(gradient, same_gradient)

# %% [markdown]
# The input was kept for nothing. The package does not change bitsandbytes 0.50.2, so the bill in section 5 has these
# bytes. Folded parts show ways around: `use_reentrant=True`, a checkpoint of your own, or none.
#
# **Quality.** We fine-tuned SmolLM2-135M for 20 steps of one row and measured the loss on 9 other rows. int8 costs
# 0.011 to 0.012 of loss, and NF4 costs 0.105 to 0.110 (the table of losses below). These runs were on a CPU, where
# bitsandbytes rounds the inputs only in evaluation. On a GPU it does so in training, too (not measured).
#
# **Time.** A T4's data sheet has 130 TOPS for int8 and 65 for fp16. However, each multiplication must first find the
# outliers and round its input, and then scale its sums. bitsandbytes has measured Qwen2.5-3B *generating text* on a T4
# (version 0.45), in tokens a second:
#
# | rows at once | fp16 | int8 | int8 takes |
# |---|---|---|---|
# | 1 | 26 | 6 | 4.3 times as long |
# | 8 | 190 | 44 | 4.3 times as long |
# | 32 | 532 | 167 | 3.2 times as long |
#
# Generating multiplies 1 to 32 tokens at once, so this fixed work counts much. *Training* multiplies 2,048, so it
# counts less (not measured on a T4). Our estimate leaves it out, so it may be too low: 1.92 seconds a row (1.57 to
# 2.36), and 1.91 with NF4. The table of the step is from your GPU, or from a CPU, which says nothing about GPUs.

# %% Print the measured losses tags=["hide-input"]
study = results.study("quality") or {}
kinds = ("fp32", "int8", "nf4")
runs = [run for run in study.get("runs", ()) if run["case"] in kinds]
course.show_table(
    tables.quality(runs) if runs else "no committed results next to this package"
)

# %% Measure a step on a GPU, or show what a CPU measured tags=["hide-input"]
step_of = (
    "peft=lora attention=best precision=best gradient_checkpointing=true "
    "chunked_loss=true"
)
course.on_a_gpu("int8", off=step_of, on=f"{step_of} quantization=int8")

# %% [markdown] tags=["deep"]
# ### Deeper: the paper's speed, and a checkpoint that does not suffer
# The paper's table 5 of 2022 says that at width 2,048 the bare integer multiplication is 1.61 times as fast as one in
# 16 bits, and that the whole of LLM.int8() is 0.51 times as fast. In December 2024 bitsandbytes 0.45 rebuilt the code,
# and its own benchmark gives these figures:
#
# | rows at once | int8 before 0.45 | int8 in 0.45 |
# |---|---|---|
# | 1 | 3.34 | 5.98 tokens/s |
# | 8 | 24.28 | 44.15 tokens/s |
# | 32 | 93.75 | 167.37 tokens/s |
#
# bitsandbytes' 4-bit multiplication kept its inputs, too, until a user noticed it in 2024. The backward pass unpacks
# the weight to the input's dtype, as NF4 does.
#
# The checkpoint that you wrote yourself in [the lesson on checkpointing](gradient_checkpointing.py) does not suffer. It
# runs its forward pass without autograd, so no context of bitsandbytes is left after it. torch's `use_reentrant=True`
# does the same, and frees these inputs in transformers, too.


# %% tags=["deep"]
def reentrant(block, x):
    return checkpoint(block, x, use_reentrant=True)


for way in (checkpointed, reentrant):
    in_memory, its_gradient = measure(MatMul8bitLt, way)
    print(f"{way.__name__}: {in_memory / KIB:.0f} KiB")
    assert in_memory == 8 * s
    assert torch.equal(gradient, its_gradient)

# %% [markdown]
# ## 5. The production switch
# In plain Hugging Face code, int8 is a configuration, as NF4 is. The cell prints it, and then our bill. The threshold
# of step 4 is `llm_int8_threshold` (0.0 skips the search for outliers), and the head stays in 16 bits. In each block
# bitsandbytes keeps four inputs: one for q, k and v together, one for o, one for gate and up, and one for down, which
# is four times as wide. The last lines show what NF4 and int8 save, added to the lessons before and in the whole job
# (before: without, after: with).

# %%
print(int8.PLAIN)
before, nf4 = course.so_far("mixed_precision"), course.so_far("nf4")
after = with_settings(before, ["tricks.quantization=int8"])
kept = L * 2048 * 2 * (WIDTH + WIDTH + WIDTH + INNER)  # 16 bits
print(f"predicted: {kept / MIB:,.0f} MiB of kept inputs")
course.show_bill(before, after)
lines = {line.name: line.bytes for line in course.bill(after).lines}
assert lines["weights: blocks"] == in_8_bits
assert lines["saved activations"] == L * 2048 * 2 * WIDTH + kept
course.reveal(guess, course.bill(after).peak_bytes / MIB, "MiB")

# %% What NF4 and int8 are worth, and an 8B model tags=["hide-input"]
course.show_worth("quantization", "double_quantization")
whole = course.so_far("kwanzaa")
none = ["tricks.quantization=none", "tricks.double_quantization=false"]
whole_in_16 = with_settings(whole, none)
whole_in_8 = with_settings(whole_in_16, ["tricks.quantization=int8"])
for place, first, second in (
    ("int8, added to earlier lessons", before, after),
    ("int8 for NF4 in the whole job", whole_in_16, whole_in_8),
):
    old, new = (round(course.bill(some).peak_bytes / MIB) for some in (first, second))
    print(f"{place:33}{old:9,}{new:9,}{new - old:+9,}")
parts = {}
for name, recipe in (("16 bits", before), ("int8", after), ("NF4", nf4)):
    large = course.bill(with_settings(recipe, ["model=llama-3.1-8b"]))
    verdict = "fits" if large.fits else "does not fit"
    print(f"Llama-3.1-8B in {name}: {large.least_bytes / 2**30:.1f} GiB, {verdict}")
    parts[name] = {line.name: line.bytes / 2**30 for line in large.lines}
less = parts["16 bits"]["weights: blocks"] - parts["int8"]["weights: blocks"]
more = parts["int8"]["saved activations"] - parts["16 bits"]["saved activations"]
print(f"there int8 saves {less:.1f} GiB of weights and keeps {more:.1f} GiB of inputs")

# %% Check the numbers in the text tags=["hide-input"]
peaks = [course.bill(recipe).peak_bytes / MIB for recipe in (before, after, nf4)]
assert [round(peak) for peak in peaks] == [2927, 2896, 1550]  # 1,549.5
assert round(peaks[1] - kept / MIB - peaks[2]) == 451  # with use_reentrant=True
whole_peaks = [
    course.bill(recipe).peak_bytes / MIB for recipe in (whole_in_16, whole_in_8, whole)
]
assert [round(peak) for peak in whole_peaks] == [2893, 2863, 1516]
assert (round((2 * weights - in_8_bits) / MIB), kept / MIB) == (927, 896)
predicted = step(after, find_shape(before.model), CARDS["t4"])
assert [round(t, 2) for t in (predicted.seconds, predicted.low, predicted.high)] == [
    1.92,
    1.57,
    2.36,
]
for in_fp16, old, new, longer in (
    (25.66, 3.34, 5.98, 4.3),
    (189.56, 24.28, 44.15, 4.3),
    (532.30, 93.75, 167.37, 3.2),
):
    assert 1.78 < new / old < 1.83
    assert round(in_fp16 / new, 1) == longer


# %% Draw figure 3 tags=["hide-input"]
def bills(theme: Theme):
    """The same step, its frozen weights stored in four ways."""
    drawn, axes = course.figure(height=2.9)
    parts = {
        "blocks' matrices": "weights: blocks",
        "embedding and head": "weights: all others",
        "saved activations": "saved activations",
    }
    ways = {
        "16 bits": (before, 0),
        "int8": (after, 0),
        "int8, inputs released": (after, kept),
        "NF4": (nf4, 0),
    }
    colours = [*theme.series[:3], theme.quiet]
    for place, (recipe, gone) in enumerate(ways.values()):
        bill = course.bill(recipe)
        sizes = {line.name: line.bytes for line in bill.lines}
        stack = [sizes[name] for name in parts.values()]
        stack[2] -= gone
        stack.append(bill.peak_bytes - gone - sum(stack))
        left = 0
        for size, color, label in zip(
            stack, colours, [*parts, "the rest"], strict=True
        ):
            axes.barh(
                place,
                size / MIB,
                left=left / MIB,
                color=color,
                height=0.62,
                label=label if place == 0 else None,
            )
            left += size
        axes.text(
            left / MIB, place, f" {left / MIB:,.0f}", va="center", color=theme.ink
        )
    axes.set_yticks(range(len(ways)), list(ways))
    axes.set(xlabel="peak of a step, MiB", xlim=(0, 3400), ylim=(len(ways) - 0.5, -0.5))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(False)  # the totals would be struck
    drawn.legend(loc="outside upper center", ncols=4)
    return drawn


course.show(
    bills,
    "Figure 3. int8 halves the blocks' matrices, but the saved activations grow by "
    "almost as much; without the kept inputs it would lie between 16 bits and NF4.",
)

# %% [markdown]
# int8 saves 927 MiB of weights, and bitsandbytes keeps 896 MiB of inputs. The peak falls by 31 MiB only. (With
# `use_reentrant=True` it falls by about 927, and NF4 still saves 451 more.) NF4 keeps no inputs and lowers the peak by
# 1,377 MiB. So our job takes NF4: with int8 its peak would be 2,863 - 1,516 = 1,347 MiB higher.
#
# The kept inputs grow with the tokens, and the saving grows with the weights. So in an 8B model int8 saves twice what
# it keeps, and it makes the model fit.
#
# Here is the complete command, and one that shows this bill. Both switch on checkpointing and the chunked loss, which
# the recipe leaves out on a T4. Without them int8 keeps nothing extra, and its peak is 451 MiB above NF4's (deeper
# part).
#
# ```bash
# cria train kwanzaa --set tricks.quantization=int8 \
#     --set tricks.double_quantization=false \
#     --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true
# cria plan kwanzaa --gpu t4 --set tricks.quantization=int8 \
#     --set tricks.double_quantization=false \
#     --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true
# ```

# %% [markdown] tags=["deep"]
# ### Deeper: with peft's usual preparation the bill grows, and without checkpointing it falls
# Many tutorials call `prepare_model_for_kbit_training` after loading. Our job leaves it out; see [lean
# preparation](mixed_precision.py). With it, int8 does not save 31 MiB, but costs 1,892:

# %% tags=["deep"]
usual = with_settings(after, ["tricks.lean_preparation=false"])
course.show_bill(before, usual)
# q, k and v; o (16 bits); gate and up; down
kept_usually = L * 2048 * (4 * WIDTH + 2 * WIDTH + 4 * WIDTH + 4 * INNER)
lines = {line.name: line.bytes for line in course.bill(usual).lines}
assert lines["saved activations"] == L * 2048 * 4 * WIDTH + kept_usually
assert (L * 2048 * 4 * WIDTH, kept_usually) == (256 * MIB, 1664 * MIB)
assert round(
    (course.bill(usual).peak_bytes - course.bill(before).peak_bytes) / MIB
) == (1892)
stored_all = ["tricks.gradient_checkpointing=false"]
plain_16, plain_8 = (
    course.bill(with_settings(recipe, stored_all)).peak_bytes / MIB
    for recipe in (before, after)
)
print(f"without checkpointing: {plain_16:,.0f} MiB in 16 bits, {plain_8:,.0f} in int8")
assert round(plain_16 - plain_8) == round((2 * weights - in_8_bits) / MIB)
on_a_t4 = [*stored_all, "tricks.chunked_loss=false"]
of_int8, of_nf4 = (
    course.bill(with_settings(recipe, on_a_t4)).peak_bytes / MIB
    for recipe in (whole_in_8, whole)
)
print(f"as the recipe runs on a T4: {of_nf4:,.0f} MiB in NF4, {of_int8:,.0f} in int8")
assert round(of_int8 - of_nf4) == 451

# %% [markdown] tags=["deep"]
# - *Weights: all others*, 501 to 1,002 MiB: the preparation casts everything that is not packed to fp32. That is the
#   embedding, which in this model is also the head.
# - *16-bit copy of the head*, 501 more: autocast multiplies in 16 bits, so it makes a copy of the fp32 head.
# - *Saved activations*, 128 to 1,920 MiB: hidden states are fp32 now, which makes 256. The other 1,664 are kept inputs,
#   and most of them are fp32, too.
#
# The first two, and the fp32 hidden states, come with NF4 as well, because they belong to the preparation.
#
# Without checkpointing, int8 saves all of its 927 MiB. Every input is saved for the adapters anyway, so bitsandbytes
# keeps no tensor that would not be there without it.

# %% [markdown]
# ## 6. Where it breaks
# **`MatMul8bitLt: inputs will be cast from torch.float32 to float16 during quantization`.** This warning comes once for
# each multiplication, 8 times here. peft's `prepare_model_for_kbit_training` makes the norms return fp32, so
# bitsandbytes rounds a 16-bit copy. But it keeps the fp32 original, which is twice as large. Cure: do not call it
# (`tricks.lean_preparation=true`).
#
# **`Only Tensors of floating point and complex dtype can require gradients`.** Codes are integers, so they have no
# gradient. Cure: leave them frozen, and train an adapter. Our plan refuses `tricks.quantization=int8` with
# `tricks.peft=none`.

# %%
heard = []


def hear(record):
    heard.append(record.getMessage())  # returns nothing, so it is not printed


logger = logging.getLogger("bitsandbytes.autograd._functions")
logger.setLevel(logging.WARNING)  # measuring on a GPU has silenced it
logger.addFilter(hear)
wide, _ = measure(MatMul8bitLt, dtype=torch.float32)
print(f"{heard[0]}:\n    {wide / KIB:.0f} KiB in memory, {len(heard)} warnings")
heard.clear()
narrow, _ = measure(MatMul8bitLt)  # the cure
print(f"hidden states in 16 bits: {narrow / KIB:.0f} KiB, {len(heard)} warnings")
assert (wide, narrow, heard) == (4 * 8 * s, 2 * 8 * s, [])

# %% Check the second failure tags=["hide-input"]
try:
    nn.Parameter(codes)
except RuntimeError as raised:
    print(raised)
    assert "floating point and complex dtype can require gradients" in str(raised)
try:
    resolve(with_settings(after, ["tricks.peft=none"]), T4)
except BadInput as refused:
    print(refused)
    assert "nothing would train" in str(refused)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** The ordinary features of a token have absolute values of at most 1, and one outlier has the value $s$.
#    All are rounded together. What is the smallest $s$ at which every ordinary feature gets the code 0?
# 2. **Build.** Limit the damage: give a scale to every `size` numbers of a vector. Fill in `in_blocks(vectors, size)`,
#    where `size` divides the length, and no block is all zeros. It returns a pair: int8 codes of shape (vectors,
#    blocks, size), and the absmax of each block, fp32 of shape (vectors, blocks). (About two lines, with `to_codes`.)
#    (Why can an integer multiplication not use such scales? The solution answers.)
# 3. **Reach.** What int8 saves does not depend on the tokens of a row, but what bitsandbytes keeps does. In the bill of
#    section 5, for which number of tokens are the two equal? Your answer may be off by 1 %.

# %% tags=["exercise"]
smallest_ruinous_outlier = None


def in_blocks(vectors, size):
    """FILL ME IN: return codes and scales."""


tokens_that_use_it_up = None


# %% Check the exercises tags=["hide-input"]
def of_ruin(answer):
    size = float(answer)
    code = round(127 / size)
    assert code == 0, (
        f"next to an outlier of {size:g} a feature of 1 still has the code {code}; "
        "it is 127 / s, rounded"
    )
    assert size < 254.5, f"not {size:g}; with a smaller outlier the codes are 0, too"


def of_blocks(answer):
    for size in (64, 16, 256):
        vectors = with_outlier(600)
        if (found := answer(vectors.clone(), size)) is None:
            raise NotImplementedError
        its_codes, its_scales = found
        shapes = (T, D // size, size), (T, D // size)
        assert (tuple(its_codes.shape), tuple(its_scales.shape)) == shapes, (
            f"shapes must be {shapes[0]} and {shapes[1]}"
        )
        assert its_codes.dtype == torch.int8, f"codes are int8, not {its_codes.dtype}"
        assert its_scales[:, -1].max() < 100, (
            "the outlier still spoils blocks that it is not in"
        )
        right = vectors.reshape(T, -1, size).abs().amax(dim=2)
        assert torch.allclose(its_scales, right), (
            "a scale is the largest absolute value of its block, as in to_codes"
        )
        unpacked = (its_codes * (its_scales / 127)[:, :, None]).reshape(T, D)
        off = (unpacked - vectors).abs()
        assert (off <= right.repeat_interleave(size, 1) / 254 * 1.001).all(), (
            "unpacked, a number is more than half a step away from where it was"
        )


def of_tokens(answer):
    tokens = float(answer)
    saved = (2 * weights - in_8_bits) / MIB
    used_up = tokens * L * 2 * (3 * WIDTH + INNER) / MIB
    found = (
        f"at {tokens:,.0f} tokens {used_up:,.0f} MiB are kept and {saved:,.0f} saved"
    )
    assert abs(used_up / saved - 1) <= 0.01, (
        f"{found}; which inputs are kept, and how many bytes does each number take?"
    )


course.check(
    1, smallest_ruinous_outlier, of_ruin, "the size s of an outlier, one number"
)
course.check(
    2,
    in_blocks,
    of_blocks,
    "a function (vectors, size) -> a pair of tensors, codes and scales",
)
course.check(3, tokens_that_use_it_up, of_tokens, "a number of tokens")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# smallest_ruinous_outlier = 254  # 127 * 1 / 254 = 0.5, which rounds to the even 0
#
#
# # An integer multiplication cannot use such scales, because they change along
# # the sum over the features, so they cannot leave it.
# def in_blocks(vectors, size):
#     codes, scales = to_codes(vectors.reshape(-1, size))
#     return codes.reshape(len(vectors), -1, size), scales.reshape(len(vectors), -1)
#
#
# kept_for_a_token = L * 2 * (3 * WIDTH + INNER)
# tokens_that_use_it_up = (2 * weights - in_8_bits) / kept_for_a_token  # 2,118
# ```
#
# </details>
#
# ## In one breath
# - **Saves** one of the two bytes of every frozen weight; the scales add 1.4 MiB. In our job the peak falls by 31 MiB.
# - **Costs** 896 MiB of inputs that bitsandbytes keeps for nothing, if you use checkpointing without
#   `use_reentrant=True`, and time: generating text on a T4 takes 3 to 4 times as long as in fp16 (bitsandbytes 0.45).
#   For training we have not measured it.
# - **Approximate**: a number moves by at most half a step of its scale. For random numbers without outliers, an output
#   is off by about 1.2 %.
# - **When**: the model fits in 8 bits but not in 16, and quality matters more than speed; or rows are short.
# - **When not**: a small model with long rows, where NF4 saves far more. [What we left
#   out](../docs/left_out.md#other-ways-to-store-weights) has other formats.
#
# ## Sources
# - Dettmers et al. 2022, *LLM.int8()*, arXiv 2208.07339, sections 3.1 and 3.2; appendix D, table 5 for the speed.
# - bitsandbytes 0.50.2, `autograd/_functions.py`: `MatMul8bitLt`; its pull request 1270 (2024) for the 4-bit
#   multiplication. Its `CHANGELOG.md`, 0.45.0 (pull request 1401 rebuilt int8), and `benchmarking/README.md`: Qwen 2.5
#   3B on a T4, 0.45.0 against 0.44.1, the lines FP16 and INT8+Decomp.
# - peft 0.21.2, `utils/other.py`: `prepare_model_for_kbit_training`; its issue 2424 for the warning.
# - Ours: `cria_tricks/techniques/int8.py`, `tests/techniques/test_int8.py`, `cria_tricks/bill/block.py` for the kept
#   inputs.
