# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     text_representation: {extension: .py, format_name: percent}
# ---

# %% [markdown]
# # Jobs and elasticity: rent a machine, and lose it
# > **Promise.** You choose a rented machine by what the whole job costs, write down all that it must be told, and train
# > through a killed process without losing a bit. Then you say when another machine is worth a restart.
#
# > **Card.** saves minutes that are paid for nothing, and runs that would be lost / costs half an hour's rent around
# > each job, and a few steps for each restart / exact, on a CPU: a resumed run ends with the same bits / 30 minutes /
# > after [resuming](checkpoint_and_resume.py), [choosing hardware](choose_your_hardware.py) and [data
# > parallelism](data_parallel.py)
#
# The job: QLoRA of Llama-3.2-1B on 107 training rows, 42 steps. So far it ran where you sat. A *job* is a command in a
# container on a machine that somebody else starts, bills by the minute, and takes away: at the end, at the timeout, or
# when a process dies. You see a log, and what the command has sent elsewhere.

# %% Imports and settings tags=["hide-input"]
import logging
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

# on some CPUs it tells of a package that is not needed
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
import torch
from torch.distributed import HashStore

from cria_tricks import course, recipes
from cria_tricks.bench.style import Theme
from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.hardware.cards import CARDS, FLAVORS
from cria_tricks.launch import hub
from cria_tricks.launch import job as jobs
from cria_tricks.launch import torchrun as launch
from cria_tricks.models.shape import find_shape
from cria_tricks.predict.toggles import Target
from cria_tricks.processes import rendezvous
from cria_tricks.recipe import with_settings

away = tempfile.TemporaryDirectory()
folder = Path(away.name)

# %% [markdown]
# ## 1. The bill
# By Hugging Face's list of 2026-08-21 a T4 costs $0.40 an hour and an A100 $2.50. By our estimate the A100 trains ten
# times as fast, so training alone costs some cents on either. (Both estimates are ranges; the A100's ends below four
# cents, where the T4's begins.) But the machine is also paid while it installs, downloads a model, evaluates and
# publishes: half an hour, we assume, on every machine. So the *timeout*, at which the hub ends the job, is twice the
# middle of the estimate and half an hour. What can either job cost at most? Guess, and guess which part of it is
# training.

# %% Your guess: dollars that the cheaper job costs at most tags=["predict"]
guess = 0  # @param {type:"number"}

# %%
whole = {}
for name in FLAVORS:
    job = jobs.prepare("kwanzaa", "me/adapter", flavor=name)
    whole[name] = job
    trains = job.price * job.training_seconds / 3600
    print(
        f"{name:13}trains {job.training_seconds / 60:4.1f} min for ${trains:.2f}; ",
        end="",
    )
    print(f"ended after {job.timeout / 60:.0f} min: at most ${job.most:.2f}")
cheapest = min(whole.values(), key=lambda job: job.most)
assert cheapest.flavor.name == "t4-small"
a100 = whole["a100-large"]
print(f"an A100 that trained in no time: ${a100.price / 2:.2f} for the half hour")
assert a100.most > 3.5 * cheapest.most
assert a100.price / 2 > 3 * cheapest.most  # whatever the estimate of its speed
course.reveal(guess, cheapest.most, "USD")

# %% [markdown]
# The T4's job costs a quarter, and of its $0.30 five cents are training. (A job that ends earlier costs less.) This
# does not depend on the estimate: the A100 costs more even if it trains in no time. Around a short training the price
# of the hour decides. And around a long one?


# %% Draw figure 1 tags=["hide-input"]
EPOCHS = (3, 10, 30, 100, 300, 1000)
usd = {
    name: [
        jobs.prepare("kwanzaa", "me/x", [f"train.epochs={n}"], flavor=name).most
        for n in EPOCHS
    ]
    for name in ("t4-small", "l4x1", "a100-large")
}
longest = [most[-1] for most in usd.values()]
# so the estimate, whose ranges overlap, cannot tell them apart
assert max(longest) < 2 * min(longest)


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
    "Figure 1. What the job can cost, by how long it trains. "
    "Short jobs pay for the half hour around the training. In "
    "long ones all three cost the same within a factor of two, "
    "and the estimate cannot tell more: before a long job, "
    "measure a few steps on each card. What the A100 saves in any case is time.",
)

# %% [markdown]
# ## 2. From scratch, in three steps
# **Choose.** Of all machines on which [the bill](the_bill.py) fits, take the one where the job
# costs least. Write it for machines of one card. A bill of `Target` says whether it fits, and the seconds of a token;
# we have 3 epochs of 107 rows of 2,048 tokens.

# %%
AROUND = 1800


def choose(tokens):
    found = {}
    for name, flavor in FLAVORS.items():
        card = CARDS[flavor.card]
        recipe = recipes.kwanzaa(card.device)
        bill = Target(find_shape(recipe.model), card.device).bill(recipe)
        if flavor.cards == 1 and bill.memory.fits:
            timeout = 2 * bill.seconds * tokens + AROUND
            found[name] = timeout, timeout / 3600 * flavor.price
    best = min(found, key=lambda name: found[name][1])
    return best, *found[best]


name, timeout, most = choose(3 * 107 * 2048)
print(f"{name}, {timeout / 60:.1f} min, ${most:.2f}")
assert name == cheapest.flavor.name
assert 0 <= cheapest.timeout - timeout < 60

# %% [markdown]
# **Survive.** A worker that may be killed at any moment needs three things: a file with *all* that decides the next
# step; a rename, so that the file is the old one or the new one and never half of one
# ([resuming](checkpoint_and_resume.py)); and a start that looks for it. Here is a whole run: eight weights are fitted,
# rows are shared, gradients are added up. `world.joined` joins the processes that a launcher started ([data
# parallelism](data_parallel.py)); ours is torch's, torchrun, which counts its restarts in `TORCHELASTIC_RESTART_COUNT`.
# In life 0, process 1 kills itself in step 12.

# %%
CODE = '''
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
from cria_tricks.processes import world


def gradient(w, rank, size):
    """Of the squared error, over every size-th row; the right weights are ones."""
    X = torch.arange(64.0).outer(torch.arange(1.0, 9)).sin()
    return X[rank::size].T @ (X @ w - X.sum(1))[rank::size] / 64


def save(file, state):
    torch.save(state, aside := file.with_suffix(".aside"))
    os.replace(aside, file)


def train(file, life):
    state = torch.load(file) if file.exists() else {"step": 0, "w": torch.zeros(8)}
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        print("life", life, "begins after step", state["step"], flush=True)
    for step in range(state["step"] + 1, 21):
        total = gradient(state["w"], rank, size)
        if (life, rank, step) == (0, 1, 12):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(total)
        state = {"step": step, "w": state["w"] - 0.5 * total}
        if rank == 0 and step % 5 == 0:
            save(file, state)


if __name__ == "__main__":
    with world.joined(timeout=60):
        train(Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]))
'''
_ = (folder / "survivor.py").write_text(CODE)


# %% [markdown]
# **Be started again.** Somebody outside must notice the death, end the other workers, which cannot go on alone, and
# start all of them again. That is torchrun's *agent*, the process that started them; `--max-restarts` says how often.
# After which step will the second life begin?

# %%
torchrun = [
    sys.executable,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--nproc-per-node",
    "2",
]
command = [
    *torchrun,
    "--max-restarts",
    "1",
    str(folder / "survivor.py"),
    str(folder / "state.pt"),
]
done = subprocess.run(
    command,
    capture_output=True,
    encoding="utf-8",
    env=os.environ | {"OMP_NUM_THREADS": "1"},
)
print(done.stdout)
assert done.returncode == 0, done.stderr[-2000:]
assert done.stdout.splitlines() == [
    "life 0 begins after step 0",
    "life 1 begins after step 10",
]


# %% Draw figure 2 tags=["hide-input"]
def two_lives(theme: Theme):
    """Steps of the two processes, the checkpoints, and what is done twice."""
    sketch = course.Sketch(theme, 50, 12)
    for row, (first, last, words) in enumerate(((1, 12, "life 0"), (11, 20, "life 1"))):
        top = 1.2 + 5.6 * row
        sketch.text(0, top + 1.6, words, align="left")
        for step in range(first, last + 1):
            for rank in range(2):
                dead = row == 0 and step == 12
                again = (row, step) == (1, 11)
                box = (4 + 2.2 * (step - 1), top + 1.7 * rank, 2, 1.4)
                sketch.tensor(
                    *box,
                    "x" if dead and rank == 1 else str(step),
                    color=1 if again else 0,
                    kept=not dead,
                )
        for step in (5, 10, 15, 20):
            if first <= step <= last:
                sketch.text(4 + 2.2 * (step - 1) + 1, top + 4.2, "saved", quiet=True)
    sketch.arrow((29.3, 4.8), (27, 6.6), color=1)
    return sketch.figure


course.show(
    two_lives,
    "Figure 2. Two processes, one above the other, and two lives. "
    "Process 1 dies in step 12, which process 0 cannot "
    "end alone. Both begin again after the last saved step; "
    "step 11 (in another colour) is done twice.",
)

# %% [markdown]
# ## 3. Prove it
# The interrupted run must end where an uninterrupted one ends, to the last bit; that one is a single process here and
# adds up both shares. And the package must refuse what cannot be a job: a secret in the command or its variables, which
# everyone who may see the job can read; and what only your machine has.

# %%
sys.path.insert(0, str(folder))
import survivor

w = torch.zeros(8)
for _ in range(20):
    w = w - 0.5 * (survivor.gradient(w, 0, 2) + survivor.gradient(w, 1, 2))
assert torch.equal(torch.load(folder / "state.pt")["w"], w)
sys.path.remove(str(folder))

token = "hf_" + "x" * 34
for settings in ([f"name={token}"], ["data.train=mine.jsonl"], ["model=/models/mine"]):
    try:
        jobs.prepare("kwanzaa", "me/adapter", settings)
        raise AssertionError(settings)
    except BadInput as error:
        print(error)

# %% [markdown]
# The last two are the other side of a container: nothing of your disk is there. Rows and model come from the hub, or
# rows with the package.
#
# ## 4. What it costs
# **A restart** costs the steps since the last checkpoint, half an interval in the mean, and a start. **Checkpoints**
# cost their writing. That is [the lesson on resuming](checkpoint_and_resume.py)'s rule: if a save takes $C$ seconds and
# machines are lost every $M$ seconds, saving every $T$ seconds loses $C/T + T/2M$ of the time, and least at $T =
# \sqrt{2CM}$ (Young 1974). Say a save of three seconds, and a machine that is taken away every two hours. How many of
# our T4's steps, of eleven seconds each?

# %%
t4 = CARDS["t4"]
recipe = recipes.kwanzaa(t4.device)
shape = find_shape(recipe.model)
step_seconds = Target(shape, t4.device).bill(recipe).seconds * 8 * 2048


def lost(every, save=3, between=7200):
    return save / every + every / (2 * between)


best = (2 * 3 * 7200) ** 0.5
print(
    f"a step takes {step_seconds:.1f} s; save every {best:.0f} s, "
    f"that is {best / step_seconds:.0f} steps: ",
    end="",
)
print(
    f"{lost(best):.1%} lost. Every step: {lost(step_seconds):.0%}. "
    f"Once an hour: {lost(3600):.0%}"
)
assert lost(best) < min(lost(best / 2), lost(best * 2))


# %% Draw figure 3 tags=["hide-input"]
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
    "Figure 3. To the left writing costs (and less than the rule says), "
    "to the right what is done again. "
    "The valley is wide: with half or twice the best interval a quarter more is lost.",
)

# %% [markdown]
# **Growing.** torchrun can also take in machines while it runs: `--nnodes 1:4` says one at least, four at most. Then
# all workers stop, save, and start again as more. That is worth it if the time saved is longer than the restart, which
# *all* wait for. Say 90 seconds: imports, loading, joining. A second T4 halves a step, nearly ([data
# parallelism](data_parallel.py)). With how many seconds to go is it useless to our job?

# %%
seconds_left = whole["t4-small"].training_seconds
both = (
    Target(shape, t4.device, 2)
    .bill(with_settings(recipe, ["parallel.strategy=ddp"]))
    .seconds
    * 8
    * 2048
)
saved_share = 1 - both / step_seconds
print(
    f"a step on two cards: {both:.1f} s, {saved_share:.0%} less; "
    f"the run takes {seconds_left:.0f} s on one"
)
print(
    f"with less than {90 / saved_share:.0f} s to go it is not worth a restart of 90 s"
)
print(
    "a machine that installs for 15 minutes is there after "
    f"{900 / seconds_left:.1f} times the whole run"
)
assert 90 / saved_share < seconds_left < 900

# %% [markdown]
# (Both cards in one machine; 10 Gbit Ethernet between two would add less than a hundredth.) For this job an
# *autoscaler*, which rents machines by itself, is worth nothing, and a counted decision says so before anybody writes
# one. For 300 epochs it would pay: twelve hours become less than seven. What would it need beyond torchrun?
#
# 1. **The decision above**, repeated with measured step times: from $n$ machines to $m$ if $R < S (1 - t_m / t_n)$. A
#    restart takes $R$ seconds, $S$ are left on $n$ machines, a step takes $t_n$. And the price, which is paid for all
#    machines while they wait for each other.
# 2. **Somebody who rents.** torchrun takes in a machine that comes. It asks for none, and gives none back.
# 3. **Counts that fit.** Eight micro-batches go to 1, 2, 4 or 8 processes, so that a step stays the same step. With
#    three, one would wait for the other two, or the training would be another one: `cria` refuses `--nodes 1:4`.
# 4. **A folder that all can reach**, for checkpoints; a job's own disk goes with it.
# 5. **A meeting point that survives.** If the machine dies at which all meet, all end, whatever `--max-restarts` says.
# 6. **Notice.** *Spot* machines are cheap because they may be taken away, with a warning shortly before. If it comes as
#    SIGTERM, our trainer saves after the step; without notice, back to the checkpoint.
#
# ## 5. The production switch
# A job. `--print` shows what would be sent, and sends nothing. (We have sent it to a stand-in of the hub only.)

# %%
print("$ cria launch kwanzaa --on hf-jobs --repo me/adapter --budget 1 --print")
job = jobs.prepare("kwanzaa", "me/adapter", budget=1)
print(*hub.shown(job), sep="\n")
assert job.most <= 1

# %% [markdown]
# `cria train` is given 15 minutes less than the timeout, so that half of the half hour is left for installing and
# publishing. The token is named, and travels in a field of its own that the hub encrypts. Without `--print` the log is
# followed, the adapter comes back and is held against its manifest.
#
# And torchrun, with the same training. On one machine: `cria launch kwanzaa --on torchrun --nproc 1 --max-restarts 3`.
# On one or two that meet at node0: the same on each, with `--nodes 1:2 --endpoint node0:29400 --out /shared/run`. They
# stand for:

# %%
for elastic, out in (
    (launch.Elastic(max_restarts=3), None),
    (launch.Elastic(3, "1:2", "node0:29400"), Path("/shared/run")),
):
    print(
        "$",
        launch.shown(
            launch.command("kwanzaa", "torchrun", 1, out=out, elastic=elastic)
        ),
    )

# %% [markdown]
# `--resume` is always there: each start looks for a checkpoint, and the first one finds none. The variable is there
# because without it a machine that joins later does not find the others (torch 2.13).
#
# ## 6. Where it breaks
# **The job ran for 30 minutes, its log ends in the middle of the training, and there is nothing.** The timeout took
# container and disk. 30 minutes are the hub's default, whatever the job needs. Cure: a timeout from an estimate, *and*
# a training that ends by itself before it, so that what it has learnt is published. Here with a timeout that is too
# short, of which half is kept for installing and publishing:

# %%
short = jobs.prepare("kwanzaa", "me/adapter", timeout="10m", flavor="t4-small")
print(
    *(line for line in hub.shown(short) if line.startswith(("training", "timeout"))),
    sep="\n",
)
assert not short.finishes
assert short.time_budget < short.timeout

# %% [markdown]
# **It trained here, and there it is out of memory.** Another card, and other kernels. Cure: ask the bill of *that* card
# before you rent it. Full fine-tuning, every toggle off:

# %%
for flavor in ("t4-small", "a100-large"):
    try:
        job = jobs.prepare(
            "baseline", "me/model", ["model=llama-3.2-1b"], flavor=flavor
        )
        print(f"{flavor}: fits")
    except OutOfMemory as error:
        print(error)

# %% [markdown]
# **After a restart the workers say `Connection refused`, sometimes.** They learn each other's addresses from a *store*,
# a dictionary that torchrun's agent keeps. It outlives them, and holds the addresses of the dead. A worker that reads
# before the others have written calls a dead process. The restart count cannot tell starts apart, because each agent
# counts its own failures. Cure: a new name for every start, and all else under it (`dist.PrefixStore`). Process 0 makes
# the name. Every other process writes a random token under the name it read; process 0 echoes all tokens under its new
# name. A process that finds its token there has the name of this start. `rendezvous.agree` does that:

# %%
store = HashStore()  # stands for torchrun's
store.set("address of 1", "127.0.0.1:22444")  # of its first life
print("process 0 calls", store.get("address of 1").decode(), "and nobody is there")

found = {}
for life in range(2):
    workers = [
        threading.Thread(
            target=lambda n: found.setdefault(n, rendezvous.agree(store, n % 2, 2, 20)),
            args=(2 * life + n,),
        )
        for n in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
print(
    "both agree in each life, and the lives differ:",
    found[0] == found[1] != found[2] == found[3],
)
assert found[0] == found[1] != found[2] == found[3]

# %% [markdown]
# ## 7. Exercises
# 1. **Predict.** A training takes 50 minutes on an `l4x1` by estimate, at $0.80 an hour. How many USD can the job cost
#    at most, by this lesson's rule for the timeout?
# 2. **Build.** `grow(left, now, then, restart)` returns the seconds, a number, that a run saves by going from `now` to
#    `then` seconds a step, less the seconds of the `restart`; zero where it would lose. `left` is how many seconds it
#    would still take at `now` seconds a step.
# 3. **Reach.** A checkpoint takes 3 s and a machine is lost every 12 hours. Of 100 hours, how many are lost at the best
#    interval? (A number of hours; restarts themselves not counted.)

# %% tags=["exercise"]
most_usd = None


def grow(left, now, then, restart):
    """Return the seconds that are saved, a number. FILL ME IN."""


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
# most_usd = 0.80 * (2 * 50 + 30) / 60  # $1.73: 130 minutes
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
# - **Costs** half an hour of rent a job, half an interval of steps a restart.
# - **Exact** on a CPU: a run that was killed ends with the bits of one that was not, with the same number of processes.
# - **When**: no card of your own; a job longer than you want to watch; machines that may be taken away.
# - **When not**: growing a short run. A restart and an installation are longer than what a second card saves.
#
# ## Sources
# - huggingface_hub 2.4, `hf_api.py` (`run_job`, `fetch_job_logs`, `list_jobs_hardware`): the requests. hub-docs,
#   `docs/hub/jobs-pricing.md` at commit a9fef576: prices, billing by the minute, 30 minutes by default; beside it
#   `jobs-configuration.md` (encrypted secrets) and `jobs-manage.md` (what is shown of a job; its disk is deleted).
# - Young 1974, *A first order approximation to the optimum checkpoint interval*, CACM 17(9).
# - torch 2.13, `distributed/run.py` and `elastic/agent/server/api.py`: restarts of all workers, members that come and
#   go. pytorch issues 135712 (what dead workers leave in a shared store) and 108158 (each agent counts for itself).
# - Ours: `cria_tricks/launch/`, `cria_tricks/processes/rendezvous.py`; `tests/test_jobs.py`,
#   `tests/parallel/test_elastic.py`: a killed worker of a real run, and the losses of the uninterrupted one.
