r"""Packing: several documents in one row, and attention only inside each of them.

Saves    padding: a batch of B rows costs B x the tokens of its longest row -> its real tokens      [bytes, FLOPs]
Costs    fewer optimizer steps an epoch, because rows are fuller; with attention = eager a T x T mask per packed row
Claim    exact per document: its logits are the same bits, whatever its neighbours are
Needs    position ids that start again at 0 in each document, and no attention mask at all; no package, not even
         flash-attn
Breaks   a mask of ones or a KV cache beside the position ids: with either, documents see each other, without an error;
         models without position ids; flash_attention_2 with more than one row a batch, because transformers (5.23)
         tells documents apart in a single row only
Sources  Krell et al. 2021, arXiv:2107.02027, sec. 3 (packing without cross-contamination); best fit decreasing:
         Johnson 1974, doi:10.1137/0203025; the leak: transformers pull request 31629
Ours     best-fit packing in 12 lines, and attention document by document over torch's kernel: it costs the squares of
         the documents' lengths instead of T^2. With attention = eager transformers makes a block-diagonal mask from the
         position ids

Shapes: R packed rows of at most T tokens, from N documents. Position ids count from 0 in each document. Queries
(B, H, T, D), keys and values (B, K, T, D).
"""

import bisect
from collections.abc import Callable, Sequence

import torch

from cria_tricks.data.tokens import IGNORED

REFERENCE = ("best_fit", "by_document")
PLAIN = """
from transformers import AutoModelForCausalLM, DataCollatorWithFlattening

# With a KV cache, transformers would let the documents see each other. The Trainer
# switches it off by itself, a loop of your own does not.
model = AutoModelForCausalLM.from_pretrained(base, dtype="float32", use_cache=False)
# One packed sequence of all the batch's documents, whose positions start again, and no
# attention mask. Under sdpa each document is still computed against all others;
# attn_implementation="flash_attention_2" skips them.
collate = DataCollatorWithFlattening()
"""


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Put each document, the longest first, into the packed row in which it leaves the least room.

    Args:
        lengths: tokens of each document, none above ``capacity``.
        capacity: tokens that a packed row holds.

    Returns:
        For each packed row the indices of its documents. At most 11/9 of the fewest possible rows, and four more
        (Johnson et al. 1974).
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, row), sorted: the first that is large enough is the best fit
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        assert lengths[index] <= capacity, "rows are cut or dropped before they are packed"
        # -1 sorts before every row number, so a row with exactly this much room is found, too.
        at = bisect.bisect_left(room, (lengths[index], -1))
        left, row = room.pop(at) if at < len(room) else (capacity, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        bisect.insort(room, (left - lengths[index], row))
    return rows


class PackedRows(Sequence[dict[str, list[int]]]):
    """Packed rows, each joined when it is asked for, so that documents in a file stay there.

    A row has ``input_ids``, ``labels`` and ``position_ids``. The first label of each document is masked: the token
    before it belongs to another one.

    Args:
        rows: documents with ``input_ids`` and ``labels``.
        capacity: tokens that a packed row holds.
    """

    def __init__(self, rows: Sequence[dict[str, list[int]]], capacity: int):
        self.rows = rows
        self.indices = best_fit([len(row["input_ids"]) for row in rows], capacity)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> dict[str, list[int]]:  # type: ignore[override]  # nobody asks for a slice
        packed: dict[str, list[int]] = {"input_ids": [], "labels": [], "position_ids": []}
        for index in self.indices[number]:
            row = self.rows[index]
            packed["input_ids"] += row["input_ids"]
            packed["labels"] += [IGNORED, *row["labels"][1:]]
            packed["position_ids"] += range(len(row["input_ids"]))
        return packed


def documents(position_ids_BT: torch.Tensor) -> torch.Tensor:
    """Number the documents of packed rows.

    Args:
        position_ids_BT: positions, shape (B, T), int64; a document begins where they do not go on by one.

    Returns:
        Each token's document, shape (B, T), int64, from 0.
    """
    # The first token then begins nothing, so a row's first document has number 0.
    begins_BT = position_ids_BT.diff(dim=1, prepend=position_ids_BT[:, :1] - 1) != 1
    return begins_BT.cumsum(dim=1)


def block_causal_mask(position_ids_BT: torch.Tensor) -> torch.Tensor:
    """Make the mask by which a token sees itself and the tokens before it in its own document.

    Args:
        position_ids_BT: positions, shape (B, T), int64.

    Returns:
        True where query row t may look at key column s, shape (B, T, T), bool.
    """
    document_BT = documents(position_ids_BT)
    same_BTT = document_BT[:, :, None] == document_BT[:, None, :]
    T = position_ids_BT.shape[1]
    return same_BTT & torch.ones(T, T, dtype=torch.bool, device=position_ids_BT.device).tril()


def document_lengths(begins_BT: torch.Tensor) -> torch.Tensor:
    """Count the tokens of each document in packed rows.

    Args:
        begins_BT: True on the first token of each document and of each row, shape (B, T), bool. Consecutive documents
            of one token count as one document. Only padding consists of such documents (``PadToLongest`` gives each
            padding token position 0), because a real one has at least two tokens. So a row's padding costs one call of
            the kernel.

    Returns:
        Lengths, row after row, shape (N,), int64; their sum is B T.
    """
    true_B1 = torch.ones_like(begins_BT[:, :1])
    alone_BT = begins_BT & torch.cat([begins_BT[:, 1:], true_B1], dim=1)
    after_alone_BT = torch.cat([~true_B1, alone_BT[:, :-1]], dim=1)
    # alone: the next token begins another document, too, so this one has a single token. If the token before is alone
    # as well, both belong to the same padding, and this one does not begin a document.
    begins = (begins_BT & ~(alone_BT & after_alone_BT)).flatten().nonzero().flatten()
    return begins.diff(append=begins.new_tensor([begins_BT.numel()]))


def by_document(
    attend: Callable[..., torch.Tensor],
    q_BHTD: torch.Tensor,
    k_BKTD: torch.Tensor,
    v_BKTD: torch.Tensor,
    lengths: Sequence[int],
) -> torch.Tensor:
    """Attend within each document, one after the other, so that no mask is needed and nothing masked is computed.

    Args:
        attend: causal attention over queries, keys and values of a document of L tokens, the shapes below with B = 1
            and T = L; it returns (1, L, H, D).
        q_BHTD: queries, shape (B, H, T, D).
        k_BKTD: keys, shape (B, K, T, D).
        v_BKTD: values, shape (B, K, T, D).
        lengths: from :func:`document_lengths`.

    Returns:
        Shape (B, T, H, D).
    """
    in_a_line = (x.transpose(0, 1).flatten(1, 2) for x in (q_BHTD, k_BKTD, v_BKTD))  # (heads, B T, D)
    pieces = zip(*(x.split(lengths, dim=1) for x in in_a_line), strict=True)
    out = torch.cat([attend(*(x[None] for x in q_k_v))[0] for q_k_v in pieces])  # (B T, H, D)
    return out.unflatten(0, (q_BHTD.shape[0], -1))
