# ---
# jupyter:
#   question: Why do Unsloth and Liger train the same adapter faster and with less memory than plain Hugging Face code?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Fused LoRA: why the fast trainers are fast
# > **Promise.** On a T4, Unsloth, a library for fast fine-tuning, trained TinyLlama in 6,996 s where the usual trainer
# > took 13,090. A part of that gain is a backward pass that is written by hand. You derive one in four steps, prove
# > that its gradients are right, and switch it on. With fused norms, a step without gradient checkpointing then needs
# > 1,308 MiB less.
#
# > **Card.** saves half of the activations inside an MLP, the fp32 copies of the norms' inputs, and launches of GPU
# > programs / costs one small matrix multiplication more for each adapter, and one activation function for each MLP /
# > exact within rounding; no T4 has timed it yet / about 25 minutes / after [LoRA](lora.py) and [gradient
# > checkpointing](gradient_checkpointing.py)
#
# The job is [QLoRA](../docs/glossary.md#qlora) of Llama-3.2-1B, with rows of 2,048 tokens, on a free T4. With the
# switches of all lessons so far, a step needs 1,516 MiB, and the card has 15,095. So there is room to switch gradient
# checkpointing off. By our estimate, a row then takes 1.42 s instead of 1.90 s. However, the peak rises to 4,711 MiB,
# because every block now keeps all of its saved [activations](../docs/glossary.md#activation) until the backward pass,
# and rows beyond 5,881 tokens no longer fit. In this lesson each block keeps fewer of them.

# %% Imports and settings tags=["hide-input"]
import os

# before anything imports Triton: its kernels run in Python, on any processor
os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.utils.checkpoint import checkpoint

from cria_tricks import BadInput, Recipe, course
from cria_tricks.course import (
    T4,
    SavedBytes,
    Theme,
    facts_of,
    find_shape,
    flops,
    folds,
    peak_bytes,
    resolve,
    results,
    toggles,
    with_settings,
)
from cria_tricks.course import refuse_plan as refuse
from cria_tricks.course import saved_by_block as kept
from cria_tricks.techniques.fused_blocks import rms_norm
from cria_tricks.techniques.fused_lora import Matrix, gated_mlp

torch.manual_seed(0)
MIB, KIB = 2**20, 2**10
fp64, fp32, bf16 = torch.float64, torch.float32, torch.bfloat16
whole = course.CAPSTONE
job = with_settings(whole, ["tricks.gradient_checkpointing=false"])
shape = find_shape(job.model)
target = toggles.Target(shape, T4)

# the numbers of the text above
assert course.so_far("packing").tricks == whole.tricks
assert round(course.bill(whole).peak_bytes / MIB) == 1516
assert round(course.bill(job).peak_bytes / MIB) == 4711
assert round(2048 * target.bill(job).seconds, 2) == 1.42
assert round(2048 * target.bill(whole).seconds, 2) == 1.90


def saved_per_token(recipe):
    """Bytes that one block saves for one token, by the name of the tensor."""
    one, other = (folds.step_of(recipe, shape, T4, tokens) for tokens in (64, 128))
    few, many = (kept(facts.operations) for facts in (one, other))
    # what does not grow with the number of tokens cancels
    growing = {name: (many[name] - few[name]) / 64 for name in many}
    return {name: size for name, size in growing.items() if size >= KIB}


# %% [markdown]
# ## 1. The bill
# Saved activations take 3,345 of the 4,711 MiB, so we look at what one [block](../docs/glossary.md#block) keeps for its
# backward pass. A block has a norm, attention, a second norm, and an MLP, which computes
# $\text{down}(a(\text{gate}(x)) \cdot \text{up}(x))$, where $a$ is the activation function SiLU. In Llama-3.2-1B, $x$
# has $D = 2048$ numbers for each token. The results of gate and up have $F = 8192$ numbers, and a number takes 2 bytes.
# The block keeps each norm's input (4 bytes a number) and output, queries, keys and values (all three for 32 heads),
# the result of attention, and four tensors of $F$ numbers in the MLP. How many KiB is that for one token?

# %% Your guess: KiB that one block keeps for one token tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
table = saved_per_token(job)
for name, size in table.items():
    print(f"{name:22}{size / KIB:5.0f} KiB")
in_all = sum(table.values())
assert in_all == 8 * 8192 + 20 * 2048
course.reveal(guess, in_all / KIB, "KiB")

# %% [markdown]
# The MLP's four tensors are the results of gate and up, the activated gate, and the gated product, which is the
# activated gate times up. They take $8F$ bytes, 64 KiB. The other lines take $20D$ bytes, because each norm saves its
# input as an fp32 copy of $4D$ bytes.
#
# Some of these tensors are cheap to compute again. The activated gate and the gated product follow from gate and up
# without a matrix multiplication, and the fp32 copy from the 16-bit input. Checkpointing repeats the whole block, and
# we repeat only these.
#
# ## 2. From scratch, in four steps
# Autograd saves what each operation needs. You *fuse* several if you write their backward pass as one function, and
# then you choose what is saved.
#
# **Step 1: one matrix and its adapter.** $x$ holds $N$ tokens of $D$ numbers. The weight $W$, of shape $F \times D$, is
# frozen. The adapter's $A$, of shape $r \times D$, and $B$, of shape $F \times r$, are trained, and $s$ is its scale:
#
# $$y = x W^\top + s\,(x A^\top) B^\top$$
#
# Let $dy$ be the gradient of the loss with respect to $y$. For $y = pM^\top$ the chain rule gives $dp = dy\,M$ and
# $dM = dy^\top p$. In the first term $M = W$, so $x$ gets $dy\,W$. In the second, $M = B$ and $p = s\,xA^\top$, so
# $dp = dy\,B$. Then $xA^\top$ has the gradient $u = s\,dy\,B$, and the rule for $M = A$ gives $u^\top x$ and $uA$.
# Together:
#
# $$dx = dy\,W + u A, \qquad dA = u^\top x, \qquad dB = dy^\top (s\,x A^\top)$$
#
# So it is enough to save $x$. Autograd also saves $x A^\top$, and we compute that again.

# %%
import torch
import torch.nn.functional as F

torch.manual_seed(0)
# tokens, width of the model, inner width of the MLP (F above), rank, scale of adapters
N, D, INNER, R, S = 96, 64, 160, 4, 0.5


def lora_forward(x, W, A, B):
    return x @ W.T + S * (x @ A.T) @ B.T


def lora_backward(dy, x, W, A, B):
    """Return the gradients of x, A and B."""
    u = S * (dy @ B)  # scale here: u has R numbers for each token, and dy has more
    dx = dy @ W + u @ A
    dA = u.T @ x
    dB = dy.T @ (S * (x @ A.T))
    return dx, dA, dB


# %% [markdown]
# **Step 2: two matrices have the same input.** Gate and up both multiply $x$, so each of them gives a gradient of $x$,
# and the two are added.
#
# **Step 3: the activation function.** Let $e$ be the result of *gate*, and $g$ that of *up* (Unsloth's letters). Then
# down multiplies $h = a(e) \cdot g$, where $a(e) = e\,\sigma(e)$ is SiLU, and $\sigma$ is the sigmoid, with
# $\sigma' = \sigma\,(1 - \sigma)$. Therefore
#
# $$dg = dh\,a(e), \qquad de = dh\,g\,a'(e), \qquad a'(e) = \sigma(e)\,\bigl(1 + e\,(1 - \sigma(e))\bigr)$$
#
# So it is enough to save $e$ and $g$.


# %%
def gate_backward(dh, e, g):
    """Return the gradients of e and g."""
    sigma = e.sigmoid()
    de = dh * g * sigma * (1 + e * (1 - sigma))
    dg = dh * e * sigma
    return de, dg


# %% [markdown]
# **Step 4: we put the three parts together.** In a `torch.autograd.Function` you write both passes yourself, and `ctx`
# carries tensors from the first to the second. Ours carries $x$, $e$, $g$ and the weights. The last lines compare with
# autograd.


# %%
class FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *weights):  # W, A and B of gate, then of up, then of down
        gate, up, down = weights[:3], weights[3:6], weights[6:]
        e = lora_forward(x, *gate)
        g = lora_forward(x, *up)
        ctx.save_for_backward(x, e, g, *weights)
        return lora_forward(F.silu(e) * g, *down)

    @staticmethod
    def backward(ctx, dy):
        x, e, g, *weights = ctx.saved_tensors
        gate, up, down = weights[:3], weights[3:6], weights[6:]
        h = F.silu(e) * g  # computed again
        dh, *of_down = lora_backward(dy, h, *down)  # of_down: the gradients of A and B
        de, dg = gate_backward(dh, e, g)
        dx_of_gate, *of_gate = lora_backward(de, x, *gate)
        dx_of_up, *of_up = lora_backward(dg, x, *up)
        # one gradient for each argument of forward, in order; None for the frozen W
        return dx_of_gate + dx_of_up, None, *of_gate, None, *of_up, None, *of_down


def plain_mlp(x, *weights):
    """The same forward pass; autograd makes the backward pass."""
    gate, up, down = weights[:3], weights[3:6], weights[6:]
    return lora_forward(F.silu(lora_forward(x, *gate)) * lora_forward(x, *up), *down)


def random_weights(width=D, inner=INNER, rank=R, dtype=torch.float32):
    """W, A and B of gate, up and down; only A and B are trained.

    B is not zero, or A would get no gradient to compare.
    """
    made = []
    for d_in, d_out in ((width, inner), (width, inner), (inner, width)):
        W = torch.randn(d_out, d_in, dtype=dtype) / d_in**0.5
        A = torch.randn(rank, d_in, dtype=dtype) / 8
        B = torch.randn(d_out, rank, dtype=dtype) / 8
        made += [W, A.requires_grad_(), B.requires_grad_()]
    return made


x = torch.randn(N, D, requires_grad=True)
weights = random_weights()
trained = [x, *(each for each in weights if each.requires_grad)]
found = {}
for name, mlp in (("autograd", plain_mlp), ("fused", FusedMLP.apply)):
    y = mlp(x, *weights)
    found[name] = [y, *torch.autograd.grad(y.square().sum(), trained)]
for right, ours in zip(found["autograd"], found["fused"], strict=True):
    torch.testing.assert_close(ours, right)


# %% Draw figure 1 tags=["hide-input"]
def kept_tensors(theme: Theme):
    """What an MLP with adapters saves: with autograd, and with one function."""
    sketch = course.Sketch(theme, 44, 15)
    names = ("x", "e", "a(e)", "g", "h", "y")
    for row, (label, saved) in enumerate(
        (("autograd", {"x", "e", "a(e)", "g", "h"}), ("fused", {"x", "e", "g"}))
    ):
        top = 2 + 7 * row
        sketch.text(0, top + 2, label, align="left")
        for n, name in enumerate(names):
            height = 2 if name in ("x", "y") else 4
            left = 8 + 6 * n
            sketch.tensor(
                left,
                top + 2 - height / 2,
                4.2,
                height,
                name,
                color=0,
                kept=name in saved,
            )
    return sketch.figure


course.show(
    kept_tensors,
    "Figure 1. The tensors of an MLP in the order of their computation. Filled boxes "
    "are saved. Autograd saves x and all four inner tensors. The fused MLP saves x, e "
    "and g, and computes a(e) and h again in the backward pass.",
)

# %% [markdown]
# ## 3. Prove it
# `gradcheck` moves each input a little, in fp64, and measures how the output moves, so it tests our formulas without
# autograd.
#
# Then we count bytes. For each of $N$ tokens, autograd saves $x$, four inner tensors, and three times $x A^\top$.
# Our function saves $x$ and two inner tensors. With $N = 96$, $D = 64$, $F = 160$, $r = 4$ and 4 bytes for each number,
# autograd saves 268.5 KiB. How many KiB does our function save, by the same count?

# %%
few = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
its_weights = random_weights(width=5, inner=7, rank=2, dtype=torch.float64)
assert torch.autograd.gradcheck(FusedMLP.apply, (few, *its_weights))
print("gradcheck: the formulas give the gradients that it measured")

# %% Your guess: KiB that our function saves tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
predicted = {
    "autograd": 4 * N * (D + 4 * INNER + 3 * R),
    "fused": 4 * N * (D + 2 * INNER),
}
for name, mlp in (("autograd", plain_mlp), ("fused", FusedMLP.apply)):
    with SavedBytes(besides=weights) as saved:
        alive = mlp(x, *weights)  # as long as y lives, its graph keeps what it saved
    print(f"{name:9} saves {saved.now / KIB:.1f} KiB")  # what is kept at this moment
    assert saved.now == predicted[name]
course.reveal(guess, predicted["fused"] / KIB, "KiB")

# %% [markdown] tags=["deep"]
# ### Deeper: in 16 bits, which way is nearer to the exact gradients?
# With [mixed precision](mixed_precision.py), the fused backward pass rounds the adapter's part fewer times. How far are
# results and gradients from those in fp64? We compare peft's operations with the package's `gated_mlp`, which is
# `FusedMLP` with autocast. $A$ and $B$ are fp32, and matrix multiplications are in bf16. A `Matrix` holds $A$, $B$, $s$
# and two functions: the first multiplies by $W$, the second returns $W$.


# %% tags=["deep"]
def as_matrices(weights, dtype):
    """For the package: W in one dtype, the adapter in fp32 or wider."""
    found = []
    for W, A, B in zip(weights[::3], weights[1::3], weights[2::3], strict=True):
        # numbers that bf16 has, so that the base is the same in both dtypes
        W = W.to(bf16).to(dtype)
        wide = torch.promote_types(dtype, fp32)
        A, B = (each.detach().to(fp32).to(wide).requires_grad_() for each in (A, B))
        found.append(Matrix(lambda x, W=W: F.linear(x, W), W.to, A, B, S))
    return found


def run(way, x, three, dtype):
    """The result and all gradients, under autocast if the dtype has 16 bits."""
    x = x.to(dtype).requires_grad_()
    with torch.autocast("cpu", bf16, enabled=dtype == bf16):
        y = way(x, three)
    adapters = [each for one in three for each in (one.A, one.B)]
    return [y, *torch.autograd.grad(y.double().square().sum(), [x, *adapters])]


def pefts(x, three):
    def adapted(x, one):
        return one.times(x) + F.linear(F.linear(x, one.A), one.B) * one.scale

    gate, up, down = three
    return adapted(F.silu(adapted(x, gate)) * adapted(x, up), down)


def ours(x, three):
    return gated_mlp(x, *three, F.silu)


far, seeds = {"peft's": 0.0, "ours": 0.0}, 8
for seed in range(seeds):
    torch.manual_seed(seed)
    drawn, given = random_weights(dtype=fp64), torch.randn(N, D).to(bf16)
    exact = run(pefts, given, as_matrices(drawn, fp64), fp64)
    for name, way in (("peft's", pefts), ("ours", ours)):
        found = run(way, given, as_matrices(drawn, bf16), bf16)
        gaps = [
            ((a - b).norm() / b.norm()).item()
            for a, b in zip(found, exact, strict=True)
        ]
        far[name] += sum(gaps) / len(gaps) / seeds
print(*(f"{name}: {gap:.2%} from fp64" for name, gap in far.items()), sep="\n")
assert far["ours"] < 1.05 * far["peft's"]

# %% [markdown] tags=["deep"]
# Both ways are equally near to the exact numbers. The mean hides one difference: autocast rounds the gradients of $A$
# and $B$ to 16 bits before it stores them as fp32, and the fused functions do not
# (`tests/techniques/test_fused_lora.py`).

# %% [markdown]
# ## 4. What it costs
# The fused backward pass computes $x A^\top$ a second time, for each of a block's seven adapters: four in attention,
# three in the MLP. We count the floating-point operations of the toy:

# %%
counted = {}
for name, mlp in (("autograd", plain_mlp), ("fused", FusedMLP.apply)):
    counted[name] = flops(lambda mlp=mlp: mlp(x, *weights).sum().backward())
more = counted["fused"] - counted["autograd"]
assert more == 2 * N * R * (D + D + INNER)  # x A^T of gate, of up and of down
print(f"the fused toy computes {more / counted['autograd']:.1%} more")

# %% [markdown]
# In Llama-3.2-1B it is only 0.2 %: $2r(2D + F)$ operations for each token, next to about $12DF$.
#
# In return, a block runs fewer small operations. On a GPU each is a
# [kernel](../docs/glossary.md#kernel), a program that is launched, reads its tensors from memory, and writes its result
# there. For one block, our tests count 160 operations of PyTorch with peft, 152 with `fused_lora`, and 134 with
# `fused_blocks`, too.
#
# On a busy CPU we timed twelve pairs of runs (below: median and range). The gain is small, perhaps because CPUs launch
# no kernels. On [an H200](../docs/benchmarks.md#a-first-sitting-on-an-h200) both made a step 1.18 times as fast, and
# `fused_lora` alone 0.65 to 2.00: noise.

# %% Show the measured seconds tags=["hide-input"]
if study := results.study("fused"):
    print(f"SmolLM2's shape on a CPU ({study['device']}), {study['date'][:10]}")
    for way, switched_on in {
        "fused_lora": "fused_lora",
        "fused": "fused_lora and fused_blocks",
    }.items():
        pairs = sorted(study[way]["pairs"])
        ratio = f"{study[way]['times_as_fast']:.2f} times as fast as peft"
        print(f"{switched_on:28}{ratio} ({pairs[0]:.2f} to {pairs[-1]:.2f})")

# %% [markdown] tags=["deep"]
# ### Deeper: a GPU kernel for the norm, run on your CPU
# A norm does little arithmetic, so its time is memory traffic. transformers' `LlamaRMSNorm` runs eight kernels: five
# read and write all numbers, the mean reads them, and two handle one number for each token. A *Triton* kernel is a
# Python function that many programs run at the same time. Here each program has one token's numbers, which it reads
# once and writes once. Triton compiles the function for a GPU, and on a CPU its interpreter runs it:

# %% tags=["deep"]
try:
    import triton
    import triton.language as tl
except ImportError:  # its wheels are for Linux
    triton = None
    print("Triton is not installed here: pip install triton, or read on")

if triton:

    @triton.jit
    def norm_kernel(x_ND, w_D, y_ND, D, EPS: tl.constexpr, BLOCK: tl.constexpr):
        # x_ND is the address of the first number. A constexpr is a constant, known when
        # the kernel is compiled.
        token = tl.program_id(0)  # which program this is, of len(given)
        # places of the token's numbers; BLOCK is a power of two, at least D
        at = tl.arange(0, BLOCK)
        # Places beyond D are masked: nothing is read there, and 0 adds nothing to the
        # sum.
        x = tl.load(x_ND + token * D + at, mask=at < D, other=0.0).to(tl.float32)
        w = tl.load(w_D + at, mask=at < D, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)
        tl.store(y_ND + token * D + at, x * r * w, mask=at < D)

    given, gain = torch.randn(5, 48), torch.randn(48)
    y = torch.empty_like(given)
    # in brackets: how many programs
    norm_kernel[(len(given),)](given, gain, y, 48, EPS=1e-5, BLOCK=64)
    torch.testing.assert_close(y, rms_norm(given, gain, 1e-5))
    print("the kernel's norm is the package's")

# %% [markdown] tags=["deep"]
# In 16 bits this kernel moves 4 bytes for each number, and the eight kernels move 36. `techniques/triton_blocks.py` has
# this kernel with its backward pass, and kernels for the activation function and for rotary positions. You switch them
# on with `tricks.fused_blocks=triton`. On an H200 they are within rounding of the plain formulas. No T4 has run them
# yet, so `fused_blocks=true` is plain PyTorch.

# %% [markdown] tags=["deep"]
# ### Deeper: which project fuses which part?
#
# | | adapters | norm, activation, rotation | loss |
# |---|---|---|---|
# | Unsloth | fused; their gradients in 16 bits | one Triton kernel each | in chunks |
# | Liger | no | one Triton kernel each | in chunks |
# | TRL | no | Liger's, by a flag | in chunks |
# | axolotl | fused | Liger's, by flags | Liger's, by a flag |
# | `torch.compile` | fuses the operations between matrix multiplications | yes, it writes the kernels | whole logits |
# | here | fused; their gradients in fp32 | fewer operations, or Triton | in chunks, trained tokens only |
#
# Unsloth also calls bitsandbytes' C functions directly. None of these projects speeds up the matrix multiplications
# with $W$. By our estimate these take 0.43 of the 1.18 s that a row takes with both switches. Other parts of Unsloth's
# gain on a T4 are its attention and its leaner preparation ([FlashAttention](flash_attention.py), [lean
# preparation](mixed_precision.py)).

# %% [markdown]
# ## 5. The production switch
# `fused_lora` is the MLP from above, and the same for attention's matrices. It works over 4-bit and 8-bit weights, too.
# `fused_blocks` fuses the norms and the rotary positions. In plain Hugging Face code each is one function of this
# package. For both, write `model = fuse_blocks(fuse(model))`. (`base` is the model's name.)

# %%
from cria_tricks.techniques import fused_blocks, fused_lora

print(fused_lora.PLAIN)
print(fused_blocks.PLAIN)

# %% [markdown]
# The first command prints the memory bill for a T4, and the second trains. (On a T4 the recipe leaves out
# checkpointing, and the chunked loss, which our job has.)
#
# ```bash
# cria plan kwanzaa --gpu t4 --set tricks.chunked_loss=true \
#   --set tricks.fused_lora=true --set tricks.fused_blocks=true
# cria train kwanzaa --set tricks.chunked_loss=true \
#   --set tricks.fused_lora=true --set tricks.fused_blocks=true
# ```
#
# We predict their worth, with the range of a T4's speed in brackets, which moves all seconds of the table together.

# %%
switches = ["tricks.fused_lora=true", "tricks.fused_blocks=true"]
worth = {}
for name, recipe in (("without checkpointing", job), ("with checkpointing", whole)):
    print(name)
    ways = (("before", []), ("fused_lora", switches[:1]), ("both", switches))
    for label, changes in ways:
        found = target.bill(with_settings(recipe, changes))
        worth[name, label] = found.memory.peak_bytes
        row = 2048 * found.seconds
        low, high = row / found.spread**0.5, row * found.spread**0.5
        longest = toggles.longest(target, found.recipe)
        print(
            f"  {label:11}{found.memory.peak_bytes / MIB:7,.1f} MiB, {row:.2f} s a row "
            f"({low:.2f} to {high:.2f}), rows of {longest:,} tokens fit"
        )


# %% Check the numbers of the text, and draw figure 2 tags=["hide-input"]
fused = with_settings(job, switches)
after = saved_per_token(fused)
assert sum(after.values()) == 64 * KIB
falls = (
    worth["without checkpointing", "before"] - worth["without checkpointing", "both"]
)
assert round(falls / MIB, 1) == 1308.5
lora_alone = worth["without checkpointing", "fused_lora"]
assert worth["without checkpointing", "before"] - lora_alone == 1052.5 * MIB
falls = worth["with checkpointing", "before"] - worth["with checkpointing", "both"]
assert round(falls / MIB, 1) == 29.5
assert round(toggles.longest(target, fused) / toggles.longest(target, job), 2) == 1.59
assert round(target.bill(fused).seconds / target.bill(job).seconds, 2) == 0.83
both = with_settings(whole, switches)
assert round(target.bill(both).seconds / target.bill(whole).seconds, 2) == 0.79
of_a_row = []  # seconds of the job's parts, before and after
for recipe in (job, fused):
    parts = {
        part.name: part.seconds
        for part in folds.time_of(recipe, shape, target.card).parts
    }
    products = parts["blocks forward"] + parts["blocks backward"]
    of_a_row.append([round(s / 8, 2) for s in (parts["between products"], products)])
assert of_a_row == [[0.51, 0.43], [0.24, 0.43]]
thin = 2 * 16 * (2 * shape.width + shape.inner)  # x A^T of gate, up and down
assert round(thin / (12 * shape.width * shape.inner), 3) == 0.002


def of_a_block(theme: Theme):
    """What a block saves for a token, tensor by tensor, without and with fusing."""
    drawn, axes = course.figure(height=3.9)
    names = list(table)
    for number, (label, sizes) in enumerate((("peft", table), ("fused", after))):
        axes.barh(
            [place + 0.4 * number - 0.2 for place in range(len(names))],
            [sizes.get(name, 0) / KIB for name in names],
            height=0.38,
            color=theme.series[number],
            label=label,
        )
    axes.set_yticks(range(len(names)), names)
    axes.set(xlabel="KiB for each token", ylim=(len(names) - 0.4, -0.6))
    axes.grid(axis="x")
    axes.legend(loc="upper right")
    return drawn


course.show(
    of_a_block,
    "Figure 2. What one block saves for one token, tensor by tensor. With both "
    "switches the activated gate and the gated product are not saved, and each norm "
    "saves 4 KiB instead of 8, so 104 KiB become 64.",
)

# %% [markdown]
# Without checkpointing, each block keeps 64 KiB for each token instead of 104. So the peak falls by 1,308.5 MiB
# (`fused_lora` alone: 1,052.5), and rows may be 59 % longer. A row takes 17 % less time by estimate, because the small
# operations move fewer bytes, in 0.24 s instead of 0.51 s. With checkpointing, blocks keep only their inputs, so the
# peak falls by only 29.5 MiB, of 16-bit copies. But a row takes 21 % less time, because checkpointing repeats the small
# operations. All recipes leave the switches off until a T4 has timed them, but
# `cria plan kwanzaa --gpu t4 --fit fastest` tries them.

# %% [markdown] tags=["deep"]
# ### Deeper: where the 1,308.5 MiB come from
# For each token and block, the MLP keeps $4F$ bytes less, and each of seven adapters $2r$. Each of 32 norms keeps $2D$
# bytes less for each token: 31 norms of the blocks, and the final norm, which has its own line in the bill. (The first
# norm of the first block saves nothing, because no gradient goes to the frozen embedding. Therefore the saved
# activations after fusing are a little less than 16 blocks of 64 KiB for each token. Before, they are 3,345 MiB and not
# 16 times 104 KiB for each token, which is 3,328: the copies, the $xA^\top$, and 4.24 MiB of small numbers of attention
# and norms come on top, and the first norm saves 16 MiB less.) Autocast also keeps 16-bit copies of the adapters'
# 11,272,192 numbers until the backward pass, and the fused functions do not. With checkpointing, the switches save
# these copies, and a 16-bit copy of the final norm's input.

# %% tags=["deep"]
of_blocks = 2048 * shape.layers * (4 * shape.inner + 7 * 2 * job.lora.r)
of_norms = 2048 * 32 * 2 * shape.width
copies = 2 * 11_272_192
print(*(f"{size / MIB:,.1f} MiB" for size in (of_blocks, of_norms, copies)), sep=" + ")
less = course.bill(job).peak_bytes - course.bill(fused).peak_bytes
assert less == of_blocks + of_norms + copies
saved = {line.name: line.bytes for line in course.bill(job).lines}["saved activations"]
thin = 2048 * shape.layers * 7 * 2 * job.lora.r
of_blocks_alone = 2048 * 104 * KIB * shape.layers
assert round((saved - of_blocks_alone - thin - copies) / MIB, 2) == -11.76
checkpointed = course.bill(with_settings(whole, switches)).peak_bytes
assert course.bill(whole).peak_bytes - checkpointed == copies + 2 * 2048 * shape.width
course.show_bill(job, fused)

# %% [markdown]
# ## 6. Where it breaks
# **`fused_lora has no effect with lora.dropout`.** With dropout, the adapter gets $x$ with some numbers set to zero,
# and $W$ gets $x$. The fused functions save only one input, so peft computes the adapters as before. Set
# `lora.dropout=0`.
#
# **`the norms or rotary positions of gemma-3-1b ... have another formula`.** `fused_blocks` knows the formulas of
# Llama, Mistral, Qwen and a few more, and refuses all other kinds of model.

# %%
with_dropout = ["tricks.peft=lora", "tricks.fused_lora=true", "lora.dropout=0.1"]
plan = resolve(with_settings(Recipe(), with_dropout))
print(*plan.warnings, sep="\n")
assert any("no effect with lora.dropout" in warning for warning in plan.warnings)

of_gemma = ["model=gemma-3-1b", "tricks.peft=lora", "tricks.fused_blocks=true"]
try:
    refuse(
        resolve(with_settings(Recipe(), of_gemma)),
        facts_of(find_shape("gemma-3-1b")),
        1,
    )
    raise AssertionError("fused_blocks took a model of another kind")
except BadInput as refused:
    print(refused)

# %% [markdown] tags=["deep"]
# ### Deeper: two errors of backward passes that are written by hand
# **`Unpack is being triggered for a tensor that was already unpacked once.`** Under gradient checkpointing with
# `use_reentrant=False`, a function may read `ctx.saved_tensors` only once, because reading frees what was recomputed.
# The cure is to read it into local names, as `FusedMLP` does.


# %% tags=["deep"]
class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, dy):
        if ctx.saved_tensors[0].numel() == 0:
            return dy
        return 2 * dy * ctx.saved_tensors[0]  # the second time


y = checkpoint(
    ReadsTwice.apply, torch.randn(3, requires_grad=True), use_reentrant=False
)
try:
    y.sum().backward()
    raise AssertionError("torch let it read twice")
except RuntimeError as error:
    print(*str(error).partition(" If you")[0].split(": ", 1), sep=":\n  ")
    assert "already unpacked once" in str(error)


# %% [markdown] tags=["deep"]
# **There is no message, and gradients are wrong the second time.** Some fast kernels write gradients over saved
# tensors, because that saves memory. Autograd notices when one of PyTorch's own in-place operations changes a saved
# tensor. It does not notice a kernel, or an operation on `.data`. A second backward pass (`retain_graph=True`) then
# reads gradients where it expects activations. The cure is to run the backward pass only once, or to leave saved
# tensors alone, as our functions do.


# %% tags=["deep"]
class OverItsInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        return x.data.mul_(2 * dy)  # as a kernel would; autograd does not see it


x3 = torch.tensor([3.0], requires_grad=True)
y = OverItsInput.apply(x3.clone())  # a copy, or x3 itself would be overwritten
first, second = (
    torch.autograd.grad(y, x3, retain_graph=True)[0].item() for _ in range(2)
)
print(f"the gradient of x squared at 3: {first:.0f}, and the second time {second:.0f}")
assert (first, second) == (6, 12)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict**: without checkpointing, by how many MiB do both switches lower the saved activations of Llama-3.1-8B,
#    with $D = 4096$, $F = 14336$ and 32 blocks, for one row of 1,024 tokens? For each token, a block's MLP keeps $4F$
#    bytes less, and each of its two norms $2D$. Count all 64 norms, and leave out $x A^\top$ and the adapters' copies.
# 2. **Build**: fill in `norm_backward(dy, x, w, eps)`, which returns the gradient of $x$ for $y = w\,x\,q$; `x` is
#    (tokens, D), and `w` is (D,). Here $q = 1 / \sqrt{\mathrm{mean}(x^2) + \mathrm{eps}}$ is one number for each token,
#    and it depends on $x$ by $\partial q / \partial x_j = -q^3 x_j / D$.
# 3. **Reach**: Unsloth's kernel for `gate_backward` makes no new tensor. Fill in `in_place(dh, e, g)`, which returns
#    $h$, $de$ and $dg$ and makes *one* new tensor of their size. It may write over `dh`, `e` and `g` with `mul_`,
#    `add_` and `addcmul_` (`t.addcmul_(u, v, value=c)` adds $c\,u\,v$). With $a = e\,\sigma$,
#    $a'(e) = \sigma + a - \sigma a$.

# %% tags=["exercise"]
mib_saved_for_8b = None


def norm_backward(dy, x, w, eps):
    """FILL ME IN: return the gradient of x."""


def in_place(dh, e, g):
    """FILL ME IN: return h, de, dg; make one new tensor."""


# %% Check the exercises tags=["hide-input"]
def of_norm(answer):
    torch.manual_seed(1)
    for size in (1.0, 0.01):
        x = (size * torch.randn(7, 12, dtype=fp64)).requires_grad_()
        w, dy = torch.randn(12, dtype=fp64), torch.randn(7, 12, dtype=fp64)
        y = w * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5)
        (right,) = torch.autograd.grad(y, x, dy)
        if (found := answer(dy.clone(), x.detach().clone(), w.clone(), 1e-5)) is None:
            raise NotImplementedError
        assert found.shape == x.shape, (
            f"the shape is {tuple(found.shape)}, and x has {tuple(x.shape)}"
        )
        q = torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-5)
        assert not torch.allclose(found, dy * w * q), (
            "that takes q for a constant; it depends on x, too"
        )
        assert torch.allclose(found, right), (
            "not autograd's gradient; check w, the mean, and the power of q"
        )


def of_in_place(answer):
    torch.manual_seed(2)
    dh, e, g = (torch.randn(50, 40, dtype=fp64) for _ in range(3))
    de, dg = gate_backward(dh, e, g)
    right = {"h": F.silu(e) * g, "de": de, "dg": dg}
    given = [each.clone() for each in (dh, e, g)]
    results = []
    made = peak_bytes(lambda: results.append(answer(*given)), alive=given) / dh.nbytes
    if results[0] is None:
        raise NotImplementedError
    assert isinstance(results[0], tuple), "return three tensors: h, de, dg"
    assert len(results[0]) == 3, "return three tensors: h, de, dg"
    for (name, its), found in zip(right.items(), results[0], strict=True):
        assert found.shape == its.shape, f"{name} has the shape {tuple(found.shape)}"
        assert torch.allclose(found, its), (
            f"{name} is wrong; was a tensor written over that is still needed?"
        )
    assert made < 1.5, (
        f"it makes {made:.0f} new tensors at a time; "
        "write over dh, e and g (mul_, add_, addcmul_)"
    )


course.check(
    1,
    mib_saved_for_8b,
    course.about(
        2304,
        "per token and block: 4 F bytes of the MLP and 2 D of each norm; "
        "then times tokens and blocks",
        mistakes={
            1792: "the two norms save something as well: 2 D bytes each",
            2048: "there are two norms in a block",
            6144: "that is what peft's way saves; the question is the difference",
            3840: "that is what is still saved; the question is the difference",
            2304 * 2**20: "that is a number of bytes; give MiB",
            72: "that is the MiB of one block; the model has 32",
        },
    ),
    "a number of MiB",
)
course.check(
    2,
    norm_backward,
    of_norm,
    "a function (dy, x, w, eps) -> the gradient of x, shaped like x",
)
course.check(
    3, in_place, of_in_place, "a function (dh, e, g) -> three tensors of their shape"
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# mib_saved_for_8b = (4 * 14336 + 2 * 2 * 4096) * 1024 * 32 / 2**20
#
#
# def norm_backward(dy, x, w, eps):
#     q = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
#     dn = dy * w  # the gradient of x q
#     return q * (dn - x * q**2 * (dn * x).mean(-1, keepdim=True))
#
#
# def in_place(dh, e, g):
#     sigma = e.sigmoid()  # the one new tensor
#     a = e.mul_(sigma)  # the activated gate
#     slope = sigma.addcmul_(sigma, a, value=-1).add_(a)  # sigma + a - sigma a
#     de = slope.mul_(g).mul_(dh)
#     h = g.mul_(a)
#     dg = dh.mul_(a)
#     return h, de, dg
# ```
#
# </details>
#
# ## In one breath
# - **Saves** 40 of the 104 KiB that a block of Llama-3.2-1B keeps for each token, and 16-bit copies of the adapters:
#   1,308.5 MiB of the job without checkpointing, and 29.5 MiB with it.
# - **Costs** seven small matrix multiplications and one activation function more for each block.
# - **Exact within rounding**: the adapters' gradients stay in fp32, and peft's are rounded to 16 bits.
# - **When**: you train without checkpointing, or kernel launches and memory traffic take a large part of the step.
# - **When not**: you use dropout, DoRA (another formula) or `compile` (which fuses by itself), and the plan tells you.
#   `fused_blocks` refuses Gemma, OLMo 2 and Phi-3, because their blocks compute something else.
#
# ## Sources
# - Seconds of TinyLlama on a T4: Hugging Face's blog, pull request 1726 (January 2024).
# - Unsloth (2026.8): `unsloth/kernels/fast_lora.py`, `swiglu.py`, `rms_layernorm.py`, `rope_embedding.py`. axolotl:
#   `kernels/lora.py`. TRL 1.16: `use_liger_kernel`. Liger 0.8: arXiv 2410.10989 (Hsu and others, 2024).
# - *LoRA*, arXiv 2106.09685, section 4.1 (Hu and others, 2021); *GLU Variants*, arXiv 2002.05202, equation 6 (Shazeer,
#   2020); *RMSNorm*, arXiv 1910.07467, equation 4 (Zhang and Sennrich, 2019).
# - *Triton*, MAPL 2019 (Tillet and others); its interpreter: triton-lang.org, "Debugging Triton".
# - Ours: `cria_tricks/techniques/fused_lora.py`, `fused_blocks.py` and `triton_blocks.py`, and their tests.
