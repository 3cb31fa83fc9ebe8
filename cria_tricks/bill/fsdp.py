r"""Estimate the memory of one of N processes under FSDP2 (torch 2.13), that is, ZeRO-3 applied group by group.

FSDP2 cuts every tensor along its first dimension, and each process holds one shard of whole slices. If N does not
divide that dimension, the first shards are larger, and this file counts the largest one. LoRA's A of shape (r, D) has
r slices, so at most r processes have a shard of it. A collective pads all shards to the largest one.

The groups that are gathered at once are those of ``parallel/fsdp.py``: each block; in an untied model the embedding,
and the last norm with the head; and the root with the rest, which in a tied model is embedding, norm and head. On top
of the shards come tensors that are whole for a while:

- The weights of the open group, whose forward or backward pass is running. FSDP2 gathers a group into one flat buffer
  and copies each weight out of it. In the forward pass the buffer lives until the next group has arrived. So an open
  group is there as weights and as buffer, and a group that arrives meets the buffer of the one before. In the backward
  pass the buffer of the block that comes next is alive instead, because its weights are fetched ahead.
- The last norm and the head, until their backward pass has ended. In a tied model the root, which has the embedding as
  well: from the beginning of the forward pass to the end of the backward pass.
- The gradients of the open group, and those of the group that ran just before, which are being reduce-scattered.
- With ``parallel.reduce=step`` nothing is reduced before the last micro-batch, so until then all gradients are whole.

Sources: Rajbhandari et al. 2020, arXiv:1910.02054, sec. 5.3; torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from cria_tricks.bill.moments import moments
from cria_tricks.bill.operation import FP32, STATE, Line, Moment, smaller
from cria_tricks.bill.step import Step

EMBEDDING = "embedding"
HEAD = "last norm and head"
ENDS = "embedding, last norm and head"
PROMPT = "learnt prompt"


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

    def of(self, name: str) -> Gathered:
        """Return a group outside the blocks; nothing if there is none of this name."""
        return self.outside.get(name, Gathered(0, 0))

    @property
    def root(self) -> int:
        """The weights that are in no group of their own, and so are whole in both passes [bytes]."""
        return self.of(ENDS).weights + self.of(PROMPT).weights

    @property
    def of_ends(self) -> int:
        """The gradients that come last: of embedding and head if they are tied, else of the embedding [bytes]."""
        return self.of(ENDS).gradients + self.of(EMBEDDING).gradients


class Tensors(NamedTuple):
    """Several tensors of the same shape.

    Attributes:
        many: how many there are.
        slices: the size of their first dimension, along which FSDP2 cuts them.
        elements: elements of one tensor.
    """

    many: int
    slices: int
    elements: int


def divided_up(total: int, parts: int) -> int:
    """Return ``total / parts``, rounded up: the size of the largest part."""
    return -(-total // parts)


def sizes(step: Step, processes: int) -> Sizes:
    """Compute the sizes of the shards, and of what is gathered and reduced at once.

    Args:
        step: the step.
        processes: the number of processes, N.
    """
    loaded = loaded_tensors(step)
    added = _added_tensors(step)
    matrices, itemsize = _as_stored(step, loaded["matrices"])
    other = step.other_weight_itemsize
    # Added tensors belong to the blocks (LoRA, a side network), to the head (its trained copy), or to none (a prompt).
    in_blocks: list[Tensors] = []
    in_head: list[Tensors] = []
    elsewhere: list[Tensors] = []
    if step.adapted or step.learns_beside:
        in_blocks = added
    elif step.trains_head and not step.trains_all:
        in_head = added
    else:
        elsewhere = added

    def shard(tensors: Iterable[Tensors], bytes_each: float) -> int:
        """Return the bytes of the largest shard of each tensor, together."""
        cut = (one.many * divided_up(one.slices, processes) * (one.elements // one.slices) for one in tensors)
        return round(bytes_each * sum(cut))

    def gathered(whole: list[Tensors], beside: list[Tensors]) -> Gathered:
        """Return what a collective moves of loaded tensors, and of those that were added beside them."""
        trained = beside
        if step.trains_all:
            trained = [*whole, *beside]
        return Gathered(processes * (shard(whole, other) + shard(beside, FP32)), processes * shard(trained, FP32))

    # The matrices have another item size than the rest, so their weights are added apart.
    small = gathered(loaded["small"], in_blocks)
    learning = shard(loaded["matrices"], FP32) * step.trains_all
    blocks = Gathered(small.weights + processes * shard(matrices, itemsize), small.gradients + processes * learning)
    outside = {ENDS: gathered([*loaded[EMBEDDING], *loaded[HEAD]], [*in_head, *elsewhere])}
    if not step.shape.tied:
        outside = {
            EMBEDDING: gathered(loaded[EMBEDDING], []),
            HEAD: gathered(loaded[HEAD], in_head),
            PROMPT: gathered([], elsewhere),
        }
    others = [*loaded["small"], *loaded[EMBEDDING], *loaded[HEAD]]
    trained = added
    if step.trains_all:
        trained = [*loaded["matrices"], *others, *added]
    # FSDP2 shards parameters only. The scales of 4-bit weights are no parameters, so each process holds all of them.
    scales = step.block_weight_bytes - round(itemsize * elements_of(matrices))
    in_order_of_state = (
        shard(matrices, itemsize) + scales,
        shard(others, other),
        shard(added, FP32),
        shard(trained, FP32),  # gradients
        shard(trained, 2 * FP32),  # the two states of AdamW
    )
    shards = dict(zip(STATE, in_order_of_state, strict=True))
    return Sizes(shards, blocks, _largest_block(step, blocks, processes * shard(in_blocks, FP32)), outside)


def _largest_block(step: Step, blocks: Gathered, added: int) -> Gathered:
    """Return the share of one block; ``added`` are the bytes of what was added to all blocks."""
    layers = step.shape.layers
    # A side network's copies are only in the last blocks. The largest block counts, so one with a copy.
    with_added = layers
    if step.learns_beside:
        with_added = step.learning_blocks
    with_gradients = with_added
    if step.trains_all:
        with_gradients = layers
    weights = (blocks.weights - added) // layers + added // (with_added or layers)
    return Gathered(weights, blocks.gradients // (with_gradients or layers))


def loaded_tensors(step: Step) -> dict[str, list[Tensors]]:
    """List the loaded model's tensors: "matrices" of the blocks (they can be quantised), "small" ones, both ends."""
    shape = step.shape
    width = shape.width
    inner = shape.inner
    layers = shape.layers
    experts = shape.experts
    matrices = [Tensors(layers, d_out, d_in * d_out) for d_in, d_out in shape.packable.values()]
    small = [Tensors(layers * shape.norms, width, width)]
    small += [Tensors(layers, shape.linears[name][1], shape.linears[name][1]) for name in shape.biased]
    if shape.qk_norm and shape.norms_whole_queries:  # one norm as wide as all query heads, and one for the keys
        small += [Tensors(layers, wide, wide) for wide in (shape.query_width, shape.kv_width)]
    elif shape.qk_norm:  # two norms as wide as one head
        small.append(Tensors(2 * layers, shape.head_width, shape.head_width))
    if experts > 1:
        # The router; the gate and up projections of all experts in one tensor; their down projections in another.
        small += [
            Tensors(layers, experts, experts * elements) for elements in (width, 2 * width * inner, width * inner)
        ]
    embedding = [Tensors(1, shape.vocabulary, shape.embedding_weights)]
    last = [Tensors(1, width, width)]
    if not shape.tied:  # then the head is a second matrix of the same shape
        last += embedding
    return {"matrices": matrices, "small": small, EMBEDDING: embedding, HEAD: last}


def _added_tensors(step: Step) -> list[Tensors]:
    """List the tensors that were added to the loaded model."""
    if not step.adapted:
        # The step does not tell the shapes of these tensors, so they count as divisible element by element.
        return [Tensors(count, elements, elements) for count, elements in step.added]
    added = []
    for name in step.adapted:
        d_in, d_out = step.shape.linears[name]
        count = step.shape.layers * step.shape.copies(name)
        added.append(Tensors(count, step.rank, step.rank * d_in))  # A
        added.append(Tensors(count, d_out, step.rank * d_out))  # B
        if step.dora:
            added.append(Tensors(count, d_out, d_out))  # the magnitudes
    return added


def _as_stored(step: Step, matrices: list[Tensors]) -> tuple[list[Tensors], float]:
    """Return the blocks' matrices as they are stored, and the bytes of one stored element."""
    if step.elements_per_byte == 1:
        return matrices, step.block_weight_bytes / elements_of(matrices)
    # A 4-bit matrix is stored as one column of bytes, with two elements in each byte.
    packed = []
    for one in matrices:
        bytes_of_one = divided_up(one.elements, step.elements_per_byte)
        packed.append(Tensors(one.many, bytes_of_one, bytes_of_one))
    return packed, 1


def elements_of(tensors: Iterable[Tensors]) -> int:
    """Return the elements of all these tensors."""
    return sum(one.many * one.elements for one in tensors)


_FIXED_LINES = 6
"""How many lines of the first moment of ``bill/moments.py`` are alive in the whole forward pass: the first ones.

Five come from ``moments._fixed`` (three of weights, optimizer states, batch), the sixth is the gradients of earlier
micro-batches. The seventh is the saved activations of all blocks. Unless blocks are checkpointed, this moment's "batch"
has no attention mask, so the moments that are made of these lines lack it.
"""


def sharded_moments(step: Step, processes: int, reduce: str) -> list[Moment]:
    """Return the moments of a step under FSDP2: weights, gradients and states as shards, plus what is whole.

    Args:
        step: the step that one process computes, with its own micro-batches.
        processes: the number of processes, N.
        reduce: when gradients are reduced, ``micro_batch`` or ``step``.

    Returns:
        The moments of ``bill/moments.py``, and those at which weights arrive or gradients are reduced; each as it is in
        the micro-batch in which it is largest.
    """
    found = sizes(step, processes)
    alone = replace(step, waiting_gradient_bytes=0)  # no whole gradients are there from before
    if reduce == "micro_batch" or step.micro_batches == 1:
        passes = [_Pass(alone, found, processes, shards_before=step.micro_batches > 1)]
    else:
        # The last micro-batch reduces what the others left whole. With two, none is between the first and the last.
        passes = [_Pass(alone, found, processes, reduces=False), _Pass(step, found, processes)]
        if step.micro_batches > 2:
            passes.append(_Pass(step, found, processes, reduces=False))
    largest = dict[str, Moment]()
    for one in passes:
        for moment in one.moments():
            if moment.name not in largest or moment.bytes > largest[moment.name].bytes:
                largest[moment.name] = moment
    return [*largest.values(), smaller(moments(step)[-1], found.shards)]


@dataclass(frozen=True)
class _Pass:
    """The forward and backward pass of one micro-batch.

    Attributes:
        step: its step; whole gradients are there from before if it says so (``accumulates``).
        sizes: of what is sharded and gathered.
        processes: the number of processes, N.
        reduces: whether gradients are reduced in this pass.
        shards_before: whether the shards of all gradients are there from an earlier micro-batch.
    """

    step: Step
    sizes: Sizes
    processes: int
    reduces: bool = True
    shards_before: bool = False

    def moments(self) -> list[Moment]:
        """Return the moments of the pass."""
        by_name = {moment.name: moment for moment in moments(self.step)[:-1]}
        found = [*self._arrivals(by_name), *self._reductions(by_name)]
        in_runs = set[str]()
        for highest, lowest, above, blocks in self._runs(by_name):
            in_runs |= {highest, lowest}
            found += self._of_run(by_name[highest], by_name[lowest], above, blocks)
        block = self.sizes.block
        chunked = "last norm" in by_name  # then the loss makes its gradients in the forward pass
        for name, moment in by_name.items():
            if name in in_runs:
                continue
            if name == "forward":
                found.append(self._with(moment, 2 * block.weights, self._before(moment)))
            elif name == "embedding":
                found.append(self._at_the_embedding(moment))
            elif name in ("frozen block", "last frozen block"):  # of a side network
                gradients = self.sizes.shards["gradients"] if self.reduces else self._before(moment)
                found.append(self._with(moment, 2 * block.weights, gradients, 2 * block.gradients * self.reduces))
            else:
                weights = self._around_the_head(name, chunked)
                found.append(self._with(moment, weights, self._before(moment)))
        return found

    @property
    def _waiting_head(self) -> int:
        """The gradient of a tied head, which waits for that of the embedding [bytes]."""
        return self.sizes.of_ends * self.step.shape.tied

    def _before(self, moment: Moment) -> int:
        """Return the gradients of earlier micro-batches, whole or as shards [bytes]."""
        if self.shards_before:
            return self.sizes.shards["gradients"]
        return sum(line.bytes for line in moment.lines if line.name == "gradients")

    def _around_the_head(self, name: str, chunked: bool) -> int:
        """Return what is whole of head and blocks when the forward pass ends and the backward pass begins [bytes]."""
        head = self.sizes.of(HEAD).weights
        if self.step.shape.tied:
            # The last block's buffer: freed when the forward pass ends, fetched again when the backward pass begins.
            return self.sizes.block.weights
        if name == "log-softmax" or (name == "loss" and chunked):
            return 2 * head  # weights and buffer, in the forward pass
        if name == "loss":
            return head
        return head + self.sizes.block.weights  # the last block is fetched ahead

    def _runs(self, by_name: dict[str, Moment]) -> list[tuple[str, str, int, int]]:
        """Return the runs of blocks that are alike, from the last: highest, lowest, blocks above it, its blocks."""
        blocks = self.step.learning_blocks
        if "first block" not in by_name:
            return []
        if "first kept block" not in by_name:
            return [("last block", "first block", 0, blocks)]
        kept = self.step.staying_blocks
        return [
            ("last block", "first kept block", 0, kept),
            ("last checkpointed block", "first block", kept, blocks - kept),
        ]

    def _of_run(self, highest: Moment, lowest: Moment, above: int, blocks: int) -> list[Moment]:
        """Return the moments of a run of blocks: of both ends, and of the blocks next to these.

        From one block to the next, saved activations become fewer and the shards of gradients more, so one of the ends
        needs most; but at the very end FSDP2 holds fewer buffers than one block before it.
        """
        end = above + blocks - 1
        found = [
            self._in_block(highest.name, highest, above, above),
            self._in_block(lowest.name, lowest, end, end),
        ]
        if blocks > 2:
            saved = (_saved(highest) - _saved(lowest)) // (blocks - 1)
            following = highest.name.replace("last", "next")
            found.append(self._in_block(following, _more_saved(highest, -saved), above, above + 1))
            second = lowest.name.replace("first", "second")
            found.append(self._in_block(second, _more_saved(lowest, saved), end, end - 1))
        return found

    def _in_block(self, name: str, moment: Moment, of: int, above: int) -> Moment:
        """Return a moment of the backward pass of a block.

        Args:
            name: the moment's name.
            moment: a moment of ``bill/moments.py``.
            of: how many blocks are above the block that it is made for, and done.
            above: how many blocks are above this one, and done.
        """
        block = self.sizes.block
        head = self.sizes.of(HEAD).gradients
        is_first = above == self.step.shape.layers - 1
        weights = block.weights * (2 - is_first)  # nothing is fetched ahead in the first block
        whole = sum(line.bytes for line in moment.lines if line.name == "gradients")
        if not self.reduces:
            return self._with(replace(moment, name=name), weights, whole)
        reducing = block.gradients if above else head
        shards = (above * block.gradients + head) // self.processes
        if self.step.accumulates:
            left = self.step.learning_blocks - above  # whole gradients from before, which this pass reduces later
            unreduced = left * block.gradients + self.sizes.of_ends
            return self._with(replace(moment, name=name), weights, shards, unreduced + reducing + self._waiting_head)
        # Of the open block's gradients those count that exist at its deepest point.
        of_embedding = self.sizes.of_ends * self.step.trains_all
        own = min(max(whole - of_embedding - of * block.gradients, 0), block.gradients)
        if self.shards_before:
            shards = self.sizes.shards["gradients"]
        return self._with(replace(moment, name=name), weights, shards, own + reducing + self._waiting_head)

    def _at_the_embedding(self, moment: Moment) -> Moment:
        """Return the moment at which the embedding gets its gradient, and that of the first block is being reduced."""
        whole = sum(line.bytes for line in moment.lines if line.name == "gradients")
        if not self.reduces:
            return self._with(moment, 0, whole)
        shards = self.sizes.shards["gradients"]
        if not self.shards_before:
            shards -= self.sizes.of_ends // self.processes
        return self._with(moment, 0, shards, self.sizes.block.gradients + self.sizes.of_ends)

    def _arrivals(self, by_name: dict[str, Moment]) -> list[Moment]:
        """Return the moments of the forward pass at which weights arrive, beside the buffer of the group before."""
        block = self.sizes.block.weights
        head = self.sizes.of(HEAD).weights
        # Below all blocks; an embedding of its own has no more weights than the head, which arrives later.
        first = self.sizes.of(EMBEDDING).weights or self.sizes.root
        before = next(iter(by_name.values()))
        gradients = self._before(before)
        others = _saved(by_name["last block"]) if "last block" in by_name else 0
        # Weights and buffer of the group that arrives, and the buffer of the group before: FSDP2 frees that only when
        # all weights have been copied out of the new one.
        found = [
            self._beside("first block arrives", before, 0, first + 2 * block, gradients),
            self._beside("last block arrives", before, others, 3 * block, gradients),
        ]
        if not self.step.shape.tied:
            found.append(self._beside("head arrives", before, _saved(before), block + 2 * head, gradients))
        return found

    def _reductions(self, by_name: dict[str, Moment]) -> list[Moment]:
        """Return the moments at which gradients outside the blocks are copied into the buffer that is reduced."""
        if not self.reduces:
            return []
        before = next(iter(by_name.values()))
        head = self.sizes.of(HEAD).gradients
        block = self.sizes.block
        shards = self.sizes.shards["gradients"]
        at_head = self._before(before) + head * (1 + (not self.step.accumulates))
        at_end = shards
        if not self.shards_before:
            at_end -= self.sizes.of_ends // self.processes
        found = []
        if head:
            found.append(self._beside("head is reduced", before, _saved(before), block.weights, at_head))
        if self.sizes.of_ends:
            at_end += 2 * self.sizes.of_ends
            found.append(self._beside("embedding is reduced", before, 0, 0, at_end))
        return found

    def _beside(self, name: str, before: Moment, saved: int, weights: int, gradients: int) -> Moment:
        """Return a moment with what is alive in the whole step, saved activations, and a hidden state."""
        step = self.step
        hidden = step.all_tokens * step.shape.width * step.hidden_itemsize
        lines = (
            Line(_SAVED, saved, "of the blocks that have run"),
            Line("hidden state", hidden, "of the last group, or its gradient"),
        )
        return self._with(Moment(name, (*before.lines[:_FIXED_LINES], *lines)), weights, gradients)

    def _with(self, moment: Moment, weights: int, gradients: int, whole: int = 0) -> Moment:
        """Return a moment with weights and states as shards, and with what FSDP2 holds whole.

        Args:
            moment: a moment of ``bill/moments.py``.
            weights: whole weights and buffers, without the root's [bytes].
            gradients: the line "gradients" [bytes].
            whole: gradients that are not reduced yet, besides that line [bytes].
        """
        open_group = weights + self.sizes.root
        state = {name: size for name, size in self.sizes.shards.items() if name != "gradients"}
        lines = [line for line in smaller(moment, state).lines if line.name != "gradients"]
        lines += [
            Line("gradients", gradients, "fp32, as shards, or whole until they are reduced"),
            Line("weights: unsharded", open_group, "of the open group, its buffer, and what stays whole"),
            Line("gradients: unsharded", whole, "before and during the reduce-scatter"),
        ]
        return Moment(moment.name, tuple(lines))


_SAVED = "saved activations"


def _saved(moment: Moment) -> int:
    """Return the bytes of the saved activations of other blocks."""
    return sum(line.bytes for line in moment.lines if line.name == _SAVED)


def _more_saved(moment: Moment, more: int) -> Moment:
    """Return a moment with so many more bytes of saved activations."""
    lines = (replace(line, bytes=line.bytes + more * (line.name == _SAVED)) for line in moment.lines)
    return Moment(moment.name, tuple(lines))
