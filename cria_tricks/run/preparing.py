"""Prepare the texts of a recipe as token shards: the function behind ``cria prepare``."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cria_tricks import models
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import BadInput
from cria_tricks.data import sources
from cria_tricks.data.prepared import layout, write
from cria_tricks.data.prepared.read import TokenShards
from cria_tricks.data.shards import open_files
from cria_tricks.load.model import load_tokenizer
from cria_tricks.recipe import Recipe
from cria_tricks.run import given


def prepare(
    recipe: Recipe,
    out: Path,
    processes: int = 1,
    progress: Callable[[str, int, int], None] = lambda stage, done, of: None,
) -> dict[str, Any]:
    """Write the texts of ``data.train`` as token shards, or what of them an earlier start has left to do.

    Args:
        recipe: its model and its ``data`` fields are used.
        out: the folder to make. If it holds these shards already, they are checked against their sums.
        processes: how many processes share the work.
        progress: as for :func:`cria_tricks.data.prepared.write.write`.

    Returns:
        What ``prepared.json`` says.

    Raises:
        BadInput: if the texts, the settings or the folder cannot be used.
        OutOfMemory: if a process was killed.
    """
    data = recipe.data
    given.preparing(recipe)
    source = open_files(sources.place_of_files(data.train))
    held_out = sources.find(data.eval, "eval")
    weights = models.find(recipe.model)
    tokenizer = load_tokenizer(weights, data.eos)
    about = layout.made_of(data, source, held_out, tokenizer, weights.name)
    if out.exists():
        return _already_there(out, about)
    work = out.with_name(out.name + write.WORK)
    job = write.Preparation(data, source, source.shards(), held_out, partial(load_tokenizer, weights, data.eos), work)
    try:
        return write.write(job, out, about, processes, progress)
    except BadInput as error:
        raise BadInput(source.in_lines(str(error))) from None


def _already_there(out: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Check the shards that are there already."""
    if not sources.is_prepared(str(out)):
        raise BadInput(f"--out {out}: is there already and holds no token shards; name a new folder")
    found = TokenShards(out).about
    if any(found[name] != value for name, value in about.items()):
        raise BadInput(
            f"--out {out}: holds token shards of other texts or settings, or of another tokenizer; name a new folder"
        )
    damage = atomic_files.damage(out)
    if damage:
        raise BadInput(f"--out {out}: {damage}; remove the folder and prepare it again")
    return found
