# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # What one card cannot teach
# > **Promise.** You say with one number how fast a run was for its card. Then you write one inequality for each way to
# > share a model, and read from it where more cards stop helping. Last come two methods for clusters, which this lesson
# > counts and cannot run: experts on different cards, and a pipeline that does not wait.
#
# > **Card.** saves the rent of cards that wait / costs arithmetic / operations and bytes exact, seconds as good as the
# > rates / 30 minutes / after [the interconnect](interconnect.py)
#
# The last lessons shared a run in every way that two or four processes can show. Published figures come from thousands
# of cards, and with words that a single card never needs: MFU, expert parallelism, zero bubble. This lesson explains
# them with the counts that you know.

# %% Imports and settings tags=["hide-input"]
import math

import torch.distributed.pipelining as pipelining

from cria_tricks import course, recipes
from cria_tricks.bench.style import Theme
from cria_tricks.hardware.cards import CARDS
from cria_tricks.measure.utilisation import hardware_flops, model_flops
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import ddp, pipeline
from cria_tricks.predict.links import LINKS
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.tricks import folds

# %% [markdown]
# ## 1. The bill
# A card is "100 % busy" while any kernel runs ([monitoring](monitoring.py)). The number that people compare is *MFU*,
# model FLOP utilisation: the operations a second that the training *needs*, divided by the card's peak. A needed
# operation is counted once. What checkpointing computes again does not count, because the training does not need it.
# *HFU*, hardware FLOP utilisation, counts it, too.
#
# Two public runs with checkpointing: QLoRA of Llama-3.2-1B on a T4 at 1,060 tokens a second, and LoRA of Llama-2-7B on
# an A100 at 2,954. Both cards were busy all the time. Guess the two MFUs.

# %% Your guess: MFU of the T4, in per cent tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
usual = (
    "tricks.expand_kv=false tricks.lean_preparation=false train.batch_size=4 "
    "tricks.gradient_checkpointing=true"
)
of_a100 = (
    "tricks.quantization=none tricks.double_quantization=false "
    "tricks.chunked_loss=false lora.r=8"
)
of_a100 += " tricks.attention=flash_attention_2 lora.target_modules=q_proj,v_proj"
mfu = {}
for model, name, tokens, speed, words in (
    ("llama-3.2-1b", "t4", 403, 1060, ""),
    ("llama-2-7b", "a100", 1024, 2954, of_a100),
):
    card = CARDS[name]
    recipe = with_settings(recipes.capstone(card.device), f"{usual} {words}".split())
    work = folds.work(recipe, find_shape(model), card.device, tokens)
    needed, done = model_flops(work), hardware_flops(work)
    mfu[name] = needed * speed / card.half_flops
    print(
        f"{model} on {name}: {needed / 1e9:.2f} billion operations a token needed, "
        f"{done / 1e9:.2f} done;",
        end=" ",
    )
    print(f"MFU {mfu[name]:.1%}, HFU {done * speed / card.half_flops:.1%}")
    assert needed < done
assert mfu["t4"] < 0.1 < 0.2 < mfu["a100"] < 0.3
course.reveal(guess, 100 * mfu["t4"], "%")

# %% [markdown]
# Less than a tenth, and a quarter. [The lesson on choosing hardware](choose_your_hardware.py) has higher shares for the
# same runs, because it compares each part of a step with its own limit, the card's products or its memory, and half of
# a T4's step waits for memory. MFU compares all parts with the products' limit. So it says how far you are from a step
# that only multiplies.
#
# ## 2. From scratch, in two steps
# **The inequality.** Computing and sending can run side by side at best. So a way to share a model pays while computing
# takes at least as long as sending; otherwise the cards wait. Let $n$ tokens go through $L$ blocks of $P$ weights, all
# trained: $6 n L P$ operations. A card does `RATE` of them a second. (It is the share of the peak that public runs
# reached, times the peak.) $N = 8$ cards stand on a ring; [the lesson on the interconnect](interconnect.py) counted
# what each sends. For each way, write down computing and sending in seconds.

# %%
shape, card, N = find_shape("llama-3.1-8b"), CARDS["a100"], 8
RATE = card.half_flops * card.reached.half
P, L, D = (
    sum(d_in * d_out for d_in, d_out in shape.linears.values()),
    shape.layers,
    shape.width,
)
Q, KV = shape.query_width, shape.kv_width


def data(n, rate):
    """n tokens for each card; the fp32 gradients go around the ring twice."""
    return 6 * n * L * P / RATE, 2 * (N - 1) / N * 4 * L * P / rate


def sharded(n, rate):
    """n tokens for each card; 16-bit weights are gathered for both passes, fp32
    gradients are scattered."""
    return 6 * n * L * P / RATE, (N - 1) / N * (2 + 2 + 4) * L * P / rate


def tensor(n, rate):
    """All cards share n tokens; a block sums its output twice on the way forward, and
    twice on the way back."""
    return 6 * n * L * P / N / RATE, 4 * L * 2 * (N - 1) / N * 2 * n * D / rate


def pipe(n, rate):
    """n tokens pass a stage of L / N blocks: hidden states go on, their gradients come
    back."""
    return 6 * n * L * P / N / RATE, 2 * 2 * n * D / rate


def context(n, rate):
    """Attention of a row of n tokens, n / N a card; keys and values go around, then
    again with their gradients."""
    return L * 6 * n * n * Q / N / RATE, 3 * L * (N - 1) * 2 * 2 * n / N * KV / rate


WAYS = {
    "data": data,
    "sharded": sharded,
    "tensor": tensor,
    "pipeline": pipe,
    "context": context,
}
for name in ("nvlink_a100", "hdr", "10gbe"):
    ratio = {}
    for way, f in WAYS.items():
        computing, sending = f(1, LINKS[name].rate)
        ratio[way] = computing / sending
    least = {way: math.ceil(1 / ratio[way]) for way in ("data", "sharded", "context")}
    print(
        f"{LINKS[name].name:18}",
        *(f"{way} from {n:,} tokens;" for way, n in least.items()),
        end=" ",
    )
    print(*(f"{way} {ratio[way]:.1f} times" for way in ("tensor", "pipeline")))

# %% [markdown]
# The ways fall into two kinds. With *data*, *sharded* and *context*, computing grows faster with $n$ than sending, so
# enough tokens always pay for the link. In *data* and *sharded* the size of the model cancels. In *context*, $n$ is the
# length of one row. With *tensor* and *pipeline*, $n$ cancels: more tokens change nothing. There, only the link and the
# width of the model decide. That is why tensor parallelism stays inside one machine, and a pipeline may cross even
# Ethernet.

# %%
for name, ways in {
    "nvlink_a100": ("tensor", "pipeline"),
    "10gbe": ("pipeline",),
}.items():
    assert all(
        WAYS[way](1, LINKS[name].rate)[0] > WAYS[way](1, LINKS[name].rate)[1]
        for way in ways
    )
# not over InfiniBand
assert tensor(1, LINKS["hdr"].rate)[0] < tensor(1, LINKS["hdr"].rate)[1]
for way in (tensor, pipe):
    (computing, sending), (longer, more) = way(1, 1e9), way(10**4, 1e9)
    assert math.isclose(computing / sending, longer / more)


# %% Draw figure 1 tags=["hide-input"]
def by_tokens(theme: Theme):
    """Computing over sending, against tokens, on NVLink and on InfiniBand."""
    drawn, axes = course.figure(height=3.4)
    many = [2**k for k in range(7, 21)]
    for (way, f), colour in zip(list(WAYS.items())[:4], theme.series, strict=True):
        for name, style in (("nvlink_a100", "-"), ("hdr", ":")):
            found = [f(n, LINKS[name].rate) for n in many]
            label = way if style == "-" else None
            axes.plot(
                many,
                [one / other for one, other in found],
                style,
                color=colour,
                label=label,
            )
    axes.axhline(1, color=theme.ink, linewidth=0.8)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="tokens",
        ylabel="computing / sending",
        ylim=(0.05, 3000),
    )
    axes.legend()
    return drawn


course.show(
    by_tokens,
    "Figure 1. Llama-3.1-8B on eight A100s, all weights trained: "
    "above 1 a card computes longer than it sends. Lines: "
    "NVLink; dotted: InfiniBand HDR. Data and sharded lie on each other.",
)

# %% [markdown]
# **The bubble.** In a pipeline a stage waits at the beginning and at the end ([pipeline
# parallelism](pipeline_parallel.py)). A backward pass has two halves: the gradient of the input (B), for which the
# stage before waits, and the gradients of the weights (W), for which nobody does. *Zero bubble* does B first and moves
# W into the waiting time. Build it: each stage does the pass that it can begin earliest, and of several B before F
# before W. `split=False` does W directly after B, which is [the lesson on pipeline parallelism](pipeline_parallel.py)'s
# 1F1B.


# %%
def waiting(stages, k, F, B, W, split):
    """Seconds that a stage waits in a step of k micro-batches."""
    ends, free = {}, [0.0] * stages
    count = [{"F": 0, "B": 0, "W": 0} for _ in range(stages)]
    takes = {"F": F, "B": B if split else B + W, "W": W if split else 0.0}
    for _ in range(3 * stages * k):
        ready = []
        for s, done in enumerate(count):
            # When the pass ended that each kind waits for; None if it has not run yet.
            first, last = s == 0, s == stages - 1
            before = {
                "F": 0.0 if first else ends.get(("F", s - 1, done["F"])),
                "B": ends.get(("F", s, done["B"]) if last else ("B", s + 1, done["B"])),
                "W": ends.get(("B", s, done["W"])),
            }
            # At most as many micro-batches are under way as there are stages from here
            # on.
            allowed = {
                "F": done["F"] < k and done["F"] - done["B"] < stages - s,
                "B": True,
                "W": True,
            }
            for order, kind in enumerate("BFW"):
                if allowed[kind] and before[kind] is not None:
                    ready.append((max(free[s], before[kind]), order, s, kind))
        start, _, s, kind = min(ready)
        free[s] = ends[kind, s, count[s][kind]] = start + takes[kind]
        count[s][kind] += 1
    return max(free) - k * (F + B + W)


for stages, k in ((4, 8), (4, 16), (8, 32)):
    plain, zero = (waiting(stages, k, 1, 1, 1, split) for split in (False, True))
    print(
        f"{stages} stages, {k} micro-batches: 1F1B waits {plain:.0f}, "
        f"zero bubble {zero:.0f}"
    )
    assert (plain, zero) == ((stages - 1) * 3, stages - 1)

# %% [markdown]
# ## 3. Prove it
# The bubble is that of Qi et al.: $(S - 1)(F + B + W)$ for 1F1B, and $(S - 1)(F + B - W)$ for their schedule ZB-H1,
# which needs no more memory. Now the bytes and operations, against what the package counts for its strategies. And
# MFU's operations, against PaLM's formula, $6 N + 12 L H Q T$ for each token.

# %%
full = with_settings(
    Recipe(),
    ["model=llama-3.1-8b", "tricks.precision=bf16", "tricks.gradient_accumulation=8"],
)
parts = {part.name: part.flops for part in folds.step(full, shape, card).parts}
n = 8 * full.train.batch_size * full.data.max_length
assert parts["blocks forward"] + parts["blocks backward"] == 6 * n * L * P
one_link = 1e9
[gradients] = ddp.traffic(full, shape, N)
assert math.isclose(
    gradients.sent / shape.weights, data(1, one_link)[1] * one_link / (L * P)
)
sent = sum(
    call.sent
    for call in pipeline.traffic(full, shape, N, stage=1)
    if call.kind == "send"
)
stream = folds.work(full, shape, card.device).hidden_itemsize
# we send 16 bits, the package what is there
assert math.isclose(sent, pipe(n, one_link)[1] * one_link * stream / 2)
eager = folds.work(
    with_settings(full, ["tricks.attention=eager"]), shape, card.device, 512
)
palm = 6 * (L * P + D * shape.vocabulary) + 12 * L * Q * 512
assert math.isclose(model_flops(eager), palm)
print(f"{6 * n * L * P:,} operations and {gradients.sent:,.0f} bytes: as counted")

# %% [markdown]
# ## 4. What it costs
# **Experts on other cards.** A mixture of experts sends each token to $k$ of its MLPs. With *expert parallelism* each
# card holds some experts, so tokens travel: to the experts and back, forward, and the same for the gradients. These are
# four *all-to-all*s a block, in which each card sends a piece to every other one; each has $k D$ numbers a token
# (GShard, Switch Transformers). The computing is $3 k$ matrices of $D \times F$. So $k$ and $D$ cancel, and only the
# width $F$ of an expert decides. Two models: Mixtral 8x7B has $F = 14{,}336$, and DeepSeek-V3 has $F = 2{,}048$ with 8
# of 256 experts a token. Guess which one can be trained over InfiniBand.


# %%
def experts(width, rate):
    """Computing over sending of one expert's MLP, all weights trained, 16-bit numbers
    on the way."""
    return (6 * 3 * width / RATE) / (4 * (N - 1) / N * 2 / rate)


ratios = {}
for model, width in (
    ("Mixtral 8x7B", find_shape("mixtral-8x7b").inner),
    ("DeepSeek-V3", 2048),
):
    ratios[model] = [
        experts(width, LINKS[name].rate) for name in ("nvlink_a100", "hdr")
    ]
    print(
        f"{model:13} NVLink {ratios[model][0]:5.1f} times, "
        f"InfiniBand HDR {ratios[model][1]:4.2f}"
    )
assert ratios["DeepSeek-V3"][1] < 1 < ratios["Mixtral 8x7B"][1]

# %% [markdown]
# Newer mixtures have many narrow experts, which makes the ratio worse. DeepSeek-V3's report says the same of its own
# cluster: "computation-to-communication ratio of approximately 1:1" (section 3.2.1). It has three cures. A token goes
# to experts on at most four machines (3.2.2). The all-to-alls run beside another micro-batch's computing (DualPipe,
# 3.2.1). Kernels of its own move the bytes (3.2.2). Our count leaves two things out. Loads are unequal, so all cards
# wait for the one with the most popular expert. And an all-to-all of small pieces reaches less of a link than a ring.
#
# **Zero bubble.** The price is memory: until W has run, a block keeps its inputs *and* the gradients of its outputs.
# ZB-H1 postpones few W. ZB-H2 has no bubble if F = B = W, and holds about twice the activations. Clipping by the norm
# of *all* gradients would bring a bubble back, because the norm is known only after the last W. So the authors take the
# step first, and undo it if the norm was too large.
#
# ## 5. The production switch
# Of all this `cria` has MFU: a line in the panel and in `report.md` of every run. On a CPU, or a card without a
# datasheet rate, it says `unknown`. Of the methods `cria` has none: our trainer's pipeline is 1F1B or GPipe. torch has
# zero-bubble schedules, which torchtitan runs, and torchtitan has expert parallelism.

# %%
for schedule in (
    "Schedule1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
):
    there = hasattr(pipelining.schedules, schedule)
    print(f"{schedule:32}{'in this torch' if there else 'not in this torch'}")

# %% [markdown]
# ## 6. Where it breaks
# **Zero bubble, and LoRA waits as before.** Frozen weights have no gradient. So W is the adapter's alone, and there is
# nothing to move into the bubble. With rank $r$, W is $r (1/D_{in} + 1/D_{out})$ of B: for $r = 16$ and a width of
# 2,048, 0.016.

# %%
for W in (1, 0.5, 16 * (1 / 2048 + 1 / 2048)):
    plain, zero = (waiting(4, 16, 1, 1, W, split) for split in (False, True))
    print(
        f"W = {W:.3f}: 1F1B waits {plain:.2f}, zero bubble {zero:.2f}: "
        f"{zero / plain:.0%} of it"
    )
assert zero > 0.9 * plain

# %% [markdown]
# Cure: more micro-batches, which lower the bubble's share with frozen weights, too.
#
# **Two MFUs that cannot be compared.** PaLM counts all pairs of tokens in attention; a causal kernel computes half of
# them. A frozen weight takes 4 operations and not 6. An fp8 run divided by the 16-bit peak shows twice the share. Cure:
# ask which operations, which peak, and whether what was computed again counts. Ours counts half of the pairs where the
# kernel leaves the others out, 4 for a frozen weight, and the dense peak of the products' own precision.
#
# **The inequality holds, and the cards wait all the same.** It assumes that all sending is hidden behind computing, and
# that each transfer has the link to itself. The last gradient of a step has nothing left behind which to hide, and each
# call has a fixed start ([the interconnect](interconnect.py)). Cure: measure. `cria doctor --collectives` gives the
# rates of your links.
#
# ## 7. Exercises
# 1. **Predict.** Eight A100s train all weights of a model with 6.74 billion weights, 20,000 tokens a second together,
#    without checkpointing. Leave attention out. The peak of each is 312e12 operations a second. What is MFU? (A number
#    from 0 to 1.)
# 2. **Build.** `least_tokens(flops, sent, rate, link)`: the least whole number of tokens a card for which computing
#    takes at least as long as sending. (`flops`: operations a token; `sent`: bytes a step; both rates a second.)
# 3. **Reach.** How wide must an expert be at least, so that eight cards with our `RATE` on `LINKS["hdr"]` compute as
#    long as they send? (A number; all weights trained, 16 bits on the way.)

# %% tags=["exercise"]
share_of_the_peak = None


def least_tokens(flops, sent, rate, link):
    """Return a whole number of tokens. FILL ME IN."""


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
    course.about(1 / experts(1, LINKS["hdr"].rate), hint),
    "a number, the width of an expert",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# share_of_the_peak = 6 * 6.74e9 * 20000 / (8 * 312e12)
#
#
# def least_tokens(flops, sent, rate, link):
#     return math.ceil(sent / link * rate / flops)
#
#
# least_width = 4 * 7 / 8 * 2 * RATE / (18 * LINKS["hdr"].rate)
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the rent of cards that wait: one inequality for each way to share a model, before you rent any.
# - **Costs** arithmetic. The counts are exact; the rates are those that public runs and NCCL reached.
# - **MFU** is needed operations over the peak; HFU counts what is computed again, too.
# - **When**: data and sharded with enough tokens a card; context with long enough rows; tensor inside one machine; a
#   pipeline across machines.
# - **When not**: experts narrower than the link allows, and zero bubble for frozen weights.
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
# - Lepikhin et al. 2020, *GShard*, arXiv 2006.16668. Fedus et al. 2021, *Switch Transformers*, arXiv 2101.03961.
# - The two public runs: [the lesson on choosing hardware](choose_your_hardware.py). torch 2.13,
#   `torch/distributed/pipelining/schedules.py`.
# - Ours: `cria_tricks/measure/utilisation.py`, `cria_tricks/bill/`, `cria_tricks/predict/links.py`.
