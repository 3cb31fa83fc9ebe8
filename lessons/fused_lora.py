# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # How the fast ones are fast: fused LoRA
# > **Promise.** On a T4, Unsloth trained TinyLlama in 6,996 s where TRL took 13,090. Other attention and a leaner
# > preparation are a part of that ([FlashAttention](flash_attention.py) and [lean preparation](mixed_precision.py)). A
# > backward pass written by hand is another. You derive it in four steps, prove it, and switch it on: 1.28 GiB less
# > without checkpointing. Then you run a GPU kernel on your CPU.
#
# > **Card.** saves half of an MLP's inner tensors, the fp32 copies of the norms' inputs, and kernel launches / costs
# > one more small product for each adapter and one activation for each MLP / exact within rounding / 40 minutes / after
# > [the lesson on all switches together](a_full_card.py)
#
# The job is still QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB. [The lesson on
# all switches together](a_full_card.py) ended with a surprise: the T4 has room to spare, so the fastest run is one
# *without* gradient checkpointing. But then every block keeps all its activations, and longer rows do not fit. This
# lesson stores fewer.

# %% Imports and settings tags=["hide-input"]
import os

# before anything imports Triton: its kernels run in Python, on any processor
os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cria_tricks import course
from cria_tricks.bench import results
from cria_tricks.bench.style import Theme
from cria_tricks.bill.block import kept
from cria_tricks.hardware import T4
from cria_tricks.measure.counting import SavedBytes, flops, peak_bytes
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks import folds
from cria_tricks.tricks.fused_blocks import rms_norm
from cria_tricks.tricks.fused_lora import Matrix, gated_mlp

torch.manual_seed(0)
MIB, KIB = 2**20, 2**10
fp64, fp32, bf16 = torch.float64, torch.float32, torch.bfloat16
# width, inner width of the MLP, rank, tokens, the adapter's scale
D, INNER, R, N, S = 64, 160, 4, 96, 0.5

# %% [markdown]
# ## 1. The bill
# Take the job without checkpointing. What does one block save for its backward pass, per token? In Llama-3.2-1B the
# width is $D = 2048$ and the MLP's inner width is $F = 8192$. A number takes 2 bytes. Is attention or the MLP larger?

# %%
job = with_settings(course.CAPSTONE, ["tricks.gradient_checkpointing=false"])
shape = find_shape(job.model)


def saved_per_token(recipe):
    """Bytes that one block saves for one token, by name."""
    one, other = (folds.facts(recipe, shape, T4, tokens) for tokens in (64, 128))
    few, many = (kept(facts.operations) for facts in (one, other))
    # what does not grow with tokens cancels
    return {name: (many[name] - few[name]) / 64 for name in many}


table = saved_per_token(job)
for name, size in table.items():
    if size >= KIB:
        print(f"{name:22}{size / KIB:5.0f} KiB")
large = sum(size for size in table.values() if size >= KIB)
print(f"{'together':22}{large / KIB:5.0f} KiB a token and block")
assert large == 8 * 8192 + 20 * 2048 == 104 * KIB

# %% [markdown]
# The MLP stores four tensors of $F$ numbers: the results of its matrices gate and up, the activated gate, and the
# product of that with up. That is $8F$ of $8F + 20D$ bytes. Both norms store an fp32 copy of their input, $4D$
# each. Which of these can be recomputed cheaply?
#
# ## 2. From scratch, in four steps
# Autograd looks at one operation at a time and saves its inputs. If you write the backward pass of several operations
# as one function, you choose what is saved.
#
# **Step 1: one matrix and its adapter.** $x$ holds $N$ tokens of $D$ numbers. $W$, of $F$ by $D$, is frozen; $A$, of
# $r$ by $D$, and $B$, of $F$ by $r$, learn. $s$ is a number:
#
# $$y = x W^\top + s\,(x A^\top) B^\top$$
#
# Let $dy$ be the gradient of the loss with respect to $y$. For a product $y = pM^\top$ the chain rule gives
# $dp = dy\,M$ and $dM = dy^\top p$. Use it for $B$, then for $A$. With $u = s\,dy\,B$, of $r$ numbers for each token:
#
# $$dx = dy\,W + u A, \qquad dA = u^\top x, \qquad dB = dy^\top (s\,x A^\top)$$
#
# So $x$ is enough. Autograd also stores $x A^\top$; we compute it again instead.


# %%
def lora_forward(x, W, A, B):
    # one operation multiplies, scales and adds
    return torch.addmm(x @ W.T, x @ A.T, B.T, alpha=S)


def lora_backward(dy, x, W, A, B):
    """Return the gradients of x, A and B."""
    u = S * (dy @ B)  # scale the narrow result, not the wide dy
    return torch.addmm(dy @ W, u, A), u.T @ x, dy.T @ (S * (x @ A.T))


# %% [markdown]
# **Step 2: matrices that share their input.** The MLP's matrices gate and up both multiply $x$, so their two $dx$ are
# added. (Queries, keys and values: the same.)
#
# **Step 3: the activation.** Let $e$ be the result of gate, and $g$ that of up. The third matrix, down, multiplies
# $h = a(e) \cdot g$. The activation is $a(e) = e\,\sigma(e)$, called SiLU. Therefore
#
# $$dg = dh\,a(e), \qquad de = dh\,g\,a'(e), \qquad a'(e) = \sigma(e)\,\bigl(1 + e\,(1 - \sigma(e))\bigr)$$
#
# So $e$ and $g$ are enough: no matrix product is needed for $a(e)$ and $h$.


# %%
def gate_backward(dh, e, g):
    """Return the gradients of e and g."""
    sigma = e.sigmoid()
    return dh * g * sigma * (1 + e * (1 - sigma)), dh * e * sigma


# %% [markdown]
# **Step 4: put them together.** In a `torch.autograd.Function` you write both passes; `ctx` carries tensors
# from one to the other. The MLP stores $x$, $e$ and $g$.


# %%
class FusedMLP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, *weights):  # W, A and B of gate, of up and of down
        gate, up, down = weights[:3], weights[3:6], weights[6:]
        e, g = lora_forward(x, *gate), lora_forward(x, *up)
        ctx.save_for_backward(x, e, g, *weights)
        return lora_forward(F.silu(e) * g, *down)

    @staticmethod
    def backward(ctx, dy):
        x, e, g, *weights = ctx.saved_tensors
        gate, up, down = weights[:3], weights[3:6], weights[6:]
        # of_down: the gradients of A and B
        dh, *of_down = lora_backward(dy, F.silu(e) * g, *down)
        de, dg = gate_backward(dh, e, g)
        dx, *of_gate = lora_backward(de, x, *gate)
        dx_of_up, *of_up = lora_backward(dg, x, *up)
        # One gradient for each argument of forward, in order; None for the frozen W.
        return dx + dx_of_up, None, *of_gate, None, *of_up, None, *of_down


def plain_mlp(x, *weights):
    """The same by autograd, operation by operation, as peft does it."""

    def adapted(x, W, A, B):
        return x @ W.T + (x @ A.T) @ B.T * S

    e, g = adapted(x, *weights[:3]), adapted(x, *weights[3:6])
    return adapted(F.silu(e) * g, *weights[6:])


# %% Draw figure 1 tags=["hide-input"]
def kept_tensors(theme: Theme):
    """What an MLP with adapters stores: with autograd, and with one function."""
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
    "Figure 1. Tensors of an MLP, in the order of computation: g comes from x, "
    "and h from a(e) and g. Filled boxes "
    "are stored. Fused, a(e) and h are not; "
    "the backward pass computes them again from e and g.",
)

# %% [markdown]
# ## 3. Prove it
# **The derivation.** `gradcheck` moves each input a little, in fp64, and compares how the output moves with the
# gradient.


# %%
def weights_of(dtype, D=D, INNER=INNER, R=R):
    """W, A and B of gate, up and down; A and B learn."""
    made = []
    for d_in, d_out in ((D, INNER), (D, INNER), (INNER, D)):
        made += [torch.randn(d_out, d_in, dtype=dtype) / d_in**0.5]
        made += [
            (torch.randn(*size, dtype=dtype) / 8).requires_grad_()
            for size in ((R, d_in), (d_out, R))
        ]
    return made


small = torch.randn(3, 5, dtype=fp64, requires_grad=True)
assert torch.autograd.gradcheck(FusedMLP.apply, (small, *weights_of(fp64, 5, 7, 2)))
print("gradcheck: the gradients are those of finite differences")

# %% [markdown]
# **The bytes.** For $N$ tokens autograd stores $x$, four inner tensors and three $x A^\top$. Ours stores $x$ and two
# inner tensors. Predict the bytes.

# %%
weights, x = weights_of(fp32), torch.randn(N, D, requires_grad=True)
predicted = {
    "autograd": 4 * N * (D + 4 * INNER + 3 * R),
    "fused": 4 * N * (D + 2 * INNER),
}
for name, mlp in (("autograd", plain_mlp), ("fused", FusedMLP.apply)):
    with SavedBytes(besides=weights) as saved:
        alive = mlp(x, *weights)  # this name keeps the graph alive while we count
    print(f"{name:9} stores {saved.now:,} bytes, predicted {predicted[name]:,}")
    assert saved.now == predicted[name]

# %% [markdown]
# **The rounding.** In bf16 the adapter's part is rounded fewer times. How far from fp64 are results and gradients of
# peft's operations, and of the package's `gated_mlp`, which is `FusedMLP` with autocast ([mixed
# precision](mixed_precision.py))? $A$ and $B$ are fp32; products are in bf16. A `Matrix` holds $A$, $B$, $s$ and two
# functions: one multiplies by $W$, one returns it.


# %%
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
    drawn, given = weights_of(fp64), torch.randn(N, D).to(bf16)
    exact = run(pefts, given, as_matrices(drawn, fp64), fp64)
    for name, way in (("peft's", pefts), ("ours", ours)):
        found = run(way, given, as_matrices(drawn, bf16), bf16)
        gaps = [
            ((a - b).norm() / b.norm()).item()
            for a, b in zip(found, exact, strict=True)
        ]
        far[name] += sum(gaps) / len(gaps) / seeds
print(*(f"{name}: {gap:.2%} from fp64" for name, gap in far.items()), sep="\n")
assert far["ours"] < far["peft's"]

# %% [markdown]
# Ours is a little nearer. The mean hides one difference: autocast rounds the gradients of $A$ and $B$ to 16 bits before
# it stores them as fp32, and ours does not (`tests/tricks/test_fused_lora.py`).
#
# ## 4. What it costs
# **Products.** Each of a block's seven adapters computes $x A^\top$ twice. Predict the extra share of an MLP's
# floating-point operations:

# %%
counted = {
    name: flops(lambda way=way: way(x, *weights).sum().backward())
    for name, way in (("autograd", plain_mlp), ("fused", FusedMLP.apply))
}
thin = 2 * N * R * (D + D + INNER)
print(
    f"autograd {counted['autograd']:,} operations, fused {counted['fused']:,}: "
    f"{thin / counted['autograd']:.1%} more"
)
assert counted["fused"] - counted["autograd"] == thin

# %% [markdown]
# In Llama-3.2-1B that share is 0.2 %, as the rank of 16 is small beside 2,048. What do we gain? Between
# products, a block runs many small operations. On a GPU each is a *kernel*, a program that is launched and that
# reads and writes memory. `tests/tricks/test_fused_lora.py` counts PyTorch's operations of a block in fp32 on a CPU:
# 160 with peft, 152 with fused adapters, 134 if norms, rotary positions and the activation are fused too.
#
# **A kernel, run by hand.** A norm does little arithmetic. transformers' `LlamaRMSNorm` runs
# eight kernels: five read and write all numbers, one (the mean) reads them, and two handle one number a row. A *Triton*
# kernel is a Python function that many programs run side by side. Here each program has one row, which it reads
# and writes once. Triton compiles it for a GPU; on a CPU its interpreter runs it:

# %%
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
        row = tl.program_id(0)  # which program this is, of len(rows)
        # places in the row; BLOCK is a power of two, at least D
        at = tl.arange(0, BLOCK)
        # Places beyond the row are masked: nothing is read there, and 0 adds nothing to
        # the sum.
        x = tl.load(x_ND + row * D + at, mask=at < D, other=0.0).to(tl.float32)
        w = tl.load(w_D + at, mask=at < D, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(x * x, axis=0) / D + EPS)
        tl.store(y_ND + row * D + at, x * r * w, mask=at < D)

    rows, gain = torch.randn(5, 48), torch.randn(48)
    y = torch.empty_like(rows)
    # in brackets: how many programs
    norm_kernel[(len(rows),)](rows, gain, y, 48, EPS=1e-5, BLOCK=64)
    torch.testing.assert_close(y, rms_norm(rows, gain, 1e-5))
    print("the kernel's norm is the package's")

# %% [markdown]
# In 16 bits this kernel moves 4 bytes for each number, and the eight move 36. `tricks/triton_blocks.py` has it with
# its backward pass, and kernels for activation and rotary positions. `tricks.fused_blocks=triton` runs them. No GPU of
# ours has, so what follows is plain PyTorch.
#
# **Seconds.** `make bench-fused` times peft and ours in turn, with SmolLM2's shape. A pair gives one ratio; this is the
# median of twelve on a CPU, with the lowest and the highest.

# %%
if study := results.study("fused"):
    print(study["device"], study["date"][:10])
    for way, switched_on in {
        "fused_lora": "fused_lora",
        "fused": "fused_lora and fused_blocks",
    }.items():
        pairs = sorted(study[way]["pairs"])
        ratio = f"{study[way]['times_as_fast']:.2f} times as fast as peft"
        print(f"{switched_on:28}{ratio} ({pairs[0]:.2f} to {pairs[-1]:.2f})")

# %% [markdown]
# ## 5. The production switch
# `fused_lora` is the MLP above, and the same for queries, keys, values and the output of attention, over 4-bit and
# 8-bit matrices too. `fused_blocks` adds norms and rotary positions, and the activation if adapters are not fused.

# %%
switches = ["tricks.fused_lora=true", "tricks.fused_blocks=true"]
fused = with_settings(job, switches)
print(*(f"--set {switch}" for switch in switches))
print(diff(resolve(job, T4), resolve(fused, T4)))
course.show_bill(job, fused)

# %% [markdown]
# Predict the change of the peak. Per token and block the MLP needs $4F$ bytes less, each of seven adapters $2r$, and
# each of two norms $2D$, because it stores its 16-bit input and not the fp32 copy. The adapters have 11,272,192
# weights; autocast keeps 16-bit copies of them, and ours does not.

# %% Your guess: MiB that the peak falls tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
per_token_and_block = 4 * shape.inner + 2 * 2 * shape.width + 7 * 2 * job.lora.r
bytes_saved = 2048 * shape.layers * per_token_and_block + 2 * 11_272_192
saved = course.bill(job).peak_bytes - course.bill(fused).peak_bytes
print(f"{saved / MIB:,.1f} MiB less, predicted {bytes_saved / MIB:,.1f}")
assert sum(size for size in saved_per_token(fused).values() if size >= KIB) == 64 * KIB
assert saved == bytes_saved
target = toggles.Target(shape, T4)
for name, recipe in (("peft's way", job), ("fused", fused)):
    ms, longest = 1000 * target.bill(recipe).seconds, toggles.longest(target, recipe)
    print(
        f"{name:10} by estimate {ms:.2f} ms a token on a T4, "
        f"and rows of up to {longest:,} tokens fit"
    )
course.reveal(guess, saved / MIB, "MiB")

# %% [markdown]
# 104 KiB became 64, and the longest row grew by 59 %. And with checkpointing, where blocks store only their inputs?

# %%
checkpointed = course.bill(course.CAPSTONE).peak_bytes
less = checkpointed - course.bill(with_settings(course.CAPSTONE, switches)).peak_bytes
print(
    f"{less / MIB:.1f} MiB less: 16-bit copies of the adapters, "
    "and a copy of the final norm's input"
)
assert less == 2 * 11_272_192 + 2 * 2048 * shape.width

# %% [markdown]
# Both are off in all recipes until a GPU has measured them; `cria plan kwanzaa --gpu t4 --fit fastest` tries them.
#
# **Which project fuses which part?**
#
# | | adapters | norm, activation, rotation | loss |
# |---|---|---|---|
# | Unsloth | fused; their gradients in 16 bits | one Triton kernel each | in chunks |
# | Liger | no | one Triton kernel each | in chunks |
# | TRL | no | Liger's, by a flag | in chunks |
# | axolotl | fused | Liger's, by flags | Liger's, by a flag |
# | `torch.compile` | fuses what lies between products | yes, it writes the kernels | whole logits |
# | here | fused; their gradients in fp32 | fewer operations, or Triton | in chunks, trained tokens only |
#
# Unsloth launches one kernel where plain PyTorch launches several, and calls bitsandbytes' C functions directly. None
# of them speeds up the products with $W$, the largest part of a step.
#
# ## 6. Where it breaks
# **`Unpack is being triggered for a tensor that was already unpacked once.`** Under gradient checkpointing a function
# may read `ctx.saved_tensors` only once, because that frees what was recomputed. Cure: read it into local names.


# %%
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
    print(str(error)[:140])
    assert "already unpacked once" in str(error)


# %% [markdown]
# **No message, and gradients are wrong the second time.** Fast kernels write gradients over saved tensors, to spare
# memory. Autograd notices PyTorch's in-place operations on a saved tensor, but not a kernel's, nor those on `.data`.
# A second backward pass (`retain_graph=True`) then reads gradients in the place of activations. Cure: run it once, or
# leave saved tensors alone, as our functions do.


# %%
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
# **`fused_lora has no effect with lora.dropout`.** With dropout an adapter has another input than $W$. Our
# functions store one, so peft computes the adapters, and the plan says so.

# %%
plan = resolve(
    with_settings(
        Recipe(), ["tricks.peft=lora", "tricks.fused_lora=true", "lora.dropout=0.1"]
    )
)
print(*plan.warnings, sep="\n")
assert any(
    "fused_lora has no effect with lora.dropout" in warning for warning in plan.warnings
)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Llama-3.1-8B has $D = 4096$, $F = 14336$ and 32 blocks. Without checkpointing, by how many MiB do
#    both switches lower the stored activations of one row of 1,024 tokens? Your answer is a number of MiB. (Leave $x
#    A^\top$ out.)
# 2. **Build.** Fill in `norm_backward(dy, x, w, eps)`: the gradient of $x$ for $y = w\,x\,r$, with
#    $r = 1 / \sqrt{\mathrm{mean}(x^2) + \mathrm{eps}}$ for each row. (Here
#    $r$ is not the rank, and it depends on $x$: $\partial r / \partial x_j = -r^3 x_j / D$.)
# 3. **Reach.** Unsloth's kernel for `gate_backward` makes no new tensor. Fill in `in_place(dh, e, g)`: it returns
#    $h$, $de$ and $dg$, and makes *one* new tensor of their size. It may write over `dh`, `e` and `g`, with `mul_`
#    and `addcmul_`. (First write $a'(e)$ as $\sigma + a - \sigma a$.)

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
        r = torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + 1e-5)
        assert not torch.allclose(found, dy * w * r), (
            "that takes r for a constant; it depends on x, too"
        )
        assert torch.allclose(found, right), (
            "not autograd's gradient; check w, the mean, and the power of r"
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
        "write over dh, e and g (mul_, addcmul_)"
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
#     r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
#     g = dy * w
#     return r * (g - x * r**2 * (g * x).mean(-1, keepdim=True))
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
# - **Saves** 40 of 104 KiB a token and block of Llama-3.2-1B, and copies of the adapters: 1.28 GiB of the job without
#   checkpointing, 29.5 MiB with.
# - **Costs** seven small products and one activation for each block.
# - **Exact within rounding**: fewer roundings than peft's way, and adapter gradients that stay in fp32.
# - **When**: without checkpointing, or if kernel launches and memory take a large part of the step.
# - **When not**: dropout, DoRA, `compile`; the plan says so. `fused_blocks` refuses Gemma, OLMo 2
#   and Phi-3, whose blocks compute something else.
#
# ## Sources
# - Seconds of TinyLlama on a T4: Hugging Face's blog, pull request 1726 (January 2024).
# - Unsloth (2026.8): `unsloth/kernels/fast_lora.py`, `swiglu.py`, `rms_layernorm.py`, `rope_embedding.py`. Liger 0.8:
#   Hsu et al. 2024, arXiv 2410.10989. axolotl: `kernels/lora.py`. TRL 1.16: `use_liger_kernel`.
# - Hu et al. 2021, *LoRA*, arXiv 2106.09685, section 4.1. Shazeer 2020, *GLU Variants*, arXiv 2002.05202, eq. 6.
#   Zhang and Sennrich 2019, *RMSNorm*, arXiv 1910.07467, eq. 4.
# - Tillet et al. 2019, *Triton*, MAPL 2019. Its interpreter: triton-lang.org, "Debugging Triton".
# - Ours: `cria_tricks/tricks/fused_lora.py`, `fused_blocks.py` and `triton_blocks.py`, and their tests.
