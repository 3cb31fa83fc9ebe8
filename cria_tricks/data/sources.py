"""Find and read a data set: one of our own, the real Kwanzaa set, a file, a folder of texts, or one of the hub.

Here, too, is the system prompt that shows the answer contract (``data.contract``).
"""

import hashlib
import http.client
import itertools
import os
import random
import re
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from cria_tricks.common import atomic_files
from cria_tricks.common.cache import cache_folder
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.data import texts
from cria_tricks.data.files import ENDINGS
from cria_tricks.data.rows import Chat, check_rows, read_file, reading
from cria_tricks.models import network
from cria_tricks.settings import NAMED_SETS, Data

GLANCE = 1000
"""How many rows :func:`glance` checks, before a run does anything slow."""
MOST_HELD_OUT = 200
"""The most training rows that are held out for the evaluation: more of them make it slower, and hardly surer."""
Part = Literal["train", "eval"]

OURS = ("nguzo_saba", "history_notes")
"""Our own sets, inside the package: 40 questions for quick tests, and 421 over short notes about Black history."""

CURATED = "kwanzaa_curated"
"""The real answers and refusals of ``kwanzaa``, without its placeholders, followed by ``history_notes``."""
_CHOSEN = Path(__file__).with_name("kwanzaa_curated.sha256")
"""The hashes of the real rows that ``tools/curate.py`` has chosen for :data:`CURATED`, one a line."""

# The real Kwanzaa set is licensed under GPL-3.0, so this package does not contain it. It is downloaded from its public
# repository, at one fixed commit.
_KWANZAA = (
    "https://raw.githubusercontent.com/AINative-Studio/kwanzaa/118f69491c3adf5ab626f0229360a6c1a469b7f5"
    "/data/training/kwanzaa_{part}.jsonl"
)
WAIT = 10.0
"""How long its server may be silent [s]."""
_SHA256 = {
    "train": "773afadf36d5a95ea604908abaf6dc05b7eeaf5e0952726eaaa0186ba59262c7",
    "eval": "5ecf05e81bbd2c3362a67d043e99bef79e62c1f66ad4b51748f74546bc3b0628",
}


@dataclass(frozen=True)
class Again:
    """Rows that are read anew each time that somebody goes over them, so that they are never all in memory.

    Attributes:
        read: begins to read.
    """

    read: Callable[[], Iterator[Chat]]

    def __iter__(self) -> Iterator[Chat]:
        return self.read()


@dataclass(frozen=True)
class OpenedSource:
    """The rows of a data set, and what the report and the model card say of them.

    Attributes:
        rows: the rows, which can be gone over many times.
        described: one line; ``{rows}`` stands for their number.
    """

    rows: Iterable[Chat]
    described: str

    @cached_property
    def _counted(self) -> tuple[int, str]:
        """The number of rows, and the hash of their content, in one pass over all of them."""
        digest = hashlib.sha256()
        count = 0
        for row in self.rows:
            digest.update(row.key.encode())
            count += 1
        return count, digest.hexdigest()

    @property
    def count(self) -> int | None:
        """The number of rows; ``None`` for a stream."""
        return self._counted[0]

    @property
    def sha256(self) -> str:
        """The hash of the rows' content: the same rows have the same hash, whatever file they came from."""
        return self._counted[1]

    @property
    def description(self) -> str:
        """One line for the report and the model card."""
        return self.described.replace("{rows}", str(self.count))


@dataclass(frozen=True)
class DataSource(OpenedSource):
    """The rows of a data set in a list."""

    rows: list[Chat]


@dataclass(frozen=True)
class Streamed(OpenedSource):
    """The rows of a stream, which begins at once: nobody counts them first.

    Attributes:
        fingerprint: a hash of each file's name, size and time, or of the hub data set's name.
    """

    fingerprint: str = ""

    @property
    def count(self) -> None:
        return None

    @property
    def sha256(self) -> str:
        return self.fingerprint


def find(name: str, part: Part, *, contract: bool = False) -> DataSource:
    """Read one part of a data set into a list.

    Args:
        name: ``nguzo_saba`` or ``history_notes`` (ours, inside the package), ``kwanzaa`` (downloaded once, hash
            checked), ``kwanzaa_curated`` (chosen rows of ``kwanzaa``, then ``history_notes``), a local file, a folder
            of ``.txt`` files, or a hub data set ``owner/name`` or ``owner/name:split``.
        part: ``"train"`` or ``"eval"``. If a hub data set is named without a split, training takes the split ``train``,
            and evaluation the first of ``validation``, ``eval`` and ``test`` that exists.
        contract: whether each row gets the system prompt that shows the answer contract (``data.contract``).

    Raises:
        BadInput: if there is no such data set, it cannot be loaded, or a row in it is wrong.
    """
    found = open_rows(name, part, contract=contract)
    return DataSource(list(found.rows), found.described)


def both(data: Data, seed: int) -> tuple[OpenedSource, DataSource]:
    """Open the training rows, and read the evaluation rows.

    If ``data.eval`` names none, they are those of the same named set. Else some training rows are held out: a twentieth
    of them, at least one and at most :data:`MOST_HELD_OUT`.

    Args:
        data: the recipe's ``data`` fields.
        seed: draws the rows that are held out (``train.seed``).

    Raises:
        BadInput: as :func:`find` does, or if no row can be held out.
    """
    train = open_rows(data.train, "train", contract=data.contract, stream=data.stream)
    name = data.eval
    if not name and data.train in NAMED_SETS:
        name = data.train
    if name:
        return train, find(name, "eval", contract=data.contract)
    assert train.count is not None, "a stream whose data.eval is not named is refused (rules.py)"
    number = min(MOST_HELD_OUT, max(1, round(train.count / 20)))
    if number >= train.count:
        raise BadInput(
            f"data.eval is not named, and data.train={data.train} has too few rows to hold one out; set data.eval=FILE"
        )
    chosen = set(random.Random(seed).sample(range(train.count), number))
    held_out = [row for place, row in enumerate(train.rows) if place in chosen]
    keys = {row.key for row in held_out}  # a row that is there twice is held out twice
    rest = Again(lambda: (row for row in train.rows if row.key not in keys))
    said = f"{number} row{'s' * (number > 1)}"
    return (
        OpenedSource(rest, f"{train.description}, without {said} held out"),
        DataSource(held_out, f"{said} held out of {train.description}"),
    )


def open_rows(name: str, part: Part, *, contract: bool = False, stream: bool = False) -> OpenedSource:
    """Open one part of a data set, whose rows are read and checked each time that somebody goes over them.

    Args:
        name: as for :func:`find`.
        part: as for :func:`find`.
        contract: as for :func:`find`.
        stream: whether a hub data set is read over the network, and nothing is counted first (``data.stream``).

    Raises:
        BadInput: if there is no such data set. A wrong row is found when it is read.
    """
    found = place(name, part)
    if isinstance(found, str):
        rows, described = _from_hub(found, part, stream)
    else:
        rows, described = _from_files(found, name, part)
    if contract:
        bare = rows
        rows = Again(lambda: map(with_contract, bare))
        described = f"{described}; the contract is in every system prompt"
    if not stream:
        return OpenedSource(rows, described)
    about = [described]
    for file in _files_of(found):
        known = file.stat()
        about.append(f"{file.name} {known.st_size} {known.st_mtime_ns}")
    fingerprint = hashlib.sha256("\n".join(about).encode()).hexdigest()
    return Streamed(rows, f"{described.replace(', {rows} rows', '')}, streamed", fingerprint)


def _from_files(found: Path, name: str, part: Part) -> tuple[Iterable[Chat], str]:
    if name == CURATED:
        return _curated(found, part)
    if found.is_dir() or found.suffix == ".txt":
        files = texts.files(found)
        return Again(lambda: _texts(files, f"data.{part}={found}")), f"{found.name}, {len(files)} text files"
    rows = Again(lambda: reading(found))
    if name in OURS:
        return rows, f"cria_tricks {name} {part}, {{rows}} rows (Apache-2.0)"
    if name == "kwanzaa":
        return rows, f"AINative-Studio/kwanzaa {found.name}, sha256 {_SHA256[part]} (GPL-3.0)"
    with found.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    return rows, f"{found.name}, {{rows}} rows, sha256 {digest}"


def _curated(found: Path, part: Part) -> tuple[Iterable[Chat], str]:
    """Read the chosen real rows, and our own rows behind them."""
    chosen = set(_CHOSEN.read_text().split())
    real = read_file(found)
    kept = [row for row in real if row_hash(row) in chosen]
    ours_too = find("history_notes", part)
    of_real = f"{len(kept)} of the {len(real)} rows of {_from_files(found, 'kwanzaa', part)[1]}"
    return [*kept, *ours_too.rows], f"{of_real}; {ours_too.description}"


def _texts(files: list[Path], where: str) -> Iterator[Chat]:
    number = 0
    for file in files:
        for span in texts.spans(file):
            row = texts.read(span)
            if row:
                number += 1
                yield row
    if not number:
        raise BadInput(f"{where}: there is no text in it")


def _files_of(found: Path | str) -> list[Path]:
    if isinstance(found, str):
        return []
    return texts.files(found) if found.is_dir() else [found]


def row_hash(row: Chat) -> str:
    """Hash the text of a row, whichever file it is in."""
    return hashlib.sha256(row.content.encode()).hexdigest()


def find_named(option: str, name: str, part: Part, *, contract: bool = False) -> DataSource:
    """Read one part of a data set as :func:`find` does; errors name the command's option, not the recipe's setting.

    Args:
        option: what errors write before the name, e.g. ``"--data "``; empty for an argument.
        name: as for :func:`find`.
        part: as for :func:`find`.
        contract: as for :func:`find`.

    Raises:
        BadInput: as :func:`find` does, and for an empty name.
    """
    if not name:
        raise BadInput(f"{option.strip() or 'the data set'}: is empty; name a file, a folder or a data set")
    try:
        return find(name, part, contract=contract)
    except BadInput as error:
        said = str(error)
        for setting in (f"--set data.{part}=", f"data.{part}=", f"data.{part} "):
            said = said.replace(setting, option)
        raise BadInput(said) from None


def glance(name: str, part: Part) -> None:
    """Check quickly that a data set exists and that its first rows are right; a hub data set is only checked by name.

    Raises:
        BadInput: as :func:`find` does, if one of the first rows is wrong.
    """
    found = place(name, part)
    if isinstance(found, str):
        return
    if found.is_dir() or found.suffix == ".txt":
        texts.files(found)
        return
    for _ in itertools.islice(reading(found), GLANCE):
        pass


def place(name: str, part: Part) -> Path | str:
    """Find where one part of a data set is: a path on this machine, or the name of a hub data set.

    The Kwanzaa set is downloaded if it is not on this machine yet.

    Raises:
        BadInput: if there is no such data set, or the download fails.
    """
    if name in OURS:
        return ours(name, part)
    if name in ("kwanzaa", CURATED):
        return _download_kwanzaa(part)
    path = usable_path(f"data.{part}", name)
    if path.exists():
        return path
    if is_hub_set(name):
        return name
    raise BadInput(
        f"data.{part}={name}: no such file; give a {', '.join(ENDINGS)} or .txt file, a folder of .txt files, "
        f"{', '.join(OURS)}, kwanzaa, {CURATED}, or a hub data set owner/name"
    )


def ours(name: str, part: str) -> Path:
    """Return the file of one of our own sets (:data:`OURS`)."""
    return Path(__file__).with_name(f"{name}_{part}.jsonl")


def is_hub_set(name: str) -> bool:
    """Tell whether a name means a hub data set: it looks like ``owner/name[:split]``, and nothing local has it."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.\[\]%:-]+)?", name):
        return False
    return not name.endswith((*ENDINGS, ".gz", ".txt")) and not os.path.exists(name)


def _download_kwanzaa(part: Part) -> Path:
    path = cache_folder() / "kwanzaa" / f"kwanzaa_{part}.jsonl"
    if path.is_file() and _sha256(path.read_bytes()) == _SHA256[part]:
        return path
    url = _KWANZAA.format(part=part)
    at_hand = f"with a copy of the file at hand: --set data.{part}=FILE.jsonl"
    network.refuse_offline(f"data.{part}=kwanzaa: is not downloaded yet ({url})", at_hand)
    try:
        with urllib.request.urlopen(url, timeout=WAIT) as answer:
            content = answer.read()
    except (OSError, http.client.HTTPException) as error:  # URLError and TimeoutError are OSErrors
        reason = getattr(error, "reason", error)
        raise BadInput(f"data.{part}=kwanzaa: cannot download {url} ({reason}); {at_hand}") from None
    if _sha256(content) != _SHA256[part]:
        raise BadInput(f"data.{part}=kwanzaa: {url} has sha256 {_sha256(content)}, expected {_SHA256[part]}")
    atomic_files.write_file(path, content)
    return path


def _from_hub(name: str, part: Part, stream: bool) -> tuple[Iterable[Chat], str]:
    # It takes a second to import, and only rows of the hub need it.
    from datasets import get_dataset_split_names, load_dataset

    hub_id, _, split = name.partition(":")
    try:
        if not split:
            splits = get_dataset_split_names(hub_id)
            wanted = ("train",) if part == "train" else ("validation", "eval", "test")
            split = next((s for s in wanted if s in splits), "")
            if not split:
                raise BadInput(
                    f"data.{part}={name}: no such split; it has {', '.join(splits)}: name one as {name}:SPLIT"
                )
        loaded = load_dataset(hub_id, split=split, streaming=stream)
    except BadInput:
        raise
    except Exception as error:  # the library raises many kinds: offline, gated, missing, unknown split
        raise BadInput(f"data.{part}={name}: cannot be loaded from the hub: {network.why(error)}") from None

    def raw() -> Iterator[tuple[Any, str]]:
        try:
            for number, row in enumerate(loaded, 1):
                yield dict(row), f"{hub_id}:{split} row {number}"
        except OSError as error:  # a stream whose network fails
            raise BadInput(f"data.{part}={name}: cannot be read from the hub: {network.why(error)}") from None

    def read() -> Iterator[Chat]:
        return check_rows(raw())

    return Again(read), f"{hub_id} ({split}), {{rows}} rows, from the Hugging Face hub"


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


CONTRACT = (
    "Answer only from the documents and cite them as [1]. If they lack the answer, say so. Reply with JSON only: "
    '{"version":"kwanzaa.answer.v1","answer":{"text":"","completeness":"complete or insufficient_data"},'
    '"sources":[{"citation_label":"","canonical_url":"","source_org":"","year":0,"content_type":"","license":"",'
    '"namespace":"","doc_id":"","chunk_id":""}],"retrieval_summary":{"query":"","top_k":1,"namespaces":[""],'
    '"results":[]},"unknowns":{"unsupported_claims":[],"missing_context":[],"clarifying_questions":[]}}'
)
"""A system prompt that shows every required field of the contract, so that an untrained model can keep it, too."""


def with_contract(chat: Chat) -> Chat:
    """Return a chat with :data:`CONTRACT` as its system message, in place of its own if it has one.

    Raises:
        BadInput: for a completion or a text, which has no place for a system message.
    """
    if not chat.messages:
        raise BadInput(f"data.contract=true: {chat.where}: is no chat, so it has no system prompt; set it to false")
    turns = [turn for turn in chat.messages if turn["role"] != "system"]
    messages = ({"role": "system", "content": CONTRACT}, *turns)
    later = len(messages) - len(chat.messages)  # 1 if it had no system message
    return replace(chat, messages=messages, untrained=tuple(turn + later for turn in chat.untrained))
