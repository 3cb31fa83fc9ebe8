"""The four behaviours, a function each: from a held-out row and a reply to a number between 0 and 1, and why.

They read text and know nothing: none of them can tell whether an answer is true. What each does not see stands in its
docstring.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cria_tricks.kwanzaa import statements
from cria_tricks.kwanzaa.prompt import Document, Row
from cria_tricks.kwanzaa.reply import Reply

_REFUSES = (
    r"\bI(?:'m|’m| am)? (?:can(?:no|'|’)t|can not|could not|couldn['’]t|do not have|don['’]t have|do not know|"
    r"don['’]t know|(?:not|un)\s?(?:able|equipped)\b|have no\b|lack\b)",
    r"\bI focus on\b.*,\s*not\b",
    r"\b(?:documents?|sources?|corpus|passages?|texts?)\b.{0,40}\b(?:do|does|did) not "
    r"(?:say|tell|mention|contain|state|hold|answer|give|provide|include|cover|address)",
    r"\b(?:corpus|documents?|sources?)\b.{0,20}\black(?:s|ed)?\b",
    r"\bno (?:relevant )?(?:documents?|sources?|information|data)\b.{0,40}\b(?:found|retrieved|available|given|here)\b",
)
_REFUSAL = re.compile("|".join(_REFUSES), re.IGNORECASE | re.DOTALL)
_PLACEHOLDER = re.compile(r"\[(?:This|Generated) answer\b")
_OPENING = 2
"""Statements in which a refusal says that it is one."""


@dataclass(frozen=True)
class Score:
    """What a scorer found.

    Attributes:
        value: 0 to 1.
        why: counts, and what was found wanting, as plain JSON data.
    """

    value: float
    why: dict[str, Any] = field(default_factory=dict)


def format_compliance(row: Row, reply: Reply) -> Score:
    """Whether the whole reply is one JSON object that keeps the contract.

    Definition: 1 with no violation, else 0. ``why`` names each violation and its field, and says whether an object
    could be read at all; over rows that gives the rate of each.
    Range: 0 or 1.
    Blind to: what stands in the fields. Made-up sources in the right form pass, and so does a confidence of 1 in
    nonsense. Of a key that is there twice only the last counts.
    """
    return Score(
        float(not reply.violations),
        {
            "json": reply.fields is not None,
            "violations": dict(reply.counts()),
            "where": [f"{v.kind}: {v.where}" if v.where else v.kind for v in reply.violations],
        },
    )


def citation_accuracy(row: Row, reply: Reply) -> Score:
    """Whether the labels [n] are right, and whether the statements that need one have one: F1 of the two.

    Definition: a label is right if document n was retrieved and is among the answer's ``sources`` (by its title or
    address; without readable JSON, if it was retrieved). Precision is the share of right labels. A statement needs a
    label if it speaks of the subject and holds a number, a year, a name or a quote, or has a label; it has a right one
    if that stands in it, later in its paragraph, or in the line above its list. Recall is the share of those that have
    one. An answer in which nothing needs a label needs one as a whole if there were documents. A refusal where
    refusing is right needs none.
    Range: 0 to 1; 1 where no label is needed and none is wrong, 0 for an empty text.
    Blind to: whether the cited document says it. Facts without name, number or quote need no label here, nor do
    sentences with I or you; one label at a paragraph's end covers all of it.
    """
    if not reply.text:
        return Score(0.0, {"labels": 0, "right": 0, "needed": 0, "covered": 0, "wrong": [], "uncited": []})
    known = {d.number for d in row.prompt.documents if reply.fields is None or _among(d, reply.sources)}
    cited = statements.labels(reply.text)
    wrong = sorted({label for label in cited if label not in known})
    need: list[statements.Statement] = []
    if not (should_refuse(row) and refuses(reply)):
        parts = statements.statements(reply.text)
        need = [part for part in parts if part.subject and (part.labels or statements.items(part))]
        if not need and row.prompt.documents:
            need = [statements.Statement(" ".join(reply.text.split()), tuple(cited), True)]
    uncited = [part.text for part in need if known.isdisjoint(part.labels)]
    right, covered = sum(label in known for label in cited), len(need) - len(uncited)
    precision = right / len(cited) if cited else 1.0
    recall = covered / len(need) if need else 1.0
    return Score(
        2 * precision * recall / (precision + recall) if precision + recall else 0.0,
        {
            "labels": len(cited),
            "right": right,
            "needed": len(need),
            "covered": covered,
            "wrong": wrong,
            "uncited": uncited,
        },
    )


def grounding(row: Row, reply: Reply) -> Score:
    """Whether what can be looked up in the answer stands in the documents or in the question.

    Definition: the share of its numbers, years, names and quotes that are there: a number by its value (``7`` is there
    where ``seven`` is), a name if all its words are, a quote of three words or more word for word. Numbers and quotes
    are taken from the whole text, names only from statements about the subject.
    Range: 0 to 1; 1 where nothing can be looked up, 0 for an empty text.
    Blind to: what is said of them. "It began in 1955" passes if any document has a 1955. True facts from elsewhere
    count as unsupported, other words for the same as well; an answer that names nothing passes with 1, so read it
    beside the citations.
    """
    if not reply.text:
        return Score(0.0, {"items": 0, "unsupported": []})
    evidence = statements.Evidence(row.prompt.evidence)
    found = [item for part in statements.statements(reply.text) for item in statements.items(part)]
    unsupported = [item for item in found if not evidence.holds(item)]
    return Score(
        1 - len(unsupported) / len(found) if found else 1.0,
        {"items": len(found), "unsupported": [f"{item.kind}: {item.text}" for item in unsupported]},
    )


def refusal(row: Row, reply: Reply) -> Score:
    """Whether it refuses where the data's answer refuses, and answers where that answers.

    Definition: the reference says what is right, in its own fields (see :func:`should_refuse`); the reply is judged by
    its words (see :func:`refuses`). 1 if the two agree, else 0; over rows the four cases make a confusion matrix.
    Range: 0 or 1; an empty text is 0, for it neither answers nor refuses.
    Blind to: what the documents really hold, for it trusts the reference; a refusal in words that it does not know, or
    later than in the second sentence; an answer that says "I cannot" and then answers all the same. Nonsense counts
    as an answer.
    """
    should, did = should_refuse(row), refuses(reply) if reply.text else None
    return Score(float(should == did), {"should": should, "did": did})


SCORERS: dict[str, Callable[[Row, Reply], Score]] = {
    "format": format_compliance,
    "citations": citation_accuracy,
    "grounding": grounding,
    "refusal": refusal,
}
"""The four, by the names they have in reports."""


def should_refuse(row: Row) -> bool:
    """Whether the documents do not hold the answer, as the reference says it.

    In ``integrity.fallback_behavior`` (a refusal, or a question back); where that is left out, in
    ``answer.completeness`` (insufficient data). Not by its sources: a refusal may cite what it did find.
    """
    behaviour = row.reference.said("integrity", "fallback_behavior")
    if behaviour is not None:
        return behaviour in ("refusal", "clarification_requested")
    return row.reference.said("answer", "completeness") == "insufficient_data"


def kind(row: Row) -> str:
    """Say what the data's own answer is: ``placeholder``, ``refusal`` or ``answer``.

    A placeholder announces an answer in brackets and gives none, as in "[This answer would ...]". A refusal is marked
    as one in its own fields (see :func:`should_refuse`); everything else is an answer.
    """
    if _PLACEHOLDER.match(row.reference.text):
        return "placeholder"
    return "refusal" if should_refuse(row) else "answer"


def refuses(reply: Reply) -> bool:
    """Whether a reply's first two statements say that it cannot, or may not, answer, before any cited fact."""
    for part in statements.statements(reply.text)[:_OPENING]:
        if _REFUSAL.search(part.text):
            return True
        if part.subject and part.labels:  # a part of the answer; what follows says what else is not known
            return False
    return False


def _among(document: Document, sources: list[dict[str, Any]]) -> bool:
    for source in sources:
        label, url = source.get("citation_label"), source.get("canonical_url")
        if document.url and url == document.url:
            return True
        if isinstance(label, str) and label and f"{document.title}:".startswith(f"{label.strip()}:"):
            return True
    return False
