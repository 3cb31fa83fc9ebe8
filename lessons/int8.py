# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # int8: half the weights, and a larger bill
# > **Promise.** The frozen matrices shrink from 1,856 MiB to 929, and a product is wrong by about 1.2 %. The bill of a
# > step *grows* by 1,868 MiB, and you find every byte of that.
#
# > **Card.** saves a byte of two for each frozen weight / costs rounded inputs in every product, and inputs that
# > bitsandbytes pins / approximate: half a step of a row's scale / 30 minutes / after [LoRA](lora.py)
#
# The course has one job: train Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB. [The lesson
# on LoRA](lora.py) froze the model and added adapters. In fp16, before the [chunked loss](chunked_loss.py), a step
# peaks at 5,637 MiB. Must each frozen weight take two bytes?

# %% Imports and settings tags=["hide-input"]
import logging

import bitsandbytes as bnb
import torch
import torch.nn.functional as F
from bitsandbytes.autograd._functions import MatMul8bitLt
from torch import nn
from torch.utils.checkpoint import checkpoint

from cria_tricks import course
from cria_tricks.bench import results, tables
from cria_tricks.bench.style import Theme
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks.gradient_checkpointing import checkpointed
from cria_tricks.tricks.int8 import linear_8bit, quantize_rows

torch.manual_seed(0)
KIB, MIB = 1024, 2**20

# %% [markdown]
# ## 1. The bill
# A block of Llama-3.2-1B has seven matrices; there are $L = 16$ blocks. The model is 2,048 wide, its keys and values
# 512, the inside of its MLP 8,192. In 8 bits a weight takes one byte. To read the bytes we need one scale for each
# output feature, in fp32.

# %%
L, WIDTH, KEYS, INNER = 16, 2048, 512, 8192
# q and o; k and v; gate, up and down
weights = L * (2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * INNER)
scales = L * (2 * WIDTH + 2 * KEYS + 2 * INNER + WIDTH)
in_8_bits = weights + 4 * scales
print(
    f"{weights:,} weights: {2 * weights / MIB:,.1f} MiB in 16 bits, "
    f"{in_8_bits / MIB:,.1f} in 8, scales included"
)
assert weights == 973_078_528

# %% [markdown]
# So 927 MiB should go, and 5,637 become 4,710. Keep that guess in mind. It is wrong, and section 5 shows by how much.

# %% Your guess: MiB of the peak with int8 tags=["predict"]
guess = 0  # @param {type:"number"}

# %% [markdown]
# ## 2. From scratch, in four steps
# **Round to a ruler.** Take a row of numbers and its largest size $m = \max|w|$ (*absmax*). Lay a ruler of 255 marks
# from $-m$ to $m$ and keep the number of the nearest mark, $\text{code} = \text{round}(127\,w / m)$. Nothing moves by
# more than half a step, $m / 254$. What falls anywhere between two marks alike moves by $m / (127\sqrt{12})$ in the
# root mean square.

# %%
# tokens, features in, features out: a key matrix of Llama-3.2-1B
T, D, N = 32, 2048, 512
x, w = torch.randn(T, D), (torch.randn(N, D) / D**0.5).half()


def to_codes(rows):
    """Integers from -127 to 127, and the largest size of each row."""
    absmax = rows.abs().amax(dim=1).float()
    return torch.round(rows * (127 / absmax)[:, None]).to(torch.int8), absmax


def from_codes(codes, absmax):
    return codes * (absmax / 127)[:, None]


def apart(found, exact):
    return ((found - exact).norm() / exact.norm()).item()


def expected(rows):
    """The same by formula, from each row's largest number."""
    steps = rows.abs().amax(dim=1).float() / 127
    return (steps.square().mean() / 12 / rows.float().square().mean()).sqrt().item()


codes, absmax = to_codes(w)
stored = from_codes(codes, absmax)
print(
    f"weights: predicted {expected(w):.2%} apart, "
    f"counted {apart(stored, w.float()):.2%}"
)
assert abs(apart(stored, w.float()) / expected(w) - 1) < 0.02

# %% [markdown]
# **Multiply integers.** Give each token $t$ of the input a scale $a_t$, and each row $n$ of the weight its $b_n$. Both
# are constant along the sum over features $d$, so they come out of it, and what is left inside is integers:
# $\sum_d x_{td} w_{nd} \approx \frac{a_t b_n}{127^2} \sum_d \text{code}_{td}\,\text{code}_{nd}$. This is *vector-wise*
# quantisation. The sums need 32 bits: in 8 they wrap around and nothing complains.


# %%
def product(x_codes, x_absmax):
    sums = x_codes.int() @ codes.int().T  # no rounding: below 127 * 127 * D
    return sums * (x_absmax[:, None] * absmax / 127**2)


ones = torch.full((4, 4), 127, dtype=torch.int8)
print(f"4 * 127 * 127 = {4 * 127 * 127:,}; torch in int8: {(ones @ ones)[0, 0]}")
assert (ones @ ones == 4 * 127 * 127 % 256).all()

found, exact = product(*to_codes(x)), x @ w.float().T
# scales outside, or inside
torch.testing.assert_close(
    found, from_codes(*to_codes(x)) @ stored.T, rtol=0, atol=1e-5
)
predicted = (expected(x) ** 2 + expected(w) ** 2) ** 0.5  # two independent errors
print(f"product: predicted {predicted:.2%} apart, counted {apart(found, exact):.2%}")
assert abs(apart(found, exact) / predicted - 1) < 0.05

# %% [markdown]
# **Meet an outlier.** Large transformers have a few features far above the rest, up to 20 times, always in the same
# columns. One such number of size $s$ sets its token's whole ruler. The others, of size 1, now move by
# $s / (127\sqrt{12}) = s / 440$: nothing crashes, they are rounded away.


# %%
def with_outlier(size):
    given = x.clone()
    given[:, 7] = size
    return given


def damage(way, size):
    """The error, as a share of what all features but the outlier give."""
    given = with_outlier(size)
    exact, rest = given @ stored.T, with_outlier(0) @ stored.T
    return ((way(given) - exact).norm() / rest.norm()).item()


def vector_wise(x):
    return product(*to_codes(x))


for size in (6, 20, 60):
    print(
        f"outlier of {size:2}: predicted {size / 440:5.1%}, "
        f"counted {damage(vector_wise, size):5.1%}"
    )
    assert abs(damage(vector_wise, size) / (size / 440) - 1) < 0.1

# %% [markdown]
# **Send it round.** LLM.int8() takes every column of the input that has a number of 6 or more, for any token, and
# multiplies it apart, in floating point. All else goes the integers' way, on a ruler that no outlier has stretched.
# (In the paper the weight is 16 bits wide there; bitsandbytes has only the 8 that it stored.)


# %%
def decompose(x, threshold=6.0):
    large = x.abs() >= threshold
    columns = large.any(dim=0)
    x_codes, x_absmax = to_codes(x.masked_fill(large, 0))
    x_codes[:, columns] = 0
    return x_codes, x_absmax, columns


def mixed(x):
    x_codes, x_absmax, columns = decompose(x)
    return product(x_codes, x_absmax) + x[:, columns].float() @ stored[:, columns].T


assert all(damage(mixed, size) < 1.1 * expected(x) for size in (6, 20, 60, 600))
print(
    "with an outlier of 60: "
    f"{damage(mixed, 60):.2%} instead of {damage(vector_wise, 60):.1%}"
)


# %% Draw figure 1 tags=["hide-input"]
def the_ways(theme: Theme):
    """The two ways of a product."""
    sketch = course.Sketch(theme, 41.5, 12)
    sketch.text(5, 1.9, "input, T × D")
    sketch.tensor(1, 3, 8, 5, "codes", color=0)
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
    sketch.text(37.5, 8.9, "outlier columns", quiet=True)
    return sketch.figure


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
        ("vector-wise", vector_wise, 1, "o"),
        ("outlier apart", mixed, 0, "s"),
    ):
        found = [100 * damage(way, size) for size in sizes]
        axes.plot(
            sizes,
            found,
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
    the_ways,
    "Figure 1. Integers with a scale for each token and each output; "
    "outlier columns go apart.",
)
course.show(
    of_outliers,
    "Figure 2. One outlier costs the other features all their bits; "
    "sent round, it costs nothing.",
)

# %% [markdown]
# ## 3. Prove it
# The claim is *approximate*, so we bound the error. Each factor moves by half a step at most, so with $\hat x$ for the
# rounded input, an output moves by $\frac{a_t}{254}\sum_d|w_{nd}| + \frac{b_n}{254}\sum_d|\hat x_{td}|$ at most. The
# mechanism is bytes: one for each weight, four for each row.

# %%
x_codes, x_absmax = to_codes(x)
of_x = x_absmax[:, None] / 254 * w.float().abs().sum(dim=1)
of_w = absmax / 254 * from_codes(x_codes, x_absmax).abs().sum(dim=1, keepdim=True)
used = ((found - exact).abs() / (of_x + of_w)).max().item()
print(
    f"the worst output uses {used:.0%} of its bound; "
    f"{codes.nbytes + absmax.nbytes:,} bytes of {w.nbytes:,}"
)
assert used < 1
assert codes.nbytes + absmax.nbytes == N * (D + 4)

# %% [markdown]
# The worst of 16,384 outputs stays far below: errors of both signs cancel. And the integers are not merely like
# bitsandbytes': they are the same, and so are the outlier columns and the package's own reference.

# %%
given, quantise = with_outlier(60).half(), bnb.functional.int8_vectorwise_quant
theirs = (*quantise(w)[:2], *quantise(given.clone(), threshold=6.0))
x_codes, x_absmax, columns = decompose(given)
ours = (codes, absmax, x_codes, x_absmax, columns.nonzero().flatten())
assert all(torch.equal(one, its) for one, its in zip(ours, theirs, strict=True))
assert all(
    torch.equal(one, its) for one, its in zip(ours, quantize_rows(w), strict=False)
)
their_product, _ = torch.ops.bitsandbytes.int8_mixed_scaled_mm(
    given, x_codes, codes, x_absmax, absmax, theirs[4], None
)
# a rounding of fp16 near 8
torch.testing.assert_close(mixed(given).half(), their_product, rtol=0, atol=2**-7)
torch.testing.assert_close(
    mixed(given), linear_8bit(given.float(), codes, absmax), rtol=0, atol=1e-5
)
print("integers, scales, columns: equal bit for bit; products: to a rounding of fp16")

# %% [markdown]
# What does that do to a model? SmolLM2-135M, trained for 20 steps on the Kwanzaa rows, on a CPU: +0.011 to +0.012 of
# held-out loss over fp32. NF4, in the next lesson, pays nearly ten times as much. One caveat: on a CPU bitsandbytes
# rounds inputs in evaluation only; while it trains, it multiplies by the unpacked weight.

# %%
quality = results.study("quality")
if quality:
    print(
        tables.quality(
            [run for run in quality["runs"] if run["case"] in ("fp32", "int8", "nf4")]
        )
    )

# %% [markdown]
# ## 4. What it costs
# **Time.** A T4 has units for integers, but each product first finds the outliers and rounds its inputs, and then
# scales its sums back. And the backward pass has no integers: the weight is unpacked to the input's dtype. In the
# paper's table 5 of 2022, at width 2,048, the bare integer product runs 1.61 times as fast as one in 16 bits, and all
# of LLM.int8() 0.51 times. These figures are out of date: version 0.45 of bitsandbytes (December 2024) rebuilt the code
# and made it about 1.8 times as fast. Its own benchmark on a T4 lets Qwen2.5-3B *answer*, in tokens a second:

# %%
for rows, in_16, old, new in (
    (1, 25.66, 3.34, 5.98),
    (8, 189.56, 24.28, 44.15),
    (32, 532.30, 93.75, 167.37),
):
    print(
        f"{rows:2} rows: fp16 {in_16:.0f}, int8 {new:.0f}: "
        f"{in_16 / new:.1f} times as long; before 0.45 {old:.0f}"
    )
    assert 1.7 < new / old < 1.9
    assert 3.1 < in_16 / new < 4.4

# %% [markdown]
# For *training*, where thousands of tokens share each product, we know of no figure since the rebuild. We have not
# measured it on a T4. If you have a card, this cell measures it:

# %%
step_of = (
    "peft=lora attention=best precision=best gradient_checkpointing=true "
    "chunked_loss=true"
)
course.on_a_gpu("int8", off=step_of, on=f"{step_of} quantization=int8")

# %% [markdown]
# **Bytes that nobody told you of.** Here are eight small blocks, $y = x + W \cdot \text{norm}(x)$, with $W$ frozen.
# Each output takes $s$ bytes, and is the next block's input. Checkpointed, nothing else should be left: $8 s$. The
# product is `MatMul8bitLt`, which bitsandbytes runs on a card; on a CPU it trains with another.

# %%
square, scale = to_codes(torch.randn(64, 64).half() / 8)
s = 2 * 128 * 64  # 128 tokens, 64 wide, 16 bits


class Block(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.product = product

    def forward(self, x):
        normed = F.layer_norm(x, (64,))
        if self.product is None:  # in 16 bits
            return x + F.linear(normed, from_codes(square, scale).to(x.dtype))
        state = bnb.MatmulLtState(CB=square, SCB=scale)
        state.threshold, state.has_fp16_weights = 6.0, False
        return x + self.product.apply(normed, square, None, None, state)


def of_torch(block, x):
    return checkpoint(block, x, use_reentrant=False)


def left(product, way=of_torch, dtype=torch.float16):
    """Bytes that are left when the forward pass is over, and then the input's
    gradient."""
    torch.manual_seed(1)
    start = y = torch.randn(128, 64).to(dtype).requires_grad_()
    with LiveBytes() as count:
        for _ in range(8):
            y = way(Block(product), y)
    alive = count.live
    y.float().square().sum().backward()
    return alive, start.grad


print(
    f"16 bits: {left(None)[0] / KIB:.0f} KiB, int8: "
    f"{left(MatMul8bitLt)[0] / KIB:.0f} KiB"
)
assert left(None)[0] == 8 * s
assert left(MatMul8bitLt)[0] == 2 * 8 * s

# %% [markdown]
# Twice as much. torch's checkpoint drops what a product hands to autograd with `save_for_backward`. bitsandbytes writes
# its input on the context itself, `ctx.tensors = (CAt, subA, A)`, out of autograd's sight, and there it stays,
# *pinned*, until the backward pass. The checkpoint that you wrote in [the lesson on
# checkpointing](gradient_checkpointing.py) does not suffer: its forward pass runs unrecorded, and no context outlives
# it.
#
# And what reads that input? The gradient of a *weight* would. Ours is frozen, and the input's own gradient needs only
# the codes. So let go of it, and see whether a single bit of the gradient moves.


# %%
class Released(MatMul8bitLt):
    @staticmethod
    def forward(ctx, *args):
        y = MatMul8bitLt.forward(ctx, *args)
        ctx.tensors = (None, None, None)
        return y


_, grad = left(MatMul8bitLt)
for name, product_of, way in (
    ("the lesson on checkpointing's", MatMul8bitLt, checkpointed),
    ("torch's, released", Released, of_torch),
):
    alive, its_grad = left(product_of, way)
    print(
        f"checkpoint, {name}: {alive / KIB:.0f} KiB, gradient equal: "
        f"{torch.equal(grad, its_grad)}"
    )
    assert alive == 8 * s
    assert torch.equal(grad, its_grad)

# %% [markdown]
# It was kept for nobody. The 4-bit product of bitsandbytes kept its input, too, until a user noticed in 2024; the 8-bit
# one of version 0.50.2 still does.
#
# ## 5. The production switch
# One line, and two consequences: bitsandbytes loads the linears in 8 bits, and peft's usual preparation,
# `prepare_model_for_kbit_training`, comes along. int8 is not on the road to the capstone, so this bill is that of the
# job in fp16 without chunked loss, and int8 alone.

# %%
before = with_settings(
    course.so_far("mixed_precision"),
    ["tricks.chunked_loss=false", "tricks.lean_preparation=false"],
)
after = with_settings(before, ["tricks.quantization=int8"])
nf4 = with_settings(before, ["tricks.quantization=nf4"])
print("--set tricks.quantization=int8")
print(diff(resolve(before, T4), resolve(after, T4)))

# %%
tokens = 2048
# q, k, v; o (16 bits); gate, up; down
pinned = L * tokens * (4 * WIDTH + 2 * WIDTH + 4 * WIDTH + 4 * INNER)
inputs = L * tokens * 4 * WIDTH
print(
    f"predicted: {in_8_bits / MIB:,.1f} MiB of matrices, "
    f"{(inputs + pinned) / MIB:,.1f} MiB waiting"
)
course.show_bill(before, after)
rows = {line.name: line.bytes for line in course.bill(after).lines}
assert rows["weights: blocks"] == in_8_bits
assert rows["saved activations"] == inputs + pinned
course.reveal(guess, course.bill(after).peak_bytes / MIB, "MiB")

# %% [markdown]
# The matrices are as predicted. The peak is at the same moment, the loss, and 1,868 MiB higher:
#
# - *Weights: all others*, 501 to 1,002: the preparation raises all that is left in 16 bits to fp32. That is the
#   embedding, which is the head too: 262,668,288 weights.
# - *16-bit copy of the head*: autocast multiplies in 16 bits, so an fp32 head needs a copy again. 501 more.
# - *Batch*: mask and positions take the fp32 of the norms.
# - *Saved activations*, 128 to 1,920: hidden states are fp32 now, 256. The rest, 1,664, is pinned: four different
#   inputs in each block, and the widest, of `down`, is four times a hidden state.
#
# The first three and the fp32 hidden states come with NF4 as well: they are the preparation's, not int8's, and [the
# lesson on lean preparation](mixed_precision.py) removes them. Were the pinned inputs let go of besides, int8 would
# cost just what we guessed at first.

# %%
first_guess = course.bill(before).peak_bytes - (2 * weights - in_8_bits)
lean = with_settings(after, ["tricks.lean_preparation=true"])
# what is pinned is in 16 bits now
peak, lean_pinned = (
    course.bill(lean).peak_bytes,
    L * tokens * (3 * 2 * WIDTH + 2 * INNER),
)
print(
    f"guessed {first_guess / MIB:,.1f} MiB; lean int8 takes {peak / MIB:,.1f}, "
    f"{lean_pinned / MIB:,.1f} of them pinned"
)
assert peak - lean_pinned == first_guess


# %% Draw figure 3 tags=["hide-input"]
def bills(theme: Theme):
    """The same step, its weights stored in four ways."""
    drawn, axes = course.figure(height=3.0)
    parts = {
        "blocks' matrices": ("weights: blocks",),
        "embedding and head": ("weights: all others", "16-bit copy of the head"),
        "saved activations": ("saved activations",),
        "logits": ("logits",),
    }
    ways = {
        "fp16": (before, 0),
        "int8": (after, 0),
        "int8, lean, released": (lean, lean_pinned),
        "NF4": (nf4, 0),
    }
    colours = [*theme.series, theme.quiet]
    for place, (recipe, gone) in enumerate(ways.values()):
        bill = course.bill(recipe)
        sizes = {line.name: line.bytes for line in bill.lines}
        stack = [sum(sizes.get(name, 0) for name in names) for names in parts.values()]
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
    axes.set(xlabel="peak of a step, MiB", xlim=(0, 8600), ylim=(len(ways) - 0.5, -0.5))
    axes.grid(axis="x")
    drawn.legend(loc="outside upper center", ncols=5)
    return drawn


course.show(
    bills,
    "Figure 3. int8 halves the first part and pays in the second and third; "
    "NF4 pins nothing.",
)

# %% [markdown]
# So the Kwanzaa run does not take this road. NF4 takes the matrices to 522 MiB, pins nothing, and is [the lesson on
# NF4](nf4.py).
#
# ## 6. Where it breaks
# **`Only Tensors of floating point and complex dtype can require gradients`.** Somebody trains the quantised weights:
# integers have no small step to take, so torch gives them no gradient. Cure: leave them frozen and train an adapter
# beside them. Our plan refuses before a byte is loaded.

# %%
try:
    nn.Parameter(codes)
except RuntimeError as error:
    print(error)
    assert (
        str(error)
        == "Only Tensors of floating point and complex dtype can require gradients"
    )
try:
    resolve(with_settings(after, ["tricks.peft=none"]), T4)
except BadInput as error:
    print(error)
    assert "nothing would train" in str(error)
thin = nn.Parameter(torch.zeros(N, 16))
# the cure: something beside it learns
(mixed(x) + x[:, :16] @ thin.T).square().sum().backward()
assert thin.grad.norm() > 0

# %% [markdown]
# **`MatMul8bitLt: inputs will be cast from torch.float32 to float16 during quantization`.** A warning, once a product.
# The preparation made the norms fp32, so products get fp32 and round a 16-bit copy; but what they pin is the fp32
# original, twice the bytes. Cure: hidden states in 16 bits, `tricks.lean_preparation=true`.

# %%
heard = []
log = logging.getLogger("bitsandbytes.autograd._functions")
# heard, and not printed
log.addFilter(lambda record: heard.append(record.getMessage()))
wide, _ = left(MatMul8bitLt, dtype=torch.float32)
print(f"{heard[0]}: {wide / KIB:.0f} KiB")
assert wide == 2 * 2 * 8 * s
heard.clear()
narrow, _ = left(MatMul8bitLt)  # the cure
print(f"hidden states in 16 bits: {narrow / KIB:.0f} KiB, {len(heard)} warnings")
assert (narrow, heard) == (wide / 2, [])

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** A token's ordinary features are of size 1 at most, and one outlier is of size $s$; nothing is sent
#    round. From which $s$ on does every ordinary feature get the code 0? The answer is the smallest such $s$.
# 2. **Build.** Confine the damage: a scale for every `size` numbers of a row. Fill in `in_blocks(rows, size)`, where
#    `size` divides the row. It returns a pair: int8 codes of shape (rows, blocks, size), and the largest absolute value
#    of each block, fp32 of shape (rows, blocks). (About two lines, with `to_codes`.) Then ask yourself why an integer
#    product cannot use it.
# 3. **Reach.** What is saved does not depend on the tokens; what is pinned does. In the bill of section 5, at how many
#    tokens does the pinned part eat all that int8 saves on the matrices? The answer is a number of tokens, within 1 %.

# %% tags=["exercise"]
smallest_ruinous_outlier = None


def in_blocks(rows, size):
    """FILL ME IN."""


tokens_that_eat_it = None


# %% Check the exercises tags=["hide-input"]
def of_ruin(answer):
    size = float(answer)
    code = round(127 / size)
    assert code == 0, (
        f"beside an outlier of {size:g} a feature of 1 still has the code {code}; "
        "it is 127 / s, rounded"
    )
    assert size < 254.5, f"not {size:g}; beside a smaller outlier the codes are 0, too"


def of_blocks(answer):
    for size in (64, 16, 256):
        rows = with_outlier(600)
        if (found := answer(rows.clone(), size)) is None:
            raise NotImplementedError
        codes, scales = found
        shapes = (T, D // size, size), (T, D // size)
        assert (tuple(codes.shape), tuple(scales.shape)) == shapes, (
            f"shapes must be {shapes[0]} and {shapes[1]}"
        )
        assert codes.dtype == torch.int8, f"codes are int8, not {codes.dtype}"
        assert scales[:, -1].max() < 100, (
            "the outlier still spoils blocks that it is not in"
        )
        right = rows.reshape(T, -1, size).abs().amax(dim=2)
        assert torch.allclose(scales, right), (
            "a scale is the largest absolute value of its block, as in to_codes"
        )
        moved = (codes * (scales / 127)[:, :, None]).reshape(T, D) - rows
        near = (moved.abs() <= right.repeat_interleave(size, 1) / 254 * 1.001).all()
        assert near, (
            "unpacked, a number is more than half a step away from where it was"
        )


def of_tokens(answer):
    tokens = float(answer)
    saved, eaten = (
        (2 * weights - in_8_bits) / MIB,
        tokens * L * (10 * WIDTH + 4 * INNER) / MIB,
    )
    found = (
        f"at {tokens:,.0f} tokens {eaten:,.0f} MiB are pinned and {saved:,.0f} saved"
    )
    assert abs(eaten / saved - 1) <= 0.01, (
        f"{found}; which inputs are pinned, and how many bytes does each take?"
    )


course.check(
    1, smallest_ruinous_outlier, of_ruin, "the size s of an outlier, one number"
)
course.check(
    2,
    in_blocks,
    of_blocks,
    "a function (rows, size) -> a pair of tensors, codes and scales",
)
course.check(3, tokens_that_eat_it, of_tokens, "a number of tokens")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# smallest_ruinous_outlier = 254  # 127 * 1 / 254 = 0.5, which rounds to the even 0
#
#
# # no integer product: its scales change along the sum, and cannot come out of it
# def in_blocks(rows, size):
#     codes, scales = to_codes(rows.reshape(-1, size))
#     return codes.reshape(len(rows), -1, size), scales.reshape(len(rows), -1)
#
#
# tokens_that_eat_it = (2 * weights - in_8_bits) / (L * (10 * WIDTH + 4 * INNER))  # 1,140
# ```
#
# </details>
#
# ## In one breath
# - **Saves** a byte of every two of a frozen matrix; the scales add 1.4 MiB.
# - **Costs** 1,664 MiB of pinned inputs that nobody reads, and time: answers on a T4 took 3 to 4 times as long as in
#   fp16 (bitsandbytes 0.45); for training we have not measured it.
# - **Approximate**: half a step of the row's ruler; about 1.2 % of a product, if outliers go apart.
# - **When**: to answer with a model that fits in 8 bits and not in 16, or when rows are short and weights are many.
# - **When not**: to train a small model on long rows. Read the bill, not the name.
#
# ## Sources
# - Dettmers et al. 2022, *LLM.int8()*, arXiv 2208.07339, sections 3.1 and 3.2; appendix D, table 5 for the speed.
# - bitsandbytes 0.50.2, `autograd/_functions.py`: `MatMul8bitLt`; its pull request 1270 (2024) for the 4-bit product.
#   Its `CHANGELOG.md`, 0.45.0 (pull request 1401 rebuilt int8), and `benchmarking/README.md`: Qwen 2.5 3B on a T4,
#   0.45.0 against 0.44.1, the lines FP16 and INT8+Decomp.
# - peft 0.21.2, `utils/other.py`: `prepare_model_for_kbit_training`; its issue 2424 for the warning.
# - Ours: `cria_tricks/tricks/int8.py`, `tests/tricks/test_int8.py`, `cria_tricks/bill/block.py` for what is pinned.
