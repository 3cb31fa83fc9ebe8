"""Show a job, send it to Hugging Face, follow it to its end, and fetch its result; ``launch/job.py`` makes the job.

These requests are sent, in this order, all with the token of the user's login:

- ``GET /api/jobs/hardware``: ask for the machines and today's prices;
- ``GET /api/whoami-v2``: ask who the user is;
- ``POST /api/repos/create``: create the private repository for the result. This comes before a machine is rented, so
  that a login without the right to write costs nothing;
- ``POST /api/jobs/NAMESPACE``: start the job; from here on it costs money;
- ``GET /api/jobs/NAMESPACE/ID/logs`` and ``GET /api/jobs/NAMESPACE/ID``: read its log as it grows, and its stage;
- download the files of the repository at their version tag.
"""

import inspect
import re
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter.publish import TAG
from cria_tricks.common.errors import BadInput, JobFailed, cure, in_one_line, redacted, usable_path
from cria_tricks.common.units import between, duration, human, money, money_between
from cria_tricks.hardware import trust
from cria_tricks.hardware.cards import CARDS
from cria_tricks.launch.job import BUCKET, IMAGE, HubJob
from cria_tricks.models import network

SECRETS = ("HF_TOKEN",)
"""Environment variables that the job gets from the user's login; their values go into the request and nowhere else."""

CURES = {
    401: "is the token right? hf auth whoami tells",
    402: "no credit is left: see https://huggingface.co/settings/billing",
    403: "may this login start jobs and write there, and is its quota used up? see https://huggingface.co/settings/tokens",
    429: "too many requests or jobs at once: wait, then start again",
}
"""The advice for an error of the hub, by its HTTP status code."""

ENDS = ("COMPLETED", "CANCELED", "ERROR", "DELETED")
"""The stages of a job that runs no more."""

Say = Callable[[str], None]


def shown(job: HubJob) -> list[str]:
    """List the job line by line, as it would be sent, with the names of its secrets but without their values."""
    lines = {
        "flavor": _flavor(job),
        "price": f"{money(job.price)} an hour, at most {money(job.most)}",
        "training": _training(job),
        "timeout": f"{job.timeout} s ({duration(job.timeout)})",
        "attempts": _attempts(job),
        "image": IMAGE,
        "labels": " ".join(f"{key}={value}" for key, value in job.labels.items()),
        "secrets": f"{' '.join(SECRETS)} (of your login; the value is shown nowhere)",
        "result": f"{job.repo} on the hub, private, {TAG}",
    }
    found = [f"{name:<10}{text}" for name, text in lines.items()]
    for name, text in job.environment.items():
        found.append(f"variable  {name}={shlex.quote(text)}")
    found.append("command   bash -c, with:")
    found += [f"  {line}" for line in job.script.splitlines()]
    return found


def _flavor(job: HubJob) -> str:
    """Describe the machine, and how much of the memory of each GPU the job needs."""
    card = CARDS[job.flavor.card].device
    machine = card.name
    if job.flavor.cards > 1:
        machine = f"{job.flavor.cards} x {card.name}"
    memory = f"needs {human(job.needed_bytes)} of {human(card.memory_bytes)}"
    if job.tight:
        memory += f"; {trust.TIGHT}"
    return f"{job.flavor.name} ({machine}: {memory})"


def _attempts(job: HubJob) -> str:
    """Describe how often the hub starts the job, and from where a later attempt goes on."""
    if job.bucket:
        return f"{job.attempts}; checkpoints go to the bucket {job.bucket}, and the next attempt goes on from there"
    if job.attempts > 1:
        return f"{job.attempts}; each begins from the first step; with --bucket it would go on from a checkpoint"
    return "1"


def _training(job: HubJob) -> str:
    """Describe the estimated time and cost of the training, and when it ends by itself."""
    expected = "not known here"
    if job.training_seconds is not None:
        low, high = job.training_range
        cost = money_between(job.price * low / 3600, job.price * high / 3600)
        expected = f"{between(low, high)}, {cost}; {trust.TIME}"
    end = f"ends by itself after {duration(job.time_budget)}"
    if not job.finishes:
        end += ", perhaps before it is through: what it has learnt by then is published"
    return f"{expected}; {end}"


class JobsHub:
    """Start and watch jobs on the hub, and create their repositories, as the user who is logged in.

    Raises:
        BadInput: if nobody is logged in, or the network must not be used.
    """

    def __init__(self) -> None:
        # Imported here, because it takes half a second, and printing a job does not need it.
        import huggingface_hub

        network.refuse_offline("--on hf-jobs: a job is sent over the network", "leave one out, or add --print")
        self.token = huggingface_hub.get_token()
        if not self.token:
            raise BadInput("--on hf-jobs: nobody is logged in to the hub; run hf auth login, or set HF_TOKEN")
        self.api = huggingface_hub.HfApi()

    def prices(self) -> dict[str, float]:
        """Ask the hub for the price of each machine that it offers, by name [USD/h]."""
        hours = {"second": 3600, "minute": 60, "hour": 1}
        found = self._ask(self.api.list_jobs_hardware)
        return {each.name: each.unit_cost_usd * hours[each.unit_label] for each in found}

    def send(self, job: HubJob) -> Any:
        """Create the repository for the result, then start the job.

        Returns:
            The hub's ``JobInfo``.

        Raises:
            BadInput: if the repository holds files already, or is public.
            JobFailed: if the hub does not accept the job: no credit, no right to start it, or no answer.
        """
        more = self._more(job)
        owner = self._ask(self.api.whoami)["name"]
        self._make_repository(job.repo)
        return self._ask(
            self.api.run_job,
            image=IMAGE,
            command=job.command,
            env=dict(job.environment),
            secrets=dict.fromkeys(SECRETS, self.token),
            flavor=job.flavor.name,
            timeout=job.timeout,
            labels=job.labels,
            namespace=owner,
            **more,
        )

    def _more(self, job: HubJob) -> dict[str, Any]:
        """Return the arguments that only some jobs need, and refuse those that this library does not have yet."""
        # It takes a while to import, and only a job that is sent needs it.
        import huggingface_hub

        more: dict[str, Any] = {}
        if job.attempts > 1:
            more["attempts"] = job.attempts
        if job.bucket:
            more["volumes"] = [{"type": "bucket", "source": job.bucket, "mount_path": BUCKET}]
        lacking = more.keys() - inspect.signature(self.api.run_job).parameters.keys()
        if lacking:
            option = "--attempts" if "attempts" in lacking else "--bucket"
            version = huggingface_hub.__version__
            raise BadInput(f"{option}: huggingface_hub {version} cannot ask for it; pip install -U huggingface_hub")
        if job.bucket:
            more["volumes"] = [huggingface_hub.Volume(**each) for each in more["volumes"]]
        return more

    def follow(self, started: Any, job: HubJob, say: Say) -> None:
        """Pass each new line of the log to ``say``, until the job has ended.

        Raises:
            JobFailed: if it did not end well, with the reason in one line.
        """
        where = {"job_id": started.id, "namespace": started.owner.name}
        last_error = ""
        try:
            for line in self.api.fetch_job_logs(follow=True, **where):
                say(redacted(line.rstrip("\n")))
                if line.startswith("error: "):
                    last_error = line
            ended = self._end_of(**where)
        except Exception as error:  # an error of the network here, which does not affect the job
            raise JobFailed(f"{_in_one_line(error)}; the job goes on: {'; '.join(ways_on(started, job))}") from None
        if ended.status.stage != "COMPLETED":
            raise JobFailed(_why(ended, job, last_error))

    def _end_of(self, **where: str) -> Any:
        """Ask for a job again and again until it has ended: the oldest huggingface_hub has no ``wait_for_job``."""
        while True:
            found = self.api.inspect_job(**where)
            if found.status.stage in ENDS:
                return found
            time.sleep(5)

    def fetch(self, job: HubJob, folder: Path) -> artifact.Verified:
        """Download what the job published, and check every file against its manifest.

        Raises:
            BadInput: if a file differs from its manifest.
            JobFailed: if the files cannot be downloaded.
        """
        try:
            self.api.snapshot_download(job.repo, revision=TAG, local_dir=folder)
        except Exception as error:
            raise JobFailed(f"{_in_one_line(error)}; the job has ended well: {by_hand(job)}") from None
        return artifact.verify(folder)

    def _make_repository(self, repo: str) -> None:
        """Create the private repository for the result, and refuse one that is public or holds files."""
        self._ask(self.api.create_repo, repo, private=True, exist_ok=True)
        about = self._ask(self.api.model_info, repo)
        if not about.private:
            raise BadInput(f"--repo {repo}: is there already and public; make it private there, or name another")
        held = [each.rfilename for each in about.siblings or [] if artifact.may_be_read(each.rfilename)]
        if held:
            raise BadInput(f"--repo {repo}: holds {held[0]} already; name a new one, so that nothing is mixed")

    def _ask(self, call: Callable[..., Any], *arguments: Any, **more: Any) -> Any:
        """Call a function of the hub's library, and turn any error into a :class:`JobFailed` of one line."""
        try:
            return call(*arguments, **more)
        except Exception as error:  # both httpx and huggingface_hub raise errors of their own
            raise JobFailed(_in_one_line(error)) from None


def free_folder(out: Path | None, job: HubJob) -> Path:
    """Return the folder for the result, and refuse one that exists, before anything costs money.

    Raises:
        BadInput: if the folder exists already, or ``out`` is a file.
    """
    folder = usable_path("--out", out or Path("runs") / job.repo.partition("/")[2])
    made = folder / job.result
    if folder.is_file() or made.exists():
        raise BadInput(f"--out {folder}: holds {made.name} already; name a new folder")
    return made


def ways_on(started: Any, job: HubJob) -> list[str]:
    """List the commands to follow, end and fetch a job that goes on while this command no longer watches it."""
    named = f"{started.owner.name}/{started.id}"
    return [
        f"follow it: hf jobs logs -f {named}",
        f"end it: hf jobs cancel {named}",
        by_hand(job),
    ]


def by_hand(job: HubJob) -> str:
    """Return the commands that fetch the result of a job that has ended."""
    return f"fetch its result: hf download {job.repo} --revision {TAG} --local-dir FOLDER, then cria verify FOLDER"


def _why(ended: Any, job: HubJob, last_error: str) -> str:
    """Say in one line why a job did not end well."""
    stage = str(ended.status.stage)
    message = (ended.status.message or "").strip()
    named = f"job {ended.id}"
    if stage in ("CANCELED", "DELETED"):
        return f"{named} was {stage.lower()}: {ended.url}"
    durations = getattr(ended, "durations", None)  # the oldest huggingface_hub does not pass them on
    ran = durations and durations.running_secs
    timed_out = re.search(r"\btime(d )?out\b", message, re.IGNORECASE)
    if timed_out or (ran is not None and ran >= job.timeout):
        return f"{named} ran out of its {job.timeout} s and was ended; give a longer --timeout: {ended.url}"
    reason = "; ".join(part for part in (message, last_error.removeprefix("error: ").strip()) if part)
    return f"{named} failed: {reason or 'its log says why'}: {ended.url}"


def _in_one_line(error: Exception) -> str:
    return f"--on hf-jobs: {in_one_line(error)}{cure(error, CURES)}"
