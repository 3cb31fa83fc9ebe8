"""Write prompts for an adapter in the format of the rows that it was trained on."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.adapter.folder import PROVENANCE
from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.data.tokens import DATE
from cria_tricks.trainer import what_ran


@dataclass(frozen=True)
class Format:
    """The format in which prompts are written.

    Attributes:
        template: whether the tokenizer's chat template writes them, together with the turns before; else each prompt
            is given as it is, alone.
        why: the reason for this format, as the end of a sentence.
        note: what the user is told; empty where the format is the expected one.
    """

    template: bool
    why: str
    note: str = ""


def trained_kinds(folder: Path) -> dict[str, int]:
    """Read how many rows of each kind an adapter was trained on; empty where nothing says so.

    Plain peft writes no provenance, and our first versions did not count kinds. A damaged file counts as none here,
    because every function that loads the folder refuses it.
    """
    try:
        kinds = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["data"]["train"]["kinds"]
        return {kind: int(kinds[kind]) for kind in what_ran.KINDS if kinds.get(kind)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def of_folder(folder: Path, raw: bool) -> Format | None:
    """Find the format without loading a tokenizer.

    Args:
        folder: folder of an adapter or a whole model.
        raw: whether the user wants the text as it is, whatever was trained.

    Returns:
        ``None`` where nothing says what was trained.
    """
    if raw:
        return Format(False, "--raw gives the text as it is")
    kinds = trained_kinds(folder)
    if not kinds:
        return None
    why = f"it was trained on {what_ran.rows_in_words(kinds)}"
    if "chat" not in kinds:
        return Format(False, why, f"{why}: each prompt is given as it is")
    if set(kinds) == {"chat"}:
        return Format(True, why)
    return Format(True, why, f"{why}: prompts are written as chats; --raw gives them as they are")


def of_tokenizer(tokenizer: Any) -> Format:
    """Choose the format where nothing says what was trained: the chat template, if there is one."""
    if tokenizer.chat_template is not None:  # an empty one is broken, and is told as that
        found = "it is not known what was trained, and the tokenizer has a chat template"
        return Format(True, found, f"{found}, so prompts are written by it; --raw gives them as they are")
    found = "it is not known what was trained, and the tokenizer has no chat template"
    return Format(False, found, f"{found}, so each prompt is given as it is")


def refuse_system(form: Format, system: str | None) -> None:
    """Refuse a system message where prompts are given as they are.

    Raises:
        BadInput: with the reason.
    """
    if system and not form.template:
        raise BadInput(f"--system: there is no place for a system message: {form.why}; put it into the prompt")


def try_template(tokenizer: Any, system: str | None) -> None:
    """Write a question by the chat template, so that a broken one is found before anybody is asked.

    Args:
        tokenizer: the adapter's tokenizer.
        system: a system message, if there is one; some templates refuse it, others drop it without a word.

    Raises:
        BadInput: if the template is broken, or has no system message.
    """
    question = {"role": "user", "content": "?"}
    write(tokenizer, [question])
    if not system:
        return
    written = ""
    with contextlib.suppress(Exception):
        messages = [{"role": "system", "content": system}, question]
        written = tokenizer.apply_chat_template(messages, tokenize=False, date_string=DATE)
    if system.strip() not in written:
        raise BadInput("--system: this model's chat template has no system message; put it into the prompt")


def write(tokenizer: Any, said: str | Sequence[Mapping[str, str]]) -> Any:
    """Tokenise a prompt as training does.

    Args:
        tokenizer: the adapter's tokenizer.
        said: a text, which is given as it is; or the conversation so far, which its chat template writes.

    Returns:
        ``input_ids`` and ``attention_mask``, each of shape (1, T).

    Raises:
        BadInput: if the tokenizer has no chat template, a broken one, or nothing is written.
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
    except Exception as error:  # a template is a program, in a file of the folder
        raise BadInput(f"the tokenizer's chat template fails: {first_line(error)}; is the folder whole?") from None
    if not prompt["input_ids"].numel():
        raise BadInput("the tokenizer's chat template writes nothing; is the folder whole?")
    return prompt
