"""Evaluate an adapter, its base and the reference on held-out rows: answers, loss, perplexity, confidence intervals.

These three are called systems here. The reference is the data's own answers. If all rows keep the answer contract, the
answers of each system are scored, too.
"""

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks import models
from cria_tricks.adapter import folder as artifact
from cria_tricks.adapter.folder import CONFIGS, MODEL_FILES, RECIPE, is_whole, trained_over
from cria_tricks.common import atomic_files
from cria_tricks.common.console import Aside
from cria_tricks.common.errors import BadInput, usable_path
from cria_tricks.common.version import versions
from cria_tricks.data import sources
from cria_tricks.data.rows import Chat
from cria_tricks.data.sources import DataSource
from cria_tricks.kwanzaa.answers import Answers, Written
from cria_tricks.kwanzaa.page import UNSCORED, markdown
from cria_tricks.kwanzaa.prompt import QARow, keeps_contract, read_rows
from cria_tricks.kwanzaa.reply import plain_reply, read_reply
from cria_tricks.kwanzaa.summary import Scored, summarise
from cria_tricks.kwanzaa.training import read_training
from cria_tricks.kwanzaa.trivial import trivial_reply
from cria_tricks.models import identity
from cria_tricks.predict.answer_time import BATCH, NEW_TOKENS, Asked
from cria_tricks.recipe import Recipe, from_toml

OUT = Path("runs/eval")
"""The folder of the results if no adapter is given."""


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
    """

    batch_size: int = BATCH
    max_new_tokens: int = NEW_TOKENS
    base: str | Path | None = None
    other_base: bool = False
    contract: bool | None = None


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
    answer. If all rows keep the contract ``kwanzaa.answer.v1``, the answers get four scores. The answers of each system
    are saved in ``answers-SYSTEM.jsonl``, so the same call after an interruption continues after the last whole batch.

    Args:
        adapter: the folder of an adapter or of a whole model; ``None`` if only answers without a model are scored.
        data: a file, a folder or a data set, as for the recipe's ``data.eval``.
        base: also answer with the base model, that is, without the adapter.
        reference: also score the data's own answers; all rows must keep the contract.
        trivial: also score the answers that need no model; all rows must keep the contract.
        out: folder to write; ``eval`` beside the adapter when left out, ``runs/eval`` without an adapter.
        limit: evaluate only this many rows, the first ones.
        settings: the settings for generating answers.
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
    source = sources.find_named("--data ", data, "eval", contract=_contract(folder, settings))
    rows = read_rows(source.rows[:limit])
    if reference or trivial:
        _refuse_unscorable(source.rows[:limit], "--reference" if reference else "--trivial")
    place = _made_folder(out, folder)
    about: dict[str, Any] = {"data": source.description, "rows": len(rows), "rows_in_data": len(source.rows)}
    with atomic_files.only_writer(place):
        systems: dict[str, list[Scored]] = {}
        training = None
        if folder:
            answered, more = _answers(folder, base, source, len(rows), place, settings, console)
            systems = {name: _scored(rows, written) for name, written in answered.items()}
            about |= {"adapter": str(folder), **more}
            if rows[0].contract:
                training = read_training(folder, console.print)
            else:
                console.print(f"note: {UNSCORED}")
        systems |= _without_a_model(rows, trivial, reference)
        found = summarise(systems, about, training)
        _write(found, place)
    return found | {"out": str(place)}


def _write(found: dict[str, Any], place: Path) -> None:
    atomic_files.write_file(place / "eval.json", json.dumps(found, indent=2, allow_nan=False) + "\n")
    atomic_files.write_file(place / "eval.md", markdown(found))


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
    path = Path(adapter)
    if not base or not is_whole(path):
        return artifact.adapter(adapter, settings.base, other_base=settings.other_base)
    # A whole model, and its base is to answer, too: settings.base is then that base, and not one below the model.
    path = artifact.adapter(adapter)
    if not settings.base:
        _base_name(path)  # raises if no file names the base
    return path


def _made_folder(out: str | Path | None, adapter: Path | None) -> Path:
    """Make the folder of the results, unless writing there would do harm, and return it."""
    if out:
        place = usable_path("--out", out)
    elif adapter:
        place = adapter.absolute().parent / "eval"
    else:
        place = OUT
    if place.exists() and not place.is_dir():
        raise BadInput(f"--out {place}: is a file; name a folder")
    if any((place / name).exists() for name in (*MODEL_FILES, atomic_files.MANIFEST)):
        raise BadInput(f"--out {place}: holds an adapter or a model, where more files do harm; name another folder")
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(f"--out {place}: cannot be made: {error.strerror}; name another folder") from None
    return place


def _contract(folder: Path | None, settings: Settings) -> bool:
    """Tell whether every row gets the system prompt with the contract: as asked for, or as in the training."""
    if settings.contract is not None:
        return settings.contract
    return folder is not None and (folder / RECIPE).is_file() and from_toml(folder / RECIPE).data.contract


def _refuse_unscorable(chats: Sequence[Chat], option: str) -> None:
    """Refuse to score answers without a model where the data's own answers do not keep the contract."""
    for chat in chats:
        if not keeps_contract(chat):
            raise BadInput(
                f"{option}: {chat.where}: the row does not end with an answer of the contract kwanzaa.answer.v1 "
                f"(a JSON object with answer.text), so it cannot be scored; leave {option} out"
            )


def _scored(rows: Sequence[QARow], written: Mapping[int, Written]) -> list[Scored]:
    """Parse the answers of one system: as JSON if the rows keep the contract, else as plain text."""
    reader = read_reply if rows[0].contract else plain_reply
    return [Scored(row, reader(written[number].text), written[number]) for number, row in enumerate(rows)]


def _without_a_model(rows: Sequence[QARow], trivial: bool, reference: bool) -> dict[str, list[Scored]]:
    """Score the answers that need no model, those that are asked for."""
    systems = {}
    if trivial:
        systems["trivial"] = [Scored(row, trivial_reply(row), None) for row in rows]
    if reference:
        systems["reference"] = [Scored(row, row.reference, None) for row in rows]
    return systems


def _answers(
    folder: Path, base: bool, source: DataSource, rows: int, place: Path, settings: Settings, console: Console
) -> tuple[dict[str, dict[int, Written]], dict[str, Any]]:
    """Answer the rows with the adapter, and with its base if asked for.

    Returns:
        The answers of each system, by row number; and a description of what made them.
    """
    # Imported here: torch and transformers take seconds, and wrong arguments should be refused before that.
    from cria_tricks.adapter.chat import open_folder
    from cria_tricks.kwanzaa.generate import answer_rows, fingerprint, hash_of, how_long
    from cria_tricks.load.answering import prompt_ids

    console.print(f"loading {folder}, writing to {place}")
    warnings: list[str] = []
    below = _below(folder, base, settings)
    beneath = None if is_whole(folder) else settings.base  # a whole model is loaded without a base
    model, tokenizer = open_folder(folder, base=beneath, other_base=settings.other_base, say=warnings.append)
    for warning in warnings:
        console.print(warning)
    prompts = prompt_ids(source.rows, tokenizer)
    with_what = _made_with(folder, below, model, settings)
    if any(chat.text for chat in source.rows):
        with_what["text_length"] = length_of_texts(folder)
    # Each system and the hash of its own files. The base has none: with_what describes its files for both systems.
    asked_for = {"adapter": fingerprint(folder)}
    if base:
        asked_for["base"] = ""
    found = {}
    for system, adapter in asked_for.items():
        about = {
            "system": system,
            "adapter": adapter,
            **with_what,
            "prompts": hash_of(prompts),
            "references": hash_of([chat.answer for chat in source.rows]),
        }
        answers = Answers(place / f"answers-{system}.jsonl", about)
        missing = [len(prompts[row]) for row in range(rows) if row not in answers.rows]
        if missing:
            left = Asked(sum(map(bool, missing)), max(missing), settings.max_new_tokens, settings.batch_size)
            console.print(f"{system}: {how_long(model, folder, system, left)}")
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
    # Below is what does not decide the answers, so it is not in the header of the saved ones.
    if warnings:
        with_what["warnings"] = warnings
    return found, with_what | {"batch_size": settings.batch_size, "versions": versions()}


def _made_with(folder: Path, below: models.Weights | None, model: Any, settings: Settings) -> dict[str, Any]:
    """Describe what makes the answers, so that answers of another base, dtype or device are not mixed with these."""
    from cria_tricks.adapter.chat import quantization_of  # slow to import, as above

    files = identity.of(below) if below else {}
    base = ""
    if below and settings.base:
        base = below.name
    rounded = quantization_of(folder)
    return {
        "base": base or _base_name(folder, must=False),
        "base_files": {**files.get("weights", {}), **files.get("config", {})},
        "quantization": rounded.quantization + " with double quantization" * rounded.double_quantization,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "max_new_tokens": settings.max_new_tokens,
    }


def _below(folder: Path, base: bool, settings: Settings) -> models.Weights | None:
    """Find the base model of an adapter, or the model that a whole model was trained from, if that must answer, too."""
    from cria_tricks.adapter.chat import base_of  # slow to import, as above

    if not is_whole(folder):
        return base_of(folder, settings.base)[1]
    if not base:
        return None
    if settings.base:
        return models.fetch(models.find(str(settings.base)))
    return models.fetch(models.find(_base_name(folder)), trained_over(folder).get("revision") or "")


@contextlib.contextmanager
def _asked(model: Any, system: str, folder: Path, below: models.Weights | None, other_base: bool) -> Iterator[Any]:
    """Yield the model of a system: with its adapter, without it, or the base that a whole model was trained from."""
    from cria_tricks.adapter.chat import open_base, other_than_trained_over  # slow to import, as above
    from cria_tricks.load.adapters import without_adapter
    from cria_tricks.tricks.side_network import SideBlock

    if system == "adapter":
        yield model
    elif hasattr(model, "peft_config") or any(isinstance(module, SideBlock) for module in model.modules()):
        with without_adapter(model) as base:
            yield base
    else:
        assert below
        other_than_trained_over(folder, below, other_base)
        model.to("meta")  # frees its memory, because two whole models may not fit
        yield open_base(below)


def length_of_texts(folder: Path) -> int:
    """Return the length of the rows into which texts are cut (tokens): that of the training, or the default."""
    recipe = Recipe()
    if (folder / RECIPE).is_file():
        recipe = from_toml(folder / RECIPE)
    return recipe.data.max_length


def _base_name(folder: Path, must: bool = True) -> str:
    """Read the name of the base of an adapter, or of a whole model that ``cria train`` wrote.

    Args:
        folder: the folder of the adapter, or of the model.
        must: whether to raise an error if no file names the base; otherwise the name is then empty.

    Raises:
        BadInput: if no file names the base, and ``must`` is true.
    """
    for name in CONFIGS:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            return str(json.loads((folder / name).read_text(encoding="utf-8"))["base_model_name_or_path"])
    if (folder / RECIPE).is_file():
        return from_toml(folder / RECIPE).model
    if must:
        raise BadInput(
            f"--with-base: {folder} holds a whole model and no recipe.toml that names what it was trained from; "
            "evaluate the base in a command of its own: cria eval FOLDER_OF_THE_BASE --out DIR"
        )
    return ""
