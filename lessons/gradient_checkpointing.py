# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Gradient checkpointing: forget, and compute again
# > **Promise.** You keep 169 KiB where plain training keeps 912, and no bit of any gradient moves.
#
# > **Card.** saves what blocks keep for the backward pass / costs one more forward pass / exact, bit for bit / 25
# > minutes / after [gradient accumulation](gradient_accumulation.py)
#
# [The lesson on gradient accumulation](gradient_accumulation.py) ended with a bill of 40 GiB for one row of 2,048
# tokens. A T4 has 14.74. The largest line of that bill is not the weights. It is called *saved activations*, and this
# lesson removes nearly all of it. (Elsewhere: activation checkpointing, recomputation, remat.)

# %% Imports and settings tags=["hide-input"]
import warnings

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from cria_tricks import course
from cria_tricks.bench.style import Theme
from cria_tricks.hardware import T4
from cria_tricks.measure.counting import SavedBytes, flops
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks.activation_offload import Offloaded
from cria_tricks.tricks.gradient_checkpointing import checkpointed

torch.manual_seed(0)
KIB = 1024

# %% [markdown]
# ## 1. The bill
# Why does anything wait? To get a weight's gradient, the backward pass multiplies by what that weight was multiplied
# with on the way forward. So every product keeps its input, every nonlinearity keeps its own, and they wait until the
# backward pass has come all the way back to them. The first block waits longest.
#
# We take a stack small enough to count by hand: $L$ blocks, each of them
# $y = x + W_2 \cdot \text{dropout}(\text{gelu}(W_1 \cdot \text{norm}(x)))$.

# %%
B, T, D, H, L = 2, 64, 16, 64, 8  # rows, tokens, width, inner width, blocks


class Block(nn.Module):
    """From (B, T, D) to (B, T, D)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(D, H, bias=False), nn.Linear(H, D, bias=False)

    def forward(self, x):
        inner = F.gelu(self.up(F.layer_norm(x, (D,))))
        return x + self.down(F.dropout(inner, 0.1, self.training))


blocks = nn.ModuleList(Block() for _ in range(L))
x = torch.randn(B, T, D, requires_grad=True)

# %% [markdown]
# What does one block keep, at 4 bytes a number? Write your guess down, then read on.

# %% Your guess: KiB that one block keeps tags=["predict"]
guess = 0  # @param {type:"number"}

# %% [markdown]
# - the norm: its input $x$ ($BTD$), and a mean and a spread for each token ($2BT$)
# - `up`: what it multiplied, the normed $x$ ($BTD$)
# - gelu: its input ($BTH$)
# - dropout: the mask ($BTH$), on a CPU in fp32 like the rest
# - `down`: what it multiplied ($BTH$)
#
# Call the block's input $s$, and all the rest, its inside, $a$. Plain training keeps $L\,(s + a)$.

# %%
s = 4 * B * T * D
a = 4 * (2 * B * T + B * T * D + 3 * B * T * H)
print(f"one block: input s = {s / KIB:.0f} KiB, inside a = {a / KIB:.0f} KiB")
print(f"predicted: {L * (s + a) / KIB:,.0f} KiB wait in {L} blocks")
course.reveal(guess, (s + a) / KIB, "KiB")


# %%
def forward(way):
    """The loss, with the same dropout every time; gradients begin at zero."""
    torch.manual_seed(1)
    blocks.zero_grad()
    x.grad = None
    y = x
    for block in blocks:
        y = way(block, y)
    return y.square().mean()


def step(way):
    """One forward and one backward pass: what autograd kept, the loss, and all
    gradients."""
    with SavedBytes(besides=blocks.parameters()) as kept:
        loss = forward(way)
        loss.backward()
    return kept, loss.detach(), gradients()


def gradients():
    return [x.grad, *(p.grad for p in blocks.parameters())]


plain, plain_loss, plain_grads = step(lambda block, x: block(x))
print(
    f"counted:   {plain.peak / KIB:,.0f} KiB at the peak; "
    "the loss keeps its input too, s more"
)
assert plain.peak == L * (s + a) + s

# %% [markdown]
# On a card one of these is smaller. There dropout is another operation, `native_dropout`, and its mask is a bool: one
# byte a number instead of four. It runs on a CPU too, so we can count it.

# %%
with SavedBytes(besides=[x]) as mask:
    torch.native_dropout(x, 0.1, True)
assert mask.peak == x.numel()
print(
    f"with a mask of one byte a number {L * (s + a - 3 * B * T * H) / KIB:,.0f} "
    "KiB would wait"
)


# %% Draw figure 1 tags=["hide-input"]
def keeping(theme: Theme):
    """What waits at the end of the forward pass, plain and checkpointed."""
    sketch = course.Sketch(theme, 41, 11)
    for row, (way, every) in enumerate((("plain", True), ("checkpointed", False))):
        top = 1 + 5.4 * row
        sketch.text(0, top + 1.5, way, align="left")
        for n in range(4):
            left = 7 + 8.6 * n
            sketch.tensor(left, top, 1.4, 3, "s", color=0)
            sketch.tensor(left + 2, top, 4.4, 3, "a", color=1, kept=every)
            sketch.arrow((left + 6.5, top + 1.5), (left + 8.4, top + 1.5))
        sketch.text(
            24,
            top + 3.8,
            "kept: 4 s + 4 a" if every else "kept: 4 s; one a at a time comes back",
            quiet=True,
        )
    return sketch.figure


course.show(
    keeping,
    "Figure 1. Four blocks at the end of the forward pass: filled is kept, "
    "dashed is gone.",
)

# %% [markdown]
# ## 2. From scratch, in three steps
# **Keep only the input.** A forward pass that records nothing keeps nothing. So run the block without recording, and
# remember $x$.

# %%
with SavedBytes(besides=blocks.parameters()) as kept, torch.no_grad():
    y = blocks[0](x)
assert kept.peak == 0

# %% [markdown]
# **Compute again on the way back.** When the gradient of $y$ arrives, run the block once more, this time recording, and
# walk back through that one block alone. torch calls such a pair of hand-written passes a `Function`. The weights are
# arguments so that their gradients have somewhere to go.


# %%
class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *weights):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # inside a Function nothing is recorded

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()  # the same numbers, cut off from what made them
        with torch.enable_grad():
            y = ctx.block(x)
        return None, *torch.autograd.grad(y, [x, *ctx.block.parameters()], grad)


def forgetful(block, x):
    return Recompute.apply(block, x, *block.parameters())


# %% [markdown]
# The loss is right. Are the gradients?

# %%
_, loss, grads = step(forgetful)
wrong = sum(not torch.equal(p, q) for p, q in zip(plain_grads, grads, strict=True))
print(
    f"loss equal: {torch.equal(loss, plain_loss)}; gradients that differ: "
    f"{wrong} of {len(grads)}"
)
assert torch.equal(loss, plain_loss)
assert wrong > 0

# %% [markdown]
# No error, a perfect loss, and wrong gradients: the worst kind of bug. The second forward pass drew *another dropout
# mask*. **Replay the random state:** save the states of the random number generators with $x$, and restore them before
# computing again. There is one generator for the CPU and one for each card; dropout on a card uses the card's.

# %%
if torch.cuda.is_available():
    torch.cuda.init()  # makes the cards' generators
generators = [torch.default_generator, *torch.cuda.default_generators]


def states():
    return [generator.get_state() for generator in generators]


def restore(saved):
    for generator, state in zip(generators, saved, strict=True):
        generator.set_state(state)


class Replay(Recompute):
    @staticmethod
    def forward(ctx, block, x, *weights):
        ctx.states = states()
        return Recompute.forward(ctx, block, x, *weights)

    @staticmethod
    def backward(ctx, grad):
        now = states()
        restore(ctx.states)
        found = Recompute.backward(ctx, grad)
        restore(now)  # what is drawn later does not change
        return found


def ours(block, x):
    return Replay.apply(block, x, *block.parameters())


def of_torch(block, x):
    # the production version: the same idea
    return checkpoint(block, x, use_reentrant=False)


# %% [markdown]
# ## 3. Prove it
# The claim is *exact*, so the proof asks for equal bits, with dropout on. And it asks for the mechanism: $L$ inputs,
# and the inside of the one block that is open, $L\,s + a$, not $L\,(s + a)$.

# %%
predicted = L * s + a  # what the loss kept is gone by then
kept, loss, grads = step(ours)
assert torch.equal(loss, plain_loss)
assert all(torch.equal(p, q) for p, q in zip(plain_grads, grads, strict=True))
print(
    f"predicted {predicted / KIB:,.0f} KiB, counted {kept.peak / KIB:,.0f} KiB, "
    f"plain {plain.peak / KIB:,.0f} KiB"
)
assert kept.peak == predicted

# %% [markdown]
# If we replayed only the CPU's generator, this proof would still hold, but gradients on a card would be wrong. Let a
# generator of our own stand for the card's. Without its state the bug is back; with its state the bug is gone.

# %%
of_a_card = torch.Generator()


class OnACard(Block):
    def forward(self, x):
        return super().forward(x * (torch.rand(x.shape, generator=of_a_card) > 0.1))


def gradient_of_x(way):
    of_a_card.manual_seed(2)
    return torch.autograd.grad(way(on_a_card, x).square().sum(), x)[0]


on_a_card = OnACard().eval()  # its own dropout is off
plainly = gradient_of_x(lambda block, x: block(x))
assert not torch.equal(gradient_of_x(ours), plainly)
generators.append(of_a_card)
assert torch.equal(gradient_of_x(ours), plainly)
generators.remove(of_a_card)


# %% Draw figure 2 tags=["hide-input"]
def over_time(theme: Theme):
    """Bytes kept, change by change."""
    drawn, axes = course.figure(height=2.8)
    for (label, one), color in zip(
        (("plain", plain), ("checkpointed", kept)), theme.series, strict=False
    ):
        share = [n / len(one.history) for n in range(len(one.history))]
        axes.plot(
            share,
            [now / KIB for now in one.history],
            color=color,
            drawstyle="steps-post",
            label=label,
        )
    axes.set(
        xlabel="one step, from its first to its last change",
        ylabel="kept by autograd, KiB",
        ylim=(0, None),
    )
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    over_time,
    "Figure 2. Plain training climbs until the loss and comes down again; "
    "with checkpointing it takes eight small "
    "steps up, then one block after the other opens and closes.",
)

# %% [markdown]
# ## 4. What it costs
# One more forward pass. In a plain step a product costs one unit forward and two backward (the gradient of its input,
# the gradient of its weight), so 3 become 4: +33 %. When the weights are frozen, as they will be from [the lesson on
# LoRA](lora.py) on, the backward pass is one unit, so 2 become 3: +50 %. Predict, then count.


# %%
def more(way) -> float:
    """The share of products that a way adds to a plain step."""
    return flops(lambda: step(way)) / flops(lambda: step(lambda block, x: block(x))) - 1


for trains, backward in (("all weights", 2), ("frozen", 1)):
    blocks.requires_grad_(trains == "all weights")
    expected = 1 / (1 + backward)
    print(
        f"{trains:12} predicted {expected:+.0%}, ours {more(checkpointed):+.0%}, "
        f"torch's {more(of_torch):+.0%}"
    )
    assert abs(more(checkpointed) - expected) < 1e-9
    assert abs(more(of_torch) - expected / 2) < 1e-9
_ = blocks.requires_grad_(True)

# %% [markdown]
# Ours costs what we said (`checkpointed` is the same twenty lines from the package, able to leave frozen weights out).
# torch's costs half of it! It *stops early*: as soon as the second forward pass has made the last thing that the
# backward pass will ask for, the rest of the block is not computed. Here that is `down`, half of all products. In a
# Llama with LoRA the last product is an adapter's thin one, and early stop gains next to nothing: +47 %, counted. So
# when somebody says "checkpointing costs 33 %", ask of what. A third more time is a quarter fewer tokens a second;
# torchtune measured 21 % fewer, and 42 % less memory (Llama-3.2-3B, A100).
#
# And in bytes and seconds, on our own benchmark, the same step without and with it. What is committed is of a CPU, a
# model of two layers and rows of 128 tokens: there is little to save in two blocks. Our job comes next.

# %%
step_of = "peft=lora attention=best precision=best chunked_loss=true"
course.on_a_gpu(
    "gradient_checkpointing", off=step_of, on=f"{step_of} gradient_checkpointing=true"
)

# %% [markdown]
# ## 5. The production switch
# In the Kwanzaa run it is one line, and the plan shows what that line becomes: an edit of the loaded model. It calls
# transformers' own method, which wraps every block in torch's `checkpoint`.

# %%
before, after = (
    course.so_far("gradient_accumulation"),
    course.so_far("gradient_checkpointing"),
)
print("--set tricks.gradient_checkpointing=true")
print(diff(resolve(before, T4), resolve(after, T4)))

# %%
course.show_bill(before, after)
assert course.bill(after).peak_bytes < 0.6 * course.bill(before).peak_bytes
highest, second, *_ = sorted(
    course.bill(after).moments, key=lambda moment: -moment.bytes
)
assert (highest.name, second.name) == ("loss", "log-softmax")
assert round((highest.bytes - second.bytes) / KIB**2) == 485

# %% [markdown]
# Read the two columns slowly. *Saved activations* fell from 18,368 MiB to 256: sixteen inputs. 1,856 MiB of them were
# 16-bit copies of the weights. No block saves these now, but autocast would: it caches each copy until the forward pass
# ends, in case the weight is used again. No block uses a weight twice, so our 16-bit switch turns this cache off where
# whole matrices train. With the cache the end of the forward pass, now 485 MiB below the peak, would be the new peak,
# 1,371 MiB higher. A trick shrinks its own line; what you gain is the distance to the next peak. Most of what is left,
# weights, gradients and states, is for [the lesson on LoRA](lora.py).

# %%
course.show(
    course.staircase("gradient_checkpointing"),
    "Figure 3. The bill so far: still beyond a T4.",
)

# %% [markdown]
# **Or only some blocks.** `gradient_checkpointing=3` checkpoints the first 3 blocks. The last ones keep everything, so
# they cost no extra pass. On the way back they free what they kept before block 3 needs room to be recomputed. So take
# as many blocks out of checkpointing as your card has room for. Predict, then count:

# %%
k = 3
first = set(blocks[:k])
kept, _, grads = step(lambda block, x: ours(block, x) if block in first else block(x))
predicted_k = L * s + (L - k) * a + s  # the loss's input waits, too
print(f"predicted {predicted_k / KIB:,.0f} KiB, counted {kept.peak / KIB:,.0f} KiB")
assert kept.peak == predicted_k
assert all(torch.equal(p, q) for p, q in zip(plain_grads, grads, strict=True))

# %% [markdown]
# **Or all but attention.** A recomputed block has its queries, keys and values again. Besides these, attention's
# backward pass needs only its output and one number for each query ([FlashAttention](flash_attention.py) shows why).
# With `keep_attention=true` a checkpointed block keeps these two, so attention runs once and not twice. torch calls
# this *selective* checkpointing. It pays for long rows only, because torch then asks a Python function about every
# operation. On a CPU, SmolLM2's blocks were 12 % slower with 128 tokens and 6 % faster with 2,048. Here is the whole
# choice for our job, as it will be after [the lesson on lean preparation](mixed_precision.py):

# %%
job = course.so_far("mixed_precision")
fitting = []
for number in ("true", 12, 8, 4, "false"):
    for keep in ("false", "true") if number != "false" else ("false",):
        changed = with_settings(
            job, [f"gradient_checkpointing={number}", f"keep_attention={keep}"]
        )
        peak = course.bill(changed).peak_bytes
        fitting.append(peak)
        print(
            f"gradient_checkpointing={number!s:5} keep_attention={keep:5} "
            f"{peak / KIB**3:.2f} GiB"
        )
assert fitting == sorted(fitting)
assert max(fitting) < T4.memory_bytes / 2

# %% [markdown]
# All of them fit a T4. So why recompute anything there? Because rows may get longer, and cards smaller. The cheapest
# set is the one with the smallest number that still fits. (transformers' own `every_n_layers=2` checkpoints every
# second block instead.)
#
# **A second switch: put it elsewhere.** Instead of dropping the saved activations of a block, the trainer can copy them
# to the host's memory and fetch them back: `activation_offload`. It computes nothing twice, but it costs PCIe traffic.
# With checkpointing it has to copy only the $L$ inputs. It is exact, too: the same bits come back.

# %%
offload = Offloaded(weights=blocks.parameters())
with offload:  # around the forward pass
    loss = forward(ours)
loss.backward()
print(
    f"to the host {offload.bytes_to_host / KIB:.0f} KiB, "
    f"back {offload.bytes_to_device / KIB:.0f} KiB"
)
assert offload.bytes_to_host == L * s + s  # the blocks' inputs, and the loss's
assert all(torch.equal(p, q) for p, q in zip(plain_grads, gradients(), strict=True))

# %% [markdown]
# **For long rows**, with tens of thousands of tokens, the block that is being recomputed is at least as large as all
# saved inputs together. [The lesson on long rows](long_rows.py) cuts its MLP into tiles (`tiled_mlp`), and sends the
# inputs to the host.

# %% [markdown]
# ## 6. Where it breaks
# **`element 0 of tensors does not require grad and does not have a grad_fn`.** torch has an older checkpoint,
# `use_reentrant=True`, which looks at a block's *input* to see whether anything learns. Above a frozen embedding the
# input does not, so the adapters inside get no gradient. Cure: `use_reentrant=False` (our switch), or
# `model.enable_input_require_grads()`.

# %%
frozen = x.detach()
# torch's own hint, easily overlooked
warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
try:
    checkpoint(blocks[0], frozen, use_reentrant=True).sum().backward()
except RuntimeError as error:
    print(error)
    assert "does not require grad" in str(error)
checkpoint(blocks[0], frozen, use_reentrant=False).sum().backward()  # the cure

# %% [markdown]
# **`A different number of tensors was saved during the original forward and recomputation`.** The block did something
# else the second time: it has a side effect, such as filling a cache. Cure: take that out of training
# (`model.config.use_cache = False`; transformers does so by itself when it notices). Its sibling, `Recomputed values
# for the following tensors have different metadata`, means other shapes or dtypes: a cache that grew. Values are never
# compared, so there is no error when code draws other random numbers from Python's `random`, which nothing replays.

# %%
cache = {}


def with_a_cache(x):
    if "y" not in cache:
        cache["y"] = blocks[0](x)
    return cache["y"] * 2


try:
    checkpoint(with_a_cache, x, use_reentrant=False).sum().backward()
except CheckpointError as error:
    print(str(error).splitlines()[0])
    assert "A different number of tensors was saved" in str(error)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Rows become twice as long, $T = 128$. How many bytes does our checkpointed stack keep at its peak?
#    The answer is a number of bytes.
# 2. **Build.** Checkpoint two blocks at a time: fewer inputs are kept, and two insides are open at once. Fill in
#    `in_pairs(blocks, x)`: it runs all blocks, an even number of them, and returns the last output, shaped like `x`.
#    (About four lines. `nn.Sequential` makes one block of two, and `ours` takes any block.)
# 3. **Reach.** In groups of $k$ blocks the peak is about $\frac{L}{k}\,s + k\,(s + a)$, less the $s$ that is counted
#    twice. With $L = 64$ and $a = 15\,s$, at which $k$ is it lowest? The answer is a whole number of blocks. (The
#    paper's answer is a square root.)

# %% tags=["exercise"]
bytes_at_twice_the_length = None


def in_pairs(blocks, x):
    """FILL ME IN."""


best_k = None


# %% Check the exercises tags=["hide-input"]
def run(way, some):
    """Return the bytes that autograd keeps at the peak, the output, and all gradients,
    with the same dropout always."""
    torch.manual_seed(1)
    blocks.zero_grad()
    x.grad = None
    with SavedBytes(besides=blocks.parameters()) as kept:
        if (y := way(some, x)) is None:
            raise NotImplementedError
        y.square().mean().backward()
    return kept.peak, y.detach(), [x.grad, *(p.grad for p in some.parameters())]


def one_by_one(some, x):
    for block in some:
        x = block(x)
    return x


def of_pairs(answer):
    for some in (blocks, blocks[:4]):
        _, y, grads = run(one_by_one, some)
        peak, found, its_grads = run(answer, some)
        assert torch.equal(found, y), (
            f"with {len(some)} blocks the output is wrong: "
            "run every block once, in order"
        )
        same = all(map(torch.equal, grads, its_grads))
        assert same, (
            "the output is right and the gradients are not: "
            "is the dropout the same in both forward passes?"
        )
        # the second block of a pair has an input, too
        right = len(some) // 2 * s + a + s + a
        many = (
            "too many: the insides of more than one pair, or every input"
            if peak > right
            else "one block at a time"
        )
        assert peak == right, (
            f"{len(some)} blocks keep {peak:,} bytes at the peak, {many}"
        )


def of_bytes(answer):
    course.equal(
        2 * predicted, "which of the terms of L s + a grow with T, and how fast?"
    )(answer)


def of_k(answer):
    def units(k):
        return 64 / k + 16 * k - 1

    found = int(answer)
    assert found == answer, f"not {answer}; a whole number of blocks"
    best = min(range(1, 65), key=units)
    assert found == best, (
        f"not {found}; there the formula gives {units(found):g} s, "
        "and another k gives less"
    )


course.check(1, bytes_at_twice_the_length, of_bytes, "a number of bytes")
course.check(
    2,
    in_pairs,
    of_pairs,
    "a function (blocks, x) -> the last block's output, shaped like x",
)
course.check(3, best_k, of_k, "a whole number of blocks")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# bytes_at_twice_the_length = 2 * 173_056  # s and a are both proportional to T
#
#
# def in_pairs(blocks, x):
#     for first, second in zip(blocks[::2], blocks[1::2]):
#         x = ours(nn.Sequential(first, second), x)
#     return x
#
#
# best_k = 2  # sqrt(64 * s / (16 s)) = 2
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the insides of all blocks but one: $L\,(s + a) \to L\,s + a$.
# - **Costs** one more forward pass: a third of a step's products when all train, half on a frozen base, less with early
#   stop.
# - **Exact**, bit for bit, if all random states are replayed, the card's included.
# - **When**: one row at a time ([gradient accumulation](gradient_accumulation.py)) still does not fit; on a small card,
#   almost always. Nothing else takes as much off the activations.
# - **How many blocks**: as few as the card needs. A number $k$ costs $k / L$ of the extra pass.
# - **When not**: when the step fits already, or its peak is elsewhere, in the logits or the optimizer.
#
# ## Sources
# - Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv 1604.06174, section 4.
# - Rhu et al. 2016, *vDNN*, arXiv 1602.08124, section 3 (offloading).
# - Korthikanti et al. 2022, arXiv 2205.05198, section 5 (selective); torchtune's README, "Optimization flags".
# - `torch/utils/checkpoint.py` of torch 2.13: `_CheckpointFrame`, early stop.
# - Ours: `gradient_checkpointing.py` and `keep_attention.py` in `cria_tricks/tricks/`, and their tests.
