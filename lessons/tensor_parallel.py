# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Tensor parallelism: half of every matrix
# > **Promise.** With two short operators you cut a Llama block over two processes; loss and gradients stay those of
# > one. You count what the two send, 119 times as much as in [the lesson on data parallelism](data_parallel.py), and
# > know what link that needs.
#
# > **Card.** saves the blocks' matrices and what is wide inside a block, of which a process has 1/N / costs sums of
# > $B\,T\,D$ numbers in every block, for which all wait / exact within rounding / 35 minutes / after
# > [sharding](sharding.py)
#
# The job: QLoRA of Llama-3.2-1B on 107 training rows of up to 2,048 tokens. [The lesson on data
# parallelism](data_parallel.py) shared the rows. [The lesson on sharding](sharding.py) divided what is stored, but
# gathered whole matrices to compute. Here matrices of blocks are never whole. All processes take the *same* rows, and
# each computes a part of every block.

# %% Imports and settings tags=["hide-input"]
import logging
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets
# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
import bitsandbytes as bnb
import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import cria_tricks
from cria_tricks import course, recipes
from cria_tricks.bench.style import Theme
from cria_tricks.bill.calls import CountCollectives, totals
from cria_tricks.common.console import Aside
from cria_tricks.common.errors import BadInput
from cria_tricks.course.processes import Ranks
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load.model import quiet_libraries
from cria_tricks.models.shape import find_shape, refuse_undivided
from cria_tricks.parallel import ddp, tensor
from cria_tricks.predict.links import LINKS, compute_seconds, step_seconds
from cria_tricks.predict.per_process import per_process
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.run.run import train
from cria_tricks.step_plan import diff
from cria_tricks.tricks import folds

# two processes, joined by gloo as in data_parallel.py; they end with this notebook
ranks = Ranks(2)
ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
ranks.run(quiet_libraries)
quiet_libraries()
torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## 1. The bill
# NF4, 8-bit and paged AdamW and fp16 cannot come along (section 6). So this bill is of the same recipe without them, in
# bf16, for an A100. Of one card's peak, 2,970 MiB, the blocks' matrices take 1,856, the adapter with gradients and
# states 194, and embedding, logits, saved block inputs and the rest 920. Which is divided? Write down the peak of
# eight.

# %% Your guess: MiB of the peak of eight tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
A100 = CARDS["a100"]
ours = recipes.capstone(A100.device)
refused = [
    "quantization=none",
    "double_quantization=false",
    "optimizer=adamw",
    "paged_optimizer=false",
]
whole = with_settings(ours, [f"tricks.{one}" for one in refused])
shape = find_shape(whole.model)
MATRICES, OTHERS, WAITING = (
    "weights: blocks",
    "weights: all others",
    "saved activations",
)
bills = {
    N: per_process(whole, shape, A100.device, "tensor" if N > 1 else "none", N)
    for N in (1, 2, 4, 8)
}
for N, bill in bills.items():
    held = {
        line.name: line.bytes
        for moment in bill.moments
        if moment.name == "last block"
        for line in moment.lines
    }
    inside = held["open block: saved"] + held["open block: temporary"]
    sizes = {
        "peak": bill.peak_bytes,
        "matrices": held[MATRICES],
        "embedding, norms": held[OTHERS],
    }
    sizes |= {
        "saved block inputs": held[WAITING],
        "inside the open block, later": inside,
    }
    print(
        f"N = {N}:",
        ", ".join(f"{name} {size / MIB:,.0f}" for name, size in sizes.items()),
        "MiB",
    )
    assert held[MATRICES] == 2 * 16 * shape.block_linear_weights / N
    assert (held[OTHERS], held[WAITING]) == (
        2 * (shape.embedding_weights + 33 * 2048),
        16 * 2 * 2048 * 2048,
    )
assert bills[8].peak_bytes > bills[1].peak_bytes / 3
course.reveal(guess, bills[8].peak_bytes / MIB, "MiB")

# %% Draw figure 1 tags=["hide-input"]
TRAINED = (
    "weights: adapter",
    "gradients",
    "optimizer states",
    "16-bit copies of weights",
)
of_one = {line.name: line.bytes / MIB for line in bills[1].lines}  # at the peak
of_trained = sum(of_one[name] for name in TRAINED)
assert [
    round(size) for size in (sum(of_one.values()), of_one[MATRICES], of_trained)
] == [2970, 1856, 194]


def divided(theme: Theme):
    """The peak of a step by lines of the bill, for one to eight processes."""
    groups = {
        "blocks' matrices": (MATRICES,),
        "adapter, its gradients and states": TRAINED,
        "whole: embedding, all that is D wide, logits": (),
    }
    named = {name for names in groups.values() for name in names}
    drawn, axes = course.figure(height=2.9)
    left = dict.fromkeys(bills, 0.0)
    for (label, names), colour in zip(groups.items(), theme.series, strict=False):
        for place, (N, bill) in enumerate(bills.items()):
            taken = [
                line.bytes
                for line in bill.lines
                if line.name in names or not (names or line.name in named)
            ]
            size = sum(taken) / MIB
            axes.barh(
                place,
                size,
                left=left[N],
                color=colour,
                height=0.62,
                label=label if N == 1 else None,
            )
            left[N] += size
    axes.set_yticks(range(len(bills)), [f"N = {N}" for N in bills])
    axes.set(
        xlabel="peak of a step in each process, MiB", ylim=(len(bills) - 0.4, -0.6)
    )
    axes.grid(axis="x")
    axes.legend(loc="lower right")
    return drawn


course.show(
    divided,
    "Figure 1. The matrices are divided; what is whole stays, "
    "and soon is most of the peak.",
)

# %% [markdown]
# Each of eight processes still needs more than a third of that. The embedding is whole in all of them, and so is
# everything of width $D$. Divided are the matrices, one of LoRA's two beside each, and what is wide inside a block:
# heads and MLP.
#
# ## 2. From scratch, in five steps
# **Cut a matrix.** $y = x W^\top$ can be cut in two ways. By *columns* of $W^\top$, its outputs (in torch's $W$
# `dim=0`): every process takes all of $x$ and makes some of $y$. By *rows*, its inputs: every process takes some of
# $x$, and makes one term of a sum, as wide as $y$.

# %%
B, T, D, M = 2, 32, 64, 128  # rows, tokens, width, width inside the MLP
x, up, down = (
    torch.randn(B, T, D),
    torch.randn(M, D) / D**0.5,
    torch.randn(D, M) / M**0.5,
)
side_by_side = torch.cat([x @ W.T for W in up.chunk(2, dim=0)], dim=-1)
added = sum(
    part @ W.T for part, W in zip(x.chunk(2, dim=-1), up.chunk(2, dim=1), strict=True)
)
torch.testing.assert_close(side_by_side, x @ up.T)
torch.testing.assert_close(added, x @ up.T)

# %% [markdown]
# **Columns, then rows.** The MLP is `down(gelu(up(x)))`. Cut `up` by columns, and a process can apply gelu to its own
# numbers. They are just what it needs if `down` is cut by rows. So two matrices cost one sum.
#
# `added_up` makes it in `.data`, where autograd does not look. So autograd sees a copy, and hands the gradient on. That
# is right: each process has the whole sum's gradient already. Are loss and gradients now those of one process? Decide.


# %% Helpers: compare with one process tags=["hide-input"]
def step(mlp, *given):
    """The loss, and the gradients of x, up and down."""
    leaves = [one.clone().requires_grad_() for one in given]
    loss = mlp(*leaves).square().mean()
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def own(grad, name, rank):
    """What a process has of a gradient: its part of what is cut, else all."""
    return grad.chunk(2, CUT[name])[rank] if name in CUT else grad


def apart(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


# %%
def mine(W, dim):
    """Return this process's part of N equal ones; in one process, all of W."""
    return (
        W.chunk(dist.get_world_size(), dim)[dist.get_rank()]
        if dist.is_initialized()
        else W
    )


def added_up(y):
    total = y.clone()
    if dist.is_initialized():
        dist.all_reduce(total.data)
    return total


def first_try(x, up, down):
    return added_up(F.gelu(x @ mine(up, 0).T) @ mine(down, 1).T)


alone = step(first_try, x, up, down)  # here, where nothing is cut
for rank, (loss, of_x, of_up, _) in enumerate(ranks.run(step, first_try, x, up, down)):
    off_up, off_x = (
        apart(of_up.chunk(2)[rank], alone[2].chunk(2)[rank]),
        apart(of_x, alone[1]),
    )
    print(
        f"process {rank}: loss off by {apart(loss, alone[0]):.0e}, "
        f"its part of up by {off_up:.0e}, x by {off_x:.0%}"
    )
    assert max(apart(loss, alone[0]), off_up) < 1e-6
    assert off_x > 0.3

# %% [markdown]
# Loss and gradient of `up` are right, and nothing raises. But the gradient of $x$ is wrong, so everything *before* this
# MLP gets wrong gradients.
#
# **Add up on the way back.** Every process used all of $x$, so each has a part of its gradient. The Megatron-LM paper
# calls the cure *f*: forward nothing, backward a sum. Its mirror is *g*, our `added_up`: forward a sum, backward
# nothing.


# %%
def f(x):
    x = x.view_as(x)  # another tensor, so that the hook is on this use of x
    if x.requires_grad:
        x.register_hook(added_up)
    return x


g = added_up


def mlp(x, up, down):
    return g(F.gelu(f(x) @ mine(up, 0).T) @ mine(down, 1).T)


for found in ranks.run(step, mlp, x, up, down):
    assert apart(found[1], alone[1]) < 1e-6


# %% Draw figure 2 tags=["hide-input"]
def two_processes(theme: Theme):
    """An MLP in two processes: what each has, and where they meet."""
    sketch = course.Sketch(theme, 44, 15)
    for rank, top in enumerate((0.6, 8.4)):
        sketch.text(0, top + 2.4, f"process {rank}", align="left")
        sketch.tensor(6, top + 0.6, 3, 3.6, "x", color=0)
        sketch.tensor(
            13.4, top, 3.2, 2, "up" if rank == 0 else "", color=1, kept=rank == 0
        )
        sketch.tensor(
            13.4, top + 2.8, 3.2, 2, "up" if rank == 1 else "", color=1, kept=rank == 1
        )
        sketch.tensor(19.6, top + 0.6, 1.7, 3.6, "", color=0, kept=rank == 0)
        sketch.tensor(21.6, top + 0.6, 1.7, 3.6, "", color=0, kept=rank == 1)
        sketch.text(21.4, top + 5.5, "gelu", quiet=True)
        sketch.tensor(26.4, top, 2, 4.8, "", color=1, kept=rank == 0)
        sketch.tensor(28.8, top, 2, 4.8, "", color=1, kept=rank == 1)
        sketch.text(28.6, top + 5.5, "down", quiet=True)
        sketch.tensor(38.6, top + 0.6, 3, 3.6, "y", color=0)
        for start, end in ((9.2, 13.1), (16.8, 19.3), (23.5, 26.1), (31.1, 38.3)):
            sketch.arrow((start, top + 2.4), (end, top + 2.4))
    for place, name in ((11.2, "f"), (34.8, "g")):
        sketch.arrow((place, 7.6), (place, 3.4), color=2)
        sketch.arrow((place, 7.6), (place, 10.4), color=2)
        sketch.text(place + 0.5, 7.2, name, align="left")
    sketch.text(13, 7.2, "sums on the way back", align="left", quiet=True)
    sketch.text(36.4, 7.2, "sums forward", align="left", quiet=True)
    return sketch.figure


course.show(
    two_processes,
    "Figure 2. Columns, then rows. Dashed is the other's part. "
    "Between f and g no process asks the other anything.",
)

# %% [markdown]
# **Attention: cut by heads.** A head is $C$ neighbouring outputs of q, k and v, and heads do not look at each other. So
# q, k and v are cut by columns and o by rows, with f in front and g behind.
#
# **One f for all that share an input.** q, k and v multiply the same $x$, and gate and up another. A process adds up
# their gradients for it anyway. So one f stands in front of attention and one in front of the MLP: two sums on the way
# back, and not five.
#
# **LoRA: cut beside.** It adds [the lesson on LoRA](lora.py)'s $B A x$. Beside a matrix cut by columns $B$ is cut,
# because it has the same outputs, and $A$ is whole. Beside one cut by rows $A$ is cut, and $B$ is whole. Both stay
# between f and g, so the loss and the gradient of $x$ are right. Which gradients are still wrong? Decide.

# %%
H, K, C, r = 4, 2, 16, 4  # heads, key heads, width of a head, rank
# inputs, outputs
WIDTHS = {"q": (D, H * C), "k": (D, K * C), "v": (D, K * C), "o": (H * C, D)}
WIDTHS |= {"gate": (D, M), "up": (D, M), "down": (M, D)}
# the dimension: 0 for columns, 1 for rows
CUT = {name: 1 if name in ("o", "down") else 0 for name in WIDTHS}
# LoRA's matrices that are not cut
WHOLE = [f"{name}.B" if dim else f"{name}.A" for name, dim in CUT.items()]
# and those that are
CUT |= {f"{name}.A" if dim else f"{name}.B": dim for name, dim in CUT.items()}


def columns(fx, w, name):
    return fx @ mine(w[name], 0).T + fx @ w[name + ".A"].T @ mine(w[name + ".B"], 0).T


def rows(x, w, name):
    return x @ mine(w[name], 1).T + x @ mine(w[name + ".A"], 1).T @ w[name + ".B"].T


def block(x, w):
    n = f(F.rms_norm(x, (D,)))
    # Rotary positions are left out; they work inside a head.
    q, k, v = (columns(n, w, name).view(B, T, -1, C).transpose(1, 2) for name in "qkv")
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + g(rows(y.transpose(1, 2).reshape(B, T, -1), w, "o"))
    n = f(F.rms_norm(x, (D,)))
    return x + g(rows(F.silu(columns(n, w, "gate")) * columns(n, w, "up"), w, "down"))


def once_a_step(w):
    """Sum the gradients of A beside columns and of B beside rows, in one call."""
    gradients = [w[name].grad for name in WHOLE if dist.is_initialized()]
    if gradients:
        total = added_up(torch.cat([gradient.flatten() for gradient in gradients]))
        for gradient, summed in zip(
            gradients, total.split([one.numel() for one in gradients]), strict=True
        ):
            gradient.copy_(summed.view_as(gradient))


# %% [markdown]
# Those of LoRA's whole matrices. Beside columns each process multiplies $A x$ by its own part of $B$ only, so it gets a
# part of $A$'s gradient. Beside rows it has one term of the sum $A x$, so it gets a part of $B$'s. `once_a_step` sums
# the parts after the last micro-batch, in one call.
#
# ## 3. Prove it
# The claim is *exact within rounding*, so finer numbers must bring a smaller error. Compare in fp32 and in fp64.


# %%
def run(dtype):
    """The loss, all gradients, and what was sent forward, back and at the end."""
    torch.manual_seed(0)
    w = {}
    for name, (d_in, d_out) in WIDTHS.items():
        w[name], w[name + ".A"] = (
            torch.randn(n, d_in, dtype=dtype) / d_in**0.5 for n in (d_out, r)
        )
        w[name + ".B"] = torch.randn(d_out, r, dtype=dtype) / r**0.5
    w["x"] = torch.randn(B, T, D, dtype=dtype)
    leaves = [one.requires_grad_() for one in w.values()]
    with CountCollectives() as forward:
        loss = block(w["x"], w).square().mean()
    with CountCollectives() as back:
        loss.backward()
    with CountCollectives() as end:
        once_a_step(w)
    return (
        loss.detach(),
        dict(zip(w, [p.grad for p in leaves], strict=True)),
        forward,
        back,
        end,
    )


for dtype in (torch.float32, torch.float64):
    expected, off = run(dtype), 0.0
    found = ranks.run(run, dtype)
    for rank, (_, grads, *_) in enumerate(found):
        for name, grad in grads.items():
            off = max(
                off, apart(own(grad, name, rank), own(expected[1][name], name, rank))
            )
    loss_off = apart(found[0][0], expected[0])
    print(
        f"{str(dtype)[6:]}: loss off by {loss_off:.0e}, "
        f"the worst of {len(grads)} gradients by {off:.0e}"
    )
    assert off < 100 * torch.finfo(dtype).eps
    assert torch.equal(found[0][0], found[1][0])

# %% [markdown]
# In the package f and g are `Copied` and `Summed`, and `tensor.mlp` is the MLP above. `tensor.split` puts them around
# attention and MLP of a transformers model with peft's LoRA. The cut weights become torch's *DTensor*, which knows how
# it is cut.


# %% Helpers: a small Llama, cut by the package tags=["hide-input"]
def llama():
    torch.manual_seed(0)
    heads = {"num_attention_heads": H, "num_key_value_heads": K, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=D, intermediate_size=M, vocab_size=500, **heads)
    )


def engine():
    """Loss and gradients of a Llama with LoRA, whole and cut; what was sent."""
    # a module would travel with all that is in it
    from cria_tricks.parallel.tensor import add_up_partial, split

    lora = LoraConfig(r=r, target_modules="all-linear", init_lora_weights=False)
    model, ids, found = (
        get_peft_model(llama(), lora),
        torch.arange(B * T).view(B, T),
        [],
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for cut in (False, True):
        if cut:
            split(model, mesh)
        model.zero_grad()
        with CountCollectives() as forward:
            loss = model(input_ids=ids, labels=ids).loss
        with CountCollectives() as back:
            loss.backward()
        with CountCollectives() as end:
            add_up_partial(model.parameters(), mesh.get_group())
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        grads = [
            grad.full_tensor() if isinstance(grad, DTensor) else grad.clone()
            for grad in grads
        ]
        found.append((loss.detach(), *grads))
    return *found, forward, back, end


# %%
assert torch.equal(
    ranks.run(tensor.mlp, x, up, down)[0], ranks.run(mlp, x, up, down)[0]
)
one, two, *of_package = ranks.run(engine)[0]
worst = max(apart(found, expected) for found, expected in zip(two, one, strict=True))
print(
    f"package: loss {two[0]:.6f} and {one[0]:.6f}, "
    f"the worst of {len(one) - 1} gradients off by {worst:.0e}"
)
assert worst < 1e-5

# %% [markdown]
# ## 4. What it costs
# How many sums does our block make, forward and back, and of how many numbers? How many once a step? Count f and g in
# the code above.

# %%
# A beside five matrices, and B beside two
wide, matrices = 4 * B * T * D, 4 * r * (5 * D + 2 * D)
forward, back, end = (
    count.bytes["all_reduce"] for count in ranks.run(run, torch.float32)[0][2:]
)
print(
    f"ours, a block:       forward {forward:,} bytes, back {back:,}, "
    f"once a step {end:,}"
)
assert forward == back == 2 * wide  # g behind attention and MLP; f in front of them
assert end == matrices
forward, back, end = (count.bytes["all_reduce"] for count in of_package)
print(
    f"package, two blocks: forward {forward:,} bytes, back {back:,}, "
    f"once a step {end:,}"
)
assert (forward, end) == (2 * 2 * wide, 2 * matrices)
# the first f sends nothing: nobody needs the frozen embedding's gradient
assert back == 2 * 2 * wide - wide

# %% [markdown]
# torch's `parallelize_module` takes a plan that names matrices. Then each of q, k, v, gate and up has an f of its own.
# `PrepareModuleInput` makes one f for a whole module. We run both plans, without LoRA, and count the way back.


# %% Helper: count the backward pass of torch's plan tags=["hide-input"]
def by_torch(one_f):
    """Calls and bytes of the backward pass of two blocks."""
    model, mesh = llama(), init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"} | {
        "self_attn.o_proj": RowwiseParallel()
    }
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")} | {
        "mlp.down_proj": RowwiseParallel()
    }
    if one_f:
        named = {"hidden_states": Replicate()}
        plan["self_attn"] = PrepareModuleInput(
            input_kwarg_layouts=named, desired_input_kwarg_layouts=named
        )
        plan["mlp"] = PrepareModuleInput(
            input_layouts=(Replicate(),), desired_input_layouts=(Replicate(),)
        )
    for layer in model.model.layers:
        parallelize_module(layer, mesh, plan)
    ids = torch.arange(B * T).view(B, T)
    loss = model(input_ids=ids, labels=ids).loss
    with CountCollectives() as back:
        loss.backward()
    return back.calls["all_reduce"], back.bytes["all_reduce"]


# %%
for one_f, sums in ((False, 5), (True, 2)):
    made, size = ranks.run(by_torch, one_f)[0]
    print(
        f"{'one f for a module' if one_f else 'an f for each matrix':21} {made} "
        f"sums, {size:,} bytes"
    )
    assert (made, size) == (2 * sums, 2 * sums * wide)

# %% [markdown]
# Five or two sums in every block, for the same gradients. So look at the plan before you call tensor parallelism slow.
#
# In our job an optimizer step is 8 rows through 16 blocks, $r = 16$, with checkpointing. It runs every block forward
# again, but stops before the last sum, which nobody needs again. How many MiB does a process add up in bf16? [The
# lesson on data parallelism](data_parallel.py) added up 43.

# %%
calls = tensor.traffic(whole, shape, 2)
sums, gradients = (
    totals(found)["all_reduce"] for found in (calls, ddp.traffic(whole, shape, 2))
)
one_sum = 2 * 2048 * shape.width  # of a row, in bf16
adapters = 4 * 16 * whole.lora.r * (5 + 2) * shape.width  # in fp32, once
# rows, blocks; forward, again, back
assert sums == 8 * 16 * (2 + 1 + 2) * one_sum + adapters
print(
    f"{sums / MIB:,.0f} MiB in {sum(call.times for call in calls):,} calls, "
    f"{sums / gradients:.0f} times as much"
)
print(f"with an f for each matrix {(sums + 8 * 16 * 3 * one_sum) / MIB:,.0f} MiB")
assert 119 < sums / gradients < 120

# %% [markdown]
# Hardly a call can hide, because the next product needs its result. By [the lesson on choosing
# hardware](choose_your_hardware.py)'s estimate one A100 computes for some 1.6 seconds. A call takes microseconds,
# however small, and its bytes at the rate that NCCL really gets ([the interconnect](interconnect.py)): 24 GB a second
# of PCIe 4.0. Guess the best number of A100s on PCIe.


# %% Helper: seconds of a step tags=["hide-input"]
def seconds_of(card, recipe, N, link, way="tensor", sums_back=2):
    """An optimizer step of one of N processes: heads and MLP are divided; norms,
    residual sums and head are not."""
    calls = (
        {"tensor": tensor, "ddp": ddp}[way].traffic(recipe, shape, N) if N > 1 else []
    )
    # Those of f, on the way back, are about the inputs of attention and MLP.
    calls = [
        replace(call, times=call.times * sums_back // 2)
        if "inputs" in call.why
        else call
        for call in calls
    ]
    return step_seconds(
        compute_seconds(recipe, shape, CARDS[card], way, N), calls, LINKS[link]
    ).seconds


# %% Estimate the seconds of one to eight cards tags=["hide-input"]
one = seconds_of("a100", whole, 1, "pcie4")
single = folds.step(whole, shape, CARDS["a100"])
print(f"alone {single.low:.1f} to {single.high:.1f} s; in the middle:")
on_pcie, on_nvlink = {}, {}
for N in (1, 2, 4, 8):
    times = {
        LINKS[link].name: seconds_of("a100", whole, N, link)
        for link in ("pcie4", "nvlink_a100", "10gbe")
    }
    print(
        f"{N} A100:",
        ", ".join(f"{name} {seconds:.2f}" for name, seconds in times.items()),
        end="",
    )
    five_back = seconds_of("a100", whole, N, "pcie4", sums_back=5)
    print(
        f"; PCIe with 5 sums {five_back:.2f}; "
        f"data parallel {seconds_of('a100', whole, N, 'pcie4', 'ddp'):.2f} s"
    )
    on_pcie[N], on_nvlink[N] = times["PCIe 4.0 x16"], times["NVLink of an A100"]
    assert N == 1 or times["10 Gbit Ethernet"] > 3 * one
saved = {N: 1 - seconds / one for N, seconds in on_pcie.items()}
print(
    "PCIe saves",
    ", ".join(f"{share:.0%} with {N}" for N, share in saved.items() if N > 1),
)
assert 0.15 < saved[2] < 0.2 < saved[4] < 0.28 < saved[8] < 0.3
assert 1.4 < one / on_nvlink[2] < 1.5
assert 2 < one / on_nvlink[8] < 2.2
assert abs(seconds_of("a100", whole, 2, "pcie4", "ddp") / on_nvlink[8] - 1) < 0.1


# %% Draw figure 3 tags=["hide-input"]
def over_links(theme: Theme):
    """Seconds of a step against the number of cards, by link."""
    drawn, axes = course.figure(height=3.0)
    many = (1, 2, 4, 8)
    for link, colour, marker in zip(
        ("pcie4", "nvlink_a100"), theme.series, "oD", strict=False
    ):
        found = [seconds_of("a100", whole, N, link) for N in many]
        axes.plot(
            many,
            found,
            color=colour,
            marker=marker,
            markersize=4,
            label=f"tensor, {LINKS[link].name}",
        )
    found = [seconds_of("a100", whole, N, "pcie4", sums_back=5) for N in many]
    axes.plot(
        many,
        found,
        color=theme.series[0],
        linestyle=(0, (4, 3)),
        label="the same with 5 sums back, PCIe",
    )
    found = [seconds_of("a100", whole, N, "pcie4", "ddp") for N in many]
    axes.plot(
        many,
        found,
        color=theme.series[2],
        marker="s",
        markersize=4,
        label="data parallel, PCIe 4.0 x16",
    )
    axes.set(
        xscale="log",
        xlabel="A100 cards",
        ylabel="seconds of a step, estimated",
        ylim=(0, None),
    )
    axes.set_xticks(many, [str(N) for N in many])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    over_links,
    "Figure 3. Middles of ranges. "
    "Over PCIe two A100s save a sixth of a step and eight less than a third; with five "
    "sums back (dashed) about half of that is lost. "
    "Over NVLink eight are twice as fast as one. Some parts stay whole, "
    "so each doubling gains less.",
)

# %% [markdown]
# Over PCIe eight cards are 1.4 times as fast as one. Over NVLink two are 1.4 times as fast, and eight 2.1 times. Over
# Ethernet a step takes more than three times as long as on one card. Two cards on PCIe that share *rows* are about as
# fast as eight on NVLink that share matrices. So share rows if you can. Cut matrices when a card cannot train even one
# row. Sending weighs less on slower cards (L4). A T4 has no bf16, and our switch takes no fp16, so fp32 is left:

# %%
l4 = [seconds_of("l4", whole, N, "pcie4") for N in (1, 2)]
t4 = seconds_of("t4", recipes.capstone(T4), 1, "pcie3")
two_t4 = seconds_of("t4", with_settings(whole, ["tricks.precision=fp32"]), 2, "pcie3")
print(
    f"one L4 {l4[0]:.1f} s, two {l4[1]:.1f}; one T4 as the course runs it {t4:.1f}, "
    f"two in fp32 {two_t4:.1f}"
)
assert l4[0] / 1.5 < l4[1] < l4[0]
assert two_t4 > 2.5 * t4

# %% [markdown]
# ## 5. The production switch

# %%
command = "cria launch kwanzaa --on torchrun --nproc 2 --set parallel.strategy=tensor"
print(command, *(f"--set tricks.{one}" for one in refused), sep=" \\\n    ")
switched = with_settings(whole, ["parallel.strategy=tensor"])
print(diff(resolve(whole, A100.device), resolve(switched, A100.device, processes=2)))

# %% [markdown]
# The plan changes in one word. The switch cuts peft's matrices as in section 2, and hooks put f and g around attention
# and MLP. Inside nothing is sent, so `fused_lora` ([fused LoRA](fused_lora.py)) runs unchanged. With
# `parallel.sequence=true` the tokens of norms and residual stream are divided. The saved adapter is whole. A tiny
# model: loss and gradient norm, twice, and an evaluation:


# %% Train in two processes tags=["hide-input"]
folder = tempfile.TemporaryDirectory()
place = folder.name
lines = (
    Path(cria_tricks.__file__).parent / "data" / "nguzo_saba_eval.jsonl"
).read_text(encoding="utf-8")
Path(place, "few.jsonl").write_text(
    "".join(lines.splitlines(keepends=True)[:4]), encoding="utf-8"
)


def tiny(name, *settings):
    """Each step's loss and gradient norm, and the evaluation loss after them."""
    few = [
        "train.max_steps=2",
        "train.learning_rate=0.01",
        "data.max_length=160",
        "tricks.gradient_accumulation=2",
    ]
    few += [
        "model=random:tiny",
        "tricks.peft=lora",
        "lora.r=2",
        "tricks.chunked_loss=true",
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
expected = tiny("one")
print("one process:", *(f"{number:.6f}" for number in expected))
for name, settings in (("two", []), ("two, fused", ["tricks.fused_lora=true"])):
    found = ranks.run(tiny, name, "parallel.strategy=tensor", *settings)[0]
    print(f"{name + ':':12}", *(f"{number:.6f}" for number in found))
    assert max(abs(a / b - 1) for a, b in zip(found, expected, strict=True)) < 1e-5

# %% [markdown]
# ## 6. Where it breaks
# **Another loss, and no error.** The first matrix was cut by rows. Then gelu sees one term of a *sum*, and gelus of
# terms do not add up to the gelu of the sum. Cure: columns first. (A missing f does not even change the loss.)


# %%
def rows_first(x, up, down):
    return g(F.gelu(mine(f(x), -1) @ mine(up, 1).T) @ down.T)


wrong = ranks.run(step, rows_first, x, up, down)[0][0]
print(f"loss {wrong:.4f}, and in one process {alone[0]:.4f}")
assert apart(wrong, alone[0]) > 0.01

# %% [markdown]
# **`shape '[...]' is invalid for input of size ...`.** transformers 5.23 cuts a model by itself (`tp_plan="auto"`),
# then peft 0.21 puts whole adapters beside the parts. $A$ beside o gets half of the heads, and expects all. Cure: first
# peft, then cut both.


# %% Helper: cut by transformers tags=["hide-input"]
def automatic(place):
    plan = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(place, distributed_config=plan)
    torch.manual_seed(0)
    model = get_peft_model(
        model, LoraConfig(r=r, target_modules="all-linear", init_lora_weights=False)
    )
    try:
        model(input_ids=torch.arange(B * T).view(B, T)).logits.square().sum().backward()
        return next(
            p.grad for name, p in model.named_parameters() if "q_proj.lora_A" in name
        )
    except RuntimeError as error:
        return str(error)


# %%
llama().save_pretrained(f"{place}/llama")
said, other = ranks.run(automatic, f"{place}/llama")
folder.cleanup()
if isinstance(said, str):
    print(said)
    assert "is invalid for input of size" in said
else:  # transformers 5.16 with peft 0.20: each process trains another A
    print(
        f"no error, but the gradients of A beside q are {apart(said, other):.2f} apart"
    )
    assert apart(said, other) > 0.01

# %% [markdown]
# **NF4 cannot be cut after it is packed.** Packed weights are half bytes in one flat list, without rows and columns.
# But a matrix can be cut *before*. NF4 scales each group of 64 neighbouring weights by its largest. So if no cut falls
# inside a group, each process gets the very weights that it would get from the whole. Does that hold for both cuts?


# %%
def as_nf4(W, double=False):
    """W as products see it after NF4. Flat, because bitsandbytes 0.50.2 unpacks rows of
    96 wrongly on a CPU."""
    packed, state = bnb.functional.quantize_4bit(
        W.reshape(1, -1), quant_type="nf4", compress_statistics=double
    )
    return bnb.functional.dequantize_4bit(packed, state).view_as(W)


def cut_then_packed(W, dim, double=False):
    return as_nf4(mine(W, dim), double)


# half of 96 is no multiple of 64
W, narrow = torch.randn(256, 512), torch.randn(256, 96)
for title, matrix, dim, double in (
    ("by outputs", W, 0, False),
    ("by inputs", W, 1, False),
    ("by inputs, through a group", narrow, 1, False),
    ("by inputs, double quantization", W, 1, True),
):
    found = torch.cat(ranks.run(cut_then_packed, matrix, dim, double), dim)
    expected = as_nf4(matrix, double)
    print(
        f"{title:31} equal: {torch.equal(found, expected)}, "
        f"off by {apart(found, expected):.4f};",
        end=" ",
    )
    print(
        f"from the weights: NF4 of the whole {apart(expected, matrix):.4f}, "
        f"of halves {apart(found, matrix):.4f}"
    )
    assert torch.equal(found, expected) == (matrix is W and not double)
# our model, for up to eight processes
assert all(d_in % (64 * 8) == 0 for d_in, _ in shape.linears.values())

# %% [markdown]
# Both cuts are exact. A cut through a group gives other numbers, equally near to the weights. Double quantization uses
# the mean of all scales of a matrix, and each half has another mean. Our switch does not cut first, because
# transformers packs while it loads.
#
# **Refused, and why.** Each line says it. (fp16's loss scaler cannot look for overflow in a mixture of whole and cut
# gradients.)


# %% Helper: print a refusal tags=["hide-input"]
def print_refusal(call):
    try:
        call()
        raise AssertionError("it must be refused")
    except BadInput as refusal:
        print(refusal)


# %% Show what the package refuses tags=["hide-input"]
# 9 heads, 3 of keys: half a head is no head
print_refusal(partial(refuse_undivided, "SmolLM2", 9, 3, 1536, 2))
for setting in ("quantization=nf4", "optimizer=adamw_8bit", "precision=fp16"):
    print_refusal(
        partial(
            resolve,
            with_settings(switched, [f"tricks.{setting}"]),
            A100.device,
            processes=2,
        )
    )

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Llama-3.1-8B: width 4,096, 32 blocks, one row of 4,096 tokens in bf16, no adapter, nothing
#    checkpointed. With one f and one g around attention, and again around the MLP, how many MiB does a process add up
#    for a row, forward and back?
# 2. **Build.** Megatron cuts the head, too: a process has some of the *words*. Fill in `loss_of_parts`. It returns the
#    mean cross entropy of whole logits, one number, the same in every process. Send only a few numbers a token.
#    `hidden` is (tokens, D), `my_head` (some words, D) has the words from number `first` on, `labels` (tokens) are any
#    words. (About nine lines, forward only. Logits are beyond 88, where fp32's exp overflows; `dist.all_reduce` also
#    knows `dist.ReduceOp.MAX`.)
# 3. **Reach.** From which rate on, in bytes a second that collectives get, are two A100s faster than one? Leave the
#    calls' fixed time out. (Use `compute_seconds`, as in `seconds_of`, and `call.sent`, bytes, of each of `calls`.)

# %% tags=["exercise"]
mib_of_a_row = None


def loss_of_parts(hidden, my_head, labels, first):
    """FILL ME IN."""


break_even_rate = None


# %% Check the exercises tags=["hide-input"]
def of_parts(answer):
    if not callable(answer):
        raise TypeError(f"this is a {type(answer).__name__}")
    torch.manual_seed(0)
    hidden, head, labels = (
        20 * torch.randn(64, D),
        torch.randn(1000, D),
        torch.randint(1000, (64,)),
    )

    def one_of_two():
        begins = (0, 600, 1000)  # one has more words than the other
        first, end = begins[dist.get_rank()], begins[dist.get_rank() + 1]
        with CountCollectives() as count:
            return answer(hidden, head[first:end], labels, first), count.bytes

    try:
        found, sizes = zip(*ranks.run(one_of_two), strict=True)
    except RuntimeError as error:
        last = str(error).strip().splitlines()[-1]  # of a traceback in another process
        raise RuntimeError(last.partition(": ")[2] or last) from None
    if found[0] is None:
        raise NotImplementedError
    right = F.cross_entropy(hidden @ head.T, labels)
    assert all(torch.isfinite(one) for one in found), (
        "infinite: subtract the largest logit of all processes first"
    )
    said = ", ".join(f"{one:.4f}" for one in found)
    hint = (
        "one largest logit and one sum for all words, and each label's logit from the "
        "process that has it"
    )
    assert all(abs(one / right - 1) < 1e-5 for one in found), (
        f"not {said} but {right:.4f} in every process: {hint}"
    )
    most = sum(sizes[0].values())
    assert most <= 64 * 4 * 4, (
        f"{most:,} bytes: a few numbers a token are enough, logits stay at home"
    )


course.check(
    1,
    mib_of_a_row,
    course.equal(
        4096,
        "f sums on the way back and g forward, each as much as the hidden states, "
        "2 bytes a number",
    ),
    "a number of MiB",
)
course.check(
    2,
    loss_of_parts,
    of_parts,
    "a function (hidden, my_head, labels, first) -> the loss, a tensor of one number",
)
computed = [compute_seconds(whole, shape, A100, "tensor", N) for N in (1, 2)]
rate = sum(call.sent for call in calls) / (computed[0] - computed[1])
hint = (
    "the seconds that two cards save in computing must pay for all that a process "
    "sends in a step"
)
course.check(3, break_even_rate, course.about(rate, hint), "a number of bytes a second")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# mib_of_a_row = 4 * 32 * 2 * 4096 * 4096 / 2**20
#
#
# def loss_of_parts(hidden, my_head, labels, first):
#     z = hidden @ my_head.T
#     largest = z.amax(1)
#     dist.all_reduce(largest, dist.ReduceOp.MAX)
#     place = labels - first
#     here = (place >= 0) & (place < len(my_head))
#     its_own = z.gather(1, place.clamp(0, len(my_head) - 1)[:, None])[:, 0] * here
#     both = torch.stack([(z - largest[:, None]).exp().sum(1), its_own])
#     dist.all_reduce(both)
#     return (both[0].log() + largest - both[1]).mean()
#
#
# one, two = (compute_seconds(whole, shape, A100, "tensor", N) for N in (1, 2))
# break_even_rate = sum(call.sent for call in calls) / (one - two)
# ```
#
# </details>
#
# ## In one breath
# - **Saves** all but 1/N of the blocks' matrices, of one of LoRA's two beside each, and of what is wide inside a block.
#   The embedding, the head and what goes from block to block are whole in every process.
# - **Costs** two sums of $B\,T\,D$ forward and two back in every block, for which all wait; one more with
#   checkpointing; and once a step a sum of the gradients of LoRA's whole matrices.
# - **Exact within rounding**, if every f and g is in its place, and the whole matrices are summed. What is missing is
#   silent.
# - **When**: a card cannot train even one row, and the cards have NVLink. (If only the length of the row is too much:
#   [the lesson on context parallelism](context_parallel.py).)
# - **When not**: over a network; over PCIe for speed alone; when rows can be shared ([data
#   parallelism](data_parallel.py)); with NF4 ([sharding](sharding.py)). For our job: never.
#
# ## Sources
# - Shoeybi et al. 2019, *Megatron-LM*, arXiv 1909.08053, section 3: columns and rows, f and g, the cut head.
# - Korthikanti et al. 2022, arXiv 2205.05198, section 4: *sequence parallelism* also cuts what is whole between g and
#   the next f, by tokens, for the same bytes. Ours does not.
# - torch 2.13: `torch/distributed/tensor/parallel/style.py`. transformers 5.23: `distributed/tensor_parallel.py`.
# - Rates of links, each with its source: `cria_tricks/predict/links.py`; of cards: `cria_tricks/hardware/cards.py`.
# - Ours: `cria_tricks/parallel/tensor.py`, `tests/parallel/test_tensor.py`.
