"""Read the folder of a run as ``cria train`` and ``cria eval`` left it, finished or not."""

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.fields import flat
from cria_tricks.common.names import repeated
from cria_tricks.store.checkpoints import RUN

REPORT = "report.json"
EVALUATION = Path("eval") / "eval.json"
"""Where ``cria eval`` writes beside an adapter, seen from the run's folder."""


@dataclass(frozen=True)
class RunFolder:
    """A run, as its folder describes it.

    Attributes:
        name: what tables call it.
        folder: its folder.
        recipe: the fields of its recipe, by dotted name.
        report: the content of ``report.json``; ``None`` if the run did not finish.
        evaluation: the content of ``eval/eval.json``; ``None`` if the adapter was not evaluated.
    """

    name: str
    folder: Path
    recipe: Mapping[str, Any]
    report: Mapping[str, Any] | None
    evaluation: Mapping[str, Any] | None

    @property
    def history(self) -> Sequence[Mapping[str, Any]]:
        """The training steps and evaluations of a finished run; empty for any other."""
        return self.report["history"] if self.report else ()


def read_all(folders: Sequence[str | Path]) -> list[RunFolder]:
    """Read the folders of at least two runs.

    Raises:
        BadInput: if a folder is no run, is named twice, or a file in it is broken.
    """
    if len(folders) < 2:
        raise BadInput("name the folders of at least two runs, for instance runs/smoke runs/smoke-2")
    places = [usable_path("the run", folder) for folder in folders]
    twice = repeated([str(place.absolute()) for place in places])
    if twice:
        raise BadInput(f"{twice}: is named twice; name each run once")
    short = [place.absolute().name for place in places]
    runs = []
    for place, name in zip(places, short, strict=True):
        # Runs of the same name in different folders are told apart by their whole path.
        runs.append(_read(place, str(place) if short.count(name) > 1 else name))
    return runs


def _read(folder: Path, name: str) -> RunFolder:
    if not folder.is_dir():
        raise BadInput(f"{folder}: there is no such folder; name the folder of a run, for instance runs/smoke")
    if not (folder / RUN).is_file() and not (folder / REPORT).is_file():
        above = folder.parent
        hint = f"did you mean {above}?" if (above / RUN).is_file() else "name a folder that cria train wrote"
        raise BadInput(f"{folder}: holds neither {RUN} nor {REPORT}, so it is no run; {hint}")
    report = _json(folder / REPORT, ("history", "data"))
    try:
        recipe = tomllib.loads((folder / "recipe.toml").read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{folder / 'recipe.toml'}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # no TOML, or not UTF-8
        raise BadInput(f"{folder / 'recipe.toml'}: not valid TOML: {error}") from None
    evaluation = _json(folder / EVALUATION, ("data", "rows", "systems"))
    return RunFolder(name, folder, flat(recipe), report, evaluation)


def _json(file: Path, needed: Sequence[str]) -> dict[str, Any] | None:
    """Read a JSON object that has some keys; ``None`` if the file is not there."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{file}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadInput(f"{file}: must hold a JSON object, not {type(found).__name__}")
    lacking = [key for key in needed if key not in found]
    if lacking:
        raise BadInput(f"{file}: lacks {', '.join(lacking)}, so another version or program wrote it; write it again")
    return found
