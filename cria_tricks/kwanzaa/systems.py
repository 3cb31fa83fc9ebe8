"""Answer held-out rows with an adapter, and with its base: two of the systems that ``cria eval`` compares."""

import contextlib
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from cria_tricks.adapter.folder import RECIPE, named_base
from cria_tricks.common.version import versions
from cria_tricks.data.sources import DataSource
from cria_tricks.kwanzaa.answers import Answers, Written
from cria_tricks.models import identity
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
    from cria_tricks.kwanzaa.generate import answer_rows, fingerprint, hash_of
    from cria_tricks.load.adapters import without_adapter
    from cria_tricks.load.answering import prompt_ids

    console.print(f"loading {folder}, writing to {place}")
    warnings: list[str] = []
    model, tokenizer = open_folder(
        folder, base=settings.base, other_base=settings.other_base, packed=settings.packed, say=warnings.append
    )
    for warning in warnings:
        console.print(warning)
    trained_with = from_toml(folder / RECIPE).data if (folder / RECIPE).is_file() else Data()
    prompts = prompt_ids(source.rows, tokenizer)
    with_what = _made_with(folder, model, settings)
    if any(chat.text for chat in source.rows):
        with_what["text_length"] = trained_with.max_length
    found = {}
    for system in ("adapter", "base") if base else ("adapter",):
        about = {
            "system": system,
            # The base has no files of its own here: with_what describes its files for both systems.
            "adapter": fingerprint(folder) if system == "adapter" else "",
            **with_what,
            "prompts": hash_of(prompts),
            "references": hash_of([chat.answer for chat in source.rows]),
        }
        answers = Answers(place / f"answers-{system}.jsonl", about)
        if not set(range(rows)) <= answers.rows.keys():
            with contextlib.nullcontext(model) if system == "adapter" else without_adapter(model) as asked:
                answer_rows(
                    asked,
                    tokenizer,
                    source.rows[:rows],
                    prompts[:rows],
                    answers,
                    batch_size=settings.batch_size,
                    max_new_tokens=settings.max_new_tokens,
                    text_length=with_what.get("text_length", sys.maxsize),
                    add_eos=bool(trained_with.eos),
                    console=console,
                    system=system,
                )
        found[system] = answers.rows
    # Below is what does not decide the answers, so it is not in the header of the saved ones.
    if warnings:
        with_what["warnings"] = warnings
    return found, with_what | {"batch_size": settings.batch_size, "versions": versions()}


def _made_with(folder: Path, model: Any, settings: Settings) -> dict[str, Any]:
    """Describe what makes the answers, so that answers of another base, dtype or device are not mixed with these."""
    from cria_tricks.adapter.opening import base_of, quantization_of  # slow to import, as above

    _, below = base_of(folder, settings.base)
    files = identity.of(below) if below else {}  # a whole model has no base
    name = named_base(folder)
    if below and settings.base:
        name = below.name
    rounded = quantization_of(folder)
    return {
        "base": name,
        "base_files": {**files.get("weights", {}), **files.get("config", {})},
        "quantization": rounded.quantization + " with double quantization" * rounded.double_quantization,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "max_new_tokens": settings.max_new_tokens,
        **({"packed": True} if settings.packed else {}),
    }
