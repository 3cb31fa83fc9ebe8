# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Context parallelism: when a row does not fit one card
# > **Promise.** You divide the tokens of one row among four processes, and attention still sees the whole row. You
# > build *ring attention* forward and backward, count what it sends, and find out how long a row N cards can train on.
#
# > **Card.** saves activations and logits, of which a process has 1/N / costs keys and values that travel in every
# > block / exact within rounding / 35 minutes / after [the interconnect](interconnect.py) and [long rows](long_rows.py)
#
# [The lesson on long rows](long_rows.py) cut the MLP into tiles and sent block inputs to the host, and rows became
# several times as long. But one block's attention still grows with the row, and so does what the host must hold.
# The other ways to share a step hardly help: each gives a process whole rows, and here *one row* is too long. (Tensor
# parallelism divides what is wide inside a block, but not what lies between blocks.) So cut the row itself.

# %% Imports and settings tags=["hide-input"]
import json
import logging
import tempfile
import warnings
from pathlib import Path

warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets
# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cria_tricks import course
from cria_tricks.bench.style import Theme
from cria_tricks.bill.calls import CountCollectives
from cria_tricks.common.console import Aside
from cria_tricks.common.errors import BadInput
from cria_tricks.course.processes import Ranks
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load.model import quiet_libraries
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import context, ring_collectives
from cria_tricks.predict.links import LINKS, compute_seconds, step_seconds
from cria_tricks.predict.per_process import per_process
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.run.run import train

# four processes, joined by gloo as in data_parallel.py; they end with this notebook
ranks = Ranks(4)
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
ranks.run(quiet_libraries)
quiet_libraries()
torch.manual_seed(0)
GIB, MIB = 2**30, 2**20

# %% [markdown]
# ## 1. The bill
# The job of [the lesson on long rows](long_rows.py): QLoRA of Llama-3.1-8B with checkpointing, the chunked loss and
# tiled MLPs, one row a step. (To keep the bill short, block inputs stay on the card.) Its frozen weights stay whole in
# every process, and so does the adapter. Every tensor with a dimension of tokens is divided. How much longer is the
# longest row on four T4s than on one: less than four times, four times, or more? Write your guess down, then run.

# %% Your guess: times as long on four T4s tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
alone = with_settings(
    course.CAPSTONE,
    ["model=llama-3.1-8b", "tricks.gradient_accumulation=1", "tricks.tiled_mlp=true"],
)
# the ring repeats key heads itself, after they have travelled
job = with_settings(alone, ["tricks.expand_kv=false"])
shape = find_shape(job.model)


def bill(N, tokens):
    if N == 1:
        return per_process(alone, shape, T4, "none", 1, tokens=tokens)
    return per_process(job, shape, T4, "context", N, tokens=tokens)


def longest(N):
    """Return the longest row that fits N cards, to 256 tokens, by bisection."""
    fits, too_long = 1, 4096
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if bill(N, 256 * middle).fits:
            fits = middle
        else:
            too_long = middle
    return 256 * fits


rows = {N: longest(N) for N in (1, 2, 4, 8)}
for N, tokens in rows.items():
    print(
        f"{N} T4: rows of {tokens:9,} tokens, {tokens / rows[1]:.1f} times as "
        "long as on one"
    )
assert 4 < rows[4] / rows[1] < 4.3
# at the peak
assert all(
    any("second norm" in line.why for line in bill(N, rows[N]).lines) for N in rows
)
course.reveal(guess, rows[4] / rows[1], "times")

# %% [markdown]
# A little more than four times. All that the weights leave of a card is for its tokens. And a process saves keys and
# values of 8 heads, while a single T4 must save them repeated for 32 ([FlashAttention](flash_attention.py)). Attention
# also needs buffers for the keys and values that travel, and for their gradients. But they do not raise the peak, which
# comes in the MLP, behind the second norm.


# %% Draw figure 1 tags=["hide-input"]
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
    "Figure 1. Estimated for Llama-3.1-8B; the dashed line is a T4. "
    "For short rows the weights are nearly all of the "
    "peak, and more processes gain nothing. "
    "For long rows twice the processes train on rows twice as long.",
)

# %% [markdown]
# ## 2. From scratch, in four steps
# Norms, MLP and loss take each token by itself, so there a process simply has fewer tokens. Only in attention does a
# token look at others.
#
# **Step 1: attention over some of the keys.** The softmax divides by a sum over *all* keys: the sum of the exponentials
# of their scores. Take only some keys, and keep the logarithm of their sum, the *log-sum-exp*. Then two such partial
# results can be merged: each is weighted by its share of the whole sum. FlashAttention does the same with its tiles
# ([FlashAttention](flash_attention.py)).


# %%
def scores(q, k, causal):
    """Scaled scores of one chunk's queries and another's keys; a chunk with itself is
    causal."""
    found = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        found = found.masked_fill(
            torch.ones(found.shape[-2:]).triu(1).bool(), -torch.inf
        )
    return found


def attend(q, k, v, causal):
    """Attention over the given keys only, and the log-sum-exp of each query's
    scores."""
    found = scores(q, k, causal)
    lse = found.logsumexp(-1, keepdim=True)
    return (found - lse).exp() @ v, lse


def merge(out, lse, more, more_lse):
    """Merge attention over some keys with attention over others."""
    both = torch.logaddexp(lse, more_lse)
    return out * (lse - both).exp() + more * (more_lse - both).exp(), both


T, D = 32, 8
q, k, v = torch.randn(3, 1, 2, T, D, dtype=torch.float64)  # one row, two heads
last = slice(T // 2, T)
first_half = attend(q[:, :, last], k[:, :, : T // 2], v[:, :, : T // 2], False)
second_half = attend(q[:, :, last], k[:, :, last], v[:, :, last], True)
merged, _ = merge(*first_half, *second_half)
whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
print(f"merged from two parts: off by {(merged - whole[:, :, last]).abs().max():.0e}")
torch.testing.assert_close(merged, whole[:, :, last])

# %% [markdown]
# **Step 2: who gets which tokens?** Suppose that we cut the row in order. Then process 0 has the first tokens, which
# see almost nothing. The last process has those that see nearly everything, and all wait for it. So cut the row into
# $2N$ *chunks* of equal length, and give process $r$ chunk $r$ and chunk $2N - 1 - r$: a *zigzag*. Work is counted in
# pairs of chunks, a query's and a key's. If four processes get chunks in order, how many times as much has the last one
# to do as the first?


# %%
def in_order(rank, N):
    return 2 * rank, 2 * rank + 1


def zigzag(rank, N):
    return rank, 2 * N - 1 - rank


def work(layout, N=4):
    """Count each process's pairs of chunks; of a chunk with itself, half is seen."""
    return [sum(query + 0.5 for query in layout(rank, N)) for rank in range(N)]


print("in order:", work(in_order), "zigzag:", work(zigzag))
assert work(in_order) == [2, 6, 10, 14]
assert work(zigzag) == [8, 8, 8, 8]

# %% [markdown]
# Seven times as much. With the zigzag all have the same.
#
# **Step 3: the ring.** Each process keeps its queries. It passes keys and values to its right neighbour by [the lesson
# on the interconnect](interconnect.py)'s `exchange`, and gets others from the left. After $N - 1$ such sends every
# query has met every key.


# %%
def pass_on(x):
    """Send x to the right neighbour; return what comes from the left."""
    received = torch.empty_like(x)
    ring_collectives.wait(ring_collectives.exchange(x, received))
    return received


def pairs(owner, C):
    """Yield where two chunks of C tokens lie, one of our queries and one of the owner's
    keys; and if they are one."""
    rank, N = dist.get_rank(), dist.get_world_size()
    for i, query in enumerate(zigzag(rank, N)):
        for j, key in enumerate(zigzag(owner, N)):
            if key <= query:  # later keys are not seen
                mine, its = slice(i * C, i * C + C), slice(j * C, j * C + C)
                yield (..., mine, slice(None)), (..., its, slice(None)), query == key


def forward(q, k, v):
    rank, N = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    kv = torch.stack([k, v])
    for turn in range(N):
        # What is here now began its way `turn` places to the left.
        for mine, its, causal in pairs((rank - turn) % N, q.shape[2] // 2):
            found = attend(q[mine], *kv[its], causal)
            out[mine], lse[mine] = merge(out[mine], lse[mine], *found)
        if turn < N - 1:
            kv = pass_on(kv)
    return out, lse


# %% [markdown]
# **Step 4: the way back.** With the merged log-sum-exp, each pair's softmax is `exp(scores - lse)`. So it is computed
# again, and nothing of size $T \times T$ was saved. But a key's gradient comes from queries in all processes. So it
# travels with its key, grows at every stop, and the last of $N$ sends brings it home.


# %%
def backward(q, k, v, out, lse, dout):
    rank, N = dist.get_rank(), dist.get_world_size()
    dq, kv, dkv = (
        torch.zeros_like(q),
        torch.stack([k, v]),
        torch.zeros(2, *k.shape, dtype=k.dtype),
    )
    # what the softmax's gradient subtracts, the same for all keys
    inner = (dout * out).sum(-1, keepdim=True)
    for turn in range(N):
        for mine, its, causal in pairs((rank - turn) % N, q.shape[2] // 2):
            key, value = kv[its]
            weights = (scores(q[mine], key, causal) - lse[mine]).exp()
            dscores = (
                weights * (dout[mine] @ value.mT - inner[mine]) / q.shape[-1] ** 0.5
            )
            dq[mine] += dscores @ key
            dkv[its] += torch.stack([dscores.mT @ q[mine], weights.mT @ dout[mine]])
        dkv = pass_on(dkv)
        if turn < N - 1:
            kv = pass_on(kv)
    return dq, *dkv


# %% [markdown]
# ## 3. Prove it
# Every process makes the same whole row, takes its two chunks, and compares what the ring gave with the same chunks of
# attention over the whole row. In fp64 no more than rounding may be left. How many times its own keys and values does a
# process send in the forward pass, and how many times in the backward pass? Count before you run.


# %%
def own(x):
    chunks = x.chunk(2 * dist.get_world_size(), dim=2)
    return torch.cat(
        [chunks[number] for number in zigzag(dist.get_rank(), dist.get_world_size())],
        dim=2,
    )


def trial():
    torch.manual_seed(0)
    *whole, dout = torch.randn(4, 1, 2, 64, D, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in whole]
    right = F.scaled_dot_product_attention(*leaves, is_causal=True)
    gradients = torch.autograd.grad(right, leaves, dout)
    mine = [own(x.detach()) for x in leaves]
    with CountCollectives() as there:
        out, lse = forward(*mine)
    with CountCollectives() as back:
        found = backward(*mine, out, lse, own(dout))
    pairs = zip([out, *found], [right, *gradients], strict=True)
    error = max((one - own(other)).abs().max().item() for one, other in pairs)
    size = 2 * mine[1].nbytes
    return error, there.bytes["send"] / size, back.bytes["send"] / size


for rank, (error, there, back) in enumerate(ranks.run(trial)):
    print(
        f"rank {rank}: off by {error:.0e}; "
        f"sent {there:.0f} times its keys and values forward, {back:.0f} times back"
    )
    assert error < 1e-13
    assert (there, back) == (3, 7)

# %% [markdown]
# $N - 1$ sends forward. Backward $N - 1$ for keys and values, and $N$ for their gradients, which go all the way home.
# The package makes the same sends (`parallel/ring_attention.py`). But it computes each pair by torch's fused kernel, so
# not even a pair's scores exist, and it adds up in fp32. So the gradients that travel are in fp32, too: beside keys and
# values in 16 bits they have twice the bytes. Its gradients pass `torch.autograd.gradcheck`.
#
# ## 4. What it costs
# Keys and values travel in every block: in the forward pass, once more when checkpointing repeats it, and in the
# backward pass. They grow with $T$, but attention's work grows with $T^2$. So does the ring take a smaller share of the
# time for longer rows? Guess for four A100s, over NVLink and over PCIe.

# %%
A100 = CARDS["a100"]
shares = {}
for tokens in (4096, 32_768, 262_144):
    recipe = with_settings(job, [f"data.max_length={tokens}", "tricks.precision=bf16"])
    calls = context.traffic(recipe, shape, 4)
    seconds = compute_seconds(recipe, shape, A100, "context", 4)
    shares[tokens] = [
        step_seconds(seconds, calls, LINKS[name]).communication / seconds
        for name in ("nvlink_a100", "pcie4")
    ]
    sent = sum(call.sent for call in calls) / GIB
    print(
        f"{tokens:8,} tokens: {sent:6.1f} GiB sent, computing {seconds:7.1f} s;",
        end=" ",
    )
    print(
        "sending takes {:.1%} of that over NVLink, {:.1%} over PCIe".format(
            *shares[tokens]
        )
    )
nvlink, pcie = zip(*shares.values(), strict=True)
assert all(sorted(link, reverse=True) == list(link) for link in (nvlink, pcie))
assert all(a < b for a, b in zip(nvlink, pcie, strict=True))

# %% [markdown]
# Yes: the longer the row, the smaller the share. Only 8 key heads travel: with as many as there are query heads, 32, it
# would be four times as much. Once a step the gradients of the adapter are all-reduced, as in [the lesson on data
# parallelism](data_parallel.py). (This is an estimate, and it counts no overlap. The package starts to send keys and
# values before it computes, so a part of this time is hidden. We have no such cards, so none of this was measured on
# one.)
#
# ## 5. The production switch
# Set `parallel.strategy=context`. Every process reads the same rows and cuts them. The labels are shifted *before* the
# cut, and positions are cut with the tokens. Here rows of odd lengths are trained by four processes, and by one:

# %% Train in four processes tags=["hide-input"]
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


# %%
print("cria launch RECIPE --on torchrun --nproc 4 --set parallel.strategy=context")
expected = tiny("one")
found = ranks.run(tiny, "four", "parallel.strategy=context")[0]
print("one process:", *(f"{number:.6f}" for number in expected))
print("four:       ", *(f"{number:.6f}" for number in found))
assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) < 1e-4

# %% [markdown]
# torch has a switch of its own, `torch.distributed.tensor.experimental.context_parallel`. In torch 2.13 it knows the
# kernels of CUDA only and takes no mask. So it runs neither on this CPU nor on packed rows ([packing](packing.py)). Our
# ring knows to which document each token belongs. Pairs of chunks without a common document are not computed at all.
#
# ## 6. Where it breaks
# **The loss is a little off, and no error.** Labels were shifted *after* the cut, in each chunk. Then a chunk's last
# token has lost its label, because the next token is in another chunk. With eight chunks of 64 tokens in all, 7 of 63
# labels are missing:


# %%
def labels_left(shift_first):
    ids = torch.arange(64)[None]
    labels = F.pad(ids[:, 1:], (0, 1), value=-100) if shift_first else ids
    chunks = labels.chunk(8, dim=1)
    return sum(
        (chunk if shift_first else chunk[:, 1:]).ne(-100).sum().item()
        for chunk in chunks
    )


print(
    "labels, shifted first:",
    labels_left(True),
    "and shifted in each chunk:",
    labels_left(False),
)
assert (labels_left(True), labels_left(False)) == (63, 56)

# %% [markdown]
# Cure: shift whole rows, then cut. Give them to transformers' loss as `shift_labels`: it does not shift those again.
#
# **A model that has forgotten the order of its words.** Positions were counted inside each process. So in process 0,
# which has chunks 0 and 7 of 8 tokens each, chunk 7 begins at position 8 and not at 56. Cure: make positions for the
# whole row, and cut them with the tokens, as `context.cut` does:

# %%
ids = torch.arange(100, 164)[None]
for rank in (0, 3):
    print(
        f"rank {rank}:",
        context.cut({"input_ids": ids, "labels": ids}, rank, 4)["position_ids"][
            0
        ].tolist(),
    )
assert context.cut({"input_ids": ids, "labels": ids}, 0, 4)["position_ids"][0, 8] == 56

# %% [markdown]
# **NaN in packed rows.** A query sees no key of a chunk if its document begins later. Its log-sum-exp is then minus
# infinity, and two of these merge to NaN. Cure: hide keys by a large negative number, not by minus infinity.

# %%
nothing = torch.full((1, 1), -torch.inf)
hidden = torch.full((1, 1), torch.finfo(torch.float32).min / 2)
for lse in (nothing, hidden):
    out, _ = merge(torch.zeros(1, 1), lse, torch.zeros(1, 1), lse)
    print(f"merged at {lse.item():.1e}:", out.item())
assert merge(torch.zeros(1, 1), nothing, torch.zeros(1, 1), nothing)[0].isnan()

# %% [markdown]
# **What cannot come along** is refused, in one line each:

# %%
for setting in (
    "tricks.attention=eager",
    "tricks.peft=prompt_tuning",
    "tricks.keep_attention=true",
):
    wanted = with_settings(
        Recipe(),
        [
            "tricks.attention=sdpa",
            "tricks.peft=lora",
            "parallel.strategy=context",
            setting,
        ],
    )
    if "keep" in setting:
        wanted = with_settings(wanted, ["tricks.gradient_checkpointing=true"])
    try:
        resolve(wanted, processes=2)
        raise AssertionError("it must be refused")
    except BadInput as refusal:
        print(refusal)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Llama-3.1-8B has 8 key heads of width 128 in each of 32 blocks. Eight processes share one row of
#    65,536 tokens in bf16. How many MiB of keys and values does a process send in *one* forward pass?
# 2. **Build.** Attention whose *keys* are cut, while all queries are in one place, as when a model answers over a long
#    prompt. Fill in `over_parts(q, parts)`: `q` is (heads, 1, D), `parts` a list of pairs (keys, values), each (heads,
#    tokens, D), all of which the query sees. Return (heads, 1, D). (Use `attend` and `merge`; about five lines.)
# 3. **Reach.** For attention of a block, forward, a process computes $2 \cdot 2 \cdot T^2 / 2 / N \cdot H D$ operations
#    and sends $(N - 1) / N \cdot 2 \cdot T \cdot K D \cdot 2$ bytes. With $H = 32$ query heads and $K = 8$ key heads, a
#    card of 100e12 operations a second and a link of 10e9 bytes a second: from which $T$ on does attention alone take
#    longer than sending, on $N = 4$ cards?

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
# - **Saves** all but 1/N of every tensor with a dimension of tokens: activations, block inputs, logits.
# - **Costs** keys and values on their way in every block: $N - 1$ sends forward (twice with checkpointing), $2N - 1$
#   back. Weights stay whole.
# - **Exact within rounding**: partial results are merged by their log-sum-exp.
# - **When**: one row does not fit a card, with checkpointing, the chunked loss and tiles on.
# - **When not**: rows fit. Then share rows ([data parallelism](data_parallel.py)), which sends once a step.
#
# ## Sources
# - Liu, Zaharia and Abbeel 2023, *Ring Attention with Blockwise Transformers for Near-Infinite Context*, arXiv
#   2310.01889, section 3. Grattafiori et al. 2024, *The Llama 3 Herd of Models*, arXiv 2407.21783, section 3.3.2 (2N
#   chunks; Llama 3 gathers all keys and values at once instead of a ring).
# - Dao 2023, *FlashAttention-2*, arXiv 2307.08691, algorithm 2 (the backward pass from the log-sum-exp).
# - torch 2.13: `torch/distributed/tensor/experimental/_context_parallel/_attention.py`. transformers 5.23:
#   `loss/loss_utils.py` (`shift_labels`).
# - Ours: `cria_tricks/parallel/context.py`, `ring_attention.py`; `tests/parallel/test_context.py`.
