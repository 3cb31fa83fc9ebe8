"""The files of a folder of token shards, and what its ``prepared.json`` says.

A shard is two files. ``00000.ds`` holds the token ids of its documents one after another, uint16 or uint32,
little-endian. ``00000.ds.index`` holds the end of each document [tokens], uint64. datatrove's ``DocumentTokenizer``
writes the same two files. ``manifest.json`` has the size and sha256 of each file. ``prepared.json`` says
what the tokens were made of, so that a run can refuse tokens of another tokenizer or other settings.
"""

import hashlib
import json
from typing import Any

import numpy as np

from cria_tricks.settings import Data

VERSION = 1
SETTINGS = ("min_words", "max_words", "language", "quality", "duplicates", "leakage")
"""The settings that choose the rows. Training on the shards must have the values that they were prepared with."""
PROBE = "The 12 quick naïve foxes' cost: $3.50\n\tdéjà vu, 東京 🦊  <b>http://x.org/?a=1_b</b>\r\n"


def tokens_file(shard: int) -> str:
    return f"{shard:05}.ds"


def index_file(shard: int) -> str:
    return f"{shard:05}.ds.index"


def dtype_for(tokenizer: Any) -> np.dtype:
    """Return the smallest integer that holds every token id: 16 bits up to a vocabulary of 65,536, else 32."""
    return np.dtype("<u2") if len(tokenizer) <= 2**16 else np.dtype("<u4")


def identity(tokenizer: Any) -> str:
    """Hash what decides a text's tokens: the vocabulary, the EOS token, and the ids of one difficult line."""
    vocabulary = sorted(tokenizer.get_vocab().items())
    about = [vocabulary, tokenizer.eos_token_id, tokenizer(PROBE)["input_ids"]]
    return hashlib.sha256(json.dumps(about).encode()).hexdigest()


def made_of(data: Data, train: Any, held_out: Any, tokenizer: Any, model: str) -> dict[str, Any]:
    """Describe all that decides the content of the shards, as JSON data.

    Args:
        data: the recipe's ``data`` fields.
        train: the source of the rows, with ``description`` and ``sha256``.
        held_out: the evaluation rows, the same. They decide nothing with ``data.leakage=ignore``.
        tokenizer: the model's tokenizer.
        model: the model's name, for messages.
    """
    fields = data.model_dump(mode="json")
    return {
        "version": VERSION,
        "source": {"description": train.description, "sha256": train.sha256},
        "eval_sha256": "" if data.leakage == "ignore" else held_out.sha256,
        "tokenizer": {"of": model, "sha256": identity(tokenizer)},
        "dtype": dtype_for(tokenizer).name,
        "settings": {name: fields[name] for name in SETTINGS},
    }
