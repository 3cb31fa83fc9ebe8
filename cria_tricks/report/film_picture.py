"""Draw a film: as a still SVG, as one whose marker moves, and as a page that needs no other file.

The SVG is written by hand, because it must be small and readable alone, in a README too.
"""

import html
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cria_tricks.common.themes import THEMES, Theme
from cria_tricks.common.units import human
from cria_tricks.predict.film import LINES
from cria_tricks.report.film_data import WIDE, alive, unpacked

GIB = 2**30
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 56, 708, 72, 366
"""The edges of the chart in the picture."""
QUIET = {"light": ("#57606a", "#c0a7ef", "#8c959f"), "dark": ("#9aa4ae", "#6d5694", "#6e7681")}
"""The colours of batch, temporary activations and workspace; ``docs/assets/film.css`` has the same."""
SECONDS = 14
"""How long the marker takes from the first moment to the last [s]."""
WORDS = 28
"""How often the bytes beside the marker change on its way."""


def count(data: dict[str, Any]) -> int:
    """The number of kept moments."""
    return data["parts"][-1][2] + 1


def stacked(data: dict[str, Any]) -> list[list[int]]:
    """The upper edge of each line in the stack, at each kept moment [bytes]."""
    found: list[list[int]] = []
    below = [0] * count(data)
    for line in LINES:
        values = unpacked(data["lines"][line], count(data))
        below = [before + value for before, value in zip(below, values, strict=True)]
        found.append(below)
    return found


def totals(data: dict[str, Any]) -> list[int]:
    """The bytes of all tensors at each kept moment."""
    return stacked(data)[-1]


def highest(data: dict[str, Any]) -> int:
    """The most that is reserved, or allocated, at any moment [bytes]."""
    return max(*totals(data), *unpacked(data["reserved"] or 0, count(data)))


def scale(films: Sequence[dict[str, Any]]) -> int:
    """The bytes at the upper edge of a drawing, for films that are compared.

    The card's memory is inside, unless the films stay so far below that one would not see them change.
    """
    most = max(map(highest, films))
    capacity = films[0]["capacity"]
    return round(1.06 * max(most, capacity) if most > 0.55 * capacity else 1.15 * most)


def colours(theme: str) -> dict[str, str]:
    """The colour of each line."""
    weights, gradients, states, activations, logits = THEMES[theme].parts
    batch, temporary, workspace = QUIET[theme]
    return dict(zip(LINES, (weights, states, batch, gradients, activations, temporary, logits, workspace), strict=True))


def says(data: dict[str, Any]) -> str:
    """What the picture shows, for readers who cannot see it."""
    total = totals(data)
    part = next(name for name, _, last, _ in data["parts"] if data["peak"] <= last)
    return (
        f"Memory during an optimizer step of {data['model']}, {data['rows']} x {data['tokens']:,} tokens: the peak is "
        f"{human(total[data['peak']])}, in the {part}; {data['card']} has {human(data['capacity'])}"
    )


def caption(data: dict[str, Any], place: int) -> str:
    """Say how many bytes there are at a kept moment, and which tensors take most."""
    family, many = alive(data, place)[0]
    module = family[4].replace("*", "N")
    largest = f"{many} of {module} ({family[5]})" if many > 1 else f"{module} ({family[5]})"
    return f"{human(totals(data)[place])}; most: {largest}, {human(many * family[1])}"


def svg(data: dict[str, Any], theme: str, *, top: int = 0, background: bool = False, moving: bool = False) -> str:
    """Draw a film as stacked areas.

    Args:
        data: of the film.
        theme: ``light`` or ``dark``.
        top: the bytes at the upper edge; from :func:`scale`, when left out.
        background: whether to fill the background; without, it is for a page of this theme.
        moving: whether a marker moves over it, and says the bytes.
    """
    return "\n".join([*_Drawing(data, theme, top or scale([data])).lines(background, moving), "</svg>", ""])


class _Drawing:
    """The parts of a picture."""

    def __init__(self, data: dict[str, Any], theme: str, top: int):
        self.data, self.theme, self.top = data, theme, top
        self.look: Theme = THEMES[theme]
        self.x = [LEFT + (RIGHT - LEFT) * x / WIDE for x in unpacked(data["x"], count(data))]
        self.stack = stacked(data)
        self.total = self.stack[-1]

    def y(self, size: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * size / self.top

    def edge(self, values: list[int]) -> str:
        """A path along values, without points on a straight line between their neighbours."""
        points = [(f"{x:.1f}", f"{self.y(value):.1f}") for x, value in zip(self.x, values, strict=True)]
        kept: list[tuple[str, str]] = []
        for place, point in enumerate(points):
            level = 0 < place < len(points) - 1 and points[place - 1][1] == point[1] == points[place + 1][1]
            if not level and (not kept or kept[-1] != point):
                kept.append(point)
        return "M" + "L".join(" ".join(point) for point in kept)

    def area(self, values: list[int], fill: str) -> str:
        return f'<path fill="{fill}" d="{self.edge(values)}L{self.x[-1]:.1f} {BOTTOM}L{self.x[0]:.1f} {BOTTOM}Z"/>'

    def text(self, words: str, x: float, y: float, more: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{html.escape(words)}</text>'

    def lines(self, background: bool, moving: bool) -> list[str]:
        data, look = self.data, self.look
        made = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'font-family="Inter, system-ui, sans-serif" font-size="13" fill="{look.ink}">',
            f"<title>{html.escape(says(data))}</title>",
        ]
        if background:
            made.append(
                f'<rect width="{WIDTH}" height="{HEIGHT}" fill="{"#ffffff" if self.theme == "light" else "#0d1117"}"/>'
            )
        made += [*self.legend(), *self.scale()]
        if data["reserved"]:
            reserved = unpacked(data["reserved"], count(data))
            made.append(
                f'<pattern id="kept" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
                f'<path d="M0 0V6" stroke="{look.quiet}" stroke-width="1.5" opacity=".6"/></pattern>'
            )
            made.append(self.area(reserved, "url(#kept)"))
        fills = colours(self.theme)
        for line, values in reversed(list(zip(LINES, self.stack, strict=True))):
            if data["lines"][line]:
                made.append(self.area(values, fills[line]))
        if data["reserved"]:
            made.append(f'<path fill="none" stroke="{look.quiet}" d="{self.edge(reserved)}"/>')
        return [*made, *self.parts(), *self.card(), *(self.marker() if moving else self.peak())]

    def legend(self) -> list[str]:
        fills = colours(self.theme)
        names = [line for line in LINES if self.data["lines"][line]]
        made = []
        x, y = LEFT, 20
        for name in [*names, *(["reserved, not used"] if self.data["reserved"] else [])]:
            width = 24 + 7 * len(name)
            if x + width > RIGHT:
                x, y = LEFT, y + 20
            fill = fills.get(name, "url(#kept)")
            made.append(f'<rect x="{x}" y="{y - 10}" width="11" height="11" fill="{fill}"/>')
            made.append(self.text(name, x + 16, y))
            x += width + 8
        return made

    def scale(self) -> list[str]:
        step = next((gib for gib in (1, 2, 5, 10, 20, 50) if self.top / GIB / gib <= 7), 100)
        made = []
        for gib in range(0, int(self.top / GIB) + 1, step):
            y = self.y(gib * GIB)
            made.append(f'<path stroke="{self.look.grid}" d="M{LEFT} {y:.1f}H{RIGHT}"/>')
            made.append(self.text(f"{gib} GiB" if gib else "0", LEFT - 5, y + 4, ' text-anchor="end"'))
        return made

    def parts(self) -> list[str]:
        made = []
        for place, (name, first, last, _) in enumerate(self.data["parts"]):
            start = self.x[first] if place else LEFT
            if place:
                made.append(
                    f'<path stroke="{self.look.quiet}" stroke-dasharray="2 3" d="M{start:.1f} {TOP}V{BOTTOM + 6}"/>'
                )
            words = name if self.x[last] - start > 100 else name.replace("optimizer step", "step")
            made.append(self.text(words, (start + self.x[last]) / 2, BOTTOM + 20, ' text-anchor="middle"'))
        return made

    def card(self) -> list[str]:
        y = self.y(self.data["capacity"])
        words = f"{self.data['card']}: {human(self.data['capacity'])}"
        if self.data["capacity"] > self.top:
            more = f' text-anchor="end" font-weight="600" fill="{self.look.alarm}"'
            return [self.text(f"↑ {words}", RIGHT - 2, TOP - 4, more)]
        width = 7.4 * len(words)
        # The peak has its name in its own half.
        left, x, anchor = (LEFT, LEFT + 2, "start") if self.is_late else (RIGHT - width - 4, RIGHT - 2, "end")
        return [
            f'<rect x="{left:.0f}" y="{y - 20:.1f}" width="{width + 4:.0f}" height="18" fill="{self.look.page}"/>',
            f'<path stroke="{self.look.alarm}" stroke-width="2" stroke-dasharray="7 4" d="M{LEFT} {y:.1f}H{RIGHT}"/>',
            self.text(words, x, y - 6, f' text-anchor="{anchor}" font-weight="600" fill="{self.look.alarm}"'),
        ]

    @property
    def is_late(self) -> bool:
        """Whether the peak is in the right half of the picture."""
        return self.x[self.data["peak"]] > (LEFT + RIGHT) / 2

    def peak(self) -> list[str]:
        place = self.data["peak"]
        x, y = self.x[place], self.y(self.total[place])
        side, anchor = (-8, "end") if self.is_late else (8, "start")
        words = f"peak {human(self.total[place])}"
        return [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="none" stroke="{self.look.ink}" stroke-width="1.5"/>',
            self.text(words, x + side, max(y - 7, 58), f' text-anchor="{anchor}" font-weight="600"'),
        ]

    def marker(self) -> list[str]:
        """A line that moves from the first moment to the last, and words that say the bytes on its way."""
        style = (
            f"@keyframes go{{to{{transform:translateX({RIGHT - LEFT}px)}}}}"
            f"@keyframes say{{0%{{opacity:1}}{100 / WORDS:.3f}%,100%{{opacity:0}}}}"
            f".go{{animation:go {SECONDS}s linear infinite}}"
            f".say{{opacity:0;animation:say {SECONDS}s steps(1) infinite}}"
            "@media (prefers-reduced-motion:reduce){.go,.say{animation:none}.say{opacity:0}.say.peak{opacity:1}}"
        )
        made = [
            f"<style>{style}</style>",
            f'<path class="go" stroke="{self.look.ink}" stroke-width="1.5" d="M{LEFT} {TOP - 4}V{BOTTOM}"/>',
        ]
        for number in range(WORDS):
            low, high = (LEFT + (RIGHT - LEFT) * (number + more) / WORDS for more in (0, 1))
            inside = [place for place, x in enumerate(self.x) if low <= x <= high]
            place = max(inside, key=self.total.__getitem__) if inside else 0
            words = caption(self.data, place)
            about = f' class="say{" peak" if place == self.data["peak"] else ""}" font-weight="600"'
            delay = f' style="animation-delay:{SECONDS * number / WORDS:.2f}s"'
            made.append(self.text(words, LEFT, 60, about + delay))
        return made


def page(data: dict[str, Any]) -> str:
    """Write a page with the same element as on the site. Script, style and data are inside, so it is one file."""
    about = {"films": {"film": data["model"]}, "top": scale([data]), "title": says(data)}
    picture = svg(data, "light", background=True)

    def inside(value: Any) -> str:  # nothing in a script may end it
        return json.dumps(value, separators=(",", ":")).replace("</", "<\\/")

    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(says(data))}</title>
<style>
:root {{ font-size: 20px; }}
body {{ font: 0.78rem/1.5 system-ui, sans-serif; margin: 1rem auto; max-width: 46rem; padding: 0 1rem; }}
body {{ background: #fff; color: #1f2328; }}
body[data-md-color-scheme="slate"] {{ background: #0d1117; color: #e6edf3; --md-default-bg-color: #0d1117; }}
body[data-md-color-scheme="slate"] {{ --md-default-fg-color: #e6edf3; --md-accent-fg-color: #79b8ff; }}
{asset("film.css")}
</style>
</head>
<body>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)");
const mode = () => document.body.setAttribute("data-md-color-scheme", dark.matches ? "slate" : "default");
dark.addEventListener("change", mode);
mode();
window.criaFilmSets = {{ film: {inside(about)} }};
window.criaFilms = {{ film: {inside(data)} }};
</script>
<main><div class="film" data-films="film">{picture}</div></main>
<script>
{asset("film.js")}
</script>
</body>
</html>
"""


def asset(name: str) -> str:
    """Read the script or the style of the site's element. A wheel has it beside this file, a checkout in ``docs``."""
    beside = Path(__file__).with_name(name)
    found = beside if beside.exists() else Path(__file__).parents[2] / "docs" / "assets" / name
    return found.read_text(encoding="utf-8")
