"""Answer held-out rows, and measure the loss of the answers that the data gives."""

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
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
from cria_tricks.kwanzaa.answers import Answers, Written
from cria_tricks.kwanzaa.reply import read_reply
from cria_tricks.load.answering import answer_batch
from cria_tricks.load.losses import full_loss_sum
from cria_tricks.models import pretrained

BROKEN = 700.0
"""The loss at which an evaluation stops with an error (nats per token).

The perplexity is exp(loss), which must be a Python float, and floats end at exp(709).
"""
SHOWN = 160
"""The length at which an answer is cut that is shown while others are written (characters)."""


def fingerprint(folder: Path) -> str:
    """Hash the files of an adapter's folder that decide its answers: not the card, the provenance and the manifest.

    Files in folders below it are not hashed.
    """
    hashes = {}
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.name not in ("README.md", PROVENANCE, atomic_files.MANIFEST):
            hashes[path.name] = atomic_files.entry(path)["sha256"]
    return hash_of(hashes)


def hash_of(data: Any) -> str:
    """Compute the sha256 of plain JSON data."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def answer_rows(
    model: Any,
    tokenizer: Any,
    chats: Sequence[Chat],
    prompts: Sequence[list[int]],
    answers: Answers,
    *,
    batch_size: int,
    max_new_tokens: int,
    text_length: int,
    add_eos: bool = False,
    console: Console,
    system: str,
) -> None:
    """Answer all rows that are not answered yet, and measure the loss of their references.

    Rows with prompts of similar length form a batch, so that it has little padding. The shortest prompts come
    first, because long ones need more memory: if it runs out, the answers before are saved. A row without a prompt is
    not answered.

    Args:
        model: a causal language model in eval mode.
        tokenizer: the model's tokenizer.
        chats: the rows.
        prompts: the token ids of their prompts, from :func:`cria_tricks.load.answering.prompt_ids`.
        answers: where each batch is saved when it is done.
        batch_size: number of rows that are answered together.
        max_new_tokens: length limit of an answer (tokens).
        text_length: length of the rows into which a text is cut for its loss (tokens).
        add_eos: as for :func:`cria_tricks.data.tokens.tokenize`.
        console: where progress is shown.
        system: the name of the system in the progress display.

    Raises:
        Diverged: if a loss is not finite or not below :data:`BROKEN`. The batches before it are saved.
        OutOfMemory: naming a way out. The batches before are saved.
    """
    missing = set(range(len(chats))) - answers.rows.keys()
    order = sorted(missing, key=lambda row: (len(prompts[row]), row))
    done = len(chats) - len(order)
    bar = new_bar(console)
    try:
        with bar:
            task = bar.add_task(system, total=len(chats), completed=done, note="answers")
            for begin in range(0, len(order), batch_size):
                batch = order[begin : begin + batch_size]
                written = _answered(model, tokenizer, {row: prompts[row] for row in batch}, max_new_tokens)
                # One row at a time: a loss needs the logits of all tokens, while an answer needs only the last token's.
                losses = {
                    row: reference_loss(model, tokenizer, chats[row], text_length, add_eos=add_eos) for row in batch
                }
                answers.add({row: Written(*written[row], *losses[row]) for row in batch})
                bar.advance(task, len(batch))
                if not console.is_terminal:
                    console.print(f"{system} {done + begin + len(batch):>4}/{len(chats)} rows")
                _show_one(console, chats[batch[0]], written[batch[0]][0])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"out of memory with {batch_size} rows at a time; {len(answers.rows)} answers are in {answers.path}, and "
            "the same command with a smaller --batch-size goes on after them"
        ) from None


def _show_one(console: Console, chat: Chat, answer: str) -> None:
    """Print a question and its answer in one line each, so that the reader sees answers as they come."""
    if not answer or not chat.messages:
        return
    console.print(f"  ? {question(chat)}", markup=False, highlight=False)
    console.print(f"  > {answer_line(read_reply(answer).text, SHOWN)}", markup=False, highlight=False)


def _answered(
    model: Any, tokenizer: Any, prompts: Mapping[int, list[int]], max_new_tokens: int
) -> dict[int, tuple[str, int, bool]]:
    """Answer a batch of prompts by row number; a row without a prompt gets an empty answer.

    Returns:
        For each row the text, the length (tokens), and whether the model ended the answer.
    """
    answers = dict.fromkeys(prompts, ("", 0, True))  # True, because nothing was cut off
    asked = [row for row in prompts if prompts[row]]
    if asked:
        found = answer_batch(model, tokenizer, [prompts[row] for row in asked], max_new_tokens)
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
