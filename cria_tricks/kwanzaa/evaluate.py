"""Adapter, base and reference side by side on held-out rows: answers, loss, perplexity, and how sure they are.

Where the rows keep the answer contract, the answers are scored, too.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter.folder import CONFIGS, RECIPE, is_whole, trained_over
from cria_tricks.common import atomic_files
from cria_tricks.common.console import Aside
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.version import versions
from cria_tricks.data import sources
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import Source
from cria_tricks.kwanzaa.answers import Answers, Written
from cria_tricks.kwanzaa.page import UNSCORED, markdown
from cria_tricks.kwanzaa.prompt import Row, keeps_contract, read_rows
from cria_tricks.kwanzaa.reply import plain, read
from cria_tricks.kwanzaa.summary import Scored, summarise
from cria_tricks.recipe import Recipe, from_toml

if TYPE_CHECKING:
    from cria_tricks.models import Weights

OUT = Path("runs/eval")
"""Where results go without an adapter to stand beside."""


@dataclass(frozen=True)
class Settings:
    """How answers are made.

    Attributes:
        batch_size: rows that are answered together.
        max_new_tokens: longest answer, in tokens.
        base: where the base lies now, if it is not where the adapter says.
        other_base: whether the base may be another one than was trained over.
    """

    batch_size: int = 8
    max_new_tokens: int = 2048
    base: str | Path | None = None
    other_base: bool = False


def evaluate(
    adapter: str | Path | None = None,
    data: str = "kwanzaa",
    *,
    base: bool = False,
    reference: bool = False,
    out: str | Path | None = None,
    limit: int | None = None,
    settings: Settings | None = None,
    console: Console | None = None,
) -> dict[str, Any]:
    """Answer held-out rows, measure the loss of the data's answers, and write ``eval.json`` and ``eval.md``.

    Rows of any kind that trains are taken: chats, prompts with completions, and texts, which have a loss and are not
    answered. Where all rows keep the contract ``kwanzaa.answer.v1``, the answers get four scores. Answers are kept in
    ``answers-SYSTEM.jsonl``. The same call after a stop goes on after the last whole batch.

    Args:
        adapter: the folder of an adapter or of a whole model; with ``reference`` it may be left out, and then no
            model is loaded.
        data: what the recipe's ``data.eval`` takes.
        base: answer with the model below the adapter, too.
        reference: score the data's own answers, too, where they keep the contract.
        out: folder to write; ``eval`` beside the adapter when left out, ``runs/eval`` without one.
        limit: only the first so many rows.
        settings: how answers are made.
        console: where progress is shown; standard error when left out.

    Returns:
        What ``eval.json`` holds.

    Raises:
        BadInput: naming what is wrong and what would be right.
        OutOfMemory: if a batch does not fit.
    """
    settings, console = settings or Settings(), console or Aside()
    folder = _adapter_folder(adapter, base, reference, settings)
    source = _find(data)
    rows = read_rows(source.rows[:limit])
    contract = rows[0].contract
    if reference and not contract:
        raise BadInput(
            f"--reference: {_first_without(source.rows[:limit])}: the row does not end with an answer of the contract "
            "kwanzaa.answer.v1 (a JSON object with answer.text), so it cannot be scored; leave --reference out"
        )
    place = usable_path("--out", out) if out else folder.absolute().parent / "eval" if folder else OUT
    if place.exists() and not place.is_dir():
        raise BadInput(f"--out {place}: is a file; name a folder")
    if any((place / name).exists() for name in (*CONFIGS, "config.json", atomic_files.MANIFEST)):
        raise BadInput(f"--out {place}: holds an adapter or a model, where more files do harm; name another folder")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {place}: cannot be made: {error.strerror}; name another folder") from None
    about: dict[str, Any] = {"data": source.description, "rows": len(rows), "rows_in_data": len(source.rows)}
    with atomic_files.only_writer(place):
        systems: dict[str, list[Scored]] = {}
        if folder:
            answered, more = _answers(folder, base, source, len(rows), place, settings, console)
            if not contract:
                console.print(f"note: {UNSCORED}")
            systems = {name: _scored(rows, written) for name, written in answered.items()}
            about |= {"adapter": str(folder), **more}
        if reference:
            systems["reference"] = [Scored(row, row.reference, None) for row in rows]
        found = summarise(systems, about)
        atomic_files.write_file(place / "eval.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
        atomic_files.write_file(place / "eval.md", markdown(found))
    return found | {"out": str(place)}


def _adapter_folder(adapter: str | Path | None, base: bool, reference: bool, settings: Settings) -> Path | None:
    if adapter is None:
        if base:
            raise BadInput("--with-base: there is no adapter to compare with its base; name the adapter's folder")
        if not reference:
            raise BadInput("name the folder of an adapter, or give --reference to score the data's own answers")
        return None
    path = Path(adapter)
    if not base or not is_whole(path):
        return artifact.adapter(adapter, settings.base, other_base=settings.other_base)
    path = artifact.adapter(adapter)
    if not settings.base:
        _base_name(path)
    return path


def _find(data: str) -> Source:
    if not data:
        raise BadInput("--data: is empty; name a file, a folder or a data set")
    try:
        return sources.find(data, "eval")
    except BadInput as error:
        said = str(error)
        for name in ("--set data.eval=", "data.eval=", "data.eval "):
            said = said.replace(name, "--data ")
        raise BadInput(said) from None


def _first_without(chats: Sequence[Chat]) -> str:
    return next(chat.where for chat in chats if not keeps_contract(chat))


def _scored(rows: Sequence[Row], written: Mapping[int, Written]) -> list[Scored]:
    reader = read if rows[0].contract else plain
    return [Scored(row, reader(written[number].text), written[number]) for number, row in enumerate(rows)]


def _answers(
    folder: Path, base: bool, source: Source, rows: int, place: Path, settings: Settings, console: Console
) -> tuple[dict[str, dict[int, Written]], dict[str, Any]]:
    """The answers of the adapter, and of its base if asked for; and what they were made with."""
    # They import torch and transformers, which take seconds; what is wrong with the rows was told before.
    from cria_tricks.adapter.chat import open_folder, quantization_of
    from cria_tricks.kwanzaa.generate import answer_rows, fingerprint, hash_of, prompt_ids
    from cria_tricks.models import identity

    console.print(f"loading {folder}, writing to {place}")
    warnings: list[str] = []
    below = _below(folder, base, settings)
    files = identity.of(below) if below else {}
    beneath = None if is_whole(folder) else settings.base
    model, tokenizer = open_folder(folder, base=beneath, other_base=settings.other_base, say=warnings.append)
    for warning in warnings:
        console.print(warning)
    prompts = prompt_ids(source.rows, tokenizer)
    rounded = quantization_of(folder)
    with_what = {
        "base": below.name if below and settings.base else _base_name(folder, must=False),
        "base_files": {**files.get("weights", {}), **files.get("config", {})},
        "quantization": rounded.quantization + " with double quantization" * rounded.double_quantization,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "max_new_tokens": settings.max_new_tokens,
    }
    if any(chat.text for chat in source.rows):
        with_what["text_length"] = length_of_texts(folder)
    found = {}
    for system in ("adapter", "base") if base else ("adapter",):
        about = {
            "system": system,
            "adapter": fingerprint(folder) if system == "adapter" else "",
            **with_what,
            "prompts": hash_of(prompts),
            "references": hash_of([chat.answer for chat in source.rows]),
        }
        answers = Answers(place / f"answers-{system}.jsonl", about)
        if any(row not in answers.rows for row in range(rows)):
            with _asked(model, system, folder, below, settings.other_base) as asked:
                answer_rows(
                    asked,
                    tokenizer,
                    source.rows[:rows],
                    prompts[:rows],
                    answers,
                    batch_size=settings.batch_size,
                    max_new_tokens=settings.max_new_tokens,
                    text_length=with_what.get("text_length", sys.maxsize),
                    console=console,
                    system=system,
                )
        found[system] = answers.rows
    more = {"warnings": warnings} if warnings else {}
    return found, with_what | more | {"batch_size": settings.batch_size, "versions": versions()}


def _below(folder: Path, base: bool, settings: Settings) -> "Weights | None":
    """The base that an adapter is laid over, or that a whole model began as, if that one is to answer, too."""
    # The chat imports torch, which takes seconds.
    from cria_tricks import models
    from cria_tricks.adapter.chat import base_of

    if not is_whole(folder):
        return base_of(folder, settings.base)[1]
    if not base:
        return None
    if settings.base:
        return models.fetch(models.find(str(settings.base)))
    return models.fetch(models.find(_base_name(folder)), trained_over(folder).get("revision") or "")


@contextlib.contextmanager
def _asked(model: Any, system: str, folder: Path, below: "Weights | None", other_base: bool) -> Iterator[Any]:
    """The model that answers: with its adapter, with it switched off, or, for a whole model, the one it began as."""
    # They import torch, which takes seconds.
    from cria_tricks.adapter.chat import open_base, other_than_trained_over
    from cria_tricks.load.adapters import without_adapter
    from cria_tricks.tricks.side_network import SideBlock

    if system == "adapter":
        yield model
    elif hasattr(model, "peft_config") or any(isinstance(module, SideBlock) for module in model.modules()):
        with without_adapter(model) as plain:
            yield plain
    else:
        assert below
        other_than_trained_over(folder, below, other_base)
        model.to("meta")  # two whole models may not fit beside each other
        yield open_base(below)


def length_of_texts(folder: Path) -> int:
    """Tokens of the rows into which texts are cut: as in the training that made a folder, or by default."""
    path = folder / RECIPE
    return (from_toml(path) if path.is_file() else Recipe()).data.max_length


def _base_name(folder: Path, must: bool = True) -> str:
    """What an adapter, or a whole model that ``cria train`` wrote, was trained from."""
    for name in CONFIGS:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return str(json.loads((folder / name).read_text(encoding="utf-8"))["base_model_name_or_path"])
    if (folder / "recipe.toml").is_file():
        return from_toml(str(folder / "recipe.toml")).model
    if must:
        raise BadInput(
            f"--with-base: {folder} holds a whole model and no recipe.toml that names what it was trained from; "
            "evaluate the base in a command of its own: cria eval FOLDER_OF_THE_BASE --out DIR"
        )
    return ""
