# ---
# jupyter:
#   question: Rows of different lengths get padding in a batch. How do you stop paying for it, and mix no documents?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Packing: several documents in one sequence, each by itself
# > **Promise.** Your rows have different lengths, so every batch has padding, and you pay for it as for words. You will
# > pack several short documents into one sequence, and prove that no document sees another. Then you will see how one
# > harmless-looking argument breaks this without an error, and write a test for it.
# >
# > **Card.** saves the time spent on padding / costs attention that keeps documents apart, another number of rows in a
# > step, and memory if your rows were short / exact per document: no bit depends on a neighbour / about 25 minutes /
# > after [gradient accumulation](gradient_accumulation.py)
#
# Packing saves time, and not memory. Our job, QLoRA of Llama-3.2-1B on a T4, takes one row at a time, so it has no
# padding, and its bill stays at 1,516 MiB.

# %% Imports and settings tags=["hide-input"]
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DataCollatorWithFlattening
from transformers.trainer_pt_utils import get_length_grouped_indices

from cria_tricks import course
from cria_tricks.course import (
    CONFIGS,
    T4,
    PadToLongest,
    Theme,
    find_shape,
    flops,
    kernel_for,
    results,
    row_lengths,
    toggles,
    with_settings,
)
from cria_tricks.techniques import packing

# transformers knows sdpa_by_document from here on, section 3
course.register_attention()

torch.manual_seed(0)
MIB = 2**20

# %% [markdown]
# ## 1. The bill
# A batch is a rectangle: padding tokens make all its rows as long as the longest. The model computes on padding as on
# words, and then the loss ignores the result. Our 107 training rows have 484 to 2,048 tokens of SmolLM2's tokenizer.
# (Llama's counts differ.) What share of a batch of four is padding?

# %% Your guess: per cent of padding in batches of four tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
# tokens of each training row, and how many of them are trained, in the file's order
LENGTHS, TRAINED = zip(*row_lengths("train"), strict=True)


def split(some, k):
    """Cut a list into pieces of k."""
    return [some[start : start + k] for start in range(0, len(some), k)]


def padded(lengths, B):
    """Tokens that are computed for batches of B rows."""
    return sum(len(batch) * max(batch) for batch in split(lengths, B))


course.reveal(guess, 100 * (1 - sum(LENGTHS) / padded(LENGTHS, 4)), "%")
for B in (1, 2, 4, 8):
    share = 1 - sum(LENGTHS) / padded(LENGTHS, B)
    by_length = 1 - sum(LENGTHS) / padded(sorted(LENGTHS), B)
    print(f"batches of {B}: {share:5.1%} padding, {by_length:5.1%} if sorted by length")


# %% Draw figure 1 tags=["hide-input"]
def rectangles(theme: Theme):
    """The same four documents, padded and packed; in each box the token's position."""
    sketch = course.Sketch(theme, 27, 9.8)

    def laid(left, top, sequence, cells):
        """Draw a sequence of (colour, tokens) pairs, filled up to so many cells."""
        for color, many in sequence:
            for at in range(many):
                sketch.tensor(left, top, 1.5, 1.5, str(at), color=color)
                left += 1.5
        for _ in range(cells - sum(many for _, many in sequence)):
            sketch.tensor(left, top, 1.5, 1.5, "", color=3, kept=False)
            left += 1.5

    sketch.text(3.75, 0.6, "padded: 20")
    for number, many in enumerate((5, 3, 4, 2)):
        laid(0, 1.6 + 2 * number, [(number, many)], 5)
    sketch.arrow((8.4, 5.4), (12.0, 5.4))
    sketch.text(19, 0.6, "packed: 14 tokens and 2 free")
    laid(13, 3.6, [(0, 5), (1, 3)], 8)
    laid(13, 6.6, [(2, 4), (3, 2)], 8)
    return sketch.figure


course.show(
    rectangles,
    "Figure 1. Left, a batch of four documents takes 20 tokens, and the dashed ones "
    "are padding; right, the same documents in two packed sequences. The numbers are "
    "positions, which start again with every document.",
)

# %% [markdown]
# In batches of four, 153,617 tokens cost as much compute as 200,205. Sorting by length removes nearly all padding for
# free. However, the order is then no longer random.
#
# *Packing* lays several training rows end to end in one *packed sequence*. We call each of these rows a *document*
# here.
#
# ## 2. From scratch, in four steps
# **Step 1** is to fill sequences. An old rule comes close to the fewest: take the longest document first, and put each
# into the first sequence that has room (*first-fit decreasing*). All our tokens would fill 76 sequences of 2,048.

# %%
import random

import torch
import torch.nn.functional as F

from cria_tricks.course import row_lengths

LENGTHS, TRAINED = zip(*row_lengths("train"), strict=True)


def first_fit(lengths, capacity):
    """Indices of the documents, in one list for each packed sequence."""
    sequences, room = [], []  # room: tokens that are still free in each sequence
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        s = next((s for s, free in enumerate(room) if lengths[i] <= free), len(room))
        if s == len(room):  # none has room: begin a new sequence
            sequences.append([])
            room.append(capacity)
        sequences[s].append(i)
        room[s] -= lengths[i]
    return sequences


sequences = first_fit(LENGTHS, 2048)
pairs = sum(len(some) == 2 for some in sequences)
print(f"{len(LENGTHS)} documents in {len(sequences)} sequences; {pairs} hold two")
assert len(sequences) == 82

# %% [markdown]
# We get 82 sequences, because 74 documents are longer than half a sequence, so no two of them fit together. Of the
# other 33, 18 fit next to one of these, and 15 fill 8 more sequences.
#
# **Step 2** is to join documents. Two details keep each document as it would be alone:
#
# - *Positions start again at 0.* By this, transformers also finds the documents.
# - *The first label of each document becomes -100.* We store labels as Hugging Face wants them: label $t$ is token $t$,
#   and the model compares it with its prediction at ${t - 1}$. Before a first token, another document predicts.
#
# From here on we use the real lengths divided by 16, random words, and sequences of 256 tokens.

# %%
draw = random.Random(0)


def made(tokens, trained):
    """A document of random words: a prompt, which is not trained, and an answer."""
    ids = [draw.randrange(3, 512) for _ in range(tokens)]
    prompt = tokens - trained
    return {"input_ids": ids, "labels": [-100] * prompt + ids[prompt:]}


def join(documents):
    """Lay documents end to end in one packed sequence."""
    packed = {"input_ids": [], "labels": [], "position_ids": []}
    for document in documents:
        packed["input_ids"] += document["input_ids"]
        packed["labels"] += [-100, *document["labels"][1:]]
        packed["position_ids"] += range(len(document["input_ids"]))
    return packed


sizes = zip(LENGTHS, TRAINED, strict=True)
docs = [made(tokens // 16, trained // 16) for tokens, trained in sizes]
window = docs[6:14]  # the eight documents of one optimizer step
fitted = first_fit([len(document["labels"]) for document in window], 256)
together = [[window[i] for i in indices] for indices in fitted]
packed = [join(documents) for documents in together]
print([len(sequence["labels"]) for sequence in packed], "tokens")


# %% Draw figure 2 tags=["hide-input"]
def masks(theme: Theme):
    """Which token looks at which in a sequence of two documents, and what it costs."""
    sketch = course.Sketch(theme, 41, 13.6)
    first, whole, cell = 5, 8, 1.25
    for panel, (name, says) in enumerate(
        (
            ("mask of ones", "15 pairs leak"),
            ("our mask", "21 used of 64"),
            ("no mask", "34 at most"),
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
    "Figure 2. Three ways of attention over documents of 5 and 3 tokens in one "
    "sequence. The place in line t and column s is filled if token t uses token s. "
    "With a mask of ones, 5 x 3 = 15 pairs leak (orange). Our mask uses 15 + 6 = 21 of "
    "64 pairs; the dashed ones are computed and thrown away. Without a mask at most "
    "25 + 9 = 34 pairs are computed, and a causal kernel may leave out some of them.",
)

# %% [markdown]
# **Step 3** is to mask the neighbours. Token $t$ may look at token $s$ if $s \le t$ *and* both are in the same
# document. Position 0 begins a document, so the positions are enough to make this mask.
#
# **Step 4** is to do without a mask. It is cheaper to attend within one document after the other, as in the right part
# of figure 2. Then the kernel's own causal mode is enough, so no mask of $T \times T$ is needed.


# %%
def block_mask(position_ids):
    """True where token t may look at token s: (B, T) -> (B, T, T)."""
    document = (position_ids == 0).cumsum(dim=-1)  # 1, 1, 1, 2, 2, ...
    same = document[:, :, None] == document[:, None, :]
    return same.tril()


def by_document(q, k, v, lengths):
    """Causal attention within each document; q, k, v are (1, heads, T, width)."""
    pieces = zip(*(x.split(lengths, dim=2) for x in (q, k, v)), strict=True)
    outputs = [
        F.scaled_dot_product_attention(*piece, is_causal=True) for piece in pieces
    ]
    return torch.cat(outputs, dim=2)


# the second sequence, which has three documents
batch = {name: torch.tensor([ids]) for name, ids in packed[1].items()}
positions = batch["position_ids"]
lengths = [len(document["labels"]) for document in together[1]]
q, k, v = torch.randn(3, 1, 4, sum(lengths), 16, dtype=torch.float64)
mask = block_mask(positions)[:, None]  # the same for all heads
under_mask = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
assert (by_document(q, k, v, lengths) - under_mask).abs().max() < 1e-14

# %% Set-up: a tiny Llama, and functions that compare tags=["hide-input"]
assert sorted(packed, key=str) == sorted(packing.PackedRows(window, 256), key=str)
assert torch.equal(block_mask(positions), packing.block_causal_mask(positions))
assert len(packing.best_fit(LENGTHS, 2048)) == len(sequences)
assert padded(LENGTHS, 4) == 200_205
assert padded(LENGTHS, 1) == sum(LENGTHS) == 153_617
assert -(-sum(LENGTHS) // 2048) == 76
assert sum(length > 1024 for length in LENGTHS) == 74
alone_or_two = [sorted(LENGTHS[i] > 1024 for i in some) for some in sequences]
assert alone_or_two.count([False, True]) == 18
assert alone_or_two.count([False, False]) + alone_or_two.count([False]) == 8


def tiny(**other):
    """The package's Llama of two blocks, with random weights and 512 words."""
    torch.manual_seed(0)
    settings = CONFIGS["tiny"] | {"vocab_size": 512, "use_cache": False} | other
    config = AutoConfig.for_model(**settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


model = tiny().double()
number = (positions == 0).cumsum(dim=-1)[0] - 1  # each token's document, from 0


def tensors(sequence):
    return {name: torch.tensor([ids]) for name, ids in sequence.items()}


def run(batch, **more):
    """The logits of a batch of one sequence, (T, V)."""
    return model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], **more
    ).logits[0]


def loss_sum(logits, labels):
    return F.cross_entropy(logits[:-1], labels[1:], reduction="sum")  # t predicts t + 1


def gradient():
    """The gradient of all weights in one tensor; the model's is set to zero."""
    found = torch.cat([weight.grad.flatten() for weight in model.parameters()])
    model.zero_grad()
    return found


def off(found, right):
    return ((found - right).norm() / right.norm()).item()


def learn(batch, mine, **more):
    """Logits of the tokens that are mine, and the gradient of their loss."""
    logits = run(batch, **more)
    loss_sum(logits, batch["labels"][0].masked_fill(~mine, -100)).backward()
    return logits[mine], gradient()


# %% [markdown]
# ## 3. Prove it
# *Exact per document* makes two claims. The first is that each document has the logits and the gradient that it has
# alone. We test this with a tiny Llama in float64, in three ways: with our mask; without `attention_mask`, so that
# transformers makes one from the positions; and document by document, without any. Sums may round otherwise, by
# $10^{-12}$ at most. (`number` is each token's document, and `learn` returns the marked tokens' logits and gradient.)
#
# The second claim is that not one bit depends on a neighbour. The second cell changes the words of document 1, and
# looks at the other logits. Then it adds an `attention_mask` of ones. Such a mask says "there is no padding", which is
# true, and most collators make one. But transformers looks for documents in the positions only if `attention_mask` is
# None *and* there is no KV cache. Otherwise it takes the sequence for one long text, without a warning.

# %%
for name, attention, its_mask in (
    ("our mask", "sdpa", mask),
    ("transformers' mask", "sdpa", None),
    ("document by document", "sdpa_by_document", None),
):
    model.set_attn_implementation(attention)
    worst = 0.0
    for j in range(len(lengths)):
        mine = number == j
        alone = {what: ids[:, mine] for what, ids in batch.items()}
        right = learn(alone, torch.ones(lengths[j], dtype=torch.bool))
        found = learn(batch, mine, attention_mask=its_mask)
        worst = max(worst, *map(off, found, right))
    print(f"{name:20} off by {worst:.0e}")
    assert worst < 1e-12


# %%
def moved(**more):
    """How far each token's logits move when the words of document 1 change."""
    other = {**batch, "input_ids": torch.where(number == 0, 9, batch["input_ids"])}
    with torch.no_grad():
        return (run(batch, **more) - run(other, **more)).abs().amax(dim=-1)


neighbours = number > 0  # the tokens of documents 2 and 3
for attention in ("sdpa_by_document", "sdpa"):
    model.set_attn_implementation(attention)
    assert moved()[neighbours].max() == 0
leak = moved(attention_mask=torch.ones_like(positions))
print(f"attention_mask=None: other logits move by {moved()[neighbours].max():.2f}")
print(f"a mask of ones: by up to {leak[neighbours].max():.2f}")
assert leak[neighbours].min() > 0.01


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
            3.25,  # between two grid lines
            f"document {j + 1}",
            ha="center",
            va="center",
            color=theme.quiet,
        )
    axes.plot(leak, color=theme.series[1], linewidth=1.4, label="a mask of ones")
    axes.plot(
        moved(), color=theme.series[0], linewidth=1.4, label="attention_mask=None"
    )
    axes.set(
        xlabel="token of the packed sequence",
        ylabel="largest move of a logit",
        xlim=(0, end),
        ylim=(-0.05, 3.5),
    )
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 0.06))
    axes.grid(axis="y")
    return drawn


course.show(
    leaking,
    "Figure 3. How far logits move when document 1 gets other words: with "
    "attention_mask=None those of documents 2 and 3 do not move; with a mask of ones "
    "those of each token do.",
)

# %% [markdown] tags=["deep"]
# ### Deeper: other kinds of attention and positions, and the FLOPs of padding
# The leak is that of transformers 5.23 with sdpa or eager attention. With FlashAttention 2, its source drops a mask
# without zeros, and then looks at the positions. (We have read this and not run it, because it needs a newer card.)
#
# Rotary embeddings see only distances between positions, so positions that go on instead of starting again would change
# no more than rounding. But a model with a table of learnt positions needs them to start again, and transformers needs
# them to find the documents.
#
# The next cell counts FLOPs: they are proportional to the tokens in the batch, padding included.

# %% tags=["deep"]
pad, small = PadToLongest(0), tiny()


def step_flops(batches):
    """Forward and backward; on a CPU attention's kernel is not counted."""
    return sum(
        flops(lambda one=one: small(**one).logits.sum().backward()) for one in batches
    )


in_fours = [pad(some) for some in split(window, 4)]
one_by_one = [pad(some) for some in split(packed, 1)]
many, fewer = (
    sum(one["input_ids"].numel() for one in some) for some in (in_fours, one_by_one)
)
counted = step_flops(in_fours) / step_flops(one_by_one)
print(
    f"{many} tokens padded, {fewer} packed: predicted {many / fewer:.4f} times the "
    f"FLOPs, counted {counted:.4f}"
)
assert abs(counted - many / fewer) < 1e-9

# %% [markdown]
# ## 4. What it costs
# **Attention** must keep the documents apart. Under a mask the kernel computes all $T^2$ pairs of tokens, and throws
# some away. Document by document it computes only the pairs that count, with one call for each document. With hundreds
# of documents these calls are the cost.
#
# **Steps** must be counted again. 107 documents, 8 in a step, make 14 steps an epoch. 82 packed sequences, 8 in a step,
# make 11 steps, each on more documents. That changes the training. So keep the mean number of [trained
# tokens](../docs/glossary.md#trained-tokens) in a step, which means $8 \cdot 82 / 107 = 6.1$, so 6 sequences here.
#
# **Measured** on a CPU, with 2 of SmolLM2's 30 blocks (the study is in the folded cell below): packed was 1.6 to 2.1
# times as fast as padded by four. In its shuffled order 25.3 % is padding, which explains only 1.34. The rest is
# probably attention, because a padding mask makes it compute all pairs of a row. The table below it has a tiny model,
# short rows, and no gain.

# %%
shuffled = random.Random(0).sample(sequences, len(sequences))
in_sequences = [sum(TRAINED[i] for i in some) for some in shuffled]
steps = {}
for name, trained, k in (
    ("8 documents", TRAINED, 8),
    ("8 sequences", in_sequences, 8),
    ("6 sequences", in_sequences, 6),
):
    steps[name] = [sum(some) for some in split(trained, k)]
    mean = sum(steps[name]) / len(steps[name])
    print(f"{name} a step: {len(steps[name])} steps of {mean:,.0f} trained tokens")


# %% Draw figure 4 tags=["hide-input"]
assert [len(some) for some in steps.values()] == [14, 11, 14]


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
    "Figure 4. The trained tokens of each step of an epoch: 14 steps of 8 documents, "
    "11 of 8 packed sequences, or 14 of 6. The last step is partial.",
)

# %% Measured: packed and padded tags=["hide-input"]
if study := results.study("packing"):
    gain, padding = study["packed_over_padded"], study["padding_share_of_batches_of_4"]
    model_of, _, cut = study["recipe"]["model"].partition(", ")
    print(f"{study['device']}, {study['date'][:10]}: {model_of},\n  {cut}")
    each = " ".join(f"{ratio:.2f}" for ratio in sorted(gain["pairs"]))
    print(
        "packed over padded by four, trained tokens a second: "
        f"{gain['median']:.2f} times\n  (three pairs: {each})"
    )
    print(
        f"{padding:.1%} of these batches is padding: without it, "
        f"{1 / (1 - padding):.2f} times"
    )
    assert f"{gain['median']:.1f}" == "2.1"
    assert f"{1 / (1 - padding):.2f}" == "1.34"
step_of = (
    "peft=lora attention=best precision=best chunked_loss=true "
    "gradient_checkpointing=true"
)
four_by_four = f"{step_of} train.batch_size=4 gradient_accumulation=4"
course.on_a_gpu("packing", off=four_by_four, on=f"{four_by_four} packing=true")

# %% [markdown] tags=["deep"]
# ### Deeper: attention under a mask, and the kernel of a T4
# transformers' bool mask takes one byte for each pair of tokens, 4 MiB for a sequence of 2,048 tokens, and its 16-bit
# copy in the open block takes 8 more. There is a worse case. `DataCollatorWithFlattening` lays a *whole* micro-batch
# into one sequence, and under a mask every document is computed against all others. So without FlashAttention's kernels
# for ragged sequences, flattening can cost more than padding did.
#
# The package's way repeats the key and value heads ([FlashAttention](flash_attention.py)) and uses no mask. On a T4
# this selects the memory-efficient kernel, with one call for each document. In an earlier version, under a
# block-diagonal mask, the study above found a gain of 1.22 only (one pair).

# %% tags=["deep"]
squares = {
    "packed": sum(sum(LENGTHS[i] for i in some) ** 2 for some in sequences),
    "padded by four": sum(len(some) * max(some) ** 2 for some in split(LENGTHS, 4)),
    "flattened by four": sum(sum(some) ** 2 for some in split(LENGTHS, 4)),
}
own = sum(length**2 for length in LENGTHS)
for name, many in squares.items():
    print(f"{name:18} under a mask: {many / own:.2f} times the documents' own squares")
assert squares["packed"] < squares["padded by four"] < squares["flattened by four"]
for masked, grouped in ((True, False), (False, False), (False, True)):
    kernel = kernel_for(T4, "float16", masked=masked, grouped=grouped)
    print(f"on a T4, mask {masked}, grouped heads {grouped}: {kernel}")

# %% [markdown]
# ## 5. The production switch
# With Hugging Face alone it is a collator, which lays a whole micro-batch into one sequence. Use it with FlashAttention
# 2 or FlexAttention, on a newer card than a T4, because under sdpa's mask it computes 3.7 times the squares $T^2$ of
# the documents, and padding only 1.56. The package packs into sequences of `data.max_length` tokens, and attends
# document by document. With 6 sequences in a step the training stays comparable:
#
# ```bash
# cria train kwanzaa --set tricks.packing=true --set tricks.gradient_accumulation=6
# ```
#
# The cell prints that collator, and our estimate of an epoch. (*Grouped* is transformers'
# `train_sampling_strategy="group_by_length"`, which shuffles rows and sorts them within groups. Not all packed
# sequences are full.)

# %%
print(packing.PLAIN)
# the whole job leaves packing off, so this is the job without it
before = course.so_far("packing")
target = toggles.Target(find_shape(before.model), T4)
PACKED = "tricks.packing=true"
filled = [sum(LENGTHS[i] for i in some) for some in shuffled]
epochs = {}
order = get_length_grouped_indices(LENGTHS, 4, generator=torch.Generator())
for name, rows, sizes, settings in (
    ("a row at a time", 1, LENGTHS, []),
    ("packed", 1, filled, [PACKED]),
    ("four rows, padded", 4, LENGTHS, []),
    ("four, grouped", 4, [LENGTHS[i] for i in order], []),
    ("four, packed", 4, filled, [PACKED]),
):
    tokens = padded(sizes, rows)  # of an epoch, with padding
    own = [*settings, f"train.batch_size={rows}"]
    # the seconds of a token in a row of the mean length, times all tokens
    mean = with_settings(before, [*own, f"data.max_length={tokens // len(sizes)}"])
    epochs[name] = epoch = target.bill(mean).seconds * tokens
    peak = course.bill(with_settings(before, own)).peak_bytes
    print(f"{name:18}{tokens:8,} tokens, {epoch:4.0f} s, peak {peak / MIB:7,.1f} MiB")

# %% [markdown]
# With one row at a time packing is worth nothing: no byte, and 1 s of 144. So the whole job leaves it off. With four
# rows it turns 186 s into 149. But grouping by length does nearly as much, and our long rows are fastest one at a time.
# So packing pays where rows are short. (All seconds are predicted, with a range of 0.82 to 1.22 times.)
#
# The peak is that of full rows. With four of them 16 MiB of masks go, and 1.5 MiB of cosines and sines come, one set
# for each sequence. Packing *adds* memory where rows were short, because sequences are full. A run of torchtune went
# from 2,091 to 7,075 tokens a second, and from 25.5 to 60.0 GiB (Llama-3.2-3B, sequences of 4,096 tokens, an A100).

# %% Check the numbers of the text tags=["hide-input"]
assert padded(filled, 4) == 166_210
assert [round(seconds) for seconds in epochs.values()] == [144, 143, 186, 150, 149]
together_on = with_settings(before, [PACKED, "tricks.gradient_accumulation=6"])
assert course.bill(together_on).lines == course.bill(before).lines
assert round(course.bill(before).peak_bytes / MIB) == 1516
four = with_settings(before, ["train.batch_size=4"])
less = (
    course.bill(four).peak_bytes - course.bill(with_settings(four, [PACKED])).peak_bytes
)
assert less == (16 - 1.5) * MIB
assert target.bill(before).spread == 1.5

# %% Set-up: a book of 48 names to learn by heart tags=["hide-input"]
# to each name belong five words
book = torch.cat([torch.arange(48)[:, None], torch.randint(48, 64, (48, 5))], dim=1)
restarting = torch.arange(6).repeat(16, 4)  # the positions of four documents


def train(alike, **more):
    """Train on packed sequences of four documents, all on one name or mixed.

    Returns the mean loss of the last ten steps, and the loss of all 48 documents, each
    alone.
    """
    learner = tiny(hidden_size=64, intermediate_size=128, vocab_size=64)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=2e-3)
    history = []
    for _ in range(60):
        names = torch.randint(48, (16, 1 if alike else 4)).expand(16, 4)
        ids = book[names].flatten(1)
        labels = ids.masked_fill(restarting == 0, -100)
        loss = learner(
            input_ids=ids, position_ids=restarting, labels=labels, **more
        ).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        history.append(loss.item())
    with torch.no_grad():
        alone = learner(input_ids=book, labels=book).loss.item()
    return sum(history[-10:]) / 10, alone


# %% [markdown] tags=["deep"]
# ### Deeper: packing in other libraries
# The Llama 3 paper saw little effect of the leak in ordinary pre-training, and an important one on very long sequences.
# The package packs by best fit: a document goes into the sequence in which it leaves the least room. Here that makes 82
# sequences, too. transformers' collator makes the same sequence as ours, and no mask, as the next cell shows. TRL 1.16
# packs with `packing=True`: best-fit, the same positions and labels, no mask, and a micro-batch flattened into one
# sequence. Its mode `"wrapped"` cuts documents anywhere and passes a mask of ones, so there they see each other by
# design. FlashAttention 2 in transformers tells documents apart only in a batch of *one* sequence, and the package
# refuses more. Unsloth can also take xformers' block-diagonal mask, whose kernel runs on a T4.
#
# Packing also saves passes, 82 instead of 107, and each pass unpacks all [NF4](nf4.py) weights. At the speeds of a T4's
# data sheet that is 23 ms a pass, next to 184 ms for the matrix multiplications of the blocks on 2,048 tokens, so an
# epoch would be 3.5 % shorter. The estimate above also counts everything else, at 28 % of those speeds, which is what
# public runs on a T4 reached. There it is 1 %.

# %% tags=["deep"]
theirs = DataCollatorWithFlattening()(together[1])
assert theirs.keys() == batch.keys()  # no attention_mask
assert all(torch.equal(theirs[name], batch[name]) for name in batch)
was, becomes = [23 * passes + 184 * sum(LENGTHS) / 2048 for passes in (107, 82)]
print(f"by the data sheet packing saves {1 - becomes / was:.1%} of an epoch")

# %% [markdown]
# ## 6. Where it breaks
# **The training loss may hide the leak.** Its cause is an `attention_mask` of ones next to the positions, or a KV
# cache, which is on by default. A tiny model learns five words for each of 48 names. Every sequence holds four
# documents, all on the same name ("alike") or on four names ("mixed"). For both we train one model with the leak and
# one without. At the end we compute the loss of each document alone.
#
# Which model has the lower *training* loss if the documents are alike?

# %% Your guess: which model has the lower training loss tags=["predict"]
guess = "no guess"  # @param ["no guess", "the one with the leak", "the one without it"]

# %%
told = {}
for alike in (True, False):
    for leaks_here in (True, False):
        more = {"attention_mask": torch.ones_like(restarting)} if leaks_here else {}
        told[alike, leaks_here] = train(alike, **more)
leaking_wins = told[True, True][0] < told[True, False][0]
answer = "the one with the leak" if leaking_wins else "the one without it"
course.reveal(guess, answer)
for (alike, leaks_here), (in_training, alone) in told.items():
    name = f"{'alike' if alike else 'mixed'}, {'leak' if leaks_here else 'no leak'}"
    print(f"{name:15} training loss {in_training:.2f}, alone {alone:.2f}")
assert told[True, True][0] < told[True, False][0]
assert told[False, True][0] > told[False, False][0]
for alike in (True, False):
    assert told[alike, True][1] > 1.2 * told[alike, False][1]

# %% [markdown]
# With alike documents, the leaking model copies from its neighbours. So it has the lower training loss, and it knows
# less. With mixed documents even the training loss is higher, probably because the model has not learnt to ignore its
# neighbours. The cure is to pass no `attention_mask` with the positions, and `use_cache=False`. Test your own stack.
#
# **The gradient changes, although the documents are the same.** Suppose that a loop takes the mean of the *mean* losses
# of the sequences. Then a document that shares its sequence gets a smaller weight than one alone. The cure is that of
# [gradient accumulation](gradient_accumulation.py): divide the sum by the trained tokens of the whole step.


# %%
def of_window(sequences, by_count):
    """The gradient of one optimizer step, in one of two ways to divide."""
    batches = [tensors(sequence) for sequence in sequences]
    counts = [(one["labels"] != -100).sum().item() for one in batches]
    for one, count in zip(batches, counts, strict=True):
        share = 1 / sum(counts) if by_count else 1 / count / len(sequences)
        (share * loss_sum(run(one), one["labels"][0])).backward()
    return gradient()


unpacked = [join([document]) for document in window]
for by_count in (False, True):
    apart = off(of_window(packed, by_count), of_window(unpacked, by_count))
    name = "sum over the count" if by_count else "mean of means"
    print(f"{name}: packed and unpacked differ by {apart:.1g}")
    assert (apart < 1e-12) == by_count

# %% [markdown] tags=["deep"]
# ### Deeper: two more failures, a KV cache and a first label
# The first print shows the leak through a cache. The second failure leaves the logits right, and spoils the gradient.
# If labels are joined as they are, the last token of a document must guess the first token of the next. You see it as
# trained tokens: one too many for each document but the first of a sequence, 25 in our 82 sequences if prompts were
# trained, too. The code changes only the first word of document 2, and looks at what document 1 learns.


# %% tags=["deep"]
for cache in (True, False):
    far = moved(use_cache=cache)[neighbours].max()
    print(f"use_cache={cache}: the others move by {far:.2f}")


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
    how = "masked" if cured else "kept"
    print(f"first labels {how}: document 1's gradient moves by {moves:.2%}")
    assert (moves == 0) == cured

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** `DataCollatorWithFlattening` lays four rows of 2,048 tokens into one sequence, and under sdpa
#    transformers makes a mask: a bool, one byte, for each pair of tokens in it. How many bytes is that?
# 2. **Build.** `call(batch)` gives the logits of a packed sequence, shape (T, V). Fill in `leaks(call, batch)`, in
#    about five lines, so that it returns True if any document sees any other, before or behind it, else False. The
#    words are in `batch["input_ids"]`, numbers below 512, and `batch["position_ids"]` is 0 where a document begins;
#    both are (1, T). Compare bits with `torch.equal`. (Put a model of your own into eval mode.)
# 3. **Reach.** Fill in `in_steps(lengths, documents, capacity)`. It takes `documents` of them in order for each
#    optimizer step, and packs each step by itself with `first_fit`, so that it trains the same documents as unpacked.
#    It returns a list of steps, where a step is a list of packed sequences, and a sequence is a list of indices into
#    `lengths`.

# %% tags=["exercise"]
bytes_of_the_mask = None


def leaks(call, batch):
    """FILL ME IN: return True or False."""


def in_steps(lengths, documents, capacity):
    """FILL ME IN: return a list of steps, which are lists of sequences, which are
    lists of indices."""


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
        for step, (found_sequences, window) in enumerate(
            zip(found, windows, strict=True), 1
        ):
            assert sorted(i for some in found_sequences for i in some) == window, (
                f"{case}: step {step} does not hold the documents {window[0]} to "
                f"{window[-1]}, each once"
            )
            assert all(
                sum(lengths[i] for i in some) <= capacity for some in found_sequences
            ), f"{case}: a sequence of step {step} has more than {capacity:,} tokens"
            fewest = len(first_fit([lengths[i] for i in window], capacity))
            assert len(found_sequences) <= fewest, (
                f"{case}: step {step} has {len(found_sequences)} sequences, "
                "and first_fit makes fewer of them"
            )


course.check(
    1,
    bytes_of_the_mask,
    course.about(
        8192**2,
        "how many tokens has the sequence that it makes, "
        "and how many pairs of them are there?",
        within=1e-9,
        mistakes={
            4 * 2048**2: "the collator lays all four into one sequence, "
            "and any two tokens of a sequence are a pair",
            2048**2: "the collator lays all four into one sequence",
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
#     ids = batch["input_ids"]
#     for changed in (number == j for j in number.unique()):
#         # every word of the document becomes another one
#         after = call(
#             {**batch, "input_ids": torch.where(changed, (ids + 1) % 512, ids)}
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
#     return steps  # 89 sequences instead of 82: the price of equal steps
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the compute on padding: in fours, our 153,617 tokens cost as much as 200,205 padded, and 166,210 packed.
#   With one row at a time it saves nothing.
# - **Costs** attention that keeps documents apart, a new number of sequences for each step, by trained tokens, and
#   memory if your rows were short, because sequences are full.
# - **Exact per document**: not one bit depends on a neighbour, if positions start again, first labels are masked, and
#   there is no `attention_mask` and no KV cache.
# - **When**: you train on several rows at once, and documents are short for the sequence and of mixed lengths.
# - **When not**: you train on one long row at a time, or grouping rows by length is good enough.
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
# - Ours: `cria_tricks/techniques/packing.py`, `cria_tricks/load/attention.py`, `tests/techniques/test_packing.py`,
#   `benchmarks/packing.py`.
