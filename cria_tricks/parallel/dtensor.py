"""What no process holds whole: tensors in pieces (torch's ``DTensor``), and a pipeline's stages.

How they are put together for a checkpoint or an adapter, the norm of all gradients, and the way back.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map

from cria_tricks.processes.world import World


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


def weights(model: torch.nn.Module, world: World) -> dict[str, torch.Tensor] | None:
    """Put a model's weights together for the first process, which writes them; all processes must ask.

    Returns:
        Plain tensors by name: the state dict, or what trains of a model in stages. Nothing of use in the other
        processes, and ``None`` when the first one has all of it, so that nobody copies it.
    """
    if world.stages > 1:
        mine = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
        return _of_all_stages(mine, world)
    state = model.state_dict()
    in_pieces = any(isinstance(value, DTensor) for value in state.values())
    return whole(state, keep=world.is_main) if in_pieces else None


def states(optimizer: Any, model: torch.nn.Module, world: World) -> dict[str, Any]:
    """Put an optimizer's states together for the first process, by the names of their parameters.

    Its own ``state_dict`` numbers them by groups, and transformers makes other groups where some are in pieces.

    Returns:
        ``lr``, the learning rate, and ``state``: tensors and numbers. Nothing of use in the other processes.
    """
    own = optimizer.state_dict()
    names = _names(optimizer, model)
    mine = {names[number]: values for number, values in own["state"].items()}
    together = _of_all_stages(mine, world) if world.stages > 1 else whole(mine, keep=world.is_main)
    return {"lr": own["param_groups"][0]["lr"], "state": together}


def _of_all_stages(mine: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Put what the stages hold together, by name; all in the first process, nothing in the others."""
    # Equal stages of all pipelines have learnt the same, and so have the processes that share a stage's matrices.
    speaks = world.data_rank == 0 and world.rank % world.tensor == 0
    plain = whole(mine, keep=speaks)
    found: dict[str, Any] = {}
    for stage in world.gather(_on_cpu(plain) if speaks else {}):
        found |= stage
    return found


def _on_cpu(values: Any) -> Any:
    return tree_map(lambda value: value.cpu() if isinstance(value, torch.Tensor) else value, values)


def group_apart(optimizer: torch.optim.Optimizer) -> None:
    """Put weights in pieces and whole weights into separate groups, because an optimizer's kernel takes no mixture.

    transformers does this too from 5.18 on.
    """
    for group in list(optimizer.param_groups):
        pieces = [parameter for parameter in group["params"] if isinstance(parameter, DTensor)]
        if 0 < len(pieces) < len(group["params"]):
            group["params"] = [parameter for parameter in group["params"] if not isinstance(parameter, DTensor)]
            optimizer.add_param_group({**group, "params": pieces})


def put_back(saved: Mapping[str, Any], optimizer: Any, model: torch.nn.Module, world: World) -> None:
    """Give an optimizer the states of another one over the same parameters, whole there and perhaps in pieces here.

    Raises:
        ValueError: if they are of other parameters.
    """
    own = optimizer.state_dict()
    names = _names(optimizer, model)
    strange = set(names) - saved["state"].keys() if world.stages > 1 else set(names) ^ saved["state"].keys()
    if saved["state"] and strange:
        raise ValueError("its optimizer has states of other weights than these")
    for group in own["param_groups"]:
        group["lr"] = saved["lr"]
    mine = {number: saved["state"][name] for number, name in enumerate(names) if name in saved["state"]}
    optimizer.load_state_dict({**own, "state": mine})
    state: Mapping[Any, dict[str, Any]] = getattr(optimizer, "optimizer", optimizer).state
    for parameter, values in state.items():
        if isinstance(parameter, DTensor):
            for name, value in values.items():
                if torch.is_tensor(value) and value.shape == parameter.shape:
                    values[name] = distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _names(optimizer: Any, model: torch.nn.Module) -> list[str]:
    """The parameters in the order in which the optimizer numbers them."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def clip(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, stages: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Scale gradients down to a norm, as ``torch.nn.utils.clip_grad_norm_``, which takes no mixture of DTensors.

    Args:
        parameters: whole ones count once, of those in pieces every process adds its own.
        max_norm: of all gradients together.
        stages: the processes of this pipeline, which have other parameters; none without stages.

    Returns:
        The norm that they had.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = square(gradients)
    if stages is not None:
        dist.all_reduce(total, group=stages)
    norm = total.sqrt().float()
    for gradient in gradients:
        own(gradient).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def square(gradients: Sequence[Any]) -> torch.Tensor:
    """The square of the norm of all gradients together, float64: whole ones count once, pieces are added up."""
    squares = torch.zeros(2, dtype=torch.float64, device=own(gradients[0]).device)  # of whole ones, of pieces
    mesh: Any = None
    for gradient in gradients:
        in_pieces = isinstance(gradient, DTensor) and any(isinstance(p, Shard) for p in gradient.placements)
        squares[int(in_pieces)] += own(gradient).double().square().sum()
        if in_pieces:
            mesh = gradient.device_mesh
    if mesh is not None:
        dist.all_reduce(squares[1:], group=mesh.get_group())
    return squares.sum()


def own(tensor: torch.Tensor) -> torch.Tensor:
    """What this process has of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
