"""Train a recipe as a job on a rented machine of Hugging Face, by ``huggingface_hub.run_uv_job``.

A job is a command that runs in a container on a rented machine. The container has no files of this machine, and nothing
is left of it when the job has ended. So the whole recipe travels with the command, and the last step of the job
publishes the result to a private repository of the hub.
"""

import contextlib
import re
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cria_tricks import models
from cria_tricks.adapter.publish import TAG
from cria_tricks.common import interrupts, version
from cria_tricks.common.errors import BadInput, OutOfMemory, redacted, usable_path
from cria_tricks.common.fields import seconds
from cria_tricks.common.units import duration, human, money
from cria_tricks.hardware.cards import CARDS, Flavor, find_flavor
from cria_tricks.models import network
from cria_tricks.models.shape import find_shape
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.run import given
from cria_tricks.store import run_folder

AROUND = 15 * 60
"""The time before its timeout at which a job stops training, so that it can publish what was learnt [s]."""
OURS = ("nguzo_saba", "history_notes", "kwanzaa", "kwanzaa_curated")
"""Data sets that are in the package, or that it downloads."""
ENDS = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
"""The stages of a job that runs no more."""


def launch(
    recipe: str,
    repo: str,
    settings: list[str],
    out: Path | None = None,
    only_print: bool = False,
    flavor: str = "t4-small",
    timeout: str = "1h",
) -> None:
    """Say what a job is and costs, send it, show its log until it has ended, and download its result to ``out``.

    Raises:
        BadInput: if the job cannot be sent, does not end well, or its result cannot be fetched.
        OutOfMemory: if the recipe does not fit on the machine, by its estimate.
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", repo, re.ASCII):
        raise BadInput(f"--repo {repo!r}: name a repository of the hub, OWNER/NAME, for the result")
    limit = _timeout(timeout)
    machine = find_flavor(flavor)
    wanted = _recipe(recipe, settings, machine, limit)
    folder = usable_path("--out", out or run_folder.numbered(Path("runs") / repo.split("/")[1], resume=False))
    run_folder.refuse_taken("--out", folder, resume=False)
    price = machine.price
    if not only_print:
        network.refuse_offline("--on hf-jobs: a job is sent over the network", "leave one out, or add --print")
        # Imported here, because it takes half a second, and printing a job does not need it.
        import huggingface_hub

        warnings.filterwarnings("ignore", ".*run_uv_job.* is experimental")
        token = huggingface_hub.get_token()
        if not token:
            raise BadInput("--on hf-jobs: nobody is logged in to the hub; run hf auth login, or set HF_TOKEN")
        api = huggingface_hub.HfApi()
        with _in_one_line():
            price = _price_now(api, machine.name)
    package = f"cria_tricks[data] @ git+{version.repository()}"
    result = "model" if wanted.tricks.peft == "none" else "adapter"
    script = _script(machine.cards, result, repo)
    print(f"{machine.name}: {money(price)} an hour, at most {money(price * limit / 3600)} for {duration(limit)}")
    print(f"training: ends by itself after {duration(wanted.train.time_budget)}")
    print(f"result: {repo} on the hub, private, {TAG}")
    print(f"secret: HF_TOKEN, of your login; variable: CRIA_RECIPE, the whole recipe; package: {package}; then:")
    print(script)
    if only_print:
        print("nothing was sent; the price is that of the list kept here")
        return
    with _in_one_line():
        # Before a machine is rented, so that a login without the right to write costs nothing.
        _make_repository(api, repo)
        interrupts.now_saved("the job may have been sent; hf jobs ps lists the ones that run and cost")
        started = api.run_uv_job(
            "bash",
            script_args=["-c", 'eval "$CRIA_SCRIPT"'],
            dependencies=[package],
            env={"CRIA_SCRIPT": script, "CRIA_RECIPE": wanted.to_toml(), "PYTHONUNBUFFERED": "1"},
            secrets={"HF_TOKEN": token},
            flavor=machine.name,
            timeout=limit,
            labels={"name": "cria"},
        )
    _follow(api, started, f"fetch its result: hf download {repo} --revision {TAG} --local-dir {folder / result}")
    with _in_one_line(f"; the job has ended well; the result is in {repo}"):
        api.snapshot_download(repo, revision=TAG, local_dir=folder / result)
    print(f"{result}: {folder / result} (to check its files: cria verify {folder / result})")


def _follow(api: Any, started: Any, fetch: str) -> None:
    named = f"{started.owner.name}/{started.id}"
    goes_on = f"the job goes on, and costs: follow it: hf jobs logs -f {named}; end it: hf jobs cancel {named}; {fetch}"
    interrupts.now_saved(goes_on)
    print(f"job {started.id}: {started.url}", flush=True)
    where = {"job_id": started.id, "namespace": started.owner.name}
    with _in_one_line(f"; {goes_on}"):
        for line in api.fetch_job_logs(follow=True, **where):
            print(redacted(line.rstrip("\n")), flush=True)
        while (ended := api.inspect_job(**where)).status.stage not in ENDS:
            time.sleep(5)
    if ended.status.stage != "COMPLETED":
        reason = ended.status.message or "its log says why"
        raise BadInput(f"job {ended.id} ended with {ended.status.stage}: {reason}: {ended.url}")
    interrupts.now_saved(f"the job has ended; {fetch}")


def _recipe(name: str, settings: list[str], machine: Flavor, limit: int) -> Recipe:
    """Return the recipe for the machine, with a time budget that ends the training before the job [s]."""
    device = CARDS[machine.card].device
    wanted = given.recipe(name, settings, device)
    _refuse_unreachable(wanted)
    # Imported here: it imports torch, which takes seconds, and wrong names are refused above without it.
    from cria_tricks.predict.plan_data import on_machine

    memory = on_machine(wanted, find_shape(wanted.model), machine).memory
    if not memory.fits:
        needs = f"needs {human(memory.needed_bytes)} of {human(device.memory_bytes)}"
        raise OutOfMemory(f"--flavor {machine.name}: {needs}; see cria plan")
    budget = min(limit - min(AROUND, limit // 2), wanted.train.time_budget or limit)
    wanted = with_settings(wanted, [f"train.time_budget={budget}"])
    if redacted(wanted.to_toml()) != wanted.to_toml():
        raise BadInput(f"recipe {name}: holds a token, and a job's recipe can be read by others; take it out")
    return wanted


def _refuse_unreachable(recipe: Recipe) -> None:
    """Refuse data, models and folders that are only on this machine, because the job runs on another."""
    for part in ("train", "eval"):
        name = getattr(recipe.data, part) or recipe.data.train
        on_the_hub = models.is_hub_id(name.partition(":")[0]) and not Path(name).suffix and not Path(name).exists()
        if name not in OURS and not on_the_hub:
            raise BadInput(f"data.{part}={name}: a job cannot reach files of this machine; upload it (hf upload)")
    model = models.ALIASES.get(recipe.model, recipe.model)
    if not models.is_hub_id(model) or Path(model).exists():
        raise BadInput(f"model={recipe.model}: a job takes its model from the hub; give an id there, OWNER/NAME")
    for field, value in {"lora.continue_from": recipe.lora.continue_from, "train.mirror": recipe.train.mirror}.items():
        if value:
            raise BadInput(f"{field}={value}: a job has no folder of this machine; leave it out")


def _timeout(text: str) -> int:
    try:
        found = int(seconds(text))
    except (ValueError, OverflowError):
        found = 0
    if found < 60:
        raise BadInput(f"--timeout {text}: must be a time of a minute or more, such as 90m or 1h30m")
    return found


def _script(cards: int, result: str, repo: str) -> str:
    """Write the bash script for the container; the first line that fails ends the job (``set -e``)."""
    start = f"cria launch recipe.toml --on torchrun --nproc {cards}" if cards > 1 else "cria train recipe.toml"
    lines = [
        "set -eu",
        'cd "$(mktemp -d)"',
        "python -c 'import torch; torch.cuda.init()'",  # without its GPU the training would take hours, and be paid
        'printf %s "$CRIA_RECIPE" > recipe.toml',
        f"{start} --out run",
        f"cria publish run/{result} {repo} --tag {TAG} --private --yes",
    ]
    return "\n".join(lines)


@contextlib.contextmanager
def _in_one_line(then: str = "") -> Iterator[None]:
    try:
        yield
    except BadInput:
        raise
    except Exception as error:  # both httpx and huggingface_hub raise errors of their own
        raise BadInput(f"--on hf-jobs: {network.why(error)}{then}") from None


def _price_now(api: Any, flavor: str) -> float:
    """Ask the hub for today's price of a machine [USD/h]."""
    hours = {"second": 3600, "minute": 60, "hour": 1}
    for each in api.list_jobs_hardware():
        if each.name == flavor:
            return float(each.unit_cost_usd * hours[each.unit_label])
    raise BadInput(f"--flavor {flavor}: the hub does not offer it now; see hf jobs hardware")


def _make_repository(api: Any, repo: str) -> None:
    """Make the private repository for the result; refuse one that is public or holds files."""
    api.create_repo(repo, private=True, exist_ok=True)
    about = api.model_info(repo)
    names = {each.rfilename for each in about.siblings or []} - {".gitattributes"}
    if names or not about.private:
        raise BadInput(f"--repo {repo}: is public, or holds files already; name a new one")
