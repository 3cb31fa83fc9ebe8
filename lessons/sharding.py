# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Sharding: everybody keeps a piece
# > **Promise.** Two processes keep half of every weight, gradient and optimizer state each, and train to the same
# > losses. You build it, count its bytes, and find that on our own job the peak grows.
#
# > **Card.** saves state: 1 / N of weights, gradients and optimizer states in each process / costs the blocks' weights
# > twice a micro-batch, over the wire / exact within rounding / 40 minutes / after [data parallelism](data_parallel.py)
#
# The job is QLoRA of Llama-3.2-1B on 107 training rows of up to 2,048 tokens. In [the lesson on data
# parallelism](data_parallel.py) each of two cards held all of it: the same weights, the same gradients after the
# all-reduce, the same optimizer states. Must it all be there twice? ZeRO (the *zero redundancy optimizer*) says no.
# torch's version is FSDP2, *fully sharded data parallel*.

# %% Imports and settings tags=["hide-input"]
import logging
import math
import random
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from bitsandbytes.nn import Linear4bit
from bitsandbytes.optim import AdamW8bit
from torch import nn

from cria_tricks import course, parallel
from cria_tricks.bench.case import TRAINED_SHARE
from cria_tricks.bench.style import Theme, marked, panels
from cria_tricks.bill.calls import CountCollectives, ring_share
from cria_tricks.common.errors import BadInput
from cria_tricks.course.processes import Ranks
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.hardware.reached import LINK
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import ddp, fsdp
from cria_tricks.predict.per_process import per_process
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks import folds

KIB, MIB, GIB = 2**10, 2**20, 2**30

# %% [markdown]
# ## 1. The bill
# Who needs what, and when? Optimizer states are needed only in the optimizer step, and each weight's step needs only
# its own. So process $r$ could keep the states of its own $N$-th part of the weights, update that part, and send it to
# the others: *stage 1*. Then it needs only its part of the gradient: *stage 2*. And a weight is needed only while its
# block runs: *stage 3*, and FSDP2.
#
# ZeRO's example: 7.5 billion weights on 64 cards, in mixed precision: 2 bytes a weight, 2 a gradient, 12 for AdamW (an
# fp32 copy and two moments). That is 120 GB in every card. Write down what is left of it after each stage. Then compare
# with the paper's figure 1: 31.4, 16.6 and 1.9.


# %%
# bytes of each, and the stage that divides them
sizes = {"weights": (2, 3), "gradients": (2, 2), "states": (12, 1)}


def after(stage, weights=7.5e9, N=64):
    return sum(
        weights * size / (N if stage >= divides else 1)
        for size, divides in sizes.values()
    )


print(*(f"stage {stage}: {after(stage) / 1e9:.1f} GB;" for stage in range(4)))
assert [round(after(stage) / 1e9, 1) for stage in range(4)] == [120, 31.4, 16.6, 1.9]

# %% [markdown]
# That is full fine-tuning. In our job 11 million numbers learn beside 1.2 billion that do not, and frozen ones have
# neither gradient nor states. Call weights, gradients and optimizer states together the *state*. How many MiB does each
# stage take off ours, on two cards? Guess three numbers. (AdamW has fp32 states here; section 6 says why.)

# %% Helper: bills of the three stages tags=["hide-input"]
job = with_settings(
    course.CAPSTONE, ["tricks.optimizer=adamw", "tricks.paged_optimizer=false"]
)
whole_model = (
    "peft=none",
    "quantization=none",
    "double_quantization=false",
    "lean_preparation=false",
)
full = with_settings(job, [f"tricks.{off}" for off in whole_model])
# gradients are summed over the processes once a step
once = with_settings(full, ["parallel.reduce=step"])
# one card of two has half of the micro-batches
of_one_card = with_settings(job, ["tricks.gradient_accumulation=4"])
shape = find_shape(job.model)
stages = {
    "all whole": "none",
    "stage 1": "zero1",
    "stage 2": "zero2",
    "stage 3": "fsdp",
}


def bill(recipe, strategy, cards=2, model="llama-3.2-1b"):
    return per_process(
        recipe, find_shape(model), T4, strategy, 1 if strategy == "none" else cards
    )


# %%
for name, recipe in {"full": full, "QLoRA": job}.items():
    for stage, strategy in stages.items():
        found = bill(recipe, strategy)
        print(
            f"{name:6}{stage:10}state {found.state_bytes / MIB:6,.0f} MiB, "
            f"peak {found.peak_bytes / MIB:6,.0f}"
        )
state = {strategy: bill(job, strategy).state_bytes for strategy in stages.values()}
assert state["none"] - state["zero2"] < 0.06 * state["none"]
assert state["fsdp"] < 0.51 * state["none"]
assert bill(job, "fsdp").peak_bytes > bill(job, "none").peak_bytes
for name, recipe, each in (
    ("once a step", once, 4),
    ("after each micro-batch", full, 2),
):
    size = sum(
        line.bytes for line in bill(recipe, "fsdp").lines if line.name == "gradients"
    )
    print(
        f"full, stage 3, gradients reduced {name}: "
        f"{size / MIB:6,.0f} MiB of gradients at the peak"
    )
    assert size == each * shape.weights


# %% Draw figure 1 tags=["hide-input"]
def of_the_state(theme: Theme):
    """What a card holds between two steps, stage by stage."""
    drawn, both = panels(2, 2.5)
    kinds = {
        "weights": theme.series[0],
        "gradients": theme.series[1],
        "optimizer states": theme.series[2],
    }
    for axes, (name, recipe) in zip(
        both, {"full fine-tuning": full, "QLoRA": job}.items(), strict=True
    ):
        for place, strategy in enumerate(stages.values()):
            left = 0.0
            for kind, colour in kinds.items():
                size = (
                    sum(
                        line.bytes
                        for line in bill(recipe, strategy).state
                        if line.name.startswith(kind)
                    )
                    / GIB
                )
                axes.barh(
                    place,
                    size,
                    left=left,
                    color=colour,
                    height=0.66,
                    label=kind if place == 0 else None,
                )
                left += size
        axes.set_yticks(range(4), list(stages))
        axes.set(xlabel=f"{name}: state of each of two, GiB", ylim=(3.6, -0.6))
        axes.grid(axis="x")
    both[0].legend(loc="lower right", fontsize=7.5)
    return drawn


course.show(
    of_the_state,
    "Figure 1. Stages 1 and 2 divide gradients and optimizer states, "
    "of which LoRA left next to nothing. What is left "
    "to divide are the frozen weights, in 4 bits and 16.",
)

# %% [markdown]
# Stages 1 and 2 together save 65 of 1,152 MiB. Only stage 3 helps: it halves the state. However, the *peak* grows
# (section 5).
#
# In full fine-tuning the peak depends on when gradients are *reduced*: summed over the processes. If once a step, each
# process keeps whole gradients until the last micro-batch. If after each micro-batch, it keeps pieces only. That is our
# default (`parallel.reduce=micro_batch`), and section 4 shows what it sends. We build stage 3 first.
#
# ## 2. From scratch, in three steps
# Four blocks, two processes, as in [the lesson on data parallelism](data_parallel.py). A block's weights are one vector
# of $E$ numbers, so that cutting is easy.

# %%
L, D, H = 4, 64, 256  # blocks, width, inner width


def new_model():
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D)) for _ in range(L))
    )


shapes = [p.shape for p in new_model()[0].parameters()]
E = sum(math.prod(shape) for shape in shapes)
torch.manual_seed(1)
rows, targets = torch.randn(2, 32, D)


def block(whole, x):
    """Run a block on x; the vector `whole` has its weights."""
    parts = whole.split([math.prod(shape) for shape in shapes])
    up, up_bias, down, down_bias = (
        part.view(shape) for part, shape in zip(parts, shapes, strict=True)
    )
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


# %% Start two processes tags=["hide-input"]
ranks = Ranks(2)
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
_ = ranks.run(warnings.simplefilter, "ignore")  # torch renames some collectives

# %% [markdown]
# **Cut.** Process $r$ keeps part $r$ of each vector, and that is all it keeps of the model.
#
# **Gather for the forward pass, scatter on the way back.** An *all-gather* gives everyone all parts. Each process runs
# the block on its own rows, so each gets the gradient of the *whole* block from its rows. A *reduce-scatter* adds these
# up and gives each process its part of the sum. (Followed by an all-gather, it makes an all-reduce.) A reduce-scatter
# is the all-gather's backward pass.


# %%
def piece_of(block):
    flat = torch.cat([p.detach().flatten() for p in block.parameters()])
    return flat.chunk(dist.get_world_size())[dist.get_rank()].clone().requires_grad_()


def gathered(piece):
    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, piece):
            whole = piece.new_empty(len(piece) * dist.get_world_size())
            dist.all_gather_into_tensor(whole, piece)
            return whole

        @staticmethod
        def backward(ctx, gradient):
            piece = gradient.new_empty(len(gradient) // dist.get_world_size())
            dist.reduce_scatter_tensor(piece, gradient)
            return piece

    return Gather.apply(piece)


def keeping(piece, x):
    return block(gathered(piece), x)


def passes(way):
    """Live bytes without the pieces, between the two passes and at the peak; and the
    pieces' gradients."""
    pieces = [piece_of(block) for block in new_model()]
    y = rows[dist.get_rank() :: dist.get_world_size()]
    count = LiveBytes()
    count.track_all(pieces)
    before = count.live
    with count:
        for piece in pieces:
            y = way(piece, y)
        loss = y.square().sum()
        time.sleep(0.2)  # gloo's own thread holds what it sent for a moment longer
        between = count.live
        loss.backward()
    return between - before, count.peak - before, [piece.grad for piece in pieces]


# %% Helper: compare with one process tags=["hide-input"]
model = new_model()
model(rows).square().sum().backward()
expected = [
    torch.cat([p.grad.flatten() for p in block.parameters()]) for block in model
]


def apart(found):
    """The pieces of all processes, put together, against one process's gradients."""
    together = [torch.cat(pieces) for pieces in zip(*found, strict=True)]
    return max(
        ((p - q).norm() / q.norm()).item()
        for p, q in zip(together, expected, strict=True)
    )


# %%
kept = ranks.run(passes, keeping)
print(f"gradients off by {apart([pieces for _, _, pieces in kept]):.0e}")
print(
    f"between the passes {kept[0][0] / KIB:,.0f} KiB; "
    f"all weights have {4 * L * E / KIB:,.0f}"
)
assert apart([pieces for _, _, pieces in kept]) < 1e-5
assert kept[0][0] > 4 * L * E

# %% [markdown]
# Right, and useless: at the end of the forward pass all blocks are whole. Autograd did what it must
# ([checkpointing](gradient_checkpointing.py)): a product saves what it multiplied, and one of the two is the weight.
#
# **Forget, and fetch again.** torch lets us choose what is saved instead of a tensor. For a part of the gathered vector
# we save only where it lies: shape, strides, offset. When the backward pass asks, we gather again. Predict by how much
# the bytes between the passes will fall.


# %%
def sharded(piece, x):
    whole, again = gathered(piece), []
    address = whole.untyped_storage().data_ptr()

    def keep(tensor):
        # no part of the gathered vector
        if tensor.untyped_storage().data_ptr() != address:
            return tensor
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def fetch(kept):
        if torch.is_tensor(kept):
            return kept
        if not again:
            again.append(gathered(piece.detach()))  # once for all matrices of the block
        return again[0].as_strided(*kept)

    with torch.autograd.graph.saved_tensors_hooks(keep, fetch):
        return block(whole, x)


forgot = ranks.run(passes, sharded)
print(f"gradients off by {apart([pieces for _, _, pieces in forgot]):.0e}")
for name, place in (("between the passes", 0), ("at the peak", 1)):
    print(
        f"{name:19}{kept[0][place] / KIB:6,.0f} KiB -> {forgot[0][place] / KIB:6,.0f}"
    )
assert all(map(torch.equal, kept[0][2], forgot[0][2]))
assert kept[0][0] - forgot[0][0] == 4 * L * E


# %% Draw figure 2 tags=["hide-input"]
def over_time(theme: Theme):
    """What of each block process 0 holds, moment by moment."""
    sketch = course.Sketch(theme, 42, 13)
    moments = [("forward", n) for n in range(4)] + [
        ("backward", n) for n in (3, 2, 1, 0)
    ]
    for column, (way, opened) in enumerate(moments):
        left = 7 + 4.3 * column + (0.7 if way == "backward" else 0)
        sketch.text(left + 1.8, 0.7, f"{way} {opened + 1}", quiet=True)
        for number in range(4):
            y = 1.6 + 2.5 * number
            if number == opened:
                sketch.tensor(left, y, 3.6, 2, "whole", color=1)
            else:
                sketch.tensor(left, y, 1.8, 2, "", color=0)
    for number in range(4):
        sketch.text(0, 2.6 + 2.5 * number, f"block {number + 1}", align="left")
    sketch.text(
        7,
        12.3,
        "process 0 of 2; process 1 has the other halves, and opens the same block",
        align="left",
        quiet=True,
    )
    return sketch.figure


course.show(
    over_time,
    "Figure 2. Half of every block, and the one that runs is whole: "
    "each twice a micro-batch.",
)

# %% [markdown]
# Bit for bit the same gradients, and no whole weights between the passes. At the peak one block and its gradient are
# whole. That is stage 3. The package's `fsdp.Sharded` wraps any module so. torch's `fully_shard` adds prefetching: the
# next block is gathered while this one computes.
#
# ## 3. Prove it
# Twenty AdamW steps: in one process, with the package's sharding, with torch's. AdamW treats every number by itself, so
# it takes a piece as it takes a matrix. (Clipping looks at all numbers, so processes sum the squares of their norms,
# then take the root.) Claim: equal losses within rounding, and half of the state.


# %%
def train(way):
    """The losses of 20 steps, bytes of weights, gradients and states in this process,
    and what was sent."""
    from torch.distributed.fsdp import fully_shard

    rank, N = (0, 1) if way == "alone" else (dist.get_rank(), dist.get_world_size())
    model, history = new_model(), []
    if way == "package":
        model = nn.Sequential(*map(fsdp.Sharded, model))
    if way == "torch":
        for module in (*model, model):
            fully_shard(module)
    optimizer = torch.optim.AdamW(model.parameters(), 0.003)
    with CountCollectives() as sent:
        for _ in range(20):
            optimizer.zero_grad()
            loss = (model(rows[rank::N]) - targets[rank::N]).square().sum() / len(rows)
            # torch's takes the mean over processes
            (loss * N if way == "torch" else loss).backward()
            history.append(loss.item())
            optimizer.step()
    states = [
        value
        for values in optimizer.state.values()
        for value in values.values()
        if value.dim()
    ]
    held = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
    return (
        history,
        sum(getattr(t, "_local_tensor", t).nbytes for t in held),
        dict(sent.bytes),
    )


history, alone_bytes, _ = train("alone")
print(
    f"alone    loss {history[0]:.4f} -> {history[-1]:.4f}, state {alone_bytes:,} bytes"
)
for way in ("package", "torch"):
    (mine, bytes_, sent), (others, _, _) = ranks.run(train, way)
    off = max(
        abs((p + q) / r - 1) for p, q, r in zip(mine, others, history, strict=True)
    )
    print(
        f"{way:8} losses off by at most {off:.0e}, state {bytes_:,} bytes; sent {sent}"
    )
    assert off < 1e-5
    assert bytes_ == alone_bytes / 2

# %% [markdown]
# ## 4. What it costs
# **The wire.** Each block is gathered twice a step, and its gradient reduced and scattered once. Predict the bytes of
# the 20 steps that were counted above. An all-gather sends half as much as an all-reduce, and so does a reduce-scatter.
# So these are three halves against DDP's two: 1.5 times the bytes (ZeRO, section 7).

# %%
assert sent == {"all_gather": 20 * 2 * 4 * L * E, "reduce_scatter": 20 * 4 * L * E}
with_ddp = ring_share("all_reduce", 2)
with_fsdp = 2 * ring_share("all_gather", 2) + ring_share("reduce_scatter", 2)
print(
    f"of the model's bytes each process sends {with_ddp} in a step with ddp, "
    f"{with_fsdp} sharded"
)
assert with_fsdp == 1.5 * with_ddp

# %% [markdown]
# That is the famous factor. It holds for full fine-tuning with one micro-batch a step. *We* freeze the weights. DDP
# sends nothing of them. FSDP sends them all for each of four micro-batches: the blocks' weights twice, and the
# embedding once, because it is the head as well and stays whole until the backward pass is over. How many times DDP's
# bytes is that? Guess before you run.

# %% Your guess: times the bytes of DDP tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
work = folds.step(of_one_card, shape, CARDS["t4"], trained_share=TRAINED_SHARE).seconds
by = {
    name: sum(call.sent for call in way.traffic(job, shape, 2))
    for name, way in (("ddp", ddp), ("fsdp", fsdp))
}
for name, size in by.items():
    wire = size / CARDS["t4"].link_rate / LINK
    print(
        f"{name:5}{size / 1e6:6,.0f} MB; at 3/4 of PCIe's rate {wire:.3f} s, "
        f"{wire / work:.1%} of {work:.1f} s"
    )
assert 70 < by["fsdp"] / by["ddp"] < 75
course.reveal(guess, by["fsdp"] / by["ddp"], "times")

# %% [markdown]
# Seventy times. Even so it takes less than a twentieth of the step, and torch sends while it computes.
#
# Here gradients are reduced after each of four micro-batches, instead of once. Predict how many times the bytes of a
# step grow by that, for QLoRA and for full fine-tuning.

# %%
for name, recipe in {"QLoRA": job, "full": full}.items():
    both = (with_settings(recipe, ["parallel.reduce=step"]), recipe)
    step, each = (
        sum(call.sent for call in fsdp.traffic(one, shape, 2)) for one in both
    )
    print(
        f"{name:6}{step / 1e6:7,.0f} MB a step, or {each / 1e6:7,.0f}: "
        f"{each / step:.2f} times"
    )
    assert round(each / step, 2) == {"QLoRA": 1.02, "full": 1.37}[name]

# %% [markdown]
# QLoRA has so few gradients that it does not matter. A step of full fine-tuning sends 37 % more. If the link is slow
# and the card has room, choose `parallel.reduce=step`.
#
# ## 5. The production switch

# %%
print("cria launch kwanzaa --on torchrun --nproc 2 --set parallel.strategy=fsdp \\")
print("    --set tricks.optimizer=adamw --set tricks.paged_optimizer=false")
shared = with_settings(job, ["parallel.strategy=fsdp"])
print(diff(resolve(job, T4), resolve(shared, T4, processes=2)))

# %% [markdown]
# Our switch calls `fully_shard` on *groups* of weights. A group is gathered when it runs, and freed after it. Every
# block is a group. Where embedding and head are two matrices, the embedding is a group, and the last norm with the head
# is another, as in torchtitan. Where they are one matrix, it belongs to the *root*, and stays whole from the beginning
# of the forward pass to the end of the backward pass.
#
# Weights travel as they are stored, and gradients are summed in fp32. When is it worth it? Predict for each line
# whether a card needs less when there are two:

# %%
models = {
    "llama-3.2-1b": job,
    "llama-3.1-8b": job,
    "llama-2-13b": job,
    "llama-3.2-1b, full": full,
}
models |= {"llama-3.2-1b, full, once a step": once}
needs = {}
for name, recipe in models.items():
    model = name.partition(",")[0]
    needs[name] = [
        bill(recipe, "fsdp" if n > 1 else "none", n, model).least_bytes / GIB
        for n in (1, 2, 4, 8)
    ]
    print(
        f"{name:32}" + "".join(f"{size:7.2f}" for size in needs[name]),
        "GiB on 1, 2, 4, 8 cards",
    )
assert needs["llama-3.2-1b"][1] > needs["llama-3.2-1b"][0]
for name, less in {"llama-3.1-8b": 0.15, "llama-2-13b": 0.36}.items():
    assert round(1 - needs[name][1] / needs[name][0], 2) == less
assert (
    needs["llama-3.2-1b, full"][1]
    < T4.memory_bytes / GIB
    < needs["llama-3.2-1b, full, once a step"][1]
)
# with four cards
assert needs["llama-3.2-1b, full, once a step"][2] < T4.memory_bytes / GIB


# %% Draw figure 3 tags=["hide-input"]
def of_needs(theme: Theme):
    """What each card must have, against the number of cards."""
    drawn, axes = course.figure(height=3.2)
    for number, (name, sizes) in enumerate(needs.items()):
        axes.plot((1, 2, 4, 8), sizes, **marked(theme, number), label=name)
    axes.axhline(
        T4.memory_bytes / GIB, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3))
    )
    axes.text(
        8, T4.memory_bytes / GIB + 0.4, "a T4 has 14.7", color=theme.alarm, ha="right"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks((1, 2, 4, 8), ["1", "2", "4", "8"])
    axes.set(xlabel="cards", ylabel="needed in each, GiB", ylim=(0, None))
    axes.grid(axis="y")
    axes.legend(fontsize=7.5)
    return drawn


course.show(
    of_needs,
    "Figure 3. By our estimate sharding makes full fine-tuning of a billion weights "
    "fit two T4s, or four if gradients "
    "are reduced once a step. QLoRA of the same model gains nothing from a second "
    "card; that of larger models does.",
)

# %% [markdown]
# The rule: it pays where the blocks are most of the bill, or where embedding and head are two matrices. Llama-2-13B has
# large blocks, so each of two cards needs 36 % less. Llama-3.1-8B needs 15 % less, because only one of its two large
# matrices is whole at a time. The 1B's embedding is its head as well, so it is whole through both passes, *beside* the
# process's own piece of it. So there a second card costs memory.
#
# How much do groups matter? Take a toy with an embedding and a head of 16 MiB each: first both in the root, then each a
# group of its own. Predict the peaks:


# %% Helper: the peak with and without groups tags=["hide-input"]
def toy_peak(own_groups):
    """Bytes at the peak of a step, and its loss, of an embedding, a block and a head:
    all but the block is frozen."""
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(16_384, 256),
        nn.Linear(256, 256),
        nn.Linear(256, 16_384, bias=False),
    )
    for matrix in (model[0], model[2]):
        matrix.requires_grad_(False)
    fully_shard(model[1])
    if own_groups:
        # a table's backward pass needs no weights
        fully_shard(model[0]).set_unshard_in_backward(False)
        # the backward pass begins with it
        fully_shard(model[2], reshard_after_forward=False)
    fully_shard(model)
    count = LiveBytes()
    count.track_all([p.to_local() for p in model.parameters()])
    words = torch.arange(16) + dist.get_rank()
    with count:
        loss = F.cross_entropy(model(words), words)
        loss.backward()
    return count.peak, loss.item()


(in_root, one_loss), (apart_from_it, other_loss) = (
    ranks.run(toy_peak, own)[0] for own in (False, True)
)
print(
    f"embedding and head in the root: peak {in_root / MIB:.1f} MiB; "
    f"as groups of their own: {apart_from_it / MIB:.1f}"
)
assert one_loss == other_loss
assert apart_from_it < in_root - 15 * MIB

# %% [markdown]
# ## 6. Where it breaks
# **More cards, and a higher peak.** Here it is in the real trainer, in fp32, on a tiny Llama with 49,152 words of width
# 256, whose embedding is its head as well. Each process holds the whole embedding beside its own half, and for a moment
# also a buffer. Predict by how many MB the peak grows.

# %% Train in two processes tags=["hide-input"]
folder = tempfile.TemporaryDirectory()
data = Path(parallel.__file__).parents[1] / "data" / "nguzo_saba_eval.jsonl"
few = Path(folder.name) / "few.jsonl"
few.write_text(
    "".join(data.read_text(encoding="utf-8").splitlines(keepends=True)[:4]),
    encoding="utf-8",
)
tiny = [
    "model=random:tiny",
    "tricks.peft=lora",
    "tricks.gradient_accumulation=4",
    "data.max_length=256",
]
tiny += ["tricks.chunked_loss=true", "train.max_steps=2", "train.epochs=2"]
tiny += ["train.learning_rate=0.01", f"data.train={few}", f"data.eval={few}"]


def train_it(settings, out):
    from cria_tricks.common.console import Aside
    from cria_tricks.run.run import train

    console = Aside()
    console.quiet = True
    report = train(with_settings(Recipe(), settings), out, console=console)
    return [entry["loss"] for entry in report["history"] if "loss" in entry], report[
        "peak_bytes"
    ]


# %%
one, one_peak = train_it(tiny, Path(folder.name) / "one")
two, two_peak = ranks.run(
    train_it, [*tiny, "parallel.strategy=fsdp"], Path(folder.name) / "two"
)[0]
folder.cleanup()
print(
    "losses alone  ",
    *(f"{loss:.6f}" for loss in one),
    f"  peak {one_peak / 1e6:.1f} MB",
)
print(
    "losses sharded",
    *(f"{loss:.6f}" for loss in two),
    f"  peak {two_peak / 1e6:.1f} MB",
)
half = 4 * 49_152 * 256 / 2
print(
    f"grown by {(two_peak - one_peak) / 1e6:.1f} MB; "
    f"half an embedding is {half / 1e6:.1f}"
)
assert all(abs(p / q - 1) < 1e-5 for p, q in zip(one, two, strict=True))
assert two_peak - one_peak > 0.9 * half

# %% [markdown]
# Equal losses; more memory. Cure: look at the bill first, and take `ddp` when one card holds the run.
#
# **`got mixed torch.Tensor and DTensor`.** `fully_shard` makes each weight a `DTensor`: a piece that knows of the
# whole. torch's operations take those; bitsandbytes' kernels, such as [the lesson on 8-bit AdamW](optimizers.py)'s
# 8-bit AdamW, do not. Cure: `optimizer=adamw`: the cards divide its 32-bit states. Our switch refuses the pair.


# %%
def eight_bits():
    from torch.distributed.fsdp import fully_shard

    layer = fully_shard(nn.Linear(128, 128))
    optimizer = AdamW8bit(layer.parameters())
    layer(torch.ones(1, 128)).sum().backward()
    try:
        optimizer.step()
    except RuntimeError as error:
        return str(error)


print(said := ranks.run(eight_bits)[0])
assert "got mixed torch.Tensor and DTensor" in said
try:
    resolve(with_settings(course.CAPSTONE, ["parallel.strategy=fsdp"]), T4, processes=2)
    raise AssertionError("it must be refused")
except BadInput as refused:
    print(refused)

# %% [markdown]
# **A warning, and nothing is sharded.** accelerate's way to FSDP2 leaves 4-bit weights whole when they are stored as
# bytes. That is the default, and QLoRA's base consists of such weights. Cure there: `bnb_4bit_quant_storage`, a float
# type that holds the same bits. `fully_shard` itself takes bytes as they are.


# %% Helper: wrap a model as accelerate does tags=["hide-input"]
def of_accelerate(model):
    """Lay accelerate's FSDP2 around a model, without the rest of its Accelerator."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="size_based_wrap",
        min_num_params=1,
        cpu_ram_efficient_loading=False,
    )
    around = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        is_main_process=dist.get_rank() == 0,
        device=torch.device("cpu"),
        mixed_precision="no",
    )
    fsdp2_prepare_model(around, model)


# %%
def four_bits(way, storage):
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    layer = Linear4bit(128, 128, bias=False, quant_type="nf4", quant_storage=storage)
    model = nn.Sequential(layer).to("cpu").requires_grad_(False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if way == "accelerate":
            of_accelerate(model)
        else:
            with fsdp.bytes_allowed():  # torch 2.11 needs it
                fully_shard(layer)
                fully_shard(model)
    (weight,) = model.parameters()
    return getattr(weight, "_local_tensor", weight).nbytes, " ".join(
        str(one.message) for one in said
    )


for way, storage in (
    ("accelerate", torch.uint8),
    ("accelerate", torch.bfloat16),
    ("fully_shard", torch.uint8),
):
    size, said = ranks.run(four_bits, way, storage)[0]
    print(f"{way}, {storage}: {size:,} of 8,192 bytes in each process. {said[:104]}")
    assert size == (8192 if said else 4096)
ranks.close()

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Llama-3.1-70B has 70,553,706,496 weights. Full fine-tuning by stage 3, with ZeRO's 2, 2 and 12 bytes a
#    weight. Activations are free. How many cards of 80 GB ($80 \cdot 10^9$ bytes) does the state alone take? Your
#    answer is a whole number of cards.
# 2. **Build.** Stage 1 in one process. Fill in `stage_1(weight, gradients, moments, rate)`. `weight` is a vector.
#    `gradients` holds one vector of that length for each of $N$ processes, `moments` one vector for each of the $N$
#    *pieces*, which you change in place. Add gradients up; let each process do SGD with momentum on its piece
#    ($m \leftarrow 0.9\,m + g$, $w \leftarrow w - \text{rate} \cdot m$); put the pieces together. Return the new
#    weight, a vector as long as the old one. (About five lines. $N$ divides the length.)
# 3. **Reach.** Prefetching. Fill in `forward_seconds(computes, gathers)`, two lists of seconds: block $i$ takes
#    `gathers[i]` on the wire and `computes[i]` to run. It starts when its weights have come and the block before it is
#    done. The weights of block $i + 1$ set off when block $i$ starts. Return the seconds from the first gather to the
#    end of the last block.

# %% tags=["exercise"]
cards_of_80_gb = None


def stage_1(weight, gradients, moments, rate):
    """FILL ME IN."""


def forward_seconds(computes, gathers):
    """FILL ME IN."""


# %% Check the exercises tags=["hide-input"]
def of_stage_1(answer):
    torch.manual_seed(2)
    for N in (4, 2, 3):
        weight, m = torch.randn(12), torch.zeros(12)
        moments = [torch.zeros(12 // N) for _ in range(N)]
        for _ in range(3):
            gradients = [torch.randn(12) for _ in range(N)]
            try:
                found = answer(
                    weight.clone(), [g.clone() for g in gradients], moments, 0.1
                )
            except RuntimeError as error:
                raise AssertionError(
                    f"{error}; {N} processes have {N} pieces of {12 // N} numbers"
                ) from error
            if found is None:
                raise NotImplementedError
            if not torch.is_tensor(found):
                raise TypeError(f"it returned a {type(found).__name__}")
            assert found.shape == weight.shape, (
                "the new weight is as long as the old one: put all pieces together"
            )
            assert [len(moment) for moment in moments] == [12 // N] * N, (
                "a moment is as long as a piece"
            )
            of_mean, m = 0.9 * m + sum(gradients) / N, 0.9 * m + sum(gradients)
            after = torch.cat(moments)
            assert not torch.allclose(after, of_mean, atol=1e-5), (
                "you took the mean of the gradients, and not their sum"
            )
            assert torch.allclose(after, m, atol=1e-5), (
                "afterwards moments must hold 0.9 m + g, each of its own piece"
            )
            assert torch.allclose(found, weight - 0.1 * m, atol=1e-5), (
                "a piece moves by the rate times its new moment"
            )
            weight = found


def of_forward(answer):
    drawn = random.Random(0)
    for blocks in (5, 1, 2, *[5] * 20):
        computes, gathers = (
            [drawn.randint(1, 5) for _ in range(blocks)] for _ in range(2)
        )
        if (found := answer(list(computes), list(gathers))) is None:
            raise NotImplementedError
        come, done = gathers[0], 0
        for takes, next_gather in zip(computes, [*gathers[1:], 0], strict=True):
            started = max(come, done)
            come, done = started + next_gather, started + takes
        case = f"it should be {done} s, for {computes} and {gathers}"
        assert found > done - 1e-9, (
            f"{found:.3f} s is too fast: weights set off when the block before "
            f"starts; {case}"
        )
        assert found < done + 1e-9, (
            f"{found:.3f} s is too slow: weights travel while a block runs; {case}"
        )


course.check(
    1,
    cards_of_80_gb,
    course.equal(
        15,
        "all three kinds of bytes count, a card has 80 * 10**9, "
        "and nobody sells a part of a card",
    ),
    "a whole number of cards",
)
course.check(
    2,
    stage_1,
    of_stage_1,
    "a function (weight, gradients, moments, rate) -> the new weight, "
    "a vector as long as weight",
)
course.check(
    3,
    forward_seconds,
    of_forward,
    "a function (computes, gathers) -> a number of seconds",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# cards_of_80_gb = math.ceil(16 * 70_553_706_496 / 80e9)  # 14.1
#
#
# def stage_1(weight, gradients, moments, rate):
#     pieces = []
#     for w, g, m in zip(
#         weight.chunk(len(moments)), sum(gradients).chunk(len(moments)), moments
#     ):
#         m.mul_(0.9).add_(g)
#         pieces.append(w - rate * m)
#     return torch.cat(pieces)
#
#
# def forward_seconds(computes, gathers):
#     come, done = gathers[0], 0.0
#     for number, takes in enumerate(computes):
#         started = max(come, done)
#         done = started + takes
#         if number + 1 < len(gathers):
#             come = started + gathers[number + 1]
#     return done
# ```
#
# </details>
#
# ## In one breath
# - **Saves** $(N - 1) / N$ of weights, gradients and optimizer states: stages 1 and 2 of what trains, stage 3 of
#   everything.
# - **Costs** the blocks' weights twice a micro-batch on the wire, frozen ones too; in memory a whole block and a buffer
#   for the next; a tied embedding stays whole through both passes.
# - **Gradients** reduced after each micro-batch: only pieces wait. Once a step: fewer bytes sent, and whole gradients.
# - **Exact within rounding**, as data parallelism is.
# - **When**: the blocks do not fit one card: full fine-tuning, or a large base, over a fast link.
# - **When not**: LoRA of a model that fits. Its gradients and states are small already, and `ddp` sends a seventieth.
# - **On two cards**: the notebook `notebooks/two_cards.ipynb` measures this lesson on Kaggle's two T4s.
#
# ## Sources
# - Rajbhandari et al. 2020, *ZeRO*, arXiv 1910.02054, figure 1, sections 5 (stages) and 7 (1.5 times the bytes).
# - Zhao et al. 2023, *PyTorch FSDP*, arXiv 2304.11277, section 3.
# - torch 2.13: `torch/distributed/fsdp/_fully_shard` (the root, prefetching). torchtitan: `parallelize.py` of its Llama
#   (the groups; gradients reduced in each micro-batch). accelerate 1.15: `fsdp2_prepare_model` in
#   `accelerate/utils/fsdp_utils.py`. NVIDIA's T4 datasheet, for the rates.
# - Ours: `cria_tricks/parallel/fsdp.py`, `cria_tricks/predict/per_process.py`, `tests/parallel/test_fsdp.py`.
