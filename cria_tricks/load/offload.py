"""Find the blocks of a loaded model whose inputs travel to the host and back (``load/overlapped_offload.py``)."""

from typing import Any

from torch import nn

from cria_tricks.load import overlapped_offload
from cria_tricks.load.model import blocks_of
from cria_tricks.load.overlapped_offload import Overlapped
from cria_tricks.measure.memory import every_tensor
from cria_tricks.step_plan import Plan


def overlapped(model: Any, plan: Plan) -> Overlapped:
    """Make the context around a forward pass in which the inputs of checkpointed blocks travel, but for the last one's.

    Args:
        model: the loaded model.
        plan: says how many blocks are checkpointed, and which micro-batches are too short.
    """
    blocks = _in_order(model)
    wanted = plan.checkpointing["blocks"]
    if wanted != "all":
        blocks = blocks[: wanted + 1]  # the last of these is not checkpointed, so nothing of it travels
    least = plan.checkpointing.get("travels_from", 0) * model.config.get_text_config().hidden_size
    return Overlapped(every_tensor(model), blocks, least, overlapped_offload.copy_stream(plan.device.kind))


def _in_order(model: nn.Module) -> list[nn.Module]:
    """List the modules that run one after the other; one of a side network holds a block and its copy."""
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and len(module) and all(blocks_of(one) for one in module):
            return list(module)
    return []
