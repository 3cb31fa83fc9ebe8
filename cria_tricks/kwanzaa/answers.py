"""Save answers to a file, batch by batch, so that an evaluation that was stopped continues after the last batch."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput
from cria_tricks.settings import BATCH, NEW_TOKENS


@dataclass(frozen=True)
class Settings:
    """The settings for generating answers.

    Attributes:
        batch_size: number of rows that are answered together.
        max_new_tokens: length limit of an answer (tokens).
        base: folder or name of the base model, if it is no longer where the adapter's config says.
        other_base: whether the base may be another one than the adapter was trained over.
        contract: whether every row gets the system prompt that shows the answer contract. ``None``: as the adapter was
            trained (its ``data.contract``).
        packed: whether a base that was quantised in training stays packed.
    """

    batch_size: int = BATCH
    max_new_tokens: int = NEW_TOKENS
    base: str | Path | None = None
    other_base: bool = False
    contract: bool | None = None
    packed: bool = False


@dataclass(frozen=True)
class Written:
    """A model's answer to one row, and the model's loss on the row's own answer, the reference.

    Attributes:
        text: the model's answer; empty for a row without a prompt, such as a text.
        tokens: length of the answer with its end token (tokens); 0 for a row without a prompt.
        ended: whether the model ended the answer itself, before the allowed length.
        loss: loss of the reference, summed over its trained tokens (nats).
        trained: number of these tokens.
    """

    text: str
    tokens: int
    ended: bool
    loss: float
    trained: int


class Answers:
    """The answers of one system in a file: a header that says what made them, and then a line for each row.

    Args:
        path: ``answers-SYSTEM.jsonl``.
        about: the header: everything that decides the answers, such as model, prompts and settings.

    Attributes:
        rows: the answers so far, by row number.

    Raises:
        BadInput: if the file has another header, or is damaged.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]):
        self.path = path
        self.rows: dict[int, Written] = {}
        if not path.exists():
            atomic_files.write_file(path, json.dumps(dict(about)) + "\n")
            return
        try:
            # The last part is empty, or a line that a killed process left unfinished.
            header, *lines = path.read_text(encoding="utf-8").split("\n")[:-1]
            before = dict(json.loads(header))
            for entry in map(json.loads, lines):
                row = entry.pop("row")
                self.rows[row] = Written(**entry)
        except OSError as error:
            raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise BadInput(f"{path}: is damaged; remove the file, or name another --out") from None
        other = [name for name in about if before.get(name) != about[name]]
        if other:
            raise BadInput(
                f"{path}: holds answers that differ in {', '.join(other)}; name another folder with --out, or "
                "remove the file"
            )
        # Remove an unfinished line at the end, or the next answer would be appended to it.
        atomic_files.write_file(path, "".join(f"{line}\n" for line in [header, *lines]))
        self._saved()

    def add(self, answered: Mapping[int, Written]) -> None:
        """Append the answers of a batch, and sync the file to the disk, so that they survive a crash of the machine."""
        lines = [json.dumps({"row": row, **asdict(written)}) + "\n" for row, written in answered.items()]
        with atomic_files.unwritten_in_one_line(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())  # flush alone leaves the lines in the memory of the operating system
        self.rows.update(answered)
        self._saved()

    def _saved(self) -> None:
        """Set what the command says is saved if the user interrupts it."""
        interrupts.now_saved(f"{len(self.rows)} answers are in {self.path}; the same command goes on after them")
