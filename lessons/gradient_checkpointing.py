# ---
# jupyter:
#   question: What does training store between forward and backward pass, and how much of it can we compute again?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Gradient checkpointing: forget, and compute again
# > **Promise.** `CUDA out of memory` often comes in the middle of the forward pass, because each block stores
# > activations for later, and gradient checkpointing is the usual cure. You will build it in three steps, meet a bug
# > that leaves the loss perfect and the gradients wrong, and choose how many blocks to checkpoint on your card.
# >
# > **Card.** saves the activations inside all blocks but one / costs a second forward pass of each checkpointed block /
# > exact, bit for bit, if the second run is the same computation / about 25 minutes / after
# > [FlashAttention](flash_attention.py)
#
# [FlashAttention](flash_attention.py) left the peak of our job at 14,013 MiB. That is *tight* on a T4 with rows of
# 2,048 tokens, and with 3,072 it does not fit. 6,146 MiB of the peak are [saved
# activations](../docs/glossary.md#activation), and this lesson removes nearly all of them. (The technique is also
# called activation checkpointing, recomputation, or rematerialization.)
#
# ## 1. The bill
# For the gradient of a weight, the backward pass needs the input that this weight was multiplied with. Therefore each
# matrix multiplication stores its input, and so does each nonlinear function. Frozen weights help little here, because
# the [LoRA](lora.py) adapter next to a matrix multiplies the same input. The first block stores its activations
# longest, because the backward pass reaches it last.
#
# Suppose that each of the 16 blocks stores only its own input, which has 2,048 tokens of 2,048 numbers in fp32. How
# many MiB of the 6,146 remain?

# %% Your guess: MiB of saved activations that remain tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import warnings

from torch.utils.checkpoint import CheckpointError, checkpoint

from cria_tricks import course
from cria_tricks.course import CARDS, T4, Theme, find_shape, flops, folds, with_settings
from cria_tricks.techniques import gradient_checkpointing
from cria_tricks.techniques.activation_offload import Offloaded

KIB, MIB = 2**10, 2**20

# %%
before = course.so_far("flash_attention")
after = course.so_far("gradient_checkpointing")
shape = find_shape(before.model)
inputs = shape.layers * 2048 * shape.width * 4
course.reveal(guess, inputs / MIB, "MiB")
for recipe in (before, after):
    lines = {line.name: line.bytes for line in course.bill(recipe).lines}
    print(f"by the bill {lines['saved activations'] / MIB:,.0f} MiB")
assert inputs == lines["saved activations"]

# %% [markdown]
# ## 2. From scratch, in three steps
# We take a small stack: $L$ blocks, and each computes $y=x+W_2\,\text{dropout}(\text{gelu}(W_1\,\text{norm}(x)))$. At 4
# bytes a number, one block stores:
#
# - its input $x$ for the norm, which is $BTD$ numbers; we call these bytes $s$
# - a mean and a spread for each token ($2BT$), the normed $x$ for `up` ($BTD$), the input of gelu ($BTH$), the mask of
#   dropout ($BTH$), and the input of `down` ($BTH$); we call all these bytes $a$
#
# So plain training stores $L\,(s+a)$, and the loss stores its own input, which is another $s$.

# %%
import torch
import torch.nn.functional as F
from torch import nn

from cria_tricks.course import SavedBytes

torch.manual_seed(0)
B, T, D, H, L = 2, 64, 16, 64, 8  # rows, tokens, width, inner width, blocks


class Block(nn.Module):
    """From (B, T, D) to (B, T, D)."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(D, H, bias=False)
        self.down = nn.Linear(H, D, bias=False)

    def forward(self, x):
        inner = F.gelu(self.up(F.layer_norm(x, (D,))))
        return x + self.down(F.dropout(inner, 0.1, self.training))


blocks = nn.ModuleList(Block() for _ in range(L))
x = torch.randn(B, T, D, requires_grad=True)


def step(way):
    """Train one step: what autograd stored, the loss, and all gradients."""
    torch.manual_seed(1)  # the same dropout in every step
    blocks.zero_grad()
    x.grad = None
    with SavedBytes(besides=blocks.parameters()) as stored:
        y = x
        for block in blocks:
            y = way(block, y)
        loss = y.square().mean()
        loss.backward()
    return stored, loss.detach(), [x.grad, *(p.grad for p in blocks.parameters())]


def plainly(block, x):
    return block(x)


s = 4 * B * T * D
a = 4 * (2 * B * T + B * T * D + 3 * B * T * H)
plain, plain_loss, plain_grads = step(plainly)
print(f"one block: input s = {s / 1024:.0f} KiB, all else a = {a / 1024:.0f} KiB")
print(f"L blocks and the loss: {plain.peak / 1024:,.0f} KiB, as predicted")
assert plain.peak == L * (s + a) + s


# %% Draw figure 1 tags=["hide-input"]
def keeping(theme: Theme):
    """What is stored at the end of the forward pass, plain and checkpointed."""
    sketch = course.Sketch(theme, 42.2, 11)
    for row, (way, every) in enumerate((("plain", True), ("check-\npointed", False))):
        top = 1 + 5.4 * row
        sketch.text(0, top + 1.5, way, align="left")
        for n in range(4):
            left = 7 + 8.6 * n
            sketch.tensor(left, top, 1.4, 3, "s", color=0)
            sketch.tensor(left + 2, top, 4.4, 3, "a", color=1, kept=every)
            sketch.arrow((left + 6.5, top + 1.5), (left + 8.4, top + 1.5))
        stored = "stored: 4 s + 4 a" if every else "stored: 4 s"
        sketch.text(24, top + 3.8, stored, quiet=True)
    return sketch.figure


course.show(
    keeping,
    "Figure 1. Four blocks at the end of the forward pass: plain training stores all "
    "of s and a, and checkpointing stores only each block's input s.",
)

# %% [markdown]
# **Step 1: store only the input.** A forward pass inside `torch.no_grad()` records nothing, so it stores nothing. Run
# the block in this way, and store its input $x$.
#
# **Step 2: compute again in the backward pass.** When the gradient of $y$ arrives, run the block a second time. This
# time autograd records, so we can go back through this block. In PyTorch, a pair of hand-written passes is an
# `autograd.Function`, and nothing is recorded inside its forward pass. The trained weights are arguments, so that their
# gradients are returned; frozen ones have none. Then we compare loss and gradients with plain training.


# %%
def trained(block):
    return [p for p in block.parameters() if p.requires_grad]


class Recompute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block, x, *weights):
        ctx.block = block
        ctx.save_for_backward(x)
        return block(x)  # inside a Function nothing is recorded

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()  # the same numbers, without their history
        with torch.enable_grad():
            y = ctx.block(x)
        # one gradient for each argument of forward; a block has none
        return None, *torch.autograd.grad(y, [x, *trained(ctx.block)], grad)


def forgetful(block, x):
    return Recompute.apply(block, x, *trained(block))


_, loss, grads = step(forgetful)
wrong = sum(not torch.equal(p, q) for p, q in zip(plain_grads, grads, strict=True))
print(f"the loss is equal: {torch.equal(loss, plain_loss)}")
print(f"gradients that differ: {wrong} of {len(grads)}")
assert torch.equal(loss, plain_loss)
assert wrong > 0

# %% [markdown]
# There is no error, the loss is perfect, and all gradients are wrong. The reason is dropout, because the second forward
# pass drew *another mask*.
#
# **Step 3: restore the [random state](../docs/glossary.md#random-state-rng).** Store the states of all random number
# generators together with $x$, and restore them before the second run. The CPU has one generator and each card has one;
# dropout on a card draws from the card's. (Llama has no dropout of its own. You meet this bug if you set `lora_dropout`
# above 0.)

# %%
if torch.cuda.is_available():
    torch.cuda.init()  # makes the cards' generators
generators = [torch.default_generator, *torch.cuda.default_generators]


def restore(states):
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


class Replay(Recompute):
    @staticmethod
    def forward(ctx, block, x, *weights):
        ctx.states = [generator.get_state() for generator in generators]
        return Recompute.forward(ctx, block, x, *weights)  # stores x in the same ctx

    @staticmethod
    def backward(ctx, grad):
        now = [generator.get_state() for generator in generators]
        restore(ctx.states)
        found = Recompute.backward(ctx, grad)
        restore(now)  # so that later draws do not change
        return found


def ours(block, x):
    return Replay.apply(block, x, *trained(block))


# %% [markdown]
# ## 3. Prove it
# The claim is *exact*, so we ask for equal bits in the loss and in every gradient, with dropout on. We also count the
# bytes. The peak is the larger of two moments. At the loss, the $L$ inputs and what the loss stores are in memory, here
# $L\,s+s$. When a block is recomputed, the loss has freed its $s$, so $L\,s+a$ remain; here this is more. (In our job
# the logits make the loss the larger.)

# %%
predicted = L * s + max(s, a)  # the loss's s is freed before a block is recomputed
stored, loss, grads = step(ours)
assert torch.equal(loss, plain_loss)
assert all(torch.equal(p, q) for p, q in zip(plain_grads, grads, strict=True))
print(f"predicted {predicted / KIB:,.0f} KiB, counted {stored.peak / KIB:,.0f} KiB")
print(f"plain training stores {plain.peak / KIB:,.0f} KiB")
assert stored.peak == predicted


# %% Draw figure 2 tags=["hide-input"]
def over_time(theme: Theme):
    """Bytes stored, change by change."""
    drawn, axes = course.figure(height=2.8)
    for (label, one), color in zip(
        (("plain", plain), ("checkpointed", stored)), theme.series, strict=False
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
        ylabel="stored by autograd, KiB",
        ylim=(0, None),
    )
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    over_time,
    "Figure 2. Plain training stores more and more until the loss; with checkpointing "
    "it stores eight inputs, and then one block after the other is recomputed and "
    "freed.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: the card's random state, and its smaller dropout mask
# If we restored only the CPU's generator, this proof would still hold, but gradients on a card would be wrong. Let a
# generator of our own stand for the card's. Without its state the bug is back, and with its state the bug is gone.
#
# On a card the mask of dropout is also smaller. There dropout is another operation, `native_dropout`, and its mask is
# boolean, with one byte a number. A CPU can run this operation too, so we can count it.
#
# The random state is not all. The second run happens in the backward pass, outside of autocast. torch's `checkpoint`
# restores the autocast state as well, and ours does not: with [mixed precision](mixed_precision.py) our second run
# would compute in fp32, and the gradients would differ without an error. On a card the kernels must also be
# deterministic.

# %% tags=["deep"]
of_a_card = torch.Generator()


class OnACard(Block):
    def forward(self, x):
        return super().forward(x * (torch.rand(x.shape, generator=of_a_card) > 0.1))


def gradient_of_x(way):
    of_a_card.manual_seed(2)
    return torch.autograd.grad(way(on_a_card, x).square().sum(), x)[0]


on_a_card = OnACard().eval()  # its own dropout is off
right = gradient_of_x(plainly)
assert not torch.equal(gradient_of_x(ours), right)
generators.append(of_a_card)
assert torch.equal(gradient_of_x(ours), right)
generators.remove(of_a_card)

with SavedBytes(besides=[x]) as mask:
    torch.native_dropout(x, 0.1, True)
assert mask.peak == x.numel()
smaller = L * (s + a - 3 * B * T * H) + s
print(f"with a boolean mask {smaller / KIB:,.0f} KiB would be stored in plain training")

# %% [markdown]
# ## 4. What it costs
# The price is one more forward pass. In a plain step each matrix multiplication takes one unit of work in the forward
# pass and two in the backward pass: one for the gradient of its input, and one for the gradient of its weight. With
# checkpointing 3 units become 4, which is 33 % more. When the weights are *frozen*, no gradient of a weight is
# computed. How many per cent more is it then?

# %% Your guess: % more matrix multiplications with frozen weights tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def of_torch(block, x):
    return checkpoint(block, x, use_reentrant=False)  # the production version


def more(way):
    """The share of matrix multiplications that a way adds to a plain step."""
    return flops(lambda: step(way)) / flops(lambda: step(plainly)) - 1


for frozen in (False, True):
    blocks.requires_grad_(not frozen)
    assert torch.equal(step(ours)[2][0], step(plainly)[2][0])  # the gradient of x
    # The package's version of ours runs the block on a view of x, because torch's
    # counter cannot watch x itself inside autograd.grad.
    ours_costs = more(gradient_checkpointing.checkpointed)
    print(
        f"frozen: {frozen!s:5}  ours {ours_costs:+.0%}, torch's {more(of_torch):+.0%}"
    )
    assert abs(ours_costs - (1 / 2 if frozen else 1 / 3)) < 1e-9
    assert abs(more(of_torch) - ours_costs / 2) < 1e-9
_ = blocks.requires_grad_(True)
course.reveal(guess, 100 * ours_costs, "%")


def multiplications(recipe, without=()):
    """Of a step of our job, by formula [FLOPs]."""
    parts = folds.time_of(recipe, shape, CARDS["t4"]).parts
    return sum(part.flops for part in parts if part.name not in without)


of_blocks = multiplications(after, ("head",)) / multiplications(before, ("head",)) - 1
of_a_step = multiplications(after) / multiplications(before) - 1
print(f"our job: its blocks {of_blocks:+.0%}, the whole step {of_a_step:+.0%}")

# %% [markdown]
# Ours costs what we predicted, and torch's version only half of it, because it *stops early*. As soon as the second run
# has computed the last tensor that the backward pass needs, the rest of the block is skipped. Here the rest is `down`,
# half of all work: its output is only added to $x$, so no gradient needs its value. In a Llama with LoRA the rest is
# only a small matrix of an adapter, so early stop gains nearly nothing. There the multiplications of the blocks grow by
# 48 %, and those of the whole step by 39 %, because the logits are computed once. torchtune measured 21 % fewer tokens
# a second and 42 % less memory (Llama-3.2-3B, A100).
#
# The next cell measures a step without and with it. Without a GPU you see a CPU's committed results, of a model with
# two blocks and rows of 128 tokens, where there is little to save. [An
# H200](../docs/benchmarks.md#a-first-sitting-on-an-h200), held to a T4's kernels, ran our job: with 16 MiB of cuBLAS's
# workspace, 14,029 MiB became 8,139, and 0.30 seconds became 0.41.

# %%
rest = "peft=lora attention=best precision=best chunked_loss=true"
course.on_a_gpu(
    "gradient_checkpointing", off=rest, on=f"{rest} gradient_checkpointing=true"
)

# %% [markdown]
# ## 5. The production switch
# In plain Hugging Face code it is one argument of the Trainer, which then wraps every block in torch's `checkpoint`.
# (Below, `max_steps=1` is only for a short try, `"plain"` the output folder.) With this package it is one command for
# [the course's job](../docs/glossary.md#kwanzaa-run), and `cria plan` in place of `cria train` prints only the bill:
#
# ```bash
# cria train kwanzaa --set tricks.gradient_checkpointing=true
# ```

# %%
print(gradient_checkpointing.PLAIN)
course.show_worth("gradient_checkpointing")
course.show_bill(before, after)


# %% Check the numbers of the text tags=["hide-input"]
def peak(recipe, *changes):
    """The peak of a step, in whole MiB."""
    return round(course.bill(with_settings(recipe, list(changes))).peak_bytes / MIB)


def seconds(recipe):
    """The predicted time of one row, at 28 % of a T4's peak rates."""
    return folds.time_of(recipe, shape, CARDS["t4"]).seconds


off = "tricks.gradient_checkpointing=false"
saved = course.bill(before).peak_bytes - course.bill(after).peak_bytes
assert (peak(before), peak(after), round(saved / MIB)) == (14_013, 8_122, 5_890)
assert (round(100 * of_blocks), round(100 * of_a_step)) == (48, 39)
assert course.bill(before).verdict == "tight"
assert not course.bill(with_settings(before, ["data.max_length=3072"])).fits
long = with_settings(after, ["data.max_length=4096"])
least = round(course.bill(long).least_bytes / MIB)
one_less = with_settings(long, ["tricks.gradient_checkpointing=15"])
one_more = course.bill(one_less).peak_bytes - course.bill(long).peak_bytes
one_more = round(one_more / MIB)
assert (least, one_more, round(T4.memory_bytes / MIB)) == (11_799, 738, 15_095)
assert (15_095 - least) // one_more == 4
both = [
    course.bill(with_settings(long, [f"tricks.gradient_checkpointing={number}"]))
    for number in (1, "false")
]
assert round((both[1].peak_bytes - both[0].peak_bytes) / MIB) == 706
fitting = [
    number
    for number in range(1, 17)
    if course.bill(
        with_settings(long, [f"tricks.gradient_checkpointing={number}"])
    ).fits
]
assert fitting == [12, 13, 14, 15, 16]
assert (course.bill(long).verdict, course.bill(one_less).verdict) == ("fits", "tight")
assert (peak(course.CAPSTONE), peak(course.CAPSTONE, off)) == (1_516, 4_711)
assert course.bill(after).peak.name == course.bill(before).peak.name == "loss"
logits = next(line for line in course.bill(after).lines if line.name == "logits")
assert round(logits.bytes / MIB) == 3_006

# %% Draw figure 3 tags=["hide-input"]
course.show(
    course.ladder("gradient_checkpointing"),
    "Figure 3. The bill after each switch: checkpointing takes the peak from 13.7 to "
    "7.9 GiB, about half of a T4.",
)

# %% [markdown]
# Added to the lessons before, it saves 5,890.2 MiB (the first table subtracts rounded peaks) and makes a row 38 %
# slower. Taken away from the finished job, it is worth 3,195 MiB and 34 %. (The times are predicted, and may be 0.6 to
# 1.7 times as long. Both times of a pair move together, so the percentages are surer.) The peak stays at the loss, when
# no block is being recomputed. Of the saved activations only the 16 inputs are left there, and the largest line after
# the weights is now 3,006 MiB of [logits](../docs/glossary.md#logits).
#
# **Checkpoint only some blocks.** `gradient_checkpointing=3` checkpoints the first 3 blocks. The last blocks then store
# everything and cost no extra pass. The backward pass begins with them, so they have freed their $a$ when the first
# checkpointed block is recomputed. Therefore the peak is at the loss. Predict our toy's bytes, and count:

# %%
k = 3
first = set(blocks[:k])
some, _, grads = step(lambda block, x: ours(block, x) if block in first else block(x))
predicted_k = L * s + (L - k) * a + s  # and the loss's input
print(f"predicted {predicted_k / KIB:,.0f} KiB, counted {some.peak / KIB:,.0f} KiB")
assert some.peak == predicted_k
assert all(torch.equal(p, q) for p, q in zip(plain_grads, grads, strict=True))

# %% [markdown]
# **Store attention's result as well.** With `keep_attention=true` a checkpointed block also stores the output of
# [FlashAttention](flash_attention.py), and one number for each query. Then attention runs once in place of twice,
# because the recomputed block has $q$, $k$ and $v$ again. In our job this takes 260 MiB more and saves 0.12 of 8.22 s.
# It pays for long rows only: on one CPU core, blocks of SmolLM2 were 12 % slower with 128 tokens and 6 % faster with
# 2,048. (This is *selective* checkpointing: torch's `create_selective_checkpoint_contexts` takes any policy.
# torch.compile has `activation_memory_budget`.)
#
# The whole choice, as predicted:

# %% The whole choice for our job tags=["hide-input"]
print("gradient_checkpointing  keep_attention  peak, MiB  seconds a row")
peaks, times, tight = [], [], []
for number in ("true", 12, 8, 4, "false"):
    for keep in ("false", "true") if number != "false" else ("false",):
        changed = with_settings(
            after,
            [
                f"tricks.gradient_checkpointing={number}",
                f"tricks.keep_attention={keep}",
            ],
        )
        peaks.append(peak(changed))
        if course.bill(changed).verdict == "tight":
            tight.append(number)
        times.append(seconds(changed))
        print(f"{number!s:22}  {keep:14}  {peaks[-1]:9,}  {times[-1]:13.2f}")
assert peaks == sorted(peaks)
assert times == sorted(times, reverse=True)
assert peaks[1] - peaks[0] == 260
assert [round(time, 2) for time in times[:2]] == [8.22, 8.1]
assert max(peaks) * MIB < T4.memory_bytes
assert set(tight) == {4, "false"}

# %% [markdown]
# Checkpoint as few blocks as your card allows, because each of them costs time. All lines of this table can run on a T4
# (those below 8 blocks are *tight*), so for rows of 2,048 tokens the last is the fastest. The course checkpoints all
# blocks, for the smallest peak; [a full card](a_full_card.py) shows what to switch off where memory is left. To choose
# a number for your card, take `least` of the bill with all blocks checkpointed. With rows of 4,096 tokens it is 11,799
# MiB, and each block left out adds $a$, 738 MiB (the first block only 706, because no gradient needs its input). A T4
# has 15,095, so 4 blocks can be left out (then it is tight; only with all 16 it *fits*).

# %% [markdown] tags=["deep"]
# ### Deeper: send saved activations to the host
# A second switch does not drop the activations of a block. It copies them to the [host's](../docs/glossary.md#host)
# memory and fetches them for the backward pass: `activation_offload`. Nothing is computed twice, but it costs traffic
# over PCIe. Together with checkpointing it has to copy only the $L$ inputs. It is also exact, because the same bits
# come back. (In transformers 5.23, `activation_checkpointing_kwargs={"offload": True}` does this for checkpointed
# blocks.)
#
# For rows with tens of thousands of tokens, the one block that is being recomputed is at least as large as all saved
# inputs together. [The lesson on long rows](long_rows.py) uses offloading there, and cuts the MLP of that block into
# tiles (`tiled_mlp`).

# %% tags=["deep"]
offload = Offloaded(weights=blocks.parameters())
torch.manual_seed(1)
blocks.zero_grad()
x.grad = None
with offload:  # around the forward pass
    y = x
    for block in blocks:
        y = ours(block, y)
    loss = y.square().mean()
loss.backward()
grads = [x.grad, *(p.grad for p in blocks.parameters())]
print(f"to the host {offload.bytes_to_host / KIB:.0f} KiB")
print(f"back {offload.bytes_to_device / KIB:.0f} KiB")
assert offload.bytes_to_host == L * s + s  # the blocks' inputs, and the loss's
assert all(torch.equal(p, q) for p, q in zip(plain_grads, grads, strict=True))

# %% [markdown]
# ## 6. Where it breaks
# **`element 0 of tensors does not require grad and does not have a grad_fn`.** torch has an older checkpoint,
# `use_reentrant=True`, which looks only at a block's *input* to see whether anything is trained. With LoRA the
# embedding is frozen, so the first input needs no gradient, and the adapters inside the block get none. If something
# above the blocks is trained too, such as the head, there is not even an error: the adapters only get no gradients. The
# cure is `use_reentrant=False` (our switch, and the default of transformers 5.23, but not of torch 2.13) or
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
blocks.zero_grad()
head = nn.Linear(D, 1)  # trained, above the block
head(checkpoint(blocks[0], frozen, use_reentrant=True)).sum().backward()
print("no error, and the gradient in the block is", blocks[0].up.weight.grad)
assert blocks[0].up.weight.grad is None
checkpoint(blocks[0], frozen, use_reentrant=False).sum().backward()  # the cure
assert blocks[0].up.weight.grad is not None

# %% [markdown] tags=["deep"]
# ### Deeper: a block that does something else the second time
# **`A different number of tensors was saved during the original forward and recomputation`.** The block has a side
# effect, such as filling a cache, so its second run differs from the first. The cure is to take that out of training
# (`model.config.use_cache = False`; transformers does so by itself when it notices). A similar error is `Recomputed
# values for the following tensors have different metadata`. It means other shapes or dtypes, for example because a
# cache has grown. Values are never compared, so there is no error if code draws from Python's `random`, whose state
# nobody restores.

# %% tags=["deep"]
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
# 1. **Predict.** Rows become twice as long, $T=128$. How many bytes does our stack store at its peak, if all eight
#    blocks are checkpointed by `ours`?
# 2. **Build.** Checkpoint two blocks at a time, so that fewer inputs are stored, and the insides of two blocks are
#    recomputed together. Fill in `in_pairs(blocks, x)`: it runs all blocks, an even number of them, and returns the
#    last output, shaped like `x`. (About four lines. `nn.Sequential` makes one block of two, and `ours` takes any
#    block.)
# 3. **Reach.** In groups of $g$ blocks the peak is about $\frac{L}{g}\,s+g\,(s+a)$, minus one $s$, because a group's
#    first input is in both terms. With $L=64$ and $a=15\,s$, at which whole $g$ is it lowest?

# %% tags=["exercise"]
bytes_at_twice_the_length = None


def in_pairs(blocks, x):
    """FILL ME IN."""


best_g = None


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


def of_g(answer):
    def units(g):
        return 64 / g + 16 * g - 1

    found = int(answer)
    assert found == answer, f"not {answer}; a whole number of blocks"
    best = min(range(1, 65), key=units)
    assert found == best, (
        f"not {found}; there the formula gives {units(found):g} s, "
        "and another g gives less"
    )


course.check(1, bytes_at_twice_the_length, of_bytes, "a number of bytes")
course.check(
    2,
    in_pairs,
    of_pairs,
    "a function (blocks, x) -> the last block's output, shaped like x",
)
course.check(3, best_g, of_g, "a whole number of blocks")

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
# best_g = 2  # sqrt(64 * s / (16 s)) = 2
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the activations inside all blocks but one: $L\,(s+a)$ becomes $L\,s+a$.
# - **Costs** one more forward pass: a third more matrix multiplications when all weights are trained, half more on a
#   frozen base, and less where torch can stop early.
# - **Exact**, bit for bit, if the second run is the same computation: same random states (the card's too), same
#   autocast, deterministic kernels, no side effects.
# - **When**: your row, your model or your card needs it. It removes nearly all saved activations that FlashAttention
#   leaves.
# - **How many blocks**: as few as the card allows. The first $k$ blocks cost $k / L$ of the extra pass. (transformers'
#   own `every_n_layers=2` takes every second block.)
# - **When not**: if the step fits already, or if its peak is elsewhere, for example in the logits or the optimizer.
#
# ## Sources
# - Chen et al. 2016, *Training Deep Nets with Sublinear Memory Cost*, arXiv 1604.06174, section 4.
# - Rhu et al. 2016, *vDNN*, arXiv 1602.08124, section 3 (offloading).
# - Korthikanti et al. 2022, arXiv 2205.05198, section 5 (there *selective* means the opposite: attention alone is
#   recomputed); torchtune's README, "Optimization flags".
# - `torch/utils/checkpoint.py` of torch 2.13: `_CheckpointFrame`, early stop.
# - Ours: `gradient_checkpointing.py` and `keep_attention.py` in `cria_tricks/techniques/`, and their tests.
