"""Collate tokenised rows, packed or not, into batches."""

from collections.abc import Sequence

import torch

from cria_tricks.data.tokens import IGNORED, TokenRow


class PadToLongest:
    """Collate rows into a batch: pad them on the right to the longest row, or to a fixed shape.

    Args:
        pad_id: the token id of padding, which is masked from attention and never a label.
        count: the least number of rows in a batch; missing rows are filled with padding only. A pipeline sets this and
            ``length``, because all its batches must have the same shape.
        length: the least number of tokens in a row.
    """

    def __init__(self, pad_id: int, count: int = 0, length: int = 0):
        self.pad_id = pad_id
        self.count = count
        self.length = length

    def __call__(self, rows: Sequence[TokenRow]) -> dict[str, torch.Tensor]:
        """Collate rows into a batch.

        Returns:
            ``input_ids``, ``labels`` and ``attention_mask`` (1 on real tokens), each int64 of shape (B, T). Packed rows
            get their ``position_ids`` and no mask: with a mask, even one of ones, documents would see each other.
        """
        empty: dict[str, list[int]] = {name: [] for name in rows[0]}
        rows = [*rows, *[empty] * (self.count - len(rows))]
        longest = max(self.length, *(len(row["input_ids"]) for row in rows))

        def padded(name: str, fill: int) -> torch.Tensor:
            return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in rows])

        batch = {"input_ids": padded("input_ids", self.pad_id), "labels": padded("labels", IGNORED)}
        if "position_ids" in rows[0]:
            # All padding has position 0, where a document begins. So each padding token is a document of its own.
            batch["position_ids"] = padded("position_ids", 0)
            return batch
        lengths_B1 = torch.tensor([[len(row["input_ids"])] for row in rows])
        batch["attention_mask"] = (torch.arange(longest) < lengths_B1).long()
        return batch


def trained_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count the tokens that have a loss. A row's first token has none, because no token before it predicts it."""
    return (batch["labels"][:, 1:] != IGNORED).sum()


def real_tokens(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Count the tokens of a batch that are not padding.

    The count is a tensor, because turning it into a Python number would wait for the GPU.
    """
    if "attention_mask" in batch:
        return batch["attention_mask"].sum()
    # A document has at least two tokens, so the last real token of a row has a position above 0. Only the zeros of
    # padding follow. argmax returns the place of the first True in the reversed row, which is their number.
    later_BT = batch["position_ids"].flip(1).ne(0)
    trailing_B = later_BT.int().argmax(1)
    trailing_B = torch.where(later_BT.any(1), trailing_B, later_BT.shape[1])  # a row of padding only has no True
    return batch["position_ids"].numel() - trailing_B.sum()
