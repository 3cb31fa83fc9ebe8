"""Filter training rows one by one: by their length, their language, and whether they leak evaluation rows."""

from collections.abc import Callable, Sequence
from typing import Any

from cria_tricks.common.errors import BadInput
from cria_tricks.data.counts import LEAK, LEAK_KEPT, READ, Tally
from cria_tricks.data.duplicates import Guard
from cria_tricks.data.rows import Chat
from cria_tricks.settings import Data

LOOKED_AT = 4000
"""How many characters of a row, from its beginning, are used to detect its language."""


class RowFilter:
    """Filter rows by the recipe's ``data`` fields, and by whether they leak evaluation rows.

    Args:
        settings: the recipe's ``data`` fields.
        held_out: the evaluation rows.
        say: prints one sentence, when the first leaked row is found and kept (``leakage="warn"``).

    Raises:
        BadInput: for a language that cannot be detected.
    """

    def __init__(self, settings: Data, held_out: Sequence[Chat], say: Callable[[str], None] = lambda sentence: None):
        self.settings = settings
        self.say = say
        self.guard: Guard | None = None
        if held_out and settings.leakage != "ignore":
            self.guard = Guard(held_out)
        self.language: Language | None = None
        if settings.language:
            self.language = Language(settings.language)
        self.first_leak = ""

    def keeps(self, row: Chat, tally: Tally) -> bool:
        """Return whether a row passes the filters and the leakage check, and count it."""
        tally.count(READ, row)
        reason = self._unfit(row)
        if reason:
            tally.count(reason, row)
        return not reason and self.may_be_trained(row, tally)

    def may_be_trained(self, row: Chat, tally: Tally) -> bool:
        """Return whether a row may be trained on, by the leakage check only.

        A row that is similar to an evaluation row is left out with ``leakage="drop"``, and kept but counted with
        ``leakage="warn"``. Augmented copies pass only this check, not the filters.

        Raises:
            BadInput: for such a row with ``leakage="error"``.
        """
        leak = self.guard.find(row) if self.guard else None
        if leak is None:
            return True
        said = f"{leak.row} is nearly {leak.held_out} (similarity {leak.similarity:.2f})"
        if leak.same:
            said = f"{leak.row} is {leak.held_out}"
        elif leak.similarity == 1:
            said = f"{leak.row} contains {leak.held_out}, or is part of it"
        if self.settings.leakage == "error":
            raise BadInput(f"data.leakage=error: {said}; take it out of one of the two, or set data.leakage=drop")
        if self.settings.leakage == "drop":
            tally.count(LEAK, row)
            return False
        tally.count(LEAK_KEPT, row)
        if not self.first_leak:  # print only the first; the report has the count
            self.first_leak = said
            self.say(said)
        return True

    def _unfit(self, row: Chat) -> str:
        words = len(row.content.split())
        if words < self.settings.min_words:
            return "shorter than data.min_words"
        if self.settings.max_words and words > self.settings.max_words:
            return "longer than data.max_words"
        if self.language and not self.language.is_of(row.content):
            return "in another language"
        return ""


class Language:
    """Detect whether a text is in one language, by py3langid.

    Args:
        code: the language's ISO 639-1 code, e.g. ``"en"``.

    Raises:
        BadInput: if py3langid does not know the language.
    """

    def __init__(self, code: str):
        # It takes a while to import, and only a filter by language needs it.
        import py3langid.langid

        self.code = code
        self.identifier: Any = py3langid.langid.LanguageIdentifier.from_model_file(py3langid.langid.MODEL_FILE)
        if code not in self.identifier.labels:
            known = ", ".join(sorted(self.identifier.labels))
            raise BadInput(f"data.language={code}: cannot be told from others; there are {known}")

    def is_of(self, text: str) -> bool:
        return self.identifier.classify(text[:LOOKED_AT])[0] == self.code
