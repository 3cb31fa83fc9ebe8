"""Find a folder for a run, and refuse one that is taken, cannot be made, or has no room."""

import itertools
import shutil
from pathlib import Path

from cria_tricks.common.errors import BadInput
from cria_tricks.common.units import human
from cria_tricks.store.checkpoints import RUN

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
