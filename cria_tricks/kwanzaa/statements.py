"""Split the text of an answer into statements, and find their labels and the items that can be looked up."""

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
# After these abbreviations a full stop does not end a sentence.
_ABBREVIATED = re.compile(r"(?:^|[\s(.])(?:Dr|Mr|Mrs|Ms|St|Jr|Sr|Rev|Prof|No|vs?|e\.g|i\.e|[A-Z])\.$")
# Words that speak of the writer or to the reader.
_TO_THE_READER = re.compile(r"(?<!\w)(?:I|[Mm]e|[Mm]y|[Yy]ou|[Yy]our)(?!\w)")
# Whole numbers and decimals, also with commas or a dollar sign; but not the 40 of "the 40s", and not the 7 of "7th".
_NUMBER = re.compile(r"(?<![\w.])\$?(?!\d\ds\b)(\d+(?:,\d{3})*(?:\.\d+)?)(?!\d|(?:th|st|nd|rd)\b)")
_YEAR = re.compile(r"1[5-9]\d\d|20\d\d")
_WORD = re.compile(r"[^\W\d_][\w’'-]*")
# What stands before a word that is capitalised because of its position: the text's beginning, a colon or a dash.
_OPENS = re.compile(r"(?:^|[:–—]|\s-)\W*$")
# A text between double quotes, or between single quotes that are not apostrophes.
_QUOTE = re.compile(r"[\"“]([^\"“”\n]+)[\"”]|(?<![\w’'])['‘]((?:[^'‘’\n]|(?<=\w)['’](?=\w))+)['’](?!\w)")
_COUNTED = (
    "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)
_NUMBER_WORDS = {word: str(number) for number, word in enumerate(_COUNTED.split(), 1)}
# A name may have one of these titles in the answer even if the documents leave the title out.
_TITLES = {"dr", "mr", "mrs", "ms", "prof", "rev", "jr", "sr"}


@dataclass(frozen=True)
class Statement:
    """A sentence, or an item of a list.

    Attributes:
        text: its text, without bullet and without labels.
        labels: the labels that cover it: its own, those of later sentences in its paragraph, and those of the line that
            introduces its list.
        subject: whether it is about the subject: not a heading, not a question, and not about the reader or the writer.
    """

    text: str
    labels: tuple[int, ...]
    subject: bool


@dataclass(frozen=True)
class Item:
    """Something in an answer that can be looked up in the documents.

    Attributes:
        kind: ``number``, ``year``, ``name`` or ``quote``.
        text: as it is written; a number without its commas and dollar sign.
    """

    kind: str
    text: str


def labels(text: str) -> list[int]:
    """List the numbers of all labels ``[n]`` in a text, in order; ``[1, 2]`` gives two numbers."""
    numbers = ",".join(match[1] for match in LABELS.finditer(text))
    return [int(number) for number in numbers.split(",") if number]


def statements(text: str) -> list[Statement]:
    """Split a text into statements, without fenced code, and without the bold label at the beginning of a line.

    A heading is a line that ends with a colon, or a line without a full stop that has a list right below it. The labels
    that cover a heading also cover the list below it, or the one line below it. A list under a heading that speaks to
    the reader is not about the subject.
    """
    found: list[Statement] = []
    above: list[tuple[int, Statement]] = []  # the headings above this line whose lists go on, with their indentations
    fresh = False  # whether the line right above is a heading
    # Lines of nothing but markup, such as a horizontal rule, are left out.
    lines = [line for line in _FENCED.sub("", text).splitlines() if line.strip(" -_*#>")]
    for line, following in zip(lines, [*lines[1:], ""], strict=False):
        indent, content = _unbulleted(line)
        # A list ends at a line that is not indented deeper than its heading. But one plain line right below a heading
        # still belongs to the heading.
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
    """Return a statement of a list, with the labels of the heading above the list added."""
    subject = statement.subject and not _to_the_reader(heading.text)
    return replace(statement, labels=(*statement.labels, *heading.labels), subject=subject)


def _unbulleted(line: str) -> tuple[int, str]:
    """Return the indentation of a list item, or -1 for a line that is no item, and the text without bullet and bold."""
    bullet = _BULLET.match(line)
    indent = -1
    content = line.strip("#> ")
    if bullet:
        indent = len(bullet["indent"])
        content = line[bullet.end() :]
    return indent, _BOLD_LABEL.sub("", content).replace("**", "")


def _sentences(line: str) -> list[Statement]:
    """Split a line into sentences, each covered by its own labels and by those of the sentences after it."""
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
    """Tell whether a text, apart from its quotes, speaks of the writer or to the reader."""
    return bool(_TO_THE_READER.search(_QUOTE.sub("", text)))


def items(statement: Statement) -> list[Item]:
    """List what can be looked up in a statement: numbers, years, quotes, and, if it is about the subject, names.

    A name is a run of capitalised words. The first word of the statement, or after a colon or a dash, is never part of
    a name, because it may be capitalised only for its position. A quote has three words or more. A decade in two
    digits, as in "the 40s", is left out.
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
    """Keep a quote of one or two words, which may be a name; remove a longer one, which is looked up as a whole."""
    return match[0] if len(match[0].split()) < 3 else " "


def _names(text: str) -> list[str]:
    """List the runs of capitalised words."""
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
    """The text that may support an answer, prepared for looking up items.

    Args:
        text: the documents and the question.

    Attributes:
        words: the forms of all its words.
        numbers: its numbers in digits, also those that it writes as words.
        plain: its words in lower case, joined by spaces.
    """

    def __init__(self, text: str):
        self.words: set[str] = set()
        for word in _WORD.findall(text):
            self.words |= _forms(word)
        self.numbers = {match[1].replace(",", "") for match in _NUMBER.finditer(text)}
        self.numbers |= {_NUMBER_WORDS[word] for word in self.words & _NUMBER_WORDS.keys()}
        self.plain = _plain(text)

    def holds(self, item: Item) -> bool:
        """Tell whether the text contains an item.

        A number is compared by its value, a name by its words in any order, and a quote word for word.
        """
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
