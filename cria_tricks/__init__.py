"""cria_tricks: fit LLM fine-tuning into a small GPU, and see what every trick costs.

>>> import cria_tricks
>>> report = cria_tricks.train(cria_tricks.recipes.smoke())  # doctest: +SKIP
"""

from cria_tricks import recipes
from cria_tricks.errors import BadInput, Diverged, Interrupted
from cria_tricks.recipe import Recipe, Tricks
from cria_tricks.run import train

__all__ = ["BadInput", "Diverged", "Interrupted", "Recipe", "Tricks", "recipes", "train"]
