"""Answer prompts greedily, in batches, with a KV cache whose new tokens are written in place."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import DynamicLayer
from transformers.generation.utils import ALL_CACHE_NAMES

from cria_tricks.common.errors import Diverged
from cria_tricks.data import tokens
from cria_tricks.data.rows import Chat
from cria_tricks.models import ends, pretrained
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


def prompt_ids(chats: Sequence[Chat], tokenizer: Any) -> list[list[int]]:
    """Tokenise the prompt of each row, as :func:`cria_tricks.data.tokens.prompt` does.

    Raises:
        BadInput: if the tokenizer's chat template cannot format a prompt.
    """
    return [tokens.prompt(chat, tokenizer) for chat in chats]


def answer_batch(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    stop: Callable[[], bool] | None = None,
) -> list[tuple[str, int, bool]]:
    """Generate greedy answers to a batch of prompts.

    Padding is on the left, so that new tokens directly follow their prompt. The mask hides the padding, and positions
    are counted from the first real token of each row. So in exact arithmetic an answer does not depend on the other
    rows of the batch.

    Args:
        model: a causal language model in eval mode.
        tokenizer: the model's tokenizer.
        prompts: token ids, none of them empty.
        max_new_tokens: length limit of an answer (tokens).
        stop: asked after each token; the answers end there if it returns True.

    Returns:
        For each prompt the answer's text, its length (tokens), and whether the model ended it.

    Raises:
        Diverged: if the logits of the first token are NaN.
    """
    adapter = getattr(model, "active_peft_config", None)
    if len(prompts) > 1 and adapter is not None and adapter.is_prompt_learning:
        # With a learnt prompt, peft drops the position ids, so padding would shift the positions of every token.
        return [answer_batch(model, tokenizer, [prompt], max_new_tokens, stop)[0] for prompt in prompts]
    stops = ends.stops(tokenizer, model.generation_config.eos_token_id)
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = stops[0] if stops else 0
    longest = max(map(len, prompts))
    padded = []
    masks = []
    for prompt in prompts:
        missing = longest - len(prompt)
        padded.append([pad] * missing + prompt)
        masks.append([0] * missing + [1] * len(prompt))
    ids_BT = torch.tensor(padded, device=model.device)
    mask_BT = torch.tensor(masks, device=model.device)
    pretrained.refuse_unknown_tokens(model, int(ids_BT.max()), "this model")
    max_new_tokens = pretrained.room(model, longest, max_new_tokens)
    with torch.no_grad():
        out_BT = model.generate(
            input_ids=ids_BT,
            attention_mask=mask_BT,
            **for_answers(model, longest + max_new_tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=pad,
            eos_token_id=stops or None,
            logits_processor=LogitsProcessorList([RefuseNaN()]),
            stopping_criteria=StoppingCriteriaList([_Asked(stop)] if stop else []),
        )
    found = []
    for new in out_BT[:, longest:].tolist():
        answer = _until_end(new, stops)
        ended = bool(answer) and answer[-1] in stops
        found.append((tokenizer.decode(answer, skip_special_tokens=True), len(answer), ended))
    return found


def _until_end(tokens: list[int], stops: Sequence[int]) -> list[int]:
    """Cut off the padding behind the first end token; it is there because a batch runs until its last answer ends."""
    for place, token in enumerate(tokens):
        if token in stops:
            return tokens[: place + 1]
    return tokens


class RefuseNaN(LogitsProcessor):
    """Stop answers whose first logits are NaN, because greedy decoding would write one token again and again."""

    def __init__(self) -> None:
        self.looked = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self.looked and scores.isnan().any():
            raise Diverged(
                "the model's logits are NaN: its weights hold NaN or infinity, or its activations are too large for "
                "their dtype; fetch the base again, or take another dtype"
            )
        self.looked = True
        return scores


class _Asked(StoppingCriteria):
    """End all answers of a batch when a function says so."""

    def __init__(self, stop: Callable[[], bool]):
        self.stop = stop

    def __call__(self, input_ids: torch.Tensor, scores: Any, **rest: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), self.stop(), device=input_ids.device)
