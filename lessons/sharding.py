# ---
# jupyter:
#   question: If each of two cards keeps only half of every weight, how do they train, and when does the peak fall?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Sharding: each card keeps a piece
# > **Promise.** You get `CUDA out of memory`, add a second GPU, and get it again, because data parallelism puts the
# > whole model on each card. FSDP lets each card keep half of every weight, gradient and optimizer state. You will
# > build it in plain PyTorch, count its bytes, and know beforehand whether it lowers your peak: for full fine-tuning
# > it does, for our small QLoRA job it does not.
# >
# > **Card.** saves $(N - 1) / N$ of the weights, gradients and optimizer states that each of $N$ cards keeps between
# > steps, and less at the peak / costs sending the blocks' weights twice for each micro-batch (forward and backward) /
# > exact within rounding / about 25 minutes / after [data parallelism](data_parallel.py)
#
# ## 1. The bill
# With [data parallelism](data_parallel.py) each of $N$ processes holds the same weights, the same gradients after the
# all-reduce, and the same optimizer states. [ZeRO](../docs/glossary.md#zero), the *zero redundancy optimizer* of
# DeepSpeed, removes the copies in three stages:
#
# 1. A weight's optimizer states are needed only when it is updated. So process $r$ keeps the states of the $r$-th part
#    of the weights, updates this part, and sends it to the others.
# 2. For that it needs only its own part of the gradient.
# 3. A weight is needed only while its block runs. torch's version of stage 3 is
#    [FSDP2](../docs/glossary.md#fsdp), *fully sharded data parallel*.
#
# Here is the example of ZeRO's paper (its figure 1): 7.5 billion weights on 64 cards. Each weight has 2 bytes, and its
# gradient has 2. AdamW takes 12: two states of 4 bytes, and an fp32 copy of the weight.

# %%
# name: (bytes for each weight, the stage from which on the cards divide them)
sizes = {"weights": (2, 3), "gradients": (2, 2), "optimizer states": (12, 1)}


def gigabytes(stage, weights=7.5e9, cards=64):
    """What each card holds after a stage."""
    total = 0
    for size, divided_from in sizes.values():
        share = cards if stage >= divided_from else 1
        total += weights * size / share
    return total / 1e9


for stage in range(4):
    print(f"stage {stage}: {gigabytes(stage):6.1f} GB in each card")

# %% [markdown]
# This is full fine-tuning. In our QLoRA job of Llama-3.2-1B only 11 million weights train, and 1.2 billion are frozen.
# A frozen weight has no gradient and no optimizer states. On one card the job peaks at 1,593 MiB. (The last lesson had
# 1,516, because most of its paged 8-bit states may be on the host. Section 6 asks for 32-bit states.) With stage 3, is
# the peak of each of two cards higher or lower, and what is it?

# %% Your guess: MiB of each card's peak with stage 3 tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import logging
import random
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from bitsandbytes.nn import Linear4bit
from bitsandbytes.optim import AdamW8bit

from cria_tricks import BadInput, Recipe, course
from cria_tricks.course import (
    CARDS,
    T4,
    TRAINED_SHARE,
    CountCollectives,
    Theme,
    ddp,
    diff,
    find_shape,
    folds,
    fsdp,
    marked,
    panels,
    parallel,
    per_process,
    resolve,
    ring_share,
    with_settings,
)
from cria_tricks.course import LINK_REACHED as LINK

KIB, MIB, GIB = 2**10, 2**20, 2**30
assert [round(gigabytes(stage), 1) for stage in range(4)] == [120, 31.4, 16.6, 1.9]

job = with_settings(
    course.CAPSTONE, ["tricks.optimizer=adamw", "tricks.paged_optimizer=false"]
)
whole_model = (
    "peft=none",
    "quantization=none",
    "double_quantization=false",
    "lean_preparation=false",
    "chunked_loss=false",  # it trains no head
)
full = with_settings(job, [f"tricks.{off}" for off in whole_model])
# gradients are summed over the processes once a step
once = with_settings(full, ["parallel.reduce=step"])
# each of two cards has half of the micro-batches
of_one_card = with_settings(job, ["tricks.gradient_accumulation=4"])
shape = find_shape(job.model)
seconds = folds.time_of(
    of_one_card, shape, CARDS["t4"], trained_share=TRAINED_SHARE
).seconds
models = {
    "llama-3.2-1b": job,
    "llama-3.2-3b": job,
    "llama-3.1-8b": job,
    "llama-2-13b": job,
    "llama-3.2-1b, full": full,
}


def bill(recipe, strategy, cards=2, model="llama-3.2-1b"):
    """The bill of the process that needs most."""
    many = 1 if strategy == "none" else cards
    return per_process(recipe, find_shape(model), T4, strategy, many)


def state(recipe, stage):
    """The bytes that each of two cards holds between steps."""
    found = dict.fromkeys(("weights", "gradients", "optimizer states"), 0)
    for line in bill(recipe, "fsdp" if stage == 3 else "none").state:
        found[line.name.partition(":")[0]] += line.bytes
    # fsdp has divided all of it already
    ours = {1: ["optimizer states"], 2: ["optimizer states", "gradients"]}
    for kind in ours.get(stage, []):
        found[kind] /= 2
    return found


# %%
print("MiB in each card, between steps and at the peak")
for name, recipe in {"full": full, "QLoRA": job}.items():
    held = [f"{sum(state(recipe, stage).values()) / MIB:,.0f}" for stage in range(4)]
    peaks = [f"{bill(recipe, way).peak_bytes / MIB:,.0f}" for way in ("none", "fsdp")]
    print(f"{name:6}stages 0 to 3: {', '.join(held)}; peak: {', '.join(peaks)}")
course.reveal(guess, bill(job, "fsdp").peak_bytes / MIB, "MiB")

# %% Draw figure 1, and hold the numbers of the text tags=["hide-input"]
_state = [round(sum(state(job, stage).values()) / MIB) for stage in range(4)]
assert _state[0] - _state[2] == 65
assert (_state[0], _state[3]) == (1152, 583)
_peaks = [bill(r, way).peak_bytes for r in (job, full) for way in ("none", "fsdp")]
assert [round(size / MIB) for size in _peaks] == [1593, 1657, 22661, 14467]
_needs = {n: bill(full, "fsdp", n) for n in (2, 4)}
assert [found.verdict for found in _needs.values()] == ["tight", "fits"]
assert round(_needs[2].least_bytes / GIB, 1) == 14.5
assert round(_needs[2].needed_bytes / GIB, 1) == 18.1


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
        for place in range(4):
            left = 0.0
            for kind, size in state(recipe, place).items():
                size /= GIB
                axes.barh(
                    place,
                    size,
                    left=left,
                    color=kinds[kind],
                    height=0.66,
                    label=kind if place == 0 else None,
                )
                left += size
        axes.set_yticks(range(4), ["no stage", "stage 1", "stage 2", "stage 3"])
        axes.set(xlabel=f"{name}, GiB in each of two", ylim=(3.6, -0.6))
        axes.grid(axis="x")
    both[0].legend(loc="lower right", fontsize=7.5)
    return drawn


course.show(
    of_the_state,
    "Figure 1. Weights, gradients and optimizer states in each of two cards. Stages 1 "
    "and 2 help in full fine-tuning. With QLoRA nearly all bytes are frozen weights, "
    "so only stage 3 helps.",
)

# %% [markdown]
# With QLoRA stages 1 and 2 together save 65 of 1,152 MiB, because few weights train. Stage 3 halves the 1,152 MiB, but
# the *peak* grows from 1,593 to 1,657 MiB, as section 5 explains. In full fine-tuning it falls from 22,661 to 14,467
# MiB. With CUDA's own memory that is 14.5 GiB of a T4's 14.7, and up to 18.1 with what PyTorch's allocator may keep. So
# two T4s are *tight*, and four fit.
#
# ## 2. From scratch, in three steps
# **Step 1: cut the weights.** The toy has four blocks, and the weights of a block are one vector of $E$ numbers.
# Process $r$ of $N$ keeps the $r$-th piece of each vector, and nothing else of the model. `Ranks(2)` starts two
# [processes](../docs/glossary.md#rank), and `ranks.run(f)` calls `f` in both.

# %%
import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from cria_tricks.course import LiveBytes, Ranks

D, H = 64, 256  # width of the model, and inside a block


def new_block():
    return nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Linear(H, D))


def new_model():
    torch.manual_seed(0)  # the same weights in every process
    return nn.Sequential(*(new_block() for _ in range(4)))


def flatten(tensors):
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


shapes = [p.shape for p in new_block().parameters()]
counts = [math.prod(shape) for shape in shapes]
E = sum(counts)  # numbers in a block


def block(vector, x):
    """Run a block, with the weights that lie in the vector."""
    parts = zip(vector.split(counts), shapes, strict=True)
    up, up_bias, down, down_bias = (part.view(shape) for part, shape in parts)
    return F.linear(F.gelu(F.linear(x, up, up_bias)), down, down_bias)


def piece_of(block):
    """The piece of a block's vector that this process keeps."""
    pieces = flatten(block.parameters()).chunk(dist.get_world_size())  # N divides E
    return pieces[dist.get_rank()].clone().requires_grad_()


torch.manual_seed(1)
rows, targets = torch.randn(2, 32, D)
ranks = Ranks(2)

# %% Silence log messages in both processes tags=["hide-input"]
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
_ = ranks.run(warnings.simplefilter, "ignore")  # torch renames some collectives

# %% [markdown]
# **Step 2: gather the weights, and scatter the gradients.** An [all-gather](../docs/glossary.md#all-reduce) gives every
# process all pieces, so that each can run the block on its own rows. The backward pass then gives it the gradient of
# the *whole* block, for these rows. A *reduce-scatter* adds up the gradients of all processes and gives each its piece
# of the sum. So the reduce-scatter is the backward pass of the all-gather: a piece goes to all processes, and the sum
# of their gradients comes back. `passes` below runs the model forward and backward, and counts the bytes in memory.


# %%
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


gather = Gather.apply


def gather_once(piece, x):
    return block(gather(piece), x)


def passes(run_block):
    """The gradients of the pieces, and KiB between the passes and at the peak."""
    pieces = [piece_of(block) for block in new_model()]
    x = rows[dist.get_rank() :: dist.get_world_size()]
    count = LiveBytes()
    count.track_all(pieces)
    before = count.live  # the pieces themselves are not counted
    with count:
        for piece in pieces:
            x = run_block(piece, x)
        loss = x.square().sum()
        time.sleep(0.2)  # gloo holds what it sent for a moment longer
        between = count.live
        loss.backward()
    memory = [(size - before) / 1024 for size in (between, count.peak)]
    return flatten(piece.grad for piece in pieces), memory


kept, memory_kept = ranks.run(passes, gather_once)[0]
print(f"all weights have {4 * 4 * E / 1024:,.0f} KiB")
print("between the passes {:,.0f} KiB, at the peak {:,.0f}".format(*memory_kept))

# %% [markdown]
# So far nothing is saved: after the forward pass all blocks are whole in memory. A matrix multiplication saves its
# inputs for the backward pass ([checkpointing](gradient_checkpointing.py)). One of them is the weight, so all gathered
# weights stay.
#
# **Step 3: free the weights, and gather them again.** With `saved_tensors_hooks` torch lets us choose what is saved
# instead of a tensor. For a part of the gathered vector we save only its place: shape, strides and offset. When the
# backward pass asks for it, we gather the block's vector again.


# %%
def gather_twice(piece, x):
    whole, again = gather(piece), []
    address = whole.untyped_storage().data_ptr()

    def save(tensor):
        if tensor.untyped_storage().data_ptr() != address:
            return tensor  # no part of the gathered vector
        return tensor.size(), tensor.stride(), tensor.storage_offset()

    def load(saved):
        if torch.is_tensor(saved):  # else a shape, strides and an offset
            return saved
        if not again:  # only once for all matrices of the block
            again.append(gather(piece.detach()))
        return again[0].as_strided(*saved)

    with torch.autograd.graph.saved_tensors_hooks(save, load):
        return block(whole, x)


runs = [ranks.run(passes, gather_twice)[0] for _ in range(5)]  # gloo disturbs some
freed, memory_freed = min(runs, key=lambda run: run[1])
print("between the passes {:,.0f} KiB, at the peak {:,.0f}".format(*memory_freed))
assert memory_kept[0] - memory_freed[0] == 4 * 4 * E / 1024  # 4 blocks in fp32
assert torch.equal(freed, kept)  # and not one bit of the gradients has changed


# %% Compare with one process, and draw figure 2 tags=["hide-input"]
_model = new_model()
_model(rows).square().sum().backward()
_expected = [flatten(p.grad for p in block.parameters()) for block in _model]
_found = [gradients for gradients, _ in ranks.run(passes, gather_twice)]
_found = [torch.cat(two) for two in zip(*(g.chunk(4) for g in _found), strict=True)]
_whole, _pieces = 4 * E / KIB, 4 * 4 * E / 2 / KIB  # of a block; of all blocks
assert [round(size) for size in (_whole, _pieces)] == [129, 258]
assert [round(memory_freed[at]) for at in (0, 1)] == [144, 521]
assert 0 <= memory_freed[1] - (_pieces + 2 * _whole) < 5
for _ours, _right in zip(_found, _expected, strict=True):
    assert (_ours - _right).norm() < 1e-5 * _right.norm()


def over_time(theme: Theme):
    """What of each block process 0 holds, moment by moment."""
    sketch = course.Sketch(theme, 42, 12.4)
    moments = [("forward", n) for n in range(4)]
    moments += [("backward", n) for n in (3, 2, 1, 0)]
    for column, (way, opened) in enumerate(moments):
        left = 7 + 4.3 * column + (0.7 if way == "backward" else 0)
        for number in range(4):
            y = 1.6 + 2.5 * number
            if number == opened:
                sketch.tensor(left, y, 3.6, 2, "all", color=1)
            else:
                sketch.tensor(left, y, 1.8, 2, "", color=0)
    sketch.text(15, 0.7, "forward pass", quiet=True)
    sketch.text(33, 0.7, "backward pass", quiet=True)
    for number in range(4):
        sketch.text(0, 2.6 + 2.5 * number, f"block {number + 1}", align="left")
    return sketch.figure


course.show(
    over_time,
    "Figure 2. What process 0 of 2 has in memory, time to the right. It keeps half of "
    "every block, and the block that runs is whole: once in the forward pass and once "
    "in the backward pass.",
)

# %% [markdown]
# The gradients are the same, bit for bit, and between the passes no weights are whole: the 144 KiB are saved
# activations. The peak of 521 KiB comes when the last gradient is scattered. It holds the gradients of all pieces (258
# KiB), one whole gradient (129), gloo's copy of it (129), and 4 of small tensors. This is stage 3 of ZeRO. torch's
# `fully_shard` has the same effect, and it *prefetches*: it gathers the next block while this one computes.
#
# ## 3. Prove it
# The claim is *exact within rounding*, with half of the bytes between steps. We train 20 AdamW steps in one process,
# and in two with the package's `Sharded` (our three steps for any module) and with torch's `fully_shard`. AdamW treats
# each weight by itself, so it can update a piece as it updates a matrix. `fully_shard` takes the *mean* of the
# gradients, so its loss is multiplied by $N$.


# %%
def train(way):
    """Losses, bytes of weights, gradients and states in this process, bytes sent."""
    from torch.distributed.fsdp import fully_shard

    rank = 0 if way == "alone" else dist.get_rank()
    N = 1 if way == "alone" else dist.get_world_size()
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
            (N * loss if way == "torch" else loss).backward()
            history.append(loss.item())
            optimizer.step()
    held = [*model.parameters(), *(p.grad for p in model.parameters())]
    for state in optimizer.state.values():
        held += [state["exp_avg"], state["exp_avg_sq"]]
    # a DTensor of torch holds its piece as _local_tensor
    size = sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in held)
    return torch.tensor(history), size, dict(sent.bytes)


history, alone_bytes, _ = train("alone")
print(f"alone   {alone_bytes:,} bytes, loss {history[0]:.4f} -> {history[-1]:.4f}")
for way in ("package", "torch"):
    (mine, piece_bytes, sent), (others, _, _) = ranks.run(train, way)
    print(f"{way:8}{piece_bytes:,} bytes; sent {sent}")
    assert torch.allclose(mine + others, history, rtol=1e-5)
    assert piece_bytes == alone_bytes / 2
assert sent == {"all_gather": 20 * 2 * 4 * 4 * E, "reduce_scatter": 20 * 4 * 4 * E}

# %% [markdown]
# ## 4. What it costs
# **The link.** The last line of the proof counted what travels in each step: two all-gathers of the weights, and one
# reduce-scatter of their gradients. The all-reduce of data parallelism is one of each, so sharding sends 1.5 times as
# much (ZeRO, section 7).
#
# This factor holds for full fine-tuning with one micro-batch a step. In our job most weights are frozen, so DDP sends
# little. For each of a card's four micro-batches FSDP sends the blocks with their adapters twice, and the embedding
# once, all as they are stored. How many times the bytes of DDP is that?

# %% Your guess: times the bytes of DDP tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
megabytes = {}
for name, way in {"ddp": ddp, "fsdp": fsdp}.items():
    megabytes[name] = sum(call.sent for call in way.traffic(job, shape, 2)) / 1e6
    on_link = 1e6 * megabytes[name] / (CARDS["t4"].link_rate * LINK)
    print(
        f"{name:5}{megabytes[name]:6,.0f} MB: {on_link:.3f} s of a step's {seconds:.1f}"
    )
course.reveal(guess, megabytes["fsdp"] / megabytes["ddp"], "times")

# %% Hold the numbers of the text tags=["hide-input"]
assert 70 < megabytes["fsdp"] / megabytes["ddp"] < 75
assert on_link / seconds < 0.05
_calls = {call.why: call.sent / 1e6 for call in fsdp.traffic(job, shape, 2)}
assert [round(size) for size in _calls.values()] == [1064, 1064, 90, 1051]
_of_full = sum(call.sent for call in fsdp.traffic(full, shape, 2))
_of_half = sum(
    call.sent / (2 if call.kind == "all_gather" else 1)
    for call in fsdp.traffic(full, shape, 2)
)
assert round(1 - _of_half / _of_full, 2) == 0.32  # if weights travelled in 16 bits
_full_step = folds.time_of(
    with_settings(full, ["tricks.gradient_accumulation=4"]),
    shape,
    CARDS["t4"],
    trained_share=TRAINED_SHARE,
).seconds
_full_link = _of_full / (CARDS["t4"].link_rate * LINK)
print(
    f"full fine-tuning: {_of_full / 1e6:,.0f} MB, {_full_link:.1f} s, next to "
    f"{_full_step:.1f} s of computing"
)
assert (round(_full_link, 1), round(_full_step, 1)) == (2.3, 9.1)
_with_fsdp = 2 * ring_share("all_gather", 2) + ring_share("reduce_scatter", 2)
assert _with_fsdp == 1.5 * ring_share("all_reduce", 2)

# %% [markdown]
# These are 2,127 MB of blocks in 4 bits, 1,051 of the 16-bit embedding, and 90 of gradients (four sums): over seventy
# times the bytes of DDP, but less than a twentieth of the step. Full fine-tuning gathers fp32, as stored (16 bits are
# in the next fold), and takes 2.3 s next to 9.1 s of computing, unless prefetching overlaps them. (Predicted, at 12.2
# GB a second on PCIe 3.0.)

# %% [markdown] tags=["deep"]
# ### Deeper: when gradients are reduced, and what that does to the peak and the link
# Gradients can be *reduced* (summed over the processes) once a step. Then each process keeps whole gradients until the
# last micro-batch. Or they are reduced after each micro-batch, so that a process keeps only pieces. That is our default
# (`parallel.reduce=micro_batch`). In full fine-tuning it halves the gradients at the peak, and 37 % more bytes travel.
# QLoRA has so few gradients that it does not matter. If the link is slow and the card has room, choose
# `parallel.reduce=step`. With it full fine-tuning of our model does not fit two T4s at all, and is tight on four.
#
# `MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)`, an argument of `fully_shard`, gathers
# 16 bits. Then 32 % fewer bytes travel in full fine-tuning, and whole weights take half at the peak. But it casts
# norms, too, so the losses are not those of one process. Therefore our switch gathers weights as they are stored.
#
# Gradient clipping also differs from a single process, because it looks at the norm of all gradients. So the processes
# add up the squares of their pieces' norms, and take the square root of the sum.

# %% tags=["deep"]
for name, recipe, each in (
    ("once a step", once, 4),
    ("after each micro-batch", full, 2),
):
    size = sum(
        line.bytes for line in bill(recipe, "fsdp").lines if line.name == "gradients"
    )
    print(f"full, reduced {name}: {size / MIB:,.0f} MiB of gradients at the peak")
    assert size == each * shape.weights
for name, recipe in {"QLoRA": job, "full": full}.items():
    both = (with_settings(recipe, ["parallel.reduce=step"]), recipe)
    step, each = (
        sum(call.sent for call in fsdp.traffic(one, shape, 2)) for one in both
    )
    print(f"{name:6} {step / 1e6:,.0f} MB a step, or {each / 1e6:,.0f}")
    assert round(each / step, 2) == {"QLoRA": 1.02, "full": 1.37}[name]

# %% [markdown]
# ## 5. The production switch
# `fully_shard` is called on *groups* of weights. A group is gathered when it runs, and freed after it:

# %%
print(fsdp.PLAIN)
shared = with_settings(job, ["parallel.strategy=fsdp"])
print(diff(resolve(job, T4), resolve(shared, T4, processes=2)))

# %% [markdown]
# Every block is a group, and so are embedding and head if they are two matrices. If one matrix is both (a *tied*
# embedding, as in Llama-3.2-1B), it belongs to the last call, and stays whole through both passes. Our trainer loads
# the whole model on each card before it cuts it. The command for full fine-tuning:
#
# ```bash
# cria launch kwanzaa --on torchrun --nproc 2 \
#     --set parallel.strategy=fsdp --set tricks.optimizer=adamw \
#     --set tricks.paged_optimizer=false --set tricks.gradient_checkpointing=true \
#     --set tricks.peft=none --set tricks.quantization=none \
#     --set tricks.double_quantization=false
# ```
#
# For QLoRA, replace the last three settings by `tricks.chunked_loss=true`. `cria plan kwanzaa --gpu t4 --nproc 2` with
# the same settings prints the bill. The table shows the switch's worth: the least that each card needs, with CUDA's own
# memory.

# %%
needs = {}
print(f"{'GiB in each of':18}    1 card    2 cards    4 cards    8 cards")
for name, recipe in models.items():
    needs[name] = []
    for cards in (1, 2, 4, 8):
        strategy = "fsdp" if cards > 1 else "none"
        found = bill(recipe, strategy, cards, name.partition(",")[0])
        needs[name].append(found.least_bytes / GIB)
    print(f"{name:18}" + "".join(f"{size:11.2f}" for size in needs[name]))

# %% Draw figure 3, and hold the numbers of the text tags=["hide-input"]
assert needs["llama-3.2-1b"][1] > needs["llama-3.2-1b"][0] > needs["llama-3.2-1b"][2]
_PIECES = ("weights: blocks", "weights: all others", "weights: adapter")
_arrives = bill(job, "fsdp").peak
assert _arrives.name == "first block arrives"
_sizes = {line.name: line.bytes / MIB for line in _arrives.lines}
_embedding = 2 * shape.vocabulary * shape.width / MIB
assert round(_embedding) == 501
assert round(sum(_sizes[name] for name in _PIECES)) == 519
assert round(_sizes["gradients"] + _sizes["optimizer states"]) == 64
assert round(_sizes["weights: unsharded"] - 2 * _embedding) == 63
assert [round(1 - needs["llama-3.2-3b"][1] / needs["llama-3.2-3b"][0], 2)] == [0.09]
for name, less in {"llama-3.1-8b": 0.15, "llama-2-13b": 0.36}.items():
    assert round(1 - needs[name][1] / needs[name][0], 2) == less
_of_once = [bill(once, "fsdp", n).least_bytes / GIB for n in (2, 4)]
assert needs["llama-3.2-1b, full"][1] < T4.memory_bytes / GIB < _of_once[0]
assert _of_once[1] < T4.memory_bytes / GIB


def of_needs(theme: Theme):
    """What each card must have, against the number of cards."""
    drawn, axes = course.figure(height=3.2)
    for number, (name, sizes) in enumerate(needs.items()):
        line = {"linestyle": "--"} if name.endswith("full") else {}
        axes.plot((1, 2, 4, 8), sizes, **marked(theme, number) | line, label=name)
    axes.axhline(
        T4.memory_bytes / GIB, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3))
    )
    axes.text(
        4, T4.memory_bytes / GIB + 0.4, "a T4 has 14.7", color=theme.alarm, ha="center"
    )
    axes.set_xscale("log", base=2)
    axes.set_xticks((1, 2, 4, 8), ["1", "2", "4", "8"])
    axes.set(xlabel="cards", ylabel="needed in each, GiB", ylim=(0, None))
    axes.grid(axis="y")
    axes.legend(fontsize=7.5)
    return drawn


course.show(
    of_needs,
    "Figure 3. Predicted least need of each card. Full fine-tuning of a billion "
    "weights (dashed blue) is tight on two T4s, and fits four. QLoRA of the same model "
    "needs more with a second card, but QLoRA of larger models needs less.",
)

# %% [markdown]
# With our job each of two cards needs *more* than one card alone, because the peak moves to the beginning of the
# forward pass. There the tied embedding (501 MiB) is whole twice: as a weight, and as the buffer in which it arrived.
# With 519 MiB of pieces, 64 of gradients and states, 63 of the first block (also twice), and 9 of the rest, that is
# 1,657 MiB. So two cards save half of weights and states, but add this embedding twice. Llama-3.2-3B needs only 9 %
# less, Llama-2-13B with its large blocks 36 %, and Llama-3.1-8B 15 %, because only one of its two large matrices is
# whole at a time.

# %% [markdown] tags=["deep"]
# ### Deeper: how much the groups matter
# A toy has an embedding and a head of 16 MiB each. First both belong to the call on the whole model, and then each is a
# group of its own. The second way saves about 30 MiB at the peak, with the same loss.
# (`reshard_after_forward=False` keeps the head whole after the forward pass, because the backward pass begins with it.)
#
# In the Trainer the switch is `fsdp=True`, and transformers chooses the blocks as groups. With `fp16=True` or
# `bf16=True` accelerate then gathers and reduces in 16 bits. DeepSpeed, which the Trainer takes as `deepspeed=`, has
# all three stages. We have tried neither.


# %% tags=["deep"]
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


(together, one_loss), (own, other_loss) = (
    ranks.run(toy_peak, own_groups)[0] for own_groups in (False, True)
)
print(
    f"with the whole model: peak {together / MIB:.1f} MiB; "
    f"as groups of their own: {own / MIB:.1f}"
)
assert one_loss == other_loss
# a busy machine may free a buffer late, so not all of the 31 MiB are asserted
assert own < together - 28 * MIB

# %% [markdown]
# ## 6. Where it breaks
# **`got mixed torch.Tensor and DTensor`.** `fully_shard` turns each weight into a
# [DTensor](../docs/glossary.md#dtensor): a piece that knows of the whole. torch's operations take DTensors, but the
# kernels of bitsandbytes, such as [8-bit AdamW](optimizers.py), do not. The cure is `tricks.optimizer=adamw`, whose
# 32-bit states the cards divide among them.


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


print(ranks.run(eight_bits)[0])

# %% Our switch refuses it tags=["hide-input"]
assert "got mixed torch.Tensor and DTensor" in ranks.run(eight_bits)[0]
try:
    resolve(with_settings(course.CAPSTONE, ["parallel.strategy=fsdp"]), T4, processes=2)
    raise AssertionError("it must be refused")
except BadInput as refused:
    print(refused)

# %% [markdown] tags=["deep"]
# ### Deeper: a higher peak in the real trainer, and 4-bit weights that stay whole
# **More cards, and a higher peak.** The real trainer, in fp32, trains a tiny Llama with 49,152 words of width 256 and
# a tied embedding. Each process holds the whole embedding in addition to its own half of it. So the peak grows by
# about half an embedding, and the losses are equal. The cure: look at the bill first, and take `ddp` if one card holds
# the run.

# %% tags=["deep"]
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
    from cria_tricks import train
    from cria_tricks.course import Aside

    console = Aside()
    console.quiet = True
    report = train(with_settings(Recipe(), settings), out, console=console)
    return [entry["loss"] for entry in report["history"] if "loss" in entry], report[
        "peak_bytes"
    ]


one, one_peak = train_it(tiny, Path(folder.name) / "one")
two, two_peak = ranks.run(
    train_it, [*tiny, "parallel.strategy=fsdp"], Path(folder.name) / "two"
)[0]
folder.cleanup()
for name, losses, peak in (("alone", one, one_peak), ("sharded", two, two_peak)):
    print(
        f"{name:8}", *(f"{loss:.6f}" for loss in losses), f" peak {peak / 1e6:.1f} MB"
    )
half = 4 * 49_152 * 256 / 2
print(
    f"grown by {(two_peak - one_peak) / 1e6:.1f} MB; "
    f"half an embedding is {half / 1e6:.1f}"
)
assert all(abs(p / q - 1) < 1e-5 for p, q in zip(one, two, strict=True))
assert two_peak - one_peak > 0.9 * half

# %% [markdown] tags=["deep"]
# **A warning, and nothing is sharded.** The FSDP2 of accelerate leaves 4-bit weights whole if they are stored as bytes.
# That is the default of bitsandbytes, and the base of QLoRA consists of such weights. The cure there is
# `bnb_4bit_quant_storage`, a float type that holds the same bits. `fully_shard` of torch 2.13 takes bytes as they are.
# (torch 2.11 needs a patch, which is `bytes_allowed` below.)


# %% tags=["deep"]
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
            with fsdp.bytes_allowed():  # only torch 2.11 needs it
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
# 1. **Predict.** Llama-3.1-70B has 70,553,706,496 weights. In full fine-tuning by stage 3 each has 2 bytes, 2 bytes of
#    gradient and 12 of optimizer states, as in ZeRO's example. How many whole cards of 80 GB ($80 \cdot 10^9$ bytes) do
#    these need, if activations are free?
# 2. **Build.** Stage 1, in one process. Fill in `stage_1(weight, gradients, moments, rate)`. `weight` is a vector.
#    `gradients` holds one vector of that length for each of $N$ processes. `moments` holds one vector for each of the
#    $N$ *pieces* of the weight, and you change it in place. Add up the gradients. Then update each piece by SGD with
#    momentum ($m \leftarrow 0.9\,m + g$, then $w \leftarrow w - \text{rate} \cdot m$), and return all pieces together,
#    as one new weight. ($N$ divides the length.)
# 3. **Reach.** Prefetching. Fill in `forward_seconds(computes, gathers)`, for two lists of seconds: the gather of
#    block $i$ takes `gathers[i]`, and running it takes `computes[i]`. A block starts when its weights have arrived and
#    the block before it is done. The gather of block $i + 1$ begins when block $i$ starts. Return the seconds from the
#    beginning of the first gather to the end of the last block.

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
# - **Saves** $(N - 1) / N$ of weights, gradients and optimizer states. Stages 1 and 2 divide only what trains, stage 3
#   divides everything.
# - **Costs** the blocks' weights on the link, twice a micro-batch, frozen ones too. In memory it costs a whole block
#   and a buffer for the next. A tied embedding is whole in both passes, and for a moment twice.
# - **Exact within rounding**, as data parallelism is.
# - **When**: the blocks do not fit one card (full fine-tuning, or a large base), and the link is fast.
# - **When not**: LoRA of a model that fits. Its gradients and states are small already, and `ddp` sends a seventieth.
# - **On two cards**: the notebook `notebooks/two_cards.ipynb` measures this lesson on Kaggle's two T4s.
#
# ## Sources
# - Rajbhandari et al. 2020, *ZeRO*, arXiv 1910.02054, figure 1, sections 5 (stages) and 7 (1.5 times the bytes).
# - Zhao et al. 2023, *PyTorch FSDP*, arXiv 2304.11277, section 3.
# - torch 2.13: `torch/distributed/fsdp/_fully_shard` (groups, prefetching). torchtitan: `parallelize.py` of its Llama
#   (its groups; gradients reduced in each micro-batch). accelerate 1.15: `fsdp2_prepare_model` in
#   `accelerate/utils/fsdp_utils.py`. NVIDIA's T4 datasheet, for the rates.
# - Ours: `cria_tricks/parallel/fsdp.py`, `cria_tricks/predict/per_process.py`, `tests/parallel/test_fsdp.py`.
