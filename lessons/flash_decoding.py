# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Flash-Decoding: one query, many readers
# > **Promise.** You cut one token's attention into any number of pieces, merge them in any order, and get plain
# > attention back within a bound that you count. Then you find that each new token moves the whole cache 3 times in
# > transformers, 11 times where a T4 needs repeated heads, and you bring it down to once.
#
# > **Card.** saves time, where one token leaves most of a card idle / costs one output more for each piece / exact
# > within rounding / 30 minutes / after [FlashAttention](flash_attention.py)
#
# The job is still QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB. This lesson does
# not change its bill by one byte. It is about what comes afterwards: the trained model answers, one token at a time.

# %% Imports and settings tags=["hide-input"]
import math
import types

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.benchmark import Timer
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

# names the lesson on FlashAttention's repeated heads to transformers
import cria_tricks.load.attention  # noqa: F401
from cria_tricks import course
from cria_tricks.bench import results, tables
from cria_tricks.bench.style import Theme
from cria_tricks.hardware import T4, this_device
from cria_tricks.hardware.cards import A100_40GB, CARDS
from cria_tricks.load.cache import for_answers
from cria_tricks.measure.counting import flops, peak_bytes
from cria_tricks.models.configs import find_config
from cria_tricks.models.shape import find_shape
from cria_tricks.tricks.expand_kv import expand_kv
from cria_tricks.tricks.flash_decoding import flash_decoding, for_chat
from cria_tricks.tricks.kv_cache import append, groups_as_rows

torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## 1. The bill
# A new token attends to all before it. Their keys and values do not change any more, so they are kept: the *KV cache*.
# How many bytes does one token of the past take, in 16 bits? Llama-3.2-1B has $L = 16$ blocks, $H = 32$ query heads,
# and $K = 8$ heads of keys and values, of width $D = 64$. Write your guess down.

# %% Your guess: KiB of one token tags=["predict"]
guess = 0  # @param {type:"number"}

# %% [markdown]
# It is $2\,L\,K\,D$ numbers of 2 bytes: 32 KiB. If every query head had keys and values of its own, it would be
# $H / K = 4$ times that. Here is the bill of answering, in 16 bits (`cria chat` unpacks an NF4 base first):

# %%
before, after = course.so_far("kwanzaa"), course.so_far("flash_decoding")
training = course.bill(after)
# nothing of this lesson is part of a training step
assert training.lines == course.bill(before).lines
shape, card = find_shape(after.model), CARDS["t4"]
L, H, K, D = shape.layers, shape.heads, shape.kv_heads, shape.head_width
cached = 2 * L * K * D * 2  # bytes for each token of the past
longest = find_config(after.model)["max_position_embeddings"]


def answering(past):
    return {
        "weights": 2 * shape.weights,
        "adapter": 2 * training.facts.trained_weights,
        "KV cache": cached * past,
    }


print(
    f"a training step: {training.peak_bytes / MIB:,.0f} MiB before this lesson, "
    "and after it"
)
for past in (2048, longest):
    rows = " + ".join(
        f"{name} {size / MIB:,.0f}" for name, size in answering(past).items()
    )
    print(
        f"answering after {past:7,}: "
        f"{rows} = {sum(answering(past).values()) / MIB:,.0f} MiB"
    )
assert (cached, H // K) == (32 * 1024, 4)
assert sum(answering(longest).values()) < T4.memory_bytes / 2
course.reveal(guess, cached / 1024, "KiB")

# %% [markdown]
# Even the longest past that this model knows takes less than half of a T4. Bytes are not short. What is?
#
# A token reads everything on that bill once. For each byte there is about one operation: a weight of 2 bytes is
# multiplied and added. (After a long past there are more, as 4 query heads use what is read once.) A T4 could do 203.
# So reading is what takes time, and bandwidth over bytes bounds the tokens a second:

# %%
for past in (2048, longest):
    read = sum(answering(past).values())
    # scores, sums of values
    work = (
        2 * (shape.active_weights + training.facts.trained_weights)
        + 4 * L * H * D * past
    )
    print(
        f"after {past:7,}: {work / read:.2f} operations a byte, "
        f"at most {card.memory_rate / read:5.1f} tokens/s"
    )
    assert 1 < work / read < 3
assert round(card.half_flops / card.memory_rate) == 203

# %% [markdown]
# But who reads? A GPU's work is done by its *multiprocessors*, SMs. A T4 has 40. FlashAttention deals out pieces of
# work, each a head and a block of queries: in training, with blocks of 64, $32 \cdot 2{,}048 / 64 = 1{,}024$. Now there
# is *one* query, and nothing left to deal out but the 8 heads of the cache, each with 4 query heads as rows of one
# piece. Predict how many SMs have nothing to do.

# %%
SMS = 2560 // 64  # CUDA cores of a T4, over those of one Turing multiprocessor
print(f"{K} work, {SMS - K} idle")
assert (SMS, SMS - K) == (40, 32)


# %% Draw figure 1 tags=["hide-input"]
def who_works(theme: Theme):
    """The 40 multiprocessors of a T4, with the pieces of work of three situations."""
    sketch = course.Sketch(theme, 62, 11.5)
    whats = (
        ("training", "1,024 pieces", 40),
        ("one new token", "8 pieces", 8),
        ("in 5 splits", "8 x 5 pieces", 40),
    )
    for row, (what, says, busy) in enumerate(whats):
        top = 0.8 + 3.8 * row
        sketch.text(0, top + 0.6, what, align="left")
        sketch.text(0, top + 1.9, says, align="left", quiet=True)
        for n in range(40):
            left, down = 18 + 2.2 * (n % 20), top + 1.5 * (n // 20)
            sketch.tensor(
                left,
                down,
                1.9,
                1.2,
                "",
                color=n // 8 % 2 if row == 2 else 0,
                kept=n < busy,
            )
    return sketch.figure


course.show(
    who_works,
    "Figure 1. The 40 multiprocessors of a T4: filled ones have work, "
    "dashed ones have none. In five splits each of "
    "the 8 heads keeps five of them busy.",
)

# %% [markdown]
# (8 of 40 SMs may draw more than a fifth of the bandwidth; how much more, we have not measured.)
#
# ## 2. From scratch, in four steps
# **Attend to one piece as if there were no other.** $S$ tokens of past, $G = H / K$ queries that share a head. A
# softmax needs the maximum $m$ of its scores and the sum $l$ of its exponentials. A piece takes its own, and keeps both
# in one number $z = m + \log l$, the *log-sum-exp*.

# %%
S, G = 2048, H // K
q, k, v = torch.randn(K, G, D), torch.randn(K, S, D), torch.randn(K, S, D)


def attend(q, k, v, hidden=0.0):
    """Output and log-sum-exp, (..., G, D) and (..., G, 1); -inf in ``hidden`` hides a
    key."""
    scores = q @ k.mT / D**0.5 + hidden
    m = scores.amax(-1, keepdim=True)  # this piece's maximum
    p = (scores - m).exp()
    total = p.sum(-1, keepdim=True)  # this piece's sum
    return p @ v / total, m + total.log()


whole, z_of_all = attend(q, k, v)
assert torch.allclose(whole, F.softmax(q @ k.mT / D**0.5, -1) @ v, atol=1e-6)


# %% [markdown]
# **Merge two pieces.** Each output was divided by its own sum $e^{z}$. Multiply back, add, divide by the new sum. Only
# differences of $z$ are raised to a power, and none is above zero.


# %%
def merge(a, b):
    (out_a, z_a), (out_b, z_b) = a, b
    z = torch.logaddexp(z_a, z_b)
    return (z_a - z).exp() * out_a + (z_b - z).exp() * out_b, z


out, z = merge(attend(q, k[:, :700], v[:, :700]), attend(q, k[:, 700:], v[:, 700:]))
assert torch.allclose(out, whole, atol=1e-6)
assert torch.allclose(z, z_of_all, atol=1e-5)


# %% [markdown]
# **Merge in any order.** A merged piece is a piece again. So shuffle the keys, cut them anywhere into $n$, and let
# chance decide who meets whom.


# %%
def by_chance(n, q, k, v):
    cuts = (torch.randperm(S - 1)[: n - 1] + 1).sort().values
    pieces = [
        attend(q, k[:, keys], v[:, keys])
        for keys in torch.randperm(S).tensor_split(cuts)
    ]
    while len(pieces) > 1:
        a, b = (pieces.pop(int(torch.randint(len(pieces), ()))) for _ in range(2))
        pieces.append(merge(a, b))
    return pieces[0][0]


assert torch.allclose(by_chance(7, q, k, v), whole, atol=1e-6)


# %% [markdown]
# **All pieces at once.** The pieces become one more dimension of a batch, and the weights of the merge are the softmax
# of their $z$. Attention in splits is *a softmax of softmaxes*, and no piece waits for another.


# %%
def split(q, k, v, n):
    """One token's attention, (K, G, D), in n splits of equal length."""
    # (K, n, G, D) and (K, n, G, 1)
    outs, z = attend(q[:, None], k.unflatten(1, (n, -1)), v.unflatten(1, (n, -1)))
    return (z.softmax(1) * outs).sum(1)


assert torch.allclose(split(q, k, v, 8), whole, atol=1e-6)


# %% Draw figure 2 tags=["hide-input"]
def flow(theme: Theme):
    """One head of the cache: cut, attended to piece by piece, merged."""
    sketch = course.Sketch(theme, 62, 14.5)
    sketch.tensor(0.2, 5.6, 6.4, 2.2, "q (4, 64)")
    for n in range(4):
        top = 0.4 + 3.6 * n
        sketch.arrow((6.8, 6.7), (10.4, top + 1.1))
        sketch.tensor(10.6, top, 13, 2.2, "k (512, 64)", color=n)
        sketch.tensor(23.8, top, 13, 2.2, "v (512, 64)", color=n)
        sketch.arrow((37, top + 1.1), (39.6, top + 1.1))
        sketch.tensor(39.8, top, 6.4, 2.2, "(4, 64)", color=n)
        sketch.tensor(46.4, top, 2.2, 2.2, "z", color=n)
        sketch.arrow((48.8, top + 1.1), (54.2, 6.7 + 0.5 * (n - 1.5)))
    sketch.tensor(54.4, 5.6, 6.4, 2.2, "(4, 64)")
    sketch.text(57.6, 8.8, "softmax of z", quiet=True)
    return sketch.figure


course.show(
    flow,
    "Figure 2. One of the 8 heads, its 2,048 tokens of past in four splits; "
    "no colour waits for another.",
)

# %% [markdown]
# ## 3. Prove it
# On paper: a piece stands for two sums over its keys, $\sum e^{s} = e^{z}$ and $\sum e^{s} v = e^{z} o$, with scores
# $s$ and output $o$. To merge is to add both. Addition is associative and commutative, so merging is.
#
# But computers round. Count roundings, each at most $u = 2^{-24}$ of its number. A sum has at most $S$. A score of size
# at most $a$ counts $(D + 4)\,a$, as an exponential turns an absolute error into a relative one. A merge counts at most
# $3\,(a + \ln S + 3)$, and there are fewer than $n$. All that above and below the division, so twice:
#
# $$|\mathrm{error}| \le 2\,u\,\max|v|\,\bigl(S + (D + 4)\,a + 3\,n\,(a + \ln S + 3)\bigr)$$
#
# The order is not in it. And it is the worst case; most errors cancel. Predict: which $n$ is worst?

# %%
truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
a = (q.abs() @ k.abs().mT).max().item() / D**0.5
u, largest = torch.finfo(torch.float32).eps / 2, v.abs().max().item()


def bound(n):
    return 2 * u * largest * (S + (D + 4) * a + 3 * n * (a + math.log(S) + 3))


def off(out):
    return (out.view(K, G, D) - truth).abs().max().item()


tried = [
    (n, off(by_chance(n, q, k, v))) for n in (1, 2, 5, 13, 40, 300, S) for _ in range(3)
]
print(
    f"{len(tried)} ways to cut and merge: "
    f"off by {max(error for _, error in tried):.1e} at most"
)
print(
    f"one softmax: off by {off(whole):.1e}; "
    f"the bound is {bound(1):.1e} for 1 piece, {bound(S):.1e} for {S:,}"
)
assert all(error < bound(n) for n, error in tried)
assert max(error for n, error in tried if n == S) < 4 * max(
    error for n, error in tried if n < S
)
for n in (1, 4, 64, 512, S):
    assert off(split(q, k, v, n)) < bound(n)
    # the package's reference
    assert off(flash_decoding(q.view(1, H, 1, D), k[None], v[None], n)) < bound(n)
assert off(
    F.scaled_dot_product_attention(
        q.view(1, H, 1, D), k[None], v[None], enable_gqa=True
    )
) < bound(1)
in_fp64 = max(off(by_chance(n, q.double(), k.double(), v.double())) for n in (2, 40, S))
print(f"in fp64: off by {in_fp64:.1e}")
assert in_fp64 < bound(S) * 2**-29  # fp64 has 29 bits more

# %% [markdown]
# None is: 2,048 pieces of one token each do no worse than a few.


# %% Draw figure 3 tags=["hide-input"]
def errors(theme: Theme):
    """What chance found, beneath what rounding allows."""
    drawn, axes = course.figure(height=2.9)
    axes.loglog(
        [n for n, _ in tried],
        [error for _, error in tried],
        "o",
        color=theme.series[0],
        label="found",
    )
    ns = [2**i for i in range(12)]
    axes.loglog(ns, [bound(n) for n in ns], color=theme.series[1], label="worst case")
    axes.axhline(
        off(whole),
        color=theme.quiet,
        linewidth=1,
        linestyle=(0, (4, 3)),
        label="one softmax",
    )
    axes.set(
        xlabel="pieces, cut and merged by chance",
        ylabel="largest error, fp32",
        ylim=(1e-8, 1),
    )
    axes.grid()
    axes.legend(loc="upper left", ncols=3)
    return drawn


course.show(
    errors,
    "Figure 3. From 1 piece to 2,048, cut and merged by chance: "
    "errors stay near that of one softmax.",
)

# %% [markdown]
# ## 4. What it costs
# **No product more,** and an output and a $z$ for each query head and split: $n\,H\,(D + 1)$ fp32 numbers.

# %%
outs, z = attend(q[:, None], k.unflatten(1, (8, -1)), v.unflatten(1, (8, -1)))
assert outs.nbytes + z.nbytes == 8 * H * (D + 1) * 4
assert (
    flops(lambda: split(q, k, v, 8)) == flops(lambda: attend(q, k, v)) == 4 * H * D * S
)
print(
    f"in 5 splits {5 * H * (D + 1) * 4:,} bytes, "
    f"{5 * H * (D + 1) * 4 / (cached * S / L):.1%} of a block's cache"
)

# %% [markdown]
# **What it can gain.** Suppose the worst: 8 SMs draw a fifth of the bandwidth, so without splits the cache takes five
# times as long to read. How much faster does a *token* become? Predict for our 2,048.

# %%
for past in (2048, 32_768, longest):
    *others, cache = answering(past).values()
    print(
        f"after {past:7,}: "
        f"at most {(sum(others) + SMS / K * cache) / (sum(others) + cache):.2f} "
        "times as fast"
    )

# %% [markdown]
# A tenth at most: a token waits for weights, which all SMs read anyway. Flash-Decoding is for long pasts; its authors
# report up to 8 times with CodeLlama-34B. Training gains nothing: it has 1,024 pieces already.
#
# **On this machine** one thread reads alone, so splits cannot help. But repeated heads move nine times the bytes: they
# are read, written 4 times, read again. The last row hands torch a group's 4 queries as 4 rows over their own head.
# With a GPU it measures there, in 16 bits.

# %%
device = "cuda" if torch.cuda.is_available() else "cpu"
ways = {
    "our 8 splits": lambda q, k, v: split(q[0], k[0], v[0], 8)[None],
    "shared heads": lambda q, k, v: F.scaled_dot_product_attention(
        q.view(1, H, 1, D), k, v, enable_gqa=True
    ),
    "repeated": lambda q, k, v: F.scaled_dot_product_attention(
        q.view(1, H, 1, D), expand_kv(k, G), expand_kv(v, G)
    ),
    "4 rows a head": F.scaled_dot_product_attention,
}
print(
    f"{this_device().name}: microseconds of one block's attention after 1,024, "
    "4,096, 16,384 tokens"
)
for name, way in ways.items():
    line = f"{name:14}"
    for past in (1024, 4096, 16_384):
        x = [torch.randn(1, K, n, D, device=device) for n in (G, past, past)]
        assert torch.allclose(
            way(*x).view(K, G, D), ways["shared heads"](*x).view(K, G, D), atol=1e-3
        )
        timer = Timer(
            "way(*x)",
            globals={"way": way, "x": [y.half() if device == "cuda" else y for y in x]},
        )
        line += f"{timer.blocked_autorange(min_run_time=0.1).median * 1e6:10,.0f}"
    print(line)

# %% [markdown]
# The whole model, as committed (two blocks, 128 tokens of past). On a CPU `cria chat` asks for nothing, so *off* and
# *on* are the same thing, and their difference is noise:

# %%
found = [
    case for case in results.read(results.COMMITTED) if case.bench == "flash_decoding"
]
print(tables.tricks(found) if found else "no committed results beside this package")

# %% [markdown]
# ## 5. The production switch
# There is no toggle. `for_chat` says what `cria chat` asks of transformers:

# %%
for machine in (A100_40GB, T4):
    print(f"{machine.name}: {for_chat(machine) or 'nothing: torch splits by itself'}")

# %% [markdown]
# From compute capability 8.0 on, torch's flash kernel, like the package flash-attn, counts pieces and SMs, and splits
# (`num_splits_heuristic`, exercise 2). vLLM's `paged_attention_v2` cuts every 512 tokens and merges in a second kernel.
# FlashInfer has `merge_state`, and supports Turing. On a T4 torch has no kernel that splits; its fast one takes no
# shared heads, so they are repeated there, as in [the lesson on FlashAttention](flash_attention.py).
#
# How often does the cache move for one token? Once would be ideal: attention reads it. But transformers' `DynamicCache`
# appends with `torch.cat`, which reads the old cache and writes a new one. Predict both factors, then count in a small
# Llama.


# %% Helper: count moved bytes tags=["hide-input"]
class Moved(TorchDispatchMode):
    """Bytes that operations read and write; views move none, and repeated heads are
    read where they are stored."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not func.is_view and func.overloadpacket.__name__ != "_unsafe_view":
            tensors = (
                x for x in tree_iter((args, kwargs, out)) if isinstance(x, torch.Tensor)
            )
            self.bytes += sum(
                min(x.untyped_storage().nbytes(), x.numel() * x.itemsize)
                for x in tensors
            )
        return out


# %%
def repeated(module, query, key, value, *arguments, **named):
    """Attention as a T4's fast kernel needs it, also for one token."""
    groups, ungrouped = (
        query.shape[1] // key.shape[1],
        types.SimpleNamespace(is_causal=True),
    )
    return sdpa_attention_forward(
        ungrouped,
        query,
        expand_kv(key, groups),
        expand_kv(value, groups),
        *arguments,
        **named,
    )


AttentionInterface.register("repeated", repeated)
AttentionMaskInterface.register("repeated", sdpa_mask)
widths = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
}


def moved(past, in_place=False, **attention):
    config = LlamaConfig(num_attention_heads=8, num_key_value_heads=2, **widths)
    model = AutoModelForCausalLM.from_config(config, **attention)
    cache = (
        for_answers(model, past + 1)["past_key_values"]
        if in_place
        else DynamicCache(config=config)
    )
    with torch.no_grad():
        model(torch.zeros(1, past, dtype=torch.long), past_key_values=cache)
        with Moved() as count:
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    return count.bytes, sum(
        layer.keys.nbytes + layer.values.nbytes for layer in cache.layers
    )


def factor(**how):
    (less, small), (more, large) = moved(256, **how), moved(512, **how)
    return (more - less) / (large - small)  # what grows with the past


for name, how, predicted in (
    ("shared heads, as on an A100", {}, 2 + 1),
    (
        "repeated heads, as on a T4",
        {"attn_implementation": "repeated"},
        2 + (1 + 4) + 4,
    ),
):
    print(f"{name}: predicted {predicted}, counted {factor(**how):.2f} times the cache")
    assert factor(**how) == predicted

# %% [markdown]
# Both can be mended. Take the room of the whole answer once, and write each new token behind the others. And let the 4
# queries that share a head be 4 *rows* of it: one new token sees the whole past, so no row needs a causal mask.

# %%
room, (first, new) = (
    torch.zeros(1, K, 8, D),
    (torch.randn(1, K, 5, D), torch.randn(1, K, 1, D)),
)
append(room, 0, first)
kept = append(room, 5, new)
assert torch.equal(kept, torch.cat([first, new], dim=2))
assert kept.data_ptr() == room.data_ptr()
query = torch.randn(1, H, 1, D)
rows = groups_as_rows(query, K)
print(f"queries {tuple(query.shape)} -> {tuple(rows.shape)}")
shared = F.scaled_dot_product_attention(rows, kept, kept).flatten(1, 2).unsqueeze(2)
plain = F.scaled_dot_product_attention(
    query, expand_kv(kept, H // K), expand_kv(kept, H // K)
)
torch.testing.assert_close(shared, plain)

for machine in (A100_40GB, T4):
    often = factor(in_place=True, **for_chat(machine))
    print(
        f"{machine.name}, as `cria chat` and `cria eval` answer: "
        f"{often:.2f} times the cache"
    )
    assert often == 1
for often in (11, 3, 1):
    *others, cache = answering(longest).values()
    bytes_read = sum(others) + often * cache
    print(
        f"{often:2.0f} times: at most {card.memory_rate / bytes_read:.1f} tokens/s "
        f"after {longest:,}"
    )


# %% Draw figure 4 tags=["hide-input"]
def speed_limits(theme: Theme):
    """Tokens a second that a T4's bandwidth allows, over the length of the past."""
    drawn, axes = course.figure(height=3.1)
    pasts = [2 ** (7 + i / 4) for i in range(41)]
    named = (
        (1, "once: in place"),
        (3, "3 times: DynamicCache"),
        (11, "11 times: repeated heads, too"),
    )
    for (often, name), colour in zip(named, theme.series, strict=False):
        others = sum(answering(0).values())
        limits = [card.memory_rate / (others + often * cached * past) for past in pasts]
        axes.semilogx(pasts, limits, color=colour, base=2, label=name)
    axes.axvline(2048, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(2048, 6, "  our rows", color=theme.quiet)
    axes.set_xticks(
        [2**n for n in range(7, 18, 2)], [f"{2**n:,}" for n in range(7, 18, 2)]
    )
    axes.set(xlabel="tokens of past", ylabel="tokens/s, upper bound", ylim=(0, 140))
    axes.grid(axis="y")
    axes.legend(loc="lower left")
    return drawn


course.show(
    speed_limits,
    "Figure 4. What a T4's bandwidth allows; the launch of kernels, "
    "which a small model waits for, is not in it.",
)

# %% [markdown]
# Before you ask for splits, look at what moves. Rows of a shared head leave 8 pieces, but a fifth of the card for
# one cache is quicker than all of it for nine. (By arithmetic: we had no T4.) transformers' `pack_gqa` makes such rows
# for padded batches.
#
# ## 6. Where it breaks
# **Wrong numbers, no error.** Somebody merged with `mean`. One key of 2,048 is what the query looks for, and four of
# five pieces have nothing to say. Cause: a piece counts by its $e^z$. Cure: the softmax of $z$.

# %%
needle = k.clone()
needle[:, 1234] = 16 * q[:, 0] / q[:, 0].norm(dim=-1, keepdim=True)
pieces = [
    attend(q[:, :1], *pair)
    for pair in zip(needle.tensor_split(5, 1), v.tensor_split(5, 1), strict=True)
]
outs, z = (torch.stack(of_all) for of_all in zip(*pieces, strict=True))
right, _ = attend(q[:, :1], needle, v)
shares = {"mean": outs.mean(0), "cure: softmax of z": (z.softmax(0) * outs).sum(0)}
wrong = {
    says: ((out - right).norm() / right.norm()).item() for says, out in shares.items()
}
print(", ".join(f"{says}: off by {error:.1%}" for says, error in wrong.items()))
assert wrong["mean"] > 0.5 > 1e-5 > wrong["cure: softmax of z"]

# %% [markdown]
# **An output of exactly zero, or `nan`.** Somebody left the maximum out, in fp16, which ends at 65,504. 4,096 keys with
# a score of 3 sum to 82,270, so to `inf`, and finite over infinite is 0. One score of 12 makes it `inf` over `inf`.
# Cure: subtract the maximum, and sum in fp32, as kernels do: 70,000 equal scores overflow even then.

# %%
assert round(4096 * math.exp(3)) == 82_270
scores = torch.full((4096,), 3.0).half()
for highest in (3, 12):
    scores[0] = highest
    p = scores.exp()
    share = p / p.sum()
    print(
        f"highest score {highest:2}: the sum is {p.sum().item()}, "
        f"the largest share {share.max().item()}"
    )
    assert share.isnan().any() if highest == 12 else not share.any()
    cured = (scores.float() - scores.float().max()).exp()
    assert abs((cured / cured.sum()).sum() - 1) < 1e-5
assert torch.ones(70_000).half().sum().isinf()

# %% [markdown]
# **`nan` in some rows of a batch.** A padded row's first piece is all padding: every score is $-\infty$, so is the
# maximum, and $-\infty - (-\infty)$ is `nan`. The merge spreads it. Cure: keep the maximum finite and the sum above
# zero. FlashAttention's merge has such a line, too.


# %%
def attend_or_not(q, k, v, hidden):
    scores = q @ k.mT / D**0.5 + hidden
    m = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).min)
    p = (scores - m).exp()
    total = p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
    return p @ v / total, m + total.log()


hidden = torch.zeros(S)
hidden[:600] = -torch.inf
halves = [
    (k[:, :512], v[:, :512], hidden[:512]),
    (k[:, 512:], v[:, 512:], hidden[512:]),
]
for way in (attend, attend_or_not):
    out, _ = merge(*(way(q, *half) for half in halves))
    print(f"{way.__name__:14} {out.isnan().float().mean():.0%} nan")
    assert out.isnan().all() == (way is attend)
assert torch.allclose(out, attend(q, k[:, 600:], v[:, 600:])[0], atol=1e-6)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** After how many tokens does the KV cache take as many bytes as the weights, both in 16 bits? Your
#    answer is a number of tokens.
# 2. **Build.** How many splits? $w$ pieces of work in $n$ splits take $r = w\,n / M$ rounds on $M$ SMs. The last may be
#    nearly empty: the share of the card in use is $r / \lceil r \rceil$. FlashAttention (where each SM counts twice)
#    does not split if $w \ge 0.8\,M$, else takes the smallest $n \le M$ with at least 85 % of the best share. Fill in
#    `splits_for(work, sms)`. It returns $n$, a whole number; 1 means no split. (About four lines.)
# 3. **Reach.** $B$ questions share a system prompt, whose keys and values, $(K, P, D)$ each, are kept and read once.
#    Fill in `with_prompt`, using `attend` and `merge`. The queries are $(B, K, G, D)$, each question's own past $(B, K,
#    S, D)$. It returns the outputs, shaped like the queries.

# %% tags=["exercise"]
past_as_large_as_the_weights = None


def splits_for(work, sms):
    """FILL ME IN: return a whole number of splits."""


def with_prompt(q, prompt_k, prompt_v, own_k, own_v):
    """FILL ME IN: return a tensor shaped like q."""


# %% Check the exercises tags=["hide-input"]
def of_splits(answer):
    def share(work, sms, n):
        return work * n / sms / math.ceil(work * n / sms)

    for work, sms in (
        (8, 40),
        (32, 40),
        (36, 40),
        (31, 40),
        (8, 108),
        (8, 132),
        (3, 40),
        (60, 108),
        (1, 7),
    ):
        if (n := answer(work, sms)) is None:
            raise NotImplementedError
        case = f"{work} pieces on {sms} SMs, {n} splits"
        if not isinstance(n, int):
            raise TypeError(f"this is a {type(n).__name__}, not a whole number")
        assert 1 <= n <= sms, (
            f"{case}: take at least 1 split, and at most one for each SM"
        )
        if work >= 0.8 * sms:
            assert n == 1, f"{case}: so many pieces are not split at all"
            continue
        enough = 0.85 * max(share(work, sms, other) for other in range(1, sms + 1))
        assert share(work, sms, n) >= enough, (
            f"{case}: only {share(work, sms, n):.0%} of the card are in use"
        )
        assert all(share(work, sms, other) < enough for other in range(1, n)), (
            f"{case}: fewer are good enough, too"
        )


class ReadsOf(TorchDispatchMode):
    """Count how often operations read each of some tensors, or a view of it."""

    def __init__(self, tensors):
        super().__init__()
        self.times = {x.untyped_storage().data_ptr(): 0 for x in tensors}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func.overloadpacket.__name__ != "_unsafe_view":
            for x in tree_iter((args, kwargs)):
                if (
                    isinstance(x, torch.Tensor)
                    and (place := x.untyped_storage().data_ptr()) in self.times
                ):
                    self.times[place] += 1
        return func(*args, **(kwargs or {}))


def of_prompt(answer):
    made = torch.Generator().manual_seed(3)
    P, own = 512, 32
    many = "with one question it is right; which queries share a head?"
    for B, hint in ((1, "which weight does each part get in the merge?"), (6, many)):
        sizes = ((B, K, G, D), (K, P, D), (K, P, D), (B, K, own, D), (B, K, own, D))
        q, pk, pv, ok, ov = given = [
            torch.randn(size, generator=made) for size in sizes
        ]
        with ReadsOf((pk, pv)) as reads:
            out = answer(*given)
        if out is None:
            raise NotImplementedError
        assert out.shape == q.shape, (
            f"the shape is {tuple(out.shape)}, and the queries' is {tuple(q.shape)}"
        )
        keys, values = (
            torch.cat([p.expand(B, -1, -1, -1), o], 2) for p, o in ((pk, ok), (pv, ov))
        )
        right = F.scaled_dot_product_attention(q, keys, values)
        off_by = (out - right).abs().max()
        assert off_by < 1e-5, f"off by {off_by:.3f} for {B} questions; {hint}"
    copied = peak_bytes(lambda: answer(*given), given) > (B - 1) * pk.nbytes
    assert not copied, (
        "right, but the prompt was copied for every question: "
        "make the questions rows of one product"
    )
    often = max(reads.times.values())
    assert often == 1, (
        f"right, but the prompt was read {often} times: "
        "make the questions rows of one product"
    )


course.check(
    1,
    past_as_large_as_the_weights,
    course.about(
        75_428,
        "count a token's keys and values in all blocks, 2 bytes each; "
        "how often does that go into the weights' bytes?",
        mistakes={
            150_856: "twice too many: the cache has keys and values, "
            "and every number here has 2 bytes",
            37_714: "half of it: every weight has 2 bytes",
            18_857: "a quarter: the cache has the 8 heads of keys and values, "
            "not one for each of 32 query heads",
            1_206_850: "that is for the cache of one block, and there are 16",
        },
    ),
    "a number of tokens",
)
course.check(
    2, splits_for, of_splits, "a function (work, sms) -> a whole number of splits"
)
course.check(
    3,
    with_prompt,
    of_prompt,
    "a function (q, prompt_k, prompt_v, own_k, own_v) -> a tensor shaped like q",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# past_as_large_as_the_weights = 2 * shape.weights / cached
#
#
# def splits_for(work, sms):
#     if work >= 0.8 * sms:
#         return 1
#     shares = [work * n / sms / math.ceil(work * n / sms) for n in range(1, sms + 1)]
#     return next(n for n, share in enumerate(shares, 1) if share >= 0.85 * max(shares))
#
#
# def with_prompt(q, prompt_k, prompt_v, own_k, own_v):
#     rows = q.transpose(0, 1).flatten(1, 2)  # (K, B G, D): all over one prompt
#     shared = [
#         x.unflatten(1, (len(q), -1)).transpose(0, 1)
#         for x in attend(rows, prompt_k, prompt_v)
#     ]
#     return merge(shared, attend(q, own_k, own_v))[0]
# ```
#
# </details>
#
# ## In one breath
# - **Saves** time where one token's 8 pieces of work leave most of a card idle; no byte of a training step.
# - **Costs** $n\,H\,(D + 1)$ numbers for a moment, and no product.
# - **Exact within rounding**: merging adds sums, so any cut and any order will do.
# - **When**: long pasts, few conversations, many SMs. From compute capability 8.0 on kernels do it by themselves.
# - **When not**: training; short pasts, which wait for weights; many conversations. First count how often your library
#   moves the cache.
#
# ## Sources
# - Dao, Haziza, Massa, Sizov 2023, *Flash-Decoding for long-context inference*, pytorch.org/blog/flash-decoding.
# - Milakov, Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv 1805.02867, section 3 (maxima and sums
#   merge). Ye et al. 2025, *FlashInfer*, arXiv 2501.01005, section 2.2 (outputs merge).
# - Shazeer 2019, *Fast Transformer Decoding*, arXiv 1911.02150 (decoding waits for memory); Ainslie et al. 2023, *GQA*,
#   arXiv 2305.13245. Juravsky et al. 2024, *Hydragen*, arXiv 2402.05099 (exercise 3).
# - torch: `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`. transformers 5.23: `cache_utils.py`
#   (`DynamicLayer.update`), `integrations/sdpa_attention.py` (`pack_gqa`).
# - vLLM: `csrc/attention/paged_attention_v2.cu`. FlashInfer's documentation, `flashinfer.cascade`, and its README
#   (Turing). NVIDIA: T4 data sheet (2,560 cores, 320 GB/s), Turing whitepaper (64 cores a multiprocessor).
# - Ours: `cria_tricks/tricks/flash_decoding.py` and `kv_cache.py`, their tests in `tests/tricks/`,
#   `benchmarks/bench_flash_decoding.py` and `bench_kv_cache.py`.
