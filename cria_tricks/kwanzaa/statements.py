"""An answer's text, taken apart: statements, the labels that cover them, and what in them can be looked up."""

import re
from dataclasses import dataclass, replace

_LABELS = re.compile(r"\[(\d+(?:\s*,\s*\d+)*)\]")
_BULLET = re.compile(r"^(?P<indent>\s*)(?:[-*•+]|\d+[.)])\s+")
_BOLD_LABEL = re.compile(r"^\*\*[^*\[]+:\*\*\s+(?=\S)")
_FENCED = re.compile(r"^\s*```.*?(?:^\s*```|\Z)", re.MULTILINE | re.DOTALL)
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)\]]))\s+")
_ABBREVIATED = re.compile(r"(?:^|[\s(.])(?:Dr|Mr|Mrs|Ms|St|Jr|Sr|Rev|Prof|No|vs?|e\.g|i\.e|[A-Z])\.$")
_TO_THE_READER = re.compile(r"(?<!\w)(?:I|[Mm]e|[Mm]y|[Yy]ou|[Yy]our)(?!\w)")
_NUMBER = re.compile(r"(?<![\w.])\$?(?!\d\ds\b)(\d+(?:,\d{3})*(?:\.\d+)?)(?!\d|(?:th|st|nd|rd)\b)")
_WORD = re.compile(r"[^\W\d_][\w’'-]*")
_OPENS = re.compile(r"(?:^|[:–—]|\s-)\W*$")
_QUOTE = re.compile(r"[\"“]([^\"“”\n]+)[\"”]|(?<![\w’'])['‘]((?:[^'‘’\n]|(?<=\w)['’](?=\w))+)['’](?!\w)")
_COUNTED = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_NUMBER_WORDS = {word: str(number) for number, word in enumerate(_COUNTED.split(), 1)}
_TITLES = {"dr", "mr", "mrs", "ms", "prof", "rev", "jr", "sr"}


@dataclass(frozen=True)
class Statement:
    """A sentence, or an item of a list.

    Attributes:
        text: without bullet and without labels.
        labels: those that cover it: its own, those of a later sentence of its paragraph, and those of the line that
            introduces its list.
        subject: whether it speaks of the subject: no heading, no question, and not to or of the reader or writer.
    """

    text: str
    labels: tuple[int, ...]
    subject: bool


@dataclass(frozen=True)
class Item:
    """Something in a text that can be looked up.

    Attributes:
        kind: ``number``, ``year``, ``name`` or ``quote``.
        text: as it is written.
    """

    kind: str
    text: str


def labels(text: str) -> list[int]:
    """Every ``[n]`` of a text, in order; ``[1, 2]`` is two."""
    return [int(number) for match in _LABELS.finditer(text) for number in match[1].split(",")]


def statements(text: str) -> list[Statement]:
    """Take a text apart. Code between fences, and the bold label that a line begins with, are left out.

    A heading is a line that ends with a colon, or one that ends like no sentence and has a list right below it. What
    covers it, and whom it speaks to, goes for the list or the one line below it.
    """
    found: list[Statement] = []
    above: list[tuple[int, Statement]] = []  # headings that are open, each with its indentation
    fresh = False  # whether the line above is one
    lines = [line for line in _FENCED.sub("", text).splitlines() if line.strip(" -_*#>")]
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        indent, content = _unbulleted(line)
        while above and above[-1][0] >= indent and not (fresh and indent == -1):
            above.pop()
        own = _sentences(content)
        if not own:
            continue
        for _, heading in above:
            own = [
                replace(s, labels=(*s.labels, *heading.labels), subject=s.subject and not _to_the_reader(heading.text))
                for s in own
            ]
        fresh = own[-1].text.endswith(":") or (own[-1].text[-1] not in ".!?" and _unbulleted(following)[0] > indent)
        if fresh:
            above.append((indent, own[-1]))
            own[-1] = replace(own[-1], subject=False)
        found += own
    return found


def _unbulleted(line: str) -> tuple[int, str]:
    """How far an item is indented, -1 for what is none, and the line without bullet and emphasis."""
    bullet = _BULLET.match(line)
    content = line[bullet.end() :] if bullet else line.strip("#> ")
    content = _BOLD_LABEL.sub("", content).replace("**", "")
    return (len(bullet["indent"]) if bullet else -1), content


def _sentences(line: str) -> list[Statement]:
    pieces: list[str] = []
    for piece in _SENTENCE_END.split(line.strip()):
        leading = re.match(rf"(?:{_LABELS.pattern}\s*)+", piece)
        if pieces and leading:  # labels behind the full stop belong to the sentence before it
            pieces[-1] += " " + leading[0].strip()
            piece = piece[leading.end() :]
        if pieces and _ABBREVIATED.search(pieces[-1]):
            pieces[-1] += " " + piece
        elif piece.strip():
            pieces.append(piece)
    found: list[Statement] = []
    covered: list[int] = []
    for piece in reversed(pieces):
        covered = labels(piece) + covered
        plain = " ".join(_LABELS.sub("", piece).split())
        if not plain:
            continue
        subject = not _to_the_reader(plain) and not plain.rstrip(".").endswith("?")
        found.insert(0, Statement(plain, tuple(covered), subject))
    return found


def _to_the_reader(text: str) -> bool:
    return bool(_TO_THE_READER.search(_QUOTE.sub("", text)))


def items(statement: Statement) -> list[Item]:
    """What can be looked up in a statement: every number and quote, and, where it speaks of the subject, names.

    A name is a run of words with a capital. The first word, also after a colon or a dash, is no part of one, as it may
    have its capital from there. A quote has three words or more. A decade in two digits, as in "the 40s", is left out.
    """
    found = [Item("quote", quote) for quote in _quotes(statement.text) if len(quote.split()) >= 3]
    unquoted = _QUOTE.sub(lambda match: match[0] if len(match[0].split()) < 3 else " ", statement.text)
    for match in _NUMBER.finditer(unquoted):
        digits = match[1].replace(",", "")
        kind = "year" if re.fullmatch(r"1[5-9]\d\d|20\d\d", match[1]) else "number"
        found.append(Item(kind, digits))
    return found + [Item("name", name) for name in _names(unquoted)] if statement.subject else found


def _names(text: str) -> list[str]:
    runs: list[list[str]] = []
    end = None
    for match in _WORD.finditer(text):
        if not match[0][0].isupper() or _OPENS.search(text[: match.start()]):
            continue
        between = text[end : match.start()] if end is not None else "-"
        if between in (" ", ". ", "."):
            runs[-1].append(match[0])
        else:
            runs.append([match[0]])
        end = match.end()
    return [" ".join(run) for run in runs]


def _quotes(text: str) -> list[str]:
    return [(match[1] or match[2]).strip(" ,.") for match in _QUOTE.finditer(text)]


class Evidence:
    """What may be relied on, made ready to look things up in.

    Args:
        text: documents and question.
    """

    def __init__(self, text: str):
        self.words = {part for word in _WORD.findall(text) for part in _forms(word)}
        self.numbers = {match[1].replace(",", "") for match in _NUMBER.finditer(text)}
        self.numbers |= {_NUMBER_WORDS[word] for word in self.words & _NUMBER_WORDS.keys()}
        self.plain = _plain(text)

    def holds(self, item: Item) -> bool:
        """Whether an item is there: a number by its value, a name by its words in any order, a quote word for word."""
        if item.kind == "name":
            return all(_forms(word) & (self.words | _TITLES) for word in _WORD.findall(item.text))
        if item.kind == "quote":
            return f" {_plain(item.text)} " in f" {self.plain} "
        return item.text in self.numbers


def _forms(word: str) -> set[str]:
    """A word as it may be met: in lower case, without a possessive or plural s, and the parts of a compound."""
    word = re.sub(r"['’]s?$", "", word.lower())
    parts = {word, *word.split("-")}
    return parts | {part[:-1] for part in parts if len(part) > 3 and part.endswith("s")}


def _plain(text: str) -> str:
    """Words alone, so that case, punctuation and line breaks do not matter."""
    return " ".join(re.findall(r"\w+", text.lower().replace("’", "'")))
