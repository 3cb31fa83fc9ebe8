# ---
# jupyter:
#   question: Why does each new token move the whole KV cache three times, and how can all of a GPU read it?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Flash-Decoding: one new token reads a long past
# > **Promise.** The longer a conversation, the slower your fine-tuned model answers, although most of the GPU has
# > nothing to do. You will count how often transformers moves the KV cache (the keys and values of all earlier tokens)
# > for each new token, and bring it down to once. And you will write Flash-Decoding, by which newer GPUs than a T4 read
# > a long past with all multiprocessors.
# >
# > **Card.** saves time for each token of an answer, and no byte of training / costs a cache with room for the whole
# > answer, and a small output for each piece / exact within rounding / about 25 minutes / after
# > [FlashAttention](flash_attention.py)
#
# The other lessons make training fit a T4. This one is about what comes afterwards: the trained Llama-3.2-1B answers,
# one token at a time.
#
# ## 1. The bill
# A new token attends to all tokens before it. Their keys and values do not change any more, so they are computed once
# and stored in the [KV cache](../docs/glossary.md#kv-cache). Llama-3.2-1B has 16 blocks with 32 query heads and 8 heads
# of keys and values each ([grouped-query attention](../docs/glossary.md#grouped-query-attention)), which are 64 wide.
# How many KiB of cache does one token of the past take in 16 bits?

# %% Your guess: KiB of KV cache for one token tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import math
import types

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.benchmark import Timer
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    StaticCache,
)
from transformers.integrations import sdpa_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from cria_tricks import course
from cria_tricks.course import (
    A100_40GB,
    CARDS,
    T4,
    Theme,
    cache_in_place,
    find_config,
    find_shape,
    flops,
    peak_bytes,
    results,
    tables,
    this_device,
)
from cria_tricks.techniques import flash_decoding, kv_cache
from cria_tricks.techniques.expand_kv import expand_kv
from cria_tricks.techniques.flash_decoding import for_chat

# transformers knows sdpa_expanded from here on
course.register_attention()

MIB = 2**20
job = course.so_far("flash_decoding")
training = course.bill(job)

# %%
shape, card = find_shape(job.model), CARDS["t4"]
# keys and values, in 2 bytes each
cached = 2 * shape.layers * shape.kv_heads * shape.head_width * 2
course.reveal(guess, cached / 1024, "KiB")
longest = find_config(job.model)["max_position_embeddings"]


def answering(past):
    """Return what each new token reads, in bytes."""
    return {
        "weights": 2 * shape.weights,
        "adapter": 2 * training.step.trained_weights,
        "KV cache": cached * past,
    }


for past in (2048, longest):
    parts = answering(past)
    total = sum(parts.values())
    said = " + ".join(f"{name} {size / MIB:,.0f}" for name, size in parts.items())
    print(f"after {past:7,} tokens: {said} = {total / MIB:,.0f} MiB,")
    print(f"    at most {card.memory_rate / total:5.1f} tokens a second on a T4")

# %% [markdown]
# Even the longest past that this model knows takes less than half of a T4. (`cria chat` unpacks an NF4 base to 16
# bits.) So time is the problem, because each new token reads all of these bytes. A byte comes with 1 to 3 operations,
# and a T4 could do 203 in the time that reading it takes ($65\cdot10^{12}$ operations a second over $320\cdot10^9$
# bytes). Therefore bandwidth divided by bytes limits the tokens a second.
#
# However, only a part of the GPU reads the cache. A T4 computes in 40 multiprocessors ([SMs](../docs/glossary.md#sm)),
# and [FlashAttention](flash_attention.py) gives each of them a head and a tile of 64 queries. In training that makes 32
# heads times 2,048/64 tiles, or 1,024 pieces of work. For one new token each head has *one* query. Moreover, 4 query
# heads share a head of the cache, and one SM must compute all 4 if it is to be read only once. So only 8 pieces are
# left, and 32 of the 40 SMs have nothing to do.


# %% Draw figure 1 tags=["hide-input"]
def who_works(theme: Theme):
    """The 40 multiprocessors of a T4, with the pieces of work of three situations."""
    sketch = course.Sketch(theme, 62, 11.5)
    whats = (
        ("training", "1,024 pieces", 40),
        ("one new token", "8 pieces", 8),
        ("cut in five", "8 x 5 pieces", 40),
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
                1.4,
                1,
                "",
                color=n // 8 % 2 if row == 2 else 0,
                kept=n < busy,
            )
    return sketch.figure


course.show(
    who_works,
    "Figure 1. The 40 multiprocessors of a T4: filled ones have work, dashed ones have "
    "none. Training keeps all of them busy, and one new token keeps 8 busy. If the "
    "past is cut in five, each of the 8 heads keeps five busy (two colours, one for "
    "every second piece).",
)

# %% [markdown]
# (8 SMs may use more than a fifth of the bandwidth.)
#
# ## 2. From scratch, in four steps
# ### Step 1: attend to one piece of the past
# $S$ is the number of tokens in the past, and $G=32/8=4$ queries share each head of keys. We give each SM a piece of
# the past, and it attends to this piece as if there were no other. A softmax needs the largest score $m$ and the sum
# $\ell=\sum e^{s-m}$. Each piece uses the $m$ and $\ell$ of its own scores. Next to its output it returns their
# [log-sum-exp](../docs/glossary.md#log-sum-exp), $z=m+\log \ell$.

# %%
import torch
import torch.nn.functional as F

torch.manual_seed(0)
S, H, K, D = 2048, 32, 8, 64  # tokens, query heads, heads of the cache, a head's width
G = H // K
q = torch.randn(K, G, D)
k, v = torch.randn(K, S, D), torch.randn(K, S, D)


def attend(q, k, v):
    """Return the output, (..., G, D), and the log-sum-exp z, (..., G, 1)."""
    scores = q @ k.mT / D**0.5
    m = scores.amax(-1, keepdim=True)
    p = (scores - m).exp()
    total = p.sum(-1, keepdim=True)
    return p @ v / total, m + total.log()


whole, z_of_all = attend(q, k, v)
assert torch.allclose(whole, F.scaled_dot_product_attention(q, k, v), atol=1e-6)

# %% [markdown]
# ### Step 2: merge two pieces
# The output of a piece is $\sum e^s v$ divided by $\sum e^s=e^z$. (The code divides both sums by $e^m$, which cancels.)
# So we multiply each output by its $e^z$, add both, and divide by the new sum $e^{z_a}+e^{z_b}$. We compute only
# exponentials of differences of $z$. None of these is positive, as the new $z$ is the largest, so nothing can overflow.


# %%
def merge(a, b):
    """Merge two pieces; the result is a piece again."""
    out_a, z_a = a
    out_b, z_b = b
    z = torch.logaddexp(z_a, z_b)
    return (z_a - z).exp() * out_a + (z_b - z).exp() * out_b, z


first = attend(q, k[:, :700], v[:, :700])
second = attend(q, k[:, 700:], v[:, 700:])
out, z = merge(first, second)
assert torch.allclose(out, whole, atol=1e-6)
assert torch.allclose(z, z_of_all, atol=1e-5)

# %% [markdown]
# ### Step 3: all pieces at once
# A GPU works on all pieces at the same time, so we make $n$ pieces of equal length one more dimension of the batch.
# (Here $n$ must divide $S$; in kernels the last piece may be shorter.) Each piece has the share $e^{z}/\sum e^{z}$ in
# the result, so Flash-Decoding is a *softmax of softmaxes*.


# %%
def split(q, k, v, n):
    """Attend with one token's queries, (K, G, D), in n pieces."""
    k, v = k.unflatten(1, (n, -1)), v.unflatten(1, (n, -1))
    outs, z = attend(q[:, None], k, v)  # (K, n, G, D) and (K, n, G, 1)
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
    sketch.text(57.6, 9.4, "merged", quiet=True)
    return sketch.figure


course.show(
    flow,
    "Figure 2. One of the 8 heads, with its 2,048 tokens of past in four pieces: each "
    "piece gives an output and its z, and the softmax of z merges the outputs.",
)

# %% [markdown]
# ### Step 4: move the cache only once
# The usual way to add a token to the cache is `torch.cat`, which copies all of it. Instead, allocate room for the whole
# answer once, and write each new token behind the others.
#
# The 4 queries that share a head should not need 4 copies of its keys, either. The one new token may see all of the
# past. So its queries need no causal mask, and can form a $4\times 64$ matrix that multiplies the shared keys.


# %%
def append(room, length, new):
    """Write new keys or values behind the others, and return a view of all."""
    end = length + new.shape[1]
    room[:, length:end] = new
    return room[:, :end]


room_k, room_v = torch.empty(K, S + 100, D), torch.empty(K, S + 100, D)
append(room_k, 0, k)
append(room_v, 0, v)
new_k, new_v = torch.randn(K, 1, D), torch.randn(K, 1, D)
keys, values = append(room_k, S, new_k), append(room_v, S, new_v)
assert torch.equal(keys, torch.cat([k, new_k], dim=1))
assert keys.data_ptr() == room_k.data_ptr()  # no copy

query = torch.randn(H, 1, D)  # of the new token, for each query head
shared = F.scaled_dot_product_attention(query.view(K, G, D), keys, values)
copies = [x.repeat_interleave(G, dim=0) for x in (keys, values)]
repeated = F.scaled_dot_product_attention(query, *copies)
torch.testing.assert_close(shared.view(H, 1, D), repeated)

# %% [markdown]
# ## 3. Prove it
# A piece stands for two sums over its keys: $\sum e^s=e^z$ and $\sum e^s v=e^z o$, with scores $s$ and output $o$. A
# merge adds both sums, so any cuts and any order must give the same result, within rounding. We shuffle the keys, cut
# them at random places, and merge the pieces in a random order, and compare with attention in float64.


# %%
def at_random(n, q, k, v):
    cuts = (torch.randperm(S - 1)[: n - 1] + 1).sort().values
    pieces = []
    for keys in torch.randperm(S).tensor_split(cuts):
        pieces.append(attend(q, k[:, keys], v[:, keys]))
    while len(pieces) > 1:
        a = pieces.pop(int(torch.randint(len(pieces), ())))
        b = pieces.pop(int(torch.randint(len(pieces), ())))
        pieces.append(merge(a, b))
    return pieces[0][0]


truth = F.scaled_dot_product_attention(q.double(), k.double(), v.double())


def off(out):
    return (out.view(K, G, D) - truth).abs().max().item()


for n in (2, 40, S):
    in_fp64 = at_random(n, q.double(), k.double(), v.double())
    in_fp32 = at_random(n, q, k, v)
    print(f"{n:5,} pieces: off by {off(in_fp32):.0e}, in float64 {off(in_fp64):.0e}")
    assert off(in_fp32) < 1e-6
    assert off(in_fp64) < 1e-14
print(f"one softmax: off by {off(whole):.0e}")

# %% [markdown] tags=["deep"]
# ### Deeper: a bound for the rounding error
# Count roundings, each of which is at most $u=2^{-24}$ of its number. A sum has at most $S$ of them. A score of size at
# most $a$ counts $(D+4)\,a$, because an exponential turns an absolute error into a relative one. A merge counts at most
# $3\,(a+\ln S+3)$, and there are fewer than $n$ merges. All of this happens above and below the division, so twice:
#
# $$|\mathrm{error}| \le 2\,u\,\max|v|\,\bigl(S + (D + 4)\,a + 3\,n\,(a + \ln S + 3)\bigr)$$
#
# The order of the merges is not in it. It is the worst case, and most errors cancel. Therefore 2,048 pieces of one
# token each do no worse than a few.

# %% tags=["deep"]
a = (q.abs() @ k.abs().mT).max().item() / D**0.5
u, largest = torch.finfo(torch.float32).eps / 2, v.abs().max().item()


def bound(n):
    return 2 * u * largest * (S + (D + 4) * a + 3 * n * (a + math.log(S) + 3))


tried = [
    (n, off(at_random(n, q, k, v))) for n in (1, 2, 5, 13, 40, 300, S) for _ in range(3)
]
print(f"the bound is {bound(1):.1e} for 1 piece and {bound(S):.1e} for {S:,}")
assert all(error < bound(n) for n, error in tried)
assert max(error for n, error in tried if n == S) < 4 * max(
    error for n, error in tried if n < S
)
in_kernels = (q.view(1, H, 1, D), k[None], v[None])
assert off(F.scaled_dot_product_attention(*in_kernels, enable_gqa=True)) < bound(1)
for n in (1, 4, 64, 512, S):
    assert off(split(q, k, v, n)) < bound(n)
    # the package's reference
    assert off(flash_decoding.flash_decoding(*in_kernels, n)) < bound(n)
in_fp64 = max(off(at_random(n, q.double(), k.double(), v.double())) for n in (2, 40, S))
assert in_fp64 < bound(S) * 2**-29  # fp64 has 29 bits more


# %% Draw figure 3 tags=["deep"]
def errors(theme: Theme):
    """The errors found, below what rounding allows."""
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
        xlabel="pieces, cut and merged at random",
        ylabel="largest error, fp32",
        ylim=(1e-8, 1),
    )
    axes.grid()
    axes.legend(loc="upper left", ncols=3)
    return drawn


course.show(
    errors,
    "Figure 3. From 1 piece to 2,048, cut and merged at random: the errors stay near "
    "that of one softmax, and far below the bound.",
)

# %% [markdown]
# ## 4. What it costs
# **Pieces** need no more matrix multiplications, but they cost an output and a $z$ for each query head and piece, which
# are $n\,H\,(D+1)$ fp32 numbers. For 5 pieces and 2,048 tokens that is 1 % of the cache of a block.
#
# **The cache** costs traffic. transformers keeps it in a `DynamicCache`, which adds a token with `torch.cat`. That
# reads the old cache and writes a new one, and then attention reads the new one. So the whole cache moves 3 times for
# each token, if the attention kernel takes shared heads. A T4's fast kernel does not, so [expanded
# K/V](../docs/glossary.md#expand-kv) gives each of the 4 queries its own copy first. How many times does the cache move
# then? (Otherwise torch takes its slow *math* kernel on a T4, which we count as well.)

# %% Your guess: times that the cache moves for a token, with repeated heads tags=["predict"]
guess = 0  # @param {type:"number"}


# %% Count moved bytes in a small Llama tags=["hide-input"]
class Moved(TorchDispatchMode):
    """Bytes that operations read and write; views move none, and repeated heads are
    read where they are stored."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "index_copy_":  # writes the new token only
            self.bytes += 2 * args[3].nbytes
        elif not func.is_view and name != "_unsafe_view":
            for x in tree_iter((args, kwargs, out)):
                if isinstance(x, torch.Tensor):
                    size = x.numel() * x.itemsize
                    self.bytes += min(x.untyped_storage().nbytes(), size)
        return out


def repeated_heads(module, query, key, value, *arguments, **named):
    """Attention as a T4's fast kernel needs it, also for one token."""
    groups = query.shape[1] // key.shape[1]
    key, value = expand_kv(key, groups), expand_kv(value, groups)
    # without num_key_value_groups, so that transformers does not repeat them again
    ungrouped = types.SimpleNamespace(is_causal=True)
    return sdpa_attention_forward(ungrouped, query, key, value, *arguments, **named)


AttentionInterface.register("repeated", repeated_heads)
AttentionMaskInterface.register("repeated", sdpa_mask)


def dynamic(model, past):
    return DynamicCache(config=model.config)


def in_place(model, past):
    return cache_in_place(model, past + 1)


def moved(past, cache_of, **attention):
    """Return the bytes that one new token moves, and those of the cache."""
    config = LlamaConfig(
        num_attention_heads=8,
        num_key_value_heads=2,
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        head_dim=D,
    )
    # on the CPU, also where there is a GPU: here only the bytes matter
    model = AutoModelForCausalLM.from_config(config, **attention)
    cache = cache_of(model, past)
    with torch.no_grad():
        model(torch.zeros(1, past, dtype=torch.long), past_key_values=cache)
        size = cached_in(cache)
        with Moved() as count:
            model(torch.zeros(1, 1, dtype=torch.long), past_key_values=cache)
    return count.bytes, size


def cached_in(cache):
    """Return the bytes of the tokens that are in a cache."""
    keys = cache.layers[0].keys
    token = 2 * len(cache.layers) * keys.shape[1] * keys.shape[3] * keys.itemsize
    return int(cache.get_seq_length()) * token


def times_moved(cache_of, **attention):
    """Return how many times the cache moves: what grows with the past, over it."""
    less, small = moved(256, cache_of, **attention)
    more, large = moved(512, cache_of, **attention)
    return (more - less) / (large - small)


# %%
from torch.nn.attention import SDPBackend, sdpa_kernel

# A small Llama on the CPU makes one token after 256 and after 512 others. We divide the
# growth of its moved bytes by the growth of the cache.
repeats = {"attn_implementation": "repeated"}
usual = times_moved(dynamic)
with_repeats = times_moved(dynamic, **repeats)
course.reveal(guess, with_repeats, "times")
print("The other ways, times that the cache moves:")
print(f"{usual:3.0f} shared heads, in a kernel that takes them")
with sdpa_kernel(SDPBackend.MATH):
    in_math = times_moved(dynamic, dtype=torch.float16)
print(f"{in_math:3.0f} shared heads, in torch's math kernel")
for machine in (A100_40GB, T4):
    once = times_moved(in_place, **for_chat(machine))
    print(f"{once:3.0f} cria chat, on {machine.name}")

# %% Print what bandwidth allows, and check the numbers of the text tags=["hide-input"]
assert (usual, with_repeats, once) == (2 + 1, 2 + (1 + 4) + 4, 1)
# to fp32, repeated, keys scaled, read again; and the scores of the new token
assert 29 + 2 < in_math < 29 + 2 + 0.5
for times in (31, 11, 3, 1):
    *others, cache = answering(longest).values()
    rate = card.memory_rate / (sum(others) + times * cache)
    print(f"moved {times:2} x: at most {rate:4.1f} tokens/s after {longest:,} tokens")
*others, cache = answering(2048).values()
slower = [round((sum(others) + n * cache) / (sum(others) + cache), 2) for n in (3, 11)]
assert slower == [1.05, 1.26]
for past in (2048, 32_768, longest):
    *others, cache = answering(past).values()
    # at worst, 8 of 40 SMs read the cache five times as slowly as all
    gain = (sum(others) + 40 / 8 * cache) / (sum(others) + cache)
    print(f"pieces, after {past:7,} tokens: at most {gain:.2f} times as fast")


# %% Draw figure 4 tags=["hide-input"]
def speed_limits(theme: Theme):
    """Tokens a second that a T4's bandwidth allows, over the length of the past."""
    drawn, axes = course.figure(height=3.1)
    pasts = [2 ** (7 + i / 4) for i in range(41)]
    named = (
        (1, "once: in place"),
        (3, "3 times: DynamicCache"),
        (11, "11 times: repeated heads, too"),
        (31, "31 times: math kernel"),
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
    "Figure 4. Tokens a second that a T4's bandwidth allows, for a cache that moves "
    "once, 3, 11 or 31 times. After 2,048 tokens, once is 5 % faster than 3 times, and "
    "26 % faster than 11 times. The time to launch kernels is not in it.",
)

# %% Print what was measured tags=["hide-input"]
measured = [
    case for case in results.read(results.COMMITTED) if case.bench == "kv_cache"
]
course.show_table(tables.tricks(measured) if measured else "no committed results")

# %% [markdown]
# With repeated heads the cache moves 11 times: 2 for `torch.cat`, then one reading and four writings to repeat the
# heads, and four readings by attention. The math kernel moves it 31 times, because it converts keys and values to fp32
# and makes more copies. Step 4 avoids the copies, so the cache moves once. After the longest past that allows 47 tokens
# a second on a T4 (predicted), where 11 times allow 6.
#
# The lines *pieces, after* show what pieces gain at most, if 8 of 40 SMs read the cache five times as slowly as all.
# After 2,048 tokens, pieces make a token at most a tenth faster, because it mostly reads weights, and all SMs read
# those anyway. So Flash-Decoding is made for long pasts, and its authors report up to 8 times with CodeLlama-34B.
#
# The printed table was measured on a CPU, after 1,024 tokens: the cache in place (`on`) takes 0.76 of the time of
# `DynamicCache` (`off`).

# %% [markdown] tags=["deep"]
# ### Deeper: attention alone, on this machine
# On a CPU one thread reads alone, so pieces cannot help there. To see what they cost, compare the first line with the
# last one, where a group's 4 queries multiply their own head, as they do in our pieces. Repeated heads move nine times
# the bytes: they are read, written 4 times, and 4 copies are read. They may take even longer than nine times, because
# the copies do not fit the CPU's own cache. (torch's kernel for shared heads goes through the 32 query heads one by
# one, so on a CPU it can be slower than the last line.) With a GPU the cell measures there, in 16 bits.

# %% tags=["deep"]
device = "cuda" if torch.cuda.is_available() else "cpu"
ways = {
    "our 8 pieces": lambda q, k, v: split(q[0], k[0], v[0], 8)[None],
    "shared heads": lambda q, k, v: F.scaled_dot_product_attention(
        q.view(1, H, 1, D), k, v, enable_gqa=True
    ),
    "repeated": lambda q, k, v: F.scaled_dot_product_attention(
        q.view(1, H, 1, D), expand_kv(k, G), expand_kv(v, G)
    ),
    "4 queries a head": F.scaled_dot_product_attention,
}
print(f"{this_device().name}: microseconds of one block's attention")
print(f"{'after so many tokens':20}{'1,024':>6}{'4,096':>10}{'16,384':>10}")
for name, way in ways.items():
    line = f"{name:16}"
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

# the numbers of the text
outs, z = attend(q[:, None], k.unflatten(1, (8, -1)), v.unflatten(1, (8, -1)))
assert outs.nbytes + z.nbytes == 8 * H * (D + 1) * 4
assert round(100 * 5 * H * (D + 1) * 4 / (cached * S / shape.layers)) == 1
in_pieces = flops(lambda: split(q, k, v, 8))
assert in_pieces == flops(lambda: attend(q, k, v)) == 4 * H * D * S
for past in (2048, longest):
    weights = shape.active_weights + training.step.trained_weights
    operations = 2 * weights + 4 * shape.layers * H * D * past
    assert 1 < operations / sum(answering(past).values()) < 3
assert round(card.half_flops / card.memory_rate) == 203
assert (cached, 2560 // 64) == (32 * 1024, 40)  # CUDA cores of a T4, and of one SM
assert sum(answering(longest).values()) < T4.memory_bytes / 2

# %% [markdown]
# ## 5. The production switch
# In plain Hugging Face code, one argument of `generate` gives a cache in place, a `StaticCache`. (On a GPU, also pass
# `disable_compile=True`, because a compiled model repeats the heads: see the deeper part.)

# %%
print(kv_cache.PLAIN)
print("cria chat on a T4 loads the model with", for_chat(T4))
shares = for_chat(T4)  # the queries of a token share their heads
both = times_moved(in_place, **shares)
only_shared = times_moved(dynamic, **shares)
only_in_place = times_moved(in_place, **repeats)
print("times that the cache moves for a token  without   with")
for name, without, having in (
    ("cache in place, if heads are repeated", with_repeats, only_in_place),
    ("cache in place, if heads are shared", only_shared, both),
    ("shared heads, if torch.cat adds", with_repeats, only_shared),
    ("shared heads, if the cache is in place", only_in_place, both),
):
    print(f"{name:40}{without:6.0f}{having:7.0f}")

# %% Check the numbers in the text tags=["hide-input"]
assert (with_repeats, only_in_place, only_shared, both) == (11, 9, 3, 1)
assert training.lines == course.bill(course.so_far("kwanzaa")).lines

# %% [markdown]
# Each change is worth the same both times, 2 and 8 times the cache, because moved bytes add up. `sdpa_expanded` repeats
# heads only for the prompt; for a new token its 4 queries share a head, as in step 4. `cria chat` and `cria eval`
# always write the cache in place, without a field in the recipe:
#
# ```bash
# cria train kwanzaa
# cria chat runs/kwanzaa/adapter --prompt "What is umoja?"
# ```
#
# From compute capability 8.0 on, torch's flash kernel cuts the past into pieces by itself, and so does the package
# flash-attn. A T4 has 7.5, and no such kernel. So there `cria chat` does *not* cut the past; it only brings the cache
# down to once. That is the larger gain: 8 SMs that read the cache once take at most as long as 40 SMs that move it 5
# times. (This is computed, not measured.)

# %% [markdown] tags=["deep"]
# ### Deeper: what StaticCache reads, and who else splits
# A `StaticCache` always gives attention the whole room, with a mask over the empty part. So each token also reads the
# room that is still empty. We count it with a room for one token more, and with a room twice as long as the past. (In
# our own cache, attention gets a view of the tokens that are there.)
#
# With a mask, transformers 5.23 groups the queries that share a head (`pack_gqa`), so the whole room moves once. An
# older version such as 5.17 repeats the heads there: we count 9 and 18 times. A compiled model repeats them in 5.23 as
# well, because transformers leaves `pack_gqa` out while torch compiles. On a GPU, `generate` compiles a model with a
# `StaticCache`, unless you pass `disable_compile=True`.


# %% tags=["deep"]
def static(model, past):
    return StaticCache(config=model.config, max_cache_len=past + 1)


def static_with_room(model, past):
    return StaticCache(config=model.config, max_cache_len=2 * past)


nearly_full, half_empty = times_moved(static), times_moved(static_with_room)
print(f"StaticCache, nearly full: {nearly_full:.1f} times the cache")
print(f"StaticCache, half empty: {half_empty:.1f} times")
# one reading; or, in versions that repeat the heads, 1 reading, 4 writings, 4 readings
once = 1 if hasattr(sdpa_attention, "pack_gqa") else 9
assert once < nearly_full < once + 0.1  # and the mask
assert abs(half_empty / nearly_full - 2) < 0.01

# %% [markdown] tags=["deep"]
# torch's flash kernel and flash-attn count pieces and SMs, and then choose the number of splits
# (`num_splits_heuristic`, exercise 2). vLLM's older kernel `paged_attention_v2` cuts the past every 512 tokens and
# merges in a second one; today vLLM takes FlashAttention, FlashInfer or a Triton kernel. FlashInfer has `merge_state`,
# and it supports Turing, the generation of the T4.

# %% [markdown]
# ## 6. Where it breaks
# **Wrong numbers, and no error.** Somebody took the mean of the pieces' outputs to merge them. In the next cell the
# query looks for one key of 2,048, so four of the five pieces contain nothing that matters. But the mean gives each the
# same share. Cure: the share of a piece is the softmax of its $z$.

# %%
needle = k.clone()
needle[:, 1234] = 16 * q[:, 0] / q[:, 0].norm(dim=-1, keepdim=True)
pieces = [
    attend(q[:, :1], *pair)
    for pair in zip(needle.tensor_split(5, 1), v.tensor_split(5, 1), strict=True)
]
outs = torch.stack([out for out, _ in pieces])
z = torch.stack([z for _, z in pieces])
right, _ = attend(q[:, :1], needle, v)
shares = {"mean": outs.mean(0), "cure: softmax of z": (z.softmax(0) * outs).sum(0)}
wrong = {
    says: ((out - right).norm() / right.norm()).item() for says, out in shares.items()
}
print(", ".join(f"{says}: off by {error:.1%}" for says, error in wrong.items()))
assert wrong["mean"] > 0.5 > 1e-5 > wrong["cure: softmax of z"]

# %% [markdown] tags=["deep"]
# ### Deeper: two failures that give zero or `nan`
# **An output of exactly zero, or `nan`.** Somebody left out the maximum in fp16, whose largest number is 65,504. 4,096
# keys with a score of 3 sum to 82,270, so to infinity, and a finite number over infinity is 0. One score of 12 makes it
# infinity over infinity. Cure: subtract the maximum, and sum in fp32, as kernels do. In fp16, 70,000 equal scores
# overflow even then.

# %% tags=["deep"]
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

# %% [markdown] tags=["deep"]
# **`nan` for some rows of a batch.** The first piece of a padded row is nothing but padding: every score is $-\infty$,
# and so is the maximum. $-\infty-(-\infty)$ is `nan`, and the merge spreads it. Cure: keep the maximum finite and the
# sum above zero. FlashAttention's own merge has such a line, too.


# %% tags=["deep"]
def attend_masked(q, k, v, mask, careful):
    scores = q @ k.mT / D**0.5 + mask
    m = scores.amax(-1, keepdim=True)
    if careful:
        m = m.clamp(min=torch.finfo(scores.dtype).min)
    p = (scores - m).exp()
    total = p.sum(-1, keepdim=True)
    if careful:
        total = total.clamp(min=torch.finfo(p.dtype).tiny)
    return p @ v / total, m + total.log()


mask = torch.zeros(S)
mask[:600] = -torch.inf  # padding
for careful in (False, True):
    halves = [
        attend_masked(q, k[:, part], v[:, part], mask[part], careful)
        for part in (slice(0, 512), slice(512, S))
    ]
    out, _ = merge(*halves)
    name = "with the cure" if careful else "without the cure"
    print(f"{name}: {out.isnan().float().mean():.0%} nan")
    assert out.isnan().all() == (not careful)
assert torch.allclose(out, attend(q, k[:, 600:], v[:, 600:])[0], atol=1e-6)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** After how many tokens does the KV cache take as many bytes as the 1,235.8 million weights of the base,
#    if both are in 16 bits?
# 2. **Build.** Into how many pieces should the past be cut? $w$ heads in $n$ pieces each give $w\,n$ pieces of work,
#    which take $r=w\,n/M$ rounds on $M$ SMs. The last round may be nearly empty, so the share of the card in use is
#    $r/\lceil r\rceil$. FlashAttention uses $n=1$ if $w\ge0.8\,M$. Otherwise it takes the smallest $n\le M$ whose share
#    is at least 85 % of the best share. Fill in `splits_for(work, sms)`, where `work` is $w$ and `sms` is $M$. It
#    returns the whole number $n$.
# 3. **Reach.** $B$ questions share a system prompt. Its keys and values, $(K, P, D)$ each, are stored once, and should
#    be read once: in one multiplication for all questions. Fill in `with_prompt`, using `attend` and `merge`. The
#    queries are $(B, K, G, D)$, and the own past of each question is $(B, K, S, D)$. It returns the outputs, in the
#    shape of the queries.

# %% tags=["exercise"]
past_as_large_as_the_weights = None


def splits_for(work, sms):
    """FILL ME IN: return a whole number of pieces."""


def with_prompt(q, prompt_k, prompt_v, own_k, own_v):
    """FILL ME IN: return a tensor in the shape of q."""


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
        "let the questions share one multiplication"
    )
    often = max(reads.times.values())
    assert often == 1, (
        f"right, but the prompt was read {often} times: "
        "let the questions share one multiplication"
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
#     together = q.transpose(0, 1).flatten(1, 2)  # (K, B G, D): all over one prompt
#     shared = [
#         x.unflatten(1, (len(q), -1)).transpose(0, 1)
#         for x in attend(together, prompt_k, prompt_v)
#     ]
#     return merge(shared, attend(q, own_k, own_v))[0]
# ```
#
# </details>
#
# ## In one breath
# - **Saves** time for each token of an answer: the cache moves once and not 3, 11 or 31 times. On newer cards, pieces
#   of a long past also keep all SMs busy. It saves no byte of a training step.
# - **Costs** room for the whole answer from the start. Pieces cost $n\,H\,(D+1)$ numbers for a moment, and no matrix
#   multiplication.
# - **Exact within rounding**: merging adds sums, so any cuts and any order will do.
# - **When**: long pasts, few conversations, many SMs. From compute capability 8.0 on, kernels split by themselves; on a
#   T4 nothing splits.
# - **When not**: in training, or after a short past, where a token mostly reads weights. First count how often your
#   library moves the cache. To serve many people take vLLM, and on your own computer llama.cpp ([Take it
#   home](../docs/guide/take_it_home.md)).
#
# ## Sources
# - Dao, Haziza, Massa, Sizov 2023, *Flash-Decoding for long-context inference*, pytorch.org/blog/flash-decoding.
# - Milakov, Gimelshein 2018, *Online normalizer calculation for softmax*, arXiv 1805.02867, section 3 (maxima and sums
#   merge). Ye et al. 2025, *FlashInfer*, arXiv 2501.01005, section 2.2 (outputs merge).
# - Shazeer 2019, *Fast Transformer Decoding*, arXiv 1911.02150 (memory limits decoding); Ainslie et al. 2023, *GQA*,
#   arXiv 2305.13245. Juravsky et al. 2024, *Hydragen*, arXiv 2402.05099 (exercise 3).
# - torch: `aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp`. transformers 5.23: `cache_utils.py`
#   (`DynamicLayer.update`), `integrations/sdpa_attention.py` (`pack_gqa`), `generation/utils.py`
#   (`_valid_auto_compile_criteria`). Its issue 48633 and pull request 45776 have the math kernel on a T4.
# - vLLM: `csrc/attention/paged_attention_v2.cu`. FlashInfer's documentation, `flashinfer.cascade`, and its README
#   (Turing). NVIDIA: T4 data sheet (2,560 cores, 320 GB/s), Turing whitepaper (64 cores a multiprocessor).
# - Ours: `cria_tricks/techniques/flash_decoding.py` and `kv_cache.py`, their tests in `tests/techniques/`,
#   `benchmarks/bench_inference.py`.
