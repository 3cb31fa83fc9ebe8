r"""Context parallelism (ring attention): every process has a part of each row's tokens, and keys and values go round.

Saves    activations and logits: T -> T / N tokens of each row in a process, forward, backward and at the loss   [bytes]
Costs    in every block, keys and values go round the ring of N processes: N - 1 sends forward (twice that with
         checkpointing), and backward 2 N - 1, because their fp32 gradients go with them and come home. Weights,
         gradients and optimizer states stay whole, and the gradients are all-reduced once a step, as in DDP
Claim    exact within rounding: a softmax is added up part by part, in fp32
Needs    attention=sdpa; rows so long that computing with T / N of their tokens takes longer than sending their keys and
         values; dropout 0 for the same losses as one process
Breaks   sliding windows, dropout in attention, and whatever replaces attention or adds tokens (refused). torch's own
         context_parallel (2.13) has no kernel for a CPU and takes no mask, so no packed rows: it cannot be our switch
Sources  Liu et al. 2023, arXiv:2310.01889, sec. 3 and alg. 1 (the ring); Grattafiori et al. 2024, arXiv:2407.21783,
         sec. 3.3.2 (2 N chunks, of which rank r has r and 2 N - 1 - r); Dao 2023, arXiv:2307.08691, alg. 2 (backward)
Ours     the ring in 45 lines over the exchange of lessons/interconnect.py and torch's fused kernels:
         those of a CPU, and those of CUDA, which were never run. The switch puts it in place of the model's attention;
         labels are shifted before the row is cut

Shapes: N processes, 2 N chunks of C tokens; a process has 2 C of a row's T tokens. Queries (B, H, 2 C, D), keys and
values (B, K, 2 C, D), the log-sum-exp (B, H, 2 C).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from cria_tricks.bill.calls import Call
from cria_tricks.data.tokens import IGNORED
from cria_tricks.hardware import T4
from cria_tricks.load.losses import places
from cria_tricks.models.shape import Shape
from cria_tricks.parallel.data_pipeline import add_up
from cria_tricks.parallel.ring_attention import Chunks, RingAttention, chunked, install, merge  # noqa: F401
from cria_tricks.parallel.rules import refuse, several
from cria_tricks.parallel.tensor import Summed
from cria_tricks.parallel.zigzag import own_tokens, zigzag
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches import folds
from cria_tricks.technique import Technique
from cria_tricks.techniques.packing import documents

TECHNIQUE = Technique(claim="exact within rounding", lesson="context_parallel", switches=("strategy=context",))
REFERENCE = ("RingAttention", "merge", "zigzag")  # from ring_attention.py and zigzag.py
PLAIN = """
# torchrun --nproc-per-node 2 train.py: on CUDA cards, and for rows without padding that are not packed
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

mesh = init_device_mesh("cuda", (2,))
labels = torch.nn.functional.pad(input_ids[:, 1:], (0, 1), value=-100)  # shifted before the rows are cut
position_ids = torch.arange(input_ids.shape[1], device="cuda")[None]
row = [input_ids, labels, position_ids]
with context_parallel(mesh, buffers=row, buffer_seq_dims=[1, 1, 1]):  # each process now has its part of the three
    loss = model(input_ids, position_ids=position_ids, labels=labels, shift_labels=labels).loss
    loss.backward()
"""


class CutLoss(torch.nn.Module):
    """Map a micro-batch of whole rows to the sum of its losses, of which each process computes those of its tokens.

    Args:
        total: maps a batch to the sum of its losses.
        by_places: whether it takes the trained places instead of labels (the chunked loss).
        world: the processes.
    """

    def __init__(self, total: torch.nn.Module, by_places: bool, world: World):
        super().__init__()
        self.total = total
        self.by_places = by_places
        self.world = world

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return the loss of the whole rows, the same in all processes; each gets the gradients of its own tokens."""
        return Summed.apply(self.total(cut(batch, self.world.rank, self.world.size, self.by_places)))


def cut(batch: dict[str, Any], rank: int, size: int, by_places: bool = False) -> dict[str, Any]:
    """Return the part of a micro-batch that a process computes: two chunks of each row.

    Labels are shifted here, before the rows are cut, because the label of a chunk's last token is in another chunk.

    Args:
        batch: ``input_ids``, ``labels`` and, for packed rows, ``position_ids``, each of shape (B, T). Rows are filled
            up on the right only, so ``attention_mask`` is not needed: no token sees the padding behind it.
        rank: the rank of the process.
        size: N, the number of processes.
        by_places: whether the loss takes ``trained``, the places of trained tokens, instead of labels.

    Returns:
        ``input_ids``, ``position_ids``, the labels in one of the two ways, and ``ring``, for the attention.
    """
    ids_BT = batch["input_ids"]
    packed = "position_ids" in batch
    positions = batch["position_ids"] if packed else torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]

    def own(row: torch.Tensor, fill: int = 0) -> torch.Tensor:
        chunks = chunked(row, size, fill)
        return torch.cat([chunks[number] for number in zigzag(rank, size)], dim=1)

    following = own(torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED), IGNORED)
    numbers = chunked(documents(positions), size, -1) if packed else None
    part = {"input_ids": own(ids_BT), "position_ids": own(positions), "ring": Chunks(rank, size, numbers)}
    if by_places:
        return {**part, "trained": places(following)}
    return {**part, "labels": following, "shift_labels": following}


def switch_on(plan: Plan, recipe: Recipe, processes: int) -> Plan:
    """Divide the tokens of each row among the processes; all of them have the same rows."""
    several("context", processes)
    use = "the ring computes with torch's own fused kernels; set tricks.attention=sdpa"
    refuse(recipe, "attention", ("eager", "flash_attention_2"), use)
    use = "the ring repeats the key heads itself, after they have travelled; leave it off"
    refuse(recipe, "expand_kv", (True,), use)
    use = "keys and values must travel again when a block is repeated; leave it off"
    refuse(recipe, "keep_attention", (True,), use)
    refuse(recipe, "compile", (True,), "not supported here; use parallel.strategy=ddp")
    use = "it changes rows or attention, which the ring has cut; set tricks.peft=lora"
    refuse(recipe, "peft", ("prompt_tuning", "side_network"), use)
    return plan.with_("parallel", strategy="context", data=1)


def spread(total: torch.nn.Module, plan: Plan, world: World) -> torch.nn.Module:
    """Let the model attend by the ring, and cut each micro-batch before it gets there.

    Args:
        total: a :class:`cria_tricks.load.losses.LossSum`.
        plan: its loss decides in what form the labels are given.
        world: the processes.
    """
    install(total.model)
    return CutLoss(total, plan.loss["kind"] == "chunked", world)


@contextlib.contextmanager
def window(total: torch.nn.Module, world: World, last: bool) -> Iterator[None]:
    """Sum the gradients over the processes, after the backward pass of the last micro-batch of an optimizer step.

    Each process has the part of the gradients that comes from its own tokens, so they are added and not averaged.
    """
    yield
    if last:
        everybody = dist.group.WORLD
        assert everybody is not None
        add_up([p.grad for p in total.parameters() if p.grad is not None], everybody)


def traffic(recipe: Recipe, shape: Shape, processes: int) -> list[Call]:
    """Return what a process sends in an optimizer step, for rows of full length."""
    tricks = recipe.tricks
    steps = tricks.gradient_accumulation
    step = folds.step_of(recipe, shape, T4)  # these numbers are the same on any card
    numbers = 2 * recipe.train.batch_size * own_tokens(recipe.data.max_length, processes) * shape.kv_width
    repeated = step.repeated_blocks
    back = shape.layers
    below = {"q_proj", "k_proj", "v_proj"} & set(step.adapted)
    if step.adapted and not below and not tricks.gradient_checkpointing:
        back -= 1  # nothing that trains is below the first block's attention
    if tricks.peft == "head":
        back = 0
    turns = (shape.layers + repeated + back) * steps * (processes - 1)
    calls = (
        Call("send", numbers * step.compute_itemsize, turns, 2, "keys and values, on to the next process"),
        Call("send", numbers * 4, back * steps * processes, 2, "their fp32 gradients"),
        Call("all_reduce", 4, steps, processes, "the sum of the losses"),
        Call("all_reduce", 4 * step.trained_weights, 1, processes, "fp32 gradients of what trains"),
    )
    return [call for call in calls if call.times]
