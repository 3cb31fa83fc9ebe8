"""What an adapter was trained on, so that an evaluation can tell what it may know by heart."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cria_tricks.adapter.folder import RECIPE
from cria_tricks.common.errors import BadInput
from cria_tricks.data import sources
from cria_tricks.kwanzaa.prompt import QARow, read_rows
from cria_tricks.kwanzaa.reply import Reply
from cria_tricks.recipe import from_toml

SEEN = "the question is in the training rows"
UNSEEN = "the question is not in the training rows"


@dataclass(frozen=True)
class Training:
    """The questions and the answers of the training rows, in lower case and with single spaces."""

    questions: frozenset[str]
    answers: frozenset[str]

    def group(self, row: QARow) -> str:
        """Tell whether the question of a row was trained on, too: :data:`SEEN` or :data:`UNSEEN`."""
        return SEEN if _plain(row.prompt.query) in self.questions else UNSEEN

    def holds(self, reply: Reply) -> bool:
        """Tell whether a reply has exactly the text of a training answer."""
        return bool(reply.text) and _plain(reply.text) in self.answers


def read_training(folder: Path, say: Callable[[str], None]) -> Training | None:
    """Read the training rows of an adapter again, as its recipe names them; ``None`` if they are not at hand.

    Args:
        folder: the folder of the adapter, or of a whole model.
        say: called with the reason if they are not at hand.
    """
    if not (folder / RECIPE).is_file():
        return None
    data = from_toml(folder / RECIPE).data
    if data.stream:
        return None
    try:
        rows = read_rows(sources.find(data.train, "train").rows)
    except BadInput as error:
        say(f"note: which questions are in the training rows is not told: {error}")
        return None
    return Training(
        frozenset(_plain(row.prompt.query) for row in rows), frozenset(_plain(row.reference.text) for row in rows)
    )


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()
