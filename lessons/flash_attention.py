# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # FlashAttention: a softmax that never sees its whole row
# > **Promise.** You write attention that keeps 520 KiB where plain attention keeps 2,496, with the same numbers within
# > rounding; and you find out which kernel a T4 really runs, and why one repeat changes it.
#
# > **Card.** saves the T x T scores: B H T^2 numbers a block become B H T / costs 5 products a tile in the backward
# > pass for plain attention's 4 / exact within rounding / 40 minutes / after [paged optimizers](optimizers.py)
#
# The job is still QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB. [The lesson on
# paged optimizers](optimizers.py) left the bill at 5,373 MiB. Now the largest thing inside every block goes: the
# matrix of every token against every other. By how many MiB will the bill fall? Write a guess down for section 5.

# %% Your guess: MiB that the bill falls tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import math
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoModelForCausalLM, LlamaConfig

# transformers knows sdpa_expanded from here on
import cria_tricks.load.attention  # noqa: F401
from cria_tricks import course
from cria_tricks.bench.style import Theme, panels
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.hardware.attention_kernels import attention_kernel, kernel_for
from cria_tricks.hardware.cards import CARDS
from cria_tricks.measure.counting import SavedBytes, Traffic, flops
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks.expand_kv import expand_kv
from cria_tricks.tricks.flash_attention import flash_attention
from cria_tricks.tricks.folds import step

torch.manual_seed(0)
KIB, MIB = 1024, 2**20

# %% [markdown]
# ## 1. The bill
# Each token has a query $q$, a key $k$ and a value $v$, all $D$ wide. The *score* of two tokens is
# $s_{ij} = q_i \cdot k_j / \sqrt{D}$; a softmax over $j$ turns scores into weights $w_{ij}$; the output is
# $o_i = \sum_j w_{ij} v_j$. *Causal*: nobody looks ahead. *Grouped-query*: $G$ query heads share a head of keys and
# values, which plain attention repeats first.

# %%
# rows, query heads, key heads, tokens, width of a head
B, H, K, T, D = 1, 8, 2, 256, 16
G, INF = H // K, float("inf")


def repeat(x):
    """(B, K, T, D) to (B, H, T, D): each query head gets a copy of the head it
    shares."""
    return x[:, :, None].expand(-1, -1, G, -1, -1).flatten(1, 2)


def plain(q, k, v):
    k, v = repeat(k), repeat(v)
    ahead = torch.ones(T, T, dtype=torch.bool).triu(1)
    return (q @ k.mT / D**0.5).masked_fill(ahead, -INF).softmax(dim=-1) @ v


q, grad = (torch.randn(B, H, T, D, dtype=torch.float64) for _ in range(2))
k, v = (torch.randn(B, K, T, D, dtype=torch.float64) for _ in range(2))


def inputs(dtype):
    return *(x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)), grad.to(dtype)


# %% [markdown]
# What waits for the backward pass, at 4 bytes a number? What the two products multiplied: $q$, repeated $k$ and $v$,
# and the weights, which the softmax keeps, too. And a mask of a byte an entry. Which share has a $T^2$ in it?

# %%
squares = 4 * H * T * T + T * T
with SavedBytes() as kept:
    plain(*inputs(torch.float32)[:3])
print(
    f"predicted {(4 * 3 * H * T * D + squares) / KIB:,.0f} KiB, "
    f"counted {kept.peak / KIB:,.0f}",
    end="; ",
)
print(f"{squares / kept.peak:.0%} of it grows with the square")
assert kept.peak == 4 * 3 * H * T * D + squares
shape = find_shape(course.CAPSTONE.model)
# the softmax in fp32, and under autocast a copy in 16 bits
one_block = shape.heads * 2048**2 * (4 + 2)
print(
    f"Llama-3.2-1B: {one_block / MIB:,.0f} MiB of w in a block, "
    f"{shape.layers * one_block / MIB:,.0f} in all"
)

# %% [markdown]
# ## 2. From scratch, in four steps
# **A sum that can change its mind.** The softmax of a row is $e^{s_j} / \sum_j e^{s_j}$. In fp32 $e^{89}$ is infinite
# (in fp16, $e^{12}$), so subtract the row's largest score $m$ from all: the fraction stays the same. But that takes the
# row twice, to find $m$ and to add up. Unless $m$ may be corrected later. Let $\ell = \sum e^{s_j - m}$ be the sum so
# far, and a larger $m'$ turn up. Then $\sum e^{s_j - m'} = \ell \cdot e^{m - m'}$: one multiplication corrects all that
# was added before.

# %%
row = [98.0, 100.0, 99.0, 101.0]
naive = torch.tensor(row).exp() / torch.tensor(row).exp().sum()
m, total = -INF, 0.0
for s in row:
    higher = max(m, s)
    m, total = higher, total * math.exp(m - higher) + math.exp(s - higher)
    print(f"score {s:5.0f}: largest {m:5.0f}, sum {total:.4f}")
print(
    f"without the largest: {naive.tolist()}; "
    f"with it m + log(sum) = {m + math.log(total):.4f}"
)
assert naive.isnan().all()  # inf / inf
assert abs(m + math.log(total) - torch.tensor(row).logsumexp(0).item()) < 1e-4


# %% Draw figure 1 tags=["hide-input"]
def one_row(theme: Theme):
    """Left the scores of a query and the largest so far, right the sum so far."""
    # of tokens that see all of these keys
    every = (q @ repeat(k).mT / D**0.5)[..., 48:, :48].flatten(0, 2)
    records = (every.cummax(dim=-1).values.diff(dim=-1) > 0).sum(dim=-1)
    # the row in which the largest changes most often
    row = every[records.argmax()].tolist()
    largest, sums, high, added = [], [], -INF, 0.0
    for score in row:
        higher = max(high, score)
        high, added = higher, added * math.exp(high - higher) + math.exp(score - higher)
        largest.append(high)
        sums.append(added)
    drawn, (left, right) = panels(2, height=2.9)
    left.scatter(range(len(row)), row, s=12, color=theme.quiet, label="score")
    left.plot(
        largest,
        color=theme.series[1],
        drawstyle="steps-post",
        label="m, the largest so far",
    )
    right.plot(
        sums,
        color=theme.series[0],
        drawstyle="steps-post",
        label="sum of exp(score - m) so far",
    )
    for axes, ylabel in ((left, "score"), (right, "sum")):
        axes.set(xlabel="key, in the order in which they come", ylabel=ylabel)
        axes.grid(axis="y")
        axes.legend(loc="lower left", ncols=2, bbox_to_anchor=(-0.02, 1.0))
    return drawn


course.show(
    one_row,
    "Figure 1. A row of scores, read once: whenever a larger score turns up, "
    "the sum so far is scaled down.",
)

# %% [markdown]
# **A tile at a time.** The output is a sum as well, so the same factor corrects it. For a tile of queries and a tile of
# keys, update three things: $m$, $\ell$ and the output so far. At the end divide by $\ell$. One number of each row is
# worth keeping, the *log-sum-exp* $L_i = m + \log \ell$: with it $w_{ij} = e^{s_{ij} - L_i}$ needs no sum.

# %%
TILE = 32
TILES = [slice(n, n + TILE) for n in range(0, T, TILE)]


def start(q):
    return (
        torch.full_like(q[..., :1], -INF),
        torch.zeros_like(q[..., :1]),
        torch.zeros_like(q),
    )


def update(m, total, out, s, v):
    higher = torch.maximum(m, s.amax(-1, keepdim=True))
    shrink, w = (m - higher).exp(), (s - higher).exp()
    return higher, total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ v


def scores(q, k, rows, keys):
    s = q[..., rows, :] @ k[..., keys, :].mT / D**0.5
    return (
        s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -INF)
        if rows == keys
        else s
    )


# %% Draw figure 2 tags=["hide-input"]
def matrix(theme: Theme):
    """Which tiles are made, one at a time, and what is kept."""
    sketch = course.Sketch(theme, 41, 17)
    for row in range(4):
        sketch.tensor(0.5, 3.2 + 3.2 * row, 3, 2.8, "q" if row == 2 else "", color=0)
        sketch.tensor(4.9 + 3.2 * row, 0.4, 2.8, 2, "k, v" if row == 1 else "", color=0)
        for key in range(row + 1):
            here = row == 2 and key == 1
            sketch.tensor(
                4.9 + 3.2 * key,
                3.2 + 3.2 * row,
                2.8,
                2.8,
                "s, w" if here else "",
                color=1,
                kept=here,
            )
        sketch.tensor(
            19.2,
            3.2 + 3.2 * row,
            3,
            2.8,
            "o" if row == 2 else "",
            color=0,
            kept=row < 2,
        )
        sketch.tensor(
            22.8,
            3.2 + 3.2 * row,
            0.8,
            2.8,
            "L" if row == 2 else "",
            color=2,
            kept=row < 2,
        )
    sketch.arrow((17.6, 11), (19.0, 11))
    sketch.text(25, 1.4, "q, k, v: (T, D), in tiles", align="left")
    sketch.text(25, 6.2, "o: (T, D), and L: (T, 1)", align="left")
    sketch.text(25, 7.8, "all five are kept", align="left", quiet=True)
    sketch.text(25, 11, "one tile of scores lives at a time", align="left")
    sketch.text(25, 12.6, "dashed: gone, or still to come", align="left", quiet=True)
    sketch.text(25, 14.2, "above the diagonal: never made", align="left", quiet=True)
    return sketch.figure


course.show(
    matrix,
    "Figure 2. The third tile of queries has met its second tile of keys. "
    "No T x T matrix is anywhere.",
)

# %% [markdown]
# **Walk back without the weights.** Let $g_i$ be the gradient of $o_i$. Make a tile's weights again, from $L$. Then
# $v_j$ gets $\sum_i w_{ij} g_i$, and a weight $g_i \cdot v_j$. Through the softmax, a score gets
# $w_{ij} (g_i \cdot v_j - \Delta_i)$ with $\Delta_i = \sum_j w_{ij}\, g_i \cdot v_j$, again a sum over the whole row.
# But pull $g_i$ out of it: $\Delta_i = g_i \cdot o_i$. The output knows it already.
#
# **Both passes in one Function:**


# %%
class Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        out, lse = torch.empty_like(q), torch.empty_like(q[..., :1])
        for n, rows in enumerate(TILES):
            state = start(q[..., rows, :])
            for keys in TILES[: n + 1]:  # up to the diagonal
                state = update(*state, scores(q, k, rows, keys), v[..., keys, :])
            m, total, summed = state
            out[..., rows, :], lse[..., rows, :] = summed / total, m + total.log()
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        delta = (grad * out).sum(-1, keepdim=True)
        for n, rows in enumerate(TILES):
            for keys in TILES[: n + 1]:
                w = (scores(q, k, rows, keys) - lse[..., rows, :]).exp()
                ds = (
                    w
                    * (grad[..., rows, :] @ v[..., keys, :].mT - delta[..., rows, :])
                    / D**0.5
                )
                dq[..., rows, :] += ds @ k[..., keys, :]
                dk[..., keys, :] += ds.mT @ q[..., rows, :]
                dv[..., keys, :] += w.mT @ grad[..., rows, :]
        return dq, dk, dv


def ours(q, k, v):
    return Flash.apply(q, repeat(k), repeat(v))


# %% [markdown]
# ## 3. Prove it
# The claim is *exact within rounding*, so say how much. Let $u$ be half the distance from 1 to the next number
# ($2^{-24}$ in fp32). A score sums $D$ products: off by at most $(D + 2)\,u A$, with $A$ the largest
# $\sum_d |q_d k_d| / \sqrt{D}$. An exponent, up to the scores' range $R$, rounds by $uR$; so do all corrections
# together. Adding $T$ numbers costs $Tu$, each of $n$ tiles $3u$. So a weight is off by the share
# $\eta = u\,((D + 2) A + 2R + T + 3n + 4)$, above the fraction's line and below it, and an output by
# $2\eta \max |v|$ at most.

# %%
ways = {
    "ours": ours,
    "the package's": lambda q, k, v: flash_attention(q, k, v, tile=TILE),
    "torch's, grouped": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ),
    "torch's, expanded": lambda q, k, v: F.scaled_dot_product_attention(
        q, expand_kv(k, G), expand_kv(v, G), is_causal=True
    ),
}


def with_gradients(way, q, k, v, grad):
    out = way(q, k, v)
    return out, *torch.autograd.grad(out, (q, k, v), grad)


true = with_gradients(plain, *inputs(torch.float64))
A = (q.abs() @ repeat(k).abs().mT).max() / D**0.5
R = 2 * (q @ repeat(k).mT).abs().max() / D**0.5
assert torch.equal(repeat(k), expand_kv(k, G))
for dtype, gradients_within in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
    eta = torch.finfo(dtype).eps / 2 * ((D + 2) * A + 2 * R + T + 3 * len(TILES) + 4)
    bound = (2 * eta * v.abs().max()).item()
    print(
        f"{dtype}: outputs may be off by {bound:.1e}, "
        f"gradients by {gradients_within:.0e}"
    )
    for name, way in ways.items():
        off = [
            (a - b).abs().max().item()
            for a, b in zip(with_gradients(way, *inputs(dtype)), true, strict=True)
        ]
        print(f"  {name:18} output {off[0]:.1e}, gradients {max(off[1:]):.1e}")
        assert off[0] < 2 * bound  # two roundings of one value, in float64
        assert max(off[1:]) < gradients_within

# %% [markdown]
# The float64 lines prove the mathematics: no error in a formula is that small. Of the worst case, less than a hundredth
# came true. (The bound of gradients is that of the package's tests, `tests/tolerances.py`.)
#
# Now the mechanism. Kept should be $q$, repeated $k$ and $v$, the output, and $L$.

# %%
with SavedBytes() as kept:
    out = ours(*inputs(torch.float32)[:3])
print(
    f"predicted {4 * (4 * H * T * D + H * T) / KIB:,.0f} KiB, "
    f"counted {kept.peak / KIB:,.0f}"
)
assert kept.peak == 4 * (4 * H * T * D + H * T)

# %% [markdown]
# ## 4. What it costs
# **Products.** Two forward; four backward, or five, as scores are made again. But plain attention makes all $n^2$
# tiles, and only $n (n + 1) / 2$ lie on or under the diagonal. So 7 products in place of 6, on 36 tiles in place of 64.
#
# **Bytes.** Does ours, which keeps a fifth, also move fewer bytes between chip and memory? Guess.

# %%
n, product = len(TILES), 2 * H * TILE * TILE * D
for name, way, predicted in (
    ("plain", plain, 6 * n * n),
    ("ours", ours, 7 * n * (n + 1) // 2),
):
    with Traffic() as moved:
        counted = flops(lambda way=way: with_gradients(way, *inputs(torch.float32)))
    a_score = (moved.products + moved.others) / (H * T * T)
    print(
        f"{name:6} predicted {predicted} products of tiles, "
        f"counted {counted / product:.0f}; {a_score:.0f} B a score"
    )
    assert counted == predicted * product
at_best = 4 * (12 * H * T * D + 2 * H * T) / (H * T * T)
print(
    "a kernel that reads or writes 12 tensors of H T D, and L twice: "
    f"{at_best:.1f} B a score"
)

# %% [markdown]
# It moves *more*. Each of our operations reads its tile from memory and writes it back. A kernel holds the tile in the
# chip's own small memory from the first product to the last; that is why FlashAttention is one kernel, and fast, not
# only small. (The last line is the lower limit. Real kernels read $k$ and $v$ again for each tile of queries.)
#
# For our job the package reckons with bytes, products, and half of a T4's rates. Estimated, not measured:

# %%
before, after = course.so_far("optimizers"), course.so_far("flash_attention")
alone = with_settings(after, ["tricks.expand_kv=false"])
settings = {"eager": before, "sdpa": alone, "sdpa and expand_kv": after}
for name, recipe in settings.items():
    work = step(recipe, shape, CARDS["t4"])
    (part,) = (part for part in work.parts if part.name == "attention")
    print(
        f"{name:19} attention {part.seconds:4.1f} s of {work.seconds:4.1f} s a "
        f"step; {part.bytes / 1e9:5,.0f} GB moved"
    )

# %% [markdown]
# `sdpa` alone changes nothing: section 5 says why. On a GPU (committed is a CPU's step, of 128 tokens; what went there
# is the mask, 64 KiB):

# %%
rest = "precision=best chunked_loss=true gradient_checkpointing=true"
course.on_a_gpu(
    "flash_attention", off=f"peft=lora {rest}", on=f"peft=lora attention=sdpa {rest}"
)
course.on_a_gpu(
    "expand_kv",
    off=f"peft=lora attention=sdpa {rest}",
    on=f"peft=lora attention=sdpa expand_kv=true {rest}",
)

# %% [markdown]
# ## 5. The production switch
# torch's `scaled_dot_product_attention`, *sdpa*, has several kernels and does not say which one ran. *flash* is
# FlashAttention-2, from compute capability 8.0. *memory-efficient* is the same idea, for older cards too; it takes
# masks, and in torch 2.13 no groups. *math* is plain attention in fp32. For 16 bits, and what a mere flag does here:

# %%
print(
    f"{'':6}"
    + "".join(
        f"{case:>19}"
        for case in ("grouped", "equal heads", "masked, grouped", "masked, equal")
    )
)
for name, card in CARDS.items():
    found = [
        kernel_for(card.device, torch.float16, masked=m, grouped=g)
        for m in (False, True)
        for g in (True, False)
    ]
    print(f"{name:6}" + "".join(f"{kernel:>19}" for kernel in found))
for dropout in (0.0, 0.1):
    kernel = attention_kernel(
        lambda p=dropout: F.scaled_dot_product_attention(
            q, k, v, dropout_p=p, enable_gqa=True
        )
    )
    print(f"this CPU, with dropout {dropout} in attention: {kernel}")

# %% [markdown]
# Which column does a run get? Listen in on a small Llama of transformers, with its own attention function and with
# ours, which repeats first:


# %%
def listen(q, k, v, attn_mask=None, **named):
    heard.append((attn_mask is not None, k.shape[1] != q.shape[1]))
    return sdpa(q, k, v, attn_mask=attn_mask, **named)


heard, sdpa = [], F.scaled_dot_product_attention
widths = {"hidden_size": H * D, "num_attention_heads": H, "num_key_value_heads": K}
config = LlamaConfig(vocab_size=64, num_hidden_layers=1, **widths)
for function in ("sdpa", "sdpa_expanded"):
    llama = AutoModelForCausalLM.from_config(config, attn_implementation=function)
    for padding in (0, 3):
        real = (torch.arange(12) >= torch.tensor([[padding], [0]])).long()
        with patch.object(F, "scaled_dot_product_attention", listen):
            llama(input_ids=torch.zeros_like(real), attention_mask=real)
        masked, grouped = heard[-1]
        kernel = kernel_for(T4, torch.float16, masked=masked, grouped=grouped)
        print(
            f"{function:14} padding {padding}: "
            f"{masked = !s:5} {grouped = !s:5} -> on a T4 {kernel}"
        )
assert heard == [(False, True), (True, False), (False, False), (True, False)]

# %% [markdown]
# With padding there is a mask, and transformers repeats by itself. Rows without any, such as our one row at a time,
# have none and are left to torch: on a T4 those get the slow kernel. **`expand_kv`** is the cure: repeat, always. What
# each kernel keeps can be counted here: math is the same code on a CPU, and the CPU's flash kernel keeps what the
# memory-efficient one does, but for 16 bytes of random state. (A mask has a price of its own: it is stored, and tiles
# above the diagonal are made.)

# %%
halves = inputs(torch.float16)[:3]
with sdpa_kernel(SDPBackend.MATH), SavedBytes() as math_keeps:
    ways["torch's, grouped"](*halves)
with SavedBytes() as fused_keeps:
    ways["torch's, expanded"](*halves)
print(
    f"math {math_keeps.peak / KIB:,.0f} KiB, "
    f"fused and expanded {fused_keeps.peak / KIB:,.0f} KiB"
)
# in fp32, whatever it is given
assert math_keeps.peak == 4 * (H * T * T + 3 * H * T * D)
assert fused_keeps.peak == 2 * 4 * H * T * D + 4 * H * T

# %%
print("--set tricks.attention=sdpa --set tricks.expand_kv=true")
print(diff(resolve(before, T4), resolve(after, T4)))
course.show_bill(before, after)
first, second = course.bill(before), course.bill(after)
assert first.peak_bytes - second.peak_bytes == 4 * 2048**2
course.reveal(guess, (first.peak_bytes - second.peak_bytes) / MIB, "MiB")

# %% [markdown]
# 16 MiB, and all of it is *batch*: eager adds a mask of $T \times T$ fp32 numbers, causal kernels need none. Where are
# the 12,288? [The lesson on checkpointing](gradient_checkpointing.py) had them already: with checkpointing only one
# block is open, and the peak is at the logits. Without it they are there, less the output and $L$ that are kept now.
# With it, look inside a block:


# %%
def deepest(recipe):
    return max(
        moment.bytes for moment in course.bill(recipe).moments if "block" in moment.name
    )


def peak(recipe, setting):
    return course.bill(with_settings(recipe, [setting])).peak_bytes


saved = peak(before, "tricks.gradient_checkpointing=false") - peak(
    after, "tricks.gradient_checkpointing=false"
)
output_and_lse = 2 * 2048 * shape.query_width + 4 * 2048 * shape.heads
print(f"without checkpointing {saved / MIB:,.0f} MiB less; with it:")
assert saved == shape.layers * (one_block - output_and_lse)
for name, recipe in settings.items():
    later = peak(recipe, "tricks.chunked_loss=true")
    print(
        f"{name:19} deepest in a block {deepest(recipe) / MIB:7,.1f} MiB; "
        f"peak after the lesson on the chunked loss {later / MIB:7,.1f}"
    )
assert deepest(alone) - deepest(before) == 16 * MIB
assert deepest(after) < deepest(before)


# %% Draw figure 3 tags=["hide-input"]
def inside_a_block(theme: Theme):
    """The deepest moment of a block, in three settings, beside the moment of the
    logits."""
    drawn, axes = course.figure(height=2.3)
    for place, recipe in enumerate(settings.values()):
        axes.barh(
            place,
            deepest(recipe) / MIB,
            color=theme.series[0] if place == 2 else theme.quiet,
            height=0.6,
        )
    for at, says in (
        (peak(after, "tricks.chunked_loss=true"), "with a chunked loss"),
        (second.peak_bytes, "now"),
    ):
        axes.axvline(at / MIB, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
        axes.text(
            at / MIB,
            -0.72,
            f"logits, {says} ",
            color=theme.alarm,
            va="center",
            ha="right",
        )
    axes.set_yticks(
        range(3),
        [f"{name}: {deepest(recipe) / MIB:,.0f}" for name, recipe in settings.items()],
    )
    axes.set(
        xlabel="deepest moment inside a block, MiB", xlim=(0, 5800), ylim=(2.5, -1.1)
    )
    return drawn


course.show(
    inside_a_block,
    "Figure 3. sdpa alone deepens a block a little; "
    "with expand_kv attention is no longer its deepest point. The "
    "logits hide that, until the lesson on the chunked loss.",
)

# %% [markdown]
# `sdpa` alone is *worse* than eager: 24 MiB for fp32 copies of $q$, $k$ and $v$, less the mask's 16. With `expand_kv`
# the deepest point moves to the MLP, 1,142 MiB lower. Once the logits are chunked, that is 819 MiB of peak.

# %%
course.show(
    course.staircase("flash_attention"),
    "Figure 4. The bill so far: a step too small to see, for now.",
)

# %% [markdown]
# ## 6. Where it breaks
# **`FlashAttention only supports Ampere GPUs or newer.`** On a T4, with `attn_implementation="flash_attention_2"`. The
# package flash-attn says so, in its C++ (`mha_fwd`), so not before the *first forward pass*: transformers 5.23 checks
# the card for versions 3 and 4, not for 2. A CPU cannot raise it. Cure: sdpa. Our plan refuses before anything loads:

# %%
try:
    resolve(with_settings(alone, ["tricks.attention=flash_attention_2"]), T4)
except BadInput as error:
    print(error)
    assert "needs compute capability 8.0, and Tesla T4 has 7.5" in str(error)
assert resolve(after, T4).model["attn_implementation"] == "sdpa_expanded"  # the cure

# %% [markdown]
# **`nan`, but on left-padded rows only.** Padding on the left hides the first keys from all queries. A first tile that
# is all $-\infty$ has $m = -\infty$, and $-\infty - (-\infty)$ is nan: the row never recovers, whatever comes after.
# (Causal order alone cannot do that: everybody sees the first key.) Cure: subtract 0 where there is no largest yet. A
# query that sees no key at all is left with 0 / 0; there torch's sdpa gives 0, a plain softmax nan.


# %%
def careful(m, total, out, s, v):
    higher = torch.maximum(m, s.amax(-1, keepdim=True))
    safe = higher.masked_fill(higher == -INF, 0)
    shrink, w = (m - safe).exp(), (s - safe).exp()
    return higher, total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ v


hidden = torch.arange(T) < 40  # one tile and a quarter of padding
last = slice(T - TILE, T)
visible = ~hidden & (torch.arange(T) <= torch.arange(T)[last, None])
right = F.scaled_dot_product_attention(
    q[..., last, :], repeat(k), repeat(v), attn_mask=visible
)
for name, rule in (("update", update), ("careful", careful)):
    state = start(q[..., last, :])
    for keys in TILES:
        s = scores(q, repeat(k), last, keys).masked_fill(hidden[keys], -INF)
        state = rule(*state, s, repeat(v)[..., keys, :])
    found = state[2] / state[1]
    print(f"{name:8} {found.isnan().float().mean():.0%} nan")
    assert (
        found.isnan().all()
        if name == "update"
        else torch.allclose(found, right, rtol=0, atol=1e-12)
    )

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** `expand_kv` keeps copies. How many MiB more does a block of Llama-3.2-1B keep, in 16 bits at 2,048
#    tokens, than with a kernel that takes groups? Your answer is a number of MiB.
# 2. **Build.** In a *sliding window* a query sees itself and the `window - 1` tokens before it. Fill in `windowed`,
#    forward only, heads equal. It returns a tensor shaped like $q$. Go tile by tile, as `Flash` does, but make no tile
#    in which no query sees a key. (About ten lines; which of the two update rules?)
# 3. **Reach.** $m$ need only be near the largest score. Fill in `lazy`, which takes and returns what `update` does. But
#    it moves a row's $m$ to the tile's largest score in that row only if this score is more than 8 above $m$. Every row
#    decides for itself. (FlashAttention-4 skips corrections by such a rule.)

# %% tags=["exercise"]
more_mib = None


def windowed(q, k, v, window):
    """FILL ME IN: return a tensor shaped like q."""


def lazy(m, total, out, s, v):
    """FILL ME IN: return the new m, total and out."""


# %% Check the exercises tags=["hide-input"]
def no_other_kernel(*given, **named):
    raise AssertionError(
        "here another kernel does all the work and skips no tile; "
        "make the tiles as Flash does"
    )


def of_windows(answer):
    q_k_v = q, repeat(k), repeat(v)
    behind = torch.arange(T)[:, None] - torch.arange(T)
    for window in (1, 32, 33, 34, 40, T):
        visible = (behind >= 0) & (behind < window)
        right = F.scaled_dot_product_attention(*q_k_v, attn_mask=visible)
        with patch.object(F, "scaled_dot_product_attention", no_other_kernel):
            if (out := answer(*q_k_v, window)) is None:
                raise NotImplementedError
            made = flops(lambda window=window: answer(*q_k_v, window)) / (2 * product)
        assert out.shape == q.shape, (
            f"the shape is {tuple(out.shape)}, and q's is {tuple(q.shape)}"
        )
        assert not out.isnan().any(), (
            f"window {window}: nan; can the first tile of a row be all -inf?"
        )
        assert torch.allclose(out, right, rtol=0, atol=1e-12), (
            f"window {window}: not a softmax over the query itself and the "
            f"{window - 1} tokens before it"
        )
        tiles = (
            visible.unflatten(1, (-1, TILE))
            .unflatten(0, (-1, TILE))
            .any(dim=(1, 3))
            .sum()
            .item()
        )
        assert made <= tiles, (
            f"window {window}: {made:.0f} tiles are made, "
            f"but only in {tiles} does a query see a key"
        )
        assert made * TILE * TILE >= visible.sum(), (
            "too few products: a tile needs two, of scores and of values"
        )


def of_lazy(answer):
    draw = torch.Generator().manual_seed(3)
    s, values = (
        torch.randn(shape, generator=draw, dtype=torch.float64)
        for shape in ((6, 4, 64), (64, D))
    )
    # 0 is now the largest of each row of a tile; next, each row's largest in each tile:
    s -= s.amax(-1, keepdim=True)
    highest = [
        [0, 3, 5, 30, 31, 0],
        [0, 9, 12, 13, 40, 0],
        [0, 0, 8, 0, 9, 0],
        [0, 3, 5, 5, 5, 5],
    ]
    s += torch.tensor(highest).T[..., None]
    state = start(torch.zeros(4, D, dtype=torch.float64))
    for tile in s:
        before, tops = state[0], tile.amax(-1, keepdim=True)
        if (state := answer(*state, tile, values)) is None:
            raise NotImplementedError
        m, total, out = state
        shapes = [tuple(x.shape) for x in (m, total, out)]
        assert shapes == [(4, 1), (4, 1), (4, D)], (
            f"m, total and out came back in other shapes: {shapes}"
        )
        assert not m.isnan().any(), "nan; what is m before the first tile?"
        far = tops > before + 8
        assert (m == before)[~far].all(), (
            "m moved in a row in which the largest is not more than 8 above it"
        )
        assert (m != before)[far].all(), (
            "m stayed in a row in which the largest is more than 8 above it"
        )
        assert torch.equal(m[far], tops[far]), (
            "where m moves, it moves to the tile's largest"
        )
    right = s.transpose(0, 1).flatten(1).softmax(-1) @ values.repeat(6, 1)
    assert torch.allclose(out / total, right, rtol=0, atol=1e-12), (
        "m is right, but out / total is not the softmax; "
        "were both corrected where m moved?"
    )


course.check(
    1,
    more_mib,
    course.about(
        12,
        "count the heads that the copies add, of keys and of values, each 64 wide",
        within=1e-6,
        mistakes={
            16: "8 of the 32 heads are kept with either kernel; count what is added",
            6: "keys and values are both repeated",
            24: "a number of 16 bits has 2 bytes",
            192: "that is for all 16 blocks; the question is about one block",
            12 * 2**20: "that is a number of bytes; give MiB",
        },
    ),
    "a number of MiB, of one block",
)
course.check(
    2, windowed, of_windows, "a function (q, k, v, window) -> a tensor shaped like q"
)
course.check(
    3,
    lazy,
    of_lazy,
    "a function (m, total, out, s, v) -> the new m, total and out, "
    "each shaped as it came",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# more_mib = 2 * (32 - 8) * 2048 * 64 * 2 / MIB
#
#
# def windowed(q, k, v, window):
#     out = torch.empty_like(q)
#     for n, rows in enumerate(TILES):
#         state = start(q[..., rows, :])
#         for keys in TILES[: n + 1]:
#             if rows.start - (keys.stop - 1) >= window:
#                 continue  # even its last key is too far back for the first query
#             behind = torch.arange(T)[rows, None] - torch.arange(T)[keys]
#             s = scores(q, k, rows, keys).masked_fill(behind >= window, -INF)
#             state = careful(*state, s, v[..., keys, :])
#         out[..., rows, :] = state[2] / state[1]
#     return out
#
#
# def lazy(m, total, out, s, v):
#     largest = s.amax(-1, keepdim=True)
#     new = torch.where(largest > m + 8, largest, m)
#     shrink, w = (m - new).exp(), (s - new).exp()
#     return new, total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ v
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the T x T scores: $B H T^2$ numbers a block $\to$ $B H T$. Beside checkpointing, those of one block.
# - **Costs** a fifth product in the backward pass; causal rows make half the tiles, so fewer in all. As one kernel it
#   is faster, too; as tiles in plain torch it is not.
# - **Exact within rounding**: outputs within $2 \eta \max |v|$, in fact within a hundredth of that.
# - **When**: always, and look which kernel ran: `cria doctor` says it. Add `expand_kv` on a T4, with grouped heads and
#   rows without a mask, until your torch is newer than 2.13: then the memory-efficient kernel takes groups.
# - **When not**: you want to look at the weights; or something changes the scores. Gemma 2 caps them, sdpa has no
#   place for that, and transformers 5.23 refuses (5.16 left the cap out in silence). And not in bf16 on a T4, which
#   only emulates it: no fused kernel takes it there.
#
# ## Sources
# - Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv 1805.02867, section 3 (step 1).
# - Dao et al. 2022, *FlashAttention*, arXiv 2205.14135, section 3; Dao 2023, *FlashAttention-2*, arXiv 2307.08691,
#   section 3.1 (steps 2 and 3). Rabe and Staats 2021, arXiv 2112.05682 (memory-efficient). Ainslie et al. 2023, *GQA*,
#   arXiv 2305.13245, section 2.2.
# - Higham 2002, *Accuracy and Stability of Numerical Algorithms*, chapter 3 (sums of products, section 3 here).
# - torch 2.13: `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`; groups after it: pytorch pull request 191085.
# - transformers 5.23: `integrations/sdpa_attention.py`, `masking_utils.py`, `modeling_flash_attention_utils.py`. Its
#   issue 48633 and pull request 45776 have math on a T4 (answering became 1.62 to 1.84 times as fast with repeats).
# - flash-attn: `csrc/flash_attn/flash_api.cpp` (the message), `flash_attn/cute/softmax.py` (`rescale_threshold`).
# - Ours: `flash_attention.py` and `expand_kv.py` in `cria_tricks/tricks/`, `attention.py` and `model.py` (Gemma 2) in
#   `cria_tricks/load/`, `cria_tricks/hardware/attention_kernels.py`, `cria_tricks/bill/step_time.py` (the estimate of
#   section 4), and their tests.
