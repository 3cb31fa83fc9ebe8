"""Write prompts in the format of the rows that an adapter was trained on."""

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks.adapter.folder import PROVENANCE, RECIPE
from cria_tricks.common.errors import BadInput, first_line
from cria_tricks.data.contract_prompt import CONTRACT
from cria_tricks.data.tokens import DATE
from cria_tricks.recipe import from_toml
from cria_tricks.trainer import what_ran


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

    Plain peft writes no provenance, and our first versions did not count kinds. A damaged file is treated like a
    missing one here, because every function that loads the folder refuses it anyway.
    """
    try:
        kinds = json.loads((folder / PROVENANCE).read_text(encoding="utf-8"))["data"]["train_kinds"]
        return {kind: int(kinds[kind]) for kind in what_ran.KINDS if kinds.get(kind)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}


def of_folder(folder: Path, raw: bool) -> Format | None:
    """Find the format without loading a tokenizer.

    Args:
        folder: folder of an adapter or a whole model.
        raw: whether the user wants the model to get every text unchanged, even if it was trained on chats.

    Returns:
        The format; ``None`` if the folder does not tell what the model was trained on.
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
    """Choose the format if the folder tells nothing: the chat template, if the tokenizer has one."""
    # An empty template counts as one, too: it is broken, and try_template then tells the user.
    if tokenizer.chat_template is not None:
        found = "it is not known what was trained, and the tokenizer has a chat template"
        return Format(True, found, f"{found}, so prompts are written by it; --raw gives them as they are")
    found = "it is not known what was trained, and the tokenizer has no chat template"
    return Format(False, found, f"{found}, so each prompt is given as it is")


def trained_system(folder: str | Path) -> str | None:
    """Return the system message of every training row, if the recipe has put one there (``data.contract``)."""
    recipe = Path(folder) / RECIPE
    if recipe.is_file() and from_toml(recipe).data.contract:
        return CONTRACT
    return None


def refuse_system(form: Format, system: str | None) -> None:
    """Refuse a system message if no chat template is used, because then it has no place in the prompt.

    Raises:
        BadInput: with the reason.
    """
    if system and not form.template:
        raise BadInput(f"--system: there is no place for a system message: {form.why}; put it into the prompt")


def try_template(tokenizer: Any, system: str | None) -> None:
    """Write a test question with the chat template, so that a broken template is found before the user types anything.

    Args:
        tokenizer: the adapter's tokenizer.
        system: the system message, if there is one. Some templates refuse it, others leave it out silently.

    Raises:
        BadInput: if the template is broken, or leaves the system message out.
    """
    question = {"role": "user", "content": "?"}
    write(tokenizer, [question])
    if not system:
        return
    written = ""
    with contextlib.suppress(Exception):  # a template that refuses the message leaves nothing written
        messages = [{"role": "system", "content": system}, question]
        written = tokenizer.apply_chat_template(messages, tokenize=False, date_string=DATE)
    if system.strip() not in written:
        raise BadInput("--system: this model's chat template has no system message; put it into the prompt")


def write(tokenizer: Any, said: str | Sequence[Mapping[str, str]]) -> Any:
    """Tokenise a prompt as training does.

    Args:
        tokenizer: the adapter's tokenizer.
        said: one text, which is tokenised unchanged; or the messages so far, which the chat template writes.

    Returns:
        ``input_ids`` and ``attention_mask``, each of shape (1, T).

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
