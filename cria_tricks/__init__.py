"""cria_tricks: fit LLM fine-tuning into a small GPU, and see what every trick costs.

>>> import cria_tricks
>>> cria_tricks.plan("kwanzaa", gpu="t4").fits
True
>>> report = cria_tricks.train("smoke", out="runs/mine")  # doctest: +SKIP
"""

import logging

from cria_tricks import recipes
from cria_tricks.api import estimate, plan, train
from cria_tricks.errors import BadInput, Diverged, Interrupted, OutOfMemory
from cria_tricks.memory.answer import PlanAnswer
from cria_tricks.recipe import Recipe, Tricks
from cria_tricks.version import __version__

# Told to every user of a CPU with 16-bit products; the package it misses is one that nothing here needs.
logging.getLogger("bitsandbytes.backends.cpu.ops").addFilter(
    lambda record: not str(record.msg).startswith("Failed to load CPU gemm_4bit_forward")
)

__all__ = [
    "BadInput",
    "Diverged",
    "Interrupted",
    "OutOfMemory",
    "PlanAnswer",
    "Recipe",
    "Tricks",
    "__version__",
    "estimate",
    "plan",
    "recipes",
    "train",
]
