# ---
# jupyter:
#   extra: data
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Data at scale: read what you need, each row once
# > **Promise.** You clean a folder of books, and write its tokens into a file that training reads row by row. You
# > stream a folder, stop and go on, and no row comes twice or is lost. And you find test questions among training rows.
#
# > **Card.** saves the memory of all rows: 12 bytes a character as Python lists, 0.6 as 16-bit ids / costs a pass
# > beforehand, or tokenizing in each epoch / exact: each row once a pass, also over a stop / 35 minutes / after
# > [resuming](checkpoint_and_resume.py)
#
# Our job has 107 rows. Here a collection of books takes their place. The adapter trains on whole texts (*continued
# pretraining*), to learn a subject before it learns to answer.

# %% Imports and settings tags=["hide-input"]
import json
import logging
import mmap
import random
import tempfile
import time
import tracemalloc
import warnings
from itertools import chain, islice
from pathlib import Path
from zlib import crc32

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

import numpy as np
import psutil
from datasets import IterableDataset
from rich.console import Console

from cria_tricks import course, models
from cria_tricks.bench.style import Theme
from cria_tricks.data import duplicates, shards, sources
from cria_tricks.data.duplicates import Guard, Repeats
from cria_tricks.data.filters import repetitive
from cria_tricks.data.prepare import train_rows
from cria_tricks.data.prepared import repeats
from cria_tricks.data.prepared.read import TokenShards
from cria_tricks.data.rows import Chat
from cria_tricks.data.stream import Stream
from cria_tricks.kwanzaa.augment import Augment
from cria_tricks.kwanzaa.statements import labels
from cria_tricks.load.model import load_tokenizer
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run import preparing, run

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


tokenizer = load_tokenizer(models.find("random:tiny"))
place = tempfile.TemporaryDirectory()
folder = Path(place.name)

# %% [markdown]
# ## 1. The bill
# 200 MB of English like ours, below, are some 60 million tokens. They can wait in four ways:
#
# - **lists** of Python integers, ids and labels
# - **an array** of 16-bit ids (our vocabulary has 49,152 tokens; Llama-3.2's 128,256 need 32 bits)
# - **a mapped file** of the array: the system reads a *page* of it (4 KiB) when asked, and may drop it again
# - **a stream**, which tokenizes during the training
#
# How many bytes of memory does each take for a character of the text? Which reads all rows fastest? Guess.

# %% Your guess: bytes of a character in lists tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
T = 128


# not line by line: tokenizers 0.23.1 never frees 64 bytes of each text that it was
# given
def some_lines(file):
    with file.open(encoding="utf-8") as lines:
        while some := lines.readlines(2000):
            yield "".join(some)


def tokens_of(file):
    for some in some_lines(file):
        yield from tokenizer(some)["input_ids"]


def rows_of(*columns):
    for n in range(0, len(columns[0]), T):
        yield [column[n : n + T] for column in columns]


def lists(file):
    ids = list(tokens_of(file))
    return rows_of(ids, list(ids))


def array(file):
    return rows_of(np.fromiter(tokens_of(file), np.uint16))


def mapped(file):
    with file.with_suffix(".ids").open("wb") as out:
        for some in some_lines(file):
            np.array(tokenizer(some)["input_ids"], np.uint16).tofile(out)
    return rows_of(np.memmap(file.with_suffix(".ids"), np.uint16, "r"))


def stream_of(file):
    tokens = tokens_of(file)
    while row := list(islice(tokens, T)):
        yield [row]


# %% Helpers: bytes held, and seconds tags=["hide-input"]
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
    for row in chain([first], rows):
        np.sum(row[0])
    return ready - began, time.process_time() - ready


# %%
text = book(3000)
ids = tokenizer(text)["input_ids"]
quarter, whole = folder / "quarter.txt", folder / "whole.txt"
quarter.write_text(text[: len(text) // 4])
whole.write_text(text)
bill, sums, taken = {}, set(), {}
for way in (lists, array, mapped, stream_of):
    small, (large, total) = held(way, quarter)[0], held(way, whole)
    bill[way] = large / len(text)
    sums.add(total)
    taken[way] = seconds(way, whole)
    print(
        f"{way.__name__:9} a quarter {small:9,}, all {large:9,} bytes: "
        f"{bill[way]:5.2f} a character, "
        f"{large / len(ids):5.2f} a token"
    )
    print(
        f"{'':9} first row after {taken[way][0]:.3f} s, "
        f"all rows in {taken[way][1]:.3f} s"
    )
    grows = way in (lists, array)
    # A notebook's other threads allocate some kilobytes now and then, and tracemalloc
    # counts them, too.
    assert large > 3 * small if grows else large < small + 30_000
print(
    f"200 MB as lists: {0.2 * bill[lists]:.1f} GB, as an array: "
    f"{0.2 * bill[array]:.2f} GB"
)
assert len(sums) == 1  # all four give the same tokens
assert max(ids) < 2**16
assert bill[lists] > 15 * bill[array]
assert 2 * len(ids) < bill[array] * len(text) < 2.2 * len(ids)
assert taken[stream_of][1] > 5 * taken[mapped][1]  # an epoch of a stream tokenizes
# but its first row needs no pass beforehand
assert taken[stream_of][0] < taken[mapped][0] / 5
course.reveal(guess, bill[lists], "bytes")

# %% [markdown]
# A Python integer takes 28 bytes (those up to 256 exist only once), and each list 8 more to point to it: in all
# nineteen times an array's 2 bytes. A mapped file and a stream take the same for a text of any length. But
# `tracemalloc` does not see mapped pages. What does the *process* show after it has read 64 MiB of a mapped file?

# %% Show mapped pages in a process's memory tags=["hide-input"]
with (folder / "zeros").open("wb") as file:
    file.truncate(2**26)
with (folder / "zeros").open("rb") as file:
    pages, process = (
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ),
        psutil.Process(),
    )
before = process.memory_info().rss
np.frombuffer(pages, np.uint16).max()
read = process.memory_info().rss - before
pages.madvise(mmap.MADV_DONTNEED)  # as the system does when memory runs short
dropped = process.memory_info().rss - before
print(f"read: {read / 2**20:+.0f} MiB, dropped: {dropped / 2**20:+.0f} MiB")
assert read > 2**25 > 4 * abs(dropped)

# %% [markdown]
# Mapped pages count as memory of the process, but the system drops them when memory runs short, because the file still
# has them.
#
# Any row of a mapped file can be read at any time. So rows can be shuffled and divided as in a list, and a position is
# one number. nanoGPT trains from such a file, and `cria prepare` writes one (section 5).
#
# A stream begins at once and needs no disk. But each epoch tokenizes again, and four things become hard: to shuffle, to
# divide among processes, to find what came before, and to *stop and go on*. This lesson builds them.
#
# ## 2. From scratch, in four steps
# **Cut.** A book is longer than a row, so its tokens are cut every $T$. A token is predicted from the one before it, so
# the first one of each row is never trained. Cure: each row begins with the last tokens of the row before, as
# *context*. They get the label -100, which makes no loss.


# %%
def chunks(ids, T, overlap):
    end, rows = 0, []
    while end < len(ids):
        begin = max(0, end - overlap)
        known, end = max(end, 1) - begin, min(begin + T, len(ids))
        rows.append(
            {
                "input_ids": ids[begin:end],
                "labels": [-100] * known + ids[begin + known : end],
            }
        )
    return rows


def trained(rows):
    return [label for row in rows for label in row["labels"] if label != -100]


for overlap in (1, 16, 64):
    cut = chunks(ids, 128, overlap)
    print(
        f"overlap {overlap:2}: {len(cut):3} rows, "
        f"{len(trained(cut)):,} of {len(ids):,} tokens trained"
    )
    assert trained(cut) == ids[1:]


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
    "Figure 1. Dashed: the last tokens of the row before, seen and not trained. "
    "So each token but the book's first is "
    "trained once.",
)

# %% [markdown]
# **Compare.** Which texts are the same but for a few words? Take all sequences of five words, the *shingles*, as a set.
# Two texts are as similar as $J = |A \cap B| / |A \cup B|$. But a million texts are 500 billion pairs. *MinHash* makes
# a short *signature* of a set: the smallest hash of its shingles, for each of 128 hash functions. Each shingle of
# $A \cup B$ is equally likely to have the smallest. If that one is in both sets, their numbers are equal, which has the
# probability $J$. So the share of equal numbers estimates $J$.


# %%
def shingles(text, n=5):
    words = text.lower().split()
    return {
        crc32(" ".join(words[i : i + n]).encode()) for i in range(len(words) - n + 1)
    }


def signature(found):
    # each makes another hash function
    salts = np.random.default_rng(1).integers(0, 2**63, 128, np.uint64)
    mixed = (np.array(list(found), np.uint64)[:, None] ^ salts) * np.uint64(
        0x9E3779B97F4A7C15
    )
    return ((mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)).min(0)


def spoilt(text, share):
    return " ".join(
        draw.choice(names) if draw.random() < share else word for word in text.split()
    )


pairs = [
    (shingles(text), shingles(spoilt(text, share)))
    for share in (0.005, 0.02, 0.05, 0.1, 0.2)
]
for A, B in pairs:
    J, estimate = len(A & B) / len(A | B), (signature(A) == signature(B)).mean()
    print(f"J = {J:.2f}, MinHash {estimate:.2f}")
    assert abs(estimate - J) < 4 * (J * (1 - J) / 128) ** 0.5

# %% [markdown]
# A changed word changes five shingles. So one word in fifty changes a tenth of each set, and $J$ falls to 0.9 / 1.1,
# about 0.8. From there on the package calls two texts near duplicates.
#
# **Meet.** Cut the signature into 16 *bands* of 8 numbers, and keep a table for each band. Texts with an equal band
# meet, and are compared. A band is equal with probability $J^8$, so two texts meet with probability
# $1 - (1 - J^8)^{16}$.

# %% Draw figure 2 tags=["hide-input"]
assert [
    round(1 - (1 - 0.8**rows) ** count, 2) for rows, count in ((8, 16), (13, 9))
] == [0.95, 0.4]


def meeting(theme: Theme):
    """How likely two texts meet, by their similarity."""
    drawn, axes = course.figure(height=2.6)
    J = np.linspace(0, 1, 200)
    for rows, count, color in ((8, 16, 0), (13, 9, 1)):
        axes.plot(
            J,
            1 - (1 - J**rows) ** count,
            color=theme.series[color],
            label=f"{count} bands of {rows}",
        )
    axes.axvline(0.8, color=theme.quiet, linestyle="--")
    axes.set(xlabel="similarity J", ylabel="chance to meet", ylim=(0, 1.03))
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    meeting,
    "Figure 2. With 16 bands of 8, 95 % of the pairs at 0.8 (dashed) meet; "
    "with 9 of 13, which the library datasketch "
    "would choose for 0.8, 40 % do. Those that meet are compared by all 128 numbers.",
)

# %% [markdown]
# **Remember the place.** A shuffled stream usually keeps a buffer of rows and draws from it. Stop it, and the buffer is
# gone. So shuffle without one. Cut the files into *shards*, parts that can be read without the rest: 8 MiB of JSON
# lines, or 1 MiB of text. The seed gives the order of the shards, and inside a shard the order of its rows. Then a
# position is two numbers.


# %%
class Position:
    def __init__(self, shards, seed):
        self.shards, self.seed, self.shard, self.row = shards, seed, 0, 0

    def __iter__(self):
        order = np.random.default_rng(self.seed).permutation(len(self.shards))
        while self.shard < len(order):
            rows = self.shards[order[self.shard]]
            inside = np.random.default_rng([self.seed, order[self.shard]]).permutation(
                len(rows)
            )
            while self.row < len(rows):
                self.row += 1
                yield rows[inside[self.row - 1]]
            self.shard, self.row = self.shard + 1, 0


ten = [list(range(10 * n, 10 * n + 10)) for n in range(10)]
first = Position(ten, seed=3)
before = list(islice(first, 37))
second = Position(ten, seed=3)
second.shard, second.row = first.shard, first.row  # all that a checkpoint has to hold
assert sorted(before + list(second)) == list(range(100))

# %% [markdown]
# ## 3. Prove it
# Twelve books: one comes twice, and once more with other words here and there; one is in French. The package reads them
# as a stream of four *lanes*: micro-batch $i$ of every step comes from lane $i$, which has shards of its own. Two
# processes take two lanes each, so a step has the same rows for one process, two or four. A stopped run goes on from
# the lanes' places. A lane that ends begins again at once.

# %%
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
        "data.stream=true",
        "data.max_length=96",
        "data.overlap=16",
        "train.max_steps=2",
        "tricks.gradient_accumulation=4",
        "tricks.peft=lora",
    ],
)
held_out = sources.find(recipe.data.eval, "eval")


def stream(rank=0, processes=1):
    source = shards.open_stream(recipe.data.train, lanes=4)
    # its number, how many there are, and shares of the rows
    world = World(rank, processes, data=processes)
    return Stream(recipe, source, held_out, tokenizer, world, say=lambda sentence: None)


one = stream()
every = [row["input_ids"] for row in islice(one, 4000)]
two = [iter(stream(rank, 2)) for rank in (0, 1)]
assert [next(two[n % 2])["input_ids"] for n in range(40)] == every[:40]

stopped = stream()
list(islice(stopped, 4 * 900))
state = json.loads(json.dumps(stopped.state()))
resumed = stream()
resumed.go_on(state)
assert [row["input_ids"] for row in islice(resumed, 100)] == every[3600:3700]
print(
    "lane 0 after 900 steps:", {name: state["0"][name] for name in ("before", "given")}
)
print("passes of each lane that are done:", [state[lane]["epoch"] for lane in "0123"])

# %% [markdown]
# *before* is the position that `datasets` keeps, behind the last shard that is done. *given* counts the rows of the
# next shard that went out. Lane 2 has one shard only, and is in its fourth pass while lane 0 is in its first: a stream
# should have many more shards than lanes.
#
# ## 4. What it costs
# The package's stream holds a shard of each lane as lists, 1 MiB of text at most: by the bill, 12 MB. A search for
# duplicates takes a pass over everything before the run. In memory it keeps a hash of 64 bits for each row; for near
# ones also 128 numbers, and an entry in each of 16 tables. Predict: hundreds of bytes a row, or thousands?

# %%
several = [Chat((), "", "", "here", book(6)) for _ in range(600)]
several[300:310] = several[:10]
bytes_a_row = {}
for kind, near in (("exact", False), ("near", True)):
    in_memory = Repeats(near)
    reasons = list(map(in_memory.reason, several[:100]))  # the empty tables, once
    tracemalloc.start()
    reasons += list(map(in_memory.reason, several[100:]))
    bytes_a_row[kind] = tracemalloc.get_traced_memory()[0] / 500
    tracemalloc.stop()
    print(
        f"{kind:5} {bytes_a_row[kind]:6,.0f} bytes a row, "
        f"{bytes_a_row[kind] / 1000:.2f} GB for a million rows"
    )
assert bytes_a_row["near"] > 2000 > 10 * bytes_a_row["exact"]

# %% [markdown]
# Each table has a key and a set of its own for the row. So for millions of rows the search belongs on files, as in the
# library datatrove. `cria_tricks/data/prepared/repeats.py` takes its stages:
#
# 1. Each part of the rows writes its signatures, and the hashes of their bands, *sorted*.
# 2. The sorted hashes are merged, so that equal ones are neighbours. What stands alone is dropped.
# 3. Rows with an equal band are compared, and a row that repeats an earlier one is left out.
#
# Several processes can share the parts.

# %%
parts = []
for begin in range(0, 600, 200):
    part = repeats.Signatures(near=True)
    list(map(part.add, several[begin : begin + 200]))
    parts.append(folder / "signatures" / str(begin))
    part.write(parts[-1])
on_disk = sum(file.stat().st_size for file in (folder / "signatures").iterdir()) / 600
tracemalloc.start()
verdicts = repeats.find(parts)
peak = tracemalloc.get_traced_memory()[1] / 600
tracemalloc.stop()
print(
    f"on files: {on_disk:,.0f} bytes a row on the disk, "
    f"{peak:,.0f} in memory at the most"
)
# the same rows as in memory
assert [repeats.REASONS[verdict] for verdict in verdicts] == reasons
# 128 x 4 of the signature; 17 x (8 + 4) of 16 bands and the whole text: hash and row
assert 716 <= on_disk < 730
assert peak < bytes_a_row["near"] / 5

# %% [markdown]
# Memory holds 4 million hashes at a time, and the bands that rows share.
#
# ## 5. The production switch
# Each step of the cleaning is a field of the recipe, and the report says what it left out. All are off but
# `data.leakage`, which warns (section 6). They clean a stream as well as a list; here it is a list.

# %%
cleaned = [
    "data.stream=false",
    "data.duplicates=near",
    "data.language=en",
    "data.min_words=100",
    "data.leakage=drop",
]
report = run.train(
    with_settings(recipe, cleaned), folder / "run", console=Console(quiet=True)
)
counts = report["data"]["train_steps"]
for step, found in counts.items():
    print(f"{step:30}{found['rows']:4} books {found['words']:8,} words")
left_out = ("in another language", "duplicate", "near duplicate")
assert [counts[step]["rows"] for step in left_out] == [1, 1, 1]

# %% [markdown]
# **Once, for all runs.** `cria prepare RECIPE --out shards` writes what is left as token shards, 16 bits a token. After
# a kill the same command goes on. Then `cria train RECIPE --set data.train=shards` maps each row. Its rows are those of
# the list, so the run is the same, bit for bit; `max_length`, `overlap` and the batch can still change.

# %%
to_map = with_settings(recipe, cleaned)
about = preparing.prepare(to_map, folder / "shards")
listed = train_rows(
    to_map,
    sources.find(to_map.data.train, "train"),
    held_out,
    tokenizer,
    lambda sentence: None,
)
mapped_rows = TokenShards(folder / "shards").rows(to_map.data, held_out, tokenizer)
size = sum(file.stat().st_size for file in (folder / "shards").glob("*.ds"))
print(
    f"{about['documents']} documents, {about['tokens']:,} tokens in {size:,} bytes: "
    f"{len(mapped_rows.rows):,} rows"
)
assert list(mapped_rows.rows) == listed.rows
assert mapped_rows.tally.to_dict() == counts
assert size == 2 * about["tokens"]

# %% [markdown]
# **Leave out what repeats itself.** Pages of the web hold menus and texts made by machines. `data.quality=gopher`
# leaves out a text if too many of its lines, paragraphs or word sequences are repeated, by the limits of DeepMind's
# Gopher. It is off by default, because a poem with a refrain breaks them. Does one of our made books?

# %% Try the quality filter on four pages tags=["hide-input"]
pages = {
    "a docstring": duplicates.__doc__,
    "one of our books": book(40),
    "a menu": "Home\nShop\nLog in\n" * 20,
    "text with a menu": duplicates.__doc__ + "\nHome\nShop\nLog in" * 8,
}
found = {name: repetitive(page) for name, page in pages.items()}
for name, rule in found.items():
    print(f"{name:16} {rule or 'stays'}")
assert [bool(rule) for rule in found.values()] == [False, True, True, True]

# %% [markdown]
# Our books have only three patterns of sentences.
#
# **More rows of what you have.** Answers cite documents by number, and an adapter could learn that document 1 is always
# right. `data.shuffle_documents=0.5` gives about half of the rows a copy with the documents, and the numbers in the
# answer, in another order. `data.drop_cited` takes away what was cited and lets the copy refuse to answer:

# %%
chat = next(
    row
    for row in sources.find("nguzo_saba", "train").rows
    if "[2]" in row.messages[-1]["content"]
)
answers = {"as it is": chat} | dict(
    Augment({"shuffle_documents": 1, "drop_cited": 1}, seed=0).copies(chat)
)
for kind, copy in answers.items():
    said = json.loads(copy.messages[-1]["content"])["answer"]["text"]
    print(f"{kind:18} {labels(said)!s:8} {said[:88]}")


# %% [markdown]
# ## 6. Where it breaks
# **The evaluation loss is wonderful.** Test questions are in the training data, as they are or with another name. A
# hash finds only the first kind. Cure: heed the warning, and set `data.leakage=drop`. The guard compares the words and
# word pairs of what is *asked*, because all answers look alike. It reports a similarity of 0.5 or more.

# %%
test = sources.find("nguzo_saba", "eval").rows
guard = Guard(test)


def asks(row, old, new):
    turns = tuple(
        {**turn, "content": turn["content"].replace(old, new)} for turn in row.messages
    )
    return Chat(turns, "", "", "planted")


planted = [
    asks(row, old, new)
    for row in test
    for old, new in (
        ("Ujima", "Imani"),
        ("Montgomery", "Mobile"),
        ("NAACP", "SNCC"),
        ("mkeka", "kinara"),
    )
    if old in row.messages[-2]["content"]
]
same = {duplicates.digest(row.content.split()) for row in test}
print(
    f"{len(planted)} test rows under another name: a hash finds "
    f"{sum(duplicates.digest(row.content.split()) in same for row in planted)}, "
    f"the guard {sum(guard.find(row) is not None for row in planted)}"
)
assert all(map(guard.find, planted))
assert not any(map(guard.find, sources.find("nguzo_saba", "train").rows))

# %% [markdown]
# In the real data the guard finds 15 of 107 training rows. Two of the 27 test questions are in training word for word,
# six more with another name or subject.
#
# **After a resume the loss is fine, and some rows were never seen.** The stream was shuffled by a buffer, and what was
# in it is lost, as `datasets` documents. Cure: shuffle shards, and rows inside a shard. Here the buffer holds 20 rows:


# %% Show the rows that a buffer loses tags=["hide-input"]
def numbered(shards):
    for rows in shards:
        yield from ({"n": n} for n in rows)


def buffered():
    return IterableDataset.from_generator(numbered, gen_kwargs={"shards": ten}).shuffle(
        seed=3, buffer_size=20
    )


before, after = buffered(), buffered()
seen = [row["n"] for row in islice(before, 37)]
after.load_state_dict(before.state_dict())
lost = set(range(100)) - {*seen, *(row["n"] for row in after)}
print(f"{len(lost)} of 100 rows are lost")
assert lost

# %% [markdown]
# **Two processes, and each row comes twice.** Each opened the whole stream. The loss falls, on half as many different
# rows. Cure: divide by lanes, as above, or with `split_dataset_by_node` of `datasets`.
#
# ## 7. Exercises
# 1. **Predict.** A book of 100,500 tokens, rows of 2,048, overlap 256. How many rows (a whole number)?
# 2. **Build.** Documents were put in another order: `order[k]` is the old number of what is now document k + 1. Write
#    `renumber(text, order)`, which returns the text with the new numbers in labels such as `[2]`, `[1][3]` or `[12]`.
#    With the order `[2, 3, 1]`, `[2]` becomes `[1]`. (Two `replace` in a row will not do.)
# 3. **Reach.** 128 numbers in bands of $r$. What is the largest $r$, of 4, 8, 16 and 32, for which two texts of
#    similarity 0.8 meet in at least nine cases of ten?

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
    "compute the chance to meet for each r, with its own number of bands, "
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
# - **Saves** the memory of all tokens: 12 bytes a character of text as Python lists, 0.6 as an array of 16 bits.
# - **Costs** a pass beforehand and 2 bytes of disk a token, or as a stream tokenizing in each epoch; a pass where
#   duplicates are to go, with 716 bytes of disk a row for near ones.
# - **As good as** a list: each row once a pass, the same steps for any number of processes, also over a stop.
# - **When**: map a file of tokens that stay as they are. Stream if they do not fit on the disk, or you do not want to
#   wait until all of them are made.
# - **When not**: with rows that fit. A list can be packed, and holds chats as well as texts.
#
# ## Sources
# - Broder 1997, *On the resemblance and containment of documents*, section 2 (shingles, MinHash). Leskovec, Rajaraman,
#   Ullman, *Mining of Massive Datasets*, chapter 3 (bands).
# - Lee et al. 2022, *Deduplicating Training Data Makes Language Models Better*, arXiv 2107.06499.
# - Brown et al. 2020, arXiv 2005.14165, appendix C (test data in the training data).
# - datasets 5.2, `IterableDataset.state_dict`: what a shuffle buffer loses; *Datasets and Arrow*: mapped files.
# - karpathy/nanoGPT, `train.py`: tokens in a mapped file. numpy, `memmap`. Linux, `madvise(2)`.
# - huggingface/datatrove, `src/datatrove/pipeline/dedup/minhash.py` at commit 03a9d9a9: 14 bands, each of 8 numbers of
#   32 bits and the text's, in four stages on files; the third keeps the pairs in memory.
# - Rae et al. 2021 (Gopher), arXiv 2112.11446, appendix A.1.1, table A1 (repetition). Penedo et al. 2024 (FineWeb),
#   arXiv 2406.17557, section 3.3.
# - Ours: in `cria_tricks/data/`, `duplicates.py`, `prepared/`, `stream.py`, `shards.py`, `stream_duplicates.py`;
#   `tests/data/test_prepared.py`, `tests/data/test_stream.py`; `tests/drills/shards.py` (2 GB within 1 GiB of memory).
