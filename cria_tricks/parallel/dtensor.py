"""Gather what no process holds as a whole: tensors in pieces (torch's ``DTensor``), and the stages of a pipeline.

Weights and optimizer states are put together for a checkpoint or an adapter, and divided again after loading. The norm
of all gradients is computed over their pieces.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._pytree import tree_map

from cria_tricks.processes.world import World


def whole(values: Any, *, keep: bool = True) -> Any:
    """Gather every ``DTensor`` in nested lists and dictionaries. All processes must call this at the same time.

    Args:
        values: for example a state dict.
        keep: whether this process keeps the result. A process that does not still takes part in the collectives; it
            holds one whole tensor at a time.

    Returns:
        The same structure with plain tensors; those that were in pieces are on the CPU. Without ``keep`` all are
        ``None``.
    """

    def joined(value: Any) -> Any:
        if not isinstance(value, DTensor):
            return value if keep else None
        full = value.full_tensor()
        return full.cpu() if keep else None

    return tree_map(joined, values)


def weights(model: torch.nn.Module, world: World) -> dict[str, torch.Tensor] | None:
    """Gather a model's weights in the main process, which writes them. All processes must call this at the same time.

    Returns:
        Plain tensors by name: the whole state dict, or for a pipeline only the weights that train. In the other
        processes the result is of no use. ``None`` if the main process has all weights anyway, to save a copy.
    """
    if world.stages > 1:
        mine = {name: parameter.detach() for name, parameter in model.named_parameters() if parameter.requires_grad}
        return _of_all_stages(mine, world)
    state = model.state_dict()
    in_pieces = any(isinstance(value, DTensor) for value in state.values())
    return whole(state, keep=world.is_main) if in_pieces else None


def states(optimizer: Any, model: torch.nn.Module, world: World) -> dict[str, Any]:
    """Gather an optimizer's states in the main process, by the names of their parameters.

    ``optimizer.state_dict`` numbers the parameters group by group, and the groups are different if some parameters are
    in pieces (:func:`group_apart`). Names are the same for any number of processes.

    Returns:
        ``lr``, the learning rate, and ``state``: parameter name -> its tensors and numbers. In the other processes the
        result is of no use.
    """
    own = optimizer.state_dict()
    names = _names(optimizer, model)
    mine = {names[number]: values for number, values in own["state"].items()}
    together = _of_all_stages(mine, world) if world.stages > 1 else whole(mine, keep=world.is_main)
    return {"lr": own["param_groups"][0]["lr"], "state": together}


def _of_all_stages(mine: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Join what the stages hold, by name, in the main process; the other processes get an empty dictionary."""
    # The same stage of every pipeline has the same weights, and whole() gathers the pieces of the processes that share
    # a stage's matrices. So one process for each stage is enough.
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


def put_back(
    saved: Mapping[str, Any], optimizer: Any, model: torch.nn.Module, world: World, *, some_without: bool = False
) -> None:
    """Load optimizer states that :func:`states` returned, and divide them as the parameters are divided here.

    Args:
        saved: ``lr`` and ``state``, with whole tensors by the names of their parameters.
        optimizer: the optimizer that gets them.
        model: the model with its parameters; some may be in pieces.
        world: the processes.
        some_without: whether some parameters may have no states yet, because they have not taken a step.

    Raises:
        ValueError: if the states belong to other parameters.
    """
    own = optimizer.state_dict()
    names = _names(optimizer, model)
    # A stage needs only a part of the saved states. Otherwise both must have the same names.
    strange = set(names) - saved["state"].keys() if world.stages > 1 else set(names) ^ saved["state"].keys()
    if some_without:
        strange = saved["state"].keys() - set(names)
    if saved["state"] and strange:
        raise ValueError("its optimizer has states of other weights than these")
    for group in own["param_groups"]:
        group["lr"] = saved["lr"]
    mine = {number: saved["state"][name] for number, name in enumerate(names) if name in saved["state"]}
    optimizer.load_state_dict({**own, "state": mine})
    for parameter, values in optimizer.state.items():
        if isinstance(parameter, DTensor):
            for name, value in values.items():
                if torch.is_tensor(value) and value.shape == parameter.shape:
                    values[name] = distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _names(optimizer: Any, model: torch.nn.Module) -> list[str]:
    """Return the names of the parameters in the order in which the optimizer numbers them."""
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]


def clip(
    parameters: Iterable[torch.nn.Parameter], max_norm: float, stages: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Scale gradients down to a maximal norm, also if some are plain tensors and some are ``DTensor``.

    ``torch.nn.utils.clip_grad_norm_`` does not take such a mixture.

    Args:
        parameters: of this process; every process adds the pieces that it holds, and whole gradients count once.
        max_norm: the largest norm of all gradients together.
        stages: the processes of this pipeline, which hold other parameters; ``None`` if there are no stages.

    Returns:
        The norm before the scaling.
    """
    gradients = [p.grad for p in parameters if p.grad is not None]
    total = square(gradients)
    if stages is not None:
        dist.all_reduce(total, group=stages)
    norm = total.sqrt().float()
    for gradient in gradients:
        # 1e-6 as in torch's function: it avoids a division by zero.
        own(gradient).mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


def square(gradients: Sequence[Any]) -> torch.Tensor:
    """Return the squared norm of all gradients together, in float64, summed over the processes that hold pieces.

    A whole gradient is the same in all these processes, so it counts once.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=own(gradients[0]).device)  # [whole gradients, pieces]
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
    """Return the part of a tensor that this process holds: the local piece of a ``DTensor``, else the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
