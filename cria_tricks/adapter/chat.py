"""Talk with a trained adapter: its prompt format, its answers, and the turns of a conversation."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from cria_tricks.adapter import prompts
from cria_tricks.adapter.opening import open_folder
from cria_tricks.adapter.prompts import Format
from cria_tricks.common.errors import usable_path
from cria_tricks.load import cache
from cria_tricks.load.adapters import without_adapter
from cria_tricks.load.answering import RefuseNaN
from cria_tricks.models import ends, pretrained


def open_for_chat(
    folder: str | Path, raw: bool = False, system: str | None = None, max_new_tokens: int = 512, **loading: Any
) -> "Conversation":
    """Load an adapter, and begin a conversation in the prompt format that it was trained on.

    Args:
        folder: as for :func:`open_folder`.
        raw: whether to give the model every prompt unchanged, even if it was trained on chats.
        system: the system message; when left out, that of the training rows if all had the same.
        max_new_tokens: length limit of an answer (tokens).
        **loading: further arguments of :func:`open_folder`.

    Raises:
        BadInput: as :func:`open_folder`; also for a system message if the format has no place for one.
    """
    folder = usable_path("adapter", folder)
    if system is None and not raw:
        system = prompts.trained_system(folder)
    # If the folder tells the format, refuse a useless system message now: loading the model takes long.
    form = prompts.of_folder(folder, raw)
    if form:
        prompts.refuse_system(form, system)
    model, tokenizer = open_folder(folder, **loading)
    form = form or prompts.of_tokenizer(tokenizer)
    prompts.refuse_system(form, system)
    if form.template:
        prompts.try_template(tokenizer, system)
    return Conversation(model, tokenizer, form, system, max_new_tokens)


def answer(
    model: Any,
    tokenizer: Any,
    said: str | Sequence[Mapping[str, str]],
    max_new_tokens: int,
    streamer: Any = None,
) -> str:
    """Generate an answer greedily.

    Args:
        model: a causal language model in eval mode.
        tokenizer: the model's tokenizer.
        said: the messages so far, ending with the user's, which the chat template writes as one prompt; or one text,
            which is the prompt as it is.
        max_new_tokens: length limit of the answer (tokens).
        streamer: receives the text while it is generated, e.g. ``transformers.TextStreamer``.

    Returns:
        The assistant's turn, or the text's continuation.

    Raises:
        BadInput: if the prompt cannot be written.
        Diverged: if the logits of the first token are NaN.
    """
    prompt = prompts.write(tokenizer, said).to(model.device)
    pretrained.refuse_unknown_tokens(model, int(prompt["input_ids"].max()), "this model")
    max_new_tokens = pretrained.room(model, prompt["input_ids"].shape[1], max_new_tokens)
    with torch.no_grad():
        out = model.generate(
            **prompt,
            **cache.for_answers(model, prompt["input_ids"].shape[1] + max_new_tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            eos_token_id=ends.stops(tokenizer, model.generation_config.eos_token_id) or None,
            logits_processor=LogitsProcessorList([RefuseNaN()]),
            streamer=streamer,
        )
    return tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)


class Conversation:
    """The turns of a user with an adapter, and with its base if that is asked, too: each sees its own answers only.

    Attributes:
        model: the adapter over its base, in eval mode.
        tokenizer: the model's tokenizer.
        form: how prompts are written.
        max_new_tokens: length limit of an answer (tokens).
        streamer: receives the text while it is generated, e.g. ``transformers.TextStreamer``; ``None`` for nothing.
        turns: the messages so far, with ``"adapter"`` and with ``"base"``.
    """

    def __init__(self, model: Any, tokenizer: Any, form: Format, system: str | None, max_new_tokens: int):
        self.model = model
        self.tokenizer = tokenizer
        self.form = form
        self.max_new_tokens = max_new_tokens
        self.streamer: Any = None
        begin = [{"role": "system", "content": system}] if system else []
        self.turns = {name: list(begin) for name in ("adapter", "base")}

    def ask(self, text: str, name: str = "adapter") -> str:
        """Return the answer of ``"adapter"`` or ``"base"`` to the user's next text.

        Raises:
            BadInput: if the prompt cannot be written.
        """
        turns = self.turns[name]
        turns.append({"role": "user", "content": text.strip()})
        asked = without_adapter(self.model) if name == "base" else contextlib.nullcontext(self.model)
        with asked as model:
            said = turns if self.form.template else text
            reply = answer(model, self.tokenizer, said, self.max_new_tokens, self.streamer)
        turns.append({"role": "assistant", "content": reply})
        return reply
