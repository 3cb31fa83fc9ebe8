"""The system prompt that shows the answer contract, and the rows that get it (``data.contract``)."""

from dataclasses import replace

from cria_tricks.common.errors import BadInput
from cria_tricks.data.rows import Chat

CONTRACT = (
    "Answer only from the documents and cite them as [1]. If they lack the answer, say so. Reply with JSON only: "
    '{"version":"kwanzaa.answer.v1","answer":{"text":"","completeness":"complete or insufficient_data"},'
    '"sources":[{"citation_label":"","canonical_url":"","source_org":"","year":0,"content_type":"","license":"",'
    '"namespace":"","doc_id":"","chunk_id":""}],"retrieval_summary":{"query":"","top_k":1,"namespaces":[""],'
    '"results":[]},"unknowns":{"unsupported_claims":[],"missing_context":[],"clarifying_questions":[]}}'
)
"""A system prompt that shows every required field of the contract, so that an untrained model can keep it, too."""


def with_contract(chat: Chat) -> Chat:
    """Return a chat with :data:`CONTRACT` as its system message, in place of its own if it has one.

    Raises:
        BadInput: for a completion or a text, which has no place for a system message.
    """
    if not chat.messages:
        raise BadInput(f"data.contract=true: {chat.where}: is no chat, so it has no system prompt; set it to false")
    turns = [turn for turn in chat.messages if turn["role"] != "system"]
    messages = ({"role": "system", "content": CONTRACT}, *turns)
    later = len(messages) - len(chat.messages)  # 1 if it had no system message
    return replace(chat, messages=messages, untrained=tuple(turn + later for turn in chat.untrained))
