"""Write and find a run's checkpoints: whole or not at all, the newest two kept, with a second copy when asked.

A checkpoint holds what a run needs to go on as if nothing had happened: what trains, the optimizer, the schedule,
the loss scaler, the random states, the position in the data, and ``run.json``, which says what run it is of and what
was spent on it so far. The frozen base is not in it.

Four of its files are pickles, as torch has no other form for an optimizer's state: ``PICKLES``. They are this run's
own, and transformers reads them with ``weights_only``, which makes tensors and numbers and refuses everything else.
No other pickle may lie in a checkpoint, what trains is in safetensors, and all other rules of ``dangers`` hold.
"""

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cria_tricks.common import atomic_files, interrupts, safe_files
from cria_tricks.common.errors import BadInput, Unwritten
from cria_tricks.common.fields import flat
from cria_tricks.common.version import ARITHMETIC, installed
from cria_tricks.data.shards import Streamed
from cria_tricks.data.sources import DataSource
from cria_tricks.recipe import Recipe

KEPT = 2
RUN = "run.json"
PICKLES = ("optimizer.pt", "scheduler.pt", "scaler.pt", "rng_state.pth")
FREE = {
    "name",
    "train.save_steps",
    "train.save_minutes",
    "train.time_budget",
    "train.mirror",
    "train.monitor_seconds",
    "train.profile",
    "train.report_to",
    "parallel.strategy",
    "parallel.tensor_size",
    "parallel.pipelines",
    "parallel.pipeline_schedule",
    "parallel.stage_blocks",
    "parallel.timeout",
}
"""Fields of a recipe that change nothing in what is trained, so that a resumed run may change them."""
BY_CONTENT = {"data.train", "data.eval"}
"""Fields that name a place; what counts is the rows there. So it is with ``model``, once its weights are known."""
LENGTH = {"train.max_steps", "train.epochs"}
"""Fields that a resumed run may raise: it goes on for longer."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: its folder.
        step: optimizer steps it has behind it.
        about: what run it is of: ``recipe``, ``rows`` and ``versions``, from :func:`describe`.
        spent: what the run had spent by then, from ``Meter.spent``.
    """

    path: Path
    step: int
    about: Mapping[str, Any]
    spent: Mapping[str, Any]


@dataclass
class Checkpoints:
    """Write and find the checkpoints of one run.

    Attributes:
        folder: where they lie, as ``checkpoint-STEP``.
        mirror: a second folder for a copy of each, or none.
        about: what run they are of; written into each.
        say: takes a sentence for the user.
        seconds: how long the last one took to write, its copy included.
    """

    folder: Path
    mirror: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = lambda sentence: None
    seconds: float = 0.0

    @contextlib.contextmanager
    def new(self, step: int, spent: Mapping[str, Any]) -> Iterator[Path]:
        """Write a checkpoint into the folder this yields.

        Raises:
            Unwritten: if it could not be written; the earlier ones are whole. A mirror that fails only warns.
        """
        began = time.perf_counter()
        path = self.folder / f"checkpoint-{step}"
        with atomic_files.new_folder(path) as aside:
            yield aside
            (aside / RUN).write_text(json.dumps({**self.about, "spent": spent}, indent=2) + "\n", encoding="utf-8")
        interrupts.now_saved(f"step {step} is saved in {path}; go on with --resume")
        _prune(self.folder)
        if self.mirror:
            try:
                atomic_files.copy_folder(path, self.mirror / path.name)
                _prune(self.mirror)
            except Unwritten as error:
                self.say(f"warning: train.mirror: {error.reason}; the run goes on without this copy")
        self.seconds = time.perf_counter() - began

    def newest(self) -> Checkpoint | None:
        """Find the newest whole checkpoint, here or in the mirror; damaged ones are passed over, and told.

        Returns:
            ``None`` when there is none at all.

        Raises:
            BadInput: if there are some, and none is whole.
        """
        damaged: dict[Path, str] = {}
        for path in self._all():
            why = _unfit(path)
            found = None if why else _read(path)
            if found:
                for other, what in damaged.items():
                    self.say(f"{other} is damaged ({what}): going on from {path.name} instead")
                return found
            damaged[path] = why or f"{RUN} cannot be read"
        if damaged:
            path, why = next(iter(damaged.items()))
            raise BadInput(
                f"none of the checkpoints in {path.parent} is whole ({path.name}: {why}); start again in a new folder"
            )
        return None

    def put_aside_after(self, start: Checkpoint) -> None:
        """Rename the damaged ones that lie beyond the start, so that none is ever taken for a newer one."""
        for path in self._all():
            if _step(path) > start.step or (_step(path) == start.step and _unfit(path)):
                aside = path.with_name(path.name + ".damaged")
                shutil.rmtree(aside, ignore_errors=True)
                try:
                    with atomic_files.unwritten_in_one_line(aside):
                        path.rename(aside)
                except Unwritten as error:
                    if path.parent != self.mirror:
                        raise
                    self.say(f"warning: train.mirror: {error.reason}")

    def _all(self) -> list[Path]:
        """List the newest first; of the same step, the one here before the mirror's."""
        found = _in(self.folder)
        if self.mirror:
            found += _in(self.mirror)
        return sorted(found, key=_step, reverse=True)


def describe(
    recipe: Recipe, found: Mapping[str, DataSource | Streamed], device: str, processes: int = 1
) -> dict[str, Any]:
    """Describe a run by all that decides its result: recipe, rows, library versions, device and number of processes."""
    return {
        "recipe": recipe.model_dump(mode="json"),
        "rows": {part: source.sha256 for part, source in found.items()},
        "versions": {"device": device, "processes": processes, **installed(ARITHMETIC)},
    }


def refuse_another_run(before: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Refuse to resume a run whose recipe or rows have changed.

    Raises:
        BadInput: naming the fields that differ.
    """
    try:
        then = Recipe.model_validate(before["recipe"]).model_dump(mode="json")
    except (ValidationError, KeyError, TypeError):
        raise BadInput(
            f"--resume: {where}: its recipe is of another version of cria_tricks; use the version that wrote it"
        ) from None
    old = flat(then)
    new = flat(now["recipe"])
    ignored = FREE | BY_CONTENT | _lengthened(old, new)
    if "base" in before:  # the identity of the base's files counts, and not their name
        ignored |= {"model"}
    changed = [key for key in new if key not in ignored and old[key] != new[key]]
    differ = [f"{key} ({old[key]!r}, now {new[key]!r})" for key in changed]
    rows = before.get("rows", {})
    differ += [f"data.{part} (other rows)" for part in now["rows"] if part in rows and rows[part] != now["rows"][part]]
    if differ:
        longer = ""
        if not LENGTH.isdisjoint(changed):
            decides = "train.max_steps" if old["train.max_steps"] else "train.epochs"
            longer = f"; a run can be made longer by {decides}, which set its length, and never shorter"
        raise BadInput(
            f"--resume: {where} is of another recipe: {', '.join(differ)}{longer}; set them back, or name a new folder"
        )


def _lengthened(old: Mapping[str, Any], new: Mapping[str, Any]) -> set[str]:
    """Return the fields of the run's length, if it became no shorter."""
    then = old["train.max_steps"]
    now = new["train.max_steps"]
    is_longer = new["train.epochs"] >= old["train.epochs"]
    if then or now:  # where steps are set, epochs decide nothing
        is_longer = bool(then) and now >= then
    return LENGTH if is_longer else set()


def other_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Warn of other libraries or another device: the run can go on, but not bit for bit."""
    changed = [
        f"{name} {before['versions'].get(name)} is now {version}"
        for name, version in now["versions"].items()
        if before["versions"].get(name, version) != version
    ]
    if not changed:
        return []
    return [f"{', '.join(changed)}: the resumed run may differ in the last bits"]


def _read(path: Path) -> Checkpoint | None:
    """Read what a checkpoint says of itself; ``None`` if that is not what we write."""
    try:
        about = json.loads((path / RUN).read_text(encoding="utf-8"))
        return Checkpoint(path, _step(path), about, about["spent"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _in(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read: {error.strerror}") from None


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _unfit(path: Path) -> str:
    """Say why a checkpoint is not read; empty for a good one."""
    return safe_files.way_out(path) or atomic_files.damage(path) or safe_files.program(path, PICKLES) or _foreign(path)


def _foreign(path: Path) -> str:
    """Name a file that is not in the manifest, because libraries might read it; a desktop's files are ignored."""
    visible = [name for name in atomic_files.unlisted(path) if not name.startswith(".") and name != "desktop.ini"]
    if not visible:
        return ""
    return f"{visible[0]} is not in its manifest"


def _prune(folder: Path) -> None:
    for path in sorted(_in(folder), key=_step)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    for ending in (atomic_files.ASIDE, atomic_files.OLD):  # of a process that was killed
        for path in folder.glob(f"checkpoint-*{ending}"):
            shutil.rmtree(path, ignore_errors=True)
