"""Turn a recipe into a job on a rented machine of Hugging Face; estimates choose the machine before anything is sent.

A job is a command that runs in a container on a rented machine. The container has no files of this machine, and nothing
is left of it when the job has ended. So everything that decides the run travels with the command, and the last step of
the job publishes the result to a private repository of the hub. ``launch/hub.py`` sends the job, follows it, and
fetches the result.
"""

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from cria_tricks import models, recipes
from cria_tricks.adapter.publish import TAG
from cria_tricks.bill.step_time import ends, run_tokens
from cria_tricks.common import version
from cria_tricks.common.errors import BadInput, OutOfMemory, redacted
from cria_tricks.common.units import duration, human, money
from cria_tricks.common.values import seconds
from cria_tricks.data.rules import needed_libraries
from cria_tricks.hardware.cards import CARDS, FLAVORS, Flavor, find_flavor
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe
from cria_tricks.run import given

IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"
"""The container's image: Debian with Python, git, a compiler and uv. huggingface_hub runs its own uv jobs in it, too.

uv installs the build of torch that the machine's driver can run.
"""

MARGIN = 2
"""The longest time that a training gets, divided by the middle of its estimated range; the range ends before that."""
AROUND = 15 * 60
"""The time that a job gets for installing and publishing [s].

``cria train`` gets as much again for its work besides the training steps: it downloads and loads the model, and
evaluates.
"""

BUCKET = "/bucket"
"""Where a bucket of the hub is mounted in the container."""

ROWS = {"nguzo_saba": 32, "history_notes": 357, "kwanzaa": 107, "kwanzaa_curated": 395}
"""The number of training rows in the data sets that this package knows."""


@dataclass(frozen=True)
class HubJob:
    """A job on a rented machine, as it would be sent.

    Attributes:
        name: the recipe's name.
        flavor: the machine.
        price: its price [USD/h].
        needed_bytes: the estimated memory on each of its GPUs.
        verdict: whether it fits them: ``fits`` or ``tight``.
        training_seconds: the estimated time of the training, the middle of its range; ``None`` if the number of rows is
            not known.
        spread: the high end of this range divided by the low end [ratio].
        timeout: the time after which the hub ends the job [s].
        time_budget: the time after which the training ends by itself [s]. It is shorter than the timeout, so that
            there is time to publish what was learnt.
        repo: the private repository of the result, OWNER/NAME.
        result: ``adapter``, or ``model`` if the whole model is trained.
        script: the bash script that runs in the container.
        environment: the environment variables that are not secret.
        attempts: how often the hub starts the job at most, if it fails.
        bucket: the bucket that keeps the run's checkpoints for the next attempt, OWNER/NAME; empty for none.
    """

    name: str
    flavor: Flavor
    price: float
    needed_bytes: int
    verdict: str
    training_seconds: float | None
    spread: float
    timeout: int
    time_budget: int
    repo: str
    result: str
    script: str
    environment: Mapping[str, str]
    attempts: int = 1
    bucket: str = ""

    @property
    def command(self) -> list[str]:
        """The command that the container starts."""
        return ["bash", "-c", self.script]

    @property
    def labels(self) -> dict[str, str]:
        """The labels under which the hub lists the job."""
        return {"name": f"cria-{re.sub(r'[^A-Za-z0-9_-]', '-', self.name)}"}

    @property
    def most(self) -> float:
        """The highest possible cost: that of a job of which every attempt runs until its timeout [USD]."""
        return self.price * self.timeout / 3600 * self.attempts

    @property
    def training_range(self) -> tuple[float, float]:
        """The ends of the range of the training's time [s]; 0 and 0 if the time is not known."""
        return ends(self.training_seconds or 0.0, self.spread)

    @property
    def training_cost(self) -> float | None:
        """The estimated cost of the training alone [USD]."""
        if self.training_seconds is None:
            return None
        return self.price * self.training_seconds / 3600

    @property
    def tight(self) -> bool:
        """Whether the run fits so narrowly by the estimate that it may not fit in practice."""
        return self.verdict == "tight"

    @property
    def finishes(self) -> bool:
        """Whether the training reaches its last step within its time budget, by the high end of the estimate."""
        return self.training_range[1] <= self.time_budget


def prepare(
    recipe: str,
    repo: str,
    settings: Iterable[str] = (),
    flavor: str = "auto",
    timeout: str = "",
    budget: float | None = None,
    prices: Mapping[str, float] | None = None,
    fit: str = "",
    may_change: Iterable[str] = (),
    attempts: int = 1,
    bucket: str = "",
) -> HubJob:
    """Choose a machine, and return the job for it; nothing is sent, but the config of an unknown model is read.

    Args:
        recipe: a name, or a TOML file, whose text travels with the job.
        repo: the repository on the hub for the result, OWNER/NAME.
        settings: changes of the recipe, as for ``cria train``.
        flavor: a machine of :data:`FLAVORS`, or ``auto``: of the machines on which the recipe fits, preferably with
            some room and in time, the one on which the job costs least.
        timeout: the longest time, such as ``90m``; when left out, twice the estimated training and half an hour, or
            less if the recipe has a short ``train.time_budget``.
        budget: the highest cost that the job may have [USD].
        prices: the prices of the machines that are offered now [USD/h]; those of :data:`FLAVORS` when left out.
        fit: ``fastest``, ``smallest`` or ``longest``: on each machine, the switches that a search finds best.
        may_change: switches that it may change although they change results.
        attempts: how often the hub starts the job at most, if it fails.
        bucket: a bucket on the hub, OWNER/NAME, that keeps the checkpoints, so that the next attempt goes on from them.

    Raises:
        BadInput: for a setting that would end the job, for files that it cannot reach, and for too small a budget.
        OutOfMemory: if the recipe fits on none of the machines, or not on the one that was named.
    """
    _refuse_wrong(budget, repo, bucket)
    settings = list(settings)
    if prices is None:
        prices = {name: each.price for name, each in FLAVORS.items()}
    limit = _timeout(timeout)
    flavors = list(FLAVORS.values()) if flavor == "auto" else [find_flavor(flavor)]
    jobs: list[HubJob] = []
    refused: list[BadInput | OutOfMemory] = []
    for each in flavors:
        try:
            if each.name not in prices:
                raise BadInput(f"--flavor {each.name}: the hub does not offer it now; see hf jobs hardware")
            chosen = [*settings, *_fitted(recipe, settings, each, fit, may_change)]
            jobs.append(replace(_job(recipe, repo, chosen, each, limit, prices[each.name], bucket), attempts=attempts))
        except (BadInput, OutOfMemory) as error:
            refused.append(error)
    if not jobs:
        last = refused[-1]  # the error of the last machine of FLAVORS, which has the largest GPU
        if isinstance(last, OutOfMemory) and len(refused) > 1:
            raise OutOfMemory(f"it fits on no machine: {last}")
        raise last
    return _best(jobs, budget)


def _best(jobs: list[HubJob], budget: float | None) -> HubJob:
    """Choose the cheapest job within a budget [USD], preferably one with some room that ends in time."""
    affordable = [job for job in jobs if budget is None or job.most <= budget]
    if not affordable:
        least = min(jobs, key=lambda job: job.most)
        raise BadInput(
            f"--budget {budget:g}: {least.flavor.name} for up to {duration(least.timeout)} may cost "
            f"{money(least.most)}; give more, or a shorter --timeout"
        )
    return min(affordable, key=lambda job: (job.tight, not job.finishes, job.most))


def _refuse_wrong(budget: float | None, repo: str, bucket: str) -> None:
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise BadInput(f"--budget {budget:g}: must be an amount of USD above 0")
    owned = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
    if not re.fullmatch(owned, repo, re.ASCII):
        raise BadInput(f"--repo {repo!r}: name a repository of the hub, OWNER/NAME, for the adapter")
    if bucket and not re.fullmatch(owned, bucket, re.ASCII):
        raise BadInput(f"--bucket {bucket!r}: name a bucket of the hub, OWNER/NAME, for the checkpoints")


def _fitted(recipe: str, settings: list[str], flavor: Flavor, fit: str, may_change: Iterable[str]) -> tuple[str, ...]:
    """Return the changes that a search finds for the GPU of a machine; none if no search is wanted."""
    if not fit:
        return ()
    # Imported here: these import torch, which takes seconds, and most jobs need no search.
    from cria_tricks.data.lengths import full
    from cria_tricks.predict.toggles import Target
    from cria_tricks.run.search import search

    device = CARDS[flavor.card].device
    wanted = given.recipe(recipe, settings, device)
    target = Target(find_shape(wanted.model), device)
    return search(target, wanted, fit, full(wanted, "the rows are read in the job"), may_change).chosen.set


def _job(
    recipe: str, repo: str, settings: list[str], flavor: Flavor, longest: int, price: float, bucket: str
) -> HubJob:
    """Make the job for one machine; the arguments are those of :func:`prepare`, with the timeout in seconds."""
    card = CARDS[flavor.card]
    wanted = given.recipe(recipe, settings, card.device)
    _refuse_unreachable(wanted)
    shape = find_shape(wanted.model)
    # Imported here: these import torch, which takes seconds, and wrong names are refused above without it.
    from cria_tricks.predict.plan_data import on_machine

    bill = on_machine(wanted, shape, flavor)
    if not bill.memory.fits:
        has = human(card.device.memory_bytes)
        raise OutOfMemory(f"--flavor {flavor.name}: needs {human(bill.memory.needed_bytes)} of {has}; see cria plan")
    rows = ROWS.get(wanted.data.train)
    if wanted.train.max_steps:  # then the number of steps decides the length, and that of the rows does not matter
        rows = 0
    training = None
    if rows is not None and bill.seconds is not None:
        training = bill.seconds * run_tokens(wanted, rows, wanted.data.max_length)
    timeout, limit = _times(wanted, training, longest)
    environment = {"PYTHONUNBUFFERED": "1"}
    if recipe.endswith(".toml"):
        environment["CRIA_RECIPE"] = recipes.get(recipe).to_toml()
    result = "model" if wanted.tricks.peft == "none" else "adapter"
    package = "cria_tricks"
    if needed_libraries(wanted.data):
        package = "cria_tricks[data]"
    script = _script(package, recipe, repo, settings, flavor.cards, limit, result, bucket)
    public = script + str(environment)
    if redacted(public) != public:
        raise BadInput(f"recipe {recipe}: holds a token, and a job's command can be read by others; take it out")
    needed, verdict = bill.memory.needed_bytes, bill.memory.verdict
    spread = bill.spread
    return HubJob(
        wanted.name, flavor, price, needed, verdict, training, spread, timeout, limit, repo, result, script,
        environment, bucket=bucket,
    )  # fmt: skip


def _script(
    package: str, recipe: str, repo: str, settings: list[str], cards: int, limit: int, result: str, bucket: str
) -> str:
    """Write the bash script for the container; the first line that fails ends the job (``set -e``)."""
    name = recipe
    write_recipe = []
    if recipe.endswith(".toml"):  # the text of the file comes in an environment variable
        name = "recipe.toml"
        write_recipe = ['printf %s "$CRIA_RECIPE" > recipe.toml']
    start = ["train", name]
    if cards > 1:
        start = ["launch", name, "--on", "torchrun", "--nproc", str(cards)]
    if bucket:  # the next attempt begins with an empty disk; a folder for each result, as for each run
        settings = [*settings, f"train.mirror={BUCKET}/{repo.replace('/', '-')}"]
        start += ["--resume"]
    for setting in (*settings, f"train.time_budget={limit}"):
        start += ["--set", setting]
    lines = [
        "set -eu",
        'cd "$(mktemp -d)"',
        "uv venv --quiet",
        ". .venv/bin/activate",
        shlex.join(
            ["uv", "pip", "install", "--quiet", "--torch-backend=auto", f"{package} @ git+{version.repository()}"]
        ),
        *write_recipe,
        shlex.join(["cria", *start, "--out", "run"]),
        shlex.join(["cria", "publish", f"run/{result}", repo, "--tag", TAG, "--private", "--yes"]),
    ]
    return "\n".join(lines)


def _times(recipe: Recipe, training: float | None, longest: int) -> tuple[int, int]:
    """Choose the timeout of the whole job, and the time budget of ``cria train`` in it [s].

    Args:
        recipe: may have a time budget of its own.
        training: the estimated time of the training [s]; ``None`` if it is not known.
        longest: the timeout that the user has given [s]; 0 for none.
    """
    budget = recipe.train.time_budget or math.inf
    expected = math.inf
    if training is not None:
        expected = MARGIN * training + AROUND
    if not longest and min(budget, expected) == math.inf:
        raise BadInput(
            f"data.train={recipe.data.train}: how many rows it has is not known here; give --timeout, or --set "
            "train.max_steps or train.time_budget"
        )
    whole = longest or math.ceil((min(budget, expected) + AROUND) / 60) * 60  # whole minutes
    around = min(AROUND, whole // 2)  # at most half of a very short job, so that some time is left for training
    return whole, math.floor(min(budget, whole - around))


def _timeout(text: str) -> int:
    """Convert a ``--timeout`` to seconds; 0 for an empty one, which leaves the choice to the estimate."""
    if not text:
        return 0
    try:
        found = int(seconds(text))
    except (ValueError, OverflowError):
        found = 0
    if found < 60:
        raise BadInput(f"--timeout {text}: must be a time of a minute or more, such as 90m or 1h30m")
    return found


def _refuse_unreachable(recipe: Recipe) -> None:
    """Refuse data and models that are only on this machine, because the job runs on another."""
    for part in ("train", "eval"):
        name = getattr(recipe.data, part)
        on_the_hub = models.is_hub_id(name.partition(":")[0]) and not Path(name).suffix and not Path(name).exists()
        if name not in ROWS and not on_the_hub:
            raise BadInput(
                f"data.{part}={name}: a job cannot reach files of this machine; upload it to a private data set of the "
                "hub (hf upload OWNER/DATA FILE --repo-type dataset --private), and name that"
            )
    if recipe.lora.continue_from:
        raise BadInput(
            f"lora.continue_from={recipe.lora.continue_from}: a job cannot reach an adapter of this machine; merge it "
            "(cria merge), upload what that writes, and name it as the model"
        )
    model = models.ALIASES.get(recipe.model, recipe.model)
    if not models.is_hub_id(model) or Path(model).exists():
        raise BadInput(f"model={recipe.model}: a job takes its model from the hub; give an id there, OWNER/NAME")
    if recipe.train.mirror:
        raise BadInput(f"train.mirror={recipe.train.mirror}: a job's disk goes with it; use --bucket OWNER/NAME")
