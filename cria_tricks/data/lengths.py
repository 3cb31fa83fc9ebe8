"""Read for a plan how long a recipe's rows are [tokens], where rows and tokenizer lie here, without transformers.

The rows go through the same filters and the same tokenising as in training. Only the tokenizer is a lighter one: the
library below transformers' and the template engine that transformers uses, both of which load in a fraction of a
second. What cannot be read this way is not guessed: then a plan takes all rows as full.
"""

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cria_tricks import models
from cria_tricks.common.errors import usable_path
from cria_tricks.data import sources
from cria_tricks.data.prepare import Copies, train_rows
from cria_tricks.data.rules import refuse_missing_libraries
from cria_tricks.recipe import Recipe

LARGEST = 1_000_000
"""Bytes of training and evaluation files together, up to which a plan reads them."""


@dataclass(frozen=True)
class Lengths:
    """The lengths that a plan reckons with.

    Attributes:
        longest: tokens of the longest micro-batch's rows.
        mean: tokens of a row with its padding, in the mean over the run; of a packed row, of what it is packed from.
        rows: training rows; 0 if they were not read.
        why: for rows that are taken as full the reason, in a few words; empty if they were read.
    """

    longest: int
    mean: float
    rows: int = 0
    why: str = ""

    @property
    def in_words(self) -> str:
        """One sentence, for a plan's reader."""
        if self.why:
            return f"rows taken as full: {self.longest:,} tokens ({self.why})"
        return f"rows are at most {self.longest:,} tokens long, read from data.train; --rows-full for the worst case"


class _Unread(Exception):
    """The rows or the tokenizer cannot be read here; the message says why."""


def full(recipe: Recipe, why: str) -> Lengths:
    """Take all rows as long as they may be."""
    return Lengths(recipe.data.max_length, recipe.data.max_length, why=why)


def as_long_as(length: int, recipe: Recipe) -> Recipe:
    """Limit the recipe's rows to this length [tokens]; packed rows stay full."""
    if recipe.tricks.packing:
        return recipe
    shorter = {"max_length": length, "overlap": min(recipe.data.overlap, max(length - 1, 1))}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=shorter)})


def read(recipe: Recipe, augment: Copies | None = None) -> Lengths:
    """Read how long the training rows are, if they and the tokenizer are on this machine and are not streamed.

    Args:
        recipe: what would be trained.
        augment: as for :class:`cria_tricks.data.prepare.Prepare`.

    Raises:
        BadInput: for a row that training would refuse.
    """
    data = recipe.data
    refuse_missing_libraries(data)
    try:
        if data.stream:
            raise _Unread("data.stream=true")
        _refuse_far_or_large(recipe)
        tokenizer = _Tokenizer(_folder(recipe.model))
        train = sources.find(data.train, "train")
        held_out = sources.find(data.eval, "eval")
        rows = train_rows(recipe, train, held_out, tokenizer, _quiet, augment)
    except _Unread as reason:
        return full(recipe, str(reason))
    lengths = sorted(len(row["input_ids"]) for row in rows.rows)
    if recipe.tricks.packing:
        return Lengths(data.max_length, sum(lengths) / len(lengths), len(lengths))
    return Lengths(lengths[-1], padded_mean(lengths, recipe.train.batch_size), len(lengths))


def padded_mean(lengths: list[int], batch: int) -> float:
    """Compute the expected length of a micro-batch's longest row, to which the others are padded [tokens].

    Args:
        lengths: of all rows, sorted.
        batch: rows of a micro-batch, drawn without order.
    """
    batch = min(batch, len(lengths))
    # The i-th shortest is the longest of a micro-batch if the others come from the i - 1 before it.
    longest_of_all = sum(length * math.comb(place, batch - 1) for place, length in enumerate(lengths))
    return longest_of_all / math.comb(len(lengths), batch)


def _refuse_far_or_large(recipe: Recipe) -> None:
    size = 0
    for part, name in (("train", recipe.data.train), ("eval", recipe.data.eval)):
        if name == "nguzo_saba":
            path = Path(__file__).with_name(f"nguzo_saba_{part}.jsonl")
        else:
            path = usable_path(f"data.{part}", name)
        if name == "kwanzaa" or not path.exists():
            raise _Unread(f"data.{part}={name} is not read from the network")
        files = path.rglob("*.txt") if path.is_dir() else [path]
        size += sum(file.stat().st_size for file in files)
    if size > LARGEST:
        raise _Unread(f"its files hold more than {LARGEST // 1000} kB")


def _folder(model: str) -> Path:
    folder = models.tokenizer_here(model)
    if folder is None:
        raise _Unread(f"no tokenizer.json of {model} on this machine")
    return folder


def _quiet(sentence: str) -> None:
    """Say nothing here: training will tell which rows were left out."""


class _Tokenizer:
    """A light stand-in for a tokenizer of transformers: only what ``tokens.py`` asks for, from the same files.

    Args:
        folder: with ``tokenizer.json`` and what stands beside it.
    """

    def __init__(self, folder: Path):
        # Most estimates take rows as full, and need no tokenizer.
        from tokenizers import Tokenizer

        try:
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            self._ids = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._special = _special_tokens(config)
            self.eos_token_id = self._ids.token_to_id(self._special["eos_token"])
            self.chat_template = config.get("chat_template")
            file = folder / "chat_template.jinja"
            if file.is_file():
                self.chat_template = file.read_text(encoding="utf-8")
            self._render = _compiled(self.chat_template) if self.chat_template else None
        except Exception as error:  # each of these libraries has its own; training tells of a tokenizer that is broken
            raise _Unread(f"the tokenizer in {folder} cannot be read without transformers") from error
        self._ids.no_truncation()
        self._ids.no_padding()

        # A whole chat, and the same up to its last turn, are often one.
        self._encoded = functools.lru_cache(maxsize=4)(self._encode)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self._encoded(text, add_special_tokens)}

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._ids.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
        """Write turns as the template does, and tokenise them."""
        options = {"add_generation_prompt": False, "tools": None, "documents": None, **self._special, **options}
        assert self._render is not None, "it is asked for only where there is a template"
        return self(self._render(messages=messages, **options), add_special_tokens=False)["input_ids"]


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The tokens that a config names, by their names: ``eos_token`` and others."""
    found = {}
    for name, token in config.items():
        if name.endswith("_token") and token:
            # Older files write a token with its properties.
            found[name] = token["content"] if isinstance(token, dict) else token
    return found


def _compiled(template: str) -> Any:
    """Compile a chat template as transformers does: without access to Python, blocks on lines of their own."""
    # Most estimates take rows as full, and need no chat template.
    import jinja2
    import jinja2.sandbox

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template).render
