# ---
# jupyter:
#   question: How can attention work without a score for every pair of tokens in memory, and why does a T4 store them?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # FlashAttention: exact attention without the matrix of scores
# > **Promise.** You load a Llama with `attn_implementation="sdpa"`, the default, and expect it to save memory. On a T4
# > it saves nothing if no row is padded, and no message says so. You will write FlashAttention yourself, prove that its
# > numbers are right, find out which kernel really runs, and add the switch with which our job can run on a T4 for the
# > first time.
# >
# > **Card.** saves the $T \times T$ matrix of scores: $B H T^2$ numbers a block become $B H T$ / costs five matrix
# > multiplications in place of four for each tile of the backward pass / exact within rounding / about 25 minutes /
# > after [LoRA](lora.py)
#
# We fine-tune Llama-3.2-1B on rows of 2,048 tokens, on a T4 with 15,095 MiB, and [LoRA](lora.py) left the peak at
# 22,201 MiB. Of these, 14,334 MiB are [saved activations](../docs/glossary.md#activation), and more than half come from
# one operation inside attention.
#
# ## 1. The bill
# Attention makes a query $q$, a key $k$ and a value $v$ for each token, of $D$ numbers (here the width of a head). The
# *score* of query $i$ and key $j$ is $s_{ij}=q_i\cdot k_j / \sqrt{D}$. A softmax over $j$ turns the scores of one query
# into *probabilities* $p_{ij}$, and the output is $o_i=\sum_j p_{ij} v_j$. Here attention is *causal*: no query sees a
# later key.
#
# With $T$ tokens a head has $T\times T$ probabilities, and every block stores them, because the backward pass needs
# them. Llama-3.2-1B has 16 blocks with 32 heads each, and every number takes 4 bytes (fp32). How many MiB of
# probabilities do all blocks store for a row of 2,048 tokens?

# %% Your guess: MiB of probabilities in all 16 blocks tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import os
from unittest.mock import patch

import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import profile
from transformers import AutoModelForCausalLM, LlamaConfig

from cria_tricks import BadInput, course
from cria_tricks.course import (
    CARDS,
    T4,
    Theme,
    Traffic,
    attention_kernel,
    find_shape,
    flops,
    kernel_for,
    panels,
    resolve,
    with_settings,
)
from cria_tricks.course import time_bill as step
from cria_tricks.techniques import expand_kv, flash_attention

# transformers knows sdpa_expanded from here on
course.register_attention()

KIB, MIB = 1024, 2**20
os.environ["KINETO_LOG_LEVEL"] = "99"  # no messages of torch's profiler

# %%
before = course.so_far("lora")
shape = find_shape(before.model)
one_head = 2048 * 2048 * 4  # bytes of one T x T matrix in fp32
all_heads = shape.layers * shape.heads * one_head
print(f"one head {one_head / MIB:,.0f} MiB")
course.reveal(guess, all_heads / MIB, "MiB")
lines = {line.name: line.bytes for line in course.bill(before).lines}
share = all_heads / lines["saved activations"]
print(f"that is {share:.0%} of all saved activations")

# %% [markdown]
# Rows twice as long have four times as many.
#
# ## 2. From scratch, in four steps
# **Step 1: plain attention is the reference.** Llama uses [grouped-query
# attention](../docs/glossary.md#grouped-query-attention), in which several query heads share one head of keys and
# values. Plain attention first repeats these, so that each query head has its own copy. Autograd stores $q$, the
# repeated $k$ and $v$, the probabilities, and the mask that hides later keys.

# %%
import math

import torch

from cria_tricks.course import SavedBytes

torch.manual_seed(0)
# rows, query heads, heads of keys and values, tokens, width of a head
B, H, K, T, D = 1, 8, 2, 256, 16
INF = float("inf")


def repeat(x):
    """Give each query head its own copy: (B, K, T, D) becomes (B, H, T, D)."""
    return x.repeat_interleave(H // K, dim=1)


def plain(q, k, v):
    k, v = repeat(k), repeat(v)
    later = torch.ones(T, T, dtype=torch.bool).triu(1)  # True above the diagonal
    s = (q @ k.mT / D**0.5).masked_fill(later, -INF)  # .mT swaps the last two axes
    return s.softmax(dim=-1) @ v


q, grad = (torch.randn(B, H, T, D, dtype=torch.float64) for _ in range(2))
k, v = (torch.randn(B, K, T, D, dtype=torch.float64) for _ in range(2))


def inputs(dtype):
    """Copies of q, k and v that need gradients."""
    return [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v)]


squares = 4 * H * T * T + T * T  # probabilities of 4 bytes, mask of 1 byte
predicted = 4 * 3 * H * T * D + squares
with SavedBytes() as plain_stores:
    plain(*inputs(torch.float32))
print(f"predicted {predicted / 1024:,.0f} KiB, counted {plain_stores.peak / 1024:,.0f}")
print(f"{squares / predicted:.0%} of it grows with the square of T")
assert plain_stores.peak == predicted

# %% [markdown]
# **Step 2: compute a softmax in one pass.** The softmax of a row is $e^{s_j} / \sum_j e^{s_j}$. In fp32 $e^{89}$ is
# already infinite, so every softmax first subtracts the largest score $m$ from all. This divides numerator and
# denominator by $e^m$, so it changes nothing. This seems to need the row twice: to find $m$, and to add up.
#
# One pass is enough if we correct the sum later. Keep the largest score so far, $m$, and the sum so far, $\ell=\sum
# e^{s_j-m}$. When a larger score $m'$ arrives, multiply the sum by $e^{m-m'}$. This corrects all terms, because
# $e^{s_j-m}\cdot e^{m-m'}=e^{s_j-m'}$.

# %%
row = [98.0, 100.0, 99.0, 101.0]
m, total = -INF, 0.0
for score in row:
    higher = max(m, score)
    total = total * math.exp(m - higher) + math.exp(score - higher)
    m = higher
    print(f"score {score:5.0f}: largest {m:5.0f}, sum {total:.4f}")
naive = torch.tensor(row).exp() / torch.tensor(row).exp().sum()
print(f"without subtracting: {naive.tolist()}")
assert naive.isnan().all()  # infinity / infinity
right = torch.tensor(row).logsumexp(0).item()
assert abs(m + math.log(total) - right) < 1e-4


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
        label="largest so far, m",
    )
    right.plot(
        sums,
        color=theme.series[0],
        drawstyle="steps-post",
        label="sum so far",
    )
    for axes, ylabel in ((left, "score"), (right, "sum of exp(score - m)")):
        axes.set(xlabel="key, in the order of reading", ylabel=ylabel)
        axes.grid(axis="y")
        axes.legend(loc="lower left", ncols=2, bbox_to_anchor=(-0.02, 1.0))
    return drawn


course.show(
    one_row,
    "Figure 1. One row of scores is read once: each time a larger score arrives, "
    "the sum so far is scaled down.",
)

# %% [markdown]
# **Step 3: go through the matrix tile by tile.** The output is a sum as well: $\sum_j e^{s_j-m} v_j$ divided by $\ell$
# at the end. So the same factor corrects it. We cut queries and keys into [tiles](../docs/glossary.md#tile) of 32
# tokens. For a tile of queries we visit the tiles of keys one after the other, and compute only the scores of that
# pair. Each visit updates $m$, $\ell$ and the output so far. Causal attention hides the tiles above the diagonal, so we
# skip them.
#
# For the backward pass we store one more number for each query, the [log-sum-exp](../docs/glossary.md#log-sum-exp)
# $L_i=m+\log \ell$. It gives back the probabilities of any tile: $p_{ij}=e^{s_{ij}-L_i}$.

# %%
TILE = 32
TILES = [slice(n, n + TILE) for n in range(0, T, TILE)]


def scores(q, k, rows, keys):
    """The scores of one tile; on the diagonal, later keys are hidden."""
    s = q[..., rows, :] @ k[..., keys, :].mT / D**0.5
    if rows == keys:
        s = s.masked_fill(torch.ones_like(s, dtype=torch.bool).triu(1), -INF)
    return s


def start(q):
    """The largest score, the sum and the output, before the first tile."""
    one_each = q[..., :1]
    return (
        torch.full_like(one_each, -INF),
        torch.zeros_like(one_each),
        torch.zeros_like(q),
    )


def update(m, total, out, s, v):
    """The same three after one more tile."""
    higher = torch.maximum(m, s.amax(-1, keepdim=True))
    shrink = (m - higher).exp()
    p = (s - higher).exp()
    return higher, total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v


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
                "s, p" if here else "",
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
            1.4,
            2.8,
            "L" if row == 2 else "",
            color=2,
            kept=row < 2,
        )
    sketch.arrow((17.6, 11), (19.0, 11))
    sketch.text(25.4, 1.4, "q, k, v, o, L: saved", align="left")
    sketch.text(25.4, 6.2, "s, p: one tile at a time", align="left")
    sketch.text(25.4, 11, "dashed: freed,", align="left", quiet=True)
    sketch.text(25.4, 12.8, "or not computed yet", align="left", quiet=True)
    return sketch.figure


course.show(
    matrix,
    "Figure 2. The third tile of queries meets its second tile of keys: only one tile "
    "of scores is in memory, and no T x T matrix ever is.",
)

# %% [markdown]
# **Step 4: write the backward pass.** Let $g_i$ be the gradient of the output $o_i$. For each tile we compute the
# probabilities again from $L$. Then $v_j$ gets the gradient $\sum_i p_{ij} g_i$, and the probability $p_{ij}$ gets
# $g_i\cdot v_j$. The derivative of softmax is $\partial p_j/\partial s_k=p_j(\delta_{jk}-p_k)$, so the score gets
# $p_{ij} (g_i\cdot v_j-\Delta_i)$, where $\Delta_i=\sum_j p_{ij}\, (g_i\cdot v_j)$. From the score, $q_i$ gets this
# times $k_j/\sqrt{D}$, and $k_j$ this times $q_i/\sqrt{D}$.
#
# $\Delta_i$ seems to need the whole row again. But $g_i$ does not depend on $j$, so it can leave the sum:
# $\Delta_i=g_i\cdot\sum_j p_{ij} v_j=g_i\cdot o_i$, and the forward pass has computed $o_i$. In PyTorch, such a pair is
# an `autograd.Function`:


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
            out[..., rows, :] = summed / total
            lse[..., rows, :] = m + total.log()
        ctx.save_for_backward(q, k, v, out, lse)  # and no T x T matrix
        return out

    @staticmethod
    def backward(ctx, grad):
        q, k, v, out, lse = ctx.saved_tensors
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        delta = (grad * out).sum(-1, keepdim=True)
        for n, rows in enumerate(TILES):
            g = grad[..., rows, :]
            for keys in TILES[: n + 1]:
                p = (scores(q, k, rows, keys) - lse[..., rows, :]).exp()
                ds = p * (g @ v[..., keys, :].mT - delta[..., rows, :]) / D**0.5
                dq[..., rows, :] += ds @ k[..., keys, :]
                dk[..., keys, :] += ds.mT @ q[..., rows, :]
                dv[..., keys, :] += p.mT @ g
        return dq, dk, dv


def ours(q, k, v):
    # `repeat` is outside, so autograd adds up the gradients of the copies
    return Flash.apply(q, repeat(k), repeat(v))


# %% [markdown]
# ## 3. Prove it
# The claim is *exact within rounding*, so we compare outputs and gradients with those of plain attention in float64. In
# fp32 ours may be off by as much as plain attention is. Then we count what ours stores: $q$, the repeated $k$ and $v$,
# the output, and $L$.

# %% Five implementations of attention tags=["hide-input"]
ways = {
    "plain": plain,
    "ours": ours,
    "cria_tricks": lambda q, k, v: flash_attention.flash_attention(q, k, v, tile=TILE),
    "torch, grouped": lambda q, k, v: F.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    ),
    "torch, repeated": lambda q, k, v: F.scaled_dot_product_attention(
        q, repeat(k), repeat(v), is_causal=True
    ),
}


def with_gradients(way, dtype):
    """The output of one of these ways, and the gradients of q, k and v."""
    given = inputs(dtype)
    out = way(*given)
    return [out, *torch.autograd.grad(out, given, grad.to(dtype))]


# %%
true = with_gradients(plain, torch.float64)
for dtype, within in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
    for name, way in ways.items():
        found = with_gradients(way, dtype)
        off = max((a - b).abs().max().item() for a, b in zip(found, true, strict=True))
        print(f"{dtype!s:14} {name:15} off by at most {off:.0e}")
        assert off < within

with SavedBytes() as stores:
    ours(*inputs(torch.float32))
print(f"ours stores {stores.peak / KIB:,.0f} KiB, plain {plain_stores.peak / KIB:,.0f}")
assert stores.peak == 4 * (4 * H * T * D + H * T)

# %% [markdown] tags=["deep"]
# ### Deeper: a bound for the rounding error
# How far off may an output be? Let $u$ be half the distance from 1 to the next number ($2^{-24}$ in fp32). A score is a
# sum of $D$ terms, so it is off by at most $(D+2)\,u A$, where $A$ is the largest $\sum_d |q_d k_d| / \sqrt{D}$. An
# exponent can be as large as the scores' range $R$, so its rounding costs $uR$. All corrections together cost another
# $uR$. Adding $T$ numbers costs $Tu$, and each of $n$ tiles $3u$. Therefore a probability has a relative error of at
# most $\eta=u\,((D+2) A+2R+T+3n+4)$ in the numerator and the same in the denominator, and an output is off by at most
# $2\eta \max |v|$. The cell checks this bound, and finds that less than a hundredth of it is used.

# %% tags=["deep"]
A = (q.abs() @ repeat(k).abs().mT).max() / D**0.5
R = 2 * (q @ repeat(k).mT).abs().max() / D**0.5
for dtype in (torch.float64, torch.float32):
    eta = torch.finfo(dtype).eps / 2 * ((D + 2) * A + 2 * R + T + 3 * len(TILES) + 4)
    bound = (2 * eta * v.abs().max()).item()
    for name, way in ways.items():
        off = (way(*inputs(dtype)) - true[0]).abs().max().item()
        print(f"{dtype!s:14} {name:15} bound {bound:.1e}, found {off:.1e}")
        assert off < 2 * bound  # in float64 both values are rounded
        assert off < bound / 100

# %% [markdown]
# ## 4. What it costs
# **Arithmetic:** plain attention takes two matrix multiplications in the forward pass and four in the backward pass.
# FlashAttention takes five in the backward pass, because it computes the scores again. However, plain attention works
# on all $8\times8$ tiles, and FlashAttention only on the 36 on and below the diagonal.
#
# **Traffic:** ours stores 520 KiB, and plain attention 2,496. Does it also move fewer bytes between memory and chip?

# %% Your guess: bytes that ours moves, compared with plain attention tags=["predict"]
guess = "no guess"  # @param ["no guess", "fewer", "about as many", "more"]

# %%
n = len(TILES)
one_tile = 2 * H * TILE * TILE * D  # FLOPs of one matrix multiplication, of a tile
a_score = {}
for name, predicted in (("plain", 6 * n * n), ("ours", 7 * n * (n + 1) // 2)):
    with Traffic() as moved:
        counted = flops(lambda way=ways[name]: with_gradients(way, torch.float32))
    assert counted == predicted * one_tile
    a_score[name] = (moved.products + moved.others) / (H * T * T)
    print(f"{name:5} {predicted} matrix multiplications of tiles, as counted")
    print(f"      {a_score[name]:.0f} bytes moved for each score")
course.reveal(guess, "more" if a_score["ours"] > a_score["plain"] else "fewer")
least = 4 * (12 * H * T * D + 2 * H * T) / (H * T * T)
print(f"one kernel (12 tensors of T x D, L twice): {least:.1f} bytes for each score")

# %% [markdown]
# Ours moves more, because each of its small operations reads a tile from memory and writes its result back. A GPU
# kernel keeps the tile in the chip's fast memory from first to last multiplication. This is why FlashAttention is one
# kernel.
#
# The next cell predicts attention's time in our job for one row, at 28 % of a T4's peak rates, as in six public runs.
# (The true time may be 0.6 to 1.7 times as long.) Then come measurements with switches of later lessons. A CPU's have
# rows of 128 tokens, where attention is too small a part to move the peak.

# %%
after = course.so_far("flash_attention")
alone = with_settings(after, ["tricks.expand_kv=false"])
settings = {"eager": before, "sdpa alone": alone, "sdpa, expand_kv": after}
for name, recipe in settings.items():
    parts = step(recipe, shape, CARDS["t4"]).parts
    (part,) = [part for part in parts if part.name == "attention"]
    print(f"{name:16} {part.seconds:4.2f} s, {part.bytes / 1e9:3.0f} GB moved")

rest = "peft=lora precision=best chunked_loss=true gradient_checkpointing=true"
course.on_a_gpu("flash_attention", off=rest, on=f"{rest} attention=best")

# %% [markdown]
# ## 5. The production switch
# `sdpa` alone changes nothing on a T4, because torch's `scaled_dot_product_attention`
# ([sdpa](../docs/glossary.md#sdpa)) picks a kernel in each call, one of these (or cuDNN's: last fold):
#
# - *flash* is FlashAttention-2. It needs 16-bit numbers and [compute
#   capability](../docs/glossary.md#compute-capability) 8.0; a T4 has 7.5.
# - *memory-efficient* is the same idea for older cards and for fp32. In torch 2.13 it needs as many heads of keys as of
#   queries.
# - *math* is plain attention. It stores the T x T matrix in fp32.
#
# By default torch does not say which one ran, but its profiler names the operation. On your GPU, try `kernels` below
# with `lambda: model(**batch)`. For other cards the package predicts it. The cell also counts what two kernels store.

# %%
print("card  dtype            grouped heads       equal heads")
for name in ("t4", "a100"):
    for dtype in ("float32", "float16"):
        picked = [
            kernel_for(CARDS[name].device, dtype, masked=False, grouped=grouped)
            for grouped in (True, False)
        ]
        print(f"{name:5} {dtype:13} {picked[0]:>16} {picked[1]:>17}")


def kernels(call):
    with profile() as seen:
        call()
    return [e.key for e in seen.key_averages() if "_scaled_dot_product_" in e.key]


halves = inputs(torch.float16)
with sdpa_kernel(SDPBackend.MATH), SavedBytes() as math_stores:
    print("math only:", kernels(lambda: ways["torch, grouped"](*halves)))
with SavedBytes() as fused_stores:
    print("torch's choice:", kernels(lambda: ways["torch, repeated"](*halves)))
print(f"they store {math_stores.peak / KIB:,.0f}, {fused_stores.peak / KIB:,.0f} KiB")

# %% [markdown]
# In Llama-3.2-1B, 32 query heads share 8 heads of keys and values. transformers passes them to torch as they are, if no
# row is padded. (For padded rows it repeats them itself.) A T4 then has only the math kernel, which stores as much as
# eager attention. The cure is the switch `expand_kv`, which repeats keys and values before the call. The command, the
# plain code, and what both are worth:
#
# ```bash
# cria train kwanzaa --set tricks.attention=sdpa --set tricks.expand_kv=true
# ```

# %%
print(flash_attention.PLAIN)
# `ungrouped` hides from transformers that heads are shared
print(expand_kv.PLAIN)
print("sdpa alone (in the whole job, without it expand_kv goes, too)")
course.show_worth("attention")
print("sdpa and expand_kv")
course.show_worth("attention", "expand_kv")
course.show_bill(before, after)


# %% Check the numbers of the text tags=["hide-input"]
assert math_stores.peak == 4 * (H * T * T + 3 * H * T * D)
assert fused_stores.peak == 2 * 4 * H * T * D + 4 * H * T
assert round(stores.peak / KIB) == 520
assert round(plain_stores.peak / KIB) == 2_496
assert CARDS["t4"].reached.memory == CARDS["t4"].reached.full == 0.283


def peak(recipe, *changes):
    """The peak of a step, in whole MiB."""
    return round(course.bill(with_settings(recipe, list(changes))).peak_bytes / MIB)


assert (peak(before), peak(alone), peak(after)) == (22_201, 22_201, 14_013)
assert round(lines["saved activations"] / MIB) == 14_334
assert round(T4.memory_bytes / MIB) == 15_095
assert course.bill(after).verdict == "tight"
assert course.bill(before).verdict == "does not fit"
assert round(course.bill(after).least_bytes / MIB) == 14_410
eager = ("tricks.attention=eager", "tricks.expand_kv=false")
job = course.CAPSTONE
assert (peak(job), peak(job, *eager)) == (1_516, 2_805)
assert peak(job, "tricks.expand_kv=false") == 2_837
a_block = course.bill(before).peak_bytes - course.bill(after).peak_bytes
assert a_block == shape.layers * (shape.heads * (one_head - 4 * 2048))

# %% Draw figure 3 tags=["hide-input"]
course.show(
    course.ladder("flash_attention"),
    "Figure 3. The bill after each switch: sdpa alone changes nothing on a T4, and "
    "with expand_kv the tensors fit for the first time. (Attention's output is no new "
    "cost, because the next matrix stores it as its input in any case.)",
)

# %% [markdown]
# Added to LoRA, `sdpa` alone saves 0 MiB, and both switches save 8,188 MiB: the 8,192 of your first guess, less $L$.
# With CUDA's own memory a step needs 14,410 MiB, so the job can run on a T4 for the first time. (`cria plan` calls it
# *tight*: with what the allocator may keep, less than 5 % stays free. With more it *fits*.) [An
# H200](../docs/benchmarks.md#a-first-sitting-on-an-h200), held to a T4's kernels and memory, ran this step, and without
# `expand_kv` it ran out of memory. Taken away from the finished job, both are worth over half of the time, but only
# 1,289 MiB, because with [checkpointing](gradient_checkpointing.py) one block at a time has T x T matrices.
#
# ## 6. Where it breaks
# **`FlashAttention only supports Ampere GPUs or newer.`** You see this on a T4 with
# `attn_implementation="flash_attention_2"`. It comes late, in the *first forward pass*, because transformers 5.23
# checks the card for versions 3 and 4 but not for 2. Use sdpa. Our plan refuses before loading:

# %%
try:
    resolve(with_settings(alone, ["tricks.attention=flash_attention_2"]), T4)
except BadInput as error:
    print(error)
    assert "needs compute capability 8.0, and Tesla T4 has 7.5" in str(error)
assert resolve(after, T4).model["attn_implementation"] == "sdpa_expanded"  # the cure

# %% [markdown] tags=["deep"]
# ### Deeper: `nan`, but on left-padded rows only
# Padding on the left hides the first keys from all queries. If the whole first tile is hidden, its largest score is
# $m=-\infty$, and $-\infty-(-\infty)$ is `nan`. The row never recovers, whatever comes after it. (Causal order alone
# cannot cause this, because every query sees the first key.) The cure is to subtract 0 as long as no largest score has
# been seen; the function `careful` does that. A query that sees no key at all still ends as 0 / 0. In this case torch's
# sdpa gives 0, and a plain softmax gives `nan`.


# %% tags=["deep"]
def careful(m, total, out, s, v):
    """As update, but right also if a whole tile is hidden."""
    higher = torch.maximum(m, s.amax(-1, keepdim=True))
    safe = higher.masked_fill(higher == -INF, 0)
    shrink, p = (m - safe).exp(), (s - safe).exp()
    return higher, total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v


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
    if name == "update":
        assert found.isnan().all()
    else:
        assert torch.allclose(found, right, rtol=0, atol=1e-12)

# %% [markdown] tags=["deep"]
# ### Deeper: padding and dropout change the kernel
# With padding there is a mask, and then transformers repeats keys and values by itself. So a T4 gets its slow kernel
# only for rows without a mask, such as one row at a time. We can listen in on a small Llama, with transformers' own
# attention function and with ours, which always repeats. (A mask has a price of its own: it is stored, and tiles above
# the diagonal are computed. And flash takes no mask, so even an A100 runs the memory-efficient kernel then.) Newer
# cards may run a fourth kernel, *cuDNN*'s, instead of flash. It saves the same, and the package does not tell the two
# apart. (FlexAttention, which compiles a kernel for your own mask, is no part of `sdpa`.) Dropout inside attention
# sends a CPU to the math kernel. In the finished job, `sdpa` without `expand_kv` needs even more than eager attention
# (2,837 MiB against 2,805), because the math kernel computes in fp32 throughout. (It may also hold one matrix of scores
# more than we bill: on [an H200](../docs/benchmarks.md#a-first-sitting-on-an-h200) such a step took 7,247 MiB in place
# of 6,767.) In 16 bits, eager attention keeps the matrix twice, since its softmax is computed in fp32 and multiplied in
# 16 bits: $6\, B H T^2$ bytes a block.


# %% tags=["deep"]
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
        kernel = kernel_for(T4, "float16", masked=masked, grouped=grouped)
        print(
            f"{function:14} padding {padding}: "
            f"{masked = !s:5} {grouped = !s:5} -> on a T4 {kernel}"
        )
assert heard == [(False, True), (True, False), (False, False), (True, False)]
a100 = CARDS["a100"].device
assert kernel_for(a100, "float16", masked=True, grouped=False) == "memory-efficient"
for dropout in (0.0, 0.1):
    kernel = attention_kernel(
        lambda p=dropout: F.scaled_dot_product_attention(
            q, k, v, dropout_p=p, enable_gqa=True
        )
    )
    print(f"this CPU, with dropout {dropout} in attention: {kernel}")

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** `expand_kv` stores repeated keys and values. How many MiB more does a block of Llama-3.2-1B store than
#    with a kernel that takes and stores only the 8 grouped heads? Take 2,048 tokens, 16-bit numbers, and heads that are
#    64 wide.
# 2. **Build.** In a *sliding window* a query sees itself and the `window - 1` tokens before it. Fill in `windowed`,
#    forward pass only, for equally many heads of `q`, `k` and `v`. Go through `TILES` as `Flash` does, but skip each
#    tile in which no query sees a key. The first tile of a query may be hidden completely, so use `careful` (section 6,
#    folded) in place of `update`: it subtracts 0 as long as $m$ is $-\infty$.
# 3. **Reach.** $m$ need only be near the largest score. Fill in `lazy`, which takes and returns what `update` does. It
#    moves a row's $m$ to the tile's largest score in that row only if this score is more than 8 above $m$. At the start
#    $m$ is $-\infty$, so the first tile always moves it. So corrections are rare.

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
            made = flops(lambda window=window: answer(*q_k_v, window)) / (2 * one_tile)
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
#                 continue  # too far back
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
#     shrink, p = (m - new).exp(), (s - new).exp()
#     return new, total * shrink + p.sum(-1, keepdim=True), out * shrink + p @ v
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the T x T matrices: $B H T^2$ numbers in each block become $B H T$.
# - **Costs** five matrix multiplications in the backward pass, and not four. Causal rows need only half of the tiles,
#   so there is less arithmetic in all. As one kernel it is also faster; as tiles in plain torch it is not.
# - **Exact within rounding**: in fp32 it is off by as much as plain attention is.
# - **When**: always, but check which kernel ran, with the profiler or `cria doctor`. On a T4 add `expand_kv` for models
#   with grouped heads and rows without a mask, as long as your torch's memory-efficient kernel takes no groups. (2.13
#   does not; pull request 191085 is newer.)
# - **When not**: if you want to look at the probabilities, or if something changes the scores. Gemma 2 caps them, sdpa
#   cannot, and transformers 5.23 refuses (5.16 left the cap out without a message).
# - **Not in bf16 on a T4**: the card only emulates it, and no fused kernel takes it there.
#
# ## Sources
# - Milakov and Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv 1805.02867, section 3 (step 2).
# - Dao et al. 2022, *FlashAttention*, arXiv 2205.14135, section 3; Dao 2023, *FlashAttention-2*, arXiv 2307.08691,
#   section 3.1 (steps 3 and 4). Rabe and Staats 2021, arXiv 2112.05682 (memory-efficient). Ainslie et al. 2023, *GQA*,
#   arXiv 2305.13245, section 2.2.
# - Higham 2002, *Accuracy and Stability of Numerical Algorithms*, chapter 3 (the bound of section 3).
# - torch 2.13: `aten/src/ATen/native/transformers/cuda/sdp_utils.cpp`; groups after it: pytorch pull request 191085.
# - transformers 5.23: `integrations/sdpa_attention.py`, `masking_utils.py`, `modeling_flash_attention_utils.py`. Its
#   issue 48633 and pull request 45776 have math on a T4 (answering became 1.62 to 1.84 times as fast with repeats).
# - flash-attn: `csrc/flash_attn/flash_api.cpp` (the message), `flash_attn/cute/softmax.py` (`rescale_threshold`, the
#   rule of exercise 3, in FlashAttention-4).
# - Ours: `flash_attention.py` and `expand_kv.py` in `cria_tricks/techniques/`, `attention.py` and `model.py` (Gemma 2)
#   in `cria_tricks/load/`, `cria_tricks/hardware/attention_kernels.py`, `cria_tricks/measure/counting.py`,
#   `cria_tricks/bill/step_time.py` (the estimate of section 4), and their tests.
