"""Find a folder for a run, and manage it and its mirror; find the checkpoint from which to resume.

A folder is refused that is another run's, cannot be made, or has no room.
"""

import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput, Unwritten, usable_path
from cria_tricks.common.units import human
from cria_tricks.models import Weights, identity
from cria_tricks.recipe import Recipe
from cria_tricks.store.checkpoints import KEPT, RUN, Checkpoint, Checkpoints, other_versions, refuse_another_run

BEST = "best"
"""What ``train.keep_best`` keeps. A run that has not ended has it, too, so it is none of the results."""
RECORDS = ("monitor*.jsonl", "profile", "tensorboard", "trackio")
"""What the monitor, the profiler and the trackers write during a run; a resumed run appends to it."""


class Folders:
    """The folders in which one run writes.

    Args:
        recipe: the recipe; it names the mirror, and the folder if ``out`` is left out.
        out: the folder; ``runs/NAME`` (or the next free ``runs/NAME-2``, ...) when left out.
        resume: whether to continue the run that is in the folder.
        about: what describes the run, from :func:`cria_tricks.store.checkpoints.describe`.
        say: a function that shows a sentence to the user.

    Attributes:
        folder: the run's folder.
        mirror: the second folder (``train.mirror``), or ``None``.
        checkpoints: the run's checkpoints, in both folders.
        start: the checkpoint from which a resumed run continues, or ``None``.

    Raises:
        BadInput: if a folder holds another run, or cannot be a folder.
    """

    def __init__(
        self,
        recipe: Recipe,
        out: str | Path | None,
        resume: bool,
        about: dict[str, Any],
        say: Callable[[str], None],
    ):
        self.recipe = recipe
        self.resume = resume
        self.about = about
        self.say = say
        if out:
            self.folder = usable_path("--out", out)
        else:
            self.folder = numbered(Path("runs") / recipe.name, resume)
        self.mirror: Path | None = None
        mirrored: Path | None = None
        if recipe.train.mirror:
            self.mirror = usable_path("train.mirror", recipe.train.mirror)
            mirrored = self.mirror / "checkpoints"
            refuse_as_mirror(self.mirror, self.folder)
        for option, place in self._places().items():
            self._refuse_another(option, place)
        self.checkpoints = Checkpoints(self.folder / "checkpoints", mirrored, about, say)
        self.start = self._find_start() if resume else None

    @property
    def _first_base(self) -> Mapping[str, Any]:
        """The identity of the base model with which a resumed run began; empty if it was not recorded."""
        if not self.start:
            return {}
        return self.start.about.get("base", {})

    @property
    def revision(self) -> str:
        """The hub commit of the base model with which a resumed run began; empty for any other base or run."""
        return self._first_base.get("revision") or ""

    def record_base(self, weights: Weights, *, other_base: bool = False) -> Mapping[str, Any]:
        """Record the base model of this run, and refuse to resume with another one.

        Args:
            weights: the base model.
            other_base: whether a resumed run may continue with another base model.

        Returns:
            The identity of the base model with which the run began, if it was another one; else an empty mapping.

        Raises:
            BadInput: if it is another base model and that is not allowed, or if it has another tokenizer.
        """
        before, base = self._first_base, identity.of(weights)
        self.about["base"] = base
        if not self.start or not before:
            return {}
        where = f"--resume: {self.start.path}"
        differ = identity.other(before, base, "tokenizer")
        if differ:  # then the same rows would become other tokens
            raise BadInput(f"{where}: the base's tokenizer is another: {differ}; put it back")
        moved = "--set model=DIR"
        for warning in identity.compare(before, base, where, allowed=other_base, moved=moved, weights=weights):
            self.say(f"warning: {warning}")
        changed = any(identity.other(before, base, part) for part in ("weights", "config"))
        return before if changed else {}

    @contextlib.contextmanager
    def claimed(self, trainable: int, bits: int) -> Iterator[None]:
        """Make the folders, and be the only process that writes into the run's folder until the block's end.

        Args:
            trainable: the number of trained parameters.
            bits: the bits of one element of the optimizer's two states.

        Raises:
            BadInput: if there is no room on the disk, or another process writes there.
        """
        # Bytes for each trained parameter: 4 for the fp32 weight, and the optimizer's two states.
        checkpoint = trainable * (4 + 2 * bits // 8)
        # A new checkpoint is written before the oldest is deleted. The result is fp32 weights, and 32 MiB for the rest,
        # such as the tokenizer.
        needed = (KEPT + 1) * checkpoint + trainable * 4 + 32 * 2**20
        if self.recipe.train.keep_best:  # a new one is written before the old one is deleted
            needed += 2 * (trainable * 4 + 32 * 2**20)
        for option, place in self._places().items():
            make_room(option, place, needed)
        with atomic_files.only_writer(self.folder):
            if not self.resume:
                self._refuse_another("--out", self.folder)  # since the first check another process may have begun here
            saved = f"no step is saved in {self.folder} yet; begin again"
            if self.start:
                saved = f"{self.start.path} is whole; go on"
                if self.mirror and not _records(self.folder):
                    self._copy_records(self.mirror, self.folder)  # a new machine, which has only the mirror of the run
                self._bring_best_back()
            interrupts.now_saved(f"{saved} with {interrupts.resumed()}")
            for place in self._places().values():
                atomic_files.write_file(place / "recipe.toml", self.recipe.to_toml())
                atomic_files.write_file(place / RUN, json.dumps(self.about, indent=2) + "\n")
            yield
            interrupts.now_saved(f"the run is finished, and its results are in {self.folder}")

    def monitor(self, rank: int) -> Path:
        """Return the file into which the monitor of a process writes its samples."""
        return self.folder / (f"monitor-{rank}.jsonl" if rank else "monitor.jsonl")

    def mirror_results(self) -> None:
        """Copy the results into the mirror, where the checkpoints have been copied; if it fails, only warn."""
        if not self.mirror:
            return
        try:
            for name in RESULTS:
                if (self.folder / name).is_dir():
                    atomic_files.copy_folder(self.folder / name, self.mirror / name)
                elif (self.folder / name).exists():
                    atomic_files.write_file(self.mirror / name, (self.folder / name).read_bytes())
            self._copy_records(self.folder, self.mirror)
        except Unwritten as error:
            self.say(f"warning: train.mirror: {error.reason}; the results are in {self.folder} alone")

    def mirror_best(self) -> None:
        """Copy the folder of the lowest evaluation loss into the mirror; if it fails, only warn."""
        if not self.mirror:
            return
        try:
            atomic_files.copy_folder(self.folder / BEST, self.mirror / BEST)
        except Unwritten as error:
            self.say(f"warning: train.mirror: {error.reason}; the run goes on without this copy of {BEST}")

    def _bring_best_back(self) -> None:
        """Copy that folder back on a new machine, which has only the mirror of the run; if it fails, only warn."""
        if not self.mirror or (self.folder / BEST).exists() or not (self.mirror / BEST).is_dir():
            return
        try:
            atomic_files.copy_folder(self.mirror / BEST, self.folder / BEST)
        except Unwritten as error:
            self.say(f"warning: train.mirror: {error.reason}; {BEST} is not taken over")

    def _copy_records(self, folder: Path, to: Path) -> None:
        """Copy the files of :data:`RECORDS`; they have no manifest, so the copy is not checked."""
        for path in _records(folder):
            with atomic_files.unwritten_in_one_line(to / path.name):
                if path.is_dir():
                    shutil.copytree(path, to / path.name, dirs_exist_ok=True)
                elif path.exists():
                    shutil.copyfile(path, to / path.name)

    def _places(self) -> dict[str, Path]:
        """Return the folders of the run, by the name of the option that sets each."""
        if self.mirror:
            return {"--out": self.folder, "train.mirror": self.mirror}
        return {"--out": self.folder}

    def _refuse_another(self, option: str, place: Path) -> None:
        """Refuse a folder that holds another run; a resumed run may use only its own."""
        there = refuse_taken(option, place, self.resume)
        if not there:
            return
        try:
            before = json.loads((place / RUN).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            raise BadInput(
                f"--resume: {place} holds {there} but no {RUN} that says of what run; name a new folder"
            ) from None
        refuse_another_run(before, self.about, place)

    def _find_start(self) -> Checkpoint | None:
        """Find the checkpoint from which to resume; ``None`` if the run had not saved any step yet."""
        start = self.checkpoints.newest()
        if start:
            refuse_another_run(start.about, self.about, start.path)
            for sentence in other_versions(start.about, self.about):
                self.say(f"warning: {sentence}")
            self.say(f"going on from {start.path}")
            return start
        for place, name in itertools.product(self._places().values(), RESULTS):
            if (place / name).exists():
                raise BadInput(f"--resume: {place} holds {name} but no checkpoint to go on from; name a new folder")
        self.say(f"no checkpoint in {self.folder} yet: starting from the beginning")
        return None


def _records(folder: Path) -> list[Path]:
    """List the files and folders in a folder that match :data:`RECORDS`."""
    found: list[Path] = []
    for pattern in RECORDS:
        found += folder.glob(pattern)
    return found


RESULTS = ("adapter", "model", "report.json", "report.md", "report.png")
"""What a finished run leaves in its folder, beside its recipe, ``run.json`` and its checkpoints."""


def refuse_as_mirror(mirror: Path, folder: Path) -> None:
    """Refuse a mirror that is the run's own folder, or whose parent folder does not exist."""
    if mirror.resolve() == folder.resolve():
        raise BadInput(f"train.mirror={mirror}: is the run's own folder; name a second one")
    if not mirror.absolute().parent.is_dir():
        # If Google Drive is not mounted on Colab, this folder would be made on the machine's own disk, and be lost with
        # the machine.
        raise BadInput(f"train.mirror={mirror}: there is no folder {mirror.parent}; is the drive mounted?")


def numbered(first: Path, resume: bool) -> Path:
    """Return the first free folder of NAME, NAME-2, ...; to resume, the last folder that is taken."""
    free = first
    last_taken = first  # if no folder is taken yet, a resumed run starts in the first one
    for number in itertools.count(2):
        if not taken(free):
            break
        last_taken = free
        free = first.with_name(f"{first.name}-{number}")
    return last_taken if resume else free


def taken(folder: Path) -> str:
    """Name the first file of a run that is already in a folder; empty if there is none."""
    names = ("checkpoints", *RESULTS, "recipe.toml", RUN)
    return next((name for name in names if (folder / name).exists()), "")


def refuse_taken(option: str, place: Path, resume: bool) -> str:
    """Refuse a path that is a file, and a folder that holds a run unless that run is to be resumed.

    Returns:
        The name of the first file of a run that is there; empty if there is none.
    """
    if place.exists() and not place.is_dir():
        raise BadInput(f"{option} {place}: is a file; name a folder")
    there = taken(place)
    if there and not resume:
        raise BadInput(f"{option} {place}: holds another run ({there}); name a new folder, or go on with it: --resume")
    return there


def make_room(option: str, folder: Path, needed: int) -> None:
    """Make a folder, and refuse it if its disk cannot hold what the run will write [bytes].

    Checkpoints that are there already count as free, because they are replaced.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
        there = sum(path.stat().st_size for path in (folder / "checkpoints").rglob("*") if path.is_file())
    except OSError as error:
        raise BadInput(f"{option} {folder}: cannot be made: {error.strerror}; name another folder") from None
    if free + there < needed:
        raise BadInput(
            f"{option} {folder}: {human(free)} are free, and the checkpoints and the result take about "
            f"{human(needed)}; make room, or name a folder on another disk"
        )
