# ---
# jupyter:
#   question: Why does the loss of one row take 3 GiB, and how can it take 250 MiB with the same gradients?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Chunked loss: the logits of a few tokens at a time
# > **Promise.** Your step runs through all blocks, and then dies in the loss with `CUDA out of memory`. The cause is
# > the logits: 128,256 scores for every token of the row. You will write a loss that holds the logits of at
# > most 256 tokens, prove its gradients, and then train on rows that are four times as long.
# >
# > **Card.** saves the logits of all tokens but 256, so our peak falls from 8,122 to 5,614 MiB / costs reading the head
# > twice for each chunk, but no FLOPs / exact within rounding / about 25 minutes / after [gradient
# > checkpointing](gradient_checkpointing.py)
#
# The job is LoRA of Llama-3.2-1B in fp32 on a T4 (14.74 GiB), with one row of 2,048 tokens in a step. Fused attention
# and checkpointing are on, so the blocks save little. The bill is 8,122 MiB, and its second largest line exists only
# to compute the loss.

# %% Imports and settings tags=["hide-input"]
from functools import partial

import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM

from cria_tricks import BadInput, course
from cria_tricks.course import (
    CARDS,
    T4,
    TOKENS_PER_CHUNK,
    Theme,
    diff,
    find_shape,
    losses,
    panels,
    quiet_libraries,
    resolve,
    toggles,
    with_settings,
)
from cria_tricks.course import time_bill as step
from cria_tricks.switches.chunked_loss import LOGIT_BYTES
from cria_tricks.techniques import chunked_loss

quiet_libraries()
torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## 1. The bill
# The last layer of a language model is the *head*, a matrix of shape $(V, D)$. It turns the hidden state of each token,
# $D$ numbers, into [logits](../docs/glossary.md#logits): one score for each of the $V$ tokens of the vocabulary. We
# call them *words*, and only the positions of a row *tokens*. Cross entropy compares these scores with the word that
# comes next.
#
# In Llama-3.2-1B $D$ is 2,048 and $V$ is 128,256, and our one row has $N = 2{,}048$ tokens. How large is the matrix
# of its logits, at 4 bytes a number?

# %% Your guess: MiB of the fp32 logits of one row tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
before = course.so_far("gradient_checkpointing")
shape = find_shape(before.model)
N, V, D = 2048, shape.vocabulary, shape.width
course.reveal(guess, 4 * N * V / MIB, "MiB")

lines = {line.name: line.bytes for line in course.bill(before).lines}
for name, size in lines.items():
    if size > 100 * MIB:  # the large lines of the bill
        print(f"{name:20}{size / MIB:8,.0f} MiB")
print(f"for each token: {lines['logits'] // N:,} bytes of logits")
print(f"for each token: {lines['saved activations'] // N:,} bytes of saved activations")

# %% Draw figure 1, and check the numbers of the text tags=["hide-input"]
assert lines["logits"] == 12 * N * V
assert round(lines["logits"] / MIB) == 3006
assert lines["saved activations"] == 128 * 1024 * N
SQUARES = (
    ("logits", "used up"),
    ("log p", "saved"),
    ("gradient", "of log p"),
    ("gradient", "of logits"),
)


def what_lives(theme: Theme):
    """Plain and chunked at their peaks."""
    sketch = course.Sketch(theme, 41, 14.2)
    sketch.text(0, 2.6, "plain", align="left")
    for place, (name, more) in enumerate(SQUARES):
        left = 6 + 8.4 * place
        sketch.tensor(left, 0.6, 7.4, 4.6, "", color=0, kept=place > 0)
        sketch.text(left + 3.7, 2.3, name)
        sketch.text(left + 3.7, 3.5, more)
    sketch.text(5.2, 2.9, "N", quiet=True)
    sketch.text(9.7, 5.9, "V", quiet=True)
    sketch.text(14.4, 5.9, "at the peak: 12 N V bytes", align="left", quiet=True)
    sketch.text(0, 7.2, "chunked", align="left")
    for left, name in ((6, "logits"), (14.4, "exp")):
        sketch.tensor(left, 7.6, 7.4, 4.6, "", color=0, kept=False)
        sketch.tensor(left, 9.0, 7.4, 1.4, name, color=1)
    sketch.tensor(23.2, 7.6, 0.8, 4.6, "", color=2)
    sketch.text(24.8, 9.3, "gradient of the", align="left")
    sketch.text(24.8, 10.5, "hidden states, N × D", align="left")
    sketch.text(5.2, 9.7, "C", quiet=True)
    sketch.text(6, 13.2, "at the peak: 8 C V bytes", align="left", quiet=True)
    return sketch.figure


course.show(
    what_lives,
    "Figure 1. At its peak, plain cross entropy holds three matrices with a number for "
    "every token and word; the chunked loss holds two thin slices of C tokens, and the "
    "gradient of the hidden states.",
)

# %% [markdown]
# The bill has 3,006 MiB of logits, three times 1,002, because three matrices of this size are alive at the peak. In the
# forward pass cross entropy computes the logarithms of all probabilities, and autograd saves them. The backward pass
# makes the gradient of these logarithms, and then that of the logits. So the peak has $4 + 4 + 4 = 12$ bytes for each
# logit, $12\,N V$ in all. For each token this is 1.5 MiB, while all 16 checkpointed blocks together save 128 KiB.
#
# ## 2. From scratch, in four steps
# We build the loss on a small head, with a vocabulary of 2,000 words. It is frozen, as with LoRA, so only the
# hidden states get a gradient.
#
# **Step 1** is a loop over chunks. The loss of a token needs only the logits of that token, so we can take $C$ tokens
# at a time and add up their losses.

# %%
import torch
import torch.nn.functional as F

from cria_tricks.course import flops, peak_bytes

torch.manual_seed(0)
n, d, v = 128, 32, 2000  # tokens, width, words
hidden = torch.randn(n, d, requires_grad=True)
head = torch.randn(v, d) / 5
labels = torch.randint(v, (n,))  # the word that follows each token


def plain(hidden, head, labels):
    """As transformers does it: the losses of all tokens, added up."""
    return F.cross_entropy(hidden @ head.T, labels, reduction="sum")


def peak(loss):
    """Peak memory of forward and backward pass, in bytes."""

    def step():
        loss(hidden, head, labels).backward()

    return peak_bytes(step, alive=(hidden, head, labels))


def in_a_loop(hidden, head, labels, chunk=16):
    total = 0
    for start in range(0, len(labels), chunk):
        here = slice(start, start + chunk)
        total = total + plain(hidden[here], head, labels[here])
    return total


for loss in (plain, in_a_loop):
    print(f"{loss.__name__:10} {peak(loss) / (n * v):5.2f} bytes a logit")
assert peak(plain) == 12 * n * v + 8  # and two scalars

# %% [markdown]
# The loop needs 5 bytes a logit instead of 12. Autograd saves 4 of them, the logarithms, for every chunk, because
# the backward pass needs them. The fifth belongs to one chunk in its backward pass: 8 bytes for 16 of 128 tokens.
#
# **Step 2** is to write the gradient down. For a token with logits $z$ and label $y$ the loss is $\log \sum_w e^{z_w} -
# z_y$, and its gradient is "softmax minus one-hot":
#
# $$\frac{\partial\,\text{loss}}{\partial z_w} = \frac{e^{z_w}}{\sum_u e^{z_u}} - [w = y]$$
#
# This formula needs nothing but the logits. So we can compute the gradient already in the *forward pass*, while
# they are in memory. A matrix multiplication with the head turns it into the gradient of the hidden
# states, which is small: $D$ numbers for each token instead of $V$.


# %%
def one_chunk(hidden, head, labels):
    """The loss of a few tokens, and its gradient for their hidden states."""
    logits = hidden @ head.T
    total = logits.logsumexp(1, keepdim=True)
    loss = (total - logits.gather(1, labels[:, None])).sum()
    # softmax, in the memory of the logits: autograd records nothing here
    grad = logits.sub_(total).exp_()
    grad[torch.arange(len(labels)), labels] -= 1  # minus one-hot
    return loss, grad @ head


(by_autograd,) = torch.autograd.grad(plain(hidden, head, labels), hidden)
_, by_formula = one_chunk(hidden.detach(), head, labels)
torch.testing.assert_close(by_formula, by_autograd)

# %% [markdown]
# **Step 3** is to return the loss and to save only the small gradient, in a `torch.autograd.Function`. When `one_chunk`
# returns, its logits are freed, so the next chunk can reuse the memory. The backward pass only multiplies by `above`,
# the gradient of the operations after the loss. The peak should be $8\,C V$ bytes, namely a chunk's logits and their
# exponentials inside `logsumexp`, and the small gradient.
#
# **Step 4**, `chunked` in the second cell, skips what is not trained. Prompts and padding have the label -100, which
# means "no loss here". Plain cross entropy computes their logits and then ignores them. We select the trained tokens
# before the head, which also saves FLOPs.


# %%
class Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, head, labels, chunk):
        loss = hidden.new_zeros(())
        of_hidden = torch.empty_like(hidden)
        for start in range(0, len(labels), chunk):
            here = slice(start, start + chunk)
            piece, of_hidden[here] = one_chunk(hidden[here], head, labels[here])
            loss += piece
        ctx.save_for_backward(of_hidden)
        return loss

    @staticmethod
    def backward(ctx, above):
        (of_hidden,) = ctx.saved_tensors
        return above * of_hidden, None, None, None


for C in (8, 16, 32):

    def in_chunks(hidden, head, labels, chunk=C):
        return Chunked.apply(hidden, head, labels, chunk)

    found = peak(in_chunks)
    predicted = 8 * C * v + hidden.nbytes  # the logits and their exp; the gradient
    print(f"C = {C:2}: predicted {predicted:,} bytes, counted {found:,}")
    assert 0 <= found - predicted < 1024


# %%
def chunked(hidden, head, labels, chunk=16):
    trained = labels != -100
    return Chunked.apply(hidden[trained], head, labels[trained], chunk)


answers = labels.clone()
answers[:34] = -100  # a prompt of 34 tokens, then an answer of 94
work = {}
for loss in (plain, chunked):
    work[loss] = flops(lambda loss=loss: loss(hidden, head, answers).backward())
print(f"FLOPs of the head: {work[chunked] / work[plain]:.1%} of plain's")
assert work[chunked] / work[plain] == 94 / 128

# %% [markdown]
# ## 3. Prove it
# The claim is *exact within rounding*: the same formula, with sums in another order. The first cell measures how far
# each way is from a float64 computation. The second cell tests the package's own version of `Chunked`, on a small Llama
# with LoRA adapters in its blocks.


# %%
def apart(found, expected):
    """The distance of two tensors, relative to the size of the expected one."""
    return ((found - expected).norm() / expected.norm()).item()


wide = hidden.detach().double().requires_grad_()
(truth,) = torch.autograd.grad(plain(wide, head.double(), labels), wide)
error = apart(by_autograd.double(), truth)
print(f"plain   off by {error:.1e}")
for C in (1, 7, 16, n):  # C = 1: a matrix times a vector is another routine of torch
    (found,) = torch.autograd.grad(Chunked.apply(hidden, head, labels, C), hidden)
    print(f"C = {C:3} off by {apart(found.double(), truth):.1e}")
    assert apart(found.double(), truth) < 4 * error

# %% Set-up: a small Llama with LoRA tags=["hide-input"]
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=v,
)
# init_lora_weights=False makes B random: with B = 0 the gradients of A would be zero
lora = LoraConfig(
    task_type="CAUSAL_LM", target_modules="all-linear", init_lora_weights=False
)
model = get_peft_model(LlamaForCausalLM(config), lora)
batch = {"input_ids": labels.view(2, 64), "labels": answers.view(2, 64)}

# %%
adapters = [p for p in model.parameters() if p.requires_grad]
full = losses.full_loss_sum(model, batch)
pieces = losses.chunked_loss_sum(model, batch, 16)
expected = torch.autograd.grad(full, adapters)
found = torch.autograd.grad(pieces, adapters)
worst = max(apart(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
print(f"losses {full.item():.4f} and {pieces.item():.4f}")
print(f"gradients of {len(adapters)} adapter matrices: at most {worst:.1e} apart")
assert abs(pieces / full - 1) < 1e-6
assert worst < 1e-5

# %% [markdown] tags=["deep"]
# ### Deeper: a bound on the rounding, and a head that trains
# In fp32 one operation changes its result by at most $u = 2^{-24}$ of it. A logit is a sum of $D$ products, so it moves
# by at most $\delta = D u \sum_i |h_i w_i|$. A probability moves by $2 \delta$ of itself, and by $u$ for each operation
# on its way: $V$ in the sum over all words, $V$ in the multiplication with the head, and a few for rounded exponents.
# Together that is $k$ in the code below, and $k$ bounds the errors of the loss and of both gradients. Note that the
# size of a chunk, $C$, does not occur in it.
#
# If the head trains as well, its gradient is the gradient of the logits times the hidden states, added up over the
# chunks. It has $V D$ numbers, 1,002 MiB of fp32 for Llama-3.2-1B, and our way would keep it from the forward pass on.
# Full fine-tuning holds such a gradient in any case, and torch's and Liger's functions compute it. Ours does not, so
# the package refuses a head that trains. (Its computation is one more unit of FLOPs in section 4, for every way of
# computing the loss.)

# %% tags=["deep"]
u = 2.0**-24


def both_gradients(hidden, head, labels, chunk):
    """The summed loss, and its gradients for the hidden states and the head."""
    loss, of_hidden, of_head = 0.0, [], torch.zeros_like(head)
    for h, y in zip(hidden.split(chunk), labels.split(chunk), strict=True):
        logits = h @ head.T
        total = logits.logsumexp(1, keepdim=True)
        loss = loss + (total - logits.gather(1, y[:, None])).sum()
        grad = (logits - total).exp() - F.one_hot(y, len(head))
        of_hidden.append(grad @ head)
        of_head += grad.T @ h  # this sum, and the loss, cross the borders of chunks
    return loss, torch.cat(of_hidden), of_head


def exact_and_bound(hidden, head, labels):
    """The same three in float64, and how far fp32 may be from each of them."""
    H, W = hidden.double(), head.double()
    z = H @ W.T
    largest, total = z.abs().amax(1, keepdim=True), z.logsumexp(1, keepdim=True)
    delta = d * u * (H.abs() @ W.abs().T).amax(1, keepdim=True)
    k = 2 * delta + (2 * v + 8 * largest + 32) * u
    p, y = (z - total).exp(), F.one_hot(labels, v)
    of_tokens = total - z.gather(1, labels[:, None])
    exact = of_tokens.sum(), (p - y) @ W, (p - y).T @ H
    bound = (
        (k + n * u * of_tokens).sum(),
        k * (p + y) @ W.abs(),
        (k * (p + y)).T @ H.abs(),
    )
    return exact, bound


h32, w32 = hidden.detach().requires_grad_(), head.clone().requires_grad_()
exact, bound = exact_and_bound(h32.detach(), w32.detach(), labels)
for C in (None, 1, 7, 16, n):
    if C is None:
        loss = plain(h32, w32, labels)
        results = (loss, *torch.autograd.grad(loss, [h32, w32]))
    else:
        results = both_gradients(h32.detach(), w32.detach(), labels, C)
    used = [
        ((f - e).abs() / b).max().item()
        for f, e, b in zip(results, exact, bound, strict=True)
    ]
    print(
        f"{f'C = {C}' if C else 'plain':8} share of the bound: loss {used[0]:.1%}, "
        f"hidden states {used[1]:.1%}, head {used[2]:.1%}"
    )
    assert max(used) < 1

# %% [markdown]
# ## 4. What it costs
# A common alternative needs no hand-written gradient: it *checkpoints* every chunk, so the backward pass computes the
# chunk's logits a second time. We count FLOPs in units of one matrix multiplication, $2 N D V$ operations. The plain
# loss with a frozen head takes two: the logits, and the gradient of the hidden states.


# %%
def checkpointed(hidden, head, labels, chunk=16):
    """The loop of step 1, but the backward pass computes the logits again."""
    total = 0
    for start in range(0, len(labels), chunk):
        here = slice(start, start + chunk)
        total = total + checkpoint(
            plain, hidden[here], head, labels[here], use_reentrant=False
        )
    return total


units = {}
for loss in (plain, chunked, checkpointed):
    count = flops(lambda loss=loss: loss(hidden, head, labels).backward())
    units[loss] = count / (2 * n * d * v)
    size = peak(loss) / (n * v)
    print(f"{loss.__name__:12} {units[loss]:.0f} units, {size:5.2f} bytes a logit")
assert list(units.values()) == [2, 2, 3]

# %% [markdown]
# Ours takes the same two units as the plain loss, only earlier. Its 1.13 bytes are 1 for the chunk, 0.064 for the
# gradient, and 0.064 for the copy `hidden[trained]`. Checkpointing saves nearly as much memory, but costs half as much
# computation again.
#
# **The size of a chunk.** Every chunk reads the whole head, so small chunks are slow. With fewer than about 50 tokens a
# T4 waits for the head's 1,002 MiB instead of computing (derived below). In [16 bits](mixed_precision.py) this limit is
# about 200 tokens, and so the package takes 256.
#
# **Measured.** With a GPU, the cell below measures a step of the 1B model without and with the chunked loss. Without a
# GPU it prints what a CPU measured for a tiny model. There the head is most of the work, so skipping the logits of
# prompts halves the time. In the 1B model head and loss are only 13 % of the predicted time.

# %% Draw figure 2, and check the package's choice tags=["hide-input"]
t4 = CARDS["t4"]


def milliseconds(C, rate, itemsize):
    """Both multiplications of a row at the speeds of a T4's data sheet."""
    computing = 2 * C * V * D / rate
    reading = itemsize * V * D / t4.memory_rate
    # the slower of the two decides; N / C chunks, two multiplications each
    return 1000 * 2 * (N / C) * max(computing, reading)


sizes = [16, 32, 64, 128, 256, 512, 1024]
after = course.so_far("chunked_loss")
at = {moment.name: moment.bytes for moment in course.bill(after).moments}
fits_fp32 = [C for C in sizes if milliseconds(C, t4.full_flops, 4) < 271]
fits_half = [C for C in sizes if milliseconds(C, t4.half_flops, 2) < 34]
assert (fits_fp32[0], fits_half[0], TOKENS_PER_CHUNK) == (64, 256, 256)


def of_chunks(theme: Theme):
    """Bytes and milliseconds against the chunk."""
    drawn, (left, right) = panels(2, 3.2)
    without = at["loss"] - 8 * TOKENS_PER_CHUNK * V
    rest = max(size for name, size in at.items() if name != "loss")
    left.plot(
        sizes,
        [max(without + 8 * C * V, rest) / MIB for C in sizes],
        color=theme.series[0],
        marker="o",
        markersize=4,
    )
    left.set(ylabel="peak of the step, MiB", ylim=(0, 7000))
    for (name, rate, itemsize), color, marker in zip(
        (("fp32", t4.full_flops, 4), ("16 bits", t4.half_flops, 2)),
        theme.series[1:],
        "sD",
        strict=False,
    ):
        right.plot(
            sizes,
            [milliseconds(C, rate, itemsize) for C in sizes],
            color=color,
            marker=marker,
            markersize=4,
            label=name,
        )
    right.set(ylabel="head, ms for a row", ylim=(0, None))
    right.legend()
    for axes in (left, right):
        axes.axvline(256, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(C) for C in sizes])
        axes.set_xlabel("tokens of a chunk")
        axes.grid(axis="y")
    return drawn


course.show(
    of_chunks,
    "Figure 2. The peak of the step: chunks of up to 256 tokens leave it where it is, "
    "and larger ones raise it. The time of the head: small chunks make a T4 wait, "
    "below 64 tokens in fp32 and below 256 in 16 bits. The dashed line is our choice, "
    "256.",
)

# %%
step_of = "peft=lora attention=best precision=best gradient_checkpointing=true"
course.on_a_gpu("chunked_loss", off=step_of, on=f"{step_of} chunked_loss=true")

# %% [markdown] tags=["deep"]
# ### Deeper: the limit of a chunk, and what a fused kernel saves
# A chunk reads $4\,V D$ bytes of the head for $2\,C V D$ operations, which is $C / 2$ operations for each byte. By its
# data sheet, a T4 computes $8.1 \cdot 10^{12}$ operations a second in fp32, and reads $320 \cdot 10^9$ bytes: 25
# operations for each byte. This gives the limit of 50 tokens. In 16 bits it computes eight times as fast and reads half
# as many bytes, so the limit is four times as high.
#
# Each of our operations reads and writes whole slices of logits, and the estimate counts 52 bytes for each logit. (The
# plain loss moves 36, but for prompts and padding as well.) A fused kernel, such as Liger's, reads 16-bit logits twice
# and writes them once, which is 6 bytes. We pay the difference for staying in plain torch.
#
# Is the estimate of the limit any good? Liger's rule gives chunks of 128 for 4,096 tokens of Llama-3-8B, and chunks of
# 1,024 for 32,768 tokens. Its own table was measured on an A100 of 80 GB, whose limit lies at 153 tokens. It says 2.2
# and 1.13 times the time of the plain loss. So chunks below the limit are slow there, as we predicted. However, in that
# table the head trains too, and adding up its gradient in every chunk also costs time.

# %% tags=["deep"]
touched = (2 + 4) + (4 + 8 + 8 + 4) + 8 + 8 + (4 + 2)  # in 16 bits
assert touched == LOGIT_BYTES
for rate, name in ((touched, "plain torch"), (6, "a fused kernel")):
    passes = 1000 * rate * N * V / t4.memory_rate
    print(f"{name:14} {rate:2} bytes a logit, {passes:3.0f} ms for a row on a T4")

# %% [markdown]
# ## 5. The production switch
# The Hugging Face code below checkpoints each chunk, so it pays the third unit of section 4. `[:, :-1]` and `[:, 1:]`
# pair each token with the next. **With LoRA**, its first two lines take the model out of peft's wrapper. Without
# them, `base_model` would compute all logits and return no `last_hidden_state`. Without `autocast()`, it would
# compute in fp32.
#
# The package has the hand-written gradient. Its recipe for a T4 has this switch off, because QLoRA fits without it and
# is faster. These commands train with it, and print the bill:
#
# ```bash
# cria train kwanzaa --set tricks.chunked_loss=true
# cria plan kwanzaa --gpu t4 --set tricks.chunked_loss=true
# ```

# %%
print(chunked_loss.PLAIN)
course.show_bill(before, after)
course.show_worth("chunked_loss")

# %% [markdown]
# The logits took 3,006 MiB, but the peak falls by only 2,508, because the peak is a maximum over moments. Before, the
# largest moment was the loss. Now it is the backward pass of the last block, which checkpointing recomputes (the lines
# *open block*). So the columns show two moments, and at the second no logits exist. The loss, with 250.5 MiB of logits,
# is 199 MiB below it, so smaller chunks would save nothing here.
#
# The finished job, with all later lessons, would need 2,710 MiB more without the switch, because there the largest
# moment is the loss in either case. The predicted time rises by 0.6 %, because our loss passes over the logits more
# often. (No public run trains in fp32 on a T4, so both times may be 0.6 to 1.7 times as long.)
#
# The saving grows with the row. A row *fits*, as in `cria plan`, if 5 % of the card stays free: tensors fill 11,847 of
# a T4's 15,095 MiB, CUDA takes 398, and torch's allocator may keep 2,094 unused. Weights, optimizer states and
# gradients stay as large; the other lines, 770 MiB for 2,048 tokens, grow with the row. (The last block stays the
# largest moment.) Before, a row of 4,374 tokens fitted. How many fit now?

# %% Your guess: tokens of the longest row that fits a T4 now tags=["predict"]
guess = 0  # @param {type:"number"}

# %% The longest row tags=["hide-input"]
target = toggles.Target(shape, T4)
course.reveal(guess, toggles.longest(target, after), "tokens")

# the other numbers of the text
first, second = sorted(at.values(), reverse=True)[:2]
assert (round((first - second) / MIB), at["last block"]) == (199, first)
assert second == at["loss"]
assert toggles.longest(target, before) == 4374
assert toggles.longest(target, after) == 18_624
assert round(course.bill(before).peak_bytes / MIB) == 8122
assert round(course.bill(after).peak_bytes / MIB) == 5614
seconds = [2048 * target.bill(recipe).seconds for recipe in (before, after)]
assert [round(some, 2) for some in seconds] == [8.22, 8.27]
assert round(target.bill(after).spread, 1) == 2.8
assert round(seconds[1] / seconds[0] - 1, 3) == 0.006
parts = {part.name: part.seconds for part in step(before, shape, t4).parts}
assert round((parts["head"] + parts["loss"]) / sum(parts.values()), 2) == 0.13
room = target.memory(after, 18_624)
assert round(room.peak_bytes / MIB) in (11_847, 11_848)
assert round(room.unused.bytes / MIB) in (2094, 2095)
without = with_settings(course.CAPSTONE, ["tricks.chunked_loss=false"])
more = course.bill(without).peak_bytes - course.bill(course.CAPSTONE).peak_bytes
assert round(more / MIB) == 2710
assert (
    course.bill(without).peak.name == course.bill(course.CAPSTONE).peak.name == "loss"
)
fixed = ("weights", "optimizer states", "gradients")
grows = sum(
    line.bytes for line in course.bill(after).lines if not line.name.startswith(fixed)
)
assert round(grows / MIB) == 770
assert target.memory(after, 18_624).peak.name == "last block"
assert room.verdict == "fits"
assert target.memory(after, 18_625).verdict == "tight"

# %% Draw figure 3 tags=["hide-input"]
course.show(
    course.ladder("chunked_loss"),
    "Figure 3. The peak after each switch so far; the chunked loss takes it from 7.9 "
    "to 5.5 GiB.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: how other libraries cut the loss
# All of these are exact within rounding, or nearly. (*Logits twice*: the backward pass computes them again. *A bf16
# loss is bf16*: it is rounded to bf16, where ours stays fp32.)
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
# `use_liger_kernel=True` of the Trainer switches Liger's on. TRL and Cut Cross-Entropy cut the words as well. That
# needs a log-sum-exp that is merged slice by slice (exercise 3), and it adds up each token's gradient over the slices.
# TRL does this in fp32, because the sum drifted in 16 bits. Cut Cross-Entropy reduces the memory of Gemma 2's loss from
# 24 GB to 1 MB. Its README asks for an Ampere card, and a T4 is older. If your torch has `linear_cross_entropy` (from
# 2.13 on), the next cell compares it with ours.

# %% tags=["deep"]
frozen = hidden.detach().requires_grad_()
others = {"the package": chunked_loss.chunked_cross_entropy}
if hasattr(F, "linear_cross_entropy"):

    def torchs(hidden, head, labels, chunk):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk)
        return F.linear_cross_entropy(
            hidden, head, labels, reduction="sum", options=options
        )

    others["torch"] = torchs
for name, other in others.items():
    (its,) = torch.autograd.grad(other(frozen, head, labels, 16), frozen)
    print(f"{name:12} gradient {apart(its, by_autograd):.1e} from plain's")
    assert apart(its, by_autograd) < 2e-6

# %% [markdown]
# ## 6. Where it breaks
# **The loss is `nan` from the first step on**, because a loop takes the *mean* of each chunk. If a prompt fills a whole
# chunk, this chunk has no trained token, and its mean is 0 / 0. The obvious repair is to leave such chunks out. That is
# worse, because the loss looks right, but now a chunk with one trained token counts as much as a chunk with 16.
#
# The cure is to add up all losses, and to divide once, by the number of trained tokens of the whole step.


# %%
def mean_of_means(labels):
    """The wrong way: a mean for each chunk of 16 tokens, then their mean."""
    means = [
        F.cross_entropy(h @ head.T, y)
        for h, y in zip(hidden.split(16), labels.split(16), strict=True)
    ]
    return torch.stack(means)


print(f"with a prompt of 34 tokens: loss {mean_of_means(answers).mean().item()}")
assert mean_of_means(answers).mean().isnan()

# two rows of 64 tokens, of which 17 are trained: chunks with 16, with 1, and with none
short = labels.masked_fill(torch.arange(n) % 64 > 16, -100)
repaired = mean_of_means(short).nanmean()  # leaves the empty chunks out
right = chunked(hidden, head, short) / (short != -100).sum()
(wrong_gradient,) = torch.autograd.grad(repaired, hidden)
(right_gradient,) = torch.autograd.grad(right, hidden)
print(f"loss {repaired.item():.2f} repaired, {right.item():.2f} right")
print(f"the repaired gradient is off by {apart(wrong_gradient, right_gradient):.0%}")
assert apart(wrong_gradient, right_gradient) > 0.5

# %% [markdown] tags=["deep"]
# ### Deeper: what the package refuses, and what fp16 loses
# If the head trains, it needs a gradient, which our function does not compute. The package says so before it loads any
# weights. (In evaluation it makes no gradient at all, which our `Chunked` always does.)

# %% tags=["deep"]
try:
    resolve(with_settings(after, ["tricks.peft=none"]), T4)
except BadInput as refused:
    print(refused)
print(diff(resolve(before, T4), resolve(after, T4)))  # what the switch changes

# %% [markdown] tags=["deep"]
# Another case belongs to training in 16 bits ([mixed precision](mixed_precision.py)). These do not shrink the plain
# loss: transformers copies the logits to fp32 first, so its peak stays at 12 bytes a logit. But in fp16 a *loss scale*
# multiplies the loss, so that small gradients do not become zero. Our gradients are made in the forward pass, before
# anything is multiplied. A model that is sure of its answer gives each of 100,000 wrong words a probability of about
# $10^{-8}$, and the smallest positive number of fp16 is $6 \cdot 10^{-8}$. So all these gradients become zero, without
# any message.
#
# The package multiplies the probabilities by 1,024 before they become fp16, and divides in fp32 after the matrix
# multiplication. (Unsloth gives the loss scale to its function.) On our CPU even plain cross entropy with a loss scale
# is farther off below: the softmax of torch adds 100,000 tiny numbers to one near 1 in fp32, which rounds some of them
# away. Such errors depend on how a processor adds up.

# %% tags=["deep"]
words, label = 100_000, torch.tensor([7, 7])
# all wrong words point in one direction, so that losing them shows
table = torch.randn(words, d) * 0.01 + 0.3
table[7] += 1.0
sure = torch.full((2, d), 0.575)
wide, answer = table.double(), F.one_hot(label, words)
exact_grad = ((sure.double() @ wide.T).softmax(1) - answer) @ wide  # in float64


def without_lift(hidden, head, labels):
    """As section 2, with the loss in fp32 and the multiplications in fp16."""
    logits = (hidden @ head.T).float()
    total = logits.logsumexp(1, keepdim=True)
    grad = (logits - total).exp() - F.one_hot(labels, len(head))
    return grad.to(hidden.dtype) @ head


low, off_by = sure.half().requires_grad_(), {}
lost = without_lift(low, table.half(), label).double()
off_by["chunked, without the factor"] = apart(lost, exact_grad)
lifted = chunked_loss.chunked_cross_entropy(low, table.half(), label, 2)
(found,) = torch.autograd.grad(lifted, low)
off_by["chunked, with the factor"] = apart(found.double(), exact_grad)
usual = F.cross_entropy((low @ table.half().T).float(), label, reduction="sum")
(found,) = torch.autograd.grad(1024 * usual, low)
off_by["plain, with a loss scale"] = apart(found.double() / 1024, exact_grad)
for name, error in off_by.items():
    print(f"{name:28} gradient off by {error:.2%}")
without_it, with_it, _ = off_by.values()
assert with_it < without_it / 2

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Another model has a vocabulary of 151,936 words, and its rows have 4,096 tokens. With chunks of 256
#    tokens, how many times fewer bytes do its logits take at the peak than with plain cross entropy? Compare the two
#    formulas of Figure 1.
# 2. **Build.** Gemma 2 caps its logits: it takes $c \tanh(z / c)$ in place of $z$. Fill in `capped` for one chunk, by
#    hand, without autograd. It returns the loss, added up over the tokens (a tensor without dimensions), and its
#    gradient for the hidden states, shaped like `hidden`. The derivative of $\tanh$ is $1 - \tanh^2$.
# 3. **Reach.** Cut the words instead of the tokens: `logsumexp_in_slices` computes the log-sum-exp of each token with
#    the logits of `width` words at a time, and returns a tensor of shape (tokens,). Some logits are above 88, where
#    $e^z$ is infinite in fp32, and some are far below zero. (`torch.logaddexp` merges two log-sum-exps.)

# %% tags=["exercise"]
times_fewer = None


def capped(hidden, head, labels, c):
    """FILL ME IN: return the summed loss, and its gradient for hidden."""


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
    y = F.one_hot(labels, v)
    for c in (2.0, 5.0):
        with torch.no_grad():
            found = answer(hidden.detach(), head, labels, c)
        if found is None:
            raise NotImplementedError
        loss, of_hidden = found
        assert loss.shape == (), (
            f"the loss has shape {tuple(loss.shape)}; sum it over the tokens"
        )
        assert of_hidden.shape == hidden.shape, (
            f"the gradient has shape {tuple(of_hidden.shape)}, and hidden {(n, d)}"
        )
        z = hidden.detach() @ head.T
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
    table = torch.cat([head, torch.ones(v, 1)], dim=1)
    for name, times, shift in (
        ("beyond 88", 20, 0.0),
        ("far below zero", 1, -300.0),
        ("around zero", 1, 0.0),
    ):
        states = torch.cat([times * hidden.detach(), torch.full((n, 1), shift)], dim=1)
        right = (states @ table.T).logsumexp(1)
        for width in (300, 100, v):  # the first leaves a narrower last slice
            if (found := answer(states, table, width)) is None:
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
    most = peak_bytes(lambda: answer(states, table, 100), alive=(states, table))
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
# - **Saves** the logits of all tokens but one chunk's: $12\,N V$ bytes become $8\,C V$. Our peak falls from 8,122 to
#   5,614 MiB, and the longest row on a T4 grows from 4,374 to 18,624 tokens.
# - **Costs** no FLOPs. Each chunk reads the head twice, and plain torch passes over the logits more often: 0.6 % of the
#   time, as predicted for a T4.
# - **Exact within rounding**: the gradient is as close to the truth as that of plain cross entropy, for any chunk.
# - **When**: the vocabulary is large and the model small, or rows are long. Then it is among the first things to switch
#   on.
# - **When not**: something reads the logits (accuracy, distillation), or the vocabulary is small. With our switch also
#   if the head trains or has an adapter.
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
# - Ours: `cria_tricks/techniques/chunked_loss.py`, `tests/techniques/test_chunked_loss.py`.
