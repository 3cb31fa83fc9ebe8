"""Draw a film: as a still picture (SVG), and as a page that needs no other file.

The SVG is written by hand, because it must be small and readable alone, in a README too.
"""

import html
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cria_tricks.common.themes import THEMES
from cria_tricks.common.units import human
from cria_tricks.predict.film import LINES

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
