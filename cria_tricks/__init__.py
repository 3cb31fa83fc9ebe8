"""cria_tricks: fit LLM fine-tuning into a small GPU, and see what every trick costs.

>>> import cria_tricks
>>> report = cria_tricks.train(cria_tricks.recipes.smoke())  # doctest: +SKIP
"""

import logging
from typing import TYPE_CHECKING, Any

from cria_tricks import recipes
from cria_tricks.errors import BadInput, Diverged, Interrupted, OutOfMemory
from cria_tricks.recipe import Recipe, Tricks

if TYPE_CHECKING:
    from cria_tricks.run import train

# Told to every user of a CPU with 16-bit products; the package it misses is one that nothing here needs.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)

__all__ = ["BadInput", "Diverged", "Interrupted", "OutOfMemory", "Recipe", "Tricks", "recipes", "train"]


def __getattr__(name: str) -> Any:
    """Import ``train`` when it is asked for: torch comes with it, and a wrong recipe should not wait for that."""
    if name == "train":
        from cria_tricks.run import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
