"""Give the lengths of the Kwanzaa project's rows; the rows are under another licence and not in this package."""

import json
from pathlib import Path
from typing import Literal


def row_lengths(part: Literal["train", "eval", "curated"]) -> list[tuple[int, int]]:
    """Return (tokens, trained tokens) of each row in the file's order, by SmolLM2's tokenizer, cut at 2,048 tokens.

    Args:
        part: the real training rows, the real evaluation rows, or the training rows of the recipe ``kwanzaa_curated``.
    """
    found = json.loads(Path(__file__).with_name("kwanzaa_lengths.json").read_text(encoding="utf-8"))[part]
    return [(tokens, trained) for tokens, trained in found]
