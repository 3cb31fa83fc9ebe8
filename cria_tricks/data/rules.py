"""Refuse ``data`` settings that cannot work together, or that need a library which is not installed."""

import importlib.util

from cria_tricks.common.errors import BadInput
from cria_tricks.recipe import Recipe
from cria_tricks.settings import NAMED_SETS, Data


def refuse(recipe: Recipe) -> None:
    """Refuse data settings that contradict each other, before anything is read.

    Raises:
        BadInput: naming the fields, and what to set.
    """
    data = recipe.data
    if data.overlap >= data.max_length:
        raise BadInput(
            f"data.overlap={data.overlap} with data.max_length={data.max_length}: every row of a text must hold new "
            "tokens; set data.overlap below data.max_length"
        )
    if 0 < data.max_words < data.min_words:
        raise BadInput(
            f"data.min_words={data.min_words} with data.max_words={data.max_words}: no row can have at least "
            f"{data.min_words} and at most {data.max_words} words; raise data.max_words, or set it to 0"
        )
    if data.stream and not recipe.train.max_steps:
        raise BadInput(
            "data.stream=true: a stream has no known number of rows, so train.epochs gives no number of steps; set "
            "train.max_steps, e.g. --set train.max_steps=1000"
        )
    if data.stream and not data.eval and data.train not in NAMED_SETS:
        raise BadInput("data.eval is not named, and nothing can be held out of a stream; set data.eval=FILE")
    if data.stream and recipe.tricks.packing:
        raise BadInput(
            "data.stream=true with tricks.packing=true: packing has to see all rows; set tricks.packing=false "
            "(plain texts are cut into rows of full length, so they need no packing)"
        )
    if data.stream and data.duplicates != "keep":
        raise BadInput(
            f"data.duplicates={data.duplicates} with data.stream=true: a stream remembers no earlier row; set "
            "data.duplicates=keep or data.stream=false"
        )


def refuse_missing_libraries(data: Data) -> None:
    """Refuse settings whose library is not installed, without importing any library.

    Raises:
        BadInput: naming the setting, the library and the extra that brings it.
    """
    for setting, library in needed_libraries(data).items():
        if importlib.util.find_spec(library) is None:
            raise BadInput(f"{setting} needs {library}: pip install 'cria_tricks[data]', or leave it out")


def needed_libraries(data: Data) -> dict[str, str]:
    """Return the library that each setting needs, by setting; ``pip install 'cria_tricks[data]'`` brings them all."""
    needed = {}
    if data.duplicates == "near":
        needed["data.duplicates=near"] = "datasketch"
    if data.language:
        needed[f"data.language={data.language}"] = "py3langid"
    return needed
