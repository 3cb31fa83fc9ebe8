# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Packing, and the leak: several documents in a row, each by itself
# > **Promise.** In padded batches of four, 153,617 tokens cost as much as 200,205; packed, as much as 153,617. Every
# > document keeps the logits and the gradient that it has alone. Then one harmless-looking argument takes that away,
# > and the training loss may even *fall*.
#
# > **Card.** saves padding: a batch of B rows costs B times its longest / costs attention that keeps documents apart,
# > and a new count of steps / exact per document / 30 minutes / after [flash-decoding](flash_decoding.py)
#
# Our job: QLoRA of Llama-3.2-1B on 107 training rows of up to 2,048 tokens, a T4 with 14.74 GiB. [The lesson on
# flash-decoding](flash_decoding.py) was about generating, so a training step still takes 5,357 MiB, as after [the
# lesson on FlashAttention](flash_attention.py). Guess now: how much of that will packing save?

# %% Imports and settings tags=["hide-input"]
import random

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening

import cria_tricks.load.attention  # noqa: F401  registers sdpa_by_document, section 3
from cria_tricks import course
from cria_tricks.bench import results
from cria_tricks.bench.style import Theme
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.hardware import T4
from cria_tricks.hardware.attention_kernels import kernel_for
from cria_tricks.measure.counting import flops
from cria_tricks.models.catalogue import CONFIGS
from cria_tricks.recipe import with_settings
from cria_tricks.resolve import resolve
from cria_tricks.step_plan import diff
from cria_tricks.tricks.packing import best_fit, block_causal_mask, pack

torch.manual_seed(0)
MIB = 2**20
# Tokens and trained tokens of each of the 107 rows, as SmolLM2 cuts them, at most 2,048
# a row; in the file's order.
LENGTHS, TRAINED = zip(*row_lengths("train"), strict=True)

# %% [markdown]
# ## 1. The bill
# A batch is a rectangle: all its rows are as long as the longest, and padding fills the rest. The model computes on
# padding as on words, in every product; then the loss ignores it. Our rows have 484 to 2,048 of SmolLM2's tokens. What
# share of a batch of four is padding? Write down a guess.

# %% Your guess: per cent of padding tags=["predict"]
guess = 0  # @param {type:"number"}


# %%
def split(some, k):
    return [some[start : start + k] for start in range(0, len(some), k)]


def padded(lengths, B):
    """Tokens that are computed for batches of B rows."""
    return sum(len(batch) * max(batch) for batch in split(lengths, B))


for B in (1, 2, 4, 8):
    shares = [1 - sum(LENGTHS) / padded(some, B) for some in (LENGTHS, sorted(LENGTHS))]
    print(
        f"batches of {B}: {shares[0]:5.1%} padding in the file's order, "
        f"{shares[1]:5.1%} if sorted by length"
    )
assert (sum(LENGTHS), padded(LENGTHS, 4), padded(LENGTHS, 1)) == (
    153_617,
    200_205,
    153_617,
)
course.reveal(guess, 100 * (1 - sum(LENGTHS) / padded(LENGTHS, 4)), "%")

# %% [markdown]
# Sorting takes away nearly all of it, for nothing; but then rows of a batch are alike, and the
# order is no longer random. And one row at a time, as in our job, nothing is padded at all.
#
# *Packing* lays several documents end to end in one row. (A *document* is what was a row before.)


# %% Draw figure 1 tags=["hide-input"]
def rectangles(theme: Theme):
    """The same four documents, padded and packed; in each box the token's position."""
    sketch = course.Sketch(theme, 41, 9.8)

    def laid(left, top, row, cells):
        for color, many in row:
            for at in range(many):
                sketch.tensor(left, top, 1.5, 1.5, str(at), color=color)
                left += 1.5
        for _ in range(cells - sum(many for _, many in row)):
            sketch.tensor(left, top, 1.5, 1.5, "", color=3, kept=False)
            left += 1.5

    for number, many in enumerate((5, 3, 4, 2)):
        laid(5, 1.6 + 2 * number, [(number, many)], 5)
        sketch.text(
            0, 2.35 + 2 * number, f"document {number + 1}", align="left", quiet=True
        )
    sketch.text(8.75, 0.6, "padded: 4 rows, 20 tokens")
    sketch.arrow((14, 5.4), (18.6, 5.4))
    laid(20, 3.6, [(0, 5), (1, 3)], 8)
    laid(20, 6.6, [(2, 4), (3, 2)], 8)
    sketch.text(26, 0.6, "packed: 2 rows, 14 tokens and 2 of room")
    sketch.text(33, 4.35, "documents 1 and 2", align="left", quiet=True)
    sketch.text(33, 7.35, "documents 3 and 4", align="left", quiet=True)
    return sketch.figure


course.show(
    rectangles,
    "Figure 1. Four documents in a padded batch and in packed rows; "
    "dashed is padding. The numbers are positions: they "
    "start again with every document.",
)

# %% [markdown]
# ## 2. From scratch, in five steps
# **Fill rows.** To find the fewest rows is a hard problem (bin packing), but an old rule comes close: take the longest
# document first, and put each into the first row with room, *first-fit decreasing*. All tokens together would fill 76
# rows of 2,048. How many will it take?


# %%
def first_fit(lengths, capacity):
    """Indices of the documents, row by row."""
    # at worst each has a row of its own
    rows, room = [[] for _ in lengths], [capacity] * len(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        r = next(r for r, left in enumerate(room) if lengths[i] <= left)
        rows[r].append(i)
        room[r] -= lengths[i]
    return [row for row in rows if row]


rows = first_fit(LENGTHS, 2048)
print(
    f"{len(rows)} rows, {sum(len(row) == 2 for row in rows)} of them with two "
    "documents, the others with one"
)
assert (len(rows), len(best_fit(LENGTHS, 2048)), -(-sum(LENGTHS) // 2048)) == (
    82,
    82,
    76,
)

# %% [markdown]
# 82; the package's rule, where the *tightest* room wins, finds as many. Not a triumph: 74 documents are longer than
# half a row, and no two of these can share one. Packing wants documents that are short for the row.
#
# From here on: the real lengths over 16, random words, rows of 256, so that several documents meet. The model is the
# package's tiny Llama of two blocks, with 512 words, in float64.

# %% Helpers: made rows, a tiny model tags=["hide-input"]
draw = random.Random(0)


def made(tokens, trained):
    ids = [draw.randrange(3, 512) for _ in range(tokens)]
    return {
        "input_ids": ids,
        "labels": [-100] * (tokens - trained) + ids[tokens - trained :],
    }


def tiny(**other):
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        **CONFIGS["tiny"] | {"vocab_size": 512, "use_cache": False} | other
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


model = tiny().double()
docs = [
    made(tokens // 16, trained // 16)
    for tokens, trained in zip(LENGTHS, TRAINED, strict=True)
]
window = docs[6:14]  # the eight documents of one optimizer step

# %% [markdown]
# **Start positions again.** Each document counts from 0, as it would alone. (Rotary embeddings see distances only, so a
# shift would change no more than rounding; a table of learnt positions would not forgive it, and transformers finds
# documents by it.)
#
# **Mask first labels.** A token is predicted at the token before it. Before a document's first token stands the last
# token of *another* document, so its label becomes -100.


# %%
def join(documents):
    """One packed row."""
    return {
        "input_ids": [word for one in documents for word in one["input_ids"]],
        "labels": [label for one in documents for label in [-100, *one["labels"][1:]]],
        "position_ids": [
            place for one in documents for place in range(len(one["input_ids"]))
        ],
    }


together = [
    [window[i] for i in row]
    for row in first_fit([len(one["labels"]) for one in window], 256)
]
packed = [join(some) for some in together]
print(
    f"{len(window)} documents in {len(packed)} rows of "
    f"{[len(row['labels']) for row in packed]} tokens"
)
assert sorted(packed, key=str) == sorted(pack(window, 256), key=str)  # the package's

# %% [markdown]
# **Mask the neighbours.** Token $t$ may look at token $s$ if $s \le t$ *and* both are of one document. Position 0
# begins a document, so the positions say it all.


# %%
def block_mask(position_ids):
    """True where t may look at s: (B, T) -> (B, T, T)."""
    document = (position_ids == 0).cumsum(dim=-1)
    return (document[:, :, None] == document[:, None, :]).tril()


def tensors(row):
    return {name: torch.tensor([ids]) for name, ids in row.items()}


batch = tensors(packed[1])
positions = batch["position_ids"]
assert torch.equal(block_mask(positions), block_causal_mask(positions))


# %% Draw figure 2 tags=["hide-input"]
def masks(theme: Theme):
    """Who looks at whom in a row of two documents, and what is computed for it."""
    sketch = course.Sketch(theme, 41, 13.6)
    first, whole, cell = 5, 8, 1.25
    for panel, (name, says) in enumerate(
        (
            ("a mask of ones: causal, and no more", "15 looks too many"),
            ("block-diagonal mask", "64 computed, 21 used"),
            ("document by document", "34 at most, no mask"),
        )
    ):
        left, top = 1.2 + 14 * panel, 2.0
        sketch.text(left + whole * cell / 2, 0.8, name)
        for t in range(whole):
            for s in range(whole):
                same = (t < first) == (s < first)
                if panel == 2 and not same:
                    continue
                seen = s <= t and (same or panel == 0)
                color = 1 if not same else 0 if t < first else 2
                sketch.tensor(
                    left + s * cell,
                    top + t * cell,
                    cell,
                    cell,
                    "",
                    color=color if seen else 3,
                    kept=seen,
                )
        sketch.text(left + whole * cell / 2, top + whole * cell + 0.9, says, quiet=True)
    return sketch.figure


course.show(
    masks,
    "Figure 2. Documents of 5 and 3 tokens in one row; line t looks at column s. "
    "Filled is a look, orange a leak, "
    "dashed is computed and thrown away.",
)

# %% [markdown]
# **Or use no mask.** The third picture is cheaper: attend within one document after the other. Then the kernel's own
# causal mode will do, and no $T \times T$ mask is needed.


# %%
def by_document(q, k, v, lengths):
    """Attention in one row; q, k, v are (1, heads, T, width)."""
    pieces = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    return torch.cat(
        [F.scaled_dot_product_attention(*one, is_causal=True) for one in pieces], dim=2
    )


lengths = [len(one["labels"]) for one in together[1]]
q, k, v = torch.randn(3, 1, 4, sum(lengths), 16, dtype=torch.float64)
under_mask = F.scaled_dot_product_attention(
    q, k, v, attn_mask=block_mask(positions)[:, None]
)
assert (by_document(q, k, v, lengths) - under_mask).abs().max() < 1e-14

# %% [markdown]
# ## 3. Prove it
# *Exact per document* is two claims. First: logits and gradients are those of the document alone. Only sums may round
# otherwise; float64 rounds at $10^{-16}$, so through two blocks and sums of a few hundred terms we allow $10^{-12}$.
# Three ways: transformers' model under our mask; with no mask at all, when transformers makes its own of the
# positions; and with the package's attention, document by document.


# %%
def run(batch, **more):
    return model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], **more
    ).logits[0]


def gradient():
    found = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    return found


def loss_sum(logits, labels):
    return F.cross_entropy(logits[:-1], labels[1:], reduction="sum")  # t predicts t + 1


def off(found, right):
    return ((found - right).norm() / right.norm()).item()


def taught(batch, mine, **more):
    """Logits of the tokens that are mine, and the gradient of their loss."""
    logits = run(batch, **more)
    loss_sum(logits, batch["labels"][0].masked_fill(~mine, -100)).backward()
    return logits[mine], gradient()


number = (positions == 0).cumsum(dim=-1)[0] - 1  # each token's document
ours = block_mask(positions)[:, None]  # the same for all heads
for attention, mask in (("sdpa", ours), ("sdpa", None), ("sdpa_by_document", None)):
    model.set_attn_implementation(attention)
    worst = 0.0
    for mine in (number == j for j in range(len(lengths))):
        alone = {what: ids[:, mine] for what, ids in batch.items()}
        right = taught(alone, mine[mine])  # all that is left
        found = taught(batch, mine, attention_mask=mask)
        worst = max(worst, *map(off, found, right))
    print(
        f"{attention:16} {'no' if mask is None else 'our'} mask: "
        f"off by {worst:.0e}, logits and gradients"
    )
    assert worst < 1e-12

# %% [markdown]
# Second: not one bit depends on a neighbour. Put other words into document 1, and look at the others. Then do the same
# with an `attention_mask` of ones. It says "no padding", which is true; the usual collators make one.


# %%
def moved(**more):
    """By how much each token's logits move when document 1 changes."""
    other = {**batch, "input_ids": torch.where(number == 0, 9, batch["input_ids"])}
    with torch.no_grad():
        return (run(batch, **more) - run(other, **more)).abs().amax(dim=-1)


for attention in ("sdpa_by_document", "sdpa"):
    model.set_attn_implementation(attention)
    assert moved()[number > 0].max() == 0
leak = moved(attention_mask=torch.ones_like(positions))
print(
    "without a mask the others move by 0, with a mask of ones by up to "
    f"{leak[number > 0].max():.2f}"
)
assert leak[number > 0].min() > 0.01


# %% Draw figure 3 tags=["hide-input"]
def leaking(theme: Theme):
    """The movement of every token's logits."""
    drawn, axes = course.figure(height=2.8)
    end = 0
    for j, length in enumerate(lengths):
        end += length
        axes.axvline(end, color=theme.grid, linewidth=1)
        axes.text(
            end - length / 2,
            3.0,
            f"document {j + 1}",
            ha="center",
            va="center",
            color=theme.quiet,
        )
    axes.plot(leak, color=theme.series[1], linewidth=1.4, label="a mask of ones")
    axes.plot(moved(), color=theme.series[0], linewidth=1.4, label="no mask")
    axes.set(
        xlabel="token of the packed row",
        ylabel="largest move of a logit",
        xlim=(0, end),
        ylim=(-0.05, 3.3),
    )
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 0.06))
    axes.grid(axis="y")
    return drawn


course.show(
    leaking,
    "Figure 3. Other words in document 1. "
    "Without a mask documents 2 and 3 do not move; with a mask of ones every one "
    "of their tokens does.",
)

# %% [markdown]
# transformers 5.23 looks for documents in the positions only if `attention_mask` is None *and* there is no cache. Else
# it takes the row for one long text, whatever the positions say, and says nothing.
#
# The mechanism: as many products as tokens.

# %%
pad, small = PadToLongest(0), tiny()


def products(batches):  # on a CPU attention's kernel is not counted; the matrices are
    return sum(
        flops(lambda one=one: small(**one).logits.sum().backward()) for one in batches
    )


in_fours, one_by_one = (
    [pad(some) for some in split(*those)] for those in ((window, 4), (packed, 1))
)
many, fewer = (
    sum(one["input_ids"].numel() for one in some) for some in (in_fours, one_by_one)
)
counted = products(in_fours) / products(one_by_one)
print(
    f"{many} tokens padded, {fewer} packed: predicted {many / fewer:.4f} times the "
    f"products, counted {counted:.4f}"
)
assert abs(counted - many / fewer) < 1e-9

# %% [markdown]
# ## 4. What it costs
# **Attention.** Under a mask a kernel computes all $T^2$ pairs; document by document, the squares of the lengths, and
# of these its causal mode skips the half above the diagonal. transformers' bool mask takes a byte a pair, 4 MiB for a
# row of 2,048, and its 16-bit copy in the open block 8 more. Worse: `DataCollatorWithFlattening` lays a *whole*
# micro-batch into one row, and every document is masked against all others.

# %%
pairs = {
    "packed": sum(sum(LENGTHS[i] for i in row) ** 2 for row in rows),
    "padded by four": sum(len(some) * max(some) ** 2 for some in split(LENGTHS, 4)),
    "flattened by four": sum(sum(some) ** 2 for some in split(LENGTHS, 4)),
}
for name, many in pairs.items():
    print(
        f"{name:18} under a mask: {many / sum(n * n for n in LENGTHS):.2f} times "
        "the documents' own squares"
    )
assert pairs["packed"] < pairs["padded by four"] < pairs["flattened by four"]
for masked, grouped in ((True, False), (False, False), (False, True)):
    kernel = kernel_for(T4, torch.float16, masked=masked, grouped=grouped)
    print(f"on a T4, mask {masked}, shared heads {grouped}: {kernel}")

# %% [markdown]
# So without FlashAttention's kernels for ragged rows, flattening can cost more than padding did. The package's way has
# repeated heads ([FlashAttention](flash_attention.py)) and no mask: on a T4 the memory-efficient kernel, one call a
# document. With hundreds of tiny documents in a row, these calls are the cost.
#
# **Steps.** 107 documents, 8 a step, make 14 steps an epoch. 82 packed rows, 8 a step, make 11, each on more: you
# would compare two trainings, not two ways to compute one. Hold the *trained tokens of a step* equal: 6 rows.

# %%
shuffled = random.Random(0).sample(rows, len(rows))
in_rows = [sum(TRAINED[i] for i in row) for row in shuffled]
steps = {}
for name, some, k in (
    ("8 documents", TRAINED, 8),
    ("8 packed rows", in_rows, 8),
    ("6 packed rows", in_rows, 6),
):
    steps[name] = [sum(one) for one in split(some, k)]
    print(
        f"{name:14}{len(steps[name]):3} steps, "
        f"{sum(steps[name]) / len(steps[name]):,.0f} trained tokens in the mean"
    )
assert [len(some) for some in steps.values()] == [14, 11, 14]


# %% Draw figure 4 tags=["hide-input"]
def per_step(theme: Theme):
    """The trained tokens of every step."""
    drawn, axes = course.figure(height=2.8)
    for (name, some), color, marker in zip(
        steps.items(), theme.series, "osD", strict=False
    ):
        axes.plot(
            range(1, len(some) + 1),
            some,
            color=color,
            marker=marker,
            markersize=4,
            linewidth=1.2,
            label=name,
        )
    axes.set(
        xlabel="optimizer step of an epoch",
        ylabel="trained tokens",
        ylim=(0, 13_500),
        xlim=(0.5, 14.5),
    )
    axes.set_yticks(
        range(0, 14_000, 2_000), [f"{many:,}" for many in range(0, 14_000, 2_000)]
    )
    axes.legend(loc="lower left")
    axes.grid(axis="y")
    return drawn


course.show(
    per_step,
    "Figure 4. An epoch in 14 steps of 8 documents, in 11 of 8 packed rows, "
    "in 14 of 6. The last step is partial.",
)

# %% [markdown]
# Equal in the mean, that is. To be equal step by step, the documents of a step must be packed among themselves
# (exercise 3). So does our study, all 107 in one step:

# %%
if study := results.study("packing"):
    gain, padding = study["packed_over_padded"], study["padding_share_of_batches_of_4"]
    print(f"{study['device']}, {study['date'][:10]}: {study['recipe']['model']}")
    pairs = " ".join(f"{ratio:.2f}" for ratio in sorted(gain["pairs"]))
    print(
        "packed over padded by four, trained tokens a second: "
        f"{gain['median']:.2f} times (pairs: {pairs})"
    )
    print(
        f"{padding:.1%} of these batches is padding: without it, "
        f"{1 / (1 - padding):.2f} times"
    )

# %% [markdown]
# What is beyond that is attention, which weighs much in so narrow a model: under a block-diagonal mask the same study
# had found 1.22 (one pair; CHANGELOG). In the tiny model's committed case nothing is gained. With a card, this cell
# measures 16 rows of 128 to 2,048 tokens in Llama's shape:

# %%
step_of = (
    "peft=lora attention=best precision=best chunked_loss=true "
    "gradient_checkpointing=true"
)
four_by_four = f"{step_of} train.batch_size=4 gradient_accumulation=4"
course.on_a_gpu("packing", off=four_by_four, on=f"{four_by_four} packing=true")

# %% [markdown]
# ## 5. The production switch

# %%
# the capstone does not pack, so this is the lesson on FlashAttention's
before = course.so_far("packing")
after = with_settings(before, ["tricks.packing=true", "tricks.gradient_accumulation=6"])
print("--set tricks.packing=true --set tricks.gradient_accumulation=6")
print(diff(resolve(before, T4), resolve(after, T4)))
print(
    f"{course.bill(before).peak_bytes / MIB:,.1f} MiB before, "
    f"{course.bill(after).peak_bytes / MIB:,.1f} after"
)
assert course.bill(before).lines == course.bill(after).lines

# %% [markdown]
# Your guess? It is zero, in every row: one row at a time had no padding, and a packed row is as long as the longest
# document was. Packing spares *passes*, 25 of 107. By [the lesson on NF4](nf4.py)'s count a pass unpacks weights for 23
# ms and 2,048 tokens multiply for 184:

# %%
was, becomes = (23 * passes + 184 * sum(LENGTHS) / 2048 for passes in (107, 82))
print(
    f"an epoch by the data sheet: {was / 1000:.1f} s, packed {becomes / 1000:.1f}: "
    f"{1 - becomes / was:.1%} less"
)

# %% [markdown]
# So little that our capstone leaves it off. And with four rows at a time?

# %%
four = with_settings(before, ["train.batch_size=4"])
course.show_bill(four, with_settings(four, ["tricks.packing=true"]))

# %% [markdown]
# Only the mask goes, 16 MiB: four full rows are four full rows, and do not fit a T4. Packing is no memory trick. Where
# rows were short it *adds* memory: torchtune's packed run went from 2,091 to 7,075 tokens a second, and from 25.5 to
# 60.0 GiB (Llama-3.2-3B, rows of 4,096, A100).
#
# **Elsewhere.** transformers' collator makes our row, and no mask. TRL 1.16 packs with `packing=True`: best-fit, the
# same positions and labels, no mask, a micro-batch flattened into one row. Its `"wrapped"` cuts documents anywhere,
# and passes a mask of ones: there they see each other by design. FlashAttention 2 in transformers tells documents
# apart in a batch of *one* row only; the package refuses more.

# %%
theirs = DataCollatorWithFlattening()(together[1])
assert theirs.keys() == batch.keys()  # no attention_mask
assert all(torch.equal(theirs[name], batch[name]) for name in batch)

# %% [markdown]
# ## 6. Where it breaks
# **The training loss is better, the model is not.** Cause: a mask of ones beside the positions. (Or a cache:
# transformers' trainer switches it off, an evaluation of your own does not.) The first steps' loss does not tell. So
# train: 48 names, and to each belong five words, which a model must learn by heart; four documents a row, all on one
# name, or mixed.

# %%
book = torch.cat([torch.arange(48)[:, None], torch.randint(48, 64, (48, 5))], dim=1)
restarting = torch.arange(6).repeat(16, 4)


def train(alike, **more):
    """The first loss, the mean of the last ten, and the loss of all 48 documents, each
    alone."""
    learner = tiny(hidden_size=64, intermediate_size=128, vocab_size=64)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=2e-3)
    losses = []
    for _ in range(60):
        ids = book[torch.randint(48, (16, 1 if alike else 4)).expand(16, 4)].flatten(1)
        labels = ids.masked_fill(restarting == 0, -100)
        loss = learner(
            input_ids=ids, position_ids=restarting, labels=labels, **more
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return (
            losses[0],
            sum(losses[-10:]) / 10,
            learner(input_ids=book, labels=book).loss.item(),
        )


told = {}
for alike in (True, False):
    for name, more in (
        ("leak", {"attention_mask": torch.ones_like(restarting)}),
        ("cure", {}),
    ):
        told[alike, name] = first, last, known = train(alike, **more)
        print(
            f"{'alike' if alike else 'mixed'}, {name}: "
            f"loss {first:.2f} to {last:.2f}; alone {known:.2f}"
        )
assert told[True, "leak"][1] < told[True, "cure"][1]
assert all(
    told[alike, "leak"][2] > 1.2 * told[alike, "cure"][2] for alike in (True, False)
)

for cache in (True, False):
    print(
        f"use_cache={cache}: "
        f"the others move by {moved(use_cache=cache)[number > 0].max():.2f}"
    )

# %% [markdown]
# Alike, the leaking model copies from its neighbours: the best loss, and it knows least. Mixed, neighbours are noise.
# Real neighbours are mostly strangers: Llama 3 saw little effect in ordinary pre-training, an important one in long
# rows.
#
# **The logits are right, the gradient is not.** Join labels as they are, and the last token of a document must guess
# the first of the next. Symptom: trained tokens, one too many for each document but the first of a row, 25 in our 82
# rows if prompts were trained, too. Here is what document 1 teaches when only its neighbour's first word changes. Cure:
# -100.


# %%
def of_document_1(first_word, cured):
    """The gradient of all that document 1 predicts, in front of a document 2 that
    begins with this word."""
    end = lengths[0] + 1
    words = batch["input_ids"].clone()
    words[0, lengths[0]] = first_word
    labels = words.masked_fill(positions == 0, -100) if cured else words
    loss_sum(run({**batch, "input_ids": words})[:end], labels[0, :end]).backward()
    return gradient()


for cured in (False, True):
    moves = off(of_document_1(9, cured), of_document_1(10, cured))
    print(
        f"first labels {'masked' if cured else 'kept'}: "
        f"document 1's gradient moves by {moves:.2%}"
    )
    assert (moves == 0) == cured

# %% [markdown]
# **The same documents, another gradient.** A loop takes each row's *mean* loss and divides by the number of rows, as in
# [the lesson on gradient accumulation](gradient_accumulation.py). Then a document that shares its row has less of a say
# than one that is alone in it: packing, of all things, changes the training. Cure: divide the sum by the trained tokens
# of the whole window.


# %%
def of_window(rows, by_count):
    batches = [tensors(row) for row in rows]
    counts = [(one["labels"] != -100).sum().item() for one in batches]
    for one, n in zip(batches, counts, strict=True):
        share = 1 / sum(counts) if by_count else 1 / n / len(rows)
        (share * loss_sum(run(one), one["labels"][0])).backward()
    return gradient()


for by_count in (False, True):
    apart = off(
        of_window(packed, by_count),
        of_window([join([one]) for one in window], by_count),
    )
    print(
        f"{'sum over the count' if by_count else 'mean of means'}: "
        f"packed and not packed differ by {apart:.1g}"
    )
    assert (apart < 1e-12) == by_count

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** `DataCollatorWithFlattening` gets four rows of 2,048 tokens. How many bytes does the bool mask take
#    that transformers makes for them under sdpa? Your answer is a number of bytes.
# 2. **Build.** A test for your own stack. `call(batch)` gives the logits of a packed row, shape (T, V). Fill in
#    `leaks(call, batch)`. It returns True if any document sees any other, else False. (About five lines.)
# 3. **Reach.** Fill in `in_steps(lengths, documents, capacity)`. Take the texts in the given order, `documents` of them
#    for each optimizer step, and pack each step alone. It returns a list of steps; a step is a list of rows, and a row
#    a list of indices into `lengths`. Then every step trains what it would train unpacked.

# %% tags=["exercise"]
bytes_of_the_mask = None


def leaks(call, batch):
    """FILL ME IN: return True or False."""


def in_steps(lengths, documents, capacity):
    """FILL ME IN: return a list of steps, which are lists of rows, which are lists of
    indices."""


# %% Check the exercises tags=["hide-input"]
def of_leaks(answer):
    own = block_mask(positions)[0]
    into_three = (number[:, None] == 2) & (number == 1)
    ahead = (number[:, None] == 0) & (number == 1)
    every = (
        "a token sees what is before it: which document must you change, "
        "and whose logits must stay as they were?"
    )
    ways = (
        (
            "positions alone",
            False,
            {},
            "a document's own logits move when it changes: compare those of all others",
        ),
        ("a mask of ones", True, {"attention_mask": torch.ones_like(positions)}, every),
        ("a cache", True, {"use_cache": True}, every),
        (
            "document 3 sees 2",
            True,
            {"attention_mask": (own | into_three)[None, None]},
            "change each document in turn",
        ),
        (
            "document 1 sees 2",
            True,
            {"attention_mask": (own | ahead)[None, None]},
            "compare documents before it, too",
        ),
    )
    for name, right, more, hint in ways:
        given = {what: ids.clone() for what, ids in batch.items()}
        with torch.no_grad():
            found = answer(lambda one, more=more: run(one, **more), given)
        if found is None:
            raise NotImplementedError
        if isinstance(found, torch.Tensor):
            found = found.item()
        if not isinstance(found, bool):
            raise TypeError(f"this is a {type(found).__name__}, not True or False")
        if found != right and not torch.equal(given["input_ids"], batch["input_ids"]):
            hint = (
                "your function changed the words in `batch` itself: "
                "did both calls get the same words?"
            )
        assert found == right, f"{name}: you say {found}; {hint}"


def of_steps(answer):
    short = [5, 9, 5, 3, 3, 9, 2, 4]
    for lengths, documents, capacity in ((short, 3, 10), (LENGTHS, 8, 2048)):
        if (found := answer(lengths, documents, capacity)) is None:
            raise NotImplementedError
        windows = split(list(range(len(lengths))), documents)
        case = f"{len(lengths)} documents, {documents} a step"
        assert len(found) == len(windows), (
            f"{case}: {len(found)} steps; without packing there are {len(windows)}"
        )
        for step, (rows, window) in enumerate(zip(found, windows, strict=True), 1):
            assert sorted(i for row in rows for i in row) == window, (
                f"{case}: step {step} does not hold the documents {window[0]} to "
                f"{window[-1]}, each once"
            )
            assert all(sum(lengths[i] for i in row) <= capacity for row in rows), (
                f"{case}: a row of step {step} has more than {capacity:,} tokens"
            )
            fewest = len(first_fit([lengths[i] for i in window], capacity))
            assert len(rows) <= fewest, (
                f"{case}: step {step} has {len(rows)} rows, "
                "and first_fit makes fewer of them"
            )


course.check(
    1,
    bytes_of_the_mask,
    course.about(
        8192**2,
        "how many tokens has the row that it makes, "
        "and how many pairs of them are there?",
        within=1e-9,
        mistakes={
            4 * 2048**2: "the collator lays all four into one row, "
            "and any two tokens of a row are a pair",
            2048**2: "the collator lays all four into one row",
            2 * 8192**2: "a bool takes one byte",
            4 * 8192**2: "a bool takes one byte",
            8192**2 / 8: "torch's bool takes a byte, not a bit",
            8192 * 8193 / 2: "the half above the diagonal is stored, too",
            8192**2 / 2: "the half above the diagonal is stored, too",
            64: "that is a number of MiB; give bytes",
        },
    ),
    "a number of bytes",
)
course.check(2, leaks, of_leaks, "a function (call, batch) -> True or False")
course.check(
    3,
    in_steps,
    of_steps,
    "a function (lengths, documents, capacity) -> a list of lists of lists of indices",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# # 64 MiB, four times what four rows of their own would take
# bytes_of_the_mask = (4 * 2048) ** 2
#
#
# def leaks(call, batch):
#     number, before = (batch["position_ids"] == 0).cumsum(dim=-1)[0], call(batch)
#     for changed in (number == j for j in number.unique()):
#         after = call(
#             {**batch, "input_ids": torch.where(changed, 9, batch["input_ids"])}
#         )
#         if not torch.equal(before[~changed], after[~changed]):
#             return True
#     return False
#
#
# def in_steps(lengths, documents, capacity):
#     steps = []
#     for start in range(0, len(lengths), documents):
#         some = first_fit(lengths[start : start + documents], capacity)
#         steps.append([[start + i for i in row] for row in some])
#     return steps  # 89 rows instead of 82: the price of equal steps
# ```
#
# </details>
#
# ## In one breath
# - **Saves** padding, in products and bytes: $B$ times the longest row of a batch $\to$ the tokens there are. For our
#   job, one row at a time, nothing but passes: 107 $\to$ 82.
# - **Costs** attention that keeps documents apart, by a mask of $T^2$ bytes or by a call a document; and a step must be
#   counted again, in trained tokens.
# - **Exact per document**: not a bit of a neighbour, if positions start again, first labels are masked, and there is no
#   `attention_mask` and no cache. Test it on your own stack: exercise 2.
# - **When**: documents are short for the row, and of mixed lengths.
# - **When not**: one long row at a time; or sorting by length is good enough.
#
# ## Sources
# - Krell et al. 2021, *Efficient Sequence Packing without Cross-contamination*, arXiv 2107.02027, section 3.
# - Johnson et al. 1974, doi:10.1137/0203025 (first fit and best fit, decreasing: at most 11/9 of the fewest bins, and a
#   few).
# - Grattafiori et al. 2024, *The Llama 3 Herd of Models*, arXiv 2407.21783, section 3.2 (the mask between documents).
# - torchtune's README, "Optimization flags". transformers pull request 31629 (2024: positions instead of a mask, and
#   the flattening collator).
# - transformers 5.23: `masking_utils.py` (`_preprocess_mask_arguments`, `find_packed_sequence_indices`),
#   `data/data_collator.py` (`DataCollatorWithFlattening`), `modeling_flash_attention_utils.py` (one row only). TRL
#   1.16: `trainer/sft_trainer.py` (`DataCollatorForLanguageModeling`), `data_utils.py` (`pack_dataset`).
# - Ours: `cria_tricks/tricks/packing.py`, `cria_tricks/load/attention.py`, `tests/tricks/test_packing.py`,
#   `benchmarks/packing.py`.
