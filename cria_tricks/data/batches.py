"""Collate token rows, packed or not, into batches."""

from collections.abc import Sequence

import torch

from cria_tricks.data.tokens import IGNORED, TokenRow


class PadToLongest:
    """Pad the rows of a batch at their right to the longest of them, or to a shape that is always the same.

    Args:
        pad_id: token id that fills the end; masked from attention and never a label.
        count: rows that every batch gets at least; those that are missing are padding throughout.
        length: tokens that every row gets at least.
    """

    def __init__(self, pad_id: int, count: int = 0, length: int = 0):
        self.pad_id = pad_id
        self.count = count
        self.length = length

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """Collate rows into a batch.

        Returns:
            ``input_ids``, ``labels`` and ``attention_mask`` (1 on real tokens), each int64 of shape (B, T). Packed
            rows get their ``position_ids`` and no mask: even one of ones would let documents see each other.
        """
        empty: dict[str, list[int]] = {name: [] for name in rows[0]}
        rows = [*rows, *[empty] * (self.count - len(rows))]
        longest = max(self.length, *(len(row["input_ids"]) for row in rows))

        def padded(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

        batch = {"input_ids": padded("input_ids", self.pad_id), "labels": padded("labels", IGNORED)}
        if "position_ids" in rows[0]:
            # Padding has position 0 throughout, so each of its tokens is a document of its own.
            batch["position_ids"] = padded("position_ids", 0)
            return batch
        lengths_B1 = torch.tensor([[len(row["input_ids"])] for row in rows])
        batch["attention_mask"] = (torch.arange(longest) < lengths_B1).long()
        return batch


def real_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count the tokens of a batch that are not padding, as a tensor, because asking a GPU for a number waits for it."""
    if "attention_mask" in batch:
        return batch["attention_mask"].sum()
    later_BT = batch["position_ids"].flip(1).ne(0)
    trailing_B = later_BT.int().argmax(1)  # zeros at a row's end; a document has two tokens
    trailing_B = torch.where(later_BT.any(1), trailing_B, later_BT.shape[1])  # a row may be padding throughout
    return batch["position_ids"].numel() - trailing_B.sum()
