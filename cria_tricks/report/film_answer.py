"""The answer of ``cria film``: a step as a film, as text, as JSON data, as a still picture (SVG), and as a page.

The data has a few hundred moments with exact bytes, and the largest tensors at each of them. The picture, the page and
the site draw it. The SVG is written by hand, because it must be small and readable alone, in a README too.
"""

import html
import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import AutoConfig

from cria_tricks.bill.bill import CONTEXT
from cria_tricks.common.atomic_files import write_file
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.themes import THEMES
from cria_tricks.common.units import human
from cria_tricks.models.configs import find_config
from cria_tricks.predict import film as recording
from cria_tricks.predict.film import LINES, Film
from cria_tricks.predict.toggles import Target
from cria_tricks.recipe import Recipe

if TYPE_CHECKING:
    from cria_tricks.common.console import Screen

GIB = 2**30
WIDE = 10_000
"""The largest place on the axis of a film."""
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 708, 72, 366
"""The edges of the chart in the picture."""
QUIET = {"light": ("#57606a", "#c0a7ef", "#8c959f"), "dark": ("#9aa4ae", "#6d5694", "#6e7681")}
"""The colours of batch, temporary activations and workspace; ``docs/assets/film.css`` has the same."""
MIDDLE, END, BOLD = ' text-anchor="middle"', ' text-anchor="end"', ' font-weight="600"'


def stacked(data: dict[str, Any]) -> list[list[int]]:
    """The upper edge of each line in the stack, at each kept moment [bytes]; the last one is the sum of all lines."""
    moments = zip(*data["lines"].values(), strict=True)
    return [list(edge) for edge in zip(*map(itertools.accumulate, moments), strict=True)]


def scale(films: Sequence[dict[str, Any]]) -> int:
    """The bytes at the upper edge of a drawing, for films that are compared.

    The card's memory is inside, unless the films stay so far below that one would not see them change.
    """
    most = max(max(data["reserved"] or stacked(data)[-1]) for data in films)
    capacity = films[0]["capacity"]
    return round(1.06 * max(most, capacity) if most > 0.55 * capacity else 1.15 * most)


def colours(theme: str) -> dict[str, str]:
    """The colour of each line."""
    weights, gradients, states, activations, logits = THEMES[theme].parts
    batch, temporary, workspace = QUIET[theme]
    return dict(zip(LINES, (weights, states, batch, gradients, activations, temporary, logits, workspace), strict=True))


def svg(data: dict[str, Any], theme: str = "light") -> str:
    """Draw a film as stacked areas, for a ``light`` or a ``dark`` page."""
    look = THEMES[theme]
    top = scale([data])
    fills = colours(theme)
    edges = dict(zip(LINES, stacked(data), strict=True))
    xs = [LEFT + (RIGHT - LEFT) * x / WIDE for x in data["x"]]

    def height(size: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * size / top

    def area(values: list[int], fill: str) -> str:
        points = [f"{x:.1f} {height(value):.1f}" for x, value in zip(xs, values, strict=True)]
        return f'<path fill="{fill}" d="M{LEFT} {BOTTOM}L{"L".join(points)}L{RIGHT} {BOTTOM}Z"/>'

    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="Inter, system-ui, sans-serif" font-size="13" fill="{look.ink}">',
        f"<title>{html.escape(data['title'])}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{look.page}"/>',
    ]
    step = next((gib for gib in (1, 2, 5, 10, 20, 50) if top / GIB / gib <= 7), 100)
    for gib in range(0, int(top / GIB) + 1, step):
        made.append(f'<path stroke="{look.grid}" d="M{LEFT} {height(gib * GIB):.1f}H{RIGHT}"/>')
        made.append(_text(f"{gib} GiB" if gib else "0", LEFT - 5, height(gib * GIB) + 4, END))
    shown = {line: fills[line] for line in LINES if max(data["lines"][line]) > top / 1000}  # others are too thin to see
    if data["reserved"]:
        made.append(area(data["reserved"], look.grid))
    for line in reversed(shown):  # from the top of the stack, so that each area hides what it does not add
        made.append(area(edges[line], fills[line]))
    for name, first, last, _ in data["parts"]:
        made.append(f'<path stroke="{look.quiet}" stroke-dasharray="2 3" d="M{xs[first]:.1f} {TOP}V{BOTTOM + 6}"/>')
        words = name.replace("optimizer step", "step")
        made.append(_text(words, (xs[first] + xs[last]) / 2, BOTTOM + 20, MIDDLE))
    peak, capacity = edges[LINES[-1]][data["peak"]], data["capacity"]
    made.append(f'<circle cx="{xs[data["peak"]]:.1f}" cy="{height(peak):.1f}" r="4" fill="none" stroke="{look.ink}"/>')
    if capacity <= top:
        line = f"M{LEFT} {height(capacity):.1f}H{RIGHT}"
        made.append(f'<path stroke="{look.page}" stroke-width="3" d="{line}"/>')
        made.append(f'<path stroke="{look.alarm}" stroke-width="2" stroke-dasharray="7 4" d="{line}"/>')
    made.append(_text(f"peak: {human(peak)}", LEFT, TOP - 12, BOLD))
    card = f"{'- - ' if capacity <= top else '↑ '}{data['card']}: {human(capacity)}"
    made.append(_text(card, RIGHT, TOP - 12, f'{BOLD}{END} fill="{look.alarm}"'))
    if data["reserved"]:
        shown["reserved, not used"] = look.grid
    return "\n".join([*made, *_legend(shown), "</svg>", ""])


def _text(words: str, x: float, y: float, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{html.escape(words)}</text>'


def _legend(fills: dict[str, str]) -> list[str]:
    """Name the colours, in two rows above the chart."""
    made = []
    x, y = LEFT, 20
    for name, fill in fills.items():
        width = 32 + 7 * len(name)
        if x + width > RIGHT:
            x, y = LEFT, y + 20
        made.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{fill}"/>')
        made.append(_text(name, x + 16, y))
        x += width
    return made


def page(data: dict[str, Any]) -> str:
    """Write a page with the player of the site. Script, style and data are inside, so it is one file."""
    films = {"title": data["title"], "top": scale([data]), "films": {data["model"]: data}}
    inside = json.dumps(films, separators=(",", ":")).replace("</", "<\\/")  # nothing in a script may end it
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(data["title"])}</title>
<style>
:root {{ font-size: 20px; }}
body {{ font: 0.78rem/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 46rem; padding: 0 1rem; }}
{asset("film.css")}
</style>
</head>
<body>
<main><div class="film"></div></main>
<script>
window.criaFilms = {inside};
{asset("film.js")}
</script>
</body>
</html>
"""


def asset(name: str) -> str:
    """Read the script or the style of the site's player. A wheel has it beside this file, a checkout in ``docs``."""
    beside = Path(__file__).with_name(name)
    found = beside if beside.exists() else Path(__file__).parents[2] / "docs" / "assets" / name
    return found.read_text(encoding="utf-8")


STRIPS = 120
"""The width of a film is cut into so many strips. The lowest and the highest moment of each are kept."""
LARGEST = 8
"""So many entries name the largest tensors of a moment."""
NAMED = 5
"""So many of them are shown on a terminal."""
BLOCK = r"(?<=\.)\d+(?=\.|$)"
"""The number of a block in the name of a module."""


class Family(NamedTuple):
    """What equal tensors of several blocks share; in ``module`` a star stands for the number of the block."""

    line: str
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    module: str
    how: str


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
        """Return the film as JSON data.

        Returns:
            ``title``, the fields of ``about``, and:

            - ``peak``: the number of the kept moment with the most bytes.
            - ``parts``: name, the first kept moment and the last one, and the one of the part's peak.
            - ``x``: the place of each kept moment on the axis, from 0 to 10,000.
            - ``lines``: the bytes of each line of the bill at each kept moment.
            - ``reserved``: what the allocator has reserved at each of them; ``null`` on a CPU.
            - ``tensors``: families of equal tensors: line, bytes, shape, dtype, module, operation.
            - ``largest``: at each kept moment the largest families: number in ``tensors``, and how many tensors.
        """
        film = self.film
        places = kept_moments(film)
        kept = list(places)
        lines = film.bytes()
        number = {moment: place for place, moment in enumerate(kept)}
        parts = []
        for (name, first, end), (peak, _) in zip(film.parts, film.peaks().values(), strict=True):
            parts.append([name, number[first - 1], number[end - 1], number[peak]])
        totals = film.totals()
        numbers: dict[Family, int] = {}  # in the order in which they come
        named = []
        for moment in kept:
            entries = [[numbers.setdefault(family, len(numbers)), count] for family, count in largest(film, moment)]
            named.append(entries)
        return {
            "title": self.verdict(),
            **self.about,
            "peak": number[max(kept, key=totals.__getitem__)],
            "parts": parts,
            "x": list(places.values()),
            "lines": {line: [lines[line][moment] for moment in kept] for line in LINES},
            "reserved": [film.reserved[moment] for moment in kept] if film.reserved else None,
            "tensors": [list(family) for family in numbers],
            "largest": named,
        }

    def to_dict(self) -> dict[str, Any]:
        """Return the peaks, the largest tensors at the highest one, and the data; ``cria film --json`` prints it."""
        at = self.peak_at()
        largest = [{**family._asdict(), "count": count} for family, count in self.largest()]
        peaks = self.peaks()
        return {"peak_bytes": peaks[at], "peak_at": at, "peaks": peaks, "largest": largest, "film": self.data()}

    def largest(self) -> list[tuple[Family, int]]:
        """The largest tensors at the peak; equal tensors of several blocks are one entry with their count."""
        moment, _ = self.film.peaks()[self.peak_at()]
        return largest(self.film, moment)

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
        write_file(file, page(data) if file.suffix == ".html" else svg(data))


def largest(film: Film, moment: int) -> list[tuple[Family, int]]:
    """Return the largest families of tensors at a moment, and how many tensors each has.

    A single tensor keeps the number of its block.
    """
    counts: Counter[Family] = Counter()
    modules: dict[Family, str] = {}
    for shot in film.alive(moment):
        module = re.sub(BLOCK, "*", shot.module, count=1)
        family = Family(shot.line, shot.bytes, shot.shape, shot.dtype, module, shot.how)
        counts[family] += 1
        modules[family] = shot.module
    most = sorted(counts.items(), key=lambda one: -one[0].bytes * one[1])[:LARGEST]
    return [(family._replace(module=modules[family]) if count == 1 else family, count) for family, count in most]


def kept_moments(film: Film) -> dict[int, int]:
    """Choose the moments to keep, and their places on the axis.

    Each allocation and each release takes some width, and more if it is large: half of the width is shared out equally,
    and half by bytes. Otherwise the logits, which are the peak of many steps, would be a line that nobody sees.
    """
    totals = film.totals()
    moved = [abs(after - before) for before, after in itertools.pairwise(totals)]
    widths = [WIDE * (0.5 / len(moved) + 0.5 * size / sum(moved)) for size in moved]
    places = [round(place) for place in itertools.accumulate(widths, initial=0.0)]
    strips: dict[int, list[int]] = defaultdict(list)
    for moment, place in enumerate(places):
        strips[place * STRIPS // WIDE].append(moment)
    kept = {0, *(part.end - 1 for part in film.parts), *(peak for peak, _ in film.peaks().values())}
    for moments in strips.values():
        kept |= {min(moments, key=totals.__getitem__), max(moments, key=totals.__getitem__)}
    return {moment: places[moment] for moment in sorted(kept)}


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
    made = recording.film(plan, config, rows, tokens, expandable=recipe.train.expandable_segments, say=say)
    card = {"card": target.device.name, "capacity": target.device.memory_bytes}
    return FilmAnswer(made, {"model": target.shape.name, **card, "rows": rows, "tokens": tokens})
