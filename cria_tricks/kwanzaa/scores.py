"""Score a reply to a held-out row for four behaviours: each scorer returns a number from 0 to 1, and the reasons.

The scorers compare texts, so none of them can tell whether an answer is true. Each docstring says what its scorer
cannot see, under "Blind to".
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cria_tricks.data.rows import Chat
from cria_tricks.kwanzaa import statements
from cria_tricks.kwanzaa.contract import Reply, read_reply
from cria_tricks.kwanzaa.prompt import QARow, read_rows

_REFUSES = (
    # I cannot, I'm not able, I do not know, I lack ...
    r"\bI(?:'m|’m| am)? (?:can(?:no|'|’)t|can not|could not|couldn['’]t|do not have|don['’]t have|do not know|"
    r"don['’]t know|(?:not|un)\s?(?:able|equipped)\b|have no\b|lack\b)",
    # I focus on ..., not on ...
    r"\bI focus on\b.*,\s*not\b",
    # The documents do not say ...
    r"\b(?:documents?|notes?|sources?|corpus|passages?|texts?)\b.{0,40}\b(?:do|does|did) not "
    r"(?:say|tell|mention|name|contain|state|hold|answer|give|provide|include|cover|address)",
    # My corpus lacks ...
    r"\b(?:corpus|documents?|sources?)\b.{0,20}\black(?:s|ed)?\b",
    # No relevant documents were found.
    r"\bno (?:relevant )?(?:documents?|sources?|information|data)\b.{0,40}\b(?:found|retrieved|available|given|here)\b",
)
_REFUSAL = re.compile("|".join(_REFUSES), re.IGNORECASE | re.DOTALL)
_PLACEHOLDER = re.compile(r"\[(?:This|Generated) answer\b")
EMPTY = "empty answer"
"""The kind of a row whose answer is a JSON object with an ``answer`` that holds no text."""
_OPENING = 2
"""A refusal must say that it is one within this many statements from the beginning: one polite sentence may come first.
Later, "I cannot" only limits an answer."""


@dataclass(frozen=True)
class Score:
    """A score from 0 to 1, and its reasons as JSON data: counts, and what was found wrong or missing."""

    value: float
    why: dict[str, Any] = field(default_factory=dict)


def format_compliance(row: QARow, reply: Reply) -> Score:
    """Check that the whole reply is one JSON object that keeps the answer contract (``kwanzaa/contract.py``).

    Definition: 1 without any violation, else 0. ``why`` names each violation and its field, and says whether a JSON
    object could be read at all. The summary counts these over all rows.
    Range: 0 or 1.
    Blind to: the content of the fields. Made-up sources in the right form pass, and so does a confidence of 1 in
    nonsense. If a key is there twice, only the last one counts.
    """
    where = []
    for violation in reply.violations:
        place = f": {violation.where}" if violation.where else ""
        where.append(violation.kind + place)
    why = {"json": reply.fields is not None, "violations": dict(reply.counts()), "where": where}
    return Score(float(not reply.violations), why)


def citation_accuracy(row: QARow, reply: Reply) -> Score:
    """Check that the labels [n] are right, and that each statement that needs a label has one: the F1 score of both.

    Definition: a label is right if document n was retrieved, and the answer's ``sources`` list it by its title or URL.
    (If no JSON could be read, it is enough that document n was retrieved.) Precision is the share of right labels. A
    label covers its own statement, those before it in the paragraph, and the list below its line. A statement needs a
    label if it is about the subject, and contains a number, a year, a name or a quote. It also needs one if a label
    covers it, right or wrong: a statement with a source is meant as a fact. Recall is the share of statements that a
    right label covers, among those that need one. If no statement needs a label, but documents were retrieved, the
    answer as a whole needs one; else a vague answer would get 1 for citing nothing. A refusal needs none, if refusing
    is right.
    Range: 0 to 1; 1 if no label is needed and none is wrong, 0 for an empty text.
    Blind to: whether the cited document says what the statement says. A fact without a name, number or quote needs no
    label here, and neither does a sentence with I or you. One label at the end of a paragraph covers all of it.
    """
    if not reply.text:
        return Score(0.0, {"labels": 0, "right": 0, "needed": 0, "covered": 0, "wrong": [], "uncited": []})
    documents = row.documents
    if reply.fields is not None:  # plain prose has no list of sources
        documents = tuple(one for one in documents if any(map(one.is_named_by, reply.sources)))
    known = {document.number for document in documents}
    cited = statements.labels(reply.text)
    need = _need_a_label(row, reply)
    uncited = [part.text for part in need if known.isdisjoint(part.labels)]
    right = sum(label in known for label in cited)
    covered = len(need) - len(uncited)
    precision = _share(right, len(cited))
    recall = _share(covered, len(need))
    f1 = 0.0
    if precision + recall:
        f1 = 2 * precision * recall / (precision + recall)
    why = {
        "labels": len(cited),
        "right": right,
        "needed": len(need),
        "covered": covered,
        "wrong": sorted(set(cited) - known),
        "uncited": uncited,
    }
    return Score(f1, why)


def _need_a_label(row: QARow, reply: Reply) -> list[statements.Statement]:
    """List the statements that need a label; if none does, but there were documents, the answer is one statement."""
    if should_refuse(row) and refuses(reply):
        return []
    parts = statements.statements(reply.text)
    need = [part for part in parts if part.subject and (part.labels or statements.items(part))]
    if not need and row.documents:
        whole = " ".join(reply.text.split())
        return [statements.Statement(whole, tuple(statements.labels(reply.text)), subject=True)]
    return need


def _share(part: int, total: int) -> float:
    """Return a share of a total; 1 if the total is 0, because then nothing is missing."""
    return part / total if total else 1.0


def grounding(row: QARow, reply: Reply) -> Score:
    """Check that the numbers, years, names and quotes of the answer are in the documents or in the question.

    Definition: the share of these items that are there. A number is compared by its value (``7`` is there if ``seven``
    is), a name is there if all its words are, and a quote of three words or more must be there word for word. Numbers
    and quotes are taken from the whole text, names only from statements about the subject, because headings and remarks
    to the reader have capital letters and claim nothing.
    Range: 0 to 1; 1 if there are no such items, 0 for an empty text.
    Blind to: what the answer says about the items. "It began in 1955" passes if any document contains 1955. True facts
    from elsewhere count as unsupported, and so does the same fact in other words. An answer without any item gets 1, so
    read this score together with the citations.
    """
    if not reply.text:
        return Score(0.0, {"items": 0, "unsupported": []})
    evidence = statements.Evidence(row.evidence)
    found: list[statements.Item] = []
    for part in statements.statements(reply.text):
        found += statements.items(part)
    unsupported = [f"{item.kind}: {item.text}" for item in found if not evidence.holds(item)]
    value = 1.0
    if found:
        value = 1 - len(unsupported) / len(found)
    return Score(value, {"items": len(found), "unsupported": unsupported})


def refusal(row: QARow, reply: Reply) -> Score:
    """Check that the reply refuses if the data's own answer refuses, and answers if that one answers.

    Definition: the reference decides what is right, by its fields (see :func:`should_refuse`). The reply is judged by
    its words (see :func:`refuses`), because a base often writes no JSON, and a reply may refuse in its fields and
    answer in its text. The score is 1 if the two agree, else 0. Counted over all rows, the four cases make a confusion
    matrix.
    Range: 0 or 1; an empty text gets 0, because it neither answers nor refuses.
    Blind to: what the documents really contain, because it trusts the reference. It does not recognise a refusal in
    unknown words, or after the second statement. An answer that says "I cannot" and then answers all the same counts
    as a refusal. Nonsense counts as an answer.
    """
    should = should_refuse(row)
    did = None  # equal to neither True nor False
    if reply.text:
        did = refuses(reply)
    return Score(float(should == did), {"should": should, "did": did})


SCORERS: dict[str, Callable[[QARow, Reply], Score]] = {
    "format": format_compliance,
    "citations": citation_accuracy,
    "grounding": grounding,
    "refusal": refusal,
}
"""The four scorers, by the names that they have in reports."""


def should_refuse(row: QARow) -> bool:
    """Tell whether the reference says that the documents do not contain the answer.

    It says so in ``integrity.fallback_behavior`` (a refusal, or a question to the user), or, if that field is left out,
    in ``answer.completeness`` (insufficient data). Its sources do not count, because a refusal may cite what it found.
    """
    behaviour = row.reference.said("integrity", "fallback_behavior")
    if behaviour is not None:
        return behaviour in ("refusal", "clarification_requested")
    return row.reference.said("answer", "completeness") == "insufficient_data"


def kind(row: QARow) -> str:
    """Return the kind of the data's own answer: ``placeholder``, ``refusal`` or ``answer``.

    A placeholder gives no answer (see :func:`is_placeholder`). A refusal is marked as one in its own fields (see
    :func:`should_refuse`); everything else is an answer.
    """
    if is_placeholder(row.reference):
        return "placeholder"
    if should_refuse(row):
        return "refusal"
    return "answer"


def kind_and_answer(chat: Chat) -> tuple[str, str]:
    """Return the kind of a row of any data, and the text of its answer without the JSON around it.

    Returns:
        The kind is that of :func:`kind`, or :data:`EMPTY`, for a row that keeps the answer contract; for all other rows
        ``chat``, ``completion`` or ``text``.
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


def is_placeholder(reply: Reply) -> bool:
    """Tell whether a reply announces an answer in brackets and gives none, as in "[This answer would ...]"."""
    return _PLACEHOLDER.match(reply.text) is not None


def refuses(reply: Reply) -> bool:
    """Tell whether a reply refuses: one of its first two statements says so, and no cited fact comes before it."""
    for part in statements.statements(reply.text)[:_OPENING]:
        if _REFUSAL.search(part.text):
            return True
        if part.subject and part.labels:  # a cited fact: the reply answers, and may go on with what is not known
            return False
    return False
