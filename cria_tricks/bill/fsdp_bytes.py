r"""Compute what FSDP2 (torch 2.13) divides among N processes, and what it gathers and reduces at once.

FSDP2 shards every tensor along its first dimension. A shard consists of whole slices along that dimension. If N does
not divide it, the first shards are larger, and this file counts the largest one. LoRA's A of shape (r, D) has r slices,
so at most r processes have a shard of it. A collective pads all shards to the largest, so it moves N times that.

The groups that are gathered at once are those of ``parallel/fsdp.py``: each block; in an untied model the embedding,
and the last norm with the head; and the root with the rest, which in a tied model is embedding, norm and head. What is
whole at which moment of the step is in ``predict/fsdp_moments.py``.

Sources: Rajbhandari et al. 2020, arXiv:1910.02054, sec. 5.3; torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from collections.abc import Iterable
from typing import NamedTuple

from cria_tricks.bill.constants import FP32
from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.lines import STATE


class Gathered(NamedTuple):
    """What one collective moves, summed over all processes [bytes].

    Attributes:
        weights: the weights that are gathered together.
        gradients: the gradients that are reduced together; 0 if nothing of these weights trains.
    """

    weights: int
    gradients: int


class Sizes(NamedTuple):
    """Sizes under FSDP2 [bytes].

    Attributes:
        shards: the shards that a process holds, by the names of their lines (:data:`STATE`).
        blocks: all blocks together.
        block: the largest block, with its adapters or its copy.
        outside: the groups outside the blocks by name: :data:`ENDS` in a tied model; :data:`EMBEDDING`, :data:`HEAD`
            and :data:`PROMPT` in an untied one.
    """

    shards: dict[str, int]
    blocks: Gathered
    block: Gathered
    outside: dict[str, Gathered]


EMBEDDING = "embedding"
HEAD = "last norm and head"
ENDS = "embedding, last norm and head"
PROMPT = "learnt prompt"


class _Group(NamedTuple):
    """Several tensors of the same shape.

    Attributes:
        tensors: how many there are.
        first_dim: the size of their first dimension, along which FSDP2 shards them.
        elements: elements of one tensor.
    """

    tensors: int
    first_dim: int
    elements: int

    def shard(self, processes: int) -> int:
        """Return the elements of the largest shard, summed over the tensors of the group."""
        return self.tensors * divided_up(self.first_dim, processes) * (self.elements // self.first_dim)


class _Tensors(NamedTuple):
    """The model's tensors.

    Attributes:
        matrices: of the blocks, those that can be quantised.
        small: all others of the blocks.
        embedding: the embedding.
        last: the last norm, and the head if it is a matrix of its own.
        added: those that were added to the loaded model.
    """

    matrices: list[_Group]
    small: list[_Group]
    embedding: list[_Group]
    last: list[_Group]
    added: list[_Group]

    @property
    def loaded(self) -> list[_Group]:
        """All tensors of the loaded model."""
        return [*self.matrices, *self.small, *self.embedding, *self.last]


def sizes(memory: StepFacts, processes: int) -> Sizes:
    """Compute the sizes of the shards, and of what is gathered and reduced at once.

    Args:
        memory: the facts of the step.
        processes: the number of processes, N.
    """
    tensors = _tensors(memory)
    stored, itemsize = _stored(memory, tensors.matrices)
    other = memory.other_weight_itemsize
    # Added tensors belong to the blocks (LoRA, a side network), to the head (its trained copy), or to none (a prompt).
    in_blocks = tensors.added if memory.adapted or memory.learns_beside else []
    in_head = tensors.added if memory.trains_head and not memory.trains_all else []
    elsewhere = [group for group in tensors.added if group not in in_blocks and group not in in_head]

    def shard(groups: Iterable[_Group], bytes_each: float) -> int:
        return round(bytes_each * sum(group.shard(processes) for group in groups))

    def gathered(loaded: list[_Group], added: list[_Group]) -> Gathered:
        trained = [*loaded, *added] if memory.trains_all else added
        return Gathered(processes * (shard(loaded, other) + shard(added, FP32)), processes * shard(trained, FP32))

    # The matrices have another item size than the rest, so their weights are added apart.
    small = gathered(tensors.small, in_blocks)
    matrices = processes * shard(stored, itemsize)
    learning = processes * shard(tensors.matrices, FP32) * memory.trains_all
    blocks = Gathered(small.weights + matrices, small.gradients + learning)
    outside = {ENDS: gathered([*tensors.embedding, *tensors.last], [*in_head, *elsewhere])}
    if not memory.shape.tied:
        outside = {
            EMBEDDING: gathered(tensors.embedding, []),
            HEAD: gathered(tensors.last, in_head),
            PROMPT: gathered([], elsewhere),
        }
    trained = [*tensors.loaded, *tensors.added] if memory.trains_all else tensors.added
    # FSDP2 shards parameters only. The scales of 4-bit weights are no parameters, so each process holds all of them.
    scales = memory.block_weight_bytes - round(itemsize * _elements(stored))
    in_order_of_state = (
        shard(stored, itemsize) + scales,
        shard([*tensors.small, *tensors.embedding, *tensors.last], other),
        shard(tensors.added, FP32),
        shard(trained, FP32),  # gradients
        shard(trained, 2 * FP32),  # the two states of AdamW
    )
    shards = dict(zip(STATE, in_order_of_state, strict=True))
    return Sizes(shards, blocks, _largest_block(memory, blocks, processes * shard(in_blocks, FP32)), outside)


def _largest_block(memory: StepFacts, blocks: Gathered, added: int) -> Gathered:
    """Return the share of one block; ``added`` are the bytes of what was added to all blocks."""
    layers = memory.shape.layers
    # A side network's copies are only in the last blocks. The largest block counts, so one with a copy.
    with_added = memory.learning_blocks if memory.learns_beside else layers
    with_gradients = layers if memory.trains_all else with_added
    weights = (blocks.weights - added) // layers + added // (with_added or layers)
    return Gathered(weights, blocks.gradients // (with_gradients or layers))


def _tensors(memory: StepFacts) -> _Tensors:
    """List the model's tensors."""
    shape = memory.shape
    width = shape.width
    inner = shape.inner
    layers = shape.layers
    experts = shape.experts
    matrices = [_Group(layers, d_out, d_in * d_out) for d_in, d_out in shape.packable.values()]
    small = [_Group(layers * shape.norms, width, width)]
    small += [_Group(layers, shape.linears[name][1], shape.linears[name][1]) for name in shape.biased]
    if shape.qk_norm and shape.norms_whole_queries:  # one norm as wide as all query heads, and one for the keys
        small += [_Group(layers, wide, wide) for wide in (shape.query_width, shape.kv_width)]
    elif shape.qk_norm:  # two norms as wide as one head
        small.append(_Group(2 * layers, shape.head_width, shape.head_width))
    if experts > 1:
        # The router; the gate and up projections of all experts in one tensor; their down projections in another.
        small += [_Group(layers, experts, experts * elements) for elements in (width, 2 * width * inner, width * inner)]
    embedding = [_Group(1, shape.vocabulary, shape.embedding_weights)]
    last = [_Group(1, width, width)]
    if not shape.tied:  # then the head is a second matrix of the same shape
        last += embedding
    if not memory.adapted:
        # The facts do not tell the shapes of these tensors, so they count as divisible element by element.
        added = [_Group(count, elements, elements) for count, elements in memory.added]
        return _Tensors(matrices, small, embedding, last, added)
    added = []
    for name in memory.adapted:
        d_in, d_out = shape.linears[name]
        count = layers * shape.copies(name)
        added += [_Group(count, memory.rank, memory.rank * d_in), _Group(count, d_out, memory.rank * d_out)]  # A, B
        if memory.dora:
            added.append(_Group(count, d_out, d_out))  # the magnitudes
    return _Tensors(matrices, small, embedding, last, added)


def _stored(memory: StepFacts, matrices: list[_Group]) -> tuple[list[_Group], float]:
    """Return the blocks' matrices as they are stored, and the bytes of one stored element."""
    if memory.elements_per_byte == 1:
        return matrices, memory.block_weight_bytes / _elements(matrices)
    # A 4-bit matrix is stored as one column of bytes, with two elements in each byte.
    packed = []
    for group in matrices:
        bytes_of_one = divided_up(group.elements, memory.elements_per_byte)
        packed.append(_Group(group.tensors, bytes_of_one, bytes_of_one))
    return packed, 1


def divided_up(total: int, parts: int) -> int:
    """Return ``total / parts``, rounded up: the size of the largest part."""
    return -(-total // parts)


def _elements(groups: Iterable[_Group]) -> int:
    """Return the elements of all tensors in the groups."""
    return sum(group.tensors * group.elements for group in groups)
