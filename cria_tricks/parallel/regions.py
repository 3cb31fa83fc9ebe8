"""Cut the matrices of attention and MLP among processes, with an f in front of each region and a g behind it.

Attention and the MLP are each a region. Megatron's f and g (``parallel/tensor.py``) sum over the processes: f gradients
on the way back, g outputs on the way forward. Inside a region all products use parts of matrices, and nothing is sent.

Beside a column-parallel matrix LoRA's B is cut and A is whole, because every process has the whole input. Beside a
row-parallel matrix A is cut and B is whole. The gradient of a whole weight inside a region is a sum of which each
process has one term. Such weights get the attribute ``partial``, so that the terms are summed once a step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from cria_tricks.parallel.dtensor import own

Operator = Callable[[torch.Tensor, Any], torch.Tensor]
"""Takes a tensor and a process group; f sums its gradient over the group, and g its value."""


def split_regions(model: torch.nn.Module, mesh: Any, dims: Mapping[str, int], f: Operator, g: Operator) -> None:
    """Cut the matrices of a transformers model in place.

    Args:
        model: the model, with or without peft; its parameters must be the same in all processes.
        mesh: the dimension of a ``DeviceMesh`` along which to cut.
        dims: the names of the matrices, with the dimension to cut: 0 for columns (outputs), 1 for rows (inputs).
        f: is applied to the input of each region.
        g: is applied to its output.
    """
    for region in list(model.modules()):
        if any(name in dims for name, _ in region.named_children()):
            bias = _cut_matrices(region, mesh, dims)
            _hook(region, mesh.get_group(), f, g, bias)


def _cut_matrices(region: torch.nn.Module, mesh: Any, dims: Mapping[str, int]) -> torch.nn.Parameter | None:
    """Cut the matrices of one region; return the bias of its row-parallel matrix, to be added to g's result."""
    bias = None
    for name, module in region.named_children():
        if name not in dims:
            continue
        base: Any = getattr(module, "base_layer", module)  # peft keeps the original matrix of a wrapped linear there
        _cut(base, dims[name], mesh)
        if base is not module:
            thin: Any = getattr(module, ("lora_B", "lora_A")[dims[name]])
            _cut(thin["default"], dims[name], mesh)
        if dims[name] == 1:
            bias = base.bias
    for parameter in region.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor) and parameter is not bias:
            parameter.partial = True  # type: ignore[attr-defined]
    return bias


def _cut(linear: Any, dim: int, mesh: Any) -> None:
    """Keep this process's part of a linear layer, and let it multiply by that: a tensor in, and a tensor out.

    Its parameters become ``DTensor``, so that checkpoints, clipping and optimizers know that they are cut. A bias is
    cut with the outputs. A linear layer whose inputs are cut leaves its bias out.
    """
    cut = ["weight"]
    if linear.bias is not None and dim == 0:
        cut.append("bias")
    for name in cut:
        parameter = getattr(linear, name)
        part = distribute_tensor(parameter.detach(), mesh, [Shard(dim)])
        setattr(linear, name, torch.nn.Parameter(part, requires_grad=parameter.requires_grad))
    # The parameters are looked up at each pass, because loading or offloading may replace them.
    linear.forward = lambda x: F.linear(x, *(own(getattr(linear, name)) for name in cut))


def _hook(region: torch.nn.Module, group: Any, f: Operator, g: Operator, bias: torch.nn.Parameter | None) -> None:
    """Let f run before a region, and g after it."""

    def before(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # transformers gives hidden states to attention by name, and to the MLP by place.
        if given:
            return (f(given[0], group), *given[1:]), named
        return given, named | {"hidden_states": f(named["hidden_states"], group)}

    def behind(_: Any, given: Any, result: Any) -> Any:
        if isinstance(result, tuple):  # attention gives its weights, too
            return summed(result[0]), *result[1:]
        return summed(result)

    def summed(part: torch.Tensor) -> torch.Tensor:
        total = g(part, group)
        return total if bias is None else total + bias.to(total.dtype)  # added once, to the sum

    region.register_forward_pre_hook(before, with_kwargs=True)
    region.register_forward_hook(behind)
