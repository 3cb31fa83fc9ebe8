# ---
# jupyter:
#   question: Which way to share a model pays on which link, and what do reports about thousands of cards mean by MFU,
#     expert parallelism and zero bubble?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # What one card cannot teach
# > **Promise.** Reports about large runs say "40 % MFU", "expert parallelism" or "zero bubble", and a single card never
# > shows what these words mean. You will compute the MFU of two public runs, write one inequality for each way to share
# > a model, and read from it when your cards only wait for the link, before you rent them.
# >
# > **Card.** saves the rent of cards that wait / costs arithmetic / counts of operations and bytes are exact, seconds
# > are as good as the rates / about 25 minutes / after [the interconnect](interconnect.py)
#
# ## 1. The bill
# How fast is a run *for its card*? The number that people compare is [MFU](../docs/glossary.md#mfu), model FLOP
# utilisation: the operations (additions and multiplications) that the training *needs* for a token, times its tokens a
# second, divided by the peak rate of the card. What [gradient checkpointing](gradient_checkpointing.py) computes a
# second time is not needed, so it does not count. *HFU*, hardware FLOP utilisation, counts it too.
#
# A public run trained Llama-3.2-1B with QLoRA on a T4, at 1,060 tokens a second, evaluations and checkpoints included.
# The peak of a T4 is 65 trillion operations a second in fp16. The model has 1.24 billion weights, and nearly all are
# frozen. A frozen weight needs one multiplication and one addition for each token in the forward pass, and the same in
# the backward pass, for the gradient of its input. How many per cent is the MFU?

# %% Your guess: MFU of the T4, in per cent tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports, and the settings of two public runs tags=["hide-input"]
import math

import torch.distributed.pipelining as pipelining

from cria_tricks import Recipe, course, recipes
from cria_tricks.course import (
    CARDS,
    LINKS,
    STRATEGIES,
    Theme,
    find_shape,
    folds,
    hardware_flops,
    model_flops,
    step_time,
    table,
    with_settings,
)

_usual = [
    "tricks.expand_kv=false",
    "tricks.lean_preparation=false",
    "train.batch_size=4",
    "tricks.gradient_checkpointing=true",
]
_of_a100 = [
    "tricks.quantization=none",
    "tricks.double_quantization=false",
    "tricks.chunked_loss=false",
    "lora.r=8",
    "tricks.attention=flash_attention_2",
    "lora.target_modules=q_proj,v_proj",
]
# model, card, tokens of a row, tokens a second, settings
public_runs = {
    "QLoRA of Llama-3.2-1B, T4": ("llama-3.2-1b", "t4", 403, 1060, _usual),
    "LoRA of Llama-2-7B, A100": (
        "llama-2-7b",
        "a100",
        1024,
        2954,
        [*_usual, *_of_a100],
    ),
}

# %%
lines, mfu = [], {}
for run, (model, name, tokens, speed, settings) in public_runs.items():
    card = CARDS[name]
    recipe = with_settings(recipes.capstone(card.device), settings)
    work = folds.step_of(recipe, find_shape(model), card.device, tokens)
    needed, done = model_flops(work), hardware_flops(work)  # for each token
    mfu[name] = needed * speed / card.half_flops
    hfu = done * speed / card.half_flops
    counts = (f"{needed / 1e9:.2f}", f"{done / 1e9:.2f}")
    lines.append((run, *counts, f"{mfu[name]:.1%}", f"{hfu:.1%}"))
course.reveal(guess, 100 * mfu["t4"], "%")
columns = ("run", "needed, billions a token", "done, billions", "MFU", "HFU")
course.show_table(table(columns, lines))

# %% Check the numbers of the text tags=["hide-input"]
assert [round(mfu[name], 3) for name in ("t4", "a100")] == [0.084, 0.258]
_by_hand = 4 * 1.24e9 * 1060 / 65e12
assert round(_by_hand, 2) == 0.08
_llama = find_shape("llama-2-7b")
_size = {name: a * b * _llama.layers for name, (a, b) in _llama.linears.items()}
_flops = {part.name: part.flops for part in step_time.counts(work)}  # of the A100
_tokens = work.micro_batches * work.batch * work.tokens
_again = _flops["blocks again"] / _tokens
assert math.isclose(_again, 2 * (sum(_size.values()) - _size["down_proj"]))
assert (round(_again / 1e9, 1), round(2 * sum(_size.values()) / 1e9, 1)) == (10.1, 13)
assert "down_proj" not in work.adapted

# %% [markdown]
# The T4's MFU is $4 \cdot 1.24 \cdot 10^9 \cdot 1{,}060 / (65 \cdot 10^{12})$, or 8 %, to which attention and the
# adapter add a little. The T4 reached less than a tenth, the A100 a quarter. Checkpointing repeats most of a block, 2
# operations a weight, which only "done" and HFU count (last fold).
#
# [The lesson on choosing hardware](choose_your_hardware.py) has higher shares, because it compares each part of a step
# with its own limit: the card's arithmetic, or its memory.
#
# ## 2. From scratch, in three steps
# **Step 1: compare computing with sending.** A card can send while it computes, and at best this takes no extra time.
# But if sending takes longer, the card waits. So a way to share a model *pays* while
#
# $$\text{seconds of computing} \ge \text{seconds of sending}.$$
#
# (Below that, more cards may still be faster, but they wait.) We write down both sides for the blocks of Llama-3.1-8B
# on eight A100s, all joined by the same link. All weights are trained: 4 operations for each weight and token, as
# above, and 2 for its gradient.
#
# - **[Data parallelism](data_parallel.py)** sums the fp32 gradients over all cards once a step, in an
#   [all-reduce](../docs/glossary.md#all-reduce). Only the backward pass, 4 of the 6 operations, can hide it.
# - **[Sharding](sharding.py)** gathers weights, here of 16 bits, for both passes of every micro-batch, and scatters
#   fp32 gradients of each.

# %%
import math

L, D, INNER, Q, KV = 32, 4096, 14_336, 4096, 1024  # Llama-3.1-8B: blocks and widths
P = 2 * D * Q + 2 * D * KV + 3 * D * INNER  # weights of a block
N = 8  # cards
# Operations a second: the share of the peak that matrix products reached in six public
# runs. MFU is lower, because a step does more. At a lower rate, cards wait less.
RATE = 0.525 * 312e12
LINK_RATES = {  # bytes a second in one direction, as collectives reach them
    "NVLink of an A100": 232.5e9,
    "InfiniBand HDR": 24e9,  # one port: each card in a machine of its own
    "10 Gbit Ethernet": 1.177e9,
}


def data(n, rate):
    """Seconds of the backward pass and of sending, for n tokens of each card: those of
    the last micro-batch of a step."""
    all_reduced = 2 * (N - 1) / N * 4 * L * P  # bytes
    return 4 * n * L * P / RATE, all_reduced / rate


def sharded(n, rate):
    """The same for a whole micro-batch, with n tokens of each card."""
    gathered = (N - 1) / N * 2 * L * P
    scattered = (N - 1) / N * 4 * L * P  # by FSDP's default 16 bits, half of it
    return 6 * n * L * P / RATE, (2 * gathered + scattered) / rate


for name, rate in LINK_RATES.items():
    computing, sending = data(1, rate)
    print(f"{name}: data pays from {math.ceil(sending / computing):,} tokens a card")

# %% [markdown]
# Computing grows with $n$ and sending does not, so with enough tokens these two ways pay on every link. (Over Ethernet
# data parallelism needs 119 rows of 2,048 tokens, for a model of any size.)
#
# **Step 2: add three ways in which all cards share the same $n$ tokens.**
#
# - **[Tensor parallelism](tensor_parallel.py)** all-reduces the 16-bit hidden states four times in each block: twice
#   forward and twice backward.
# - **[Pipeline parallelism](pipeline_parallel.py)** sends the hidden states to the next stage, and their gradients back
#   to the stage before.
# - **[Context parallelism](context_parallel.py)** passes the keys and values of a long row around the ring in each
#   block: once forward, and again backward together with their fp32 gradients. Meanwhile each card computes attention.


# %%
def tensor(n, rate):
    all_reduced = 4 * L * 2 * (N - 1) / N * 2 * n * D
    return 6 * n * L * P / N / RATE, all_reduced / rate


def pipe(n, rate):
    there_and_back = 2 * 2 * n * D
    return 6 * n * L * P / N / RATE, there_and_back / rate


def context(n, rate):
    """For one row of n tokens, of which each card has n / N."""
    keys_and_values = 2 * 2 * n / N * KV
    # each token sees half of the row: 2 n^2 Q operations forward, twice that backward
    attention = L * 6 * n * n * Q / N
    sends = (N - 1) + (N - 1) + 2 * N  # forward, backward, gradients of twice the bytes
    return attention / RATE, sends * L * keys_and_values / rate


def ratio(way, n, rate):
    """Computing over sending: from 1 on, the way pays."""
    computing, sending = way(n, rate)
    return computing / sending


nvlink = LINK_RATES["NVLink of an A100"]
for n in (1_000, 10_000):
    found = {way.__name__: ratio(way, n, nvlink) for way in (tensor, pipe, context)}
    print(f"{n:6,} tokens:", *(f"{name} {value:.1f}" for name, value in found.items()))

# %% Table 1: when each way pays tags=["hide-input"]
lines = []
for name, rate in LINK_RATES.items():
    cells = [
        f"{math.ceil(1 / ratio(way, 1, rate)):,} tokens"
        for way in (data, sharded, context)
    ]
    waits = 1 / (1 + ratio(tensor, 1, rate))  # if nothing hides what it sends
    cells += [f"{ratio(tensor, 1, rate):.2f} times, waits {waits:.0%}"]
    cells += [f"{ratio(pipe, 1, rate):.1f} times"]
    lines.append((name, *cells))
columns = (
    "link",
    "data, of a card, last micro-batch",
    "sharded, of a card, micro-batch",
)
columns += ("context, of a row", "tensor, computing / sending", "pipeline, the same")
course.show_table(table(columns, lines))
assert [line[1] for line in lines] == [
    "1,233 tokens",
    "11,944 tokens",
    "243,543 tokens",
]
assert round(243_543 / 2048) == 119
assert [line[2] for line in lines[:2]] == ["822 tokens", "7,963 tokens"]
assert [line[3] for line in lines[:2]] == ["3,523 tokens", "34,125 tokens"]
assert [line[4][-3:] for line in lines[:2]] == ["20%", "71%"]
assert round(1 / (1 + ratio(tensor, 1, LINKS["hdr"].over(4).rate)), 2) == 0.40
assert [round(ratio(tensor, 1, rate), 1) for rate in LINK_RATES.values()] == [4, 0.4, 0]
assert 2 < ratio(pipe, 1, LINK_RATES["10 Gbit Ethernet"]) < 2.5

# the plain numbers of step 1 are those of the package
_shape, _card = find_shape("llama-3.1-8b"), CARDS["a100"]
assert (_shape.layers, _shape.width, _shape.inner) == (L, D, INNER)
assert (_shape.query_width, _shape.kv_width) == (Q, KV)
assert sum(a * b for a, b in _shape.linears.values()) == P
assert math.isclose(_card.half_flops * _card.reached.half, RATE)
for _link in (LINKS[name] for name in ("nvlink_a100", "hdr", "10gbe")):
    assert math.isclose(_link.rate, LINK_RATES[_link.name], rel_tol=1e-3)


# %% Draw figure 1 tags=["hide-input"]
def by_tokens(theme: Theme):
    """Computing over sending, against tokens, on NVLink and on InfiniBand."""
    drawn, axes = course.figure(height=3.4)
    many = [2**k for k in range(7, 21)]
    drawn_ways = {"data": data, "context": context}
    drawn_ways |= {"tensor": tensor, "pipeline": pipe}
    for (label, way), colour in zip(drawn_ways.items(), theme.series, strict=False):
        for name, style in (("NVLink of an A100", "-"), ("InfiniBand HDR", ":")):
            axes.plot(
                many,
                [ratio(way, n, LINK_RATES[name]) for n in many],
                style,
                color=colour,
                label=label if style == "-" else None,
            )
    axes.axhline(1, color=theme.ink, linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="computing / sending",
        ylim=(0.05, 3000),
    )
    axes.legend(fontsize=7.5, loc="lower right", ncol=4)
    return drawn


course.show(
    by_tokens,
    "Figure 1. Llama-3.1-8B on eight A100s, all weights trained. Above the line at 1 "
    "a card computes longer than it sends. Solid lines: NVLink. Dotted lines: "
    "InfiniBand HDR. Tokens are those of each card for data, and of all cards for the "
    "others. The line of sharded would be near that of data.",
)

# %% [markdown]
# The table says from how many tokens the first three ways pay. With *tensor* and *pipeline* $n$ cancels. There the
# link, the number of cards and the model's width decide, and for a pipeline also its depth. If nothing hides the sums
# of *tensor*, a card waits 20 % of the time on NVLink, and 71 % on InfiniBand, or 40 % if two machines have four ports
# each. (Async tensor parallelism hides a part.) So *tensor* stays inside a machine, and a pipeline may cross Ethernet.
# ([Our small job](interconnect.py) also has norms, head and loss.)
#
# **Step 3: fill the bubble of a pipeline.** Each stage of a [pipeline](pipeline_parallel.py) waits at the beginning and
# at the end of a step, and this time is the [bubble](../docs/glossary.md#bubble). The backward pass has two halves: B
# computes the gradient of the input, which the stage before needs at once, and W those of the weights, which nobody
# needs before the optimizer's step. *Zero bubble* moves W into the time in which the stage would wait.
#
# One rule gives the old and the new order. Of all passes that can begin, the earliest one is next; of several, B comes
# before F (forward), and F before W. A stage $s$ begins F only with fewer than $S - s$ micro-batches between F and B,
# as in 1F1B, and fewer than $S + 2$ between F and W. Without `split`, W belongs to B, and this is *1F1B*.


# %%
def passes(S, k, F, B, W, split):
    """The passes of S stages and k micro-batches: (stage, kind, n, start, end)."""
    seconds = {"F": F, "B": B, "W": W} if split else {"F": F, "B": B + W, "W": 0}
    ended = {("F", -1, n): 0 for n in range(k)}  # the rows are there from the start
    free = [0] * S  # when a stage has finished its last pass
    done = [{"F": 0, "B": 0, "W": 0} for _ in range(S)]  # so many of each kind

    def earliest(s, kind):
        """When the stage's next pass of this kind can begin; None if unknown."""
        n = done[s][kind]
        if kind == "F" and (n - done[s]["B"] == S - s or n - done[s]["W"] == S + 2):
            return None  # one more would need too much memory
        needs = {"F": ("F", s - 1, n), "B": ("B", s + 1, n), "W": ("B", s, n)}[kind]
        if kind == "B" and s == S - 1:  # the last stage has the loss
            needs = ("F", s, n)
        return max(free[s], ended[needs]) if needs in ended else None

    found = []
    while len(found) < 3 * S * k:
        ready = []
        for s in range(S):
            for order, kind in enumerate("BFW"):
                start = earliest(s, kind)
                if start is not None:
                    ready.append((start, order, s, kind))
        start, _, s, kind = min(ready)
        n = done[s][kind]
        done[s][kind] += 1
        free[s] = ended[kind, s, n] = start + seconds[kind]
        found.append((s, kind, n, start, free[s]))
    return found


def waiting(S, k, F, B, W, split):
    """Seconds of a step in which a stage waits."""
    end = max(end for *_, end in passes(S, k, F, B, W, split))
    return end - k * (F + B + W)


for split in (False, True):
    idle = waiting(4, 8, 1, 1, 1, split)
    print(f"split={split!s:5}  a stage waits {idle} of {24 + idle} seconds")


# %% Draw figure 2 tags=["hide-input"]
def both_orders(theme: Theme):
    """Three stages and four micro-batches, by 1F1B and by zero bubble."""
    sketch = course.Sketch(theme, 44, 19)
    for top, name, split in ((1.6, "1F1B", False), (11, "zero bubble", True)):
        sketch.text(0, top - 0.8, name, align="left")
        for s, kind, n, start, end in passes(3, 4, 1, 1, 1, split):
            if end > start:
                left, wide = 0.2 + 2.4 * start, 2.4 * (end - start) - 0.2
                label = f"{kind if split or kind == 'F' else 'BW'}{n + 1}"
                sketch.tensor(
                    left, top + 2.4 * s, wide, 2, label, color="FBW".index(kind)
                )
    return sketch.figure


course.show(
    both_orders,
    "Figure 2. Three stages, one below the other, and four micro-batches, time to the "
    "right. F, B and W take a second each; BW is both as one pass. 1F1B takes 18 "
    "seconds. Zero bubble fills gaps with W and takes 14.",
)
assert [12 + waiting(3, 4, 1, 1, 1, split) for split in (False, True)] == [18, 14]

# %% [markdown]
# ## 3. Prove it
# By the paper of zero bubble (Qi et al.) a stage waits for $(S - 1)(F + B + W)$ with 1F1B, and for $(S - 1)(F + B - W)$
# with its schedule ZB-H1, which needs no more memory than 1F1B. (Ours keeps up to two micro-batches more.) Our rule
# must wait exactly as long as the first, and at most as long as the second. Our operations and bytes must be those that
# the package counts. And the operations of MFU must be those of PaLM's formula for a token of a row of $T$: 6 for each
# weight, and $12\,L\,Q\,T$ for attention.

# %%
for S, k in ((4, 8), (4, 16), (8, 32)):
    assert waiting(S, k, 1, 1, 1, True) == S - 1
    for F, B, W in ((1, 1, 1), (2, 3, 1)):
        assert waiting(S, k, F, B, W, False) == (S - 1) * (F + B + W)
        assert waiting(S, k, F, B, W, True) <= (S - 1) * (F + B - W)

settings = ["model=llama-3.1-8b", "tricks.precision=bf16"]
full = with_settings(Recipe(), [*settings, "tricks.gradient_accumulation=8"])
shape, card = find_shape("llama-3.1-8b"), CARDS["a100"]
n = 8 * full.train.batch_size * full.data.max_length  # tokens of a step
parts = {part.name: part.flops for part in folds.time_of(full, shape, card).parts}
assert parts["blocks forward"] + parts["blocks backward"] == 6 * n * L * P

[gradients] = STRATEGIES["ddp"].traffic(full, shape, N)
by_us = data(n, 1)[1] / (L * P)  # bytes for each weight, at a rate of 1
assert math.isclose(gradients.sent / shape.weights, by_us)
calls = STRATEGIES["context"].traffic(full, shape, N)
sent = sum(call.sent for call in calls if call.kind == "send")
row = full.data.max_length
assert math.isclose(sent, n / row * context(row, 1)[1])
calls = STRATEGIES["pipeline"].traffic(full, shape, N, stage=1)
sent = sum(call.sent for call in calls if call.kind == "send")
itemsize = folds.step_of(full, shape, card.device).hidden_itemsize  # ours is 2
assert math.isclose(sent, pipe(n, 1)[1] * itemsize / 2)

eager = with_settings(full, ["tricks.attention=eager"])  # computes all pairs of tokens
counted = model_flops(folds.step_of(eager, shape, card.device, 512))
assert counted == 6 * (L * P + D * shape.vocabulary) + 12 * L * Q * 512
print("bubbles, operations and bytes are as published and as the package counts them")

# %% [markdown]
# ## 4. What it costs
# **Experts on other cards cost an exchange.** A mixture of experts has many MLPs in each block, the *experts*, and
# sends each token to $m$ of them. With *expert parallelism* each card holds some experts, so tokens travel to their
# experts and back, and in the backward pass their gradients do the same. These are four *all-to-alls* for each block,
# in which each card sends a different piece to every other card: $m D$ numbers for each token.
#
# The computing is that of $m$ experts with three matrices of $D \times E$, or $6 \cdot 3 \cdot D E m$ operations. So
# $m$ and $D$ cancel, and only the width $E$ of an expert decides (if a token's experts are on different cards). It is
# 14,336 in Mixtral 8x7B, and 2,048 in DeepSeek-V3, where each token goes to 8 of 256 experts. Which of the two waits
# for the link if eight A100s are joined by InfiniBand HDR?

# %% Your guess: which model waits for InfiniBand tags=["predict"]
guess = "no guess"  # @param ["no guess", "neither", "Mixtral 8x7B", "DeepSeek-V3"]


# %%
def experts(width, rate):
    """Computing over sending for one expert, all weights trained, 16 bits sent."""
    computing = 6 * 3 * width / RATE  # for each of the D numbers of a token
    sending = 4 * (N - 1) / N * 2 / rate
    return computing / sending


lines = []
for model, width in {"Mixtral 8x7B": 14_336, "DeepSeek-V3": 2048}.items():
    found = [experts(width, LINK_RATES[name]) for name in list(LINK_RATES)[:2]]
    lines.append((model, *(f"{times:.2f} times" for times in found)))
course.reveal(guess, "DeepSeek-V3")
course.show_table(table(("computing / sending", *list(LINK_RATES)[:2]), lines))
assert experts(2048, 24e9) < 1 < experts(14_336, 24e9)
assert find_shape("mixtral-8x7b").inner == 14_336

# %% [markdown]
# Newer mixtures have many narrow experts, which makes the ratio worse. The report on DeepSeek-V3 names a
# "computation-to-communication ratio of approximately 1:1" (section 3.2.1). It is no check of ours: its H800 cards send
# tokens to experts in 8 bits, and to at most four machines.

# %% [markdown] tags=["deep"]
# ### Deeper: cures for narrow experts, and the memory of zero bubble
# The report on DeepSeek-V3 names three cures: a token goes to experts on at most four machines (section 3.2.2), the
# all-to-alls run while another micro-batch computes (DualPipe, 3.2.1), and special kernels move the bytes (3.2.2). Our
# count leaves out two things that make it worse. Experts are not equally popular, so all cards wait for the card with
# the most tokens. And an all-to-all of small pieces reaches a smaller share of a link's rate than a ring does.
#
# Zero bubble costs memory, because until W has run, a block keeps its inputs *and* the gradients of its outputs. ZB-H1
# postpones only few W. A second schedule, ZB-H2, has no bubble if F = B = W, but holds about twice the activations.
# Clipping the gradients would bring a bubble back, because the norm of *all* gradients is known only after the last W.
# Therefore the authors take the optimizer's step first, and undo it if the norm was too large.

# %% [markdown]
# ## 5. The production switch
# MFU needs no switch. The first command writes it into `report.md`. (On a CPU it is `unknown`.) NVIDIA's nccl-tests
# measure your links, for the inequality:
#
# ```bash
# cria train kwanzaa
# all_reduce_perf -b 4K -e 1G -f 2 -g 8
# ```
#
# Our package has neither zero bubble nor expert parallelism, and torchtitan has both. In the plain code of [the lesson
# on pipelines](pipeline_parallel.py) only the schedule changes:
#
# ```python
# from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble
#
# schedule = ScheduleInterleavedZeroBubble(
#     [stage],  # ZBV takes two: rank r of S holds stages r and 2 S - 1 - r
#     n_microbatches=8,
#     loss_fn=summed_loss,
#     scale_grads=False,
# )
# ```

# %%
for schedule in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
    there = hasattr(pipelining.schedules, schedule)
    print(f"{schedule}: {'in this torch' if there else 'not in this torch'}")

# %% [markdown]
# ## 6. Where it breaks
# **With zero bubble, LoRA waits nearly as long as before.** A frozen weight has no gradient, so W belongs to the
# adapter alone, and hardly anything moves into the bubble. B multiplies by a matrix of $D_{in} D_{out}$ numbers, and W
# by $r D_{in}$ and $r D_{out}$ numbers. So W takes $r\,(1/D_{in} + 1/D_{out})$ of B, which is 0.016 for $r = 16$ and a
# width of 2,048.

# %%
lines = []
for W in (1, 0.5, 16 * (1 / 2048 + 1 / 2048)):
    plain, zero = (waiting(4, 16, 1, 1, W, split) for split in (False, True))
    lines.append((f"{W:.3f}", f"{plain:.2f}", f"{zero:.2f}", f"{zero / plain:.0%}"))
columns = ("W, if F = B = 1", "1F1B waits", "zero bubble waits", "of 1F1B")
course.show_table(table(columns, lines))
assert zero > 0.9 * plain

# %% [markdown]
# The cure is more micro-batches, so that the bubble is a smaller share.
#
# **The inequality holds, but the cards still wait.** Nothing can hide the last gradient of a step, and each call takes
# a fixed time before it sends anything ([the interconnect](interconnect.py)). Measure a few steps.

# %% [markdown] tags=["deep"]
# ### Deeper: two MFUs that cannot be compared
# PaLM's formula counts 6 operations for each weight and token, and all pairs of tokens in attention. But a frozen
# weight takes only 4, and a causal kernel computes only half of the pairs. An fp8 run whose rate is divided by the
# 16-bit peak seems twice as good. So ask which operations were counted, and which peak. (Ours counts 4 for a frozen
# weight, and the pairs that the kernel computes, so a kernel that computes all pairs seems better than it is. It takes
# the peak of the precision that is used.)
#
# The column "done" of section 1 has in addition what checkpointing repeats: the products of the blocks and adapters,
# and attention. torch stops as soon as all saved tensors exist again. So on the A100, where `down_proj` has no adapter,
# it leaves out this last product of each block, and the blocks add 10.1 billion operations a token instead of 13.0.

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Eight A100s train all weights of a model with 6.74 billion weights, at 20,000 tokens a second
#    together, without checkpointing. The peak of each card is $312 \cdot 10^{12}$ operations a second. What is the MFU,
#    if attention is left out? The answer is a number from 0 to 1.
# 2. **Build.** Fill in `least_tokens(flops, sent, rate, link)`: the smallest whole number of tokens for which computing
#    takes at least as long as sending. `flops` are operations for each token. `sent` are the bytes that a card sends in
#    a step, for any number of tokens. The other two are operations and bytes a second.
# 3. **Reach.** How wide must an expert be at least, so that eight cards with our `RATE` on InfiniBand HDR compute as
#    long as they send, if all weights are trained and 16-bit numbers are sent? (To 1 %.)

# %% tags=["exercise"]
share_of_the_peak = None


def least_tokens(flops, sent, rate, link):
    """FILL ME IN."""


least_width = None


# %% Check the exercises tags=["hide-input"]
def of_tokens(answer):
    for flops, sent, rate, link in (
        (6e9, 8e9, 1e14, 1e10),
        (10, 100, 5, 2),
        (4, 7, 1, 3),
        (1, 1, 1, 1),
    ):
        if (found := answer(flops, sent, rate, link)) is None:
            raise NotImplementedError
        case = f"flops={flops:g}, sent={sent:g}, rate={rate:g}, link={link:g}"
        enough = found * flops / rate >= sent / link * (1 - 1e-9)
        assert enough, f"{found} for {case}: computing is shorter than sending"
        assert (found - 1) * flops / rate < sent / link, (
            f"{found} for {case}: fewer tokens are enough"
        )


hint = "6 operations a weight and token; divide by the peak of all eight cards"
course.check(
    1,
    share_of_the_peak,
    course.about(6 * 6.74e9 * 20000 / (8 * 312e12), hint),
    "a number from 0 to 1",
)
course.check(
    2,
    least_tokens,
    of_tokens,
    "a function (flops, sent, rate, link) -> a whole number of tokens",
)
hint = (
    "set experts(width, rate) to 1, and take the rate that collectives "
    "reach on the link"
)
course.check(
    3,
    least_width,
    course.about(1 / experts(1, LINK_RATES["InfiniBand HDR"]), hint),
    "a number, the width of an expert",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# share_of_the_peak = 6 * 6.74e9 * 20000 / (8 * 312e12)  # 0.32
#
#
# def least_tokens(flops, sent, rate, link):
#     return math.ceil(sent / link * rate / flops)
#
#
# # 18 E / RATE = 4 * 7 / 8 * 2 / rate, solved for E
# least_width = 4 * 7 / 8 * 2 * RATE / (18 * LINK_RATES["InfiniBand HDR"])  # 2,654
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the rent of cards that wait: one inequality for each way to share a model, before you rent any.
# - **Costs** arithmetic. Counts are exact, and rates are those of public runs and NCCL.
# - **MFU** is the needed operations over the peak. HFU also counts what is computed a second time.
# - **When**: data parallelism and sharding with enough tokens for each card; context parallelism with long rows; tensor
#   parallelism inside one machine; a pipeline across machines.
# - **When not**: experts that are narrower than the link allows, and zero bubble for frozen weights.
#
# ## Sources
# - Chowdhery et al. 2022, *PaLM*, arXiv 2204.02311, section 4.1 and appendix B (MFU, HFU).
# - Liu et al. 2023, *Ring Attention*, arXiv 2310.01889: a card's piece of the row must be longer than its operations a
#   second over the link's bytes a second. Ours differs by causal pairs and by the gradients.
# - Qi et al. 2023, *Zero Bubble Pipeline Parallelism*, arXiv 2401.10241; its authors' page
#   (`sail/zero-bubble-pipeline-parallellism` on Hugging Face) has the table of bubbles and memory: 1F1B $(p-1)/m$, ZB1P
#   $(p-1)/3m$, ZB2P 0 with twice the memory.
# - DeepSeek-AI 2024, *DeepSeek-V3 Technical Report*, arXiv 2412.19437, sections 3.2.1 and 3.2.2, 4.2 (8 of 256 experts,
#   width 2,048).
# - Lepikhin et al. 2020, *GShard*, arXiv 2006.16668. Fedus et al. 2021, *Switch Transformers*, arXiv 2101.03961
#   (all-to-alls).
# - The two public runs: a workshop on a free Colab T4, and the wiki of LLaMA-Factory (performance comparison); see
#   `benchmarks/published_runs.toml` and [the lesson on choosing hardware](choose_your_hardware.py).
# - torch 2.13, `torch/distributed/pipelining/schedules.py`. Rates of links: `cria_tricks/predict/links.py` names the
#   source of each.
# - Ours: `cria_tricks/measure/utilisation.py`, `cria_tricks/bill/`, `cria_tricks/predict/links.py`.
