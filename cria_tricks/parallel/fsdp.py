r"""Sharded data parallelism (FSDP2, ZeRO-3): a piece of everything in each process, a block whole while it runs.

Saves    weights, gradients and optimizer states: 1 / N of each in a process          [bytes]
Costs    communication: the blocks' weights twice a micro-batch, for the forward and for the backward pass, embedding
         and head once, and the gradients of what trains once a micro-batch, or once a step if they may stay whole until
         then (parallel.reduce). Memory: what runs is whole, with a buffer of its size; an embedding that is the head as
         well is whole in both passes
Claim    exact within rounding: the gradients are added up in another order
Needs    as many micro-batches a step as processes, or a multiple; dropout 0 for the same losses as one process
Breaks   8-bit optimizers, whose kernels do not know a DTensor (refused); 4-bit weights under accelerate's wrapper,
         which leaves them whole with a warning; int8 weights (refused)
Sources  Rajbhandari et al. 2020, arXiv:1910.02054, sec. 5.3 (ZeRO-3); Zhao et al. 2023, arXiv:2304.11277, sec. 3
Ours     40 lines: a gather whose backward is a reduce-scatter, and a hook that keeps autograd from saving the gathered
         weights. The switch calls torch's fully_shard, group by group, as torchtitan does

Shapes: N processes; a weight of E elements is ceil(E / N) in each; micro-batches of (B, T).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cria_tricks.bill.calls import Call
from cria_tricks.bill.fsdp import sizes
from cria_tricks.hardware import T4
from cria_tricks.models.shape import Shape
from cria_tricks.parallel.rules import refuse, several, share_window
from cria_tricks.processes.world import World
from cria_tricks.recipe import Recipe
from cria_tricks.step_plan import Plan
from cria_tricks.switches.folds import step_of
from cria_tricks.technique import Technique

TECHNIQUE = Technique(claim="exact within rounding", lesson="sharding", switches=("strategy=fsdp",))
IN_PIECES = True
REFERENCE = ("Gather", "Sharded")
PLAIN = """
# torchrun --nproc-per-node 2 train.py
import os
import torch
from torch.distributed.fsdp import fully_shard

torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # this process's GPU
torch.distributed.init_process_group()
for block in model.model.layers:
    fully_shard(block)
if not model.config.tie_word_embeddings:
    fully_shard(model.model.embed_tokens)
    fully_shard([model.model.norm, model.lm_head], reshard_after_forward=False)
fully_shard(model)
"""


class Gather(torch.autograd.Function):
    """All-gather the pieces of a tensor; the backward pass sums the gradients and gives each process its piece."""

    @staticmethod
    def forward(ctx: Any, piece: torch.Tensor) -> torch.Tensor:
        """Gather the pieces of all processes: (E / N) -> (E)."""
        whole = piece.new_empty(piece.numel() * dist.get_world_size())
        dist.all_gather_into_tensor(whole, piece)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        """Sum the gradients over all processes, and return this process's piece: (E) -> (E / N)."""
        piece = gradients[0].new_empty(gradients[0].numel() // dist.get_world_size())
        dist.reduce_scatter_tensor(piece, gradients[0].contiguous())
        return piece


class Sharded(torch.nn.Module):
    """A block whose weights are one flat tensor, of which each process stores a piece.

    Sec. 5.3 of ZeRO: a block's weights are gathered when it runs, freed, and gathered again for its backward pass.
    Autograd would save the gathered weights in between; a hook makes it save only where in the flat tensor they are.

    Args:
        block: any module; its parameters must be the same in all processes.
    """

    def __init__(self, block: torch.nn.Module):
        super().__init__()
        self.shapes = {name: p.shape for name, p in block.named_parameters()}
        flat = torch.cat([p.detach().flatten() for p in block.parameters()])
        size = dist.get_world_size()
        rank = dist.get_rank()
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % size))
        self.piece = torch.nn.Parameter(padded.chunk(size)[rank].clone())
        self.block = [block.to("meta")]  # in a list, which hides its parameters from torch; forward replaces them

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block on x, with the gathered weights."""
        whole = Gather.apply(self.piece)
        again: list[torch.Tensor] = []

        def keep(tensor: torch.Tensor) -> torch.Tensor | Callable[[], torch.Tensor]:
            if tensor.untyped_storage().data_ptr() != address:  # an activation, not a gathered weight
                return tensor
            size = tensor.size()
            stride = tensor.stride()
            offset = tensor.storage_offset()
            return lambda: gathered_again().as_strided(size, stride, offset)

        def gathered_again() -> torch.Tensor:  # once for all matrices of the block
            if not again:
                again.append(Gather.apply(self.piece.detach()))
            return again[0]

        address = whole.untyped_storage().data_ptr()
        places = whole.split([shape.numel() for shape in self.shapes.values()] + [self._padding(whole)])
        # The last place is the padding. zip drops it, because there is one shape fewer.
        weights = {name: place.view(shape) for (name, shape), place in zip(self.shapes.items(), places, strict=False)}
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept() if callable(kept) else kept):
            return torch.func.functional_call(self.block[0], weights, (x,))

    def _padding(self, whole: torch.Tensor) -> int:
        return whole.numel() - sum(shape.numel() for shape in self.shapes.values())


def switch_on(plan: Plan, recipe: Recipe, processes: int) -> Plan:
    """Divide the micro-batches of each window among the processes; refuse what takes no sharded tensors."""
    several("fsdp", processes)
    refuse(recipe, "optimizer", ("adamw_8bit",), "bitsandbytes' kernels take no sharded tensor; use optimizer=adamw")
    refuse(recipe, "paged_optimizer", (True,), "bitsandbytes' kernels take no sharded tensor; leave it off")
    refuse(recipe, "quantization", ("int8",), "its scales would stay behind; use quantization=nf4")
    refuse(
        recipe, "activation_offload", (True,), "it cannot tell gathered weights from activations; use "
        "tricks.gradient_checkpointing=true"
    )  # fmt: skip
    refuse(recipe, "compile", (True,), "not supported here; use parallel.strategy=ddp")
    plan = plan.with_("parallel", strategy="fsdp", data=processes, reduce=recipe.parallel.reduce)
    return share_window(plan, recipe, processes)


def spread(total: torch.nn.Module, plan: Plan, world: World) -> torch.nn.Module:
    """Shard a model in place, in groups, each of which is gathered when it runs and freed after it.

    Each block is a group. In an untied model the embedding is one, and the last norm with the head is another. In a
    tied model these three are one group, the root: its matrix is needed at both ends of the model, so it stays whole
    from the beginning of the forward pass to the end of the backward pass.

    FSDP2's own prefetching stays as it is. On a GPU the weights of the next group come while a group runs, in the
    forward pass because the CPU asks for them in advance, in the backward pass because FSDP2 asks by name. This takes
    one more buffer of the next group's size.

    The dtypes stay those of the plan: weights travel as they are stored, autocast casts them for products as it does
    in a single process, and gradients are summed in fp32, the dtype of all trained weights. FSDP2's ``param_dtype``
    would cast norms as well, so the losses would be others than those of a single process.

    Args:
        total: holds the model, and maps a micro-batch to the sum of its losses. It becomes the root of FSDP.
        plan: not used here.
        world: the processes.
    """
    # These imports take a second, and only a run over several cards needs them.
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from cria_tricks.load.model import untied_ends
    from cria_tricks.models.pretrained import blocks_of

    assert world.mesh is not None
    options: Any = {"mesh": world.mesh["data"], "mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)}
    ends = untied_ends(total)
    with bytes_allowed():
        for block in blocks_of(total):
            fully_shard(block, **options)
        if ends:
            embedding, *last = ends
            fully_shard(embedding, **options)
            if not list(embedding.children()):  # an adapter's backward pass needs its weights, a table's needs none
                embedding.set_unshard_in_backward(False)
            # The backward pass begins with the head, so freeing it after the forward pass would gain nothing.
            fully_shard(last, reshard_after_forward=False, **options)
        fully_shard(total, **options)
    return total


@contextlib.contextmanager
def bytes_allowed() -> Iterator[None]:
    """Let ``fully_shard`` take weights that are whole numbers, as packed 4-bit weights are.

    torch 2.11 asks for the gradient of every piece, and only then looks whether the whole weight is frozen. But whole
    numbers have no gradient, and torch refuses to be asked. In this context their pieces ignore it. Newer versions do
    not ask.
    """
    # DTensor takes half a second to import, and only a run over several cards needs it.
    from torch.distributed.tensor import DTensor

    def ask(piece: torch.Tensor, gradient: bool = True) -> torch.Tensor:
        return torch.Tensor.requires_grad_(piece, gradient and piece.is_floating_point())

    DTensor.requires_grad_ = ask  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del DTensor.requires_grad_  # the method of torch.Tensor is the one again


def window(total: torch.nn.Module, world: World, last: bool) -> contextlib.AbstractContextManager[Any]:
    """Reduce-scatter the gradients of this micro-batch, or let them stay whole in their process.

    By default each micro-batch reduces them, as in torchtitan, because memory is what a model is sharded for. Every
    micro-batch gathers all weights, so where few of them train, this sends hardly more than one reduction a step.

    Args:
        total: what :func:`spread` returned.
        world: the processes.
        last: whether gradients are reduced now: in each micro-batch, or in the last one of the window.
    """
    total.set_requires_gradient_sync(last)  # type: ignore[operator]
    return contextlib.nullcontext()


def traffic(recipe: Recipe, shape: Shape, processes: int) -> list[Call]:
    """Return what an optimizer step sends: weights for both passes of each micro-batch, and trained gradients."""
    step = step_of(recipe, shape, T4)  # any card would do: these bytes are the same on all
    found = sizes(step, processes)
    mine = recipe.tricks.gradient_accumulation // processes
    layers = shape.layers
    # The backward pass gathers the blocks that it reaches, and one more, which FSDP prefetches whether or not it is
    # needed.
    reached = min(step.learning_blocks + 1, layers)
    reductions = mine if recipe.parallel.reduce == "micro_batch" else 1
    calls = [
        Call("all_gather", found.blocks.weights // layers, mine * layers, processes, "the blocks' weights, forward"),
        Call("all_gather", found.blocks.weights // layers, mine * reached, processes, "the blocks' weights, backward"),
        Call(
            "reduce_scatter", found.blocks.gradients // layers, layers * reductions, processes,
            "gradients of what trains in the blocks",
        ),
    ]  # fmt: skip
    for name, group in found.outside.items():
        calls.append(Call("all_gather", group.weights, mine, processes, f"{name}, once"))
        calls.append(Call("reduce_scatter", group.gradients, reductions, processes, f"gradients of {name}"))
    return [call for call in calls if call.bytes]
