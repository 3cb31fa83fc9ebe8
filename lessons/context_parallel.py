# ---
# jupyter:
#   question: If one training example is too long for a card, how can several cards share its tokens and still compute
#     exact attention?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Context parallelism: when a row does not fit one card
# > **Promise.** You want to fine-tune on whole books or code repositories, and one training example needs more memory
# > than a card has, even with every switch on. A second card that takes other examples does not help. You will divide
# > the tokens of one example among four processes with *ring attention*, prove that all gradients are right, and
# > estimate how long your rows may become.
# >
# > **Card.** saves activations and logits, of which each process has 1/N / costs keys and values, which are sent in
# > every block / exact within rounding / about 25 minutes / after [long rows](long_rows.py) and
# > [data parallelism](data_parallel.py)
#
# [The lesson on long rows](long_rows.py) made rows several times as long on one card: it cut the MLP into tiles and
# sent block inputs to the host. But attention still grows with the row. [Data parallelism](data_parallel.py),
# [sharding](sharding.py) and [pipelines](pipeline_parallel.py) give each process whole [rows](../docs/glossary.md#row),
# and [tensor parallelism](tensor_parallel.py) keeps the hidden states of whole rows. So we cut the row itself.
#
# ## 1. The bill
# The job is that of [the lesson on long rows](long_rows.py): QLoRA of Llama-3.1-8B with checkpointing, the chunked loss
# and tiled MLPs, one row a step. Here block inputs stay on the card.
#
# With *context parallelism*, every process holds all weights, but of each tensor with a dimension of tokens it holds
# only its own tokens. A row *fits* if 5 % of a card stays free, even with what PyTorch's allocator may [reserve and not
# use](a_full_card.py). How many times as long is the longest row on four T4s, compared with one T4?

# %% Your guess: times as long on four T4s tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import json
import logging
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets
# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

from cria_tricks import BadInput, Recipe, course, train
from cria_tricks.course import (
    CARDS,
    LINKS,
    T4,
    Aside,
    CountCollectives,
    Theme,
    compute_seconds,
    find_shape,
    per_process,
    quiet_libraries,
    resolve,
    step_seconds,
    with_settings,
)
from cria_tricks.course import context_parallel as context

quiet_libraries()
GIB, MIB = 2**30, 2**20

alone = with_settings(
    course.CAPSTONE,
    ["model=llama-3.1-8b", "tricks.gradient_accumulation=1", "tricks.tiled_mlp=true"],
)
# the ring repeats key heads itself, after they have travelled
job = with_settings(alone, ["tricks.expand_kv=false"])
shape = find_shape(job.model)


def longest(N):
    """Return the longest row that fits N cards, to 256 tokens, by bisection. The
    verdict is "tight", not "fits", if less than 5 % of a card may stay free."""
    fits, too_long = 1, 4096
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if bill(N, 256 * middle).verdict == "fits":
            fits = middle
        else:
            too_long = middle
    return 256 * fits


# %%
def bill(N, tokens):
    """Estimate the peak of one of N processes, for a row of so many tokens."""
    if N == 1:
        return per_process(alone, shape, T4, "none", 1, tokens=tokens)
    return per_process(job, shape, T4, "context", N, tokens=tokens)


rows = {N: longest(N) for N in (1, 2, 4, 8)}
course.reveal(guess, rows[4] / rows[1], "times")
for N, tokens in rows.items():
    print(f"{N} T4: rows of up to {tokens:9,} tokens, {tokens / rows[1]:.1f} times")

# %% Draw figure 1, and hold the numbers of the text tags=["hide-input"]
assert 4 < rows[4] / rows[1] < 4.3
assert (rows[1], rows[4]) == (15_616, 64_768)
assert all(abs(rows[N] / N - 16_150) < 50 for N in (2, 4, 8))  # own tokens
_longest = bill(4, rows[4])
_weights = sum(line.bytes for line in _longest.lines if line.name.startswith("weights"))
assert round(_weights / GIB, 1) == 5.5
_rest = (_longest.peak_bytes - _weights) / (rows[4] / 4)
assert round(_rest / MIB, 1) == 0.4  # for each own token
_reserved = _longest.needed_bytes - _longest.peak_bytes
assert round(_reserved / GIB, 1) == 2.2
# the peak comes in the MLP
assert all(
    any("second norm" in line.why for line in bill(N, rows[N]).lines) for N in rows
)


def by_length(theme: Theme):
    """The peak of a process against the length of the row, for one to eight
    processes."""
    drawn, axes = course.figure(height=2.9)
    lengths = [2048 * 2**power for power in range(9)]
    for N, color in zip((1, 2, 4, 8), (theme.quiet, *theme.series), strict=False):
        peaks = [bill(N, tokens).peak_bytes / GIB for tokens in lengths]
        axes.plot(
            lengths, peaks, color=color, marker="o", markersize=3, label=f"N = {N}"
        )
    axes.axhline(
        T4.memory_bytes / GIB, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3))
    )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens of a row",
        ylabel="peak of a process, GiB",
    )
    axes.grid()
    axes.legend()
    return drawn


course.show(
    by_length,
    "Figure 1. The estimated peak of a process for Llama-3.1-8B; the dashed line is a "
    "T4. For short rows nearly all of it is weights, so more processes save little. "
    "For long rows, twice the processes can train on rows twice as long.",
)

# %% [markdown]
# A little more than four times (predicted). In the longest rows of two or more cards, each card has about 16,150 own
# tokens. The weights take 5.5 GiB of every card, each own token about 0.4 MiB, and CUDA and the allocator up to 2.2
# GiB.
#
# ## 2. From scratch, in four steps
# The norms, the MLP and the loss compute each token by itself, so there a process simply has fewer tokens, and only
# attention needs those of other processes.
#
# **Step 1: attention over some of the keys.** The softmax divides by a sum over *all* keys: the sum of the exponentials
# of their scores. Suppose that one part of the keys has the sum $s_1$ and the output $o_1$, and the other part $s_2$
# and $o_2$. Then the whole output is $(s_1 o_1 + s_2 o_2) / (s_1 + s_2)$. We store the logarithm of each sum, the
# [log-sum-exp](../docs/glossary.md#log-sum-exp), because the sum itself can overflow.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cria_tricks.course import Ranks


def scores(q, k, causal):
    """Scaled scores; with `causal`, a query sees no key that comes after it."""
    found = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        later = torch.ones(found.shape[-2:]).triu(1).bool()
        found = found.masked_fill(later, -torch.inf)
    return found


def attend(q, k, v, causal):
    """Attention over these keys only, and the log-sum-exp of each query's scores."""
    found = scores(q, k, causal)
    lse = found.logsumexp(-1, keepdim=True)
    return (found - lse).exp() @ v, lse


def merge(out, lse, more, more_lse):
    """Merge attention over some keys with attention over other keys."""
    both = torch.logaddexp(lse, more_lse)  # the log-sum-exp over all of them
    return out * (lse - both).exp() + more * (more_lse - both).exp(), both


torch.manual_seed(0)
T, D = 32, 8
q, k, v = torch.randn(3, 1, 2, T, D, dtype=torch.float64)  # one row, two heads
half = T // 2
queries = q[:, :, half:]  # those of the second half, which see all keys
first = attend(queries, k[:, :, :half], v[:, :, :half], causal=False)
second = attend(queries, k[:, :, half:], v[:, :, half:], causal=True)
merged, _ = merge(*first, *second)
whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
torch.testing.assert_close(merged, whole[:, :, half:])

# %% [markdown]
# **Step 2: divide the tokens fairly.** We cut the row (padded, if necessary) into $2N$ pieces of equal length, the
# *chunks* (unrelated to the chunked loss), and give two of them to each of $N$ processes. The simplest way is in order:
# process 0 gets chunks 0 and 1, and process 3 gets chunks 6 and 7. However, a query does not see the keys after it, so
# the last tokens have most work.
#
# We count pairs of one chunk of queries and one of keys. A chunk with itself counts as half, because half of its scores
# are masked. With four processes, how many times the work of the first process does the last one have?

# %% Your guess: times as much work in the last process tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def in_order(rank, N):
    return 2 * rank, 2 * rank + 1


def zigzag(rank, N):
    """Give each process one early chunk and one late chunk."""
    return rank, 2 * N - 1 - rank


def work(layout, N=4):
    """Count the pairs of chunks of each process: chunk c sees c others, and itself."""
    return [sum(chunk + 0.5 for chunk in layout(rank, N)) for rank in range(N)]


# %% Print the work, and draw figure 2 tags=["hide-input"]
print("in order:", work(in_order), "zigzag:", work(zigzag))
assert work(zigzag) == [8, 8, 8, 8]
course.reveal(guess, work(in_order)[-1] / work(in_order)[0], "times")


def owners(theme: Theme):
    """Which process has which of eight chunks, in order and in zigzag."""
    sketch = course.Sketch(theme, 42, 8.4)
    for top, name, layout in ((0.6, "in order", in_order), (4.8, "zigzag", zigzag)):
        sketch.text(0, top + 1.5, name, align="left")
        for rank in range(4):
            for chunk in layout(rank, 4):
                sketch.tensor(9 + 4.1 * chunk, top, 3.7, 3, f"{rank}", color=rank)
    return sketch.figure


course.show(
    owners,
    "Figure 2. Eight chunks of a row and the process that has each: in order the work "
    "is 2, 6, 10 and 14 pairs, and in zigzag it is 8 pairs in every process.",
)

# %% [markdown]
# In order, the last process has seven times the work of the first, and all others wait for it. If process $r$ gets
# chunk $r$ and chunk $2N - 1 - r$ instead (*zigzag*), all have the same work, two pairs in each turn of the ring below.
#
# **Step 3: the ring.** Each process keeps its queries, sends its keys and values to its right neighbor, and receives
# those of its left neighbor. After $N - 1$ such turns, every query has met every key.


# %%
def pass_on(x):
    """Send x to the right neighbor, and return what comes from the left."""
    rank, N = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(x)
    # Both at once: if all processes sent first, all could wait forever.
    under_way = [dist.isend(x, (rank + 1) % N), dist.irecv(received, (rank - 1) % N)]
    for transfer in under_way:
        transfer.wait()
    return received


def part(x, number):
    """Return a view of the first or the second chunk that a process has."""
    return x.chunk(2, dim=2)[number]


def visible_pairs(owner):
    """Yield which of our chunks (0 or 1) sees which of the owner's chunks."""
    rank, N = dist.get_rank(), dist.get_world_size()
    for mine, query in enumerate(zigzag(rank, N)):
        for its, key in enumerate(zigzag(owner, N)):
            if key <= query:
                # earlier chunks are seen whole; a chunk sees itself with a mask
                yield mine, its, key == query


def forward(q, k, v):
    rank, N = dist.get_rank(), dist.get_world_size()
    out = torch.zeros_like(q)
    lse = torch.full_like(q[..., :1], -torch.inf)
    kv = torch.stack([k, v])
    for turn in range(N):
        owner = (rank - turn) % N  # whose keys and values are here now
        for mine, its, causal in visible_pairs(owner):
            more = attend(part(q, mine), part(kv[0], its), part(kv[1], its), causal)
            merged, both = merge(part(out, mine), part(lse, mine), *more)
            part(out, mine).copy_(merged)
            part(lse, mine).copy_(both)
        if turn < N - 1:
            kv = pass_on(kv)
    return out, lse


# %% [markdown]
# **Step 4: the backward pass.** Let $S$ be the scores of one pair of chunks. With the merged log-sum-exp, the softmax
# of this pair is $P=\exp(S-\text{lse})$. So we compute it again, and store nothing of size $T \times T$. The rest is
# the backward pass of [FlashAttention](flash_attention.py). With the output $O$ and its gradient $dO$:
#
# $$dS = P \odot (dO\,V^T - \text{sum}(dO \odot O)),\quad dV = P^T dO,$$
#
# $$dQ = dS\,K / \sqrt{D},\quad dK = dS^T Q / \sqrt{D}$$
#
# Here $\odot$ multiplies element by element, and the sum is over the width: one number for each query.
#
# A key's gradient is a sum over queries in all processes. Therefore this gradient travels together with its key, and
# each process adds its part. It moves in each of $N$ turns, so at the end it is back at its owner.


# %%
def backward(q, k, v, out, lse, dout):
    rank, N = dist.get_rank(), dist.get_world_size()
    dq = torch.zeros_like(q)
    kv = torch.stack([k, v])
    dkv = torch.zeros_like(kv)
    inner = (dout * out).sum(-1, keepdim=True)  # the same for all keys
    for turn in range(N):
        owner = (rank - turn) % N
        for mine, its, causal in visible_pairs(owner):
            query, key, value = part(q, mine), part(kv[0], its), part(kv[1], its)
            grad = part(dout, mine)
            weights = (scores(query, key, causal) - part(lse, mine)).exp()
            dscores = weights * (grad @ value.mT - part(inner, mine)) / D**0.5
            part(dq, mine).add_(dscores @ key)
            part(dkv[0], its).add_(dscores.mT @ query)
            part(dkv[1], its).add_(weights.mT @ grad)
        dkv = pass_on(dkv)  # in every turn, so the last one brings it home
        if turn < N - 1:
            kv = pass_on(kv)
    return dq, *dkv


def own(x):
    """Return the two chunks of a whole row that this process has."""
    rank, N = dist.get_rank(), dist.get_world_size()
    early, late = zigzag(rank, N)
    chunks = x.chunk(2 * N, dim=2)
    return torch.cat([chunks[early], chunks[late]], dim=2)


def error_forward():
    out, _ = forward(own(q), own(k), own(v))
    return (out - own(whole)).abs().max().item()


ranks = Ranks(4)  # four processes on this computer, joined by gloo
print("largest differences:", ", ".join(f"{e:.0e}" for e in ranks.run(error_forward)))

# %% [markdown]
# ## 3. Prove it
# Every process also computes attention over the whole row with PyTorch. Its own two chunks of the result and of the
# three gradients must be those of the ring, within rounding.
#
# In the forward pass a process sends $N - 1 = 3$ times its own keys and values. How many times in the backward pass, if
# their gradients have the same size?

# %% Your guess: times the bytes of its keys and values, backward tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def trial():
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    right = F.scaled_dot_product_attention(*leaves, is_causal=True)
    dout = torch.cos(right.detach())  # any gradient, the same in all processes
    expected = [right, *torch.autograd.grad(right, leaves, dout)]
    mine = [own(x) for x in (q, k, v)]
    with CountCollectives() as there:
        out, lse = forward(*mine)
    with CountCollectives() as back:
        found = [out, *backward(*mine, out, lse, own(dout))]
    errors = [(a - own(b)).abs().max() for a, b in zip(found, expected, strict=True)]
    size = 2 * mine[1].nbytes  # of its keys and values
    return max(errors).item(), there.bytes["send"] / size, back.bytes["send"] / size


for rank, (error, there, back) in enumerate(ranks.run(trial)):
    print(f"rank {rank}: largest difference {error:.0e};", end=" ")
    print(f"sent {there:.0f} times its keys and values forward, {back:.0f} backward")
    assert error < 1e-13
    assert (there, back) == (3, 7)
course.reveal(guess, back, "times")

# %% [markdown]
# The backward pass sends keys and values $N - 1$ times and their gradients $N$ times, which is 7 together.
#
# ## 4. What it costs
# In every block, keys and values are sent forward, again when checkpointing repeats the block, and backward. Their
# gradients have twice the bytes (fp32). So a process sends $3 (N - 1) + 2 N$ times its own keys and values. If the row
# becomes 64 times as long, 4,096 to 262,144 tokens, 64 times as many bytes are sent. (The adapter's gradients, 0.23 GiB
# in every line below, stay as they are.) How many times as long does the computing take, on four A100s?

# %% Your guess: times as long for a row 64 times as long tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
computing, shares = [], []
for tokens in (4096, 32_768, 262_144):
    recipe = with_settings(job, [f"data.max_length={tokens}", "tricks.precision=bf16"])
    calls = context.traffic(recipe, shape, 4)
    seconds = compute_seconds(recipe, shape, CARDS["a100"], "context", 4)
    nvlink, pcie = (
        step_seconds(seconds, calls, LINKS[name]).communication / seconds
        for name in ("nvlink_a100", "pcie4")
    )
    computing.append(seconds)
    shares.append((nvlink, pcie))
    sent = sum(call.sent for call in calls) / GIB
    print(f"{tokens:8,} tokens: {sent:6.1f} GiB sent, computing {seconds:7.3f} s;")
    print(f"{'':17} sending takes {nvlink:.1%} of that on NVLink, {pcie:.1%} on PCIe")
course.reveal(guess, computing[-1] / computing[0], "times")

# %% Check the numbers of the text tags=["hide-input"]
for of_a_link in zip(*shares, strict=True):
    assert sorted(of_a_link, reverse=True) == list(of_a_link)  # the share falls
assert all(nvlink < pcie for nvlink, pcie in shares)
assert (round(shares[0][1], 2), round(shares[-1][1], 2)) == (0.20, 0.04)
assert 200 < computing[-1] / computing[0] < 300

# %% [markdown]
# Computing grows faster than sending, because attention grows with $T^2$, but keys and values with $T$. So for longer
# rows the share of time for sending falls, on PCIe from 20 % to 4 %.
#
# All these seconds are predicted for a card that either computes or sends.

# %% [markdown] tags=["deep"]
# ### Deeper: the ring in the package, and why gradients travel in fp32
# The package makes the same sends as we do (`parallel/ring_attention.py`), and begins to send before it computes, which
# hides a part. It computes each pair with PyTorch's fused kernel, so not even the scores of one pair exist in memory. A
# test checks its gradients with `torch.autograd.gradcheck`. In addition, the gradients of the adapter are all-reduced
# once a step, as in [data parallelism](data_parallel.py). The ring needs buffers for the keys and values that arrive,
# and for their gradients. They do not raise the peak of our job, because it comes later in the backward pass of a
# block, in the MLP.
#
# If 32 key heads travelled, as many as query heads, instead of 8, four times as much would be sent. A single card saves
# keys and values [repeated](../docs/glossary.md#expand-kv) for 32 heads, so there a token needs slightly more.
#
# The formula of the peak was checked on a CPU. In 48 committed cases with two and four processes, the counted peak of a
# process is within 0.5 % of it.
#
# Each process adds its part to the gradients that pass by. In 16 bits, every addition would round the sum. Therefore
# the package adds up in fp32, and the gradients that travel have twice the bytes of keys and values in 16 bits. In the
# backward pass a process then sends $N - 1$ times its keys and values, and $N$ times twice as many bytes.
#
# Llama 3 was trained with a different method: it gathers all keys and values of a row in every process at once. That
# needs more memory than a ring, but fewer calls, and with 8 key heads the keys are small. Its paper describes the
# layout of $2N$ chunks, too. The library ring-flash-attention had it earlier, and *Striped Attention* shares causal
# work evenly by another layout. *DeepSpeed Ulysses* is a third method: before attention, an all-to-all exchanges tokens
# for heads, so each process computes whole rows of some heads.

# %% [markdown]
# ## 5. The production switch
# PyTorch has a switch of its own, which is experimental in torch 2.13. It runs on CUDA cards only and, with sdpa, takes
# no mask, so no padded or [packed](packing.py) rows. (`labels` asks for a loss; `shift_labels` are used as they are.)

# %%
print(context.PLAIN)

# %% [markdown]
# We have not run it, and it lacks two things (see below): the sum of the gradients, and with checkpointing a cure for a
# mask.
#
# With this package, the switch is `parallel.strategy=context`. It also runs on a CPU and takes packed sequences. It
# needs `expand_kv=false`, so that 8 heads travel and not 32. Ask for the bill, then train:
#
# ```bash
# cria plan kwanzaa --model llama-3.1-8b --gpu t4 --nproc 4 \
#   --set parallel.strategy=context --set tricks.expand_kv=false \
#   --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true \
#   --set tricks.tiled_mlp=true --set data.max_length=65536
# cria launch kwanzaa --on torchrun --nproc 4 --set model=llama-3.1-8b \
#   --set data.train=long.jsonl \
#   --set parallel.strategy=context --set tricks.expand_kv=false \
#   --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true \
#   --set tricks.tiled_mlp=true --set data.max_length=65536
# ```
#
# The plan calls 65,536 tokens *tight*: up to 14.3 GiB of 14.7, with what the allocator may reserve.
#
# The next cell shows what the switch is worth, and trains a tiny model in one process and in four:

# %% Helper: train a tiny model tags=["hide-input"]
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
ranks.run(quiet_libraries)
place = tempfile.mkdtemp()
texts = ["one two three " * many for many in (3, 5, 8, 4)]
Path(place, "few.jsonl").write_text(
    "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
)


def tiny(name, *settings):
    """Each step's loss and gradient norm, and the evaluation loss after them."""
    few = [
        "train.max_steps=2",
        "train.learning_rate=0.01",
        "data.max_length=61",
        "train.batch_size=2",
    ]
    few += [
        "model=random:tiny",
        "tricks.peft=lora",
        "lora.r=2",
        "tricks.chunked_loss=true",
        "tricks.attention=sdpa",
    ]
    few += [f"data.{use}={place}/few.jsonl" for use in ("train", "eval")]
    recipe = with_settings(Recipe(name="short"), [*few, *settings])
    aside = Aside()
    aside.quiet = True
    report = train(recipe, f"{place}/{name}", console=aside)
    found = [
        entry[key]
        for entry in report["history"]
        for key in ("loss", "grad_norm")
        if key in entry
    ]
    return [*found, report["eval_loss_after"]]


# %% What four processes are worth for a long row and for a short one
peaks = {}
for tokens in (rows[1], 2048):
    peaks[tokens] = [bill(N, tokens).peak_bytes / MIB for N in (1, 4)]
    before, after = peaks[tokens]
    print(f"{tokens:6,} tokens: {before:6,.0f} MiB; each of four {after:6,.0f} MiB")

one = tiny("one")
four = ranks.run(tiny, "four", "parallel.strategy=context")[0]
print("losses and gradient norms in one process:", *(f"{x:.5f}" for x in one))
print("losses and gradient norms in four:       ", *(f"{x:.5f}" for x in four))

# %% Check the numbers of the section tags=["hide-input"]
assert max(abs(a / b - 1) for a, b in zip(four, one, strict=True)) < 1e-4
assert [[round(peak) for peak in both] for both in peaks.values()] == [
    [11_997, 7_586],
    [6_738, 6_116],
]

# %% [markdown]
# For the long row, each process needs 4,411 MiB less, 37 % of the peak. For the short row it is about 620 MiB, 9 %,
# because nearly all of that peak is weights.

# %% [markdown] tags=["deep"]
# ### Deeper: what PyTorch's switch still needs
# By default each process gathers all keys and values, as in Llama 3. `set_rotate_method("alltoall")` makes it a ring.
# For FlexAttention, torch 2.13 has private parts that take masks of documents (`_create_cp_block_mask`,
# `_PerDocumentHeadTailLoadBalancer`).
#
# **Gradients and the mean.** Each process has the mean loss and the gradients of its own tokens. Pass
# `num_items_in_batch`, the number of labels of the whole row, so that its loss is its part of the mean, and then
# all-reduce the gradients as a sum.
#
# **The mask.** With checkpointing, transformers has no KV cache, so it looks at the positions, and takes the jump
# between the two chunks of process 0 for the beginning of another packed row. It builds a mask, which the switch
# refuses. accelerate removes this mask. So it is easier to start from the Trainer, with `ParallelismConfig(cp_size=2)`
# and FSDP2.

# %% [markdown]
# ## 6. Where it breaks
# **The loss is slightly wrong, without any error.** The label of a token is the next token, so labels are shifted by
# one place. If each process shifts the labels of its own two chunks, the label of the first chunk's last token is the
# first token of the second chunk, which is far away. The second chunk's last token has no label. The cure is to shift
# the labels of the whole row, and then cut, as `context.cut` does.

# %%
ids = torch.arange(100, 164)[None]  # 64 tokens, in chunks of 8
batch = {"input_ids": ids, "labels": ids}
pieces = [context.cut(batch, rank, 4) for rank in range(4)]
right = sum(int((piece["labels"] != -100).sum()) for piece in pieces)
print(f"shifted, then cut: {right} labels")
steps = torch.cat([piece["input_ids"].diff() for piece in pieces])  # 1: the next token
found, wrong = steps.numel(), int((steps != 1).sum())
print(f"cut, then shifted: {found} labels, {wrong} of them wrong")

# %% [markdown] tags=["deep"]
# ### Deeper: wrong positions, NaN in packed sequences, and the refused switches
# **The model no longer knows the order of its words.** If positions are counted inside each process, chunk 7 of process
# 0 seems to follow chunk 0 directly: with chunks of 8 tokens, it begins at position 8 and not at 56. The cure is to
# make positions for the whole row and cut them together with the tokens:

# %% tags=["deep"]
print("positions in process 0:", pieces[0]["position_ids"][0].tolist())
assert pieces[0]["position_ids"][0, 8] == 56
assert (found, wrong, right) == (60, 3, 63)

# %% [markdown] tags=["deep"]
# **NaN in packed sequences.** In a packed sequence a query sees keys of its own document only. If this document begins
# after a chunk, the query sees no key of that chunk. Its log-sum-exp is then minus infinity, and merging two
# of these gives NaN. The cure is to mask keys by a large negative number instead of minus infinity.
# A pair of chunks without a common document is not computed at all.

# %% tags=["deep"]
nothing = torch.full((1, 1), -torch.inf)
hidden = torch.full((1, 1), torch.finfo(torch.float32).min / 2)
for lse in (nothing, hidden):
    out, _ = merge(torch.zeros(1, 1), lse, torch.zeros(1, 1), lse)
    print(f"merged at {lse.item():.1e}:", out.item())
assert merge(torch.zeros(1, 1), nothing, torch.zeros(1, 1), nothing)[0].isnan()

# %% [markdown] tags=["deep"]
# Three kinds of switches cannot be combined with the ring: another attention kernel, a switch that adds tokens or
# changes attention, and `keep_attention`, which stores attention results so that checkpointing need not compute them
# again. Each of them is refused with one line that names the cure:

# %% tags=["deep"]
usual = ["tricks.attention=sdpa", "tricks.peft=lora", "parallel.strategy=context"]
for refused in (
    ["tricks.attention=eager"],
    ["tricks.peft=prompt_tuning"],
    ["tricks.gradient_checkpointing=true", "tricks.keep_attention=true"],
):
    try:
        resolve(with_settings(Recipe(), [*usual, *refused]), processes=2)
        raise AssertionError("it must be refused")
    except BadInput as refusal:
        print(refusal)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Llama-3.1-8B has 8 key heads of width 128 in each of 32 blocks. Eight processes share one row of
#    65,536 tokens in bf16. How many MiB of keys and values does a process send in *one* forward pass?
# 2. **Build.** The keys and values of a long prompt are cut into one or more parts. Fill in `over_parts(q, parts)`. `q`
#    has the shape (heads, 1, D). `parts` is a list of pairs (keys, values), each (heads, tokens, D), and the query sees
#    all of them. Return the attention, (heads, 1, D). Use `attend` and `merge`; about five lines.
# 3. **Reach.** For the attention of one block, forward, a process computes two products for half of all pairs, $2 \cdot
#    2 \cdot T^2 / 2 / N \cdot H D$ operations. It sends $(N - 1) / N \cdot 2 \cdot T \cdot K D \cdot 2$ bytes. There
#    are $H = 32$ query heads and $K = 8$ key heads of width $D$, which cancels. A card computes 100e12 operations a
#    second, and a link sends 10e9 bytes a second. From which $T$ on does attention take longer than sending, on $N = 4$
#    cards?

# %% tags=["exercise"]
mib_sent = None


def over_parts(q, parts):
    """Return attention over all keys, shape (heads, 1, D). FILL ME IN."""


tokens_to_hide = None


# %% Check the exercises tags=["hide-input"]
def of_over_parts(answer):
    torch.manual_seed(1)
    q = 8 * torch.randn(4, 1, 16)
    k, v = 8 * torch.randn(4, 50, 16), torch.randn(4, 50, 16)
    for sizes in ([50], [20, 30], [7, 1, 42]):
        found = answer(
            q.clone(), list(zip(k.split(sizes, 1), v.split(sizes, 1), strict=True))
        )
        if found is None:
            raise NotImplementedError
        right = torch.softmax(q @ k.mT / 4, -1) @ v
        assert found.shape == right.shape, (
            f"shape {tuple(found.shape)}, not {tuple(right.shape)}"
        )
        assert found.isfinite().all(), (
            "not finite: exp of large scores overflows, so keep to the log-sum-exp"
        )
        hint = (
            "weight each part by its share of the whole sum, "
            "which its log-sum-exp tells"
        )
        assert torch.allclose(found, right, atol=1e-3), (
            f"wrong with {len(sizes)} parts: {hint}"
        )


course.check(
    1,
    mib_sent,
    course.about(
        7 * 32 * 2 * 8192 * 8 * 128 * 2 / MIB,
        "its own tokens, keys and values, 2 bytes, 7 turns, 32 blocks",
    ),
    "a number of MiB",
)
course.check(
    2,
    over_parts,
    of_over_parts,
    "a function (q, parts) -> attention over all keys, (heads, 1, D)",
)
course.check(
    3,
    tokens_to_hide,
    course.about(
        3 * 2 * 8 * 2 / 10e9 * 100e12 / (2 * 32),
        "set both times equal: D and 1 / N cancel, and one T",
    ),
    "a number of tokens",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# mib_sent = 7 * 32 * 2 * (65_536 // 8) * 8 * 128 * 2 / 2**20
#
#
# def over_parts(q, parts):
#     out, lse = attend(q, *parts[0], False)
#     for k, v in parts[1:]:
#         out, lse = merge(out, lse, *attend(q, k, v, False))
#     return out
#
#
# # 2 T^2 H D / N / 100e12 = (N - 1) / N 4 T K D / 10e9
# tokens_to_hide = 3 * 4 * 8 / 10e9 * 100e12 / (2 * 32)
# ```
#
# </details>
#
# ## In one breath
# - **Saves** memory for tokens: each process has 1/N of every tensor with a dimension of tokens, such as activations,
#   block inputs and logits. Weights stay whole.
# - **Costs** keys and values, sent in every block: $3 (N - 1) + 2 N$ times those of its own tokens, with checkpointing.
# - **Exact within rounding**, because partial results are merged by their log-sum-exp.
# - **When**: one row does not fit a card, although checkpointing, the chunked loss and tiled MLPs are on.
# - **When not**: your rows fit. Then give each card other rows ([data parallelism](data_parallel.py)), which needs
#   communication only once a step.
#
# ## Sources
# - Liu, Zaharia and Abbeel 2023, *Ring Attention with Blockwise Transformers for Near-Infinite Context*, arXiv
#   2310.01889, section 3. Grattafiori et al. 2024, *The Llama 3 Herd of Models*, arXiv 2407.21783, section 3.3.2 (2N
#   chunks; Llama 3 gathers all keys and values at once instead of a ring). The zigzag layout before it:
#   zhuzilin/ring-flash-attention (2024-02). Brandon et al. 2023, *Striped Attention*, arXiv 2311.09431.
# - Dao 2023, *FlashAttention-2*, arXiv 2307.08691, algorithm 2 (the backward pass from the log-sum-exp).
# - Jacobs et al. 2023, *DeepSpeed Ulysses*, arXiv 2309.14509.
# - torch 2.13: `torch/distributed/tensor/experimental/_context_parallel/_attention.py`. transformers 5.23:
#   `loss/loss_utils.py` (`shift_labels`), `masking_utils.py` (`find_packed_sequence_indices`). accelerate:
#   `big_modeling.py` (`_attach_context_parallel_hooks`).
# - Ours: `cria_tricks/parallel/context.py`, `ring_attention.py`; `tests/parallel/test_context.py`.
