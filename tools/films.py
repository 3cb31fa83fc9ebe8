"""The films of the home page, one after each step of the ladder: ``python -m tools.films`` (``make films``).

A film takes some ten seconds of dry run, so the files are committed. A test computes one of them again.
"""

import json
from pathlib import Path
from typing import Any

from cria_tricks.common.themes import THEMES
from cria_tricks.hardware import T4
from cria_tricks.recipe import Recipe
from cria_tricks.report import film_answer
from cria_tricks.run import api
from tools import ladder

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "assets" / "films"
TITLE = "One training step of Llama-3.2-1B on a T4, switch by switch"
BEGIN, END = "window.criaFilms=", ";\n"


def made(recipe: Recipe) -> dict[str, Any]:
    """Film one recipe."""
    return api.film(recipe, gpu=T4).data()


def read() -> dict[str, Any]:
    """The committed films, with their title and scale."""
    text = (FOLDER / "home.js").read_text(encoding="utf-8")
    return json.loads(text.removeprefix(BEGIN).removesuffix(END))


def files(films: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The films as a script, and the still picture of the first one, by file name.

    A script, because a page that was opened as a file may not fetch. All films have the same scale, so that a lower
    peak is seen to be lower.
    """
    first, *_ = films.values()
    home = {"title": TITLE, "top": film_answer.scale([*films.values()]), "films": films}
    found = {f"home-{theme}.svg": film_answer.svg(first, theme) for theme in THEMES}
    return {"home.js": BEGIN + json.dumps(home, separators=(",", ":")) + END, **found}


if __name__ == "__main__":
    films = {}
    for label, recipe in ladder.recipes_of_steps().items():
        print(label, flush=True)
        films[label] = made(recipe)
    for name, text in files(films).items():
        (FOLDER / name).write_text(text, encoding="utf-8")
