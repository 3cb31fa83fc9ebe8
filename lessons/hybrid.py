# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Hybrid: a grid of processes
# > **Promise.** One division for each axis tells a process its place in a grid, and torch agrees. One function trains
# > over any grid of four processes, to the losses of one process. And you price all ten grids of eight cards, for a
# > model of 70 billion weights and for ours: the answers are opposite.
#
# > **Card.** saves time along one axis, blocks and matrices along the others / costs what each axis sends, over the
# > link that it gets / exact within rounding / 35 minutes / after [pipeline parallelism](pipeline_parallel.py)
#
# The job: QLoRA of Llama-3.2-1B on 107 training rows. It fits one T4, so this lesson needs a larger job, too: LoRA of
# Llama-3.1-70B in bf16, on two machines, each with four A100s of 40 GB. Inside a machine cards talk over NVLink. To the
# other machine each card has an InfiniBand link, a tenth as fast. The last lessons gave three ways to share a
# step. Which of them should which cards use?

# %% Imports and settings tags=["hide-input"]
import logging
import math
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets
# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

import cria_tricks
from cria_tricks import course, recipes
from cria_tricks.bench.style import Theme
from cria_tricks.bill.calls import Call, CountCollectives
from cria_tricks.common.console import Aside
from cria_tricks.common.errors import BadInput
from cria_tricks.course import hybrid_demo
from cria_tricks.course.processes import Ranks
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load.model import quiet_libraries
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import ddp_tensor, fsdp, hybrid, pipeline, tensor
from cria_tricks.parallel.ddp_tensor import average_gradients
from cria_tricks.predict.links import LINKS, compute_seconds
from cria_tricks.predict.per_process import local, per_process
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.run.run import train
from cria_tricks.step_plan import diff

# four processes, joined by gloo as in data_parallel.py; they end with this notebook
ranks = Ranks(4)
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
ranks.run(quiet_libraries)
quiet_libraries()
torch.manual_seed(0)
GIB = 2**30

# %% [markdown]
# ## 1. The bill
# Eight processes may be $N$ groups that share the rows (*data*). Each group has $S$ stages of a pipeline (*stage*), and
# each stage has $M$ processes that share its matrices (*tensor*): $N S M = 8$. There are ten such grids, written $N$ x
# $S$ x $M$. A process holds about $1 / (S M)$ of the weights; $N$ saves nothing. 70.6 billion weights of two bytes are
# 131 GiB, and an A100 has 39.4. How many of the ten fit? Write it down. (Without NF4, which tensor parallelism
# refuses.)

# %%
A100 = CARDS["a100"].device
refused = [
    "quantization=none",
    "double_quantization=false",
    "optimizer=adamw",
    "paged_optimizer=false",
]
ours = with_settings(recipes.capstone(A100), [f"tricks.{one}" for one in refused])
large = with_settings(ours, ["model=llama-3.1-70b"])
GRIDS = [
    {"data": N, "stage": S, "tensor": 8 // N // S}
    for N in (1, 2, 4, 8)
    for S in (1, 2, 4, 8)
    if N * S <= 8
]


def share(recipe, sizes):
    """The recipe and shape of what a process computes: its part of the 8 micro-batches,
    and of heads and MLPs."""
    mine = with_settings(recipe, [f"tricks.gradient_accumulation={8 // sizes['data']}"])
    return local(mine, find_shape(recipe.model), "tensor", sizes["tensor"])


def bill(recipe, sizes, card="a100"):
    """The bill of the stage that needs most."""
    S = sizes["stage"]  # stages divide the blocks; heads and MLPs are divided already
    return per_process(
        *share(recipe, sizes), CARDS[card].device, "pipeline" if S > 1 else "none", S
    )


def name(sizes):
    return " x ".join(map(str, sizes.values()))


for recipe in (large, ours):
    needed = {name(sizes): bill(recipe, sizes).least_bytes / GIB for sizes in GRIDS}
    print(
        recipe.model,
        "GiB:",
        ", ".join(f"{grid}: {size:.1f}" for grid, size in needed.items()),
    )
fitting = [sizes for sizes in GRIDS if bill(large, sizes).fits]
assert len(fitting) == 6
assert all(bill(ours, sizes).fits for sizes in GRIDS)


# %% Draw figure 1 tags=["hide-input"]
def memory_of_grids(theme: Theme):
    """What a process needs, grid by grid, beside what an A100 has."""
    drawn, axes = course.figure(height=3.4)
    sizes_of = [bill(large, sizes).least_bytes / GIB for sizes in GRIDS]
    has = A100.memory_bytes / GIB
    colours = [theme.series[0] if size <= has else theme.quiet for size in sizes_of]
    axes.barh(range(10), sizes_of, color=colours, height=0.66)
    for place, size in enumerate(sizes_of):
        axes.text(
            max(size, has) if has - 3 < size else size,
            place,
            f" {size:.1f}",
            va="center",
            color=theme.ink,
        )
    axes.axvline(has, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3)))
    axes.text(has, -0.95, f" an A100 has {has:.1f} GiB", color=theme.alarm, va="center")
    axes.set_yticks(range(10), [name(sizes) for sizes in GRIDS])
    axes.set(
        xlabel="needed by a process, GiB",
        ylabel="data x stage x tensor",
        ylim=(9.6, -1.5),
    )
    axes.grid(axis="x")
    return drawn


course.show(
    memory_of_grids,
    "Figure 1. Llama-3.1-70B over eight cards: what each needs. Six of ten grids fit.",
)

# %% [markdown]
# Six, and for our model all ten. A quarter of the weights is 33 GiB, so 2 x 1 x 4 might have fitted. But tensor
# parallelism keeps embedding and head whole in every process, 2 GiB each, and all that lies between blocks. A pipeline
# has one of the two at either end. Memory says which grids are possible. Time will choose among them.
#
# ## 2. From scratch, in three steps
# **Who am I?** A process knows its rank, one number. Let the last axis count fastest, like the seconds of a clock. Then
# one division for each axis gives its *place* in the grid. Its *line* along an axis are the processes whose place
# differs from its own on this axis alone.


# %%
def place(rank, sizes):
    found = {}
    for axis, size in reversed(sizes.items()):
        rank, found[axis] = divmod(rank, size)
    return {axis: found[axis] for axis in sizes}


def line(rank, axis, sizes):
    """The processes that differ along `axis` alone, this one among them."""
    here = place(rank, sizes) | {axis: 0}
    return [
        other
        for other in range(math.prod(sizes.values()))
        if place(other, sizes) | {axis: 0} == here
    ]


cube = {"data": 2, "stage": 2, "tensor": 2}
print(
    f"rank 5 of 8: {place(5, cube)}, lines",
    {axis: line(5, axis, cube) for axis in cube},
)
assert {axis: line(5, axis, cube) for axis in cube} == hybrid.lines(5, cube)

# %% [markdown]
# **Ask torch.** It calls a grid a `DeviceMesh`, and makes a *process group* for each line: a collective with `group=`
# stays among its processes. Does it agree, for all six grids of four processes?

# %%
FOURS = [
    {"data": N, "stage": S, "tensor": 4 // N // S}
    for N in (1, 2, 4)
    for S in (1, 2, 4)
    if N * S <= 4
]


def mesh_agrees(sizes):
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    found = [dist.get_process_group_ranks(mesh.get_group(axis)) for axis in sizes]
    return found == [line(dist.get_rank(), axis, sizes) for axis in sizes]


agreeing = [name(sizes) for sizes in FOURS if all(ranks.run(mesh_agrees, sizes))]
print("torch agrees for", ", ".join(agreeing))
assert len(agreeing) == 6


# %% Draw figure 2 tags=["hide-input"]
def eight(theme: Theme):
    """A cube of eight processes on two machines: who talks to whom."""
    sketch = course.Sketch(theme, 44, 16.4)
    at = {}
    for rank in range(8):
        where = place(rank, cube)
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
        where = place(rank, cube)
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
    "Figure 2. A cube, 2 x 2 x 2, on two machines. "
    "The innermost axis (tensor) has neighbouring ranks, so it stays "
    "inside a machine. From machine to machine each rank talks to the one four "
    "further, once a step.",
)

# %% [markdown]
# **One axis, one thing to do.** Our model is four blocks with an MLP each, and learns random targets by heart. Along
# *tensor*, [the lesson on tensor parallelism](tensor_parallel.py)'s f and g add up in their group. Along *stage*, a
# process receives hidden states from the one before it and hands its own on ([pipeline
# parallelism](pipeline_parallel.py): first all forward passes, then all backward). Along *data*, it takes its share of
# the window, and gradients are summed once. What is done along one axis need not know of the others.

# %%
D, INNER = 16, 32


def new_blocks():
    torch.manual_seed(0)
    return [
        (torch.randn(INNER, D) / D**0.5, torch.randn(D, INNER) / INNER**0.5)
        for _ in range(4)
    ]


def added_up(y, group):
    total = y.clone()
    dist.all_reduce(total.data, group=group)
    return total


def cut_block(x, up, down, group):
    n = F.rms_norm(x, (D,))
    if n.requires_grad:
        n.register_hook(lambda gradient: added_up(gradient, group))  # f
    return x + added_up(F.gelu(n @ up.T) @ down.T, group)  # g


def over_a_grid(sizes, windows, everyone=False, shuffled=False):
    """Train; the loss of each step. The last two are mistakes, for section 6."""
    here = place(dist.get_rank(), sizes)
    N, S, M = sizes.values()
    mesh = init_device_mesh("cpu", (N, S, M), mesh_dim_names=tuple(sizes))
    along = {axis: mesh.get_group(axis) for axis in sizes}
    s = here["stage"]
    # the ranks of this pipeline, stage by stage
    stages = line(dist.get_rank(), "stage", sizes)
    own = new_blocks()[s * 4 // S : (s + 1) * 4 // S]  # the blocks of this stage
    parts = [
        (up.chunk(M, 0)[here["tensor"]], down.chunk(M, 1)[here["tensor"]])
        for up, down in own
    ]
    weights = [part.clone().requires_grad_() for pair in parts for part in pair]
    optimizer, history, last = torch.optim.SGD(weights, 0.5), [], s == S - 1
    for window in windows:
        # kept: for the backward passes
        mine, kept, loss = window[here["data"] :: N], [], torch.zeros(())
        if shuffled:
            mine = mine[here["tensor"] :] + mine[: here["tensor"]]
        for x, target in mine:
            if s > 0:
                dist.recv(x := torch.empty_like(x), stages[s - 1])
            y = x = x.clone().requires_grad_(s > 0)
            for up, down in zip(weights[::2], weights[1::2], strict=True):
                y = cut_block(y, up, down, along["tensor"])
            if last:
                y = (y - target).square().mean() / len(window)
                loss += y.detach()
            else:
                dist.send(y.detach(), stages[s + 1])
            kept.append((x, y))
        for x, y in kept:
            gradient = None
            if not last:
                dist.recv(gradient := torch.empty_like(y), stages[s + 1])
            y.backward(gradient)
            if s > 0:
                dist.send(x.grad, stages[s - 1])
        for weight in weights:
            dist.all_reduce(weight.grad, group=None if everyone else along["data"])
        dist.all_reduce(loss, group=along["data"])
        optimizer.step()
        optimizer.zero_grad()
        history.append(loss.item())
    return history


# %% [markdown]
# ## 3. Prove it
# The claim is *exact within rounding*, for every grid. So train five steps of four micro-batches over each of the six.
# `alone` is the same model in one process, without any of this: all rows at once, matrices whole, no group.


# %% Helpers: compare with one process tags=["hide-input"]
def alone(windows):
    weights = [W.requires_grad_() for pair in new_blocks() for W in pair]
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
    return max(abs(a / b - 1) for a, b in zip(found, expected, strict=True))


# %%
rows = [(torch.randn(2, 8, D), torch.randn(2, 8, D)) for _ in range(4)]
expected = alone([rows] * 5)
print(f"one process: loss {expected[0]:.6f} -> {expected[-1]:.6f}")
for sizes in FOURS:
    # the last process is of a last stage
    found = ranks.run(over_a_grid, sizes, [rows] * 5)[-1]
    print(
        f"{name(sizes)}: loss {found[0]:.6f} -> {found[-1]:.6f}, "
        f"off by at most {apart(found, expected):.0e}"
    )
    assert apart(found, expected) < 1e-5

# %% [markdown]
# The package's `average_gradients` takes the mean along *data*, as torch's DDP does: our sum, divided by $N$. It sends
# one flat tensor, because a call for each of LoRA's small matrices would wait hundreds of times.


# %%
def both_ways():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), dist.get_rank() + 1.0)
    by_hand = weight.grad.clone()
    dist.all_reduce(by_hand, group=mesh.get_group("data"))
    average_gradients([weight], mesh.get_group("data"))
    return torch.equal(by_hand / 2, weight.grad)


print("the same as by hand:", found := ranks.run(both_ways))
assert all(found)

# %% [markdown]
# ## 4. What it costs
# Each axis sends something else: *tensor* sends in every block, *stage* in every micro-batch, *data* once a step. The
# grid decides over which link. Rank $r$ sits in machine $\lfloor r / 4 \rfloor$, so an axis is slow if one of its lines
# has ranks of both machines. Guess the fastest grid that fits the 70B model, and the fastest for ours. Then price them
# all: [the lesson on choosing hardware](choose_your_hardware.py)'s computing, [the lesson on pipeline
# parallelism](pipeline_parallel.py)'s idle slots, and calls at the rate that NCCL gets from a link.

# %% Your guess: the fastest grid of the 70B model tags=["predict"]
guess = "no guess"  # @param ["no guess", "1 x 1 x 8", "2 x 2 x 2", "2 x 4 x 1"]


# %%
def slow(axis, sizes):
    """Whether a line of the axis leaves its machine."""
    return any(
        len({other // 4 for other in line(rank, axis, sizes)}) > 1 for rank in range(8)
    )


def sent_along(recipe, sizes):
    """What a process of the last stage sends in a step, by axis; nothing along an axis
    of one."""
    (here, _), shape, (S, M) = (
        share(recipe, sizes),
        find_shape(recipe.model),
        (sizes["stage"], sizes["tensor"]),
    )
    blocks = replace(shape, layers=shape.layers // S)
    gradients = 4 * ddp_tensor.own_weights(here, blocks, M)
    found = {
        "data": [Call("all_reduce", gradients, 1, sizes["data"], "gradients")],
        "stage": pipeline.traffic(here, shape, S, S - 1),
        "tensor": tensor.traffic(here, blocks, M),
    }
    return {axis: found[axis] if sizes[axis] > 1 else [] for axis in sizes}


def seconds(recipe, sizes, card="a100", inside="nvlink_a100", outside="hdr"):
    """An optimizer step, estimated, of the last stage, which has the head and takes
    longest."""
    (here, part), k, S = share(recipe, sizes), 8 // sizes["data"], sizes["stage"]
    took = {}
    for axis, calls in sent_along(recipe, sizes).items():
        took[axis] = sum(
            LINKS[outside if slow(axis, sizes) else inside].seconds(call)
            for call in calls
        )
    computing = compute_seconds(
        here, replace(part, layers=part.layers // S), CARDS[card], "none", 1
    )
    return (computing + took["tensor"]) * (k + S - 1) / k + took["stage"] + took["data"]


for recipe in (large, ours):
    times = {
        name(sizes): seconds(recipe, sizes)
        for sizes in GRIDS
        if bill(recipe, sizes).fits
    }
    print(
        recipe.model,
        "seconds:",
        ", ".join(f"{grid}: {time:.2f}" for grid, time in times.items()),
    )
best, best_ours = (
    min(GRIDS, key=lambda g, r=r: (not bill(r, g).fits, seconds(r, g)))
    for r in (large, ours)
)
assert (name(best), name(best_ours)) == ("2 x 2 x 2", "8 x 1 x 1")
course.reveal(guess, name(best))

# %% [markdown]
# The cube wins, and for our model a line of eight. Seconds are middles of wide ranges, so do not trust the order of
# close ones. But a rule comes out. Take as much *data* as memory allows, and let it cross from machine to machine: it
# sends once a step. Keep *tensor* inside a machine: 1 x 1 x 8 crosses, and is slowest by far. If one more axis must
# cross, let it be *stage*: it sends little. Its price is idle time: with 8 stages and 8 micro-batches, nearly half of
# the time. (And the cube is tight: it leaves 0.9 GiB for NCCL's buffers, which our bill does not count.)
#
# **The order is half of the choice.** Take the same cube, but *tensor* outermost: its lines are now ranks 0 and 4, 1
# and 5 and so on. There is no error, and memory and losses are the same. How many times as much goes between the
# machines?


# %%
def to_the_other_machine(recipe, sizes):
    """Bytes that a process sends to the other machine in a step."""
    calls = [
        call
        for axis, found in sent_along(recipe, sizes).items()
        if slow(axis, sizes)
        for call in found
    ]
    return sum(call.sent for call in calls)


inside_out = dict(reversed(best.items()))
for sizes in (best, inside_out):
    crossing = to_the_other_machine(large, sizes) / 1e9
    print(
        f"{', '.join(sizes):20} {crossing:6.2f} GB to the other machine, "
        f"{seconds(large, sizes):.1f} s"
    )
times = to_the_other_machine(large, inside_out) / to_the_other_machine(large, best)
print(f"{times:.0f} times as much")
assert to_the_other_machine(large, inside_out) > 90 * to_the_other_machine(large, best)
assert seconds(large, inside_out) > 1.1 * seconds(large, best)


# %% Draw figure 3 tags=["hide-input"]
def time_of_grids(theme: Theme):
    """Seconds of a step, the fast axis inside the machine and outside."""
    drawn, axes = course.figure(height=3.0)
    for shift, turned in ((-0.2, False), (0.2, True)):
        times = [
            seconds(large, dict(reversed(sizes.items())) if turned else sizes)
            for sizes in fitting
        ]
        places = [number + shift for number in range(len(fitting))]
        label = "tensor outermost" if turned else "tensor innermost"
        axes.barh(
            places,
            times,
            height=0.36,
            color=theme.series[1 if turned else 0],
            label=label,
        )
    axes.set_yticks(range(len(fitting)), [name(sizes) for sizes in fitting])
    axes.set(
        xlabel="seconds of a step, estimated",
        ylabel="data x stage x tensor",
        ylim=(len(fitting) - 0.4, -0.6),
    )
    axes.grid(axis="x")
    axes.legend(loc="lower right")
    return drawn


course.show(
    time_of_grids,
    "Figure 3. The grids that fit the 70B model. "
    "A tensor axis from machine to machine costs seconds. 1 x 1 x 8 has "
    "one either way, and grids with a 1 at the end have no tensor axis.",
)

# %% [markdown]
# ## 5. The production switch
# The trainer runs data x tensor, and data x pipeline. The recipe names the strategy, and how many processes share a
# matrix or how many pipelines share the rows. The cube of all three is no value of `parallel.strategy`. Below, a
# function of this course runs it: it uses the pipeline's trainer, and cuts matrices as `tensor` does.

# %%
start = "cria launch RECIPE --on torchrun --nproc 4"
print(f"{start} --set parallel.strategy=ddp_tensor --set parallel.tensor_size=2")
print(f"{start} --set parallel.strategy=pipeline --set parallel.pipelines=2")
two_by_two = with_settings(
    ours, ["parallel.strategy=ddp_tensor", "parallel.tensor_size=2"]
)
print(diff(resolve(ours, A100), resolve(two_by_two, A100, processes=4)))

# %% [markdown]
# Both train a tiny Llama with LoRA. First come two steps of the trainer: loss and gradient norm of each, then an
# evaluation. Then come the losses of two steps of the cube's function, over grids of four.


# %% Helpers: train on a grid tags=["hide-input"]
def tiny(folder, name, *settings):
    """Each step's loss and gradient norm, and the evaluation loss after them."""
    few = [
        "train.max_steps=2",
        "train.learning_rate=0.01",
        "data.max_length=200",
        "tricks.gradient_accumulation=2",
    ]
    few += [
        "model=random:tiny",
        "tricks.peft=lora",
        "lora.r=2",
        "tricks.chunked_loss=true",
    ]
    few += [f"data.{use}={folder}/few.jsonl" for use in ("train", "eval")]
    aside = Aside()
    aside.quiet = True
    report = train(
        with_settings(Recipe(), [*few, *settings]), f"{folder}/{name}", console=aside
    )
    found = [
        entry[key]
        for entry in report["history"]
        for key in ("loss", "grad_norm")
        if key in entry
    ]
    return [*found, report["eval_loss_after"]]


def through_the_cube(recipe, rows, sizes):
    # a module would travel with all that is in it
    from cria_tricks.course.hybrid_demo import over_the_cube

    return [entry["loss"] for entry in over_the_cube(recipe, rows, sizes).training]


def show(runs):
    """Print the numbers of each run; all must be those of the first run, which is one
    process, within rounding."""
    expected = next(iter(runs.values()))
    for title, found in runs.items():
        print(f"{title:24}", *(f"{number:.6f}" for number in found))
        assert apart(found, expected) < 1e-5


# %% Train on a grid of processes tags=["hide-input"]
with tempfile.TemporaryDirectory() as folder:
    lines = (
        Path(cria_tricks.__file__).parent / "data" / "nguzo_saba_eval.jsonl"
    ).read_text(encoding="utf-8")
    Path(folder, "few.jsonl").write_text(
        "".join(lines.splitlines(keepends=True)[:4]), encoding="utf-8"
    )
    one = tiny(folder, "one")
    show(
        {
            "one process": one,
            "ddp_tensor, 2 x 2": ranks.run(
                tiny, folder, "four", "parallel.strategy=ddp_tensor"
            )[0],
        }
    )
recipe, few = (
    with_settings(Recipe(), [*hybrid_demo.TINY, "train.max_steps=2"]),
    hybrid_demo.random_rows(),
)
runs = {
    "one process": [entry["loss"] for entry in hybrid_demo.alone(recipe, few).training]
}
for sizes in (
    {"data": 2, "stage": 2, "tensor": 1},
    {"data": 1, "stage": 2, "tensor": 2},
):
    runs[name(sizes)] = ranks.run(through_the_cube, recipe, few, sizes)[0]
show(runs)

# %% [markdown]
# **HSDP, or [the lesson on sharding](sharding.py) on a grid.** Another hybrid cuts no matrix: *hybrid sharded data
# parallel* shards the model inside each machine, and each machine has a copy. In torch it is `fully_shard(block,
# mesh=mesh)` with a mesh of two axes, the outer one for the copies. Weights are then gathered over the fast link, and
# from machine to machine a process sends only its piece of the gradients. What would a step take here, with one
# micro-batch for each process?

# %%
shape = find_shape(large.model)
for cards, link, title in (
    (8, "hdr", "FSDP over eight"),
    (4, "nvlink_a100", "HSDP, 2 x 4"),
):
    # of 8 rows, those of one copy
    each = with_settings(large, [f"tricks.gradient_accumulation={cards}"])
    sharded = per_process(each, shape, A100, "fsdp", cards)
    gathers = sum(
        LINKS[link].seconds(call) for call in fsdp.traffic(each, shape, cards)
    )
    computing = compute_seconds(each, shape, CARDS["a100"], "fsdp", cards)
    print(
        f"{title}: {sharded.least_bytes / GIB:.1f} GiB; gathers {gathers:.1f} s, "
        f"computing {computing:.1f} s"
    )
    assert sharded.fits == (cards == 8)
print(
    f"and our job, on one T4: {course.bill(course.CAPSTONE).least_bytes / GIB:.1f} GiB"
)

# %% [markdown]
# HSDP would beat the cube, but it does not fit 40 GB. On cards of 80 GB it is the first thing to try. FSDP over all
# eight fits. But it sends all weights over the slow link, and is as fast as the cube only if two thirds of that time
# hide behind computing.
#
# **And our job?** With NF4 it fits one T4. So it needs one card, or `ddp` ([data parallelism](data_parallel.py)), and
# no grid.
#
# ## 6. Where it breaks
# **The first loss is right, and then training goes astray.** Gradients were summed over *all* processes: somebody left
# `group=` out, and the default is everyone. So process 0 adds the gradient of the other half of a matrix to that of its
# own half. The shapes agree, so nothing raises. Cure: `group=` in every collective, and compare the *second* loss with
# that of one process.
#
# **The loss is wrong, but falls nicely.** Each process shuffled its rows for itself. Then the two halves of a matrix
# see different rows, and f and g add up what does not belong together. Cure: choose rows and their order by the place
# along *data*, and not by rank. Both mistakes at 2 x 1 x 2:

# %%
sizes = {"data": 2, "stage": 1, "tensor": 2}
print("one process:     ", *(f"{loss:.4f}" for loss in expected[:4]))
for mistake in ("everyone", "shuffled"):
    found = ranks.run(partial(over_a_grid, **{mistake: True}), sizes, [rows] * 4)[0]
    print(f"{mistake + ':':17}", *(f"{loss:.4f}" for loss in found))
    assert (apart(found[:1], expected[:1]) < 1e-6) == (mistake == "everyone")
    assert apart(found, expected[:4]) > 0.01

# %% [markdown]
# **`they make no grid`.** There are six processes, and four should share each matrix. The number of processes must be
# the product of the axes.

# %%
try:
    resolve(with_settings(two_by_two, ["parallel.tensor_size=4"]), A100, processes=6)
    raise AssertionError("it must be refused")
except BadInput as refusal:
    print(refusal)

# %% [markdown]
# **Nothing is wrong, but it is slow.** The axes are in the wrong order, or the launcher gave neighbouring ranks to
# different machines. Cure: at the start let each rank print `socket.gethostname()` and
# `dist.get_process_group_ranks(mesh.get_group("tensor"))`.
#
# ## 7. Exercises
# 1. **Predict.** 64 processes, 4 x 4 x 4 (data x stage x tensor). Which ranks are on the *data* line of rank 27? Give a
#    list of four ranks, in order.
# 2. **Build.** An all-reduce on two levels, so that little is sent between machines: fill in `two_levels(tensor,
#    inside, across)`. `inside` is the group of the process's machine, `across` that of its peers in the other machines.
#    Between machines each process sends only its own piece. Return the sum, a tensor of the same shape. (Five lines: a
#    new piece, `dist.reduce_scatter_tensor`, `all_reduce`, `all_gather_into_tensor`. The length divides.)
# 3. **Reach.** Llama-2-13B (`llama-2-13b`) by the recipe `ours`, on two machines with four L4s (`l4`) each: PCIe 4.0
#    inside (`pcie4`), 10 Gbit Ethernet between them (`10gbe`). Which grid fits and is fastest? Give $(N, S, M)$, three
#    numbers in brackets. (`bill` and `seconds` take a card, and links.)

# %% tags=["exercise"]
data_line_of_27 = None


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


smaller = with_settings(ours, ["model=llama-2-13b"])
on_l4 = {
    tuple(g.values()): seconds(smaller, g, "l4", "pcie4", "10gbe")
    for g in GRIDS
    if bill(smaller, g, "l4").fits
}
of_line = course.equal(
    [11, 27, 43, 59],
    "data is the outermost axis: how many ranks further is its next place? The line "
    "begins at place 0, and holds 27",
)
of_grid = course.equal(
    min(on_l4, key=on_l4.get),
    "does its process fit in 21.96 GiB, is it the fastest of those that do, "
    "and which link does each of its axes get?",
)
course.check(
    1, data_line_of_27, of_line, "a list of four ranks, whole numbers in order"
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
# data_line_of_27 = [27 % 16 + 16 * number for number in range(4)]
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
# # eight copies do not fit; two cards to a matrix cost less than a pipeline's idle slots
# best_grid = (4, 1, 2)
# ```
#
# </details>
#
# ## In one breath
# - **Saves** what its axes save: *stage* and *tensor* save bytes, *data* saves time.
# - **Costs** what they cost, over the link that the order of the axes gives them.
# - **Exact within rounding**, for every grid; with a wrong group or wrong rows it is silently wrong.
# - **When**: a model does not fit one card, and you have more cards than one copy needs. Tensor innermost, inside a
#   machine; data outermost; stage between them. If cards are large enough: HSDP.
# - **When not**: whenever the model fits one card. Then use `ddp`, or one card.
#
# ## Sources
# - Narayanan et al. 2021, arXiv 2104.04473, section 3: how the three axes interact, and which goes where.
# - Shoeybi et al. 2019, arXiv 1909.08053, section 5.1 (data x tensor); Grattafiori et al. 2024, *The Llama 3 Herd of
#   Models*, arXiv 2407.21783, section 3.3.2: the order of axes, tensor innermost.
# - Zhao et al. 2023, *PyTorch FSDP*, arXiv 2304.11277, section 3.2.2 (hybrid sharding).
# - torch 2.13: `torch/distributed/device_mesh.py`. Rates of links, with their sources: `cria_tricks/predict/links.py`.
# - Ours: `cria_tricks/parallel/ddp_tensor.py`, `data_pipeline.py`, `hybrid.py`; `tests/parallel/`.
