"""Answer what code asks about the values of fake tensors, which have none; refuse it where no answer can be given."""

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import __version__, masking_utils

from cria_tricks.common.errors import BadInput
from cria_tricks.step_plan import Plan
from cria_tricks.tricks import packing


@contextlib.contextmanager
def refuse_data_dependent_shapes(kind: str) -> Iterator[None]:
    """Turn the error of a shape that depends on tensor values into one line.

    In transformers 5.16, for example, the router of a mixture of experts decides how many tokens each expert gets.

    Args:
        kind: the model type, for the message.

    Raises:
        BadInput: if code inside the context asks a fake tensor for its values.
    """
    try:
        yield
    except DataDependentOutputException:
        raise BadInput(
            f"--dry-run: in transformers {__version__} shapes inside a {kind} model depend on numbers, and a dry run "
            "has none; leave --dry-run out, or take a newer transformers"
        ) from None


@contextlib.contextmanager
def known_values(plan: Plan) -> Iterator[None]:
    """Answer two questions about the values of tensors, because fake tensors have no values.

    - Does the batch need an attention mask? A single row has no padding, so it needs none. Several rows usually differ
      in length and have padding, so they need one, except with flash_attention_2, which takes no such mask.
    - How long are the documents of a packed row? One document is taken to fill the row. Several short ones would save
      as many bytes for the backward pass.
    """
    patch = unittest.mock.patch.object
    needs_no_mask = masking_utils._ignore_causal_mask_sdpa

    def without_values(padding_mask: torch.Tensor | None, *sizes: Any) -> bool:
        if flash_attention_2(plan):  # needs no mask for a sliding window either, so leave out its size, the last one
            return needs_no_mask(None, *sizes[:4])
        if padding_mask is None or len(padding_mask) == 1:
            return needs_no_mask(None, *sizes)  # None: there is no padding
        return needs_no_mask(padding_mask, *sizes)

    def one_document_a_row(begins_BT: torch.Tensor) -> "_Lengths":
        rows, tokens = begins_BT.shape
        return _Lengths([tokens] * rows)

    with (
        patch(packing, "document_lengths", one_document_a_row),
        patch(masking_utils, "_ignore_causal_mask_sdpa", without_values),
    ):
        yield


class _Lengths(list[int]):
    """A list of document lengths in place of a tensor: it has the three tensor methods that the callers use."""

    def cpu(self) -> "_Lengths":
        return self

    def dim(self) -> int:
        return 1

    def tolist(self) -> list[int]:
        return self


def flash_attention_2(plan: Plan) -> bool:
    """Whether attention is that of the package flash-attn."""
    return plan.model.get("attn_implementation") == "flash_attention_2"
