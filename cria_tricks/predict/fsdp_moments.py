r"""Estimate the memory of one process under FSDP2 (torch 2.13), that is, ZeRO-3 applied group by group.

On top of the shards (``bill/fsdp_bytes.py``) come tensors that are whole for a while:

- The weights of the open group, whose forward or backward pass is running. FSDP2 gathers a group into one flat buffer
  and copies each weight out of it. In the forward pass the buffer lives until the next group has arrived. So an open
  group is there as weights and as buffer, and a group that arrives meets the buffer of the one before. In the backward
  pass the buffer of the block that comes next is alive instead, because its weights are fetched ahead.
- The last norm and the head, until their backward pass has ended. In a tied model the root, which has the embedding as
  well: from the beginning of the forward pass to the end of the backward pass.
- The gradients of the open group, and those of the group that ran just before, which are being reduce-scattered.
- With ``parallel.reduce=step`` nothing is reduced before the last micro-batch, so until then all gradients are whole.

Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py.
"""

from dataclasses import dataclass, replace

from cria_tricks.bill.facts import StepFacts
from cria_tricks.bill.fsdp_bytes import EMBEDDING, ENDS, HEAD, PROMPT, Gathered, Sizes, sizes
from cria_tricks.bill.lines import Line, Moment, smaller
from cria_tricks.bill.moments import moments

_FIXED_LINES = 6
"""How many lines of the first moment of ``bill/moments.py`` are alive in the whole forward pass: the first ones.

Five come from ``moments._fixed`` (three of weights, optimizer states, batch), the sixth is the gradients of earlier
micro-batches. The seventh is the saved activations of all blocks. Unless blocks are checkpointed, this moment's "batch"
has no attention mask, so the moments that are made of these lines lack it.
"""


def sharded_moments(memory: StepFacts, processes: int, reduce: str, micro_batches: int) -> list[Moment]:
    """Return the moments of a step under FSDP2: weights, gradients and states as shards, plus what is whole.

    Args:
        memory: the facts of the step that one process computes, with its own micro-batches.
        processes: the number of processes, N.
        reduce: when gradients are reduced, ``micro_batch`` or ``step``.
        micro_batches: how many micro-batches of a step one process computes.

    Returns:
        The moments of ``bill/moments.py``, and those at which weights arrive or gradients are reduced; each as it is in
        the micro-batch in which it is largest.
    """
    found = sizes(memory, processes)
    alone = replace(memory, waiting_gradient_bytes=0)  # no whole gradients are there from before
    if reduce == "micro_batch" or micro_batches == 1:
        passes = [_Pass(alone, found, processes, shards_before=micro_batches > 1)]
    else:
        # The last micro-batch reduces what the others left whole. With two, none is between the first and the last.
        passes = [_Pass(alone, found, processes, reduces=False), _Pass(memory, found, processes)]
        if micro_batches > 2:
            passes.append(_Pass(memory, found, processes, reduces=False))
    largest = dict[str, Moment]()
    for one in passes:
        for moment in one.moments():
            if moment.name not in largest or moment.bytes > largest[moment.name].bytes:
                largest[moment.name] = moment
    return [*largest.values(), smaller(moments(memory)[-1], found.shards)]


@dataclass(frozen=True)
class _Pass:
    """The forward and backward pass of one micro-batch.

    Attributes:
        memory: its facts; whole gradients are there from before if they say so (``accumulates``).
        sizes: of what is sharded and gathered.
        processes: the number of processes, N.
        reduces: whether gradients are reduced in this pass.
        shards_before: whether the shards of all gradients are there from an earlier micro-batch.
    """

    memory: StepFacts
    sizes: Sizes
    processes: int
    reduces: bool = True
    shards_before: bool = False

    def moments(self) -> list[Moment]:
        """Return the moments of the pass."""
        steps = {moment.name: moment for moment in moments(self.memory)[:-1]}
        found = [*self._arrivals(steps), *self._reductions(steps)]
        in_runs = set[str]()
        for highest, lowest, above, blocks in self._runs(steps):
            in_runs |= {highest, lowest}
            found += self._of_run(steps[highest], steps[lowest], above, blocks)
        block = self.sizes.block
        in_forward = "last norm" in steps  # the chunked loss makes its gradients in the forward pass
        for name, moment in steps.items():
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
                weights = self._around_the_head(name, name == "log-softmax" or (name == "loss" and in_forward))
                found.append(self._with(moment, weights, self._before(moment)))
        return found

    def _outside(self, name: str) -> Gathered:
        return self.sizes.outside.get(name, Gathered(0, 0))

    @property
    def _ends(self) -> Gathered:
        """The group whose gradients come last: that of embedding and head if they are tied, else the embedding."""
        return self._outside(ENDS if self.memory.shape.tied else EMBEDDING)

    @property
    def _root(self) -> int:
        """What is in no group of its own, and so is whole in both passes [bytes]."""
        return self._outside(ENDS if self.memory.shape.tied else PROMPT).weights

    def _waiting_head(self) -> int:
        """Return the gradient of a tied head, which waits for that of the embedding [bytes]."""
        return self._ends.gradients * self.memory.shape.tied

    def _before(self, moment: Moment) -> int:
        """Return the gradients of earlier micro-batches, whole or as shards [bytes]."""
        if self.shards_before:
            return self.sizes.shards["gradients"]
        return sum(line.bytes for line in moment.lines if line.name == "gradients")

    def _around_the_head(self, name: str, in_forward: bool) -> int:
        """Return what is whole of head and blocks when the forward pass ends and the backward pass begins [bytes]."""
        head = self._outside(HEAD).weights
        if self.memory.shape.tied:
            # The last block's buffer: freed when the forward pass ends, fetched again when the backward pass begins.
            return self.sizes.block.weights
        if in_forward:
            return 2 * head  # weights and buffer
        if name == "loss":
            return head
        return head + self.sizes.block.weights  # the last block is fetched ahead

    def _runs(self, steps: dict[str, Moment]) -> list[tuple[str, str, int, int]]:
        """Return the runs of blocks that are alike, from the last: highest, lowest, blocks above it, its blocks."""
        blocks = self.memory.learning_blocks
        if "first block" not in steps:
            return []
        if "first kept block" not in steps:
            return [("last block", "first block", 0, blocks)]
        kept = self.memory.staying_blocks
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
        head = self._outside(HEAD).gradients
        is_first = above == self.memory.shape.layers - 1
        weights = block.weights * (2 - is_first)  # nothing is fetched ahead in the first block
        whole = sum(line.bytes for line in moment.lines if line.name == "gradients")
        if not self.reduces:
            return self._with(replace(moment, name=name), weights, whole)
        reducing = block.gradients if above else head
        shards = (above * block.gradients + head) // self.processes
        if self.memory.accumulates:
            left = self.memory.learning_blocks - above  # whole gradients from before, which this pass reduces later
            unreduced = left * block.gradients + self._ends.gradients
            return self._with(replace(moment, name=name), weights, shards, unreduced + reducing + self._waiting_head())
        # Of the open block's gradients those count that exist at its deepest point.
        of_embedding = self._ends.gradients * self.memory.trains_all
        own = min(max(whole - of_embedding - of * block.gradients, 0), block.gradients)
        if self.shards_before:
            shards = self.sizes.shards["gradients"]
        return self._with(replace(moment, name=name), weights, shards, own + reducing + self._waiting_head())

    def _at_the_embedding(self, moment: Moment) -> Moment:
        """Return the moment at which the embedding gets its gradient, and that of the first block is being reduced."""
        whole = sum(line.bytes for line in moment.lines if line.name == "gradients")
        if not self.reduces:
            return self._with(moment, 0, whole)
        shards = self.sizes.shards["gradients"]
        if not self.shards_before:
            shards -= self._ends.gradients // self.processes
        return self._with(moment, 0, shards, self.sizes.block.gradients + self._ends.gradients)

    def _arrivals(self, steps: dict[str, Moment]) -> list[Moment]:
        """Return the moments of the forward pass at which weights arrive, beside the buffer of the group before."""
        block = self.sizes.block.weights
        embedding = self._outside(EMBEDDING).weights
        head = self._outside(HEAD).weights
        before = next(iter(steps.values()))
        gradients = self._before(before)
        others = _saved(steps["last block"]) if "last block" in steps else 0
        # Weights and buffer of the group that arrives, and the buffer of the group before: FSDP2 frees that only when
        # all weights have been copied out of the new one.
        found = [
            self._beside("first block arrives", before, 0, (embedding or self._root) + 2 * block, gradients),
            self._beside("last block arrives", before, others, 3 * block, gradients),
        ]
        if not self.memory.shape.tied:
            found.append(self._beside("embedding arrives", before, 0, 2 * embedding, gradients))
            found.append(self._beside("head arrives", before, _saved(before), block + 2 * head, gradients))
        return found

    def _reductions(self, steps: dict[str, Moment]) -> list[Moment]:
        """Return the moments at which gradients outside the blocks are copied into the buffer that is reduced."""
        if not self.reduces:
            return []
        before = next(iter(steps.values()))
        head = self._outside(HEAD).gradients
        block = self.sizes.block
        shards = self.sizes.shards["gradients"]
        at_head = self._before(before) + head * (1 + (not self.memory.accumulates))
        at_end = shards
        if not self.shards_before:
            at_end -= self._ends.gradients // self.processes
        found = []
        if head:
            found.append(self._beside("head is reduced", before, _saved(before), block.weights, at_head))
        if self._ends.gradients:
            at_end += 2 * self._ends.gradients
            found.append(self._beside("embedding is reduced", before, 0, 0, at_end))
        return found

    def _beside(self, name: str, before: Moment, saved: int, weights: int, gradients: int) -> Moment:
        """Return a moment with what is alive in the whole step, saved activations, and a hidden state."""
        memory = self.memory
        hidden = memory.all_tokens * memory.shape.width * memory.hidden_itemsize
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
        state = {name: size for name, size in self.sizes.shards.items() if name != "gradients"}
        lines = [line for line in smaller(moment, state).lines if line.name != "gradients"]
        lines += [
            Line("gradients", gradients, "fp32, as shards, or whole until they are reduced"),
            Line("weights: unsharded", weights + self._root, "of the open group, its buffer, and what stays whole"),
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
