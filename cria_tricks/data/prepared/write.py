"""Write token shards: read texts once, filter, deduplicate and tokenise them, and go on after a kill.

The source is cut into parts of about 16 MiB, and each part becomes a shard. With duplicates to be found there are three
stages, else only the last one:

1. sign: each part is read and filtered, and its signatures are written (``repeats.Signatures``);
2. deduplicate: repeated rows are found in the files of all parts (``repeats.find``): a verdict for each row;
3. tokenise: each part is read again, and the tokens of the rows that are kept are written.

A file is written under a temporary name and renamed when it is complete. So after a kill the same command skips each
part that a stage has finished; only stage 2, which has no parts, begins again. The folder becomes the same, byte for
byte, whenever the command was killed and however many processes shared the work.
"""

import json
import math
import multiprocessing
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from cria_tricks.common import atomic_files, interrupts
from cria_tricks.common.errors import BadInput, OutOfMemory
from cria_tricks.data.counts import KEPT, Tally
from cria_tricks.data.filters import RowFilter
from cria_tricks.data.prepared import repeats
from cria_tricks.data.prepared.layout import dtype_for, index_file, tokens_file
from cria_tricks.data.rows import Chat
from cria_tricks.data.shards import LineStream, TextStream
from cria_tricks.data.sources import PREPARED, DataSource
from cria_tricks.data.tokens import document
from cria_tricks.settings import Data

PART = 2**24
"""Bytes of the source in a part."""
WORK = ".preparing"
"""The suffix of the folder's name while it is being filled."""
LEFT_OUT = 255
"""The verdict on a row that the filters leave out; the others are the numbers of ``repeats.REASONS``."""


@dataclass(frozen=True)
class Preparation:
    """What to write, and where. It is pickled for each process.

    Attributes:
        data: the recipe's ``data`` fields.
        source: the files to read.
        shards: the source's shards, which are shared out among the parts.
        held_out: the evaluation rows.
        open_tokenizer: opens the model's tokenizer.
        work: the folder to fill.
        part_bytes: bytes of the source in a part.
    """

    data: Data
    source: LineStream | TextStream
    shards: Sequence[Any]
    held_out: DataSource
    open_tokenizer: Callable[[], Any]
    work: Path
    part_bytes: int = PART

    @property
    def parts(self) -> int:
        return math.ceil(self.source.size / self.part_bytes)

    def __getstate__(self) -> dict[str, Any]:
        # Each process makes these two for itself, because this process's own may hold what cannot be pickled.
        return {name: value for name, value in vars(self).items() if name not in ("tokenizer", "row_filter")}

    @cached_property
    def tokenizer(self) -> Any:
        return self.open_tokenizer()

    @cached_property
    def row_filter(self) -> RowFilter:
        return RowFilter(self.data, self.held_out.rows)

    def rows(self, part: int) -> Iterator[Chat]:
        """Read the rows of a part, in the order of the source.

        Raises:
            BadInput: for a row that is no text.
        """
        first = len(self.shards) * part // self.parts
        last = len(self.shards) * (part + 1) // self.parts
        for row in self.source.in_order(self.shards[first:last]):
            if not row.text:
                raise BadInput(
                    f"{row.where}: this row is a {row.kind}, and token shards are made of texts, all of which is "
                    "trained; train on the file itself, with data.stream=true if it is large"
                )
            yield row

    def sign(self, part: int) -> None:
        """Stage 1: filter the rows of a part, and write the signatures of those that are left."""
        signatures = repeats.Signatures(near=self.data.duplicates == "near")
        tally = Tally()
        verdicts = []
        for row in self.rows(part):
            passes = self.row_filter.keeps(row, tally)
            verdicts.append(repeats.KEPT if passes else LEFT_OUT)
            if passes:
                signatures.add(row)
        self._write_array(self._verdicts(part, "filtered"), np.array(verdicts, np.uint8))
        atomic_files.write_file(self._at(part, "tally"), json.dumps(tally.to_dict()))
        signatures.write(self._at(part, "part"))

    def deduplicate(self) -> None:
        """Stage 2: find the repeated rows of all parts, and write a verdict for each row of each part."""
        found = repeats.find([self._at(part, "part") for part in range(self.parts)])
        begin = 0
        for part in range(self.parts):
            verdicts = np.load(self._verdicts(part, "filtered"))
            passed = np.flatnonzero(verdicts == repeats.KEPT)
            verdicts[passed] = found[begin : begin + len(passed)]
            begin += len(passed)
            self._write_array(self._verdicts(part, "judged"), verdicts)

    def tokenise(self, part: int) -> None:
        """Stage 3: write the tokens of a part's rows, the end of each document, and what happened to the rows."""
        tally = Tally()
        kept = self._kept(part, tally) if self.data.duplicates != "keep" else self._filtered(part, tally)
        dtype = dtype_for(self.tokenizer)
        ends = []
        end = highest = 0
        with atomic_files.new_file(self.work / tokens_file(part)) as path, path.open("wb") as file:
            for row in kept:
                ids = document(row, self.tokenizer)
                tally.kinds[row.kind] += 1
                highest = max(highest, max(ids))
                end += len(ids)
                ends.append(end)
                np.array(ids, dtype).tofile(file)
        with atomic_files.new_file(self.work / index_file(part)) as path:
            np.array(ends, "<u8").tofile(path)
        about = {"documents": len(ends), "tokens": end, "highest_id": highest, "steps": tally.to_dict()}
        atomic_files.write_file(self._at(part, "done"), json.dumps(about | {"kinds": dict(tally.kinds)}))

    def _filtered(self, part: int, tally: Tally) -> Iterator[Chat]:
        for row in self.rows(part):
            if self.row_filter.keeps(row, tally):
                tally.count(KEPT, row)
                yield row

    def _kept(self, part: int, tally: Tally) -> Iterator[Chat]:
        """Yield the rows that stage 2 has kept; the tally begins with the counts of stage 1."""
        tally.add(json.loads(self._at(part, "tally").read_text()), {})
        verdicts = np.load(self._verdicts(part, "judged"))
        for row, verdict in zip(self.rows(part), verdicts.tolist(), strict=True):
            if verdict == LEFT_OUT:
                continue
            reason = repeats.REASONS[verdict]
            tally.count(reason or KEPT, row)
            if reason is None:
                yield row

    def summary(self) -> dict[str, Any]:
        """Add up what the shards hold and what happened to the rows."""
        found = [json.loads(self._at(part, "done").read_text()) for part in range(self.parts)]
        tally = Tally()
        for about in found:
            tally.add(about["steps"], about["kinds"])
        return {
            "documents": sum(about["documents"] for about in found),
            "tokens": sum(about["tokens"] for about in found),
            "highest_id": max(about["highest_id"] for about in found),
            "shards": [{name: about[name] for name in ("documents", "tokens")} for about in found],
            "steps": tally.to_dict(),
            "kinds": dict(tally.kinds),
        }

    def missing(self, stage: str) -> list[int]:
        """List the parts whose last file of a stage is not there yet."""
        files = {"sign": lambda part: self._at(part, "part.keys.npy"), "tokenise": lambda part: self._at(part, "done")}
        return [part for part in range(self.parts) if not files[stage](part).is_file()]

    @property
    def is_deduplicated(self) -> bool:
        return self._verdicts(self.parts - 1, "judged").is_file()

    def _at(self, part: int, name: str) -> Path:
        return self.work / "stages" / f"{part:05}.{name}"

    def _verdicts(self, part: int, name: str) -> Path:
        return self._at(part, f"{name}.npy")

    def _write_array(self, path: Path, array: np.ndarray) -> None:
        with atomic_files.new_file(path) as aside, aside.open("wb") as file:
            np.save(file, array)


def write(
    job: Preparation, folder: Path, about: dict[str, Any], processes: int, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Write the token shards of a source, or what of them is missing.

    Args:
        job: what to write; its ``work`` is the folder's name and :data:`WORK`.
        folder: the folder to make.
        about: what the shards are made of, from ``layout.made_of``. What an earlier start has left must be of the same.
        processes: how many processes share the parts.
        progress: called with the name of the stage, the number of its parts that are done, and of all parts.

    Returns:
        What is written to ``prepared.json``.

    Raises:
        BadInput: if the folder is taken, another command writes into it, or a row cannot be used.
        OutOfMemory: if a process was killed, as systems do when memory runs out.
    """
    job.work.mkdir(parents=True, exist_ok=True)
    with atomic_files.only_writer(job.work):
        interrupts.now_saved(f"what is done is in {job.work}; the same command goes on")
        summary = _read_summary(job.work)  # it is there if an earlier start was killed behind the last stage
        if summary is None:
            summary = about | _all_stages(job, about, processes, progress)
            atomic_files.write_file(job.work / PREPARED, json.dumps(summary, indent=2) + "\n")
        elif any(summary.get(name) != value for name, value in about.items()):
            raise _other_work(job.work)
        shutil.rmtree(job.work / "stages", ignore_errors=True)
        for leftover in (job.work / ".lock", *job.work.glob(f"*{atomic_files.ASIDE}")):
            leftover.unlink()
        atomic_files.seal(job.work, folder)
    return summary


def _read_summary(work: Path) -> dict[str, Any] | None:
    file = work / PREPARED
    return json.loads(file.read_text()) if file.is_file() else None


def _all_stages(
    job: Preparation, about: dict[str, Any], processes: int, progress: Callable[[str, int, int], None]
) -> dict[str, Any]:
    """Carry out what is missing of the stages, and add up what the shards hold."""
    _begin(job, about)
    if job.data.duplicates != "keep":
        _share(job, "sign", processes, progress)
        if not job.is_deduplicated:
            progress("deduplicate", 0, 1)
            job.deduplicate()
    _share(job, "tokenise", processes, progress)
    found = job.summary()
    if not found["steps"]:
        raise BadInput(f"data.train={job.data.train}: there is no text in it")
    if not found["tokens"]:
        raise BadInput(f"data.train={job.data.train}: {Tally(found['steps']).in_words()}, so nothing is left")
    return found


def _begin(job: Preparation, about: dict[str, Any]) -> None:
    """Write down what the work is about, or compare it with what an earlier start has written down."""
    file = job.work / "stages" / "about.json"
    text = json.dumps(about | {"part_bytes": job.part_bytes}, indent=2)
    if not file.is_file():
        atomic_files.write_file(file, text)
    elif file.read_text() != text:
        raise _other_work(job.work)


def _other_work(work: Path) -> BadInput:
    return BadInput(
        f"{work}: holds the beginning of other shards (other texts, settings, or another tokenizer); remove it, or "
        "name another folder with --out"
    )


def _share(job: Preparation, stage: str, processes: int, progress: Callable[[str, int, int], None]) -> None:
    """Carry out a stage on all parts that are missing, in this process or in several."""
    missing = job.missing(stage)
    done = job.parts - len(missing)
    progress(stage, done, job.parts)
    with _Workers(job, min(processes, len(missing))) as carry_out:
        for _ in carry_out(stage, missing):
            done += 1
            progress(stage, done, job.parts)


class _Workers:
    """Carry out stages in this process, or in several others, which end when the ``with`` block does."""

    def __init__(self, job: Preparation, processes: int):
        self.job = job
        self.not_ours = multiprocessing.active_children()  # children that this process had before
        self.pool: ProcessPoolExecutor | None = None
        if processes > 1:
            # Spawned and not forked, because a process with the threads of a tokenizer must not be forked.
            context = multiprocessing.get_context("spawn")
            self.pool = ProcessPoolExecutor(processes, context, _start, (job,))

    def __enter__(self) -> Callable[[str, list[int]], Iterator[None]]:
        return self._carry_out

    def _carry_out(self, stage: str, parts: list[int]) -> Iterator[None]:
        if not self.pool:
            yield from (getattr(self.job, stage)(part) for part in parts)
            return
        try:
            yield from self.pool.map(_one, [stage] * len(parts), parts)
        except BrokenProcessPool:
            raise OutOfMemory(
                "one of the processes was killed, as the system does when memory runs out; what is done stays, so run "
                "the command again with fewer --processes"
            ) from None

    def __exit__(self, *error: object) -> None:
        if self.pool:
            if any(error):
                for process in set(multiprocessing.active_children()) - set(self.not_ours):
                    process.terminate()
            self.pool.shutdown(cancel_futures=True)


_job: Preparation
"""The job of this process, if it is one of several: sent once, and with the tokenizer that it has opened."""


def _start(job: Preparation) -> None:
    global _job
    _job = job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes, and the first one ends the others
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when the first one is gone: it would otherwise wait for more work forever."""
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        signal.raise_signal(signal.SIGKILL)


def _one(stage: str, part: int) -> None:
    getattr(_job, stage)(part)
