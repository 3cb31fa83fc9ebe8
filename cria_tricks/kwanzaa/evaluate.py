"""Evaluate an adapter, its base and the reference on held-out rows: answers, loss, perplexity, confidence intervals.

These three are called systems here. The reference is the data's own answers. If all rows keep the answer contract, the
answers of each system are scored, too.
"""

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter.folder import MODEL_FILES, PROVENANCE, RECIPE, is_whole, named_base
from cria_tricks.common import atomic_files
from cria_tricks.common.console import Aside
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.version import versions
from cria_tricks.data import sources
from cria_tricks.data.rows import Chat
from cria_tricks.kwanzaa.contract import Reply, plain_reply, read_reply
from cria_tricks.kwanzaa.prompt import Document, QARow, keeps_contract, read_rows
from cria_tricks.kwanzaa.summary import UNSCORED, Scored, Written, markdown, summarise
from cria_tricks.recipe import from_toml
from cria_tricks.settings import BATCH, NEW_TOKENS, Data

OUT = Path("runs/eval")
"""The folder of the results if no adapter is given."""


@dataclass(frozen=True)
class Settings:
    """How answers are generated.

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


def evaluate(
    adapter: str | Path | None = None,
    data: str = "kwanzaa",
    *,
    base: bool = False,
    reference: bool = False,
    trivial: bool = False,
    out: str | Path | None = None,
    limit: int | None = None,
    settings: Settings | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Answer held-out rows, measure the loss of the data's answers, and write ``eval.json`` and ``eval.md``.

    All kinds of training rows can be evaluated: chats, prompts with completions, and texts. A text has a loss, but no
    answer. If all rows keep the contract ``kwanzaa.answer.v1``, the answers get four scores. Both files are written at
    the end, so an evaluation that was stopped begins again.

    Args:
        adapter: the folder of an adapter or of a whole model; ``None`` if only answers without a model are scored.
        data: a file, a folder or a data set, as for the recipe's ``data.eval``.
        base: also answer with the base model, that is, without the adapter.
        reference: also score the data's own answers; all rows must keep the contract.
        trivial: also score the answers that need no model; all rows must keep the contract.
        out: folder to write; ``eval`` beside the adapter when left out, ``runs/eval`` without an adapter.
        limit: evaluate only this many rows, the first ones.
        settings: how answers are generated.
        console: where progress is shown; standard error when left out.

    Returns:
        The content of ``eval.json``, and ``out``, the folder of the results.

    Raises:
        BadInput: naming what is wrong and what would be right.
        OutOfMemory: if a batch does not fit.
    """
    settings = settings or Settings()
    console = console or Aside()
    folder = _adapter_folder(adapter, base, reference or trivial, settings)
    contract = settings.contract
    if contract is None:
        contract = _trained_with(folder).contract
    source = sources.find_named("--data ", data, "eval", contract=contract)
    chats = source.rows[:limit]
    rows = read_rows(chats)
    for option in ["--reference"] * reference + ["--trivial"] * trivial:
        for chat in chats:
            if not keeps_contract(chat):
                raise BadInput(
                    f"{option}: {chat.where}: the row does not end with an answer of the contract kwanzaa.answer.v1 "
                    f"(a JSON object with answer.text), so it cannot be scored; leave {option} out"
                )
    place = _made_folder(out, folder)
    about: dict[str, Any] = {"data": source.description, "rows": len(rows), "rows_in_data": len(source.rows)}
    with atomic_files.only_writer(place):
        systems: dict[str, list[Scored]] = {}
        if folder:
            console.print(f"loading {folder}, writing to {place}")
            answered, more = _answered(folder, base, chats, settings, console)
            systems = {name: _scored(rows, written) for name, written in answered.items()}
            about |= {"adapter": str(folder), **more}
            if not rows[0].contract:
                console.print(f"note: {UNSCORED}")
        if trivial:
            systems["trivial"] = [Scored(row, trivial_reply(row), None) for row in rows]
        if reference:
            systems["reference"] = [Scored(row, row.reference, None) for row in rows]
        found = summarise(systems, about)
        atomic_files.write_file(place / "eval.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
        atomic_files.write_file(place / "eval.md", markdown(found))
    return found | {"out": str(place)}


def _trained_with(folder: Path | None) -> Data:
    """Return the data settings of the adapter's recipe; the defaults where there is no recipe."""
    if folder and (folder / RECIPE).is_file():
        return from_toml(folder / RECIPE).data
    return Data()


def _adapter_folder(adapter: str | Path | None, base: bool, without: bool, settings: Settings) -> Path | None:
    """Check the arguments, and return the folder of the adapter; ``None`` if no model is asked (``without``)."""
    if adapter is None:
        if base:
            raise BadInput("--with-base: there is no adapter to compare with its base; name the adapter's folder")
        if not without:
            raise BadInput(
                "name the folder of an adapter, or give --reference to score the data's own answers, or --trivial"
            )
        return None
    path = artifact.adapter(adapter, settings.base, other_base=settings.other_base)
    if base and is_whole(path):
        raise artifact.no_base_below(path, "--with-base")
    return path


def _made_folder(out: str | Path | None, adapter: Path | None) -> Path:
    """Make the folder of the results, unless writing there would do harm, and return it."""
    if out:
        place = usable_path("--out", out)
    elif adapter:
        place = adapter.absolute().parent / "eval"
    else:
        place = OUT
    if any((place / name).exists() for name in (*MODEL_FILES, atomic_files.MANIFEST)):
        raise BadInput(f"--out {place}: holds an adapter or a model, where more files do harm; name another folder")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {place}: cannot be made: {error.strerror}; name another folder") from None
    return place


def _scored(rows: Sequence[QARow], written: Sequence[Written]) -> list[Scored]:
    """Parse the answers of one system: as JSON if the rows keep the contract, else as plain text."""
    reader = read_reply if rows[0].contract else plain_reply
    return [Scored(row, reader(answer.text), answer) for row, answer in zip(rows, written, strict=True)]


def fingerprint(folder: Path) -> str:
    """Hash the files of an adapter's folder that decide its answers: not the card, the provenance and the manifest."""
    others = ("README.md", PROVENANCE, atomic_files.MANIFEST)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and path.name not in others]
    hashes = {path.name: atomic_files.entry(path)["sha256"] for path in files}
    return hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()


def _answered(
    folder: Path, base: bool, chats: Sequence[Chat], settings: Settings, console: Console
) -> tuple[dict[str, list[Written]], dict[str, Any]]:
    """Answer rows with the adapter, and with its base if asked for; return the answers and their settings."""
    # Imported here: torch and transformers take seconds, and wrong arguments should be refused before that.
    from cria_tricks.adapter.opening import open_folder, quantization_of
    from cria_tricks.kwanzaa.generate import answer_rows
    from cria_tricks.load.adapters import without_adapter

    warnings: list[str] = []
    model, tokenizer = open_folder(
        folder, base=settings.base, other_base=settings.other_base, packed=settings.packed, say=warnings.append
    )
    for warning in warnings:
        console.print(warning)
    rounded = quantization_of(folder)
    about: dict[str, Any] = {
        "adapter_sha256": fingerprint(folder),
        "base": str(settings.base or named_base(folder)),
        "quantization": rounded.quantization + " with double quantization" * rounded.double_quantization,
        "packed": settings.packed,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "max_new_tokens": settings.max_new_tokens,
        "batch_size": settings.batch_size,
        "versions": versions(),
    }
    if warnings:
        about["warnings"] = warnings
    trained_with = _trained_with(folder)
    if any(chat.text for chat in chats):
        about["text_length"] = trained_with.max_length

    def answers(asked: Any, system: str) -> list[Written]:
        longest = settings.max_new_tokens
        return answer_rows(asked, tokenizer, chats, trained_with, settings.batch_size, longest, system, console)

    found = {"adapter": answers(model, "adapter")}
    if base:
        with without_adapter(model) as below:
            found["base"] = answers(below, "base")
    return found, about


_CONTENT = re.compile(r"^Content: *(.+)$", re.MULTILINE)
REFUSAL = "I cannot answer this: no documents were found."


def trivial_reply(row: QARow) -> Reply:
    """Copy the first sentence of each document with its label; without documents, refuse.

    The reply keeps the contract, because a program writes it. Everything that its fields need and the documents do not
    tell is filled in with the same words for each row.
    """
    documents = row.documents
    text = " ".join(f"{_first_sentence(document)} [{document.number}]." for document in documents)
    fields = {
        "version": "kwanzaa.answer.v1",
        "answer": {"text": text or REFUSAL, "completeness": "complete" if documents else "insufficient_data"},
        "sources": [_source(document) for document in documents],
        "retrieval_summary": {
            "query": row.query[:1000] or "none",
            "top_k": max(1, len(documents)),
            "namespaces": ["none"],
            "results": [],
        },
        "unknowns": {"unsupported_claims": [], "missing_context": [], "clarifying_questions": []},
    }
    return read_reply(json.dumps(fields))


def _first_sentence(document: Document) -> str:
    """Return the first sentence of a document's content, without its final dot; of its first line if none is marked."""
    content = _CONTENT.search(document.text)
    text = content[1] if content else document.title
    return text.split(". ")[0].rstrip(".")


def _source(document: Document) -> dict[str, Any]:
    return {
        "citation_label": document.title,
        "canonical_url": document.url or "urn:none",
        "source_org": "none",
        "year": 2000,
        "content_type": "document",
        "license": "none",
        "namespace": "none",
        "doc_id": str(document.number),
        "chunk_id": str(document.number),
    }
