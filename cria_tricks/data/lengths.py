"""Read the lengths of a recipe's rows [tokens] for ``cria plan`` and ``cria data``, without transformers.

This works if rows and tokenizer are on this machine. The rows are filtered and tokenised by the same code as in
training. Only the tokenizer is a lighter one, made of two libraries that transformers itself uses: ``tokenizers`` and
the template engine ``jinja2``. Both load in a fraction of a second. If the lengths cannot be read this way, they are
not guessed: the plan then assumes that every row is full (``data.max_length`` tokens).
"""

import functools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cria_tricks import models
from cria_tricks.common.errors import usable_path
from cria_tricks.data import sources
from cria_tricks.data.prepare import Copies, eval_rows, train_rows
from cria_tricks.data.rules import refuse_missing_libraries
from cria_tricks.data.samples import prompt_of
from cria_tricks.data.tokens import prompt
from cria_tricks.recipe import Recipe

LARGEST = 1_000_000
"""The largest size at which a plan reads the training and evaluation files [bytes, both together]."""


@dataclass(frozen=True)
class Lengths:
    """The row lengths that a plan uses.

    Attributes:
        longest: tokens of the longest row; ``data.max_length`` if rows are packed or taken as full.
        mean: mean number of tokens in a row over the run, padding included; with packing, of the rows before packing.
        rows: the number of training rows; 0 if they were not read.
        why: if all rows are taken as full, the reason in a few words; empty if the rows were read.
        each: the lengths of all rows in ascending order, if they were read and are not packed [tokens].
        prompts: the lengths of the prompts of the evaluation rows that have one, if they were read [tokens].
        evaluated: the length of the longest evaluation row; 0 if they were not read, or all rows are taken as full.
    """

    longest: int
    mean: float
    rows: int = 0
    why: str = ""
    each: tuple[int, ...] = ()
    prompts: tuple[int, ...] = ()
    evaluated: int = 0

    def mean_of(self, batch: int) -> float:
        """Return what :attr:`mean` would be with so many rows in a micro-batch [tokens]."""
        return padded_mean(self.each, batch) if self.each else self.mean

    @property
    def in_words(self) -> str:
        """One sentence on these lengths, which ``cria plan`` prints."""
        if self.why:
            return f"rows taken as full: {self.longest:,} tokens ({self.why})"
        evaluated = f" (data.eval: {self.evaluated:,})" if self.evaluated > self.longest else ""
        longest = f"rows are at most {self.longest:,} tokens long, read from data.train{evaluated}"
        return f"{longest}; --rows-full for the worst case"


class _Unread(Exception):
    """The rows or the tokenizer cannot be read here; the message says why."""


def full(recipe: Recipe, why: str) -> Lengths:
    """Return the lengths of rows that are all full, with the reason for this assumption."""
    return Lengths(recipe.data.max_length, float(recipe.data.max_length), why=why)


def as_long_as(length: int, recipe: Recipe) -> Recipe:
    """Return the recipe with this maximum length of a row [tokens]; unchanged if rows are packed, which stay full."""
    if recipe.tricks.packing:
        return recipe
    shorter = {"max_length": length, "overlap": min(recipe.data.overlap, max(length - 1, 1))}
    return recipe.model_copy(update={"data": recipe.data.model_copy(update=shorter)})


def read(recipe: Recipe, augment: Copies | None = None) -> Lengths:
    """Read the lengths of the training rows, if these and the tokenizer are on this machine and not streamed.

    Args:
        recipe: the settings of the planned run.
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
        train, held_out = sources.both(data, recipe.train.seed)
        rows = train_rows(recipe, train, held_out, tokenizer, _quiet, augment)
    except _Unread as reason:
        return full(recipe, str(reason))
    lengths = sorted(len(row["input_ids"]) for row in rows.rows)
    prompts = tuple(len(prompt(chat, tokenizer)) for chat in held_out.rows if prompt_of(chat))
    evaluated = eval_rows(recipe, held_out, tokenizer).longest
    if recipe.tricks.packing:
        mean = sum(lengths) / len(lengths)
        return Lengths(data.max_length, mean, len(lengths), prompts=prompts, evaluated=evaluated)
    mean = padded_mean(lengths, recipe.train.batch_size)
    return Lengths(lengths[-1], mean, len(lengths), each=tuple(lengths), prompts=prompts, evaluated=evaluated)


def open_tokenizer(model: str) -> Any:
    """Open a model's tokenizer, if possible without transformers; of a hub model only small files are downloaded.

    Raises:
        BadInput: if there is no such model, or its tokenizer cannot be had or read.
    """
    folder = models.fetch_tokenizer(model)
    try:
        return _Tokenizer(folder)
    except _Unread:
        # It imports torch and transformers, which read older kinds of tokenizers, too.
        from cria_tricks.models import pretrained

        return pretrained.tokenizer(folder, model)


def padded_mean(lengths: Sequence[int], batch: int) -> float:
    """Compute the expected length of a micro-batch's longest row, to which the others are padded [tokens].

    Args:
        lengths: the lengths of all rows, in ascending order.
        batch: rows of a micro-batch, drawn at random.
    """
    batch = min(batch, len(lengths))
    # The row at a place (from 0) is the longest of a micro-batch if the other batch - 1 rows are among those before it,
    # so it is the longest of comb(place, batch - 1) micro-batches, out of comb(all rows, batch).
    longest_of_all = sum(length * math.comb(place, batch - 1) for place, length in enumerate(lengths))
    return longest_of_all / math.comb(len(lengths), batch)


def _refuse_far_or_large(recipe: Recipe) -> None:
    files: set[Path] = set()
    names = {"train": recipe.data.train, "eval": recipe.data.eval or recipe.data.train}
    for part, name in names.items():
        path = sources.ours(name, part) if name in sources.OURS else usable_path(f"data.{part}", name)
        if name in ("kwanzaa", sources.CURATED) or not path.exists():
            raise _Unread(f"data.{part}={name} is not read from the network")
        files |= set(path.rglob("*.txt")) if path.is_dir() else {path}
    if sum(file.stat().st_size for file in files) > LARGEST:
        raise _Unread(f"its files hold more than {LARGEST // 1000} kB")


def _folder(model: str) -> Path:
    folder = models.tokenizer_here(model)
    if folder is None:
        raise _Unread(f"no tokenizer.json of {model} on this machine")
    return folder


def _quiet(sentence: str) -> None:
    """Drop a sentence on rows that were left out: training will print it, and a plan needs only the lengths."""


class _Tokenizer:
    """A light replacement for a transformers tokenizer, made from the same files, with only what ``tokens.py`` uses.

    Args:
        folder: the folder with ``tokenizer.json``, ``tokenizer_config.json`` and, for some models, the chat template.
    """

    def __init__(self, folder: Path):
        # Most estimates take rows as full, and need no tokenizer.
        from tokenizers import Tokenizer

        try:
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
            self._ids = Tokenizer.from_file(str(folder / "tokenizer.json"))
            self._special = _special_tokens(config)
            self.eos_token_id = self._ids.token_to_id(self._special["eos_token"])
            self.bos_token_id = self._ids.token_to_id(self._special.get("bos_token", ""))
            self.added_tokens_decoder = self._ids.get_added_tokens_decoder()
            self.all_special_ids = [number for number, token in self.added_tokens_decoder.items() if token.special]
            self.chat_template = config.get("chat_template")
            file = folder / "chat_template.jinja"
            if file.is_file():
                self.chat_template = file.read_text(encoding="utf-8")
            if self.chat_template:
                _compiled(self.chat_template)
        except Exception as error:  # each library raises its own errors; training will report a broken tokenizer
            raise _Unread(f"the tokenizer in {folder} cannot be read without transformers") from error
        self._ids.no_truncation()
        self._ids.no_padding()

        # tokens.py asks for a whole chat, and again for the chat up to each answer. Often the two are the same text.
        self._encoded = functools.lru_cache(maxsize=4)(self._encode)

    def __call__(
        self, text: str, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {"input_ids": self._encoded(text, add_special_tokens)}
        if return_offsets_mapping:
            found["offset_mapping"] = self._ids.encode(text, add_special_tokens=add_special_tokens).offsets
        return found

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._ids.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool = True, chat_template: str = "", **options: Any
    ) -> Any:
        """Write turns as text, by the chat template, and tokenise them if asked to."""
        options = {"add_generation_prompt": False, "tools": None, "documents": None, **self._special, **options}
        text = _compiled(chat_template or self.chat_template)(messages=messages, **options)
        if not tokenize:
            return text
        return self(text, add_special_tokens=False)["input_ids"]


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens of a tokenizer's config by their names, such as ``eos_token``."""
    found = {}
    for name, token in config.items():
        if name.endswith("_token") and token:
            # Older files have an object here, with the token and its properties.
            found[name] = token["content"] if isinstance(token, dict) else token
    return found


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    """Compile a chat template as transformers does: in a sandbox without access to Python, with the same options."""
    # Most estimates take rows as full, and need no chat template.
    import jinja2
    import jinja2.sandbox

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    return environment.from_string(template).render


def row_lengths(part: Literal["train", "eval", "curated"]) -> list[tuple[int, int]]:
    """Return (tokens, trained tokens) of each row of the Kwanzaa project, by SmolLM2's tokenizer, cut at 2,048 tokens.

    The rows themselves are under another licence, and not in this package.

    Args:
        part: the real training rows, the real evaluation rows, or the training rows of the recipe ``kwanzaa_curated``.
    """
    found = json.loads(Path(__file__).with_name("kwanzaa_lengths.json").read_text(encoding="utf-8"))[part]
    return [(tokens, trained) for tokens, trained in found]
