# ---
# jupyter:
#   question: Sharding gathers every block whole before it runs. Can several cards compute one block together, each with
#     only its part of the matrices?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Tensor parallelism: half of every matrix
# > **Promise.** The largest models are trained with a part of every matrix on each card. This needs only three short
# > functions. But if you forget the first or the last, the loss stays right and the gradients are wrong. You will cut a
# > Llama block with LoRA over two processes, prove that all gradients are right, count what is sent, and predict which
# > link between the cards makes it worthwhile.
# >
# > **Card.** saves the blocks' matrices and the wide activations inside a block, of which each of $N$ processes has
# > $1/N$ / costs four sums in every block (five with checkpointing), each as large as the hidden states, for which all
# > processes wait / exact within rounding / about 25 minutes / after [sharding](sharding.py)
#
# ## 1. The bill
# With [sharding](sharding.py) a card keeps half of each block, but gathers the whole block to compute. [Tensor
# parallelism](../docs/glossary.md#tensor-parallelism) gathers no weights. All cards train on the *same* rows, and each
# computes with its own part of every matrix. So a block's matrices are never whole, and neither are the wide
# activations inside attention and MLP.
#
# Our job, QLoRA of Llama-3.2-1B on 107 training rows of up to 2,048 tokens, does not need it, but is small enough to
# check. Our switch takes no NF4, no 8-bit or paged AdamW, and no fp16 (section 6). So this lesson trains LoRA in bf16
# with plain AdamW, and plans with A100s, because a T4 has no bf16. On one card the peak is 2,970 MiB: 1,856 for the
# blocks' matrices, 194 for the adapter with its gradients and optimizer states, and 920 for the rest, such as the
# embedding, the logits and saved block inputs. Only the matrices are divided by $N$, and two thirds of the adapter.
# What is the peak in each of eight cards?

# %% Your guess: MiB of the peak in each of eight cards tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import logging
import tempfile
import warnings
from dataclasses import replace
from pathlib import Path

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

import bitsandbytes as bnb
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
from cria_tricks import BadInput, Recipe, course, recipes, train
from cria_tricks.course import (
    CARDS,
    LINKS,
    T4,
    Aside,
    CountCollectives,
    Theme,
    compute_seconds,
    ddp,
    diff,
    find_shape,
    folds,
    per_process,
    quiet_libraries,
    resolve,
    step_seconds,
    table,
    with_settings,
)
from cria_tricks.course import tensor_parallel as tensor
from cria_tricks.course import traffic_totals as totals

quiet_libraries()
MIB, GIB = 2**20, 2**30
A100 = CARDS["a100"]
off = ["quantization=none", "double_quantization=false"]
off += ["optimizer=adamw", "paged_optimizer=false"]
off = [f"tricks.{setting}" for setting in off]
job = with_settings(recipes.capstone(A100.device), off)
shape = find_shape(job.model)
MATRICES = ("weights: blocks",)
TRAINED = (
    "weights: adapter",
    "gradients",
    "optimizer states",
    "16-bit copies of weights",
)


def bill(cards, recipe=job):
    """The bill of each card, if they share the matrices."""
    strategy = "tensor" if cards > 1 else "none"
    return per_process(recipe, find_shape(recipe.model), A100.device, strategy, cards)


def size(bill, names):
    """MiB of some lines of the bill, at the peak."""
    return sum(line.bytes for line in bill.lines if line.name in names) / MIB


# %%
parts, lines = {}, []
for cards in (1, 2, 4, 8):
    found = bill(cards)
    peak = found.peak_bytes / MIB
    matrices, adapter = size(found, MATRICES), size(found, TRAINED)
    parts[cards] = matrices, adapter, peak - matrices - adapter
    lines.append([str(cards), *(f"{part:,.0f}" for part in (*parts[cards], peak))])
titles = ("cards", "matrices", "adapter and its states", "rest", "peak, MiB")
course.show_table(table(titles, lines))
course.reveal(guess, bill(8).peak_bytes / MIB, "MiB")

# %% Draw figure 1, and hold the numbers of the text tags=["hide-input"]
assert [round(part) for part in parts[1]] == [1856, 194, 920]
assert [round(bill(cards).peak_bytes / MIB) for cards in (1, 8)] == [2970, 1231]
for _cards, (_matrices, _, _rest) in parts.items():
    assert _matrices == 2 * 16 * shape.block_linear_weights / MIB / _cards
    assert _rest == parts[1][2]


def divided(theme: Theme):
    """The peak of a step by lines of the bill, for one to eight cards."""
    labels = ("blocks' matrices", "adapter, its gradients and states", "rest")
    drawn, axes = course.figure(height=2.9)
    for place, (cards, sizes) in enumerate(parts.items()):
        left = 0.0
        for label, size, colour in zip(labels, sizes, theme.series, strict=False):
            axes.barh(
                place,
                size,
                left=left,
                color=colour,
                height=0.62,
                label=label if cards == 1 else None,
            )
            left += size
    axes.set_yticks(range(len(parts)), [f"{cards} A100" for cards in parts])
    axes.set(xlabel="peak of a step in each card, MiB", ylim=(3.6, -0.6))
    axes.grid(axis="x")
    axes.legend(loc="lower right", fontsize=7.5)
    return drawn


course.show(
    divided,
    "Figure 1. Predicted peak in each card. The matrices are divided, and the rest is "
    "whole in every card, so it soon is most of the peak.",
)

# %% [markdown]
# Each of eight cards still needs more than a third, because the rest is whole in every process.
#
# ## 2. From scratch, in four steps
# **Step 1: cut one matrix.** A layer computes $y=x\,W^\top$, and there are two ways to divide it among processes:
#
# - By *outputs*: each process takes all of $x$ and computes some of the numbers of $y$. In torch $W$ has the shape
#   (outputs, inputs), so this cuts dimension 0. The layer is called *column-parallel*, because these are columns of
#   $W^\top$.
# - By *inputs*, dimension 1: each process takes some of the numbers of $x$. Its result is as wide as $y$, but it is
#   only one term of a sum. The layer is called *row-parallel*.

# %%
import torch
import torch.distributed as dist
import torch.nn.functional as F

from cria_tricks.course import Ranks

torch.manual_seed(0)
B, T, D, M = 2, 32, 64, 128  # rows, tokens, width, width inside the MLP
x = torch.randn(B, T, D, requires_grad=True)
up = (torch.randn(M, D) / D**0.5).requires_grad_()
down = (torch.randn(D, M) / M**0.5).requires_grad_()

upper, lower = up.chunk(2, dim=0)
by_outputs = torch.cat([x @ upper.T, x @ lower.T], dim=-1)
left, right = up.chunk(2, dim=1)
by_inputs = x[..., : D // 2] @ left.T + x[..., D // 2 :] @ right.T
torch.testing.assert_close(by_outputs, x @ up.T)
torch.testing.assert_close(by_inputs, x @ up.T)

# %% [markdown]
# **Step 2: two matrices, one sum.** An MLP is `down(gelu(up(x)))`. If `up` is cut by outputs, each process can apply
# gelu to its own numbers. If `down` is cut by inputs, its part needs just these. So the processes talk once, where an
# [all-reduce](../docs/glossary.md#all-reduce) adds up the terms. We call this sum `g`. Its backward pass sends nothing:
# every process computes the gradient of the sum, which is also that of its own term.
#
# `Ranks(2)` starts two [processes](../docs/glossary.md#rank), and `ranks.run(function)` calls the function in both. Are
# the loss and the gradients now right?


# %%
def mine(W, dim):
    """This process's part of a matrix; all of it, if there is only one process."""
    if not dist.is_initialized():
        return W
    return W.chunk(dist.get_world_size(), dim)[dist.get_rank()]


def add_up(x):
    """The sum over all processes."""
    total = x.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        return add_up(part)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


g = Summed.apply


def first_try(x):
    inner = F.gelu(x @ mine(up, 0).T)
    return g(inner @ mine(down, 1).T)


def step(mlp):
    """The loss, and the gradients of x and of up."""
    loss = mlp(x).square().mean()
    return loss.detach(), *torch.autograd.grad(loss, [x, up])


def apart(found, right):
    """The length of the difference, over the length of the right one."""
    return ((found - right).norm() / right.norm()).item()


ranks = Ranks(2)
loss, of_x, of_up = step(first_try)  # here, in one process
first, second = ranks.run(step, first_try)
# only to compare: each process has the gradient of its part of up, and zeros elsewhere
print(f"loss off by {apart(first[0], loss):.0e}")
print(f"gradient of up off by {apart(first[2] + second[2], of_up):.0e}")
print(f"gradient of x off by {apart(first[1], of_x):.0%}")
assert apart(first[1], of_x) > 0.3

# %% [markdown]
# The loss and the gradient of `up` are right, and there is no error. But the gradient of $x$ is wrong by more than
# half, so all layers *before* this MLP would get wrong gradients. Both processes used all of $x$, but each computes
# only the gradient through its own part of `up`.
#
# **Step 3: add up in the backward pass, too.** The paper on Megatron-LM calls the cure *f*. It does nothing in the
# forward pass, and in the backward pass it adds up the gradients of all processes.


# %%
class Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)  # a tensor of its own, for autograd

    @staticmethod
    def backward(ctx, gradient):
        return add_up(gradient)


f = Copied.apply


def mlp(x):
    inner = F.gelu(f(x) @ mine(up, 0).T)
    return g(inner @ mine(down, 1).T)


_, found, _ = ranks.run(step, mlp)[0]
print(f"gradient of x off by {apart(found, of_x):.0e}")
assert apart(found, of_x) < 1e-6


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
    sketch.text(13, 7.2, "sums backward", align="left", quiet=True)
    sketch.text(36.4, 7.2, "sums forward", align="left", quiet=True)
    return sketch.figure


course.show(
    two_processes,
    "Figure 2. An MLP in two processes. The part of the other process is dashed. "
    "Between f and g nothing is sent.",
)

# %% [markdown]
# **Step 4: a Llama block with LoRA.** An attention head is a group of neighbouring outputs of q, k and v, and heads do
# not look at each other. So cut q, k and v by outputs, which gives each process half of the heads, and cut o by inputs.
# As q, k and v have the same input, they share one `f`, as do gate and up in the MLP. So a block makes two sums forward
# and two backward.
#
# Next to each matrix, [LoRA](lora.py) adds $B A x$. If the matrix is cut by outputs, so is $B$, and $A$ is whole. If it
# is cut by inputs, so is $A$, and $B$ is whole. The loss and the gradient of $x$ are right again, but `f` repairs only
# what comes *before* it. A whole $A$ comes after it, and its gradient flows only through this process's part of $B$. So
# it is one term of a sum, as is that of a whole $B$. We add up these terms once a step, or the copies would drift
# apart.

# %%
H, K, C, r = 4, 2, 16, 4  # heads, key heads, width of a head, rank of LoRA
# outputs and inputs of each matrix
SHAPES = {"q": (H * C, D), "k": (K * C, D), "v": (K * C, D), "o": (D, H * C)}
SHAPES |= {"gate": (M, D), "up": (M, D), "down": (D, M)}
WHOLE = [f"{name}.A" for name in ("q", "k", "v", "gate", "up")] + ["o.B", "down.B"]


def split_outputs(x, w, name):
    adapter = x @ w[name + ".A"].T @ mine(w[name + ".B"], 0).T
    return x @ mine(w[name], 0).T + adapter


def split_inputs(x, w, name):
    adapter = x @ mine(w[name + ".A"], 1).T @ w[name + ".B"].T
    return x @ mine(w[name], 1).T + adapter


def block(x, w):
    """A Llama block, without its rotary positions, which work inside a head."""
    n = f(F.rms_norm(x, (D,)))
    heads = [split_outputs(n, w, name).unflatten(-1, (-1, C)) for name in "qkv"]
    q, k, v = (head.transpose(1, 2) for head in heads)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + g(split_inputs(y.transpose(1, 2).flatten(2), w, "o"))
    n = f(F.rms_norm(x, (D,)))
    inner = F.silu(split_outputs(n, w, "gate")) * split_outputs(n, w, "up")
    return x + g(split_inputs(inner, w, "down"))


def once_a_step(w):
    for name in WHOLE:
        w[name].grad = add_up(w[name].grad)


# %% [markdown]
# ## 3. Prove it
# The claim is *exact within rounding*. A difference by rounding must shrink with more digits, so we compare the loss
# and all 22 gradients in fp32 and in fp64.


# %%
def run(dtype):
    """The loss, all gradients, and the bytes that are summed in each phase."""
    torch.manual_seed(0)
    w = {"x": torch.randn(B, T, D, dtype=dtype)}
    for name, (outputs, inputs) in SHAPES.items():
        w[name] = torch.randn(outputs, inputs, dtype=dtype) / inputs**0.5
        w[name + ".A"] = torch.randn(r, inputs, dtype=dtype) / inputs**0.5
        w[name + ".B"] = torch.randn(outputs, r, dtype=dtype) / r**0.5
    for one in w.values():
        one.requires_grad_()
    with CountCollectives() as forward:
        loss = block(w["x"], w).square().mean()
    with CountCollectives() as backward:
        loss.backward()
    with CountCollectives() as end:
        once_a_step(w)
    sent = [count.bytes["all_reduce"] for count in (forward, backward, end)]
    return loss.detach(), {name: one.grad for name, one in w.items()}, sent


for dtype in (torch.float32, torch.float64):
    loss, expected, _ = run(dtype)
    (first_loss, first, sent), (_, second, _) = ranks.run(run, dtype)
    worst = 0
    for name, right in expected.items():
        found = first[name]
        if name != "x" and name not in WHOLE:
            found = found + second[name]  # each has the gradient of its own part
        worst = max(worst, apart(found, right))
    print(f"{dtype}: loss off by {apart(first_loss, loss):.0e}, worst {worst:.0e}")
    assert worst < 100 * torch.finfo(dtype).eps
print(
    f"fp64, bytes summed: forward {sent[0]:,}, backward {sent[1]:,}, once {sent[2]:,}"
)

# %% [markdown] tags=["deep"]
# ### Deeper: the package cuts a Llama of transformers
# In the package f and g are `Copied` and `Summed`, and `tensor.mlp` is the MLP of step 3. `tensor.split` puts both
# around attention and MLP of a transformers model, with peft's LoRA inside, and turns the cut weights into torch's
# [DTensors](../docs/glossary.md#dtensor). We compare a tiny Llama before and after. The very first `f` sends nothing,
# because nobody needs the gradient of the frozen embedding's result. (With checkpointing it sends, because then the
# inputs of all blocks need gradients.) `once_a_step` is `add_up_partial`, which puts all gradients into one call. The
# job itself adds up in bf16, so there each term of a sum is first rounded to 8 significant bits.


# %% tags=["deep"]
def llama():
    torch.manual_seed(0)
    heads = {"num_attention_heads": H, "num_key_value_heads": K, "num_hidden_layers": 2}
    return LlamaForCausalLM(
        LlamaConfig(hidden_size=D, intermediate_size=M, vocab_size=500, **heads)
    )


def of_the_package():
    """Loss and gradients of a Llama with LoRA, whole and cut; and what was summed."""
    # a module would travel with all that is in it
    from cria_tricks.course import add_up_partial
    from cria_tricks.course import split_matrix as split

    lora = LoraConfig(r=r, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(llama(), lora)
    ids = torch.arange(B * T).view(B, T)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    found = []
    for cut in (False, True):
        if cut:
            split(model, mesh)
        model.zero_grad()
        with CountCollectives() as forward:
            loss = model(input_ids=ids, labels=ids).loss
        with CountCollectives() as backward:
            loss.backward()
        with CountCollectives() as end:
            add_up_partial(model.parameters(), mesh.get_group())
        gradients = [p.grad for p in model.parameters() if p.requires_grad]
        found.append(
            [
                loss.detach(),
                *(
                    one.full_tensor() if isinstance(one, DTensor) else one.clone()
                    for one in gradients
                ),
            ]
        )
    sent = [count.bytes["all_reduce"] for count in (forward, backward, end)]
    return *found, sent


ranks.run(logging.getLogger("bitsandbytes").setLevel, logging.ERROR)
ranks.run(quiet_libraries)
assert torch.equal(ranks.run(lambda: tensor.mlp(x, up, down))[0], ranks.run(mlp, x)[0])
one, two, sent = ranks.run(of_the_package)[0]
worst = max(apart(found, right) for found, right in zip(two, one, strict=True))
print(f"loss {two[0]:.6f} and {one[0]:.6f}")
print(f"the worst of {len(one) - 1} gradients is off by {worst:.0e}")
print(f"two blocks: forward {sent[0]:,} bytes, backward {sent[1]:,}, once {sent[2]:,}")
assert worst < 1e-5
assert run(torch.float32)[2] == [0, 0, 0]  # one process sends nothing
of_a_block = ranks.run(run, torch.float32)[0][2]
wide = 4 * B * T * D  # bytes of one sum
assert of_a_block == [2 * wide, 2 * wide, 4 * r * (5 * D + 2 * D)]
assert sent == [2 * 2 * wide, 2 * 2 * wide - wide, 2 * 4 * r * (5 * D + 2 * D)]

# %% [markdown]
# ## 4. What it costs
# **Bytes.** The proof counted two sums forward and two backward in a block, of $B\,T\,D$ numbers each, and once a step
# the gradients of LoRA's whole matrices. In our job a step has 8 rows, and the model 16 blocks. With checkpointing each
# block runs forward twice, but the second time without its last sum, because no gradient needs the block's output. So a
# block makes $2+1+2$ sums for each row, in bf16. [Data parallelism](data_parallel.py) adds up 43 MiB in a step. How
# many times as much is it here?

# %% Your guess: times the bytes of data parallelism tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
calls = tensor.traffic(job, shape, 2)
summed = totals(calls)["all_reduce"]
of_ddp = totals(ddp.traffic(job, shape, 2))["all_reduce"]
times = sum(call.times for call in calls)
print(f"{summed / MIB:,.0f} MiB in {times} calls; ddp {of_ddp / MIB:.0f} MiB")
course.reveal(guess, summed / of_ddp, "times")

# %% [markdown]
# **Time.** Here no sum overlaps with computation, because the next matrix needs the result. So these times are an upper
# bound: torch and Megatron can split a product, and send one part while they compute the next (*async tensor
# parallelism*). The predicted seconds take rates that NCCL reaches ([the interconnect](interconnect.py)). With
# *sequence* the cards also divide the tokens of norms and residual sums. In the last column they share rows.


# %% Helper: predicted seconds of a step tags=["hide-input"]
def seconds(card, recipe, cards, link, way="tensor"):
    """Predicted seconds of an optimizer step, the middle of a range."""
    computed = compute_seconds(recipe, shape, CARDS[card], way, cards)
    of_way = {"tensor": tensor, "ddp": ddp}[way]
    sent = of_way.traffic(recipe, shape, cards) if cards > 1 else []
    return step_seconds(computed, sent, LINKS[link]).seconds


in_pieces = with_settings(job, ["parallel.sequence=true"])


# %%
links = {"PCIe 4.0": "pcie4", "NVLink": "nvlink_a100", "10 Gbit Ethernet": "10gbe"}
found, lines = {}, []
for cards in (1, 2, 4, 8):
    found[cards] = [seconds("a100", job, cards, link) for link in links.values()]
    found[cards].append(seconds("a100", in_pieces, cards, "nvlink_a100"))
    found[cards].append(seconds("a100", job, cards, "pcie4", "ddp"))
    lines.append([str(cards), *(f"{one:.2f}" for one in found[cards])])
titles = ("A100s", *links, "NVLink, sequence", "data parallel, PCIe 4.0")
course.show_table(table(titles, lines))


# %% Draw figure 3, and hold the numbers of the text tags=["hide-input"]
one_sum = 2 * 2048 * shape.width  # of a row, in bf16
adapters = 4 * 16 * job.lora.r * (5 + 2) * shape.width  # in fp32, once
assert summed == 8 * 16 * (2 + 1 + 2) * one_sum + adapters
assert round(of_ddp / MIB) == 43
on_pcie, on_nvlink, on_ethernet, divided_too, shared = zip(*found.values(), strict=True)
assert round(on_pcie[0] / on_pcie[3], 1) == round(on_nvlink[0] / on_nvlink[1], 1) == 1.4
assert round(on_nvlink[0] / on_nvlink[3], 1) == 2.1
assert [round(divided_too[0] / divided_too[n], 1) for n in (1, 3)] == [1.6, 2.2]
assert min(on_ethernet[1:]) > 3 * on_ethernet[0]
assert abs(shared[1] / on_nvlink[3] - 1) < 0.1
single = folds.time_of(job, shape, CARDS["a100"])
_computed = [compute_seconds(job, shape, A100, "tensor", cards) for cards in (1, 2, 4)]
_divided = 2 * (_computed[0] - _computed[1])
assert abs(_computed[0] - _divided * 3 / 4 - _computed[2]) < 1e-3
assert round(_computed[0], 2) == 1.63
assert round(_computed[0] - _divided, 2) == 0.57
_parts = {part.name: part.seconds for part in single.parts}
assert round(_parts["head"] + _parts["loss"], 2) == 0.24
_in_pieces = compute_seconds(in_pieces, shape, A100, "tensor", 2)
assert [round(took, 2) for took in (_computed[1], _in_pieces)] == [1.10, 0.98]
assert round(2 * _in_pieces - _computed[0], 2) == 0.34
_sent = [sum(call.sent for call in tensor.traffic(job, shape, n)) for n in (2, 4)]
# exercise 3 has the same answer with two cards and with four
_rates = [
    size / (_computed[0] - it) for size, it in zip(_sent, _computed[1:], strict=True)
]
assert abs(_rates[0] / _rates[1] - 1) < 0.01
assert [round(one, 1) for one in (single.low, single.seconds, single.high)] == [
    1.3,
    1.6,
    2.0,
]


def over_links(theme: Theme):
    """Seconds of a step against the number of cards, by link."""
    drawn, axes = course.figure(height=3.0)
    labels = ("tensor, PCIe 4.0", "tensor, NVLink", "data parallel, PCIe 4.0")
    for label, times, colour, marker in zip(
        labels, (on_pcie, on_nvlink, shared), theme.series, "oDs", strict=False
    ):
        axes.plot(
            list(found), times, color=colour, marker=marker, markersize=4, label=label
        )
    axes.set(
        xscale="log",
        xlabel="A100 cards",
        ylabel="seconds of a step, predicted",
        ylim=(0, None),
    )
    axes.set_xticks(list(found), [str(cards) for cards in found])
    axes.minorticks_off()
    axes.grid(axis="y")
    axes.legend(loc="lower left")
    return drawn


course.show(
    over_links,
    "Figure 3. Predicted, middles of ranges (1.3 to 2.0 seconds for one card; all "
    "share this error). With tensor parallelism each doubling "
    "gains less, because the sums stay, and 0.57 of the 1.63 seconds are not divided: "
    "head and loss (0.24) and the work on hidden states between blocks. With "
    "parallel.sequence=true only 0.34 are not divided.",
)

# %% [markdown]
# Over PCIe eight cards are only 1.4 times as fast as one. Over NVLink two are 1.4 times and eight 2.1 times as fast, or
# 1.6 and 2.2 times with `parallel.sequence=true`. Two cards on plain PCIe that share *rows* are about as fast as eight
# on NVLink that share matrices. So share rows whenever you can, and cut matrices if a card cannot hold the model with
# one row.

# %% [markdown] tags=["deep"]
# ### Deeper: five sums or two, and slower cards
# torch's `parallelize_module` takes a plan that names matrices. If the plan names only matrices, then each of q, k, v,
# gate and up has an `f` of its own, so a block makes five sums in the backward pass. `PrepareModuleInput` makes one
# `f` for a whole module. We run both plans, without LoRA, and count the backward pass of two blocks. The gradients are
# the same, so look at the plan before you call tensor parallelism slow.


# %% tags=["deep"]
def by_torch(one_f):
    """Calls and bytes of the backward pass of two blocks."""
    model, mesh = llama(), init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {name: RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
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
    with CountCollectives() as backward:
        loss.backward()
    return backward.calls["all_reduce"], backward.bytes["all_reduce"]


for one_f, sums in ((False, 5), (True, 2)):
    made, size_of_all = ranks.run(by_torch, one_f)[0]
    name = "one f for a module" if one_f else "an f for each matrix"
    print(f"{name:21} {made} sums, {size_of_all:,} bytes")
    assert (made, size_of_all) == (2 * sums, 2 * sums * wide)

# %% [markdown] tags=["deep"]
# In our job, five sums would send 8,206 MiB a step instead of 5,134. Over PCIe two A100s would then save only half as
# much of a step.
#
# On slower cards sending weighs less, because computing takes longer. So two L4s on PCIe are 1.3 times as fast as one.
# A T4 has no bf16, and our switch takes no fp16, so only fp32 is left. There two T4s take three times as long as one
# T4 with the course's switches.

# %% tags=["deep"]
more = [
    replace(call, times=call.times * 5 // 2) if "inputs" in call.why else call
    for call in calls
]
computed = compute_seconds(job, shape, A100, "tensor", 2)
with_five = step_seconds(computed, more, LINKS["pcie4"]).seconds
print(
    f"two A100s with five sums: {with_five:.2f} s, "
    f"{totals(more)['all_reduce'] / MIB:,.0f} MiB"
)
l4 = [seconds("l4", job, cards, "pcie4") for cards in (1, 2)]
print(f"one L4 {l4[0]:.1f} s, two {l4[1]:.1f} s")
t4 = seconds("t4", recipes.capstone(T4), 1, "pcie3")
in_fp32 = with_settings(job, ["tricks.precision=fp32"])
two_t4 = seconds("t4", in_fp32, 2, "pcie3")
print(f"one T4 as the course runs it {t4:.1f} s, two in fp32 {two_t4:.1f} s")
assert round(totals(more)["all_reduce"] / MIB) == 8206
assert 0.4 < (on_pcie[0] - with_five) / (on_pcie[0] - on_pcie[1]) < 0.6
assert round(l4[0] / l4[1], 1) == 1.3
assert round(two_t4 / t4) == 3

# %% [markdown]
# ## 5. The production switch
# In plain PyTorch a plan names each matrix. There `PrepareModuleInput` is our `f`, and `RowwiseParallel` makes the sum
# `g`. torch has no rule for LoRA's two matrices, so our switch cuts peft's adapter itself. The complete command, for
# cards with bf16, is:
#
# ```bash
# cria launch kwanzaa --on torchrun --nproc 2 \
#     --set parallel.strategy=tensor \
#     --set tricks.quantization=none --set tricks.double_quantization=false \
#     --set tricks.optimizer=adamw --set tricks.paged_optimizer=false \
#     --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true
# ```
#
# The table shows its worth: the predicted need of each A100 in a step, with CUDA's own memory.

# %%
print(tensor.PLAIN)
cut = with_settings(job, ["parallel.strategy=tensor"])
print(diff(resolve(job, A100.device), resolve(cut, A100.device, processes=2)))
needs, lines = {}, []
for name in ("llama-3.2-1b", "llama-3.1-8b", "llama-2-13b", "llama-3.1-70b"):
    model = with_settings(job, [f"model={name}"])
    needs[name] = [bill(cards, model).least_bytes / GIB for cards in (1, 2, 4, 8)]
    lines.append([name, *(f"{need:.1f}" for need in needs[name])])
course.show_table(table(("GiB in each of", "1", "2", "4", "8 A100s"), lines))

# %% Hold the numbers of the text tags=["hide-input"]
assert round(A100.device.memory_bytes / GIB, 1) == 39.4
assert [need < 39.4 for need in needs["llama-3.1-70b"]] == [False, False, False, True]
assert round(1 - needs["llama-3.2-1b"][1] / needs["llama-3.2-1b"][0], 1) == 0.3
assert round(1 - needs["llama-2-13b"][1] / needs["llama-2-13b"][0], 2) == 0.46
_large = find_shape("llama-2-13b")
_sharded = per_process(job, _large, A100.device, "fsdp", 2).least_bytes / GIB
assert round(1 - _sharded / needs["llama-2-13b"][0], 2) == 0.42

# %% [markdown]
# These A100s have 39.4 GiB, so a step of Llama-3.1-70B in bf16 fits eight of them, and not four. But our trainer cannot
# start that run, because it loads the whole model on each card before it cuts it. A second card saves 30 % with our
# small model, and 46 % with Llama-2-13B, where nearly all weights are in the blocks. [Sharding](sharding.py) would save
# 42 % there. It sends weights instead of hidden states: more with short rows, and less with long ones.

# %% [markdown] tags=["deep"]
# ### Deeper: the same losses in the real trainer
# A tiny Llama with random weights trains two steps in one process, in two, and in two with [fused
# LoRA](fused_lora.py), which runs unchanged, because inside attention and MLP nothing is sent. The numbers are the
# loss and the norm of the gradient, twice, and the loss of an evaluation.
#
# With `parallel.sequence=true` a process also has only some of the tokens of norms and hidden states between blocks.
# This is Megatron's *sequence parallelism*, and without checkpointing it sends as many bytes. It divides the norms and
# the residual sums, so two A100s compute 0.98 seconds of our step instead of 1.10 (predicted). What is done to the
# inputs of matrices stays whole, because these are gathered first.

# %% tags=["deep"]
folder = tempfile.TemporaryDirectory()
place = folder.name
data = Path(cria_tricks.__file__).parent / "data" / "nguzo_saba_eval.jsonl"
few = "".join(data.read_text(encoding="utf-8").splitlines(keepends=True)[:4])
Path(place, "few.jsonl").write_text(few, encoding="utf-8")
tiny = ["model=random:tiny", "tricks.peft=lora", "lora.r=2", "train.max_steps=2"]
tiny += ["tricks.gradient_accumulation=2", "data.max_length=160"]
tiny += ["tricks.chunked_loss=true", "train.learning_rate=0.01"]
tiny += [f"data.{use}={place}/few.jsonl" for use in ("train", "eval")]


def train_it(name, *settings):
    """Each step's loss and gradient norm, and the evaluation loss after them."""
    aside = Aside()
    aside.quiet = True
    recipe = with_settings(Recipe(name="short"), [*tiny, *settings])
    report = train(recipe, f"{place}/{name}", console=aside)
    history = [
        entry[key]
        for entry in report["history"]
        for key in ("loss", "grad_norm")
        if key in entry
    ]
    return [*history, report["eval_loss_after"]]


alone = train_it("one")
print("one process:", *(f"{number:.6f}" for number in alone))
for name, settings in (("two", []), ("two, fused", ["tricks.fused_lora=true"])):
    two = ranks.run(train_it, name, "parallel.strategy=tensor", *settings)[0]
    print(f"{name + ':':12}", *(f"{number:.6f}" for number in two))
    assert max(abs(p / q - 1) for p, q in zip(two, alone, strict=True)) < 1e-5

# %% [markdown]
# ## 6. Where it breaks
# **Some models and settings cannot be cut.** For our switch the number of processes must divide the heads, those of
# keys and values, and the MLP's columns. Weights in 4 bits are packed before they could be cut. 8-bit AdamW takes no
# cut weights, and fp16's loss scaler takes no mixture of cut and whole ones. Our switch refuses all of these:

# %%
cannot = ["model=smollm2", "tricks.quantization=nf4"]
cannot += ["tricks.optimizer=adamw_8bit", "tricks.precision=fp16"]
for setting in cannot:
    recipe = with_settings(cut, [setting])
    try:
        resolve(recipe, A100.device, processes=2)
        bill(2, recipe)
        raise AssertionError("it must be refused")
    except BadInput as refused:
        print(refused)

# %% [markdown] tags=["deep"]
# ### Deeper: a silent mistake, peft on a model that is already cut, and 4-bit weights
# **Another loss, and no error.** Here the *first* matrix is cut by inputs. So gelu sees one term of a *sum*, and the
# gelus of the terms do not add up to the gelu of the sum. The cure is to cut by outputs first. (A missing `f` does not
# even change the loss, as step 2 showed.) Three more mistakes are as silent. All processes must get the same rows.
# Dropout outside of `f` and `g` must draw the same mask in each of them. And the norm for gradient clipping must count
# whole gradients once, and cut ones of all processes.


# %% tags=["deep"]
def inputs_first(x):
    return g(F.gelu(mine(f(x), -1) @ mine(up, 1).T) @ down.T)


wrong, right = ranks.run(step, inputs_first)[0][0], step(mlp)[0]
print(f"loss {wrong:.4f}, and in one process {right:.4f}")
assert apart(wrong, right) > 0.01

# %% [markdown] tags=["deep"]
# **`shape '[...]' is invalid for input of size ...`.** transformers 5.23 can cut a model by itself (`tp_plan="auto"`).
# If peft then adds its adapters, they are whole: $A$ next to o gets half of the heads as its input, and expects all.
# The cure is to let peft add the adapter first, and to cut both afterwards.


# %% tags=["deep"]
def automatic(folder):
    plan = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
    torch.manual_seed(0)
    lora = LoraConfig(r=r, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(model, lora)
    try:
        model(input_ids=torch.arange(B * T).view(B, T)).logits.square().sum().backward()
    except RuntimeError as error:
        return str(error)
    return next(
        p.grad for name, p in model.named_parameters() if "q_proj.lora_A" in name
    )


llama().save_pretrained(f"{place}/llama")
said, other = ranks.run(automatic, f"{place}/llama")
folder.cleanup()
if isinstance(said, str):
    print(said)
    assert "is invalid for input of size" in said
else:  # older transformers give no error; with peft 0.20 each process trains another A
    print(f"no error; the gradients of A next to q are {apart(said, other):.2f} apart")

# %% [markdown] tags=["deep"]
# **Could 4-bit weights be cut?** Packed weights are half bytes in one flat list, without inputs and outputs. But a
# matrix could be cut *before* it is packed. NF4 scales each group of 64 neighbouring weights by its largest one. So if
# no cut falls inside a group, each process gets the very weights of the whole matrix. A cut through a group gives
# other numbers, equally near to the weights. [Double quantization](nf4.py) uses the mean of all scales of a matrix,
# and each half has another mean. Our switch does not cut first, because transformers packs while it loads.


# %% tags=["deep"]
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
print(f"{'cut':33}equal   off: whole    halves")
for title, matrix, dim, double in (
    ("by outputs", W, 0, False),
    ("by inputs", W, 1, False),
    ("by inputs, through a group", narrow, 1, False),
    ("by inputs, double quantization", W, 1, True),
):
    halves = torch.cat(ranks.run(cut_then_packed, matrix, dim, double), dim)
    whole = as_nf4(matrix, double)
    equal = "yes" if torch.equal(halves, whole) else "no"
    both = f"{apart(whole, matrix):10.4f}{apart(halves, matrix):10.4f}"
    print(f"{title:33}{equal:6}{both}")
    assert torch.equal(halves, whole) == (matrix is W and not double)
# our model, for up to eight processes
assert all(inputs % (64 * 8) == 0 for inputs, _ in shape.linears.values())

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Llama-3.1-8B has width 4,096 and 32 blocks. One row of 4,096 tokens goes through it in bf16. All
#    weights train, without adapter or checkpointing. How many MiB does a process sum for this row, forward and
#    backward, if attention has one `f` and one `g`, and the MLP too?
# 2. **Build.** Megatron cuts the head, too, so a process has the logits of some *words*. Fill in `loss_of_parts`, which
#    returns the cross entropy, with a softmax over all words and the mean over all tokens: one number, the same in
#    every process. Send only a few numbers for each token. `hidden` is (tokens, D), `my_head` is (some words, D) and
#    begins with word number `first`, and `labels` are (tokens). (About nine lines, forward pass only. Some logits are
#    above 88, where the exponential overflows in fp32. `dist.all_reduce` also takes `dist.ReduceOp.MAX`.)
# 3. **Reach.** From which rate of the link on are two A100s faster than one, without the fixed time of the calls? Use
#    `compute_seconds(job, shape, A100, "tensor", N)`, the seconds without links, and `call.sent`, the bytes that a
#    process sends for each of `calls` (all its `times` together).

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
        "it is infinite: subtract the largest logit of all processes first"
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
        f"{most:,} bytes are too many: send a few numbers for each token, and no logits"
    )


course.check(
    1,
    mib_of_a_row,
    course.equal(
        4096,
        "f sums backward and g forward, each as much as the hidden states, "
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
computed = [compute_seconds(job, shape, A100, "tensor", N) for N in (1, 2)]
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
# one, two = (compute_seconds(job, shape, A100, "tensor", N) for N in (1, 2))
# break_even_rate = sum(call.sent for call in calls) / (one - two)  # 10.2e9
# ```
#
# </details>
#
# ## In one breath
# - **Saves** all but $1/N$ of the blocks' matrices, of one of LoRA's two matrices next to each, and of the wide
#   activations inside a block. Our embedding and head stay whole, and without `parallel.sequence=true` also the hidden
#   states between blocks.
# - **Costs** two sums of $B\,T\,D$ numbers (rows, tokens, width) forward and two backward in every block, for which all
#   processes wait, and one more with checkpointing. Once a step the gradients of LoRA's whole matrices are summed.
# - **Exact within rounding**, if every `f` and `g` is in its place, and the gradients of whole matrices are summed. A
#   missing `f` or sum at the end causes no error and no other loss.
# - **When**: a card cannot hold the model with even one row, and NVLink connects the cards. If only the row is too
#   long, take [context parallelism](context_parallel.py).
# - **When not**: over a network, or over PCIe only to be faster; if rows can be shared ([data
#   parallelism](data_parallel.py)); with 4-bit weights ([sharding](sharding.py)). Our job never needs it.
#
# ## Sources
# - Shoeybi et al. 2019, *Megatron-LM*, arXiv 1909.08053, section 3 (outputs first, then inputs; f and g; the cut
#   head).
# - Korthikanti et al. 2022, arXiv 2205.05198, section 4 (sequence parallelism). Async tensor parallelism: torch 2.13,
#   `torch/_inductor/config.py` (`_micro_pipeline_tp`).
# - torch 2.13: `torch/distributed/tensor/parallel/style.py`. transformers 5.23: `distributed/tensor_parallel.py`.
# - Rates of links, each with its source: `cria_tricks/predict/links.py`; of cards: `cria_tricks/hardware/cards.py`.
# - Ours: `cria_tricks/parallel/tensor.py`, `tests/parallel/test_tensor.py`.
