"""A KV cache for transformers whose new tokens are written in place (``techniques/kv_cache.py``)."""

from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.generation.utils import ALL_CACHE_NAMES

from cria_tricks.techniques import kv_cache

CACHE = ALL_CACHE_NAMES[0]
"""The argument of a model that takes the keys and values of earlier tokens: ``cache`` from transformers 5.24 on."""


class InPlaceLayer(DynamicLayer):
    """The keys and values of one block, in memory that is taken once, for as many tokens as there can be.

    ``keys`` and ``values`` are views of what is there, as in the layer of transformers that this one replaces.
    """

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room  # of prompt and answer [tokens]

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the memory, when the first keys and values tell their sizes."""
        super().lazy_initialization(key_states, value_states)
        self.rooms = [new.new_empty(*new.shape[:2], self.room, new.shape[3]) for new in (key_states, value_states)]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the keys and values of new tokens, shape (B, K, T, D), and return all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        length = self.get_seq_length()
        self.keys, self.values = (
            kv_cache.append(room, length, new) for room, new in zip(self.rooms, (key_states, value_states), strict=True)
        )
        return self.keys, self.values


def for_answers(model: Any, room: int) -> dict[str, Any]:
    """Make the cache for one call of ``generate``.

    Args:
        model: the model that answers.
        room: the longest prompt and answer together [tokens].

    Returns:
        Keyword arguments for ``generate``. They name no cache for a model that cannot use one, and for a learnt prompt,
        which peft lays before the tokens only if it makes the cache itself.
    """
    if not model.config.use_cache:  # off for a side network
        return {"use_cache": False}
    adapter = getattr(model, "active_peft_config", None)
    if adapter is not None and adapter.is_prompt_learning:
        # peft 0.21 looks for earlier tokens by their old name, and would lay the prompt before each new token.
        return {"use_cache": CACHE == "past_key_values"}
    return {"use_cache": True, CACHE: in_place(model, room)}


def in_place(model: Any, room: int) -> DynamicCache:
    """Make a cache of ``room`` tokens for a model."""
    cache = DynamicCache(config=model.config)
    # A sliding window forgets tokens, so its layers stay as they are.
    cache.layers = [InPlaceLayer(room) if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
