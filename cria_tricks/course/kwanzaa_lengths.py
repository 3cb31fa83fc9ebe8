"""How long the real rows are. The rows themselves are under another licence, and not here."""

import json
from pathlib import Path
from typing import Literal


def row_lengths(part: Literal["train", "eval"]) -> list[tuple[int, int]]:
    """Tokens and trained tokens of each row, in its order; at most 2,048, counted by SmolLM2's tokenizer."""
    found = json.loads(Path(__file__).with_name("kwanzaa_lengths.json").read_text(encoding="utf-8"))[part]
    return [(tokens, trained) for tokens, trained in found]
