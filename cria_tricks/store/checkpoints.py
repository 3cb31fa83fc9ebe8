"""Write and find the checkpoints of a run. Each is whole or not there; the newest two are kept, with a copy if asked.

A checkpoint holds what a run needs to continue as if it had never stopped: the trained weights, the states of the
optimizer, the learning rate schedule and the loss scaler, the random states, the position in the data, and
``run.json``. This file says to which run the checkpoint belongs, and what the run has spent so far (seconds and peak
bytes). The frozen base model is not in it.

Some of its files are pickles, because torch has no other file format for an optimizer's state. They are read with
``weights_only``, which makes tensors and numbers only, and refuses everything else. The trained weights are in
safetensors.
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

from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput, Unwritten
from cria_tricks.common.fields import flat
from cria_tricks.common.version import ARITHMETIC, installed
from cria_tricks.data.sources import OpenedSource
from cria_tricks.recipe import Recipe

KEPT = 2
"""How many checkpoints are kept."""
RUN = "run.json"
FREE = {
    "name",
    "train.save_steps",
    "train.save_minutes",
    "train.time_budget",
    "train.mirror",
    "train.monitor_seconds",
    "train.profile",
    "train.report_to",
    "train.keep_best",
    "train.patience",
}
FREE_GROUPS = ("eval.", "parallel.")
"""Fields, and groups of fields, of a recipe that do not change what is trained, so a resumed run may change them."""
BY_CONTENT = {"data.train", "data.eval", "lora.continue_from"}
"""Fields that name a place. For a resumed run the rows found there must be the same, not the name. The same holds for
``model``, once the hashes of its files are known. The adapter from which a run continued is in its checkpoints."""
LENGTH = {"train.max_steps", "train.epochs"}
"""Fields that a resumed run may raise, to become longer."""


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint.

    Attributes:
        path: its folder.
        step: the number of optimizer steps after which it was written.
        about: what describes its run: ``recipe``, ``rows`` and ``versions``, from :func:`describe`.
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
        folder: the folder that holds them, each as a folder ``checkpoint-STEP``.
        mirror: a second folder for a copy of each; ``None`` for no copies.
        about: what describes the run, from :func:`describe`; written into each checkpoint.
        say: a function that shows a sentence to the user.
        seconds: how long it took to write the last checkpoint, with its copy [s].
    """

    folder: Path
    mirror: Path | None = None
    about: Mapping[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = lambda sentence: None
    seconds: float = 0.0

    @contextlib.contextmanager
    def new(self, step: int, spent: Mapping[str, Any]) -> Iterator[Path]:
        """Yield an empty folder for the files of a new checkpoint, and make it a whole checkpoint at the block's end.

        Args:
            step: the number of optimizer steps so far.
            spent: what the run has spent so far, from ``Meter.spent``.

        Raises:
            Unwritten: if it cannot be written; the earlier checkpoints are still whole. If only the copy in the mirror
                cannot be written, there is a warning instead.
        """
        began = time.perf_counter()
        path = self.folder / f"checkpoint-{step}"
        with atomic_files.new_folder(path) as aside:
            yield aside
            (aside / RUN).write_text(json.dumps({**self.about, "spent": spent}, indent=2) + "\n", encoding="utf-8")
        interrupts.now_saved(f"step {step} is saved in {path}; go on with {interrupts.resumed()}")
        _prune(self.folder)
        if self.mirror:
            try:
                atomic_files.copy_folder(path, self.mirror / path.name)
                _prune(self.mirror)
            except Unwritten as error:
                self.say(f"warning: train.mirror: {error.reason}; the run goes on without this copy")
        self.seconds = time.perf_counter() - began

    def newest(self) -> Checkpoint | None:
        """Find the newest whole checkpoint, in the folder or in the mirror; damaged ones are skipped with a message.

        Returns:
            The checkpoint, or ``None`` if there are no checkpoints at all.

        Raises:
            BadInput: if there are checkpoints, but none is whole.
        """
        damaged: dict[Path, str] = {}
        for path in self._all():
            why = atomic_files.damage(path)
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

    def _all(self) -> list[Path]:
        """List all checkpoints, the newest first; of the same step, the run's own comes before the mirror's copy."""
        found = _in(self.folder)
        if self.mirror:
            found += _in(self.mirror)
        return sorted(found, key=_step, reverse=True)


def describe(recipe: Recipe, found: Mapping[str, OpenedSource], device: str, processes: int = 1) -> dict[str, Any]:
    """Describe a run by all that decides its result.

    Returns:
        ``recipe``, ``rows`` (the hash of each part) and ``versions`` (of libraries, with device and world size).
    """
    return {
        "recipe": recipe.model_dump(mode="json"),
        "rows": {part: source.sha256 for part, source in found.items()},
        "versions": {"device": device, "processes": processes, **installed(ARITHMETIC)},
    }


def refuse_another_run(before: Mapping[str, Any], now: Mapping[str, Any], where: Path) -> None:
    """Refuse to resume a run whose recipe or rows have changed; both runs are described by :func:`describe`.

    Raises:
        BadInput: naming the fields that differ, and ``where`` the earlier run or its checkpoint is.
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
    if "base" in before:  # then Folders.over compares the hashes of the base's files, so their name does not matter
        ignored |= {"model"}
    decisive = [key for key in new if key not in ignored and not key.startswith(FREE_GROUPS)]
    changed = [key for key in decisive if old[key] != new[key]]
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
    """Return the fields that set a run's length if the run became no shorter, else no field."""
    then = old["train.max_steps"]
    now = new["train.max_steps"]
    is_longer = new["train.epochs"] >= old["train.epochs"]
    if then or now:  # train.max_steps is set, so train.epochs has no effect
        is_longer = bool(then) and now >= then
    return LENGTH if is_longer else set()


def other_versions(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Warn of other versions, another device or another world size: the run can continue, but not bit for bit."""
    changed = [
        f"{name} {before['versions'].get(name)} is now {version}"
        for name, version in now["versions"].items()
        if before["versions"].get(name, version) != version
    ]
    if not changed:
        return []
    return [f"{', '.join(changed)}: the resumed run may differ in the last bits"]


def _read(path: Path) -> Checkpoint | None:
    """Read the ``run.json`` of a checkpoint; ``None`` if it is not as we write it."""
    try:
        about = json.loads((path / RUN).read_text(encoding="utf-8"))
        return Checkpoint(path, _step(path), about, about["spent"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _in(folder: Path) -> list[Path]:
    """List the checkpoints in a folder, whole or not, in any order."""
    try:
        return [path for path in folder.iterdir() if re.fullmatch(r"checkpoint-\d+", path.name) and path.is_dir()]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{folder}: cannot be read: {error.strerror}") from None


def _step(path: Path) -> int:
    return int(path.name.rpartition("-")[2])


def _prune(folder: Path) -> None:
    """Delete all checkpoints in a folder but the newest :data:`KEPT`, and what killed processes left half-written."""
    for path in sorted(_in(folder), key=_step)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)
    for ending in (atomic_files.ASIDE, atomic_files.OLD):
        for path in folder.glob(f"checkpoint-*{ending}"):
            shutil.rmtree(path, ignore_errors=True)
