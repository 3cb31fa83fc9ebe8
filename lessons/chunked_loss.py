# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Chunked loss: the logits of a few tokens at a time
# > **Promise.** The largest row of the bill, 3,006 MiB of logits, becomes 250.5. Loss and gradients stay those of plain
# > cross entropy, within a rounding that you bound; and no product is computed twice.
#
# > **Card.** saves the logits of all tokens but 256 / costs reading the head once a chunk; no product more / exact
# > within rounding / 30 minutes / after [packing](packing.py)
#
# The job is still QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a T4 with 14.74 GiB. Its bill
# stands at 5,357 MiB. All weights, states and gradients together are 1,577 of them. The model's last product, on the
# way to one single number, takes nearly twice that.

# %% Imports and settings tags=["hide-input"]
from functools import partial

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from cria_tricks import course
from cria_tricks.bench.case import TRAINED_SHARE
from cria_tricks.bench.style import Theme, panels
from cria_tricks.bill.constants import TOKENS_PER_CHUNK
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.load import losses
from cria_tricks.load.model import quiet_libraries
from cria_tricks.measure.counting import flops, peak_bytes
from cria_tricks.models.shape import find_shape
from cria_tricks.predict import toggles
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks.chunked_loss import chunked_cross_entropy

quiet_libraries()
torch.manual_seed(0)
KIB, MIB = 2**10, 2**20

# %% [markdown]
# ## 1. The bill
# The *head* multiplies the last hidden states, $N$ tokens of width $D$, by a matrix of $V$ words. Out come *logits*: a
# score for every word, for every token. Llama-3 knows $V = 128{,}256$ words. How many MiB are the logits of one row in
# 16 bits? And how many of one token, beside what all 16 blocks keep for it? Guess, then run.

# %% Your guess: MiB of one row's logits tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
before, after = course.so_far("packing"), course.so_far("chunked_loss")
shape = find_shape(before.model)
N, V, D = 2048, shape.vocabulary, shape.width
rows = {line.name: line.bytes for line in course.bill(before).lines}
print(
    f"all logits: {2 * N * V / MIB:,.0f} MiB in 16 bits, {4 * N * V / MIB:,.0f} in fp32"
)
saved = rows["saved activations"]
print(
    f"of a token: {rows['logits'] / N / KIB:,.0f} KiB of logits; "
    f"saved activations {saved / N / KIB:,.0f}"
)
course.reveal(guess, 2 * N * V / MIB, "MiB")

# %% [markdown]
# More than one copy lives, then. A loss is computed in fp32, so at the end of the forward pass there are 16-bit logits,
# their fp32 copy and log-softmax: $2 + 4 + 4$ bytes a logit. When the loss goes back: log-softmax, its gradient, the
# logits' gradient, $4 + 4 + 4$. Count it on a small head.

# %%
n, d, v = 128, 32, 2000  # tokens, width, words
hidden = torch.randn(n, d).bfloat16().requires_grad_()
head = (torch.randn(v, d) / 5).bfloat16()
labels = torch.randint(v, (n,))
given = (hidden, head, labels)


def plain(hidden, head, labels):
    """As transformers does: the losses of all tokens, summed."""
    logits = hidden @ head.T
    wide = logits.float()
    return F.cross_entropy(wide, labels, reduction="sum")


def peak(loss):
    return peak_bytes(lambda: loss(*given).backward(), alive=given)


forward = peak_bytes(lambda: plain(*given), alive=given)
print(
    f"bytes a logit: forward {forward / (n * v):.2f}, "
    f"with the way back {peak(plain) / (n * v):.2f}"
)
assert forward == 10 * n * v + 8  # and two numbers
assert peak(plain) == 12 * n * v + 8
assert rows["logits"] == 12 * N * V

# %% Draw figure 1 tags=["hide-input"]
SQUARES = (
    ("logits", "16 bits"),
    ("copy", "fp32"),
    ("log-softmax", "fp32"),
    ("gradient", "of it"),
    ("gradient", "of logits"),
)


def what_lives(theme: Theme):
    """Plain and chunked at their peaks."""
    sketch = course.Sketch(theme, 41, 14.2)
    sketch.text(0, 2.6, "plain", align="left")
    for place, (name, more) in enumerate(SQUARES):
        left = 6 + 7 * place
        sketch.tensor(left, 0.6, 6, 4.6, "", color=0, kept=place > 1)
        sketch.text(left + 3, 2.3, name)
        sketch.text(left + 3, 3.5, more)
    sketch.text(5.2, 2.9, "N", quiet=True)
    sketch.text(9, 5.9, "V", quiet=True)
    sketch.text(
        16, 5.9, "at the peak the filled three: 12 N V bytes", align="left", quiet=True
    )
    sketch.text(0, 9.8, "chunked", align="left")
    for left, name in ((6, "logits"), (13, "exp of them")):
        sketch.tensor(left, 7.6, 6, 4.6, "", color=0, kept=False)
        sketch.tensor(left, 9.2, 6, 1, name, color=1)
    sketch.tensor(20, 7.6, 0.7, 4.6, "", color=2)
    sketch.text(21.4, 9.9, "gradient of the hidden states, N × D", align="left")
    sketch.text(5.2, 9.7, "C", quiet=True)
    sketch.text(
        6,
        13.2,
        "at the peak: 8 C V bytes, then the next chunk's",
        align="left",
        quiet=True,
    )
    return sketch.figure


course.show(
    what_lives,
    "Figure 1. Plain cross entropy holds three full matrices of logits at its peak "
    "(dashed: come and gone); chunked, "
    "two thin slices and one gradient of the hidden states.",
)

# %% [markdown]
# ## 2. From scratch, in four steps
# **Cut the tokens.** A token's loss needs its own row of logits and no other. So take $C$ tokens at a time, and add the
# losses up. Does that save anything? Decide before you run.


# %%
def in_a_loop(hidden, head, labels, chunk=16):
    pieces = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    return sum(plain(h, head, y) for h, y in pieces)


C = 16
print(f"bytes a logit: {peak(in_a_loop) / (n * v):.2f}")
assert abs(peak(in_a_loop) - (4 * n * v + 8 * C * v)) < 256

# %% [markdown]
# Some, but $4 N V$ are still there: autograd keeps each chunk's log-softmax for the backward pass.
#
# **Write the gradient down.** With logits $z$ and label $y$ a token's loss is $\log \sum_w e^{z_w} - z_y$. Its gradient
# is softmax minus one-hot: $\partial / \partial z_w = e^{z_w} / \sum_u e^{z_u} - [w = y]$. Nothing in it comes from
# later. So it can be made *now*, while the logits are here.

# %%
z = torch.randn(v, requires_grad=True)
(of_z,) = torch.autograd.grad(F.cross_entropy(z, torch.tensor(7)), z)
torch.testing.assert_close(of_z, z.softmax(0) - F.one_hot(torch.tensor(7), v))


# %% [markdown]
# **Take loss and gradient together, and let go.** The gradient of the hidden states is that times the head; of the
# head, if it trains, that times the hidden states, summed over chunks. The backward pass is left with one factor, which
# comes from above.


# %%
def one_chunk(hidden, head, labels, of_hidden, of_head):
    # A function, so that its logits are gone before the next chunk's come.
    logits = (hidden @ head.T).float()
    total = logits.logsumexp(1, keepdim=True)
    loss = (total - logits.gather(1, labels[:, None])).sum()
    grad = logits.sub_(total).exp_()  # softmax, in the memory of the logits
    grad[torch.arange(len(labels)), labels] -= 1  # minus one-hot
    grad = grad.to(hidden.dtype)
    of_hidden.copy_(grad @ head)
    if of_head is not None:
        of_head += grad.T @ hidden
    return loss


class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, labels, chunk):
        loss, of_hidden = torch.zeros(()), torch.empty_like(hidden)
        of_head = (
            torch.zeros_like(head, dtype=torch.float32)
            if ctx.needs_input_grad[1]
            else None
        )
        for h, y, g in zip(
            hidden.split(chunk),
            labels.split(chunk),
            of_hidden.split(chunk),
            strict=True,
        ):
            loss += one_chunk(h, head, y, g, of_head)
        ctx.save_for_backward(of_hidden, of_head)
        return loss

    @staticmethod
    def backward(ctx, above):
        of_hidden, of_head = ctx.saved_tensors
        return (
            above * of_hidden,
            None if of_head is None else above * of_head,
            None,
            None,
        )


for C in (8, 16, 32):
    # two slices; the gradient; log-sum-exps; the loss
    predicted = 8 * C * v + hidden.nbytes + 4 * C + 4
    counted = peak(lambda *given, C=C: Chunked.apply(*given, C))
    print(f"C = {C:2}: predicted {predicted:,} bytes, counted {counted:,}")
    assert counted == predicted

# %% [markdown]
# **Skip what nobody trains.** Prompts and padding carry the label -100. Plain cross entropy makes their logits, and
# throws them away. So choose the rows first.


# %%
def chunked(hidden, head, labels, chunk=16):
    trained = labels != -100
    return Chunked.apply(hidden[trained], head, labels[trained], chunk)


# a prompt of 34 tokens, an answer of 94
answers = labels.masked_fill(torch.arange(n) < 34, -100)
work = [
    flops(lambda way=way: way(hidden, head, answers).backward())
    for way in (plain, chunked)
]
print(
    f"products: {work[1] / work[0]:.1%} of plain's; "
    f"in the real rows {TRAINED_SHARE:.1%} of the tokens are trained"
)
assert work[1] / work[0] == 94 / 128

# %% [markdown]
# ## 3. Prove it
# The claim is *exact within rounding*, so how much rounding? In fp32 an operation moves its result by
# $u = 2^{-24}$ of it at most. A logit is a sum of $D$ products: it moves by $\delta = D u \sum_i |h_i w_i|$ at most. A
# probability moves, as a share of itself, by $2 \delta$, and by $u$ for each operation on its way: $V$ in the sum over
# all words, $V$ in the product with the head, and some for rounded exponents. That is $k$ below, and it bounds
# everything. Look for $C$ in it: it is not there.

# %%
u = 2.0**-24


def exact_and_bound(hidden, head, labels):
    """Loss and both gradients in float64, and how far fp32 may be from them."""
    H, W = hidden.detach().double(), head.detach().double()
    z = H @ W.T
    largest, total = z.abs().amax(1, keepdim=True), z.logsumexp(1, keepdim=True)
    delta = d * u * (H.abs() @ W.abs().T).amax(1, keepdim=True)
    k = 2 * delta + (2 * v + 8 * largest + 32) * u
    p, y, losses = (
        (z - total).exp(),
        F.one_hot(labels, v),
        total - z.gather(1, labels[:, None]),
    )
    exact = losses.sum(), (p - y) @ W, (p - y).T @ H
    return exact, (
        (k + n * u * losses).sum(),
        k * (p + y) @ W.abs(),
        (k * (p + y)).T @ H.abs(),
    )


# now the head trains, too
h32, w32 = hidden.detach().float().requires_grad_(), head.float().requires_grad_()
exact, bound = exact_and_bound(h32, w32, labels)
for C in (None, 1, 7, 16, n):
    loss = plain(h32, w32, labels) if C is None else Chunked.apply(h32, w32, labels, C)
    found = (loss, *torch.autograd.grad(loss, [h32, w32]))
    used = [
        ((f - e).abs() / b).max().item()
        for f, e, b in zip(found, exact, bound, strict=True)
    ]
    name = f"C = {C}" if C else "plain"
    print(
        f"{name:8} of the bound: loss {used[0]:.1%}, hidden {used[1]:.1%}, "
        f"head {used[2]:.1%}"
    )
    assert max(used) < 1

# %% [markdown]
# Plain and chunked are about as far from the truth. Only two sums cross a chunk's border, the loss and the head's
# gradient; both are kept in fp32. The gradient of a hidden state is a sum inside one token, whatever the chunk.
#
# Now the package's function, torch's own `linear_cross_entropy` (from 2.13 on), and the whole production path: a small
# Llama with peft's LoRA, whose adapters lie below the loss.


# %%
def torchs(hidden, head, labels, chunk):
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
    return F.linear_cross_entropy(
        hidden, head, labels, reduction="sum", options=options
    )


def apart(found, expected):
    return ((found - expected).norm() / expected.norm()).item()


(ours,) = torch.autograd.grad(Chunked.apply(h32, w32.detach(), labels, 16), h32)
for theirs in (
    (chunked_cross_entropy, torchs)
    if hasattr(F, "linear_cross_entropy")
    else (chunked_cross_entropy,)
):
    (its,) = torch.autograd.grad(theirs(h32, w32.detach(), labels, 16), h32)
    assert apart(ours, its) < 2e-6

config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=v,
)
# B is not zero
lora = LoraConfig(
    task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False
)
model = get_peft_model(LlamaForCausalLM(config), lora)
batch = {"input_ids": labels.view(2, 64), "labels": answers.view(2, 64)}
adapters = [p for p in model.parameters() if p.requires_grad]
full, pieces = (
    losses.full_loss_sum(model, batch),
    losses.chunked_loss_sum(model, batch, 16),
)
gradients = [torch.autograd.grad(loss, adapters) for loss in (full, pieces)]
worst = max(apart(found, expected) for expected, found in zip(*gradients, strict=True))
print(
    f"a Llama: losses {full.item():.4f} and {pieces.item():.4f}, "
    f"gradients of its adapters {worst:.1e} apart"
)
assert abs(pieces / full - 1) < 1e-6
assert worst < 1e-5

# %% [markdown]
# ## 4. What it costs
# **Products.** Call one of $2 N D V$ operations a unit. Plain: one forward, one back to the hidden states, one more for
# a head that trains. Ours makes the same ones, earlier. The usual way to write this by hand is to *checkpoint* the head
# chunk by chunk: it makes the logits twice. Predict all six.

# %%
w = head.clone().requires_grad_()
ways = {
    "plain": plain,
    "ours": chunked,
    "checkpointed": partial(checkpoint, plain, use_reentrant=False),
}
for name, way in ways.items():
    units = [
        flops(lambda way=way, m=m: way(hidden, m, labels).backward()) / (2 * n * d * v)
        for m in (head, w)
    ]
    print(f"{name:13} frozen head {units[0]:.0f}, trained head {units[1]:.0f}")
    assert units == ([3, 4] if name == "checkpointed" else [2, 3])
t4 = CARDS["t4"]
print(
    "on a T4 at its best the third product of a row takes "
    f"{1000 * 2 * N * D * V / t4.half_flops:.0f} ms"
)

# %% [markdown]
# **The chunk.** Small chunks read the head again and again: $2 V D$ bytes, 501 MiB, for a product of $2 C V D$
# operations. That is about $C$ operations a byte. A T4 does $65 \cdot 10^{12}$ operations while it reads
# $320 \cdot 10^9$ bytes: 203 to one. So beneath some 200 tokens the card waits for the head; above, more tokens only
# cost memory. Guess the best power of two, then look.


# %%
def milliseconds(C):
    """Both products of a row, by the data sheet: computing or reading, whichever is
    longer."""
    read = 2 * V * D + 2 * C * V + 2 * C * D
    return (
        1000 * 2 * (N / C) * max(2 * C * V * D / t4.half_flops, read / t4.memory_rate)
    )


sizes = [16, 32, 64, 128, 256, 512, 1024, 2048]
for C in sizes:
    print(
        f"C = {C:4}: {8 * C * V / MIB:8,.1f} MiB of logits, "
        f"products of a row {milliseconds(C):5.0f} ms"
    )
# Bytes a logit: widen it; log-sum-exp (largest, subtract, exp, sum); subtract; exp;
# narrow it.
touched = (2 + 4) + (4 + 8 + 8 + 4) + 8 + 8 + (4 + 2)
print(
    f"and all but the products: {touched} bytes a logit, "
    f"{1000 * touched * N * V / t4.memory_rate:.0f} ms for any C"
)
assert (
    min(C for C in sizes if milliseconds(C) == milliseconds(2048))
    == TOKENS_PER_CHUNK
    == 256
)


# %% Draw figure 2 tags=["hide-input"]
def of_chunks(theme: Theme):
    """Bytes and milliseconds against the chunk."""
    drawn, (left, right) = panels(2, 3.2)
    base = course.bill(after)
    without = base.peak_bytes - 8 * TOKENS_PER_CHUNK * V
    next_one = sorted(moment.bytes for moment in base.moments)[-2]
    left.plot(
        sizes,
        [(without + 8 * C * V) / MIB for C in sizes],
        color=theme.series[0],
        marker="o",
        markersize=4,
    )
    left.axhline(next_one / MIB, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    left.text(
        16, next_one / MIB - 110, "next: the last block", color=theme.quiet, va="top"
    )
    left.set(ylabel="peak of the step, MiB", ylim=(0, None))
    right.plot(
        sizes,
        [milliseconds(C) for C in sizes],
        color=theme.series[1],
        marker="s",
        markersize=4,
    )
    right.set(ylabel="both products of a row, ms, data sheet", ylim=(0, None))
    for axes in (left, right):
        axes.axvline(256, color=theme.series[2], linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(C) for C in sizes])
        axes.set_xlabel("tokens of a chunk")
        axes.grid(axis="y")
    return drawn


course.show(
    of_chunks,
    "Figure 2. Left: larger chunks cost bytes, smaller ones soon gain little. "
    "Right: beneath 256 tokens a T4 waits for "
    "the head. The line is our choice, 256.",
)

# %% [markdown]
# What we leave on the table is that last line: a fused kernel, such as Liger's, reads 16-bit logits twice and writes
# them once, 6 bytes. And is the estimate any good? By Liger's rule (below) 4,096 tokens of Llama-3-8B go in chunks of
# 128, and 32,768 in chunks of 1,024. Its own table, on an A100 of 80 GB, whose border lies at 153: 2.2 and 1.13 times
# the plain loss's time. It fits; but there the head trains, and adding its gradient up in every chunk costs, too.

# %%
step_of = "peft=lora attention=best precision=best gradient_checkpointing=true"
course.on_a_gpu("chunked_loss", off=step_of, on=f"{step_of} chunked_loss=true")

# %% [markdown]
# ## 5. The production switch

# %%
print("--set tricks.chunked_loss=true")
print(diff(resolve(before, T4), resolve(after, T4)))
course.show_bill(before, after)

# %%
learning = course.bill(after).facts.trained_weights
predicted = {
    "logits": 8 * 256 * V - 12 * N * V,
    "16-bit copies of weights": 2 * learning,
    "final norm": 4 * N * D,
    "hidden states for the loss": (4 + 2 + 2) * (N - 1) * D,
}
print({name: f"{size / MIB:+,.1f}" for name, size in predicted.items()})
assert course.bill(after).peak_bytes - course.bill(before).peak_bytes == sum(
    predicted.values()
)

# %% [markdown]
# Three lines grew, by 69.5 MiB together. They show that the peak has moved from the backward pass *into the forward
# pass*. There autocast still holds its 16-bit copies of what trains, and the final norm's result is in use. The trained
# tokens' hidden states are there in fp32 and once more in 16 bits, with their gradients beside them. The head's 501 MiB
# in 16 bits are there as before; [the lesson on lean preparation](mixed_precision.py) asks why. Smaller chunks can
# gain no more than the distance to the next peak. And how long may a row be now?

# %%
first, second = sorted(
    (moment.bytes for moment in course.bill(after).moments), reverse=True
)[:2]
print(f"the next peak, in the last block, is {(first - second) / MIB:,.0f} MiB below")
for name, recipe in (("before", before), ("after", after)):
    print(
        f"{name}: {toggles.longest(toggles.Target(shape, T4), recipe):,} "
        "tokens fit a T4"
    )

# %%
course.show(
    course.staircase("chunked_loss"),
    "Figure 3. The bill so far: half of it was logits.",
)

# %% [markdown]
# **Others cut, too.** All of them exact within rounding, or nearly:
#
# | | cuts | gradient | prompts | note |
# |---|---|---|---|---|
# | ours | 256 tokens | in the forward pass | skipped | plain torch |
# | torch 2.13 | tokens, by Liger's rule | in the forward pass | computed | with `options` only; a bf16 loss is bf16 |
# | Liger-Kernel | $N / \lceil V / D \rceil$ tokens, up to a power of two | in the forward pass | computed | Triton |
# | Unsloth | tokens, by the memory that is free | in the forward pass | computed | compiled |
# | TRL 1.16 | 4,096 tokens × 32,768 words | logits twice | skipped, on a card | SFTTrainer's default |
# | Cut Cross-Entropy | tiles that never leave the chip | logits twice | skipped | leaves tiny gradients out; Triton |
#
# Cutting words needs a running log-sum-exp (exercise 3) and adds each token's gradient up across tiles: TRL does so in
# fp32, as 16 bits drifted. Cut Cross-Entropy takes the loss of Gemma 2 from 24 GB to 1 MB. Its README asks for an
# Ampere card, which a T4 is not.
#
# ## 6. Where it breaks
# **`nan`, from the first step on.** Somebody took each chunk's *mean*. A prompt fills a whole chunk, and its mean is
# 0 / 0. The obvious patch, leaving such chunks out, is worse: the loss looks right. But a chunk with one trained token
# now weighs as much as one with 16.

# %%
means = torch.stack(
    [
        F.cross_entropy(h @ w32.T, y)
        for h, y in zip(h32.split(16), answers.split(16), strict=True)
    ]
)
print(f"chunks' means: {means.mean().item()}")
assert means.mean().isnan()

# chunks of 16 trained tokens, of 1, and of none
short = labels.masked_fill(torch.arange(n) % 64 > 16, -100)
counted = (short != -100).sum()
right = chunked(h32, w32.detach(), short) / counted
patched = torch.stack(
    [
        F.cross_entropy(h @ w32.detach().T, y)
        for h, y in zip(h32.split(16), short.split(16), strict=True)
    ]
).nanmean()
wrong, cured = (torch.autograd.grad(loss, h32)[0] for loss in (patched, right))
plain_mean = F.cross_entropy(h32 @ w32.T, short)
print(
    f"loss {patched.item():.3f} patched, {right.item():.3f} cured; "
    f"its gradient off by {apart(wrong, cured):.0%}"
)
assert apart(wrong, cured) > 0.5
assert apart(torch.autograd.grad(plain_mean, h32)[0], cured) < 1e-5

# %% [markdown]
# Cure: sum, and divide once, by all trained tokens of the optimizer step ([gradient
# accumulation](gradient_accumulation.py)). A chunk without any adds 0. If the whole *batch* has none, no formula helps:
# look at the labels.
#
# **A good part of the gradient is gone, silently, in fp16.** [The lesson on mixed precision](mixed_precision.py)'s loss
# scale multiplies the *loss*, so that small gradients live. But ours are made in the forward pass, before anyone has
# multiplied. A sure model leaves each of 100,000 wrong words $10^{-8}$; fp16 ends at $6 \cdot 10^{-8}$. Cure: lift the
# probabilities by 1,024 before they become fp16, and divide in fp32 after the product, as the package does. (Unsloth
# hands the loss scale in.)

# %%
words, label = 100_000, torch.tensor([7, 7])
# the wrong words pull together, so losing them shows
table = torch.randn(words, d) * 0.01 + 0.3
table[7] += 1.0
sure = torch.full((2, d), 0.575)
exact_grad = ((sure @ table.T).softmax(1) - F.one_hot(label, words)) @ table
low = sure.half().requires_grad_()
off_by = {}
for name, way in (("ours", Chunked.apply), ("the package's", chunked_cross_entropy)):
    (found,) = torch.autograd.grad(way(low, table.half(), label, 2), low)
    off_by[name] = apart(found.float(), exact_grad)
    print(f"{name:14} gradient off by {off_by[name]:.0%}")
assert off_by["the package's"] < off_by["ours"] / 2

# %% [markdown]
# The rest is the 16 bits of the logits and of their products, which plain training has as well. It depends on how a
# processor adds up fp16.
#
# ## 7. Exercises
# 1. **Predict.** Another model knows 151,936 words and gets rows of 4,096 tokens. With chunks of 256, how many times
#    fewer bytes do its logits take at the peak than with plain cross entropy? Your answer is a number, above 1.
# 2. **Build.** Gemma 2 caps its logits: $c \tanh(z / c)$ takes the place of $z$. Fill in `capped` for one chunk, by
#    hand, without autograd. It returns two things: the loss, summed over the tokens (a tensor without dimensions), and
#    its gradient to the hidden states, shaped like `hidden`. (About six lines. The derivative of $\tanh$ is
#    $1 - \tanh^2$.)
# 3. **Reach.** Cut the words: `logsumexp_in_slices` computes each token's log-sum-exp with the logits of `width` words
#    at a time, and returns a tensor of shape (tokens,). Some logits are beyond 88, where $e^z$ is infinite in fp32, and
#    some far below zero. (`torch.logaddexp` merges two.)

# %% tags=["exercise"]
times_fewer = None


def capped(hidden, head, labels, c):
    """FILL ME IN: return the summed loss, and its gradient to hidden."""


def logsumexp_in_slices(hidden, head, width):
    """FILL ME IN: return a tensor of shape (len(hidden),)."""


# %% Check the exercises tags=["hide-input"]
def fitting(found, mistakes, otherwise):
    """Return the hint for the mistake that gives this result, or else the hint in
    `otherwise`."""
    return next(
        (hint for hint, wrong in mistakes if apart(found, wrong) < 1e-5), otherwise
    )


def of_capped(answer):
    head, y = w32.detach(), F.one_hot(labels, v)
    for c in (2.0, 5.0):
        with torch.no_grad():
            found = answer(h32.detach(), head, labels, c)
        if found is None:
            raise NotImplementedError
        loss, of_hidden = found
        assert loss.shape == (), (
            f"the loss has shape {tuple(loss.shape)}; sum it over the tokens"
        )
        assert of_hidden.shape == h32.shape, (
            f"the gradient has shape {tuple(of_hidden.shape)}, and hidden {(n, d)}"
        )
        z = h32.detach() @ head.T
        squashed = (z / c).tanh()
        slope, total = 1 - squashed**2, (c * squashed).logsumexp(1)
        summed = partial(F.cross_entropy, target=labels, reduction="sum")
        right = summed(c * squashed)
        mistakes = [
            ("that is the loss without a cap", summed(z)),
            ("that is the mean; sum it over the tokens", right / n),
            (
                "the label's own logit is capped, too",
                (total - z.gather(1, labels[:, None])[:, 0]).sum(),
            ),
            ("what is inside the tanh is divided by c", summed(c * z.tanh())),
            ("the tanh is multiplied by c", summed(squashed)),
        ]
        assert apart(loss, right) < 1e-5, (
            f"c = {c}: a wrong loss; {fitting(loss, mistakes, 'cap all logits first')}"
        )
        of_z = (c * squashed).softmax(1) - y  # of the capped logits
        twice = "c comes in twice, in c tanh and in z / c; what is left of it?"
        mistakes = [
            ("the gradient goes through tanh as well, and its slope is missing", of_z),
            ("the label's share is missing: softmax minus one-hot", (of_z + y) * slope),
            (
                "the slope is 1 - tanh^2 of tanh itself, not of the capped logits",
                of_z * (1 - (c * squashed) ** 2),
            ),
            (twice, of_z * slope * c),
            (twice, of_z * slope / c),
            (
                "the loss is a sum, so nothing is divided by the number of tokens",
                of_z * slope / n,
            ),
            ("take the softmax of the capped logits", (z.softmax(1) - y) * slope),
            ("its sign is wrong", -of_z * slope),
        ]
        hint = fitting(
            of_hidden,
            [(hint, wrong @ head) for hint, wrong in mistakes],
            "compare it with autograd's",
        )
        assert apart(of_hidden, (of_z * slope) @ head) < 1e-4, (
            f"c = {c}: a right loss, and a wrong gradient; {hint}"
        )


def of_slices(answer):
    # the last column adds the same to all logits of a token
    table = torch.cat([w32.detach(), torch.ones(v, 1)], dim=1)
    for name, times, shift in (
        ("beyond 88", 20, 0.0),
        ("far below zero", 1, -300.0),
        ("around zero", 1, 0.0),
    ):
        hidden = torch.cat([times * h32.detach(), torch.full((n, 1), shift)], dim=1)
        right = (hidden @ table.T).logsumexp(1)
        for width in (300, 100, v):  # the first leaves a narrower last slice
            if (found := answer(hidden, table, width)) is None:
                raise NotImplementedError
            case = f"logits {name}, slices of {width}"
            assert found.shape == (n,), (
                f"{case}: the shape is {tuple(found.shape)}, not {(n,)}"
            )
            assert found.isfinite().all(), (
                f"{case}: not finite; take logsumexp inside the slice, "
                "and merge logarithms"
            )
            hint = "is every word counted once, in the last slice, too?"
            if torch.allclose(found, right.logaddexp(torch.zeros(n)), rtol=1e-5):
                hint = (
                    "a total that starts from 0 has counted one more word, of logit 0"
                )
            assert torch.allclose(found, right, rtol=1e-5), (
                f"{case}: off by {(found - right).abs().max():.2g}; {hint}"
            )
    most = peak_bytes(lambda: answer(hidden, table, 100), alive=(hidden, table))
    assert most < n * v, (
        f"{most:,} bytes at the peak, and 100 words need {4 * n * 100:,}: "
        "too many words live at once"
    )


course.check(
    1,
    times_fewer,
    course.about(
        24,
        "divide plain's bytes of a logit x tokens x words at the peak by chunked's; "
        "which factor cancels?",
        within=1e-6,
        mistakes={
            16: "at the peak plain and chunked differ in the bytes of a logit, too",
            12: "these rows have 4,096 tokens, not 2,048",
            16 * 8 / 12: "which of the two has more bytes a logit?",
            1 / 24: "the question is how many times fewer, "
            "so divide the larger by the smaller",
            24 * 151_936 / 128_256: "both ways have the same words",
        },
    ),
    "a number, how many times fewer bytes",
)
course.check(
    2,
    capped,
    of_capped,
    "a function (hidden, head, labels, c) -> the loss, summed, and its gradient, "
    "shaped like hidden; without autograd",
)
course.check(
    3,
    logsumexp_in_slices,
    of_slices,
    "a function (hidden, head, width) -> log-sum-exps, a tensor of shape (tokens,)",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# times_fewer = 12 * 4096 / (8 * 256)  # the vocabulary cancels
#
#
# def capped(hidden, head, labels, c):
#     squashed = (hidden @ head.T / c).tanh()
#     logits = c * squashed
#     total = logits.logsumexp(1, keepdim=True)
#     loss = (total - logits.gather(1, labels[:, None])).sum()
#     grad = (logits - total).exp() - F.one_hot(labels, len(head))
#     return loss, grad * (1 - squashed**2) @ head
#
#
# def logsumexp_in_slices(hidden, head, width):
#     total = torch.full((len(hidden),), -torch.inf)
#     for part in head.split(width):
#         total = torch.logaddexp(total, (hidden @ part.T).logsumexp(1))
#     return total
# ```
#
# </details>
#
# ## In one breath
# - **Saves** all logits but one chunk's: $12\,N V \to 8\,C V$ bytes; 2,756 MiB of our 5,357, and the
#   peak falls to 2,671.
# - **Costs** no product; the head is read once a chunk. A head that trains holds its gradient, $4\,V D$ bytes, from the
#   forward pass on.
# - **Exact within rounding**: the bound is plain cross entropy's, and has no $C$ in it.
# - **When**: a large vocabulary over a small model, or long rows. Then it is the first thing to switch on.
# - **When not**: somebody reads the logits (accuracy, distillation); the head trains or has an adapter, which our
#   switch refuses; or a small vocabulary leaves little to cut.
#
# ## Sources
# - Wijmans et al. 2024, *Cut Your Losses in Large-Vocabulary Language Models*, arXiv 2411.09009, section 4; the
#   README of `apple/ml-cross-entropy` (Ampere; 24 GB to 1 MB).
# - Hsu et al. 2024, *Liger Kernel*, arXiv 2410.10989, section 3.2; its `ops/fused_linear_cross_entropy.py` (the rule),
#   `ops/cross_entropy.py` (the passes) and `benchmark/data/all_benchmark_data.csv` (version 0.4.2, A100 80 GB, bf16).
# - `unsloth_zoo/fused_losses/cross_entropy_loss.py` of unsloth-zoo; `trl/kernels/chunked_logprob.py` and
#   `add_fused_lm_head` in `trl/trainer/utils.py` of TRL 1.16.
# - torch 2.13: `linear_cross_entropy` in `torch/nn/functional.py`, `nn/modules/linear_cross_entropy_options.py`.
# - transformers 5.23: `loss/loss_utils.py`. NVIDIA's data sheets of T4 and A100, for the rates.
# - Ours: `cria_tricks/tricks/chunked_loss.py`, `tests/tricks/test_chunked_loss.py`.
