# ---
# jupyter:
#   question: Which part of a training step grows with the row, and how long can the row of an 8B model get on a T4?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Long rows: which part of a step grows
# > **Promise.** You fine-tune on contracts or code, and rows of 2,048 tokens cut each document into pieces. With longer
# > rows the step dies with `CUDA out of memory`, although all switches are on. You will find the two parts that grow,
# > and shrink both. Then the longest row of Llama-3.1-8B on a T4 grows from 12,783 tokens to 37,925, by estimate, if
# > the machine around the card has 20 GB.
# >
# > **Card.** saves most inner tensors of one MLP, and nearly all saved block inputs / costs PCIe traffic and host
# > memory / exact within rounding (tiles), exact (offload) / about 25 minutes / after [fused LoRA](fused_lora.py)
#
# A model that sees only pieces cannot learn how page 1 and page 40 belong together.

# %% Imports and settings tags=["hide-input"]
import torch

from cria_tricks import BadInput, course, recipes
from cria_tricks.course import (
    CARDS,
    COLAB,
    KAGGLE,
    LIBRARIES,
    T4,
    Theme,
    diff,
    find_shape,
    folds,
    resolve,
    toggles,
    with_settings,
)
from cria_tricks.course import verdict_of as verdict
from cria_tricks.techniques import activation_offload, tiled_mlp

torch.manual_seed(0)
GIB, MIB, KIB = 2**30, 2**20, 2**10

# %% [markdown]
# ## 1. The bill
# The job is the course's QLoRA run with a larger model. Llama-3.1-8B has $L = 32$ blocks of width $D = 4096$, and its
# MLPs have the inner width $F = 14336$. All switches of the course's main job are on (checkpointing, the chunked loss
# and others), but a step has only one row, of $T$ tokens.
#
# Three parts of the bill are large: the weights; the inputs of all 32 blocks, which
# [checkpointing](gradient_checkpointing.py) saves; and the [open block](../docs/glossary.md#open-block), which is the
# block that checkpointing is recomputing, with all tensors inside it. How large is the single open block at 65,536
# tokens, in per cent of the inputs of all 32 blocks?

# %% Your guess: the open block, in % of all block inputs tags=["predict"]
guess = 0  # @param {type:"number"}


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
course.reveal(guess, 100 * bills[-1]["open block"] / bills[-1]["block inputs"], "%")


def growth(recipe):
    """By how many bytes each part grows with a token: two bills, subtracted."""
    few, many = parts(recipe, 32_768), parts(recipe, 65_536)
    return {name: (many[name] - few[name]) / 32_768 for name in many}


inputs, of_mlp = 2 * L * D, 12 * INNER  # by hand, explained below
others = 22 * D  # not by hand: read off the package's list of tensors
each = growth(job)
print(f"block inputs: {each['block inputs'] / KIB:.1f} KiB a token")
print(f"open block:   {each['open block'] / KIB:.1f} KiB a token")
print(f"in the text:  {inputs / KIB:.0f}, and {of_mlp / KIB:.0f} + {others / KIB:.0f}")
assert each["block inputs"] == inputs
assert abs(each["open block"] - of_mlp - others) < KIB

# %% [markdown]
# Weights and optimizer states do not grow with the row. Neither do the logits, because [the chunked
# loss](chunked_loss.py) takes a few tokens at a time. The single open block is as large as the inputs of all 32 blocks.
#
# One more token adds, with 2 bytes a number:
#
# - **Block inputs**: $D$ numbers for each of the $L$ blocks, which is $2LD$ bytes.
# - **The MLP of the open block**: autograd saves four tensors of $F$ numbers (gate, its SiLU, up, and their product),
#   and at the peak of the backward pass two gradients of this size exist as well. Together this is $12F$ bytes.
# - **The rest of the open block**: tensors of attention, fp32 copies of the norms, and gradients take $22D$ bytes by
#   the package's list. With [sdpa](flash_attention.py) this is linear in $T$; eager attention would also store $T^2$
#   scores for each head.


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
    "Figure 1. Predicted peaks of Llama-3.1-8B: the weights stay the same, while block "
    "inputs and open block grow alike with the row. The last bar is the third with "
    "tiles and offload; it is still larger than a T4, and section 5 finds the rows "
    "that fit.",
)

# %% [markdown]
# ## 2. From scratch, in three steps
# An MLP maps each token by itself. Therefore it can take a few tokens at a time, a *tile*, and we can join the results.
#
# **Step 1: only cut.** Does autograd save fewer bytes when the MLP runs in eight tiles?

# %%
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cria_tricks.course import SavedBytes, peak_bytes

torch.manual_seed(0)
T, d, f, TILE = 512, 64, 224, 64  # tokens, width, inner width, tokens of a tile


def new_weights(dtype=torch.float32):
    weights = []
    for rows, columns in ((f, d), (f, d), (d, f)):
        drawn = torch.randn(rows, columns, dtype=torch.float64) / columns**0.5
        weights.append(drawn.to(dtype).requires_grad_())
    return weights


def mlp(x):
    """From (t, d) to (t, d)."""
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def only_cut(x):
    return torch.cat([mlp(piece) for piece in x.split(TILE)])


gate, up, down = weights = new_weights()
x = torch.randn(T, d, requires_grad=True)
for way in (mlp, only_cut):
    with SavedBytes(besides=weights) as saved:
        y = way(x)  # this name keeps the graph alive while we count
    print(f"{way.__name__:9} saves {saved.now:,} bytes")
    assert saved.now == 4 * (T * d + 4 * T * f)  # x, and four inner tensors

# %% [markdown]
# Cutting alone does not help: autograd saves the inner tensors of every tile.
#
# **Step 2: save only the input, and compute each tile again** in the backward pass. This is checkpointing for each
# tile. In the forward pass of a `torch.autograd.Function` autograd records nothing, so the inner tensors of a tile are
# freed when the next tile runs. In the backward pass we run one tile forward and backward, and add its weight gradients
# to those of the tiles before it. The weights are arguments of the Function, because only arguments get gradients.


# %%
class Tiles(torch.autograd.Function):
    """For an MLP without dropout, outside autocast: the second run must be the same."""

    @staticmethod
    def forward(ctx, x, mlp, tile, *weights):
        # the weights are not saved: step 3 sends all saved tensors to the host
        ctx.mlp, ctx.tile, ctx.weights = mlp, tile, weights
        ctx.save_for_backward(x)
        return torch.cat([mlp(piece) for piece in x.split(tile)])

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        totals = [torch.zeros_like(weight) for weight in ctx.weights]
        for start in range(0, len(x), ctx.tile):
            here = slice(start, start + ctx.tile)
            piece = x[here].detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.mlp(piece)
            dx[here], *found = torch.autograd.grad(y, [piece, *ctx.weights], dy[here])
            # every tile uses the same weights, so their gradients are added up
            for total, gradient in zip(totals, found, strict=True):
                total += gradient
        return dx, None, None, *totals  # None: no gradient of mlp and tile


def in_tiles(x):
    return Tiles.apply(x, mlp, TILE, *weights)


# %% [markdown]
# **Step 3: send the block inputs to the host**, which is the computer around the card. torch can call two functions of
# ours for every tensor that autograd saves: the first when it is saved, the second when it is needed. With
# checkpointing these tensors are the block inputs. The first copies one to
# [pinned](../docs/glossary.md#pinned-memory) host memory, which the operating system may not move, so the card can read
# it directly. The second copies it back.

# %%
moved = []  # the bytes of each copy to the host


def to_host(tensor):
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    host.copy_(tensor, non_blocking=True)  # the card makes its copies in order
    moved.append(host.nbytes)
    return tensor.device, host


def to_card(packed):
    device, host = packed
    return host.to(device, non_blocking=True)


def block(x):
    return x + in_tiles(F.rms_norm(x, (d,)))


def four_blocks(x):
    for _ in range(4):  # all with the same weights: here only the bytes matter
        x = checkpoint(block, x, use_reentrant=False)
    return x.square().mean(0).sum()


with torch.autograd.graph.saved_tensors_hooks(to_host, to_card):
    loss = four_blocks(x)
print(f"to the host: {sum(moved):,} bytes in {len(moved)} copies")
assert sum(moved) == 5 * x.nbytes  # the inputs of four blocks, and that of the loss

# %% [markdown] tags=["deep"]
# ### Deeper: why the package saves the input before the tiles
# How often does the MLP run forward in a step, if its block is checkpointed? A whole MLP runs twice: in the forward
# pass, and when checkpointing repeats the block. Our tiles also run in their own backward pass, so the repetition
# computes them for nothing. Why does it run them at all?
#
# torch repeats a block until all its saved tensors are there again. A Function saves its tensors only when its forward
# pass has ended. Therefore torch must run all tiles to get $x$. The cure is a second Function in front of the tiles,
# which only saves $x$. The tiles themselves save nothing and read $x$ there, so the repetition stops before them.

# %% tags=["deep"]
given = []  # how many tokens each call of the MLP had


def noted(x):
    given.append(len(x))
    return mlp(x)


class Keep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)  # the same numbers

    @staticmethod
    def backward(ctx, dx):
        return dx


class TilesBehind(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mlp, tile, keep, *weights):
        ctx.mlp, ctx.tile, ctx.weights = mlp, tile, weights
        ctx.keep = keep  # the call of Keep: it holds the saved x
        return torch.cat([mlp(piece) for piece in x.split(tile)])

    @staticmethod
    def backward(ctx, dy):
        context = ctx.keep
        context.mlp, context.tile, context.weights = ctx.mlp, ctx.tile, ctx.weights
        dx, _, _, *totals = Tiles.backward(context, dy)
        return dx, None, None, None, *totals


def naive(x):
    return Tiles.apply(x, noted, TILE, *weights)


def saved_before(x):
    kept = Keep.apply(x)
    return TilesBehind.apply(kept, noted, TILE, kept.grad_fn, *weights)


def forward_passes(way):
    """How often the MLP runs forward in a step of a checkpointed block."""
    given.clear()
    y = checkpoint(lambda x: x + way(F.rms_norm(x, (d,))), x, use_reentrant=False)
    y.sum().backward()
    return sum(given) / T


for way, right in ((noted, 2), (naive, 3), (saved_before, 2)):
    print(f"{way.__name__:13} {forward_passes(way):.0f} forward passes")
    assert forward_passes(way) == right
# the package's: the same with dropout, autocast and several rows; it takes (B, T, D)
torch.testing.assert_close(
    tiled_mlp.tiled(mlp, x[None], TILE, weights)[0], saved_before(x)
)


# %% Draw figure 2 tags=["hide-input", "deep"]
def three_passes(theme: Theme):
    """When a checkpointed block's MLP runs forward, with x saved after or before."""
    sketch = course.Sketch(theme, 46, 13)
    for at, words in (
        (14, "forward pass"),
        (26.7, "repetition"),
        (39.4, "tiles, backward"),
    ):
        sketch.text(at, 0.8, words, quiet=True)
    for row, label in enumerate(("naive", "saved before")):
        top = 2.2 + 5.6 * row
        sketch.text(0, top + 1.5, label, align="left")
        # naive tiles stand before x, because x is saved when they have run
        first = 2.9 * row
        for n, left in enumerate((8.6, 21.3, 34)):
            if n < 2:
                sketch.tensor(
                    left + 8.6 * (1 - row), top, 2.2, 3, "x", color=0, kept=n == 1
                )
            for tile in range(4):
                if n != 1 or row == 0:
                    sketch.tensor(
                        left + first + 2.1 * tile, top, 1.1, 3, "", color=1, kept=n == 2
                    )
    return sketch.figure


course.show(
    three_passes,
    "Figure 2. The MLP of a checkpointed block. Narrow boxes are tiles that run "
    "forward; filled boxes are saved, dashed ones are not. The naive tiles also "
    "run in the repetition, only because x is saved after them.",
)

# %% [markdown]
# ## 3. Prove it
# **The bytes.** After the forward pass the tiles should have saved only $x$, even without checkpointing. In their
# backward pass they should add the tensors of one tile. With a token, the peak of a whole MLP grows by the $6F$ numbers
# of section 1, and with tiles only by the gradient of $x$, which has $D$ numbers.


# %%
def peak(way, tokens):
    x = torch.randn(tokens, d, requires_grad=True)
    # the gradient of `sum` is one number; in a block the incoming one has d a token
    return peak_bytes(lambda: way(x).sum().backward(), alive=[x, *weights])


with SavedBytes(besides=weights) as saved:
    y = in_tiles(x)
    after_forward = saved.now
    y.sum().backward()
print(f"saved after the forward pass: {after_forward:,} bytes")
print(f"saved at most, in the backward pass: {saved.peak:,} bytes")
assert after_forward == 4 * T * d
assert saved.peak == 4 * (T * d + 4 * TILE * f)
grows = {}
for way in (mlp, in_tiles):
    grows[way] = (peak(way, 2 * T) - peak(way, T)) / 4 / T
print(f"a token adds {grows[mlp] / f:g} f numbers to the peak of a whole MLP")
print(f"a token adds {grows[in_tiles] / d:g} d numbers in tiles")
assert (grows[mlp], grows[in_tiles]) == (6 * f, d)

# %% [markdown]
# **The gradients.** A token's result is the same sum as before. But a weight's gradient was one sum over all tokens,
# and now it is a sum of eight sums, so it is rounded differently. In fp64, which has 29 more bits, rounding errors
# shrink by about $2^{29}$, but a mistake would stay.
#
# The copies to the host change nothing, so the gradients with them must be equal bit for bit. (Here this checks only
# the hooks. [An H200](../docs/benchmarks.md#a-first-sitting-on-an-h200) has confirmed it for copies over PCIe.)

# %%
far = {}
for dtype in (torch.float32, torch.float64):
    torch.manual_seed(1)
    gate, up, down = weights = new_weights(dtype)
    x = torch.randn(T, d, dtype=dtype, requires_grad=True)
    dy = torch.randn(T, d, dtype=dtype)
    expected = torch.autograd.grad(mlp(x), [x, *weights], dy)
    found = torch.autograd.grad(in_tiles(x), [x, *weights], dy)
    far[dtype] = max(
        ((a - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)
    )
    print(f"{dtype}: gradients differ by {far[dtype]:.1e} of their size")
assert 0 < far[torch.float64] < far[torch.float32] / 2**20

here = torch.autograd.grad(four_blocks(x), [x, *weights])
with torch.autograd.graph.saved_tensors_hooks(to_host, to_card):
    loss = four_blocks(x)
assert all(map(torch.equal, torch.autograd.grad(loss, [x, *weights]), here))
print("with the copies, all gradients are equal bit for bit")

# %% [markdown]
# ## 4. What it costs
# **Tiles**: if its block is checkpointed as well, the class of step 2 runs the MLP forward three times, and not twice.
# The package's version (deeper part above) costs at most one matrix multiplication more, the one with `down`, which
# plain checkpointing can skip. But every tile reads and unpacks the weights again, so `tricks.tiled_mlp=true` takes
# large tiles, of $D$ tokens.
#
# **Offload** copies each block input over the PCIe link to the host and back, which takes at most 1 % of a step.
#
# The real price of long rows is attention, because its time grows with $T^2$: at 32,768 tokens it is a third of the
# step. A hundred such rows take 4.7 to 7.0 hours. (The seconds are predicted, with the range of [public
# runs](choose_your_hardware.py) of shorter rows.)

# %%
t4 = CARDS["t4"]
TILED, OFFLOAD = "tricks.tiled_mlp=true", "tricks.activation_offload=true"
both = with_settings(job, [TILED, OFFLOAD])
for tokens in (2048, 16_384, 32_768):
    step = folds.time_of(both, shape, t4, tokens)
    share = {part.name: f"{part.seconds / step.seconds:.1%}" for part in step.parts}
    print(f"{tokens:7,} tokens: {step.low:5.0f} to {step.high:3.0f} s a step,", end=" ")
    print(f"copies {share['offload']}, attention {share['attention']}")

# %% [markdown] tags=["deep"]
# ### Deeper: the link, and the memory of the host
# Copying the input of a block takes $2DT / \text{link}$ seconds. Computing the block takes $2WT / \text{rate}$ or more,
# where $W$ is the number of its weights. The length does not matter, because $T$ cancels. On a T4 the copy is shorter
# at every length, and by a factor of 35. For short rows, however, *starting* each copy takes longest: on a B200,
# Unsloth's offload was slower below 384 to 512 tokens. With `activation_offload=true` the card waits for each copy;
# with `overlapped` the copies run on a CUDA stream of their own.
#
# torch rounds each pinned tensor up to a power of two. An input of 32,768 tokens has exactly 256 MiB. With one more
# token each of the 32 inputs takes 512 MiB. Colab's free machine has 12.7 GB, so its host stops this model at 32,768
# tokens, whatever the card. (With torch 2.13 `pinned_max_round_threshold_mb` stops the rounding of large tensors. Then
# 37,925 tokens would take 12.4 GB.) Kaggle's machine has 29 GB, so there the T4 is the limit.

# %% tags=["deep"]
# in operations and in bytes a second: the share of its rate that a T4 reached in public
# runs, and NCCL's share for PCIe
rate, link = t4.half_flops * t4.reached.half, t4.link_rate * t4.reached.link
W = sum(d_in * d_out for d_in, d_out in shape.packable.values())
compute, copy = 2 * W / rate, 2 * D / link
print(f"a token and block: computing {1e6 * compute:.1f} us,", end=" ")
print(f"copying its input {1e6 * copy:.2f} us")
print(f"they would be equal at a link of {D * rate / W / 1e9:.2f} GB/s;", end=" ")
print(f"a T4's carries {link / 1e9:.1f}")
assert compute > 35 * copy
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
not_rounded = LIBRARIES + L * 2 * D * 37_925
assert f"{not_rounded / 1e9:.1f}" == "12.4" < f"{COLAB.memory_bytes / 1e9:.1f}"

# %% [markdown]
# ## 5. The production switch
# In plain Hugging Face code, tiles take one call of the package, because transformers has none (Liger has). Offload is
# an argument, `offload`, since transformers 5.17; older ones need a hook, which copies frozen weights, too. (For this
# job, load the base in NF4, and take tiles of 4,096 tokens.)
#
# ```bash
# cria train long_8b
# cria plan kwanzaa --gpu t4 --longest --set model=llama-3.1-8b \
#     --set tricks.gradient_checkpointing=true --set tricks.chunked_loss=true \
#     --set tricks.tiled_mlp=true --set tricks.activation_offload=true
# ```
#
# `long_8b` has rows of 65,536 tokens on a T4 in Kaggle, because it also has the fused operations, tiles of 512 tokens
# and rank 8. By estimate it needs 14.0 GiB. The second command answers with the longest row of a model.

# %%
print(tiled_mlp.PLAIN, activation_offload.PLAIN)
print("what the package changes in the plan of a step:")
print(diff(resolve(job, T4), resolve(both, T4)))

# %% [markdown]
# Without these switches, the longest row of this job on a T4 has 12,783 tokens. (Its peak is 11.8 GiB. With CUDA's own
# and what the allocator may reserve it needs 14.0, and 5 % stay free.) Tiles alone allow 15,729 tokens, 1.2 times as
# many, and offload alone 23,459, 1.8 times as many. How long is the row with both switches?

# %% Your guess: tokens of the longest row with both tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Find the longest rows tags=["hide-input"]
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
course.reveal(guess, longest["llama-3.1-8b"][3], "tokens")
print(f"{'longest row':14}" + "".join(f"{way:>13}" for way in WAYS))
for name, found in longest.items():
    print(f"{name:14}" + "".join(f"{tokens:13,}" for tokens in found))
print("(the context of llama-3.2-1b ends at 131,072 tokens)")
wide = with_settings(job, ["lora.r=32", *WAYS["both, fused"]])
print(
    "llama-3.1-8b, both, fused, with adapters of rank 32: "
    f"{toggles.longest(toggles.Target(shape, T4), wide):,}"
)
# the numbers of the text
assert longest["llama-3.1-8b"] == [12_783, 15_729, 23_459, 37_925, 63_688]
alone = folds.estimate(job, shape, T4, 12_783)
assert f"{alone.peak.bytes / GIB:.1f} {alone.needed_bytes / GIB:.1f}" == "11.8 14.0"
assert alone.needed_bytes <= 0.95 * T4.memory_bytes
recipe = recipes.long_8b(T4)
assert f"{folds.estimate(recipe, shape, T4, 65_536).needed_bytes / GIB:.1f}" == "14.0"
slow = folds.time_of(both, shape, t4, 32_768)
assert f"{slow.low / 36:.1f} to {slow.high / 36:.1f}" == "4.7 to 7.0"

# %% [markdown]
# With both switches the row is 3.0 times as long, because its length is the free memory divided by the bytes that a
# token adds. Each of the two growing parts is half of these bytes, so while one remains, the length can at most double.
# Tiles alone reach only 1.2, because they turn the $12F+22D$ bytes of the open block into $40D$: 256 KiB into 160
# (deeper part).
#
# If you switch tiles off again, you lose 14,466 tokens, and without offload 22,196. With the [fused
# operations](fused_lora.py) as well (`tricks.fused_lora`, `tricks.fused_blocks`) the row has 63,688 tokens. All of this
# is predicted, and needs a host with 20 GB, such as Kaggle's. **Colab's free machine has 12.7 GB, so there rows of the
# 8B end at 32,768 tokens**, if torch rounds (section 6).

# %% [markdown] tags=["deep"]
# ### Deeper: why the gains multiply
# About 6.2 GiB are free for what grows. (The plan leaves a margin, and counts what the allocator may reserve: [the
# lesson on a full card](a_full_card.py).) A token adds 513 KiB without the switches, 417 with tiles, 273 with offload,
# 169 with both, which is a third, and 89 with the fused operations as well. (With offload, two of the 32 inputs are on
# the card at the peak, which are 16 KiB.)
#
# Tiles remove only 96 of the 168 KiB of the MLP. The reason is that the peak then moves to another moment, the backward
# pass of the second norm. There other tensors are alive, $40D$ bytes in a Llama by the package's list. For adapters of
# rank 32 we predict rows of 60,890 tokens with everything on. Unsloth publishes 40,724 on a 16 GB card, but until a T4
# has run ours, the two cannot be compared. One [H200](../docs/benchmarks.md#a-first-sitting-on-an-h200), held to the
# kernels and the memory of a T4, ran rows of 59,007 tokens of Llama-3.2-1B with neither switch, where we predict
# 49,901.

# %% tags=["deep"]
names = ("neither", "tiles", "offload", "both")
for way, tokens in zip(names, longest["llama-3.1-8b"], strict=False):
    each = sum(growth(with_settings(job, WAYS[way])).values())
    room = each * tokens / GIB
    times = tokens / longest["llama-3.1-8b"][0]
    print(f"{way:8} {times:.1f} times; {each / KIB:5.1f} KiB a token", end=" ")
    print(f"x {tokens:,} = {room:.1f} GiB")
    assert 6 < room < 6.4
whole, in_pieces = (
    growth(with_settings(job, settings))["open block"] / KIB
    for settings in ([], [TILED])
)
fused = growth(with_settings(job, WAYS["both, fused"]))
assert round(sum(fused.values()) / KIB) == 89
print(f"tiles remove {whole - in_pieces:.0f} of the MLP's {of_mlp / KIB:.0f} KiB")
at_the_peak = folds.estimate(with_settings(job, [TILED]), shape, T4, 65_536).peak.lines
assert round(whole - in_pieces) == 96
assert round(in_pieces) == round(40 * D / KIB) == 160
assert any("second norm" in line.why for line in at_the_peak)

# %% [markdown] tags=["deep"]
# **Does the model still learn?** Both Llamas have a context of 131,072 tokens. Beyond it the model has not seen such
# rotary positions (RoPE), so they must be rescaled first. And a model learns to use distant tokens only from rows that
# need them, so measure the loss on unseen long rows.

# %% [markdown]
# ## 6. Where it breaks
# **There is no message, but a weight never learns.** If you forget `down` in the arguments of the Function, it gets no
# gradient. The cure is to pass every trained tensor of the MLP, adapters included.
#
# **`a compiled block chooses itself what it keeps`.** The package refuses tiles with `compile`, mixtures of experts and
# tensor parallelism.

# %%
for weight in weights:
    weight.grad = None
Tiles.apply(x, mlp, TILE, gate, up).sum().backward()
print("the gradient of down:", down.grad)
assert down.grad is None

try:
    resolve(with_settings(both, ["tricks.compile=true"]), T4)
    raise AssertionError("compile was taken")
except BadInput as error:
    print(error)

# %% [markdown]
# **Tiles gain nothing.** Without offload, Qwen3-14B has 4,337 tokens with and without tiles, because its row is shorter
# than a tile of $D = 5120$ tokens. Smaller tiles help: `tricks.tiled_mlp=1024`.
#
# **The process is gone, without a message.** The memory of the host was full, so Linux ended the process. torch rounds
# each pinned block input up to a power of two, so 32 inputs of 32,768 tokens take 8 GiB, and with one more token 16.
# The cure is a larger host, a shorter row, or (untried) `PYTORCH_ALLOC_CONF=pinned_max_round_threshold_mb:64`, torch
# 2.13.
#
# ## 7. Exercises
# 1. **Predict.** Llama-3.2-1B has 16 blocks of width 2,048. How many GiB of pinned memory do the inputs of a row of
#    70,000 tokens take, at 2 bytes a number, as torch rounds them (section 6)?
# 2. **Build.** Cut the MLP across its inner width instead of across tokens. Fill in `by_width(x, gate, up, down,
#    pieces)`. It returns the result of the MLP, shaped like `x`, and makes only `1 / pieces` of the inner numbers at a
#    time. (`gate` and `up` are (f, d), `down` is (d, f). `pieces` need not divide f. No gradients are needed.)
# 3. **Reach.** A block has $W = 13 D^2$ weights, and each weight costs 2 operations for a token. A fast card reaches
#    $400 \cdot 10^{12}$ operations a second, and its link carries $50 \cdot 10^9$ bytes a second. Below which width $D$
#    does copying the input of a block, at 2 bytes a number, take longer than the forward pass of the block?

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
# - **What grows with the row**: the block inputs, $2LD$ bytes a token, and the open block, $12F + 22D$. In Llama-3.1-8B
#   both are 256 KiB.
# - **Tiles** take 96 of the MLP's 168 KiB a token out of the open block, and **offload** moves the block inputs to the
#   host. For Llama-3.1-8B on a T4 we predict rows 1.2 times, 1.8 times and, with both, 3.0 times as long. The page
#   [*The longest rows*](../docs/longest_rows.md) has other models and cards.
# - **Costs**: the weights are read once for each tile, the copies take at most 1 % of a step (predicted), and the host
#   needs pinned memory in powers of two.
# - **Exact**: offload gives the same bits, and tiles add up the gradients of weights in another order.
# - **When**: rows of many times $D$ tokens, with checkpointing and the chunked loss on. **When not**: short rows,
#   `compile`, experts, tensor parallelism, or a small host; or if weights, the logits of the plain loss or the scores
#   of eager attention are the largest part.
#
# ## Sources
# - Bekman et al. 2025, *Arctic Long Sequence Training*, arXiv 2506.13996, section 3.1.1 (TiledMLP).
# - Rhu et al. 2016, *vDNN*, arXiv 1602.08124, section 3 (offloading).
# - Unsloth: README and documentation, "Unsloth Benchmarks" (40,724 tokens: Llama-3.1-8B, QLoRA, rank 32, one row); pull
#   request 3867 (January 2026: offload and short rows on a B200).
# - `torch/utils/checkpoint.py` of torch 2.13: early stop. torch's `CachingHostAllocator`: powers of two, up to
#   `pinned_max_round_threshold_mb`. transformers 5.23: `modeling_utils.py` (`offload`).
# - Ours: `tiled_mlp.py` and `activation_offload.py` in `cria_tricks/techniques/`, `cria_tricks/predict/host.py`, and
#   their tests.
