# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Gradient accumulation: eight rows, one after the other
# > **Promise.** A step learns from eight rows in 40 GiB, where eight at once take 169, and the gradient is the same
# > but for its last digits. And yet the bill *grows*, for the second time.
#
# > **Card.** saves activations and logits of all rows but one / costs one gradient that waits, 4 bytes a trained weight
# > / exact, but for the order of sums / 20 minutes / after [mixed precision](mixed_precision.py)
#
# Our job is QLoRA of Llama-3.2-1B on 107 training rows of up to 2,048 tokens, on a T4 with 14.74 GiB. [The lesson on
# mixed precision](mixed_precision.py) ended with a peak of 35.2 GiB for a step on *one* row. But the gradient of one
# row is a noisy guide, and this run's learning rate comes from steps on eight. So: eight rows a step. Before you read
# on, guess: does the bill fall, stay, or rise?

# %% Your guess: what the bill does tags=["predict"]
guess = "no guess"  # @param ["no guess", "fall", "stay", "rise"]

# %% Imports and settings tags=["hide-input"]
import random
import warnings
import weakref

import torch
import torch.nn.functional as F
from torch import nn

from cria_tricks import course
from cria_tricks.bench.style import Theme
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.hardware import T4
from cria_tricks.hardware.cards import CARDS
from cria_tricks.measure.counting import SavedBytes, flops, peak_bytes
from cria_tricks.measure.memory import LiveBytes
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks.gradient_accumulation import accumulated

torch.manual_seed(0)
KIB, MIB, GIB = 2**10, 2**20, 2**30
# Tokens and trained tokens of each of the 107 rows, as SmolLM2 cuts them, at most 2,048
# a row; in the file's order.
LENGTHS = row_lengths("train")

# %% [markdown]
# ## 1. The bill
# A *batch* is $B$ rows of $T$ tokens, the shorter ones padded. Only the answer is trained: everywhere else the label
# is -100, and makes no loss. Our rows have the real lengths, divided by 20, and random words in them. The model is
# small enough to count by hand: it guesses the next of $V$ words from the present one alone, by way of $D$ and then
# $H$ numbers.

# %%
V, D, H = 256, 32, 64  # vocabulary, width, inner width
pad, draw = PadToLongest(0), random.Random(0)


def made(tokens, trained):
    """A row; its label at t is the word at t + 1. Small words are common, large ones
    rare."""
    words = [int(V * draw.random() ** 3) for _ in range(tokens + 1)]
    prompt = tokens - trained
    return {"input_ids": words[:-1], "labels": [-100] * prompt + words[prompt + 1 :]}


rows = [made(round(tokens / 20), round(trained / 20)) for tokens, trained in LENGTHS]
window = rows[40:48]  # the eight rows of one step
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


# %% [markdown]
# What waits for the backward pass? For each token what the first product multiplied ($D$), what tanh gave ($H$), and
# the logarithms of $V$ probabilities, at 4 bytes a number; and one count, of 4 bytes. The longest row of our window
# has 102 tokens, so in one batch all eight have.

# %%
T = max(len(row["labels"]) for row in window)
a_row = 4 * T * (D + H + V)


def anyway(batches):  # weights and words
    return [
        *model.parameters(),
        *(tensor for batch in batches for tensor in batch.values()),
    ]


batch = pad(window)
with SavedBytes(besides=anyway([batch])) as kept:
    loss_sum(batch).backward()
print(
    f"eight rows at once: predicted {(8 * a_row + 4) / KIB:,.0f} KiB, "
    f"counted {kept.peak / KIB:,.0f} KiB"
)
assert kept.peak == 8 * a_row + 4


# %% Draw figure 1 tags=["hide-input"]
def two_ways(theme: Theme):
    """What is alive while a step goes through its rows."""
    sketch = course.Sketch(theme, 41, 11.5)
    sketch.text(0, 2.5, "at once", align="left")
    sketch.tensor(7, 0.5, 23.6, 4, "activations and logits of 8 rows", color=0)
    sketch.text(0, 7.7, "one by one", align="left")
    for n in range(8):
        if n < 4:
            sketch.tensor(
                7 + 3 * n, 6.5, 2.6, 2.4, f"row {n + 1}", color=0, kept=n == 3
            )
        else:
            sketch.text(8.3 + 3 * n, 7.7, f"row {n + 1}", quiet=True)
    for y in (2.5, 7.7):
        sketch.arrow((30.9, y), (33.2, y))
        sketch.tensor(33.5, y - 1.3, 6.5, 2.6, "gradient", color=1, kept=y > 5)
    sketch.text(
        20,
        10.4,
        "one row is alive, and beside it the gradients of rows 1 to 3, added up, wait",
        quiet=True,
    )
    return sketch.figure


course.show(
    two_ways,
    "Figure 1. Eight rows at once, and one by one at row 4, at the loss: "
    "filled is alive, dashed is gone or to come.",
)

# %% [markdown]
# ## 2. From scratch, in four steps
# **One row after the other.** The gradient of a sum is the sum of the gradients. And torch's `backward` *adds* to
# `.grad`: that is what `zero_grad` is for.


# %%
def gradient():
    """All of it in one vector; afterwards there is none."""
    found = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    return found


def off(found, right):
    """The length of the difference, over the length of the right one."""
    return ((found - right).norm() / right.norm()).item()


def split(rows, B=1):
    """Micro-batches of B rows."""
    return [pad(rows[start : start + B]) for start in range(0, len(rows), B)]


right = gradient()  # of the batch above
for one in split(window):
    loss_sum(one).backward()  # frees what this row kept, before the next one comes
assert off(gradient(), right) < 1e-5  # fp32 rounds at 6e-8

# %% [markdown]
# **Now the mean.** One trains on the *mean* loss of a trained token, so that the gradient does not grow with the
# number of tokens. The obvious way: each micro-batch's mean, divided by $k$, how many there are.


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


def at_once(rows):
    """What is right: the mean of one batch, and its gradient."""
    return mean_of_means([pad(rows)]), gradient()


equal = [made(50, 37) for _ in range(8)]
mean_of_means(split(equal))
assert off(gradient(), at_once(equal)[1]) < 1e-5

# %% [markdown]
# With eight *equal* rows it is right, so a test with equal rows finds nothing. Ours are ragged. A row with $n$ of the
# window's $N$ trained tokens should get $n / N$ of the gradient; here each gets $1 / k$. Half the sum of the
# differences is the share that goes to the wrong rows. And if $g$ is the gradient of a row's own mean loss, the
# window's is off by the sum of all $(1/k-n/N)\,g$. Predict, then measure.


# %%
def misplaced(counts):
    return sum(abs(1 / len(counts) - n / sum(counts)) for n in counts) / 2


counts = [[n for _, n in LENGTHS[start : start + 8]] for start in range(0, 107, 8)]
shares = [misplaced(some) for some in counts]
print(
    f"say that the real rows misplace: {sum(shares) / 14:.1%} in the mean, "
    f"{max(shares):.1%} in the worst window"
)

loss, right = at_once(window)
predicted = torch.zeros_like(right)
for batch in split(window):
    mean_of_means([batch])
    predicted += (1 / 8 - trained(batch) / trained(pad(window))) * gradient()
wrong_loss, wrong = mean_of_means(split(window)), gradient()
print(f"loss {wrong_loss:.3f} for {loss:.3f}; gradient off by {off(wrong, right):.0%}")
assert off(wrong, right + predicted) < 1e-5
assert abs(wrong_loss / loss - 1) < 0.01 < 0.1 < off(wrong, right)


# %% Draw figure 2 tags=["hide-input"]
def says(theme: Theme):
    """Each row's say in the worst real window."""
    drawn, axes = course.figure(height=2.8)
    worst = counts[shares.index(max(shares))]
    right = [100 * n / sum(worst) for n in worst]
    axes.bar(
        range(8), right, color=theme.series[0], width=0.6, label="what it should have"
    )
    axes.axhline(
        100 / 8,
        color=theme.series[1],
        linewidth=1.6,
        label="what a mean of means gives",
    )
    axes.set_xticks(range(8), [f"{n:,}" for n in worst])
    axes.set(
        xlabel="row of the window, by its trained tokens",
        ylabel="say in the step, %",
        ylim=(0, 28),
    )
    axes.legend(loc="upper left", ncols=2)
    axes.grid(axis="y")
    return drawn


course.show(
    says,
    "Figure 2. The worst window of the real rows: "
    "the shortest answer gets twice its correct share, the longest little "
    "more than half.",
)

# %% [markdown]
# The loss is off by less than a hundredth, and looks fine. The gradient is not. (Ours is of random words and a model
# that knows nothing; how far real ones are off depends on how alike the rows are.) Until October 2024 the trainer of
# transformers did this, and many others did, too.
#
# **Divide by the window's tokens.** Count them all *before* the first backward pass, and every row has its say.


# %%
def accumulate(batches):
    """The mean loss of the window's trained tokens; its gradient is added to .grad."""
    tokens, loss = trained(*batches), 0.0
    for batch in batches:
        share = loss_sum(batch) / tokens
        share.backward()
        loss += share.item()
    return loss


assert abs(accumulate(split(window)) / loss - 1) < 1e-5
assert off(gradient(), right) < 1e-5

# %% [markdown]
# **The last window.** 107 rows make 13 windows of 8, and one of 3. Dividing by 8 there, too, shrinks the gradient to
# $3/8$ of its correct size. We never divide by $k$, so there is nothing to mend: section 3 has all 14 windows.

# %%
last = rows[13 * 8 :]
for batch in split(last):
    (loss_sum(batch) / trained(batch) / 8).backward()
shrunk = gradient()
mean_of_means(split(last))
assert off(shrunk, 3 / 8 * gradient()) < 1e-5

# %% [markdown]
# ## 3. Prove it
# The claim is *exact, but for the order of sums*. Float64 rounds an addition by at most $2^{-53}$ of its result. Here
# fewer than 600 tokens are added up, and each is made of sums of at most 256 terms: two orders differ by about
# $2 \cdot (600 + 256) \cdot 2^{-53} \approx 2 \cdot 10^{-13}$ of the terms' sizes. Terms cancel in part, so we allow
# $10^{-12}$ of the gradient's length. All 14 windows, with 1, 2 and 4 rows in a micro-batch; and the package's
# reference must give equal bits, since it adds in our order.

# %%
model.double()
worst = 0.0
for B in (1, 2, 4):
    reference = accumulated(loss_sum, split(rows, B), k=8 // B)
    for start in range(0, 107, 8):
        eight = rows[start : start + 8]
        loss, ours = accumulate(split(eight, B)), gradient()
        worst = max(worst, off(ours, at_once(eight)[1]))
        assert next(reference) == loss
        assert torch.equal(gradient(), ours)
print(f"largest difference: {worst:.1e} of the gradient's length")
assert worst < 1e-12
_ = model.float()

# %% [markdown]
# And the mechanism: not eight rows wait but one, the longest.

# %%
batches = split(window)
with SavedBytes(besides=anyway(batches)) as kept:
    accumulate(batches)
print(
    f"one by one: predicted {(a_row + 4) / KIB:,.0f} KiB, "
    f"counted {kept.peak / KIB:,.0f} KiB"
)
assert kept.peak == a_row + 4

# %% [markdown]
# ## 4. What it costs
# **A gradient that waits.** Plain training drops its gradients before the next forward pass. Here those of the rows
# before must live on: 4 bytes for each of $P$ trained weights, *on top of* the peak. That is at the loss, where a
# token takes $D + H + 3V$ numbers (logarithms, and two gradients of the logits). So, against the longest row alone:
# eight at once should add $7 \cdot 4\,T\,(D + H + 3V)$ bytes, one by one $4P$.


# %%
def peak(batches):
    model.zero_grad()
    return peak_bytes(lambda: accumulate(batches), alive=anyway(batches))


P = V * D + D * H + H * V
alone = peak([pad([max(window, key=lambda row: len(row["labels"]))])])
for name, batches, more in (
    ("at once", [pad(window)], 7 * 4 * T * (D + H + 3 * V)),
    ("one by one", split(window), 4 * P),
):
    found = peak(batches) - alone
    print(
        f"{name:10} predicted {more / KIB:+8,.1f} KiB, counted {found / KIB:+8,.1f} KiB"
    )
    assert found == more


# %% Draw figure 3 tags=["hide-input"]
class Alive(LiveBytes):
    """The bytes that are alive, operation by operation, beside weights and words."""

    def __init__(self, batches):
        super().__init__()
        self.track_all(anyway(batches))
        self.live, self.history = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        self.history.append(self.live / KIB)
        return out


def history(waits):
    """Places and bytes, row by row, if the gradient waits for the next row, or is
    dropped."""
    places, batches = [], split(window)
    model.zero_grad()
    with Alive(batches) as alive:
        for n, batch in enumerate(batches):
            (loss_sum(batch) / 100).backward()
            many = len(alive.history) - len(places)
            places += [n + i / many for i in range(many)]
            if not waits:
                model.zero_grad()
    return places, alive.history


histories = {
    "eight steps on a row each": history(waits=False),
    "one step on eight": history(waits=True),
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
    axes.set_xticks([n + 0.5 for n in range(8)], [f"row {n + 1}" for n in range(8)])
    axes.set(ylabel="alive, KiB", ylim=(0, 600), xlim=(0, 8))
    axes.grid(axis="y")
    axes.legend(loc="upper right", ncols=2)
    return drawn


course.show(
    over_time,
    "Figure 3. A step on eight rows is eight steps on one row, "
    "lifted by the gradient that waits from the second row "
    f"on. At once, the same rows would reach {peak([pad(window)]) / KIB:,.0f} KiB.",
)

# %% [markdown]
# **Products.** As many as before; fewer, in fact, because a row by itself needs no padding. A token costs
# $3 \cdot 2\,(DH+HV)$: forward, and two gradients.

# %%
a_token = 3 * 2 * (D * H + H * V)
assert flops(lambda: accumulate([pad(window)])) == a_token * 8 * T
assert flops(lambda: accumulate(split(window))) == a_token * sum(
    len(row["labels"]) for row in window
)
real = [
    [tokens for tokens, _ in LENGTHS[start : start + 8]] for start in range(0, 107, 8)
]
padding = 1 - sum(sum(some) for some in real) / sum(
    len(some) * max(some) for some in real
)
print(f"padding of the real rows in batches of eight: {padding:.0%}")

# %% [markdown]
# **Time.** Eight small passes read all weights eight times. Does that matter? A card is busy as long as multiplying
# takes longer than reading. A 16-bit weight is 2 bytes, and makes 2 operations a token; so by the vendor's rates a T4
# wants this many tokens at once:

# %%
print(f"{CARDS['t4'].half_flops / CARDS['t4'].memory_rate:.0f} tokens")

# %% [markdown]
# Our longest rows have ten times as many: by this count one row keeps a T4 busy. With rows of 50 tokens it would not,
# and eight at once would be faster. Our benchmark measures it, with four rows:

# %%
step_of = "peft=lora attention=best precision=best chunked_loss=true"
one_by_one = f"{step_of} train.batch_size=1 gradient_accumulation=4"
course.on_a_gpu(
    "gradient_accumulation",
    off=f"{step_of} train.batch_size=4",
    on=one_by_one,
    shorter=2,
)

# %% [markdown]
# ## 5. The production switch
# In the Kwanzaa run it is one line, and one argument of transformers' trainer. That trainer fetches a whole window
# first, counts its trained tokens, and hands the count to the loss as `num_items_in_batch`. Our loss divides its sum
# by that.
#
# Your guess from the beginning, please: fall, stay, or rise?

# %%
before, after = (
    course.so_far("mixed_precision"),
    course.so_far("gradient_accumulation"),
)
print("--set tricks.gradient_accumulation=8")
print(diff(resolve(before, T4), resolve(after, T4)))

# %%
waits = 4 * course.bill(before).facts.trained_weights
print(f"predicted: {waits / MIB:+,.1f} MiB")
course.show_bill(before, after)
assert course.bill(after).peak_bytes - course.bill(before).peak_bytes == waits
peaks = (course.bill(recipe).peak_bytes for recipe in (before, after))
course.reveal(guess, course.trend(*peaks))

# %% [markdown]
# It rises, by 4.6 GiB. One row was the smallest micro-batch already, so there was nothing left to save; and the peak
# is at the loss, where a plain step has no gradient yet. From the second row on, all 1,235,814,400 of them wait there.
# A run that dies in its *second* micro-batch, after the first went well, is no riddle any more.
#
# Accumulation does not shrink a step. It lets a step learn from more rows than fit. What would eight at once take?
# Everything that belongs to tokens, eight times; but the 16-bit copies of the matrices, which wait with the blocks,
# and 1 MiB of cosines and sines are made once for all rows.

# %%
entries = {line.name: line.bytes for line in course.bill(before).lines}
of_tokens = sum(
    entries[name] for name in ("batch", "saved activations", "final norm", "logits")
)
of_tokens -= entries["weights: blocks"] // 2 + MIB
predicted = course.bill(before).peak_bytes + 7 * of_tokens
eight = course.bill(with_settings(before, ["train.batch_size=8"])).peak_bytes
one_by_one = course.bill(after).peak_bytes
print(
    f"at once: predicted {predicted / GIB:.1f}, by the bill {eight / GIB:.1f}; "
    f"one by one: {one_by_one / GIB:.1f} GiB"
)
assert predicted == eight

# %% [markdown]
# So 4.6 GiB buy what would have cost 134. Later the price falls. With [the lesson on
# checkpointing](gradient_checkpointing.py)'s checkpointing, a step without accumulation peaks at the end of the
# backward pass, where all gradients exist anyway. Accumulation makes them wait in the forward pass too, and the peak
# there is only 1,783 MiB higher. [The lesson on LoRA](lora.py) leaves few weights to train, so few gradients wait
# (exercise 1).

# %%
later = course.bill(course.so_far("gradient_checkpointing"))
alone = course.bill(
    with_settings(
        course.so_far("gradient_checkpointing"), ["tricks.gradient_accumulation=1"]
    )
)
print(f"with checkpointing: {(later.peak_bytes - alone.peak_bytes) / MIB:,.0f} MiB")
assert alone.peak.name == "embedding"  # the end of the backward pass
assert round((later.peak_bytes - alone.peak_bytes) / MIB) == 1783 < waits / MIB
course.show(
    course.staircase("gradient_accumulation"),
    "Figure 4. The bill so far: a step up, to get down later.",
)

# %% [markdown]
# The opposite is a toggle, too. With `tricks.optimizer_in_backward=true` each weight takes its optimizer step as soon
# as its gradient arrives, and the gradient is freed. It cannot be combined with accumulation. [The lesson on weights
# that are elsewhere](weights_elsewhere.py) builds it.

# %% [markdown]
# ## 6. Where it breaks
# **`As gradient_accumulation_steps increases, the loss also increases`.** Where the trainer hands over
# `num_items_in_batch`, it no longer divides by $k$. A `compute_loss` of your own that ignores the count returns a
# mean, and $k$ means are added up. AdamW and clipping both hide a factor, so the run learns on, from a mean of means;
# only `loss` and `grad_norm` in the log are $k$ times too large. Cure: a sum, divided by the count.


# %%
def ignores_it(batch, num_items_in_batch):
    return loss_sum(batch) / trained(batch)


def divides_by_it(batch, num_items_in_batch):
    return loss_sum(batch) / num_items_in_batch


for k in (1, 2, 4, 8):
    # and now as transformers 5.23 does: no division after compute_loss
    batches = split(window[:k])
    broken, cured = (
        sum(way(b, trained(*batches)).item() for b in batches)
        for way in (ignores_it, divides_by_it)
    )
    print(f"gradient_accumulation_steps={k}: 'loss': {broken:.2f}, cured {cured:.2f}")
    assert abs(broken / (k * cured) - 1) < 0.02
    assert abs(cured / at_once(window[:k])[0] - 1) < 1e-5

# %% [markdown]
# **`` Detected call of `lr_scheduler.step()` before `optimizer.step()` ``.** A loop of one's own moves the learning
# rate in every micro-batch. The warning sounds like a matter of order. In truth the schedule runs eight times too
# fast: made for 42 steps, torch's cosine is at zero after 42 *micro-batches*, climbs again, and after 84 is where it
# began. After all 336, where it should be zero, it is at its highest. Cure: move it when the optimizer moves.


# %%
def rate(micro_batches, every):
    """The learning rate after so many micro-batches, eight to a step, if the schedule
    moves at every so many."""
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
print(str(said[0].message).split(".  Failure")[0])
assert "Detected call of `lr_scheduler.step()` before `optimizer.step()`" in str(
    said[0].message
)
print(f"after 42, 84 and 336 micro-batches: broken {broken}, cured {cured}")
assert broken == [0, 2e-4, 2e-4]
assert cured[0] > cured[1] > cured[2] == 0

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** From [the lesson on LoRA](lora.py) on only an adapter trains: 11,272,192 weights, in fp32. How many
#    bytes will wait between micro-batches then? The answer is a number of bytes.
# 2. **Build.** Micro-batches come from a stream: you see each once, you cannot count ahead, and there is no room to
#    keep them. Fill in `from_a_stream(batches)`: it leaves the gradient of the mean loss in `.grad` of the `model`'s
#    weights, and returns $N$, the number of trained tokens in all batches. (About six lines.)
# 3. **Reach.** Some people keep weights in bf16, and so `.grad`, too. Every micro-batch brings a gradient of exactly
#    1.0. However many there are, what is the largest number that `.grad` gets to? ([The lesson on mixed
#    precision](mixed_precision.py): bf16 has 8 significant bits.)

# %% tags=["exercise"]
bytes_that_wait = None


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
        right, batches = at_once(rows)[1], split(rows, B)
        if (found := answer(stream(batches))) is None:
            raise NotImplementedError
        assert all(weight.grad is not None for weight in model.parameters()), (
            "there is no gradient in .grad"
        )
        mine = gradient()
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
    bytes_that_wait,
    course.equal(
        4 * 11_272_192,
        "what waits is one sum of gradients, in fp32, "
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
# bytes_that_wait = 4 * 11_272_192  # 43 MiB, where it was 4,714
#
#
# def from_a_stream(batches):
#     tokens = 0
#     for batch in batches:
#         loss_sum(batch).backward()
#         tokens += trained(batch)
#     for weight in model.parameters():
#         weight.grad /= tokens  # the division can wait: it is the same for all
#     return tokens
#
#
# # 257 has 9 bits, and is rounded back: so gradients, and what trains, stay in fp32
# largest_sum = 256
# ```
#
# </details>
#
# ## In one breath
# - **Saves** activations and logits of all rows but those of one micro-batch: $k\,B \to B$ rows.
# - **Costs** one gradient that waits, 4 bytes a trained weight; weights are read $k$ times. As many products, or
#   fewer.
# - **Exact**, but for the order of sums, if the sum is divided by the trained tokens of the whole window.
# - **When**: a step should see more rows than fit, and one row is long enough to keep the card busy.
# - **When not**: one row a step is what you want; or the rows fit at once and are short.
#
# ## Sources
# - Huang et al. 2018, *GPipe*, arXiv 1811.06965, section 2.2 (micro-batches, one update).
# - transformers pull requests 34191 and 34198 (October 2024), issue 37766 (the first symptom); `trainer.py` of
#   transformers 5.23: `get_batch_samples`, `training_step`.
# - `torch/optim/lr_scheduler.py` of torch 2.13: `LRScheduler.step`.
# - Ours: `cria_tricks/tricks/gradient_accumulation.py`, `tests/tricks/test_gradient_accumulation.py`.
