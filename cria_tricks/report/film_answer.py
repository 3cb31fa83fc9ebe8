"""The answer of ``cria film``: a step as a film, as data, as text, and as a file."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from cria_tricks.bill.bill import CONTEXT, WORKSPACES
from cria_tricks.common.atomic_files import new_file, write_file
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.units import human
from cria_tricks.models.configs import find_config
from cria_tricks.predict.film import LINES, film
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe
from cria_tricks.report import film_data, film_picture

if TYPE_CHECKING:
    from cria_tricks.common.console import Screen

SUFFIXES = (".html", ".svg", ".gif")
NAMED = 5
"""So many of the largest tensors are shown on a terminal."""


@dataclass(frozen=True)
class FilmAnswer:
    """A step as a film.

    Attributes:
        data: what :func:`cria_tricks.report.film_data.as_data` makes of it; ``cria film --json`` prints it.
    """

    data: dict[str, Any]

    def peaks(self) -> dict[str, int]:
        """The peak of each part of the step [bytes]."""
        totals = film_picture.totals(self.data)
        return {name: totals[peak] for name, _, _, peak in self.data["parts"]}

    def to_dict(self) -> dict[str, Any]:
        """Return the data, and in words that need no unpacking the peak, the peaks, and the largest tensors then."""
        peaks = self.peaks()
        at = max(peaks, key=lambda part: peaks[part])
        return {"peak_bytes": peaks[at], "peak_at": at, "peaks": peaks, "largest": self.largest(), "film": self.data}

    def largest(self) -> list[dict[str, Any]]:
        """The largest tensors at the peak; equal tensors of several blocks are one entry."""
        names = ("line", "bytes", "shape", "dtype", "module", "how", "count")
        found = []
        for family, count in film_data.alive(self.data, self.data["peak"]):
            found.append(dict(zip(names, (LINES[family[0]], *family[1:6], count), strict=True)))
        return found[: film_data.LARGEST]

    def show(self, screen: "Screen") -> None:
        """Print the verdict, the largest tensors at the peak, and the peak of each part."""
        # rich takes a while to import, and an answer that is not shown does not need it.
        from cria_tricks.common.console import table

        peaks = self.peaks()
        at = max(peaks, key=lambda part: peaks[part])
        screen.wrapped(self.verdict(), "")
        parts = table("part of the step", "peak", numbers=["peak"])
        for part, peak in peaks.items():
            parts.add_row(part, human(peak))
        largest = table("bytes", "tensors", "shape", "made by", "line", numbers=["bytes"])
        for one in self.largest()[:NAMED]:
            shape = " x ".join(f"{n:,}" for n in one["shape"]) or "one number"
            count = f"{one['count']} of {human(one['bytes'])}" if one["count"] > 1 else "1"
            made = f"{one['module']} ({one['how']})".replace("*", "N")
            largest.add_row(human(one["count"] * one["bytes"]), count, f"{shape} {one['dtype']}", made, one["line"])
        screen.wrapped(parts, "", f"The largest tensors at the peak, in the {at}:", "", largest)

    def verdict(self) -> str:
        """Say in two sentences how high the peak is, and what the card has."""
        data = self.data
        peaks = self.peaks()
        at = max(peaks, key=lambda part: peaks[part])
        rows = "row" if data["rows"] == 1 else "rows"
        said = (
            f"The peak of a step is {human(peaks[at])}, in the {at}: {data['model']}, {data['rows']} {rows} of "
            f"{data['tokens']:,} tokens. {data['card']} has {human(data['capacity'])}"
        )
        if data["reserved"] is None:
            return f"{said}."
        reserved = max(film_data.unpacked(data["reserved"], film_picture.count(data)))
        needed = peaks[at] + CONTEXT + WORKSPACES
        if not data["fits"]:
            return f"{said}, which is too little: {human(needed)} with CUDA's own memory."
        return (
            f"{said}, of which PyTorch's allocator reserves up to {human(reserved)}, and CUDA takes {human(CONTEXT)}."
        )

    def write(self, path: str | Path) -> None:
        """Write a page (``.html``), a picture (``.svg``) or an animation (``.gif``).

        Raises:
            BadInput: for another suffix, or a place where nothing can be written; nothing is lost then.
        """
        file = destination(path)
        if file.suffix == ".html":
            write_file(file, film_picture.page(self.data))
        elif file.suffix == ".svg":
            write_file(file, film_picture.svg(self.data, "light", background=True))
        else:
            from cria_tricks.report import film_animation  # matplotlib takes a second to import

            with new_file(file) as aside:
                film_animation.write(self.data, aside)


def destination(path: str | Path) -> Path:
    """Check where a film would be written, before it is made.

    Raises:
        BadInput: for another suffix than :data:`SUFFIXES`, or for a folder.
    """
    file = usable_path("--out", path)
    if file.suffix not in SUFFIXES:
        raise BadInput(f"--out {path}: must end with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")
    if file.is_dir():
        raise BadInput(f"--out {path}: is a folder; name a file in it")
    return file


def answer(target: Target, recipe: Recipe, shorter: float, say: Callable[[str], None]) -> FilmAnswer:
    """Film a step of a recipe.

    Args:
        target: the model and the card.
        recipe: what would run.
        shorter: as for :func:`cria_tricks.predict.film.film`.
        say: is told the name of each part.

    Raises:
        BadInput: for a switch that cannot work, or a model that a dry run cannot run.
    """
    plan = target.resolve(recipe)
    config = find_config(recipe.model)
    rows, tokens = recipe.train.batch_size, recipe.data.max_length
    expandable = recipe.train.expandable_segments
    made = film(
        plan, AutoConfig.for_model(**config), rows, tokens, expandable=expandable, shorter=shorter, say=say
    )  # fmt: skip
    about = {"model": target.shape.name, "card": target.device.name, "rows": rows, "tokens": tokens}
    return FilmAnswer(json.loads(film_data.as_text(film_data.as_data(made, about))))
