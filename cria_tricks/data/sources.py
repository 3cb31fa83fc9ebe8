"""Find and read a data set: one of our own, the real Kwanzaa set, a file, a folder of texts, or one of the hub."""

import hashlib
import http.client
import json
import os
import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cria_tricks.common import atomic_files
from cria_tricks.common.cache import cache_folder
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.data import texts
from cria_tricks.data.contract_prompt import with_contract
from cria_tricks.data.rows import Chat, check_rows, first_rows, read_jsonl
from cria_tricks.models import network

GLANCE = 1000
"""How many rows :func:`glance` checks, before a run does anything slow."""
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


PREPARED = "prepared.json"
"""The file by which a folder of token shards is known (``data/prepared/``)."""


@dataclass(frozen=True)
class DataSource:
    """The rows of a data set, and one line that describes it in the report and the model card."""

    rows: list[Chat]
    description: str

    @property
    def sha256(self) -> str:
        """The hash of the rows' content: the same rows have the same hash, whatever file they came from."""
        digest = hashlib.sha256()
        for row in self.rows:
            content: list[Any] = [row.messages, row.prompt, row.completion]
            if row.text:  # without text the hash must stay that of earlier versions, which did not have this field
                content.append(row.text)
            digest.update(json.dumps(content).encode())
        return digest.hexdigest()


def find(name: str, part: Part, *, contract: bool = False) -> DataSource:
    """Read one part of a data set.

    Args:
        name: ``nguzo_saba`` or ``history_notes`` (ours, inside the package), ``kwanzaa`` (downloaded once, hash
            checked), ``kwanzaa_curated`` (chosen rows of ``kwanzaa``, then ``history_notes``), a local file of JSON
            lines or of text, a folder of ``.txt`` files, or a hub data set ``owner/name`` or ``owner/name:split``.
        part: ``"train"`` or ``"eval"``. If a hub data set is named without a split, training takes the split ``train``,
            and evaluation the first of ``validation``, ``eval`` and ``test`` that exists.
        contract: whether each row gets the system prompt that shows the answer contract (``data.contract``).

    Raises:
        BadInput: if there is no such data set, it cannot be loaded, or a row in it is wrong.
    """
    source = _curated(part) if name == CURATED else _read(name, part)
    if not contract:
        return source
    rows = [with_contract(row) for row in source.rows]
    if rows == source.rows:  # as in history_notes, whose rows show it already
        return source
    return DataSource(rows, f"{source.description}; the contract is in every system prompt")


def _read(name: str, part: Part) -> DataSource:
    """Read the rows as they are."""
    found = place(name, part)
    if isinstance(found, str):
        return _from_hub(found, part)
    if is_prepared(name):
        raise BadInput(f"data.{part}={name}: holds token shards and no texts; name the texts that they were made of")
    if found.is_dir() or found.suffix == ".txt":
        return _from_texts(found, part)
    rows = read_jsonl(found)
    if name in OURS:
        return DataSource(rows, f"cria_tricks {name} {part}, {len(rows)} rows (Apache-2.0)")
    if name == "kwanzaa":
        return DataSource(rows, f"AINative-Studio/kwanzaa {found.name}, sha256 {_SHA256[part]} (GPL-3.0)")
    return DataSource(rows, f"{found.name}, {len(rows)} rows, sha256 {_sha256(found.read_bytes())}")


def _curated(part: Part) -> DataSource:
    """Read the chosen real rows, and our own rows behind them."""
    real = _read("kwanzaa", part)
    chosen = set(_CHOSEN.read_text().split())
    kept = [row for row in real.rows if row_hash(row) in chosen]
    ours = _read("history_notes", part)
    of_real = f"{len(kept)} of the {len(real.rows)} rows of {real.description}"
    return DataSource(kept + ours.rows, f"{of_real}; {ours.description}")


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
    if isinstance(found, str) or (part == "train" and is_prepared(name)):
        return
    if found.is_dir() or found.suffix == ".txt":
        texts.files(found)
    else:
        first_rows(found, GLANCE)


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
        f"data.{part}={name}: no such file; give a .jsonl file, {', '.join(OURS)}, kwanzaa, {CURATED}, a .txt "
        "file or a folder of them, or a hub data set owner/name"
    )


def place_of_files(name: str) -> Path:
    """Find the files of training texts, as :func:`place` does.

    Raises:
        BadInput: if there are none; also for a hub data set, and for token shards, which are no texts.
    """
    found = place(name, "train")
    if isinstance(found, str):
        raise BadInput(
            f"data.train={name}: token shards are made of files; write the hub data set into one first, with "
            "datasets' load_dataset(...).to_json('texts.jsonl')"
        )
    if is_prepared(name):
        raise BadInput(f"data.train={name}: holds token shards already; name the texts that they were made of")
    return found


def ours(name: str, part: str) -> Path:
    """Return the file of one of our own sets (:data:`OURS`)."""
    return Path(__file__).with_name(f"{name}_{part}.jsonl")


def is_hub_set(name: str) -> bool:
    """Tell whether a name means a hub data set: it looks like ``owner/name[:split]``, and nothing local has it."""
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(:[\w.\[\]%:-]+)?", name):
        return False
    return Path(name).suffix not in (".jsonl", ".json", ".txt") and not os.path.exists(name)


def is_prepared(name: str) -> bool:
    """Tell whether a name means a folder of token shards, which ``cria prepare`` has written."""
    return os.path.isfile(os.path.join(name, PREPARED))  # also for a name that can be no path


def _from_texts(path: Path, part: Part) -> DataSource:
    files = texts.files(path)
    rows = []
    for file in files:
        read = (texts.read(span) for span in texts.spans(file))
        rows += [row for row in read if row]
    if not rows:
        raise BadInput(f"data.{part}={path}: there is no text in it")
    return DataSource(rows, f"{path.name}, {len(files)} text files")


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


def _from_hub(name: str, part: Part) -> DataSource:
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
        rows = load_dataset(hub_id, split=split)
    except BadInput:
        raise
    except Exception as error:  # the library raises many kinds: offline, gated, missing, unknown split
        raise BadInput(f"data.{part}={name}: cannot be loaded from the hub: {network.why(error)}") from None
    places = ((dict(row), f"{hub_id}:{split} row {index}") for index, row in enumerate(rows))
    checked = list(check_rows(places))
    return DataSource(checked, f"{hub_id} ({split}), {len(checked)} rows, from the Hugging Face hub")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
