"""The films of the site, and the sets in which pages show them: ``python -m tools.films`` (``make films``).

A film takes seconds to a minute of dry run, so the files are committed. A test computes two of them again.
"""

import html
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from cria_tricks import recipes
from cria_tricks.bench import style
from cria_tricks.common.themes import THEMES
from cria_tricks.hardware import T4
from cria_tricks.predict import toggles
from cria_tricks.recipe import Recipe, with_settings
from cria_tricks.report import film_data, film_picture
from cria_tricks.run import api
from tools import ladder

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "assets" / "films"
NAMES = ("plain", "lora", "attention", "checkpointing", "chunked_loss", "half", "all")
"""The films of the ladder's steps, in the order of ``tools/ladder.py``: each adds a switch to those before it."""
MOVING = "without_checkpointing"
"""The film of the moving picture."""
LONG = "data.max_length=16384"


def films() -> dict[str, tuple[Recipe, float]]:
    """Each film's recipe, and the length of the rows of a step before it, as a share of its own."""
    capstone = recipes.capstone(T4)
    found: dict[str, tuple[Recipe, float]] = {}
    on: list[str] = []
    for name, fields in zip(NAMES, ladder.LADDER_STEPS.values(), strict=True):
        on += fields
        found[name] = (toggles.with_only(capstone, on), 0.0)

    def add(name: str, recipe: Recipe, *settings: str, shorter: float = 0.0) -> None:
        found[name] = (with_settings(recipe, settings), shorter)

    add("without_checkpointing", capstone, "tricks.gradient_checkpointing=false")
    add("without_chunked_loss", capstone, "tricks.chunked_loss=false")
    no_nf4 = ("tricks.quantization=none", "tricks.double_quantization=false")
    add("without_nf4", capstone, *no_nf4)
    add("without_fp16", capstone, "tricks.precision=fp32", "tricks.lean_preparation=false")
    add("without_sdpa", capstone, "tricks.attention=eager", "tricks.expand_kv=false")
    kwanzaa = recipes.kwanzaa(T4)
    add("segments", kwanzaa, "train.expandable_segments=false", shorter=0.75)
    add("expandable", kwanzaa, "train.expandable_segments=true", shorter=0.75)
    add("long", capstone, LONG)
    add("long_offload", capstone, LONG, "tricks.activation_offload=true")
    full = recipes.full_1b(T4)
    add("full_waiting", full, "tricks.optimizer_in_backward=false", "train.max_grad_norm=1")
    add("full_in_backward", full)
    return found


class Set(NamedTuple):
    """Films that one place shows.

    Attributes:
        title: what it shows, for the head of the figure.
        films: film -> what its button says. Of two films the second one is a switch that is off at first.
        says: what the still picture, of the first film, shows.
    """

    title: str
    films: dict[str, str]
    says: str


HOME = dict(zip(NAMES, ladder.LADDER_STEPS, strict=True))
SETS = {
    "home": Set(
        "One training step of Llama-3.2-1B on a T4, switch by switch",
        HOME,
        "Memory during a training step of Llama-3.2-1B in plain fp32: far above the 14.7 GiB of a T4",
    ),
    "plain": Set(
        "One step of plain fp32 training, moment by moment",
        {"plain": "plain fp32 training"},
        "Memory during a training step in plain fp32: weights and optimizer states stay, saved activations grow in the "
        "forward pass and go in the backward pass, while gradients grow",
    ),
    "checkpointing": Set(
        "A step with LoRA and SDPA, without and with gradient checkpointing",
        {"attention": "off", "checkpointing": "gradient checkpointing"},
        "Memory during a training step without gradient checkpointing: saved activations grow in the forward pass",
    ),
    "attention": Set(
        "A step with LoRA: eager attention, and SDPA",
        {"lora": "off", "attention": "SDPA with expanded K/V heads"},
        "Memory during a training step with eager attention: each block adds its scores to the saved activations",
    ),
    "chunked_loss": Set(
        "A step with LoRA, SDPA and checkpointing, without and with the chunked loss",
        {"checkpointing": "off", "chunked_loss": "chunked loss"},
        "Memory during a training step without the chunked loss: the logits are the peak",
    ),
    "together": Set(
        "The capstone's step, and what happens without each switch",
        {
            "all": "all switches",
            "without_checkpointing": "without checkpointing",
            "without_chunked_loss": "without chunked loss",
            "without_nf4": "without NF4",
            "without_fp16": "without fp16",
            "without_sdpa": "without SDPA",
        },
        "Memory during a training step of the capstone, with all switches: it stays far below the memory of a T4",
    ),
    "reserved": Set(
        "What PyTorch's allocator reserves, without and with expandable segments",
        {"segments": "off", "expandable": "expandable segments"},
        "Memory during a training step, and above it what the allocator has reserved",
    ),
    "offload": Set(
        "Rows of 16,384 tokens without and with activation offload",
        {"long": "off", "long_offload": "activation offload"},
        "Memory during a training step with a row of 16,384 tokens: saved block inputs grow in the forward pass",
    ),
    "in_backward": Set(
        "Training all weights: steps after the backward pass, or in it",
        {"full_waiting": "off", "full_in_backward": "optimizer in the backward pass"},
        "Memory during a training step of all weights: gradients grow in the backward pass until the optimizer step",
    ),
}


def script(name: str, data: Any) -> str:
    """A film as a script, because a page that was opened as a file may not fetch."""
    return f"(window.criaFilms ||= {{}})[{json.dumps(name)}]={film_data.as_text(data)};\n"


def read(name: str) -> dict[str, Any]:
    """The data of a committed film."""
    text = (FOLDER / f"{name}.js").read_text(encoding="utf-8")
    return json.loads(text.partition("]=")[2].rstrip(";\n"))


def compute(names: Iterable[str]) -> None:
    """Film, and write the files."""
    recipes_of = films()
    for name in names:
        began = time.perf_counter()
        text = script(name, made(*recipes_of[name]))
        write(f"{name}.js", text)
        print(f"{name}: {len(text):,} bytes, {time.perf_counter() - began:.0f} s", flush=True)


def made(recipe: Recipe, shorter: float) -> dict[str, Any]:
    """Film one recipe."""
    return api.film(recipe, gpu=T4, shorter=shorter).data


NEXT = ",\n"


def index() -> str:
    """The sets as a script. All films of a set have the same scale, so that a lower peak is seen to be lower."""
    entries = []
    for name, one in SETS.items():
        top = film_picture.scale([read(film) for film in one.films])
        about = {"title": one.title, "films": one.films, "top": top, "adds": name == "home"}
        entries.append(f"{json.dumps(name)}:{film_data.as_text(about)}")
    return f"Object.assign(window.criaFilmSets ||= {{}},{{\n{NEXT.join(entries)}\n}});\n"


def pictures() -> dict[str, str]:
    """The still picture of each set's first film, and a moving one for the README, by file name."""
    found = {}
    for theme in THEMES:
        for name, one in SETS.items():
            data = [read(film) for film in one.films]
            found[f"{name}-{theme}.svg"] = film_picture.svg(data[0], theme, top=film_picture.scale(data))
        found[f"moving-{theme}.svg"] = film_picture.svg(read(MOVING), theme, moving=True)
    return found


def element(name: str, base: str) -> str:
    """The element of a set for a page; ``base`` is the address of the films from there, e.g. ``../assets/films``."""
    says = html.escape(SETS[name].says)
    still = style.picture(f"{base}/{name}", says)
    return (
        f'<div class="film" data-films="{name}" data-base="{base}">{still}</div>\n'
        f'<script src="{base.removesuffix("films")}film.js" defer></script>'
    )


def write(name: str, text: str) -> None:
    """Write a file if it has changed; else ``make serve`` would build for ever."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / name
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--draw"]:  # only the pictures and the index, of the films that are there
        compute(sys.argv[1:] or films())
    for name, text in {"index.js": index(), **pictures()}.items():
        write(name, text)
