"""Tensors of which each process holds a piece (torch's ``DTensor``): their whole, their norm, and the way back."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map


def whole(values: Any, *, keep: bool = True) -> Any:
    """Put tensors together, wherever they are in nested lists and dictionaries; all processes must ask.

    Args:
        values: e.g. a state dict.
        keep: whether this process wants the result; it takes part either way, and holds one tensor at a time.

    Returns:
        The same with plain tensors, on the CPU where they were in pieces; with ``None`` for those not kept.
    """

    def joined(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value if keep else None
        full = value.full_tensor()
        return full.cpu() if keep else None

    return tree_map(joined, values)


def weights(model: torch.nn.Module, *, keep: bool = True) -> dict[str, torch.Tensor] | None:
    """A model's state dict in plain tensors; ``None`` when nothing of it is in pieces, so that nobody copies it."""
    state = model.state_dict()
    return whole(state, keep=keep) if any(isinstance(value, DTensor) for value in state.values()) else None


def like_parameters(state: Mapping[torch.nn.Parameter, dict[str, Any]]) -> None:
    """Cut an optimizer's loaded states as their parameters are cut, in place."""
    for parameter, values in state.items():
        if isinstance(parameter, DTensor):
            for name, value in values.items():
                if torch.is_tensor(value) and not isinstance(value, DTensor) and value.shape == parameter.shape:
                    values[name] = distribute_tensor(value, parameter.device_mesh, parameter.placements)


def clip(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> torch.Tensor:
    """Scale gradients down to a norm, as ``torch.nn.utils.clip_grad_norm_``, which takes no mixture of DTensors.

    Args:
        parameters: whole ones count once, of those in pieces every process adds its own.
        max_norm: of all gradients together.

    Returns:
        The norm that they had.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [(gradient.to_local() if isinstance(gradient, DTensor) else gradient) for gradient in gradients]
    squares = torch.zeros(2, dtype=torch.float32, device=local[0].device)  # of whole ones, of pieces
    mesh = None
    for gradient, mine in zip(gradients, local, strict=True):
        in_pieces = isinstance(gradient, DTensor) and any(isinstance(p, Shard) for p in gradient.placements)
        squares[int(in_pieces)] += mine.float().square().sum()
        if in_pieces:
            mesh = gradient.device_mesh
    if mesh is not None:
        torch.distributed.all_reduce(squares[1:], group=mesh.get_group())
    norm = squares.sum().sqrt()
    for mine in local:
        mine.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm
