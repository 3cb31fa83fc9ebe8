"""Name the kind of a single row, for a look at a data set whose rows need not all keep the answer contract."""

from cria_tricks.data.rows import Chat
from cria_tricks.kwanzaa.prompt import read_rows
from cria_tricks.kwanzaa.reply import read_reply
from cria_tricks.kwanzaa.scores import kind

EMPTY = "empty answer"
"""The kind of a row whose answer is a JSON object with an ``answer`` that holds no text."""


def kind_and_answer(chat: Chat) -> tuple[str, str]:
    """Return the kind of a row, and the text of its answer without the JSON around it.

    Returns:
        The kind is ``answer``, ``refusal`` or ``placeholder`` (:func:`cria_tricks.kwanzaa.scores.kind`) or
        :data:`EMPTY` for a row that keeps the answer contract; for all other rows ``chat``, ``completion`` or ``text``.
    """
    if not chat.messages or chat.messages[-1]["role"] != "assistant":
        return chat.kind, chat.answer
    reply = read_reply(chat.answer)
    if reply.fields is None or "answer" not in reply.fields:
        return chat.kind, chat.answer
    if not reply.text:
        return EMPTY, ""
    [row] = read_rows([chat])
    return kind(row), reply.text
