"""Split an answer's text into statements, the labels that cover them, and what in them can be looked up."""

import re
from dataclasses import dataclass, replace

LABELS = re.compile(r"\[(\d+(?:\s*,\s*\d+)*)\]")
"""Labels of documents in a text: ``[1]``, or ``[1, 2]`` for two."""
_BULLET = re.compile(r"^(?P<indent>\s*)(?:[-*•+]|\d+[.)])\s+")
# A bold label before the text of its line: **Umoja:** unity
_BOLD_LABEL = re.compile(r"^\*\*[^*\[]+:\*\*\s+(?=\S)")
_FENCED = re.compile(r"^\s*```.*?(?:^\s*```|\Z)", re.MULTILINE | re.DOTALL)
# A sentence may end inside a quotation or a bracket.
_SENTENCE_END = re.compile(r"(?:(?<=[.!?])|(?<=[.!?][\"'”’)\]]))\s+")
# After these a full stop ends no sentence.
_ABBREVIATED = re.compile(r"(?:^|[\s(.])(?:Dr|Mr|Mrs|Ms|St|Jr|Sr|Rev|Prof|No|vs?|e\.g|i\.e|[A-Z])\.$")
_TO_THE_READER = re.compile(r"(?<!\w)(?:I|[Mm]e|[Mm]y|[Yy]ou|[Yy]our)(?!\w)")
# Whole numbers and decimals, with commas and a dollar; neither the 40 of "the 40s" nor the 7 of "7th" is one.
_NUMBER = re.compile(r"(?<![\w.])\$?(?!\d\ds\b)(\d+(?:,\d{3})*(?:\.\d+)?)(?!\d|(?:th|st|nd|rd)\b)")
_YEAR = re.compile(r"1[5-9]\d\d|20\d\d")
_WORD = re.compile(r"[^\W\d_][\w’'-]*")
# What stands before a word that has its capital from its place: the text's begin, a colon or a dash.
_OPENS = re.compile(r"(?:^|[:–—]|\s-)\W*$")
# Between double quotes, or between single ones that are no apostrophes.
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
        labels: the documents that cover it: its own labels, those of a later sentence of its paragraph, and those of
            the line that introduces its list.
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
    """Find every ``[n]`` of a text, in order; ``[1, 2]`` is two."""
    numbers = ",".join(match[1] for match in LABELS.finditer(text))
    return [int(number) for number in numbers.split(",") if number]


def statements(text: str) -> list[Statement]:
    """Split a text into statements; code between fences, and the bold label that a line begins with, are left out.

    A heading is a line that ends with a colon, or one without a full stop that has a list right below it. The labels
    that cover it also cover the list or the one line below it, and a list under a heading that speaks to the reader
    does not speak of the subject.
    """
    found: list[Statement] = []
    above: list[tuple[int, Statement]] = []  # headings whose lists are not over, each with its indentation
    fresh = False  # whether the line above is a heading
    lines = [line for line in _FENCED.sub("", text).splitlines() if line.strip(" -_*#>")]
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        indent, content = _unbulleted(line)
        while above and above[-1][0] >= indent and not (fresh and indent == -1):
            above.pop()
        own = _sentences(content)
        if not own:
            continue
        for _, heading in above:
            own = [_under(heading, statement) for statement in own]
        last = own[-1]
        ends_open = last.text[-1] not in ".!?"
        list_follows = _unbulleted(following)[0] > indent
        fresh = last.text.endswith(":") or (ends_open and list_follows)
        if fresh:
            above.append((indent, last))
            own[-1] = replace(last, subject=False)
        found += own
    return found


def _under(heading: Statement, statement: Statement) -> Statement:
    """A statement of a list, with the labels of the line that introduces the list."""
    subject = statement.subject and not _to_the_reader(heading.text)
    return replace(statement, labels=(*statement.labels, *heading.labels), subject=subject)


def _unbulleted(line: str) -> tuple[int, str]:
    """Split an item of a list into its indentation and its text without emphasis; -1 for a line that is no item."""
    bullet = _BULLET.match(line)
    indent = -1
    content = line.strip("#> ")
    if bullet:
        indent = len(bullet["indent"])
        content = line[bullet.end() :]
    return indent, _BOLD_LABEL.sub("", content).replace("**", "")


def _sentences(line: str) -> list[Statement]:
    pieces: list[str] = []
    for piece in _SENTENCE_END.split(line.strip()):
        leading = re.match(rf"(?:{LABELS.pattern}\s*)+", piece)
        if pieces and leading:  # labels behind the full stop belong to the sentence before it
            pieces[-1] += " " + leading[0].strip()
            piece = piece[leading.end() :]
        if pieces and _ABBREVIATED.search(pieces[-1]):
            pieces[-1] += " " + piece
        elif piece.strip():
            pieces.append(piece)
    found: list[Statement] = []
    covered: list[int] = []
    for piece in reversed(pieces):  # from the end, because a label covers the sentences before it, too
        covered = labels(piece) + covered
        plain = " ".join(LABELS.sub("", piece).split())
        if not plain:
            continue
        subject = not _to_the_reader(plain) and not plain.rstrip(".").endswith("?")
        found.insert(0, Statement(plain, tuple(covered), subject))
    return found


def _to_the_reader(text: str) -> bool:
    return bool(_TO_THE_READER.search(_QUOTE.sub("", text)))


def items(statement: Statement) -> list[Item]:
    """Find what can be looked up in a statement: every number and quote, and, where it speaks of the subject, names.

    A name is a run of words with a capital. The first word, also after a colon or a dash, is no part of one, as it may
    have its capital from there. A quote has three words or more. A decade in two digits, as in "the 40s", is left out.
    """
    found = [Item("quote", quote) for quote in _quotes(statement.text) if len(quote.split()) >= 3]
    unquoted = _QUOTE.sub(_short_quote, statement.text)
    for match in _NUMBER.finditer(unquoted):
        digits = match[1].replace(",", "")
        kind = "year" if _YEAR.fullmatch(match[1]) else "number"
        found.append(Item(kind, digits))
    if statement.subject:
        found += [Item("name", name) for name in _names(unquoted)]
    return found


def _short_quote(match: re.Match[str]) -> str:
    """Keep a quote of one or two words, which may be a name; take out a longer one, which is looked up as a whole."""
    return match[0] if len(match[0].split()) < 3 else " "


def _names(text: str) -> list[str]:
    runs: list[list[str]] = []
    end = None
    for match in _WORD.finditer(text):
        if not match[0][0].isupper() or _OPENS.search(text[: match.start()]):
            continue
        # Words of one name stand beside each other, or with the full stop of an initial between them.
        if end is not None and text[end : match.start()] in (" ", ". ", "."):
            runs[-1].append(match[0])
        else:
            runs.append([match[0]])
        end = match.end()
    return [" ".join(run) for run in runs]


def _quotes(text: str) -> list[str]:
    return [(match[1] or match[2]).strip(" ,.") for match in _QUOTE.finditer(text)]


class Evidence:
    """The text on which an answer may rest, made ready to look things up in.

    Args:
        text: documents and question.
    """

    def __init__(self, text: str):
        self.words: set[str] = set()
        for word in _WORD.findall(text):
            self.words |= _forms(word)
        self.numbers = {match[1].replace(",", "") for match in _NUMBER.finditer(text)}
        self.numbers |= {_NUMBER_WORDS[word] for word in self.words & _NUMBER_WORDS.keys()}
        self.plain = _plain(text)

    def holds(self, item: Item) -> bool:
        """Tell whether an item is there: a number by value, a name by its words in any order, a quote word for word."""
        if item.kind == "name":
            return all(_forms(word) & (self.words | _TITLES) for word in _WORD.findall(item.text))
        if item.kind == "quote":
            return f" {_plain(item.text)} " in f" {self.plain} "
        return item.text in self.numbers


def _forms(word: str) -> set[str]:
    """List a word's forms: in lower case, without a possessive or plural s, and the parts of a compound."""
    word = re.sub(r"['’]s?$", "", word.lower())
    parts = {word, *word.split("-")}
    return parts | {part[:-1] for part in parts if len(part) > 3 and part.endswith("s")}


def _plain(text: str) -> str:
    """Reduce a text to its words, so that case, punctuation and line breaks do not matter."""
    return " ".join(re.findall(r"\w+", text.lower().replace("’", "'")))
