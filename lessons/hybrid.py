# ---
# jupyter:
#   question: With eight cards and three ways to share a training step, which cards should share rows, which ones
#     blocks, and which ones matrices?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Hybrid: a grid of processes
# > **Promise.** A model with 70 billion weights does not fit one card, so several cards must share one copy of it.
# > Eight cards can divide the work in ten ways. A bad choice takes 1.6 times as long, and a mistake trains a wrong
# > model without an error. You will write one training loop for all ways, prove it right, and predict which way is
# > fastest.
# >
# > **Card.** saves memory where cards share blocks and matrices, and time where they share rows / costs what each way
# > sends, over the link that it gets / exact within rounding / about 25 minutes / after
# > [tensor parallelism](tensor_parallel.py) and [pipeline parallelism](pipeline_parallel.py)
#
# Our own job, QLoRA of Llama-3.2-1B, fits one T4. So we also take a larger job: LoRA of Llama-3.1-70B in bf16 (our
# tensor parallelism refuses 4-bit weights), on two machines with four A100s of 40 GB each. NVLink connects the cards of
# a machine, and InfiniBand the machines: one HDR port for each card, about a tenth as fast.
#
# ## 1. The bill
# The lessons before divided a step in three ways:
#
# - [Data parallelism](data_parallel.py) divides the [rows](../docs/glossary.md#row). It saves time, but every card
#   holds the whole model.
# - [Pipeline parallelism](pipeline_parallel.py) divides the blocks. Each *stage* holds some of them.
# - [Tensor parallelism](tensor_parallel.py) divides the matrices inside each block.
#
# *Hybrid parallelism* combines them in a grid with three dimensions: *data*, *stage* and *tensor*. In a grid
# $N$ x $S$ x $M$, $N$ groups share the rows, each group is a pipeline of $S$ stages, and $M$ processes share the
# matrices of a stage. A process holds about $1 / (S M)$ of the weights.
#
# Eight is a product of three numbers in ten ways, such as 2 x 2 x 2. The 70.6 billion weights of two bytes take 131
# GiB, and a card has 39.4 GiB. In how many of the ten grids does the job fit?

# %% Your guess: grids that fit, of ten tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports, settings, and the bill of a process tags=["hide-input"]
import logging
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets
# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

import cria_tricks
from cria_tricks import BadInput, Recipe, course, recipes, train
from cria_tricks.course import (
    CARDS,
    LINKS,
    Aside,
    Call,
    CountCollectives,
    Theme,
    average_gradients,
    compute_seconds,
    ddp_tensor,
    diff,
    find_shape,
    fsdp,
    hybrid,
    hybrid_demo,
    per_process,
    quiet_libraries,
    resolve,
    table,
    tensor_parallel,
    with_settings,
)
from cria_tricks.course import local_part as local
from cria_tricks.course import pipeline_parallel as pipeline

quiet_libraries()
GIB = 2**30
A100 = CARDS["a100"].device
without = [
    "quantization=none",
    "double_quantization=false",
    "optimizer=adamw",
    "paged_optimizer=false",
]
ours = with_settings(recipes.capstone(A100), [f"tricks.{one}" for one in without])
large = with_settings(ours, ["model=llama-3.1-70b"])
WAYS = "data x stage x tensor"


def name(sizes):
    return " x ".join(map(str, sizes.values()))


def share(recipe, sizes):
    """The recipe and shape of what a process computes: its part of the 8 micro-batches,
    and of heads and MLPs."""
    mine = with_settings(recipe, [f"tricks.gradient_accumulation={8 // sizes['data']}"])
    return local(mine, find_shape(recipe.model), "tensor", sizes["tensor"])


def bill(recipe, sizes, card="a100"):
    """The predicted bill of a process, in the stage that needs most."""
    mine, shape = share(recipe, sizes)  # its micro-batches, its part of the matrices
    S = sizes["stage"]
    strategy = "pipeline" if S > 1 else "none"
    return per_process(mine, shape, CARDS[card].device, strategy, S)


GRIDS = []
for N in (1, 2, 4, 8):
    for S in (1, 2, 4, 8):
        if N * S <= 8:
            GRIDS.append({"data": N, "stage": S, "tensor": 8 // (N * S)})

# %%
lines = []
for sizes in GRIDS:
    of_70b, of_1b = bill(large, sizes), bill(ours, sizes)
    needs = [f"{found.least_bytes / GIB:.1f}" for found in (of_70b, of_1b)]
    lines.append((name(sizes), *needs, of_70b.verdict))
columns = (WAYS, "70B, GiB in each card", "1B, GiB in each card", "70B")
course.show_table(table(columns, lines))
fitting = [sizes for sizes in GRIDS if bill(large, sizes).fits]
course.reveal(guess, len(fitting), "grids")

# %% Draw figure 1, and hold the numbers of the text tags=["hide-input"]
assert len(fitting) == 6
assert all(bill(ours, sizes).fits for sizes in GRIDS)
_cube = bill(large, {"data": 2, "stage": 2, "tensor": 2})
assert _cube.verdict == "tight"
assert _cube.needed_bytes > A100.memory_bytes
assert [bill(large, sizes).verdict for sizes in GRIDS].count("tight") == 2
_quarter = find_shape(large.model).weights * 2 / 4 / GIB
assert round(_quarter) == 33
_two_by_four = bill(large, {"data": 2, "stage": 1, "tensor": 4})
assert round(_two_by_four.least_bytes / GIB, 1) == 40.9
_whole = {line.name: round(line.bytes / GIB, 1) for line in _two_by_four.lines}
assert (_whole["weights: all others"], _whole["saved activations"]) == (3.9, 2.5)
assert (find_shape(large.model).heads, find_shape(large.model).kv_heads) == (64, 8)


def memory_of_grids(theme: Theme):
    """What a process needs, grid by grid, against what an A100 has."""
    drawn, axes = course.figure(height=3.4)
    sizes_of = [bill(large, sizes).least_bytes / GIB for sizes in GRIDS]
    has = A100.memory_bytes / GIB
    colours = [theme.series[0] if size <= has else theme.quiet for size in sizes_of]
    axes.barh(range(10), sizes_of, color=colours, height=0.66)
    for place, size in enumerate(sizes_of):
        # to the right of the line, which would strike the words
        axes.text(max(size, has), place, f" {size:.1f}", va="center", color=theme.ink)
    axes.axvline(has, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(has, -0.95, f" an A100 has {has:.1f} GiB", color=theme.alarm, va="center")
    axes.set_yticks(range(10), [name(sizes) for sizes in GRIDS])
    axes.set(xlabel="needed by a process, GiB", ylabel=WAYS, ylim=(9.6, -1.5))
    axes.grid(axis="x")
    return drawn


course.show(
    memory_of_grids,
    "Figure 1. LoRA of Llama-3.1-70B on eight cards: the predicted need of each card. "
    "Six of ten grids (blue) fit an A100, which has 39.4 GiB; the grey ones do not.",
)

# %% [markdown]
# Six fit (predicted), but two of them are *tight*: what PyTorch's allocator may [reserve](../docs/glossary.md#reserved)
# could take them above 39.4 GiB. A quarter of the weights is 33 GiB, but 2 x 1 x 4 needs 40.9 GiB, because our tensor
# parallelism keeps embedding and head (3.9 GiB) and the inputs of blocks (2.5 GiB) whole in every process.
#
# ## 2. From scratch, in three steps
# **Step 1: find the coordinates.** At first a process knows only its [rank](../docs/glossary.md#rank). The last
# dimension counts fastest: in 2 x 2 x 2, rank 5 is $1 \cdot 4 + 0 \cdot 2 + 1$, so its *coordinates* are 1, 0 and 1.
# Along each dimension, a process talks to those whose coordinates differ from its own in this dimension only.

# %%
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from cria_tricks.course import Ranks


def coordinates(rank, sizes):
    found = {}
    for dimension, size in reversed(sizes.items()):
        rank, found[dimension] = divmod(rank, size)
    return {dimension: found[dimension] for dimension in sizes}


def group_of(rank, dimension, sizes):
    """The ranks that differ from this one in one dimension only, and itself."""
    mine = coordinates(rank, sizes)
    group = []
    for other in range(math.prod(sizes.values())):
        theirs = coordinates(other, sizes)
        if all(theirs[d] == mine[d] for d in sizes if d != dimension):
            group.append(other)
    return group


cube = {"data": 2, "stage": 2, "tensor": 2}
print("rank 5 of 8:", coordinates(5, cube))
for dimension in cube:
    print(f"its {dimension} group: {group_of(5, dimension, cube)}")

# %% Draw figure 2, and compare with the package tags=["hide-input"]
assert {d: group_of(5, d, cube) for d in cube} == hybrid.lines(5, cube)


def eight(theme: Theme):
    """A cube of eight processes on two machines: who talks to whom."""
    sketch = course.Sketch(theme, 44, 16.4)
    at = {}
    for rank in range(8):
        where = coordinates(rank, cube)
        x, y = (
            4 + 22 * where["data"] + 9.6 * where["tensor"],
            2.6 + 6.6 * where["stage"],
        )
        at[rank] = (x, y)
        sketch.tensor(x, y, 5, 2.6, f"rank {rank}", color=3)
    for machine in (0, 1):
        sketch.tensor(2.4 + 22 * machine, 1.2, 18, 12, "", color=3, kept=False)
        sketch.text(
            11.4 + 22 * machine,
            0.5,
            f"machine {machine}: rows of group {machine}",
            quiet=True,
        )
    for rank, (x, y) in at.items():
        where = coordinates(rank, cube)
        if where["tensor"] == 0:
            sketch.arrow((x + 5.1, y + 1.3), (x + 9.5, y + 1.3), color=0)
            sketch.arrow((x + 9.5, y + 1.3), (x + 5.1, y + 1.3), color=0)
        if where["stage"] == 0:
            sketch.arrow((x + 2.5, y + 2.7), (x + 2.5, y + 6.5), color=1)
            sketch.arrow((x + 2.5, y + 6.5), (x + 2.5, y + 2.7), color=1)
    for y, pairs in ((3.9, "0-4, 1-5"), (10.5, "2-6, 3-7")):
        sketch.text(22.4, y - 0.9, pairs)
        sketch.arrow((20.6, y), (24.2, y), color=2)
        sketch.arrow((24.2, y), (20.6, y), color=2)
    words = (
        ("tensor: in every block", 0),
        ("stage: every micro-batch", 1),
        ("data: once a step", 2),
    )
    for place_, (says, colour) in enumerate(words):
        sketch.arrow((3 + 14 * place_, 15.2), (5.4 + 14 * place_, 15.2), color=colour)
        sketch.text(5.9 + 14 * place_, 15.2, says, align="left")
    return sketch.figure


course.show(
    eight,
    "Figure 2. The grid 2 x 2 x 2 on two machines, and how often the processes of each "
    "dimension talk. The last dimension (tensor) has neighbouring ranks, so it stays "
    "inside a machine. Only data groups, such as ranks 0 and 4, cross.",
)

# %% [markdown]
# **Step 2: let torch make the groups.** torch calls such a grid a [device mesh](../docs/glossary.md#mesh). For each
# dimension it makes a [process group](../docs/glossary.md#process-group). An all-reduce with `group=` adds up tensors
# of that group only. We compare them with ours for all six grids of four processes.

# %%
# data and stage of each grid of four; tensor is what remains
PAIRS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1))
FOURS = [{"data": N, "stage": S, "tensor": 4 // (N * S)} for N, S in PAIRS]


def new_groups(sizes):
    """A process group for each dimension, for this process."""
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return {dimension: mesh.get_group(dimension) for dimension in sizes}


def same_groups(sizes):
    for dimension, group in new_groups(sizes).items():
        ours = group_of(dist.get_rank(), dimension, sizes)
        if dist.get_process_group_ranks(group) != ours:
            return False
    return True


ranks = Ranks(4)  # four processes on this computer, joined by gloo
for sizes in FOURS:
    print(*sizes.values(), "the same groups:", ranks.run(same_groups, sizes))
    assert all(ranks.run(same_groups, sizes))

# %% Silence log messages in all processes tags=["hide-input"]
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
_ = ranks.run(quiet_libraries)

# %% [markdown]
# **Step 3: do one task for each dimension.** The toy model has four blocks, each an MLP. A process holds the blocks of
# its stage, and of each matrix the piece for its *tensor* coordinate.
#
# - *tensor*: each process computes a part of a sum, so an all-reduce adds up the parts at the end of each block. All
#   processes use the same `n`, each with its own piece of `up`, so the gradient of `n` is such a sum, too. A hook adds
#   it up, on `n` only, because `x` also goes around the MLP.
# - *stage*: a process receives hidden states from the stage before, and sends its own to the next one. In the backward
#   pass gradients go the other way.
# - *data*: a process takes its share of the [window](../docs/glossary.md#window). An all-reduce adds up the gradients,
#   once a step.

# %%
D, INNER = 16, 32  # width of the model, and inside a block


def my_weights(at, sizes):
    """The weights of the process with these coordinates."""
    torch.manual_seed(0)  # the same model in every process
    mine = []
    for number in range(4):
        up, down = torch.randn(INNER, D) / D**0.5, torch.randn(D, INNER) / INNER**0.5
        if number * sizes["stage"] // 4 == at["stage"]:  # 2 stages: 0-1 and 2-3
            mine.append(up.chunk(sizes["tensor"], dim=0)[at["tensor"]])
            mine.append(down.chunk(sizes["tensor"], dim=1)[at["tensor"]])
    return [weight.clone().requires_grad_() for weight in mine]


def summed(x, group):
    """The sum over a group. Autograd sees only the copy, so the gradient passes
    unchanged. That is right, because each part enters the sum with factor 1."""
    total = x.clone()
    dist.all_reduce(total.data, group=group)
    return total


def run_blocks(x, weights, group):
    """Run the blocks of a stage; the processes of the group share their matrices."""
    for up, down in zip(weights[::2], weights[1::2], strict=True):
        n = F.rms_norm(x, (D,))
        if n.requires_grad:
            n.register_hook(lambda gradient: summed(gradient, group))  # backward
        x = x + summed(F.gelu(n @ up.T) @ down.T, group)  # forward
    return x


# %% [markdown]
# In the training loop each task is a few lines, marked by its name:


# %%
def train_on(sizes, windows, mistake=None):
    """Return the loss of each step on a grid. The mistakes are for section 6."""
    at, groups = coordinates(dist.get_rank(), sizes), new_groups(sizes)
    stages = group_of(dist.get_rank(), "stage", sizes)  # ranks of this pipeline
    s, last = at["stage"], at["stage"] == sizes["stage"] - 1
    weights, history = my_weights(at, sizes), []
    optimizer = torch.optim.SGD(weights, 0.5)
    for window in windows:
        mine = window[at["data"] :: sizes["data"]]  # data
        if mistake == "own order" and at["tensor"] == 1:
            mine = mine[::-1]
        passed, loss = [], torch.zeros(())
        for x, target in mine:  # all forward passes
            if s > 0:  # stage
                x = torch.empty_like(x)
                dist.recv(x, stages[s - 1])
                x.requires_grad_()
            y = run_blocks(x, weights, groups["tensor"])  # tensor
            if last:
                y = (y - target).square().mean() / len(window)
                loss += y.detach()
            else:
                dist.send(y.detach(), stages[s + 1])
            passed.append((x, y))
        for x, y in passed:  # all backward passes
            gradient = None
            if not last:  # stage
                gradient = torch.empty_like(y)
                dist.recv(gradient, stages[s + 1])
            y.backward(gradient)
            if s > 0:
                dist.send(x.grad, stages[s - 1])
        for weight in weights:
            group = None if mistake == "no group" else groups["data"]  # data
            dist.all_reduce(weight.grad, group=group)
        dist.all_reduce(loss, group=groups["data"])
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


# %% [markdown]
# ## 3. Prove it
# The claim is *exact within rounding*. We train five steps of four [micro-batches](../docs/glossary.md#micro-batch) on
# each of the six grids, and on 2 x 2 x 2 with eight processes.


# %% Helpers: train in one process, and compare tags=["hide-input"]
def alone(windows):
    one = {"data": 1, "stage": 1, "tensor": 1}
    weights = my_weights(coordinates(0, one), one)  # all of them, and whole
    optimizer, history = torch.optim.SGD(weights, 0.5), []
    for window in windows:
        y, target = (torch.cat(both) for both in zip(*window, strict=True))
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            y = y + F.gelu(F.rms_norm(y, (D,)) @ up.T) @ down.T
        loss = (y - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


def apart(found, expected):
    """The largest relative difference of two lists of losses."""
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


# %%
torch.manual_seed(1)
rows = [(torch.randn(2, 8, D), torch.randn(2, 8, D)) for _ in range(4)]
expected = alone([rows] * 5)
print(f"one process: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
for sizes in FOURS:
    found = ranks.run(train_on, sizes, [rows] * 5)[-1]  # of a last stage
    print(f"{name(sizes)}:   loss {found[0]:.6f} -> {found[-1]:.6f},", end=" ")
    print(f"off by at most {apart(found, expected):.0e}")
    assert apart(found, expected) < 1e-5

# %% The same for all three dimensions, with eight processes tags=["hide-input"]
with Ranks(8) as eight_ranks:
    eight_ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
    found = eight_ranks.run(train_on, cube, [rows] * 5)[-1]
print(f"{name(cube)}:   loss {found[0]:.6f} -> {found[-1]:.6f},", end=" ")
print(f"off by at most {apart(found, expected):.0e}")
assert apart(found, expected) < 1e-5

# %% [markdown] tags=["deep"]
# ### Deeper: the package takes the mean, in one call
# `average_gradients` of the package takes the *mean* along *data*, as torch's DDP does, which is our sum divided by
# $N$. It sends one flat tensor, because LoRA has hundreds of small matrices, and a call for each of them would pay
# hundreds of latencies.


# %% tags=["deep"]
def both_ways():
    groups = new_groups({"data": 2, "tensor": 2})
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), dist.get_rank() + 1.0)
    by_hand = weight.grad.clone()
    dist.all_reduce(by_hand, group=groups["data"])
    average_gradients([weight], groups["data"])
    return torch.equal(by_hand / 2, weight.grad)


print("the same as by hand:", ranks.run(both_ways))
assert all(ranks.run(both_ways))

# %% [markdown]
# ## 4. What it costs
# *tensor* sends in every block, *stage* in every micro-batch, and *data* once a step. In addition, stages are idle at
# the beginning and the end of a step (the [bubble](../docs/glossary.md#bubble)).
#
# Rank $r$ runs in machine $\lfloor r / 4 \rfloor$, so a dimension uses the slow link if one of its groups has ranks of
# both machines. Each of $N$ groups takes $k = 8 / N$ of the eight micro-batches. The predicted time:
#
# $$t = (t_\text{compute} + t_\text{tensor}) \cdot \frac{k + S - 1}{k} + t_\text{stage} + t_\text{data}$$
#
# A stage is busy in $k$ of $k + S - 1$ turns, so the fraction adds the bubble. We take the slowest stage for all. We
# estimate computing as in [choosing hardware](choose_your_hardware.py). NCCL reaches 232 GB/s on NVLink, 24 GB/s
# on one HDR port, and 86 GB/s on four (measured), because it lays a ring through each port. A group has the ports of
# its cards. Which grid is fastest for the 70B model?

# %% Your guess: the fastest grid of the 70B model tags=["predict"]
guess = "no guess"  # @param ["no guess", "1 x 1 x 8", "2 x 2 x 2", "2 x 4 x 1"]


# %% Helpers: what a process computes and sends tags=["hide-input"]
def computing(recipe, sizes, card):
    """Seconds of a step in which a process of the last stage computes. It has the head,
    and takes longest."""
    mine, part = share(recipe, sizes)
    blocks = replace(part, layers=part.layers // sizes["stage"])
    return compute_seconds(mine, blocks, CARDS[card], "none", 1)


def sent_along(recipe, sizes):
    """What this process sends in a step, by dimension; nothing along one of size 1."""
    here, _ = share(recipe, sizes)
    shape = find_shape(recipe.model)
    S, M = sizes["stage"], sizes["tensor"]
    blocks = replace(shape, layers=shape.layers // S)
    gradients = 4 * ddp_tensor.own_weights(here, blocks, M)
    found = {
        "data": [Call("all_reduce", gradients, 1, sizes["data"], "gradients")],
        "stage": pipeline.traffic(here, shape, S, S - 1),
        "tensor": tensor_parallel.traffic(here, blocks, M),
    }
    return {
        dimension: found[dimension] if size > 1 else []
        for dimension, size in sizes.items()
    }


def ports_of(dimension, sizes, ports):
    """Ports that a group has, if its machine has so many. Groups share them."""
    cards = sum(rank < 4 for rank in group_of(0, dimension, sizes))
    mine = ports * cards / 4
    return min(mine, 1) if dimension == "stage" else mine  # one card sends to one


# %%
def crosses(dimension, sizes):
    """Whether a group of this dimension has ranks of both machines."""
    return group_of(0, dimension, sizes)[-1] > 3  # as in the others


def seconds(recipe, sizes, card="a100", inside="nvlink_a100", between="hdr", ports=4):
    """The predicted time of a step, on machines with so many ports."""
    took = {}
    for dimension, calls in sent_along(recipe, sizes).items():
        link = LINKS[inside]
        if crosses(dimension, sizes):
            link = LINKS[between].over(ports_of(dimension, sizes, ports))
        took[dimension] = sum(link.seconds(call) for call in calls)
    k, S = 8 // sizes["data"], sizes["stage"]
    busy = computing(recipe, sizes, card) + took["tensor"]
    return busy * (k + S - 1) / k + took["stage"] + took["data"]


# %% Predict a step of all ten grids tags=["hide-input"]
lines = []
for sizes in GRIDS:
    slow = ", ".join(dimension for dimension in sizes if crosses(dimension, sizes))
    of_70b = f"{seconds(large, sizes):.1f}" if sizes in fitting else "does not fit"
    lines.append((name(sizes), slow, of_70b, f"{seconds(ours, sizes):.2f}"))


def sharded(recipe, cards, link):
    """The bill of FSDP over so many cards, and seconds of gathering and computing."""
    # of the 8 rows, those of one copy
    each = with_settings(recipe, [f"tricks.gradient_accumulation={cards}"])
    shape = find_shape(recipe.model)
    gathers = sum(link.seconds(call) for call in fsdp.traffic(each, shape, cards))
    computes = compute_seconds(each, shape, CARDS["a100"], "fsdp", cards)
    return per_process(each, shape, A100, "fsdp", cards), gathers, computes


_four_ports = LINKS["hdr"].over(4)
_fsdp = [sum(sharded(recipe, 8, _four_ports)[1:]) for recipe in (large, ours)]
lines.append(("FSDP over 8", "gathering", f"{_fsdp[0]:.1f}", f"{_fsdp[1]:.2f}"))
columns = (WAYS, "between the machines", "70B, s a step", "1B, s a step")
course.show_table(table(columns, lines))
best = min(fitting, key=lambda sizes: seconds(large, sizes))
course.reveal(guess, name(best))

# %% [markdown]
# Of the grids, 2 x 2 x 2 is fastest for the large model: $(8.13 + 0.13) \cdot 5/4 + 0.01$ s. But the last line is no
# slower: [FSDP](sharding.py) over all eight cards, although here it hides none of its gathering. So try it first (a
# fold of section 5). For our small model plain data parallelism is fastest. Do not trust the order of close numbers:
# each is the middle of a range with a factor of 1.5. The large differences give a rule for grids:
#
# - Take as large a *data* dimension as memory allows, unless it needs many stages (2 x 4 x 1). Let it cross between
#   machines, because it sends once a step.
# - Keep *tensor* inside a machine. It crosses in 1 x 1 x 8, the slowest grid.
# - If one more dimension must cross, take *stage*. It sends little, but with 8 stages and 8 micro-batches a stage is
#   idle for 7 of 15 turns.
#
# **The order of the dimensions matters, too.** We turn 2 x 2 x 2 around: *tensor* is first, and *data* is last. Now
# ranks 0 and 4 share matrices. How many times as many bytes go to the other machine?

# %% Your guess: times as many bytes to the other machine tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def to_other_machine(recipe, sizes):
    """Bytes that a process sends to the other machine in a step."""
    total = 0
    for dimension, calls in sent_along(recipe, sizes).items():
        if crosses(dimension, sizes):
            total += sum(call.sent for call in calls)
    return total


turned = dict(reversed(best.items()))
for sizes in (best, turned):
    print(
        f"{', '.join(sizes)}: {to_other_machine(large, sizes) / 1e9:.2f} GB,", end=" "
    )
    print(f"{seconds(large, sizes):.2f} s a step")
times = to_other_machine(large, turned) / to_other_machine(large, best)
course.reveal(guess, times, "times")


# %% Draw figure 3, and hold the numbers of the text tags=["hide-input"]
_best_of_ours = min(GRIDS, key=lambda sizes: seconds(ours, sizes))
assert (name(best), name(_best_of_ours)) == ("2 x 2 x 2", "8 x 1 x 1")
_slowest = max(fitting, key=lambda sizes: seconds(large, sizes))
assert name(_slowest) == "1 x 1 x 8"
assert round(seconds(large, _slowest) / seconds(large, best), 1) == 1.6
assert [ports_of("tensor", sizes, 4) for sizes in (_slowest, best)] == [4, 2]
assert [ports_of("data", best, ports) for ports in (4, 1)] == [1, 1 / 4]
assert [round(LINKS["hdr"].over(ports).rate / 1e9) for ports in (1, 4)] == [24, 86]
assert round(times) == 96
assert round(seconds(large, turned) / seconds(large, best), 2) == 1.12
_sums = sent_along(large, best)["tensor"]
_sums = [sum(map(LINKS[link].seconds, _sums)) for link in ("nvlink_a100", "hdr")]
assert [round(took, 1) for took in _sums] == [0.1, 1.2]
assert round(_sums[0], 2) == 0.13
assert round(computing(large, best, "a100"), 2) == 8.13
_others = [sent_along(large, best)[dimension] for dimension in ("stage", "data")]
_stage, _data_sum = (
    sum(map(LINKS[link].seconds, calls))
    for link, calls in zip(("nvlink_a100", "hdr"), _others, strict=True)
)
assert round(_stage + _data_sum, 2) == 0.01
assert not crosses("stage", best)
assert crosses("data", best)


def time_of_grids(theme: Theme):
    """Seconds of a step, with tensor as the last dimension and as the first."""
    drawn, axes = course.figure(height=3.0)
    for shift, first in ((-0.2, False), (0.2, True)):
        took = [
            seconds(large, dict(reversed(sizes.items())) if first else sizes)
            for sizes in fitting
        ]
        places = [number + shift for number in range(len(fitting))]
        axes.barh(
            places,
            took,
            height=0.36,
            color=theme.series[1 if first else 0],
            label="tensor first" if first else "tensor last",
        )
    axes.set_yticks(range(len(fitting)), [name(sizes) for sizes in fitting])
    axes.set(
        xlabel="seconds of a step, predicted",
        ylabel=WAYS,
        ylim=(len(fitting) - 0.4, -0.6),
    )
    axes.grid(axis="x")
    axes.legend(loc="lower right")
    return drawn


course.show(
    time_of_grids,
    "Figure 3. The grids that fit the 70B model, with tensor as the last and as the "
    "first dimension. Where tensor crosses between the machines, a step takes longer. "
    "In 1 x 1 x 8 it crosses in both orders. Grids that end with 1 have no tensor "
    "groups.",
)

# %% [markdown]
# 96 times as many bytes, but a step takes only 12 % longer (predicted), because the sums of tensor groups take 1.2 s
# instead of 0.1 s.
#
# ## 5. The production switch
# In plain PyTorch it is a mesh, whose dimensions go to the tools of the lessons before (`to_local` is the process's own
# piece). In a recipe, it is one strategy:

# %%
print(hybrid.PLAIN)
both = ["parallel.strategy=ddp_tensor", "parallel.tensor_size=2"]
two_by_two = with_settings(ours, both)
print(diff(resolve(ours, A100), resolve(two_by_two, A100, processes=4)))

# %% [markdown]
# The data dimension is what remains, here $4 / 2$, so each group takes four of the eight micro-batches. Our trainer
# runs data x tensor (on cards with bf16) or data x stage. Train our job on four cards, or plan the 70B model with QLoRA
# on eight, which needs 24.3 GiB:
#
# ```bash
# cria launch kwanzaa --on torchrun --nproc 4 \
#     --set parallel.strategy=ddp_tensor --set parallel.tensor_size=2 \
#     --set tricks.quantization=none --set tricks.double_quantization=false \
#     --set tricks.optimizer=adamw --set tricks.paged_optimizer=false
# cria plan kwanzaa --model llama-3.1-70b --gpu a100 --nproc 8 \
#     --set parallel.strategy=pipeline --set parallel.pipelines=4 \
#     --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true
# ```
#
# All three dimensions are only in a function, `course.hybrid_demo.over_the_cube`.

# %% [markdown] tags=["deep"]
# ### Deeper: what a second dimension is worth for Llama-2-13B
# On four A100s, tensor groups of two added to data parallelism free 12.3 GiB in each card and cost 20 % more time. Two
# data groups added to tensor parallelism save 25 % of the time and cost 6.1 GiB (all predicted). Where the model fits
# one card, plain data parallelism is fastest. So our own job needs `ddp`, or one card.

# %% Compare five grids of four tags=["deep"]
medium = with_settings(ours, ["model=llama-2-13b"])
lines = []
for N, S, M in ((4, 1, 1), (2, 1, 2), (1, 1, 4), (2, 2, 1), (1, 4, 1)):
    sizes = {"data": N, "stage": S, "tensor": M}
    needs = bill(medium, sizes).least_bytes / GIB
    lines.append((name(sizes), f"{needs:.1f}", f"{seconds(medium, sizes):.2f}"))
course.show_table(table((WAYS, "GiB in each card", "seconds a step"), lines))

_found = {grid: (float(needs), float(took)) for grid, needs, took in lines}
_data, _both, _tensor = (
    _found[grid] for grid in ("4 x 1 x 1", "2 x 1 x 2", "1 x 1 x 4")
)
assert round(_data[0] - _both[0], 1) == 12.3
assert round(_both[1] / _data[1] - 1, 2) == 0.20
assert round(1 - _both[1] / _tensor[1], 2) == 0.25
assert round(_both[0] - _tensor[0], 1) == 6.1
_theirs = per_process(
    with_settings(medium, both), find_shape("llama-2-13b"), A100, "ddp_tensor", 4
)
assert round(_theirs.least_bytes / GIB, 1) == _both[0]

# %% [markdown] tags=["deep"]
# ### Deeper: the same losses in the real trainer, and with all three dimensions
# A tiny Llama trains with LoRA, first by the switch `ddp_tensor` on 2 x 1 x 2. The table has the loss and the gradient
# norm of two steps, and the loss of an evaluation. Then the function of this course trains it on two grids with stages.
# All losses are those of one process, within rounding.


# %% tags=["deep"]
def tiny(folder, name, *settings):
    """Each step's loss and gradient norm, and the evaluation loss after them."""
    few = [
        "train.max_steps=2",
        "train.learning_rate=0.01",
        "data.max_length=200",
        "tricks.gradient_accumulation=2",
        "model=random:tiny",
        "tricks.peft=lora",
        "lora.r=2",
        "tricks.chunked_loss=true",
        f"data.train={folder}/few.jsonl",
        f"data.eval={folder}/few.jsonl",
    ]
    aside = Aside()
    aside.quiet = True
    recipe = with_settings(Recipe(), [*few, *settings])
    report = train(recipe, f"{folder}/{name}", console=aside)
    found = []
    for entry in report["history"]:
        found += [entry[key] for key in ("loss", "grad_norm") if key in entry]
    return [*found, report["eval_loss_after"]]


def on_the_cube(recipe, rows, sizes):
    # a module would travel with all that is in it
    from cria_tricks.course import over_the_cube

    return [entry["loss"] for entry in over_the_cube(recipe, rows, sizes).training]


def print_runs(runs):
    """Print the numbers of each run; all must be those of the first run, which is one
    process, within rounding."""
    right = next(iter(runs.values()))
    for title, found in runs.items():
        print(f"{title:24}", *(f"{number:.6f}" for number in found))
        assert apart(found, right) < 1e-5


data = Path(cria_tricks.__file__).parent / "data" / "nguzo_saba_eval.jsonl"
with tempfile.TemporaryDirectory() as folder:
    few = data.read_text(encoding="utf-8").splitlines(keepends=True)[:4]
    Path(folder, "few.jsonl").write_text("".join(few), encoding="utf-8")
    one = tiny(folder, "one")
    four = ranks.run(tiny, folder, "four", "parallel.strategy=ddp_tensor")[0]
print_runs({"one process": one, "ddp_tensor, 2 x 1 x 2": four})

small = with_settings(Recipe(), [*hybrid_demo.TINY, "train.max_steps=2"])
drawn = hybrid_demo.random_rows()
one = [entry["loss"] for entry in hybrid_demo.alone(small, drawn).training]
runs = {"one process": one}
for N, S, M in ((2, 2, 1), (1, 2, 2)):
    sizes = {"data": N, "stage": S, "tensor": M}
    runs[name(sizes)] = ranks.run(on_the_cube, small, drawn, sizes)[0]
print_runs(runs)

# %% [markdown] tags=["deep"]
# ### Deeper: HSDP, sharding on a grid
# Another hybrid leaves each matrix product whole. *Hybrid sharded data parallel* ([HSDP](../docs/glossary.md#hsdp))
# [shards](sharding.py) the model inside each machine, and each machine has a copy of it. In torch it is
# `fully_shard(block, mesh=mesh)` with a mesh of two dimensions, the first one for the copies. Then weights are gathered
# over the fast link, and a process sends to the other machine only its piece of the gradients.
#
# For our large job (one micro-batch for each process) HSDP would be faster than 2 x 2 x 2, but it does not fit 40 GB.
# With cards of 80 GB it is the first thing to try. Plain FSDP over all eight cards fits with 14 GiB to spare, in one
# line of code. It gathers the weights between the machines, too, but over all four ports of each machine. So it takes
# 10.0 s, about as long as 2 x 2 x 2, although we let nothing overlap. FSDP gathers the next block while it computes
# this one. All of the gathering could overlap, because it takes less than half as long as the computing. Then a step
# would take 7.1 s. With a single port in each machine, the gathering would take 10.3 s.

# %% tags=["deep"]
took = {}
for title, cards, link in (
    ("FSDP", 8, LINKS["hdr"].over(4)),
    ("FSDP, one port", 8, LINKS["hdr"]),
    ("HSDP, 2 x 4", 4, LINKS["nvlink_a100"]),
):
    needs, gathers, computes = sharded(large, cards, link)
    took[title] = gathers, computes
    print(f"{title:15} {needs.least_bytes / GIB:.1f} GiB in each card;", end=" ")
    print(f"gathering {gathers:.1f} s, computing {computes:.1f} s,", end=" ")
    print(f"together {gathers + computes:.1f} s")
    assert needs.fits == (cards == 8)
assert round(sum(took["FSDP"]), 1) == 10.0
assert round(took["FSDP"][1], 1) == 7.1
assert took["FSDP"][0] < took["FSDP"][1] / 2
assert round(took["FSDP, one port"][0], 1) == 10.3
assert sum(took["HSDP, 2 x 4"]) < sum(took["FSDP"]) < seconds(large, best)

# %% [markdown]
# ## 6. Where it breaks
# **The first loss is right, and then training goes wrong.** Somebody forgot `group=`, so a process also adds the
# gradient of the other half of a matrix. It has the same shape, so there is no error. The cure is a group in every
# collective, and a test that compares the *second* loss with that of one process.
#
# **The loss falls, but even the first one is wrong.** Each process shuffles the rows with a seed of its own, so two
# processes that share a matrix add up parts of different sums. The cure: choose the rows and their order by the *data*
# coordinate. Both mistakes on 2 x 1 x 2:

# %%
sizes = {"data": 2, "stage": 1, "tensor": 2}
print("one process:", *(f"{loss:.4f}" for loss in expected[:4]))
for mistake in ("no group", "own order"):
    found = ranks.run(train_on, sizes, [rows] * 4, mistake)[0]
    print(f"{mistake + ':':12}", *(f"{loss:.4f}" for loss in found))
    assert (apart(found[:1], expected[:1]) < 1e-6) == (mistake == "no group")
    assert apart(found, expected[:4]) > 0.01

# %% [markdown] tags=["deep"]
# ### Deeper: processes that form no grid, and a grid that is slow
# **`they make no grid`.** Of six processes, four should share each matrix. But the number of processes must be the
# product of the sizes. $M$ must also divide the numbers of heads and key heads (64 and 8 in the large model), so with
# 16 cards no grid has $M = 16$. Our $M$ does not divide embedding and head, but Megatron can divide them, too.
#
# **Nothing is wrong, but it is slow.** The dimensions are in the wrong order, or the launcher gave neighbouring ranks
# to different machines. To find out, let each rank print `socket.gethostname()` and
# `dist.get_process_group_ranks(mesh.get_group("tensor"))` at the start.

# %% tags=["deep"]
try:
    resolve(with_settings(two_by_two, ["parallel.tensor_size=4"]), A100, processes=6)
    raise AssertionError("it must be refused")
except BadInput as refusal:
    print(refusal)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** 64 processes form the grid 4 x 4 x 4 (data x stage x tensor). Which ranks are in the *data* group of
#    rank 27? Answer with a list, in order.
# 2. **Build.** An all-reduce in two levels. Fill in `two_levels(tensor, inside, across)`. `inside` is the group of the
#    processes in the same machine. `across` is the group of those that have the same place in the other machines.
#    Between machines each process sends only its own piece. `tensor` has one dimension, and the size of `inside`
#    divides its length. Return the sum over all processes. (Five lines: a new piece, `dist.reduce_scatter_tensor(piece,
#    tensor, group=...)`, `dist.all_reduce`, and `dist.all_gather_into_tensor(tensor, piece, group=...)`.)
# 3. **Reach.** Llama-2-13B trains on two machines with four L4s (`l4`) each. Inside there is PCIe 4.0 (`pcie4`), and
#    between them 10 Gbit Ethernet (`10gbe`), with one port in each machine (`ports=1`). Which of `GRIDS` fits (`.fits`,
#    so *tight* is enough) and is fastest? Answer with $(N, S, M)$. (`seconds` and `bill` take a card; `bill` and
#    `medium` are in folds of sections 1 and 5.)

# %% tags=["exercise"]
data_group_of_27 = None


def two_levels(tensor, inside, across):
    """Return the sum over all processes, a tensor shaped like this one. FILL ME IN."""


best_grid = None


# %% Check the exercises tags=["hide-input"]
def of_two_levels(answer):
    def in_four(machines):
        mesh = init_device_mesh(
            "cpu", (machines, 4 // machines), mesh_dim_names=("across", "inside")
        )
        mine = torch.arange(1000.0) * (dist.get_rank() + 1)
        with CountCollectives() as count:
            return answer(
                mine, mesh.get_group("inside"), mesh.get_group("across")
            ), count.bytes

    right = torch.arange(1000.0) * 10
    for machines in (2, 1, 4):
        try:
            found, sent = zip(*ranks.run(in_four, machines), strict=True)
        # a process's whole traceback, of which the last line says what is wrong
        except RuntimeError as error:
            raise RuntimeError(str(error).strip().splitlines()[-1]) from None
        if found[0] is None:
            raise NotImplementedError
        same = all(
            one.shape == right.shape and torch.equal(one, right) for one in found
        )
        assert same, "not the sum over all four, or not all of it, in every process"
        added, piece = sent[0]["all_reduce"], 4000 * machines // 4
        assert added == piece, (
            f"with {4 // machines} processes in a machine {added:,} bytes are in "
            f"all-reduces; a piece has {piece:,}: a "
            "machine's processes share the tensor, "
            "and only pieces go to the other machines"
        )


on_l4 = {
    tuple(g.values()): seconds(medium, g, "l4", "pcie4", "10gbe", ports=1)
    for g in GRIDS
    if bill(medium, g, "l4").fits
}
of_group = course.equal(
    [11, 27, 43, 59],
    "data is the first dimension: how many ranks further is its next coordinate? "
    "The group begins at coordinate 0, and holds 27",
)
of_grid = course.equal(
    min(on_l4, key=on_l4.get),
    "does its process fit in 21.96 GiB, is it the fastest of those that do, "
    "and which link does each of its dimensions get?",
)
course.check(
    1, data_group_of_27, of_group, "a list of four ranks, whole numbers in order"
)
course.check(
    2,
    two_levels,
    of_two_levels,
    "a function (tensor, inside, across) -> the sum, a tensor of the same shape",
)
course.check(3, best_grid, of_grid, "three whole numbers in round brackets, (N, S, M)")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# # the next data coordinate is 4 * 4 = 16 ranks further
# data_group_of_27 = [27 % 16 + 16 * number for number in range(4)]
#
#
# def two_levels(tensor, inside, across):
#     piece = tensor.new_empty(len(tensor) // dist.get_world_size(inside))
#     dist.reduce_scatter_tensor(piece, tensor, group=inside)
#     dist.all_reduce(piece, group=across)
#     dist.all_gather_into_tensor(tensor, piece, group=inside)
#     return tensor
#
#
# # eight copies do not fit; tensor groups of two cost less than a pipeline's bubble
# best_grid = (4, 1, 2)
# ```
#
# </details>
#
# ## In one breath
# - **Saves** memory along *stage* and *tensor*, and time along *data*.
# - **Costs** what each dimension sends, over the link that the order of the dimensions gives it, and a pipeline's
#   bubble.
# - **Exact within rounding**, for every grid. A wrong group or wrong rows give wrong results without an error.
# - **When**: the model does not fit one card, and you have more cards than one copy needs. *tensor* comes last and
#   stays inside a machine, *data* comes first, and *stage* between them. But try FSDP first, which is no slower here
#   than the best grid, or HSDP if the cards are large enough.
# - **When not**: the model fits one card. Then use `ddp`, or one card.
#
# ## Sources
# - Narayanan et al. 2021, arXiv 2104.04473, section 3: how the three dimensions interact, and which goes where.
# - Shoeybi et al. 2019, arXiv 1909.08053, section 5.1 (data x tensor); Grattafiori et al. 2024, *The Llama 3 Herd of
#   Models*, arXiv 2407.21783, section 3.3.2: the order of the dimensions, tensor innermost.
# - Zhao et al. 2023, *PyTorch FSDP*, arXiv 2304.11277, section 3.2.2 (hybrid sharding).
# - torch 2.13: `torch/distributed/device_mesh.py`. Rates of links, with their sources: `cria_tricks/predict/links.py`.
# - Ours: `cria_tricks/parallel/ddp_tensor.py`, `data_pipeline.py`, `hybrid.py`; `tests/parallel/`.
