# ---
# jupyter:
#   question: How can a model learn while nearly all of its weights are frozen, and how much memory does that save?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # LoRA: freeze the model, train two thin matrices
# > **Promise.** Full fine-tuning of Llama-3.2-1B keeps 9.2 GiB of optimizer states. With LoRA they take 0.1 GiB,
# > because you train 11 million numbers in place of 1.2 billion. After this lesson you can write LoRA yourself, choose
# > rank, alpha, learning rate and matrices for your own run, and merge the result back into the model.
# >
# > **Card.** saves gradients and optimizer states of all frozen weights / costs two thin matrix multiplications next to
# > every adapted one / reparametrised: the same start, but only changes of low rank / about 25 minutes / after [the
# > bill](the_bill.py)
#
# [The lesson on the bill](the_bill.py) found that plain training of Llama-3.2-1B needs 32,046 MiB at its peak, more
# than twice the memory of a T4. The optimizer states alone take 9,428 MiB, and LoRA (low-rank adaptation) makes these
# nearly disappear. It comes first because other techniques need frozen weights.

# %% Imports and settings tags=["hide-input"]
from collections import OrderedDict

from peft import LoraConfig, get_peft_model

from cria_tricks import course
from cria_tricks.course import (
    Theme,
    capacity,
    find_shape,
    flops,
    results,
    tables,
    toggles,
    with_settings,
)
from cria_tricks.techniques import lora
from cria_tricks.techniques.lora import LoraLinear
from cria_tricks.techniques.side_network import SideBlock

MIB, GIB = 2**20, 2**30

# %% [markdown]
# ## 1. The bill
# In fp32 a trained weight takes 16 bytes during the update: 4 for itself, 4 for its gradient, and 8 for AdamW's two
# states. A *frozen* weight (`requires_grad=False`) takes only its own 4 bytes, but it cannot learn.
#
# So LoRA freezes the model and adds a trained change to each matrix $W$ of its blocks: $W + \frac{\alpha}{r} BA$. Here
# $A$ has only $r$ rows, and $B$ only $r$ columns. The [rank](../docs/glossary.md#matrix-rank) $r$ is usually from 8 to
# 64, so both are thin. Together they are an [adapter](../docs/glossary.md#adapter), and each of its $r\,(D_{in} +
# D_{out})$ numbers takes 16 bytes.

# %%
before, after = course.so_far("the_bill"), course.so_far("lora")
shape = find_shape(after.model)
trained = 0
print(f"in each of {shape.layers} blocks:")
for name, (d_in, d_out) in shape.linears.items():  # seven matrices
    print(f"{name:10} {d_in:5,} -> {d_out:5,}")
    trained += shape.layers * 16 * (d_in + d_out)  # at rank 16
print(
    f"LoRA trains {trained:,} of {shape.weights:,} weights, "
    f"or {trained / shape.weights:.2%}"
)
print(f"optimizer states before: {8 * shape.weights / MIB:,.1f} MiB")
print(f"optimizer states after:  {8 * trained / MIB:,.1f} MiB")
assert trained == course.bill(after).step.trained_weights == 11_272_192


# %% Draw figure 1 tags=["hide-input"]
def sixteen_bytes(theme: Theme):
    """The tensors of one matrix, trained as a whole and with an adapter."""
    sketch = course.Sketch(theme, 41, 16)
    for n, name in enumerate(("frozen", "trained", "gradient", "state", "state")):
        sketch.text(11.5 + 6 * n, 0.8, name, quiet=True)
    sketch.text(0, 4.2, "full", align="left")
    sketch.text(0, 11.2, "LoRA", align="left")
    for n in range(4):
        left = 15 + 6 * n
        sketch.tensor(left, 2, 5, 5, "W" if n == 0 else "", color=0)
        sketch.tensor(left + 1.3, 9, 3.7, 0.9, "A" if n == 0 else "", color=1)
        sketch.tensor(left, 10.3, 0.9, 3.7, "B" if n == 0 else "", color=1)
    sketch.tensor(8.7, 9, 5, 5, "W", color=0)
    sketch.text(11.2, 15, "4 bytes", quiet=True)
    sketch.text(27.8, 15, "16 bytes each, but few", quiet=True)
    return sketch.figure


course.show(
    sixteen_bytes,
    "Figure 1. Full fine-tuning keeps four tensors as large as W. LoRA keeps W once, "
    "and four tensors of each thin matrix.",
)

# %% [markdown]
# ## 2. From scratch, in four steps
# **Step 1: why can a low rank be enough?** A matrix of rank 8 cannot express an arbitrary change. But fine-tuning must
# only change the outputs *for the inputs that the layer gets*. We assume that texts of one task are alike. Then their
# activations lie mostly in a few directions, and the change matters only there.
#
# We test this with one matrix of width 64 and a random change, whose rank is 64. First all directions of the inputs are
# equally strong. Then each has 0.8 times the size of the one before: how much of the loss remains at rank 8?

# %%
import torch
from torch import nn

torch.manual_seed(0)
T, D = 256, 64  # tokens, width
W = torch.randn(D, D) / D**0.5  # the pretrained matrix
change = torch.randn(D, D) / D**0.5  # what fine-tuning should add to it


def right_angles(rows, columns):
    """Columns of length 1, at right angles to each other."""
    return torch.linalg.qr(torch.randn(rows, columns))[0]


def inputs(factor):
    """T tokens; the size of each direction is `factor` times the one before."""
    sizes = factor ** torch.arange(D)
    sizes = sizes * (D / sizes.square().sum()) ** 0.5  # always the same total
    scaled = T**0.5 * right_angles(T, D) * sizes
    return scaled @ right_angles(D, D).T  # mixes the columns, keeps the sizes


def remaining(x, rank):
    """The share of the loss that the best change of this rank leaves."""
    # x @ change.T is what the change does to the outputs; the loss is its square.
    # Singular values are the sizes of a matrix's independent directions. The best
    # approximation keeps the largest of them (Eckart and Young).
    sizes = torch.linalg.svdvals(x @ change.T).square()
    return (sizes[rank:].sum() / sizes.sum()).item()


broad, narrow = inputs(factor=1.0), inputs(factor=0.8)
for rank in (1, 4, 8, 16):
    print(f"rank {rank:2}, all directions equal: {remaining(broad, rank):.0%} remain")

# %% Your guess: per cent of the loss that remains at rank 8 with few strong directions tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Compare with your guess tags=["hide-input"]
for rank in (1, 4, 8, 16):
    print(f"rank {rank:2}, few strong directions: {remaining(narrow, rank):.1%} remain")
course.reveal(guess, 100 * remaining(narrow, 8), "%")
assert remaining(broad, 8) > 0.6
assert remaining(narrow, 8) < 0.03

# %% [markdown]
# Rank 8 of 64 expresses little of an arbitrary change, but nearly all of what matters for few strong directions. Small
# changes can be enough in a real model too: Aghajanyan et al. trained 200 numbers for all of RoBERTa, and reached 90 %
# of the quality of full fine-tuning on one task (MRPC).
#
# **Step 2: put two thin matrices next to the frozen one.** The matrix $BA$ is as large as $W$, so we never make it. We
# multiply by $A$ first, which gives $r$ numbers for each token, and then by $B$.
#
# **Step 3: begin with $B = 0$, but not with $A = 0$.** Then the change $BA$ is zero, so training starts exactly at the
# pretrained model. If both were zero, nothing would ever learn, because the gradient of $A$ has $B$ as a factor, and
# that of $B$ has $A$. The log would show `'grad_norm': 0.0` and no error.

# %%
r, alpha = 8, 16
scale = alpha / r
A = torch.empty(r, D).uniform_(-1, 1) / D**0.5
B = torch.zeros(D, r)
x = narrow
target = x @ (W + change).T


def adapted(x, A, B):
    return x @ W.T + scale * (x @ A.T) @ B.T


def loss(y):
    return (y - target).square().sum(dim=1).mean()


def gradient_sizes(A, B):
    A, B = A.clone().requires_grad_(), B.clone().requires_grad_()
    loss(adapted(x, A, B)).backward()
    return f"gradient of A {A.grad.norm():.1f}, of B {B.grad.norm():.1f}"


assert torch.equal(adapted(x, A, B), x @ W.T)  # the start is the base, bit for bit
print("B is zero:    ", gradient_sizes(A, B))
print("both are zero:", gradient_sizes(torch.zeros_like(A), B))

# %% [markdown]
# With $B = 0$ the first step moves only $B$, and then $A$ learns too.
#
# **Step 4: train the adapter, and for comparison the whole matrix.** The loop also counts the bytes. `add_lora` then
# does it in any model.


# %%
def train(weights, forward, steps=500, rate=0.03):
    """Train the weights; return the loss, and the bytes for each weight."""
    optimizer = torch.optim.AdamW(weights, weight_decay=0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * (1 - step / steps)  # falls to zero
        optimizer.zero_grad()
        loss(forward()).backward()
        optimizer.step()
    size = 0
    for weight in weights:
        states = optimizer.state[weight]
        tensors = (weight, weight.grad, states["exp_avg"], states["exp_avg_sq"])
        size += sum(tensor.nbytes for tensor in tensors)
    return loss(forward()).item(), size / sum(w.numel() for w in weights)


A, B, full = nn.Parameter(A), nn.Parameter(B), nn.Parameter(W.clone())
loss_lora, bytes_lora = train([A, B], lambda: adapted(x, A, B))
loss_full, bytes_full = train([full], lambda: x @ full.T)
print(f"before: loss {loss(x @ W.T):.2f}")
print(
    f"LoRA:   loss {loss_lora:.2f}, {A.numel() + B.numel()} weights of "
    f"{bytes_lora:.0f} bytes"
)
print(f"full:   loss {loss_full:.2f}, {full.numel()} weights of {bytes_full:.0f} bytes")
assert bytes_lora == bytes_full == 16


class Adapted(nn.Module):
    """A frozen linear layer with an adapter next to it."""

    def __init__(self, layer, r, alpha):
        super().__init__()
        self.layer, self.scale = layer, alpha / r
        d_in, d_out = layer.in_features, layer.out_features
        self.A = nn.Parameter(torch.empty(r, d_in).uniform_(-1, 1) / d_in**0.5)
        self.B = nn.Parameter(torch.zeros(d_out, r))

    def forward(self, x):
        return self.layer(x) + self.scale * (x @ self.A.T) @ self.B.T


def add_lora(model, names, r, alpha):
    """Put an adapter next to each layer with one of these names."""
    model.requires_grad_(False)  # freezes all that is there
    for part in list(model.modules()):
        for name, layer in list(part.named_children()):
            if name in names:
                setattr(part, name, Adapted(layer, r, alpha))
    return model


# %% [markdown]
# ## 3. Prove it
# The claim is *reparametrised*: the matrix is written in another way, which can express some changes and not others.
#
# - **The start** is the base, bit for bit, also in peft, the library for LoRA.
# - **The formula** is that of peft: with our $A$ and $B$, its layer gives our outputs.
# - **The end** is one plain matrix $W + \frac{\alpha}{r} BA$, the *merged* matrix, so the adapter costs nothing after
#   training. In fp32, merged and unmerged outputs differ by rounding only.
# - **The limit** is the rank. Training reaches the best loss that rank 8 allows, and finds no ninth direction.


# %%
def linear():
    made = nn.Linear(D, D, bias=False)
    made.weight.data = W.clone()
    return made


ours = add_lora(nn.Sequential(OrderedDict(q_proj=linear())), ["q_proj"], r, alpha)
of_package = LoraLinear(linear(), r, alpha)
config = LoraConfig(r=r, lora_alpha=alpha, target_modules=["q_proj"])
of_peft = get_peft_model(nn.Sequential(OrderedDict(q_proj=linear())), config)
for model in (ours, of_package, of_peft):
    assert torch.equal(model(x), x @ W.T)  # the start

layer = of_peft.base_model.model.q_proj
layer.lora_A["default"].weight.data = A.detach()
layer.lora_B["default"].weight.data = B.detach()
for adapter in (ours.q_proj, of_package):
    adapter.A.data, adapter.B.data = A.detach(), B.detach()
merged = W + scale * B @ A
for outputs in (ours(x), of_package(x), of_peft(x), x @ merged.T):
    # the formula, and the end
    torch.testing.assert_close(outputs, adapted(x, A, B), rtol=0, atol=1e-4)

limit = remaining(x, r) * loss(x @ W.T).item()
ninth = torch.linalg.svdvals(merged - W)[r]
print(f"best loss at rank {r}: {limit:.3f}; training found {loss_lora:.3f}")
assert limit * 0.999 < loss_lora < limit * 1.02
assert ninth < 1e-4


# %% Draw figure 2 tags=["hide-input"]
def spectra(theme: Theme):
    """The singular values of what the learnt changes do to the outputs."""
    drawn, axes = course.figure(height=2.8)
    learnt = {"full fine-tuning": full - W, f"LoRA, r = {r}": merged - W}
    for (name, difference), color, marker in zip(
        learnt.items(), theme.series, "os", strict=False
    ):
        found = torch.linalg.svdvals((x @ difference.T).detach()) / T**0.5
        axes.plot(
            range(1, 25),
            found[:24],
            color=color,
            marker=marker,
            markersize=4,
            linewidth=1.2,
            label=name,
        )
    axes.axvline(r + 0.5, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(r + 0.8, 3.2, f"the rank, {r}", color=theme.quiet)
    axes.set(
        xlabel="singular value of the change in the outputs, largest first",
        ylabel="its size",
        ylim=(-0.1, None),
    )
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    spectra,
    "Figure 2. What the learnt change does to the outputs: LoRA finds the eight "
    "largest directions, and has no ninth. What it misses is small.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: a bound for the merge, and changes that no adapter can express
# **The merge.** Each output is a sum in which a term passes through at most $D + r + 2$ operations. In float64 each of
# them rounds by at most $2^{-53}$ of its value, which bounds the error of every output. (A merged matrix that is stored
# in 16 bits is rounded once more, and a small change can be lost in that. So compare the loss before and after.)
#
# **One plain gradient step.** The gradient of $W$ from one token is a column times a row, so it has rank 1, and that of
# $n$ tokens has rank up to $n$. So even one gradient step on more than $r$ tokens makes a change that no adapter of
# rank $r$ can express exactly.
#
# **The remaining share.** $x \Delta^T$ is what a change $\Delta$ does to the outputs. Its best approximation of rank
# $r$ is $x$ times a matrix of rank $r$, because our inputs span all directions. So an adapter can reach the best loss.

# %% tags=["deep"]
x64, W64, A64, B64 = (m.detach().double() for m in (x, W, A, B))
merged64 = W64 + scale * B64 @ A64
separate64 = x64 @ W64.T + scale * (x64 @ A64.T) @ B64.T
apart = (x64 @ merged64.T - separate64).abs()
sizes = x64.abs() @ (W64.abs() + scale * B64.abs() @ A64.abs()).T
bound = 2 * (D + r + 2) * 2.0**-53 * sizes  # two sums
print(f"bound up to {bound.max():.1e}, found up to {apart.max():.1e}")
assert (apart <= bound).all()

start = W64.clone().requires_grad_()
all_directions = broad.double()
for n in (1, r, 2 * r):
    some = all_directions[:n]
    error = (some @ (start - W64 - change.double()).T).square().sum()
    (of_W,) = torch.autograd.grad(error, [start])
    rank = torch.linalg.matrix_rank(of_W).item()
    print(f"{n:2} tokens: the gradient has rank {rank}")
    assert rank == n

# %% [markdown]
# ## 4. What it costs
# **Time.** The backward pass multiplies twice with each matrix: for the gradient of its inputs, and
# for the gradient of the matrix itself. A frozen matrix does not need the second one, so a step takes 2 multiplications
# with it in place of 3, and the adapters add 0.03. Attention stays, so we predict only a quarter less time: 4.2 to 12
# seconds for a row on a T4, in place of 5.6 to 16.
#
# The next table is measured, on your GPU or else on a CPU with a tiny model. `off` is full fine-tuning, and `on` is
# LoRA, both with attention and checkpointing of later lessons. Two variants, `dora` and `rslora`, are compared with
# `on`.

# %% Measure on your GPU tags=["hide-input"]
step_of = "attention=best precision=best gradient_checkpointing=true"
course.on_a_gpu("lora", off=step_of, on=f"{step_of} peft=lora")

# %% [markdown]
# **Bytes.** At the peak, a number of the adapter takes 12 bytes, for itself and two states, because no gradients exist
# yet. Each of the 112 adapted matrices also saves the output of $A$, with 4 bytes for each token and rank. How much do
# you save if you lower $r$ from 16 to 1?

# %% Your guess: per cent that the peak falls from rank 16 to 1 tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
numbers = trained // 16  # that one more rank adds
one_rank = 12 * numbers + 4 * 2048 * 7 * shape.layers  # bytes
at_16 = course.bill(after).peak_bytes
for rank in (1, 4, 16, 64, 256):
    peak = course.bill(with_settings(after, [f"lora.r={rank}"])).peak_bytes
    print(f"r = {rank:3}: the peak is {peak / MIB:,.0f} MiB")
    assert peak == at_16 + (rank - 16) * one_rank
course.reveal(guess, 100 * 15 * one_rank / at_16, "%")

# %% [markdown]
# You save only 0.6 %, because *freezing* saves, and not the rank. So choose $r$ for quality.
#
# **Quality.** When Biderman et al. trained on up to 20 billion tokens of code and mathematics, full fine-tuning learned
# more than LoRA, and forgot more of what the model could do before. Its changes had 10 to 100 times the rank that is
# usual for LoRA.

# %% [markdown] tags=["deep"]
# ### Deeper: count the multiplications
# Call one multiplication of all tokens with $W$ a unit, and those with $A$ and $B$ together $t$ units. The forward pass
# takes a unit for each of $L$ matrices, and $t$ for each adapter. The backward pass takes a unit for the gradient of a
# matrix's input, and another one for the gradient of the matrix if it is trained. The gradient must pass through frozen
# matrices down to the lowest adapter. It stops there, so one adapter at the top is much cheaper than one at the bottom.

# %% tags=["deep"]
L = 4
stack = [right_angles(D, D) for _ in range(L)]


def one_step(with_adapter, trains_all=False):
    y = x
    for n, matrix in enumerate(stack):
        weight = matrix.clone().requires_grad_(trains_all)
        if n in with_adapter:
            thin_A, thin_B = (m.detach().requires_grad_() for m in (A, B))
            y = y @ weight.T + scale * (y @ thin_A.T) @ thin_B.T
        else:
            y = y @ weight.T
    y.square().mean().backward()


t = r * (D + D) / (D * D)
for says, work, units in (
    ("all weights trained", lambda: one_step((), trains_all=True), 3 * L - 1),
    ("adapters everywhere", lambda: one_step(range(L)), 2 * L - 1 + (3 * L - 0.5) * t),
    ("one at the bottom", lambda: one_step((0,)), 2 * L - 1 + 2.5 * t),
    ("one at the top", lambda: one_step((L - 1,)), L + 2.5 * t),
):
    counted = flops(work) / (2 * T * D * D)
    print(f"{says:20} predicted {units:6.3f} units, counted {counted:6.3f}")
    assert counted == units
of_matrices = sum(d_in * d_out for d_in, d_out in shape.linears.values())
share = trained / (shape.layers * of_matrices)
print(
    f"Llama-3.2-1B: t is {share:.2%} of a unit; "
    f"a step takes {2 + 3 * share:.2f} units, not 3"
)

# %% [markdown]
# ## 5. The production switch
# With plain Hugging Face code, peft adds the adapters like this (`base` is the model's name).

# %%
print(lora.PLAIN)

# %% [markdown]
# With this package it is one switch, and `lora.*` sets the size. After training, `cria merge` writes the merged model
# in 16 bits. You can also keep the adapter alone, as a file of 43 MiB for each task.
#
# ```bash
# cria train kwanzaa --set tricks.peft=lora --set lora.r=16 --set lora.alpha=32
# cria merge runs/kwanzaa/adapter
# ```

# %%
course.show_bill(before, after)
course.show_worth("peft")

# %% Check these numbers tags=["hide-input"]
kept = toggles.without(course.CAPSTONE, "peft")
without_it = course.bill(toggles.with_only(course.CAPSTONE, kept)).peak_bytes
assert 8.5 < without_it / course.bill(course.CAPSTONE).peak_bytes < 9
assert round(course.bill(after).peak_bytes / GIB, 1) == 21.7
assert not course.bill(after).fits
assert round(course.bill(after).peak_bytes / MIB) == 22_201
old, new = (
    {line.name: line.bytes / MIB for line in course.bill(recipe).lines}
    for recipe in (before, after)
)
assert round(old["saved activations"] - new["saved activations"]) == 512 + 16 - 14
assert round(old["optimizer states"] - new["optimizer states"], 1) == 9_342.5

# %% Draw figure 3 tags=["hide-input"]
course.show(
    course.ladder("lora"),
    "Figure 3. The peak so far: 31.3 GiB for plain training, and 21.7 GiB with LoRA. "
    "A T4 has 14.7 GiB.",
)

# %% [markdown]
# These numbers are *predicted*: memory within 3 %, and the seconds are the middle of a wide range. The optimizer states
# fall by 9,342.5 MiB. The activations fall by 514: frozen norms save no normalized inputs (512), no gradient needs the
# first block's input (16), but adapters add 14. The peak of 22,201 MiB still does not fit a T4. Saved activations are
# now the largest line, so the next lessons reduce them.
#
# Without LoRA, the finished job needs almost nine times as much. Four later switches go with it: 4-bit weights cannot
# be trained, and our chunked loss needs a frozen head.
#
# ### How large a learning rate
# **Begin with ten times the rate that you would use for full fine-tuning.** *LoRA Without Regret* (2025) tuned both
# over many models and data sets. LoRA's best rate was about ten times the other one, and nearly the same for all ranks.
# A rate that is too low gives no error: the loss falls slowly, and LoRA looks worse than it is.
#
# **A smaller model takes a larger rate.** The authors' library, `tinker_cookbook`, advises $0.0005 \cdot
# (2000/D)^{0.781}$ for a Llama of width $D$. That is 0.0005 for our job, which uses it, and 0.0013 for SmolLM2. Our own
# sweep of SmolLM2 found more, because its runs are short (Deeper, in section 5).
#
# ### Which rank, alpha and matrices
# - **Rank**: begin with 16, as our job of 107 rows does. With more data or new knowledge, try 64 to 256, and go back if
#   the loss on held-out (not trained) rows does not fall.
# - **Alpha**: keep 32 for every rank, and tune the learning rate instead, because alpha only scales the change.
# - **Matrices** (`target_modules`): all seven of a block. Both papers found this better than attention alone.

# %% [markdown] tags=["deep"]
# ### Deeper: rsLoRA, DoRA, and other ways to train few weights
# All of these freeze the base and train something else, or less.
#
# - **rsLoRA** (`lora.rslora=true`) scales by $\alpha / \sqrt{r}$, so that large ranks do not learn more slowly. It
#   trains the same numbers and has the same bill. It is useful when you compare high ranks at one rate.
# - **DoRA** (`lora.dora=true`) trains the length of each output's weights apart from their direction: one number more
#   for each output. In this lesson's bill it is expensive, because it saves two more outputs of each matrix for the
#   backward pass. [Checkpointing](gradient_checkpointing.py) removes most of that, so in the table of section 4 it
#   costs time only.
# - **Attention only** (`lora.target_modules=q_proj,k_proj,v_proj,o_proj`) lowers the peak by 1,376 MiB at this point.
#   The adapter and its states take 90 MiB less. A frozen matrix without an adapter does not save its input, so each
#   block saves 80 MiB less for its MLP: $4 \cdot 2{,}048$ bytes for each of 2,048 + 8,192 numbers. The outputs of $A$
#   take 6 MiB less in all.
# - **Head only** (`tricks.peft=head`) trains a copy of the matrix that makes the logits. No gradient reaches the
#   blocks, so they save no activations. But it can only recombine old features, and Llama's head has 263 million
#   weights.
# - **Prompt tuning** (`tricks.peft=prompt_tuning`) trains $P$ vectors in front of every row, $P \times D$ numbers, so
#   it does not start at the base. With [packing](packing.py), several documents would share one prompt, so this is
#   refused.
# - **Side network** (`tricks.peft=side_network`, our adaptation of ControlNet) trains a copy of each of the last two
#   blocks. A matrix of zeros joins its output to that of the frozen block. As with the head, the blocks below save no
#   activations.
# - **New special tokens** need lines of the embedding. peft's `trainable_token_indices` trains these lines alone, and
#   `modules_to_save` a copy of the whole matrix; this package has no setting for either.
#
# Head only and side network need less memory than LoRA at this point of the course, because they cut the gradient off.
# Later lessons make activations small for LoRA too. In the finished job the side network needs 3,578 MiB, and LoRA
# 1,516.

# %% tags=["deep"]
width = shape.width
outputs_of_all = sum(shape.layers * d_out for _, d_out in shape.linears.values())
a_block = of_matrices + shape.block_other_weights
family = {
    "full fine-tuning": ("tricks.peft=none", shape.weights),
    "head only": ("tricks.peft=head", shape.vocabulary * width),
    "side network, 2 blocks": ("tricks.peft=side_network", 2 * (a_block + width**2)),
    "LoRA, r = 64": ("lora.r=64", 4 * trained),
    "DoRA, r = 16": ("lora.dora=true", trained + outputs_of_all),
    "LoRA and rsLoRA, r = 16": ("lora.rslora=true", trained),
    "prompt, P = 16": ("tricks.peft=prompt_tuning", 16 * width),
}
bills = {}
for name, (setting, weights) in family.items():
    bills[name] = course.bill(with_settings(after, [setting]))
    assert bills[name].step.trained_weights == weights
side = with_settings(course.CAPSTONE, ["tricks.peft=side_network"])
assert round(course.bill(side).peak_bytes / MIB) == 3578

only = with_settings(after, ["lora.target_modules=q_proj,k_proj,v_proj,o_proj"])
lower = course.bill(after).peak_bytes - course.bill(only).peak_bytes
assert lower == (90 + 16 * 80 + 6) * MIB == 1376 * MIB

rslora = LoraLinear(linear(), 16, 32, rslora=True)
assert rslora.scale == 4 * LoraLinear(linear(), 16, 32).scale
dora = LoraLinear(linear(), r, alpha, dora=True)
# dividing a length by itself rounds
torch.testing.assert_close(dora(x), x @ W.T, rtol=0, atol=1e-4)
assert torch.equal(SideBlock(linear(), D)(x), x @ W.T)


# %% Draw figure 4 tags=["deep"]
def of_family(theme: Theme):
    """The bill of each, by what its lines are for."""
    learning = (
        "weights: adapter",
        "16-bit copies of weights",
        "gradients",
        "optimizer states",
    )
    groups = {
        "the loaded weights": lambda name: (
            name in ("weights: blocks", "weights: all others")
        ),
        "training adds": lambda name: name in learning,
        "activations": lambda name: name == "saved activations",
        "other": lambda name: (
            not name.startswith("weights: ")
            and name not in (*learning, "saved activations")
        ),
    }
    drawn, axes = course.figure(height=4.4)
    left = [0.0] * len(bills)
    for (label, belongs), color in zip(groups.items(), theme.series, strict=True):
        sums = [
            sum(line.bytes for line in bill.lines if belongs(line.name)) / GIB
            for bill in bills.values()
        ]
        axes.barh(
            range(len(bills)), sums, left=left, color=color, height=0.6, label=label
        )
        left = [a + b for a, b in zip(left, sums, strict=True)]
    for place, (end, bill) in enumerate(zip(left, bills.values(), strict=True)):
        assert abs(end - bill.peak_bytes / GIB) < 1e-9, (
            "a line of the bill is not drawn"
        )
        axes.text(end, place, f" {end:.1f} GiB", va="center", color=theme.ink)
    names = [
        f"{name}\n{bill.step.trained_weights:,} trained" for name, bill in bills.items()
    ]
    axes.set_yticks(range(len(bills)), names)
    axes.set(
        xlabel="peak of a training step, GiB",
        xlim=(0, 38),
        ylim=(len(bills) - 0.5, -1.2),
    )
    capacity(axes, theme)
    axes.grid(axis="x")
    drawn.legend(loc="outside lower center", ncols=4, fontsize=8)
    return drawn


course.show(
    of_family,
    "Figure 4. What is trained, and the bill at this point of the course: training "
    "adds much only with full fine-tuning, the head or a side network.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: a small comparison of quality
# SmolLM2-135M was trained on the Kwanzaa answers for 20 steps, with three seeds. `fp32` is plain LoRA, and `loss` is
# the held-out loss. Do not conclude that rsLoRA is better: its scale is four times that of LoRA here, and all but the
# prompt had the same learning rate, so the gap may come from the step size alone. The same holds for the side network,
# which also trains more numbers. *Learning Rate Matters* (2026) tuned the rate for nine variants of LoRA, and their
# results came within 1 to 2 % of plain LoRA.

# %% tags=["deep"]
study = results.study("quality")
cases = ("fp32", "rslora", "dora", "prompt_tuning", "head", "side_network")
some = [run for run in study["runs"] if run["case"] in cases] if study else []
course.show_table(
    tables.quality(some) if some else "no committed results next to this package"
)

# %% [markdown] tags=["deep"]
# **The learning rate, tuned.** SmolLM2-135M trained one epoch (32 steps of one row, cut at 192 tokens) on the package's
# own rows, with alpha 32 and one seed. Each column is a learning rate, and each entry is the held-out loss. It was 2.65
# before training.

# %% tags=["deep"]
study = results.study("rates")
course.show_table(
    tables.rates(study["runs"])
    if study
    else "no committed results next to this package"
)
for name, width in (("Llama-3.2-1B", 2048), ("SmolLM2-135M", 576)):
    print(f"the rule for {name}: {5e-4 * (2000 / width) ** 0.781:.4f}")

# %% [markdown] tags=["deep"]
# Full fine-tuning is best at 0.0002. LoRA is best at 0.002 or at 0.005, the highest rate that we tried. That is 10 to
# 25 times as much, whatever the rank. It is also 1.5 to 4 times what the rule for Llamas gives, because so short a run
# needs a higher rate: it sees 32 rows, and our job 321. At its best rate, rank 64 reaches what full fine-tuning reaches
# (0.313), and ranks 1 to 16 stay 0.025 to 0.055 above it. There is one seed for each entry, so a difference of a few
# hundredths is no ranking.
#
# *Why does the best rate hardly depend on the rank?* With a fixed alpha, $\frac{\alpha}{r} BA$ is alpha times the
# *mean* of $r$ matrices of rank 1. A mean does not grow with $r$. With alpha $= 2r$ it is twice their *sum*, so a
# higher rank takes larger steps.
#
# *Is rank 16 large enough?* *LoRA Without Regret* counts roughly in bits: a text has about one for each token, and a
# trained number stores at most two. Our 107 rows have at most 219,136 tokens, and even rank 1 trains 704,512 numbers.
# Tens of millions of tokens call for a higher rank. (Its authors call the exact limit an open question.)

# %% [markdown]
# ## 6. Where it breaks
# **After `merge_and_unload()` the loss is higher than training ended with, and there is no error.** The adapter was
# merged into another base than the one it was trained on. An Instruct model and its plain version are such a pair.
# Another is a model in 4 bits and the published one: this project trained on 4-bit weights to a loss of 0.489 on new
# rows, and over the published weights it was 0.618.
#
# Cure: merge into the base that was trained on. After training in 4 bits, load it in 4 bits and call
# `model.dequantize()` before you load the adapter. (`cria merge` does this by itself.) In our toy the damage is what
# the other base does to the outputs.

# %%
other = W + 0.01 * torch.randn(D, D)
damage = (x @ (other - W).T).square().sum(dim=1).mean().item()
for name, base, expected in (
    ("its own base", W, loss_lora),
    ("another base", other, loss_lora + damage),
):
    found = loss(x @ (base + scale * B @ A).T).item()
    print(f"merged into {name}: predicted {expected:.2f}, found {found:.2f}")
    assert abs(found / expected - 1) < 0.05

# %% [markdown] tags=["deep"]
# ### Deeper: the names of the matrices differ from model to model
# **`Target modules {'query_key_value'} not found in the base model. Please check the target modules and try again.`**
# Cure: list the names of the model's linear layers, as below, or use `target_modules="all-linear"`.

# %% tags=["deep"]
model = nn.Sequential(OrderedDict(q_proj=linear(), v_proj=linear()))
try:
    get_peft_model(model, LoraConfig(target_modules=["query_key_value"]))
except ValueError as error:
    print(error)
    assert "not found in the base model" in str(error)
names = set()
for name, part in model.named_modules():
    if isinstance(part, nn.Linear):
        names.add(name.rpartition(".")[2])
print("use some of:", sorted(names))
fresh = nn.Sequential(OrderedDict(q_proj=linear(), v_proj=linear()))
cured = get_peft_model(fresh, LoraConfig(r=r, target_modules=sorted(names)))
assert sum(p.numel() for p in cured.parameters() if p.requires_grad) == 2 * r * (D + D)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** A popular setting is $r = 8$ on `q_proj` and `v_proj` alone. How many numbers does it train in
#    Llama-3.2-1B? (Section 1 prints the sizes.)
# 2. **Build.** You have a matrix that was trained as a whole, and want an adapter of it. Fill in `extract(difference,
#    rank)`. From a difference of shape $(D_{out}, D_{in})$ it returns $A$ of shape $(rank, D_{in})$ and $B$ of shape
#    $(D_{out}, rank)$, in this order, such that $BA$ is as close to the difference as possible, without scale and
#    training. (`torch.linalg.svd` gives $U$, the singular values, and $V^T$.)
# 3. **Reach.** If $r$ is very large, LoRA needs more memory than full fine-tuning. What is the highest rank at which
#    the peak of `after` is below that of `before`? (Section 4 says what one more rank costs. The fullest moment stays
#    the same.)

# %% tags=["exercise"]
numbers_at_rank_8 = None


def extract(difference, rank):
    """FILL ME IN."""


highest_rank = None


# %% Check the exercises tags=["hide-input"]
def of_extract(answer):
    # square, wide, high; with singular values that fall
    sizes = 0.8 ** torch.arange(D)
    falling = right_angles(D, D) * sizes @ right_angles(D, D).T
    for difference, rank in ((falling, 3), (falling[:40], 5), (falling[:, :24], 1)):
        if (pair := answer(difference.clone(), rank)) is None:
            raise NotImplementedError
        A, B = pair
        outs, ins = difference.shape
        assert tuple(A.shape) == (rank, ins), (
            f"A has shape {tuple(A.shape)}, not (rank, D_in) = {(rank, ins)}"
        )
        assert tuple(B.shape) == (outs, rank), (
            f"B has shape {tuple(B.shape)}, not (D_out, rank) = {(outs, rank)}"
        )
        best = torch.linalg.svdvals(difference)
        apart = (difference - B @ A).square().sum().item()
        found, wanted = (
            [round(size, 2) for size in some[:rank].tolist()]
            for some in (torch.linalg.svdvals(B @ A), best)
        )
        hint = (
            f"singular values of B A: {found}, largest of the difference: {wanted}; "
            f"squared distance {apart:.3f}"
        )
        assert apart < best[rank:].square().sum().item() + 1e-4, hint


def of_rank(answer):
    rank = int(answer)
    assert rank == answer, f"not {answer}; a rank is a whole number"
    most = course.bill(before).peak_bytes
    here, higher = (
        course.bill(with_settings(after, [f"lora.r={r}"])).peak_bytes
        for r in (rank, rank + 1)
    )
    assert here < most, (
        f"rank {rank} needs {here / MIB:,.1f} MiB, and full fine-tuning "
        f"{most / MIB:,.1f}; which tensors of the adapter are there at the peak?"
    )
    assert higher >= most, f"a rank above {rank} still needs less"


of_q_and_v = sum(
    shape.layers * 8 * sum(shape.linears[name]) for name in ("q_proj", "v_proj")
)
sizes_of = (
    "you need D_in and D_out of both matrices (shape.linears has them), "
    "the rank, and all blocks"
)
course.check(
    1,
    numbers_at_rank_8,
    course.equal(of_q_and_v, sizes_of),
    "how many numbers are trained",
)
course.check(
    2,
    extract,
    of_extract,
    "a function (difference, rank) -> a pair of tensors, A and B",
)
course.check(3, highest_rank, of_rank, "a rank, a whole number")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# numbers_at_rank_8 = 16 * 8 * ((2048 + 2048) + (2048 + 512))  # 851,968
#
#
# def extract(difference, rank):
#     U, found, Vt = torch.linalg.svd(difference)
#     return Vt[:rank], U[:, :rank] * found[:rank]
#
#
# room = course.bill(before).peak_bytes - course.bill(after).peak_bytes
# highest_rank = 16 + room // one_rank  # 1,117
# ```
#
# </details>
#
# ## In one breath
# - **Saves** gradients and optimizer states of all frozen weights: 16 bytes a weight become 4 at the update, and 12
#   become 4 at this peak, where no gradients exist.
# - **Costs** two thin matrix multiplications next to each matrix, but a step still does a third fewer multiplications.
# - **Reparametrised**: it starts at the base bit for bit, and learns $W + \frac{\alpha}{r} BA$, a change of rank $r$.
# - **When to use it**: nearly always on a small card, on all matrices, with ten times the rate of full fine-tuning.
# - **When not**: if the model must learn much new knowledge from many tokens, and the card has the memory.
# - **Check** that an adapter arrives: load it with `PeftModel.from_pretrained`, and compare the loss on the same rows.
#
# ## Sources
# - Hu et al. 2021, *LoRA*, arXiv 2106.09685, section 4.1. Eckart and Young 1936, *Psychometrika* 1, 211 (the limit).
# - Aghajanyan et al. 2020, *Intrinsic Dimensionality*, arXiv 2012.13255, abstract and section 4 (200 numbers).
# - Schulman and Thinking Machines Lab 2025, *LoRA Without Regret*, thinkingmachines.ai/blog/lora (rate, matrices).
# - Biderman et al. 2024, *LoRA Learns Less and Forgets Less*, arXiv 2405.09673, abstract and practical advice.
# - Kalajdzievski 2023, *rsLoRA*, arXiv 2312.03732, section 3. Liu et al. 2024, *DoRA*, arXiv 2402.09353, section 4.
#   *Learning Rate Matters* 2026, arXiv 2602.04998, abstract (variants at tuned rates).
# - Yosinski et al. 2014, arXiv 1411.1792, section 2 (head). Lester et al. 2021, arXiv 2104.08691, section 2 (prompt).
#   Zhang et al. 2023, arXiv 2302.05543, section 3.1 (ControlNet).
# - `peft/tuners/lora/layer.py` of peft 0.21, `Linear.forward`; `torch/optim/adam.py` of torch 2.13, `_fused_adam`.
# - Ours: `cria_tricks/techniques/lora.py`, `head_only.py`, `prompt_tuning.py`, `side_network.py`, and
#   `tests/techniques/test_lora.py` and its neighbours.
