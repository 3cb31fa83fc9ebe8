"""Answer held-out rows, and measure the loss of the answers that the data gives."""

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from cria_tricks.adapter.folder import PROVENANCE
from cria_tricks.common import atomic_files
from cria_tricks.common.errors import Diverged, OutOfMemory, is_out_of_memory
from cria_tricks.common.progress_bars import new_bar
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.rows import Chat
from cria_tricks.data.samples import answer_line, question
from cria_tricks.data.tokens import tokenize, trained
from cria_tricks.kwanzaa.contract import read_reply
from cria_tricks.kwanzaa.summary import Written
from cria_tricks.load.answering import answer_batch
from cria_tricks.load.losses import full_loss_sum
from cria_tricks.models import pretrained
from cria_tricks.settings import BATCH, NEW_TOKENS

BROKEN = 700.0
"""The loss at which an evaluation stops with an error (nats per token).

The perplexity is exp(loss), which must be a Python float, and floats end at exp(709).
"""
SHOWN = 160
"""The length at which an answer is cut that is shown while others are written (characters)."""


def fingerprint(folder: Path) -> str:
    """Hash the files of an adapter's folder that decide its answers: not the card, the provenance and the manifest."""
    others = ("README.md", PROVENANCE, atomic_files.MANIFEST)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in others]
    hashes = {path.name: atomic_files.entry(path)["sha256"] for path in files}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Rows:
    """The rows that a model is asked, and how.

    Attributes:
        chats: the rows.
        prompts: the token ids of their prompts, from :func:`cria_tricks.load.answering.prompt_ids`.
        text_length: length of the rows into which a text is cut for its loss (tokens).
        add_eos: as for :func:`cria_tricks.data.tokens.tokenize`.
        batch_size: number of rows that are answered together.
        max_new_tokens: length limit of an answer (tokens).
    """

    chats: Sequence[Chat]
    prompts: Sequence[list[int]]
    text_length: int = sys.maxsize
    add_eos: bool = False
    batch_size: int = BATCH
    max_new_tokens: int = NEW_TOKENS


def answer_rows(model: Any, tokenizer: Any, rows: Rows, system: str, console: Console) -> list[Written]:
    """Answer all rows, and measure the loss of their references.

    Rows with prompts of similar length form a batch, so that it has little padding. The batch with the longest prompts
    comes first, because it needs the most memory: if that does not fit, it is known at once. A row without a prompt is
    not answered.

    Args:
        model: a causal language model in eval mode.
        tokenizer: the model's tokenizer.
        rows: what is asked, how many rows together, and the length limit of an answer.
        system: the name of what answers, for the progress.
        console: where progress is shown.

    Returns:
        The answers, in the order of the rows.

    Raises:
        Diverged: if a loss is not finite or not below :data:`BROKEN`.
        OutOfMemory: naming a way out.
    """
    total = len(rows.chats)
    order = sorted(range(total), key=lambda row: len(rows.prompts[row]))
    batches = [order[begin : begin + rows.batch_size] for begin in range(0, total, rows.batch_size)]
    answers: dict[int, Written] = {}
    bar = new_bar(console)
    try:
        with bar:
            task = bar.add_task(system, total=total, note="answers")
            for batch in reversed(batches):
                written = _answered(model, tokenizer, rows, batch)
                # One row at a time: a loss needs the logits of all tokens, while an answer needs only the last token's.
                losses = [
                    reference_loss(model, tokenizer, rows.chats[row], rows.text_length, add_eos=rows.add_eos)
                    for row in batch
                ]
                for row, loss in zip(batch, losses, strict=True):
                    answers[row] = Written(*written[row], *loss)
                bar.advance(task, len(batch))
                if not console.is_terminal:
                    console.print(f"{system} {len(answers):>4}/{total} rows")
                _show_one(console, rows.chats[batch[0]], written[batch[0]][0])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory with {rows.batch_size} rows at a time; give a smaller --batch-size") from None
    return [answers[row] for row in range(total)]


def _show_one(console: Console, chat: Chat, answer: str) -> None:
    """Print a question and its answer in one line each, so that the reader sees answers as they come."""
    if answer and chat.messages:
        console.print(f"  ? {question(chat)}", markup=False, highlight=False)
        console.print(f"  > {answer_line(read_reply(answer).text, SHOWN)}", markup=False, highlight=False)


def _answered(model: Any, tokenizer: Any, rows: Rows, batch: Sequence[int]) -> dict[int, tuple[str, int, bool]]:
    """Answer a batch of rows by number: text, length (tokens), and whether the model ended the answer."""
    answers = dict.fromkeys(batch, ("", 0, True))  # of a row without a prompt: nothing was cut off
    asked = [row for row in batch if rows.prompts[row]]
    if asked:
        found = answer_batch(model, tokenizer, [rows.prompts[row] for row in asked], rows.max_new_tokens)
        answers |= zip(asked, found, strict=True)
    return answers


def reference_loss(
    model: Any, tokenizer: Any, chat: Chat, text_length: int = sys.maxsize, *, add_eos: bool = False
) -> tuple[float, int]:
    """Return the loss of a row, summed over its trained tokens (nats), and the number of these tokens.

    A text is cut into rows of ``text_length`` tokens, which overlap by one token, whatever ``data.overlap`` was in
    training. No other row is cut.

    Raises:
        Diverged: if the loss is not finite, or beyond what any model reaches (:data:`BROKEN`).
    """
    length = text_length if chat.text else sys.maxsize
    rows = tokenize([chat], tokenizer, length, add_eos=add_eos).rows
    loss = 0.0
    pretrained.refuse_unknown_tokens(model, max(max(row["input_ids"]) for row in rows), "this model")
    for row in rows:
        # A single row needs no padding, so any padding id will do.
        batch = {name: tensor.to(model.device) for name, tensor in PadToLongest(0)([row]).items()}
        with torch.no_grad():
            loss += full_loss_sum(model, batch).item()
    tokens = sum(map(trained, rows))
    if not loss / tokens < BROKEN:  # also true for NaN
        dtype = str(model.dtype).removeprefix("torch.")
        raise Diverged(f"{chat.where}: the loss of its answer is {loss / tokens} per token, in {dtype}")
    return loss, tokens
