# ---
# jupyter:
#   question: How do you rent a machine for one training, pay little for it, and lose nothing when a process dies?
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Jobs and elasticity: rent a machine, and lose it
# > **Promise.** On a rented machine the half hour around a short training can cost more than the training, and a dead
# > process can cost the whole run. You will choose a machine by what the whole job costs, train through a killed
# > process without losing a bit, and compute when another machine is worth a restart.
# >
# > **Card.** saves minutes that are paid for nothing, and runs that would be lost / costs half an hour's rent around
# > each job, and a few steps for each restart / exact, on a CPU: a resumed run ends with the same bits / about 25
# > minutes / after [resuming](checkpoint_and_resume.py), [choosing hardware](choose_your_hardware.py) and [data
# > parallelism](data_parallel.py)
#
# So far we started our training by hand, in a notebook: QLoRA of Llama-3.2-1B on 107 training rows, 42 steps. A
# [job](../docs/glossary.md#job) is a command in a container on a rented machine. It is billed by the minute, and the
# machine is taken away at the end, at a timeout, or when a process dies. Then only the log is left, and what the
# command has sent elsewhere.
#
# ## 1. The bill
# By Hugging Face's price list of 2026-08-21 a machine with a T4 costs 0.40 USD an hour, and one with an A100 2.50 USD.
# By our estimate the training takes 7.3 minutes on the T4 and 0.7 on the A100 if all rows are full (4 to 6 on the T4
# with [real lengths](kwanzaa.py)), which costs a few cents on either. But you also pay while the machine installs
# packages, downloads the model, evaluates and publishes. We have not measured this, and assume half an hour (15 minutes
# of it for installing and publishing).
#
# The estimate may be too low ([an H200](../docs/benchmarks.md#a-first-sitting-on-an-h200) took up to 1.37 times the
# upper end of a range), so the *timeout*, after which the job is ended, is half an hour plus twice the estimate. How
# many dollars can the job on the T4 cost at most?

# %% Your guess: dollars that the job on a T4 costs at most tags=["predict"]
guess = 0  # @param {type:"number"}

# %% Imports and settings tags=["hide-input"]
import logging
import math
import textwrap
from dataclasses import dataclass

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
from torch.distributed import HashStore, PrefixStore

from cria_tricks import BadInput, OutOfMemory, course, recipes
from cria_tricks.course import (
    CARDS,
    FLAVORS,
    Target,
    Theme,
    find_shape,
    launch_torchrun,
    plan_data,
    row_lengths,
    table,
    with_settings,
)
from cria_tricks.course import launch as launch_job

# %%
AROUND = 30  # minutes to install, download, evaluate and publish


@dataclass(frozen=True)
class Job:
    """The price of an hour [USD], and the predicted minutes of training."""

    price: float
    minutes: float
    spread: tuple[float, float]  # the ends of the minutes' range

    @property
    def timeout(self):
        """Minutes after which it is ended: twice the training, and what is around."""
        return math.ceil(2 * self.minutes + AROUND)

    @property
    def most(self):
        return self.price * self.timeout / 60

    @property
    def training_cost(self):
        return self.price * self.minutes / 60


def predicted(name, epochs=3):
    """The job on a rented machine."""
    device = CARDS[FLAVORS[name].card].device
    wanted = with_settings(recipes.kwanzaa(device), [f"train.epochs={epochs}"])
    found = plan_data.prices(Target(find_shape(wanted.model), device), wanted, 107)
    run = next(each for each in found if each.flavor == name)
    ends = (run.minutes_low, run.minutes_high)
    return Job(FLAVORS[name].price, run.minutes, ends)


job_on = {name: predicted(name) for name in FLAVORS}
lines = []
for name, job in job_on.items():
    minutes = (f"{job.minutes:.1f}", f"{job.timeout}")
    dollars = (f"{job.training_cost:.2f}", f"{job.most:.2f}")
    lines.append((name, f"{job.price:.2f}", *minutes, *dollars))
course.reveal(guess, job_on["t4-small"].most, "USD")
columns = ("machine", "USD an hour", "training, min", "timeout, min")
course.show_table(table((*columns, "training, USD", "at most, USD"), lines))
print("medium, large: the same card with more host memory; x2, x4: 2 and 4 cards")

# %% Draw figure 1, and hold the numbers of the text tags=["hide-input"]
t4_job, a100_job = job_on["t4-small"], job_on["a100-large"]
assert min(job_on.values(), key=lambda job: job.most) is t4_job
assert [job.price for job in (t4_job, a100_job)] == [0.4, 2.5]
assert [round(j.minutes, 1) for j in (t4_job, a100_job)] == [7.3, 0.7]
_real = sum(tokens for tokens, _ in row_lengths("train")) / (107 * 2048)
_range = [_real * end for end in t4_job.spread]
assert [round(end) for end in _range] == [4, 6]  # minutes, with the rows' real lengths
assert (round(t4_job.most, 2), round(a100_job.most, 2)) == (0.3, 1.33)
assert round(t4_job.training_cost, 2) == 0.05
assert a100_job.price / 2 > 3 * t4_job.most  # even if it trained in no time

EPOCHS = (3, 10, 30, 100, 300, 1000)
usd = {
    name: [predicted(name, n).most for n in EPOCHS]
    for name in ("t4-small", "l4x1", "a100-large")
}
cheapest = [min(usd, key=lambda name: usd[name][n]) for n in range(len(EPOCHS))]
assert cheapest == 3 * ["t4-small"] + 3 * ["a100-large"]
_near = {  # where both cost the same
    epochs: [predicted(name, epochs).most for name in ("t4-small", "a100-large")]
    for epochs in (75, 85)
}
assert _near[75][0] < _near[75][1]
assert _near[85][0] > _near[85][1]
assert round(a100_job.training_cost / t4_job.training_cost, 1) == 0.6
_ends = {  # of the training's cost, in USD
    name: [job_on[name].price * end / 60 for end in job_on[name].spread] for name in usd
}
assert _ends["a100-large"][1] < _ends["t4-small"][0] < 1.15 * _ends["a100-large"][1]
assert _ends["l4x1"][0] < _ends["a100-large"][1]
assert _ends["l4x1"][1] > _ends["t4-small"][1]
_early = t4_job.price * (30 + t4_job.minutes) / 60
assert round(_early, 2) == 0.25
_five = [j.price * (5 + 2 * j.minutes) / 60 for j in (t4_job, a100_job)]
assert [round(most, 2) for most in _five] == [0.13, 0.27]


def by_length(theme: Theme):
    """What a job costs at most, against its epochs."""
    drawn, axes = course.figure(height=3.2)
    for (name, most), colour, marker in zip(
        usd.items(), theme.series, "osD", strict=False
    ):
        axes.plot(EPOCHS, most, color=colour, marker=marker, markersize=4, label=name)
    axes.set(
        xscale="log", yscale="log", xlabel="epochs of 107 rows", ylabel="USD at most"
    )
    axes.grid()
    axes.legend()
    return drawn


course.show(
    by_length,
    "Figure 1. What the job costs at most, by how long it trains (predicted). Short "
    "jobs pay mostly for the half hour, so the cheapest hour wins. (With five minutes "
    "instead of the half hour, too: 0.13 USD on the T4 against 0.27 on the A100.) Long "
    "jobs pay for training, which costs least on the A100.",
)

# %% [markdown]
# Of the 0.30 USD for the T4, only 0.05 pay for training. (If the estimate is right, the job ends earlier and costs
# 0.25.) The A100 trains ten times as fast, but its half hour alone costs 1.25 USD. So for a short training take the
# machine with the cheapest hour.
#
# For a long training the A100 costs least by our estimate, from about 80 epochs on. Its training costs 0.6 of the T4's,
# and the ranges of the two estimates nearly touch. The L4's range overlaps with both, because no public run backs it.
# So before a long job, measure a few steps on each.
#
# ## 2. From scratch, in three steps
# **Step 1: choose the machine whose job costs least.** Its cards must have enough memory ([the bill](the_bill.py)).

# %%
import math  # noqa: F811 (this part runs alone, too)
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

AROUND = 30  # minutes to install, download, evaluate and publish
# dollars an hour, and predicted minutes of training
MACHINES = {"t4-small": (0.40, 7.3), "l4x1": (0.80, 4.5), "a100-large": (2.50, 0.7)}


def at_most(price, minutes):
    """Dollars that a job costs at most, and its timeout in minutes."""
    timeout = math.ceil(2 * minutes + AROUND)
    return price * timeout / 60, timeout


best = min(MACHINES, key=lambda name: at_most(*MACHINES[name]))
dollars, timeout = at_most(*MACHINES[best])
print(f"{best}: at most {dollars:.2f} USD, ended after {timeout} minutes")

# %% [markdown]
# **Step 2: write a run that survives.** A process that may be killed at any moment needs three things
# ([resuming](checkpoint_and_resume.py)):
#
# - a file with *everything* that decides the next step: here its number and the weights, in practice also optimizer
#   states, random state, and the place in the data
# - a rename, so that the file is the old one or the new one, and never half of one
# - a start that looks for the file
#
# Here is a whole run. It fits eight weights, two [processes](../docs/glossary.md#rank) share the rows, and an
# [all-reduce](../docs/glossary.md#all-reduce) adds up their gradients. `world.joined` joins the processes that a
# [launcher](../docs/glossary.md#launcher) has started. Our launcher is torchrun, which counts its restarts in
# `TORCHELASTIC_RESTART_COUNT`. Before the first restart, process 1 kills itself in step 12.

# %%
CODE = '''
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from cria_tricks.processes import world


def gradient(w, rank, size):
    """The gradient of the squared error, of this process's rows: rank, rank + size,
    ... The right weights are all 1."""
    X = torch.arange(64.0).outer(torch.arange(1.0, 9)).sin()
    return X[rank::size].T @ (X @ w - X.sum(1))[rank::size] / 64


def save(file, state):
    new = file.with_suffix(".new")
    with new.open("wb") as out:
        torch.save(state, out)
        out.flush()
        os.fsync(out.fileno())  # on the disk, in case the machine dies, too
    os.replace(new, file)  # the rename: all of it or nothing


def train(file, restarts):
    state = torch.load(file) if file.exists() else {"step": 0, "w": torch.zeros(8)}
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print("restarts:", restarts, "- begins after step", state["step"], flush=True)
    for step in range(state["step"] + 1, 21):
        total = gradient(state["w"], rank, size)
        if (restarts, rank, step) == (0, 1, 12):
            # process 0 then waits in the all-reduce, until the agent ends it
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        state = {"step": step, "w": state["w"] - 0.5 * total}
        if rank == 0 and step % 5 == 0:
            save(file, state)


if __name__ == "__main__":
    # like dist.init_process_group("gloo"), but safe after a restart (section 6)
    with world.joined(timeout=60):
        train(Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
'''

folder = tempfile.TemporaryDirectory()
script = Path(folder.name, "survivor.py")
state_file = Path(folder.name, "state.pt")
_ = script.write_text(CODE)

# %% [markdown]
# **Step 3: let an agent start it again.** Something outside must notice the death, end the other processes, which
# cannot continue alone, and start all of them again. That is torchrun's [agent](../docs/glossary.md#agent), the process
# that started them. `--max-restarts` says how often it may do so. After which step will the run begin again?

# %% Your guess: the step after which the run begins again tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
command += ["--nproc-per-node", "2", "--max-restarts", "1"]
command += [str(script), str(state_file)]
run = subprocess.run(
    command,
    capture_output=True,
    encoding="utf-8",
    env=os.environ | {"OMP_NUM_THREADS": "1"},
)
assert run.returncode == 0, run.stderr[-2000:]

# %% Print what the run said, compare the guess, and draw figure 2 tags=["hide-input"]
print(run.stdout)
course.reveal(guess, 10)
assert [line.split()[-1] for line in run.stdout.splitlines()] == ["0", "10"]


def two_lives(theme: Theme):
    """Steps of the two processes, the checkpoints, and what is done twice."""
    sketch = course.Sketch(theme, 50, 12)
    for row, (first, last, words) in enumerate(((8, 12, "start"), (11, 20, "restart"))):
        top = 1.2 + 5.6 * row
        sketch.text(0, top + 1.6, words, align="left")
        for step in range(first, last + 1):
            left = 7.5 + 3.2 * (step - 8)
            for rank in range(2):
                dead = row == 0 and step == 12
                sketch.tensor(
                    left,
                    top + 1.7 * rank,
                    3,
                    1.4,
                    "x" if dead and rank == 1 else str(step),
                    color=1 if (row, step) == (1, 11) else 0,
                    kept=not dead,
                )
            if step % 5 == 0:
                sketch.text(left + 1.5, top + 4.2, "saved", quiet=True)
    sketch.arrow((21.5, 4.8), (19.5, 6.6), color=1)
    return sketch.figure


course.show(
    two_lives,
    "Figure 2. Steps 8 to 20 of two processes, one below the other, before and after "
    "the restart. Process 1 dies in step 12, which process 0 cannot end alone. Both "
    "begin again after the last saved step, so step 11 is done twice.",
)

# %% [markdown]
# ## 3. Prove it
# The interrupted run must end with the same bits as an uninterrupted one, which here is a single process that adds up
# both shares of the rows.

# %%
sys.path.insert(0, folder.name)
import survivor

w = torch.zeros(8)
for _ in range(20):
    w = w - 0.5 * (survivor.gradient(w, 0, 2) + survivor.gradient(w, 1, 2))
print("the same bits:", torch.equal(torch.load(state_file)["w"], w))
assert torch.equal(torch.load(state_file)["w"], w)
sys.path.remove(folder.name)
folder.cleanup()

# %% [markdown] tags=["deep"]
# ### Deeper: what cannot be a job
# The package refuses what cannot be a job. Everybody who may see a job can read its command, so no secret may be in it.
# And a container has nothing of your disk, so the model must come from the Hugging Face Hub, and the rows from there or
# from the package.

# %% tags=["deep"]
token = "hf_" + "x" * 34
for setting in (f"name={token}", "data.train=mine.jsonl"):
    try:
        launch_job("kwanzaa", "me/adapter", [setting], only_print=True)
        raise AssertionError(setting)
    except BadInput as error:
        print(textwrap.fill(textwrap.shorten(str(error), 170, placeholder=" ..."), 88))

# %% [markdown]
# ## 4. What it costs
# **Restarts and checkpoints cost time.** A restart costs a new start, and on average half an interval of steps. If a
# save takes $C$ seconds, $t$ seconds lie between saves, and a machine is lost every $M$ seconds, the share $C/t +
# t/(2M)$ of the time is lost. It is smallest at $t = \sqrt{2CM}$ ([resuming](checkpoint_and_resume.py)). Suppose that a
# save takes 3 seconds, a step of our job 11 seconds on a T4, and the machine is lost every two hours. (11 is predicted.
# [Data parallelism](data_parallel.py) has 14.7, with checkpointing and the chunked loss, which the T4's recipe leaves
# out.) How many steps should lie between two checkpoints?

# %% Your guess: steps between two checkpoints tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
t4 = CARDS["t4"]
recipe = recipes.kwanzaa(t4.device)
shape = find_shape(recipe.model)
tokens = 8 * 2048  # of a step
# .seconds is the predicted time of one token
step_seconds = Target(shape, t4.device).bill(recipe).seconds * tokens


def lost(every, save=3, between=7200):
    """The share of the time that is lost: writing, and steps that are done again.
    The new start is left out, because it does not depend on the interval."""
    return save / every + every / (2 * between)


best_interval = math.sqrt(2 * 3 * 7200)
course.reveal(guess, best_interval / step_seconds, "steps")
intervals = {"every step": step_seconds, "best": best_interval, "every hour": 3600}
lines = [(name, f"{s:,.0f}", f"{lost(s):.1%}") for name, s in intervals.items()]
course.show_table(table(("checkpoints", "seconds between them", "time lost"), lines))

# %% [markdown] tags=["deep"]
# ### Deeper: the best interval need not be exact
# The sum of both losses has a wide valley. With half or twice the best interval, only a quarter more is lost. (To the
# left of the figure, where writing takes as long as training, the formula says slightly too much.)


# %% tags=["deep"]
def young(theme: Theme):
    """Share of the time that is lost, against the interval."""
    drawn, axes = course.figure(height=3.0)
    grid = [8.2 * 2 ** (power / 4) for power in range(36)]
    for hours, colour, dashes in zip(
        (2, 12, 72), theme.series, ("-", "--", ":"), strict=False
    ):
        axes.plot(
            grid,
            [100 * lost(every, between=3600 * hours) for every in grid],
            color=colour,
            linestyle=dashes,
            label=f"a machine lost every {hours} h",
        )
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="seconds between checkpoints of 3 s",
        ylabel="% of the time lost",
    )
    axes.grid()
    axes.legend()
    return drawn


course.show(
    young,
    "Figure 3. To the left the time is lost by writing, to the right by steps that are "
    "done again.",
)
for factor in (0.5, 2):
    more = lost(factor * best_interval) / lost(best_interval) - 1
    print(f"{factor} times the best interval: {more:.0%} more is lost")
    assert round(more, 2) == 0.25

# %% [markdown]
# ### Growing
# torchrun can also take in machines while it runs: `--nnodes 1:4` means at least one and at most four. When a machine
# comes, torchrun ends all processes with SIGTERM, on which `cria train` saves, and starts more of them. That is worth
# it if the saved time is longer than the restart. Suppose that *all* processes wait 90 seconds for a restart, and that
# a second T4 halves a step, as with rows of one length. How long must the run still take to make it worth it?

# %%
shared = with_settings(recipe, ["parallel.strategy=ddp"])
on_two = Target(shape, t4.device, 2).bill(shared).seconds * tokens
saved_share = 1 - on_two / step_seconds
# 321 rows of 8 a step; the last step of each of three epochs has only three
seconds_left = 60 * job_on["t4-small"].minutes
print(f"a step takes {step_seconds:.1f} s on one card and {on_two:.1f} s on two")
print(f"worth a restart of 90 s with more than {90 / saved_share:.0f} s to go")
print(f"our whole run takes {seconds_left:.0f} s on one card")

# %% Hold the numbers of the text tags=["hide-input"]
assert 90 / saved_share < seconds_left < 900
assert round(best_interval / step_seconds) == 19
assert lost(best_interval) < min(lost(best_interval / 2), lost(best_interval * 2))
_of_300 = 100 * seconds_left / 3600  # hours of 300 epochs
assert 12 < _of_300 < 12.5
_on_two = _of_300 * on_two / step_seconds
assert (round(_of_300, 1), round(_on_two, 1)) == (12.2, 6.1)
assert 2 * (0.25 + _on_two) > _of_300  # hours that are paid
assert round(step_seconds) == 11
assert round(90 / (1 - 1 / 1.8), -1) == 200

# %% [markdown]
# With our rows of many lengths two T4s are 1.8 times as fast ([data parallelism](data_parallel.py)), so the limit is
# about 200 seconds. But a new machine needs some 15 minutes to start, and by then our run of 440 seconds (42 steps of
# full rows, three short) is over. So an *autoscaler*, which rents machines by itself, is useless here.

# %% [markdown] tags=["deep"]
# ### Deeper: what an autoscaler needs beyond torchrun
# - It pays for long runs. For 300 epochs, a hundred times ours, 12.2 hours become 0.25 + 6.1. That saves time, but no
#   money, because two machines are paid. (The second card is in the same machine here. 10 Gbit Ethernet between two
#   machines would add less than a hundredth.)
# - It repeats the decision above, with measured step times. It grows from $n$ machines to $m$ if
#   $R < S\,(1 - t_m / t_n)$, where a restart takes $R$ seconds, $S$ seconds are left on $n$ machines, and a step takes
#   $t_n$. The price matters too, because all machines are paid while they wait for each other.
# - Somebody must rent. torchrun takes in a machine that comes, but it asks for none and gives none back. (Slurm and
#   Kubernetes give machines of a cluster, SkyPilot rents them in many clouds. torchft continues without the lost
#   machine, and torch's `distributed.checkpoint` saves pieces in the background. We have tried none of them.)
# - The counts must fit. Eight micro-batches can be shared by 1, 2, 4 or 8 processes, so that a step stays the same
#   step. With three processes some would wait, or the training would be a different one, so `cria` refuses
#   `--nodes 1:4`.
# - All machines must reach the folder with the checkpoints, because a job's own disk is deleted with it.
# - The meeting point must survive. If the machine dies at which all others meet, all end, whatever `--max-restarts`
#   says.
# - The end should be announced. [Spot machines](../docs/glossary.md#spot-machine) are cheap because they may be taken
#   away, with a warning shortly before. If the warning comes as SIGTERM, our trainer saves after the step. Without it,
#   the run goes back to the last checkpoint.

# %% [markdown]
# ## 5. The production switch
# **Send a job.** (We have sent it only to a stand-in of the hub. Until our repository is public, a real job fails in
# its first step, the installation.) In plain code it is one call of `huggingface_hub`, with a machine, a timeout, and a
# script that trains and publishes:
#
# ```python
# from huggingface_hub import get_token, run_uv_job
#
# run_uv_job(
#     "train.py",  # is uploaded; its last line is model.push_to_hub(...)
#     dependencies=["torch", "transformers", "peft"],
#     flavor="t4-small",
#     timeout="45m",
#     secrets={"HF_TOKEN": get_token()},  # safer: a token for one repository
# )
# ```
#
# Our command makes all of that from the recipe, and with `--print` only shows it:
#
# ```bash
# cria launch kwanzaa --on hf-jobs --repo me/adapter --timeout 45m --print
# ```

# %%
launch_job("kwanzaa", "me/adapter", [], timeout="45m", only_print=True)

# %% [markdown]
# The timeout is ours to choose; without `--timeout` it is an hour. `cria train` gets the timeout less the 15 minutes
# for installing and publishing. If these take longer, the timeout may come before the result is published. The token
# travels in a field of its own, which the hub encrypts. Without `--print` the command asks for the day's price, sends
# the job, follows its log and downloads the adapter.
#
# **Survive restarts.** `cria launch` writes torchrun's command. The first is for one machine, the second for one or two
# that meet at node0. Both get the same command:
#
# ```bash
# cria launch kwanzaa --on torchrun --nproc 1 --max-restarts 3
# cria launch kwanzaa --on torchrun --nproc 1 --max-restarts 3 \
#     --nodes 1:2 --endpoint node0:29400 --out /shared/run
# ```

# %%
one = launch_torchrun.Elastic(max_restarts=3)
some = launch_torchrun.Elastic(3, "1:2", "node0:29400")
for elastic, out in ((one, None), (some, Path("/shared/run"))):
    words = launch_torchrun.command("kwanzaa", 1, out=out, elastic=elastic)
    parts = textwrap.wrap(launch_torchrun.shown(words), 80, break_on_hyphens=False)
    print(" \\\n    ".join(parts), end="\n\n")

# %% [markdown]
# `--resume` is always there, because each start must look for a checkpoint; the first start finds none. Without the
# variable at the beginning, a machine that joins later does not find the others (torch 2.13).
#
# ## 6. Where it breaks
# **The job ran for 30 minutes, its log ends in the middle of the training, and there is no adapter.** The hub's own
# default timeout is 30 minutes, and it took the container and its disk. The cure is a timeout from an estimate, *and* a
# training that ends by itself before it, so that what it has learnt is published. Here the timeout is ten minutes, and
# half of it is kept for installing and publishing. The training is predicted to take 7.3 minutes, so it ends after
# five, before its last step:

# %%
launch_job("kwanzaa", "me/adapter", [], timeout="10m", only_print=True)
assert job_on["t4-small"].minutes > 10 / 2

# %% [markdown]
# **It trained here, and there it is out of memory.** The rented card is another one, and runs other kernels. The cure
# is to ask for the bill of *that* card before you rent it. For example, full fine-tuning by the recipe `baseline`, with
# rows of 1,024 tokens, needs 26.7 GiB: 20.6 of tensors, the rest for CUDA and the allocator. `cria launch` refuses to
# send this job to a T4 with 14.7 GiB, and accepts an A100.

# %% Hold the numbers of this failure tags=["hide-input"]
for flavor in ("t4-small", "a100-large"):
    try:
        full = ["model=llama-3.2-1b"]
        launch_job("baseline", "me/model", full, flavor=flavor, only_print=True)
    except OutOfMemory as error:
        print(error)
        assert "needs 26.7 GiB of 14.7 GiB" in str(error)
_baseline = with_settings(recipes.get("baseline"), ["model=llama-3.2-1b"])
assert round(course.bill(_baseline).peak_bytes / 2**30, 1) == 20.6
assert _baseline.data.max_length == 1024

# %% [markdown] tags=["deep"]
# ### Deeper: after a restart the processes sometimes say `Connection refused`
# Processes learn each other's addresses from a [store](../docs/glossary.md#store), a dictionary that torchrun's agent
# keeps. It outlives them, so after a restart it still holds the addresses of dead processes. A process that reads
# before the others have written calls one of the dead.
#
# The cure is a new prefix for every start, under which everything else is stored (`dist.PrefixStore`). On one machine
# the number of restarts, `TORCHELASTIC_RESTART_COUNT`, is such a prefix, and `world.joined` of our survivor takes it.
# With several machines it is none, because each agent counts only its own failures. There the variable at the
# beginning of the second command above gives each start a store of its own.

# %% tags=["deep"]
store = HashStore()  # stands for torchrun's
first, second = (PrefixStore(f"start {number}", store) for number in range(2))
for kept in (store, first):
    kept.set("address of 1", "127.0.0.1:22444")  # written before the restart
print("process 0 calls", store.get("address of 1").decode(), "and nobody is there")
assert not second.check(["address of 1"])
second.set("address of 1", "127.0.0.1:30117")
print("under a prefix it waits, and calls", second.get("address of 1").decode())

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** The estimate for a training is 50 minutes on an `l4x1`, at 0.80 USD an hour. How many USD can the job
#    cost at most, by this lesson's rule for the timeout?
# 2. **Build.** Fill in `grow(left, now, then, restart)`. It returns the seconds that a run saves by going from `now` to
#    `then` seconds a step, less the seconds of the `restart`, and zero where it would lose. `left` is how many seconds
#    the run would still take at `now` seconds a step.
# 3. **Reach.** A checkpoint takes 3 s, and a machine is lost every 12 hours. How many of 100 hours are lost at the best
#    interval, if the restarts themselves are not counted?

# %% tags=["exercise"]
most_usd = None


def grow(left, now, then, restart):
    """FILL ME IN."""


hours_lost = None


# %% Check the exercises tags=["hide-input"]
def of_growing(answer):
    steps = (
        "left holds left / now steps; how long do these take at then seconds a step?"
    )
    cases = (
        ((345, 8.2, 4.1, 0), 172.5, steps),
        ((3600, 2, 1.9, 0), 180, steps),
        ((345, 8.2, 4.1, 90), 82.5, "the restart takes its seconds, too"),
        ((100, 8, 4, 90), 0, "where it would lose, nothing is saved: zero"),
        ((600, 4, 8, 5), 0, "where it would lose, nothing is saved: zero"),
    )
    for case, right, hint in cases:
        if (found := answer(*case)) is None:
            raise NotImplementedError
        assert abs(found - right) < 1e-6, f"grow{case} is not {found}; {hint}"


of_usd = course.about(
    0.8 * (2 * 50 + 30) / 60,
    "the job is paid up to its timeout: which two things were added to make that, "
    "in hours?",
)
of_loss = course.about(
    100 * (2 * 3 / 43200) ** 0.5,
    "add both parts, the writing and the steps done again, "
    "at the best interval for 12 hours, in seconds",
)
course.check(1, most_usd, of_usd, "a number of USD")
course.check(
    2, grow, of_growing, "a function (left, now, then, restart) -> a number of seconds"
)
course.check(3, hours_lost, of_loss, "a number of hours")

# %% [markdown]
# <details><summary>Solutions</summary>
#
# ```python
# most_usd = 0.80 * (2 * 50 + 30) / 60  # 1.73 USD for 130 minutes
#
#
# def grow(left, now, then, restart):
#     return max(0, left * (1 - then / now) - restart)
#
#
# every = (2 * 3 * 12 * 3600) ** 0.5  # 509 seconds
# hours_lost = 100 * (3 / every + every / (2 * 12 * 3600))  # 1.2
# ```
#
# </details>
#
# ## In one breath
# - **Saves** machines that are paid for waiting, and runs that a dead process would end.
# - **Costs** half an hour of rent for each job, and half an interval of steps for each restart.
# - **Exact** on a CPU: a run that was killed ends with the bits of one that was not, with the same number of processes.
# - **When**: you have no card of your own, the job is longer than you want to watch, or machines may be taken away.
# - **When not**: do not grow a short run. A restart and an installation take longer than a second card saves.
#
# ## Sources
# - huggingface_hub 2.4, `hf_api.py` (`run_uv_job`, `fetch_job_logs`, `list_jobs_hardware`): the requests. hub-docs,
#   `docs/hub/jobs-pricing.md` at commit a9fef576: prices, billing by the minute, 30 minutes by default; in the same
#   folder `jobs-configuration.md` (encrypted secrets) and `jobs-manage.md` (what is shown of a job; its disk is
#   deleted).
# - Young 1974, *A first order approximation to the optimum checkpoint interval*, CACM 17(9).
# - torch 2.13, `distributed/run.py` and `elastic/agent/server/api.py`: restarts of all workers, members that come and
#   go. pytorch issues 135712 (what dead workers leave in a shared store) and 108158 (each agent counts for itself).
# - Ours: `cria_tricks/launch/`, `cria_tricks/processes/world.py`; `tests/test_jobs.py`,
#   `tests/parallel/test_elastic.py`: a killed worker of a real run, and the losses of the uninterrupted one.
