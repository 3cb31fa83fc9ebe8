"""Draw a film as an animated GIF, for places that show no SVG and run no script."""

import io
from pathlib import Path
from typing import Any

from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image, ImageDraw, ImageFont

from cria_tricks.common.themes import THEMES
from cria_tricks.predict.film import LINES
from cria_tricks.report import film_picture
from cria_tricks.report.film_data import WIDE, unpacked

FRAMES = 48
MILLISECONDS = 180
"""How long a frame is shown."""
GIB = 2**30
DPI = 100


def write(data: dict[str, Any], path: Path) -> None:
    """Write the animation: a marker moves over the stacked areas, and words name the bytes and what takes most.

    Args:
        data: of the film.
        path: the file.
    """
    count = film_picture.count(data)
    x = unpacked(data["x"], count)
    totals = film_picture.totals(data)
    figure, axes = _still(data, x)
    shown = io.BytesIO()
    figure.savefig(shown, format="png", dpi=DPI)
    still = Image.open(shown).convert("RGB")
    # matplotlib counts pixels from below.
    left, bottom = axes.transData.transform((0, 0))
    right, top = axes.transData.transform((WIDE, axes.get_ylim()[1]))
    font = ImageFont.truetype(font_manager.findfont("DejaVu Sans"), 13)
    frames = []
    for number in range(FRAMES + 1):
        # The highest moment of each step of the marker, so that no peak is passed over.
        low, high = (WIDE * (number + more) / FRAMES for more in (-0.5, 0.5))
        place = max((n for n in range(count) if low <= x[n] <= high), key=totals.__getitem__, default=count - 1)
        frame = still.copy()
        pen = ImageDraw.Draw(frame)
        marker = left + (right - left) * x[place] / WIDE
        pen.line([(marker, still.height - top), (marker, still.height - bottom)], fill=THEMES["light"].ink, width=2)
        pen.text((left, 6), film_picture.caption(data, place), fill=THEMES["light"].ink, font=font)
        frames.append(frame.quantize(64))
    frames[0].save(path, format="GIF", save_all=True, append_images=frames[1:], duration=MILLISECONDS, loop=0)


def _still(data: dict[str, Any], x: list[int]) -> tuple[Figure, Any]:
    """Draw what does not move."""
    look, fills = THEMES["light"], film_picture.colours("light")
    count = film_picture.count(data)
    figure = Figure(figsize=(7.2, 4.0), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)  # needs no screen
    axes = figure.subplots()
    below = [0.0] * count
    for line, top in zip(LINES, film_picture.stacked(data), strict=True):
        edge = [value / GIB for value in top]
        if data["lines"][line]:
            axes.fill_between(x, below, edge, color=fills[line], linewidth=0, label=line)
        below = edge
    if data["reserved"]:
        reserved = [value / GIB for value in unpacked(data["reserved"], count)]
        axes.plot(x, reserved, color=look.quiet, linewidth=1, label="reserved")
    if data["capacity"] < film_picture.scale([data]):
        axes.axhline(data["capacity"] / GIB, color=look.alarm, linestyle="--", label=data["card"])
    for _, first, _, _ in data["parts"][1:]:
        axes.axvline(x[first], color=look.quiet, linestyle=":", linewidth=1)
    ticks = [(x[first] + x[last]) / 2 for _, first, last, _ in data["parts"]]
    names = [name.replace("optimizer step", "step") for name, *_ in data["parts"]]
    axes.set(xlim=(0, WIDE), ylim=(0, film_picture.scale([data]) / GIB), ylabel="GiB")
    axes.set_xticks(ticks, names)
    axes.set_title(" ", fontsize=11)  # room for the words of a frame
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure, axes
