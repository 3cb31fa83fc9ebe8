r"""Sequence parallelism: beside tensor parallelism, the residual stream is held in pieces of n / N tokens a process.

Tensor parallelism divides what is inside attention and the MLP. Norms, residual stream and block inputs stay whole in
every process. But a norm looks at one token at a time, so each process can have its own tokens there. Then f becomes an
all-gather, because attention and the MLP see all tokens. Its gradients are summed and cut, by a reduce-scatter. And g
becomes a reduce-scatter, because each process needs the sum for its own tokens only. An all-reduce is a reduce-scatter
and an all-gather, so the bytes are the same. Three things come on top: the last hidden states are gathered; a trained
embedding's gradient is, too; and checkpointing's repetition of a block gathers its inputs again.

The gathered inputs of attention and MLP are saved whole, where adapters or trained matrices save them. The paper saves
the pieces, and gathers once more on the way back; this is not done here.

The model's embedding, masks and positions are made for whole rows. We cut the hidden states in front of the first block
and gather them behind the last norm, so the head and the loss see whole rows, too. All tokens of a micro-batch are laid
in one line and cut there; zeros at the end fill it up to a multiple of N.

The weights of norms see only the tokens of their process, so each process has one term of their gradient. Such weights
get the attribute ``partial``, as in ``parallel/regions.py``.

Source: Korthikanti et al. 2022, arXiv:2205.05198, sec. 4.2.2. It names the two operators g (the all-gather) and g-bar.

Shapes: whole (B, T, D) with B T = n; a piece (1, m, D), m = n / N rounded up.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


def gather(piece_mD: torch.Tensor, n: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return the tokens of all pieces in the order of the ranks, (n, D), without the zeros that fill up the last."""
    size = dist.get_world_size(group)
    whole = piece_mD.new_empty(size * len(piece_mD), *piece_mD.shape[1:])
    dist.all_gather_into_tensor(whole, piece_mD.contiguous(), group=group)
    return whole[:n]


def reduce_scatter(part_nD: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Sum (n, D) over the processes, and return this process's piece of the sum, (m, D)."""
    filled = _filled(part_nD, dist.get_world_size(group))
    piece = filled.new_empty(len(filled) // dist.get_world_size(group), *filled.shape[1:])
    dist.reduce_scatter_tensor(piece, filled, group=group)
    return piece


def own(whole_nD: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
    """Return this process's piece of (n, D): a copy, so that the whole can be freed."""
    size = dist.get_world_size(group)
    return _filled(whole_nD, size).chunk(size)[dist.get_rank(group)].clone()


def _filled(x_nD: torch.Tensor, size: int) -> torch.Tensor:
    """Fill up with zeros to a multiple of the number of processes."""
    missing = -len(x_nD) % size
    x_nD = x_nD.contiguous()
    return torch.nn.functional.pad(x_nD, (0, 0, 0, missing)) if missing else x_nD


class Gathered(torch.autograd.Function):
    """f with sequence parallelism: gathers the tokens forward; sums and cuts their gradients backward."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, n: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Gather (m, D) of all processes into (n, D)."""
        ctx.group = group
        return gather(piece, n, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sum the gradients of all processes, because they all used these tokens; each takes its piece."""
        return reduce_scatter(gradients[0], ctx.group), None, None


class Scattered(torch.autograd.Function):
    """g with sequence parallelism: sums the parts and cuts the sum forward; gathers the gradients backward."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Sum (n, D) over the processes, and return this process's piece of the sum, (m, D)."""
        ctx.n = len(part)
        ctx.group = group
        return reduce_scatter(part, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gather the gradients of all pieces, because each part went into all of them."""
        return gather(gradients[0], ctx.n, ctx.group), None


class Cut(torch.autograd.Function):
    """Cuts what all processes have computed alike, forward; gathers its gradients backward."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Return this process's piece of (n, D)."""
        ctx.n = len(whole)
        ctx.group = group
        return own(whole, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Gather the gradients of all pieces."""
        return gather(gradients[0], ctx.n, ctx.group), None


class Joined(torch.autograd.Function):
    """Gathers the tokens for what all processes compute alike, forward; cuts their gradients backward."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor, n: int, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Gather (m, D) of all processes into (n, D)."""
        ctx.group = group
        return gather(piece, n, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Cut the gradient: it is whole in every process, so nothing is summed."""
        return own(gradients[0], ctx.group), None, None


class Stream:
    """The residual stream of the micro-batch that is under way, in pieces.

    Args:
        group: the processes that share it.

    Attributes:
        rows: the rows of the micro-batch, B.
        tokens: the tokens of a row, T.
    """

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.rows = self.tokens = 0

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """Cut the embedding's result, (B, T, D), into pieces, and return this process's, (1, m, D)."""
        self.rows, self.tokens = whole.shape[:2]
        flat = whole.flatten(0, 1)
        if whole.is_leaf:
            # Nothing before it trains. If checkpointing asks for its gradient, that of the piece is enough.
            return own(flat.detach(), self.group).requires_grad_(whole.requires_grad)[None]
        return Cut.apply(flat, self.group)[None]

    def join(self, piece: torch.Tensor) -> torch.Tensor:
        """Gather the last hidden states, (1, m, D), into (B, T, D)."""
        return self._rows(Joined.apply(piece[0], self.rows * self.tokens, self.group))

    def f(self, piece: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Gather a region's input, (1, m, D), into (B, T, D)."""
        return self._rows(Gathered.apply(piece[0], self.rows * self.tokens, group))

    def g(self, part: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        """Sum a region's output, (B, T, D), over the processes, and return this process's piece, (1, m, D)."""
        return Scattered.apply(part.flatten(0, 1), group)[None]

    def _rows(self, flat: torch.Tensor) -> torch.Tensor:
        return flat.view(self.rows, self.tokens, -1)


def hold_in_pieces(model: torch.nn.Module, stream: Stream) -> None:
    """Cut the hidden states in front of a model's first block, and gather them behind its last norm.

    Call this when the matrices have been cut with the stream's f and g. It marks the weights of the blocks and of the
    last norm of which each process now has a part of the gradient.

    Args:
        model: a transformers model, with or without peft.
        stream: its residual stream.
    """
    decoder: Any = next(one for one in model.modules() if hasattr(one, "layers") and hasattr(one, "norm"))

    def before(_: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        return (stream.cut(given[0]), *given[1:])

    def behind(_: Any, given: Any, normed: torch.Tensor) -> torch.Tensor:
        return stream.join(normed)

    decoder.layers[0].register_forward_pre_hook(before)
    decoder.norm.register_forward_hook(behind)
    mark_partial(decoder.layers.parameters())
    mark_partial(decoder.norm.parameters())


def mark_partial(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Mark the whole weights that train, because each process has the gradient that comes from its tokens."""
    from torch.distributed.tensor import DTensor  # it takes half a second to import

    for parameter in parameters:
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.partial = True  # type: ignore[attr-defined]
