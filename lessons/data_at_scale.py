# ---
# jupyter:
#   extra: data
#   question: How do you train on more text than fits into memory, and still read each row exactly once, also after a
#     stop?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Data at scale: read what you need, each row once
# > **Promise.** Your training data is a folder of books, or gigabytes of web pages, and as Python lists it fills the
# > memory of the machine. You will compare four ways to read it, and build an order of rows that stops and
# > continues without losing one. You will also find near duplicates, and test questions among the training rows.
# >
# > **Card.** saves the memory of all rows / costs a pass over the text before training, or tokenizing in each epoch /
# > exact: each row is read once a pass, also over a stop / about 25 minutes / after [checkpoint and
# > resume](checkpoint_and_resume.py)
#
# Here a folder of books takes the place of our 107 rows, as in *continued pretraining*, where the adapter trains on
# whole texts. The number of rows does not change the memory of the card, so this lesson is about the memory of the
# [host](../docs/glossary.md#host).
#
# ## 1. The bill
# With our tokenizer, 200 MB of English are about 60 million tokens. A program can hold them in four ways:
#
# - **Lists:** Python integers, in a list for ids and one for labels.
# - **An array:** all ids in a numpy array of 16-bit integers. (These are enough for our vocabulary of 49,152 tokens,
#   while Llama-3.2's 128,256 need 32 bits.)
# - **A mapped file:** the array lies in a file, and `np.memmap` makes it look like memory. The system loads a *page* of
#   4 KiB when it is read, and may drop it later. (`datasets` keeps its tables so, and our trainer its tokens.)
# - **A stream:** the program tokenizes the text while it trains, and forgets each row afterwards.
#
# How many bytes of memory do the lists take for each character of the text?

# %% Your guess: bytes for each character, in lists tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings, and books of made-up sentences tags=["hide-input"]
import itertools
import json
import logging
import math
import mmap
import random
import tempfile
import time
import tracemalloc
import warnings
from pathlib import Path

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

import numpy as np
import psutil
from datasets import IterableDataset
from rich.console import Console

from cria_tricks import Recipe, course, train
from cria_tricks.course import (
    Augment,
    Chat,
    Guard,
    Repeats,
    Share,
    Theme,
    duplicates,
    load_tokenizer,
    mapped_rows,
    models,
    open_rows,
    repetitive,
    sources,
    table,
    train_rows,
    with_settings,
)
from cria_tricks.course import citation_labels as labels

draw = random.Random(0)
names = [
    "".join(draw.choice("bdgklmnrst") + draw.choice("aeiou") for _ in range(3)).title()
    for _ in range(2000)
]
SAYS = (
    "In the year {} {} walked with {} from the harbour to the hall.",
    "Nobody there could tell the {} letters of {} from those of {}.",
    "Of the {} candles that {} had made, {} lit the last one in the evening.",
)


def book(sentences):
    """English, of made-up names and numbers."""
    said = (
        draw.choice(SAYS).format(draw.randrange(1000, 2000), *draw.choices(names, k=2))
        for _ in range(sentences)
    )
    return " ".join(sentence + "\n\n" * (draw.random() < 0.2) for sentence in said)


def spoilt(text, share):
    """A text in which this share of the words is another one."""
    return " ".join(
        draw.choice(names) if draw.random() < share else word for word in text.split()
    )


tokenizer = load_tokenizer(models.find("random:tiny"))
place = tempfile.TemporaryDirectory()
folder = Path(place.name)

# %% Helpers: tokenize a file, cut it into rows, and measure tags=["hide-input"]
T = 128  # tokens of a row


# not line by line: tokenizers 0.23.1 never frees 64 bytes of each text that it was
# given
def tokenized(file):
    """The ids of a file, about 2,000 characters at a time."""
    with file.open(encoding="utf-8") as lines:
        while some := lines.readlines(2000):
            yield tokenizer("".join(some))["input_ids"]


def tokens_of(file):
    return itertools.chain.from_iterable(tokenized(file))


def rows_of(*columns):
    for n in range(0, len(columns[0]), T):
        yield [column[n : n + T] for column in columns]


def held(way, file):
    """The most bytes that Python and numpy hold while all rows are read once, and the
    sum of all ids."""
    tracemalloc.start()
    rows = way(file)
    tracemalloc.reset_peak()
    total = sum(int(np.sum(row[0])) for row in rows)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak, total


def seconds(way, file):
    """The processor's time until the first row can be read, and to read all rows
    once."""
    began = time.process_time()
    rows = way(file)
    first = next(rows)
    ready = time.process_time()
    for row in itertools.chain([first], rows):
        np.sum(row[0])
    return ready - began, time.process_time() - ready


# %%
def lists(file):
    ids = list(tokens_of(file))
    return rows_of(ids, list(ids))  # ids and labels


def array(file):
    return rows_of(np.fromiter(tokens_of(file), np.uint16))


def mapped(file):
    on_disk = file.with_suffix(".ids")
    with on_disk.open("wb") as out:
        for ids in tokenized(file):
            np.array(ids, np.uint16).tofile(out)
    return rows_of(np.memmap(on_disk, np.uint16, "r"))


def stream(file):
    tokens = tokens_of(file)
    while row := list(itertools.islice(tokens, T)):
        yield [row]


# %% Measure the four ways tags=["hide-input"]
text = book(3000)
ids = tokenizer(text)["input_ids"]
quarter, whole = folder / "quarter.txt", folder / "whole.txt"
quarter.write_text(text[: len(text) // 4])
whole.write_text(text)
columns = ("way", "bytes, a quarter of the text", "bytes, all of it", "a character")
columns += ("seconds to the first row", "seconds to read all rows")
bill, sums, taken, lines = {}, set(), {}, []
for way in (lists, array, mapped, stream):
    small, (large, total) = held(way, quarter)[0], held(way, whole)
    bill[way] = large / len(text)
    grows = way in (lists, array)
    sums.add(total)
    taken[way] = seconds(way, whole)
    lines.append(
        (
            way.__name__,
            f"{small:,}",
            f"{large:,}",
            f"{bill[way]:.2f}" if grows else "does not grow",
            *(f"{time:.3f}" for time in taken[way]),
        )
    )
    # A notebook's other threads allocate some kilobytes now and then, and tracemalloc
    # counts them, too.
    assert large > 3 * small if grows else large < small + 30_000
assert len(sums) == 1  # all four give the same tokens
assert max(ids) < 2**16
assert round(bill[lists] / bill[array]) == 19
assert 2 * len(ids) < bill[array] * len(text) < 2.2 * len(ids)
assert round(200e6 * len(ids) / len(text), -6) == 60e6
assert taken[stream][1] > 5 * taken[mapped][1]  # an epoch of a stream tokenizes
# but its first row needs no pass beforehand
assert taken[stream][0] < taken[mapped][0] / 5

# %%
course.show_table(table(columns, lines))
print("(mapped: without the file's pages, which the system may drop; see the fold)")
print(f"200 MB of text as lists: {0.2 * bill[lists]:.1f} GB (predicted)")
print(f"200 MB of text as an array: {0.2 * bill[array]:.2f} GB (predicted)")
course.reveal(guess, bill[lists], "bytes")

# %% [markdown] tags=["deep"]
# ### Deeper: a mapped file in the memory of a process
# `tracemalloc`, our counter, does not see the pages of a mapped file. However, they belong to the [resident
# memory](../docs/glossary.md#rss) of the process, which grows by 64 MiB when 64 MiB of a file are read. The system
# drops such pages when memory runs short, because the file still has them. The cell asks the system to drop them.

# %% tags=["deep"]
with (folder / "zeros").open("wb") as file:
    file.truncate(2**26)
with (folder / "zeros").open("rb") as file:
    pages = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
process = psutil.Process()
before = process.memory_info().rss
np.frombuffer(pages, np.uint16).max()
read = process.memory_info().rss - before
pages.madvise(mmap.MADV_DONTNEED)  # as the system does when memory runs short
dropped = process.memory_info().rss - before
print(f"read: {read / 2**20:+.0f} MiB, dropped: {dropped / 2**20:+.0f} MiB")
assert read > 2**25 > 4 * abs(dropped)

# %% [markdown]
# ## 2. From scratch, in five steps
# Lists take nineteen times as much as the array. A Python integer is an object of 28 bytes, and each list takes 8 more
# to point to it: 44 bytes against 2. (It is not 22 times, because Python shares the integers up to 256.)
#
# A mapped file can do what a list can: any row can be read at any time. A stream starts at once and writes no file.
# However, it tokenizes again in each epoch, and it cannot be shuffled as a whole.
#
# **Step 1: cut texts into rows.** We cut the tokens of a book every $T$ tokens. But a token is predicted from those
# before it, so the first token of each row would never be trained. Therefore each row begins with the last tokens of
# the row before, as *context* (the *overlap*). They have the label -100, which the loss ignores. After the first row,
# each row brings $T - \text{overlap}$ new tokens.

# %%
import random
from collections import defaultdict
from itertools import chain, islice
from zlib import crc32

import torch


def chunks(ids, T, overlap):
    """Cut the tokens of a text into rows of T tokens."""
    rows, end = [], 0
    while end < len(ids):
        begin = max(0, end - overlap)
        known = max(end, 1) - begin  # label -100: context, or a book's first token
        end = min(begin + T, len(ids))
        row = ids[begin:end]
        rows.append({"input_ids": row, "labels": [-100] * known + row[known:]})
    return rows


def trained(rows):
    return [label for row in rows for label in row["labels"] if label != -100]


tokens = list(range(10_000))  # stands for the tokens of a book
for overlap in (1, 16, 64):
    cut = chunks(tokens, 128, overlap)
    print(f"overlap {overlap:2}: {len(cut):3} rows, {len(trained(cut)):,} trained")
    assert trained(cut) == tokens[1:]


# %% Draw figure 1 tags=["hide-input"]
def overlapping(theme: Theme):
    """A text's tokens, and the rows that they become."""
    sketch = course.Sketch(theme, 42, 9.5)
    sketch.tensor(2, 0.5, 38, 1.6, "a book's tokens")
    for number, left in enumerate((2, 16, 28)):
        top = 3 + 2.1 * number
        if number:
            sketch.tensor(left - 2, top, 2, 1.6, "", color=1, kept=False)
        sketch.tensor(
            left, top, 12 if number else 14, 1.6, f"row {number + 1}: trained", color=0
        )
    return sketch.figure


course.show(
    overlapping,
    "Figure 1. Three rows of a book. Dashed boxes are the last tokens of the row "
    "before: the model sees them, but they are not trained. So each token of the book "
    "except the first is trained exactly once.",
)

# %% [markdown]
# **Step 2: shuffle by numbers.** The rows stay where they are in the file. The seed and the number of the epoch give
# an order of their *numbers*, so any process can compute it again. The position of a run is then two numbers, the epoch
# and the step, which a checkpoint can hold. (A stream has no such order. Many streams hold some rows in a buffer
# instead, 1,000 in `datasets`, and draw the next row from it. When the run stops, these rows are lost.)
#
# **Step 3: share the rows among processes.** A step of training takes the next $k$ rows of the order, here four. Of $N$
# processes, number $i$ takes every $N$-th of them, from the $i$-th on. So a step has the same rows for any $N$, and a
# run can continue with another number of processes.


# %%
def order_of(rows, seed, epoch):
    return random.Random(f"{seed} {epoch}").sample(range(rows), rows)


def steps_of(rows, position=(0, 0), process=0, processes=1, k=4):
    """In each step the numbers of the rows of a process, from a position on."""
    epoch, step = position
    order = order_of(rows, 3, epoch)
    for begin in range(k * step, rows, k):
        yield order[begin : begin + k][process::processes]


whole = list(steps_of(120))  # 30 steps
print(f"step 0 has rows {whole[0]}")
assert sorted(chain(*whole)) == list(range(120))  # each row once
assert whole[0] != next(steps_of(120, position=(1, 0)))  # another order

stopped = list(islice(steps_of(120), 9))
left, right = (steps_of(120, (0, 9), process, 2) for process in (0, 1))
rest = [[*a, *b] for a, b in zip(left, right, strict=True)]  # two go on from step 9
assert [set(step) for step in stopped + rest] == [set(step) for step in whole]

# %% [markdown]
# **Step 4: compare two texts by 128 numbers.** Which texts are equal except for a few words? We take all sequences of
# five words, the [shingles](../docs/glossary.md#shingle) of a text, as a set. The similarity of two sets is $J=|A\cap
# B|/|A\cup B|$. But sets are large, so [MinHash](../docs/glossary.md#minhash) makes a short *signature* of each: for
# each of 128 hash functions, the smallest hash of all shingles.
#
# These numbers are enough, because each shingle of $A \cup B$ is equally likely to have the smallest hash. If that
# shingle is in both sets, both signatures have the same number there, and the probability of this is $J$. So the share
# of equal numbers estimates $J$, with an error of about 0.04.


# %%
def shingles(text, n=5):
    words = text.lower().split()
    starts = range(len(words) - n + 1)
    return {crc32(" ".join(words[i : i + n]).encode()) for i in starts}


P = 2**31 - 1  # a prime number
torch.manual_seed(0)
a, b = torch.randint(1, P, (2, 128, 1))  # 128 hash functions: (a x + b) mod P


def signature(shingles):
    hashes = torch.tensor(sorted(shingles)) % P
    return ((a * hashes + b) % P).amin(1)


vocabulary = [f"word{n}" for n in range(2000)]


def change(words, share):
    return [random.choice(vocabulary) if random.random() < share else w for w in words]


random.seed(0)
words = random.choices(vocabulary, k=3000)
A = shingles(" ".join(words))
for share in (0.005, 0.02, 0.05, 0.1, 0.2):
    B = shingles(" ".join(change(words, share)))
    J = len(A & B) / len(A | B)
    found = (signature(A) == signature(B)).float().mean().item()
    print(f"{share:5.1%} of the words changed: J = {J:.2f}, MinHash {found:.2f}")
    assert abs(found - J) < 4 * (J * (1 - J) / 128) ** 0.5

# %% [markdown]
# One changed word changes five shingles. So if one word in fifty changes, each set loses a tenth, and $J$ is about
# $0.9/1.1$, or 0.8. The package calls two texts *near duplicates* if the estimate of $J$ is 0.8 or more.
#
# **Step 5: do not compare all pairs**, because a million texts have 500 billion of them. We cut each signature into 16
# *bands* of 8 numbers, and compare only texts with an equal band. One band is equal with the probability $J^8$, and
# none with $(1-J^8)^{16}$. So texts with $J=0.8$ are compared in 95 % of cases, and with $J=0.5$ in 6 %. Then the whole
# signatures decide.


# %%
def candidates(signatures):
    """The pairs of texts that have an equal band."""
    pairs = set()
    for start in range(0, 128, 8):
        same_band = defaultdict(list)
        for number, numbers in enumerate(signatures):
            band = tuple(numbers[start : start + 8].tolist())
            pairs.update((other, number) for other in same_band[band])
            same_band[band].append(number)
    return pairs


texts = [random.choices(vocabulary, k=200) for _ in range(90)]
texts += [change(words, 0.01) for words in texts[:10]]  # texts 90 to 99
signatures = [signature(shingles(" ".join(words))) for words in texts]
pairs = candidates(signatures)
print(f"of {100 * 99 // 2:,} pairs we compare {len(pairs)}:", *sorted(pairs)[:3], "...")
near = [(i, j) for i, j in pairs if (signatures[i] == signatures[j]).sum() >= 0.8 * 128]
print(f"{len(near)} are near duplicates")
assert {(n, n + 90) for n in range(10)} >= set(near)


# %% Draw figure 2 tags=["hide-input"]
def chance(J, numbers, bands):
    """That two texts have an equal band."""
    return 1 - (1 - J**numbers) ** bands


def accepted(J, least=103):
    """That at least 0.8 * 128 numbers of two signatures are equal."""
    return sum(
        math.comb(128, n) * J**n * (1 - J) ** (128 - n) for n in range(least, 129)
    )


assert round(chance(0.8, 8, 16), 2) == 0.95
assert round(chance(0.8, 13, 9), 2) == 0.4
assert round(chance(0.5, 8, 16), 2) == 0.06
assert (round(accepted(0.8), 2), round(accepted(0.9), 2)) == (0.5, 1)


def meeting(theme: Theme):
    """How likely two texts have an equal band, by their similarity."""
    drawn, axes = course.figure(height=2.6)
    J = np.linspace(0, 1, 200)
    for numbers, bands, color in ((8, 16, 0), (13, 9, 1)):
        axes.plot(
            J,
            chance(J, numbers, bands),
            color=theme.series[color],
            label=f"{bands} bands of {numbers}",
        )
    axes.axvline(0.8, color=theme.quiet, linestyle="--")
    axes.set(xlabel="similarity J", ylabel="chance to be compared", ylim=(0, 1.03))
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    meeting,
    "Figure 2. How likely two texts have an equal band, so that they are compared. "
    "With 16 bands of 8 numbers it is 95 % for J = 0.8 (dashed). With 9 bands of 13, "
    "which the library datasketch would choose for 0.8, it is only 40 %. Of the texts "
    "that are compared, the whole signatures accept about half at exactly J = 0.8, "
    "because of their error, and nearly all at 0.9.",
)

# %% [markdown]
# ## 3. Prove it
# The package reads a folder of twelve books. One of these comes twice, once more with a few changed words, and one is
# in French. First we compare the rows of its mapped file with those of a list, and the memory that both take. Then we
# deal the rows out to two processes, as its trainer does.

# %% Write the books, and open them tags=["hide-input"]
original = book(900)
french = (
    "Le soir, tout le monde est venu à la salle avec une bougie, "
    "et personne ne savait pourquoi. " * 300
)
library = {"a": original, "b": original, "c": spoilt(original, 0.005), "d": french} | {
    n: book(900) for n in "efghijkl"
}
(folder / "books").mkdir()
for name, content in library.items():
    (folder / "books" / f"{name}.txt").write_text(content)
(folder / "eval.txt").write_text(book(20))
recipe = with_settings(
    Recipe(name="books", model="random:tiny"),
    [
        f"data.train={folder / 'books'}",
        f"data.eval={folder / 'eval.txt'}",
        "data.max_length=96",
        "data.overlap=16",
        "train.max_steps=2",
        "tricks.gradient_accumulation=4",
        "tricks.peft=lora",
    ],
)
held_out = sources.find(recipe.data.eval, "eval")


def quiet(sentence):
    """What the package would tell the user."""


def read_books(**where):
    """The rows of all books, and the most bytes that Python held meanwhile."""
    tracemalloc.start()
    books = open_rows(recipe.data.train, "train")
    found = train_rows(recipe, books, held_out, tokenizer, quiet, **where)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found, peak


# %%
read_books(collect=mapped_rows)  # imports the library
listed, as_list = read_books()
on_disk, as_file = read_books(collect=mapped_rows)
assert list(on_disk.rows) == listed.rows
print(f"{listed.tokens:,} tokens: {as_list:,} bytes as a list, {as_file:,} mapped")
assert as_file < as_list / 4

numbers = order_of(len(on_disk.rows), seed=0, epoch=0)
alone = list(Share(numbers, batch_size=2))  # micro-batches of two rows
first, second = (list(Share(numbers, 2, process, 2)) for process in (0, 1))
assert [*chain(*zip(first, second, strict=True))][: len(alone)] == alone
print("micro-batches of one process:", *alone[:4])
print("of the first of two:         ", *first[:2])

# %% [markdown]
# Both give the same rows. While it writes, the mapped way holds one book and a hundred rows. With two processes each
# micro-batch is the one that one process would have read, so a step has the same rows.
#
# ## 4. What it costs
# The mapped file takes four bytes of disk for a token, and a bit that says whether it is trained. A search for
# duplicates must remember all earlier rows. It keeps a hash for each row, which takes about 110 bytes as a Python
# number in a set. For near duplicates it also keeps 128 numbers, and one entry (a key and a set) in each of 16 tables.
# How many bytes is that for a row?

# %% Your guess: bytes for each row, to find near duplicates tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
several = [Chat((), "", "", "here", book(6)) for _ in range(600)]
several[300:310] = several[:10]
bytes_a_row = {}
for kind in ("exact", "near"):
    in_memory = Repeats(near=kind == "near")
    reasons = [in_memory.reason(row) for row in several[:100]]  # makes the tables
    tracemalloc.start()
    reasons += [in_memory.reason(row) for row in several[100:]]
    bytes_a_row[kind] = tracemalloc.get_traced_memory()[0] / 500
    tracemalloc.stop()
    print(f"{kind} duplicates: {bytes_a_row[kind]:,.0f} bytes a row")
course.reveal(guess, bytes_a_row["near"], "bytes")
assert bytes_a_row["near"] > 2000 > 10 * bytes_a_row["exact"]

# %% [markdown]
# A million rows take 6 GB. For more, the search belongs on files: [texts at scale](../docs/guide/texts_at_scale.md) has
# a script for the library datatrove, which sorts the hashes of the bands on files, so that equal ones are neighbours.

# %% [markdown]
# ## 5. The production switch
# In plain Hugging Face code, `datasets` streams files, shares them among processes, and shuffles with a buffer:
#
# ```python
# from datasets import load_dataset
# from datasets.distributed import split_dataset_by_node
#
# books = "books/*.txt"
# rows = load_dataset(
#     "text", data_files=books, sample_by="document", split="train", streaming=True
# )
# # each process reads all files, unless world_size divides their number
# rows = split_dataset_by_node(rows, rank=0, world_size=2)
# rows = rows.shuffle(seed=0, buffer_size=1000)  # then tokenize and cut
# ```
#
# With this package each step of the cleaning is a setting, and the tokens always go into a mapped file:
#
# ```bash
# cria train baseline --set data.train=books --set data.eval=held_out.txt \
#   --set data.duplicates=near
# ```
#
# The steps are off by default, except `data.leakage`, which warns. (`data.stream=true` reads a data set of the hub, or
# a folder, while it trains: without a file and without shuffling. It cannot look for duplicates.) The report counts
# what happened to our folder:

# %%
cleaned = ["data.duplicates=near", "data.language=en"]
cleaned += ["data.min_words=100", "data.leakage=drop"]
clean = with_settings(recipe, cleaned)
report = train(clean, folder / "run", console=Console(quiet=True))
counts = report["data"]["train_steps"]
lines = [(step, str(found["rows"])) for step, found in counts.items()]
course.show_table(table(("what happened", "books"), lines))
for step in ("in another language", "duplicate", "near duplicate"):
    assert counts[step]["rows"] == 1

# %% [markdown] tags=["deep"]
# ### Deeper: leave out texts that repeat themselves, and copy rows with a change
# Pages of the web hold menus, and texts that machines wrote. `data.quality=gopher` leaves out a text if too many of its
# lines, paragraphs or word sequences are repeated, by the limits of DeepMind's Gopher. The switch is off by default,
# because a poem with a refrain breaks these limits. One of our made-up books breaks them, too, because it has only
# three patterns of sentences.

# %% tags=["deep"]
pages = {
    "a docstring": duplicates.__doc__,
    "one of our books": book(40),
    "a menu": "Home\nShop\nLog in\n" * 20,
    "text with a menu": duplicates.__doc__ + "\nHome\nShop\nLog in" * 8,
}
found = {name: repetitive(page) for name, page in pages.items()}
for name, rule in found.items():
    print(f"{name + ':':18} {rule or 'stays'}")
assert [bool(rule) for rule in found.values()] == [False, True, True, True]

# %% [markdown] tags=["deep"]
# **More rows from the rows that you have.** The answers of our job cite documents by number, and an adapter could learn
# that document 1 is always right. Therefore `data.shuffle_documents=0.5` gives about half of the rows a copy. In the
# copy the documents are in another order, and so are the numbers in the answer. `data.drop_cited` makes a copy without
# the documents that the answer cites, and its answer is a refusal.

# %% tags=["deep"]
chat = next(
    row
    for row in sources.find("nguzo_saba", "train").rows
    if "[2]" in row.messages[-1]["content"]
)
both = Augment({"shuffle_documents": 1, "drop_cited": 1}, seed=0)
for kind, copy in {"as it is": chat, **dict(both.copies(chat))}.items():
    said = json.loads(copy.messages[-1]["content"])["answer"]["text"]
    print(f"{kind:18} {labels(said)!s:8} {said[:56]}...")

# %% [markdown]
# ## 6. Where it breaks
# **The evaluation loss is much too good.** Test questions are in the training data, unchanged or with another name
# ([leakage](../docs/glossary.md#leakage)). A hash of the words finds only unchanged ones. The cure is
# `data.leakage=drop`. The package's `Guard` compares the words and word pairs of the *question* (of a text, sequences
# of eight words), and reports a similarity of 0.5 or more. We plant test questions with another name in `nguzo_saba`:

# %% Helper: copies of the test questions with another name tags=["hide-input"]
other_name = {"Ujima": "Imani", "Montgomery": "Mobile", "NAACP": "SNCC"}
other_name |= {"mkeka": "kinara"}


def renamed(row, old):
    turns = []
    for turn in row.messages:
        content = turn["content"].replace(old, other_name[old])
        turns.append({**turn, "content": content})
    return Chat(tuple(turns), "", "", "planted")


test = sources.find("nguzo_saba", "eval").rows
planted = []
for row in test:
    question = row.messages[-2]["content"]
    planted += [renamed(row, old) for old in other_name if old in question]


def words_hash(row):
    return duplicates.digest(row.content.split())


# %%
guard = Guard(test)
hashes = {words_hash(row) for row in test}
by_hash = [row for row in planted if words_hash(row) in hashes]
by_guard = [row for row in planted if guard.find(row)]
print(f"{len(planted)} planted: hash {len(by_hash)}, guard {len(by_guard)}")
assert len(by_guard) == len(planted)
assert not any(map(guard.find, sources.find("nguzo_saba", "train").rows))

# %% [markdown]
# In the Kwanzaa data the guard finds 15 of the 107 training rows. They ask 8 of the 27 test questions: two word for
# word, six with another name or subject. (The recipe `kwanzaa_curated` of [Kwanzaa](kwanzaa.py) leaves them out.)
#
# **Each row comes twice in a run of two processes.** Each process opened the whole stream, so the loss falls as usual,
# on half as many rows. The cure is step 3, or `split_dataset_by_node`.
#
# **After a resume the loss is fine, and some rows were never seen.** The stream shuffled with a buffer, and a stop
# loses the rows in it. The cure is step 2.

# %% [markdown] tags=["deep"]
# ### Deeper: the rows that a shuffle buffer loses
# We stop a stream of `datasets` after 37 of 120 rows, and continue from its saved state. Its buffer holds 20 rows.
#
# Other tools for rows at scale, which we have not tried: torchdata's `StatefulDataLoader` (`use_stateful_dataloader` of
# accelerate) saves the position of a loader, MosaicML Streaming and WebDataset read shards over the network, and
# Megatron-LM maps indexed files. Several sources are mixed by weight with `interleave_datasets(sources,
# probabilities=...)` of `datasets`; our package cannot do that.


# %% tags=["deep"]
twelve = [list(range(10 * n, 10 * n + 10)) for n in range(12)]  # 12 shards, 120 rows


def numbered(shards):
    for rows in shards:
        yield from ({"n": n} for n in rows)


def buffered():
    rows = IterableDataset.from_generator(numbered, gen_kwargs={"shards": twelve})
    return rows.shuffle(seed=3, buffer_size=20)


stopped, resumed = buffered(), buffered()
seen = [row["n"] for row in islice(stopped, 37)]
resumed.load_state_dict(stopped.state_dict())
seen += [row["n"] for row in resumed]
lost = set(range(120)) - set(seen)
print(f"{len(lost)} of 120 rows are lost")
assert lost

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** How many rows does a book of 100,500 tokens make, with rows of 2,048 tokens and an overlap of 256?
# 2. **Build.** Answers cite documents by number, and a copy of a row has its documents in another order: `order[k]` is
#    the old number of what is now document $k+1$. Fill in `renumber(text, order)`, which returns the text with new
#    numbers in labels such as `[2]`, `[1][3]` or `[12]`. With the order `[2, 3, 1]`, the label `[2]` becomes `[1]`.
#    Each label's number is in `order`.
# 3. **Reach.** A signature of 128 numbers is cut into $128/r$ bands of $r$ numbers. What is the largest $r$, of 4, 8,
#    16 and 32, for which two texts with $J=0.8$ have an equal band in at least nine cases of ten?

# %% tags=["exercise"]
rows_of_the_book = None


def renumber(text, order):
    """Return the text, a string, with the documents' new numbers in its labels. FILL ME
    IN."""


numbers_in_a_band = None


# %% Check the exercises tags=["hide-input"]
def of_renumbering(answer):
    cases = (
        (
            "first [1], then [2].",
            [2, 1],
            "first [2], then [1].",
            "a label that was changed must not change again",
        ),
        (
            "see [2].",
            [2, 3, 1],
            "see [1].",
            "order[0] is 2, so what was document 2 is document 1 now",
        ),
        (
            "In 1966, with 2 others [2].",
            [2, 1],
            "In 1966, with 2 others [1].",
            "a number without brackets is no label",
        ),
        (
            "[3][2], and [2]",
            [2, 3, 1],
            "[2][1], and [1]",
            "labels may follow one another, or come twice",
        ),
        (
            "[12] and [1]",
            [12, *range(1, 12)],
            "[1] and [2]",
            "a number may have two digits",
        ),
        (
            "Nothing is cited.",
            [2, 1],
            "Nothing is cited.",
            "a text without labels stays as it is",
        ),
    )
    for text, order, right, hint in cases:
        found = answer(text, list(order))
        if found is None:
            raise NotImplementedError
        if not isinstance(found, str):
            raise TypeError(f"this is a {type(found).__name__}")
        assert found == right, (
            f"{text!r} in the order {order} becomes {found!r}: {hint}"
        )


of_rows = course.equal(
    len(chunks(list(range(100_500)), 2048, 256)),
    "after the first row each row has new tokens only beyond its overlap, "
    "and what is left over takes a row, too",
)
of_bands = course.equal(
    max(r for r in (4, 8, 16, 32) if 1 - (1 - 0.8**r) ** (128 // r) >= 0.9),
    "compute the chance of an equal band for each r, with its own number of bands, "
    "and take the largest r that reaches 0.9",
)
course.check(1, rows_of_the_book, of_rows, "a whole number of rows")
course.check(
    2,
    renumber,
    of_renumbering,
    "a function (text, order) -> the text with new labels, a string",
)
course.check(3, numbers_in_a_band, of_bands, "one of the numbers 4, 8, 16 and 32")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# rows_of_the_book = -(-(100_500 - 256) // (2048 - 256))  # 56
#
#
# def renumber(text, order):
#     import re
#
#     new = {old: place for place, old in enumerate(order, 1)}
#     return re.sub(r"\[(\d+)\]", lambda found: f"[{new[int(found[1])]}]", text)
#
#
# numbers_in_a_band = 8  # 0.95; with 16 it is 0.20
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the memory of all tokens: as Python lists they take 12 bytes for each character of the text, as an array
#   of 16-bit ids 0.6 (32-bit: 1.2), and as a mapped file or a stream nearly nothing.
# - **Costs** a pass before training, and 2 to 4 bytes of disk for each token. A stream costs tokenizing in each epoch.
#   Near duplicates cost 6 kB of memory for each row.
# - **Exact**: each row is read once a pass, and a step has the same rows for any number of processes, also after a
#   stop.
# - **When**: map a file as a rule, also where the rows would fit into memory. Stream if the text comes over the
#   network, or if you cannot wait until all rows are tokenized.
# - **When not**: do not stream if you pack, because packing needs the lengths of all rows first.
#
# ## Sources
# - Broder 1997, *On the resemblance and containment of documents*, section 2 (shingles, MinHash). Leskovec, Rajaraman,
#   Ullman, *Mining of Massive Datasets*, chapter 3 (bands).
# - Lee et al. 2022, *Deduplicating Training Data Makes Language Models Better*, arXiv 2107.06499.
# - Brown et al. 2020, arXiv 2005.14165, appendix C (test data in the training data).
# - datasets 5.2, `IterableDataset.state_dict`: what a shuffle buffer loses; *Datasets and Arrow*: mapped files.
# - karpathy/nanoGPT, `train.py`: tokens in a mapped file. numpy, `memmap`. Linux, `madvise(2)`.
# - huggingface/datatrove, `src/datatrove/pipeline/dedup/minhash.py` at commit 03a9d9a9: near duplicates on files.
# - Rae et al. 2021 (Gopher), arXiv 2112.11446, appendix A.1.1, table A1 (repetition). Penedo et al. 2024 (FineWeb),
#   arXiv 2406.17557, section 3.3.
# - Ours: in `cria_tricks/data/`, `table.py`, `stream.py`, `duplicates.py`; `cria_tricks/trainer/training.py`;
#   `tests/data/test_table.py`, `tests/data/test_stream.py`.
