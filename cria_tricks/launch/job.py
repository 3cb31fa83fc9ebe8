"""A recipe as a job on a machine of Hugging Face's: what is sent, chosen by the estimate, before anything is.

A job is a command in a container on a rented machine. Nothing of this machine is there, and nothing of the job's
machine is left when it has ended. So everything that decides the run travels in the command, and what it made is
published to a private repository of the hub as its last act. ``launch/hub.py`` sends it, follows it and fetches that.
"""

import importlib.metadata
import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from cria_tricks import models, recipes
from cria_tricks.adapter.publish import TAG
from cria_tricks.common.errors import BadInput, OutOfMemory, redacted
from cria_tricks.common.units import duration, human, money
from cria_tricks.hardware.cards import CARDS, FLAVORS, Flavor, find_flavor
from cria_tricks.hardware.trust import may_not_fit
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, seconds
from cria_tricks.run import given

IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"
"""Debian with Python, git, a compiler and uv, which takes the build of torch that the machine's driver can run; the
image that huggingface_hub runs its own uv jobs in."""

MARGIN = 2
"""The estimate of the time is right within this factor."""
AROUND = 15 * 60
"""Seconds of a job for installing and publishing; and as many for what ``cria train`` does besides: it downloads and
loads the model, and evaluates."""

ROWS = {"nguzo_saba": 32, "kwanzaa": 107}
"""Training rows of the sets that are known here."""


@dataclass(frozen=True)
class Job:
    """What would be sent, and why.

    Attributes:
        name: the recipe's.
        flavor: the machine.
        price: USD an hour.
        needed_bytes: on each of its cards, by the estimate.
        training_seconds: by the estimate; ``None`` where the number of rows is not known here.
        timeout: seconds after which the hub ends it.
        time_budget: seconds after which the training ends by itself, so that what it has learnt is published.
        repo: OWNER/NAME that the result goes to, private.
        result: ``adapter``, or ``model`` when the whole model is trained.
        script: what bash does in the container.
        environment: variables that are no secrets.
    """

    name: str
    flavor: Flavor
    price: float
    needed_bytes: int
    training_seconds: float | None
    timeout: int
    time_budget: int
    repo: str
    result: str
    script: str
    environment: Mapping[str, str]

    @property
    def command(self) -> list[str]:
        """As the container starts it."""
        return ["bash", "-c", self.script]

    @property
    def labels(self) -> dict[str, str]:
        """By which the hub lists it."""
        return {"name": f"cria-{re.sub(r'[^A-Za-z0-9_-]', '-', self.name)}"}

    @property
    def most(self) -> float:
        """USD that it can cost: every minute up to the timeout."""
        return self.price * self.timeout / 3600

    @property
    def training_cost(self) -> float | None:
        """USD for the training alone, by the estimate."""
        return None if self.training_seconds is None else self.price * self.training_seconds / 3600

    @property
    def narrow(self) -> bool:
        """Whether it fits so narrowly that it may not fit in practice."""
        return bool(may_not_fit(self.needed_bytes, CARDS[self.flavor.card].device.memory_bytes))

    @property
    def finishes(self) -> bool:
        """Whether the training ends before its budget, by the estimate."""
        return self.training_seconds is None or self.training_seconds <= self.time_budget


def prepare(
    recipe: str,
    repo: str,
    settings: Iterable[str] = (),
    flavor: str = "auto",
    timeout: str = "",
    budget: float | None = None,
    prices: Mapping[str, float] | None = None,
) -> Job:
    """Choose a machine and write the job. Nothing is sent; a model that is not of the catalogue has its config read.

    Args:
        recipe: a name or a TOML file, whose text travels with the job.
        repo: OWNER/NAME on the hub for what is trained.
        settings: as for ``cria train``.
        flavor: a machine of :data:`FLAVORS`; ``auto`` takes, of those that the recipe fits on, the one on which the
            job costs least. Before all others come those on which it fits with some room, then those on which it
            finishes in time.
        timeout: such as ``90m``; twice the estimated training and half an hour when left out.
        budget: USD that the job may cost at most.
        prices: USD an hour by machine, of those that can be had; the list kept here when left out.

    Raises:
        BadInput: for what would end the job, or cannot be reached by it, or a budget that is too small.
        OutOfMemory: if the recipe fits on none of the machines, or not on the one that was named.
    """
    if budget is not None and not (math.isfinite(budget) and budget > 0):
        raise BadInput(f"--budget {budget:g}: must be an amount of USD above 0")
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo, re.ASCII):
        raise BadInput(f"--repo {repo!r}: name a repository of the hub, OWNER/NAME, for the adapter")
    settings = list(settings)
    if prices is None:
        prices = {name: each.price for name, each in FLAVORS.items()}
    longest = _timeout(timeout)
    jobs: list[Job] = []
    refused: list[BadInput | OutOfMemory] = []
    for each in FLAVORS.values() if flavor == "auto" else [find_flavor(flavor)]:
        try:
            if each.name not in prices:
                raise BadInput(f"--flavor {each.name}: the hub does not offer it now; see hf jobs hardware")
            jobs.append(_job(recipe, repo, settings, each, longest, prices[each.name]))
        except (BadInput, OutOfMemory) as error:
            refused.append(error)
    if not jobs:
        last = refused[-1]  # of the machine with the largest card
        raise (
            OutOfMemory(f"it fits on no machine: {last}")
            if isinstance(last, OutOfMemory) and len(refused) > 1
            else last
        )
    affordable = [job for job in jobs if budget is None or job.most <= budget]
    if not affordable:
        least = min(jobs, key=lambda job: job.most)
        raise BadInput(
            f"--budget {budget:g}: {least.flavor.name} for up to {duration(least.timeout)} may cost "
            f"{money(least.most)}; give more, or a shorter --timeout"
        )
    return min(affordable, key=lambda job: (job.narrow, not job.finishes, job.most))


def _job(recipe: str, repo: str, settings: list[str], flavor: Flavor, longest: int, price: float) -> Job:
    """The job on one machine."""
    card = CARDS[flavor.card]
    wanted = given.recipe(recipe, settings, card.device)
    _refuse_unreachable(wanted)
    shape = find_shape(wanted.model)
    from cria_tricks.bill.step_time import run_tokens  # here, as they import torch: a wrong name is told without
    from cria_tricks.predict.plan_data import on_machine

    bill = on_machine(wanted, shape, flavor)
    if not bill.memory.fits:
        has = human(card.device.memory_bytes)
        raise OutOfMemory(f"--flavor {flavor.name}: needs {human(bill.memory.needed_bytes)} of {has}; see cria plan")
    rows = 0 if wanted.train.max_steps else ROWS.get(wanted.data.train)  # where they are set, steps decide
    training = None
    if rows is not None and bill.seconds is not None:
        training = bill.seconds * run_tokens(wanted, rows, wanted.data.max_length)
    timeout, limit = _times(wanted, training, longest)
    environment = {"PYTHONUNBUFFERED": "1"}
    if recipe.endswith(".toml"):
        environment["CRIA_RECIPE"] = recipes.get(recipe).to_toml()
    result = "model" if wanted.tricks.peft == "none" else "adapter"
    script = _script(recipe, repo, settings, flavor.cards, limit, result)
    if redacted(said := script + str(environment)) != said:
        raise BadInput(f"recipe {recipe}: holds a token, and a job's command can be read by others; take it out")
    needed = bill.memory.needed_bytes
    return Job(wanted.name, flavor, price, needed, training, timeout, limit, repo, result, script, environment)


def _script(recipe: str, repo: str, settings: list[str], cards: int, limit: int, result: str) -> str:
    """What the container does; the first line that fails ends the job."""
    file = recipe.endswith(".toml")
    name = "recipe.toml" if file else recipe
    start = ["train", name] if cards == 1 else ["launch", name, "--on", "torchrun", "--nproc", str(cards)]
    for setting in (*settings, f"train.time_budget={limit}"):
        start += ["--set", setting]
    lines = [
        "set -eu",
        'cd "$(mktemp -d)"',
        "uv venv --quiet",
        ". .venv/bin/activate",
        shlex.join(["uv", "pip", "install", "--quiet", "--torch-backend=auto", f"cria_tricks @ git+{repository()}"]),
        *(['printf %s "$CRIA_RECIPE" > recipe.toml'] if file else []),
        shlex.join(["cria", *start, "--out", "run"]),
        shlex.join(["cria", "publish", f"run/{result}", repo, "--tag", TAG, "--private", "--yes"]),
    ]
    return "\n".join(lines)


def repository() -> str:
    """Where the package's source is, for everybody: the address in pyproject.toml."""
    named = importlib.metadata.metadata("cria_tricks").get_all("Project-URL") or []
    return dict(line.split(", ", 1) for line in named)["Repository"]


def _times(recipe: Recipe, training: float | None, longest: int) -> tuple[int, int]:
    """Seconds of the whole job, and of ``cria train`` in it."""
    budget = recipe.train.time_budget or math.inf
    expected = math.inf if training is None else MARGIN * training + AROUND
    if not longest and min(budget, expected) == math.inf:
        raise BadInput(
            f"data.train={recipe.data.train}: how many rows it has is not known here; give --timeout, or --set "
            "train.max_steps or train.time_budget"
        )
    whole = longest or math.ceil((min(budget, expected) + AROUND) / 60) * 60
    return whole, math.floor(min(budget, whole - min(AROUND, whole // 2)))


def _timeout(text: str) -> int:
    try:
        found = int(seconds(text)) if text else 0
    except (ValueError, OverflowError):
        found = -1
    if text and found < 60:
        raise BadInput(f"--timeout {text}: must be a time of a minute or more, such as 90m or 1h30m")
    return found


def _refuse_unreachable(recipe: Recipe) -> None:
    """Nothing of this machine is on the job's."""
    for part in ("train", "eval"):
        name = getattr(recipe.data, part)
        on_the_hub = models.is_hub_id(name.partition(":")[0]) and not Path(name).suffix and not Path(name).exists()
        if name not in ROWS and not on_the_hub:
            raise BadInput(
                f"data.{part}={name}: a job cannot reach files of this machine; upload it to a private data set of the "
                "hub (hf upload OWNER/DATA FILE --repo-type dataset --private), and name that"
            )
    model = models.ALIASES.get(recipe.model, recipe.model)
    if not models.is_hub_id(model) or Path(model).exists():
        raise BadInput(f"model={recipe.model}: a job takes its model from the hub; give an id there, OWNER/NAME")
    if recipe.train.mirror:
        raise BadInput(f"train.mirror={recipe.train.mirror}: a job's disk goes with it; leave it out")
