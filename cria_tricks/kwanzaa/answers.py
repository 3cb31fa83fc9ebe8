"""Save answers to a file, batch by batch, so that an evaluation that was stopped continues after the last batch."""

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput


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
        BadInput: if the file has another header, or cannot be read or written.
    """

    def __init__(self, path: Path, about: Mapping[str, Any]):
        self.path = path
        self.rows: dict[int, Written] = {}
        if not path.exists():
            atomic_files.write_file(path, json.dumps(dict(about)) + "\n")
            return
        whole = self._whole_lines()
        header = "".join(whole[:1])
        self._refuse_another(header, about)
        try:
            for line in whole[1:]:
                entry = json.loads(line)
                row = entry.pop("row")
                self.rows[row] = Written(**entry)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            number = len(self.rows) + 2  # lines count from 1, and the header is the first
            raise BadInput(f"{path}:{number}: is damaged; remove the file, or name another --out") from None
        # Remove an unfinished line at the end, or the next answer would be appended to it.
        atomic_files.write_file(path, "".join(f"{line}\n" for line in whole))
        self._saved()

    def add(self, answered: Mapping[int, Written]) -> None:
        """Append the answers of a batch, and sync the file to the disk, so that they survive a crash of the machine.

        Raises:
            BadInput: if they cannot be written; the answers before them stay whole.
        """
        lines = [json.dumps({"row": row, **asdict(written)}) + "\n" for row, written in answered.items()]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())  # flush alone leaves the lines in the memory of the operating system
        except OSError as error:
            raise BadInput(
                f"{self.path}: cannot be written: {error.strerror}; make room, then give the same command again: it "
                f"goes on after {len(self.rows)} answers"
            ) from None
        self.rows.update(answered)
        self._saved()

    def _saved(self) -> None:
        """Set what the command says is saved if the user interrupts it."""
        interrupts.now_saved(f"{len(self.rows)} answers are in {self.path}; the same command goes on after them")

    def _whole_lines(self) -> list[str]:
        """Read the lines of the file that end with a newline."""
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{self.path}: cannot be read: {error}; remove it, or name another --out") from None
        return text.split("\n")[:-1]  # the last part is empty, or a line that a killed process left unfinished

    def _refuse_another(self, header: str, about: Mapping[str, Any]) -> None:
        """Refuse a file whose header differs from what decides the answers now."""
        try:
            before = dict(json.loads(header))
        except (ValueError, TypeError, RecursionError):
            before = {}  # not a header, so every field differs
        other = [name for name in about if before.get(name) != about[name]]
        if other:
            raise BadInput(
                f"{self.path}: holds answers that differ in {', '.join(other)}; name another folder with --out, or "
                "remove the file"
            )
