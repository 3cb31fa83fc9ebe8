# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Long rows: which part of a step grows
# > **Promise.** You find out what grows with the length of a row, and shrink the two largest parts. By estimate, with
# > fusing ([fused LoRA](fused_lora.py)), the longest row of Llama-3.1-8B on a T4 grows from 12,783 tokens to over four
# > times as many.
#
# > **Card.** saves the inner tensors of one MLP, and all saved block inputs / costs PCIe traffic and host memory /
# > exact within rounding (tiles), exact (offload) / 30 minutes / after [fused LoRA](fused_lora.py)
#
# A contract or a code repository has tens of thousands of tokens. Cut into rows of 2,048, it never shows the model how
# page 1 and page 40 belong together. Unsloth publishes rows of 40,724 tokens for Llama-3.1-8B on a 16 GB card. What
# does a T4 allow?

# %% Imports and settings tags=["hide-input"]
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cria_tricks import course
from cria_tricks.bench.style import Theme
from cria_tricks.common.errors import BadInput
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import find_card
from cria_tricks.hardware.gpus import COLAB, KAGGLE
from cria_tricks.hardware.trust import verdict
from cria_tricks.measure.counting import SavedBytes, peak_bytes
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.predict.host import LIBRARIES
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks import folds
from cria_tricks.tricks.tiled_mlp import tiled

torch.manual_seed(0)
GIB, MIB, KIB = 2**30, 2**20, 2**10

# %% [markdown]
# ## 1. The bill
# The course's job with a larger model: Llama-3.1-8B has $L = 32$ blocks of width $D = 4096$, and its MLPs have the
# inner width $F = 14336$. QLoRA of rank 16, gradient checkpointing, sdpa, the chunked loss and a paged 8-bit
# optimizer are on. A step has one row of $T$ tokens.
#
# Three parts are large: the weights, the saved inputs of all 32 blocks, and the *open block*, the one that
# checkpointing is recomputing. Which is the largest at 2,048, 16,384 and 65,536 tokens? Write down your guess.

# %% Your guess: the largest at 65,536 tokens tags=["predict"]
guess = "no guess"  # @param ["no guess", "weights", "block inputs", "open block"]


# %% Helper: the bill in four groups tags=["hide-input"]
def parts(recipe, tokens):
    """Return the bytes at the peak of a step with one row of so many tokens, in four
    groups."""
    groups = {
        "weights, states": 0,
        "block inputs": 0,
        "open block": 0,
        "token ids, mask": 0,
    }
    names = {
        "saved activations": "block inputs",
        "open block": "open block",
        "batch": "token ids, mask",
    }
    for line in folds.estimate(recipe, shape, T4, tokens).peak.lines:
        groups[names.get(line.name.split(":")[0], "weights, states")] += line.bytes
    return groups


# %%
job = with_settings(
    course.CAPSTONE, ["model=llama-3.1-8b", "tricks.gradient_accumulation=1"]
)
shape = find_shape(job.model)
L, D, INNER = shape.layers, shape.width, shape.inner
LENGTHS = (2048, 16_384, 65_536)
bills = [parts(job, tokens) for tokens in LENGTHS]
print(f"{'GiB':18}" + "".join(f"{tokens:>8,}" for tokens in LENGTHS))
for name in bills[0]:
    print(f"{name:18}" + "".join(f"{bill[name] / GIB:8.2f}" for bill in bills))
print(f"{'peak':18}" + "".join(f"{sum(bill.values()) / GIB:8.2f}" for bill in bills))
assert [max(bill, key=bill.get) for bill in bills] == [
    "weights, states",
    "weights, states",
    "open block",
]
course.reveal(guess, max(bills[-1], key=bills[-1].get).partition(",")[0])

# %% [markdown]
# At 2,048 and 16,384 tokens it is the weights. At 65,536 the *one* open block takes as much as the inputs of all 32
# blocks! What does one more token add? Subtract two bills:


# %%
def growth(recipe):
    """Return by how many bytes each group grows with a token."""
    few, many = parts(recipe, 32_768), parts(recipe, 65_536)
    return {name: (many[name] - few[name]) / 32_768 for name in many}


for name, size in growth(job).items():
    print(f"{name:18}{size / KIB:8.1f} KiB a token")
inputs, of_mlp, others = 2 * L * D, 12 * INNER, 22 * D
print(
    f"by hand: inputs {inputs / KIB:.0f}, MLP {of_mlp / KIB:.0f}, "
    f"rest of the open block {others / KIB:.0f}"
)
assert growth(job)["block inputs"] == inputs
assert abs(growth(job)["open block"] - of_mlp - others) < KIB

# %% [markdown]
# By hand, for one token, with 2 bytes a number:
#
# - **Block inputs**: $D$ numbers for each of $L$ blocks, $2LD$ bytes.
# - **The MLP of the open block**: four saved tensors of $F$ numbers ([fused LoRA](fused_lora.py)), and two gradients of
#   this size at the peak of the backward pass. So $6F$ numbers, $12F$ bytes.
# - **The rest of the open block**: attention's tensors, the norms' fp32 copies, gradients: $22D$ bytes. With sdpa
#   this is linear in $T$. Eager attention would also store $T^2$ scores for each of 32 heads, 256 GiB at 65,536
#   tokens.
#
# What does *not* grow: weights, adapters, optimizer states, and the logits, because the chunked loss takes a few tokens
# at a time ([the chunked loss](chunked_loss.py)).


# %% Draw figure 1 tags=["hide-input"]
def three_lengths(theme: Theme):
    """The parts of the bill at three lengths, whole, and with both techniques."""
    drawn, axes = course.figure(height=2.9)
    both = with_settings(
        job, ["tricks.tiled_mlp=true", "tricks.activation_offload=true"]
    )
    labels = [f"{tokens:,}" for tokens in LENGTHS] + ["65,536, tiles\nand offload"]
    shown = [*bills, parts(both, 65_536)]
    left = [0.0] * len(shown)
    for name, color in zip(
        list(shown[0])[:3], (theme.quiet, *theme.series), strict=False
    ):
        wide = [bill[name] / GIB for bill in shown]
        axes.barh(
            range(len(shown)), wide, left=left, color=color, height=0.66, label=name
        )
        left = [start + more for start, more in zip(left, wide, strict=True)]
    axes.axvline(
        T4.memory_bytes / GIB, color=theme.alarm, linewidth=1.2, linestyle=(0, (4, 3))
    )
    axes.text(T4.memory_bytes / GIB, -0.75, " a T4", color=theme.alarm, va="center")
    axes.set_yticks(range(len(shown)), labels)
    axes.set(
        xlabel="peak of a step, GiB", ylabel="tokens", ylim=(len(shown) - 0.4, -1.2)
    )
    axes.legend(loc="upper right")
    return drawn


course.show(
    three_lengths,
    "Figure 1. Llama-3.1-8B, by estimate: the weights do not grow with the row, "
    "block inputs and the open block grow "
    "alike. The last bar is the third with tiles and offload. "
    "It is still larger than a T4; section 5 finds the rows "
    "that fit.",
)

# %% [markdown]
# ## 2. From scratch, in four steps
# An MLP maps each token by itself. So it can take a few tokens at a time, a *tile*, and join the results. This small
# MLP, whose weights all learn, notes how many tokens it was given.

# %%
T, d, f, TILE = 512, 64, 224, 64  # tokens, width, inner width, tokens of a tile
given = []


def mlp(x):
    """From (t, d) to (t, d)."""
    given.append(len(x))
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def new_weights(dtype=torch.float32):
    drawn = (
        torch.randn(*size, dtype=torch.float64) / size[1] ** 0.5
        for size in ((f, d), (f, d), (d, f))
    )
    return [weight.to(dtype).requires_grad_() for weight in drawn]


gate, up, down = weights = new_weights()
x = torch.randn(T, d, requires_grad=True)

# %% [markdown]
# **Step 1: only cut.** How many bytes does autograd save, whole and in eight tiles? Guess before you run it.


# %%
def only_cut(x):
    return torch.cat([mlp(piece) for piece in x.split(TILE)])


for name, way in (("whole", mlp), ("only cut", only_cut)):
    with SavedBytes(besides=weights) as saved:
        y = way(x)  # this name keeps the graph alive while we count
    print(f"{name:9} saves {saved.now:,} bytes")
    assert saved.now == 4 * (T * d + 4 * T * f)

# %% [markdown]
# Cutting alone does not help, because autograd saves the tensors of every tile. **Step 2: drop them, and compute each
# tile again** in the backward pass. This is [checkpointing](gradient_checkpointing.py) of one tile at a
# time. (Ignore `keep` until step 3.)


# %%
# After `import torch` this cell runs anywhere.
def through_tiles(mlp, x, dy, tile, weights):
    """Run each tile again, forward and backward; return the gradients of x and of the
    weights."""
    dx, totals = torch.empty_like(x), [torch.zeros_like(weight) for weight in weights]
    for start in range(0, len(x), tile):
        place = slice(start, start + tile)
        piece = x[place].detach().requires_grad_()
        with torch.enable_grad():
            y = mlp(piece)
        dx[place], *found = torch.autograd.grad(y, [piece, *weights], dy[place])
        for total, gradient in zip(totals, found, strict=True):
            # every tile uses the same weights, so their gradients are summed
            total += gradient
    return dx, totals


class Tiles(torch.autograd.Function):
    @staticmethod
    # only arguments get gradients, so the weights are arguments
    def forward(ctx, x, mlp, tile, keep, *weights):
        ctx.mlp, ctx.tile, ctx.keep, ctx.weights = mlp, tile, keep, weights
        if keep is None:
            ctx.save_for_backward(x)
        # autograd records nothing in a Function
        return torch.cat([mlp(piece) for piece in x.split(tile)])

    @staticmethod
    def backward(ctx, dy):
        (x,) = (ctx.keep or ctx).saved_tensors
        dx, totals = through_tiles(ctx.mlp, x, dy, ctx.tile, ctx.weights)
        return dx, None, None, None, *totals  # None: no gradient of mlp, tile and keep


# %% [markdown]
# How often does the MLP run forward in a step, if its block is checkpointed?


# %%
def naive(x):
    return Tiles.apply(x, mlp, TILE, None, *weights)


def forward_passes(way):
    """Return how often the MLP runs forward in a step of a checkpointed block."""
    given.clear()
    checkpoint(
        lambda x: x + way(F.rms_norm(x, (d,))), x, use_reentrant=False
    ).sum().backward()
    return sum(given) / T


print(
    f"whole: {forward_passes(mlp):.0f} forward passes, tiles: "
    f"{forward_passes(naive):.0f}"
)
assert (forward_passes(mlp), forward_passes(naive)) == (2, 3)

# %% [markdown]
# A whole MLP runs in the forward pass, and again when checkpointing repeats the block. The tiles also run in their
# own backward pass, so the repetition computes them for nothing. Why? torch repeats a block until all its saved
# tensors are there again. A Function saves its tensors only when its forward pass has ended, so torch must run all
# tiles to get $x$.
#
# **Step 3: save before the tiles.** A second Function, in front of them, only saves $x$. The tiles save nothing, and
# read $x$ there. So the repetition stops before them.


# %%
class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)  # the same numbers

    @staticmethod
    def backward(ctx, dx):
        return dx


def ours(x):
    kept = Keep.apply(x)
    # grad_fn is the call of Keep: it holds the saved x
    return Tiles.apply(kept, mlp, TILE, kept.grad_fn, *weights)


print(f"saved before the tiles: {forward_passes(ours):.0f} forward passes")
assert forward_passes(ours) == 2


# %% Draw figure 2 tags=["hide-input"]
def three_passes(theme: Theme):
    """When a checkpointed block's MLP runs forward: naive tiles, and tiles behind what
    they keep."""
    sketch = course.Sketch(theme, 46, 13)
    for at, words in (
        (13.5, "forward pass"),
        (26, "repetition"),
        (38.5, "tiles, backward"),
    ):
        sketch.text(at, 0.8, words, quiet=True)
    for row, label in enumerate(("naive", "saved before")):
        top = 2.2 + 5.6 * row
        sketch.text(0, top + 1.5, label, align="left")
        # naive tiles stand before x, because x is saved when they have run
        first = 2.8 * row
        for n, left in enumerate((8.5, 21, 33.5)):
            if n < 2:
                sketch.tensor(
                    left + 7.4 * (1 - row), top, 2.2, 3, "x", color=0, kept=n == 1
                )
            for tile in range(4):
                if n != 1 or row == 0:
                    sketch.tensor(
                        left + first + 1.8 * tile, top, 1.4, 3, "", color=1, kept=n == 2
                    )
    return sketch.figure


course.show(
    three_passes,
    "Figure 2. A checkpointed block. Narrow boxes are tiles that run forward; "
    "filled boxes are saved, dashed ones are "
    "not. The naive tiles run in the repetition as well, "
    "only because x is saved after them.",
)

# %% [markdown]
# **Step 4: send the block inputs to the host**, the computer around the card. torch calls two functions of ours for
# every tensor that autograd saves: one when it is saved, one when it is needed. With checkpointing these tensors are
# the block inputs. The first function copies one to *pinned* host memory, which the operating system may not move, so
# the card reads and writes it directly. Both copies run on the CUDA stream that computes, in order, so none comes too
# early. On the card only the open block's activations remain.

# %%
moved = []


def to_host(tensor):
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)
    moved.append(host.nbytes)
    return tensor.device, host


def to_card(packed):
    device, host = packed
    return host.to(device, non_blocking=True)


def stack(x, blocks=4):
    for _ in range(blocks):  # all with the same weights: here only the bytes matter
        x = checkpoint(lambda x: x + ours(F.rms_norm(x, (d,))), x, use_reentrant=False)
    return x.square().mean(0).sum()


# %% [markdown]
# ## 3. Prove it
# **The bytes.** After the forward pass the tiles keep only $x$, even without checkpointing. In their backward pass
# the tensors of one tile are added. How much does a token add to the peak? For a whole MLP we counted $6F$ numbers.


# %%
def peak(way, tokens):
    x = torch.randn(tokens, d, requires_grad=True)
    return peak_bytes(lambda: way(x).sum().backward(), alive=[x, *weights])


with SavedBytes(besides=weights) as saved:
    y = ours(x)
    after_forward = saved.now
    y.sum().backward()
print(
    f"saved after the forward pass: {after_forward:,} bytes; "
    f"at most, in the backward pass: {saved.peak:,}"
)
assert (after_forward, saved.peak) == (4 * T * d, 4 * (T * d + 4 * TILE * f))
grows = {
    name: (peak(way, 2 * T) - peak(way, T)) / 4 / T
    for name, way in (("whole", mlp), ("tiles", ours))
}
print(
    f"a token adds {grows['whole'] / f:g} f numbers to the peak; "
    f"in tiles {grows['tiles'] / d:g} d, its gradient"
)
assert grows == {"whole": 6 * f, "tiles": d}

# %% [markdown]
# **The rounding.** A token's result is the same sum as before. But a weight's gradient was one sum over all tokens,
# and now it is a sum of eight sums, so it is rounded differently. How do you tell rounding from a mistake? Compute in
# fp64: a mistake would stay, but rounding shrinks by about $2^{29}$, because fp64 has 29 more bits.

# %%
far = {}
for dtype in (torch.float32, torch.float64):
    torch.manual_seed(1)
    gate, up, down = weights = new_weights(dtype)
    x, dy = (torch.randn(T, d, dtype=torch.float64).to(dtype) for _ in range(2))
    x.requires_grad_()
    found = [torch.autograd.grad(way(x), [x, *weights], dy) for way in (mlp, ours)]
    far[dtype] = max(
        ((a - b).norm() / b.norm()).item() for a, b in zip(*found, strict=True)
    )
    print(f"{dtype}: gradients differ by {far[dtype]:.1e} of their size")
assert 0 < far[torch.float64] < far[torch.float32] / 2**20

# %% [markdown]
# **The copies.** Four blocks send their inputs, and so does the loss. The gradients are equal bit for bit.

# %%
here = torch.autograd.grad(stack(x), [x, *weights])
with torch.autograd.graph.saved_tensors_hooks(to_host, to_card):
    loss = stack(x)
print(f"to the host: {sum(moved):,} bytes, an input has {x.nbytes:,}")
assert sum(moved) == 5 * x.nbytes
assert all(map(torch.equal, torch.autograd.grad(loss, [x, *weights]), here))

# %% [markdown]
# ## 4. What it costs
# **Tiles.** With checkpointing a Llama's tiles add at most one product, that with `down`. But every tile reads and
# unpacks the weights again, so tiles should not be small: `true` means $D$ tokens.
#
# **The PCIe link.** Copying a block's input takes $2DT / \text{link}$ seconds. Computing the block takes $2WT /
# \text{rate}$ or more, where $W$ is the number of its weights. From which length on is the copy shorter? A surprise:
# $T$ cancels, so at every length or at none. For a T4:

# %%
t4 = find_card("t4")
# In operations and in bytes a second: the share of its rate that a T4 reached in public
# runs, and NCCL's for PCIe.
rate, link = t4.half_flops * t4.reached.half, t4.link_rate * t4.reached.link
W = sum(d_in * d_out for d_in, d_out in shape.packable.values())
compute, copy = 2 * W / rate, 2 * D / link
print(
    f"a token and block: computing {1e6 * compute:.1f} us, "
    f"copying its input {1e6 * copy:.2f} us"
)
print(
    f"they would be equal at a link of {D * rate / W / 1e9:.2f} GB/s; "
    f"a T4's carries {link / 1e9:.1f}"
)
assert compute > 30 * copy

both = with_settings(job, ["tricks.tiled_mlp=true", "tricks.activation_offload=true"])
for tokens in LENGTHS:
    step = folds.step(both, shape, t4, tokens)
    share = {part.name: f"{part.seconds / step.seconds:.1%}" for part in step.parts}
    print(
        f"{tokens:7,} tokens: {step.seconds:6.1f} s, copies {share['offload']}, "
        f"attention {share['attention']}"
    )

# %% [markdown]
# Waiting for the copies costs at most 1 % of a step, by estimate. (`activation_offload=true` waits; `overlapped`
# copies on a stream of its own.) For short rows, *starting* each copy takes longest: on a B200, Unsloth's offload was
# slower below 384 to 512 tokens. The real price of long rows is attention, whose time grows with $T^2$.
#
# **The host.** torch rounds each pinned tensor up to a power of two. Colab's free machine has 12.7 GB, Kaggle's has
# 29. What does the host need for a row of 32,768 tokens, and for one token more?

# %%
for tokens in (32_768, 32_769, 65_536):
    # a block input's bytes, rounded up to a power of two
    pinned = 1 << (2 * D * tokens - 1).bit_length()
    needed = LIBRARIES + L * pinned  # Python, torch and CUDA take 2.4 GB
    on_colab, on_kaggle = (
        verdict(needed, host.memory_bytes) for host in (COLAB, KAGGLE)
    )
    print(
        f"{tokens:,} tokens: {needed / 1e9:.1f} GB; Colab: {on_colab}; "
        f"Kaggle: {on_kaggle}"
    )
    assert on_colab == ("fits" if tokens == 32_768 else "does not fit")
    assert on_kaggle == "fits"

# %% [markdown]
# An input of 32,768 tokens has exactly 256 MiB. With one token more, each of the 32 takes 512 MiB. So Colab's host
# stops this model at 32,768 tokens, whatever the card. On Kaggle a T4 stops it first.
#
# ## 5. The production switch
# In the plan they become an edit of the model and a context around the forward pass:

# %%
print("--set tricks.tiled_mlp=true --set tricks.activation_offload=true")
print(diff(resolve(job, T4), resolve(both, T4)))

# %% [markdown]
# In your own code, call the package's `tiled`: steps 2 and 3 with dropout, autocast and several rows. The switch does
# this for every MLP, with its adapters as `weights`.

# %%
y = tiled(mlp, x[None], TILE, weights)  # it takes (B, T, D)
torch.testing.assert_close(y[0], ours(x))

# %% [markdown]
# Find the longest rows that fit a T4. Do the gains of tiles and offload add up?

# %%
TILED, OFFLOAD = "tricks.tiled_mlp=true", "tricks.activation_offload=true"
WAYS = {
    "neither": [],
    "tiles": [TILED],
    "offload": [OFFLOAD],
    "both": [TILED, OFFLOAD],
    "both, fused": [
        TILED,
        OFFLOAD,
        "tricks.fused_lora=true",
        "tricks.fused_blocks=true",
    ],
}
longest = {}
for name in ("llama-3.2-1b", "llama-3.1-8b", "qwen3-14b"):
    model = toggles.Target(find_shape(name), T4)
    recipe = with_settings(job, [f"model={name}"])
    longest[name] = [
        toggles.longest(model, with_settings(recipe, settings))
        for settings in WAYS.values()
    ]
print(f"{'longest row':14}" + "".join(f"{way:>13}" for way in WAYS))
for name, found in longest.items():
    print(f"{name:14}" + "".join(f"{tokens:13,}" for tokens in found))
wide = with_settings(job, ["lora.r=32", *WAYS["both, fused"]])
print(
    "llama-3.1-8b, both, fused, with adapters of rank 32: "
    f"{toggles.longest(toggles.Target(shape, T4), wide):,}"
)
first, *others, most = longest["llama-3.1-8b"]
assert [first, *(round(tokens / first, 1) for tokens in others)] == [
    12_783,
    1.2,
    1.8,
    3.0,
]
assert 4 * first < most < 65_536

# %% [markdown]
# Together they gain more than the sum, because the length is the room divided by what a token adds:

# %%
for way, tokens in zip(
    ("neither", "tiles", "offload", "both"), longest["llama-3.1-8b"], strict=False
):
    each = sum(growth(with_settings(job, WAYS[way])).values())
    room = each * tokens / GIB
    print(
        f"{way:8} {tokens / first:.1f} times; "
        f"{each / KIB:5.1f} KiB a token x {tokens:,} = {room:.1f} GiB"
    )
    assert 6 < room < 6.4
growths = [
    growth(with_settings(job, settings))["open block"] / KIB
    for settings in ([], [TILED])
]
print(
    f"tiles remove {growths[0] - growths[1]:.0f} of the MLP's "
    f"{of_mlp / KIB:.0f} KiB a token"
)
at_the_peak = folds.estimate(with_settings(job, [TILED]), shape, T4, 65_536).peak.lines
assert round(growths[0] - growths[1]) == 96
assert any("second norm" in line.why for line in at_the_peak)

# %% [markdown]
# The room is always about 6.2 GiB. (The plan leaves a margin, and counts what the allocator keeps: [the lesson on
# allocated and reserved memory](a_full_card.py).) Tiles remove only 96 KiB, because the peak moves to the
# second norm. While one half of the growth remains, the length at most doubles. With both techniques a third remains,
# so it triples, and fusing ([fused LoRA](fused_lora.py)) shrinks that third. Unsloth's 40,724 tokens are for rank 32.
# Ours are estimates that no T4 has run. `cria plan --longest` does this for your model, and checks the host.
#
# **Does it still learn?** Beyond the model's context (131,072 tokens for both Llamas) it has not seen such rotary
# positions (RoPE), so rescale them first. And a model learns to use distant tokens only from rows that need them, so
# measure the loss on unseen long rows.
#
# ## 6. Where it breaks
# **No message, and a weight without a gradient.** Autograd gives gradients only to a Function's arguments, and here
# `down` is not among them. Cure: pass every trained tensor.

# %%
for weight in weights:
    weight.grad = None
Tiles.apply(x, mlp, TILE, None, gate, up).sum().backward()
print("the gradient of down:", down.grad)
assert down.grad is None

# %% [markdown]
# **`a compiled block chooses itself what it keeps`.** `tiled_mlp` refuses `compile`, mixtures of experts and tensor
# parallelism. Cure: switch one of the two off.

# %%
try:
    resolve(with_settings(both, ["tricks.compile=true"]), T4)
    raise AssertionError("compile was taken")
except BadInput as error:
    print(error)
    assert "chooses itself what it keeps" in str(error)

# %% [markdown]
# **Tiles gain nothing.** Qwen3-14B gains nothing from tiles alone, because its row is shorter than a tile of $D =
# 5120$ tokens. Cure: `tricks.tiled_mlp=1024`. Neither technique helps where the weights, whole logits or eager
# attention's scores are the large part.
#
# **The process is gone, without a message.** The host was full, and Linux killed it. Cure: a larger host, or a row
# whose block input fits the next smaller power of two.
#
# ## 7. Exercises
# 1. **Predict.** Llama-3.2-1B has 16 blocks of width 2,048. How much pinned memory do the inputs of a row of 70,000
#    tokens take, at 2 bytes a number? Your answer is a number of GiB.
# 2. **Build.** Cut across the inner width instead of tokens. Fill in `by_width(x, gate, up, down, pieces)`: it returns
#    the MLP's result, shaped like `x`, and makes only `1 / pieces` of the inner numbers at a time. (`gate` and `up` are
#    (f, d), `down` is (d, f). Four lines; no gradients needed.)
# 3. **Reach.** A block has $W = 13 D^2$ weights. A fast card reaches $400 \cdot 10^{12}$ operations a second, its link
#    $50 \cdot 10^9$ bytes a second. Below which width $D$ does copying a block's input take longer than computing the
#    block?

# %% tags=["exercise"]
pinned_gib = None


def by_width(x, gate, up, down, pieces):
    """FILL ME IN: return the result, shaped like x."""


width = None


# %% Check the exercises tags=["hide-input"]
@torch.no_grad()
def of_width(answer):
    torch.manual_seed(2)
    x, (gate, up, down) = torch.randn(40, d), new_weights()
    right = (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
    for pieces in (1, 4, 5):
        results = []
        made = peak_bytes(
            lambda p=pieces, r=results: r.append(answer(x, gate, up, down, p)),
            [x, gate, up, down],
        )
        if (found := results[0]) is None:
            raise NotImplementedError
        assert found.shape == x.shape, (
            f"the shape is {tuple(found.shape)}, and x has {tuple(x.shape)}; "
            "are they added?"
        )
        close = torch.allclose(found, right, atol=1e-4)
        assert close, (
            f"with {pieces} pieces the result is wrong: "
            "down has a column for each inner number; add up"
        )
        inner = 4 * 40 * f
        assert made < 5 * inner / pieces + 4 * x.nbytes, (
            f"with {pieces} pieces {made / inner:.1f} f numbers a token are alive"
        )


course.check(
    1,
    pinned_gib,
    course.about(
        8,
        "an input has 70,000 x 2,048 numbers of 2 bytes; "
        "round it up to a power of two, then take all blocks",
        mistakes={
            70_000
            * 2048
            * 2
            * 16
            / 2**30: "torch rounds each pinned block up to a power of two",
            0.5: "that is one block; the model has 16",
            16: "a number has 2 bytes, and the input of each block is kept once",
            8 * 2**30: "that is a number of bytes; give GiB",
        },
    ),
    "a number of GiB",
)
course.check(
    2,
    by_width,
    of_width,
    "a function (x, gate, up, down, pieces) -> the result, shaped like x",
)
course.check(
    3,
    width,
    course.about(
        400e12 / 13 / 50e9,
        "set 2 D / link equal to 2 W / rate, with W = 13 D^2",
        mistakes={
            800e12 / 13 / 50e9: "a number of the input has 2 bytes",
            200e12
            / 13
            / 50e9: "a weight costs 2 operations a token: a product and a sum",
            400e12 / 50e9: "W is 13 D^2, not D^2",
        },
    ),
    "a number",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# pinned_gib = 16 * 512 / 1024  # an input has 273 MiB, so 512 are pinned
#
#
# def by_width(x, gate, up, down, pieces):
#     y = torch.zeros_like(x)
#     for g, u, dn in zip(
#         gate.chunk(pieces), up.chunk(pieces), down.chunk(pieces, dim=1)
#     ):
#         y += (F.silu(x @ g.T) * (x @ u.T)) @ dn.T
#     return y
#
#
# width = 400e12 / (13 * 50e9)  # 615: wider models compute longer than they copy
# ```
#
# </details>
#
# ## In one breath
# - **Grows with the row**: block inputs, $2LD$ bytes a token, and the open block, $12F + 22D$. In Llama-3.1-8B they are
#   equal.
# - **Tiles** take the MLP out of the open block; **offload** takes the block inputs off the card. By estimate, for
#   Llama-3.1-8B on a T4, tiles alone make the longest row 1.2 times as long, offload alone 1.8, both 3.0, and with
#   fusing over 4. [The longest rows](../docs/longest_rows.md) has other models and cards.
# - **Costs** reading the weights once a tile, at most 1 % of a step for the link (by estimate), and pinned host
#   memory in powers of two.
# - **Exact**: offload gives the same bits; tiles sum the weights' gradients in another order.
# - **When**: rows of many times $D$ tokens, with checkpointing and a chunked loss on.
# - **When not**: short rows, `compile`, experts, tensor parallelism, a host without room.
#
# Block inputs can wait on the host. Can the weights wait there, too? And what if all weights train? That is [the lesson
# on weights that are elsewhere](weights_elsewhere.py).
#
# ## Sources
# - Bekman et al. 2025, *Arctic Long Sequence Training*, arXiv 2506.13996, section 3.1.1 (TiledMLP).
# - Rhu et al. 2016, *vDNN*, arXiv 1602.08124, section 3 (offloading).
# - Unsloth: README and documentation, "Unsloth Benchmarks" (40,724 tokens: Llama-3.1-8B, QLoRA, rank 32, one row); pull
#   request 3867 (January 2026: offload and short rows on a B200).
# - `torch/utils/checkpoint.py` of torch 2.13: early stop. torch's `CachingHostAllocator`: powers of two.
# - Ours: `tiled_mlp.py` and `activation_offload.py` in `cria_tricks/tricks/`, `cria_tricks/predict/host.py`, and their
#   tests.
