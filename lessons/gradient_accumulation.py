# ---
# jupyter:
#   question: How does a step learn from eight rows at the memory of one, and why do most homemade loops get the mean
#     wrong?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Gradient accumulation: eight rows, one after the other
# > **Promise.** Gradient accumulation runs eight rows one after the other, adds up their gradients, and updates the
# > weights once. This costs 43 MiB here, and a batch of eight rows would cost far more. You will write the loop, and
# > find the mistake that transformers itself made until October 2024: no error, a loss that looks normal, and a wrong
# > gradient.
# >
# > **Card.** saves the activations of all rows of a step but one / costs one gradient that is kept, 4 bytes for each
# > trained weight / exact, but for the order of sums, if the tokens of the whole step are counted / about 25 minutes
# > / after [the optimizers](optimizers.py)
#
# Our job is QLoRA of Llama-3.2-1B on 107 rows of up to 2,048 tokens, on a T4 with 14.74 GiB. After the lesson on
# optimizers a step on *one* row needs 1,473 MiB. But the gradient of one row is a noisy guide. So the public notebook
# that our recipe follows takes each step on eight rows, and its learning rate is for such steps. Either these eight
# rows are one batch, or eight [micro-batches](../docs/glossary.md#micro-batch) of one row add up their gradients before
# the optimizer's step. The rows of a step are its [window](../docs/glossary.md#window).
#
# ## 1. The bill
# A *batch* is $B$ rows, padded to the length of the longest. Activations are in memory for all rows at once: the inputs
# of all blocks, and everything inside the block that checkpointing computes again. The logits do not grow, because our
# loss makes them for 256 tokens at a time. Guess the peak of a step on a batch of eight full rows.

# %% Your guess: MiB of the peak with a batch of eight rows tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import warnings
import weakref

from cria_tricks import course
from cria_tricks.course import (
    CARDS,
    LiveBytes,
    PadToLongest,
    SavedBytes,
    Theme,
    find_shape,
    flops,
    peak_bytes,
    with_settings,
)
from cria_tricks.course import time_bill as step
from cria_tricks.techniques import gradient_accumulation

KIB, MIB, GIB = 2**10, 2**20, 2**30


def anyway(batches):
    """Weights and words: they are in memory anyway, so they are not counted."""
    words = [tensor for batch in batches for tensor in batch.values()]
    return [*model.parameters(), *words]


# %%
before = course.so_far("optimizers")  # all switches of the lessons up to this one
after = course.so_far("gradient_accumulation")
at_once = with_settings(before, ["train.batch_size=8"])
print(f"one row a step: {course.bill(before).peak_bytes / MIB:,.0f} MiB")
course.reveal(guess, course.bill(at_once).peak_bytes / MIB, "MiB")
print(f"eight rows, one by one: {course.bill(after).peak_bytes / MIB:,.0f} MiB")

# %% Draw figure 1, and hold the numbers of the text tags=["hide-input"]
_peaks = [round(course.bill(r).peak_bytes / MIB) for r in (before, after, at_once)]
assert _peaks == [1473, 1516, 4401]
_fullest = course.bill(at_once).peak
_inside = {line.name: line.bytes / MIB for line in _fullest.lines}
assert (_fullest.name, _inside["saved activations"]) == ("last block", 8 * 128)
assert round(_inside["open block: saved"] + _inside["open block: temporary"]) == 2311
for _B in (2, 4, 8):
    _of_B = course.bill(with_settings(before, [f"train.batch_size={_B}"])).peak_bytes
    assert abs(_of_B / MIB - (1035 + 420.75 * _B)) < 0.5


def two_ways(theme: Theme):
    """What is alive while a step goes through its rows."""
    sketch = course.Sketch(theme, 41, 9.6)
    sketch.text(0, 2.5, "at once", align="left")
    sketch.tensor(7, 0.5, 23.6, 4, "activations of 8 rows", color=0)
    sketch.text(0, 7.7, "one by one", align="left")
    for n in range(8):
        if n < 4:
            sketch.tensor(7 + 3 * n, 6.5, 2.6, 2.4, str(n + 1), color=0, kept=n == 3)
        else:
            sketch.text(8.3 + 3 * n, 7.7, str(n + 1), quiet=True)
    for y in (2.5, 7.7):
        sketch.arrow((30.9, y), (33.2, y))
        sketch.tensor(33.5, y - 1.3, 7, 2.6, "gradient", color=1, kept=y > 5)
    return sketch.figure


course.show(
    two_ways,
    "Figure 1. Memory at the loss of row 4, for eight rows at once and one by one. "
    "Filled boxes are in memory, dashed ones are freed or not made yet. One by one, "
    "the gradients of rows 1 to 3 are kept as one sum.",
)

# %% [markdown]
# Eight rows at once cost 2,928 MiB more than one. Their peak is not at the loss but in the backward pass of a block,
# with eight times 128 MiB of block inputs, and 2,311 MiB inside the open block. From two rows on, the peak of $B$ rows
# is $1{,}035 + 420.75\,B$ MiB. One by one the rows cost 43 MiB, which section 4 explains. With a larger model, or if
# all weights train, only the second way fits.
#
# ## 2. From scratch, in three steps
# **Step 1: add up the gradients.** The gradient of a sum is the sum of the gradients. And torch's `backward` *adds* to
# `.grad`, which is why loops call `zero_grad`. So we call `backward` eight times.
#
# The toy has rows of the real lengths, divided by 20, with random words. Only the answer of a row is
# [trained](../docs/glossary.md#trained-tokens): everywhere else the label is -100, which makes no loss. The model
# predicts the next of $V$ words from the present word alone. `loss_sum` is a *sum* over tokens, which step 3 will need.

# %%
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from cria_tricks.course import row_lengths

# Tokens and trained tokens of each of the 107 training rows.
LENGTHS = row_lengths("train")
V, D, H = 256, 32, 64  # vocabulary, width, inner width
draw = random.Random(0)


def make_row(tokens, trained):
    """A row of random words; its label at t is the word at t + 1."""
    # ** 3: some words are frequent. One word more, for the last label.
    words = [int(V * draw.random() ** 3) for _ in range(tokens + 1)]
    prompt = tokens - trained
    labels = [-100] * prompt + words[prompt + 1 :]
    return {"input_ids": torch.tensor(words[:-1]), "labels": torch.tensor(labels)}


def pad(rows):
    """One batch, padded to its longest row."""
    ids = [row["input_ids"] for row in rows]
    labels = [row["labels"] for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
    }


def split(rows, B=1):
    """Micro-batches of B rows."""
    return [pad(rows[start : start + B]) for start in range(0, len(rows), B)]


torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(V, D),
    nn.Linear(D, H, bias=False),
    nn.Tanh(),
    nn.Linear(H, V, bias=False),
)


def loss_sum(batch):
    """The sum of the losses of all trained tokens."""
    logits = model(batch["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), reduction="sum")


def take_gradient():
    """The whole gradient as one vector; afterwards .grad is empty."""
    found = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    return found


def off(found, right):
    """The norm of the difference, over the norm of the right one."""
    return ((found - right).norm() / right.norm()).item()


rows = [make_row(round(all_ / 20), round(answer / 20)) for all_, answer in LENGTHS]
window = rows[40:48]  # the eight rows of one step
loss_sum(pad(window)).backward()
right = take_gradient()
for batch in split(window):
    loss_sum(batch).backward()  # frees what this row kept, before the next row comes
print(f"off by {off(take_gradient(), right):.0e}: the order of fp32 sums")

# %% [markdown]
# **Step 2: the mean, and how it goes wrong.** Training uses the *mean* loss of a trained token, so that the gradient
# does not grow with the number of tokens. The obvious way is to take the mean of each micro-batch, and divide it by
# their number $k$. If all rows have equally many trained tokens, this is right. Ours do not: a row with $n$ of the
# window's $N$ trained tokens should get the share $n/N$ of the gradient, but it gets $1/k$. For example, rows of 10 and
# 30 trained tokens should get 1/4 and 3/4, and each gets 1/2.


# %%
def trained(*batches):
    return sum((batch["labels"] != -100).sum().item() for batch in batches)


def mean_of_means(batches):
    loss = 0.0
    for batch in batches:
        share = loss_sum(batch) / trained(batch) / len(batches)
        share.backward()
        loss += share.item()
    return loss


def one_batch(rows):
    """What is right: with one batch, a mean of means is the mean."""
    return mean_of_means([pad(rows)]), take_gradient()


def misplaced(counts):
    """The share of the gradient that a mean of means gives to the wrong rows."""
    differences = [abs(1 / len(counts) - n / sum(counts)) for n in counts]
    return sum(differences) / 2  # what some rows get too much, others get too little


equal = [make_row(50, 37) for _ in range(8)]
mean_of_means(split(equal))
assert off(take_gradient(), one_batch(equal)[1]) < 1e-5  # equal rows hide the mistake

right_loss, right = one_batch(window)
wrong_loss, wrong = mean_of_means(split(window)), take_gradient()
print(f"loss {wrong_loss:.3f}, right {right_loss:.3f}")
print(f"the toy's gradient is off by {off(wrong, right):.0%}")
counts = [[n for _, n in LENGTHS[start : start + 8]] for start in range(0, 107, 8)]
shares = [misplaced(some) for some in counts]
print(f"misplaced: {sum(shares) / len(shares):.1%}, at most {max(shares):.1%}")

# %% Draw figure 2, and predict the wrong gradient tags=["hide-input"]
# With g a row's own mean gradient, the window's is off by the sum of (1/k - n/N) g.
_predicted = torch.zeros_like(right)
for _batch in split(window):
    mean_of_means([_batch])
    _predicted += (1 / 8 - trained(_batch) / trained(pad(window))) * take_gradient()
assert off(wrong, right + _predicted) < 1e-5
assert abs(wrong_loss / right_loss - 1) < 0.01 < 0.1 < off(wrong, right)
assert (round(100 * sum(shares) / 14), round(100 * max(shares))) == (14, 21)


def says(theme: Theme):
    """Each row's share in the worst real window."""
    drawn, axes = course.figure(height=2.8)
    worst = counts[shares.index(max(shares))]
    correct = [100 * n / sum(worst) for n in worst]
    axes.bar(range(8), correct, color=theme.series[0], width=0.6, label="correct share")
    axes.axhline(
        100 / 8, color=theme.series[1], linewidth=1.6, label="by a mean of means"
    )
    axes.set_xticks(range(8), [f"{n:,}" for n in worst])
    axes.set(
        xlabel="row of the window, by its trained tokens",
        ylabel="share of the gradient, %",
        ylim=(0, 28),
    )
    axes.legend(loc="upper left", ncols=2)
    axes.grid(axis="y")
    return drawn


course.show(
    says,
    "Figure 2. The worst window of the real rows: with a mean of means the shortest "
    "answer gets twice its correct share, and the longest little more than half.",
)

# %% [markdown]
# The loss is off by 0.2 %, so the log looks fine. (A token's loss is 5.4 to 5.6 in every row of the toy, so any mean is
# nearly right.) But the gradient is wrong. On the real rows 14 % of it goes to the wrong rows, and 21 % in the worst
# window, which is also the toy's. The 45 % compare whole gradients: with random words those of the rows differ much,
# and if they were equal, wrong shares would change nothing. Many trainers did this until October 2024.
#
# **Step 3: divide by the tokens of the whole window.** Count the trained tokens of all micro-batches *before* the first
# backward pass. A row without any, which makes 0/0 in step 2, then adds nothing. This also mends the last window of an
# epoch: 107 rows make 13 windows of 8 and one of 3, and dividing by 8 there would shrink the gradient to $3/8$ of its
# correct size.


# %%
def accumulate(batches):
    """The mean loss of the window's trained tokens; adds its gradient to .grad."""
    tokens, loss = trained(*batches), 0.0
    for batch in batches:
        share = loss_sum(batch) / tokens
        share.backward()
        loss += share.item()
    return loss


assert abs(accumulate(split(window)) / right_loss - 1) < 1e-5
assert off(take_gradient(), right) < 1e-5

last = rows[13 * 8 :]
for batch in split(last):
    (loss_sum(batch) / trained(batch) / 8).backward()  # three rows, divided by eight
shrunk = take_gradient()
mean_of_means(split(last))
assert off(shrunk, 3 / 8 * take_gradient()) < 1e-5

# %% [markdown]
# ## 3. Prove it
# The claim is *exact, but for the order of sums*. In float64 that order may change $10^{-12}$ of the gradient's norm
# (the folded part says why). We try all 14 windows, with 1, 2 and 4 rows in a micro-batch. The package's own function
# must give the same bits as ours, because it adds in the same order. Then we count what is kept for the backward pass:
# for each token $D + H + V$ numbers, and of the longest row only, not of eight rows.

# %%
model.double()
worst = 0.0
for B in (1, 2, 4):
    micro_batches = split(rows, B)
    # a generator: each next() adds one window's gradient to .grad
    theirs = gradient_accumulation.accumulated(loss_sum, micro_batches, k=8 // B)
    for start in range(0, 107, 8):
        eight = rows[start : start + 8]
        loss, ours = accumulate(split(eight, B)), take_gradient()
        worst = max(worst, off(ours, one_batch(eight)[1]))
        assert next(theirs) == loss
        assert torch.equal(take_gradient(), ours)
print(f"largest difference: {worst:.1e} of the gradient's norm")
assert worst < 1e-12
_ = model.float()  # back to fp32; the name _ keeps a notebook from printing the model

T = max(len(row["labels"]) for row in window)  # tokens of the longest row
of_a_row = 4 * T * (D + H + V)  # D into the first layer, H of tanh, V log-probabilities
for name, batches, many in (
    ("at once", [pad(window)], 8),
    ("one by one", split(window), 1),
):
    with SavedBytes(besides=anyway(batches)) as kept:
        accumulate(batches)
    predicted = many * of_a_row + 4  # and a count of tokens, 4 bytes
    print(f"{name:10} predicted {predicted:8,} bytes, counted {kept.peak:8,}")
    assert kept.peak == predicted

# %% [markdown] tags=["deep"]
# ### Deeper: why $10^{-12}$
# Float64 rounds an addition by at most $2^{-53}$ of its result. Here fewer than 600 tokens are added up, and each is
# made of sums of at most 256 terms. So two orders differ by about
# $2 \cdot (600 + 256) \cdot 2^{-53} \approx 2 \cdot 10^{-13}$ of the terms' sizes. Terms cancel in part, so we allow
# $10^{-12}$ of the gradient's norm. (In 16 bits each way rounds at other places, so they differ more. With dropout each
# way draws other masks, so it is another step.) Our `pad` makes the same batches as the package's:

# %% tags=["deep"]
plain_rows = [{name: list_.tolist() for name, list_ in row.items()} for row in window]
theirs = PadToLongest(0)(plain_rows)
assert all(torch.equal(theirs[name], found) for name, found in pad(window).items())

# %% [markdown]
# ## 4. What it costs
# **A gradient that is kept.** A plain step frees its gradients before the next forward pass. Here the sum of earlier
# gradients is kept while the next row runs. It takes 4 bytes for each of $P$ trained weights, on top of the peak. The
# toy's peak is at the loss, where a token takes $D + H + 3V$ numbers, because two gradients of the logits come on top.
# So compared with the longest row alone, eight rows at once should add $7 \cdot 4T(D + H + 3V)$ bytes, and one by one
# $4P$.


# %%
def peak(batches):
    model.zero_grad()
    return peak_bytes(lambda: accumulate(batches), alive=anyway(batches))


P = V * D + D * H + H * V  # trained weights
alone = peak([pad([max(window, key=lambda row: len(row["labels"]))])])
for name, batches, more in (
    ("at once", [pad(window)], 7 * 4 * T * (D + H + 3 * V)),
    ("one by one", split(window), 4 * P),
):
    found = peak(batches) - alone
    print(f"{name:10} predicted {more:+10,} bytes, counted {found:+10,}")
    assert found == more


# %% Draw figure 3 tags=["hide-input"]
class Alive(LiveBytes):
    """The bytes that are alive after each operation, without weights and words."""

    def __init__(self, batches):
        super().__init__()
        self.track_all(anyway(batches))
        self.live, self.history = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.history.append(self.live / KIB)
        return out


def history(keeps_gradient):
    """Places and bytes, row by row, if the gradient is kept or freed after a row."""
    places, batches = [], split(window)
    model.zero_grad()
    with Alive(batches) as alive:
        for n, batch in enumerate(batches):
            (loss_sum(batch) / 100).backward()
            many = len(alive.history) - len(places)
            places += [n + i / many for i in range(many)]
            if not keeps_gradient:
                model.zero_grad()
    return places, alive.history


histories = {
    "eight steps on a row each": history(keeps_gradient=False),
    "one step on eight": history(keeps_gradient=True),
}


def over_time(theme: Theme):
    """Bytes alive, row by row."""
    drawn, axes = course.figure(height=2.8)
    for (name, (places, found)), color in zip(
        histories.items(), theme.series, strict=False
    ):
        axes.plot(
            places,
            found,
            color=color,
            drawstyle="steps-post",
            linewidth=1.2,
            label=name,
        )
    axes.axhline(4 * P / KIB, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(8.05, 4 * P / KIB, "a gradient", color=theme.quiet, va="center")
    axes.set_xticks([n + 0.5 for n in range(8)], [str(n + 1) for n in range(8)])
    axes.set(xlabel="row", ylabel="in memory, KiB", ylim=(0, 600), xlim=(0, 8))
    axes.grid(axis="y")
    axes.legend(loc="upper right", ncols=2)
    return drawn


course.show(
    over_time,
    "Figure 3. Memory of one step on eight rows, and of eight steps on one row each: "
    "from the second row on, the kept gradient lifts the curve. "
    f"At once, the same rows would reach {peak([pad(window)]) / KIB:,.0f} KiB.",
)

# %% [markdown]
# **Operations**: as many as before, and fewer in practice, because a row by itself needs no padding. In batches of
# eight, 28 % of our tokens would be padding.
#
# **Time.** Eight small passes read all weights eight times. That matters only if reading takes longer than multiplying.
# A 16-bit weight has 2 bytes and makes 2 operations for each token, so a byte makes one. By its data sheet a T4 does
# 203 operations in the time in which it reads a byte, so it is busy from 203 tokens on, and our full rows have ten
# times as many. Our [NF4](nf4.py) weights are also unpacked to 16 bits in each pass. We *predict* 0.08 s for that, of
# 1.90 seconds for a row on a T4 (1.6 to 2.3). A batch of eight unpacks in 0.01 s a row, but its attention mask costs as
# much as this gains.
#
# If the table below is from a CPU, its model is tiny. There, four micro-batches of one row take 1.49 times as long as
# one of four (the baseline), but two of two take no longer.

# %%
step_of = "peft=lora attention=best precision=best chunked_loss=true"
course.on_a_gpu(
    "gradient_accumulation",
    off=f"{step_of} train.batch_size=4",
    on=f"{step_of} train.batch_size=1 gradient_accumulation=4",
    shorter=2,
)

# %% Count the toy's operations, and hold the numbers of the text tags=["hide-input"]
_real = [[all_ for all_, _ in LENGTHS[start : start + 8]] for start in range(0, 107, 8)]
_padded = sum(len(some) * max(some) for some in _real)
assert round(100 * (1 - sum(map(sum, _real)) / _padded)) == 28
_busy_from = CARDS["t4"].half_flops / CARDS["t4"].memory_rate
assert round(_busy_from) == 203
assert (CARDS["t4"].half_flops, CARDS["t4"].memory_rate) == (65e12, 320e9)
_seconds = []  # of a row: all, unpacking and attention, one by one and at once
for _recipe in (after, at_once):
    _step = step(_recipe, find_shape(after.model), CARDS["t4"])
    _parts = {part.name: part.seconds / 8 for part in _step.parts}
    _all = (sum(_parts.values()), _parts["unpacking"], _parts["attention"])
    _seconds.append([round(_s, 2) for _s in _all])
assert _seconds == [[1.9, 0.08, 0.07], [1.9, 0.01, 0.13]]
assert course.bill(at_once).peak_bytes - course.bill(after).peak_bytes == 3_025_059_840
_of_one = step(before, find_shape(before.model), CARDS["t4"]).seconds
assert (
    0 < _of_one - step(after, find_shape(after.model), CARDS["t4"]).seconds / 8 < 0.01
)
_a_token = 3 * 2 * (D * H + H * V)  # forward, and two gradients
assert flops(lambda: accumulate([pad(window)])) == _a_token * 8 * T
assert flops(lambda: accumulate(split(window))) == _a_token * sum(
    len(row["labels"]) for row in window
)

# %% [markdown] tags=["deep"]
# ### Deeper: full fine-tuning, where the kept gradient is large
# With our adapter the kept gradient takes 43 MiB. If all 1,235,814,400 weights train, it takes 4.6 GiB, on top of a
# peak that is at the loss, where a plain step has no gradient yet. This is why a run can die in its *second*
# micro-batch after the first went well. But eight rows at once would cost 122 GiB more: everything that belongs to
# tokens, seven more times. Only 1 MiB of cosines and sines is made once for all rows.

# %% tags=["deep"]
plain = course.so_far("the_bill")  # fp32, all weights train, no checkpointing
one_by_one = with_settings(plain, ["tricks.gradient_accumulation=8"])
lines = {line.name: line.bytes for line in course.bill(plain).lines}
of_tokens = sum(
    lines[name] for name in ("batch", "saved activations", "final norm", "logits")
)
predicted = course.bill(plain).peak_bytes + 7 * (of_tokens - MIB)
eight = course.bill(with_settings(plain, ["train.batch_size=8"])).peak_bytes
more = course.bill(one_by_one).peak_bytes - course.bill(plain).peak_bytes
print(
    f"at once: predicted {predicted / GIB:.1f}, by the bill {eight / GIB:.1f}; "
    f"one by one: {course.bill(one_by_one).peak_bytes / GIB:.1f} GiB"
)
assert predicted == eight
assert more == 4 * 1_235_814_400

# %% [markdown] tags=["deep"]
# With [checkpointing](gradient_checkpointing.py) the price falls. There a step without accumulation peaks at the end of
# the backward pass, where all gradients exist anyway. Accumulation keeps them in the forward pass, too, and the peak
# there is only 1,290 MiB higher.
#
# There is also a switch that does the opposite. With `tricks.optimizer_in_backward=true` each weight takes its
# optimizer step as soon as its gradient arrives, and the gradient is freed. It cannot be combined with accumulation.
# [The lesson on weights that are elsewhere](weights_elsewhere.py) builds it.

# %% tags=["deep"]
checkpointed = with_settings(plain, ["tricks.gradient_checkpointing=true"])
alone_ = course.bill(checkpointed)
later = course.bill(with_settings(checkpointed, ["tricks.gradient_accumulation=8"]))
print(f"with checkpointing: {(later.peak_bytes - alone_.peak_bytes) / MIB:+,.0f} MiB")
assert alone_.peak.name == "embedding"  # the end of the backward pass
assert round((later.peak_bytes - alone_.peak_bytes) / MIB) == 1290

# %% [markdown]
# ## 5. The production switch
# In plain Hugging Face code it is one argument of the trainer. Leave out `max_steps=1`, which ends the run after a
# step.

# %%
print(gradient_accumulation.PLAIN)

# %% [markdown]
# The trainer first fetches a whole window, counts its trained tokens, and hands the count to the loss as
# `num_items_in_batch`. Our loss divides by that. (With several cards it is the sum over all of them, by default.) The
# complete command (8 is also the recipe's own value):
#
# ```bash
# cria train kwanzaa --set tricks.gradient_accumulation=8
# ```

# %%
kept_bytes = 4 * course.bill(before).step.trained_weights
print(f"predicted: {kept_bytes / MIB:+,.1f} MiB")
course.show_bill(before, after)
assert course.bill(after).peak_bytes - course.bill(before).peak_bytes == kept_bytes
course.show_worth("gradient_accumulation")

# %% [markdown]
# It costs 43 MiB, which is the gradient of the adapter, 11,272,192 weights in fp32. Both lines of the last table are
# equal, because the job uses no switch of later lessons. The seconds, for one row of 2,048 tokens, fall by less than
# 0.01, because the optimizer takes only one step for eight rows.
#
# ## 6. Where it breaks
# **`As gradient_accumulation_steps increases, the loss also increases`.** If the trainer hands over
# `num_items_in_batch`, it no longer divides by $k$. A `compute_loss` of your own that ignores the count returns means,
# and $k$ of them are added up. AdamW divides a gradient by its own size, so a constant factor hardly changes its steps,
# and the run goes on learning, from a mean of means. Only `loss` and `grad_norm` in the log are $k$ times too large,
# and clipping acts more often. The cure is a sum, divided by the count.


# %%
def ignores_the_count(batch, num_items_in_batch):
    return loss_sum(batch) / trained(batch)


def divides_by_the_count(batch, num_items_in_batch):
    return loss_sum(batch) / num_items_in_batch


for k in (1, 2, 4, 8):
    batches = split(window[:k])
    tokens = trained(*batches)
    # As transformers 5.23 does: no division after compute_loss.
    broken = sum(ignores_the_count(batch, tokens).item() for batch in batches)
    cured = sum(divides_by_the_count(batch, tokens).item() for batch in batches)
    print(f"gradient_accumulation_steps={k}: 'loss': {broken:.2f}, cured {cured:.2f}")
    assert abs(broken / (k * cured) - 1) < 0.02
    assert abs(cured / one_batch(window[:k])[0] - 1) < 1e-5

# %% [markdown] tags=["deep"]
# ### Deeper: Detected call of `lr_scheduler.step()` before `optimizer.step()`
# A loop of your own moves the learning rate in every micro-batch. The warning sounds like a matter of order. In truth
# the schedule runs eight times too fast. It is made for 42 steps, so torch's cosine is at zero after 42
# *micro-batches*, climbs again, and after 84 is where it began. After the 336 micro-batches of 42 full windows, where
# it should be zero, it is at its highest. (Our run has 321, because the last window of each of its three epochs is
# short.) The cure is to move it when the optimizer takes its step.


# %% tags=["deep"]
def rate(micro_batches, every):
    """The learning rate after so many micro-batches, eight to a step, if the schedule
    moves after every so many."""
    optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=2e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=42)
    for n in range(1, micro_batches + 1):
        if n % 8 == 0:
            optimizer.step()
        if n % every == 0:
            schedule.step()
    return round(optimizer.param_groups[0]["lr"], 6)


with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    cured = [rate(n, every=8) for n in (42, 84, 336)]
    assert not said
    broken = [rate(n, every=1) for n in (42, 84, 336)]
message = str(said[0].message)
print(message.split(" In PyTorch")[0])
assert "Detected call of `lr_scheduler.step()` before `optimizer.step()`" in message
print("learning rate after 42, 84 and 336 micro-batches:")
print("  broken:", *broken)
print("  cured: ", *cured)
assert broken == [0, 2e-4, 2e-4]
assert cured[0] > cured[1] > cured[2] == 0

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** A run trains an adapter of rank 64 on the same model: 45,088,768 weights, in fp32. How many bytes of
#    gradients are kept between micro-batches? The answer is a number of bytes.
# 2. **Build.** Micro-batches come from a stream: you see each once, you cannot count ahead, and there is no room to
#    keep them. Fill in `from_a_stream(batches)`: it finds `.grad` of the `model`'s weights empty, and leaves the
#    gradient of the mean loss there. It returns $N$, the number of trained tokens in all batches, which is not 0.
#    (About six lines, with `loss_sum` and `trained`.)
# 3. **Reach.** Some people keep weights in bf16, and therefore `.grad`, too. Every micro-batch brings a gradient of
#    exactly 1.0. However many there are, what is the largest number that `.grad` gets to? ([bf16](mixed_precision.py)
#    has 8 significant bits, the leading 1 included. A sum in the middle between two numbers is rounded to the one whose
#    last bit is 0.)

# %% tags=["exercise"]
bytes_kept = None


def from_a_stream(batches):
    """FILL ME IN."""


largest_sum = None


# %% Check the exercises tags=["hide-input"]
def stream(batches):
    """Give each batch once, and check that the earlier batches are gone."""
    given = []
    for batch in batches:
        batch = {name: tensor.clone() for name, tensor in batch.items()}
        given.append(weakref.ref(batch["input_ids"]))
        yield batch
        del batch
        # the caller still holds the last one
        kept = sum(one() is not None for one in given)
        assert kept <= 1, (
            f"{kept} batches are alive at once; "
            "finish with each before you ask for the next"
        )


def of_a_stream(answer):
    for rows, B in ((window, 1), (last, 1), (window, 2)):
        right, batches = one_batch(rows)[1], split(rows, B)
        if (found := answer(stream(batches))) is None:
            raise NotImplementedError
        assert all(weight.grad is not None for weight in model.parameters()), (
            "there is no gradient in .grad"
        )
        mine = take_gradient()
        times = (mine.norm() / right.norm()).item()
        if off(mine / times, right) < 1e-5 < abs(times - 1):
            raise AssertionError(
                f"the gradient points the right way and is {times:,.4g} times as "
                "long as it should be"
            )
        wrong = off(mine, right)
        assert wrong < 1e-5, (
            f"the gradient is off by {wrong:.1%}: "
            "some tokens count for more than others"
        )
        assert found == trained(*batches), (
            f"{found} is not the number of trained tokens"
        )


course.check(
    1,
    bytes_kept,
    course.equal(
        4 * 45_088_768,
        "what is kept is one sum of gradients, in fp32, "
        "for each weight that trains, whatever k is",
    ),
    "a number of bytes",
)
course.check(
    2,
    from_a_stream,
    of_a_stream,
    "a function (batches) -> the number of trained tokens",
)
course.check(
    3,
    largest_sum,
    course.equal(
        256, "try it: torch.tensor(0.0, dtype=torch.bfloat16), and add 1 in a loop"
    ),
    "the largest value of .grad, one number",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# bytes_kept = 4 * 45_088_768  # 172 MiB, whatever k is
#
#
# def from_a_stream(batches):
#     tokens = 0
#     for batch in batches:
#         loss_sum(batch).backward()
#         tokens += trained(batch)
#     for weight in model.parameters():
#         weight.grad /= tokens  # the same factor for all, so it can come last
#     return tokens
#
#
# # 257 needs 9 bits. It lies in the middle between 256 and 258, and the last of the 8
# # bits is 0 in 256 and 1 in 258. So it is rounded to 256: keep gradients in fp32.
# largest_sum = 256
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the activations of all rows but those of one micro-batch (and their logits, if these are not made in
#   chunks): a step on eight rows takes 1,516 MiB, and 4,401 at once.
# - **Costs** one gradient that is kept, 4 bytes for each trained weight (43 MiB here). Weights are read $k$ times. It
#   computes as many operations, or fewer.
# - **Exact**, but for the order of sums, if the sum of losses is divided by the trained tokens of the whole window.
# - **When**: a step should see more rows than fit, and one row has tokens enough to keep the card busy.
# - **When not**: one row a step is what you want, or the rows are short and fit at once.
#
# ## Sources
# - Huang et al. 2018, *GPipe*, arXiv 1811.06965, section 2.2 (micro-batches, one update).
# - transformers pull requests 34191 and 34198 (October 2024), issue 37766 (the first symptom); `trainer.py` of
#   transformers 5.23: `get_batch_samples`, `training_step`.
# - `torch/optim/lr_scheduler.py` of torch 2.13: `LRScheduler.step`.
# - Ours: `cria_tricks/techniques/gradient_accumulation.py`, `tests/techniques/test_gradient_accumulation.py`.
