"""The picture that a link to a page shows in chats and feeds: 1200 x 630, drawn when the site is built."""

import hashlib
import io
import shutil
import textwrap
from pathlib import Path

from tools import notebooks

KEPT = notebooks.ROOT / "build" / "social"
"""Where pictures wait for the next build, by what they were drawn of."""
FOLDER = "assets/social"
WIDTH, HEIGHT = 1200, 630
BARS = (1.0, 0.62, 0.4, 0.25, 0.15, 0.1)
"""The mark of the course: a peak that gets smaller with each technique."""


def place(page: str) -> str:
    """Where the picture of a page is on the site."""
    return f"{FOLDER}/{page.removesuffix('.md').replace('/', '-')}.png"


def draw(path: Path, title: str, section: str) -> None:
    """Draw a page's picture, or take it from the last build."""
    source = Path(__file__).read_text(encoding="utf-8")
    kept = KEPT / f"{hashlib.sha256(f'{source}|{title}|{section}'.encode()).hexdigest()[:16]}.png"
    if not kept.exists():
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(_png(title, section))
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(kept, path)


def _png(title: str, section: str) -> bytes:
    from matplotlib.figure import Figure
    from PIL import Image

    figure = Figure(figsize=(WIDTH / 100, HEIGHT / 100), dpi=100, facecolor="#0b3a63")
    for number, part in enumerate(BARS):
        box = (0.06 + 0.07 * number, 0.0), 0.055, 0.3 * part
        figure.add_artist(_rectangle(*box, color="#f0883e" if number + 1 == len(BARS) else "#58a6ff"))
    lines = textwrap.wrap(title, 28)
    size = 50 if len(lines) <= 3 else 40
    lines = lines if len(lines) <= 3 else textwrap.wrap(title, 35)[:4]
    figure.text(0.06, 0.9, section, color="#a9d1ff", fontsize=24, va="top")
    figure.text(0.06, 0.8, "\n".join(lines), color="white", fontsize=size, weight="bold", va="top", linespacing=1.15)
    figure.text(0.94, 0.07, "cria_tricks", color="white", fontsize=28, weight="bold", ha="right")
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", facecolor=figure.get_facecolor())
    # 32 colours are enough for flat shapes and smooth letters, and make the file a third as large.
    Image.open(drawn).convert("RGB").quantize(32).save(small, format="png", optimize=True)
    return small.getvalue()


def _rectangle(corner: tuple[float, float], width: float, height: float, color: str):
    from matplotlib.patches import Rectangle

    return Rectangle(corner, width, height, color=color)
