"""Answer prompts greedily, in batches."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from cria_tricks.common.errors import Diverged
from cria_tricks.data import tokens
from cria_tricks.data.rows import Chat
from cria_tricks.load import cache
from cria_tricks.models import ends, pretrained


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
            **cache.for_answers(model, longest + max_new_tokens),
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
