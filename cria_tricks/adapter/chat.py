"""Talk with a trained adapter: its prompt format, its answers, and the turns of a conversation."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList

from cria_tricks.adapter.folder import PROVENANCE, RECIPE
from cria_tricks.adapter.opening import open_folder
from cria_tricks.common.errors import BadInput, first_line, usable_path
from cria_tricks.data.sources import CONTRACT
from cria_tricks.data.tokens import DATE
from cria_tricks.load import answering
from cria_tricks.load.adapters import without_adapter
from cria_tricks.load.answering import RefuseNaN
from cria_tricks.models import ends, pretrained
from cria_tricks.recipe import from_toml
from cria_tricks.trainer import what_ran


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
    model, tokenizer = open_folder(folder, **loading)
    if system is None and not raw:
        system = trained_system(folder)
    form = prompt_format(folder, tokenizer, raw)
    try_format(tokenizer, form, system)
    begin = [{"role": "system", "content": system}] if system else []
    turns = {name: list(begin) for name in ("adapter", "base")}
    return Conversation(model, tokenizer, form, max_new_tokens, turns)


@dataclass(frozen=True)
class Format:
    """The format in which prompts are written.

    Attributes:
        template: if true, the tokenizer's chat template writes the whole conversation as one prompt. If false, the
            model gets each text unchanged, without the turns before it.
        why: the reason for this format, as the end of a sentence.
        note: a message for the user; empty if the format is the expected one.
    """

    template: bool
    why: str
    note: str = ""


def trained_kinds(folder: Path) -> dict[str, int]:
    """Read how many rows of each kind (chat, completion, text) an adapter was trained on; empty if it is not known.

    Plain peft writes no provenance. Every function that loads the folder refuses a damaged one.
    """
    try:
        kinds = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["data"]["train_kinds"]
        return {kind: int(kinds[kind]) for kind in what_ran.KINDS if kinds.get(kind)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def prompt_format(folder: Path, tokenizer: Any, raw: bool = False) -> Format:
    """Choose the format of the training rows; if they are not known, the chat template, if the tokenizer has one.

    With ``raw`` the model gets every text unchanged, even if it was trained on chats.
    """
    if raw:
        return Format(False, "--raw gives the text as it is")
    kinds = trained_kinds(folder)
    if kinds:
        why = f"it was trained on {what_ran.rows_in_words(kinds)}"
        template = "chat" in kinds
    else:
        # An empty template counts as one, too: it is broken, and try_format then tells the user.
        template = tokenizer.chat_template is not None
        why = f"it is not known what was trained, and the tokenizer has {'a' if template else 'no'} chat template"
    if not template:
        return Format(False, why, f"{why}: each prompt is given as it is")
    if set(kinds) == {"chat"}:
        return Format(True, why)
    return Format(True, why, f"{why}: prompts are written as chats; --raw gives them as they are")


def trained_system(folder: Path) -> str | None:
    """Return the system message of every training row, if the recipe has put one there (``data.contract``)."""
    recipe = folder / RECIPE
    if recipe.is_file() and from_toml(recipe).data.contract:
        return CONTRACT
    return None


def try_format(tokenizer: Any, form: Format, system: str | None) -> None:
    """Write a test question, so that a broken template or a useless system message is found before the user types.

    Raises:
        BadInput: if the template is broken, refuses the system message, or leaves it out silently.
    """
    if not form.template:
        if system:
            raise BadInput(f"--system: there is no place for a system message: {form.why}; put it into the prompt")
        return
    question = {"role": "user", "content": "?"}
    write_prompt(tokenizer, [question])
    if not system:
        return
    written = ""
    with contextlib.suppress(Exception):  # a template that refuses the message leaves nothing written
        messages = [{"role": "system", "content": system}, question]
        written = tokenizer.apply_chat_template(messages, tokenize=False, date_string=DATE)
    if system.strip() not in written:
        raise BadInput("--system: this model's chat template has no system message; put it into the prompt")


def write_prompt(tokenizer: Any, said: str | Sequence[Mapping[str, str]]) -> Any:
    """Tokenise a prompt as training does; return ``input_ids`` and ``attention_mask``, each of shape (1, T).

    Args:
        tokenizer: the adapter's tokenizer.
        said: one text, which is tokenised unchanged; or the messages so far, which the chat template writes.

    Raises:
        BadInput: if the prompt has no tokens; if the tokenizer has no chat template, or a broken one.
    """
    if isinstance(said, str):
        prompt = tokenizer(said, return_tensors="pt", return_token_type_ids=False)
        if not prompt["input_ids"].numel():
            raise BadInput("the prompt has no tokens; write some text")
        return prompt
    try:
        prompt = tokenizer.apply_chat_template(
            list(said), add_generation_prompt=True, return_tensors="pt", return_dict=True, date_string=DATE
        )
    except Exception as error:  # a template is a small program, so it can raise anything
        raise BadInput(f"the tokenizer's chat template fails: {first_line(error)}; is the folder whole?") from None
    if not prompt["input_ids"].numel():
        raise BadInput("the tokenizer's chat template writes nothing; is the folder whole?")
    return prompt


def answer(
    model: Any,
    tokenizer: Any,
    said: str | Sequence[Mapping[str, str]],
    max_new_tokens: int,
    streamer: Any = None,
) -> str:
    """Generate the assistant's turn, or the continuation of a text, greedily.

    Args:
        model: a causal language model in eval mode.
        tokenizer: the model's tokenizer.
        said: as for :func:`write_prompt`; the last message is the user's.
        max_new_tokens: length limit of the answer (tokens).
        streamer: receives the text while it is generated, e.g. ``transformers.TextStreamer``.

    Raises:
        BadInput: if the prompt cannot be written.
        Diverged: if the logits of the first token are NaN.
    """
    prompt = write_prompt(tokenizer, said).to(model.device)
    asked = prompt["input_ids"].shape[1]
    pretrained.refuse_unknown_tokens(model, int(prompt["input_ids"].max()), "this model")
    max_new_tokens = pretrained.room(model, asked, max_new_tokens)
    with torch.no_grad():
        out = model.generate(
            **prompt,
            **answering.for_answers(model, asked + max_new_tokens),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id,
            eos_token_id=ends.stops(tokenizer, model.generation_config.eos_token_id) or None,
            logits_processor=LogitsProcessorList([RefuseNaN()]),
            streamer=streamer,
        )
    return tokenizer.decode(out[0, asked:], skip_special_tokens=True)


@dataclass
class Conversation:
    """The turns of a user with an adapter, and with its base if that is asked, too: each sees its own answers only.

    Attributes:
        model: the adapter over its base, in eval mode.
        tokenizer: the model's tokenizer.
        form: how prompts are written.
        max_new_tokens: length limit of an answer (tokens).
        turns: the messages so far, with ``"adapter"`` and with ``"base"``.
        streamer: receives the text while it is generated, e.g. ``transformers.TextStreamer``; ``None`` for nothing.
    """

    model: Any
    tokenizer: Any
    form: Format
    max_new_tokens: int
    turns: dict[str, list[dict[str, str]]]
    streamer: Any = None

    def ask(self, text: str, name: str = "adapter") -> str:
        """Return the answer of ``"adapter"`` or ``"base"`` to the user's next text."""
        turns = self.turns[name]
        turns.append({"role": "user", "content": text.strip()})
        asked = without_adapter(self.model) if name == "base" else contextlib.nullcontext(self.model)
        with asked as model:
            said = turns if self.form.template else text
            reply = answer(model, self.tokenizer, said, self.max_new_tokens, self.streamer)
        turns.append({"role": "assistant", "content": reply})
        return reply
