"""Choose the evaluation rows that are answered during training (``eval.samples``), and cut texts to one line."""

from collections.abc import Sequence

from cria_tricks.common.errors import BadInput
from cria_tricks.data.rows import Chat, marked_question


def with_prompt(chats: Sequence[Chat]) -> list[int]:
    """Return the numbers of the rows that have a prompt, from 0; a text has none, nor has a chat that begins itself."""
    return [number for number, chat in enumerate(chats) if prompt_of(chat)]


def prompt_of(chat: Chat) -> str:
    """Return the last turn before the answer, or the text before the completion; empty for a row without a prompt."""
    if chat.before_answer:
        return chat.before_answer[-1]["content"]
    return chat.prompt


def question(chat: Chat) -> str:
    """Return what a prompt asks, in one line: the question that it marks, else its last line."""
    prompt = prompt_of(chat).strip()
    marked = marked_question(prompt)
    if marked:
        return one_line(marked[1])
    return one_line(prompt.rpartition("\n")[2])


def check(asked: int, chats: Sequence[Chat]) -> list[str]:
    """Refuse ``eval.samples`` if no evaluation row has a prompt, and warn if fewer rows than asked for have one.

    Args:
        asked: the value of ``eval.samples``.
        chats: the evaluation rows.

    Raises:
        BadInput: if no row has a prompt.
    """
    found = len(with_prompt(chats))
    if asked and not found:
        raise BadInput(
            f"eval.samples={asked}: no row of data.eval has a prompt that could be answered; set eval.samples=0, or "
            "take rows with messages, or with prompt and completion"
        )
    if found < asked:
        return [f"eval.samples={asked}: only {found} rows of data.eval have a prompt"]
    return []


def answer_line(answer: str, width: int) -> str:
    """Write an answer in one line, cut to a width [characters]; say so if there is nothing to see."""
    return one_line(answer, width) or "(nothing but white space)"


def one_line(text: str, width: int = 0) -> str:
    """Write a text in one line without control characters, cut to a width [characters]; 0: whole.

    Examples:
        >>> one_line("two\\nlines of text", 10)
        'two lines…'
    """
    words = " ".join(text.split())
    line = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in words)
    if width and len(line) > width:
        return line[: width - 1].rstrip() + "…"
    return line
