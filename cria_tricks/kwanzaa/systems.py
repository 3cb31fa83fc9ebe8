"""Answer held-out rows with an adapter, and with its base: two of the systems that ``cria eval`` compares."""

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks import models
from cria_tricks.adapter.folder import CONFIGS, RECIPE, is_whole, trained_over
from cria_tricks.common.errors import BadInput
from cria_tricks.common.version import versions
from cria_tricks.data.sources import DataSource
from cria_tricks.kwanzaa.answers import Answers, Written
from cria_tricks.models import identity
from cria_tricks.predict.answer_time import Asked
from cria_tricks.recipe import from_toml
from cria_tricks.settings import BATCH, NEW_TOKENS, Data


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


def answers_of_systems(
    folder: Path, base: bool, source: DataSource, rows: int, place: Path, settings: Settings, console: Console
) -> tuple[dict[str, dict[int, Written]], dict[str, Any]]:
    """Answer the rows with the adapter, and with its base if asked for; return the answers, and what made them."""
    # Imported here: torch and transformers take seconds, and wrong arguments should be refused before that.
    from cria_tricks.adapter.opening import open_folder
    from cria_tricks.kwanzaa.generate import answer_rows, fingerprint, hash_of, how_long
    from cria_tricks.load.answering import prompt_ids

    console.print(f"loading {folder}, writing to {place}")
    warnings: list[str] = []
    below = _below(folder, base, settings)
    beneath = None if is_whole(folder) else settings.base
    other, packed = settings.other_base, settings.packed
    model, tokenizer = open_folder(folder, base=beneath, other_base=other, packed=packed, say=warnings.append)
    for warning in warnings:
        console.print(warning)
    prompts = prompt_ids(source.rows, tokenizer)
    with_what = _made_with(folder, below, model, settings)
    if any(chat.text for chat in source.rows):
        with_what["text_length"] = data_of(folder).max_length
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
            console.print(f"{system}: {how_long(model, folder, system, left, packed=settings.packed)}")
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
                    add_eos=bool(data_of(folder).eos),
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
    from cria_tricks.adapter.opening import quantization_of  # slow to import, as above

    files = identity.of(below) if below else {}
    base = ""
    if below and settings.base:
        base = below.name
    rounded = quantization_of(folder)
    return {
        "base": base or base_name(folder, must=False),
        "base_files": {**files.get("weights", {}), **files.get("config", {})},
        "quantization": rounded.quantization + " with double quantization" * rounded.double_quantization,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "max_new_tokens": settings.max_new_tokens,
        **({"packed": True} if settings.packed else {}),
    }


def _below(folder: Path, base: bool, settings: Settings) -> models.Weights | None:
    """Find the base model of an adapter, or the model that a whole model was trained from, if that must answer, too."""
    from cria_tricks.adapter.opening import base_of  # slow to import, as above

    if not is_whole(folder):
        return base_of(folder, settings.base)[1]
    if not base:
        return None
    if settings.base:
        return models.fetch(models.find(str(settings.base)))
    return models.fetch(models.find(base_name(folder)), trained_over(folder).get("revision") or "")


@contextlib.contextmanager
def _asked(model: Any, system: str, folder: Path, below: models.Weights | None, other_base: bool) -> Iterator[Any]:
    """Yield the model of a system: with its adapter, without it, or the base that a whole model was trained from."""
    from cria_tricks.adapter.opening import open_base, other_than_trained_over  # slow to import, as above
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


def data_of(folder: Path) -> Data:
    """Read how rows became tokens in training; the defaults, if the folder does not say it."""
    return from_toml(folder / RECIPE).data if (folder / RECIPE).is_file() else Data()


def base_name(folder: Path, must: bool = True) -> str:
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
