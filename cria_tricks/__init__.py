"""cria_tricks: fit LLM fine-tuning into a small GPU, and see what every trick costs.

>>> import cria_tricks
>>> cria_tricks.plan("kwanzaa", gpu="t4").fits
True
>>> report = cria_tricks.train("smoke", out="runs/mine")  # doctest: +SKIP
"""

# Type checkers take a variable of this name as True. Importing it from typing would slow down every start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from cria_tricks import recipes
    from cria_tricks.common.errors import BadInput, Diverged, Interrupted, OutOfMemory
    from cria_tricks.common.version import __version__
    from cria_tricks.predict.answer import PlanAnswer
    from cria_tricks.recipe import Recipe
    from cria_tricks.run.api import estimate, film, plan
    from cria_tricks.run.train import train
    from cria_tricks.settings import Tricks

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
    "film",
    "plan",
    "recipes",
    "train",
]

_MODULES = {
    "run.api": ("estimate", "film", "plan"),
    "run.train": ("train",),
    "common.errors": ("BadInput", "Diverged", "Interrupted", "OutOfMemory"),
    "predict.answer": ("PlanAnswer",),
    "recipe": ("Recipe",),
    "settings": ("Tricks",),
    "common.version": ("__version__",),
}
"""The module of each public name. It is imported only when the name is first used, because importing takes seconds, and
the command ``cria`` must be able to handle Ctrl-C before that."""


def __getattr__(name: str) -> object:
    # Imported here, because an import at the top would add import_module to the names of the package.
    from importlib import import_module

    if name == "recipes":
        return import_module("cria_tricks.recipes")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"cria_tricks.{module}"), name)
    raise AttributeError(f"module 'cria_tricks' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
