"""Where lessons show a film: the heading of a lesson -> the set of films that follows it."""

from pathlib import Path

from benchmarks.plot import with_blocks

COSTS, SWITCH = "## 4. What it costs", "## 5. The production switch"
PLACES: dict[str, dict[str, str]] = {
    "the_bill": {COSTS: "plain"},
    "gradient_checkpointing": {SWITCH: "checkpointing"},
    "flash_attention": {SWITCH: "attention"},
    "chunked_loss": {SWITCH: "chunked_loss"},
    "a_full_card": {COSTS: "together", SWITCH: "reserved"},
    "long_rows": {SWITCH: "offload"},
    "weights_elsewhere": {SWITCH: "in_backward"},
}


def with_films(stem: str, text: str) -> str:
    """Put the films of a lesson behind their headings.

    Raises:
        ValueError: if the lesson has no such heading, or several.
    """
    from tools import films  # late, because the films take their order from the ladder, and the ladder needs the pages

    for heading, name in PLACES.get(stem, {}).items():
        line = f"\n{heading}\n"
        if text.count(line) != 1:
            raise ValueError(f"tools/film_places.py: lessons/{stem}.py must have the heading {heading!r} once")
        text = text.replace(line, f"{line}\n{films.element(name, '../assets/films')}\n")
    return text


GUIDE = Path(__file__).resolve().parents[1] / "docs" / "guide" / "film.md"


def fill_guide() -> None:
    """Write the film of the guide into its page."""
    from tools import films  # late, as above

    text = GUIDE.read_text(encoding="utf-8")
    filled = with_blocks(text, {"film": films.element("checkpointing", "../assets/films")})
    if filled != text:
        GUIDE.write_text(filled, encoding="utf-8")
