"""Token rows -> padded batches."""

from collections.abc import Sequence

import torch

from cria_tricks.data.tokens import IGNORED


class PadToLongest:
    """Pad the rows of a batch at their right to the longest of them.

    Args:
        pad_id: token id that fills the end; masked from attention and never a label.
    """

    def __init__(self, pad_id: int):
        self.pad_id = pad_id

    def __call__(self, rows: Sequence[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Stack rows.

        Returns:
            ``input_ids``, ``attention_mask`` (1 on real tokens) and ``labels``, each int64 of shape (B, T).
        """
        longest = max(len(row["input_ids"]) for row in rows)

        def padded(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

        ones = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
        return {
            "input_ids": padded("input_ids", self.pad_id),
            "attention_mask": torch.tensor(ones),
            "labels": padded("labels", IGNORED),
        }
