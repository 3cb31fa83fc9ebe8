"""Keep answers in a file: every finished batch is written at once, and a second start goes on after it."""

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
    """A model's answer to one row, and its loss on the reference.

    Attributes:
        text: the model's answer; empty where nothing was asked, because the row is a text.
        tokens: length of the answer with its end token (tokens); 0 where nothing was asked.
        ended: whether the model ended it, before the longest answer that was allowed.
        loss: sum over the reference's trained tokens (nats).
        trained: number of these tokens.
    """

    text: str
    tokens: int
    ended: bool
    loss: float
    trained: int


class Answers:
    """A system's answers on disk: the first line says whose they are, then there is one line for each row.

    Args:
        path: ``answers-SYSTEM.jsonl``.
        about: everything that decides the answers: model, prompts, settings.

    Attributes:
        rows: the answers that are there so far, by the row's number.

    Raises:
        BadInput: if the file holds answers of something else, or cannot be read or written.
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
            number = len(self.rows) + 2
            raise BadInput(f"{path}:{number}: is damaged; remove the file, or name another --out") from None
        atomic_files.write_file(path, "".join(f"{line}\n" for line in whole))
        self._saved()

    def add(self, answered: Mapping[int, Written]) -> None:
        """Write a batch through to the disk, so that it survives a crash of the machine.

        Raises:
            BadInput: if it cannot be written; what was there before is whole.
        """
        lines = [json.dumps({"row": row, **asdict(written)}) + "\n" for row, written in answered.items()]
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())  # flushing alone leaves the lines in the system's memory
        except OSError as error:
            raise BadInput(
                f"{self.path}: cannot be written: {error.strerror}; make room, then give the same command again: it "
                f"goes on after {len(self.rows)} answers"
            ) from None
        self.rows.update(answered)
        self._saved()

    def _saved(self) -> None:
        interrupts.now_saved(f"{len(self.rows)} answers are in {self.path}; the same command goes on after them")

    def _whole_lines(self) -> list[str]:
        try:
            text = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{self.path}: cannot be read: {error}; remove it, or name another --out") from None
        return text.split("\n")[:-1]  # a process that was killed may have left a part of a line

    def _refuse_another(self, header: str, about: Mapping[str, Any]) -> None:
        try:
            before = dict(json.loads(header))
        except (ValueError, TypeError, RecursionError):
            before = {}
        other = [name for name in about if before.get(name) != about[name]]
        if other:
            raise BadInput(
                f"{self.path}: holds answers that differ in {', '.join(other)}; name another folder with --out, or "
                "remove the file"
            )
