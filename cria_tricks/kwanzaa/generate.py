"""Answer held-out rows, and measure the loss of the answers that the data gives."""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console

from cria_tricks.common.errors import Diverged, OutOfMemory, is_out_of_memory
from cria_tricks.common.progress_bars import new_bar
from cria_tricks.data.batches import PadToLongest
from cria_tricks.data.rows import Chat
from cria_tricks.data.samples import answer_line, question
from cria_tricks.data.tokens import tokenize, trained
from cria_tricks.kwanzaa.contract import read_reply
from cria_tricks.kwanzaa.summary import Written
from cria_tricks.load.answering import answer_batch, prompt_ids
from cria_tricks.load.losses import full_loss_sum
from cria_tricks.models import pretrained
from cria_tricks.settings import Data

BROKEN = 700.0
"""The loss at which an evaluation stops with an error (nats per token).

The perplexity is exp(loss), which must be a Python float, and floats end at exp(709).
"""
SHOWN = 160
"""The length at which an answer is cut that is shown while others are written (characters)."""


def answer_rows(
    model: Any,
    tokenizer: Any,
    chats: Sequence[Chat],
    trained_with: Data,
    batch_size: int,
    max_new_tokens: int,
    system: str,
    console: Console,
) -> list[Written]:
    """Answer all rows, and measure the loss of their references.

    Rows with prompts of similar length form a batch, so that it has little padding. The batch with the longest prompts
    comes first, because it needs the most memory: if that does not fit, it is known at once. A row without a prompt is
    not answered.

    Args:
        model: a causal language model in eval mode.
        tokenizer: the model's tokenizer.
        chats: the rows.
        trained_with: the settings that decide how a text is cut, and whether it gets an end token.
        batch_size: number of rows that are answered together.
        max_new_tokens: length limit of an answer (tokens).
        system: the name of what answers, for the progress.
        console: where progress is shown.

    Returns:
        The answers, in the order of the rows.

    Raises:
        Diverged: if a loss is not finite or not below :data:`BROKEN`.
        OutOfMemory: naming a way out.
    """
    total = len(chats)
    prompts = prompt_ids(chats, tokenizer)
    order = sorted(range(total), key=lambda row: len(prompts[row]))
    batches = [order[begin : begin + batch_size] for begin in range(0, total, batch_size)]
    answers: dict[int, Written] = {}
    bar = new_bar(console)
    try:
        with bar:
            task = bar.add_task(system, total=total, note="answers")
            for batch in reversed(batches):
                written = dict.fromkeys(batch, ("", 0, True))  # of a row without a prompt: nothing was cut off
                asked = [row for row in batch if prompts[row]]
                if asked:
                    found = answer_batch(model, tokenizer, [prompts[row] for row in asked], max_new_tokens)
                    written |= zip(asked, found, strict=True)
                # One row at a time: a loss needs the logits of all tokens, while an answer needs only the last token's.
                for row in batch:
                    loss, trained_tokens = reference_loss(
                        model, tokenizer, chats[row], trained_with.max_length, add_eos=bool(trained_with.eos)
                    )
                    answers[row] = Written(*written[row], loss, trained_tokens)
                bar.advance(task, len(batch))
                if not console.is_terminal:
                    console.print(f"{system} {len(answers):>4}/{total} rows")
                _show_one(console, chats[batch[0]], written[batch[0]][0])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise OutOfMemory(f"out of memory with {batch_size} rows at a time; give a smaller --batch-size") from None
    return [answers[row] for row in range(total)]


def _show_one(console: Console, chat: Chat, answer: str) -> None:
    """Print a question and its answer in one line each, so that the reader sees answers as they come."""
    if answer and chat.messages:
        console.print(f"  ? {question(chat)}", markup=False, highlight=False)
        console.print(f"  > {answer_line(read_reply(answer).text, SHOWN)}", markup=False, highlight=False)


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
