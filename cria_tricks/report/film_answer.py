"""The answer of ``cria film``: a step as a film, as text, as data, and as a file."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig

from cria_tricks.bill.bill import CONTEXT
from cria_tricks.common.atomic_files import write_file
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.units import human
from cria_tricks.models.configs import find_config
from cria_tricks.predict.film import Film, film
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe
from cria_tricks.report import film_data, film_picture

if TYPE_CHECKING:
    from cria_tricks.common.console import Screen

NAMED = 5
"""So many of the largest tensors are shown on a terminal."""


@dataclass(frozen=True)
class FilmAnswer:
    """A step as a film.

    Attributes:
        film: every tensor, moment by moment.
        about: what is filmed: ``model``, ``card``, its ``capacity`` [bytes], ``rows`` and ``tokens``.
    """

    film: Film
    about: dict[str, Any]

    def peaks(self) -> dict[str, int]:
        """The peak of each part of the step [bytes]."""
        return {part: peak for part, (_, peak) in self.film.peaks().items()}

    def peak_at(self) -> str:
        """The part of the step with the highest peak."""
        peaks = self.peaks()
        return max(peaks, key=lambda part: peaks[part])

    def data(self) -> dict[str, Any]:
        """The film as :func:`cria_tricks.report.film_data.as_data` writes it."""
        return film_data.as_data(self.film, {"title": self.verdict(), **self.about})

    def to_dict(self) -> dict[str, Any]:
        """Return the peaks, the largest tensors at the highest one, and the data; ``cria film --json`` prints it."""
        at = self.peak_at()
        largest = [{**family._asdict(), "count": count} for family, count in self.largest()]
        peaks = self.peaks()
        return {"peak_bytes": peaks[at], "peak_at": at, "peaks": peaks, "largest": largest, "film": self.data()}

    def largest(self) -> list[tuple[film_data.Family, int]]:
        """The largest tensors at the peak; equal tensors of several blocks are one entry with their count."""
        moment, _ = self.film.peaks()[self.peak_at()]
        return film_data.largest(self.film, moment)

    def show(self, screen: "Screen") -> None:
        """Print the verdict, the peak of each part, and the largest tensors at the peak."""
        # rich takes a while to import, and an answer that is not shown does not need it.
        from cria_tricks.common.console import table

        parts = table("part of the step", "peak", numbers=["peak"])
        for part, peak in self.peaks().items():
            parts.add_row(part, human(peak))
        largest = table("bytes", "tensors", "shape", "made by", "line", numbers=["bytes"])
        for one, count in self.largest()[:NAMED]:
            shape = " x ".join(f"{n:,}" for n in one.shape) or "one number"
            tensors = f"{count} of {human(one.bytes)}" if count > 1 else "1"
            made = f"{one.module} ({one.how})".replace("*", "N")
            largest.add_row(human(count * one.bytes), tensors, f"{shape} {one.dtype}", made, one.line)
        head = f"The largest tensors at the peak, in the {self.peak_at()}:"
        screen.wrapped(self.verdict(), "", parts, "", head, "", largest)

    def verdict(self) -> str:
        """Say in two sentences how high the peak is, and what the card has."""
        about, at = self.about, self.peak_at()
        peak = self.peaks()[at]
        said = (
            f"The peak of a step is {human(peak)}, in the {at}: {about['model']}, {about['rows']} x "
            f"{about['tokens']:,} tokens. {about['card']} has {human(about['capacity'])}"
        )
        if not self.film.reserved:
            return f"{said}."
        return f"{said}; PyTorch would reserve {human(max(self.film.reserved))}, and CUDA takes {human(CONTEXT)}."

    def write(self, path: str | Path) -> None:
        """Write a page (``.html``) or a picture (``.svg``).

        Raises:
            BadInput: for another suffix, or a place where nothing can be written; nothing is lost then.
        """
        file = destination(path)
        data = self.data()
        write_file(file, film_picture.page(data) if file.suffix == ".html" else film_picture.svg(data))


def destination(path: str | Path) -> Path:
    """Check where a film would be written, before it is made.

    Raises:
        BadInput: for a suffix other than ``.html`` and ``.svg``, or for a folder.
    """
    file = usable_path("--out", path)
    if file.suffix not in (".html", ".svg"):
        raise BadInput(f"--out {path}: must end with .html or .svg")
    if file.is_dir():
        raise BadInput(f"--out {path}: is a folder; name a file in it")
    return file


def answer(target: Target, recipe: Recipe, say: Callable[[str], None]) -> FilmAnswer:
    """Film a step of a recipe.

    Args:
        target: the model and the card.
        recipe: what would run.
        say: is told the name of each part.

    Raises:
        BadInput: for a switch that cannot work, or a model that a dry run cannot run.
    """
    plan = target.resolve(recipe)
    config = AutoConfig.for_model(**find_config(recipe.model))
    rows, tokens = recipe.train.batch_size, recipe.data.max_length
    made = film(plan, config, rows, tokens, expandable=recipe.train.expandable_segments, say=say)
    card = {"card": target.device.name, "capacity": target.device.memory_bytes}
    return FilmAnswer(made, {"model": target.shape.name, **card, "rows": rows, "tokens": tokens})
